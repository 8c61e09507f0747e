"""Which pages of a mapped file are in memory, and reading in those that are not.

A mapped page that is not in memory holds up whoever touches it until the disk has answered. These calls go to the system
without the GIL. Where it has no such calls (they are Linux's and the BSDs'), everything counts as being in memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_POPULATE_READ = 22
"""Linux 5.14: read the pages in and map them."""
_CHUNK = 1 << 26
_libc = ctypes.CDLL(None, use_errno=True)


def resident(array: NDArray[Any]) -> bool:
    """Whether all of a mapped array is in memory. Some 10 microseconds a megabyte.

    Linux tells only those who may write the file; to others everything is in memory.
    """
    return all(_in_memory(address, size) for address, size in _chunks(array))


def populate(array: NDArray[Any], proceed: Callable[[], bool] = lambda: True) -> None:
    """Read a mapped array (one-dimensional) into memory, as long as `proceed` says so, asked every 64 MB. Waits for the disk.

    Then a byte of every page is looked at. In a virtual machine the host notices only at the first access that a page has got
    contents, and the lookups that came first would pay for that: they took two to five times as long.
    """
    data, begin = array.view(np.uint8), array.ctypes.data
    for address, size in _chunks(array):
        if not proceed():
            return
        _call("madvise", address, size, _POPULATE_READ)
        np.bitwise_or.reduce(data[max(address - begin, 0) : address + size - begin : mmap.PAGESIZE])  # without the GIL


def _in_memory(address: int, size: int) -> bool:
    flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    if not _call("mincore", address, size, ctypes.c_void_p(flags.ctypes.data)):
        return True
    return bool(np.all(flags & 1))


def _call(name: str, address: int, size: int, argument: Any) -> bool:
    """Whether the system has the call and took it."""
    function = getattr(_libc, name, None)
    return function is not None and function(ctypes.c_void_p(address), ctypes.c_size_t(size), argument) == 0


def _chunks(array: NDArray[Any]) -> list[tuple[int, int]]:
    """(address, size) of the array in pieces that begin with a page."""
    begin = array.ctypes.data & -mmap.PAGESIZE
    end = array.ctypes.data + array.nbytes
    return [(at, min(_CHUNK, end - at)) for at in range(begin, end, _CHUNK)] if array.nbytes else []
