"""The readable scenarios of this folder: lookup.txt."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from retriever.continuations import Continuations
from retriever.pools import TextPool
from tests import golden
from tests.retriever.conftest import Build


class Words:
    """Words as token ids, in alphabetical order; unknown ones are one id more."""

    def __init__(self, text: str) -> None:
        self.words = sorted(set(text.split()) - {"|"})

    def ids(self, text: str) -> list[int]:
        """Token ids."""
        return [self.words.index(word) if word in self.words else len(self.words) for word in text.split()]


def draw(found: Continuations, words: list[str]) -> str:
    """Nodes as a picture, children in the order they were taken."""
    lines: list[str] = []

    def below(node: int, margin: str) -> None:
        children = np.flatnonzero(found.parents == node).tolist()
        for child in children:
            last = child == children[-1]
            prob = f"{found.probs[child]:.3f}"
            evidence = f"matched {found.lengths[child]}, seen {found.counts[child]}"
            lines.append(f"{margin}{'└─' if last else '├─'} {words[found.tokens[child]]}  {prob}  {evidence}")
            below(child, margin + ("   " if last else "│  "))

    below(-1, "")
    return "\n".join(lines) or "nothing"


def test_lookups(build: Build, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scenario prints what the file says."""

    def corpus(arguments: Mapping[str, str], inputs: Mapping[str, str]) -> str:
        words = Words(inputs["text"])
        store = build([words.ids(document) for document in inputs["text"].split("|")])
        context = np.array(words.ids(inputs["context"]), np.int32)
        return draw(store.lookup(context, int(arguments["budget"])), words.words)

    def pool(arguments: Mapping[str, str], inputs: Mapping[str, str]) -> str:
        words = Words(inputs["text"])
        text = TextPool()
        for document in inputs["text"].split("|"):
            text.append(words.ids(document), new_document=True)
        context = np.array(words.ids(inputs["context"]), np.int32)
        return draw(text.lookup(context, int(arguments["budget"])), words.words)

    monkeypatch.setattr(golden, "__file__", __file__)  # scenarios lie beside this file
    golden.check("lookup", {"corpus": corpus, "pool": pool}, request.config.getoption("--rewrite"))
