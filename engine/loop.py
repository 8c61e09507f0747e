"""One request's decoding, the step one can recite: draft, weave, verify, commit."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np

from engine.drafters.panel import Panel
from engine.session import Session, Step
from engine.target import StepResult, TargetSequence


@dataclass
class Times:
    """Seconds spent so far: `draft` proposing, merging, and taking in what the target said; `step` waiting for it."""

    draft: float = 0.0
    step: float = 0.0


_NO_TOKENS = np.zeros(0, np.int32)


async def decode(
    session: Session, panel: Panel, sequence: TargetSequence, times: Times
) -> AsyncGenerator[tuple[Step, StepResult], None]:
    """Yield every committed step until the session has finished, or its reader cuts it.

    Whatever the panel does, the tokens are the target's own. Raises what `sequence.step` raises.
    """
    if len(sequence.feedback.nodes):
        panel.accept(_NO_TOKENS, sequence.feedback)
    while not session.finished:
        start = time.perf_counter()
        drafts = await panel.propose(session.tokens, session.num_wanted)
        tree = session.tree(drafts, sequence.curve, panel.lookahead)
        drafted = time.perf_counter()
        result = await sequence.step(tree)
        verified = time.perf_counter()
        step = session.commit(result)
        panel.reward(session.reached, min(float(sequence.curve.at(1)), verified - drafted))
        panel.accept(step.tokens, result.feedback)
        times.draft += drafted - start
        times.step += verified - drafted
        times.draft += time.perf_counter() - verified
        yield step, result
