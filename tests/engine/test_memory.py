"""What outlives a request and a server, and what does not."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.memory import Memory, Tenant, Tenants, default_root

ARRAYS = {"a": np.arange(5, dtype=np.int32), "b": np.zeros((0, 3)), "c": np.array([[1.5, -2.0]])}


class Count:
    """A state that counts; takes the memory it is told to."""

    def __init__(self, saved: Mapping[str, NDArray[Any]] | None = None, num_bytes: int = 8) -> None:
        self.value = int(saved["value"][0]) if saved else 0
        self.num_bytes = num_bytes

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"value": np.array([self.value])}


async def count(tenants: Tenants, model: str, tenant: str, add: int = 0) -> int:
    """The tenant's count, after adding to it."""
    state = (await tenants.open(model, tenant)).state("count", Count)
    state.value += add
    return state.value


def group_file(root: Path, name: str) -> Path:
    """The only file of a group."""
    (file,) = root.glob(f"*/*/{name}.safetensors")
    return file


# ---- on disk


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Names, types, shapes and values, in memory that may be written to."""
    memory = Memory(tmp_path / "memory")
    assert memory.save("model", "tenant", "group", ARRAYS)
    loaded = memory.load("model", "tenant", "group")
    assert loaded is not None and loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)
    loaded["a"][0] = 7


@pytest.mark.parametrize("key", [("other", "tenant", "group"), ("model", "other", "group"), ("model", "tenant", "other")])
def test_nothing_is_found_under_another_key(tmp_path: Path, key: tuple[str, str, str]) -> None:
    """Model, tenant and name all count."""
    memory = Memory(tmp_path)
    memory.save("model", "tenant", "group", ARRAYS)
    assert memory.load(*key) is None


@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", "A", "a", ".", "", "é" * 300, "a\nb\0c"])
def test_any_name_of_a_tenant_has_a_folder_of_its_own(tmp_path: Path, name: str) -> None:
    """Whatever a tenant is called, its files lie below the root, and no other name leads to them."""
    memory = Memory(tmp_path / "memory")
    for other in ("a_b", "_", "x", "b"):
        memory.save("model", other, "group", ARRAYS)
    memory.save("model", name, "group", {"mine": np.ones(1)})
    assert set(memory.load("model", name, "group") or ()) == {"mine"}
    assert set(memory.load("model", "a_b", "group") or ()) == set(ARRAYS)
    assert [file for file in tmp_path.rglob("*") if file.is_file() and len(file.relative_to(tmp_path).parts) != 4] == []
    assert len(memory.entries()) == 5


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """Files are 0600, folders 0700."""
    memory = Memory(tmp_path / "memory")
    memory.save("model", "tenant", "group", ARRAYS)
    memory.clear()
    memory.save("model", "tenant", "group", ARRAYS)
    for path in [tmp_path / "memory", *(tmp_path / "memory").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def damage_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [damage_bit, lambda content: content[:-3], lambda content: content[:4], lambda _: b"", lambda _: b"\xff" * 100],
    ids=["a bit", "its end", "its header", "all", "nonsense"],
)
def test_a_damaged_file_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    """It counts as not there, with a warning that names it; what is saved next is good again."""
    memory = Memory(tmp_path)
    memory.save("model", "tenant", "group", ARRAYS)
    file = group_file(tmp_path, "group")
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert memory.load("model", "tenant", "group") is None
    assert str(file) in caplog.text
    assert not file.exists() and file.with_suffix(".damaged").exists()
    assert memory.save("model", "tenant", "group", ARRAYS) and memory.load("model", "tenant", "group") is not None


def test_a_folder_that_says_it_is_another_tenants_is_not_read(tmp_path: Path) -> None:
    """Were two names ever to share a folder, the second would find nothing of the first's."""
    memory = Memory(tmp_path)
    memory.save("model", "tenant", "group", ARRAYS)
    file = group_file(tmp_path, "group").with_name("who")
    file.write_text(json.dumps({"model": "model", "tenant": "somebody"}))
    assert memory.load("model", "tenant", "group") is None


def test_a_disk_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is remembered then, and nothing fails."""
    (tmp_path / "memory").write_text("a file where the folder should be")
    memory = Memory(tmp_path / "memory")
    with caplog.at_level(logging.WARNING):
        assert not memory.save("model", "tenant", "group", ARRAYS)
    assert "cannot remember" in caplog.text
    assert memory.load("model", "tenant", "group") is None and memory.entries() == []


def test_without_a_folder_nothing_is_remembered() -> None:
    """No root: no file, no entry, no error."""
    memory = Memory(None)
    assert not memory.save("model", "tenant", "group", ARRAYS)
    assert memory.load("model", "tenant", "group") is None and memory.entries() == [] and memory.clear() == 0


def test_clearing_takes_one_tenant_one_model_or_all(tmp_path: Path) -> None:
    """And says how many files there were; damaged ones go, too."""
    memory = Memory(tmp_path)

    def fill() -> None:
        for model in ("m", "n"):
            for tenant in ("a", "b"):
                memory.save(model, tenant, "group", ARRAYS)

    def left() -> list[str]:
        return [entry.model + entry.tenant for entry in memory.entries()]

    fill()
    assert (memory.clear("m", "a"), left()) == (1, ["mb", "na", "nb"])
    fill()
    assert (memory.clear("m"), left()) == (2, ["na", "nb"])
    fill()
    assert (memory.clear(tenant="b"), left()) == (2, ["ma", "na"])
    for file in tmp_path.rglob("group.safetensors"):
        file.write_bytes(b"")
    memory.load("m", "a", "group")
    assert (memory.clear(), left()) == (1, [])
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {"who", "cleared"}


def test_what_was_begun_before_a_clear_is_not_saved_after_it(tmp_path: Path) -> None:
    """A server that has not noticed yet cannot bring back what was cleared."""
    memory = Memory(tmp_path)
    mark = memory.begin("model", "tenant")
    assert memory.save("model", "tenant", "group", ARRAYS, mark)
    memory.clear("model", "tenant")
    assert not memory.save("model", "tenant", "group", ARRAYS, mark)
    assert memory.entries() == []
    assert memory.save("model", "tenant", "group", ARRAYS, memory.mark("model", "tenant"))


def test_what_is_too_old_is_forgotten_on_disk(tmp_path: Path) -> None:
    """Whole files by when they were saved, and within those that can be looked into, what is older than allowed."""
    memory = Memory(tmp_path)
    memory.save("model", "tenant", "plain", ARRAYS)
    memory.save("model", "tenant", "dated", {"born": np.array([1.0, 5.0])})
    memory.forget_older(3.0, {"dated": lambda arrays, oldest: {"born": arrays["born"][arrays["born"] >= oldest]}})
    dated = memory.load("model", "tenant", "dated")
    assert dated is not None and dated["born"].tolist() == [5.0]
    assert [entry.name for entry in memory.entries()] == ["dated", "plain"]
    memory.forget_older(1e18, {})
    assert memory.entries() == []


# ---- in a server


def test_a_state_is_one_object_for_all_requests_of_a_tenant() -> None:
    """What one request adds, the next sees; another tenant and another model have their own."""

    async def run() -> list[int]:
        tenants = Tenants(Memory(None))
        await count(tenants, "model", "a", 1)
        await count(tenants, "model", "a", 2)
        return [await count(tenants, *key) for key in (("model", "a"), ("model", "b"), ("other", "a"))]

    assert asyncio.run(run()) == [3, 0, 0]


def test_a_state_survives_a_restart(tmp_path: Path) -> None:
    """Saved by one server, found by the next."""

    async def run(add: int) -> int:
        tenants = Tenants(Memory(tmp_path))
        value = await count(tenants, "model", "a", add)
        await tenants.save()
        return value

    assert [asyncio.run(run(1)) for _ in range(3)] == [1, 2, 3]


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    """A file whose state stayed as it was is not touched."""

    async def run() -> list[int]:
        tenants = Tenants(Memory(tmp_path))
        inodes = []
        for add in (1, 0, 1):
            await count(tenants, "model", "a", add)
            await tenants.save()
            inodes.append(group_file(tmp_path, "count").stat().st_ino)
        return inodes

    first, second, third = asyncio.run(run())
    assert first == second != third


def test_many_tenants_are_bounded_in_memory_and_kept_on_disk(tmp_path: Path) -> None:
    """Those that asked longest ago are saved and let go, and read again when they ask."""

    async def run() -> tuple[int, list[int]]:
        tenants = Tenants(Memory(tmp_path), total_bytes=1000)
        most = 0
        for i in range(12):
            state = (await tenants.open("model", str(i))).state("count", lambda saved: Count(saved, num_bytes=300))
            state.value = i
            most = max(most, tenants.num_bytes)
        return most, [await count(tenants, "model", str(i)) for i in range(12)]

    most, values = asyncio.run(run())
    assert most <= 1300
    assert values == list(range(12))


def test_a_running_server_forgets_what_is_cleared_beside_it(tmp_path: Path) -> None:
    """The next request of that tenant starts anew, another tenant's does not, and nothing cleared is written again."""

    async def run() -> list[int]:
        tenants, beside = Tenants(Memory(tmp_path)), Memory(tmp_path)
        await count(tenants, "model", "a", 5)
        await count(tenants, "model", "b", 6)
        beside.clear(tenant="a")  # nothing of it is on disk yet
        await tenants.save()
        assert [entry.tenant for entry in beside.entries()] == ["b"]
        return [await count(tenants, "model", "a"), await count(tenants, "model", "b")]

    assert asyncio.run(run()) == [0, 6]


def test_what_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Saved by another release, say: a warning, and a fresh state."""

    def picky(saved: Mapping[str, NDArray[Any]] | None) -> Count:
        if saved is not None:
            raise ValueError("of another shape")
        return Count()

    with caplog.at_level(logging.WARNING):
        assert Tenant({"count": {"value": np.array([3])}}).state("count", picky).value == 0
    assert "of another shape" in caplog.text


def test_the_folder_is_the_users_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_STATE_HOME, or below the home folder."""
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_root() == Path("/somewhere/draftloom/memory")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_root() == Path.home() / ".local/state/draftloom/memory"
