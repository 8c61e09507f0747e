"""What README and docs/ say is so: commands and flags exist, settings and sources are documented, examples run."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import typer
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import draftloom
from engine.acceptance import Limits, SamplingParams
from engine.calibration import Calibration
from engine.cli import app
from engine.config import load, reference
from engine.drafters import DRAFTERS, DraftRequest
from engine.drafters.panel import Panel
from engine.loop import Times, decode
from engine.server.serve import DEFAULT_ADDRESS, GENERATION
from engine.session import Session
from engine.target import SequenceRequest
from engine.target.fake import FakeTarget
from tests.server.scripted import ScriptedEngine, serving_in_thread

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def command_lines(program: str = "draftloom") -> Iterator[tuple[str, list[str]]]:
    """(page, words after the first) of every line of a shell block that begins with `program`."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] == program:
                    yield page, words[1 : words.index("<")] if "<" in words else words[1:]


def commands(command: Any, path: str = "draftloom") -> Iterator[tuple[str, Any]]:
    """(full name, command) of every command that does something itself."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from commands(command.get_command(None, name), f"{path} {name}")


COMMANDS = dict(commands(typer.main.get_command(app)))


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words begin with, and the rest of them."""
    for length in (2, 1):
        if (name := " ".join(["draftloom", *words[:length]])) in COMMANDS:
            return COMMANDS[name], words[length:]
    raise AssertionError(f"no such command: draftloom {' '.join(words)}")


def test_pages_show_commands() -> None:
    """The reader of pages finds what it is looking for, so that the tests below test something."""
    assert len(list(command_lines())) > 30


@pytest.mark.parametrize(("page", "words"), list(command_lines()), ids=str)
def test_a_command_in_a_page_is_one_that_exists(page: str, words: list[str]) -> None:
    """Every command line names a command, flags that it has, with a value where they take one, and all of its arguments."""
    command, rest = find(words)
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}
    arguments = 0
    words_left = iter(rest)
    for word in words_left:
        if not word.startswith("-") or word == "-":
            arguments += 1
            continue
        assert word in options, f"{page}: {command.name} has no flag {word}"
        if not options[word].is_flag:
            assert not next(words_left, "-").startswith("--"), f"{page}: {word} needs a value"
    needed = [param for param in command.params if param.param_type_name == "argument" and param.required]
    assert arguments >= len(needed), f"{page}: {command.name} needs {len(needed)} arguments"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    """In the table of the README, and at work in docs/cli.md."""
    assert f"`{name}`" in PAGES["README.md"]
    assert re.search(rf"^{name}\b", "\n".join(blocks("docs/cli.md", "sh")), re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_flag_explains_itself(name: str) -> None:
    """--help has a sentence for each."""
    command = COMMANDS[name]
    assert command.help
    assert not [param.name for param in command.params if not param.help and not getattr(param, "hidden", False)]


def test_every_make_target_in_a_page_exists() -> None:
    """And `make help` lists every one there is."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {name for page in PAGES.values() for name in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", page, re.MULTILINE)}
    assert {first or second for first, second in named} <= targets
    assert targets == set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


def test_the_page_of_settings_is_the_settings() -> None:
    """docs/configuration.md ends with what the code says about itself."""
    assert PAGES["docs/configuration.md"].endswith(reference().rstrip() + "\n")


def test_the_example_of_a_settings_file_is_one(tmp_path: Path) -> None:
    """Every TOML block loads."""
    found = [block for page in PAGES for block in blocks(page, "toml")]
    assert found
    for block in found:
        (tmp_path / "draftloom.toml").write_text(block)
        load(tmp_path / "draftloom.toml")


@pytest.mark.parametrize("source", DRAFTERS)
def test_every_source_is_documented(source: str) -> None:
    """docs/sources.md has a row for it."""
    assert f"| `{source}` |" in PAGES["docs/sources.md"]


def test_the_complete_drafter_of_the_page_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put where the page says, with the line that it says, it drafts, and the text is that of plain decoding."""
    code, line = blocks("docs/sources.md", "python")
    module = types.ModuleType("engine.drafters.bigram")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "docs/sources.md", "exec"), module.__dict__)
    ((name, where),) = eval("{" + line + "}").items()
    assert where == f"{module.__name__}:BigramDrafter"
    drafter = module.BigramDrafter()
    assert drafter.name == name

    target = FakeTarget(vocab_size=16, order=2)
    prompt = np.arange(8, dtype=np.int32)

    async def run(drafters: list[Any]) -> tuple[list[int], int]:
        request = SequenceRequest(prompt, SamplingParams(), Limits(max_tokens=60), "default")
        with Panel(drafters, DraftRequest("default", "fake", prompt), 16, deadline=10.0) as panel:
            session = Session(prompt, panel.labels, Calibration(), 4)
            async with target.open(request) as sequence:
                async for _ in decode(session, panel, sequence, Times()):
                    pass
            assert [record.errors for record in panel.records] == [0] * len(drafters)
        return session.tokens.tolist(), session.tally.num_accepted

    plain, _ = asyncio.run(run([]))
    drafted, num_accepted = asyncio.run(run([drafter]))
    assert drafted == plain
    assert num_accepted > 0


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_the_python_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block that makes a client runs against a real server."""
    examples = [block for block in blocks(page, "python") if "draftloom.Client(" in block]
    assert examples
    with serving_in_thread(ScriptedEngine()) as address:
        client = draftloom.Client
        monkeypatch.setattr(draftloom, "Client", lambda *args, **options: client(address, **options))
        for example in examples:
            exec(compile(example, page, "exec"), {})
    assert "def fibonacci" in capsys.readouterr().out


@pytest.mark.parametrize(("page", "words"), list(command_lines("grpcurl")), ids=str)
def test_a_grpcurl_line_of_a_page_is_answered(page: str, words: list[str]) -> None:
    """The way grpcurl does it: the server is asked for its messages, JSON becomes one of them, and the call succeeds."""
    plain, *words = words
    assert plain == "-plaintext"
    data = "{}"
    if words[0] == "-d":
        _, data, *words = words
    told, *words = words
    assert told == DEFAULT_ADDRESS
    with serving_in_thread(ScriptedEngine()) as address, grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        match words:
            case ["list"]:
                assert GENERATION in database.get_services()
            case ["describe", symbol]:
                assert pool.FindMessageTypeByName(symbol).fields
            case [path]:
                service, name = path.split("/")
                method = pool.FindServiceByName(service).FindMethodByName(name)
                request = json_format.Parse(data, GetMessageClass(method.input_type)())
                read = GetMessageClass(method.output_type).FromString
                if method.server_streaming:
                    assert list(channel.unary_stream(f"/{path}", type(request).SerializeToString, read)(request))
                else:
                    assert channel.unary_unary(f"/{path}", type(request).SerializeToString, read)(request).ByteSize()
            case _:
                raise AssertionError(f"{page}: grpcurl has no {' '.join(words)}")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link, and every file or folder named as code, is there."""
    base = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page])
    assert [link for link in links if not (base / link).exists()] == []
    named = re.findall(r"`((?:corpora|docs|draftloom|engine|proto|retriever|tests)/[\w./]*)`", PAGES[page])
    created = {"engine/drafters/bigram.py"}  # docs/sources.md says to write it
    assert [name for name in named if name not in created and not (ROOT / name).exists()] == []


def test_the_map_has_every_top_level_folder() -> None:
    """The README says what each folder is for."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_", "build"))}
    mapped = set(re.findall(r"^\| \[(\w+)/\]", PAGES["README.md"], re.MULTILINE))
    assert mapped == {name for name in folders if not name.endswith(".egg-info")}


def test_extras_in_the_readme_exist() -> None:
    """What one is told to install can be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for names in re.findall(r"draftloom\[([\w,]+)\]", PAGES["README.md"]) for extra in names.split(",")}
    assert named and named <= set(project["optional-dependencies"])


def test_pinned_versions_satisfy_what_is_asked_for() -> None:
    """constraints.txt pins every direct dependency, torch without a build tag."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.replace("_", "-"): version for name, version in pins.items() if not name.startswith("#")}
    asked = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    missing = [line for line in asked if re.split(r"[<>=!~;\[ ]", line)[0].lower() not in pins]
    assert missing == []
    assert "+" not in pins["torch"]
