"""What each source is worth on recorded answers, without a model and without a clock.

    python benchmarks/replay.py                                        # every set at every budget, on all cores
    python benchmarks/replay.py --sets chat,sql --budgets 16 --limit 40
    python benchmarks/replay.py --peers PEERS/bin/python,OTHERS/bin/python     # beside other people's code

Every set is a row of requests whose answers are known: recorded answers of models (the evaluation data's traces) and what a
newer release of a package adds to an older one, which is the corpus there. The requests are served in order by the real
sources, calibration and merge; a target that says what was recorded takes the place of the model, so a step costs microseconds,
and the figure that is left is tokens per step. A tree always has as many nodes as the budget allows. What one answer taught
(calibration, credit, history) is there for the next one of its set, and nothing crosses from set to set or from budget to
budget.

Rows: `all` sources together; each source alone; peers by their own code with the same budget of nodes on the same tokens
(`replay_peers.py`, in environments of their own); the oracle, which knows at every step which source will reach furthest and
takes that one's draft. Calibration is judged on every node whose parent was accepted: the error over 15 bins of equal mass
(expected calibration error) and the log-loss, `log_loss_raw` being that of the same nodes pooled as the sources had them.

Time is that of five sources on the sets that have a corpus: `recycle` and `lookahead` are among them then, fed with made-up
likely tokens. `overhead_us` is drafting and merging, `learning_us` what follows when the tokens are known, beside which the
engine sends them already. It is measured last, when nothing else runs; the rest is done by as many processes as there are
cores.

Records are sampled by a hash of what they are about, in the file's order; `--limit` says how many a set. Two runs print the
same, but for the microseconds: peers' answers are kept, since some of theirs are decided by the order of a hash map.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _common import console, data_folder
from complete import make_pair
from numba import njit
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from corpora.build import build
from corpora.catalog import DEFAULT_TENANT, Catalog
from engine import kernels
from engine.acceptance import Limits, walk
from engine.app import make_drafters
from engine.calibration import Calibration
from engine.drafters import DraftRequest, Feedback
from engine.drafters.panel import Panel
from engine.memory import Tenant
from engine.models import cache_root, tokenizer_folder
from engine.prior import prior
from engine.session import Session
from engine.target import StepResult
from engine.text import Tokenizer
from engine.tree import CANDIDATE, LOOKAHEAD, CandidateTree, CostCurve, Draft
from retriever.datastore import Datastore

Tokens = NDArray[np.int32]

FREE = CostCurve.flat()
NEARLY_FREE = CostCurve(np.array([1, 64], np.int32), np.array([1.0, 1.01]))
"""Rows worth a lookahead window."""

SOURCES = ("corpus", "prompt", "history", "resume")
HEARING = ("recycle", "lookahead")
"""Sources that live on what the target says beside the text; here only their time is measured."""

NUM_TIMED = 12
"""Turns of a set by which time is measured."""

NUM_BINS = 15


@dataclass(frozen=True)
class Turn:
    """One request: what was asked (int32 [n]) and what was answered (int32 [m], m >= 1)."""

    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True)
class Recording:
    """A set of traces: its file, how many records are taken if nothing is said, and how many turns of them at most."""

    file: str
    limit: int
    turns: int = 1_000


@dataclass(frozen=True)
class Completions:
    """A set of completions: the release pair, `complete.PAIRS`' name, and the kind of text."""

    pair: str
    kind: str
    limit: int


SETS: Mapping[str, Recording | Completions] = {
    "chat": Recording("chat_mtbench_vicuna33b", 20),
    "judge": Recording("judge_mtbench_gpt4", 40),
    "rag": Recording("rag_mtrag_gpt4o_llama405b", 60),
    "agent-software": Recording("agent_swebench_verified_gemini3pro", 1, turns=24),
    "agent-tools": Recording("agent_taubench_airline_gpt4o", 16),
    "thought": Recording("cot_zeroeval_math_crux_gsm", 30),
    "thought-long": Recording("cot_reasoning_gym_2models", 10),
    "sql": Recording("text2sql_bird_3models", 120),
    "pydantic": Completions("pydantic", "code", 50),
    "django": Completions("django", "code", 50),
    "django-docs": Completions("django-docs", "docs", 50),
}


# ---- the sets


def sample(records: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """About `limit` records, those whose subject has the smallest hash, in the order of the file.

    Records about the same thing (one question put to several models: ids that differ after the last slash or colon) come
    together.
    """

    def place(record: dict[str, Any]) -> str:
        return hashlib.sha256(str(record.get("prompt") or record["id"]).encode()).hexdigest()

    chosen = sorted(range(len(records)), key=lambda i: (place(records[i]), i))[:limit]
    return [records[i] for i in sorted(chosen)]


def recorded(recording: Recording, limit: int, tokenizer: Tokenizer) -> list[Turn]:
    """The turns of a set of traces, as Qwen2.5's chat template puts them; every answer ends with the token that ends a turn."""
    data = data_folder()
    if not (data / "read_data.py").exists():
        sys.exit(f"the evaluation data is not in {data}: set DRAFTLOOM_DATA")
    sys.path.insert(0, str(data))
    from read_data import jsonl

    turns = []
    for record in sample(list(jsonl(data / "traces" / f"{recording.file}.jsonl.gz")), limit):
        messages = record.get("messages") or [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["output"]},
        ]
        text: list[Tokens] = []
        for message in messages:
            text.append(tokenizer.encode(f"<|im_start|>{message['role']}\n", special=True))
            content = tokenizer.encode(message["content"] or "")
            end = tokenizer.encode("<|im_end|>\n", special=True)
            if message["role"] == "assistant" and len(content):
                turns.append(Turn(np.concatenate(text), np.concatenate([content, end[:1]])))
            text += [content, end]
    return turns[: recording.turns]


def completed(completions: Completions, limit: int, tokenizer: Tokenizer, kept: Path) -> list[Turn]:
    """The turns of a set of completions: raw prefixes, and what the newer release has there, made once and kept in `kept`."""
    path = kept / f"{completions.pair}.jsonl"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(make_pair(completions.pair)[2], path)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if record["kind"] == completions.kind and record["prefix"]]
    chosen = sorted(records, key=lambda record: hashlib.sha256(record["id"].encode()).hexdigest())[:limit]
    return [Turn(tokenizer.encode(record["prefix"]), tokenizer.encode(record["added"])) for record in chosen]


def indexed(pair: str, tokenizer: Tokenizer, folder: Path) -> Path:
    """The older release of a pair, indexed once and kept in `folder`: the version's own folder."""
    catalog = Catalog(folder)
    name = f"replay-{pair}"
    if name not in [corpus.name for corpus in catalog.list(DEFAULT_TENANT)]:
        console.print(f"indexing {pair}")
        build(name, [make_pair(pair)[1]], tokenizer, catalog)
    return catalog.version_path(name, catalog.get(name, DEFAULT_TENANT).active.id)


@dataclass(frozen=True)
class Streams:
    """A set as token streams on disk, where every process reads it: ours, and the peers'."""

    name: str
    file: Path
    fingerprint: str
    vocab_size: int
    corpus: Path | None = None

    @staticmethod
    def write(name: str, turns: Sequence[Turn], tokenizer: Tokenizer, corpus: Path | None, folder: Path) -> Streams:
        """Write the turns, and what the corpus holds (int32, every document and -1 behind it), into `folder`."""
        streams = Streams(name, folder / f"{name}.npz", tokenizer.fingerprint, tokenizer.vocab_size, corpus)
        arrays: dict[str, NDArray[Any]] = {
            "prompts": np.concatenate([turn.prompt for turn in turns]),
            "prompt_lengths": np.array([len(turn.prompt) for turn in turns]),
            "answers": np.concatenate([turn.answer for turn in turns]),
            "answer_lengths": np.array([len(turn.answer) for turn in turns]),
            "corpus": np.zeros(0, np.int32),
        }
        for store in streams.stores().values():
            end = np.array([-1], np.int32)
            parts = [part for i in range(store.num_documents) for part in (store.document_tokens(i), end)]
            arrays["corpus"] = np.concatenate(parts)
            store.close()
        np.savez(streams.file, **arrays)  # type: ignore[arg-type]
        return streams

    def turns(self) -> list[Turn]:
        """The turns, read."""
        with np.load(self.file) as arrays:
            prompts, answers = (
                np.split(arrays[f"{kind}s"], np.cumsum(arrays[f"{kind}_lengths"])[:-1]) for kind in ("prompt", "answer")
            )
        return [Turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def stores(self) -> dict[str, Datastore]:
        """The corpus by name, open and in memory, since a lookup that would wait for a disk is left out of its step; none for a
        set without one."""
        if self.corpus is None:
            return {}
        store = Datastore.open(self.corpus, self.fingerprint, self.vocab_size)
        store.populate()
        return {self.name: store}

    def digest(self) -> str:
        """A hash of what is in the file."""
        key = hashlib.sha256()
        with np.load(self.file) as arrays:
            for name, array in arrays.items():
                key.update(f"{name} {array.dtype} {len(array)}".encode() + array.tobytes())
        return key.hexdigest()


def prepared(name: str, limit: int, tokenizer: Tokenizer, kept: Path, folder: Path) -> Streams:
    """The streams of a set, of so many records (0: its own number), written into `folder`; `kept` has the corpora."""
    kind = SETS[name]
    if isinstance(kind, Recording):
        return Streams.write(name, recorded(kind, limit or kind.limit, tokenizer), tokenizer, None, folder)
    turns = completed(kind, limit or kind.limit, tokenizer, kept)
    return Streams.write(name, turns, tokenizer, indexed(kind.pair, tokenizer, kept), folder)


# ---- the replay


@dataclass
class Replay:
    """What came of one row: tokens and steps, what each source's own drafts had and no other's (`unique`), judged nodes.

    `judged` holds (probability given the parent, the same uncalibrated, 1 if it came true).
    """

    num_tokens: int = 0
    num_steps: int = 0
    unique: dict[str, int] = field(default_factory=dict)
    promised: float = 0.0
    judged: list[NDArray[np.float64]] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    learning: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(self.num_steps, 1)


def replay(
    turns: Sequence[Turn],
    stores: Mapping[str, Datastore],
    names: Sequence[str],
    budget: int,
    vocab_size: int,
    calibration: Calibration | None = None,
    *,
    made_up: bool = False,
) -> Replay:
    """Serve the turns with these sources and trees of `budget` nodes; a tenant without a calibration begins with the prior.

    With `made_up`, sources hear of every row what a target might find likely, see `hearsay`.
    """
    found = Replay()
    drafters = list(make_drafters(names).values())
    calibration = calibration or Calibration(None, prior())
    memory = Tenant(clock=lambda: 0.0)

    async def run() -> None:
        for turn in turns:
            request = DraftRequest(DEFAULT_TENANT, "replay", turn.prompt, stores, memory=memory)
            with Panel(drafters, request, vocab_size, deadline=float("inf")) as panel:
                session = Session(turn.prompt, panel.labels, calibration, budget)
                await serve(session, panel, turn, found, vocab_size if made_up else 0)

    asyncio.run(run())
    return found


async def serve(session: Session, panel: Panel, turn: Turn, found: Replay, vocab_size: int = 0) -> None:
    """One request, step by step. With a vocabulary, sources hear what is made up out of it."""
    limits = Limits(max_tokens=len(turn.answer))
    while not session.finished:
        done = session.num_emitted
        start = time.perf_counter()
        drafts = await panel.propose(session.tokens, session.num_wanted)
        tree = session.tree(drafts, NEARLY_FREE if vocab_size else FREE, panel.lookahead)
        drafted = time.perf_counter()
        ahead = turn.answer[done:]
        taken = walk(tree, lambda node, emitted, ahead=ahead: int(ahead[len(emitted)]), limits, done)
        judge(tree, drafts, taken.tokens, found)
        result = StepResult(taken.path, taken.tokens, taken.finish, np.arange(len(tree), dtype=np.int32))
        feedback = hearsay(tree, taken.tokens, vocab_size) if vocab_size else result.feedback
        committing = time.perf_counter()
        step = session.commit(result)
        panel.accept(step.tokens, feedback)
        found.drafting.append(1e6 * (drafted - start))
        found.learning.append(1e6 * (time.perf_counter() - committing))
    found.num_tokens += session.num_emitted
    found.num_steps += session.tally.num_steps
    for label, count in zip(session.labels, session.tally.alone.tolist(), strict=True):
        name = label.partition(":")[0]
        found.unique[name] = found.unique.get(name, 0) + count


def hearsay(tree: CandidateTree, emitted: Tokens, vocab_size: int) -> Feedback:
    """What a target might have found likely at every row of a tree: what it said where it said something, and seven tokens
    scattered over the vocabulary by a hash of the row's."""
    top_ids = (tree.tokens.astype(np.int64)[:, None] * np.arange(40_503, 40_511) + 7) % vocab_size
    node = 0
    for said in emitted.tolist():
        top_ids[node, 0] = said
        below = np.flatnonzero((tree.parents == node) & (tree.tokens == said) & (tree.roles == CANDIDATE))
        if not len(below):
            break
        node = int(below[0])
    return Feedback(top_ids.astype(np.int32), tree.tokens, tree.parents, int(np.count_nonzero(tree.roles == LOOKAHEAD)))


# ---- judging the estimates


def judge(tree: CandidateTree, drafts: Sequence[Draft | None], emitted: Tokens, found: Replay) -> None:
    """Note what was promised for every node whose parent was accepted, and what came of it."""
    found.promised += float(tree.probs.sum(dtype=np.float64)) - 1.0
    heard = [draft for draft in drafts if draft is not None and len(draft)]
    if len(tree) < 2 or not heard:
        return
    ends = np.cumsum([len(draft) for draft in heard])
    tokens, parents, probs = (np.concatenate([getattr(d, name) for d in heard]) for name in ("tokens", "parents", "probs"))
    found.judged.append(_judge(tree.tokens, tree.parents, tree.probs, tokens, parents, probs, ends, emitted))


@njit(cache=True)
def _judge(
    tree_tokens: Any, tree_parents: Any, tree_probs: Any, tokens: Any, parents: Any, probs: Any, ends: Any, emitted: Any
) -> Any:
    """float64 [n, 3]: (probability given the parent, the mean of the raw ones of all sources that say anything there,
    outcome)."""
    judged = np.empty((len(tree_tokens) - 1, 3))
    count = 0
    cursors = np.full(len(ends), -1, np.int64)  # where the accepted path is in every draft; -2: it does not hold it
    node = 0
    for said in emitted:
        after = -1
        for i in range(node + 1, len(tree_tokens)):
            if tree_parents[i] != node:
                continue
            total, speakers = 0.0, 0
            start = 0
            for s in range(len(ends)):
                speaks = False
                for j in range(start, ends[s]):
                    if parents[j] == cursors[s]:
                        speaks = True
                        if tokens[j] == tree_tokens[i]:
                            total += probs[j]
                speakers += speaks
                start = ends[s]
            judged[count, 0] = tree_probs[i] / max(tree_probs[node], 1e-30)
            judged[count, 1] = total / max(speakers, 1)
            judged[count, 2] = tree_tokens[i] == said
            count += 1
            if tree_tokens[i] == said:
                after = i
        start = 0
        for s in range(len(ends)):
            below = -2
            for j in range(start, ends[s]):
                if parents[j] == cursors[s] and tokens[j] == said:
                    below = j - start
            cursors[s] = below
            start = ends[s]
        node = after
        if node < 0:
            break
    return judged[:count]


def calibration_error(probs: NDArray[np.float64], outcomes: NDArray[np.float64]) -> float:
    """Expected calibration error over bins of equal mass: the mean distance of promised from observed rate."""
    order = np.argsort(probs, kind="stable")
    bins = np.array_split(order, NUM_BINS)
    return float(sum(len(b) * abs(probs[b].mean() - outcomes[b].mean()) for b in bins if len(b)) / max(len(order), 1))


def log_loss(probs: NDArray[np.float64], outcomes: NDArray[np.float64]) -> float:
    """Mean negative log-likelihood in nats; a probability of 0 or 1 is taken as one in a thousand off."""
    clipped = np.clip(probs, 1e-3, 1 - 1e-3)
    return float(-np.mean(np.where(outcomes > 0, np.log(clipped), np.log1p(-clipped)))) if len(probs) else 0.0


# ---- the oracle


def oracle(turns: Sequence[Turn], stores: Mapping[str, Datastore], names: Sequence[str], budget: int, vocab_size: int) -> float:
    """Tokens per step of one who knows which source's draft of `budget` nodes will reach furthest."""
    drafters = list(make_drafters(names).values())
    memory = Tenant(clock=lambda: 0.0)
    num_tokens = num_steps = 0

    async def run() -> None:
        nonlocal num_tokens, num_steps
        for turn in turns:
            text = np.concatenate([turn.prompt, turn.answer])
            request = DraftRequest(DEFAULT_TENANT, "replay", turn.prompt, stores, memory=memory)
            with Panel(drafters, request, vocab_size, deadline=float("inf")) as panel:
                at = len(turn.prompt)
                while at < len(text):
                    drafts = await panel.propose(text[:at], 2 * budget)
                    reached = max((reach(draft, text[at:], budget) for draft in drafts if draft is not None), default=0)
                    emitted = text[at : at + reached + 1]
                    panel.accept(emitted, Feedback())
                    at += len(emitted)
                    num_steps += 1
            num_tokens += len(turn.answer)

    asyncio.run(run())
    return num_tokens / max(num_steps, 1)


def reach(draft: Draft, ahead: Tokens, budget: int) -> int:
    """How many of the coming tokens the draft's first `budget` nodes hold in a row from its root."""
    n = min(len(draft), budget)
    reached = np.zeros(1, np.int64)
    ends = np.array([n], np.int64)
    kernels.outcomes(draft.tokens[:n], draft.parents[:n], ends, ahead, np.empty(n, np.int8), reached)
    return int(reached[0])


# ---- the whole


def figures(turns: Sequence[Turn], stores: Mapping[str, Datastore], budget: int, vocab_size: int) -> dict[str, Any]:
    """Every row of one set and budget but the peers'."""
    names = [name for name in SOURCES if name != "corpus" or stores]
    every = replay(turns, stores, names, budget, vocab_size)
    judged = np.concatenate(every.judged) if every.judged else np.zeros((0, 3))
    return {
        "all": round(every.tokens_per_step, 4),
        "sources": {name: round(replay(turns, stores, [name], budget, vocab_size).tokens_per_step, 4) for name in names},
        "peers": {},
        "oracle": round(oracle(turns, stores, names, budget, vocab_size), 4),
        "calibration_error": round(calibration_error(judged[:, 0], judged[:, 2]), 4),
        "log_loss": round(log_loss(judged[:, 0], judged[:, 2]), 4),
        "log_loss_raw": round(log_loss(judged[:, 1], judged[:, 2]), 4),
        "promised": round(every.promised / max(every.num_tokens - every.num_steps, 1), 4),
        "unique": {name: round(count / max(every.num_steps, 1), 4) for name, count in every.unique.items()},
        "num_tokens": every.num_tokens,
    }


def percentiles(microseconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99."""
    return {f"p{p}": round(float(np.percentile(microseconds, p)), 1) for p in (50, 99)} if microseconds else {}


def measure(streams: Streams, budget: int) -> dict[str, Any]:
    """`figures` of a set on disk."""
    stores = streams.stores()
    try:
        return figures(streams.turns(), stores, budget, streams.vocab_size)
    finally:
        for store in stores.values():
            store.close()


def ask_peers(python: str, streams: Streams, budget: int, kept: Path) -> dict[str, float]:
    """Tokens per step of the peers that the environment of `python` has, by their own code, each set and budget in a process of
    its own: one of them learns from what it is asked.

    What they said is kept in the folder `kept`, by streams, script and versions.
    """
    script = Path(__file__).with_name("replay_peers.py")
    asked = f"{streams.digest()} {budget} {_ask([python, str(script), 'versions'])}".encode()
    file = kept / f"{hashlib.sha256(script.read_bytes() + asked).hexdigest()}.json"
    if not file.exists():
        said = _ask([python, str(script), str(streams.file), str(budget)]).splitlines()[-1]
        kept.mkdir(parents=True, exist_ok=True)
        file.write_text(said, encoding="utf-8")
    found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _ask(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


TUNED = ("suffix_best",)
"""Rows of peers with settings that nobody ships."""


def leads(row: Mapping[str, Any]) -> dict[str, float]:
    """How many times the tokens per step of the best source alone, of the best peer as shipped, and of the best of all peers
    `all` has; what there is none of is left out."""
    shipped = [value for name, value in row["peers"].items() if name not in TUNED]
    rivals = {"sources": row["sources"].values(), "peers": shipped, "tuned": row["peers"].values()}
    return {name: round(row["all"] / max(values), 4) for name, values in rivals.items() if values}


def show(name: str, rows: Mapping[int, Mapping[str, Any]]) -> None:
    """Print the table of one set."""
    first = next(iter(rows.values()))
    table = Table(title=f"{name}: {first['num_tokens']} tokens", title_justify="left")
    columns = [
        "budget",
        "all",
        *first["sources"],
        *first["peers"],
        "oracle",
        "error",
        "log-loss",
        "raw",
        "unique",
        "leads",
    ]
    for column in columns:
        table.add_column(column, justify="right")
    for budget, row in rows.items():
        table.add_row(
            str(budget),
            f"{row['all']:.2f}",
            *(f"{value:.2f}" for value in row["sources"].values()),
            *(f"{value:.2f}" for value in row["peers"].values()),
            f"{row['oracle']:.2f}",
            f"{row['calibration_error']:.3f}",
            f"{row['log_loss']:.3f}",
            f"{row['log_loss_raw']:.3f}",
            " ".join(f"{value:.2f}" for value in row["unique"].values()),
            " ".join(f"{value:.2f}" for value in row["leads"].values()),
        )
    Console(width=max(console.width, 180)).print(table)


def clock(sets: Sequence[Streams], budget: int) -> tuple[dict[str, float], dict[str, float]]:
    """Percentiles of the microseconds of a step, of drafting and of learning, over the first turns of the sets."""
    drafting: list[float] = []
    learning: list[float] = []
    for streams in sets:
        stores = streams.stores()
        names = (*(SOURCES if stores else SOURCES[1:]), *HEARING)
        found = replay(streams.turns()[:NUM_TIMED], stores, names, budget, streams.vocab_size, made_up=True)
        drafting += found.drafting
        learning += found.learning
        for store in stores.values():
            store.close()
    return percentiles(drafting), percentiles(learning)


def every(
    sets: Sequence[Streams], sizes: Sequence[int], pythons: Sequence[str], kept: Path, jobs: int
) -> dict[str, dict[int, dict[str, Any]]]:
    """Set -> budget -> its row, worked out by `jobs` processes at a time, what takes longest first."""
    largest_first = sorted(sets, key=lambda streams: -streams.file.stat().st_size)
    parts: dict[tuple[str, int], list[Future[dict[str, Any]]]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for streams in largest_first:
            for size in sizes:
                asked = [pool.submit(ask_peers, python, streams, size, kept) for python in pythons]
                parts[streams.name, size] = [pool.submit(measure, streams, size), *asked]
        waiting = [future for futures in parts.values() for future in futures]
        for _ in track(as_completed(waiting), "replaying", total=len(waiting), console=console):
            pass
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for streams in sets:
        found[streams.name] = {}
        for size in sizes:
            ours, *theirs = (future.result() for future in parts[streams.name, size])
            row = ours | {"peers": {name: value for peer in theirs for name, value in peer.items()}}
            found[streams.name][size] = row | {"leads": leads(row)}
    return found


def main(
    sets: Annotated[str, typer.Option(help="Comma-separated names.")] = ",".join(SETS),
    budgets: Annotated[str, typer.Option(help="Comma-separated numbers of nodes.")] = "4,8,16,32,64",
    limit: Annotated[int, typer.Option(help="Records of a set; 0: each set's own number.")] = 0,
    model: Annotated[str, typer.Option(help="Whose tokenizer.")] = "qwen2.5-coder-1.5b",
    peers: Annotated[str, typer.Option(help="Pythons of environments with peers, comma-separated; none: left out.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes at a time. [default: one a core]", min=0)] = 0,
) -> None:
    """Replay recorded answers; print a table for each set, then one line of JSON."""
    tokenizer = Tokenizer.load(tokenizer_folder(model))
    sizes = [int(size) for size in budgets.split(",")]
    kept = cache_root().parent / "replay"
    with tempfile.TemporaryDirectory() as folder:
        streams = [prepared(name, limit, tokenizer, kept, Path(folder)) for name in sets.split(",")]
        pythons = [python for python in peers.split(",") if python]
        found = every(streams, sizes, pythons, kept / "peers", jobs or len(os.sched_getaffinity(0)))
        for name, rows in found.items():
            show(name, rows)
        timed = [each for each in streams if each.corpus is not None] or streams
        times = {size: clock(timed, size) for size in sizes}
    overhead = {size: drafting for size, (drafting, _) in times.items()}
    print("microseconds a step, drafting and merging:", overhead)
    learning = {size: after for size, (_, after) in times.items()}
    print(json.dumps({"sets": found, "overhead_us": overhead, "learning_us": learning}))


if __name__ == "__main__":
    typer.run(main)
