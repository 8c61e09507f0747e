"""Packed weights on disk: what comes back is what was packed, and nothing damaged, old or foreign is ever used."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from engine.errors import ModelError
from engine.target import model as models
from engine.target import packed
from engine.target.model import Model, load
from tests.engine import tiny
from tests.engine.tiny import Bench

TEXT = [5, 9, 2, 60, 33]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved Qwen2 with tied weights, and a cache of its own."""
    monkeypatch.setenv("DRAFTLOOM_CACHE", str(tmp_path / "cache"))
    settings = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    tiny.build("Qwen2Config", **settings).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(model: Model) -> NDArray[np.float32]:
    """What the model says along a text."""
    bench = Bench(model)
    return bench.read(bench.table(), TEXT)


def files() -> list[Path]:
    """What lies in the cache."""
    return sorted((Path(os.environ["DRAFTLOOM_CACHE"]) / "int8").iterdir())


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any use of the original weights fail."""

    def refuse(folder: Path, dtype: str) -> None:
        raise AssertionError(f"{folder} was read")

    monkeypatch.setattr(models, "_read", refuse)


@pytest.mark.parametrize("memory", [0, 1 << 40])
def test_a_second_load_takes_what_the_first_has_packed(memory: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits without reading the weights again; one file, for its owner only, that safetensors reads too. It is mapped
    where memory is scarce, else copied."""
    monkeypatch.setattr(packed, "_available_memory", lambda: memory)
    first = load(folder, "int8")
    (file,) = files()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    forbid_reading(monkeypatch)
    assert isinstance(packed._in_memory(file), np.memmap) == (memory == 0)
    second = load(folder, "int8")
    assert second.strict and np.array_equal(logits(first), logits(second))
    with safe_open(file, "np") as reader:
        assert reader.get_tensor("head:weights").shape[2:] == (32, 4)
        assert {"model.layers.1.qkv:bias", ":model.norm.weight"} <= set(reader.keys())
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert all((start + header[name]["data_offsets"][0]) % 64 == 0 for name in header if name.endswith(":weights"))


def test_available_memory_is_what_a_container_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's estimate, unless a limit is below it; a limit of "max", or none, is no limit."""
    monkeypatch.setattr(packed, "_LIMITS", ())
    free = packed._available_memory()
    assert free > 1 << 20
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "some").write_text("4096\n")
    monkeypatch.setattr(packed, "_LIMITS", (tmp_path / "none", tmp_path / "max"))
    assert packed._available_memory() > 1 << 20
    monkeypatch.setattr(packed, "_LIMITS", (tmp_path / "none", tmp_path / "max", tmp_path / "some"))
    assert packed._available_memory() == 4096


@pytest.mark.parametrize("damage", ["bit", "cut", "header", "empty", "other format"])
def test_a_damaged_file_is_moved_aside_and_made_anew(damage: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit anywhere, a file cut short, a foreign header: said in the log, never used, replaced."""
    expected = logits(load(folder, "int8"))
    (file,) = files()
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[int(np.random.default_rng(0).integers(5000, len(content)))] ^= 4
    elif damage == "cut":
        del content[-100:]
    elif damage == "header":
        content[:8] = (2**40).to_bytes(8, "little")
    elif damage == "empty":
        content.clear()
    else:
        content[:] = bytes(content).replace(b"draftloom int8, 2", b"draftloom int8, 0")
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(logits(load(folder, "int8")), expected)
    assert "damaged" in caplog.text
    assert [found.suffix for found in files()] == [".damaged", ".safetensors"]
    caplog.clear()
    assert np.array_equal(logits(load(folder, "int8")), expected) and not caplog.text


def test_other_weights_in_the_folder_are_packed_anew(folder: Path) -> None:
    """A file that has changed gives its own answers; the older packed weights go."""
    before = logits(load(folder, "int8"))
    (old,) = files()
    network = tiny.build("Qwen2Config", num_key_value_heads=2, tie_word_embeddings=True)
    with torch.no_grad():
        network.model.norm.weight.mul_(1.5)
    network.to(torch.bfloat16).save_pretrained(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert not np.array_equal(logits(load(folder, "int8")), before)
    assert len(files()) == 1 and files() != [old]


def test_what_does_not_fit_is_packed_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole file with a matrix missing, or one of another shape, is noticed before anything is answered."""
    expected = logits(load(folder, "int8"))
    place = packed.place_of(folder)
    for change in ("missing", "shape"):
        weights = packed.open_packed(place)
        assert weights is not None
        if change == "missing":
            del weights.matrices["model.layers.0.o"]
        else:
            weights.matrices["model.layers.0.o"] = weights.matrices["model.layers.0.gate_up"]
        packed.save_packed(place, weights)
        caplog.clear()
        assert np.array_equal(logits(load(folder, "int8")), expected) and "do not fit" in caplog.text


def test_a_disk_that_takes_nothing_costs_only_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the cache cannot be written the model serves all the same, and the log says why nothing was kept."""
    Path(os.environ["DRAFTLOOM_CACHE"]).write_text("not a folder")
    assert load(folder, "int8").strict
    assert "not kept" in caplog.text


def test_only_strict_models_are_kept(folder: Path, tmp_path: Path) -> None:
    """What stays in floating point would take as much room as the weights themselves: it is not written."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    tiny.build("GptOssConfig", **experts).save_pretrained(tmp_path / "experts")
    assert not load(tmp_path / "experts", "int8").strict
    assert not packed.place_of(tmp_path / "experts").file.exists()


def test_a_matrix_that_is_not_there_says_so(folder: Path) -> None:
    """Weights out of a file give nothing that they do not have."""
    load(folder, "int8")
    weights = packed.open_packed(packed.place_of(folder))
    assert weights is not None and weights.complete
    with pytest.raises(KeyError):
        weights.matrix("other", [torch.nn.Linear(3, 3)])
    with pytest.raises(ModelError, match="another shape"):
        weights.matrix("head", [torch.nn.Linear(64, 9)])
