"""What every test may use."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("draftloom", deadline=None, derandomize=True, max_examples=60, print_blob=False)
settings.load_profile("draftloom")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` puts what the code says into tests/golden/*.txt; read the diff before committing it."""
    parser.addoption("--rewrite", action="store_true", help="rewrite the expected output of golden scenarios")
