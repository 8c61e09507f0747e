"""Whoever loses all memory, before whatever pass, reads again and says the same, `==`: tokens, finish, log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.acceptance import SamplingParams
from engine.calibration import Calibration
from engine.session import Session
from engine.target import SequenceRequest
from engine.target.kernels import BLOCK
from engine.tree import CostCurve
from tests.engine import tiny
from tests.engine.test_target_local import EVERYTHING, Local, fake, local
from tests.speculation import Source, ask, request_of, sources_for, speculate


class Robbed(Local):
    """A worker that takes all memory from the `victims`-th sequences that are open right before pass number `at`."""

    at = -1
    victims: tuple[int, ...] = (0,)
    forget = False
    num_runs = 0

    def _run(self, works: Any) -> Any:
        if self.num_runs == self.at:
            for i in self.victims:
                if i < len(self._open):
                    self.preempt(self._open[i])
            if self.forget:
                self.storage.forget()
        self.num_runs += 1
        answers = super()._run(works)
        self.check()
        return answers


def robbed() -> Robbed:
    """Such a worker over a tiny Qwen2 in int8, whose rows are free."""
    model = tiny.model("qwen2", "int8")
    return Robbed(model, kv_memory=64 * 8 * model.num_layers * model.kv_heads * model.head_dim * BLOCK, curve=CostCurve.flat())


async def answer(target: Local, request: SequenceRequest, sources: Mapping[str, Source]) -> tuple[Any, ...]:
    """All that a request gets: tokens, finish, and for every token its log-probability, the likeliest and theirs."""
    session = Session(request.prompt, list(sources), Calibration(), 6)
    said: list[tuple[Any, ...]] = []
    async with target.open(request) as sequence:
        while not session.finished:
            drafts = [ask(source, session.tokens, target.info.vocab_size) for source in sources.values()]
            result = await sequence.step(session.tree(drafts, sequence.curve))
            assert result.logprobs is not None
            logprobs = result.logprobs
            said += zip(logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
            session.commit(result)
    return session.tokens[len(request.prompt) :].tolist(), session.finish, said


LONG = [i % 80 for i in range(300)]
SAMPLING = {
    "greedy": SamplingParams(),
    "greedy, everything": SamplingParams(**EVERYTHING),
    "0.7": SamplingParams(0.7, seed=3),
    "0.7, everything": SamplingParams(0.7, **EVERYTHING, seed=2**64 - 1),
}


@pytest.mark.parametrize("forget", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forgotten", "kept"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("name", SAMPLING)
def test_preemption_before_every_pass(name: str, drafts: bool, forget: bool) -> None:
    """At every index of a generation, those that read the prompt among them; nothing of tokens, noise or penalties is lost."""
    target = robbed()
    request = request_of(LONG, SAMPLING[name], max_tokens=20, min_tokens=8, stop_ids=[0, 7], num_logprobs=2)
    plain = asyncio.run(answer(target, request, {}))
    sources = sources_for(fake(target), request.prompt.tolist(), plain[0])
    chosen = {label: sources[label] for label in ("perfect", "partial", "garbage")} if drafts else {}
    target.forget = forget
    indices = 0
    while target.at < target.num_runs:  # until a generation ends before the pass that would begin with a loss
        target.at, target.num_runs = indices, 0
        target.storage.forget()
        before = target.counts.num_preempted
        assert asyncio.run(answer(target, request, chosen)) == plain
        assert target.counts.num_preempted - before == (target.num_runs > indices)
        assert target.num_open == 0
        indices += 1
    least = 2 + len(plain[0]) if not drafts else 4
    assert indices > least, "every pass had its turn"


@pytest.mark.parametrize("victims", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_preemption_among_neighbours(victims: tuple[int, ...]) -> None:
    """Three sequences in one pool of passes, two of one tenant: whoever is robbed, all say what they say alone."""
    target = robbed()
    requests = [
        request_of(LONG[: 60 + 40 * i], SamplingParams(0.7 * (i > 0), **EVERYTHING, seed=i), max_tokens=10, num_logprobs=0)
        for i in range(3)
    ]
    requests[2] = replace(requests[2], tenant="another")
    alone = [asyncio.run(answer(target, request, {})) for request in requests]
    sources = [sources_for(fake(target), request.prompt.tolist(), a[0]) for request, a in zip(requests, alone, strict=True)]
    chosen = [{}, {"partial": sources[1]["partial"]}, {"perfect": sources[2]["perfect"], "late": sources[2]["late"]}]
    target.victims = victims

    async def together() -> list[tuple[Any, ...]]:
        return await asyncio.gather(*(answer(target, r, s) for r, s in zip(requests, chosen, strict=True)))

    indices = 0
    while target.at < target.num_runs:
        target.at, target.num_runs = indices, 0
        assert asyncio.run(together()) == alone
        assert target.num_open == 0
        indices += 1
    assert indices > 10


def test_a_sequence_robbed_before_every_one_of_its_steps_still_ends() -> None:
    """Between any two steps: it never keeps a block for longer than a step, and says the same."""
    target = local()
    request = request_of(LONG[:130], SAMPLING["0.7, everything"], max_tokens=12, num_logprobs=0)
    plain, _ = speculate(fake(target), request, {})
    sources = sources_for(fake(target), request.prompt.tolist(), plain.tokens)

    async def run() -> list[int]:
        session = Session(request.prompt, ["partial"], Calibration(), 6)
        async with target.open(request) as sequence:
            while not session.finished:
                target.preempt(sequence)
                target.storage.forget()
                assert sequence.num_missing == len(session.tokens) - 1
                drafts = [ask(sources["partial"], session.tokens, target.info.vocab_size)]
                session.commit(await sequence.step(session.tree(drafts, sequence.curve)))
        return session.tokens[len(request.prompt) :].tolist()

    assert asyncio.run(run()) == plain.tokens
    target.check()
