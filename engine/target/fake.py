"""A target without weights: a real language model whose logits are a hash of the row's whole path.

Because every row's logits depend on all its ancestors, a wrong parent, position or prefix changes what it says; so the contract
tests that pass here mean something. It shares the walk, the processors and the noise with every other worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from engine.drafters import Feedback
from engine.target import SequenceRequest, StepResult, TargetInfo, TargetStatus
from engine.target.batching import cut_together
from engine.target.sampling import Said, Sampler, check_request, check_step, likeliest, prompt_feedback, prompt_rows
from engine.tree import CandidateTree, CostCurve


class FakeTarget:
    """A hashed language model of `order` tokens of memory: its logits are a function of the last `order` tokens of the path.

    A small `order` makes text that repeats itself (so that drafts can be right); a large one makes it unpredictable.
    `sharpness` scales the logits. `eos_id` is an ordinary token that ends sequences. `spell` is a text the model would rather
    say: after any of its tokens it strongly favours the next.
    """

    def __init__(
        self,
        vocab_size: int = 64,
        *,
        order: int = 2,
        sharpness: float = 3.0,
        context_length: int = 1024,
        eos_id: int | None = None,
        fingerprint: str = "fake",
        curve: CostCurve | None = None,
        spell: Sequence[int] = (),
    ) -> None:
        self.info = TargetInfo(
            model="fake",
            fingerprint=fingerprint,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_ids=() if eos_id is None else (eos_id,),
            dtype="float32",
            strict=True,
        )
        self.curve = curve or CostCurve.flat()
        self.num_open = 0
        self._order = order
        self._sharpness = sharpness
        self._spell = np.asarray(spell, np.int32)

    def logits(self, path: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [V]: what the model says after `path` (int32 [n], n >= 1)."""
        seed = [int(t) for t in path[-self._order :]]
        rows = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).standard_normal(self.info.vocab_size)
        logits = (rows * self._sharpness).astype(np.float32)
        after = np.flatnonzero(self._spell[:-1] == path[-1])
        if len(after):
            logits[self._spell[after[0] + 1]] += np.float32(8.0 * self._sharpness)
        return logits

    @asynccontextmanager
    async def open(self, request: SequenceRequest) -> AsyncIterator[FakeSequence]:
        """See engine.target.Target."""
        check_request(request, self.info)
        self.num_open += 1
        try:
            yield FakeSequence(self, request)
        finally:
            self.num_open -= 1

    async def status(self) -> TargetStatus:
        """See engine.target.Target. It has no blocks, and counts nothing."""
        return TargetStatus(num_open=self.num_open)

    async def close(self) -> None:
        """Nothing to release."""


class FakeSequence:
    """A sequence of a FakeTarget: the prefix is all its state."""

    def __init__(self, target: FakeTarget, request: SequenceRequest) -> None:
        self.curve = target.curve
        self.feedback = self._read(target, request)
        self.num_reused = 0
        self._target = target
        self._request = request
        self._prefix = request.prompt.astype(np.int32)
        self._sampler = Sampler(request, target.info.vocab_size, target.info.context_length)
        self._finished = False

    async def step(self, tree: CandidateTree) -> StepResult:
        """See engine.target.TargetSequence."""
        check_step(tree, self._target.info, int(self._prefix[-1]), len(self._prefix) - 1, self._finished)
        tree = cut_together([tree], self.curve, self._target.info.max_rows)[0]
        rows = np.stack([self._target.logits(self._path(tree, node)) for node in range(len(tree))])
        result = self._sampler.step(tree, Said(rows))
        self._prefix = np.concatenate([self._prefix, result.tokens])
        self._finished = bool(result.finish)
        return result

    @staticmethod
    def _read(target: FakeTarget, request: SequenceRequest) -> Feedback:
        """What the model says along the end of the prompt."""
        prompt = request.prompt.astype(np.int32)
        rows = prompt_rows(request)
        ends = range(len(prompt) - rows, len(prompt))
        return prompt_feedback(request, [likeliest(target.logits(prompt[:end])[None], request.feedback_top_k) for end in ends])

    def _path(self, tree: CandidateTree, node: int) -> NDArray[np.int32]:
        tail: list[int] = []
        while node > 0:
            tail.append(int(tree.tokens[node]))
            node = int(tree.parents[node])
        return np.concatenate([self._prefix, np.array(tail[::-1], np.int32)])
