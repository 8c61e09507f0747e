"""A worker as a process of its own: any target behind draftloom.v1.TargetService. `draftloom worker` is the same for people.

    python -m engine.target.server --address unix:/run/worker.sock --model smollm2-135m --dtype int8

The pass runs on the thread of the event loop, on purpose: a second busy Python thread beside it would slow it down many times
over. So the process does nothing but passes and the messages between them, and answers health checks when a pass is done.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2

from draftloom.v1 import target_pb2, target_pb2_grpc
from engine.config import is_loopback
from engine.errors import ConfigError, EngineError, InvalidRequest, ModelError, WorkerLost
from engine.server.interceptors import Context, Guard
from engine.server.listen import OPTIONS, add_health, bind, read_pem
from engine.spawn import end_with_parent
from engine.target import Target, TargetSequence, wire

log = logging.getLogger("draftloom.worker")

STOP_SECONDS = 5.0
SETTLE_SECONDS = 0.2
"""For the last response to leave."""
ENDLESS = frozenset({"/draftloom.v1.TargetService/Pulse"})
"""Calls that last as long as their connection."""


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """One Decode stream is one sequence, held in the target's own context: however the stream ends, the sequence is freed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.lost = asyncio.Event()
        """Set when the target is lost, as where its device has failed: then nothing but another process helps."""

    async def GetInfo(self, message: target_pb2.GetInfoRequest, context: Context) -> target_pb2.GetInfoResponse:
        return wire.info_to_wire(self._target.info)

    async def GetStatus(self, message: target_pb2.GetStatusRequest, context: Context) -> target_pb2.GetStatusResponse:
        return target_pb2.GetStatusResponse(status=wire.status_to_wire(await self._target.status()))

    async def Pulse(self, messages: AsyncIterator[target_pb2.PulseRequest], context: Context) -> None:
        async for _ in messages:
            await context.write(target_pb2.PulseResponse())

    async def Decode(self, messages: AsyncIterator[target_pb2.DecodeRequest], context: Context) -> None:
        try:
            await self._decode(messages, context)
        except WorkerLost:
            self.lost.set()
            raise

    async def _decode(self, messages: AsyncIterator[target_pb2.DecodeRequest], context: Context) -> None:
        first = await anext(messages, None)
        if first is None:
            return
        if first.WhichOneof("request") != "open":
            raise InvalidRequest("a Decode stream begins with it", "open")
        async with self._target.open(wire.open_from_wire(first.open)) as sequence:
            opened = target_pb2.OpenResponse(
                curve=wire.curve_to_wire(sequence.curve),
                feedback=wire.feedback_to_wire(sequence.feedback),
                num_reused=sequence.num_reused,
            )
            await context.write(target_pb2.DecodeResponse(opened=opened))
            async for message in messages:
                if message.WhichOneof("request") != "step":
                    raise InvalidRequest("the sequence is open; only steps may follow", "step")
                await context.write(await _step(sequence, message.step))


async def _step(sequence: TargetSequence, message: target_pb2.StepRequest) -> target_pb2.DecodeResponse:
    """An ill-formed tree leaves the sequence as it was, so the stream goes on."""
    try:
        result = await sequence.step(wire.tree_from_wire(message))
    except ValueError as error:
        return target_pb2.DecodeResponse(refused=target_pb2.StepRefused(message=str(error)))
    return target_pb2.DecodeResponse(step=wire.step_to_wire(result))


class TargetServer:
    """A started server of a target, healthy; see `serve_target`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        guard: Guard,
        health_servicer: health.aio.HealthServicer,
        address: str,
        lost: asyncio.Event,
    ) -> None:
        self._server = server
        self._guard = guard
        self._health = health_servicer
        self.address = address
        """Where engines connect: the address asked for, with the port that was chosen for port 0."""
        self.lost = lost
        """See `TargetService`."""

    async def stop(self, seconds: float | None) -> None:
        """Take no new sequences, give those that are open `seconds` (None: none) to end, cancel the rest."""
        await self._health.enter_graceful_shutdown()
        await self._guard.stop(self._server, seconds, SETTLE_SECONDS if seconds else None)


async def serve_target(target: Target, address: str, credentials: grpc.ServerCredentials | None = None) -> TargetServer:
    """Serve `target` at `address`. Stopping the server leaves `target` open.

    Raises ConfigError if the address cannot be bound.
    """
    guard = Guard(ENDLESS)
    server = grpc.aio.server(interceptors=[guard], options=OPTIONS)
    service = TargetService(target)
    target_pb2_grpc.add_TargetServiceServicer_to_server(service, server)
    health_servicer = add_health(server, target_pb2.DESCRIPTOR)
    await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    bound = bind(server, address, credentials)
    await server.start()
    return TargetServer(server, guard, health_servicer, bound, service.lost)


def load(args: argparse.Namespace) -> Target:
    """The target the command line asks for. Raises ModelError, ConfigError."""
    if args.fake:
        from engine.target.fake import FakeTarget

        return FakeTarget(vocab_size=args.fake_vocab, fingerprint=args.fake_fingerprint)
    try:
        from engine.target.local import LocalTarget
    except ModuleNotFoundError as error:
        raise ModelError(f"a package is not installed: {error.name}; pip install 'draftloom[worker]'") from None

    target: Target = LocalTarget.load(
        args.model, device=args.device, dtype=args.dtype, threads=args.threads, kv_memory=args.kv_memory
    )
    return target


async def run(args: argparse.Namespace) -> None:
    """Load, serve until a signal, close. Raises WorkerLost once the target is lost, for another process to begin anew."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM,) if args.with_parent else (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    credentials = tls(args.tls_cert, args.tls_key, args.tls_ca)
    target = load(args)
    server = await serve_target(target, args.address, credentials)
    log.info("worker for %s at %s", target.info.model, server.address)
    ends = [asyncio.create_task(each.wait()) for each in (stopped, server.lost)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(SETTLE_SECONDS if server.lost.is_set() else args.drain_seconds)
    await target.close()
    if server.lost.is_set():
        raise WorkerLost("the target is lost, so this worker ends")


def tls(cert: Path | None, key: Path | None, ca: Path | None) -> grpc.ServerCredentials | None:
    """Who the worker says it is, and whose certificates an engine must show (`ca`; None: it need show none). None: plain text.

    Raises ConfigError for one without the other, and for a file that cannot be read.
    """
    if (cert is None) != (key is None) or (ca is not None and cert is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key; --tls-ca comes on top of them")
    if cert is None:
        return None
    pairs = [(read_pem(key) or b"", read_pem(cert) or b"")]
    return grpc.ssl_server_credentials(pairs, read_pem(ca), require_client_auth=ca is not None)


def check_address(address: str, encrypted: bool, insecure: bool) -> None:
    """Raise ConfigError for an address that others reach, in plain text, unless that is wanted."""
    host = address.rpartition(":")[0].strip("[]")
    if host and not (address.startswith("unix:") or encrypted or insecure or is_loopback(host)):
        raise ConfigError(
            f"not a loopback address, and connections are plain text: {address}; give --tls-cert and --tls-key, or --insecure"
        )


def parser() -> argparse.ArgumentParser:
    """Options of a worker; `engine.target.process` starts one with them."""
    parser = argparse.ArgumentParser(prog="python -m engine.target.server", description="A Draftloom target worker.")
    parser.add_argument("--address", required=True, help="unix:PATH or HOST:PORT; anyone who can connect can use the model")
    parser.add_argument("--model", help="name, folder or file of the model")
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto: cuda where there is one, unless dtype is int8")
    parser.add_argument("--dtype", default="auto", help="int8, bfloat16 or float32; auto: int8 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, help="threads of a pass; default: one for each physical core")
    parser.add_argument("--kv-memory", type=int, default=2 << 30, help="bytes for keys and values of open sequences")
    parser.add_argument("--fake", action="store_true", help="a hashed language model without weights, for tests")
    parser.add_argument("--fake-vocab", type=int, default=64, help="its vocabulary")
    parser.add_argument("--fake-fingerprint", default="fake", help="what it says its tokenizer is")
    parser.add_argument("--tls-cert", type=Path, help="certificate of the worker (PEM)")
    parser.add_argument("--tls-key", type=Path, help="its key")
    parser.add_argument("--tls-ca", type=Path, help="whose certificates an engine must show")
    parser.add_argument("--insecure", action="store_true", help="allow plain text beyond loopback")
    parser.add_argument("--drain-seconds", type=float, default=STOP_SECONDS, help="for open sequences to end, at SIGTERM")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input ends")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 after SIGTERM, 2 for options that make no sense, 1 for a model, an address or a device that does not work."""
    args = parser().parse_args(argv)
    if not args.fake and not args.model:
        parser().error("--model is needed: the name, folder or file of a model (or --fake)")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        start(args)
    except EngineError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    return 0


def start(args: argparse.Namespace) -> None:
    """Serve what `args` (see `parser`) ask for, until SIGTERM or Ctrl-C. Raises ModelError, ConfigError.

    The worker of an engine leaves SIGINT to that: a Ctrl-C reaches the whole group of processes.
    """
    if args.with_parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent(at_once=True)
    check_address(args.address, args.tls_cert is not None, args.insecure)
    asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
