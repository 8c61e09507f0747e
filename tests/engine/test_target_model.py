"""Which models the worker takes, what it says of them, and which it refuses instead of answering wrongly."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.target import check, model, quantize
from engine.target.attention import KEY
from engine.target.model import load, prepare
from tests.engine import oracles_target as oracles
from tests.engine import tiny
from tests.engine.tiny import Bench

TREE = np.array([-1, 0, 0, 1, 1, 2, 3], np.int32)
TOKENS = [3, 4, 5, 6, 7, 8, 9]
PREFIX = [5, 9, 2, 7, 11, 3, 8, 1, 4, 6, 10, 12, 3, 2]

WIDE = {"head_dim": 16}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("LlamaConfig", {}, True),
    "llama, biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}, True),
    "llama, llama3 rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 96,
            }
        },
        True,
    ),
    "llama, heads of 10": ("LlamaConfig", {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3}, True),
    "llama, gelu": ("LlamaConfig", {"hidden_act": "gelu"}, True),
    "qwen2, window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, True),
    "qwen3": ("Qwen3Config", WIDE, True),
    "mistral, window": ("MistralConfig", {"sliding_window": 5}, True),
    "phi3, window": ("Phi3Config", {"sliding_window": 5}, True),
    "phi": ("PhiConfig", {}, True),
    "olmo": ("OlmoConfig", {}, True),
    "olmo2": ("Olmo2Config", {}, True),
    "smollm3": ("SmolLM3Config", {}, True),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.25}, True),
    "exaone4, window": ("Exaone4Config", {"sliding_window": 5}, True),
    "glm4": ("Glm4Config", WIDE, True),
    "gemma": ("GemmaConfig", WIDE, True),
    "gemma3, window": ("Gemma3TextConfig", {"sliding_window": 5, **WIDE}, True),
    "olmo3, window": ("Olmo3Config", {"sliding_window": 5}, True),
    "cohere2, window": ("Cohere2Config", {"sliding_window": 5}, True),
    "starcoder2, window": ("Starcoder2Config", {"sliding_window": 5}, True),
    "gpt-neox": ("GPTNeoXConfig", {}, True),
    "gpt2": ("GPT2Config", {}, True),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}, True),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, True),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, **WIDE}, True),
    "gemma2, window and caps": (
        "Gemma2Config",
        {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, **WIDE},
        True,
    ),
    "gpt-oss, window and sinks": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "num_key_value_heads": 2, **WIDE},
        False,
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
        False,
    ),
}
"""What docs/models.md lists: the config's class, settings, and whether int8 is strict."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_as_transformers_does(name: str) -> None:
    """float32: a tree after a prefix gives each path's plain forward pass; int8 comes close, and is strict where it says so."""
    config, settings, strict = FAMILIES[name]
    plain = tiny.build(config, "eager", **settings)
    paths = [[*PREFIX, *(TOKENS[i] for i in tiny.path_to(TREE, row))] for row in range(len(TREE))]
    expected = np.stack([oracles.forward(plain, path)[-1] for path in paths])
    for dtype in ("float32", "int8"):
        ready = prepare(tiny.build(config, **settings), dtype)
        assert ready.strict is (strict and dtype == "int8"), ready.reasons
        bench = Bench(ready)
        table = bench.table()
        bench.read(table, PREFIX, 5)
        (found,) = bench.run((table, TOKENS, TREE))
        if dtype == "float32":
            assert np.abs(found - expected).max() < 1e-4 * max(1.0, expected.std())
        else:
            assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.95
        if ready.strict:
            for row, path in enumerate(paths):
                assert np.array_equal(found[row], bench.after(path))


@pytest.mark.parametrize("name", tiny.KINDS)
def test_int8_and_bfloat16_stay_close_to_float32(name: str) -> None:
    """Over a text: logits correlate above 0.98 (int8) and 0.999 (bfloat16), and most largest tokens are the same."""
    text = np.random.default_rng(3).integers(97, size=60).tolist()
    exact = Bench(tiny.model(name, "float32"))
    expected = exact.read(exact.table(), text)
    for dtype, least, most in (("int8", 0.98, 0.75), ("bfloat16", 0.999, 0.85)):
        bench = Bench(tiny.model(name, dtype))
        found = bench.read(bench.table(), text)
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least
        assert np.mean(found.argmax(1) == expected.argmax(1)) > most


# ---- refused by its config or by what it does


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("MambaConfig", {"state_size": 4}, "linear_attention"),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1}, "linear_attention"),
    "jamba": ("JambaConfig", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, "linear_attention"),
    "bamba": ("BambaConfig", {"mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]}, "linear_attention"),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {"lru_width": 64, "block_types": ["recurrent", "attention"]},
        "linear_attention",
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**MOE, **WIDE, "layer_types": ["linear_attention", "full_attention"]},
        "linear_attention",
    ),
    "falcon-h1": ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "hybrid"),
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1]}, "conv"),
    "llama4": ("Llama4TextConfig", {"num_local_experts": 2, **WIDE}, "chunked_attention"),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 64}, "attention interface"),
    "bloom": ("BloomConfig", {}, "attention interface"),
    "mpt": ("MptConfig", {}, "cannot run rows"),
    "gpt-bigcode": ("GPTBigCodeConfig", {}, "kv heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_cannot_branch_is_refused(name: str) -> None:
    """Recurrent state, soft caps, sinks, masks of other kinds: ModelError says what, in every dtype, before any answer."""
    config, settings, why = REFUSED[name]
    for dtype in ("float32", "int8"):
        with pytest.raises(ModelError, match=why):
            prepare(tiny.build(config, **settings), dtype)


class Leaky(transformers.LlamaForCausalLM):
    """A Llama whose rows feel the row before them, as in a convolution, whatever the tree."""

    def forward(self, **kwargs: Any) -> Any:
        """The logits of rows mixed with their neighbours'."""
        output = super().forward(**(kwargs | {"logits_to_keep": 0}))
        output.logits = (output.logits + 0.1 * output.logits.roll(1, dims=1))[:, kwargs["logits_to_keep"]]
        return output


def test_a_leak_between_rows_is_seen_without_a_word_in_the_config() -> None:
    """A network that mixes neighbouring rows is refused for what it does."""
    config = deepcopy(tiny.twins("llama")[0].config)  # it will be told of another attention
    with pytest.raises(ModelError, match="others than its ancestors"):
        prepare(Leaky._from_config(config, attn_implementation=KEY).eval(), "float32")


def test_a_window_that_does_not_reach_the_attention_is_seen() -> None:
    """A config that says a sliding window which the network does not hand on is refused."""
    network = tiny.build("LlamaConfig")
    network.config.sliding_window = 7
    with pytest.raises(ModelError, match="should have an attention window of 7: 0"):
        prepare(network, "float32")


def test_the_check_itself_changes_nothing() -> None:
    """A good network passes it, bit for bit so in int8, and answers as before."""
    ready = tiny.model("llama", "int8")
    bench = Bench(ready)
    before = bench.after([1, 2, 3])
    assert check.check_rows(ready) is True
    assert np.array_equal(bench.after([1, 2, 3]), before)


# ---- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as safetensors in float16, with a list of end-of-sequence ids."""
    path = tmp_path_factory.mktemp("weights") / "llama"
    tiny.build("LlamaConfig").half().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    return path


def copy(folder: Path, to: Path) -> Path:
    """A folder that may be spoilt."""
    return Path(shutil.copytree(folder, to / "model"))


def test_a_folder_is_loaded_as_it_is(folder: Path) -> None:
    """Shape, ends and weights come from the folder; int8 of it says what int8 of the same network says."""
    for dtype in ("float32", "int8"):
        loaded = load(folder, dtype)
        assert (loaded.dtype, loaded.vocab_size, loaded.context_length, loaded.eos_ids) == (dtype, 97, tiny.CONTEXT, (7, 3))
        assert (loaded.num_layers, loaded.kv_heads, loaded.head_dim) == (2, 4, 16)
        network = tiny.build("LlamaConfig")
        for parameter in network.parameters():
            parameter.data = parameter.data.half().float()
        expected = prepare(network, dtype)
        assert np.array_equal(Bench(loaded).after([4, 5, 6]), Bench(expected).after([4, 5, 6]))


def test_ends_of_a_sequence_come_from_the_generation_config_first(folder: Path, tmp_path: Path) -> None:
    """Without a generation config, the model's own config says how an answer ends; a number is a list of one."""
    path = copy(folder, tmp_path)
    (path / "generation_config.json").unlink()
    assert load(path, "float32").eos_ids == (2,)


def test_what_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    """An unknown dtype, no config, a config that is no JSON, damaged or missing weights: ModelError with the name of it."""
    with pytest.raises(ModelError, match="unknown dtype: float16; choose one of int8, float32, bfloat16"):
        load(folder, "float16")
    with pytest.raises(ModelError, match="no usable config"):
        load(tmp_path, "int8")
    path = copy(folder, tmp_path)
    (path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(path, "int8")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(path, "int8")
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no usable config"):
        load(path, "int8")
    (path / "config.json").write_text(json.dumps({"model_type": "nobody-knows"}))
    with pytest.raises(ModelError, match="no usable config"):
        load(path, "int8")


def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    """A folder with pickled weights only is refused, and the pickle's code does not run."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    path = copy(folder, tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"weight": Bomb()}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load the weights"):
        load(path, "float32")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_folder_is_never_run(folder: Path, tmp_path: Path, known: bool) -> None:
    """`auto_map` is passed over for a known architecture, and an unknown one that needs it is refused."""
    path = copy(folder, tmp_path)
    (path / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass C: pass\n")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.C"}
    if not known:
        config["model_type"] = "nobody-knows"
    (path / "config.json").write_text(json.dumps(config))
    if known:
        assert load(path, "float32").vocab_size == 97
    else:
        with pytest.raises(ModelError, match="no usable config"):
            load(path, "float32")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("T5Config", "encoder-decoder .*: t5"),
        ("BartConfig", "encoder-decoder .*: bart"),
        ("Qwen3NextConfig", "linear_attention"),
        ("MambaConfig", "linear_attention|num_attention_heads"),
        ("xLSTMConfig", "num_attention_heads"),
    ],
)
def test_other_kinds_of_models_are_refused_by_their_config(config: str, why: str, tmp_path: Path) -> None:
    """Encoder-decoders and recurrent models never get as far as their weights."""
    getattr(transformers, config)().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=why):
        load(tmp_path, "int8")


# ---- what is exchanged for int8


def test_a_norm_of_another_formula_is_left_alone() -> None:
    """A probe tells x * weight from x * (1 + weight); the latter is not taken for the former."""
    norm = tiny.build("LlamaConfig").model.norm
    assert model._is_rms_norm(norm)

    class Plus(type(norm)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(hidden_states) + hidden_states * 0.1
            return found

    assert not model._is_rms_norm(Plus(64, 1e-6))


def test_a_layer_norm_is_known_by_what_it_computes() -> None:
    """With weight and bias, or without: the parts that compute the same; another formula, or two dimensions, is left alone."""
    torch.manual_seed(0)
    x = torch.randn(5, 40) * 3 + 1
    for norm in (torch.nn.LayerNorm(40), torch.nn.LayerNorm(40, bias=False), torch.nn.LayerNorm(40, elementwise_affine=False)):
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        parts = model._layer_norm_parts(norm)
        assert parts is not None
        assert torch.allclose(quantize.StrictLayerNorm(*parts)(x), norm(x), atol=1e-5)

    class OddLayerNorm(torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1 * x

    assert model._layer_norm_parts(OddLayerNorm(40)) is None
    assert model._layer_norm_parts(torch.nn.LayerNorm((4, 10))) is None
    assert model._layer_norm_parts(tiny.build("LlamaConfig").model.norm) is None


def test_activations_are_those_of_torch() -> None:
    """Both forms of GELU and SiLU: within 2e-7 of float64 for small and large numbers, 0 and infinities among them."""
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([0.0, -0.0, 1e-20, -50.0, 50.0])])
    exact = x.double()
    for strict, expected in (
        (quantize.StrictErfGELU(), torch.nn.functional.gelu(exact)),
        (quantize.StrictGELU(), torch.nn.functional.gelu(exact, approximate="tanh")),
        (quantize.StrictSiLU(), torch.nn.functional.silu(exact)),
    ):
        assert torch.allclose(strict(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_an_mlp_with_a_further_part_is_left_alone() -> None:
    """Gate, up and down alone are exchanged; with a norm between them they are not what the kernel computes."""
    mlp = tiny.build("LlamaConfig").model.layers[0].mlp
    assert model._is_gated_mlp(mlp)
    mlp.inner_norm = torch.nn.Identity()
    assert not model._is_gated_mlp(mlp)


@pytest.mark.parametrize("name", tiny.KINDS)
def test_layers_as_a_whole_compute_what_their_modules_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a whole decoder layer is exchanged, its bits are those of the layer whose modules are exchanged one by one."""
    kind = tiny.KINDS[name]
    whole = Bench(tiny.model(name, "int8"))
    monkeypatch.setattr(model, "_WINDOWS", {}, raising=False)
    network = tiny.build(kind.config, **kind.settings)
    single = Bench(prepare(network, "int8"))
    for bench in (whole, single):
        assert bench.model.strict
    tables = [bench.table() for bench in (whole, single)]
    assert np.array_equal(*(bench.read(table, PREFIX, 5) for bench, table in zip((whole, single), tables, strict=True)))
    found = [bench.run((table, TOKENS, TREE))[0] for bench, table in zip((whole, single), tables, strict=True)]
    assert np.array_equal(*found)
