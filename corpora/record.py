"""What a version remembers of where it came from, so that an update reads only what changed.

It travels in the version, as the `metadata` of `retriever.format`: JSON lines, compressed with zlib, one for each entry of the
sources (`survey.Found`), and a last one about the whole.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpora.decisions import Reason
from corpora.survey import Found, Tally

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Record:
    """What is remembered of a survey.

    1. `skipped` counts what was left out, and copies, by reason; `endings` has (files, bytes) taken by name ending.
    2. `entries` are those that can be known again, without their documents; two of one name may be among them.
    3. `checksum` is `Tokenizer.checksum` of what tokenized them, "" if an earlier release did.
    """

    skipped: Mapping[Reason, int] = field(default_factory=dict)
    endings: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    entries: tuple[Found, ...] = ()
    checksum: str = ""

    @property
    def known(self) -> dict[str, Found]:
        """The entries by name, without those that share theirs."""
        names: dict[str, Found | None] = {}
        for found in self.entries:
            name = found.decision.name
            names[name] = None if name in names else found
        return {name: found for name, found in names.items() if found is not None}

    @staticmethod
    def read(folder: Path) -> Record | None:
        """The record of the version in `folder`; None if it has none that this release understands.

        Raises retriever.errors.FormatError where the version cannot be read.
        """
        from retriever.format import read_metadata

        data = read_metadata(folder)
        try:
            *lines, about, _ = zlib.decompress(data).split(b"\n")
            values = json.loads(about)
            return Record(
                {Reason(name): count for name, count in values["skipped"].items()},
                {ending: (count, size) for ending, (count, size) in values["endings"].items()},
                tuple(map(Found.from_json, json.loads(b"[%s]" % b",".join(lines)))),
                values.get("checksum", ""),
            )
        except (zlib.error, ValueError, KeyError, TypeError):
            return None


class Recorder:
    """Writes down what a survey finds as it goes along; `dump` when it is over. O(1) memory an entry, some 60 bytes."""

    def __init__(self) -> None:
        self._compressor = zlib.compressobj(1)
        self._parts: list[bytes] = []

    def add(self, entries: Iterable[Found]) -> None:
        """Write down those whose content may be known again."""
        self._write(found.to_json() for found in entries if found.decision.stamp or found.digest)

    def dump(self, tally: Tally, checksum: str) -> bytes:
        """All of it, as bytes to store, with the checksum of the tokenizer. Once."""
        self._write([{"skipped": tally.reasons, "endings": tally.endings, "checksum": checksum}])
        return b"".join([*self._parts, self._compressor.flush()])

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(f"{_JSON.encode(row)}\n" for row in rows)
        self._parts.append(self._compressor.compress(lines.encode("utf-8", "surrogateescape")))
