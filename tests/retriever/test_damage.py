"""Every file of a version, damaged as disks damage them: refused by name, found by a check, or harmless to all but drafts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retriever import format
from retriever.datastore import Datastore
from retriever.errors import FormatError
from retriever.format import read_metadata, write_version
from retriever.update import write_update
from tests.retriever.conftest import know_all_contexts

FILES = [
    "manifest.json",
    "metadata",
    *(f"seg-0000.{kind}" for kind in ("tokens", "suffixes", "documents", "table", "continuations", "samples")),
    *(f"seg-0001.{kind}" for kind in ("tokens", "suffixes", "documents", "table", "continuations", "samples", "deleted")),
]
VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A version with all kinds of files: two segments, one of which lost documents, and metadata."""
    root = tmp_path_factory.mktemp("damage")
    rng = np.random.default_rng(5)
    with pytest.MonkeyPatch.context() as patch:
        know_all_contexts(patch)
        old = [(f"old{i}", rng.integers(0, 7, 60)) for i in range(12)]
        base = write_version(root, "c", "v0", old, fingerprint="words", vocab_size=VOCAB_SIZE)
        new = [(f"new{i}", rng.integers(0, 7, 40)) for i in range(4)]
        path = write_update(root, "c", "v1", base, new, removed=["old3", "old7"], metadata=bytes(range(200)))
        assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
        yield path


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, list[tuple[float, int]]]:
    """A file, what happens to it, and where (as a share of its size) with which byte."""
    return (
        draw(st.sampled_from(FILES)),
        draw(st.sampled_from(["flip", "overwrite", "cut", "grow", "remove"])),
        draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12)),
    )


def damaged(data: bytes, how: str, places: list[tuple[float, int]]) -> bytes:
    """The content after the damage."""
    out = bytearray(data)
    if how == "cut":
        return bytes(out[: int(places[0][0] * len(out))])
    if how == "grow":
        return bytes(out) + bytes(byte for _, byte in places)
    for share, byte in places:
        at = int(share * len(out))
        out[at] = byte if how == "overwrite" else out[at] ^ 1 << byte % 8
    return bytes(out)


@given(damage=damages(), small=st.booleans(), context=st.lists(st.integers(0, 8), min_size=1, max_size=9))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_costs_drafts_at_most(
    version: Path,
    tmp_path_factory: pytest.TempPathFactory,
    damage: tuple[str, str, list[tuple[float, int]]],
    small: bool,
    context: list[int],
) -> None:
    """Opening names the damaged file, or every question is answered with tokens of the vocabulary and `check` names it.

    Whether files are read when the version is opened (as small ones are) or only mapped.
    """
    name, how, places = damage
    path = tmp_path_factory.mktemp("damaged") / "v1"
    shutil.copytree(version, path)
    whole = (path / name).read_bytes()
    content = damaged(whole, how, places)
    (path / name).unlink()
    if how != "remove":
        (path / name).write_bytes(content)
    harmless = how != "remove" and content == whole
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr(format, "SMALL_FILE", -1)
        try:
            store = Datastore.open(path)
        except FormatError as error:
            assert not harmless
            assert error.path.name == name or name == "manifest.json" or "manifest" in str(error)
            return
        with store:
            key = np.array(context, np.int32)
            found = store.lookup(key, 16, samples=40, classes=4)
            found.validate()
            assert np.all(store.frequent_next(context[-1])[0] < VOCAB_SIZE)
            assert np.all(found.tokens < VOCAB_SIZE)
            store.longest_match(key)
            store.search(key, 5)
            store.count(key[-1:])
            tokens, _ = store.next_tokens(key[-1:])
            assert np.all(tokens >= 0)
            store.suffix_statistics((1, 3), samples=5)
            for document in store.documents():
                assert len(document.tokens) >= 0
            for i in range(store.num_documents):
                store.document_name(i)
                store.document_tokens(i)
            store.check()
            assert harmless or any(name in str(problem) for problem in store.check(full=True))
            altered = [str(file.path) for segment in store.segments() for file in segment.files.values() if file.altered()]
            assert harmless or name == "metadata" or any(name in path for path in altered)
            if not harmless and name == "metadata":
                with pytest.raises(FormatError, match="metadata"):
                    read_metadata(path)
    shutil.rmtree(path.parent)


def test_sound_files_are_sound(version: Path) -> None:
    """The version the damage is done to is itself faultless."""
    with Datastore.open(version) as store:
        assert store.check(full=True) == []
        assert read_metadata(version) == bytes(range(200))
