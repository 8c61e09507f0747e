"""One server for clients: the services, limits, and an end that finishes what was begun.

Health has two names. "" is liveness: SERVING from start to the end of the process. "draftloom.v1.GenerationService" is
readiness: SERVING between `set_ready(True)` and the beginning of the drain. Reflection is always on: grpcurl works unasked.
"""

from __future__ import annotations

import asyncio
import logging
import signal

import grpc
from grpc_health.v1 import health, health_pb2

from draftloom.v1 import corpus_pb2, corpus_pb2_grpc, generation_pb2, generation_pb2_grpc
from engine.requests import Engine
from engine.server.interceptors import Guard
from engine.server.listen import OPTIONS, add_health, bind
from engine.server.services import CorpusService, GenerationService, ModelService

log = logging.getLogger("draftloom.server")

DEFAULT_ADDRESS = "127.0.0.1:50151"
DRAIN_SECONDS = 30.0
MAX_CALLS = 4096
"""Calls at once, health and reflection among them: against floods. How many requests run together is the engine's to say."""
SETTLE_SECONDS = 0.5
"""For the last response to leave once its handler is done; calls that never end are cancelled then."""
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GrpcServer:
    """A bound server: `start()`, then `run_until_signal()`, or `drain()` when the time has come."""

    def __init__(self, server: grpc.aio.Server, guard: Guard, health_servicer: health.aio.HealthServicer, address: str) -> None:
        self._server = server
        self._guard = guard
        self._health = health_servicer
        self.address = address
        """Where clients connect: the address asked for, with the port that was chosen for port 0."""

    async def start(self, ready: bool = True) -> None:
        """Begin to answer; `ready=False` if the engine cannot serve yet."""
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(ready)
        await self._server.start()
        log.debug("listening on %s", self.address)

    async def set_ready(self, ready: bool) -> None:
        """What health says of the generation service."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(GENERATION, states.SERVING if ready else states.NOT_SERVING)

    async def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Say NOT_SERVING, refuse new calls, finish the calls begun for at most `seconds`, cancel the rest.

        Calls of health and reflection, which may last for ever, are not waited for. May be called again with fewer seconds.
        """
        await self.set_ready(False)
        await self._guard.stop(self._server, seconds, SETTLE_SECONDS)

    async def run_until_signal(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the calls at once. Main thread only."""
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signals.put_nowait, number)
        try:
            name = (await signals.get()).name
            log.info("%s: finishing what was begun, for at most %g s; a second signal stops at once", name, drain_seconds)
            draining = asyncio.create_task(self.drain(drain_seconds))
            again = asyncio.create_task(signals.get())
            await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
            if not again.cancel():
                await self._server.stop(0)
            await draining
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def create_server(
    engine: Engine, address: str = DEFAULT_ADDRESS, *, credentials: grpc.ServerCredentials | None = None
) -> GrpcServer:
    """A server bound to `address` (see `engine.server.listen.bind`) which answers after `start()`.

    Needs a running event loop. Raises ConfigError.
    """
    guard = Guard()
    server = grpc.aio.server(interceptors=[guard], options=OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(engine), server)
    generation_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(engine), server)
    corpus_pb2_grpc.add_CorpusServiceServicer_to_server(CorpusService(engine), server)
    health_servicer = add_health(server, generation_pb2.DESCRIPTOR, corpus_pb2.DESCRIPTOR)
    return GrpcServer(server, guard, health_servicer, bind(server, address, credentials))
