"""The whole, as users meet it: the real command line, a real server process, real files, and the real client over gRPC.

The target runs in this process behind the worker protocol, without weights, so that tests can slow it down, look into it and
take it away. One test at the end has real weights, where they are in the model cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import draftloom
from corpora.build import build
from corpora.catalog import Catalog
from draftloom.v1 import generation_pb2, generation_pb2_grpc
from engine.cli import kernels_folder
from engine.models import cache_root
from engine.spawn import free_port
from engine.target.fake import FakeSequence, FakeTarget
from engine.target.server import serve_target
from engine.text import Tokenizer
from tests.tiny_tokenizers import byte_level, write_model_folder

ROOT = Path(__file__).resolve().parent.parent
KERNELS = os.environ.get("NUMBA_CACHE_DIR") or str(kernels_folder())
MODELS = cache_root()

TOKENIZER = Tokenizer(byte_level())
FILES = {
    "add.py": "def add(first, second):\n    return first + second\n",
    "pkg/index.py": "class Index:\n    def __init__(self, items):\n        self.items = list(items)\n",
    "notes.md": "The quick brown fox jumps over the lazy dog.\n",
}
PROMPT = "class Index:\n    def __init__("


class SlowTarget(FakeTarget):
    """A fake target that says FILES and rests `pause` seconds before every step."""

    def __init__(self) -> None:
        spell = TOKENIZER.encode("".join(FILES.values()))
        super().__init__(TOKENIZER.vocab_size, fingerprint=TOKENIZER.fingerprint, spell=spell.tolist(), eos_id=0)
        self.pause = 0.0


class Worker:
    """A SlowTarget that serves at `address`, on the loop that all of them share, from `start` to `stop`."""

    def __init__(self, folder: Path) -> None:
        self.target = SlowTarget()
        self.address = f"unix:{folder / 'worker.sock'}"

    def start(self) -> Worker:
        """Return once it answers."""
        self._server = on_loop(serve_target(self.target, self.address))
        return self

    def stop(self) -> None:
        """End at once, in the middle of whatever is going on."""
        on_loop(self._server.stop(0))


def on_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, done on the one loop of this process: gRPC's servers do not stand several loops at a time."""
    return asyncio.run_coroutine_threadsafe(work, worker_loop()).result(30)


@cache
def worker_loop() -> asyncio.AbstractEventLoop:
    """A loop in a thread of its own, to the end of the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@pytest.fixture(autouse=True, scope="module")
def rests() -> Iterator[None]:
    """Steps of a SlowTarget take their time."""
    step = FakeSequence.step

    async def slow(self: FakeSequence, tree: Any) -> Any:
        await asyncio.sleep(getattr(self._target, "pause", 0.0))
        return await step(self, tree)

    FakeSequence.step = slow  # type: ignore[method-assign]
    yield
    FakeSequence.step = step  # type: ignore[method-assign]


class Place:
    """A user's machine: a model folder, a store of corpora, a tree to index, and the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = str(write_model_folder(folder / "model"))
        self.store = folder / "corpora"
        self.tree = folder / "tree"
        for name, text in FILES.items():
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / name).write_text(text)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTLOOM_")}
        own = {"DRAFTLOOM_CACHE": str(folder / "cache"), "DRAFTLOOM_HOME": str(self.store)}
        self.env = clean | own | {"NUMBA_CACHE_DIR": KERNELS, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def command(self, *words: str) -> list[str]:
        """`draftloom WORDS`."""
        return [sys.executable, "-m", "engine.cli", *words]

    def run(self, *words: str) -> tuple[int, str, str]:
        """(status, stdout, stderr) of `draftloom WORDS`."""
        done = subprocess.run(
            self.command(*words), cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    def build(self, name: str, *paths: Path) -> tuple[int, str, str]:
        """Index `paths` (the tree, if there are none)."""
        return self.run("corpus", "build", name, *map(str, paths or [self.tree]), "--model", self.model)

    @contextmanager
    def serving(self, worker: str, *words: str) -> Iterator[Server]:
        """A server on a free port with the worker at this address."""
        command = self.command("serve", "--port", "0", "--model", self.model, "--worker", worker, *words)
        with subprocess.Popen(command, cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield Server(process)
            finally:
                process.kill()


class Server:
    """A running `draftloom serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("draftloom: serving "):
                self._ready.set()

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        assert self._ready.wait(60), "\n".join(self.lines)
        return next(line for line in self.lines if line.startswith("draftloom: serving ")).rpartition(" ")[2]


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it becomes true within a generous time."""
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One machine for all tests."""
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker for all tests that do not take it away."""
    running = Worker(tmp_path_factory.mktemp("w")).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def server(place: Place, worker: Worker) -> Iterator[Server]:
    """One server, with the corpus "code" by default."""
    assert place.build("code")[0] == 0
    with place.serving(worker.address, "--corpus", "code", "--corpus", "gone") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[draftloom.Client]:
    """A client of it."""
    with draftloom.Client(server.address, timeout=60) as one:
        yield one


def tokens_of(answer: draftloom.Completion | None) -> tuple[int, ...]:
    """Its ids."""
    assert answer is not None
    return tuple(answer.token_ids)


# ---- the way it is meant to go


def test_what_was_indexed_is_drafted_and_the_text_is_the_same(client: draftloom.Client) -> None:
    """With the corpus, without it and without any speculation; only the number of steps differs, and the statistics say why."""
    plain = client.generate(PROMPT, max_tokens=40, speculation=False)
    bare = client.generate(PROMPT, max_tokens=40, sources="prompt")
    drafted = client.generate(PROMPT, max_tokens=40, corpora="code")
    assert drafted.text == bare.text == plain.text and tokens_of(drafted) == tokens_of(bare) == tokens_of(plain)
    assert plain.statistics.num_steps == 40 > bare.statistics.num_steps > drafted.statistics.num_steps
    assert list(drafted.statistics.corpora) == ["code"] and bare.statistics.corpora == plain.statistics.corpora == {}
    [corpus] = [source for source in drafted.statistics.sources if source.name == "corpus:code"]
    assert corpus.num_accepted > 0
    assert any("corpus:code" in names for names in drafted.sources)


def test_the_command_line_prints_the_same_text(place: Place, server: Server, client: draftloom.Client) -> None:
    """Text alone on stdout, what it cost on stderr; as JSON, all that the client knows."""
    words = ("--server", server.address, "--max-tokens", "12", "--corpus", "code")
    text = client.generate(PROMPT, max_tokens=12).text
    status, out, err = place.run("generate", PROMPT, *words, "--show-sources")
    assert (status, out) == (0, text) and "corpus:code" in err and "tokens per step" in err
    status, out, _ = place.run("generate", PROMPT, *words, "--json", "--no-speculation")
    assert status == 0 and json.loads(out)["text"] == text


def test_a_request_is_answered_alike_before_and_after_the_server_changed(
    place: Place, server: Server, client: draftloom.Client
) -> None:
    """Calibration learns and a new version of the corpus is published in between: the same ids, another version."""
    asked: draftloom.Options = {
        "max_tokens": 60,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 11,
        "corpora": "code",
        "logprobs": 1,
    }
    first = client.generate(PROMPT, **asked)
    for seed in range(5):
        client.generate("def add(first", max_tokens=30, temperature=1.5, seed=seed)
    (place.tree / "more.py").write_text(first.text)
    assert place.build("code")[0] == 0
    again = client.generate(PROMPT, **asked)
    assert (again.text, tokens_of(again), again.logprobs) == (first.text, tokens_of(first), first.logprobs)
    assert again.statistics.corpora["code"] > first.statistics.corpora["code"]


def test_requests_at_once_get_what_each_gets_alone(client: draftloom.Client) -> None:
    """Eight callers over one connection, streaming and not."""

    def stream(seed: int) -> tuple[int, ...]:
        with client.stream(PROMPT, max_tokens=20, temperature=1.2, seed=seed) as chunks:
            return tuple(token for chunk in chunks for token in chunk.token_ids)

    alone = [
        tokens_of(client.generate(PROMPT, max_tokens=20, temperature=1.2, seed=seed, speculation=False)) for seed in range(8)
    ]
    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(stream, range(8))) == alone


def test_the_worker_says_how_it_stands(worker: Worker, client: draftloom.Client) -> None:
    """While an answer is coming one sequence is open at one worker; when the stream was left, none is."""
    worker.target.pause = 0.02
    try:
        with client.stream(PROMPT, max_tokens=500, speculation=False) as stream:
            chunks = iter(stream)
            next(chunks)
            status = client.worker_status()
            assert (status.num_workers, status.num_open, status.num_waiting) == (1, 1, 0)
        assert eventually(lambda: client.worker_status().num_open == 0)
    finally:
        worker.target.pause = 0.0


def test_leaving_a_stream_frees_the_worker(worker: Worker, client: draftloom.Client) -> None:
    """The server stops the request at the worker, too, within a step."""
    worker.target.pause = 0.02
    try:
        with client.stream(PROMPT, max_tokens=500, speculation=False) as stream:
            next(iter(stream))
            assert worker.target.num_open == 1
        assert eventually(lambda: worker.target.num_open == 0)
        with pytest.raises(draftloom.DeadlineExceeded):
            client.generate(PROMPT, max_tokens=500, speculation=False, timeout=0.3)
        assert eventually(lambda: worker.target.num_open == 0)
    finally:
        worker.target.pause = 0.0


def test_a_default_corpus_that_is_missing_is_a_warning(server: Server, client: draftloom.Client) -> None:
    """In the log at start, and in the statistics of every request that would have used it."""
    [warning] = client.generate(PROMPT, max_tokens=1).statistics.warnings
    assert warning.startswith("served without corpus gone: no such corpus: gone; build it with")
    assert any("WARNING draftloom.engine: serving without corpus gone" in line for line in server.lines)


def test_each_request_is_a_line_in_the_log(server: Server, client: draftloom.Client) -> None:
    """Under the caller's name for it, without any of its text."""
    client.generate("a secret prompt", max_tokens=3, request_id="my-request")
    assert eventually(lambda: any("request my-request: length" in line for line in server.lines))
    assert not any("secret" in line for line in server.lines)


# ---- starting and ending


def health_of(address: str) -> str:
    """What health says of the generation service, or the status of the failed call."""
    request = health_pb2.HealthCheckRequest(service="draftloom.v1.GenerationService")
    with grpc.insecure_channel(address) as channel:
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
        except grpc.RpcError as error:
            return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def test_nobody_is_served_before_the_worker_is_there(place: Place, tmp_path: Path) -> None:
    """While the server waits for its worker, health is not SERVING; then it is, and the first request is answered."""
    late = Worker(tmp_path)
    port = str(free_port())
    with place.serving(late.address, "--port", port) as server:
        time.sleep(0.5)
        assert health_of(f"127.0.0.1:{port}") != "SERVING" and not any("serving" in line for line in server.lines)
        late.start()
        try:
            assert health_of(server.address) == "SERVING"
            with draftloom.Client(server.address) as client:
                assert client.generate(PROMPT, max_tokens=2).usage.completion_tokens == 2
        finally:
            late.stop()


def test_sigterm_finishes_what_was_begun(place: Place, tmp_path: Path) -> None:
    """A stream in the middle of its answer gets all of it; the process ends with 0, and nobody answers any more."""
    slow = Worker(tmp_path).start()
    try:
        with place.serving(slow.address) as server, draftloom.Client(server.address) as client:
            whole = client.generate(PROMPT, max_tokens=20, speculation=False)
            slow.target.pause = 0.03
            with client.stream(PROMPT, max_tokens=20, speculation=False) as stream:
                chunks = iter(stream)
                text = next(chunks).text
                server.process.send_signal(signal.SIGTERM)
                text += "".join(chunk.text for chunk in chunks)
            assert text == whole.text
            assert server.process.wait(20) == 0
            with pytest.raises(draftloom.Unavailable):
                client.generate(PROMPT, timeout=5)
    finally:
        slow.stop()


def test_a_worker_that_goes_away_is_unavailable(place: Place, tmp_path: Path) -> None:
    """In the middle of an answer and before one: UNAVAILABLE, with advice to retry; the server lives on."""
    dying = Worker(tmp_path).start()
    dying.target.pause = 0.02
    settings = tmp_path / "settings.toml"
    settings.write_text("[model]\nworker_patience = 0.2\n")
    with place.serving(dying.address, "--config", str(settings)) as server, draftloom.Client(server.address) as client:
        with client.stream(PROMPT, max_tokens=500, speculation=False) as stream:
            chunks = iter(stream)
            next(chunks)
            dying.stop()
            with pytest.raises(draftloom.Unavailable) as caught:
                list(chunks)
        assert (caught.value.reason, caught.value.retry_after) == ("WORKER_LOST", 1)
        with pytest.raises(draftloom.Unavailable):
            client.generate(PROMPT, timeout=20)
        assert eventually(lambda: health_of(server.address) == "NOT_SERVING")
        assert server.process.poll() is None


def test_another_worker_takes_over_and_the_engine_has_no_torch(place: Place, tmp_path: Path) -> None:
    """Where importing torch fails, a server in front of two workers answers; one dies in the middle, the text is the same."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('there is no torch here')\n")
    bare = copy(place)
    bare.env = {**place.env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    workers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        workers.append(Worker(tmp_path / name).start())
    alive = list(workers)
    try:
        with bare.serving(",".join(each.address for each in workers)) as server, draftloom.Client(server.address) as client:
            whole = client.generate(PROMPT, max_tokens=40, temperature=0.9, seed=5)
            for each in workers:
                each.target.pause = 0.02
            with client.stream(PROMPT, max_tokens=40, temperature=0.9, seed=5) as stream:
                chunks = iter(stream)
                text = next(chunks).text
                busy = next(each for each in workers if each.target.num_open)
                alive.remove(busy)
                busy.stop()
                text += "".join(chunk.text for chunk in chunks)
            assert text == whole.text
            assert tokens_of(stream.completion) == tokens_of(whole)
            assert health_of(server.address) == "SERVING"
    finally:
        for each in alive:
            each.stop()


def test_a_port_in_use_is_said_before_anything_is_loaded(place: Place, server: Server) -> None:
    """One line, status 2, though the model is not even there."""
    port = server.address.rpartition(":")[2]
    status, out, err = place.run("serve", "--port", port, "--model", "no-such-model")
    assert (status, out) == (2, "")
    assert err == f"draftloom: cannot listen on: 127.0.0.1:{port}: Address already in use; choose another with server.port\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "smollm-135m"], "no such model: smollm-135m; did you mean: smollm2-135m"),
        (["--model", "./nothing.gguf"], "no such GGUF file: nothing.gguf"),
        (["--model", "empty"], "tokenizer.json is missing from the folder of model empty: empty"),
        (["--config", "none.toml"], "no such settings file: none.toml"),
        (["--host", "0.0.0.0"], "server.host does not work: 0.0.0.0; it is not loopback"),
        (["--kv-memory", "much"], "not a number of bytes"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(words: list[str], message: str, place: Place) -> None:
    """Status 2 and the reason; nothing keeps running."""
    (place.folder / "empty").mkdir(exist_ok=True)
    status, out, err = place.run("serve", "--port", "0", *words)
    assert (status, out) == (2, "")
    assert message in err and err.startswith("draftloom: ") and err.count("\n") == 1


def test_a_worker_of_another_model_is_refused_at_start(place: Place, worker: Worker, tmp_path: Path) -> None:
    """A tokenizer that is not the worker's would make nonsense of every answer."""
    other = write_model_folder(tmp_path / "other", byte_level(300))
    status, _, err = place.run("serve", "--port", "0", "--model", str(other), "--worker", worker.address)
    assert status == 2 and "the worker's tokenizer is not that of" in err and err.count("\n") == 1


# ---- requests at fault


@pytest.mark.parametrize(
    ("prompt", "options", "error", "reason", "field"),
    [
        (PROMPT, {"corpora": "cod"}, draftloom.NotFound, "NOT_FOUND", None),
        (PROMPT, {"model": "gpt"}, draftloom.NotFound, "NOT_FOUND", None),
        ("word " * 2000, {}, draftloom.InvalidRequest, "PROMPT_TOO_LONG", "prompt"),
        ("", {}, draftloom.InvalidRequest, "INVALID_REQUEST", "prompt"),
        (PROMPT, {"sources": "magic"}, draftloom.InvalidRequest, "INVALID_REQUEST", "speculation.sources"),
        (PROMPT, {"top_p": 2.0}, draftloom.InvalidRequest, "INVALID_REQUEST", "sampling.top_p"),
        (PROMPT, {"stop": [""]}, draftloom.InvalidRequest, "INVALID_REQUEST", "stopping.stop[0]"),
    ],
)
def test_a_request_at_fault_is_refused_by_name(
    prompt: str, options: Any, error: type[draftloom.DraftloomError], reason: str, field: str | None, client: draftloom.Client
) -> None:
    """Status, reason and field, unary and streaming; never UNKNOWN."""
    with pytest.raises(error) as caught:
        client.generate(prompt, **options)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == ([field] if field else [])
    with pytest.raises(error), client.stream(prompt, **options) as stream:
        list(stream)


def test_a_parameter_that_is_not_supported_is_refused(server: Server) -> None:
    """`n` is known, and two answers are not possible: never ignored."""
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        prompt = generation_pb2.Prompt(text=PROMPT)
        generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(prompt=prompt, n=2))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "n: only one answer to a prompt is supported: 2; leave it out and ask again"


@pytest.mark.parametrize(
    ("name", "file", "change", "fault"),
    [
        ("short", "seg-0000.suffixes", lambda data: data[:-40], "file has"),
        ("flipped", "seg-0000.tokens", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "content was altered"),
        ("foreign", "seg-0000.table", lambda data: b"GIF89a" + data[6:], "not a file of a draftloom corpus"),
        ("rewritten", "manifest.json", lambda data: data.replace(b'"num_documents": ', b'"num_documents": 1'), "altered"),
    ],
)
def test_a_damaged_corpus_is_named_and_served_without(
    name: str, file: str, change: Callable[[bytes], bytes], fault: str, place: Place, client: draftloom.Client
) -> None:
    """The same text, a warning that names the file; refused if required; listed as unusable; what is whole is drafted from."""
    build(name, [place.tree], TOKENIZER, Catalog(place.store))
    path = Catalog(place.store).active_path(name) / file
    path.write_bytes(change(path.read_bytes()))
    plain = client.generate(PROMPT, max_tokens=20, speculation=False)
    answer = client.generate(PROMPT, max_tokens=20, corpora=[name, "code"])
    assert answer.text == plain.text and list(answer.statistics.corpora) == ["code"]
    [warning] = answer.statistics.warnings
    assert fault in warning and str(path) in warning and "rebuild the corpus" in warning
    with pytest.raises(draftloom.FailedPrecondition) as caught:
        client.generate(PROMPT, corpora=name, require_corpus=True)
    assert caught.value.reason == "CORPUS_UNUSABLE"
    [listed] = [corpus for corpus in client.corpora() if corpus.name == name]
    assert not listed.usable and str(path) in listed.problem


def test_a_corpus_for_another_tokenizer_is_served_without(place: Place, client: draftloom.Client) -> None:
    """The warning says for which tokenizer it was built, and what to do."""
    build("foreigner", [place.tree], Tokenizer(byte_level(300)), Catalog(place.store))
    answer = client.generate(PROMPT, max_tokens=3, corpora="foreigner")
    assert answer.statistics.corpora == {}
    assert "was built with another tokenizer" in answer.statistics.warnings[0]
    assert "build it again for this model" in answer.statistics.warnings[0]


# ---- building from what cannot be indexed


def test_a_failed_build_leaves_what_was_there(place: Place, client: draftloom.Client, tmp_path: Path) -> None:
    """Empty, all-binary, missing: each one line and a status that is not 0; the version before stays active and whole."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "image.png").write_bytes(bytes(range(256)) * 8)
    assert place.build("kept")[0] == 0
    before = client.generate(PROMPT, max_tokens=3, corpora="kept").statistics.corpora
    messages = {}
    for folder in ("empty", "binary", "missing"):
        status, out, err = place.build("kept", tmp_path / folder)
        assert status in (1, 2) and not out
        [messages[folder]] = err.splitlines()
    assert f"there is nothing to index: {tmp_path / 'empty'} is empty" in messages["empty"]
    assert f"there is nothing to index in {tmp_path / 'binary'}: all was skipped: 1 binary" in messages["binary"]
    assert f"path to index cannot be used: {tmp_path / 'missing'}" in messages["missing"]
    assert client.generate(PROMPT, max_tokens=3, corpora="kept").statistics.corpora == before
    assert place.run("corpus", "check", "kept", "--full")[0] == 0
    assert not list((place.store / "kept" / "versions").glob("*.tmp"))


def test_a_symlink_loop_ends(place: Place, tmp_path: Path) -> None:
    """Links are not followed round: the files are taken once, and the loop is said to be skipped."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text(FILES["add.py"])
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "self").symlink_to("self")
    status, out, _ = place.run("corpus", "build", "loop", str(tmp_path / "a"), "--model", place.model, "--json")
    assert status == 0
    done = json.loads(out.splitlines()[-1])
    assert (done["files_taken"], done["skipped"]) == (1, {"symlink_loop": 2})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_is_said(place: Place, tmp_path: Path) -> None:
    """One line that names the folder."""
    tmp_path.chmod(0o500)
    status, _, err = place.run("corpus", "build", "x", str(place.tree), "--model", place.model, "--store", str(tmp_path / "s"))
    assert status == 1 and str(tmp_path) in err and "permission" in err.lower()


def test_a_store_in_the_way_is_said(place: Place, tmp_path: Path) -> None:
    """A file where the store should be: one line, and the file is left alone."""
    (tmp_path / "store").write_text("mine")
    words = ("--model", place.model, "--store", str(tmp_path / "store"))
    status, _, err = place.run("corpus", "build", "x", str(place.tree), *words)
    assert status == 1 and str(tmp_path / "store") in err and err.count("\n") == 1
    assert (tmp_path / "store").read_text() == "mine"


# ---- real weights


@pytest.mark.model
@pytest.mark.skipif(not (MODELS / "smollm2-135m").is_dir(), reason="smollm2-135m is not in the model cache")
def test_real_weights_say_the_same_with_and_without_drafts(place: Place) -> None:
    """One command with its own worker process: text is equal, greedy or sampled, and an answer given before saves steps."""
    env = place.env | {"DRAFTLOOM_CACHE": str(MODELS.parent)}
    prompt = "def add(first, second):\n    return first + second\n\n\ndef sub(first, second):\n    ret"
    command = place.command("serve", "--port", "0", "--model", "smollm2-135m", "--dtype", "int8", "--kv-memory", "64 MiB")
    with subprocess.Popen(command, cwd=place.folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            with draftloom.Client(Server(process).address, timeout=120) as client:
                for asked in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "top_p": 0.95}):
                    plain = client.generate(prompt, max_tokens=12, speculation=False, **asked)
                    drafted = client.generate(prompt, max_tokens=12, **asked)
                    again = client.generate(prompt, max_tokens=12, **asked)
                    assert (drafted.text, tokens_of(drafted)) == (plain.text, tokens_of(plain))
                    assert (again.text, tokens_of(again)) == (plain.text, tokens_of(plain))
                    assert again.statistics.num_steps < plain.statistics.num_steps == 12
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
