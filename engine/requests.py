"""What a caller asks of the engine and what it hears back, free of gRPC and of text processing.

    GenerationRequest  ->  Engine.generate  ->  Chunk, Chunk, ..., Final

`engine/server/wire.py` turns protobuf into these and back; scripts and tests build them directly.
Importing this module needs numpy only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.acceptance import LENGTH, STOP, Limits, SamplingParams
from engine.errors import InvalidRequest
from engine.target import Logprobs, TargetInfo, TargetStatus

if TYPE_CHECKING:
    from engine.text import Tokenizer

MAX_TOKENS = 128
"""New tokens when a request does not say."""
MAX_STOPS = 16
"""Stop strings, and stop token ids, of one request."""
MAX_STOP_BYTES = 256
"""UTF-8 bytes of one stop string: what the decoder may have to hold back."""
MAX_LOGPROBS = 20
"""Alternatives per token."""
MAX_NODES = 256
"""Candidates in one tree that a request may ask for; the worker's own limit may be lower and cuts silently."""
MAX_NAMES = 16
"""Corpora, and sources, that one request may name."""


@dataclass(frozen=True)
class SpeculationOptions:
    """How drafts are made for one request. Whatever it says, the output is the same.

    1. `max_nodes` bounds the candidates of one tree; None leaves it to the server; 0 is plain decoding.
    2. `corpora` names the datastores to draft from; None is the server's default, () none.
    3. `require_corpus`: refuse the request if one of its corpora is unusable, instead of serving without it.
    4. `sources` names the drafters to use; None is all the server has, () none.
    5. `prediction` is the caller's guess at the answer ("" none).
    6. `trace`: every chunk tells how its step came about.
    7. `use_history`: draft from what the tenant's earlier answers said. `learn`: keep what this request teaches for later ones;
       False keeps nothing of it. None leaves either to the server.
    """

    enabled: bool = True
    max_nodes: int | None = None
    corpora: tuple[str, ...] | None = None
    require_corpus: bool = False
    sources: tuple[str, ...] | None = None
    prediction: str = ""
    trace: bool = False
    use_history: bool | None = None
    learn: bool | None = None

    def validate(self) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        if self.max_nodes is not None and not 0 <= self.max_nodes <= MAX_NODES:
            raise InvalidRequest(f"must be between 0 and {MAX_NODES}: {self.max_nodes}", "speculation.max_nodes")
        for name in ("corpora", "sources"):
            values = getattr(self, name) or ()
            if len(values) > MAX_NAMES:
                raise InvalidRequest(f"at most {MAX_NAMES} may be named: {len(values)}", f"speculation.{name}")
            if len(set(values)) < len(values):
                raise InvalidRequest(f"names one twice: {', '.join(values)}", f"speculation.{name}")
        if self.require_corpus and self.corpora == ():
            raise InvalidRequest("is set, but no corpus is named; name one in corpora", "speculation.require_corpus")


@dataclass(frozen=True)
class GenerationRequest:
    """One request for text.

    1. `prompt` is text, or int32 [n] token ids, used as they are; not empty.
    2. `max_tokens` >= 1 new tokens, fewer if the context ends before. 0 <= `min_tokens` <= `max_tokens`: before so many are out
       no stop id is chosen and no stop string ends the text.
    3. `stop`: at most MAX_STOPS non-empty strings of at most MAX_STOP_BYTES bytes. Text ends before the first to appear, or
       after it if `include_stop`. Ids, logprobs, usage and statistics end with the token that completes it.
    4. `stop_token_ids`: at most MAX_STOPS; they and the model's end-of-sequence ids (unless `ignore_eos`) end the sequence.
       The stop id is the last of the ids; its text is left out unless it is an ordinary token and `include_stop` is set.
    5. `num_logprobs`: -1 none, 0 the emitted token's only, k <= MAX_LOGPROBS the k likeliest beside it.
    6. `sampling.seed` is decided: a caller who gives none gets a fresh one before the request is made.
    7. `tenant` is whose text this is; nothing learned from it is shown to another.
    8. `request_id` is the caller's word for the request in logs ("" none).
    """

    tenant: str
    prompt: str | NDArray[np.int32]
    max_tokens: int = MAX_TOKENS
    min_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    num_logprobs: int = -1
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    request_id: str = ""

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field out of range. Whether the prompt fits the context, the target says."""
        if not len(self.prompt):
            raise InvalidRequest("must not be empty; give text, token ids or messages", "prompt")
        if not isinstance(self.prompt, str) and not _all_below(self.prompt, vocab_size):
            raise InvalidRequest(f"has a token id outside [0, {vocab_size})", "prompt.token_ids")
        _reraise(Limits(self.max_tokens, self.min_tokens).validate)
        _reraise(lambda: self.sampling.validate(vocab_size))
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings: {len(self.stop)}", "stop")
        for i, text in enumerate(self.stop):
            if not text:
                raise InvalidRequest("must not be empty; leave it out", f"stop[{i}]")
            if len(text.encode()) > MAX_STOP_BYTES:
                raise InvalidRequest(f"at most {MAX_STOP_BYTES} bytes: {len(text.encode())}", f"stop[{i}]")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop token ids: {len(self.stop_token_ids)}", "stop_token_ids")
        for i, token in enumerate(self.stop_token_ids):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(f"token id outside [0, {vocab_size}): {token}", f"stop_token_ids[{i}]")
        if not -1 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"must be between 0 and {MAX_LOGPROBS}: {self.num_logprobs}", "logprobs")
        self.speculation.validate()

    def limits(self, eos_ids: tuple[int, ...]) -> Limits:
        """When the target ends the sequence; `eos_ids` are the model's end-of-sequence ids."""
        stop_ids = frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))
        return Limits(self.max_tokens, self.min_tokens, stop_ids)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-softmax of the raw logits for one emitted token: its own, and (id, logprob) of the likeliest, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of(logprobs: Logprobs) -> tuple[TokenLogprob, ...]:
        """One for every token of a step."""
        return tuple(
            TokenLogprob(float(chosen), tuple(zip(ids.tolist(), top.tolist(), strict=True)))
            for chosen, ids, top in zip(logprobs.chosen, logprobs.top_ids, logprobs.top, strict=True)
        )


@dataclass(frozen=True)
class Chunk:
    """Some new text, at most one step's worth.

    1. `text` is whole characters; it may be empty while `tokens` are not (an unfinished character, the beginning of what may
       become a stop string), and hold text of earlier tokens.
    2. `masks` has one number per token: bit s is set if source s drafted it, 0 if the target alone said it.
    3. `logprobs` has one entry per token, or is None when not asked for.
    4. `sources` names source s at index s: the same in every chunk of a request.
    5. `sizes` has one number per token: the bytes of text it stands for, 0 for a control token.
    6. `trace` is how the step came about, if asked for.
    """

    text: str
    tokens: tuple[int, ...]
    masks: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    sources: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    trace: StepTrace | None = None


@dataclass(frozen=True)
class TraceNode:
    """A node of a traced tree.

    1. `text` is the token's bytes, maybe a part of a character; a control token's are its name.
    2. `parent` is an index into the nodes, -1 for the root; `prob` is the estimated probability of the path from the root.
    3. `mask` has bit s set if source s drafted it. `verified`: it had a row in the pass. `accepted`: it is in the answer.
    """

    token: int
    text: bytes
    parent: int
    prob: float
    mask: int
    verified: bool
    accepted: bool


@dataclass(frozen=True)
class StepTrace:
    """How one step came about.

    1. `nodes` are the root and the candidates, best first; `num_lookahead` rows of the pass were neither.
    2. `texts` has the bytes of each token emitted: the accepted candidates' and the one that the target said itself.
    3. `draft_seconds` went into drafting and merging, `step_seconds` into waiting for the target, `pass_seconds` of them into
       its pass.
    4. `costs` is the cost curve by which the size of the tree was chosen, as (rows, seconds).
    """

    nodes: tuple[TraceNode, ...]
    texts: tuple[bytes, ...]
    num_lookahead: int
    draft_seconds: float
    step_seconds: float
    pass_seconds: float
    costs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SourceStats:
    """What one source did for one request.

    `proposed` nodes that were verified, `accepted` of them, `unique` accepted that no other source had proposed, `errors`
    and `late` steps on which it was left out, `seconds` of drafting, and the share of `trust` its drafts have earned. `held`
    tokens of the answer were in its own drafts, verified or not, `held_alone` of them in no other source's: see
    `session.Tally`.
    """

    name: str
    proposed: int = 0
    accepted: int = 0
    unique: int = 0
    errors: int = 0
    late: int = 0
    seconds: float = 0.0
    trust: float = 0.0
    held: int = 0
    held_alone: int = 0


@dataclass(frozen=True)
class GenerationStats:
    """What a request cost. All counts end with the last token the caller got.

    1. `num_steps` verification passes, `num_nodes` candidates verified in them (roots not counted), `num_accepted` emitted.
    2. `draft_seconds` drafting and merging, `step_seconds` waiting for the target's steps, `prefill_seconds` before the first.
    3. `corpora`: (name, version) drafted from. `warnings`: what the request was served without, in plain words.
    4. `num_expected`: candidates that the estimates promised would be accepted, of those verified; `calibration_error` and
       `log_loss` (nats), means over the candidates whose parent was accepted: see `session.Tally`.
    5. `prefix_tokens_reused` of the prompt's first tokens were not read: an earlier request of the tenant began alike.
    """

    sources: tuple[SourceStats, ...] = ()
    num_steps: int = 0
    num_nodes: int = 0
    num_accepted: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    corpora: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    num_expected: float = 0.0
    calibration_error: float = 0.0
    log_loss: float = 0.0
    prefix_tokens_reused: int = 0


@dataclass(frozen=True)
class Final:
    """The last event of a request.

    1. `finish` is "stop" or "length". With "stop", at most one of `stop_string` and `stop_token` says what stopped it.
    2. `seed` is the one used, so that the request can be repeated.
    """

    finish: str
    prompt_tokens: int
    completion_tokens: int
    seed: int
    stop_string: str | None = None
    stop_token: int | None = None
    statistics: GenerationStats = field(default_factory=GenerationStats)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per verification pass; 0 before the first."""
        return self.completion_tokens / self.statistics.num_steps if self.statistics.num_steps else 0.0

    def validate(self) -> None:
        """Raise ValueError if an invariant does not hold."""
        if self.finish not in (STOP, LENGTH):
            raise ValueError(f"finish is neither stop nor length: {self.finish!r}")
        if self.stop_string is not None and self.stop_token is not None:
            raise ValueError(f"stopped by a string and by a token: {self.stop_string!r}, {self.stop_token}")


GenerationEvent = Chunk | Final


@dataclass(frozen=True)
class CorpusInfo:
    """A corpus of a tenant, as it stands. `problem` says why it is not usable ("" when it is)."""

    name: str
    version: str
    documents: int
    tokens: int
    fingerprint: str
    usable: bool = True
    problem: str = ""


class Engine(Protocol):
    """What the gRPC services need of the application (`engine.app`)."""

    @property
    def info(self) -> TargetInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the drafters this server runs."""
        ...

    async def status(self) -> TargetStatus:
        """How the workers stand, all together."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """An async generator of Chunks and one Final. Closing it early frees everything within one step.

        Raises errors of `engine.errors`, before the first event where the request is at fault.
        """
        ...

    async def corpora(self, tenant: str) -> list[CorpusInfo]:
        """All corpora of a tenant, by name; an empty list if it has none. Files are read on threads."""
        ...


def _all_below(ids: NDArray[np.int32], vocab_size: int) -> bool:
    return bool(np.all((ids >= 0) & (ids < vocab_size)))


def _reraise(validate: Callable[[], None]) -> None:
    """Run a validate() of the pure core, whose ValueErrors read "field: what is wrong", as InvalidRequest."""
    try:
        validate()
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        raise InvalidRequest(message, name) from None
