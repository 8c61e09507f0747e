"""Texts of which nearly all stands in another: found by MinHash with banding.

A text's shingles are its runs of five words. Of two sets of shingles, the share of equal minima under random hash functions
estimates the share of shingles they have in common (Broder, "On the resemblance and containment of documents", 1997). Minima
are compared in bands, so that only texts which agree in a whole band are compared at all (Indyk and Motwani, 1998): with 16
bands of 8, two texts that share 90 % are found with a probability of 99.99 %, two that share 50 % with 6 %, and those are then
told apart by all minima.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
from numpy.typing import NDArray

from corpora.filter import Text

NUM_BANDS = 16
ROWS = 8
SHINGLE_WORDS = 5
SIMILARITY = 0.9
"""Share of equal minima from which on a text counts as nearly the same."""

_WORDS = re.compile(r"\w+|[^\w\s]")
_CHUNK = 4096


class Sketches:
    """The texts seen so far, a kilobyte each."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._factors = rng.integers(1, 1 << 62, NUM_BANDS * ROWS, np.uint64) * np.uint64(2) + np.uint64(1)
        self._minima: list[NDArray[np.uint64]] = []
        self._names: list[str] = []
        self._bands: dict[bytes, list[int]] = {}

    def similar(self, name: str, content: Text) -> str:
        """The name of the first text that is nearly the same; "" if there is none, and then this one is remembered.

        Texts of fewer words than a shingle has, and ids, are like no other. O(words x hash functions).
        """
        text = "\n".join(part.content for part in content.parts if isinstance(part.content, str))
        minima = self._sketch(text)
        if minima is None:
            return ""
        keys = [bytes([band]) + minima[band * ROWS : (band + 1) * ROWS].tobytes() for band in range(NUM_BANDS)]
        for other in dict.fromkeys(other for key in keys for other in self._bands.get(key, ())):
            if np.mean(self._minima[other] == minima) >= SIMILARITY:
                return self._names[other]
        for key in keys:
            self._bands.setdefault(key, []).append(len(self._names))
        self._minima.append(minima)
        self._names.append(name)
        return ""

    def _sketch(self, text: str) -> NDArray[np.uint64] | None:
        """The least hash of the text's shingles under each function, uint64 [functions]; None if there are too few words."""
        words = np.array([zlib.crc32(word.encode()) for word in _WORDS.findall(text)], np.uint64)
        if len(words) < SHINGLE_WORDS:
            return None
        shingles = np.zeros(len(words) - SHINGLE_WORDS + 1, np.uint64)
        for offset in range(SHINGLE_WORDS):
            shingles = _mixed(shingles + words[offset : offset + len(shingles)])
        shingles = np.unique(shingles)
        minima = np.full(len(self._factors), np.iinfo(np.uint64).max)
        for begin in range(0, len(shingles), _CHUNK):
            hashes = _mixed(shingles[begin : begin + _CHUNK, None] * self._factors)
            np.minimum(minima, hashes.min(axis=0), out=minima)
        return minima


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers under which near values are far apart (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
