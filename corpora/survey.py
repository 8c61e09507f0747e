"""What a build would take of some sources, and why it would leave the rest: names, content, copies, in this order.

`Survey` goes through every entry once. It needs no tokenizer (but for conversations in a chat template), writes nothing, and
can be told what an earlier one found, so that unchanged files are not read again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpora.decisions import Decision, Reason
from corpora.filter import Refusal, Text, examine, refuse_name
from corpora.inputs import EncodeChat, Entry, Source, open_sources
from corpora.options import BuildOptions
from corpora.similar import Sketches

MAX_EXAMPLES = 5

_NOWHERE = Path()
_RECORD = re.compile(r"#\d+$")
"""What the name of a record adds to that of its file."""


@dataclass(frozen=True)
class Document:
    """What is stored under one name: a text, or ids where the input tokenized itself. Nothing is drafted across its ends."""

    name: str
    content: str | NDArray[np.int32]


@dataclass(frozen=True)
class Found:
    """What became of one entry.

    1. `names` are those of its documents, all of which begin with the entry's own; none if nothing is stored of it.
    2. `documents` are they, with their content; none if they are `unchanged` since the earlier survey.
    3. `digest` stands for the content that is stored, 32 hex digits; of a copy too; "" where nothing was taken.
    """

    decision: Decision
    names: tuple[str, ...] = ()
    documents: tuple[Document, ...] = ()
    digest: str = ""
    unchanged: bool = False

    def to_json(self) -> dict[str, Any]:
        """All but where it lies and the documents' content, as JSON can hold it."""
        d = self.decision
        return {
            "name": d.name,
            "taken": d.taken,
            "reason": d.reason,
            "detail": d.detail,
            "bytes": d.num_bytes,
            "stamp": d.stamp,
            "digest": self.digest,
            "documents": list(self.names),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Found:
        """What `to_json` wrote; its path is empty. Raises KeyError, TypeError, ValueError for anything else."""
        names = tuple(values["documents"])
        reason = Reason(values["reason"]) if values["reason"] else None
        decision = Decision(
            path=_NOWHERE,
            name=values["name"],
            taken=values["taken"],
            reason=reason,
            detail=values["detail"],
            num_bytes=values["bytes"],
            num_documents=len(names),
            stamp=values["stamp"],
        )
        return Found(decision, names, digest=values["digest"])


class Survey:
    """Iterate it for a `Found` of every entry, in the sources' order; exact copies (after decoding) are copies of the first.

    `total_files` and `total_bytes` are what there is to look into, known once iteration has begun; 0 if a source does not know.
    `num_files` and `num_bytes` are what was looked into so far.
    With `known` (what an earlier survey of the same sources and options found, by entry name), entries whose stamp is the same
    are not read. What lies below `store`, the corpora themselves, is left out. Raises SourceNotFound for a source that
    vanished. Memory: the list of names, and one entry's content.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: BuildOptions,
        known: Mapping[str, Found] | None = None,
        store: Path | None = None,
    ) -> None:
        self.total_files = 0
        self.total_bytes = 0
        self.num_files = 0
        self.num_bytes = 0
        self._sources = sources
        self._options = options
        self._known = known or {}
        self._store = f"{store.resolve()}{os.sep}" if store else ""
        self._first: dict[str, str] = {}
        """Digest -> name of the entry that is stored."""
        self._sketches = Sketches() if options.near_duplicates else None

    def __iter__(self) -> Iterator[Found]:
        listed = [source.entries() if source.streamed else list(source.entries()) for source in self._sources]
        if not any(source.streamed for source in self._sources):
            candidates = [entry.decision for entries in listed for entry in entries if entry.decision.taken]
            self.total_files, self.total_bytes = len(candidates), sum(d.num_bytes for d in candidates)
        seen: set[tuple[type, Path]] = set()  # of what is listed, since two folders may share files
        for source, entries in zip(self._sources, listed, strict=True):
            for entry in entries:
                key = type(source), entry.decision.path
                if key in seen:
                    continue
                if not source.streamed:
                    seen.add(key)
                yield self._find(entry)

    def _find(self, entry: Entry) -> Found:
        """What becomes of one entry."""
        decision = entry.decision
        if not decision.taken:
            return Found(decision)
        if self._store and str(decision.path).startswith(self._store):
            return Found(replace(decision, taken=False, reason=Reason.IGNORED, detail="the store of corpora", stamp=""))
        self.num_files += 1
        self.num_bytes += decision.num_bytes
        old = self._known.get(decision.name)
        if old and decision.stamp and decision.stamp == old.decision.stamp and self._sketches is None:
            if not old.digest:
                return replace(old, decision=replace(old.decision, path=decision.path))
            if old.digest in self._first or old.names:
                return self._stored(decision, old.digest, old)
        content = self._read(entry)
        if isinstance(content, Refusal):
            stamp = "" if content.reason is Reason.UNREADABLE else decision.stamp
            return Found(replace(decision, taken=False, reason=content.reason, detail=content.detail, stamp=stamp))
        return self._stored(decision, _digest(content), old, content)

    def _read(self, entry: Entry) -> Text | Refusal:
        name = entry.decision.name.rpartition("/")[2]
        if refusal := refuse_name(name, self._options):
            return refusal
        content = entry.load()
        return examine(name, content, self._options) if isinstance(content, bytes) else content

    def _stored(self, decision: Decision, digest: str, old: Found | None, content: Text | None = None) -> Found:
        """What is stored of a content: nothing if it is a copy, what is there if it is the same as before, else all of it."""
        if digest in self._first:
            return Found(replace(decision, reason=Reason.DUPLICATE, detail=f"as {self._first[digest]}"), digest=digest)
        if content and self._sketches and (similar := self._sketches.similar(decision.name, content)):
            return Found(replace(decision, taken=False, reason=Reason.NEAR_DUPLICATE, detail=f"as {similar}"))
        self._first[digest] = decision.name
        if old and old.digest == digest and old.names:
            kept = replace(old.decision, path=decision.path, stamp=decision.stamp, num_bytes=decision.num_bytes)
            return replace(old, decision=kept, documents=(), unchanged=True)
        assert content is not None, "only what is stored already may come without its content"
        documents = tuple(
            Document(f"{decision.name}:{part.place}" if part.place else decision.name, part.content) for part in content.parts
        )
        decision = replace(
            decision,
            reason=Reason.SECRET if content.secrets else None,
            detail=f"left out: {', '.join(content.secrets)}" if content.secrets else "",
            num_bytes=content.num_bytes,
            num_documents=len(documents),
        )
        return Found(decision, tuple(document.name for document in documents), documents, digest)


def explain(
    path: str, specs: Sequence[str], options: BuildOptions = BuildOptions(), encode_chat: EncodeChat | None = None
) -> Decision | None:
    """What a build of `specs` would do with `path`; the decision may be about a folder above it. None if it is not among them.

    `path` is a path, or a name within the corpus (`archive.zip/src/a.py`). Costs a survey up to there, and raises what opening
    sources raises.
    """
    wanted = Path(os.path.abspath(path))
    wanted = wanted.parent.resolve() / wanted.name
    for found in Survey(open_sources(specs, options, encode_chat), options):
        decision = found.decision
        inside = decision.name.endswith("/")
        if decision.name == path or (inside and path.startswith(decision.name)):
            return decision
        if wanted == decision.path or (inside and wanted.is_relative_to(decision.path)):
            return decision
    return None


@dataclass
class Tally:
    """What became of the entries: counts, for each reason the first few cases, and (files, bytes) taken by name ending."""

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
            self.num_documents += decision.num_documents
            count, size = self.endings.get(ending := ending_of(decision.name), (0, 0))
            self.endings[ending] = count + 1, size + decision.num_bytes
        if decision.reason is not None:
            self.reasons[decision.reason] += 1
            cases = self.examples.setdefault(decision.reason, [])
            if len(cases) < MAX_EXAMPLES:
                cases.append(decision)


def ending_of(name: str) -> str:
    """`.py` of "src/a.PY", `.jsonl` of "chats.jsonl#17", "" of "Makefile" and ".bashrc"."""
    last = _RECORD.sub("", name.rpartition("/")[2])
    dot = last.rfind(".")
    return last[dot:].lower() if 0 < dot < len(last) - 1 else ""


def _digest(content: Text) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in content.parts:
        data = part.content.encode("utf-8") if isinstance(part.content, str) else part.content.astype("<i4").tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
