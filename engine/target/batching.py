"""Many sequences, one pass: who is packed with whom, how far their trees are cut, and what a pass costs.

The forward pass runs on the event loop's own thread, on purpose: a second busy Python thread beside it is ruinous (DESIGN 7).
Between passes the loop serves everybody: answers leave, new trees and cancellations come in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.tree import CandidateTree, CostCurve, best_size, with_room

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


class CostMeter:
    """The cost curve, measured at start and kept up to date by every pass.

    Other work on the machine can only make a pass slower, so lower readings count more than higher ones: at start the least of
    several rounds, later a faster blend downwards than upwards. A pass between two points of the curve moves both, by their
    nearness. What the curve says too much is expensive would never be tried again; so now and then `explores` asks for a larger
    tree than pays.
    """

    ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    _DOWN, _UP = 0.2, 0.08
    _EXPLORE_EVERY = 16

    def __init__(self) -> None:
        self._rows = np.array(self.ROWS, np.int32)
        self._seconds = np.full(len(self.ROWS), np.nan)
        self._frozen: CostCurve | None = None
        self._num_passes = 0

    def calibrate(self, run: Callable[[int], None], rounds: int = 4) -> None:
        """Time `run(rows)` for every number of rows, in rounds, keeping the least: a disturbance hits one round of each."""
        self._seconds[:] = np.inf
        for _ in range(rounds):
            for i, rows in enumerate(self.ROWS):
                start = time.perf_counter()
                run(rows)
                self._seconds[i] = min(self._seconds[i], time.perf_counter() - start)

    def freeze(self, curve: CostCurve | None) -> None:
        """Use this curve from now on, whatever passes take; None goes back to what was measured."""
        self._frozen = curve

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took so long; what is blended in is at most twice what was expected, and at least half."""
        self._num_passes += 1
        if self._frozen is not None or not 1 <= rows <= self.ROWS[-1] or np.isnan(self._seconds[0]):
            return
        ratio = min(max(seconds / float(np.interp(rows, self._rows, self._seconds)), 0.5), 2.0)
        blend = self._DOWN if ratio < 1 else self._UP
        above = int(np.searchsorted(self._rows, rows))
        below = max(above - 1, 0)
        share = 1.0 if above == below else (rows - self._rows[below]) / (self._rows[above] - self._rows[below])
        self._seconds[above] *= 1 + blend * share * (ratio - 1)
        self._seconds[below] *= 1 + blend * (1 - share) * (ratio - 1)

    def explores(self) -> bool:
        """Whether the next pass should be larger than pays, to learn what that costs."""
        return self._frozen is None and self._num_passes % self._EXPLORE_EVERY == self._EXPLORE_EVERY - 1

    def curve(self) -> CostCurve:
        """The curve as it stands, flat while nothing was measured: never falling, since fewer rows cost no more than many."""
        if self._frozen is not None:
            return self._frozen
        if np.isnan(self._seconds[0]):
            return CostCurve.flat()
        return CostCurve(self._rows, np.minimum.accumulate(self._seconds[::-1])[::-1].copy())


def cut_together(
    trees: Sequence[CandidateTree], curve: CostCurve, max_rows: int, other_rows: int = 0, explore: bool = False
) -> list[CandidateTree]:
    """Cut all trees of a pass by one rule: the best nodes of all of them together, as many as pay (DESIGN 5).

    `other_rows` are in the pass anyway (a chunk of a prompt). Every root stays. Ties go to the earlier tree. To `explore` is to
    take some more than pay, where there are more. A tree with lookahead rows is left whole (up to `max_rows`): how many of
    these are worth a row is for the one to say who put them there.
    """
    if not trees:
        return []
    whole = [bool(tree.roles.any()) for tree in trees]
    sizes = [0 if kept else len(tree) - 1 for tree, kept in zip(trees, whole, strict=True)]
    other_rows += sum(len(tree) - 1 for tree, kept in zip(trees, whole, strict=True) if kept)
    probs = np.concatenate([tree.probs[1 : 1 + size] for tree, size in zip(trees, sizes, strict=True)])
    owner = np.repeat(np.arange(len(trees)), sizes)
    order = np.argsort(-probs, kind="stable")[: max(0, max_rows - len(trees) - other_rows)]
    size = best_size(probs[order], curve, len(trees), other_rows)
    if explore:
        size = with_room(size)
    counts = np.bincount(owner[order[:size]], minlength=len(trees))
    return [tree.cut(max_rows if kept else 1 + int(count)) for tree, kept, count in zip(trees, whole, counts, strict=True)]


@dataclass(eq=False)
class Work(Generic[Owner, Answer]):
    """One sequence's wish for the next pass: a tree to verify, or a chunk of its prompt to read (a chain; answered by None)."""

    owner: Owner
    tree: CandidateTree | None
    chunk: NDArray[np.int32] | None
    done: asyncio.Future[Answer] = field(repr=False)


class Batcher(Generic[Owner, Answer]):
    """Collects wishes and runs passes, one after the other.

    `run(works)` performs one pass and returns an answer for each; a tree's answer may be an exception, which goes to its owner
    alone. At most one chunk joins a pass, so that reading a long prompt does not stall the others' streams.
    """

    _GATHER = 0.0005
    """Seconds to wait for the trees of other open sequences."""

    def __init__(self, run: Callable[[list[Work[Owner, Answer]]], list[Answer | Exception]]) -> None:
        self._run = run
        self._waiting: list[Work[Owner, Answer]] = []
        self._task: asyncio.Task[None] | None = None
        self.num_stepping = 0
        """Sequences that are between open and finish, so may send a tree soon."""

    async def submit(self, owner: Owner, tree: CandidateTree | None = None, chunk: NDArray[np.int32] | None = None) -> Answer:
        """The answer to one wish. If the caller is cancelled while waiting, the wish is withdrawn."""
        work = Work[Owner, Answer](owner, tree, chunk, asyncio.get_running_loop().create_future())
        self._waiting.append(work)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return await work.done

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)
            if sum(work.tree is not None for work in self._waiting) < self.num_stepping:
                await asyncio.sleep(self._GATHER)
            self._waiting = [work for work in self._waiting if not work.done.done()]
            batch = [work for work in self._waiting if work.tree is not None]
            batch += [work for work in self._waiting if work.chunk is not None][:1]
            self._waiting = [work for work in self._waiting if work not in batch]
            if not batch:
                continue
            try:
                answers: Sequence[Answer | Exception] = self._run(batch)
            except Exception as error:
                answers = [error] * len(batch)
            for work, answer in zip(batch, answers, strict=True):
                if work.done.done():
                    continue
                if isinstance(answer, Exception):
                    work.done.set_exception(answer)
                else:
                    work.done.set_result(answer)
