"""Drafts, the one tree they are merged into, and how large a tree pays.

A tree is two arrays: the parent of node i is `parents[i]`, the token at node i is `tokens[i]`. Node 0 is the *root*, the last
committed token; it is no candidate, its row in a pass yields the first new token. No node objects: arrays are cheap to send,
to mask and to merge.

This module is pure: numpy in, numpy out. It knows no I/O, clock, random state, torch or gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine import kernels

CANDIDATE = 0
LOOKAHEAD = 1
"""Roles of nodes: the walk enters candidates only; a lookahead row feeds an n-gram pool through its argmax."""

MAX_SOURCES = 63
"""Sources of one request; a node's sources are bits of an int64."""


@dataclass(frozen=True)
class Draft:
    """A proposal by one source: n nodes below the root.

    1. `tokens` int32 [n], ids of the target's vocabulary.
    2. `parents` int32 [n], the index of each node's parent in this draft, -1 for the root; parents[i] < i.
    3. `probs` float32 [n] in [0, 1]: the estimated probability that the TARGET emits the node, given that it emitted
       its parent.
    4. Siblings have different tokens, and their probs sum to at most 1 (up to rounding).
    5. `lengths` int32 [n] and `counts` int32 [n] say how good the evidence is: the length of the matching context and how often
       it was seen (0: not applicable). Calibration keeps its counts per bucket of the two.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]

    @staticmethod
    def empty() -> Draft:
        """The draft of a source that has nothing to say."""
        return _EMPTY_DRAFT

    @staticmethod
    def of(
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Sequence[float],
        lengths: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Draft:
        """A draft from plain sequences; evidence left out is taken as not applicable."""
        zeros = [0] * len(tokens)
        return Draft(
            np.asarray(tokens, np.int32),
            np.asarray(parents, np.int32),
            np.asarray(probs, np.float32),
            np.asarray(zeros if lengths is None else lengths, np.int32),
            np.asarray(zeros if counts is None else counts, np.int32),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError naming the first invariant that does not hold. Called on every draft that enters a session."""
        n = len(self.tokens)
        for name in ("parents", "probs", "lengths", "counts"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"draft has {n} tokens but {len(getattr(self, name))} {name}")
        fault = kernels.draft_fault(self.tokens, self.parents, self.probs, vocab_size)
        if fault:
            raise ValueError(f"draft breaks an invariant: {_DRAFT_FAULTS[fault]}")


_DRAFT_FAULTS = {
    1: "a token outside the vocabulary",
    2: "a parent that does not precede its node",
    3: "a probability outside [0, 1]",
    4: "two siblings with one token",
    5: "siblings whose probabilities sum to more than 1",
}

_EMPTY_DRAFT = Draft.of([], [], [])


@dataclass(frozen=True)
class LookaheadRows:
    """Rows that a source wants verified beside the candidates, to learn from what the target says after them.

    `tokens` int32 [n], ids of the target's vocabulary; `parents` int32 [n], the index of each row's parent among them, -1 for
    the root; parents[i] < i.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]

    @staticmethod
    def none() -> LookaheadRows:
        """No rows."""
        return LookaheadRows(np.zeros(0, np.int32), np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError naming the first invariant that does not hold."""
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} lookahead tokens but {len(self.parents)} parents")
        fault = kernels.rows_fault(self.tokens, self.parents, vocab_size)
        if fault:
            raise ValueError(f"a lookahead {_ROW_FAULTS[fault]}")


_ROW_FAULTS = {1: "token outside the vocabulary", 2: "parent that does not precede its row"}


@dataclass(frozen=True)
class Drafts:
    """The drafts of one step, laid end to end: draft s is [ends[s - 1], ends[s]), parents counting from its own beginning.

    1. The arrays of nodes are those of `Draft`, int32 [n] and float32 [n]; `ends` is int64 [number of drafts].
    2. An empty or missing draft has no nodes.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]
    ends: NDArray[np.int64]

    @staticmethod
    def of(drafts: Sequence[Draft | None]) -> Drafts:
        """Valid drafts, None for one that is missing. Raises ValueError for more than MAX_SOURCES."""
        if len(drafts) > MAX_SOURCES:
            raise ValueError(f"too many drafts for one tree: {len(drafts)}, at most {MAX_SOURCES}")
        there = [_EMPTY_DRAFT if draft is None else draft for draft in drafts]
        ends = np.array([*accumulate(map(len, there))], np.int64)
        there = there or [_EMPTY_DRAFT]
        return Drafts(
            np.concatenate([draft.tokens for draft in there]),
            np.concatenate([draft.parents for draft in there]),
            np.concatenate([draft.probs for draft in there]),
            np.concatenate([draft.lengths for draft in there]),
            np.concatenate([draft.counts for draft in there]),
            ends,
        )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class CandidateTree:
    """What goes to the target for verification: the root and the candidates, best first.

    1. `tokens` int32 [n], n >= 1; tokens[0] is the root, the last committed token.
    2. `parents` int32 [n]; parents[0] = -1, and 0 <= parents[i] < i for every other node.
    3. `probs` float32 [n] is the estimated probability of the whole path to the node; probs[0] = 1, and no node's exceeds
       its parent's.
    4. Candidates come in falling order of `probs`, so the first m nodes are the best tree of m nodes, whatever m.
    5. `sources` int64 [n]: bit s is set if source s of the session proposed the node; 0 for the root.
    6. `roles` uint8 [n]: CANDIDATE or LOOKAHEAD. Candidates come first. Candidate siblings have different tokens.
    7. `position` is the absolute position of the root in the sequence (0: the first prompt token).
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probs: NDArray[np.float32]
    sources: NDArray[np.int64]
    roles: NDArray[np.uint8]
    position: int

    @staticmethod
    def root_only(token: int, position: int) -> CandidateTree:
        """The smallest tree: verifying it is plain decoding."""
        return CandidateTree(
            np.array([token], np.int32),
            np.array([-1], np.int32),
            np.ones(1, np.float32),
            np.zeros(1, np.int64),
            np.zeros(1, np.uint8),
            position,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> NDArray[np.int32]:
        """int32 [n]: each node's distance from the root. A row's absolute position is `position + depth`."""
        depths = np.zeros(len(self), np.int32)
        for i in range(1, len(self)):
            depths[i] = depths[self.parents[i]] + 1
        return depths

    def cut(self, size: int) -> CandidateTree:
        """The best tree of at most `size` nodes, the root among them; `size` below 1 is taken as 1."""
        m = max(1, min(size, len(self)))
        if m == len(self):
            return self
        return CandidateTree(self.tokens[:m], self.parents[:m], self.probs[:m], self.sources[:m], self.roles[:m], self.position)

    def with_lookahead(self, rows: LookaheadRows) -> CandidateTree:
        """The same candidates, which no lookahead row may follow yet, and `rows` behind them."""
        n, m = len(self), len(rows)
        if not m:
            return self
        return CandidateTree(
            np.concatenate([self.tokens, rows.tokens]),
            np.concatenate([self.parents, np.where(rows.parents < 0, 0, rows.parents + n).astype(np.int32)]),
            np.concatenate([self.probs, np.zeros(m, np.float32)]),
            np.concatenate([self.sources, np.zeros(m, np.int64)]),
            np.concatenate([self.roles, np.full(m, LOOKAHEAD, np.uint8)]),
            self.position,
        )

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError naming the first invariant that does not hold. Called where trees enter from outside."""
        n = len(self)
        if n < 1:
            raise ValueError("tree has no root")
        for name in ("parents", "probs", "sources", "roles"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"tree has {n} tokens but {len(getattr(self, name))} {name}")
        if self.position < 0:
            raise ValueError(f"tree has a negative position: {self.position}")
        fault = kernels.tree_fault(self.tokens, self.parents, self.probs, self.roles, vocab_size)
        if fault:
            raise ValueError(f"tree breaks an invariant: {_TREE_FAULTS[fault]}")


_TREE_FAULTS = {
    1: "a token outside the vocabulary",
    2: "a parent that does not precede its node",
    3: "a path probability outside [0, 1] or above its parent's",
    4: "two candidate siblings with one token",
    5: "a role that is neither candidate nor lookahead, or a candidate after a lookahead row",
    6: "node 0 is no root: parent -1, role candidate, probability 1",
    7: "candidates not in falling order of path probability",
}


@dataclass(frozen=True)
class CostCurve:
    """Seconds a pass takes for N rows, as last measured, at the present context and load.

    1. `rows` int32 [k], k >= 1, rising, rows[0] = 1; `seconds` float64 [k], positive, never falling.
    2. Between two points it is linear; beyond the last it goes on with the last slope.
    """

    rows: NDArray[np.int32]
    seconds: NDArray[np.float64]

    @staticmethod
    def flat(seconds: float = 1.0) -> CostCurve:
        """Rows are free: every tree is as large as its budget."""
        return CostCurve(np.array([1], np.int32), np.array([seconds], np.float64))

    def at(self, count: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """float64, the time of a pass of `count` rows (any shape)."""
        if isinstance(count, int) and 0 <= count < _FEW_ROWS:
            return np.asarray(self.few[count])
        n = np.asarray(count, np.float64)
        inside = np.interp(n, self.rows, self.seconds)
        if len(self.rows) < 2:
            return np.asarray(inside)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return np.asarray(inside + np.maximum(n - self.rows[-1], 0.0) * slope)

    @cached_property
    def few(self) -> NDArray[np.float64]:
        """float64 [_FEW_ROWS]: the time of a pass of 0, 1, 2, ... rows; a curve is asked many times before there is another."""
        return self.at(np.arange(_FEW_ROWS))

    def validate(self) -> None:
        """Raise ValueError if an invariant does not hold."""
        if not len(self.rows) or len(self.rows) != len(self.seconds) or self.rows[0] != 1:
            raise ValueError(f"cost curve needs one time for each row count, from 1 row up: {self.rows.tolist()}")
        if np.any(np.diff(self.rows) <= 0) or np.any(np.diff(self.seconds) < 0):
            raise ValueError(f"cost curve must rise: {self.rows.tolist()} rows in {self.seconds.tolist()} seconds")
        if self.seconds[0] <= 0 or not np.all(np.isfinite(self.seconds)):
            raise ValueError(f"cost curve needs positive, finite times: {self.seconds.tolist()}")


_FEW_ROWS = 128


def best_size(path_probs: NDArray[np.float32], curve: CostCurve, num_trees: int = 1, other_rows: int = 0) -> int:
    """How many of the nodes are worth a row: the number m that makes (B + sum of the first m) / t(B + m) largest.

    `path_probs` float32 [n], candidates of all B = `num_trees` trees together (roots left out), in falling order; `other_rows`
    are in the pass anyway. Each tree yields one token in any case, and every node its path probability; so this maximizes
    expected tokens per second. Where t is convex it is the rule of DESIGN 5: a further node pays while its path probability
    exceeds t'(N) (B + sum A) / t(N). Returns 0 <= m <= n, the smallest such m. O(n).
    """
    first, end = num_trees + other_rows, num_trees + other_rows + len(path_probs) + 1
    seconds = curve.few[first:end] if end <= _FEW_ROWS else curve.at(np.arange(first, end))
    size: int = kernels.best_size(path_probs, seconds, num_trees)
    return size


def with_room(size: int) -> int:
    """A little more than `size` nodes: what the engine sends, so that a worker that knows better can take more."""
    return size + size // 2 + 2


@dataclass(frozen=True)
class Mixture:
    """How the opinions of several sources on one token become one: logistic mixing (Mattern 2012, as in the PAQ compressors).

        log-odds = bias + sum over the sources s that propose the token of  slopes[s] x its log-odds
                        + sum over those that propose others only of        doubts[s] x log(what they leave for this one)

    1. A token that one source proposes, two, or more has weights of its own: `slopes` and `doubts` are float64
       [sources, kernels.NUM_SETS], `bias` float64 [kernels.NUM_SETS]. Column 0 with slope 1, bias 0 leaves a source alone its
       estimate.
    2. A source that has nothing to say at a node has no part in it.
    3. Siblings that would come to more than 1 are scaled to 1.
    """

    slopes: NDArray[np.float64]
    doubts: NDArray[np.float64]
    bias: NDArray[np.float64]

    @staticmethod
    def equal(num_sources: int) -> Mixture:
        """Weights to begin with: agreement raises, silence lowers."""
        return Mixture(
            np.tile(np.array(_SLOPES), (num_sources, 1)),
            np.tile(np.array(_DOUBTS), (num_sources, 1)),
            np.zeros(len(_SLOPES)),
        )


_SLOPES = (1.0, 0.6, 0.45)
_DOUBTS = (0.3, 0.3, 0.3)


def merge(
    drafts: Drafts, odds: NDArray[np.float64], rows: NDArray[np.int64], mixture: Mixture, root: int, position: int, budget: int
) -> CandidateTree:
    """One tree of at most `budget` candidates out of many drafts: equal paths are one node, the likeliest paths first.

    `odds` float64 [n] are the log-odds of the nodes given their parents, `rows` int64 [number of drafts] the drafts' places in
    `mixture`, which says how probable a node is that several drafts hold or leave out. A best-first search takes nodes by path
    probability, ties by the smaller token, then by the parent taken earlier, so the result is prefix-closed, optimal for every
    size under the estimates, and the same for the same input. Drafts must be valid.

    Cost: O(total nodes x (drafts + budget)) in one numba kernel, some 10 microseconds for a hundred nodes. No nodes, or no
    budget: the root alone. The order of selection is that of OPT-Tree (arXiv 2406.17276) and DySpec.
    """
    if not len(drafts) or budget < 1:
        return CandidateTree.root_only(root, position)
    tokens, parents, probs, sources = kernels.merge(
        drafts.tokens, drafts.parents, odds, drafts.ends, rows, mixture.slopes, mixture.doubts, mixture.bias, root, budget
    )
    return CandidateTree(tokens, parents, probs, sources, np.zeros(len(tokens), np.uint8), position)
