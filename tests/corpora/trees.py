"""Small trees of files for tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from corpora.decisions import Decision
from corpora.inputs import open_sources
from corpora.options import BuildOptions

DATA = Path(__file__).resolve().parents[2] / "../shared/data"


def plant(root: Path, files: dict[str, str | bytes]) -> Path:
    """Write `files` below `root`; returns `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def git(folder: Path, *command: str) -> None:
    """Run git in `folder`, under no configuration but its own. Skips the test where there is no git."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org", "-c", "init.defaultBranch=main"]
    try:
        subprocess.run(["git", *identity, *command], cwd=folder, env=environment, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs git")


def taken(*paths: Path, **options: list[str]) -> list[str]:
    """The names of the candidates, in order."""
    return [decision.name for decision in listed(*paths, **options) if decision.taken]


def reasons(*paths: Path, **options: list[str]) -> dict[str, str]:
    """name -> reason of everything that is not a candidate."""
    return {decision.name: str(decision.reason) for decision in listed(*paths, **options) if not decision.taken}


def listed(*paths: Path, **options: list[str]) -> Iterator[Decision]:
    """What names and metadata say about everything below `paths`, in order."""
    chosen = BuildOptions(**{key: tuple(value) for key, value in options.items()})
    for source in open_sources([str(path) for path in paths], chosen):
        for entry in source.entries():
            yield entry.decision
