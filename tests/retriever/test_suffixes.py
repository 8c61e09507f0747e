"""Packing of tokens and suffix orders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever.suffixes import build_suffix_array, pack_tokens, separator_of, token_width, unpack_tokens
from tests.retriever import oracles


@pytest.mark.parametrize(
    ("vocab_size", "width"),
    [(1, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (151_936, 3), ((1 << 24) - 1, 3), (1 << 24, 4)],
)
def test_width_holds_every_id_and_the_separator(vocab_size: int, width: int) -> None:
    """The narrowest width is taken in which the largest id is still below the separator."""
    assert token_width(vocab_size) == width
    assert vocab_size - 1 < separator_of(width)
    assert width == 1 or vocab_size > separator_of(width - 1)


@pytest.mark.parametrize("vocab_size", [0, -1, 1 << 31])
def test_impossible_vocabularies_are_refused(vocab_size: int) -> None:
    """A vocabulary that is empty or beyond 31 bits has no width."""
    with pytest.raises(ValueError, match="vocabulary"):
        token_width(vocab_size)


@given(st.integers(1, 4), st.lists(st.integers(0, 2**32 - 1)))
def test_packing_is_undone_and_keeps_the_order(width: int, ids: list[int]) -> None:
    """Tokens come back as they were, and compare as their bytes do."""
    tokens = [i % (1 << 8 * width) for i in ids]
    packed = pack_tokens(np.array(tokens, np.int64), width)
    assert unpack_tokens(packed, width).tolist() == tokens
    pieces = [bytes(packed[i : i + width]) for i in range(0, len(packed), width)]
    assert sorted(pieces) == [bytes(pack_tokens(np.array([t], np.int64), width)) for t in sorted(tokens)]


@given(st.lists(st.sampled_from([0, 1, 2, 255, 256, 70_000, 2**24 - 1, 2**32 - 1]), max_size=40))
def test_suffix_order_is_that_of_sorting(tokens: list[int]) -> None:
    """Whatever the ids and however much the text repeats, the order is that of sorting all suffixes."""
    assert build_suffix_array(pack_tokens(np.array(tokens, np.int64), 4), 4).tolist() == oracles.suffix_order(tokens)


def test_many_different_tokens_take_more_bytes_and_sort_alike() -> None:
    """More than 65536 different tokens need three bytes a rank; the order is still that of sorting."""
    tokens = np.random.default_rng(0).permutation(70_000).astype(np.int64)
    order = build_suffix_array(pack_tokens(tokens, 3), 3)
    assert order.dtype == np.int32
    assert np.array_equal(tokens[order], np.arange(70_000))
