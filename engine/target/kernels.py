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
from numba import njit

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
_inline = njit(nogil=True, cache=True, error_model="numpy", inline="always")


@_jit
def exp_rows(x: Any, out: Any) -> None:
    """out = e^x elementwise over 1-D arrays; relative error below 3e-7; x is clamped to [-87, 88]."""
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
def scale_rows(x: Any, out: Any, scale: Any) -> None:
    """Bring every row of x [n, width] into [-1, 1]: scale[row] is its largest absolute value (1 for a zero row).

    out [n, width + padding]: the padding holds +1, -1 and zeros, which pins the range that dynamic quantization will see.
    """
    width = x.shape[1]
    for row in range(x.shape[0]):
        top = _largest(x[row], width)
        if not top > 0.0:
            top = _ONE
        scale[row] = top
        inverse = _ONE / top
        for i in range(width):
            out[row, i] = x[row, i] * inverse
        out[row, width] = _ONE
        out[row, width + 1] = -_ONE
        for i in range(width + 2, out.shape[1]):
            out[row, i] = np.float32(0.0)


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
        top = _largest(power, width)
        if not top > 0.0:
            top = _ONE
        out_scale[row] = top
        inverse = _ONE / top
        for i in range(width):
            out[row, i] = power[i] * inverse
        out[row, width] = _ONE
        out[row, width + 1] = -_ONE
        for i in range(width + 2, out.shape[1]):
            out[row, i] = np.float32(0.0)


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


@_jit
def _scores(query: Any, keys: Any, table: Any, kv: int, begin: int, end: int, group: int, raw: Any) -> None:
    """raw [(end - begin) * group, blocks * BLOCK] = query . key over every slot of the sequence; sums run over d in order."""
    dim = query.shape[2]
    raw[:] = 0.0
    for b in range(raw.shape[1] // BLOCK):
        block = keys[table[b], kv]
        for i in range(begin, end):
            for g in range(group):
                score = raw[(i - begin) * group + g, b * BLOCK : (b + 1) * BLOCK]
                q = query[kv * group + g, i]
                for d in range(0, dim, 4):
                    q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
                    k0, k1, k2, k3 = block[d], block[d + 1], block[d + 2], block[d + 3]
                    for j in range(BLOCK):
                        score[j] = (((score[j] + q0 * k0[j]) + q1 * k1[j]) + q2 * k2[j]) + q3 * k3[j]


@_jit
def _softmax(raw: Any, length: int, ancestors: Any, low: int, scale: Any, weight: Any) -> Any:
    """weight [length + depth] = e^(score - max) of the logical sequence prefix + ancestors, 0 before `low`; returns the sum."""
    visible = length + len(ancestors)
    for s in range(length):
        weight[s] = raw[s] * scale
    for t in range(len(ancestors)):
        weight[length + t] = raw[length + ancestors[t]] * scale
    top = np.float32(-np.inf)
    for s in range(low, visible):
        top = max(top, weight[s])
    for s in range(visible):
        weight[s] -= top
    exp_rows(weight[:visible], weight[:visible])
    for s in range(low):
        weight[s] = np.float32(0.0)
    return _sum(weight[:visible])


@_jit
def _mix_prefix(weight: Any, values: Any, table: Any, kv: int, length: int, mixed: Any) -> None:
    """mixed [r, dim] += weight [r, s] * value of slot s, s = 0 .. length - 1 in order."""
    dim = mixed.shape[1]
    for b in range((length + BLOCK - 1) // BLOCK):
        block = values[table[b], kv]
        inside = min(BLOCK, length - b * BLOCK)
        full = inside // 4 * 4
        for r in range(mixed.shape[0]):
            row = mixed[r]
            w = weight[r, b * BLOCK : b * BLOCK + inside]
            for s in range(0, full, 4):
                w0, w1, w2, w3 = w[s], w[s + 1], w[s + 2], w[s + 3]
                v0, v1, v2, v3 = block[s], block[s + 1], block[s + 2], block[s + 3]
                for d in range(dim):
                    row[d] = (((row[d] + w0 * v0[d]) + w1 * v1[d]) + w2 * v2[d]) + w3 * v3[d]
            for s in range(full, inside):
                for d in range(dim):
                    row[d] += w[s] * block[s, d]


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
    last = begin
    for i in range(begin, end):
        for t in range(starts[offset + i], starts[offset + i + 1]):
            last = max(last, ancestors[t])
    slots = length + last + 1
    num_blocks = (slots + BLOCK - 1) // BLOCK
    num = (end - begin) * group
    raw = np.empty((num, num_blocks * BLOCK), np.float32)
    weight = np.empty((num, slots), np.float32)
    mixed = np.zeros((num, dim), np.float32)
    total = np.empty(num, np.float32)
    _scores(query, keys, table, kv, offset + begin, offset + end, group, raw)
    for r in range(num):
        i = offset + begin + r // group
        mine = ancestors[starts[i] : starts[i + 1]]
        low = max(0, length + len(mine) - window) if window > 0 else 0
        total[r] = _softmax(raw[r], length, mine, low, scale, weight[r])
    _mix_prefix(weight, values, table, kv, length, mixed)
    for r in range(num):
        i = offset + begin + r // group
        for t in range(starts[i + 1] - starts[i]):
            slot = length + ancestors[starts[i] + t]
            value = values[table[slot // BLOCK], kv, slot % BLOCK]
            w = weight[r, length + t]
            for d in range(dim):
                mixed[r, d] += w * value[d]
        for d in range(dim):
            out[i, kv * group + r % group, d] = mixed[r, d] / total[r]


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
