"""Bytes on disk: what is written, and what damage is noticed."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from retriever import format
from retriever.datastore import Datastore
from retriever.errors import BadMagic, BadManifest, ChecksumMismatch, FormatError, Truncated, UnsupportedVersion, VersionExists
from retriever.format import write_version
from tests.retriever.conftest import Build, know_all_contexts

FILES = [f"seg-0000.{ending}" for ending in ("continuations", "documents", "samples", "suffixes", "table", "tokens")]
TEXT = [[1, 2, 3, 1, 2, 4], [5, 1, 2, 3]]


@pytest.fixture
def version(build: Build, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a good version, with tables that have something."""
    know_all_contexts(monkeypatch)
    return build(TEXT).path


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_the_bytes_are_those_drawn(version: Path) -> None:
    """The drawing at the top of format.py, read with `struct` alone."""
    data = (version / "seg-0000.tokens").read_bytes()
    magic, number, kind, dtype, zero, count, second, size, checksum, own = struct.unpack("<8sI4s4sIQQQQQ", data[:64])
    assert (magic, number, kind, dtype, zero) == (b"\x89LOOM\r\n\x1a", 3, b"toks", b"u1be", 0)
    assert (count, second, size) == (12, 2, 12)
    assert data[64:] == bytes([1, 2, 3, 1, 2, 4, 255, 5, 1, 2, 3, 255])
    assert checksum == xxhash.xxh3_64_intdigest(data[64:])
    assert own == xxhash.xxh3_64_intdigest(data[:56])

    suffixes = (version / "seg-0000.suffixes").read_bytes()
    assert np.frombuffer(suffixes[64:], "<i4").tolist() == [0, 8, 3, 1, 9, 4, 2, 10, 5, 7]

    documents = (version / "seg-0000.documents").read_bytes()
    assert np.frombuffer(documents[64 : 64 + 48], "<i8").tolist() == [0, 7, 12, 0, 8, 16]
    assert documents[64 + 48 :] == b"doc0.txtdoc1.txt"


def test_the_manifest_is_readable(tmp_path: Path) -> None:
    """Sorted JSON that says what the version is, from what, with what, and lists every file."""
    path = write_version(
        tmp_path,
        "code",
        "2026-01",
        [("a.py", np.array([70_000, 2]))],
        fingerprint="abc",
        vocab_size=151_936,
        options={"max_file_size": 5, "globs": ("*.py",)},
        sources=["/src"],
        num_text_bytes=lambda: 17,
    )
    text = (path / "manifest.json").read_text()
    manifest = json.loads(text)
    assert list(manifest) == sorted(manifest)
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {f: (path / f).stat().st_size for f in FILES}
    assert {key: manifest[key] for key in ("corpus", "version", "fingerprint", "vocab_size", "sources", "options")} == {
        "corpus": "code",
        "version": "2026-01",
        "fingerprint": "abc",
        "vocab_size": 151_936,
        "sources": ["/src"],
        "options": {"max_file_size": 5, "globs": ["*.py"]},
    }
    assert [manifest[key] for key in ("num_segments", "num_documents", "num_tokens", "num_text_bytes")] == [1, 1, 2, 17]
    assert manifest["created"].endswith("+00:00")
    assert manifest["tool"].startswith("draftloom")
    assert Datastore.open(path).document_tokens(0).tolist() == [70_000, 2]


def test_names_that_are_not_unicode_come_back(tmp_path: Path) -> None:
    """File names are bytes to the system; what Python made of odd ones is kept."""
    names = ["naïve/ファイル.py", os.fsdecode(b"odd-\xff.txt"), ""]
    path = write_version(tmp_path, "c", "v", [(name, np.array([1])) for name in names], fingerprint="", vocab_size=10)
    store = Datastore.open(path)
    assert [store.document_name(i) for i in range(3)] == names


@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_noticed(version: Path, name: str) -> None:
    """A file cut in its header, right after it, or in its content, or grown by a byte, is refused by name."""
    path = version / name
    whole = path.read_bytes()
    for size in {0, 1, 7, 8, 9, 12, 31, 63, 64, 65, (64 + len(whole)) // 2, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(Truncated, match=rf"{name}; rebuild the corpus with `draftloom corpus build`"):
            Datastore.open(version)
    path.write_bytes(whole + b"\0")
    with pytest.raises(Truncated, match=name):
        Datastore.open(version)


@pytest.mark.parametrize("name", FILES)
def test_every_altered_header_byte_is_noticed(version: Path, name: str) -> None:
    """One flipped bit in any of the 64 bytes: the file is refused by name, for a reason that fits the place.

    That of byte 8 makes the format version another one that can be read.
    """
    for at in range(64):
        flip(version / name, at, at % 8)
        with pytest.raises(FormatError, match=name) as caught:
            Datastore.open(version)
        expected = BadMagic if at < 8 else UnsupportedVersion if 8 < at < 12 else ChecksumMismatch
        assert type(caught.value) is expected, f"byte {at}"
        flip(version / name, at, at % 8)
    Datastore.open(version)


def test_a_later_format_is_named(version: Path) -> None:
    """A file of another format version, otherwise sound, says which one it is and which one is read."""
    path = version / "seg-0000.tokens"
    data = bytearray(path.read_bytes())
    data[8] = 4
    data[56:64] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:56])))
    path.write_bytes(data)
    with pytest.raises(UnsupportedVersion, match="format version 4, this release reads 1, 2, 3"):
        Datastore.open(version)


@pytest.mark.parametrize("name", FILES)
def test_small_files_are_read_at_once(version: Path, name: str) -> None:
    """Altered content of a small file is noticed when the version is opened."""
    flip(version / name, 64 + 5)
    with pytest.raises(ChecksumMismatch, match=name):
        Datastore.open(version)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(version: Path, name: str) -> None:
    """A file that the manifest lists must be there."""
    (version / name).unlink()
    with pytest.raises(BadManifest, match=f"file is missing: .*{name}"):
        Datastore.open(version)


def test_files_of_another_place_are_refused(build: Build) -> None:
    """A sound file of another kind, another segment or another version does not pass for this one."""
    one, other = build(TEXT).path, build([text[::-1] for text in TEXT]).path
    shutil.copy(one / "seg-0000.tokens", other / "seg-0000.suffixes")
    with pytest.raises(FormatError, match=r"seg-0000\.suffixes"):
        Datastore.open(other)
    shutil.copy(one / "seg-0000.suffixes", other / "seg-0000.suffixes")
    with pytest.raises(ChecksumMismatch, match="not the one the manifest lists"):
        Datastore.open(other)


def test_a_damaged_manifest_is_refused(version: Path) -> None:
    """Missing, cut, no JSON, altered, or of another format: each is said."""
    path = version / "manifest.json"
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:size])
        with pytest.raises(BadManifest, match="no JSON"):
            Datastore.open(version)
    path.write_bytes(b"[]")
    with pytest.raises(BadManifest, match="no JSON object"):
        Datastore.open(version)
    path.write_bytes(whole.replace(b'"num_tokens": 10', b'"num_tokens": 11'))
    with pytest.raises(ChecksumMismatch, match="manifest was altered"):
        Datastore.open(version)
    path.write_bytes(whole.replace(b'"format_version": 3', b'"format_version": 9'))
    with pytest.raises(UnsupportedVersion, match="format version 9"):
        Datastore.open(version)
    path.unlink()
    with pytest.raises(BadManifest, match="no corpus version here"):
        Datastore.open(version)


def test_a_manifest_that_lies_is_refused(version: Path) -> None:
    """With its checksum made anew, a manifest that contradicts the files or has other members is still refused."""
    path = version / "manifest.json"
    whole = json.loads(path.read_text())
    del whole["checksum"]
    lies = [
        {"num_tokens": 11},
        {"num_segments": 2},
        {"vocab_size": 151_936},
        {"surprise": 1},
        {"files": 3},
        {"files": {**whole["files"], "seg-0000.tokens": {"size": 1, "checksum": "0"}}},
    ]
    for lie in lies:
        fields = {**whole, **lie}
        path.write_text(json.dumps({**fields, "checksum": format._manifest_checksum(fields)}))
        with pytest.raises(FormatError):
            Datastore.open(version)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_in_large_files_spoil_drafts_only(name: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where content is not read at opening, damage leaves lookups running and valid; `check` finds it."""
    rng = np.random.default_rng(5)
    know_all_contexts(monkeypatch)
    path = build([rng.integers(0, 7, 60).tolist() for _ in range(5)], vocab_size=300).path
    monkeypatch.setattr(format, "SMALL_FILE", -1)
    whole = (path / name).read_bytes()
    contexts = [rng.integers(0, 7, 6).astype(np.int32) for _ in range(12)]
    for _ in range(40):
        data = bytearray(whole)
        for at in rng.integers(64, len(whole), rng.integers(1, 20)):
            data[at] = rng.integers(0, 256)
        (path / name).write_bytes(data)
        with Datastore.open(path) as store:
            for context in contexts:
                found = store.lookup(context, 16, samples=40)
                found.validate()
                assert np.all(found.tokens < 300)
                store.longest_match(context)
            for i in range(store.num_documents):
                store.document_name(i)
                store.document_tokens(i)
            store.check()
            assert bytes(data) == whole or any(name in str(problem) for problem in store.check(full=True))


def test_a_wrong_order_with_a_right_checksum_is_found(version: Path) -> None:
    """`check` does not only compare checksums: an order that was written wrong is found, a table that does not fit as well."""
    order = np.array([0, 8, 3, 1, 9, 4, 2, 10, 7, 5], np.int32)  # the last two exchanged
    manifest = json.loads((version / "manifest.json").read_text())
    (version / "seg-0000.suffixes").unlink()
    entry = format.write_file(version / "seg-0000.suffixes", b"sufx", b"i4le", len(order), 0, [order])
    del manifest["checksum"]
    manifest["files"]["seg-0000.suffixes"] = {"size": entry.size, "checksum": entry.checksum}
    (version / "manifest.json").write_text(json.dumps({**manifest, "checksum": format._manifest_checksum(manifest)}))
    store = Datastore.open(version)
    for full in (False, True):
        assert "suffix order is wrong at 1 places" in str(store.check(full)[0])


class Broken(Exception):
    """What goes wrong in the tests below."""


def documents_that_fail(after: int) -> Iterator[tuple[str, np.ndarray]]:
    """`after` documents, then an exception."""
    for i in range(after):
        yield f"d{i}", np.arange(20)
    raise Broken


@pytest.mark.parametrize("after", [0, 1, 7])
def test_failing_documents_leave_nothing(tmp_path: Path, after: int) -> None:
    """If reading the documents fails, no version is there, and nothing half-written."""
    with pytest.raises(Broken):
        write_version(tmp_path, "c", "v1", documents_that_fail(after), fingerprint="", vocab_size=99, segment_tokens=50)
    assert list((tmp_path / "c" / "versions").iterdir()) == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_at_any_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Whatever cannot be forced to disk, no version is there, nothing half-written, and an earlier version is untouched."""
    documents = [(f"d{i}", np.arange(20)) for i in range(4)]
    write_version(tmp_path, "c", "v1", documents, fingerprint="", vocab_size=99)
    fsync = os.fsync
    failures = 0
    for good in range(100):
        remaining = good

        def failing(descriptor: int) -> None:
            nonlocal remaining
            if remaining == 0:
                raise error
            remaining -= 1
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            write_version(tmp_path, "c", "v2", documents, fingerprint="", vocab_size=99, segment_tokens=50)
        except type(error):
            failures += 1
            assert [path.name for path in (tmp_path / "c" / "versions").iterdir()] == ["v1"]
        else:
            break
    assert failures == 2 * 6 + 3  # two segments of six files, the manifest, the folder, the folder above
    for version_id in ("v1", "v2"):
        assert Datastore.open(tmp_path / "c" / "versions" / version_id).check(full=True) == []


def test_progress_may_stop_a_build(tmp_path: Path) -> None:
    """Progress reports every stage with a rising count; an exception from it stops the build and leaves nothing."""
    documents = [(f"d{i}", np.arange(20)) for i in range(4)]
    seen: list[tuple[str, int]] = []
    options = {"fingerprint": "", "vocab_size": 99, "segment_tokens": 50}
    write_version(tmp_path, "c", "v1", documents, on_progress=lambda *step: seen.append(step), **options)
    assert {stage for stage, _ in seen} == {"read", "sort", "write"}
    assert [count for _, count in seen] == sorted(count for _, count in seen)
    assert seen[-1] == ("write", 80)

    def stop(stage: str, num_tokens: int) -> None:
        if stage == "sort":
            raise Broken

    with pytest.raises(Broken):
        write_version(tmp_path, "c", "v2", documents, on_progress=stop, **options)
    assert [path.name for path in (tmp_path / "c" / "versions").iterdir()] == ["v1"]


def test_a_killed_build_is_in_nobodys_way(tmp_path: Path) -> None:
    """A `.tmp` folder left by a killed process is overwritten, and cannot be named as a version."""
    leftover = tmp_path / "c" / "versions" / "v1.tmp"
    leftover.mkdir(parents=True)
    (leftover / "seg-0000.tokens").write_bytes(b"half")
    path = write_version(tmp_path, "c", "v1", [("d", np.arange(5))], fingerprint="", vocab_size=99)
    assert Datastore.open(path).num_tokens == 5
    assert not leftover.exists()


def test_a_version_is_never_written_twice(version: Path) -> None:
    """A published version stays as it is."""
    before = {path.name: path.read_bytes() for path in version.iterdir()}
    with pytest.raises(VersionExists, match="choose another version id"):
        write_version(version.parents[2], "corpus", version.name, [], fingerprint="", vocab_size=5)
    assert {path.name: path.read_bytes() for path in version.iterdir()} == before


@pytest.mark.parametrize(
    ("corpus", "version_id"),
    [("../up", "v"), ("a/b", "v"), ("", "v"), (".hidden", "v"), ("c", "v/.."), ("c", "v.tmp"), ("c\n", "v")],
)
def test_names_that_are_paths_are_refused(tmp_path: Path, corpus: str, version_id: str) -> None:
    """Corpus and version become folder names, so they may be nothing else."""
    with pytest.raises(ValueError, match=r"must be letters, digits"):
        write_version(tmp_path, corpus, version_id, [], fingerprint="", vocab_size=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 5]), r"\[0, 5\): 'bad' has 1 to 5; check the tokenizer"),
        (np.array([-1]), "-1 to -1"),
        (np.array([[1]]), r"shape \(1, 1\)"),
        (np.array([1.0]), "float64"),
    ],
)
def test_tokens_that_are_none_are_refused(tmp_path: Path, tokens: np.ndarray, message: str) -> None:
    """Ids outside the vocabulary, and arrays that are no row of integers, are refused with the document's name."""
    with pytest.raises(ValueError, match=message):
        write_version(tmp_path, "c", "v", [("good", np.array([1])), ("bad", tokens)], fingerprint="", vocab_size=5)
    assert list((tmp_path / "c" / "versions").iterdir()) == []


def test_an_error_says_what_where_and_what_to_do() -> None:
    """Errors carry path and fault, and the message ends with what to do about it."""
    error = Truncated(Path("/x/seg-0000.tokens"), "file is truncated")
    assert (error.path, error.fault) == (Path("/x/seg-0000.tokens"), "file is truncated")
    assert str(error) == "file is truncated: /x/seg-0000.tokens; rebuild the corpus with `draftloom corpus build`"


def test_memory_decides_about_segments() -> None:
    """More memory, larger segments, up to the largest there are; wider tokens, smaller ones."""
    assert format.segment_tokens_for(0, 100) == 1
    assert format.segment_tokens_for(240_000, 60_000) == 10_000
    assert format.segment_tokens_for(320_000, 151_936) == 10_000
    assert format.segment_tokens_for(1 << 50, 151_936) == format.SEGMENT_TOKENS


_BUILD = """
import resource, sys
import numpy as np
from pathlib import Path
from retriever.format import segment_tokens_for, write_version

vocab_size, memory, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rng = np.random.default_rng(0)
documents = (("d", np.minimum(rng.zipf(1.3, 2000), vocab_size - 1)) for _ in range(2500))
write_version(root, "c", "small", [("d", np.arange(50))], fingerprint="", vocab_size=vocab_size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_version(
    root, "c", "v", documents, fingerprint="", vocab_size=vocab_size, segment_tokens=segment_tokens_for(memory, vocab_size)
)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [60_000, 151_936])
def test_a_build_takes_no_more_memory_than_allowed(tmp_path: Path, vocab_size: int) -> None:
    """Five million tokens in segments for 64 MB take at most that beyond what the process had, and at least a quarter."""
    memory = 64 << 20
    command = [sys.executable, "-c", _BUILD, str(vocab_size), str(memory), str(tmp_path)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert memory / 4 < peak <= memory
