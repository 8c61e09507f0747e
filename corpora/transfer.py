"""A version as one file, to take to another machine: a plain tar that any tar lists, and that is imported without trust.

    about.json       what the catalog knows: names, model, tokenizer, counts, and the digest of the manifest
    manifest.json    as in the version's folder: the size and checksum of every other member
    seg-0000.tokens  ... the version's files

An import takes members of exactly these names, in this order, as ordinary files of the size that the manifest gives, and no
others; each is compared with its checksum while it is written, and the whole is opened and checked before it is published. What
a forged file can do is draft nonsense, which costs speed: kernels stay within the arrays whatever these hold.

Text that was deleted is not exported: a version that masks some is written anew without it first. The paths of the sources and
the names of the documents are in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from corpora.build import alone_with
from corpora.catalog import DEFAULT_TENANT, Catalog, Version, check_name, new_version_id
from corpora.errors import BadExport, StoreNotWritable, VersionNotFound
from retriever.datastore import Datastore
from retriever.errors import FormatError
from retriever.format import (
    HEADER,
    MANIFEST,
    SEGMENT_TOKENS,
    FileEntry,
    Manifest,
    give_name,
    read_metadata,
    write_manifest,
)
from retriever.update import write_update

ABOUT = "about.json"
EXPORT_FORMAT = 1
_MOST_ABOUT_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 64 << 20
_CHUNK = 1 << 22

OnBytes = Callable[[int, int], None]
"""Called with how many bytes have been copied, of how many."""


@dataclass(frozen=True)
class About:
    """What an exported file says of itself.

    1. `model` is the name of the model it was built for, for people; `fingerprint` is that of the tokenizer.
    2. `manifest_digest` is the SHA-256 of the manifest, and so stands for the whole.
    """

    name: str
    version: str
    model: str
    fingerprint: str
    num_files: int
    num_documents: int
    num_tokens: int
    num_bytes: int
    manifest_digest: str
    format: int = EXPORT_FORMAT


def export_version(
    name: str,
    target: Path,
    catalog: Catalog,
    *,
    version: str = "",
    tenant: str = DEFAULT_TENANT,
    on_bytes: OnBytes | None = None,
) -> About:
    """Write a version of corpus `name` ("" the active one) to the file `target`, which appears whole or not at all.

    An existing file is replaced. Others may build and remove versions meanwhile. Raises CorpusNotFound, VersionNotFound,
    CatalogError, StoreNotWritable (the target cannot be written), retriever.errors.FormatError.
    """
    row = _row(name, version, catalog, tenant)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_without_deleted_text(catalog.version_path(name, row.id)))
        manifest = Manifest.read(folder)
        files = {member: stack.enter_context(open(folder / member, "rb")) for member in manifest.files}
        about = About(
            name,
            manifest.version,
            row.model,
            row.fingerprint,
            row.num_files,
            manifest.num_documents,
            manifest.num_tokens,
            row.num_bytes,
            hashlib.sha256(manifest.dump()).hexdigest(),
        )
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with open(temporary, "xb", opener=_private) as out:
                _write_tar(out, about, manifest, files, on_bytes or (lambda done, total: None))
                out.flush()
                os.fsync(out.fileno())
            os.rename(temporary, target)
        except OSError as error:
            raise StoreNotWritable(
                f"export cannot be written: {target} ({error.strerror or error}); check permissions and space"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
    return about


def read_about(path: Path) -> About:
    """What an exported file says of itself; the rest of it is not looked at. Raises BadExport."""
    with _opened(path) as file:
        return _read_about(path, file)


def import_version(
    path: Path,
    catalog: Catalog,
    *,
    name: str = "",
    tenant: str = DEFAULT_TENANT,
    on_bytes: OnBytes | None = None,
) -> About:
    """Make the version in the file `path` the active one of corpus `name` ("" what it was called); returns what it is.

    The corpus comes to be if there is none of that name. Raises BadExport, InvalidName, CorpusLocked, CatalogError; whatever it
    raises, the corpus is as it was.
    """
    say = on_bytes or (lambda done, total: None)
    with _opened(path) as file:
        about = _read_about(path, file)
        name = check_name(name or about.name)
        with alone_with(name, catalog, tenant):
            final = catalog.version_path(name, new_version_id())
            temporary = final.with_name(f"{final.name}.tmp")
            temporary.mkdir(parents=True)
            manifest = _read_manifest(path, file, about)
            total = sum(entry.size for entry in manifest.files.values())
            if total > shutil.disk_usage(temporary).free:
                raise StoreNotWritable(f"there is no space to import {path}: it takes {total:,} bytes; free some")
            done = 0
            for member, entry in manifest.files.items():
                _copy_member(path, file, temporary / member, entry)
                done += entry.size
                say(done, total)
            if _next_member(path, file) is not None:
                raise BadExport(f"file has members that its manifest does not list: {path}; export it again")
            manifest = replace(manifest, corpus=name, version=final.name)
            write_manifest(temporary, manifest)
            _check(path, temporary)
            give_name(temporary, final)
            catalog.publish(Version.of(manifest, about.model, about.num_files, about.num_bytes), tenant)
    return replace(about, name=name, version=final.name)


# out


def _row(name: str, version: str, catalog: Catalog, tenant: str) -> Version:
    if not version:
        return catalog.get(name, tenant).active
    found = next((row for row in catalog.versions(name, tenant) if row.id == version), None)
    if found is None:
        raise VersionNotFound(f"corpus {name} has no such version: {version}; see `draftloom corpus show {name}`")
    return found


@contextlib.contextmanager
def _without_deleted_text(folder: Path) -> Iterator[Path]:
    """The version in `folder`, or one like it without what was deleted from it, for as long as the block lasts."""
    manifest = Manifest.read(folder)
    if not any(name.endswith(".deleted") for name in manifest.files):
        yield folder
        return
    root = folder.parents[2] / f".trash-export-{secrets.token_hex(4)}"  # what a crash leaves, `gc` removes
    try:
        yield write_update(
            root,
            manifest.corpus,
            new_version_id(),
            folder,
            [],
            num_text_bytes=manifest.num_text_bytes,
            metadata=read_metadata(folder),
            segment_tokens=int(manifest.options.get("segment_tokens", SEGMENT_TOKENS)),
            most_deleted=0.0,
        )
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _write_tar(out: BinaryIO, about: About, manifest: Manifest, files: Mapping[str, BinaryIO], on_bytes: OnBytes) -> None:
    done, total = 0, sum(entry.size for entry in manifest.files.values())
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member, data in ((ABOUT, _dump(about)), (MANIFEST, manifest.dump())):
            tar.addfile(_header(member, len(data)), BytesIO(data))
        for member, entry in manifest.files.items():
            tar.addfile(_header(member, entry.size), files[member])
            done += entry.size
            on_bytes(done, total)


def _header(name: str, size: int) -> tarfile.TarInfo:
    """The same for the same content, whoever exports it and when."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _dump(about: About) -> bytes:
    return (json.dumps(asdict(about), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


# in


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise BadExport(f"file to import cannot be read: {path} ({error.strerror or error}); check its spelling") from None


def _next_member(path: Path, file: BinaryIO) -> tarfile.TarInfo | None:
    """The next member's header, None at the end. Only what `_write_tar` writes is understood: no links, no long names, ..."""
    block = file.read(tarfile.BLOCKSIZE)
    if not block.strip(b"\0"):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeError, ValueError):
        raise BadExport(f"file is no exported corpus, or damaged: {path}; export it again") from None
    if info.type != tarfile.REGTYPE or info.size < 0:
        raise BadExport(f"file has a member that is no ordinary file: {path} ({info.name!r}); export it again")
    return info


def _expect(path: Path, file: BinaryIO, name: str) -> tarfile.TarInfo:
    info = _next_member(path, file)
    if info is None or info.name != name:
        found = "its end" if info is None else repr(info.name)
        raise BadExport(f"file is no exported corpus, or damaged: {path} ({found} where {name} belongs); export it again")
    return info


def _read_small(path: Path, file: BinaryIO, name: str, most: int) -> bytes:
    size = _expect(path, file, name).size
    if size > most:
        raise BadExport(f"member of a file to import is too large: {path} ({name} has {size:,} bytes); export it again")
    data = file.read(size)
    file.read(-size % tarfile.BLOCKSIZE)
    if len(data) < size:
        raise BadExport(f"file to import ends too early: {path}; copy it again")
    return data


def _read_about(path: Path, file: BinaryIO) -> About:
    try:
        values = json.loads(_read_small(path, file, ABOUT, _MOST_ABOUT_BYTES))
        if values["format"] != EXPORT_FORMAT:
            raise BadExport(f"file to import is of another release: {path} (format {values['format']!r}); update Draftloom")
        about = About(**{field.name: values[field.name] for field in fields(About)})
    except (ValueError, TypeError, KeyError):
        raise BadExport(f"file does not say what it is: {path}; export it again") from None
    for field in fields(About):
        value = getattr(about, field.name)
        if not (isinstance(value, str) if field.type == "str" else type(value) is int and 0 <= value < 2**63):
            raise BadExport(f"file does not say what it is: {path} ({field.name} is {value!r}); export it again")
    return about


def _read_manifest(path: Path, file: BinaryIO, about: About) -> Manifest:
    """The manifest, verified against `about` and in itself."""
    data = _read_small(path, file, MANIFEST, _MOST_MANIFEST_BYTES)
    if hashlib.sha256(data).hexdigest() != about.manifest_digest:
        raise BadExport(f"manifest is not the one that was exported: {path}; export it again")
    try:
        manifest = Manifest.parse(data, path)
    except FormatError as error:
        raise BadExport(f"manifest cannot be used: {path} ({error}); export it again") from None
    if (manifest.fingerprint, manifest.num_tokens, manifest.num_documents) != (
        about.fingerprint,
        about.num_tokens,
        about.num_documents,
    ):
        raise BadExport(f"file and its manifest disagree: {path}; export it again")
    return manifest


def _copy_member(path: Path, file: BinaryIO, target: Path, entry: FileEntry) -> None:
    """Write the next member, which must be the one named as `target` is, and compare its checksum on the way."""
    info = _expect(path, file, target.name)
    if info.size != entry.size:
        raise BadExport(
            f"member is not of the size that the manifest gives: {path} ({target.name} has {info.size:,} bytes, not "
            f"{entry.size:,}); export it again"
        )
    digest, left, skipped = xxhash.xxh3_64(), entry.size, HEADER.size
    with open(target, "xb") as out:
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise BadExport(f"file to import ends too early: {path}; copy it again")
            digest.update(chunk[skipped:])
            skipped = max(0, skipped - len(chunk))
            out.write(chunk)
            left -= len(chunk)
        out.flush()
        os.fsync(out.fileno())
    file.read(-entry.size % tarfile.BLOCKSIZE)
    if digest.hexdigest() != entry.checksum:
        raise BadExport(f"member was altered: {path} ({target.name}); copy or export it again")


def _check(path: Path, folder: Path) -> None:
    try:
        with Datastore.open(folder) as store:
            problems = store.check()
    except FormatError as error:
        raise BadExport(f"file holds a corpus that cannot be used: {path} ({error.fault}); export it again") from None
    if problems:
        raise BadExport(f"file holds a corpus that is damaged: {path} ({problems[0].fault}); export it again")
