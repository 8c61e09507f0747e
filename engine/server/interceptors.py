"""Around every call: bytes are decoded, errors become statuses, and the tenant is decided, in one place each.

grpc.aio by itself answers undecodable bytes and unforeseen exceptions with UNKNOWN and the exception's text. Here the former
are INVALID_ARGUMENT, and the latter INTERNAL with a reference to the log: text nobody meant for a client stays in the process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from engine.errors import EngineError
from engine.server.errors import MalformedRequest, internal_status, to_status

log = logging.getLogger("draftloom.server")

Context = grpc.aio.ServicerContext[Any, Any]
Deserializer = Callable[[bytes], Any]


def tenant_of(context: Context) -> str:
    """Whose request this is. Until clients authenticate nothing they send can say so, and all are one tenant."""
    return "default"


class Guard(grpc.aio.ServerInterceptor):
    """Decodes requests and maps errors, for all four kinds of calls.

    A handler may be a coroutine function or, with a streamed response, an async generator function; it never sees bytes and
    raises errors of `engine.errors`. Whatever it holds open is closed before the call ends, also when the client is gone.

    Methods that are `endless`, and those of gRPC's own services (health, reflection), are served like any other, but a server
    that stops does not wait for them.
    """

    def __init__(self, endless: frozenset[str] = frozenset()) -> None:
        self._endless = endless
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def stop(self, server: grpc.aio.Server, seconds: float | None, settle: float | None) -> None:
        """Have `server` refuse new calls, finish those begun for at most `seconds`, and cancel the rest. None: at once.

        Endless calls are not waited for: once no other is being served they have `settle` seconds. May be called again with
        fewer.
        """
        stopping = asyncio.create_task(server.stop(seconds))
        idle = asyncio.create_task(self._idle.wait())
        await asyncio.wait([stopping, idle], return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        await server.stop(settle)
        await stopping

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        if method in self._endless or method.startswith("/grpc."):
            yield
            return
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return None
        method = handler_call_details.method
        decode = _decoder(handler.request_deserializer)
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def call(raw: Any, context: Context) -> Any:
            with self._counted(method):
                return await guarded(raw, context)

        async def guarded(raw: Any, context: Context) -> Any:
            async with errors_as_status(context, method):
                request = _decode_all(raw, decode) if handler.request_streaming else decode(raw)
                if not inspect.isasyncgenfunction(inner):
                    return await inner(request, context)
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

        kind = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return kind(call, None, handler.response_serializer)


@asynccontextmanager
async def errors_as_status(context: Context, method: str) -> AsyncIterator[None]:
    """End the call with the right status if the body raises. A cancelled call and an abort by the body itself pass through."""
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except EngineError as error:
        await _abort(context, to_status(error))
    except Exception:
        reference = uuid.uuid4().hex[:12]
        log.exception("%s failed (ref %s)", method, reference)
        await _abort(context, internal_status(reference))


async def _abort(context: Context, status: status_pb2.Status) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(status))


def _decoder(deserialize: Deserializer | None) -> Deserializer:
    """`deserialize`, with bytes that are no such message as MalformedRequest."""

    def decode(raw: bytes) -> Any:
        try:
            return raw if deserialize is None else deserialize(raw)
        except (DecodeError, ValueError):
            raise MalformedRequest(
                f"the request's bytes are not the message this method takes: {len(raw)} bytes; "
                "check the client's .proto files, and that strings are UTF-8"
            ) from None

    return decode


async def _decode_all(raw: AsyncIterator[bytes], decode: Deserializer) -> AsyncIterator[Any]:
    async for item in raw:
        yield decode(item)
