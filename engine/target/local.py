"""The target in this process: a transformers model, its KV storage, and the batcher that packs its sequences.

For tests, scripts and benchmarks where no other Python runs during a pass; `draftloom serve` starts it as a process of its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine import kernels as core_kernels
from engine.drafters import Feedback
from engine.errors import Exhausted
from engine.target import SequenceRequest, StepResult, TargetInfo, TargetStatus
from engine.target.ahead import Ahead
from engine.target.attention import Part
from engine.target.batching import LATER, Admission, Batcher, CostMeter, Later, Work, cut_together
from engine.target.cache import KVTable, num_blocks
from engine.target.kernels import BLOCK
from engine.target.model import CPU, Model, choose_device, load
from engine.target.passes import KernelPasses, Passes
from engine.target.prefix import Names
from engine.target.sampling import (
    Ask,
    Choices,
    Said,
    Sampler,
    check_request,
    check_step,
    prompt_feedback,
    prompt_rows,
)
from engine.tree import CandidateTree, CostCurve

_CHUNK = 256
"""Most rows of a pass that read prompts, of all sequences together: so long do others wait at most."""

_CHUNK_BESIDE = 64
"""The same where others step: a row costs little more than in a larger pass, and their streams pause a quarter as long."""

_PATIENCE = 0.5
"""A pass waits for trees that are late, at most for this share of the last pass's time if all were late: what it costs those
that are there is then less than what a missed pass costs those that are not."""

_MOST_AHEAD = 4
"""Tokens that a sequence goes on by without being asked."""

_IDLE = 1.0
"""Seconds after which a sequence whose engine sends nothing may lose its memory to any other."""

_CURVE_EVERY = 16
"""Passes between two messages about the cost curve."""

_MEASURE_CONTEXTS = (64, 2048)
"""Tokens of context at which the first cost curve is measured, and at which what context costs."""


class LocalTarget:
    """A worker around a `Model`.

    `kv_memory` bounds keys and values in bytes; `passes` makes what runs passes within it, by default what fits the place of
    the weights. `max_rows` bounds one pass beside what is read. At most `max_sequences` are
    open at a time, `max_waiting` wait for their turn. The cost curve is measured at start unless `curve` fixes it.

    Where memory runs out, who came first goes first: the sequence that came last gives up its blocks and reads its tokens again
    when there is room. A sequence that has all others behind it always finds room, so everybody gets to the end.
    """

    def __init__(
        self,
        model: Model,
        name: str = "local",
        fingerprint: str = "",
        *,
        kv_memory: int = 2 << 30,
        max_rows: int = 64,
        max_sequences: int = 64,
        max_waiting: int = 256,
        curve: CostCurve | None = None,
        passes: Callable[[Model, int], Passes] | None = None,
    ) -> None:
        self.info = TargetInfo(
            model=name,
            fingerprint=fingerprint,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_ids=model.eos_ids,
            dtype=model.dtype,
            strict=model.strict,
            max_rows=max_rows,
        )
        self._passes = (passes or _passes_for(model))(model, kv_memory)
        self.storage = self._passes.storage
        self.meter = CostMeter()
        self.counts = Counts()
        self._model = model
        self._batcher: Batcher[LocalSequence, Verified | None] = Batcher(self._run, self._patience)
        self._admission = Admission(max_sequences, max_waiting)
        self._open: list[LocalSequence] = []
        self._num_opened = 0
        self._last_end = self._last_seconds = 0.0
        self._last_trees = self._last_rows = 0
        self._secret = secrets.token_bytes(32)
        core_kernels.warmup()
        self._passes.warm_up()
        if curve is not None:
            self.meter.freeze(curve)
        else:
            self._measure()

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "int8",
        threads: int | None = None,
        kv_memory: int = 2 << 30,
        curve: CostCurve | None = None,
        device: str = "auto",
    ) -> LocalTarget:
        """Resolve a model name (see engine.models) and load it, as `model.choose_device` decides.

        Raises ModelError, and Exhausted where `kv_memory` does not fit.
        """
        from engine.models import resolve
        from engine.text import Tokenizer

        if threads:
            torch.set_num_threads(threads)
        where, dtype = choose_device(device, dtype)
        folder = Path(resolve(model))
        fingerprint = Tokenizer.load(folder).fingerprint
        loaded = load(folder, dtype)
        if where != CPU:
            loaded.move(where)
        return cls(loaded, model, fingerprint, kv_memory=kv_memory, curve=curve)

    @property
    def curve(self) -> CostCurve:
        """Seconds a pass over one short sequence takes, as now known."""
        return self.meter.curve()

    def curve_for(self, num_positions: int) -> CostCurve:
        """What rows cost a sequence that comes to those of the last pass."""
        if not self._open:
            return self.meter.share(num_positions, 1, 0)
        return self.meter.share(num_positions, self._last_trees + 1, self._last_rows)

    @asynccontextmanager
    async def open(self, request: SequenceRequest) -> AsyncIterator[LocalSequence]:
        """See engine.target.Target."""
        check_request(request, self.info)
        most = (
            min(len(request.prompt) - request.num_emitted + request.limits.max_tokens, self.info.context_length)
            + self.info.max_rows
        )
        if not self.storage.fits(most):
            raise Exhausted(
                f"prompt and answer of up to {most} positions exceed the worker's KV memory: raise kv_memory or ask for less"
            )
        await self._admission.enter()
        try:
            sequence = LocalSequence(self, request)
            self._open.append(sequence)
            try:
                await self._read(sequence)
                sequence.is_open = sequence.is_expected = True
                yield sequence
            finally:
                self._open.remove(sequence)
                sequence.table.close()
        finally:
            self._admission.leave()
            self._batcher.wake()

    async def status(self) -> TargetStatus:
        """See engine.target.Target."""
        return TargetStatus(
            num_open=len(self._open),
            num_waiting=self._admission.num_waiting,
            num_blocks=self.storage.num_blocks,
            num_blocks_used=self.storage.num_blocks - self.storage.num_free,
            num_passes=self.counts.num_passes,
            num_read=self.counts.num_read,
            num_reused=self.counts.num_reused,
            num_preempted=self.counts.num_preempted,
        )

    async def close(self) -> None:
        """Nothing to release; storage goes with the object."""

    def check(self) -> None:
        """Raise AssertionError unless all blocks of KV memory are accounted for by the open sequences."""
        self.storage.check(sequence.table for sequence in self._open)

    def next_number(self) -> int:
        """The place of a sequence that comes in the order of all that have come."""
        self._num_opened += 1
        return self._num_opened

    def names_for(self, tenant: str) -> Names:
        """What names a tenant's blocks."""
        return Names(tenant, self._secret)

    async def verify(self, sequence: LocalSequence, tree: CandidateTree) -> StepResult:
        """One step of one sequence, in whatever pass it fits.

        Everybody walks for himself once the pass is done, so that a first answer is on its way while others are walked.
        """
        while (verified := await self._batcher.submit(sequence, tree)) is None:
            await self._read(sequence)
        return sequence.finish_step(verified)

    async def _read(self, sequence: LocalSequence) -> None:
        """Bring a sequence's tokens into its table, all but the last one, which is the root of its next tree."""
        while sequence.num_missing:
            await self._batcher.submit(sequence)

    def _patience(self, works: list[Work[LocalSequence, Verified | None]]) -> float:
        """How many seconds a pass of `works` should wait for others' trees."""
        there = {work.owner for work in works}
        num_late = sum(owner.is_expected for owner in self._open if owner not in there)
        return _PATIENCE * self._last_seconds * num_late / max(num_late + len(there), 1)

    def _run(self, works: list[Work[LocalSequence, Verified | None]]) -> list[Verified | Exception | Later | None]:
        """One pass. A tree is cut to what pays and to the KV memory left; who finds no memory for a root waits.

        Sequences that sent no tree in time step by their roots alone, and keep the token until they are asked.

        A tree whose sequence lost its memory gets None, as does a wish to read on: the sequence knows how far it is.
        """
        start = time.perf_counter()
        answers: list[Verified | Exception | Later | None] = [LATER] * len(works)
        ready = self._find_room(works, answers)
        if not ready:
            return answers
        packed = self._pack(works, ready)
        all_tokens = np.concatenate([rows.tokens for rows in packed])
        parts = [Part(rows.owner.table, rows.parents) for rows in packed]
        said = self._passes.run(all_tokens, parts, [rows.ask for rows in packed])
        end = time.perf_counter()
        if start - self._last_end < self._last_seconds:  # else nobody was there
            self.meter.observe_between(start - self._last_end)
        self._last_end, self._last_seconds = end, end - start
        seconds = self._last_seconds
        trees = [rows for rows in packed if rows.tree is not None]
        self._last_trees, self._last_rows = len(trees), sum(len(rows.tokens) for rows in trees)
        num_read = len(all_tokens) - self._last_rows
        if not num_read:
            context = sum(len(rows.tokens) * rows.owner.table.length for rows in trees) / len(all_tokens)
            self.meter.observe(len(all_tokens), seconds, context, len(trees))
        self.counts.num_passes += 1
        self.counts.num_read += num_read
        tells = self.counts.num_passes % _CURVE_EVERY == 0
        for rows, mine in zip(packed, said, strict=True):
            if rows.index < 0:
                assert rows.tree is not None
                self.counts.num_unasked += 1
                rows.owner.go_ahead(rows.tree, mine)
                continue
            if rows.tree is None:
                rows.owner.finish_chunk(len(rows.tokens), rows.ask, mine)
                answers[rows.index] = None
            else:
                others = self._last_rows - len(rows.tokens)
                curve = self.meter.share(rows.owner.table.length, len(trees), others) if tells else None
                answers[rows.index] = Verified(rows.tree, mine, curve, seconds)
        return answers

    def _find_room(
        self, works: list[Work[LocalSequence, Verified | None]], answers: list[Verified | Exception | Later | None]
    ) -> list[int]:
        """Reserve memory, for trees a root's, for what is to be read all of it; who came first is asked first.

        Returns which works may be in the pass, rising. While one waits to begin reading, none that came later begins.
        """
        busy = {work.owner for work in works}
        ready, waits = list[int](), False
        for i in sorted(range(len(works)), key=lambda i: works[i].owner.number):
            owner, reads = works[i].owner, works[i].tree is None
            if reads and owner.num_missing:
                if waits and not owner.table.length:
                    continue
                self.counts.num_reused += owner.share()
            if reads != (owner.num_missing > 0):  # it has read to the end, or lost what it had read
                answers[i] = None
            elif self._make_room(owner, owner.num_missing + 1, busy):
                owner.table.reserve(owner.num_missing + 1)
                ready.append(i)
            else:
                waits = waits or reads
        return sorted(ready)

    def _make_room(self, owner: LocalSequence, num_rows: int, busy: set[LocalSequence]) -> bool:
        """Whether `owner` can have so many rows. If need be others lose theirs: who came later, last first, and the idle."""
        missing = num_blocks(owner.table.length + num_rows) - len(owner.table.blocks)
        if missing <= self.storage.num_free:
            return True
        idle = time.monotonic() - _IDLE
        victims = [
            other
            for other in self._open
            if other is not owner
            and len(other.table.blocks)
            and (other.number > owner.number or (other not in busy and other.last_active < idle))
        ]
        if self.storage.num_free + sum(len(other.table.blocks) for other in victims) < missing:
            return False
        for victim in sorted(victims, key=lambda other: -other.number):
            self.preempt(victim)
            if missing <= self.storage.num_free:
                return True
        return False

    def preempt(self, sequence: LocalSequence) -> None:
        """Take all its memory from a sequence; it reads its tokens again when it goes on."""
        sequence.table.close()
        self.counts.num_preempted += 1

    def _pack(self, works: list[Work[LocalSequence, Verified | None]], ready: list[int]) -> list[_Packed]:
        """The rows of a pass: a part of every text to be read, in turn, and all trees, cut together, with the roots of those
        that have not been asked to step. Nobody loses memory for these."""
        trees = [(i, works[i].owner, tree) for i in ready if (tree := works[i].tree) is not None]
        asked = {work.owner for work in works}
        for owner in self._open:
            if owner not in asked:
                owner.is_expected = False
                if owner.may_go_ahead and owner.table.room:
                    owner.table.reserve(1)
                    trees.append((-1, owner, owner.root))
        chunks, num_read, most = list[_Packed](), 0, _CHUNK_BESIDE if trees else _CHUNK
        for i in ready:
            if works[i].tree is None and num_read < most:
                tokens = works[i].owner.next_chunk(most - num_read)
                num_read += len(tokens)
                chunks.append(_Packed.of_chunk(i, works[i].owner, tokens))
        most = self.info.max_rows + num_read
        context = sum(owner.table.length for _, owner, _ in trees) / max(len(trees), 1)
        curve = self.meter.curve(context, len(trees) + len(chunks))
        cut = cut_together([tree for _, _, tree in trees], curve, most, num_read, self.meter.explores())
        packed = list[_Packed]()
        for (i, owner, _), tree in zip(trees, cut, strict=True):
            fitting = tree.cut(owner.table.room)
            owner.table.reserve(len(fitting))
            packed.append(_Packed.of_tree(i, owner, fitting))
        return packed + chunks

    def _measure(self) -> None:
        """Time passes of every size on a made-up sequence, and a few on a long one, if there is room for it."""
        short, long = _MEASURE_CONTEXTS
        most = min(self.storage.num_blocks * BLOCK, self.info.context_length) - max(CostMeter.ROWS)
        with self._made_up(min(short, most)) as table:
            self.meter.calibrate(lambda rows: self._pass_of(table, rows))
        if most >= 2 * short:
            with self._made_up(min(long, most)) as table:
                self.meter.calibrate_context(lambda rows: self._pass_of(table, rows), short, table.length)

    @contextmanager
    def _made_up(self, num_positions: int) -> Iterator[KVTable]:
        """A sequence that was never read."""
        table = KVTable(self.storage)
        table.reserve(num_positions)
        self.storage.make_up(table.blocks)
        table.keep(np.arange(num_positions, dtype=np.int32))
        try:
            yield table
        finally:
            table.close()

    def _pass_of(self, table: KVTable, num_rows: int) -> None:
        table.reserve(num_rows)
        rows = Part(table, np.arange(-1, num_rows - 1, dtype=np.int32))
        self._passes.run(np.zeros(num_rows, np.int32), [rows], [Ask(num_rows, 0, partial(Choices.likeliest, num_rows))])


def _passes_for(model: Model) -> Callable[[Model, int], Passes]:
    """What runs passes where the weights lie."""
    if model.device == CPU:
        return KernelPasses
    from engine.target.cuda import DevicePasses

    return DevicePasses


@dataclass
class Counts:
    """What a worker has done so far: passes, tokens read and tokens whose keys and values were there already, preemptions, and
    steps that nobody had asked for."""

    num_passes: int = 0
    num_read: int = 0
    num_reused: int = 0
    num_preempted: int = 0
    num_unasked: int = 0


@dataclass(frozen=True)
class Verified:
    """What a pass of so many `seconds` said about `tree`, which is to be walked before the next begins."""

    tree: CandidateTree
    said: Said
    curve: CostCurve | None
    seconds: float


@dataclass(frozen=True)
class _Packed:
    """The rows of wish `index` in a pass: a cut tree, or a chunk of a prompt (a chain; `tree` is None).

    `ask` is about the last of them: all of a tree's. An `index` of -1 is nobody's wish.
    """

    index: int
    owner: LocalSequence
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    tree: CandidateTree | None
    ask: Ask

    @staticmethod
    def of_tree(index: int, owner: LocalSequence, tree: CandidateTree) -> _Packed:
        return _Packed(index, owner, tree.tokens, tree.parents, tree, owner.ask(tree))

    @staticmethod
    def of_chunk(index: int, owner: LocalSequence, chunk: NDArray[np.int32]) -> _Packed:
        parents = np.arange(-1, len(chunk) - 1, dtype=np.int32)
        return _Packed(index, owner, chunk, parents, None, owner.ask_of_chunk(len(chunk)))


class LocalSequence:
    """One open sequence: its tokens, its KV table and its sampler.

    1. The table holds all tokens but the last, the root, or, while they are being read, a first part of those.
    2. The last of the tokens, as many as there are steps in `_ahead`, are not delivered.
    """

    def __init__(self, target: LocalTarget, request: SequenceRequest) -> None:
        self.curve = target.curve_for(len(request.prompt))
        self.table = KVTable(target.storage)
        self.number = target.next_number()
        self.num_reused = 0
        self.last_active = time.monotonic()
        self.is_open = False
        """Whether it steps, its prompt being read."""
        self.is_expected = False
        """Whether its tree may soon be there: it was answered, and no pass has begun since."""
        self._target = target
        self._request = request
        self._tokens = request.prompt.astype(np.int32)
        self._names = target.names_for(request.tenant)
        self._sampler = Sampler(request, target.info.vocab_size, target.info.context_length)
        self._finished = self._failed = False
        self._ahead = Ahead()
        self._heard: list[NDArray[np.int32]] = []
        self._unheard = len(request.prompt) - 1 - prompt_rows(request)

    @property
    def feedback(self) -> Feedback:
        """See engine.target.TargetSequence."""
        return prompt_feedback(self._request, self._heard)

    @property
    def num_missing(self) -> int:
        """Tokens before the root that are not in the table."""
        return len(self._tokens) - 1 - self.table.length

    def share(self) -> int:
        """Take over what others, or this one before it lost its memory, have computed of the tokens; returns how many.

        What is not read is not heard: the feedback about the prompt begins behind it.
        """
        before = self.table.length
        found = self.table.share(self._names.of(self._tokens)[: (len(self._tokens) - 1) // BLOCK])
        self.num_reused = found + (self.num_reused if before else 0)
        end = min(self.table.length, len(self._request.prompt) - 1)
        if end > self._unheard:
            self._heard.clear()
            self._unheard = end
        return found

    def next_chunk(self, most: int) -> NDArray[np.int32]:
        """The next tokens to be read, at most so many."""
        first = self.table.length
        return self._tokens[first : min(first + most, len(self._tokens) - 1)]

    def ask_of_chunk(self, num_rows: int) -> Ask:
        """What is likely after the rows, at the end of the next chunk of `num_rows`, that the prompt's feedback is about."""
        top_k, num_heard = self._request.feedback_top_k, 0
        if self._unheard < len(self._request.prompt) - 1:
            num_heard = min(max(self.table.length + num_rows - self._unheard, 0), num_rows)
        return Ask(num_heard, top_k, partial(Choices.likeliest, num_heard))

    def finish_chunk(self, num_rows: int, ask: Ask, said: Said) -> None:
        """Commit the rows of a chunk, and take in what the target said along its end."""
        self._commit(np.arange(num_rows, dtype=np.int32))
        if ask.num_rows:
            self._heard.append(said.likeliest(ask.top_k))
            self._unheard += ask.num_rows

    def _commit(self, rows: NDArray[np.int32]) -> None:
        """Rows of the pass become positions of the sequence; whole blocks can be found by others from here on."""
        before = self.table.length // BLOCK
        self.table.keep(rows)
        self.last_active = time.monotonic()
        if self.table.length // BLOCK > before:
            self.table.publish(self._names.of(self._tokens[: self.table.length]))

    @property
    def root(self) -> CandidateTree:
        """The tree of the last token alone."""
        return CandidateTree.root_only(int(self._tokens[-1]), len(self._tokens) - 1)

    @property
    def num_ahead(self) -> int:
        """Tokens that are not delivered."""
        return len(self._ahead)

    @property
    def may_go_ahead(self) -> bool:
        """Whether it could step unasked."""
        stopped = self._finished or self._failed or self.num_missing
        return self.is_open and not stopped and self.num_ahead < _MOST_AHEAD

    def ask(self, tree: CandidateTree) -> Ask:
        """What its next step needs to know of the rows of `tree`."""
        return self._sampler.ask(tree)

    def go_ahead(self, root: CandidateTree, said: Said) -> None:
        """Commit the token after the root, and keep the step. One that fails fails again, and is told, when it is asked for."""
        try:
            self._ahead.put(self._commit_step(root, said))
        except Exception:
            self._failed = True

    async def step(self, tree: CandidateTree) -> StepResult:
        """See engine.target.TargetSequence."""
        at = len(self._tokens) - 1 - self.num_ahead
        check_step(tree, self._target.info, int(self._tokens[at]), at, self._finished and not self.num_ahead)
        tree = tree.cut(self._target.info.max_rows)
        room = self._target.info.context_length - tree.position
        followed = self._ahead.follow(tree if len(tree) <= room else _shallow(tree, room))
        if followed.rest is not None:
            return followed.answer(await self._target.verify(self, followed.rest))
        self.is_expected = not self.num_ahead and not self._finished
        return followed.answer(None)

    def finish_step(self, verified: Verified) -> StepResult:
        """Walk the verified tree, commit the accepted rows and answer."""
        result = self._commit_step(verified.tree, verified.said)
        self.is_expected = not self._finished
        if verified.curve is not None:
            self.curve = verified.curve
        return replace(result, curve=verified.curve, seconds=verified.seconds)

    def _commit_step(self, tree: CandidateTree, said: Said) -> StepResult:
        result = self._sampler.step(tree, said)
        self._tokens = np.concatenate([self._tokens, result.tokens])
        self._commit(np.concatenate(([0], result.path)).astype(np.int32))
        self._finished = bool(result.finish)
        return result


def _shallow(tree: CandidateTree, room: int) -> CandidateTree:
    """The tree without nodes whose position would lie beyond the context (`room` positions from the root on). Prefix-closed."""
    deep = np.flatnonzero(tree.depths() >= room)
    return tree.cut(int(deep[0])) if len(deep) else tree
