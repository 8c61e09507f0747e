"""The text of one request, looked up in while it grows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever.pools import TextPool
from tests.retriever.oracles import assert_blended, paths_of, pool_rows

texts = st.lists(st.integers(0, 3), max_size=40)


def ids(tokens: list[int]) -> np.ndarray:
    """Tokens as a context."""
    return np.array(tokens, np.int32)


@given(texts, texts, st.integers(0, 20), st.sampled_from([0, 3, 100]))
def test_it_blends_all_earlier_places(prediction: list[int], text: list[int], budget: int, recent: int) -> None:
    """With probes enough, the answer is the blend of every earlier place in every document, ends continued by their period, and
    below them of the latest places, whatever stands before them."""
    pool = TextPool(prediction, probes=100, depth=6, max_length=12, recent=recent)
    pool.append(text, new_document=True)
    documents = [document for document in (prediction, text) if document] or [[]]
    if not text:
        documents = [prediction, []]  # the last document has just begun
    assert_blended(pool.lookup(ids(text), budget), pool_rows(documents, text, 12, 6, recent), budget)


@given(texts, texts)
def test_any_context_may_be_asked_about(text: list[int], context: list[int]) -> None:
    """The context need not be the pool's own text."""
    pool = TextPool(text, probes=100, depth=6, max_length=12)
    assert_blended(pool.lookup(ids(context), 12), pool_rows([text], context, 12, 6), 12)


@given(st.lists(texts, max_size=5), texts)
def test_growing_is_as_good_as_knowing_at_once(pieces: list[list[int]], context: list[int]) -> None:
    """A text appended piece by piece answers like the same text given whole."""
    grown = TextPool()
    for piece in pieces:
        grown.append(piece)
    whole = TextPool([token for piece in pieces for token in piece])
    assert len(grown) == len(whole)
    assert paths_of(grown.lookup(ids(context), 20)) == paths_of(whole.lookup(ids(context), 20))


def test_the_place_asked_from_is_no_occurrence() -> None:
    """A text without repetition has nothing to say about its own continuation."""
    assert len(TextPool([1, 2, 3, 4]).lookup(ids([1, 2, 3, 4]), 8)) == 0


def test_what_was_said_lately_is_offered_without_a_match() -> None:
    """After a token never seen the latest tokens are drafted, with a match of length 0; further back is forgotten."""
    found = TextPool([1, 2, 3, 4, 9], recent=2).lookup(ids([9]), 8)
    assert sorted(found.tokens[found.parents < 0].tolist()) == [4, 9]
    assert found.lengths[found.parents < 0].tolist() == [0, 0]
    assert len(TextPool([1, 2, 3, 4, 9]).lookup(ids([9]), 8)) == 0


def test_a_loop_goes_on_and_on() -> None:
    """After "abc abc ab" comes "c abc abc ...", as deep as is drafted."""
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    found = TextPool(text, depth=10).lookup(ids(text), 10)
    assert found.tokens.tolist() == [3, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert found.parents.tolist() == list(range(-1, 9))


def test_one_token_repeated() -> None:
    """The shortest period is one token."""
    assert TextPool([5, 5, 5], depth=4).lookup(ids([5, 5, 5]), 4).tokens.tolist() == [5, 5, 5, 5]


def test_no_period_is_made_up_for_another_text() -> None:
    """Where the context is not the end of the pool's text, a draft ends with the text."""
    found = TextPool([1, 2, 3, 1, 2], depth=10).lookup(ids([9, 3]), 10)
    assert found.tokens.tolist() == [1, 2]


def test_a_prediction_is_used_from_the_first_token() -> None:
    """The caller's guess, put in as a document of its own, is drafted wherever the answer follows it."""
    pool = TextPool([10, 11, 12, 13, 14, 15])
    pool.append([7, 10, 11, 12], new_document=True)
    assert pool.lookup(ids([7, 10, 11, 12]), 3).tokens.tolist() == [13, 14, 15]


def test_the_latest_occurrences_are_looked_at() -> None:
    """With one probe an order, what followed last is what is drafted."""
    text = [1, 7, 1, 8, 1, 9, 2, 1]
    assert TextPool(text, probes=1).lookup(ids(text), 1).tokens.tolist() == [9]


def test_a_long_match_is_found_among_many_short_ones() -> None:
    """Hundreds of later places that share the last two tokens do not hide the one that shares eight."""
    needle = [1, 2, 3, 4, 5, 6, 7, 8]
    crowd = [token for i in range(400) for token in (7, 8, 20 + i % 3)]
    text = [*needle, 99, *crowd, *needle]
    found = TextPool(text, probes=8).lookup(ids(text), 4)
    assert found.tokens[0] == 99
    assert found.lengths[0] == 8


def test_it_outgrows_its_first_room() -> None:
    """Growth beyond the allotted room keeps every earlier place known."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 1000, 5000).astype(np.int32)
    pool = TextPool()
    for begin in range(0, 5000, 700):
        pool.append(text[begin : begin + 700])
    assert len(pool) == 5000
    for i in (5, 699, 701, 2500, 4990):
        assert pool.lookup(text[i - 4 : i], 1).tokens.tolist() == [text[i]]


def test_what_was_drafted_stays_as_it_was() -> None:
    """An answer is a copy: growth of the pool does not reach into it."""
    pool = TextPool([1, 2, 1])
    found = pool.lookup(ids([1]), 4)
    before = found.tokens.tolist()
    pool.append([9] * 50)
    assert found.tokens.tolist() == before


@pytest.mark.parametrize("arguments", [{"probes": 0}, {"depth": 0}, {"max_length": -1}])
def test_senseless_sizes_are_refused_by_name(arguments: dict[str, int]) -> None:
    """A size below 1 is a mistake of the caller."""
    with pytest.raises(ValueError, match=next(iter(arguments))):
        TextPool(**arguments)


def test_negative_ids_are_refused() -> None:
    """A negative id would read as the end of a document; nothing of the piece is taken in."""
    pool = TextPool([1])
    with pytest.raises(ValueError, match="negative: -1"):
        pool.append([2, -1])
    assert len(pool) == 1
