"""A history: many texts of one owner that come and go, looked up in while they grow.

What a service said once it often says again: the same reports, the same calls of the same tools, the same boilerplate. A
`HistoryPool` holds as many of its earlier texts as fit into a number of bytes, and lets go of those that are worth least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.continuations import Continuations
from retriever.history import kernels
from retriever.history.kernels import BLOCK, Places
from retriever.kernels import POOL_ORDERS

Tokens = NDArray[np.int32]

BLOCK_BYTES = 4 * BLOCK * (1 + 3 * len(POOL_ORDERS)) + 64
"""Most memory of a block: tokens, chains and their heads, links, and the document that it may be all of."""

_FEWEST_BLOCKS = 64
_FEWEST_DOCUMENTS = 16


class HistoryPool:
    """Documents of one owner, within `max_bytes`. Not for several threads at once.

    A document is open while it grows and closed from then on; only closed ones are let go. Which goes first is decided as in
    GreedyDual-Size (Cao and Irani, USITS 1997): a document's rank is what it is worth for its size, above the rank of the last
    one that had to go, and the lowest goes; of equals, the one touched longest ago. So what was of no use leaves in the order
    it came, what drafted well stays longer, and nothing stays for ever. `credit` says what a document was of use for.

    `max_length` tokens of context are compared at most, `probes` occurrences an order looked at, `depth` tokens of each
    drafted. Memory: 56 bytes a token, and twice that while it grows; it begins small and doubles up to `max_bytes`.
    """

    def __init__(self, max_bytes: int, *, max_length: int = 32, probes: int = 64, depth: int = 16) -> None:
        if max_bytes < BLOCK_BYTES:
            raise ValueError(f"max_bytes must be at least {BLOCK_BYTES}, what a block takes: {max_bytes}")
        self.max_bytes = max_bytes
        self.max_length = max_length
        self.probes = probes
        self.depth = depth
        self._most_blocks = max_bytes // BLOCK_BYTES
        self._floor = 0.0
        self._time = 0
        self._allocate(min(_FEWEST_BLOCKS, self._most_blocks))
        self._table = np.zeros(_FEWEST_DOCUMENTS, _DOCUMENT)
        self._table["rank"] = np.inf
        self._unused = list(range(_FEWEST_DOCUMENTS))

    def __len__(self) -> int:
        """How many documents there are, open ones among them."""
        return len(self._table) - len(self._unused)

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents."""
        return int(self._table["length"].sum())

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(array.nbytes for array in self._places) + self._free.nbytes + self._table.nbytes

    def begin(self, lead: Sequence[int] | Tokens = (), *, born: float = 0.0) -> int:
        """Open a document and return its number, for `append`, `credit` and `close`.

        `lead` is what stood before it: matched, so that the beginning of the document is found, too, but what continues a match
        that ends inside it is not looked for. `born` is when, in any unit: see `expire`.
        """
        if not self._unused:
            size = len(self._table)
            self._table = np.concatenate([self._table, np.zeros(size, _DOCUMENT)])
            self._table["rank"][size:] = np.inf
            self._unused = list(range(size, 2 * size))
        number = self._unused.pop()
        self._table[number] = (-1, -1, 0, len(lead), born, np.inf, 0.0, self._tick())
        self._extend(number, np.asarray(lead, np.int32))
        return number

    def append(self, document: int, tokens: Sequence[int] | Tokens) -> None:
        """Add tokens (ids >= 0) at the end of an open document; lookups find them from now on.

        O(1) a token, amortised. Where there is no room left but in open documents, they are dropped. Raises ValueError on a
        negative id.
        """
        self._table["touched"][document] = self._tick()
        self._extend(document, np.asarray(tokens, np.int32))

    def close(self, document: int) -> None:
        """The document is complete; it may be let go from now on. One that is no longer than its lead is, at once."""
        row = self._table[document]
        if row["length"] <= row["lead"]:
            self._drop(document)
        else:
            row["rank"] = self._worth(document)

    def credit(self, context: Tokens, emitted: Tokens, *, but: int = -1) -> None:
        """`emitted` (int32 [m]) came after `context` (int32 [n]): the document that said the same, if one did, is worth more.

        `but` is the document that says so itself. Some 5 to 20 microseconds.
        """
        document, reached = kernels.credit(
            self._places, np.ascontiguousarray(context, np.int32), emitted, but, self.max_length, self.probes
        )
        if document >= 0:
            self._table["gained"][document] += reached
            if self._table["rank"][document] < np.inf:
                self._table["rank"][document] = self._worth(document)

    def lookup(self, context: Tokens, budget: int) -> Continuations:
        """At most `budget` nodes that may follow `context` (int32 [n]), from what followed its end in the documents.

        The end of a document is no occurrence of itself. Empty context, no match or a budget below 1: no nodes. Some 10 to 40
        microseconds, however many documents.
        """
        nodes = Continuations.room(budget)
        num_nodes = kernels.lookup(
            self._places, np.ascontiguousarray(context, np.int32), self.max_length, self.probes, self.depth, *nodes
        )
        return Continuations.of(nodes, num_nodes)

    def expire(self, oldest: float) -> None:
        """Let go of closed documents that were born before `oldest`."""
        for document in np.flatnonzero((self._table["rank"] < np.inf) & (self._table["born"] < oldest)).tolist():
            self._drop(document)

    def documents(self) -> list[Tokens]:
        """The tokens of every document, the least recently touched first; leads are among them."""
        return [self._read(document) for document in self._order()]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All documents, as `restore` takes them; a copy. Some milliseconds for a million tokens."""
        order = self._order()
        rows = self._table[order]
        texts = [self._read(document) for document in order]
        return {
            "tokens": np.concatenate([*texts, np.zeros(0, np.int32)]),
            "lengths": rows["length"].copy(),
            "leads": rows["lead"].copy(),
            "born": rows["born"].copy(),
            "gained": rows["gained"].copy(),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the documents of another pool's `arrays`, closed, in the order they were touched. If not all fit, the last stay.

        Raises ValueError or KeyError if they are no such arrays; nothing is added then.
        """
        tokens, lengths, leads, born, gained = (arrays[name] for name in ("tokens", "lengths", "leads", "born", "gained"))
        if any(array.ndim != 1 for array in arrays.values()) or not len(lengths) == len(leads) == len(born) == len(gained):
            raise ValueError("a history's documents do not agree in number")
        if tokens.dtype != np.int32 or lengths.dtype != np.int32 or leads.dtype != np.int32:
            raise ValueError(f"a history's tokens are int32: {tokens.dtype}, {lengths.dtype}, {leads.dtype}")
        if np.any(lengths < leads) or np.any(leads < 0) or int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError("a history's documents do not add up to its tokens")
        if len(tokens) and tokens.min() < 0:
            raise ValueError(f"token ids cannot be negative: {tokens.min()}")
        ends = np.cumsum(lengths, dtype=np.int64)
        for i in range(len(lengths)):
            text = tokens[ends[i] - lengths[i] : ends[i]]
            document = self.begin(text[: leads[i]], born=float(born[i]))
            self._extend(document, text[leads[i] :])
            self._table["gained"][document] = gained[i]
            self.close(document)

    def _extend(self, document: int, tokens: Tokens) -> None:
        if not len(tokens):
            return
        if tokens.min() < 0:
            raise ValueError(f"token ids cannot be negative: {tokens.min()}")
        row = self._table[document]
        length, last = int(row["length"]), int(row["last"])
        room = -length % BLOCK
        num_blocks = -(-max(len(tokens) - room, 0) // BLOCK)
        if not self._make_room(num_blocks):
            return
        row, last = self._table[document], int(self._table["last"][document])  # making room may have moved things
        blocks = self._take(num_blocks, document)
        if num_blocks:
            chain = np.concatenate([[last], blocks]).astype(np.int32) if last >= 0 else blocks
            self._places.after[chain[:-1]] = chain[1:]
            self._places.before[chain[1:]] = chain[:-1]
            if last < 0:
                row["first"] = blocks[0]
            row["last"] = blocks[-1]
        place = last * BLOCK + length % BLOCK if room else int(blocks[0]) * BLOCK
        following = blocks if room else blocks[1:]
        kernels.extend(self._places, place, tokens, following, max(int(row["lead"]) - length, 0))
        row["length"] += len(tokens)

    def _make_room(self, num_blocks: int) -> bool:
        """Have so many free blocks: by growing, and at full size by letting go. False if all there is is open."""
        while self._num_free < num_blocks:
            capacity = len(self._free)
            if capacity < self._most_blocks:
                self._grow(min(max(2 * capacity, capacity + num_blocks), self._most_blocks))
                continue
            lowest = self._table["rank"].min()
            if lowest == np.inf:
                return False
            tied = np.flatnonzero(self._table["rank"] == lowest)
            self._floor = float(lowest)
            self._drop(int(tied[self._table["touched"][tied].argmin()]))
        return True

    def _grow(self, num_blocks: int) -> None:
        """More room: everything is chained anew, in the order it was touched."""
        order = self._order()
        texts = [self._read(document) for document in order]
        self._allocate(num_blocks)
        for document, text in zip(order, texts, strict=True):
            self._table["first"][document] = self._table["last"][document] = -1
            self._table["length"][document] = 0
            self._extend(document, text)

    def _allocate(self, num_blocks: int) -> None:
        self._places = Places.empty(num_blocks)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    def _take(self, num_blocks: int, document: int) -> NDArray[np.int32]:
        """So many free blocks, out of the pile."""
        self._num_free -= num_blocks
        blocks = self._free[self._num_free : self._num_free + num_blocks][::-1].copy()
        self._places.owner[blocks] = document
        return blocks

    def _drop(self, document: int) -> None:
        """Let go of a document, with all its blocks."""
        block = int(self._table["first"][document])
        if block >= 0:
            kernels.remove(self._places, block)
        while block >= 0:
            after = int(self._places.after[block])
            self._places.before[block] = self._places.after[block] = -1
            self._free[self._num_free] = block
            self._num_free += 1
            block = after
        self._table[document] = (-1, -1, 0, 0, 0.0, np.inf, 0.0, 0)
        self._unused.append(document)

    def _worth(self, document: int) -> float:
        row = self._table[document]
        return self._floor + 1.0 + _GAIN * float(row["gained"]) / float(row["length"])

    def _read(self, document: int) -> Tokens:
        row = self._table[document]
        tokens = np.empty(int(row["length"]), np.int32)
        if len(tokens):
            kernels.read(self._places, int(row["first"]), tokens)
        return tokens

    def _order(self) -> list[int]:
        """The documents, the least recently touched first."""
        there = np.flatnonzero(self._table["touched"] > 0)
        order: list[int] = there[np.argsort(self._table["touched"][there])].tolist()
        return order

    def _tick(self) -> int:
        self._time += 1
        return self._time


_DOCUMENT = np.dtype(
    [
        ("first", np.int32),
        ("last", np.int32),
        ("length", np.int32),
        ("lead", np.int32),
        ("born", np.float64),
        ("rank", np.float64),
        ("gained", np.float64),
        ("touched", np.int64),
    ]
)
"""A document: its first and last block, tokens, how many of them are lead; when it was born, its rank (infinite while it is
open), tokens it drafted rightly, and when it was last touched (0: no document)."""

_GAIN = 1.0
"""How many times longer a document stays for having drafted as many tokens as it has."""
