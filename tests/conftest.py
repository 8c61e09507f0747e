"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("draftloom", deadline=None, derandomize=True, max_examples=60, print_blob=False)
settings.load_profile("draftloom")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` puts what the code says into tests/golden/*.txt; read the diff before committing it."""
    parser.addoption("--rewrite", action="store_true", help="rewrite the expected output of golden scenarios")


@pytest.fixture(scope="session", autouse=True)
def _memory_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers started by tests remember nothing in the user's folders, and nothing of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _memory_of_each_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine made by a test remembers nothing of other tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
