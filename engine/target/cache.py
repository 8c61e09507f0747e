"""Where keys and values live: blocks of 64 positions, one pool for all sequences of a worker.

A `BlockPool` knows whose block is whose; the numbers are here (`KVStorage`) or on a device (`cuda.DeviceStorage`). Sequences
share whole blocks of equal beginnings (`prefix` names them); a shared block is never written to, so nothing is ever copied. A
block that no sequence holds stays known by its name until its memory is needed: the one unused for longest goes first, and of
one text the end before the beginning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.errors import Exhausted
from engine.target import kernels
from engine.target.kernels import BLOCK


class BlockPool(ABC):
    """Who holds which of `num_blocks` blocks, and what they are called; what is in them is for those to say who keep it.

    1. Every block is free, or idle (named, in no table), or in one table, or named and in some tables.
    2. A name belongs to one block. A named block is full, and its numbers do not change while it has its name.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}  # in the order in which they were let go

    @abstractmethod
    def compact(self, blocks: NDArray[np.int32], length: int, rows: NDArray[np.int32]) -> None:
        """Move positions length + rows (rising, int32 [m]) of the sequence in these blocks to length, length + 1, ..., before
        the next pass reads them."""

    @abstractmethod
    def make_up(self, blocks: NDArray[np.int32]) -> None:
        """Fill blocks with small numbers, to time passes over what was never read."""

    @property
    def num_free(self) -> int:
        """Blocks in no table: those that can be had, forgetting what idle ones hold."""
        return len(self._free) + len(self._idle)

    def fits(self, num_positions: int) -> bool:
        """Whether one sequence of so many positions could ever be held."""
        return num_blocks(num_positions) <= self.num_blocks

    def take(self) -> int:
        """A block of nobody's, free or else the one idle for longest. Raises IndexError when there is none."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._named[self._names.pop(block)]
        else:
            raise IndexError("no block is free")
        self._holders[block] = 1
        return block

    def find(self, name: bytes) -> int | None:
        """The block of that name, for one more holder; None if nobody has computed it, or it was needed otherwise."""
        block = self._named.get(name)
        if block is not None:
            self._idle.pop(block, None)
            self._holders[block] += 1
        return block

    def name(self, block: int, name: bytes) -> None:
        """Let others find a full block, unless one of that name is there already."""
        if name not in self._named and block not in self._names:
            self._named[name] = block
            self._names[block] = name

    def release(self, block: int) -> None:
        """One holder less: after the last the block is idle if it has a name, else free."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._names:
            self._idle[block] = None
        else:
            self._free.append(block)

    def forget(self) -> None:
        """Make all idle blocks free."""
        for block in self._idle:
            del self._named[self._names.pop(block)]
            self._free.append(block)
        self._idle.clear()

    def check(self, tables: Iterable[KVTable]) -> None:
        """Raise AssertionError unless the invariants hold, `tables` being all there are. O(blocks)."""
        held = Counter(block for table in tables for block in table.blocks.tolist())
        assert [held[block] for block in range(self.num_blocks)] == self._holders, "holders are miscounted"
        everything = sorted([*self._free, *self._idle, *held])
        assert everything == list(range(self.num_blocks)), "a block is lost, or in two places"
        assert {block: name for name, block in self._named.items()} == self._names, "names and blocks differ"
        assert set(self._idle) == {block for block in self._names if not held[block]}, "an idle block has no name, or is held"
        assert all(count == 1 or block in self._names for block, count in held.items()), "a block without a name is shared"


class KVStorage(BlockPool):
    """The keys and values of all layers, float32, in at most `memory` bytes, reserved at start and touched only when used.

    Per layer: keys [blocks, kv heads, head dim, BLOCK], values [blocks, kv heads, BLOCK, head dim]: keys are transposed, so
    that a query meets BLOCK of them at a time. One position costs 8 x layers x kv heads x head dim bytes. Raises Exhausted
    where `memory` holds no block.
    """

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, memory: int) -> None:
        self.head_dim = head_dim
        super().__init__(blocks_in(memory, 8 * num_layers * kv_heads * head_dim * BLOCK))
        self.keys = np.empty((num_layers, self.num_blocks, kv_heads, head_dim, BLOCK), np.float32)
        self.values = np.empty((num_layers, self.num_blocks, kv_heads, BLOCK, head_dim), np.float32)

    def compact(self, blocks: NDArray[np.int32], length: int, rows: NDArray[np.int32]) -> None:
        """See `BlockPool`."""
        for keys, values in zip(self.keys, self.values, strict=True):
            kernels.compact(keys, values, blocks, length, rows)

    def make_up(self, blocks: NDArray[np.int32]) -> None:
        """See `BlockPool`."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[blocks] = values[blocks] = 0.01


def blocks_in(memory: int, size: int) -> int:
    """How many blocks of `size` bytes there is memory for. Raises Exhausted for none."""
    if memory < size:
        raise Exhausted(f"KV memory of {memory} bytes holds no block of {size} bytes: raise kv_memory")
    return memory // size


def num_blocks(num_positions: int) -> int:
    """Blocks that so many positions take."""
    return -(-num_positions // BLOCK)


class KVTable:
    """One sequence's blocks: position p is entry p % BLOCK of block `blocks[p // BLOCK]`.

    `length` positions are committed; a pass writes its rows behind them, and `keep` commits the accepted ones.
    """

    def __init__(self, storage: BlockPool) -> None:
        self.length = 0
        self.blocks = np.zeros(0, np.int32)
        self._storage = storage

    @property
    def room(self) -> int:
        """How many positions beyond the committed ones could be reserved, as things stand."""
        return (len(self.blocks) + self._storage.num_free) * BLOCK - self.length

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` beyond the committed positions. Raises Exhausted, changing nothing, when there is none."""
        missing = num_blocks(self.length + num_rows) - len(self.blocks)
        if missing > self._storage.num_free:
            raise Exhausted(
                f"KV memory is full: {missing} more blocks of {BLOCK} positions needed, {self._storage.num_free} free"
            )
        self._append([self._storage.take() for _ in range(missing)])

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Commit these rows of the last pass (rising, int32 [m]) as the next m positions; the other rows are forgotten."""
        if len(rows) and rows[-1] != len(rows) - 1:
            self._storage.compact(self.blocks, self.length, rows)
        self.length += len(rows)

    def share(self, names: Sequence[bytes]) -> int:
        """Go on with blocks that others have computed, as far as there are any; `names` are those of this text's blocks.

        They take the place of blocks reserved and not yet written. Returns by how many positions `length` grew; 0 where the
        committed positions do not end with a block.
        """
        before = self.length
        if before % BLOCK:
            return 0
        for name in names[before // BLOCK :]:
            block = self._storage.find(name)
            if block is None:
                break
            at = self.length // BLOCK
            if at < len(self.blocks):
                self._storage.release(int(self.blocks[at]))
                self.blocks[at] = block
            else:
                self._append([block])
            self.length += BLOCK
        return self.length - before

    def publish(self, names: Sequence[bytes]) -> None:
        """Let others find the first blocks, all committed: `names` are theirs."""
        for block, name in zip(self.blocks.tolist(), names, strict=False):
            self._storage.name(block, name)

    def close(self) -> None:
        """Give all blocks back."""
        for block in self.blocks[::-1].tolist():
            self._storage.release(block)
        self.blocks = np.zeros(0, np.int32)
        self.length = 0

    def _append(self, blocks: list[int]) -> None:
        if blocks:
            self.blocks = np.concatenate([self.blocks, np.array(blocks, np.int32)])
