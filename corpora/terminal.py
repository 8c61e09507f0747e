"""How `draftloom corpus` talks: tables and bars for people, JSON lines for programs, errors as one line and an exit status.

    exit 0  done
         1  failed for another reason
         2  the command line was not usable (a name, a path, an option)
         3  done, but some files could not be read
         4  somebody else is at work on the corpus
         5  a corpus or the catalog is damaged
       130  interrupted

What a command found goes to stdout, all else to stderr; bars are drawn only on a terminal. With `--json`, stdout holds JSON
lines, of which the last is the result.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corpora.catalog import Catalog, default_store
from corpora.decisions import Decision, Reason
from corpora.errors import (
    BadExport,
    CatalogCorrupt,
    CorpusError,
    CorpusLocked,
    InvalidName,
    InvalidOptions,
    NothingToIndex,
    OtherTokenizer,
    SourceNotFound,
)
from engine.errors import ModelError
from retriever.errors import FormatError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from corpora.aside import TokenizerAside
    from corpora.build import Progress
    from engine.text import Tokenizer

FAILED, USAGE, PARTIAL, LOCKED, CORRUPT, INTERRUPTED = 1, 2, 3, 4, 5, 130
JSON_SECONDS = 1.0

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the corpus: a-z, 0-9, '.', '_', '-'.", show_default=False)
]
StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Folder of the corpora. (default: $DRAFTLOOM_HOME, else ~/.local/share/draftloom/corpora)",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines; the last is the result.")]


def open_catalog(store: Path | None) -> Catalog:
    return Catalog(store.expanduser() if store else default_store())


def load_tokenizer(model: str | None) -> tuple[str, Tokenizer]:
    """(the model's name, its tokenizer), fetched if need be."""
    from engine.models import DEFAULT_MODEL, tokenizer_folder
    from engine.text import Tokenizer

    name = model or DEFAULT_MODEL
    folder = tokenizer_folder(name, lambda news: say(plain(news)))
    if folder == Path(name).expanduser():
        name = str(folder.absolute())  # what is written down must mean the same in any folder
    return name, Tokenizer.load(folder)


def tokenizer_at_hand(model: str | None) -> Tokenizer | None:
    """The tokenizer of `model`, fetched if need be; without one, that of the built-in model if it is here already."""
    from engine.models import DEFAULT_MODEL, at_hand

    if model is None and at_hand(DEFAULT_MODEL) is None:
        return None
    return load_tokenizer(model)[1]


def tokenizer_aside(model: str) -> contextlib.AbstractContextManager[TokenizerAside | None]:
    """The tokenizer of `model` in a process of its own; None if it has to be fetched first, or no process can be started."""
    from corpora.aside import aside_in
    from engine.models import DEFAULT_MODEL, at_hand

    folder = at_hand(model or DEFAULT_MODEL)
    with contextlib.suppress(OSError):
        if folder is not None:
            return aside_in(folder)
    return contextlib.nullcontext()


# progress


@contextlib.contextmanager
def progress_of(as_json: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Something to tell about progress: a bar on a terminal, a JSON line a second with --json, else nobody."""
    if as_json:
        yield _json_progress()
    elif not err().is_terminal:
        yield None
    else:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Bars(*columns, console=err(), transient=True) as bars:
            task = bars.add_task("looking for files", total=None, note="")

            def show(progress: Progress) -> None:
                note = f"{progress.num_tokens:,} tokens" if progress.num_tokens else ""
                bars.update(
                    task,
                    description=_STAGES[progress.stage],
                    completed=progress.num_bytes,
                    total=progress.total_bytes or None,
                    note=note,
                )

            yield show


_STAGES = {
    "walk": "looking for files",
    "tokenize": "reading",
    "sort": "sorting",
    "write": "writing",
    "publish": "activating",
}


def _json_progress() -> Callable[[Progress], None]:
    last = time.monotonic()
    stage = ""

    def tell(progress: Progress) -> None:
        nonlocal last, stage
        if progress.stage != stage or time.monotonic() - last >= JSON_SECONDS:
            last, stage = time.monotonic(), progress.stage
            print_json({"progress": asdict(progress)})

    return tell


# errors


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Errors as one line and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; what was active before still is")
        raise typer.Exit(INTERRUPTED) from None
    except (CorpusError, ModelError, FormatError) as error:
        if as_json:
            skipped = error.skipped if isinstance(error, NothingToIndex) else {}
            print_json({"error": type(error).__name__, "message": str(error), **({"skipped": skipped} if skipped else {})})
        say(f"draftloom: {plain(str(error))}")
        raise typer.Exit(exit_status(error)) from None


def exit_status(error: Exception) -> int:
    """What a command that failed so ends with."""
    table: tuple[tuple[type[Exception], int], ...] = (
        (CorpusLocked, LOCKED),
        (CatalogCorrupt, CORRUPT),
        (InvalidName, USAGE),
        (InvalidOptions, USAGE),
        (SourceNotFound, USAGE),
        (ModelError, USAGE),
        (OtherTokenizer, USAGE),
        (BadExport, CORRUPT),
        (FormatError, CORRUPT),
    )
    return next((status for kind, status in table if isinstance(error, kind)), FAILED)


# printing


def out() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout)


def err() -> Console:
    from rich.console import Console

    return Console(file=sys.stderr)


def say(message: str) -> None:
    err().print(message, highlight=False, soft_wrap=True)


def plain(text: str) -> str:
    """Text in which rich sees no markup."""
    from rich.markup import escape

    return escape(text)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def table_of(*headers: str) -> Table:
    """A plain table; ">" before a header aligns its column right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(
            header.lstrip(">"), justify="right" if header.startswith(">") else "left", no_wrap=header.startswith(">")
        )
    return table


def print_skipped(reasons: Mapping[Reason, int], examples: Mapping[Reason, Sequence[Decision]]) -> None:
    """What was left out (a folder that was left out as a whole counts once), and one case of each."""
    if not reasons:
        return
    table = table_of("not stored", ">count", "why", "such as")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        case = examples[reason][0]
        table.add_row(str(reason), f"{count:,}", reason.meaning, plain(one_line(case.name)))
    out().print(table)


def one_line(name: str) -> str:
    """A file name that cannot break the line or move the cursor; the middle of a long one is left out."""
    name = visible(name)
    return name if len(name) <= 60 else f"{name[:28]}...{name[-29:]}"


def visible(text: str) -> str:
    """A text in which what a terminal would obey (line ends, escapes, directions) is spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def files_text(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def minute(moment: str) -> str:
    """2026-11-29T20:35:12+00:00 -> 2026-11-29 20:35 UTC"""
    return f"{moment[:10]} {moment[11:16]} UTC"


def size_of(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
