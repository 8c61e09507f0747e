"""What ends of a text find elsewhere in it, without kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.ends import count, statistics_of
from retriever.errors import FormatError
from retriever.format import Manifest, write_version
from retriever.segment import open_segments
from retriever.suffixes import pack_tokens
from retriever.update import write_update
from tests.retriever.oracles import places

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=8)


def written(root: Path, texts: Documents, removed: set[int], segment_tokens: int) -> Path:
    """A version of some documents from which some were deleted, which stay on disk."""
    named = [(str(i), np.array(tokens, np.int32)) for i, tokens in enumerate(texts)]
    base = write_version(root, "c", "v", named, fingerprint="", vocab_size=9, segment_tokens=segment_tokens)
    return write_update(root, "c", "w", base, [], removed={str(i) for i in removed}, most_deleted=1.0)


@given(documents, st.sets(st.integers(0, 7)), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from([20, 1000]))
@settings(max_examples=40, deadline=None)
def test_counts_are_exact(
    tmp_path_factory: pytest.TempPathFactory, texts: Documents, removed: set[int], key: list[int], segment_tokens: int
) -> None:
    """What trying all positions finds in the documents that are left, over all segments."""
    path = written(tmp_path_factory.mktemp("e"), texts, removed, segment_tokens)
    left = [tokens for i, tokens in enumerate(texts) if i not in removed]
    segments = open_segments(path, Manifest.read(path))
    assert sum(count(segment, pack_tokens(np.array(key), 1).tobytes()) for segment in segments) == len(places(left, key))


def test_counts_are_exact_beyond_a_block(tmp_path: Path) -> None:
    """With more suffixes than are counted together, and a third of the documents gone."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, 50).tolist() for _ in range(60)]
    removed = set(range(0, 60, 3))
    path = written(tmp_path, texts, removed, 10_000)
    (segment,) = open_segments(path, Manifest.read(path))
    assert len(segment.left)
    left = [tokens for i, tokens in enumerate(texts) if i not in removed]
    for key in ([0], [3], [1, 2], [3, 3, 0], [2, 2, 2, 2, 2, 2, 2, 2]):
        assert count(segment, bytes(key)) == len(places(left, key))


def test_what_is_deleted_is_neither_asked_nor_found(tmp_path: Path) -> None:
    """Of three equal documents and one of its own, one copy and the odd one are gone."""
    text = list(range(8))
    path = written(tmp_path, [text, text, text, [8] * 40], {1, 3}, 1000)
    found = statistics_of(path, (1, 4, 30), samples=40)
    assert [(s.length, s.share_found, s.mean_found, s.median_found) for s in found] == [(1, 1, 1, 1), (4, 1, 1, 1)]
    assert [s.num_samples == 40 for s in found] == [True, False], "in four places of eight no four tokens have been seen"


def test_a_version_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """By the name of its file."""
    with pytest.raises(FormatError, match=r"manifest\.json"):
        statistics_of(tmp_path, (1,))


def test_no_kernel_is_loaded() -> None:
    """A look at a corpus does not wait for them."""
    code = "import sys, retriever.ends; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
