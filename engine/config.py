"""What `draftloom serve` can be told: draftloom.toml, the environment, flags.

    flags  >  DRAFTLOOM_<SECTION>_<KEY> in the environment  >  draftloom.toml  >  defaults

Reading settings opens one file and touches nothing else; `engine.app` builds from them. A key that does not exist is
refused by name, wherever it stands. What a setting means is written once, beside it: docs/configuration.md shows `reference()`.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine.drafters import DRAFTERS
from engine.errors import ConfigError
from engine.memory import RETENTION_DAYS, TENANT_BYTES, TOTAL_BYTES
from engine.models import DEFAULT_MODEL

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "int8", "bfloat16", "float32")
FILE = "draftloom.toml"
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class Size(int):
    """A number of bytes; written as 1073741824 or "1 GiB"."""

    @staticmethod
    def parse(text: str) -> Size:
        """Raises ValueError for anything but a number and one of the units B, KiB, MiB, GiB, kB, MB, GB."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(text)
        return Size(float(match[1]) * _UNITS[match[2].lower()])

    def __str__(self) -> str:
        for unit in ("GiB", "MiB", "KiB"):
            if self and self % _UNITS[unit.lower()] == 0:
                return f"{int(self) // _UNITS[unit.lower()]} {unit}"
        return str(int(self))


def setting(default: Any, doc: str) -> Any:
    """A field with what the user is told about it: the meaning, the unit, a rule of thumb."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class ServerSettings:
    """[server]: where it listens and how it ends."""

    host: str = setting("127.0.0.1", "Address to listen on. Anything but loopback also needs `insecure`.")
    port: int = setting(50151, "TCP port. 0 lets the system choose one, which is printed at start.")
    insecure: bool = setting(
        False,
        "Allow a host that is not loopback. Connections are plain text and everyone who reaches the port is served: "
        "use it behind a proxy or inside a private network only.",
    )
    drain_seconds: float = setting(
        30.0,
        "At SIGTERM, how many seconds requests that have begun may go on. A little more than your longest usual answer; "
        "0 stops at once.",
    )


@dataclass(frozen=True)
class ModelSettings:
    """[model]: the target, in a process of its own."""

    name: str = setting(
        DEFAULT_MODEL, "A built-in or pulled name, a safetensors folder, a GGUF file or a hub id; see `draftloom model list`."
    )
    device: str = setting(
        "auto",
        "Where the model runs: `cpu`, or `cuda`, a GPU that torch sees (of several the first in CUDA_VISIBLE_DEVICES); "
        "`auto` is cuda where there is one, unless `dtype` is int8.",
    )
    dtype: str = setting(
        "auto",
        "Number format of the weights: `int8` (on a CPU), `bfloat16`, `float32`; `auto` is int8 on a CPU, bfloat16 on a GPU. "
        "Only int8 is strict: equal bit for bit, whatever else is served.",
    )
    threads: int | None = setting(
        None, "CPU threads of a pass; unset, one per core. Fewer where other work shares the machine, or with float sums."
    )
    kv_memory: Size = setting(
        Size(1 << 30),
        "Most memory for keys and values of all open requests. A token takes 2 x layers x KV heads x head size x 4 bytes: "
        "45 KiB in the built-in model, 56 KiB in Qwen2.5 1.5B; half of that in bfloat16 on a GPU, whose memory it is.",
    )
    worker: tuple[str, ...] = setting(
        (),
        "Addresses of workers that run already (`host:port` or `unix:/path`), all with the same model; see `draftloom worker`. "
        "Unset, the server starts one and ends it. With them, `device`, `dtype`, `threads` and `kv_memory` are the workers' "
        "own affair.",
    )
    worker_patience: float = setting(
        10.0,
        "When a worker is lost and there is no other: how many seconds an answer that has begun waits for one to come back. "
        "New requests are refused within a second.",
    )
    worker_silence: float = setting(
        60.0,
        "A worker that answers nothing for so many seconds, while it is connected, hangs: its answers move to another, and the "
        "server's own is started anew. A worker answers between two passes; raise it where a pass of 256 tokens takes longer.",
    )
    worker_tls: bool = setting(False, "Connect to workers by TLS, believing the system's certificate authorities.")
    worker_ca: Path | None = setting(None, "Whose certificates to believe instead: a PEM file. Implies `worker_tls`.")
    worker_cert: Path | None = setting(None, "What to show to workers (PEM), with `worker_key`. Implies `worker_tls`.")
    worker_key: Path | None = setting(None, "Its key (PEM).")


@dataclass(frozen=True)
class SpeculationSettings:
    """[speculation]: how drafts are made. Nothing here changes an answer, only its speed."""

    enabled: bool = setting(True, "False serves by plain decoding, one token a pass, whatever a request asks.")
    max_nodes: int = setting(
        32, "Most candidates in a tree. The measured cost of a pass decides below this; lower it only to experiment."
    )
    sources: tuple[str, ...] = setting(tuple(DRAFTERS), "Sources to draft with. A request may use fewer, never others.")
    prompt_rows: int = setting(
        32,
        "For how many tokens at the end of a prompt the model also says what is likely next, which `recycle` learns from. "
        "A row costs a tenth to a third of reading its token; 0 asks for none.",
    )
    trace: bool = setting(
        True,
        "Whether a request may ask how its steps came about (`draftloom trace`). It is told candidates that came to nothing, "
        "too: pieces of its corpora and of its tenant's history.",
    )
    deadline_ms: float = setting(
        20.0,
        "How long a step waits for its drafts, in milliseconds. A source that is later is left out of that step. "
        "Keep it well below the time of a pass.",
    )


@dataclass(frozen=True)
class CorporaSettings:
    """[corpora]: what `draftloom corpus build` made."""

    store: Path | None = setting(
        None,
        "Folder that holds the corpora and their catalog. Unset: `$DRAFTLOOM_HOME`, else `~/.local/share/draftloom/corpora`.",
    )
    default: tuple[str, ...] = setting(
        (), "Corpora for requests that name none. A request that wants none of them says so, or switches the source off."
    )


@dataclass(frozen=True)
class MemorySettings:
    """[memory]: what is remembered of each tenant: its earlier answers, and which drafts were right."""

    enabled: bool = setting(
        True,
        "False: no request learns or draws on earlier ones unless it asks to, and nothing is read from or written to disk.",
    )
    folder: Path | None = setting(
        None,
        "Folder that it is kept in, readable by its owner only. Unset: `$XDG_STATE_HOME/draftloom/memory`, else below "
        "`~/.local/state`. Only one server at a time may use it.",
    )
    retention_days: float = setting(
        RETENTION_DAYS, "Days after which a text is forgotten. `draftloom history clear` does it at once."
    )
    tenant_bytes: Size = setting(
        Size(TENANT_BYTES),
        "Most memory for one tenant's earlier answers; a token takes 56 bytes, on disk 4. What is least useful goes first.",
    )
    total_bytes: Size = setting(
        Size(TOTAL_BYTES), "Most memory for all tenants. Those that have not asked for longest are left on disk until they ask."
    )


@dataclass(frozen=True)
class Config:
    """All settings of a server.

    1. `validate()` holds for what `load` returns: as far as one can tell without looking at the machine, it can be built from.
    2. Paths out of a file are absolute, relative to that file; those out of flags and environment are taken as they are.
    """

    server: ServerSettings = field(default_factory=ServerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    corpora: CorporaSettings = field(default_factory=CorporaSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)

    @property
    def address(self) -> str:
        """host:port to listen on, an IPv6 host in brackets."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return f"{host}:{self.server.port}"

    def validate(self) -> None:
        """Raise ConfigError for the first setting that is out of range or at odds with another."""
        server, model, speculation, memory = self.server, self.model, self.speculation, self.memory
        _check(0 <= server.port <= 65535, "server.port", server.port, "use 0 to 65535")
        _check(server.drain_seconds >= 0, "server.drain_seconds", server.drain_seconds, "use 0 or more seconds")
        _check(
            server.insecure or is_loopback(server.host),
            "server.host",
            server.host,
            "it is not loopback and connections are plain text; listen on 127.0.0.1 behind a proxy, or set server.insecure",
        )
        _check(bool(model.name), "model.name", "''", "name a model")
        _check(model.device in DEVICES, "model.device", model.device, f"use one of {', '.join(DEVICES)}")
        _check(model.dtype in DTYPES, "model.dtype", model.dtype, f"use one of {', '.join(DTYPES)}")
        _check(
            (model.device, model.dtype) != ("cuda", "int8"),
            "model.dtype",
            model.dtype,
            "int8 runs on the CPU alone; with model.device cuda use bfloat16, float32 or auto",
        )
        _check(model.threads is None or model.threads >= 1, "model.threads", model.threads, "use 1 or more, or leave it out")
        _check(model.worker_patience >= 0, "model.worker_patience", model.worker_patience, "use 0 or more seconds")
        _check(model.worker_silence > 0, "model.worker_silence", model.worker_silence, "use more than 0 seconds")
        _check(
            (model.worker_cert is None) == (model.worker_key is None),
            "model.worker_cert",
            model.worker_cert,
            "model.worker_cert and model.worker_key go together",
        )
        _check(model.kv_memory >= 1 << 20, "model.kv_memory", model.kv_memory, "use at least 1 MiB")
        _check(0 <= speculation.max_nodes <= 256, "speculation.max_nodes", speculation.max_nodes, "use 0 (no drafts) to 256")
        _check(0 <= speculation.prompt_rows <= 4096, "speculation.prompt_rows", speculation.prompt_rows, "use 0 (none) to 4096")
        _check(speculation.deadline_ms > 0, "speculation.deadline_ms", speculation.deadline_ms, "use more than 0 milliseconds")
        for source in speculation.sources:
            _check(source in DRAFTERS, "speculation.sources", source, f"there are {', '.join(DRAFTERS)}")
        _check(memory.retention_days > 0, "memory.retention_days", memory.retention_days, "use more than 0 days")
        _check(memory.tenant_bytes >= 1 << 16, "memory.tenant_bytes", memory.tenant_bytes, "use at least 64 KiB")
        _check(
            memory.total_bytes >= memory.tenant_bytes,
            "memory.total_bytes",
            memory.total_bytes,
            f"use at least memory.tenant_bytes, {memory.tenant_bytes}",
        )
        _check(
            not self.corpora.default or "corpus" in speculation.sources or not speculation.enabled,
            "corpora.default",
            ", ".join(self.corpora.default),
            "the source that drafts from corpora is switched off; add corpus to speculation.sources",
        )


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Settings from `flags` ("section.key" -> value, None is not given), then `environment`, then `file`, then defaults.

    Without `file` none is read. Raises ConfigError naming the file or variable, the key and the value.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_file(file))
    values.update(_from_environment(environment or {}))
    for key, value in (flags or {}).items():
        if value is not None:
            values[key] = _convert(_setting(key, "a flag"), value, f"flag {key}", None)
    sections = {}
    for name, cls in _sections().items():
        sections[name] = cls(**{f.name: values[f"{name}.{f.name}"] for f in fields(cls) if f"{name}.{f.name}" in values})
    config = Config(**sections)
    config.validate()
    return config


def reference() -> str:
    """All settings as Markdown, for docs/configuration.md."""
    lines = []
    for name, cls in _sections().items():
        about = (cls.__doc__ or "").partition(": ")[2]
        lines += [f"### [{name}]", "", about[:1].upper() + about[1:], "", "| key | default | meaning |", "| --- | --- | --- |"]
        for f in fields(cls):
            lines.append(f"| `{f.name}` | {_shown(f.default)} | {f.metadata['doc']} |")
        lines.append("")
    return "\n".join(lines)


def is_loopback(host: str) -> bool:
    """True for localhost, 127.0.0.0/8 and ::1; no name is looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sections() -> dict[str, Any]:
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in fields(Config)}


def _keys() -> Iterator[str]:
    for section, cls in _sections().items():
        yield from (f"{section}.{f.name}" for f in fields(cls))


def _setting(key: str, where: str) -> tuple[Field[Any], Any]:
    """The field called section.key and its type; ConfigError, with the nearest name there is, if there is none."""
    section, _, name = key.partition(".")
    cls = _sections().get(section)
    for f in fields(cls) if cls else ():
        if f.name == name:
            return f, typing.get_type_hints(cls)[name]
    raise ConfigError(f"unknown setting in {where}: {key}; {_meant(key)}")


def _meant(key: str) -> str:
    close = get_close_matches(key, list(_keys()), n=1, cutoff=0.5)
    return f"did you mean: {close[0]}" if close else "docs/configuration.md lists all settings"


def _from_file(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no such settings file: {file}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the settings file: {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {file}: {error}") from error
    values = {}
    for section, entries in table.items():
        if section not in _sections():
            close = get_close_matches(section, list(_sections()), n=1)
            advice = f"did you mean: [{close[0]}]" if close else f"there are {', '.join(_sections())}"
            raise ConfigError(f"unknown section in {file}: [{section}]; {advice}")
        if not isinstance(entries, dict):
            raise ConfigError(f"{section} in {file} must be a section: write [{section}] on a line of its own")
        for key, value in entries.items():
            name = f"{section}.{key}"
            values[name] = _convert(_setting(name, str(file)), value, f"{name} in {file}", file.parent)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """DRAFTLOOM_SERVER_PORT and its like; other DRAFTLOOM_ variables (DRAFTLOOM_CACHE, DRAFTLOOM_HOME) belong to others."""
    values = {}
    for variable, text in environment.items():
        section, _, key = variable.removeprefix("DRAFTLOOM_").lower().partition("_")
        if variable.startswith("DRAFTLOOM_") and section in _sections() and text:
            values[f"{section}.{key}"] = _convert(_setting(f"{section}.{key}", "the environment"), text, variable, None)
    return values


def _convert(known: tuple[Field[Any], Any], value: Any, where: str, base: Path | None) -> Any:
    """`value` as the field's type. Text out of the environment is parsed; a TOML value must have the right type already."""
    annotation = known[1]
    if isinstance(annotation, types.UnionType):
        annotation = next(option for option in typing.get_args(annotation) if option is not types.NoneType)
    wanted, text = "", isinstance(value, str) and base is None
    try:
        if annotation is bool:
            wanted = "true or false"
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()] if text else _typed(value, bool)
        if annotation is Size:
            wanted = 'a number of bytes, or a text like "512 MiB"'
            return Size.parse(value) if isinstance(value, str) else Size(_typed(value, int))
        if annotation is int:
            wanted = "a whole number"
            return int(value) if text else _typed(value, int)
        if annotation is float:
            wanted = "a number"
            return float(value) if text else float(_typed(value, int, float))
        if annotation is Path:
            wanted = "a path"
            path = Path(_typed(value, str, Path)).expanduser()
            return path if base is None else base.absolute() / path
        if annotation is str:
            wanted = "a text"
            return _typed(value, str)
        wanted = "a list of names"
        if text:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(_typed(item, str) for item in _typed(value, list, tuple))
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ConfigError(f"{where} is not {wanted}: {value!r}") from None


def _typed(value: Any, *allowed: type) -> Any:
    """`value` if it is of an allowed type; a bool is no number."""
    if isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)):
        return value
    raise TypeError(value)


def _shown(default: Any) -> str:
    match default:
        case None | "" | ():
            return "unset"
        case bool():
            return f"`{str(default).lower()}`"
        case tuple():
            return "`[" + ", ".join(f'"{item}"' for item in default) + "]`"
        case str() | Size():
            return f'`"{default}"`'
    return f"`{default}`"


def _check(holds: bool, key: str, value: object, advice: str) -> None:
    if not holds:
        raise ConfigError(f"{key} does not work: {value}; {advice}")
