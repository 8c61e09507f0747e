"""The engine as a whole over a target without weights: what a caller gets is what decoding one token at a time would give."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from corpora.catalog import Catalog, Version
from engine.acceptance import SamplingParams
from engine.app import Engine, make_drafters
from engine.config import Config, CorporaSettings, SpeculationSettings
from engine.datastores import Checks, Corpora
from engine.drafters import DRAFTERS, Drafting, DraftRequest
from engine.errors import ConfigError, CorpusUnusable, InvalidRequest, NotFound, PromptTooLong, WorkerLost
from engine.memory import Memory, default_root
from engine.requests import Chunk, Final, GenerationRequest, SpeculationOptions, TokenLogprob
from engine.target import SequenceRequest, StepResult
from engine.target.fake import FakeSequence, FakeTarget
from engine.text import Tokenizer
from engine.tree import CandidateTree
from retriever import datastore
from retriever import format as corpus_format
from retriever.errors import Closed
from retriever.format import write_version
from tests import oracles
from tests.tiny_tokenizers import byte_level

TOKENIZER = Tokenizer(byte_level())
VOCAB = TOKENIZER.vocab_size
BYTES = {TOKENIZER.text_bytes(i): i for i in reversed(range(VOCAB))}


def ids_of(*pieces: str | bytes) -> list[int]:
    """The tokens that say exactly these pieces."""
    return [BYTES[piece.encode() if isinstance(piece, str) else piece] for piece in pieces]


SPELL = ids_of(
    "def", " add", "(", "first", ",", " second", ")", b"\xc3", b"\xa9", ":", " return", " first", " +", ".", "self", "\n"
)
"""What the target says after its first token: " add(first, second)é: return first +.self\\n", the é in two halves."""


class Target(FakeTarget):
    """A fake target of TOKENIZER which spells, counts its steps, waits before each, and dies after some."""

    def __init__(self, *, dies_after: int = 10**9, **options: Any) -> None:
        options = {"order": 2, "fingerprint": TOKENIZER.fingerprint, "spell": SPELL, "eos_id": 0} | options
        super().__init__(VOCAB, **options)
        self.num_steps = 0
        self.dies_after = dies_after
        self.gate: asyncio.Event | None = None

    @asynccontextmanager
    async def open(self, request: SequenceRequest) -> AsyncIterator[FakeSequence]:
        """See engine.target.Target."""
        async with super().open(request) as sequence:
            yield Watched(sequence, self)


class Watched(FakeSequence):
    """A sequence that reports to its target."""

    def __init__(self, sequence: FakeSequence, target: Target) -> None:
        self.__dict__ |= vars(sequence)
        self._watch = target

    async def step(self, tree: CandidateTree) -> StepResult:
        """See engine.target.TargetSequence."""
        if self._watch.gate is not None:
            await self._watch.gate.wait()
        if self._watch.num_steps >= self._watch.dies_after:
            raise WorkerLost("the worker is gone: killed")
        self._watch.num_steps += 1
        return await super().step(tree)


@dataclass(frozen=True)
class Answer:
    """All a caller learns of the text."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    finish: str
    stop_string: str | None
    stop_token: int | None


def publish(store: Path, documents: Sequence[Sequence[int]], name: str = "code", version: str = "", **options: Any) -> Path:
    """Make ids a corpus; returns its folder."""
    version = version or f"20260101T0000{len(list(store.glob('*/versions/*'))):02d}Z-abcdef"
    about = {"fingerprint": TOKENIZER.fingerprint, "vocab_size": VOCAB} | options
    tenant = about.pop("tenant", "default")
    pairs = [(str(i), np.array(ids, np.int32)) for i, ids in enumerate(documents)]
    path = write_version(store, name, version, pairs, **about)
    num_tokens = sum(map(len, documents))
    entry = Version(name, version, "2026-01-01T00:00:00+00:00", model="m", num_files=1, num_documents=len(documents),
                    num_tokens=num_tokens, num_bytes=1, sources=(), **about)  # fmt: skip
    Catalog(store).publish(entry, tenant)
    return path


def engine_of(target: FakeTarget, store: Path, **options: Any) -> Engine:
    """An engine whose sources have all the time they want."""
    speculation = SpeculationSettings(deadline_ms=60_000, **options.pop("speculation", {}))
    config = Config(speculation=speculation, corpora=CorporaSettings(store=store, **options.pop("corpora", {})))
    return Engine(config, target, TOKENIZER, **options)


def request_of(prompt: str | Sequence[int] = SPELL[:1], **options: Any) -> GenerationRequest:
    """A request by hand; options of speculation among the others."""
    names = ("enabled", "max_nodes", "corpora", "require_corpus", "sources", "prediction")
    speculation = SpeculationOptions(**{name: options.pop(name) for name in names if name in options})
    ids = prompt if isinstance(prompt, str) else np.asarray(prompt, np.int32)
    return GenerationRequest(**{"tenant": "default", "prompt": ids, "max_tokens": 14, "speculation": speculation} | options)


async def collect(engine: Engine, request: GenerationRequest) -> tuple[Answer, Final, list[Chunk]]:
    """Read a stream to its end, and check that its parts fit together."""
    chunks: list[Chunk] = []
    final: Final | None = None
    async for event in engine.generate(request):
        assert final is None, "nothing may follow the Final"
        if isinstance(event, Final):
            final = event
        else:
            chunks.append(event)
    assert final is not None
    final.validate()
    for chunk in chunks:
        assert len(chunk.masks) == len(chunk.tokens) and chunk.sources == chunks[0].sources
        assert chunk.logprobs is None or len(chunk.logprobs) == len(chunk.tokens)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    logprobs = None if request.num_logprobs < 0 else [each for chunk in chunks for each in chunk.logprobs or ()]
    text = "".join(chunk.text for chunk in chunks)
    counts = final.statistics
    assert final.completion_tokens == len(tokens) and final.seed == request.sampling.seed
    assert counts.num_accepted == sum(mask != 0 for chunk in chunks for mask in chunk.masks)
    assert len(chunks) == counts.num_steps
    return Answer(text, tokens, logprobs, final.finish, final.stop_string, final.stop_token), final, chunks


def ask(engine: Engine, request: GenerationRequest) -> tuple[Answer, Final, list[Chunk]]:
    """`collect` to the end."""
    return asyncio.run(collect(engine, request))


def by_hand(target: FakeTarget, request: GenerationRequest) -> Answer:
    """The definition: one token at a time, the whole text looked at again after each."""
    prompt = TOKENIZER.encode_prompt(request.prompt) if isinstance(request.prompt, str) else request.prompt
    wanted = SequenceRequest(prompt, request.sampling, request.limits(target.info.eos_ids), "", request.num_logprobs)
    exact = oracles.decode(target, wanted)
    data, text, end = b"", "", len(exact.tokens)
    finish, stop_string = exact.finish, None
    stop_token = exact.tokens[-1] if finish == "stop" else None
    for n, token in enumerate(exact.tokens, 1):
        if n == len(exact.tokens) and finish == "stop" and not request.include_stop:
            break
        num_seen = len(text)
        data += TOKENIZER.text_bytes(token)
        text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)
        found = [
            (start + len(stop), start, stop)
            for stop in request.stop
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > num_seen and n > request.min_tokens
        ]
        if found:
            stop_end, start, stop_string = min(found)
            text = text[: stop_end if request.include_stop else start]
            finish, stop_token, end = "stop", None, n
            break
    if stop_string is None:
        text = data.decode(errors="replace")
    logprobs = None
    if request.num_logprobs >= 0:
        logprobs = []
        for n in range(end):
            row = target.logits(np.array([*prompt, *exact.tokens[:n]], np.int32)).astype(np.float64)
            row -= row.max() + np.log(np.exp(row - row.max()).sum())
            best = sorted(range(len(row)), key=lambda v: (-row[v], v))[: request.num_logprobs]
            logprobs.append(TokenLogprob(float(row[exact.tokens[n]]), tuple((v, float(row[v])) for v in best)))
    return Answer(text, exact.tokens[:end], logprobs, finish, stop_string, stop_token)


def assert_same(found: Answer, expected: Answer) -> None:
    """Equal in everything; log-probabilities up to the order of a sum."""
    assert replace(found, logprobs=None) == replace(expected, logprobs=None)
    assert (found.logprobs is None) == (expected.logprobs is None)
    for one, other in zip(found.logprobs or [], expected.logprobs or [], strict=True):
        assert one.chosen == pytest.approx(other.chosen, abs=1e-9)
        assert [i for i, _ in one.top] == [i for i, _ in other.top]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the corpus "code", which knows the spell."""
    root = tmp_path_factory.mktemp("store")
    publish(root, [SPELL, SPELL[3:] + SPELL[:4]])
    return root


SOURCES: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "none": {"sources": ()},
    "no nodes": {"max_nodes": 0},
    "prompt": {"sources": ("prompt",)},
    "corpus": {"sources": ("corpus",), "corpora": ("code",)},
    "all": {"corpora": ("code",)},
    "a true prediction": {"corpora": (), "prediction": TOKENIZER.decode(SPELL[1:], continuing=True)},
    "a false prediction": {"corpora": (), "prediction": "nothing of the kind is going to be said. " * 3},
}

REQUESTS: dict[str, dict[str, Any]] = {
    "length": {},
    "one token": {"max_tokens": 1},
    "beyond the spell": {"max_tokens": 40},
    "sampled": {"sampling": SamplingParams(temperature=1.3, top_p=0.95, seed=3), "max_tokens": 30},
    "penalties": {"sampling": SamplingParams(temperature=0.7, seed=9, frequency_penalty=0.5, logit_bias=((SPELL[3], -50.0),))},
    "logprobs": {"num_logprobs": 3},
    "stop in a run": {"stop": ("second",), "num_logprobs": 0},
    "stop inside a token": {"stop": ("eco",)},
    "stop across tokens": {"stop": ("t, sec", "never")},
    "stop kept": {"stop": ("t, sec",), "include_stop": True},
    "two stops, one inside the other": {"stop": ("second)", "con")},
    "stop at the first token": {"stop": (" a",)},
    "stop never completed": {"stop": ("second)x",)},
    "stop behind half a character": {"stop": ("é:",)},
    "stop in the text before": {"prompt": "def add(first", "stop": ("first",)},
    "min tokens past a stop": {"stop": ("add", "self"), "min_tokens": 4},
    "min tokens in the middle of a stop": {"stop": ("first, second",), "min_tokens": 4, "max_tokens": 9},
    "stop id": {"stop_token_ids": (SPELL[5],)},
    "stop id kept": {"stop_token_ids": (SPELL[5],), "include_stop": True},
    "stop id held back": {"stop_token_ids": (SPELL[2],), "min_tokens": 5},
    "stop id after half a character": {"stop_token_ids": (SPELL[8],)},
    "length after half a character": {"max_tokens": 7},
    "stop id that completes a stop string": {"stop_token_ids": (SPELL[5],), "stop": ("second",), "include_stop": True},
    "end of sequence": {"sampling": SamplingParams(logit_bias=((0, 40.0),))},
    "end of sequence ignored": {"sampling": SamplingParams(logit_bias=((0, 40.0),)), "ignore_eos": True, "max_tokens": 5},
    "text": {"prompt": "for item in self.items:\n    def"},
    "inside a word": {"prompt": "def add(first, second)\ndef add(fir", "max_tokens": 20},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_of_decoding_one_token_at_a_time(name: str, store: Path) -> None:
    """Text, ids, logprobs, the reason and what stopped it are the definition's, whatever drafts; right drafts save steps."""
    target = Target()
    engine = engine_of(target, store)
    exact = by_hand(target, request_of(**REQUESTS[name]))
    steps = {}
    for label, options in SOURCES.items():
        answer, final, _ = ask(engine, request_of(**REQUESTS[name] | options))
        assert_same(answer, exact)
        steps[label] = final.statistics.num_steps
        assert target.num_open == 0
    assert steps["off"] == steps["none"] == steps["no nodes"] == len(exact.tokens)
    if name in ("length", "beyond the spell", "stop in a run", "length after half a character"):
        assert steps["all"] < len(exact.tokens) / 2 > steps["a true prediction"]


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["first", "t,", "é", " ", "\ufffd", "seco", ")", ":r", "e", "self\n"]), max_size=3, unique=True),
    st.sets(st.sampled_from(SPELL), max_size=2),
    st.integers(1, 20),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 3.0]),
)
def test_any_request_is_answered_alike_with_and_without_drafts(
    seed: int, stop: list[str], stop_ids: set[int], max_tokens: int, min_tokens: int, include_stop: bool, temperature: float
) -> None:
    """Stops of every kind, limits and temperatures at random, over a text with broken characters."""
    target = Target(sharpness=1.5)
    request = request_of(
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        include_stop=include_stop,
        sampling=SamplingParams(temperature=temperature, seed=seed),
        corpora=(),
        prediction=TOKENIZER.decode(SPELL[1:], continuing=True),
    )
    engine = engine_of(target, Path("nowhere"))
    exact = by_hand(target, request)
    assert_same(ask(engine, request)[0], exact)
    assert_same(ask(engine, replace(request, speculation=SpeculationOptions(enabled=False)))[0], exact)


def test_half_a_character_and_half_a_stop_string_are_held_back(store: Path) -> None:
    """Plain decoding, one token a chunk: the two halves of é come out together, and what may begin a stop string not at all
    until it is known not to."""
    engine = engine_of(Target(), store)
    _, _, chunks = ask(engine, request_of(enabled=False, max_tokens=10, stop=("second!",)))
    assert [chunk.text for chunk in chunks] == [" add", "(", "first", ",", " ", "second)", "", "é", ":", " return"]


def test_statistics_say_what_happened(store: Path) -> None:
    """Sources by label with what they had, the corpus by version; everything ends with the last token of the answer."""
    engine = engine_of(Target(), store)
    answer, final, chunks = ask(engine, request_of(corpora=("code",), stop=("second",), sources=("corpus", "prompt")))
    counts = final.statistics
    assert chunks[0].sources == ("corpus:code", "prompt") == tuple(source.name for source in counts.sources)
    corpus, prompt = counts.sources
    assert corpus.accepted == counts.num_accepted == len(answer.tokens) and corpus.unique == corpus.accepted
    assert corpus.held_alone == corpus.held - prompt.held == len(answer.tokens)
    assert prompt.accepted == 0 and corpus.errors == corpus.late == prompt.errors == prompt.late == 0
    assert counts.num_steps == 1 and counts.num_nodes >= counts.num_accepted
    assert counts.corpora == (("code", Catalog(store).get("code").active.id),) and counts.warnings == ()
    assert final.tokens_per_step == len(answer.tokens)
    assert counts.draft_seconds > 0 and counts.step_seconds > 0


def test_without_a_corpus_drafting_begins_with_the_first_request(tmp_path: Path) -> None:
    """The model's leftovers need nothing set up; what they learned is there again after a restart."""
    request = request_of(max_tokens=60, ignore_eos=True, sources=("recycle",))
    num_steps = []
    for _ in range(2):
        target = Target(order=1, sharpness=6.0, spell=())
        engine = engine_of(target, tmp_path)
        answer, final, _ = ask(engine, request)
        assert_same(answer, by_hand(target, request))
        (recycle,) = final.statistics.sources
        assert recycle.accepted == final.statistics.num_accepted > 0 and not recycle.errors + recycle.late
        num_steps.append(final.statistics.num_steps)
        asyncio.run(engine.close())
    assert num_steps[1] < num_steps[0] < 60


def test_the_target_is_asked_for_as_much_feedback_as_the_sources_want(store: Path) -> None:
    """The most likely tokens that any of them wants, along the prompt's end, too; none where nobody learns from them."""
    asked: list[SequenceRequest] = []

    class Noting(Target):
        @asynccontextmanager
        async def open(self, request: SequenceRequest) -> AsyncIterator[FakeSequence]:
            asked.append(request)
            async with super().open(request) as sequence:
                yield sequence

    engine = engine_of(Noting(), store, speculation={"prompt_rows": 5})
    for sources in (("recycle", "prompt"), ("lookahead",), ("prompt",), ()):
        ask(engine, request_of(sources=sources))
    ask(engine, request_of(enabled=False))
    assert [(each.feedback_top_k, each.feedback_prompt) for each in asked] == [(8, 5), (1, 5), (0, 0), (0, 0), (0, 0)]


def test_the_same_request_is_answered_alike_while_the_server_learns(store: Path, tmp_path: Path) -> None:
    """Between the first and the last of many requests calibration, caches and a corpus change; the answer does not."""
    publish(tmp_path, [SPELL[::-1]])
    target = Target(sharpness=1.0)
    engine = engine_of(target, tmp_path)
    request = request_of(sampling=SamplingParams(temperature=1.0, seed=7), corpora=("code",), max_tokens=30)
    first, final, _ = ask(engine, request)
    for seed in range(4):
        ask(engine, replace(request, sampling=SamplingParams(temperature=1.5, seed=seed)))
    publish(tmp_path, [[*SPELL[:1], *first.tokens], SPELL])
    again, last, _ = ask(engine, request)
    assert again == first
    assert last.statistics.corpora != final.statistics.corpora
    assert last.statistics.num_steps < final.statistics.num_steps


def test_requests_at_once_do_not_disturb_one_another(store: Path) -> None:
    """Many requests interleaved over one engine get what each gets alone."""
    requests = [
        request_of(sampling=SamplingParams(temperature=1.0, seed=seed), corpora=("code",), max_tokens=12 + seed)
        for seed in range(6)
    ]

    async def together() -> list[Answer]:
        engine = engine_of(Target(), store)
        return [answer for answer, _, _ in await asyncio.gather(*(collect(engine, request) for request in requests))]

    assert asyncio.run(together()) == [ask(engine_of(Target(), store), request)[0] for request in requests]


def test_tenants_learn_apart(store: Path) -> None:
    """What one tenant's requests taught changes nothing of another's, not even how large its trees are."""
    requests = [request_of(max_tokens=20, sampling=SamplingParams(temperature=1.5, seed=seed)) for seed in range(5)]
    used, fresh = engine_of(Target(), store), engine_of(Target(), store)
    for request in requests:
        ask(used, replace(request, tenant="a"))
    statistics = []
    for engine in (used, fresh):
        _, final, _ = ask(engine, replace(requests[0], tenant="b", max_tokens=40))
        statistics.append([replace(source, seconds=0.0) for source in final.statistics.sources])
    assert statistics[0] == statistics[1]
    asyncio.run(used.close())
    assert {(entry.tenant, entry.name) for entry in Memory(default_root()).entries()} == {
        (tenant, name) for tenant in ("a", "b") for name in ("calibration", "history", "recycle")
    }


# ---- ends before the end


def test_leaving_a_stream_frees_the_sequence_at_once(store: Path) -> None:
    """A caller who closes the stream causes no further step, and nothing stays open."""

    async def run() -> None:
        target = Target()
        async with aclosing(engine_of(target, store).generate(request_of(enabled=False))) as events:
            await anext(events)
            assert target.num_open == 1
        assert (target.num_open, target.num_steps) == (0, 1)

    asyncio.run(run())


def test_cancellation_in_the_middle_of_a_step_frees_everything(store: Path) -> None:
    """The task of a request is cancelled while the target works: the sequence is gone and the corpus is not pinned."""

    async def run() -> None:
        target = Target()
        target.gate = asyncio.Event()
        engine = engine_of(target, store)
        task = asyncio.create_task(collect(engine, request_of(corpora=("code",))))
        while not target.num_open:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (target.num_open, target.num_steps) == (0, 0)
        assert [pinned.users for pinned in engine._corpora._open.values()] == [0]

    asyncio.run(run())


def test_a_target_that_dies_is_a_lost_worker(store: Path) -> None:
    """What came before is delivered; then the error, and nothing stays open."""

    async def run() -> None:
        target = Target(dies_after=2)
        engine = engine_of(target, store)
        seen = []
        with pytest.raises(WorkerLost):
            async for event in engine.generate(request_of(enabled=False)):
                seen.append(event)
        assert len(seen) == 2 and target.num_open == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": [VOCAB]}, InvalidRequest, "prompt.token_ids"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"stop": ("",)}, InvalidRequest, "stop[0]"),
        ({"sources": ("neural",)}, InvalidRequest, "speculation.sources"),
        ({"corpora": ("a", "a")}, InvalidRequest, "speculation.corpora"),
        ({"prompt": [1] * 1024}, PromptTooLong, "prompt"),
        ({"corpora": ("cod",)}, NotFound, ""),
        ({"corpora": ("cod",), "enabled": False}, NotFound, ""),
        ({"corpora": ("../code",)}, NotFound, ""),
        ({"corpora": ("code",), "tenant": "other"}, NotFound, ""),
    ],
)
def test_a_request_at_fault_is_refused_before_anything_happens(
    options: dict[str, Any], error: type[Exception], field: str, store: Path
) -> None:
    """No step is made, nothing stays open, and the error names the field."""
    target = Target()
    engine = engine_of(target, store)
    with pytest.raises(error) as caught:
        ask(engine, request_of(**options))
    assert getattr(caught.value, "field", "") == field
    assert (target.num_open, target.num_steps) == (0, 0)
    assert all(not pinned.users for pinned in engine._corpora._open.values())


def test_an_unknown_corpus_is_told_with_what_to_do(store: Path) -> None:
    """The nearest name there is; a corpus of another tenant is never the nearest."""
    engine = engine_of(Target(), store)
    with pytest.raises(NotFound, match="no such corpus: cod; did you mean code"):
        ask(engine, request_of(corpora=("cod",)))
    with pytest.raises(NotFound, match="no such corpus: cod; build it with"):
        ask(engine, request_of(corpora=("cod",), tenant="other"))


# ---- settings


class Crashing:
    """A source that cannot begin."""

    name = "crashing"
    blocking = False
    top_k = 0

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """Never works."""
        raise OSError("no such device")


def test_a_source_that_cannot_begin_is_a_warning(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is as ever, drafted by the others; the statistics name what is missing."""
    monkeypatch.setitem(DRAFTERS, "crashing", f"{__name__}:Crashing")  # type: ignore[arg-type]
    engine = engine_of(Target(), store, speculation={"sources": ("crashing", "prompt")})
    assert engine.sources == ("crashing", "prompt")
    answer, final, chunks = ask(engine, request_of())
    assert_same(answer, by_hand(Target(), request_of()))
    assert final.statistics.warnings == ("source crashing failed to begin and was left out",)
    assert chunks[0].sources == ("prompt",)


def test_a_source_that_does_not_exist_is_a_setting_to_correct() -> None:
    """The message lists those there are."""
    with pytest.raises(ConfigError, match="no such source: magic; there are corpus, prompt"):
        make_drafters(["corpus", "magic"])


def test_a_worker_with_another_tokenizer_is_refused(store: Path) -> None:
    """Ids would mean other text."""
    with pytest.raises(ConfigError, match="the worker's tokenizer is not that of"):
        engine_of(Target(fingerprint="another"), store)


def test_a_server_without_speculation_drafts_for_nobody(store: Path) -> None:
    """The setting wins over what requests ask; max_nodes of a request only lowers the server's."""
    _, final, _ = ask(engine_of(Target(), store, speculation={"enabled": False}), request_of(corpora=("code",)))
    assert (final.statistics.num_nodes, final.statistics.sources, final.statistics.corpora) == (0, (), ())
    for most in (2, 200):
        _, final, _ = ask(
            engine_of(Target(), store, speculation={"max_nodes": 3}), request_of(corpora=("code",), max_nodes=most)
        )
        assert 0 < final.statistics.num_nodes <= min(most, 3) * final.statistics.num_steps


def test_long_texts_are_encoded_off_the_event_loop(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt is encoded at once, a long one where it holds up nobody; the ids are the same."""
    handed: list[int] = []
    real = asyncio.to_thread

    async def to_thread(function: Callable[..., Any], *args: Any) -> Any:
        if function == TOKENIZER.encode_prompt:
            handed.append(len(args[0]))
        return await real(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    engine = engine_of(Target(context_length=10_000), store)
    long = "return first + second\n" * 400
    for prompt in ("return first", long):
        _, final, _ = ask(engine, request_of(prompt, max_tokens=1))
        assert final.prompt_tokens == len(TOKENIZER.encode(prompt))
    assert handed == [len(long)]


# ---- corpora


def test_a_damaged_corpus_is_named_and_served_without(tmp_path: Path) -> None:
    """A truncated file costs speed and a warning; a request that requires the corpus is refused."""
    path = publish(tmp_path, [SPELL])
    file = path / "seg-0000.tokens"
    file.write_bytes(file.read_bytes()[:-1])
    engine = engine_of(Target(), tmp_path)
    answer, final, _ = ask(engine, request_of(corpora=("code",)))
    assert_same(answer, by_hand(Target(), request_of()))
    [warning] = final.statistics.warnings
    assert warning.startswith("served without corpus code: corpus code cannot be used: file has") and str(file) in warning
    assert final.statistics.corpora == ()
    with pytest.raises(CorpusUnusable, match="rebuild the corpus"):
        ask(engine, request_of(corpora=("code",), require_corpus=True))
    [info] = asyncio.run(engine.corpora("default"))
    assert not info.usable and str(file) in info.problem


def test_a_corpus_of_another_tokenizer_is_served_without(tmp_path: Path) -> None:
    """Its ids would mean other text; the warning says to build it again."""
    publish(tmp_path, [SPELL], fingerprint="another")
    _, final, _ = ask(engine_of(Target(), tmp_path), request_of(corpora=("code",)))
    assert "built with another tokenizer: another" in final.statistics.warnings[0]


def test_a_damaged_catalog_is_no_reason_to_stop(tmp_path: Path) -> None:
    """Default corpora are served without; a list of corpora says what is wrong."""
    (tmp_path / "catalog.sqlite").write_bytes(b"this is no database, whatever its name says " * 100)
    engine = engine_of(Target(), tmp_path, corpora={"default": ("code",)})
    _, final, _ = ask(engine, request_of())
    assert "the catalog of corpora cannot be read" in final.statistics.warnings[0]
    with pytest.raises(CorpusUnusable, match="catalog is damaged"):
        asyncio.run(engine.corpora("default"))


def test_default_corpora_are_used_unless_a_request_says_otherwise(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None named: the defaults, a missing one being a warning in log and statistics; some named, or none wanted: those."""
    engine = engine_of(Target(), store, corpora={"default": ("code", "gone")})
    with caplog.at_level(logging.WARNING, "draftloom.engine"):
        asyncio.run(engine.check_default_corpora())
        _, final, _ = ask(engine, request_of())
    message = "no such corpus: gone; build it with `draftloom corpus build gone PATH`"
    assert [record.getMessage() for record in caplog.records] == [f"serving without corpus gone: {message}"]
    assert final.statistics.warnings == (f"served without corpus gone: {message}",)
    assert [name for name, _ in final.statistics.corpora] == ["code"]
    for options in ({"corpora": ()}, {"sources": ("prompt",)}, {"enabled": False}):
        _, final, _ = ask(engine, request_of(**options))
        assert (final.statistics.corpora, final.statistics.warnings) == ((), ())
    with pytest.raises(NotFound):
        ask(engine, request_of(require_corpus=True))


def run_with(corpora: Corpora, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run and close."""
    try:
        asyncio.run(body())
    finally:
        corpora.close()


def usable(store: datastore.Datastore) -> bool:
    """Whether it is still open."""
    try:
        store.lookup(np.array(SPELL[:1], np.int32), 4)
    except Closed:
        return False
    return True


def test_a_version_is_pinned_while_in_use(tmp_path: Path) -> None:
    """A newer version is taken by the next request; the older one is closed when its last request leaves, and rolling back
    works the same way."""
    publish(tmp_path, [SPELL], version="20260101T000001Z-aaaaaa")
    corpora = Corpora(tmp_path, Target().info)

    async def body() -> None:
        one, also_one = await asyncio.gather(corpora.acquire("code", "default"), corpora.acquire("code", "default"))
        assert one is also_one
        publish(tmp_path, [SPELL], version="20260101T000002Z-aaaaaa")
        two = await corpora.acquire("code", "default")
        assert (one.version, two.version) == ("20260101T000001Z-aaaaaa", "20260101T000002Z-aaaaaa")
        corpora.release(one)
        assert usable(one)
        corpora.release(one)
        assert not usable(one) and usable(two)
        Catalog(tmp_path).rollback("code")
        again = await corpora.acquire("code", "default")
        assert again.version == one.version and usable(two)
        corpora.release(two)
        assert not usable(two) and usable(again)
        corpora.release(again)
        assert usable(again), "the active version stays open"

    run_with(corpora, body)


@pytest.mark.parametrize("verify", [True, False])
def test_damage_in_a_large_file_is_found_in_the_background(
    verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests need not wait for the checksums; once they are found wrong the version is refused, its successor not."""
    monkeypatch.setattr(corpus_format, "SMALL_FILE", 0)
    path = publish(tmp_path, [SPELL, SPELL]) / "seg-0000.suffixes"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    corpora = Corpora(tmp_path, Target().info, checks=Checks(None) if verify else None)

    async def body() -> None:
        with suppress(CorpusUnusable):  # if the thread is faster
            corpora.release(await corpora.acquire("code", "default"))
        for _ in range(400 if verify else 20):
            if corpora._damaged:
                break
            await asyncio.sleep(0.01)
        if not verify:
            corpora.release(await corpora.acquire("code", "default"))
            return
        with pytest.raises(CorpusUnusable, match=f"corpus code cannot be used: content was altered: {path}"):
            await corpora.acquire("code", "default")
        assert not (await corpora.list("default"))[0].usable
        publish(tmp_path, [SPELL])
        corpora.release(await corpora.acquire("code", "default"))
        assert (await corpora.list("default"))[0].usable

    run_with(corpora, body)
    assert ("no longer drafted from" in caplog.text) == verify


def test_corpora_are_their_tenants(tmp_path: Path) -> None:
    """Another tenant's corpus is not there, neither in requests nor in lists."""
    publish(tmp_path, [SPELL], name="mine", tenant="a")
    publish(tmp_path, [SPELL], name="yours", tenant="b")
    engine = engine_of(Target(), tmp_path)
    assert [info.name for info in asyncio.run(engine.corpora("a"))] == ["mine"]
    assert [info.name for info in asyncio.run(engine.corpora("b"))] == ["yours"]
    assert asyncio.run(engine.corpora("default")) == []
    ask(engine, request_of(tenant="a", corpora=("mine",)))
    with pytest.raises(NotFound):
        ask(engine, request_of(tenant="b", corpora=("mine",)))


def test_a_slow_catalog_holds_up_nobody_else(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request waits for the disk, another that needs no corpus is answered."""
    real = Catalog.get

    def slow(self: Catalog, name: str, tenant: str = "default") -> Any:
        time.sleep(0.3)
        return real(self, name, tenant)

    monkeypatch.setattr(Catalog, "get", slow)

    async def run() -> None:
        engine = engine_of(Target(), store)
        waiting = asyncio.create_task(collect(engine, request_of(corpora=("code",))))
        await asyncio.sleep(0)
        await collect(engine, request_of(max_tokens=1, corpora=()))
        assert not waiting.done()
        await waiting

    asyncio.run(run())


def test_array_prompts_are_used_as_they_are(store: Path) -> None:
    """Ids are not re-tokenized, whatever their integer type."""
    prompt: NDArray[Any] = np.array([SPELL[3], SPELL[0]], np.int64)
    answer, final, _ = ask(engine_of(Target(), store), replace(request_of(max_tokens=2), prompt=prompt))
    assert answer.tokens == SPELL[1:3] and final.prompt_tokens == 2
