"""Drafting where the context ends inside a word.

A prompt is cut into tokens as it stands, so one that ends in "retur" ends in tokens like "ret", "ur", which hardly ever follow
one another in whole texts: a lookup of them finds little. So the last tokens are taken off, what followed the rest is looked
up, and of the continuations those are kept that begin with the text taken off. What is left of the token in which it ends is
spelled anew, in the tokens that may follow the prompt ("n"), and the continuation goes on below. (Token healing turned
round: the prompt stays as it is, so the answer does.)

A model has hardly seen words in such tokens either: small ones often say something else than "n". So the spelled tokens are
counted 0 times, as a way of writing that the text looked up does not have: calibration learns by itself how far to trust it.

It is done before the first step only, whatever the last character is: a bracket, the end of a line, or the spaces that indent
the next, are as often the beginning of a longer token as half a word is. Once the word is completed as drafted, lookups see it
in the tokens that whole texts have, so that long matches reach over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens
from engine.tree import Draft

if TYPE_CHECKING:
    from engine.text import Tokenizer

_MOST_CUT = 3
"""Tokens that are taken off at most."""

_REACH = 32
"""Tokens of context that a lookup may match: a completed word further back no longer matters."""


@dataclass(frozen=True)
class Ending:
    """How a word may end.

    1. `spelled`, int32 [n], n >= 1, are the tokens that complete it after the context as it is.
    2. Taking `num_cut` tokens off the context and putting `whole`, int32 [m], there gives the same text as appending `spelled`.
    """

    num_cut: int
    whole: Tokens
    spelled: Tokens


def whole_words(drafting: Drafting, request: DraftRequest) -> Drafting:
    """`drafting`, made to complete the word in which the request's context ends; as it is, if no word can be cut there.

    It must propose from the context alone, whatever its end: it is asked for shorter ones, and for one in other tokens.
    """
    if request.tokenizer is None or not any(cuts(request.context, request.tokenizer)):
        return drafting
    return WholeWords(drafting, request.context, request.tokenizer)


class WholeWords:
    """See `whole_words`. The first step costs up to four lookups and half a millisecond, the others nothing."""

    def __init__(self, drafting: Drafting, context: Tokens, tokenizer: Tokenizer) -> None:
        self._drafting = drafting
        self._tokenizer = tokenizer
        self._length = len(context)
        self._emitted: list[int] = []
        self._endings: list[Ending] = []
        self._taken: Ending | None = None

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. At first the longest match leads, and shorter ones share what it leaves."""
        draft = self._drafting.propose(self._whole(context), budget)
        if self._emitted:
            return draft
        found: list[tuple[Draft, list[Ending]]] = [(draft, [])]
        for num_cut, text in cuts(context, self._tokenizer):
            shorter = self._drafting.propose(context[:-num_cut], budget)
            found.append(complete(shorter, num_cut, text, self._tokenizer))
        found.sort(key=lambda each: -_evidence(each[0]))
        self._endings = [ending for _, endings in found for ending in endings]
        return back_off([each for each, _ in found], budget)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """See Drafting."""
        self._drafting.accept(tokens, feedback)
        if self._taken is None and len(self._emitted) < _REACH:
            self._emitted += tokens
            said = [each for each in self._endings if self._emitted[: len(each.spelled)] == each.spelled.tolist()]
            self._taken = max(said, key=lambda each: len(each.spelled), default=None)

    def close(self) -> None:
        """See Drafting."""
        self._drafting.close()

    def _whole(self, context: Tokens) -> Tokens:
        """The context with the completed word in its usual tokens, as far back as a lookup reads."""
        taken = self._taken
        if taken is None or len(context) > self._length + len(taken.spelled) + _REACH:
            return context
        start = self._length - taken.num_cut
        rest = context[self._length + len(taken.spelled) :]
        return np.concatenate([context[max(start - _REACH, 0) : start], taken.whole, rest])


def cuts(context: Tokens, tokenizer: Tokenizer) -> Iterator[tuple[int, bytes]]:
    """How many tokens may be taken off the end of `context`, and their text: up to the one that begins the word (or, after
    white space alone, the line).

    A token stays that is control, or all there is. Nothing to cut: none.
    """
    text = b""
    for num_cut in range(1, min(_MOST_CUT + 1, len(context))):
        token = tokenizer.text_bytes(int(context[-num_cut]))
        if not token:
            return
        text = token + text
        yield num_cut, text
        if b"\n" in token or (text.strip() and token[:1] < b"\x80" and not token[:1].isalnum()):
            return


def complete(draft: Draft, num_cut: int, text: bytes, tokenizer: Tokenizer) -> tuple[Draft, list[Ending]]:
    """What of `draft`, made after `num_cut` tokens less of context, may follow the whole; and the ways in which `text`, the cut
    tokens', may go on.

    Kept are the paths that spell `text` and something after it; probabilities are those given that they do. Evidence is longer
    by the tokens cut; a spelled token counts 0. O(n) and some microseconds for every way.
    """
    mass = np.ones(len(draft) + 1)  # of the path to each node; the last, which is -1, is the root's
    left: list[bytes | None] = [None] * len(draft) + [text]  # what a path has still to spell; None: it spells something else
    places: dict[int, int] = {}  # where a node of the draft is in the trie
    trie = _Trie()
    endings = list[Ending]()
    for i, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        mass[i] = mass[parent] * draft.probs[i]
        evidence = int(draft.lengths[i]) + num_cut, int(draft.counts[i])
        rest, word = left[parent], tokenizer.text_bytes(token)
        if parent in places:
            places[i] = trie.add(places[parent], token, mass[i], evidence)
        elif rest and word and rest.startswith(word):
            left[i] = rest[len(word) :]
        elif rest and word.startswith(rest) and len(spelled := spell(word[len(rest) :], tokenizer)):
            place = -1
            for piece in spelled.tolist():
                place = trie.add(place, piece, mass[i], (evidence[0], 0))
            places[i] = place
            endings.append(Ending(num_cut, _path(draft, i), spelled))
    unseen = 1.0 - float(draft.probs[draft.parents < 0].sum())
    return trie.draft(unseen), endings


def spell(text: bytes, tokenizer: Tokenizer) -> Tokens:
    """The tokens of `text` where it goes on another text; none if it is half a character.

    Tokenizers that put a space in front of every text are given a line before it.
    """
    try:
        rest = text.decode()
    except UnicodeDecodeError:
        return ids_of()
    for lead in ("", "\n"):
        ids = tokenizer.encode(lead + rest)[len(tokenizer.encode(lead)) :]
        if b"".join(map(tokenizer.text_bytes, ids.tolist())) == text:
            return ids
    return ids_of()


def back_off(drafts: Sequence[Draft], budget: int) -> Draft:
    """One draft of at most `budget` nodes: the first, and from each further one the first tokens that are not there yet, with
    all below, scaled to the probability that the drafts before it leave."""
    parts, first_tokens, free, size = list[Draft](), set[int](), 1.0, 0
    for draft in drafts:
        places = np.full(len(draft) + 1, -1)
        probs = draft.probs.astype(np.float64)
        kept: list[int] = []
        for i, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
            if size + len(kept) < budget and (token not in first_tokens if parent < 0 else places[parent] >= 0):
                places[i] = size + len(kept)
                probs[i] *= free if parent < 0 else 1.0
                kept.append(i)
        tops = [i for i in kept if draft.parents[i] < 0]
        first_tokens |= set(draft.tokens[tops].tolist())
        free = max(0.0, free - float(probs[tops].sum()))
        size += len(kept)
        parents, probs32 = places[draft.parents[kept]].astype(np.int32), probs[kept].astype(np.float32)
        parts.append(Draft(draft.tokens[kept], parents, probs32, draft.lengths[kept], draft.counts[kept]))
    columns = ("tokens", "parents", "probs", "lengths", "counts")
    return Draft(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


class _Trie:
    """A draft that grows: adding to a path that is there adds to its mass."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], int] = {}
        self._mass: list[float] = []
        self._evidence: list[tuple[int, int]] = []

    def add(self, parent: int, token: int, mass: float, evidence: tuple[int, int]) -> int:
        """The place of `token` below place `parent` (-1: the root)."""
        place = self._places.setdefault((parent, token), len(self._mass))
        if place == len(self._mass):
            self._mass.append(0.0)
            self._evidence.append(evidence)
        self._mass[place] += mass
        return place

    def draft(self, unseen: float) -> Draft:
        """With probabilities out of masses; `unseen` is the mass of whatever else may follow the root."""
        if not self._mass:
            return Draft.empty()
        parents = [parent for parent, _ in self._places]
        total = max(unseen, 0.0) + sum(mass for parent, mass in zip(parents, self._mass, strict=True) if parent < 0)
        above = [total if parent < 0 else self._mass[parent] for parent in parents]
        probs = [mass / most if most > 0 else 0.0 for mass, most in zip(self._mass, above, strict=True)]
        lengths, counts = zip(*self._evidence, strict=True)
        return Draft.of([token for _, token in self._places], parents, probs, lengths, counts)


def _evidence(draft: Draft) -> int:
    """How many tokens of context the draft's beginning rests on, no more than a lookup may match."""
    return min(int(draft.lengths[draft.parents < 0].max(initial=0)), _REACH)


def _path(draft: Draft, node: int) -> Tokens:
    """int32: the tokens from below the root to `node`."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(draft.tokens[node]))
        node = int(draft.parents[node])
    return ids_of(*reversed(tokens))


def ids_of(*tokens: int) -> Tokens:
    """int32 [n]."""
    return np.array(tokens, np.int32)
