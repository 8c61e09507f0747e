"""int8 on the CPU: weights per output channel, activations scaled per row, every row's result its own.

`torch.ops.quantized.linear_dynamic` multiplies at memory bandwidth but quantizes activations per tensor, so a row would depend
on its neighbours. So every row is first divided by its own largest value, and two pinned columns holding +1 and -1 (against
zero weights) fix the range the operator sees. The products are integers, summed exactly in 32 bits; what follows is
elementwise. A row's result is then the same bits whatever else is in the batch, on any number of threads. `reduce_range` tests
this machine's kernels on a known product; where 8-bit activations saturate (no VNNI), 7 bits are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.errors import ModelError
from engine.target import attention, kernels, threads

PADDING = 4
"""Extra input columns: +1, -1, and zeros that keep the width a multiple of four."""

_NO_BIAS = np.zeros(0, np.float32)


class Int8Matrix:
    """One or several linear layers of the same input as one packed int8 matrix.

    `weights` are float [out_i, width]; their outputs stand side by side. |weight - int8 x scale| <= scale / 2, scale the
    channel's largest absolute value / 127.
    """

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.width = weights[0].shape[1]
        self.sizes = tuple(weight.shape[0] for weight in weights)
        scales, rows = [], []
        for weight in weights:
            weight = weight.detach().float()
            scale = (weight.abs().amax(1) / 127.0).clamp_min(1e-12)
            scales.append(scale.double())
            rows.append((weight / scale[:, None]).round().clamp_(-127, 127).to(torch.int8))
        self._packed = _pack(torch.cat(rows), torch.cat(scales))
        given = [
            np.zeros(size, np.float32) if bias is None else bias.detach().float().numpy()
            for size, bias in zip(self.sizes, biases, strict=True)
        ]
        self.bias = _NO_BIAS if all(bias is None for bias in biases) else np.concatenate(given)

    def scaled_product(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [n, out], for rows already in [-1, 1] and padded ([n, width + PADDING]); scale and bias are still to come."""
        result: torch.Tensor = torch.ops.quantized.linear_dynamic(torch.from_numpy(rows), self._packed, reduce_range())
        return result.numpy()

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [n, width] -> [n, out]."""
        rows, scale = _padded(self, len(x))
        kernels.scale_rows(x, rows, scale)
        result = self.scaled_product(rows)
        kernels.unscale_rows(result, scale, self.bias)
        return result


def _pack(weight: torch.Tensor, scale: torch.Tensor) -> object:
    """int8 [out, width] and float64 [out] as the operator's packed matrix, with PADDING zero columns."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch announces the end of its quantized dtypes; the operator itself takes nothing else
        padded = nn.functional.pad(weight, (0, PADDING))
        quantized = torch._make_per_channel_quantized_tensor(padded, scale, torch.zeros(len(scale), dtype=torch.int64), 0)
        return torch.ops.quantized.linear_prepack(quantized, None)


@cache
def reduce_range() -> bool:
    """True where activations may have 7 bits only. Raises ModelError where even these give inexact products."""
    for reduced in (False, True):
        if _exact(reduced):
            return reduced
    raise ModelError("this processor's int8 kernels give inexact products; choose another dtype: float32 or bfloat16")


def _exact(reduced: bool) -> bool:
    """Whether a product made to saturate 16-bit sums comes out exactly, at several numbers of rows."""
    width, out = 512, 64
    packed = _pack(torch.full((out, width), 127, dtype=torch.int8), torch.ones(out, dtype=torch.float64))
    top = 127 if reduced else 255
    for num_rows in (1, 2, 5, 16):
        rows = torch.ones(num_rows, width + PADDING)
        rows[:, width + 1] = -1.0
        rows[:, width + 2 :] = 0.0
        got = torch.ops.quantized.linear_dynamic(rows, packed, reduced)
        level = float(got[0, 0]) * (top / 2.0) / (127.0 * width)  # of the activation 1: half the range, rounded either way
        if min(abs(level - top // 2), abs(level - top // 2 - 1)) > 1e-3 or not bool((got == got[0, 0]).all()):
            return False
    return True


class Int8Linear(nn.Module):
    """Stands in for nn.Linear; `share` lets several layers of one input (q, k, v; gate, up) be one product.

    The first of them to be called with an input computes for all; the others take their part of it.
    """

    def __init__(self, matrix: Int8Matrix, index: int = 0, shared: Int8Shared | None = None) -> None:
        super().__init__()
        self._shared = shared or Int8Shared(matrix)
        self._index = index
        self.in_features = matrix.width
        self.out_features = matrix.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.product(x, self._index)


class Int8Shared:
    """The products of layers that read one input, remembered until all have taken theirs."""

    def __init__(self, matrix: Int8Matrix) -> None:
        self._matrix = matrix
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._left: set[int] = set()

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Part `index` of the product with x [..., width]."""
        if self._input is not x or index not in self._left:
            flat = x.reshape(-1, self._matrix.width)
            result = torch.from_numpy(self._matrix(flat.numpy())).view(*x.shape[:-1], -1)
            self._parts = result.split(self._matrix.sizes, dim=-1)
            self._input, self._left = x, set(range(len(self._parts)))
        part = self._parts[index]
        self._left.discard(index)
        if not self._left:
            self._input, self._parts = None, ()
        return part


class Int8GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) as two products with one kernel between."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self._in = Int8Matrix([gate.weight, up.weight], [None, None])
        self._out = Int8Matrix([down.weight], [None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self._in.width).numpy()
        rows, scale = _padded(self._in, len(flat))
        kernels.scale_rows(flat, rows, scale)
        inner = self._in.scaled_product(rows)
        rows, inner_scale = _padded(self._out, len(flat))
        threads.silu_gate(inner, scale, rows, inner_scale)
        result = self._out.scaled_product(rows)
        kernels.unscale_rows(result, inner_scale, _NO_BIAS)
        return torch.from_numpy(result).view(x.shape)


class Int8DecoderLayer(nn.Module):
    """A decoder layer of the Llama kind, x + attention(norm(x)), then x + mlp(norm(x)), as four products and six kernels.

    It computes what the layer it replaces would compute with the modules above, without their overhead, which for a small model
    is most of the time. `window` is the sliding window, 0 for none.
    """

    def __init__(self, layer: Any, window: int) -> None:
        super().__init__()
        mixer, mlp = layer.self_attn, layer.mlp
        self._index = int(mixer.layer_idx)
        self._window = window
        self._dim = int(mixer.head_dim)
        self._scale = float(mixer.scaling)
        projections = [mixer.q_proj, mixer.k_proj, mixer.v_proj]
        self._qkv = Int8Matrix([part.weight for part in projections], [part.bias for part in projections])
        self._o = Int8Matrix([mixer.o_proj.weight], [mixer.o_proj.bias])
        self._gate_up = Int8Matrix([mlp.gate_proj.weight, mlp.up_proj.weight], [None, None])
        self._down = Int8Matrix([mlp.down_proj.weight], [None])
        self._norms = [_norm_parts(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        rows = attention.current()
        x = hidden_states[0].numpy()
        cos, sin = (table[0].numpy() for table in position_embeddings)
        product, scale = self._normed(self._qkv, x, 0)
        query = np.empty((self._qkv.sizes[0] // self._dim, len(x), self._dim), np.float32)
        rows.rotate_and_store(self._index, product, scale, self._qkv.bias, cos, sin, query)
        mixed = rows.attend(self._index, query, self._window, self._scale).reshape(len(x), -1)
        scaled, scale = _padded(self._o, len(x))
        kernels.scale_rows(mixed, scaled, scale)
        middle = np.empty_like(x)
        kernels.add_rows(x, self._o.scaled_product(scaled), scale, self._o.bias, middle)
        product, scale = self._normed(self._gate_up, middle, 1)
        scaled, inner = _padded(self._down, len(x))
        threads.silu_gate(product, scale, scaled, inner)
        out = np.empty_like(x)
        kernels.add_rows(middle, self._down.scaled_product(scaled), inner, _NO_BIAS, out)
        return torch.from_numpy(out)[None]

    def _normed(
        self, matrix: Int8Matrix, x: NDArray[np.float32], which: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The product with normalized rows, still to be scaled, and the scales."""
        weight, eps = self._norms[which]
        scaled, scale = _padded(matrix, len(x))
        kernels.norm_rows(x, weight, eps, scaled, scale)
        return matrix.scaled_product(scaled), scale


def _padded(matrix: Int8Matrix, num_rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Room for a product's scaled and padded input, and its scales."""
    return np.empty((num_rows, matrix.width + PADDING), np.float32), np.empty(num_rows, np.float32)


def _norm_parts(norm: Any) -> tuple[NDArray[np.float32], np.float32]:
    """Weight and epsilon of an RMS norm as in Llama."""
    return norm.weight.detach().float().contiguous().numpy(), np.float32(norm.variance_epsilon)


class StrictRMSNorm(nn.Module):
    """RMS normalization in the fixed order of `kernels.rms_norm`; weight float32 [width]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._weight = weight.detach().float().contiguous().numpy()
        self._eps = np.float32(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        out = np.empty_like(flat)
        kernels.rms_norm(flat, self._weight, self._eps, out)
        return torch.from_numpy(out).view(x.shape)


class StrictSiLU(nn.Module):
    """x / (1 + e^-x) with the kernels' e^x: torch's own differs in the last bit with the width and the number of threads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1).numpy()
        power = np.empty_like(flat)
        kernels.exp_rows(-flat, power)
        return torch.from_numpy(flat / (np.float32(1.0) + power)).view(x.shape)


class RotaryTable(nn.Module):
    """cos and sin of every position (float32 [context, dim]), computed once, so that no pass computes them in another shape."""

    def __init__(self, rotary: nn.Module, context_length: int) -> None:
        super().__init__()
        positions = torch.arange(context_length)[None]
        cos, sin = rotary(torch.zeros(1, 1, 1), positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cos[position_ids], self._sin[position_ids]


class StoredEmbedding(nn.Module):
    """An embedding table kept in the dtype it came in, its rows widened to float32 on the way out."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._weight = weight.detach()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self._weight).float()
