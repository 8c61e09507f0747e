"""A worker in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.acceptance import Limits, SamplingParams
from engine.errors import ModelError, WorkerLost
from engine.target import SequenceRequest, StepResult, server
from engine.target.fake import FakeSequence, FakeTarget
from engine.target.process import start_worker
from engine.target.remote import RemoteTarget
from engine.target.server import main
from engine.tree import CandidateTree
from tests.server.scripted import eventually

REQUEST = SequenceRequest(np.array([1, 2, 3], np.int32), SamplingParams(), Limits(10), "default")
ROOT = CandidateTree.root_only(3, 2)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_serves_and_ends() -> None:
    """It answers, reports on standard error, and is gone without a trace after close()."""

    async def run() -> None:
        worker = await start_worker(["--fake", "--fake-vocab", "32"])
        assert worker.target.info.vocab_size == 32
        async with worker.target.open(REQUEST) as sequence:
            assert len((await sequence.step(ROOT)).tokens) == 1
        assert "worker for fake at unix:" in worker.last_lines
        socket = worker.last_lines.split("unix:")[1].split()[0]
        assert os.stat(os.path.dirname(socket)).st_mode & 0o777 == 0o700
        await worker.close()
        await worker.close()
        assert worker.process.returncode == 0
        assert not os.path.exists(os.path.dirname(socket))

    asyncio.run(run())


def test_a_dead_worker_is_lost_and_noticed() -> None:
    """Killed in the middle of a sequence: the step raises WorkerLost, and wait() says how it ended."""

    async def run() -> None:
        worker = await start_worker(["--fake"])
        waiting = asyncio.create_task(worker.wait())
        with pytest.raises(WorkerLost):
            async with worker.target.open(REQUEST) as sequence:
                worker.process.kill()
                await waiting
                await sequence.step(ROOT)
        assert await waiting == -signal.SIGKILL
        await worker.close()

    asyncio.run(run())


def test_a_worker_whose_device_has_failed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open there is lost, and the process ends with an error, so that another takes its place."""

    class Failing(FakeTarget):
        @asynccontextmanager
        async def open(self, request: SequenceRequest) -> AsyncIterator[FakeSequence]:
            async with super().open(request) as sequence:
                monkeypatch.setattr(sequence, "step", self._fail)
                yield sequence

        async def _fail(self, tree: CandidateTree) -> StepResult:
            raise WorkerLost("the device has failed: an illegal address")

    async def run() -> None:
        address = f"unix:{tmp_path}/worker.sock"
        monkeypatch.setattr(server, "load", lambda args: Failing(vocab_size=32, fingerprint="fake"))
        worker = asyncio.create_task(server.run(server.parser().parse_args(["--address", address, "--fake"])))
        target = await RemoteTarget.connect(address)
        with pytest.raises(WorkerLost, match="illegal address"):
            async with target.open(REQUEST) as sequence:
                await sequence.step(ROOT)
        with pytest.raises(WorkerLost, match="this worker ends"):
            await asyncio.wait_for(worker, 20)
        await target.close()

    asyncio.run(run())


def test_a_worker_that_cannot_start_says_why() -> None:
    """Its last words are in the error, and no process is left."""

    async def run() -> None:
        with pytest.raises(ModelError, match=r"exit code 2:[\s\S]*unrecognized arguments: --no-such-option"):
            await start_worker(["--no-such-option"])

    asyncio.run(run())


def test_a_worker_ends_with_its_parent() -> None:
    """A parent that is killed, with no chance to clean up, takes its worker along."""
    code = (
        "import asyncio, os\n"
        "from engine.target.process import start_worker\n"
        "async def run():\n"
        "    worker = await start_worker(['--fake'])\n"
        "    print(worker.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()

    async def ended() -> bool:
        return await eventually(lambda: not alive(pid))

    assert asyncio.run(ended())


def test_options_are_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A worker without a model, or with an address it cannot have, says so in one line."""
    with pytest.raises(SystemExit) as caught:
        main(["--address", f"unix:{tmp_path}/socket"])
    assert caught.value.code == 2 and "--model is needed" in capsys.readouterr().err
    result = subprocess.run(
        [sys.executable, "-m", "engine.target.server", "--fake", "--address", "nowhere"], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (1, "worker: not an address: nowhere; write HOST:PORT or unix:PATH\n")
