"""What does a step cost beside its pass, with the worker in this process and in one of its own?

    python benchmarks/remote.py
    python benchmarks/remote.py --model qwen2.5-coder-1.5b --streams 1,8 --beside

Every stream is one sequence: steps with trees of `--nodes` candidates and the feedback that a server asks for, one after the
other, all streams at once, and no engine around them. The overhead of a step is what its caller waited less the seconds of the
pass that the worker reports: packing, two messages, waking up, gathering the trees of the other streams, walking, sampling. In
this process there are no messages; the difference of the two is the price of the boundary, and `--model fake` shows it alone.
`--beside` also times passes while another Python thread of this process, which is the engine's, loops for ever, at the usual
priority and at a low one.

Prints a table; the last line is JSON:
{"overhead_ms": {WHERE: {STREAMS: ms}}, "pass_ms": {WHERE: {STREAMS: ms}}, "beside_ms": {WHERE: {"quiet", "looping", "low"}}}
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from engine.acceptance import Limits, SamplingParams
from engine.target import SequenceRequest, Target
from engine.target.fake import FakeTarget
from engine.target.process import start_worker
from engine.tree import CandidateTree

IN_PROCESS, OWN_PROCESS = "in process", "own process"
FAKE = "fake"
"""A model without weights, whose passes take no time of their own: what is left is the boundary."""
TOP_K = 8
"""Likeliest next tokens heard for every verified node."""


@dataclass
class Timing:
    """Milliseconds of every step: what its caller waited, and its pass."""

    waited: list[float]
    passes: list[float]
    tokens_per_second: float = 0.0

    @property
    def overhead(self) -> float:
        return median(waited - took for waited, took in zip(self.waited, self.passes, strict=True))

    def row(self, name: str) -> tuple[str, ...]:
        """The cells of the table behind the first."""
        milliseconds = (median(self.waited), median(self.passes), self.overhead)
        return name, *(f"{number:.2f}" for number in milliseconds), f"{self.tokens_per_second:.0f}"


async def stream(target: Target, number: int, steps: int, nodes: int, timing: Timing) -> None:
    """One sequence, its candidates drawn at random."""
    random = np.random.default_rng(number)
    prompt = random.integers(0, target.info.vocab_size, 200).astype(np.int32)
    drawn = np.stack([random.choice(target.info.vocab_size, nodes + 1, replace=False) for _ in range(steps)]).astype(np.int32)
    shape = (
        np.maximum(np.arange(nodes + 1, dtype=np.int32) // 2 - 1, -1 + (np.arange(nodes + 1) > 0)).astype(np.int32),
        np.concatenate(([1], np.linspace(0.9, 0.5, nodes))).astype(np.float32),
        np.concatenate(([0], np.ones(nodes, np.int64))),
        np.zeros(nodes + 1, np.uint8),
    )
    limits = Limits(4 * steps + 16)
    request = SequenceRequest(prompt, SamplingParams(), limits, "default", feedback_top_k=TOP_K, feedback_prompt=0)
    async with target.open(request) as sequence:
        root, position = int(prompt[-1]), len(prompt) - 1
        for tokens in drawn:
            tokens[0] = root
            tree = CandidateTree(tokens, *shape, position)
            start = time.perf_counter()
            result = await sequence.step(tree)
            timing.waited.append(1000 * (time.perf_counter() - start))
            timing.passes.append(1000 * result.seconds)
            root, position = int(result.tokens[-1]), position + len(result.tokens)


async def measure(target: Target, streams: int, steps: int, nodes: int) -> Timing:
    """All streams at once; the first few steps are left out."""
    await asyncio.gather(*(stream(target, i, 4, nodes, Timing([], [])) for i in range(streams)))
    timing = Timing([], [])
    start = time.perf_counter()
    await asyncio.gather(*(stream(target, i, steps, nodes, timing) for i in range(streams)))
    timing.tokens_per_second = streams * steps / (time.perf_counter() - start)
    return timing


@asynccontextmanager
async def in_process(model: str) -> AsyncIterator[Target]:
    if model == FAKE:
        yield FakeTarget(64)
        return
    from engine.target.local import LocalTarget

    target = LocalTarget.load(model)
    yield target
    await target.close()


@asynccontextmanager
async def own_process(model: str) -> AsyncIterator[Target]:
    worker = await start_worker(["--fake"] if model == FAKE else ["--model", model])
    yield worker.target
    await worker.close()


@contextmanager
def looping(nice: int) -> Iterator[None]:
    """A source that never ends, on a thread of this process; `nice` lowers its priority."""
    ended = threading.Event()

    def loop() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        while not ended.is_set():
            sum(range(100))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def run(model: str, streams: list[int], steps: int, nodes: int, beside: bool, table: Table) -> dict[str, object]:
    overheads: dict[str, dict[str, float]] = {}
    passes: dict[str, dict[str, float]] = {}
    besides: dict[str, dict[str, float]] = {}
    for where, opening in ((OWN_PROCESS, own_process), (IN_PROCESS, in_process)):
        async with opening(model) as target:
            timings = {n: await measure(target, n, steps, nodes) for n in streams}
            overheads[where] = {str(n): round(timing.overhead, 3) for n, timing in timings.items()}
            passes[where] = {str(n): round(median(timing.passes), 2) for n, timing in timings.items()}
            for n, timing in timings.items():
                table.add_row(where, *timing.row(str(n)))
            if beside:
                quiet = await measure(target, 1, 20, nodes)
                with looping(0):
                    loud = await measure(target, 1, 20, nodes)
                with looping(10):
                    low = await measure(target, 1, 20, nodes)
                besides[where] = {}
                for name, timing in (("quiet", quiet), ("looping", loud), ("low", low)):
                    besides[where][name] = round(median(timing.passes), 2)
                    table.add_row(where, *timing.row(f"1, {name}"))
    return {"model": model, "overhead_ms": overheads, "pass_ms": passes, "beside_ms": besides}


def main(
    model: Annotated[str, typer.Option(help="The model.")] = "smollm2-135m",
    streams: Annotated[str, typer.Option(help="How many sequences at once, comma-separated.")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(help="Steps of every sequence.")] = 40,
    nodes: Annotated[int, typer.Option(help="Candidates of a tree; the worker cuts them to what pays.")] = 6,
    beside: Annotated[bool, typer.Option(help="Also time passes beside a thread that loops for ever.")] = False,
) -> None:
    """Print the table."""
    table = Table(box=None, header_style="bold")
    table.add_column("worker")
    for header in ("streams", "waited ms", "pass ms", "overhead ms", "tokens/s"):
        table.add_column(header, justify="right")
    figures = asyncio.run(run(model, [int(n) for n in streams.split(",")], steps, nodes, beside, table))
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
