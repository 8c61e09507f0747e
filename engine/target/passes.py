"""One pass over rows of several sequences, as the worker wants it: by the CPU's kernels here, on a device in `cuda`.

All else that a worker does (admission, memory, cutting, the walk) is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.target.attention import Part, Pass
from engine.target.cache import BlockPool, KVStorage
from engine.target.model import Model
from engine.target.sampling import Ask, Said


class Passes(Protocol):
    """Runs passes over one storage."""

    @property
    def storage(self) -> BlockPool:
        """Where keys and values are kept between passes."""
        ...

    def warm_up(self) -> None:
        """Do what takes long the first time, before anybody waits for it."""
        ...

    def run(self, tokens: NDArray[np.int32], parts: Sequence[Part], asks: Sequence[Ask]) -> list[Said]:
        """One pass: `tokens` int32 [n] in the order of the parts, for whose rows their tables have room, and an ask for each.

        Keys and values are behind each sequence's prefix when it returns; nothing is committed.
        """
        ...


class KernelPasses:
    """Passes on the CPU. Logits are at hand, so they are the answer to whatever is asked."""

    def __init__(self, model: Model, memory: int) -> None:
        self.storage = KVStorage(model.num_layers, model.kv_heads, model.head_dim, memory)
        self._model = model

    def warm_up(self) -> None:
        """Nothing to do: kernels come compiled."""

    def run(self, tokens: NDArray[np.int32], parts: Sequence[Part], asks: Sequence[Ask]) -> list[Said]:
        """See `Passes`."""
        logits = self._model.forward(tokens, Pass(self.storage, parts), asked_rows(parts, asks))
        return [Said(each) for each in np.split(logits, np.cumsum([ask.num_rows for ask in asks])[:-1])]


def asked_rows(parts: Sequence[Part], asks: Sequence[Ask]) -> NDArray[np.int32]:
    """Which rows of a pass are asked about, int32 [m]: of each part the last so many."""
    ends = np.cumsum([len(part.parents) for part in parts])
    rows = [np.arange(end - ask.num_rows, end, dtype=np.int32) for end, ask in zip(ends, asks, strict=True)]
    return np.concatenate(rows)
