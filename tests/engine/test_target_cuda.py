"""The device's passes, on the CPU: the same code that runs on CUDA, without graphs and compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import kernels as core_kernels
from engine.errors import Exhausted
from engine.target import cuda
from engine.target.attention import KEY, Part
from engine.target.cache import KVTable
from engine.target.kernels import BLOCK
from engine.target.sampling import Choices
from tests.engine import oracles_target as oracles
from tests.engine import tiny
from tests.engine.test_target_model import FAMILIES
from tests.engine.tiny import chain, path_to, random_parents

CPU = torch.device("cpu")


class Device:
    """A network with device storage, for passes by hand."""

    def __init__(self, network: Any, flexible: bool, width: int = 0) -> None:
        config = network.config.get_text_config()
        heads = config.num_key_value_heads
        dim = width or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        memory = 24 * 8 * config.num_hidden_layers * heads * dim * BLOCK
        self.storage = cuda.DeviceStorage(config.num_hidden_layers, heads, dim, memory, CPU, torch.float32)
        self.runner = cuda.Runner(network, self.storage, flexible)

    def run(self, *parts: tuple[KVTable, Any, NDArray[np.int32]], wanted: Any = None) -> list[NDArray[np.float32]]:
        """Logits of every sequence's rows (or of the rows wanted, all in one)."""
        for table, tokens, _ in parts:
            table.reserve(len(tokens))
        tokens = np.concatenate([np.asarray(tokens, np.int32) for _, tokens, _ in parts])
        rows = np.arange(len(tokens), dtype=np.int32) if wanted is None else wanted
        logits = self.runner.run(tokens, [Part(table, parents) for table, _, parents in parts], rows).numpy()
        return [logits] if wanted is not None else np.split(logits, np.cumsum([len(part[1]) for part in parts])[:-1])

    def read(self, table: KVTable, tokens: Any, size: int) -> NDArray[np.float32]:
        """Commit tokens in chunks; the logits of all."""
        found = []
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            found += self.run((table, piece, chain(len(piece))))
            table.keep(np.arange(len(piece), dtype=np.int32))
        return np.concatenate(found)


@pytest.mark.parametrize("flexible", [False, True], ids=["gathered", "flex"])
@pytest.mark.parametrize("name", ["qwen2", "mistral-window"])
def test_trees_of_several_sequences_agree_with_plain_forward_passes(name: str, flexible: bool) -> None:
    """Chunks, packed trees and moved rows over several steps, filled up to any number of rows: within 1e-4 of transformers."""
    plain, ours = tiny.twins(name)
    device, rng = Device(ours, flexible), np.random.default_rng(len(name))
    size = plain.config.vocab_size
    texts = [rng.integers(size, size=count).tolist() for count in (61, 70, 3)]
    tables = [KVTable(device.storage) for _ in texts]
    for table, text in zip(tables, texts, strict=True):
        assert np.abs(device.read(table, text, 67) - oracles.forward(plain, text)).max() < 1e-4
    for _ in range(3):
        shapes = [random_parents(rng, int(rng.integers(1, 12))) for _ in texts]
        words = [rng.integers(size, size=len(parents)) for parents in shapes]
        answers = device.run(*zip(tables, words, shapes, strict=True))
        kept = [path_to(parents, int(rng.integers(len(parents)))) for parents in shapes]
        for i, (parents, tokens, logits) in enumerate(zip(shapes, words, answers, strict=True)):
            for row in (0, len(parents) - 1, kept[i][-1]):
                path = [*texts[i], *tokens[path_to(parents, row)].tolist()]
                assert np.abs(logits[row] - oracles.forward(plain, path)[-1]).max() < 1e-4
            texts[i] += tokens[kept[i]].tolist()
        for table, rows in zip(tables, kept, strict=True):
            table.keep(np.array(rows, np.int32))
        assert [table.length for table in tables] == [len(text) for text in texts]


@pytest.mark.parametrize("flexible", [False, True], ids=["gathered", "flex"])
@pytest.mark.parametrize(
    ("family", "width"), [("gemma2, window and caps", 16), ("gpt-oss, window and sinks", 16), ("deepseek-v3", 24)]
)
def test_caps_sinks_and_latent_attention_agree(family: str, width: int, flexible: bool) -> None:
    """What a layer asks of its scores is honoured on the device, too."""
    config, settings, _ = FAMILIES[family]
    plain, ours = tiny.build(config, "eager", **settings), tiny.build(config, KEY, **settings)
    device = Device(ours, flexible, width)
    table = KVTable(device.storage)
    text, tree = [5, 9, 2, 7, 11, 3, 8], np.array([-1, 0, 0, 1, 1, 2, 3], np.int32)
    assert np.abs(device.read(table, text, 4) - oracles.forward(plain, text)).max() < 2e-4
    (found,) = device.run((table, text, tree))
    for row in range(len(tree)):
        path = text + [text[i] for i in path_to(tree, row)]
        assert np.abs(found[row] - oracles.forward(plain, path)[-1]).max() < 2e-4


@pytest.mark.parametrize("window", [0, 1, 5, 70])
@pytest.mark.parametrize("physical", [False, True])
def test_the_mask_is_the_definition(window: int, physical: bool) -> None:
    """Every row against every place, for prefixes around page borders, a shared page, rows that fill up and pages in any order,
    of more sequences than a word has bits."""
    rng = np.random.default_rng(window)
    storage = cuda.DeviceStorage(1, 1, 1, 60 * 8 * BLOCK, CPU, torch.float32)
    storage._free = rng.permutation(storage.num_blocks).tolist()
    lengths = [0, 63, 64, 130, *[5] * 33]
    shapes = [random_parents(rng, 7), chain(5), random_parents(rng, 12), random_parents(rng, 1), *[chain(1)] * 33]
    tables = [KVTable(storage) for _ in shapes]
    for table, length, parents in zip(tables, lengths, shapes, strict=True):
        table.reserve(length + len(parents))
        table.length = length
    tables[2].blocks[0] = tables[3].blocks[0]  # two texts that begin alike
    num_rows = sum(map(len, shapes))
    layout = cuda.Layout(cuda.bucket(num_rows), 40, 64, storage.num_blocks, CPU, physical)
    layout.fill(np.arange(num_rows, dtype=np.int32), [Part(*each) for each in zip(tables, shapes, strict=True)])
    pages = list(range(storage.num_blocks + 1)) if physical else layout.host["pages"].tolist()
    found = layout.sees(torch.arange(layout.rows)[:, None], torch.arange(len(pages) * BLOCK)[None], window).numpy()
    expected = np.zeros_like(found)
    row = 0
    for table, parents in zip(tables, shapes, strict=True):
        for i, line in enumerate(oracles.visible(parents, table.length, window)):
            for slot in np.flatnonzero(line):
                expected[row + i, pages.index(int(table.blocks[slot // BLOCK])) * BLOCK + slot % BLOCK] = True
        row += len(parents)
    assert np.array_equal(found[:row], expected[:row])
    assert found[row:].sum(1).tolist() == [1] * (layout.rows - row)  # each its own place in the spare page


def test_only_the_rows_wanted_of_a_chunk_are_answered() -> None:
    """A long chunk gives the logits of the rows asked for; they are those of the pass with all."""
    _, ours = tiny.twins("llama")
    device, text = Device(ours, False), np.random.default_rng(0).integers(97, size=100)
    table = KVTable(device.storage)
    (every,) = device.run((table, text, chain(100)))
    (some,) = device.run((table, text, chain(100)), wanted=np.array([3, 99], np.int32))
    assert np.allclose(some, every[[3, 99]], atol=1e-5)


def test_pages_are_counted_and_moves_read_before_they_write() -> None:
    """Memory is bounded by pages; rows that trade places do so."""
    storage = cuda.DeviceStorage(2, 1, 4, 3 * 2 * 2 * 4 * BLOCK * 2 + 5, CPU, torch.bfloat16)
    assert storage.num_blocks == 3 and storage.keys[0].shape == (1, 1, 4 * BLOCK, 4)
    storage.keys[1][0, 0, :, 0] = torch.arange(4 * BLOCK)
    storage.move(np.array([7, 5, 6]), np.array([5, 6, 7]))
    assert storage.keys[1][0, 0, 5:8, 0].tolist() == [7, 5, 6]
    storage.move(np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(Exhausted):
        cuda.DeviceStorage(2, 1, 4, 100, CPU, torch.bfloat16)


def test_all_choices_at_once_are_those_of_the_host() -> None:
    """Greedy and sampled rows side by side, top_k, top_p and min_p, ties, NaN and -inf: the ids of the numba kernel."""
    rng, n, size = np.random.default_rng(4), 200, 301
    logits = np.round(rng.standard_normal((n, size)) * 3, 1).astype(np.float32)  # coarse, so that many are equal
    logits[1], logits[2, 5:9], logits[3, :200], logits[4] = 0.0, logits[2].max() + 1, -np.inf, -np.inf
    logits[5, 7], logits[7], logits[8, 3] = np.nan, np.nan, np.inf
    choices = Choices(
        temperature=np.where(np.arange(n) % 3 == 0, 0.0, rng.random(n) * 2 + 1e-3),
        top_k=np.where(np.arange(n) % 2 == 0, 0, rng.integers(1, 400, n)),
        top_p=np.where(np.arange(n) % 5 < 2, 1.0, rng.random(n) * 0.98 + 0.01),
        min_p=np.where(np.arange(n) % 4 < 2, 0.0, rng.random(n) * 0.3),
        seed=rng.integers(1 << 64, size=n, dtype=np.uint64),
        position=rng.integers(1000, size=n),
    )
    choices.top_k[10], choices.temperature[11] = 1, 1e-310
    (found,) = cuda.fetch(cuda.choose_all(torch.from_numpy(logits), choices))
    scratch = np.empty(size), np.empty(size), np.empty(size, np.bool_)
    cut = 0
    for row in range(n):
        heat, k, p, least = (x[row] for x in (choices.temperature, choices.top_k, choices.top_p, choices.min_p))
        key = choices.seed[row], choices.position[row]
        expected = int(np.argmax(np.nan_to_num(logits[row], nan=-np.inf, posinf=np.inf, neginf=-np.inf)))
        if heat > 0:
            expected = core_kernels.choose(logits[row], heat, k, p, least, *key, *scratch)
            cut += expected != core_kernels.choose(logits[row], heat, 0, 1.0, 0.0, *key, *scratch)
        assert found[row] == expected, row
    assert cut > 20, "what top_k, top_p and min_p leave out would have been chosen now and then"


def test_blocks_of_a_kernel_divide_those_of_the_mask() -> None:
    """The kernel for few rows is left out where its one block of rows would be larger; 16-bit heads take a page at a time."""

    def options(heads: int, rows: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        return cuda.kernel_options(torch.empty(1, heads, rows, dim, dtype=dtype), torch.empty(1, 4, 640, dim, dtype=dtype))

    assert options(8, 64, 128) == {"BLOCK_N": BLOCK}
    assert options(16, 64, 128) == {"BLOCK_N": BLOCK, "FORCE_USE_FLEX_ATTENTION": True}
    assert options(4, 64, 64, torch.float32) == {} == options(4, 16, 256)


def test_numbers_of_rows_come_in_sizes() -> None:
    """A pass is filled up to the next size, beyond the largest to a multiple of it."""
    assert [cuda.bucket(n) for n in (1, 3, 64, 65, 129)] == [1, 4, 64, 128, 192]
