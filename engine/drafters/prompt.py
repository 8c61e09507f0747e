"""The `prompt` source: the request's own text, prompt and answer so far, and the caller's prediction of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens
from engine.drafters.words import whole_words
from engine.tree import Draft
from retriever.pools import TextPool


class PromptDrafter:
    """One drafting per request, from its first token on."""

    name = "prompt"
    blocking = False
    top_k = 0

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """Always one: every request has a prompt."""
        return [(self.name, whole_words(PromptDrafting(request.context, request.prediction), request))]


class PromptDrafting:
    """A pool of two documents: the prediction, led in by the end of the prompt so that it is found from the first token on,
    and the text itself, which grows."""

    def __init__(self, context: Tokens, prediction: Tokens) -> None:
        self._pool = TextPool(recent=_RECENT)
        if len(prediction):
            self._pool.append(np.concatenate([context[-_LEAD_IN:], prediction]))
        self._pool.append(context, new_document=True)

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 10 to 40 microseconds, however long the text."""
        found = self._pool.lookup(context[-_LONGEST:], budget)
        return Draft(found.tokens, found.parents, found.probs, found.lengths, found.counts)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """The text grows. O(1) a token."""
        self._pool.append(tokens)

    def close(self) -> None:
        """The pool goes with the request."""


_LONGEST = 32
"""Tokens of context that a lookup may match."""

_RECENT = 64
"""Latest tokens that are offered whatever the context is, below all that match."""

_LEAD_IN = 16
"""Tokens of the prompt's end that stand before the prediction: a long match, so the prediction leads at once."""
