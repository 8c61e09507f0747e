"""Several workers as one target, each of which may come and go.

Every worker has a keeper: a task that connects, watches, and connects again when the worker is lost. A sequence is opened at
the worker with the fewest, and keeps its tokens here: when its worker is lost it is opened anew at another, or at the same one
when that is back, with all tokens so far. The noise depends on seed and position alone, so the text is what it would have been
(`==` where the model is strict). Only when nobody takes it over in time does it end, with WorkerLost.

Workers of a fleet answer alike: whoever runs another model, tokenizer, vocabulary or dtype than the first is not used.

Knows nothing of gRPC or processes: whoever makes a fleet says how to connect (`engine.target.remote`, `engine.target.process`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from engine.config import ModelSettings
from engine.drafters import Feedback
from engine.errors import ConfigError, EngineError, WorkerLost
from engine.target import SequenceRequest, StepResult, Target, TargetInfo, TargetSequence, TargetStatus
from engine.tree import CandidateTree, CostCurve

log = logging.getLogger("draftloom.fleet")

FIRST_BACKOFF, LAST_BACKOFF = 0.1, 5.0
"""Seconds between attempts to connect: doubled with each failure."""
STEADY_SECONDS = 60.0
"""A worker that lived so long failed for once; what it failed before is forgotten."""
MOST_LOSSES = 3
"""Workers that a sequence may lose in one step: more, and it is likely the sequence that ends them."""
OPEN_SECONDS = 0.8
"""How long a new sequence waits for a worker where there is none."""


@dataclass(frozen=True)
class Connected:
    """A worker one is connected to. `lost()` returns, with the reason, once it should get no new sequences; `close()` ends the
    connection."""

    target: Target
    lost: Callable[[], Awaitable[str]]
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Place:
    """Where a worker is, or will be. `connect()` raises EngineError while nobody is there.

    After `most_failures` in a row without a steady worker between them it is given up; None: never.
    """

    name: str
    connect: Callable[[], Awaitable[Connected]]
    most_failures: int | None = None


class _Member:
    """One place and, while there is one, its worker."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.worker: Connected | None = None
        self.problem = "not tried yet"
        self.num_open = 0
        self.num_failures = 0
        self.given_up = False


class Fleet:
    """See above. `patience`: seconds that a sequence which has begun waits for a worker to take it over."""

    def __init__(self, places: Sequence[Place], *, patience: float = ModelSettings.worker_patience) -> None:
        self._members = [_Member(place) for place in places]
        self._patience = patience
        self._info: TargetInfo | None = None
        self._started = False
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> TargetInfo:
        """What the first worker said that answered. Raises WorkerLost before."""
        if self._info is None:
            raise WorkerLost(f"no worker has answered yet: {self._problems()}")
        return self._info

    @property
    def num_ready(self) -> int:
        """Workers that take new sequences."""
        return sum(member.worker is not None for member in self._members)

    @property
    def given_up(self) -> bool:
        """Whether nobody is there, and nobody will be."""
        return all(member.given_up for member in self._members)

    async def start(self, timeout: float = 30.0) -> None:
        """Connect; returns once every place has been tried and a worker is there.

        Raises ConfigError for a worker that differs from the others, WorkerLost if none answers in time, and what a place was
        given up for. Call `close` afterwards in any case.
        """
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self._members]
        tried = "not tried yet"
        deadline = time.monotonic() + timeout
        while not self.num_ready or any(member.worker is None and member.problem == tried for member in self._members):
            for keeper in self._keepers:
                if keeper.done():
                    keeper.result()
            if not await self._news(deadline):
                break
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
        if not self.num_ready:
            raise WorkerLost(f"no worker answers within {timeout:g} s: {self._problems()}; is it running?")
        self._started = True
        for member in self._members:
            if member.problem:
                log.warning("worker at %s: %s", member.place.name, member.problem)

    async def watch(self) -> AsyncIterator[bool]:
        """Whether any worker takes sequences, as soon as that changes, beginning with how it is; ends when all are given up."""
        said: bool | None = None
        while True:
            ready = self.num_ready > 0
            if ready != said:
                said = ready
                yield ready
            if self.given_up:
                return
            await self._news(None)

    @asynccontextmanager
    async def open(self, request: SequenceRequest) -> AsyncIterator[FleetSequence]:
        """See engine.target.Target. Raises WorkerLost if there is no worker within a second."""
        sequence = FleetSequence(self, request)
        async with sequence.held:
            await self.place(sequence, OPEN_SECONDS)
            yield sequence

    async def status(self) -> TargetStatus:
        """All workers together, without those that do not answer."""
        workers = [member.worker.target for member in self._members if member.worker is not None]
        answers = await asyncio.gather(*(worker.status() for worker in workers), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineError):
                raise answer
        return TargetStatus.together(answer for answer in answers if isinstance(answer, TargetStatus))

    async def place(self, sequence: FleetSequence, patience: float) -> None:
        """Open `sequence` at the worker with the fewest. Raises WorkerLost if none has taken it after `patience` seconds."""
        deadline = time.monotonic() + patience
        problem = ""
        failed: list[Connected] = []
        while True:
            ready = [m for m in self._members if m.worker is not None and m.worker not in failed]
            if ready:
                member = min(ready, key=lambda each: each.num_open)
                assert member.worker is not None
                worker = member.worker
                try:
                    await sequence.enter(self._at(member, worker, sequence.request()))
                    return
                except WorkerLost as error:
                    failed.append(worker)
                    problem = f"{member.place.name}: {error}"
            elif self.given_up or not await self._news(deadline):
                raise WorkerLost(f"no worker is there: {problem or self._problems()}")

    async def resume(self, sequence: FleetSequence, error: WorkerLost) -> None:
        """Have another worker, or the same one when it is back, go on with `sequence`."""
        log.warning("a sequence has lost its worker after %d tokens: %s", sequence.num_emitted, error)
        await self.place(sequence, self._patience)

    async def close(self) -> None:
        """End all connections; sequences still open raise WorkerLost."""
        for task in (*self._keepers, *self._retiring):
            task.cancel()
        await asyncio.gather(*self._keepers, *self._retiring, return_exceptions=True)
        for member in self._members:
            worker, member.worker, member.given_up = member.worker, None, True
            if worker is not None:
                await worker.close()
        self._tell()

    @asynccontextmanager
    async def _at(self, member: _Member, worker: Connected, request: SequenceRequest) -> AsyncIterator[TargetSequence]:
        member.num_open += 1
        try:
            async with worker.target.open(request) as inner:
                yield inner
        finally:
            member.num_open -= 1
            self._tell()

    async def _keep(self, member: _Member) -> None:
        """Have a worker at the member's place for ever, or until it is given up."""
        place = member.place
        while True:
            try:
                worker = await place.connect()
                try:
                    self._check(place, worker.target.info)
                except EngineError:
                    await worker.close()
                    raise
            except EngineError as error:
                await self._failed(member, error)
                continue
            began = time.monotonic()
            member.worker, member.problem = worker, ""
            if self._started:
                log.info("worker at %s is there", place.name)
            self._tell()
            reason = await worker.lost()
            member.worker = None
            retiring = asyncio.create_task(self._retire(member, worker))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            if time.monotonic() - began > STEADY_SECONDS:
                member.num_failures = 0
            await self._failed(member, WorkerLost(reason))

    async def _failed(self, member: _Member, error: EngineError) -> None:
        """Wait before the next attempt. Raises `error` where there is to be none: given up, or wrong from the start."""
        member.num_failures += 1
        if self._started and member.problem != str(error):
            log.warning("worker at %s: %s", member.place.name, error)
        member.problem = str(error)
        most = member.place.most_failures
        wrong_at_start = isinstance(error, ConfigError) and member.num_failures == 1
        if wrong_at_start or (most is not None and member.num_failures >= most):
            member.given_up = True
            self._tell()
            if self._started:
                log.error("worker at %s is given up", member.place.name)
            raise error
        self._tell()
        await asyncio.sleep(min(FIRST_BACKOFF * 2 ** (member.num_failures - 1), LAST_BACKOFF))

    async def _retire(self, member: _Member, worker: Connected) -> None:
        """Close a worker that drains once its sequences are over; those of one that broke end at once."""
        try:
            while member.num_open:
                await self._news(None)
        finally:
            await worker.close()

    def _check(self, place: Place, info: TargetInfo) -> None:
        """The first worker says what all are. Raises ConfigError for one that answers otherwise, naming both."""
        if self._info is None:
            self._info = info
        for what in ("model", "fingerprint", "vocab_size", "context_length", "eos_ids", "dtype", "strict"):
            here, there = getattr(info, what), getattr(self._info, what)
            if here != there:
                raise ConfigError(
                    f"the worker at {place.name} answers otherwise than the others: its {what} is {here}, theirs {there}; "
                    "let all run the same model, or leave it out"
                )

    def _problems(self) -> str:
        return "; ".join(f"{member.place.name}: {member.problem}" for member in self._members)

    def _tell(self) -> None:
        """Wake up whoever waits for news."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self, deadline: float | None) -> bool:
        """Wait until something changes; False if that takes until `deadline` (of the monotonic clock)."""
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


class FleetSequence:
    """A sequence that outlives its worker."""

    def __init__(self, fleet: Fleet, request: SequenceRequest) -> None:
        self.held = AsyncExitStack()
        """What is open for it at its present worker."""
        self.feedback = Feedback()
        self.num_reused = 0
        self._fleet = fleet
        self._request = request
        self._tokens = [request.prompt]
        self._inner: TargetSequence | None = None
        self._curve = CostCurve.flat()
        self._finished = False
        self._num_losses = 0

    @property
    def curve(self) -> CostCurve:
        """See engine.target.TargetSequence."""
        return self._inner.curve if self._inner is not None else self._curve

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return self._request.num_emitted + sum(len(tokens) for tokens in self._tokens[1:])

    def request(self) -> SequenceRequest:
        """What a worker is asked that begins here, or goes on here."""
        if len(self._tokens) == 1:
            return self._request
        return replace(self._request, prompt=np.concatenate(self._tokens), num_emitted=self.num_emitted, feedback_prompt=0)

    async def enter(self, opening: AbstractAsyncContextManager[TargetSequence]) -> None:
        """Open at a worker."""
        self._inner = await self.held.enter_async_context(opening)
        if len(self._tokens) == 1:
            self.feedback, self.num_reused = self._inner.feedback, self._inner.num_reused

    async def step(self, tree: CandidateTree) -> StepResult:
        """See engine.target.TargetSequence. A step that a lost worker may have done is done again, with the same outcome."""
        if self._finished:
            raise RuntimeError("the sequence has finished")
        while True:
            assert self._inner is not None
            try:
                result = await self._inner.step(tree)
            except WorkerLost as error:
                await self._leave(error)
                self._num_losses += 1
                if self._num_losses > MOST_LOSSES:
                    raise WorkerLost(f"{self._num_losses} workers were lost in one step of this sequence: {error}") from None
                await self._fleet.resume(self, error)
                continue
            self._num_losses = 0
            self._tokens.append(result.tokens)
            self._finished = bool(result.finish)
            return result

    async def _leave(self, error: WorkerLost) -> None:
        """Let go of what the lost worker held."""
        self._curve, self._inner = self.curve, None
        stack = self.held.pop_all()
        try:
            await stack.__aexit__(type(error), error, error.__traceback__)
        except WorkerLost:
            return
