"""What is in memory of a mapped file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from retriever import pages
from retriever.datastore import Datastore
from tests.retriever.conftest import Build


def forget(path: Path) -> None:
    """Let the system drop a file's pages, which it does unless they are mapped."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_pages_come_and_go(tmp_path: Path) -> None:
    """A file just dropped is not in memory, one page of it may be, and all of it is once it was read in."""
    path = tmp_path / "file"
    path.write_bytes(bytes(50 * mmap.PAGESIZE + 5))
    forget(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        array = np.frombuffer(mapping, np.uint8)[64:]
        if pages.resident(array):
            pytest.skip("this file system keeps files in memory")
        pages.populate(array, lambda: False)
        assert not pages.resident(array)
        pages.populate(array)
        assert pages.resident(array)
        assert pages.resident(array[5 * mmap.PAGESIZE :])
        del array


def test_nothing_is_in_memory() -> None:
    """An empty array is there, and can be read in."""
    pages.populate(np.zeros(0, np.uint8))
    assert pages.resident(np.zeros(0, np.uint8))


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the calls everything counts as being in memory."""
    monkeypatch.setattr(pages, "_libc", object())
    pages.populate(np.zeros(9, np.uint8))
    assert pages.resident(np.zeros(9, np.uint8))


def test_a_datastore_is_read_in(build: Build) -> None:
    """What lookups read is there after `populate`, and lookups in no time at all answer nothing."""
    path = build([list(range(100)) * 50]).path
    for file in path.iterdir():
        forget(file)
    with Datastore.open(path) as store:
        store.populate()
        assert store.resident()
        assert len(store.lookup(np.arange(3, dtype=np.int32), 8, seconds=0)) == 0
        assert len(store.lookup(np.arange(3, dtype=np.int32), 8, seconds=3600)) == 8
