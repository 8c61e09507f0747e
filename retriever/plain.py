"""What writing a version computes, in plain numpy, so that a small update is done before numba would even be imported.

The kernels of the same names are twins with the same results: they take a large segment in a fraction of the time and memory.
What was deleted is marked here alone, as a pass of numpy over a large order takes less time than loading a kernel.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TABLE_CONTEXT = 3
"""The table knows contexts of 1 up to this many tokens."""

MOST_RUNS = 16
"""Continuations kept of a context, at most; none of less than one in LEAST_SHARE of its occurrences."""
LEAST_SHARE = 64

SAMPLE_STRIDE = 256
SAMPLE_WORDS = 2
"""Of every 256th suffix the first 16 bytes are kept in memory."""

BLOCK = 1 << 12
"""Positions of which is asked at once whether all of them are left."""

_STRIDE = 1 << 17


def rank_tokens(tokens: NDArray[np.integer]) -> tuple[NDArray[np.integer], int]:
    """Every token's rank among the distinct tokens, integers [n], and how many those are. O(n log n)."""
    kinds, ranks = np.unique(tokens, return_inverse=True)
    return ranks, len(kinds)


def token_suffixes(byte_order: NDArray[np.int32], width: int, num_tokens: int) -> NDArray[np.int32]:
    """int32 [num_tokens]: the sorted byte positions at which a token of `width` bytes begins, counted in tokens. O(n)."""
    begins: NDArray[np.int32] = byte_order[byte_order % width == 0] // width
    return begins


def frequent_contexts(
    tokens: NDArray[np.integer], order: NDArray[np.int32], separator: int, min_count: int
) -> NDArray[np.int64]:
    """int64 [m, 3]: (length, low, count) of every context of 1 to 3 tokens that occurs `min_count` times or more, by the end of
    its interval, then by length. `tokens` is the text with its separators, `order` has a place for all else. O(m log m + n).
    """
    text = np.concatenate([tokens.astype(np.int64), np.full(TABLE_CONTEXT, separator)])
    found = [np.zeros((0, 3), np.int64)]
    differs = np.zeros(len(order), np.bool_)
    differs[:1] = True
    is_context = np.ones(len(order), np.bool_)
    for k in range(TABLE_CONTEXT):
        next_token = text[order.astype(np.int64) + k]
        differs[1:] |= next_token[1:] != next_token[:-1]
        is_context &= next_token < separator
        low = np.flatnonzero(differs)
        count = np.diff(low, append=len(order))
        frequent = (count >= min_count) & is_context[low]
        found.append(np.stack([np.full(frequent.sum(), k + 1), low[frequent], count[frequent]], axis=1))
    contexts = np.concatenate(found)
    return contexts[np.lexsort((contexts[:, 0], contexts[:, 1] + contexts[:, 2]))]


def hash_contexts(keys: NDArray[np.integer]) -> NDArray[np.uint64]:
    """uint64 [n]: the hash that the kernel `hash_context` gives each row of token ids [n, length]."""
    state = np.full(len(keys), 0x9E3779B97F4A7C15 * keys.shape[1] % 2**64, np.uint64)
    for column in keys.astype(np.uint64).T:
        state = (state ^ column) * np.uint64(0xFF51AFD7ED558CCD)
        state ^= state >> np.uint64(32)
        state *= np.uint64(0xC4CEB9FE1A85EC53)
        state ^= state >> np.uint64(29)
    return state


def fill_table(
    table: NDArray[np.uint32], tokens: NDArray[np.integer], order: NDArray[np.int32], contexts: NDArray[np.int64]
) -> None:
    """Enter `contexts`, rows of `frequent_contexts`, in an empty table that has more slots than there are rows. A loop."""
    codes = np.zeros(len(contexts), np.uint64)
    for length in range(1, TABLE_CONTEXT + 1):
        rows = np.flatnonzero(contexts[:, 0] == length)
        begins = order[contexts[rows, 1]].astype(np.int64)
        codes[rows] = hash_contexts(tokens[begins[:, None] + np.arange(length)])
    taken = set[int]()
    last = len(table) - 1
    for code, (_, low, count) in zip(codes.tolist(), contexts.tolist(), strict=True):
        slot = code & last
        while slot in taken:
            slot = (slot + 1) & last
        taken.add(slot)
        table[slot] = code >> 32, low, count


def frequent_continuations(
    frequent: NDArray[np.int64], min_count: int, most_words: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What most often follows the contexts of 1 and 2 tokens that occur `min_count` times or more, out of `frequent`, rows of
    `frequent_contexts`: a context's continuations are the contexts of one token more in its interval. O(m log m).

    Returns contexts int64 [c, 4] (low, count, length, end), by low, then by length, and runs int64 [r, 3] (length, low, count),
    those of a context ascending by low: the rows from the `end` of the context before to its own. MOST_RUNS of a context at
    most, and the most frequent contexts first, as long as 4 c + 3 r is at most `most_words`.
    """
    parents, children, owners = (list[NDArray[np.int64]]() for _ in range(3))
    for length in range(1, TABLE_CONTEXT):
        contexts = frequent[(frequent[:, 0] == length) & (frequent[:, 2] >= min_count)]
        longer = frequent[frequent[:, 0] == length + 1]
        owner = np.searchsorted(contexts[:, 1], longer[:, 1], "right") - 1
        inside = owner >= 0
        if len(contexts):
            inside &= longer[:, 1] < contexts[owner, 1] + contexts[owner, 2]
            inside &= longer[:, 2] * LEAST_SHARE >= contexts[owner, 2]
        owners.append(owner[inside] + sum(len(earlier) for earlier in parents))
        parents.append(contexts)
        children.append(longer[inside])
    parent, child, owner = (np.concatenate(arrays) for arrays in (parents, children, owners))

    by_count = np.lexsort((child[:, 1], -child[:, 2], owner))
    child, owner = child[by_count], owner[by_count]
    kept = np.arange(len(child)) - np.searchsorted(owner, owner) < MOST_RUNS
    child, owner = child[kept], owner[kept]
    num_runs = np.bincount(owner, minlength=len(parent))
    best = np.argsort(-parent[:, 2], kind="stable")
    best = best[num_runs[best] > 0]
    best = best[np.cumsum(4 + 3 * num_runs[best]) <= most_words]
    best = best[np.lexsort((parent[best, 0], parent[best, 1]))]

    place = np.full(len(parent), -1)
    place[best] = np.arange(len(best))
    child, owner = child[place[owner] >= 0], place[owner[place[owner] >= 0]]
    ends = np.cumsum(num_runs[best])
    return np.column_stack((parent[best][:, [1, 2, 0]], ends)), child[np.lexsort((child[:, 1], owner))]


def sample_order(text: NDArray[np.uint8], width: int, order: NDArray[np.int32]) -> NDArray[np.uint64]:
    """uint64 [ceil(n / SAMPLE_STRIDE), SAMPLE_WORDS]: the first bytes of every so many-th suffix, the first byte highest, zeros
    beyond the text.
    """
    begins = order[::SAMPLE_STRIDE].astype(np.int64) * width
    at = begins[:, None] + np.arange(8 * SAMPLE_WORDS)
    samples = np.where(at < len(text), text[np.minimum(at, len(text) - 1)], np.uint8(0))
    return samples.view(">u8").astype(np.uint64)


def left_suffixes(order: NDArray[np.int32], offsets: NDArray[np.int64], deleted: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """uint64 [ceil(n / 64)]: bit i is set if the document of suffix i is not deleted. O(n), and a byte a token of memory.

    Document d is the text from offsets[d] (int64 [D + 1]) on, gone if deleted[d] (bool [D]). Bits beyond the order are 0, and
    so are those of positions that are in no document.
    """
    num_tokens = min(max(int(offsets[-1]), 0), len(order) + len(deleted))  # whatever a damaged file says
    kept = np.zeros(-(-(num_tokens + 1) // BLOCK) * BLOCK, np.bool_)
    for document in np.flatnonzero(~deleted):
        begin, end = offsets[document : document + 2].tolist()
        kept[max(begin, 0) : max(min(end, num_tokens), 0)] = True
    whole = kept.reshape(-1, BLOCK).all(axis=1)  # most blocks are, and that they are stays in the cache
    words = np.zeros(-(-len(order) // 64) * 8, np.uint8)
    blocks, is_left = np.empty(_STRIDE, np.intp), np.empty(_STRIDE, np.bool_)  # asked for anew, they would take half the time
    for begin in range(0, len(order), _STRIDE):
        positions = order[begin : begin + _STRIDE].view(np.uint32)  # a negative one becomes large, and finds the last, False
        np.floor_divide(positions, BLOCK, out=blocks[: len(positions)])
        left = whole.take(blocks[: len(positions)], mode="clip", out=is_left[: len(positions)])
        doubtful = np.flatnonzero(~left)
        left[doubtful] = kept.take(positions[doubtful], mode="clip")
        bits = np.packbits(left, bitorder="little")
        words[begin // 8 : begin // 8 + len(bits)] = bits
    return words.view(np.uint64)


def ranks(left: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """uint64 [ceil(words / 8) + 1]: how many bits are set before each block of 8 words, and in all. O(n)."""
    counts = np.bitwise_count(np.pad(left, (0, -len(left) % 8))).reshape(-1, 8).sum(axis=1, dtype=np.uint64)
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts, dtype=np.uint64)])
