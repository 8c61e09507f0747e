"""The `corpus` source: what followed the end of the context in the corpora the request names (REST, arXiv 2311.08252)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens
from engine.drafters.words import whole_words
from engine.tree import Draft
from retriever.continuations import Continuations
from retriever.errors import Closed

if TYPE_CHECKING:
    from retriever.datastore import Datastore


_LONGEST = 32
"""Tokens of context that a lookup may match."""

_PATIENCE = 0.001
"""Seconds that a step waits for a corpus whose pages may be on disk."""

_SLOW = 0.005
"""A lookup that takes so many seconds has met the disk."""

_GIVE_UP = 0.1
"""Seconds after which a lookup that met the disk ends with what it has."""


class CorpusDrafter:
    """One drafting for each corpus, so that each is calibrated, weighted and credited by itself.

    Lookups run on the caller's thread while the corpus is in memory. While it is not, they run on another, which a step waits
    for only briefly, and the corpus is read in meanwhile.
    """

    name = "corpus"
    blocking = False
    top_k = 0

    def __init__(self) -> None:
        self._shelves: WeakKeyDictionary[Datastore, Shelf] = WeakKeyDictionary()

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """`corpus:NAME` for every corpus of the request."""
        pairs = []
        for name, store in request.corpora.items():
            shelf = self._shelves.get(store) or self._shelves.setdefault(store, Shelf(store))
            pairs.append((f"{self.name}:{name}", whole_words(CorpusDrafting(store, shelf), request)))
        return pairs


class Shelf:
    """What is known about where a datastore is: in memory, or partly on disk. Shared by all requests that ask it."""

    def __init__(self, store: Datastore) -> None:
        self.in_memory = store.resident()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="corpus")  # starts no thread before it is needed
        self._asked: Future[Continuations] | None = None
        self._reading: Future[None] | None = None
        self.look(store)

    def look(self, store: Datastore) -> None:
        """Read in what is on disk, on another thread."""
        if not self.in_memory and (self._reading is None or self._reading.done()):
            self._reading = self._readers.submit(self._read_in, store)

    def lookup(self, store: Datastore, context: Tokens, budget: int) -> Continuations:
        """The answer, if it is there in time; else nothing, and nothing either while a question before is not answered."""
        self.look(store)
        if self._asked is not None and not self._asked.done():
            return Continuations.empty()
        self._asked = self._readers.submit(store.lookup, context.copy(), budget, seconds=_GIVE_UP)
        try:
            return self._asked.result(_PATIENCE)
        except TimeoutError:
            return Continuations.empty()

    def _read_in(self, store: Datastore) -> None:
        with suppress(Closed):
            in_memory = store.resident()
            if not in_memory:
                store.populate()
                in_memory = store.resident()
            self.in_memory = in_memory


class CorpusDrafting:
    """Stateless: the context says it all, and the datastore never changes."""

    def __init__(self, store: Datastore, shelf: Shelf) -> None:
        self._store = store
        self._shelf = shelf

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 10 to 60 microseconds where the corpus is in memory."""
        context = context[-_LONGEST:]
        if self._shelf.in_memory:
            started = time.monotonic()
            found = self._store.lookup(context, budget)
            if time.monotonic() - started > _SLOW:
                self._shelf.in_memory = self._store.resident()
        else:
            found = self._shelf.lookup(self._store, context, budget)
        return Draft(found.tokens, found.parents, found.probs, found.lengths, found.counts)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """The datastore belongs to the server."""
