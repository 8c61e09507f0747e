"""The arithmetic of the worker's benchmarks: rates, what peers are asked and said to have done, and how near two dtypes are."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.target import kernels
from engine.target.local import LocalTarget
from engine.tree import CostCurve
from tests.engine import tiny
from tests.tiny_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(request.param)


def only(name: str) -> pytest.MarkDecorator:
    """For tests of one of them."""
    return pytest.mark.parametrize("script", [name], indirect=True)


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.at = 100.0

    def perf_counter(self) -> float:
        return self.at


@only("worker")
def test_rates_count_what_all_do_at_once(script: ModuleType) -> None:
    """From the last first token to the first last one; where these do not overlap there is no time."""
    first = script.Answer([], [(1.0, 1), (2.0, 1), (3.0, 2), (9.0, 1)], 0)
    second = script.Answer([], [(1.5, 4), (3.5, 1), (4.0, 1)], 0)
    assert script.together([first, second]) == (1 + 2 + 1 + 1, 2.5)
    assert script.together([first]) == (4, 8.0)
    late = script.Answer([], [(4.0, 1), (6.0, 1)], 0)
    assert script.together([second, late]) == (0, 0.0)


@only("worker")
def test_no_prompt_is_asked_twice(script: ModuleType) -> None:
    """Several groups of one, one of every other size, each prompt in one of them."""
    texts = [str(i) for i in range(20)]
    groups = script.grouped(texts, [1, 4, 8], 3)
    assert {level: list(map(len, some)) for level, some in groups.items()} == {"1": [1, 1, 1], "4": [4], "8": [8]}
    flat = [text for some in groups.values() for group in some for text in group]
    assert flat == texts[:15]


@only("worker")
def test_kept_figures_are_added_to(script: ModuleType) -> None:
    """What a run found replaces what was there, level by level and peer by peer; the rest stays."""
    old = {"model": "a", "rows_ms": {"1": 5.0}, "peers": {"x": {"1": 1.0, "8": 2.0}}}
    new = {"model": "a", "peers": {"x": {"1": 3.0}, "y": {"1": 4.0}}}
    assert script.merged(old, new) == {
        "model": "a", "rows_ms": {"1": 5.0}, "peers": {"x": {"1": 3.0, "8": 2.0}, "y": {"1": 4.0}},
    }  # fmt: skip
    assert old["peers"] == {"x": {"1": 1.0, "8": 2.0}}


@only("worker")
def test_context_that_is_only_pretended_takes_its_place(script: ModuleType) -> None:
    """Positions of noise can be attended to like those that were read, and are given back."""
    target = LocalTarget(tiny.model("llama-tied", "int8"), kv_memory=4 << 20, curve=CostCurve.flat())
    bench = script.Bench(target)
    bench.pretend(150)
    bench.run(3, np.arange(3, dtype=np.int32))
    bench.read(70)
    assert bench._table.length == 220 and bool(np.isfinite(target.storage.keys[0][bench._table.blocks[0]]).all())
    bench.clear()
    target.check()


@only("worker")
def test_weights_are_counted_once(script: ModuleType) -> None:
    """Bytes of all int8 matrices: whole layers, and q, k and v that share one."""
    for name, layers in (("llama", 2), ("qwen3", 2)):
        model = tiny.model(name, "int8")
        shapes = [module for module in model.network.modules() if type(module).__name__ == "Int8Decoder"]
        assert bool(shapes) == (name == "llama") and script.weight_bytes(model.network) > 0
        assert layers == model.num_layers


@only("worker")
def test_a_peer_that_fails_is_left_out(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last line is shown, others still count."""
    wanted = f"nobody:{sys.executable}:folder,other:/no/such/python:folder"
    assert script.peers(wanted, "", {"1": [["text"]]}, 4, 1) == {}
    shown = capsys.readouterr().err
    assert "nobody failed: no such peer: nobody; name one of llama.cpp, vllm, transformers" in shown
    assert "other failed" in shown


@pytest.fixture
def job() -> dict[str, Any]:
    """What worker.py asks of peers."""
    groups = {"1": [["one"], ["two"]], "4": [["one", "two", "three", "four"]]}
    return {"groups": groups, "tokens": 10, "threads": 2, "prompt": 5, "methods": ""}


@only("peers")
def test_vllm_is_timed_without_its_prompts(script: ModuleType, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt takes 3 s, a step half a second: 2 tokens/s a request; a method that is not there is left out."""
    clock = Clock()

    class LLM:
        def __init__(self, model: str, speculative_config: dict[str, Any] | None, **settings: Any) -> None:
            if speculative_config and speculative_config["method"] == "suffix":
                raise ImportError("no arctic-inference")
            assert settings["dtype"] == "bfloat16" and settings["enable_prefix_caching"] is True
            self.read: set[str] = set()

        def generate(self, texts: list[str], sampling: Any, use_tqdm: bool) -> None:
            clock.at += 3.0 * len(set(texts) - self.read) + 0.1 + 0.5 * (sampling.max_tokens - 1)
            self.read.update(texts)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))
    monkeypatch.setattr(script, "time", clock)
    found = script.vllm("folder", job)
    assert found == {f"vllm, {method}": {"1": pytest.approx(2.0), "4": pytest.approx(8.0)} for method in ("plain", "ngram")}
    assert set(script.vllm("folder", job | {"methods": "ngram"})) == {"vllm, ngram"}


@only("peers")
def test_llama_cpp_is_timed_from_its_first_token(
    script: ModuleType, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a second a token, whatever the prompt took; reading is timed apart."""
    clock = Clock()

    class Llama:
        def __init__(self, model: str, **settings: Any) -> None:
            assert settings["n_threads"] == 2 and settings["logits_all"] == (settings["draft_model"] is not None)

        def tokenize(self, text: bytes) -> list[int]:
            return list(text)

        def reset(self) -> None:
            clock.at += 0.0

        def eval(self, ids: list[int]) -> None:
            clock.at += 0.1 * len(ids)

        def generate(self, ids: list[int], temp: float) -> Any:
            self.eval(ids)
            while True:
                yield 7
                clock.at += 0.25

    speculative = SimpleNamespace(LlamaPromptLookupDecoding=lambda: 10)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    monkeypatch.setattr(script, "time", clock)
    found = script.llama_cpp("file.gguf", job)
    assert found["llama.cpp, plain"] == {"1": pytest.approx(4.0), "prefill_ms": pytest.approx(500.0)}
    assert found["llama.cpp, lookup"] == {"1": pytest.approx(4.0)}


@pytest.mark.filterwarnings("ignore")  # of what torch will drop one day
@only("peers")
def test_transformers_runs_on_a_tiny_model(script: ModuleType, job: dict[str, Any], tmp_path: Path) -> None:
    """Plain, with its prompt lookup and in int8, the real library: positive rates, and nothing else."""
    tiny.build("LlamaConfig", attention="sdpa", vocab_size=400).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_level())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    threads = torch.get_num_threads()
    try:
        found = script.transformers(str(tmp_path), {**job, "threads": 1})
    finally:
        torch.set_num_threads(threads)
    assert set(found) == {"transformers, plain", "transformers, lookup", "transformers, int8"}
    assert all(set(rates) == {"1"} for rates in found.values())


@only("quality")
def test_readings_are_what_the_model_says(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in chunks: losses and likeliest tokens of one plain pass; beside itself the ratio is 1, beside another it is not."""
    network = tiny.build("LlamaConfig", attention="sdpa")
    network.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(network.config.vocab_size, size=41).astype(np.int32)
    monkeypatch.setattr(script, "CHUNK", 16)
    found = script.read(tmp_path, "float32", tokens)
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64))
        logits = network(ids[None, :-1], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    assert np.allclose(found.losses, expected.numpy(), atol=1e-4)
    assert np.array_equal(found.likeliest, logits.argmax(1).numpy())
    assert found.beside(found) == {
        "perplexity": pytest.approx(float(expected.mean().exp()), rel=1e-4), "ratio": 1.0, "agreement": 1.0,
    }  # fmt: skip
    other = script.Reading(found.losses - np.log(2), (found.likeliest + 1) % 7)
    assert found.beside(other)["ratio"] == pytest.approx(2.0) and found.beside(other)["agreement"] < 0.5


@only("quality")
def test_parts_round_what_they_say(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of layer, weights, activations and both: more rounded is farther off; the network is itself again."""
    tiny.build("LlamaConfig", attention="sdpa").save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(60, size=33).astype(np.int32)
    found = script.parts(tmp_path, tokens)
    assert len(found) == 2 * (2 * len(script.KINDS) + 3)
    assert all(0 < divergence < 0.1 for _, divergence in found.values())
    assert found["all: both"][1] > found["o: weights"][1] and found["all: both, spread"][1] > found["o: weights, spread"][1]
    assert "divergence" in capsys.readouterr().err


@only("quality")
def test_it_spreads_as_the_kernels_do(script: ModuleType) -> None:
    """The benchmark's own rotation is the kernels', but for its length."""
    x = np.random.default_rng(0).standard_normal((3, 576)).astype(np.float32)
    found = script.spread(torch.from_numpy(x)).numpy()
    expected = np.stack([kernels.spread(row.copy(), np.empty_like(row)).copy() for row in x]) / np.sqrt(512)
    assert np.allclose(found, expected, atol=1e-5)
    step = np.abs(x).max(1, keepdims=True) / 127
    assert np.all(np.abs(script.rounded(torch.from_numpy(x)).numpy() - x) <= step / 2 * 1.001)
