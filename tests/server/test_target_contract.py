"""What every target promises, whichever it is: one body of tests, run over each implementation.

To add an implementation, add a factory to TARGETS: an async context manager that yields an open Rig.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.acceptance import LENGTH, STOP, Limits, SamplingParams
from engine.errors import InvalidRequest, PromptTooLong, WorkerLost
from engine.target import SequenceRequest, StepResult, Target, TargetSequence, TargetStatus
from engine.target.fake import FakeTarget
from engine.target.fleet import Fleet
from engine.target.remote import RemoteTarget, place
from engine.target.server import serve_target
from engine.tree import LOOKAHEAD, CandidateTree, CostCurve
from tests.server.scripted import eventually

PROMPT = [5, 9, 2, 9, 2]
CONTEXT = 96


@dataclass(frozen=True)
class Rig:
    """A target, and how much its open sequences hold: 0 when none is open."""

    target: Target
    held: Callable[[], int]


@asynccontextmanager
async def fake(tmp_path: Path) -> AsyncIterator[Rig]:
    """The hashed model in this process."""
    target = FakeTarget(64, context_length=CONTEXT, sharpness=2.0)
    yield Rig(target, lambda: target.num_open)
    await target.close()


@cache
def tiny_model(dtype: str) -> Any:
    """A tiny random Llama."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from engine.target.attention import KEY
    from engine.target.model import prepare

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        attn_implementation=KEY,
    )
    return prepare(transformers.LlamaForCausalLM(config).eval(), dtype)


@asynccontextmanager
async def local(tmp_path: Path, dtype: str, as_device: bool = False) -> AsyncIterator[Rig]:
    """The tiny Llama in this process, over the CPU's kernels or as it would run on a device."""
    model = tiny_model(dtype)
    import torch

    from engine.target.cuda import DevicePasses
    from engine.target.local import LocalTarget

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only loses by more, and much on a busy machine
    passes = DevicePasses if as_device else None
    target = LocalTarget(model, kv_memory=4 << 20, curve=CostCurve.flat(), passes=passes)
    free = target.storage.num_free
    yield Rig(target, lambda: free - target.storage.num_free)
    await target.close()
    torch.set_num_threads(num_threads)


def remote(inner: Callable[[Path], AbstractAsyncContextManager[Rig]]) -> Callable[[Path], AbstractAsyncContextManager[Rig]]:
    """`inner` behind gRPC on a Unix socket."""

    @asynccontextmanager
    async def factory(tmp_path: Path) -> AsyncIterator[Rig]:
        address = f"unix:{tmp_path}/worker.sock"
        async with inner(tmp_path) as rig:
            server = await serve_target(rig.target, address)
            target = await RemoteTarget.connect(address)
            assert target.info == rig.target.info
            yield Rig(target, rig.held)
            await target.close()
            await server.stop(None)

    return factory


def fleet(num_workers: int) -> Callable[[Path], AbstractAsyncContextManager[Rig]]:
    """Fakes behind gRPC, as one target."""

    @asynccontextmanager
    async def factory(tmp_path: Path) -> AsyncIterator[Rig]:
        fakes = [FakeTarget(64, context_length=CONTEXT, sharpness=2.0) for _ in range(num_workers)]
        servers = [await serve_target(each, f"unix:{tmp_path}/{i}.sock") for i, each in enumerate(fakes)]
        target = Fleet([place(server.address) for server in servers])
        await target.start()
        yield Rig(target, lambda: sum(each.num_open for each in fakes))
        await target.close()
        for server in servers:
            await server.stop(None)

    return factory


TARGETS: dict[str, Callable[[Path], AbstractAsyncContextManager[Rig]]] = {
    "fake": fake,
    "local-float32": lambda tmp_path: local(tmp_path, "float32"),
    "local-int8": lambda tmp_path: local(tmp_path, "int8"),
    "local-as-device": lambda tmp_path: local(tmp_path, "float32", as_device=True),
    "remote-fake": remote(fake),
    "fleet": fleet(2),
    "remote-local": remote(lambda tmp_path: local(tmp_path, "int8")),
}

Test = Callable[[Rig], Awaitable[None]]


@pytest.fixture(params=TARGETS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    """Runs a coroutine function on a rig of each implementation, then looks that nothing is held."""

    def run(test: Test) -> None:
        async def main() -> None:
            async with TARGETS[request.param](tmp_path) as rig:
                await test(rig)
                assert await eventually(lambda: rig.held() == 0)

        asyncio.run(main())

    return run


def asking(
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 24,
    min_tokens: int = 0,
    stop: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    **more: Any,
) -> SequenceRequest:
    limits = Limits(max_tokens, min_tokens, frozenset(stop))
    return SequenceRequest(np.array(prompt, np.int32), sampling or SamplingParams(), limits, "default", **more)


def tree_of(root: int, position: int, nodes: Sequence[tuple[int, int]], roles: Sequence[int] | None = None) -> CandidateTree:
    """A tree of (token, parent) pairs under the root, which is parent 0; path probabilities fall evenly."""
    n = len(nodes)
    return CandidateTree(
        np.array([root, *(token for token, _ in nodes)], np.int32),
        np.array([-1, *(parent for _, parent in nodes)], np.int32),
        np.linspace(1, 0.1, n + 1, dtype=np.float32),
        np.array([0, *[1] * n], np.int64),
        np.array([0, *(roles or [0] * n)], np.uint8),
        position,
    )


Propose = Callable[[list[int]], list[tuple[int, int]]]


async def decode(target: Target, request: SequenceRequest, propose: Propose = lambda tokens: []) -> list[StepResult]:
    """All steps of a request, with the nodes that `propose` gives for the tokens so far."""
    tokens, results = request.prompt.tolist(), list[StepResult]()
    async with target.open(request) as sequence:
        while not results or not results[-1].finish:
            results.append(await sequence.step(tree_of(tokens[-1], len(tokens) - 1, propose(tokens))))
            tokens += results[-1].tokens.tolist()
    return results


def said(results: Sequence[StepResult]) -> list[int]:
    """The tokens of all steps."""
    return [token for result in results for token in result.tokens.tolist()]


SAMPLED = SamplingParams(0.9, 40, 0.95, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=((7, 1.0),), seed=11)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_nothing(run: Callable[[Test], None], sampling: SamplingParams) -> None:
    """Right, wrong and half-right drafts give the tokens and logprobs of plain decoding, in fewer steps if they are right."""

    async def test(rig: Rig) -> None:
        request = asking(sampling=sampling, num_logprobs=2)
        plain = await decode(rig.target, request)
        answer = said(plain)
        assert len(answer) == len(plain) == 24 and plain[-1].finish == LENGTH

        def right(tokens: list[int]) -> list[tuple[int, int]]:
            ahead = answer[len(tokens) - len(PROMPT) :][:4]
            return [(token, i) for i, token in enumerate(ahead)]

        def wrong(tokens: list[int]) -> list[tuple[int, int]]:
            return [((token + 1) % 64, i) for token, i in right(tokens)]

        def bushy(tokens: list[int]) -> list[tuple[int, int]]:
            ahead = [*answer[len(tokens) - len(PROMPT) :], 0, 0][:2]
            first, second = ahead
            return [((first + 1) % 64, 0), (first, 0), (second, 1), ((second + 1) % 64, 2), (second, 2)]

        for propose in (right, wrong, bushy):
            results = await decode(rig.target, request, propose)
            assert said(results) == answer
            for kind in ("chosen", "top"):
                rows = [np.concatenate([getattr(r.logprobs, kind) for r in each]) for each in (results, plain)]
                assert np.allclose(*rows, rtol=0, atol=0 if rig.target.info.strict else 1e-4)
        assert len(await decode(rig.target, request, right)) == 5
        assert len(await decode(rig.target, request, bushy)) <= 12

    run(test)


def test_a_step_says_what_happened(run: Callable[[Test], None]) -> None:
    """The accepted path, its tokens with the bonus token, the verified nodes, feedback and logprobs fit together."""

    async def test(rig: Rig) -> None:
        answer = said(await decode(rig.target, asking()))
        request = asking(num_logprobs=3, feedback_top_k=4)
        async with rig.target.open(request) as sequence:
            sequence.curve.validate()
            tree = tree_of(PROMPT[-1], len(PROMPT) - 1, [((answer[0] + 1) % 64, 0), (answer[0], 0), (answer[1], 2)])
            result = await sequence.step(tree)
        assert result.path.tolist() == [2, 3] and result.tokens.tolist() == answer[:3] and result.finish == ""
        assert result.verified.tolist() == [0, 1, 2, 3] and result.seconds >= 0
        assert result.feedback.nodes.tolist() == tree.tokens[result.verified].tolist()
        assert result.feedback.top_ids.shape == (4, 4)
        assert result.feedback.top_ids[[0, 2, 3], 0].tolist() == answer[:3]
        assert result.logprobs is not None
        assert result.logprobs.chosen.shape == (3,) and result.logprobs.top.shape == result.logprobs.top_ids.shape == (3, 3)
        assert np.array_equal(result.logprobs.top[:, 0], result.logprobs.chosen)
        assert result.logprobs.top_ids[:, 0].tolist() == answer[:3]
        for array in (result.path, result.tokens, result.verified, result.feedback.nodes, result.feedback.top_ids):
            assert array.dtype == np.int32

    run(test)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_sequence_goes_on_where_another_was_lost(run: Callable[[Test], None], sampling: SamplingParams) -> None:
    """Opened with what was emitted so far, after any number of tokens, the rest is what it would have been, its end too."""

    async def test(rig: Rig) -> None:
        request = asking(max_tokens=12, min_tokens=10, stop=range(8), sampling=sampling)
        whole = await decode(rig.target, request)
        answer = said(whole)
        for done in (1, 2, 5, len(answer) - 1):
            prompt = np.array([*PROMPT, *answer[:done]], np.int32)
            rest = await decode(rig.target, replace(request, prompt=prompt, num_emitted=done))
            assert said(rest) == answer[done:] and rest[-1].finish == whole[-1].finish
        for wrong in (-1, len(PROMPT)):
            with pytest.raises((InvalidRequest, ValueError)):
                async with rig.target.open(replace(request, num_emitted=wrong)):
                    raise AssertionError("opened")

    run(test)


def test_the_prompts_end_is_heard_when_asked_for(run: Callable[[Test], None]) -> None:
    """Opening returns the likeliest next tokens along the prompt's end, last token left out: those a step gives there."""

    async def test(rig: Rig) -> None:
        async with rig.target.open(asking(feedback_top_k=3, feedback_prompt=4)) as sequence:
            feedback = sequence.feedback
        assert feedback.nodes.tolist() == list(PROMPT[-5:-1]) and feedback.parents.tolist() == [-1, 0, 1, 2]
        assert feedback.top_ids.shape == (4, 3) and feedback.top_ids.dtype == np.int32 and not feedback.num_lookahead
        for end in (2, 4):
            prompt = np.array(PROMPT[: len(PROMPT) - 5 + end], np.int32)
            async with rig.target.open(replace(asking(feedback_top_k=3), prompt=prompt)) as sequence:
                step = await sequence.step(tree_of(int(prompt[-1]), len(prompt) - 1, []))
            assert step.feedback.top_ids[0].tolist() == feedback.top_ids[end - 1].tolist()
        async with rig.target.open(asking(feedback_top_k=2, feedback_prompt=1000)) as sequence:
            assert sequence.feedback.nodes.tolist() == list(PROMPT[:-1])
        for rows, top_k in ((0, 3), (4, 0)):
            async with rig.target.open(asking(feedback_top_k=top_k, feedback_prompt=rows)) as sequence:
                assert not len(sequence.feedback.nodes) and sequence.feedback.top_ids.shape == (0, 0)

    run(test)


def test_nothing_comes_unasked(run: Callable[[Test], None]) -> None:
    """Without being asked for, there are no logprobs and no feedback; 0 asks for the emitted token's logprob alone."""

    async def test(rig: Rig) -> None:
        (first, *_) = await decode(rig.target, asking(max_tokens=2))
        assert first.logprobs is None and first.feedback.top_ids.shape == (0, 0)
        (first, *_) = await decode(rig.target, asking(max_tokens=2, num_logprobs=0))
        assert first.logprobs is not None and first.logprobs.top.shape == (1, 0) and first.logprobs.chosen[0] < 0

    run(test)


def test_an_ill_formed_tree_changes_nothing(run: Callable[[Test], None]) -> None:
    """Every kind of bad tree raises ValueError, and the sequence goes on as if it had not been."""

    async def test(rig: Rig) -> None:
        answer = said(await decode(rig.target, asking()))
        position = len(PROMPT) - 1
        good = tree_of(PROMPT[-1], position, [(answer[0], 0)])
        bad = [
            tree_of(PROMPT[-1] + 1, position, []),
            tree_of(PROMPT[-1], position + 1, []),
            tree_of(PROMPT[-1], position, [(64, 0)]),
            tree_of(PROMPT[-1], position, [(1, 1)]),
            tree_of(PROMPT[-1], position, [(1, -1)]),
            tree_of(PROMPT[-1], position, [(1, 0), (1, 0)]),
            tree_of(PROMPT[-1], position, [(1, 0), (2, 0)], roles=[LOOKAHEAD, 0]),
            CandidateTree(good.tokens, good.parents[:1], good.probs, good.sources, good.roles, position),
        ]
        async with rig.target.open(asking()) as sequence:
            for tree in bad:
                with pytest.raises(ValueError, match=r"tree|root"):
                    await sequence.step(tree)
            assert (await sequence.step(good)).tokens.tolist() == answer[:2]

    run(test)


def test_lookahead_rows_are_never_accepted(run: Callable[[Test], None]) -> None:
    """A lookahead row with the right token has feedback and is not entered."""

    async def test(rig: Rig) -> None:
        answer = said(await decode(rig.target, asking()))
        async with rig.target.open(asking(feedback_top_k=1)) as sequence:
            tree = tree_of(PROMPT[-1], len(PROMPT) - 1, [(answer[0], 0), (answer[1], 1)], roles=[LOOKAHEAD, LOOKAHEAD])
            result = await sequence.step(tree)
            assert result.tokens.tolist() == answer[:1] and not len(result.path)
            assert result.feedback.top_ids[:, 0].tolist() == answer[:3][: len(result.verified)]
            assert result.feedback.parents.tolist() == tree.parents[result.verified].tolist()
            assert result.feedback.num_lookahead == len(result.verified) - 1

    run(test)


def test_endings(run: Callable[[Test], None]) -> None:
    """A stop id ends a sequence in the middle of an accepted run; before min_tokens it is not chosen; then nothing follows."""

    async def test(rig: Rig) -> None:
        answer = said(await decode(rig.target, asking()))
        stop = answer[2]
        first = answer.index(stop)

        def right(tokens: list[int]) -> list[tuple[int, int]]:
            return [(token, i) for i, token in enumerate(answer[len(tokens) - len(PROMPT) :][:5])]

        results = await decode(rig.target, asking(stop=[stop]), right)
        assert said(results) == answer[: first + 1] and results[-1].finish == STOP
        late = said(await decode(rig.target, asking(stop=[stop], min_tokens=8)))
        assert stop not in late[:8]
        assert said(await decode(rig.target, asking(stop=[stop], min_tokens=8), right)) == late
        (only,) = await decode(rig.target, asking(max_tokens=1))
        assert only.tokens.tolist() == answer[:1] and only.finish == LENGTH
        async with rig.target.open(asking(max_tokens=1)) as sequence:
            tree = tree_of(PROMPT[-1], len(PROMPT) - 1, right(PROMPT))
            assert (await sequence.step(tree)).tokens.tolist() == answer[:1]
            with pytest.raises(RuntimeError, match="finished"):
                await sequence.step(CandidateTree.root_only(answer[0], len(PROMPT)))

    run(test)


def test_the_context_ends_the_answer(run: Callable[[Test], None]) -> None:
    """Prompt and answer fill the context to its last token, and no further, drafts or not."""

    async def test(rig: Rig) -> None:
        prompt = [i % 7 for i in range(CONTEXT - 5)]
        request = asking(prompt, max_tokens=50)
        plain = await decode(rig.target, request)
        assert len(said(plain)) == 5 and plain[-1].finish == LENGTH
        answer = said(plain)

        def right(tokens: list[int]) -> list[tuple[int, int]]:
            ahead = [*answer[len(tokens) - len(prompt) :], 1, 2, 3, 4][:6]
            return [(token, i) for i, token in enumerate(ahead)]

        assert said(await decode(rig.target, request, right)) == answer

    run(test)


def test_what_cannot_be_opened(run: Callable[[Test], None]) -> None:
    """A prompt that is too long, empty or no tokens, and a setting out of range, are refused by class and by field."""

    async def test(rig: Rig) -> None:
        for request, kind, field in [
            (asking(list(range(64)) * 2), PromptTooLong, "prompt"),
            (asking([]), InvalidRequest, "prompt"),
            (asking([64]), InvalidRequest, "prompt"),
            (asking(sampling=SamplingParams(top_p=0.0)), InvalidRequest, "top_p"),
            (asking(max_tokens=0), InvalidRequest, "max_tokens"),
            (asking(stop=[64]), InvalidRequest, "stop_token_ids"),
        ]:
            with pytest.raises(kind) as caught:
                async with rig.target.open(request):
                    raise AssertionError("opened")
            assert type(caught.value) is kind and caught.value.field == field and str(caught.value)

    run(test)


def test_sequences_do_not_disturb_one_another(run: Callable[[Test], None]) -> None:
    """Many at once, stepped in any order and some of them left, say what each says alone."""

    async def test(rig: Rig) -> None:
        requests = [asking([i + 1, 3, i + 2], max_tokens=10, sampling=SamplingParams(0.8, seed=i)) for i in range(5)]
        alone = [said(await decode(rig.target, request)) for request in requests]
        left = rig.target.open(asking())
        await (await left.__aenter__()).step(CandidateTree.root_only(PROMPT[-1], len(PROMPT) - 1))
        together = asyncio.gather(*(decode(rig.target, request, lambda tokens: [(tokens[-1], 0)]) for request in requests))
        await left.__aexit__(None, None, None)
        assert [said(results) for results in await together] == alone

    run(test)


@pytest.mark.parametrize("way", ["leave", "error", "cancel"])
def test_leaving_frees_everything(run: Callable[[Test], None], way: str) -> None:
    """However the context is left, nothing is held soon after."""

    async def test(rig: Rig) -> None:
        stepped = asyncio.Event()

        async def use(sequence: TargetSequence) -> None:
            tokens = list(PROMPT)
            while True:
                result = await sequence.step(CandidateTree.root_only(tokens[-1], len(tokens) - 1))
                tokens += result.tokens.tolist()
                assert rig.held() > 0
                stepped.set()
                if way == "leave":
                    return
                if way == "error":
                    _ = 1 / 0
                await asyncio.sleep(0)

        async def body() -> None:
            async with rig.target.open(asking(max_tokens=80)) as sequence:
                await use(sequence)

        task = asyncio.create_task(body())
        if way == "cancel":
            await stepped.wait()
            task.cancel()
        (ending,) = await asyncio.gather(task, return_exceptions=True)
        endings = {"leave": type(None), "error": ZeroDivisionError, "cancel": asyncio.CancelledError}
        assert type(ending) is endings[way]
        assert await eventually(lambda: rig.held() == 0, 0 if way == "leave" else 10)

    run(test)


def test_a_status_counts_what_is_open(run: Callable[[Test], None]) -> None:
    """Two sequences, one left: whoever asks is told, and blocks in use are those that are held."""

    async def test(rig: Rig) -> None:
        before = await rig.target.status()
        assert before.num_workers >= 1 and (before.num_open, before.num_waiting, before.num_blocks_used) == (0, 0, 0)
        async with rig.target.open(asking()):
            async with rig.target.open(asking()):
                assert (await rig.target.status()).num_open == 2
            now = await rig.target.status()
            assert now.num_open == 1 and now.num_blocks == before.num_blocks
            assert now.num_blocks_used == (rig.held() if now.num_blocks else 0)
        assert await eventually(lambda: rig.held() == 0)
        assert replace(await rig.target.status(), num_passes=0, num_read=0, num_reused=0) == replace(before, num_passes=0)

    run(test)


def test_reuse_is_counted_alike_here_and_there(tmp_path: Path) -> None:
    """What a worker has spared itself is the same number in this process and in a fleet behind gRPC, by request and in all."""

    async def use(target: Target) -> list[int | TargetStatus]:
        text, found = [i % 60 for i in range(80)], list[int | TargetStatus]()
        for prompt, tenant in ((text, "me"), (text, "me"), (text[:70], "me"), (text, "other"), (text[1:], "me")):
            async with target.open(replace(asking(prompt), tenant=tenant)) as sequence:
                await sequence.step(tree_of(prompt[-1], len(prompt) - 1, []))
                found.append(sequence.num_reused)
        return [*found, await target.status()]

    async def main() -> None:
        async with local(tmp_path, "int8") as rig:
            here = await use(rig.target)
        assert here[:5] == [0, 64, 64, 0, 0]
        status = here[5]
        assert isinstance(status, TargetStatus)
        assert (status.num_read, status.num_reused) == (79 + 15 + 5 + 79 + 78, 128) and status.num_blocks > 0
        async with local(tmp_path, "int8") as rig:
            server = await serve_target(rig.target, f"unix:{tmp_path}/worker.sock")
            target = Fleet([place(server.address)])
            await target.start()
            assert await use(target) == here
            await target.close()
            assert await target.status() == TargetStatus(num_workers=0), "nobody is there"
            await server.stop(None)

    asyncio.run(main())


def test_remote_adds_nothing(tmp_path: Path) -> None:
    """A remote worker gives exactly the results of the one behind it: every array, dtype and number."""
    from tests.server.test_wire import equal

    async def test() -> None:
        request = asking(sampling=SAMPLED, num_logprobs=2, feedback_top_k=3)

        def propose(tokens: list[int]) -> list[tuple[int, int]]:
            return [(tokens[-1], 0), (tokens[-2], 0), (tokens[-1], 1)] if tokens[-1] != tokens[-2] else []

        async with fake(tmp_path) as inner, remote(fake)(tmp_path) as outer:
            near, far = [await decode(rig.target, request, propose) for rig in (inner, outer)]
        assert len(near) == len(far) and all(equal(a, b) for a, b in zip(near, far, strict=True))

    asyncio.run(test())


def test_a_worker_that_goes_away_is_lost(tmp_path: Path) -> None:
    """A server that stops, a connection closed here, an address nobody serves: WorkerLost each time."""

    async def test() -> None:
        address = f"unix:{tmp_path}/worker.sock"
        inner = FakeTarget(64)
        with pytest.raises(WorkerLost, match="no worker answers"):
            await RemoteTarget.connect(address, timeout=0.2)
        root = CandidateTree.root_only(PROMPT[-1], len(PROMPT) - 1)

        server = await serve_target(inner, address)
        target = await RemoteTarget.connect(address)
        with pytest.raises(WorkerLost):
            async with target.open(asking()) as sequence:
                await server.stop(0)
                await sequence.step(root)
        with pytest.raises(WorkerLost):
            async with target.open(asking()):
                raise AssertionError("opened")
        await target.close()

        server = await serve_target(inner, address)
        target = await RemoteTarget.connect(address)
        with pytest.raises(WorkerLost, match="closed"):
            async with target.open(asking()) as sequence:
                await target.close()
                await sequence.step(root)
        await server.stop(0)
        assert await eventually(lambda: inner.num_open == 0)

    asyncio.run(test())
