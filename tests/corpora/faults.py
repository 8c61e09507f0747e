"""A disk that fails: the n-th write, sync, rename, map or SQLite call of a piece of work raises, for tests to sweep over n."""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Faults:
    """Counts operations on files below `root` (and all SQLite calls), and fails number `fail_at`, from 0; None fails none.

    After the first failure nothing else fails, as on a disk that was full for a moment; `sticky` has all later ones fail, too,
    as on one that was unplugged. `log` has the kind of every operation.
    """

    def __init__(self, root: Path, fail_at: int | None, *, sticky: bool = False) -> None:
        self.root = str(root)
        self.fail_at = fail_at
        self.sticky = sticky
        self.log: list[str] = []

    def step(self, kind: str, make_error: Callable[[], Exception]) -> None:
        number = len(self.log)
        self.log.append(kind)
        if self.fail_at is not None and (number == self.fail_at or (self.sticky and number > self.fail_at)):
            raise make_error()

    def disk(self, kind: str, *where: Any) -> None:
        if any(str(path).startswith(self.root) for path in map(_path_of, where)):
            self.step(kind, lambda: OSError(errno.ENOSPC, "No space left on device"))

    def sqlite(self, kind: str) -> None:
        self.step(kind, lambda: _sqlite_error())


def _path_of(where: Any) -> str:
    if isinstance(where, int):
        try:
            return os.readlink(f"/proc/self/fd/{where}")
        except OSError:
            return ""
    return os.fsdecode(os.fspath(where))


def _sqlite_error() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    return error


@contextmanager
def failing(faults: Faults) -> Iterator[Faults]:
    """Have the operations of this process go through `faults`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir"):
            patch.setattr(os, name, _counted(getattr(os, name), faults, name))
        patch.setattr(mmap, "mmap", _counted(mmap.mmap, faults, "mmap"))
        patch.setattr(builtins, "open", _opening(builtins.open, faults))
        patch.setattr(io, "open", _opening(io.open, faults))
        patch.setattr(sqlite3, "connect", _connecting(sqlite3.connect, faults))
        yield faults


def _counted(original: Callable[..., Any], faults: Faults, kind: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if options.get("dir_fd") is None:
            faults.disk(kind, *(a for a in arguments[:2] if isinstance(a, int | str | bytes | os.PathLike)))
        return original(*arguments, **options)

    return call


def _opening(original: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    def call(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        opened = original(file, mode, *arguments, **options)
        if not isinstance(file, int) and set(mode) & set("wxa+") and _path_of(file).startswith(faults.root):
            return _Writing(opened, faults, file)
        return opened

    return call


class _Writing:
    """A file whose writes are counted."""

    def __init__(self, file: Any, faults: Faults, path: Any) -> None:
        self._file, self._faults, self._path = file, faults, path

    def write(self, data: Any) -> Any:
        self._faults.disk("write", self._path)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Writing:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)


def _connecting(original: Callable[..., Any], faults: Faults) -> Callable[..., Any]:
    class Connection(sqlite3.Connection):
        """Every statement and commit is counted; a rollback always works, as it is the system that does it after a crash."""

        def execute(self, sql: str, *arguments: Any) -> Any:
            if not sql.upper().startswith("ROLLBACK"):
                faults.sqlite("commit" if sql.upper().startswith("COMMIT") else "sql")
            return super().execute(sql, *arguments)

        def commit(self) -> None:
            faults.sqlite("commit")
            super().commit()

    def call(*arguments: Any, **options: Any) -> Any:
        faults.sqlite("connect")
        return original(*arguments, **{"factory": Connection, **options})

    return call
