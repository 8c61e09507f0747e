"""Whether a loaded network can verify trees at all: found out by asking it, at load, before anybody relies on it.

A network that ignores our attention, mixes rows by other means (recurrent state, convolutions) or has masks of a kind that
nobody told us about answers without an error, and wrongly. So one small pass is run and watched: two sequences side by side, a
chain a, b, c and a tree with the same path, in which an x stands right before c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.target.attention import Part, Pass
from engine.target.cache import KVStorage, KVTable
from engine.target.kernels import BLOCK

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine.target.model import Model

_ATTENTION = {"full_attention", "sliding_attention"}


def refuse_config(config: PretrainedConfig) -> None:
    """Raise ModelError for what its config alone shows to be unfit: encoders, layers other than plain attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"an encoder-decoder cannot verify a tree: {config.model_type}; choose a decoder")
    config = config.get_text_config()
    missing = [name for name in ("num_attention_heads", "max_position_embeddings") if getattr(config, name, None) is None]
    if missing:
        raise ModelError(f"the config of this model ({config.model_type}) does not say: {', '.join(missing)}; choose another")
    other = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - _ATTENTION)
    if other:
        raise ModelError(
            f"this model has layers that cannot verify a tree: {', '.join(other)}; choose one with plain attention"
        )


def check_rows(model: Model) -> bool:
    """Raise ModelError unless every row of a pass answers for its own path; returns whether it did so bit for bit."""
    storage = KVStorage(model.num_layers, model.kv_heads, model.head_dim, 2 * _block_bytes(model))
    tables = [KVTable(storage), KVTable(storage)]
    chain, tree = np.array([-1, 0, 1], np.int32), np.array([-1, 0, 0, 1], np.int32)
    parts = [Part(tables[0], chain), Part(tables[1], tree)]
    for part in parts:
        part.table.reserve(len(part.parents))
    rows = _WatchedPass(storage, parts)
    a, b, c, x = (i % model.vocab_size for i in (1, 2, 3, 4))
    tokens, ends = np.array([a, b, c, a, b, x, c], np.int32), np.array([2, 6], np.int32)
    name = type(model.network).__name__
    try:
        logits = model.forward(tokens, rows, ends)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} cannot run rows of several sequences: {error!r}; choose another model") from error
    if sorted(rows.windows) != list(range(model.num_layers)):
        raise ModelError(f"{name} does not use transformers' attention interface in all its layers; choose another model")
    for layer, window in rows.windows.items():
        if window != (expected := _window(model.network.config.get_text_config(), layer)):
            raise ModelError(f"layer {layer} of {name} should have an attention window of {expected}: {window}")
    if not _close(logits, 0.1 if model.dtype == "bfloat16" else 0.01):
        raise ModelError(f"{name} lets a row feel others than its ancestors, so it cannot verify a tree; choose another model")
    return bool(np.array_equal(logits[0], logits[1]))


class _WatchedPass(Pass):
    """A pass that notes which layers attend, with what window, and lets nothing of another shape near the kernels."""

    def __init__(self, storage: KVStorage, parts: list[Part]) -> None:
        super().__init__(storage, parts)
        self.windows: dict[int, int] = {}

    def store(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        _, heads, dim, _ = self.storage.keys[0].shape
        if (keys.shape[0], keys.shape[2]) != (heads, dim):
            raise ModelError(
                f"layer {layer} has kv heads or a head width that the config does not say ({heads} x {dim}): "
                f"{keys.shape[0]} x {keys.shape[2]}"
            )
        super().store(layer, keys, values)

    def decoder(self, x: NDArray[np.float32], windows: NDArray[np.int64], *rest: Any) -> NDArray[np.float32]:
        self.windows |= dict(enumerate(windows.tolist()))
        return super().decoder(x, windows, *rest)

    def attend(self, layer: int, query: NDArray[np.float32], window: int, scale: float, *rest: Any) -> NDArray[np.float32]:
        self.windows[layer] = window
        return super().attend(layer, query, window, scale, *rest)


def _window(config: PretrainedConfig, layer: int) -> int:
    """The sliding window of a layer, as its config says; 0 for none."""
    kinds = getattr(config, "layer_types", None)
    sliding = kinds[layer] == "sliding_attention" if kinds else True
    return int(getattr(config, "sliding_window", None) or 0) if sliding else 0


def _close(logits: NDArray[np.float32], tolerance: float) -> bool:
    """Whether two rows differ by less than this share of their spread."""
    return bool(np.abs(logits[0] - logits[1]).max() <= tolerance * logits.std())


def _block_bytes(model: Model) -> int:
    return 8 * model.num_layers * model.kv_heads * model.head_dim * BLOCK
