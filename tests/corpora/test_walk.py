"""Which files are found, in which order, and why the others are left alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from corpora import walk as walk_module
from corpora.errors import InvalidOptions, SourceNotFound
from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.survey import Survey
from tests.corpora.trees import git, listed, plant, reasons, taken


@pytest.fixture
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if git were not installed."""
    monkeypatch.setattr(walk_module, "run_git", lambda folder, *command: None)


def test_files_come_in_the_order_of_their_names_bytes(tmp_path: Path) -> None:
    """Depth first, sorted by bytes, "/" between parts, whatever the file system's order."""
    plant(tmp_path, dict.fromkeys(["b.py", "a/z.py", "a/B.py", "a/é.py", "a.py", "C/x.py"], "x"))
    assert taken(tmp_path) == ["C/x.py", "a/B.py", "a/z.py", "a/é.py", "a.py", "b.py"]


def test_ignore_files_count_at_each_level(tmp_path: Path, no_git: None) -> None:
    """A deeper file overrules, a later line overrules, what is below an ignored folder cannot be brought back."""
    plant(
        tmp_path,
        {
            ".gitignore": "*.log\nbuild/\n!build/keep.py\n/notes.txt\n**/cache_*/\n",
            "a.log": "x",
            "notes.txt": "x",
            "build/keep.py": "x",
            "src/notes.txt": "x",
            "src/cache_1/c.py": "x",
            "src/.gitignore": "!important.log\n*.tmp\n",
            "src/important.log": "x",
            "src/other.log": "x",
            "src/deep/important.log": "x",
            "src/deep/x.tmp": "x",
        },
    )
    assert taken(tmp_path) == [".gitignore", "src/.gitignore", "src/deep/important.log", "src/important.log", "src/notes.txt"]
    assert reasons(tmp_path) == dict.fromkeys(
        ["a.log", "build/", "notes.txt", "src/cache_1/", "src/deep/x.tmp", "src/other.log"], "ignored"
    )
    details = {d.name: d.detail for d in listed(tmp_path)}
    assert details["src/deep/x.tmp"] == "src/.gitignore" and details["a.log"] == ".gitignore"


def test_an_ignore_file_that_is_not_understood_ignores_what_it_can(tmp_path: Path, no_git: None) -> None:
    """A line that is no pattern, and bytes that are no text, do not switch off the others."""
    plant(tmp_path, {".gitignore": b"\xff\xfe\n!\n*.log\n", "a.log": "x", "b.py": "x"})
    assert taken(tmp_path) == [".gitignore", "b.py"]


def test_git_is_asked_in_a_work_tree(tmp_path: Path) -> None:
    """Tracked files count though a rule ignores them, untracked ones unless ignored; git knows `.git/info/exclude`, too."""
    plant(
        tmp_path,
        {".gitignore": "*.log\n", "tracked.log": "x", "other.log": "x", "new.py": "x", "secret/x.py": "x", "sub/y.py": "x"},
    )
    git(tmp_path, "init")
    git(tmp_path, "add", "-f", "tracked.log")
    (tmp_path / ".git/info/exclude").write_text("secret/\n")
    assert taken(tmp_path) == [".gitignore", "new.py", "sub/y.py", "tracked.log"]
    assert reasons(tmp_path) == {"other.log": "ignored", "secret/": "ignored"}
    assert taken(tmp_path / "sub") == ["y.py"]


def test_ignore_is_respected_in_a_work_tree_too(tmp_path: Path) -> None:
    """`.ignore` is for searching tools and counts beside git's own rules."""
    plant(tmp_path, {".ignore": "data/\n*.csv\n", "data/a.py": "x", "b.csv": "x", "c.py": "x"})
    git(tmp_path, "init")
    assert taken(tmp_path) == [".ignore", "c.py"]


def test_nested_repositories_and_submodules_follow_their_own_rules(tmp_path: Path) -> None:
    """Git's listing of the outer tree names them only; each is asked itself. One in an ignored folder stays ignored."""
    plant(
        tmp_path,
        {".gitignore": "ignored/\n", "a.py": "x", "nested/.gitignore": "*.tmp\n", "nested/n.py": "x", "nested/n.tmp": "x"},
    )
    plant(tmp_path, {"ignored/repo/r.py": "x", "module/m.py": "x", "module/m.tmp": "x"})
    for folder in (tmp_path, tmp_path / "nested", tmp_path / "ignored/repo", tmp_path / "module"):
        git(folder, "init")
    git(tmp_path / "module", "add", ".")
    git(tmp_path / "module", "commit", "-m", "one")
    git(tmp_path, "add", "module")
    assert taken(tmp_path) == [".gitignore", "a.py", "module/m.py", "module/m.tmp", "nested/.gitignore", "nested/n.py"]
    assert reasons(tmp_path) == {"ignored/": "ignored", "nested/n.tmp": "ignored"}


def test_what_is_named_is_searched_though_ignored(tmp_path: Path) -> None:
    """A folder that the repository around it ignores is indexed when it is named, as is a file."""
    plant(tmp_path, {".gitignore": ".venv/\n*.log\n", ".venv/lib/pkg/a.py": "x", ".venv/lib/pkg/b.log": "x", "c.log": "x"})
    git(tmp_path, "init")
    assert taken(tmp_path / ".venv/lib/pkg") == ["a.py", "b.log"]
    assert taken(tmp_path / "c.log") == ["c.log"]


def test_a_repository_cannot_make_git_run_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system monitor that a repository configures is not started; GIT_ variables do not lead elsewhere."""
    plant(tmp_path, {"a.py": "x", "monitor": f"#!/bin/sh\ntouch {tmp_path}/ran\n"})
    (tmp_path / "monitor").chmod(0o755)
    git(tmp_path, "init")
    git(tmp_path, "config", "core.fsmonitor", str(tmp_path / "monitor"))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert taken(tmp_path) == ["a.py", "monitor"] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("seed", range(8))
def test_without_git_the_same_files_are_found(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On random trees with random rules at random levels, our reading of ignore files takes what git takes."""
    rng = random.Random(seed)
    names, folders = ["a.py", "b.log", "c.tmp", "d"], ["", "x/", "x/y/", "x/y/z/", "w/", "w/x/"]
    rules = [
        "*.log",
        "!*.log",
        "x/",
        "/x",
        "y",
        "!y/",
        "x/y/*",
        "!x/y/a.py",
        "**/z",
        "z/**",
        "d",
        "!d",
        "*.tm?",
        "[ab].*",
        "/w/*",
        "#c",
        "\\!q",
        "",
    ]
    plant(tmp_path, {f + n: "x" for f in folders for n in names if rng.random() < 0.8})
    plant(tmp_path, {f + ".gitignore": "\n".join(rng.sample(rules, 4)) for f in folders if rng.random() < 0.5 or not f})
    git(tmp_path, "init")
    by_git = taken(tmp_path)
    monkeypatch.setattr(walk_module, "run_git", lambda folder, *command: None)
    assert taken(tmp_path) == by_git


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Loops, links to a parent, dangling ones, links out of the tree and links within it: each is skipped for its reason."""
    tree = plant(tmp_path / "tree", {"src/a.py": "x", "links/b.py": "x"})
    plant(tmp_path, {"outside/secret.py": "x"})
    targets = {
        "loop_a": "loop_b", "loop_b": "loop_a", "self": "self", "up": "..", "here": ".", "dangling.py": "no_such_file",
        "outside": "../../outside", "file.py": "../src/a.py", "folder": "../src",
    }  # fmt: skip
    for name, target in targets.items():
        (tree / "links" / name).symlink_to(target)
    assert taken(tree) == ["links/b.py", "src/a.py"]
    assert {name.removeprefix("links/"): reason for name, reason in reasons(tree).items()} == {
        **dict.fromkeys(["loop_a", "loop_b", "self", "up", "here"], "symlink_loop"),
        **dict.fromkeys(["file.py", "folder"], "symlink"),
        "dangling.py": "symlink_dangling",
        "outside": "symlink_outside",
    }


def test_a_link_that_is_named_is_followed(tmp_path: Path) -> None:
    """The path the caller gives may be a link; a loop is refused."""
    plant(tmp_path / "real", {"a.py": "x"})
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    assert taken(tmp_path / "link") == ["a.py"]
    with pytest.raises(SourceNotFound, match="loop"):
        taken(tmp_path / "loop")


def test_folders_that_are_not_the_users(tmp_path: Path) -> None:
    """Hidden folders and installed packages are skipped as a whole; hidden files are files; .git is not even mentioned."""
    plant(
        tmp_path,
        dict.fromkeys(
            [".hg/x", ".config", "node_modules/m/i.js", "env/lib/p.py", "env/pyvenv.cfg", ".git/config", "a.py"], "x"
        ),
    )
    assert taken(tmp_path) == [".config", "a.py"]
    assert reasons(tmp_path) == {".hg/": "hidden", "node_modules/": "vendored", "env/": "vendored"}


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    """A pipe would block its reader forever."""
    os.mkfifo(tmp_path / "pipe.py")
    assert reasons(tmp_path) == {"pipe.py": "special_file"} and reasons(tmp_path / "pipe.py") == {"pipe.py": "special_file"}


def test_an_unreadable_folder_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one decision, and the walk goes on."""
    plant(tmp_path, {"locked/a.py": "x", "open/b.py": "x"})
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(walk_module.os, "scandir", refuse)
    assert taken(tmp_path) == ["open/b.py"] and reasons(tmp_path) == {"locked/": "unreadable"}


def test_include_and_exclude_are_patterns_of_git(tmp_path: Path) -> None:
    """Relative to the folder; exclude is stronger, and can leave out a whole folder."""
    plant(tmp_path, dict.fromkeys(["a.py", "a.md", "src/b.py", "src/test/c.py", "docs/d.md"], "x"))
    assert taken(tmp_path, include=["*.py"], exclude=["test/"]) == ["a.py", "src/b.py"]
    assert reasons(tmp_path, include=["*.py"], exclude=["test/"]) == {
        "a.md": "not_included", "docs/d.md": "not_included", "src/test/": "excluded",
    }  # fmt: skip
    assert taken(tmp_path, exclude=["/a.*"]) == ["docs/d.md", "src/b.py", "src/test/c.py"]
    with pytest.raises(InvalidOptions, match="exclude pattern"):
        taken(tmp_path, exclude=["!"])


def test_several_paths_are_told_apart_and_each_file_is_found_once(tmp_path: Path) -> None:
    """Names begin with the folder they were found under; a file below two paths belongs to the first."""
    plant(tmp_path, {"one/a.py": "x", "one/sub/b.py": "x", "two/a.py": "x"})
    paths = [str(tmp_path / name) for name in ("one", "two", "one/sub", "two/a.py")]
    found = Survey(open_sources(paths, BuildOptions()), BuildOptions())
    assert [each.decision.name for each in found if each.decision.taken] == ["one/a.py", "one/sub/b.py", "two/a.py"]


def test_names_are_always_text(tmp_path: Path) -> None:
    """A file name that is no UTF-8 is found, and its name in the corpus is."""
    with open(os.fsencode(tmp_path) + b"/caf\xe9.py", "w") as file:
        file.write("x")
    assert taken(tmp_path) == ["caf\\xe9.py"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    """One message names it; no paths give nothing."""
    with pytest.raises(SourceNotFound, match="no_such_folder"):
        taken(tmp_path / "no_such_folder")
    assert taken() == []
