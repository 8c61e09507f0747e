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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.target import kernels


def _load_openmp() -> Callable[..., None] | None:
    """GOMP_parallel of the runtime that torch uses; None if that is not libgomp."""
    for library in (pathlib.Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


_parallel = _load_openmp()


def run(entry: Any, args: NDArray[np.int64]) -> None:
    """Run a compiled entry point (a numba cfunc of one pointer) on every thread of the team, with the same `args`."""
    if _parallel is not None and (count := torch.get_num_threads()) > 1:
        _parallel(entry.address, args.ctypes.data, count, 0)
    else:
        entry.ctypes(args.ctypes.data)


def address(array: NDArray[Any]) -> int:
    """Where a C-contiguous array begins. The caller keeps it alive."""
    return int(array.__array_interface__["data"][0])


def attend(
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    items: NDArray[np.int32],
    tables: NDArray[np.int32],
    sequences: NDArray[np.int32],
    starts: NDArray[np.int32],
    ancestors: NDArray[np.int32],
    window: int,
    scale: float,
) -> NDArray[np.float32]:
    """Attention of a whole pass over all threads; see `kernels.attend_item`. query [heads, n, dim], result [n, heads, dim]."""
    heads, rows, dim = query.shape
    out = np.empty((rows, heads, dim), np.float32)
    counter = np.zeros(1, np.int64)
    factor = np.array([scale], np.float32)
    args = np.array(
        [
            0, len(items), address(query), address(keys), address(values), address(out), address(items), address(tables),
            address(sequences), address(starts), address(ancestors), heads, rows, dim, keys.shape[1], keys.shape[0],
            len(tables), len(sequences), len(ancestors), address(factor), address(counter), window,
        ],
        np.int64,
    )  # fmt: skip
    run(kernels.attend_entry, args)
    return out


def silu_gate(
    y: NDArray[np.float32], scale: NDArray[np.float32], out: NDArray[np.float32], out_scale: NDArray[np.float32]
) -> None:
    """`kernels.silu_gate` over all threads, row by row."""
    if len(y) < 2:
        kernels.silu_gate(y, scale, out, out_scale)
        return
    counter = np.zeros(1, np.int64)
    arrays = [address(array) for array in (y, scale, out, out_scale)]
    run(kernels.silu_entry, np.array([address(counter), len(y), y.shape[1] // 2, out.shape[1], *arrays], np.int64))
