"""The `resume` source: how the place goes on that the text follows, also after it said something else.

A text that repeats an earlier one seldom does so word for word: a name is another, an argument is left out, a line is put in.
After that, the longest end of the context that occurs elsewhere is short, and a source that looks it up is sent to many places.
The one that was followed goes on all the same, mostly: as many tokens later as were said, or a few more or fewer, which the
tokens said since then tell (`kernels.resume_at`).

Places are followed in the request's own text, the caller's prediction of the answer before it, and in each of its corpora.
Drafts are chains; their evidence is how many tokens agree, and how long ago text and place last agreed in several.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens, kernels
from engine.tree import Draft

if TYPE_CHECKING:
    from retriever.datastore import Datastore


_DEPTH = 16
"""Tokens that are drafted at most."""

_RIGHT, _GOES_ON = 0.5, 0.8
"""What to think of the first token, and of each further one, before anything was observed."""

_FOLLOWED = 32
"""Last tokens of the prompt along which places are followed: one that was left before them is given up by then."""

_LEAD_IN = 16
"""Tokens of the prompt's end that stand before the prediction, so that it is followed from the first token on."""

_FEWEST = 256
"""Tokens that there is room for at first."""

_FOUND = 8
"""Tokens that must agree before a place in a corpus is followed."""

_LONGEST = 32
"""Tokens of context that are looked up in a corpus."""

_BEFORE, _AFTER = 64, 256
"""Tokens of a corpus before and behind a place that are read at once."""

_SLOW = 0.005
"""A search that takes so many seconds may have met the disk."""


class ResumeDrafter:
    """One drafting for the request's own text, and one for each of its corpora that is in memory."""

    name = "resume"
    blocking = False
    top_k = 0

    def __init__(self) -> None:
        self._in_memory: WeakSet[Datastore] = WeakSet()

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """`resume`, and `resume:NAME` for corpora."""
        pairs: list[tuple[str, Drafting]] = [(self.name, OwnPlace(request.context, request.prediction))]
        for name, store in request.corpora.items():
            if store in self._in_memory or store.resident():
                self._in_memory.add(store)
                pairs.append((f"{self.name}:{name}", CorpusPlace(request.context, store, self._in_memory)))
        return pairs


class OwnPlace:
    """The text as it grows, behind the prediction if there is one, and the place in it that its end follows."""

    def __init__(self, context: Tokens, prediction: Tokens) -> None:
        self._text, self._end = np.zeros(0, np.int32), 0
        self._heads = np.zeros(0, np.int32)
        self._place, self._age = -1, 0
        self._said: list[int] = []  # since then
        if len(prediction):
            context = np.concatenate([context[-_LEAD_IN:], prediction, np.array([-1], np.int32), context])
        self._append(context, len(context) - _FOLLOWED)

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 15 microseconds, and less than one for each token since it was asked last."""
        self._append(np.array(self._said, np.int32), 0)
        self._said.clear()
        return chain(self._text, self._end, self._place, self._age, context, budget)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """The text grows. What that means is found out when a draft is asked for."""
        self._said += tokens

    def close(self) -> None:
        """The text goes with the request."""

    def _append(self, added: Tokens, followed: int) -> None:
        begin, end = self._end, self._end + len(added)
        if end > len(self._text):
            capacity = max(_FEWEST, 1 << (2 * end - 1).bit_length())
            text = np.empty(capacity, np.int32)
            text[:begin] = self._text[:begin]
            self._text, self._heads = text, np.full(capacity, -1, np.int32)
            kernels.keep_place(text, 0, begin, begin, self._heads, -1, 0)
        self._text[begin:end] = added
        self._place, self._age = kernels.keep_place(self._text, begin, end, followed, self._heads, self._place, self._age)
        self._end = end


class CorpusPlace:
    """The place in a corpus that the text follows: a copy of what stands around it, read again where it ends."""

    def __init__(self, context: Tokens, store: Datastore, in_memory: WeakSet[Datastore]) -> None:
        self._store, self._in_memory = store, in_memory
        self._text = np.zeros(0, np.int32)
        self._place, self._age = -1, 0
        self._num_new = 0  # tokens at the end of the context along which no place was followed yet
        for end in range(max(len(context) - _FOLLOWED, 0) + 1, len(context) + 1):
            self._step(context[max(end - _LONGEST, 0) : end], True)

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 12 microseconds, and 10 to 50 more while the text follows no place."""
        self._follow(context[-_LONGEST - _FOLLOWED :])
        return chain(self._text, len(self._text), self._place, self._age, context, budget)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """The text went on. Where to is looked up when a draft is asked for."""
        self._num_new += len(tokens)

    def close(self) -> None:
        """The datastore belongs to the server."""

    def _follow(self, context: Tokens) -> None:
        if self._num_new > _FOLLOWED:
            self._place = -1
        for end in range(len(context) - min(self._num_new, _FOLLOWED) + 1, len(context) + 1):
            self._step(context[max(end - _LONGEST, 0) : end], end == len(context))
        self._num_new = 0

    def _step(self, said: Tokens, searches: bool) -> None:
        if self._place >= 0:
            self._age += 1
            at, agreed = kernels.resume_at(self._text, len(self._text), self._place, self._age, said)
            if agreed >= kernels.SAME:
                self._place, self._age = at, 0
            if self._age > kernels.LOST or self._place + _DEPTH > len(self._text):
                self._place, self._age = -1, 0
        if (self._place < 0 or self._age) and searches and self._store in self._in_memory:
            started = time.monotonic()
            found = self._store.place(said, min_length=_FOUND, before=_BEFORE, after=_AFTER)
            if time.monotonic() - started > _SLOW and not self._store.resident():
                self._in_memory.discard(self._store)
            if found is not None:
                self._text, self._place, self._age = found.tokens, found.at, 0


def chain(text: Tokens, end: int, place: int, age: int, said: Tokens, budget: int) -> Draft:
    """At most `budget` tokens of `text[:end]` (int32, -1 between documents) from where `kernels.resume_at` says."""
    if place < 0 or budget < 1:
        return Draft.empty()
    at, agreed = kernels.resume_at(text, end, place, age, said[-kernels.MOST_AGREED :])
    if at < 0:
        return Draft.empty()
    tokens = text[at : min(at + min(budget, _DEPTH), end)]
    tokens = tokens[: int(np.argmax(tokens < 0)) if tokens.min() < 0 else len(tokens)].copy()
    steps = np.arange(len(tokens), dtype=np.int32)
    probs = np.where(steps == 0, _RIGHT, _GOES_ON).astype(np.float32)
    return Draft(tokens, steps - 1, probs, agreed + steps, np.full(len(tokens), age, np.int32))


def warmup() -> None:
    """Compile the kernels, so that no request waits for that."""
    OwnPlace(np.zeros(2 * kernels.SAME, np.int32), np.zeros(0, np.int32)).propose(np.zeros(1, np.int32), 1)
