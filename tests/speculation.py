"""Speculative decoding as a loop one can read, over sources that are right, wrong, late, broken or hostile.

The engine's own loop adds deadlines, threads and statistics; here every step is laid open, so that a test can bend it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Event

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.acceptance import Limits, SamplingParams
from engine.calibration import Calibration
from engine.drafters import Drafter, Drafting, DraftRequest, Feedback
from engine.drafters.panel import Panel, Record
from engine.loop import Times, decode
from engine.session import Session, Tally
from engine.target import SequenceRequest, StepResult
from engine.target.fake import FakeTarget
from engine.tree import LOOKAHEAD, CandidateTree, CostCurve, Draft, Drafts, Mixture, merge
from tests.oracles import Decoded

Source = Callable[[NDArray[np.int32]], Draft]
"""A source as a function of the tokens so far; it may raise."""

Twist = Callable[[CandidateTree], CandidateTree]
"""Something done to a tree on its way to the target: rows may be added at its end, not moved."""


def speculate(
    target: FakeTarget,
    request: SequenceRequest,
    sources: Mapping[str, Source],
    *,
    max_nodes: int = 12,
    curve: CostCurve | None = None,
    calibration: Calibration | None = None,
    twist: Twist = lambda tree: tree,
) -> tuple[Decoded, Tally]:
    """Decode `request` with drafts, and count; every result is checked against the worker's contract."""
    session = Session(request.prompt, list(sources), calibration or Calibration(), max_nodes)
    logprobs: list[float] = []

    async def run() -> None:
        async with target.open(request) as sequence:
            while not session.finished:
                drafts = [ask(source, session.tokens, target.info.vocab_size) for source in sources.values()]
                tree = session.tree(drafts, curve or CostCurve.flat())
                twisted = twist(tree)
                result = await sequence.step(twisted)
                check_result(twisted, result)
                if result.logprobs is not None:
                    logprobs.extend(result.logprobs.chosen.tolist())
                session.commit(replace(result, verified=result.verified[result.verified < len(tree)]))

    asyncio.run(run())
    assert target.num_open == 0
    assert session.tally.num_accepted + session.tally.num_steps == session.num_emitted
    return Decoded(session.tokens[len(request.prompt) :].tolist(), session.finish, logprobs), session.tally


def decode_by_loop(
    target: FakeTarget, request: SequenceRequest, drafters: Sequence[Drafter], *, deadline: float = 60.0
) -> tuple[Decoded, Tally, tuple[Record, ...]]:
    """Decode `request` with the engine's own loop and panel, and say what happened to each source."""

    async def run() -> tuple[Decoded, Tally, tuple[Record, ...]]:
        about = DraftRequest(request.tenant, target.info.model, request.prompt)
        with Panel(drafters, about, target.info.vocab_size, deadline=deadline) as panel:
            session = Session(request.prompt, panel.labels, Calibration(), 12)
            logprobs: list[float] = []
            async with target.open(request) as sequence:
                async for _, result in decode(session, panel, sequence, Times()):
                    if result.logprobs is not None:
                        logprobs.extend(result.logprobs.chosen.tolist())
            answer = session.tokens[len(request.prompt) :].tolist()
            return Decoded(answer, session.finish, logprobs), session.tally, panel.records

    found = asyncio.run(run())
    assert target.num_open == 0
    return found


class Hint:
    """A drafter around a source; `fails_in` names a method that raises, `gate` is waited for before every draft."""

    def __init__(
        self, name: str, source: Source, *, blocking: bool = False, fails_in: str = "", gate: Event | None = None
    ) -> None:
        self.name = name
        self.blocking = blocking
        self.top_k = 0
        self.num_closed = 0
        self._source = source
        self._fails_in = fails_in
        self._gate = gate

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """This object is its own drafting."""
        self._may_fail("begin")
        return [(self.name, self)]

    def propose(self, context: NDArray[np.int32], budget: int) -> Draft:
        """What the source says."""
        if self._gate is not None:
            self._gate.wait()
        self._may_fail("propose")
        return self._source(context)

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Nothing to learn."""
        self._may_fail("accept")

    def close(self) -> None:
        """Count."""
        self.num_closed += 1
        self._may_fail("close")

    def _may_fail(self, method: str) -> None:
        if method == self._fails_in:
            raise RuntimeError(f"{self.name} fails in {method}")


def ask(source: Source, context: NDArray[np.int32], vocab_size: int) -> Draft | None:
    """A source's valid draft; None where it crashed or broke an invariant."""
    try:
        draft = source(context)
        draft.validate(vocab_size)
    except (RuntimeError, ValueError):
        return None
    return draft


def check_result(tree: CandidateTree, result: StepResult) -> None:
    """Raise AssertionError unless `result` answers `tree`: a chain of verified candidates, their tokens, one bonus token."""
    path = result.path.tolist()
    assert len(result.tokens) == len(path) + 1
    assert tree.parents[path].tolist() == [0, *path][:-1], "the path is no chain from the root"
    assert tree.tokens[path].tolist() == result.tokens[:-1].tolist(), "the path's tokens are not those emitted"
    assert not tree.roles[path].any(), "the path enters a lookahead row"
    assert {0, *path} <= set(result.verified.tolist()), "the path leaves the verified nodes"


def request_of(
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    max_tokens: int = 24,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    num_logprobs: int = -1,
) -> SequenceRequest:
    """A request by hand."""
    return SequenceRequest(
        prompt=np.asarray(prompt, np.int32),
        sampling=sampling or SamplingParams(),
        limits=Limits(max_tokens, min_tokens, frozenset(stop_ids)),
        tenant="default",
        num_logprobs=num_logprobs,
    )


# ---- sources


def merged(
    drafts: Sequence[Draft], budget: int, mixture: Mixture | None = None, root: int = 0, position: int = 0
) -> CandidateTree:
    """The drafts' own estimates merged: draft s has row s of the mixture, by default what a session begins with."""
    together = Drafts.of(drafts)
    odds = np.array([kernels.log_odds(prob) for prob in together.probs], np.float64)
    rows = np.arange(len(drafts))
    return merge(together, odds, rows, mixture or Mixture.equal(len(drafts)), root, position, budget)


def chain(tokens: Sequence[int], prob: float = 0.8) -> Draft:
    """A draft without branches."""
    n = len(tokens)
    return Draft.of(tokens, list(range(-1, n - 1)), [prob] * n)


def _rng(context: NDArray[np.int32]) -> np.random.Generator:
    return np.random.default_rng([len(context), *context[-3:].tolist()])


def random_draft(rng: np.random.Generator, vocab_size: int, max_nodes: int, *, dyadic: bool = False) -> Draft:
    """A valid draft of any shape; `dyadic` probabilities are multiples of 1/64, so that small sums of them are exact."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    used: dict[int, float] = {}
    for _ in range(int(rng.integers(0, max_nodes + 1))):
        parent = int(rng.integers(-1, len(tokens)))
        token = int(rng.integers(vocab_size))
        if any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
            continue
        room = 1.0 - used.get(parent, 0.0)
        prob = float(np.float32(rng.random() * room * 0.999))
        if dyadic:
            prob = int(prob * 64) / 64
        used[parent] = used.get(parent, 0.0) + prob
        tokens.append(token)
        parents.append(parent)
        probs.append(prob)
    lengths = rng.integers(0, 20, len(tokens)).tolist()
    counts = rng.integers(0, 100, len(tokens)).tolist()
    return Draft.of(tokens, parents, probs, lengths, counts)


def shuffled(draft: Draft, rng: np.random.Generator) -> Draft:
    """The same draft with its nodes in another order, parents still before children."""
    left = list(range(len(draft)))
    order: list[int] = []
    while left:
        ready = [i for i in left if draft.parents[i] < 0 or draft.parents[i] in order]
        order.append(int(rng.choice(ready)))
        left.remove(order[-1])
    place = {old: new for new, old in enumerate(order)}
    parents = np.array([place.get(int(draft.parents[i]), -1) for i in order], np.int32)
    return Draft(draft.tokens[order], parents, draft.probs[order], draft.lengths[order], draft.counts[order])


def sources_for(target: FakeTarget, prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Source]:
    """One source of every kind; some of them know the `answer`."""
    whole = np.array([*prompt, *answer], np.int32)
    size = target.info.vocab_size

    def perfect(context: NDArray[np.int32]) -> Draft:
        return chain(whole[len(context) : len(context) + 6].tolist())

    def partial(context: NDArray[np.int32]) -> Draft:
        """The next three tokens, each beside a wrong sibling, then a wrong one."""
        right = whole[len(context) : len(context) + 3].tolist()
        tokens, parents, parent = list[int](), list[int](), -1
        for token in right:
            tokens += [(token + 1) % size, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft.of([*tokens, 0], [*parents, parent], [0.4] * (len(tokens) + 1))

    def worst(context: NDArray[np.int32]) -> Draft:
        """The least likely tokens, with full confidence."""
        path = list(context)
        for _ in range(4):
            path.append(int(np.argmin(target.logits(np.array(path, np.int32)))))
        return chain([int(t) for t in path[len(context) :]], 1.0)

    def late(context: NDArray[np.int32]) -> Draft:
        """What would have been right two tokens ago."""
        return chain(whole[max(len(context) - 2, 0) : len(context) + 2].tolist())

    def echo(context: NDArray[np.int32]) -> Draft:
        """What followed the last token when it was last seen."""
        seen = np.flatnonzero(context[:-1] == context[-1])
        return chain(context[seen[-1] + 1 : seen[-1] + 5].tolist()) if len(seen) else Draft.empty()

    def garbage(context: NDArray[np.int32]) -> Draft:
        return random_draft(_rng(context), size, 12)

    def broken(context: NDArray[np.int32]) -> Draft:
        """A draft that keeps no invariant for long."""
        turn = len(context) % 4
        tokens = [size + 7, 1] if turn == 0 else [1, 1]
        parents = [-1, 5] if turn == 1 else [-1, -1]
        return Draft.of(tokens, parents, [2.0 if turn == 2 else 0.5, 0.5])

    def crashing(context: NDArray[np.int32]) -> Draft:
        raise RuntimeError("this source always fails")

    def silent(context: NDArray[np.int32]) -> Draft:
        return Draft.empty()

    return {
        "perfect": perfect,
        "partial": partial,
        "worst": worst,
        "late": late,
        "echo": echo,
        "garbage": garbage,
        "broken": broken,
        "crashing": crashing,
        "silent": silent,
    }


# ---- twists


def with_lookahead(answer_after: Callable[[int], int]) -> Twist:
    """Add lookahead rows to every tree, the first holding the very token that will be chosen after the root.

    `answer_after(position)` is that token for a root at `position`. A walk that enters lookahead rows would enter this one.
    """

    def twist(tree: CandidateTree) -> CandidateTree:
        n = len(tree)
        tokens = [answer_after(tree.position), 1, 2]
        return CandidateTree(
            np.concatenate([tree.tokens, np.array(tokens, np.int32)]),
            np.concatenate([tree.parents, np.array([0, n, n + 1], np.int32)]),
            np.concatenate([tree.probs, np.zeros(3, np.float32)]),
            np.concatenate([tree.sources, np.zeros(3, np.int64)]),
            np.concatenate([tree.roles, np.full(3, LOOKAHEAD, np.uint8)]),
            tree.position,
        )

    return twist
