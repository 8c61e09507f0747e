"""A datastore: one corpus version, memory-mapped, asked what followed a context.

Opening costs the same whatever the size: headers, sizes and the manifest are verified, files up to a MiB read and their
checksums compared, the rest only mapped. `check` reads it all. A version never changes, so any number of threads may look up
at once, and processes share the pages. Cutting a file short while it is mapped is the one thing nothing here can survive;
versions are removed by unlinking, which is safe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from retriever import kernels, pages, plain
from retriever.continuations import Continuations, Match
from retriever.ends import SuffixStatistics, suffix_statistics
from retriever.errors import Closed, TokenizerMismatch
from retriever.format import (
    DELETED,
    METADATA,
    Manifest,
    MappedFile,
    build_continuations,
    build_table,
    find_frequent,
    tombstones,
)
from retriever.places import Occurrence, Tokens, occurrence_at
from retriever.segment import Segment, open_segments
from retriever.suffixes import separator_of, token_width, unpack_tokens

_SAMPLED_PAIRS = 4096
_COMPARED_TOKENS = 1024


@dataclass(frozen=True)
class Problem:
    """One thing `Datastore.check` found: which file, and what is wrong with it."""

    file: str
    fault: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.file}; rebuild the corpus with `draftloom corpus build`"


@dataclass(frozen=True)
class Document:
    """One document of a version: what it is called, which segment it lies in, and its tokens.

    `packed` is a view of the text as it lies on disk, valid while the datastore is open, `width` bytes a token.
    """

    name: str
    segment: int
    packed: NDArray[np.uint8]
    width: int

    @property
    def tokens(self) -> Tokens:
        """int32 [n], a copy."""
        return unpack_tokens(self.packed, self.width).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Place:
    """A place in a document: `tokens`, int32 [n], stand around it, and tokens[at] is what follows; at = n at its very end."""

    tokens: Tokens
    at: int


class Datastore:
    """An open corpus version. Use as a context manager, or call `close`."""

    def __init__(self, path: Path, manifest: Manifest, segments: list[Segment], metadata: MappedFile | None) -> None:
        self.path = path
        self.manifest = manifest
        self._vocab_size = manifest.vocab_size
        self._width = token_width(manifest.vocab_size)
        self._segments: list[Segment] | None = segments
        self._metadata = metadata
        self._described = np.stack([kernels.describe(*s.read_by_kernels()) for s in segments])

    @staticmethod
    def open(path: Path | str, fingerprint: str | None = None, vocab_size: int | None = None) -> Datastore:
        """Open the version in folder `path`; refuse it if it was not built with the tokenizer named by `fingerprint`, or has
        ids of `vocab_size` or above. None: whatever it is.

        Raises TokenizerMismatch, or a FormatError naming the file: BadManifest, BadMagic, UnsupportedVersion, Truncated,
        ChecksumMismatch.
        """
        folder = Path(path)
        manifest = Manifest.read(folder)
        if fingerprint is not None and manifest.fingerprint != fingerprint:
            raise TokenizerMismatch(
                f"corpus {manifest.corpus!r} was built with another tokenizer: {manifest.fingerprint} "
                f"(asked for: {fingerprint}); build it again for this model with `draftloom corpus build`"
            )
        if vocab_size is not None and manifest.vocab_size > vocab_size:
            raise TokenizerMismatch(
                f"corpus {manifest.corpus!r} may have token ids beyond the model's {vocab_size}: {manifest.vocab_size}; "
                "build it again for this model with `draftloom corpus build`"
            )
        segments = open_segments(folder, manifest)
        entry = manifest.files.get(METADATA)
        metadata = None if entry is None else MappedFile.open(folder / METADATA, b"meta", entry)
        return Datastore(folder, manifest, segments, metadata)

    @property
    def name(self) -> str:
        """The corpus this is a version of."""
        return self.manifest.corpus

    @property
    def version(self) -> str:
        """The version's id."""
        return self.manifest.version

    @property
    def fingerprint(self) -> str:
        """The tokenizer it was built with."""
        return self.manifest.fingerprint

    @property
    def vocab_size(self) -> int:
        """Every token id is below this."""
        return self.manifest.vocab_size

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, separators left out."""
        return self.manifest.num_tokens

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return self.manifest.num_documents

    def lookup(
        self,
        context: Tokens,
        budget: int,
        *,
        max_length: int = 32,
        samples: int = 64,
        classes: int = 2,
        depth: int = 16,
        seconds: float = math.inf,
    ) -> Continuations:
        """At most `budget` nodes that may follow `context` (int32 [n]), from what followed its end in the corpus.

        The longest end of the context that occurs (at most `max_length` tokens) is one class of evidence, up to
        `classes` - 1 shorter ends that occur at least twice as often are the others (more than one cost time and drafted no
        better); of each, at most `samples` occurrences are looked at, an even stride, and followed for `depth` tokens, never
        beyond their document. Probabilities as in `kernels.blend`.

        After `seconds` no further length is looked for, and the answer is made of what has been found. Only what is being read
        then is waited for, which may take long where pages are not in memory (see `resident`).

        Empty context, no match, or a budget below 1: no nodes. Some 10 to 60 microseconds where the pages are in memory. Raises
        Closed.
        """
        end = 0 if seconds == math.inf else time.monotonic_ns() + max(1, int(seconds * 1e9))
        if max_length < 1 or samples < 1 or classes < 1 or depth < 1:
            _positive(max_length=max_length, samples=samples, classes=classes, depth=depth)
        segments = self._mapped()  # a local reference: `close` in another thread must not unmap under the kernel
        nodes = Continuations.room(budget)
        num_nodes = kernels.lookup(
            self._described,
            self._width,
            self._vocab_size,
            np.ascontiguousarray(context, np.int32),
            max_length,
            samples,
            classes,
            depth,
            end,
            *nodes,
        )
        del segments
        return Continuations.of(nodes, num_nodes)

    def longest_match(self, context: Tokens, *, max_length: int = 32) -> Match:
        """The longest end of `context` (int32 [n]), at most `max_length` tokens, that occurs, and how often. O(log) searches.

        Empty context or no match: Match(0, 0). Raises Closed.
        """
        _positive(max_length=max_length)
        segments = self._mapped()
        tokens = np.ascontiguousarray(context, np.int32)
        limit = kernels.usable_length(tokens, self.vocab_size, max_length)
        match = Match(*kernels.longest(self._described, self._width, tokens, limit))
        del segments
        return match

    def place(self, context: Tokens, *, min_length: int, max_length: int = 32, before: int, after: int) -> Place | None:
        """Where the longest end of `context` (int32 [n]), of `min_length` to `max_length` tokens, stands, and the document from
        `before` tokens before what follows it to `after` tokens behind; of several such places the first in the order.

        None if none is so long. Cost: a search, some more where there is one, and reading `before` + `after` tokens. Raises
        Closed.
        """
        _positive(min_length=min_length, before=before, after=after)
        segments = self._mapped()
        tokens = np.ascontiguousarray(context, np.int32)
        number, at = kernels.first_place(self._described, self._width, self.vocab_size, tokens, min_length, max_length)
        if number < 0:
            return None
        segment = segments[number]
        document = segment.document_at(at - 1)
        if document is None:
            return None
        first, last = segment.offsets[document : document + 2].tolist()
        begin, end = max(first, at - before, 0), min(last - 1, at + after)
        packed = segment.text[begin * self._width : end * self._width]
        return Place(unpack_tokens(packed, self._width).astype(np.int32), at - begin)

    def search(self, key: Tokens, limit: int = 20, *, around: int = 16) -> list[Occurrence]:
        """Where the tokens `key` (int32 [n]) occur: at most `limit` places, evenly spread over all, by document and place.

        Empty key, no token of the vocabulary, or no occurrence: []. Cost: a search, and reading `limit` places. Raises Closed.
        """
        _positive(limit=limit, around=around)
        intervals = self._intervals(key)
        total = sum(count for _, _, _, count in intervals)
        wanted = [kernels.sample_place(i, total, min(limit, total)) for i in range(min(limit, total))]
        found, before, first_document = [], 0, 0
        for segment, low, high, count in intervals:
            for place in (at - before for at in wanted if before <= at < before + count):
                index = kernels.nth_left(segment.left, segment.ranks, low, high, place)
                position = int(segment.order[index]) if index >= 0 else -1
                occurrence = occurrence_at(segment, position, len(key), around, first_document)
                if occurrence is not None:
                    found.append(occurrence)
            before += count
            first_document += len(segment.living)
        return sorted(found, key=lambda occurrence: (occurrence.document, occurrence.offset))

    def count(self, key: Tokens) -> int:
        """How often the tokens `key` (int32 [n]) occur, exactly; 0 for an empty key or one that is no text. Raises Closed."""
        return sum(count for _, _, _, count in self._intervals(key))

    def next_tokens(self, key: Tokens, limit: int = 1 << 20) -> tuple[Tokens, NDArray[np.int64]]:
        """The tokens (int32 [m]) that follow `key` (int32 [n]) and how often each does (int64 [m]), most frequent first.

        Counts are exact; what ends with its document has no next token. No occurrence: none. At most `limit` of a segment,
        those with the smallest ids. Cost: O(m log n). Raises Closed.
        """
        _positive(limit=limit)
        pairs = [
            kernels.next_tokens(s.text, self._width, s.order, s.left, s.ranks, len(key), low, high, limit)
            for s, low, high, _ in self._intervals(key)
        ]
        tokens, where = np.unique(np.concatenate([p[:, 0] for p in pairs] or [np.zeros(0, np.int64)]), return_inverse=True)
        counts = np.zeros(len(tokens), np.int64)
        np.add.at(counts, where, np.concatenate([p[:, 1] for p in pairs] or [np.zeros(0, np.int64)]))
        order = np.lexsort((tokens, -counts))
        return tokens[order].astype(np.int32), counts[order]

    def frequent_next(self, token: int, most: int = 8) -> tuple[Tokens, NDArray[np.int64]]:
        """(tokens int32 [m], counts int64 [m]): at most `most` tokens that most often follow a frequent one, and how often.

        From tables in memory, in about a microsecond, and without a look at the text: what a table does not list (less than a
        64th of the occurrences, or beyond the sixteenth) does not count, and a segment that lost documents is not asked. So the
        counts are exact in a corpus of one segment. A rare token, or one that is no token: nothing. Raises Closed.
        """
        segments = self._mapped()
        found = kernels.frequent_next(self._described, self.vocab_size, token, most)
        del segments
        return found

    def suffix_statistics(
        self, lengths: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), *, samples: int = 1000, seed: int = 0
    ) -> list[SuffixStatistics]:
        """`ends.suffix_statistics` of the segments. Raises Closed."""
        _positive(samples=samples, **{"lengths": min(lengths, default=1)})
        return suffix_statistics(self._mapped(), lengths, samples=samples, seed=seed)

    def document_name(self, index: int) -> str:
        """What document `index` (0 to num_documents - 1) was called when the corpus was built. Raises IndexError, Closed."""
        segment, i = self._document(index)
        return segment.name(i)

    def document_tokens(self, index: int) -> Tokens:
        """int32 [n], a copy of document `index`. Raises IndexError, Closed."""
        segment, i = self._document(index)
        return unpack_tokens(segment.packed(i), self._width).astype(np.int32)

    def documents(self) -> Iterator[Document]:
        """Every document that was not deleted, in the order of their indices. Raises Closed."""
        for number, segment in enumerate(self._mapped()):
            for i in segment.living.tolist():
                yield Document(segment.name(i), number, segment.packed(i), self._width)

    def check(self, full: bool = False) -> list[Problem]:
        """What is wrong with the files; an empty list if nothing is.

        The order is verified on a sample of its places. `full` reads everything: all checksums, ids, the order, the documents
        and the table; about four seconds for ten million tokens, most of it without the GIL. Raises Closed.
        """
        problems = [problem for segment in self._mapped() for problem in self._check_segment(segment, full)]
        if self._metadata is not None and self._metadata.damaged():
            problems.append(Problem(str(self._metadata.path), "content was altered"))
        return problems

    def resident(self) -> bool:
        """Whether everything that a lookup may read is in memory, so that none has to wait. Some 10 microseconds a megabyte.

        True where the system does not tell. Raises Closed.
        """
        return all(pages.resident(array) for segment in self._mapped() for array in segment.looked_up())

    def populate(self) -> None:
        """Read everything that a lookup may read into memory; ends early if the datastore is closed. Waits for the disk.

        Raises Closed.
        """
        for segment in self._mapped():
            for array in segment.looked_up():
                pages.populate(array, lambda: self._segments is not None)

    def close(self) -> None:
        """Let the mappings go, as soon as no lookup in another thread needs them. Twice is fine."""
        self._segments = None

    def __enter__(self) -> Datastore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def segments(self) -> Sequence[Segment]:
        """Its segments, for those who make another version of it. Raises Closed."""
        return tuple(self._mapped())

    def _mapped(self) -> list[Segment]:
        segments = self._segments
        if segments is None:
            raise Closed(f"datastore was closed: {self.path}; open it again")
        return segments

    def _intervals(self, key: Tokens) -> list[tuple[Segment, int, int, int]]:
        """(segment, low, high, count of what is left) for every segment; none for a key that is no text."""
        tokens = np.ascontiguousarray(key, np.int32)
        segments = self._mapped()
        if not len(tokens) or kernels.usable_length(tokens, self.vocab_size, len(tokens)) < len(tokens):
            return []
        intervals = np.zeros((len(segments), 3), np.int64)
        words = np.empty(kernels.key_words(len(tokens), self._width), np.uint64)
        kernels.count_matches(self._described, self._width, tokens, intervals, words)
        return [(segment, low, high, left) for segment, (low, high, left) in zip(segments, intervals.tolist(), strict=True)]

    def _document(self, index: int) -> tuple[Segment, int]:
        remaining = index
        for segment in self._mapped():
            if 0 <= remaining < len(segment.living):
                return segment, int(segment.living[remaining])
            remaining -= len(segment.living)
        raise IndexError(f"no such document: {index}, the corpus has {self.num_documents}")

    def _check_segment(self, segment: Segment, full: bool) -> list[Problem]:
        files = segment.files
        problems = []

        def problem(kind: str, fault: str) -> None:
            problems.append(Problem(str(files[kind].path), fault))

        for kind, file in files.items():
            if (full or file.small) and file.damaged():
                problem(kind, "content was altered")
        text, width, order, separator = segment.text, self._width, segment.order, separator_of(self._width)
        if full:
            faults = kernels.all_order_faults(text, width, order, separator)
        else:
            faults = kernels.order_faults(text, width, order, max(1, len(order) // _SAMPLED_PAIRS), _COMPARED_TOKENS)
        if faults:
            problem("suffixes", f"suffix order is wrong at {faults} places")
        if full and not problems:
            tokens = unpack_tokens(text, width)
            ends = np.flatnonzero(tokens == separator)
            if int(np.count_nonzero(tokens >= self.vocab_size)) != len(ends):
                problem("tokens", f"token ids beyond the vocabulary of {self.vocab_size}")
            if not np.array_equal(segment.offsets, np.concatenate(([0], ends + 1))):
                problem("documents", "documents do not begin where the text says")
            if np.any(np.diff(segment.name_offsets) < 0) or segment.name_offsets[-1] != len(segment.names):
                problem("documents", "document names are out of bounds")
            if DELETED in files and not problems:
                gone = np.ones(len(segment.offsets) - 1, np.bool_)
                gone[segment.living] = False
                left, ranks, _ = tombstones(order, segment.offsets, gone)
                if not (np.array_equal(left, segment.left) and np.array_equal(ranks, segment.ranks)):
                    problem(DELETED, "what is left is not what the deleted documents leave")
            if not problems:
                frequent = find_frequent(text, width, order)
                if not np.array_equal(segment.table, build_table(text, width, order, frequent)[0]):
                    problem("table", "table of frequent contexts is not that of the text")
                contexts, runs = build_continuations(text, width, order, frequent)
                if "continuations" in files and not (
                    np.array_equal(segment.contexts, contexts) and np.array_equal(segment.runs, runs)
                ):
                    problem("continuations", "continuations of frequent contexts are not those of the text")
                if "samples" in files and not np.array_equal(segment.samples, plain.sample_order(text, width, order)):
                    problem("samples", "samples of the order are not those of the text")
        return problems


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1: {value}")
