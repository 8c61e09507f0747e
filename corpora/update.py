"""From one version to the next: the recorded sources again, with the recorded options, and only what changed is tokenized.

What has the same size and time of change is not read; what was read and has the same content is not tokenized. The new version
shares the segments of the one before (`retriever.update`), without the documents that are gone or replaced, whose text is never
drafted again. Like a build it is whole or not there.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corpora.build import (
    BuildReport,
    ProgressCallback,
    Stream,
    alone_with,
    build,
    chat_encoder,
    nothing_message,
    publish,
    recorded_options,
    report_of,
)
from corpora.catalog import DEFAULT_TENANT, Catalog, new_version_id
from corpora.errors import NothingToIndex, OtherTokenizer
from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.record import Record
from corpora.survey import Survey
from engine.text import Tokenizer

LoadTokenizer = Callable[[str], Tokenizer]
"""A model's name, as the build was given it, to its tokenizer. Raises engine.errors.ModelError."""


class Encoder(Protocol):
    """As much of a tokenizer as new text needs."""

    @property
    def checksum(self) -> str:
        """`Tokenizer.checksum`; "" if it cannot be used."""

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[np.int32]]:
        """`Tokenizer.encode_batch`."""


@dataclass(frozen=True)
class UpdateReport:
    """What an update did: `report` is of the version that is active now.

    1. `changed` is False if sources and corpus agreed already; then nothing was written.
    2. `added` documents are new or have new content; `removed` are gone or had another content; `kept` were not touched.
    """

    report: BuildReport
    changed: bool
    added: int
    removed: int
    kept: int


def update(
    name: str,
    catalog: Catalog,
    load_tokenizer: LoadTokenizer,
    *,
    encoder: Encoder | None = None,
    tenant: str = DEFAULT_TENANT,
    progress: ProgressCallback | None = None,
) -> UpdateReport:
    """Make corpus `name` what its sources are now; returns what changed.

    A version that an earlier release made, without a record of its files, is built again. Time: that of looking at every file's
    metadata, plus that of a build of what changed, plus a pass over the order of every segment that lost a document.
    Where the checksum of `encoder` is that of the tokenizer which made the corpus, it encodes and no tokenizer is loaded.

    Raises CorpusNotFound, CorpusLocked, SourceNotFound (a recorded source is gone), NothingToIndex (all of it is),
    OtherTokenizer (the model has another one than when the corpus was built), CatalogError, engine.errors.ModelError, what
    `encoder` raises, and retriever.errors.FormatError where the active version is damaged; whatever it raises, the corpus is as
    it was.
    """
    from retriever.format import Manifest
    from retriever.update import write_update

    started = time.monotonic()
    with alone_with(name, catalog, tenant):
        active = catalog.get(name, tenant).active
        base = catalog.version_path(name, active.id)
        manifest, record = Manifest.read(base), Record.read(base)
        model, options = manifest.options["model"], BuildOptions.from_json(manifest.options)

        @functools.cache
        def tokenizer() -> Tokenizer:
            found = load_tokenizer(model)
            if record is not None and record.checksum == found.checksum:
                return found
            return same_tokenizer(found, manifest.fingerprint, model, name)

        @functools.cache
        def encoding() -> Encoder:
            """What reads new text."""
            if encoder is not None and record is not None and encoder.checksum == record.checksum != "":
                return encoder
            return tokenizer()

        def checksum() -> str:
            """Of what tokenized all documents; if none had to be, that of before."""
            return encoding().checksum if stream.num_tokens else record.checksum if record else ""

        if record is not None:
            sources = open_sources(manifest.sources, options, chat_encoder(tokenizer()) if options.chat else None)
            survey = Survey(sources, options, record.known, catalog.root)
            stream = Stream(survey, lambda texts: encoding().encode_batch(texts), progress)
            documents = stream.documents()
            first = next(documents, None)
            earlier = {document for found in record.entries for document in found.names}
            if first is None and not stream.unchanged:
                raise NothingToIndex(nothing_message(sources, stream.tally), stream.tally.reasons)
            if first is None and stream.unchanged == earlier:
                return UpdateReport(report_of(base, manifest, stream, started), False, 0, 0, len(earlier))
            folder = write_update(
                catalog.root,
                name,
                new_version_id(),
                base,
                documents if first is None else itertools.chain([first], documents),
                removed=lambda: earlier - stream.unchanged,
                options=recorded_options(options, sources, model),
                num_text_bytes=lambda: stream.tally.num_bytes,
                metadata=lambda: stream.record(checksum()),
                segment_tokens=options.segment_tokens,
                on_progress=stream.on_written,
            )
            report = publish(folder, catalog, tenant, stream, started)
            kept = len(stream.unchanged)
            return UpdateReport(report, True, report.documents - kept, len(earlier) - kept, kept)
    built = build(name, manifest.sources, tokenizer(), catalog, options=options, tenant=tenant, model=model, progress=progress)
    return UpdateReport(built, True, built.documents, active.num_documents, 0)


def same_tokenizer(tokenizer: Tokenizer, fingerprint: str, model: str, name: str) -> Tokenizer:
    """The tokenizer, if it is the one the corpus was built with. Raises OtherTokenizer."""
    if tokenizer.fingerprint != fingerprint:
        raise OtherTokenizer(
            f"model {model} has another tokenizer than corpus {name} was built with: {tokenizer.fingerprint}; "
            f"build it again with `draftloom corpus build {name}`"
        )
    return tokenizer
