"""How the target chooses a token: processors with the path's own prefix, then the one rule of `engine.acceptance`.

A `Sampler` belongs to one sequence and is used lazily, along the walked path only: each processor runs once for each emitted
token, exactly as when decoding one token at a time, so nothing ever rolls back. Where logits lie on a device and the rule alone
chooses, it does so there, after all rows at once: a sequence says what it wants to know of a pass (`Ask`), and is told (`Said`)
either the logits or what they lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.acceptance import Limits, SamplingParams, walk
from engine.drafters import Feedback
from engine.errors import InvalidRequest, PromptTooLong
from engine.target import Logprobs, SequenceRequest, StepResult, TargetInfo
from engine.tree import LOOKAHEAD, CandidateTree


def check_request(request: SequenceRequest, info: TargetInfo) -> None:
    """Refuse what cannot be decoded: raises InvalidRequest or PromptTooLong, naming the field."""
    if not len(request.prompt):
        raise InvalidRequest("prompt is empty: give at least one token", "prompt")
    if request.prompt.min() < 0 or request.prompt.max() >= info.vocab_size:
        raise InvalidRequest(f"prompt has a token id outside [0, {info.vocab_size})", "prompt")
    if len(request.prompt) >= info.context_length:
        raise PromptTooLong(
            f"prompt has {len(request.prompt)} tokens, but the context of {info.model} holds {info.context_length}, "
            "answer included: shorten it",
            "prompt",
        )
    if not 0 <= request.num_emitted < len(request.prompt):
        raise InvalidRequest(
            f"must be at least 0 and below the {len(request.prompt)} tokens: {request.num_emitted}", "num_emitted"
        )
    try:
        request.sampling.validate(info.vocab_size)
        request.limits.validate()
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        raise InvalidRequest(f"{name} {message}", name) from error
    if not -1 <= request.num_logprobs <= min(info.vocab_size, 1024):
        raise InvalidRequest(f"logprobs must be between 0 and 1024: {request.num_logprobs}", "logprobs")
    stray = [i for i in request.limits.stop_ids if not 0 <= i < info.vocab_size]
    if stray:
        raise InvalidRequest(f"stop_token_ids has an id outside [0, {info.vocab_size}): {stray[0]}", "stop_token_ids")


def check_step(tree: CandidateTree, info: TargetInfo, root: int, position: int, finished: bool) -> None:
    """Refuse a tree that does not go on from the last committed token: `root`, at `position`.

    Raises RuntimeError after the sequence finished, ValueError for an ill-formed tree or another root.
    """
    if finished:
        raise RuntimeError("the sequence has finished")
    tree.validate(info.vocab_size)
    if tree.position != position or tree.tokens[0] != root:
        raise ValueError(f"the root must be the last committed token, at position {position}: {tree.position}")


@dataclass(frozen=True)
class Choices:
    """How the token after each row is chosen from its logits alone, without processors of the path: `temperature`, `top_p` and
    `min_p` float64, `top_k` int64, `seed` uint64, `position` int64 [n], as in `SamplingParams`.

    `position` is that of the token to choose: the row's own plus one.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.position)

    @staticmethod
    def of(params: SamplingParams, position: NDArray[np.int64]) -> Choices:
        """One request's, at these positions."""
        n = len(position)
        return Choices(
            np.full(n, params.temperature, np.float64),
            np.full(n, params.top_k, np.int64),
            np.full(n, params.top_p, np.float64),
            np.full(n, params.min_p, np.float64),
            np.full(n, params.seed, np.uint64),
            position,
        )

    @staticmethod
    def likeliest(num_rows: int) -> Choices:
        """The likeliest token after every row."""
        return Choices.of(SamplingParams(), np.zeros(num_rows, np.int64))

    @staticmethod
    def together(parts: Sequence[Choices]) -> Choices:
        """One after the other."""
        each = zip(*([getattr(part, field.name) for field in fields(Choices)] for part in parts), strict=True)
        return Choices(*(np.concatenate(arrays) for arrays in each))


@dataclass(frozen=True)
class Ask:
    """What a sequence wants to know of its last `num_rows` rows of a pass: the token after each by its `choices` (as many), and
    the `top_k` likeliest ids. Without `choices`, the logits.

    `choose` makes the choices when somebody asks for them: who has the logits at hand needs none.
    """

    num_rows: int
    top_k: int
    choose: Callable[[], Choices] | None

    @cached_property
    def choices(self) -> Choices | None:
        """How the token after each row is chosen; None where logits are wanted."""
        return None if self.choose is None else self.choose()


@dataclass(frozen=True)
class Said:
    """What the target said after the rows that a sequence asked about.

    1. Either `logits` float32 [n, V], which whoever has them at hand may always give,
    2. or `chosen` int64 [n] and `top_ids` int32 [n, k], what was asked for.
    """

    logits: NDArray[np.float32] | None = None
    chosen: NDArray[np.int64] | None = None
    top_ids: NDArray[np.int32] | None = None

    def likeliest(self, k: int) -> NDArray[np.int32]:
        """int32 [n, k]: the likeliest ids after every row, best first; `k` is what was asked for."""
        if self.logits is not None:
            return likeliest(self.logits, k)
        assert self.top_ids is not None
        return self.top_ids


class Sampler:
    """The choices of one sequence. Holds what processors need of the prefix, and scratch space of 17 bytes a vocabulary entry.

    The context limit acts as a limit on new tokens: `limits.max_tokens` is what fits.
    """

    def __init__(self, request: SequenceRequest, vocab_size: int, context_length: int | None = None) -> None:
        params = request.sampling
        limits = request.limits
        num_prompt = len(request.prompt) - request.num_emitted
        room = limits.max_tokens if context_length is None else context_length - num_prompt
        self.limits = Limits(min(limits.max_tokens, room), min(limits.min_tokens, room), limits.stop_ids)
        self.num_emitted = 0
        self._params = params
        self._num_logprobs = request.num_logprobs
        self._top_k = request.feedback_top_k
        self._position = num_prompt
        self._penalized = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._seen = np.unique(request.prompt[:num_prompt]) if params.repetition_penalty != 1 else np.zeros(0, np.int32)
        self._counts: dict[int, int] = {}
        self._bias_ids = np.array([i for i, _ in params.logit_bias], np.int64)
        self._bias = np.array([b for _, b in params.logit_bias], np.float32)
        self._stop_ids = np.array(sorted(limits.stop_ids), np.int64)
        self._seed = np.uint64(params.seed)
        sampled = vocab_size if params.temperature > 0 else 0
        self._scratch = (np.empty(sampled), np.empty(sampled), np.empty(sampled, np.bool_))
        self.commit(request.prompt[num_prompt:])

    def choose(self, logits: NDArray[np.float32], emitted: Sequence[int]) -> int:
        """The target's token after the committed prefix and `emitted` (this step's tokens so far), from raw logits float32 [V].

        Under 1 ms for 152,000 entries; greedy without processors some 20 microseconds. `logits` is not changed.
        """
        params = self._params
        scores = self._process(logits, emitted)
        if params.temperature == 0:
            return int(np.argmax(scores))
        position = self._position + len(emitted)
        return int(
            kernels.choose(
                scores, params.temperature, params.top_k, params.top_p, params.min_p, self._seed, position, *self._scratch
            )
        )

    def ask(self, tree: CandidateTree) -> Ask:
        """What to ask about the rows of `tree`, the next to be stepped. Logits are needed where a processor changes them
        (penalties, a bias, masked stop ids), and for log-probabilities."""
        if self._penalized or len(self._bias_ids) or self._masks(0) or self._num_logprobs >= 0:
            return Ask(len(tree), self._top_k, None)
        return Ask(len(tree), self._top_k, lambda: Choices.of(self._params, tree.position + 1 + tree.depths().astype(np.int64)))

    def step(self, tree: CandidateTree, said: Said) -> StepResult:
        """What the target said after the rows of `tree`, for what `ask` asked; the sampler moves on past it."""
        logits, chosen = said.logits, said.chosen

        def choose(node: int, emitted: list[int]) -> int:
            if logits is not None:
                return self.choose(logits[node], emitted)
            assert chosen is not None
            return int(chosen[node])

        taken = walk(tree, choose, self.limits, self.num_emitted)
        nodes = np.concatenate(([0], taken.path)).astype(np.int32)
        logprobs = None if logits is None else self.logprobs(logits[nodes], taken.tokens)
        self.commit(taken.tokens)
        return StepResult(
            path=taken.path,
            tokens=taken.tokens,
            finish=taken.finish,
            verified=np.arange(len(tree), dtype=np.int32),
            feedback=feedback(tree, said.likeliest(self._top_k)) if self._top_k > 0 else Feedback(),
            logprobs=logprobs,
        )

    def _masks(self, num_emitted: int) -> bool:
        """Whether stop ids are ruled out after so many tokens of this step."""
        return len(self._stop_ids) > 0 and self.num_emitted + num_emitted < self.limits.min_tokens

    def _process(self, logits: NDArray[np.float32], emitted: Sequence[int]) -> NDArray[np.float32]:
        masked = self._masks(len(emitted))
        if not (self._penalized or len(self._bias_ids) or masked):
            return logits
        scores = logits.copy()
        if self._penalized:
            self._penalize(scores, emitted)
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias
        if masked:
            scores[self._stop_ids] = -np.inf
        return scores

    def _penalize(self, scores: NDArray[np.float32], emitted: Sequence[int]) -> None:
        """CTRL's repetition penalty over prompt and answer; OpenAI's presence and frequency penalties over the answer."""
        params = self._params
        counts = dict(self._counts)
        for token in emitted:
            counts[token] = counts.get(token, 0) + 1
        said = np.array(list(counts), np.int64)
        if params.repetition_penalty != 1:
            seen = np.union1d(self._seen, said).astype(np.int64)
            old = scores[seen]
            penalty = np.float32(params.repetition_penalty)
            scores[seen] = np.where(old > 0, old / penalty, old * penalty)
        if len(said):
            times = np.array(list(counts.values()), np.float32)
            scores[said] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)

    def logprobs(self, logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> Logprobs | None:
        """Log-softmax of raw logits (float32 [n, V]) at `tokens` (int32 [n]), None unless the request asked for them."""
        if self._num_logprobs < 0:
            return None
        k = self._num_logprobs
        chosen = np.empty(len(tokens))
        top_ids = np.empty((len(tokens), k), np.int32)
        top = np.empty((len(tokens), k))
        for i, token in enumerate(tokens):
            row = logits[i].astype(np.float64)
            row -= row.max()
            row -= np.log(np.exp(row).sum())
            chosen[i] = row[token]
            top_ids[i] = largest(logits[i], k)
            top[i] = row[top_ids[i]]
        return Logprobs(chosen, top_ids, top)

    def commit(self, tokens: NDArray[np.int32]) -> None:
        """The tokens of a step are out: move on past them."""
        self.num_emitted += len(tokens)
        self._position += len(tokens)
        if self._penalized:
            for token in tokens.tolist():
                self._counts[token] = self._counts.get(token, 0) + 1


def largest(row: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """int32 [k], the ids of the k largest entries, best first, ties to the lowest id. O(V + k log k)."""
    if k < 1:
        return np.zeros(0, np.int32)
    k = min(k, len(row))
    bound = np.partition(row, len(row) - k)[len(row) - k]
    above = np.flatnonzero(row > bound)
    ids = np.concatenate([above, np.flatnonzero(row == bound)[: k - len(above)]])
    return ids[np.lexsort((ids, -row[ids]))].astype(np.int32)


def feedback(tree: CandidateTree, top_ids: NDArray[np.int32]) -> Feedback:
    """What the sources may learn from the verified rows: `top_ids` int32 [num_verified, k] of the tree's first nodes."""
    n = len(top_ids)
    return Feedback(
        top_ids=top_ids,
        nodes=tree.tokens[:n].copy(),
        parents=tree.parents[:n].copy(),
        num_lookahead=int(np.count_nonzero(tree.roles[:n] == LOOKAHEAD)),
    )


def prompt_rows(request: SequenceRequest) -> int:
    """For how many rows at the end of the prompt, its last token left out, feedback is due."""
    return min(request.feedback_prompt, len(request.prompt) - 1) if request.feedback_top_k > 0 else 0


def prompt_feedback(request: SequenceRequest, heard: Sequence[NDArray[np.int32]]) -> Feedback:
    """What the sources may learn from the end of the prompt: `heard` are the likeliest tokens of its `prompt_rows`, in blocks
    of int32 [m, k]."""
    if not heard:
        return Feedback()
    top_ids = np.concatenate(heard)
    n, end = len(top_ids), len(request.prompt) - 1
    return Feedback(top_ids, request.prompt[end - n : end].astype(np.int32), np.arange(-1, n - 1, dtype=np.int32))


def likeliest(logits: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """int32 [n, k], the ids of the k largest entries of every row, best first, ties to the lowest id; NaN is never among
    them unless nothing else is left.

    `logits` float32 [n, V]; k is cut to V. One scan of a row, some 20 microseconds for 150,000 entries and a small k.
    """
    out = np.empty((len(logits), min(k, logits.shape[1])), np.int32)
    kernels.likeliest(np.ascontiguousarray(logits), out)
    return out
