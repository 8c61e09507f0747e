"""Kernels of the local worker's CPU path: everything between two matrix products, and attention over trees.

They make a row's result independent of its neighbours by construction. Every sum has one order, fixed by the row's own logical
sequence and not by packing, chunking, block boundaries or threads: over features by index modulo 16, over keys by position. All
else is elementwise and built from +, -, x, /, sqrt and comparison, without fast-math, so vector bodies and tails agree in every
bit.

Arrays are float32 unless said otherwise. Twins: `tests/engine/oracles_target.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 64
"""Keys in one block of the KV storage."""

_LANES = 16
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 x 2^23: adding and subtracting it rounds to an integer
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)

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
        s = np.float32(1.9875691500e-4)
        s = s * r + np.float32(1.3981999507e-3)
        s = s * r + np.float32(8.3334519073e-3)
        s = s * r + np.float32(4.1665795894e-2)
        s = s * r + np.float32(1.6666665459e-1)
        s = s * r + np.float32(5.0000001201e-1)
        out[i] = (s * r * r + r) + _ONE
        bits[i] += np.int32(k) << 23


@_jit
def _sum(x: Any) -> Any:
    """Sum of a 1-D array by index modulo 16, then the lanes in order. The order depends on positions only."""
    lanes = np.zeros(_LANES, np.float32)
    full = len(x) // _LANES * _LANES
    for i in range(0, full, _LANES):
        for j in range(_LANES):
            lanes[j] += x[i + j]
    for i in range(full, len(x)):
        lanes[i - full] += x[i]
    total = np.float32(0.0)
    for j in range(_LANES):
        total += lanes[j]
    return total


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
def _largest(x: Any, width: int) -> Any:
    """The largest absolute value of x[:width], compared as integers: the bits of positive floats order as they do."""
    bits = x.view(np.int32)
    top = np.int32(0)
    for i in range(width):
        top = max(top, bits[i] & np.int32(0x7FFFFFFF))
    one = np.empty(1, np.int32)
    one[0] = top
    return one.view(np.float32)[0]


@_jit
def _scale_row(x: Any, width: int, out: Any) -> Any:
    """out = x[:width] / its largest absolute value (1 below 1e-30), which is returned; behind it +1, -1 and zeros.

    That padding pins the range that dynamic quantization will see. A row with an infinity or a NaN becomes zeros with the scale
    NaN: it spoils itself, and not the range of all.
    """
    top = _largest(x, width)
    if top < np.float32(np.inf):
        if top < np.float32(1e-30):
            top = _ONE
        inverse = _ONE / top
        for i in range(width):
            out[i] = x[i] * inverse
    else:
        top = np.float32(np.nan)
        for i in range(width):
            out[i] = np.float32(0.0)
    out[width] = _ONE
    out[width + 1] = -_ONE
    for i in range(width + 2, len(out)):
        out[i] = np.float32(0.0)
    return top


@_jit
def scale_rows(x: Any, out: Any, scale: Any) -> None:
    """Bring every row of x [n, width] into [-1, 1], into out [n, width + padding], as `_scale_row`; scale [n]."""
    for row in range(x.shape[0]):
        scale[row] = _scale_row(x[row], x.shape[1], out[row])


@_jit
def norm_rows(x: Any, weight: Any, eps: Any, out: Any, scale: Any) -> None:
    """`rms_norm`, then `scale_rows`, in one go."""
    normed = np.empty((1, x.shape[1]), np.float32)
    for row in range(x.shape[0]):
        rms_norm(x[row : row + 1], weight, eps, normed)
        scale[row] = _scale_row(normed[0], x.shape[1], out[row])


@_jit
def unscale_rows(y: Any, scale: Any, bias: Any) -> None:
    """y [n, width] = y * scale[row] + bias in place; an empty bias is none."""
    for row in range(y.shape[0]):
        factor = scale[row]
        if len(bias):
            for i in range(y.shape[1]):
                y[row, i] = y[row, i] * factor + bias[i]
        else:
            for i in range(y.shape[1]):
                y[row, i] = y[row, i] * factor


@_jit
def add_rows(x: Any, y: Any, scale: Any, bias: Any, out: Any) -> None:
    """out = x + (y * scale[row] + bias), all [n, width]: the residual connection around a product. An empty bias is none."""
    for row in range(x.shape[0]):
        factor = scale[row]
        if len(bias):
            for i in range(x.shape[1]):
                out[row, i] = x[row, i] + (y[row, i] * factor + bias[i])
        else:
            for i in range(x.shape[1]):
                out[row, i] = x[row, i] + y[row, i] * factor


@_jit
def silu_gate(y: Any, scale: Any, out: Any, out_scale: Any) -> None:
    """The gate of a Llama MLP: y [n, 2 width] are gate and up, still to be multiplied by scale[row].

    out = silu(gate) * up, brought into [-1, 1] as by `scale_rows` with out_scale; silu(x) = x / (1 + e^-x).
    """
    width = y.shape[1] // 2
    minus = np.empty(width, np.float32)
    power = np.empty(width, np.float32)
    for row in range(y.shape[0]):
        factor = scale[row]
        for i in range(width):
            minus[i] = -(y[row, i] * factor)
        exp_rows(minus, power)
        for i in range(width):
            power[i] = (y[row, i] * factor) / (_ONE + power[i]) * (y[row, width + i] * factor)
        out_scale[row] = _scale_row(power, width, out[row])


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
    scale: Any,
    bias: Any,
    cos: Any,
    sin: Any,
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    sequences: Any,
    firsts: Any,
) -> None:
    """From the product of q, k and v to attention: unscale, rotate (RoPE by halves), store.

    y [n, (heads + 2 kv heads) * dim], still to be multiplied by scale[row], bias to be added (empty: none); cos, sin [n, dim].
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
            factor = scale[row]
            for i in range(len(line)):
                line[i] = y[row, i] * factor
            if len(bias):
                for i in range(len(line)):
                    line[i] += bias[i]
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

    The one thing written in LLVM's own terms, since no loop over arrays keeps its sums in registers (three times the speed).
    Every element is one chain of fused multiply-adds in order of k, whatever the tile it is in. Called with addresses and
    strides in elements: (a, stride, b, stride, c, stride, number of k).
    """

    @intrinsic
    def accumulate(typing: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, num: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, index = ir.FloatType(), ir.IntType(64)
            vector = ir.VectorType(number, _LANES)
            nothing = ir.Constant(vector, ir.Undefined)
            spread = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
            fma = builder.module.globals.get("llvm.fma.v16f32") or ir.Function(
                builder.module, ir.FunctionType(vector, [vector] * 3), "llvm.fma.v16f32"
            )
            a_stride, b_stride, c_stride, num = args[1], args[3], args[5], args[6]
            a, b, c = (builder.inttoptr(args[i], number.as_pointer()) for i in (0, 2, 4))

            def place(base: Any, stride: Any, row: Any, column: int) -> Any:
                offset = builder.add(builder.mul(stride, row), index(column))
                return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

            cells = [(r, v) for r in range(num_rows) for v in range(num_vectors)]
            sums = {cell: cgutils.alloca_once(builder, vector) for cell in cells}
            for r, v in cells:
                builder.store(builder.load(place(c, c_stride, index(r), v * _LANES), align=4), sums[r, v])
            with cgutils.for_range(builder, num, intp=index) as loop:
                line = [builder.load(place(b, b_stride, loop.index, v * _LANES), align=4) for v in range(num_vectors)]
                for r in range(num_rows):
                    one = builder.load(builder.gep(a, [builder.add(builder.mul(a_stride, index(r)), loop.index)]))
                    first = builder.insert_element(nothing, one, ir.IntType(32)(0))
                    factor = builder.shuffle_vector(first, nothing, spread)
                    for v in range(num_vectors):
                        builder.store(builder.call(fma, [factor, line[v], builder.load(sums[r, v])]), sums[r, v])
            for r, v in cells:
                builder.store(builder.load(sums[r, v]), place(c, c_stride, index(r), v * _LANES), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return accumulate


_tile_4x4 = _tile(4, 4)
_tile_1x4 = _tile(1, 4)
_tile_4x1 = _tile(4, 1)
_tile_1x1 = _tile(1, 1)


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
            if row + 4 <= num:
                if wide:
                    _tile_4x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                else:
                    _tile_4x1(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 4
            else:
                if wide:
                    _tile_1x4(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                else:
                    _tile_1x1(from_a, a_stride, from_b, b_stride, to_c, c_stride, depth)
                row += 1
        column += 64 if wide else 16


@_jit
def _softmax(raw: Any, length: int, ancestors: Any, low: int, scale: Any, scratch: Any, weight: Any) -> Any:
    """weight [length + depth] = e^(score - max) of the logical sequence prefix + ancestors, 0 before `low`; returns the sum."""
    prefix, logits = weight[:length], raw[:length]
    for s in range(len(prefix)):
        prefix[s] = logits[s] * scale
    tail = weight[length : length + len(ancestors)]
    for t in range(len(tail)):
        tail[t] = raw[length + ancestors[t]] * scale
    everything = weight[: length + len(ancestors)]
    top = _highest(everything[low:])
    shifted = scratch[: len(everything)]
    for s in range(len(shifted)):
        shifted[s] = everything[s] - top
    exp_rows(shifted, everything)
    everything[:low] = np.float32(0.0)
    return _sum(everything)


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
    out: Any,
) -> None:
    """Attention of the rows [begin, end) of one sequence's tree, for one kv head, over the prefix and their own ancestors.

    query [heads, n, head dim]; out [n, heads, head dim]. The keys of the prefix are in slots [0, length) of the sequence, those
    of the tree's row i in slot length + i; row i of the tree is row offset + i of the pass. It sees the prefix and the tree
    rows ancestors[starts[offset + i]:starts[offset + i + 1]] (int32, in order of depth, itself last); with `window` > 0 only
    the last `window` positions of these.

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
        total[r] = _softmax(raw[r], length, mine, low, scale, scratch, weight[r])
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
    out: Any,
) -> None:
    """One piece of a pass's attention, for one thread.

    items int32 [num, 4]: sequence, kv head, first and last + 1 row of its tree. sequences int32 [b, 3]: first row in the pass,
    length of the prefix, where its block table begins in `tables` (int32).
    """
    which, kv, begin, end = items[item]
    offset, length, at = sequences[which]
    attend(query, keys, values, tables[at:], length, begin, end, offset, starts, ancestors, kv, window, scale, out)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An integer address as a pointer, for carray."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _take(typing_context: Any, address: Any) -> Any:
    """Atomically read the int64 at an address and add one to it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = context.get_value_type(types.int64)
        pointer = builder.inttoptr(args[0], word.as_pointer())
        return builder.atomic_rmw("add", pointer, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(types.int64), generate


_ATTEND_FIELDS = 22


@cfunc(types.void(types.voidptr), cache=True, nopython=True)
def attend_entry(data: Any) -> None:
    """What each thread runs: take items of `attend_item` until none is left. `threads.attend` fills the fields of `data`.

    It stands in this file so that its compiled form, which numba caches by file, never outlives what it calls.
    """
    a = carray(data, (_ATTEND_FIELDS,), np.int64)
    heads, rows, dim, kv_heads, blocks = a[11], a[12], a[13], a[14], a[15]
    query = carray(_pointer(a[2]), (heads, rows, dim), np.float32)
    keys = carray(_pointer(a[3]), (blocks, kv_heads, dim, BLOCK), np.float32)
    values = carray(_pointer(a[4]), (blocks, kv_heads, BLOCK, dim), np.float32)
    out = carray(_pointer(a[5]), (rows, heads, dim), np.float32)
    items = carray(_pointer(a[6]), (a[1], 4), np.int32)
    tables = carray(_pointer(a[7]), (a[16],), np.int32)
    sequences = carray(_pointer(a[8]), (a[17], 3), np.int32)
    starts = carray(_pointer(a[9]), (rows + 1,), np.int32)
    ancestors = carray(_pointer(a[10]), (a[18],), np.int32)
    scale = carray(_pointer(a[19]), (1,), np.float32)[0]
    counter = a[20]
    while True:
        item = _take(counter)
        if item >= a[1]:
            break
        attend_item(item, items, query, keys, values, tables, sequences, starts, ancestors, a[21], scale, out)


_SILU_FIELDS = 8


@cfunc(types.void(types.voidptr), cache=True, nopython=True)
def silu_entry(data: Any) -> None:
    """What each thread runs: take rows of `silu_gate` until none is left. `threads.silu_gate` fills the fields of `data`."""
    a = carray(data, (_SILU_FIELDS,), np.int64)
    rows, width = a[1], a[2]
    y = carray(_pointer(a[4]), (rows, 2 * width), np.float32)
    scale = carray(_pointer(a[5]), (rows,), np.float32)
    out = carray(_pointer(a[6]), (rows, a[3]), np.float32)
    out_scale = carray(_pointer(a[7]), (rows,), np.float32)
    while True:
        row = _take(a[0])
        if row >= rows:
            break
        mine = slice(row, row + 1)
        silu_gate(y[mine], scale[mine], out[mine], out_scale[mine])
