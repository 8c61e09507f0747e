"""Suffix orders: where every token string of a text stands, sorted. Built once, offline, by libdivsufsort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retriever import plain

KERNEL_TOKENS = 1 << 20
"""A text of so many tokens is worth the time that loading compiled kernels takes."""


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


def build_suffix_array(text: NDArray[np.uint8], width: int) -> NDArray[np.int32]:
    """int32 [n]: the positions of a packed text of n tokens, sorted by the text that starts there.

    libdivsufsort sorts bytes. Tokens are first replaced by their rank among those that occur, which keeps the order and mostly
    needs fewer bytes; big-endian, the suffixes that start at a token's first byte sort as the tokens do, and the others are
    dropped. O(n log n), some 6 to 10 million tokens a second on one core; peak memory about 5 bytes a byte of ranks.
    """
    import pydivsufsort

    num_tokens = len(text) // width
    if not num_tokens:
        return np.zeros(0, np.int32)
    if num_tokens > 2**31 - 1:
        raise ValueError(f"a segment holds at most 2^31 - 1 tokens: {num_tokens}; use smaller segments")
    if with_kernels := num_tokens >= KERNEL_TOKENS and width <= 3:
        from retriever import kernels

        ranked, rank_width = kernels.rank_tokens(text, width)
    else:
        ranks, num_kinds = plain.rank_tokens(unpack_tokens(text, width))
        rank_width = max(1, ((num_kinds - 1).bit_length() + 7) // 8)
        ranked = pack_tokens(ranks, rank_width)
    order = pydivsufsort.divsufsort(ranked)
    suffixes: NDArray[np.int32] = (kernels if with_kernels else plain).token_suffixes(order, rank_width, num_tokens)
    return suffixes
