"""Parquet files: a text or a conversation in each row, as `records.py` has it in each line.

They are read by pyarrow (`draftloom[parquet]`), and only where they are named. A row is an entry of its own, called by its
number: `chats.parquet#17`, from 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from corpora.decisions import Decision, Reason
from corpora.errors import InvalidOptions
from corpora.filter import Refusal, Text
from corpora.inputs import EncodeChat, Entry, fault_of, file_named, refused
from corpora.inputs.records import FIELDS, read_record
from corpora.options import BuildOptions
from corpora.walk import printable, stamp_of

ENDINGS = (".parquet", ".parq")
BATCH_ROWS = 256


def open_source(spec: str, prefix: str, options: BuildOptions, encode_chat: EncodeChat | None) -> TableSource | None:
    """The source, None if `spec` is no file of such a name. Raises InvalidOptions where pyarrow is not installed."""
    path = file_named(spec, ENDINGS)
    if path is None:
        return None
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InvalidOptions(f"reading Parquet needs pyarrow: {spec}; pip install 'draftloom[parquet]'") from None
    return TableSource(str(path), path, prefix.rstrip("/") or printable(path.name), options, encode_chat)


@dataclass(frozen=True)
class TableSource:
    """The rows of a Parquet file; entries are called `name`#row."""

    spec: str
    path: Path
    name: str
    options: BuildOptions
    encode_chat: EncodeChat | None
    streamed = True
    resolved = ""

    def entries(self) -> Iterator[Entry]:
        """In the file's order. Only the one column is read, a few hundred rows at a time."""
        import pyarrow
        import pyarrow.parquet

        try:
            stamp = stamp_of(self.path.stat())
            with pyarrow.parquet.ParquetFile(self.path) as file:
                columns = file.schema_arrow.names
                wanted = [self.options.field] if self.options.field else list(FIELDS)
                field = next((field for field in wanted if field in columns), None)
                if field is None:
                    said = f"no column {' or '.join(wanted)}, only {', '.join(columns)}"
                    yield refused(self.path, self.name, Reason.MALFORMED, said)
                    return
                number = 0
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[field]):
                    for row in batch.to_pylist():
                        number += 1
                        size = _text_size(row)
                        at = Decision(self.path / str(number), f"{self.name}#{number}", True, num_bytes=size, stamp=stamp)
                        yield Entry(at, partial(self._read, row, size))
        except (OSError, pyarrow.ArrowException) as error:
            yield refused(self.path, self.name, Reason.UNREADABLE, fault_of(error))

    def _read(self, row: dict[str, Any], size: int) -> Text | Refusal:
        if size > self.options.max_file_size:
            return Refusal(Reason.TOO_LARGE, f"{size:,} bytes")
        return read_record(row, size, self.options, self.encode_chat)


def _text_size(value: Any) -> int:
    """How many bytes of text there are in a value, in lists and mappings too."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    return sum(map(_text_size, value)) if isinstance(value, list) else 0
