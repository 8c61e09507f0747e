"""int8 weights on disk: packed once, read as they are ever after.

Packing reads every weight of a model in floating point, which takes longer than anything else at start. What comes out is
written to `<cache>/int8/<folder>-<key>.safetensors`, in the very layout the kernel reads. `<folder>` names the model's folder,
`<key>` all that the content rests on: the weight files by name, size and time of change, the config, and the code that packs. A
file that is damaged or cut short is moved aside and made anew.

Loading copies the file into huge pages where memory is plenty, else maps it. Every pass reads all weights once, and in pages of
4 KiB a processor spends a tenth to a fifth of that time on looking up where they are. Mapped pages need no memory of their own
and are shared by all processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import nn

from engine.errors import ModelError
from engine.files import replacing
from engine.models import cache_root
from engine.target import kernels, quantize
from engine.target.quantize import Int8Matrix, Packed

logger = logging.getLogger(__name__)

_FORMAT = "draftloom int8, 2"
_ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple, so that no vector the kernel loads lies on two cache lines."""

_NUMBERS: dict[str, tuple[Any, torch.dtype]] = {
    "I8": (np.int8, torch.int8),
    "I32": (np.int32, torch.int32),
    "F32": (np.float32, torch.float32),
    "F16": (np.float16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
}
"""safetensors' names: the numpy type to read the bytes as, and torch's name of the numbers."""


class PackedWeights:
    """A model's matrices by name, and `others`: its tensors that stay as they are (embedding, norms), by parameter name.

    Empty at first; `matrix` packs what it is asked for and keeps it. Or `complete`, out of a file: then it gives what is there.
    """

    def __init__(self, matrices: dict[str, Packed] | None = None, others: dict[str, torch.Tensor] | None = None) -> None:
        self.complete = matrices is not None
        self.matrices: dict[str, Packed] = matrices or {}
        self.others: dict[str, torch.Tensor] = others or {}

    def matrix(self, name: str, layers: Sequence[nn.Linear], gated: bool = False) -> Int8Matrix:
        """These linear layers of one input as one matrix; `gated` as in `Int8Matrix`.

        Raises ModelError where the file's matrix is of another shape; KeyError where it has none of that name.
        """
        if not self.complete:
            made = Int8Matrix.of([layer.weight for layer in layers], [layer.bias for layer in layers], gated)
            self.matrices[name] = made.packed
            return made
        sizes, width = [layer.out_features for layer in layers], layers[0].in_features
        expected, found = quantize.packed_shape(sizes, width, gated), self.matrices[name].weights.shape
        if found != expected:
            raise ModelError(f"packed weights of another shape: {name} is {found}, not {expected}")
        return Int8Matrix(self.matrices[name], width, sizes, gated)


@dataclass(frozen=True)
class Place:
    """Where a model's packed weights belong: `file`, and the pattern of those that it replaces."""

    file: Path
    older: str


def place_of(folder: Path) -> Place:
    """The place for the model in `folder`, as it is now."""
    rests_on = hashlib.sha256(repr((_FORMAT, transformers.__version__, kernels.PANEL)).encode())
    kernel = kernels.spread.py_func, kernels.spread_rows.py_func
    for code in (Packed, Int8Matrix.of, quantize.packed_shape, quantize.in_turns, *kernel):
        rests_on.update(inspect.getsource(code).encode())
    for file in sorted(folder.glob("*.safetensors")):
        state = file.stat()
        rests_on.update(repr((file.name, state.st_size, state.st_mtime_ns)).encode())
    rests_on.update((folder / "config.json").read_bytes())
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return Place(cache_root().parent / "int8" / f"{name}-{rests_on.hexdigest()[:16]}.safetensors", f"{name}-*.safetensors")


def save_packed(place: Place, weights: PackedWeights) -> None:
    """Write the file beside its place, mode 0600, and rename it; remove older ones of the same folder.

    A full or forbidden disk is logged and costs nothing but the next start's time.
    """
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, packed in weights.matrices.items():
        tensors |= {
            f"{name}:weights": ("I8", packed.weights),
            f"{name}:offset": ("I32", packed.offset),
            f"{name}:scale": ("F32", packed.scale),
            f"{name}:bias": ("F32", packed.bias),
        }
    names = {dtype: name for name, (_, dtype) in _NUMBERS.items()}
    for name, tensor in weights.others.items():
        plain = tensor.contiguous()
        if plain.dtype == torch.bfloat16:
            plain = plain.view(torch.int16)
        tensors[f":{name}"] = (names[tensor.dtype], plain.numpy())
    try:
        place.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(place.file, tensors)
        for file in place.file.parent.glob(place.older):
            if file != place.file:
                file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("packed weights are not kept, the next start packs anew: %s: %s", place.file, error)


def _write(file: Path, tensors: dict[str, tuple[str, NDArray[Any]]]) -> None:
    """A safetensors file whose tensors begin at multiples of _ALIGNMENT, those of other sizes last."""
    order = sorted(tensors, key=lambda name: tensors[name][1].nbytes % _ALIGNMENT != 0)
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        kind, array = tensors[name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    sums = {name: f"{_checksum(tensors[name][1]):016x}" for name in order}
    header["__metadata__"] = {"format": _FORMAT, "checksums": json.dumps(sums)}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with replacing(file) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            out.write(np.ascontiguousarray(tensors[name][1]).data)


def open_packed(place: Place) -> PackedWeights | None:
    """Load the file of a place and check every byte of it; None where there is none, or none that is whole (moved aside)."""
    try:
        return _read(place.file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("packed weights are damaged, packing anew: %s: %s", place.file, error)
        with contextlib.suppress(OSError):
            place.file.replace(place.file.with_suffix(".damaged"))
        return None


def _read(file: Path) -> PackedWeights:
    whole = _in_memory(file)
    length = int.from_bytes(whole[:8].tobytes(), "little")
    if not 0 < length <= len(whole) - 8:
        raise ValueError(f"the header is said to have {length} bytes")
    header = json.loads(whole[8 : 8 + length].tobytes())
    about = header.pop("__metadata__")
    if about["format"] != _FORMAT:
        raise ValueError(f"unknown format: {about['format']}")
    sums = json.loads(about["checksums"])
    data = whole[8 + length :]
    arrays: dict[str, NDArray[Any]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"the file ends before {name}")
        plain, numbers = _NUMBERS[entry["dtype"]]
        array = data[begin:end].view(np.ndarray).view(plain).reshape(entry["shape"])
        if f"{_checksum(array):016x}" != sums[name]:
            raise ValueError(f"wrong checksum: {name}")
        if name.startswith(":"):
            others[name[1:]] = torch.from_numpy(array).view(numbers)
        else:
            arrays[name] = array
    matrices = {}
    for name in dict.fromkeys(name.rpartition(":")[0] for name in arrays):
        matrices[name] = Packed(*(arrays[f"{name}:{part}"] for part in ("weights", "offset", "scale", "bias")))
        matrices[name].validate()
    return PackedWeights(matrices, others)


def _in_memory(file: Path) -> NDArray[np.uint8]:
    """The bytes of a file: in huge pages, if that leaves as much memory as it takes, else mapped.

    The pages are private either way: torch wants arrays that could be written to, and none is.
    """
    size = file.stat().st_size
    if 2 * size > _available_memory():
        return np.memmap(file, np.uint8, "c")
    room = np.empty(size + _HUGE, np.uint8)  # numpy asks for huge pages
    start = -room.ctypes.data % _HUGE
    whole = room[start : start + size]
    with file.open("rb") as source, ThreadPoolExecutor() as readers:

        def read(at: int) -> int:
            return os.preadv(source.fileno(), [whole[at : at + _READ].data], at)

        num_read = sum(readers.map(read, range(0, size, _READ)))
    if num_read != size:
        raise ValueError(f"{num_read} of {size} bytes could be read")
    return whole


_HUGE = 1 << 21
_READ = 1 << 26


def _available_memory() -> int:
    """Bytes that this process could still have, as far as Linux says; 0 elsewhere.

    The kernel's estimate or, in a container, its limit, whichever is less.
    """
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return 0
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # none is set ("max"), or there is no such group
            found = min(found, int(limit.read_text()))
    return found


_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _checksum(array: NDArray[Any]) -> int:
    """A 64-bit sum in which every word counts differently; see `kernels.checksum`."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = flat[: len(flat) // 8 * 8].view(np.uint64)
    rest = np.frombuffer(flat[len(words) * 8 :].tobytes().ljust(8, b"\0"), np.uint64)
    return int(kernels.checksum(words)) ^ int(kernels.checksum(rest))
