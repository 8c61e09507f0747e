"""Writes the page that shows traced answers: one HTML file that needs nothing else, not even a network.

The page is `page.html` with the steps put in as JSON. What models and prompts say is data in it and never markup: the JSON has
no character that HTML gives a meaning to, the script puts it into the page as text, and a content security policy refuses
every script but the page's own. Characters that are invisible, or turn the text around them, are shown by their number.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from draftloom import Completion, StepTrace

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)


@dataclass(frozen=True)
class Traced:
    """A prompt and its answer, which was asked for with `trace`."""

    prompt: str
    answer: Completion

    def validate(self) -> None:
        """Raise ValueError if the answer tells of no steps, or not of all of its tokens."""
        num_told = sum(len(step.texts) for step in self.answer.steps)
        if not self.answer.steps or num_told != len(self.answer.token_ids):
            raise ValueError(
                f"the server told the steps of {num_told} of {len(self.answer.token_ids)} tokens; it may be too old to trace"
            )


def page(traced: Sequence[Traced]) -> str:
    """The page that shows these answers, at least one. Raises ValueError for none, and for one that was not traced."""
    if not traced:
        raise ValueError("a page needs at least one answer")
    for each in traced:
        each.validate()
    template = files("engine.trace").joinpath("page.html").read_text(encoding="utf-8")
    policy = f"default-src 'none'; script-src '{_digest(_SCRIPT, template)}'; style-src '{_digest(_STYLE, template)}'"
    data = json.dumps([_run(each) for each in traced])
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return template.replace("@POLICY@", policy).replace("@DATA@", data)


def visible(text: str, keep: str = "") -> str:
    """`text` with everything shown that cannot be seen: a space as a dot, controls and marks of direction as ‹U+202E›.

    The characters of `keep` stay as they are.
    """
    return "".join(character if character in keep else _visible(character) for character in text)


def label(token: bytes) -> str:
    """A token by itself, for a person to read; bytes that are only a part of a character as ‹E2 80›."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return f"‹{token.hex(' ').upper()}›"
    return visible(text) or "‹empty›"


def pieces(tokens: Sequence[bytes], text: str) -> list[str]:
    """What each token brought of `text`, which theirs may be longer than: the characters that its bytes complete.

    A token that ends within a character brings none of it; bytes that nothing completes are U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts: list[str] = []
    left = len(text)
    for i, token in enumerate(tokens, start=1):
        parts.append(decoder.decode(token, final=i == len(tokens))[:left])
        left -= len(parts[-1])
    return parts


_SHOWN = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def _visible(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    kind = unicodedata.category(character)
    if kind.startswith(("C", "Z")):
        return f"‹U+{ord(character):04X}›"
    return f"\N{DOTTED CIRCLE}{character}" if kind.startswith("M") else character


def _digest(part: re.Pattern[str], template: str) -> str:
    """The hash by which a content security policy knows an inline script or style."""
    (content,) = part.findall(template)
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _run(traced: Traced) -> dict[str, Any]:
    """One answer as page.html reads it. Times are in milliseconds, sources are places in `sources`."""
    answer = traced.answer
    costs = answer.statistics
    sources = [source.name for source in costs.sources]
    place = {name: s for s, name in enumerate(sources)}
    num_tokens = answer.usage.completion_tokens
    seconds = costs.draft_seconds + costs.step_seconds
    step_of = [i for i, step in enumerate(answer.steps) for _ in step.texts]
    tokens = [text for step in answer.steps for text in step.texts]
    in_text = [token if size else b"" for token, size in zip(tokens, answer.sizes, strict=True)]
    texts = (visible(piece, keep=" \n\t") for piece in pieces(in_text, answer.text))
    drafted = ([place[name] for name in names] for names in answer.sources)
    return {
        "about": [
            [answer.model, "model"],
            [f"{num_tokens}", "tokens"],
            [f"{costs.num_steps}", "steps"],
            [f"{costs.tokens_per_step:.2f}", "tokens per step"],
            [f"{seconds:.2f} s", "decoding"],
            [f"{answer.seed}", "seed"],
        ],
        "prompt": visible(traced.prompt, keep=" \n\t"),
        "sources": sources,
        "steps": [_step(step, place) for step in answer.steps],
        "answer": [list(each) for each in zip(texts, step_of, drafted, strict=True)],
        "totals": [
            {
                "name": each.name,
                "verified": each.num_proposed,
                "accepted": each.num_accepted,
                "held": each.num_held,
                "alone": each.num_held_alone,
                "share": each.num_accepted / num_tokens if num_tokens else 0.0,
                "missed": each.num_errors + each.num_late,
                "ms": 1000 * each.seconds,
            }
            for each in costs.sources
        ],
    }


def _step(step: StepTrace, place: dict[str, int]) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "label": label(node.text),
                "id": node.token_id,
                "parent": node.parent,
                "p": round(node.probability, 6),
                "sources": [place[name] for name in node.sources],
                "verified": node.verified,
                "accepted": node.accepted,
            }
            for node in step.nodes
        ],
        "texts": [label(text) for text in step.texts],
        "lookahead": step.num_lookahead,
        "draft": round(1000 * step.draft_seconds, 4),
        "wait": round(1000 * step.step_seconds, 4),
        "pass": round(1000 * step.pass_seconds, 4),
        "costs": [[rows, round(1000 * seconds, 4)] for rows, seconds in step.costs],
    }
