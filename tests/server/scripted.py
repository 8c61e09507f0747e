"""A scripted engine behind a real server: what the tests of server and client talk to."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager

from tokenizers import pre_tokenizers

from engine.acceptance import LENGTH
from engine.requests import (
    Chunk,
    CorpusInfo,
    Final,
    GenerationEvent,
    GenerationRequest,
    GenerationStats,
    SourceStats,
    StepTrace,
    TokenLogprob,
    TraceNode,
)
from engine.server.serve import GrpcServer, create_server
from engine.target import TargetInfo, TargetStatus
from engine.text import Tokenizer

CONTROL = "<|end|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and <|end|>, which is 256."""
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    control = {"id": 256, "content": CONTROL, "special": True, "normalized": False}
    control |= {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition = {
        "version": "1.0",
        "added_tokens": [control],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }
    return Tokenizer(json.dumps(definition), eos_ids=[256], chat_template=TEMPLATE)


TOKENIZER = byte_tokenizer()


class ScriptedEngine:
    """Answers a prompt with its own bytes, over and over, three tokens a step, until max_tokens.

    `pause` seconds pass before every step, and `fail` is raised after the first one. `num_open` counts requests being served,
    `num_steps` the steps of all, and `requests` has what was asked.
    """

    def __init__(self, pause: float = 0.0, fail: Exception | None = None) -> None:
        self.info = TargetInfo("scripted", TOKENIZER.fingerprint, 257, 4096, (256,), "float32", True)
        self.tokenizer = TOKENIZER
        self.sources = ("corpus", "prompt")
        self.pause = pause
        self.fail = fail
        self.num_open = 0
        self.num_steps = 0
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            ids = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
            answer = [int(ids[i % len(ids)]) for i in range(request.max_tokens)]
            num_steps = 0
            for begin in range(0, len(answer), 3):
                await asyncio.sleep(self.pause)
                tokens = tuple(answer[begin : begin + 3])
                num_steps += 1
                self.num_steps += 1
                logprobs = None
                if request.num_logprobs >= 0:
                    logprobs = tuple(TokenLogprob(-0.5, ((t, -0.5),) * min(request.num_logprobs, 1)) for t in tokens)
                masks = (0b01, 0b11, 0b00)[: len(tokens)]
                sizes = tuple(len(self.tokenizer.text_bytes(token)) for token in tokens)
                trace = self.trace(int(ids[-1]), tokens) if request.speculation.trace else None
                yield Chunk(self.tokenizer.decode(tokens), tokens, masks, logprobs, ("corpus:code", "prompt"), sizes, trace)
                if self.fail is not None:
                    raise self.fail
            sources = (SourceStats("corpus:code", 9, 4, 2, 1, 0, 0.25, 0.5, 6, 3), SourceStats("prompt", 5, 3))
            stats = GenerationStats(
                sources, num_steps, 9, 4, 0.5, 1.5, 0.75, (("code", "v7"),), ("corpus docs is damaged",), prefix_tokens_reused=2
            )
            yield Final(LENGTH, len(ids), len(answer), request.sampling.seed, statistics=stats)
        finally:
            self.num_open -= 1

    def trace(self, root: int, tokens: tuple[int, ...]) -> StepTrace:
        """All tokens but the last as a drafted chain, with a wrong candidate beside each, of which only the first had a row."""
        nodes = [TraceNode(root, self.tokenizer.token_bytes(root), -1, 1.0, 0, True, False)]
        parent = 0
        for i, token in enumerate(tokens[:-1]):
            nodes.append(TraceNode(token, self.tokenizer.token_bytes(token), parent, 0.5**i * 0.75, 0b01, True, True))
            nodes.append(TraceNode(256, CONTROL.encode(), parent, 0.5**i * 0.25, 0b11, i == 0, False))
            parent = len(nodes) - 2
        texts = tuple(map(self.tokenizer.token_bytes, tokens))
        return StepTrace(tuple(nodes), texts, 2, 0.0005, 0.07, 0.0625, ((1, 0.05), (4, 0.0625)))

    async def status(self) -> TargetStatus:
        return TargetStatus(2, self.num_open, 3, 40, 17, 2**40, 500, 128, 6)

    async def corpora(self, tenant: str) -> list[CorpusInfo]:
        return [
            CorpusInfo("code", "v7", 3, 1234, self.info.fingerprint),
            CorpusInfo("docs", "v1", 0, 0, "other", usable=False, problem=f"built for another tokenizer; tenant {tenant}"),
        ]


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[GrpcServer]:
    """A server on a free loopback port, in the running loop."""
    server = create_server(engine, "127.0.0.1:0")
    await server.start()
    try:
        yield server
    finally:
        await server.drain(0)


@contextmanager
def serving_in_thread(engine: ScriptedEngine) -> Iterator[str]:
    """The address of a server that runs in a loop of its own, for blocking clients."""
    started: Future[str] = Future()
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        try:
            async with serving(engine) as server:
                started.set_result(server.address)
                await stopped.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        yield started.result()
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition()` becomes true within `seconds`."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return condition()
