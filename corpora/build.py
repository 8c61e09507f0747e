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
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corpora.ahead import ahead
from corpora.catalog import DEFAULT_TENANT, Catalog, Version, check_name, new_version_id
from corpora.decisions import Decision, Reason
from corpora.errors import CatalogError, InvalidOptions, NothingToIndex, StoreNotWritable
from corpora.inputs import EncodeChat, Source, open_sources
from corpora.options import BuildOptions
from corpora.record import Recorder
from corpora.survey import Found, Survey, Tally
from engine.errors import InvalidRequest
from engine.text import Tokenizer

if TYPE_CHECKING:
    from retriever.format import Manifest

BATCH_CHARS = 1 << 21
BATCH_ENTRIES = 4096
RESTING_BYTES = 470_000_000
LEAST_SEGMENT_BYTES = 32_000_000

ProgressCallback = Callable[["Progress"], None]
Encode = Callable[[Sequence[str]], list[NDArray[np.int32]]]
"""Texts to their ids."""


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
    3. `bytes` is the size of the taken files on disk; `tokens` is what is stored, `new_tokens` what of it was tokenized now.
       `seconds` is the whole build, `tokenizer_seconds` the part spent in the tokenizer.
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
    new_tokens: int
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
    started = time.monotonic()
    with alone_with(name, catalog, tenant):
        version = new_version_id()
        opened = open_sources([str(path) for path in paths], options, chat_encoder(tokenizer) if options.chat else None)
        stream = Stream(Survey(opened, options, store=catalog.root), tokenizer.encode_batch, progress)
        documents = stream.documents()
        first = next(documents, None)
        if first is None:
            raise NothingToIndex(nothing_message(opened, stream.tally), stream.tally.reasons)
        folder = write_version(
            catalog.root,
            name,
            version,
            itertools.chain([first], documents),
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            options=recorded_options(options, opened, model),
            sources=[source.spec for source in opened],
            num_text_bytes=lambda: stream.tally.num_bytes,
            metadata=lambda: stream.record(tokenizer.checksum),
            segment_tokens=options.segment_tokens,
            on_progress=stream.on_written,
        )
        return publish(folder, catalog, tenant, stream, started)


@contextlib.contextmanager
def alone_with(name: str, catalog: Catalog, tenant: str) -> Iterator[None]:
    """Alone with a corpus to make a version of it; in the end only what is active, or was before, is left of it.

    Raises CorpusLocked, InvalidName (another tenant's), CatalogError; StoreNotWritable for an OSError of the block.
    """
    with catalog.lock(name):
        catalog.refuse_taken(name, tenant)
        catalog.collect(name)
        try:
            yield
        except OSError as error:
            raise StoreNotWritable(
                f"corpus cannot be written: {catalog.root / name} ({error.strerror or error}); check space"
            ) from error
        finally:
            with contextlib.suppress(CatalogError, OSError):  # what is left over now is removed by the next who works on it
                catalog.collect(name)


def publish(folder: Path, catalog: Catalog, tenant: str, stream: Stream, started: float) -> BuildReport:
    """Make the version in `folder`, which `stream` has filled, the active one. Raises InvalidName, CatalogError."""
    from retriever.format import Manifest

    stream.say("publish")
    manifest, tally = Manifest.read(folder), stream.tally
    catalog.publish(Version.of(manifest, manifest.options["model"], tally.num_files, tally.num_bytes), tenant)
    return report_of(folder, manifest, stream, started)


def report_of(folder: Path, manifest: Manifest, stream: Stream, started: float) -> BuildReport:
    """What there is to say of the version in `folder`, after `stream` went through its sources."""
    tally = stream.tally
    return BuildReport(
        name=manifest.corpus,
        version=manifest.version,
        path=folder,
        files_taken=tally.num_files,
        documents=manifest.num_documents,
        skipped=dict(tally.reasons),
        examples=tally.examples,
        bytes=tally.num_bytes,
        tokens=manifest.num_tokens,
        new_tokens=stream.num_tokens,
        seconds=time.monotonic() - started,
        tokenizer_seconds=stream.tokenizer_seconds,
    )


def segment_tokens_within(memory: int, vocab_size: int) -> int:
    """The `segment_tokens` with which a build takes at most `memory` bytes in all. Raises InvalidOptions if that is too little.

    `RESTING_BYTES` of it are taken before the first token: interpreter, libraries, kernels, tokenizer, texts under way.
    """
    from retriever.format import segment_tokens_for

    if memory < RESTING_BYTES + LEAST_SEGMENT_BYTES:
        raise InvalidOptions(
            f"memory is too little to build with: {memory // 10**6} MB; give at least "
            f"{-(-(RESTING_BYTES + LEAST_SEGMENT_BYTES) // 10**6)}"
        )
    return segment_tokens_for(memory - RESTING_BYTES, vocab_size)


def recorded_options(options: BuildOptions, sources: Sequence[Source], model: str) -> dict[str, Any]:
    """What a manifest says of how its version was made, so that it can be made again."""
    resolved = {source.spec: source.resolved for source in sources if source.resolved}
    return {**options.to_json(), "model": model, "resolved": resolved}


class Stream:
    """Documents on their way from sources to ids, with the counts of what passed.

    Reading, tokenizing and writing run beside one another, a batch apart: the first two on threads, the last in the caller's.
    """

    def __init__(self, survey: Survey, encode: Encode, progress: ProgressCallback | None) -> None:
        self.tally = Tally()
        self.num_tokens = 0
        self.tokenizer_seconds = 0.0
        self.unchanged: set[str] = set()
        """Names of documents that need not be written again."""
        self._recorder = Recorder()
        self._survey = survey
        self._encode = encode
        self._progress = progress

    def documents(self) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """(name, ids) of every document to write, in order; tokenized in batches of about BATCH_CHARS characters."""
        self.say("walk")
        with contextlib.closing(ahead(self._encoded(), 1)) as batches:
            for number, (batch, names, ids) in enumerate(batches):
                if number == 1:  # there is much to sort; loading before the first batch would have held that one up
                    load_kernels_aside()
                for found in batch:
                    self.tally.add(found.decision)
                    if found.unchanged:
                        self.unchanged.update(found.names)
                self.num_tokens += sum(map(len, ids))
                yield from zip(names, ids, strict=True)
                self.say("tokenize")

    def record(self, checksum: str) -> bytes:
        """What an update needs to know, once all documents have been read by the tokenizer of this checksum."""
        return self._recorder.dump(self.tally, checksum)

    def say(self, stage: str) -> None:
        """Report the state of things, as of `stage`."""
        if self._progress is not None:
            survey = self._survey
            self._progress(
                Progress(stage, survey.num_files, survey.total_files, survey.num_bytes, survey.total_bytes, self.num_tokens)
            )

    def on_written(self, stage: str, _: int) -> None:
        """What `retriever.format` reports while it writes."""
        if stage != "read":
            self.say(stage)

    def _encoded(self) -> Iterator[tuple[list[Found], list[str], list[NDArray[np.int32]]]]:
        """What was found, in batches, with names and ids of the documents to write; for a thread of its own."""
        with contextlib.closing(ahead(self._recorded(), 2)) as batches:
            for batch in batches:
                documents = [document for found in batch for document in found.documents]
                texts = [document.content for document in documents if isinstance(document.content, str)]
                started = time.monotonic()
                encoded = iter(self._encode(texts) if texts else [])
                self.tokenizer_seconds += time.monotonic() - started
                yield (
                    [replace(found, documents=()) if found.documents else found for found in batch],
                    [document.name for document in documents],
                    [next(encoded) if isinstance(document.content, str) else document.content for document in documents],
                )

    def _recorded(self) -> Iterator[list[Found]]:
        """What was found, in batches, once it is written down; for a thread of its own."""
        for batch in _batches(self._survey):
            self._recorder.add(batch)
            yield batch


def load_kernels_aside() -> None:
    """Load what large segments are sorted with, on a thread of its own: the tokenizer needs no Python meanwhile."""
    from retriever.format import load_kernels

    Thread(target=load_kernels, name="draftloom-kernels", daemon=True).start()


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


def nothing_message(sources: Sequence[Source], tally: Tally) -> str:
    """Why nothing was taken."""
    where = ", ".join(source.spec for source in sources)
    if not tally.reasons:
        return f"there is nothing to index: {where} is empty; give a folder with source or text files"
    reasons = "; ".join(f"{count} {reason} ({reason.meaning})" for reason, count in tally.reasons.most_common())
    return f"there is nothing to index in {where}: all was skipped: {reasons}; `--explain PATH` tells about one file"
