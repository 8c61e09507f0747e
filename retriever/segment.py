"""The segments of a version as they lie on disk, mapped: what a datastore looks up in and an update goes on from.

No kernel is needed to open them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.errors import BadManifest
from retriever.format import DELETED, HINTS, KINDS, FileEntry, Manifest, MappedFile, segment_file
from retriever.plain import SAMPLE_STRIDE, SAMPLE_WORDS
from retriever.suffixes import token_width


@dataclass(frozen=True, eq=False)
class Segment:
    """The mapped arrays of a segment, found to agree in size. `files` has them by the endings of `format.KINDS` and others.

    1. `text` uint8 [(num_tokens + num_documents) * width], big-endian, each document ended by the separator.
    2. `order` int32 [num_tokens]; `table` uint32 [slots, 3], slots a power of two; `contexts` uint32 [c, 4] and `runs` uint32
       [r, 3] as `format.build_continuations` makes them, `samples` uint64 [s, 2] as `plain.sample_order` does, empty in
       segments that have none. All but the order are copies in memory.
    3. `offsets` and `name_offsets` int64 [num_documents + 1]; `names` uint8.
    4. `left` and `ranks` uint64 as `plain.left_suffixes` and `plain.ranks` make them, empty where nothing was deleted;
       `living` int64, the documents that were not.
    """

    files: dict[str, MappedFile]
    width: int
    text: NDArray[np.uint8]
    order: NDArray[np.int32]
    table: NDArray[np.uint32]
    contexts: NDArray[np.uint32]
    runs: NDArray[np.uint32]
    samples: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    name_offsets: NDArray[np.int64]
    names: NDArray[np.uint8]
    left: NDArray[np.uint64]
    ranks: NDArray[np.uint64]
    living: NDArray[np.int64]

    def read_by_kernels(self) -> tuple[NDArray[Any], ...]:
        """The arguments of `kernels.describe`."""
        return self.text, self.order, self.table, self.contexts, self.runs, self.samples, self.left, self.ranks

    def looked_up(self) -> tuple[NDArray[Any], ...]:
        """The mapped arrays that lookups read."""
        return self.order, self.text, self.left, self.ranks

    def name(self, i: int) -> str:
        """What document i is called."""
        begin, end = self.name_offsets[i : i + 2].tolist()
        return self.names[max(begin, 0) : max(end, 0)].tobytes().decode("utf-8", "surrogateescape")

    def packed(self, i: int) -> NDArray[np.uint8]:
        """The tokens of document i as they stand in the text, without the separator; a view, valid while the map is."""
        begin, end = self.offsets[i : i + 2].tolist()
        return self.text[max(begin, 0) * self.width : max(end - 1, 0) * self.width]

    def document_at(self, position: int) -> int | None:
        """The document that a position of the text is in; None for one outside, as a damaged order may have."""
        document = int(np.searchsorted(self.offsets, position, "right")) - 1
        return document if 0 <= document < len(self.offsets) - 1 else None

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents that were not deleted."""
        return int(self.ranks[-1]) if len(self.ranks) else len(self.order)

    @staticmethod
    def open(folder: Path, number: int, entries: dict[str, FileEntry], width: int) -> Segment:
        kinds = {**KINDS, **HINTS, DELETED: b"tomb"}
        files = {
            ending: MappedFile.open(folder / name, kind, entries[name])
            for ending, kind in kinds.items()
            if (name := segment_file(number, ending)) in entries
        }
        for file in files.values():
            if file.small:
                file.refuse_damage()
        tokens, suffixes, documents, table = (files[ending].header for ending in KINDS)
        num_documents = documents.count
        agree = [
            (tokens.dtype == b"u%dbe" % width and tokens.payload_bytes == tokens.count * width, "tokens"),
            (suffixes.dtype == b"i4le" and suffixes.payload_bytes == 4 * suffixes.count, "suffixes"),
            (suffixes.count == tokens.count - num_documents and tokens.second_count == num_documents, "suffixes"),
            (documents.dtype == b"i8le", "documents"),
            (documents.payload_bytes == 16 * (num_documents + 1) + documents.second_count, "documents"),
            (table.dtype == b"u4le" and table.payload_bytes == 4 * table.count, "table"),
            (table.count % 3 == 0 and (table.count // 3).bit_count() == 1, "table"),
        ]
        num_contexts, contexts, samples = 0, np.zeros(0, np.uint32), np.zeros(0, np.uint64)
        if "continuations" in files:
            header = files["continuations"].header
            num_contexts, num_words = header.second_count, header.count - 4 * header.second_count
            agree.append((header.dtype == b"u4le" and header.payload_bytes == 4 * header.count, "continuations"))
            agree.append((num_words >= 0 and num_words % 3 == 0, "continuations"))
        if "samples" in files:
            header, num_samples = files["samples"].header, -(-suffixes.count // SAMPLE_STRIDE)
            agree.append((header.dtype == b"u8le" and header.second_count == SAMPLE_STRIDE, "samples"))
            agree.append((header.payload_bytes == 8 * header.count == 8 * SAMPLE_WORDS * num_samples, "samples"))
        for holds, kind in agree:
            if not holds:
                raise BadManifest(files[kind].path, "counts in the header contradict each other or the manifest")
        if "continuations" in files:
            contexts = files["continuations"].payload.view(np.uint32).copy()
        if "samples" in files:
            samples = files["samples"].payload.view(np.uint64).copy()
        left = ranks = np.zeros(0, np.uint64)
        living = np.arange(num_documents)
        if DELETED in files:
            header, words = files[DELETED].header, files[DELETED].payload.view(np.uint64)
            ends = np.cumsum([-(-suffixes.count // 64), -(-suffixes.count // 512) + 1, -(-num_documents // 64)])
            if header.dtype != b"u8le" or header.count != suffixes.count or len(words) != ends[-1]:
                raise BadManifest(files[DELETED].path, "counts in the header contradict each other or the manifest")
            left, ranks, gone = np.split(words, ends[:-1])
            living = np.flatnonzero(np.unpackbits(gone.view(np.uint8), count=num_documents, bitorder="little") == 0)
        split = 8 * (num_documents + 1)
        payload = files["documents"].payload
        return Segment(
            files,
            width,
            files["tokens"].payload,
            files["suffixes"].payload.view(np.int32),
            files["table"].payload.view(np.uint32).reshape(-1, 3).copy(),
            contexts[: 4 * num_contexts].reshape(-1, 4),
            contexts[4 * num_contexts :].reshape(-1, 3),
            samples.reshape(-1, SAMPLE_WORDS),
            payload[:split].view(np.int64),
            payload[split : 2 * split].view(np.int64),
            payload[2 * split :],
            left,
            ranks,
            living,
        )


def open_segments(folder: Path, manifest: Manifest) -> list[Segment]:
    """The segments of the version in `folder`, whose manifest this is. Raises a FormatError naming the file."""
    width = token_width(manifest.vocab_size)
    segments = [Segment.open(folder, i, dict(manifest.files), width) for i in range(manifest.num_segments)]
    counted = sum(s.num_tokens for s in segments), sum(len(s.living) for s in segments)
    if counted != (manifest.num_tokens, manifest.num_documents):
        raise BadManifest(folder, "manifest and segments disagree about the numbers of tokens and documents")
    return segments
