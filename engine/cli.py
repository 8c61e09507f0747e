"""The command `draftloom`.

    draftloom model pull|list          models on this machine
    draftloom corpus build|list|...    what to draft from (corpora/cli.py)
    draftloom serve                    the gRPC server
    draftloom worker                   holds the weights, for engines elsewhere
    draftloom generate                 one answer, from a running server or one of its own
    draftloom trace                    a page that shows how answers came about, step by step
    draftloom history show|clear       what is remembered of earlier answers
    draftloom demo                     the whole of it, on code that is already here

    exit 0  done
         1  failed: no server, a lost worker, a differing text
         2  the command line, a setting, a model or the request is not usable
       130  interrupted; `corpus` has statuses of its own

What was asked for goes to stdout, all else to stderr. Every error is one line. Each command imports what it needs when it runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

try:
    import typer
    from typer.core import TyperGroup
except ImportError as missing:  # the base install is the Python client alone
    sys.exit(f"draftloom: a package is not installed: {missing.name}; pip install 'draftloom[engine,worker,index]'")

from engine.errors import ConfigError, EngineError, InvalidRequest
from engine.models import cache_root

if TYPE_CHECKING:
    from draftloom import Completion, Options, Stream
    from engine.config import Config
    from engine.memory import Memory

FAILED, USAGE = 1, 2
OWN_PACKAGES = ("corpora", "draftloom", "engine", "retriever")


class Commands(TyperGroup):
    """The commands, with those of `corpora` among them, which are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted([*super().list_commands(ctx), "corpus"])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return corpus_command() if cmd_name == "corpus" else super().get_command(ctx, cmd_name)


def corpus_command() -> Any:
    """The `corpus` group; one that says which extra to install, where it is not there."""
    try:
        from corpora.cli import corpus_app
    except ImportError as error:
        if not error.name or error.name.partition(".")[0] in OWN_PACKAGES:
            raise
        package = error.name
        stand_in = typer.Typer(add_completion=False)

        @stand_in.command("corpus", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
        def refuse() -> None:
            """Index code and documents to draft from (needs the index extra)."""
            raise ConfigError(f"a package is not installed: {package}; pip install 'draftloom[index]'")

        return typer.main.get_command(stand_in)
    return typer.main.get_command(corpus_app)


app = typer.Typer(
    name="draftloom",
    cls=Commands,
    help="Lossless speculative decoding that weaves drafts from many sources, served over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Bring models to this machine and see which are here.", no_args_is_help=True)
app.add_typer(model_app, name="model")
history_app = typer.Typer(help="See, and forget, what is remembered of earlier answers.", no_args_is_help=True)
app.add_typer(history_app, name="history")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file. [default: ./draftloom.toml, if it is there]", show_default=False),
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="The model: see `draftloom model list`.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="auto, int8, bfloat16 or float32.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads of a pass.")]
KvMemoryOption = Annotated[
    str | None, typer.Option("--kv-memory", help='Memory for keys and values, such as "2 GiB".', show_default=False)
]
StoreOption = Annotated[Path | None, typer.Option("--store", help="Folder of the corpora.")]
MemoryOption = Annotated[
    Path | None, typer.Option("--memory", help="Folder of what is remembered of earlier answers.", show_default=False)
]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="This tenant's only.")]
OfModelOption = Annotated[str | None, typer.Option("--model", "-m", help="This model's only.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# What `generate` and `trace` ask for.
CorpusOption = Annotated[list[str] | None, typer.Option("--corpus", help="Corpus to draft from. Repeatable.")]
NoCorpusOption = Annotated[
    bool, typer.Option("--no-corpus", help="Draft from no corpus, not even those the server has as its default.")
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.", min=1)]
TemperatureOption = Annotated[float | None, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Choose among the likeliest that add up to this.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Choose among so many likeliest.")]
MinPOption = Annotated[float | None, typer.Option("--min-p", help="Drop what is less likely than so much of the best.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Same seed, same text.", min=0)]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer. Repeatable.")]
PredictionOption = Annotated[
    Path | None, typer.Option("--prediction", help="File with a guess at the answer.", exists=True, dir_okay=False)
]
SourceOption = Annotated[list[str] | None, typer.Option("--source", help="Source to draft with. Repeatable.")]
MaxNodesOption = Annotated[int | None, typer.Option("--max-nodes", help="Most candidates in a tree.")]
ServerOption = Annotated[str | None, typer.Option("--server", "-s", help="Ask the server at this address (host:port).")]


def print_version(wanted: bool) -> None:
    """What --version does."""
    if wanted:
        print(f"draftloom {_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """Options before the command."""


@model_app.command("pull")
def pull_command(
    model: Annotated[str, typer.Argument(help="A built-in name, a hub id, a GGUF file or a safetensors folder.")],
    name: Annotated[str | None, typer.Option("--name", help="What to call it from then on.")] = None,
) -> None:
    """Bring a model into the cache, converted and ready to serve, and print its folder."""
    from engine.models import pull

    with progress() as say:
        folder = pull(model, say, name)
    print(folder)


@model_app.command("list")
def models_command(as_json: JsonOption = False) -> None:
    """List the models in the cache and the built-in ones."""
    from rich.console import Console
    from rich.table import Table

    from engine.models import list_models

    entries = list_models()
    if as_json:
        rows = [{"name": e.name, "folder": e.folder and str(e.folder), "bytes": e.bytes, "origin": e.origin} for e in entries]
        print(json.dumps({"models": rows}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("name", "size", "state", "from"):
        table.add_column(header, justify="right" if header == "size" else "left", overflow="fold")
    for entry in entries:
        table.add_row(entry.name, f"{entry.bytes / 1e6:,.0f} MB", "ready" if entry.folder else "to pull", entry.origin)
    Console().print(table)


@history_app.command("show")
def history_show_command(
    tenant: TenantOption = None,
    model: OfModelOption = None,
    text: Annotated[bool, typer.Option("--text", help="Print the answers themselves.")] = False,
    config: ConfigOption = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much is remembered of whom, and how old it is; what a running server learned in the last minutes comes later."""
    from rich.console import Console

    from engine.recall import recall, recall_table

    opened, folder = _memory(config, memory)
    found = recall(opened, model, tenant, with_text=text)
    if as_json:
        print(json.dumps({"remembered": [asdict(each) for each in found]}, ensure_ascii=False))
        return
    if not found:
        print(f"nothing is remembered in {folder}", file=sys.stderr)
        return
    console = Console(highlight=False)
    console.print(recall_table(found, time.time()))
    for each in found:
        for answer in each.texts or ():
            console.rule(f"{each.model} {each.tenant}", align="left")
            console.print(answer, markup=False, soft_wrap=True)


@history_app.command("clear")
def history_clear_command(
    tenant: TenantOption = None,
    model: OfModelOption = None,
    config: ConfigOption = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget what is remembered: of a tenant, of a model, or all of it. A running server forgets it, too."""
    from engine.recall import forget

    opened, folder = _memory(config, memory)
    try:
        num_cleared = forget(opened, model, tenant)
    except OSError as error:
        raise EngineError(f"cannot forget all of it: {error}; look at who owns {folder}") from error
    print(json.dumps({"cleared": num_cleared}) if as_json else f"forgot what was remembered of {num_cleared}")


@app.command("serve")
def serve_command(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow a host that is not loopback, in plain text.")] = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    worker: Annotated[str | None, typer.Option("--worker", help="Workers that run already: addresses, with commas.")] = None,
    corpus: Annotated[
        list[str] | None, typer.Option("--corpus", help="Corpus for requests that name none. Repeatable.", show_default=False)
    ] = None,
    store: StoreOption = None,
    memory: MemoryOption = None,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Remember nothing between requests.")] = False,
    max_nodes: MaxNodesOption = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding for everyone.")] = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C. Flags win over the environment, and that over the settings file."""
    settings = load_settings(
        config,
        {
            "server.host": host,
            "server.port": port,
            "server.insecure": True if insecure else None,
            "model.name": model,
            "model.device": device,
            "model.dtype": dtype,
            "model.threads": threads,
            "model.kv_memory": kv_memory,
            "model.worker": worker,
            "corpora.default": corpus or None,
            "corpora.store": store,
            "memory.folder": memory,
            "memory.enabled": False if no_memory else None,
            "speculation.max_nodes": max_nodes,
            "speculation.enabled": False if no_speculation else None,
        },
    )
    from engine.app import serve

    if with_parent:
        from engine.spawn import end_with_parent

        end_with_parent()
    raise typer.Exit(serve(settings))


@app.command("worker")
def worker_command(
    listen: Annotated[str, typer.Option("--listen", help="host:port or unix:PATH.")] = "127.0.0.1:50152",
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="The worker's certificate (PEM).", dir_okay=False)] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its key (PEM).", dir_okay=False)] = None,
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", help="Serve only engines that this authority vouches for (PEM).", dir_okay=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow an address that is not loopback, in plain text.")] = False,
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", help="For open answers to end, at SIGTERM.", min=0)] = 30.0,
    config: ConfigOption = None,
) -> None:
    """Hold the weights for engines elsewhere (`draftloom serve --worker`), until SIGTERM.

    Whoever reaches the address can use the model; what they ask is never kept.
    """
    given = {
        "model.name": model,
        "model.device": device,
        "model.dtype": dtype,
        "model.threads": threads,
        "model.kv_memory": kv_memory,
    }
    settings = load_settings(config, given).model
    options = {
        "--address": listen,
        "--model": settings.name,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--threads": settings.threads,
        "--kv-memory": int(settings.kv_memory),
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--tls-ca": tls_ca,
        "--drain-seconds": drain_seconds,
    }
    words = _words(options) + (["--insecure"] if insecure else [])
    from engine.target.server import parser, start

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("draftloom").setLevel(logging.INFO)
    start(parser().parse_args(words))


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(help='What to continue; "-" reads it from stdin.', show_default=False)],
    corpus: CorpusOption = None,
    no_corpus: NoCorpusOption = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding; the text is the same.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Do not draft from earlier answers.")] = False,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="Remember nothing of this answer.")] = False,
    show_sources: Annotated[
        bool, typer.Option("--show-sources", help="Colour each token by the source that drafted it; say what each source did.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a page that shows every step to this file.", dir_okay=False)
    ] = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    prediction: PredictionOption = None,
    source: SourceOption = None,
    max_nodes: MaxNodesOption = None,
    server: ServerOption = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt and print the answer as it comes.

    Asks the server at --server; without it, the one at the usual address. If there is none, or flags say which model to use,
    a server is started for this one answer, which takes a few seconds.
    """
    asked: Options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "prediction": _guess(prediction),
        "speculation": False if no_speculation else None,
        "sources": source,
        "corpora": _corpora(corpus, no_corpus),
        "max_nodes": max_nodes,
        "trace": True if trace else None,
        "use_history": False if no_history else None,
        "learn": False if no_learn else None,
    }
    text = _prompt(prompt)
    with some_server(server, _own_flags(config, model, dtype, threads, store)) as address:
        answer_to = _generate_json if as_json else functools.partial(_generate, show_sources=show_sources)
        answer = answer_to(address, text, asked)
    if trace is not None:
        _write_page(trace, [(text, answer)])


@app.command("trace")
def trace_command(
    requests: Annotated[list[str], typer.Argument(help='Prompts; "-" reads one from stdin.', show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.", dir_okay=False)] = Path("trace.html"),
    corpus: CorpusOption = None,
    no_corpus: NoCorpusOption = False,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    prediction: PredictionOption = None,
    source: SourceOption = None,
    max_nodes: MaxNodesOption = None,
    server: ServerOption = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    store: StoreOption = None,
) -> None:
    """Continue prompts and write a page that shows how, step by step: what was drafted, what it cost, what was accepted.

    The page is one file that opens offline. It has the whole text of prompts and answers in it, so only you may read it. Which
    server is asked is decided as for `generate`. Prints the page's path.
    """
    from draftloom import Client

    asked: Options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": stop,
        "prediction": _guess(prediction),
        "sources": source,
        "corpora": _corpora(corpus, no_corpus),
        "max_nodes": max_nodes,
        "trace": True,
    }
    prompts = list(map(_prompt, requests))
    own = _own_flags(config, model, dtype, threads, store)
    answers: list[tuple[str, Completion]] = []
    with some_server(server, own) as address, Client(address) as client, progress() as say:
        for i, prompt in enumerate(prompts, start=1):
            say(f"request {i} of {len(prompts)}")
            with client.stream(prompt, **asked) as stream:
                for _ in stream:
                    pass
            answers.append((prompt, _whole(stream, address)))
    _write_page(out, answers)
    print(out)


@app.command("demo")
def demo_command(
    functions: Annotated[int, typer.Option("--functions", help="How many functions to complete.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens for each.", min=1)] = 96,
    package: Annotated[str, typer.Option("--package", help="Installed package to index and complete.")] = "transformers",
    model: ModelOption = None,
    store: StoreOption = None,
) -> None:
    """Index an installed package, serve it, and complete functions it has not seen: plain and with Draftloom, in turns.

    The last line is one JSON object. Exits with 1 if any text differs.
    """
    from engine.demo import run_demo
    from engine.models import DEFAULT_MODEL

    raise typer.Exit(run_demo(functions, max_tokens, package, model or DEFAULT_MODEL, store))


def main() -> None:
    """Run the command line; errors raised on purpose end it with one line and a status."""
    keep_kernels_private()
    try:
        app(prog_name="draftloom")
    except Exception as error:
        _end(str(error), _status(error))


def keep_kernels_private() -> None:
    """Have numba keep compiled kernels in a folder where nobody else can write; it reads this when it is first imported."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = kernels_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["NUMBA_CACHE_DIR"] = str(folder)


def kernels_folder() -> Path:
    """Where compiled kernels are kept: elsewhere as soon as any of them changes, since numba looks whether a kernel's own file
    is another one, but not at the files of the kernels that it calls.
    """
    root = Path(__file__).parents[1]
    sources = sorted(file for package in ("engine", "retriever") for file in (root / package).rglob("*kernels.py"))
    version = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    return cache_root().parent / "numba" / version


def load_settings(file: Path | None, flags: dict[str, Any]) -> Config:
    """The settings of a command: flags, environment, and the file given or, if there is one, ./draftloom.toml."""
    from engine.config import FILE, load

    if file is None and Path(FILE).is_file():
        file = Path(FILE)
    return load(file, os.environ, flags)


def _memory(config: Path | None, folder: Path | None) -> tuple[Memory, Path]:
    """What is remembered in `folder` or, without one, where the settings say."""
    from engine.memory import Memory, default_root

    root = folder or load_settings(config, {}).memory.folder or default_root()
    return Memory(root), root


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Something to tell what is going on: a spinner on a terminal, a line on stderr otherwise."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


@contextmanager
def some_server(server: str | None, own: Sequence[str]) -> Iterator[str]:
    """The address to ask: `server`, else the usual one if it answers, else that of a server started with the flags `own`.

    Raises ConfigError for flags that a running server cannot follow.
    """
    from draftloom import DEFAULT_ADDRESS
    from engine.spawn import answers, own_server

    if server is not None and own:
        raise ConfigError(f"a running server has settings of its own; leave out the flag: {own[0]}")
    if server is None and not own and answers(DEFAULT_ADDRESS):
        server = DEFAULT_ADDRESS
    with ExitStack() as stack:
        if server is None:
            with progress() as say:
                say("starting a server for this answer")
                server = stack.enter_context(own_server(own))
        yield server


def _own_flags(config: Path | None, model: str | None, dtype: str | None, threads: int | None, store: Path | None) -> list[str]:
    return _words({"--config": config, "--model": model, "--dtype": dtype, "--threads": threads, "--store": store})


def _words(flags: Mapping[str, object]) -> list[str]:
    """The words of a command line for those that are set."""
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def _prompt(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


def _guess(file: Path | None) -> str | None:
    return file.read_text(encoding="utf-8", errors="replace") if file else None


def _corpora(named: list[str] | None, none: bool) -> Sequence[str] | None:
    """What the client's option says: names, () for none, None for the server's default ones. Raises ConfigError for both."""
    if named and none:
        raise ConfigError(f"--no-corpus and --corpus {named[0]} contradict one another; leave one out")
    return () if none else named or None


def _generate(server: str, prompt: str, asked: Options, show_sources: bool) -> Completion:
    """Stream an answer to stdout, and what it cost to stderr. Ctrl-C ends the request on the server, too."""
    from rich.console import Console

    from draftloom import Client
    from engine.screen import Painter, legend, source_table

    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    painter = Painter(out) if show_sources and out.is_terminal else None
    with Client(server) as client:
        began = time.monotonic()
        with client.stream(prompt, **asked) as stream:
            for chunk in stream:
                if painter:
                    painter.add(chunk.text, chunk.sizes, chunk.sources)
                else:
                    print(chunk.text, end="", flush=True)
        seconds = time.monotonic() - began
    answer = _whole(stream, server)
    if out.is_terminal:
        print()
    costs = answer.statistics
    for warning in costs.warnings:
        err.print(f"warning: {warning}", markup=False, soft_wrap=True)
    decoding = max(seconds - costs.prefill_seconds, 1e-9)
    num_tokens = answer.usage.completion_tokens
    err.print(
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / decoding:.1f} tokens/s while decoding, "
        f"{costs.tokens_per_step:.2f} tokens per step",
        style="dim",
    )
    if show_sources:
        err.print(source_table(costs.sources, num_tokens))
        if painter:
            err.print(legend(source.name for source in costs.sources))
    return answer


def _whole(stream: Stream, server: str) -> Completion:
    """The answer of a stream that has been read to its end."""
    answer = stream.completion
    if answer is None:
        raise EngineError(f"the answer broke off without a last message: {server}; look at the server's log")
    return answer


def _generate_json(server: str, prompt: str, asked: Options) -> Completion:
    """Print a whole answer as one JSON object. Bytes of tokens that are no text become U+FFFD."""
    from draftloom import Client

    with Client(server) as client:
        answer = client.generate(prompt, **asked)
    print(json.dumps(asdict(answer), ensure_ascii=False, default=lambda value: value.decode(errors="replace")))
    return answer


def _write_page(file: Path, answers: Sequence[tuple[str, Completion]]) -> None:
    """Write the page of traced answers, for its owner's eyes. Raises ConfigError where it cannot be written."""
    from engine.trace.page import Traced, page

    try:
        text = page([Traced(prompt, answer) for prompt, answer in answers])
    except ValueError as error:
        raise EngineError(str(error)) from None
    try:
        with open(file, "w", encoding="utf-8", opener=functools.partial(os.open, mode=0o600)) as out:
            os.fchmod(out.fileno(), 0o600)  # a file that was there may be open to others
            out.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write the page: {file}: {error.strerror}; name another file") from None


def _status(error: Exception) -> int:
    """The exit status for an error raised on purpose. Any other is raised again: it is a mistake of ours, and shows where."""
    if isinstance(error, ConfigError | InvalidRequest):
        return USAGE
    if isinstance(error, EngineError):
        return FAILED
    client = sys.modules.get("draftloom")
    if client is not None and isinstance(error, client.DraftloomError):
        return USAGE if isinstance(error, client.InvalidRequest) else FAILED
    raise error


def _end(message: str, status: int) -> NoReturn:
    print(f"draftloom: {message}", file=sys.stderr)
    sys.exit(status)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("draftloom")
    except PackageNotFoundError:
        return "(not installed, run from its source tree)"


if __name__ == "__main__":
    main()
