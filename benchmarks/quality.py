"""How near int8 and bfloat16 are to one another on a text: perplexity, and how often the likeliest token is the same.

    python benchmarks/quality.py --model qwen2.5-coder-1.5b
    python benchmarks/quality.py --model smollm2-135m --dtypes float32,bfloat16,int8
    python benchmarks/quality.py --model smollm2-135m --parts --tokens 768

The text is this project's own, pages of docs/ and code of the engine, read as one stream by every dtype in turn. Agreement is
with the first dtype named. `--parts` asks instead where rounding hurts: in a float32 network, weights or activations of one
kind of layer at a time are rounded to 8 bits, as they are and spread (`kernels.spread`). Prints a table; the last line is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from _common import console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM

from engine.models import resolve
from engine.target.attention import Part, Pass
from engine.target.cache import KVStorage, KVTable
from engine.target.model import load
from engine.text import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("docs/lossless.md", "engine/acceptance.py", "docs/architecture.md", "engine/tree.py")
CHUNK = 128
KINDS = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("lm_head",),
}


@dataclass(frozen=True)
class Reading:
    """What a model made of a text of n tokens: float64 [n - 1] nats lost at every next token, int64 [n - 1] likeliest next."""

    losses: np.ndarray
    likeliest: np.ndarray

    def beside(self, reference: Reading) -> dict[str, float]:
        """Perplexity, its ratio to the reference's, and the share of positions where the likeliest token is the same."""
        return {
            "perplexity": float(np.exp(self.losses.mean())),
            "ratio": float(np.exp(self.losses.mean() - reference.losses.mean())),
            "agreement": float((self.likeliest == reference.likeliest).mean()),
        }


def losses(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Nats lost at the tokens that followed rows of logits."""
    wide = logits.astype(np.float64)
    top = wide.max(1)
    normal = top + np.log(np.exp(wide - top[:, None]).sum(1))
    found: np.ndarray = normal - wide[np.arange(len(following)), following]
    return found


def read(folder: Path, dtype: str, tokens: np.ndarray) -> Reading:
    """A text read by the worker's model, in chunks."""
    model = load(folder, dtype)
    storage = KVStorage(model.num_layers, model.kv_heads, model.head_dim, 1 << 30)
    table = KVTable(storage)
    lost, likeliest = [], []
    for first in range(0, len(tokens) - 1, CHUNK):
        some = tokens[first : min(first + CHUNK, len(tokens) - 1)]
        table.reserve(len(some))
        rows = np.arange(len(some), dtype=np.int32)
        logits = model.forward(some, Pass(storage, [Part(table, rows - 1)]), rows)
        table.keep(rows)
        lost.append(losses(logits, tokens[first + 1 : first + 1 + len(some)]))
        likeliest.append(logits.argmax(1))
    return Reading(np.concatenate(lost), np.concatenate(likeliest))


def spread(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., width] rotated as by `kernels.spread`, their length kept."""
    steps = x.shape[-1].bit_length() - 1
    for _ in range(steps):
        left, right = x[..., 0::2], x[..., 1::2]
        x = torch.cat([left + right, left - right], -1)
    return x * 2.0 ** (-steps / 2)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., width] in 255 steps, each of its own size."""
    step = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (x / step).round() * step


class RoundedLinear(nn.Module):
    """A linear layer in floating point, with weights or activations that have been rounded, spread before or not."""

    def __init__(self, layer: nn.Linear, weights: bool, activations: bool, spreading: bool) -> None:
        super().__init__()
        self._spreading, self._activations = spreading, activations
        weight = spread(layer.weight.detach()) if spreading else layer.weight.detach()
        self._weight, self._bias = rounded(weight) if weights else weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = spread(x) if self._spreading else x
        return nn.functional.linear(rounded(x) if self._activations else x, self._weight, self._bias)


@contextmanager
def exchanged(network: nn.Module, names: tuple[str, ...], weights: bool, activations: bool, spreading: bool) -> Iterator[None]:
    """The network with its linear layers of these names rounded, for a while."""
    old = [(name, module) for name, module in network.named_modules() if name.rpartition(".")[2] in names]
    for name, module in old:
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, RoundedLinear(module, weights, activations, spreading))
    yield
    for name, module in old:
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, module)


@torch.inference_mode()
def parts(folder: Path, tokens: np.ndarray) -> dict[str, Any]:
    """By kind of layer, and what of it is rounded: ratio of perplexities, mean divergence in nats from the float32 network."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.from_numpy(tokens.astype(np.int64))

    def law() -> torch.Tensor:
        found: torch.Tensor = network(ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        return found

    expected = law()
    figures: dict[str, Any] = {}
    table = Table("rounded", "", "ratio", "divergence", "spread: ratio", "divergence")
    every = tuple(name for names in KINDS.values() for name in names)
    for kind, names in {**KINDS, "all": every}.items():
        for what in ("weights", "activations", *(["both"] if kind == "all" else [])):
            cells = []
            for spreading in (False, True):
                with exchanged(network, names, what != "activations", what != "weights", spreading):
                    found = law()
                loss = (expected - found).gather(1, ids[1:, None]).mean()
                divergence = float((expected.exp() * (expected - found)).sum(1).mean())
                figures[f"{kind}: {what}{', spread' if spreading else ''}"] = [float(loss.exp()), divergence]
                cells += [f"{float(loss.exp()):.4f}", f"{divergence:.5f}"]
            table.add_row(kind, what, *cells)
    console.print(table)
    return figures


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtypes: Annotated[str, typer.Option(help="comma-separated; the first is what others are compared with")] = "bfloat16,int8",
    tokens: Annotated[int, typer.Option(help="how much of the text")] = 2048,
    by_parts: Annotated[bool, typer.Option("--parts", help="round one kind of layer at a time")] = False,
) -> None:
    """Measure, print the table, then one line of JSON."""
    folder = resolve(model)
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = np.array(Tokenizer.load(folder).encode(text)[:tokens], np.int32)
    figures: dict[str, Any] = {"model": model, "tokens": len(ids)}
    if by_parts:
        figures["parts"] = parts(folder, ids)
    else:
        table = Table("dtype", "perplexity", "ratio", "same likeliest token")
        reference: Reading | None = None
        for dtype in dtypes.split(","):
            found = read(folder, dtype, ids)
            reference = reference or found
            figures[dtype] = beside = found.beside(reference)
            table.add_row(dtype, f"{beside['perplexity']:.3f}", f"{beside['ratio']:.4f}", f"{beside['agreement']:.1%}")
        console.print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
