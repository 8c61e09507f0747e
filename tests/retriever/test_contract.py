"""What every lexical source promises, held against each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from retriever.continuations import Continuations
from retriever.pools import TextPool
from tests.retriever.conftest import Build
from tests.retriever.oracles import paths_of

Lookup = Callable[..., Continuations]
Open = Callable[[Sequence[Sequence[int]]], Lookup]


@pytest.fixture(params=["datastore", "datastore of many segments", "pool"])
def source(request: pytest.FixtureRequest, build: Build) -> Open:
    """Documents in, a lookup out."""

    def open_source(documents: Sequence[Sequence[int]]) -> Lookup:
        if request.param == "pool":
            pool = TextPool()
            for tokens in documents:
                pool.append(tokens, new_document=True)
            return pool.lookup
        many = {"segment_tokens": 30} if "many" in request.param else {}
        return build(documents, vocab_size=1000, **many).lookup

    return open_source


def ids(*tokens: int) -> np.ndarray:
    """A context."""
    return np.array(tokens, np.int32)


def some_documents() -> list[list[int]]:
    """Repetitive text of twelve tokens."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, 12, 25).tolist() for _ in range(12)]


def test_what_follows_is_drafted(source: Open) -> None:
    """The continuation of the only match, best first, to the end of its document."""
    found = source([[1, 2, 3, 4, 5], [7, 8]])(ids(9, 1, 2), 8)
    assert paths_of(found) == [(3,), (3, 4), (3, 4, 5)]
    assert found.lengths.tolist() == [2, 3, 4]


def test_every_answer_is_valid(source: Open) -> None:
    """Whatever is asked, the invariants hold and every path stands in some document after the context's last token."""
    documents = some_documents()
    lookup = source(documents)
    rng = np.random.default_rng(2)
    for _ in range(60):
        context = rng.integers(0, 13, rng.integers(1, 8)).astype(np.int32)
        found = lookup(context, int(rng.integers(1, 24)))
        found.validate()
        for path in paths_of(found):
            piece = [int(context[-1]), *path]
            assert any(piece == text[i : i + len(piece)] for text in documents for i in range(len(text)))


def test_documents_are_worlds_apart(source: Open) -> None:
    """Nothing is matched or drafted across the end of a document."""
    lookup = source([[1, 2, 3], [4, 5, 6], [9, 9]])
    assert len(lookup(ids(3), 8)) == 0
    assert paths_of(lookup(ids(3, 4), 8)) == [(5,), (5, 6)]
    assert lookup(ids(3, 4), 8).lengths.tolist() == [1, 2]


@pytest.mark.parametrize("budget", [-3, 0, 1, 5])
def test_the_budget_is_kept(source: Open, budget: int) -> None:
    """Never more nodes than asked for, and as many where there are enough; those of a smaller budget come first."""
    lookup = source(some_documents())
    context = ids(*some_documents()[0][:5])
    assert len(lookup(context, budget)) == max(budget, 0)
    assert paths_of(lookup(context, budget)) == paths_of(lookup(context, 12))[: max(budget, 0)]


@pytest.mark.parametrize("context", [ids(), ids(999), ids(1, 999), ids(-1), ids(1000), ids(2**31 - 1), ids(255), ids(65535)])
def test_no_match_no_draft(source: Open, context: np.ndarray) -> None:
    """An empty context, one that does not occur, and numbers that are no tokens (a separator among them) yield nothing."""
    assert len(source([[1, 2, 3], [4, 5]])(context, 8)) == 0


def test_only_the_end_after_a_non_token_counts(source: Open) -> None:
    """What lies before a number that is no token is left out of the match."""
    found = source([[1, 2, 3, 4], [9]])(ids(1, 2, -1, 3), 4)
    assert paths_of(found) == [(4,)]
    assert found.lengths.tolist() == [1]


def test_asking_twice_is_asking_once(source: Open) -> None:
    """The same question has the same answer, bit by bit."""
    lookup = source(some_documents())
    context = ids(*some_documents()[3][:6])
    first, second = lookup(context, 16), lookup(context, 16)
    for name in ("tokens", "parents", "probs", "lengths", "counts"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


def test_longer_agreement_weighs_more(source: Open) -> None:
    """Of two continuations seen equally often, the one after the longer match is likelier."""
    found = source([[1, 2, 3, 50], [8, 8, 3, 60], [9]])(ids(1, 2, 3), 2)
    assert found.tokens.tolist() == [50, 60]
    assert found.probs[0] > found.probs[1]


def test_contexts_of_other_integer_types(source: Open) -> None:
    """A context may be any array of integers, contiguous or not."""
    lookup = source([[1, 2, 3, 4], [9]])
    expected = paths_of(lookup(ids(2, 3), 4))
    assert paths_of(lookup(np.array([2, 3], np.int64), 4)) == expected
    assert paths_of(lookup(ids(2, 0, 3, 0)[::2], 4)) == expected
