"""Crews of threads: all work is done, once, and before anybody goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import carray, cfunc, types

from engine.target import threads
from engine.target.team_kernels import BOARD_WORDS, PRODUCT_ENTRY, dismiss, muster, run, take
from tests.engine import tiny

MOST = 40


@cfunc(types.void(types.voidptr), nopython=True)
def count_items(data: Any) -> None:
    """An entry: [items taken, items there are, work an item is, what was done of each]."""
    a = carray(data, (3 + MOST,), np.int64)
    while True:
        item = take(a.ctypes.data)
        if item >= a[1]:
            break
        for _ in range(a[2]):
            a[3 + item] += 1


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("as_crew", [True, False])
def test_every_item_is_done_once_and_in_time(count: int, as_crew: bool) -> None:
    """Hundreds of small pieces of work in a row, also with more threads than cores, so that some come late or not at all."""
    rng = np.random.default_rng(count)
    with tiny.num_threads(count):
        team = threads.team().copy()
    team[PRODUCT_ENTRY] = count_items.address
    board = np.zeros(BOARD_WORDS, np.int64)
    crew = muster(team, board) if as_crew else team
    for _ in range(300 if as_crew else 30):
        num_items, work = int(rng.integers(MOST + 1)), int(rng.choice([1, 10, 2000]))
        args = np.zeros(3 + MOST, np.int64)
        args[1:3] = num_items, work
        assert run(crew, PRODUCT_ENTRY, args) > num_items
        assert args[3:].tolist() == [work] * num_items + [0] * (MOST - num_items)
    if as_crew:
        dismiss(crew, board)
