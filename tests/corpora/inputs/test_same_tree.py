"""One tree, however it is given: as a folder, at a revision, in an archive."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.survey import Found, Survey
from tests.corpora.trees import git, plant

FILES: dict[str, str | bytes] = {
    "a.py": "x = 1\n",
    "b/.config/c.py": "hidden\n",
    "b/copy.py": "x = 1\n",
    "b/d.md": "words\r\n",
    "b/vendor/e.go": "package e\n",
    "data/.keep": "kept\n",
    "data/big.txt": "long\n" * 1000,
    "data/f.csv": "1,2\n",
    "data/g.bin": b"\0",
    "img/h.png": b"\x89PNG",
    "tests/i_test.py": "def test(): pass\n",
}
OPTIONS = [
    BuildOptions(),
    BuildOptions(max_file_size=1000),
    BuildOptions(include=("*.py",)),
    BuildOptions(exclude=("tests/", "*.csv", "/b/*.md")),
    BuildOptions(include=("b/", "*.txt"), exclude=("copy.py",)),
]


def survey(specs: list[str], options: BuildOptions) -> dict[str, Found]:
    return {f.decision.name: f for f in Survey(open_sources(specs, options), options)}


def summary(found: dict[str, Found]) -> dict[str, object]:
    """Everything about each entry but where it lies and when it changed; the order of entries does not count."""
    return {
        name: (f.decision.taken, f.decision.reason, f.decision.num_bytes, [d.content for d in f.documents])
        for name, f in sorted(found.items())
    }


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_the_same_tree_gives_the_same_entries(options: BuildOptions, tmp_path: Path) -> None:
    """Names, decisions, sizes and texts agree."""
    tree = plant(tmp_path / "tree", FILES)
    git(tree, "init")
    git(tree, "add", "-A")
    git(tree, "commit", "-m", "one")
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as zipped, tarfile.open(tmp_path / "t.tgz", "w:gz") as tarred:
        for name in FILES:
            zipped.write(tree / name, name)
            tarred.add(tree / name, name)
    expected = summary(survey([str(tree)], options))
    for spec in (f"{tree}@HEAD", str(tmp_path / "t.zip"), str(tmp_path / "t.tgz")):
        assert summary(survey([spec], options)) == expected, spec


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Names stay unique, for folders and for files."""
    plant(tmp_path, {"one/src/a.py": "1\n", "two/src/a.py": "2\n"})
    folders = survey([str(tmp_path / "one/src"), str(tmp_path / "two/src")], BuildOptions())
    assert list(folders) == ["src/a.py", "src~2/a.py"]
    files = survey([str(tmp_path / "one/src/a.py"), str(tmp_path / "two/src/a.py")], BuildOptions())
    assert list(files) == ["a.py", "a.py~2"]


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    """Under the first source that has it."""
    plant(tmp_path, {"tree/sub/a.py": "1\n"})
    assert list(survey([str(tmp_path / "tree"), str(tmp_path / "tree/sub")], BuildOptions())) == ["tree/sub/a.py"]
