"""Packed rows of several sequences: tree attention and compaction agree with plain forward passes over each path."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import Exhausted
from engine.target.attention import Part, Pass
from engine.target.cache import KVStorage, KVTable
from engine.target.kernels import BLOCK
from tests.engine import oracles_target as oracles
from tests.engine import tiny
from tests.engine.tiny import Bench, chain, path_to, random_parents


@pytest.mark.parametrize("name", tiny.KINDS)
def test_trees_and_chunks_agree_with_plain_forward_passes(name: str) -> None:
    """float32: three sequences packed over steps of trees, one beside a chunk; every row within 1e-4 of transformers."""
    plain, _ = tiny.twins(name)
    bench = Bench(tiny.model(name, "float32"))
    rng = np.random.default_rng(len(name))
    size = bench.model.vocab_size
    texts = [rng.integers(size, size=count).tolist() for count in (61, 127, 20)]
    tables = [bench.table() for _ in texts]
    for table, text, chunk in zip(tables, texts, (7, 64, 256), strict=True):
        found = bench.read(table, text, chunk)
        assert np.abs(found - oracles.forward(plain, text)).max() < 1e-4
    for _ in range(3):
        shapes = [random_parents(rng, int(rng.integers(1, 12))) for _ in texts]
        shapes[2] = chain(9)
        words = [rng.integers(size, size=len(parents)) for parents in shapes]
        answers = bench.run(*zip(tables, words, shapes, strict=True))
        for i, (parents, tokens, logits) in enumerate(zip(shapes, words, answers, strict=True)):
            for row in range(len(parents)):
                path = [*texts[i], *tokens[path_to(parents, row)].tolist()]
                assert np.abs(logits[row] - oracles.forward(plain, path)[-1]).max() < 1e-4
            kept = path_to(parents, int(rng.integers(len(parents))))
            tables[i].keep(np.array(kept, np.int32))
            texts[i] += tokens[kept].tolist()
            assert tables[i].length == len(texts[i])


def test_the_models_of_these_tests_can_tell_a_wrong_mask() -> None:
    """A sibling taken for an ancestor, a token gone, or two swapped, moves logits by far more than the tolerance."""
    for name in tiny.KINDS:
        plain, _ = tiny.twins(name)
        right = oracles.forward(plain, [5, 9, 2, 7])[-1]
        for wrong in ([5, 9, 3, 2, 7], [5, 2, 7], [9, 5, 2, 7]):
            assert np.abs(right - oracles.forward(plain, wrong)[-1]).max() > 0.05


@pytest.mark.parametrize("length", [0, 63, 64, 65, 128])
def test_a_pass_is_laid_out_as_its_parts_say(length: int) -> None:
    """Attention of a whole pass, over shuffled blocks and on several threads, is each part's dense attention."""
    rng = np.random.default_rng(length)
    storage = KVStorage(1, 2, 16, 12 * 8 * 2 * 16 * BLOCK)
    storage._free = rng.permutation(storage.num_blocks).tolist()
    shapes = [random_parents(rng, 9), chain(70), random_parents(rng, 1)]
    lengths = [length, 3, length + 1]
    prefixes = [rng.standard_normal((2, 2, count, 16)).astype(np.float32) for count in lengths]
    tables = [KVTable(storage) for _ in shapes]
    for table, prefix, parents in zip(tables, prefixes, shapes, strict=True):
        count = prefix.shape[2]
        table.reserve(count)
        if count:
            Pass(storage, [Part(table, chain(count))]).store(0, prefix[0], prefix[1])
            table.keep(np.arange(count, dtype=np.int32))
        table.reserve(len(parents))
    num_rows = sum(map(len, shapes))
    query = rng.standard_normal((4, num_rows, 16)).astype(np.float32)
    new = rng.standard_normal((2, 2, num_rows, 16)).astype(np.float32)
    rows = Pass(storage, [Part(table, parents) for table, parents in zip(tables, shapes, strict=True)])
    rows.store(0, new[0], new[1])
    found = []
    for count in (1, 3):
        with tiny.num_threads(count):
            found.append(rows.attend(0, query, 0, 0.3))
    assert np.array_equal(found[0], found[1])
    for i, (parents, first) in enumerate(zip(shapes, rows.firsts, strict=False)):
        mine = slice(int(first), int(first) + len(parents))
        both = np.concatenate([prefixes[i], new[:, :, mine]], 2)
        expected = oracles.attend(query[:, mine], both[0], both[1], oracles.visible(parents, lengths[i], 0), 0.3)
        assert np.allclose(found[0][mine], expected, rtol=1e-5, atol=1e-5)


def test_rows_may_stand_side_by_side_below_the_prefix() -> None:
    """A part with several tops (parent -1) is as many continuations of one prefix."""
    bench = Bench(tiny.model("llama", "int8"))
    table = bench.table()
    bench.read(table, [3, 1, 4])
    (both,) = bench.run((table, [7, 8], np.array([-1, -1], np.int32)))
    for row, token in enumerate([7, 8]):
        (alone,) = bench.run((table, [token], chain(1)))
        assert np.array_equal(both[row], alone[0])


def blocks_of(tables: list[KVTable]) -> NDArray[np.int32]:
    """All blocks in use."""
    return np.concatenate([table.blocks for table in tables])


def test_blocks_are_conserved() -> None:
    """Every block is free or in one table; a reservation that fails takes none; closing gives all back, twice does no harm."""
    storage = KVStorage(2, 1, 4, 5 * 2 * 4 * 8 * BLOCK + 100)
    assert storage.num_blocks == 5 and storage.fits(5 * BLOCK) and not storage.fits(5 * BLOCK + 1)
    one, two = KVTable(storage), KVTable(storage)
    one.reserve(BLOCK)
    one.reserve(BLOCK)
    one.keep(np.arange(BLOCK, dtype=np.int32))
    one.reserve(1)
    two.reserve(3 * BLOCK)
    assert sorted(blocks_of([one, two]).tolist()) == list(range(5)) and storage.num_free == 0
    with pytest.raises(Exhausted, match="1 more blocks of 64 positions needed, 0 free"):
        one.reserve(BLOCK + 1)
    assert len(one.blocks) == 2 and one.length == BLOCK
    two.close()
    two.close()
    one.close()
    assert storage.num_free == 5 and len(set(storage._free)) == 5
    with pytest.raises(Exhausted, match="raise kv_memory"):
        KVStorage(2, 1, 4, 100)
