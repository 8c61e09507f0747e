"""Puts the parts together: settings in, a running engine out. The one module that knows everyone."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from corpora.catalog import Catalog, default_store
from corpora.errors import CatalogError, CorpusNotFound
from engine import kernels
from engine.acceptance import STOP
from engine.calibration import Calibration
from engine.config import Config
from engine.drafters import DRAFTERS, Drafter, DraftRequest
from engine.drafters.panel import Panel
from engine.errors import ConfigError, CorpusUnusable, InvalidRequest, NotFound
from engine.loop import Times, decode
from engine.models import cache_root, tokenizer_folder
from engine.requests import (
    Chunk,
    CorpusInfo,
    Final,
    GenerationEvent,
    GenerationRequest,
    GenerationStats,
    SourceStats,
    TokenLogprob,
)
from engine.server.serve import create_server
from engine.session import Session, Step
from engine.target import SequenceRequest, Target, TargetInfo
from engine.target.process import start_worker
from engine.target.remote import RemoteTarget
from engine.text import StreamDecoder, Tokenizer
from retriever import kernels as retriever_kernels
from retriever.datastore import Datastore
from retriever.errors import RetrieverError

log = logging.getLogger("draftloom.engine")


def make_drafters(names: Sequence[str]) -> dict[str, Drafter]:
    """The drafters of these names, each imported only now. Raises ConfigError for a name that does not exist."""
    made: dict[str, Drafter] = {}
    for name in names:
        if name not in DRAFTERS:
            raise ConfigError(f"no such source: {name}; there are {', '.join(DRAFTERS)}")
        module, _, attribute = DRAFTERS[name].partition(":")
        made[name] = getattr(import_module(module), attribute)()
    return made


@dataclass
class _Open:
    """A datastore in use: closed when the last request leaves it and a newer version is active."""

    store: Datastore
    users: int = 0


class Corpora:
    """The datastores of a store, opened when first asked for, pinned while a request uses them."""

    def __init__(self, root: Path, info: TargetInfo) -> None:
        self._catalog = Catalog(root, read_only=True)
        self._info = info
        self._open: dict[tuple[str, str], _Open] = {}

    def acquire(self, name: str, tenant: str) -> Datastore:
        """The active version of a corpus. Raises NotFound, CorpusUnusable. Every acquired one is released."""
        try:
            corpus = self._catalog.get(name, tenant)
        except CorpusNotFound as error:
            raise NotFound(f"no such corpus: {name}; `draftloom corpus list` names those there are") from error
        except CatalogError as error:
            raise CorpusUnusable(f"the catalog of corpora cannot be read: {error}") from error
        key = (name, corpus.active.id)
        if key not in self._open:
            try:
                store = Datastore.open(
                    self._catalog.version_path(*key),
                    self._info.fingerprint,
                    max(self._info.vocab_size, corpus.active.vocab_size),
                )
            except (RetrieverError, OSError) as error:
                raise CorpusUnusable(f"corpus {name} cannot be used: {error}") from error
            self._open[key] = _Open(store)
            self._drop_older(name, corpus.active.id)
        opened = self._open[key]
        opened.users += 1
        return opened.store

    def release(self, store: Datastore) -> None:
        """The request is done with it."""
        opened = self._open[(store.name, store.version)]
        opened.users -= 1
        if not opened.users and any(name == store.name and version > store.version for name, version in self._open):
            del self._open[(store.name, store.version)]
            store.close()

    def list(self, tenant: str) -> list[CorpusInfo]:
        """All corpora of a tenant and whether this model can draft from them."""
        infos = []
        for corpus in self._catalog.list(tenant):
            problem = ""
            try:
                self.release(self.acquire(corpus.name, tenant))
            except CorpusUnusable as error:
                problem = str(error)
            active = corpus.active
            infos.append(
                CorpusInfo(
                    corpus.name, active.id, active.num_documents, active.num_tokens, active.fingerprint, not problem, problem
                )
            )
        return infos

    def close(self) -> None:
        """Close everything; for the end."""
        for opened in self._open.values():
            opened.store.close()
        self._open.clear()

    def _drop_older(self, name: str, active: str) -> None:
        for key, opened in list(self._open.items()):
            if key[0] == name and key[1] != active and not opened.users:
                del self._open[key]
                opened.store.close()


class Engine:
    """Serves generation requests with one target; see engine.requests.Engine."""

    def __init__(self, config: Config, target: Target, tokenizer: Tokenizer) -> None:
        if tokenizer.fingerprint != target.info.fingerprint:
            raise ConfigError(
                f"the worker's tokenizer is not that of {config.model.name}: {target.info.fingerprint} and "
                f"{tokenizer.fingerprint}; name the model that the worker runs"
            )
        self.tokenizer = tokenizer
        self._config = config
        self._target = target
        self.worker_ended: asyncio.Future[int] | None = None
        """Becomes the exit code of the worker process, if the engine's worker is one, should it end."""
        self._drafters = make_drafters(config.speculation.sources)
        self._corpora = Corpora(config.corpora.store or default_store(), target.info)
        self._calibrations: dict[str, Calibration] = {}

    @property
    def info(self) -> TargetInfo:
        """The target's model."""
        return self._target.info

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the drafters this server runs."""
        return tuple(self._drafters)

    def corpora(self, tenant: str) -> list[CorpusInfo]:
        """All corpora of a tenant, by name."""
        return self._corpora.list(tenant)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See engine.requests.Engine."""
        request.validate(self.info.vocab_size)
        prompt = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt.astype(np.int32)
        if not len(prompt):
            raise InvalidRequest("prompt is empty once tokenized: give some text", "prompt")
        wanted = SequenceRequest(
            prompt, request.sampling, request.limits(self.info.eos_ids), request.tenant, request.num_logprobs
        )
        async with AsyncExitStack() as stack:
            drafters, max_nodes = self._choose_drafters(request)
            stores, warnings = self._pin(request, drafters, stack)
            began = time.perf_counter()
            sequence = await stack.enter_async_context(self._target.open(wanted))
            prefill = time.perf_counter() - began
            prediction = self.tokenizer.encode(request.speculation.prediction) if drafters else np.zeros(0, np.int32)
            draft_request = DraftRequest(request.tenant, self.info.model, prompt, stores, prediction, self.tokenizer)
            panel = stack.enter_context(
                Panel(
                    drafters,
                    draft_request,
                    self.info.vocab_size,
                    budget=max_nodes,
                    deadline=self._config.speculation.deadline_ms / 1000,
                )
            )
            session = Session(prompt, panel.labels, self._calibrations.setdefault(request.tenant, Calibration()), max_nodes)
            reader = _Reader(StreamDecoder(self.tokenizer, request.stop, request.include_stop), session, request)
            times = Times()
            async for step, result in decode(session, panel, sequence, times):
                text, step = reader.read(step)
                logprobs = None if result.logprobs is None else TokenLogprob.of(result.logprobs)[: len(step.tokens)]
                yield Chunk(text, tuple(step.tokens.tolist()), step.masks, logprobs, panel.labels)
            yield Final(
                finish=session.finish,
                prompt_tokens=len(prompt),
                completion_tokens=session.num_emitted,
                seed=request.sampling.seed,
                stop_string=reader.stop_string,
                stop_token=reader.stop_token,
                statistics=_statistics(session, panel, times, prefill, stores, warnings + panel.problems),
            )

    async def close(self) -> None:
        """Close the corpora; the target belongs to whoever made it."""
        self._corpora.close()

    def _choose_drafters(self, request: GenerationRequest) -> tuple[list[Drafter], int]:
        """The drafters for a request and its most nodes. Raises InvalidRequest for a source this server does not run."""
        options, settings = request.speculation, self._config.speculation
        names = self.sources if options.sources is None else options.sources
        unknown = [name for name in names if name not in self._drafters]
        if unknown:
            raise InvalidRequest(
                f"no such source here: {unknown[0]}; this server runs {', '.join(self.sources) or 'none'}",
                "speculation.sources",
            )
        max_nodes = settings.max_nodes if options.max_nodes is None else min(options.max_nodes, settings.max_nodes)
        if not (settings.enabled and options.enabled and max_nodes):
            return [], 0
        return [self._drafters[name] for name in names], max_nodes

    def _pin(
        self, request: GenerationRequest, drafters: Sequence[Drafter], stack: AsyncExitStack
    ) -> tuple[dict[str, Datastore], list[str]]:
        """The datastores a request drafts from, released with `stack`, and warnings for those it must do without.

        Raises NotFound for a corpus that the request names and that is not there, CorpusUnusable if it requires them.
        """
        options = request.speculation
        named = options.corpora is not None
        names = self._config.corpora.default if options.corpora is None else options.corpora
        stores: dict[str, Datastore] = {}
        warnings: list[str] = []
        used = any(drafter.name == "corpus" for drafter in drafters)
        for name in names:
            try:
                store = self._corpora.acquire(name, request.tenant)
            except (NotFound, CorpusUnusable) as error:
                if options.require_corpus or (named and isinstance(error, NotFound)):
                    raise
                log.warning("serving without corpus %s: %s", name, error)
                warnings.append(f"served without corpus {name}: {error}")
                continue
            stack.callback(self._corpora.release, store)
            if used:
                stores[name] = store
        return stores, warnings


class _Reader:
    """Turns a session's steps into text, and cuts the session where a stop string ends it."""

    def __init__(self, decoder: StreamDecoder, session: Session, request: GenerationRequest) -> None:
        self.stop_string: str | None = None
        self.stop_token: int | None = None
        self._decoder = decoder
        self._session = session
        self._request = request

    def read(self, step: Step) -> tuple[str, Step]:
        """The text that `step` makes certain, and the step, cut if a stop string ended it."""
        first = self._session.num_emitted - len(step.tokens)
        parts: list[str] = []
        for i, token in enumerate(step.tokens.tolist()):
            if step.finish == STOP and i == len(step.tokens) - 1:
                self.stop_token = token
                if not self._request.include_stop:
                    break
            piece = self._decoder.push(token, may_stop=first + i + 1 > self._request.min_tokens)
            parts.append(piece.text)
            if piece.stopped:
                self.stop_string, self.stop_token = piece.stop_string, None
                return "".join(parts), self._session.cut(i + 1, STOP)
        if step.finish:
            parts.append(self._decoder.finish())
        return "".join(parts), step


def _statistics(
    session: Session,
    panel: Panel,
    times: Times,
    prefill: float,
    stores: dict[str, Datastore],
    warnings: list[str],
) -> GenerationStats:
    tally = session.tally
    sources = tuple(
        SourceStats(
            name=label,
            proposed=int(tally.proposed[s]),
            accepted=int(tally.accepted[s]),
            unique=int(tally.unique[s]),
            errors=record.errors,
            late=record.late,
            seconds=record.seconds,
        )
        for s, (label, record) in enumerate(zip(panel.labels, panel.records, strict=True))
    )
    return GenerationStats(
        sources=sources,
        num_steps=tally.num_steps,
        num_nodes=tally.num_verified,
        num_accepted=tally.num_accepted,
        draft_seconds=times.draft + times.commit,
        step_seconds=times.step,
        prefill_seconds=prefill,
        corpora=tuple((name, store.version) for name, store in stores.items()),
        warnings=tuple(warnings),
    )


def prepare_process() -> None:
    """What must hold before anything is compiled: numba's cache in a folder of the user's own, where nobody else can write."""
    folder = cache_root().parent / "numba"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))


@asynccontextmanager
async def open_engine(config: Config) -> AsyncIterator[Engine]:
    """An engine ready to serve: the worker running (as a process of its own, or the one at `model.worker`), kernels compiled.

    Raises ConfigError, ModelError, Unavailable. Everything is ended when the context is left.
    """
    async with AsyncExitStack() as stack:
        tokenizer = Tokenizer.load(tokenizer_folder(config.model.name))
        if config.model.worker:
            target = await RemoteTarget.connect(config.model.worker)
            stack.push_async_callback(target.close)
            ended = None
        else:
            worker = await start_worker(_worker_arguments(config))
            stack.push_async_callback(worker.close)
            target = worker.target
            ended = asyncio.ensure_future(worker.wait())
            stack.callback(ended.cancel)
        kernels.warmup()
        retriever_kernels.warmup()
        engine = Engine(config, target, tokenizer)
        engine.worker_ended = ended
        stack.push_async_callback(engine.close)
        yield engine


def _worker_arguments(config: Config) -> list[str]:
    model = config.model
    args = ["--model", model.name, "--dtype", model.dtype, "--kv-memory", str(int(model.kv_memory))]
    return args if model.threads is None else [*args, "--threads", str(model.threads)]


def serve(config: Config) -> int:
    """Run a server until SIGTERM or Ctrl-C. Returns the exit code: 0 after a clean end, 1 if the worker died.

    Raises ConfigError, ModelError, Unavailable before it listens.
    """
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    async with open_engine(config) as engine:
        server = create_server(engine, config.address)
        await server.start()
        print(f"draftloom: serving {engine.info.model} ({engine.info.dtype}) on {server.address}", file=sys.stderr, flush=True)
        serving = asyncio.create_task(server.run_until_signal(config.server.drain_seconds))
        waiting: list[asyncio.Future[Any]] = [serving]
        if engine.worker_ended is not None:
            waiting.append(engine.worker_ended)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return 0
        log.error("the worker ended unexpectedly; the server ends too")
        await server.drain(0)
        serving.cancel()
        return 1
