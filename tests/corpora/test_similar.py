"""Near copies."""

from __future__ import annotations

import random
import re

import pytest

from corpora.filter import Part, Text
from corpora.similar import SHINGLE_WORDS, SIMILARITY, Sketches

WORDS = [f"word{i}" for i in range(200)]


def content(text: str) -> Text:
    return Text((Part(text),), len(text))


def some_text(rng: random.Random, length: int = 400) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(length))


def resemblance(a: str, b: str) -> float:
    """The share of shingles that two texts have in common, by comparing all of them."""
    sets = []
    for text in (a, b):
        words = re.findall(r"\w+|[^\w\s]", text)
        sets.append({tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("seed", range(6))
def test_near_copies_are_those_that_share_nearly_all_shingles(seed: int) -> None:
    """Over texts with more and more changed words, the verdict is that of a full comparison, but close to the bound."""
    rng = random.Random(seed)
    original = some_text(rng)
    for num_changed in (0, 1, 2, 3, 20, 50, 200):
        words = original.split()
        for place in rng.sample(range(len(words)), num_changed):
            words[place] = f"new{place}"
        copy = " ".join(words)
        sketches = Sketches()
        assert sketches.similar("original", content(original)) == ""
        share = resemblance(original, copy)
        if abs(share - SIMILARITY) > 0.06:
            assert sketches.similar("copy", content(copy)) == ("original" if share > SIMILARITY else "")


def test_layout_does_not_count() -> None:
    """Other white space, the same words."""
    text = some_text(random.Random(0))
    sketches = Sketches()
    sketches.similar("a", content(text))
    assert sketches.similar("b", content(text.replace(" ", "\n\t"))) == "a"


def test_the_first_of_them_is_named_and_copies_are_not_remembered() -> None:
    """So a chain of small changes does not carry a text away from the one that is stored."""
    rng = random.Random(1)
    words = some_text(rng).split()
    sketches = Sketches()
    assert sketches.similar("0", content(" ".join(words))) == ""
    verdicts = []
    for step in range(40):
        words[step * 10] = f"new{step}"
        verdicts.append(sketches.similar(str(step + 1), content(" ".join(words))))
    assert verdicts[0] == "0" and "" in verdicts


def test_short_texts_are_like_no_other() -> None:
    """There is nothing to compare."""
    sketches = Sketches()
    assert [sketches.similar(name, content("a b c d")) for name in "xy"] == ["", ""]
