"""A corpus version on disk: its writer and its reader, side by side.

    <root>/<corpus>/versions/<id>/
        manifest.json            written last; what the version is, and size and checksum of every other file
        seg-0000.tokens          token ids, big-endian, 1 to 4 bytes each; every document ends with the separator, all bytes 255
        seg-0000.suffixes        int32, the positions of all tokens (not the separators), sorted by the text that starts there
        seg-0000.documents       where each document begins and what it is called
        seg-0000.table           intervals of the most frequent contexts of 1 to 3 tokens (a hash table, see `kernels`)
        seg-0000.continuations   what most often follows the most frequent contexts of 1 and 2 tokens
        seg-0000.samples         the first bytes of every 256th suffix of the order
        seg-0000.deleted         only where documents were deleted: which, and which places of the order are left
        seg-0001.tokens ...      more segments, each complete in itself; counts add
        metadata                 only where the writer had some: bytes that mean nothing here

Every file but the manifest begins with 64 bytes that introduce it. Numbers are little-endian.

     0         8         12    16    20    24              32              40              48              56              64
     +---------+---------+-----+-----+-----+---------------+---------------+---------------+---------------+---------------+
     | magic   | version |kind |dtype|  0  |     count     | second count  | payload bytes | payload xxh3  |  header xxh3  |
     +---------+---------+-----+-----+-----+---------------+---------------+---------------+---------------+---------------+
       8 bytes    u32     4 ch. 4 ch.  u32        u64             u64             u64             u64       u64, bytes 0..55

    kind   dtype        count                     second count     payload
    toks   u1be..u4be   tokens and separators     documents        count items
    sufx   i4le         suffixes                  0                count items
    docs   i8le         documents                 name bytes       count + 1 offsets into the text, count + 1 offsets into the
                                                                   names, then the names, UTF-8
    tabl   u4le         3 * slots                 contexts         count items
    cont   u4le         4 * contexts + 3 * runs   contexts         contexts by place and length: low, count, length, end of its
                                                                   runs; then the runs: next token, low, count
    smpl   u8le         2 * samples               256              count items, 16 bytes each as two numbers, first byte highest
    tomb   u8le         suffixes                  left of them     one bit a suffix of the order, 1 if its document is left, in
                                                                   count / 64 words; for each 8 words how many are left before
                                                                   them; one bit a document, 1 if it was deleted, in words
    meta   u1le         bytes                     0                count items

The manifest is JSON with sorted keys; its member `checksum` is the xxh3 of the rest, so an altered one is noticed. A version is
written into `<id>.tmp`, forced to disk and renamed; it exists whole or not at all, and never changes afterwards.

Segments never change either: a version made from another one (`update.write_update`) shares their files by hard links, and adds
segments for what is new and a file `deleted` where documents are gone.

Format 1 had neither `deleted` nor `metadata`, formats 1 and 2 had neither `continuations` nor `samples`; their files are
otherwise the same, and are read for ever. An update shares them, so a segment may lack the latter two.

Bytes a token: width + 4 + at most 0.89 (0.75 table, 0.08 continuations, 0.06 samples) + the documents' names. Checksums are
XXH3-64: against damage, not against forgery.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from retriever import plain
from retriever.errors import BadMagic, BadManifest, ChecksumMismatch, Truncated, UnsupportedVersion, VersionExists
from retriever.suffixes import KERNEL_TOKENS, build_suffix_array, pack_tokens, separator_of, token_width, unpack_tokens

FORMAT_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)
MAGIC = b"\x89LOOM\r\n\x1a"
HEADER = struct.Struct("<8sI4s4sIQQQQQ")
SEGMENT_TOKENS = 1 << 26
"""Tokens of a segment before the next one is begun; the format has room for 2^31 - 1. See `segment_tokens_for`."""
MANIFEST = "manifest.json"
SMALL_FILE = 1 << 20
"""Payloads of at most so many bytes are compared with their checksums whenever they are opened."""
KINDS: Mapping[str, bytes] = {"tokens": b"toks", "suffixes": b"sufx", "documents": b"docs", "table": b"tabl"}
"""Ending of a segment's file -> the kind its header must have; every segment has these."""
HINTS: Mapping[str, bytes] = {"continuations": b"cont", "samples": b"smpl"}
"""The same of files that make lookups faster and better; segments written before format 3 have none."""
DELETED = "deleted"
"""Ending of the file that says what was deleted from a segment."""
METADATA = "metadata"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TABLE_MIN_COUNT = 8
_CONTINUED_MIN_COUNT = 128
"""Fewer occurrences are all looked at, or nearly all."""
_CONTINUATION_BYTES = 0.08
"""Most that `continuations` takes of a token."""
_CHUNK = 1 << 22
_READABLE = f"this release reads {', '.join(map(str, READABLE_VERSIONS))}"

OnProgress = Callable[[str, int], None]
"""Called with a stage ("read", "sort", "write") and how many tokens have been through it in all."""


# Files


@dataclass(frozen=True)
class Header:
    """What the first 64 bytes of a file say."""

    kind: bytes
    dtype: bytes
    count: int
    second_count: int
    payload_bytes: int
    payload_checksum: int

    def pack(self) -> bytes:
        """The 64 bytes."""
        body = HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.kind,
            self.dtype,
            0,
            self.count,
            self.second_count,
            self.payload_bytes,
            self.payload_checksum,
            0,
        )[:-8]
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def write_file(path: Path, kind: bytes, dtype: bytes, count: int, second_count: int, parts: Iterable[Any]) -> FileEntry:
    """Write a header and the bytes of `parts` (C-contiguous arrays or bytes) and force them to disk.

    Returns what the manifest says of the file. Raises FileExistsError if there is one, OSError where it cannot be written.
    """
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    header = Header(kind, dtype, count, second_count, sum(len(v) for v in views), digest.intdigest())
    with open(path, "xb") as file:
        file.write(header.pack())
        for view in views:
            file.write(view)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(HEADER.size + header.payload_bytes, f"{header.payload_checksum:016x}")


def read_header(path: Path, data: bytes | memoryview, size: int) -> Header:
    """The header in `data`, the first bytes of the file `path` of `size` bytes.

    Raises BadMagic, UnsupportedVersion, ChecksumMismatch (header altered) or Truncated (size differs from what the header
    says).
    """
    start = bytes(data[: len(MAGIC)])
    if not MAGIC.startswith(start):
        raise BadMagic(path, f"not a file of a draftloom corpus, it begins with {start!r}")
    if len(data) < HEADER.size:
        raise Truncated(path, f"file is truncated, {size} bytes where the header alone takes {HEADER.size}")
    _, version, kind, dtype, _, count, second_count, payload_bytes, checksum, own = HEADER.unpack(data[: HEADER.size])
    if own != xxhash.xxh3_64_intdigest(data[: HEADER.size - 8]):
        if version not in READABLE_VERSIONS:
            raise UnsupportedVersion(path, f"format version {version} or an altered header, {_READABLE}")
        raise ChecksumMismatch(path, "header was altered")
    if version not in READABLE_VERSIONS:
        raise UnsupportedVersion(path, f"format version {version}, {_READABLE}")
    if size != HEADER.size + payload_bytes:
        raise Truncated(path, f"file has {size} bytes where its header says {HEADER.size + payload_bytes}")
    return Header(kind, dtype, count, second_count, payload_bytes, checksum)


@dataclass(frozen=True)
class MappedFile:
    """A file mapped read-only whose header has been verified; `payload`, uint8, is what follows the header."""

    path: Path
    header: Header
    mapping: mmap.mmap
    payload: NDArray[np.uint8]

    @staticmethod
    def open(path: Path, kind: bytes, entry: FileEntry) -> MappedFile:
        """Map it, after size, header and manifest entry have been found to agree. The payload's checksum is for `damaged`."""
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = read_header(path, file.read(HEADER.size), size)
                if size != entry.size:
                    raise Truncated(path, f"file has {size} bytes where the manifest says {entry.size}")
                if header.kind != kind:
                    raise BadManifest(path, f"file is of kind {header.kind!r} where {kind!r} belongs")
                if f"{header.payload_checksum:016x}" != entry.checksum:
                    raise ChecksumMismatch(path, "file is not the one the manifest lists")
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise BadManifest(path, "file is missing") from None
        return MappedFile(path, header, mapping, np.frombuffer(mapping, np.uint8)[HEADER.size :])

    @property
    def entry(self) -> FileEntry:
        """What a manifest says of it."""
        return FileEntry(HEADER.size + self.header.payload_bytes, f"{self.header.payload_checksum:016x}")

    @property
    def small(self) -> bool:
        """Whether reading all of it takes no time worth mentioning."""
        return len(self.payload) <= SMALL_FILE

    def altered(self) -> bool:
        """`damaged`, but of the file as it lies on disk, not of the mapping. Raises OSError."""
        digest = xxhash.xxh3_64()
        with open(self.path, "rb", buffering=0) as file:
            file.seek(HEADER.size)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.intdigest() != self.header.payload_checksum

    def damaged(self) -> bool:
        """Whether the payload differs from what was written. Reads all of it."""
        digest = xxhash.xxh3_64()
        for begin in range(0, len(self.payload), _CHUNK):
            digest.update(self.payload[begin : begin + _CHUNK].data)
        return digest.intdigest() != self.header.payload_checksum

    def refuse_damage(self) -> None:
        """Raise ChecksumMismatch if it is `damaged`."""
        if self.damaged():
            raise ChecksumMismatch(self.path, "content was altered")


# The manifest


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and payload checksum (16 hex digits) of one file."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What a version is.

    1. `files` has the four files of every segment, seg-0000 to seg-<num_segments - 1>, from format 2 on perhaps metadata and
       what was deleted from some of them, from format 3 on perhaps the hints of some of them, and no others.
    2. `fingerprint` names the tokenizer; token ids are below `vocab_size`.
    3. `num_documents` and `num_tokens` leave out what was deleted, and tokens the separators; `num_text_bytes` is what the
       caller counted, 0 if it did not.
    """

    corpus: str
    version: str
    created: str
    fingerprint: str
    vocab_size: int
    num_segments: int
    num_documents: int
    num_tokens: int
    num_text_bytes: int
    files: Mapping[str, FileEntry]
    sources: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    tool: str = ""
    format_version: int = FORMAT_VERSION

    def dump(self) -> bytes:
        """The JSON text, with its checksum."""
        fields = asdict(self)
        fields["sources"] = list(self.sources)
        fields["checksum"] = _manifest_checksum(fields)
        return (json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of the version in `folder`. Raises BadManifest, UnsupportedVersion or ChecksumMismatch."""
        path = folder / MANIFEST
        try:
            return Manifest.parse(path.read_bytes(), path)
        except FileNotFoundError:
            raise BadManifest(path, "there is no corpus version here, the manifest is missing") from None

    @staticmethod
    def parse(data: bytes, path: Path) -> Manifest:
        """The manifest that `data`, read from `path`, is. Raises BadManifest, UnsupportedVersion or ChecksumMismatch."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise BadManifest(path, f"manifest is no JSON text ({error})") from None
        if not isinstance(fields, dict) or "format_version" not in fields or "checksum" not in fields:
            raise BadManifest(path, "manifest is no JSON object with a format version and a checksum")
        if fields["format_version"] not in READABLE_VERSIONS:
            raise UnsupportedVersion(path, f"format version {fields['format_version']}, {_READABLE}")
        if fields.pop("checksum") != _manifest_checksum(fields):
            raise ChecksumMismatch(path, "manifest was altered")
        try:
            fields["files"] = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
            fields["sources"] = tuple(fields["sources"])
            manifest = Manifest(**fields)
        except (TypeError, AttributeError, KeyError) as error:
            raise BadManifest(path, f"manifest has other members than this format ({error})") from None
        if type(manifest.num_segments) is not int or not 0 <= manifest.num_segments <= len(manifest.files):
            raise BadManifest(path, f"manifest lists other files than those of its {manifest.num_segments} segments")
        expected = {name for s in range(manifest.num_segments) for name in segment_files(s)}
        allowed = {METADATA} if manifest.format_version > 1 else set()
        for since, endings in ((2, [DELETED]), (3, HINTS)):
            if manifest.format_version >= since:
                allowed |= {segment_file(s, ending) for s in range(manifest.num_segments) for ending in endings}
        if not expected <= set(manifest.files) <= expected | allowed:
            raise BadManifest(path, f"manifest lists other files than those of its {manifest.num_segments} segments")
        return manifest


def _manifest_checksum(fields: Mapping[str, Any]) -> str:
    return f"{xxhash.xxh3_64_intdigest(json.dumps(fields, sort_keys=True).encode()):016x}"


def segment_file(segment: int, ending: str) -> str:
    """The name of a segment's file."""
    return f"seg-{segment:04d}.{ending}"


def segment_files(segment: int) -> list[str]:
    """The names of the four files that every segment has."""
    return [segment_file(segment, ending) for ending in KINDS]


def read_metadata(folder: Path) -> bytes:
    """What `write_version` or `write_update` was given as `metadata` for the version in `folder`; b"" if nothing.

    Opens nothing else of the version. Raises a FormatError naming the file.
    """
    entry = Manifest.read(folder).files.get(METADATA)
    if entry is None:
        return b""
    file = MappedFile.open(folder / METADATA, b"meta", entry)
    file.refuse_damage()
    return file.payload.tobytes()


# Writing a version


def version_path(root: Path, corpus: str, version_id: str) -> Path:
    """Where a version is. Raises ValueError for names that are no plain file names."""
    for what, name in (("corpus name", corpus), ("version id", version_id)):
        if not _NAME.fullmatch(name) or name.endswith(".tmp"):
            raise ValueError(
                f"{what} must be letters, digits, '.', '_' or '-', not begin with a sign nor end in .tmp: {name!r}"
            )
    return Path(root) / corpus / "versions" / version_id


def write_version(
    root: Path,
    corpus: str,
    version_id: str,
    documents: Iterable[tuple[str, NDArray[np.integer]]],
    *,
    fingerprint: str,
    vocab_size: int,
    options: Mapping[str, Any] | None = None,
    sources: Iterable[str] = (),
    num_text_bytes: int | Callable[[], int] = 0,
    metadata: bytes | Callable[[], bytes] = b"",
    segment_tokens: int = SEGMENT_TOKENS,
    on_progress: OnProgress | None = None,
) -> Path:
    """Write a version from `documents`, pairs of a name and token ids (integers [n], 0 <= id < vocab_size); return its folder.

    `options` (what JSON can hold), `sources` and `metadata` are only recorded; `read_metadata` gives the latter back.
    `num_text_bytes` and `metadata` may be functions, asked when all documents have been read. A segment ends before the
    document that would take it beyond `segment_tokens` (separators counted); a document is never split. Documents are read one
    at a time, so memory is that of one segment.

    The version appears whole, by a rename, or not at all: on any failure, also of `documents` or `on_progress`, what was
    written is removed and the exception goes on. Raises VersionExists; ValueError for bad names and for ids outside the
    vocabulary. Not safe against a second writer of the same version; the caller holds a lock. A `.tmp` left by a killed
    process is overwritten.
    """
    with VersionWriter(
        root, corpus, version_id, vocab_size=vocab_size, segment_tokens=segment_tokens, on_progress=on_progress
    ) as writer:
        recorded = dict(options or {})
        for name, tokens in documents:
            writer.add(name, tokens)
        writer.finish(
            fingerprint=fingerprint,
            options=recorded,
            sources=sources,
            num_text_bytes=num_text_bytes,
            metadata=metadata,
        )
    return writer.path


class VersionWriter:
    """A version on its way to disk. A context manager: what is not finished at its end, or fails, leaves nothing behind.

    `add` documents, `link` segments of another version, then `finish`. Memory: one segment.
    """

    def __init__(
        self,
        root: Path,
        corpus: str,
        version_id: str,
        *,
        vocab_size: int,
        segment_tokens: int = SEGMENT_TOKENS,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Raises VersionExists, ValueError for bad names."""
        self.path = version_path(root, corpus, version_id)
        if self.path.exists():
            raise VersionExists(f"this corpus version is published already: {self.path}; choose another version id")
        self.vocab_size = vocab_size
        self.segment_tokens = segment_tokens
        self.num_segments = 0
        self.num_documents = 0
        self.num_tokens = 0
        self._corpus = corpus
        self._width = token_width(vocab_size)
        self._files: dict[str, FileEntry] = {}
        self._report = on_progress or (lambda stage, num_tokens: None)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._segment = _Segment(self._width)
        self._finished = False

    def __enter__(self) -> VersionWriter:
        if self._temporary.exists():
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._finished:
            return
        with suppress(OSError):
            if self.path.exists():  # it was renamed, but that may not be on disk
                os.rename(self.path, self._temporary)
        shutil.rmtree(self._temporary, ignore_errors=True)

    @property
    def open_tokens(self) -> int:
        """Tokens and separators of the segment that is being filled."""
        return self._segment.size

    def add(self, name: str, tokens: NDArray[np.integer]) -> None:
        """One more document: token ids [n]. Raises ValueError for ids outside the vocabulary."""
        self._add(name, _packed(name, tokens, self.vocab_size, self._width), len(tokens))

    def add_packed(self, name: str, packed: NDArray[np.uint8]) -> None:
        """A document as it stands in the text of a segment of the same width, without its separator."""
        self._add(name, packed.data, len(packed) // self._width)

    def flush(self) -> None:
        """Write the segment that is being filled, if it has documents."""
        if self._segment.names:
            self._files.update(self._segment.write(self._temporary, self.num_segments, self._report, self.num_tokens))
            self.num_segments += 1
            self._segment = _Segment(self._width)

    def link(
        self,
        files: Mapping[str, MappedFile],
        num_documents: int,
        num_tokens: int,
        deleted: Sequence[NDArray[Any]] | None = None,
    ) -> None:
        """Take over a segment of another version: its files, by their endings, by hard links, or copies where the file system
        has none.

        `num_documents` and `num_tokens` count what is left of it, `deleted` is what `tombstones` made of the rest, where that
        is not among the files.
        """
        for ending, file in files.items():
            name = segment_file(self.num_segments, ending)
            _link(file.path, self._temporary / name)
            self._files[name] = file.entry
        if deleted is not None:
            name = segment_file(self.num_segments, DELETED)
            num_suffixes = files["suffixes"].header.count
            self._files[name] = write_file(self._temporary / name, b"tomb", b"u8le", num_suffixes, num_tokens, deleted)
        self.num_segments += 1
        self.num_documents += num_documents
        self.num_tokens += num_tokens

    def finish(
        self,
        *,
        fingerprint: str,
        options: Mapping[str, Any],
        sources: Iterable[str],
        num_text_bytes: int | Callable[[], int],
        metadata: bytes | Callable[[], bytes],
    ) -> None:
        """Write what is left, then the manifest; force it all to disk, and give the version its name."""
        num_text_bytes = num_text_bytes() if callable(num_text_bytes) else num_text_bytes
        metadata = metadata() if callable(metadata) else metadata
        if not self.num_segments and not self._segment.names:
            self._files.update(self._segment.write(self._temporary, 0, self._report, 0))
            self.num_segments = 1
        self.flush()
        if metadata:
            path = self._temporary / METADATA
            self._files[METADATA] = write_file(path, b"meta", b"u1le", len(metadata), 0, [metadata])
        manifest = Manifest(
            corpus=self._corpus,
            version=self.path.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            fingerprint=fingerprint,
            vocab_size=self.vocab_size,
            num_segments=self.num_segments,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            num_text_bytes=num_text_bytes,
            files=self._files,
            sources=tuple(sources),
            options=json.loads(json.dumps(dict(options))),
            tool=_tool(),
        )
        write_manifest(self._temporary, manifest)
        give_name(self._temporary, self.path)
        self._finished = True

    def _add(self, name: str, packed: Any, num_tokens: int) -> None:
        if self._segment.names and self._segment.size + num_tokens + 1 > self.segment_tokens:
            self.flush()
        self._segment.add(name, packed, num_tokens)
        self.num_documents += 1
        self.num_tokens += num_tokens
        self._report("read", self.num_tokens)


def _packed(name: str, tokens: NDArray[np.integer], vocab_size: int, width: int) -> memoryview:
    """Token ids as they stand on disk, after a look whether they are some."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"a document must be a row of integer token ids: {name!r} is {ids.dtype} of shape {ids.shape}")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"token ids must lie in [0, {vocab_size}): {name!r} has {ids.min()} to {ids.max()}; check the tokenizer"
        )
    return pack_tokens(ids, width).data


def _link(path: Path, link: Path) -> None:
    """A second name for a file, or a copy, forced to disk."""
    try:
        os.link(path, link)
    except OSError:
        with open(path, "rb") as source, open(link, "xb") as copy:
            shutil.copyfileobj(source, copy, _CHUNK)
            copy.flush()
            os.fsync(copy.fileno())


class _Segment:
    """Documents on their way to disk."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.names: list[bytes] = []
        self.offsets = [0]
        self.size = 0
        self._packed = bytearray()

    def add(self, name: str, packed: Any, num_tokens: int) -> None:
        """Append a document and its separator."""
        self._packed += packed
        self._packed += b"\xff" * self.width
        self.names.append(name.encode("utf-8", "surrogateescape"))
        self.size += num_tokens + 1
        self.offsets.append(self.size)

    def write(self, folder: Path, number: int, report: OnProgress, num_tokens: int) -> dict[str, FileEntry]:
        """Sort, build the tables, write the files."""
        width = self.width
        text = np.frombuffer(self._packed, np.uint8)
        order = build_suffix_order(text, width)
        report("sort", num_tokens)
        frequent = find_frequent(text, width, order)
        table, num_contexts = build_table(text, width, order, frequent)
        contexts, runs = build_continuations(text, width, order, frequent)
        samples = plain.sample_order(text, width, order)
        names = b"".join(self.names)
        name_offsets = np.cumsum([0] + [len(name) for name in self.names], dtype=np.int64)
        docs = [np.asarray(self.offsets, np.int64), name_offsets, names]
        files: dict[str, tuple[bytes, int, int, list[Any]]] = {
            "tokens": (b"u%dbe" % width, self.size, len(self.names), [text]),
            "suffixes": (b"i4le", len(order), 0, [order]),
            "documents": (b"i8le", len(self.names), len(names), docs),
            "table": (b"u4le", table.size, num_contexts, [table]),
            "continuations": (b"u4le", contexts.size + runs.size, len(contexts), [contexts, runs]),
            "samples": (b"u8le", samples.size, plain.SAMPLE_STRIDE, [samples]),
        }
        kinds = {**KINDS, **HINTS}
        entries = {
            (name := segment_file(number, ending)): write_file(folder / name, kinds[ending], *content)
            for ending, content in files.items()
        }
        report("write", num_tokens)
        return entries


def segment_tokens_for(memory: int, vocab_size: int) -> int:
    """The most tokens a segment may have if building it is to take at most `memory` bytes beyond what the process has already.

    Sorting decides: measured, 21 bytes a token where ids take two bytes, 27 to 31 where they take three. At least 1, at most
    SEGMENT_TOKENS. The documents that the caller holds are not counted.
    """
    bytes_a_token = 24 if token_width(vocab_size) <= 2 else 32
    return max(1, min(memory // bytes_a_token, SEGMENT_TOKENS))


def load_kernels() -> None:
    """Load, or compile, the kernels that large segments are written with; it takes most of a second."""
    from retriever import kernels

    text, order = np.array([1, 2, 255], np.uint8), np.array([0, 1], np.int32)
    kernels.rank_tokens(text, 1)
    kernels.token_suffixes(order, 1, 2)
    contexts = kernels.frequent_contexts(text, 1, order, 255, 1)
    kernels.fill_table(np.zeros((16, 3), np.uint32), text, 1, order, contexts)


def build_suffix_order(text: NDArray[np.uint8], width: int) -> NDArray[np.int32]:
    """int32: the positions of the tokens of a packed text, sorted, those of separators left out (they sort last)."""
    order = build_suffix_array(text, width)
    tokens = text.reshape(-1, width)
    return order[: bisect_left(order, True, key=lambda position: bool(np.all(tokens[position] == 255)))]


def find_frequent(text: NDArray[np.uint8], width: int, order: NDArray[np.int32]) -> NDArray[np.int64]:
    """The contexts that the tables are chosen from, as `plain.frequent_contexts` has them. `order` is sound. O(n)."""
    if len(order) >= KERNEL_TOKENS:
        from retriever import kernels

        return kernels.frequent_contexts(text, width, order, separator_of(width), _TABLE_MIN_COUNT)
    return plain.frequent_contexts(unpack_tokens(text, width), order, separator_of(width), _TABLE_MIN_COUNT)


def build_table(
    text: NDArray[np.uint8], width: int, order: NDArray[np.int32], frequent: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], int]:
    """The table of the most frequent contexts, uint32 [slots, 3], and how many it holds; `frequent` is that of `find_frequent`.

    At most half full, and at most 0.75 bytes a token (but 16 slots at least). O(n).
    """
    table = np.zeros((1 << max(len(order) // 16, 16).bit_length() - 1, 3), np.uint32)
    contexts = frequent[np.argsort(-frequent[:, 2], kind="stable")[: len(table) // 2]]
    if len(order) >= KERNEL_TOKENS:
        from retriever import kernels

        kernels.fill_table(table, text, width, order, contexts)
    else:
        plain.fill_table(table, unpack_tokens(text, width), order, contexts)
    return table, len(contexts)


def build_continuations(
    text: NDArray[np.uint8], width: int, order: NDArray[np.int32], frequent: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What most often follows the most frequent contexts of 1 and 2 tokens: uint32 [c, 4] (low, count, length, end of its runs)
    and uint32 [r, 3] (next token, low, count), as `plain.frequent_continuations` chooses them from `frequent`.

    At most 0.08 bytes a token.
    """
    most_words = int(_CONTINUATION_BYTES * len(order)) // 4
    contexts, runs = plain.frequent_continuations(frequent, _CONTINUED_MIN_COUNT, most_words)
    last = order[runs[:, 1]] + runs[:, 0] - 1
    runs[:, 0] = unpack_tokens(text.reshape(-1, width)[last].reshape(-1), width)
    return contexts.astype(np.uint32, order="C"), runs.astype(np.uint32, order="C")


def tombstones(
    order: NDArray[np.int32], offsets: NDArray[np.int64], deleted: NDArray[np.bool_]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """The payload of a `tomb` file for the documents `deleted` (bool [num_documents]) of a segment: uint64 words of bits.

    (left suffixes of the order, how many of them before each 8 words and in all, deleted documents). O(n).
    """
    left = plain.left_suffixes(order, offsets, deleted)
    documents = np.zeros(-(-len(deleted) // 64) * 64, np.bool_)
    documents[: len(deleted)] = deleted
    return left, plain.ranks(left), np.packbits(documents, bitorder="little").view(np.uint64)


def _tool() -> str:
    with suppress(metadata.PackageNotFoundError):
        return f"draftloom {metadata.version('draftloom')}"
    return "draftloom"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the last file of the version in `folder`, and force it to disk. Raises FileExistsError if there is one, OSError."""
    with open(folder / MANIFEST, "xb") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())


def give_name(temporary: Path, path: Path) -> None:
    """Let the version written in `temporary` be `path`, so that a power cut leaves it whole or not there. Raises OSError."""
    _sync_folder(temporary)
    os.rename(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
