"""`draftloom corpus update | watch | show | search | check | activate | rollback | gc | export | import`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corpora.decisions import Reason
from corpora.errors import CorpusError, CorpusNotFound, InvalidOptions
from corpora.terminal import (
    CORRUPT,
    PARTIAL,
    JsonOption,
    NameArgument,
    StoreOption,
    exit_status,
    files_text,
    load_tokenizer,
    minute,
    one_line,
    open_catalog,
    out,
    plain,
    print_json,
    print_skipped,
    progress_of,
    reporting,
    say,
    size_of,
    table_of,
    tokenizer_aside,
    visible,
)

if TYPE_CHECKING:
    from corpora.catalog import Version
    from corpora.update import UpdateReport
    from engine.text import Tokenizer

upkeep_app = typer.Typer()


@upkeep_app.command("update")
def update_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Bring a corpus up to date with the files it was built from, with the options it was built with.

    Only what changed is read and tokenized; what was deleted is never drafted again. A server takes the new version by itself.
    """
    with reporting(as_json):
        catalog = open_catalog(store)
        active = catalog.get(name).active  # before a lock is taken, and a store made, for a corpus that is not there
        with tokenizer_aside(active.model) as encoder, progress_of(as_json) as tell:
            from corpora.update import update  # while the tokenizer loads

            result = update(name, catalog, _tokenizer_of, encoder=encoder, progress=tell)
        if as_json:
            print_json(_update_json(result))
        else:
            print_skipped(result.report.skipped, result.report.examples)
            out().print(f"[bold]{name}[/bold] {_update_line(result)}", highlight=False, soft_wrap=True)
        if result.report.skipped.get(Reason.UNREADABLE):
            raise typer.Exit(PARTIAL)


@upkeep_app.command("watch")
def watch_command(
    name: NameArgument,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="What to build it from, if there is no such corpus yet.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="For a corpus that is built: as with `build`.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a corpus current while its files are edited: update it whenever they change, until Ctrl-C.

    A running server takes every new version without a pause.
    """
    from corpora.build import build
    from corpora.watch import watch

    def tell(news: UpdateReport | CorpusError) -> None:
        if isinstance(news, CorpusError):
            if as_json:
                print_json({"error": type(news).__name__, "message": str(news), "status": exit_status(news)})
            say(f"draftloom: {plain(str(news))}; trying again after the next change")
        elif as_json:
            print_json(_update_json(news))
        elif news.changed:
            out().print(f"{datetime.now():%H:%M:%S} {name} {_update_line(news)}", highlight=False, soft_wrap=True)

    with reporting(as_json):
        catalog = open_catalog(store)
        try:
            sources = catalog.get(name).active.sources
            if paths and {str(path.absolute()) for path in paths} != set(sources):
                raise InvalidOptions(
                    f"corpus {name} has other sources: {', '.join(sources)}; leave the paths out, or build it again with them"
                )
        except CorpusNotFound:
            if not paths:
                raise
            model_name, tokenizer = load_tokenizer(model)
            with progress_of(as_json) as progress:
                build(name, paths, tokenizer, catalog, model=model_name, progress=progress)
        say(f"watching what {name} was built from; Ctrl-C ends it")
        try:
            watch(name, catalog, _tokenizer_of, tell)
        except KeyboardInterrupt:
            say("no longer watching")


@upkeep_app.command("show")
def show_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what is known about a corpus: versions, sizes, kinds of files, what was skipped, what a lookup finds."""
    with reporting(as_json):
        catalog = open_catalog(store)
        details = catalog.show(name)
        folder = catalog.version_path(name, details["active"]["id"])
        details["record"] = record = _record_of(folder)
        details["suffixes"] = found = _found_by_suffixes(folder)
        if as_json:
            print_json(details)
            return
        active, manifest, num_bytes = details["active"], details["manifest"], details["bytes_on_disk"]
        rows = {
            "version": active["id"],
            "built": f"{minute(active['created'])}, {_age(active['created'])} ago",
            "earlier versions": ", ".join(v for v in details["versions"] if v != active["id"]) or "-",
            "model": active["model"] or "-",
            "tokenizer": f"{active['fingerprint']} ({active['vocab_size']:,} tokens)",
            "files": f"{active['num_files']:,} ({active['num_documents']:,} different)",
            "kinds": _kinds_line(record["endings"]) if record else "-",
            "not stored": ", ".join(f"{count:,} {reason}" for reason, count in record["skipped"].items()) if record else "-",
            "text": size_of(active["num_bytes"]),
            "tokens": f"{active['num_tokens']:,}",
            "on disk": f"{size_of(num_bytes)}, {num_bytes / max(active['num_tokens'], 1):.2f} bytes a token",
            "segments": str(manifest["num_segments"]) if manifest else "-",
            "an end of n": "; ".join(map(_suffix_line, found)) or "-",
            "sources": "\n".join(active["sources"]),
            "options": _options_line(manifest["options"])
            if manifest
            else "manifest cannot be read; run `draftloom corpus check`",
            "folder": details["path"],
        }
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for label, value in rows.items():
            table.add_row(label, value)
        out().print(f"[bold]{name}[/bold]")
        out().print(table)


@upkeep_app.command("search")
def search_command(
    name: NameArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to look for.", show_default=False)],
    limit: Annotated[int, typer.Option("--limit", "-n", help="Most places, and most continuations, to show.", min=1)] = 10,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look inside a corpus: where a text occurs, how often, and what follows it with what counts.

    It is found where its tokens stand, as drafting finds them: "retur" is not found inside "return".
    """
    from corpora.search import search

    with reporting(as_json):
        found = search(name, text, open_catalog(store), _tokenizer_of, limit=limit)
        if as_json:
            print_json(asdict(found))
            return
        if not found.count:
            say(f"{name} does not hold {plain(one_line(text))} ({len(found.tokens)} tokens)")
            return
        places = table_of(">place", "document", "text")
        for place in found.places:
            before, here, after = visible(place.before)[-32:], visible(text), visible(place.after)[:48]
            context = f"{plain(before)}[bold]{plain(here)}[/bold]{plain(after)}"
            places.add_row(f"{place.offset:,}", plain(one_line(place.document)), context)
        out().print(places)
        following = table_of(">count", ">share", "goes on with")
        for each in found.following:
            following.add_row(f"{each.count:,}", f"{each.count / found.count:.0%}", plain(visible(each.text)))
        out().print(following)
        out().print(f"{found.count:,} in all, {found.num_following:,} different continuations", highlight=False)


@upkeep_app.command("check")
def check_command(
    name: NameArgument,
    full: Annotated[bool, typer.Option("--full", help="Read every byte, not only headers, small files and a sample.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the files of a corpus against their checksums. Exits with 5 if anything is wrong."""
    from retriever.errors import RetrieverError

    with reporting(as_json):
        try:
            problems = [str(problem) for problem in open_catalog(store).check(name, full=full)]
        except RetrieverError as error:
            problems = [str(error)]
        if as_json:
            print_json({"name": name, "full": full, "problems": problems})
        elif problems:
            for problem in problems:
                say(f"[red]damaged[/red]: {plain(problem)}")
        else:
            out().print(f"{name} is sound{'' if full else ' as far as was looked; --full reads every byte'}")
        if problems:
            raise typer.Exit(CORRUPT)


@upkeep_app.command("activate")
def activate_command(
    name: NameArgument,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="One of those that `show` lists.", show_default=False)],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make another version of a corpus the active one."""
    with reporting(as_json):
        _print_active(name, open_catalog(store).activate(name, version), as_json)


@upkeep_app.command("rollback")
def rollback_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Return to the version that was active before. Twice is back again."""
    with reporting(as_json):
        _print_active(name, open_catalog(store).rollback(name), as_json)


@upkeep_app.command("gc")
def gc_command(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Remove what interrupted builds left behind and versions that nothing returns to."""
    with reporting(as_json):
        removed = [str(path) for path in open_catalog(store).gc()]
        if as_json:
            print_json({"removed": removed})
        else:
            out().print("\n".join(f"removed {path}" for path in removed) or "nothing to remove")


@upkeep_app.command("export")
def export_command(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tar file to write.", show_default=False)],
    version: Annotated[str, typer.Option("--version", help="Another version than the active one.", show_default=False)] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a version of a corpus to one file, to be imported elsewhere. Names and text of the documents are in it."""
    from corpora.transfer import export_version

    with reporting(as_json):
        with _copying(as_json, "write") as tell:
            about = export_version(name, file, open_catalog(store), version=version, on_bytes=tell)
        if as_json:
            print_json({"file": str(file), "bytes": file.stat().st_size, **asdict(about)})
        else:
            out().print(
                f"wrote {plain(str(file))}: {name} at version {about.version}, {size_of(file.stat().st_size)}, "
                f"for the tokenizer {about.fingerprint} ({plain(about.model or 'unknown model')})",
                highlight=False,
                soft_wrap=True,
            )


@upkeep_app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.", show_default=False)],
    name: Annotated[str, typer.Option("--name", help="Name of the corpus. (default: its name where it comes from)")] = "",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the version in an exported file the active one of a corpus. Everything in the file is checked first."""
    from corpora.transfer import import_version

    with reporting(as_json):
        with _copying(as_json, "tokenize") as tell:
            about = import_version(file, open_catalog(store), name=name, on_bytes=tell)
        if as_json:
            print_json(asdict(about))
        else:
            out().print(
                f"[bold]{about.name}[/bold] is ready: {files_text(about.num_files)}, {about.num_tokens:,} tokens, "
                f"for the tokenizer {about.fingerprint} ({plain(about.model or 'unknown model')})",
                highlight=False,
                soft_wrap=True,
            )


def _tokenizer_of(model: str) -> Tokenizer:
    return load_tokenizer(model or None)[1]


@contextmanager
def _copying(as_json: bool, stage: str) -> Iterator[Callable[[int, int], None]]:
    """Something to tell how many bytes have been copied, shown as that stage of a build."""
    from corpora.build import Progress

    with progress_of(as_json) as tell:

        def copied(done: int, total: int) -> None:
            if tell is not None:
                tell(Progress(stage, 0, 0, done, total))

        yield copied


def _update_json(result: UpdateReport) -> dict[str, Any]:
    counts = asdict(result)
    report = counts.pop("report")
    del report["examples"]
    return {**report, **counts}


def _update_line(result: UpdateReport) -> str:
    report = result.report
    if not result.changed:
        return f"is up to date: {files_text(report.files_taken)}, {report.tokens:,} tokens ({report.seconds:.1f} s)"
    return (
        f"is up to date: {_documents(result.added)} added, {result.removed:,} removed, {result.kept:,} kept; "
        f"{report.tokens:,} tokens, {report.new_tokens:,} of them new, in {report.seconds:.1f} s"
    )


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


def _record_of(folder: Path) -> dict[str, Any] | None:
    """What is remembered of a version's files, for people; None if nothing is, or it cannot be read."""
    from corpora.record import Record
    from retriever.errors import RetrieverError

    try:
        record = Record.read(folder)
    except (RetrieverError, OSError):
        return None
    if record is None:
        return None
    return {
        "skipped": dict(sorted(record.skipped.items(), key=lambda item: (-item[1], item[0]))),
        "endings": dict(sorted(record.endings.items(), key=lambda item: (-item[1][1], item[0]))),
    }


def _found_by_suffixes(folder: Path) -> list[dict[str, Any]]:
    """What an end of n tokens of the corpus' own text finds in the rest of it; [] if the version cannot be opened."""
    from retriever.ends import statistics_of
    from retriever.errors import RetrieverError

    try:
        return [asdict(each) for each in statistics_of(folder, (1, 2, 4, 8, 16, 32), samples=500)]
    except (RetrieverError, OSError):
        return []


def _suffix_line(statistics: Mapping[str, Any]) -> str:
    """What is said of the ends of one length."""
    share, median = statistics["share_found"], statistics["median_found"]
    return f"{statistics['length']}: {share:.0%} stand elsewhere, half of them {median:,.0f} times or more"


def _kinds_line(endings: Mapping[str, tuple[int, int]]) -> str:
    total = max(sum(size for _, size in endings.values()), 1)
    most = [f"{ending or 'no ending'} {size / total:.0%}" for ending, (_, size) in list(endings.items())[:6]]
    return ", ".join([*most, *([f"{len(endings) - 6} more"] if len(endings) > 6 else [])])


def _age(created: str) -> str:
    """How long ago, in the largest unit of which there is one."""
    seconds = max(0.0, time.time() - datetime.fromisoformat(created).astimezone(UTC).timestamp())
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"


def _print_active(name: str, version: Version, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "active": version.id})
    else:
        out().print(f"{name} is at version {version.id} of {minute(version.created)}")


def _options_line(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in sorted(options.items()) if key not in ("model", "resolved") and value)
