"""The `resume` source: which place it follows, where it goes on after a mismatch, and what it does not touch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.acceptance import Limits, walk
from engine.calibration import Calibration
from engine.drafters import Drafting, DraftRequest, Feedback, kernels
from engine.drafters import resume as module
from engine.drafters.panel import Panel
from engine.drafters.resume import CorpusPlace, OwnPlace, ResumeDrafter
from engine.session import Session
from engine.target import StepResult
from engine.tree import CostCurve, Draft
from retriever.datastore import Datastore, Place
from retriever.format import write_version

VOCAB = 1000
ORIGINAL = list(range(100, 160))
FILLER = list(range(500, 540))
few_tokens = st.lists(st.integers(0, 3), max_size=60)
predictions = st.one_of(st.just([]), few_tokens)


def ids(tokens: Sequence[int]) -> NDArray[np.int32]:
    """As the sources want them."""
    return np.array(tokens, np.int32)


def own(context: Sequence[int], prediction: Sequence[int] = ()) -> Drafting:
    """The source at work on a request without corpora."""
    [(label, drafting)] = ResumeDrafter().begin(DraftRequest("t", "m", ids(context), prediction=ids(prediction)))
    assert label == "resume"
    return drafting


@pytest.fixture
def store(tmp_path: Path) -> Datastore:
    """A corpus that has the original, and another document."""
    documents = [("other.txt", ids(range(200, 240))), ("original.txt", ids(ORIGINAL))]
    return Datastore.open(write_version(tmp_path, "code", "v1", documents, fingerprint="f", vocab_size=VOCAB))


def from_corpus(store: Any, context: Sequence[int]) -> Drafting:
    """The source at work on a corpus."""
    pairs = dict(ResumeDrafter().begin(DraftRequest("t", "m", ids(context), {"code": store})))
    assert list(pairs) == ["resume", "resume:code"]
    return pairs["resume:code"]


def drafted(drafting: Drafting, context: Sequence[int], budget: int = 8) -> list[int]:
    """The chain that is drafted, which must be valid."""
    draft = drafting.propose(ids(context), budget)
    draft.validate(VOCAB)
    assert draft.parents.tolist() == list(range(-1, len(draft) - 1))
    return draft.tokens.tolist()


# ---- where it goes on

CHANGES = {
    "nothing": [],
    "a token for another": [900],
    "two tokens for two others": [900, 901],
    "a token put in, and one more agrees": [900, 110],
    "a token left out, and one agrees": [111],
    "three tokens for one, and two agree": [900, 901, 902, 111, 112],
    "four tokens left out, and two agree": [114, 115],
}
GOES_ON = {
    "nothing": 110,
    "a token for another": 111,
    "two tokens for two others": 112,
    "a token put in, and one more agrees": 111,
    "a token left out, and one agrees": 112,
    "three tokens for one, and two agree": 113,
    "four tokens left out, and two agree": 116,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_place_goes_on_after_a_change(change: str, store: Datastore) -> None:
    """In the text itself, in the prediction, and in a corpus; whether the change stood in the prompt or was said in steps."""
    said, expected = [*ORIGINAL[:10], *CHANGES[change]], [*range(GOES_ON[change], GOES_ON[change] + 8)]
    before = [*ORIGINAL, *FILLER]
    assert drafted(own([*before, *said]), [*before, *said]) == expected
    assert drafted(from_corpus(store, [*FILLER, *said]), [*FILLER, *said]) == expected
    for drafting, context in (
        (own(before), before),
        (own(FILLER, ORIGINAL), FILLER),
        (from_corpus(store, FILLER), FILLER),
    ):
        for i in range(0, len(said), 3):
            drafting.accept(said[i : i + 3], Feedback())
            found = drafted(drafting, [*context, *said[: i + 3]])
        assert found == expected


def test_evidence_is_what_agrees_and_how_long_ago_it_did() -> None:
    """Ten tokens agreed, then two did not, then one did: a match of one, three tokens old; a chain goes on agreeing."""
    context = [*ORIGINAL, *FILLER, *ORIGINAL[:10], 900, 901, 112]
    draft = own(context).propose(ids(context), 3)
    assert draft.tokens.tolist() == [113, 114, 115]
    assert (draft.lengths.tolist(), draft.counts.tolist()) == ([1, 2, 3], [3, 3, 3])
    assert draft.probs.tolist() == pytest.approx([0.5, 0.8, 0.8])


def test_a_prediction_is_followed_from_the_first_token_on() -> None:
    """It goes on where the prompt ends, and no further than its own end."""
    assert drafted(own(FILLER, [7, 8, 9]), FILLER) == [7, 8, 9]


def test_a_place_left_for_long_is_given_up() -> None:
    """After so many tokens that agree nowhere, there is nothing to say."""
    context = [*ORIGINAL, *FILLER, *ORIGINAL[:10]]
    drafting = own(context)
    for i in range(kernels.LOST):
        drafting.accept([600 + i], Feedback())
    context += range(600, 600 + kernels.LOST)
    assert drafted(drafting, context) == [*range(110 + kernels.LOST, 118 + kernels.LOST)]
    drafting.accept([700], Feedback())
    assert drafted(drafting, [*context, 700]) == []


def test_another_place_that_agrees_takes_over() -> None:
    """Once the text agrees with another part, that one is followed."""
    context = [*ORIGINAL, *FILLER, *ORIGINAL[:10], 900, *FILLER[:5]]
    assert drafted(own(context), context) == FILLER[5:13]


def test_a_long_document_is_read_on(tmp_path: Path) -> None:
    """Far behind what was read at first."""
    long = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 2000)]
    with Datastore.open(write_version(tmp_path, "long", "v1", [("a", ids(long))], fingerprint="f", vocab_size=VOCAB)) as store:
        drafting = from_corpus(store, long[:20])
        for i in range(20, 1980, 7):
            assert drafted(drafting, long[:i], 4) == long[i : i + 4]
            drafting.accept(long[i : i + 7], Feedback())


# ---- against the obvious


def resumed(text: list[int], place: int, age: int, said: list[int]) -> tuple[int, int]:
    """See kernels.resume_at: every place in turn, the best of them."""

    def agreed(at: int) -> int:
        pairs = zip(reversed(text[:at]), reversed(said), strict=False)
        flags = [a == b for a, b in islice(pairs, kernels.MOST_AGREED)]
        return (flags + [False]).index(False)

    def worth(at: int) -> tuple[int, int, int]:
        shift = at - place - age
        return 2 * agreed(at) - abs(shift).bit_length(), -abs(shift), shift

    near = range(max(1, place + age - kernels.SHIFT), min(len(text), place + age + kernels.SHIFT + 1))
    fit = [at for at in near if text[at] >= 0 and (at == place + age or agreed(at)) and worth(at)[0] >= 0]
    best = max(fit, key=worth, default=-1)
    return (best, agreed(best)) if fit else (-1, 0)


def followed(text: list[int], since: int) -> tuple[int, int]:
    """See kernels.keep_place: for every end of the text, what agrees with it, by trying all places."""
    place, age, same = -1, 0, kernels.SAME
    for num in range(since + 1, len(text) + 1):
        last = text[max(num - same, 0) : num]
        whole = len(last) == same and min(last) >= 0
        earlier = max((end for end in range(same, num) if whole and text[end - same : end] == last), default=-1)
        if place >= 0:
            age += 1
            at, agreed = resumed(text[:num], place, age, text[max(num - kernels.MOST_AGREED, 0) : num])
            if agreed >= same:
                place, age = at, 0
        if earlier >= 0 and (place < 0 or age):
            place, age = earlier, 0
        elif age > kernels.LOST:
            place, age = -1, 0
    return place, age


@settings(deadline=None, max_examples=60)
@given(text=st.lists(st.integers(-1, 3), max_size=60), place=st.integers(0, 60), age=st.integers(0, 20), said=few_tokens)
def test_resuming_equals_its_twin(text: list[int], place: int, age: int, said: list[int]) -> None:
    """Place and agreement are those of trying every place."""
    assert kernels.resume_at(ids(text), len(text), place, age, ids(said)) == resumed(text, place, age, said)


@settings(deadline=None, max_examples=60)
@given(context=few_tokens, prediction=predictions, steps=st.lists(few_tokens, max_size=6))
def test_the_place_kept_equals_its_twin(context: list[int], prediction: list[int], steps: list[list[int]]) -> None:
    """However the text grew, the place followed is that of trying every place at every token (few hashes meet: one in 50)."""
    drafting = OwnPlace(ids(context), ids(prediction))
    text = [*context[-16:], *prediction, -1, *context] if prediction else list(context)
    since = max(len(text) - 32, 0)
    for step in steps:
        drafting.accept(step, Feedback())
        text += step
        if len(step) % 2:  # it is not asked every time
            drafting.propose(ids(text), 1)
    drafting.propose(ids(text), 1)
    assert (drafting._place, drafting._age) == followed(text, since)


@settings(deadline=None, max_examples=30)
@given(context=few_tokens, prediction=predictions, steps=st.lists(few_tokens, max_size=6), budget=st.integers(0, 20))
def test_drafts_are_valid_and_pure(context: list[int], prediction: list[int], steps: list[list[int]], budget: int) -> None:
    """Asked twice, a source says the same; never more than asked for, nothing that is no token."""
    drafting, text = OwnPlace(ids(context), ids(prediction)), list(context)
    for step in [[], *steps]:
        drafting.accept(step, Feedback())
        text += step
        first = drafted(drafting, text, budget)
        assert first == drafted(drafting, text, budget)
        assert len(first) <= budget


# ---- corpora that are on disk


class Disk:
    """A datastore that may be on disk, and takes its time."""

    def __init__(self, in_memory: bool, seconds: float) -> None:
        self.in_memory, self.seconds, self.searches = in_memory, seconds, 0

    def resident(self) -> bool:
        return self.in_memory

    def place(self, context: NDArray[np.int32], **options: int) -> Place:
        self.searches += 1
        Clock.now += self.seconds
        return Place(ids([1, 2, 3, *range(20, 60)]), 3)


class Clock:
    """Time that passes in searches alone."""

    now = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now


def test_a_corpus_on_disk_is_left_alone() -> None:
    """The next request asks again whether it is in memory."""
    drafter, disk = ResumeDrafter(), Disk(in_memory=False, seconds=0.0)
    request: Any = DraftRequest("t", "m", ids(FILLER), {"code": disk})  # type: ignore[dict-item]
    assert [label for label, _ in drafter.begin(request)] == ["resume"]
    assert disk.searches == 0
    disk.in_memory = True
    assert [label for label, _ in drafter.begin(request)] == ["resume", "resume:code"]


def test_a_search_that_met_the_disk_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is searched for until the corpus is in memory again; one that was only slow is asked again."""
    monkeypatch.setattr(module, "time", Clock)
    drafter, disk = ResumeDrafter(), Disk(in_memory=True, seconds=1.0)
    request: Any = DraftRequest("t", "m", ids([3]), {"code": disk})  # type: ignore[dict-item]
    drafting = dict(drafter.begin(request))["resume:code"]
    assert disk.searches == 1
    drafting.accept([900] * 5, Feedback())
    assert disk.searches == 1
    drafting.propose(ids([3, *[900] * 5]), 8)
    drafting.propose(ids([3, *[900] * 5]), 8)
    assert disk.searches == 2
    disk.in_memory = False
    for count in (10, 15):
        drafting.accept([900] * 5, Feedback())
        drafting.propose(ids([3, *[900] * count]), 8)
        assert disk.searches == 3
    assert [label for label, _ in drafter.begin(request)] == ["resume"]


# ---- beside the others


def steps_of(names: Sequence[str], context: Sequence[int], answer: Sequence[int]) -> int:
    """Steps that an answer takes with these sources and eight nodes."""
    from engine.app import make_drafters

    async def run() -> int:
        request = DraftRequest("t", "m", ids(context))
        with Panel(list(make_drafters(names).values()), request, VOCAB, deadline=float("inf")) as panel:
            session = Session(ids(context), panel.labels, Calibration(), 8)
            while not session.finished:
                drafts: list[Draft | None] = await panel.propose(session.tokens, session.num_wanted)
                tree, done = session.tree(drafts, CostCurve.flat()), session.num_emitted
                taken = walk(tree, lambda _, emitted, done=done: answer[done + len(emitted)], Limits(len(answer)), done)
                result = StepResult(taken.path, taken.tokens, taken.finish, np.arange(len(tree), dtype=np.int32))
                panel.accept(session.commit(result).tokens, result.feedback)
            assert session.tokens[len(context) :].tolist() == list(answer)
            return session.tally.num_steps

    return asyncio.run(run())


def test_a_text_that_renames_takes_fewer_steps() -> None:
    """A copy in which one frequent token is another: the prompt's longest match is short after each, the place is not."""
    rng = np.random.default_rng(1)
    original = [int(token) for token in rng.integers(0, 12, 400)]
    copy = [500 if token == 3 else token for token in original]
    assert steps_of(["prompt", "resume"], original, copy) < 0.8 * steps_of(["prompt"], original, copy)


def test_the_text_of_a_corpus_place_is_bounded(store: Datastore) -> None:
    """What is kept of the corpus does not grow with the answer."""
    drafting, text = CorpusPlace(ids(FILLER), store, ResumeDrafter()._in_memory), list(FILLER)
    for _ in range(50):
        drafting.accept(ORIGINAL, Feedback())
        text += ORIGINAL
        drafting.propose(ids(text), 8)
    assert len(drafting._text) <= 320


def test_a_source_asked_again_after_a_while_follows_what_was_said_last(store: Datastore) -> None:
    """What was said while nobody asked is caught up with, as far as a place is followed; the rest is looked up."""
    said = [*FILLER, *ORIGINAL[:20]]
    for drafting in (own([*ORIGINAL, 7]), from_corpus(store, [*ORIGINAL, 7])):
        for token in said:
            drafting.accept([token], Feedback())
        assert drafted(drafting, [*ORIGINAL, 7, *said]) == ORIGINAL[20:28]
