"""How long does a lookup take? Microseconds a query, by the size of the corpus, beside REST's own datastore.

    python benchmarks/lookup.py --tokens 1e6,4e6 --peers REST/bin/python,ADED/bin/python
    python benchmarks/lookup.py --tokens 1e8 --threads 1,2 --corpora 1,4,16

Text: the sources of the packages installed beside this script, as tokens of `--model`, one file a document. Where they are not
enough, further copies of the files are added, each different: in every copy 3 % of the tokens are replaced by others of the
same file, and the table says how many copies there are.

Queries: one file in 20 is kept out of the corpus. Half of the queries walk through such files, a quarter through files that are
in the corpus, some 3 tokens a step as a decoder would; of the last quarter no end longer than a token or two can match (the
last token but one is replaced at random). Each asks for `--budget` nodes below a context of 32 tokens.

"cold": the files are dropped from the page cache before each round, and the first lookup is timed. "cold step": the time that
the `corpus` source takes of a request's first step then, which goes on without an answer that is late.

`--peers` are interpreters that have a `draftretriever`; two projects have one of that name. `rest` is REST's own (0.1.0, a
wheel in its repository, for Python 3.9), `aded` that of the package index (0.1.1, ADED's, arXiv 2407.12021). Both are asked as
REST asks: ends of 16 to 2 tokens, the longest first, until something is found, at most 5,000 places, 10 tokens deep. They get
the same queries over the same documents, in one corpus, which they keep in memory as a whole; and ids in the order in which
they come up, since they drop those above 65,535.

`--prepare` only tokenizes and builds. Corpora are kept in `--cache`. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from engine.drafters import DraftRequest
from engine.drafters.corpus import CorpusDrafter
from engine.models import resolve
from engine.text import Tokenizer
from retriever.datastore import Datastore
from retriever.format import write_version
from retriever.kernels import warmup

Tokens = NDArray[np.int32]

PACKAGES = ("transformers", "torch", "sympy", "networkx", "numpy", "numba", "mypy", "pip", "accelerate", "pygments")
CONTEXT = 32
HELD_OUT = 20
EDITED = 0.03

PEER = """
import json, os, sys, time
from importlib import metadata
import numpy as np
import draftretriever
folder, measure, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
name = "rest" if metadata.version("draftretriever") == "0.1.0" else "aded"
index = folder + "/" + name + ".idx"
if not os.path.exists(index):
    tokens, ends = np.load(folder + "/tokens.npy", mmap_mode="r"), np.load(folder + "/ends.npy")
    writer = draftretriever.Writer(index, vocab_size=65536)
    begin = 0
    for end in ends.tolist():
        writer.add_entry(tokens[begin:end].tolist())
        begin = end
    writer.finalize()
    del writer
reader = draftretriever.Reader(index) if measure else None
queries = np.load(folder + "/queries.npy").tolist() if measure else []
def ask(query):
    for length in range(16, 1, -1):
        try:
            if reader.search(query[-length:], choices=budget, long=min(budget, 10))[0]:
                return
        except ValueError:  # its tree has more nodes than it was allowed
            return
for query in queries[:500]:
    ask(query)
took = []
for query in queries:
    start = time.perf_counter()
    ask(query)
    took.append(time.perf_counter() - start)
print(json.dumps([name, took]))
"""


@dataclass(frozen=True)
class Figures:
    """Seconds of many queries in one setting."""

    seconds: NDArray[np.float64]

    def __getitem__(self, percentile: float) -> float:
        return float(np.percentile(self.seconds, percentile) * 1e6) if len(self.seconds) else float("nan")


class Text:
    """Real files as token ids, some kept out of the corpus."""

    def __init__(self, cache: Path, tokenizer: Tokenizer) -> None:
        path = cache / f"text-{tokenizer.fingerprint[:16]}.npz"
        if not path.exists():
            names, files = zip(*_sources(tokenizer), strict=True)
            np.savez(path, tokens=np.concatenate(files), ends=np.cumsum([len(f) for f in files]), names=np.array(names))
        with np.load(path) as stored:
            files = np.split(stored["tokens"], stored["ends"][:-1])
            names = stored["names"].tolist()
        self.held_out = [tokens for i, tokens in enumerate(files) if i % HELD_OUT == 0]
        self.files = [(names[i], tokens) for i, tokens in enumerate(files) if i % HELD_OUT]

    def documents(self, num_tokens: int) -> Iterator[tuple[str, Tokens]]:
        """Files, then edited copies of them, until there are `num_tokens`."""
        total = copy = 0
        rng = np.random.default_rng(1)
        order = rng.permutation(len(self.files))
        while True:
            for i in order:
                name, tokens = self.files[i]
                if copy and len(tokens):
                    tokens = tokens.copy()
                    at = np.flatnonzero(rng.random(len(tokens)) < EDITED)
                    tokens[at] = rng.choice(tokens, len(at))
                yield f"{copy}/{name}", tokens[: num_tokens - total]
                total += len(tokens)
                if total >= num_tokens:
                    return
            copy += 1

    def copies(self, num_tokens: int) -> int:
        """How many copies of each file it takes, the first included."""
        return -(-num_tokens // sum(len(tokens) for _, tokens in self.files))

    def queries(self, count: int, num_tokens: int, vocab_size: int) -> NDArray[np.int32]:
        """int32 [count, CONTEXT]."""
        rng = np.random.default_rng(2)
        inside = [tokens for _, tokens in self.documents(num_tokens) if len(tokens) > 4 * CONTEXT]
        outside = [tokens for tokens in self.held_out if len(tokens) > 4 * CONTEXT]
        rows: list[Tokens] = []
        while len(rows) < count:
            files = inside if len(rows) % 80 >= 60 else outside
            tokens = files[rng.integers(len(files))]
            at = int(rng.integers(CONTEXT, len(tokens) - CONTEXT))
            for _ in range(20):
                if at > len(tokens):
                    break
                row = tokens[at - CONTEXT : at].copy()
                if len(rows) % 80 < 20:
                    row[-2] = rng.integers(vocab_size)
                rows.append(row)
                at += int(rng.integers(1, 6))
        return np.stack(rows[:count])


def _sources(tokenizer: Tokenizer) -> Iterator[tuple[str, Tokens]]:
    for package in PACKAGES:
        files = sorted(f for f in importlib.metadata.files(package) or () if f.suffix in (".py", ".pyi", ".h", ".md", ".txt"))
        texts = [Path(str(f.locate())).read_text(encoding="utf-8", errors="replace") for f in files]
        for at in range(0, len(texts), 64):
            yield from zip(map(str, files[at : at + 64]), tokenizer.encode_batch(texts[at : at + 64]), strict=True)


def build(cache: Path, text: Text, tokenizer: Tokenizer, num_tokens: int, num_corpora: int) -> list[Path]:
    """The corpora of `num_tokens` tokens in all, documents dealt out in turns."""
    paths = []
    for part in range(num_corpora):
        name = f"{num_tokens}-{part}-of-{num_corpora}"
        path = cache / name / "versions" / "v"
        if not path.exists():
            mine = (pair for i, pair in enumerate(text.documents(num_tokens)) if i % num_corpora == part)
            options = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
            write_version(cache, name, "v", mine, **options)
        paths.append(path)
    return paths


def warm(stores: Sequence[Datastore], queries: NDArray[np.int32], budget: int, num_threads: int) -> Figures:
    """Every thread asks all stores its share of the queries, one after the other."""

    def ask(mine: NDArray[np.int32], seconds: list[float]) -> None:
        clock = time.perf_counter
        for query in mine:
            start = clock()
            for store in stores:
                store.lookup(query, budget)
            seconds.append(clock() - start)

    for query in queries[:500]:
        for store in stores:
            store.lookup(query, budget)
    shares = np.array_split(queries, num_threads)
    taken: list[list[float]] = [[] for _ in shares]
    threads = [threading.Thread(target=ask, args=pair) for pair in zip(shares, taken, strict=True)]
    gc.disable()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.enable()
    return Figures(np.array([seconds for share in taken for seconds in share]))


def cold(
    paths: Sequence[Path], queries: NDArray[np.int32], rounds: int, ask: Callable[[list[Datastore], Tokens], Any]
) -> Figures:
    """The first question after the files left the page cache."""
    seconds = []
    for query in queries[:: max(1, len(queries) // rounds)][:rounds]:
        for path in paths:
            for file in path.iterdir():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        stores = [Datastore.open(path) for path in paths]
        start = time.perf_counter()
        ask(stores, query)
        seconds.append(time.perf_counter() - start)
        for store in stores:
            store.close()
    return Figures(np.array(seconds))


def first_step(stores: list[Datastore], query: Tokens) -> None:
    """What a request's first step spends on the `corpus` source."""
    request = DraftRequest("default", "model", query, {store.name: store for store in stores})
    for _, drafting in CorpusDrafter().begin(request):
        drafting.propose(query, 64)
        drafting.close()


def renumbered(*arrays: Tokens) -> list[Tokens]:
    """The arrays with ids in the order in which they come up."""
    ids, first = np.unique(np.concatenate([array.ravel() for array in arrays]), return_index=True)
    place = np.empty(ids[-1] + 1, np.int32)
    place[ids[np.argsort(first)]] = np.arange(len(ids))
    return [place[array] for array in arrays]


def ask_peer(
    python: str, folder: Path, text: Text, queries: NDArray[np.int32], num_tokens: int, budget: int, measure: bool
) -> tuple[str, Figures]:
    """(its name, what it takes) of the peer that an interpreter has, in a process of its own; unless `measure`, only built."""
    folder.mkdir(parents=True, exist_ok=True)
    if measure or not (folder / "tokens.npy").exists():
        files = [tokens for _, tokens in text.documents(num_tokens)]
        stored, asked = renumbered(np.concatenate(files), queries)
        np.save(folder / "tokens.npy", stored)
        np.save(folder / "ends.npy", np.cumsum([len(f) for f in files]))
        np.save(folder / "queries.npy", asked)
    command = [python, "-c", PEER, str(folder), str(int(measure)), str(budget)]
    name, taken = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return name, Figures(np.array(taken))


def main(
    tokens: Annotated[str, typer.Option(help="Sizes of the corpus, in tokens.")] = "1e6,4e6",
    threads: Annotated[str, typer.Option(help="Numbers of threads that ask at once.")] = "1,2",
    corpora: Annotated[str, typer.Option(help="Over how many corpora the tokens are spread.")] = "1,4,16",
    num_queries: Annotated[int, typer.Option(help="Queries a setting.")] = 8000,
    budget: Annotated[int, typer.Option(help="Nodes asked for.")] = 64,
    rounds: Annotated[int, typer.Option(help="Cold starts a setting; 0 leaves them out.")] = 20,
    model: Annotated[str, typer.Option(help="Whose tokenizer.")] = "qwen2.5-coder-1.5b",
    peers: Annotated[str, typer.Option(help="Interpreters that have a draftretriever, with commas.")] = "",
    peer_most: Annotated[float, typer.Option(help="Largest corpus for peers, which keep all of it in memory.")] = 2e7,
    cache: Annotated[Path, typer.Option(help="Where texts and corpora are kept.")] = Path("~/.cache/draftloom/lookup"),
    prepare: Annotated[bool, typer.Option(help="Tokenize and build, measure nothing.")] = False,
) -> None:
    """Measure lookups."""
    cache = cache.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.load(resolve(model))
    text = Text(cache, tokenizer)
    warmup()
    report = Report(budget, num_queries)
    for num_tokens in (int(float(size)) for size in tokens.split(",")):
        queries = text.queries(num_queries, num_tokens, tokenizer.vocab_size)
        entry: dict[str, Any] = {}
        size_of = (num_tokens, text.copies(num_tokens))
        for num_corpora in map(int, corpora.split(",")):
            paths = build(cache, text, tokenizer, num_tokens, num_corpora)
            if prepare:
                continue
            stores = [Datastore.open(path) for path in paths]
            for store in stores:
                store.populate()
            size = sum(f.stat().st_size for path in paths for f in path.iterdir()) / sum(store.num_tokens for store in stores)
            for num_threads in map(int, threads.split(",")):
                taken = warm(stores, queries, budget, num_threads)
                figures = report.add(*size_of, f"{size:.2f}", "warm", num_corpora, num_threads, taken)
                entry |= figures if num_corpora == num_threads == 1 else {f"corpora{num_corpora}_threads{num_threads}": figures}
            for store in stores:
                store.close()
            del stores, store
            if rounds:
                taken = cold(paths, queries, rounds, lambda stores, query: [store.lookup(query, budget) for store in stores])
                entry[f"corpora{num_corpora}_cold"] = report.add(*size_of, "", "cold lookup", num_corpora, 1, taken)
                taken = cold(paths, queries, rounds, first_step)
                entry[f"corpora{num_corpora}_cold_step"] = report.add(*size_of, "", "cold step", num_corpora, 1, taken)
        report.results["draftloom"][str(num_tokens)] = entry
        for python in filter(None, peers.split(",") if num_tokens <= peer_most else ()):
            folder = cache / f"{num_tokens}-renumbered"
            name, taken = ask_peer(python, folder, text, queries, num_tokens, budget, not prepare)
            if not prepare:
                figures = report.add(*size_of, "", name, 1, 1, taken)
                report.results.setdefault(name, {})[str(num_tokens)] = figures
    if not prepare:
        report.print()


class Report:
    """The table and the JSON, from the same figures."""

    def __init__(self, budget: int, num_queries: int) -> None:
        self.results: dict[str, dict[str, Any]] = {"draftloom": {}}
        self._table = Table(title=f"microseconds a lookup, {num_queries} queries, {budget} nodes", title_justify="left")
        for column in ("tokens", "copies", "B/token", "what", "corpora", "threads", "p50", "p90", "p99", "max"):
            self._table.add_column(column, justify="left" if column == "what" else "right")

    def add(
        self, num_tokens: int, copies: int, size: str, what: str, num_corpora: int, num_threads: int, figures: Figures
    ) -> dict[str, float]:
        """A row; what the JSON says of it."""
        cells = [f"{figures[p]:,.1f}" for p in (50, 90, 99, 100)]
        self._table.add_row(f"{num_tokens:,}", str(copies), size, what, str(num_corpora), str(num_threads), *cells)
        return {"p50_us": round(figures[50], 1), "p99_us": round(figures[99], 1)}

    def print(self) -> None:
        """To standard output, the JSON last."""
        Console(width=120).print(self._table)
        print(json.dumps(self.results))


if __name__ == "__main__":
    typer.run(main)
