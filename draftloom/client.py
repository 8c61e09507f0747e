"""The clients: `Client` blocks, `AsyncClient` awaits; otherwise they are the same.

A stream that is left early, by `break`, an exception, `close()` or the end of its `with`, is cancelled, and the server frees
what it held within one step. (gRPC alone lets the server run to the end.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from draftloom import convert
from draftloom.errors import Unavailable, from_rpc_error
from draftloom.types import Chunk, Completion, Corpus, ModelInfo, Options, Prompt, WorkerStatus
from draftloom.v1 import corpus_pb2, corpus_pb2_grpc, generation_pb2, generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50151"

_POLL_SECONDS = 0.1
"""How often a server that is still loading is asked again."""

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class _Stubs:
    """The server's methods over one channel, sync or async."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.model: Any = generation_pb2_grpc.ModelServiceStub(channel)
        self.corpus: Any = corpus_pb2_grpc.CorpusServiceStub(channel)


class Client:
    """A blocking client. Threads may share it. It connects with the first call, and again if the server went away.

        with draftloom.Client() as client:
            print(client.generate("def fibonacci(n):", max_tokens=64).text)

    `credentials` (`grpc.ssl_channel_credentials(...)`) encrypt the connection, which is plain text otherwise; `timeout` in
    seconds holds for every call that gives none. All methods raise `draftloom.DraftloomError`.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        if credentials is None:
            channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._stubs = _Stubs(channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to `prompt` (text, token ids or chat messages); see Options."""
        request = convert.request(generation_pb2.GenerateRequest, prompt, options)
        with self._errors():
            return convert.completion(self._stubs.generation.Generate(request, timeout=self._timeout(options)))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer as it comes.

            with client.stream("def fibonacci(n):") as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            print(stream.completion.statistics.tokens_per_step)
        """
        request = convert.request(generation_pb2.GenerateStreamRequest, prompt, options)
        return Stream(self._stubs.generation.GenerateStream(request, timeout=self._timeout(options)), self.address)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The model's token ids for `text`; `parse_special` reads control tokens in it as such."""
        request = generation_pb2.TokenizeRequest(text=text, parse_special=parse_special)
        with self._errors():
            return list(self._stubs.model.Tokenize(request, timeout=self.timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        with self._errors():
            return str(self._stubs.model.Detokenize(request, timeout=self.timeout).text)

    def model_info(self) -> ModelInfo:
        """What the server serves."""
        with self._errors():
            request = generation_pb2.GetModelInfoRequest()
            return convert.model_info(self._stubs.model.GetModelInfo(request, timeout=self.timeout))

    def worker_status(self) -> WorkerStatus:
        """How the server's workers stand."""
        with self._errors():
            request = generation_pb2.GetWorkerStatusRequest()
            return convert.worker_status(self._stubs.model.GetWorkerStatus(request, timeout=self.timeout))

    def corpora(self) -> list[Corpus]:
        """What there is to draft from, by name."""
        with self._errors():
            return convert.corpora(self._stubs.corpus.ListCorpora(corpus_pb2.ListCorporaRequest(), timeout=self.timeout))

    def wait_ready(self, timeout: float = 60.0) -> ModelInfo:
        """Wait, at most `timeout` seconds, until the server has loaded its model; for scripts that have just started it."""
        end = time.monotonic() + timeout
        request = generation_pb2.GetModelInfoRequest()
        while True:
            try:
                with self._errors():
                    left = max(0.0, end - time.monotonic())
                    return convert.model_info(self._stubs.model.GetModelInfo(request, timeout=left, wait_for_ready=True))
            except Unavailable:
                if time.monotonic() + _POLL_SECONDS > end:
                    raise
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Disconnect; calls still running are cancelled."""
        self._stubs.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _timeout(self, options: Options) -> float | None:
        timeout = options.get("timeout")
        return self.timeout if timeout is None else timeout

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None


class Stream:
    """An answer on its way: iterate over its chunks, once. `completion` is the whole answer, when it has come."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._gathering = convert.Gathering()

    @property
    def completion(self) -> Completion | None:
        """The whole answer; None before the end, or if the stream was left early."""
        return self._gathering.completion()

    def __iter__(self) -> Generator[Chunk, None, None]:
        try:
            for message in self._call:
                if chunk := self._gathering.add(message):
                    yield chunk
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from None
        finally:
            self.close()

    def close(self) -> None:
        """Stop: the server frees the request within one step. Does nothing after the end."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncClient:
    """The client for asyncio; see `Client`. It belongs to the event loop of its first call.

        async with draftloom.AsyncClient() as client:
            async with client.stream("def fibonacci(n):") as stream:
                async for chunk in stream:
                    print(chunk.text, end="", flush=True)
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._credentials = credentials
        self._connected: _Stubs | None = None

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """See Client.generate. Cancelling the task cancels the request on the server."""
        request = convert.request(generation_pb2.GenerateRequest, prompt, options)
        async with self._errors():
            return convert.completion(await self._stubs.generation.Generate(request, timeout=self._timeout(options)))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """See Client.stream. Not awaited itself: the call begins here, and is waited for in the iteration."""
        request = convert.request(generation_pb2.GenerateStreamRequest, prompt, options)
        return AsyncStream(self._stubs.generation.GenerateStream(request, timeout=self._timeout(options)), self.address)

    async def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See Client.tokenize."""
        request = generation_pb2.TokenizeRequest(text=text, parse_special=parse_special)
        async with self._errors():
            return list((await self._stubs.model.Tokenize(request, timeout=self.timeout)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See Client.detokenize."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        async with self._errors():
            return str((await self._stubs.model.Detokenize(request, timeout=self.timeout)).text)

    async def model_info(self) -> ModelInfo:
        """See Client.model_info."""
        async with self._errors():
            request = generation_pb2.GetModelInfoRequest()
            return convert.model_info(await self._stubs.model.GetModelInfo(request, timeout=self.timeout))

    async def worker_status(self) -> WorkerStatus:
        """See Client.worker_status."""
        async with self._errors():
            request = generation_pb2.GetWorkerStatusRequest()
            return convert.worker_status(await self._stubs.model.GetWorkerStatus(request, timeout=self.timeout))

    async def corpora(self) -> list[Corpus]:
        """See Client.corpora."""
        async with self._errors():
            request = corpus_pb2.ListCorporaRequest()
            return convert.corpora(await self._stubs.corpus.ListCorpora(request, timeout=self.timeout))

    async def wait_ready(self, timeout: float = 60.0) -> ModelInfo:
        """See Client.wait_ready."""
        end = time.monotonic() + timeout
        request = generation_pb2.GetModelInfoRequest()
        while True:
            try:
                async with self._errors():
                    left = max(0.0, end - time.monotonic())
                    return convert.model_info(await self._stubs.model.GetModelInfo(request, timeout=left, wait_for_ready=True))
            except Unavailable:
                if time.monotonic() + _POLL_SECONDS > end:
                    raise
                await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Disconnect; calls still running are cancelled."""
        if self._connected is not None:
            await self._connected.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _stubs(self) -> _Stubs:
        """A channel of grpc.aio is bound to the running loop, so it is made by the first call and not by the constructor."""
        if self._connected is None:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(self.address, self._credentials, options=_CHANNEL_OPTIONS)
            self._connected = _Stubs(channel)
        return self._connected

    def _timeout(self, options: Options) -> float | None:
        timeout = options.get("timeout")
        return self.timeout if timeout is None else timeout

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None


class AsyncStream:
    """An answer on its way; see Stream. After a bare `break` it is cancelled when Python lets go of the iterator, which is at
    once in CPython; `async with` does not leave it to that."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self._gathering = convert.Gathering()

    @property
    def completion(self) -> Completion | None:
        """The whole answer; None before the end, or if the stream was left early."""
        return self._gathering.completion()

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        try:
            async for message in self._call:
                if chunk := self._gathering.add(message):
                    yield chunk
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from None
        finally:
            self.close()

    def close(self) -> None:
        """Stop: the server frees the request within one step. Does nothing after the end."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
