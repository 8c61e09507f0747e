"""The `history` source: what followed the end of the context in the answers that this tenant got before.

Each answer is a document of the tenant's pool, and grows while it is given, so that requests at one time see one another's. A
request sees its own, too, since what it says again counts beside what others said there (on recorded answers, leaving it to the
`prompt` source was never better). What the caller asked is not kept, but for a few tokens before each answer, by which its
beginning is found: keeping prompts gained where answers quote documents and lost where they call tools or write SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens
from engine.drafters.words import whole_words
from engine.memory import Arrays
from engine.tree import Draft
from retriever.history import HistoryPool

LONGEST = 32
"""Tokens of context that a lookup may match."""

LEAD_IN = 16
"""Tokens of the prompt's end that are kept before an answer."""


class HistoryDrafter:
    """One drafting per request that draws on the tenant's history or adds to it."""

    name = "history"
    blocking = False
    top_k = 0

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """One, unless the request neither uses history nor is learned from."""
        if not (request.use_history or request.learn):
            return []
        memory = request.memory
        pool = memory.state(self.name, partial(_pool, max_bytes=memory.state_bytes))
        pool.expire(memory.oldest)
        drafting = HistoryDrafting(pool, request, memory.now)
        return [(self.name, whole_words(drafting, request) if request.use_history else drafting)]


class HistoryDrafting:
    """What the pool says, and the request's own document in it, if it is learned from."""

    def __init__(self, pool: HistoryPool, request: DraftRequest, now: float) -> None:
        self._pool = pool
        self._use = request.use_history
        self._recent = request.context[-LONGEST:]
        self._document = pool.begin(request.context[-LEAD_IN:], born=now) if request.learn else -1

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 10 to 40 microseconds, however much there is."""
        if not self._use:
            return Draft.empty()
        found = self._pool.lookup(context[-LONGEST:], budget)
        return Draft(found.tokens, found.parents, found.probs, found.lengths, found.counts)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """The answer grows; the document that said the same before is worth more. Some 10 microseconds."""
        emitted = np.asarray(tokens, np.int32)
        if len(emitted) > 1 and self._use:
            self._pool.credit(self._recent, emitted, but=self._document)
        self._recent = np.concatenate([self._recent, emitted])[-LONGEST:]
        if self._document >= 0:
            self._pool.append(self._document, emitted)

    def close(self) -> None:
        """The document is complete."""
        if self._document >= 0:
            self._pool.close(self._document)


def _pool(saved: Arrays | None, *, max_bytes: int) -> HistoryPool:
    """A tenant's pool, as its memory keeps it."""
    pool = HistoryPool(max_bytes, max_length=LONGEST)
    if saved is not None:
        pool.restore(saved)
    return pool


def answers(saved: Arrays) -> list[Tokens]:
    """The answers in saved history, without what stood before them, the least recently touched first."""
    ends = np.cumsum(saved["lengths"], dtype=np.int64)
    begins = ends - saved["lengths"] + saved["leads"]
    return [saved["tokens"][begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def without_old(saved: Arrays, oldest: float) -> dict[str, NDArray[Any]]:
    """Saved history without the documents born before `oldest`. Raises nothing: what makes no sense is left out whole."""
    try:
        keep = saved["born"] >= oldest
        tokens = saved["tokens"][np.repeat(keep, saved["lengths"])]
        return {"tokens": tokens, **{name: saved[name][keep] for name in ("lengths", "leads", "born", "gained")}}
    except (KeyError, ValueError, IndexError, TypeError):
        return {}
