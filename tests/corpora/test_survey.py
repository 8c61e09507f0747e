"""What a build would take, and why it would leave the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from corpora.decisions import Reason
from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.survey import Found, Survey, explain
from tests.corpora.trees import plant

FILES: dict[str, str | bytes] = {
    "add.py": "def add(first, second):\n    return first + second\n",
    "copy.py": "def add(first, second):\r\n    return first + second\r\n",
    "docs/blob.bin": b"\0\1\2",
    "docs/guide.md": "The quick brown fox jumps over the lazy dog.\n",
    "empty.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path / "tree", FILES)


def survey(*paths: Path, known: Mapping[str, Found] | None = None, **options: object) -> dict[str, Found]:
    """What is found, by entry name."""
    chosen = BuildOptions(**options)  # type: ignore[arg-type]
    found = list(Survey(open_sources([str(path) for path in paths], chosen), chosen, known))
    return {each.decision.name: each for each in found}


def age(tree: Path) -> None:
    """Let every file be an hour old, so that its stamp is believed."""
    for path in tree.rglob("*"):
        os.utime(path, (1e9, 1e9))


def test_a_survey_says_what_a_build_does(tree: Path) -> None:
    """Every entry once, with the documents that would be stored."""
    outcome = {
        name: (f.decision.taken, f.decision.reason, [d.content for d in f.documents]) for name, f in survey(tree).items()
    }
    assert outcome == {
        "add.py": (True, None, [FILES["add.py"]]),
        "copy.py": (True, Reason.DUPLICATE, []),
        "docs/blob.bin": (False, Reason.BINARY, []),
        "docs/guide.md": (True, None, [FILES["docs/guide.md"]]),
        "empty.py": (False, Reason.EMPTY, []),
    }


def test_explain_tells_about_one_file(tree: Path, tmp_path: Path) -> None:
    """Its own decision, or that about a folder above it; None for what is not below the paths."""
    plant(tree, {".hidden/x.py": "x", "a.py": "# coding\n"})
    (tree / "link.py").symlink_to("a.py")

    def reason(path: str) -> Reason | None:
        decision = explain(path, [str(tree)])
        assert decision is not None
        return decision.reason

    assert (reason(f"{tree}/add.py"), reason(f"{tree}/copy.py")) == (None, Reason.DUPLICATE)
    assert (reason(f"{tree}/.hidden/x.py"), reason(f"{tree}/link.py")) == (Reason.HIDDEN, Reason.SYMLINK)
    assert reason("docs/blob.bin") is Reason.BINARY
    assert explain(f"{tmp_path}/elsewhere.py", [str(tree)]) is None and explain(f"{tree}/gone.py", [str(tree)]) is None


# what is known from an earlier survey


def test_what_did_not_change_is_not_read_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its stamp: neither what is stored, nor a copy, nor what was skipped for its content."""
    monkeypatch.setattr("corpora.walk.SETTLED_NS", 0)
    known = survey(tree)
    monkeypatch.setattr("corpora.filter._read_bytes", lambda path, size: pytest.fail(f"read {path}"))
    again = survey(tree, known=known)
    assert {name: f.decision for name, f in again.items()} == {name: f.decision for name, f in known.items()}
    assert [name for name, f in again.items() if f.unchanged] == ["add.py", "docs/guide.md"]
    assert [f.names for f in again.values() if f.unchanged] == [("add.py",), ("docs/guide.md",)]
    assert not any(f.documents for f in again.values())


def test_a_recent_change_is_not_judged_by_its_time(tree: Path) -> None:
    """A file that was written this moment may be written again within one tick of the clock, so it has no stamp yet."""
    assert {f.decision.stamp for f in survey(tree).values()} == {""}


def test_what_was_touched_is_read_and_found_the_same(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time, the same text: unchanged all the same, under its new stamp."""
    monkeypatch.setattr("corpora.walk.SETTLED_NS", 0)
    known = survey(tree)
    age(tree)
    again = survey(tree, known=known)
    assert [name for name, f in again.items() if f.unchanged] == ["add.py", "docs/guide.md"]
    assert again["add.py"].decision.stamp != known["add.py"].decision.stamp


def test_changed_and_new_files_come_with_their_text(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is gone does not come."""
    monkeypatch.setattr("corpora.walk.SETTLED_NS", 0)
    known = survey(tree)
    plant(tree, {"docs/guide.md": "Other words.\n", "new.py": "x = 1\n"})
    (tree / "empty.py").unlink()
    again = survey(tree, known=known)
    assert {name: [d.content for d in f.documents] for name, f in again.items() if f.documents} == {
        "docs/guide.md": ["Other words.\n"],
        "new.py": ["x = 1\n"],
    }
    assert "empty.py" not in again


def test_a_copy_takes_the_place_of_its_original(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first of two copies goes, the other is stored; when a copy comes before the original, the original is none."""
    monkeypatch.setattr("corpora.walk.SETTLED_NS", 0)
    known = survey(tree)
    (tree / "add.py").rename(tree / "zz.py")
    again = survey(tree, known=known)
    assert [d.name for d in again["copy.py"].documents] == ["copy.py"] and not again["copy.py"].unchanged
    assert again["zz.py"].decision.reason is Reason.DUPLICATE
    plant(tree, {"aa.py": FILES["add.py"]})
    third = survey(tree, known=again)
    assert third["aa.py"].documents and third["copy.py"].decision.reason is Reason.DUPLICATE


def test_findings_outlive_a_process(tree: Path) -> None:
    """They go through JSON, without the texts, and without their paths, which need not be text and may have changed."""
    found = survey(tree)
    back = {name: Found.from_json(json.loads(json.dumps(f.to_json()))) for name, f in found.items()}
    assert {name: (f.decision, f.names, f.digest) for name, f in back.items()} == {
        name: (replace(f.decision, path=Path()), f.names, f.digest) for name, f in found.items()
    }


def test_a_name_that_is_no_text_is_known_again(tmp_path: Path) -> None:
    """Its bytes are spelled out, and what was found goes through JSON as UTF-8 like any other."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / os.fsdecode(b"\xff.py")).write_text("x = 1\n")
    found = survey(tree)
    written = json.dumps([f.to_json() for f in found.values()], ensure_ascii=False).encode()
    known = {f.decision.name: f for f in map(Found.from_json, json.loads(written))}
    assert [f.unchanged for f in survey(tree, known=known).values()] == [True] and list(known) == ["\\xff.py"]
