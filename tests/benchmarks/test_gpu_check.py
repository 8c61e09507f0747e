"""The prepared script for a GPU: all its parts run on a CPU with a tiny network."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.engine import tiny

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, *options: str) -> tuple[int, dict[str, object]]:
    """Exit code, and the last line's figures."""
    import typer

    app = typer.Typer()
    app.command()(script.main)
    done = CliRunner().invoke(app, list(options))
    return done.exit_code, json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}


def test_every_part_runs_and_is_right(script: ModuleType, tmp_path: Path) -> None:
    """Correctness within rounding, curves of all sizes with both kinds of attention, the same text with drafts as without."""
    folder = tmp_path / "weights"
    tiny.build("LlamaConfig").save_pretrained(folder)
    lengths = tmp_path / "accepted.txt"
    lengths.write_text("3\n0\n2\n")
    options = ["--model", str(folder), "--accepted", str(lengths), "--context", "70", "--tokens", "7", "--cpu-tiny"]
    code, figures = run(script, *options)
    assert code == 0 and figures["failed"] == {} and figures["left_out"] == []
    right = figures["correctness"]
    assert right.pop("choices that differ") == 0
    assert len(right) == 8 and max(right.values()) < 1e-3
    for part in ("random", "model"):
        assert set(figures[part]["rows_ms"]) == {"flex", "gathered"}
        assert set(figures[part]["served"]) == {"1", "4"}
        for level, each in figures[part]["served"].items():
            assert each["identical"] == int(level)
    assert set(figures["random"]["replayed"]) == {"1", "4"} and "replayed" not in figures["model"]


def test_parts_that_time_no_longer_allows_are_named(script: ModuleType) -> None:
    """With no seconds to spare nothing begins, and it says so."""
    code, figures = run(script, "--cpu-tiny", "--seconds", "-1")
    assert code == 0 and figures["left_out"] == ["correctness", "random"]


def test_what_is_wrong_fails_the_command(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference beyond rounding, or a part that raises, ends it with 1 and its name."""
    monkeypatch.setattr(script, "correctness", lambda device: {"LlamaConfig, flex": 0.5})

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(script, "measure", broken)
    code, figures = run(script, "--cpu-tiny")
    assert code == 1 and set(figures["failed"]) == {"correctness", "random"}


def test_drafts_are_as_many_as_pay(script: ModuleType) -> None:
    """Where rows are free as many as are ever accepted, where each costs its share none."""
    accepted = np.array([0, 3, 1])
    assert script.draft_length(dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 1.0), 1, accepted) == 3
    assert script.draft_length({rows: float(rows) for rows in (1, 2, 4, 8, 16, 32, 64)}, 1, accepted) == 0
