"""What a command loads before it has anything to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import start
from tests import tiny_tokenizers
from tests.corpora.trees import plant

ROOT = Path(start.__file__).resolve().parents[1]
HEAVY = {"google", "grpc", "jinja2", "numba", "numpy", "sqlite_utils", "tokenizers", "torch", "transformers"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Folders of this test's own."""
    folders = {"DRAFTLOOM_CACHE": str(tmp_path / "cache"), "DRAFTLOOM_HOME": str(tmp_path / "corpora"), "HOME": str(tmp_path)}
    return {**os.environ, **folders}


def loaded_by(environment: dict[str, str], *words: str) -> set[str]:
    """Those of HEAVY that a command has loaded when it ends."""
    code = (
        f"import sys; sys.argv[1:] = {words!r}; from engine import start\n"
        "try:\n    start.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print(*({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "serve --help",
        "generate --help",
        "model list",
        "corpus --help",
        "corpus update --help",
        "corpus list --json",
    ],
)
def test_help_and_lists_load_nothing_heavy(environment: dict[str, str], words: str) -> None:
    """Who asks what there is waits for neither arrays, kernels, the network nor models."""
    assert loaded_by(environment, *words.split()) == set()


def test_looking_after_a_corpus_loads_no_kernels(environment: dict[str, str], tmp_path: Path) -> None:
    """Small builds and updates, `show` and `search` need arrays and the tokenizer, and the first build what makes tables."""
    model = tiny_tokenizers.write_model_folder(tmp_path / "model")
    tree = plant(tmp_path / "tree", {"a.py": "def first(second):\n    return second\n"})
    expected = {"numpy", "tokenizers"}
    assert loaded_by(environment, "corpus", "build", "code", str(tree), "--model", str(model)) == {*expected, "sqlite_utils"}
    plant(tree, {"b.py": "def third(fourth):\n    return fourth\n"})
    assert loaded_by(environment, "corpus", "update", "code") == expected
    assert loaded_by(environment, "corpus", "search", "code", " return") == expected
    assert loaded_by(environment, "corpus", "show", "code") <= expected
    assert loaded_by(environment, "corpus", "list") == set()
