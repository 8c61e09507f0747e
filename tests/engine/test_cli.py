"""The command line as its user meets it: what goes where, which status, which one line says what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import draftloom
from engine import cli, spawn
from engine.config import Config
from engine.errors import ConfigError
from tests.server.scripted import ScriptedEngine, serving_in_thread

ROOT = Path(cli.__file__).resolve().parents[1]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and settings of this test's own."""
    for variable in [name for name in os.environ if name.startswith("DRAFTLOOM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("DRAFTLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTLOOM_HOME", str(tmp_path / "corpora"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR", ""))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `draftloom WORDS` in this process: (status, stdout, stderr)."""

    def run_it(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftloom", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run_it


@pytest.fixture(scope="module")
def scripted() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def server(scripted: ScriptedEngine) -> Iterator[str]:
    """The address of a server whose answers are its prompt, over and over."""
    with serving_in_thread(scripted) as address:
        yield address


def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """`engine.app.serve` replaced; the list has the settings it was called with."""
    configs: list[Config] = []

    def serve(config: Config) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("engine.app.serve", serve)
    return configs


def test_help_names_every_command(run: Run) -> None:
    """The commands of `corpora` stand among the others."""
    status, out, _ = run("--help")
    assert status == 0
    for name in ("corpus", "demo", "generate", "model", "serve"):
        assert f"│ {name} " in out


def test_version_is_one_line(run: Run) -> None:
    """Name and version, nothing else."""
    status, out, err = run("--version")
    assert (status, err) == (0, "") and out.startswith("draftloom ") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--port", "70000"], "draftloom: server.port does not work: 70000; use 0 to 65535\n"),
        (["serve", "--kv-memory", "a lot"], "draftloom: flag model.kv_memory is not a number of bytes"),
        (["serve", "--config", "none.toml"], "draftloom: no such settings file: none.toml\n"),
        (["serve", "--host", "0.0.0.0"], "draftloom: server.host does not work: 0.0.0.0; it is not loopback"),
        (["model", "pull", "smollm"], "draftloom: no such model: smollm; did you mean: smollm2-135m\n"),
        (["generate", "x", "--corpus", "a", "--no-corpus"], "draftloom: --no-corpus and --corpus a contradict one another; "),
        (["trace", "x", "--server", "h:1", "--model", "m"], "draftloom: a running server has settings of its own"),
        (["generate", "x", "--server", "h:1", "--model", "m"], "draftloom: a running server has settings of its own"),
        (["demo", "--package", "no_such_package"], "draftloom: no such package is installed here: no_such_package; name one"),
        (["demo", "--package", "rich", "--functions", "500"], "draftloom: package rich has too few functions to complete: "),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(run: Run, words: list[str], message: str) -> None:
    """Settings, models and flags that are not usable end a command before it does anything."""
    status, out, err = run(*words)
    assert status == 2 and out == "" and err.startswith(message) and err.count("\n") == 1


def test_an_unknown_flag_is_refused(run: Run) -> None:
    """With status 2, by name."""
    status, _, err = run("serve", "--prot", "1")
    assert status == 2 and "--prot" in err


def test_no_server_is_one_line_and_status_1(run: Run) -> None:
    """It says at which address nobody answers."""
    status, out, err = run("generate", "x", "--server", "127.0.0.1:1")
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert err.startswith("draftloom: no server answers at 127.0.0.1:1: connection refused; start one with `draftloom serve`")


def test_ctrl_c_is_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback."""

    def interrupt(_: Config) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.app.serve", interrupt)
    assert run("serve") == (130, "", "")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors raised on purpose are put into one line."""

    def fail(_: Config) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("engine.app.serve", fail)
    monkeypatch.setattr(sys, "argv", ["draftloom", "serve"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_flags_win_over_environment_over_file(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`serve` reads ./draftloom.toml unasked, and every flag reaches its setting."""
    configs = served(monkeypatch)
    Path("draftloom.toml").write_text("[server]\nport = 1\ndrain_seconds = 9\n[model]\nname = 'from-file'\n")
    monkeypatch.setenv("DRAFTLOOM_SERVER_PORT", "2")
    monkeypatch.setenv("DRAFTLOOM_MODEL_DTYPE", "float32")
    words = ["--port", "3", "--host", "0.0.0.0", "--insecure", "--threads", "1", "--kv-memory", "2 MiB", "--corpus", "a"]
    words += ["--corpus", "b", "--store", "s", "--max-nodes", "5", "--worker", "w:1,x:2", "--no-speculation"]
    assert run("serve", *words)[0] == 0
    (config,) = configs
    assert (config.server.port, config.server.host, config.server.drain_seconds) == (3, "0.0.0.0", 9.0)
    assert (config.model.name, config.model.dtype, config.model.threads) == ("from-file", "float32", 1)
    assert (config.model.kv_memory, config.model.worker) == (2 << 20, ("w:1", "x:2"))
    assert (config.corpora.default, config.corpora.store) == (("a", "b"), Path("s"))
    assert (config.speculation.enabled, config.speculation.max_nodes) == (False, 5)


def test_the_status_of_the_server_is_that_of_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose worker died ends with 1."""
    monkeypatch.setattr("engine.app.serve", lambda config: 1)
    assert run("serve")[0] == 1


def test_generate_prints_the_text_and_nothing_else_to_stdout(run: Run, server: str) -> None:
    """What it cost, and warnings, go to stderr."""
    status, out, err = run("generate", "abc", "--server", server, "-n", "7")
    assert (status, out) == (0, "abcabca")
    assert "7 tokens in" in err and "2.33 tokens per step" in err and "warning: corpus docs is damaged" in err


def test_generate_passes_on_what_was_asked(run: Run, server: str, scripted: ScriptedEngine, tmp_path: Path) -> None:
    """Every flag reaches the request; what is left out takes the server's default."""
    (tmp_path / "guess.txt").write_text("a guess")
    words = ["--corpus", "code", "--source", "prompt", "--max-nodes", "3", "--temperature", "0.5", "--top-p", "0.9"]
    words += ["--top-k", "4"]
    words += ["--min-p", "0.1", "--seed", "11", "--stop", "x", "--stop", "y", "--prediction", "guess.txt", "--no-speculation"]
    assert run("generate", "abc", "--server", server, *words)[0] == 0
    asked = scripted.requests[-1]
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k, asked.sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (asked.sampling.seed, asked.stop, asked.max_tokens) == (11, ("x", "y"), 128)
    options = asked.speculation
    assert (options.corpora, options.sources, options.max_nodes) == (("code",), ("prompt",), 3)
    assert (options.prediction, options.enabled) == ("a guess", False)
    assert run("generate", "abc", "--server", server)[0] == 0
    options = scripted.requests[-1].speculation
    assert (options.corpora, options.sources, options.max_nodes, options.enabled) == (None, None, None, True)


def test_a_refused_request_is_status_2(run: Run, server: str) -> None:
    """The server's own words arrive."""
    status, _, err = run("generate", "abc", "--server", server, "--top-p", "7")
    assert status == 2 and "top_p" in err and err.count("\n") == 1


def test_generate_reads_a_prompt_from_stdin(server: str) -> None:
    """A dash stands for it."""
    result = CliRunner().invoke(cli.app, ["generate", "-", "--server", server, "-n", "4"], input="xyz")
    assert result.stdout == "xyzx"


def test_show_sources_has_a_row_for_each(run: Run, server: str) -> None:
    """Off a terminal there is no colour, but the table is there."""
    _, out, err = run("generate", "abc", "--server", server, "-n", "6", "--show-sources")
    assert out == "abcabc" and "corpus:code" in err and "prompt" in err


def test_json_is_the_whole_answer(run: Run, server: str) -> None:
    """One object on stdout with text, ids, sources and statistics."""
    _, out, err = run("generate", "ab", "--server", server, "-n", "3", "--json")
    answer = json.loads(out)
    assert err == "" and out.count("\n") == 1
    assert answer["text"] == "aba" and answer["finish_reason"] == "length"
    assert answer["sources"] == [["corpus:code"], ["corpus:code", "prompt"], []]
    assert answer["statistics"]["num_steps"] == 1


def test_generate_asks_the_usual_server_if_it_is_there(run: Run, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And starts one of its own only if nobody answers there, or a flag says which model to use."""
    monkeypatch.setattr(draftloom, "DEFAULT_ADDRESS", server)
    assert run("generate", "ab", "-n", "2")[1] == "ab"

    def refuse(arguments: list[str]) -> Any:
        raise ConfigError(f"started with {arguments}")

    monkeypatch.setattr(spawn, "own_server", refuse)
    assert "started with ['--model', 'm', '--threads', '2']" in run("generate", "ab", "--model", "m", "--threads", "2")[2]
    monkeypatch.setattr(draftloom, "DEFAULT_ADDRESS", "127.0.0.1:1")
    assert "started with []" in run("generate", "ab")[2]


def test_no_corpus_reaches_the_request(run: Run, server: str, scripted: ScriptedEngine) -> None:
    """It is not the same as naming none."""
    assert run("generate", "abc", "--server", server, "--no-corpus")[0] == 0
    assert scripted.requests[-1].speculation.corpora == ()


def test_trace_writes_a_page_for_its_owner_alone(run: Run, server: str, tmp_path: Path) -> None:
    """All prompts are on one page; its path is all that goes to stdout; a file that others could read is closed to them."""
    (tmp_path / "out.html").touch(mode=0o644)
    status, out, _ = run("trace", "first prompt", "second", "--server", server, "-n", "7", "--out", "out.html")
    assert (status, out) == (0, "out.html\n")
    page = (tmp_path / "out.html").read_text()
    assert "first prompt" in page and "second" in page and page.startswith("<!doctype html>")
    assert (tmp_path / "out.html").stat().st_mode & 0o777 == 0o600


def test_generate_can_write_the_page_too(run: Run, server: str, tmp_path: Path, scripted: ScriptedEngine) -> None:
    """The text goes to stdout as without it, as JSON with the steps in it; unasked, nothing is traced."""
    assert run("generate", "abc", "--server", server, "-n", "4", "--trace", "t.html")[:2] == (0, "abca")
    assert "abc" in (tmp_path / "t.html").read_text()
    _, out, _ = run("generate", "abc", "--server", server, "-n", "4", "--trace", "t.html", "--json")
    assert json.loads(out)["steps"][0]["texts"] == ["a", "b", "c"]
    assert run("generate", "abc", "--server", server, "-n", "4")[0] == 0
    assert not scripted.requests[-1].speculation.trace


def test_a_page_that_cannot_be_written_is_status_2(run: Run, server: str) -> None:
    """With the file's name and the cause."""
    status, _, err = run("trace", "abc", "--server", server, "--out", "nowhere/t.html")
    assert status == 2 and "cannot write the page: nowhere/t.html: No such file or directory" in err


def test_models_are_listed_for_people_and_for_programs(run: Run) -> None:
    """The built-in one is there to pull."""
    assert "smollm2-135m" in run("model", "list")[1]
    (entry,) = json.loads(run("model", "list", "--json")[1])["models"]
    assert entry["name"] == "smollm2-135m" and entry["folder"] is None


def test_corpus_without_its_extra_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands work; --help still lists it."""
    monkeypatch.setitem(sys.modules, "pathspec", None)
    for module in [name for name in sys.modules if name.partition(".")[0] == "corpora"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "sqlite_utils", None)
    status, _, err = run("corpus", "build", "x", "--model", "y")
    assert status == 2 and err == "draftloom: a package is not installed: sqlite_utils; pip install 'draftloom[index]'\n"
    assert "corpus" in run("--help")[1]


@pytest.mark.parametrize("words", [[], ["corpus", "update", "code"]])
def test_without_typer_the_command_says_what_to_install(words: list[str]) -> None:
    """The base install is the client; its `draftloom` command explains itself."""
    code = f"import sys; sys.modules['typer'] = None; sys.argv[1:] = {words}; import engine.start; engine.start.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "draftloom: a package is not installed: typer; pip install 'draftloom[engine,worker,index]'\n"


# A server of one's own.


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child said is the error, of the same kind as the child's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(ConfigError) as caught, spawn.own_server(["--kv-memory", "1"]):
        pass
    assert str(caught.value) == "model.kv_memory does not work: 1; use at least 1 MiB"


def test_nobody_answers_at_a_free_port() -> None:
    """A port is free, and an address that is none has nobody."""
    assert not spawn.answers(f"127.0.0.1:{spawn.free_port()}")


def test_a_process_ends_with_its_parent() -> None:
    """When the other end of its standard input is gone, it is told to end, as by SIGTERM."""
    code = "import time, engine.spawn as s; s.end_with_parent(); print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(30) == -signal.SIGTERM
    process.stdout.close()


@pytest.mark.model
@pytest.mark.slow
def test_the_whole_of_it_on_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index a folder, generate with and without speculation through servers of their own: the same text."""
    monkeypatch.delenv("DRAFTLOOM_CACHE")
    from engine.models import cache_root

    if not (cache_root() / "smollm2-135m").is_dir():
        pytest.skip("smollm2-135m is not in the model cache; run `draftloom model pull smollm2-135m`")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text(Path(cli.__file__).read_text())

    def draftloom_command(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "engine.cli", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    draftloom_command("corpus", "build", "code", str(tmp_path / "code"), "--model", "smollm2-135m")
    prompt = 'def main() -> None:\n    """Run the command line;'
    words = ["generate", prompt, "--model", "smollm2-135m", "--max-tokens", "24", "--json", "--corpus", "code"]
    drafted, plain = (json.loads(draftloom_command(*words, *more)) for more in ([], ["--no-speculation"]))
    assert drafted["token_ids"] == plain["token_ids"] and drafted["text"] == plain["text"]
    assert drafted["statistics"]["num_accepted"] > 0 == plain["statistics"]["num_accepted"]


def test_kernels_are_compiled_anew_when_one_that_they_call_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled kernels hold others of other files; so any file of kernels, and no other, decides where they are kept."""
    names = "engine/kernels.py", "retriever/deep/own_kernels.py", "engine/cli.py"
    files = [tmp_path / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    monkeypatch.setattr(cli, "__file__", str(files[-1]))
    folders = {cli.kernels_folder()}
    for num, file in enumerate(files[:2], 2):
        file.write_text("changed")
        folders.add(cli.kernels_folder())
        assert len(folders) == num
    files[-1].write_text("changed")
    assert cli.kernels_folder() in folders


def test_code_of_the_folder_one_stands_in_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with an `engine` of its own: processes of ours run ours."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('foreign code')")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([*spawn.running("engine.cli"), "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"draftloom {version('draftloom')}\n"), done.stderr
    monkeypatch.syspath_prepend("")
    assert "-P" not in spawn.running("engine.cli"), "where this process looks, too"
