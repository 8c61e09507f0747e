"""What the worker takes for a pass, how it scales with requests, and how its peers do on the same prompts and cores.

    python benchmarks/worker.py --model qwen2.5-coder-1.5b
    python benchmarks/worker.py --model smollm2-135m --quick

Times a pass of 1 to 64 rows, against reading the weights once (the best of five float32 sums over as many bytes, same threads);
a row at several lengths of context; reading a prompt; then tokens/s of so many requests at once, decoding plainly and with
drafts out of a corpus of the prompts' own older release (the pair `pydantic` of complete.py; left out where its data is not
there). Peers run in Pythons of their own, one after the other: `--peer llama.cpp:PYTHON:MODEL.gguf,vllm:PYTHON:FOLDER`, each
plainly and with its own prompt lookup; `peers.py` says what they need. `--quick` leaves them out, and rounds. Prints tables;
the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from _common import AUTO, console, forget, load_target, make_engine, price
from complete import make_pair, prompts
from rich.table import Table

from corpora.build import build
from corpora.catalog import Catalog
from engine.acceptance import SamplingParams
from engine.app import Engine
from engine.requests import Chunk, GenerationRequest, SpeculationOptions
from engine.target.attention import Part, Pass
from engine.target.cache import KVTable
from engine.target.quantize import Int8DecoderLayer, Int8Linear

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 500
LONG_PROMPT = 1500


def least(work: Callable[[], object], rounds: int) -> float:
    """Milliseconds of the quickest of several runs, after one to warm up: other work on a machine only ever adds."""
    work()
    best = np.inf
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return 1000 * best


def weight_bytes(network: torch.nn.Module) -> int:
    """Bytes of the int8 matrices that every pass reads."""
    total = 0
    for module in network.modules():
        if isinstance(module, Int8DecoderLayer):
            total += sum(arrays[0].nbytes for arrays in module.matrices)
        elif isinstance(module, Int8Linear):
            total += module._shared.matrix.packed.weights.nbytes
    return total


class Bench:
    """Passes over one sequence of made-up tokens."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._table = KVTable(target.storage)

    def read(self, num_tokens: int, chunk: int = 256) -> None:
        """Read so many tokens more, as a prompt is read."""
        while num_tokens > 0:
            rows = min(chunk, num_tokens)
            self.run(rows, np.zeros(0, np.int32))
            self._table.keep(np.arange(rows, dtype=np.int32))
            num_tokens -= rows

    def run(self, rows: int, wanted: np.ndarray) -> None:
        """One pass of so many rows behind what was read."""
        self._table.reserve(rows)
        chain = Pass(self._target.storage, [Part(self._table, np.arange(-1, rows - 1, dtype=np.int32))])
        self._target._model.forward(np.arange(rows, dtype=np.int32) + 100, chain, wanted)

    def clear(self) -> None:
        """Forget what was read."""
        self._table.close()


def passes(target: Any, context: int, quick: bool) -> dict[str, Any]:
    """Times of single passes, in milliseconds."""
    bench, rounds = Bench(target), 3 if quick else 7
    found: dict[str, Any] = {"rows_ms": {}, "context_ms": {}}
    bench.read(context)
    for rows in ROWS:
        found["rows_ms"][rows] = least(lambda rows=rows: bench.run(rows, np.arange(rows, dtype=np.int32)), rounds)
    size = weight_bytes(target._model.network)
    if size:
        numbers = torch.ones(size // 4)
        found["read_weights_ms"] = least(numbers.sum, 5)
        del numbers
    at = context
    for length in (200, 1000, 4000) if quick else (200, 1000, 4000, 16000):
        if length >= at and length + 8 <= target.info.context_length and target.storage.fits(length + 8):
            bench.read(length - at)
            at = length
            found["context_ms"][length] = {
                rows: least(lambda rows=rows: bench.run(rows, np.arange(rows, dtype=np.int32)), 3) for rows in (1, 8)
            }
    bench.clear()
    found["prefill_ms"] = {}
    for length in (PROMPT, LONG_PROMPT):
        found["prefill_ms"][length] = least(lambda length=length: (bench.read(length), bench.clear()), 1 if quick else 2)
    return found


@dataclass
class Answer:
    """One request's tokens, and when they came: (seconds, how many)."""

    tokens: list[int]
    times: list[tuple[float, int]]
    first_ms: float


async def answer(engine: Any, text: str, tokens: int, speculate: bool) -> Answer:
    """One request."""
    options = SpeculationOptions(enabled=speculate, corpora=("bench",) if speculate else ())
    request = GenerationRequest(
        tenant="default", prompt=text, max_tokens=tokens, sampling=SamplingParams(), ignore_eos=True, speculation=options
    )
    forget(engine)
    start, found = time.perf_counter(), Answer([], [], 0.0)
    async for event in engine.generate(request):
        if isinstance(event, Chunk):
            found.tokens.extend(event.tokens)
            found.times.append((time.perf_counter(), len(event.tokens)))
    found.first_ms = 1000 * (found.times[0][0] - start)
    return found


def rate(answers: list[Answer]) -> float | None:
    """Tokens/s of all together, while none is still reading its prompt or already done; None if there is no such time."""
    begin = max(each.times[0][0] for each in answers)
    end = min(each.times[-1][0] for each in answers)
    if end <= begin:
        return None  # the first was done before the last began: ask for more tokens
    return sum(count for each in answers for at, count in each.times if begin < at <= end) / (end - begin)


@asynccontextmanager
async def indexed_engine(model: str, target: Any, tokenizer: Any, text: str) -> AsyncIterator[Engine]:
    """An engine with the older release of the pair `pydantic` as the corpus of `answer`; it has answered `text` already."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        _, indexed, _ = make_pair("pydantic")
        build("bench", [indexed], tokenizer, Catalog(store))
        engine = make_engine(model, target, tokenizer, store, nodes=AUTO)
        price(target, AUTO)
        await answer(engine, text, 8, True)  # compiles what was not yet
        yield engine
        await engine.close()


async def concurrent(
    target: Any, tokenizer: Any, model: str, texts: list[str], levels: list[int], tokens: int
) -> dict[str, Any]:
    """Plain and speculative tokens/s by the number of requests at once; texts must agree."""
    found: dict[str, Any] = {}
    async with indexed_engine(model, target, tokenizer, texts[0][:200]) as engine:
        for level in levels:
            both = [
                await asyncio.gather(*(answer(engine, text, tokens, speculate) for text in texts[:level]))
                for speculate in (False, True)
            ]
            same = sum(a.tokens == b.tokens for a, b in zip(*both, strict=True))
            found[str(level)] = {
                "plain": rate(both[0]),
                "speculative": rate(both[1]),
                "identical": f"{same}/{level}",
                "first_token_ms": median(each.first_ms for each in both[1]),
            }
    return found


def peers(wanted: str, texts: list[str], levels: list[int], tokens: int, threads: int) -> dict[str, dict[str, Any]]:
    """Run `peers.py` in every named peer's own Python; what fails says why and is left out."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"texts": texts, "levels": levels, "tokens": tokens, "threads": threads, "prompt": PROMPT}))
        for item in filter(None, wanted.split(",")):
            name, python, model = item.split(":", 2)
            command = [python, str(Path(__file__).with_name("peers.py")), name, model, str(job)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                console.print(f"{name} failed: {error}")
                continue
            lines = done.stdout.strip().splitlines()
            if done.returncode or not lines:
                console.print(f"{name} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
                continue
            found |= json.loads(lines[-1])
    return found


def report_passes(figures: dict[str, Any]) -> None:
    """The tables of single passes."""
    table = Table("rows", "ms", "x reading the weights")
    read = figures.get("read_weights_ms")
    for rows, ms in figures["rows_ms"].items():
        table.add_row(str(rows), f"{ms:.1f}", f"{ms / read:.2f}" if read else "")
    console.print(table)
    table = Table("positions of context", "1 row, ms", "8 rows, ms")
    for length, by_rows in figures["context_ms"].items():
        table.add_row(str(length), *(f"{ms:.1f}" for ms in by_rows.values()))
    console.print(table)
    console.print(", ".join(f"a prompt of {length}: {ms:.0f} ms" for length, ms in figures["prefill_ms"].items()))


def report(figures: dict[str, Any]) -> None:
    """All tables."""
    if "rows_ms" in figures:
        report_passes(figures)
    names = sorted({name for name in figures["peers"]})
    table = Table("requests at once", "plain", "speculative", "identical", *names)
    for level, both in figures["concurrency"].items():
        others = [figures["peers"][name].get(level) for name in names]
        rates = ["" if value is None else f"{value:.1f}" for value in (both["plain"], both["speculative"], *others)]
        table.add_row(level, *rates[:2], both["identical"], *rates[2:])
    if figures["concurrency"]:
        console.print(table)


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="int8, float32 or bfloat16")] = "int8",
    threads: Annotated[int | None, typer.Option(help="threads of a pass; by default one per core")] = None,
    context: Annotated[int, typer.Option(help="positions before the timed rows")] = 200,
    levels: Annotated[str, typer.Option(help="how many requests at once")] = "1,4,8,16",
    tokens: Annotated[int, typer.Option(help="new tokens of a request")] = 64,
    peer: Annotated[str, typer.Option(help="comma-separated NAME:PYTHON:MODEL; names in peers.py")] = "",
    requests_only: Annotated[bool, typer.Option("--requests-only", help="no times of passes")] = False,
    passes_only: Annotated[bool, typer.Option("--passes-only", help="no requests, only times of passes")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="no peers, fewer rounds")] = False,
) -> None:
    """Measure, print tables, then one line of JSON."""
    tokenizer, target = load_target(model, dtype, threads)
    figures: dict[str, Any] = {"model": model, "dtype": dtype, "concurrency": {}, "peers": {}}
    if not requests_only:
        figures |= passes(target, context, quick)
    if not passes_only:
        _, _, completions = make_pair("pydantic")
        wanted = [int(level) for level in levels.split(",")]
        texts = prompts(completions, max(wanted), "line", tokenizer, 500)
        figures["concurrency"] = asyncio.run(concurrent(target, tokenizer, model, texts, wanted, tokens))
        if not quick:
            figures["peers"] = peers(peer, texts, wanted, tokens, torch.get_num_threads())
    report(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
