"""int8 modules: close to what they stand in for, and every row the same bits in any company and on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from engine.errors import ModelError
from engine.target import quantize
from engine.target.kernels import PANEL
from engine.target.quantize import (
    Int8GatedMLP,
    Int8Linear,
    Int8Matrix,
    Int8Shared,
    Packed,
    RotaryTable,
    StoredEmbedding,
    StrictSiLU,
)
from tests.engine import oracles_target as oracles
from tests.engine import tiny

WIDTHS = [1000, 2730, 8960]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal float32 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def uneven_rows(num_rows: int, width: int) -> NDArray[np.float32]:
    """Rows of very different size, one of them zero."""
    scales = np.array([1.0, 1e-6, 300.0, 0.0, 0.02, 1e6])[np.arange(num_rows) % 6]
    rows: NDArray[np.float32] = (random(num_rows, width, seed=3).numpy() * scales[:, None]).astype(np.float32)
    return rows


def assert_rows_are_their_own(apply: Callable[[NDArray[np.float32]], NDArray[np.float32]], x: NDArray[np.float32]) -> None:
    """Every row, alone on one thread, is bit for bit itself in any order, company and number of threads."""
    rng = np.random.default_rng(1)
    with tiny.num_threads(1):
        alone = np.concatenate([apply(x[i : i + 1]) for i in range(len(x))])
    for count in (1, 2, 3, 4, 8):
        with tiny.num_threads(count):
            for size in (2, 5, len(x), 33):
                some = rng.integers(len(x), size=size)
                assert np.array_equal(apply(x[some]), alone[some])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_linear_layers_rows_are_their_own(width: int) -> None:
    """Rows of any size in any company; within half a step of the activations from the product with the rounded weights."""
    weight, bias = random(40, width, seed=1), random(40, seed=2)
    matrix = Int8Matrix.of([weight], [bias])
    x = uneven_rows(12, width)
    assert_rows_are_their_own(matrix, x)
    rounded, spread = oracles.int8_matrix(weight.numpy()), oracles.spread(x)
    expected = spread @ rounded.T + bias.numpy()
    step = np.abs(spread).max(1, keepdims=True) / 127
    bound = step * np.abs(rounded).sum(1) * 0.51 + 1e-6 * np.abs(expected) + 1e-6
    assert np.all(np.abs(matrix(x) - expected) <= bound)


def test_a_row_that_overflows_spoils_itself_alone() -> None:
    """Infinities and NaNs answer NaN, numbers too small to invert answer about 0, and every other row is what it was."""
    matrix = Int8Matrix.of([random(40, 64, seed=1)], [None])
    x = random(8, 64, seed=2).numpy()
    expected = matrix(x)
    x[1, 5], x[3, 0], x[4, 63] = np.inf, np.nan, -np.inf
    x[6] = 1e-40
    found = matrix(x)
    assert np.isnan(found[[1, 3, 4]]).all() and np.abs(found[6]).max() < 1e-20
    assert np.array_equal(found[[0, 2, 5, 7]], expected[[0, 2, 5, 7]])


def test_several_layers_side_by_side_are_each_by_itself() -> None:
    """q, k and v as one matrix give the bits that each gives alone, biases only where there are any."""
    weights = [random(24, 64, seed=1), random(8, 64, seed=2, scale=9.0), random(8, 64, seed=3)]
    biases = [random(24, seed=4), None, random(8, seed=5)]
    x = uneven_rows(7, 64)
    whole = Int8Matrix.of(weights, biases)(x)
    alone = [Int8Matrix.of([weight], [bias])(x) for weight, bias in zip(weights, biases, strict=True)]
    assert np.array_equal(whole, np.concatenate(alone, 1))
    zero = Int8Matrix.of([torch.zeros(4, 64)], [None])(x)
    assert not zero.any()


@pytest.mark.parametrize("width", WIDTHS)
def test_an_mlps_rows_are_their_own(width: int) -> None:
    """Gate, SiLU and down, at odd inner widths: each row in any company, and near the float MLP."""
    gate, up, down = (nn.Linear(a, b, bias=False) for a, b in [(64, width), (64, width), (width, 64)])
    with torch.no_grad():
        for seed, layer in enumerate((gate, up, down)):
            layer.weight.copy_(random(*layer.weight.shape, seed=seed, scale=0.1))
    mlp = Int8GatedMLP(Int8Matrix.of([gate.weight, up.weight], [None, None], gated=True), Int8Matrix.of([down.weight], [None]))

    def apply(x: NDArray[np.float32]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = mlp(torch.from_numpy(x)[None])[0].numpy()
        return found

    x = random(10, 64, seed=7).numpy() * np.linspace(0.1, 4, 10, dtype=np.float32)[:, None]
    assert_rows_are_their_own(apply, x)
    with torch.no_grad():
        expected = down(nn.functional.silu(gate(torch.from_numpy(x))) * up(torch.from_numpy(x))).numpy()
    error = np.abs(apply(x) - expected).mean(1) / np.abs(expected).mean(1)
    assert np.all(error < 0.05)


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_is_the_same_everywhere(width: int) -> None:
    """x / (1 + e^-x) to rounding, an element's bits the same in any shape, the ends finite."""
    x = random(5, width, scale=8.0)
    found = StrictSiLU()(x[None])[0]
    assert torch.allclose(found, nn.functional.silu(x.double()).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[2, 7:19], StrictSiLU()(x[2, 7:19]))
    assert StrictSiLU()(torch.tensor([-1e4, 0.0, 1e4])).tolist() == [pytest.approx(0, abs=1e-30), 0.0, 1e4]


def test_layers_that_share_an_input_may_be_called_in_any_way() -> None:
    """q, k, v in any order, twice with one input, in turns with another input, some left out: always their own part."""
    matrix = Int8Matrix.of([random(6, 16, seed=1), random(4, 16, seed=2), random(4, 16, seed=3)], [None, random(4), None])
    shared = Int8Shared(matrix)
    layers = [Int8Linear(matrix, i, shared) for i in range(3)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(16, 6), (16, 4), (16, 4)]
    x, y = random(1, 5, 16, seed=8), random(1, 5, 16, seed=9)
    parts = {
        id(z): torch.from_numpy(matrix(z[0].numpy())).split(matrix.sizes, dim=-1) for z in (x, y)
    }  # by identity: equal inputs are still two
    calls = [(x, 2), (x, 0), (x, 1), (x, 1), (x, 1), (y, 0), (x, 0), (y, 2), (y, 2), (y, 1), (x, 2), (x, 1), (x, 0), (y, 0)]
    for z, i in calls:
        found = layers[i](z)
        assert found.shape == (1, 5, matrix.sizes[i]) and torch.equal(found[0], parts[id(z)][i])
    for i in range(3):
        layers[i](x)
    assert shared._input is None and shared._parts == (), "nothing is kept once all have taken theirs"


def test_weights_that_cannot_be_packed_are_refused() -> None:
    """Numbers that are not finite, and layers so wide that sums would overflow, name themselves."""
    with pytest.raises(ModelError, match="finite"):
        Packed.of(torch.tensor([[1.0, float("inf")]]), None)
    with pytest.raises(ModelError, match="66001"):
        Packed.of(torch.zeros(1, 66_001), None)
    assert 66_000 * 255 * 127 < 2**31


def test_packing_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix packed a few outputs at a time is the matrix packed at once; every integer stands where the layout says."""
    weight, bias = random(70, 10), random(70, seed=1)
    whole = Packed.of(weight, bias)
    whole.validate()
    monkeypatch.setattr(quantize, "_PACKED_AT_ONCE", PANEL)
    pieces = Packed.of(weight, bias)
    assert all(np.array_equal(a, b) for a, b in zip(whole.arrays, pieces.arrays, strict=True))
    rounded = oracles.int8_matrix(weight.numpy())
    for out, at in ((0, 0), (33, 9), (69, 5)):
        found = whole.weights[out // PANEL, at // 4, out % PANEL, at % 4] * whole.scale[out]
        assert found == pytest.approx(rounded[out, at])
    assert (whole.offset[:70] == 128 * np.round(rounded / whole.scale[:70, None]).sum(1)).all()
    with pytest.raises(ValueError, match="scale must have 96 entries"):
        Packed(whole.weights, whole.offset, whole.scale[:5], whole.bias).validate()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rotary_tables_hold_what_the_module_computes(name: str) -> None:
    """cos and sin of any positions, in any order, are those that the module gives for them."""
    rotary = tiny.twins(name)[0].model.rotary_emb
    table = RotaryTable(rotary)
    positions = torch.tensor([[0, 5, 5, 383, 64, 255, 256]])
    for found, expected in zip(table(torch.zeros(1), positions), rotary(torch.zeros(1, 1, 1), positions), strict=True):
        assert torch.allclose(found, expected, atol=1e-6) and found.dtype == torch.float32


def test_rotary_tables_stay_small_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many groups are kept; one that was dropped is computed to the same bits again, alone or beside others."""
    monkeypatch.setattr(RotaryTable, "_KEPT", 2)
    table = RotaryTable(tiny.twins("llama")[0].model.rotary_emb)
    positions = torch.tensor([[700, 3, 255, 256, 5000]])
    first = table(torch.zeros(1), positions)
    assert len(table._groups) == 2
    for i, position in enumerate(positions[0].tolist()):
        alone = table(torch.zeros(1), torch.tensor([[position]]))
        assert all(torch.equal(one[0, 0], all_[0, i]) for one, all_ in zip(alone, first, strict=True))
    assert len(table._groups) == 2


def test_an_embedding_kept_in_half_precision_loses_nothing() -> None:
    """Rows come out as float32, equal to the stored table."""
    weight = random(9, 8).half()
    assert torch.equal(StoredEmbedding(weight)(torch.tensor([[3, 0, 8]])), weight[[3, 0, 8]].float()[None])
