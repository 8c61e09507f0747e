"""`draftloom corpus update | show | activate | export | import`, as their user sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpora.catalog import Catalog
from corpora.errors import CorpusError, CorpusLocked
from corpora.update import UpdateReport
from retriever import format
from tests.corpora.test_cli import CODE, Shell, shell
from tests.corpora.trees import plant

__all__ = ["shell"]


def active(shell: Shell) -> str:
    return Catalog(shell.store).get("code").active.id


def test_update_says_what_it_did(shell: Shell) -> None:
    """One line: what was added, removed and kept; or that nothing changed. In JSON the same in numbers."""
    shell.build()
    before = active(shell)
    done = shell("update", "code")
    assert done.exit_code == 0 and "code is up to date: 3 files, " in done.stdout and active(shell) == before
    plant(shell.tree, {"new.py": "new = True\n"})
    (shell.tree / "docs" / "guide.md").unlink()
    done = shell("update", "code")
    assert "code is up to date: 1 document added, 1 removed, 1 kept; " in done.stdout and active(shell) != before
    plant(shell.tree, {"newer.py": "newer = True\n"})
    *_, last = shell("update", "code", "--json").stdout.splitlines()
    report = json.loads(last)
    assert (report["changed"], report["added"], report["removed"], report["kept"]) == (True, 1, 0, 2)
    assert report["version"] == active(shell) and 0 < report["new_tokens"] < report["tokens"]


def test_update_loads_the_recorded_model_from_anywhere(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model named by a relative path is found from another folder, too."""
    monkeypatch.chdir(shell.model.parent)
    assert shell("build", "code", shell.tree, "--model", shell.model.name).exit_code == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    plant(shell.tree, {"new.py": "new = True\n"})
    assert shell("update", "code").exit_code == 0


def test_show_knows_the_files(shell: Shell) -> None:
    """Kinds of files, what was left out, segments and bytes a token, for people and for programs."""
    shell.build()
    shown = shell("show", "code").stdout
    assert ".py 83%, .md 17%" in shown and "1 binary, 1 duplicate" in shown and "bytes a token" in shown
    assert "less than a minute ago" in shown
    details = json.loads(shell("show", "code", "--json").stdout)
    assert details["record"] == {"skipped": {"binary": 1, "duplicate": 1}, "endings": {".py": [2, 100], ".md": [1, 21]}}


def test_a_damaged_record_is_no_reason_to_show_nothing(shell: Shell) -> None:
    """The rest is shown, `check` names the file, and an update is refused as damaged."""
    shell.build()
    path = Catalog(shell.store).active_path("code") / format.METADATA
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "not stored        -" in shell("show", "code").stdout
    assert shell("check", "code").exit_code == 5
    done = shell("update", "code")
    assert done.exit_code == 5 and str(path) in done.stderr


def test_search_looks_inside(shell: Shell) -> None:
    """Places with the text around them, continuations with exact counts; in JSON the same; what is not there is said so."""
    plant(shell.tree, {"more.py": "total = first + second\nother = first - second\n"})
    shell.build()
    done = shell("search", "code", " first", "--limit", "3")
    assert done.exit_code == 0 and "add.py" in done.stdout and "3 in all, 2 different continuations" in done.stdout
    found = json.loads(shell("search", "code", " first", "--json").stdout)
    assert found["count"] == 3 and [(each["text"], each["count"]) for each in found["following"]] == [(" +", 2), (" ", 1)]
    assert {place["document"] for place in found["places"]} == {"add.py", "more.py"} and found["num_following"] == 2
    assert all("first" not in place["after"][:5] for place in found["places"])
    done = shell("search", "code", "nowhere to be seen")
    assert done.exit_code == 0 and done.stdout == "" and "does not hold nowhere to be seen" in done.stderr
    assert json.loads(shell("search", "code", "", "--json").stdout)["count"] == 0
    shown = json.loads(shell("show", "code", "--json").stdout)["suffixes"]
    assert shown[0]["length"] == 1 and 0 < shown[0]["share_found"] <= 1


def test_activate_takes_any_version(shell: Shell) -> None:
    """One that `show` lists; another is a mistake."""
    shell.build()
    first = active(shell)
    shell.build()
    done = shell("activate", "code", first)
    assert done.exit_code == 0 and f"code is at version {first}" in done.stdout and active(shell) == first
    assert json.loads(shell("activate", "code", first, "--json").stdout) == {"name": "code", "active": first}
    assert shell("activate", "code", "v9").exit_code == 1


def test_export_and_import(shell: Shell, tmp_path: Path) -> None:
    """Both name the tokenizer; a file that is none is status 5, and says so in JSON, too."""
    shell.build()
    fingerprint = Catalog(shell.store).get("code").active.fingerprint
    done = shell("export", "code", tmp_path / "code.tar")
    assert done.exit_code == 0 and fingerprint in done.stdout and "code.tar: code at version" in done.stdout
    done = shell("import", tmp_path / "code.tar", "--name", "theirs")
    assert done.exit_code == 0 and fingerprint in done.stdout and done.stdout.startswith("theirs is ready: 3 files, ")
    *_, last = shell("import", tmp_path / "code.tar", "--json").stdout.splitlines()
    assert json.loads(last)["version"] == active(shell)
    (tmp_path / "code.tar").write_bytes(b"x" * 600)
    done = shell("import", tmp_path / "code.tar", "--json")
    assert done.exit_code == 5 and json.loads(done.stdout)["error"] == "BadExport"
    assert shell("export", "cod", tmp_path / "x.tar").exit_code == 1 and not (tmp_path / "x.tar").exists()


def test_two_at_work(shell: Shell) -> None:
    """An update beside a build is status 4 and names who builds."""
    shell.build()
    with Catalog(shell.store).lock("code"):
        done = shell("update", "code")
    assert done.exit_code == 4 and "by process" in done.stderr


def test_watch_builds_and_reports(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a corpus it builds one; then a line for every update that changed something, and for every one that failed."""

    def rounds(name: str, catalog: Catalog, load: object, tell: object) -> None:
        from corpora.update import update

        def once() -> UpdateReport | CorpusError:
            return update(name, catalog, load)  # type: ignore[arg-type]

        tell(once())  # type: ignore[operator]
        plant(shell.tree, {"new.py": CODE + CODE})
        tell(once())  # type: ignore[operator]
        tell(CorpusLocked("corpus is being built", "somebody"))  # type: ignore[operator]
        raise KeyboardInterrupt

    monkeypatch.setattr("corpora.watch.watch", rounds)
    assert shell("watch", "code").exit_code == 1, "there is nothing to build it from"
    done = shell("watch", "code", shell.tree, "--model", shell.model)
    assert done.exit_code == 0 and done.stdout.count("\n") == 1 and "1 document added" in done.stdout
    assert "watching what code was built from" in done.stderr and "corpus is being built; trying again" in done.stderr
    done = shell("watch", "code", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("changed") for line in lines] == [False, False, None] and lines[-1]["status"] == 4
    assert shell("watch", "code", shell.model).exit_code == 2, "other sources than it was built from"
