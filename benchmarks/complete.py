"""Index the older release of a package, complete what came later: plain decoding and Draftloom in turns, in one process.

    python benchmarks/complete.py --pair pydantic --pair django-docs --model qwen2.5-coder-1.5b --n 24
    python benchmarks/complete.py --pair FOLDER,COMPLETIONS.jsonl --nodes auto,4,8,16

A pair is a folder to index and a file of completions, one JSON object a line with `prefix`, `added` and `id`. The names
pydantic, django-docs and django make theirs with release_pairs.py from the evaluation data (DRAFTLOOM_DATA, or ../shared/data
beside the repository). Prompts are raw prefixes; every prompt runs once in every mode, the order turning from prompt to prompt.
tokens/s counts decoding only, drafting included; the time to the first token and the end-to-end speed-up stand beside it. The
speed-up is the median of the prompts' ratios, "total" the ratio of all decoding time; tokens/step is over all steps, "by
prompt" the mean of the prompts' own.

`--nodes` lists the most candidates of a tree: a number fixes it, whatever the cost curve says; `auto` is what a server does.
The first one listed is the main figure. Prints a table for each pair; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from _common import PLAIN, Mode, Run, console, data_folder, load_target, make_engine, price, run, turns
from rich.console import Console
from rich.progress import track
from rich.table import Table

from corpora.build import build
from corpora.catalog import Catalog
from engine.acceptance import SamplingParams
from engine.app import Engine
from engine.requests import GenerationRequest, SpeculationOptions
from engine.text import Tokenizer

PAIRS = {
    "pydantic": ("pydantic", "2.11.5", "2.13.4"),
    "django-docs": ("django", "4.2", "5.2", "--only", "docs"),
    "django": ("django", "4.2", "5.2", "--only", "code"),
}


@functools.cache
def make_pair(name: str) -> tuple[str, Path, Path]:
    """(label, folder to index, completions) of a named pair or of FOLDER,COMPLETIONS."""
    if name not in PAIRS:
        folder, _, completions = name.partition(",")
        if not completions:
            sys.exit(f"no such pair: {name}; name one of {', '.join(PAIRS)}, or give FOLDER,COMPLETIONS.jsonl")
        return Path(folder).name, Path(folder), Path(completions)
    data = data_folder()
    if not (data / "release_pairs.py").exists():
        sys.exit(f"release_pairs.py is not in {data}: set DRAFTLOOM_DATA, or give FOLDER,COMPLETIONS.jsonl")
    out = Path(tempfile.gettempdir()) / f"draftloom-pair-{name}"
    command = [sys.executable, str(data / "release_pairs.py"), *PAIRS[name], "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return name, out / "index_this", out / "completions.jsonl"


def prompts(path: Path, num: int, cut: str, tokenizer: Tokenizer, most: int) -> list[str]:
    """`num` prefixes, chosen by hash of their id; with `cut` "word" each ends in the middle of the next word."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if len(record["prefix"]) >= 200]
    records.sort(key=lambda record: hashlib.sha256(record["id"].encode()).hexdigest())
    chosen = []
    for record in records[:num]:
        text = record["prefix"]
        if cut == "word" and (word := re.search(r"[^\W\d_]{3,}", record["added"])):
            text += record["added"][: (word.start() + word.end()) // 2]
        ids = tokenizer.encode(text)
        chosen.append(text if len(ids) <= most else tokenizer.decode(ids[-most:]))
    return chosen


async def complete(engine: Engine, prompt: str, args: argparse.Namespace, speculate: bool) -> Run:
    """One completion."""
    request = GenerationRequest(
        tenant="default",
        prompt=prompt,
        max_tokens=args.tokens,
        sampling=SamplingParams(temperature=args.temperature, seed=1),
        ignore_eos=True,
        speculation=SpeculationOptions(enabled=speculate, corpora=("bench",) if speculate else ()),
    )
    return await run(engine, request)


async def compare(name: str, args: argparse.Namespace, target: object, tokenizer: Tokenizer, store: Path) -> dict[str, object]:
    """Run one pair, print its table, return its figures."""
    label, folder, completions = make_pair(name)
    build("bench", [folder], tokenizer, Catalog(store))
    texts = prompts(completions, args.n, args.cut, tokenizer, target.info.context_length - args.tokens - 1)
    settings = args.nodes.split(",")
    modes = {nodes: Mode(nodes) for nodes in [PLAIN, *settings]}
    engines = {nodes: make_engine(args.model, target, tokenizer, store, nodes=nodes) for nodes in modes}
    names = list(modes)
    for i, prompt in enumerate(track(texts, f"{label}: {len(names)} modes", console=console)):
        for nodes in turns(names, i):
            price(target, nodes)
            modes[nodes].runs.append(await complete(engines[nodes], prompt, args, nodes != PLAIN))
    for engine in engines.values():
        await engine.close()
    return report(label, modes, settings[0])


def figures(mode: Mode, plain: Mode) -> dict[str, object]:
    """The numbers of one mode beside plain decoding."""
    return {
        "tokens_per_second": round(mode.tokens_per_second, 2),
        "speedup": round(mode.speedup(plain), 3),
        "total_speedup": round(mode.total_speedup(plain), 3),
        "end_to_end_speedup": round(mode.end_to_end(plain), 3),
        "first_token_seconds": round(median(run.first for run in mode.runs), 3),
        "tokens_per_step": round(mode.tokens_per_step, 3),
        "mean_tokens_per_step": round(mode.mean_tokens_per_step, 3),
        "nodes_per_step": round(mode.nodes_per_step, 2),
        "draft_time_share": round(mode.draft_time_share, 4),
        "identical": mode.num_identical(plain) == len(mode.runs),
    }


COLUMNS = {
    "tokens/s": ("tokens_per_second", ".1f"),
    "speed-up": ("speedup", ".2f"),
    "total": ("total_speedup", ".2f"),
    "end to end": ("end_to_end_speedup", ".2f"),
    "first token s": ("first_token_seconds", ".2f"),
    "tokens/step": ("tokens_per_step", ".2f"),
    "by prompt": ("mean_tokens_per_step", ".2f"),
    "nodes/step": ("nodes_per_step", ".1f"),
    "draft share": ("draft_time_share", ".1%"),
}


def report(label: str, modes: dict[str, Mode], main: str) -> dict[str, object]:
    """Print the table of a pair; return its figures, which are those of the mode `main`."""
    plain = modes[PLAIN]
    by_nodes = {mode.name: figures(mode, plain) for mode in modes.values()}
    table = Table(title=f"{label}: {len(plain.runs)} prompts")
    for column in ("nodes", *COLUMNS, "identical"):
        table.add_column(column, justify="right")
    table.add_column("by source")
    for mode in modes.values():
        cells = [format(by_nodes[mode.name][key], form) for key, form in COLUMNS.values()]
        table.add_row(mode.name, *cells, f"{mode.num_identical(plain)}/{len(mode.runs)}", mode.by_source())
    Console(width=max(console.width, 150)).print(table)
    chosen = by_nodes[main]
    speeds = {
        "plain_tokens_per_second": by_nodes[PLAIN]["tokens_per_second"],
        "draftloom_tokens_per_second": chosen["tokens_per_second"],
    }
    return {**speeds, **chosen, "by_nodes": by_nodes}


async def main(args: argparse.Namespace) -> None:
    """Load the model once, run every pair."""
    tokenizer, target = load_target(args.model, args.dtype, args.threads)
    pairs = {}
    for name in args.pair or ["pydantic", "django-docs"]:
        with tempfile.TemporaryDirectory() as store:
            pairs[name.partition(",")[0]] = await compare(name, args, target, tokenizer, Path(store))
    await target.close()
    print(json.dumps({"model": args.model, "dtype": args.dtype, "temperature": args.temperature, "pairs": pairs}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", help=f"{', '.join(PAIRS)}, or FOLDER,COMPLETIONS.jsonl; may be repeated")
    parser.add_argument("--model", default="smollm2-135m", help="a model name, folder or file (default: %(default)s)")
    parser.add_argument("--dtype", default="int8", help="int8, float32 or bfloat16 (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--n", type=int, default=24, help="prompts of a pair (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a completion (default: %(default)s)")
    parser.add_argument("--nodes", default="auto", help="comma-separated: auto, or a fixed number (default: %(default)s)")
    parser.add_argument("--cut", choices=("line", "word"), default="line", help="where the prefix ends (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of a pass (default: one per core)")
    asyncio.run(main(parser.parse_args()))
