"""A pool: one request's own text, looked up in while it grows.

Prompts quote themselves, answers quote prompts, and code repeats code; what followed the same words before is the cheapest
draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retriever import kernels
from retriever.continuations import Continuations

Tokens = NDArray[np.int32]

_SMALLEST = 1024


class TextPool:
    """Texts of one owner that grow at the end. Not for several threads at once.

    Every earlier place that agrees with the end of the context in its last 1, 2, 4 or 8 tokens is on a hash chain, latest
    first. All occurrences weigh the same: recency decides which are looked at, not how they count (on recorded answers,
    weighing by recency gained on SQL and lost on code).

    `max_length` tokens of context are compared at most, `probes` occurrences an order looked at, `depth` tokens of each
    drafted. The last `recent` tokens, and what followed them, are offered below all matches, as matches of length 0. Memory:
    36 bytes a token, doubled for room to grow.
    """

    def __init__(
        self,
        tokens: Sequence[int] | Tokens = (),
        *,
        max_length: int = 32,
        probes: int = 64,
        depth: int = 16,
        recent: int = 0,
    ) -> None:
        for name, value in (("max_length", max_length), ("probes", probes), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1: {value}")
        self.max_length = max_length
        self.probes = probes
        self.depth = depth
        if recent < 0:
            raise ValueError(f"recent cannot be negative: {recent}")
        self.recent = recent
        self._num_tokens = 0
        self._end = 0
        self._allocate(_SMALLEST)
        self.append(tokens)

    def __len__(self) -> int:
        """How many tokens were appended."""
        return self._num_tokens

    def append(self, tokens: Sequence[int] | Tokens, *, new_document: bool = False) -> None:
        """Add tokens (ids >= 0) at the end, or as the beginning of another document; no match or draft crosses from one to the
        next.

        O(1) a token, amortised. No tokens: only ends the document if `new_document`. Raises ValueError on a negative id.
        """
        added = np.asarray(tokens, np.int32)
        if len(added) and added.min() < 0:
            raise ValueError(f"token ids cannot be negative: {added.min()}")
        separator = new_document and self._end > 0
        begin = self._end + separator
        end = begin + len(added)
        if end > len(self._text):
            old = self._text[: self._end]
            self._allocate(1 << (2 * end - 1).bit_length())
            self._text[: self._end] = old
            kernels.pool_extend(self._text, 0, self._end, self._heads, self._previous)
        if separator:
            self._text[self._end] = -1
        self._text[begin:end] = added
        kernels.pool_extend(self._text, begin, end, self._heads, self._previous)
        self._end = end
        self._num_tokens += len(added)

    def lookup(self, context: Tokens, budget: int) -> Continuations:
        """At most `budget` nodes that may follow `context` (int32 [n]), from what followed its end in this pool.

        Usually the context is the pool's text so far; the place where it stands itself is no occurrence. Where the text repeats
        itself up to its end, the draft goes on with the period ("abcabca" yields "bcabca..."). Empty context, no match or a
        budget below 1: no nodes. Some 10 to 40 microseconds, however long the text.
        """
        nodes = Continuations.room(budget)
        num_nodes = kernels.pool_lookup(
            self._text,
            self._end,
            self._heads,
            self._previous,
            np.ascontiguousarray(context, np.int32),
            self.max_length,
            self.probes,
            self.depth,
            self.recent,
            *nodes,
        )
        return Continuations.of(nodes, num_nodes)

    def _allocate(self, capacity: int) -> None:
        num_orders = len(kernels.POOL_ORDERS)
        self._text = np.empty(capacity, np.int32)
        self._heads = np.full((num_orders, capacity), -1, np.int32)
        self._previous = np.empty((num_orders, capacity), np.int32)
