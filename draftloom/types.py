"""What the client takes and gives back: plain frozen dataclasses, no protobuf in sight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

Message = Mapping[str, str]
"""One turn of a conversation: its `role` ("system", "user" or "assistant") and its `content`."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text; token ids, used as they are; or a conversation, written out with the model's chat template."""


class Options(TypedDict, total=False):
    """Everything one may say about a generation. What is left out, or None, takes the server's default.

    The first group decides the text, the second how much of it is told; the third has no influence on the text at all.
    """

    max_tokens: int | None
    """Most new tokens; 128 by default."""
    min_tokens: int | None
    """Nothing ends the text before so many are out."""
    temperature: float | None
    """0, the default, takes the likeliest token."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    """Token id -> number added to its logit."""
    seed: int | None
    """Unsigned 64 bits. The same seed and request give the same text; a fresh one is drawn if there is none."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these."""
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    """Keep what stopped the text in the text."""
    ignore_eos: bool | None

    logprobs: int | None
    """0: the logprob of each token; k: also the k likeliest in its place, at most 20."""
    min_chunk_tokens: int | None
    """Streams only: gather at least so many tokens in a chunk."""

    speculation: bool | None
    """False: plain decoding."""
    max_nodes: int | None
    """Most candidates in one pass; the server finds out what pays if this is left out."""
    corpora: str | Sequence[str] | None
    """Corpora to draft from, by name; () is none, not even the server's default ones."""
    require_corpus: bool | None
    """Fail rather than serve without one of them."""
    sources: str | Sequence[str] | None
    """Sources to use, by name; all by default."""
    prediction: str | None
    """A guess at the answer, for instance the text before an edit."""
    use_history: bool | None
    """Draft from what the same tenant's earlier answers said; the server's setting, usually yes, by default."""
    learn: bool | None
    """False: nothing of this request is kept for later ones, neither its answer nor which drafts were right."""
    trace: bool | None
    """Tell in `steps` how every step came about."""

    model: str | None
    request_id: str | None
    """The caller's name for the request in the server's log."""
    timeout: float | None
    """Seconds for the whole call; then DeadlineExceeded, and the server stops. None: the client's own timeout."""


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of the target's probability, of one token and of the likeliest in its place, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TraceNode:
    """A candidate, or the root, of one step.

    1. `text` is the token's bytes, maybe a part of a character; a control token's are its name.
    2. `parent` is an index into the nodes, -1 for the root.
    3. `probability` that the target says all tokens from the root to this one, as estimated before the pass.
    4. `verified`: it had a row in the pass. `accepted`: it is in the answer.
    """

    token_id: int
    text: bytes
    parent: int
    probability: float
    sources: tuple[str, ...]
    verified: bool
    accepted: bool


@dataclass(frozen=True)
class StepTrace:
    """How one step came about.

    1. `nodes` are the root, which is the last token before the step, and the candidates in the order in which they got rows;
       `num_lookahead` rows of the pass were neither.
    2. `texts` has the bytes of each token that the step added: the accepted candidates' and the one the target said itself.
    3. `draft_seconds` went into drafting and merging, `step_seconds` into waiting for the target, `pass_seconds` of them into
       its pass.
    4. `costs` is what a pass was expected to take, as (rows, seconds); between two points it is linear.
    """

    nodes: tuple[TraceNode, ...]
    texts: tuple[bytes, ...]
    num_lookahead: int
    draft_seconds: float
    step_seconds: float
    pass_seconds: float
    costs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Chunk:
    """New text and the tokens it came with.

    1. `text` is whole characters; it may be empty, and may hold text of earlier tokens that was held back.
    2. `sources` has one entry per token: the names of the sources that drafted it; () if the target alone said it.
    3. `logprobs` has one entry per token if asked for, else none.
    4. `sizes` has one number per token: how many bytes of text it stands for, 0 for a control token.
    5. `steps` are the passes of the target that the tokens came from, if asked for with `trace`.
    """

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[tuple[str, ...], ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    sizes: tuple[int, ...] = ()
    steps: tuple[StepTrace, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class SourceStatistics:
    """What one source did: candidates verified, accepted, and accepted while no other source had them; steps it was left out
    of, having failed or come late; seconds of drafting; the share of all trust it has earned by its drafts.

    Its credit does not depend on what was verified: `num_held` tokens of the answer were in its own drafts, `num_held_alone` of
    them in no other source's."""

    name: str
    num_proposed: int
    num_accepted: int
    num_unique: int
    num_errors: int
    num_late: int
    seconds: float
    trust: float = 0.0
    num_held: int = 0
    num_held_alone: int = 0


@dataclass(frozen=True)
class Statistics:
    """What the request cost. All counts end with the last token of the answer.

    `num_steps` passes of the target verified `num_nodes` candidates, `num_accepted` of which are in the answer. `corpora` maps
    the names of the corpora drafted from to their versions; `warnings` says what the request was served without. The estimates
    promised that `num_expected` would be accepted; `calibration_error` and `log_loss` (nats) judge them candidate by candidate.
    `prefix_tokens_reused` tokens of the prompt were not read, as an earlier request of yours began alike.
    """

    num_steps: int
    num_nodes: int
    num_accepted: int
    tokens_per_step: float
    draft_seconds: float
    step_seconds: float
    prefill_seconds: float
    sources: tuple[SourceStatistics, ...]
    corpora: dict[str, str]
    warnings: tuple[str, ...]
    num_expected: float = 0.0
    calibration_error: float = 0.0
    log_loss: float = 0.0
    prefix_tokens_reused: int = 0


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    1. `finish_reason` is "stop" or "length"; with "stop", `stop_string` or `stop_token_id` says what stopped it.
    2. `sources`, `logprobs`, `sizes` and `steps` are as in Chunk.
    3. `seed` is the one used: the same request with it gives the same text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    seed: int
    statistics: Statistics
    sources: tuple[tuple[str, ...], ...]
    logprobs: tuple[TokenLogprob, ...]
    stop_string: str | None
    stop_token_id: int | None
    request_id: str
    model: str
    sizes: tuple[int, ...] = ()
    steps: tuple[StepTrace, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """What the server serves. `strict`: text with and without speculation is equal bit for bit, near-ties included."""

    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    strict: bool
    max_nodes: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class WorkerStatus:
    """How the server's workers stand, all together, and what they have done since they were started.

    `num_open` sequences are open, `num_waiting` wait. Keys and values take `num_blocks_used` of `num_blocks` blocks. Of the
    tokens of prompts `num_read` were read and `num_reused` needed no reading; `num_preempted` times a sequence lost its blocks.
    """

    num_workers: int
    num_open: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_passes: int
    num_read: int
    num_reused: int
    num_preempted: int


@dataclass(frozen=True)
class Corpus:
    """A corpus of the server. `problem` says why it is not usable."""

    name: str
    version: str
    num_documents: int
    num_tokens: int
    tokenizer_fingerprint: str
    usable: bool
    problem: str
