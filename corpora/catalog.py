"""Which corpora there are, whose they are, and which version of each is active: a SQLite file and a folder for each corpus.

    <root>/catalog.sqlite                    tables corpora and versions; the truth about what is active
    <root>/<corpus>/versions/<version>/      one immutable version, written by `retriever.format`
    <root>/.locks/<corpus>.lock              locked by whoever builds or removes the corpus, and says who that is

A version's folder is complete before one transaction makes it active, and a folder that no row knows is a leftover: so a crash
at any point leaves either the old version active or the new one, never a mixture. The version that was active before is kept,
for `rollback`; `gc` removes what is older, and leftovers.

SQLite runs in WAL mode, so readers and the one writer do not wait for each other; a connection lives for one call, so a catalog
may be used from any thread and after a fork. A server opens it `read_only`: then nothing is created, migrated or changed.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpora.errors import (
    CatalogCorrupt,
    CatalogError,
    CatalogTooNew,
    CorpusLocked,
    CorpusNotFound,
    InvalidName,
    StoreNotWritable,
    VersionNotFound,
)

if TYPE_CHECKING:
    from sqlite_utils import Database

    from retriever.datastore import Problem
    from retriever.format import Manifest

DEFAULT_TENANT = "default"
BUSY_SECONDS = 10.0
CATALOG_FILE = "catalog.sqlite"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Version:
    """One version of one corpus, as the catalog knows it.

    1. `id` is unique within the corpus and sorts by time: `20261129T203512Z-1a2b3c`. `created` is the same moment in ISO 8601.
    2. `fingerprint` and `vocab_size` are the tokenizer's (engine.text); `model` is the name it was asked for by, for people.
    3. `num_files` files were taken, of which `num_documents` differ; `num_bytes` is their size on disk.
    4. `sources` are the absolute paths it was built from.
    """

    corpus: str
    id: str
    created: str
    fingerprint: str
    vocab_size: int
    model: str
    num_files: int
    num_documents: int
    num_tokens: int
    num_bytes: int
    sources: tuple[str, ...]

    @staticmethod
    def of(manifest: Manifest, model: str, num_files: int, num_bytes: int) -> Version:
        """What the catalog is to know of the version that `manifest` describes."""
        return Version(
            corpus=manifest.corpus,
            id=manifest.version,
            created=created_at(manifest.version),
            fingerprint=manifest.fingerprint,
            vocab_size=manifest.vocab_size,
            model=model,
            num_files=num_files,
            num_documents=manifest.num_documents,
            num_tokens=manifest.num_tokens,
            num_bytes=num_bytes,
            sources=manifest.sources,
        )


@dataclass(frozen=True)
class Corpus:
    """A corpus with its active version; `previous` is the id that `rollback` would return to, "" if there is none."""

    name: str
    tenant: str
    active: Version
    previous: str


class Catalog:
    """The store of corpora at `root`. Every call names a tenant; another tenant's corpus looks like one that is not there."""

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        """Creates folder and file on the first write. Raises nothing yet: a store that is not there has no corpora."""
        self.root = Path(root)
        self.read_only = read_only

    # reading

    def list(self, tenant: str | None = DEFAULT_TENANT) -> Sequence[Corpus]:
        """The tenant's corpora (None: everybody's), by name; [] if there are none or no store. Raises CatalogError."""
        with self._reading() as db:
            if db is None:
                return []
            rows = db.execute("select * from corpora where tenant = coalesce(?, tenant) order by name", [tenant])
            return [_corpus(db, row) for row in rows.fetchall()]

    def get(self, name: str, tenant: str = DEFAULT_TENANT) -> Corpus:
        """One corpus. Raises CorpusNotFound (with a near name, if there is one), CatalogError."""
        with self._reading() as db:
            return self._find(db, name, tenant)

    def versions(self, name: str, tenant: str = DEFAULT_TENANT) -> Sequence[Version]:
        """All versions that may be activated, newest first. Raises CorpusNotFound, CatalogError."""
        with self._reading() as db:
            self._find(db, name, tenant)
            assert db is not None
            return [_version(row) for row in db.execute("select * from versions where corpus = ? order by id desc", [name])]

    def version_path(self, name: str, version: str) -> Path:
        """Where a version lies, whether or not it exists."""
        return self.root / check_name(name) / "versions" / version

    def active_path(self, name: str, tenant: str = DEFAULT_TENANT) -> Path:
        """The folder to give to `Datastore.open`. Raises CorpusNotFound, CatalogError."""
        return self.version_path(name, self.get(name, tenant).active.id)

    def show(self, name: str, tenant: str = DEFAULT_TENANT) -> dict[str, Any]:
        """Everything known about a corpus, ready for JSON: catalog, versions, size on disk, and the active version's manifest.

        `manifest` is None if it cannot be read; `check` says why. Raises CorpusNotFound, CatalogError.
        """
        corpus = self.get(name, tenant)
        path = self.version_path(name, corpus.active.id)
        try:
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            manifest = None
        return {
            "name": name,
            "tenant": corpus.tenant,
            "path": str(path),
            "bytes_on_disk": _folder_bytes(path),
            "active": asdict(corpus.active),
            "previous": corpus.previous,
            "versions": [version.id for version in self.versions(name, tenant)],
            "manifest": manifest,
        }

    def check(self, name: str, *, full: bool = False, tenant: str = DEFAULT_TENANT) -> Sequence[Problem]:
        """What is wrong with the files of the active version, [] if nothing is; `full` reads every byte.

        Raises CorpusNotFound, CatalogError, and `retriever.errors.RetrieverError` where it cannot even be opened.
        """
        from retriever.datastore import Datastore

        corpus = self.get(name, tenant)
        path = self.version_path(name, corpus.active.id)
        with Datastore.open(path, fingerprint=corpus.active.fingerprint, vocab_size=corpus.active.vocab_size) as datastore:
            return datastore.check(full)

    # writing

    def publish(self, version: Version, tenant: str = DEFAULT_TENANT) -> None:
        """Enter a complete version and make it active, in one transaction. Raises InvalidName, CatalogError."""
        with self._writing() as db:
            self._refuse_taken(db, version.corpus, tenant)
            row = db.execute("select active from corpora where name = ?", [version.corpus]).fetchone()
            values = {**asdict(version), "sources": json.dumps(version.sources)}
            db.execute(
                f"insert into versions ({', '.join(values)}) values ({', '.join(f':{column}' for column in values)})", values
            )
            db.execute(
                "insert or replace into corpora (name, tenant, active, previous) values (?, ?, ?, ?)",
                [version.corpus, tenant, version.id, row["active"] if row else ""],
            )

    def activate(self, name: str, version: str, tenant: str = DEFAULT_TENANT) -> Version:
        """Make an existing version the active one; the one that was becomes `previous`. Returns it.

        Raises CorpusNotFound, VersionNotFound, CatalogError. Activating the active version changes nothing.
        """
        with self._writing() as db:
            corpus = self._find(db, name, tenant)
            row = db.execute("select * from versions where corpus = ? and id = ?", [name, version]).fetchone()
            if row is None or not self.version_path(name, version).is_dir():
                raise VersionNotFound(f"corpus {name} has no such version: {version}; see `draftloom corpus show {name}`")
            if version != corpus.active.id:
                db.execute("update corpora set active = ?, previous = ? where name = ?", [version, corpus.active.id, name])
            return _version(row)

    def rollback(self, name: str, tenant: str = DEFAULT_TENANT) -> Version:
        """Activate the version that was active before; returns it.

        Raises CorpusNotFound, VersionNotFound if there is none, CatalogError.
        """
        previous = self.get(name, tenant).previous
        if not previous:
            raise VersionNotFound(f"corpus has no earlier version to return to: {name}; build it again instead")
        return self.activate(name, previous, tenant)

    def remove(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Remove a corpus with all versions. Raises CorpusNotFound, CorpusLocked, CatalogError.

        Servers that have it open keep reading until they let go of it.
        """
        self.get(name, tenant)
        with self.lock(name):
            with self._writing() as db:
                self._find(db, name, tenant)
                db.execute("delete from versions where corpus = ?", [name])
                db.execute("delete from corpora where name = ?", [name])
            folder = self.root / name
            if folder.exists():
                trash = self.root / f".trash-{name}-{secrets.token_hex(4)}"
                with _reporting_os_errors(self.root):
                    folder.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)

    def gc(self) -> Sequence[Path]:
        """Remove, for every corpus, what `collect` removes, and halves of removed corpora; returns the removed folders.

        A corpus that is being built is left alone. Raises CatalogError.
        """
        removed: list[Path] = []
        if not self.root.is_dir():
            return removed
        for folder in sorted(self.root.iterdir()):
            if folder.name.startswith(".trash-"):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            elif folder.is_dir() and _NAME.fullmatch(folder.name):
                with contextlib.suppress(CorpusLocked), self.lock(folder.name):
                    removed += self.collect(folder.name)
        return removed

    def collect(self, name: str) -> Sequence[Path]:
        """Remove versions of a corpus that are neither active nor previous, and leftovers of interrupted builds.

        The caller holds its lock. Returns the removed folders. Raises CatalogError.
        """
        with self._writing() as db:
            row = db.execute("select active, previous from corpora where name = ?", [name]).fetchone()
            kept = {row["active"], row["previous"]} if row else set()
            known = [row["id"] for row in db.execute("select id from versions where corpus = ?", [name])]
            for version in [id for id in known if id not in kept]:
                db.execute("delete from versions where corpus = ? and id = ?", [name, version])
        folder = self.root / check_name(name) / "versions"
        removed = [path for path in sorted(folder.iterdir()) if path.name not in kept] if folder.is_dir() else []
        for path in removed:
            shutil.rmtree(path, ignore_errors=True)
        if not kept:
            for empty in (folder, folder.parent):
                with contextlib.suppress(OSError):
                    empty.rmdir()
        return removed

    def refuse_taken(self, name: str, tenant: str = DEFAULT_TENANT) -> None:
        """Raise InvalidName if the name belongs to another tenant's corpus, CatalogError if the store cannot be written."""
        with self._writing() as db:
            self._refuse_taken(db, name, tenant)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the corpus for building or removing. Raises CorpusLocked at once, naming the holder, if somebody else does.

        It is a lock of the operating system: it ends with the process that holds it, however that ends.
        """
        path = self.root / ".locks" / f"{check_name(name)}.lock"
        self._create_root()
        with _reporting_os_errors(self.root):
            path.parent.mkdir(exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read() or "another process"
                raise CorpusLocked(
                    f"corpus is being built or removed: {name} (by {holder}); wait for it to end, or stop it", holder
                ) from None
            try:
                file.truncate()
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {_now()}")
                file.flush()
                yield
            finally:
                file.truncate(0)

    # connections

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection to read with, None if there is no catalog."""
        path = self.root / CATALOG_FILE
        if not path.exists():
            yield None
            return
        with _reporting_sqlite_errors(path), contextlib.closing(_connect_to_read(path)) as db:
            db.row_factory = sqlite3.Row
            taken = _steps_taken(db, path)
            if not taken:
                yield None
                return
            if taken < _STEP_NAMES:
                if self.read_only:
                    raise CatalogError(f"catalog is of an earlier release: {path}; run `draftloom corpus gc` to update it")
                with self._writing():
                    pass
            yield db

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A connection within one transaction that is alone in writing; an exception undoes all of it."""
        if self.read_only:
            raise CatalogError(f"catalog was opened to read only: {self.root / CATALOG_FILE}; open it for writing")
        self._create_root()
        path = self.root / CATALOG_FILE
        with _reporting_sqlite_errors(path), contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as db:
            db.row_factory = sqlite3.Row
            _enter_wal(db)
            db.execute("PRAGMA foreign_keys = on")
            db.execute("PRAGMA synchronous = full")
            db.execute("BEGIN IMMEDIATE")
            try:
                if _steps_taken(db, path) < _STEP_NAMES:
                    _take_steps(db)
                yield db
                db.commit()
            except BaseException:
                db.rollback()
                raise

    def _create_root(self) -> None:
        with _reporting_os_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _find(self, db: sqlite3.Connection | None, name: str, tenant: str) -> Corpus:
        mine = db.execute("select * from corpora where tenant = ?", [tenant]).fetchall() if db is not None else []
        row = next((row for row in mine if row["name"] == name), None)
        if row is None or db is None:
            near = difflib.get_close_matches(name, [row["name"] for row in mine], n=1)
            hint = f"did you mean {near[0]}?" if near else f"build it with `draftloom corpus build {name} PATH`"
            raise CorpusNotFound(f"no such corpus: {name}; {hint}")
        return _corpus(db, row)

    @staticmethod
    def _refuse_taken(db: sqlite3.Connection, name: str, tenant: str) -> None:
        if db.execute("select 1 from corpora where name = ? and tenant <> ?", [name, tenant]).fetchone():
            raise InvalidName(f"corpus name is not available: {name}; choose another")


def default_store() -> Path:
    """`$DRAFTLOOM_HOME`, else `~/.local/share/draftloom/corpora`."""
    home = os.environ.get("DRAFTLOOM_HOME")
    return Path(home).expanduser() if home else Path.home() / ".local" / "share" / "draftloom" / "corpora"


def check_name(name: str) -> str:
    """`name`, if it can name a corpus. Raises InvalidName."""
    if not _NAME.fullmatch(name) or name.startswith(CATALOG_FILE):
        raise InvalidName(
            f"corpus name is not valid: {name!r}; use 1 to 64 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


def new_version_id() -> str:
    """An id that sorts by time, to the second, and that nobody else makes."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def created_at(version: str) -> str:
    """The moment in a version id, in ISO 8601."""
    return datetime.strptime(version[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).isoformat()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _corpus(db: sqlite3.Connection, row: sqlite3.Row) -> Corpus:
    active = db.execute("select * from versions where corpus = ? and id = ?", [row["name"], row["active"]]).fetchone()
    return Corpus(row["name"], row["tenant"], _version(active), row["previous"])


def _version(row: sqlite3.Row) -> Version:
    return Version(**{**dict(row), "sources": tuple(json.loads(row["sources"]))})


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, also where the medium cannot be written and WAL's helper files cannot be made."""
    uri = path.absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    try:
        connection.execute("select 1 from sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if not error.sqlite_errorname.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
            raise
        connection = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
    return connection


def _enter_wal(db: sqlite3.Connection) -> None:
    """Switch the catalog to write-ahead logging, once for all its life.

    While another connection switches it, SQLite says busy at once and does not wait as it does elsewhere; so this waits.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


@contextlib.contextmanager
def _reporting_sqlite_errors(path: Path) -> Iterator[None]:
    """SQLite's errors as ours, by its error code."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", "")
        if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_FULL", "SQLITE_IOERR")):
            raise StoreNotWritable(f"catalog cannot be used: {path} ({error}); check permissions and free space") from error
        if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise CatalogError(f"catalog is busy: {path} ({error}); try again") from error
        raise CatalogCorrupt(
            f"catalog is damaged: {path} ({error}); move it away and build the corpora again, or restore it"
        ) from error


@contextlib.contextmanager
def _reporting_os_errors(root: Path) -> Iterator[None]:
    """The system's errors about the store as ours."""
    try:
        yield
    except OSError as error:
        raise StoreNotWritable(
            f"corpus store cannot be written: {root} ({error.strerror or error}); check permissions and space, or use --store"
        ) from error


def _steps_taken(db: sqlite3.Connection, path: Path) -> frozenset[str]:
    """The names of the schema's steps that this catalog has taken. Raises CatalogTooNew if one is not known here."""
    if not db.execute("select 1 from sqlite_master where name = '_sqlite_migrations'").fetchone():
        return frozenset()
    rows = db.execute("select name from _sqlite_migrations where migration_set = ?", [_MIGRATIONS])
    taken = frozenset(row["name"] for row in rows)
    if unknown := sorted(taken - _STEP_NAMES):
        raise CatalogTooNew(f"catalog was written by a later release: {path} ({', '.join(unknown)}); update Draftloom")
    return taken


def _take_steps(db: sqlite3.Connection) -> None:
    """Take the missing ones. Rarely needed, and sqlite-utils takes longer to import than all else here."""
    from sqlite_utils import Database, Migrations

    migrations = Migrations(_MIGRATIONS)
    for step in _STEPS:
        migrations()(step)
    migrations.apply(Database(db, execute_plugins=False))


def m001_corpora_and_versions(db: Database) -> None:
    db.execute(
        """
        create table corpora (
            name text primary key,
            tenant text not null,
            active text not null,
            previous text not null,
            foreign key (name, active) references versions (corpus, id) deferrable initially deferred
        ) strict
        """
    )
    db.execute(
        """
        create table versions (
            corpus text not null,
            id text not null,
            created text not null,
            fingerprint text not null,
            vocab_size integer not null,
            model text not null,
            num_files integer not null,
            num_documents integer not null,
            num_tokens integer not null,
            num_bytes integer not null,
            sources text not null,
            primary key (corpus, id)
        ) strict
        """
    )
    db.execute("create index corpora_by_tenant on corpora (tenant)")


# The schema, step by step. A step that was released is never changed; the next one is added at the end. Each is recorded in the
# catalog, in the transaction that takes it.
_STEPS = (m001_corpora_and_versions,)
_STEP_NAMES = frozenset(step.__name__ for step in _STEPS)
_MIGRATIONS = "draftloom.corpora"
