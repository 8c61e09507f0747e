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
def merge(tokens: Any, parents: Any, probs: Any, ends: Any, weights: Any, root: int, budget: int) -> Any:
    """Merge drafts, laid end to end (draft s is [ends[s-1], ends[s])), into one tree, best path first.

    Returns (tokens int32, parents int32, path probabilities float32, source bits int64), node 0 the root.

    A merged node holds at most one node of each draft (its *cursors*, a linked list through `follow`). Taking a node opens its
    children: the children of all its cursors, united by token, with the linear pool as probability. The open nodes are scanned
    for the likeliest, which for some hundred nodes is as quick as a heap. Example: drafts a: 1 (.8), 2 (.5 after 1) and
    b: 1 (.6), 3 (.4), equal weights, give the root's children 1 at .7 and 3 at .2, and 2 below 1 at .35.
    """
    total = len(tokens)
    num_drafts = len(ends)
    source = np.empty(total, np.int64)
    first = np.full(total + num_drafts, -1, np.int64)  # first child of a draft node; entry total + s is draft s's root
    sibling = np.full(total, -1, np.int64)
    start = 0
    for s in range(num_drafts):
        for i in range(ends[s] - 1, start - 1, -1):
            source[i] = s
            parent = total + s if parents[i] < 0 else start + parents[i]
            sibling[i] = first[parent]
            first[parent] = i
        start = ends[s]

    size = min(budget, total) + 1
    out_tokens = np.empty(size, np.int32)
    out_parents = np.empty(size, np.int32)
    out_probs = np.empty(size, np.float64)
    out_sources = np.zeros(size, np.int64)
    out_tokens[0], out_parents[0], out_probs[0] = root, -1, 1.0

    follow = np.full(total, -1, np.int64)
    open_token = np.empty(total, np.int64)
    open_parent = np.empty(total, np.int64)
    open_prob = np.empty(total, np.float64)
    open_sources = np.zeros(total, np.int64)
    open_cursor = np.full(total, -1, np.int64)
    num_open = 0
    count = 1
    cursor = -1
    while True:
        # open the children of the node taken last (count - 1)
        node = count - 1
        begin = num_open
        weight = 0.0
        for turn in range(2):
            s = 0
            at = cursor
            while (node == 0 and s < num_drafts) or (node > 0 and at >= 0):
                here = total + s if node == 0 else at
                who = s if node == 0 else source[at]
                if first[here] >= 0:
                    if turn == 0:
                        weight += weights[who]
                    else:
                        child = first[here]
                        while child >= 0:
                            slot = begin
                            while slot < num_open and open_token[slot] != tokens[child]:
                                slot += 1
                            if slot == num_open:
                                num_open += 1
                                open_token[slot], open_parent[slot] = tokens[child], node
                                open_prob[slot], open_sources[slot], open_cursor[slot] = 0.0, 0, -1
                            open_prob[slot] += weights[who] * probs[child]
                            open_sources[slot] |= np.int64(1) << who
                            follow[child] = open_cursor[slot]
                            open_cursor[slot] = child
                            child = sibling[child]
                if node == 0:
                    s += 1
                else:
                    at = follow[at]
        for slot in range(begin, num_open):
            open_prob[slot] = out_probs[node] * min(open_prob[slot] / weight, 1.0)

        if count == size or num_open == 0:
            break
        best = 0
        for slot in range(1, num_open):
            ahead = open_prob[slot] - open_prob[best]
            if ahead > 0.0 or (ahead == 0.0 and open_token[slot] < open_token[best]):
                best = slot
        out_tokens[count], out_parents[count] = open_token[best], open_parent[best]
        out_probs[count], out_sources[count] = open_prob[best], open_sources[best]
        cursor = open_cursor[best]
        count += 1
        num_open -= 1
        for slot in range(best, num_open):
            open_token[slot], open_parent[slot] = open_token[slot + 1], open_parent[slot + 1]
            open_prob[slot], open_sources[slot] = open_prob[slot + 1], open_sources[slot + 1]
            open_cursor[slot] = open_cursor[slot + 1]
    return out_tokens[:count], out_parents[:count], out_probs[:count].astype(np.float32), out_sources[:count]


@_jit
def outcomes(tokens: Any, parents: Any, emitted: Any, out: Any) -> int:
    """What became of a draft, verified or not, once `emitted` (int32 [m]) is known.

    out[i] (int8 [n]) becomes 1 if the path to node i is a prefix of what was emitted, 0 if its parent's is but its own is not,
    and -1 where the parent's path was not taken or nothing was emitted at that depth. Returns how many tokens of `emitted`
    stand in the draft from its root on: the source's credit. O(n).
    """
    depth = np.empty(len(tokens), np.int32)
    reached = 0
    for i in range(len(tokens)):
        parent = parents[i]
        depth[i] = 1 if parent < 0 else depth[parent] + 1
        if (parent >= 0 and out[parent] != 1) or depth[i] > len(emitted):
            out[i] = -1
        elif tokens[i] == emitted[depth[i] - 1]:
            out[i] = 1
            reached = max(reached, depth[i])
        else:
            out[i] = 0
    return reached


# ---- calibration


@_jit
def bucket(prob: float, length: int, count: int) -> int:
    """The calibration bucket (0 to 1007) of a node: 14 of probability, 9 of match length, 8 of count.

    Probabilities in tenths, the first parted at .001, .003, .01 and .03, since all members of a bucket come to share one rate
    and many unlikely siblings must not add up to a likely one; lengths 0, 1, 2, 3, 4, 5-7, 8-11, 12-15, 16 and more; counts
    0, 1, 2, 3-4, 5-8, 9-16, 17-64, more.
    """
    tenth = min(int(prob * 10.0), 9)
    by_prob = tenth + 4
    if tenth == 0:
        by_prob = int(prob >= 0.001) + int(prob >= 0.003) + int(prob >= 0.01) + int(prob >= 0.03)
    if length <= 4:
        by_length = max(length, 0)
    elif length < 8:
        by_length = 5
    elif length < 12:
        by_length = 6
    else:
        by_length = 7 if length < 16 else 8
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
    return (by_prob * 9 + by_length) * 8 + by_count


NUM_BUCKETS = 1008


@_jit
def calibrate(probs: Any, lengths: Any, counts: Any, hits: Any, trials: Any, strength: float, out: Any) -> None:
    """out[i] = (hits + strength * prob) / (trials + strength) in the bucket of node i: a Beta posterior mean. O(n)."""
    for i in range(len(probs)):
        b = bucket(probs[i], lengths[i], counts[i])
        out[i] = min((hits[b] + strength * probs[i]) / (trials[b] + strength), 1.0)


@_jit
def observe(probs: Any, lengths: Any, counts: Any, outcome: Any, hits: Any, trials: Any, keep: float) -> None:
    """Count the outcomes (1 hit, 0 miss, -1 unknown) in their buckets, each count first fading by `keep`. O(n)."""
    for i in range(len(probs)):
        if outcome[i] >= 0:
            b = bucket(probs[i], lengths[i], counts[i])
            hits[b] = hits[b] * keep + outcome[i]
            trials[b] = trials[b] * keep + 1.0


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


@_jit
def likeliest(logits: Any, out: Any) -> None:
    """out[i] (int32 [k]) = the ids of the k largest entries of logits[i] (float32 [V], k <= V), best first, ties to the lowest
    id; NaN counts as -inf.

    A block of entries none of which exceeds the k-th so far is passed over by its largest, so a row is little more than one
    read: O(V + (blocks passed into) (block + k)).
    """
    block = 64
    size, k = logits.shape[1], out.shape[1]
    best = np.empty(k, np.float32)
    for i in range(len(logits)):
        row = logits[i]
        num = 0
        for start in range(0, size if k > 0 else 0, block):
            end = min(start + block, size)
            if num == k and end - start == block:
                bound = best[k - 1]
                above = 0
                for j in range(block):
                    above += row[start + j] > bound
                if above == 0:
                    continue
            for j in range(start, end):
                value = row[j] if row[j] == row[j] else np.float32(-np.inf)
                if num == k and not value > best[k - 1]:
                    continue
                at = num if num < k else k - 1
                num = min(num + 1, k)
                while at > 0 and best[at - 1] < value:
                    best[at] = best[at - 1]
                    out[i, at] = out[i, at - 1]
                    at -= 1
                best[at] = value
                out[i, at] = j


def warmup() -> None:
    """Compile every kernel for the types they are called with. Some seconds the first time, then read from numba's cache."""
    one = np.zeros(1, np.int32)
    prob = np.full(1, 0.5, np.float32)
    roles = np.zeros(1, np.uint8)
    parents = np.full(1, -1, np.int32)
    draft_fault(one, parents, prob, 2)
    tree_fault(one, parents, prob, roles, 2)
    merge(one, parents, prob, np.ones(1, np.int64), np.ones(1), 0, 1)
    out: NDArray[np.int8] = np.zeros(1, np.int8)
    outcomes(one, parents, one, out)
    table = np.zeros(NUM_BUCKETS)
    calibrate(prob, one, one, table, table, 1.0, np.zeros(1, np.float32))
    observe(prob, one, one, out, table, table, 1.0)
    likeliest(np.zeros((1, 8), np.float32), np.zeros((1, 2), np.int32))
    choose(np.zeros(8, np.float32), 1.0, 2, 0.5, 0.1, np.uint64(0), 0, np.zeros(8), np.zeros(8), np.zeros(8, np.bool_))
