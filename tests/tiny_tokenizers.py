"""Small tokenizers of the two kinds that `engine.text` understands, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SAMPLE = [
    "def add(first, second):\n    return first + second\n",
    "class Index:\n    def __init__(self, items):\n        self.items = list(items)\n",
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.\n",
    "for item in self.items:\n    if item is not None:\n        total += item.size\n",
]
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level(size: int = 400) -> str:
    """`tokenizer.json` of a byte-level BPE like Qwen's: marked control tokens, and two added tokens that are not marked."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=list(CONTROL),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<|fim_prefix|>", "<think>")])
    return str(tokenizer.to_str())


@cache
def sentencepiece() -> str:
    """`tokenizer.json` of a BPE like Llama 2's: a space put in front, `▁` for spaces, `<0xNN>` for bytes without a piece."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(tokenizer.to_str())


@cache
def metaspace() -> str:
    """`tokenizer.json` of a Unigram with the Metaspace decoder, whose byte pieces come before it."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁the", "▁fox", "▁", *"abcdefghijklmnopqrstuvwxyz.\n"]
    tokenizer = Tokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return str(tokenizer.to_str())


def write_model_folder(folder: Path, definition: str | None = None) -> Path:
    """A model folder with the tokenizer's files and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(definition or byte_level(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder
