"""Looking inside a datastore: where something occurs, what follows it, how much of it repeats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever.datastore import Datastore
from retriever.update import write_update
from tests.retriever.conftest import Build
from tests.retriever.oracles import places


def ids(*tokens: int) -> np.ndarray:
    """A key."""
    return np.array(tokens, np.int32)


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    """Repetitive text of six tokens."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 6, rng.integers(0, 40)).tolist() for _ in range(30)]


@pytest.fixture(params=["one segment", "many segments", "some deleted"])
def store(request: pytest.FixtureRequest, build: Build, documents: list[list[int]]) -> Datastore:
    """The documents, laid out in several ways."""
    if request.param != "some deleted":
        return build(documents, **({"segment_tokens": 60} if request.param == "many segments" else {}))
    base = build([*documents, [1, 2, 3] * 20, [5] * 40]).path
    deleted = {"doc30.txt", "doc31.txt"}
    return Datastore.open(write_update(base.parents[2], "corpus", "updated", base, [], removed=deleted, most_deleted=1))


def test_every_place_is_found(store: Datastore, documents: list[list[int]]) -> None:
    """With room for all, the places are those of trying every position, with what stands around them."""
    for key in ([0], [1, 2], [5, 5, 5], [4, 0, 3, 1]):
        expected = [(d, end - len(key)) for d, end in places(documents, key)]
        found = store.search(ids(*key), 1000, around=3)
        assert [(int(o.name[3:-4]), o.offset) for o in found] == sorted(expected)
        assert store.count(ids(*key)) == len(expected)
        for o in found:
            text = documents[int(o.name[3:-4])]
            assert store.document_name(o.document) == o.name
            assert o.before.tolist() == text[max(0, o.offset - 3) : o.offset]
            assert o.after.tolist() == text[o.offset + len(key) :][:3]


def test_a_few_places_are_spread_over_all(store: Datastore) -> None:
    """A limit is kept, and the places kept are different ones."""
    found = store.search(ids(2), 7)
    assert len({(o.document, o.offset) for o in found}) == 7
    assert len({o.document for o in found}) > 3


def test_next_tokens_are_counted_exactly(store: Datastore, documents: list[list[int]]) -> None:
    """Tokens and counts are those of trying every position, the most frequent first; ends of documents count for nothing."""
    for key in ([0], [1, 2], [5, 5, 5], [4, 0, 3, 1]):
        expected = Counter(documents[d][end] for d, end in places(documents, key) if end < len(documents[d]))
        tokens, counts = store.next_tokens(ids(*key))
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected
        assert counts.tolist() == sorted(counts.tolist(), reverse=True)


def test_what_is_no_text_is_found_nowhere(store: Datastore) -> None:
    """An empty key, ids outside the vocabulary and strings that do not occur."""
    for key in (ids(), ids(-1), ids(1, 1000, 1), ids(255), ids(7, 7)):
        assert store.search(key) == []
        assert store.count(key) == 0
        assert [len(a) for a in store.next_tokens(key)] == [0, 0]


def test_a_large_interval_is_sampled_evenly(build: Build) -> None:
    """Drafts of a context with 20,000 occurrences have the exact shares of its next tokens to within two samples of 64.

    The chance of something not seen left aside.
    """
    rng = np.random.default_rng(1)
    followers = rng.zipf(1.5, 20_000) % 40
    store = build([[50, follower] for follower in followers.tolist()], segment_tokens=15_000)
    tokens, counts = store.next_tokens(ids(50))
    shares = dict(zip(tokens.tolist(), (counts / counts.sum()).tolist(), strict=True))
    assert counts.sum() == 20_000
    found = store.lookup(ids(50), 64, depth=1, samples=64)
    assert set(found.counts.tolist()) == {20_000}
    for token, prob in zip(found.tokens.tolist(), (found.probs / found.probs.sum()).tolist(), strict=True):
        assert abs(prob - shares[token]) < 2 / 64


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_suffix_statistics_are_means(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    """Every suffix finds what trying all positions finds, itself left out: figures lie between least and most."""
    from retriever.format import write_version

    named = [(str(i), np.array(tokens, np.int32)) for i, tokens in enumerate(documents)]
    path = write_version(tmp_path_factory.mktemp("s"), "c", "v", named, fingerprint="", vocab_size=9)
    with Datastore.open(path) as store:
        statistics = store.suffix_statistics((1, 2, 5), samples=30)
    assert [s.length for s in statistics] == [n for n in (1, 2, 5) if n in {s.length for s in statistics}]
    for s in statistics:
        keys = [text[i : i + s.length] for text in documents for i in range(len(text) - s.length + 1)]
        others = [len(places(documents, key)) - 1 for key in keys]
        assert min(others) <= s.mean_found <= max(others)
        assert (s.share_found > 0) <= (max(others) > 0)
        assert (s.share_found == 1) >= (min(others) > 0)


def test_suffix_statistics_of_a_text_that_repeats(build: Build) -> None:
    """Two equal halves: every suffix is found once more, and lengths beyond the documents are not reported."""
    text = list(range(20))
    statistics = build([text, text]).suffix_statistics((1, 4, 30), samples=50)
    assert [(s.length, s.share_found, s.mean_found, s.median_found) for s in statistics] == [(1, 1, 1, 1), (4, 1, 1, 1)]
    assert build([]).suffix_statistics() == []


def test_a_place_is_one_of_the_longest_end(store: Datastore, documents: list[list[int]]) -> None:
    """What stands around it is what stands around one of the places of the longest end that occurs, within its document."""
    rng = np.random.default_rng(4)
    for _ in range(60):
        context = rng.integers(0, 7, rng.integers(0, 9)).tolist()
        match = store.longest_match(ids(*context), max_length=6)
        found = store.place(ids(*context), min_length=3, max_length=6, before=4, after=5)
        assert (found is not None) == (match.length >= 3)
        if found is not None:
            ends = places(documents, context[len(context) - match.length :])
            around = [(documents[d][max(0, end - 4) : end + 5], min(end, 4)) for d, end in ends]
            assert (found.tokens.tolist(), found.at) in around
