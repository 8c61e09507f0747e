"""Where some tokens stand in a version, and what follows them there.

In plain numpy: who looks at a corpus once should not wait for kernels to be loaded, or even compiled. A datastore, which has
them, finds the same (`Datastore.search`, `count`, `next_tokens`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retriever.format import Manifest
from retriever.segment import Segment, open_segments
from retriever.suffixes import pack_tokens, separator_of, unpack_tokens

Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One place where something was found: in which document (its index and name), so many tokens in, and the tokens before and
    after (int32 [n], within the document).
    """

    document: int
    name: str
    offset: int
    before: Tokens
    after: Tokens


@dataclass(frozen=True, eq=False)
class Places:
    """All places where a key of `length` tokens stands in a version.

    `found` has the segments, and of each the positions in its text (int32 [n]) at which the key begins in documents that were
    not deleted, ordered as the text that begins there.
    """

    length: int
    found: tuple[tuple[Segment, NDArray[np.int32]], ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(len(positions) for _, positions in self.found)

    def spread(self, limit: int = 20, *, around: int = 16) -> list[Occurrence]:
        """At most `limit` of them, evenly spread over all, by document and place, with the tokens around them."""
        count, num_wanted = self.count, min(limit, self.count)
        wanted = [(2 * i + 1) * count // (2 * num_wanted) for i in range(num_wanted)]
        occurrences, before, first_document = [], 0, 0
        for segment, positions in self.found:
            here = [int(positions[at - before]) for at in wanted if before <= at < before + len(positions)]
            found = (occurrence_at(segment, position, self.length, around, first_document) for position in here)
            occurrences += [occurrence for occurrence in found if occurrence is not None]
            before += len(positions)
            first_document += len(segment.living)
        return sorted(occurrences, key=lambda occurrence: (occurrence.document, occurrence.offset))

    def next_tokens(self) -> tuple[Tokens, NDArray[np.int64]]:
        """The tokens (int32 [m]) that follow and how often each does (int64 [m]), most frequent first, then the smallest.

        Counts are exact; what ends with its document has no next token. O(count).
        """
        followers = [np.zeros(0, np.uint32)]
        for segment, positions in self.found:
            text = segment.text.reshape(-1, segment.width)
            after = positions[positions >= 0].astype(np.int64) + self.length
            tokens = unpack_tokens(text[after[after < len(text)]].reshape(-1), segment.width)
            followers.append(tokens[tokens != separator_of(segment.width)])
        tokens, counts = np.unique(np.concatenate(followers), return_counts=True)
        order = np.lexsort((tokens, -counts))
        return tokens[order].astype(np.int32), counts[order].astype(np.int64)


def places_in(folder: Path, key: Tokens) -> Places:
    """Where the tokens `key` (int32 [n]) stand in the version in `folder`. Raises a FormatError naming the file.

    Empty key, or one that is no text: none. Cost: O(log n) comparisons, and reading the order at every place.
    """
    manifest = Manifest.read(folder)
    segments = open_segments(folder, manifest)
    if not len(key) or key.min() < 0 or key.max() >= manifest.vocab_size:
        return Places(len(key), ())
    return Places(len(key), tuple((segment, _positions(segment, key)) for segment in segments))


def interval(segment: Segment, packed: bytes) -> tuple[int, int]:
    """The part (low, high) of a segment's order whose suffixes begin with some packed tokens. O(log n) comparisons."""

    def beginning(place: int) -> bytes:
        begin = max(int(segment.order[place]), 0) * segment.width
        return segment.text[begin : begin + len(packed)].tobytes()

    places = range(len(segment.order))
    low = bisect_left(places, packed, key=beginning)
    return low, bisect_right(places, packed, lo=low, key=beginning)


def occurrence_at(segment: Segment, position: int, length: int, around: int, first_document: int) -> Occurrence | None:
    """What stands at a position of a segment's text, `around` tokens before and after a key of `length`; None where nothing
    does, in a damaged file. `first_document` is the index of the segment's first document.
    """
    document = segment.document_at(position)
    if document is None:
        return None
    tokens = unpack_tokens(segment.packed(document), segment.width).astype(np.int32)
    offset = position - int(segment.offsets[document])
    return Occurrence(
        first_document + int(np.searchsorted(segment.living, document)),
        segment.name(document),
        offset,
        tokens[max(0, offset - around) : offset],
        tokens[offset + length : offset + length + around],
    )


def _positions(segment: Segment, key: Tokens) -> NDArray[np.int32]:
    """Where `key` begins in what is left of a segment, in the order of its suffixes."""
    low, high = interval(segment, pack_tokens(key, segment.width).tobytes())
    positions = segment.order[low:high]
    if not len(segment.left):
        return positions
    words = segment.left[low // 64 : -(-high // 64)]
    is_left = np.unpackbits(words.view(np.uint8), bitorder="little")[low % 64 :][: high - low]
    return positions[np.flatnonzero(is_left)]
