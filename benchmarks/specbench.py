"""How much faster is chat? Spec-Bench's questions through the model's chat template: plain decoding and Draftloom in turns.

    python benchmarks/specbench.py --model qwen2.5-coder-1.5b --n 8
    python benchmarks/specbench.py --n 2 --temperatures 0 --sources prompt,recycle --nodes 8

Spec-Bench (Xia et al., arXiv 2401.07851) has 80 questions in each of six categories. `--n` of each are taken, chosen by the
hash of their ids, and of those with two turns the first. They come from the evaluation data (DRAFTLOOM_DATA, or ../shared/data
beside the repository); without it there is nothing to run, and the script says so.

One process, one copy of the weights, no corpus and no trained drafter. Every question is answered once in each mode, the modes
in turns; Draftloom begins every temperature with nothing learned and learns from question to question, as a server does.
Above temperature 0 both modes get the same seed. An answer ends where the model ends it, at the latest after `--max-tokens`.

"speed-up" is the median of the questions' ratios of tokens/s in decoding, drafting included; "overall" is the geometric mean of
the categories' medians at the first temperature. Prints a table for each temperature; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import typer
from _common import AUTO, PLAIN, Mode, console, data_folder, load_target, make_engine, price, run, turns
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.acceptance import SamplingParams
from engine.app import Engine
from engine.requests import GenerationRequest, SpeculationOptions
from engine.text import Tokenizer

CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
OURS = "draftloom"


@dataclass(frozen=True)
class Question:
    """A question of one category; `seed` is the same in every mode and run."""

    category: str
    text: str
    seed: int


def questions(n: int) -> list[Question]:
    """`n` of each category, category by category. Ends the program, with the reason, where the data is not there."""
    path = data_folder() / "prompts" / "spec_bench.jsonl.gz"
    if not path.exists():
        sys.exit(f"nothing to run: {path} is not there; set DRAFTLOOM_DATA to the folder of the evaluation data")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    records.sort(key=lambda record: hashlib.sha256(record["id"].encode()).hexdigest())
    chosen = []
    for category in CATEGORIES:
        found = [record for record in records if record["category"] == category][:n]
        chosen += [Question(category, record["turns"][0], seed) for seed, record in enumerate(found, start=1)]
    return chosen


def request_for(
    question: Question, tokenizer: Tokenizer, temperature: float, max_tokens: int, speculate: bool
) -> GenerationRequest:
    """What a chat client would ask."""
    return GenerationRequest(
        tenant="default",
        prompt=tokenizer.encode_chat([{"role": "user", "content": question.text}]),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=temperature, seed=question.seed),
        speculation=SpeculationOptions(enabled=speculate, corpora=()),
    )


async def compare(
    asked: list[Question], temperature: float, engines: dict[str, Engine], target: Any, max_tokens: int, nodes: str
) -> dict[str, dict[str, Mode]]:
    """Answer every question in every mode: category -> mode -> its runs."""
    modes = {category: {name: Mode(name) for name in engines} for category in CATEGORIES}
    for i, question in enumerate(track(asked, f"temperature {temperature:g}", console=console)):
        for name in turns(list(engines), i):
            engine = engines[name]
            price(target, nodes if name == OURS else PLAIN)
            request = request_for(question, engine.tokenizer, temperature, max_tokens, name == OURS)
            modes[question.category][name].runs.append(await run(engine, request))
    return modes


def figures(modes: dict[str, Mode]) -> dict[str, Any]:
    """The numbers of one category at one temperature."""
    plain, ours = modes[PLAIN], modes[OURS]
    return {
        "speedup": round(ours.speedup(plain), 3),
        "tokens_per_step": round(ours.tokens_per_step, 3),
        "identical": ours.num_identical(plain) == len(plain.runs),
        "total_speedup": round(ours.total_speedup(plain), 3),
        "plain_tokens_per_second": round(plain.tokens_per_second, 2),
        "draftloom_tokens_per_second": round(ours.tokens_per_second, 2),
        "nodes_per_step": round(ours.nodes_per_step, 2),
        "draft_time_share": round(ours.draft_time_share, 4),
        "num_prompts": len(plain.runs),
        "num_tokens": sum(len(each.tokens) for each in plain.runs),
    }


COLUMNS = {
    "plain tokens/s": ("plain_tokens_per_second", ".1f"),
    "tokens/s": ("draftloom_tokens_per_second", ".1f"),
    "speed-up": ("speedup", ".2f"),
    "total": ("total_speedup", ".2f"),
    "tokens/step": ("tokens_per_step", ".2f"),
    "nodes/step": ("nodes_per_step", ".1f"),
    "draft share": ("draft_time_share", ".1%"),
    "tokens": ("num_tokens", "d"),
}


def show(temperature: float, by_category: dict[str, dict[str, Any]], modes: dict[str, dict[str, Mode]]) -> None:
    """Print the table of one temperature."""
    table = Table(title=f"temperature {temperature:g}")
    table.add_column("category")
    for column in (*COLUMNS, "identical"):
        table.add_column(column, justify="right")
    table.add_column("by source")
    for category, numbers in by_category.items():
        ours, plain = modes[category][OURS], modes[category][PLAIN]
        cells = [format(numbers[key], form) for key, form in COLUMNS.values()]
        table.add_row(category, *cells, f"{ours.num_identical(plain)}/{len(plain.runs)}", ours.by_source())
    overall = geometric_mean(numbers["speedup"] for numbers in by_category.values())
    table.add_row("overall", "", "", f"{overall:.2f}", *[""] * (len(COLUMNS) - 1))
    Console(width=max(console.width, 150)).print(table)


async def measure(
    model: str, dtype: str, threads: int | None, n: int, max_tokens: int, temperatures: list[float], sources: str, nodes: str
) -> dict[str, Any]:
    """Everything; returns what the last line says."""
    asked = questions(n)
    tokenizer, target = load_target(model, dtype, threads)
    names = tuple(sources.split(",")) if sources else None
    categories: dict[str, dict[str, Any]] = {category: {} for category in CATEGORIES}
    for temperature in temperatures:
        with tempfile.TemporaryDirectory() as store:
            folder = Path(store)
            warm = make_engine(model, target, tokenizer, folder, nodes=nodes, sources=names)
            await run(warm, request_for(Question("", "Say yes, yes, yes.", 1), tokenizer, temperature, 16, True))
            ours = make_engine(model, target, tokenizer, folder, nodes=nodes, sources=names)
            engines = {PLAIN: make_engine(model, target, tokenizer, folder), OURS: ours}
            modes = await compare(asked, temperature, engines, target, max_tokens, nodes)
            for engine in (warm, *engines.values()):
                await engine.close()
        by_category = {category: figures(modes[category]) for category in CATEGORIES}
        show(temperature, by_category, modes)
        for category, numbers in by_category.items():
            categories[category][format(temperature, "g")] = numbers
    await target.close()
    first = format(temperatures[0], "g")
    overall = geometric_mean(by_temperature[first]["speedup"] for by_temperature in categories.values())
    settings = {"model": model, "dtype": dtype, "sources": sources or "default", "nodes": nodes, "max_tokens": max_tokens}
    return {"categories": categories, "overall_speedup": round(overall, 3), **settings}


def main(
    model: Annotated[str, typer.Option("--model", help="A model name, folder or file.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option("--dtype", help="int8, float32 or bfloat16.")] = "int8",
    n: Annotated[int, typer.Option("--n", help="Questions of each category.", min=1, max=80)] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most new tokens of an answer.", min=1)] = 96,
    temperatures: Annotated[str, typer.Option("--temperatures", help="Comma-separated; the first is the overall one.")] = "0,1",
    sources: Annotated[str, typer.Option("--sources", help="Comma-separated names. [default: what a server has]")] = "",
    nodes: Annotated[str, typer.Option("--nodes", help="A fixed number of candidates, or auto: what pays.")] = AUTO,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads of a pass.")] = None,
) -> None:
    """Answer Spec-Bench's questions, plain and with Draftloom in turns, and compare."""
    if nodes != AUTO and not nodes.isdigit():
        raise typer.BadParameter(f"neither {AUTO} nor a number: {nodes}", param_hint="--nodes")
    try:
        chosen = [float(each) for each in temperatures.split(",")]
    except ValueError:
        raise typer.BadParameter(f"not numbers with commas between: {temperatures}", param_hint="--temperatures") from None
    result = asyncio.run(measure(model, dtype, threads, n, max_tokens, chosen, sources, nodes))
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
