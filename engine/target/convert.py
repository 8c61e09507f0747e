"""A GGUF file in, a folder that every part of Draftloom can load out. Offline, once per file.

transformers unpacks the weights and the vocabulary. Three things that it leaves out or gets wrong for such files are set here:
how the tokenizer cuts text before merging (`tokenizer.ggml.pre`), which tokens end an answer, and the length of the context.

Weights are stored as float16 where they fit, else float32. Rounding to float16 moves a weight by at most 2^-11 of itself,
some hundred times less than the 4 to 8 bits that it was quantized to before.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

END_OF_ANSWER = frozenset(
    {
        "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<|eom_id|>", "<end_of_turn>", "<EOT>",
        "</s>", "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip
"""Control tokens after which nothing sensible follows. A GGUF file names one; raw text and chat end on different ones."""

GPT4_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How GPT-4 and its descendants cut text; `%s` says how many digits stay together."""

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Write config, weights (`model.safetensors`) and tokenizer (`tokenizer.json`) of a GGUF `file` into the empty `folder`.

    Takes 15 s for 135 million parameters, 90 s for 1.5 billion, and about twice the memory of the weights that it writes.
    Raises ModelError for what is no GGUF file, an architecture that transformers does not know, or an unknown tokenizer.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(f"a package to convert GGUF with is missing: {error.name}; pip install 'draftloom[worker]'") from error

    def load(dtype: torch.dtype) -> Any:
        unpacked = GgufConfig(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=unpacked, dtype=dtype)

    metadata = read_metadata(file)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # a bar that nothing else switches off
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = load(torch.float16)
            if not all(bool(torch.isfinite(weight).all()) for weight in model.parameters()):
                model = load(torch.float32)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, OSError) as error:
        raise ModelError(f"transformers cannot read this GGUF file: {file}: {error}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

    if metadata["tokenizer.ggml.model"] == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")), file)
    architecture = metadata["general.architecture"]
    tokenizer.model_max_length = int(metadata.get(f"{architecture}.context_length", model.config.max_position_embeddings))
    model.generation_config.eos_token_id = end_of_answer(metadata)
    model.generation_config.do_sample = False

    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="100GB")
    _tidy(folder)


def read_metadata(file: Path) -> dict[str, Any]:
    """Keys and values of a GGUF file's header. Raises ModelError for any other file."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
        return {key: field.contents() for key, field in fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"not a readable GGUF file: {file}: {error}; download it again") from error


def pre_tokenizer(cut: str, file: Path) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that a GGUF file calls `cut`.

    One that is not known here is refused: guessing would cut text otherwise than in training, which shows as nothing but
    worse answers.
    """
    from tokenizers import Regex, pre_tokenizers

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    match cut:
        case "gpt-2" | "default" | "phi-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case "smollm" | "starcoder" | "refact" | "command-r" | "codeshell":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        case "qwen2" | "deepseek-r1-qwen":
            return split(GPT4_CUT % "")
        case "llama-bpe" | "llama3" | "smaug-bpe":
            return split(GPT4_CUT % "{1,3}")
    raise ModelError(f"unknown tokenizer.ggml.pre in {file}: {cut}; use the model's safetensors folder or hub id instead")


def end_of_answer(metadata: dict[str, Any]) -> list[int]:
    """Ids that end an answer: the file's own eos and eot, and every control token of a well-known name. Ascending."""
    named = {metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata}
    types = metadata.get("tokenizer.ggml.token_type") or []
    special = {i for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)}
    tokens = metadata["tokenizer.ggml.tokens"]
    return sorted(named | {i for i in special if tokens[i] in END_OF_ANSWER})


def _tidy(folder: Path) -> None:
    """Drop what names the place the file lay in, and let everyone who may read the folder read the weights."""
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        config = json.loads(file.read_text())
        for key in ("_name_or_path", "name_or_path", "is_local", "local_files_only"):
            config.pop(key, None)
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)
