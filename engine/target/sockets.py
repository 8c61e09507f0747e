"""Folders for the Unix sockets of worker processes: this user's alone, and gone, at the latest, with somebody's next start.

A process that is killed leaves its folder behind. Whether a folder has an owner is said by a lock on a file inside, which the
system lets go of when the owner ends, however that happens; process numbers would say too little, since they are given again,
and containers that share a temporary folder do not share them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "draftloom-worker-"
_NAME = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")
"""What `mkdtemp` calls it."""
_LOCK = "lock"


class SocketFolder:
    """A folder of mode 0700 with room for one socket, until `remove`."""

    def __init__(self) -> None:
        """Make one in the temporary folder, and remove those there that nobody has any more. Raises OSError."""
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # The lock gets its name when it is held: a folder without one is just being made.
        handle, name = tempfile.mkstemp(dir=self.path)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.rename(name, self.path / _LOCK)
        self._lock: int | None = handle

    @property
    def address(self) -> str:
        """For gRPC."""
        return f"unix:{self.path / 'worker.sock'}"

    def remove(self) -> None:
        """Remove it with all that is in it. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(root: Path) -> None:
    """Remove the folders of this user's whose owner is gone. What cannot be looked at is left to whoever can."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    """Raises OSError for a folder that is locked, or has no lock."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) != 0o700:
        return
    lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
