"""A causal model of transformers, made ready to answer packed rows on the CPU: float32, bfloat16 or int8.

The model's own code runs; attention is `attention.tree_attention`, and for int8 the modules around it are exchanged one for one
by those of `quantize`. What is not recognized is left as it is and named in `reasons`: then the promise of equality is "except
at near-ties" instead of "bit for bit".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ReLUSquaredActivation, SiLUActivation

from engine.errors import ModelError
from engine.target import attention, check, kernels, quantize
from engine.target.attention import Pass
from engine.text import end_of_text_ids

DTYPES = ("int8", "float32", "bfloat16")


@dataclass
class Model:
    """Weights and the shape of what they need.

    `strict` says that a row's logits do not depend on its neighbours, bit for bit; `reasons` says why where they may.
    """

    network: PreTrainedModel
    dtype: str
    context_length: int
    vocab_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    eos_ids: tuple[int, ...]
    reasons: tuple[str, ...]

    @property
    def strict(self) -> bool:
        return not self.reasons

    @torch.inference_mode()
    def forward(self, tokens: NDArray[np.int32], rows: Pass, wanted: NDArray[np.int32]) -> NDArray[np.float32]:
        """One pass over packed rows: float32 [m, vocab], the logits of the rows `wanted` (int32 [m]).

        `tokens` int32 [n] in the order of `rows`. Writes keys and values behind each sequence's prefix.
        """
        position = torch.from_numpy(_positions(rows))[None]
        with attention.running(rows):
            output = self.network(
                input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
                position_ids=position,
                use_cache=False,
                logits_to_keep=torch.from_numpy(wanted.astype(np.int64)),
            )
        logits: NDArray[np.float32] = output.logits[0].float().numpy()
        return logits


def _positions(rows: Pass) -> NDArray[np.int64]:
    """int64 [n]: prefix length + depth for every row."""
    depths = np.diff(rows.starts) - 1
    lengths = np.repeat(rows.sequences[:, 1], np.diff(rows.firsts))
    positions: NDArray[np.int64] = (lengths + depths).astype(np.int64)
    return positions


def load(folder: Path, dtype: str) -> Model:
    """Load a safetensors folder. Raises ModelError for what cannot be loaded or cannot branch.

    No code from the folder is run, and no weights but safetensors are read.
    """
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype: {dtype}; choose one of {', '.join(DTYPES)}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no usable config.json in {folder}: {error}") from error
    check.refuse_config(config)
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    try:
        with _quiet():
            network = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=wanted,
                attn_implementation=attention.KEY,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
            )
    except Exception as error:  # transformers raises whatever a model's own code does
        raise ModelError(f"cannot load the weights in {folder}: {error}") from error
    return prepare(network.eval(), dtype, tuple(end_of_text_ids(folder)), _stored_dtype(config))


def prepare(network: PreTrainedModel, dtype: str, eos_ids: tuple[int, ...] = (), stored: torch.dtype = torch.float32) -> Model:
    """A loaded network (attention implementation `attention.KEY`, float32 unless dtype is bfloat16) as a Model.

    For int8 its modules are exchanged in place. `stored` is the dtype the embedding may be kept in without loss.
    Raises ModelError for a network that cannot verify trees (see `check`).
    """
    config = network.config.get_text_config()
    check.refuse_config(config)
    heads = config.num_attention_heads
    context_length = int(config.max_position_embeddings)
    model = Model(
        network=network,
        dtype=dtype,
        context_length=context_length,
        vocab_size=int(config.vocab_size),
        num_layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        eos_ids=eos_ids,
        reasons=("floating-point products depend on how many rows a pass has",),
    )
    check.check_rows(model)
    if dtype == "int8":
        model.reasons = tuple(_quantize(network, context_length, stored))
        if not check.check_rows(model):
            model.reasons += ("two rows of one path were answered unlike",)
    return model


def _quantize(network: PreTrainedModel, context_length: int, stored: torch.dtype) -> list[str]:
    """Exchange the modules for their int8 and strict twins; returns what stands in the way of strictness."""
    quantize.reduce_range()
    reasons: list[str] = []
    embedding = network.get_input_embeddings()
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(network).__name__} has no output head: it is not a language model")
    network.set_output_embeddings(quantize.Int8Linear(quantize.Int8Matrix([head.weight], [head.bias])))
    if type(embedding) is nn.Embedding:
        network.set_input_embeddings(quantize.StoredEmbedding(embedding.weight.to(stored)))
    for name, module in list(network.named_modules()):
        if type(module).__name__ in _WINDOWS and _is_gated_mlp(module.mlp) and _is_rms_norm(module.input_layernorm):
            _replace(network, name, quantize.Int8DecoderLayer(module, _WINDOWS[type(module).__name__](module.self_attn) or 0))
    for name, module in list(network.named_modules()):
        if _is_gated_mlp(module):
            _replace(network, name, quantize.Int8GatedMLP(module.gate_proj, module.up_proj, module.down_proj))
        elif _is_rms_norm(module):
            _replace(network, name, quantize.StrictRMSNorm(module.weight, float(module.variance_epsilon)))
        elif name.rpartition(".")[2] == "rotary_emb":
            if getattr(module, "rope_type", "default") in ("default", "linear", "llama3", "yarn"):
                _replace(network, name, quantize.RotaryTable(module, context_length))
            else:
                reasons.append(f"{name} depends on the length of the sequence")
    for _, module in list(network.named_modules()):
        group = [layer for part in _QKV if type(layer := getattr(module, part, None)) is nn.Linear]
        if len(group) == len(_QKV):
            matrix = quantize.Int8Matrix([layer.weight for layer in group], [layer.bias for layer in group])
            shared = quantize.Int8Shared(matrix)
            for i, part in enumerate(_QKV):
                setattr(module, part, quantize.Int8Linear(matrix, i, shared))
    for name, module in list(network.named_modules()):
        if type(module) is nn.Linear:
            _replace(network, name, quantize.Int8Linear(quantize.Int8Matrix([module.weight], [module.bias])))
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.SiLU | SiLUActivation):
            _replace(network, name, quantize.StrictSiLU())
    for name, module in network.named_modules():
        computes = any(True for _ in module.parameters(recurse=False)) or not any(True for _ in module.children())
        if computes and not isinstance(module, _STRICT) and name.rpartition(".")[2] != "rotary_emb":
            reasons.append(f"{name} ({type(module).__name__}) is not known to compute in a fixed order")
    return reasons


_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda mixer: None,
    "Qwen2DecoderLayer": lambda mixer: mixer.sliding_window,
    "MistralDecoderLayer": lambda mixer: mixer.config.sliding_window,
}
"""Layers that `quantize.Int8DecoderLayer` can stand in for, and where each keeps its sliding window."""

_QKV = ("q_proj", "k_proj", "v_proj")

_STRICT = (
    quantize.Int8DecoderLayer,
    quantize.Int8Linear,
    quantize.Int8GatedMLP,
    quantize.StrictRMSNorm,
    quantize.RotaryTable,
    quantize.StoredEmbedding,
    quantize.StrictSiLU,
    nn.Dropout,
    nn.Identity,
    nn.ReLU,
    ReLUSquaredActivation,
)


def _is_gated_mlp(module: nn.Module) -> bool:
    """down(silu(gate(x)) * up(x)) without biases or further parts, as in Llama, Qwen and Mistral."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear and part.bias is None for part in parts) or len(list(module.children())) != 4:
        return False
    return isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)


def _is_rms_norm(module: nn.Module) -> bool:
    """Computes what `StrictRMSNorm` does, as a probe shows; norms of other formulas (1 + weight, say) do not."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(eps, float) or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return False
    probe = torch.linspace(-2.0, 3.0, weight.shape[0])[None]
    out = np.empty((1, weight.shape[0]), np.float32)
    kernels.rms_norm(probe.numpy(), weight.detach().float().numpy(), np.float32(eps), out)
    with torch.inference_mode():
        return bool(np.allclose(module(probe).float().numpy(), out, rtol=1e-4, atol=1e-5))


def _replace(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)


def _stored_dtype(config: object) -> torch.dtype:
    """The dtype the checkpoint was saved in; its embedding can be kept so without loss."""
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return stored if stored in (torch.float16, torch.bfloat16) else torch.float32


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading prints bars and notes of its own; the command line shows its own progress."""
    from transformers.utils import logging as library

    level = library.get_verbosity()
    library.set_verbosity_error()
    library.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.set_verbosity(level)
