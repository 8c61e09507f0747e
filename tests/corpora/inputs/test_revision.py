"""Git repositories at a revision."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corpora.decisions import Reason
from corpora.errors import SourceNotFound
from corpora.inputs import open_sources, revision
from corpora.options import BuildOptions
from corpora.survey import Found, Survey, explain
from tests.corpora.trees import git, plant

FILES: dict[str, str | bytes] = {
    "a.py": "x = 1\n",
    "docs/guide.md": "words\n",
    "docs/é\n.md": "more words\n",
    "vendor/lib.py": "y = 2\n",
    ".hidden/z.py": "z = 3\n",
    "blob.bin": b"\0",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, tagged v1, and a changed work tree."""
    folder = plant(tmp_path / "repo", FILES)
    (folder / "link.py").symlink_to("a.py")
    git(folder, "init")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "one")
    git(folder, "tag", "v1")
    plant(folder, {"a.py": "x = 2\n", "new.py": "new\n"})
    return folder


def survey(spec: str, **options: object) -> dict[str, Found]:
    chosen = BuildOptions(**options)  # type: ignore[arg-type]
    return {f.decision.name: f for f in Survey(open_sources([spec], chosen), chosen)}


def texts(spec: str, **options: object) -> dict[str, str]:
    return {d.name: str(d.content) for f in survey(spec, **options).values() for d in f.documents}


def test_what_was_committed_is_read(repository: Path) -> None:
    """Not what lies in the work tree; names, sizes and reasons are those of a folder."""
    found = survey(f"{repository}@v1")
    assert {name: f.documents[0].content for name, f in found.items() if f.documents} == {
        "a.py": "x = 1\n",
        "docs/guide.md": "words\n",
        "docs/é\n.md": "more words\n",
    }
    assert {name: f.decision.reason for name, f in found.items() if not f.documents} == {
        ".hidden/": Reason.HIDDEN,
        "blob.bin": Reason.BINARY,
        "link.py": Reason.SYMLINK,
        "vendor/": Reason.VENDORED,
    }


def test_a_folder_of_a_repository(repository: Path) -> None:
    """Names are relative to it."""
    assert list(texts(f"{repository}/docs@v1")) == ["guide.md", "é\n.md"]


def test_patterns_and_sizes_count(repository: Path) -> None:
    """As they do in folders; a blob that is too large is not read."""
    assert list(texts(f"{repository}@v1", include=("*.md",), exclude=("é*",))) == ["docs/guide.md"]
    assert survey(f"{repository}@v1", max_file_size=5)["a.py"].decision.reason is Reason.TOO_LARGE


def test_the_commit_is_written_down(repository: Path) -> None:
    """A branch moves; what it stood for is known afterwards."""
    (before,) = open_sources([f"{repository}@main"], BuildOptions())
    git(repository, "commit", "-a", "-m", "two")
    (after,) = open_sources([f"{repository}@main"], BuildOptions())
    assert before.spec == after.spec == f"{repository}@main"
    assert len(before.resolved) == 40 and before.resolved != after.resolved
    assert texts(after.spec)["a.py"] == "x = 2\n" and texts(f"{repository}@HEAD~1")["a.py"] == "x = 1\n"


def test_a_bare_repository_will_do(repository: Path, tmp_path: Path) -> None:
    """There need be no work tree."""
    git(tmp_path, "clone", "--bare", str(repository), "bare.git")
    assert texts(f"{tmp_path}/bare.git@v1")["a.py"] == "x = 1\n"


def test_a_path_with_an_at_sign_is_a_path(tmp_path: Path) -> None:
    """What exists under that name is meant."""
    plant(tmp_path, {"docs@v1/a.md": "words\n"})
    assert texts(f"{tmp_path}/docs@v1") == {"a.md": "words\n"}


@pytest.mark.parametrize("revision", ["nowhere", "", "--help", "v1:a.py"])
def test_what_is_no_commit_is_refused(revision: str, repository: Path) -> None:
    """In one line, before anything is read; an option of git's is a name like any other."""
    with pytest.raises(SourceNotFound, match="no such revision here"):
        open_sources([f"{repository}@{revision}"], BuildOptions())


def test_submodules_are_other_repositories(repository: Path, tmp_path: Path) -> None:
    """Named, and not looked into."""
    plant(repository, {"module/m.py": "m\n"})
    git(repository / "module", "init")
    git(repository / "module", "add", ".")
    git(repository / "module", "commit", "-m", "m")
    git(repository, "add", "module")
    git(repository, "commit", "-m", "module")
    assert survey(f"{repository}@HEAD")["module"].decision.reason is Reason.SUBMODULE


def test_a_repository_cannot_make_git_run_programs(repository: Path, tmp_path: Path) -> None:
    """Neither a filter, nor a conversion, nor a monitor that it configures."""
    mark = tmp_path / "ran"
    script = tmp_path / "script.sh"
    script.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    os.chmod(script, 0o755)
    plant(repository, {".gitattributes": "*.py filter=evil diff=evil\n"})
    for key in ("filter.evil.smudge", "filter.evil.process", "diff.evil.textconv", "core.fsmonitor", "core.pager"):
        git(repository, "config", key, str(script))
    assert texts(f"{repository}@v1")["a.py"] == "x = 1\n" and not mark.exists()


def test_blobs_that_did_not_change_are_not_read_again(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ids say so, whichever commit they are found in."""
    known = survey(f"{repository}@main")
    git(repository, "commit", "-a", "-m", "two")
    read: list[str] = []
    blobs = revision._Blobs.read
    monkeypatch.setattr(revision._Blobs, "read", lambda self, blob: (read.append(blob), blobs(self, blob))[1])
    options = BuildOptions()
    again = {f.decision.name: f for f in Survey(open_sources([f"{repository}@main"], options), options, known)}
    assert len(read) == 1 and again["a.py"].documents[0].content == "x = 2\n"
    assert [name for name, f in again.items() if f.unchanged] == ["docs/guide.md", "docs/é\n.md"]


def test_a_lost_blob_is_unreadable(repository: Path) -> None:
    """It is one decision; the others are read."""
    (source,) = open_sources([f"{repository}@v1"], BuildOptions())
    stamps = {entry.decision.name: entry.decision.stamp for entry in source.entries()}
    lost = repository / ".git/objects" / stamps["a.py"][:2] / stamps["a.py"][2:]
    lost.chmod(0o600)
    lost.unlink()
    found = survey(f"{repository}@v1")
    assert found["a.py"].decision.reason is Reason.UNREADABLE and found["docs/guide.md"].documents


def test_explain_knows_members(repository: Path) -> None:
    """By their name in the corpus."""
    decision = explain("blob.bin", [f"{repository}@v1"])
    assert decision and decision.reason is Reason.BINARY
