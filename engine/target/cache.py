"""Where keys and values live: blocks of 64 positions, one pool for all sequences of a worker.

Keys are stored transposed (positions innermost), so that a query meets 64 keys at a time. Memory is reserved at start and
touched only when used. Copies nothing between sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.errors import Exhausted
from engine.target import kernels
from engine.target.kernels import BLOCK


class KVStorage:
    """The keys and values of all layers, float32, in at most `memory` bytes.

    Per layer: keys [blocks, kv heads, head dim, BLOCK], values [blocks, kv heads, BLOCK, head dim]. One position costs
    8 x layers x kv heads x head dim bytes. Invariant: every block is free or in exactly one table.
    """

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, memory: int) -> None:
        self.head_dim = head_dim
        per_block = 8 * num_layers * kv_heads * head_dim * BLOCK
        self.num_blocks = memory // per_block
        if self.num_blocks < 1:
            raise Exhausted(f"KV memory of {memory} bytes holds no block of {per_block} bytes: raise kv_memory")
        self.keys = [np.empty((self.num_blocks, kv_heads, head_dim, BLOCK), np.float32) for _ in range(num_layers)]
        self.values = [np.empty((self.num_blocks, kv_heads, BLOCK, head_dim), np.float32) for _ in range(num_layers)]
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    def fits(self, num_positions: int) -> bool:
        """Whether one sequence of so many positions could ever be held."""
        return -(-num_positions // BLOCK) <= self.num_blocks


class KVTable:
    """One sequence's blocks: position p is entry p % BLOCK of block `blocks[p // BLOCK]`.

    `length` positions are committed; a pass writes its rows behind them, and `keep` commits the accepted ones.
    """

    def __init__(self, storage: KVStorage) -> None:
        self.length = 0
        self.blocks = np.zeros(0, np.int32)
        self._storage = storage

    @property
    def room(self) -> int:
        """How many positions beyond the committed ones could be reserved, as things stand."""
        return (len(self.blocks) + self._storage.num_free) * BLOCK - self.length

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` beyond the committed positions. Raises Exhausted, changing nothing, when there is none."""
        missing = -(-(self.length + num_rows) // BLOCK) - len(self.blocks)
        if missing > self._storage.num_free:
            raise Exhausted(
                f"KV memory is full: {missing} more blocks of {BLOCK} positions needed, {self._storage.num_free} free"
            )
        if missing > 0:
            taken = [self._storage._free.pop() for _ in range(missing)]
            self.blocks = np.concatenate([self.blocks, np.array(taken, np.int32)])

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Commit these rows of the last pass (rising, int32 [m]) as the next m positions; the other rows are forgotten."""
        if len(rows) and rows[-1] != len(rows) - 1:
            for keys, values in zip(self._storage.keys, self._storage.values, strict=True):
                kernels.compact(keys, values, self.blocks, self.length, rows)
        self.length += len(rows)

    def close(self) -> None:
        """Give all blocks back."""
        self._storage._free.extend(self.blocks.tolist())
        self.blocks = np.zeros(0, np.int32)
        self.length = 0
