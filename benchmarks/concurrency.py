"""Whether speculation ever costs anything: tokens/s of so many clients at once, with drafts and without, taken in turn.

    python benchmarks/concurrency.py --model smollm2-135m
    python benchmarks/concurrency.py --model qwen2.5-coder-1.5b --levels 1,4,16 --tokens 32

Completions of code with a corpus of the prompts' own older release (the pair `pydantic` of complete.py), through the worker in
this process. Every client sends its next request when the last one is answered; tokens/s are all tokens over the time from the
first request to the last answer. Prompts were read before, so that little of that time is reading, and nobody learns from
answers. Each level is run `--rounds` times both ways, in changing order; a ratio is the median of the rounds' ratios. Beside it
stand tokens a step, nodes a step and the share of a client's time that goes into drafting.

Prints a table; the last line is JSON, with the worker's counts.
"""

from __future__ import annotations

import asyncio
import json
import time
from itertools import chain
from statistics import median
from typing import Annotated, Any

import typer
from _common import console, load_target
from complete import make_pair, prompts
from rich.table import Table
from worker import Answer, answer, indexed_engine


async def turn(
    engine: Any, texts: list[str], level: int, requests: int, tokens: int, speculate: bool
) -> tuple[list[Answer], float]:
    """What `level` clients heard, each with `requests` requests one after the other, client by client; and its seconds."""

    async def serve(number: int) -> list[Answer]:
        asked = [texts[(number + i * level) % len(texts)] for i in range(requests)]
        return [await answer(engine, text, tokens, speculate, fresh=False, remembers=False) for text in asked]

    start = time.perf_counter()
    heard = await asyncio.gather(*(serve(number) for number in range(level)))
    return list(chain.from_iterable(heard)), time.perf_counter() - start


async def measure(
    model: str, target: Any, tokenizer: Any, texts: list[str], levels: list[int], requests: int, tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """By level: tokens/s both ways, their ratio, what drafting did, and the share of texts that agree."""
    found: dict[str, dict[str, Any]] = {}
    async with indexed_engine(model, target, tokenizer, texts[0][:200]) as engine:
        for speculate in (False, True):
            await turn(engine, texts, len(texts), 1, 1, speculate)
        for level in levels:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            said: dict[bool, list[Answer]] = {}
            for i in range(rounds):
                for speculate in (i % 2 == 1, i % 2 == 0):
                    said[speculate], took = await turn(engine, texts, level, requests, tokens, speculate)
                    seconds[speculate].append(took)
            num_tokens = sum(len(each.tokens) for each in said[True])
            num_steps = sum(each.statistics.num_steps for each in said[True])
            found[str(level)] = {
                "plain": num_tokens / median(seconds[False]),
                "speculative": num_tokens / median(seconds[True]),
                "ratio": median(off / on for off, on in zip(seconds[False], seconds[True], strict=True)),
                "tokens_per_step": num_tokens / num_steps,
                "nodes_per_step": sum(each.statistics.num_nodes for each in said[True]) / num_steps,
                "draft_share": sum(each.statistics.draft_seconds for each in said[True]) / level / seconds[True][-1],
                "identical": sum(a.tokens == b.tokens for a, b in zip(said[False], said[True], strict=True)) / len(said[True]),
            }
            console.print(f"{level}: {found[str(level)]['ratio']:.2f}")
    return found


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="int8, float32 or bfloat16")] = "int8",
    threads: Annotated[int | None, typer.Option(help="threads of a pass; by default one per core")] = None,
    levels: Annotated[str, typer.Option(help="how many clients at once")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="new tokens of a request")] = 48,
    requests: Annotated[int, typer.Option(help="requests of a client")] = 2,
    prompt: Annotated[int, typer.Option(help="most tokens of a prompt")] = 200,
    rounds: Annotated[int, typer.Option(help="times that each level is run both ways")] = 3,
) -> None:
    """Measure, print a table, then one line of JSON."""
    tokenizer, target = load_target(model, dtype, threads)
    wanted = [int(level) for level in levels.split(",")]
    _, _, completions = make_pair("pydantic")
    texts = prompts(completions, min(requests * max(wanted), 32), "line", tokenizer, prompt)
    found = asyncio.run(measure(model, target, tokenizer, texts, wanted, requests, tokens, rounds))
    table = Table(
        "clients", "plain, tokens/s", "speculative", "ratio", "tokens a step", "nodes a step", "drafting", "identical", box=None
    )
    for level, row in found.items():
        table.add_row(
            level, f"{row['plain']:.1f}", f"{row['speculative']:.1f}", f"{row['ratio']:.2f}", f"{row['tokens_per_step']:.2f}",
            f"{row['nodes_per_step']:.1f}", f"{row['draft_share']:.0%}", f"{row['identical']:.0%}",
        )  # fmt: skip
    console.print(table)
    counts = vars(target.counts)
    print(json.dumps({"model": model, "dtype": dtype, "concurrency": found, "counts": counts}))


if __name__ == "__main__":
    typer.run(main)
