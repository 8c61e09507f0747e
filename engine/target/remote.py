"""A worker in another process or on another machine, behind the same interface as one in this.

One open sequence is one bidirectional stream. A connection that breaks raises WorkerLost; errors the worker raised on purpose
arrive as the same class, with the same message and field.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftloom.v1 import target_pb2, target_pb2_grpc
from engine.config import ModelSettings
from engine.drafters import Feedback
from engine.errors import EngineError, WorkerLost
from engine.server.errors import from_rpc_error
from engine.server.listen import MAX_MESSAGE_BYTES, read_pem
from engine.target import SequenceRequest, StepResult, TargetInfo, TargetStatus, wire
from engine.target.fleet import Connected, Place
from engine.tree import CandidateTree, CostCurve

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Find a worker's machine that vanished without closing its connections. A worker deep in a pass answers late, not never.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 60_000),
    # A worker that starts, or comes back, is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
CONNECT_SECONDS = 3.0
"""How long a fleet waits for a worker to answer before it says that nobody is there, and tries again."""
STATUS_SECONDS = 3.0
"""How long a worker may take to say how it stands."""
LOOK_SECONDS = 5.0
"""How often one looks whether it answers."""
CLOSE_SECONDS = 1.0
"""How long leaving a sequence waits for the worker to say that its memory is free."""


class RemoteTarget:
    """A worker at an address; see `connect`."""

    def __init__(self, channel: grpc.aio.Channel, info: TargetInfo, silent_seconds: float) -> None:
        self.info = info
        self._silent_seconds = silent_seconds
        self._watching: asyncio.Task[str] | None = None
        self._closed = False
        self._channel = channel
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(channel)

    @staticmethod
    async def connect(
        address: str,
        timeout: float = 30.0,
        credentials: grpc.ChannelCredentials | None = None,
        silent_seconds: float = ModelSettings.worker_silence,
    ) -> RemoteTarget:
        """Connect to unix:path or host:port, waiting at most `timeout` seconds for a worker to answer.

        Without `credentials` (see `tls`) the connection is plain text. `silent_seconds`: see `lost`. Raises WorkerLost, and
        ConfigError for a worker of another version.
        """
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        try:
            info = wire.info_from_wire(await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=timeout, wait_for_ready=True))
        except grpc.aio.AioRpcError as error:
            await channel.close()
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise WorkerLost(f"no worker answers within {timeout:g} s: {address}; is it running?") from None
            raise from_rpc_error(error) from None
        except BaseException:
            await channel.close()
            raise
        return RemoteTarget(channel, info, silent_seconds)

    @asynccontextmanager
    async def open(self, request: SequenceRequest) -> AsyncIterator[RemoteSequence]:
        """See engine.target.Target. Leaving waits, at most a second, until the worker has freed the sequence; an error or a
        cancellation in the body cancels the stream at once instead."""
        call = self._open_stub().Decode()
        try:
            opened = await _exchange(call, target_pb2.DecodeRequest(open=wire.open_to_wire(request)))
            about = opened.opened
            sequence = RemoteSequence(
                call, wire.curve_from_wire(about.curve), wire.feedback_from_wire(about.feedback), about.num_reused
            )
            yield sequence
            await _finish(call)
        finally:
            call.cancel()

    async def status(self) -> TargetStatus:
        """See engine.target.Target. One deep in a pass answers after it; who takes longer than `STATUS_SECONDS` is lost."""
        try:
            answer = await self._open_stub().GetStatus(target_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return wire.status_from_wire(answer.status)

    async def lost(self) -> str:
        """Returns, with the reason, once the worker is gone, says that it takes no new sequences, or hangs.

        A worker answers between its passes. One that does not for `silent_seconds`, though connected, is taken for one that
        never will: the connection is closed, so that sequences still open raise WorkerLost. That goes on after this has
        returned, until `close`: a worker that is about to end may hang as well.
        """
        self._watching = self._watching or asyncio.create_task(self._close_if_silent())
        gone = asyncio.create_task(self._gone())
        try:
            await asyncio.wait([gone, self._watching], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return gone.result()
            return "its connection was closed" if self._watching.cancelled() else self._watching.result()
        finally:
            gone.cancel()

    async def _close_if_silent(self) -> str:
        """Returns, with the reason, once the worker hangs and its connection is closed."""
        while not await self._is_silent():
            await asyncio.sleep(min(LOOK_SECONDS, self._silent_seconds))
        await self._close()
        return f"it hangs: no answer for {self._silent_seconds:g} s"

    async def _is_silent(self) -> bool:
        """Asks, again and again: True once there is no answer for `silent_seconds`, False once the connection breaks.

        A machine that sleeps comes back to waits that are over: so there are two, and what has arrived is read between them.
        """
        pulse = self._open_stub().Pulse()
        try:
            while True:
                asked = asyncio.create_task(_exchange(pulse, target_pb2.PulseRequest()))
                try:
                    for _ in range(2):
                        await asyncio.wait([asked], timeout=self._silent_seconds / 2)
                    if not asked.done():
                        return True
                    asked.result()
                finally:
                    asked.cancel()
                await asyncio.sleep(min(LOOK_SECONDS, self._silent_seconds))
        except EngineError:
            return False
        finally:
            pulse.cancel()

    async def _gone(self) -> str:
        """Returns once the worker ends, or is about to."""
        watching = self._health.Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in watching:
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    return "it takes no new sequences: it is about to end"
            return "it ended"
        except grpc.aio.AioRpcError as error:
            return str(from_rpc_error(error))
        finally:
            watching.cancel()

    async def close(self) -> None:
        """End the connection; sequences still open raise WorkerLost."""
        if self._watching is not None:
            self._watching.cancel()
        await self._close()

    async def _close(self) -> None:
        self._closed = True
        await self._channel.close()

    def _open_stub(self) -> Any:
        """Raises WorkerLost once the connection is closed; gRPC's own error then is one for programmers."""
        if self._closed:
            raise WorkerLost("the connection to the worker was closed")
        return self._stub


class RemoteSequence:
    """One sequence at a remote worker."""

    def __init__(self, call: Any, curve: CostCurve, feedback: Feedback, num_reused: int) -> None:
        self.curve = curve
        self.feedback = feedback
        self.num_reused = num_reused
        self._call = call
        self._finished = False

    async def step(self, tree: CandidateTree) -> StepResult:
        """See engine.target.TargetSequence. One step at a time."""
        if self._finished:
            raise RuntimeError("the sequence has finished")
        response = await _exchange(self._call, target_pb2.DecodeRequest(step=wire.tree_to_wire(tree)))
        if response.WhichOneof("response") == "refused":
            raise ValueError(response.refused.message)
        result = wire.step_from_wire(response.step)
        self.curve = result.curve or self.curve
        self._finished = bool(result.finish)
        return result


async def _exchange(call: Any, message: Message) -> Any:
    """One message there, one back. Raises what the worker raised, WorkerLost if it is gone."""
    try:
        with suppress(asyncio.InvalidStateError):  # the call is over: reading says why
            await call.write(message)
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerLost("the connection to the worker was closed") from None
    if response is grpc.aio.EOF:
        raise WorkerLost("the worker ended the sequence; it may be shutting down")
    return response


async def _finish(call: Any) -> None:
    """Say that no step follows, and wait until the worker has freed the sequence."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await call.done_writing()
            await call.code()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        return


def tls(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials:
    """Credentials for TLS: `ca` says whose certificates to believe (None: the system's), `cert` and `key` who we are (None: not
    said). Raises ConfigError for a file that cannot be read."""
    return grpc.ssl_channel_credentials(read_pem(ca), read_pem(key), read_pem(cert))


def place(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    silent_seconds: float = ModelSettings.worker_silence,
) -> Place:
    """A worker at an address, as one of a fleet."""

    async def connect() -> Connected:
        target = await RemoteTarget.connect(address, CONNECT_SECONDS, credentials, silent_seconds)
        return Connected(target, target.lost, target.close)

    return Place(address, connect)
