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
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftloom.v1 import target_pb2, target_pb2_grpc
from engine.drafters import Feedback
from engine.errors import WorkerLost
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
SILENT_SECONDS = 60.0
"""A worker that answers nothing for so long hangs."""
LOOK_SECONDS = 5.0
"""How often one looks whether it answers."""
CLOSE_SECONDS = 1.0
"""How long leaving a sequence waits for the worker to say that its memory is free."""


class RemoteTarget:
    """A worker at an address; see `connect`."""

    def __init__(self, channel: grpc.aio.Channel, info: TargetInfo, silent_seconds: float) -> None:
        self.info = info
        self._silent_seconds = silent_seconds
        self._channel = channel
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(channel)

    @staticmethod
    async def connect(
        address: str,
        timeout: float = 30.0,
        credentials: grpc.ChannelCredentials | None = None,
        silent_seconds: float = SILENT_SECONDS,
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
        call = self._stub.Decode()
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
            answer = await self._stub.GetStatus(target_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return wire.status_from_wire(answer.status)

    async def lost(self) -> str:
        """Returns, with the reason, once the worker is gone, says that it takes no new sequences, or hangs.

        A worker answers between its passes. One that does not for `silent_seconds`, though connected, is taken for one that
        never will: the connection is closed, so that sequences still open raise WorkerLost.
        """
        gone, silent = asyncio.create_task(self._gone()), asyncio.create_task(self._silent())
        try:
            await asyncio.wait([gone, silent], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return gone.result()
            await self.close()
            return silent.result()
        finally:
            gone.cancel()
            silent.cancel()

    async def _silent(self) -> str:
        """Returns once two questions in a row had no answer: a machine that slept meanwhile is forgiven one."""
        num_missed = 0
        while num_missed < 2:
            try:
                await self._health.Check(health_pb2.HealthCheckRequest(), timeout=self._silent_seconds / 2)
                num_missed = 0
            except grpc.aio.AioRpcError as error:
                num_missed = num_missed + 1 if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else 0
            if not num_missed:
                await asyncio.sleep(min(LOOK_SECONDS, self._silent_seconds))
        return f"it hangs: no answer for {self._silent_seconds:g} s"

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
        await self._channel.close()


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


async def _exchange(call: Any, message: target_pb2.DecodeRequest) -> target_pb2.DecodeResponse:
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
    return response  # type: ignore[no-any-return]


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


def place(address: str, credentials: grpc.ChannelCredentials | None = None, silent_seconds: float = SILENT_SECONDS) -> Place:
    """A worker at an address, as one of a fleet."""

    async def connect() -> Connected:
        target = await RemoteTarget.connect(address, CONNECT_SECONDS, credentials, silent_seconds)
        return Connected(target, target.lost, target.close)

    return Place(address, connect)
