"""Whether speculation ever costs anything: tokens/s of so many requests at once, with drafts and without, taken in turn.

    python benchmarks/concurrency.py --model smollm2-135m
    python benchmarks/concurrency.py --model qwen2.5-coder-1.5b --levels 1,4,16 --tokens 32

Completions of code with a corpus of the prompts' own older release (the pair `pydantic` of complete.py), through the worker in
this process. Each level is run `--rounds` times both ways, in changing order; a ratio is the median of the rounds' ratios.
The clock runs while none is still reading its prompt or done. Prints a table; the last line is JSON, with the worker's counts.
"""

from __future__ import annotations

import asyncio
import json
from statistics import median
from typing import Annotated, Any

import typer
from _common import console, load_target
from complete import make_pair, prompts
from rich.table import Table
from worker import answer, indexed_engine, rate


async def measure(
    model: str, target: Any, tokenizer: Any, texts: list[str], levels: list[int], tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """By level: tokens/s both ways, their ratio, and the share of texts that agree."""
    found: dict[str, dict[str, Any]] = {}
    async with indexed_engine(model, target, tokenizer, texts[0][:200]) as engine:
        for level in levels:
            speeds: dict[bool, list[float]] = {False: [], True: []}
            said: dict[bool, list[list[int]]] = {}
            for turn in range(rounds):
                for speculate in (turn % 2 == 1, turn % 2 == 0):
                    answers = await asyncio.gather(*(answer(engine, text, tokens, speculate) for text in texts[:level]))
                    speeds[speculate].append(rate(answers) or float("nan"))
                    said[speculate] = [each.tokens for each in answers]
            found[str(level)] = {
                "plain": median(speeds[False]),
                "speculative": median(speeds[True]),
                "ratio": median(b / a for a, b in zip(speeds[False], speeds[True], strict=True)),
                "identical": sum(a == b for a, b in zip(said[False], said[True], strict=True)) / level,
            }
            console.print(f"{level}: {found[str(level)]['ratio']:.2f}")
    return found


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="int8, float32 or bfloat16")] = "int8",
    threads: Annotated[int | None, typer.Option(help="threads of a pass; by default one per core")] = None,
    levels: Annotated[str, typer.Option(help="how many requests at once")] = "1,2,4,8,16,32",
    tokens: Annotated[int, typer.Option(help="new tokens of a request")] = 48,
    prompt: Annotated[int, typer.Option(help="most tokens of a prompt")] = 300,
    rounds: Annotated[int, typer.Option(help="times that each level is run both ways")] = 3,
) -> None:
    """Measure, print a table, then one line of JSON."""
    tokenizer, target = load_target(model, dtype, threads)
    wanted = [int(level) for level in levels.split(",")]
    _, _, completions = make_pair("pydantic")
    texts = prompts(completions, max(wanted), "line", tokenizer, prompt)
    found = asyncio.run(measure(model, target, tokenizer, texts, wanted, tokens, rounds))
    table = Table("requests at once", "plain, tokens/s", "speculative", "ratio", "identical")
    for level, row in found.items():
        table.add_row(
            level, f"{row['plain']:.1f}", f"{row['speculative']:.1f}", f"{row['ratio']:.2f}",
            f"{row['identical']:.0%}",
        )  # fmt: skip
    console.print(table)
    counts = vars(target.counts)
    print(json.dumps({"model": model, "dtype": dtype, "concurrency": found, "counts": counts}))


if __name__ == "__main__":
    typer.run(main)
