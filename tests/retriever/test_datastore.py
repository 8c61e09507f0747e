"""A corpus on disk, asked what followed a context."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever import format as corpus_format
from retriever import kernels, plain
from retriever.continuations import Continuations, Match
from retriever.datastore import Datastore
from retriever.errors import Closed, TokenizerMismatch
from retriever.format import build_continuations, build_suffix_order, build_table, find_frequent
from retriever.suffixes import pack_tokens, separator_of, token_width
from tests.retriever import oracles
from tests.retriever.conftest import Build
from tests.retriever.oracles import assert_blended, datastore_rows, paths_of

documents_of_few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=15), min_size=1, max_size=5)
contexts = st.lists(st.integers(0, 3), max_size=10)


class Segments:
    """The arrays of segments, made in memory; what the kernels see of a datastore."""

    def __init__(self, parts: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> None:
        self.width = token_width(vocab_size)
        self.vocab_size = vocab_size
        self.arrays = []
        for documents in parts:
            tokens = [token for text in documents for token in [*text, separator_of(self.width)]]
            text = pack_tokens(np.array(tokens, np.int64), self.width)
            order = build_suffix_order(text, self.width)
            frequent = find_frequent(text, self.width, order)
            table, _ = build_table(text, self.width, order, frequent)
            contexts, runs = build_continuations(text, self.width, order, frequent)
            self.arrays.append((text, order, table, contexts, runs, plain.sample_order(text, self.width, order)))
        self.described = np.stack([kernels.describe(*arrays) for arrays in self.arrays])

    def longest_match(self, context: Sequence[int], max_length: int) -> tuple[int, int]:
        """(length, count)"""
        key = np.array(context, np.int32)
        limit = kernels.usable_length(key, self.vocab_size, max_length)
        return kernels.longest(self.described, self.width, key, limit)

    def lookup(self, context: Sequence[int], budget: int) -> Continuations:
        """At depth 6, nothing sampled."""
        key, nodes = np.array(context, np.int32), Continuations.room(budget)
        num_nodes = kernels.lookup(self.described, self.width, self.vocab_size, key, 32, 200, 3, 6, 0, *nodes)
        return Continuations.of(nodes, num_nodes)


@pytest.mark.parametrize("vocab_size", [4, 4000, 151_936, 1 << 24])
@given(documents=documents_of_few_tokens, context=contexts)
def test_longest_match_is_that_of_trying_all(vocab_size: int, documents: list[list[int]], context: list[int]) -> None:
    """For tokens of every width, length and count are those of trying every length at every position."""
    assert Segments([documents], vocab_size).longest_match(context, 8) == oracles.longest_match(documents, context, 8)


@given(documents=documents_of_few_tokens, context=contexts)
def test_the_table_changes_nothing(documents: list[list[int]], context: list[int]) -> None:
    """A table that knows even rare contexts leads to the same matches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_format, "_TABLE_MIN_COUNT", 1)
        segments = Segments([documents], 4)
    assert segments.longest_match(context, 8) == oracles.longest_match(documents, context, 8)


@given(documents=documents_of_few_tokens, context=contexts, budget=st.integers(0, 20))
def test_lookup_blends_the_classes(documents: list[list[int]], context: list[int], budget: int) -> None:
    """Where nothing is sampled, the answer is the blend of the longest match and the shorter ones that occur twice as often."""
    found = Segments([documents], 4).lookup(context, budget)
    assert_blended(found, datastore_rows(documents, context, 32, 3, 6), budget)


@given(st.integers(0, 10_000), st.integers(1, 32), st.integers(1, 60))
def test_long_matches_and_what_lies_below_them(seed: int, length: int, budget: int) -> None:
    """Where a long end occurs once or twice, a much shorter one may be the next class: lengths that cannot be one are passed
    over, and none that can."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 3, rng.integers(1, 14)).tolist() for _ in range(5)]
    documents = [[token for p in rng.integers(0, 5, 6) for token in phrases[p]] for _ in range(4)]
    text = documents[rng.integers(4)]
    end = int(rng.integers(1, len(text) + 1))
    context = text[max(0, end - length) : end]
    assert_blended(
        Segments([documents[:3], documents[3:]], 4).lookup(context, budget),
        datastore_rows(documents, context, 32, 3, 6),
        budget,
    )


@given(documents=documents_of_few_tokens, context=contexts, cut=st.integers(0, 5))
def test_segments_add_up(documents: list[list[int]], context: list[int], cut: int) -> None:
    """Where nothing is sampled, it does not matter how documents are spread over segments."""
    one = Segments([documents], 4)
    two = Segments([documents[:cut], documents[cut:]], 4)
    assert one.longest_match(context, 8) == two.longest_match(context, 8)
    left, right = one.lookup(context, 20), two.lookup(context, 20)
    for field in ("tokens", "parents", "probs", "lengths", "counts"):
        assert getattr(left, field).tolist() == getattr(right, field).tolist()


def test_a_corpus_with_many_segments(build: Build) -> None:
    """Written in pieces of 40 tokens, a corpus answers as if it were one piece, and keeps its documents."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5, rng.integers(0, 30)).tolist() for _ in range(30)]
    whole, pieces = build(documents), build(documents, segment_tokens=40)
    assert whole.manifest.num_segments == 1
    assert pieces.manifest.num_segments > 5
    assert pieces.check(full=True) == []
    for i, tokens in enumerate(documents):
        assert pieces.document_name(i) == f"doc{i}.txt"
        assert pieces.document_tokens(i).tolist() == tokens
        context = np.array(tokens[:6], np.int32)
        assert pieces.longest_match(context) == whole.longest_match(context)
        assert paths_of(pieces.lookup(context, 16, samples=1000)) == paths_of(whole.lookup(context, 16, samples=1000))
    with pytest.raises(IndexError, match="30"):
        pieces.document_name(30)
    with pytest.raises(IndexError, match="-1"):
        pieces.document_name(-1)


def test_a_sample_has_the_shares_of_the_whole(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of 6000 occurrences, at an even stride over several segments, give every share to within a sample or two.

    The tables have no room for what follows the token.
    """
    monkeypatch.setattr(corpus_format, "_CONTINUATION_BYTES", 0)
    shares = {1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}
    rng = np.random.default_rng(7)
    followers = rng.choice(list(shares), 6000, p=list(shares.values())).tolist()
    documents = [[token for follower in followers[i : i + 100] for token in (9, follower)] for i in range(0, 6000, 100)]
    store = build(documents, segment_tokens=5000)
    assert store.manifest.num_segments > 1
    found = store.lookup(np.array([9], np.int32), 8, classes=1, depth=1, samples=64)
    assert found.counts.tolist() == [6000] * 4
    assert found.probs.sum() == pytest.approx(64 / (64 + 4))
    for token, prob in zip(found.tokens.tolist(), found.probs.tolist(), strict=True):
        assert abs(prob * 68 / 64 - followers.count(token) / 6000) < 2 / 64


@pytest.mark.parametrize(("bytes_a_token", "num_seen"), [(0, 60), (0.08, 58)])
def test_counts_of_a_sampled_class_stay_exact(
    build: Build, monkeypatch: pytest.MonkeyPatch, bytes_a_token: float, num_seen: int
) -> None:
    """Occurrences of the longer class leave the sample of the shorter one, and those left share its exact count.

    With or without tables that know what follows.
    """
    monkeypatch.setattr(corpus_format, "_CONTINUATION_BYTES", bytes_a_token)
    documents = [[5, 9, 1]] * 10 + [[6, 9, 2]] * 990
    found = build(documents).lookup(np.array([5, 9], np.int32), 2, samples=50)
    by_token = dict(zip(found.tokens.tolist(), found.probs.tolist(), strict=True))
    trust = num_seen / (num_seen + 2)
    assert by_token == pytest.approx({1: 10 / 11 + trust * 0.01 / 11, 2: trust * 0.99 / 11}, abs=1e-5)


def test_size_on_disk(build: Build) -> None:
    """At most 8 bytes a token for a vocabulary of 150 thousand, at most 7 below 65 thousand, names and table included."""
    rng = np.random.default_rng(0)
    text = rng.zipf(1.3, 60_000) % 60_000
    for vocab_size, most in ((151_936, 8), (60_000, 7)):
        store = build([text[i : i + 500].tolist() for i in range(0, 60_000, 500)], vocab_size=vocab_size)
        assert sum(file.stat().st_size for file in store.path.iterdir()) / store.num_tokens < most
        assert store.check(full=True) == []


def test_a_damaged_table_points_nowhere_else() -> None:
    """Whatever stands in the table's slots, an interval it yields lies in the order."""
    segments = Segments([[[1, 2, 1, 2, 1, 2, 1, 2] * 5]], 4)
    text, order, table, _, _, samples = segments.arrays[0]
    assert np.count_nonzero(table[:, 2]) == 6
    key, words = np.array([1], np.int32), np.empty(1, np.uint64)
    expected = kernels.find_interval(text, segments.width, order, table, samples, key, words)
    for low, count in ((0, 2**32 - 1), (2**32 - 1, 1), (len(order), 1), (1, len(order)), (2**32 - 1, 2**32 - 1)):
        damaged = table.copy()
        damaged[table[:, 2] > 0, 1:] = low, count
        assert kernels.find_interval(text, segments.width, order, damaged, samples, key, words) == expected
    damaged = table.copy()
    damaged[:, 2] = 1  # no slot is empty any more: the search still ends
    kernels.find_interval(text, segments.width, order, damaged, samples, np.array([3], np.int32), words)


def test_what_it_says_of_itself(build: Build) -> None:
    """Name, version, tokenizer and counts are those it was written with."""
    with build([[1, 2, 3], [], [4]]) as store:
        assert (store.name, store.version, store.fingerprint, store.vocab_size) == ("corpus", "v0", "words", 100)
        assert (store.num_documents, store.num_tokens) == (3, 4)


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_empty_corpus_answers_nothing(build: Build, documents: list[list[int]]) -> None:
    """Without tokens there are no matches, and nothing is wrong."""
    store = build(documents)
    assert store.longest_match(np.array([1], np.int32)) == Match(0, 0)
    assert len(store.lookup(np.array([1], np.int32), 8)) == 0
    assert store.check(full=True) == []


def test_another_tokenizer_is_refused(build: Build) -> None:
    """A fingerprint that differs, or a vocabulary too small for the corpus, is named with what to do."""
    path = build([[1]]).path
    with pytest.raises(
        TokenizerMismatch, match=r"'corpus' was built with another tokenizer: words \(asked for: bytes\).*corpus build"
    ):
        Datastore.open(path, fingerprint="bytes")
    with pytest.raises(TokenizerMismatch, match="beyond the model's 99: 100"):
        Datastore.open(path, vocab_size=99)
    assert Datastore.open(path, fingerprint="words", vocab_size=5000).num_tokens == 1


@pytest.mark.parametrize("name", ["max_length", "samples", "classes", "depth"])
def test_senseless_arguments_are_refused_by_name(build: Build, name: str) -> None:
    """A size below 1 is a mistake of the caller."""
    store = build([[1, 2]])
    with pytest.raises(ValueError, match=f"{name} must be at least 1: 0"):
        store.lookup(np.array([1], np.int32), 4, **{name: 0})


def test_closed_means_closed(build: Build) -> None:
    """After `close`, twice or once, every question is refused."""
    store = build([[1, 2]])
    store.close()
    store.close()
    for ask in (lambda: store.lookup(np.array([1], np.int32), 4), lambda: store.document_name(0), store.check):
        with pytest.raises(Closed, match="open it again"):
            ask()


def test_closing_under_a_lookup_is_safe(build: Build) -> None:
    """Threads that look up while another closes get answers or Closed, nothing else."""
    rng = np.random.default_rng(0)
    store = build([rng.integers(0, 50, 5000).tolist()])
    outcomes: list[object] = []

    def ask() -> None:
        for i in range(200):
            try:
                store.lookup(np.array([i % 50], np.int32), 8).validate()
            except Closed:
                outcomes.append(Closed)
                return
            except BaseException as error:
                outcomes.append(error)
                return
        outcomes.append(None)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    store.close()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert set(outcomes) <= {Closed, None}


def test_a_removed_version_is_still_readable(build: Build, tmp_path: Path) -> None:
    """An open datastore outlives the removal of its files, as a garbage collection may do."""
    store = build([[1, 2, 3]])
    shutil.rmtree(store.path)
    assert store.lookup(np.array([1], np.int32), 1).tokens.tolist() == [2]
