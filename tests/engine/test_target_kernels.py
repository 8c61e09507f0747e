"""The worker's kernels against their twins, and the order of their sums to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.target import kernels
from engine.target.kernels import BLOCK
from tests.engine import oracles_target as oracles

WIDTHS = [1, 15, 16, 17, 64, 1000, 2730, 8960]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    """Normal float32 numbers."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


# ---- rows


def test_exp_is_close_and_the_same_at_every_index() -> None:
    """Relative error below 3e-7 from -87 to 88, clamped outside; a number's result does not depend on where it stands."""
    x = np.linspace(-87, 88, 20_011).astype(np.float32)
    out = np.empty_like(x)
    kernels.exp_rows(x, out)
    assert np.max(np.abs(out / np.exp(x.astype(np.float64)) - 1)) < 3e-7
    for i in range(0, len(x), 397):
        alone = np.empty(1, np.float32)
        kernels.exp_rows(x[i : i + 1], alone)
        assert alone[0] == out[i]
    edge = np.array([-np.inf, -1e30, -87.0, 0.0, 88.0, 1e30, np.inf], np.float32)
    found = np.empty_like(edge)
    kernels.exp_rows(edge, found)
    assert found[3] == 1.0 and (found[:3] == found[0]).all() and (found[4:] == found[6]).all()
    assert 0 < found[0] < 2e-38 and 1.6e38 < found[6] < np.inf


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_sums_in_the_written_order(width: int) -> None:
    """Bit for bit the twin that adds in float32 by index modulo 16, for full lanes and tails."""
    x, weight = random(3, width, scale=3.0), random(width, seed=1)
    x[2] = 0.0
    out = np.empty_like(x)
    kernels.rms_norm(x, weight, np.float32(1e-6), out)
    assert np.array_equal(out, oracles.rms_norm(x, weight, np.float32(1e-6)))
    wide = x.astype(np.float64)
    assert np.allclose(out, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_scaling_rows_and_back(width: int) -> None:
    """Rows land in [-1, 1] and touch it, beside one +1, one -1 and zeros; zero rows stay zero; unscaling restores and adds."""
    x = random(4, width, scale=50.0)
    x[1] = 0.0
    x[2] *= 1e-20
    out, scale = np.full((4, width + 4), 9.0, np.float32), np.empty(4, np.float32)
    kernels.scale_rows(x, out, scale)
    largest = np.abs(out[:, :width]).max(1)
    assert largest[1] == 0.0 and largest.max() <= 1.0 and np.allclose(largest[[0, 2, 3]], 1.0)
    assert (out[:, width:] == [1.0, -1.0, 0.0, 0.0]).all()
    assert scale.tolist() == [np.abs(x[0]).max(), 1.0, np.abs(x[2]).max(), np.abs(x[3]).max()]
    bias = random(width, seed=3)
    for added, expected in [(np.zeros(0, np.float32), x.astype(np.float64)), (bias, x.astype(np.float64) + bias)]:
        back = np.ascontiguousarray(out[:, :width])
        kernels.unscale_rows(back, scale, added)
        assert np.allclose(back, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_gate_is_silu_times_up(width: int) -> None:
    """Scaled gate and up give silu(gate) * up, scaled again; large negative gates give 0; each row as if it were alone."""
    y, scale = random(4, 2 * width, scale=2.0), np.array([1.0, 3.0, 0.01, 60.0], np.float32)
    out, out_scale = np.empty((4, width + 4), np.float32), np.empty(4, np.float32)
    kernels.silu_gate(y, scale, out, out_scale)
    both = y * scale[:, None]
    expected = oracles.silu_gate(both[:, :width], both[:, width:])
    found = out[:, :width].astype(np.float64) * out_scale[:, None]
    assert np.all(np.abs(found - expected) <= 2e-6 * np.abs(expected) + 1e-12 * out_scale[:, None])
    assert np.allclose(np.abs(out[:, :width]).max(1), 1.0) and (out[:, width:] == [1.0, -1.0, 0.0, 0.0]).all()
    for row in range(4):
        alone, alone_scale = np.empty((1, width + 4), np.float32), np.empty(1, np.float32)
        kernels.silu_gate(y[row : row + 1], scale[row : row + 1], alone, alone_scale)
        assert np.array_equal(alone[0], out[row]) and alone_scale[0] == out_scale[row]


# ---- storage


def storage(num_blocks: int, kv_heads: int, dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values full of something that must never be read."""
    keys = np.full((num_blocks, kv_heads, dim, BLOCK), np.nan, np.float32)
    return keys, np.full((num_blocks, kv_heads, BLOCK, dim), np.nan, np.float32)


def slots(keys: NDArray[np.float32], values: NDArray[np.float32], table: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """[2, kv heads, count, dim]: the first slots of a sequence, in order."""
    found = [
        (keys[table[s // BLOCK], :, :, s % BLOCK], values[table[s // BLOCK], :, s % BLOCK]) for s in range(count)
    ]
    return np.stack([np.stack([k for k, _ in found], 1), np.stack([v for _, v in found], 1)])


@pytest.mark.parametrize("length", [0, 1, 62, 63, 64, 65, 126, 128])
def test_store_and_compact_keep_a_sequence(length: int) -> None:
    """Rows go behind the prefix across block borders, whatever blocks it has; compacting leaves the accepted ones, in order."""
    rng = np.random.default_rng(length)
    table = rng.permutation(5).astype(np.int32)[:4]
    keys, values = storage(5, 2, 8)
    new = random(2, 2, length + 9, 8, seed=length)
    kernels.store(keys, values, new[0], new[1], 0, length, table, 0)
    kernels.store(keys, values, new[0], new[1], length, 9, table, length)
    assert np.array_equal(slots(keys, values, table, length + 9), new[:, :, : length + 9])
    path = np.array([0, 2, 3, 7], np.int32)
    kernels.compact(keys, values, table, length, path)
    expected = np.concatenate([new[:, :, :length], new[:, :, length + path]], 2)
    assert np.array_equal(slots(keys, values, table, length + 4), expected)
    other = np.setdiff1d(np.arange(5), table)
    assert np.isnan(keys[other]).all() and np.isnan(values[other]).all()


# ---- attention of one sequence


def attend(
    query: NDArray[np.float32],
    new: NDArray[np.float32],
    length: int,
    parents: NDArray[np.int32],
    table: NDArray[np.int32],
    window: int,
    scale: float,
    tile: int = 4,
) -> NDArray[np.float32]:
    """[rows, heads, dim] by the kernel, tile by tile; `new` [2, kv heads, slots, dim] are the keys and values of all slots."""
    heads, _, dim = query.shape
    kv_heads, num_rows = new.shape[1], len(parents)
    keys, values = storage(int(table.max()) + 1, kv_heads, dim)
    kernels.store(keys, values, new[0], new[1], 0, length + num_rows, table, 0)
    lists: list[list[int]] = []
    for row, parent in enumerate(parents.tolist()):
        lists.append([*(lists[parent] if parent >= 0 else []), row])
    starts = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    ancestors = np.concatenate(lists).astype(np.int32)
    out = np.full((num_rows, heads, dim), np.nan, np.float32)
    for kv in range(kv_heads):
        for begin in range(0, num_rows, tile):
            end = min(begin + tile, num_rows)
            kernels.attend(
                query, keys, values, table, length, begin, end, 0, starts, ancestors, kv, window, np.float32(scale), out
            )
    return out


TREE = np.array([-1, 0, 0, 1, 3, 0, 2, 6, 4, 8, 8], np.int32)


@pytest.mark.parametrize("window", [0, 1, 5, 70])
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 16), ((4, 2), 64), ((6, 1), 80)], ids=str)
def test_attention_is_dense_attention_under_the_trees_mask(heads: tuple[int, int], dim: int, window: int) -> None:
    """For grouped and single kv heads, any prefix around block borders, with and without a window: the float64 twin."""
    for length in [0, 1, 63, 64, 65, 127, 128, 129]:
        rng = np.random.default_rng(length)
        table = rng.permutation(7).astype(np.int32)[:3]
        query = random(heads[0], len(TREE), dim, seed=1)
        new = random(2, heads[1], length + len(TREE), dim, seed=2)
        found = attend(query, new, length, TREE, table, window, 0.25)
        expected = oracles.attend(query, new[0], new[1], oracles.visible(TREE, length, window), 0.25)
        assert np.allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_attention_stays_finite_for_scores_of_any_size() -> None:
    """Scores of thousands, and a sharp peak among them, give what float64 gives."""
    query, new = random(2, 3, 16, scale=60.0), random(2, 2, 40 + 3, 16, seed=4, scale=60.0)
    parents = np.array([-1, 0, 0], np.int32)
    found = attend(query, new, 40, parents, np.array([0], np.int32), 0, 1.0)
    expected = oracles.attend(query, new[0], new[1], oracles.visible(parents, 40, 0), 1.0)
    assert np.isfinite(found).all() and np.allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dim", "window"), [(16, 0), (64, 20), (80, 0)])
def test_a_rows_attention_depends_on_its_logical_sequence_only(dim: int, window: int) -> None:
    """Where the prefix ends, which blocks it has, what siblings stand between, and how rows are tiled change no bit."""
    total = 133
    query, new = random(4, total, dim, seed=7), random(2, 2, total, dim, seed=8, scale=2.0)
    chain = np.arange(-1, total - 1, dtype=np.int32)
    expected = attend(query, new, 0, chain, np.arange(3, dtype=np.int32), window, 0.25)
    rng = np.random.default_rng(3)
    for length in [1, 4, 30, 62, 63, 64, 65, 66, 100, 126, 127, 128, 129, 131]:
        tail = total - length
        noise = rng.random(2 * tail) < 0.5
        real = np.flatnonzero(~noise)[:tail]
        num_rows = int(real[-1]) + 1
        parents = np.full(num_rows, -1, np.int32)
        for row in range(num_rows):
            above = real[real < row]
            parents[row] = above[-1] if len(above) else -1
        source = np.full(num_rows, 5)
        source[real] = np.arange(length, length + len(real))
        table = rng.permutation(9).astype(np.int32)[:6]
        placed = np.concatenate([new[:, :, :length], new[:, :, source]], 2)
        found = attend(query[:, source], placed, length, parents, table, window, 0.25, tile=int(rng.integers(1, 9)))
        assert np.array_equal(found[real], expected[length : length + len(real)])
