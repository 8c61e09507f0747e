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
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from engine.target import kernels


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """An integer address as a pointer, for carray."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _take(typing_context: Any, address: Any) -> Any:
    """Atomically read the int64 at an address and add one to it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = context.get_value_type(types.int64)
        pointer = builder.inttoptr(args[0], word.as_pointer())
        return builder.atomic_rmw("add", pointer, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(types.int64), generate


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


_ATTEND_FIELDS = 22


@cfunc(types.void(types.voidptr), cache=True, nopython=True)  # type: ignore[untyped-decorator]
def _attend(data: Any) -> None:
    """Take items of `kernels.attend_item` until none is left. The fields of `data` are those of `Attention.args`."""
    a = carray(data, (_ATTEND_FIELDS,), np.int64)
    heads, rows, dim, kv_heads, blocks = a[11], a[12], a[13], a[14], a[15]
    query = carray(_pointer(a[2]), (heads, rows, dim), np.float32)
    keys = carray(_pointer(a[3]), (blocks, kv_heads, dim, kernels.BLOCK), np.float32)
    values = carray(_pointer(a[4]), (blocks, kv_heads, kernels.BLOCK, dim), np.float32)
    out = carray(_pointer(a[5]), (rows, heads, dim), np.float32)
    items = carray(_pointer(a[6]), (a[1], 4), np.int32)
    tables = carray(_pointer(a[7]), (a[16],), np.int32)
    sequences = carray(_pointer(a[8]), (a[17], 3), np.int32)
    starts = carray(_pointer(a[9]), (rows + 1,), np.int32)
    ancestors = carray(_pointer(a[10]), (a[18],), np.int32)
    scale = carray(_pointer(a[19]), (1,), np.float32)[0]
    counter = a[20]
    while True:
        item = _take(counter)
        if item >= a[1]:
            break
        kernels.attend_item(item, items, query, keys, values, tables, sequences, starts, ancestors, a[21], scale, out)


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
    run(_attend, args)
    return out
