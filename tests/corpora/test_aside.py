"""A tokenizer in a process of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora.aside import TokenizerAside, receive, send
from corpora.errors import TokenizerLost
from engine.text import Tokenizer
from tests import tiny_tokenizers

TEXTS = ["", "def add(first, second):\n", "Größe 推測 👩🏽‍🚀", "\0<|endoftext|>", "x" * 300_000]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write_model_folder(tmp_path_factory.mktemp("model"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_what_is_sent_arrives_whole_or_not_at_all(parts: list[bytes], data: st.DataObject) -> None:
    """However it is cut off, nobody takes a part for the whole."""
    stream = io.BytesIO()
    send(stream, parts)
    sent = stream.getvalue()
    assert receive(io.BytesIO(sent)) == parts
    cut = data.draw(st.integers(0, len(sent) - 1))
    assert receive(io.BytesIO(sent[:cut])) is None


def test_it_tokenizes_as_the_tokenizer_does(model: Path) -> None:
    """The same checksum, and the same ids, several times over; its process ends with the block."""
    tokenizer = Tokenizer.load(model)
    with TokenizerAside(model) as aside:
        assert aside.checksum == tokenizer.checksum
        for texts in (TEXTS, [], TEXTS[:2]):
            found = aside.encode_batch(texts)
            assert [ids.dtype for ids in found] == [np.int32] * len(texts)
            assert [ids.tolist() for ids in found] == [ids.tolist() for ids in tokenizer.encode_batch(texts)]
        process = aside._process
    assert process.returncode == -signal.SIGKILL


def test_what_cannot_be_loaded_has_no_checksum(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is said about it here: whoever loads it says why."""
    with TokenizerAside(tmp_path) as aside:
        assert aside.checksum == ""
        with pytest.raises(TokenizerLost):
            aside.encode_batch(["x"])
    assert capfd.readouterr() == ("", "")


def test_it_loads_nothing_it_has_no_use_for() -> None:
    """Numpy would take as long as a quarter of the tokenizer does."""
    code = "import sys, corpora.aside, engine.text; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_that_is_killed_is_an_error(model: Path) -> None:
    """One that says so; nobody waits for an answer."""
    with TokenizerAside(model) as aside:
        assert aside.checksum
        aside._process.kill()
        aside._process.wait()
        with pytest.raises(TokenizerLost, match="has ended"):
            aside.encode_batch(["x"])


def test_the_folder_one_stands_in_is_not_searched(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `corpora` or `signal` of somebody else's repository is not run."""
    for name in ("corpora", "signal", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    with TokenizerAside(model) as aside:
        assert aside.checksum


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_it_outlives_ctrl_c_and_not_whoever_started_it(model: Path) -> None:
    """An interrupt goes to the whole group: only its owner decides. A killed owner leaves no process behind."""
    code = (
        "import sys, time; from pathlib import Path; from corpora.aside import TokenizerAside\n"
        f"aside = TokenizerAside(Path({str(model)!r})); print(aside.checksum); print(aside._process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline().strip()
    pid = int(owner.stdout.readline())
    os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    assert _runs(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
