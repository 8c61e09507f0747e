"""What is accepted: sample and match, the one rule of losslessness.

# Theory of operation

At every node on the walked path the target makes its own choice

    x = argmax_v ( log target_probs[v] + gumbel(seed, position, v) )          temperature 0: plain argmax, ties to the lowest id

after all processors, with that node's own prefix; x is emitted, and the walk goes down if x is a child of the node, else the
step ends. The noise is a pure function of (request seed, absolute position, token id), so x is a function of (seed, prefix)
alone: the tree decides only when the next pass happens, never what is said. Hence the emitted text is exact for every
temperature and identical under any set of drafts, none among them. For a child set C the chance of going down is target(C); no
lossless rule has a larger one for drafts fixed before verification. (The coupling is that of Daliri et al., arXiv 2408.07978.)

# Rules

    1  every step emits len(path) + 1 tokens: those of the accepted path, then the bonus token
    2  a stop id, once at least `min_tokens` are out, is emitted and ends the sequence: finish "stop"
    3  before that, stop ids cannot be chosen (they are masked as a processor)
    4  the `max_tokens`-th token ends the sequence: finish "length", unless rule 2 applies to it
    5  only candidates are entered, never lookahead rows

Everything is pure: the walk is handed `choose`, which knows logits, processors and noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.tree import CANDIDATE, CandidateTree

_MOST_BIAS = 1e30
"""Added to a float32 logit, it stays finite."""

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How the target chooses, per request. Processors run in this order, which is that of transformers:

    repetition, presence and frequency penalty, logit bias, stop-id mask, then temperature, top_k, top_p, min_p.

    1. `temperature` >= 0; 0 is greedy (ties to the lowest id), and then top_k, top_p, min_p and seed have no effect.
    2. `top_k` >= 0, 0 is off; ties at the k-th place go to the lower id. 0 < `top_p` <= 1, 1 is off. 0 <= `min_p` < 1,
       0 is off.
    3. `repetition_penalty` > 0 over prompt and answer (1 is off); `presence_penalty`, `frequency_penalty` in [-2, 2] over
       the answer.
    4. `logit_bias`: (token id, number added to its logit) pairs, ids distinct, numbers in [-1e30, 1e30].
    5. `seed`: unsigned 64 bits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError("field: what is wrong") for the first value out of range."""
        checks = [
            ("temperature", np.isfinite(self.temperature) and self.temperature >= 0, "must be 0 or above"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "must be at least 0 and below 1"),
            ("repetition_penalty", np.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "must be above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be between -2 and 2"),
            ("seed", 0 <= self.seed < 1 << 64, "must be between 0 and 2^64 - 1"),
            ("logit_bias", all(0 <= i < vocab_size for i, _ in self.logit_bias), f"has a token id outside [0, {vocab_size})"),
            ("logit_bias", all(abs(b) <= _MOST_BIAS for _, b in self.logit_bias), "has a bias outside [-1e30, 1e30]"),
            ("logit_bias", len({i for i, _ in self.logit_bias}) == len(self.logit_bias), "names a token id twice"),
        ]
        for name, ok, message in checks:
            if not ok:
                raise ValueError(f"{name}: {message}: {getattr(self, name)}")


@dataclass(frozen=True)
class Limits:
    """When a sequence ends, apart from stop strings, which only the engine (who knows text) can see.

    1. `max_tokens` >= 1 new tokens; 0 <= `min_tokens` <= `max_tokens`.
    2. `stop_ids` end the sequence when chosen (end-of-sequence ids among them, unless the request ignores those).
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    def validate(self) -> None:
        """Raise ValueError("field: what is wrong") for the first value out of range."""
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1: {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens: must be between 0 and max_tokens ({self.max_tokens}): {self.min_tokens}")


@dataclass(frozen=True)
class Walk:
    """What a walk gave: `path` int32 [a] accepted nodes, `tokens` int32 [a + 1] emitted, `finish` "", "stop" or "length"."""

    path: NDArray[np.int32]
    tokens: NDArray[np.int32]
    finish: str


def walk(tree: CandidateTree, choose: Callable[[int, list[int]], int], limits: Limits, num_emitted: int) -> Walk:
    """Follow the target's choices through the tree.

    `choose(node, emitted)` returns the target's token after `node`, where `emitted` holds the tokens of this step so far (the
    path to `node`); it is called once for each node on the path, in order, so stateful processors never roll back.
    `num_emitted` is how many new tokens the sequence had before this step; it must be below limits.max_tokens.
    O(path length x children).
    """
    node, path, emitted = 0, list[int](), list[int]()
    while True:
        token = choose(node, emitted)
        emitted.append(token)
        finish = _finish(token, num_emitted + len(emitted), limits)
        child = -1 if finish else child_of(tree, node, token)
        if child < 0:
            return Walk(np.array(path, np.int32), np.array(emitted, np.int32), finish)
        path.append(child)
        node = child


def _finish(token: int, count: int, limits: Limits) -> str:
    """Rules 2 and 4, for the count-th new token."""
    if token in limits.stop_ids and count > limits.min_tokens:
        return STOP
    return LENGTH if count >= limits.max_tokens else ""


def child_of(tree: CandidateTree, node: int, token: int) -> int:
    """The candidate child of `node` with this token, -1 if there is none."""
    hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token) & (tree.roles == CANDIDATE))
    return int(hits[0]) if len(hits) else -1
