"""The `lookahead` source: n-grams out of a Jacobi window that is verified beside the tree (arXiv 2402.02057).

The window guesses the tokens of the next positions and lets the target correct all of them at once, step after step. It has
`width` columns and up to `num_levels` levels. Level 0 is a chain below the root; the row in column c of a later level follows
that of the level before in the same column. So the row in column c of level l stands `c + l + 1` positions behind the root, and
its parents are all it sees: no mask of its own is needed.

    root -> a0 -> a1 -> a2         level 0: the oldest guesses
            |     |     |
            b0    b1    b2         level 1: what the target said, a step ago, after a0, a1, a2
            |     |     |
            c0    c1    c2         level 2: what it says now, after "a0 b0", "a0 a1 b1", "a0 a1 a2 b2"

After a step, "a0 b0 c0" and its like go into a pool of n-grams, level 0 falls out, and what was said becomes the last level.
Drafts are the pool's n-grams that begin with the last committed token.

Rows cost time and say nothing by themselves, so the window is as large as pays: see `best_shape`. Where rows are dear there is
none, and then nothing is drafted once the pool has nothing left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens
from engine.tree import CostCurve, Draft, LookaheadRows

SHAPES = ((3, 2), (5, 3), (7, 4), (10, 4), (15, 4))
"""(width, levels) of the windows to choose from; n-grams are two tokens longer than a window has levels, less the key."""

_MOST_ROWS = 64
"""Rows of a tree with its window: what a worker takes."""


class LookaheadDrafter:
    """One drafting per request; nothing outlives it."""

    name = "lookahead"
    blocking = False
    top_k = 1

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """Always one."""
        return [(self.name, LookaheadDrafting(request.context))]


class LookaheadDrafting:
    """A window, the pool it feeds, and what the pool was worth lately."""

    _KEEP = 0.9
    _FIRST_GAIN = 0.3

    def __init__(self, context: Tokens) -> None:
        self._window = Window()
        self._pool = NgramPool()
        self._text = context[-_MOST_TEXT:].tolist()
        self._rate = 1.0
        self._gain = self._FIRST_GAIN

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 10 to 40 microseconds."""
        return self._pool.draft(int(context[-1]), budget)

    def lookahead(self, num_rows: int, curve: CostCurve) -> LookaheadRows:
        """See Lookahead. The window, cut or filled up with words of the text to the shape that pays best."""
        shape = best_shape(num_rows, curve, self._rate, self._gain)
        return LookaheadRows.none() if shape is None else self._window.rows(*shape, self._text)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Score the pool's draft, advance the window, and put its n-grams into the pool. O(rows)."""
        if not tokens:
            return
        hits = self._pool.num_hits(self._text[-1], tokens)
        self._rate = self._KEEP * self._rate + (1 - self._KEEP) * len(tokens)
        if feedback.num_lookahead:
            self._gain = self._KEEP * self._gain + (1 - self._KEEP) * hits
        else:
            # Unheard, it is slowly given another chance.
            self._gain += (self._FIRST_GAIN - self._gain) * (1 - self._KEEP) / 8
        self._text = (self._text + list(tokens))[-_MOST_TEXT:]
        for ngram in self._window.advance(len(tokens), feedback):
            self._pool.add(ngram)

    def close(self) -> None:
        """Window and pool go with the request."""


_MOST_TEXT = 256
"""Tokens of the text's end out of which first guesses are taken."""


def best_shape(num_rows: int, curve: CostCurve, rate: float, gain: float) -> tuple[int, int] | None:
    """The window (width, levels) that adds most to the tokens per second of a pass of `num_rows`; None if none adds any.

    A step yields `rate` tokens, and the pool of a middle window `gain` of them. Half of those are taken to be its own, since
    other sources draft, too. A window with more rows finds more, but less than in proportion: as their square root.
    A curve of a single point says what a pass costs, not what a row does: nobody measured it, so there is no window.
    """
    if len(curve.rows) < 2:
        return None
    best, best_speed = None, rate / float(curve.at(num_rows))
    for width, num_levels in SHAPES:
        rows = width * num_levels
        if num_rows + rows > _MOST_ROWS:
            break
        worth = 0.5 * gain * (rows / _MIDDLE) ** 0.5
        speed = (rate + worth) / float(curve.at(num_rows + rows))
        if speed > best_speed:
            best, best_speed = (width, num_levels), speed
    return best


_MIDDLE = 28


class Window:
    """The guesses: `levels[l][c]` is the token in column c of level l. Starts empty."""

    def __init__(self) -> None:
        self.levels: list[list[int]] = []

    def rows(self, width: int, num_levels: int, text: Sequence[int]) -> LookaheadRows:
        """The window as rows, in `width` >= 2 columns and at most `num_levels` levels, level by level; changes nothing.

        Columns that it lacks are filled with tokens of `text` (not empty), strewn over it: any guess will do.
        """
        levels = self.levels[-num_levels:] or [[]]
        tokens: list[int] = []
        for level in levels:
            missing = range(len(level), width)
            tokens += level[:width] + [text[-1 - (7 * column + 3 * len(tokens)) % len(text)] for column in missing]
        parents = np.arange(len(tokens), dtype=np.int32)
        parents[:width] -= 1
        parents[width:] -= width
        return LookaheadRows(np.array(tokens, np.int32), parents)

    def advance(self, num_emitted: int, feedback: Feedback) -> list[list[int]]:
        """Take in what the target said after the rows (the last of `feedback`), `num_emitted` >= 1 tokens further on.

        Returns the n-grams: each column's tokens and what was said after them. Without lookahead rows the window is emptied.
        """
        rows = feedback.num_lookahead
        if not rows:
            self.levels = []
            return []
        tokens = feedback.nodes[-rows:].tolist()
        said = feedback.top_ids[-rows:, 0].tolist()
        first = len(feedback.nodes) - rows
        parents = (feedback.parents[-rows:] - first).tolist()
        width = next((row for row in range(1, rows) if parents[row] != row - 1), rows)
        levels = [tokens[start : start + width] for start in range(0, rows - width + 1, width)]
        last = said[(len(levels) - 1) * width : len(levels) * width]
        ngrams = [[*(level[column] for level in levels), last[column]] for column in range(width)]
        if len(levels) < _LEVELS_OF.get(width, 1):
            # it grows: every level stays, and the columns of positions that are out now go
            self.levels = [level[num_emitted:] for level in [*levels, last]]
        else:
            # the first level falls out, so every level stands one position further on
            self.levels = [level[num_emitted - 1 :] for level in [*levels[1:], last]]
        return ngrams


_LEVELS_OF = dict(SHAPES)


class NgramPool:
    """For each token, the n-grams last seen to begin with it: `num_tails` of them, of the latest `num_keys` tokens."""

    def __init__(self, num_keys: int = 4096, num_tails: int = 8) -> None:
        self._num_keys = num_keys
        self._num_tails = num_tails
        self._tails: OrderedDict[int, OrderedDict[tuple[int, ...], int]] = OrderedDict()

    def __len__(self) -> int:
        """How many tokens have n-grams."""
        return len(self._tails)

    def add(self, ngram: Sequence[int]) -> None:
        """Put it first, and count it; what was not seen for longest goes."""
        key, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.setdefault(key, OrderedDict())
        tails[tail] = tails.get(tail, 0) + 1
        tails.move_to_end(tail)
        if len(tails) > self._num_tails:
            tails.popitem(last=False)
        self._tails.move_to_end(key)
        if len(self._tails) > self._num_keys:
            self._tails.popitem(last=False)

    def draft(self, key: int, budget: int) -> Draft:
        """At most `budget` nodes that may follow `key`: its n-grams as a trie, latest first, by how often they were seen.

        A child's probability is its share of the parent's count, with one count for every child kept for what was not seen
        (PPM-C). Nothing seen: empty.
        """
        tails = self._tails.get(key)
        if not tails:
            return Draft.empty()
        places: dict[tuple[int, ...], int] = {(): -1}
        counts: list[int] = []
        paths: list[tuple[int, ...]] = []
        for tail, count in reversed(tails.items()):
            for depth in range(1, len(tail) + 1):
                path = tail[:depth]
                if path not in places:
                    if len(paths) >= budget:
                        break
                    places[path] = len(paths)
                    paths.append(path)
                    counts.append(0)
                counts[places[path]] += count
        parents = [places[path[:-1]] for path in paths]
        total = dict.fromkeys(parents, 0)
        for parent, count in zip(parents, counts, strict=True):
            total[parent] += count + 1
        probs = [count / total[parent] for parent, count in zip(parents, counts, strict=True)]
        return Draft.of([path[-1] for path in paths], parents, probs, [len(path) for path in paths], counts)

    def num_hits(self, key: int, emitted: Sequence[int]) -> int:
        """How many of the first `emitted` tokens an n-gram of `key` has in a row."""
        most = 0
        for tail in self._tails.get(key, ()):
            hits = 0
            for token, said in zip(tail, emitted, strict=False):
                if token != said:
                    break
                hits += 1
            most = max(most, hits)
        return most
