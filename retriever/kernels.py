"""The kernels of the retriever: pure functions over arrays, compiled by numba, run without the GIL.

# What they share

*Text* is an array of token ids with a separator between documents: no match and no continuation crosses one. On disk a token
takes `width` bytes, big-endian (so that byte order is token order); a text is then a uint8 array. In memory it is int32 and the
separator is -1.

A *suffix order* lists text positions sorted by the text that starts there. The occurrences of a token string are one interval
[low, high) of it.

*Occurrences* are what every lexical source answers a query with: `continuations` int32 [K, D], the tokens that followed each
occurrence, -1 from the end of its document on; `lengths` int32 [K], how many tokens of context matched there; `weights`
float64 [K], how many real occurrences the row stands for. One kernel, `blend`, turns them into a draft.

# Damage

Positions, intervals and token ids come from files that may have a flipped bit. Every one is checked against its bounds before
it is used, so damage can spoil a draft but never reads outside an array and never yields a token that is not in the
vocabulary.

Segments of a datastore are passed as the int64 rows of `describe`, memory addresses and sizes, so that one compiled kernel
serves any number of them. The caller keeps the arrays alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from retriever.plain import MOST_RUNS, SAMPLE_STRIDE, SAMPLE_WORDS, TABLE_CONTEXT

if TYPE_CHECKING:
    Function = TypeVar("Function", bound=Callable[..., Any])

    def njit(**options: Any) -> Callable[[Function], Function]: ...

    def intrinsic(function: Callable[..., Any]) -> Any: ...

    def int64(number: Any) -> int: ...

    np_cfarray: Any
    types: Any

else:
    from numba import int64, njit
    from numba.core import types
    from numba.extending import intrinsic
    from numba.np.arrayobj import np_cfarray

Bytes = NDArray[np.uint8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Nodes = tuple[Int32, Int32, Float32, Int32, Int32]
"""Where a kernel writes its answer, arrays of one size, which is how many nodes are wanted: tokens, parents, probs, lengths,
counts, as `blend` has them. The caller's, since to hand five arrays back takes longer than to take them."""

kernel = njit(nogil=True, cache=True, error_model="numpy", _nrt=True)
bare = njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
"""For what allocates nothing and returns none of its arrays: nobody counts there who holds an array, which costs two calls
wherever one is cut or handed on."""
inlined = njit(nogil=True, cache=True, error_model="numpy", _nrt=False, forceinline=True)
"""Likewise, for the few lines that a loop runs over and over: a call costs more than they do."""
named = njit(nogil=True, error_model="numpy", _nrt=False, inline="always")
"""For an expression that is an array, which none of these may return: it is put where the call stands."""

MAX_EVIDENCE_LENGTH = 64
"""Match lengths reported beside a node stop here."""

_NOTHING_LEFT = np.zeros(0, np.uint64)
_NO_CONTEXTS = np.zeros((0, 4), np.uint32)
_NO_RUNS = np.zeros((0, 3), np.uint32)
_NO_SAMPLES = np.zeros((0, SAMPLE_WORDS), np.uint64)

POOL_ORDERS = np.array([1, 2, 4, 8], np.int64)
"""A pool chains the earlier places that agree in the last 1, 2, 4 and 8 tokens."""


# Blending


@kernel
def blend(continuations: Int32, lengths: Int32, weights: Float64, nodes: Nodes) -> int:
    """Occurrences in, the likeliest nodes of their trie out, best path first. Returns how many.

    `continuations` int32 [K, D], `lengths` int32 [K], `weights` float64 [K] as in the module's docstring. Writes as many nodes
    as there are and `nodes` has room for: tokens int32, parents int32, probs float32, lengths int32, counts int32; parents -1
    is the root.

    A node's probability given its parent is PPM-C back-off (Moffat 1990, method C) over match lengths: with the rows that agree
    with the path so far, for every length L among them from the shortest up,

        prob_L(x) = K_L / (K_L + D_L) * c_L(x) / C_L  +  D_L / (K_L + D_L) * prob_{L'}(x)

    L' the next shorter length, c_L(x) the weight of the rows of length L or more that go on with x, C_L its sum over x, D_L
    the number of different x, K_L that of rows: how far to trust a length is a matter of how many occurrences were looked at,
    not of how many they stand for. Below the shortest stands 0: what is left over is the chance of something not seen. Rows
    that have ended are not counted. lengths[i] is the longest match among the rows at the node's parent, plus the parent's
    depth, at most 64; counts[i] is the weight at that length there. Ties, which are paths whose probabilities agree to 2^-32
    of themselves, go to the smaller token (by its last 20 bits), then to the earlier parent. No rows, or no room: no nodes.

    Cost: O(n K (log K + n + number of lengths)) for n nodes at worst; a node costs as much as it has rows, and rows run out
    fast.
    """
    nowhere = np.empty((0, 2), np.int64)
    longest = 0
    for length in lengths:
        longest = max(longest, int64(length))
    depth = continuations.shape[1]
    room = np.empty(_blend_room(len(lengths), depth, longest, len(nodes[0])), np.int64)
    return _blend(continuations, lengths, weights, longest, depth, nowhere, int64(4), int64(0), nodes, room)


_TOKEN, _PARENT, _RUN, _DEPTH, _PROB, _PATH, _LENGTH, _COUNT = range(8)
_FIELDS = 8
"""What is known of a node that may be emitted, in a cache line. The halves of _RUN are where its rows begin and end; _PROB and
_PATH are float64."""


@inlined
def _blend_room(num_rows: int, depth: int, longest: int, num_nodes: int) -> int:
    """How much memory, in int64, `_blend` works in. A row opens at most one candidate a depth."""
    most_levels = min(num_rows, longest + 1)
    return longest + 2 + 3 * most_levels + num_rows * (4 + most_levels) + (2 + _FIELDS) * num_rows * min(depth, num_nodes)


@bare
def _blend(
    continuations: Int32,
    lengths: Int32,
    weights: Float64,
    longest: int,
    depth_limit: int,
    places: Int64,
    width: int,
    vocab_size: int,
    nodes: Nodes,
    room: Int64,
) -> int:
    """`blend` of rows of `depth_limit` tokens, of which the matrix may have the first columns only. No match is longer than
    `longest`.

    What is beyond them is read where it stands, and only when a node is opened, which few are: places int64 [K, 2] has the
    addresses of a row's first token and of the end of its text, of `width` bytes a token. `room` is cut into pieces to work in.
    """
    tokens, parents, probs, match_lengths, counts = nodes
    num_rows, num_columns = continuations.shape
    size = min(len(tokens), num_rows * depth_limit)
    if size <= 0:
        return 0
    limit = num_rows * min(depth_limit, size)

    most_levels = min(num_rows, longest + 1)
    level_of, room = room[: longest + 1], room[longest + 1 :]
    levels, room = room[:most_levels], room[most_levels:]
    num_levels = _number_levels(lengths, level_of, levels)

    # A node is a run of `keys`, one key a row, its next token above the row's number: sorting a run groups it by next token,
    # and every group is again a run, that of a child. The runs of a node's children lie inside its own, so one array does for
    # all.
    keys, room = room[:num_rows], room[num_rows:]
    for row in range(num_rows):
        keys[row] = row
    spare, room = room[:num_rows], room[num_rows:]
    child_low, room = room[: num_rows + 1], room[num_rows + 1 :]
    child_weight, room = room[: num_rows * num_levels].view(np.float64), room[num_rows * num_levels :]
    child_prob, room = room[:num_rows].view(np.float64), room[num_rows:]
    own_weight, room = room[:num_levels].view(np.float64), room[num_levels:]
    level_rows, room = room[:num_levels].view(np.float64), room[num_levels:]

    # What may be emitted next: where the candidates' fields begin, the best one last. Beside it stands what orders them: the
    # bits of the path's probability, which are ordered as it is, with the complement of the token in the last 20, so that
    # probabilities that agree to 2^-32 of themselves are a tie. Then the earlier candidate goes first. A list in order does
    # better than a heap here: what comes in mostly belongs near the end, and what cannot be emitted any more is seen at once.
    queue, room = room[:limit], room[limit:]
    ranks, room = room[:limit], room[limit:]
    num_queued = 0
    cands = room[: _FIELDS * limit]
    cand_floats = cands.view(np.float64)
    cand = 0  # where the next one's fields begin

    num_nodes = 0
    node, depth, path, low, high = -1, 0, 1.0, 0, num_rows

    while True:
        if depth < depth_limit:
            # Rows that go on, grouped by their next token. Those of one class and segment are in order as they stand.
            end = low
            last_key = int64(-1)
            in_order = True
            for i in range(low, high):
                row = keys[i] & 0xFFFFFFFF
                if depth < num_columns:
                    token = int64(continuations[row, depth])
                else:
                    token = _token_beyond(places[row, 0], places[row, 1], depth, width, vocab_size)
                if token >= 0:
                    key = token << 32 | row
                    keys[end] = key
                    in_order &= key > last_key
                    last_key = key
                    end += 1
            num_children = 0
            length, count = int64(0), 0.0  # the longest match among them, and its weight
            if end - low == 1:  # as most are soon
                row = keys[low] & 0xFFFFFFFF
                num_children = 1
                child_low[0], child_low[1] = low, end
                child_prob[0] = 0.5
                length, count = int64(lengths[row]), weights[row]
            elif end > low:
                if not in_order:
                    _sort(keys, low, end, spare)
                level_rows[:] = 0.0
                top = -1
                bottom = num_levels
                i = low
                while i < end:
                    token = keys[i] >> 32
                    child_low[num_children] = i
                    child_prob[num_children] = 0.0
                    for level in range(num_levels):
                        child_weight[num_children * num_levels + level] = 0.0
                    while i < end and keys[i] >> 32 == token:
                        # Rows of a level mostly stand together: their sum is not written and read again for each of them.
                        length = int64(lengths[keys[i] & 0xFFFFFFFF])
                        level = level_of[length]
                        weight = child_weight[num_children * num_levels + level]
                        first = i
                        while i < end and keys[i] >> 32 == token and lengths[keys[i] & 0xFFFFFFFF] == length:
                            weight += weights[keys[i] & 0xFFFFFFFF]
                            i += 1
                        child_weight[num_children * num_levels + level] = weight
                        level_rows[level] += i - first
                        top = max(top, level)
                        bottom = min(bottom, level)
                    num_children += 1
                child_low[num_children] = end

                # Longer matches count for shorter lengths too; a length no row has of its own is no level here.
                for level in range(bottom, top + 1):
                    own_weight[level] = 0.0
                    for child in range(num_children):
                        own_weight[level] += child_weight[child * num_levels + level]
                for level in range(top - 1, bottom - 1, -1):
                    level_rows[level] += level_rows[level + 1]
                    for child in range(num_children):
                        child_weight[child * num_levels + level] += child_weight[child * num_levels + level + 1]
                length, count = levels[top], own_weight[top]
                for level in range(bottom, top + 1):
                    if own_weight[level] == 0.0:
                        continue
                    total = 0.0
                    distinct = 0
                    for child in range(num_children):
                        total += child_weight[child * num_levels + level]
                        distinct += child_weight[child * num_levels + level] > 0.0
                    escape = distinct / (level_rows[level] + distinct)
                    share = (1.0 - escape) / total
                    for child in range(num_children):
                        child_prob[child] = child_weight[child * num_levels + level] * share + escape * child_prob[child]

            wanted = size - num_nodes
            length = min(length + depth, MAX_EVIDENCE_LENGTH)
            seen = int64(min(np.rint(count), 2147483647.0))
            for child in range(num_children):
                token = keys[child_low[child]] >> 32
                cand_floats[cand + _PATH] = path * child_prob[child]
                rank = cands[cand + _PATH] >> 20 << 20 | (0xFFFFF - (token & 0xFFFFF))
                if num_queued >= wanted and rank <= ranks[num_queued - wanted]:
                    continue  # so many come before it that its turn will not come
                cands[cand + _TOKEN] = token
                cands[cand + _PARENT] = node
                cands[cand + _RUN] = child_low[child] << 32 | child_low[child + 1]
                cands[cand + _DEPTH] = depth + 1
                cand_floats[cand + _PROB] = child_prob[child]
                cands[cand + _LENGTH] = length
                cands[cand + _COUNT] = seen
                at = num_queued
                while at > 0 and ranks[at - 1] >= rank:
                    queue[at], ranks[at] = queue[at - 1], ranks[at - 1]
                    at -= 1
                queue[at], ranks[at] = cand, rank
                num_queued += 1
                cand += _FIELDS

        if num_queued == 0:
            break
        num_queued -= 1
        best = queue[num_queued]
        tokens[num_nodes] = cands[best + _TOKEN]
        parents[num_nodes] = cands[best + _PARENT]
        probs[num_nodes] = cand_floats[best + _PROB]
        match_lengths[num_nodes] = cands[best + _LENGTH]
        counts[num_nodes] = cands[best + _COUNT]
        node, depth, path = num_nodes, cands[best + _DEPTH], cand_floats[best + _PATH]
        low, high = cands[best + _RUN] >> 32, cands[best + _RUN] & 0xFFFFFFFF
        num_nodes += 1
        if num_nodes == size:
            break

    return num_nodes


@bare
def _number_levels(lengths: Int32, level_of: Int64, levels: Int64) -> int:
    """Number the different lengths upwards: the level of each length, and the length of each level. Returns how many."""
    level_of[:] = -1
    for length in lengths:
        level_of[length] = 0
    num_levels = 0
    for length in range(len(level_of)):
        if level_of[length] == 0:
            level_of[length] = num_levels
            levels[num_levels] = length
            num_levels += 1
    return num_levels


@bare
def _sort(keys: Int64, low: int, high: int, room: Int64) -> None:
    """Sort keys[low:high] in place, with `room` as large as `keys` to work in.

    Occurrences from a suffix order come as a few ascending runs, one a class and segment: those are merged two by two, O(n log
    runs). Others get a shell sort, short, and quick for the few hundred keys there are.
    """
    num_runs = 1
    for i in range(low + 1, high):
        num_runs += keys[i] < keys[i - 1]
    if num_runs > 16:
        for gap in (132, 57, 23, 10, 4, 1):
            for i in range(low + gap, high):
                key = keys[i]
                at = i
                while at >= low + gap and keys[at - gap] > key:
                    keys[at] = keys[at - gap]
                    at -= gap
                keys[at] = key
        return
    while num_runs > 1:
        num_runs = 0
        begin = low
        while begin < high:
            middle = begin + 1
            while middle < high and keys[middle] >= keys[middle - 1]:
                middle += 1
            end = min(middle + 1, high)
            while end < high and keys[end] >= keys[end - 1]:
                end += 1
            for i in range(begin, middle):
                room[i] = keys[i]
            left, right, at = begin, middle, begin
            while left < middle and right < end:
                one, other = room[left], keys[right]
                keys[at] = min(one, other)
                left += one <= other
                right += one > other
                at += 1
            while left < middle:
                keys[at] = room[left]
                left += 1
                at += 1
            num_runs += 1
            begin = end


# Machine words


@intrinsic
def _array_at(typing_context: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """The memory at an address (int64) as an array; whose it is, others know."""
    array_type = types.Array(dtype.dtype, len(shape) if isinstance(shape, types.BaseTuple) else 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        return np_cfarray(context, builder, array_type(types.voidptr, shape), (pointer, args[1]))

    return array_type(types.int64, shape, dtype), codegen


@intrinsic
def _big_endian(typing_context: Any, text: Any, at: Any) -> Any:
    """text[at : at + 8], inside the array (uint8, contiguous), as a uint64, the first byte highest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        return builder.bswap(builder.load(pointer, align=1))

    return types.uint64(text, types.int64), codegen


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Begin to load the cache line at an address (int64). Any address will do: nothing is read, nothing fails."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


_clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.CPointer(types.int64)))
_MONOTONIC = time.CLOCK_MONOTONIC


@kernel
def _late(end: int) -> bool:
    """Whether it is later than `end`, in nanoseconds of the monotonic clock (that of `time.monotonic_ns`); never if it is 0."""
    if end == 0:
        return False
    now = np.empty(2, np.int64)
    _clock_gettime(_MONOTONIC, now.ctypes)
    return bool(now[0] * 1_000_000_000 + now[1] > end)


# Text on disk


@inlined
def _token_beyond(begin: int, end: int, ahead: int, width: int, vocab_size: int) -> int:
    """The token so far ahead of the address `begin`; -1 beyond the document, or the text, which ends at the address `end`."""
    at = begin + ahead * width
    if at + width > end:
        return -1
    token = token_at(_array_at(at, end - at, np.uint8), width, 0)
    return token if token < vocab_size else -1


@inlined
def _eight_bytes(text: Bytes, at: int) -> Any:
    """uint64: the bytes from `at` >= 0 on, the first one highest; 0 where the text has ended."""
    if at + 8 <= len(text):
        return _big_endian(text, at)
    word = np.uint64(0)
    for i in range(at, len(text)):
        word |= np.uint64(text[i]) << np.uint64(56 - 8 * (i - at))
    return word


@inlined
def token_at(text: Bytes, width: int, position: int) -> int:
    """The token at `position`, which must be inside the text."""
    return int64(_eight_bytes(text, position * width) >> np.uint64(64 - 8 * width))


@bare
def pack_key(key: Int32, width: int, words: UInt64) -> None:
    """Fill `words`, uint64 [ceil(len(key) * width / 8)] or more, with a key as it would stand in a text, eight bytes a word,
    the rest 0.
    """
    words[:] = np.uint64(0)
    size = 8 * width
    for i in range(len(key)):
        token = np.uint64(key[i]) & np.uint64((int64(1) << size) - 1)
        word, room = i * size >> 6, 64 - (i * size & 63)
        if size <= room:
            words[word] |= token << np.uint64(room - size)
        else:
            words[word] |= token >> np.uint64(size - room)
            words[word + 1] |= token << np.uint64(64 - size + room)


@inlined
def compare(text: Bytes, width: int, position: int, words: UInt64, num_tokens: int) -> int:
    """-1, 0 or 1: the text from `position` on against the first `num_tokens` tokens of a packed key; 0 if it begins with them.

    Eight bytes at a time: tokens are big-endian, so words are ordered as tokens are. A position outside the text sorts first.
    """
    if position < 0:
        return -1
    begin, num_bytes = position * width, num_tokens * width
    for at in range(0, num_bytes, 8):
        here, wanted = _eight_bytes(text, begin + at), words[at >> 3]
        if num_bytes - at < 8:
            beyond = np.uint64(8 * (8 - (num_bytes - at)))
            here, wanted = here >> beyond, wanted >> beyond
        if here != wanted:
            return -1 if here < wanted else 1
    return 0 if begin + num_bytes <= len(text) else -1


@inlined
def lower_bound(text: Bytes, width: int, order: Int32, words: UInt64, num_tokens: int, low: int, high: int) -> int:
    """The first index in [low, high) of `order` whose suffix is not below the key; `high` if there is none. O(log n).

    Where the next step may look, in either half, is loaded meanwhile.
    """
    address = text.ctypes.data
    while low < high:
        middle = (low + high) >> 1
        _prefetch(address + order[(low + middle) >> 1] * width)
        _prefetch(address + order[min(middle + high + 1, 2 * high - 1) >> 1] * width)
        if compare(text, width, order[middle], words, num_tokens) < 0:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def upper_bound(text: Bytes, width: int, order: Int32, words: UInt64, num_tokens: int, low: int, high: int) -> int:
    """The first index in [low, high) whose suffix is above the key and does not begin with it, given that those at `low` on are
    not below it. Gallops, so the cost is O(log of the answer), not of the range.
    """
    step = 1
    while low + step < high and compare(text, width, order[low + step], words, num_tokens) <= 0:
        low += step
        step *= 2
    high = min(high, low + step)
    while low < high:
        middle = (low + high) // 2
        if compare(text, width, order[middle], words, num_tokens) <= 0:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def rank_tokens(text: Bytes, width: int) -> tuple[Bytes, int]:
    """(uint8 [n * w], w): every token's rank among the distinct ones of a text of at most three bytes a token, in the fewest
    bytes w that hold it, big-endian. O(n + 2^(8 width)).
    """
    num_tokens = len(text) // width
    occurs = np.zeros(1 << 8 * width, np.bool_)
    for position in range(num_tokens):
        occurs[token_at(text, width, position)] = True
    separator = len(occurs) - 1
    num_ids = separator
    while num_ids > 0 and not occurs[num_ids - 1]:
        num_ids -= 1
    rank_of = np.empty(num_ids, np.int64)
    num_kinds = 0
    for token in range(num_ids):
        rank_of[token] = num_kinds
        num_kinds += occurs[token]
    rank_width = 1
    while num_kinds + occurs[separator] > 1 << 8 * rank_width:
        rank_width += 1
    ranked = np.empty(num_tokens * rank_width, np.uint8)
    for position in range(num_tokens):
        token = token_at(text, width, position)
        rank = num_kinds if token == separator else rank_of[token]
        for k in range(rank_width - 1, -1, -1):
            ranked[position * rank_width + k] = rank & 255
            rank >>= 8
    return ranked, rank_width


@kernel
def token_suffixes(byte_order: Any, width: int, num_tokens: int) -> Int32:
    """int32 [num_tokens]: the sorted byte positions at which a token of `width` bytes begins, counted in tokens. O(n)."""
    order = np.empty(num_tokens, np.int32)
    num_found = 0
    for i in range(len(byte_order)):
        if byte_order[i] % width == 0:
            order[num_found] = byte_order[i] // width
            num_found += 1
    return order


# The table: intervals of the most frequent contexts of one to three tokens, so that most searches begin almost at the end.
# An open-addressing hash table, uint32 [slots, 3], slots a power of two: (tag, low, count), count 0 for an empty slot. The tag
# is the upper half of the context's hash; two contexts with one tag (1 in 2^32) would cost a draft, nothing else.


@inlined
def hash_context(key: Int32, length: int) -> int:
    """A 64-bit hash of the first `length` tokens of `key`, as a signed number."""
    state = np.uint64(0x9E3779B97F4A7C15) * np.uint64(length)
    for i in range(length):
        state = (state ^ np.uint64(key[i])) * np.uint64(0xFF51AFD7ED558CCD)
        state ^= state >> np.uint64(32)
        state *= np.uint64(0xC4CEB9FE1A85EC53)
        state ^= state >> np.uint64(29)
    return int64(state)


@inlined
def table_find(table: UInt32, key: Int32, length: int, num_suffixes: int) -> tuple[int, int]:
    """The interval (low, high) the table has for the first `length` tokens of `key`; (0, 0) if it has none. O(1) expected."""
    num_slots = len(table)
    code = hash_context(key, length)
    tag = np.uint32(code >> 32)
    slot = code & (num_slots - 1)
    for _ in range(num_slots):
        count = int64(table[slot, 2])
        if count == 0:
            break
        if table[slot, 0] == tag:
            low = int64(table[slot, 1])
            if low + count <= num_suffixes:
                return low, low + count
        slot = (slot + 1) & (num_slots - 1)
    return 0, 0


@inlined
def prefetch_table(address: int, num_slots: int, key: Int32) -> None:
    """Begin to load where a table may have the beginning of a key that `find_interval` asks for first."""
    _prefetch(address + 12 * (hash_context(key, min(len(key), TABLE_CONTEXT)) & (num_slots - 1)))


@kernel
def frequent_contexts(text: Bytes, width: int, order: Int32, separator: int, min_count: int) -> Int64:
    """int64 [m, 3]: (length, low, count) of every context of 1 to 3 tokens that occurs `min_count` times or more. O(n)."""
    num_tokens = len(text) // width
    address = text.ctypes.data
    found = np.empty((TABLE_CONTEXT * (len(order) // min_count) + 1, 3), np.int64)
    num_found = 0
    begin = np.zeros(TABLE_CONTEXT, np.int64)  # where the run of suffixes that share their first k + 1 tokens began
    shared = np.full(TABLE_CONTEXT, -1, np.int64)
    for i in range(len(order) + 1):
        same = i < len(order)
        is_context = True
        if i + 32 < len(order):
            _prefetch(address + order[i + 32] * width)
        for k in range(TABLE_CONTEXT):
            token = -1
            if i < len(order) and order[i] + k < num_tokens:
                token = token_at(text, width, order[i] + k)
            same = same and token == shared[k]
            is_context = is_context and 0 <= shared[k] < separator
            if not same:
                if is_context and i - begin[k] >= min_count:
                    found[num_found, 0] = k + 1
                    found[num_found, 1] = begin[k]
                    found[num_found, 2] = i - begin[k]
                    num_found += 1
                begin[k] = i
                shared[k] = token
    return found[:num_found]


@kernel
def fill_table(table: UInt32, text: Bytes, width: int, order: Int32, contexts: Int64) -> None:
    """Enter `contexts`, rows of `frequent_contexts`, in an empty table that has more slots than there are rows."""
    key = np.empty(TABLE_CONTEXT, np.int32)
    for c in range(len(contexts)):
        length, low, count = contexts[c]
        for k in range(length):
            key[k] = token_at(text, width, order[low] + k)
        code = hash_context(key, length)
        slot = code & (len(table) - 1)
        while table[slot, 2] != 0:
            slot = (slot + 1) & (len(table) - 1)
        table[slot, 0] = np.uint32(code >> 32)
        table[slot, 1] = low
        table[slot, 2] = count


# Samples of the order, in memory: where the text is not, a search would wait for the disk at every halving. With the first
# bytes of every SAMPLE_STRIDE-th suffix it halves SAMPLE_STRIDE only.


@inlined
def compare_sample(sample: UInt64, words: UInt64, num_bytes: int) -> int:
    """-1, 0 or 1: a sample against the first `num_bytes` of a packed key; 0 if they agree as far as the sample goes."""
    for word in range(min(SAMPLE_WORDS, (num_bytes + 7) >> 3)):
        here, wanted = sample[word], words[word]
        if num_bytes - 8 * word < 8:
            beyond = np.uint64(64 - 8 * (num_bytes - 8 * word))
            here, wanted = here >> beyond, wanted >> beyond
        if here != wanted:
            return -1 if here < wanted else 1
    return 0


@inlined
def first_sample(samples: UInt64, words: UInt64, num_bytes: int, first: int, last: int, bound: int) -> int:
    """The first of the samples [first, last), which are in order, that `compare_sample` puts at `bound` or above; else last."""
    while first < last:
        middle = (first + last) // 2
        if compare_sample(samples[middle], words, num_bytes) < bound:
            first = middle + 1
        else:
            last = middle
    return first


@inlined
def narrow(samples: UInt64, words: UInt64, num_bytes: int, low: int, high: int) -> tuple[int, int]:
    """The part (low, high) of an interval of the order outside of which no suffix begins with a packed key: what is before it
    is below the key, what is behind it above. O(log n), without reading the text.
    """
    first, end = (low + SAMPLE_STRIDE - 1) // SAMPLE_STRIDE, min((high + SAMPLE_STRIDE - 1) // SAMPLE_STRIDE, len(samples))
    first = first_sample(samples, words, num_bytes, first, end, 0)
    low = max(low, (first - 1) * SAMPLE_STRIDE + 1)
    first = first_sample(samples, words, num_bytes, first, end, 1)
    return low, high if first == end else min(high, first * SAMPLE_STRIDE)


@inlined
def find_interval(
    text: Bytes, width: int, order: Int32, table: UInt32, samples: UInt64, key: Int32, words: UInt64
) -> tuple[int, int]:
    """The interval of `order` whose suffixes begin with `key` (at least one token); low = high if there are none.

    O(1) where the table knows the key, else O(log n) comparisons in the interval of its longest beginning that the table knows.
    `words` is room for the packed key.
    """
    low, high = 0, len(order)
    for length in range(min(len(key), TABLE_CONTEXT), 0, -1):
        table_low, table_high = table_find(table, key, length, len(order))
        if table_high:
            low, high = table_low, table_high
            if length == len(key):
                return low, high
            break
    pack_key(key, width, words)
    if high - low > SAMPLE_STRIDE and len(samples):
        low, high = narrow(samples, words, len(key) * width, low, high)
    low = lower_bound(text, width, order, words, len(key), low, high)
    if low == high or compare(text, width, order[low], words, len(key)) != 0:
        return low, low
    return low, upper_bound(text, width, order, words, len(key), low, high)


# What was deleted from a segment: one bit for every suffix of the order, 1 if it is left, and how many are left before each
# block of 512. How many of an interval are left is the difference of two ranks, and the k-th of them is found by searching the
# ranks: exact, O(1) and O(log n). So deleted text is neither matched, nor counted, nor sampled. A segment that lost nothing has
# no such arrays (size 0).


@inlined
def _popcount(word: Any) -> int:
    """How many bits of a uint64 are set."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inlined
def left_before(left: UInt64, before: UInt64, i: int) -> int:
    """How many of the first i suffixes are left, 0 <= i <= n; `before` is that of `plain.ranks`."""
    block = i >> 9
    total = int64(before[block])
    for word in range(block << 3, i >> 6):
        total += _popcount(left[word])
    if i & 63:
        total += _popcount(left[i >> 6] & ((np.uint64(1) << np.uint64(i & 63)) - np.uint64(1)))
    return total


@inlined
def count_left(left: UInt64, before: UInt64, low: int, high: int) -> int:
    """How many suffixes of the interval are left; all, if the segment lost nothing."""
    if len(left) == 0 or low >= high:
        return max(high - low, 0)
    return max(0, min(high - low, left_before(left, before, high) - left_before(left, before, low)))


@inlined
def nth_left(left: UInt64, before: UInt64, low: int, high: int, k: int) -> int:
    """The place of the k-th suffix (from 0) that is left in the interval; -1 if there is none."""
    if len(left) == 0:
        return low + k if low + k < high else -1
    wanted = left_before(left, before, low) + k
    first, last = low >> 9, (high - 1) >> 9  # the last block that has no more than `wanted` before it
    while first < last:
        middle = (first + last + 1) >> 1
        if int64(before[middle]) <= wanted:
            first = middle
        else:
            last = middle - 1
    remaining = wanted - int64(before[first])
    for word in range(first << 3, min((first + 1) << 3, len(left))):
        bits = left[word]
        here = _popcount(bits)
        if 0 <= remaining < here:
            for _ in range(remaining):
                bits &= bits - np.uint64(1)
            place = (word << 6) + _popcount((bits & (~bits + np.uint64(1))) - np.uint64(1))
            return place if low <= place < high else -1
        remaining -= here
    return -1


# What most often follows the most frequent contexts: the runs of their intervals, exact, where a sample of 64 would be coarse.
# They are intervals of the order, so what is left of them after deletions is counted as everywhere.


@inlined
def runs_of(contexts: UInt32, runs: UInt32, length: int, low: int, high: int) -> tuple[int, int]:
    """The rows (begin, end) of `runs` that the context of so many tokens, whose interval is [low, high), has; begin = end if it
    has none. They lie in the interval, one behind the other. O(log contexts).
    """
    first, last = 0, len(contexts)
    while first < last:
        middle = (first + last) // 2
        here = int64(contexts[middle, 0])
        if here < low or (here == low and contexts[middle, 2] < length):
            first = middle + 1
        else:
            last = middle
    if first == len(contexts) or contexts[first, 0] != low or contexts[first, 1] != high - low or contexts[first, 2] != length:
        return 0, 0
    begin, end = int64(contexts[first - 1, 3]) if first else 0, int64(contexts[first, 3])
    if not begin < end <= min(len(runs), begin + MOST_RUNS):
        return 0, 0
    for run in range(begin, end):
        if runs[run, 1] < low or int64(runs[run, 1]) + int64(runs[run, 2]) > high:
            return 0, 0
        low = int64(runs[run, 1]) + int64(runs[run, 2])
    return begin, end


# A datastore: several segments


def describe(
    text: Bytes,
    order: Int32,
    table: UInt32,
    contexts: UInt32 = _NO_CONTEXTS,
    runs: UInt32 = _NO_RUNS,
    samples: UInt64 = _NO_SAMPLES,
    left: UInt64 = _NOTHING_LEFT,
    before: UInt64 = _NOTHING_LEFT,
) -> Int64:
    """int64 [16], a segment for the kernels below: address and size of each of its arrays. The caller keeps the arrays alive.

    `left` and `before` are empty where nothing was deleted; `contexts`, `runs` and `samples` where a segment has none.
    """
    arrays = text, order, table, left, before, contexts, runs, samples
    return np.array([number for array in arrays for number in (array.ctypes.data, len(array))], np.int64)


@named
def _text(segment: Int64) -> Bytes:
    array: Bytes = _array_at(segment[0], segment[1], np.uint8)
    return array


@named
def _order(segment: Int64) -> Int32:
    array: Int32 = _array_at(segment[2], segment[3], np.int32)
    return array


@named
def _table(segment: Int64) -> UInt32:
    array: UInt32 = _array_at(segment[4], (segment[5], 3), np.uint32)
    return array


@named
def _left(segment: Int64) -> UInt64:
    array: UInt64 = _array_at(segment[6], segment[7], np.uint64)
    return array


@named
def _before_blocks(segment: Int64) -> UInt64:
    array: UInt64 = _array_at(segment[8], segment[9], np.uint64)
    return array


@named
def _contexts(segment: Int64) -> UInt32:
    array: UInt32 = _array_at(segment[10], (segment[11], 4), np.uint32)
    return array


@named
def _runs(segment: Int64) -> UInt32:
    array: UInt32 = _array_at(segment[12], (segment[13], 3), np.uint32)
    return array


@named
def _samples(segment: Int64) -> UInt64:
    array: UInt64 = _array_at(segment[14], (segment[15], SAMPLE_WORDS), np.uint64)
    return array


@inlined
def usable_length(context: Int32, vocab_size: int, max_length: int) -> int:
    """How many tokens at the end of the context can be looked up: at most `max_length`, none before one that is no token."""
    length = 0
    while length < min(len(context), max_length) and 0 <= context[len(context) - 1 - length] < vocab_size:
        length += 1
    return length


@inlined
def key_words(num_tokens: int, width: int) -> int:
    """How many words `pack_key` fills."""
    return (num_tokens * width + 7) >> 3


@bare
def count_matches(segments: Int64, width: int, key: Int32, intervals: Int64, words: UInt64) -> int:
    """How often `key` occurs in what is left of all segments.

    Its interval in segment s, and how many suffixes of that are left, are written to intervals[s], int64 [S, 3]. `words` is
    room for the packed key.
    """
    total = 0
    for s in range(len(segments)):
        segment = segments[s]
        low, high = find_interval(_text(segment), width, _order(segment), _table(segment), _samples(segment), key, words)
        intervals[s, 0] = low
        intervals[s, 1] = high
        intervals[s, 2] = count_left(_left(segment), _before_blocks(segment), low, high)
        total += intervals[s, 2]
    return total


@inlined
def rung(r: int) -> int:
    """The r-th length (from 0) that is searched for: 1, 2, 3, 4, then two in an octave: 6, 8, 12, 16, 24, 32, ..."""
    if r < 4:
        return r + 1
    octave = int64(4) << ((r - 4) // 2)
    return 2 * octave if r & 1 else octave + octave // 2


_CLIMBED = 6
"""The rungs up to eight tokens, which most searches ask for."""


@inlined
def num_rungs(limit: int) -> int:
    """How many rungs there are up to a length."""
    r = 0
    while rung(r) <= limit:
        r += 1
    return r


@bare
def longest_match(
    segments: Int64, width: int, context: Int32, limit: int, end: int, intervals: Int64, counts: Int64, words: UInt64
) -> int:
    """The largest length, at most `limit`, at which the end of the context occurs in some segment; 0 if it never does.

    What occurs at a length occurs at every shorter one. So it climbs the rungs while they occur, from the eighth token at once
    to the limit, and searches between the last that occurs and the first that does not by halving. Short rungs are what the
    table answers, and what `lookup` asks for next: the answers are kept, counts int64 [R + 1] (-1: not asked) and intervals
    int64 [R + 1, S, 3] at the number of the rung, or in the last place if the length is none. After `end` (see `lookup`) it
    stops with what it has. `words` is room for a packed key.
    """
    counts[:] = -1
    spare = len(counts) - 1
    low, high = 0, limit
    for r in range(min(spare, _CLIMBED)):  # what the table has of them is loaded meanwhile
        for s in range(len(segments)):
            prefetch_table(segments[s, 4], segments[s, 5], context[len(context) - rung(r) :])
    r = 0
    while low < high and rung(r) <= high and not _late(end):
        counts[r] = count_matches(segments, width, context[len(context) - rung(r) :], intervals[r], words)
        if counts[r] == 0:
            high = rung(r) - 1
        else:
            low = rung(r)
            if low == 8 and limit > 8:
                counts[spare] = count_matches(segments, width, context[len(context) - limit :], intervals[spare], words)
                if counts[spare] > 0:
                    return limit
                high = limit - 1
            r += 1
    climbed = asked = low
    while low < high and not _late(end):
        asked = (low + high + 1) >> 1
        counts[spare] = count_matches(segments, width, context[len(context) - asked :], intervals[spare], words)
        if counts[spare] > 0:
            low = asked
        else:
            high = asked - 1
    if climbed < low < asked:
        counts[spare] = count_matches(segments, width, context[len(context) - low :], intervals[spare], words)
    return low


@kernel
def longest(segments: Int64, width: int, context: Int32, limit: int) -> tuple[int, int]:
    """(length, count) of the longest end of the context, at most `limit` tokens, that occurs; (0, 0) if none does."""
    last = num_rungs(limit)
    intervals = np.empty((last + 1, len(segments), 3), np.int64)
    counts = np.empty(last + 1, np.int64)
    words = np.empty(key_words(limit, width), np.uint64)
    length = longest_match(segments, width, context, limit, 0, intervals, counts, words)
    for r in range(last):
        if rung(r) == length and counts[r] > 0:
            return length, counts[r]
    return length, max(counts[last], 0) if length else 0


@kernel
def first_place(segments: Int64, width: int, vocab_size: int, context: Int32, shortest: int, most: int) -> tuple[int, int]:
    """(segment, position in its text) of what follows the longest end of the context, of `shortest` to `most` tokens, at the
    first of its occurrences that are left; (-1, -1) if no end of `shortest` occurs. One search then, at most seven else."""
    limit = usable_length(context, vocab_size, most)
    intervals = np.empty((len(segments), 3), np.int64)
    words = np.empty(key_words(limit, width), np.uint64)
    if limit < shortest or count_matches(segments, width, context[len(context) - shortest :], intervals, words) == 0:
        return -1, -1
    low, high, searched = shortest, limit, shortest
    while low < high:
        searched = (low + high + 1) // 2
        if count_matches(segments, width, context[len(context) - searched :], intervals, words) > 0:
            low = searched
        else:
            high = searched - 1
    if searched != low:
        count_matches(segments, width, context[len(context) - low :], intervals, words)
    for s in range(len(segments)):
        if intervals[s, 2] > 0:
            segment = segments[s]
            index = nth_left(_left(segment), _before_blocks(segment), intervals[s, 0], intervals[s, 1], 0)
            if index >= 0:
                return s, int64(_order(segment)[index]) + low
    return -1, -1


@kernel
def lookup(
    segments: Int64,
    width: int,
    vocab_size: int,
    context: Int32,
    max_length: int,
    num_samples: int,
    num_classes: int,
    depth: int,
    end: int,
    tokens: Int32,
    parents: Int32,
    probs: Float32,
    lengths: Int32,
    counts: Int32,
) -> int:
    """What followed the end of the context, as `blend` has it, from the longest match and up to `num_classes - 1` shorter ones.

    A shorter length becomes a class of its own where it occurs at least twice as often as the class before. Of a class at most
    `num_samples` occurrences are looked at, an even stride through the interval: unbiased, and stratified by continuation
    since the interval is sorted by it. Where there are more and the segments know their runs (see `runs_of`), every run is
    looked at, and counts exactly. Occurrences that belong to a longer class stand there already; those left share the class's
    exact count, or that of their run. After `end`, in nanoseconds of the monotonic clock (0: never), no more is searched for,
    and what has been found is blended.

    The nodes are written to the last five arguments, as many as these have room for. Returns how many.
    """
    limit = usable_length(context, vocab_size, max_length)
    num_rows = num_samples * num_classes
    # Memory is asked for once: asking costs as much as three nodes do.
    size = 6 * num_rows + 6 * num_samples + 3 + 2 * MOST_RUNS + 2 * key_words(limit, width)
    size += (num_rungs(limit) + 1) * (3 * len(segments) + 1) + _blend_room(num_rows, depth, limit, len(tokens))
    room = np.empty(size, np.int64)
    nodes = tokens, parents, probs, lengths, counts
    return _lookup(segments, width, vocab_size, context, limit, num_samples, num_classes, depth, end, nodes, room)


@bare
def _lookup(
    segments: Int64,
    width: int,
    vocab_size: int,
    context: Int32,
    limit: int,
    num_samples: int,
    num_classes: int,
    depth: int,
    end: int,
    nodes: Nodes,
    room: Int64,
) -> int:
    """`lookup` of at most `limit` tokens. `room` is cut into pieces to work in."""
    num_rows = num_samples * num_classes
    rows, room = room[:num_rows].view(np.int32)[:num_rows].reshape(num_rows, 1), room[num_rows:]
    row_places, room = room[: 2 * num_rows].reshape(num_rows, 2), room[2 * num_rows :]
    row_groups, room = room[:num_rows], room[num_rows:]
    lengths, room = room[:num_rows].view(np.int32)[:num_rows], room[num_rows:]
    weights, room = room[:num_rows].view(np.float64), room[num_rows:]
    num_rows = 0

    last, num_segments = num_rungs(limit), len(segments)
    counts, room = room[: last + 1], room[last + 1 :]
    intervals = room[: 3 * num_segments * (last + 1)].reshape(last + 1, num_segments, 3)
    room = room[3 * num_segments * (last + 1) :]
    num_words = key_words(limit, width)
    words, room = room[:num_words].view(np.uint64), room[num_words:]
    longer_words, room = room[:num_words].view(np.uint64), room[num_words:]

    places, room = room[: 2 * num_samples].reshape(num_samples, 2), room[2 * num_samples :]
    shares, room = room[:num_samples].view(np.float64), room[num_samples:]
    run_places, room = room[: 2 * MOST_RUNS].reshape(MOST_RUNS, 2), room[2 * MOST_RUNS :]
    # What the sampled occurrences of a class stand for: group 0 is what no table knows, every other one next token.
    group_token, room = room[: num_samples + 1], room[num_samples + 1 :]
    group_left, room = room[: num_samples + 1].view(np.float64), room[num_samples + 1 :]
    group_fresh, room = room[: num_samples + 1].view(np.float64), room[num_samples + 1 :]

    length = longest_match(segments, width, context, limit, end, intervals, counts, words)
    slot = last
    for r in range(last):
        if rung(r) == length and counts[r] > 0:
            slot = r
    longer = 0
    longer_count = 0
    classes_left = num_classes
    while length > 0 and classes_left > 0 and not _late(end):
        if counts[slot] < 0:
            counts[slot] = count_matches(segments, width, context[len(context) - length :], intervals[slot], words)
        count = counts[slot]
        if count >= max(2 * longer_count, 1):
            first = num_rows
            num_groups = 1
            group_left[0] = count - longer_count
            group_fresh[0] = 0.0
            num_wanted = min(count, num_samples)
            num_runs = 0
            if length < TABLE_CONTEXT and count > num_samples:
                num_runs = _count_runs(segments, length, intervals[slot])
            in_runs = num_runs > 0 and 2 * (num_runs + num_segments) <= num_samples
            before = 0  # occurrences in the segments before this one
            i = 0
            for s in range(num_segments):
                num_taken = 0
                if in_runs and intervals[slot, s, 2] > 0:
                    num_taken, num_groups = _stratify(
                        segments[s],
                        length,
                        intervals[slot, s],
                        count,
                        num_samples - num_runs - num_segments,
                        places,
                        shares,
                        run_places,
                        group_token,
                        group_left,
                        group_fresh,
                        num_groups,
                    )
                while not in_runs and i < num_wanted:
                    place = sample_place(i, count, num_wanted) - before
                    if place >= intervals[slot, s, 2]:
                        break
                    places[num_taken, 0] = place
                    places[num_taken, 1] = 0
                    shares[num_taken] = 1.0
                    num_taken += 1
                    i += 1
                before += intervals[slot, s, 2]
                if num_taken:
                    num_rows = _take(
                        segments[s],
                        width,
                        vocab_size,
                        length,
                        intervals[slot, s],
                        places[:num_taken],
                        shares,
                        longer,
                        longer_words,
                        rows,
                        row_places,
                        row_groups,
                        weights,
                        group_fresh,
                        num_rows,
                    )
            lengths[first:num_rows] = length
            for group in range(1, num_groups):
                for row in range(first):
                    if rows[row, 0] == group_token[group]:
                        group_left[group] -= weights[row]
                        group_left[0] += weights[row]
            for row in range(first, num_rows):
                group = row_groups[row]
                weights[row] *= max(group_left[group], 1.0) / group_fresh[group]
            if num_rows > first:
                longer, longer_count = length, count
                pack_key(context[len(context) - length :], width, longer_words)
                classes_left -= 1
        # The next rung down, but none that occurs too rarely for sure: no more often than a shorter one that was counted.
        slot = last - 1
        while slot >= 0 and rung(slot) >= length:
            slot -= 1
        for r in range(slot):
            if 0 <= counts[r] < 2 * longer_count:
                slot = r
                break
        length = rung(slot) if slot >= 0 else 0
    return _blend(
        rows[:num_rows], lengths[:num_rows], weights[:num_rows], limit, depth, row_places, width, vocab_size, nodes, room
    )


@bare
def _count_runs(segments: Int64, length: int, intervals: Int64) -> int:
    """How many runs the segments know in the intervals, int64 [S, 3], of a context of so many tokens."""
    num_runs = 0
    for s in range(len(segments)):
        begin, end = runs_of(_contexts(segments[s]), _runs(segments[s]), length, intervals[s, 0], intervals[s, 1])
        num_runs += end - begin
    return num_runs


@bare
def _stratify(
    segment: Int64,
    length: int,
    interval: Int64,
    total: int,
    num_wanted: int,
    places: Int64,
    shares: Float64,
    run_places: Int64,
    group_token: Int64,
    group_left: Float64,
    group_fresh: Float64,
    num_groups: int,
) -> tuple[int, int]:
    """Choose places in what is left of an interval (low, high, left): one in each run that is known, one in the rest, and
    beyond these `num_wanted` in `total` occurrences, to each as many as is its share.

    Writes places int64 [m, 2], each a number among what is left and its group, and shares float64 [m], how many occurrences
    each stands for; makes groups for the next tokens that have none, and moves the counts there from group 0. Returns m and
    the number of groups. `run_places`, int64 [MOST_RUNS, 2], is memory to work in.
    """
    left, before, runs = _left(segment), _before_blocks(segment), _runs(segment)
    low, high, rest = interval[0], interval[1], interval[2]
    begin, end = runs_of(_contexts(segment), runs, length, low, high)
    num_runs = 0
    num_places = 0
    for run in range(begin, end):
        run_low = int64(runs[run, 1])
        count = count_left(left, before, run_low, run_low + int64(runs[run, 2]))
        if count == 0:
            continue
        place = count_left(left, before, low, run_low)
        run_places[num_runs, 0], run_places[num_runs, 1] = place, count
        num_runs += 1
        rest -= count
        group = 1
        while group < num_groups and group_token[group] != runs[run, 0]:
            group += 1
        if group == num_groups:
            group_token[group] = runs[run, 0]
            group_left[group] = 0.0
            group_fresh[group] = 0.0
            num_groups += 1
        group_left[group] += count
        group_left[0] -= count
        num_here = 1 + count * num_wanted // total
        for i in range(num_here):
            places[num_places, 0] = place + sample_place(i, count, num_here)
            places[num_places, 1] = group
            shares[num_places] = count / num_here
            num_places += 1
    if rest > 0:
        num_here = 1 + rest * num_wanted // total
        skipped = 0
        run = 0
        for i in range(num_here):
            place = sample_place(i, rest, num_here) + skipped
            while run < num_runs and run_places[run, 0] <= place:
                skipped += run_places[run, 1]
                place += run_places[run, 1]
                run += 1
            places[num_places, 0] = place
            places[num_places, 1] = 0
            shares[num_places] = rest / num_here
            num_places += 1
    return num_places, num_groups


@kernel
def frequent_next(segments: Int64, vocab_size: int, token: int, most: int) -> tuple[Int32, Int64]:
    """(tokens int32 [m], counts int64 [m]): at most `most` tokens that most often follow a token, most frequent first, ties to
    the smaller, as the tables of the segments that lost nothing have it. Reads nothing but the tables.
    """
    tokens = np.empty(len(segments) * MOST_RUNS, np.int32)
    counts = np.empty(len(tokens), np.int64)
    num_found = 0
    key = np.full(1, token, np.int32)
    for s in range(len(segments)):
        if len(_left(segments[s])):
            continue
        runs = _runs(segments[s])
        low, high = table_find(_table(segments[s]), key, 1, len(_order(segments[s])))
        begin, end = runs_of(_contexts(segments[s]), runs, 1, low, high)
        for run in range(begin, end):
            at = 0
            while at < num_found and tokens[at] != runs[run, 0]:
                at += 1
            if at == num_found:
                if runs[run, 0] >= vocab_size:
                    continue
                tokens[at], counts[at] = runs[run, 0], 0
                num_found += 1
            counts[at] += int64(runs[run, 2])
    num = max(0, min(most, num_found))
    for i in range(num):
        best = i
        for j in range(i + 1, num_found):
            if counts[j] > counts[best] or (counts[j] == counts[best] and tokens[j] < tokens[best]):
                best = j
        tokens[i], tokens[best] = tokens[best], tokens[i]
        counts[i], counts[best] = counts[best], counts[i]
    return tokens[:num], counts[:num]


@kernel
def next_tokens(
    text: Bytes, width: int, order: Int32, left: UInt64, before: UInt64, length: int, low: int, high: int, most: int
) -> Int64:
    """int64 [m, 2]: every token that follows the suffixes of an interval `length` tokens in, ascending, and how many of what is
    left it follows; separators and suffixes that end there are left out. Exact; at most `most` different ones.

    O(m log n) comparisons: from the first suffix of a run it gallops to the first of the next.
    """
    found = np.empty((min(most, max(high - low, 0)), 2), np.int64)
    num_tokens = len(text) // width
    num_found = 0
    while low < high and num_found < len(found):
        token = _token_or_none(text, width, num_tokens, order[low], length)
        step, first, last = 1, low, high  # the run ends between first and last
        while first + step < high and _token_or_none(text, width, num_tokens, order[first + step], length) <= token:
            first += step
            step *= 2
        last = min(high, first + step)
        while first + 1 < last:
            middle = (first + last) // 2
            if _token_or_none(text, width, num_tokens, order[middle], length) <= token:
                first = middle
            else:
                last = middle
        count = count_left(left, before, low, last)
        if count and 0 <= token < (1 << 8 * width) - 1:
            found[num_found, 0] = token
            found[num_found, 1] = count
            num_found += 1
        low = last
    return found[:num_found]


@inlined
def _token_or_none(text: Bytes, width: int, num_tokens: int, position: int, ahead: int) -> int:
    """The token so far ahead of a position, -1 outside the text."""
    at = int64(position) + ahead
    return token_at(text, width, at) if position >= 0 and at < num_tokens else -1


@inlined
def sample_place(i: int, count: int, num_samples: int) -> int:
    """The i-th of `num_samples` places in the middles of equal parts of [0, count)."""
    return int64(np.uint64((2 * i + 1) * count) // np.uint64(2 * num_samples))


@inlined
def _take(
    segment: Int64,
    width: int,
    vocab_size: int,
    length: int,
    interval: Int64,
    places: Int64,
    shares: Float64,
    longer: int,
    longer_words: UInt64,
    rows: Int32,
    row_places: Int64,
    row_groups: Int64,
    weights: Float64,
    group_fresh: Float64,
    num_rows: int,
) -> int:
    """Make rows, from `num_rows` on, of what follows the occurrences at `places`, as `_stratify` has them, of what is left of
    an interval (low, high, left). Returns how many rows there are then.

    A row's first token goes to `rows`, where it stands to `row_places`, both as `_blend` has them; none begins where a
    document ends. Its share goes to `weights`, and is added up by groups in `group_fresh`, that of ended ones too; occurrences
    of the `longer` class are passed over. Three passes, so that the processor waits for many places in memory at once and not
    for one after the other: where in the order, where in the text, what is there.
    """
    text, order, left, before = _text(segment), _order(segment), _left(segment), _before_blocks(segment)
    low, high = interval[0], interval[1]
    for i in range(len(places)):
        places[i, 0] = nth_left(left, before, low, high, places[i, 0])
        _prefetch(segment[2] + 4 * places[i, 0])
    ahead = longer - length if longer else 0  # a longer match begins so many tokens earlier
    for i in range(len(places)):
        position = int64(order[places[i, 0]]) if 0 <= places[i, 0] < high else -1
        places[i, 0] = position
        _prefetch(segment[0] + (position + length) * width)
        if longer:
            _prefetch(segment[0] + (position - ahead) * width)
    for i in range(len(places)):
        position = places[i, 0]
        if longer and compare(text, width, position - ahead, longer_words, ahead) == 0:
            continue
        group_fresh[places[i, 1]] += shares[i]
        if position >= 0:
            begin = segment[0] + (position + length) * width
            end = segment[0] + segment[1]
            token = _token_beyond(begin, end, 0, width, vocab_size)
            if token >= 0:
                rows[num_rows, 0] = token
                _prefetch(begin + 15 * width)  # the end of what is mostly followed may be in another cache line
                row_places[num_rows, 0] = begin
                row_places[num_rows, 1] = end
                row_groups[num_rows] = places[i, 1]
                weights[num_rows] = shares[i]
                num_rows += 1
    return num_rows


# A text in memory that grows: chains of the places that agree in their last 1, 2, 4 or 8 tokens


@kernel
def pool_extend(text: Int32, begin: int, end: int, heads: Int32, previous: Int32) -> None:
    """Chain the positions [begin, end) of the text, those before being chained already. O(1) a token.

    heads[o, bucket] is the latest position whose POOL_ORDERS[o] preceding tokens hash to the bucket, previous[o, position] the
    one before it, -1 for none. A position is chained only once it holds a token, so the end of the text never matches itself.
    """
    longest = POOL_ORDERS[-1]
    for position in range(begin, end):
        if text[position] < 0:
            continue
        run = 0
        while run < longest and position > run and text[position - 1 - run] >= 0:
            run += 1
        for o in range(len(POOL_ORDERS)):
            length = POOL_ORDERS[o]
            if length <= run:
                bucket = hash_context(text[position - length : position], length) & (heads.shape[1] - 1)
                previous[o, position] = heads[o, bucket]
                heads[o, bucket] = position


@inlined
def common_suffix(text: Int32, end: int, context: Int32, limit: int) -> int:
    """How many tokens before `end` are the last of the context, at most `limit`."""
    length = 0
    while length < limit and length < end and text[end - 1 - length] == context[len(context) - 1 - length]:
        length += 1
    return length


@kernel
def pool_lookup(
    text: Int32,
    num_tokens: int,
    heads: Int32,
    previous: Int32,
    context: Int32,
    max_length: int,
    probes: int,
    depth: int,
    recent: int,
    node_tokens: Int32,
    node_parents: Int32,
    node_probs: Float32,
    node_lengths: Int32,
    node_counts: Int32,
) -> int:
    """What followed the end of the context in the first `num_tokens` of a chained text, as `blend` has it, in the last five
    arguments. Returns how many nodes there are.

    For each of the orders, longest first, at most `probes` of the latest occurrences that match in so many tokens and in fewer
    than the next longer order; a chain is left after 4 `probes` steps. Below all of them stand the last `recent` places of the
    text, with a match of length 0: what was said lately is said again.

    Where the context ends as the text does, an occurrence that runs into the end goes on with its own beginning: the text
    would be periodic there, and the draft follows the period.
    """
    limit = usable_length(context, np.iinfo(np.int32).max, max_length)
    rows = np.empty((len(POOL_ORDERS) * probes + recent, depth), np.int32)
    lengths = np.empty(len(rows), np.int32)
    num_rows = 0
    at_end = common_suffix(text, num_tokens, context, limit)
    for o in range(len(POOL_ORDERS) - 1, -1, -1):
        order = POOL_ORDERS[o]
        if order > limit:
            continue
        bucket = hash_context(context[len(context) - order :], order) & (heads.shape[1] - 1)
        position = int64(heads[o, bucket])
        steps = 0
        taken = 0
        while position >= 0 and steps < 4 * probes and taken < probes:
            length = common_suffix(text, position, context, limit)
            longer = o + 1 < len(POOL_ORDERS) and length >= POOL_ORDERS[o + 1]
            if length >= order and not longer:
                _pool_row(text, num_tokens, position, at_end >= length, rows[num_rows])
                lengths[num_rows] = length
                num_rows += 1
                taken += 1
            position = int64(previous[o, position])
            steps += 1
    if limit > 0:
        for position in range(num_tokens - 1, max(num_tokens - 1 - recent, -1), -1):
            if text[position] >= 0 and common_suffix(text, position, context, 1) == 0:
                _pool_row(text, num_tokens, position, False, rows[num_rows])
                lengths[num_rows] = 0
                num_rows += 1
    nodes = node_tokens, node_parents, node_probs, node_lengths, node_counts
    return blend(rows[:num_rows], lengths[:num_rows], np.ones(num_rows, np.float64), nodes)


@kernel
def _pool_row(text: Int32, num_tokens: int, position: int, periodic: bool, row: Int32) -> None:
    """Copy the text from `position` on into the row, to the end of the document; from the end of the text on again if it is
    periodic; and pad with -1."""
    for i in range(len(row)):
        if position + i < num_tokens:
            row[i] = text[position + i]
        elif periodic:
            row[i] = row[i - (num_tokens - position)]
        else:
            row[i] = -1
        if row[i] < 0:
            row[i:] = -1
            break


# Checking a segment


@kernel
def order_faults(text: Bytes, width: int, order: Int32, stride: int, limit: int) -> int:
    """How many of every `stride`-th pair of neighbours in the order are out of bounds or, in `limit` tokens, out of order."""
    num_tokens = len(text) // width
    faults = 0
    for i in range(0, len(order) - 1, stride):
        here = int64(order[i])
        after = int64(order[i + 1])
        if not (0 <= here < num_tokens and 0 <= after < num_tokens):
            faults += 1
            continue
        for k in range(limit):
            first = token_at(text, width, here + k) if here + k < num_tokens else -1
            second = token_at(text, width, after + k) if after + k < num_tokens else -1
            if first != second or first < 0:
                faults += first > second
                break
    return faults


@kernel
def all_order_faults(text: Bytes, width: int, order: Int32, separator: int) -> int:
    """How many places of the order are wrong, all looked at; 0 means that it is the suffix order of every document's text.

    A permutation of positions is a suffix order exactly if neighbours are ordered by their first token, and where that is the
    same by the places of the suffixes one token later (Burkhardt and Karkkainen 2003). Separators have no place and sort last.
    O(n).
    """
    num_tokens = len(text) // width
    faults = 0
    place = np.full(num_tokens + 1, -1, np.int64)
    for i in range(len(order)):
        if not 0 <= order[i] < num_tokens or place[order[i]] >= 0:
            faults += 1
        else:
            place[order[i]] = i
    for position in range(num_tokens):
        if token_at(text, width, position) == separator:
            faults += place[position] >= 0
            place[position] = len(order)
        else:
            faults += place[position] < 0
    if faults:
        return faults
    for i in range(len(order) - 1):
        here, after = int64(order[i]), int64(order[i + 1])
        first, second = token_at(text, width, here), token_at(text, width, after)
        if first > second or (first == second and place[here + 1] > place[after + 1]):
            faults += 1
    return faults


def warmup() -> None:
    """Compile the kernels that drafting calls, or load them from numba's cache. Once a process, before the first request.

    Takes well under a second with a cache, some ten without. Those that write, check and search are left to who does that.
    """
    from retriever.continuations import Continuations
    from retriever.pools import TextPool

    pool = TextPool([1, 2, 3, 1, 2])
    pool.lookup(np.array([1, 2], np.int32), 2)
    segments = describe(np.array([1, 2, 1, 255], np.uint8), np.array([0, 2, 1], np.int32), np.zeros((16, 3), np.uint32))[None]
    lookup(segments, 1, 255, np.array([1], np.int32), 8, 4, 4, 4, 0, *Continuations.room(2))
    frequent_next(segments, 255, 1, 1)
    first_place(segments, 1, 255, np.array([1], np.int32), 1, 8)
