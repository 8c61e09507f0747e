"""The one kernel that turns occurrences into a draft."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever import kernels
from retriever.continuations import Continuations
from retriever.suffixes import pack_tokens, separator_of
from tests.retriever.oracles import Row, assert_blended, blend_to_the_bit, paths_of

DEPTH = 5

some_rows = st.lists(
    st.builds(
        Row,
        st.lists(st.integers(0, 3), max_size=DEPTH).map(tuple),
        st.sampled_from([1, 2, 5, 30, 63]),
        st.sampled_from([1.0, 2.0, 7.5, 1000.0]),
    ),
    max_size=14,
)


def blend(rows: list[Row], budget: int, depth: int = DEPTH) -> Continuations:
    """The kernel on rows padded to one matrix."""
    matrix = np.full((len(rows), depth), -1, np.int32)
    for i, row in enumerate(rows):
        matrix[i, : len(row.continuation)] = row.continuation
    lengths = np.array([row.length for row in rows], np.int32)
    nodes = Continuations.room(budget)
    num_nodes = kernels.blend(matrix, lengths, np.array([row.weight for row in rows], np.float64), nodes)
    return Continuations.of(nodes, num_nodes)


@given(some_rows, st.integers(0, 30))
def test_it_is_the_definition(rows: list[Row], budget: int) -> None:
    """Probabilities, evidence and choice of nodes are those of the definition, and every invariant holds."""
    assert_blended(blend(rows, budget), rows, budget)


weighty_rows = st.lists(
    st.builds(
        Row,
        st.lists(st.sampled_from([0, 1, 2, 7, 2**20 + 1]), max_size=DEPTH).map(tuple),
        st.sampled_from([1, 2, 5, 30, 63]),
        st.floats(0.01, 1e10),
    ),
    max_size=40,
)


@given(weighty_rows, st.integers(0, 80))
def test_it_is_its_twin_to_the_bit(rows: list[Row], budget: int) -> None:
    """Every node, in every field, is that of a twin that does the same sums in the same order, whatever the weights."""
    found = blend(rows, budget)
    fields = (found.tokens, found.parents, found.probs, found.lengths, found.counts)
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == blend_to_the_bit(rows, budget)


@given(some_rows, st.integers(0, 20))
def test_a_smaller_budget_is_a_beginning(rows: list[Row], budget: int) -> None:
    """The nodes for a small budget are the first ones for a large budget."""
    small, large = blend(rows, budget), blend(rows, 25)
    assert paths_of(small) == paths_of(large)[:budget]
    assert small.probs.tolist() == large.probs.tolist()[:budget]


@given(some_rows, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[Row], random: object) -> None:
    """Rows are evidence, not a sequence: any permutation yields the same nodes."""
    shuffled = rows[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert paths_of(blend(rows, 20)) == paths_of(blend(shuffled, 20))


@given(some_rows, st.integers(0, 30), st.integers(1, 4), st.integers(0, 2), st.integers(1, DEPTH + 3))
def test_rows_may_stand_in_a_text(rows: list[Row], budget: int, width: int, num_columns: int, depth: int) -> None:
    """What the matrix leaves out is read from the text, up to the end of the document, and the nodes are the same."""
    separator = separator_of(width)
    begins = np.cumsum([0] + [len(row.continuation) + 1 for row in rows])
    tokens = [token for row in rows for token in (*row.continuation, separator)]
    text = pack_tokens(np.array(tokens, np.int64), width).reshape(-1)
    matrix = np.full((len(rows), num_columns), -1, np.int32)
    for i, row in enumerate(rows):
        beginning = row.continuation[:num_columns]
        matrix[i, : len(beginning)] = beginning
    places = np.array([(text.ctypes.data + begin * width, text.ctypes.data + len(text)) for begin in begins[:-1]], np.int64)
    lengths = np.array([row.length for row in rows], np.int32)
    weights = np.array([row.weight for row in rows], np.float64)
    room = np.empty(kernels._blend_room(len(rows), depth, 64, budget), np.int64)
    nodes = Continuations.room(budget)
    places = places.reshape(-1, 2)
    found = Continuations.of(nodes, kernels._blend(matrix, lengths, weights, 64, depth, places, width, 4, nodes, room))
    expected = blend([Row(row.continuation[:depth], row.length, row.weight) for row in rows], budget, depth)
    for field in ("tokens", "parents", "probs", "lengths", "counts"):
        assert getattr(found, field).tolist() == getattr(expected, field).tolist()


@given(st.lists(st.integers(0, 250), max_size=20), st.integers(1, 4))
def test_a_packed_key_is_a_beginning_of_text(key: list[int], width: int) -> None:
    """A key is packed into words as tokens stand in a text, the rest of the last word being 0."""
    words = np.full(kernels.key_words(len(key), width), 2**64 - 1, np.uint64)
    kernels.pack_key(np.array(key, np.int32), width, words)
    data = words.astype(">u8").tobytes()
    assert data[: len(key) * width] == pack_tokens(np.array(key, np.int64), width).tobytes()
    assert len(data) < len(key) * width + 8
    assert not any(data[len(key) * width :])


def test_by_hand() -> None:
    """Two matches of length 3 say a a, b; length 1 adds three c: the figures follow from the formula with pencil and paper."""
    a, b, c = 10, 11, 12
    rows = [Row((a,), 3), Row((a,), 3), Row((b,), 3), Row((c,), 1), Row((c,), 1), Row((c,), 1)]
    found = blend(rows, 8)
    # length 1: 6 occurrences, 3 kinds: a 2/9, b 1/9, c 3/9. length 3: 3 occurrences, 2 kinds: 2/5, 1/5, 0, and 2/5 goes down.
    assert found.tokens.tolist() == [a, b, c]
    assert found.probs.tolist() == pytest.approx([2 / 5 + 2 / 5 * 2 / 9, 1 / 5 + 2 / 5 * 1 / 9, 2 / 5 * 3 / 9])
    assert found.lengths.tolist() == [3, 3, 3]
    assert found.counts.tolist() == [3, 3, 3]


def test_a_lone_occurrence_is_trusted_by_half() -> None:
    """One occurrence says little: a chain with probability 1/2 a node, its evidence growing by a token each."""
    found = blend([Row((1, 2, 3), 7)], 8)
    assert found.parents.tolist() == [-1, 0, 1]
    assert found.probs.tolist() == [0.5, 0.5, 0.5]
    assert found.lengths.tolist() == [7, 8, 9]


def test_ties_go_to_the_smaller_token() -> None:
    """Equally likely siblings come in the order of their ids."""
    assert blend([Row((t,), 1) for t in (5, 3, 9, 1)], 3).tokens.tolist() == [1, 3, 5]


def test_evidence_is_capped() -> None:
    """Match lengths end at 64 and counts at the largest int32."""
    found = blend([Row((1, 2, 3), 63, 1e12)], 3)
    assert found.lengths.tolist() == [63, 64, 64]
    assert found.counts.tolist() == [2**31 - 1] * 3


@pytest.mark.parametrize("budget", [-1, 0, 4])
def test_nothing_in_nothing_out(budget: int) -> None:
    """No rows, rows that have ended, or no budget: no nodes."""
    assert len(blend([], budget)) == 0
    assert len(blend([Row((), 3)], budget)) == 0
    assert len(blend([Row((1,), 3)], min(budget, 0))) == 0


def test_hundreds_of_rows() -> None:
    """A large, bushy and weighted input agrees with the definition too."""
    rng = np.random.default_rng(3)
    rows = [Row(tuple(rng.zipf(1.5, DEPTH) % 50), int(rng.integers(1, 30)), float(rng.integers(1, 9))) for _ in range(250)]
    assert_blended(blend(rows, 64), rows, 64)


def test_faults_are_named() -> None:
    """`validate` tells which invariant a damaged result breaks."""
    good = blend([Row((1, 2), 3), Row((4,), 3)], 8)
    good.validate()
    cases = {
        "invariant 1": ("tokens", [-1, 4, 2]),
        "invariant 2": ("parents", [-1, 1, 0]),
        "invariant 3": ("probs", [1.5, 0.1, 0.1]),
        "invariant 4": ("probs", [0.1, 0.5, 0.1]),
        "invariant 5": ("lengths", [3, 3, 65]),
        "1 counts": ("counts", [1]),
    }
    for message, (name, values) in cases.items():
        arrays = {field: getattr(good, field) for field in ("tokens", "parents", "probs", "lengths", "counts")}
        arrays[name] = np.array(values, arrays[name].dtype)
        with pytest.raises(ValueError, match=message):
            Continuations(**arrays).validate()
