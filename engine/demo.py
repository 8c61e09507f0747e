"""`draftloom demo`: the whole service on code that is already on this machine.

    1  find an installed package and hold some of its files out, chosen by the hash of their path
    2  index the rest, as `draftloom corpus build` does
    3  start `draftloom serve`, and speak to it as any client does
    4  complete functions of the held-out files, each twice, plain and with Draftloom, taking turns at going first
    5  say how fast each was, who drafted what, and whether the texts are equal

Both answers come from one server and one model. Decoding is timed at the client: from the request to the last token, less the
time that the server says the prompt took.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import draftloom
from engine.cli import progress
from engine.errors import ConfigError, EngineError
from engine.models import resolve
from engine.screen import TARGET, Painter, share, style
from engine.spawn import own_server, running

CORPUS = "demo"
HELD_OUT = 50
"""One file in so many is held out."""
PREFIX_CHARACTERS = (900, 1800)
"""Least and most text before the point of completion: some 250 to 500 tokens."""
GENERATED, HEAD = "generated from", 2000
"""What a generated file says, and within how many characters."""
BODY_LINES = 6
"""Least length of the body of a function worth completing."""


@dataclass(frozen=True)
class Task:
    """A function to complete: `prompt` is the end of its file up to its body, `file` is relative to the package."""

    file: str
    function: str
    prompt: str


@dataclass(frozen=True)
class Run:
    """One answer, the seconds its decoding took, and those from the request to its end."""

    answer: draftloom.Completion
    seconds: float
    total_seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second while decoding."""
        return len(self.answer.token_ids) / self.seconds


@dataclass(frozen=True)
class Pair:
    """The two answers to one task."""

    plain: Run
    drafted: Run

    @property
    def identical(self) -> bool:
        """Whether text and tokens are equal."""
        plain, drafted = self.plain.answer, self.drafted.answer
        return (plain.text, plain.token_ids) == (drafted.text, drafted.token_ids)

    @property
    def speedup(self) -> float:
        """How many times as fast the drafted answer was decoded."""
        return self.plain.seconds / self.drafted.seconds if self.identical else self.drafted.speed / self.plain.speed

    def line(self) -> str:
        """The pair in a line."""
        verdict = "identical" if self.identical else "DIFFERENT"
        return f"{self.plain.speed:6.1f} -> {self.drafted.speed:6.1f} tokens/s  {self.speedup:5.2f}x  {verdict}"


def run_demo(num_functions: int, max_tokens: int, package: str, model: str, store: Path | None) -> int:
    """Run the demo and print its report. Returns 0 if all pairs of texts are equal, else 1.

    Raises ConfigError for a package that is not installed or too small, EngineError if a step fails.
    """
    console = Console(highlight=False)
    folder = package_folder(package)
    held_out = hold_out(folder)
    tasks = list(find_tasks(folder, held_out))[:num_functions]
    if len(tasks) < num_functions:
        raise ConfigError(f"package {package} has too few functions to complete: {len(tasks)}; name a larger package")
    with ExitStack() as stack:
        with progress() as say:
            resolve(model, say)
        console.print(f"\n[bold]Index[/bold] {folder.name}, {len(held_out)} of its files held out")
        build(folder, held_out, model, store)
        console.print(f"\n[bold]Serve[/bold] {model} on the loopback interface")
        with progress() as say:
            say("loading the model")
            memory = stack.enter_context(tempfile.TemporaryDirectory())
            options = ["--model", model, "--memory", memory, *(["--store", str(store)] if store else [])]
            address = stack.enter_context(own_server(options))
        client = stack.enter_context(draftloom.Client(address))
        console.print(f"\n[bold]Complete[/bold] {num_functions} functions of held-out files twice, {max_tokens} tokens each")
        pairs = complete(client, tasks, max_tokens, console)
    report(tasks, pairs, console)
    result = summary(pairs, model)
    hint = f"\nCorpus {CORPUS} stays: draftloom generate 'def forward(' --corpus {CORPUS} --show-sources\n"
    console.print(hint, soft_wrap=True)
    print(json.dumps(result))
    return 0 if result["identical"] else 1


def package_folder(package: str) -> Path:
    """Where an installed package lies; it is not imported. Raises ConfigError."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"no such package is installed here: {package}; name one that is")
    return Path(next(iter(spec.submodule_search_locations)))


def hold_out(folder: Path) -> list[str]:
    """The files to complete and not to index: one in HELD_OUT, relative, in the order of the hashes that chose them."""
    hashes = {hashlib.sha256(name.encode()).hexdigest(): name for name in _python_files(folder)}
    return [hashes[digest] for digest in sorted(hashes) if int(digest[:8], 16) % HELD_OUT == 0]


def find_tasks(folder: Path, held_out: Sequence[str]) -> Iterator[Task]:
    """One task for each held-out file that has a function of BODY_LINES lines or more, far enough from the top of the file.

    A file that was generated, or that one beside it was generated from, is passed over: its twin is in the index.
    """
    for file in held_out:
        path = folder / file
        source = path.read_text(encoding="utf-8")
        heads = [_head(other) for other in path.parent.glob("*.py") if other != path]
        if GENERATED in source[:HEAD] or any(GENERATED in head and path.name in head for head in heads):
            continue
        lines = source.splitlines(keepends=True)
        for function in _functions(source):
            prompt = "".join(lines[: _body_line(function) - 1])
            if len(prompt) >= PREFIX_CHARACTERS[0]:
                yield Task(file, function.name, _end(prompt, PREFIX_CHARACTERS[1]))
                break


def build(folder: Path, held_out: Sequence[str], model: str, store: Path | None) -> None:
    """Index `folder` without the held-out files, by the command that anybody would use. Raises EngineError if it fails."""
    command = [*running("engine.cli"), "corpus", "build", CORPUS, str(folder), "--model", model]
    for file in held_out:
        command += ["--exclude", f"/{file}"]
    if store is not None:
        command += ["--store", str(store)]
    if subprocess.run(command, check=False).returncode != 0:
        raise EngineError(f"the corpus could not be built from {folder}; see above")


def complete(client: draftloom.Client, tasks: Sequence[Task], max_tokens: int, console: Console) -> list[Pair]:
    """Complete each task twice, showing it as it happens; plain decoding goes first every other time."""
    client.generate(tasks[0].prompt, max_tokens=2, corpora=CORPUS, learn=False)
    pairs = []
    for i, task in enumerate(tasks):
        if console.is_terminal:
            console.rule(Text(f"{i + 1}/{len(tasks)}  {task.file}  {task.function}"), align="left")
        runs = {}
        for plain in (True, False) if i % 2 == 0 else (False, True):
            runs[plain] = _run(client, task, max_tokens, plain, console)
        pairs.append(Pair(runs[True], runs[False]))
        if not console.is_terminal:
            console.print(f"{i + 1}/{len(tasks)}  {pairs[-1].line()}  {task.file} {task.function}", soft_wrap=True)
    return pairs


def _run(client: draftloom.Client, task: Task, max_tokens: int, plain: bool, console: Console) -> Run:
    """Complete one task; on a terminal the text appears as it comes, each token in the colour of its source."""
    painter = Painter(console) if console.is_terminal else None
    if painter:
        console.print("plain decoding" if plain else "Draftloom", style="bold dim")
    began = time.perf_counter()
    options: draftloom.Options = {"max_tokens": max_tokens, "corpora": CORPUS, "require_corpus": True, "speculation": not plain}
    with client.stream(task.prompt, **options) as stream:
        for chunk in stream:
            if painter:
                painter.add(chunk.text, chunk.sizes, chunk.sources)
    seconds = time.perf_counter() - began
    answer = stream.completion
    if answer is None:
        raise EngineError("the answer broke off without a last message; see the server's log")
    run = Run(answer, max(seconds - answer.statistics.prefill_seconds, 1e-9), seconds)
    if painter:
        console.print(f"\n{run.speed:.1f} tokens/s, {answer.statistics.tokens_per_step:.2f} tokens per step\n", style="dim")
    return run


def report(tasks: Sequence[Task], pairs: Sequence[Pair], console: Console) -> None:
    """Print the tables: speed by function, then share of the text by source."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("function", no_wrap=True, max_width=max(20, console.width - 54))
    for header in ("plain", "Draftloom", "speed-up", "tokens/step", "identical"):
        table.add_column(header, justify="right", no_wrap=True, min_width=len(header))
    for task, pair in zip(tasks, pairs, strict=True):
        name = f"{Path(task.file).name} {task.function}"
        same = "yes" if pair.identical else "[red]no[/red]"
        speeds = (f"{pair.plain.speed:.1f}/s", f"{pair.drafted.speed:.1f}/s", f"{pair.speedup:.2f}x")
        table.add_row(Text(name), *speeds, f"{pair.drafted.answer.statistics.tokens_per_step:.2f}", same)
    console.print()
    console.print(table)
    shares = Table(box=None, header_style="bold", pad_edge=False)
    shares.add_column("drafted by")
    shares.add_column("of the text", justify="right")
    for source, part in share(names for pair in pairs for names in pair.drafted.answer.sources).items():
        shares.add_row(Text(source, "" if source == TARGET else style((source,))), f"{part:.0%}")
    console.print()
    console.print(shares)


def summary(pairs: Sequence[Pair], model: str) -> dict[str, Any]:
    """The numbers of the last line. Speeds are of all tokens over all seconds of decoding."""
    plain, drafted = [pair.plain for pair in pairs], [pair.drafted for pair in pairs]
    statistics = [run.answer.statistics for run in drafted]
    speeds = [_speed(plain), _speed(drafted)]
    return {
        "model": model,
        "plain_tokens_per_second": round(speeds[0], 2),
        "draftloom_tokens_per_second": round(speeds[1], 2),
        "speedup": round(speeds[1] / speeds[0], 3),
        "end_to_end_speedup": round(sum(run.total_seconds for run in plain) / sum(run.total_seconds for run in drafted), 3),
        "tokens_per_step": round(sum(len(r.answer.token_ids) for r in drafted) / sum(s.num_steps for s in statistics), 3),
        "nodes_per_step": round(sum(s.num_nodes for s in statistics) / sum(s.num_steps for s in statistics), 3),
        "share_by_source": {k: round(v, 3) for k, v in share(n for run in drafted for n in run.answer.sources).items()},
        "functions": len(pairs),
        "identical": all(pair.identical for pair in pairs),
    }


def _speed(runs: Sequence[Run]) -> float:
    return sum(len(run.answer.token_ids) for run in runs) / sum(run.seconds for run in runs)


def _python_files(folder: Path) -> list[str]:
    """Relative names, with "/" on every system, so that hashes choose the same files everywhere."""
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*.py") if "__pycache__" not in file.parts]


def _head(file: Path) -> str:
    with open(file, encoding="utf-8", errors="replace") as text:
        return text.read(HEAD)


def _functions(source: str) -> list[ast.FunctionDef]:
    """Functions with a body worth completing, in the order of the hashes of their names."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - _body_line(node) + 1 >= BODY_LINES
    ]
    return sorted(found, key=lambda node: hashlib.sha256(f"{node.name}:{node.lineno}".encode()).hexdigest())


def _body_line(function: ast.FunctionDef) -> int:
    """Number of the first line of the body after the docstring; lines count from 1."""
    first, *others = function.body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    if is_docstring and others:
        return (first.end_lineno or first.lineno) + 1
    return first.lineno


def _end(text: str, num_characters: int) -> str:
    """At most so many characters of the end of `text`, from the beginning of a line."""
    if len(text) <= num_characters:
        return text
    return text[-num_characters:].partition("\n")[2]
