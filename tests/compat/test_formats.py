"""Corpora of every format there was open for ever; each was written by the release that had it.

`format-2` is an update of a corpus with one document more, which began "A draft is a horse".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retriever.datastore import Datastore
from retriever.format import MANIFEST, read_metadata
from retriever.update import write_update
from tests.retriever.oracles import paths_of

HERE = Path(__file__).parent
FORMATS = sorted(HERE.glob("format-*"))


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_it_opens_and_answers(path: Path) -> None:
    """An old corpus (chapters of a text, one token a byte) is whole, checks clean, and says what follows."""
    with Datastore.open(path, fingerprint="bytes") as store:
        assert store.manifest.format_version == int(path.name.removeprefix("format-"))
        assert (store.num_documents, store.num_tokens, store.manifest.num_segments) == (4, 2031, 2)
        assert store.check(full=True) == []
        assert store.document_name(0) == "part-0.md"
        assert bytes(store.document_tokens(0).astype(np.uint8)).startswith(b"# Contributing")
        found = store.lookup(np.frombuffer(b"A draft is a h", np.uint8).astype(np.int32), 64)
        assert tuple(b"int") in paths_of(found)
        assert tuple(b"orse") not in paths_of(found)
        assert read_metadata(path) == (b"kept beside" if path.name == "format-2" else b"")


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_it_can_be_updated(path: Path, tmp_path: Path) -> None:
    """A version made from an old corpus is of the present format, and shares the old files."""
    with Datastore.open(path) as old:
        names = [document.name for document in old.documents()]
    version = write_update(tmp_path, "corpus", "v2", path, [("new.md", np.arange(10))], removed={names[0]}, most_deleted=1)
    with Datastore.open(version) as store:
        assert {document.name for document in store.documents()} == {*names[1:], "new.md"}
        assert store.check(full=True) == []
    assert '"format_version": 3' in (version / MANIFEST).read_text()
