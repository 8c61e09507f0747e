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

from engine.tree import CandidateTree, CostCurve, best_size

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


class CostMeter:
    """The cost curve, measured: seconds for each number of rows, the times of passes blended in as they come.

    A single odd pass moves it little: what is blended in is clipped to half and twice the present value.
    """

    ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    _BLEND = 0.05

    def __init__(self) -> None:
        self._rows = np.array(self.ROWS, np.int32)
        self._seconds = np.full(len(self.ROWS), np.nan)
        self._frozen: CostCurve | None = None

    def calibrate(self, run: Callable[[int], None], repeats: int = 3) -> None:
        """Time `run(rows)` for every number of rows, keeping the least of `repeats`."""
        for i, rows in enumerate(self.ROWS):
            run(rows)
            best = np.inf
            for _ in range(repeats):
                start = time.perf_counter()
                run(rows)
                best = min(best, time.perf_counter() - start)
            self._seconds[i] = best

    def freeze(self, curve: CostCurve | None) -> None:
        """Use this curve from now on, whatever passes take; None goes back to what was measured."""
        self._frozen = curve

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of `rows` rows took so long."""
        i = int(np.searchsorted(self._rows, rows))
        if self._frozen is not None or i == len(self._rows) or self._rows[i] != rows or np.isnan(self._seconds[i]):
            return
        self._seconds[i] += self._BLEND * (min(max(seconds, self._seconds[i] / 2), self._seconds[i] * 2) - self._seconds[i])

    def curve(self) -> CostCurve:
        """The curve as it stands: never falling."""
        if self._frozen is not None:
            return self._frozen
        known = ~np.isnan(self._seconds)
        if not known.any():
            return CostCurve.flat()
        return CostCurve(self._rows[known], np.maximum.accumulate(self._seconds[known]))


def cut_together(trees: Sequence[CandidateTree], curve: CostCurve, max_rows: int, other_rows: int = 0) -> list[CandidateTree]:
    """Cut all trees of a pass by one rule: the best nodes of all of them together, as many as pay (DESIGN 5).

    `other_rows` are in the pass anyway (a chunk of a prompt). Every root stays. Ties go to the earlier tree.
    """
    if not trees:
        return []
    probs = np.concatenate([tree.probs[1:] for tree in trees])
    owner = np.repeat(np.arange(len(trees)), [len(tree) - 1 for tree in trees])
    order = np.argsort(-probs, kind="stable")[: max(0, max_rows - len(trees) - other_rows)]
    size = best_size(probs[order], curve, len(trees), other_rows)
    counts = np.bincount(owner[order[:size]], minlength=len(trees))
    return [tree.cut(1 + int(count)) for tree, count in zip(trees, counts, strict=True)]


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
