"""The local worker: the same answer with any drafts and any neighbours, and memory that all comes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.acceptance import SamplingParams
from engine.calibration import Calibration
from engine.errors import Exhausted, PromptTooLong
from engine.session import Session, Tally
from engine.target import SequenceRequest, StepResult
from engine.target.attention import Part
from engine.target.cache import KVTable
from engine.target.fake import FakeTarget
from engine.target.kernels import BLOCK
from engine.target.local import LocalTarget
from engine.target.sampling import Ask, Said, Sampler
from engine.tree import CandidateTree, CostCurve, Draft
from tests.engine import tiny
from tests.oracles import Decoded
from tests.oracles import decode as decode_plainly
from tests.speculation import Source, ask, chain, check_result, request_of, sources_for, speculate


class Local(LocalTarget):
    """A local worker that the judges of losslessness can question as they do the fake one."""

    @property
    def num_open(self) -> int:
        """Blocks of KV memory in use: 0 when nothing is open."""
        return self.storage.num_blocks - self.storage.num_free

    def logits(self, path: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [V]: what the model says after `path`, read in one pass of its own."""
        table = KVTable(self.storage)
        table.reserve(len(path))
        said = self._passes.run(path.astype(np.int32), [Part(table, tiny.chain(len(path)))], [Ask(1, 0, None)])[0]
        table.close()
        assert said.logits is not None
        return said.logits[0]


def local(name: str = "qwen2", dtype: str = "int8", num_blocks: int = 64, **settings: Any) -> Local:
    """A worker over a tiny model, whose rows are free."""
    model = tiny.model(name, dtype)
    memory = num_blocks * 8 * model.num_layers * model.kv_heads * model.head_dim * BLOCK
    return Local(model, kv_memory=memory, **({"curve": CostCurve.flat()} | settings))


def fake(target: Local) -> FakeTarget:
    """The same object, for helpers that name the fake target in their types."""
    return cast(FakeTarget, target)


async def decode(target: Local, request: SequenceRequest, sources: Mapping[str, Source], max_nodes: int = 12) -> Decoded:
    """`speculation.speculate`, to be gathered with others."""
    session = Session(request.prompt, list(sources), Calibration(), max_nodes)
    logprobs: list[float] = []
    async with target.open(request) as sequence:
        while not session.finished:
            drafts = [ask(source, session.tokens, target.info.vocab_size) for source in sources.values()]
            tree = session.tree(drafts, sequence.curve)
            result = await sequence.step(tree)
            check_result(tree, result)
            if result.logprobs is not None:
                logprobs.extend(result.logprobs.chosen.tolist())
            session.commit(result)
    return Decoded(session.tokens[len(request.prompt) :].tolist(), session.finish, logprobs)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EVERYTHING = {
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((2, 1.5), (9, -4.0)),
}
REQUESTS = {
    "greedy": request_of(PROMPT, num_logprobs=1),
    "greedy, penalties": request_of(PROMPT, SamplingParams(**EVERYTHING), num_logprobs=0, min_tokens=6, stop_ids=[0, 7]),
    "0.7": request_of(PROMPT, SamplingParams(0.7, seed=3), num_logprobs=0),
    "0.7, everything": request_of(PROMPT, SamplingParams(0.7, **EVERYTHING, seed=5), num_logprobs=0, stop_ids=[0, 7]),
    "1.3": request_of(PROMPT, SamplingParams(1.3, top_k=40, min_p=0.01, seed=8), num_logprobs=0),
    "1.3, everything": request_of(PROMPT, SamplingParams(1.3, **EVERYTHING, seed=2**64 - 1), num_logprobs=0),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_drafts_change_nothing(name: str) -> None:
    """int8: with each source, all, all wrong, large budgets: tokens and log-probabilities are `==` plain ones."""
    target, request = local(), REQUESTS[name]
    exact = decode_plainly(fake(target), request)
    plain, _ = speculate(fake(target), request, {})
    assert (plain.tokens, plain.finish) == (exact.tokens, exact.finish)
    assert plain.logprobs == pytest.approx(exact.logprobs, abs=1e-12)
    sources = sources_for(fake(target), PROMPT, exact.tokens)
    wrong = {label: source for label, source in sources.items() if label not in ("perfect", "partial")}
    sets = {**{label: {label: source} for label, source in sources.items()}, "all": sources, "all wrong": wrong}
    for label, some in sets.items():
        found, tally = speculate(fake(target), request, some)
        assert found == plain, label
        if label == "perfect":
            assert tally.num_steps <= math.ceil(len(exact.tokens) / 7) + 1
    assert speculate(fake(target), request, sources, max_nodes=60)[0] == plain
    dear = CostCurve(np.array([1, 8], np.int32), np.array([1.0, 3.0]))
    assert speculate(fake(target), request, sources, curve=dear)[0] == plain


@pytest.mark.parametrize("model", ["llama", "mistral-window", "qwen3"])
def test_drafts_change_nothing_on_other_models(model: str) -> None:
    """Grouped heads, a sliding window, normed q and k: `==`, across a border of blocks."""
    target = local(model)
    request = request_of([i % 90 for i in range(50)], SamplingParams(0.8, seed=1), max_tokens=30, num_logprobs=0)
    plain, _ = speculate(fake(target), request, {})
    assert plain.tokens == decode_plainly(fake(target), request).tokens
    sources = sources_for(fake(target), request.prompt.tolist(), plain.tokens)
    found, tally = speculate(fake(target), request, sources)
    assert found == plain and tally.num_accepted > tally.num_steps


def test_float32_says_the_same_here_too() -> None:
    """Without near-ties the promise holds in float32 as well: tokens equal, log-probabilities to rounding."""
    target = local("llama", "float32")
    request = request_of(PROMPT, SamplingParams(0.7, seed=4), num_logprobs=0)
    plain, _ = speculate(fake(target), request, {})
    found, _ = speculate(fake(target), request, sources_for(fake(target), PROMPT, plain.tokens))
    assert found.tokens == plain.tokens and found.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_neighbours_change_nothing() -> None:
    """Six sequences with all their sources in one pool of passes, one cancelled, prompts of several chunks among them: `==`."""
    target = local()
    requests = [replace(request, prompt=request.prompt[i:]) for i, request in enumerate(REQUESTS.values())]
    requests[2] = replace(requests[2], prompt=np.arange(290, dtype=np.int32) % 90)
    plain = [speculate(fake(target), request, {})[0] for request in requests]

    async def together() -> list[Decoded]:
        tasks = []
        for request, alone in zip(requests, plain, strict=True):
            sources = sources_for(fake(target), request.prompt.tolist(), alone.tokens)
            tasks.append(asyncio.create_task(decode(target, request, sources)))
        extra = asyncio.create_task(decode(target, requests[0], {}))
        for turn in range(12):
            await asyncio.sleep(0)
            if turn == 6:
                extra.cancel()
        return await asyncio.gather(*tasks)

    assert asyncio.run(together()) == plain
    assert target.num_open == 0


def packs(target: Local) -> list[list[int]]:
    """A list that fills with the numbers of rows of each part of each pass."""
    seen: list[list[int]] = []
    run = target._passes.run

    def watched(tokens: NDArray[np.int32], parts: Sequence[Part], asks: Sequence[Ask]) -> list[Said]:
        seen.append([len(part.parents) for part in parts])
        return run(tokens, parts, asks)

    cast(Any, target._passes).run = watched
    return seen


def beside_a_long_prompt(target: Local) -> list[list[int]]:
    """The numbers of rows of each part of each pass while one sequence decodes and another's 370 tokens are read; both are
    answered as if alone."""
    long = request_of([i % 89 for i in range(370)], max_tokens=4)
    short = request_of(PROMPT, max_tokens=12)
    plain = [speculate(fake(target), request, {})[0] for request in (long, short)]
    target.storage.forget()
    seen = packs(target)

    async def both() -> list[Decoded]:
        first = asyncio.create_task(decode(target, short, {"echo": lambda context: chain(context[:3].tolist())}))
        while len(seen) < 2:
            await asyncio.sleep(0)
        return [await decode(target, long, {}), await first]

    assert asyncio.run(both()) == plain
    return seen


def test_a_long_prompt_is_read_beside_the_others_steps() -> None:
    """While a prompt of six chunks is read, another sequence goes on: one pass holds its tree and one chunk, both exact."""
    target = local()
    seen = beside_a_long_prompt(target)
    assert [4, 64] in seen and [4, 49] in seen, seen
    assert max(map(sum, seen)) <= 256 + target.info.max_rows


class Broken(Sampler):
    """Another one's state, and choices that fail."""

    def __init__(self, sampler: Sampler) -> None:
        vars(self).update(vars(sampler))

    def choose(self, logits: NDArray[np.float32], emitted: Sequence[int]) -> int:
        """No."""
        raise ArithmeticError("this sampler fails")


def test_what_breaks_in_one_sequence_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence whose sampling fails in a shared pass gets its error; its neighbour in that pass its tokens; all is freed."""
    monkeypatch.setattr("engine.target.local._MOST_AHEAD", 0)
    target = local()
    request = request_of(PROMPT, max_tokens=6)
    plain, _ = speculate(fake(target), request, {})
    seen = packs(target)

    async def both() -> list[Any]:
        async with target.open(request) as broken, target.open(request) as good:
            broken._sampler = Broken(broken._sampler)
            root = CandidateTree.root_only(PROMPT[-1], len(PROMPT) - 1)
            return await asyncio.gather(broken.step(root), good.step(root), return_exceptions=True)

    error, found = asyncio.run(both())
    assert isinstance(error, ArithmeticError) and found.tokens.tolist() == plain.tokens[:1]
    assert seen[-1] == [1, 1] and target.num_open == 0


def test_full_memory_delays_who_came_later() -> None:
    """When blocks run out, the later of two sequences gives up its own, waits, reads again, and says the same."""
    target = local(num_blocks=4)
    big = request_of([i % 80 for i in range(129)], SamplingParams(0.8, seed=2), max_tokens=60, num_logprobs=0)
    small = request_of(PROMPT, max_tokens=100, num_logprobs=0)
    plain = [speculate(fake(target), request, {})[0] for request in (big, small)]

    async def both() -> list[Decoded]:
        return await asyncio.gather(decode(target, small, {}), decode(target, big, {}))

    for turn in range(2):
        target.storage.forget()
        assert asyncio.run(both()) == plain[::-1]
        assert target.counts.num_preempted == turn + 1
        assert target.num_open == 0
        target.check()


def test_many_sequences_in_little_memory() -> None:
    """Nine sequences where three fit, drafts and prompts of several blocks, some cancelled: `==`, every block comes back."""
    target = local(num_blocks=7)
    rng = np.random.default_rng(4)
    requests = [
        request_of(rng.integers(0, 90, 20 + 17 * i).tolist(), SamplingParams(0.7, seed=i), max_tokens=40, num_logprobs=0)
        for i in range(9)
    ]
    plain = [speculate(fake(target), request, {})[0] for request in requests]
    target.storage.forget()

    async def together() -> list[Any]:
        tasks = []
        for request, alone in zip(requests, plain, strict=True):
            sources = sources_for(fake(target), request.prompt.tolist(), alone.tokens)
            right = {label: sources[label] for label in ("perfect", "partial")}  # others ask the model, and need memory
            tasks.append(asyncio.create_task(decode(target, request, right)))
        for turn in range(40):
            await asyncio.sleep(0)
            target.check()
            if turn in (9, 30):
                tasks[turn // 10].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(together())
    for i, (result, alone) in enumerate(zip(found, plain, strict=True)):
        assert result == alone or (i in (0, 3) and isinstance(result, asyncio.CancelledError))
    assert target.counts.num_preempted and target.num_open == 0
    target.check()


def test_an_idle_sequence_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came first, and whose engine is silent, does not keep others from their memory for ever."""
    monkeypatch.setattr("engine.target.local._IDLE", 0.01)
    target = local(num_blocks=4)
    first, second = request_of([1] * 100, max_tokens=20), request_of([2] * 100, max_tokens=90)
    plain = [speculate(fake(target), request, {})[0].tokens for request in (first, second)]

    async def run() -> list[int]:
        async with target.open(first) as silent:
            assert (await decode(target, second, {})).tokens == plain[1]
            assert silent.num_missing >= 99
            token, said = 1, list[int]()
            while len(said) < 20:
                result = await silent.step(CandidateTree.root_only(token, 99 + len(said)))
                said += result.tokens.tolist()
                token = said[-1]
            return said

    assert asyncio.run(run()) == plain[0]
    target.check()


def test_beginnings_are_read_once() -> None:
    """A text that begins like an earlier one of its tenant takes over its whole blocks, answers included: `==`, and counted."""
    target = local()
    text = [i % 77 for i in range(150)]
    first = request_of(text, SamplingParams(0.8, seed=1), max_tokens=60, num_logprobs=0)
    plain, _ = speculate(fake(target), first, {})
    longer = request_of(text + plain.tokens + [5], max_tokens=8, num_logprobs=0)
    expected, _ = speculate(fake(target), longer, {})
    assert target.counts.num_reused == 192, "150 of the prompt and 59 of the answer, in whole blocks"
    target.storage.forget()
    assert speculate(fake(target), longer, {})[0] == expected and target.counts.num_reused == 192

    for request, shared in ((first, 128), (replace(first, tenant="other"), 0), (replace(first, tenant="other"), 128)):
        before, read = target.counts.num_reused, target.counts.num_read
        assert speculate(fake(target), request, {})[0] == plain
        assert target.counts.num_reused - before == shared and target.counts.num_read - read == 149 - shared
    target.check()


def test_rows_that_are_shared_are_not_heard() -> None:
    """What was there already is not read again for the sake of feedback: of the prompt's end, the rows behind it are heard."""
    target = local()
    request = replace(request_of([i % 77 for i in range(210)], max_tokens=4), feedback_top_k=3, feedback_prompt=30)
    heard = []

    async def run() -> None:
        async with target.open(request) as sequence:
            heard.append(sequence.feedback)

    for shared in (0, 192, 384):
        asyncio.run(run())
        assert target.counts.num_reused == shared
    assert [len(one.nodes) for one in heard] == [30, 17, 17]
    for one in heard:
        assert one.nodes.tolist() == request.prompt[209 - len(one.nodes) : 209].tolist()
        assert np.array_equal(one.top_ids, heard[0].top_ids[-len(one.nodes) :]) and one.parents[0] == -1


def test_who_reads_beside_another_shares_as_it_goes() -> None:
    """Three requests with one long prompt at a time: what one has read the others need not read again."""
    target = local()
    request = request_of([i % 77 for i in range(370)], max_tokens=3)
    plain, _ = speculate(fake(target), request, {})
    target.storage.forget()
    before = target.counts.num_read

    async def together() -> list[Decoded]:
        return await asyncio.gather(*(decode(target, request, {}) for _ in range(3)))

    assert asyncio.run(together()) == [plain] * 3
    assert target.counts.num_read - before < 2 * 370
    target.check()


def test_the_least_used_beginning_is_forgotten_first() -> None:
    """Where memory is needed, idle blocks go by when they were last used, and the end of a text before its beginning."""
    target = local(num_blocks=6)
    texts = {name: request_of([token] * 129, max_tokens=1) for name, token in (("a", 1), ("b", 2), ("c", 3))}

    def shared(name: str) -> int:
        before = target.counts.num_reused
        speculate(fake(target), texts[name], {})
        return target.counts.num_reused - before

    assert [shared(name) for name in "abab"] == [0, 0, 128, 128]
    assert shared("c") == 0
    assert shared("b") == 128
    assert shared("a") == 64, "c took a free block, and the end of a, used longest ago"
    target.check()


def test_memory_that_ends_within_a_tree_cuts_the_tree() -> None:
    """Where a whole tree finds no room but its root does, the step goes on with what fits: drafts never cost an answer."""
    target = local(num_blocks=2)
    request = request_of([i % 80 for i in range(60)], max_tokens=4)
    plain, _ = speculate(fake(target), request, {})
    hog = KVTable(target.storage)

    async def run() -> list[StepResult]:
        results = []
        async with target.open(request) as sequence:
            hog.reserve(BLOCK)
            tokens = request.prompt.tolist()
            while not results or not results[-1].finish:
                drafts = Draft.of(list(range(20)), [-1] * 20, [0.05] * 20)
                session = Session(np.array(tokens, np.int32), ["wide"], Calibration(), 40)
                results.append(await sequence.step(session.tree([drafts], CostCurve.flat())))
                tokens += results[-1].tokens.tolist()
        return results

    results = asyncio.run(run())
    assert np.concatenate([result.tokens for result in results]).tolist() == plain.tokens
    assert [len(result.verified) for result in results][:1] == [5], "59 positions are committed, 5 are left in the block"
    hog.close()
    assert target.num_open == 0


def test_a_request_that_could_never_fit_is_not_begun() -> None:
    """More positions than there is memory for: Exhausted at once; more than the context holds: PromptTooLong."""
    target = local(num_blocks=2)

    async def opens(request: SequenceRequest) -> None:
        async with target.open(request):
            raise AssertionError("opened")

    with pytest.raises(Exhausted, match="raise kv_memory or ask for less"):
        asyncio.run(opens(request_of([1] * 100, max_tokens=100)))
    with pytest.raises(PromptTooLong):
        asyncio.run(opens(request_of([1] * tiny.CONTEXT, max_tokens=1)))
    assert target.num_open == 0


@pytest.mark.parametrize("max_rows", [8, 64, 128])
def test_the_context_ends_an_answer_and_its_trees(max_rows: int) -> None:
    """Near the end of the context, trees deeper than what is left are cut; the answer fills the context."""
    target = local(max_rows=max_rows)
    request = request_of([i % 80 for i in range(tiny.CONTEXT - 100)], max_tokens=200, num_logprobs=0)
    plain, _ = speculate(fake(target), request, {})
    assert len(plain.tokens) == 100 and plain.finish == "length"
    whole = np.concatenate([request.prompt, plain.tokens, np.zeros(200, np.int32)])
    deep: dict[str, Source] = {"deep": lambda context: chain(whole[len(context) : len(context) + 110].tolist(), 0.99)}
    found, tally = speculate(fake(target), request, deep, max_nodes=127)
    assert found == plain and tally.num_steps <= 100 / min(max_rows, 64) + 3


def test_a_worker_measures_what_its_passes_cost() -> None:
    """Without a fixed curve one is measured at start, given to sequences, and sent again every so many passes."""
    target = local(curve=None)
    target.curve.validate()
    assert target.curve.rows.tolist()[-1] == 64 and target.num_open == 0
    tally: list[StepResult] = []

    async def run() -> None:
        async with target.open(request_of(PROMPT, max_tokens=40)) as sequence:
            assert sequence.curve.rows.tolist() == target.curve.rows.tolist()
            token = PROMPT[-1]
            for i in range(40):
                tally.append(await sequence.step(CandidateTree.root_only(token, len(PROMPT) - 1 + i)))
                token = int(tally[-1].tokens[-1])

    asyncio.run(run())
    news = [result.curve for result in tally if result.curve is not None]
    assert 1 <= len(news) <= 4 and all(result.seconds > 0 for result in tally)
    for curve in news:
        curve.validate()


def test_a_frozen_curve_stays_and_cuts_trees() -> None:
    """A dear curve leaves little of a tree in the pass; `verified` says what; the worker never reports another curve."""
    dear = CostCurve(np.array([1, 2], np.int32), np.array([1.0, 1.6]))
    target = local(curve=dear)

    async def run() -> StepResult:
        async with target.open(request_of(PROMPT, max_tokens=30)) as sequence:
            assert sequence.curve is dear
            likely = Draft.of([7, 8, 9], [-1, 0, -1], [0.9, 0.9, 0.05])
            tree = Session(np.array(PROMPT, np.int32), ["one"], Calibration(), 8).tree([likely], CostCurve.flat())
            return await sequence.step(tree)

    result = asyncio.run(run())
    assert result.verified.tolist() == list(range(len(result.verified))) and len(result.verified) <= 3
    assert target.curve is dear and result.curve is None


def test_tallies_of_these_tests_see_acceptance() -> None:
    """The perfect source is accepted almost whole: the tests above do verify trees."""
    target, request = local(), REQUESTS["greedy"]
    plain, _ = speculate(fake(target), request, {})
    perfect = sources_for(fake(target), PROMPT, plain.tokens)["perfect"]
    tally: Tally = speculate(fake(target), request, {"perfect": perfect})[1]
    assert tally.num_accepted >= len(plain.tokens) - tally.num_steps
