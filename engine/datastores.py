"""The datastores a server drafts from: opened when first asked for, pinned while a request uses them, followed as they change.

Everything that reads the catalog or a file runs on a thread; the rest happens on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from corpora.catalog import Catalog, Corpus
from corpora.errors import CatalogError, CorpusNotFound
from engine.errors import CorpusUnusable, NotFound
from engine.files import replacing
from engine.requests import CorpusInfo
from engine.target import TargetInfo
from retriever.datastore import Datastore
from retriever.errors import Closed, RetrieverError
from retriever.format import MappedFile

log = logging.getLogger("draftloom.engine")

REFRESH_SECONDS = 5.0
"""How long a removed corpus may stay mapped, and how often somebody's update is looked for."""
_MOST_CHECKS = 4096


class Checks:
    """Whether files hold what was written, remembered over restarts: an empty note for a sound file, else what is wrong.

    A note is named by a digest of the file's device, inode, size, time of change and checksum. So whatever writes to a file has
    it read again, and what an update shares with the version before it need not be. `folder` None remembers nothing. Notes are
    a convenience: a folder that cannot be used costs time only. The latest 4,096 are kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def fault(self, file: MappedFile) -> str:
        """What is wrong with a file, "" if nothing is. Reads all of it unless it is known. Raises OSError."""
        note = self._note(file)
        if note is not None:
            with suppress(OSError):
                return note.read_text(encoding="utf-8")
        fault = "content was altered" if file.altered() else ""
        if note is not None:
            with suppress(OSError):
                note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with replacing(note) as out:
                    out.write(fault.encode())
                self._forget_the_oldest()
        return fault

    def _note(self, file: MappedFile) -> Path | None:
        if self._folder is None:
            return None
        info = os.stat(file.path)
        facts = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, file.header.payload_checksum)
        return self._folder / hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def _forget_the_oldest(self) -> None:
        assert self._folder is not None
        notes = list(self._folder.iterdir())
        if len(notes) > _MOST_CHECKS:
            for note in sorted(notes, key=lambda path: path.stat().st_mtime)[: len(notes) - _MOST_CHECKS]:
                note.unlink(missing_ok=True)


@dataclass
class _Pinned:
    """An open version and how many requests draft from it."""

    store: Datastore
    users: int = 0


class Corpora:
    """The datastores of the store of corpora at `root`, for the model that `info` describes.

    A request drafts from the version that is active when it begins, and keeps it to its end; a version is closed when it is no
    longer active and its last request leaves it. `refresh`, called now and then, opens what became active, so that no request
    waits for that, and closes what was removed.

    With `checks`, checksums of large files are compared, too (opening does it for small ones), once for each file, on a thread.
    Requests need not wait for it, since a damaged file can cost speed only; a version found damaged is refused from then on.
    """

    def __init__(self, root: Path, info: TargetInfo, *, checks: Checks | None = None) -> None:
        self._catalog = Catalog(root, read_only=True)
        self._info = info
        self._checks = checks
        self._open: dict[tuple[str, str], _Pinned] = {}
        self._active: dict[str, str] = {}
        self._damaged: dict[tuple[str, str], str] = {}

    async def acquire(self, name: str, tenant: str) -> Datastore:
        """The active version of a corpus. Raises NotFound, CorpusUnusable. Every acquired one is released."""
        corpus = await asyncio.to_thread(self._find, name, tenant)
        try:
            pinned = await self._opened(corpus)
        except CorpusUnusable:
            latest = await asyncio.to_thread(self._find, name, tenant)
            if latest.active.id == corpus.active.id:
                raise
            corpus = latest  # it was replaced, and removed, since it was looked up
            pinned = await self._opened(corpus)
        self._refuse_damaged((name, corpus.active.id))
        pinned.users += 1
        self._take_up(name, corpus.active.id)
        return pinned.store

    def release(self, store: Datastore) -> None:
        """The request is done with it."""
        pinned = self._open.get((store.name, store.version))
        if pinned is not None:  # else all is closed already
            pinned.users -= 1
            self._close_unused(store.name)

    async def list(self, tenant: str) -> list[CorpusInfo]:
        """All corpora of a tenant, and what keeps this model from drafting from them. Raises CorpusUnusable."""
        corpora = await asyncio.to_thread(self._of_tenant, tenant)
        problems = [await self._problem(corpus) for corpus in corpora]
        return [
            CorpusInfo(
                corpus.name,
                corpus.active.id,
                corpus.active.num_documents,
                corpus.active.num_tokens,
                corpus.active.fingerprint,
                not problem,
                problem,
            )
            for corpus, problem in zip(corpora, problems, strict=True)
        ]

    async def refresh(self) -> None:
        """Follow the catalog: open the active version of every corpus in use, close those that were replaced or removed."""
        with suppress(CorpusUnusable):  # a catalog that cannot be read says nothing, and requests will say so
            active = await asyncio.to_thread(self._of_everybody)
            for name in {name for name, _ in self._open}:
                if name not in active:
                    self._take_up(name, "")
                elif active[name].active.id != self._active.get(name):
                    with suppress(CorpusUnusable):
                        await self._opened(active[name])
                        self._take_up(name, active[name].active.id)

    async def follow(self, seconds: float = REFRESH_SECONDS) -> None:
        """`refresh` every so many seconds, for ever."""
        while True:
            await asyncio.sleep(seconds)
            await self.refresh()

    def close(self) -> None:
        """Close everything; for the end."""
        for pinned in self._open.values():
            pinned.store.close()
        self._open.clear()

    async def _opened(self, corpus: Corpus) -> _Pinned:
        """The active version, opened if it is not. Raises CorpusUnusable."""
        key = (corpus.name, corpus.active.id)
        if key not in self._open:
            store = await asyncio.to_thread(self._open_version, corpus)
            if self._open.setdefault(key, _Pinned(store)).store is not store:
                store.close()  # another request was faster
            elif self._checks is not None:
                arguments = (key, store, self._checks)
                Thread(target=self._look_for_damage, args=arguments, name=f"verify-{corpus.name}", daemon=True).start()
        return self._open[key]

    async def _problem(self, corpus: Corpus) -> str:
        try:
            self._refuse_damaged((corpus.name, corpus.active.id))
            if (corpus.name, corpus.active.id) not in self._open:
                (await asyncio.to_thread(self._open_version, corpus)).close()
        except CorpusUnusable as error:
            return str(error)
        return ""

    def _take_up(self, name: str, version: str) -> None:
        """From now on `version` is the one to keep open, "" for none."""
        self._active[name] = version
        self._close_unused(name)

    def _close_unused(self, name: str) -> None:
        for key, pinned in list(self._open.items()):
            if key[0] == name and key[1] != self._active.get(name) and not pinned.users:
                del self._open[key]
                self._damaged.pop(key, None)
                pinned.store.close()

    def _refuse_damaged(self, key: tuple[str, str]) -> None:
        if key in self._damaged:
            raise CorpusUnusable(self._damaged[key])

    # on threads

    def _find(self, name: str, tenant: str) -> Corpus:
        with _reporting_catalog_errors():
            try:
                return self._catalog.get(name, tenant)
            except CorpusNotFound as error:
                raise NotFound(str(error)) from error

    def _of_tenant(self, tenant: str) -> Iterable[Corpus]:
        with _reporting_catalog_errors():
            return self._catalog.list(tenant)

    def _of_everybody(self) -> dict[str, Corpus]:
        with _reporting_catalog_errors():
            return {corpus.name: corpus for corpus in self._catalog.list(None)}

    def _open_version(self, corpus: Corpus) -> Datastore:
        active = corpus.active
        path = self._catalog.version_path(corpus.name, active.id)
        try:
            return Datastore.open(path, self._info.fingerprint, max(self._info.vocab_size, active.vocab_size))
        except (RetrieverError, OSError) as error:
            raise CorpusUnusable(f"corpus {corpus.name} cannot be used: {error}") from error

    def _look_for_damage(self, key: tuple[str, str], store: Datastore, checks: Checks) -> None:
        with suppress(OSError, Closed):  # removed, or the server ends
            for segment in store.segments():
                for file in segment.files.values():
                    if fault := checks.fault(file):
                        log.error("corpus %s is no longer drafted from: %s: %s", key[0], fault, file.path)
                        self._damaged[key] = (
                            f"corpus {key[0]} cannot be used: {fault}: {file.path}; "
                            "rebuild the corpus with `draftloom corpus build`"
                        )


@contextmanager
def _reporting_catalog_errors() -> Iterator[None]:
    try:
        yield
    except CatalogError as error:
        raise CorpusUnusable(f"the catalog of corpora cannot be read: {error}") from error
