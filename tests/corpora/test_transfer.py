"""Versions as files: out, in again, and what a file may not do."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from corpora.build import build
from corpora.catalog import Catalog
from corpora.errors import BadExport, CorpusLocked, InvalidName, StoreNotWritable, VersionNotFound
from corpora.transfer import About, export_version, import_version, read_about
from corpora.update import update
from retriever.datastore import Datastore
from retriever.format import read_metadata
from tests.corpora.test_update import FILES, TOKENIZER, documents, edit
from tests.corpora.trees import plant


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path / "tree", FILES)


@pytest.fixture
def catalog(tmp_path: Path, tree: Path) -> Catalog:
    catalog = Catalog(tmp_path / "store")
    build("code", [tree], TOKENIZER, catalog, model="tiny")
    return catalog


@pytest.fixture
def file(tmp_path: Path, catalog: Catalog) -> Path:
    export_version("code", tmp_path / "code.tar", catalog)
    return tmp_path / "code.tar"


def test_a_version_survives_the_journey(tmp_path: Path, catalog: Catalog, file: Path) -> None:
    """Documents, record, counts and lookups are the same elsewhere, also under another name, and any tar lists the file."""
    other = Catalog(tmp_path / "elsewhere")
    here = catalog.get("code").active
    about = read_about(file)
    assert (about.name, about.version, about.model, about.fingerprint) == ("code", here.id, "tiny", TOKENIZER.fingerprint)
    for name in ("", "renamed"):
        seen: list[tuple[int, int]] = []
        imported = import_version(file, other, name=name, on_bytes=lambda done, total, seen=seen: seen.append((done, total)))
        assert imported.name == (name or "code") and seen[-1][0] == seen[-1][1] > 0
        there = other.get(name or "code").active
        assert (there.num_files, there.num_tokens, there.num_bytes, there.model, there.sources) == (
            here.num_files, here.num_tokens, here.num_bytes, "tiny", here.sources,
        )  # fmt: skip
        path = other.active_path(name or "code")
        assert documents(path) == documents(catalog.active_path("code")) and other.check(name or "code", full=True) == []
        assert read_metadata(path) == read_metadata(catalog.active_path("code"))
        with Datastore.open(path) as store:
            assert (store.name, store.version) == (name or "code", there.id)
    with tarfile.open(file) as tar:
        assert tar.getnames()[:2] == ["about.json", "manifest.json"] and all(m.isreg() for m in tar.getmembers())
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_imported_corpus_can_be_updated(tmp_path: Path, tree: Path, file: Path) -> None:
    """Where its sources are: the record travels with it."""
    other = Catalog(tmp_path / "elsewhere")
    import_version(file, other)
    edit(tree / "a.py", "changed = True\n")
    result = update("code", other, lambda _: TOKENIZER)
    assert (result.changed, result.added, result.kept) == (True, 1, 2)


def test_deleted_text_does_not_leave(tmp_path: Path, tree: Path, catalog: Catalog) -> None:
    """Of a version that masks deleted documents, the file holds only what is left."""
    plant(tree, {f"more/{i}.md": f"The lazy dog sleeps {i} times.\n" * 30 for i in range(12)})
    build("code", [tree], TOKENIZER, catalog, model="tiny")
    (tree / "a.py").unlink()
    path = update("code", catalog, lambda _: TOKENIZER).report.path
    assert list(path.glob("*.deleted")), "the test needs a version that masks something"
    about = export_version("code", tmp_path / "code.tar", catalog)
    other = Catalog(tmp_path / "elsewhere")
    import_version(tmp_path / "code.tar", other)
    there = other.active_path("code")
    assert documents(there) == documents(path) and not list(there.glob("*.deleted"))
    with Datastore.open(there) as store:
        assert sum(len(segment.order) for segment in store.segments()) == about.num_tokens
    assert not list(catalog.root.glob(".trash-*"))


def test_which_version_and_where(tmp_path: Path, tree: Path, catalog: Catalog) -> None:
    """An older version can be exported; one that is not there, and a target that cannot be written, are named."""
    first = catalog.get("code").active.id
    edit(tree / "a.py", "changed = True\n")
    update("code", catalog, lambda _: TOKENIZER)
    assert export_version("code", tmp_path / "old.tar", catalog, version=first).version == first
    with pytest.raises(VersionNotFound):
        export_version("code", tmp_path / "x.tar", catalog, version="v9")
    with pytest.raises(StoreNotWritable, match=r"no/where\.tar"):
        export_version("code", tmp_path / "no" / "where.tar", catalog)
    assert not list(tmp_path.glob(".*"))


def members(file: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(file) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar.getmembers()]  # type: ignore[union-attr]


def pack(file: Path, parts: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in parts:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def renamed(info: tarfile.TarInfo, name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info.name, info.type = name, kind
    return info


def about_with(parts: list[tuple[tarfile.TarInfo, bytes]], **values: object) -> None:
    parts[0] = (parts[0][0], json.dumps(json.loads(parts[0][1]) | values).encode())


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


Parts = list[tuple[tarfile.TarInfo, bytes]]
TRICKS: dict[str, Callable[[Parts], object]] = {
    "a path that leads out": lambda p: p.__setitem__(2, (renamed(p[2][0], "../../evil"), p[2][1])),
    "an absolute path": lambda p: p.__setitem__(2, (renamed(p[2][0], "/tmp/evil"), p[2][1])),
    "a link": lambda p: p.__setitem__(2, (renamed(p[2][0], p[2][0].name, tarfile.SYMTYPE), b"")),
    "a device": lambda p: p.__setitem__(2, (renamed(p[2][0], p[2][0].name, tarfile.CHRTYPE), b"")),
    "one member more": lambda p: p.append((tarfile.TarInfo("extra"), b"x")),
    "one member less": lambda p: p.pop(),
    "another order": lambda p: p.append(p.pop(2)),
    "a long name": lambda p: p.insert(2, (tarfile.TarInfo("x" * 300), b"x")),
    "a longer member": lambda p: p.__setitem__(2, (p[2][0], p[2][1] + b"x")),
    "a flipped bit": lambda p: p.__setitem__(2, (p[2][0], flip(p[2][1], len(p[2][1]) - 1))),
    "a flipped bit in a header": lambda p: p.__setitem__(2, (p[2][0], flip(p[2][1], 20))),
    "another manifest": lambda p: p.__setitem__(1, (p[1][0], p[1][1].replace(b"tiny", b"huge"))),
    "no manifest": lambda p: p.pop(1),
    "no about": lambda p: p.pop(0),
    "an about that is no JSON": lambda p: p.__setitem__(0, (p[0][0], b"{")),
    "an about of another release": lambda p: about_with(p, format=2),
    "a count that is none": lambda p: about_with(p, num_files="many"),
    "a count below nothing": lambda p: about_with(p, num_bytes=-1),
    "another fingerprint": lambda p: about_with(p, fingerprint="f" * 32),
    "an about without end": lambda p: p.__setitem__(0, (p[0][0], b" " * (1 << 21))),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_that_was_tampered_with_is_refused(trick: str, tmp_path: Path, file: Path) -> None:
    """Named, and nothing of it stays: neither a corpus nor a file anywhere."""
    parts = members(file)
    TRICKS[trick](parts)
    pack(file, parts)
    other = Catalog(tmp_path / "elsewhere")
    with pytest.raises(BadExport, match=r"code\.tar"):
        import_version(file, other)
    assert other.list() == [] and not (other.root / "code").exists() and not (tmp_path / "evil").exists()


def test_a_cut_file_is_refused(tmp_path: Path, catalog: Catalog, file: Path) -> None:
    """Wherever it ends, and what is no tar at all; the corpus that was there stays."""
    data, before = file.read_bytes(), catalog.get("code")
    end = max(info.offset_data + info.size for info, _ in members(file))
    for size in [*range(0, end, max(1, end // 40)), end - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(BadExport):
            import_version(file, catalog)
    file.write_bytes(b"PK\3\4" + b"x" * 2000)
    with pytest.raises(BadExport, match="no exported corpus"):
        read_about(file)
    with pytest.raises(BadExport, match="cannot be read"):
        read_about(tmp_path / "nowhere.tar")
    assert catalog.get("code") == before and catalog.check("code") == []


def test_whose_name_and_whose_turn(tmp_path: Path, catalog: Catalog, file: Path) -> None:
    """Another tenant's name is not available, a name that is none neither, and whoever is at work is not disturbed."""
    with pytest.raises(InvalidName):
        import_version(file, catalog, tenant="somebody")
    with pytest.raises(InvalidName):
        import_version(file, catalog, name="../x")
    with catalog.lock("code"), pytest.raises(CorpusLocked):
        import_version(file, catalog)
    version = import_version(file, catalog).version
    assert catalog.get("code").active.id == version and catalog.rollback("code").id != version
    assert isinstance(read_about(file), About)
