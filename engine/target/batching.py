"""Many sequences, one pass: who is let in, who is packed with whom, how far trees are cut, and what a pass costs.

The forward pass runs on the event loop's own thread, on purpose: a second busy Python thread beside it is ruinous (DESIGN 7).
Between passes the loop serves everybody: answers leave, new trees and cancellations come in.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import Exhausted
from engine.tree import CandidateTree, CostCurve, best_size, with_room

Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


class CostMeter:
    """What a pass costs, measured at start and kept up to date by every pass:

        seconds = between passes + rows alone + context x (per sequence x sequences + per row x rows)

    the second part a curve over the number of rows, `context` the mean number of positions before a row. Attention reads a
    sequence's keys and values once for several of its rows, and computes for each. What goes by between passes, drafts and
    messages among it, is paid once a pass too: the dearer it is, the more rows pay.

    Other work on the machine can only make a pass slower, so lower readings count more than higher ones: at start the least of
    several rounds, later a faster blend downwards than upwards. A pass between two points of the curve moves both, by their
    nearness; of what it took otherwise than expected every part has its share. What the curve says too much is expensive would
    never be tried again; so now and then `explores` asks for a larger tree than pays.
    """

    ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    _DOWN, _UP = 0.2, 0.08
    _EXPLORE_EVERY = 16
    _FEW, _MANY = 1, 16
    """Rows at which a long context is timed."""

    def __init__(self) -> None:
        self._rows = np.array(self.ROWS, np.int32)
        self._seconds = np.full(len(self.ROWS), np.nan)
        self._per_sequence = self._per_row = 0.0
        self._between = 0.0
        self._frozen: CostCurve | None = None
        self._num_passes = 0

    def calibrate(self, run: Callable[[int], None], rounds: int = 4) -> None:
        """Time `run(rows)` for every number of rows, in rounds, keeping the least: a disturbance hits one round of each."""
        self._seconds = _least_seconds(run, self.ROWS, rounds)

    def calibrate_context(self, run: Callable[[int], None], before: int, context: int, rounds: int = 4) -> None:
        """Time `run(rows)` behind `context` positions, few rows and many; `calibrate` did behind `before`, which is less."""
        sizes = (self._FEW, self._MANY)
        few, many = (_least_seconds(run, sizes, rounds) - self.curve().at(np.array(sizes))) / (context - before)
        self._per_row = max(many - few, 0.0) / (self._MANY - self._FEW)
        self._per_sequence = max(few - self._FEW * self._per_row, 0.0)
        self._seconds = np.maximum(self._seconds - self._context(before, 1, self._rows), 0.1 * self._seconds)

    def freeze(self, curve: CostCurve | None) -> None:
        """Use this curve from now on, whatever passes take; None goes back to what was measured."""
        self._frozen = curve

    def observe(self, rows: int, seconds: float, context: float = 0.0, num_sequences: int = 1) -> None:
        """A pass of `rows` rows took so long; what is blended in is at most twice what was expected, and at least half."""
        self._num_passes += 1
        if self._frozen is not None or not 1 <= rows <= self.ROWS[-1] or np.isnan(self._seconds[0]):
            return
        alone = float(np.interp(rows, self._rows, self._seconds))
        expected = alone + float(self._context(context, num_sequences, rows))
        ratio = min(max(seconds / expected, 0.5), 2.0)
        news = (self._DOWN if ratio < 1 else self._UP) * (ratio - 1)
        of_context = 1 + news * (1 - alone / expected)
        self._per_sequence *= of_context
        self._per_row *= of_context
        news *= alone / expected
        above = int(np.searchsorted(self._rows, rows))
        below = max(above - 1, 0)
        share = 1.0 if above == below else (rows - self._rows[below]) / (self._rows[above] - self._rows[below])
        self._seconds[above] *= 1 + news * share
        self._seconds[below] *= 1 + news * (1 - share)

    def observe_between(self, seconds: float) -> None:
        """So long after one pass the next one began, somebody wanting it all the while."""
        self._between += self._UP * (seconds - self._between)

    def explores(self) -> bool:
        """Whether the next pass should be larger than pays, to learn what that costs."""
        return self._frozen is None and self._num_passes % self._EXPLORE_EVERY == self._EXPLORE_EVERY - 1

    def curve(self, context: float = 0.0, num_sequences: int = 1) -> CostCurve:
        """The curve as it stands, flat while nothing was measured: never falling, since fewer rows cost no more than many."""
        if self._frozen is not None:
            return self._frozen
        if np.isnan(self._seconds[0]):
            return CostCurve.flat()
        seconds = self._between + self._seconds + self._context(context, num_sequences, self._rows)
        return CostCurve(self._rows, np.minimum.accumulate(seconds[::-1])[::-1].copy())

    def share(self, context: float, num_trees: int, other_rows: int) -> CostCurve:
        """What rows cost one of `num_trees` trees in a pass with `other_rows` rows of others: its part of what a pass over the
        roots alone takes, and all of what its further rows add where the others have as many. So an engine that sees its own
        tree only cuts it about as far as `cut_together` will, and knows what a token takes without drafts.
        """
        whole = self.curve(context, num_trees)
        if self._frozen is not None or num_trees < 2:
            return whole
        seconds = whole.at(other_rows + whole.rows.astype(np.int64))
        return CostCurve(whole.rows, seconds - seconds[0] + whole.at(num_trees) / num_trees)

    def _context(self, context: float, num_sequences: int, rows: NDArray[np.int32] | int) -> NDArray[np.float64]:
        """Seconds for the context."""
        return np.asarray(context * (self._per_sequence * num_sequences + self._per_row * rows), np.float64)


def _least_seconds(run: Callable[[int], None], sizes: Sequence[int], rounds: int) -> NDArray[np.float64]:
    """The least seconds that `run(size)` took, for every size, in rounds."""
    least = np.full(len(sizes), np.inf)
    for _ in range(rounds):
        for i, size in enumerate(sizes):
            start = time.perf_counter()
            run(size)
            least[i] = min(least[i], time.perf_counter() - start)
    return least


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


class Admission:
    """At most `most` sequences at a time; `max_waiting` more wait for their turn, first come first served."""

    def __init__(self, most: int, max_waiting: int) -> None:
        self.num_admitted = 0
        self._most = most
        self._max_waiting = max_waiting
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their turn."""
        return sum(not turn.cancelled() for turn in self._queue)

    async def enter(self) -> None:
        """Wait for a turn; whoever entered must leave. Raises Exhausted at once where the queue is full."""
        if self.num_admitted < self._most:
            self.num_admitted += 1
            return
        if self.num_waiting >= self._max_waiting:
            raise Exhausted(
                f"the worker is full: {self.num_admitted} sequences are open and {self.num_waiting} wait; retry later"
            )
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()  # it was this one's turn at the same moment
            raise

    def leave(self) -> None:
        """Hand the turn on to who has waited longest, if anybody has."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                return
        self.num_admitted -= 1


@dataclass(eq=False)
class Work(Generic[Owner, Answer]):
    """One sequence's wish: a tree to verify, or, without one, to read on in its tokens, as far as a pass has room."""

    owner: Owner
    tree: CandidateTree | None
    done: asyncio.Future[Answer] = field(repr=False)


class Later(enum.Enum):
    """The answer to a wish that must wait for another pass."""

    LATER = "later"


LATER = Later.LATER


class Batcher(Generic[Owner, Answer]):
    """Collects wishes and runs passes, one after the other.

    `run(works)` performs one pass over some of the wishes, given in the order in which they came, and says for each its answer,
    an exception, which goes to its owner alone, or LATER: it keeps its place. Where all must wait, nothing is run until there
    is a new wish, somebody calls `wake`, or a moment has passed.

    A pass waits for those that may soon have a wish: until `patience(works)` seconds have gone since it could have begun, 0
    once there is nobody to wait for.
    """

    _MOMENT = 0.1
    """Seconds after which wishes that had to wait are tried again."""

    _TURNS = 3
    """Turns of the loop that a message which has arrived takes to become a wish."""

    def __init__(
        self,
        run: Callable[[list[Work[Owner, Answer]]], list[Answer | Exception | Later]],
        patience: Callable[[list[Work[Owner, Answer]]], float] = lambda works: 0.0,
    ) -> None:
        self._run = run
        self._patience = patience
        self._waiting: list[Work[Owner, Answer]] = []
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def submit(self, owner: Owner, tree: CandidateTree | None = None) -> Answer:
        """The answer to one wish. If the caller is cancelled while waiting, the wish is withdrawn."""
        work = Work[Owner, Answer](owner, tree, asyncio.get_running_loop().create_future())
        self._waiting.append(work)
        if self._task is None or self._task.done():
            self._news = asyncio.Event()
            self._task = asyncio.create_task(self._serve())
        self._news.set()
        return await work.done

    def wake(self) -> None:
        """What made wishes wait may have changed."""
        self._news.set()

    async def _serve(self) -> None:
        while self._waiting:
            await self._gather()
            self._waiting = batch = [work for work in self._waiting if not work.done.done()]
            if not batch:
                continue
            self._news.clear()
            try:
                answers: Sequence[Answer | Exception | Later] = self._run(batch)
            except Exception as error:
                answers = [error] * len(batch)
            self._waiting = [work for work, answer in zip(batch, answers, strict=True) if answer is LATER]
            for work, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Later) or work.done.done():
                    continue
                if isinstance(answer, Exception):
                    work.done.set_exception(answer)
                else:
                    work.done.set_result(answer)
            if len(self._waiting) == len(batch):
                await self._hear(self._MOMENT)

    async def _gather(self) -> None:
        """Let everybody have a turn, and wait for those that may come soon."""
        for _ in range(self._TURNS):
            await asyncio.sleep(0)
        clock = asyncio.get_running_loop().time
        began = clock()
        while (left := began + self._patience(self._waiting) - clock()) > 0:
            self._news.clear()
            await self._hear(left)

    async def _hear(self, seconds: float) -> None:
        """Wait for news, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
