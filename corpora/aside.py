"""A tokenizer in a process of its own, which loads while this one imports, lists and compares.

Loading takes a third of a second, during which the library holds Python's lock: a thread beside it would stand still. What is
sent either way is a list of byte strings: their number and lengths as 64-bit integers, then all of them. The process first
sends the tokenizer's checksum, then answers a list of texts (UTF-8) with the ids of each (int32), until its input ends.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from corpora.errors import TokenizerLost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TokenizerAside:
    """The tokenizer in a folder, as far as an update needs it: `checksum` and `encode_batch`. Ends with its `with` block.

    It begins to load at once, and nobody waits for it before asking. One thread at a time may ask.
    """

    def __init__(self, folder: Path) -> None:
        path = [*sys.path, str(Path(__file__).parents[1])]  # where all is found: looking at `site` again would take a while
        run = f"import sys; sys.path[:] = {path!r}; from corpora.aside import serve; serve({str(folder)!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # what it has not read is of no use any more
            pass

    @cached_property
    def checksum(self) -> str:
        """`Tokenizer.checksum`, once it has loaded; "" if it cannot: loading it here says why."""
        try:
            return self._receive()[0].decode()
        except TokenizerLost:
            return ""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`Tokenizer.encode_batch`. Raises TokenizerLost where the process has ended."""
        import numpy as np

        if not self.checksum:
            raise TokenizerLost(_LOST)
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, [text.encode() for text in texts])
        except OSError:
            raise TokenizerLost(_LOST) from None
        return [np.frombuffer(ids, np.int32) for ids in self._receive()]

    def _receive(self) -> list[bytes]:
        assert self._process.stdout is not None
        parts = receive(self._process.stdout)
        if parts is None:
            raise TokenizerLost(_LOST)
        return parts


_begun: dict[Path, TokenizerAside] = {}


def begin(folder: Path) -> None:
    """Begin to load the tokenizer in `folder` for the first who asks for it. If nobody does, it ends with this process."""
    _begun[folder] = TokenizerAside(folder)


def aside_in(folder: Path) -> TokenizerAside:
    """The tokenizer in `folder`, in the process that has begun to load it, or in one that begins."""
    return _begun.pop(folder, None) or TokenizerAside(folder)


_LOST = "the process that tokenizes has ended; nothing was changed, try again"


def serve(folder: str) -> None:
    """What the process does. It says nothing: where it cannot load, it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it, which ends it
    from engine.text import Tokenizer

    tokenizer = Tokenizer.load(folder)
    send(sys.stdout.buffer, [tokenizer.checksum.encode()])
    while (texts := receive(sys.stdin.buffer)) is not None:
        send(sys.stdout.buffer, tokenizer.encode_batch_packed([text.decode() for text in texts]))


def send(stream: IO[bytes], parts: Sequence[bytes]) -> None:
    """Write a list of byte strings. Raises OSError where nobody reads."""
    stream.write(array("q", [len(parts), *map(len, parts)]).tobytes())
    stream.writelines(parts)
    stream.flush()


def receive(stream: IO[bytes]) -> list[bytes] | None:
    """Read a list of byte strings; None where the stream ends before it does."""

    def exactly(size: int) -> bytes:
        data = stream.read(size)
        if len(data) < size:
            raise EOFError
        return data

    try:
        (count,) = array("q", exactly(8))
        return [exactly(size) for size in array("q", exactly(8 * count))]
    except EOFError:
        return None
