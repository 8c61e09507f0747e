"""Puts the parts together: settings in, a running engine out. The one module that knows everyone."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from corpora.catalog import DEFAULT_TENANT, default_store
from engine import kernels
from engine.acceptance import STOP
from engine.calibration import Calibration
from engine.config import Config
from engine.datastores import Checks, Corpora
from engine.drafters import DRAFTERS, Drafter, DraftRequest, history, recycle, resume
from engine.drafters.panel import Panel
from engine.errors import ConfigError, CorpusUnusable, InvalidRequest, NotFound, Unavailable
from engine.loop import Times, decode
from engine.memory import DAY, Memory, Tenants, default_root
from engine.models import cache_root, tokenizer_folder
from engine.prior import prior
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
from engine.server.serve import GrpcServer, create_server
from engine.session import Session, Step
from engine.target import SequenceRequest, Target, TargetInfo, TargetStatus, process, remote
from engine.target.fleet import Fleet, Place
from engine.text import StreamDecoder, Tokenizer
from engine.trace.recorder import Recorder
from retriever import kernels as retriever_kernels
from retriever.datastore import Datastore
from retriever.history import kernels as history_kernels

log = logging.getLogger("draftloom.engine")

_LONG_TEXT = 4096
"""Characters from which on encoding takes longer than handing it to a thread: some milliseconds."""

_CONNECT_SECONDS = 30.0
"""How long a server waits at start for one of the workers that it is told of."""

_SAVE_SECONDS = 300.0
"""What a crash may lose of what was learned."""

_LOOK_SECONDS = 6 * 3600.0
"""How often what is on disk is looked through for what is too old."""


def make_drafters(names: Sequence[str]) -> dict[str, Drafter]:
    """The drafters of these names, each imported only now. Raises ConfigError for a name that does not exist."""
    made: dict[str, Drafter] = {}
    for name in names:
        if name not in DRAFTERS:
            raise ConfigError(f"no such source: {name}; there are {', '.join(DRAFTERS)}")
        module, _, attribute = DRAFTERS[name].partition(":")
        made[name] = getattr(import_module(module), attribute)()
    return made


class Engine:
    """Serves generation requests with one target; see engine.requests.Engine.

    `checks` has the checksums of large files of corpora compared in the background; see Corpora.
    """

    def __init__(self, config: Config, target: Target, tokenizer: Tokenizer, *, checks: Checks | None = None) -> None:
        if tokenizer.fingerprint != target.info.fingerprint:
            raise ConfigError(
                f"the worker's tokenizer is not that of {config.model.name}: {target.info.fingerprint} and "
                f"{tokenizer.fingerprint}; name the model that the worker runs"
            )
        self.tokenizer = tokenizer
        self._config = config
        self._target = target
        self.fleet: Fleet | None = None
        """The target, where it is one whose workers may come and go."""
        self._drafters = make_drafters(config.speculation.sources)
        self._corpora = Corpora(config.corpora.store or default_store(), target.info, checks=checks)
        self._tenants = _tenants(config)
        self._memory_key = f"{target.info.model}@{target.info.fingerprint[:12]}"
        self._warned: set[str] = set()

    @property
    def info(self) -> TargetInfo:
        """The target's model."""
        return self._target.info

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the drafters this server runs."""
        return tuple(self._drafters)

    async def status(self) -> TargetStatus:
        """How the workers stand, all together."""
        return await self._target.status()

    async def corpora(self, tenant: str) -> list[CorpusInfo]:
        """All corpora of a tenant, by name."""
        return await self._corpora.list(tenant)

    async def follow_corpora(self) -> None:
        """Take up new versions of the corpora in use, and let removed ones go, for ever."""
        await self._corpora.follow()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See engine.requests.Engine."""
        request.validate(self.info.vocab_size)
        if isinstance(request.prompt, str):
            prompt = await _encode(self.tokenizer.encode_prompt, request.prompt)
        else:
            prompt = request.prompt.astype(np.int32)
        if not len(prompt):
            raise InvalidRequest("prompt is empty once tokenized: give some text", "prompt")
        async with AsyncExitStack() as stack:
            drafters, max_nodes = self._choose_drafters(request)
            wanted = self._sequence_request(request, prompt, drafters)
            stores, warnings = await self._pin(request, drafters, stack)
            prediction = await _encode(self.tokenizer.encode, request.speculation.prediction if drafters else "")
            began = time.perf_counter()
            sequence = await stack.enter_async_context(self._target.open(wanted))
            prefill, num_reused = time.perf_counter() - began, sequence.num_reused
            recorder = Recorder(sequence, self.tokenizer) if request.speculation.trace else None
            memory = await self._tenants.open(self._memory_key, request.tenant)
            use_history, learn = self._remembering(request)
            draft_request = DraftRequest(
                tenant=request.tenant,
                model=self.info.model,
                context=prompt,
                corpora=stores,
                prediction=prediction,
                tokenizer=self.tokenizer,
                memory=memory,
                use_history=use_history,
                learn=learn,
            )
            calibration = memory.state("calibration", _begin_calibration)
            if not learn:
                calibration = _begin_calibration(calibration.arrays())
            deadline = self._config.speculation.deadline_ms / 1000
            panel = stack.enter_context(
                Panel(drafters, draft_request, self.info.vocab_size, deadline=deadline)
            )
            session = Session(prompt, panel.labels, calibration, max_nodes)
            reader = _Reader(StreamDecoder(self.tokenizer, request.stop, request.include_stop), session, request)
            times = Times()
            steps = await stack.enter_async_context(aclosing(decode(session, panel, recorder or sequence, times)))
            drafting = 0.0
            async for step, result in steps:
                text, step = reader.read(step)
                trace = recorder.last(len(step.tokens), times.draft - drafting) if recorder else None
                drafting = times.draft
                logprobs = None if result.logprobs is None else TokenLogprob.of(result.logprobs)[: len(step.tokens)]
                tokens = tuple(step.tokens.tolist())
                sizes = tuple(len(self.tokenizer.text_bytes(token)) for token in tokens)
                yield Chunk(text, tokens, step.masks, logprobs, panel.labels, sizes, trace)
            yield Final(
                finish=session.finish,
                prompt_tokens=len(prompt),
                completion_tokens=session.num_emitted,
                seed=request.sampling.seed,
                stop_string=reader.stop_string,
                stop_token=reader.stop_token,
                statistics=_statistics(session, panel, times, prefill, num_reused, stores, warnings + panel.problems),
            )

    async def check_default_corpora(self) -> None:
        """Open them, so that the first request need not; one that cannot be used is a warning in the log."""
        for name in self._config.corpora.default:
            try:
                self._corpora.release(await self._corpora.acquire(name, DEFAULT_TENANT))
            except (NotFound, CorpusUnusable) as error:
                self._warn_once(f"serving without corpus {name}: {error}")

    async def keep_memory(self) -> None:
        """Save what was learned every few minutes, and forget what is too old, for ever."""
        next_look = 0.0
        while True:
            if time.monotonic() >= next_look:
                await self._tenants.forget_older({"history": history.without_old, "recycle": recycle.without_old})
                next_look = time.monotonic() + _LOOK_SECONDS
            await asyncio.sleep(_SAVE_SECONDS)
            await self._tenants.save()

    async def close(self) -> None:
        """Save what was learned and close the corpora; the target belongs to whoever made it."""
        await self._tenants.save()
        self._corpora.close()

    def _sequence_request(
        self, request: GenerationRequest, prompt: NDArray[np.int32], drafters: Sequence[Drafter]
    ) -> SequenceRequest:
        """What the target is asked: the text, and as much feedback as the drafters want."""
        top_k = max((drafter.top_k for drafter in drafters), default=0)
        return SequenceRequest(
            prompt=prompt,
            sampling=request.sampling,
            limits=request.limits(self.info.eos_ids),
            tenant=request.tenant,
            num_logprobs=request.num_logprobs,
            feedback_top_k=top_k,
            feedback_prompt=self._config.speculation.prompt_rows if top_k else 0,
        )

    def _remembering(self, request: GenerationRequest) -> tuple[bool, bool]:
        """Whether the request draws on history, and whether it is learned from."""
        options, enabled = request.speculation, self._config.memory.enabled
        return (
            enabled if options.use_history is None else options.use_history,
            enabled if options.learn is None else options.learn,
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    def _choose_drafters(self, request: GenerationRequest) -> tuple[list[Drafter], int]:
        """The drafters for a request and its most nodes. Raises InvalidRequest for what this server does not do."""
        options, settings = request.speculation, self._config.speculation
        if options.trace and not settings.trace:
            raise InvalidRequest("this server tells nobody how it drafts; leave it out", "speculation.trace")
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

    async def _pin(
        self, request: GenerationRequest, drafters: Sequence[Drafter], stack: AsyncExitStack
    ) -> tuple[dict[str, Datastore], list[str]]:
        """The datastores a request drafts from, released with `stack`, and warnings for those it must do without.

        Those it names are looked at even if nothing is drafted. Raises NotFound for one that the request names and that is not
        there, and CorpusUnusable or NotFound for any if it requires them.
        """
        options = request.speculation
        used = any(drafter.name == "corpus" for drafter in drafters)
        names = options.corpora
        if names is None:
            names = self._config.corpora.default if used or options.require_corpus else ()
        stores: dict[str, Datastore] = {}
        warnings: list[str] = []
        for name in names:
            try:
                store = await self._corpora.acquire(name, request.tenant)
            except (NotFound, CorpusUnusable) as error:
                if options.require_corpus or (options.corpora is not None and isinstance(error, NotFound)):
                    raise
                warnings.append(f"served without corpus {name}: {error}")
                self._warn_once(f"serving without corpus {name}: {error}")
                continue
            stack.callback(self._corpora.release, store)
            if used:
                stores[name] = store
        return stores, warnings


def _begin_calibration(saved: Mapping[str, NDArray[np.float64]] | None) -> Calibration:
    """What was learned of this model and tenant, on top of what is shipped."""
    return Calibration(saved, prior())


async def _encode(encode: Callable[[str], NDArray[np.int32]], text: str) -> NDArray[np.int32]:
    """The text's ids; a long one's are found on a thread, while the event loop serves others."""
    return encode(text) if len(text) < _LONG_TEXT else await asyncio.to_thread(encode, text)


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
    num_reused: int,
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
            trust=float(session.trust[s]),
            held=int(tally.held[s]),
            held_alone=int(tally.alone[s]),
        )
        for s, (label, record) in enumerate(zip(panel.labels, panel.records, strict=True))
    )
    return GenerationStats(
        sources=sources,
        num_steps=tally.num_steps,
        num_nodes=tally.num_verified,
        num_accepted=tally.num_accepted,
        draft_seconds=times.draft,
        step_seconds=times.step,
        prefill_seconds=prefill,
        corpora=tuple((name, store.version) for name, store in stores.items()),
        warnings=tuple(warnings),
        num_expected=tally.expected,
        calibration_error=tally.calibration_error,
        log_loss=tally.log_loss / max(tally.num_judged, 1),
        prefix_tokens_reused=num_reused,
    )


def _tenants(config: Config) -> Tenants:
    """What is remembered, as the settings have it."""
    settings = config.memory
    return Tenants(
        Memory((settings.folder or default_root()) if settings.enabled else None),
        state_bytes=settings.tenant_bytes,
        total_bytes=settings.total_bytes,
        retention=settings.retention_days * DAY,
    )


def warm_kernels() -> None:
    """Compile what drafting runs, before a request has to wait for it: some seconds the first time, then read from a cache."""
    for warmup in (kernels.warmup, retriever_kernels.warmup, recycle.warmup, resume.warmup, history_kernels.warmup):
        warmup()


@asynccontextmanager
async def open_engine(config: Config) -> AsyncIterator[Engine]:
    """An engine ready to serve: the worker running (as a process of its own, or the one at `model.worker`), kernels compiled.

    Raises ConfigError, ModelError, Unavailable. Everything is ended when the context is left.
    """
    async with AsyncExitStack() as stack:
        tokenizer = Tokenizer.load(tokenizer_folder(config.model.name))
        fleet = Fleet(_places(config), patience=config.model.worker_patience if config.model.worker else process.START_SECONDS)
        stack.push_async_callback(fleet.close)
        await fleet.start(_CONNECT_SECONDS if config.model.worker else process.START_SECONDS)
        await asyncio.to_thread(warm_kernels)
        engine = Engine(config, fleet, tokenizer, checks=Checks(cache_root().parent / "checks"))
        engine.fleet = fleet
        stack.push_async_callback(engine.close)
        await engine.check_default_corpora()
        for upkeep in (engine.follow_corpora(), engine.keep_memory()):
            stack.callback(asyncio.ensure_future(upkeep).cancel)
        yield engine


def _places(config: Config) -> list[Place]:
    """Where the workers are: at the addresses of the settings, else in a process of our own. Raises ConfigError."""
    model = config.model
    if not model.worker:
        return [process.place(_worker_arguments(config), model.worker_silence)]
    files = (model.worker_ca, model.worker_cert, model.worker_key)
    encrypted = model.worker_tls or any(files)
    credentials = remote.tls(*files) if encrypted else None
    return [remote.place(address, credentials, model.worker_silence) for address in model.worker]


def _worker_arguments(config: Config) -> list[str]:
    model = config.model
    args = ["--model", model.name, "--device", model.device, "--dtype", model.dtype, "--kv-memory", str(int(model.kv_memory))]
    return args if model.threads is None else [*args, "--threads", str(model.threads)]


class Entrance:
    """The engine as the services see it: there from the start, and UNAVAILABLE until it is open. See engine.requests.Engine."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    @property
    def info(self) -> TargetInfo:
        """See engine.requests.Engine."""
        return self._opened().info

    @property
    def tokenizer(self) -> Tokenizer:
        """See engine.requests.Engine."""
        return self._opened().tokenizer

    @property
    def sources(self) -> tuple[str, ...]:
        """See engine.requests.Engine."""
        return self._opened().sources

    async def status(self) -> TargetStatus:
        """See engine.requests.Engine."""
        return await self._opened().status()

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See engine.requests.Engine."""
        return self._opened().generate(request)

    async def corpora(self, tenant: str) -> list[CorpusInfo]:
        """See engine.requests.Engine."""
        return await self._opened().corpora(tenant)

    def _opened(self) -> Engine:
        if self.engine is None:
            raise Unavailable("the model is still being loaded; try again")
        return self.engine


def serve(config: Config) -> int:
    """Run a server until SIGTERM or Ctrl-C. Returns the exit code: 0 after a clean end, 1 if the workers are gone for good.

    It listens at once, and is NOT_SERVING while it has no worker. Raises ConfigError, ModelError, Unavailable if it cannot be.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("draftloom").setLevel(logging.INFO)
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    _check_port(config)
    entrance = Entrance()
    server = create_server(entrance, config.address)
    await server.start(ready=False)
    serving = asyncio.create_task(server.run_until_signal(config.server.drain_seconds))
    running = asyncio.create_task(_run(config, entrance, server))
    try:
        await asyncio.wait([serving, running], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return 0
        running.result()
        log.error("no worker is left; the server ends too")
        return 1
    finally:
        if not serving.done():
            await server.drain(0)
        for task in (serving, running):
            task.cancel()
        await asyncio.gather(serving, running, return_exceptions=True)


async def _run(config: Config, entrance: Entrance, server: GrpcServer) -> None:
    """Open the engine and say, as long as there are workers, whether it serves. Returns when there will be none any more."""
    async with open_engine(config) as engine:
        entrance.engine = engine
        assert engine.fleet is not None
        said = False
        async for ready in engine.fleet.watch():
            await server.set_ready(ready)
            if not said:
                model = f"{engine.info.model} ({engine.info.dtype})"
                print(f"draftloom: serving {model} on {server.address}", file=sys.stderr, flush=True)
                said = True


def _check_port(config: Config) -> None:
    """Raise ConfigError for a port that cannot be had, before a model is loaded for nothing; whoever takes it later loses."""
    host, port = config.server.host, config.server.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on: {config.address}: {error.strerror}; choose another with server.port"
            ) from None
