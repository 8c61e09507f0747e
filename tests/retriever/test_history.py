"""Many texts of one owner, which come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever.history import BLOCK_BYTES, HistoryPool
from retriever.history.kernels import BLOCK
from tests.retriever.oracles import Row, assert_blended, common_suffix, paths_of

texts = st.lists(st.integers(0, 3), max_size=40)
AMPLE = 1 << 20


def ids(tokens: list[int]) -> np.ndarray:
    """Tokens as a context."""
    return np.array(tokens, np.int32)


def pool_of(*documents: list[int], max_bytes: int = AMPLE) -> HistoryPool:
    """A pool with these closed documents, with probes enough to see all of them."""
    pool = HistoryPool(max_bytes, probes=200, depth=6, max_length=12)
    for text in documents:
        add(pool, text)
    return pool


def add(pool: HistoryPool, text: list[int], lead: Sequence[int] = (), born: float = 0.0) -> int:
    """Put in a whole document."""
    document = pool.begin(lead, born=born)
    pool.append(document, text)
    pool.close(document)
    return document


def rows_of(
    documents: list[tuple[list[int], int]],
    context: list[int],
    times: list[list[int]] | None = None,
    max_length: int = 12,
    depth: int = 6,
) -> list[Row]:
    """The twin: every place of every (text, tokens of lead), with what follows it and how far it agrees with the context.

    Of those that agree in 1, 2 to 3, 4 to 7, or 8 and more tokens, the latest counts twice, within the same sum. `times` says
    when each token came; without it, they came in order.
    """
    rows: list[tuple[int, int, Row]] = []
    for d, (text, lead) in enumerate(documents):
        for i in range(max(lead, 1), len(text)):
            if length := min(common_suffix(text[:i], context), max_length):
                order = max(order for order in (1, 2, 4, 8) if order <= length)
                rows.append((order, times[d][i] if times else len(rows), Row(tuple(text[i : i + depth]), length)))
    weighed = []
    for order, time, row in rows:
        same = [other for alike, other, _ in rows if alike == order]
        weighed.append(replace(row, weight=(2 if time == max(same) else 1) * len(same) / (len(same) + 1)))
    return weighed


@given(st.lists(st.tuples(texts, texts), max_size=4), texts, st.integers(0, 20))
def test_it_blends_all_places_of_all_documents(
    documents: list[tuple[list[int], list[int]]], context: list[int], budget: int
) -> None:
    """With probes enough, the answer is the blend of every place behind a lead, and nothing crosses from text to text."""
    pool = pool_of()
    for lead, text in documents:
        add(pool, text, lead)
    there = [(lead + text, len(lead)) for lead, text in documents if text]
    assert_blended(pool.lookup(ids(context), budget), rows_of(there, context), budget)


@given(st.lists(st.tuples(st.integers(0, 2), texts), max_size=30), texts)
def test_documents_grow_side_by_side(pieces: list[tuple[int, list[int]]], context: list[int]) -> None:
    """Three documents appended to in any order answer like the same three put in whole."""
    grown = pool_of()
    numbers = [grown.begin() for _ in range(3)]
    whole: list[list[int]] = [[], [], []]
    times: list[list[int]] = [[], [], []]
    for which, piece in pieces:
        grown.append(numbers[which], piece)
        begun = sum(map(len, whole))
        whole[which] += piece
        times[which] += range(begun, begun + len(piece))
    assert_blended(grown.lookup(ids(context), 12), rows_of([(text, 0) for text in whole], context, times), 12)


@dataclass
class Kept:
    """A document as the twin knows it."""

    text: list[int]
    rank: float
    gained: int = 0


@dataclass
class Twin:
    """The rules of letting go, without hurry. `kept` is in the order the documents came."""

    num_blocks: int
    kept: list[Kept] = field(default_factory=list)
    floor: float = 0.0

    def add(self, text: list[int]) -> None:
        """The lowest rank goes, and of equals the oldest, until there is room."""
        while -(-len(text) // BLOCK) + sum(-(-len(each.text) // BLOCK) for each in self.kept) > self.num_blocks:
            worst = min(self.kept, key=lambda each: each.rank)
            self.floor = worst.rank
            self.kept.remove(worst)
        self.kept.append(Kept(text, self.floor + 1.0))

    def credit(self, context: list[int], emitted: list[int]) -> None:
        """The document that said most of it, after the longest match, counts it; of equals, the latest."""
        best: tuple[int, int, int] | None = None
        for number, each in enumerate(self.kept):
            for i in range(1, len(each.text)):
                length = min(common_suffix(each.text[:i], context), 12)
                reached = common_suffix(emitted[::-1], each.text[i : i + len(emitted)][::-1])
                order = max((order for order in (1, 2, 4, 8) if order <= length), default=0)
                if order and reached:
                    best = max(best or (0, 0, 0), (reached, order, number))
        if best is not None:
            chosen = self.kept[best[2]]
            chosen.gained += best[0]
            chosen.rank = self.floor + 1.0 + chosen.gained / len(chosen.text)


ANSWERS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(st.lists(st.tuples(ANSWERS, st.lists(st.integers(0, 3), min_size=1, max_size=4)), max_size=30), texts)
def test_the_least_valuable_goes_first_and_leaves_no_trace(
    history: list[tuple[list[int], list[int]]], context: list[int]
) -> None:
    """After many documents there are those that the rule keeps, and answers are made of them alone."""
    pool, twin = pool_of(max_bytes=8 * BLOCK_BYTES), Twin(num_blocks=8)
    for text, emitted in history:
        twin.add(text)
        add(pool, text)
        twin.credit(text[:3], emitted)
        pool.credit(ids(text[:3]), ids(emitted))
    assert [each.tolist() for each in pool.documents()] == [each.text for each in twin.kept]
    assert_blended(pool.lookup(ids(context), 12), rows_of([(each.text, 0) for each in twin.kept], context), 12)


@pytest.mark.parametrize("num_documents", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_any_number_of_documents_leaves_memory_flat(num_documents: int) -> None:
    """Within the bytes it was given, whatever comes; and what came last is there."""
    pool = HistoryPool(1 << 16)
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 40, num_documents)
    tokens = rng.integers(0, 1000, 40).astype(np.int32)
    most = 0
    for i, size in enumerate(sizes.tolist()):
        document = pool.begin(tokens[:2])
        pool.append(document, (tokens[:size] + i) % 1000)
        pool.close(document)
        if i % 1000 == 0:
            most = max(most, pool.num_bytes)
    assert most <= 1 << 16
    assert len(pool) > 20 and pool.num_tokens > 500
    assert pool.documents()[-1].tolist() == [*tokens[:2].tolist(), *((tokens[: sizes[-1]] + num_documents - 1) % 1000).tolist()]


def test_it_begins_small_and_grows() -> None:
    """A tenant of few words takes little memory, whatever it might take."""
    pool = HistoryPool(1 << 26)
    assert pool.num_bytes < 1 << 17
    add(pool, list(range(20_000)))
    assert pool.num_bytes < 4e6
    assert pool.lookup(ids([18_998, 18_999]), 2).tokens.tolist() == [19_000, 19_001]


def test_an_open_document_is_never_let_go() -> None:
    """What is still being said stays; if nothing else is left to go, more of it is not kept."""
    pool = pool_of(max_bytes=4 * BLOCK_BYTES)
    open_one = pool.begin([], born=0.0)
    pool.append(open_one, [7] * BLOCK * 3)
    for i in range(10):
        add(pool, [i] * 5)
    pool.append(open_one, [8] * BLOCK)
    assert [each.tolist() for each in pool.documents()] == [[7] * BLOCK * 3 + [8] * BLOCK]
    pool.append(open_one, [9])
    assert pool.num_tokens == 4 * BLOCK
    pool.close(open_one)
    add(pool, [1, 2])
    assert [each.tolist() for each in pool.documents()] == [[1, 2]]


def test_a_lead_is_matched_but_not_looked_for() -> None:
    """The beginning of a document is found by what stood before it, of which nothing is drafted."""
    pool = pool_of()
    add(pool, [5, 6, 7], lead=[1, 2, 3])
    assert paths_of(pool.lookup(ids([2, 3]), 3)) == [(5,), (5, 6), (5, 6, 7)]
    assert len(pool.lookup(ids([1, 2]), 3)) == 0


def test_a_document_that_said_nothing_is_not_kept() -> None:
    """A request that ends before its first token leaves nothing behind, not even its lead."""
    pool = pool_of()
    pool.close(pool.begin([1, 2, 3]))
    assert len(pool) == pool.num_tokens == 0


def test_what_is_too_old_is_let_go() -> None:
    """Closed documents by when they were born; an open one is not touched."""
    pool = pool_of()
    pool.append(pool.begin([], born=0.0), [1, 1])
    for born in (1.0, 2.0, 3.0):
        add(pool, [int(born)] * 3, born=born)
    pool.expire(2.5)
    assert [each.tolist() for each in pool.documents()] == [[1, 1], [3, 3, 3]]


@given(st.lists(st.tuples(texts, texts, st.floats(0, 10)), max_size=5), texts)
def test_it_is_restored_from_its_arrays(documents: list[tuple[list[int], list[int], float]], context: list[int]) -> None:
    """Documents, leads, births, worth and order are those of the pool that was saved."""
    pool = pool_of()
    for lead, text, born in documents:
        add(pool, text, lead, born)
    pool.credit(ids(context), ids([1, 2]))
    restored = pool_of()
    restored.restore(pool.arrays())
    again = restored.arrays()
    assert all(np.array_equal(array, again[name]) for name, array in pool.arrays().items())
    assert paths_of(restored.lookup(ids(context), 12)) == paths_of(pool.lookup(ids(context), 12))


def test_a_smaller_pool_keeps_the_latest() -> None:
    """Restored into fewer bytes, the documents touched last stay."""
    large, small = pool_of(*([i] * 10 for i in range(50))), pool_of(max_bytes=8 * BLOCK_BYTES)
    small.restore(large.arrays())
    assert [int(each[0]) for each in small.documents()] == list(range(42, 50))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": np.array([4], np.int32)},
        {"leads": np.array([9], np.int32)},
        {"leads": np.array([-1], np.int32)},
        {"born": np.zeros(2)},
        {"tokens": np.array([1, -1, 2], np.int32)},
        {"tokens": np.array([1.0, 2.0, 3.0])},
        {"lengths": np.array([[3]], np.int32)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arrays_that_make_no_sense_are_refused(wrong: dict[str, np.ndarray]) -> None:
    """Nothing of them is taken in."""
    pool, other = pool_of([1, 2, 3]), pool_of()
    with pytest.raises(ValueError, match=r"history|token ids"):
        other.restore(pool.arrays() | wrong)
    assert len(other) == 0


def test_negative_tokens_and_too_little_memory_are_refused() -> None:
    """With the value."""
    pool = pool_of()
    with pytest.raises(ValueError, match="-3"):
        pool.append(pool.begin(), [1, -3])
    with pytest.raises(ValueError, match="at least"):
        HistoryPool(BLOCK_BYTES - 1)
