"""Whether passes on a GPU are right, what they cost, and what speculation brings there: one command, under 8 minutes.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --model /path/to/a/safetensors/folder
    python benchmarks/gpu_check.py --cpu-tiny

1. Correctness: tiny random networks in float32 (windows, soft caps, sinks), trees of several sequences behind chunked prefixes,
   against transformers' own forward pass; both kinds of attention; replayed graphs; choices of the device against those of the
   host.
2. The cost curve: milliseconds a pass takes by rows, choices made and fetched, with either attention, for random weights in the
   shape of Qwen2.5-7B in bfloat16, and for the model given. The quicker one runs the rest.
3. Replayed: tokens/s at 1, 4, 16 and 64 sequences with the accepted lengths of other runs, since nothing drafts for random
   weights. `--accepted FILE` holds one a line (accepted nodes of a step, in order); without it they are drawn from a geometric
   law with the mean `--mean-accepted`. All else is real: trees are packed, verified, chosen from and their rows moved.
4. Served: the same through the worker and the engine's own loop: sequences come, are batched, cut by the measured curve and
   walked. Drafts are the answers of the plain run, every 4th token spoilt; how many of the answers are the same is told, too.

Each part stands alone: what fails is printed with its reason, and the command ends with 1. Parts that the time (`--seconds`) no
longer allows are left out by name. `--cpu-tiny` runs all of it with a tiny network on the CPU, to try the script itself; its
times mean nothing. Prints tables; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from engine import kernels as core_kernels
from engine.acceptance import Limits, SamplingParams
from engine.calibration import Calibration
from engine.drafters import Drafting, DraftRequest, Feedback
from engine.drafters.panel import Panel
from engine.loop import Times, decode
from engine.session import Session
from engine.target import SequenceRequest, cuda
from engine.target.attention import KEY, Part
from engine.target.cache import KVTable
from engine.target.kernels import BLOCK
from engine.target.local import LocalTarget
from engine.target.model import Model, describe
from engine.target.sampling import Ask, Choices, Said
from engine.tree import CandidateTree, Draft

console = Console(stderr=True)

TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "pad_token_id": None,
    "initializer_range": 0.25,  # large, so that whatever a row sees wrongly shows
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": 9},
    "Gemma2Config": {"sliding_window": 9, "attn_logit_softcapping": 2.0},
    "GptOssConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
}
SEVEN_B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTIONS = {"flex": True, "gathered": False}
SPOILT = 4
MOST_DRAFTS = 15


def random_network(config: str, settings: dict[str, Any], attention: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A network of random weights, the same for either attention on one device."""
    made = getattr(transformers, config)(**settings)
    torch.manual_seed(5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            network = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    return network.to(device).eval()


class Device:
    """A network with pages for so many positions; sequences on it are read, verified and kept by hand."""

    def __init__(self, network: Any, flexible: bool, positions: int) -> None:
        self.device, dtype = network.device, network.dtype
        self.model: Model = describe(network, str(dtype).removeprefix("torch."))
        self.vocab = self.model.vocab_size
        page = 2 * self.model.num_layers * self.model.kv_heads * self.model.head_dim * BLOCK * dtype.itemsize
        self.memory = -(-positions // BLOCK) * page
        self.passes = cuda.DevicePasses(self.model, self.memory, flexible)

    def read(self, text: Sequence[int], chunk: int = 256) -> KVTable:
        """A sequence with this text committed."""
        table = KVTable(self.passes.storage)
        for start in range(0, len(text), chunk):
            piece = np.asarray(text[start : start + chunk], np.int32)
            table.reserve(len(piece))
            self.passes.run(piece, [Part(table, chain(len(piece)))], [Ask(0, 0, partial(Choices.likeliest, 0))])
            table.keep(np.arange(len(piece), dtype=np.int32))
        return table

    def verify(self, tables: Sequence[KVTable], trees: Sequence[CandidateTree], logits: bool = False) -> list[Said]:
        """What is likeliest after all rows of all trees, or their logits."""
        for table, tree in zip(tables, trees, strict=True):
            table.reserve(len(tree))
        parts = [Part(table, tree.parents) for table, tree in zip(tables, trees, strict=True)]
        asks = [Ask(len(tree), 0, None if logits else partial(Choices.likeliest, len(tree))) for tree in trees]
        return self.passes.run(np.concatenate([tree.tokens for tree in trees]), parts, asks)


def chain(num_rows: int) -> np.ndarray:
    """The parents of a chain."""
    return np.arange(-1, num_rows - 1, dtype=np.int32)


def chain_tree(tokens: Sequence[int], position: int) -> CandidateTree:
    """Root and drafts, one below the other."""
    n = len(tokens)
    return CandidateTree(
        np.asarray(tokens, np.int32), chain(n), np.ones(n, np.float32), np.zeros(n, np.int64), np.zeros(n, np.uint8), position
    )


# ---- 1: correctness


def correctness(device: torch.device) -> dict[str, float]:
    """The largest difference of a logit from transformers' own, by network and attention, and how many choices differ."""
    found: dict[str, float] = {}
    for config, settings in FAMILIES.items():
        plain = random_network(config, TINY | settings, "eager", device, torch.float32)
        for name, flexible in ATTENTIONS.items():
            ours = random_network(config, TINY | settings, KEY, device, torch.float32)
            found[f"{config}, {name}"] = largest_difference(plain, Device(ours, flexible, 2048))
    found["choices that differ"] = wrong_choices(device)
    return found


@torch.inference_mode()
def largest_difference(plain: Any, device: Device) -> float:
    """Over three steps of packed trees of three sequences, rows kept in between; later steps replay graphs."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(device.vocab, size=count).tolist() for count in (61, 130, 5)]
    tables = [device.read(text, 67) for text in texts]
    worst = 0.0
    for _ in range(3):
        trees, kept = [], []
        for text in texts:
            parents = np.array([-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, 9))], np.int32)
            tokens = rng.integers(device.vocab, size=9)
            trees.append(
                CandidateTree(
                    tokens.astype(np.int32), parents, np.ones(9, np.float32), np.zeros(9, np.int64), np.zeros(9, np.uint8),
                    len(text),
                )
            )  # fmt: skip
        said = device.verify(tables, trees, logits=True)
        for text, tree, mine in zip(texts, trees, said, strict=True):
            for row in (0, 5, 8):
                path = [row]
                while tree.parents[path[0]] >= 0:
                    path.insert(0, int(tree.parents[path[0]]))
                whole = torch.tensor([text + tree.tokens[path].tolist()], device=device.device)
                expected = plain(whole, use_cache=False).logits[0, -1].cpu().numpy()
                assert mine.logits is not None
                worst = max(worst, float(np.abs(mine.logits[row] - expected).max()))
            text += tree.tokens[path].tolist()
            kept.append(np.array(path, np.int32))
        for table, rows in zip(tables, kept, strict=True):
            table.keep(rows)
    return worst


def wrong_choices(device: torch.device) -> int:
    """Of 64 choices, greedy and sampled, half of them with a top_k and top_p, how many are not the host's."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 5000)).astype(np.float32) * 3
    heat, seeds, places = np.arange(64) % 4 / 3, rng.integers(1 << 64, size=64, dtype=np.uint64), rng.integers(9999, size=64)
    k, p = np.arange(64) // 32 * 40, 1 - np.arange(64) // 32 * 0.1
    choices = Choices(heat, k, p, np.zeros(64), seeds, places)
    (found,) = cuda.fetch(cuda.choose_all(torch.from_numpy(logits).to(device), choices))
    scratch = np.empty(5000), np.empty(5000), np.empty(5000, np.bool_)
    right = [
        int(core_kernels.choose(row, heat[i], k[i], p[i], 0.0, seeds[i], places[i], *scratch)) if heat[i] else int(row.argmax())
        for i, row in enumerate(logits)
    ]
    return int(np.count_nonzero(found != right))


# ---- 2: the cost curve


def cost_curve(device: Device, context: int, rounds: int) -> dict[int, float]:
    """Milliseconds of a pass by rows, the best of several, after `context` positions."""
    table = device.read([i % device.vocab for i in range(context)])
    found = {}
    for rows in cuda.ROWS:
        tree = chain_tree([1] * rows, context)
        times = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            device.verify([table], [tree])
            times.append(1000 * (time.perf_counter() - start))
        found[rows] = min(times[1:])
    table.close()
    return found


# ---- 3: replayed


def draft_length(curve: dict[int, float], level: int, accepted: np.ndarray) -> int:
    """How many drafts a sequence brings: what gives most tokens a second on the curve, none among the choices."""
    rows, ms = np.array(list(curve)), np.array(list(curve.values()))

    def rate(drafts: int) -> float:
        need = level * (drafts + 1)
        price = np.interp(need, rows, ms) if need <= rows[-1] else ms[-1] * need / rows[-1]
        return float((1 + np.minimum(accepted, drafts).mean()) / price)

    return max(range(MOST_DRAFTS + 1), key=rate)


def random_prompts(device: Device, level: int, context: int) -> list[np.ndarray]:
    """A prompt for each of `level` sequences, int32 [context]."""
    rng = np.random.default_rng(level)
    return [rng.integers(device.vocab, size=context).astype(np.int32) for _ in range(level)]


def replayed(device: Device, level: int, context: int, tokens: int, drafts: int, accepted: np.ndarray) -> float:
    """Tokens/s of `level` sequences at once, steps accepting so many nodes as `accepted` says, in a circle."""
    prompts = random_prompts(device, level, context)
    tables = [device.read(prompt[:-1].tolist()) for prompt in prompts]
    roots, counts, step = [int(prompt[-1]) for prompt in prompts], [0] * level, 0
    start = time.perf_counter()
    while open_ := [i for i in range(level) if counts[i] < tokens]:
        trees = [
            chain_tree([roots[i], *[step % device.vocab] * min(drafts, tokens - counts[i] - 1)], tables[i].length)
            for i in open_
        ]
        said = device.verify([tables[i] for i in open_], trees)
        for at, (i, tree, mine) in enumerate(zip(open_, trees, said, strict=True)):
            assert mine.chosen is not None
            count = 1 + min(int(accepted[(step * level + at) % len(accepted)]), len(tree) - 1)
            roots[i] = int(mine.chosen[count - 1])
            counts[i] += count
            tables[i].keep(np.arange(count, dtype=np.int32))
        step += 1
    seconds = time.perf_counter() - start
    for table in tables:
        table.close()
    return sum(counts) / seconds


# ---- 4: served


class Spoilt:
    """A source that knows an answer, and of it spoils every SPOILT-th token."""

    name, blocking, top_k = "spoilt", False, 0

    def __init__(self, whole: np.ndarray, vocab: int) -> None:
        self._text = whole.copy()
        self._text[SPOILT - 1 :: SPOILT] = (self._text[SPOILT - 1 :: SPOILT] + 1) % vocab

    def begin(self, request: DraftRequest) -> list[tuple[str, Drafting]]:
        """This object is its own drafting."""
        return [(self.name, self)]

    def propose(self, context: np.ndarray, budget: int) -> Draft:
        """What the text says comes next."""
        ahead = self._text[len(context) : len(context) + min(budget, MOST_DRAFTS)]
        return Draft.of(ahead.tolist(), chain(len(ahead)).tolist(), [1 - 1 / SPOILT] * len(ahead))

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """There is nothing to learn."""

    def close(self) -> None:
        """There is nothing to release."""


async def answer(
    target: LocalTarget, prompt: np.ndarray, tokens: int, sources: Sequence[Spoilt], learnt: Calibration
) -> np.ndarray:
    """Prompt and answer of one request, int32, as the engine decodes it."""
    request = SequenceRequest(prompt, SamplingParams(), Limits(tokens), "default")
    about = DraftRequest(request.tenant, target.info.model, prompt)
    with Panel(sources, about, target.info.vocab_size, deadline=1.0) as panel:
        session = Session(prompt, panel.labels, learnt, MOST_DRAFTS)
        async with target.open(request) as sequence:
            async for _ in decode(session, panel, sequence, Times()):
                pass
        return session.tokens.copy()


def served(device: Device, levels: Sequence[int], context: int, tokens: int) -> dict[str, Any]:
    """Tokens/s through the worker, plain and speculative, by sequences at once, and how many answers are the same.

    Prompts have been read once before time is taken, so that nearly none of it is reading.
    """
    target = LocalTarget(device.model, passes=lambda *_: device.passes)
    found: dict[str, Any] = {}

    async def all_of(prompts: list[np.ndarray], count: int, sources: list[list[Spoilt]]) -> tuple[float, list[np.ndarray]]:
        start = time.perf_counter()
        asked = [answer(target, prompt, count, mine, learnt) for prompt, mine in zip(prompts, sources, strict=True)]
        texts = await asyncio.gather(*asked)
        return len(prompts) * count / (time.perf_counter() - start), texts

    learnt = Calibration()
    for level in levels:
        prompts, nobody = random_prompts(device, level, context), [list[Spoilt]() for _ in range(level)]
        asyncio.run(all_of(prompts, 2, nobody))
        plain, texts = asyncio.run(all_of(prompts, tokens, nobody))
        fast, other = asyncio.run(all_of(prompts, tokens, [[Spoilt(text, device.vocab)] for text in texts]))
        same = sum(bool(np.array_equal(a, b)) for a, b in zip(texts, other, strict=True))
        found[str(level)] = {"plain": plain, "speculative": fast, "identical": same}
        target.storage.forget()
    return found


# ---- the command


def geometric(mean: float) -> np.ndarray:
    """Accepted nodes of a thousand steps with this mean."""
    return np.random.default_rng(1).geometric(1 / (1 + mean), size=1000) - 1


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)


def measure(
    name: str, network: Any, levels: Sequence[int], context: int, tokens: int, accepted: np.ndarray | None, rounds: int
) -> dict[str, Any]:
    """Cost curves with both kinds of attention, and tokens/s with the quicker: replayed if `accepted` is given, and served."""
    positions = (max(levels) + 1) * (context + tokens + 64 + BLOCK)
    curves, failed, devices = dict[str, dict[int, float]](), dict[str, str](), dict[str, Device]()
    for kind, flexible in ATTENTIONS.items():
        try:
            devices[kind] = Device(network, flexible, positions)
            devices[kind].passes.warm_up()
            curves[kind] = cost_curve(devices[kind], context, rounds)
        except Exception as error:
            failed[kind] = repr(error)
    if not curves:
        raise RuntimeError(f"neither kind of attention ran: {failed}")
    show(
        f"{name}: ms of a pass", ["rows", *curves], [[rows, *(curve[rows] for curve in curves.values())] for rows in cuda.ROWS]
    )
    best = min(curves, key=lambda kind: sum(curves[kind].values()))
    device, curve = devices[best], curves[best]
    devices.clear()  # the other's memory goes
    figures: dict[str, Any] = {"rows_ms": curves, "attention": best, "failed": failed}
    if accepted is not None:
        figures["replayed"] = {}
        for level in levels:
            drafts = draft_length(curve, level, accepted)
            replayed(device, level, context, 4, drafts, accepted)  # graphs of these sizes are recorded
            speeds = [replayed(device, level, context, tokens, count, accepted) for count in (0, drafts)]
            figures["replayed"][str(level)] = {"drafts": drafts, "plain": speeds[0], "speculative": speeds[1]}
    figures["served"] = served(device, levels, context, tokens)
    for way in ("replayed", "served"):
        if way in figures:
            rows = [[at, *each.values()] for at, each in figures[way].items()]
            show(f"{name}: tokens/s, {way}, {best}", ["at once", *next(iter(figures[way].values()))], rows)
    return figures


def main(
    model: Annotated[Path | None, typer.Option(help="a safetensors folder to measure, too")] = None,
    accepted: Annotated[Path | None, typer.Option(help="a file of accepted nodes of steps, one a line")] = None,
    mean_accepted: Annotated[float, typer.Option(help="mean of the law that stands in for such a file")] = 1.5,
    context: Annotated[int, typer.Option(help="tokens of each prompt")] = 512,
    tokens: Annotated[int, typer.Option(help="new tokens of each sequence")] = 64,
    seconds: Annotated[float, typer.Option(help="time after which no further part begins")] = 400,
    cpu_tiny: Annotated[bool, typer.Option("--cpu-tiny", help="a tiny network on the CPU, to try the script")] = False,
) -> None:
    """Check, measure, print tables, then one line of JSON."""
    start = time.perf_counter()
    if not cpu_tiny and not torch.cuda.is_available():
        console.print("no CUDA device here; --cpu-tiny tries the script on the CPU")
        raise typer.Exit(2)
    device, dtype = torch.device("cpu" if cpu_tiny else "cuda"), torch.float32 if cpu_tiny else torch.bfloat16
    lengths = geometric(mean_accepted) if accepted is None else np.array([int(line) for line in accepted.read_text().split()])
    levels, rounds = ((1, 4), 1) if cpu_tiny else ((1, 4, 16, 64), 5)
    shape = ("LlamaConfig", TINY) if cpu_tiny else ("Qwen2Config", SEVEN_B)

    def whole(folder: Path) -> Any:
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=KEY, trust_remote_code=False, local_files_only=True, use_safetensors=True
        )
        return network.to(device).eval()

    def of_shape() -> dict[str, Any]:
        network = random_network(*shape, KEY, device, dtype)
        return measure("random weights", network, levels, context, tokens, lengths, rounds)

    parts: dict[str, Callable[[], dict[str, Any]]] = {"correctness": lambda: correctness(device), "random": of_shape}
    if model is not None:
        parts["model"] = lambda: measure(model.name, whole(model), levels, context, tokens, None, rounds)
    name = "CPU" if cpu_tiny else torch.cuda.get_device_name()
    figures: dict[str, Any] = {"device": name, "torch": torch.__version__, "left_out": [], "failed": {}}
    for part, run in parts.items():
        if time.perf_counter() - start > seconds:
            figures["left_out"].append(part)
            continue
        try:
            figures[part] = run()
        except Exception as error:
            figures["failed"][part] = repr(error)
            console.print_exception()
    if "correctness" in figures:
        show("correctness: largest difference", ["what", "difference"], list(figures["correctness"].items()))
        wrong = {what: value for what, value in figures["correctness"].items() if value > 1e-2 or (value and "choices" in what)}
        if wrong:
            figures["failed"]["correctness"] = wrong
    figures["seconds"] = time.perf_counter() - start
    print(json.dumps(figures))
    if figures["failed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
