"""Folders for sockets: private, locked while they are in use, and swept up after the dead."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.target.sockets import SocketFolder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def killed(root: Path) -> Path:
    """The folder of a process that was killed while it had one."""
    code = (
        "import os, signal, tempfile\n"
        "from engine.target.sockets import SocketFolder\n"
        f"tempfile.tempdir = {str(root)!r}\n"
        "folder = SocketFolder()\n"
        "(folder.path / 'worker.sock').touch()\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    return Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())


def test_a_folder_is_private_and_goes(temporary: Path) -> None:
    """Nobody else may look inside; removing it twice does no harm."""
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700 and folder.path.parent == temporary
    assert folder.address == f"unix:{folder.path}/worker.sock"
    folder.remove()
    folder.remove()
    assert not list(temporary.iterdir())


def test_what_a_killed_process_left_is_removed_and_no_more(temporary: Path) -> None:
    """The next start removes the folder of the dead, and leaves that of the living."""
    living = SocketFolder()
    dead = killed(temporary)
    assert dead.is_dir()
    mine = SocketFolder()
    assert set(temporary.iterdir()) == {living.path, mine.path}
    living.remove()
    mine.remove()


def test_only_what_is_surely_ours_is_removed(temporary: Path) -> None:
    """Not a folder of another name or mode, one without a lock, a link in the place of a folder or of its lock, or a file."""
    elsewhere = temporary / "elsewhere"
    for name, mode in (("elsewhere", 0o700), ("draftloom-worker-aaaaaaaa", 0o755), ("draftloom-worker-longer-name", 0o700)):
        (temporary / name).mkdir()
        (temporary / name / "lock").touch()
        (temporary / name).chmod(mode)
    (temporary / "draftloom-worker-bbbbbbbb").mkdir(mode=0o700)
    (temporary / "draftloom-worker-cccccccc").symlink_to(elsewhere)
    (temporary / "draftloom-worker-dddddddd").mkdir(mode=0o700)
    (temporary / "draftloom-worker-dddddddd" / "lock").symlink_to(elsewhere / "lock")
    (temporary / "draftloom-worker-eeeeeeee").touch(mode=0o700)
    before = set(temporary.rglob("*"))
    SocketFolder().remove()
    assert set(temporary.rglob("*")) == before
