"""What benchmarks with a real model share: a target in this process, engines over it, a request's run, the figures of many."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from engine.app import Engine, warm_kernels
from engine.config import Config, CorporaSettings, MemorySettings, ModelSettings, SpeculationSettings
from engine.models import resolve
from engine.requests import Chunk, Final, GenerationRequest
from engine.text import Tokenizer
from engine.tree import CostCurve

PLAIN = "plain"
AUTO = "auto"
"""As many candidates as the cost curve makes worth while: what a server does."""

console = Console(stderr=True)


@dataclass
class Run:
    """One request: its tokens, seconds of decoding (drafting included), to the first token and in all."""

    tokens: tuple[int, ...]
    decode: float
    first: float
    total: float
    final: Final
    sources: Counter[str]


@dataclass
class Mode:
    """Runs of one mode, in the order of the prompts."""

    name: str
    runs: list[Run] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(run.tokens) for run in self.runs) / sum(run.decode for run in self.runs)

    @property
    def tokens_per_step(self) -> float:
        return sum(len(run.tokens) for run in self.runs) / sum(run.final.statistics.num_steps for run in self.runs)

    @property
    def mean_tokens_per_step(self) -> float:
        """The mean over prompts, in which easy prompts weigh as much as hard ones; `tokens_per_step` is the mean over steps."""
        return sum(len(run.tokens) / run.final.statistics.num_steps for run in self.runs) / len(self.runs)

    @property
    def nodes_per_step(self) -> float:
        steps = sum(run.final.statistics.num_steps for run in self.runs)
        return sum(run.final.statistics.num_nodes for run in self.runs) / steps

    @property
    def draft_time_share(self) -> float:
        return sum(run.final.statistics.draft_seconds for run in self.runs) / sum(run.decode for run in self.runs)

    def speedup(self, plain: Mode) -> float:
        """Median of the per-prompt ratios of tokens/s in decoding."""
        return median(b.decode / len(b.tokens) * len(a.tokens) / a.decode for a, b in zip(self.runs, plain.runs, strict=True))

    def total_speedup(self, plain: Mode) -> float:
        """Ratio of all decoding time."""
        return self.tokens_per_second / plain.tokens_per_second

    def end_to_end(self, plain: Mode) -> float:
        """Median of the per-prompt ratios of the whole request's time."""
        return median(b.total / a.total for a, b in zip(self.runs, plain.runs, strict=True))

    def num_identical(self, plain: Mode) -> int:
        """How many prompts have the tokens that plain decoding gave them."""
        return sum(a.tokens == b.tokens for a, b in zip(self.runs, plain.runs, strict=True))

    def by_source(self) -> str:
        """Which source drafted what share of the tokens, in words; shares overlap where several did."""
        shares: Counter[str] = Counter()
        for sources, count in sum((run.sources for run in self.runs), Counter[str]()).items():
            shares.update(dict.fromkeys(sources.split(" and "), count))
        num_tokens = sum(len(run.tokens) for run in self.runs)
        return ", ".join(f"{source} {count / num_tokens:.0%}" for source, count in shares.most_common())


def data_folder() -> Path:
    """The evaluation data: DRAFTLOOM_DATA, else ../shared/data beside the repository. It may not be there."""
    return Path(os.environ.get("DRAFTLOOM_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


def load_target(model: str, dtype: str, threads: int | None) -> tuple[Tokenizer, Any]:
    """The model, loaded once for all engines; says what its passes cost. Compiles what drafting runs, too."""
    from engine.target.local import LocalTarget

    tokenizer = Tokenizer.load(resolve(model))
    with console.status(f"loading {model} as {dtype}"):
        target = LocalTarget.load(model, dtype=dtype, threads=threads)
        warm_kernels()
    curve = target.curve
    points = ", ".join(f"{rows}: {1000 * seconds:.1f}" for rows, seconds in zip(curve.rows, curve.seconds, strict=True))
    console.print(f"ms a pass by rows: {points}")
    return tokenizer, target


def make_engine(
    model: str, target: Any, tokenizer: Tokenizer, folder: Path, *, nodes: str = AUTO, sources: tuple[str, ...] | None = None
) -> Engine:
    """An engine that learns from nobody else: corpora are in `folder`, its memory in a folder of its own below.

    `nodes` is AUTO, PLAIN or a number of candidates; see `price`.
    """
    speculation: dict[str, Any] = {"max_nodes": int(nodes)} if nodes.isdigit() else {}
    if sources is not None:
        speculation["sources"] = sources
    memory = Path(tempfile.mkdtemp(prefix="memory-", dir=folder))
    config = Config(
        model=ModelSettings(name=model),
        speculation=SpeculationSettings(**speculation),
        corpora=CorporaSettings(store=folder),
        memory=MemorySettings(folder=memory),
    )
    return Engine(config, target, tokenizer)


def price(target: Any, nodes: str) -> None:
    """For a fixed number of candidates, have rows cost nothing, so that so many are verified; else what was measured."""
    target.meter.freeze(CostCurve.flat() if nodes.isdigit() else None)


def forget(engine: Engine) -> None:
    """Have a worker in this process forget what it has read, so that a prompt costs its full time each time."""
    storage = getattr(engine._target, "storage", None)
    if storage is not None:
        storage.forget()


def turns(names: list[str], i: int) -> list[str]:
    """All modes in the order of the i-th prompt: it turns, so that none is always first."""
    return names[i % len(names) :] + names[: i % len(names)]


async def run(engine: Engine, request: GenerationRequest) -> Run:
    """One request, timed."""
    tokens: list[int] = []
    sources: Counter[str] = Counter()
    forget(engine)
    start = time.perf_counter()
    first = 0.0
    async for event in engine.generate(request):
        if isinstance(event, Chunk):
            first = first or time.perf_counter() - start
            tokens.extend(event.tokens)
            for mask in event.masks:
                names = [name.partition(":")[0] for s, name in enumerate(event.sources) if mask >> s & 1]
                sources[" and ".join(sorted(set(names))) or "target"] += 1
        else:
            final = event
    total = time.perf_counter() - start
    statistics = final.statistics
    return Run(tuple(tokens), statistics.draft_seconds + statistics.step_seconds, first, total, final, sources)
