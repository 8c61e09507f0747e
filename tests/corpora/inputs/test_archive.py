"""Zip and tar files."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora.decisions import Reason
from corpora.inputs import archive, open_sources
from corpora.options import BuildOptions
from corpora.survey import Found, Survey

FILES = {
    "pkg/a.py": b"x = 1\n",
    "pkg/b/c.md": b"words\n",
    "pkg/node_modules/d.js": b"d\n",
    "pkg/node_modules/e.js": b"e\n",
    "pkg/f.bin": b"\0",
    "pkg/big.txt": b"long line\n" * 2000,
}


def make_tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return out.getvalue()


MAKERS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "a.zip": make_zip,
    "a.whl": make_zip,
    "a.tar": make_tar,
    "a.tar.gz": lambda files: gzip.compress(make_tar(files)),
    "a.TGZ": lambda files: gzip.compress(make_tar(files)),
    "a.tar.bz2": lambda files: bz2.compress(make_tar(files)),
    "a.tar.xz": lambda files: lzma.compress(make_tar(files)),
}


def survey(path: Path, **options: object) -> dict[str, Found]:
    chosen = BuildOptions(**options)  # type: ignore[arg-type]
    return {f.decision.name: f for f in Survey(open_sources([str(path)], chosen), chosen)}


def reasons(path: Path, **options: object) -> dict[str, Reason | None]:
    return {name: f.decision.reason for name, f in survey(path, **options).items()}


@pytest.mark.parametrize("name", MAKERS)
def test_members_are_files(name: str, tmp_path: Path) -> None:
    """Their texts, and the reasons of the others, are those of a folder; a folder that is left out counts once."""
    path = tmp_path / name
    path.write_bytes(MAKERS[name](FILES))
    found = survey(path, max_file_size=10_000)
    assert {name: f.documents[0].content for name, f in found.items() if f.documents} == {
        "pkg/a.py": "x = 1\n",
        "pkg/b/c.md": "words\n",
    }
    assert reasons(path, max_file_size=10_000) == {
        "pkg/a.py": None,
        "pkg/b/c.md": None,
        "pkg/node_modules/": Reason.VENDORED,
        "pkg/f.bin": Reason.BINARY,
        "pkg/big.txt": Reason.TOO_LARGE,
    }
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("member", ["../up.py", "/root.py", "a/../../up.py", "..\\up.py", "C:/x.py"])
def test_names_that_lead_out_are_refused(name: str, member: str, tmp_path: Path) -> None:
    """Though nothing is unpacked, nobody shall meet such a name later."""
    path = tmp_path / name
    path.write_bytes(MAKERS[name]({member: b"x\n", "fine.py": b"y\n"}))
    outcome = list(reasons(path).values())
    assert outcome == [Reason.UNSAFE_NAME, None]


def test_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    """In a tar file anything can be said about a member; only regular ones are read."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert reasons(path) == {"link": Reason.SYMLINK, "hard": Reason.SYMLINK, "pipe": Reason.SPECIAL_FILE}


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.xz"])
def test_a_bomb_is_given_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before the bound is kept, and reading ends there."""
    monkeypatch.setattr(archive, "FREE_BYTES", 300_000)
    monkeypatch.setattr(archive, "MAX_EXPANSION", 5)
    lines = b"ab\n" * 10_000
    files = {"first.py": b"x\n", **{f"{n:03}.py": lines + b"%d\n" % n for n in range(100)}}
    path = tmp_path / name
    path.write_bytes(MAKERS[name](files))
    found = reasons(path)
    assert found["first.py"] is None and Reason.TOO_LARGE in found.values()
    assert sum(reason is None for reason in found.values()) < 20


def test_a_header_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long name of a member is read into memory, so it is bounded."""
    monkeypatch.setattr(archive, "MAX_HEADER_BYTES", 50_000)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("x" * 200_000))
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(out.getvalue()))
    assert reasons(path) == {"a.tar.gz": Reason.TOO_LARGE}


def test_many_members_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of names alone can be too long."""
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    for name in ("a.zip", "a.tar"):
        (tmp_path / name).write_bytes(MAKERS[name]({f"{n}.py": b"%d\n" % n for n in range(4)}))
        assert reasons(tmp_path / name)[name] is Reason.TOO_LARGE


def test_an_encrypted_member_cannot_be_read(tmp_path: Path) -> None:
    """And says so; the others can."""
    data = bytearray(make_zip({"a.py": b"x\n", "b.py": b"y\n"}))
    central = data.index(b"PK\x01\x02")
    data[central + 8] |= 1
    data[data.index(b"PK\x03\x04") + 6] |= 1
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    assert reasons(path) == {"a.py": Reason.UNREADABLE, "b.py": None}


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.bz2", "a.tar.xz"])
def test_a_truncated_archive_says_so(name: str, tmp_path: Path) -> None:
    """What could be read of it is taken, and the archive itself is unreadable."""
    rng = random.Random(0)
    files = {f"{n}.py": "".join(rng.choice("abcdefgh\n") for _ in range(2000)).encode() for n in range(40)}
    whole = MAKERS[name](files)
    path = tmp_path / name
    path.write_bytes(whole[: len(whole) // 2])
    assert reasons(path)[name] is Reason.UNREADABLE


def test_two_xz_streams_are_one_file(tmp_path: Path) -> None:
    """As xz itself has it, padding between them included."""
    data = make_tar(FILES)
    path = tmp_path / "a.tar.xz"
    path.write_bytes(lzma.compress(data[:1000]) + b"\0" * 4 + lzma.compress(data[1000:]))
    assert reasons(path)["pkg/a.py"] is None


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["a.zip", "a.tar", "a.tar.gz"]), data=st.data())
def test_damage_never_raises(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    """Whatever bytes an archive has, members are taken or refused."""
    whole = bytearray(MAKERS[name]({"pkg/a.py": b"x = 1\n", "pkg/b.py": b"words\n" * 50}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / name
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for found in survey(path).values():
        assert found.decision.taken == bool(found.documents or found.decision.reason is Reason.DUPLICATE)
