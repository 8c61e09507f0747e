"""Suffix orders: where every token string of a text stands, sorted. Built once, offline, by libdivsufsort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retriever import kernels


def token_width(vocab_size: int) -> int:
    """Bytes a token takes on disk: the fewest that hold every id and one value more, the separator. 1 to 4."""
    if vocab_size < 1:
        raise ValueError(f"a vocabulary needs at least one token: {vocab_size}")
    width = (vocab_size.bit_length() + 7) // 8
    if width > 4 or vocab_size > 2**31 - 1:
        raise ValueError(f"token ids must fit into 31 bits, vocabulary size: {vocab_size}")
    return width


def separator_of(width: int) -> int:
    """The largest value of a width. It ends every document and is never a token, so it sorts after all of them."""
    return (1 << 8 * width) - 1


def pack_tokens(tokens: NDArray[np.integer], width: int) -> NDArray[np.uint8]:
    """uint8 [n * width]: token ids [n], big-endian, so that comparing bytes compares ids. Ids must fit. O(n)."""
    wide = np.ascontiguousarray(tokens).astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.ascontiguousarray(wide[:, 4 - width :]).reshape(-1)


def unpack_tokens(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint32]:
    """uint32 [n], the inverse of `pack_tokens`. O(n)."""
    wide = np.zeros((len(packed) // width, 4), np.uint8)
    wide[:, 4 - width :] = packed.reshape(-1, width)
    return wide.view(">u4").reshape(-1).astype(np.uint32)


def build_suffix_array(tokens: NDArray[np.integer]) -> NDArray[np.int32]:
    """int32 [n]: the positions of a text of token ids [n] (0 <= id < 2^32), sorted by the text that starts there.

    libdivsufsort sorts bytes. Tokens are first replaced by their rank among those that occur, which keeps the order and mostly
    needs fewer bytes; big-endian, the suffixes that start at a token's first byte sort as the tokens do, and the others are
    dropped. O(n log n), some 5 to 8 million tokens a second on one core; peak memory about 5 bytes a byte of packed text.
    """
    import pydivsufsort

    if not len(tokens):
        return np.zeros(0, np.int32)
    if len(tokens) > 2**31 - 1:
        raise ValueError(f"a segment holds at most 2^31 - 1 tokens: {len(tokens)}; use smaller segments")
    ranks, num_kinds = _ranks(tokens)
    width = max(1, ((num_kinds - 1).bit_length() + 7) // 8)
    packed = pack_tokens(ranks, width)
    del ranks
    order = pydivsufsort.divsufsort(packed)
    return kernels.token_suffixes(order, width, len(tokens))


def _ranks(tokens: NDArray[np.integer]) -> tuple[NDArray[np.integer], int]:
    """Every token's rank among the distinct tokens, and how many those are. Counts where ids are small, else sorts."""
    largest = int(tokens.max())
    if largest > 4 * len(tokens) + 65536:
        kinds, ranks = np.unique(tokens, return_inverse=True)
        return ranks, len(kinds)
    occurs = np.zeros(largest + 1, np.bool_)
    occurs[tokens] = True
    rank_of = np.cumsum(occurs, dtype=np.uint32) - np.uint32(1)
    return rank_of[tokens], int(rank_of[-1]) + 1
