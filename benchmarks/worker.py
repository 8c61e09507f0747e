"""What the worker takes for a pass, how it scales with requests, and how its peers do on the same prompts and cores.

    python benchmarks/worker.py --model qwen2.5-coder-1.5b
    python benchmarks/worker.py --model smollm2-135m --quick
    python benchmarks/worker.py --model qwen2.5-coder-1.5b --parts peers --peer llama.cpp:PYTHON:FILE.gguf --keep figures.json

In parts, of which `--parts` chooses some:

    passes    a pass of 1 to 64 rows, against reading the weights once (a float32 sum over as many bytes, same threads), the
              best of nine in turns; a pass at several lengths of context; reading a prompt
    first     how long a short request waits for its first token, alone and beside a prompt of 1,500 tokens that is being read,
              and the longest pause of a stream that is running meanwhile
    requests  tokens/s of so many requests at once, decoding plainly and with drafts out of a corpus of the prompts' own older
              release (the pair `pydantic` of complete.py)
    peers     the same prompts by others, each in a Python of its own: `--peer llama.cpp:PYTHON:MODEL.gguf,vllm:PYTHON:FOLDER`;
              `peers.py` says what they need

Every level of concurrency has prompts of its own, read before the clock starts: nothing is answered twice. The engine learns as
it goes, like a server. `--quick` leaves peers out, and rounds. With `--keep FILE` figures are kept there, and those of other
parts that are there are shown too: one table out of several short runs. Prints tables; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from _common import AUTO, console, forget, load_target, make_engine
from complete import make_pair, prompts
from rich.table import Table

from corpora.build import build
from corpora.catalog import Catalog
from engine.acceptance import SamplingParams
from engine.app import Engine
from engine.models import resolve
from engine.requests import Chunk, Final, GenerationRequest, GenerationStats, SpeculationOptions
from engine.target.attention import Part, Pass
from engine.target.cache import KVTable
from engine.target.quantize import Int8Decoder, Int8Linear
from engine.text import Tokenizer

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 500
LONG_PROMPT = 1500


def least(work: Callable[[], object], rounds: int) -> float:
    """Milliseconds of the quickest of several runs, after one to warm up: other work on a machine only ever adds."""
    return least_in_turns({"": work}, rounds)[""]


def least_in_turns(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The same of several, one after another in every round: what makes a machine slower or quicker for a while meets all."""
    best = dict.fromkeys(works, np.inf)
    for i in range(1 + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if i:
                best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def weight_bytes(network: torch.nn.Module) -> int:
    """Bytes of the int8 matrices that every pass reads."""
    total = 0
    for module in network.modules():
        if isinstance(module, Int8Decoder):
            total += sum(matrix.weights.nbytes for layer in module.matrices for matrix in layer)
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

    def pretend(self, num_tokens: int) -> None:
        """As if so many tokens more had been read: keys and values of noise, which take as long as any."""
        first = len(self._table.blocks)
        self._table.reserve(num_tokens)
        rng = np.random.default_rng(0)
        for arrays in (self._target.storage.keys, self._target.storage.values):
            for layer in arrays:
                noise = rng.standard_normal(layer.shape[1:], np.float32)
                for block in self._table.blocks[first:]:
                    layer[block] = noise
        self._table.keep(np.arange(num_tokens, dtype=np.int32))

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
    bench, rounds = Bench(target), 3 if quick else 9
    found: dict[str, Any] = {"context_ms": {}}
    bench.read(context)
    works = {str(rows): lambda rows=rows: bench.run(rows, np.arange(rows, dtype=np.int32)) for rows in ROWS}
    if size := weight_bytes(target._model.network):
        works["read"] = torch.ones(size // 4).sum
    found["rows_ms"] = least_in_turns(works, rounds)
    if "read" in works:
        found["read_weights_ms"] = found["rows_ms"].pop("read")
    del works
    at = context
    for length in (200, 1000, 4000) if quick else (200, 1000, 4000, 16000):
        if length >= at and length + 8 <= target.info.context_length and target.storage.fits(length + 8):
            bench.pretend(length - at)
            at = length
            found["context_ms"][str(length)] = {
                str(rows): least(lambda rows=rows: bench.run(rows, np.arange(rows, dtype=np.int32)), 3) for rows in (1, 8)
            }
    bench.clear()
    found["prefill_ms"] = {}
    for length in (PROMPT, LONG_PROMPT):
        found["prefill_ms"][str(length)] = least(lambda length=length: (bench.read(length), bench.clear()), 1 if quick else 2)
    return found


@dataclass
class Answer:
    """One request's tokens, when they came (seconds, how many), and what drafting did for them."""

    tokens: list[int]
    times: list[tuple[float, int]]
    first_ms: float
    statistics: GenerationStats = field(default_factory=GenerationStats)


async def answer(
    engine: Any, text: str, tokens: int, speculate: bool, fresh: bool = True, remembers: bool | None = None
) -> Answer:
    """One request. `fresh`: with nothing of its prompt read before. `remembers`: earlier answers, as later ones will this one;
    None is as the settings have it."""
    options = SpeculationOptions(
        enabled=speculate, corpora=("bench",) if speculate else (), use_history=remembers, learn=remembers
    )
    request = GenerationRequest(
        tenant="default", prompt=text, max_tokens=tokens, sampling=SamplingParams(), ignore_eos=True, speculation=options
    )
    if fresh:
        forget(engine)
    start, found = time.perf_counter(), Answer([], [], 0.0)
    async for event in engine.generate(request):
        if isinstance(event, Chunk):
            found.tokens.extend(event.tokens)
            found.times.append((time.perf_counter(), len(event.tokens)))
        elif isinstance(event, Final):
            found.statistics = event.statistics
    found.first_ms = 1000 * (found.times[0][0] - start)
    return found


def together(answers: list[Answer]) -> tuple[int, float]:
    """Tokens, and seconds, while none is still reading its prompt or already done.

    0 s if there is no such time, the first being done before the last begins: then ask for more tokens.
    """
    begin = max(each.times[0][0] for each in answers)
    end = max(begin, min(each.times[-1][0] for each in answers))
    return sum(count for each in answers for at, count in each.times if begin < at <= end), end - begin


@asynccontextmanager
async def indexed_engine(model: str, target: Any, tokenizer: Any, text: str) -> AsyncIterator[Engine]:
    """An engine with the older release of the pair `pydantic` as the corpus of `answer`; it has answered `text` already."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        _, indexed, _ = make_pair("pydantic")
        build("bench", [indexed], tokenizer, Catalog(store))
        engine = make_engine(model, target, tokenizer, store, nodes=AUTO)
        await answer(engine, text, 8, True)  # compiles what was not yet
        yield engine
        await engine.close()


def grouped(texts: list[str], levels: list[int], alone: int) -> dict[str, list[list[str]]]:
    """The prompts of every level, by requests at once: `alone` groups of one, one group of any other size. None comes twice."""
    rest = iter(texts)
    return {str(level): [list(islice(rest, level)) for _ in range(alone if level == 1 else 1)] for level in levels}


async def concurrent(engine: Engine, groups: dict[str, list[list[str]]], tokens: int) -> dict[str, Any]:
    """Plain and speculative tokens/s by the number of requests at once; texts must agree."""
    found: dict[str, Any] = {}
    for level, some in groups.items():
        count, seconds, same = {False: 0, True: 0}, {False: 0.0, True: 0.0}, 0
        for texts in some:
            forget(engine)
            await asyncio.gather(*(answer(engine, text, 1, False, fresh=False) for text in texts))
            both = {}
            for speculate in (False, True):
                both[speculate] = await asyncio.gather(
                    *(answer(engine, text, tokens, speculate, fresh=False) for text in texts)
                )
                num, time_taken = together(both[speculate])
                count[speculate] += num
                seconds[speculate] += time_taken
            same += sum(a.tokens == b.tokens for a, b in zip(both[False], both[True], strict=True))
        found[level] = {
            name: count[speculate] / seconds[speculate] if seconds[speculate] else None
            for name, speculate in (("plain", False), ("speculative", True))
        }
        found[level]["identical"] = f"{same}/{sum(map(len, some))}"
        console.print(f"{level} at once: {found[level]}")
    return found


async def first_token(engine: Engine, tokenizer: Any, text: str) -> dict[str, float]:
    """Milliseconds to a short request's first token, alone and beside a long prompt that is being read; the longest pause of a
    stream that was running meanwhile. `text` has more tokens than the long prompt."""
    ids = tokenizer.encode(text)
    short, other, long = (tokenizer.decode(ids[part]) for part in (slice(40), slice(40, 80), slice(100, 100 + LONG_PROMPT)))
    alone = await answer(engine, short, 2, False)
    forget(engine)
    running = asyncio.create_task(answer(engine, other, 80, False, fresh=False))
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    reading = asyncio.create_task(answer(engine, long, 2, False, fresh=False))
    await asyncio.sleep(0.01)
    beside = await answer(engine, short, 2, False, fresh=False)
    read = await reading
    times = [at for at, _ in (await running).times]
    pauses = [b - a for a, b in pairwise(times) if began < b < began + read.first_ms / 1000]
    return {
        "alone": alone.first_ms,
        "beside_prefill": beside.first_ms,
        "long_prompt": read.first_ms,
        "longest_pause": 1000 * max(pauses, default=float("nan")),
    }


def peers(
    wanted: str, methods: str, groups: dict[str, list[list[str]]], tokens: int, threads: int
) -> dict[str, dict[str, Any]]:
    """Run `peers.py` in every named peer's own Python; what fails says why and is left out."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        asked = {"groups": groups, "methods": methods, "tokens": tokens, "threads": threads, "prompt": PROMPT}
        job.write_text(json.dumps(asked))
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
        table.add_row(rows, f"{ms:.1f}", f"{ms / read:.2f}" if read else "")
    console.print(table)
    table = Table("positions of context", "1 row, ms", "8 rows, ms")
    for length, by_rows in figures["context_ms"].items():
        table.add_row(length, *(f"{ms:.1f}" for ms in by_rows.values()))
    console.print(table)
    console.print(", ".join(f"a prompt of {length}: {ms:.0f} ms" for length, ms in figures["prefill_ms"].items()))


def report(figures: dict[str, Any]) -> None:
    """All tables."""
    if "rows_ms" in figures:
        report_passes(figures)
    if (first := figures.get("first_token_ms")) is not None:
        console.print(
            f"first token of a short request: {first['alone']:.0f} ms, and {first['beside_prefill']:.0f} ms beside a prompt of "
            f"{LONG_PROMPT}, which took {first['long_prompt']:.0f} ms; a stream paused {first['longest_pause']:.0f} ms at most"
        )
    rates = {
        f"draftloom, {way}": {n: both[way] for n, both in figures["concurrency"].items()} for way in ("plain", "speculative")
    }
    levels = sorted({n for by_level in (rates | figures["peers"]).values() for n in by_level}, key=int)
    table = Table("tokens/s at once", *levels)
    for name, by_level in (rates | figures["peers"]).items():
        table.add_row(name, *("" if (value := by_level.get(n)) is None else f"{value:.1f}" for n in levels))
    if levels:
        console.print(table)
        console.print("identical: " + ", ".join(f"{n}: {both['identical']}" for n, both in figures["concurrency"].items()))


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with what is in `new`, in dicts within dicts too."""
    both = old | new
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            both[key] = merged(old[key], new[key])
    return both


async def ask(
    model: str, target: Any, tokenizer: Any, parts: set[str], groups: dict[str, list[list[str]]], text: str, tokens: int
) -> dict[str, Any]:
    """The parts that need an engine."""
    found: dict[str, Any] = {}
    async with indexed_engine(model, target, tokenizer, text[:200]) as engine:
        if "first" in parts:
            found["first_token_ms"] = await first_token(engine, tokenizer, text)
        if "requests" in parts:
            found["concurrency"] = await concurrent(engine, groups, tokens)
    return found


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="int8, float32 or bfloat16")] = "int8",
    threads: Annotated[int | None, typer.Option(help="threads of a pass; by default one per core")] = None,
    parts: Annotated[str, typer.Option(help="comma-separated")] = "passes,first,requests,peers",
    context: Annotated[int, typer.Option(help="positions before the timed rows")] = 200,
    levels: Annotated[str, typer.Option(help="how many requests at once")] = "1,4,8,16",
    alone: Annotated[int, typer.Option(help="how many requests for one at a time")] = 4,
    tokens: Annotated[int, typer.Option(help="new tokens of a request")] = 64,
    peer: Annotated[str, typer.Option(help="comma-separated NAME:PYTHON:MODEL; names in peers.py")] = "",
    peer_levels: Annotated[str, typer.Option(help="how many requests at once of peers; all by default")] = "",
    peer_methods: Annotated[str, typer.Option(help="which of peers' methods; all by default")] = "",
    keep: Annotated[Path | None, typer.Option(help="a file for figures, to which this run adds")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="no peers, fewer rounds")] = False,
) -> None:
    """Measure, print tables, then one line of JSON."""
    chosen = set(parts.split(",")) - ({"peers"} if quick or not peer else set())
    if unknown := chosen - {"passes", "first", "requests", "peers"}:
        raise typer.BadParameter(f"no such part: {unknown.pop()}", param_hint="--parts")
    figures: dict[str, Any] = {"model": model, "dtype": dtype, "concurrency": {}, "peers": {}}
    if keep is not None and keep.exists():
        figures = merged(figures, json.loads(keep.read_text()))
    found: dict[str, Any] = {}
    tokenizer = Tokenizer.load(resolve(model))
    _, _, completions = make_pair("pydantic")
    wanted = [int(level) for level in levels.split(",")]
    texts = prompts(completions, sum(alone if level == 1 else level for level in wanted), "line", tokenizer, PROMPT)
    groups = grouped(texts, wanted, alone)
    if chosen - {"peers"}:
        tokenizer, target = load_target(model, dtype, threads)
        if "passes" in chosen:
            found |= passes(target, context, quick)
        if chosen & {"first", "requests"}:
            found |= asyncio.run(ask(model, target, tokenizer, chosen, groups, "\n".join(texts), tokens))
    if "peers" in chosen:
        asked = {level: groups[level] for level in (peer_levels or levels).split(",")}
        found["peers"] = peers(peer, peer_methods, asked, tokens, threads or torch.get_num_threads())
        prefill = {name: rates.pop("prefill_ms") for name, rates in found["peers"].items() if "prefill_ms" in rates}
        found["peers_prefill_ms"] = prefill
    figures = merged(figures, found)
    if keep is not None:
        keep.write_text(json.dumps(figures))
    report(figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
