"""The services of draftloom.v1: one short method per RPC over an `engine.requests.Engine`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from draftloom.v1 import corpus_pb2, corpus_pb2_grpc, generation_pb2, generation_pb2_grpc
from engine.errors import InvalidRequest
from engine.requests import Engine, Final, GenerationEvent, GenerationRequest
from engine.server import wire
from engine.server.errors import SlowReader
from engine.server.interceptors import Context, tenant_of
from engine.target.wire import ids_array, status_to_wire

log = logging.getLogger("draftloom.server")

SLOW_READER_SECONDS = 60.0
"""How long one message may wait for its reader, while the request holds its memory at the worker."""
MAX_CHUNK_TOKENS = 1024


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Text."""

    def __init__(self, engine: Engine, slow_reader_seconds: float = SLOW_READER_SECONDS) -> None:
        self._engine = engine
        self._slow_reader_seconds = slow_reader_seconds

    async def Generate(self, message: generation_pb2.GenerateRequest, context: Context) -> generation_pb2.GenerateResponse:
        request = await self._request(message, context)
        response = generation_pb2.GenerateResponse(request_id=request.request_id, model=self._engine.info.model)
        async with aclosing(self._events(request)) as events:
            async for event in events:
                if isinstance(event, Final):
                    wire.set_final(response, event)
                    continue
                wire.add_chunk(response, event)
                if not response.source_names:
                    response.source_names.extend(event.sources)
        _check_ended(response)
        return response

    async def GenerateStream(self, message: generation_pb2.GenerateStreamRequest, context: Context) -> None:
        least = message.stream.min_chunk_tokens
        if least > MAX_CHUNK_TOKENS:
            raise InvalidRequest(f"at most {MAX_CHUNK_TOKENS}: {least}", "stream.min_chunk_tokens")
        request = await self._request(message, context)
        response = generation_pb2.GenerateStreamResponse(request_id=request.request_id, model=self._engine.info.model)
        named = False
        async with _Sender(context, self._slow_reader_seconds) as sender, aclosing(self._events(request)) as events:
            async for event in events:
                if isinstance(event, Final):
                    wire.set_final(response, event)
                    continue
                wire.add_chunk(response, event)
                if not named:
                    response.source_names.extend(event.sources)
                    named = True
                if len(response.token_ids) >= max(least, 1):
                    await sender.send(response)
                    response = generation_pb2.GenerateStreamResponse()
            _check_ended(response)
            await sender.send(response)

    async def _request(
        self, message: generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest, context: Context
    ) -> GenerationRequest:
        """Conversion encodes a chat, so it leaves the event loop."""
        engine = self._engine
        return await asyncio.to_thread(wire.request_from_wire, message, tenant_of(context), engine.info, engine.tokenizer)

    async def _events(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The engine's events, with fields in its errors named as the .proto names them; one line in the log at the end."""
        began, outcome = time.perf_counter(), "left by the client"
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Final):
                        counts = event.prompt_tokens, event.completion_tokens, event.tokens_per_step
                        outcome = "{}, {} + {} tokens, {:.2f} a step".format(event.finish, *counts)
                    yield event
        except Exception as error:
            outcome = getattr(error, "reason", "failed")
            if isinstance(error, InvalidRequest):
                error.field = wire.field_path(error.field)
            raise
        finally:
            log.info("request %s: %s, %.2f s", request.request_id, outcome, time.perf_counter() - began)


class _Sender:
    """Sends messages one after the other; each is on its way while the next step is made.

    A reader who does not take a message in time loses the call, so that its memory is freed. Leaving the context waits for the
    last message, also after an error in the body: gRPC can end no call whose message was withdrawn half-way.
    """

    def __init__(self, context: Context, slow_reader_seconds: float) -> None:
        self._context = context
        self._seconds = slow_reader_seconds
        self._sending: asyncio.Task[None] | None = None

    async def send(self, response: generation_pb2.GenerateStreamResponse) -> None:
        """Begin to send once the message before is out. Raises SlowReader if that one is not taken."""
        await self._sent()
        self._sending = asyncio.create_task(self._write(response))
        await asyncio.sleep(0)  # it is handed to gRPC before the caller goes on to compute

    async def __aenter__(self) -> _Sender:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            await self._sent()
        elif self._sending is not None:
            if isinstance(error, asyncio.CancelledError | GeneratorExit):
                self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _sent(self) -> None:
        if self._sending is not None:
            await self._sending

    async def _write(self, response: generation_pb2.GenerateStreamResponse) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._context.write(response)
        except TimeoutError:
            raise SlowReader(f"the stream was left unread: {self._seconds:g} s; read it, or cancel the call") from None


class ModelService(generation_pb2_grpc.ModelServiceServicer):
    """The model and its tokenizer. Text leaves the event loop while it is encoded."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetModelInfo(
        self, message: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        wire.check_model(message.model, self._engine.info.model)
        return wire.model_info_to_wire(self._engine.info, self._engine.sources)

    async def GetWorkerStatus(
        self, message: generation_pb2.GetWorkerStatusRequest, context: Context
    ) -> generation_pb2.GetWorkerStatusResponse:
        return generation_pb2.GetWorkerStatusResponse(status=status_to_wire(await self._engine.status()))

    async def Tokenize(self, message: generation_pb2.TokenizeRequest, context: Context) -> generation_pb2.TokenizeResponse:
        wire.check_model(message.model, self._engine.info.model)
        ids = await asyncio.to_thread(self._engine.tokenizer.encode, message.text, special=message.parse_special)
        return generation_pb2.TokenizeResponse(token_ids=ids.tolist())

    async def Detokenize(
        self, message: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        wire.check_model(message.model, self._engine.info.model)
        ids = ids_array(message.token_ids, "token_ids")
        vocab_size = self._engine.info.vocab_size
        if len(ids) and ids.max() >= vocab_size:
            raise InvalidRequest(f"token id outside [0, {vocab_size}): {ids.max()}", "token_ids")
        return generation_pb2.DetokenizeResponse(text=await asyncio.to_thread(self._engine.tokenizer.decode, ids))


class CorpusService(corpus_pb2_grpc.CorpusServiceServicer):
    """What there is to draft from."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ListCorpora(self, message: corpus_pb2.ListCorporaRequest, context: Context) -> corpus_pb2.ListCorporaResponse:
        return wire.corpora_to_wire(await self._engine.corpora(tenant_of(context)))


def _check_ended(response: generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse) -> None:
    """An answer without its Final would look complete to a client."""
    if not response.HasField("finish"):
        raise RuntimeError("the engine ended a request without a Final")
