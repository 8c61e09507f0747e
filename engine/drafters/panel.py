"""All sources of one request, asked together, each kept from harming the others.

A source that raises, answers with something that is no draft, or is late is dropped for the step and counted; after a few
misses in a row it is left alone for a while. Whatever happens here, the target's text is the same; only speed changes.

Quick sources run on the caller's thread, one after the other. A blocking one has a thread of its own: while it is busy it is
skipped, and the tokens it should accept wait in its queue. A draft that comes after its step is never used for another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from engine.calibration import alone
from engine.drafters import Drafter, Drafting, DraftRequest, Feedback, Lookahead, Tokens
from engine.tree import MAX_SOURCES, CostCurve, Draft, LookaheadRows

log = logging.getLogger("draftloom.drafters")

_MISSES = 3
"""Steps in a row that a source may miss before it is left alone."""

_TRIAL = 64
"""Steps on which a source must have been heard before it is judged, and after which the next may be."""

_PROBE = 16
"""A source that does not pay for its time is asked on every so-manieth step."""

_REST = 16
"""Steps for which it is left alone."""


@dataclass
class Record:
    """What happened to one source: steps on which it raised or talked nonsense, steps on which it was late, seconds it took."""

    errors: int = 0
    late: int = 0
    seconds: float = 0.0


class Panel:
    """The sources of one request, in the order of `labels`.

    `deadline` is in seconds for each step. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        request: DraftRequest,
        vocab_size: int,
        *,
        deadline: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.problems: list[str] = []
        self._deadline = deadline
        self._clock = clock
        self._num_judged = 0
        self._seats: list[_Seat] = []
        for drafter in drafters:
            try:
                begun = drafter.begin(request)
            except Exception as error:
                log.warning("source %s failed to begin: %r", drafter.name, error)
                self.problems.append(f"source {drafter.name} failed to begin and was left out")
                continue
            for label, drafting in begun:
                self._seats.append(_Seat(label, drafting, vocab_size, clock, drafter.blocking))
        for extra in self._seats[MAX_SOURCES:]:
            extra.close()
            self.problems.append(f"source {extra.label} was left out: a request has at most {MAX_SOURCES} sources")
        del self._seats[MAX_SOURCES:]

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for every source; the part before a colon is the drafter's."""
        return tuple(seat.label for seat in self._seats)

    @property
    def records(self) -> tuple[Record, ...]:
        """What happened to each source so far."""
        return tuple(seat.record for seat in self._seats)

    async def propose(self, context: Tokens, budget: int) -> list[Draft | None]:
        """A valid draft of at most `budget` nodes of every source below the end of `context` (int32 [n]); None where it was
        dropped for this step."""
        end = self._clock() + self._deadline
        asked = {i: seat.ask(context, budget) for i, seat in enumerate(self._seats) if seat.blocking}
        drafts = [None if seat.blocking else seat.propose(context, budget, end) for seat in self._seats]
        if waiting := [asyncio.wrap_future(future) for future in asked.values() if future is not None]:
            await asyncio.wait(waiting, timeout=max(0.0, end - self._clock()))
        for i, future in asked.items():
            drafts[i] = self._seats[i].collect(future)
        return drafts

    def lookahead(self, num_rows: int, curve: CostCurve) -> LookaheadRows:
        """The rows that a source wants beside a tree of `num_rows`: those of the first that wants some, since the feedback
        has one such part. A blocking source is not asked."""
        for seat in self._seats:
            if len(rows := seat.lookahead(num_rows, curve)):
                return rows
        return LookaheadRows.none()

    def reward(self, reached: Sequence[int | None], step_seconds: float) -> None:
        """Take in how many of the emitted tokens each source's own draft held (None: not heard), and the seconds of the step.

        A source is worth the tokens that no other one had, each of them a step saved. One whose time costs more than that is
        asked now and then only, until it pays again; one at a time, so that of two that say the same one stays.
        """
        num_heard = 0
        for seat, count, own in zip(self._seats, reached, alone(reached), strict=True):
            if count is not None:
                num_heard += 1
                seat.earn(own, step_seconds)
        self._num_judged += 1
        losing = [seat for seat in self._seats if seat.loses and not seat.idle]
        if losing and self._num_judged >= _TRIAL and num_heard > 1:
            self._num_judged = 0
            max(losing, key=lambda seat: seat.loss).idle = True

    def accept(self, tokens: Tokens, feedback: Feedback) -> None:
        """Tell every source what was emitted."""
        for seat in self._seats:
            seat.accept(tokens, feedback)

    def close(self) -> None:
        """Close every source, whatever one of them does."""
        for seat in self._seats:
            seat.close()

    def __enter__(self) -> Panel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_PATIENT = 10
"""The priority of a blocking source's thread, as nice(1) counts: 0 is usual, 19 the lowest."""


def stand_back() -> None:
    """Give this thread a low priority, so that one that never waits takes no core from the target's passes.

    Beside a loop without end they take 1.5 times as long, with the usual priority eight times. On Linux only, where threads
    have priorities of their own; where it is not allowed, all stays as it is.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_PATIENT, os.getpriority(os.PRIO_PROCESS, thread)))


_Outcome = Draft | Exception
"""What asking a source comes to: a valid draft, or what went wrong."""


class _Seat:
    """One source and its record."""

    def __init__(self, label: str, drafting: Drafting, vocab_size: int, clock: Callable[[], float], blocking: bool) -> None:
        self.label = label
        self.blocking = blocking
        self.record = Record()
        self._drafting = drafting
        self._rows = drafting.lookahead if isinstance(drafting, Lookahead) and not blocking else None
        self._vocab_size = vocab_size
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, f"draft-{label}", stand_back) if blocking else None
        self._last_asked: Future[_Outcome] | None = None
        self._misses = 0
        self._resting = 0
        self._broken = False
        self.idle = False
        """Asked now and then only."""
        self.loss = 0.0
        """Seconds a step that asking costs beyond what it saves, lately."""
        self._num_heard = 0
        self._num_skipped = 0
        self._seconds_paid = 0.0

    @property
    def loses(self) -> bool:
        """Whether asking has cost more than it saved, over enough steps to say so."""
        return self.loss > 0 and self._num_heard >= _TRIAL

    def earn(self, num_unique: int, step_seconds: float) -> None:
        """It was heard: `num_unique` tokens nobody else had, each worth a step's seconds, for the seconds it took since."""
        spent, self._seconds_paid = self.record.seconds - self._seconds_paid, self.record.seconds
        self.loss += (spent - num_unique * step_seconds - self.loss) / min(self._num_heard + 1, _TRIAL)
        self._num_heard += 1
        if self.loss <= 0:
            self.idle = False

    def propose(self, context: Tokens, budget: int, end: float) -> Draft | None:
        """A draft on the caller's thread; one that comes after `end` is late and dropped.

        If `end` has passed already, those before it took the time: it is not asked, and it is no miss of its own.
        """
        if self._left_alone():
            return None
        if self._clock() > end:
            self.record.late += 1
            return None
        outcome = self._draft(context, budget)
        return self._judge(None if isinstance(outcome, Draft) and self._clock() > end else outcome)

    def ask(self, context: Tokens, budget: int) -> Future[_Outcome] | None:
        """Let the source's own thread begin a draft; None if it is left alone, or still busy with an older one: late again."""
        if self._left_alone():
            return None
        if self._last_asked is not None and not self._last_asked.done():
            self._judge(None)
            return None
        assert self._thread is not None
        self._last_asked = self._thread.submit(self._draft, context.copy(), budget)
        return self._last_asked

    def collect(self, asked: Future[_Outcome] | None) -> Draft | None:
        """The draft asked for in this step, if it is there."""
        if asked is None:
            return None
        return self._judge(asked.result() if asked.done() else None)

    def lookahead(self, num_rows: int, curve: CostCurve) -> LookaheadRows:
        """The rows it wants; none if it failed, or is no source of rows."""
        if self._rows is None or self._broken:
            return LookaheadRows.none()
        start = self._clock()
        try:
            rows = self._rows(num_rows, curve)
            rows.validate(self._vocab_size)
            return rows
        except Exception as error:
            self._failed(error)
            return LookaheadRows.none()
        finally:
            self.record.seconds += self._clock() - start

    def accept(self, tokens: Tokens, feedback: Feedback) -> None:
        """Pass on what was emitted; a source that fails here has lost its state and is not asked again."""
        if self._broken:
            return
        if self._thread is not None:
            self._thread.submit(self._accept, tokens, feedback)
        else:
            self._accept(tokens, feedback)

    def close(self) -> None:
        """Close the drafting, on its own thread if it has one (not waited for)."""
        if self._thread is not None:
            self._thread.submit(self._close)
            self._thread.shutdown(wait=False)
        else:
            self._close()

    def _draft(self, context: Tokens, budget: int) -> _Outcome:
        start = self._clock()
        try:
            draft = self._drafting.propose(context, budget)
            draft.validate(self._vocab_size)
            return draft
        except Exception as error:
            return error
        finally:
            self.record.seconds += self._clock() - start

    def _judge(self, outcome: _Outcome | None) -> Draft | None:
        """Count what came of asking: a draft, what went wrong, or None for nothing in time."""
        if isinstance(outcome, Draft):
            self._misses = 0
            return outcome
        if outcome is None:
            self.record.late += 1
            self._missed()
        else:
            self._failed(outcome)
        return None

    def _accept(self, tokens: Tokens, feedback: Feedback) -> None:
        try:
            self._drafting.accept(tokens.tolist(), feedback)
        except Exception as error:
            self._broken = True
            self._failed(error)

    def _close(self) -> None:
        try:
            self._drafting.close()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.record.errors += 1
        log.warning("source %s failed: %r", self.label, error)
        self._missed()

    def _missed(self) -> None:
        self._misses += 1
        if self._misses >= _MISSES:
            self._misses, self._resting = 0, _REST

    def _left_alone(self) -> bool:
        if self._resting:
            self._resting -= 1
            return True
        if self.idle:
            self._num_skipped = (self._num_skipped + 1) % _PROBE
            if self._num_skipped:
                return True
        return self._broken
