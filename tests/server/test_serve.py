"""A real server on loopback, spoken to as strangers would: with the right messages, with wrong ones, and with none."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc._cython.cygrpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

import draftloom
from draftloom.v1 import corpus_pb2, corpus_pb2_grpc, generation_pb2, generation_pb2_grpc
from engine.errors import ConfigError, Exhausted, InvalidRequest
from engine.server import services
from engine.server.listen import MAX_MESSAGE_BYTES, OPTIONS
from engine.server.serve import GENERATION, create_server
from tests.server.scripted import ScriptedEngine, eventually, serving

GENERATE = "/draftloom.v1.GenerationService/Generate"
STREAM = "/draftloom.v1.GenerationService/GenerateStream"


@asynccontextmanager
async def connected(engine: ScriptedEngine) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server over `engine`."""
    async with serving(engine) as server, grpc.aio.insecure_channel(server.address) as channel:
        yield channel


def reason_of(error: grpc.RpcError) -> str:
    """The reason in a status's ErrorInfo."""
    status = rpc_status.from_call(error)
    assert status is not None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            assert info.domain == "draftloom"
            return str(info.reason)
    raise AssertionError("the status has no ErrorInfo")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def stream_request(text: str = "abc", **changes: Any) -> generation_pb2.GenerateStreamRequest:
    return generation_pb2.GenerateStreamRequest(prompt=generation_pb2.Prompt(text=text), **changes)


def test_unary_and_stream_say_the_same() -> None:
    """The messages of a stream, put together, are the unary answer; only the first is named, only the last is final."""

    async def run() -> None:
        async with connected(ScriptedEngine()) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            changes: dict[str, Any] = {"max_tokens": 8, "logprobs": 1, "request_id": "r", "sampling": {"seed": 5}}
            changes["speculation"] = {"trace": True}
            whole = await stub.Generate(generation_pb2.GenerateRequest(prompt={"text": "abc"}, **changes))
            parts = [part async for part in stub.GenerateStream(stream_request(**changes))]
            assert [len(part.token_ids) for part in parts] == [3, 3, 2, 0]
            assert [bool(part.source_names) for part in parts] == [True, False, False, False]
            assert [part.HasField("finish") for part in parts] == [False, False, False, True]
            joined = generation_pb2.GenerateStreamResponse()
            for part in parts:
                joined.MergeFrom(part)
            joined.text = "".join(part.text for part in parts)
            assert joined.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)
            assert (whole.text, whole.seed, whole.request_id) == ("abcabcab", 5, "r")
            assert (whole.statistics.num_steps, whole.statistics.mean_tokens_per_step) == (3, 8 / 3)

    asyncio.run(run())


def test_small_chunks_are_gathered() -> None:
    """With min_chunk_tokens, every message but the last has so many tokens; text and masks stay complete."""

    async def run() -> None:
        async with connected(ScriptedEngine()) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            request = stream_request(max_tokens=10, stream={"min_chunk_tokens": 5})
            parts = [part async for part in stub.GenerateStream(request)]
            assert [len(part.token_ids) for part in parts] == [6, 4]
            assert [len(part.source_masks) for part in parts] == [6, 4]
            assert "".join(part.text for part in parts) == "abcabcabca"
            error = await failure(anext(aiter(stub.GenerateStream(stream_request(stream={"min_chunk_tokens": 5000})))))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_model_and_corpora_are_told() -> None:
    """The model's facts, text to ids and back, and corpora with what is wrong with them."""

    async def run() -> None:
        engine = ScriptedEngine()
        async with connected(engine) as channel:
            model: Any = generation_pb2_grpc.ModelServiceStub(channel)
            info = await model.GetModelInfo(generation_pb2.GetModelInfoRequest())
            assert (info.model, info.vocab_size, info.max_nodes) == ("scripted", 257, 63)
            assert list(info.sources) == ["corpus", "prompt"]
            ids = (await model.Tokenize(generation_pb2.TokenizeRequest(text="é<|end|>"))).token_ids
            assert list(ids) == engine.tokenizer.encode("é<|end|>").tolist()
            parsed = await model.Tokenize(generation_pb2.TokenizeRequest(text="<|end|>", parse_special=True))
            assert list(parsed.token_ids) == [256]
            assert (await model.Detokenize(generation_pb2.DetokenizeRequest(token_ids=ids))).text == "é<|end|>"
            error = await failure(model.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[257])))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            error = await failure(model.Tokenize(generation_pb2.TokenizeRequest(model="other", text="x")))
            assert error.code() == grpc.StatusCode.NOT_FOUND
            corpora: Any = corpus_pb2_grpc.CorpusServiceStub(channel)
            listed = (await corpora.ListCorpora(corpus_pb2.ListCorporaRequest())).corpora
            assert [(c.name, c.usable) for c in listed] == [("code", True), ("docs", False)]
            assert listed[1].problem == "built for another tokenizer; tenant default"

    asyncio.run(run())


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x1a\x04\x0a\x02\xff\xfe", b"\x1a\x7f"], ids=["bad", "UTF-8", "cut"])
@pytest.mark.parametrize("method", [GENERATE, STREAM])
def test_malformed_bytes_are_the_clients_fault(raw: bytes, method: str) -> None:
    """Bytes that are no message, or hold a string that is no UTF-8, are INVALID_ARGUMENT, and the engine never sees them."""

    async def run() -> None:
        engine = ScriptedEngine()
        async with connected(engine) as channel:
            call = channel.unary_unary(method)(raw) if method == GENERATE else anext(aiter(channel.unary_stream(method)(raw)))
            error = await failure(call)
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
            assert not engine.requests

    asyncio.run(run())


def test_a_bad_field_is_named_in_the_details() -> None:
    """BadRequest names the field by its path, in a stream too."""

    async def run() -> None:
        async with connected(ScriptedEngine()) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            error = await failure(anext(aiter(stub.GenerateStream(stream_request(sampling={"top_p": 2})))))
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
            status = rpc_status.from_call(error)
            bad = error_details_pb2.BadRequest()
            assert status is not None and any(detail.Unpack(bad) for detail in status.details)
            assert [v.field for v in bad.field_violations] == ["sampling.top_p"]

    asyncio.run(run())


def test_errors_of_the_engine_keep_their_meaning() -> None:
    """An error in the middle of an answer becomes its status, and its field is named as the .proto does."""

    async def run() -> None:
        for fail, code in [
            (InvalidRequest("not on this target", "logit_bias"), grpc.StatusCode.INVALID_ARGUMENT),
            (Exhausted("no room for more sequences: 4"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ]:
            async with connected(ScriptedEngine(fail=fail)) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                error = await failure(stub.Generate(generation_pb2.GenerateRequest(prompt={"text": "x"})))
                assert (error.code(), reason_of(error)) == (code, fail.reason)
                if code == grpc.StatusCode.INVALID_ARGUMENT:
                    assert error.details() == "sampling.logit_bias: not on this target"

    asyncio.run(run())


def test_unforeseen_errors_leak_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A client gets a reference and not a word of the exception; the log has both."""

    async def run() -> None:
        engine = ScriptedEngine(fail=KeyError("/home/someone/secret"))
        async with connected(engine) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            for call in (
                stub.Generate(generation_pb2.GenerateRequest(prompt={"text": "x"})),
                [part async for part in _until_error(stub.GenerateStream(stream_request()))],
            ):
                error = call[-1] if isinstance(call, list) else await failure(call)
                assert (error.code(), reason_of(error)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
                assert "secret" not in str(error.details()) and "KeyError" not in str(error.trailing_metadata())
                reference = error.details().split("ref ")[1][:12]
                assert any(reference in record.getMessage() and record.exc_info for record in caplog.records)
        assert engine.num_open == 0

    with caplog.at_level(logging.ERROR, "draftloom.server"):
        asyncio.run(run())


async def _until_error(call: Any) -> AsyncIterator[Any]:
    """What a stream gives, its error last."""
    try:
        async for part in call:
            yield part
    except grpc.aio.AioRpcError as error:
        yield error


@pytest.mark.parametrize("way", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("method", [GENERATE, STREAM])
def test_a_call_that_ends_early_frees_everything(way: str, method: str) -> None:
    """Cancelled, timed out or cut off: the engine stops at the next step and holds nothing."""

    async def run() -> None:
        engine = ScriptedEngine(pause=0.005)
        async with serving(engine) as server:
            channel = grpc.aio.insecure_channel(server.address)
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            timeout = 0.6 if way == "deadline" else None
            if method == GENERATE:
                request = generation_pb2.GenerateRequest(prompt={"text": "abc"}, max_tokens=100_000)
                call = stub.Generate(request, timeout=timeout)
            else:
                call = stub.GenerateStream(stream_request(max_tokens=100_000), timeout=timeout)
                assert (await call.read()).text == "abc"
            assert await eventually(lambda: engine.num_steps >= 2)
            if way == "cancel":
                call.cancel()
            elif way == "disconnect":
                await channel.close()
            assert await eventually(lambda: engine.num_open == 0)
            stopped_at = engine.num_steps
            await asyncio.sleep(0.05)
            assert engine.num_steps == stopped_at < 1000
            await channel.close()

    asyncio.run(run())


def test_the_log_has_one_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """The caller's id, how it ended and what it cost; not a word of its text."""

    async def run() -> None:
        async with connected(ScriptedEngine(pause=0.001)) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Generate(generation_pb2.GenerateRequest(prompt={"text": "secret"}, max_tokens=6, request_id="one"))
            call = stub.GenerateStream(stream_request("secret", max_tokens=100_000, request_id="two"))
            await call.read()
            call.cancel()
            assert await eventually(lambda: len(lines()) == 2)
        async with connected(ScriptedEngine(fail=Exhausted("full"))) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            await failure(stub.Generate(generation_pb2.GenerateRequest(prompt={"text": "secret"}, request_id="three")))

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]

    with caplog.at_level(logging.INFO, "draftloom.server"):
        asyncio.run(run())
    assert [line.rpartition(",")[0] for line in lines()] == [
        "request one: length, 6 + 6 tokens, 3.00 a step",
        "request two: left by the client",
        "request three: EXHAUSTED",
    ]
    assert "secret" not in caplog.text


def test_an_unread_stream_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who stops reading does not hold the worker's memory for ever."""
    monkeypatch.setattr(services.GenerationService.__init__, "__defaults__", (0.5,))

    async def run() -> None:
        engine = ScriptedEngine()
        async with connected(engine) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            request = stream_request(max_tokens=1_000_000, logprobs=1, stream={"min_chunk_tokens": 1000})
            parts = _until_error(stub.GenerateStream(request))
            await anext(parts)
            assert await eventually(lambda: engine.num_open == 0)
            error = [part async for part in parts][-1]
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")

    asyncio.run(run())


def test_messages_have_a_limit() -> None:
    """A request beyond 8 MiB is refused before it is read."""

    async def run() -> None:
        async with connected(ScriptedEngine()) as channel:
            error = await failure(channel.unary_unary(GENERATE)(b"\x00" * (MAX_MESSAGE_BYTES + 1)))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(run())


def test_health_follows_readiness() -> None:
    """Alive from the start; ready when said to be; unknown services are NOT_FOUND."""

    async def run() -> None:
        states = health_pb2.HealthCheckResponse
        server = create_server(ScriptedEngine(), "127.0.0.1:0")
        await server.start(ready=False)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)

            async def check(name: str) -> int:
                return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)

            assert (await check(""), await check(GENERATION)) == (states.SERVING, states.NOT_SERVING)
            await server.set_ready(True)
            assert await check("draftloom.v1.GenerationService") == states.SERVING
            error = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
            assert error.code() == grpc.StatusCode.NOT_FOUND
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
            assert (await watch.read()).status == states.SERVING
            draining = asyncio.create_task(server.drain(20))
            assert (await watch.read()).status == states.NOT_SERVING
            async with asyncio.timeout(10):  # the watch, which would go on for ever, is not waited for
                await draining

    asyncio.run(run())


def test_reflection_lists_the_services() -> None:
    """What grpcurl asks first has an answer."""

    async def run() -> None:
        async with connected(ScriptedEngine()) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = {service.name for service in (await call.read()).list_services_response.service}
            ours = {f"draftloom.v1.{name}Service" for name in ("Generation", "Model", "Corpus")}
            assert names == ours | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

    asyncio.run(run())


@pytest.mark.parametrize("detail", ["ErrorInfo", "BadRequest", "RetryInfo"])
def test_reflection_knows_the_details_of_errors(detail: str) -> None:
    """No method names these messages, so a client without `.proto` files reads details only if it can ask for them."""

    async def run() -> None:
        async with connected(ScriptedEngine()) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"google.rpc.{detail}")
            response = await stub.ServerReflectionInfo(iter([asked])).read()
            file = descriptor_pb2.FileDescriptorProto.FromString(response.file_descriptor_response.file_descriptor_proto[0])
            assert detail in {message.name for message in file.message_type}

    asyncio.run(run())


def test_an_address_in_use_is_named() -> None:
    """A second server on one port fails, clearly; so does an address that is none."""

    async def run() -> None:
        async with serving(ScriptedEngine()) as server:
            with pytest.raises(ConfigError, match=f"cannot listen on: {server.address}"):
                create_server(ScriptedEngine(), server.address)
        for address in ("localhost", "host:port", "127.0.0.1:65536"):
            with pytest.raises(ConfigError, match="not an address"):
                create_server(ScriptedEngine(), address)

    asyncio.run(run())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        async def taken() -> None:
            with pytest.raises(ConfigError, match=str(port)):
                create_server(ScriptedEngine(), f"127.0.0.1:{port}")

        asyncio.run(taken())


def test_connections_can_be_encrypted(tmp_path: Path) -> None:
    """With credentials the server speaks TLS, and the client that trusts its certificate reaches it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])

    async def run() -> None:
        server = create_server(ScriptedEngine(), "localhost:0", credentials=credentials)
        await server.start()
        trust = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with draftloom.AsyncClient(server.address, credentials=trust) as client:
            assert (await client.generate("abc", max_tokens=3)).text == "abc"
        async with draftloom.AsyncClient(server.address) as client:
            with pytest.raises(draftloom.Unavailable):
                await client.generate("abc")
        await server.drain(0)

    asyncio.run(run())


def test_draining_finishes_what_was_begun() -> None:
    """A stream that is open when the drain begins ends as it should; a new call is refused."""

    async def run() -> None:
        engine = ScriptedEngine(pause=0.02)
        async with serving(engine) as server, grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            stream = _until_error(stub.GenerateStream(stream_request(max_tokens=30)))
            await anext(stream)
            draining = asyncio.create_task(server.drain(20))
            await asyncio.sleep(0.05)
            error = await failure(stub.Generate(generation_pb2.GenerateRequest(prompt={"text": "x"})))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            parts = [part async for part in stream]
            assert parts[-1].usage.completion_tokens == 30
            await draining

    asyncio.run(run())


def test_a_drain_has_an_end() -> None:
    """What takes longer than the drain allows is cancelled, and freed."""

    async def run() -> None:
        engine = ScriptedEngine(pause=0.01)
        async with serving(engine) as server, grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            parts = _until_error(stub.GenerateStream(stream_request(max_tokens=1_000_000)))
            await anext(parts)
            await server.drain(0.1)
            assert await eventually(lambda: engine.num_open == 0)
            assert [part async for part in parts][-1].code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_signal_drains() -> None:
    """SIGTERM finishes what was begun; a second one does not wait for it."""

    async def run(max_tokens: int, signals: int) -> int:
        engine = ScriptedEngine(pause=0.01)
        server = create_server(engine, "127.0.0.1:0")
        await server.start()
        running = asyncio.create_task(server.run_until_signal(60))
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            stream = _until_error(stub.GenerateStream(stream_request(max_tokens=max_tokens)))
            await anext(stream)
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
            parts = [part async for part in stream]
            async with asyncio.timeout(20):
                await running
            assert await eventually(lambda: engine.num_open == 0)
            return parts[-1].usage.completion_tokens if hasattr(parts[-1], "usage") else 0

    assert asyncio.run(run(max_tokens=60, signals=1)) == 60
    assert asyncio.run(run(max_tokens=1_000_000, signals=2)) == 0


def test_option_names_are_known_to_grpc() -> None:
    """gRPC ignores a misspelt option in silence, and only complains of a misspelt experiment: each must be in its library."""
    with open(grpc._cython.cygrpc.__file__, "rb") as library:
        names = library.read()
    from draftloom.client import _CHANNEL_OPTIONS
    from engine.target.process import EXPERIMENTS
    from engine.target.remote import OPTIONS as REMOTE_OPTIONS

    options = [name for name, _ in (*OPTIONS, *REMOTE_OPTIONS, *_CHANNEL_OPTIONS)]
    for name in options + [name.removeprefix("-") for name in EXPERIMENTS.split(",")]:
        assert name.encode() + b"\x00" in names


def test_a_message_is_on_its_way_while_the_next_is_made() -> None:
    """Sending returns when gRPC has the message, the next waits until it is out, leaving waits for the last."""
    written: list[Any] = []
    gate = asyncio.Event()

    class Reader:
        async def write(self, message: Any) -> None:
            written.append(message)
            await gate.wait()

    reader: Any = Reader()
    one: Any = 1
    two: Any = 2

    async def run() -> None:
        async with services._Sender(reader, 5.0) as sender:
            await sender.send(one)
            assert written == [1]
            second = asyncio.create_task(sender.send(two))
            await asyncio.sleep(0.01)
            assert written == [1] and not second.done()
            gate.set()
            await second
        assert written == [1, 2]

    asyncio.run(run())
