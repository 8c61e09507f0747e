"""Whether drafting pays: tokens per second are what counts, and a draft takes time before it saves any.

Cutting a tree to what its rows are worth (`engine.tree.best_size`) comes too late for that: by then it has been drafted. Alone
this hardly matters, since a step saved is a whole pass. Beside others a step costs its part of a pass, while all wait until the
last of them has been drafted for.

The name is that of Liu et al. 2024 (TurboSpec, arXiv 2406.14066), who choose the length of drafts under load by it.
"""

from __future__ import annotations

import math

from engine.tree import CandidateTree, CostCurve, best_size


class Goodput:
    """One request's account of what its drafts bring and take, in seconds a step:

        gain = tokens promised x seconds of a token without drafts - seconds of the rows - seconds of drafting

    1. The tree is counted at the size that pays, so that what was sent beyond it costs nothing here.
    2. Without drafts a token takes the curve's single row, less what of it is drafting: as much of that as there lately was.
    3. Where the mean over the last drafted steps is a loss of more than `TOLERATED` of a token's seconds, there are no drafts
       but on every `PROBE`-th step, which may raise it. Less is what a step without drafts takes as well, and what it is worth
       to hear a source that has nothing to say yet.
    """

    TOLERATED = 0.1
    PROBE = 16
    TRIAL = 8
    """Drafted steps after which a request is judged for the first time, and of about which the mean is."""

    def __init__(self) -> None:
        self.token_seconds = math.inf
        """What a token takes without drafts, as far as is known."""
        self._gain = 0.0
        self._num_weighed = 0
        self._num_skipped = 0
        self._drafting = 0.0
        self._often = 1.0

    @property
    def pays(self) -> bool:
        """Whether to draft for the next step, be it to find out."""
        loses = self._gain < -self.TOLERATED * self.token_seconds
        return not loses or self._num_weighed < self.TRIAL or self._num_skipped >= self.PROBE - 1

    def weigh(self, tree: CandidateTree, curve: CostCurve, seconds: float) -> None:
        """A step was drafted, in so many seconds; what a blocking source made it wait is among them."""
        self._num_skipped = 0
        self._num_weighed += 1
        weight = 1 / min(self._num_weighed, self.TRIAL)
        self._drafting += weight * (seconds - self._drafting)
        self._often += (1 - self._often) / self.PROBE
        self.token_seconds = float(curve.at(1)) - self._often * self._drafting
        size = best_size(tree.probs[1:], curve)
        rows = float(curve.at(1 + size)) - float(curve.at(1))
        gain = float(tree.probs[1 : 1 + size].sum()) * self.token_seconds - rows - seconds
        self._gain += weight * (gain - self._gain)

    def skip(self) -> None:
        """A step was not drafted for."""
        self._num_skipped += 1
        self._often -= self._often / self.PROBE
