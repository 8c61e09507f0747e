"""What the ends of a corpus' own text find in the rest of it: how much there is to draft from, without a query.

In plain numpy: who looks at a corpus once should not wait for kernels to be loaded, or even compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retriever.format import Manifest
from retriever.places import interval
from retriever.segment import Segment, open_segments


@dataclass(frozen=True)
class SuffixStatistics:
    """What suffixes of one length found besides themselves: how many were asked, the share that found something, and how many
    other occurrences in the mean and in the median.
    """

    length: int
    num_samples: int
    share_found: float
    mean_found: float
    median_found: float


def statistics_of(folder: Path, lengths: Sequence[int], *, samples: int = 1000) -> list[SuffixStatistics]:
    """`suffix_statistics` of the version in `folder`. Raises a FormatError naming the file."""
    return suffix_statistics(open_segments(folder, Manifest.read(folder)), lengths, samples=samples)


def suffix_statistics(
    segments: Sequence[Segment], lengths: Sequence[int], *, samples: int = 1000, seed: int = 0
) -> list[SuffixStatistics]:
    """What a suffix of each of `lengths` tokens finds on average besides itself, from places of the text drawn evenly.

    Lengths longer than any document that was drawn are left out. Some fifty microseconds a sample, length and segment.
    """
    ends = [np.cumsum(np.clip(np.diff(segment.offsets)[segment.living] - 1, 0, len(segment.order))) for segment in segments]
    sizes = np.array([int(end[-1]) if len(end) else 0 for end in ends], np.float64)
    if not sizes.sum():
        return []
    rng = np.random.default_rng(seed)
    counts: dict[int, list[int]] = {length: [] for length in lengths}
    for number in rng.choice(len(segments), samples, p=sizes / sizes.sum()).tolist():
        segment, end = segments[number], ends[number]
        place = int(rng.integers(end[-1]))
        i = int(np.searchsorted(end, place, "right"))
        num_before = place + 1 - (int(end[i - 1]) if i else 0)
        text = segment.packed(int(segment.living[i]))[: num_before * segment.width].tobytes()
        for length in lengths:
            if length * segment.width <= len(text):
                suffix = text[-length * segment.width :]
                counts[length].append(sum(count(each, suffix) for each in segments) - 1)
    return [
        SuffixStatistics(
            length, len(found), float(np.mean(np.array(found) > 0)), float(np.mean(found)), float(np.median(found))
        )
        for length, found in counts.items()
        if found
    ]


def count(segment: Segment, packed: bytes) -> int:
    """How often some packed tokens stand in what is left of a segment. O(log n) comparisons."""
    low, high = interval(segment, packed)
    return _left_before(segment, high) - _left_before(segment, low)


def _left_before(segment: Segment, place: int) -> int:
    """How many suffixes before this place of the order belong to documents that were not deleted."""
    if not len(segment.left):
        return place
    word, bit = divmod(place, 64)
    whole = np.bitwise_count(segment.left[word // 8 * 8 : word]).sum()
    rest = int(segment.left[word]) & ((1 << bit) - 1) if bit else 0
    return int(segment.ranks[word // 8]) + int(whole) + rest.bit_count()
