"""What a terminal shows: every character of the text, each in the colour of the token that brought it."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftloom import SourceStatistics
from engine.screen import TARGET, Painter, legend, share, source_table, style


def console(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=width, highlight=False)


def shown(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def test_tokens_are_painted_in_the_colours_of_their_sources() -> None:
    """Corpus, several sources, the target itself: each run of text has its own style."""
    screen = console()
    painter = Painter(screen)
    painter.add("abcdef", [3, 2, 1], [("corpus:x",), ("prompt", "corpus:x"), ()])
    assert shown(screen) == "\x1b[32mabc\x1b[0m\x1b[1;36mde\x1b[0mf"


def test_text_held_back_is_painted_as_the_tokens_it_came_with() -> None:
    """A chunk's text may belong to earlier tokens; a character belongs to the first token that has a byte of it."""
    screen = console()
    painter = Painter(screen)
    painter.add("", [2], [("corpus",)])
    painter.add("漢!", [1, 1], [("prompt",), ()])
    assert shown(screen) == "\x1b[32m漢\x1b[0m!"


@given(
    st.lists(st.tuples(st.text(max_size=5), st.lists(st.integers(0, 4), max_size=3)), max_size=6), st.integers(1, 200)
)
def test_all_text_is_printed_whatever_the_sizes_say(chunks: list[tuple[str, list[int]]], width: int) -> None:
    """Wrong sizes, markup in the text, a narrow terminal: nothing is lost, added or broken."""
    plain = [(text.replace("\x1b", "").translate(CONTROLS), tokens) for text, tokens in chunks]
    screen = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, highlight=False)
    painter = Painter(screen)
    for text, tokens in plain:
        painter.add(text, tokens, [("corpus",)] * len(tokens))
    assert shown(screen) == "".join(text for text, _ in plain)


CONTROLS = {code: None for code in [*range(9), *range(11, 32), 127]}
"""What a terminal would act upon."""


def test_shares_count_each_source_of_a_token() -> None:
    """Shares overlap; what nobody drafted is the target's own."""
    assert share([("a",), ("a", "b"), (), ("a",)]) == {"a": 0.75, "b": 0.25, TARGET: 0.25}
    assert share([]) == {}


def test_every_source_has_a_colour() -> None:
    """A source nobody has heard of gets one, too, and always the same."""
    assert style(("corpus:anything",)) == style(("corpus",)) == "green"
    assert style(("someone",)) == style(("someone",)) != ""
    assert style(()) == ""


def test_the_table_of_sources_can_be_read() -> None:
    """One row for each source, with its share of the text and its credit; no tokens, no division by zero."""
    screen = console()
    corpus = SourceStatistics("corpus:code", 40, 12, 5, 1, 2, 0.0123, 0.9, 17, 6)
    rows = [corpus, SourceStatistics("prompt", 0, 0, 0, 0, 0, 0.0)]
    screen.print(source_table(rows, 48))
    screen.print(source_table(rows, 0))
    screen.print(legend(["corpus:code", "prompt"]))
    text = Console(file=io.StringIO(), width=100)
    text.print(source_table(rows, 48))
    assert isinstance(text.file, io.StringIO)
    lines = [line.split() for line in text.file.getvalue().splitlines()]
    assert lines[1] == ["corpus:code", "40", "12", "25%", "17", "6", "3", "12.3"]
    assert lines[2] == ["prompt", "0", "0", "0%", "0", "0", "0", "0.0"]
    assert "the target's own" in shown(screen)
