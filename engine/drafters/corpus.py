"""The `corpus` source: what followed the end of the context in the corpora the request names (REST, arXiv 2311.08252)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens
from engine.drafters.words import whole_words
from engine.tree import Draft

if TYPE_CHECKING:
    from retriever.datastore import Datastore


class CorpusDrafter:
    """One drafting for each corpus, so that each is calibrated, weighted and credited by itself."""

    name = "corpus"
    blocking = False
    top_k = 0

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """`corpus:NAME` for every corpus of the request."""
        return [(f"{self.name}:{name}", whole_words(CorpusDrafting(store), request)) for name, store in request.corpora.items()]


class CorpusDrafting:
    """Stateless: the context says it all, and the datastore never changes."""

    def __init__(self, store: Datastore) -> None:
        self._store = store

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 30 to 100 microseconds where the corpus is in memory."""
        found = self._store.lookup(context[-_LONGEST:], budget)
        return Draft(found.tokens, found.parents, found.probs, found.lengths, found.counts)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Nothing to learn."""

    def close(self) -> None:
        """The datastore belongs to the server."""


_LONGEST = 32
"""Tokens of context that a lookup may match."""
