"""Kernels of the pure core: free functions over arrays, compiled by numba, without the GIL and without any state.

Each has an obvious twin in `tests/engine/oracles.py`; random inputs compare the two. `warmup()` compiles them all, so that the
first request does not.

None of them uses fast-math: sums have the order written here, and elementwise results are the same in vector bodies and tails.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-52

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52

_SUM_ROOM = 1e-3
"""How far rounding may carry the sum of siblings' probabilities above 1."""

_jit = njit(nogil=True, cache=True, error_model="numpy")


# ---- drafts and trees


@_jit
def draft_fault(tokens: Any, parents: Any, probs: Any, vocab_size: int) -> int:
    """0 if the arrays are a valid draft, else the fault found first (`tree._DRAFT_FAULTS`). O(n^2), n is small."""
    for i in range(len(tokens)):
        if tokens[i] < 0 or tokens[i] >= vocab_size:
            return 1
        if parents[i] < -1 or parents[i] >= i:
            return 2
        if not (probs[i] >= 0.0 and probs[i] <= 1.0):
            return 3
        total = np.float64(probs[i])
        for j in range(i):
            if parents[j] == parents[i]:
                if tokens[j] == tokens[i]:
                    return 4
                total += probs[j]
        if total > 1.0 + _SUM_ROOM:
            return 5
    return 0


@_jit
def tree_fault(tokens: Any, parents: Any, probs: Any, roles: Any, vocab_size: int) -> int:
    """0 if the arrays are a valid candidate tree, else the fault found first (`tree._TREE_FAULTS`). O(n^2)."""
    if parents[0] != -1 or roles[0] != 0 or probs[0] != 1.0:
        return 6
    if tokens[0] < 0 or tokens[0] >= vocab_size:
        return 1
    for i in range(1, len(tokens)):
        if tokens[i] < 0 or tokens[i] >= vocab_size:
            return 1
        if parents[i] < 0 or parents[i] >= i:
            return 2
        if not (probs[i] >= 0.0 and probs[i] <= probs[parents[i]] and probs[i] <= 1.0):
            return 3
        if roles[i] > 1 or roles[i] < roles[i - 1]:
            return 5
        if roles[i] == 0:
            if i > 1 and probs[i] > probs[i - 1]:
                return 7
            for j in range(1, i):
                if parents[j] == parents[i] and tokens[j] == tokens[i]:
                    return 4
    return 0


@_jit
def outcomes(tokens: Any, parents: Any, ends: Any, emitted: Any, out: Any, reached: Any) -> None:
    """What became of drafts laid end to end, verified or not, once `emitted` (int32 [m]) is known.

    out[i] (int8 [n]) becomes 1 if the path to node i is a prefix of what was emitted, 0 if its parent's is but its own is not,
    and -1 where the parent's path was not taken or nothing was emitted at that depth. reached[s] (int64) becomes how many
    tokens of `emitted` stand in draft s from its root on: the source's credit. O(n).
    """
    depth = np.empty(len(tokens), np.int32)
    start = 0
    for s in range(len(ends)):
        reached[s] = 0
        for i in range(start, ends[s]):
            parent = start + parents[i] if parents[i] >= 0 else -1
            depth[i] = 1 if parent < 0 else depth[parent] + 1
            if (parent >= 0 and out[parent] != 1) or depth[i] > len(emitted):
                out[i] = -1
            elif tokens[i] == emitted[depth[i] - 1]:
                out[i] = 1
                reached[s] = max(reached[s], depth[i])
            else:
                out[i] = 0
        start = ends[s]


# ---- calibration


NUM_KNOTS = 15
"""Log-odds -7 to 7, one a unit: between them, calibration interpolates."""

NUM_CONTEXTS = 1 + 9 + 9 * 8 + 9 * 8 * 4
"""All nodes of a source; by match length; by count, too; by depth, too."""

_NUM_LEVELS = 4
_MOST_ODDS = 0.5 * (NUM_KNOTS - 1)


@_jit
def log_odds(prob: float) -> float:
    """log(p / (1 - p)), kept within [-7, 7]."""
    if prob <= 0.0:
        return -_MOST_ODDS
    if prob >= 1.0:
        return _MOST_ODDS
    return min(max(math.log(prob / (1.0 - prob)), -_MOST_ODDS), _MOST_ODDS)


@_jit
def chance(odds: float) -> float:
    """1 / (1 + e^-x), the probability of log-odds."""
    return 1.0 / (1.0 + math.exp(-odds))


_CHANCES = 1.0 / (1.0 + np.exp(_MOST_ODDS - np.arange(NUM_KNOTS)))
"""The probability at each knot."""


@_jit
def context_of(length: int, count: int, depth: int, level: int) -> int:
    """The row of calibration's tables for a node at one of four levels: all, by length, by count too, by depth too.

    Lengths 0, 1, 2, 3, 4, 5-7, 8-11, 12-15, 16 and more; counts 0, 1, 2, 3-4, 5-8, 9-16, 17-64, more; depths 1, 2, 3-4, more.
    """
    if level == 0:
        return 0
    if length <= 4:
        by_length = max(length, 0)
    elif length < 8:
        by_length = 5
    elif length < 12:
        by_length = 6
    else:
        by_length = 7 if length < 16 else 8
    if level == 1:
        return 1 + by_length
    if count <= 2:
        by_count = max(count, 0)
    elif count <= 4:
        by_count = 3
    elif count <= 8:
        by_count = 4
    elif count <= 16:
        by_count = 5
    else:
        by_count = 6 if count <= 64 else 7
    by_both = by_length * 8 + by_count
    if level == 2:
        return 10 + by_both
    by_depth = depth - 1 if depth <= 2 else 2
    if depth > 4:
        by_depth = 3
    return 82 + by_both * 4 + by_depth


@_jit
def calibrate(
    parents: Any, probs: Any, lengths: Any, counts: Any, ends: Any, rows: Any, hits: Any, trials: Any, strength: float
) -> Any:
    """float64 [n]: the log-odds of every node of drafts laid end to end, as observed; and int32 [n], the depths.

    `rows[s]` is the place of draft s's source in hits and trials (float64 [sources, NUM_CONTEXTS, NUM_KNOTS]). At each of the
    two knots around the raw estimate, from the coarsest context to the finest, the rate is the mean of a Beta posterior whose
    prior is the rate one level up, worth `strength` observations; above all stands the knot itself. O(n).
    """
    odds = np.empty(len(probs))
    depths = np.empty(len(probs), np.int32)
    start = 0
    for s in range(len(ends)):
        row = rows[s]
        for i in range(start, ends[s]):
            depths[i] = 1 if parents[i] < 0 else depths[start + parents[i]] + 1
            place = log_odds(probs[i]) + _MOST_ODDS
            knot = min(int(place), NUM_KNOTS - 2)
            share = place - knot
            low, high = _CHANCES[knot], _CHANCES[knot + 1]
            for level in range(_NUM_LEVELS):
                context = context_of(lengths[i], counts[i], depths[i], level)
                low = (hits[row, context, knot] + strength * low) / (trials[row, context, knot] + strength)
                high = (hits[row, context, knot + 1] + strength * high) / (trials[row, context, knot + 1] + strength)
            odds[i] = (1.0 - share) * log_odds(low) + share * log_odds(high)
        start = ends[s]
    return odds, depths


@_jit
def observe(
    probs: Any, lengths: Any, counts: Any, depths: Any, ends: Any, rows: Any, outcome: Any, hits: Any, trials: Any, keep: float
) -> None:
    """Count the outcomes (1 hit, 0 miss, -1 unknown) at the two knots around each estimate, on every level.

    A node is shared between its knots by distance; what was counted before fades by `keep` for every observation. O(n).
    """
    start = 0
    for s in range(len(ends)):
        row = rows[s]
        for i in range(start, ends[s]):
            if outcome[i] < 0:
                continue
            place = log_odds(probs[i]) + _MOST_ODDS
            knot = min(int(place), NUM_KNOTS - 2)
            for side in range(2):
                share = place - knot if side else 1.0 - (place - knot)
                fade = 1.0 - (1.0 - keep) * share
                for level in range(_NUM_LEVELS):
                    context = context_of(lengths[i], counts[i], depths[i], level)
                    hits[row, context, knot + side] = hits[row, context, knot + side] * fade + share * outcome[i]
                    trials[row, context, knot + side] = trials[row, context, knot + side] * fade + share
        start = ends[s]


# ---- mixing

NUM_SETS = 3
"""Sets of mixing weights: for tokens that one source, two, or more propose."""


@_jit
def _link(parents: Any, ends: Any) -> Any:
    """(first child of every draft node, next sibling), -1 for none; entry n + s of the first is draft s's root."""
    total = len(parents)
    first = np.full(total + len(ends), -1, np.int64)
    sibling = np.full(total, -1, np.int64)
    start = 0
    for s in range(len(ends)):
        for i in range(ends[s] - 1, start - 1, -1):
            parent = total + s if parents[i] < 0 else start + parents[i]
            sibling[i] = first[parent]
            first[parent] = i
        start = ends[s]
    return first, sibling


@_jit
def _open(
    at: Any, tokens: Any, odds: Any, first: Any, sibling: Any, slot_tokens: Any, places: Any, begin: int, left: Any
) -> int:
    """Unite the children of one node, which is at[s] in draft s (-1: not there), in slots from `begin` on; the end of them.

    places[slot, s] becomes the child's place in draft s, -1 if s does not propose it. left[s] becomes the logarithm of what s
    leaves for other tokens, 1 if it proposes none.
    """
    end = begin
    for s in range(len(at)):
        left[s] = 1.0
        if at[s] < 0 or first[at[s]] < 0:
            continue
        mass = 0.0
        child = first[at[s]]
        while child >= 0:
            slot = begin
            while slot < end and slot_tokens[slot] != tokens[child]:
                slot += 1
            if slot == end:
                slot_tokens[slot] = tokens[child]
                places[slot] = -1
                end += 1
            places[slot, s] = child
            mass += chance(odds[child])
            child = sibling[child]
        left[s] = math.log(max(1.0 - mass, _LEAST_LEFT))
    return end


_LEAST_LEFT = 2.0**-8


@_jit
def _mixed(places: Any, odds: Any, left: Any, rows: Any, slopes: Any, doubts: Any, bias: Any) -> Any:
    """(log-odds, set of weights) of one token, which is at places[s] in draft s: see `tree.Mixture`."""
    num = 0
    for s in range(len(places)):
        num += places[s] >= 0
    which = min(num, NUM_SETS) - 1
    total = bias[which]
    for s in range(len(places)):
        if places[s] >= 0:
            total += slopes[rows[s], which] * odds[places[s]]
        elif left[s] <= 0.0:
            total += doubts[rows[s], which] * left[s]
    return min(max(total, -20.0), 20.0), which


@_jit
def merge(
    tokens: Any,
    parents: Any,
    odds: Any,
    ends: Any,
    rows: Any,
    slopes: Any,
    doubts: Any,
    bias: Any,
    root: int,
    budget: int,
) -> Any:
    """Merge drafts, laid end to end (draft s is [ends[s-1], ends[s])), into one tree, best path first.

    Returns (tokens int32, parents int32, path probabilities float32, source bits int64), node 0 the root.

    Taking a node opens its children: those of all drafts that hold it, united by token, with the mixed probability, scaled
    where siblings would promise more than 1. The open nodes are scanned for the likeliest, which for some hundred nodes is as
    quick as a heap.
    """
    total = len(tokens)
    num_drafts = len(ends)
    first, sibling = _link(parents, ends)
    size = min(budget, total) + 1
    out_tokens = np.empty(size, np.int32)
    out_parents = np.empty(size, np.int32)
    out_probs = np.empty(size, np.float64)
    out_sources = np.zeros(size, np.int64)
    out_tokens[0], out_parents[0], out_probs[0] = root, -1, 1.0

    slot_tokens = np.empty(total, np.int64)
    places = np.empty((total, num_drafts), np.int64)
    slot_parents = np.empty(total, np.int64)
    slot_probs = np.empty(total, np.float64)
    left = np.empty(num_drafts)
    at = np.arange(total, total + num_drafts)
    num_slots = 0
    count = 1
    while True:
        begin = num_slots
        num_slots = _open(at, tokens, odds, first, sibling, slot_tokens, places, begin, left)
        mass = 0.0
        for slot in range(begin, num_slots):
            mixed, _ = _mixed(places[slot], odds, left, rows, slopes, doubts, bias)
            slot_probs[slot] = chance(mixed)
            slot_parents[slot] = count - 1
            mass += slot_probs[slot]
        scale = out_probs[count - 1] / max(mass, 1.0)
        for slot in range(begin, num_slots):
            slot_probs[slot] *= scale

        if count == size:
            break
        best = -1
        for slot in range(num_slots):
            if slot_probs[slot] >= 0.0:
                ahead = 1.0 if best < 0 else slot_probs[slot] - slot_probs[best]
                if ahead > 0.0 or (ahead == 0.0 and slot_tokens[slot] < slot_tokens[best]):
                    best = slot
        if best < 0:
            break
        out_tokens[count], out_parents[count], out_probs[count] = slot_tokens[best], slot_parents[best], slot_probs[best]
        for s in range(num_drafts):
            at[s] = places[best, s]
            if at[s] >= 0:
                out_sources[count] |= np.int64(1) << s
        slot_probs[best] = -1.0
        count += 1
    return out_tokens[:count], out_parents[:count], out_probs[:count].astype(np.float32), out_sources[:count]


@_jit
def learn(
    tokens: Any,
    parents: Any,
    odds: Any,
    ends: Any,
    rows: Any,
    slopes: Any,
    doubts: Any,
    bias: Any,
    emitted: Any,
    rate: float,
) -> None:
    """Adjust the mixing weights to what was emitted: one step of gradient descent on log-loss for every token proposed along
    it.

    Every proposal at a node whose path was emitted is judged, verified or not. O(n x drafts).
    """
    total = len(tokens)
    num_drafts = len(ends)
    first, sibling = _link(parents, ends)
    slot_tokens = np.empty(total, np.int64)
    places = np.empty((total, num_drafts), np.int64)
    left = np.empty(num_drafts)
    at = np.arange(total, total + num_drafts)
    for said in emitted:
        num_slots = _open(at, tokens, odds, first, sibling, slot_tokens, places, 0, left)
        at[:] = -1
        for slot in range(num_slots):
            mixed, which = _mixed(places[slot], odds, left, rows, slopes, doubts, bias)
            hit = slot_tokens[slot] == said
            step = rate * (hit - chance(mixed))
            bias[which] += step
            for s in range(num_drafts):
                if places[slot, s] >= 0:
                    slopes[rows[s], which] += step * odds[places[slot, s]]
                    if hit:
                        at[s] = places[slot, s]
                elif left[s] <= 0.0:
                    doubts[rows[s], which] += step * left[s]
        if num_slots == 0 or at.max() < 0:
            break


# ---- how large a tree pays


@_jit
def best_size(path_probs: Any, seconds: Any, num_trees: int) -> int:
    """The m that makes (num_trees + sum of the first m probabilities) / seconds[m] largest, the smallest such; seconds is
    float64 [n + 1]. O(n)."""
    gain = np.float64(num_trees)
    best = 0
    most = gain / seconds[0]
    for i in range(len(path_probs)):
        gain += np.float64(path_probs[i])
        if gain / seconds[i + 1] > most:
            best = i + 1
            most = gain / seconds[i + 1]
    return best


@_jit
def rows_fault(tokens: Any, parents: Any, vocab_size: int) -> int:
    """0 if the arrays are valid lookahead rows, 1 for a token outside the vocabulary, 2 for a parent not before its row."""
    for i in range(len(tokens)):
        if tokens[i] < 0 or tokens[i] >= vocab_size:
            return 1
        if parents[i] < -1 or parents[i] >= i:
            return 2
    return 0


# ---- what came of it


@_jit
def tally(
    sources: Any, roles: Any, probs: Any, verified: Any, path: Any, proposed: Any, accepted: Any, unique: Any
) -> tuple[int, float]:
    """Count a tree's nodes for each source: verified ones in proposed, those of `path` in accepted, and in unique where no
    other source has them (int64 [sources]).

    `verified` and `path` are int32, the root in the first only. Returns how many candidates were verified and the sum of
    their path probabilities. O(nodes x sources).
    """
    num_verified = 0
    expected = 0.0
    for node in verified:
        if node < 0 or node >= len(sources):
            continue
        if node > 0 and roles[node] == 0:
            num_verified += 1
            expected += np.float64(probs[node])
        for s in range(len(proposed)):
            proposed[s] += sources[node] >> s & 1
    for node in path:
        for s in range(len(accepted)):
            accepted[s] += sources[node] >> s & 1
            unique[s] += sources[node] == np.int64(1) << s
    return num_verified, expected


@_jit
def credit(weights: Any, reached: Any, heard: Any, rate: float, share: float) -> None:
    """Move `weights` (float64 [sources]) to those heard whose drafts reached far: see `calibration.Credit`. O(sources)."""
    most, num_heard = 0, 0
    for s in range(len(weights)):
        if heard[s]:
            num_heard += 1
            most = max(most, reached[s])
    if most < 1:
        return
    before, after = 0.0, 0.0
    for s in range(len(weights)):
        if heard[s]:
            before += weights[s]
            weights[s] *= math.exp(rate / most * reached[s])
            after += weights[s]
    for s in range(len(weights)):
        if heard[s]:
            weights[s] = (1.0 - share) * weights[s] * (before / after) + share * before / num_heard


# ---- how well it was promised


@_jit
def judge(tokens: Any, parents: Any, probs: Any, emitted: Any, table: Any) -> float:
    """Count, for a tree's candidates whose parent was emitted, what was promised given the parent and what came of it.

    table (float64 [3, NUM_KNOTS]) gains, in the column of the nearest knot, the promised probability, the outcome (0 or 1) and
    1. Returns the log-loss of all of them in nats, each probability taken as at least one in ten thousand from 0 and 1. O(n).
    """
    loss = 0.0
    node = 0
    for said in emitted:
        after = -1
        for i in range(node + 1, len(tokens)):
            if parents[i] == node:
                prob = min(np.float64(probs[i]) / max(np.float64(probs[node]), 1e-30), 1.0)
                hit = tokens[i] == said
                column = int(log_odds(prob) + _MOST_ODDS + 0.5)
                table[0, column] += prob
                table[1, column] += hit
                table[2, column] += 1.0
                loss -= math.log(max(prob if hit else 1.0 - prob, 1e-4))
                if hit:
                    after = i
        if after < 0:
            break
        node = after
    return loss


# ---- noise


@_jit
def _mix(z: Any) -> Any:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scrambles every bit."""
    z = (z ^ (z >> uint64(30))) * _MIX_1
    z = (z ^ (z >> uint64(27))) * _MIX_2
    return z ^ (z >> uint64(31))


@_jit
def noise_key(seed: Any, position: int) -> Any:
    """The key (uint64) of one position of one request's noise."""
    return _mix(_mix(uint64(seed) + _GOLDEN) + uint64(position) * _GOLDEN)


@_jit
def gumbel(key: Any, token: int) -> float:
    """Standard Gumbel noise of one token: -log(-log u), u = (k + 1/2) / 2^52 with k the upper 52 bits of the hash.

    u is never 0 or 1, so the noise lies in [-3.61, 36.74]. A pure function of (seed, position, token).
    """
    k = _mix(key + (uint64(token) + uint64(1)) * _GOLDEN) >> uint64(12)
    return -math.log(-math.log((np.float64(k) + 0.5) * _TO_UNIT))


# ---- choosing a token


@_jit
def exp_into(z: Any, out: Any) -> None:
    """out = e^z elementwise, float64, z at most 0; relative error below 3e-15, exactly 0 below -700.

    Cody-Waite reduction and a Taylor polynomial of degree 12, so it consists of additions and products only: vectorizes, and
    gives the same bits whatever the length or alignment.
    """
    bits = out.view(np.int64)
    for i in range(len(z)):
        x = max(z[i], -700.0)
        k = (x * _LOG2_E + _ROUND) - _ROUND
        r = (x - k * _LN2_HIGH) - k * _LN2_LOW
        s = 1.0 / 479001600.0
        s = s * r + 1.0 / 39916800.0
        s = s * r + 1.0 / 3628800.0
        s = s * r + 1.0 / 362880.0
        s = s * r + 1.0 / 40320.0
        s = s * r + 1.0 / 5040.0
        s = s * r + 1.0 / 720.0
        s = s * r + 1.0 / 120.0
        s = s * r + 1.0 / 24.0
        s = s * r + 1.0 / 6.0
        s = s * r + 0.5
        s = s * r + 1.0
        out[i] = s * r + 1.0
        bits[i] += np.int64(k) << 52
    for i in range(len(z)):
        if z[i] <= -700.0:
            out[i] = 0.0


@_jit
def choose(
    scores: Any,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: Any,
    position: int,
    z: Any,
    weight: Any,
    near: Any,
) -> int:
    """The target's own choice among processed scores (float32 [V], -inf for what is ruled out), temperature > 0.

    argmax of score / temperature + gumbel(seed, position, token) over the support that top_k, then top_p, then min_p leave;
    ties go to the lower id. `seed` is uint64, `position` that of the token to choose; `z` and `weight` (float64 [V]) and `near`
    (bool [V]) are scratch. NaN is ruled out too; where no score is finite, or one is +inf, the first of the largest is chosen
    (id 0 if all are ruled out). The vocabulary is read a few times and only one bin of a histogram is sorted: O(V), unless
    the scores all fall into one bin (temperatures in the thousands).
    """
    size = len(scores)
    top, highest = 0, -np.inf
    for i in range(size):
        if scores[i] > highest:
            top, highest = i, np.float64(scores[i])
    if not np.isfinite(highest):
        return top
    scale = min(1.0 / temperature, 1e300)  # so that 0 x scale is 0 for the smallest temperatures
    for i in range(size):
        z[i] = (np.float64(scores[i]) - highest) * scale if scores[i] <= highest else -np.inf
    exp_into(z, weight)
    last_z, last_id = -np.inf, size
    if top_k > 0 or top_p < 1.0:
        last_z, last_id = _support(z, weight, top_k, top_p)
    if min_p > 0.0 and math.log(min_p) > last_z:
        last_z, last_id = math.log(min_p), size
    winner: int = _race(z, weight, near, top, last_z, last_id, noise_key(seed, position))
    return winner


_BINS = 1024
_BINS_PER_UNIT = 16.0


@_jit
def _support(z: Any, weight: Any, top_k: int, top_p: float) -> Any:
    """The last member (z, id) of the support that top_k and then top_p leave, by falling z and, among equals, rising id.

    z has its largest value 0. A histogram over z finds the bin in which the boundary lies; only that bin is sorted.
    """
    num = np.zeros(_BINS, np.int64)
    mass = np.zeros(_BINS, np.float64)
    for i in range(len(z)):
        b = int(min(-z[i] * _BINS_PER_UNIT, _BINS - 1.0))
        num[b] += 1
        mass[b] += weight[i]
    last_z, last_id = -np.inf, len(z)
    total = 0.0
    if 0 < top_k < len(z):
        before = 0
        b = 0
        while before + num[b] < top_k:
            before += num[b]
            total += mass[b]
            b += 1
        order = _sorted_bin(z, b, num[b])
        for i in range(top_k - before):
            total += weight[order[i]]
        last_id = order[top_k - before - 1]
        last_z = z[last_id]
    else:
        for b in range(_BINS):
            total += mass[b]
    if top_p < 1.0:
        covered = 0.0
        b = 0
        while b < _BINS - 1 and covered + mass[b] < top_p * total:
            covered += mass[b]
            b += 1
        order = _sorted_bin(z, b, num[b])
        for i in range(len(order)):
            covered += weight[order[i]]
            # summed in this order a bin may weigh less, by rounding, than summed by id: then its last member is the last
            if covered >= top_p * total or i == len(order) - 1:
                token = order[i]
                if z[token] > last_z or (z[token] == last_z and token < last_id):
                    last_z, last_id = z[token], token
                break
    return last_z, last_id


@_jit
def _sorted_bin(z: Any, b: int, num: int) -> Any:
    """The ids in bin b of `_support`, by falling z and, among equals, rising id."""
    ids = np.empty(num, np.int64)
    n = 0
    for i in range(len(z)):
        if int(min(-z[i] * _BINS_PER_UNIT, _BINS - 1.0)) == b:
            ids[n] = i
            n += 1
    return ids[np.argsort(-z[ids], kind="mergesort")]


@_jit
def _race(z: Any, weight: Any, near: Any, top: int, last_z: float, last_id: int, key: Any) -> int:
    """argmax of z + gumbel over the tokens not after (last_z, last_id). `top` is the index of the largest z, which is 0.

    To beat a value b, a token needs -log u < e^(z - b); as -log u >= 1 - u, only tokens with 1 - u <= e^(z - b) need
    logarithms: a handful of the vocabulary.
    """
    best = top
    best_value = gumbel(key, top)
    # with 1 - u in units of 2^-52 the test needs no division: 2^52 - k - 1/2 <= e^z e^-b 2^52, with some room for rounding
    scale = math.exp(-best_value) * (1.0 + 1e-9) * 2.0**52
    for i in range(len(z)):
        k = _mix(key + (uint64(i) + uint64(1)) * _GOLDEN) >> uint64(12)
        near[i] = 2.0**52 - 0.5 - np.float64(np.int64(k)) <= weight[i] * scale
    for i in range(len(z)):
        if near[i] and (z[i] > last_z or (z[i] == last_z and i <= last_id)):
            value = z[i] + gumbel(key, i)
            if value > best_value or (value == best_value and i < best):
                best, best_value = i, value
    return best


_BLOCK = 256


@_jit
def likeliest(logits: Any, out: Any) -> None:
    """out[i] (int32 [k]) = the ids of the k largest entries of logits[i] (float32 [V], k <= V), best first, ties to the lowest
    id; NaN counts as -inf.

    A block of entries none of which exceeds the k-th so far is passed over by its largest, so a row is little more than one
    read: O(V + (blocks passed into) (block + k)).
    """
    size, k = logits.shape[1], out.shape[1]
    best = np.empty(k, np.float32)
    for i in range(len(logits)):
        row = logits[i]
        num = 0
        for start in range(0, size if k > 0 else 0, _BLOCK):
            block = row[start : start + _BLOCK]
            if num == k and len(block) == _BLOCK:
                bound = best[k - 1]
                above = False
                for j in range(_BLOCK):
                    above |= block[j] > bound
                if not above:
                    continue
            for j in range(len(block)):
                value = block[j]
                if num == k and not value > best[k - 1]:
                    continue
                if value != value:
                    value = np.float32(-np.inf)
                at = num if num < k else k - 1
                num = min(num + 1, k)
                while at > 0 and best[at - 1] < value:
                    best[at] = best[at - 1]
                    out[i, at] = out[i, at - 1]
                    at -= 1
                best[at] = value
                out[i, at] = start + j


def warmup() -> None:
    """Compile every kernel for the types they are called with. Some seconds the first time, then read from numba's cache."""
    one = np.zeros(1, np.int32)
    prob = np.full(1, 0.5, np.float32)
    roles = np.zeros(1, np.uint8)
    parents = np.full(1, -1, np.int32)
    draft_fault(one, parents, prob, 2)
    tree_fault(one, parents, prob, roles, 2)
    out: NDArray[np.int8] = np.zeros(1, np.int8)
    ends = np.ones(1, np.int64)
    rows = np.zeros(1, np.int64)
    outcomes(one, parents, ends, one, out, np.zeros(1, np.int64))
    tables = np.zeros((2, 1, NUM_CONTEXTS, NUM_KNOTS))
    odds, depths = calibrate(parents, prob, one, one, ends, rows, tables[0], tables[1], 1.0)
    observe(prob, one, one, depths, ends, rows, out, tables[0], tables[1], 1.0)
    weights = np.zeros((1, NUM_SETS))
    merge(one, parents, odds, ends, rows, weights, weights, weights[0], 0, 1)
    learn(one, parents, odds, ends, rows, weights, weights, weights[0], one, 0.0)
    judge(one, parents, np.ones(1, np.float32), one, np.zeros((3, NUM_KNOTS)))
    best_size(prob, np.ones(2), 1)
    rows_fault(one, parents, 2)
    tally(ends, roles, prob, one, one, np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))
    credit(np.ones(1), np.zeros(1, np.int64), np.ones(1, np.bool_), 0.5, 0.1)
    likeliest(np.zeros((1, 8), np.float32), np.zeros((1, 2), np.int32))
    choose(np.zeros(8, np.float32), 1.0, 2, 0.5, 0.1, np.uint64(0), 0, np.zeros(8), np.zeros(8), np.zeros(8, np.bool_))
