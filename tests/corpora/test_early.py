"""The head start of an update: it begins what is needed, and nobody notices where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corpora import aside, terminal
from corpora.catalog import CATALOG_FILE
from corpora.early import give_head_start
from tests.corpora.test_aside import _runs
from tests.corpora.test_cli import Shell, shell
from tests.corpora.trees import plant

__all__ = ["shell"]

ROOT = Path(aside.__file__).parents[1]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the tokenizers that were begun; none is loaded."""
    folders: list[Path] = []
    monkeypatch.setattr(aside, "begin", folders.append)
    return folders


def test_the_tokenizer_of_the_corpus_begins_to_load(shell: Shell, begun: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the words are put, and where the store is the usual one."""
    shell.build()
    store = str(shell.store)
    for words in (
        ["code", "--store", store],
        ["--json", f"--store={store}", "code"],
        ["--store", store, "--", "code"],
    ):
        give_head_start(["corpus", "update", *words])
        assert begun.pop() == shell.model
    monkeypatch.setenv("DRAFTLOOM_HOME", store)
    give_head_start(["corpus", "update", "code"])
    assert begun == [shell.model]


def test_other_words_begin_nothing(
    shell: Shell, begun: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said, raised or written: what is wrong is for the command to say."""

    def written() -> list[Path]:
        """All but what SQLite puts beside a database that is read."""
        return sorted(path for path in tmp_path.rglob("*") if not path.name.startswith(f"{CATALOG_FILE}-"))

    monkeypatch.setenv("DRAFTLOOM_HOME", str(tmp_path / "none"))
    shell.build()
    plant(tmp_path, {f"damaged/{CATALOG_FILE}": "no database"})
    before = written()
    for words in (
        "",
        "--help",
        "corpus",
        f"corpus list --store {shell.store}",
        f"corpus build code --store {shell.store}",
        f"serve corpus update code --store {shell.store}",
        "corpus update",
        f"corpus update --store {shell.store}",
        "corpus update code --store",
        f"corpus update --help code --store {shell.store}",
        f"corpus update other --store {shell.store}",
        f"corpus update ../code --store {shell.store}",
        f"corpus update code --store {shell.store}/absent",
        f"corpus update code --store {tmp_path}/damaged",
    ):
        give_head_start(words.split())
        assert begun == [], words
    assert capfd.readouterr() == ("", "") and written() == before


def test_a_model_that_is_gone_begins_nothing(shell: Shell, begun: list[Path]) -> None:
    """The command fetches it, or says that it cannot."""
    shell.build()
    shell.model.rename(shell.model.with_name("elsewhere"))
    give_head_start(["corpus", "update", "code", "--store", str(shell.store)])
    assert begun == []


def test_the_command_takes_what_was_begun(shell: Shell) -> None:
    """Once: the next one begins its own."""
    shell.build()
    give_head_start(["corpus", "update", "code", "--store", str(shell.store)])
    process = aside._begun[shell.model]._process
    with terminal.tokenizer_aside(str(shell.model)) as taken:
        assert taken is not None and taken._process is process and taken.checksum
    with terminal.tokenizer_aside(str(shell.model)) as another:
        assert another is not None and another._process is not process


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_what_nobody_takes_ends(shell: Shell) -> None:
    """With the process that began it."""
    code = f"from pathlib import Path; from corpora import aside; aside.begin(p := Path({str(shell.model)!r})); "
    code += "print(aside._begun[p]._process.pid)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    until = time.monotonic() + 20
    while _runs(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(int(done.stdout))


def test_it_begins_before_the_command_line_is_imported(shell: Shell) -> None:
    """Neither it nor numpy is there yet, or nothing would be gained."""
    shell.build()
    code = (
        "import sys, engine.start; from corpora import aside, early\n"
        f"early.give_head_start(['corpus', 'update', 'code', '--store', {str(shell.store)!r}])\n"
        "sys.exit(not aside._begun or any(name in sys.modules for name in ('typer', 'rich', 'numpy', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_is_the_same_either_way(shell: Shell) -> None:
    """What is printed, and the status, with a head start and without: updated, unchanged, absent, refused."""
    shell.build()

    def outcome(module: str, *words: str) -> tuple[int, str, str]:
        environment = {**os.environ, "COLUMNS": "100", "DRAFTLOOM_HOME": str(shell.store)}
        command = [sys.executable, "-m", module, "corpus", "update", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.partition(";")[0], done.stderr

    for words in (["absent"], ["code", "--no-such-option"], ["code"]):
        assert outcome("engine.start", *words) == outcome("engine.cli", *words)
    plant(shell.tree, {"one.py": "one = 1\n"})
    first = outcome("engine.start", "code")
    plant(shell.tree, {"two.py": "two = 2\n"})
    assert first[0] == 0 and "1 document added" in first[1]
    assert outcome("engine.cli", "code")[0] == 0
