"""What a tenant's history costs: memory for each token, and microseconds to look up, to append and to credit, by its size.

    python benchmarks/history.py
    python benchmarks/history.py --tokens 10000,100000 --queries 500

Answers are made of phrases, so that they repeat one another as those of a service do: a phrase is 3 to 30 tokens, the likeliest
phrases are said thousands of times. Queries are the ends of a further answer as it grows. The last line printed is JSON. What
history gains is in `replay.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

Tokens = NDArray[np.int32]

VOCAB = 50_000
NUM_PHRASES = 5_000


def answers(seed: int) -> Iterator[Tokens]:
    """Answers of 20 to 400 tokens, for ever."""
    rng = np.random.default_rng(seed)
    phrases = [rng.zipf(1.3, size).clip(0, VOCAB - 1).astype(np.int32) for size in rng.integers(3, 30, NUM_PHRASES)]
    while True:
        size, parts = int(rng.integers(20, 400)), []
        while sum(map(len, parts)) < size:
            parts.append(phrases[min(int(rng.zipf(1.2)), NUM_PHRASES) - 1])
        yield np.concatenate(parts)[:size]


def microseconds(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {name: round(1e6 * float(np.percentile(seconds, q)), 1) for name, q in (("p50", 50), ("p99", 99))}


def measure(num_tokens: int, num_queries: int, budget: int) -> dict[str, object]:
    """A pool of so many tokens, and what it takes."""
    from retriever.history import HistoryPool

    pool, source = HistoryPool(1 << 32), answers(1)
    began = time.perf_counter()
    while pool.num_tokens < num_tokens:
        document = pool.begin()
        pool.append(document, next(source))
        pool.close(document)
    filled = time.perf_counter() - began
    lookups, appends, credits = list[float](), list[float](), list[float]()
    document = pool.begin()
    said = np.concatenate([next(source) for _ in range(1 + num_queries // 20)])[: 2 * num_queries]
    for at in range(0, len(said), 2):
        context, emitted = said[max(at - 32, 0) : at], said[at : at + 2]
        times = [time.perf_counter()]
        pool.lookup(context, budget)
        times.append(time.perf_counter())
        pool.credit(context, emitted, but=document)
        times.append(time.perf_counter())
        pool.append(document, emitted)
        times.append(time.perf_counter())
        for spent, seconds in zip((lookups, credits, appends), np.diff(times).tolist(), strict=True):
            spent.append(seconds)
    began = time.perf_counter()
    saved = pool.arrays()
    copied = time.perf_counter() - began
    return {
        "documents": len(pool),
        "bytes_per_token": round(pool.num_bytes / pool.num_tokens, 1),
        "bytes_per_token_on_disk": round(sum(array.nbytes for array in saved.values()) / pool.num_tokens, 1),
        "fill_us_per_token": round(1e6 * filled / num_tokens, 2),
        "lookup_us": microseconds(lookups),
        "credit_us": microseconds(credits),
        "append_us": microseconds(appends),
        "copy_ms": round(1e3 * copied, 1),
    }


def main(
    tokens: Annotated[str, typer.Option(help="Comma-separated sizes, in tokens.")] = "1000,10000,100000,1000000",
    queries: Annotated[int, typer.Option(help="Steps measured at each size.")] = 2000,
    budget: Annotated[int, typer.Option(help="Nodes of a draft.")] = 32,
) -> None:
    """Print a table, then one line of JSON."""
    from retriever.history import kernels

    kernels.warmup()
    measured = {size: measure(size, queries, budget) for size in map(int, tokens.split(","))}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in (
        "tokens",
        "answers",
        "B/token",
        "on disk",
        "lookup us",
        "credit us",
        "append us",
        "fill us/token",
        "copy ms",
    ):
        table.add_column(header, justify="right")
    for size, row in measured.items():
        spans = (f"{row[name]['p50']} - {row[name]['p99']}" for name in ("lookup_us", "credit_us", "append_us"))  # type: ignore[index]
        sizes = (f"{size:,}", f"{row['documents']:,}", f"{row['bytes_per_token']}", f"{row['bytes_per_token_on_disk']}")
        table.add_row(*sizes, *spans, f"{row['fill_us_per_token']}", f"{row['copy_ms']}")
    Console(stderr=True, highlight=False).print(table)
    print(json.dumps(measured))


if __name__ == "__main__":
    typer.run(main)
