"""The local worker over a device's passes, on the CPU in float32: what it says by its kernels, whatever happens on the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engine.acceptance import SamplingParams
from engine.calibration import Calibration
from engine.errors import ModelError, WorkerLost
from engine.session import Session
from engine.target import model
from engine.target.attention import Part
from engine.target.cache import KVTable
from engine.target.cuda import ROWS, DevicePasses
from engine.target.kernels import BLOCK
from engine.target.local import LocalTarget
from engine.target.passes import KernelPasses
from engine.target.sampling import Ask, Choices
from engine.tree import CostCurve, LookaheadRows
from tests.engine import tiny
from tests.engine.test_preemption import Robbed
from tests.engine.test_target_local import EVERYTHING, PROMPT, Local, beside_a_long_prompt, decode, fake, local
from tests.oracles import Decoded
from tests.oracles import decode as decode_plainly
from tests.speculation import chain, request_of, sources_for, speculate

ATTENTIONS = {"gathered": DevicePasses, "flex": partial(DevicePasses, flexible=True)}


def device(name: str = "qwen2", attention: str = "gathered", num_blocks: int = 64, **settings: Any) -> Local:
    """A worker over a tiny model in float32, as it would run on a device."""
    return local(name, "float32", num_blocks, passes=ATTENTIONS[attention], **settings)


def same(found: Decoded, expected: Decoded) -> bool:
    """Equal, log-probabilities to rounding."""
    near = np.allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-4)
    return found.tokens == expected.tokens and found.finish == expected.finish and bool(near)


SAMPLING = {
    "greedy": SamplingParams(),
    "0.7": SamplingParams(0.7, seed=3),
    "1.3, top_p": SamplingParams(1.3, top_k=40, top_p=0.9, min_p=0.02, seed=2**64 - 1),
    "0.7, everything": SamplingParams(0.7, **EVERYTHING, seed=5),
}


@pytest.mark.parametrize("num_logprobs", [-1, 0], ids=["ids", "logits"])
@pytest.mark.parametrize("name", SAMPLING)
def test_drafts_change_nothing(name: str, num_logprobs: int) -> None:
    """With each source, all, and large budgets: what one token at a time says, and what the kernels say, too.

    Choices are the device's for all but the last, and the host's where log-probabilities are wanted.
    """
    target = device()
    request = request_of(PROMPT, SAMPLING[name], min_tokens=4, stop_ids=[0, 7], num_logprobs=num_logprobs)
    exact = decode_plainly(fake(target), request)
    plain, _ = speculate(fake(target), request, {})
    assert (plain.tokens, plain.finish) == (exact.tokens, exact.finish)
    assert same(speculate(fake(local("qwen2", "float32")), request, {})[0], plain)
    sources = sources_for(fake(target), PROMPT, exact.tokens)
    for some in (*({label: source} for label, source in sources.items()), sources):
        assert same(speculate(fake(target), request, some)[0], plain)
    assert same(speculate(fake(target), request, sources, max_nodes=60)[0], plain)


def test_a_failed_device_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA answers every later call of the process with the same error, so the sequence has to go on elsewhere."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    target = device()
    monkeypatch.setattr(target._passes._runner, "run", fail)
    with pytest.raises(WorkerLost, match=r"the device has failed: .*illegal memory access"):
        speculate(fake(target), request_of(PROMPT), {})


def test_stop_ids_are_masked_until_enough_is_said() -> None:
    """Half of the vocabulary ends the answer, but not before the eighth token: logits first, then ids, as one at a time."""
    target = device("llama")
    request = request_of(PROMPT, SamplingParams(0.9, seed=2), min_tokens=8, stop_ids=range(48))
    exact = decode_plainly(fake(target), request)
    assert exact.finish == "stop" and len(exact.tokens) > 8
    for drafts in ({}, {"partial": sources_for(fake(target), PROMPT, exact.tokens)["partial"]}):
        assert speculate(fake(target), request, drafts)[0] == exact


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_drafts_change_nothing_on_other_models(name: str, attention: str) -> None:
    """Grouped heads and a sliding window, either attention, across a border of pages."""
    target = device(name, attention)
    request = request_of([i % 90 for i in range(50)], SamplingParams(0.8, seed=1), max_tokens=30)
    plain, _ = speculate(fake(target), request, {})
    assert plain == speculate(fake(local(name, "float32")), request, {})[0]
    sources = sources_for(fake(target), request.prompt.tolist(), plain.tokens)
    found, tally = speculate(fake(target), request, {label: sources[label] for label in ("perfect", "partial", "garbage")})
    assert found == plain and tally.num_accepted > tally.num_steps


def test_neighbours_change_nothing() -> None:
    """Sequences that ask for ids and for logits in one pass, a prompt of several chunks, one cancelled: each as alone."""
    target = device()
    requests = [request_of(PROMPT[i:], params, num_logprobs=-(i % 2)) for i, params in enumerate(SAMPLING.values())]
    requests[1] = replace(requests[1], prompt=np.arange(290, dtype=np.int32) % 90)
    plain = [speculate(fake(target), request, {})[0] for request in requests]

    async def together() -> list[Decoded]:
        tasks = []
        for request, alone in zip(requests, plain, strict=True):
            sources = sources_for(fake(target), request.prompt.tolist(), alone.tokens)
            right = {label: sources[label] for label in ("perfect", "partial", "echo")}
            tasks.append(asyncio.create_task(decode(target, request, right)))
        extra = asyncio.create_task(decode(target, requests[0], {}))
        for turn in range(12):
            await asyncio.sleep(0)
            if turn == 6:
                extra.cancel()
        return await asyncio.gather(*tasks)

    assert all(same(found, alone) for found, alone in zip(asyncio.run(together()), plain, strict=True))
    assert target.num_open == 0
    target.check()


def test_a_long_prompt_is_read_beside_the_others_steps() -> None:
    """While a prompt of several chunks is read, another sequence goes on: one pass holds its tree and one chunk."""
    assert [4, 64] in beside_a_long_prompt(device())


def test_beginnings_are_read_once() -> None:
    """Pages are found again by the tenant whose they are, rows of an answer that were moved among them."""
    target = device()
    text = [i % 77 for i in range(150)]
    first = request_of(text, SamplingParams(0.8, seed=1), max_tokens=60)
    plain, _ = speculate(fake(target), first, {})
    sources = sources_for(fake(target), text, plain.tokens)
    target.storage.forget()
    assert speculate(fake(target), first, {"partial": sources["partial"]})[0] == plain
    longer = request_of(text + plain.tokens + [5], max_tokens=8)
    before = target.counts.num_reused
    expected, _ = speculate(fake(target), longer, {})
    assert target.counts.num_reused - before == 192, "150 of the prompt and 59 of the answer, in whole pages"
    target.storage.forget()
    assert speculate(fake(target), longer, {})[0] == expected
    before = target.counts.num_reused
    assert speculate(fake(target), replace(longer, tenant="other"), {})[0] == expected
    assert target.counts.num_reused == before
    target.check()


def test_many_sequences_in_little_memory() -> None:
    """More than fit at a time, drafts among them: who came last gives way, all say what they say alone, all pages come back."""
    target = device(num_blocks=7)
    rng = np.random.default_rng(4)
    requests = [
        request_of(rng.integers(0, 90, 20 + 17 * i).tolist(), SamplingParams(0.7, seed=i), max_tokens=40) for i in range(9)
    ]
    plain = [speculate(fake(target), request, {})[0] for request in requests]
    target.storage.forget()

    async def together() -> list[Decoded]:
        tasks = []
        for request, alone in zip(requests, plain, strict=True):
            sources = sources_for(fake(target), request.prompt.tolist(), alone.tokens)
            tasks.append(decode(target, request, {label: sources[label] for label in ("perfect", "partial")}))
        return await asyncio.gather(*tasks)

    assert asyncio.run(together()) == plain
    assert target.counts.num_preempted and target.num_open == 0
    target.check()


@pytest.mark.parametrize("name", ["greedy", "0.7, everything"])
def test_preemption_before_every_pass(name: str) -> None:
    """At every index of a generation with drafts, those that read the prompt among them."""
    small = tiny.model("qwen2", "float32")
    memory = 64 * 8 * small.num_layers * small.kv_heads * small.head_dim * BLOCK
    target = Robbed(small, kv_memory=memory, curve=CostCurve.flat(), passes=DevicePasses)
    target.forget = True
    request = request_of([i % 80 for i in range(300)], SAMPLING[name], max_tokens=16)
    plain, _ = speculate(fake(target), request, {})
    sources = sources_for(fake(target), request.prompt.tolist(), plain.tokens)
    indices = 0
    while target.at < target.num_runs:
        target.at, target.num_runs = indices, 0
        target.storage.forget()
        assert speculate(fake(target), request, {"partial": sources["partial"]})[0] == plain
        indices += 1
    assert indices > 5 and target.counts.num_preempted == indices - 1


def test_feedback_is_that_of_the_kernels() -> None:
    """The likeliest ids after every row of the prompt's end, of a tree and of its lookahead rows, where choices are ids."""
    request = replace(request_of([i % 77 for i in range(100)]), feedback_top_k=5, feedback_prompt=20)
    rows = LookaheadRows(np.array([5, 6], np.int32), np.array([-1, 0], np.int32))

    async def hear(target: LocalTarget) -> list[Any]:
        async with target.open(request) as sequence:
            tree = Session(request.prompt, ["one"], Calibration(), 8).tree([chain([3, 4])], CostCurve.flat())
            result = await sequence.step(tree.with_lookahead(rows))
        return [sequence.feedback, result.feedback]

    for found, expected in zip(asyncio.run(hear(device())), asyncio.run(hear(local("qwen2", "float32"))), strict=True):
        assert found.top_ids.dtype == np.int32 and np.array_equal(found.top_ids, expected.top_ids)
        assert np.array_equal(found.nodes, expected.nodes) and found.num_lookahead == expected.num_lookahead
        assert found.top_ids.shape[1] == 5


def test_a_pass_says_what_was_asked() -> None:
    """Ids by the rule, logits, few likeliest, many, none, and nothing at all, side by side: each what all logits lead to."""
    small = tiny.model("llama", "float32")
    passes = DevicePasses(small, 1 << 22)
    kernels = KernelPasses(small, 1 << 22)
    texts, chosen = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5]], Choices.of(SamplingParams(0.9, seed=7), np.array([4, 5, 6]))
    asks = [
        Ask(2, 3, None),
        Ask(1, 5, lambda: Choices.likeliest(1)),
        Ask(3, 0, lambda: chosen),
        Ask(0, 4, lambda: Choices.likeliest(0)),
    ]
    tokens = np.concatenate(texts).astype(np.int32)

    def parts(runner: DevicePasses | KernelPasses) -> list[Part]:
        tables = [KVTable(runner.storage) for _ in texts]
        for table, text in zip(tables, texts, strict=True):
            table.reserve(len(text))
        return [Part(table, tiny.chain(len(text))) for table, text in zip(tables, texts, strict=True)]

    whole = kernels.run(tokens, parts(kernels), [replace(ask, choose=None) for ask in asks])
    ids, some, few, nothing = passes.run(tokens, parts(passes), asks)
    assert ids.logits is not None and whole[0].logits is not None and ids.chosen is None
    assert np.abs(ids.logits - whole[0].logits).max() < 1e-4
    assert np.array_equal(ids.likeliest(3), whole[0].likeliest(3))
    assert some.logits is None and some.chosen is not None and some.chosen.tolist() == whole[1].likeliest(1)[:, 0].tolist()
    assert np.array_equal(some.likeliest(5), whole[1].likeliest(5))
    assert few.chosen is not None and few.chosen.shape == (3,) and few.likeliest(0).shape == (3, 0)
    assert nothing.chosen is not None and len(nothing.chosen) == 0


def test_all_usual_sizes_are_run_before_anybody_waits() -> None:
    """Warming up leaves buffers for each number of rows, and every page free; little memory is no hindrance."""
    small = tiny.model("llama", "float32")
    for num_pages in (64, 1):
        passes = DevicePasses(small, num_pages * 8 * small.num_layers * small.kv_heads * small.head_dim * BLOCK)
        passes.warm_up()
        assert [rows for rows, *_ in passes._runner._kept] == list(ROWS)
        assert passes.storage.num_free == passes.storage.num_blocks == num_pages


def test_where_flex_attention_does_not_run_pages_are_gathered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler that fails costs speed: the log says so. Who asked for it by name gets the error."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("engine.target.cuda.flex_attention", broken)
    passes = DevicePasses(tiny.model("llama", "float32"), 1 << 22)
    passes._runner._flexible = True  # as on CUDA
    passes.warm_up()
    assert "pages are gathered: no compiler here" in caplog.text and not passes._runner._flexible
    with pytest.raises(RuntimeError, match="no compiler here"):
        DevicePasses(tiny.model("llama", "float32"), 1 << 22, flexible=True).warm_up()


def test_a_step_costs_what_is_measured() -> None:
    """Without a fixed curve, passes of the device are timed at start, over pages that were never read."""
    target = device(curve=None)
    target.curve.validate()
    assert target.curve.rows.tolist()[-1] == 64 and target.num_open == 0
    assert not target.info.strict and target.info.dtype == "float32"


@pytest.mark.parametrize(
    ("sees", "wanted", "expected"),
    [
        (False, ("auto", "auto"), ("cpu", "int8")),
        (False, ("cpu", "bfloat16"), ("cpu", "bfloat16")),
        (True, ("auto", "auto"), ("cuda", "bfloat16")),
        (True, ("auto", "float32"), ("cuda", "float32")),
        (True, ("auto", "int8"), ("cpu", "int8")),
        (True, ("cpu", "auto"), ("cpu", "int8")),
        (True, ("cuda", "int8"), "int8 runs on the CPU alone"),
        (False, ("cuda", "auto"), "no CUDA device: torch"),
        (True, ("tpu", "auto"), "unknown device: tpu; choose one of auto, cpu, cuda"),
    ],
)
def test_devices_are_chosen_or_refused(
    monkeypatch: pytest.MonkeyPatch, sees: bool, wanted: tuple[str, str], expected: tuple[str, str] | str
) -> None:
    """auto takes a device that torch sees, unless int8 keeps it on the CPU; what is not there is refused with what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            model.choose_device(*wanted)
    else:
        where, dtype = model.choose_device(*wanted)
        assert (where.type, dtype) == expected


def test_a_model_lies_where_it_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker over a model on another device takes that device's passes; weights that do not fit are refused."""
    monkeypatch.setattr("engine.target.local.CPU", torch.device("meta"))  # so that the CPU is another device
    target = LocalTarget(tiny.model("llama", "float32"), kv_memory=1 << 22, curve=CostCurve.flat())
    assert isinstance(target._passes, DevicePasses)

    class Full:
        def to(self, device: torch.device) -> None:
            raise torch.OutOfMemoryError("full")

    some = replace(tiny.model("llama", "float32"), network=Full())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="do not fit on the device: cuda"):
        some.move(torch.device("cuda"))
