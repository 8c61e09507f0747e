"""The catalog: which corpora there are, whose, and which version is active."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations

from corpora import catalog as catalog_module
from corpora.catalog import Catalog, Version, check_name, created_at, default_store, new_version_id
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

VERSION = Version("code", "v1", "2026-11-29T20:35:12+00:00", "f" * 32, 500, "tiny", 3, 2, 100, 400, ("src", "docs"))


def publish(catalog: Catalog, *, corpus: str = "code", version: str = "v1", tenant: str = "default") -> None:
    """A version whose folder holds one file, made active."""
    folder = catalog.version_path(corpus, version)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"options": {}}))
    catalog.publish(replace(VERSION, corpus=corpus, id=version), tenant)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "store")


def test_a_published_version_is_found_again(catalog: Catalog) -> None:
    """All that was entered comes back, from another object, too; there is no previous version yet."""
    publish(catalog)
    found = Catalog(catalog.root, read_only=True).get("code")
    assert (found.name, found.tenant, found.active, found.previous) == ("code", "default", VERSION, "")
    assert catalog.list() == [found] and catalog.versions("code") == [VERSION]
    assert catalog.active_path("code") == catalog.root / "code" / "versions" / "v1"


def test_a_store_that_is_not_there_has_no_corpora(tmp_path: Path) -> None:
    """Reading creates nothing; an empty catalog file counts as none."""
    for read_only in (True, False):
        catalog = Catalog(tmp_path / "none", read_only=read_only)
        assert catalog.list() == [] and catalog.gc() == []
        with pytest.raises(CorpusNotFound, match="no such corpus: code"):
            catalog.get("code")
    assert not (tmp_path / "none").exists()
    (tmp_path / "catalog.sqlite").touch()
    assert Catalog(tmp_path, read_only=True).list() == []


def test_activate_and_rollback_move_one_pointer(catalog: Catalog) -> None:
    """The version that was active becomes the previous one; rolling back twice is back again."""
    for version in ("v1", "v2", "v3"):
        publish(catalog, version=version)

    def state() -> tuple[str, str]:
        corpus = catalog.get("code")
        return corpus.active.id, corpus.previous

    assert state() == ("v3", "v2") and [v.id for v in catalog.versions("code")] == ["v3", "v2", "v1"]
    assert catalog.rollback("code").id == "v2" and state() == ("v2", "v3")
    assert catalog.rollback("code").id == "v3" and state() == ("v3", "v2")
    assert catalog.activate("code", "v1").id == "v1" and state() == ("v1", "v3")
    assert catalog.activate("code", "v1").id == "v1" and state() == ("v1", "v3")
    with pytest.raises(VersionNotFound, match="no such version: v9"):
        catalog.activate("code", "v9")


def test_there_must_be_something_to_return_to(catalog: Catalog) -> None:
    """Neither a first version nor one whose folder is gone can be returned to."""
    publish(catalog)
    with pytest.raises(VersionNotFound, match="no earlier version"):
        catalog.rollback("code")
    publish(catalog, version="v2")
    (catalog.version_path("code", "v1") / "manifest.json").unlink()
    catalog.version_path("code", "v1").rmdir()
    with pytest.raises(VersionNotFound, match="v1"):
        catalog.rollback("code")
    assert catalog.get("code").active.id == "v2"


def test_tenants_do_not_see_one_another(catalog: Catalog) -> None:
    """Another tenant's corpus is not found, by any call, nor hinted at; its name is not available."""
    publish(catalog, tenant="anna")
    assert catalog.list("anna") and catalog.list("ben") == []
    for call in (catalog.get, catalog.versions, catalog.active_path, catalog.show, catalog.rollback, catalog.remove):
        with pytest.raises(CorpusNotFound) as error:
            call("code", "ben")
        assert "did you mean" not in str(error.value)
    with pytest.raises(CorpusNotFound) as error:
        catalog.get("cod", "ben")
    assert "code" not in str(error.value).replace("corpus build cod", "")
    with pytest.raises(InvalidName, match="not available"):
        catalog.publish(replace(VERSION, id="v2"), "ben")
    with pytest.raises(InvalidName, match="not available"):
        catalog.refuse_taken("code", "ben")
    assert catalog.get("code", "anna").active.id == "v1"


def test_a_near_name_is_suggested(catalog: Catalog) -> None:
    """A typing error is met with the name that was probably meant."""
    publish(catalog)
    with pytest.raises(CorpusNotFound, match=r"no such corpus: cdoe; did you mean code\?"):
        catalog.get("cdoe")


def test_remove_takes_rows_and_files(catalog: Catalog) -> None:
    """Nothing of it is left, others stay, and the name may be used again."""
    publish(catalog)
    publish(catalog, corpus="other")
    catalog.remove("code")
    assert [c.name for c in catalog.list()] == ["other"]
    assert sorted(p.name for p in catalog.root.iterdir() if not p.name.startswith("catalog")) == [".locks", "other"]
    publish(catalog)


def test_gc_keeps_active_and_previous(catalog: Catalog) -> None:
    """Older versions, unfinished ones, ones no row knows and halves of removed corpora go; what is being built stays."""
    for version in ("v1", "v2", "v3"):
        publish(catalog, version=version)
    publish(catalog, corpus="busy")
    for leftover in (
        "code/versions/v4.tmp",
        "code/versions/v5",
        "busy/versions/v2.tmp",
        "never-finished/versions/v1.tmp",
        ".trash-x",
    ):
        (catalog.root / leftover).mkdir(parents=True)
    with catalog.lock("busy"):
        removed = {str(path.relative_to(catalog.root)) for path in catalog.gc()}
    assert removed == {
        ".trash-x",
        "code/versions/v1",
        "code/versions/v4.tmp",
        "code/versions/v5",
        "never-finished/versions/v1.tmp",
    }
    assert [v.id for v in catalog.versions("code")] == ["v3", "v2"] and catalog.rollback("code").id == "v2"
    assert (catalog.root / "busy/versions/v2.tmp").exists() and not (catalog.root / "never-finished").exists()


def test_one_holder_at_a_time(catalog: Catalog) -> None:
    """A second one fails at once and is told who holds the corpus; another corpus is free; afterwards this one is, too."""
    with catalog.lock("code"):
        with (
            pytest.raises(CorpusLocked, match=rf"code \(by process {os.getpid()} on .* since 20") as error,
            catalog.lock("code"),
        ):
            pass
        assert error.value.holder.startswith(f"process {os.getpid()}")
        with catalog.lock("other"):
            pass
    with catalog.lock("code"):
        pass


@pytest.mark.parametrize(
    "name", ["", "Code", "-x", ".x", "a/b", "..", "a b", "ä", "a" * 65, "x\n", "catalog.sqlite", "catalog.sqlite-wal"]
)
def test_names_that_are_refused(name: str, catalog: Catalog) -> None:
    """What could leave the store, differ only in case, or collide with the catalog is no name."""
    for call in (check_name, lambda n: catalog.version_path(n, "v1"), lambda n: catalog.lock(n).__enter__()):
        with pytest.raises(InvalidName, match="corpus name is not valid"):
            call(name)


@pytest.mark.parametrize("name", ["a", "0", "my-code_2.1", "a" * 64])
def test_names_that_are_taken(name: str) -> None:
    """Letters, digits, dots, dashes, underscores."""
    assert check_name(name) == name


def test_version_ids_sort_by_time() -> None:
    """And say when they were made; two of one second differ."""
    assert created_at("20261129T203512Z-1a2b3c") == "2026-11-29T20:35:12+00:00"
    assert len({new_version_id() for _ in range(9)}) == 9


def test_the_default_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """DRAFTLOOM_HOME, else a folder in the user's home."""
    monkeypatch.setenv("DRAFTLOOM_HOME", "/data/corpora")
    assert default_store() == Path("/data/corpora")
    monkeypatch.delenv("DRAFTLOOM_HOME")
    assert default_store() == Path.home() / ".local/share/draftloom/corpora"


def test_show_is_ready_for_json(catalog: Catalog) -> None:
    """Catalog, files and manifest in one; a manifest that cannot be read is None."""
    publish(catalog)
    publish(catalog, version="v2")
    details = json.loads(json.dumps(catalog.show("code")))
    assert details["versions"] == ["v2", "v1"] and details["previous"] == "v1" and details["manifest"] == {"options": {}}
    assert details["bytes_on_disk"] == len('{"options": {}}') and details["active"]["sources"] == ["src", "docs"]
    (catalog.active_path("code") / "manifest.json").write_text("{")
    assert catalog.show("code")["manifest"] is None


# what can be wrong with the store


def test_a_failed_transaction_changes_nothing(catalog: Catalog) -> None:
    """Entering a version twice fails as a whole: the active one does not move."""
    publish(catalog)
    publish(catalog, version="v2")
    with pytest.raises(CatalogError):
        catalog.publish(VERSION)
    assert catalog.get("code").active.id == "v2" and catalog.get("code").previous == "v1"


def test_a_read_only_catalog_writes_nothing(catalog: Catalog) -> None:
    """Every change is refused, whoever may write the files."""
    publish(catalog)
    reader = Catalog(catalog.root, read_only=True)
    for change in (lambda: reader.publish(VERSION), lambda: reader.rollback("code"), lambda: reader.activate("code", "v1")):
        with pytest.raises((CatalogError, VersionNotFound)):
            change()
    assert reader.get("code").active == VERSION


@pytest.mark.parametrize(
    "content", [b"this is no database, but a text that is long enough", b"SQLite format 3\0" + b"\xff" * 4000]
)
def test_a_damaged_catalog_is_named(content: bytes, catalog: Catalog) -> None:
    """Reading and writing both say which file is damaged and what to do."""
    catalog.root.mkdir()
    (catalog.root / "catalog.sqlite").write_bytes(content)
    for call in (catalog.list, lambda: catalog.publish(VERSION)):
        with pytest.raises(CatalogCorrupt, match=r"damaged: .*catalog\.sqlite"):
            call()
    assert (catalog.root / "catalog.sqlite").read_bytes() == content


def test_a_catalog_of_a_later_release_is_refused(catalog: Catalog) -> None:
    """It is neither read nor changed."""
    publish(catalog)
    later = Migrations("draftloom.corpora")
    later(name="m999_of_tomorrow")(lambda db: db.execute("create table tomorrow (x)"))
    with sqlite3.connect(catalog.root / "catalog.sqlite") as connection:
        later.apply(Database(connection))
    for call in (catalog.list, lambda: catalog.publish(VERSION)):
        with pytest.raises(CatalogTooNew, match="m999_of_tomorrow"):
            call()


def test_a_catalog_of_an_earlier_release_is_brought_up_to_date(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that may write takes the missing steps, once, and rows survive; a reader says what to do."""
    publish(catalog)

    def m002_notes(db: Database) -> None:
        db.execute("alter table corpora add column note text not null default ''")

    steps = (*catalog_module._STEPS, m002_notes)
    monkeypatch.setattr(catalog_module, "_STEPS", steps)
    monkeypatch.setattr(catalog_module, "_STEP_NAMES", frozenset(step.__name__ for step in steps))
    with pytest.raises(CatalogError, match="earlier release"):
        Catalog(catalog.root, read_only=True).list()
    assert catalog.get("code").active == VERSION and Catalog(catalog.root, read_only=True).get("code").active == VERSION
    with sqlite3.connect(catalog.root / "catalog.sqlite") as connection:
        names = [name for (name,) in connection.execute("select name from _sqlite_migrations order by id")]
    assert names == ["m001_corpora_and_versions", "m002_notes"]


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file where the folder should be, as without permission, is one clear message."""
    (tmp_path / "file").write_text("")
    for call in (lambda c: c.publish(VERSION), lambda c: c.lock("code").__enter__()):
        with pytest.raises(StoreNotWritable, match="cannot be written"):
            call(Catalog(tmp_path / "file" / "store"))


def test_a_busy_catalog_is_waited_for_and_then_named(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer waits for another's transaction a while; readers never wait."""
    publish(catalog)
    monkeypatch.setattr(catalog_module, "BUSY_SECONDS", 0.05)
    other = sqlite3.connect(catalog.root / "catalog.sqlite", isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(CatalogError, match="busy"):
        catalog.activate("code", "v1")
    assert catalog.get("code").active.id == "v1"
    other.execute("rollback")
    other.close()
    catalog.activate("code", "v1")


def test_many_threads_may_publish(catalog: Catalog) -> None:
    """The first ones create the catalog together; every corpus is entered."""
    threads = [threading.Thread(target=publish, args=(catalog,), kwargs={"corpus": f"c{i}"}) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [corpus.name for corpus in catalog.list()] == [f"c{i}" for i in range(6)]
