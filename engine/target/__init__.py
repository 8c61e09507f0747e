"""The target: given a tree, what would the model have said? One worker interface, five implementations.

    local.py   a transformers model in this process (torch)
    remote.py  the same interface over gRPC, to `server.py` in another process
    fleet.py   several workers as one, each of which may come and go
    fake.py    a real, hashed language model without weights, for tests and for trying the engine without torch

Importing this module needs numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.acceptance import Limits, SamplingParams
from engine.drafters import Feedback
from engine.tree import CandidateTree, CostCurve


@dataclass(frozen=True)
class TargetInfo:
    """What a worker says about its model.

    1. `fingerprint` is the tokenizer's (engine.text), equal for equal tokenizers.
    2. `vocab_size` is the width of the logits: every token id is below it.
    3. `context_length` bounds prompt and answer together.
    4. `strict`: a row's logits do not depend on its neighbours, bit for bit (DESIGN 7).
    """

    model: str
    fingerprint: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    dtype: str
    strict: bool
    max_rows: int = 64
    """Most rows (nodes with the root) of one tree."""


@dataclass(frozen=True)
class TargetStatus:
    """How workers stand, and what they have done since they were started, for all tenants.

    1. `num_open` sequences are open, `num_waiting` wait for their turn.
    2. `num_blocks_used` of `num_blocks` blocks of keys and values are held by open sequences; 0 of 0 where there are none.
    3. `num_passes`; `num_read` tokens of prompts that were read, `num_reused` that needed no reading, `num_preempted` times
       that a sequence lost its blocks, after which it reads, and counts, its tokens again.
    """

    num_workers: int = 1
    num_open: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_passes: int = 0
    num_read: int = 0
    num_reused: int = 0
    num_preempted: int = 0

    @staticmethod
    def together(all_of_them: Iterable[TargetStatus]) -> TargetStatus:
        """Sums; all zeros for nobody."""
        rows = [astuple(each) for each in all_of_them]
        return TargetStatus(*(sum(column) for column in zip(*rows, strict=True))) if rows else TargetStatus(0)


@dataclass(frozen=True)
class SequenceRequest:
    """All a worker needs to decode one sequence.

    1. `prompt` is int32 [n], n >= 1, all ids within the vocabulary.
    2. `num_logprobs`: -1 none, 0 the emitted token's only, k the k likeliest beside it.
    3. `feedback_top_k`: how many likeliest next tokens to return for every verified node; 0 none.
    4. `feedback_prompt`: for how many rows at the end of the prompt (its last token, the first root, left out) to return them
       when the sequence is opened; there are fewer where the worker need not read them. Each costs its part of the product with
       the output matrix; 0 none.
    5. `num_emitted` < n: so many tokens at the end of `prompt` are the answer's first, emitted by a worker that was lost.
       Limits, noise and penalties count them as that worker did, so that the answer goes on as it would have.
    """

    prompt: NDArray[np.int32]
    sampling: SamplingParams
    limits: Limits
    tenant: str
    num_logprobs: int = -1
    feedback_top_k: int = 0
    feedback_prompt: int = 0
    num_emitted: int = 0


@dataclass(frozen=True)
class Logprobs:
    """Log-softmax of the raw logits, in float64, for each emitted token.

    `chosen` float64 [n]; `top_ids` int32 [n, k] and `top` float64 [n, k], the k likeliest, best first (ties: lowest id first).
    """

    chosen: NDArray[np.float64]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float64]


@dataclass(frozen=True)
class StepResult:
    """What one verification gave.

    1. `path` int32 [a]: the accepted nodes, from the root's child down; `tokens` int32 [a + 1]: their tokens and the bonus
    token.
    2. `finish` is "" while the sequence may go on, else "stop" or "length" (see `engine.acceptance`).
    3. `verified` int32 [m]: the nodes that had a row in the pass (the worker may cut), the root among them.
    4. `curve` is the worker's newest cost curve, None when it has not changed.
    5. `seconds`: how long the pass took, on the worker.
    """

    path: NDArray[np.int32]
    tokens: NDArray[np.int32]
    finish: str
    verified: NDArray[np.int32]
    feedback: Feedback = field(default_factory=Feedback)
    logprobs: Logprobs | None = None
    curve: CostCurve | None = None
    seconds: float = 0.0


class TargetSequence(Protocol):
    """One sequence open on a worker."""

    @property
    def curve(self) -> CostCurve:
        """The last cost curve seen."""
        ...

    @property
    def feedback(self) -> Feedback:
        """What the target said along the end of the prompt, at most `feedback_prompt` rows; empty if nobody asked."""
        ...

    @property
    def num_reused(self) -> int:
        """Tokens at the prompt's beginning that were not read, their keys and values being there."""
        ...

    async def step(self, tree: CandidateTree) -> StepResult:
        """Verify `tree`, whose root is the last committed token, and commit what the target says.

        Raises ValueError for an ill-formed tree (nothing is changed), WorkerLost when the worker is gone,
        RuntimeError after the sequence finished.
        """
        ...


class Target(Protocol):
    """A worker."""

    @property
    def info(self) -> TargetInfo: ...

    def open(self, request: SequenceRequest) -> AbstractAsyncContextManager[TargetSequence]:
        """Prefill all but the last prompt token, which is the first root. Leaving the context frees everything.

        Raises PromptTooLong, InvalidRequest, Exhausted, WorkerLost.
        """
        ...

    async def status(self) -> TargetStatus:
        """How it stands. Raises WorkerLost for one that does not answer."""
        ...

    async def close(self) -> None: ...
