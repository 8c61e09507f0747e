"""The `recycle` source: what the target said after each token when it last saw it (Token Recycling, arXiv 2408.08696).

Every verified row, rejected ones and those of the prompt's end included, leaves its likeliest next tokens behind; they are what
is drafted when its token comes again. Beyond the paper:

- Rows are kept for the last two tokens and for the last one; the longer context leads, the shorter one fills up.
- What the target found likely at the last positions and did not say is often said next ("LogitSpec", arXiv 2507.01449).
- So are tokens that are frequent just here.
- After a token that the target was not heard after yet, what follows it most often in the request's corpora is a candidate. It
  is asked for anew whenever it is needed and kept nowhere, so nothing of a corpus outlives it or leaves its tenant.
- A candidate's probability is how often one of its kind was right, counted over everything that could have been drafted, so
  that drafts from here may be weighed against those of other sources.

Rows are shared by all requests of a tenant for one model, and by nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.drafters import Drafting, DraftRequest, Feedback, Tokens, kernels
from engine.memory import Arrays
from engine.tree import Draft

if TYPE_CHECKING:
    from retriever.datastore import Datastore

_FEWEST = 1 << 10
_MOST = 1 << 16
"""Places of a table of rows, at first and at most: 44 bytes each."""

_KEEP = 0.998
"""Counts fade by this factor with every observation of their kind."""

_NUM_COMMON, _KEEP_COMMON = 64, 0.98


class Successors:
    """Rows of likely successors by context, and how often each kind of candidate was right: what a tenant's requests share.

    Memory: 45 kB at first, 2.9 MB at most; then the rows used longest ago give way.
    """

    def __init__(self, saved: Arrays | None = None) -> None:
        """Nothing known, or what `arrays` gave. Raises ValueError or KeyError for arrays that are something else."""
        self.hits = np.zeros(kernels.NUM_SIGNS)
        self.trials = np.zeros(kernels.NUM_SIGNS)
        self._allocate(_FEWEST)
        self._num_rows = 0
        if saved is not None:
            self._restore(saved)

    def __len__(self) -> int:
        """How many contexts have a row."""
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.keys.nbytes + self.stamps.nbytes + self.rows.nbytes + self.hits.nbytes + self.trials.nbytes

    def knows(self, token: int) -> bool:
        """Whether the token alone has a row."""
        return bool(kernels.knows(self.keys, token))

    def learn(self, feedback: Feedback, before: int, now: float) -> None:
        """Keep the rows of a feedback, heard at `now` (seconds since 1970); `before` is the token before its first node, -1 if
        that is not known. O(rows)."""
        if not feedback.top_ids.size:
            return
        self._num_rows += kernels.learn(
            self.keys,
            self.stamps,
            self.rows,
            feedback.nodes,
            feedback.parents,
            np.ascontiguousarray(feedback.top_ids[:, : kernels.K]),
            feedback.num_lookahead,
            before,
            _minute(now),
        )
        if 2 * self._num_rows > len(self.keys) and len(self.keys) < _MOST:
            self._grow()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All of it: the places that are taken."""
        taken = np.flatnonzero(self.keys)
        return {
            "keys": self.keys[taken],
            "stamps": self.stamps[taken],
            "rows": self.rows[taken],
            "hits": self.hits.copy(),
            "trials": self.trials.copy(),
        }

    def expire(self, oldest: float) -> None:
        """Forget rows last heard before `oldest` (seconds since 1970). O(places)."""
        old = self.stamps < _minute(oldest)
        self.keys[old], self.stamps[old], self.rows[old] = 0, 0, -1
        self._num_rows = int(np.count_nonzero(self.keys))

    def _restore(self, saved: Arrays) -> None:
        keys, stamps, rows = saved["keys"], saved["stamps"], saved["rows"]
        counts = np.stack([saved["hits"], saved["trials"]])
        num, num_signs = len(keys), counts.shape[-1]
        fits = keys.shape == stamps.shape == (num,) and rows.shape == (num, kernels.K)
        fits = fits and counts.shape[1:] in ((kernels.NUM_SIGNS,), (kernels.NOT_HINTED,))
        types = [array.dtype for array in (keys, stamps, rows, counts)]
        if not fits or num > _MOST or types != [np.uint64, np.int32, np.int32, np.float64]:
            raise ValueError("not a table of successors")
        if np.any(rows < -1) or not np.all((counts[0] >= 0) & (counts[1] >= counts[0]) & np.isfinite(counts[1])):
            raise ValueError("a table of successors with impossible numbers")
        size = len(self.keys)
        while size < 2 * num and size < _MOST:
            size *= 2
        self._allocate(size)
        self._num_rows = kernels.rehash(keys, stamps, rows, self.keys, self.stamps, self.rows)
        self.hits[:num_signs], self.trials[:num_signs] = counts

    def _allocate(self, size: int) -> None:
        self.keys = np.zeros(size, np.uint64)
        self.stamps = np.zeros(size, np.int32)
        self.rows = np.full((size, kernels.K), -1, np.int32)

    def _grow(self) -> None:
        old = self.keys, self.stamps, self.rows
        self._allocate(4 * len(self.keys))
        self._num_rows = kernels.rehash(*old, self.keys, self.stamps, self.rows)


class RecycleDrafter:
    """One drafting per request, all of a tenant's over the same rows."""

    name = "recycle"
    blocking = False
    top_k = kernels.K

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """Always one: the first verified rows are something to work with.

        A request that is not learned from has a copy of the rows; one that may not use what was learned begins with none.
        """
        memory = request.memory
        shared = memory.state(self.name, Successors)
        shared.expire(memory.oldest)
        if request.use_history:
            successors = shared if request.learn else Successors(shared.arrays())
        else:
            successors = Successors()
        others = [shared] if request.learn and successors is not shared else []
        corpora = tuple(request.corpora.values())
        return [(self.name, RecycleDrafting(request.context, successors, others, memory.now, corpora))]


class RecycleDrafting:
    """One request's place in the rows: its last two tokens, what was likely there and not said, what is frequent.

    It drafts from `successors`, and from `corpora` where these know nothing; `others` learn what they do.
    """

    def __init__(
        self,
        context: Tokens,
        successors: Successors,
        others: Sequence[Successors] = (),
        now: float = 0.0,
        corpora: Sequence[Datastore] = (),
    ) -> None:
        self._successors = successors
        self._others = others
        self._now = now
        self._corpora = corpora
        self._missed = np.full((2, kernels.K), -1, np.int32)
        self._tokens = np.full(_NUM_COMMON, -1, np.int32)
        self._weights = np.zeros(_NUM_COMMON)
        self._common = np.full(kernels.K, -1, np.int32)
        self._hinted = np.full(kernels.K, -1, np.int32)
        self._last = np.full(2, -1, np.int32)
        self._advance(context[-_NUM_COMMON:].astype(np.int32))

    def propose(self, context: Tokens, budget: int) -> Draft:
        """See Drafting. Some 10 to 50 microseconds."""
        known = self._successors
        tokens, parents, signs = (np.empty(budget, np.int32) for _ in range(3))
        probs = np.empty(budget, np.float32)
        num = kernels.draft(
            known.keys,
            known.rows,
            known.hits,
            known.trials,
            int(self._last[0]),
            int(self._last[1]),
            self._missed,
            self._common,
            self._hinted,
            budget,
            tokens,
            parents,
            probs,
            signs,
        )
        evidence = np.minimum(known.trials[signs[:num]], 1 << 20).astype(np.int32)
        return Draft(tokens[:num], parents[:num], probs[:num], np.ones(num, np.int32), evidence)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Score what could have been drafted, then learn from every verified row. O(rows), some 10 to 50 microseconds."""
        emitted = np.asarray(tokens, np.int32)
        known = self._successors
        before, root = int(self._last[0]), int(self._last[1])
        if len(emitted):
            kernels.score(
                known.keys,
                known.rows,
                known.hits,
                known.trials,
                before,
                root,
                self._missed,
                self._common,
                self._hinted,
                emitted,
                _KEEP,
            )
            self._follow(emitted, feedback)
        elif feedback.top_ids.size:
            before, said = -1, [*feedback.nodes[1:].tolist(), root]
            for row in range(max(len(feedback.top_ids) - 2, 0), len(feedback.top_ids)):
                kernels.miss(self._missed, feedback.top_ids[row], said[row])
        for table in (known, *self._others):
            table.learn(feedback, before, self._now)
        self._advance(emitted)

    def close(self) -> None:
        """The rows belong to the tenant."""

    def _advance(self, emitted: Tokens) -> None:
        if len(emitted):
            self._last = np.concatenate([self._last, emitted])[-2:]
            kernels.count_common(self._tokens, self._weights, emitted, _KEEP_COMMON, self._common)
            if self._corpora:
                self._ask_corpora(int(self._last[-1]))

    def _ask_corpora(self, token: int) -> None:
        """Note what most often follows a token that has no row, every corpus counting alike. A few microseconds a corpus."""
        self._hinted[:] = -1
        if token < 0 or self._successors.knows(token):
            return
        shares = Counter[int]()
        for store in self._corpora:
            tokens, counts = store.frequent_next(token, kernels.K)
            for each, count in zip(tokens.tolist(), counts.tolist(), strict=True):
                shares[each] += count / counts.sum()
        best = sorted(shares, key=lambda each: (-shares[each], each))[: kernels.K]
        self._hinted[: len(best)] = best

    def _follow(self, emitted: Tokens, feedback: Feedback) -> None:
        """Note what was likely along the path of the emitted tokens and not said."""
        if feedback.top_ids.size:
            num = len(feedback.nodes) - feedback.num_lookahead
            kernels.follow(feedback.nodes, feedback.parents, feedback.top_ids, num, emitted, self._missed)


def warmup() -> None:
    """Compile every kernel for the types they are called with. Some seconds the first time, then read from numba's cache."""
    known = Successors()
    drafting = RecycleDrafting(np.zeros(2, np.int32), known)
    one: NDArray[np.int32] = np.zeros(1, np.int32)
    heard = Feedback(np.ones((1, 1), np.int32), one, one - 1)
    drafting.accept([], heard)
    drafting.propose(one, 1)
    drafting.accept([1], heard)
    known.knows(1)
    Successors(known.arrays())


def without_old(saved: Arrays, oldest: float) -> dict[str, NDArray[Any]]:
    """Saved rows without those last heard before `oldest`. Raises nothing: what makes no sense is left out whole."""
    try:
        known = Successors(saved)
    except (KeyError, ValueError):
        return {}
    known.expire(oldest)
    return known.arrays()


def _minute(seconds: float) -> int:
    return int(seconds // 60)
