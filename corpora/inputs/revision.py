"""A git repository, or a folder of one, at a revision: `path@revision`.

Git lists the tree and hands out blobs as they were committed, so no work tree is needed and none is touched, and nothing that
the repository configures (filters, hooks, remotes) is run. Ignore files do not count: what was committed was meant to be there.
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from corpora.decisions import Decision, Reason
from corpora.errors import SourceNotFound
from corpora.filter import Refusal
from corpora.git import COMMAND, environment, run_git
from corpora.inputs import EncodeChat, Entry
from corpora.options import BuildOptions
from corpora.walk import NameRules, printable

_LINK, _SUBMODULE = "120000", "160000"


def open_source(spec: str, prefix: str, options: BuildOptions, encode_chat: EncodeChat | None) -> RevisionSource | None:
    """The source, None if `spec` is no `folder@revision`. Raises SourceNotFound for a revision that is not there."""
    if os.path.lexists(spec):
        return None
    cuts = [i for i, c in enumerate(spec) if c == "@"]
    cut = next((i for i in reversed(cuts) if i and os.path.isdir(spec[:i])), None)
    if cut is None:
        return None
    folder, revision = Path(os.path.abspath(spec[:cut])), spec[cut + 1 :]
    found = run_git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not found:
        raise SourceNotFound(f"no such revision here: {spec}; give a commit, branch or tag of a git repository")
    return RevisionSource(folder, revision, found.decode().strip(), prefix, options)


class RevisionSource:
    """The files of one commit at or below a folder; names begin with `prefix`."""

    streamed = False

    def __init__(self, folder: Path, revision: str, commit: str, prefix: str, options: BuildOptions) -> None:
        self.spec = f"{folder}@{revision}"
        self.resolved = commit
        self._folder = folder
        self._prefix = prefix
        self._options = options
        self._blobs = _Blobs(folder)

    def entries(self) -> Iterator[Entry]:
        """In git's order, that of the names' bytes. Raises SourceNotFound if the repository cannot be listed (any more)."""
        listing = run_git(self._folder, "ls-tree", "-r", "-z", "--long", self.resolved)
        if listing is None:
            raise SourceNotFound(f"git cannot list the revision: {self.spec}; run `git fsck` there")
        rules = NameRules.of(self._options)
        left_out = ""
        for line in filter(None, listing.split(b"\0")):
            facts, _, raw_name = line.partition(b"\t")
            mode, _, blob, size = facts.decode().split()
            name = printable(os.fsdecode(raw_name))
            if left_out and name.startswith(left_out):
                continue
            refused = rules.refuse(name)
            if refused and refused[0].endswith("/"):
                left_out = refused[0]
            yield self._entry(name, mode, blob, int(size) if size.isdigit() else 0, refused)

    def _entry(self, name: str, mode: str, blob: str, size: int, refused: tuple[str, Reason] | None) -> Entry:
        detail = ""
        if mode == _SUBMODULE:
            refused, size = (name, Reason.SUBMODULE), 0
        elif mode == _LINK and not refused:
            refused, size = (name, Reason.SYMLINK), 0
        elif not refused and size > self._options.max_file_size:
            refused, detail = (name, Reason.TOO_LARGE), f"{size:,} bytes"
        name, reason = refused or (name, None)
        if name.endswith("/"):
            size = 0
        path = Path(f"{self.spec}/{name}")
        decision = Decision(path, self._prefix + name, reason is None, reason, detail, size, stamp=blob)
        return Entry(decision, partial(self._blobs.read, blob))


class _Blobs:
    """One `git cat-file --batch`, begun when it is first asked, ended when it is no longer referred to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, blob: str) -> bytes | Refusal:
        """A blob's bytes; a Refusal if the repository lacks it."""
        try:
            return self._read(blob)
        except (OSError, ValueError) as error:
            return Refusal(Reason.UNREADABLE, f"git cannot read {blob}: {error}")

    def _read(self, blob: str) -> bytes:
        if self._process is None:
            self._process = subprocess.Popen(
                [*COMMAND, "cat-file", "--batch"],
                cwd=self._folder,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _end, self._process)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{blob}\n".encode())
        stdin.flush()
        header = stdout.readline().split()
        if len(header) != 3:
            raise ValueError(b" ".join(header[1:]).decode() or "it ended")
        size = int(header[2])
        data = stdout.read(size + 1)
        if len(data) != size + 1:
            raise ValueError("it ended")
        return data[:-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
