"""Several workers as one: whichever of them is lost, and when, the text is the same."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine.acceptance import SamplingParams
from engine.errors import ConfigError, ModelError, WorkerLost
from engine.target import Target, fleet, process
from engine.target.fake import FakeTarget
from engine.target.fleet import Connected, Fleet, Place
from engine.target.remote import RemoteTarget, place, tls
from engine.target.server import TargetServer, check_address, serve_target
from engine.target.server import tls as server_tls
from tests.server.scripted import eventually
from tests.server.test_target_contract import CONTEXT, PROMPT, SAMPLED, asking, decode, local, said, tree_of

SAMPLINGS = pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])


def fake() -> FakeTarget:
    return FakeTarget(64, context_length=CONTEXT, sharpness=2.0)


@asynccontextmanager
async def started(places: Sequence[Place], **options: Any) -> AsyncIterator[Fleet]:
    """A fleet with its workers."""
    target = Fleet(places, **options)
    try:
        await target.start(timeout=20)
        yield target
    finally:
        await target.close()


class Workers:
    """Servers over targets in this process, to be ended and begun again at will."""

    def __init__(self, folder: Path, targets: Sequence[Target]) -> None:
        self.addresses = [f"unix:{folder}/{i}.sock" for i in range(len(targets))]
        self._targets = targets
        self._servers: dict[int, TargetServer] = {}

    @property
    def places(self) -> list[Place]:
        return [place(address) for address in self.addresses]

    async def begin(self, *which: int) -> None:
        for i in which:
            self._servers[i] = await serve_target(self._targets[i], self.addresses[i])

    async def end(self, *which: int) -> None:
        """At once, with whatever was going on."""
        for i in which:
            await self._servers.pop(i).stop(None)

    async def close(self) -> None:
        await self.end(*list(self._servers))


async def interrupted(target: Target, sampling: SamplingParams, after: int, interrupt: Any) -> list[int]:
    """The answer when `interrupt` happens after so many steps; the drafts are now right, now wrong."""
    tokens, emitted = list(PROMPT), list[int]()
    async with target.open(asking(sampling=sampling)) as sequence:
        finish, steps = "", 0
        while not finish:
            if steps == after:
                await interrupt()
            nodes = [((tokens[-1] * 7 + steps) % 64, 0), ((tokens[-1] + 1) % 64, 1)]
            result = await sequence.step(tree_of(tokens[-1], len(tokens) - 1, nodes))
            emitted += result.tokens.tolist()
            tokens += result.tokens.tolist()
            finish, steps = result.finish, steps + 1
    return emitted


@SAMPLINGS
@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_another_worker_goes_on(tmp_path: Path, sampling: SamplingParams, after: int) -> None:
    """A worker that ends before any step: the other takes its sequence over, and nothing is held at either."""

    async def run() -> None:
        fakes = [fake(), fake()]
        workers = Workers(tmp_path, fakes)
        await workers.begin(0, 1)
        answer = said(await decode(fake(), asking(sampling=sampling)))
        async with started(workers.places) as target:

            async def interrupt() -> None:
                await workers.end(0 if fakes[0].num_open else 1)

            assert await interrupted(target, sampling, after, interrupt) == answer
            assert await eventually(lambda: fakes[0].num_open == fakes[1].num_open == 0)
        await workers.close()

    asyncio.run(run())


@SAMPLINGS
def test_a_small_real_model_goes_on(tmp_path: Path, sampling: SamplingParams) -> None:
    """The same with a model that has weights and a KV cache."""

    async def run() -> None:
        async with local(tmp_path, "int8") as one, local(tmp_path, "int8") as other:
            rigs = [one, other]
            workers = Workers(tmp_path, [rig.target for rig in rigs])
            await workers.begin(0, 1)
            answer = said(await decode(one.target, asking(sampling=sampling)))
            async with started(workers.places) as target:

                async def interrupt() -> None:
                    await workers.end(0 if one.held() else 1)

                for after in (3,):
                    assert await interrupted(target, sampling, after, interrupt) == answer
                assert await eventually(lambda: not one.held() and not other.held())
            await workers.close()

    asyncio.run(run())


def test_the_same_worker_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """The only worker ends and returns: the sequence waits for it, and readiness says so."""

    async def run() -> None:
        workers = Workers(tmp_path, [fake()])
        await workers.begin(0)
        answer = said(await decode(fake(), asking(sampling=SAMPLED)))
        async with started(workers.places) as target:
            heard: list[bool] = []

            async def listen() -> None:
                async for ready in target.watch():
                    heard.append(ready)

            listening = asyncio.create_task(listen())

            async def interrupt() -> None:
                await workers.end(0)
                asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(workers.begin(0)))

            assert await interrupted(target, SAMPLED, 5, interrupt) == answer
            assert await eventually(lambda: heard == [True, False, True])
            listening.cancel()
        await workers.close()

    asyncio.run(run())


def test_without_any_worker_one_hears_soon_and_why(tmp_path: Path) -> None:
    """An answer begun ends when patience does; a new one is refused; both name the worker. With it back, all is as before."""

    async def run() -> None:
        workers = Workers(tmp_path, [fake()])
        await workers.begin(0)
        async with started(workers.places, patience=0.1) as target:
            with pytest.raises(WorkerLost, match=r"no worker is there: .*0\.sock"):
                await interrupted(target, SamplingParams(), 2, lambda: workers.end(0))
            with pytest.raises(WorkerLost, match=r"no worker is there: .*0\.sock"):
                async with target.open(asking()):
                    raise AssertionError("opened")
            await workers.begin(0)
            assert await eventually(lambda: target.num_ready == 1)
            assert said(await decode(target, asking())) == said(await decode(fake(), asking()))
        await workers.close()

    asyncio.run(run())


def test_the_least_loaded_begins(tmp_path: Path) -> None:
    """Six sequences at three workers are two at each."""

    async def run() -> None:
        fakes = [fake() for _ in range(3)]
        workers = Workers(tmp_path, fakes)
        await workers.begin(0, 1, 2)
        async with started(workers.places) as target:
            gate = asyncio.Event()

            async def hold() -> None:
                async with target.open(asking()):
                    await gate.wait()

            holding = [asyncio.create_task(hold()) for _ in range(6)]
            assert await eventually(lambda: [each.num_open for each in fakes] == [2, 2, 2])
            gate.set()
            await asyncio.gather(*holding)
        await workers.close()

    asyncio.run(run())


def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has(tmp_path: Path) -> None:
    """SIGTERM's way: the open sequence stays where it is to its end, new ones go to the other worker."""

    async def run() -> None:
        fakes = [fake(), fake()]
        servers = [await serve_target(each, f"unix:{tmp_path}/{i}.sock") for i, each in enumerate(fakes)]
        async with started([place(server.address) for server in servers]) as target:
            async with target.open(asking()) as sequence:
                busy = 0 if fakes[0].num_open else 1
                draining = asyncio.create_task(servers[busy].stop(20.0))
                assert await eventually(lambda: target.num_ready == 1)
                assert said(await decode(target, asking())) and fakes[busy].num_open == 1
                assert len((await sequence.step(tree_of(PROMPT[-1], len(PROMPT) - 1, []))).tokens) == 1
                assert not draining.done()
            await draining
        await servers[1 - busy].stop(None)

    asyncio.run(run())


def test_a_worker_with_another_model_is_named(tmp_path: Path) -> None:
    """A fleet does not start with workers that would answer differently."""

    async def run() -> None:
        workers = Workers(tmp_path, [fake(), FakeTarget(32, context_length=CONTEXT)])
        await workers.begin(0, 1)
        with pytest.raises(ConfigError, match=r"\.sock answers otherwise than the others: its vocab_size is \d+, theirs \d+;"):
            async with started(workers.places):
                raise AssertionError("started")
        await workers.close()

    asyncio.run(run())


def test_a_worker_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions of the protocol are in the message."""
    from engine.target import wire

    async def run() -> None:
        workers = Workers(tmp_path, [fake()])
        await workers.begin(0)
        whole = wire.info_to_wire
        monkeypatch.setattr(wire, "info_to_wire", lambda info: _with_protocol(whole(info), 7))
        with pytest.raises(ConfigError, match=f"another version of the protocol: 7, and this engine {wire.PROTOCOL}"):
            async with started(workers.places):
                raise AssertionError("started")
        await workers.close()

    asyncio.run(run())


def _with_protocol(message: Any, protocol: int) -> Any:
    message.protocol = protocol
    return message


def test_a_sequence_that_ends_workers_is_given_up(tmp_path: Path) -> None:
    """One that loses every worker in the same step does not go on to the next for ever."""

    class Deadly:
        def __init__(self) -> None:
            self.info = fake().info
            self.num_steps = 0

        @asynccontextmanager
        async def open(self, request: object) -> AsyncIterator[Any]:
            async with fake().open(asking()) as sequence:
                sequence.step = self._step  # type: ignore[method-assign]
                yield sequence

        async def _step(self, tree: object) -> Any:
            self.num_steps += 1
            raise WorkerLost("it fell over")

        async def close(self) -> None: ...

    deadly: Any = Deadly()

    async def connect() -> Connected:
        return Connected(deadly, asyncio.Event().wait, deadly.close)  # type: ignore[arg-type]

    async def run() -> None:
        async with started([Place("deadly", connect)]) as target:
            with pytest.raises(WorkerLost, match="4 workers were lost in one step of this sequence: it fell over"):
                async with target.open(asking()) as sequence:
                    await sequence.step(tree_of(PROMPT[-1], len(PROMPT) - 1, []))
        assert deadly.num_steps == fleet.MOST_LOSSES + 1

    asyncio.run(run())


def test_a_killed_process_is_started_anew_and_its_sequence_goes_on() -> None:
    """kill -9 in the middle of an answer: the same text, from the process that came after it."""

    async def run() -> None:
        started_workers: list[process.WorkerProcess] = []
        whole = process.start_worker

        async def start(args: Sequence[str], **options: Any) -> process.WorkerProcess:
            started_workers.append(await whole(args, **options))
            return started_workers[-1]

        process.start_worker = start  # type: ignore[assignment]
        try:
            async with started([process.place(["--fake"])], patience=60) as target:
                plain = said(await decode(FakeTarget(), asking(sampling=SAMPLED)))

                async def kill() -> None:
                    started_workers[-1].process.kill()

                assert await interrupted(target, SAMPLED, 4, kill) == plain
                assert len(started_workers) == 2
        finally:
            process.start_worker = whole

    asyncio.run(run())


def test_a_worker_that_never_starts_is_given_up() -> None:
    """What it said last is in the error."""

    async def run() -> None:
        with pytest.raises(ModelError, match="unrecognized arguments: --no-such"):
            async with started([process.place(["--no-such"])]):
                raise AssertionError("started")

    asyncio.run(run())


def test_a_worker_killed_on_its_address(tmp_path: Path) -> None:
    """kill -9 of one of two worker processes of their own: the other goes on with the same text."""
    addresses = [f"unix:{tmp_path}/{i}.sock" for i in range(2)]
    command = [sys.executable, "-m", "engine.target.server", "--fake", "--address"]
    processes = [subprocess.Popen([*command, address], stderr=subprocess.DEVNULL) for address in addresses]

    async def run() -> None:
        async with started([place(address) for address in addresses]) as target:
            plain = said(await decode(FakeTarget(), asking()))

            async def kill() -> None:
                os.kill(processes[0].pid, signal.SIGKILL)  # the first of equally loaded ones has it

            assert await interrupted(target, SamplingParams(), 3, kill) == plain

    try:
        asyncio.run(run())
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_a_worker_that_hangs_is_lost(tmp_path: Path) -> None:
    """SIGSTOP, a process that is there and says nothing: the other goes on with the same text; without it, one hears."""
    addresses = [f"unix:{tmp_path}/{i}.sock" for i in range(2)]
    command = [sys.executable, "-m", "engine.target.server", "--fake", "--address"]
    processes = [subprocess.Popen([*command, address], stderr=subprocess.DEVNULL) for address in addresses]

    async def run() -> None:
        places = [place(address, silent_seconds=1.0) for address in addresses]
        async with started(places, patience=0.1) as target:
            plain = said(await decode(FakeTarget(), asking()))

            async def stop() -> None:
                os.kill(processes[0].pid, signal.SIGSTOP)

            async def stop_both() -> None:
                os.kill(processes[1].pid, signal.SIGSTOP)

            assert await interrupted(target, SamplingParams(), 3, stop) == plain
            assert target.num_ready == 1
            with pytest.raises(WorkerLost, match="hangs: no answer for 1 s"):
                await interrupted(target, SamplingParams(), 2, stop_both)
            assert target.num_ready == 0

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_a_draining_worker_that_hangs_is_lost(tmp_path: Path) -> None:
    """SIGTERM, then SIGSTOP: what it was to bring to an end goes on at the other, with the same text."""
    addresses = [f"unix:{tmp_path}/{i}.sock" for i in range(2)]
    command = [sys.executable, "-m", "engine.target.server", "--fake", "--drain-seconds", "60", "--address"]
    processes = [subprocess.Popen([*command, address], stderr=subprocess.DEVNULL) for address in addresses]

    async def run() -> None:
        async with started([place(address, silent_seconds=1.0) for address in addresses]) as target:
            plain = said(await decode(FakeTarget(), asking()))

            async def drain_and_stop() -> None:
                busy = 0 if target._members[0].num_open else 1
                member = target._members[busy]
                os.kill(processes[busy].pid, signal.SIGTERM)
                assert await eventually(lambda: member.worker is None)
                await asyncio.sleep(1.5)  # longer than it may be silent: one that drains and answers is left alone
                assert member.num_open == 1
                os.kill(processes[busy].pid, signal.SIGSTOP)

            assert await interrupted(target, SamplingParams(), 3, drain_and_stop) == plain

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        for each in processes:
            each.kill()
            each.wait()


def test_a_worker_of_our_own_that_hangs_is_started_anew() -> None:
    """The process is ended, another one begun, and the answer goes on there."""

    async def run() -> None:
        plain = said(await decode(FakeTarget(), asking()))
        async with started([process.place(["--fake"], silent_seconds=1.0)], patience=60.0) as target:
            pids: list[int] = []

            async def stop() -> None:
                member = target._members[0]
                assert member.worker is not None
                worker = member.worker.lost.__self__  # type: ignore[attr-defined]
                pids.append(worker.process.pid)
                os.kill(pids[0], signal.SIGSTOP)

            assert await interrupted(target, SamplingParams(), 3, stop) == plain
            assert await eventually(lambda: not os.path.exists(f"/proc/{pids[0]}"))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_workers_can_be_reached_by_tls(tmp_path: Path) -> None:
    """A worker that wants to see a certificate serves the engine that has one, and nobody else."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)

    async def run() -> None:
        server = await serve_target(fake(), "localhost:0", server_tls(cert, key, cert))
        async with started([place(server.address, tls(cert, cert, key))]) as target:
            assert said(await decode(target, asking())) == said(await decode(fake(), asking()))
        for credentials in (None, tls(cert, None, None)):
            with pytest.raises(WorkerLost):
                await RemoteTarget.connect(server.address, 0.3, credentials)
        await server.stop(None)

    asyncio.run(run())
    with pytest.raises(ConfigError, match="both --tls-cert and --tls-key"):
        server_tls(cert, None, None)
    with pytest.raises(ConfigError, match=r"cannot read: .*missing\.pem"):
        tls(tmp_path / "missing.pem", None, None)


@pytest.mark.parametrize(
    ("address", "encrypted", "insecure", "refused"),
    [
        ("127.0.0.1:1", False, False, False),
        ("[::1]:1", False, False, False),
        ("unix:/tmp/socket", False, False, False),
        ("0.0.0.0:1", False, False, True),
        ("0.0.0.0:1", True, False, False),
        ("gpu-host:1", False, True, False),
        ("gpu-host:1", False, False, True),
    ],
)
def test_plain_text_stays_on_loopback(address: str, encrypted: bool, insecure: bool, refused: bool) -> None:
    """Beyond it a worker wants TLS, or to be told that plain text is meant."""
    with pytest.raises(ConfigError, match="plain text") if refused else nullcontext():
        check_address(address, encrypted, insecure)
