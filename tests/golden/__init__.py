"""Scenarios people can read: in each .txt file here, a command (with its input lines), `----`, and what it prints.

Scenarios stand apart by a blank line; comments (`#`) come before the command or in blocks of their own. If one fails, run
`pytest --rewrite` and inspect the diff; commit the changes only if you understand what caused them and if they are desired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

Command = Callable[[Mapping[str, str], Mapping[str, str]], str]
"""(the `key=value` arguments of the command's line, the `name: text` lines below it) -> what it prints."""


def check(name: str, commands: Mapping[str, Command], rewrite: bool) -> None:
    """Run the scenarios of `name`.txt in order and compare, or write what they print into the file."""
    path = Path(__file__).with_name(f"{name}.txt")
    scenarios = path.read_text().rstrip("\n").split("\n\n")
    replayed = [_replay(scenario, commands) for scenario in scenarios]
    if rewrite:
        path.write_text("\n\n".join(replayed) + "\n")
        return
    for expected, found in zip(scenarios, replayed, strict=True):
        assert expected == found, f"{path.name} expects\n\n{expected}\n\nbut this came out\n\n{found}"


def _replay(scenario: str, commands: Mapping[str, Command]) -> str:
    """The scenario with its output as it is."""
    head = scenario.partition("----")[0].rstrip("\n")
    lines = [line for line in head.split("\n") if not line.startswith("#")]
    if not lines:
        return scenario
    word, *pairs = lines[0].split()
    arguments = dict(pair.split("=", 1) for pair in pairs)
    inputs = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines[1:])}
    return f"{head}\n----\n{commands[word](arguments, inputs)}".rstrip("\n")
