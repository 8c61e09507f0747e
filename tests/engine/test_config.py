"""Settings: where they come from, which wins, what is refused and how the refusal reads."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import Config, Size, is_loopback, load, reference
from engine.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "draftloom.toml"
    file.write_text(text)
    return file


def refusal(file: Path | None = None, environment: dict[str, str] | None = None, flags: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, environment, flags)
    return str(caught.value)


def test_defaults_are_a_valid_config_on_loopback() -> None:
    """With nothing said, the server listens on loopback and serves the built-in model."""
    config = load()
    assert config == Config()
    assert config.address == "127.0.0.1:50151"
    assert is_loopback(config.server.host)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each layer overrides the one below it, key by key."""
    file = write(tmp_path, "[server]\nport = 1\ndrain_seconds = 1\n[model]\nname = 'from-file'\nthreads = 1\n")
    environment = {"DRAFTLOOM_MODEL_THREADS": "2", "DRAFTLOOM_SERVER_PORT": "2", "DRAFTLOOM_CACHE": "/elsewhere"}
    config = load(file, environment, {"server.port": 3, "model.dtype": None})
    assert (config.server.port, config.model.threads, config.model.name) == (3, 2, "from-file")
    assert (config.server.drain_seconds, config.model.dtype) == (1.0, "auto")


def test_environment_text_is_read_as_the_type_of_its_key() -> None:
    """Numbers, truth values, sizes, lists and paths can all be given as text."""
    config = load(
        environment={
            "DRAFTLOOM_SPECULATION_ENABLED": "false",
            "DRAFTLOOM_SPECULATION_DEADLINE_MS": "7.5",
            "DRAFTLOOM_MODEL_KV_MEMORY": "512 MiB",
            "DRAFTLOOM_CORPORA_DEFAULT": "a, b",
            "DRAFTLOOM_CORPORA_STORE": "/some/where",
        }
    )
    assert config.speculation.enabled is False
    assert config.speculation.deadline_ms == 7.5
    assert config.model.kv_memory == 512 << 20
    assert config.corpora.default == ("a", "b")
    assert config.corpora.store == Path("/some/where")


def test_a_path_in_the_file_is_relative_to_the_file(tmp_path: Path) -> None:
    """A settings file means the same from wherever the server is started."""
    assert load(write(tmp_path, "[corpora]\nstore = 'here'\n")).corpora.store == tmp_path / "here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", "unknown setting in {file}: server.prot; did you mean: server.port"),
        ("[sever]\nport = 1\n", "unknown section in {file}: [sever]; did you mean: [server]"),
        ("[qqq]\n", "unknown section in {file}: [qqq]; there are server, model, speculation, corpora, memory"),
        ("server = 1\n", "server in {file} must be a section: write [server] on a line of its own"),
        ("[server]\nport = '1'\n", "server.port in {file} is not a whole number: '1'"),
        ("[server]\nport = true\n", "server.port in {file} is not a whole number: True"),
        ("[server]\ninsecure = 'true'\n", "server.insecure in {file} is not true or false: 'true'"),
        (
            "[model]\nkv_memory = '1 parsec'\n",
            "model.kv_memory in {file} is not a number of bytes, or a text like \"512 MiB\": '1 parsec'",
        ),
        ("[corpora]\ndefault = 'a'\n", "corpora.default in {file} is not a list of names: 'a'"),
        ("[corpora]\ndefault = [1]\n", "corpora.default in {file} is not a list of names: [1]"),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    """Whatever is wrong in a file, the message names the file, the key and the value."""
    file = write(tmp_path, text)
    assert refusal(file) == message.format(file=file)


def test_a_file_that_cannot_be_parsed_is_refused(tmp_path: Path) -> None:
    """Broken TOML, bytes that are no text, and a missing file each say so."""
    assert refusal(write(tmp_path, "[server")).startswith(f"not valid TOML: {tmp_path / 'draftloom.toml'}: ")
    (tmp_path / "draftloom.toml").write_bytes(b"\xff\xfe")
    assert refusal(tmp_path / "draftloom.toml").startswith("not valid TOML: ")
    assert refusal(tmp_path / "none.toml") == f"no such settings file: {tmp_path / 'none.toml'}"
    assert refusal(tmp_path) == f"cannot read the settings file: {tmp_path}: Is a directory"


def test_a_misspelt_environment_variable_is_refused() -> None:
    """A variable of one of the sections that names no setting is an error, not silence."""
    assert refusal(environment={"DRAFTLOOM_SERVER_PROT": "1"}) == (
        "unknown setting in the environment: server.prot; did you mean: server.port"
    )
    assert refusal(environment={"DRAFTLOOM_SERVER_PORT": "x"}) == "DRAFTLOOM_SERVER_PORT is not a whole number: 'x'"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"server.port": 70000}, "server.port does not work: 70000; use 0 to 65535"),
        ({"server.host": "0.0.0.0"}, "server.host does not work: 0.0.0.0; it is not loopback"),
        ({"server.drain_seconds": -1.0}, "server.drain_seconds does not work: -1.0; use 0 or more"),
        ({"model.name": ""}, "model.name does not work: ''; name a model"),
        ({"model.device": "tpu"}, "model.device does not work: tpu; use one of auto, cpu, cuda"),
        ({"model.device": "cuda", "model.dtype": "int8"}, "model.dtype does not work: int8; int8 runs on the CPU alone"),
        ({"model.dtype": "int4"}, "model.dtype does not work: int4; use one of auto, int8, bfloat16, float32"),
        ({"model.threads": 0}, "model.threads does not work: 0; use 1 or more"),
        ({"model.kv_memory": 5}, "model.kv_memory does not work: 5; use at least 1 MiB"),
        ({"speculation.max_nodes": 257}, "speculation.max_nodes does not work: 257; use 0"),
        ({"speculation.deadline_ms": 0.0}, "speculation.deadline_ms does not work: 0.0; use more than 0"),
        ({"speculation.sources": ("dice",)}, "speculation.sources does not work: dice; there are corpus, prompt"),
        ({"speculation.sources": ("prompt",), "corpora.default": ("a",)}, "corpora.default does not work: a; the source"),
    ],
)
def test_values_out_of_range_or_at_odds_are_refused(flags: dict[str, object], message: str) -> None:
    """`validate` names the setting, its value, and what to do."""
    assert refusal(flags=flags).startswith(message)


def test_a_public_host_needs_to_be_asked_for() -> None:
    """Plain text on a public interface is possible only with the word for it."""
    assert load(flags={"server.host": "0.0.0.0", "server.insecure": True}).address == "0.0.0.0:50151"
    assert load(flags={"server.host": "::1"}).address == "[::1]:50151"


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("1 KiB", 1024), ("1.5GiB", 3 << 29), ("2 mb", 2_000_000), ("7 B", 7)])
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    """Binary and decimal units, any case, with or without a space."""
    assert Size.parse(text) == size


def test_a_size_reads_back_as_what_it_prints() -> None:
    """str and parse are inverse."""
    for size in (1, 1000, 1 << 10, 3 << 20, 1 << 30, (1 << 30) + 1):
        assert Size.parse(str(Size(size))) == size


def test_the_reference_has_a_row_for_every_setting() -> None:
    """No setting goes undocumented."""
    text = reference()
    for section in fields(Config):
        for key in fields(getattr(Config(), section.name)):
            assert f"| `{key.name}` | " in text
