"""`draftloom corpus build | list | rm`, and the commands of `upkeep.py`: index files, see what is indexed, remove it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corpora.catalog import Catalog, Corpus, check_name
from corpora.decisions import Decision, Reason
from corpora.errors import SourceNotFound
from corpora.terminal import (
    PARTIAL,
    JsonOption,
    NameArgument,
    StoreOption,
    files_text,
    load_tokenizer,
    minute,
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
    tokenizer_at_hand,
    visible,
)
from corpora.upkeep import upkeep_app

if TYPE_CHECKING:
    from corpora.build import BuildReport
    from corpora.options import BuildOptions
    from corpora.survey import Tally

for package in ("sqlite_utils", "pathspec", "xxhash"):
    if find_spec(package) is None:  # they are imported late, but a missing one is named at once
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

UNKNOWN_VOCABULARY = 150_000
"""For want of a tokenizer, a vocabulary of today's usual size."""

corpus_app = typer.Typer(
    name="corpus",
    help="Index code and documents to draft from, and look after what is indexed.",
    no_args_is_help=True,
    add_completion=False,
)


@corpus_app.command("build")
def build_command(
    name: NameArgument,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="What to index: folders, files, archives, JSON lines, Parquet; PATH@REVISION of a git repository.",
            show_default=False,
        ),
    ],
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
    near_duplicates: Annotated[
        bool, typer.Option("--near-duplicates", help="Leave out files of which nearly all stands in another.")
    ] = False,
    exclude_licence: Annotated[
        list[str] | None,
        typer.Option("--exclude-licence", help="Leave out files that say they are under this SPDX licence. Repeatable."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Index the repositories at PATH as of this commit, branch or tag.")
    ] = None,
    field: Annotated[
        str, typer.Option("--field", help="Where a record has its text or messages. (default: text, content, messages, ...)")
    ] = "",
    role: Annotated[
        list[str] | None, typer.Option("--role", help="Of conversations, take only messages of this role. Repeatable.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Store conversations as the model's chat template writes them.")] = False,
    memory: Annotated[
        int | None,
        typer.Option("--memory", help="Most memory to take, in MB. (default: segments of 64 M tokens)", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken and what skipped.")] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="FILE", help="Only say what would become of this file, and why.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Index text as a new version of a corpus, and make it the active one.

    Respects .gitignore and .ignore, and says what it skipped and why. Whatever goes wrong, what was active stays active.
    """
    from corpora.options import BuildOptions

    with reporting(as_json):
        options = BuildOptions(
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            max_file_size=max_file_size,
            generated=generated,
            near_duplicates=near_duplicates,
            exclude_licences=tuple(exclude_licence or ()),
            field=field,
            roles=tuple(role or ()),
            chat=chat,
        )
        if revision is not None:
            paths = [f"{path}@{revision}" for path in paths]
        if explain is not None:
            _explain(explain, paths, options, model, as_json)
        elif dry_run:
            _dry_run(name, paths, options, model, open_catalog(store), as_json)
        else:
            _build(name, paths, options, model, memory, open_catalog(store), as_json)


@corpus_app.command("list")
def list_command(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the corpora."""
    with reporting(as_json):
        catalog = open_catalog(store)
        corpora = catalog.list()
        if as_json:
            print_json({"corpora": [_summary(corpus) for corpus in corpora]})
        elif not corpora:
            say(f"no corpora in {catalog.root}; build one with `draftloom corpus build NAME PATH`")
        else:
            table = table_of("name", "built", "model", ">files", ">tokens")
            for corpus in corpora:
                v = corpus.active
                table.add_row(corpus.name, minute(v.created), v.model or "-", f"{v.num_files:,}", f"{v.num_tokens:,}")
            out().print(table)


@corpus_app.command("rm")
def remove_command(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a corpus with all its versions."""
    with reporting(as_json):
        catalog = open_catalog(store)
        corpus = catalog.get(name)
        if not yes and not as_json and sys.stdin.isatty():
            typer.confirm(f"Remove {name} ({corpus.active.num_tokens:,} tokens) and all its versions?", abort=True)
        catalog.remove(name)
        if as_json:
            print_json({"removed": name})
        else:
            out().print(f"removed {name}")


# what the build command does


def _build(
    name: str,
    paths: Sequence[str],
    options: BuildOptions,
    model: str | None,
    memory: int | None,
    catalog: Catalog,
    as_json: bool,
) -> None:
    from corpora.build import build, segment_tokens_within
    from corpora.inputs import open_sources

    check_name(name)
    open_sources(paths, replace(options, chat=False))  # before a model is fetched for nothing
    model_name, tokenizer = load_tokenizer(model)
    if memory is not None:
        options = replace(options, segment_tokens=segment_tokens_within(memory * 10**6, tokenizer.vocab_size))
    with progress_of(as_json) as say:
        report = build(name, paths, tokenizer, catalog, options=options, model=model_name, progress=say)
    if as_json:
        print_json(_report_json(report))
    else:
        print_skipped(report.skipped, report.examples)
        out().print(
            f"[bold]{name}[/bold] is ready: {files_text(report.files_taken)}, {size_of(report.bytes)}, "
            f"{report.tokens:,} tokens in {report.seconds:.1f} s ({report.tokenizer_seconds:.1f} s of it in the tokenizer)",
            highlight=False,
            soft_wrap=True,
        )
    if report.skipped.get(Reason.UNREADABLE):
        raise typer.Exit(PARTIAL)


def _dry_run(
    name: str, paths: Sequence[str], options: BuildOptions, model: str | None, catalog: Catalog, as_json: bool
) -> None:
    from corpora.build import Progress, chat_encoder
    from corpora.estimate import Estimate
    from corpora.inputs import open_sources
    from corpora.survey import Survey, Tally

    check_name(name)
    open_sources(paths, replace(options, chat=False))
    tokenizer = load_tokenizer(model)[1] if options.chat else tokenizer_at_hand(model)
    encode_chat = chat_encoder(tokenizer) if options.chat and tokenizer else None
    survey = Survey(open_sources(paths, options, encode_chat), options, store=catalog.root)
    tally, estimate = Tally(), Estimate()
    with progress_of(as_json) as say:
        for found in survey:
            tally.add(found.decision)
            estimate.add(found)
            if say is not None:
                say(Progress("tokenize", survey.num_files, survey.total_files, survey.num_bytes, survey.total_bytes))
    num_tokens = estimate.num_tokens(tokenizer.encode_batch if tokenizer else None)
    index_bytes = estimate.index_bytes(num_tokens, tokenizer.vocab_size if tokenizer else UNKNOWN_VOCABULARY)
    if as_json:
        expected = {"expected_tokens": num_tokens, "expected_index_bytes": index_bytes}
        print_json({"name": name, "dry_run": True, **_tally_json(tally), **expected})
    else:
        _print_endings(tally)
        print_skipped(tally.reasons, tally.examples)
        out().print(
            f"would index {files_text(tally.num_files)}, {size_of(tally.num_bytes)}: about {num_tokens:,} tokens, "
            f"an index of about {size_of(index_bytes)}; nothing was written",
            highlight=False,
            soft_wrap=True,
        )
    if tally.reasons.get(Reason.UNREADABLE):
        raise typer.Exit(PARTIAL)


def _print_endings(tally: Tally) -> None:
    by_ending = sorted(tally.endings.items(), key=lambda item: (-item[1][1], item[0]))
    table = table_of("would take", ">files", ">size")
    for ending, (count, size) in by_ending[:15]:
        table.add_row(ending or "no ending", f"{count:,}", size_of(size))
    if rest := by_ending[15:]:
        table.add_row(f"{len(rest)} more endings", f"{sum(c for _, (c, _) in rest):,}", size_of(sum(s for _, (_, s) in rest)))
    out().print(table)


def _explain(path: str, paths: Sequence[str], options: BuildOptions, model: str | None, as_json: bool) -> None:
    from corpora.build import chat_encoder
    from corpora.survey import explain

    encode_chat = chat_encoder(load_tokenizer(model)[1]) if options.chat else None
    decision = explain(path, paths, options, encode_chat)
    if decision is None:
        raise SourceNotFound(f"file is not below the paths to index: {path}; give one that is")
    if as_json:
        print_json({"path": path, **_decision_json(decision)})
        return
    verdict = "taken" if decision.taken else "skipped"
    reason = f" - {decision.reason}: {decision.reason.meaning}" if decision.reason else ""
    detail = f" ({decision.detail})" if decision.detail else ""
    whole = f"; decided for the folder {decision.name}" if decision.name.endswith("/") else ""
    out().print(plain(visible(f"{path}: {verdict}{reason}{detail}{whole}")), highlight=False, soft_wrap=True)


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


# Commands of other files come after those of this one.
corpus_app.add_typer(upkeep_app)
