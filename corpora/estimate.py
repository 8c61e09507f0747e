"""How many tokens a survey's documents have, and how large their index will be, without tokenizing all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from corpora.survey import Found, ending_of

SAMPLE_CHARS = 1 << 18
DOCUMENT_CHARS = 1 << 13
CHARS_PER_TOKEN = 3.7
"""Of source code, under vocabularies of 50 to 150 thousand: for want of a tokenizer."""
TABLE_BYTES = 0.89
"""What the tables of short contexts and the samples of the order add to a token, at most."""
DOCUMENT_BYTES = 16

Encode = Callable[[Sequence[str]], list[NDArray[np.int32]]]


@dataclass
class Estimate:
    """What is stored, by name ending: characters, and a sample of up to SAMPLE_CHARS, DOCUMENT_CHARS of a document at most."""

    num_documents: int = 0
    name_bytes: int = 0
    num_ids: int = 0
    """Of documents that are ids already."""
    chars: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    samples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _sampled: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, found: Found) -> None:
        ending = ending_of(found.decision.name)
        for document in found.documents:
            self.num_documents += 1
            self.name_bytes += len(document.name.encode("utf-8"))
            if not isinstance(document.content, str):
                self.num_ids += len(document.content)
                continue
            self.chars[ending] += len(document.content)
            if self._sampled[ending] < SAMPLE_CHARS:
                self.samples[ending].append(document.content[:DOCUMENT_CHARS])
                self._sampled[ending] += len(self.samples[ending][-1])

    def num_tokens(self, encode: Encode | None) -> int:
        """About how many tokens there are: each ending's characters by what its sample has a token, or by CHARS_PER_TOKEN."""
        total = float(self.num_ids)
        for ending, chars in self.chars.items():
            sampled = sum(map(len, encode(self.samples[ending]))) if encode else self._sampled[ending] / CHARS_PER_TOKEN
            total += chars * sampled / self._sampled[ending]
        return round(total)

    def index_bytes(self, num_tokens: int, vocab_size: int) -> int:
        """About how large an index of so many tokens will be on disk."""
        width = next(width for width in (1, 2, 3, 4) if vocab_size < 256**width)
        return round(num_tokens * (width + 4 + TABLE_BYTES)) + self.num_documents * (DOCUMENT_BYTES + width) + self.name_bytes
