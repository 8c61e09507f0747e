"""Whether speculation ever costs anything: tokens/s of so many clients at once, with drafts and without, taken in turn.

    python benchmarks/concurrency.py --model smollm2-135m
    python benchmarks/concurrency.py --model smollm2-135m --own-process
    python benchmarks/concurrency.py --model qwen2.5-coder-1.5b --levels 1,4,16 --tokens 32

Completions of code with a corpus of the prompts' own older release (the pair `pydantic` of complete.py), through the worker in
this process, or in one of its own, as `draftloom serve` has it. Clients take their requests out of one queue, the next one when
the last is answered. Prompts were read before, so that little time is reading, and nobody learns from answers. Each level is
run `--rounds` times both ways, in changing order; a ratio is the median of the rounds' ratios.

Tokens/s are those of the time in which all clients are busy: from when each has its first token until the first of them finds
the queue empty. Answers with drafts end at different times, and the slowest then runs alone in passes that cost it nearly as
much as all: `to the end` has that time in it, and stands for one batch of requests with nobody behind it. Beside them stand
tokens a step, nodes a step and the share of the whole time in which the engine drafts for somebody.

Prints a table; the last line is JSON, with the worker's counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import typer
from _common import console, load_target
from complete import make_pair, prompts
from rich.table import Table
from worker import Answer, answer, indexed_engine

from engine.app import warm_kernels
from engine.models import resolve
from engine.target.process import start_worker
from engine.text import Tokenizer


@dataclass
class Turn:
    """Answers to all texts, in their order, and how long they took; tokens/s while all clients were busy, and of all of it."""

    answers: list[Answer]
    seconds: float
    busy: float
    to_the_end: float


async def turn(engine: Any, texts: list[str], level: int, tokens: int, speculate: bool) -> Turn:
    """`level` clients that ask for the completion of all texts together, each text once."""
    queue, answers = deque(enumerate(texts)), dict[int, Answer]()
    firsts, lasts = list[float](), list[float]()

    async def serve() -> None:
        own = list[Answer]()
        while queue:
            place, text = queue.popleft()
            own.append(await answer(engine, text, tokens, speculate, fresh=False, remembers=False))
            answers[place] = own[-1]
        firsts.append(own[0].times[0][0])
        lasts.append(own[-1].times[-1][0])

    start = time.perf_counter()
    await asyncio.gather(*(serve() for _ in range(level)))
    begin, end = max(firsts), min(lasts)
    num_busy = sum(count for each in answers.values() for at, count in each.times if begin < at <= end)
    num_all = sum(len(each.tokens) for each in answers.values())
    seconds = max(lasts) - start
    return Turn([answers[place] for place in range(len(texts))], seconds, num_busy / (end - begin), num_all / seconds)


async def measure(
    model: str, target: Any, tokenizer: Any, texts: list[str], levels: list[int], requests: int, tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """By level: tokens/s both ways, their ratios, what drafting did, and the share of texts that agree."""
    found: dict[str, dict[str, Any]] = {}
    async with indexed_engine(model, target, tokenizer, texts[0][:200]) as engine:
        for speculate in (False, True):
            await turn(engine, texts, len(texts), 1, speculate)
        for level in levels:
            asked = [texts[i % len(texts)] for i in range(level * requests)]
            plain, speculative = list[Turn](), list[Turn]()
            for i in range(rounds):
                for speculate in (i % 2 == 1, i % 2 == 0):
                    (speculative if speculate else plain).append(await turn(engine, asked, level, tokens, speculate))
            said = speculative[-1].answers
            num_tokens = sum(len(each.tokens) for each in said)
            num_steps = sum(each.statistics.num_steps for each in said)
            found[str(level)] = {
                "plain": median(each.busy for each in plain),
                "speculative": median(each.busy for each in speculative),
                "ratio": median(on.busy / off.busy for off, on in zip(plain, speculative, strict=True)),
                "to_the_end": median(on.to_the_end / off.to_the_end for off, on in zip(plain, speculative, strict=True)),
                "tokens_per_step": num_tokens / num_steps,
                "nodes_per_step": sum(each.statistics.num_nodes for each in said) / num_steps,
                "draft_share": sum(each.statistics.draft_seconds for each in said) / speculative[-1].seconds,
                "identical": sum(a.tokens == b.tokens for a, b in zip(plain[-1].answers, said, strict=True)) / len(said),
            }
            console.print(f"{level}: {found[str(level)]['ratio']:.2f}")
    return found


@asynccontextmanager
async def opened(model: str, dtype: str, threads: int | None, own_process: bool) -> AsyncIterator[tuple[Tokenizer, Any]]:
    """A tokenizer and a target, in this process or in one of its own."""
    if not own_process:
        yield load_target(model, dtype, threads)
        return
    warm_kernels()
    arguments = ["--model", model, "--dtype", dtype, *([] if threads is None else ["--threads", str(threads)])]
    worker = await start_worker(arguments)
    try:
        yield Tokenizer.load(resolve(model)), worker.target
    finally:
        await worker.close()


async def run(
    model: str,
    dtype: str,
    threads: int | None,
    own_process: bool,
    levels: list[int],
    requests: int,
    tokens: int,
    prompt: int,
    rounds: int,
) -> dict[str, Any]:
    """All figures."""
    async with opened(model, dtype, threads, own_process) as (tokenizer, target):
        _, _, completions = make_pair("pydantic")
        texts = prompts(completions, min(requests * max(levels), 32), "line", tokenizer, prompt)
        found = await measure(model, target, tokenizer, texts, levels, requests, tokens, rounds)
        return {"model": model, "dtype": dtype, "concurrency": found, "counts": vars(await target.status())}


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="int8, float32 or bfloat16")] = "int8",
    threads: Annotated[int | None, typer.Option(help="threads of a pass; by default one per core")] = None,
    own_process: Annotated[bool, typer.Option("--own-process", help="with the worker in a process of its own")] = False,
    levels: Annotated[str, typer.Option(help="how many clients at once")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="new tokens of a request")] = 64,
    requests: Annotated[int, typer.Option(help="requests for each client, out of one queue")] = 3,
    prompt: Annotated[int, typer.Option(help="most tokens of a prompt")] = 200,
    rounds: Annotated[int, typer.Option(help="times that each level is run both ways")] = 2,
) -> None:
    """Measure, print a table, then one line of JSON."""
    wanted = [int(level) for level in levels.split(",")]
    figures = asyncio.run(run(model, dtype, threads, own_process, wanted, requests, tokens, prompt, rounds))
    table = Table(
        "clients", "plain", "drafts", "ratio", "to the end", "tokens/step", "nodes/step", "drafting", "same", box=None,
    )  # fmt: skip
    for level, row in figures["concurrency"].items():
        table.add_row(
            level, f"{row['plain']:.1f}", f"{row['speculative']:.1f}", f"{row['ratio']:.2f}", f"{row['to_the_end']:.2f}",
            f"{row['tokens_per_step']:.2f}", f"{row['nodes_per_step']:.1f}", f"{row['draft_share']:.0%}",
            f"{row['identical']:.0%}",
        )  # fmt: skip
    console.print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
