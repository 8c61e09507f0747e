"""What a source's estimate is worth: raw estimates in, observed acceptance rates out; and how much each source is trusted.

Pure: arrays in, arrays out; the state is in the objects, nothing is read or written elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.tree import Draft

_STRENGTH = 8.0
"""How many observations a raw estimate counts for: a bucket's prior is Beta with this weight and the estimate as its mean."""

_KEEP = 0.999
"""Counts fade by this factor with every observation in their bucket, so about the last thousand speak."""


@dataclass
class Calibration:
    """Observed acceptance per (source, probability, match length, count), for one model and tenant.

    The counts are Beta counts with forgetting; the prior mean of a node is its own raw estimate, so an unseen bucket leaves
    estimates as they are. 16 kB a source.
    """

    tables: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Source name -> float64 [2, kernels.NUM_BUCKETS]: hits, trials."""

    @staticmethod
    def of(arrays: Mapping[str, NDArray[np.float64]] | None) -> Calibration:
        """With tables copied from another one's `arrays`; None is one that has seen nothing. Raises ValueError if they do not
        fit."""
        shape = (2, kernels.NUM_BUCKETS)
        for source, table in (arrays or {}).items():
            if (
                table.shape != shape
                or not np.all(np.isfinite(table))
                or np.any(table < 0)
                or np.any(table[0] > table[1] + 1e-6)
            ):
                raise ValueError(f"no calibration table: {source} {table.shape}; a table is {shape}, hits and trials")
        return Calibration({source: table.astype(np.float64) for source, table in (arrays or {}).items()})

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return sum(table.nbytes for table in self.tables.values())

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """A copy of the tables, by source."""
        return {source: table.copy() for source, table in self.tables.items()}

    def apply(self, source: str, draft: Draft) -> Draft:
        """The same draft with calibrated probabilities. O(n)."""
        table = self.tables.get(source)
        if table is None or not len(draft):
            return draft
        probs = np.empty(len(draft), np.float32)
        kernels.calibrate(draft.probs, draft.lengths, draft.counts, table[0], table[1], _STRENGTH, probs)
        return Draft(draft.tokens, draft.parents, probs, draft.lengths, draft.counts)

    def observe(self, source: str, draft: Draft, emitted: NDArray[np.int32]) -> int:
        """Score a raw draft, verified or not, against what was emitted after its root (int32 [m]).

        Returns how many of the emitted tokens the draft held in a row from the root: the source's credit. O(n).
        """
        if not len(draft):
            return 0
        table = self.tables.get(source)
        if table is None:
            table = self.tables.setdefault(source, np.zeros((2, kernels.NUM_BUCKETS)))
        outcome = np.empty(len(draft), np.int8)
        reached: int = kernels.outcomes(draft.tokens, draft.parents, emitted, outcome)
        kernels.observe(draft.probs, draft.lengths, draft.counts, outcome, table[0], table[1], _KEEP)
        return reached


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

    def reward(self, reached: Sequence[int | None]) -> None:
        """`reached[s]`: how many emitted tokens source s had in a row, None if it was not heard: late, or left out.

        The awake share among them the weight they had. A step in which none of them had any changes nothing.
        """
        awake = np.array([s for s, count in enumerate(reached) if count is not None], np.int64)
        counts = np.array([count for count in reached if count is not None], np.float64)
        most = counts.max(initial=0.0)
        if most < 1:
            return
        weights = self.weights[awake]
        grown = weights * np.exp(self._RATE * counts / most)
        grown *= weights.sum() / grown.sum()
        self.weights[awake] = (1.0 - self._SHARE) * grown + self._SHARE * weights.sum() / len(awake)
