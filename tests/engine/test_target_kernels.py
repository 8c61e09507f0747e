"""The worker's kernels against their twins, and the order of their sums to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from llvmlite.binding import get_host_cpu_features
from numba import njit
from numpy.typing import NDArray

from engine.target import kernels, threads
from engine.target.kernels import BLOCK, LANES
from engine.target.quantize import Int8Matrix, Packed
from tests.engine import oracles_target as oracles
from tests.engine import tiny

WIDTHS = [1, 15, 16, 17, 64, 1000, 2730, 8960]
NOTHING = np.zeros(0, np.float32)


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


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 64, 801])
def test_exponentials_and_their_sum_in_one_go_are_those_of_each_kernel(length: int) -> None:
    """`_exp_from` has the bits of `exp_rows` and of `_sum`, whatever is left over behind whole vectors; a NaN stays one."""
    x, out = random(length, scale=9.0), np.empty(length, np.float32)
    top = x.max()
    kernels.exp_rows(x - top, out)
    behind = np.concatenate([x, np.full(LANES, 7.0, np.float32)])
    assert kernels._exp_from(behind[:length], top) == kernels._sum(out) == oracles.ordered_sum(out)
    assert np.array_equal(behind, np.concatenate([out, np.full(LANES, 7.0, np.float32)])), "and nothing beyond is touched"
    x[length // 2] = np.nan
    assert np.isnan(kernels._exp_from(x, np.float32(0.0))) and np.isnan(x[length // 2])


@pytest.mark.parametrize("columns", [16, 64, 80])
def test_products_of_any_number_of_rows_are_those_of_each_row_alone(columns: int) -> None:
    """Every height of tile gives the same bits: one chain of fused multiply-adds for each number, in order."""
    a, b = random(17, 9), random(9, columns, seed=1)
    alone = random(17, columns, seed=2)
    expected = alone + a.astype(np.float64) @ b
    together = [alone[:rows].copy() for rows in range(1, 18)]
    for row in range(17):
        kernels._multiply_add(a[row : row + 1], b, alone[row : row + 1])
    for found in together:
        kernels._multiply_add(a[: len(found)], b, found)
        assert np.array_equal(found, alone[: len(found)])
    assert np.allclose(alone, expected, atol=1e-5)


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


@pytest.mark.parametrize("width", [2, 4, 12, 20, 64, 100, 576, 1000, 1536])
def test_spreading_is_a_rotation_into_equal_parts(width: int) -> None:
    """Of 0, 1 and -1, orthogonal, each number in 2^k places; the Walsh-Hadamard transform for powers of two."""
    rotation = np.eye(width, dtype=np.float32)
    kernels.spread_rows(rotation)
    parts = 2 ** int(np.log2(width))
    rotation *= parts
    assert set(np.unique(rotation)) <= {-1.0, 0.0, 1.0} and set(np.abs(rotation).sum(1)) == {parts}
    assert np.array_equal(rotation @ rotation.T, parts * np.eye(width))
    if parts == width:
        changes = np.sort((np.diff(rotation, axis=0) != 0).sum(0))
        assert np.array_equal(changes, np.arange(width)), "every number of changes of sign once: Walsh's functions"


@pytest.mark.parametrize("width", [4, 64, 2732, 8960])
def test_rows_are_spread_as_written(width: int) -> None:
    """The twin's numbers to rounding, and every output where the twin has it; products of spread rows are those of the rows."""
    x, y = random(3, width), random(3, width, seed=1)
    x[1, width // 2] = 1e4
    found = np.stack([kernels.spread(row.copy(), np.empty_like(row)).copy() for row in x])
    assert np.allclose(found, oracles.spread(x), rtol=1e-5, atol=1e-5 * np.abs(found).max())
    kernels.spread_rows(y)
    assert np.allclose(found.astype(np.float64) @ y.T, x.astype(np.float64) @ random(3, width, seed=1).T, atol=0.05)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_quantized_by_their_own_largest_value(width: int) -> None:
    """uint8 around 128, the largest number at 1 or 255, half a step from the spread row at most; zero rows stay zero."""
    x = random(4, width, scale=50.0)
    x[1] = 0.0
    x[2] *= 1e-20
    expected = oracles.spread(x)
    out, scale = np.full(expected.shape, 9, np.uint8), np.empty(4, np.float32)
    kernels.quantize_rows(x, NOTHING, np.float32(0), out, scale)
    levels = out.astype(np.float64) - kernels.ZERO
    assert np.abs(levels).max(1).tolist() == [127, 0, 127, 127]
    assert np.allclose(scale[[0, 2, 3]], np.abs(expected[[0, 2, 3]]).max(1) / 127, rtol=1e-5)
    assert np.all(np.abs(levels * scale[:, None] - expected)[[0, 2, 3]] <= 0.501 * scale[[0, 2, 3], None])


@pytest.mark.parametrize("width", WIDTHS)
def test_normalizing_and_quantizing_in_one_go(width: int) -> None:
    """The same bits as one after the other, on one thread and on several, for few rows and for many."""
    weight = random(width, seed=1)
    for num_rows in (1, 3, 40):
        x = random(num_rows, width, scale=3.0)
        normed = np.empty_like(x)
        kernels.rms_norm(x, weight, np.float32(1e-6), normed)
        expected, expected_scale = np.empty((num_rows, -(-width // 4) * 4), np.uint8), np.empty(num_rows, np.float32)
        kernels.quantize_rows(normed, NOTHING, np.float32(0), expected, expected_scale)
        for count in (1, 3):
            with tiny.num_threads(count):
                found, scale = np.empty_like(expected), np.empty_like(expected_scale)
                kernels.quantize(threads.team(), x, weight, np.array([1e-6], np.float32), found, scale)
            assert np.array_equal(found, expected) and np.array_equal(scale, expected_scale)


# ---- int8 products


def packed_random(out: int, width: int) -> tuple[Packed, NDArray[np.int64], NDArray[np.float32]]:
    """A packed matrix, its integers int64 [out, width, a multiple of 4], and its scales and biases [2, out]."""
    rng = np.random.default_rng(out + width)
    weights = rng.integers(-127, 128, (out, width)).astype(np.int8)
    weights[:, 0] = 127  # every output's scale is then its own, exactly
    scale, bias = rng.random(out).astype(np.float32) + np.float32(0.5), rng.standard_normal(out).astype(np.float32)
    unspread = oracles.unspread(weights * scale[:, None].astype(np.float64)).astype(np.float32)
    packed = Packed.of(torch.from_numpy(unspread), torch.from_numpy(bias))
    return packed, weights.astype(np.int64), np.stack([packed.scale[:out], bias])


def product(packed: Packed, rows: NDArray[np.uint8], factor: NDArray[np.float32], out: int) -> NDArray[np.float32]:
    """The kernel's product of quantized rows."""
    padded = np.zeros((len(rows), 4 * packed.weights.shape[1]), np.uint8)
    padded[:, : rows.shape[1]] = rows
    found = np.full((len(rows), out), np.nan, np.float32)
    kernels.multiply(threads.team(), padded, factor, *packed.arrays, np.zeros((0, 0), np.float32), False, found)
    return found


@pytest.mark.parametrize(("out", "width"), [(1, 4), (31, 8), (32, 64), (97, 1000), (64, 2732)])
def test_products_are_sums_of_integers(out: int, width: int) -> None:
    """For any number of rows and threads, extremes among them: the exact sum, scaled and shifted in the written order."""
    packed, weights, (scale, bias) = packed_random(out, width)
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, kernels.TILE_ROWS - 1, kernels.TILE_ROWS, kernels.TILE_ROWS + 1, 30):
        rows = rng.integers(1, 256, (num_rows, width)).astype(np.uint8)
        rows[0] = 255
        rows[-1] = 1
        factor = rng.random(num_rows).astype(np.float32)
        exact = (rows.astype(np.int64) - kernels.ZERO) @ weights.T
        expected = exact.astype(np.float32) * scale * factor[:, None] + bias
        for count in (1, 3):
            with tiny.num_threads(count):
                assert np.array_equal(product(packed, rows, factor, out), expected)


@pytest.mark.parametrize("instruction", ["avx512vnni", "avx2", ""])
def test_products_are_the_same_on_every_processor(instruction: str) -> None:
    """The tile for processors without the best instruction gives the bits of the one in use."""
    if instruction and not get_host_cpu_features().get(instruction):
        pytest.skip(f"this processor has no {instruction}")
    other = kernels._dot_tile(instruction)

    @njit
    def both(which: bool, rows: Any, a: Any, b: Any, sums: Any) -> None:
        weights = b.ctypes.data
        tile = (a.ctypes.data, a.shape[1], weights, b.shape[1], weights, 0, sums.ctypes.data)
        if which:
            other(rows, *tile)
        else:
            kernels._dot(rows, *tile)

    packed, _, _ = packed_random(kernels.PANEL, 200)
    rng = np.random.default_rng(0)
    for num_rows in range(1, min(kernels.TILE_ROWS, 4) + 1):
        rows = rng.integers(0, 256, (num_rows, 200)).astype(np.uint8)
        found = np.ones((2, num_rows, kernels.PANEL), np.int32)
        for which in (False, True):
            both(which, num_rows, rows, packed.weights, found[int(which)])
        assert (found != 1).any() and np.array_equal(found[0], found[1])


@pytest.mark.parametrize("width", [1, 15, 16, 17, 1000])
def test_the_gate_is_silu_times_up(width: int) -> None:
    """A gated product is silu(gate) * up of the two products; large negative gates give 0; each row as if it were alone."""
    gate, up = torch.from_numpy(random(width, 64, seed=1)), torch.from_numpy(random(width, 64, seed=2))
    x = random(14, 64, scale=2.0) * np.linspace(0.1, 10, 14, dtype=np.float32)[:, None]
    gates, ups = (Int8Matrix.of([layer], [None])(x) for layer in (gate, up))
    both = Int8Matrix.of([gate, up], [None, None], gated=True)
    found, expected = both(x), oracles.silu_gate(gates.astype(np.float64), ups.astype(np.float64))
    power = np.empty(gates.size, np.float32)
    kernels.exp_rows(-gates.ravel(), power)
    assert np.array_equal(found, gates / (1 + power.reshape(gates.shape)) * ups)
    assert found.shape == expected.shape and np.all(np.abs(found - expected) <= 2e-6 * np.abs(expected) + 1e-12)
    for row in range(14):
        assert np.array_equal(both(x[row : row + 1])[0], found[row])


def test_a_residual_is_added_last() -> None:
    """out = residual + product, to the bit."""
    packed, _, _ = packed_random(40, 64)
    rows, factor = np.random.default_rng(0).integers(0, 256, (3, 64)).astype(np.uint8), np.ones(3, np.float32)
    residual, found = random(3, 40), np.empty((3, 40), np.float32)
    kernels.multiply(threads.team(), rows, factor, *packed.arrays, residual, False, found)
    assert np.array_equal(found, residual + product(packed, rows, factor, 40))


def test_a_checksum_feels_every_bit() -> None:
    """Any one bit flipped, and any two words exchanged, give another sum."""
    words = np.random.default_rng(0).integers(2**63, size=40).astype(np.uint64)
    expected = kernels.checksum(words)
    assert int(expected) == sum(int(word) * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    for i in range(40):
        for bit in range(0, 64, 7):
            other = words.copy()
            other[i] ^= np.uint64(1 << bit)
            assert kernels.checksum(other) != expected
    assert kernels.checksum(words[::-1].copy()) != expected


# ---- storage


def storage(num_blocks: int, kv_heads: int, dim: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values full of something that must never be read."""
    keys = np.full((num_blocks, kv_heads, dim, BLOCK), np.nan, np.float32)
    return keys, np.full((num_blocks, kv_heads, BLOCK, dim), np.nan, np.float32)


def slots(keys: NDArray[np.float32], values: NDArray[np.float32], table: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """[2, kv heads, count, dim]: the first slots of a sequence, in order."""
    found = [(keys[table[s // BLOCK], :, :, s % BLOCK], values[table[s // BLOCK], :, s % BLOCK]) for s in range(count)]
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
    softcap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
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
                query, keys, values, table, length, begin, end, 0, starts, ancestors, kv, window, np.float32(scale),
                np.float32(softcap), np.zeros(0, np.float32) if sinks is None else sinks, out,
            )  # fmt: skip
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


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("softcap", "sunk"), [(2.0, False), (0.0, True), (3.0, True)])
def test_soft_caps_and_sinks_are_what_their_definition_says(softcap: float, sunk: bool, window: int) -> None:
    """Scores bent by tanh, and a score without a value in every head's softmax: the float64 twin."""
    for length in (0, 63, 70):
        query, new = random(4, len(TREE), 16, seed=1), random(2, 2, length + len(TREE), 16, seed=2, scale=4.0)
        sinks = 12 + random(4, seed=3, scale=3.0) if sunk else None
        found = attend(query, new, length, TREE, np.array([1, 0], np.int32), window, 0.5, softcap=softcap, sinks=sinks)
        mask = oracles.visible(TREE, length, window)
        expected = oracles.attend(query, new[0], new[1], mask, 0.5, softcap, sinks)
        assert np.allclose(found, expected, rtol=2e-5, atol=2e-5)
        assert np.abs(found - oracles.attend(query, new[0], new[1], mask, 0.5)).max() > 0.1


def test_attention_stays_finite_for_scores_of_any_size() -> None:
    """Scores of thousands, and a sharp peak among them, give what float64 gives."""
    query, new = random(2, 3, 16, scale=60.0), random(2, 2, 40 + 3, 16, seed=4, scale=60.0)
    parents = np.array([-1, 0, 0], np.int32)
    found = attend(query, new, 40, parents, np.array([0], np.int32), 0, 1.0)
    expected = oracles.attend(query, new[0], new[1], oracles.visible(parents, 40, 0), 1.0)
    assert np.isfinite(found).all() and np.allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dim", "window", "softcap"), [(16, 0, 0.0), (64, 20, 0.0), (80, 0, 0.0), (16, 9, 2.0)])
def test_a_rows_attention_depends_on_its_logical_sequence_only(dim: int, window: int, softcap: float) -> None:
    """Where the prefix ends, which blocks it has, what siblings stand between, and how rows are tiled change no bit."""
    total = 133
    query, new = random(4, total, dim, seed=7), random(2, 2, total, dim, seed=8, scale=2.0)
    chain = np.arange(-1, total - 1, dtype=np.int32)
    bent = {"softcap": softcap, "sinks": random(4, seed=9) if softcap else None}
    expected = attend(query, new, 0, chain, np.arange(3, dtype=np.int32), window, 0.25, **bent)
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
        found = attend(query[:, source], placed, length, parents, table, window, 0.25, int(rng.integers(1, 9)), **bent)
        assert np.array_equal(found[real], expected[length : length + len(real)])


# ---- routing


@pytest.mark.parametrize("normalized", [False, True])
def test_rows_go_to_their_likeliest_experts(normalized: bool) -> None:
    """Ids and shares are those of a float64 softmax, ties go to the lower id, and a row is the same alone."""
    x, weight = random(9, 33, seed=1), random(33, 16, seed=2)
    weight[:, 5] = weight[:, 2]
    weight[:, 6:] = 0
    ids, shares = np.empty((9, 3), np.int64), np.empty((9, 3), np.float32)
    kernels.route(x, weight, 6, normalized, ids, shares)
    logits = x.astype(np.float64) @ weight[:, :6]
    probs = np.exp(logits - logits.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    for row in range(9):
        order = np.lexsort((np.arange(6), -np.round(probs[row], 12)))[:3]
        expected = probs[row, order] / (probs[row, order].sum() if normalized else 1)
        assert ids[row].tolist() == order.tolist() and np.allclose(shares[row], expected, atol=1e-6)
        one_ids, one_shares = np.empty((1, 3), np.int64), np.empty((1, 3), np.float32)
        kernels.route(x[row : row + 1], weight, 6, normalized, one_ids, one_shares)
        assert np.array_equal(one_ids[0], ids[row]) and np.array_equal(one_shares[0], shares[row])


def test_layer_norm_is_that_of_float64() -> None:
    """Beside numpy in float64, for widths full and not full lanes; a row is the same alone."""
    for width in (1, 16, 40, 97):
        x, weight, bias = random(5, width, seed=1) * 3 + 1, random(width, seed=2), random(width, seed=3)
        out = np.empty_like(x)
        kernels.layer_norm(x, weight, bias, np.float32(1e-5), out)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + bias
        assert np.allclose(out, expected, atol=1e-5)
        one = np.empty_like(x[:1])
        kernels.layer_norm(x[3:4], weight, bias, np.float32(1e-5), one)
        assert np.array_equal(one[0], out[3])
