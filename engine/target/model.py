"""A causal model of transformers, made ready to answer packed rows: float32, bfloat16 or, on the CPU, int8.

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
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, ReLUSquaredActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from engine.config import DEVICES
from engine.errors import ModelError
from engine.target import attention, check, kernels, packed, quantize
from engine.target.attention import Pass
from engine.target.kernels import LANES
from engine.target.packed import PackedWeights
from engine.text import end_of_text_ids

logger = logging.getLogger(__name__)

DTYPES = ("int8", "float32", "bfloat16")
CPU = torch.device("cpu")


@dataclass
class Model:
    """Weights and the shape of what they need.

    `head_dim` is the width that heads are stored with, a multiple of 16 (zeros fill it up). `strict` says that a
    row's logits do not depend on its neighbours, bit for bit; `reasons` says why where they may.
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
    device: torch.device = CPU

    @property
    def strict(self) -> bool:
        return not self.reasons

    def move(self, device: torch.device) -> None:
        """Have the weights on a device, where `cuda.DevicePasses` runs passes. Raises ModelError where they do not fit."""
        try:
            self.network.to(device)
        except torch.OutOfMemoryError as error:
            raise ModelError(f"the weights do not fit on the device: {device}; choose a smaller model or the cpu") from error
        self.device = device

    @torch.inference_mode()
    def forward(self, tokens: NDArray[np.int32], rows: Pass, wanted: NDArray[np.int32]) -> NDArray[np.float32]:
        """One pass over packed rows on the CPU: float32 [m, vocab], the logits of the rows `wanted` (int32 [m]).

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


def choose_device(device: str, dtype: str) -> tuple[torch.device, str]:
    """Where a model runs and as what, for what a user wants.

    The device "auto" is CUDA where torch sees such a device, unless the dtype is int8, which is of CPUs alone; the dtype "auto"
    is int8 on a CPU, else bfloat16. Raises ModelError for an unknown device, for CUDA where there is none, and for int8 on it.
    """
    if device not in DEVICES:
        raise ModelError(f"unknown device: {device}; choose one of {', '.join(DEVICES)}")
    if device == "auto":
        device = "cuda" if dtype != "int8" and torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        why = "sees none" if torch.version.cuda else "was built without CUDA"
        raise ModelError(f"no CUDA device: torch {torch.__version__} {why}; choose the device cpu or auto")
    if device == "cuda" and dtype == "int8":
        raise ModelError("int8 runs on the CPU alone; choose the dtype bfloat16, float32 or auto on cuda")
    if dtype == "auto":
        dtype = "int8" if device == "cpu" else "bfloat16"
    return torch.device(device), dtype


def load(folder: Path, dtype: str) -> Model:
    """Load a safetensors folder. Raises ModelError for what cannot be loaded or cannot branch.

    No code from the folder is run, and no weights but safetensors are read. Where an int8 model is strict, its packed weights
    are kept in the cache, to be mapped from there the next time (`packed`).
    """
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype: {dtype}; choose one of {', '.join(DTYPES)}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no usable config.json in {folder}: {error}") from error
    check.refuse_config(config)
    eos_ids, stored = tuple(end_of_text_ids(folder)), _stored_dtype(config)
    if dtype != "int8":
        return prepare(_read(folder, dtype), dtype, eos_ids, stored)
    place = packed.place_of(folder)
    if (weights := packed.open_packed(place)) is not None:
        try:
            return prepare(_skeleton(config, weights), dtype, eos_ids, stored, weights)
        except (ModelError, KeyError, ValueError) as error:
            logger.warning("packed weights do not fit, packing anew: %s: %s", place.file, error)
    weights = PackedWeights()
    model = prepare(_read(folder, dtype), dtype, eos_ids, stored, weights)
    if model.strict:
        packed.save_packed(place, weights)
    return model


def _read(folder: Path, dtype: str) -> PreTrainedModel:
    """The network with its weights, as transformers loads it."""
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    try:
        with _quiet():
            network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=wanted,
                attn_implementation=attention.KEY,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
            )
    except Exception as error:  # transformers raises whatever a model's own code does
        raise ModelError(f"cannot load the weights in {folder}: {error}") from error
    return network.eval()


def _skeleton(config: Any, weights: PackedWeights) -> PreTrainedModel:
    """The network with the tensors that stay as they are; the linear layers have shapes, but no numbers."""
    with _quiet(), torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention.KEY, trust_remote_code=False
        )
    network.load_state_dict(weights.others, strict=False, assign=True)
    for name, module in list(network.named_modules()):
        if name.rpartition(".")[2] == "rotary_emb":  # its buffers are computed, not loaded
            _replace(network, name, type(module)(config=config.get_text_config()))
    return network.eval()


def prepare(
    network: PreTrainedModel,
    dtype: str,
    eos_ids: tuple[int, ...] = (),
    stored: torch.dtype = torch.float32,
    weights: PackedWeights | None = None,
) -> Model:
    """A loaded network (attention implementation `attention.KEY`, float32 unless dtype is bfloat16) as a Model.

    For int8 its modules are exchanged in place; what they need is taken from `weights`, or put there if these are empty.
    `stored` is the dtype the embedding may be kept in without loss. Raises ModelError for a network that cannot verify trees.
    """
    weights = PackedWeights() if weights is None else weights
    check.refuse_config(network.config.get_text_config())
    model = describe(network, dtype, eos_ids)
    if not weights.complete:  # else it was asked before its weights were packed
        check.check_rows(model)
    if dtype == "int8":
        model.reasons = tuple(_quantize(network, stored, weights))
        if not check.check_rows(model):
            model.reasons += ("two rows of one path were answered unlike",)
    return model


def describe(network: PreTrainedModel, dtype: str, eos_ids: tuple[int, ...] = ()) -> Model:
    """What a network's config says of it, unchecked. It is not strict."""
    config = network.config.get_text_config()
    heads = config.num_attention_heads
    return Model(
        network=network,
        dtype=dtype,
        context_length=int(config.max_position_embeddings),
        vocab_size=int(config.vocab_size),
        num_layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=-(-_widest_head(config) // LANES) * LANES,
        eos_ids=eos_ids,
        reasons=("floating-point products depend on how many rows a pass has",),
    )


def _widest_head(config: Any) -> int:
    """Numbers in a head's key or value, whichever has more: in latent attention (DeepSeek) keys have parts of two kinds."""
    plain = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None) is None:
        return plain
    return max(int(config.qk_nope_head_dim) + int(config.qk_rope_head_dim), int(config.v_head_dim))


def _quantize(network: PreTrainedModel, stored: torch.dtype, weights: PackedWeights) -> list[str]:
    """Exchange the modules for their int8 and strict twins; returns what stands in the way of strictness."""
    reasons: list[str] = []
    embedding = network.get_input_embeddings()
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(network).__name__} has no output head: it is not a language model")
    if not weights.complete:
        linear = {id(module.weight) for module in network.modules() if _is_linear(module) and module is not head}
        linear |= {id(part) for module in network.modules() if _has_experts(module) for part in module.parameters()}
        weights.others = {
            name: parameter.detach().to(stored if parameter is getattr(embedding, "weight", None) else parameter.dtype)
            for name, parameter in network.named_parameters()
            if id(parameter) not in linear
            and not (parameter is head.weight and parameter is not getattr(embedding, "weight", None))
        }
    int8_head = quantize.Int8Linear(weights.matrix("head", [head]))
    cap = getattr(network.config, "final_logit_softcapping", None)
    network.set_output_embeddings(quantize.CappedHead(int8_head, cap) if cap else int8_head)
    if cap:  # the head does it
        network.config.final_logit_softcapping = None
    scale = getattr(embedding, "scalar_embed_scale", None)
    if type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and scale is not None):
        network.set_input_embeddings(quantize.StoredEmbedding(embedding.weight.to(stored), 1.0 if scale is None else scale))
    for name, module in list(network.named_modules()):
        if _is_llama_decoder(module):
            _replace(network, name, nn.ModuleList([_int8_decoder(name, list(module), weights)]))
    for name, module in list(network.named_modules()):
        if _has_experts(module):
            _replace(network, name, _int8_experts(name, module, weights))
        elif (normalizes := _ROUTERS.get(type(module).__name__)) is not None:
            _replace(network, name, quantize.StrictRouter(module.weight, int(module.top_k), normalizes(module)))
    for name, module in list(network.named_modules()):
        if _is_gated_mlp(module):
            gate_up = weights.matrix(f"{name}.gate_up", [module.gate_proj, module.up_proj], gated=True)
            _replace(network, name, quantize.Int8GatedMLP(gate_up, weights.matrix(f"{name}.down", [module.down_proj])))
        elif (norm := _rms_norm_parts(module)) is not None:
            _replace(network, name, quantize.StrictRMSNorm(*norm))
        elif (parts := _layer_norm_parts(module)) is not None:
            _replace(network, name, quantize.StrictLayerNorm(*parts))
        elif name.rpartition(".")[2] == "rotary_emb":
            kinds = getattr(module, "rope_type", "default")
            if set(kinds.values() if isinstance(kinds, dict) else [kinds]) <= {"default", "linear", "llama3", "yarn"}:
                _replace(network, name, quantize.RotaryTable(module))
            else:
                reasons.append(f"{name} depends on the length of the sequence")
    for name, module in list(network.named_modules()):
        group = [layer for part in _QKV if type(layer := getattr(module, part, None)) is nn.Linear]
        if len(group) == len(_QKV):
            shared = quantize.Int8Shared(weights.matrix(f"{name}.qkv", group))
            for i, part in enumerate(_QKV):
                setattr(module, part, quantize.Int8Linear(shared.matrix, i, shared))
    for name, module in list(network.named_modules()):
        if type(module) is nn.Linear:
            _replace(network, name, quantize.Int8Linear(weights.matrix(name, [module])))
        elif isinstance(module, Conv1D):  # GPT-2's name for a linear layer whose weight is stored transposed
            _replace(network, name, quantize.Int8Linear(weights.matrix(name, [_linear(module.weight.t(), module.bias)])))
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.SiLU | SiLUActivation):
            _replace(network, name, quantize.StrictSiLU())
        elif isinstance(module, GELUTanh | NewGELUActivation):
            _replace(network, name, quantize.StrictGELU())
        elif isinstance(module, GELUActivation):
            _replace(network, name, quantize.StrictErfGELU())
    for name, module in network.named_modules():
        computes = any(True for _ in module.parameters(recurse=False)) or not any(True for _ in module.children())
        if computes and not isinstance(module, _STRICT) and not _looks_up(module) and name.rpartition(".")[2] != "rotary_emb":
            reasons.append(f"{name} ({type(module).__name__}) is not known to compute in a fixed order")
    return reasons


_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda mixer: None,
    "Qwen2DecoderLayer": lambda mixer: mixer.sliding_window,
    "MistralDecoderLayer": lambda mixer: mixer.config.sliding_window,
}
"""Layers that `quantize.Int8Decoder` can stand in for, and where each keeps its sliding window."""

_ROUTERS: dict[str, Callable[[Any], bool]] = {
    "MixtralTopKRouter": lambda router: True,
    "Qwen3MoeTopKRouter": lambda router: bool(router.norm_topk_prob),
}
"""Routers that `quantize.StrictRouter` can stand in for, and whether each lets a row's shares add up to 1."""

_EXPERTS = ("MixtralExperts", "Qwen3MoeExperts")

_QKV = ("q_proj", "k_proj", "v_proj")

_STRICT = (
    quantize.Int8Decoder,
    quantize.Int8Linear,
    quantize.Int8GatedMLP,
    quantize.StrictRMSNorm,
    quantize.StrictLayerNorm,
    quantize.RotaryTable,
    quantize.StoredEmbedding,
    quantize.StrictSiLU,
    quantize.StrictGELU,
    quantize.StrictErfGELU,
    quantize.StrictRouter,
    quantize.Int8Experts,
    quantize.CappedHead,
    nn.Dropout,
    nn.Identity,
    nn.ReLU,
    ReLUSquaredActivation,
)


def _looks_up(module: nn.Module) -> bool:
    """Only takes rows out of a table."""
    return type(module) is nn.Embedding or type(module).__name__ == "OPTLearnedPositionalEmbedding"


def _is_linear(module: nn.Module) -> bool:
    """A layer whose weight is packed."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _is_llama_decoder(module: nn.Module) -> bool:
    """Layers that `quantize.Int8Decoder` can stand in for: all of a network's, in order and alike."""
    layers: list[Any] = list(module) if isinstance(module, nn.ModuleList) else []
    if not all(_is_llama_layer(layer) for layer in layers):
        return False
    shapes = {tuple(parameter.shape for parameter in layer.parameters()) for layer in layers}
    return len(shapes) == 1 and [layer.self_attn.layer_idx for layer in layers] == list(range(len(layers)))


def _is_llama_layer(module: Any) -> bool:
    if type(module).__name__ not in _WINDOWS or int(module.self_attn.head_dim) % LANES:
        return False
    return _is_gated_mlp(module.mlp) and _is_rms_norm(module.input_layernorm)


def _int8_decoder(name: str, layers: list[Any], weights: PackedWeights) -> quantize.Int8Decoder:
    matrices = [
        (
            weights.matrix(f"{name}.{i}.qkv", [getattr(layer.self_attn, part) for part in _QKV]),
            weights.matrix(f"{name}.{i}.o", [layer.self_attn.o_proj]),
            weights.matrix(f"{name}.{i}.gate_up", [layer.mlp.gate_proj, layer.mlp.up_proj], gated=True),
            weights.matrix(f"{name}.{i}.down", [layer.mlp.down_proj]),
        )
        for i, layer in enumerate(layers)
    ]
    windows = [_WINDOWS[type(layer).__name__](layer.self_attn) or 0 for layer in layers]
    return quantize.Int8Decoder(layers, matrices, windows)


def _has_experts(module: Any) -> bool:
    """The experts of a mixture that `quantize.Int8Experts` can stand in for."""
    return type(module).__name__ in _EXPERTS and isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def _int8_experts(name: str, module: Any, weights: PackedWeights) -> quantize.Int8Experts:
    """gate_up_proj [experts, 2 x inner, width], the gate first; down_proj [experts, width, inner]."""
    gate_ups, downs = [], []
    for i, (gate_up, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        both = [_linear(part) for part in gate_up.chunk(2)]
        gate_ups.append(weights.matrix(f"{name}.{i}.gate_up", both, gated=True))
        downs.append(weights.matrix(f"{name}.{i}.down", [_linear(down)]))
    return quantize.Int8Experts(gate_ups, downs)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A layer of this weight and bias, without a copy."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _is_gated_mlp(module: nn.Module) -> bool:
    """down(silu(gate(x)) * up(x)) without biases or further parts, as in Llama, Qwen and Mistral."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear and part.bias is None for part in parts) or len(list(module.children())) != 4:
        return False
    return isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)


def _is_rms_norm(module: nn.Module) -> bool:
    """Computes x / sqrt(mean(x^2) + variance_epsilon) * weight, as in Llama."""
    return hasattr(module, "variance_epsilon") and _rms_norm_parts(module, (0.0,)) is not None


def _rms_norm_parts(module: nn.Module, shifts: tuple[float, ...] = (0.0, 1.0)) -> tuple[torch.Tensor, float] | None:
    """(weight, epsilon) with which `StrictRMSNorm` computes what a module does, as a probe shows; None for any other module.

    Norms differ in what they multiply by: the weight, or (Gemma) 1 + weight.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    probe = torch.linspace(-2.0, 3.0, weight.shape[0])[None]
    with torch.inference_mode():
        expected = module(probe).float().numpy()
    for shift in shifts:
        factor = weight.detach().float() + shift
        out = np.empty((1, weight.shape[0]), np.float32)
        kernels.rms_norm(probe.numpy(), factor.numpy(), np.float32(eps), out)
        if np.allclose(expected, out, rtol=1e-4, atol=1e-5):
            return factor, eps
    return None


def _layer_norm_parts(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """(weight, bias, epsilon) with which `StrictLayerNorm` computes what a module does, as a probe shows; None for any other.

    What a module has no weight or bias for (OLMo, Cohere) is 1 and 0.
    """
    if not type(module).__name__.endswith("LayerNorm"):
        return None
    weight, bias, shape = (getattr(module, name, None) for name in ("weight", "bias", "normalized_shape"))
    size = tuple(weight.shape if weight is not None else shape or ())
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", 1e-5))
    if len(size) != 1 or not isinstance(eps, float):
        return None
    weight = torch.ones(size) if weight is None else weight.detach().float()
    bias = torch.zeros(size) if bias is None else bias.detach().float()
    probe = torch.linspace(-2.0, 3.0, size[0])[None] ** 3
    out = np.empty((1, size[0]), np.float32)
    kernels.layer_norm(probe.numpy(), weight.numpy(), bias.numpy(), np.float32(eps), out)
    with torch.inference_mode():
        expected = module(probe).float().numpy()
    return (weight, bias, eps) if np.allclose(expected, out, rtol=1e-4, atol=1e-5) else None


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
