"""Zip and tar files, read member by member: nothing is unpacked to disk, and no member can make it read without end.

An archive that grows more than MAX_EXPANSION-fold when it is decompressed, or has more than MAX_MEMBERS members, is given up
where it does; what came before is kept. A member's name is only ever a name: one that leads out of the archive is refused all
the same. Ignore files inside do not count: what was packed was meant to be there.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from corpora.decisions import Decision, Reason
from corpora.filter import Refusal
from corpora.inputs import EncodeChat, Entry, fault_of, file_named, refused
from corpora.options import BuildOptions
from corpora.walk import NameRules, printable, stamp_of

MAX_EXPANSION = 200
MAX_MEMBERS = 1_000_000
FREE_BYTES = 16 << 20
"""So much may come out of any archive, however small it is."""
MAX_HEADER_BYTES = 1 << 20
XZ_MEMORY = 256 << 20

ZIP_ENDINGS = (".zip", ".whl", ".jar", ".egg")
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".crate")

_FAULTS = (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile, tarfile.TarError, zlib.error,
           lzma.LZMAError)  # fmt: skip


def open_source(spec: str, prefix: str, options: BuildOptions, encode_chat: EncodeChat | None) -> ZipSource | TarSource | None:
    """The source, None if `spec` is no file with the name of an archive."""
    path = file_named(spec, ZIP_ENDINGS + TAR_ENDINGS)
    if path is None:
        return None
    return (ZipSource if path.name.lower().endswith(ZIP_ENDINGS) else TarSource)(path, prefix, options)


class _Archive:
    """What zip and tar files have in common: how members are decided about."""

    resolved = ""

    def __init__(self, path: Path, prefix: str, options: BuildOptions) -> None:
        self.spec = str(path)
        self._path = path
        self._prefix = prefix
        self._options = options
        self._rules = NameRules.of(options)
        self._left_out: set[str] = set()

    def _decide(self, name: str, size: int, kind: Reason | None, stamp: str) -> Decision | None:
        """What name and size say about a member; None if it is in a folder that was left out already.

        `kind` is why it cannot be a file with a text, None if it is one.
        """
        name = printable(name).removeprefix("./")
        reason, detail = kind, ""
        if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":":
            reason = Reason.UNSAFE_NAME
        elif refused := self._rules.refuse(name):
            if refused[0] in self._left_out:
                return None
            name, reason = refused
            if name.endswith("/"):
                self._left_out.add(name)
                size = 0
        elif reason is None and size > self._options.max_file_size:
            reason, detail = Reason.TOO_LARGE, f"{size:,} bytes"
        return Decision(self._path / name.lstrip("/"), self._prefix + name, reason is None, reason, detail, size, stamp=stamp)

    def _given_up(self, reason: Reason, detail: str) -> Entry:
        """What is said of the archive itself when there is no going on."""
        return refused(self._path, self._prefix.rstrip("/") or printable(self._path.name), reason, detail)


class ZipSource(_Archive):
    """The members of a zip file, in their order."""

    streamed = False

    def entries(self) -> Iterator[Entry]:
        try:
            archive = zipfile.ZipFile(self._path)
            members = archive.infolist()
        except _FAULTS as error:
            yield self._given_up(Reason.UNREADABLE, fault_of(error))
            return
        meter = _Meter(self._path.stat().st_size)
        if len(members) > MAX_MEMBERS:
            yield self._given_up(Reason.TOO_LARGE, f"{len(members):,} members")
            return
        for info in members:
            if info.is_dir():
                continue
            kind = Reason.SYMLINK if info.external_attr >> 28 == 0xA else None
            decision = self._decide(info.filename, info.file_size, kind, f"{info.file_size}-{info.CRC:08x}")
            if decision:
                yield Entry(decision, partial(self._read, archive, info, meter))

    def _read(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, meter: _Meter) -> bytes | Refusal:
        try:
            with archive.open(info) as file:
                data = file.read(self._options.max_file_size + 1)
            meter.count(len(data))
        except _TooMuch as error:
            return Refusal(Reason.TOO_LARGE, str(error))
        except _FAULTS as error:
            return Refusal(Reason.UNREADABLE, fault_of(error))
        if len(data) > self._options.max_file_size:
            return Refusal(Reason.TOO_LARGE, f"over {self._options.max_file_size:,} bytes")
        return data


class TarSource(_Archive):
    """The members of a tar file, compressed or not, in their order, read in one pass."""

    streamed = True

    def entries(self) -> Iterator[Entry]:
        try:
            with open(self._path, "rb") as raw:
                size, stamp = os.fstat(raw.fileno()).st_size, stamp_of(os.fstat(raw.fileno()))
                stream = _Metered(_decompressed(self._path.name.lower(), raw), _Meter(size))
                with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]  # it only reads
                    yield from self._members(archive, stream, stamp)
        except _TooMuch as error:
            yield self._given_up(Reason.TOO_LARGE, str(error))
        except _FAULTS as error:
            yield self._given_up(Reason.UNREADABLE, fault_of(error))

    def _members(self, archive: tarfile.TarFile, stream: _Metered, stamp: str) -> Iterator[Entry]:
        for count in range(MAX_MEMBERS + 1):
            stream.allowance = MAX_HEADER_BYTES + self._bytes_to_skip(archive)
            info = archive.next()
            if info is None:
                return
            if count == MAX_MEMBERS:
                raise _TooMuch(f"more than {MAX_MEMBERS:,} members")
            archive.members.clear()  # type: ignore[attr-defined]  # it would remember all of them
            if info.isdir():
                continue
            kind = None if info.isreg() else Reason.SYMLINK if info.issym() or info.islnk() else Reason.SPECIAL_FILE
            decision = self._decide(info.name, info.size, kind, stamp)
            if decision:
                yield Entry(decision, partial(self._read, archive, info, stream))

    @staticmethod
    def _bytes_to_skip(archive: tarfile.TarFile) -> int:
        """What is left of the member before, and has to be read to come to the next."""
        position = archive.fileobj.tell() if archive.fileobj else 0
        return max(0, archive.offset - position)

    @staticmethod
    def _read(archive: tarfile.TarFile, info: tarfile.TarInfo, stream: _Metered) -> bytes | Refusal:
        stream.allowance = MAX_HEADER_BYTES + info.size
        try:
            file = archive.extractfile(info)
            return file.read() if file else Refusal(Reason.SPECIAL_FILE)
        except (*_FAULTS, _TooMuch) as error:
            return Refusal(Reason.UNREADABLE, fault_of(error))


# bounds


class _TooMuch(Exception):
    """More came out of an archive than one that means well holds."""


class _Meter:
    """How much may come out of an archive of so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._left = max(FREE_BYTES, MAX_EXPANSION * num_bytes)

    def count(self, num_bytes: int) -> None:
        """Raises _TooMuch when that was too much."""
        self._left -= num_bytes
        if self._left < 0:
            raise _TooMuch(f"decompresses to more than {MAX_EXPANSION} times its size")


class _Metered:
    """A stream that stops when too much came out of it: in all, or since `allowance` was set (a header that does not end)."""

    def __init__(self, stream: BinaryIO, meter: _Meter) -> None:
        self.allowance = MAX_HEADER_BYTES
        self._stream = stream
        self._meter = meter

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._meter.count(len(data))
        self.allowance -= len(data)
        if self.allowance < 0:
            raise _TooMuch("a header does not end")
        return data


def _decompressed(name: str, raw: BinaryIO) -> BinaryIO:
    """The tar file inside, told by the archive's name."""
    opened: dict[tuple[str, ...], Callable[[BinaryIO], Any]] = {
        ("gz", "tgz", "crate"): lambda raw: gzip.GzipFile(fileobj=raw),
        ("bz2", "tbz2"): bz2.BZ2File,
        ("xz", "txz"): _Xz,
    }
    ending = name.rpartition(".")[2]
    stream: BinaryIO = next((open_it(raw) for endings, open_it in opened.items() if ending in endings), raw)
    return stream


class _Xz:
    """An xz stream that decompresses within a bound of memory, which `lzma.LZMAFile` does not set."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decompressor = lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def read(self, size: int) -> bytes:
        parts, left = list[bytes](), size
        while left:
            data = b""
            if self._decompressor.eof:  # another stream may follow, after padding
                data = (self._decompressor.unused_data or self._raw.read(1 << 16)).lstrip(b"\0")
                if not data:
                    break
                self._decompressor = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            elif self._decompressor.needs_input and not (data := self._raw.read(1 << 16)):
                raise EOFError("compressed data ended before its end mark")
            parts.append(self._decompressor.decompress(data, left))
            left -= len(parts[-1])
        return b"".join(parts)
