"""The slow, obvious twin of every kernel of the pure core: plain Python over dicts, lists and big integers.

Nothing here shares code with what it judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.acceptance import SamplingParams
from engine.tree import CandidateTree, CostCurve, Draft, Mixture

Path = tuple[int, ...]
"""The tokens from below the root down to a node; () is the root."""

MASK = (1 << 64) - 1


# ---- drafts and trees


def paths(draft: Draft) -> dict[Path, float]:
    """Every node of a draft, as path -> probability given its parent, in the draft's order."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        found.append(((*found[parent], token)) if parent >= 0 else (token,))
    return dict(zip(found, draft.probs.tolist(), strict=True))


def tree_paths(tree: CandidateTree) -> list[Path]:
    """The path of every node of a tree, the root's () first."""
    found: list[Path] = [()]
    for i in range(1, len(tree)):
        found.append((*found[tree.parents[i]], int(tree.tokens[i])))
    return found


def log_odds(prob: float) -> float:
    """log(p / (1 - p)) within [-7, 7]."""
    if not 0 < prob < 1:
        return -7.0 if prob <= 0 else 7.0
    return min(max(math.log(prob / (1 - prob)), -7.0), 7.0)


def chance(odds: float) -> float:
    """The probability of log-odds."""
    return 1 / (1 + math.exp(-odds))


def mix(drafts: Sequence[Draft], mixture: Mixture) -> dict[Path, tuple[float, int]]:
    """Every path any draft holds -> (its probability under the mixture, the bits of the sources that hold it).

    Draft s has row s of the mixture. At each parent only sources that propose the parent and a child of it have a say.
    """
    held = [paths(draft) for draft in drafts]
    every = sorted({path for mapping in held for path in mapping}, key=lambda path: (len(path), path))
    mixed: dict[Path, tuple[float, int]] = {(): (1.0, 0)}
    for parent in [(), *every]:
        children = [path for path in every if path[:-1] == parent and path]
        alone = {}
        for path in children:
            proposing = [s for s, mapping in enumerate(held) if path in mapping]
            column = min(len(proposing), 3) - 1
            odds = float(mixture.bias[column])
            for s, mapping in enumerate(held):
                siblings = [chance(log_odds(mapping[other])) for other in children if other in mapping]
                if s in proposing:
                    odds += mixture.slopes[s, column] * log_odds(mapping[path])
                elif siblings:
                    odds += mixture.doubts[s, column] * math.log(max(1 - sum(siblings), 2**-8))
            alone[path] = chance(min(max(odds, -20.0), 20.0)), sum(1 << s for s in proposing)
        total = max(1.0, sum(prob for prob, _ in alone.values()))
        mixed |= {path: (mixed[parent][0] * prob / total, bits) for path, (prob, bits) in alone.items()}
    return mixed


def mixed_alone(drafts: Sequence[Draft], mixture: Mixture) -> dict[int, float]:
    """Every token below the root -> its mixed probability, siblings not scaled."""
    held = [paths(draft) for draft in drafts]
    tokens = {path[0] for mapping in held for path in mapping if len(path) == 1}
    found = {}
    for token in tokens:
        column = min(sum((token,) in mapping for mapping in held), 3) - 1
        odds = float(mixture.bias[column])
        for s, mapping in enumerate(held):
            siblings = [chance(log_odds(prob)) for path, prob in mapping.items() if len(path) == 1]
            if (token,) in mapping:
                odds += mixture.slopes[s, column] * log_odds(mapping[token,])
            elif siblings:
                odds += mixture.doubts[s, column] * math.log(max(1 - sum(siblings), 2**-8))
        found[token] = chance(odds)
    return found


def merge(drafts: Sequence[Draft], mixture: Mixture, budget: int) -> list[tuple[Path, float, int]]:
    """The best `budget` candidates as (path, path probability, source bits), after the root's entry.

    Among nodes whose parent is taken, the likeliest is next; ties go to the smaller token, then to the parent taken earlier.
    """
    mixed = mix(drafts, mixture)
    taken: list[Path] = [()]
    while len(taken) <= budget:
        frontier = [path for path in mixed if path not in taken and path[:-1] in taken]
        if not frontier:
            break
        taken.append(min(frontier, key=lambda path: (-mixed[path][0], path[-1], taken.index(path[:-1]))))
    return [(path, *mixed[path]) for path in taken]


def draft_is_valid(draft: Draft, vocab_size: int) -> bool:
    """Whether a draft keeps its invariants."""
    seen: dict[int, dict[int, float]] = {}
    for i, (token, parent, prob) in enumerate(zip(draft.tokens, draft.parents, draft.probs, strict=True)):
        children = seen.setdefault(int(parent), {})
        if not (0 <= token < vocab_size and -1 <= parent < i and 0 <= prob <= 1) or int(token) in children:
            return False
        children[int(token)] = float(prob)
    return all(sum(children.values()) <= 1.001 for children in seen.values())


def tree_is_valid(tree: CandidateTree, vocab_size: int) -> bool:
    """Whether a tree keeps its invariants."""
    n = len(tree)
    tokens, parents, probs, roles = (x.tolist() for x in (tree.tokens, tree.parents, tree.probs, tree.roles))
    num_candidates = roles.count(0)
    siblings = list(zip(parents[:num_candidates], tokens[:num_candidates], strict=True))
    return (
        (parents[0], probs[0], roles[0]) == (-1, 1.0, 0)
        and all(0 <= token < vocab_size for token in tokens)
        and all(0 <= parents[i] < i for i in range(1, n))
        and all(0 <= probs[i] <= probs[parents[i]] for i in range(1, n))
        and roles == [0] * num_candidates + [1] * (n - num_candidates)
        and probs[:num_candidates] == sorted(probs[:num_candidates], reverse=True)
        and len(set(siblings)) == len(siblings)
    )


def seconds(curve: CostCurve, count: int) -> float:
    """The time of a pass of `count` rows: the line through the two points around it, the last two beyond the end."""
    rows, times = curve.rows.tolist(), curve.seconds.tolist()
    if len(rows) == 1:
        return float(times[0])
    right = next((i for i in range(1, len(rows)) if rows[i] >= count), len(rows) - 1)
    share = (count - rows[right - 1]) / (rows[right] - rows[right - 1])
    return float(times[right - 1] + share * (times[right] - times[right - 1]))


def rates(path_probs: Sequence[float], curve: CostCurve, num_trees: int) -> list[float]:
    """Expected tokens per second with the first 0, 1, ... nodes."""
    return [(num_trees + math.fsum(path_probs[:m])) / seconds(curve, num_trees + m) for m in range(len(path_probs) + 1)]


# ---- calibration


def outcomes(draft: Draft, emitted: Sequence[int]) -> tuple[list[int], int]:
    """(1, 0 or -1 for every node, how many emitted tokens stand in the draft)."""
    said = tuple(emitted)
    out = []
    for path in paths(draft):
        known = path[:-1] == said[: len(path) - 1] and len(path) <= len(said)
        out.append(int(path == said[: len(path)]) if known else -1)
    held = set(paths(draft))
    reached = max((m for m in range(len(said) + 1) if m == 0 or said[:m] in held), default=0)
    return out, reached


_LENGTHS = [0, 1, 2, 3, 4, 7, 11, 15]
_COUNTS = [0, 1, 2, 4, 8, 16, 64]
_DEPTHS = [1, 2, 4]

Context = tuple[int, ...]


def contexts(length: int, count: int, depth: int) -> list[Context]:
    """The classes of a node from the coarsest to the finest: of each number the first class whose upper end is not passed."""
    classes = [sum(number > end for end in ends) for number, ends in ((length, _LENGTHS), (count, _COUNTS), (depth, _DEPTHS))]
    return [tuple(classes[:level]) for level in range(4)]


class Counts:
    """Calibration of one source as a dict of (hits, trials) by context and knot."""

    def __init__(self, strength: float, keep: float) -> None:
        self.strength, self.keep = strength, keep
        self.table: dict[tuple[Context, int], tuple[float, float]] = {}

    def estimate(self, prob: float, length: int, count: int, depth: int) -> float:
        """The log-odds of a node: those of its two knots' rates, by distance."""
        return sum(share * log_odds(self._rate(knot, length, count, depth)) for knot, share in self._knots(prob))

    def observe(self, prob: float, length: int, count: int, depth: int, outcome: int) -> None:
        """Count one outcome."""
        for knot, share in self._knots(prob) if outcome >= 0 else []:
            for context in contexts(length, count, depth):
                hits, trials = self.table.get((context, knot), (0.0, 0.0))
                fade = 1 - (1 - self.keep) * share
                self.table[context, knot] = (hits * fade + share * outcome, trials * fade + share)

    def _knots(self, prob: float) -> list[tuple[int, float]]:
        low = min(math.floor(log_odds(prob)), 6)
        return [(low, 1 - (log_odds(prob) - low)), (low + 1, log_odds(prob) - low)]

    def _rate(self, knot: int, length: int, count: int, depth: int) -> float:
        rate = chance(knot)
        for context in contexts(length, count, depth):
            hits, trials = self.table.get((context, knot), (0.0, 0.0))
            rate = (hits + self.strength * rate) / (trials + self.strength)
        return rate


def judged(tree: CandidateTree, emitted: Sequence[int]) -> list[tuple[float, int]]:
    """(promised probability given the parent, outcome) of every candidate whose parent was emitted."""
    said, seen = tuple(emitted), []
    by_path = dict(zip(tree_paths(tree), tree.probs.tolist(), strict=True))
    for path, prob in by_path.items():
        if path and path[:-1] == said[: len(path) - 1] and len(path) <= len(said):
            seen.append((prob / by_path[path[:-1]], int(path == said[: len(path)])))
    return seen


# ---- noise and choice


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def noise_bits(seed: int, position: int, token: int) -> int:
    """The 52 random bits of one token, in integers of any size."""
    golden = 0x9E3779B97F4A7C15
    key = _mix((_mix((seed + golden) & MASK) + position * golden) & MASK)
    return _mix((key + (token + 1) * golden) & MASK) >> 12


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise."""
    return -math.log(-math.log((noise_bits(seed, position, token) + 0.5) / 2.0**52))


def noise_row(seed: int, position: int, size: int) -> NDArray[np.float64]:
    """float64 [size]: the noise of tokens 0 to size - 1, in numpy's wrap-around integers."""

    def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    key = mix(mix(np.array([seed], np.uint64) + golden) + np.array([position], np.uint64) * golden)
    bits = mix(key + (np.arange(size, dtype=np.uint64) + np.uint64(1)) * golden) >> np.uint64(12)
    return np.asarray(-np.log(-np.log((bits.astype(np.float64) + 0.5) / 2.0**52)))


def support(scores: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64]:
    """The ids that top_k, then top_p of what is left, then min_p leave: by one stable full sort in float64."""
    z = (scores.astype(np.float64) - float(scores.max())) / params.temperature
    order = np.argsort(-z, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        weight = np.exp(z[order])
        share = np.cumsum(weight) / weight.sum()
        order = order[: int(np.argmax(share >= params.top_p)) + 1]
    if params.min_p > 0:
        order = order[z[order] >= math.log(params.min_p)]
    return order


def choose(scores: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The target's choice among processed scores: lowest id of the largest perturbed score within the support."""
    if params.temperature == 0:
        return min(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    ids = support(scores, params)
    ids = np.sort(ids[np.isfinite(scores[ids])])
    values = (scores[ids].astype(np.float64) - float(scores.max())) / params.temperature
    values += noise_row(params.seed, position, len(scores))[ids]
    return int(ids[np.argmax(values)])


def process(
    logits: NDArray[np.float32], prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, masked: Sequence[int]
) -> NDArray[np.float32]:
    """Penalties, bias and the stop-id mask, one token of the vocabulary at a time, from the whole prefix."""
    scores = logits.astype(np.float32).copy()
    bias: Mapping[int, float] = dict(params.logit_bias)
    for v in range(len(scores)):
        if params.repetition_penalty != 1 and (v in prompt or v in answer):
            penalty = np.float32(params.repetition_penalty)
            scores[v] = scores[v] / penalty if scores[v] > 0 else scores[v] * penalty
        times = list(answer).count(v)
        if times:
            scores[v] -= np.float32(params.frequency_penalty) * np.float32(times) + np.float32(params.presence_penalty)
        if v in bias:
            scores[v] += np.float32(bias[v])
        if v in masked:
            scores[v] = -np.inf
    return scores
