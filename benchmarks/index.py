"""How fast is indexing, and what does it cost? Build, update and size on disk of real source trees, beside the tokenizer alone.

    python benchmarks/index.py --sizes 5,20,60
    python benchmarks/index.py --sizes 20 --memory 700 --peers REST/bin/python,ADED/bin/python

Trees: Python sources of the packages installed beside this script, copied file by file, the packages in the order of PACKAGES,
until a tree has the size asked for; a tree that they cannot fill is refused, nothing is made up.

For each size:

    tokenizer        the same texts, in memory already, through the model's tokenizer in the batches of a build, into arrays
    build            `draftloom corpus build` as a process: the time it reports, and the wall clock's, start-up included
    tokenizer ratio  tokens a second of the build over those of the tokenizer alone
    peak memory      the largest resident set of that process
    writers          the writers of REST and ADED (of the interpreters `--peers`, see `lookup.py`) on the same tokens, which
                     are in memory already

On the largest tree 1 % of the files are changed (a line added), and `draftloom corpus update` runs, as a process, start-up
included: the update ratio is its wall time over that of the build. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from lookup import renumbered
from rich.console import Console
from rich.table import Table

from corpora.build import BATCH_CHARS
from corpora.catalog import Catalog
from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.survey import Survey
from engine.models import resolve
from engine.text import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("transformers", "torch", "sympy", "networkx", "numpy", "numba", "mypy", "pip", "accelerate", "pygments")
MB = 1_000_000

PEER = """
import json, sys, time
from importlib import metadata
import numpy as np
import draftretriever
tokens = np.load(sys.argv[1])
began = time.perf_counter()
writer = draftretriever.Writer(sys.argv[2], vocab_size=65536)
writer.add_entry(tokens.tolist())
writer.finalize()
seconds = time.perf_counter() - began
print(json.dumps(["rest" if metadata.version("draftretriever") == "0.1.0" else "aded", seconds]))
"""


@dataclass(frozen=True)
class Run:
    """A finished process: seconds by the wall clock, largest resident set in bytes, the last line it printed."""

    seconds: float
    peak_memory_bytes: int
    last: dict[str, Any]


def main(
    sizes: Annotated[str, typer.Option(help="Megabytes of source, with commas.")] = "5,20,60",
    model: Annotated[str, typer.Option(help="Whose tokenizer.")] = "qwen2.5-coder-1.5b",
    memory: Annotated[int | None, typer.Option(help="Most memory of a build in MB, as `--memory`.")] = None,
    updates: Annotated[int, typer.Option(help="How often to update; the least time counts.")] = 3,
    peers: Annotated[str, typer.Option(help="Interpreters that have a draftretriever, with commas.")] = "",
) -> None:
    folder = resolve(model)
    tokenizer = Tokenizer.load(folder)
    results: dict[str, dict[str, Any]] = {}
    update: dict[str, Any] = {}
    wanted = [float(size) for size in sizes.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for size in wanted:
            tree, num_files, num_bytes = grow(work / f"tree-{size:g}", size)
            options = ["--model", str(folder), *(["--memory", str(memory)] if memory else [])]
            built = draftloom("corpus", "build", "code", str(tree), *options, store=work / "store")
            seconds, num_tokens, tokens = alone(tokenizer, tree)
            assert built.last["tokens"] == num_tokens, "the build and the tokenizer alone saw other texts"
            on_disk = sum(path.stat().st_size for path in Catalog(work / "store").active_path("code").iterdir())
            results[f"{size:g}MB"] = {
                "files": num_files,
                "bytes": num_bytes,
                "tokens": num_tokens,
                "bytes_per_second": num_bytes / built.last["seconds"],
                "tokens_per_second": num_tokens / built.last["seconds"],
                "seconds": built.last["seconds"],
                "process_seconds": built.seconds,
                "tokenizer_tokens_per_second": num_tokens / seconds,
                "tokenizer_ratio": seconds / built.last["seconds"],
                "tokenizer_share": built.last["tokenizer_seconds"] / built.last["seconds"],
                "bytes_per_token": on_disk / num_tokens,
                "peak_memory_bytes": built.peak_memory_bytes,
                "peer_seconds": dict(written_by(python, work, tokens) for python in filter(None, peers.split(","))),
            }
            if size == wanted[-1]:
                update = updated(work / "store", tree, built.seconds, updates)
    show(results, update)
    print(json.dumps({"sizes": results, **update}))


def grow(tree: Path, size: float) -> tuple[Path, int, int]:
    """(a tree of `size` MB of sources, files, bytes)."""
    num_files = num_bytes = 0
    for path, name in sources():
        length = path.stat().st_size
        if num_bytes + length > size * MB:
            continue
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        os.utime(target, ns=(10**18, 10**18))
        num_files, num_bytes = num_files + 1, num_bytes + length
        if num_bytes > size * MB * 0.99:
            return tree, num_files, num_bytes
    raise SystemExit(f"the installed packages hold only {num_bytes / MB:.0f} MB of source")


def sources() -> Iterator[tuple[Path, str]]:
    """(path, name) of every source file of the packages."""
    site = Path(np.__file__).resolve().parents[1]
    for package in PACKAGES:
        for path in sorted((site / package).rglob("*.py")):
            yield path, path.relative_to(site).as_posix()


def draftloom(*arguments: str, store: Path) -> Run:
    """Run a command to its end, and measure it; with its modules compiled, as they are where it is installed."""
    command = [sys.executable, "-m", "engine.start", *arguments, "--store", str(store), "--json"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, cwd=ROOT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = out.read().splitlines()
    assert process.returncode == 0, lines[-1:]
    return Run(seconds, usage.ru_maxrss * 1024, json.loads(lines[-1]))


def alone(tokenizer: Tokenizer, tree: Path) -> tuple[float, int, list[np.ndarray[Any, Any]]]:
    """(seconds in the tokenizer, tokens, they) for the texts that a build of the tree stores, all of them in memory before."""
    options = BuildOptions()
    texts = [d.content for found in Survey(open_sources([str(tree)], options), options) for d in found.documents]
    batches, size = [list[str]()], 0
    for text in texts:
        assert isinstance(text, str)
        batches[-1].append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            batches.append([])
            size = 0
    began = time.perf_counter()
    tokens = [ids for batch in batches for ids in tokenizer.encode_batch(batch)]
    return time.perf_counter() - began, sum(map(len, tokens)), tokens


def written_by(python: str, work: Path, tokens: Sequence[np.ndarray[Any, Any]]) -> tuple[str, float]:
    """(name, seconds to write an index of the tokens) of the peer that an interpreter has."""
    np.save(work / "tokens.npy", *renumbered(np.concatenate(tokens)))
    command = [python, "-c", PEER, str(work / "tokens.npy"), str(work / "peer.idx")]
    name, seconds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return name, seconds


def updated(store: Path, tree: Path, build_seconds: float, repeats: int) -> dict[str, Any]:
    """What updates cost after a hundredth of the files was changed: the least of some, each of other files."""
    files = sorted(tree.rglob("*.py"))
    runs = []
    for number in range(repeats):
        for path in files[number::100]:
            with path.open("a") as file:
                file.write(f"\n# changed by edit {number}\n")
            os.utime(path, ns=(10**18 + number + 1, 10**18 + number + 1))
        time.sleep(3)  # until the files count as settled
        runs.append(draftloom("corpus", "update", "code", store=store))
    best = min(runs, key=lambda run: run.seconds)
    return {
        "update_ratio": best.seconds / build_seconds,
        "update": {
            "seconds": best.last["seconds"],
            "process_seconds": [run.seconds for run in runs],
            "added": best.last["added"],
            "kept": best.last["kept"],
            "new_tokens": best.last["new_tokens"],
        },
    }


def show(results: dict[str, dict[str, Any]], update: dict[str, Any]) -> None:
    console = Console(width=150)
    table = Table("source", "files", "tokens", "MB/s", "tokens/s", "tokenizer alone", "ratio", "in tokenizer", "bytes a token",
                  "peak memory", "seconds", "process", "writers")  # fmt: skip
    for name, r in results.items():
        writers = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in r["peer_seconds"].items()) or "-"
        table.add_row(
            name, f"{r['files']:,}", f"{r['tokens']:,}", f"{r['bytes_per_second'] / MB:.1f}", f"{r['tokens_per_second']:,.0f}",
            f"{r['tokenizer_tokens_per_second']:,.0f}", f"{r['tokenizer_ratio']:.2f}", f"{r['tokenizer_share']:.0%}",
            f"{r['bytes_per_token']:.2f}", f"{r['peak_memory_bytes'] / MB:,.0f} MB", f"{r['seconds']:.1f}",
            f"{r['process_seconds']:.1f}", writers,
        )  # fmt: skip
    console.print(table)
    u = update["update"]
    console.print(
        f"update after a change of {u['added']} files: {min(u['process_seconds']):.2f} s as a process, "
        f"{u['seconds']:.2f} s of it in the update, {update['update_ratio']:.1%} of the build"
    )


if __name__ == "__main__":
    typer.run(main)
