"""Kernels of the drafters: free functions over arrays, compiled by numba, without the GIL and without any state.

Each has an obvious twin in `tests/engine/oracles_recycle.py`; random inputs compare the two.

A *row* holds the likeliest successors of a context, likeliest first, -1 where there is none. Contexts are one token or two.
Rows lie in a table of 2^b places: a context's key, a hash, says in which set of `WAYS` places its row may stand, and the row
used longest ago gives way. Different contexts with one key share a row, which costs a draft at worst.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, uint64

K = 8
"""Successors in a row."""

WAYS = 4

_FRESH = 4
"""So many of a token's newest successors go before those its row had."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_jit = njit(nogil=True, cache=True, error_model="numpy")


# ---- rows


@_jit
def key_of(before: int, token: int) -> Any:
    """The key (uint64, not 0) of the context `before`, `token`; of `token` alone if `before` is negative.

    The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection, so that keys only meet in the bit that is set.
    """
    z = (uint64(max(before + 1, 0)) << uint64(32)) | uint64(token + 1)
    z = (z ^ (z >> uint64(30))) * _MIX_1
    z = (z ^ (z >> uint64(27))) * _MIX_2
    return (z ^ (z >> uint64(31))) | uint64(1)


@_jit
def find(keys: Any, key: Any) -> int:
    """The place of `key` in `keys` (uint64 [2^b], 0 where nothing is), -1 if it is not there."""
    start = _set_of(keys, key)
    for place in range(start, start + WAYS):
        if keys[place] == key:
            return place
    return -1


@_jit
def knows(keys: Any, token: int) -> bool:
    """Whether `keys` has the context of the token alone."""
    known: bool = find(keys, key_of(-1, token)) >= 0
    return known


@_jit
def _set_of(keys: Any, key: Any) -> Any:
    return np.int64((key >> uint64(8)) & uint64(len(keys) // WAYS - 1)) * WAYS


@_jit
def place_for(keys: Any, stamps: Any, key: Any) -> int:
    """Where the row of `key` stands, or else where it may be put: an empty place of its set, or the one stamped first."""
    start = _set_of(keys, key)
    best: int = start
    for place in range(start, start + WAYS):
        if keys[place] == key:
            return place
        if keys[best] != 0 and (keys[place] == 0 or stamps[place] < stamps[best]):
            best = place
    return best


@_jit
def put(keys: Any, stamps: Any, rows: Any, key: Any, successors: Any, fresh: int, stamp: int) -> int:
    """Make `successors` (int32 [k], k <= K) the row of `key`: its first `fresh`, then what the row had and they have not.

    Returns 1 if the context had no row and no other lost its own, else 0.
    """
    place = place_for(keys, stamps, key)
    is_new = keys[place] == 0
    row = rows[place]
    old = np.full(K, -1, np.int32)
    if keys[place] == key:
        old[:] = row
    keys[place] = key
    stamps[place] = stamp
    num = min(len(successors), K)
    head = min(num, fresh)
    row[:] = -1
    row[:head] = successors[:head]
    size = head
    for i in range(K + num - head):
        token = old[i] if i < K else successors[head + i - K]
        if token < 0 or size == K:
            continue
        known = False
        for j in range(size):
            known |= row[j] == token
        if not known:
            row[size] = token
            size += 1
    return 1 if is_new else 0


@_jit
def learn(
    keys: Any, stamps: Any, rows: Any, nodes: Any, parents: Any, top_ids: Any, num_lookahead: int, before: int, stamp: int
) -> int:
    """Put the rows of a feedback (`nodes`, `parents` int32 [n], `top_ids` int32 [n, k]) under their contexts of one token and
    of two; returns how many places were taken.

    `before` is the token before the first node, -1 if it is not known. A lookahead row follows a guess: it counts only where
    nothing is known.
    """
    taken = 0
    for i in range(len(nodes)):
        is_guess = i >= len(nodes) - num_lookahead
        key = key_of(-1, nodes[i])
        if not (is_guess and find(keys, key) >= 0):
            taken += put(keys, stamps, rows, key, top_ids[i], _FRESH, stamp)
        previous = nodes[parents[i]] if 0 <= parents[i] < i else before
        if previous >= 0:
            key = key_of(previous, nodes[i])
            if not (is_guess and find(keys, key) >= 0):
                taken += put(keys, stamps, rows, key, top_ids[i], K, stamp)
    return taken


@_jit
def rehash(keys: Any, stamps: Any, rows: Any, new_keys: Any, new_stamps: Any, new_rows: Any) -> int:
    """Move all rows into another table, the newest staying where they contend; returns how many it holds."""
    taken = 0
    for i in np.argsort(stamps, kind="mergesort"):
        if keys[i] != 0:
            place = place_for(new_keys, new_stamps, keys[i])
            taken += new_keys[place] == 0
            new_keys[place], new_stamps[place] = keys[i], stamps[i]
            new_rows[place] = rows[i]
    return taken


# ---- what is known of a candidate, and how often such a one is right

_RANKS = K + 2
_MISSED = 7
_COMMON = 3
NOT_HINTED = _RANKS * _RANKS * _MISSED * _COMMON
NUM_SIGNS = NOT_HINTED + 2
"""The last two are of candidates of which nothing is known but that they follow the last token most often in corpora, and next
to most often, whether they are common or not."""

_MOST = 4 * K
"""Candidates below one node at most: of two rows, of what was missed, of what is common, of what corpora say."""

_STRENGTH = 6.0
"""How many observations a prior counts for."""

_PRIOR_TWO = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.015)
_PRIOR_ONE = (0.4, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02, 0.015)
_PRIOR_MISSED = (0.0, 0.1, 0.06, 0.03, 0.05, 0.02, 0.02)
_PRIOR_COMMON = (0.0, 0.012, 0.006)
_PRIOR_HINTED = (0.15, 0.03)
_OVERRULED = 0.2
"""A successor of the token alone is so much less likely where the row of both tokens has not got it."""


@_jit
def sign_of(rank_two: int, rank_one: int, missed: int, common: int) -> int:
    """What is known of a candidate as one number below NUM_SIGNS.

    `rank_two`, `rank_one`: its place in the row of the last two tokens and of the last: 0 there is no row, 1 it is not in it,
    2 + i it is the i-th. `missed`: 0, or a class of when and how likely it was when another token was said. `common`: 0, or
    1 or 2 for the most and the next most frequent tokens of late.
    """
    return ((rank_two * _RANKS + rank_one) * _MISSED + missed) * _COMMON + common


@_jit
def prior(sign: int) -> float:
    """How often a candidate with this sign is right as long as nothing was observed."""
    if sign >= NOT_HINTED:
        return _PRIOR_HINTED[sign - NOT_HINTED]
    common = sign % _COMMON
    missed = sign // _COMMON % _MISSED
    rank_one = sign // (_COMMON * _MISSED) % _RANKS
    rank_two = sign // (_COMMON * _MISSED * _RANKS)
    found = 0.0
    if rank_two >= 2:
        found = _PRIOR_TWO[rank_two - 2]
    elif rank_one >= 2:
        found = _PRIOR_ONE[rank_one - 2] * (_OVERRULED if rank_two == 1 else 1.0)
    return found + _PRIOR_MISSED[missed] + _PRIOR_COMMON[common]


@_jit
def missed_class(age: int, rank: int) -> int:
    """The class of a token that was the `rank`-th likeliest (0: the likeliest but one said) `age` positions ago (0: at the
    last one); 0 if that is too long ago to tell."""
    if age == 0:
        return 1 if rank < 2 else 2 if rank < 4 else 3
    if age == 1:
        return 4 if rank < 2 else 5
    return 6 if age == 2 else 0


@_jit
def _marked(sign: int, source: int) -> bool:
    """Whether the part of a sign that `source` (see `candidates`) decides is decided: a token counts where it comes first."""
    if source == 0:
        return sign // (_RANKS * _MISSED * _COMMON) >= 2
    if source == 1:
        return sign // (_MISSED * _COMMON) % _RANKS >= 2
    if source == 4:
        return True
    if source == 5:
        return sign >= NOT_HINTED or sign % _COMMON != 0
    return sign // _COMMON % _MISSED != 0


@_jit
def candidates(
    keys: Any,
    rows: Any,
    before: int,
    token: int,
    depth: int,
    missed: Any,
    common: Any,
    hinted: Any,
    out_tokens: Any,
    out_signs: Any,
) -> int:
    """What may follow `before`, `token` at `depth` positions behind the root (0: right after it): their number.

    `missed` int32 [2, K]: likely tokens that were not said, at the last position and the one before; `common` int32 [K];
    `hinted` int32 [K]: what often follows the root in corpora, which counts only at depth 0 and where the token has no row.
    Tokens and signs go into out_tokens, out_signs (int32 [4 K]). Six sources are asked in turn: the row of both tokens, the
    row of the last, what was missed now, what was missed before, what corpora say, what is common.
    """
    two = find(keys, key_of(before, token)) if before >= 0 else -1
    one = find(keys, key_of(-1, token))
    num = 0
    for source in range(6):
        if (source == 0 and two < 0) or (source == 1 and one < 0) or (source == 4 and (depth > 0 or one >= 0)):
            continue
        for i in range(K):
            if source == 0:
                found = rows[two, i]
            elif source == 1:
                found = rows[one, i]
            elif source == 4:
                found = hinted[i]
            elif source == 5:
                found = common[i]
            else:
                found = missed[source - 2, i]
            if found < 0:
                continue
            mark = 0
            if source == 0:
                mark = (i + 1) * _RANKS * _MISSED * _COMMON
            elif source == 1:
                mark = (i + 1) * _MISSED * _COMMON
            elif source == 4:
                mark = NOT_HINTED + (0 if i < 2 else 1) - sign_of(1 if two >= 0 else 0, 0, 0, 0)
            elif source == 5:
                mark = 1 if i < 4 else 2
            else:
                mark = missed_class(source - 2 + depth, i) * _COMMON
                if mark == 0:
                    continue
            at = 0
            while at < num and out_tokens[at] != found:
                at += 1
            if at == num:
                if num == _MOST:
                    continue
                out_tokens[at] = found
                out_signs[at] = sign_of(1 if two >= 0 else 0, 1 if one >= 0 else 0, 0, 0)
                num += 1
            elif _marked(out_signs[at], source):
                continue
            out_signs[at] += mark
    return num


@_jit
def draft(
    keys: Any,
    rows: Any,
    hits: Any,
    trials: Any,
    before: int,
    token: int,
    missed: Any,
    common: Any,
    hinted: Any,
    budget: int,
    out_tokens: Any,
    out_parents: Any,
    out_probs: Any,
    out_signs: Any,
) -> int:
    """The `budget` likeliest nodes below the root `token`, best path first; returns how many. Arrays are of length `budget`.

    A candidate's probability is how often one with its sign was right; siblings are scaled down where they exceed 0.98. The
    open nodes stand in the order of their path probability, ties in that in which they were opened, and no more of them than
    may still be taken: most candidates are less likely than all of these and cost no more than a comparison.
    """
    open_path = np.empty(budget, np.float32)
    open_prob = np.empty(budget, np.float32)
    open_token = np.empty(budget, np.int32)
    open_parent = np.empty(budget, np.int32)
    open_sign = np.empty(budget, np.int32)
    order = np.arange(budget).astype(np.int32)  # of the open nodes, from `begin` to `end`; the places behind them are free
    begin = 0
    end = 0
    depths = np.empty(budget, np.int32)
    paths = np.empty(budget, np.float32)
    found = np.empty(_MOST, np.int32)
    signs = np.empty(_MOST, np.int32)
    probs = np.empty(_MOST, np.float64)
    count = 0
    node = -1
    while count < budget:
        # open the children of the node taken last
        last = token if node < 0 else out_tokens[node]
        if node < 0:
            previous = before
        else:
            previous = token if out_parents[node] < 0 else out_tokens[out_parents[node]]
        depth = 0 if node < 0 else depths[node]
        path = np.float32(1.0) if node < 0 else paths[node]
        num = candidates(keys, rows, previous, last, depth, missed, common, hinted, found, signs)
        total = 0.0
        for i in range(num):
            probs[i] = (hits[signs[i]] + _STRENGTH * prior(signs[i])) / (trials[signs[i]] + _STRENGTH)
            total += probs[i]
        scale = 0.98 / total if total > 0.98 else 1.0
        for i in range(num):
            prob = np.float32(probs[i] * scale)
            reached = path * prob
            if reached <= np.float32(0.0) or (end == budget and reached <= open_path[order[end - 1]]):
                continue
            slot = order[min(end, budget - 1)]
            open_prob[slot], open_path[slot] = prob, reached
            open_token[slot], open_parent[slot], open_sign[slot] = found[i], node, signs[i]
            at = min(end, budget - 1)
            while at > begin and open_path[order[at - 1]] < reached:
                order[at] = order[at - 1]
                at -= 1
            order[at] = slot
            end = min(end + 1, budget)
        if begin == end:
            break
        best = order[begin]
        begin += 1
        node = count
        parent = open_parent[best]
        out_tokens[node], out_parents[node], out_probs[node] = open_token[best], parent, open_prob[best]
        out_signs[node] = open_sign[best]
        paths[node] = open_path[best]
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        count += 1
    return count


@_jit
def score(
    keys: Any,
    rows: Any,
    hits: Any,
    trials: Any,
    before: int,
    token: int,
    missed: Any,
    common: Any,
    hinted: Any,
    emitted: Any,
    keep: float,
) -> None:
    """Count, for everything that could have been drafted along `emitted` (int32 [m]), whether it was right, under its sign; the
    counts of a sign fade by `keep` first. Nothing else changes."""
    found = np.empty(_MOST, np.int32)
    signs = np.empty(_MOST, np.int32)
    for depth in range(len(emitted)):
        num = candidates(keys, rows, before, token, depth, missed, common, hinted, found, signs)
        for i in range(num):
            hits[signs[i]] = hits[signs[i]] * keep + (1.0 if found[i] == emitted[depth] else 0.0)
            trials[signs[i]] = trials[signs[i]] * keep + 1.0
        before, token = token, emitted[depth]


@_jit
def miss(missed: Any, likely: Any, said: int) -> None:
    """Note in the first row of `missed` (int32 [2, K], see `candidates`) the likely tokens (int32 [k]) but the one said; what
    stood there moves down."""
    missed[1] = missed[0]
    missed[0] = -1
    num = 0
    for token in likely:
        if token != said and num < K:
            missed[0, num] = token
            num += 1


@_jit
def follow(nodes: Any, parents: Any, top_ids: Any, num: int, emitted: Any, missed: Any) -> None:
    """Note what was likely along the path of `emitted` (int32 [m]) through the first `num` nodes and not said. O(num m)."""
    node = 0
    for said in emitted:
        if node >= min(num, len(top_ids)):
            return
        miss(missed, top_ids[node], said)
        below = num
        for i in range(num):
            if parents[i] == node and nodes[i] == said:
                below = i
                break
        node = below


@_jit
def count_common(tokens: Any, weights: Any, emitted: Any, keep: float, out: Any) -> None:
    """Count `emitted` (int32 [m]) into `tokens` (int32 [n], -1 where none) and `weights` (float64 [n]), which fade by `keep`
    with every token; what weighs least gives way. The heaviest go into `out` (int32 [K]), ties to the first."""
    for said in emitted:
        at = 0
        for i in range(len(tokens)):
            weights[i] *= keep
        for i in range(len(tokens)):
            if tokens[i] == said:
                at = i
                break
            if weights[i] < weights[at]:
                at = i
        if tokens[at] != said:
            tokens[at] = said
            weights[at] = 0.0
        weights[at] += 1.0
    left = weights.copy()
    for i in range(len(out)):
        best = np.argmax(left)
        out[i] = tokens[best] if left[best] > 0.0 else -1
        left[best] = -math.inf


# ---- the place that a text follows

SAME = 5
"""Tokens in a row that must agree before a text counts as following a place."""

LOST = 32
"""Tokens after which a place that did not agree again is given up."""

SHIFT = 32
"""So many tokens more or fewer than the place the text may have said since it left it."""

MOST_AGREED = 16
"""Tokens that are compared at most."""


@_jit
def resume_at(text: Any, end: int, place: int, age: int, said: Any) -> Any:
    """(where in `text[:end]` a text that ended in `said` would best go on, how many tokens before it agree with `said`).

    `place` is where it would have gone on `age` tokens ago. Had each token since only replaced another, it is place + age now.
    A place at most SHIFT from there is better if more tokens before it agree: it scores two for each, less the bits of its
    shift; of equal ones the nearer is taken, then the later. (-1, 0) if there is none. O(SHIFT), some tenths of a microsecond.
    """
    best, best_agreed, best_score = -1, 0, -1
    for i in range(2 * SHIFT + 1):
        shift = (i + 1) // 2 if i % 2 else -(i // 2)
        at = place + age + shift
        if at < 1 or at >= end or text[at] < 0:
            continue
        agreed = 0
        while agreed < min(at, len(said), MOST_AGREED) and text[at - 1 - agreed] == said[len(said) - 1 - agreed]:
            agreed += 1
        bits, left = 0, abs(shift)
        while left:
            bits += 1
            left >>= 1
        score = 2 * agreed - bits
        if score > best_score and (agreed or not shift):
            best, best_agreed, best_score = at, agreed, score
    return best, best_agreed


@_jit
def keep_place(text: Any, begin: int, end: int, followed: int, heads: Any, place: int, age: int) -> Any:
    """The place (-1: none) in `text[:end]` (int32, -1 between documents) that its own end follows, and how many tokens ago the
    two last agreed in SAME tokens, given both for `text[:begin]`.

    A place that agrees again is kept; one that does not gives way to the latest that does. `heads` (int32 [2^b], -1 where
    nothing is) holds where each SAME tokens last ended, by a hash: of two that meet there, the later. Tokens before `followed`
    are only entered there. O(SHIFT) a token.
    """
    for num in range(begin + 1, end + 1):
        earlier, key = -1, uint64(0)
        whole = num >= SAME
        for i in range(max(num - SAME, 0), num):
            whole = whole and text[i] >= 0
            key = (key ^ uint64(text[i] + 1)) * _MIX_1
        if whole:
            key = (key ^ (key >> uint64(32))) & uint64(len(heads) - 1)
            earlier = heads[key]
            for i in range(SAME):
                if earlier >= 0 and text[earlier - 1 - i] != text[num - 1 - i]:
                    earlier = -1
            heads[key] = num
        if num <= followed:
            continue
        if place >= 0:
            age += 1
            at, agreed = resume_at(text, num, place, age, text[max(num - MOST_AGREED, 0) : num])
            if agreed >= SAME:
                place, age = at, 0
        if earlier >= 0 and (place < 0 or age):
            place, age = earlier, 0
        elif age > LOST:
            place, age = -1, 0
    return place, age
