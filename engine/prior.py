"""What calibration begins with before anything was observed: rates learned from public code and prose.

Mixing weights are not among them: they depend on which sources there are, and those learned with a corpus are worse without
one.

They stand in `prior.tsv`, which people can read and `benchmarks/prior.py` writes. A tenant's own observations soon outweigh
them: a cell counts for at most MOST_TRIALS.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from engine import kernels

MOST_TRIALS = 40.0
"""Observations that a cell of the prior stands for at most."""

_CONTEXTS = ("all", "0", "1", "2", "3", "4", "5-7", "8-11", "12-15", "16+")
"""The rows that are kept: all nodes of a source, and those of each class of match length; finer ones are a tenant's own."""

_HEADER = """\
# What calibration begins with; written by `python benchmarks/prior.py`, read by engine/prior.py.
# A row: a source, a length of match, and for raw log-odds -7 to 7 how often a node came true / was observed.
"""


@cache
def prior() -> Mapping[str, NDArray[np.float64]]:
    """The arrays of a `Calibration` as shipped, by kind of source. Read once; not to be written to."""
    return parse(files("engine").joinpath("prior.tsv").read_text(encoding="utf-8"))


def parse(text: str) -> dict[str, NDArray[np.float64]]:
    """The arrays of a table. Raises ValueError for a line that is none of it."""
    arrays: dict[str, NDArray[np.float64]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        source, row, *cells = line.split("\t")
        if row in _CONTEXTS and len(cells) == kernels.NUM_KNOTS:
            counts = arrays.setdefault(f"{source}/counts", np.zeros((2, kernels.NUM_CONTEXTS, kernels.NUM_KNOTS)))
            counts[:, _CONTEXTS.index(row)] = np.array([cell.split("/") for cell in cells], np.float64).T
        else:
            raise ValueError(f"no line of a prior: {line!r}")
    return arrays


def render(arrays: Mapping[str, NDArray[np.float64]]) -> str:
    """The table of the counts among a calibration's arrays, rounded, its cells cut to MOST_TRIALS."""
    lines: list[str] = []
    for name in sorted(arrays):
        source, _, part = name.rpartition("/")
        if part == "counts":
            for i, row in enumerate(_CONTEXTS):
                hits, trials = arrays[name][:, i]
                shrink = np.minimum(1.0, MOST_TRIALS / np.maximum(trials, 1e-9))
                cells = [f"{h:.2f}/{t:.2f}" for h, t in zip(hits * shrink, trials * shrink, strict=True)]
                lines.append("\t".join([source, row, *cells]))
    return _HEADER + "\n".join(lines) + "\n"
