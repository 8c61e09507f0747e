"""Slow, obvious twins of the local worker: dense attention with a written mask, plain forward passes, ordered sums."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.tree import CandidateTree, CostCurve


def ordered_sum(values: NDArray[np.float32]) -> np.float32:
    """The sum of `kernels` in plain steps: sixteen lanes by index modulo 16, then the lanes one after the other, in float32."""
    lanes = [np.float32(0.0)] * 16
    for i, value in enumerate(values):
        lanes[i % 16] = lanes[i % 16] + value
    total = np.float32(0.0)
    for lane in lanes:
        total = total + lane
    return total


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: np.float32) -> NDArray[np.float32]:
    """The same, bit for bit, as `kernels.rms_norm`: every operation in float32, the sum in its order."""
    rows = []
    for row in x:
        mean = ordered_sum(row * row) / np.float32(len(row))
        rows.append(row * (np.float32(1.0) / np.sqrt(mean + eps)) * weight)
    return np.stack(rows)


def silu_gate(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float64]:
    """silu(gate) * up."""
    wide = gate.astype(np.float64)
    return wide / (1.0 + np.exp(-wide)) * up


def visible(parents: NDArray[np.int32], length: int, window: int) -> NDArray[np.bool_]:
    """bool [rows, length + rows]: which of a sequence's slots each row of its tree may see, by the definition.

    Slot s < length is position s of the prefix; slot length + j is row j, at position length + its depth.
    """
    num_rows = len(parents)
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = [*range(length), *(length + depth for depth in depths)]
    mask = np.zeros((num_rows, length + num_rows), np.bool_)
    for row in range(num_rows):
        mask[row, :length] = True
        above = row
        while above >= 0:
            mask[row, length + above] = True
            above = int(parents[above])
        if window > 0:
            mask[row] &= np.array(positions) > positions[length + row] - window
    return mask


def attend(
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    mask: NDArray[np.bool_],
    scale: float,
    softcap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Dense attention in float64: query [heads, rows, dim], keys and values [kv heads, slots, dim]; [rows, heads, dim].

    `softcap` bounds scores by tanh; `sinks` [heads] is a column of scores that is dropped after the softmax.
    """
    heads, num_rows, dim = query.shape
    group = heads // len(keys)
    out = np.zeros((num_rows, heads, dim))
    for head in range(heads):
        scores = query[head].astype(np.float64) @ keys[head // group].astype(np.float64).T * scale
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        scores[~mask] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((num_rows, 1), np.float64(sinks[head]))], 1)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out[:, head] = weights[:, : keys.shape[1]] @ values[head // group].astype(np.float64)
    return out


@torch.inference_mode()
def forward(network: PreTrainedModel, path: Sequence[int]) -> NDArray[np.float32]:
    """float32 [tokens, vocab]: transformers' own forward pass over one text, its own mask, no cache."""
    logits: NDArray[np.float32] = network(torch.tensor([list(path)]), use_cache=False).logits[0].float().numpy()
    return logits


def spread(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows [n, width] after `kernels.spread`, in float64; zeros fill them up to a multiple of four before."""
    wide = np.pad(rows.astype(np.float64), ((0, 0), (0, -rows.shape[1] % 4)))
    width, parts = wide.shape[1], 1
    while 2 * parts <= width:
        pairs = wide.reshape(len(wide), width // 2, 2)
        wide, parts = np.concatenate([pairs.sum(2), pairs[:, :, 0] - pairs[:, :, 1]], 1), 2 * parts
    return wide


def unspread(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """What `spread`, divided by 2^steps, makes these rows of: its matrix is orthogonal but for its size."""
    return rows @ spread(np.eye(rows.shape[1], dtype=np.float32)).T


def int8_matrix(weight: NDArray[np.float32]) -> NDArray[np.float64]:
    """A weight matrix [out, width] spread (and divided by 2^steps), then rounded to int8 per channel: [out, width or more]."""
    wide = spread(weight)
    wide /= 2 ** int(np.log2(wide.shape[1]))
    scale = np.maximum(np.abs(wide).max(1, keepdims=True) / 127.0, 1e-12)
    return np.clip(np.round(wide / scale), -127, 127) * scale


def best_cut(trees: Sequence[CandidateTree], curve: CostCurve, max_rows: int, other_rows: int) -> float:
    """The most expected tokens per second of any choice of sizes, by trying all of them; every root stays."""
    best = 0.0
    for sizes in itertools.product(*(range(1, len(tree) + 1) for tree in trees)):
        rows = sum(sizes) + other_rows
        if sum(sizes) > len(trees) and rows > max_rows:
            continue
        gain = sum(float(tree.probs[:size].sum(dtype=np.float64)) for tree, size in zip(trees, sizes, strict=True))
        best = max(best, gain / float(curve.at(rows)))
    return best
