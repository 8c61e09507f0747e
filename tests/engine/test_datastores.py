"""How a server follows the catalog: new versions, removed corpora, and what it remembers of files it has read."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from corpora.catalog import Catalog
from engine.datastores import Checks, Corpora
from engine.errors import CorpusUnusable, NotFound
from retriever import datastore
from retriever import format as corpus_format
from retriever.format import MappedFile
from tests.engine.test_app import SPELL, Target, publish, run_with, usable


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    return Corpora(tmp_path, Target().info)


def test_a_new_version_is_opened_before_anybody_asks(tmp_path: Path, corpora: Corpora) -> None:
    """After `refresh` the version that became active is open, and the one before closed unless a request drafts from it."""
    publish(tmp_path, [SPELL], version="20260101T000001Z-aaaaaa")

    async def body() -> None:
        pinned = await corpora.acquire("code", "default")
        publish(tmp_path, [SPELL], version="20260101T000002Z-aaaaaa")
        await corpora.refresh()
        assert sorted(version for _, version in corpora._open) == ["20260101T000001Z-aaaaaa", "20260101T000002Z-aaaaaa"]
        assert usable(pinned)
        corpora.release(pinned)
        assert not usable(pinned) and [version for _, version in corpora._open] == ["20260101T000002Z-aaaaaa"]

    run_with(corpora, body)


def test_a_removed_corpus_is_let_go(tmp_path: Path, corpora: Corpora) -> None:
    """Its files stay mapped for the request that drafts from them, and no longer than until the next `refresh` for nobody."""
    publish(tmp_path, [SPELL])
    publish(tmp_path, [SPELL], name="other", tenant="somebody")

    async def body() -> None:
        pinned = await corpora.acquire("code", "default")
        other = await corpora.acquire("other", "somebody")
        corpora.release(other)
        Catalog(tmp_path).remove("code")
        await corpora.refresh()
        assert usable(pinned) and usable(other), "another tenant's corpus is still there"
        with pytest.raises(NotFound):
            await corpora.acquire("code", "default")
        corpora.release(pinned)
        assert not usable(pinned)
        Catalog(tmp_path).remove("other", "somebody")
        await corpora.refresh()
        assert not usable(other) and not corpora._open

    run_with(corpora, body)


def test_a_version_that_vanishes_meanwhile_is_looked_up_again(
    tmp_path: Path, corpora: Corpora, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading the catalog and opening the files an update may have replaced and removed the version."""
    publish(tmp_path, [SPELL], version="20260101T000001Z-aaaaaa")
    find = corpora._find

    def then_replace(name: str, tenant: str) -> Any:
        found = find(name, tenant)
        if found.active.id.startswith("20260101T000001Z"):
            for version in ("20260101T000002Z-aaaaaa", "20260101T000003Z-aaaaaa"):
                publish(tmp_path, [SPELL], version=version)
            with Catalog(tmp_path).lock("code"):
                Catalog(tmp_path).collect("code")
        return found

    async def body() -> None:
        monkeypatch.setattr(corpora, "_find", then_replace)
        store = await corpora.acquire("code", "default")
        assert store.version == "20260101T000003Z-aaaaaa"

    run_with(corpora, body)


def test_a_damaged_successor_leaves_the_old_version_open(tmp_path: Path, corpora: Corpora) -> None:
    """`refresh` takes up only what can be opened, and a damaged catalog tells it nothing; requests are told what is wrong."""
    publish(tmp_path, [SPELL])

    async def body() -> None:
        store = await corpora.acquire("code", "default")
        corpora.release(store)
        (publish(tmp_path, [SPELL]) / "seg-0000.tokens").unlink()
        await corpora.refresh()
        assert usable(store)
        with pytest.raises(CorpusUnusable, match="file is missing"):
            await corpora.acquire("code", "default")
        (tmp_path / "catalog.sqlite").write_bytes(b"this is no database, whatever its name says " * 100)
        await corpora.refresh()
        assert usable(store)

    run_with(corpora, body)


def test_lists_are_made_on_threads(tmp_path: Path, corpora: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop serves others while headers are read."""
    publish(tmp_path, [SPELL])
    threads = list[threading.Thread]()
    real = Corpora._open_version

    def watched(self: Corpora, corpus: Any) -> datastore.Datastore:
        threads.append(threading.current_thread())
        return real(self, corpus)

    monkeypatch.setattr(Corpora, "_open_version", watched)
    [info] = asyncio.run(corpora.list("default"))
    assert info.usable and threads and threading.main_thread() not in threads


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file's checksum was found to be is remembered over restarts, until anything writes to the file."""
    path = publish(tmp_path / "store", [SPELL]) / "seg-0000.suffixes"
    num_reads = 0
    real = MappedFile.altered

    def counted(self: MappedFile) -> bool:
        nonlocal num_reads
        num_reads += 1
        return real(self)

    monkeypatch.setattr(MappedFile, "altered", counted)

    def fault(folder: Path | None) -> str:
        with datastore.Datastore.open(path.parent) as store:
            return Checks(folder).fault(store.segments()[0].files["suffixes"])

    assert [fault(tmp_path / "notes") for _ in range(3)] == ["", "", ""] and num_reads == 1
    assert [fault(None) for _ in range(2)] == ["", ""] and num_reads == 3
    monkeypatch.setattr(corpus_format, "SMALL_FILE", 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [fault(tmp_path / "notes") for _ in range(2)] == ["content was altered"] * 2 and num_reads == 4
    (tmp_path / "file").touch()
    assert fault(tmp_path / "file" / "below") == "content was altered", "a folder that cannot be made costs a reading"
