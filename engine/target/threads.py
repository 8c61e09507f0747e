"""Compiled kernels on torch's own OpenMP team.

Between two matrix products torch's threads spin, waiting for the next. A second pool (numba's own, say) would fight them for
the cores and lose milliseconds; so kernels run as parallel regions of the very same team, through the entry point that
compilers use for `#pragma omp parallel` (GNU libgomp's GOMP_parallel, 3 microseconds a call). Where torch was built on another
runtime, they run on the calling thread: slower, with the same result, since every piece of work belongs to exactly one thread
either way.
"""

from __future__ import annotations

import ctypes
import pathlib
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.target import kernels


def _load_openmp() -> Any:
    """GOMP_parallel of the runtime that torch uses; None if that is not libgomp."""
    for library in (pathlib.Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            return ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
    return None


_parallel = _load_openmp()


@cache
def _team(count: int) -> NDArray[np.int64]:
    alone = _parallel is None or count < 2
    address = 0 if alone else ctypes.cast(_parallel, ctypes.c_void_p).value
    entries = (kernels.product_entry, kernels.quantize_entry, kernels.attend_entry)
    return np.array([address, 1 if alone else count, *(entry.address for entry in entries)], np.int64)


def team() -> NDArray[np.int64]:
    """What kernels need to know to run on all threads: the address of GOMP_parallel (0: there is none), how many threads there
    are, and the addresses of what they run.
    """
    return _team(torch.get_num_threads())
