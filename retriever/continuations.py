"""The answer of every lexical source: what may follow, as a small tree with probabilities and evidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retriever.kernels import Nodes

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


@dataclass(frozen=True, init=False)
class Continuations:
    """n nodes that may follow a context, best path first.

    1. `tokens` int32 [n], each a token id of the text looked up in, never a separator.
    2. `parents` int32 [n], the index of each node's parent, -1 for the end of the context; parents[i] < i.
    3. `probs` float32 [n] in [0, 1]: the estimated probability of the node given its parent. Siblings have different tokens,
       and their probs sum to at most 1; the rest is the chance of something not seen.
    4. The products of probs along the path to node i never rise with i (up to rounding).
    5. `lengths` int32 [n], 0 to 64: how many tokens matched at the node's parent, 0 for what was only said lately; `counts`
       int32 [n]: how often that was seen there.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]

    def __init__(
        self,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        probs: NDArray[np.float32],
        lengths: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> None:
        fields = self.__dict__  # every lookup makes one, and what a frozen class has would take twice as long
        fields["tokens"] = tokens
        fields["parents"] = parents
        fields["probs"] = probs
        fields["lengths"] = lengths
        fields["counts"] = counts

    @staticmethod
    def room(budget: int) -> Nodes:
        """What a kernel writes at most `budget` nodes to; none if that is below 0."""
        n = max(budget, 0)
        return np.empty(n, _INT32), np.empty(n, _INT32), np.empty(n, _FLOAT32), np.empty(n, _INT32), np.empty(n, _INT32)

    @staticmethod
    def of(nodes: Nodes, num_nodes: int) -> Continuations:
        """The first so many nodes that a kernel wrote, with their fields named."""
        tokens, parents, probs, lengths, counts = nodes
        if num_nodes == len(tokens):
            return Continuations(tokens, parents, probs, lengths, counts)
        n = num_nodes
        return Continuations(tokens[:n], parents[:n], probs[:n], lengths[:n], counts[:n]) if n else _NOTHING

    @staticmethod
    def empty() -> Continuations:
        """No match."""
        return _NOTHING

    def __len__(self) -> int:
        return len(self.tokens)

    def path_probs(self) -> NDArray[np.float64]:
        """float64 [n]: the probability of the whole path to each node."""
        paths = self.probs.astype(np.float64)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                paths[i] *= paths[parent]
        return paths

    def validate(self) -> None:
        """Raise ValueError naming the first invariant that does not hold."""
        n = len(self)
        for name in ("parents", "probs", "lengths", "counts"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"continuations have {n} tokens but {len(getattr(self, name))} {name}")
        if np.any(self.tokens < 0):
            raise ValueError("continuations break invariant 1: a token below 0")
        if np.any(self.parents < -1) or np.any(self.parents >= np.arange(n)):
            raise ValueError("continuations break invariant 2: a parent that does not precede its node")
        if not np.all((self.probs >= 0) & (self.probs <= 1)):
            raise ValueError("continuations break invariant 3: a probability outside [0, 1]")
        if len(set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))) != n:
            raise ValueError("continuations break invariant 3: two siblings with one token")
        if n and np.bincount(self.parents + 1, weights=self.probs).max() > 1 + 1e-5:
            raise ValueError("continuations break invariant 3: siblings with more than probability 1")
        paths = self.path_probs()
        if np.any(paths[1:] > paths[:-1] * (1 + 1e-5)):
            raise ValueError("continuations break invariant 4: a path likelier than the one before it")
        if np.any((self.lengths < 0) | (self.lengths > 64)) or np.any(self.counts < 0):
            raise ValueError("continuations break invariant 5: evidence out of range")


_NOTHING = Continuations(
    np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(0, np.int32)
)


@dataclass(frozen=True)
class Match:
    """The longest end of a context that occurs in a text, and how often. No match: length 0, count 0."""

    length: int
    count: int
