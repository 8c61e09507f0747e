"""The sampler: processors against their twin, the path as prefix, limits, log-probabilities, and requests refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.acceptance import Limits, SamplingParams
from engine.errors import InvalidRequest, PromptTooLong
from engine.target import TargetInfo
from engine.target.sampling import Said, Sampler, check_request, feedback, largest, likeliest, prompt_feedback, prompt_rows
from engine.tree import LookaheadRows
from tests.engine import oracles
from tests.oracles import tree_of
from tests.speculation import request_of

SIZE = 12
INFO = TargetInfo("fake", "fake", SIZE, 16, (0,), "float32", True)
PROCESSORS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(repetition_penalty=0.7),
    SamplingParams(presence_penalty=1.2, frequency_penalty=-0.4),
    SamplingParams(logit_bias=((3, 2.5), (7, -1e30), (1, -1.0))),
    SamplingParams(0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((2, 1.0),), seed=5),
    SamplingParams(1.4, top_k=6, top_p=0.9, min_p=0.01, repetition_penalty=1.3, frequency_penalty=1.0, seed=6),
]


def random_logits(rng: np.random.Generator, size: int = SIZE) -> NDArray[np.float32]:
    """float32 [size], coarse enough to tie now and then."""
    return np.round(rng.standard_normal(size) * 3, 1).astype(np.float32)


@given(st.sampled_from(PROCESSORS), st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_choices_are_the_twins_however_tokens_are_grouped_into_steps(
    params: SamplingParams, seed: int, steps: list[int]
) -> None:
    """Each choice is that of processors applied to the whole prefix, whether tokens are committed one by one or by the step."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, SIZE, 4).tolist()
    request = request_of(prompt, params, min_tokens=5, stop_ids=[0, 4])
    sampler = Sampler(request, SIZE)
    answer: list[int] = []
    for length in steps:
        emitted: list[int] = []
        for _ in range(length):
            logits = random_logits(rng)
            before = logits.tobytes()
            masked = [0, 4] if len(answer) + len(emitted) < 5 else []
            scores = oracles.process(logits, prompt, answer + emitted, params, masked)
            token = sampler.choose(logits, emitted)
            assert token == oracles.choose(scores, params, len(prompt) + len(answer) + len(emitted))
            assert logits.tobytes() == before, "the logits were changed"
            emitted.append(token)
        sampler.commit(np.array(emitted, np.int32))
        answer += emitted
    assert sampler.num_emitted == len(answer)


def test_asking_changes_nothing() -> None:
    """A choice is a pure function of logits and prefix: asked twice, or for other paths in between, it is the same."""
    rng = np.random.default_rng(1)
    sampler = Sampler(request_of([1, 2], PROCESSORS[-1]), SIZE)
    logits = random_logits(rng)
    first = sampler.choose(logits, [3])
    for path in ([], [3, 3, 3], [5]):
        sampler.choose(random_logits(rng), path)
    assert sampler.choose(logits, [3]) == first


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """At temperature 0 the first of equal maxima is chosen."""
    logits = np.array([1, 5, 2, 5, 5], np.float32)
    assert Sampler(request_of([1]), 5).choose(logits, []) == 1


def test_a_penalty_counts_the_path_not_only_the_committed_prefix() -> None:
    """A token repeated on the drafted path is penalized as it would be when decoding one at a time."""
    logits = np.array([2.0, 1.9, 0.0], np.float32)
    sampler = Sampler(request_of([2], SamplingParams(presence_penalty=0.5)), 3)
    assert sampler.choose(logits, []) == 0
    assert sampler.choose(logits, [0]) == 1
    assert sampler.choose(logits, [0, 1]) == 0
    sampler.commit(np.array([0], np.int32))
    assert sampler.choose(logits, []) == 1


def test_repetition_penalty_sees_the_prompt_and_the_others_do_not() -> None:
    """CTRL's penalty is over prompt and answer, OpenAI's over the answer."""
    logits = np.array([2.0, 1.9, 0.0], np.float32)
    assert Sampler(request_of([0], SamplingParams(repetition_penalty=1.5)), 3).choose(logits, []) == 1
    assert Sampler(request_of([0], SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)), 3).choose(logits, []) == 0


def test_stop_ids_cannot_be_chosen_before_min_tokens() -> None:
    """The mask holds for the first min_tokens choices, counted along the path, and then goes."""
    logits = np.array([5.0, 1.0, 0.0], np.float32)
    sampler = Sampler(request_of([2], min_tokens=2, stop_ids=[0]), 3)
    assert [sampler.choose(logits, [1] * n) for n in range(4)] == [1, 1, 0, 0]
    sampler.commit(np.array([1, 1], np.int32))
    assert sampler.choose(logits, []) == 0


def test_noise_is_keyed_by_the_absolute_position() -> None:
    """The same logits at the same position get the same noise whatever the split into prompt, committed tokens and path."""
    logits = np.zeros(1000, np.float32)
    params = SamplingParams(1.0, seed=3)
    whole = Sampler(request_of([1, 2, 3, 4], params), 1000).choose(logits, [])
    assert Sampler(request_of([1], params), 1000).choose(logits, [2, 3, 4]) == whole
    stepped = Sampler(request_of([1], params), 1000)
    stepped.commit(np.array([2, 3], np.int32))
    assert stepped.choose(logits, [4]) == whole
    assert stepped.choose(logits, []) != whole


def test_seeds_differ() -> None:
    """Over 1000 equal scores, 20 seeds choose at least 15 different tokens (chance of fewer: below 1e-9)."""
    logits = np.zeros(1000, np.float32)
    chosen = {Sampler(request_of([1], SamplingParams(1.0, seed=seed)), 1000).choose(logits, []) for seed in range(20)}
    assert len(chosen) >= 15


def test_the_context_limits_new_tokens() -> None:
    """max_tokens is what fits, and min_tokens never exceeds it."""
    request = request_of([1] * 13, max_tokens=100, min_tokens=50, stop_ids=[0])
    assert Sampler(request, SIZE, 16).limits == Limits(3, 3, frozenset({0}))
    assert Sampler(request, SIZE).limits == request.limits


# ---- what is reported


def test_logprobs_are_log_softmax_of_the_raw_logits() -> None:
    """They are a float64 log-softmax before any processor; the top come best first, ties to the lowest id."""
    rng = np.random.default_rng(4)
    logits = np.stack([random_logits(rng) for _ in range(3)])
    logits[0, [2, 5, 7]] = 9.0
    request = request_of([1], PROCESSORS[-1], num_logprobs=4)
    found = Sampler(request, SIZE).logprobs(logits, np.array([5, 0, 1], np.int32))
    assert found is not None
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert found.chosen == pytest.approx(exact[[0, 1, 2], [5, 0, 1]], abs=1e-12)
    for row in range(3):
        order = sorted(range(SIZE), key=lambda v: (-logits[row, v], v))[:4]
        assert found.top_ids[row].tolist() == order
        assert found.top[row] == pytest.approx(exact[row, order], abs=1e-12)


def test_logprobs_come_as_asked_for() -> None:
    """-1 gives none, 0 only the emitted token's."""
    logits = np.zeros((1, SIZE), np.float32)
    token = np.array([3], np.int32)
    assert Sampler(request_of([1]), SIZE).logprobs(logits, token) is None
    found = Sampler(request_of([1], num_logprobs=0), SIZE).logprobs(logits, token)
    assert found is not None and found.top_ids.shape == found.top.shape == (1, 0)
    assert found.chosen.tolist() == pytest.approx([-np.log(SIZE)])


@given(st.integers(0, 2**32), st.integers(0, 14))
def test_largest_is_a_stable_full_sort(seed: int, k: int) -> None:
    """The k largest, best first, ties to the lowest id; all of them where k exceeds the row."""
    row = random_logits(np.random.default_rng(seed), 12)
    assert largest(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()


@given(st.integers(0, 2**32), st.integers(0, 14), st.sampled_from([5, 12, 64, 300, 1000]))
def test_the_likeliest_of_many_rows_are_a_stable_full_sort(seed: int, k: int, size: int) -> None:
    """As `largest`, for each row, whether or not blocks are passed over; -inf and NaN come last."""
    rng = np.random.default_rng(seed)
    rows = np.stack([random_logits(rng, size) for _ in range(3)])
    rows[1, rng.integers(0, size, size // 3)] = -np.inf
    plain = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    assert likeliest(rows, k).tolist() == plain.tolist()
    rows[2, rng.integers(0, size, 3)] = np.nan
    shown = np.where(np.isnan(rows), -np.inf, rows)
    assert likeliest(rows, k).tolist() == np.argsort(-shown, axis=1, kind="stable")[:, :k].tolist()


def test_the_prompts_rows_are_those_before_its_last_token() -> None:
    """As many as asked for and there are; their nodes are the prompt's tokens, each the parent of the next."""
    request = replace(request_of([7, 1, 2, 5]), feedback_top_k=2, feedback_prompt=2)
    assert prompt_rows(request) == 2
    found = prompt_feedback(request, [np.array([[3, 2]], np.int32), np.array([[9, 1]], np.int32)])
    assert (found.nodes.tolist(), found.parents.tolist()) == ([1, 2], [-1, 0])
    assert found.top_ids.tolist() == [[3, 2], [9, 1]]
    assert prompt_rows(replace(request, feedback_prompt=99)) == 3
    assert prompt_rows(replace(request, feedback_top_k=0)) == 0 == prompt_rows(request_of([7]))
    assert not len(prompt_feedback(request, []).nodes)


def test_feedback_has_a_row_for_every_verified_node() -> None:
    """Row i holds the likeliest successors of node i and its token; nobody asking gets empty arrays."""
    tree = tree_of([-1, 0, 1], [7, 1, 2])
    logits = np.array([[0, 3, 2], [9, 1, 1], [1, 1, 1]], np.float32)
    found = feedback(tree, likeliest(logits[:2], 2))
    assert found.top_ids.tolist() == [[1, 2], [0, 1]]
    assert found.nodes.tolist() == [7, 1] and found.parents.tolist() == [-1, 0] and not found.num_lookahead
    rows = LookaheadRows(np.array([3], np.int32), np.array([-1], np.int32))
    assert feedback(tree.with_lookahead(rows), np.zeros((4, 1), np.int32)).num_lookahead == 1
    for top_k, shape in ((2, (3, 2)), (0, (0, 0))):
        request = replace(request_of([7], max_tokens=9), feedback_top_k=top_k)
        assert Sampler(request, 3).step(tree, Said(logits)).feedback.top_ids.shape == shape


# ---- what is asked of a pass


def test_the_rule_alone_is_asked_for_and_says_the_same() -> None:
    """Whatever depends on one row alone: choices, whose tokens step like the logits they come from."""
    tree, rng = tree_of([-1, 0, 0, 1], [3, 1, 2, 5]), np.random.default_rng(2)
    for params in (SamplingParams(), SamplingParams(0.7, top_k=4, top_p=0.5), SamplingParams(0.9, min_p=0.1, seed=2**64 - 1)):
        request = replace(request_of([4, 3], params), feedback_top_k=2)
        sampler = Sampler(request, SIZE)
        tree = replace(tree, position=1)
        ask = sampler.ask(tree)
        assert ask.choices is not None and (ask.num_rows, ask.top_k, len(ask.choices)) == (4, 2, 4)
        assert ask.choices.position.tolist() == [2, 3, 3, 4]
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            assert getattr(ask.choices, name).tolist() == [getattr(params, name)] * 4
        logits = np.stack([random_logits(rng) for _ in range(4)])
        depths = [0, 1, 1, 2]
        chosen = np.array([sampler.choose(row, [0] * depth) for row, depth in zip(logits, depths, strict=True)])
        told = Said(chosen=chosen, top_ids=likeliest(logits, 2))
        one, other = sampler.step(tree, told), Sampler(request, SIZE).step(tree, Said(logits))
        assert one.tokens.tolist() == other.tokens.tolist() and one.path.tolist() == other.path.tolist()
        assert np.array_equal(one.feedback.top_ids, other.feedback.top_ids)


def test_logits_are_asked_for_where_the_rule_is_not_all() -> None:
    """Penalties, biases, log-probabilities, and stop ids while they are masked."""
    tree = tree_of([-1], [2])
    for params in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=1),
        SamplingParams(frequency_penalty=-1),
        SamplingParams(logit_bias=((1, 2.0),)),
    ):
        assert Sampler(request_of([2], params), SIZE).ask(tree).choices is None
    assert Sampler(request_of([2], num_logprobs=0), SIZE).ask(tree).choices is None
    sampler = Sampler(request_of([2], min_tokens=2, stop_ids=[0]), SIZE)
    assert sampler.ask(tree).choices is None
    sampler.commit(np.array([1, 1], np.int32))
    assert sampler.ask(tree).choices is not None


# ---- requests refused


def sampling(**changes: Any) -> dict[str, Any]:
    """Changes of a request: these sampling parameters."""
    return {"sampling": SamplingParams(**changes)}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": np.zeros(0, np.int32)}, "prompt"),
        ({"prompt": np.array([1, SIZE], np.int32)}, "prompt"),
        ({"prompt": np.array([-1], np.int32)}, "prompt"),
        ({"limits": Limits(0)}, "max_tokens"),
        ({"limits": Limits(3, 4)}, "min_tokens"),
        ({"limits": Limits(3, 0, frozenset({SIZE}))}, "stop_token_ids"),
        ({"limits": Limits(3, 0, frozenset({-1}))}, "stop_token_ids"),
        ({"num_logprobs": -2}, "logprobs"),
        ({"num_logprobs": SIZE + 1}, "logprobs"),
        (sampling(temperature=-1.0), "temperature"),
        (sampling(top_k=-1), "top_k"),
        (sampling(top_p=0.0), "top_p"),
        (sampling(min_p=1.0), "min_p"),
        (sampling(repetition_penalty=0.0), "repetition_penalty"),
        (sampling(presence_penalty=3.0), "presence_penalty"),
        (sampling(frequency_penalty=3.0), "frequency_penalty"),
        (sampling(logit_bias=((SIZE, 1.0),)), "logit_bias"),
        (sampling(seed=-1), "seed"),
    ],
)
def test_a_request_that_cannot_be_decoded_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    """InvalidRequest names the field that is wrong."""
    good = request_of([1, 2])
    check_request(good, INFO)
    with pytest.raises(InvalidRequest) as caught:
        check_request(replace(good, **changes), INFO)
    assert caught.value.field == field


def test_a_prompt_must_leave_room_for_one_token() -> None:
    """A prompt one below the context is served, one that fills it is refused as too long."""
    check_request(request_of([1] * 15), INFO)
    with pytest.raises(PromptTooLong, match="16 tokens"):
        check_request(request_of([1] * 16), INFO)
