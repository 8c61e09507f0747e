"""How near int8 and bfloat16 are to one another on a text: perplexity, and how often the likeliest token is the same.

    python benchmarks/quality.py --model qwen2.5-coder-1.5b
    python benchmarks/quality.py --model smollm2-135m --dtypes float32,bfloat16,int8

The text is this project's own, pages of docs/ and code of the engine, read as one stream by every dtype in turn. Agreement is
with the first dtype named. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from _common import console
from rich.table import Table

from engine.app import prepare_process
from engine.models import resolve
from engine.target.attention import Part, Pass
from engine.target.cache import KVStorage, KVTable
from engine.target.model import load
from engine.text import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("docs/lossless.md", "engine/acceptance.py", "docs/architecture.md", "engine/tree.py")
CHUNK = 128


def read(folder: Path, dtype: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(negative log-likelihood of every token but the first, likeliest token after every token but the last)."""
    model = load(folder, dtype)
    storage = KVStorage(model.num_layers, model.kv_heads, model.head_dim, 1 << 30)
    table = KVTable(storage)
    losses, likeliest = [], []
    for first in range(0, len(tokens) - 1, CHUNK):
        some = tokens[first : min(first + CHUNK, len(tokens) - 1)]
        table.reserve(len(some))
        rows = np.arange(len(some), dtype=np.int32)
        logits = model.forward(some, Pass(storage, [Part(table, rows - 1)]), rows).astype(np.float64)
        table.keep(rows)
        top = logits.max(1)
        normal = top + np.log(np.exp(logits - top[:, None]).sum(1))
        losses.append(normal - logits[rows, tokens[first + 1 : first + 1 + len(some)]])
        likeliest.append(logits.argmax(1))
    return np.concatenate(losses), np.concatenate(likeliest)


def main(
    model: Annotated[str, typer.Option(help="a model name, folder or file")] = "smollm2-135m",
    dtypes: Annotated[str, typer.Option(help="comma-separated; the first is what others are compared with")] = "bfloat16,int8",
    tokens: Annotated[int, typer.Option(help="how much of the text")] = 2048,
) -> None:
    """Measure, print the table, then one line of JSON."""
    prepare_process()
    folder = resolve(model)
    text = "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = np.array(Tokenizer.load(folder).encode(text)[:tokens], np.int32)
    table = Table("dtype", "perplexity", "ratio", "same likeliest token")
    figures: dict[str, Any] = {"model": model, "tokens": len(ids)}
    reference: tuple[np.ndarray, np.ndarray] | None = None
    for dtype in dtypes.split(","):
        found = read(folder, dtype, ids)
        reference = reference or found
        ratio = float(np.exp(found[0].mean() - reference[0].mean()))
        agreement = float((found[1] == reference[1]).mean())
        perplexity = float(np.exp(found[0].mean()))
        figures[dtype] = {"perplexity": perplexity, "ratio": ratio, "agreement": agreement}
        table.add_row(dtype, f"{perplexity:.3f}", f"{ratio:.4f}", f"{agreement:.1%}")
    console.print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
