"""What is computed in plain numpy for small segments, beside the kernels for large ones and the obvious loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from retriever import format as corpus_format
from retriever import kernels, plain, suffixes
from retriever.format import build_suffix_order, build_table, find_frequent
from retriever.suffixes import pack_tokens, separator_of, unpack_tokens

DOCUMENTS = st.lists(st.lists(st.sampled_from([0, 1, 2, 200, 254]), max_size=12), min_size=1, max_size=12)


def packed(documents: Sequence[Sequence[int]], width: int) -> NDArray[np.uint8]:
    """The text of a segment, with `254` standing for the largest id there is."""
    separator = separator_of(width)
    ids = [separator - 1 if t == 254 else t for document in documents for t in (*document, -1)]
    return pack_tokens(np.array([separator if t < 0 else t for t in ids], np.int64), width)


@settings(deadline=None, max_examples=40)
@given(DOCUMENTS, st.integers(1, 3))
def test_small_and_large_segments_are_sorted_alike(documents: list[list[int]], width: int) -> None:
    """Order and table are the same whether numpy or the kernels made them."""
    text = packed(documents, width)
    small = build_suffix_order(text, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_format, "_TABLE_MIN_COUNT", 2)
        small_frequent = find_frequent(text, width, small)
        small_table = build_table(text, width, small, small_frequent)
        patch.setattr(suffixes, "KERNEL_TOKENS", 0)
        patch.setattr(corpus_format, "KERNEL_TOKENS", 0)
        large = build_suffix_order(text, width)
        large_frequent = find_frequent(text, width, small)
        large_table = build_table(text, width, small, large_frequent)
    assert small.tolist() == large.tolist()
    assert small_frequent.tolist() == large_frequent.tolist()
    assert small_table[1] == large_table[1]
    assert small_table[0].tolist() == large_table[0].tolist()


def test_ranks_need_more_bytes_as_there_are_more_tokens() -> None:
    """The kernel packs ranks in as many bytes as the different tokens, the separator among them, need."""
    for num_kinds, rank_width in ((1, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3)):
        ids = [*range(num_kinds - 1), separator_of(3)]
        ranked, width = kernels.rank_tokens(pack_tokens(np.array(ids, np.int64), 3), 3)
        assert width == rank_width
        assert unpack_tokens(ranked, width).tolist() == list(range(num_kinds))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=3), st.integers(1, 3))
def test_contexts_hash_as_the_kernel_has_it(key: list[int], length: int) -> None:
    """A table filled by numpy is searched by the kernel, so both must agree about every hash."""
    expected = kernels.hash_context(np.array(key, np.int32), length) % 2**64
    assert plain.hash_contexts(np.array([key[:length]], np.int32)).tolist() == [expected]


@settings(deadline=None, max_examples=40)
@given(DOCUMENTS, st.sampled_from([1, 2, 4, plain.BLOCK]), st.data())
def test_marks_of_what_is_left_are_those_of_a_loop(documents: list[list[int]], block: int, data: st.DataObject) -> None:
    """Bit i says whether the document of suffix i is left, in blocks of any size; ranks count the bits before each 512."""
    deleted = np.array(data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))))
    offsets = np.cumsum([0] + [len(d) + 1 for d in documents])
    order = build_suffix_order(packed(documents, 2), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "BLOCK", block)
        left = plain.left_suffixes(order, offsets, deleted)
    bits = [not deleted[np.searchsorted(offsets, position, "right") - 1] for position in order.tolist()]
    assert np.unpackbits(left.view(np.uint8), bitorder="little").tolist() == bits + [False] * (-len(bits) % 64)
    assert plain.ranks(left).tolist() == [sum(bits[:i]) for i in range(0, len(bits), 512)] + [sum(bits)]


def test_a_damaged_order_marks_nothing_outside() -> None:
    """Positions below 0, beyond the text and in no document are not left; offsets out of bounds reach nothing."""
    order = np.array([-5, 0, 3, 7, 2**31 - 1, 1], np.int32)
    everything = np.array([False, False])
    assert plain.left_suffixes(order, np.array([0, 2, 5]), everything).tolist() == [0b100110]
    assert plain.left_suffixes(order, np.array([-9, 2, 2**60]), everything).tolist() == [0b101110]
    assert plain.left_suffixes(order, np.array([0, 2, -1]), everything).tolist() == [0]
