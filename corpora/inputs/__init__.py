"""Where documents come from: each kind of input is one file here, behind one small interface.

    folder.py      folders and files, as `walk.py` finds them
    revision.py    a git repository at a revision: `path@revision`
    archive.py     zip and tar files, read without unpacking
    records.py     JSON lines: a text or a conversation each
    tables.py      Parquet: the same, a row each

A `Source` lists entries: names and sizes, each with a decision made by these alone. Looking inside (`Entry.load`) is for who
wants the content, so what has not changed since the last time need not be read. `corpora.survey` puts all of it together.

To add an input: a file with `open_source(path, prefix, options, encode_chat)`, which returns a Source or None if the path is
none of its kind, and its line in `_KINDS`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from corpora.decisions import Decision, Reason
from corpora.errors import InvalidOptions, SourceNotFound
from corpora.filter import Refusal, Text
from corpora.options import BuildOptions

_KINDS = ("revision", "archive", "records", "tables", "folder")
"""Modules, in the order in which they are asked; the last takes every path that exists."""

EncodeChat = Callable[[Sequence[Mapping[str, Any]]], NDArray[np.int32]]
"""Messages to ids, as the model's chat template writes them. Raises ValueError for messages that the template refuses."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, or one record of a file of records.

    1. `decision.taken` means: worth a look inside. `decision.stamp` tells versions of the content apart without reading it.
    2. `load` reads it: bytes of a file as it lies there, or text and conversations which the input has decoded itself. Of a
       source that is `streamed` it works only until the next entry is asked for. Never raises OSError.
    """

    decision: Decision
    load: Callable[[], bytes | Text | Refusal]


class Source(Protocol):
    """Something to index."""

    @property
    def spec(self) -> str:
        """What to give to find it again, from any folder."""

    @property
    def streamed(self) -> bool:
        """Whether entries are found only by reading through all that lies before them."""

    @property
    def resolved(self) -> str:
        """What `spec` stood for when it was opened (a commit's id), "" where it says it all."""

    def entries(self) -> Iterator[Entry]:
        """Everything in it, in an order that depends on its content alone."""


def open_sources(specs: Sequence[str], options: BuildOptions, encode_chat: EncodeChat | None = None) -> list[Source]:
    """The sources that `specs` (paths, or `path@revision`) name; nothing of them is read yet.

    With several, names begin with the last part of the path they were found under. `encode_chat` is needed if `options.chat`.
    Raises SourceNotFound for one that is not there, InvalidOptions.
    """
    options.validate()
    kinds = [importlib.import_module(f"corpora.inputs.{kind}").open_source for kind in _KINDS]
    if options.chat and encode_chat is None:
        raise InvalidOptions("a chat template needs a model: chat; name the model whose template to use")
    sources, prefixes = list[Source](), set[str]()
    for spec in specs:
        prefix = _prefix(spec, prefixes) if len(specs) > 1 else ""
        source = next((found for kind in kinds if (found := kind(spec, prefix, options, encode_chat))), None)
        if source is None:
            raise SourceNotFound(f"path to index cannot be used: {spec}; check its spelling")
        sources.append(source)
    return sources


def file_named(spec: str, endings: tuple[str, ...]) -> Path | None:
    """The absolute path of the file `spec` if its name ends so, whatever its case; else None."""
    path = Path(os.path.abspath(spec))
    return path if path.name.lower().endswith(endings) and path.is_file() else None


def refused(path: Path, name: str, reason: Reason, detail: str) -> Entry:
    """The entry that stands for an input as a whole, or for the rest of it, where there is no going on."""
    return Entry(Decision(path, name, False, reason, detail), partial(Refusal, reason, detail))


def fault_of(error: BaseException) -> str:
    """What an error says; its kind where it says nothing."""
    return str(error) or type(error).__name__


def _prefix(spec: str, taken: set[str]) -> str:
    """What names below `spec` begin with: its last part, numbered if another source has it."""
    base = Path(spec).resolve().name or "root"
    name = next(name for n in range(1, len(taken) + 2) if (name := base if n == 1 else f"{base}~{n}") not in taken)
    taken.add(name)
    return f"{name}/"
