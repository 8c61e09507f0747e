"""Watches one request's steps: the tree that was sent, what came back, and what it cost.

A recorder is a target sequence itself, so neither the loop nor the session knows that they are watched, and nothing that they
decide depends on it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.drafters import Feedback
from engine.requests import StepTrace, TraceNode
from engine.target import StepResult, TargetSequence
from engine.text import Tokenizer
from engine.tree import CANDIDATE, CandidateTree, CostCurve


@dataclass(frozen=True)
class _Seen:
    """One step: the tree, the curve by which its size was chosen, what the target said, seconds until it did."""

    tree: CandidateTree
    curve: CostCurve
    result: StepResult
    seconds: float


class Recorder:
    """A `TargetSequence` that passes every step on and remembers the last one."""

    def __init__(self, sequence: TargetSequence, tokenizer: Tokenizer) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._seen: _Seen | None = None

    @property
    def curve(self) -> CostCurve:
        """The last cost curve seen."""
        return self._sequence.curve

    @property
    def feedback(self) -> Feedback:
        """What the target said about the prompt."""
        return self._sequence.feedback

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that were not read."""
        return self._sequence.num_reused

    async def step(self, tree: CandidateTree) -> StepResult:
        """See TargetSequence.step."""
        curve, began = self.curve, time.perf_counter()
        result = await self._sequence.step(tree)
        self._seen = _Seen(tree, curve, result, time.perf_counter() - began)
        return result

    def last(self, num_kept: int, draft_seconds: float) -> StepTrace:
        """The last step, of whose tokens the first `num_kept` are in the answer. Raises RuntimeError before the first step.

        Lookahead rows are counted, not shown. O(nodes + points of the curve).
        """
        if self._seen is None:
            raise RuntimeError("no step was taken yet")
        tree, result = self._seen.tree, self._seen.result
        verified = set(result.verified.tolist())
        accepted = set(result.path[:num_kept].tolist())
        num_nodes = int((tree.roles == CANDIDATE).sum())
        nodes = tuple(
            TraceNode(
                token=int(tree.tokens[i]),
                text=self._tokenizer.token_bytes(int(tree.tokens[i])),
                parent=int(tree.parents[i]),
                prob=float(tree.probs[i]),
                mask=int(tree.sources[i]),
                verified=i in verified,
                accepted=i in accepted,
            )
            for i in range(num_nodes)
        )
        curve = self._seen.curve
        return StepTrace(
            nodes=nodes,
            texts=tuple(self._tokenizer.token_bytes(token) for token in result.tokens[:num_kept].tolist()),
            num_lookahead=len(tree) - num_nodes,
            draft_seconds=draft_seconds,
            step_seconds=self._seen.seconds,
            pass_seconds=result.seconds,
            costs=tuple(zip(curve.rows.tolist(), curve.seconds.tolist(), strict=True)),
        )
