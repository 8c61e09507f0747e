"""Steps that nobody had asked for: late trees are answered as if they had come in time, and nobody is waited for in vain."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.calibration import Calibration
from engine.session import Session
from engine.target.ahead import below
from engine.tree import CandidateTree, Draft
from tests.engine.test_target_local import PROMPT, REQUESTS, Broken, Local, fake, local
from tests.oracles import Decoded
from tests.speculation import ask, check_result, merged, random_draft, request_of, sources_for, speculate


async def others(target: Local, num_passes: int) -> None:
    """So many passes that are run for others."""
    for i in range(num_passes):
        async with target.open(request_of([i % 90], max_tokens=2)) as other:
            await other.step(CandidateTree.root_only(i % 90, 0))


@pytest.mark.parametrize("name", ["greedy", "1.3, everything"])
def test_late_trees_are_answered_as_if_they_had_come_in_time(name: str) -> None:
    """A sequence that goes on unasked while its trees are late, right and wrong ones of any size: the same text, `==`.

    Feedback and log-probabilities fit the tree; it goes a few tokens ahead at most; its end is told when it is asked for.
    """
    target = local()
    request = replace(REQUESTS[name], feedback_top_k=2)
    plain, _ = speculate(fake(target), request, {})
    sources = sources_for(fake(target), PROMPT, plain.tokens)
    rng = np.random.default_rng(1)

    async def run() -> tuple[Decoded, list[int]]:
        session = Session(request.prompt, list(sources), Calibration(), 9)
        logprobs, ahead = list[float](), list[int]()
        async with target.open(request) as sequence:
            while not session.finished:
                some = [sources[label] if rng.random() < 0.5 else lambda context: Draft.empty() for label in sources]
                tree = session.tree([ask(one, session.tokens, target.info.vocab_size) for one in some], sequence.curve)
                await others(target, int(rng.integers(0, 7)))
                ahead.append(sequence.num_ahead)
                result = await sequence.step(tree)
                check_result(tree, result)
                heard, rows = result.feedback, result.verified.tolist()
                assert heard.nodes.tolist() == tree.tokens[rows].tolist()
                assert [rows[at] if at >= 0 else -1 for at in heard.parents.tolist()] == tree.parents[rows].tolist()
                path = [0, *result.path.tolist()]
                for node, token in zip(path, result.tokens.tolist(), strict=True):
                    assert name != "greedy" or heard.top_ids[rows.index(node), 0] == token
                logprobs.extend([] if result.logprobs is None else result.logprobs.chosen.tolist())
                session.commit(result)
            with pytest.raises(RuntimeError, match="finished"):
                await sequence.step(CandidateTree.root_only(int(session.tokens[-1]), len(session.tokens) - 1))
        return Decoded(session.tokens[len(PROMPT) :].tolist(), session.finish, logprobs), ahead

    seen = list[int]()
    for _ in range(3):
        found, ahead = asyncio.run(run())
        assert found == plain
        seen += ahead
    assert len(set(seen)) >= 3 and max(seen) <= 4
    target.check()


def test_a_sequence_ahead_may_lose_its_memory() -> None:
    """Steps that were not delivered survive preemption, and the tokens after them are the same."""
    target = local()
    request = request_of(PROMPT, max_tokens=30)
    plain, _ = speculate(fake(target), request, {})

    async def run() -> list[int]:
        tokens = list[int]()
        async with target.open(request) as sequence:
            while len(tokens) < 30:
                await others(target, len(tokens) % 4)
                if len(tokens) % 5 == 0:
                    target.preempt(sequence)
                root = CandidateTree.root_only([*PROMPT, *tokens][-1], len(PROMPT) - 1 + len(tokens))
                tokens += (await sequence.step(root)).tokens.tolist()
        return tokens

    assert asyncio.run(run()) == plain.tokens
    target.check()


def test_what_fails_unasked_is_told_when_asked() -> None:
    """A step that nobody asked for and that fails disturbs no pass; its sequence hears of it at its next step."""
    target = local()

    async def run() -> None:
        async with target.open(request_of(PROMPT, max_tokens=6)) as broken:
            broken._sampler = cast(Any, Broken(broken._sampler))
            await others(target, 3)
            assert not broken.num_ahead
            with pytest.raises(ArithmeticError):
                await broken.step(CandidateTree.root_only(PROMPT[-1], len(PROMPT) - 1))

    asyncio.run(run())
    target.check()


def test_a_pass_waits_for_who_may_come_and_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of unlike speed: both are in every pass, until the slow one has been waited for in vain; passes go on without
    it until it comes back."""
    target = local()
    request = request_of(PROMPT, max_tokens=40)
    plain, _ = speculate(fake(target), request, {})
    text = PROMPT + plain.tokens

    def patience(share: float) -> None:
        monkeypatch.setattr("engine.target.local._PATIENCE", share)

    def tree(at: int, size: int) -> CandidateTree:
        tokens = np.array(text[at : at + size], np.int32)
        parents, probs = np.arange(-1, size - 1, dtype=np.int32), np.ones(size, np.float32)
        return CandidateTree(tokens, parents, probs, np.minimum(np.arange(size), 1), np.zeros(size, np.uint8), at)

    async def run() -> None:
        async with target.open(request) as fast, target.open(request) as slow:
            slow.is_expected = True
            patience(1e9)
            at = len(PROMPT) - 1
            for _ in range(3):
                waits = asyncio.create_task(fast.step(tree(at, 3)))
                for _ in range(30):
                    await asyncio.sleep(0)
                assert not waits.done()
                await slow.step(tree(at, 3))
                await waits
                at += 3
            patience(0.0)
            await fast.step(tree(at, 3))
            assert slow.num_ahead == 1
            patience(1e9)
            await asyncio.wait_for(fast.step(tree(at + 3, 3)), 20)
            assert slow.num_ahead == 2 and (await slow.step(tree(at, 2))).tokens.tolist() == text[at + 1 : at + 3]
            waits = asyncio.create_task(fast.step(tree(at + 6, 1)))
            for _ in range(30):
                await asyncio.sleep(0)
            assert not waits.done()
            await asyncio.wait_for(asyncio.gather(waits, slow.step(tree(at + 2, 1))), 20)

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_tree_below_a_node_is_a_tree(seed: int, most: int) -> None:
    """Against its twin by paths: the same paths as in the whole, in the same order, less the way to the new root."""
    rng = np.random.default_rng(seed)
    tree = merged([random_draft(rng, 6, most)], most, position=3)
    node = int(rng.integers(len(tree)))
    rest, nodes = below(tree, node)
    rest.validate(8)

    def way(of: CandidateTree, at: int) -> list[int]:
        return [] if at < 0 else [*way(of, int(of.parents[at])), at]

    mine = [at for at in range(len(tree)) if node in way(tree, at)]
    assert nodes.tolist() == mine and rest.position == 3 + len(way(tree, node)) - 1
    for i, at in enumerate(mine):
        assert [mine[j] for j in way(rest, i)] == [j for j in way(tree, at) if j >= node]
        assert rest.tokens[i] == tree.tokens[at] and rest.probs[i] == pytest.approx(tree.probs[at] / tree.probs[node])
