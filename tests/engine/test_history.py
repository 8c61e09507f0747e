"""Drafting from earlier answers: who sees what of whom, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.app import Engine
from engine.config import Config, CorporaSettings, MemorySettings, SpeculationSettings
from engine.drafters import Drafting, DraftRequest, Feedback
from engine.drafters.history import LEAD_IN, HistoryDrafter, answers, without_old
from engine.memory import Memory, Tenant
from engine.recall import forget, recall
from engine.requests import Final, GenerationRequest, SpeculationOptions
from tests.engine.test_app import SPELL, TOKENIZER, Target, collect

ANSWER = [21, 22, 23, 24, 25, 26]


def begin(memory: Tenant, context: Sequence[int] = (1, 2, 3), **options: Any) -> Drafting:
    """A request's drafting."""
    request = DraftRequest("tenant", "model", np.array(context, np.int32), memory=memory, **options)
    ((label, drafting),) = HistoryDrafter().begin(request)
    assert label == "history"
    return drafting


def say(memory: Tenant, tokens: Sequence[int] = ANSWER, **options: Any) -> None:
    """A whole request that is answered with these tokens, two a step."""
    drafting = begin(memory, **options)
    for i in range(0, len(tokens), 2):
        drafting.accept(tokens[i : i + 2], Feedback())
    drafting.close()


def drafted(memory: Tenant, *context: int, **options: Any) -> list[int]:
    """The tokens that history drafts after a context."""
    drafting = begin(memory, context, **options)
    draft = drafting.propose(np.array(context, np.int32), 8)
    draft.validate(100)
    drafting.close()
    return draft.tokens.tolist()


# ---- the source


def test_an_earlier_answer_is_drafted_from_its_first_token_on() -> None:
    """By what stood before it, then by itself; the prompt it answered is not drafted."""
    memory = Tenant()
    say(memory)
    assert drafted(memory, 1, 2, 3) == ANSWER
    assert drafted(memory, 22, 23) == ANSWER[3:]
    assert drafted(memory, 1, 2) == []


def test_only_the_end_of_a_prompt_is_kept() -> None:
    """Of a long prompt the last tokens, by which the beginning of the answer is found."""
    memory = Tenant()
    say(memory, context=range(50))
    saved = memory.states["history"].arrays()
    assert saved["tokens"].tolist() == [*range(50 - LEAD_IN, 50), *ANSWER]
    assert [each.tolist() for each in answers(saved)] == [ANSWER]


def test_requests_at_one_time_see_one_another() -> None:
    """An answer is drafted from while it is still being given, and what it says is counted once."""
    memory = Tenant()
    growing = begin(memory, [7])
    growing.accept(ANSWER[:4], Feedback())
    other = begin(memory, [9])
    draft = other.propose(np.array([9, 21], np.int32), 8)
    assert draft.tokens.tolist() == ANSWER[1:4] and set(draft.counts.tolist()) == {1}
    growing.accept(ANSWER[4:], Feedback())
    assert other.propose(np.array([9, 21], np.int32), 8).tokens.tolist() == ANSWER[1:]


def test_counts_say_how_often_it_was_said() -> None:
    """Three answers alike are evidence of three, and the one that differs takes its share; the last counts more."""
    memory = Tenant()
    for last in (25, 40, 25, 25):
        say(memory, [21, 22, last])
    drafting = begin(memory, [9])
    draft = drafting.propose(np.array([9, 21, 22], np.int32), 8)
    assert draft.tokens.tolist() == [25, 40] and draft.counts.tolist() == [4, 4]
    assert draft.probs[0] > 2 * draft.probs[1]


def test_a_request_may_use_without_teaching_and_teach_without_using() -> None:
    """The two switches are independent; with both off the source stays away."""
    memory = Tenant()
    say(memory, learn=False)
    assert drafted(memory, 21, 22, learn=False) == []
    say(memory, use_history=False)
    assert drafted(memory, 21, 22, learn=False) == ANSWER[2:]
    assert drafted(memory, 21, 22, use_history=False) == []
    request = DraftRequest("tenant", "model", np.array([1], np.int32), memory=memory, use_history=False, learn=False)
    assert HistoryDrafter().begin(request) == []


def test_nothing_is_left_of_a_request_that_teaches_nothing() -> None:
    """Not in what will be saved, either."""
    memory = Tenant()
    say(memory)
    before = memory.states["history"].arrays()
    say(memory, [31, 32, 33], context=(34, 35), learn=False)
    after = memory.states["history"].arrays()
    assert before["tokens"].tolist() == after["tokens"].tolist()


def test_what_is_past_its_time_is_not_drafted() -> None:
    """In memory by the next request, on disk by the one who looks through it."""
    now = 100.0
    memory = Tenant(retention=50.0, clock=lambda: now)
    say(memory)
    saved = memory.states["history"].arrays()
    assert [each.tolist() for each in answers(without_old(saved, 99.0))] == [ANSWER]
    assert answers(without_old(saved, 101.0)) == []
    assert drafted(memory, 21, 22, learn=False) == ANSWER[2:]
    now = 151.0
    assert drafted(memory, 21, 22, learn=False) == []


def test_saved_history_without_sense_is_left_out_whole() -> None:
    """What looks it through for age does not fail on it."""
    assert without_old({"born": np.zeros(2), "lengths": np.zeros(1, np.int32), "tokens": np.zeros(3, np.int32)}, 1.0) == {}
    assert without_old({}, 1.0) == {}


# ---- in the engine


def engine_at(folder: Path, target: Target | None = None, **memory: Any) -> Engine:
    """An engine that remembers in `folder`/memory."""
    settings = MemorySettings(folder=folder / "memory", **memory)
    speculation = SpeculationSettings(sources=("history",), deadline_ms=60_000)
    config = Config(speculation=speculation, corpora=CorporaSettings(store=folder), memory=settings)
    return Engine(config, target or Target(), TOKENIZER)


def request(tenant: str = "a", **options: Any) -> GenerationRequest:
    """One that is answered with the same text by whoever asks."""
    prompt = np.array(SPELL[:1], np.int32)
    return GenerationRequest(tenant=tenant, prompt=prompt, max_tokens=14, speculation=SpeculationOptions(**options))


def accepted(engine: Engine, *requests: GenerationRequest, close: bool = False) -> list[int]:
    """How many drafted tokens each request's answer has; one engine, one event loop."""

    async def run() -> list[int]:
        counts = []
        for each in requests:
            _, final, _ = await collect(engine, each)
            assert isinstance(final, Final)
            counts.append(final.statistics.num_accepted)
        if close:
            await engine.close()
        return counts

    return asyncio.run(run())


def test_a_tenant_hears_nothing_of_another(tmp_path: Path) -> None:
    """Whatever one tenant's answers said, another's first request drafts nothing: in one server, and after a restart."""
    engine = engine_at(tmp_path)
    first, second, other = accepted(engine, request("a"), request("a"), request("b"), close=True)
    assert (first, other) == (0, 0) and second > 5
    again = engine_at(tmp_path)
    assert accepted(again, request("c"), request("a/../a"), request("A"), request(" a")) == [0, 0, 0, 0]
    assert accepted(again, request("a")) == [second]


def test_another_model_hears_nothing(tmp_path: Path) -> None:
    """The same tenant, another model: another history."""
    accepted(engine_at(tmp_path), request(), close=True)
    other = Target()
    other.info = replace(other.info, model="other")
    assert accepted(engine_at(tmp_path, other), request()) == [0]


def test_the_switches_of_a_request_reach_the_source(tmp_path: Path) -> None:
    """`learn` false leaves nothing, not even calibration; `use_history` false drafts nothing."""
    engine = engine_at(tmp_path)
    assert accepted(engine, request(learn=False), request(learn=False), close=True) == [0, 0]
    assert all(each.num_answers == 0 for each in recall(Memory(tmp_path / "memory"), None, None))
    taught, unused, used = accepted(engine, request(), request(use_history=False, learn=False), request())
    assert taught == unused == 0 and used > 5


def test_calibration_learns_nothing_from_a_request_that_says_so(tmp_path: Path) -> None:
    """The tables are those from before."""

    async def tables(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
        await collect(engine, request(**options))
        tenant = await engine._tenants.open(engine._memory_key, "a")
        return dict(tenant.states["calibration"].arrays())

    async def run() -> None:
        engine = engine_at(tmp_path)
        await tables(engine, {})
        before = await tables(engine, {})
        same = await tables(engine, {"learn": False})
        changed = await tables(engine, {})
        assert all(np.array_equal(before[name], same[name]) for name in before)
        assert any(not np.array_equal(before[name], changed[name]) for name in before)

    asyncio.run(run())


def test_memory_that_is_off_remembers_for_nobody_who_does_not_ask(tmp_path: Path) -> None:
    """No file, no draft; a request that says so is remembered while the server runs."""
    engine = engine_at(tmp_path, enabled=False)
    assert accepted(engine, request(), request()) == [0, 0]
    _, used = accepted(engine, request(learn=True), request(use_history=True), close=True)
    assert used > 5
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("damage", [b"", b"garbage"])
def test_a_damaged_history_costs_its_drafts_and_nothing_else(tmp_path: Path, damage: bytes) -> None:
    """The server starts, answers the same text, and remembers anew."""
    accepted(engine_at(tmp_path), request(), close=True)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(damage)
    first, second = accepted(engine_at(tmp_path), request(), request())
    assert first == 0 and second > 5
    assert len(list(tmp_path.rglob("*.damaged"))) == 2


def test_history_of_another_shape_is_left_out(tmp_path: Path) -> None:
    """A good file that is no history: a fresh one is begun."""
    engine = engine_at(tmp_path)
    Memory(tmp_path / "memory").save(engine._memory_key, "a", "history", {"tokens": np.zeros((2, 2), np.int32)})
    first, second = accepted(engine, request(), request())
    assert first == 0 and second > 5


def test_a_running_server_forgets_what_is_cleared(tmp_path: Path) -> None:
    """`draftloom history clear` beside it: the next request finds nothing, and the answers do not come back to the disk."""
    memory = Memory(tmp_path / "memory")

    async def run() -> None:
        engine = engine_at(tmp_path)
        await collect(engine, request())
        await engine._tenants.save()
        assert [each.num_answers for each in recall(memory, None, None)] == [1]
        assert forget(memory, None, "a") == 1
        await engine._tenants.save()
        assert recall(memory, None, None) == []
        _, final, _ = await collect(engine, replace(request(), max_tokens=2))
        assert final.statistics.num_accepted == 0
        await engine.close()

    asyncio.run(run())
    assert [each.num_tokens for each in recall(memory, None, None)] == [2]


def test_what_is_recalled(tmp_path: Path) -> None:
    """Of which model and tenant, how much, and how old; no texts unless asked for."""
    engine = engine_at(tmp_path)
    accepted(engine, request("a"), request("a"), request("b"), close=True)
    memory = Memory(tmp_path / "memory")
    a, b = recall(memory, None, None)
    assert (a.tenant, a.num_answers, a.num_tokens, a.texts) == ("a", 2, 28, None)
    assert a.model == b.model == engine._memory_key and a.num_bytes > 0
    assert a.oldest is not None and a.newest is not None and a.oldest <= a.newest <= a.saved + 1
    assert recall(memory, engine.info.model, "b") == [b] == recall(memory, engine._memory_key, "b")
    assert recall(memory, "other", None) == recall(memory, None, "c") == []
