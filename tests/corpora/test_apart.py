"""A tokenizer in a process of its own answers as one in this process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpora.apart import TokenizerApart
from engine.errors import ModelError
from engine.text import Tokenizer
from tests.corpora.test_cli import Shell, shell

__all__ = ["shell"]


def test_it_answers_as_the_tokenizer_itself(shell: Shell) -> None:
    """Ids of every text, empty ones among them, checksum and fingerprint."""
    tokenizer = Tokenizer.load(shell.model)
    texts = ["def f():\n    return 1\n", "", "Größe 推測"]
    with TokenizerApart(str(shell.model)) as apart:
        assert [ids.tolist() for ids in apart.encode_batch(texts)] == [tokenizer.encode(text).tolist() for text in texts]
        assert apart.encode_batch([]) == []
        assert (apart.checksum, apart.fingerprint) == (tokenizer.checksum, tokenizer.fingerprint)


def test_a_model_that_cannot_be_loaded_is_named_at_the_first_question(tmp_path: Path) -> None:
    """The error is the one that loading it here would raise."""
    with TokenizerApart(str(tmp_path)) as apart, pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        _ = apart.checksum
