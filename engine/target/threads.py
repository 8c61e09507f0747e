"""The threads of a pass: torch's own OpenMP team, as kernels take it (`team_kernels`)."""

from __future__ import annotations

import ctypes
import pathlib
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from engine.target import kernels, team_kernels


def _load_openmp() -> tuple[int, int]:
    """GOMP_parallel_start and GOMP_parallel_end of the runtime that torch uses, by address; zeros if that is not libgomp."""
    for library in (pathlib.Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            openmp = ctypes.CDLL(str(library))
            start, end = openmp.GOMP_parallel_start, openmp.GOMP_parallel_end
        except (OSError, AttributeError):
            continue
        return ctypes.cast(start, ctypes.c_void_p).value or 0, ctypes.cast(end, ctypes.c_void_p).value or 0
    return 0, 0


_region = _load_openmp()


@cache
def _team(count: int) -> NDArray[np.int64]:
    start, end = _region if count > 1 else (0, 0)
    entries = (team_kernels.crew_entry, kernels.product_entry, kernels.quantize_entry, kernels.attend_entry)
    return np.array([count if start else 1, start, end, *(entry.address for entry in entries), 0], np.int64)


def team() -> NDArray[np.int64]:
    """What kernels need to know to run on all threads, int64 [8]; `team_kernels` names what stands where."""
    return _team(torch.get_num_threads())
