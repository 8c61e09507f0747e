"""`draftloom corpus show | check | rollback | gc`: looking after what is indexed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from corpora.terminal import (
    CORRUPT,
    JsonOption,
    NameArgument,
    StoreOption,
    minute,
    open_catalog,
    out,
    plain,
    print_json,
    reporting,
    say,
    size_of,
)

upkeep_app = typer.Typer()


@upkeep_app.command("show")
def show_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show what is known about a corpus: versions, sizes, tokenizer, sources, options."""
    with reporting(as_json):
        details = open_catalog(store).show(name)
        if as_json:
            print_json(details)
            return
        active, manifest = details["active"], details["manifest"]
        rows = {
            "version": active["id"],
            "built": minute(active["created"]),
            "earlier versions": ", ".join(v for v in details["versions"] if v != active["id"]) or "-",
            "model": active["model"] or "-",
            "tokenizer": f"{active['fingerprint']} ({active['vocab_size']:,} tokens)",
            "files": f"{active['num_files']:,} ({active['num_documents']:,} different)",
            "text": size_of(active["num_bytes"]),
            "tokens": f"{active['num_tokens']:,}",
            "on disk": size_of(details["bytes_on_disk"]),
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
        out().print(f"[bold]{name}[/bold]")
        out().print(table)


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


@upkeep_app.command("rollback")
def rollback_command(name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Return to the version that was active before. Twice is back again."""
    with reporting(as_json):
        version = open_catalog(store).rollback(name)
        if as_json:
            print_json({"name": name, "active": version.id})
        else:
            out().print(f"{name} is at version {version.id} of {minute(version.created)}")


@upkeep_app.command("gc")
def gc_command(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Remove what interrupted builds left behind and versions that nothing returns to."""
    with reporting(as_json):
        removed = [str(path) for path in open_catalog(store).gc()]
        if as_json:
            print_json({"removed": removed})
        else:
            out().print("\n".join(f"removed {path}" for path in removed) or "nothing to remove")


def _options_line(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in sorted(options.items()) if key != "model")
