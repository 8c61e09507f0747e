"""The demo's choices and sums. The demo itself is what `make demo` runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import draftloom
from engine import demo
from tests.server.scripted import ScriptedEngine, serving_in_thread

FILE = '''"""A module."""

import os

{filler}

def short():
    return 1


def documented(first, second):
    """Say something.

    On several lines.
    """
    a = first
    b = second
    c = a + b
    d = c * 2
    e = d - 1
    return e
'''


def package(folder: Path, num_files: int = 200) -> Path:
    """A package of many small modules."""
    for i in range(num_files):
        (folder / f"part{i % 7}").mkdir(parents=True, exist_ok=True)
        (folder / f"part{i % 7}" / f"m{i}.py").write_text(FILE.format(filler="\n".join(f"NAME_{n} = {n}" for n in range(150))))
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.py").write_text("")
    return folder


@pytest.fixture
def client() -> Iterator[draftloom.Client]:
    with serving_in_thread(ScriptedEngine()) as address, draftloom.Client(address) as connected:
        yield connected


def test_the_files_held_out_depend_on_their_names_alone(tmp_path: Path) -> None:
    """About one in fifty, the same ones wherever the package lies, none of them compiled ones."""
    first, second = demo.hold_out(package(tmp_path / "a")), demo.hold_out(package(tmp_path / "b"))
    assert first == second and len(set(first)) == len(first)
    assert 0 < len(first) < 20
    assert all((tmp_path / "a" / name).is_file() and "__pycache__" not in name for name in first)


def test_a_task_ends_where_the_body_begins(tmp_path: Path) -> None:
    """The prompt is the end of the file up to the docstring of a function that is long enough, from the start of a line."""
    folder = package(tmp_path / "a")
    tasks = list(demo.find_tasks(folder, demo.hold_out(folder)))
    assert tasks and tasks == list(demo.find_tasks(folder, demo.hold_out(folder)))
    for task in tasks:
        assert task.function == "documented"
        assert task.prompt.endswith('    On several lines.\n    """\n')
        assert len(task.prompt) <= demo.PREFIX_CHARACTERS[1]
        assert (folder / task.file).read_text().find("\n" + task.prompt) > 0


def test_twins_of_indexed_files_are_no_tasks(tmp_path: Path) -> None:
    """Neither a generated file nor what one beside it was generated from is completed: it would be copying."""
    folder = package(tmp_path / "a")
    file, other, *rest = demo.hold_out(folder)
    (folder / file).write_text("# This file was generated from elsewhere.\n" + (folder / file).read_text())
    (folder / other).with_name("twin.py").write_text(f"# This file was generated from {Path(other).name}.\n")
    assert [task.file for task in demo.find_tasks(folder, [file, other, *rest])] == rest


def test_files_without_a_long_function_are_passed_over(tmp_path: Path) -> None:
    """Too short a body, or too little text before it."""
    (tmp_path / "a.py").write_text(FILE.format(filler=""))
    (tmp_path / "b.py").write_text("\n" * 2000 + "def f():\n    return 1\n")
    assert list(demo.find_tasks(tmp_path, ["a.py", "b.py"])) == []


def test_each_task_is_completed_twice_and_compared(client: draftloom.Client) -> None:
    """Pairs have both answers, the report a row for each, and the sums are right."""
    screen = Console(file=io.StringIO(), width=100, highlight=False)
    tasks = [demo.Task("a/b.py", "f", "abc"), demo.Task("c.py", "g", "de")]
    pairs = demo.complete(client, tasks, 9, screen)
    assert [pair.identical for pair in pairs] == [True, True]
    result = demo.summary(pairs, "scripted")
    assert result["identical"] is True and result["functions"] == 2
    assert result["tokens_per_step"] == 3.0 and result["nodes_per_step"] == 3.0
    assert result["share_by_source"] == {"corpus:code": 0.667, "prompt": 0.333, "target": 0.333}
    speeds = result["draftloom_tokens_per_second"], result["plain_tokens_per_second"]
    assert result["speedup"] == pytest.approx(speeds[0] / speeds[1], rel=0.01)
    demo.report(tasks, pairs, screen)
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert text.count("identical") == 3 and "b.py f" in text and "c.py g" in text and "67%" in text


def test_a_differing_text_is_seen(client: draftloom.Client) -> None:
    """In the pair, in its line, and in the sum."""
    screen = Console(file=io.StringIO(), width=100, highlight=False)
    (pair,) = demo.complete(client, [demo.Task("a.py", "f", "abc")], 3, screen)
    other = replace(pair.drafted, answer=replace(pair.drafted.answer, token_ids=(0, 0, 0)))
    changed = demo.Pair(pair.plain, other)
    assert not changed.identical and changed.line().endswith("DIFFERENT")
    assert demo.summary([pair, changed], "scripted")["identical"] is False


def test_on_a_terminal_the_text_streams_in_colour(client: draftloom.Client) -> None:
    """Both answers are shown under their names; drafted tokens are coloured."""
    screen = Console(file=io.StringIO(), width=100, highlight=False, force_terminal=True, color_system="standard")
    demo.complete(client, [demo.Task("a.py", "f", "abc")], 3, screen)
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "plain decoding" in text and "Draftloom" in text and "\x1b[32ma" in text
