"""A version from another one: what did not change is shared, what is gone is masked, and small segments become larger ones.

The structure of a log-structured merge tree (O'Neil et al. 1996): an update writes a segment of what is new, and joins it with
smaller ones until each is more than `GROWTH` times as large as all that are smaller together. So sizes triple from one to the
next, their number stays logarithmic, and a token is sorted anew O(log n) times however many updates there are.

Deleted text is masked first (the file `deleted` of its segment), and leaves the disk when its segment is written anew: when it
is joined, or when more than `most_deleted` of it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.format import DELETED, SEGMENT_TOKENS, Manifest, OnProgress, VersionWriter, tombstones
from retriever.segment import Segment, open_segments

GROWTH = 2
"""A segment is joined with the smaller ones if it is at most this many times as large as they are together."""


def write_update(
    root: Path,
    corpus: str,
    version_id: str,
    base: Path,
    documents: Iterable[tuple[str, NDArray[np.integer]]],
    *,
    removed: Collection[str] | Callable[[], Collection[str]] = (),
    options: Mapping[str, Any] | None = None,
    sources: Iterable[str] | None = None,
    num_text_bytes: int | Callable[[], int] = 0,
    metadata: bytes | Callable[[], bytes] = b"",
    segment_tokens: int = SEGMENT_TOKENS,
    most_deleted: float = 0.25,
    on_progress: OnProgress | None = None,
) -> Path:
    """Write a version that is the one in folder `base` without the documents named in `removed`, and with `documents`.

    All documents of a name in `removed` go (a replaced document is named there, and comes again in `documents`); names that the
    base does not have are passed over. Tokenizer and vocabulary are the base's, and so are `options` and `sources` where they
    are None. `removed`, `num_text_bytes` (of the whole version) and `metadata` may be functions, asked when all documents have
    been read.

    Segments that stay are hard links to the base's files; either version may be removed without harm to the other. A segment is
    written anew, without what was deleted from it, if it is small beside what is new (see above) or more than the share
    `most_deleted` of its tokens is gone; 0 rids the disk of all deleted text. The manifest counts what is left.

    Cost: one pass over the order of every segment that loses documents, and sorting what is written. Memory, failures and
    progress as in `format.write_version`; raises what it raises, and a FormatError where the base cannot be read.
    """
    manifest = Manifest.read(base)
    segments = open_segments(base, manifest)
    with VersionWriter(
        root, corpus, version_id, vocab_size=manifest.vocab_size, segment_tokens=segment_tokens, on_progress=on_progress
    ) as writer:
        for name, tokens in documents:
            writer.add(name, tokens)
        gone = frozenset(removed() if callable(removed) else removed)
        remains = [_Remains.of(segment, gone) for segment in segments]
        for remain in _rewritten(remains, writer.open_tokens, segment_tokens, most_deleted):
            remains.remove(remain)
            remain.refuse_damage()
            for i in np.flatnonzero(~remain.deleted).tolist():
                writer.add_packed(remain.segment.name(i), remain.segment.packed(i))
        writer.flush()
        for remain in remains:
            if remain.num_documents:
                remain.link_to(writer)
        writer.finish(
            fingerprint=manifest.fingerprint,
            options=manifest.options if options is None else options,
            sources=manifest.sources if sources is None else sources,
            num_text_bytes=num_text_bytes,
            metadata=metadata,
        )
    return writer.path


@dataclass(frozen=True, eq=False)
class _Remains:
    """A segment of the base, and which of its documents are deleted (bool [all its documents]), with what that leaves of it."""

    segment: Segment
    deleted: NDArray[np.bool_]
    changed: bool
    num_documents: int
    num_tokens: int

    @staticmethod
    def of(segment: Segment, removed: frozenset[str]) -> _Remains:
        deleted = np.ones(len(segment.offsets) - 1, np.bool_)
        living = segment.living.tolist()
        kept = [i for i in living if segment.name(i) not in removed] if removed else living
        deleted[kept] = False
        num_tokens = int(np.diff(segment.offsets)[kept].sum()) - len(kept)
        return _Remains(segment, deleted, len(kept) < len(living), len(kept), num_tokens)

    @property
    def size(self) -> int:
        """Tokens and separators it takes when written anew."""
        return self.num_tokens + self.num_documents

    def refuse_damage(self) -> None:
        """Raise ChecksumMismatch if what would be copied is damaged: under a checksum of its own it would pass as sound."""
        for kind in ("tokens", "documents"):
            self.segment.files[kind].refuse_damage()

    def link_to(self, writer: VersionWriter) -> None:
        """Share the segment; what was deleted from it is written down anew where it lost something."""
        segment = self.segment
        files = {ending: file for ending, file in segment.files.items() if ending != DELETED or not self.changed}
        marks = tombstones(segment.order, segment.offsets, self.deleted) if self.changed else None
        writer.link(files, self.num_documents, self.num_tokens, marks)


def _rewritten(remains: Iterable[_Remains], open_tokens: int, segment_tokens: int, most_deleted: float) -> list[_Remains]:
    """The segments to write anew: those that lost too much, and all up to the last that is not large beside the smaller ones.

    What is joined is no larger than a segment may be.
    """
    chosen, others = list[_Remains](), list[_Remains]()
    for remain in sorted((r for r in remains if r.num_documents), key=lambda r: r.size):
        lost = len(remain.segment.order) - remain.num_tokens
        (chosen if lost > most_deleted * len(remain.segment.order) else others).append(remain)
    size, num_joined = open_tokens + sum(remain.size for remain in chosen), 0
    for i, remain in enumerate(others):
        if size + remain.size > segment_tokens:
            break
        if remain.size <= GROWTH * size:
            num_joined = i + 1
        size += remain.size
    return chosen + others[:num_joined]
