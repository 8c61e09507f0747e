"""Traces say what happened and change nothing; the page that shows them holds whatever a model may say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloom import Completion, SourceStatistics, Statistics, StepTrace, TraceNode, Usage
from engine.errors import InvalidRequest
from engine.requests import Chunk, SpeculationOptions
from engine.requests import StepTrace as EngineStep
from engine.trace.page import Traced, label, page, pieces, visible
from tests.engine import chromium
from tests.engine.test_app import SPELL, TOKENIZER, Target, ask, engine_of, request_of

HOSTILE = "</script><script>document.title = 'pwned'</script><!-- \u202e'\"&lt; ]]> \u2028"
HOSTILE += "<img src=x onerror=document.title='pwned'>"
"""What a prompt or a model may say to a page."""


# What is recorded.


def traced(tmp_path: Path, **options: Any) -> tuple[list[Chunk], list[EngineStep], Any]:
    """The chunks, their traces and the last event of a request whose prompt says twice what the target will say again."""
    engine = engine_of(Target(), tmp_path)
    request = request_of([*SPELL, *SPELL, *SPELL[:1]], max_tokens=24, speculation=SpeculationOptions(trace=True), **options)
    _, final, chunks = ask(engine, request)
    return chunks, [chunk.trace for chunk in chunks if chunk.trace is not None], final


def test_tracing_changes_nothing(tmp_path: Path) -> None:
    """Text, tokens, masks and counts are those of the same request without it, and nothing is told unasked."""
    chunks, steps, final = traced(tmp_path)
    request = request_of([*SPELL, *SPELL, *SPELL[:1]], max_tokens=24)
    _, plain_final, plain = ask(engine_of(Target(), tmp_path), request)
    assert [replace(chunk, trace=None) for chunk in chunks] == plain
    assert final.statistics.num_nodes == plain_final.statistics.num_nodes
    assert len(steps) == len(chunks) > 1


def test_a_trace_adds_up_to_the_answer(tmp_path: Path) -> None:
    """Texts are the tokens', accepted nodes are a path with the tokens' masks, verified ones are those that were counted."""
    chunks, steps, final = traced(tmp_path)
    assert any(len(step.texts) > 2 for step in steps)
    before = TOKENIZER.token_bytes(SPELL[0])
    for chunk, step in zip(chunks, steps, strict=True):
        assert step.texts == tuple(TOKENIZER.token_bytes(token) for token in chunk.tokens)
        assert chunk.sizes == tuple(len(TOKENIZER.text_bytes(token)) for token in chunk.tokens)
        root, *candidates = step.nodes
        assert (root.parent, root.text, root.prob, root.verified, root.accepted) == (-1, before, 1.0, True, False)
        path = [i for i, node in enumerate(step.nodes) if node.accepted]
        assert [step.nodes[i].token for i in path] == list(chunk.tokens[: len(path)])
        assert [step.nodes[i].parent for i in path] == [0, *path][: len(path)]
        assert tuple(step.nodes[i].mask for i in path) == chunk.masks[: len(path)]
        assert [node.prob for node in candidates] == sorted((node.prob for node in candidates), reverse=True)
        before = step.texts[-1]
    assert sum(node.verified for step in steps for node in step.nodes[1:]) == final.statistics.num_nodes
    assert sum(node.accepted for step in steps for node in step.nodes) == final.statistics.num_accepted
    assert sum(step.draft_seconds for step in steps) == pytest.approx(final.statistics.draft_seconds)
    assert all(step.step_seconds >= 0 and step.costs[0][0] == 1 for step in steps)


def test_a_trace_ends_with_the_answer(tmp_path: Path) -> None:
    """What a stop string cut off the last step is not told as emitted or accepted."""
    chunks, steps, final = traced(tmp_path, stop=("second",))
    texts = [text for step in steps for text in step.texts]
    assert len(texts) == final.completion_tokens and b"second" in texts[-1]
    assert sum(node.accepted for step in steps for node in step.nodes) == final.statistics.num_accepted
    assert len(chunks[-1].tokens) == len(steps[-1].texts)


def test_a_server_may_refuse_to_tell(tmp_path: Path) -> None:
    """Then the request is refused, naming the field, and one that does not ask is served."""
    engine = engine_of(Target(), tmp_path, speculation={"trace": False})
    with pytest.raises(InvalidRequest, match="tells nobody") as caught:
        ask(engine, request_of(speculation=SpeculationOptions(trace=True)))
    assert caught.value.field == "speculation.trace"
    assert ask(engine, request_of())[1].completion_tokens > 0


# The page as a file.


def node(
    text: str | bytes, parent: int, probability: float, *sources: str, accepted: bool = False, verified: bool = True
) -> TraceNode:
    data = text.encode() if isinstance(text, str) else text
    return TraceNode(len(data), data, parent, probability, sources, verified, accepted)


def answer_of(*steps: StepTrace, **changes: Any) -> Completion:
    """An answer that came about so."""
    tokens = [text for step in steps for text in step.texts]
    sources: list[tuple[str, ...]] = []
    for step in steps:
        drafted = [each.sources for each in step.nodes if each.accepted]
        sources += [*drafted, *[()] * (len(step.texts) - len(drafted))]
    counted = tuple(SourceStatistics(name, 9, 4, 2, 0, 1, 0.0025) for name in ("corpus:code", "prompt"))
    statistics = Statistics(len(steps), 18, 4, len(tokens) / len(steps), 0.001, 0.2, 0.3, counted, {"code": "v1"}, ())
    answer = Completion(
        text=b"".join(tokens).decode(errors="replace"),
        token_ids=tuple(range(len(tokens))),
        finish_reason="length",
        usage=Usage(3, len(tokens)),
        seed=7,
        statistics=statistics,
        sources=tuple(sources),
        logprobs=(),
        stop_string=None,
        stop_token_id=None,
        request_id="r",
        model="tiny",
        sizes=tuple(map(len, tokens)),
        steps=steps,
    )
    return replace(answer, **changes)


COSTS = ((1, 0.05), (4, 0.056), (8, 0.08))
FIRST = StepTrace(
    (
        node(":", -1, 1.0),
        node(" return", 0, 0.8, "corpus:code", "prompt", accepted=True),
        node(" n", 1, 0.6, "corpus:code", accepted=True),
        node(HOSTILE, 0, 0.1, "prompt"),
        node(b"\xe2\x80", 3, 0.05, "prompt", verified=False),
    ),
    (b" return", b" n", HOSTILE.encode()),
    2,
    0.0004,
    0.062,
    0.06,
    COSTS,
)
SECOND = StepTrace((node(HOSTILE, -1, 1.0),), (b"\xc3",), 0, 0.0001, 0.051, 0.05, COSTS)
HALF = node(b"\xa9", 0, 0.9, "prompt", accepted=True)
THIRD = StepTrace((node(b"\xc3", -1, 1.0), HALF), (b"\xa9", b"\n"), 0, 0.0, 0.05, 0.05, ())
ANSWER = answer_of(FIRST, SECOND, THIRD)


class Elements(HTMLParser):
    """The elements of a page, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data


def test_what_is_said_stays_data() -> None:
    """However hostile the text, the page's elements are those of a harmless one, and the data is read back as it was."""
    hostile = Elements(page([Traced(HOSTILE, ANSWER)]))
    harmless = Elements(page([Traced("x", answer_of(SECOND))]))
    assert hostile.tags == harmless.tags and len(hostile.scripts) == 2
    ((run,), code) = json.loads(hostile.scripts[0]), hostile.scripts[1]
    assert code == harmless.scripts[1]
    assert run["steps"][0]["nodes"][3]["label"] == visible(HOSTILE)
    assert hostile.scripts[0].isascii()


def test_the_page_refers_to_nothing_outside() -> None:
    """No address, no import, no attribute that loads; the policy allows its own style and script alone."""
    text = page([Traced("x", ANSWER)])
    allowed = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"\w+://[^\s\"'`)]+", text)) <= allowed
    elements = Elements(text)
    loading = {"src", "href", "srcset", "style", "onclick", "onload"}
    assert not [tag for tag, attributes in elements.tags if loading & set(attributes) or tag in ("link", "img", "iframe")]
    assert "@import" not in text and "url(" not in text
    (policy,) = (attributes["content"] for _, attributes in elements.tags if "http-equiv" in attributes)
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b" the", "·the"),
        (b"\n\t\r", "↵⇥␍"),
        ("漢é".encode(), "漢é"),
        (b"\xe2\x80", "‹E2 80›"),
        ("\u202eabc\u2066".encode(), "‹U+202E›abc‹U+2066›"),
        (b"\x00\x7f", "‹U+0000›‹U+007F›"),
        ("\u0301".encode(), "\u25cc\u0301"),
        ("\u00a0\u2028\ue000".encode(), "‹U+00A0›‹U+2028›‹U+E000›"),
        (b"", "‹empty›"),
    ],
)
def test_a_token_can_be_seen(token: bytes, shown: str) -> None:
    """Spaces, controls, marks of direction and halves of characters have a shape."""
    assert label(token) == shown


@given(st.text(), st.data())
def test_pieces_are_the_text(text: str, data: st.DataObject) -> None:
    """However a text is cut into tokens, the pieces joined are the text; each ends where its token's whole characters end."""
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    tokens = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    keep = data.draw(st.integers(0, len(text)))
    found = pieces(tokens, text[:keep])
    assert "".join(found) == text[:keep]
    for i in range(len(tokens)):
        complete = b"".join(tokens[: i + 1]).decode(errors="ignore")
        assert "".join(found[: i + 1]) == complete[:keep]


def test_pieces_of_broken_bytes() -> None:
    """Bytes that nothing completes are U+FFFD, as in the answer; no tokens have no pieces."""
    assert pieces([b"a\xe2\x80", b"b", b"\xe2"], "a\ufffdb\ufffd") == ["a", "\ufffdb", "\ufffd"]
    assert pieces([], "") == []


def test_a_page_needs_steps() -> None:
    """An answer that was not traced, or a part of one, is refused with the numbers."""
    with pytest.raises(ValueError, match="at least one"):
        page([])
    with pytest.raises(ValueError, match="the steps of 0 of 6 tokens"):
        page([Traced("x", replace(ANSWER, steps=()))])
    with pytest.raises(ValueError, match="the steps of 4 of 6 tokens"):
        page([Traced("x", replace(ANSWER, steps=(FIRST, SECOND)))])


def test_control_tokens_are_in_the_tree_but_not_in_the_text() -> None:
    """A control token has a name and no text: the pieces around it stay where they belong."""
    step = StepTrace((node("x", -1, 1.0),), (b"<|end|>",), 0, 0.0, 0.05, 0.05, COSTS)
    answer = replace(answer_of(SECOND, THIRD, step), sizes=(1, 1, 1, 0), text="é\n")
    (run,) = json.loads(Elements(page([Traced("x", answer)])).scripts[0])
    assert [text for text, *_ in run["answer"]] == ["", "é", "\n", ""]
    assert run["steps"][2]["texts"] == ["<|end|>"]


# The page in a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    if chromium.find() is None:
        pytest.skip("no Chromium is installed here (Debian: apt-get install chromium)")
    with chromium.browsing() as opened:
        yield opened


@pytest.fixture
def shown(browser: chromium.Browser, tmp_path: Path) -> chromium.Browser:
    """Two answers on a page: one with hostile text, one with a tree of 32 candidates."""
    rng = np.random.default_rng(3)
    nodes = [node("(", -1, 1.0)]
    for i in range(1, 33):
        parent = int(rng.integers(0, i))
        nodes.append(node(f" candidate{i}", parent, nodes[parent].probability * 0.7, "corpus:code", "prompt"))
    wide = answer_of(StepTrace(tuple(nodes), (b"x",), 0, 0.0004, 0.2, 0.2, COSTS))
    (tmp_path / "trace.html").write_text(page([Traced(HOSTILE, ANSWER), Traced("wide", wide)]))
    browser.call("Emulation.setEmulatedMedia", features=[])
    browser.open((tmp_path / "trace.html").as_uri())
    return browser


def text_of(browser: chromium.Browser, selector: str) -> list[str]:
    """The text of the visible elements that a selector finds."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})].filter((e) => !e.hidden).map((e) => e.textContent)"
    return list(browser.evaluate(found))


def test_the_page_draws_a_step(shown: chromium.Browser) -> None:
    """The tree with what the target said itself, facts, totals, and the text with this step's tokens marked."""
    labels = [re.sub(r"<?[\d.]+ %$", "", text) for text in text_of(shown, ".node")]
    assert labels[:3] == [":", "·return", "·n"] and len(labels) == 6
    assert text_of(shown, ".node.accepted .share") == ["80 %", "60 %"]
    assert text_of(shown, ".node.unseen .name") == ["‹E2 80›"]
    assert len(text_of(shown, ".node.own")) == 1
    facts = " ".join(text_of(shown, "#facts > *"))
    assert "3 (expected 2.50)" in facts and "3 of 4 verified" in facts and "68.0 ms for 6 rows" in facts
    assert text_of(shown, "#text .token.now") == [" return", " n", visible(HOSTILE, keep=" \n\t")]
    assert [row.startswith(name) for row, name in zip(text_of(shown, "#totals tr"), ["corpus:code", "prompt"], strict=True)]
    assert shown.evaluate("document.querySelectorAll('#tree path.accepted').length") == 3


def test_hostile_text_is_only_text(shown: chromium.Browser) -> None:
    """Nothing in prompt or tokens ran, loaded or became an element; a script that got in all the same would be refused."""
    assert shown.evaluate("document.title") == "Draftloom trace"
    assert shown.evaluate("document.images.length + document.scripts.length") == 2
    assert visible(HOSTILE, keep=" \n\t") in text_of(shown, "#text .prompt")[0]
    assert [sent["request"]["url"].split(":")[0] for sent in shown.told("Network.requestWillBeSent")] == ["file"]
    assert shown.told("Runtime.exceptionThrown") == [] and shown.told("Log.entryAdded") == []
    shown.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))")
    assert shown.evaluate("document.title") == "Draftloom trace"


def test_the_keyboard_goes_through_the_steps(shown: chromium.Browser) -> None:
    """Arrows, Home and End, wherever the focus is; the text grows with the steps; the address remembers the place."""
    assert text_of(shown, "#where") == ["1 of 3"]
    shown.press("ArrowRight")
    assert text_of(shown, "#where") == ["2 of 3"] and len(text_of(shown, "#text .token")) == 4
    shown.press("ArrowRight")
    shown.press("ArrowRight")
    assert text_of(shown, "#where") == ["3 of 3"] and "".join(text_of(shown, "#text .token.now")) == "é\n"
    shown.press("Home")
    assert text_of(shown, "#where") == ["1 of 3"]
    shown.evaluate("document.getElementById('slider').focus()")
    shown.press("End")
    assert text_of(shown, "#where") == ["3 of 3"] and shown.evaluate("location.hash") == "#1.3"
    assert shown.evaluate("document.getElementById('slider').value") == "3"
    assert shown.evaluate("document.getElementById('forth').disabled")
    shown.press("ArrowLeft")
    assert text_of(shown, "#where") == ["2 of 3"]


def test_the_keyboard_goes_through_the_candidates(shown: chromium.Browser) -> None:
    """Up and down choose a candidate, which is told in words; assistive technology hears of it as a tree."""
    assert text_of(shown, ".node.chosen .name") == ["·n"]
    shown.press("ArrowDown")
    details = " ".join(text_of(shown, "#node > *"))
    assert "whole path 10 %" in details and "drafted by prompt" in details and "outcome rejected" in details
    shown.press("ArrowUp")
    shown.press("ArrowUp")
    assert text_of(shown, ".node.chosen .name") == ["·return"]
    items = [
        (each["role"]["value"], each.get("name", {}).get("value", ""))
        for each in shown.call("Accessibility.getFullAXTree")["nodes"]
        if "role" in each
    ]
    named = [name for role, name in items if role == "treeitem"]
    assert ("slider", "Step") in items and len(named) == 6
    assert '"·return", 80 %, from corpus:code, prompt, accepted' in named
    assert shown.evaluate("document.getElementById('tree').getAttribute('aria-activedescendant')") == "n1"


def test_focus_can_be_seen_on_everything_that_takes_it(shown: chromium.Browser) -> None:
    """Tab reaches the choice of answer, buttons, slider, tree and text, each with an outline."""
    reached = set()
    for _ in range(9):
        shown.press("Tab")
        outline = shown.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        name = shown.evaluate("document.activeElement.id || document.activeElement.tagName")
        assert outline != "none" or name in ("BODY", "runs"), name
        reached.add(name)
    assert reached >= {"runs", "forth", "slider", "tree", "text", "SUMMARY"}


def test_a_large_tree_can_be_read(shown: chromium.Browser) -> None:
    """32 candidates: no two overlap, and each is wide enough for its words."""
    shown.evaluate("document.getElementById('runs').selectedIndex = 1")
    shown.evaluate("document.getElementById('runs').dispatchEvent(new Event('change'))")
    boxes = shown.evaluate(
        "[...document.querySelectorAll('.node')].map((e) => {const b = e.getBoundingClientRect();"
        " return [b.left, b.top, b.right, b.bottom, e.scrollWidth - e.clientWidth]})"
    )
    assert len(boxes) == 34
    for i, (left, top, right, bottom, hidden) in enumerate(boxes):
        assert hidden <= 0
        for other_left, other_top, other_right, other_bottom, _ in boxes[:i]:
            assert right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
    assert shown.evaluate("location.hash") == "#2.1" and len(text_of(shown, "#rows tr")) == 32


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_it_is_light_and_dark(shown: chromium.Browser, scheme: str, dark: bool) -> None:
    """Colours follow the system, with enough contrast for text."""
    shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def luminance(selector: str, property: str) -> float:
        colour = shown.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{property}")
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = luminance("section", "backgroundColor")
    assert (paper < 0.1) is dark
    for selector in ("h1", "h2", "dt", "dd", "#text .prompt", "#text .k0", ".note .price", "#legend"):
        ink = luminance(selector, "color")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, selector
    assert len(shown.screenshot()) > 10_000
