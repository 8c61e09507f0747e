"""Small corpora for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retriever import format as corpus_format
from retriever.datastore import Datastore

Build = Callable[..., Datastore]


def know_all_contexts(patch: pytest.MonkeyPatch) -> None:
    """Let even rare contexts be in the tables, which of a small corpus know nothing else."""
    patch.setattr(corpus_format, "_TABLE_MIN_COUNT", 1)
    patch.setattr(corpus_format, "_CONTINUED_MIN_COUNT", 1)
    patch.setattr(corpus_format, "_CONTINUATION_BYTES", 100)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Write documents (token lists) as one more version of a corpus, and open it."""
    versions = iter(range(1000))

    def write(documents: Sequence[Sequence[int]], *, vocab_size: int = 100, **options: Any) -> Datastore:
        named = [(f"doc{i}.txt", np.array(tokens, np.int32)) for i, tokens in enumerate(documents)]
        version = f"v{next(versions)}"
        path = corpus_format.write_version(
            tmp_path, "corpus", version, named, fingerprint="words", vocab_size=vocab_size, **options
        )
        return Datastore.open(path)

    return write
