"""Versions made from other versions: what stays, what goes, and how many segments there are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever import format
from retriever.datastore import Datastore
from retriever.errors import ChecksumMismatch, VersionExists
from retriever.format import read_metadata, write_version
from retriever.update import GROWTH, write_update
from tests.retriever.oracles import assert_blended, datastore_rows, longest_match, paths_of

Named = dict[str, list[int]]


def pairs(documents: Named) -> list[tuple[str, np.ndarray]]:
    """What the writers take."""
    return [(name, np.array(tokens, np.int32)) for name, tokens in documents.items()]


def texts(store: Datastore) -> Named:
    """What a version holds, by name."""
    return {document.name: document.tokens.tolist() for document in store.documents()}


class Corpus:
    """A corpus of words 0 to 99 that is updated again and again."""

    def __init__(self, root: Path, documents: Named, **options: int) -> None:
        self.root = root
        self.num_versions = 1
        self.path = write_version(root, "c", "v0", pairs(documents), fingerprint="words", vocab_size=100, **options)

    def update(self, documents: Named, removed: list[str], **options: float) -> Datastore:
        """One more version, opened."""
        self.path = write_update(
            self.root, "c", f"v{self.num_versions}", self.path, pairs(documents), removed=removed, **options
        )
        self.num_versions += 1
        return Datastore.open(self.path)


tokens_of_few = st.lists(st.integers(0, 2), max_size=12)
changes = st.lists(st.tuples(st.integers(0, 6), st.none() | tokens_of_few), max_size=4)


@given(
    start=st.lists(tokens_of_few, min_size=1, max_size=7),
    updates=st.lists(changes, min_size=1, max_size=3),
    context=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    most_deleted=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_an_updated_version_is_one_built_from_what_is_left(
    tmp_path_factory: pytest.TempPathFactory,
    start: list[list[int]],
    updates: list[list[tuple[int, list[int] | None]]],
    context: list[int],
    most_deleted: float,
) -> None:
    """Whatever is deleted, replaced and added: documents, counts, matches and drafts are those of the texts that are left."""
    expected = {f"d{i}": tokens for i, tokens in enumerate(start)}
    corpus = Corpus(tmp_path_factory.mktemp("update"), expected, segment_tokens=20)
    for update in updates:
        added = {f"d{i}": tokens for i, tokens in update if tokens is not None}
        gone = [f"d{i}" for i, _ in update]
        expected = {name: tokens for name, tokens in expected.items() if name not in gone} | added
        with corpus.update(added, gone, most_deleted=most_deleted) as store:
            assert texts(store) == expected
            assert (store.num_documents, store.num_tokens) == (len(expected), sum(map(len, expected.values())))
            assert store.check(full=True) == []
            key = np.array(context, np.int32)
            match = store.longest_match(key, max_length=8)
            assert (match.length, match.count) == longest_match(list(expected.values()), context, 8)
            found = store.lookup(key, 12, samples=200, classes=3, depth=6)
            assert_blended(found, datastore_rows(list(expected.values()), context, 32, 3, 6), 12)


def test_deleted_text_is_neither_matched_nor_sampled(tmp_path: Path) -> None:
    """Nine in ten of a frequent context's occurrences go: the sample and its counts are those of the rest, exactly."""
    documents = {f"d{i}": [9, i % 10, 50] for i in range(2000)}
    corpus = Corpus(tmp_path, documents)
    store = corpus.update({}, [name for name, tokens in documents.items() if tokens[1] != 4], most_deleted=1.0)
    assert (store.path / "seg-0000.deleted").exists()
    found = store.lookup(np.array([9], np.int32), 8, samples=32)
    assert paths_of(found) == [(4,), (4, 50)]
    assert found.counts.tolist() == [200, 200]
    assert store.longest_match(np.array([9, 5], np.int32)).count == 0
    assert store.longest_match(np.array([9, 4], np.int32)).count == 200


def test_unchanged_segments_are_shared(tmp_path: Path) -> None:
    """The base's files are the new version's files, and each version outlives the other."""
    corpus = Corpus(tmp_path, {f"d{i}": list(range(100)) for i in range(50)})
    base = corpus.path
    store = corpus.update({"new": [1, 2, 3]}, ["d7"])
    assert store.manifest.num_segments == 2
    for kind in ("tokens", "suffixes", "documents", "table"):
        assert (base / f"seg-0000.{kind}").samefile(store.path / f"seg-0001.{kind}")
    assert "d7" in texts(Datastore.open(base))
    assert "d7" not in texts(store)


def test_what_was_deleted_before_is_shared_too(tmp_path: Path) -> None:
    """A segment that loses nothing is the base's, with the marks of what it lost earlier; only a new loss is written down."""
    corpus = Corpus(tmp_path, {f"d{i}": list(range(100)) for i in range(50)})
    masked = corpus.update({}, ["d7"], most_deleted=1.0).path / "seg-0000.deleted"
    same = corpus.update({}, ["other"], most_deleted=1.0)
    assert masked.samefile(same.path / "seg-0000.deleted") and "d7" not in texts(same)
    less = corpus.update({}, ["d8"], most_deleted=1.0)
    assert not masked.samefile(less.path / "seg-0000.deleted") and not {"d7", "d8"} & set(texts(less))


def test_where_links_fail_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links costs space, nothing else."""
    corpus = Corpus(tmp_path, {f"d{i}": list(range(100)) for i in range(50)})

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    base = corpus.path
    store = corpus.update({"new": [1]}, [])
    assert store.check(full=True) == []
    assert len(texts(store)) == 51
    names = [path.name for path in base.glob("seg-*")]
    assert not any((base / name).samefile(other) for name in names for other in store.path.iterdir())


def test_the_number_of_segments_stays_logarithmic(tmp_path: Path) -> None:
    """After any number of small updates every segment is more than twice as large as all smaller ones together."""
    corpus = Corpus(tmp_path, {"start": [1, 2, 3, 4] * 500})
    written = 0
    for i in range(60):
        with corpus.update({f"d{i}": [i, 5, 6, 7] * 5}, []) as store:
            sizes = sorted(len(segment.order) + len(segment.living) for segment in store.segments())
            assert all(size > GROWTH * sum(sizes[:k]) for k, size in enumerate(sizes))
            linked = {path.name for path in store.path.iterdir() if path.stat().st_nlink > 1}
            written += sum(len(s.order) for s in store.segments() if s.files["tokens"].path.name not in linked)
    assert store.num_documents == 61
    assert len(sizes) <= 5
    assert written < 10_000  # joining everything every time would be 150 thousand


def test_a_segment_that_lost_too_much_is_written_anew(tmp_path: Path) -> None:
    """Beyond the share allowed, deleted text leaves the disk; below it, it is only masked."""
    corpus = Corpus(tmp_path, {f"d{i}": [i] * 10 for i in range(10)})
    store = corpus.update({}, ["d0", "d1"])
    assert len(store.segments()[0].order) == 100
    store = corpus.update({}, ["d2"])
    assert len(store.segments()[0].order) == 70
    assert not (store.path / "seg-0000.deleted").exists()
    store = corpus.update({}, ["d3"], most_deleted=0)
    assert sorted(set(np.concatenate([d.tokens for d in store.documents()]).tolist())) == [4, 5, 6, 7, 8, 9]
    assert len(store.segments()[0].order) == 60


def test_a_corpus_can_be_emptied(tmp_path: Path) -> None:
    """Without documents there is an empty version, which can be filled again."""
    corpus = Corpus(tmp_path, {"a": [1, 2], "b": [3]})
    store = corpus.update({}, ["a", "b", "never there"])
    assert (store.num_documents, store.num_tokens, store.manifest.num_segments) == (0, 0, 1)
    assert store.check(full=True) == []
    assert len(store.lookup(np.array([1], np.int32), 4)) == 0
    assert texts(corpus.update({"c": [5, 6]}, [])) == {"c": [5, 6]}


def test_documents_of_one_name_go_together(tmp_path: Path) -> None:
    """A name may have several documents (a file cut at a secret); removing it removes them all."""
    path = write_version(
        tmp_path, "c", "v0", [("a", np.array([1])), ("b", np.array([2])), ("a", np.array([3]))], fingerprint="w", vocab_size=9
    )
    store = Datastore.open(write_update(tmp_path, "c", "v1", path, [("a", np.array([4]))], removed={"a"}))
    assert texts(store) == {"b": [2], "a": [4]}


def test_what_is_recorded(tmp_path: Path) -> None:
    """Tokenizer, options and sources are the base's unless given; metadata come back, and are asked for at the end."""
    path = write_version(
        tmp_path,
        "c",
        "v0",
        pairs({"a": [1]}),
        fingerprint="words",
        vocab_size=100,
        options={"x": 1},
        sources=["/src"],
        metadata=lambda: b"first",
    )
    assert read_metadata(path) == b"first"
    seen: list[str] = []

    def documents() -> list[tuple[str, np.ndarray]]:
        seen.append("read")
        return pairs({"b": [2]})

    def removed() -> list[str]:
        assert seen == ["read"]
        return ["a"]

    path = write_update(tmp_path, "c", "v1", path, documents(), removed=removed, num_text_bytes=lambda: 7)
    manifest = Datastore.open(path).manifest
    assert (manifest.fingerprint, manifest.vocab_size) == ("words", 100)
    assert (manifest.options, manifest.sources) == ({"x": 1}, ("/src",))
    assert (manifest.num_text_bytes, manifest.num_documents, read_metadata(path)) == (7, 1, b"")
    path = write_update(tmp_path, "c", "v2", path, [], options={}, sources=[], metadata=b"last")
    manifest = Datastore.open(path).manifest
    assert (manifest.options, manifest.sources, read_metadata(path)) == ({}, (), b"last")


def test_damage_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment whose text was altered is not written anew under a fresh checksum; nothing is left of the attempt."""
    corpus = Corpus(tmp_path, {f"d{i}": [i] * 10 for i in range(10)})
    path = corpus.path / "seg-0000.tokens"
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(format, "SMALL_FILE", -1)
    with pytest.raises(ChecksumMismatch, match=r"seg-0000\.tokens"):
        corpus.update({}, ["d0"], most_deleted=0)
    assert [folder.name for folder in (tmp_path / "c" / "versions").iterdir()] == ["v0"]


def test_a_failing_update_leaves_the_base_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing at any write that is forced to disk leaves the base as it was and nothing beside it."""
    corpus = Corpus(tmp_path, {f"d{i}": list(range(50)) for i in range(40)})
    base = {path.name: path.read_bytes() for path in corpus.path.iterdir()}
    sync, failures = format.os.fsync, 0
    for good in range(50):
        remaining = good

        def failing(descriptor: int) -> None:
            nonlocal remaining
            if remaining == 0:
                raise OSError("disk full")
            remaining -= 1
            sync(descriptor)

        monkeypatch.setattr(format.os, "fsync", failing)
        try:
            write_update(tmp_path, "c", "v1", corpus.path, pairs({"new": [1, 2]}), removed=["d3"], metadata=b"m")
        except OSError:
            failures += 1
            assert [folder.name for folder in (tmp_path / "c" / "versions").iterdir()] == ["v0"]
            assert {path.name: path.read_bytes() for path in corpus.path.iterdir()} == base
        else:
            break
    assert failures == 6 + 1 + 1 + 3  # the new segment, what was deleted, metadata, manifest, the folder and the one above
    with pytest.raises(VersionExists):
        write_update(tmp_path, "c", "v1", corpus.path, [])
