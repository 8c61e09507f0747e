"""What a segment keeps in memory beside its files: continuations of frequent contexts, samples of the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retriever import format as corpus_format
from retriever import kernels, plain
from retriever.datastore import Datastore
from retriever.format import build_suffix_order, find_frequent
from retriever.plain import LEAST_SHARE, MOST_RUNS, SAMPLE_STRIDE
from retriever.suffixes import pack_tokens, separator_of
from retriever.update import write_update
from tests.retriever.conftest import Build, know_all_contexts
from tests.retriever.oracles import places

Documents = Sequence[Sequence[int]]


def packed(documents: Documents, width: int = 1) -> np.ndarray:
    """The text of a segment."""
    return pack_tokens(np.array([t for text in documents for t in (*text, separator_of(width))], np.int64), width)


def followers(documents: Documents, key: Sequence[int]) -> Counter[int]:
    """The twin: what follows the key, by looking everywhere."""
    return Counter(documents[d][end] for d, end in places(documents, key) if end < len(documents[d]))


def most_frequent(documents: Documents, key: Sequence[int], most: int, least: int) -> list[tuple[int, int]]:
    """(token, count) of the `most` most frequent followers with at least `least` occurrences."""
    listed = sorted(followers(documents, key).items(), key=lambda pair: (-pair[1], pair[0]))
    return [pair for pair in listed if pair[1] >= least][:most]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, *range(4, 40)]), max_size=80), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 300),
)
def test_continuations_are_those_of_counting(documents: list[list[int]], min_count: int, most_words: int) -> None:
    """Of every context of one or two tokens: its most frequent next tokens, each with the interval of both; the most frequent
    contexts as long as there is room.
    """
    text = packed(documents)
    order = build_suffix_order(text, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_format, "_TABLE_MIN_COUNT", 1)
        patch.setattr(corpus_format, "_CONTINUED_MIN_COUNT", min_count)
        patch.setattr(corpus_format, "_CONTINUATION_BYTES", 4 * most_words / max(len(order), 1))
        contexts, runs = corpus_format.build_continuations(text, 1, order, find_frequent(text, 1, order))
    assert contexts.size + runs.size <= most_words
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    begin = 0
    for low, count, length, end in contexts.tolist():
        key = tuple(text[order[low] : order[low] + length].tolist())
        assert count == len(places(documents, key))
        found[key] = sorted(((token, size) for token, _, size in runs[begin:end].tolist()), key=lambda p: (-p[1], p[0]))
        for token, first, size in runs[begin:end].tolist():
            assert {tuple(text[at : at + length + 1].tolist()) for at in order[first : first + size]} == {(*key, token)}
        begin = end
    assert begin == len(runs)
    keys = {tuple(text[i : i + n]) for text in documents for n in (1, 2) for i in range(len(text) - n + 1)}
    wanted = []
    for key in keys:
        count = len(places(documents, key))
        listed = most_frequent(documents, key, MOST_RUNS, -(-count // LEAST_SHARE)) if count >= min_count else []
        if listed:
            wanted.append((count, 4 + 3 * len(listed), key, listed))
    for count, _, key, listed in wanted:
        if key in found:
            assert found[key] == listed
        else:
            room = sum(words for other, words, _, _ in wanted if other >= count)
            assert room > most_words


@pytest.mark.parametrize(("num_segments", "tokens_known"), [(1, range(12)), (3, [1, 2])])
def test_what_often_follows_a_token_is_counted_exactly(
    build: Build, monkeypatch: pytest.MonkeyPatch, num_segments: int, tokens_known: Sequence[int]
) -> None:
    """Tokens and counts are those of looking everywhere, added up over segments; rare and impossible tokens have none."""
    know_all_contexts(monkeypatch)
    rng = np.random.default_rng(0)
    documents = [(rng.zipf(1.4, 60) % 12).tolist() for _ in range(30)]
    store = build(documents, segment_tokens=2000 // num_segments)
    assert store.manifest.num_segments == num_segments
    for token in tokens_known:
        tokens, counts = store.frequent_next(token, 5)
        expected = most_frequent(documents, [token], 5, 1)
        assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected
    for token in (50, -1, 99, 10**6):
        assert len(store.frequent_next(token)[0]) == 0
    assert len(store.frequent_next(0, 0)[0]) == 0
    assert len(build([]).frequent_next(0)[0]) == 0


def test_shares_of_frequent_followers_are_exact(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sampled class, what a table lists has its exact share; the same over several segments, and after a deletion."""
    know_all_contexts(monkeypatch)
    rng = np.random.default_rng(4)
    documents = [[9, 8, int(token)] * 40 for token in rng.zipf(1.3, 200) % 7]
    gone = [[9, 8, int(token)] * 40 for token in rng.integers(5, 12, 50)]
    whole = build(documents)
    base = build([*documents, *gone], segment_tokens=12_000).path
    names = {f"doc{i}.txt" for i in range(len(documents), len(documents) + len(gone))}
    path = write_update(base.parents[2], "corpus", "left", base, [], removed=names, most_deleted=1, segment_tokens=12_000)
    left = Datastore.open(path)
    assert left.manifest.num_segments > 1
    for store in (whole, left):
        for key in ([8], [9, 8]):
            exact = followers(documents, key)
            found = store.lookup(np.array(key, np.int32), 64, classes=1, depth=1)
            assert set(found.tokens.tolist()) == set(exact)
            assert set(found.counts.tolist()) == {sum(exact.values())}
            for token, prob in zip(found.tokens.tolist(), (found.probs / found.probs.sum()).tolist(), strict=True):
                assert prob == pytest.approx(exact[token] / sum(exact.values()), abs=1e-6)


def test_the_longer_class_is_taken_out_of_the_runs(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands with the longer class counts in the shorter one once: the shares there are still exact."""
    know_all_contexts(monkeypatch)
    documents = [[5, 9, 1]] * 100 + [[6, 9, 1]] * 150 + [[6, 9, 2]] * 200 + [[6, 9, 3]] * 50
    found = build(documents).lookup(np.array([5, 9], np.int32), 3, depth=1, samples=40)
    trust_long = 39 / 40
    most_rows = 39 + 38  # less those of the 38 places, 19 at most, that stand with the longer class
    by_token = dict(zip(found.tokens.tolist(), found.probs.tolist(), strict=True))
    assert by_token[2] / by_token[3] == pytest.approx(200 / 50, rel=1e-5)
    short = by_token[2] / 0.4 / (1 - trust_long)
    assert (most_rows - 19) / (most_rows - 19 + 3) < short < most_rows / (most_rows + 3)
    assert by_token[1] == pytest.approx(trust_long + (1 - trust_long) * 0.5 * short, rel=1e-5)


def test_deleted_text_is_in_no_answer(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither lookups nor the tables say what stood in deleted documents only, nor count it."""
    know_all_contexts(monkeypatch)
    kept, gone = [[1, 2, 3] * 30] * 3, [[1, 2, 7] * 60] * 5
    base = build([*kept, *gone]).path
    names = {f"doc{i}.txt" for i in range(3, 8)}
    new = [("new", np.array([1, 2, 4] * 40))]
    path = write_update(base.parents[2], "corpus", "left", base, new, removed=names, most_deleted=1)
    with Datastore.open(base) as store:
        assert store.frequent_next(2)[0].tolist() == [7, 3]
    with Datastore.open(path) as store:
        assert (store.manifest.num_segments, store.check(full=True)) == (2, [])
        for token in (1, 2, 3, 4, 7):
            assert 7 not in store.frequent_next(token)[0].tolist()
        for key in ([1], [2], [1, 2], [3, 1, 2], [7]):
            assert 7 not in store.lookup(np.array(key, np.int32), 64).tokens.tolist()
        found = store.lookup(np.array([2], np.int32), 64, depth=1, classes=1)
        assert found.counts.tolist() == [130, 130]


def test_damaged_runs_are_none() -> None:
    """Runs outside the interval of their context, one over another, too many or beyond the table: the context has none."""
    contexts = np.array([(10, 50, 1, 2), (10, 50, 2, 4), (70, 20, 1, 5)], np.uint32)
    runs = np.array([(1, 10, 20), (2, 40, 20), (1, 10, 20), (2, 40, 20), (4, 75, 5)], np.uint32)
    assert kernels.runs_of(contexts, runs, 1, 10, 60) == (0, 2)
    assert kernels.runs_of(contexts, runs, 2, 10, 60) == (2, 4)
    assert kernels.runs_of(contexts, runs, 1, 70, 90) == (4, 5)
    for length, low, high in ((3, 10, 60), (1, 10, 61), (1, 11, 61), (1, 90, 95), (1, 0, 5)):
        assert kernels.runs_of(contexts, runs, length, low, high) == (0, 0)
    for row, column, value in ((0, 1, 9), (1, 1, 29), (1, 2, 21), (0, 2, 2**32 - 1), (1, 1, 2**32 - 1)):
        damaged = runs.copy()
        damaged[row, column] = value
        assert kernels.runs_of(contexts, damaged, 1, 10, 60) == (0, 0)
    for end in (0, 6, 2**32 - 1):
        damaged = contexts.copy()
        damaged[0, 3] = end
        assert kernels.runs_of(damaged, runs, 1, 10, 60) == (0, 0)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_are_the_first_bytes(width: int) -> None:
    """Every 256th suffix, 16 bytes of it, zeros beyond the text."""
    rng = np.random.default_rng(2)
    text = packed([rng.integers(0, 3, 700).tolist()], width)
    order = build_suffix_order(text, width)
    expected = [(text[position * width :].tobytes() + bytes(16))[:16] for position in order[::SAMPLE_STRIDE].tolist()]
    assert plain.sample_order(text, width, order).astype(">u8").tobytes() == b"".join(expected)
    assert plain.sample_order(text, width, order[:0]).shape == (0, 2)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from([1, 2, 3]),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(0, 2**64 - 1), max_size=6),
)
def test_samples_change_nothing(seed: int, width: int, key: list[int], damage: list[int]) -> None:
    """A search that begins in the samples finds the interval that one without finds; damaged ones lead to no other place."""
    rng = np.random.default_rng(seed)
    documents = [rng.choice(3, rng.integers(1, 400), p=[0.8, 0.15, 0.05]).tolist() for _ in range(12)]
    text = packed(documents, width)
    order = build_suffix_order(text, width)
    samples = plain.sample_order(text, width, order)
    table, ids = np.zeros((1, 3), np.uint32), np.array(key, np.int32)
    words = np.empty(kernels.key_words(len(key), width), np.uint64)
    low, high = kernels.find_interval(text, width, order, table, samples[:0], ids, words)
    assert high - low == len(places(documents, key))
    found = kernels.find_interval(text, width, order, table, samples, ids, words)
    assert found == (low, high) or (low == high and found[0] == found[1])
    for word in damage:
        samples[word % len(samples), word % 2] = word
    found = kernels.find_interval(text, width, order, table, samples, ids, words)
    assert found[0] == found[1] or low <= found[0] < found[1] <= high


def test_a_cold_search_reads_few_suffixes() -> None:
    """What samples leave to search is at most what lies between two of them, for keys that do not stand there."""
    rng = np.random.default_rng(3)
    text = packed([rng.integers(0, 200, 20_000).tolist()])
    order = build_suffix_order(text, 1)
    samples = plain.sample_order(text, 1, order)
    for _ in range(50):
        at = int(rng.integers(19_000))
        key, words = text[at : at + 12], np.empty(2, np.uint64)
        kernels.pack_key(key.astype(np.int32), 1, words)
        low, high = kernels.narrow(samples, words, 12, 0, len(order))
        place = int(np.flatnonzero(order == at)[0])
        assert low <= place < high
        assert high - low < 2 * SAMPLE_STRIDE
