"""Slow, obvious twins of `engine.drafters.kernels` and of the lookahead window: dictionaries and lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.drafters import Feedback, kernels

K = kernels.K


@dataclass
class Rows:
    """Rows by context (before, token), before -1 for the token alone; without a bound. `hits` and `trials` by sign."""

    rows: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    hits: dict[int, float] = field(default_factory=dict)
    trials: dict[int, float] = field(default_factory=dict)

    def learn(self, feedback: Feedback, before: int) -> None:
        """See kernels.learn."""
        n = len(feedback.nodes)
        for i, token in enumerate(feedback.nodes.tolist()):
            top = feedback.top_ids[i].tolist()[:K]
            parent = int(feedback.parents[i])
            previous = int(feedback.nodes[parent]) if parent >= 0 else before
            is_guess = i >= n - feedback.num_lookahead
            if not (is_guess and (-1, token) in self.rows):
                fresh, old = top[:4], self.rows.get((-1, token), [])
                more = [each for each in old + top[4:] if each not in fresh]
                self.rows[-1, token] = (fresh + list(dict.fromkeys(more)))[:K]
            if previous >= 0 and not (is_guess and (previous, token) in self.rows):
                self.rows[previous, token] = list(dict.fromkeys(top + self.rows.get((previous, token), [])))[:K]

    def candidates(
        self,
        before: int,
        token: int,
        depth: int,
        missed: Sequence[Sequence[int]],
        common: Sequence[int],
        hinted: Sequence[int] = (),
    ) -> dict[int, int]:
        """Token -> sign, in the order they are found."""
        two = self.rows.get((before, token)) if before >= 0 else None
        one = self.rows.get((-1, token))
        late = {}
        for age, likely in enumerate(missed):
            for rank, each in enumerate(likely):
                if each >= 0 and kernels.missed_class(age + depth, rank):
                    late.setdefault(each, kernels.missed_class(age + depth, rank))
        often = [each for each in common if each >= 0]
        found = {}
        hints = [each for each in hinted if each >= 0] if depth == 0 and one is None else []
        for each in [*(two or []), *(one or []), *late, *(token for token in often if token not in hints)]:
            rank_two = 0 if two is None else 2 + two.index(each) if each in two else 1
            rank_one = 0 if one is None else 2 + one.index(each) if each in one else 1
            how_common = 0 if each not in often else 1 if often.index(each) < 4 else 2
            found[each] = kernels.sign_of(rank_two, rank_one, late.get(each, 0), how_common)
        for rank, each in enumerate(hints):
            found.setdefault(each, kernels.NOT_HINTED + (rank >= 2))
        return found

    def prob(self, sign: int) -> float:
        """How often a candidate of this sign is right."""
        return float((self.hits.get(sign, 0.0) + 6.0 * kernels.prior(sign)) / (self.trials.get(sign, 0.0) + 6.0))

    def score(
        self,
        before: int,
        token: int,
        missed: Sequence[Sequence[int]],
        common: Sequence[int],
        hinted: Sequence[int],
        emitted: Sequence[int],
        keep: float,
    ) -> None:
        """See kernels.score."""
        for depth, said in enumerate(emitted):
            for each, sign in self.candidates(before, token, depth, missed, common, hinted).items():
                self.hits[sign] = self.hits.get(sign, 0.0) * keep + (each == said)
                self.trials[sign] = self.trials.get(sign, 0.0) * keep + 1
            before, token = token, said

    def paths(
        self, before: int, token: int, missed: Sequence[Sequence[int]], common: Sequence[int], depth: int
    ) -> dict[tuple[int, ...], float]:
        """Every path of at most `depth` tokens below the root and its probability."""
        found: dict[tuple[int, ...], float] = {}

        def grow(path: tuple[int, ...], prob: float) -> None:
            if len(path) == depth:
                return
            ends = [before, token, *path]
            nodes = self.candidates(ends[-2], ends[-1], len(path), missed, common)
            probs = {each: self.prob(sign) for each, sign in nodes.items()}
            scale = min(1.0, 0.98 / max(sum(probs.values()), 1e-9))
            for each in probs:
                found[(*path, each)] = prob * probs[each] * scale
                grow((*path, each), found[(*path, each)])

        grow((), 1.0)
        return found
