"""int8 on the CPU: weights per output channel, activations per row, every row's result its own.

A row of activations is divided by its own largest value and rounded to 8 bits, an output's weights likewise. A few activations
are a hundred times larger than most, and would leave these two or three steps; so both are rotated first, which changes no
product and gives every number a like share of the large ones (`kernels.spread`). The products are integers, summed exactly in
32 bits (`kernels.multiply_panel`); what follows is elementwise. A row's result is then the same bits whatever else is in the
batch, on any number of threads, with and without the processor's instruction for such products.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.errors import ModelError
from engine.target import attention, kernels, threads
from engine.target.kernels import PANEL

_NO_NORM = np.zeros(0, np.float32)
_NO_EPS = np.zeros(1, np.float32)
_NO_RESIDUAL = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Packed:
    """A matrix as the kernel reads it.

    1. `weights` int8 [panels, steps, PANEL, 4]: output PANEL * p + c and inputs 4 * s .. 4 * s + 3, as `kernels.spread_rows`
       leaves them, stand at [p, s, c].
    2. `offset` int32 [panels * PANEL] is 128 times the sum of each output's weights.
    3. `scale` and `bias` float32 [panels * PANEL]. Outputs beyond the matrix are zeros; so are inputs, before they are spread.
    """

    weights: NDArray[np.int8]
    offset: NDArray[np.int32]
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]

    @property
    def arrays(self) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """What kernels take for a matrix."""
        return self.weights, self.offset, self.scale, self.bias

    def validate(self) -> None:
        """Raise ValueError for arrays whose shapes do not go together."""
        if self.weights.ndim != 4 or self.weights.shape[2:] != (PANEL, 4):
            raise ValueError(f"packed weights must be [panels, steps, {PANEL}, 4]: {self.weights.shape}")
        for name in ("offset", "scale", "bias"):
            if getattr(self, name).shape != (len(self.weights) * PANEL,):
                raise ValueError(f"{name} must have {len(self.weights) * PANEL} entries: {getattr(self, name).shape}")

    @staticmethod
    def of(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
        """Spread, round and pack float [out, width]: to half a step, an output's largest spread weight / 127.

        Raises ModelError for weights that are not finite or sums that would not fit into 32 bits.
        """
        out, width = weight.shape
        if width > _WIDEST:
            raise ModelError(f"int8 takes layers of up to {_WIDEST} inputs: {width}; choose another dtype")
        panels, steps = -(-out // PANEL), -(-width // 4)
        weights = np.zeros((panels, steps, PANEL, 4), np.int8)
        scale, sums = np.zeros(panels * PANEL, np.float32), np.zeros(panels * PANEL, np.int32)
        for first in range(0, out, _PACKED_AT_ONCE):  # a float copy of a whole output head takes as much as the model
            some = torch.zeros(min(_PACKED_AT_ONCE, out - first), 4 * steps)
            some[:, :width] = weight[first : first + len(some)].detach()
            kernels.spread_rows(some.numpy())
            step = (some.abs().amax(1) / 127.0).clamp_min(1e-30)
            if not bool(torch.isfinite(step).all()):
                raise ModelError("weights are not all finite numbers: the file is damaged")
            rounded = np.zeros((-(-len(some) // PANEL) * PANEL, 4 * steps), np.int8)
            rounded[: len(some)] = (some / step[:, None]).round_().clamp_(-127, 127).to(torch.int8).numpy()
            at = slice(first // PANEL, first // PANEL + len(rounded) // PANEL)
            weights[at] = rounded.reshape(-1, PANEL, steps, 4).transpose(0, 2, 1, 3)
            scale[first : first + len(some)] = step.numpy()
            sums[first : first + len(rounded)] = rounded.sum(1, dtype=np.int32)
        added = np.zeros(panels * PANEL, np.float32)
        if bias is not None:
            added[:out] = bias.detach().float().numpy()
        return Packed(weights, sums * np.int32(kernels.ZERO), scale, added)


_WIDEST = 66_000
"""Inputs of which 255 x 127 each still add up to less than 2^31."""

_PACKED_AT_ONCE = 512 * PANEL


class Int8Matrix:
    """One or several linear layers of the same input as one packed int8 matrix; their outputs stand side by side.

    With `gated` the two layers are gate and up of a Llama MLP, and the output is silu(gate) * up.
    """

    def __init__(self, packed: Packed, width: int, sizes: Sequence[int], gated: bool = False) -> None:
        self.width = width
        self.sizes = tuple(sizes)
        self.packed = packed
        self._gated = gated
        self._out = self.sizes[0] if gated else sum(self.sizes)

    @classmethod
    def of(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], gated: bool = False) -> Int8Matrix:
        """Round and pack float weights [out_i, width]; gate and up have no biases."""
        sizes = [len(weight) for weight in weights]
        if gated:
            return cls(Packed.of(in_turns(*weights), None), weights[0].shape[1], sizes, True)
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat(
                [torch.zeros(size) if part is None else part.float() for size, part in zip(sizes, biases, strict=True)]
            )
        whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        return cls(Packed.of(whole, bias), weights[0].shape[1], sizes)

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [n, width] -> [n, out]."""
        team = threads.team()
        rows, factor = np.empty((len(x), 4 * self.packed.weights.shape[1]), np.uint8), np.empty(len(x), np.float32)
        kernels.quantize(team, x, _NO_NORM, _NO_EPS, rows, factor)
        out = np.empty((len(x), self._out), np.float32)
        kernels.multiply(team, rows, factor, *self.packed.arrays, _NO_RESIDUAL, self._gated, out)
        return out


def packed_shape(sizes: Sequence[int], width: int, gated: bool) -> tuple[int, int, int, int]:
    """The shape of `Packed.weights` for layers of these sizes and width."""
    panels = -(-2 * sizes[0] // PANEL) if gated else -(-sum(sizes) // PANEL)
    return panels, -(-width // 4), PANEL, 4


def in_turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[2 x out, width]: half a panel of the gate, the same outputs of up, and so on; zeros where the last are not full."""
    half = PANEL // 2
    padding = (0, 0, 0, -len(gate) % half)
    both = [nn.functional.pad(part.detach(), padding).unflatten(0, (-1, half)) for part in (gate, up)]
    return torch.stack(both, 1).flatten(0, 2)


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
        self.matrix = matrix
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        self._left: set[int] = set()

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Part `index` of the product with x [..., width]."""
        if self._input is not x or index not in self._left:
            flat = x.reshape(-1, self.matrix.width)
            result = torch.from_numpy(self.matrix(flat.numpy())).view(*x.shape[:-1], sum(self.matrix.sizes))
            self._parts = result.split(self.matrix.sizes, dim=-1)
            self._input, self._left = x, set(range(len(self._parts)))
        part = self._parts[index]
        self._left.discard(index)
        if not self._left:
            self._input, self._parts = None, ()
        return part


class Int8GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) as two products."""

    def __init__(self, gate_up: Int8Matrix, down: Int8Matrix) -> None:
        super().__init__()
        self._gate_up, self._down = gate_up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self._gate_up.width).numpy()
        return torch.from_numpy(self._down(self._gate_up(flat))).view(x.shape)


class Int8Decoder(nn.Module):
    """All layers of a decoder of the Llama kind in one call: x + attention(norm(x)), then that + mlp(norm(that)), and again.

    It computes what the layers it replaces would compute with the modules above, without their overhead, which for a small
    model is most of the time. `layers` are the layers of the network, alike in shape; for each, `matrices` has qkv, o, gate_up
    and down, and `windows` the sliding window, 0 for none.
    """

    def __init__(self, layers: Sequence[Any], matrices: Sequence[Sequence[Int8Matrix]], windows: Sequence[int]) -> None:
        super().__init__()
        self.matrices = [[matrix.packed for matrix in each] for each in matrices]
        pairs = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in layers]
        self._norms = [[norm.weight.detach().float().contiguous().numpy() for norm in pair] for pair in pairs]
        self._layers = np.array(
            [
                [array.ctypes.data for array in (*(part for matrix in each for part in matrix.arrays), *norms)]
                for each, norms in zip(self.matrices, self._norms, strict=True)
            ]
        )
        self._shapes = np.array([matrix.weights.shape[:2] for matrix in self.matrices[0]])
        self._windows = np.array(windows)
        self._numbers = np.array(
            [
                [*(norm.variance_epsilon for norm in pair), layer.self_attn.scaling]
                for pair, layer in zip(pairs, layers, strict=True)
            ],
            np.float32,
        )

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        cos, sin = (table[0].numpy() for table in position_embeddings)
        out = attention.current().decoder(
            hidden_states[0].numpy(), self._windows, cos, sin, self._layers, self._shapes, self._numbers
        )
        return torch.from_numpy(out)[None]


class StrictRMSNorm(nn.Module):
    """RMS normalization in the fixed order of `kernels.rms_norm`; weight float32 [width]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._weight = weight.detach().float().contiguous().numpy()
        self._eps = np.float32(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _row_by_row(kernels.rms_norm, x, self._weight, self._eps)


class StrictLayerNorm(nn.Module):
    """Layer normalization in the fixed order of `kernels.layer_norm`; weight and bias float32 [width]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._weight, self._bias = (part.detach().float().contiguous().numpy() for part in (weight, bias))
        self._eps = np.float32(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _row_by_row(kernels.layer_norm, x, self._weight, self._bias, self._eps)


def _row_by_row(normalize: Any, x: torch.Tensor, *parts: Any) -> torch.Tensor:
    """x [..., width], normalized by a kernel that takes rows, `parts` and what to fill."""
    rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
    out = np.empty_like(rows)
    normalize(rows, *parts, out)
    return torch.from_numpy(out).view(x.shape)


class StrictSiLU(nn.Module):
    """x / (1 + e^-x) with the kernels' e^x: torch's own differs in the last bit with the width and the number of threads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1).numpy()
        power = np.empty_like(flat)
        kernels.exp_rows(-flat, power)
        return torch.from_numpy(flat / (np.float32(1.0) + power)).view(x.shape)


class StrictRouter(nn.Module):
    """Stands in for a mixture's router: softmax over experts, its `top_k` largest, in the fixed order of `kernels.route`.

    Its weights (float [experts, width]) stay float32, since a row that goes to another expert is another row.
    """

    def __init__(self, weight: torch.Tensor, top_k: int, normalized: bool) -> None:
        super().__init__()
        self._num_experts, self._top_k, self._normalized = len(weight), top_k, normalized
        columns = nn.functional.pad(weight.detach().float().t(), (0, -len(weight) % kernels.LANES))
        self._weight = columns.contiguous().numpy()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        ids, shares = np.empty((len(flat), self._top_k), np.int64), np.empty((len(flat), self._top_k), np.float32)
        kernels.route(flat, self._weight, self._num_experts, self._normalized, ids, shares)
        return torch.from_numpy(shares), torch.from_numpy(shares), torch.from_numpy(ids)


class Int8Experts(nn.Module):
    """The experts of a mixture, each down(silu(gate(x)) * up(x)); a row's results are added by rising expert."""

    def __init__(self, gate_ups: Sequence[Int8Matrix], downs: Sequence[Int8Matrix]) -> None:
        super().__init__()
        self._gate_ups, self._downs = list(gate_ups), list(downs)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        rows, chosen, weights = x.contiguous().numpy(), ids.numpy(), shares.numpy()
        out = np.zeros_like(rows)
        for expert in np.unique(chosen).tolist():
            mine, places = np.nonzero(chosen == expert)
            said = self._downs[expert](self._gate_ups[expert](rows[mine]))
            out[mine] += said * weights[mine, places][:, None]
        return torch.from_numpy(out)


class StrictGELU(nn.Module):
    """GELU in its tanh form, x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3), by the kernels' e^x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1).numpy()
        power = np.empty_like(flat)
        kernels.exp_rows(_GELU * (flat + _GELU_CUBE * (flat * flat * flat)), power)
        return torch.from_numpy(flat / (np.float32(1.0) + power)).view(x.shape)


class StrictErfGELU(nn.Module):
    """GELU in its own form, x / 2 (1 + erf(x / sqrt(2))), with erf to 1.5e-7 by the kernels' e^x.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1).numpy()
        size = np.abs(flat) * _ROOT_HALF
        power = np.empty_like(flat)
        kernels.exp_rows(-(size * size), power)
        step = np.float32(1.0) / (np.float32(1.0) + _ERF_STEP * size)
        series = np.zeros_like(flat)
        for factor in _ERF:
            series = (series + factor) * step
        erf = np.copysign(np.float32(1.0) - series * power, flat)
        return torch.from_numpy(np.float32(0.5) * flat * (np.float32(1.0) + erf)).view(x.shape)


_ROOT_HALF, _ERF_STEP = np.float32(np.sqrt(0.5)), np.float32(0.3275911)
_ERF = [np.float32(a) for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)]

_GELU, _GELU_CUBE = np.float32(-2.0 * np.sqrt(2.0 / np.pi)), np.float32(0.044715)


class CappedHead(nn.Module):
    """An output head with logits bounded to cap x tanh(logit / cap), by the kernels' e^x. Gemma 2 does so after its head."""

    def __init__(self, head: Int8Linear, cap: float) -> None:
        super().__init__()
        self._head, self._cap = head, np.float32(cap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._head(x)
        flat = logits.reshape(-1).numpy()
        power = np.empty_like(flat)
        kernels.exp_rows(np.float32(2.0) * flat / self._cap, power)
        return torch.from_numpy(self._cap * (np.float32(1.0) - np.float32(2.0) / (power + np.float32(1.0)))).view(logits.shape)


class RotaryTable(nn.Module):
    """cos and sin of positions, computed for 256 neighbours at a time, so that no pass computes them in another shape.

    The 64 groups used last are kept: 16 MiB for heads of 128. A position's values are float32 [dim] each. Where kinds of layers
    turn by different angles (Gemma 3, OLMo 3), each kind has groups of its own.
    """

    _GROUP, _KEPT = 256, 64

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = [rotary]  # not a submodule: it has nothing to be exchanged or converted
        self._groups: OrderedDict[tuple[int, str | None], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = position_ids[0]
        groups = positions // self._GROUP
        wanted = groups.unique().tolist()
        if len(wanted) == 1:
            at = positions - wanted[0] * self._GROUP
            cos, sin = self._group(wanted[0], layer_type)
            return cos[at][None], sin[at][None]
        found = [self._group(group, layer_type) for group in wanted]
        at = torch.searchsorted(torch.tensor(wanted), groups) * self._GROUP + positions % self._GROUP
        return torch.cat([cos for cos, _ in found])[at][None], torch.cat([sin for _, sin in found])[at][None]

    def _group(self, group: int, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [_GROUP, dim], of the positions from group * _GROUP on."""
        key = group, kind
        if key not in self._groups:
            positions = torch.arange(group * self._GROUP, (group + 1) * self._GROUP)[None]
            cos, sin = self._rotary[0](torch.zeros(1, 1, 1), positions, *(() if kind is None else (kind,)))
            self._groups[key] = cos[0].contiguous(), sin[0].contiguous()
            if len(self._groups) > self._KEPT:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]


class StoredEmbedding(nn.Module):
    """An embedding table kept in the dtype it came in, its rows widened to float32 on the way out, and times `scale`."""

    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self._weight, self._scale = weight.detach(), scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(ids, self._weight).float()
        return rows if self._scale == 1.0 else rows * self._scale
