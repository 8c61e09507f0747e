"""Both clients, against a real server."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

import draftloom
from engine.errors import CorpusUnusable, Exhausted, WorkerLost
from tests.server.scripted import ScriptedEngine, eventually, serving, serving_in_thread


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition()` becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_generate_and_stream_give_one_completion() -> None:
    """The whole answer is the same either way, and so are its chunks put together; sync and async agree."""
    options: dict[str, Any] = {"max_tokens": 8, "logprobs": 1, "seed": 3, "request_id": "r"}
    engine = ScriptedEngine()
    with serving_in_thread(engine) as address, draftloom.Client(address) as client:
        whole = client.generate("abc", **options)
        with client.stream("abc", **options) as stream:
            assert stream.completion is None
            chunks = list(stream)
        assert stream.completion == whole
    assert "".join(chunk.text for chunk in chunks) == whole.text == "abcabcab"
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert sum((chunk.sources for chunk in chunks), ()) == whole.sources
    assert sum((chunk.logprobs for chunk in chunks), ()) == whole.logprobs
    assert whole.sources[:4] == (("corpus:code",), ("corpus:code", "prompt"), (), ("corpus:code",))
    assert whole.logprobs[0] == draftloom.TokenLogprob(-0.5, ((whole.token_ids[0], -0.5),))
    assert (whole.finish_reason, whole.stop_string, whole.stop_token_id) == ("length", None, None)
    assert (whole.usage, whole.seed, whole.request_id) == (draftloom.Usage(3, 8), 3, "r")
    assert whole.statistics.corpora == {"code": "v7"} and whole.statistics.warnings == ("corpus docs is damaged",)
    assert whole.statistics.prefix_tokens_reused == 2
    corpus = draftloom.SourceStatistics("corpus:code", 9, 4, 2, 1, 0, 0.25, 0.5, 6, 3)
    assert whole.statistics.sources[0] == corpus and whole.statistics.tokens_per_step == 8 / 3

    async def run() -> None:
        async with serving(ScriptedEngine()) as server, draftloom.AsyncClient(server.address) as client:
            assert await client.generate("abc", **options) == whole
            async with client.stream("abc", **options) as stream:
                assert [chunk async for chunk in stream] == chunks
            assert stream.completion == whole

    asyncio.run(run())


def test_the_rest_of_the_surface() -> None:
    """Model, workers, corpora, text to ids and back, waiting for the server: sync and async say the same."""
    with serving_in_thread(ScriptedEngine()) as address, draftloom.Client(address) as client:
        ids = client.tokenize("é<|end|>")
        sync = (client.wait_ready(), client.model_info(), client.corpora(), ids, client.detokenize(ids), client.worker_status())
        assert client.tokenize("<|end|>", parse_special=True) == [256]
    assert sync[0] == sync[1] and sync[1].sources == ("corpus", "prompt") and sync[1].strict
    assert [(c.name, c.num_tokens, c.usable) for c in sync[2]] == [("code", 1234, True), ("docs", 0, False)]
    assert sync[4] == "é<|end|>"
    assert sync[5] == draftloom.WorkerStatus(2, 0, 3, 40, 17, 2**40, 500, 128, 6)

    async def run() -> None:
        async with serving(ScriptedEngine()) as server, draftloom.AsyncClient(server.address) as client:
            ids = await client.tokenize("é<|end|>")
            infos = await client.wait_ready(), await client.model_info()
            texts = ids, await client.detokenize(ids)
            assert (*infos, await client.corpora(), *texts, await client.worker_status()) == sync

    asyncio.run(run())


@pytest.mark.parametrize("way", ["break", "error", "with", "close", "forget"])
def test_leaving_a_stream_early_cancels_it(way: str) -> None:
    """However a stream is left, the server stops working on it."""
    engine = ScriptedEngine(pause=0.005)
    with serving_in_thread(engine) as address, draftloom.Client(address) as client:
        stream = client.stream("abc", max_tokens=100_000)
        if way == "break":
            for _ in stream:
                break
        elif way == "error":
            with pytest.raises(ZeroDivisionError):
                for chunk in stream:
                    _ = len(chunk.token_ids) / 0
        elif way == "with":
            with stream:
                assert soon(lambda: engine.num_steps > 1)
        elif way == "close":
            assert soon(lambda: engine.num_steps > 1)
            stream.close()
        else:
            assert soon(lambda: engine.num_steps > 1)
            del stream
            gc.collect()
        assert soon(lambda: engine.num_open == 0)
        assert 0 < engine.num_steps < 10_000
        if way != "forget":
            assert stream.completion is None


@pytest.mark.parametrize("way", ["break", "error", "with", "task"])
def test_leaving_an_async_stream_early_cancels_it(way: str) -> None:
    """The same for asyncio, where also the task may be cancelled."""

    async def run() -> None:
        engine = ScriptedEngine(pause=0.005)
        async with serving(engine) as server, draftloom.AsyncClient(server.address) as client:

            async def read() -> None:
                async for chunk in client.stream("abc", max_tokens=100_000):
                    if way == "break":
                        break
                    if way == "error":
                        _ = len(chunk.token_ids) / 0

            if way == "break":
                await read()
            elif way == "error":
                with pytest.raises(ZeroDivisionError):
                    await read()
            elif way == "with":
                async with client.stream("abc", max_tokens=100_000):
                    assert await eventually(lambda: engine.num_steps > 1)
            else:
                task = asyncio.create_task(read())
                assert await eventually(lambda: engine.num_steps > 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await eventually(lambda: engine.num_open == 0)
            assert 0 < engine.num_steps < 10_000

    asyncio.run(run())


def test_cancelling_an_awaited_answer_cancels_it() -> None:
    """A cancelled task does not leave its request running."""

    async def run() -> None:
        engine = ScriptedEngine(pause=0.005)
        async with serving(engine) as server, draftloom.AsyncClient(server.address) as client:
            task = asyncio.create_task(client.generate("abc", max_tokens=100_000))
            assert await eventually(lambda: engine.num_steps > 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await eventually(lambda: engine.num_open == 0)

    asyncio.run(run())


def test_errors_are_typed_and_name_fields() -> None:
    """What the server refuses raises the right class, with its reason, the field, and when to try again."""
    with serving_in_thread(ScriptedEngine()) as address, draftloom.Client(address) as client:
        with pytest.raises(draftloom.InvalidRequest, match=r"sampling.top_p: must be") as bad:
            client.generate("x", top_p=0)
        assert (bad.value.code, bad.value.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert bad.value.violations[0].field == "sampling.top_p"
        assert bad.value.violations[0].description.startswith("must be above 0")
        with pytest.raises(draftloom.InvalidRequest) as bad:
            list(client.stream("", max_tokens=1))
        assert bad.value.violations[0].field == "prompt"
        with pytest.raises(draftloom.NotFound, match="no such model: other"):
            client.generate("x", model="other")


@pytest.mark.parametrize(
    ("fail", "kind", "retry_after"),
    [
        (Exhausted("no room: 4"), draftloom.Exhausted, 1.0),
        (WorkerLost("gone"), draftloom.Unavailable, 1.0),
        (CorpusUnusable("corpus docs is damaged"), draftloom.FailedPrecondition, None),
        (KeyError("secret"), draftloom.DraftloomError, None),
    ],
)
def test_errors_in_the_middle_of_a_stream(fail: Exception, kind: type[Exception], retry_after: float | None) -> None:
    """Chunks that came before an error are kept; the error is typed."""

    async def run() -> None:
        async with serving(ScriptedEngine(fail=fail)) as server, draftloom.AsyncClient(server.address) as client:
            chunks = []
            with pytest.raises(kind) as caught:
                async for chunk in client.stream("abc"):
                    chunks.append(chunk)
            assert type(caught.value) is kind and caught.value.retry_after == retry_after  # type: ignore[attr-defined]
            assert [chunk.text for chunk in chunks] == ["abc"]
            assert "secret" not in str(caught.value)

    asyncio.run(run())


def test_timeouts_end_on_both_sides() -> None:
    """A call's timeout, or else the client's, raises DeadlineExceeded, and the server stops."""
    engine = ScriptedEngine(pause=0.005)
    with serving_in_thread(engine) as address, draftloom.Client(address, timeout=0.3) as client:
        with pytest.raises(draftloom.DeadlineExceeded):
            client.generate("abc", max_tokens=100_000)
        with pytest.raises(draftloom.DeadlineExceeded):
            list(client.stream("abc", max_tokens=100_000, timeout=0.2))
        assert soon(lambda: engine.num_open == 0)


def test_steps_are_told_if_asked_for() -> None:
    """A trace comes with each chunk and with the whole answer, sources by name; sizes come always."""
    with serving_in_thread(ScriptedEngine()) as address, draftloom.Client(address) as client:
        with client.stream("abc", max_tokens=5, trace=True) as stream:
            chunks = list(stream)
        answer = client.generate("abc", max_tokens=5, trace=True)
        assert [step for chunk in chunks for step in chunk.steps] == list(answer.steps)
        first, second = answer.steps
        assert (first.texts, second.texts) == ((b"a", b"b", b"c"), (b"a", b"b"))
        assert (first.num_lookahead, first.pass_seconds, first.costs) == (2, 0.0625, ((1, 0.05), (4, 0.0625)))
        wrong = draftloom.TraceNode(256, b"<|end|>", 0, 0.25, ("corpus:code", "prompt"), True, False)
        assert first.nodes[2] == wrong and first.nodes[0].parent == -1 and first.nodes[1].accepted
        plain = client.generate("abc", max_tokens=5)
        assert (plain.steps, plain.sizes) == ((), (1, 1, 1, 1, 1))


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("127.0.0.1:1", "connection refused"),
        ("no-such-host.invalid:1", "no such host"),
        ("127.0.0.1:port", "its port is not a number"),
    ],
)
def test_who_cannot_be_reached_is_told_in_one_sentence(address: str, cause: str) -> None:
    """The address, the cause, and what to do: no gRPC internals."""
    with draftloom.Client(address) as client, pytest.raises(draftloom.Unavailable) as caught:
        client.model_info()
    advice = "start one with `draftloom serve`, or name another address"
    assert str(caught.value) == f"no server answers at {address}: {cause}; {advice}"


def test_nobody_there() -> None:
    """Without a server the address is named, and waiting for one has an end."""
    with draftloom.Client("127.0.0.1:1") as client:
        with pytest.raises(draftloom.Unavailable, match=r"no server answers at 127\.0\.0\.1:1"):
            client.generate("x")
        with pytest.raises(draftloom.DeadlineExceeded):
            client.wait_ready(timeout=0.2)


def test_a_client_outlives_its_server() -> None:
    """A client that lost its server works again when one is back."""

    async def run() -> None:
        async with serving(ScriptedEngine()) as server:
            address = server.address
            client = draftloom.AsyncClient(address)
            assert (await client.generate("x", max_tokens=1)).text == "x"
        with pytest.raises(draftloom.Unavailable):
            await client.generate("x")
        from engine.server.serve import create_server

        again = create_server(ScriptedEngine(), address)
        await again.start()
        assert (await client.wait_ready(10)).model == "scripted"
        await client.close()
        await again.drain(0)

    asyncio.run(run())


def test_the_client_imports_nothing_of_the_engine() -> None:
    """Importing the client loads neither the engine nor what only the engine needs."""
    code = (
        "import sys, draftloom; "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('engine', 'retriever', 'corpora', 'numpy', 'numba', 'tokenizers', 'torch')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
