"""From paths to a published corpus: walk, read, tokenize, write, activate.

Everything is a stream: a batch of texts is tokenized at a time, and `retriever.format` keeps one segment in memory. The version
lies complete on disk before one transaction of the catalog makes it active, and every way to fail (an exception, Ctrl-C, a
crash) leaves active what was active before. One builder at a time per corpus; the second fails at once.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpora.ahead import ahead
from corpora.catalog import DEFAULT_TENANT, Catalog, Version, check_name, created_at, new_version_id
from corpora.decisions import Decision, Reason
from corpora.errors import CatalogError, NothingToIndex, StoreNotWritable
from corpora.inputs import EncodeChat, open_sources
from corpora.options import BuildOptions
from corpora.survey import Document, Found, Survey, Tally
from engine.errors import InvalidRequest
from engine.text import Tokenizer

BATCH_CHARS = 1 << 20
BATCH_ENTRIES = 4096

ProgressCallback = Callable[["Progress"], None]


@dataclass(frozen=True)
class Progress:
    """How far a build is. `stage` is "walk", "tokenize", "sort", "write" or "publish"; totals are 0 until the walk is over."""

    stage: str
    num_files: int = 0
    total_files: int = 0
    num_bytes: int = 0
    total_bytes: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    1. `files_taken` counts files whose text is in the corpus; exact copies among them are stored once.
    2. `skipped` counts files, and folders as a whole, by reason; DUPLICATE counts copies that were taken but not stored again.
    3. `bytes` is the size of the taken files on disk; `tokens` is what is stored. `seconds` is the whole build,
       `tokenizer_seconds` the part spent in the tokenizer.
    """

    name: str
    version: str
    path: Path
    files_taken: int
    documents: int
    skipped: dict[Reason, int]
    examples: dict[Reason, list[Decision]]
    bytes: int
    tokens: int
    seconds: float
    tokenizer_seconds: float


def build(
    name: str,
    paths: Sequence[Path | str],
    tokenizer: Tokenizer,
    catalog: Catalog,
    *,
    options: BuildOptions = BuildOptions(),
    tenant: str = DEFAULT_TENANT,
    model: str = "",
    progress: ProgressCallback | None = None,
) -> BuildReport:
    """Index `paths` (or `path@revision`: what `corpora.inputs` can open) as a new version of corpus `name`, and activate it.

    `model` is written down for people. `progress` is called often; it must be quick. Time is about that of the tokenizer plus
    that of sorting (a few seconds for a million lines); memory, that of one segment.

    Raises InvalidName, InvalidOptions, SourceNotFound, NothingToIndex, CorpusLocked, CatalogError; whatever it raises, the
    corpus is as it was.
    """
    from retriever.format import write_version

    check_name(name)
    options.validate()
    say = progress or (lambda _: None)
    started = time.monotonic()
    with catalog.lock(name):
        catalog.refuse_taken(name, tenant)
        catalog.collect(name)
        version = new_version_id()
        opened = open_sources([str(path) for path in paths], options, chat_encoder(tokenizer) if options.chat else None)
        sources = tuple(source.spec for source in opened)
        stream = _Stream(Survey(opened, options), tokenizer, say)
        documents = stream.documents()
        first = next(documents, None)
        if first is None:
            catalog.collect(name)
            raise NothingToIndex(_nothing_message(sources, stream.tally), stream.tally.reasons)
        folder = catalog.version_path(name, version)
        try:
            write_version(
                catalog.root,
                name,
                version,
                itertools.chain([first], documents),
                fingerprint=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                options={
                    **options.to_json(),
                    "model": model,
                    "resolved": {source.spec: source.resolved for source in opened if source.resolved},
                },
                sources=sources,
                num_text_bytes=lambda: stream.tally.num_bytes,
                segment_tokens=options.segment_tokens,
                on_progress=lambda stage, _: say(stream.progress(stage)) if stage != "read" else None,
            )
            say(stream.progress("publish"))
            tally = stream.tally
            catalog.publish(
                Version(
                    corpus=name,
                    id=version,
                    created=created_at(version),
                    fingerprint=tokenizer.fingerprint,
                    vocab_size=tokenizer.vocab_size,
                    model=model,
                    num_files=tally.num_files,
                    num_documents=tally.num_documents,
                    num_tokens=stream.num_tokens,
                    num_bytes=tally.num_bytes,
                    sources=sources,
                ),
                tenant,
            )
        except BaseException as error:
            with contextlib.suppress(CatalogError):
                catalog.collect(name)  # removes what is not active, and so never a version whose activation had succeeded
            if isinstance(error, OSError):
                raise StoreNotWritable(
                    f"corpus cannot be written: {folder} ({error.strerror or error}); check space"
                ) from error
            raise
        catalog.collect(name)
    return BuildReport(
        name=name,
        version=version,
        path=folder,
        files_taken=tally.num_files,
        documents=tally.num_documents,
        skipped=dict(tally.reasons),
        examples=tally.examples,
        bytes=tally.num_bytes,
        tokens=stream.num_tokens,
        seconds=time.monotonic() - started,
        tokenizer_seconds=stream.tokenizer_seconds,
    )


class _Stream:
    """Documents on their way from sources to ids, with the counts of what passed. Reading runs ahead of tokenizing."""

    def __init__(self, survey: Survey, tokenizer: Tokenizer, say: ProgressCallback) -> None:
        self.tally = Tally()
        self.num_tokens = 0
        self.tokenizer_seconds = 0.0
        self._survey = survey
        self._tokenizer = tokenizer
        self._say = say

    def documents(self) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """(name, ids) of every document, in order; tokenized in batches of about BATCH_CHARS characters."""
        self._say(Progress("walk"))
        with contextlib.closing(ahead(_batches(self._survey), 2)) as batches:
            for batch in batches:
                for found in batch:
                    self.tally.add(found.decision)
                documents = [document for found in batch for document in found.documents]
                yield from zip((document.name for document in documents), self._encode(documents), strict=True)
                self._say(self.progress("tokenize"))

    def progress(self, stage: str) -> Progress:
        """The state of things, as of `stage`."""
        survey = self._survey
        return Progress(stage, survey.num_files, survey.total_files, survey.num_bytes, survey.total_bytes, self.num_tokens)

    def _encode(self, documents: Sequence[Document]) -> Iterator[NDArray[np.int32]]:
        started = time.monotonic()
        encoded = iter(self._tokenizer.encode_batch([d.content for d in documents if isinstance(d.content, str)]))
        ids = [next(encoded) if isinstance(d.content, str) else d.content for d in documents]
        self.tokenizer_seconds += time.monotonic() - started
        self.num_tokens += sum(map(len, ids))
        return iter(ids)


def _batches(survey: Iterable[Found]) -> Iterator[list[Found]]:
    """What was found, in lists of about BATCH_CHARS characters (or ids) to store."""
    batch, size = list[Found](), 0
    for found in survey:
        batch.append(found)
        size += sum(len(document.content) for document in found.documents)
        if size >= BATCH_CHARS or len(batch) >= BATCH_ENTRIES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def chat_encoder(tokenizer: Tokenizer) -> EncodeChat:
    """What turns a conversation into ids with the model's template; ValueError says that there is none, or that it refuses."""

    def encode(messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        try:
            return tokenizer.encode_chat(messages, add_generation_prompt=False)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None

    return encode


def _nothing_message(sources: Sequence[str], tally: Tally) -> str:
    where = ", ".join(sources)
    if not tally.reasons:
        return f"there is nothing to index: {where} is empty; give a folder with source or text files"
    reasons = "; ".join(f"{count} {reason} ({reason.meaning})" for reason, count in tally.reasons.most_common())
    return f"there is nothing to index in {where}: all was skipped: {reasons}; `--explain PATH` tells about one file"
