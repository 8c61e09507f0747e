"""`draftloom corpus ...`: index files, see what is indexed, check it, remove it.

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
from rich.console import Console
from rich.table import Table

from corpora.catalog import Catalog, Corpus, check_name, default_store
from corpora.decisions import Decision, Reason
from corpora.errors import (
    CatalogCorrupt,
    CorpusError,
    CorpusLocked,
    InvalidName,
    InvalidOptions,
    NothingToIndex,
    SourceNotFound,
)

if TYPE_CHECKING:
    from corpora.build import BuildOptions, BuildReport, Progress, Tally

FAILED, USAGE, PARTIAL, LOCKED, CORRUPT, INTERRUPTED = 1, 2, 3, 4, 5, 130
JSON_SECONDS = 1.0

corpus_app = typer.Typer(
    name="corpus",
    help="Index code and documents to draft from, and look after what is indexed.",
    no_args_is_help=True,
    add_completion=False,
)

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


@corpus_app.command("build")
def build_command(
    name: NameArgument,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Folders and files to index.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Model whose tokenizer to use: the one it will be served with. (default: the built-in model)",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Take only files that match, as in .gitignore: '*.py'. Repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Leave out what matches, as in .gitignore. Repeatable.")
    ] = None,
    max_file_size: Annotated[int, typer.Option("--max-file-size", help="Skip larger files (bytes).", min=1)] = 1 << 20,
    generated: Annotated[bool, typer.Option("--generated", help="Take files that say they are generated, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken and what skipped.")] = False,
    explain: Annotated[
        Path | None, typer.Option("--explain", help="Only say what would become of this file, and why.", show_default=False)
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Index folders and files as a new version of a corpus, and make it the active one.

    Respects .gitignore and .ignore, and says what it skipped and why. Whatever goes wrong, what was active stays active.
    """
    from corpora.build import BuildOptions

    with _reporting(as_json):
        options = BuildOptions(tuple(include or ()), tuple(exclude or ()), max_file_size, generated)
        if explain is not None:
            _explain(explain, paths, options, as_json)
        elif dry_run:
            _dry_run(name, paths, options, as_json)
        else:
            _build(name, paths, options, model, _catalog(store), as_json)


@corpus_app.command("list")
def list_command(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the corpora."""
    with _reporting(as_json):
        catalog = _catalog(store)
        corpora = catalog.list()
        if as_json:
            _print_json({"corpora": [_summary(corpus) for corpus in corpora]})
        elif not corpora:
            _say(f"no corpora in {catalog.root}; build one with `draftloom corpus build NAME PATH`")
        else:
            table = _table("name", "built", "model", ">files", ">tokens")
            for corpus in corpora:
                v = corpus.active
                table.add_row(corpus.name, _minute(v.created), v.model or "-", f"{v.num_files:,}", f"{v.num_tokens:,}")
            _out().print(table)


@corpus_app.command("show")
def show_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what is known about a corpus: versions, sizes, tokenizer, sources, options."""
    with _reporting(as_json):
        details = _catalog(store).show(name)
        if as_json:
            _print_json(details)
            return
        active, manifest = details["active"], details["manifest"]
        rows = {
            "version": active["id"],
            "built": _minute(active["created"]),
            "earlier versions": ", ".join(v for v in details["versions"] if v != active["id"]) or "-",
            "model": active["model"] or "-",
            "tokenizer": f"{active['fingerprint']} ({active['vocab_size']:,} tokens)",
            "files": f"{active['num_files']:,} ({active['num_documents']:,} different)",
            "text": _size(active["num_bytes"]),
            "tokens": f"{active['num_tokens']:,}",
            "on disk": _size(details["bytes_on_disk"]),
            "sources": "\n".join(active["sources"]),
            "options": _options_line(manifest["options"])
            if manifest
            else "manifest cannot be read; run `draftloom corpus check`",
            "folder": details["path"],
        }
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for label, value in rows.items():
            table.add_row(label, value)
        _out().print(f"[bold]{name}[/bold]")
        _out().print(table)


@corpus_app.command("check")
def check_command(
    name: NameArgument,
    full: Annotated[bool, typer.Option("--full", help="Read every byte, not only headers, small files and a sample.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the files of a corpus against their checksums. Exits with 5 if anything is wrong."""
    from retriever.errors import RetrieverError

    with _reporting(as_json):
        try:
            problems = [str(problem) for problem in _catalog(store).check(name, full=full)]
        except RetrieverError as error:
            problems = [str(error)]
        if as_json:
            _print_json({"name": name, "full": full, "problems": problems})
        elif problems:
            for problem in problems:
                _say(f"[red]damaged[/red]: {_plain(problem)}")
        else:
            _out().print(f"{name} is sound{'' if full else ' as far as was looked; --full reads every byte'}")
        if problems:
            raise typer.Exit(CORRUPT)


@corpus_app.command("rm")
def remove_command(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a corpus with all its versions."""
    with _reporting(as_json):
        catalog = _catalog(store)
        corpus = catalog.get(name)
        if not yes and not as_json and sys.stdin.isatty():
            typer.confirm(f"Remove {name} ({corpus.active.num_tokens:,} tokens) and all its versions?", abort=True)
        catalog.remove(name)
        if as_json:
            _print_json({"removed": name})
        else:
            _out().print(f"removed {name}")


@corpus_app.command("rollback")
def rollback_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Return to the version that was active before. Twice is back again."""
    with _reporting(as_json):
        version = _catalog(store).rollback(name)
        if as_json:
            _print_json({"name": name, "active": version.id})
        else:
            _out().print(f"{name} is at version {version.id} of {_minute(version.created)}")


@corpus_app.command("gc")
def gc_command(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Remove what interrupted builds left behind and versions that nothing returns to."""
    with _reporting(as_json):
        removed = [str(path) for path in _catalog(store).gc()]
        if as_json:
            _print_json({"removed": removed})
        else:
            _out().print("\n".join(f"removed {path}" for path in removed) or "nothing to remove")


def _catalog(store: Path | None) -> Catalog:
    return Catalog(store.expanduser() if store else default_store())


# what the build command does


def _build(name: str, paths: Sequence[Path], options: BuildOptions, model: str | None, catalog: Catalog, as_json: bool) -> None:
    from corpora.build import build
    from corpora.walk import roots_of

    check_name(name)
    options.validate()
    roots_of(paths)  # before a model is fetched for nothing
    model_name, tokenizer = _load_tokenizer(model)
    with _progress(as_json) as say:
        report = build(name, paths, tokenizer, catalog, options=options, model=model_name, progress=say)
    if as_json:
        _print_json(_report_json(report))
    else:
        _print_skipped(report.skipped, report.examples)
        _out().print(
            f"[bold]{name}[/bold] is ready: {_files(report.files_taken)}, {_size(report.bytes)}, {report.tokens:,} tokens "
            f"in {report.seconds:.1f} s ({report.tokenizer_seconds:.1f} s of it in the tokenizer)",
            highlight=False,
            soft_wrap=True,
        )
    if report.skipped.get(Reason.UNREADABLE):
        raise typer.Exit(PARTIAL)


def _dry_run(name: str, paths: Sequence[Path], options: BuildOptions, as_json: bool) -> None:
    from corpora.build import Tally, survey

    check_name(name)
    tally = Tally()
    with _progress(as_json) as say:
        for decision, _ in survey(paths, options, progress=say):
            tally.add(decision)
    if as_json:
        _print_json({"name": name, "dry_run": True, **_tally_json(tally)})
        return
    by_ending = sorted(tally.endings.items(), key=lambda item: (-item[1][1], item[0]))
    table = _table("would take", ">files", ">size")
    for ending, (count, size) in by_ending[:15]:
        table.add_row(ending or "no ending", f"{count:,}", _size(size))
    if rest := by_ending[15:]:
        table.add_row(f"{len(rest)} more endings", f"{sum(c for _, (c, _) in rest):,}", _size(sum(s for _, (_, s) in rest)))
    _out().print(table)
    _print_skipped(tally.reasons, tally.examples)
    _out().print(f"would index {_files(tally.num_files)}, {_size(tally.num_bytes)}; nothing was written", highlight=False)


def _explain(path: Path, paths: Sequence[Path], options: BuildOptions, as_json: bool) -> None:
    from corpora.build import explain

    decision = explain(path, paths, options)
    if decision is None:
        raise SourceNotFound(f"file is not below the paths to index: {path}; give one that is")
    if as_json:
        _print_json({"path": str(path), **_decision_json(decision)})
        return
    verdict = "taken" if decision.taken else "skipped"
    reason = f" - {decision.reason}: {decision.reason.meaning}" if decision.reason else ""
    detail = f" ({decision.detail})" if decision.detail else ""
    whole = f"; decided for the folder {decision.name}" if decision.name.endswith("/") else ""
    _out().print(_plain(f"{path}: {verdict}{reason}{detail}{whole}"), highlight=False, soft_wrap=True)


def _load_tokenizer(model: str | None) -> tuple[str, Any]:
    """(the model's name, its tokenizer)."""
    from engine.models import DEFAULT_MODEL, tokenizer_folder
    from engine.text import Tokenizer

    name = model or DEFAULT_MODEL
    return name, Tokenizer.load(tokenizer_folder(name, lambda news: _say(_plain(news))))


@contextlib.contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Something to tell about progress: a bar on a terminal, a JSON line a second with --json, else nobody."""
    if as_json:
        yield _json_progress()
    elif not _err().is_terminal:
        yield None
    else:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Bars(*columns, console=_err(), transient=True) as bars:
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
            _print_json({"progress": asdict(progress)})

    return tell


# errors


@contextlib.contextmanager
def _reporting(as_json: bool) -> Iterator[None]:
    """Errors as one line and an exit status."""
    from engine.text import ModelError

    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted; what was active before still is")
        raise typer.Exit(INTERRUPTED) from None
    except (CorpusError, ModelError) as error:
        if as_json:
            skipped = error.skipped if isinstance(error, NothingToIndex) else {}
            _print_json({"error": type(error).__name__, "message": str(error), **({"skipped": skipped} if skipped else {})})
        _say(f"[red]error[/red]: {_plain(str(error))}")
        raise typer.Exit(_exit_status(error)) from None


def _exit_status(error: Exception) -> int:
    table: tuple[tuple[type[Exception], int], ...] = (
        (CorpusLocked, LOCKED),
        (CatalogCorrupt, CORRUPT),
        (InvalidName, USAGE),
        (InvalidOptions, USAGE),
        (SourceNotFound, USAGE),
    )
    return next((status for kind, status in table if isinstance(error, kind)), FAILED)


# printing


def _out() -> Console:
    return Console(file=sys.stdout)


def _err() -> Console:
    return Console(file=sys.stderr)


def _say(message: str) -> None:
    _err().print(message, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Text in which rich sees no markup."""
    from rich.markup import escape

    return escape(text)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def _table(*headers: str) -> Table:
    """A plain table; ">" before a header aligns its column right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(
            header.lstrip(">"), justify="right" if header.startswith(">") else "left", no_wrap=header.startswith(">")
        )
    return table


def _print_skipped(reasons: Mapping[Reason, int], examples: Mapping[Reason, Sequence[Decision]]) -> None:
    """What was left out (a folder that was left out as a whole counts once), and one case of each."""
    if not reasons:
        return
    table = _table("not stored", ">count", "why", "such as")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        case = examples[reason][0]
        table.add_row(str(reason), f"{count:,}", reason.meaning, _plain(_one_line(case.name)))
    _out().print(table)


def _one_line(name: str) -> str:
    """A file name that cannot break the line or move the cursor; the middle of a long one is left out."""
    name = "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)
    return name if len(name) <= 60 else f"{name[:28]}...{name[-29:]}"


def _summary(corpus: Corpus) -> dict[str, Any]:
    return {
        "name": corpus.name,
        "previous": corpus.previous,
        **{k: v for k, v in asdict(corpus.active).items() if k != "corpus"},
    }


def _decision_json(decision: Decision) -> dict[str, Any]:
    return {"name": decision.name, "taken": decision.taken, "reason": decision.reason, "detail": decision.detail}


def _tally_json(tally: Tally) -> dict[str, Any]:
    return {
        "files_taken": tally.num_files,
        "documents": tally.num_documents,
        "bytes": tally.num_bytes,
        "skipped": tally.reasons,
    }


def _report_json(report: BuildReport) -> dict[str, Any]:
    return {key: value for key, value in asdict(report).items() if key != "examples"}


def _options_line(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in sorted(options.items()) if key != "model")


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _minute(moment: str) -> str:
    """2026-11-29T20:35:12+00:00 -> 2026-11-29 20:35 UTC"""
    return f"{moment[:10]} {moment[11:16]} UTC"


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
