"""The stubs under draftloom/v1 are what the .proto files say."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROTOS = sorted((ROOT / "proto/draftloom/v1").glob("*.proto"))
STUBS = ROOT / "draftloom/v1"


def recorded_version() -> str:
    """The grpcio-tools the stubs were made with, which is written in them."""
    match = re.search(r"GRPC_GENERATED_VERSION = '([^']+)'", (STUBS / "generation_pb2_grpc.py").read_text())
    assert match is not None
    return match.group(1)


def test_protos_follow_the_style() -> None:
    """`buf lint` with its standard rules has nothing to say."""
    buf = shutil.which("buf", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if buf is None:
        pytest.skip("buf is not installed: pip install buf-bin")
    result = subprocess.run([buf, "lint", "proto"], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_stubs_are_what_the_protos_say(tmp_path: Path) -> None:
    """Generating them again gives the same files, byte for byte, and there are no others."""
    try:
        version = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("grpcio-tools is not installed")
    if version != recorded_version():
        pytest.skip(f"grpcio-tools is {version}, the stubs were made with {recorded_version()}")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    names = [str(path.relative_to(ROOT / "proto")) for path in PROTOS]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *names], cwd=ROOT, check=True)
    made = {path.name: path.read_bytes() for path in (tmp_path / "draftloom/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in STUBS.iterdir() if "_pb2" in path.name}
    assert sorted(made) == sorted(committed)
    assert [name for name in made if made[name] != committed[name]] == [], "run `make proto`"
