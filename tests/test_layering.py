"""Who may import whom, held by reading every module's imports.

Each rule names what a package or file may import of ours, or which files alone may import a library. Imports under
`if TYPE_CHECKING` are free: they bind nothing when the program runs. Imports inside functions count like any other, unless a
rule says that it is about what importing a module costs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("corpora", "draftloom", "engine", "retriever")
CORE = ("engine/tree.py", "engine/acceptance.py", "engine/session.py", "engine/calibration.py", "engine/kernels.py")


@dataclass(frozen=True)
class Import:
    """`file` imports `module` (dotted) on `line`; `lazily` if only when a function runs."""

    file: str
    module: str
    line: int
    lazily: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"

    def of(self, *modules: str) -> bool:
        """Whether it imports one of `modules` or something inside."""
        return any(self.module == module or self.module.startswith(module + ".") for module in modules)


def imports_of(source: str, file: str) -> Iterator[Import]:
    """All imports of a module that happen when the program runs, relative ones made absolute."""
    package = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__").split(".")
    if not file.endswith("__init__.py"):
        package = package[:-1]

    def visit(node: ast.AST, lazily: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from visit(other, lazily)
            return
        if isinstance(node, ast.Import):
            yield from (Import(file, alias.name, node.lineno, lazily) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield Import(file, inner if _is_module(inner) else module, node.lineno, lazily)
        lazily = lazily or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazily)

    yield from visit(ast.parse(source), False)


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.partition(".")[0] in PACKAGES and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def all_imports() -> list[Import]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [found for file in files for found in imports_of(file.read_text(), file.relative_to(ROOT).as_posix())]


IMPORTS = all_imports()


def refuse(offenders: list[Import], rule: str) -> None:
    assert not offenders, rule + "\n" + "\n".join(map(str, offenders))


def test_the_reader_of_imports_sees_what_it_should() -> None:
    """Absolute, relative, lazy and type-only imports are told apart."""
    source = (
        "from __future__ import annotations\nimport numpy as np\nfrom . import tree\nfrom .server import wire\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import grpc\n"
        "def f():\n    from engine import errors\n"
    )
    found = {(each.module, each.lazily) for each in imports_of(source, "engine/x.py")}
    assert found == {
        ("__future__", False),
        ("numpy", False),
        ("engine.tree", False),
        ("engine.server.wire", False),
        ("typing", False),
        ("grpc", False),
        ("engine.errors", True),
    }


def test_the_retriever_knows_nobody() -> None:
    """It can be used as a library inside another engine."""
    offenders = [i for i in IMPORTS if i.file.startswith("retriever/") and i.of("engine", "corpora", "draftloom")]
    refuse(offenders, "the retriever imports none of the others")


def test_corpora_knows_text_models_errors_and_the_format() -> None:
    """Indexing needs tokenizers and the on-disk format; nothing of serving."""
    allowed = ("engine.text", "engine.models", "engine.errors", "corpora", "retriever")
    refuse(
        [i for i in IMPORTS if i.file.startswith("corpora/") and i.of(*PACKAGES) and not i.of(*allowed)],
        f"corpora may import {', '.join(allowed)}",
    )


def test_corpora_writes_through_the_format_alone() -> None:
    """No other module of the retriever is imported by what builds a corpus."""
    allowed = tuple(f"retriever.{module}" for module in ("format", "update", "errors", "datastore", "ends", "places"))
    refuse(
        [i for i in IMPORTS if i.file.startswith("corpora/") and i.of("retriever") and not i.of(*allowed)],
        f"corpora may import {', '.join(allowed)}",
    )


def test_the_client_knows_itself_alone() -> None:
    """What a client installs is grpcio, grpcio-status and protobuf."""
    allowed = ("draftloom", "grpc", "grpc_status", "google", *sys.stdlib_module_names)
    offenders = [i for i in IMPORTS if i.file.startswith("draftloom/") and not i.of(*allowed)]
    refuse(offenders, "the client may import grpc, grpc_status, google and the standard library")


@pytest.mark.parametrize("file", CORE)
def test_the_core_is_pure(file: str) -> None:
    """Numpy, numba in kernels, and itself: no I/O, clock, random state, torch or gRPC."""
    ours = tuple(core.removesuffix(".py").replace("/", ".") for core in CORE)
    standard = ("__future__", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math", "typing")
    allowed = (*ours, *standard, "numpy", *(("numba",) if file.endswith("kernels.py") else ()))
    refuse([i for i in IMPORTS if i.file == file and not i.of(*allowed)], f"{file} may import {', '.join(allowed)}")


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("numba", ["*kernels.py", "engine/target/threads.py"]),
        ("torch", ["engine/target/*", "engine/neural/*"]),
        ("transformers", ["engine/target/*"]),
        ("faiss", ["retriever/dense.py"]),
        ("grpc", ["engine/server/*", "engine/target/remote.py", "engine/target/server.py", "draftloom/*"]),
        ("grpc_health", ["engine/server/*", "engine/target/remote.py", "engine/target/server.py"]),
        ("google.protobuf", ["engine/server/*", "engine/target/remote.py", "engine/target/server.py", "draftloom/*"]),
        ("sqlite_utils", ["corpora/catalog.py"]),
        ("sqlite3", ["corpora/catalog.py"]),
        ("pydivsufsort", ["retriever/suffixes.py"]),
        ("tokenizers", ["engine/text.py", "engine/target/*"]),
        ("jinja2", ["engine/text.py"]),
        ("typer", ["engine/cli.py", "corpora/cli.py", "corpora/upkeep.py", "corpora/terminal.py"]),
        ("pyarrow", ["corpora/inputs/tables.py"]),
        ("charset_normalizer", ["corpora/filter.py"]),
        ("pickle", []),
    ],
)
def test_a_library_has_its_homes(library: str, homes: list[str]) -> None:
    """Each heavy library is imported in a few known places and nowhere else."""
    refuse(
        [i for i in IMPORTS if i.of(library) and not any(fnmatch(i.file, home) for home in homes)],
        f"{library} may be imported by {', '.join(homes) or 'nobody'}",
    )


def test_only_the_application_knows_everyone() -> None:
    """Corpora, server and worker meet in app.py; datastores.py reads the catalog, the command line mounts its commands."""
    mixers = {i.file for i in IMPORTS if i.file.startswith("engine/") and i.of("corpora")}
    assert mixers <= {"engine/app.py", "engine/cli.py", "engine/datastores.py", "engine/start.py"}
    servers = {i.file for i in IMPORTS if i.of("engine.server") and not i.file.startswith("engine/server/")}
    assert servers <= {"engine/app.py", "engine/target/remote.py", "engine/target/server.py"}
    refuse([i for i in IMPORTS if i.of("engine.app") and i.file != "engine/cli.py"], "only the command line starts it")


def test_a_drafter_knows_drafts_alone() -> None:
    """A source imports the interface, trees, its tenant's memory and the retriever; nothing of engine, server or target."""
    allowed = ("engine.drafters", "engine.tree", "engine.memory", "engine.kernels", "retriever")
    files = [i for i in IMPORTS if i.file.startswith("engine/drafters/") and i.file != "engine/drafters/panel.py"]
    refuse([i for i in files if i.of(*PACKAGES) and not i.of(*allowed)], f"a drafter may import {', '.join(allowed)}")


def test_the_edge_alone_knows_the_wire() -> None:
    """Generated messages are used by the client, the gRPC services and the worker's protocol; nowhere inside."""
    homes = ("draftloom/", "engine/server/", "engine/target/")
    refuse([i for i in IMPORTS if i.of("draftloom.v1") and not i.file.startswith(homes)], "messages stay at the edge")


def test_there_is_no_drawer_for_everything() -> None:
    """Every module is named after what it holds."""
    assert not [file for package in PACKAGES for file in (ROOT / package).rglob("util*.py")]


# What importing a module costs: each extra alone is enough for its part.

MODULES = {
    "charset-normalizer": "charset_normalizer", "faiss-cpu": "faiss", "grpcio": "grpc", "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-status": "grpc_status", "protobuf": "google", "sqlite-utils": "sqlite_utils",
}  # fmt: skip
"""What packages are called in an import, where that is not their name."""
BRINGS = {"transformers": {"huggingface_hub"}, "tokenizers": {"huggingface_hub"}}
"""What comes with a package for certain."""


def modules_of(requirements: list[str]) -> set[str]:
    """The modules that requirements of pyproject.toml make importable."""
    packages = {re.split(r"[<>=!~;\[ ]", line)[0] for line in requirements}
    return {MODULES.get(package, package) for package in packages}.union(*(BRINGS.get(package, set()) for package in packages))


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: modules_of(lines) for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"}
BASE = modules_of(PROJECT["dependencies"])
HEAVY = BASE.union(*EXTRAS.values())


@pytest.mark.parametrize(
    ("modules", "installed"),
    [
        (["draftloom", "draftloom.v1.generation_pb2_grpc", "draftloom.v1.corpus_pb2_grpc"], BASE),
        (["retriever", "retriever.format", "retriever.datastore", "retriever.pools"], {"numpy", "numba", "xxhash"}),
        (["engine.tree", "engine.acceptance", "engine.session", "engine.calibration", "engine.kernels"], {"numpy", "numba"}),
        (["engine.target", "engine.target.fake", "engine.requests", "engine.drafters"], {"numpy", "numba"}),
        (["engine.app", "engine.server.serve", "engine.cli", "engine.config", "engine.demo"], BASE | EXTRAS["engine"]),
        (["engine.target.local", "engine.target.server", "engine.target.convert", "engine.models"], BASE | EXTRAS["worker"]),
        (["corpora.cli", "corpora.build", "corpora.catalog", "corpora.inputs.tables", "engine.cli"], BASE | EXTRAS["index"]),
    ],
    ids=["client", "retriever", "core", "interfaces", "engine", "worker", "index"],
)
def test_an_extra_is_enough_for_its_part(modules: list[str], installed: set[str]) -> None:
    """With every other heavy library made impossible to import, the modules of an extra import."""
    code = (
        "import importlib, importlib.machinery, sys\n"
        "class Installed(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        f"        missing = name.partition('.')[0] in {sorted(HEAVY - installed)!r}\n"
        "        return None if missing else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Installed if f is importlib.machinery.PathFinder else f for f in sys.meta_path]\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1] + "\n" + done.stderr
