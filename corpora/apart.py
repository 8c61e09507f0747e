"""A tokenizer in a process of its own.

Reading its definition is most of what a small update costs, and the library holds the interpreter's lock all the while,
so that a thread would gain nothing. A process reads it while this one imports, looks at the files and waits for the texts.

    asked      one line of JSON: {"model": ...} first; then {"want": "checksum"}, {"want": "fingerprint"}, or {"sizes": [...]}
               and after it the texts, so many bytes of UTF-8 each
    answered   one line of JSON: {"value": ...}, {"error": ...}, or {"sizes": [...]} and after it the ids, int32, so many each
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from engine.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TokenizerApart:
    """What an update asks of a `Tokenizer`, answered by a process that begins to load it at once. A context manager.

    `model` is a name or folder as `engine.models` takes it. Nothing is waited for before the first question, which raises
    ModelError if the tokenizer cannot be loaded. One thread at a time.
    """

    def __init__(self, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "corpora.apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
        self._send({"model": model})

    def __enter__(self) -> TokenizerApart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        with self._process:
            pass

    @cached_property
    def checksum(self) -> str:
        """`Tokenizer.checksum`."""
        return str(self._ask({"want": "checksum"})["value"])

    @cached_property
    def fingerprint(self) -> str:
        """`Tokenizer.fingerprint`."""
        return str(self._ask({"want": "fingerprint"})["value"])

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`Tokenizer.encode_batch`."""
        import numpy as np

        data = [text.encode() for text in texts]
        sizes = self._ask({"sizes": list(map(len, data))}, *data)["sizes"]
        ids = np.frombuffer(self._read(4 * sum(sizes)), np.int32)
        return np.split(ids, np.cumsum(sizes)[:-1]) if sizes else []

    def _ask(self, question: dict[str, Any], *data: bytes) -> dict[str, Any]:
        self._send(question, *data)
        answer: dict[str, Any] = json.loads(self._stream(self._process.stdout).readline() or '{"error": ""}')
        if "error" in answer:
            raise ModelError(answer["error"] or "the tokenizer's process ended early; try again")
        return answer

    def _send(self, question: dict[str, Any], *data: bytes) -> None:
        stream = self._stream(self._process.stdin)
        try:
            stream.writelines([json.dumps(question).encode() + b"\n", *data])
            stream.flush()
        except BrokenPipeError:
            pass  # why it ended stands in its last answer

    def _read(self, size: int) -> bytes:
        data = self._stream(self._process.stdout).read(size)
        if len(data) != size:
            raise ModelError("the tokenizer's process ended early; try again")
        return data

    @staticmethod
    def _stream(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None, "both are pipes"
        return stream


def answer(asked: IO[bytes], answered: IO[bytes]) -> None:
    """What the process does: load the tokenizer, then answer until nothing more is asked."""
    import numpy as np

    from engine.models import tokenizer_folder
    from engine.text import Tokenizer

    def send(value: dict[str, Any], *data: bytes) -> None:
        answered.writelines([json.dumps(value).encode() + b"\n", *data])
        answered.flush()

    try:
        model = json.loads(asked.readline())["model"]
        tokenizer = Tokenizer.load(tokenizer_folder(model, lambda news: print(news, file=sys.stderr)))
    except ModelError as error:
        send({"error": str(error)})
        return
    while line := asked.readline():
        question = json.loads(line)
        if "want" in question:
            send({"value": getattr(tokenizer, question["want"])})
        else:
            ids = tokenizer.encode_batch([asked.read(size).decode() for size in question["sizes"]])
            send({"sizes": list(map(len, ids))}, np.concatenate([np.zeros(0, np.int32), *ids]).tobytes())


if __name__ == "__main__":
    answer(sys.stdin.buffer, sys.stdout.buffer)
