"""int8 on every architecture that is called strict: a row's logits are its own path's, however a pass is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.errors import ModelError
from engine.target.attention import Part, Pass, running, tree_attention
from engine.target.model import load, prepare
from tests.engine import tiny
from tests.engine.test_target_model import FAMILIES
from tests.engine.tiny import Bench, chain, path_to, random_parents

STRICT = [name for name, (_, _, strict) in FAMILIES.items() if strict]


def pack(name: str, num_packings: int, threads: tuple[int, ...]) -> None:
    """Random passes, one after the other, over three texts; every one has some rows compared with passes of their own.

    Trees of any shape and chunks, sequences in any order, read in chunks of any size, on any number of threads. At times one
    loses its blocks and is read again, as in a preemption; one that grows long makes room for another, so blocks change hands.
    """
    config, settings, _ = FAMILIES[name]
    bench = Bench(prepare(tiny.build(config, **settings), "int8"))
    assert bench.model.strict, bench.model.reasons
    rng, size = np.random.default_rng(len(name)), bench.model.vocab_size
    tables = [bench.table() for _ in range(3)]
    texts: list[list[int]] = [[] for _ in tables]
    for _ in range(num_packings):
        for i, text in enumerate(texts):
            begins = not 0 < len(text) < 150
            if begins:
                texts[i] = rng.integers(size, size=int(rng.choice([3, 60, 64, 66]))).tolist()
            if begins or rng.random() < 0.1:
                tables[i].close()
                bench.read(tables[i], texts[i], int(rng.integers(8, 88)))
        order = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        shapes = [
            chain(int(rng.integers(20, 40))) if rng.random() < 0.2 else random_parents(rng, int(rng.integers(1, 14)))
            for _ in order
        ]
        words = [rng.integers(size, size=len(parents)) for parents in shapes]
        with tiny.num_threads(int(rng.choice(threads))):
            answers = bench.run(
                *((tables[i], tokens, parents) for i, tokens, parents in zip(order, words, shapes, strict=True))
            )
        asked = int(rng.integers(len(order)))
        for at, (i, tokens, parents, logits) in enumerate(zip(order, words, shapes, answers, strict=True)):
            row = int(rng.integers(len(parents)))
            kept = path_to(parents, row)
            if at == asked:
                assert np.array_equal(logits[row], bench.after([*texts[i], *tokens[kept].tolist()]))
            tables[i].keep(np.array(kept, np.int32))
            texts[i] += tokens[kept].tolist()


@pytest.mark.parametrize("name", STRICT)
def test_rows_are_their_own_in_random_packings(name: str) -> None:
    """Ten packings."""
    pack(name, 10, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT)
def test_rows_are_their_own_in_many_random_packings(name: str) -> None:
    """Five hundred, on up to eight threads."""
    pack(name, 500, (1, 2, 3, 4, 8))


@pytest.mark.parametrize(
    "name",
    [
        "gemma3, window",
        "gemma2, window and caps",
        "olmo3, window",
        "qwen3-moe",
        "phi",
        "gpt2",
        "gpt-neox",
        "opt",
        "cohere2, window",
    ],
)
def test_packed_weights_are_the_model(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded a second time, from the cache: the same bits, scales, norms, angles, positions, experts and cap included."""
    monkeypatch.setenv("DRAFTLOOM_CACHE", str(tmp_path / "cache"))
    config, settings, _ = FAMILIES[name]
    tiny.build(config, **settings).save_pretrained(tmp_path / "weights")
    found: list[NDArray[np.float32]] = []
    for _ in range(2):
        loaded = load(tmp_path / "weights", "int8")
        assert loaded.strict
        found.append(Bench(loaded).after([4, 5, 6, 9, 2, 3, 11]))
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": 1}, "position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention_mask"),
        ({"is_causal": False}, "is_causal"),
        ({"s_aux": torch.zeros(3)}, "4 heads, but 3 sinks"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
    ],
    ids=str,
)
def test_what_attention_does_not_do_is_refused_by_name(asked: dict[str, Any], why: str) -> None:
    """A parameter of the interface that would change the answer is honoured or refused, never passed over."""
    bench = Bench(tiny.model("llama-tied", "float32"))
    table = bench.table()
    table.reserve(2)
    module = bench.model.network.model.layers[0].self_attn
    x = torch.ones(1, 4, 2, 16)
    settings = {"attention_mask": None, "dropout": 0.0, "scaling": None, "use_cache": False} | asked
    with running(Pass(bench.storage, [Part(table, chain(2))])):
        with pytest.raises(ModelError, match=why):
            tree_attention(module, x, x, x, **settings)
        tree_attention(module, x, x, x, **(settings | dict.fromkeys(asked) | {"dropout": 0.0}))
