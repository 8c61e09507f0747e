"""What a server remembers of its tenants between requests and restarts: earlier answers, calibration, recycled tokens.

    Memory      named groups of arrays on disk, one folder for each model and tenant
    Tenants     the tenants in use: their states live in memory, and are saved every few minutes and at the end
    Tenant      one of them, and all that a source gets to see

Everything here is a hint: what is lost, damaged or cleared costs speed, never an answer. So nothing here raises on a bad disk;
it is said in the log, and what cannot be read counts as not there.

On disk a tenant is `<root>/<model>/<tenant>/`, a folder only its owner may enter, `NAME.safetensors` for every group, `who`
(whose it is, in plain names; also the lock that saving and clearing take) and `cleared` (touched by `clear`, so that a running
server forgets, too). Two servers that share a folder overwrite one another's files whole; the last to save is remembered.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.files import replacing

log = logging.getLogger("draftloom.memory")

Arrays = Mapping[str, NDArray[Any]]

TENANT_BYTES = 16 << 20
"""Bytes of one tenant's state, unless a setting says otherwise."""
TOTAL_BYTES = 1 << 30
"""Bytes of all tenants that are kept in memory at once, unless a setting says otherwise."""
RETENTION_DAYS = 30.0
"""How long a text is remembered, unless a setting says otherwise."""

DAY = 86400.0
_MOST_TENANTS = 1024
_SUFFIX = ".safetensors"


def default_root() -> Path:
    """`$XDG_STATE_HOME/draftloom/memory`, or below `~/.local/state`; it need not exist."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state") / "draftloom" / "memory"


@dataclass(frozen=True)
class Entry:
    """One remembered group on disk. `saved` is in seconds since 1970."""

    model: str
    tenant: str
    name: str
    num_bytes: int
    saved: float


class Memory:
    """Named groups of arrays per (model, tenant), in the folder `root`; None remembers nothing and forgets everything.

    Blocks on the disk: for the event loop there is `Tenants`.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def load(self, model: str, tenant: str, name: str) -> dict[str, NDArray[Any]] | None:
        """What was saved last under this name, in memory of the caller's own. None: nothing there, or it is damaged.

        A damaged file is moved aside to `NAME.damaged`, where only the latest such file stays.
        """
        loaded = self._load(model, tenant, name)
        return loaded and loaded[0]

    def _load(self, model: str, tenant: str, name: str) -> tuple[dict[str, NDArray[Any]], str] | None:
        """`load`, and the checksum that was found to hold."""
        from safetensors import SafetensorError, safe_open  # here, so that sources can be used where it is not installed

        folder = self._folder(model, tenant)
        if folder is None or _who(folder) != (model, tenant):
            return None
        file = folder / (name + _SUFFIX)
        try:
            with safe_open(file, framework="numpy") as opened:
                arrays = {key: np.array(opened.get_tensor(key)) for key in opened.keys()}  # noqa: SIM118
                checksum = (opened.metadata() or {}).get("checksum")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            _set_aside(file, str(error))
            return None
        if checksum != (found := _checksum(arrays)):
            _set_aside(file, "its checksum does not hold")
            return None
        return arrays, found

    def save(
        self, model: str, tenant: str, name: str, arrays: Arrays, mark: int | None = None, checksum: str | None = None
    ) -> bool:
        """Keep `arrays` in place of what was there; a crash leaves one or the other. False, with a warning, if it cannot be.

        `mark` is what `mark()` said when the state was begun: after a `clear` since then nothing is saved. `checksum` is
        that of the arrays, if the caller has it already.
        """
        from safetensors.numpy import save as to_safetensors

        folder = self._folder(model, tenant)
        if folder is None:
            return False
        plain = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        content = to_safetensors(plain, {"checksum": checksum or _checksum(plain)})
        file = folder / (name + _SUFFIX)
        try:
            _make_folder(folder, model, tenant)
            with _locked(folder):
                if mark is not None and mark != _mark(folder):
                    return False
                with replacing(file) as out:
                    out.write(content)
        except OSError as error:
            log.warning("cannot remember: %s: %s", file, error)
            return False
        return True

    def begin(self, model: str, tenant: str) -> int:
        """Make the tenant known on disk, so that `clear` finds it before anything was saved; returns its mark."""
        folder = self._folder(model, tenant)
        if folder is None:
            return 0
        try:
            _make_folder(folder, model, tenant)
        except OSError as error:
            log.warning("cannot remember: %s: %s", folder, error)
        return _mark(folder)

    def mark(self, model: str, tenant: str) -> int:
        """A number that changes with every `clear` of this tenant. One stat, some microseconds."""
        folder = self._folder(model, tenant)
        return 0 if folder is None else _mark(folder)

    def clear(self, model: str | None = None, tenant: str | None = None) -> int:
        """Forget a model's, a tenant's, or (with neither) all, on disk and in servers that run; how many files there were.

        Raises OSError if one cannot be removed.
        """
        num_cleared = 0
        for folder, found_model, found_tenant in self._tenants():
            if model not in (None, found_model) or tenant not in (None, found_tenant):
                continue
            with _locked(folder):
                for file in folder.iterdir():
                    if file.suffix in (_SUFFIX, ".damaged", ".tmp"):
                        file.unlink()
                        num_cleared += file.suffix == _SUFFIX
                with replacing(folder / "cleared"):
                    pass
        return num_cleared

    def names(self, model: str, tenant: str) -> list[str]:
        """The groups a tenant has on disk."""
        folder = self._folder(model, tenant)
        return [] if folder is None else sorted(file.name.removesuffix(_SUFFIX) for file in folder.glob("*" + _SUFFIX))

    def known(self) -> list[tuple[str, str]]:
        """Every (model, tenant) there is a folder for, those of whom nothing is saved yet among them."""
        return [(model, tenant) for _, model, tenant in self._tenants()]

    def entries(self) -> list[Entry]:
        """Everything on disk, by model, tenant and name."""
        found = []
        for folder, model, tenant in self._tenants():
            for file in folder.glob("*" + _SUFFIX):
                with suppress(FileNotFoundError):
                    status = file.stat()
                    found.append(Entry(model, tenant, file.name.removesuffix(_SUFFIX), status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: (entry.model, entry.tenant, entry.name))

    def forget_older(self, oldest: float, expire: Mapping[str, Callable[[Arrays, float], Arrays]]) -> None:
        """Remove what was saved before `oldest` (seconds since 1970); of newer groups with a name in `expire`, what is older.

        `expire[name](arrays, oldest)` is the group without it; an empty one is removed.
        """
        for entry in self.entries():
            folder = self._folder(entry.model, entry.tenant)
            assert folder is not None
            if entry.saved < oldest:
                with suppress(OSError), _locked(folder):
                    (folder / (entry.name + _SUFFIX)).unlink(missing_ok=True)
                    (folder / (entry.name + ".damaged")).unlink(missing_ok=True)
            elif entry.name in expire:
                mark = _mark(folder)
                loaded = self._load(entry.model, entry.tenant, entry.name)
                if loaded is None:
                    continue
                left = expire[entry.name](loaded[0], oldest)
                if (checksum := _checksum(left)) != loaded[1]:
                    self.save(entry.model, entry.tenant, entry.name, left, mark, checksum)

    def _folder(self, model: str, tenant: str) -> Path | None:
        return None if self._root is None else self._root / _file_name(model) / _file_name(tenant)

    def _tenants(self) -> Iterator[tuple[Path, str, str]]:
        """(folder, model, tenant) of all there are."""
        for folder in sorted(self._root.glob("*/*/")) if self._root is not None else ():
            who = _who(folder)
            if who is not None:
                yield folder, *who


class State(Protocol):
    """Something a tenant's requests share and that outlives them."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        ...

    def arrays(self) -> Arrays:
        """All of it as arrays that do not change when it does."""
        ...


AnyState = TypeVar("AnyState", bound=State)


class Tenant:
    """One tenant's states, by name. What another tenant said cannot be asked for here.

    `oldest` is the time, in seconds since 1970, before which a text is to be forgotten; `now` is the time.
    """

    def __init__(
        self,
        saved: Mapping[str, Arrays] | None = None,
        *,
        state_bytes: int = TENANT_BYTES,
        retention: float = RETENTION_DAYS * DAY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state_bytes = state_bytes
        """What one state that holds text may take."""
        self.states: dict[str, State] = {}
        self._saved = dict(saved or {})
        self._retention = retention
        self._clock = clock

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def oldest(self) -> float:
        return self._clock() - self._retention

    @property
    def num_bytes(self) -> int:
        """Memory that all of it takes."""
        waiting = sum(array.nbytes for arrays in self._saved.values() for array in arrays.values())
        return waiting + sum(state.num_bytes for state in self.states.values())

    def state(self, name: str, make: Callable[[Arrays | None], AnyState]) -> AnyState:
        """The state of this name, always the same object; `make` builds it when it is first asked for.

        `make` gets what was saved, or None. If it raises ValueError or KeyError, what was saved does not fit: it is left out.
        """
        if name not in self.states:
            saved = self._saved.pop(name, None)
            try:
                self.states[name] = make(saved)
            except (ValueError, KeyError) as error:
                log.warning("what was remembered as %s does not fit and is left out: %s", name, error)
                self.states[name] = make(None)
        state: AnyState = self.states[name]  # type: ignore[assignment]
        return state


class Tenants:
    """The tenants in use, of one `memory`: read when they first ask, saved by `save`.

    Of many tenants those that asked last stay in memory, within `total_bytes`; the others are saved and, if they come again,
    read again. For one event loop; the disk is used on threads.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        state_bytes: int = TENANT_BYTES,
        total_bytes: int = TOTAL_BYTES,
        retention: float = RETENTION_DAYS * DAY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._memory = memory
        self._state_bytes = state_bytes
        self._total_bytes = total_bytes
        self._retention = retention
        self._clock = clock
        self._live: OrderedDict[tuple[str, str], _Live] = OrderedDict()
        self._saving = asyncio.Lock()

    async def open(self, model: str, tenant: str) -> Tenant:
        """The tenant, read from disk if it is not in memory, and empty if it was cleared since."""
        key = model, tenant
        live = self._live.get(key)
        if live is None or live.mark != self._memory.mark(model, tenant):
            live = await asyncio.to_thread(self._read, model, tenant)
            there = self._live.get(key)
            if there is None or there.mark != live.mark:
                self._live[key] = live
            await self._make_room(key)
        self._live.move_to_end(key)
        return self._live[key].tenant

    @property
    def num_bytes(self) -> int:
        """Memory that all of them take."""
        return sum(live.tenant.num_bytes for live in self._live.values())

    async def save(self) -> None:
        """Write every state that differs from what is on disk."""
        for key, live in list(self._live.items()):
            await self._save(key, live)

    async def forget_older(self, expire: Mapping[str, Callable[[Arrays, float], Arrays]]) -> None:
        """Remove from disk what is past its time; see Memory.forget_older. Sources do it for what is in memory."""
        async with self._saving:
            await asyncio.to_thread(self._memory.forget_older, self._clock() - self._retention, expire)

    def _read(self, model: str, tenant: str) -> _Live:
        mark = self._memory.begin(model, tenant)
        saved, written = dict[str, Arrays](), dict[str, str]()
        for name in self._memory.names(model, tenant):
            loaded = self._memory._load(model, tenant, name)
            if loaded is not None:
                saved[name], written[name] = loaded
        opened = Tenant(saved, state_bytes=self._state_bytes, retention=self._retention, clock=self._clock)
        return _Live(opened, mark, written)

    async def _save(self, key: tuple[str, str], live: _Live) -> None:
        async with self._saving:
            for name, state in list(live.tenant.states.items()):
                arrays = state.arrays()
                await asyncio.to_thread(self._write, key, live, name, arrays)

    def _write(self, key: tuple[str, str], live: _Live, name: str, arrays: Arrays) -> None:
        checksum = _checksum(arrays)
        if live.written.get(name) != checksum and self._memory.save(*key, name, arrays, live.mark, checksum):
            live.written[name] = checksum

    async def _make_room(self, newest: tuple[str, str]) -> None:
        """Save and let go of those that asked longest ago, until the rest fits."""
        while len(self._live) > 1:
            if len(self._live) <= _MOST_TENANTS and self.num_bytes <= self._total_bytes:
                return
            key, live = next((key, live) for key, live in self._live.items() if key != newest)
            await self._save(key, live)
            if self._live.get(key) is live:
                del self._live[key]


@dataclass
class _Live:
    """A tenant in memory, its mark when it was read, and the checksums of what is on disk."""

    tenant: Tenant
    mark: int
    written: dict[str, str]


def _file_name(text: str) -> str:
    """A name for a file or folder that stands for `text` alone: what is readable of it, and a hash of all of it."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", text)[:40]
    return f"{readable}-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def _checksum(arrays: Arrays) -> str:
    """Of names, types, shapes and bytes. About a second a gigabyte."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _who(folder: Path) -> tuple[str, str] | None:
    """The (model, tenant) whose folder this is; None if it does not say."""
    try:
        who = json.loads((folder / "who").read_text(encoding="utf-8"))
        return str(who["model"]), str(who["tenant"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _make_folder(folder: Path, model: str, tenant: str) -> None:
    """The folder, and those above it up to the root, for the owner's eyes only."""
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if _who(folder) != (model, tenant):
        with replacing(folder / "who") as out:
            out.write(json.dumps({"model": model, "tenant": tenant}).encode())


def _mark(folder: Path) -> int:
    try:
        status = (folder / "cleared").stat()
    except OSError:
        return 0
    return hash((status.st_ino, status.st_mtime_ns))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else saves or clears in this folder meanwhile."""
    with (folder / "who").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _set_aside(file: Path, fault: str) -> None:
    """Out of the way of what will be saved, for whoever wants to look at it."""
    log.warning("what was remembered is damaged and left out: %s: %s", file, fault)
    with suppress(OSError):
        file.replace(file.with_suffix(".damaged"))
