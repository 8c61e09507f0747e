"""`draftloom history`: what is shown, what is forgotten, and that texts are shown only to those who ask for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine import cli
from engine.memory import Memory
from engine.text import Tokenizer
from tests.tiny_tokenizers import byte_level

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `draftloom WORDS` in this process: (status, stdout, stderr)."""
    monkeypatch.setenv("DRAFTLOOM_MEMORY_FOLDER", str(tmp_path / "memory"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run_it(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftloom", *words])
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run_it


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    """Two tenants of one model, whose tokenizer is in the folder `model`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(byte_level())
    (tmp_path / "model" / "config.json").write_text("{}")
    loaded = Tokenizer.load(tmp_path / "model")
    key = f"{tmp_path / 'model'}@{loaded.fingerprint[:12]}"
    memory = Memory(tmp_path / "memory")
    for tenant, text in (("acme", "def add(first)"), ("zeta", "return [bold]self[/bold]")):
        ids = loaded.encode(text)
        arrays = {
            "tokens": ids,
            "lengths": np.array([len(ids)], np.int32),
            "leads": np.zeros(1, np.int32),
            "born": np.array([1e9]),
            "gained": np.zeros(1),
        }
        memory.save(key, tenant, "history", arrays)
        memory.save(key, tenant, "calibration", {"prompt": np.zeros((2, 4))})
    return memory


def test_nothing_remembered_is_said_so(run: Run, tmp_path: Path) -> None:
    """Where it was looked for; and nothing to forget is no error."""
    assert run("history", "show") == (0, "", f"nothing is remembered in {tmp_path / 'memory'}\n")
    assert json.loads(run("history", "show", "--json")[1]) == {"remembered": []}
    assert run("history", "clear") == (0, "forgot what was remembered of 0\n", "")


def test_it_shows_whose_and_how_much_but_no_text(run: Run, memory: Memory) -> None:
    """Model, tenant, counts, size and age; not a word of the answers."""
    status, out, _ = run("history", "show")
    assert status == 0 and "acme" in out and "zeta" in out and " d" in out
    assert "add" not in out and "self" not in out
    (row,) = json.loads(run("history", "show", "--tenant", "acme", "--json")[1])["remembered"]
    assert (row["tenant"], row["num_answers"], row["oldest"], row["texts"]) == ("acme", 1, 1e9, None)
    assert row["num_tokens"] > 0 and row["num_bytes"] > row["num_tokens"]


def test_texts_are_shown_as_they_are_to_those_who_ask(run: Run, memory: Memory) -> None:
    """Decoded by the model's tokenizer, and not read as markup."""
    status, out, _ = run("history", "show", "--text")
    assert status == 0 and "def add(first)" in out and "return [bold]self[/bold]" in out
    (row,) = json.loads(run("history", "show", "--text", "--tenant", "zeta", "--json")[1])["remembered"]
    assert row["texts"] == ["return [bold]self[/bold]"]


def test_texts_in_another_tokenizer_are_refused(run: Run, memory: Memory, tmp_path: Path) -> None:
    """One line that says what to do, status 2."""
    memory.save(f"{tmp_path / 'model'}@000000000000", "acme", "history", memory.load(*memory.known()[0], "history") or {})
    status, out, err = run("history", "show", "--text")
    assert (status, out) == (2, "") and err.startswith("draftloom: the model has another tokenizer") and err.count("\n") == 1


def test_clear_forgets_whom_it_is_told_to(run: Run, memory: Memory) -> None:
    """One tenant, then everything; the files are gone."""
    assert run("history", "clear", "--tenant", "acme", "--json")[1] == '{"cleared": 1}\n'
    assert {entry.tenant for entry in memory.entries()} == {"zeta"}
    assert run("history", "clear", "--model", "no such model")[1] == "forgot what was remembered of 0\n"
    assert run("history", "clear")[1] == "forgot what was remembered of 1\n"
    assert memory.entries() == []
