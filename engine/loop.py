"""One request's decoding, the step one can recite: draft, weave, verify, commit."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np

from engine.drafters.panel import Panel
from engine.goodput import Goodput
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
    goodput = Goodput()
    if len(sequence.feedback.nodes):
        panel.accept(_NO_TOKENS, sequence.feedback)
    while not session.finished:
        start = time.perf_counter()
        drafts = await panel.propose(session.tokens, session.num_wanted) if goodput.pays else None
        tree = session.tree(drafts or panel.silence, sequence.curve, panel.lookahead if drafts else None)
        drafted = time.perf_counter()
        result = await sequence.step(tree)
        verified = time.perf_counter()
        step = session.commit(result)
        panel.accept(step.tokens, result.feedback)
        drafting = drafted - start + time.perf_counter() - verified
        if drafts:
            panel.reward(session.reached, min(goodput.token_seconds, verified - drafted))
            goodput.weigh(tree, sequence.curve, drafting)
        else:
            goodput.skip()
        times.draft += drafting
        times.step += verified - drafted
        yield step, result
