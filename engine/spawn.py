"""A server of one's own, for as long as a block lasts: what `draftloom generate` and `draftloom demo` talk to.

It is `draftloom serve` in a process of its own, on a free port of the loopback interface; clients reach it as any other.
It ends with the block, and with this process however that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import draftloom
from engine.errors import ConfigError, Unavailable

START_SECONDS = 600.0
"""A large model may have to be fetched, converted, or read from a slow disk."""
STOP_SECONDS = 10.0
LAST_BYTES = 4096
NOT_USABLE = 2
"""The exit status of a server that its flags, its settings or its model kept from starting."""


@contextmanager
def own_server(arguments: Sequence[str] = ()) -> Iterator[str]:
    """The address of a `draftloom serve ARGUMENTS` that is ready to answer.

    Raises ConfigError, with what it said, for flags, settings or a model that it cannot start with; Unavailable, with the last
    line it wrote, if it ends otherwise before it is ready, or takes longer than START_SECONDS.
    """
    port = free_port()
    command = [*running("engine.cli"), "serve", "--with-parent", "--port", str(port), *arguments]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as process:
        try:
            _wait(process, f"127.0.0.1:{port}", log)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def running(module: str) -> list[str]:
    """The command that runs a module of this installation. It is looked for where this process looks for modules: in the folder
    that the user stands in, whose code may be anybody's, only if this process does so, too."""
    inside = not {"", os.getcwd()}.isdisjoint(sys.path)
    return [sys.executable, *([] if inside else ["-P"]), "-m", module]


def end_with_parent(*, at_once: bool = False) -> None:
    """Have this process told to end when its standard input does: the parent holds the other end as long as it lives.

    `at_once`: end it without being told, as one must that may be deep in loading or in a pass. A thread that sleeps in read()
    all its life; it works on every Unix, and after a kill -9.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if at_once:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def answers(address: str) -> bool:
    """Whether anybody listens at host:port on this machine. Nothing is said to them."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=0.3):
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port of the loopback interface that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], address: str, log: BinaryIO) -> None:
    deadline = time.monotonic() + START_SECONDS
    with draftloom.Client(address) as client:
        while True:
            if process.poll() == NOT_USABLE:
                raise ConfigError(_last_line(log))
            if process.poll() is not None:
                raise Unavailable(f"the server ended before it was ready: {_last_line(log)}")
            if time.monotonic() > deadline:
                raise Unavailable(f"the server was not ready after {START_SECONDS:.0f} s: {_last_line(log)}")
            try:
                client.wait_ready(timeout=0.5)
            except draftloom.DraftloomError:
                continue
            return


def _last_line(log: BinaryIO) -> str:
    """The last line of an open log file that says anything."""
    tail = os.pread(log.fileno(), LAST_BYTES, max(0, os.fstat(log.fileno()).st_size - LAST_BYTES))
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("draftloom: ") if lines else "it said nothing"
