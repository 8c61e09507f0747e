"""Running ahead in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora.ahead import ahead


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers() | st.none(), max_size=20), st.integers(1, 4))
def test_the_same_items_come_in_the_same_order(items: list[int | None], size: int) -> None:
    """However far it may run ahead; None is an item like any other."""
    assert list(ahead(items, size)) == items


def test_an_exception_comes_where_its_item_would_have() -> None:
    """After all items before it."""

    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("three")

    seen = []
    with pytest.raises(KeyError, match="three"):
        for item in ahead(items(), 1):
            seen.append(item)
    assert seen == [1, 2]


def test_it_runs_ahead_by_so_many() -> None:
    """While the consumer holds the first item, `size` more are made and one waits for its place."""
    made: list[int] = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        for item in range(100):
            made.append(item)
            if item == 3:
                enough.set()
            yield item

    stream = ahead(items(), 2)
    assert next(stream) == 0 and enough.wait(5)
    assert made == [0, 1, 2, 3]
    stream.close()
    assert len(made) <= 5


def test_leaving_ends_the_thread() -> None:
    """A consumer that stops early leaves nothing behind."""
    before = threading.active_count()
    for item in ahead(iter(int, 1), 1):
        assert item == 0
        break
    assert threading.active_count() == before
