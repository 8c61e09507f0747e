"""The kernels of a history: documents in blocks, and chains of the places that agree in their last tokens.

# Layout

A *place* is a number: block * BLOCK + offset. The tokens of a document fill its blocks one after the other; `before` and
`after` link the blocks of one document, -1 at its ends. What is behind the last token of a last block is -1.

For every length in POOL_ORDERS, the places whose so many preceding tokens fall into one bucket are a chain, latest
first, linked both ways, so that a document can be taken out of the middle. A place is chained once it holds a token, and only
by tokens of its own document: nothing crosses from one to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from retriever.kernels import POOL_ORDERS, Float32, Float64, Int32, blend, hash_context, int64, kernel, usable_length

BLOCK = 16
"""Tokens in a block. A document leaves half of one empty on average."""

LATEST = 2.0
"""What was said last is said again more often than what was said before it (measured)."""

_LONGEST = int(POOL_ORDERS[-1])


class Places(NamedTuple):
    """The arrays of a history with room for `n` places and `b` buckets (a power of two).

    `text` int32 [n], -1 where there is no token; `before`, `after`, `owner` int32 [n / BLOCK], `owner` being the document's
    number; `heads` int32 [orders, b]; `older`, `newer` int32 [orders, n], -1 at a chain's ends.
    """

    text: Int32
    before: Int32
    after: Int32
    owner: Int32
    heads: Int32
    older: Int32
    newer: Int32

    @staticmethod
    def empty(num_blocks: int) -> Places:
        """Room for `num_blocks` blocks."""
        num_places = num_blocks * BLOCK
        num_buckets = 1 << (num_places - 1).bit_length() - 1
        text, before, after, owner = (np.full(n, -1, np.int32) for n in (num_places, num_blocks, num_blocks, num_blocks))
        heads, older, newer = (np.full((len(POOL_ORDERS), n), -1, np.int32) for n in (num_buckets, num_places, num_places))
        return Places(text, before, after, owner, heads, older, newer)


@kernel
def extend(places: Places, place: int, tokens: Int32, blocks: Int32, unchained: int) -> None:
    """Write `tokens` from `place` on, the first free one of a document (or of its first block), and chain them.

    `blocks` are the blocks to go on in when one is full, linked already. The first `unchained` tokens are not chained: they are
    only ever matched. O(1) a token.
    """
    recent = np.empty(_LONGEST, np.int32)
    run = _preceding(places, place, recent)
    num_taken = 0
    for i in range(len(tokens)):
        if i and place % BLOCK == 0:
            place = int64(blocks[num_taken]) * BLOCK
            num_taken += 1
        places.text[place] = tokens[i]
        if i >= unchained:
            for o in range(len(POOL_ORDERS)):
                if POOL_ORDERS[o] <= run:
                    _link(places, o, _bucket(places, recent, POOL_ORDERS[o]), place)
        recent[:-1] = recent[1:]
        recent[-1] = tokens[i]
        run = min(run + 1, _LONGEST)
        place += 1


@kernel
def remove(places: Places, block: int) -> None:
    """Take the document that begins with `block` out of all chains and empty its blocks; they stay linked. O(1) a token."""
    recent = np.empty(_LONGEST, np.int32)
    run = 0
    at = block
    while at >= 0:
        for place in range(at * BLOCK, (at + 1) * BLOCK):
            token = places.text[place]
            if token < 0:
                break
            for o in range(len(POOL_ORDERS)):
                if POOL_ORDERS[o] <= run:
                    _unlink(places, o, _bucket(places, recent, POOL_ORDERS[o]), place)
            recent[:-1] = recent[1:]
            recent[-1] = token
            run = min(run + 1, _LONGEST)
        at = int64(places.after[at])
    at = block
    while at >= 0:
        places.text[at * BLOCK : (at + 1) * BLOCK] = -1
        places.owner[at] = -1
        at = int64(places.after[at])


@kernel
def read(places: Places, block: int, tokens: Int32) -> None:
    """Fill `tokens` from the document that begins with `block`."""
    _follow(places, block * BLOCK, tokens)


@kernel
def lookup(
    places: Places,
    context: Int32,
    max_length: int,
    probes: int,
    depth: int,
    node_tokens: Int32,
    node_parents: Int32,
    node_probs: Float32,
    node_lengths: Int32,
    node_counts: Int32,
) -> int:
    """What followed the end of `context` in all documents, as `blend` has it, in the last five arguments. Returns how many
    nodes there are.

    For each of the orders, longest first, at most `probes` of the latest occurrences that match in so many tokens and in fewer
    than the next longer order; a chain is left after 4 `probes` steps.
    """
    found, lengths, weights = _occurrences(places, context, max_length, probes)
    rows = np.empty((len(found), depth), np.int32)
    for i in range(len(found)):
        _follow(places, int64(found[i]), rows[i])
    return blend(rows, lengths, weights, (node_tokens, node_parents, node_probs, node_lengths, node_counts))


@kernel
def credit(places: Places, context: Int32, emitted: Int32, own: int, max_length: int, probes: int) -> tuple[int, int]:
    """(document, tokens): which but `own` went on with most of `emitted` after the end of `context`, and with how many of them.

    Looked at is what `lookup` looks at; of equals, the longer match, then the later. (-1, 0) if there is none.
    """
    found, _, _ = _occurrences(places, context, max_length, probes)
    row = np.empty(len(emitted), np.int32)
    best, most = -1, 0
    for i in range(len(found)):
        if places.owner[found[i] // BLOCK] == own:
            continue
        _follow(places, int64(found[i]), row)
        reached = 0
        while reached < len(row) and row[reached] == emitted[reached]:
            reached += 1
        if reached > most:
            best, most = int64(places.owner[found[i] // BLOCK]), reached
    return best, most


def warmup() -> None:
    """Compile every kernel, or load it from numba's cache. Once a process, before the first request."""
    from retriever.history import HistoryPool

    pool = HistoryPool(1 << 20)
    document = pool.begin([1, 2])
    pool.append(document, [3, 1, 2])
    pool.close(document)
    context = np.array([1, 2], np.int32)
    pool.lookup(context, 2)
    pool.credit(context, context)
    pool.arrays()
    pool.expire(1.0)


@kernel
def _occurrences(places: Places, context: Int32, max_length: int, probes: int) -> tuple[Int32, Int32, Float64]:
    """(places, lengths of match, weights): where what followed the context stands, longest order first, latest first in each.

    Of each order the latest weighs LATEST times as much as every other, within a sum of how many they are.
    """
    limit = usable_length(context, np.iinfo(np.int32).max, max_length)
    found = np.empty(len(POOL_ORDERS) * probes, np.int32)
    lengths = np.empty(len(found), np.int32)
    weights = np.empty(len(found), np.float64)
    num_found = 0
    for o in range(len(POOL_ORDERS) - 1, -1, -1):
        order = POOL_ORDERS[o]
        if order > limit:
            continue
        place = int64(places.heads[o, _bucket(places, context, order)])
        steps = 0
        taken = 0
        while place >= 0 and steps < 4 * probes and taken < probes:
            length = _agreement(places, place, context, limit)
            if length >= order and not (o + 1 < len(POOL_ORDERS) and length >= POOL_ORDERS[o + 1]):
                found[num_found] = place
                lengths[num_found] = length
                num_found += 1
                taken += 1
            place = int64(places.older[o, place])
            steps += 1
        if taken:
            weights[num_found - taken : num_found] = taken / (taken - 1 + LATEST)
            weights[num_found - taken] *= LATEST
    return found[:num_found], lengths[:num_found], weights[:num_found]


@kernel
def _bucket(places: Places, tokens: Int32, length: int) -> int:
    return int64(hash_context(tokens[len(tokens) - length :], length) & (places.heads.shape[1] - 1))


@kernel
def _back(places: Places, place: int) -> int:
    """The place before; -1 at a document's beginning."""
    if place % BLOCK:
        return place - 1
    block = int64(places.before[place // BLOCK])
    return block * BLOCK + BLOCK - 1 if block >= 0 else -1


@kernel
def _agreement(places: Places, place: int, context: Int32, limit: int) -> int:
    """How many tokens before `place` are the last of the context, at most `limit`."""
    length = 0
    place = _back(places, place)
    while place >= 0 and length < limit and places.text[place] == context[len(context) - 1 - length]:
        length += 1
        place = _back(places, place)
    return length


@kernel
def _preceding(places: Places, place: int, recent: Int32) -> int:
    """Fill the end of `recent` with the tokens before `place`; how many there are."""
    num_found = 0
    place = _back(places, place)
    while place >= 0 and num_found < len(recent):
        num_found += 1
        recent[len(recent) - num_found] = places.text[place]
        place = _back(places, place)
    return num_found


@kernel
def _follow(places: Places, place: int, row: Int32) -> None:
    """Copy the text from `place` on into the row, to the end of the document, and pad with -1."""
    i = 0
    while i < len(row):
        token = places.text[place]
        if token < 0:
            break
        row[i] = token
        i += 1
        place += 1
        if place % BLOCK == 0:
            block = int64(places.after[place // BLOCK - 1])
            if block < 0:
                break
            place = block * BLOCK
    row[i:] = -1


@kernel
def _link(places: Places, order: int, bucket: int, place: int) -> None:
    head = int64(places.heads[order, bucket])
    places.older[order, place] = head
    places.newer[order, place] = -1
    if head >= 0:
        places.newer[order, head] = place
    places.heads[order, bucket] = place


@kernel
def _unlink(places: Places, order: int, bucket: int, place: int) -> None:
    """Take a place out of its chain; one that is in none (never chained) is left alone."""
    older, newer = int64(places.older[order, place]), int64(places.newer[order, place])
    if newer < 0 and places.heads[order, bucket] != place:
        return
    if newer >= 0:
        places.older[order, newer] = older
    else:
        places.heads[order, bucket] = older
    if older >= 0:
        places.newer[order, older] = newer
    places.older[order, place] = -1
    places.newer[order, place] = -1
