"""Tiny random models of real architectures, and the few lines it takes to run a pass over them by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from engine.target.attention import KEY, Part, Pass
from engine.target.cache import KVStorage, KVTable
from engine.target.model import Model, prepare

torch.set_num_threads(1)  # so small a model only loses by more, and minutes on a busy machine; `num_threads` sets others

CONTEXT = 384
"""Positions a tiny model knows: some more than five blocks of KV storage."""


@dataclass(frozen=True)
class Kind:
    """An architecture: the config's class in transformers, and what to set in it."""

    config: str
    settings: dict[str, Any]


KINDS = {
    "llama": Kind("LlamaConfig", {"num_key_value_heads": 2}),
    "llama-tied": Kind("LlamaConfig", {"tie_word_embeddings": True, "vocab_size": 512}),
    "qwen2": Kind("Qwen2Config", {"num_key_value_heads": 2, "vocab_size": 301}),
    "mistral-window": Kind("MistralConfig", {"num_key_value_heads": 1, "sliding_window": 9}),
    "qwen3": Kind("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
}
"""Grouped heads; tied weights; biases on q, k and v; a sliding window and one kv head; normed q and k of an odd width."""


@cache
def twins(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(a network with transformers' own eager attention, one with ours), of the same random weights."""
    kind = KINDS[name]
    plain = build(kind.config, "eager", **kind.settings)
    ours = build(kind.config, KEY, **kind.settings)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def build(config: str, attention: str = KEY, **settings: Any) -> PreTrainedModel:
    """A network with large random weights, norms and biases among them, so that every part of it matters."""
    defaults: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = getattr(transformers, config)(**(defaults | settings), attn_implementation=attention)
    torch.manual_seed(5)
    network: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn(parameter.shape) * 0.25)
    return network


@cache
def model(name: str, dtype: str) -> Model:
    """A tiny network made ready for the worker."""
    _, ours = twins(name)
    if dtype == "float32":
        return prepare(ours, dtype)
    kind = KINDS[name]
    other = build(kind.config, KEY, **kind.settings)
    other.load_state_dict(ours.state_dict())
    return prepare(other.to(torch.bfloat16) if dtype == "bfloat16" else other, dtype)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Torch's team with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- passes by hand


def chain(num_rows: int) -> NDArray[np.int32]:
    """The parents of a chain."""
    return np.arange(-1, num_rows - 1, dtype=np.int32)


class Bench:
    """A model with KV storage, for passes whose every row is asked for."""

    def __init__(self, model: Model, num_blocks: int = 64) -> None:
        self.model = model
        block = 8 * model.num_layers * model.kv_heads * model.head_dim * 64
        self.storage = KVStorage(model.num_layers, model.kv_heads, model.head_dim, num_blocks * block)

    def table(self) -> KVTable:
        """A sequence without tokens."""
        return KVTable(self.storage)

    def run(self, *parts: tuple[KVTable, Sequence[int], NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """One pass over (table, tokens, parents) of several sequences: float32 [rows, vocab] for each. Nothing is committed."""
        for table, tokens, _ in parts:
            table.reserve(len(tokens))
        rows = Pass(self.storage, [Part(table, parents) for table, _, parents in parts])
        tokens = np.concatenate([np.asarray(tokens, np.int32) for _, tokens, _ in parts])
        logits = self.model.forward(tokens, rows, np.arange(len(tokens), dtype=np.int32))
        return np.split(logits, rows.firsts[1:-1])

    def read(self, table: KVTable, tokens: Sequence[int], chunk: int = 10**6) -> NDArray[np.float32]:
        """Commit tokens in chunks; the logits of all of them."""
        found = []
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            found += self.run((table, piece, chain(len(piece))))
            table.keep(np.arange(len(piece), dtype=np.int32))
        return np.concatenate(found)

    def after(self, path: Sequence[int]) -> NDArray[np.float32]:
        """float32 [vocab]: what the model says after `path`, read in one pass of its own."""
        table = self.table()
        logits: NDArray[np.float32] = self.run((table, path, chain(len(path))))[0][-1].copy()
        table.close()
        return logits


def random_parents(rng: np.random.Generator, num_rows: int) -> NDArray[np.int32]:
    """A tree of any shape, its root first: some deep, some bushy."""
    deep = rng.random()
    parents = [-1]
    for row in range(1, num_rows):
        parents.append(row - 1 if rng.random() < deep else int(rng.integers(row)))
    return np.array(parents, np.int32)


def path_to(parents: NDArray[np.int32], row: int) -> list[int]:
    """Rows from the top down to `row`."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path
