"""Sources kept from harming one another: late, busy, resting, failing and talking nonsense, with a clock that tests turn."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from threading import Event

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.drafters import Drafting, DraftRequest, Feedback
from engine.drafters.panel import _MISSES, _REST, Panel
from engine.tree import MAX_SOURCES, Draft
from tests.speculation import Hint, chain

VOCAB = 100
ONE = np.array([1], np.int32)


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A source that drafts the length of the context it was asked with, and notes whatever it hears.

    Every draft takes `seconds` of `clock`; a blocking one waits for a `permit` before each.
    """

    def __init__(self, name: str = "s", *, clock: Clock | None = None, seconds: float = 0.0, blocking: bool = False) -> None:
        self.name = name
        self.blocking = blocking
        self.top_k = 0
        self.seconds = seconds
        self.heard: list[str] = []
        self.permits = 0
        self._clock = clock

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """Itself."""
        return [(self.name, self)]

    def propose(self, context: NDArray[np.int32], budget: int) -> Draft:
        """Its only token tells which context it is for."""
        self.heard.append(f"propose {len(context)}")
        if self._clock is not None:
            self._clock.now += self.seconds
        if self.blocking:
            wait_for(lambda: self.permits > 0)
            self.permits -= 1
        return chain([len(context)])

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Note."""
        self.heard.append(f"accept {list(tokens)}")

    def close(self) -> None:
        """Note."""
        self.heard.append("close")


def wait_for(holds: Callable[[], bool]) -> None:
    """Return once it holds; fail if it does not within a generous time."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def panel_of(*drafters: Scripted | Hint, deadline: float = 1.0, clock: Clock | None = None) -> Panel:
    """A panel over these."""
    request = DraftRequest("default", "m", np.arange(3, dtype=np.int32))
    return Panel(drafters, request, VOCAB, deadline=deadline, clock=clock or time.perf_counter)


def propose(panel: Panel, length: int) -> list[Draft | None]:
    """Ask for drafts after a context of `length` tokens."""
    return asyncio.run(panel.propose(np.arange(length, dtype=np.int32), 16))


def says(drafts: list[Draft | None]) -> list[int | None]:
    """The length of the context that each draft is for; None where there is none."""
    return [None if draft is None else int(draft.tokens[0]) for draft in drafts]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_blocking_source_stands_back_for_the_targets_passes() -> None:
    """Its thread has a lower priority than that which asks; a quick one's, which is the same, keeps its own."""
    priorities: dict[str, int] = {}

    class Asked(Scripted):
        def propose(self, context: NDArray[np.int32], budget: int) -> Draft:
            priorities[self.name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return super().propose(context, budget)

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    blocking = Asked("b", blocking=True)
    blocking.permits = 1
    with panel_of(Asked("a"), blocking, deadline=60) as panel:
        propose(panel, 3)
    assert priorities == {"a": own, "b": max(own, 10)}, "and it never rises"


def test_drafts_come_in_the_order_of_labels() -> None:
    """One draft a source, quick or blocking, each below the present context; labels and records in the same order."""
    blocking = Scripted("b", blocking=True)
    blocking.permits = 1
    with panel_of(Scripted("a"), blocking, Scripted("c"), deadline=60) as panel:
        assert panel.labels == ("a", "b", "c")
        assert says(propose(panel, 4)) == [4, 4, 4]
        assert [record.late + record.errors for record in panel.records] == [0, 0, 0]


def test_a_late_draft_is_not_delivered_as_a_current_one() -> None:
    """A blocking source that was busy when asked is late for that step, too, even if its old draft comes in the meantime."""
    slow = Scripted(blocking=True)
    with panel_of(slow, deadline=0.0) as panel:
        assert says(propose(panel, 3)) == [None]
        slow.permits = 1  # the draft for 3 tokens arrives only now
        wait_for(lambda: slow.permits == 0)
        wait_for(panel._seats[0]._last_asked.done)  # type: ignore[union-attr]
        slow.permits = 1
        panel._deadline = 60.0
        assert says(propose(panel, 5)) == [5]
        assert panel.records[0].late == 1


def test_a_source_that_finishes_an_old_draft_during_a_step_is_late_for_it() -> None:
    """Busy when the step begins, done before it ends: what it has is for another context and is dropped."""
    slow = Scripted(blocking=True)

    class Finishing(Scripted):
        """A quick source during whose turn the slow one finishes its old draft."""

        def propose(self, context: NDArray[np.int32], budget: int) -> Draft:
            slow.permits = 1
            wait_for(panel._seats[0]._last_asked.done)  # type: ignore[union-attr]
            return super().propose(context, budget)

    quick = Finishing("q")
    with panel_of(slow, quick) as panel:
        panel._seats[0].ask(np.arange(3, dtype=np.int32), 8)
        wait_for(lambda: slow.heard == ["propose 3"])
        assert says(propose(panel, 4)) == [None, 4]
        assert panel.records[0].late == 1


def test_a_busy_source_is_skipped_and_its_accepts_wait() -> None:
    """What was emitted reaches a busy source in order, after the draft it is at, and before the next; close comes last."""
    slow = Scripted(blocking=True)
    panel = panel_of(slow, deadline=0.0)
    for length in (3, 4):
        propose(panel, length)
        panel.accept(np.array([length], np.int32), Feedback())
    assert slow.heard == ["propose 3"]
    panel.close()
    slow.permits = 1
    wait_for(lambda: "close" in slow.heard)
    assert slow.heard == ["propose 3", "accept [3]", "accept [4]", "close"]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_resting_source_is_not_late(blocking: bool) -> None:
    """After some misses in a row it is left alone for some steps: not asked, not counted; then it is asked again."""
    clock = Clock()
    source = Scripted(clock=clock, seconds=2.0, blocking=blocking)
    with panel_of(source, clock=clock, deadline=1.0) as panel:
        if blocking:
            panel._deadline = 0.0
        for length in range(_MISSES + _REST):
            assert says(propose(panel, length)) == [None]
        num_heard = 1 if blocking else _MISSES
        wait_for(lambda: len(source.heard) == num_heard)
        assert panel.records[0].late == _MISSES
        source.permits = 1
        if blocking:
            wait_for(panel._seats[0]._last_asked.done)  # type: ignore[union-attr]
            source.permits, panel._deadline, clock.now = 1, 60.0, 0.0
        source.seconds = 0.0
        assert says(propose(panel, 50)) == [50]
        assert panel.records[0].late == _MISSES


def test_misses_apart_do_not_add_up() -> None:
    """A source that is late now and then, but answers in between, is asked in every step."""
    clock = Clock()
    source = Scripted(clock=clock)
    with panel_of(source, clock=clock) as panel:
        for length in range(40):
            source.seconds = 0.0 if length % _MISSES == 0 else 2.0
            propose(panel, length)
        assert len(source.heard) == 40
        assert panel.records[0].late == 26


def test_who_comes_after_a_slow_source_is_left_out_without_blame() -> None:
    """The step's time is spent, so the next is not even asked; it is counted as late, and is never sent to rest for it."""
    clock = Clock()
    slow, quick = Scripted("slow", clock=clock, seconds=2.0), Scripted("quick")
    with panel_of(slow, quick, clock=clock) as panel:
        for length in range(_MISSES):
            assert says(propose(panel, length)) == [None, None]
        assert quick.heard == [] and panel.records[1].late == _MISSES
        assert says(propose(panel, 9)) == [None, 9]  # the slow one rests


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    "draft",
    [chain([VOCAB]), Draft.of([1], [0], [0.5]), Draft.of([1, 1], [-1, -1], [0.1, 0.1]), Draft.of([1], [-1], [2.0])],
    ids=["vocabulary", "parent", "siblings", "probability"],
)
def test_nonsense_is_an_error_not_a_draft(draft: Draft, blocking: bool) -> None:
    """A draft that breaks an invariant never reaches the session, and is counted."""
    with panel_of(Hint("n", lambda context: draft, blocking=blocking), deadline=60) as panel:
        assert propose(panel, 3) == [None]
        assert (panel.records[0].errors, panel.records[0].late) == (1, 0)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_failing_source_is_counted_and_rests(blocking: bool) -> None:
    """An exception costs the step, some in a row a rest; the others are served as ever."""
    failing = Hint("f", lambda context: chain([1]), fails_in="propose", blocking=blocking)
    with panel_of(failing, Scripted(), deadline=60) as panel:
        for length in range(1, _MISSES + 3):
            assert says(propose(panel, length)) == [None, length]
        assert [record.errors for record in panel.records] == [_MISSES, 0]


def test_a_failure_on_a_thread_leaves_nothing_to_complain_about(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio has no exception left that nobody looked at."""
    with panel_of(Hint("f", lambda context: chain([1]), fails_in="propose", blocking=True), deadline=60) as panel:
        propose(panel, 3)
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_source_that_fails_to_accept_is_not_asked_again(blocking: bool) -> None:
    """Its state is lost: whatever it said from then on would be about another text. It is still closed."""
    hint = Hint("f", lambda context: chain([1]), fails_in="accept", blocking=blocking)
    panel = panel_of(hint, deadline=60)
    assert propose(panel, 3) != [None]
    for _ in range(3):
        panel.accept(ONE, Feedback())
        wait_for(lambda: panel.records[0].errors > 0)
        assert propose(panel, 4) == [None]
    assert panel.records[0].errors == 1
    panel.close()
    wait_for(lambda: hint.num_closed == 1)


def test_a_source_that_fails_to_begin_is_named() -> None:
    """It is left out, the others begin, and the problem says which it was."""
    with panel_of(Hint("bad", lambda context: chain([1]), fails_in="begin"), Scripted("good")) as panel:
        assert panel.labels == ("good",)
        assert panel.problems == ["source bad failed to begin and was left out"]


def test_sources_beyond_the_limit_are_left_out_and_closed() -> None:
    """A node's sources are bits of one integer; whoever does not fit is closed at once and named."""
    many = [Scripted(f"s{i}") for i in range(MAX_SOURCES + 2)]
    with panel_of(*many) as panel:
        assert len(panel.labels) == MAX_SOURCES
        assert [source.heard for source in many[-2:]] == [["close"], ["close"]]
        assert panel.problems[0] == f"source s63 was left out: a request has at most {MAX_SOURCES} sources"
    assert all(source.heard == ["close"] for source in many)


def test_every_source_is_closed_once_whatever_others_do() -> None:
    """One that fails to close keeps nobody from it."""
    hints = [Hint(name, lambda context: chain([1]), fails_in="close" if name == "b" else "") for name in "abc"]
    with panel_of(*hints):
        pass
    assert [hint.num_closed for hint in hints] == [1, 1, 1]


def test_leaving_does_not_wait_for_a_source_that_hangs() -> None:
    """A stuck source holds a thread, not the request."""
    gate = Event()
    hint = Hint("stuck", lambda context: chain([1]), blocking=True, gate=gate)
    with panel_of(hint, deadline=0.0) as panel:
        propose(panel, 3)
    assert hint.num_closed == 0
    gate.set()
    wait_for(lambda: hint.num_closed == 1)


def test_a_blocking_source_reads_a_context_of_its_own() -> None:
    """The session's buffer may grow while a source on a thread still reads: it gets a copy."""
    seen: list[int] = []
    gate = Event()

    def source(context: NDArray[np.int32]) -> Draft:
        seen.extend(context.tolist())
        return chain([1])

    buffer = np.arange(3, dtype=np.int32)
    with panel_of(Hint("s", source, blocking=True, gate=gate), deadline=0.0) as panel:
        asyncio.run(panel.propose(buffer, 16))
        buffer[:] = 9
        gate.set()
        wait_for(lambda: bool(seen))
    assert seen == [0, 1, 2]


def test_seconds_are_those_of_drafting() -> None:
    """Each source's time is its own, late or not."""
    clock = Clock()
    with panel_of(Scripted("a", clock=clock, seconds=0.25), Scripted("b", clock=clock, seconds=2.0), clock=clock) as panel:
        propose(panel, 1)
        propose(panel, 2)
        assert [record.seconds for record in panel.records] == [0.5, 4.0]


# ---- what pays


def asked(panel: Panel, drafters: Sequence[Scripted], num_steps: int, reached: Sequence[int], step_seconds: float) -> list[int]:
    """How often each was asked over so many steps, in each of which they reach that far."""
    before = [len(drafter.heard) for drafter in drafters]
    for _ in range(num_steps):
        drafts = propose(panel, 4)
        heard = [None if draft is None else count for draft, count in zip(drafts, reached, strict=True)]
        panel.reward(heard, step_seconds)
    return [len(drafter.heard) - count for drafter, count in zip(drafters, before, strict=True)]


def test_a_source_that_does_not_pay_is_asked_now_and_then() -> None:
    """Where steps are cheap, the source that adds nothing is left to probes; once it adds what is worth it, it is back."""
    clock = Clock()
    useful, useless = Scripted("useful", clock=clock, seconds=1.0), Scripted("useless", clock=clock, seconds=1.0)
    with panel_of(useful, useless, deadline=60, clock=clock) as panel:
        asked(panel, [useful, useless], 100, [3, 0], step_seconds=10.0)
        assert asked(panel, [useful, useless], 64, [3, 0], step_seconds=10.0) == [64, 4]
        asked(panel, [useful, useless], 200, [3, 5], step_seconds=10.0)
        assert asked(panel, [useful, useless], 64, [3, 5], step_seconds=10.0)[1] == 64


def test_of_two_that_say_the_same_one_stays() -> None:
    """Neither adds anything to the other, so one goes; the other is then the only one, and stays."""
    clock = Clock()
    pair = [Scripted("a", clock=clock, seconds=1.0), Scripted("b", clock=clock, seconds=1.0)]
    with panel_of(*pair, deadline=60, clock=clock) as panel:
        asked(panel, pair, 300, [2, 2], step_seconds=10.0)
        assert sorted(asked(panel, pair, 64, [2, 2], step_seconds=10.0)) == [4, 64]


def test_where_steps_are_dear_every_source_pays() -> None:
    """A token in a thousand steps is worth a microsecond a step where a step takes a second."""
    clock = Clock()
    drafters = [Scripted("a", clock=clock, seconds=1.0), Scripted("b", clock=clock, seconds=1.0)]
    with panel_of(*drafters, deadline=60, clock=clock) as panel:
        assert asked(panel, drafters, 200, [3, 1], step_seconds=1e9)[0] == 200
