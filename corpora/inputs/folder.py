"""Folders and files as they lie on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from corpora.filter import read_file
from corpora.inputs import EncodeChat, Entry
from corpora.options import BuildOptions
from corpora.walk import real_path, walk


def open_source(spec: str, prefix: str, options: BuildOptions, encode_chat: EncodeChat | None) -> FolderSource:
    """A folder, or a file that is no other kind of input. Raises SourceNotFound."""
    return FolderSource(os.path.abspath(spec), real_path(Path(spec)), prefix, options)


@dataclass(frozen=True)
class FolderSource:
    """What `walk` finds below a real path; names begin with `prefix`, that of a file is it."""

    spec: str
    root: Path
    prefix: str
    options: BuildOptions
    streamed = False
    resolved = ""

    def entries(self) -> Iterator[Entry]:
        """Depth first, in the order of the names' bytes."""
        is_folder = self.root.is_dir()
        for decision in walk(self.root, self.prefix if is_folder else "", self.options):
            if self.prefix and not is_folder:
                decision = replace(decision, name=self.prefix.rstrip("/"))
            yield Entry(decision, partial(read_file, decision.path, self.options.max_file_size))
