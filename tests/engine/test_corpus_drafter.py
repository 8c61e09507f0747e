"""The `corpus` source when its pages are on disk: a step never waits for them for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.drafters import Drafting, DraftRequest
from engine.drafters import corpus as module
from engine.drafters.corpus import CorpusDrafter
from retriever.continuations import Continuations

ANSWER = Continuations(
    np.array([7], np.int32),
    np.array([-1], np.int32),
    np.array([0.5], np.float32),
    np.array([1], np.int32),
    np.array([3], np.int32),
)


class Disk:
    """A datastore whose pages come when the test lets them."""

    def __init__(self, in_memory: bool) -> None:
        self.in_memory = in_memory
        self.pages_come = threading.Event()
        self.read_in = threading.Event()
        self.threads: list[str] = []

    def resident(self) -> bool:
        return self.in_memory

    def populate(self) -> None:
        self.read_in.wait(30)
        self.in_memory = True

    def lookup(self, context: np.ndarray, budget: int, *, seconds: float = 0.0) -> Continuations:
        self.threads.append(threading.current_thread().name)
        if not self.in_memory:
            self.pages_come.wait(30)
        return ANSWER


@pytest.fixture
def disk() -> Iterator[Disk]:
    """One that has nothing in memory."""
    disk = Disk(in_memory=False)
    yield disk
    disk.pages_come.set()
    disk.read_in.set()


def drafting(drafter: CorpusDrafter, store: Any) -> Drafting:
    """The source at work on a request that names the store."""
    [(_, drafting)] = drafter.begin(DraftRequest("default", "model", np.zeros(0, np.int32), {"code": store}))
    return drafting


CONTEXT = np.array([1, 2], np.int32)


def test_what_is_in_memory_is_asked_at_once() -> None:
    """No thread but the caller's."""
    store = Disk(in_memory=True)
    assert drafting(CorpusDrafter(), store).propose(CONTEXT, 4).tokens.tolist() == [7]
    assert store.threads == [threading.current_thread().name]


def test_a_step_goes_on_without_the_disk(disk: Disk) -> None:
    """While pages are missing there is no draft; questions do not pile up; what comes in time is used."""
    source = drafting(CorpusDrafter(), disk)
    assert len(source.propose(CONTEXT, 4)) == 0
    assert len(source.propose(CONTEXT, 4)) == 0
    assert len(disk.threads) == 1
    assert disk.threads[0].startswith("corpus")


def test_an_answer_in_time_is_used(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pages that matter are there, being cold costs a thread, not the draft."""
    monkeypatch.setattr(module, "_PATIENCE", 30.0)
    disk.pages_come.set()
    assert drafting(CorpusDrafter(), disk).propose(CONTEXT, 4).tokens.tolist() == [7]


def test_a_corpus_is_read_in(disk: Disk) -> None:
    """Once its pages are in memory, every request asks on its own thread, also those that began before."""
    drafter = CorpusDrafter()
    source, other = drafting(drafter, disk), drafting(drafter, disk)
    assert len(source.propose(CONTEXT, 4)) == 0
    disk.pages_come.set()
    disk.read_in.set()
    reading = drafter._shelves[disk]._reading  # type: ignore[index]
    assert reading is not None
    reading.result(30)
    for asked in (source, other):
        assert asked.propose(CONTEXT, 4).tokens.tolist() == [7]
        assert disk.threads[-1] == threading.current_thread().name


def test_pages_that_were_dropped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that was slow makes the source look where the pages are."""
    store = Disk(in_memory=True)
    source = drafting(CorpusDrafter(), store)
    monkeypatch.setattr(module, "_SLOW", -1.0)
    assert len(source.propose(CONTEXT, 4)) == 1
    store.in_memory = False
    store.pages_come.set()
    assert len(source.propose(CONTEXT, 4)) == 1
    store.pages_come.clear()
    assert len(source.propose(CONTEXT, 4)) == 0
    store.pages_come.set()
    store.read_in.set()
