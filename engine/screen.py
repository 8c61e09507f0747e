"""What a person sees of an answer in a terminal: text in the colours of the sources that drafted it, and what it cost.

Shared by `draftloom generate` and `draftloom demo`. Knows no engine and no server: text, tokens, names and numbers come in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftloom import SourceStatistics

COLOURS = {
    "corpus": "green",
    "prompt": "cyan",
    "history": "yellow",
    "resume": "bright_cyan",
    "recycle": "magenta",
    "lookahead": "blue",
}
OTHERS = ("bright_red", "bright_blue", "bright_yellow", "bright_magenta")
SEVERAL = "bold"
"""Added to the colour of a token that more than one source drafted."""

TARGET = "target"
"""Who said what nobody drafted."""

Names = tuple[str, ...]


def style(sources: Names) -> str:
    """The style of a token: the colour of the first source that drafted it; none if the target alone said it."""
    if not sources:
        return ""
    kind = sources[0].partition(":")[0]
    colour = COLOURS.get(kind) or OTHERS[sum(kind.encode()) % len(OTHERS)]
    return f"{colour} {SEVERAL}" if len(sources) > 1 else colour


def legend(names: Iterable[str]) -> Text:
    """The sources' names, each in its colour."""
    text = Text("drafted by ", style="dim")
    for name in names:
        text.append(name, style((name,))).append(", ")
    return text.append("several", SEVERAL).append("; plain text is the target's own", "dim")


class Painter:
    """Prints text as it streams, each token in its style.

    Text comes in whole characters, later than its tokens, or not at all if a stop string cut it off. Text is painted as the
    tokens whose bytes it holds. All text is printed, whatever is said of its tokens.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ahead: deque[tuple[int, str]] = deque()

    def add(self, text: str, sizes: Sequence[int], sources: Sequence[Names]) -> None:
        """Print `text`, which came with tokens of so many bytes (if the server tells them), drafted by these sources."""
        self._ahead.extend((size, style(names)) for size, names in zip(sizes, sources, strict=False))
        styled = ((character, self._take(len(character.encode()))) for character in text)
        runs = [("".join(c for c, _ in run), look) for look, run in groupby(styled, key=itemgetter(1))]
        self._console.print(Text.assemble(*runs), end="", soft_wrap=True, highlight=False)

    def _take(self, size: int) -> str:
        """The style of the token that the next `size` bytes begin in."""
        found = self._ahead[0][1] if self._ahead else ""
        while size > 0 and self._ahead:
            length, current = self._ahead.popleft()
            if length > size:
                self._ahead.appendleft((length - size, current))
            elif not found:
                found = current
            size -= length
        return found


def share(sources: Iterable[Names]) -> dict[str, float]:
    """Share of the tokens that each source drafted; TARGET said those that nobody did. Shares overlap where several did.

    No tokens give an empty dictionary.
    """
    counts: Counter[str] = Counter()
    total = 0
    for names in sources:
        total += 1
        counts.update(names or (TARGET,))
    return {name: count / total for name, count in counts.most_common()}


def source_table(sources: Sequence[SourceStatistics], num_tokens: int) -> Table:
    """What each source did for an answer of `num_tokens`, as a table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("source")
    for header in ("drafted", "accepted", "of the text", "held", "it alone", "missed", "ms"):
        table.add_column(header, justify="right")
    for each in sources:
        of_text = f"{each.num_accepted / num_tokens:.0%}" if num_tokens else "-"
        drafted = (f"{each.num_proposed}", f"{each.num_accepted}", of_text)
        credit = (f"{each.num_held}", f"{each.num_held_alone}")
        missed = f"{each.num_errors + each.num_late}"
        table.add_row(Text(each.name, style((each.name,))), *drafted, *credit, missed, f"{each.seconds * 1000:.1f}")
    return table
