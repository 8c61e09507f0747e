"""From one version of a corpus to the next."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from corpora import walk
from corpora.build import build
from corpora.catalog import Catalog
from corpora.decisions import Reason
from corpora.errors import CorpusNotFound, NothingToIndex, OtherTokenizer, SourceNotFound, TokenizerLost
from corpora.options import BuildOptions
from corpora.record import Record
from corpora.survey import Survey
from corpora.update import UpdateReport, update
from engine.text import Tokenizer
from retriever import format
from retriever.datastore import Datastore
from retriever.format import Manifest
from tests import tiny_tokenizers
from tests.corpora.trees import plant

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
FILES: dict[str, str | bytes] = {
    "a.py": "def add(first, second):\n    return first + second\n",
    "b.py": "for item in self.items:\n    total += item.size\n",
    "copy.py": "for item in self.items:\n    total += item.size\n",
    "docs/guide.md": "The quick brown fox jumps over the lazy dog.\n" * 40,
    "blob.bin": b"\0\1",
}


@pytest.fixture(autouse=True, scope="module")
def settled() -> Iterator[None]:
    """Files count as settled at once: else what is as young as a test's files is read again, to be sure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "SETTLED_NS", -(10**12))
        yield


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path / "tree", FILES)


@pytest.fixture
def catalog(tmp_path: Path, tree: Path) -> Catalog:
    catalog = Catalog(tmp_path / "store")
    build("code", [tree], TOKENIZER, catalog, model="tiny")
    return catalog


def run(catalog: Catalog, name: str = "code") -> UpdateReport:
    return update(name, catalog, lambda _: TOKENIZER)


def documents(path: Path) -> dict[str, str]:
    """name -> text of everything in a version."""
    with Datastore.open(path) as datastore:
        indices = range(datastore.num_documents)
        return {datastore.document_name(i): TOKENIZER.decode(datastore.document_tokens(i)) for i in indices}


def edit(path: Path, text: str) -> None:
    """New content with another time of change, whatever the clock's grain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    later = path.stat().st_mtime_ns + 1_000_000 if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(later, later))


def count_after(path: Path, beginning: str) -> int:
    """How often the corpus has seen a text."""
    ids = TOKENIZER.encode(beginning)
    with Datastore.open(path) as datastore:
        match = datastore.longest_match(ids, max_length=64)
        return match.count if match.length == len(ids) else 0


def test_only_what_changed_is_tokenized(tree: Path, catalog: Catalog) -> None:
    """A changed, a new, a removed and an untouched file: the corpus is what a build would make, at the price of two files."""
    first = catalog.active_path("code")
    edit(tree / "a.py", "def subtract(first, second):\n    return first - second\n")
    edit(tree / "new.py", "class Index:\n    pass\n")
    (tree / "b.py").unlink()
    (tree / "copy.py").unlink()
    result = run(catalog)
    assert (result.changed, result.added, result.removed, result.kept) == (True, 2, 2, 1)
    assert documents(result.report.path) == {
        "a.py": "def subtract(first, second):\n    return first - second\n",
        "docs/guide.md": FILES["docs/guide.md"],
        "new.py": "class Index:\n    pass\n",
    }
    fresh = [len(TOKENIZER.encode((tree / name).read_text())) for name in ("a.py", "new.py")]
    assert result.report.new_tokens == sum(fresh) < result.report.tokens
    version = catalog.get("code").active
    assert (version.num_files, version.num_documents, version.num_tokens) == (3, 3, result.report.tokens)
    assert catalog.check("code", full=True) == [] and catalog.get("code").previous == first.name
    assert catalog.rollback("code").id == first.name and documents(first)["b.py"] == FILES["b.py"]


def test_deleted_text_is_never_drafted_again(tree: Path, catalog: Catalog) -> None:
    """Neither matched, nor counted, nor among the continuations, neither of a removed document nor of one that was replaced."""
    path = catalog.active_path("code")
    assert count_after(path, "for item in self") and count_after(path, "def add(first")
    edit(tree / "a.py", "nothing of the kind\n")
    (tree / "b.py").unlink()
    (tree / "copy.py").unlink()
    path = run(catalog).report.path
    assert not count_after(path, "for item in self") and not count_after(path, "def add(first")
    left = "".join(documents(path).values())
    gone = set(TOKENIZER.encode(str(FILES["b.py"])).tolist()) - set(TOKENIZER.encode(left).tolist())
    with Datastore.open(path) as datastore:
        for ids in (TOKENIZER.encode("for"), TOKENIZER.encode("def"), TOKENIZER.encode(" ")):
            assert not gone & set(datastore.lookup(ids, 64).tokens.tolist())


def test_nothing_is_written_if_nothing_changed(tree: Path, catalog: Catalog) -> None:
    """Not even if files were touched: what was read again has the same content. No tokenizer is loaded for it."""
    before = catalog.get("code")

    def refuse(_: str) -> Tokenizer:
        raise AssertionError("no tokenizer is needed")

    for touched in (False, True):
        if touched:
            os.utime(tree / "a.py", ns=(5, 5))
        result = update("code", catalog, refuse)
        assert (result.changed, result.added, result.removed, result.kept) == (False, 0, 0, 3)
        assert result.report.version == before.active.id and result.report.tokens == before.active.num_tokens
        assert result.report.skipped == {Reason.DUPLICATE: 1, Reason.BINARY: 1}
    assert catalog.get("code") == before


def test_the_copy_that_stays_is_stored(tree: Path, catalog: Catalog) -> None:
    """If the first of two copies goes, the second is read again and stored under its own name."""
    (tree / "b.py").unlink()
    result = run(catalog)
    assert (result.added, result.removed, result.kept) == (1, 1, 2)
    assert documents(result.report.path)["copy.py"] == FILES["copy.py"] and "b.py" not in documents(result.report.path)


def test_options_and_sources_are_those_of_the_build(tmp_path: Path, tree: Path) -> None:
    """Patterns apply to new files; the working directory does not matter; a source that is gone is named."""
    catalog = Catalog(tmp_path / "other")
    other = plant(tmp_path / "more", {"c.py": "class Index:\n    pass\n"})
    build("code", [tree, other], TOKENIZER, catalog, options=BuildOptions(exclude=("*.md",)), model="tiny")
    edit(tree / "new.md", "text\n")
    edit(tree / "new.py", "text = 1\n")
    report = run(catalog).report
    assert sorted(documents(report.path)) == ["more/c.py", "tree/a.py", "tree/b.py", "tree/new.py"]
    manifest = Manifest.read(report.path)
    assert manifest.sources == (str(tree), str(other)) and manifest.options["exclude"] == ["*.md"]
    assert manifest.options["model"] == "tiny"
    before = catalog.get("code")
    shutil.rmtree(other)
    with pytest.raises(SourceNotFound, match="more"):
        run(catalog)
    assert catalog.get("code") == before


def test_what_cannot_be_updated_is_refused(tmp_path: Path, tree: Path, catalog: Catalog) -> None:
    """No such corpus, another tokenizer, nothing left: each is its own error, and the corpus stays as it was."""
    before = catalog.get("code")
    with pytest.raises(CorpusNotFound):
        run(catalog, "cod")
    edit(tree / "a.py", "changed = True\n")
    other = Tokenizer(tiny_tokenizers.byte_level(300))
    with pytest.raises(OtherTokenizer, match="model tiny has another tokenizer"):
        update("code", catalog, lambda _: other)
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        path.unlink()
    with pytest.raises(NothingToIndex):
        run(catalog)
    assert catalog.get("code") == before and documents(catalog.active_path("code"))["b.py"] == FILES["b.py"]
    assert [path.name for path in (catalog.root / "code" / "versions").iterdir()] == [before.active.id]


class Standing:
    """An encoder that stands in for the tokenizer."""

    def __init__(self, checksum: str) -> None:
        self.checksum = checksum
        self.num_texts = 0

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[np.int32]]:
        self.num_texts += len(texts)
        return TOKENIZER.encode_batch(texts)


def test_an_encoder_that_agrees_spares_the_tokenizer(tree: Path, catalog: Catalog) -> None:
    """None is loaded, and the corpus and its record are those that the tokenizer would have made."""

    def refuse(_: str) -> Tokenizer:
        raise AssertionError("no tokenizer is needed")

    edit(tree / "a.py", "changed = True\n")
    encoder = Standing(TOKENIZER.checksum)
    result = update("code", catalog, refuse, encoder=encoder)
    assert (result.added, result.removed, result.kept, encoder.num_texts) == (1, 1, 2, 1)
    assert documents(result.report.path)["a.py"] == "changed = True\n"
    record = Record.read(result.report.path)
    assert record is not None and record.checksum == TOKENIZER.checksum


@pytest.mark.parametrize("recorded", [TOKENIZER.checksum, ""])
@pytest.mark.parametrize("checksum", ["", "another"])
def test_an_encoder_that_does_not_agree_is_not_asked(
    tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, recorded: str, checksum: str
) -> None:
    """Nor one that could not be loaded, even where no checksum was recorded."""
    edit(tree / "a.py", "changed = True\n")
    read = Record.read
    monkeypatch.setattr(Record, "read", lambda folder: replace(read(folder) or Record(), checksum=recorded))
    encoder = Standing(checksum)
    assert update("code", catalog, lambda _: TOKENIZER, encoder=encoder).added == 1 and encoder.num_texts == 0


def test_an_encoder_that_is_lost_changes_nothing(tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes through, and the corpus is as it was."""

    def lose(_: Sequence[str]) -> list[NDArray[np.int32]]:
        raise TokenizerLost("it has ended")

    before = catalog.get("code")
    edit(tree / "a.py", "changed = True\n")
    encoder = Standing(TOKENIZER.checksum)
    monkeypatch.setattr(encoder, "encode_batch", lose)
    with pytest.raises(TokenizerLost):
        update("code", catalog, lambda _: TOKENIZER, encoder=encoder)
    assert catalog.get("code") == before
    assert [path.name for path in (catalog.root / "code" / "versions").iterdir()] == [before.active.id]


def test_a_version_without_a_record_is_built_again(tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of an earlier release is."""
    edit(tree / "a.py", "changed = True\n")
    monkeypatch.setattr(Record, "read", lambda folder: None)
    result = run(catalog)
    assert (result.changed, result.added, result.removed, result.kept) == (True, 3, 3, 0)
    assert documents(result.report.path)["a.py"] == "changed = True\n" and catalog.check("code", full=True) == []


def test_a_record_is_read_as_it_was_written(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry that can be known again, and the counts; what is no record counts as none."""
    record = Record.read(catalog.active_path("code"))
    assert record is not None
    assert record.skipped == {Reason.DUPLICATE: 1, Reason.BINARY: 1}
    assert record.endings == {".py": (3, sum(len(FILES[n]) for n in FILES if n.endswith(".py"))), ".md": (1, 1800)}
    assert {name: found.names for name, found in record.known.items()} == {
        "a.py": ("a.py",),
        "b.py": ("b.py",),
        "blob.bin": (),
        "copy.py": (),
        "docs/guide.md": ("docs/guide.md",),
    }
    twice = replace(record, entries=record.entries + record.entries[:1])
    assert "a.py" not in twice.known and len(twice.known) == 4
    for data in (b"", b"no zlib", zlib.compress(b"no JSON\n"), zlib.compress(b"{}\n")):
        monkeypatch.setattr(format, "read_metadata", lambda folder, data=data: data)
        assert Record.read(catalog.root) is None


TEXTS = ("alpha = 1\n", "beta = 2\nbeta = 3\n", "gamma " * 30 + "\n")
STATES = st.lists(st.tuples(st.sampled_from(["a.py", "b.py", "sub/c.py", "d.md"]), st.sampled_from([None, *TEXTS])), min_size=1)


@settings(max_examples=12, deadline=None)
@given(st.lists(STATES, min_size=1, max_size=4))
def test_updates_end_where_a_build_would(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[tuple[str, str | None]]]
) -> None:
    """After any edits in any number of rounds the documents, and what follows any of their beginnings, are those of a build."""
    folder = tmp_path_factory.mktemp("updates")
    tree = plant(folder / "tree", {"keep.py": "kept = True\n"})
    catalog, fresh = Catalog(folder / "store"), Catalog(folder / "fresh")
    build("code", [tree], TOKENIZER, catalog, model="tiny")
    for edits in rounds:
        for name, text in edits:
            if text is not None:
                edit(tree / name, text)
            elif (tree / name).exists():
                (tree / name).unlink()
        run(catalog)
    report = build("code", [tree], TOKENIZER, fresh, model="tiny")
    path = catalog.active_path("code")
    assert documents(path) == documents(report.path) and catalog.check("code", full=True) == []
    with Datastore.open(path) as updated, Datastore.open(report.path) as built:
        for text in documents(path).values():
            ids = TOKENIZER.encode(text)
            for length in range(1, min(len(ids), 6)):
                assert updated.longest_match(ids[:length]) == built.longest_match(ids[:length])


def test_survey_with_a_record_reads_only_what_changed(tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file is not opened."""
    edit(tree / "a.py", "changed = True\n")
    read = list[str]()
    real = Survey._read

    def watched(self: Survey, entry: object) -> object:
        read.append(entry.decision.name)  # type: ignore[attr-defined]
        return real(self, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Survey, "_read", watched)
    assert run(catalog).changed and read == ["a.py"]
