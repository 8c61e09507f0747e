"""Learn what calibration begins with, `engine/prior.tsv`, from the standard library of the Python that runs this.

    python benchmarks/prior.py --out engine/prior.tsv

Half of the library's files, chosen by hash, are the corpus. The others, and the topics of Python's help (prose), are replayed
as requests: the first part of a text is the prompt, the next few hundred tokens the answer, one tenant for all. What
calibration has learned at the end is cut to rates by match length, which hold for other texts, and rounded. Nothing of the
texts is in it. Prints a table of how well it does on its own material, then one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import numpy as np
import typer
from replay import Turn, calibration_error, log_loss, replay

from corpora.build import build
from corpora.catalog import DEFAULT_TENANT, Catalog
from engine.calibration import Calibration
from engine.models import tokenizer_folder
from engine.prior import render
from engine.text import Tokenizer
from retriever.datastore import Datastore

_PROMPT = 600
_ANSWER = 200

_SOURCES = ("corpus", "prompt", "history")
"""Whose rates are shipped. `resume` does as well without, and what others need is not in a text."""


def turn(text: str, tokenizer: Tokenizer) -> Turn | None:
    """A text as a request; None for one too short."""
    ids = tokenizer.encode(text[:20_000])
    start = min(_PROMPT, len(ids) // 2)
    return Turn(ids[:start], ids[start : start + _ANSWER]) if start > 32 else None


def main(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("engine/prior.tsv"),
    model: Annotated[str, typer.Option(help="Whose tokenizer.")] = "qwen2.5-coder-1.5b",
    files: Annotated[int, typer.Option(help="Files to replay.")] = 120,
) -> None:
    """Replay, learn, write."""
    tokenizer = Tokenizer.load(tokenizer_folder(model))
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts)
    paths.sort(key=lambda path: hashlib.sha256(str(path.relative_to(library)).encode()).hexdigest())
    half = len(paths) // 2
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths[half : half + files]] + list(topics.values())
    turns = [made for text in texts if (made := turn(text, tokenizer)) is not None]
    calibration = Calibration()
    with tempfile.TemporaryDirectory() as folder:
        for i, path in enumerate(paths[:half]):
            shutil.copy(path, Path(folder) / f"{i}_{path.name}")
        with tempfile.TemporaryDirectory() as root:
            catalog = Catalog(Path(root))
            build("library", [folder], tokenizer, catalog)
            version = catalog.version_path("library", catalog.get("library", DEFAULT_TENANT).active.id)
            with Datastore.open(version, tokenizer.fingerprint, tokenizer.vocab_size) as store:
                found = replay(turns, {"library": store}, _SOURCES, 32, tokenizer.vocab_size, calibration)
    arrays = {name.replace("corpus:library", "corpus"): array for name, array in calibration.arrays().items()}
    out.write_text(render(arrays), encoding="utf-8")
    judged = np.concatenate(found.judged)
    figures = {
        "turns": len(turns),
        "tokens_per_step": round(found.tokens_per_step, 3),
        "calibration_error": round(calibration_error(judged[:, 0], judged[:, 2]), 4),
        "log_loss": round(log_loss(judged[:, 0], judged[:, 2]), 4),
        "log_loss_raw": round(log_loss(judged[:, 1], judged[:, 2]), 4),
    }
    for name, figure in figures.items():
        print(f"{name:20} {figure}")
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
