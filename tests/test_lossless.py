"""A draft is a hint: whatever is drafted, what is said is what decoding one token at a time says.

Four judges, from the strictest to the most literal.

    exact      the law of the next tokens, summed over everything chance may do, is that of plain decoding to 1e-12
    equal      tokens, finish reason and log-probabilities are `==` those of plain decoding, for every set of sources
    chance     50,000 seeded runs of the real walk and noise pass chi-square tests of the joint law and every conditional
    mutations  each known way to get it wrong, switched on, is caught by one of the judges above

The theory is in `engine/acceptance.py`; the reading page is docs/lossless.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import acceptance, kernels
from engine.acceptance import Limits, SamplingParams, Walk, walk
from engine.calibration import Calibration
from engine.drafters.lookahead import LookaheadDrafter
from engine.drafters.prompt import PromptDrafter
from engine.drafters.recycle import RecycleDrafter
from engine.target import SequenceRequest, sampling
from engine.target.fake import FakeTarget
from engine.target.sampling import Sampler
from engine.tree import CandidateTree, CostCurve, Draft
from tests.engine import oracles
from tests.oracles import (
    DRAFT_LAWS,
    FAULTS,
    Coins,
    Decoded,
    Law,
    Model,
    Plan,
    Prefix,
    Step,
    bias,
    check_lossless,
    decode,
    distance,
    enumerate_runs,
    joint_law,
    random_model,
    ratio_node,
    ratio_step,
    rows_step,
    shapes,
    tree_of,
)
from tests.speculation import (
    Hint,
    Source,
    chain,
    decode_by_loop,
    merged,
    random_draft,
    request_of,
    shuffled,
    sources_for,
    speculate,
    with_lookahead,
)

UNLIMITED = Limits(max_tokens=10**6)


# ---- exact: every way chance may fall


def match_step(target: Model, trees: Callable[[Prefix], CandidateTree]) -> Step:
    """Sample and match with the engine's own walk; the target's choices are the coins."""

    def step(prefix: Prefix, coins: Coins) -> list[int]:
        taken = walk(trees(prefix), lambda node, emitted: coins.pick(target((*prefix, *emitted))), UNLIMITED, 0)
        return [int(token) for token in taken.tokens]

    return step


def labelled(parents: Sequence[int], target: Model, draft: Callable[[Law], Law]) -> Callable[[Prefix], CandidateTree]:
    """Trees of one shape whose children are, at every node, the likeliest tokens under a draft law."""
    cache: dict[Prefix, CandidateTree] = {}

    def tree(prefix: Prefix) -> CandidateTree:
        if prefix not in cache:
            paths: list[Prefix] = [prefix]
            for i in range(1, len(parents)):
                law = draft(target(paths[parents[i]]))
                ranked = sorted(range(len(law)), key=lambda v: (-law[v], v))
                paths.append((*paths[parents[i]], ranked[parents[:i].count(parents[i])]))
            cache[prefix] = tree_of(parents, [path[-1] if path else 0 for path in paths])
        return cache[prefix]

    return tree


@pytest.mark.parametrize("draft", DRAFT_LAWS)
def test_every_tree_shape_leaves_the_law_of_the_text_unchanged(draft: str) -> None:
    """All shapes of up to 6 candidates, drafted by an adversary: the next three tokens have plain decoding's law."""
    for number, parents in enumerate(shapes(6, 3, 3)):
        target = random_model(number, 3, zeros=number % 2)
        check_lossless(match_step(target, labelled(parents, target, DRAFT_LAWS[draft])), target)


@pytest.mark.parametrize("size", [2, 4])
def test_merged_random_drafts_leave_the_law_of_the_text_unchanged(size: int) -> None:
    """Trees merged from random drafts, cut anywhere, other ones at every step: the law of three tokens is plain decoding's."""
    for seed in range(40):
        target = random_model(seed, size)

        def tree(prefix: Prefix, seed: int = seed) -> CandidateTree:
            rng = np.random.default_rng([seed, *prefix])
            drafts = [random_draft(rng, size, 8) for _ in range(3)]
            return merged(drafts, int(rng.integers(0, 7)))

        check_lossless(match_step(target, tree), target)


def test_endings_have_the_law_of_plain_decoding() -> None:
    """With a stop id, min_tokens and max_tokens, whole answers and their ends have the law of decoding one token at a time."""
    size, end = 3, 3

    def masked(law: Law) -> Law:
        left = [0.0, *law[1:]]
        return tuple(weight / sum(left) for weight in left)

    for seed, (max_tokens, min_tokens) in enumerate([(1, 0), (3, 0), (3, 1), (4, 2), (4, 4)] * 4):
        target = random_model(seed, size)
        limits = Limits(max_tokens, min_tokens, frozenset({0}))

        def law(prefix: Prefix, target: Model = target, min_tokens: int = min_tokens) -> Law:
            return masked(target(prefix)) if len(prefix) < min_tokens else target(prefix)

        def speculative(prefix: Prefix, coins: Coins, law: Model = law, limits: Limits = limits, seed: int = seed) -> list[int]:
            if end in prefix:
                return [end]
            draft = random_draft(np.random.default_rng([seed, *prefix]), size, 8)
            tree = merged([draft], 6)
            taken = walk(tree, lambda node, emitted: coins.pick(law((*prefix, *emitted))), limits, len(prefix))
            return [*taken.tokens.tolist(), end] if taken.finish else taken.tokens.tolist()

        def plain(prefix: Prefix, coins: Coins, law: Model = law, limits: Limits = limits) -> list[int]:
            if end in prefix:
                return [end]
            token = coins.pick(law(prefix))
            count = len(prefix) + 1
            return [token, end] if count == limits.max_tokens or (token == 0 and count > limits.min_tokens) else [token]

        assert distance(joint_law(speculative, 5), joint_law(plain, 5)) <= 1e-12


def test_match_accepts_as_often_as_any_lossless_rule_can() -> None:
    """For a child set C fixed before verification, the walk goes down with probability target(C), which is the optimum."""
    target = random_model(1, 4)
    law = target(())
    for children in [(0,), (3,), (1, 2), (0, 1, 2, 3)]:
        tree = tree_of([-1] + [0] * len(children), [0, *children])

        def accepts(coins: Coins, tree: CandidateTree = tree) -> bool:
            return len(walk(tree, lambda node, emitted: coins.pick(target(tuple(emitted))), UNLIMITED, 0).path) > 0

        chance = sum(weight for weight, accepted in enumerate_runs(accepts) if accepted)
        assert chance == pytest.approx(sum(law[token] for token in children), abs=1e-12)


# ---- exact: the ratio rule and its wrong ways


PLANS = [
    *FAULTS.values(),
    Plan(num_sampled=3),
    Plan(num_sampled=3, replacement=False),
    Plan(num_sampled=2, num_fixed=1),
    Plan(num_sampled=2, num_fixed=1, sampled_first=False),
    Plan(num_sampled=1, num_fixed=2, sampled_first=False, renormalize=True),
    Plan(num_sampled=2, num_fixed=1, sampled_first=False, replacement=False),
    Plan(num_fixed=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_ratio_rule_is_exact(plan: Plan) -> None:
    """The twin's sequential residual rule keeps the law of the text for every plan of children and every draft law."""
    for seed, draft in enumerate(DRAFT_LAWS.values()):
        target = random_model(seed, 3)
        check_lossless(ratio_step(target, draft, plan), target)


def test_the_ratio_rule_accepts_a_sampled_child_with_the_overlap_of_both_laws() -> None:
    """One sampled child is accepted with probability sum min(target, draft), the most there can be."""
    for seed, draft in enumerate(DRAFT_LAWS.values()):
        target_law = random_model(seed, 4)(())
        draft_law = draft(target_law)
        runs = enumerate_runs(lambda coins: ratio_node(coins, target_law, draft_law, Plan(num_sampled=1)))  # noqa: B023
        chance = sum(weight for weight, (_, accepted) in runs if accepted)
        assert chance == pytest.approx(sum(map(min, target_law, draft_law)), abs=1e-12)


def worst_case(step_of: Callable[[Model, Callable[[Law], Law]], Step]) -> tuple[Step, Model, float]:
    """The case, of a few models and all draft laws, in which a rule is most biased."""
    cases = []
    for seed in range(3):
        target = random_model(seed, 3)
        for draft in DRAFT_LAWS.values():
            step = step_of(target, draft)
            cases.append((step, target, bias(step, target)))
    return max(cases, key=lambda case: case[2])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_ratio_rule_is_caught(fault: str) -> None:
    """Each wrong way to write the rule is biased by more than 0.005, and the check that passes the right one refuses it."""
    plan = FAULTS[fault]
    step, target, found = worst_case(lambda target, draft: ratio_step(target, draft, plan, fault))
    assert found > 0.005
    with pytest.raises(AssertionError, match="is off by"):
        check_lossless(step, target)
    _, _, right = worst_case(lambda target, draft: ratio_step(target, draft, plan))
    assert right <= 1e-12


def test_drawing_once_per_row_is_caught() -> None:
    """Independent draws in each row, the longest agreement winning, favour what is drafted twice; one row alone is exact."""
    step, target, found = worst_case(lambda target, draft: rows_step(target, lambda prefix: [(0, 1), (1, 2)]))
    assert found > 0.005
    with pytest.raises(AssertionError, match="is off by"):
        check_lossless(step, target)
    check_lossless(rows_step(target, lambda prefix: [(0, 1)]), target)


# ---- equal: speculation on and off


class CoarseTarget(FakeTarget):
    """A target whose logits are whole numbers, so that the largest is often shared: ties must be broken one way."""

    def logits(self, path: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [V], rounded."""
        return np.round(super().logits(path))


PROMPT = [3, 1, 4, 1, 5]
ENDING: Mapping[str, Any] = {"min_tokens": 6, "stop_ids": [0, 7]}
REQUESTS = {
    "greedy": request_of(PROMPT, num_logprobs=2),
    "greedy, penalties and stops": request_of(
        PROMPT, SamplingParams(repetition_penalty=1.3, frequency_penalty=0.6), num_logprobs=0, **ENDING
    ),
    "0.7, top_p": request_of(PROMPT, SamplingParams(0.7, top_p=0.9, seed=11), num_logprobs=1),
    "0.7, everything": request_of(
        PROMPT,
        SamplingParams(0.7, 20, 0.95, 0.01, 1.2, 0.4, 0.3, ((2, 1.5), (9, -4.0)), 2**64 - 1),
        num_logprobs=2,
        **ENDING,
    ),
    "1.3": request_of(PROMPT, SamplingParams(1.3, seed=12)),
    "1.3, everything": request_of(
        PROMPT, SamplingParams(1.3, 0, 0.9, 0.02, 1.5, 0.8, -0.2, ((5, 2.0),), 13), num_logprobs=0, **ENDING
    ),
}


def targets() -> list[FakeTarget]:
    """One that is hard to guess, one that repeats itself, one full of ties."""
    return [FakeTarget(24, order=3, sharpness=1.5), FakeTarget(24, order=1, sharpness=4.0), CoarseTarget(24, sharpness=1.0)]


def source_sets(sources: Mapping[str, Source]) -> dict[str, dict[str, Source]]:
    """None, each, all, all but the right ones, and one source many times."""
    wrong = {name: source for name, source in sources.items() if name not in ("perfect", "partial")}
    return {
        "none": {},
        **{name: {name: source} for name, source in sources.items()},
        "all": dict(sources),
        "all wrong": wrong,
        "duplicates": {f"{name}:{i}": sources[name] for i in range(3) for name in ("partial", "garbage")},
    }


def assert_equal(found: Decoded, plain: Decoded, exact: Decoded) -> None:
    """Tokens, finish and log-probabilities equal plain decoding's, and the definition's (log-probabilities to rounding)."""
    assert (found.tokens, found.finish) == (exact.tokens, exact.finish)
    assert found == plain
    assert found.logprobs == pytest.approx(exact.logprobs, abs=1e-12)


@pytest.mark.parametrize("name", REQUESTS)
def test_output_is_equal_with_every_set_of_sources(name: str) -> None:
    """No source, each, all, only wrong ones, duplicates: the same tokens, finish and log-probabilities, bit for bit."""
    request = REQUESTS[name]
    for target in targets():
        exact = decode(target, request)
        plain, _ = speculate(target, request, {})
        sources = sources_for(target, PROMPT, exact.tokens)
        for label, some in source_sets(sources).items():
            found, tally = speculate(target, request, some)
            assert_equal(found, plain, exact)
            if label == "perfect":
                assert tally.num_steps <= math.ceil(len(exact.tokens) / 7) + 1, "a perfect source must be accepted"
            if label == "all" and len(exact.tokens) > 7:
                assert tally.num_accepted > tally.num_steps, "the test has no teeth unless much is accepted"


@pytest.mark.parametrize("name", REQUESTS)
def test_output_survives_any_bending_of_the_drafts(name: str) -> None:
    """Nodes shuffled, sources permuted or heard twice, less budget, dear rows, learned calibration, lookahead rows."""
    request = REQUESTS[name]
    target = FakeTarget(24, order=2, sharpness=2.0)
    exact = decode(target, request)
    plain, _ = speculate(target, request, {})
    sources = sources_for(target, PROMPT, exact.tokens)
    answer = [*PROMPT, *exact.tokens, 0, 0]
    used = Calibration()

    def mixed(source: Source) -> Source:
        return lambda context: shuffled(source(context), np.random.default_rng(len(context)))

    bends: dict[str, dict[str, Any]] = {
        "shuffled": {"sources": {name: mixed(source) for name, source in sources.items()}},
        "permuted": {"sources": dict(reversed(sources.items()))},
        "heard twice": {"sources": sources | {"again": sources["partial"]}},
        "halved": {"sources": sources, "max_nodes": 6},
        "one node": {"sources": sources, "max_nodes": 1},
        "rows are dear": {"sources": sources, "curve": CostCurve(np.array([1, 8], np.int32), np.array([1.0, 3.0]))},
        "first with this calibration": {"sources": sources, "calibration": used},
        "again with what it learned": {"sources": sources, "calibration": used},
        "lookahead rows": {"sources": sources, "twist": with_lookahead(lambda position: answer[position + 1])},
        "lookahead rows alone": {"sources": {}, "twist": with_lookahead(lambda position: answer[position + 1])},
    }
    for bend in bends.values():
        found, _ = speculate(target, request, **bend)
        assert_equal(found, plain, exact)
    assert used.trials.any(), "the calibration of the first run must have learned something"


@given(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0, 1e6]),
        top_k=st.sampled_from([0, 1, 3, 100]),
        top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
        min_p=st.sampled_from([0.0, 0.05, 0.9]),
        repetition_penalty=st.sampled_from([1.0, 0.8, 1.7]),
        presence_penalty=st.sampled_from([0.0, 1.0, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.7, -0.7]),
        logit_bias=st.sampled_from([(), ((3, 4.0),), ((0, -1e30), (1, 1e30))]),
        seed=st.integers(0, 2**64 - 1),
    ),
    st.integers(1, 12),
    st.integers(0, 12),
    st.frozensets(st.integers(0, 7), max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**32),
)
def test_output_is_equal_for_any_request(
    params: SamplingParams, max_tokens: int, min_tokens: int, stop_ids: frozenset[int], order: int, seed: int
) -> None:
    """Any settings, any limits, a small vocabulary in which random drafts are often right: what is said is the definition's."""
    target = FakeTarget(8, order=order, context_length=14)
    request = request_of(
        [1, 2, 3],
        params,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_ids=sorted(stop_ids),
        num_logprobs=1,
    )

    def guess(context: NDArray[np.int32]) -> Draft:
        return random_draft(np.random.default_rng([seed, len(context)]), 8, 16)

    exact = decode(target, request)
    plain, _ = speculate(target, request, {})
    found, _ = speculate(
        target, request, {"one": guess, "two": lambda context: shuffled(guess(context[1:]), np.random.default_rng(seed))}
    )
    assert_equal(found, plain, exact)


@pytest.mark.parametrize("name", REQUESTS)
def test_output_is_equal_through_the_engines_loop(name: str) -> None:
    """Sources inline or on threads, raising in any method, talking nonsense, late, never answering: the same output."""
    request = REQUESTS[name]
    target = FakeTarget(24, order=2, sharpness=2.0)
    exact = decode(target, request)
    plain, _, _ = decode_by_loop(target, request, [])
    sources = sources_for(target, PROMPT, exact.tokens)
    gate = Event()

    def hint(name: str, **options: Any) -> Hint:
        return Hint(name, sources[name], **options)

    panels: dict[str, tuple[list[Hint], float]] = {
        "all": ([hint(name) for name in sources], 60.0),
        "all on threads": ([hint(name, blocking=True) for name in sources], 60.0),
        "failing": ([hint("perfect", fails_in=method) for method in ("begin", "propose", "accept", "close")], 60.0),
        "failing on threads": ([hint("perfect", fails_in=method, blocking=True) for method in ("propose", "accept")], 60.0),
        "always late": ([hint(name) for name in sources], 0.0),
        "never answering": ([hint("perfect", blocking=True, gate=gate), hint("partial")], 0.002),
    }
    for label, (hints, deadline) in panels.items():
        found, tally, records = decode_by_loop(target, request, hints, deadline=deadline)
        assert_equal(found, plain, exact)
        if label == "all":
            assert tally.num_accepted > 0
        if label == "always late":
            assert tally.num_accepted == 0 and all(record.late or record.errors for record in records)
        if label == "never answering":
            assert records[0].late and not tally.accepted[0]
        if "thread" not in label and label != "never answering":
            assert [hint.num_closed for hint in hints] == [int(label != "failing" or i > 0) for i in range(len(hints))]
    gate.set()


# ---- equal: endings inside accepted runs


SPELL = [10, 11, 12, 13, 14, 15, 16, 17]


def spelling(**options: Any) -> FakeTarget:
    """A target that spells 10 to 17 after a 10."""
    return FakeTarget(24, spell=SPELL, **options)


def spell_source(context: NDArray[np.int32]) -> Draft:
    """The rest of the spell, with confidence, and two tokens too many."""
    last = int(context[-1])
    return chain([*(SPELL[SPELL.index(last) + 1 :] if last in SPELL else []), 1, 2], 0.95)


def perfect_run(target: FakeTarget, request: SequenceRequest) -> tuple[Decoded, int]:
    """What a source that knows the spell gets, and in how many steps; it must equal the definition."""
    found, tally = speculate(target, request, {"spell": spell_source})
    assert found == decode(target, request)
    return found, tally.num_steps


@pytest.mark.parametrize("name", REQUESTS)
def test_output_is_equal_with_what_the_target_leaves_over(name: str) -> None:
    """Recycled tokens and the lookahead window, which learn from the target's rows: each alone, both, and beside the text."""
    request = replace(REQUESTS[name], feedback_top_k=8, feedback_prompt=3)
    for target in targets():
        plain, _, _ = decode_by_loop(target, REQUESTS[name], [])
        target.curve = CostCurve(np.array([1, 64], np.int32), np.array([1.0, 1.0]))
        num_accepted = 0
        for kinds in ([RecycleDrafter], [LookaheadDrafter], [RecycleDrafter, LookaheadDrafter, PromptDrafter]):
            found, tally, records = decode_by_loop(target, request, [kind() for kind in kinds])
            assert found == plain
            assert not any(record.errors or record.late for record in records)
            num_accepted += tally.num_accepted
        assert num_accepted, "the test has no teeth unless something is accepted"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7])
def test_max_tokens_cuts_a_long_perfect_draft(max_tokens: int) -> None:
    """Exactly max_tokens come out, in one step, with the reason "length"."""
    found, num_steps = perfect_run(spelling(), request_of([10], max_tokens=max_tokens))
    assert (found.tokens, found.finish, num_steps) == (SPELL[1 : max_tokens + 1], "length", 1)


def test_a_stop_id_inside_an_accepted_run_ends_it() -> None:
    """Nothing after the stop id comes out, though more was drafted and right; without it the run goes on."""
    found, num_steps = perfect_run(spelling(), request_of([10], stop_ids=[13], max_tokens=6))
    assert (found.tokens, found.finish, num_steps) == ([11, 12, 13], "stop", 1)
    found, _ = perfect_run(spelling(), request_of([10], max_tokens=6))
    assert (found.tokens, found.finish) == ([11, 12, 13, 14, 15, 16], "length")


def test_a_stop_id_as_the_last_token_allowed_is_a_stop() -> None:
    """Where both ends coincide the reason is "stop"."""
    found, _ = perfect_run(spelling(), request_of([10], stop_ids=[13], max_tokens=3))
    assert (found.tokens, found.finish) == ([11, 12, 13], "stop")


def test_min_tokens_holds_a_stop_id_back_inside_a_run() -> None:
    """Before min_tokens the stop id is not chosen, though drafted; the text is what plain decoding says under the same mask."""
    found, _ = perfect_run(spelling(), request_of([10], stop_ids=[13], min_tokens=5, max_tokens=8))
    assert found.tokens[:2] == [11, 12] and 13 not in found.tokens[:5]


def test_the_context_limit_ends_a_run() -> None:
    """Prompt and answer together fill the context and no more, in the middle of a perfect draft."""
    found, num_steps = perfect_run(spelling(context_length=8), request_of([5, 6, 7, 10], max_tokens=100))
    assert (found.tokens, found.finish, num_steps) == (SPELL[1:5], "length", 1)


# ---- chance: the real walk and the real noise


HORIZON = 3
NUM_RUNS = 50_000
PARAMS = SamplingParams(0.8, top_p=0.97)


def rejects(counts: Mapping[Prefix, int], law: Mapping[Prefix, float]) -> bool:
    """Pearson's chi-square at p < 1e-6, by Wilson and Hilferty's approximation; cells with under 5 expected are pooled."""
    total = sum(counts.values())
    cells = sorted(((total * law[text], counts.get(text, 0)) for text in law), reverse=True)
    if any(count and not expected for expected, count in cells):
        return True
    pooled = [(expected, count) for expected, count in cells if expected >= 5]
    rest = [(expected, count) for expected, count in cells if expected < 5]
    if sum(expected for expected, _ in rest) > 0:
        pooled.append((sum(expected for expected, _ in rest), sum(count for _, count in rest)))
    degrees = len(pooled) - 1
    if degrees < 1:
        return False
    statistic = sum((count - expected) ** 2 / expected for expected, count in pooled)
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2)) < 1e-6


def conditionals(
    counts: Mapping[Prefix, int], law: Mapping[Prefix, float]
) -> list[tuple[dict[Prefix, int], dict[Prefix, float]]]:
    """The law of the next token after every prefix, observed and expected; 31 of them for 5 tokens and a horizon of 3."""
    pairs = []
    for depth in range(HORIZON):
        for prefix in {text[:depth] for text in law}:
            seen, expected = dict[Prefix, int](), dict[Prefix, float]()
            for text, weight in law.items():
                if text[:depth] == prefix:
                    token = text[depth : depth + 1]
                    seen[token] = seen.get(token, 0) + counts.get(text, 0)
                    expected[token] = expected.get(token, 0.0) + weight
            total = sum(expected.values())
            if sum(seen.values()) and total:
                pairs.append((seen, {token: weight / total for token, weight in expected.items()}))
    return pairs


def refused(counts: Mapping[Prefix, int], law: Mapping[Prefix, float]) -> int:
    """How many of the tests (the joint law and every conditional) reject."""
    return sum(rejects(*pair) for pair in [(dict(counts), dict(law)), *conditionals(counts, law)])


class Chance:
    """A model of 5 tokens with known laws, sampled by `kernels.choose` along the engine's walk."""

    def __init__(self) -> None:
        target = FakeTarget(5, order=3, sharpness=1.2)
        self.texts = [text for n in range(HORIZON + 3) for text in np.ndindex(*[5] * n)]
        self.logits = {text: target.logits(np.array([0, 0, *text], np.int32)) for text in self.texts}
        self.law = {
            text: math.prod(self.conditional(text[:i])[text[i]] for i in range(HORIZON)) for text in np.ndindex(5, 5, 5)
        }

    def conditional(self, prefix: Prefix) -> list[float]:
        """The processed law after a prefix."""
        scores = self.logits[prefix]
        law = np.zeros(5)
        ids = oracles.support(scores, PARAMS)
        law[ids] = np.exp((scores[ids].astype(np.float64) - scores.max()) / PARAMS.temperature)
        return [float(weight) for weight in law / law.sum()]

    def sample(
        self, trees: Callable[[Prefix], CandidateTree], num_runs: int = NUM_RUNS, keyed: bool = True
    ) -> dict[Prefix, int]:
        """How often each text came out, over seeds 0, 1, ...; without `keyed` the noise forgets the position."""
        scratch = (np.empty(5), np.empty(5), np.empty(5, np.bool_))
        grown = {text: trees(text) for text in self.texts if len(text) < HORIZON}
        logits, temperature, top_p = self.logits, PARAMS.temperature, PARAMS.top_p
        counts: dict[Prefix, int] = {}
        for seed in range(num_runs):
            key = np.uint64(seed)
            text: Prefix = ()

            def choose(node: int, emitted: list[int]) -> int:
                whole = (*text, *emitted)  # noqa: B023
                return kernels.choose(logits[whole], temperature, 0, top_p, 0.0, key, len(whole) * keyed, *scratch)  # type: ignore[no-any-return]  # noqa: B023

            while len(text) < HORIZON:
                text = (*text, *walk(grown[text], choose, UNLIMITED, 0).tokens.tolist())
            counts[text[:HORIZON]] = counts.get(text[:HORIZON], 0) + 1
        return counts


@pytest.fixture(scope="module")
def chance() -> Chance:
    """One model for all tests of chance."""
    return Chance()


def skewed_tree(chance: Chance) -> Callable[[Prefix], CandidateTree]:
    """Trees that draft the likeliest token twice as deep as the others: the kind of skew that hides no bias."""

    def tree(prefix: Prefix) -> CandidateTree:
        first = int(np.argmax(chance.logits[prefix]))
        second = int(np.argmax(chance.logits[(*prefix, first)]))
        return tree_of([-1, 0, 0, 1, 1], [0, first, (first + 1) % 5, second, (second + 2) % 5])

    return tree


def test_text_drawn_through_trees_has_the_law_of_the_target(chance: Chance) -> None:
    """The joint law and each conditional law pass; plain decoding, the control, draws the very same texts."""
    counts = chance.sample(skewed_tree(chance))
    assert refused(counts, chance.law) == 0
    assert chance.sample(lambda prefix: tree_of([-1], [0])) == counts


def test_the_chi_square_tests_can_see_a_small_bias(chance: Chance) -> None:
    """Counts drawn from a law with 0.016 moved between two tokens at one prefix are rejected."""
    rng = np.random.default_rng(1)
    texts = list(chance.law)
    weights = np.array([chance.law[text] for text in texts])
    prefix_law = chance.conditional(())
    most, least = int(np.argmax(prefix_law)), int(np.argsort(prefix_law)[-2])
    bent = weights.copy()
    for i, text in enumerate(texts):
        if text[0] in (most, least):
            bent[i] *= 1 + (0.016 if text[0] == least else -0.016) / prefix_law[text[0]]
    for law, is_fair in [(weights, True), (bent, False)]:
        counts = dict(zip(texts, rng.multinomial(NUM_RUNS, law / law.sum()).tolist(), strict=True))
        assert (refused(counts, chance.law) == 0) == is_fair


def test_noise_that_forgets_the_position_is_caught_by_chance(chance: Chance) -> None:
    """With the same noise at every position each token still has its own law, but together they do not."""
    assert refused(chance.sample(lambda prefix: tree_of([-1], [0]), 5_000, keyed=False), chance.law) > 0


# ---- mutations of sample and match


def battery() -> bool:
    """True if a few demanding cases all equal the definition: what must hold, and must break under every mutation below."""
    cases = [
        (CoarseTarget(24, sharpness=1.0), request_of(PROMPT)),
        (FakeTarget(24, order=2, sharpness=2.0), REQUESTS["0.7, everything"]),
        (FakeTarget(24, order=1, sharpness=3.0), REQUESTS["1.3"]),
        (spelling(), request_of([10], stop_ids=[13], max_tokens=6)),
    ]
    for target, request in cases:
        exact = decode(target, request)
        prompt = request.prompt.tolist()
        sources = sources_for(target, prompt, [*exact.tokens, *[1] * 8])
        answer = dict(enumerate([*prompt, *exact.tokens]))
        for names in [("perfect", "partial", "garbage"), ("echo", "garbage")]:
            some = {name: sources[name] for name in names}
            twist = with_lookahead(lambda position, answer=answer: answer.get(position + 1, 0))  # type: ignore[misc]
            try:
                found, _ = speculate(target, request, some, twist=twist)
            except AssertionError:
                return False
            if (found.tokens, found.finish) != (exact.tokens, exact.finish):
                return False
    return True


class Mutant:
    """Sample and match with one thing wrong: replaced parts of the engine, and the state that they share."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.node = 0
        self.row = 0
        self.choose = kernels.choose
        self.process = Sampler._process

    def noise_without_position(self) -> None:
        """Every position has the same noise."""
        self.patch.setattr(kernels, "choose", lambda *a: self.choose(*a[:6], 0, *a[7:]))

    def noise_keyed_by_node(self) -> None:
        """A row's noise depends on where in the tree it stands."""

        def tracking(tree: CandidateTree, choose: Any, limits: Limits, num_emitted: int) -> Walk:
            def choose_and_note(node: int, emitted: list[int]) -> int:
                self.node = node
                return int(choose(node, emitted))

            return walk(tree, choose_and_note, limits, num_emitted)

        self.patch.setattr(sampling, "walk", tracking)
        self.patch.setattr(kernels, "choose", lambda *a: self.choose(*a[:6], self.node, *a[7:]))

    def processors_without_the_path(self) -> None:
        """Penalties and masks see the committed prefix only."""
        self.patch.setattr(Sampler, "_process", lambda sampler, logits, emitted: self.process(sampler, logits, []))

    def redraw_in_every_row(self) -> None:
        """Each row of the tree draws for itself; the one that agrees longest wins."""

        def rows(tree: CandidateTree, choose: Any, limits: Limits, num_emitted: int) -> Walk:
            best = None
            for self.row in range(3):
                taken = walk(tree, choose, limits, num_emitted)
                if best is None or len(taken.path) > len(best.path):
                    best = taken
            assert best is not None
            return best

        self.patch.setattr(sampling, "walk", rows)
        self.patch.setattr(kernels, "choose", lambda *a: self.choose(*a[:5], a[5] ^ np.uint64(self.row), *a[6:]))

    def lookahead_rows_are_entered(self) -> None:
        """The walk takes any child with the right token."""

        def child(tree: CandidateTree, node: int, token: int) -> int:
            hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
            return int(hits[-1]) if len(hits) else -1

        self.patch.setattr(acceptance, "child_of", child)

    def ties_go_to_the_highest_id(self) -> None:
        """Greedy choice takes the last of equal maxima."""
        right = Sampler.choose

        def choose(sampler: Sampler, logits: NDArray[np.float32], emitted: Sequence[int]) -> int:
            if sampler._params.temperature > 0:
                return right(sampler, logits, emitted)
            scores = sampler._process(logits, emitted)
            return int(len(scores) - 1 - np.argmax(scores[::-1]))

        self.patch.setattr(Sampler, "choose", choose)

    def stop_ids_are_run_through(self) -> None:
        """The walk goes on below an accepted stop id."""
        self.patch.setattr(acceptance, "_finish", lambda token, count, limits: "length" if count >= limits.max_tokens else "")

    def siblings_share_a_row(self) -> None:
        """A node is judged by the logits of its parent's first child."""

        def shifted(tree: CandidateTree, choose: Any, limits: Limits, num_emitted: int) -> Walk:
            def first_sibling(node: int) -> int:
                return int(np.flatnonzero(tree.parents == tree.parents[node])[0])

            return walk(tree, lambda node, emitted: choose(first_sibling(node), emitted), limits, num_emitted)

        self.patch.setattr(sampling, "walk", shifted)


MUTATIONS = [name for name in vars(Mutant) if not name.startswith("_")]


def test_the_battery_passes_unmutated() -> None:
    """The control: without a mutation all cases are equal."""
    assert battery()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_sample_and_match_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thing wrong, some case differs from the definition or breaks the worker's contract."""
    getattr(Mutant(monkeypatch), name)()
    assert not battery()


# ---- the page


def test_the_example_of_the_page_runs() -> None:
    """The Python of docs/lossless.md does what it claims."""
    page = (Path(__file__).parent.parent / "docs" / "lossless.md").read_text()
    code = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert code is not None
    exec(compile(code.group(1), "docs/lossless.md", "exec"), {"__name__": "example"})
