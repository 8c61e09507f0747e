"""Starts a worker as a child process and connects to it over a Unix socket that only this user can reach.

The child ends with this process, whatever ends it: it holds a pipe whose other end is here (`engine.spawn.end_with_parent`). As
one of a fleet it is started anew when it dies.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from engine.config import ModelSettings
from engine.errors import ModelError, WorkerLost
from engine.spawn import running
from engine.target.fleet import Connected, Place
from engine.target.remote import RemoteTarget
from engine.target.sockets import SocketFolder

SPIN_COUNT = "10000"
"""How long an idle thread of the worker's team spins for the next product: through the gaps within a pass (some 50
microseconds), but not through those between passes, when this process needs the cores. A GOMP_SPINCOUNT that is set wins."""
EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""gRPC's name for reading sockets on the thread that waits for calls, as it used to, instead of handing what arrives from
thread to thread: with few cores that takes a tenth off what a step costs beside its pass. It is read when gRPC is imported, so
this process is not concerned. A GRPC_EXPERIMENTS that is set wins."""
MOST_FAILURES = 5
"""Deaths and failed starts in a row, without a minute of life between them, after which the worker is given up."""
START_SECONDS = 600.0
"""A large model may have to be read from a slow disk."""
STOP_SECONDS = 5.0
NUM_LAST_LINES = 12


class WorkerProcess:
    """A running worker: `target` to talk to it, `wait()` to learn that it died, `close()` to end it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: SocketFolder) -> None:
        self.process = process
        self.target: RemoteTarget
        self._folder = folder
        self._tail = b""
        self._relay = asyncio.create_task(self._relay_stderr())

    @property
    def last_lines(self) -> str:
        """The end of what the worker wrote to its standard error."""
        return "\n".join(self._tail.decode(errors="replace").splitlines()[-NUM_LAST_LINES:])

    async def wait(self) -> int:
        """The exit code, once the worker has ended (negative: the signal that ended it)."""
        code = await self.process.wait()
        await asyncio.shield(self._relay)
        return code

    async def lost(self) -> str:
        """Returns, with the reason, once the worker has ended or its connection broke."""
        ended = asyncio.create_task(self.wait())
        broken = asyncio.create_task(self.target.lost())
        try:
            await asyncio.wait([ended, broken], return_when=asyncio.FIRST_COMPLETED)
            return f"it ended with exit code {ended.result()}" if ended.done() else broken.result()
        finally:
            ended.cancel()
            broken.cancel()

    async def close(self) -> None:
        """Disconnect, ask the worker to end, and make it end after a few seconds. Safe to call twice."""
        if hasattr(self, "target"):
            await self.target.close()
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self._relay
        self._folder.remove()

    async def _relay_stderr(self) -> None:
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(4096):
            self._tail = (self._tail + chunk)[-4096:]
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()


async def start_worker(
    args: Sequence[str], timeout: float = START_SECONDS, silent_seconds: float = ModelSettings.worker_silence
) -> WorkerProcess:
    """Start `python -m engine.target.server` with `args` (`--address` is chosen here) and wait until it answers.

    What it writes to standard error comes out on ours. Raises ModelError with its last lines if it ends while starting,
    WorkerLost if it does not answer within `timeout` seconds; no process is left then.
    """
    folder = SocketFolder()
    process = await asyncio.create_subprocess_exec(
        *(*running("engine.target.server"), "--address", folder.address, "--with-parent", *args),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"GOMP_SPINCOUNT": SPIN_COUNT, "GRPC_EXPERIMENTS": EXPERIMENTS, **os.environ},
    )
    worker = WorkerProcess(process, folder)
    ended = asyncio.create_task(process.wait())
    connecting = asyncio.create_task(RemoteTarget.connect(folder.address, timeout, silent_seconds=silent_seconds))
    try:
        await asyncio.wait([ended, connecting], return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            code = await worker.wait()
            raise ModelError(f"the worker ended while starting, with exit code {code}:\n{worker.last_lines}")
        worker.target = connecting.result()
    except BaseException as error:
        connecting.cancel()
        await asyncio.shield(worker.close())
        if isinstance(error, WorkerLost):
            raise WorkerLost(f"the worker did not answer within {timeout:g} s:\n{worker.last_lines}") from None
        raise
    finally:
        ended.cancel()
    return worker


def place(args: Sequence[str], silent_seconds: float = ModelSettings.worker_silence) -> Place:
    """A worker process of one's own, as one of a fleet."""

    async def connect() -> Connected:
        worker = await start_worker(args, silent_seconds=silent_seconds)
        return Connected(worker.target, worker.lost, worker.close)

    return Place("worker process", connect, MOST_FAILURES)
