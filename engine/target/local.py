"""The target in this process: a transformers model, its KV storage, and the batcher that packs its sequences.

For tests, scripts and benchmarks where no other Python runs during a pass; `draftloom serve` starts it as a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine import kernels as core_kernels
from engine.acceptance import walk
from engine.drafters import Feedback
from engine.errors import Exhausted
from engine.target import SequenceRequest, StepResult, TargetInfo
from engine.target.attention import Part, Pass
from engine.target.batching import Batcher, CostMeter, Work, cut_together
from engine.target.cache import KVStorage, KVTable
from engine.target.model import Model, load
from engine.target.sampling import Sampler, check_request, feedback, likeliest, prompt_feedback, prompt_rows
from engine.tree import CandidateTree, CostCurve

_CHUNK = 256
"""Prompt tokens read in one pass."""

_CURVE_EVERY = 16
"""Passes between two messages about the cost curve."""

_MEASURE_CONTEXT = 512
"""Tokens of context at which the first cost curve is measured."""


class LocalTarget:
    """A worker around a `Model`.

    `kv_memory` bounds keys and values in bytes. `max_rows` bounds one pass beside a chunk. The cost curve is measured at start
    (about 40 passes) unless `curve` fixes it.
    """

    def __init__(
        self,
        model: Model,
        name: str = "local",
        fingerprint: str = "",
        *,
        kv_memory: int = 2 << 30,
        max_rows: int = 64,
        curve: CostCurve | None = None,
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
        self.storage = KVStorage(model.num_layers, model.kv_heads, model.head_dim, kv_memory)
        self.meter = CostMeter()
        self._model = model
        self._batcher: Batcher[LocalSequence, StepResult | None] = Batcher(self._run)
        self._num_passes = 0
        core_kernels.warmup()
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
    ) -> LocalTarget:
        """Resolve a model name (see engine.models) and load it; dtype "auto" is int8. Raises ModelError."""
        from engine.models import resolve
        from engine.text import Tokenizer

        if threads:
            torch.set_num_threads(threads)
        folder = Path(resolve(model))
        fingerprint = Tokenizer.load(folder).fingerprint
        return cls(load(folder, "int8" if dtype == "auto" else dtype), model, fingerprint, kv_memory=kv_memory, curve=curve)

    @property
    def curve(self) -> CostCurve:
        """Seconds a pass takes, as now known."""
        return self.meter.curve()

    @asynccontextmanager
    async def open(self, request: SequenceRequest) -> AsyncIterator[LocalSequence]:
        """See engine.target.Target."""
        check_request(request, self.info)
        most = min(len(request.prompt) + request.limits.max_tokens, self.info.context_length) + self.info.max_rows
        if not self.storage.fits(most):
            raise Exhausted(
                f"prompt and answer of up to {most} positions exceed the worker's KV memory: raise kv_memory or ask for less"
            )
        sequence = LocalSequence(self, request)
        try:
            prompt = request.prompt[:-1]
            for start in range(0, len(prompt), _CHUNK):
                await self._batcher.submit(sequence, chunk=prompt[start : start + _CHUNK])
            self._batcher.num_stepping += 1
            try:
                yield sequence
            finally:
                self._batcher.num_stepping -= 1
        finally:
            sequence.table.close()

    async def close(self) -> None:
        """Nothing to release; storage goes with the object."""

    async def verify(self, sequence: LocalSequence, tree: CandidateTree) -> StepResult:
        """One step of one sequence, in whatever pass it fits."""
        result = await self._batcher.submit(sequence, tree=tree)
        assert result is not None
        return result

    def _run(self, works: list[Work[LocalSequence, StepResult | None]]) -> list[StepResult | Exception | None]:
        """One pass. A tree is cut to the KV memory left; a sequence without room for its root gets the error alone."""
        start = time.perf_counter()
        chunk_rows = sum(len(work.chunk) for work in works if work.chunk is not None)
        cut = iter(
            cut_together(
                [work.tree for work in works if work.tree is not None],
                self.curve,
                self.info.max_rows + chunk_rows,
                chunk_rows,
                self.meter.explores(),
            )
        )
        answers: list[StepResult | Exception | None] = [None] * len(works)
        packed: list[_Packed] = []
        for i, work in enumerate(works):
            if work.chunk is not None:
                rows = _Packed.of_chunk(i, work.chunk, work.owner.num_heard(len(work.chunk)))
            else:
                rows = _Packed.of_tree(i, next(cut).cut(work.owner.table.room))
            try:
                work.owner.table.reserve(len(rows.tokens))
            except Exhausted as error:
                answers[i] = error
            else:
                packed.append(rows)
        if not packed:
            return answers
        everything = Pass(self.storage, [Part(works[rows.index].owner.table, rows.parents) for rows in packed])
        verified = np.concatenate(
            [
                everything.firsts[at] + np.arange(len(rows.tokens) - rows.num_heard, len(rows.tokens), dtype=np.int32)
                for at, rows in enumerate(packed)
            ]
        )
        all_tokens = np.concatenate([rows.tokens for rows in packed])
        logits = self._model.forward(all_tokens, everything, verified)
        seconds = time.perf_counter() - start
        if not chunk_rows:
            self.meter.observe(len(all_tokens), seconds)
        self._num_passes += 1
        curve = self.curve if self._num_passes % _CURVE_EVERY == 0 else None
        first = 0
        for rows in packed:
            owner = works[rows.index].owner
            mine = logits[first : first + rows.num_heard]
            first += rows.num_heard
            if rows.tree is None:
                owner.table.keep(np.arange(len(rows.tokens), dtype=np.int32))
                owner.hear(mine)
            else:
                try:
                    answers[rows.index] = owner.finish_step(rows.tree, mine, curve, seconds)
                except Exception as error:  # one sequence's sampling is no other's concern
                    answers[rows.index] = error
        return answers

    def _measure(self) -> None:
        """Time passes of every size on a made-up sequence."""
        table = KVTable(self.storage)
        context = min(_MEASURE_CONTEXT, self.info.context_length - max(CostMeter.ROWS))
        try:
            self._pass_of(table, context)
            table.keep(np.arange(context, dtype=np.int32))
            self.meter.calibrate(lambda rows: self._pass_of(table, rows))
        finally:
            table.close()

    def _pass_of(self, table: KVTable, num_rows: int) -> None:
        table.reserve(num_rows)
        rows = Pass(self.storage, [Part(table, np.arange(-1, num_rows - 1, dtype=np.int32))])
        self._model.forward(np.zeros(num_rows, np.int32), rows, np.arange(num_rows, dtype=np.int32))


@dataclass(frozen=True)
class _Packed:
    """The rows of wish `index` in a pass: a cut tree, or a chunk of a prompt (a chain; `tree` is None).

    The logits of the last `num_heard` are wanted: all of a tree's.
    """

    index: int
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    tree: CandidateTree | None
    num_heard: int

    @staticmethod
    def of_tree(index: int, tree: CandidateTree) -> _Packed:
        return _Packed(index, tree.tokens, tree.parents, tree, len(tree))

    @staticmethod
    def of_chunk(index: int, chunk: NDArray[np.int32], num_heard: int) -> _Packed:
        return _Packed(index, chunk, np.arange(-1, len(chunk) - 1, dtype=np.int32), None, num_heard)


class LocalSequence:
    """One open sequence: its KV table, its sampler and its last committed token."""

    def __init__(self, target: LocalTarget, request: SequenceRequest) -> None:
        self.curve = target.curve
        self.table = KVTable(target.storage)
        self._target = target
        self._request = request
        self._root = int(request.prompt[-1])
        self._sampler = Sampler(request, target.info.vocab_size, target.info.context_length)
        self._finished = False
        self._heard: list[NDArray[np.int32]] = []

    @property
    def feedback(self) -> Feedback:
        """See engine.target.TargetSequence."""
        return prompt_feedback(self._request, self._heard)

    def num_heard(self, num_rows: int) -> int:
        """Of how many rows, at the end of the next chunk of `num_rows`, the prompt's feedback needs the logits."""
        first = len(self._request.prompt) - 1 - prompt_rows(self._request)
        return min(max(self.table.length + num_rows - first, 0), num_rows)

    def hear(self, logits: NDArray[np.float32]) -> None:
        """Take in what the target said along the end of a chunk (float32 [n, vocab])."""
        if len(logits):
            self._heard.append(likeliest(logits, self._request.feedback_top_k))

    async def step(self, tree: CandidateTree) -> StepResult:
        """See engine.target.TargetSequence."""
        if self._finished:
            raise RuntimeError("the sequence has finished")
        tree.validate(self._target.info.vocab_size)
        if tree.position != self.table.length or tree.tokens[0] != self._root:
            raise ValueError(f"the root must be the last committed token, at position {self.table.length}: {tree.position}")
        tree = tree.cut(self._target.info.max_rows)
        room = self._target.info.context_length - tree.position
        return await self._target.verify(self, tree if len(tree) <= room else _shallow(tree, room))

    def finish_step(
        self, tree: CandidateTree, logits: NDArray[np.float32], curve: CostCurve | None, seconds: float
    ) -> StepResult:
        """Walk the verified tree (logits float32 [len(tree), vocab]), commit the accepted rows and answer."""
        taken = walk(
            tree,
            lambda node, emitted: self._sampler.choose(logits[node], emitted),
            self._sampler.limits,
            self._sampler.num_emitted,
        )
        nodes = np.concatenate(([0], taken.path)).astype(np.int32)
        logprobs = self._sampler.logprobs(logits[nodes], taken.tokens)
        self._sampler.commit(taken.tokens)
        self.table.keep(nodes)
        self._root = int(taken.tokens[-1])
        self._finished = bool(taken.finish)
        if curve is not None:
            self.curve = curve
        return StepResult(
            path=taken.path,
            tokens=taken.tokens,
            finish=taken.finish,
            verified=np.arange(len(tree), dtype=np.int32),
            feedback=feedback(tree, logits, self._request.feedback_top_k),
            logprobs=logprobs,
            curve=curve,
            seconds=seconds,
        )


def _shallow(tree: CandidateTree, room: int) -> CandidateTree:
    """The tree without nodes whose position would lie beyond the context (`room` positions from the root on). Prefix-closed."""
    deep = np.flatnonzero(tree.depths() >= room)
    return tree.cut(int(deep[0])) if len(deep) else tree
