"""Kernels of the local worker's CPU path: everything between two matrix products, and attention over trees.

They make a row's result independent of its neighbours by construction. Every sum has one order, fixed by the row's own logical
sequence and not by packing, chunking, block boundaries or threads: over features by index modulo 16, over keys by position. All
else is elementwise and built from +, -, x, /, sqrt and comparison, without fast-math, so vector bodies and tails agree in every
bit.

Arrays are float32 unless said otherwise. Twins: `tests/engine/oracles_target.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.target.team_kernels import (
    ATTEND_ENTRY,
    BOARD_WORDS,
    COUNT,
    PRODUCT_ENTRY,
    QUANTIZE_ENTRY,
    dismiss,
    muster,
    pointer,
    run,
    take,
)

BLOCK = 64
"""Keys in one block of the KV storage."""

PANEL = 32
"""Outputs of a packed int8 matrix that are computed together."""

ZERO = 128
"""The quantized activation that stands for 0."""

LANES = 16
"""Numbers that are computed side by side; head widths are padded to a multiple of it."""
_LEVELS = np.float32(127.0)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_TERMS = tuple(map(np.float32, (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 1.66666655e-1, 5.00000012e-1)))
_ROUND = np.float32(12582912.0)  # 1.5 x 2^23: adding and subtracting it rounds to an integer
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)

_jit = njit(nogil=True, cache=True, error_model="numpy")


@_jit
def exp_rows(x: Any, out: Any) -> None:
    """out = e^x elementwise over two 1-D arrays (not one: in place it would not vectorize). x is clamped to [-87, 88].

    Relative error below 3e-7.
    """
    bits = out.view(np.int32)
    for i in range(len(x)):
        z = min(max(x[i], np.float32(-87.0)), np.float32(88.0))
        k = (z * _LOG2_E + _ROUND) - _ROUND
        r = (z - k * _LN2_HIGH) - k * _LN2_LOW
        s = _EXP_TERMS[0]
        for t in range(1, len(_EXP_TERMS)):
            s = s * r + _EXP_TERMS[t]
        out[i] = (s * r * r + r) + _ONE
        bits[i] += np.int32(k) << 23


def _function(builder: Any, name: str, result: Any, operands: list[Any]) -> Any:
    """A function of LLVM's own, by its name."""
    return builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(result, operands), name)


def _vector(builder: Any, number: Any) -> Any:
    """A vector of LANES times the same number, in LLVM's terms."""
    nothing = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(nothing, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _vector_exp(builder: Any, x: Any) -> Any:
    """e^x for a vector in LLVM's terms, step by step as in `exp_rows`, with the same bits."""
    kind, words = x.type, ir.VectorType(ir.IntType(32), x.type.count)

    def every(value: Any) -> Any:
        return ir.Constant(kind, [float(value)] * kind.count)

    def both(first: Any, factor: Any, last: Any) -> Any:
        return builder.fadd(builder.fmul(first, factor), last)

    low, high = every(-87.0), every(88.0)
    z = builder.select(builder.fcmp_ordered("<", x, low), low, x)  # a NaN stays one
    z = builder.select(builder.fcmp_ordered(">", z, high), high, z)
    k = builder.fsub(both(z, every(_LOG2_E), every(_ROUND)), every(_ROUND))
    r = builder.fsub(builder.fsub(z, builder.fmul(k, every(_LN2_HIGH))), builder.fmul(k, every(_LN2_LOW)))
    s = every(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        s = both(s, r, every(term))
    power = builder.fadd(both(builder.fmul(s, r), r, r), every(1.0))
    exponent = builder.shl(builder.fptosi(k, words), ir.Constant(words, [23] * kind.count))
    return builder.bitcast(builder.add(builder.bitcast(power, words), exponent), kind)


def _sum_over(builder: Any, address: Any, num: Any, change: Callable[[Any], Any] | None = None) -> Any:
    """The sum of `num` numbers at an address by index modulo LANES, then the lanes in order, in LLVM's terms.

    With `change` (vector to vector) they become what it makes of them first, in their place. Loops over arrays would add up
    number by number: the compiler sees no use in vectors for so short ones.
    """
    index, number = ir.IntType(64), ir.FloatType()
    kind, yes = ir.VectorType(number, LANES), ir.VectorType(ir.IntType(1), LANES)
    zeros = ir.Constant(kind, [0.0] * LANES)
    lanes = cgutils.alloca_once_value(builder, zeros)

    def place(first: Any) -> Any:
        return builder.inttoptr(builder.add(address, builder.mul(first, index(4))), kind.as_pointer())

    full = builder.and_(num, index(-LANES))
    with cgutils.for_range_slice(builder, index(0), full, index(LANES), intp=index) as (first, _):
        here = place(first)
        x = builder.load(here, align=4)
        if change is not None:
            x = change(x)
            builder.store(x, here, align=4)
        builder.store(builder.fadd(builder.load(lanes), x), lanes)
    with builder.if_then(builder.icmp_signed("<", full, num)):
        counts = ir.Constant(ir.VectorType(index, LANES), list(range(LANES)))
        inside = builder.icmp_signed("<", counts, _vector(builder, builder.sub(num, full)))
        here, align = place(full), ir.IntType(32)(4)
        load = _function(builder, "llvm.masked.load.v16f32.p0", kind, [here.type, align.type, yes, kind])
        x = builder.call(load, [here, align, inside, zeros])
        if change is not None:
            x = builder.select(inside, change(x), zeros)
            store = _function(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [kind, here.type, align.type, yes])
            builder.call(store, [x, here, align, inside])
        builder.store(builder.fadd(builder.load(lanes), x), lanes)
    total = number(0.0)
    for lane in range(LANES):
        total = builder.fadd(total, builder.extract_element(builder.load(lanes), ir.IntType(32)(lane)))
    return total


@intrinsic
def _sum_at(typing: Any, address: Any, num: Any) -> Any:
    """`_sum_over` as it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _sum_over(builder, *args)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def _exp_at(typing: Any, address: Any, num: Any, top: Any) -> Any:
    """x becomes e^(x - top) for `num` numbers at an address, with the bits of `exp_rows`; returns their sum as `_sum_at` has
    it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, num, top = args
        tops = _vector(builder, top)
        return _sum_over(builder, address, num, lambda x: _vector_exp(builder, builder.fsub(x, tops)))

    return types.float32(types.int64, types.int64, types.float32), generate


@_jit
def _sum(x: Any) -> Any:
    """Sum of a 1-D array by index modulo 16, then the lanes in order. The order depends on positions only."""
    return _sum_at(x.ctypes.data, len(x))


@_jit
def _exp_from(x: Any, top: Any) -> Any:
    """x = e^(x - top) for a 1-D array, in place; returns its `_sum`."""
    return _exp_at(x.ctypes.data, len(x), top)


@_jit
def _highest(x: Any) -> Any:
    """The largest element of a 1-D array, not empty. Compared as integers in the order of the floats: that vectorizes."""
    bits = x.view(np.int32)
    top = np.int32(-0x80000000)
    for i in range(len(bits)):
        sign = np.int32(bits[i] >> np.int32(31))
        top = max(top, np.int32(bits[i] ^ (sign & np.int32(0x7FFFFFFF))))
    one = np.empty(1, np.int32)
    one[0] = top ^ (np.int32(top >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return one.view(np.float32)[0]


@_jit
def rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, row by row ([n, width])."""
    width = x.shape[1]
    square = np.empty(width, np.float32)
    for row in range(x.shape[0]):
        for i in range(width):
            square[i] = x[row, i] * x[row, i]
        inverse = _ONE / np.sqrt(_sum(square) / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = x[row, i] * inverse * weight[i]


@_jit
def layer_norm(x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    """out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, row by row ([n, width])."""
    width = x.shape[1]
    square = np.empty(width, np.float32)
    for row in range(x.shape[0]):
        mean = _sum(x[row]) / np.float32(width)
        for i in range(width):
            out[row, i] = x[row, i] - mean
            square[i] = out[row, i] * out[row, i]
        inverse = _ONE / np.sqrt(_sum(square) / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = out[row, i] * inverse * weight[i] + bias[i]


@_jit
def _largest(x: Any) -> Any:
    """The largest absolute value of a row, compared as integers: the bits of positive floats order as they do."""
    bits = x.view(np.int32)
    top = np.int32(0)
    for i in range(len(bits)):
        top = max(top, bits[i] & np.int32(0x7FFFFFFF))
    one = np.empty(1, np.int32)
    one[0] = top
    return one.view(np.float32)[0]


@_jit
def spread(x: Any, spare: Any) -> Any:
    """Rotate a row so that no number in it stands out; returns x or spare, in which it is then. Both are written to.

    x and spare [n], n even. Each of the floor(log2(n)) = k steps puts x[2 i] + x[2 i + 1] at i and x[2 i] - x[2 i + 1] at n / 2
    + i. All together are 2^(k / 2) times an orthogonal matrix of 0 and +-2^(-k / 2): every number goes in equal parts to 2^k
    places, more than half of all. Where n is 2^k it is the Walsh-Hadamard transform, in some order. O(n log n).

    Source: Ashkboos et al. 2024 (QuaRot) for what rotations do for rounding; Pease 1968 for steps that are all alike, which
    here spare widths a factor of two.
    """
    half, apart = len(x) // 2, len(x)
    while apart > 1:
        _sums_and_differences(x, spare[:half], spare[half:])
        x, spare = spare, x
        apart //= 2
    return x


@intrinsic
def _halve(typing: Any, x: Any, sums: Any, differences: Any, num: Any) -> Any:
    """Sums and differences of `num` pairs of neighbours from an address on, to two others: whole vectors of them. Returns how
    many pairs that were."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index, number = ir.IntType(64), ir.FloatType()
        kind = ir.VectorType(number, LANES)
        x, sums, differences, num = args

        def place(base: Any, first: Any) -> Any:
            return builder.inttoptr(builder.add(base, builder.mul(first, index(4))), kind.as_pointer())

        def every_other(low: Any, high: Any, first: int) -> Any:
            which = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(first, 2 * LANES, 2)))
            return builder.shuffle_vector(low, high, which)

        full = builder.and_(num, index(-LANES))
        with cgutils.for_range_slice(builder, index(0), full, index(LANES), intp=index) as (first, _):
            twice = builder.add(first, first)
            low, high = (builder.load(place(x, at), align=4) for at in (twice, builder.add(twice, index(LANES))))
            left, right = every_other(low, high, 0), every_other(low, high, 1)
            builder.store(builder.fadd(left, right), place(sums, first), align=4)
            builder.store(builder.fsub(left, right), place(differences, first), align=4)
        return full

    return types.int64(*[types.int64] * 4), generate


@_jit
def _sums_and_differences(x: Any, sums: Any, differences: Any) -> None:
    """Of neighbours, x [2 n]: a step of `spread`, with arrays of their own for the results."""
    for i in range(_halve(x.ctypes.data, sums.ctypes.data, differences.ctypes.data, len(sums)), len(sums)):
        left, right = x[2 * i], x[2 * i + 1]
        sums[i] = left + right
        differences[i] = left - right


@_jit
def spread_rows(x: Any) -> None:
    """`spread` for every row of x [n, width], in place, divided by 2^k: what products with spread rows need."""
    spare, row = np.empty(x.shape[1], np.float32), np.empty(x.shape[1], np.float32)
    parts = 1
    while 2 * parts <= x.shape[1]:
        parts *= 2
    for i in range(len(x)):
        row[:] = x[i]
        found = spread(row, spare)
        for j in range(len(found)):
            x[i, j] = found[j] / np.float32(parts)


@_jit
def quantize_row(x: Any, out: Any) -> Any:
    """out = 128 + round(x / scale), uint8, where scale, which is returned, is the largest absolute value of x / 127.

    A row whose largest value is below 1e-30 counts as zeros. One with an infinity or a NaN becomes zeros with the scale NaN:
    it spoils itself alone.
    """
    top = _largest(x)
    if top < np.float32(np.inf):
        if top < np.float32(1e-30):
            top = np.float32(1e30)
        inverse = _LEVELS / top
        for i in range(len(x)):
            out[i] = np.uint8(np.int32((x[i] * inverse + _ROUND) - _ROUND) + np.int32(ZERO))
    else:
        top = np.float32(np.nan)
        for i in range(len(x)):
            out[i] = np.uint8(ZERO)
    return top / _LEVELS


@_jit
def quantize_rows(x: Any, weight: Any, eps: Any, out: Any, scale: Any) -> None:
    """`spread` and `quantize_row` for every row of x [n, width], into out uint8 [n, width or more, even] and scale [n].

    With a `weight` [width] the rows are normalized before, as by `rms_norm`; an empty one is none. Zeros fill rows up to the
    width of `out` before they are spread.
    """
    width = x.shape[1]
    normed = np.empty((1, len(weight)), np.float32)
    line, spare = np.empty(out.shape[1], np.float32), np.empty(out.shape[1], np.float32)
    for row in range(x.shape[0]):
        if len(weight):
            rms_norm(x[row : row + 1], weight, eps, normed)
            line[:width] = normed[0]
        else:
            line[:width] = x[row]
        line[width:] = np.float32(0.0)
        scale[row] = quantize_row(spread(line, spare), out[row])


@_jit
def checksum(words: Any) -> Any:
    """The sum of uint64 words, each times the odd number 2 i + 1, modulo 2^64: any change of one word changes it."""
    total = np.uint64(0)
    for i in range(len(words)):
        total += words[i] * (np.uint64(2) * np.uint64(i) + np.uint64(1))
    return total


# ---- int8 products


def _dot_tile(instruction: str) -> Any:
    """A register tile of an int8 product: sums[r, :] += a[r] . b, for up to TILE_ROWS rows.

    a uint8 [rows, 4 steps], b int8 [steps, PANEL, 4], sums int32 [rows, PANEL]: exact in 32 bits up to a width of 66,000.
    Meanwhile memory is asked for that is wanted later: `pace` bytes a step, from the address `early` on. `instruction` as in
    INSTRUCTION. Called with addresses, strides in bytes.
    """

    @intrinsic
    def product(typing: Any, rows: Any, a: Any, a_stride: Any, b: Any, steps: Any, early: Any, pace: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte, word, index = ir.IntType(8), ir.IntType(32), ir.IntType(64)
            words, quads = ir.VectorType(word, LANES), ir.VectorType(byte, 4 * LANES)
            rows, a, a_stride, b, steps, early, pace, sums = args
            vectors = range(PANEL // LANES)

            def pointer(base: Any, distance: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, distance), kind.as_pointer())

            def load(base: Any, vector: int, kind: Any) -> Any:
                return builder.load(pointer(base, index(4 * LANES * vector), kind), align=4)

            def pick(value: Any, which: range) -> Any:
                chosen = ir.Constant(ir.VectorType(word, len(which)), list(which))
                return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), chosen)

            def join(low: Any, high: Any) -> Any:
                count = 2 * low.type.count
                return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(word, count), list(range(count))))

            def add_products(total: Any, unsigned: Any, signed: Any) -> Any:
                if instruction == "avx512vnni":
                    four_products = _function(builder, "llvm.x86.avx512.vpdpbusd.512", words, [words, quads, quads])
                    return builder.call(four_products, [total, unsigned, signed])
                if instruction == "avx2":
                    half, eight = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(word, LANES // 2)
                    pairs = _function(builder, "llvm.x86.avx2.pmadd.wd", eight, [half, half])
                    wide = ir.VectorType(ir.IntType(16), 4 * LANES)
                    both = builder.zext(unsigned, wide), builder.sext(signed, wide)
                    parts = [
                        builder.call(pairs, [pick(x, range(first, first + LANES)) for x in both])
                        for first in range(0, 4 * LANES, LANES)
                    ]
                    products = join(join(parts[0], parts[1]), join(parts[2], parts[3]))
                else:
                    wide = ir.VectorType(word, 4 * LANES)
                    products = builder.mul(builder.zext(unsigned, wide), builder.sext(signed, wide))
                each = products.type.count // LANES
                for part in range(each):
                    total = builder.add(total, pick(products, range(part, each * LANES, each)))
                return total

            prefetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), [byte.as_pointer(), word, word, word])
            end = builder.append_basic_block()
            switch = builder.switch(rows, end)
            for count in range(1, TILE_ROWS + 1):
                block = builder.append_basic_block()
                switch.add_case(index(count), block)
                builder.position_at_end(block)
                cells = {(r, v): index(4 * (PANEL * r + LANES * v)) for r in range(count) for v in vectors}
                totals = {cell: cgutils.alloca_once(builder, words) for cell in cells}
                for cell, place in cells.items():
                    builder.store(builder.load(pointer(sums, place, words), align=4), totals[cell])
                with cgutils.for_range(builder, steps, intp=index) as loop:
                    wanted = builder.add(early, builder.mul(loop.index, pace))
                    at = builder.add(b, builder.mul(loop.index, index(4 * PANEL)))
                    for v in vectors:
                        builder.call(prefetch, [pointer(wanted, index(4 * LANES * v), byte), word(0), word(2), word(1)])
                    line = [load(at, v, quads) for v in vectors]
                    four = builder.add(a, builder.mul(loop.index, index(4)))
                    for r in range(count):
                        one = builder.load(pointer(four, builder.mul(a_stride, index(r)), word), align=4)
                        same = builder.bitcast(_vector(builder, one), quads)
                        for v in vectors:
                            builder.store(add_products(builder.load(totals[r, v]), same, line[v]), totals[r, v])
                for cell, place in cells.items():
                    builder.store(builder.load(totals[cell]), pointer(sums, place, words), align=4)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return product


@intrinsic
def _finish_rows(
    typing: Any, rows: Any, sums: Any, offset: Any, scale: Any, factor: Any, bias: Any, residual: Any, gated: Any, out: Any,
    stride: Any,
) -> Any:  # fmt: skip
    """From int32 sums [rows, PANEL] to products: (sums[r, :] - offset) * scale * factor[r] + bias, float32.

    With `gated` out[r] = silu(the first LANES of them) * the others; else all, plus residual[r] unless that is 0. offset int32,
    scale and bias float32 [PANEL]; factor float32 [rows]; `stride` bytes between rows of out and of residual. Called with
    addresses. Loops over arrays would run number by number: for so few the compiler sees no use in vectors.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, index, number = ir.IntType(32), ir.IntType(64), ir.FloatType()
        words, numbers = ir.VectorType(word, LANES), ir.VectorType(number, LANES)
        rows, sums, offset, scale, factor, bias, residual, gated, out, stride = args
        halves = range(PANEL // LANES)

        def pointer(base: Any, kind: Any, half: int = 0) -> Any:
            return builder.inttoptr(builder.add(base, index(4 * LANES * half)), kind.as_pointer())

        def load(base: Any, kind: Any, half: int) -> Any:
            return builder.load(pointer(base, kind, half), align=4)

        offsets, scales, biases = (
            [load(base, kind, half) for half in halves] for base, kind in ((offset, words), (scale, numbers), (bias, numbers))
        )
        one = ir.Constant(numbers, [1.0] * LANES)
        with cgutils.for_range(builder, rows, intp=index) as loop:
            place = builder.add(sums, builder.mul(loop.index, index(4 * PANEL)))
            mine = builder.load(pointer(builder.add(factor, builder.mul(loop.index, index(4))), number), align=4)
            row_factor = _vector(builder, mine)
            values = []
            for half in halves:
                exact = builder.sitofp(builder.sub(load(place, words, half), offsets[half]), numbers)
                value = builder.fmul(builder.fmul(exact, scales[half]), row_factor)
                values.append(builder.fadd(value, biases[half]))
            distance = builder.mul(loop.index, stride)
            target = builder.add(out, distance)
            with builder.if_else(builder.icmp_signed("!=", gated, gated.type(0))) as (yes, no):
                with yes:
                    gate, up = values
                    opened = builder.fdiv(gate, builder.fadd(one, _vector_exp(builder, builder.fneg(gate))))
                    builder.store(builder.fmul(opened, up), pointer(target, numbers), align=4)
                with no, builder.if_else(builder.icmp_signed("!=", residual, index(0))) as (more, alone):
                    with more:
                        for half in halves:
                            other = load(builder.add(residual, distance), numbers, half)
                            builder.store(builder.fadd(other, values[half]), pointer(target, numbers, half), align=4)
                    with alone:
                        for half in halves:
                            builder.store(values[half], pointer(target, numbers, half), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


INSTRUCTION = next((name for name in ("avx512vnni", "avx2") if get_host_cpu_features().get(name)), "")
"""What this processor has for sums of 8-bit products: four products and their sum in 16 lanes at once; 16-bit products and the
sums of pairs, a quarter as fast; or neither, when general code is slow. The numbers are the same.
"""

TILE_ROWS = 14 if INSTRUCTION == "avx512vnni" else 3
"""Rows whose sums fit into the registers."""

_dot = _dot_tile(INSTRUCTION)

_AHEAD = 1 << 13  # bytes between a weight in use and the one asked for early
_PART = 128  # steps after which it is the next tile's turn: the weights of two parts fit into the quickest cache


@_jit
def multiply_panel(
    panel: int, a: Any, factor: Any, packed: Any, offset: Any, scale: Any, bias: Any, residual: Any, gated: bool, out: Any
) -> None:
    """The PANEL columns `panel` of the product of quantized rows with a packed matrix.

    a uint8 [n, 4 steps] and factor [n] are rows and scales as `quantize_rows` makes them; packed int8 [panels, steps, PANEL,
    4]; offset int32 (128 times each column's sum, since activations stand 128 too high), scale and bias [panels x PANEL].
    out [n, width] = the product, plus `residual` [n, width] unless that has no rows. The last panel may reach beyond out.
    With `gated` a panel is 16 columns of a gate and the 16 of its counterpart: out = silu(gate) * up, silu(x) = x / (1 + e^-x).
    """
    num_rows, steps, width = a.shape[0], packed.shape[1], out.shape[1]
    sums = np.zeros((num_rows, PANEL), np.int32)
    _add_products(a, packed.ctypes.data + panel * steps * PANEL * 4, steps, sums)
    columns = LANES if gated else PANEL
    left = panel * columns
    inside = min(columns, width - left)
    target, stride = out.ctypes.data + 4 * left, 4 * width
    added = residual.ctypes.data + 4 * left if len(residual) else 0
    edge = np.zeros((num_rows if inside < columns else 0, columns), np.float32)
    if inside < columns:
        for r in range(len(residual)):
            edge[r, :inside] = residual[r, left:]
        target, stride, added = edge.ctypes.data, 4 * columns, edge.ctypes.data if added else 0
    _finish(sums, panel * PANEL, factor, offset, scale, bias, added, gated, target, stride)
    for r in range(len(edge)):
        out[r, left:] = edge[r, :inside]


@_jit
def _finish(
    sums: Any, first: int, factor: Any, offset: Any, scale: Any, bias: Any, residual: int, gated: bool, out: int, stride: int
) -> None:
    """`_finish_rows` for the columns from `first` on. Addresses keep nothing alive: that arrays are handed in here does."""
    _finish_rows(
        len(sums), sums.ctypes.data, offset.ctypes.data + 4 * first, scale.ctypes.data + 4 * first, factor.ctypes.data,
        bias.ctypes.data + 4 * first, residual, gated, out, stride,
    )  # fmt: skip


@_jit
def _add_products(a: Any, weights: int, steps: int, sums: Any) -> None:
    """sums [n, PANEL] += a . the panel at the address `weights`.

    Where the rows need several tiles, they take turns with one part of the weights after another, and each asks memory for its
    share of the next part: computing and reading go on side by side all the time.
    """
    num_rows = len(a)
    tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    part = steps if tiles == 1 else _PART
    for begin in range(0, steps, part):
        count = min(part, steps - begin)
        at = weights + begin * PANEL * 4
        first = 0
        for tile in range(tiles):
            rows = (num_rows - first + tiles - tile - 1) // (tiles - tile)
            if tiles == 1:
                early = at + (_AHEAD if rows > 4 else 0)  # with few rows the processor looks ahead well enough by itself
            else:
                early = at + (count + count * tile // tiles) * PANEL * 4
            _dot(
                rows, a.ctypes.data + first * a.shape[1] + 4 * begin, a.shape[1], at, count, early, PANEL * 4 // tiles,
                sums.ctypes.data + first * PANEL * 4,
            )  # fmt: skip
            first += rows


# ---- KV storage: keys [blocks, kv heads, head dim, BLOCK], values [blocks, kv heads, BLOCK, head dim]


@_jit
def store(keys: Any, values: Any, new_keys: Any, new_values: Any, first: int, count: int, table: Any, length: int) -> None:
    """Write rows [first, first + count) of new_keys and new_values ([kv heads, n, head dim]) to slots length, length + 1, ...

    `table` lists the blocks of the sequence: slot s is entry s % BLOCK of block table[s // BLOCK].
    """
    for i in range(count):
        slot = length + i
        block, at = table[slot // BLOCK], slot % BLOCK
        for head in range(new_keys.shape[0]):
            for d in range(new_keys.shape[2]):
                keys[block, head, d, at] = new_keys[head, first + i, d]
                values[block, head, at, d] = new_values[head, first + i, d]


@_jit
def rotate_and_store(
    y: Any,
    cos: Any,
    sin: Any,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    sequences: Any,
    firsts: Any,
) -> None:
    """From the product of q, k and v to attention: rotate (RoPE by halves), store.

    y [n, (heads + 2 kv heads) * dim]; cos, sin [n, dim].
    query [heads, n, dim] is filled; keys and values go behind the prefix of each sequence, as in `store`. `sequences` and
    `tables` as in `attend_item`; firsts int32 [b + 1] are the first rows of the sequences in the pass, and its end.
    """
    heads, dim = query.shape[0], query.shape[2]
    kv_heads = keys.shape[1]
    half = dim // 2
    line = np.empty(y.shape[1], np.float32)
    for which in range(len(sequences)):
        length, at = sequences[which, 1], sequences[which, 2]
        for row in range(firsts[which], firsts[which + 1]):
            slot = length + row - firsts[which]
            block, entry = tables[at + slot // BLOCK], slot % BLOCK
            line[:] = y[row]
            for head in range(heads + kv_heads):
                x = line[head * dim : (head + 1) * dim]
                for d in range(half):
                    low = x[d] * cos[row, d] + -x[d + half] * sin[row, d]
                    high = x[d + half] * cos[row, d + half] + x[d] * sin[row, d + half]
                    x[d], x[d + half] = low, high
                if head < heads:
                    query[head, row] = x
                else:
                    for d in range(dim):
                        keys[block, head - heads, d, entry] = x[d]
            for head in range(kv_heads):
                begin = (heads + kv_heads + head) * dim
                values[block, head, entry] = line[begin : begin + dim]


@_jit
def compact(keys: Any, values: Any, table: Any, length: int, path: Any) -> None:
    """Keep the accepted rows only: slot length + path[i] moves to slot length + i. `path` rises and path[i] >= i."""
    for i in range(len(path)):
        if path[i] == i:
            continue
        source, target = length + path[i], length + i
        a, b = table[source // BLOCK], table[target // BLOCK]
        x, y = source % BLOCK, target % BLOCK
        for head in range(keys.shape[1]):
            for d in range(keys.shape[2]):
                keys[b, head, d, y] = keys[a, head, d, x]
                values[b, head, y, d] = values[a, head, x, d]


def _tile(num_rows: int, num_vectors: int) -> Any:
    """A register tile: c[r, :] += sum over k of a[r, k] * b[k, :], for `num_rows` rows of 16 x `num_vectors` columns.

    In LLVM's own terms, since no loop over arrays keeps its sums in registers (three times the speed).
    Every element is one chain of fused multiply-adds in order of k, whatever the tile it is in. Called with addresses and
    strides in elements: (a, stride, b, stride, c, stride, number of k).
    """

    @intrinsic
    def accumulate(typing: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, num: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, index = ir.FloatType(), ir.IntType(64)
            vector = ir.VectorType(number, LANES)
            fma = _function(builder, "llvm.fma.v16f32", vector, [vector] * 3)
            a_stride, b_stride, c_stride, num = args[1], args[3], args[5], args[6]
            a, b, c = (builder.inttoptr(args[i], number.as_pointer()) for i in (0, 2, 4))

            def place(base: Any, stride: Any, row: Any, column: int) -> Any:
                offset = builder.add(builder.mul(stride, row), index(column))
                return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

            cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
            sums = {cell: cgutils.alloca_once(builder, vector) for cell in cells}
            for r, v in cells:
                builder.store(builder.load(place(c, c_stride, index(r), v * LANES), align=4), sums[r, v])
            with cgutils.for_range(builder, num, intp=index) as loop:
                line = [builder.load(place(b, b_stride, loop.index, v * LANES), align=4) for v in range(num_vectors)]
                for r in range(num_rows):
                    one = builder.load(builder.gep(a, [builder.add(builder.mul(a_stride, index(r)), loop.index)]))
                    factor = _vector(builder, one)
                    for v in range(num_vectors):
                        builder.store(builder.call(fma, [factor, line[v], builder.load(sums[r, v])]), sums[r, v])
            for r, v in cells:
                builder.store(builder.load(sums[r, v]), place(c, c_stride, index(r), v * LANES), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return accumulate


_tile_6x4, _tile_4x4, _tile_3x4, _tile_2x4, _tile_1x4 = (_tile(rows, 4) for rows in (6, 4, 3, 2, 1))
_tile_4x1, _tile_1x1 = _tile(4, 1), _tile(1, 1)


@_jit
def _multiply_add(a: Any, b: Any, c: Any) -> None:
    """c [m, n] += a [m, k] b [k, n], the sums over k in order; n is a multiple of 16, rows are contiguous."""
    a_stride, b_stride, c_stride = a.strides[0] // 4, b.strides[0] // 4, c.strides[0] // 4
    num, columns, depth = c.shape[0], c.shape[1], a.shape[1]
    at_a, at_b, at_c = a.ctypes.data, b.ctypes.data, c.ctypes.data
    column = 0
    while column < columns:
        wide = column + 64 <= columns
        row = 0
        while row < num:
            from_a, from_b, to_c = at_a + 4 * row * a_stride, at_b + 4 * column, at_c + 4 * (row * c_stride + column)
            left = num - row
            if not wide and left >= 4:
                _tile_4x1(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 4
            elif not wide:
                _tile_1x1(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 1
            elif left >= 6:
                _tile_6x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 6
            elif left >= 4:
                _tile_4x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 4
            elif left == 3:
                _tile_3x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 3
            elif left == 2:
                _tile_2x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 2
            else:
                _tile_1x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 1
        column += 64 if wide else 16


@_jit
def route(x: Any, weight: Any, num_experts: int, normalized: bool, ids: Any, shares: Any) -> None:
    """Which experts each row of x [n, width] goes to, and with what share: the softmax of x times `weight`, its largest.

    weight [width, num_experts or more], filled up to a multiple of 16 columns; ids int64 and shares [n, k], best first, ties to
    the lower id. With `normalized` a row's shares add up to 1.
    """
    probs, shifted = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    logits = np.zeros((x.shape[0], weight.shape[1]), np.float32)
    _multiply_add(x, weight, logits)
    for row in range(x.shape[0]):
        top = _highest(logits[row, :num_experts])
        for e in range(num_experts):
            shifted[e] = logits[row, e] - top
        exp_rows(shifted, probs)
        total = _sum(probs)
        for e in range(num_experts):
            probs[e] /= total
        chosen = np.float32(0.0)
        for k in range(ids.shape[1]):
            best = 0
            for e in range(1, num_experts):
                if probs[e] > probs[best]:
                    best = e
            ids[row, k], shares[row, k] = best, probs[best]
            chosen += probs[best]
            probs[best] = np.float32(-1.0)
        if normalized:
            for k in range(ids.shape[1]):
                shares[row, k] /= chosen


@_jit
def _softmax(
    raw: Any, length: int, ancestors: Any, low: int, scale: Any, softcap: Any, sink: Any, scratch: Any, weight: Any
) -> Any:
    """weight [length + depth] = e^(score - max) of the logical sequence prefix + ancestors, 0 before `low`; returns the sum.

    Scores are bent to softcap * tanh(score / softcap) where `softcap` > 0. `sink` is a further score that has no value, -inf
    for none: it counts in the maximum and the sum alone.
    """
    prefix, logits = weight[:length], raw[:length]
    for s in range(len(prefix)):
        prefix[s] = logits[s] * scale
    tail = weight[length : length + len(ancestors)]
    for t in range(len(tail)):
        tail[t] = raw[length + ancestors[t]] * scale
    everything = weight[: length + len(ancestors)]
    shifted = scratch[: len(everything)]
    if softcap > np.float32(0.0):
        for s in range(len(shifted)):
            shifted[s] = _TWO * everything[s] / softcap
        exp_rows(shifted, everything)
        for s in range(len(shifted)):
            everything[s] = softcap * (_ONE - _TWO / (everything[s] + _ONE))
    top = max(_highest(everything[low:]), sink)
    total = _exp_from(everything, top)
    if low > 0:
        everything[:low] = np.float32(0.0)
        total = _sum(everything)
    if sink > np.float32(-np.inf):
        one = np.empty((2, 1), np.float32)
        one[0, 0] = sink - top
        exp_rows(one[0], one[1])
        total += one[1, 0]
    return total


@_jit
def attend(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    length: int,
    begin: int,
    end: int,
    offset: int,
    starts: Any,
    ancestors: Any,
    kv: int,
    window: int,
    scale: Any,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> None:
    """Attention of the rows [begin, end) of one sequence's tree, for one kv head, over the prefix and their own ancestors.

    query [heads, n, head dim]; out [n, heads, head dim]. The keys of the prefix are in slots [0, length) of the sequence, those
    of the tree's row i in slot length + i; row i of the tree is row offset + i of the pass. It sees the prefix and the tree
    rows ancestors[starts[offset + i]:starts[offset + i + 1]] (int32, in order of depth, itself last); with `window` > 0 only
    the last `window` positions of these. `softcap` > 0 bounds scores; `sinks` [heads], or none, is a score for each head that
    no value goes with (`_softmax`).

    Scores are summed over the head dimension in order, softmax by position modulo 16, values in order of position: the logical
    sequence prefix + ancestors is all that counts, not where the slots are. O(rows x slots x group x head dim).
    """
    group = query.shape[0] // keys.shape[1]
    dim = query.shape[2]
    num = (end - begin) * group
    last = begin
    for i in range(begin, end):
        for t in range(starts[offset + i], starts[offset + i + 1]):
            last = max(last, ancestors[t])
    slots = length + last + 1
    num_blocks = (slots + BLOCK - 1) // BLOCK
    asked = np.empty((num, dim), np.float32)
    for r in range(num):
        asked[r] = query[kv * group + r % group, offset + begin + r // group]
    raw = np.zeros((num, num_blocks * BLOCK), np.float32)
    for b in range(num_blocks):
        _multiply_add(asked, keys[table[b], kv], raw[:, b * BLOCK : (b + 1) * BLOCK])
    weight = np.empty((num, slots), np.float32)
    scratch = np.empty(slots, np.float32)
    total = np.empty(num, np.float32)
    for r in range(num):
        i = offset + begin + r // group
        mine = ancestors[starts[i] : starts[i + 1]]
        low = max(0, length + len(mine) - window) if window > 0 else 0
        sink = sinks[kv * group + r % group] if len(sinks) else np.float32(-np.inf)
        total[r] = _softmax(raw[r], length, mine, low, scale, softcap, sink, scratch, weight[r])
    mixed = np.zeros((num, dim), np.float32)
    for b in range((length + BLOCK - 1) // BLOCK):
        inside = min(BLOCK, length - b * BLOCK)
        _multiply_add(weight[:, b * BLOCK : b * BLOCK + inside], values[table[b], kv, :inside], mixed)
    for i in range(begin, end):
        mine = ancestors[starts[offset + i] : starts[offset + i + 1]]
        rows = slice((i - begin) * group, (i - begin + 1) * group)
        t = 0
        while t < len(mine):
            slot = length + mine[t]
            most = min(len(mine) - t, BLOCK - slot % BLOCK)
            run = 1
            while run < most and mine[t + run] == mine[t] + run:
                run += 1
            there = values[table[slot // BLOCK], kv, slot % BLOCK : slot % BLOCK + run]
            _multiply_add(weight[rows, length + t : length + t + run], there, mixed[rows])
            t += run
        for g in range(group):
            r = (i - begin) * group + g
            for d in range(dim):
                out[offset + i, kv * group + g, d] = mixed[r, d] / total[r]


@_jit
def attend_item(
    item: int,
    items: Any,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    sequences: Any,
    starts: Any,
    ancestors: Any,
    window: int,
    scale: Any,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> None:
    """One piece of a pass's attention, for one thread.

    items int32 [num, 4]: sequence, kv head, first and last + 1 row of its tree. sequences int32 [b, 3]: first row in the pass,
    length of the prefix, where its block table begins in `tables` (int32).
    """
    which, kv, begin, end = items[item]
    offset, length, at = sequences[which]
    attend(
        query, keys, values, tables[at:], length, begin, end, offset, starts, ancestors, kv, window, scale, softcap, sinks, out
    )


_ATTEND_FIELDS = 24


@cfunc(types.void(types.voidptr), cache=True, nopython=True)
def attend_entry(data: Any) -> None:
    """What each thread runs: take items of `attend_item` until none is left. `attend_all` fills the fields of `data`.

    It stands in this file so that its compiled form, which numba caches by file, never outlives what it calls.
    """
    a = carray(data, (_ATTEND_FIELDS,), np.int64)
    counter = a.ctypes.data
    heads, rows, dim, kv_heads, blocks = a[11], a[12], a[13], a[14], a[15]
    query = carray(pointer(a[2]), (heads, rows, dim), np.float32)
    keys = carray(pointer(a[3]), (blocks, kv_heads, dim, BLOCK), np.float32)
    values = carray(pointer(a[4]), (blocks, kv_heads, BLOCK, dim), np.float32)
    out = carray(pointer(a[5]), (rows, heads, dim), np.float32)
    items = carray(pointer(a[6]), (a[1], 4), np.int32)
    tables = carray(pointer(a[7]), (a[16],), np.int32)
    sequences = carray(pointer(a[8]), (a[17], 3), np.int32)
    starts = carray(pointer(a[9]), (rows + 1,), np.int32)
    ancestors = carray(pointer(a[10]), (a[18],), np.int32)
    scale = carray(pointer(a[19]), (1,), np.float32)[0]
    softcap = carray(pointer(a[21]), (1,), np.float32)[0]
    sinks = carray(pointer(a[22]), (a[23],), np.float32)
    while True:
        item = take(counter)
        if item >= a[1]:
            break
        attend_item(item, items, query, keys, values, tables, sequences, starts, ancestors, a[20], scale, softcap, sinks, out)


_PRODUCT_FIELDS = 16


@cfunc(types.void(types.voidptr), cache=True, nopython=True)
def product_entry(data: Any) -> None:
    """What each thread runs: take runs of panels of `multiply_panel` until none is left. `multiply` fills `data`."""
    a = carray(data, (_PRODUCT_FIELDS,), np.int64)
    counter = a.ctypes.data
    rows, steps, panels, run, width = a[1], a[2], a[3], a[4], a[5]
    quantized = carray(pointer(a[6]), (rows, 4 * steps), np.uint8)
    factor = carray(pointer(a[7]), (rows,), np.float32)
    packed = carray(pointer(a[8]), (panels, steps, PANEL, 4), np.int8)
    offset = carray(pointer(a[9]), (panels * PANEL,), np.int32)
    scale = carray(pointer(a[10]), (panels * PANEL,), np.float32)
    bias = carray(pointer(a[11]), (panels * PANEL,), np.float32)
    residual = carray(pointer(a[12]), (a[13], width), np.float32)
    out = carray(pointer(a[15]), (rows, width), np.float32)
    while True:
        first = take(counter) * run
        if first >= panels:
            break
        for panel in range(first, min(first + run, panels)):
            multiply_panel(panel, quantized, factor, packed, offset, scale, bias, residual, a[14] != 0, out)


_QUANTIZE_FIELDS = 9


@cfunc(types.void(types.voidptr), cache=True, nopython=True)
def quantize_entry(data: Any) -> None:
    """What each thread runs: take rows of `quantize_rows` until none is left. `quantize` fills the fields of `data`."""
    a = carray(data, (_QUANTIZE_FIELDS,), np.int64)
    counter = a.ctypes.data
    rows, width = a[1], a[2]
    x = carray(pointer(a[3]), (rows, width), np.float32)
    weight = carray(pointer(a[4]), (a[5],), np.float32)
    eps = carray(pointer(a[6]), (1,), np.float32)[0]
    out = carray(pointer(a[7]), (rows, (width + 3) // 4 * 4), np.uint8)
    scale = carray(pointer(a[8]), (rows,), np.float32)
    while True:
        row = take(counter)
        if row >= rows:
            break
        quantize_rows(x[row : row + 1], weight, eps, out[row : row + 1], scale[row : row + 1])


_RUNS = 4  # of a thread in a product: long enough for the processor to see a stream, short enough for threads to end together
_ALONE = 1 << 11  # numbers to quantize below which threads cost more than they bring


@_jit
def multiply(
    team: Any, a: Any, factor: Any, packed: Any, offset: Any, scale: Any, bias: Any, residual: Any, gated: bool, out: Any
) -> None:
    """`multiply_panel` for all panels, on all threads. `team` as in `threads.team`."""
    panels, steps = packed.shape[0], packed.shape[1]
    args = np.zeros(_PRODUCT_FIELDS, np.int64)
    args[1], args[2], args[3] = len(a), steps, panels
    args[4], args[5] = max(1, panels // (_RUNS * team[COUNT])), out.shape[1]
    args[6], args[7], args[8] = a.ctypes.data, factor.ctypes.data, packed.ctypes.data
    args[9], args[10], args[11] = offset.ctypes.data, scale.ctypes.data, bias.ctypes.data
    args[12], args[13], args[14], args[15] = residual.ctypes.data, len(residual), int(gated), out.ctypes.data
    run(team, PRODUCT_ENTRY, args)


@_jit
def quantize(team: Any, x: Any, weight: Any, eps: Any, out: Any, scale: Any) -> None:
    """`quantize_rows`, on all threads where that pays; eps [1]."""
    if x.size < _ALONE or len(x) < 2:
        quantize_rows(x, weight, eps[0], out, scale)
        return
    args = np.zeros(_QUANTIZE_FIELDS, np.int64)
    args[1], args[2] = x.shape[0], x.shape[1]
    args[3], args[4], args[5], args[6] = x.ctypes.data, weight.ctypes.data, len(weight), eps.ctypes.data
    args[7], args[8] = out.ctypes.data, scale.ctypes.data
    run(team, QUANTIZE_ENTRY, args)


@_jit
def attend_all(
    team: Any,
    items: Any,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    sequences: Any,
    starts: Any,
    ancestors: Any,
    window: int,
    scale: Any,
    softcap: Any,
    sinks: Any,
    out: Any,
) -> None:
    """`attend_item` for all items, on all threads; scale and softcap [1], sinks [heads] or none, out [n, heads, dim]."""
    heads, rows, dim = query.shape
    args = np.zeros(_ATTEND_FIELDS, np.int64)
    args[1], args[2], args[3] = len(items), query.ctypes.data, keys.ctypes.data
    args[4], args[5], args[6] = values.ctypes.data, out.ctypes.data, items.ctypes.data
    args[7], args[8], args[9], args[10] = tables.ctypes.data, sequences.ctypes.data, starts.ctypes.data, ancestors.ctypes.data
    args[11], args[12], args[13], args[14], args[15] = heads, rows, dim, keys.shape[1], keys.shape[0]
    args[16], args[17], args[18] = len(tables), len(sequences), len(ancestors)
    args[19], args[20] = scale.ctypes.data, window
    args[21], args[22], args[23] = softcap.ctypes.data, sinks.ctypes.data, len(sinks)
    run(team, ATTEND_ENTRY, args)


@_jit
def decoder_layer(
    team: Any, x: Any, cos: Any, sin: Any, qkv: Any, o: Any, gate_up: Any, down: Any, norms: Any, keys: Any, values: Any,
    items: Any, tables: Any, sequences: Any, firsts: Any, starts: Any, ancestors: Any, window: int, scale: Any,
) -> Any:  # fmt: skip
    """A layer of the Llama kind for all rows of a pass: x + attention(norm(x)), then that + mlp(norm(that)); [n, width].

    qkv, o, gate_up and down are (packed, offset, scale, bias) as in `multiply_panel`; norms are (weight, eps [1]) of the first
    and the second. The other arrays are those of `rotate_and_store` and `attend_item`.
    """
    rows, width = x.shape
    kv_heads, dim = keys.shape[1], keys.shape[2]
    wide = 4 * o[0].shape[1]
    heads = wide // dim
    none = np.empty((0, 0), np.float32)
    (first_norm, first_eps), (second_norm, second_eps) = norms
    plain = first_norm[:0]
    factor = np.empty(rows, np.float32)

    quantized = np.empty((rows, 4 * qkv[0].shape[1]), np.uint8)
    product = np.empty((rows, (heads + 2 * kv_heads) * dim), np.float32)
    quantize(team, x, first_norm, first_eps, quantized, factor)
    multiply(team, quantized, factor, qkv[0], qkv[1], qkv[2], qkv[3], none, False, product)

    query, mixed = np.empty((heads, rows, dim), np.float32), np.empty((rows, heads, dim), np.float32)
    rotate_and_store(product, cos, sin, query, keys, values, tables, sequences, firsts)
    attend_all(
        team, items, query, keys, values, tables, sequences, starts, ancestors, window, scale, np.zeros(1, np.float32), plain,
        mixed,
    )  # fmt: skip

    heads_quantized, middle = np.empty((rows, wide), np.uint8), np.empty((rows, width), np.float32)
    quantize(team, mixed.reshape(rows, wide), plain, first_eps, heads_quantized, factor)
    multiply(team, heads_quantized, factor, o[0], o[1], o[2], o[3], x, False, middle)

    inner_width = 4 * down[0].shape[1]
    inner = np.empty((rows, inner_width), np.float32)  # all of it is written: panels reach to the end of every row
    quantize(team, middle, second_norm, second_eps, quantized, factor)
    multiply(team, quantized, factor, gate_up[0], gate_up[1], gate_up[2], gate_up[3], none, True, inner)

    inner_quantized, out = np.empty((rows, inner_width), np.uint8), np.empty((rows, width), np.float32)
    quantize(team, inner, plain, first_eps, inner_quantized, factor)
    multiply(team, inner_quantized, factor, down[0], down[1], down[2], down[3], middle, False, out)
    return out


@_jit
def _matrix(addresses: Any, shape: Any) -> Any:
    """(packed, offset, scale, bias) at four addresses, for `shape` (panels, steps)."""
    panels, steps = shape
    return (
        carray(pointer(addresses[0]), (panels, steps, PANEL, 4), np.int8),
        carray(pointer(addresses[1]), (panels * PANEL,), np.int32),
        carray(pointer(addresses[2]), (panels * PANEL,), np.float32),
        carray(pointer(addresses[3]), (panels * PANEL,), np.float32),
    )


@_jit
def decoder(
    team: Any, x: Any, cos: Any, sin: Any, layers: Any, shapes: Any, windows: Any, numbers: Any, keys: Any, values: Any,
    items: Any, tables: Any, sequences: Any, firsts: Any, starts: Any, ancestors: Any,
) -> Any:  # fmt: skip
    """`decoder_layer` for one layer after another; [n, width].

    `layers` int64 [layers, 18] are addresses: four each of the matrices qkv, o, gate_up and down, and the weights of the two
    norms. `shapes` int64 [4, 2] are panels and steps of the four. `windows` int64 [layers]; `numbers` float32 [layers, 3] are
    eps of the two norms and the scale of scores. keys and values have the layer as their first axis. Addresses, because handing
    over some twenty arrays for every layer takes a third as long as one row of a small model.
    """
    width = x.shape[1]
    board = np.zeros(BOARD_WORDS, np.int64)
    crew = muster(team, board)
    for i in range(len(layers)):
        at = layers[i]
        first, second = carray(pointer(at[16]), (width,), np.float32), carray(pointer(at[17]), (width,), np.float32)
        x = decoder_layer(
            crew, x, cos, sin, _matrix(at[:4], shapes[0]), _matrix(at[4:8], shapes[1]), _matrix(at[8:12], shapes[2]),
            _matrix(at[12:16], shapes[3]), ((first, numbers[i, 0:1]), (second, numbers[i, 1:2])), keys[i], values[i], items,
            tables, sequences, firsts, starts, ancestors, windows[i], numbers[i, 2:3],
        )  # fmt: skip
    dismiss(crew, board)
    return x
