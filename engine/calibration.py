"""What a source's estimate is worth: raw estimates in, observed acceptance rates out; and how much each source is trusted.

Pure: arrays in, arrays out; the state is in the objects, nothing is read or written elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.tree import Drafts, Mixture

_STRENGTH = 8.0
"""How many observations a coarser rate counts for: a cell's prior is Beta with this weight and that rate as its mean."""

_KEEP = 0.999
"""Counts fade by this factor with every observation in their cell, so about the last thousand speak."""

_RATE = 0.005
"""Length of a step of gradient descent on the mixing weights."""

_MOST_SOURCES = 32
"""Labels with a table of their own; a corpus beyond them shares that of its kind. A table is 91 kB."""

_COUNTS = (2, kernels.NUM_CONTEXTS, kernels.NUM_KNOTS)
_WEIGHTS = (2, kernels.NUM_SETS)

Arrays = Mapping[str, NDArray[np.float64]]


class Calibration:
    """Observed acceptance per (source, match length, count, depth), and the weights by which sources are mixed.

    1. A source is a label, `prompt` or `corpus:mycode`: a corpus that fits and one that does not are told apart.
    2. `hits` and `trials`, float64 [sources, kernels.NUM_CONTEXTS, kernels.NUM_KNOTS], are Beta counts with forgetting around
       log-odds -7 to 7 of the raw estimate, between which `log_odds` interpolates; a finer context starts from the coarser
       one's rate, the coarsest from the estimate itself. So an unseen source's estimates are left as they are.
    3. `mixture` is one row a source, and a bias that all share.

    What was learned of one model and tenant is kept as `arrays()` and given as `saved`, None if nothing was; what is not there
    is taken from `prior`, by label, else by kind (the part before a colon). Raises ValueError if arrays do not fit.
    """

    def __init__(self, saved: Arrays | None = None, prior: Arrays | None = None) -> None:
        self._saved, self._prior = dict(saved or {}), dict(prior or {})
        for known in (self._saved, self._prior):
            for name, array in known.items():
                _check(name, array)
        self._places: dict[str, int] = {}
        self.hits = np.zeros((0, *_COUNTS[1:]))
        self.trials = self.hits.copy()
        bias = self._saved.get("bias", self._prior.get("bias"))
        self.mixture = Mixture(np.zeros((0, _WEIGHTS[1])), np.zeros((0, _WEIGHTS[1])), np.zeros(_WEIGHTS[1]))
        if bias is not None:
            self.mixture.bias[:] = bias

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return self.hits.nbytes + self.trials.nbytes + sum(array.nbytes for array in self._saved.values())

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """A copy of all: `bias`, and for every source `SOURCE/counts` (hits, trials) and `SOURCE/weights` (slopes, doubts)."""
        arrays = {name: array.copy() for name, array in self._saved.items()}
        arrays["bias"] = self.mixture.bias.copy()
        for source, i in self._places.items():
            arrays[f"{source}/counts"] = np.stack([self.hits[i], self.trials[i]])
            arrays[f"{source}/weights"] = np.stack([self.mixture.slopes[i], self.mixture.doubts[i]])
        return arrays

    def rows(self, labels: Sequence[str]) -> NDArray[np.int64]:
        """int64 [number of labels]: each one's place in the tables. One never seen begins as others of its kind."""
        return np.array([self._place(label) for label in labels], np.int64)

    def log_odds(self, drafts: Drafts, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """(float64 [n] calibrated log-odds, within -7 and 7; int32 [n] depths) of all nodes. O(n), some 50 nanoseconds a
        node."""
        odds, depths = kernels.calibrate(
            drafts.parents, drafts.probs, drafts.lengths, drafts.counts, drafts.ends, rows, self.hits, self.trials, _STRENGTH
        )
        return odds, depths

    def learn(
        self,
        drafts: Drafts,
        rows: NDArray[np.int64],
        odds: NDArray[np.float64],
        depths: NDArray[np.int32],
        emitted: NDArray[np.int32],
    ) -> NDArray[np.int64]:
        """Score raw drafts, verified or not, against what was emitted after their root (int32 [m]).

        `odds` and `depths` are what `log_odds` said of them. Returns int64 [number of drafts]: how many of the emitted tokens
        each held in a row from the root, the source's credit. O(n).
        """
        outcome = np.empty(len(drafts), np.int8)
        reached = np.zeros(len(rows), np.int64)
        if not len(drafts):
            return reached
        kernels.outcomes(drafts.tokens, drafts.parents, drafts.ends, emitted, outcome, reached)
        mixture = self.mixture
        kernels.learn(
            drafts.tokens,
            drafts.parents,
            odds,
            drafts.ends,
            rows,
            mixture.slopes,
            mixture.doubts,
            mixture.bias,
            emitted,
            _RATE,
        )
        kernels.observe(
            drafts.probs,
            drafts.lengths,
            drafts.counts,
            depths,
            drafts.ends,
            rows,
            outcome,
            self.hits,
            self.trials,
            _KEEP,
        )
        return reached

    def _place(self, label: str) -> int:
        kind = label.partition(":")[0]
        if label not in self._places and kind != label and len(self._places) >= _MOST_SOURCES:
            return self._place(kind)
        if label not in self._places:
            counts, weights = self._begin(label, kind, "counts"), self._begin(label, kind, "weights")
            fresh = Mixture.equal(1)
            slopes, doubts = (fresh.slopes[0], fresh.doubts[0]) if weights is None else weights
            hits, trials = np.zeros(_COUNTS) if counts is None else counts
            self.hits = np.concatenate([self.hits, hits[None]])
            self.trials = np.concatenate([self.trials, trials[None]])
            mixture = self.mixture
            self.mixture = Mixture(
                np.concatenate([mixture.slopes, slopes[None]]), np.concatenate([mixture.doubts, doubts[None]]), mixture.bias
            )
            self._places[label] = len(self._places)
        return self._places[label]

    def _begin(self, label: str, kind: str, part: str) -> NDArray[np.float64] | None:
        for name in (f"{label}/{part}", f"{kind}/{part}"):
            for known in (self._saved, self._prior):
                if name in known:
                    return known[name].astype(np.float64)
        return None


def _check(name: str, array: NDArray[np.float64]) -> None:
    """Raise ValueError unless an array of this name may be part of a calibration."""
    part = name.rpartition("/")[2]
    shape = {"counts": _COUNTS, "weights": _WEIGHTS, "bias": _WEIGHTS[1:]}.get(part)
    if shape is None:
        raise ValueError(f"no part of a calibration: {name}; there are bias, SOURCE/counts and SOURCE/weights")
    fits = array.shape == shape and bool(np.all(np.isfinite(array)))
    if fits and part == "counts":
        fits = bool(np.all(array >= 0) and np.all(array[0] <= array[1] * (1 + 1e-5) + 1e-6))
    if not fits:
        raise ValueError(f"no calibration: {name} {array.shape}; it must be {shape}, finite, hits no more than trials")


def alone(reached: Sequence[int | None]) -> list[int]:
    """How many of the tokens emitted in a step each source's own draft held that no other one's did, verified or not.

    `reached` says how many each held in a row; None, for one that was not heard, comes to 0. At most one is above 0.
    """
    most, second = (*sorted((count for count in reached if count is not None), reverse=True), 0, 0)[:2]
    return [0 if count is None or count < most else count - second for count in reached]


class Credit:
    """Trust in the sources of one request, learned from every source's own proposal: Hedge with a fixed share.

    Full information: once tokens are out, each proposal is scored, chosen or not (Herbster and Warmuth 1998, fixed share;
    HedgeSpec, arXiv 2510.20064, for drafters). A source that was not heard in a step sleeps and keeps its weight (sleeping
    experts: Freund, Schapire, Singer and Warmuth 1997). Weights start equal, are positive and sum to 1.
    """

    _RATE = 0.5
    _SHARE = 0.02

    def __init__(self, num_sources: int) -> None:
        self.weights = np.full(num_sources, 1.0 / max(num_sources, 1))

    def reward(self, reached: NDArray[np.int64], heard: NDArray[np.bool_]) -> None:
        """`reached[s]`: how many emitted tokens source s had in a row; `heard[s]` is false if it was late, or left out.

        Those heard share among them the weight they had. A step in which none of them had any token changes nothing.
        """
        kernels.credit(self.weights, reached, heard, self._RATE, self._SHARE)
