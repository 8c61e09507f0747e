"""A real browser without a window, for tests of pages: Chromium, spoken to over two pipes.

It is Chromium's own remote debugging protocol with `--remote-debugging-pipe`: JSON messages that end with a zero byte, on file
descriptors 3 and 4. So no driver, no port and no package is needed, only the browser; where there is none, `find` is None.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
FLAGS += ["--hide-scrollbars", "--disable-extensions", "--disable-sync", "--disable-component-update", "--mute-audio"]

PATIENCE = 60.0
"""Seconds to wait for its next word."""


def find() -> str | None:
    """The browser's path, None if none is installed."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Browser:
    """One page of a running browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        """What the page told by itself: requests, exceptions, log entries."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command, wait for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Load a page; returns once its scripts have run."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, as a person at the keyboard does."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEY_CODES[key])

    def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def told(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, "the browser says nothing"
            block = os.read(self._answers, 1 << 20)
            assert block, "the browser ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


KEY_CODES = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


@contextmanager
def browsing(width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """A browser with a profile of its own, for as long as the block lasts."""
    path = find()
    assert path is not None, "no Chromium is installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        theirs_in, commands = os.pipe()
        answers, theirs_out = os.pipe()
        # The shell puts the pipes where the browser expects them, whatever numbers they have here.
        start = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        process = subprocess.Popen(
            ["/bin/bash", "-c", start, path, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(Path(profile))},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(commands, answers)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
