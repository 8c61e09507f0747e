"""Tree attention for any transformers model that follows its attention interface.

Registered under the key `draftloom_tree`; a model loaded with that implementation prepares no mask and calls `tree_attention`
with all rows of a pass, of all sequences, side by side in one batch entry. Which rows are whose, and what each may see, is in
the `Pass` that the worker sets around its call of the model: a row sees the committed prefix of its sequence and its own
ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from engine.errors import ModelError
from engine.target import kernels, threads
from engine.target.cache import KVStorage, KVTable
from engine.target.team_kernels import COUNT

KEY = "draftloom_tree"

_NO_SINKS = np.zeros(0, np.float32)

_TILE_ROWS = 8
"""Most rows of one sequence that a thread takes at a time."""


@dataclass(frozen=True)
class Part:
    """One sequence's rows in a pass: `parents` int32 [n] within the part, -1 for a row that sits right below the prefix.

    Rows come in topological order. A chunk of a prompt is a chain.
    """

    table: KVTable
    parents: NDArray[np.int32]


@dataclass(frozen=True)
class Scores:
    """What becomes of the scores of one layer: score = query . key x `scale`, bounded to softcap x tanh(score / softcap) if
    `softcap` > 0, over the last `window` positions only if that is > 0; `sinks` [heads] joins a score without a value to each
    head's softmax.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class Pass:
    """The rows of one pass and what each may see, laid out for the kernels. O(rows x depth)."""

    def __init__(self, storage: KVStorage, parts: Sequence[Part]) -> None:
        kv_heads, num_threads = storage.keys[0].shape[1], int(threads.team()[COUNT])
        self.storage = storage
        self.parts = parts
        self.firsts = np.cumsum([0, *(len(part.parents) for part in parts)]).astype(np.int32)
        lists: list[NDArray[np.int32]] = []
        items: list[tuple[int, int, int, int]] = []
        for which, part in enumerate(parts):
            lists.extend(_ancestors(part.parents))
            tile = _tile_rows(len(part.parents), kv_heads, num_threads)
            for begin in range(0, len(part.parents), tile):
                end = min(begin + tile, len(part.parents))
                items.extend((which, head, begin, end) for head in range(kv_heads))
        self.starts = np.cumsum([0, *(len(ancestors) for ancestors in lists)]).astype(np.int32)
        self.ancestors = np.concatenate(lists)
        self.items = np.array(items[::-1], np.int32)  # the long rows of a chunk first, so that threads end together
        offsets = np.cumsum([0, *(len(part.table.blocks) for part in parts)])
        self.tables = np.concatenate([part.table.blocks for part in parts]).astype(np.int32)
        self.sequences = np.array([(self.firsts[i], part.table.length, offsets[i]) for i, part in enumerate(parts)], np.int32)

    def mix(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `Mixes`. Raises ModelError for heads wider than the storage has room for."""
        dim, width = self.storage.head_dim, value.shape[-1]
        if max(key.shape[-1], width) > dim:
            raise ModelError(f"layer {layer} has heads wider than the config says ({dim}): {key.shape[-1]} and {width}")
        self.store(layer, _array(key, dim), _array(value, dim))
        sinks = _NO_SINKS if scores.sinks is None else scores.sinks.float().numpy()
        mixed = self.attend(layer, _array(query, dim), scores.window, scores.scale, scores.softcap, sinks)
        return torch.from_numpy(np.ascontiguousarray(mixed[..., :width]))[None].to(query.dtype)

    def store(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Put the rows' own keys and values ([kv heads, rows, head dim]) behind each sequence's prefix."""
        for i, part in enumerate(self.parts):
            kernels.store(
                self.storage.keys[layer], self.storage.values[layer], keys, values, self.firsts[i], len(part.parents),
                part.table.blocks, part.table.length,
            )  # fmt: skip

    def decoder(
        self,
        x: NDArray[np.float32],
        windows: NDArray[np.int64],
        cos: NDArray[np.float32],
        sin: NDArray[np.float32],
        layers: NDArray[np.int64],
        shapes: NDArray[np.int64],
        numbers: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """All layers over the rows, float32 [rows, width]; see the kernel so named."""
        out: NDArray[np.float32] = kernels.decoder(
            threads.team(), x, cos, sin, layers, shapes, windows, numbers, self.storage.keys, self.storage.values, self.items,
            self.tables, self.sequences, self.firsts, self.starts, self.ancestors,
        )  # fmt: skip
        return out

    def attend(
        self,
        layer: int,
        query: NDArray[np.float32],
        window: int,
        scale: float,
        softcap: float = 0.0,
        sinks: NDArray[np.float32] = _NO_SINKS,
    ) -> NDArray[np.float32]:
        """float32 [rows, heads, head dim], for query [heads, rows, head dim].

        `softcap` > 0 bounds scores to softcap * tanh(score / softcap); `sinks` [heads] adds a score without a value to each
        head's softmax.
        """
        heads, rows, dim = query.shape
        out = np.empty((rows, heads, dim), np.float32)
        kernels.attend_all(
            threads.team(), self.items, query, self.storage.keys[layer], self.storage.values[layer], self.tables,
            self.sequences, self.starts, self.ancestors, window,
            np.array([scale], np.float32), np.array([softcap], np.float32), sinks, out,
        )  # fmt: skip
        return out


@cache
def _tile_rows(num_rows: int, kv_heads: int, num_threads: int) -> int:
    """Into tiles of how many rows to cut a sequence's, so that threads end together: a piece of work is a tile and a kv head.

    To read keys and values once more, for another tile, counts as half a row.
    """

    def longest(tile: int) -> float:
        pieces = -(-num_rows // tile) * kv_heads
        return -(-pieces // num_threads) * (tile + 0.5)

    return min(range(1, min(num_rows, _TILE_ROWS) + 1), key=longest)


def _ancestors(parents: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """For every row its path within the part, from the top down, itself last."""
    if np.array_equal(parents, np.arange(-1, len(parents) - 1)):
        everything = np.arange(len(parents), dtype=np.int32)
        return [everything[: i + 1] for i in range(len(parents))]
    lists: list[NDArray[np.int32]] = []
    for row, parent in enumerate(parents.tolist()):
        own = np.array([row], np.int32)
        lists.append(own if parent < 0 else np.concatenate([lists[parent], own]))
    return lists


class Mixes(Protocol):
    """What a pass is to a layer's attention."""

    def mix(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """[1, rows, heads, value width], shapes as in `tree_attention`; keys and values are kept for later passes."""
        ...


_current: ContextVar[Mixes] = ContextVar("draftloom_pass")


def current() -> Pass:
    """The pass that is running, one for the CPU's kernels."""
    rows = _current.get()
    assert isinstance(rows, Pass), "layers of kernels run in passes of kernels"
    return rows


@contextmanager
def running(rows: Mixes) -> Iterator[None]:
    """Make `rows` the pass that attention layers belong to."""
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


_IDLE = {
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "cache",
}
"""What models hand on to their attention that has no bearing on it."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer over a pass. query [1, heads, rows, width]; key and value [1, kv heads, rows, their width].

    Soft caps, sliding windows, sinks (`s_aux` [heads]) and keys and values of unlike width are honoured. Raises ModelError for
    whatever else a model asks of its attention (a mask of its own, dropout, a bias), naming it: nothing is ignored.
    """
    asked = dict(
        kwargs, dropout=dropout or None, attention_mask=attention_mask, is_causal=False if is_causal is False else None
    )
    unknown = [name for name, setting in asked.items() if setting is not None and name not in _IDLE]
    if unknown or key.shape[:-1] != value.shape[:-1] or query.shape[0] != 1:
        what = ", ".join(unknown) or f"keys {tuple(key.shape)} and values {tuple(value.shape)}"
        raise ModelError(f"{type(module).__name__} uses attention that this worker does not do: {what}")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sinks = None if s_aux is None else s_aux.detach().reshape(-1)
    if sinks is not None and len(sinks) != query.shape[1]:
        raise ModelError(f"layer {layer} has {query.shape[1]} heads, but {len(sinks)} sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scores = Scores(scale, int(sliding_window or 0), float(softcap or 0.0), sinks)
    return _current.get().mix(layer, query, key, value, scores), None


def _array(x: torch.Tensor, dim: int) -> NDArray[np.float32]:
    """[1, heads, rows, width] of any float dtype as a contiguous float32 array [heads, rows, dim], zeros behind the width."""
    array: NDArray[np.float32] = torch.nn.functional.pad(x[0].float(), (0, dim - x.shape[-1])).contiguous().numpy()
    return array


AttentionInterface.register(KEY, tree_attention)
