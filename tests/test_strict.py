"""int8 is strict: a row's logits are the same bits whatever else is in the pass, in whatever order, on any number of threads.

This is what makes "the same text with and without drafts" true to the letter; everything else in the engine builds on it.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.target.quantize import Int8Matrix
from tests.engine import tiny
from tests.engine.tiny import Bench, chain, path_to, random_parents

THREADS = [1, 2, 3, 4, 8]


def text_of(seed: int, count: int, size: int) -> list[int]:
    """Random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(size, size=count)]


@pytest.mark.parametrize("name", tiny.KINDS)
def test_reading_in_chunks_is_reading_token_by_token(name: str) -> None:
    """Chunks of 7, 64 and 256, on any number of threads, give the logits of one token a pass, across block borders."""
    bench = Bench(tiny.model(name, "int8"))
    assert bench.model.strict, bench.model.reasons
    text = text_of(1, 140, bench.model.vocab_size)
    expected = bench.read(bench.table(), text, 1)
    for count, chunk in zip(THREADS, (7, 64, 256, 63, 65), strict=True):
        with tiny.num_threads(count):
            assert np.array_equal(bench.read(bench.table(), text, chunk), expected)


@pytest.mark.parametrize("name", tiny.KINDS)
def test_a_row_does_not_feel_its_neighbours(name: str) -> None:
    """Random trees of several sequences in any order, beside chunks, over several steps: each row is its own path's alone."""
    bench = Bench(tiny.model(name, "int8"))
    size = bench.model.vocab_size
    rng = np.random.default_rng(len(name))
    for count in THREADS:
        texts = [text_of(seed, length, size) for seed, length in enumerate((30, 62, 126))]
        tables = [bench.table() for _ in texts]
        for table, text in zip(tables, texts, strict=True):
            bench.read(table, text, int(rng.integers(20, 200)))
        for _ in range(2):
            parts = []
            for i in rng.permutation(len(texts))[: rng.integers(1, len(texts) + 1)]:
                parents = chain(40) if rng.random() < 0.2 else random_parents(rng, int(rng.integers(1, 20)))
                parts.append((int(i), rng.integers(size, size=len(parents)), parents))
            with tiny.num_threads(count):
                answers = bench.run(*((tables[i], tokens, parents) for i, tokens, parents in parts))
            for (i, tokens, parents), logits in zip(parts, answers, strict=True):
                for row in rng.permutation(len(parents))[:3]:
                    path = [*texts[i], *tokens[path_to(parents, int(row))].tolist()]
                    assert np.array_equal(logits[row], bench.after(path))
                kept = path_to(parents, int(rng.integers(len(parents))))
                tables[i].keep(np.array(kept, np.int32))
                texts[i] += tokens[kept].tolist()
        for table in tables:
            table.close()


def test_a_row_does_not_feel_how_many_there_are() -> None:
    """The same row as one of 1 to 70 rows, first, last or in the middle: the same bits."""
    bench = Bench(tiny.model("qwen2", "int8"))
    rng = np.random.default_rng(0)
    table = bench.table()
    bench.read(table, text_of(2, 60, bench.model.vocab_size))
    expected: NDArray[np.float32] = bench.run((table, [11], chain(1)))[0][0].copy()
    for count in [*range(2, 18), 31, 32, 33, 48, 63, 64, 65, 70]:
        at = int(rng.integers(count))
        tokens = rng.integers(bench.model.vocab_size, size=count)
        tokens[at] = 11
        with tiny.num_threads(count % 3 + 1):
            (logits,) = bench.run((table, tokens, np.full(count, -1, np.int32)))
        assert np.array_equal(logits[at], expected)


def test_a_range_shared_by_all_rows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If activations were scaled by the largest value of the batch, as is common, rows would feel each other."""
    honest = Int8Matrix.__call__

    def shared(matrix: Int8Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return honest(matrix, np.concatenate([np.round(x * 127 / np.abs(x).max()), np.full((1, x.shape[1]), 127, np.float32)]))[
            :-1
        ]

    bench = Bench(tiny.model("llama", "int8"))
    monkeypatch.setattr(Int8Matrix, "__call__", shared)
    text = text_of(1, 20, bench.model.vocab_size)
    assert not np.array_equal(bench.read(bench.table(), text), bench.read(bench.table(), text, 1))


def test_other_dtypes_do_not_promise_it() -> None:
    """float32 and bfloat16 say that they are not strict, and why."""
    for dtype in ("float32", "bfloat16"):
        model = tiny.model("llama", dtype)
        assert not model.strict and model.reasons == ("floating-point products depend on how many rows a pass has",)
