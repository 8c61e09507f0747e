"""Whether drafting pays: what it brings against what it takes, by sums that can be done in the head."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.acceptance import Limits, SamplingParams
from engine.calibration import Calibration
from engine.drafters import DraftRequest
from engine.drafters.panel import Panel
from engine.goodput import Goodput
from engine.loop import Times, decode
from engine.session import Session
from engine.target import SequenceRequest
from engine.target.batching import CostMeter
from engine.target.fake import FakeTarget
from engine.tree import CandidateTree, CostCurve, Draft
from tests.speculation import Hint, chain

FREE = CostCurve(np.array([1, 64], np.int32), np.array([1.0, 1.0]))
DEAR = CostCurve(np.array([1, 2, 64], np.int32), np.array([1.0, 1.5, 32.5]))
"""A token takes 1 s; a further row nothing, or half a second."""


def tree(*probs: float) -> CandidateTree:
    """A chain of these path probabilities below the root."""
    n = len(probs)
    return CandidateTree(
        np.arange(n + 1, dtype=np.int32),
        np.arange(-1, n, dtype=np.int32),
        np.array([1.0, *probs], np.float32),
        np.minimum(np.arange(n + 1), 1).astype(np.int64),
        np.zeros(n + 1, np.uint8),
        3,
    )


def turns(goodput: Goodput, num_steps: int, probs: tuple[float, ...], curve: CostCurve, seconds: float) -> list[bool]:
    """Which of so many steps were drafted for."""
    drafted = []
    for _ in range(num_steps):
        drafted.append(goodput.pays)
        if drafted[-1]:
            goodput.weigh(tree(*probs), curve, seconds)
        else:
            goodput.skip()
    return drafted


@pytest.mark.parametrize(
    ("probs", "curve", "seconds", "pays"),
    [
        ((0.5,), FREE, 0.1, True),  # .5 x .9 - .1
        ((0.5,), FREE, 0.4, False),  # .5 x .6 - .4
        ((0.9,), DEAR, 0.1, True),  # .9 x .9 - .5 - .1
        ((0.9,), DEAR, 0.3, False),  # .9 x .7 - .5 - .3
        ((0.9, 0.1), DEAR, 0.1, True),  # the second node is not worth its row, so it takes none
        ((), FREE, 0.05, True),  # nothing to say, at hardly a cost
        ((), FREE, 0.2, False),
    ],
)
def test_drafting_goes_on_where_it_brings_more_than_it_takes(
    probs: tuple[float, ...], curve: CostCurve, seconds: float, pays: bool
) -> None:
    """Tokens promised, at what one takes without drafts, against rows and drafting; what has no row at its best costs none."""
    goodput = Goodput()
    drafted = turns(goodput, 200, probs, curve, seconds)
    assert all(drafted) if pays else not all(drafted)


def test_a_request_whose_drafts_do_not_pay_is_tried_now_and_then() -> None:
    """Judged after some steps, then drafted for on every sixteenth."""
    drafted = turns(Goodput(), Goodput.TRIAL + 10 * Goodput.PROBE, (), FREE, 0.1)
    assert drafted == [True] * Goodput.TRIAL + ([False] * (Goodput.PROBE - 1) + [True]) * 10


def test_drafts_that_pay_again_are_noticed() -> None:
    """Probes that promise enough bring drafting back, the later the more it had lost; then every step is drafted for."""
    for seconds in (0.1, 0.5):
        goodput = Goodput()
        assert not turns(goodput, 20, (), FREE, seconds)[-1]
        drafted = turns(goodput, 20 * Goodput.PROBE, (0.9, 0.9, 0.9, 0.9), FREE, seconds)
        assert not drafted[0] and all(drafted[-Goodput.PROBE :])


def test_what_drafting_takes_is_no_part_of_a_plain_token() -> None:
    """The curve has all that goes by in it: of a second of which a fifth is drafting, .8 are left; once that stopped, all."""
    goodput = Goodput()
    turns(goodput, 40, (0.9,), FREE, 0.2)
    assert goodput.token_seconds == pytest.approx(0.8)
    turns(goodput, 40 * Goodput.PROBE, (), FREE, 0.2)
    assert goodput.token_seconds == pytest.approx(1.0, abs=0.03)


def test_the_same_drafts_pay_alone_and_not_beside_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's curve decides: alone a token saved is a pass, beside 31 others a thirty-second of one."""
    meter = CostMeter()
    clock = [0.0]
    monkeypatch.setattr("engine.target.batching.time.perf_counter", lambda: clock[0])
    meter.calibrate(lambda rows: clock.__setitem__(0, clock[0] + 0.008 + 0.0005 * rows))
    found = {}
    for num_trees in (1, 32):
        goodput = Goodput()
        found[num_trees] = all(turns(goodput, 100, (0.4,), meter.share(0.0, num_trees, 2 * (num_trees - 1)), 0.0004))
    assert found == {1: True, 32: False}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_is_the_same_whether_drafting_pays_or_not(temperature: float) -> None:
    """Where a pass takes a nanosecond no draft pays, however good: sources are asked now and then, hear of every token in the
    end, and the text is that of plain decoding; where it takes a second they are asked on every step."""
    limits, prompt = Limits(100), np.array([1, 2, 3], np.int32)
    sampling = SamplingParams(temperature, seed=5)

    def run(curve: CostCurve, source: bool) -> tuple[list[int], int, int]:
        asked = [0]

        def say(context: NDArray[np.int32]) -> Draft:
            asked[0] += 1
            return chain([int(context[-1]), 7])

        class Hears(Hint):
            heard = 0

            def accept(self, tokens: object, feedback: object) -> None:
                Hears.heard += len(tokens)  # type: ignore[arg-type]

        async def go() -> list[int]:
            target = FakeTarget(32, curve=curve)
            about = DraftRequest("default", "m", prompt)
            with Panel([Hears("h", say)] if source else [], about, 32, deadline=60.0) as panel:
                session = Session(prompt, panel.labels, Calibration(), 8)
                async with target.open(SequenceRequest(prompt, sampling, limits, "default")) as sequence:
                    async for _ in decode(session, panel, sequence, Times()):
                        pass
            return session.tokens.tolist()

        return asyncio.run(go()), asked[0], Hears.heard

    plain, asked, _ = run(CostCurve.flat(), False)
    assert asked == 0
    dear, asked, heard = run(CostCurve.flat(1e-9), True)
    assert dear == plain and heard == 100
    assert Goodput.TRIAL < asked <= Goodput.TRIAL + 100 // Goodput.PROBE + 1
    free, asked, heard = run(CostCurve.flat(), True)
    assert free == plain and heard == 100 and asked > 40
