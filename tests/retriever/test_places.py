"""Where tokens stand and what follows them, without kernels: what trying every place finds, and a datastore with kernels."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.datastore import Datastore
from retriever.errors import FormatError
from retriever.places import Occurrence, places_in
from tests.retriever.oracles import places
from tests.retriever.test_ends import Documents, documents, written


def fields(found: list[Occurrence]) -> list[tuple[int, str, int, list[int], list[int]]]:
    return [(o.document, o.name, o.offset, o.before.tolist(), o.after.tolist()) for o in found]


@given(
    documents,
    st.sets(st.integers(0, 7)),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from([20, 1000]),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_it_finds_what_a_datastore_does(
    tmp_path_factory: pytest.TempPathFactory,
    texts: Documents,
    removed: set[int],
    key: list[int],
    segment_tokens: int,
    limit: int,
) -> None:
    """The same count, places and next tokens, which are those of trying all positions of the documents that are left."""
    path = written(tmp_path_factory.mktemp("p"), texts, removed, segment_tokens)
    tokens = np.array(key, np.int32)
    found = places_in(path, tokens)
    with Datastore.open(path) as store:
        assert found.count == store.count(tokens)
        assert fields(found.spread(limit, around=3)) == fields(store.search(tokens, limit, around=3))
        assert [a.tolist() for a in found.next_tokens()] == [a.tolist() for a in store.next_tokens(tokens)]
    expected = [(d, end) for d, end in places(texts, key) if d not in removed] if key else []
    assert found.count == len(expected)
    assert {(int(o.name), o.offset + len(key)) for o in found.spread(1000)} == set(expected)
    following = Counter(texts[d][end] for d, end in expected if end < len(texts[d]))
    assert dict(zip(*(a.tolist() for a in found.next_tokens()), strict=True)) == following


def test_what_is_no_text_is_found_nowhere(tmp_path: Path) -> None:
    """An empty key, and ids outside the vocabulary, of which one is the separator's."""
    path = written(tmp_path, [[1, 2, 3], []], set(), 1000)
    for key in ([], [-1], [1, 9], [255], [2**31 - 1]):
        found = places_in(path, np.array(key, np.int32))
        assert found.count == 0 and found.spread() == [] and [len(a) for a in found.next_tokens()] == [0, 0]


def test_beyond_a_block_of_what_is_left(tmp_path: Path) -> None:
    """With thousands of places of which a third is gone."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, 50).tolist() for _ in range(60)]
    path = written(tmp_path, texts, set(range(0, 60, 3)), 10_000)
    with Datastore.open(path) as store:
        for key in ([0], [3], [1, 2], [3, 3, 0]):
            tokens = np.array(key, np.int32)
            found = places_in(path, tokens)
            assert found.count == store.count(tokens) > 0
            assert fields(found.spread(40)) == fields(store.search(tokens, 40))
            assert [a.tolist() for a in found.next_tokens()] == [a.tolist() for a in store.next_tokens(tokens)]


def test_a_version_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """By the name of its file."""
    with pytest.raises(FormatError, match=r"manifest\.json"):
        places_in(tmp_path, np.array([1], np.int32))


def test_no_kernel_is_loaded() -> None:
    """A search does not wait for them."""
    code = "import sys, retriever.places, corpora.search; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
