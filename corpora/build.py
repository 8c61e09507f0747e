"""From paths to a published corpus: walk, read, tokenize, write, activate.

Everything is a stream: a batch of texts is tokenized at a time, and `retriever.format` keeps one segment in memory. The version
lies complete on disk before one transaction of the catalog makes it active, and every way to fail (an exception, Ctrl-C, a
crash) leaves active what was active before. One builder at a time per corpus; the second fails at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corpora import filter as content
from corpora.catalog import DEFAULT_TENANT, Catalog, Version, check_name, created_at, new_version_id
from corpora.decisions import Decision, Reason
from corpora.errors import CatalogError, InvalidOptions, NothingToIndex, StoreNotWritable
from corpora.walk import walk
from engine.text import Tokenizer

BATCH_CHARS = 1 << 20
MAX_EXAMPLES = 5

ProgressCallback = Callable[["Progress"], None]


@dataclass(frozen=True)
class BuildOptions:
    """What to take, and how to store it.

    1. `include` and `exclude` are patterns in git's syntax, relative to each path; no `include` means everything.
    2. `max_file_size` is in bytes, at least 1. Larger files are skipped.
    3. `generated`: whether to take files that say they are generated.
    4. `segment_tokens`: most tokens in one segment, at least 1; bounds the memory of a build (about 30 bytes a token).
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_file_size: int = 1 << 20
    generated: bool = False
    segment_tokens: int = 64 << 20

    def validate(self) -> None:
        """Raise InvalidOptions for the first value out of range."""
        for name in ("max_file_size", "segment_tokens"):
            if getattr(self, name) < 1:
                raise InvalidOptions(f"{name} must be at least 1: {getattr(self, name)}")


@dataclass(frozen=True)
class Progress:
    """How far a build is. `stage` is "walk", "tokenize", "sort", "write" or "publish"; totals are 0 until the walk is over."""

    stage: str
    num_files: int = 0
    total_files: int = 0
    num_bytes: int = 0
    total_bytes: int = 0
    num_tokens: int = 0


@dataclass
class Tally:
    """What became of the files: counts, for each reason the first few cases, and (files, bytes) taken by file name ending."""

    num_files: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    examples: dict[Reason, list[Decision]] = field(default_factory=dict)
    endings: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, decision: Decision) -> None:
        if decision.taken:
            self.num_files += 1
            self.num_bytes += decision.num_bytes
            self.num_documents += decision.reason is None
            ending = Path(decision.name).suffix.lower()
            count, size = self.endings.get(ending, (0, 0))
            self.endings[ending] = count + 1, size + decision.num_bytes
        if decision.reason is not None:
            self.reasons[decision.reason] += 1
            cases = self.examples.setdefault(decision.reason, [])
            if len(cases) < MAX_EXAMPLES:
                cases.append(decision)


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
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    catalog: Catalog,
    *,
    options: BuildOptions = BuildOptions(),
    tenant: str = DEFAULT_TENANT,
    model: str = "",
    progress: ProgressCallback | None = None,
) -> BuildReport:
    """Index `paths` (files or folders) as a new version of corpus `name`, and activate it.

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
        version, sources = new_version_id(), tuple(os.path.abspath(path) for path in paths)
        stream = _Stream(paths, tokenizer, options, say)
        documents = stream.documents()
        first = next(documents, None)
        if first is None:
            catalog.collect(name)
            raise NothingToIndex(_nothing_message(paths, stream.tally), stream.tally.reasons)
        folder = catalog.version_path(name, version)
        try:
            write_version(
                catalog.root,
                name,
                version,
                itertools.chain([first], documents),
                fingerprint=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                options={**asdict(options), "model": model},
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


def survey(
    paths: Sequence[Path], options: BuildOptions = BuildOptions(), *, progress: ProgressCallback | None = None
) -> Iterator[tuple[Decision, str]]:
    """Every file below `paths` with what a build would do, and its text; "" where none would be stored.

    The order is that of the walk, and exact copies (after decoding) are duplicates of the first. Raises InvalidOptions,
    SourceNotFound. Memory: one file, and the list of all.
    """
    options.validate()
    found = list(walk(paths, include=options.include, exclude=options.exclude))
    total_bytes, total_files = sum(d.num_bytes for d in found if d.taken), sum(d.taken for d in found)
    num_files = num_bytes = 0
    seen: set[bytes] = set()
    for decision in found:
        text = ""
        if decision.taken:
            num_files, num_bytes = num_files + 1, num_bytes + decision.num_bytes
            decision, text = _read(decision, options, seen)
        if progress is not None:
            progress(Progress("tokenize", num_files, total_files, num_bytes, total_bytes))
        yield decision, text


def explain(path: Path, paths: Sequence[Path], options: BuildOptions = BuildOptions()) -> Decision | None:
    """What a build of `paths` would do with `path`; the decision may be about a folder above it. None if it is not below them.

    Raises what `survey` raises.
    """
    wanted = Path(os.path.abspath(path))
    wanted = wanted.parent.resolve() / wanted.name
    for decision, _ in survey(paths, options):
        if wanted == decision.path or (decision.name.endswith("/") and wanted.is_relative_to(decision.path)):
            return decision
    return None


def _read(decision: Decision, options: BuildOptions, seen: set[bytes]) -> tuple[Decision, str]:
    """A candidate after a look inside it."""
    result = content.read(decision.path, max_bytes=options.max_file_size, generated=options.generated)
    if isinstance(result, content.Refusal):
        return replace(decision, taken=False, reason=result.reason, detail=result.detail), ""
    digest = hashlib.blake2b(result.text.encode("utf-8"), digest_size=16).digest()
    if digest in seen:
        return replace(decision, reason=Reason.DUPLICATE, num_bytes=result.num_bytes), ""
    seen.add(digest)
    return replace(decision, num_bytes=result.num_bytes), result.text


class _Stream:
    """Documents on their way from files to ids, with the counts of what passed."""

    def __init__(self, paths: Sequence[Path], tokenizer: Tokenizer, options: BuildOptions, say: ProgressCallback) -> None:
        self.tally = Tally()
        self.num_tokens = 0
        self.tokenizer_seconds = 0.0
        self._paths = paths
        self._tokenizer = tokenizer
        self._options = options
        self._say = say
        self._last = Progress("walk")

    def documents(self) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """(name, ids) of every document, in order; tokenized in batches of about BATCH_CHARS characters."""
        names, texts, size = list[str](), list[str](), 0
        self._say(self._last)
        for decision, text in survey(self._paths, self._options, progress=self._note):
            self.tally.add(decision)
            if text:
                names.append(decision.name)
                texts.append(text)
                size += len(text)
            if size >= BATCH_CHARS:
                yield from zip(names, self._encode(texts), strict=True)
                names, texts, size = [], [], 0
        if texts:
            yield from zip(names, self._encode(texts), strict=True)

    def progress(self, stage: str) -> Progress:
        """The state of things, as of `stage`."""
        return replace(self._last, stage=stage, num_tokens=self.num_tokens)

    def _note(self, progress: Progress) -> None:
        self._last = progress
        self._say(self.progress(progress.stage))

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        started = time.monotonic()
        encoded = self._tokenizer.encode_batch(texts)
        self.tokenizer_seconds += time.monotonic() - started
        self.num_tokens += sum(map(len, encoded))
        return encoded


def _nothing_message(paths: Sequence[Path], tally: Tally) -> str:
    where = ", ".join(map(str, paths))
    if not tally.reasons:
        return f"there is nothing to index: {where} is empty; give a folder with source or text files"
    reasons = "; ".join(f"{count} {reason} ({reason.meaning})" for reason, count in tally.reasons.most_common())
    return f"there is nothing to index in {where}: all was skipped: {reasons}; `--explain PATH` tells about one file"
