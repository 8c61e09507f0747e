"""A tree of awkward files: every one is handled as the tree's own manifest says, from decoding to the ids that are stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpora.build import BuildReport, build
from corpora.catalog import Catalog
from corpora.decisions import Reason
from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.survey import Found, Survey, explain
from engine.text import Tokenizer
from retriever.datastore import Datastore
from tests import tiny_tokenizers
from tests.corpora.trees import DATA

pytestmark = pytest.mark.skipif(
    not (DATA / "make_ugly_tree.py").exists(), reason="needs ../shared/data (not part of this repository)"
)

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
# What the manifest leaves open, and what holds here: named, so that a change of mind shows.
CHOICES = {
    "enc/utf16le_nobom.txt": Reason.DUPLICATE,
    "enc/utf16_odd_length.txt": Reason.UNDECODABLE,
    "enc/utf32.txt": Reason.DUPLICATE,
    "enc/nul_in_the_middle.py": Reason.BINARY,
    "lines/enormous_line.txt": Reason.TOO_LARGE,
    "lines/same_char.txt": Reason.TOO_LARGE,
    "lines/period_two.txt": Reason.MINIFIED,
    "lines/same_line.log": Reason.IGNORED,
    "lines/one_byte.py": None,
    "bin/text_then_binary.py": Reason.BINARY,
    "bin/printable_noise.py": Reason.MINIFIED,
    "bin/base64_blob.py": None,
    "deep/brackets.json": Reason.MINIFIED,
    "names/new\nline.py": Reason.DUPLICATE,
    "gen/rows.csv": None,
    "nb/huge_output.ipynb": None,
    "nb/format3.ipynb": None,
    "nb/broken.ipynb": Reason.MALFORMED,
    "secrets/config.py": Reason.SECRET,
    "vendor/lib/lib.go": Reason.VENDORED,
}


@pytest.fixture(scope="module")
def ugly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `tree/` and MANIFEST.json."""
    folder = tmp_path_factory.mktemp("ugly") / "ugly"
    command = [sys.executable, DATA / "make_ugly_tree.py", folder, "--fifo"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def rows(ugly: Path) -> list[dict[str, Any]]:
    """The manifest; its own ignore file rules out logs, whatever it expects of them."""
    rows: list[dict[str, Any]] = json.loads((ugly / "MANIFEST.json").read_text(encoding="utf-8"))
    return [{**row, "expect": "skip"} if row["path"].endswith(".log") else row for row in rows]


@pytest.fixture(scope="module")
def found(ugly: Path) -> dict[str, Found]:
    options = BuildOptions()
    return {f.decision.name: f for f in Survey(open_sources([str(ugly / "tree")], options), options)}


@pytest.fixture(scope="module")
def report(ugly: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    catalog = Catalog(tmp_path_factory.mktemp("store"))
    return build("ugly", [ugly / "tree"], TOKENIZER, catalog)


def decided(found: dict[str, Found], path: str) -> Found | None:
    """What was found for a path, or for a folder above it."""
    return found.get(path) or next((f for name, f in found.items() if name.endswith("/") and path.startswith(name)), None)


def test_every_entry_is_handled_as_its_manifest_says(found: dict[str, Found], rows: list[dict[str, Any]]) -> None:
    """Text is taken, what is to be skipped is, and nothing is overlooked."""
    wrong = []
    for row in rows:
        outcome = decided(found, row["path"])
        if outcome is None or (row["expect"] != "either" and outcome.decision.taken != row["expect"].startswith("text")):
            wrong.append((row["path"], row["expect"], outcome and outcome.decision))
    assert not wrong and len(rows) >= 421


def test_what_the_manifest_leaves_open_is_decided(found: dict[str, Found], rows: list[dict[str, Any]]) -> None:
    """And does not change by accident."""
    outcomes = {row["path"]: decided(found, row["path"]) for row in rows if row["path"] in CHOICES}
    assert {path: f.decision.reason for path, f in outcomes.items() if f} == CHOICES


def test_nothing_outside_the_tree_is_read(found: dict[str, Found]) -> None:
    """No text of a link's target is there."""
    texts = [document.content for f in found.values() for document in f.documents]
    assert texts and not any("LEAK" in text for text in texts if isinstance(text, str))


def test_copies_and_twins_are_stored_once(found: dict[str, Found]) -> None:
    """Exact copies, and files that are equal once line ends are."""
    copies = {name for name, f in found.items() if f.decision.reason is Reason.DUPLICATE}
    assert len({f"dup/copy_{i:02}.py" for i in range(20)} - copies) == 1
    twins = {"lines/crlf.py", "lines/cr_only.py", "lines/lf_twin.py"}
    assert len(twins - copies) == 1


def test_near_copies_are_found_if_wanted(ugly: Path) -> None:
    """All forty that differ in a line; of those that share a licence header, only what hardly differs beside it."""
    options = BuildOptions(near_duplicates=True, include=("dup/*", "license/*"))
    near = {f.decision.name: f.decision.reason for f in Survey(open_sources([str(ugly / "tree")], options), options)}
    assert sum(reason is Reason.NEAR_DUPLICATE for name, reason in near.items() if name.startswith("dup/near")) == 40
    assert sum(reason is not None for name, reason in near.items() if name.startswith("license/")) <= 5


def test_secrets_are_not_stored(ugly: Path, found: dict[str, Found]) -> None:
    """Whole files by name; of code, the lines that hold a token of a known form."""
    code = found["secrets/config.py"]
    stored = "".join(str(document.content) for document in code.documents)
    lines = (ugly / "tree/secrets/config.py").read_text().splitlines()
    assert {line.split(" = ")[0] for line in lines if line and " = " in line and line[0].isupper() and line not in stored} == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "OPENAI_API_KEY",
        "SLACK_TOKEN",
        "GOOGLE_KEY",
        "HUB_TOKEN",
        "JWT",
    }
    assert "AWS access key in line 3" in code.decision.detail and code.decision.taken


def test_explain_agrees(ugly: Path, found: dict[str, Found]) -> None:
    """With what a survey says of the same file."""
    for name in ("enc/latin1.py", "links/outside", "gen/package-lock.json", "dup/copy_03.py"):
        decision = explain(str(ugly / "tree" / name), [str(ugly / "tree")])
        assert decision and decision.reason is found[name].decision.reason


def test_what_is_stored_is_what_was_found(report: BuildReport, found: dict[str, Found]) -> None:
    """Each document's ids decode to its text; strings that look like control tokens are made of ordinary ones."""
    texts = {document.name: document.content for f in found.values() for document in f.documents}
    with Datastore.open(report.path) as datastore:
        stored = {datastore.document_name(i): datastore.document_tokens(i) for i in range(datastore.num_documents)}
    assert stored.keys() == texts.keys()
    for name, ids in stored.items():
        assert TOKENIZER.decode(ids) == texts[name]
        assert not np.isin(ids, list(TOKENIZER.special_ids)).any()
    assert "<|im_end|>" in TOKENIZER.decode(stored["uni/special_tokens.md"])
    assert report.documents == len(stored) and report.skipped[Reason.SPECIAL_FILE] == 1
