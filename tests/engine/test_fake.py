"""The fake target is a language model: its logits are a function of the path, so a wrong parent, token or position shows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.errors import InvalidRequest, PromptTooLong
from engine.target import StepResult
from engine.target.fake import FakeTarget
from engine.tree import CandidateTree
from tests.oracles import array, tree_of
from tests.speculation import request_of


def step(target: FakeTarget, tree: CandidateTree, prompt: tuple[int, ...] = (1, 2), **options: int) -> StepResult:
    """One step of a fresh sequence."""

    async def run() -> StepResult:
        async with target.open(request_of(prompt, num_logprobs=options.get("num_logprobs", -1))) as sequence:
            return await sequence.step(tree)

    return asyncio.run(run())


def greedy(target: FakeTarget, path: list[int], count: int) -> list[int]:
    """The next `count` tokens after `path`."""
    for _ in range(count):
        path = [*path, int(np.argmax(target.logits(array(path))))]
    return path[-count:]


def test_logits_are_a_function_of_the_last_tokens() -> None:
    """`order` tokens decide; the same ones give the same logits in any instance, any other give others."""
    target, twin = FakeTarget(order=3), FakeTarget(order=3)
    base = target.logits(array([9, 1, 2, 3]))
    assert base.dtype == np.float32 and base.shape == (64,)
    assert np.array_equal(base, twin.logits(array([8, 1, 2, 3])))
    for other in ([9, 5, 2, 3], [9, 1, 5, 3], [9, 1, 2, 5], [9, 2, 1, 3]):
        assert not np.array_equal(base, target.logits(array(other)))


def test_a_right_branch_is_accepted_below_its_own_parent_only() -> None:
    """The model's own continuation is accepted as a chain; with its second node hung below another parent it ends there."""
    target = FakeTarget()
    first, second, third = greedy(target, [1, 2], 3)
    wrong = (first + 1) % 64
    right = step(target, tree_of([-1, 0, 1, 0], [2, first, second, wrong], position=1))
    assert right.path.tolist() == [1, 2] and right.tokens.tolist() == [first, second, third]
    moved = step(target, tree_of([-1, 0, 0, 2], [2, first, wrong, second], position=1))
    assert moved.path.tolist() == [1] and moved.tokens.tolist() == [first, second]


def test_a_tree_that_does_not_fit_the_sequence_is_refused_and_changes_nothing() -> None:
    """A wrong position or root or a broken invariant raises ValueError; the sequence goes on as if nothing had been asked."""
    target = FakeTarget()

    async def run() -> None:
        async with target.open(request_of([1, 2])) as sequence:
            for bad in [
                CandidateTree.root_only(2, 0),
                CandidateTree.root_only(2, 2),
                CandidateTree.root_only(3, 1),
                tree_of([-1, 0], [2, 64], position=1),
                tree_of([-1, 1], [2, 3], position=1),
            ]:
                with pytest.raises(ValueError):
                    await sequence.step(bad)
            result = await sequence.step(CandidateTree.root_only(2, 1))
            assert result.tokens.tolist() == greedy(target, [1, 2], 1)

    asyncio.run(run())


def test_a_finished_sequence_refuses_to_go_on() -> None:
    """After the last token, step() raises RuntimeError."""
    target = FakeTarget()

    async def run() -> None:
        async with target.open(request_of([1, 2], max_tokens=1)) as sequence:
            result = await sequence.step(CandidateTree.root_only(2, 1))
            assert result.finish == "length"
            with pytest.raises(RuntimeError, match="finished"):
                await sequence.step(CandidateTree.root_only(int(result.tokens[-1]), 2))

    asyncio.run(run())


def test_open_sequences_are_counted_and_freed() -> None:
    """num_open follows the contexts, also when one is left by an exception; a refused request opens nothing."""
    target = FakeTarget(context_length=8)

    async def run() -> None:
        async with target.open(request_of([1])):
            with pytest.raises(KeyError):
                async with target.open(request_of([2])):
                    assert target.num_open == 2
                    raise KeyError
            assert target.num_open == 1
            for prompt, error in [([64], InvalidRequest), ([1] * 8, PromptTooLong)]:
                with pytest.raises(error):
                    async with target.open(request_of(prompt)):
                        pass
        assert target.num_open == 0

    asyncio.run(run())


def test_rows_beyond_the_limit_are_cut() -> None:
    """A tree larger than max_rows is verified as far as it goes, and the result says which nodes were."""
    target = FakeTarget()
    said = greedy(target, [1, 2], 80)
    result = step(target, tree_of(range(-1, 80), [2, *said], position=1))
    assert result.verified.tolist() == list(range(target.info.max_rows))
    assert result.tokens.tolist() == said[:24]


def test_logprobs_and_feedback_come_with_the_path() -> None:
    """Log-probabilities stand for each emitted token, at the row it was chosen from."""
    target = FakeTarget()
    first, second, _ = greedy(target, [1, 2], 3)
    result = step(target, tree_of([-1, 0], [2, first], position=1), num_logprobs=1)
    assert result.logprobs is not None
    assert result.logprobs.top_ids[:, 0].tolist() == [first, second]
    assert result.logprobs.chosen.tolist() == result.logprobs.top[:, 0].tolist()


def test_a_spell_is_what_the_model_would_rather_say() -> None:
    """After any token of its spell the model goes on with the spell."""
    spell = [10, 11, 12, 13, 14]
    assert greedy(FakeTarget(spell=spell), [3, 10], 4) == spell[1:]
