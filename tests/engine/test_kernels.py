"""Kernels against their twins: noise, exponentials, choosing a token, calibration. Drafts and trees are in test_tree.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels
from engine.acceptance import SamplingParams
from engine.calibration import Calibration
from engine.session import Session
from engine.target import StepResult
from engine.tree import CostCurve, Draft, Drafts, Mixture
from tests.engine import oracles
from tests.speculation import merged, random_draft

SEEDS = [0, 1, 2**31, 2**63, 2**64 - 1]


def choose(scores: NDArray[np.float32], params: SamplingParams, position: int = 0) -> int:
    """`kernels.choose` with its scratch space."""
    size = len(scores)
    scratch = (np.empty(size), np.empty(size), np.empty(size, np.bool_))
    return int(
        kernels.choose(
            scores, params.temperature, params.top_k, params.top_p, params.min_p, np.uint64(params.seed), position, *scratch
        )
    )


# ---- noise


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_same_in_numba_numpy_and_plain_integers(seed: int) -> None:
    """Three spellings of the hash agree, at positions and tokens from the first to the largest."""
    for position in [0, 1, 4095, 2**31 - 1]:
        key = np.uint64(kernels.noise_key(np.uint64(seed), position))
        row = oracles.noise_row(seed, position, 40)
        for token in [0, 1, 7, 39, 152_063, 2**31 - 1]:
            expected = oracles.gumbel(seed, position, token)
            assert kernels.gumbel(key, token) == pytest.approx(expected, rel=1e-14, abs=1e-14)
            if token < len(row):
                assert row[token] == pytest.approx(expected, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_same_in_torch(seed: int) -> None:
    """The torch twin has the same 52 bits for every (seed, position, token), in any shape, and the same noise to rounding."""
    torch = pytest.importorskip("torch")
    from engine.target import noise

    tokens = torch.tensor([0, 1, 7, 152_063, 2**31 - 1])
    positions = torch.tensor([[0], [1], [4095], [2**31 - 1]])
    bits = noise.noise_bits(seed, positions, tokens).tolist()
    values = noise.gumbel(seed, positions, tokens)
    assert values.dtype == torch.float64 and values.shape == (4, 5)
    for i, position in enumerate(positions.flatten().tolist()):
        assert bits[i] == [oracles.noise_bits(seed, position, token) for token in tokens.tolist()]
        assert noise.noise_bits(seed, position, tokens).tolist() == bits[i]
        key = np.uint64(kernels.noise_key(np.uint64(seed), position))
        expected = [kernels.gumbel(key, token) for token in tokens.tolist()]
        assert values[i].tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_noise_is_finite_at_the_ends_of_its_range() -> None:
    """u = (k + 1/2) / 2^52 is neither 0 nor 1 for the smallest and the largest k, so the noise stays within its bounds."""
    for k, bound in [(0, 3.61), (2**52 - 1, 36.74)]:
        u = (k + 0.5) * 2.0**-52
        assert 0 < u < 1
        assert abs(-math.log(-math.log(u))) <= bound


def test_noise_follows_the_gumbel_law_over_seeds_positions_and_tokens() -> None:
    """Along each of its three arguments the noise has the mean 0.5772 and variance 1.645 of the Gumbel law.

    With 20,000 draws the standard errors are 0.009 and 0.03; the bounds are five of them.
    """
    n = 20_000
    along = {
        "tokens": oracles.noise_row(7, 3, n),
        "positions": np.array([kernels.gumbel(np.uint64(kernels.noise_key(np.uint64(7), i)), 3) for i in range(n)]),
        "seeds": np.array([kernels.gumbel(np.uint64(kernels.noise_key(np.uint64(i), 7)), 3) for i in range(n)]),
    }
    for name, values in along.items():
        assert abs(values.mean() - 0.57722) < 0.045, name
        assert abs(values.var() - math.pi**2 / 6) < 0.16, name
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.036, name


# ---- exponentials


def test_exp_is_accurate_and_the_same_at_any_length_and_offset() -> None:
    """e^z is within 3e-15 of numpy's and has the same bits wherever in an array z stands; below -700 it is 0."""
    z = -np.concatenate([np.linspace(0, 3, 301), np.geomspace(1e-300, 699, 300), [0.0, 700.0, 701.0, 1e300, np.inf]])
    whole = np.empty_like(z)
    kernels.exp_into(z, whole)
    assert np.all(np.abs(whole[z > -700] - np.exp(z[z > -700])) <= 3e-15 * np.exp(z[z > -700]))
    assert np.all(whole[z <= -700] == 0)
    for start, length in [(0, 1), (1, 3), (5, 7), (13, 64), (601, 4)]:
        part = np.empty(length)
        kernels.exp_into(z[start : start + length], part)
        assert part.tobytes() == whole[start : start + length].tobytes()


# ---- choosing a token


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=2.0, top_k=50, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e6, top_p=0.5),
    SamplingParams(temperature=1.0, top_k=10**9),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, min_p=0.999),
]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """The same settings with another seed."""
    return SamplingParams(**{**params.__dict__, "seed": seed})


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize(("size", "num_seeds"), [(5, 60), (1000, 12), (152_064, 1)])
def test_choice_equals_the_full_sort(size: int, num_seeds: int, params: SamplingParams) -> None:
    """The kernel, which sorts one bin at most, chooses what a full sort in float64 chooses."""
    rng = np.random.default_rng(size)
    for i in range(num_seeds):
        scores = (rng.standard_normal(size) * 4).astype(np.float32)
        if i % 3 == 1:
            scores[rng.random(size) < 0.4] = -np.inf
            scores[rng.integers(size)] = 1.0
        if i % 3 == 2:
            scores = np.round(scores)  # many ties
        seeded = with_seed(params, int(rng.integers(2**63)))
        assert choose(scores, seeded, i) == oracles.choose(scores, seeded, i)


@given(
    st.lists(st.sampled_from([-np.inf, -30.0, -1.0, 0.0, 0.5, 1.0, 1.0625, 2.0, 80.0]), min_size=1, max_size=12),
    st.sampled_from([0.25, 1.0, 4.0]),
    st.integers(0, 13),
    st.sampled_from([0.1, 0.5, 0.75, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(0, 2**64 - 1),
)
def test_choice_equals_the_full_sort_where_scores_tie(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Among scores full of ties and exclusions the choice is still the twin's: ties go to the lower id at every boundary."""
    scores = np.array(values, np.float32)
    if not np.isfinite(scores).any():
        scores[-1] = 0.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert choose(scores, params, 3) == oracles.choose(scores, params, 3)


@pytest.mark.parametrize("top_k", [0, 1, 37, 499, 1000])
@pytest.mark.parametrize("top_p", [0.25, 0.75, 0.999, 1.0])
def test_the_support_ends_where_the_full_sort_ends_it(top_k: int, top_p: float) -> None:
    """The boundary found by histogram is the last member of the stably sorted support, also amid hundreds of equal scores."""
    rng = np.random.default_rng(top_k)
    for coarse in [1.0, 1 / 8]:
        scores = (np.round(rng.standard_normal(1000) / coarse) * coarse).astype(np.float32)
        z = scores.astype(np.float64) - float(scores.max())
        weight = np.empty(1000)
        kernels.exp_into(z, weight)
        last_z, last_id = kernels._support(z, weight, top_k, top_p)
        ids = oracles.support(scores, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p))
        kept = (z > last_z) | ((z == last_z) & (np.arange(1000) <= last_id))
        assert np.flatnonzero(kept).tolist() == sorted(ids.tolist())


def test_equal_scores_are_cut_to_the_lowest_ids() -> None:
    """With all scores equal, top_k=2 and top_p=0.25 of eight leave ids 0 and 1, and both are chosen in time."""
    scores = np.zeros(8, np.float32)
    for params in [SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.25)]:
        assert {choose(scores, with_seed(params, seed)) for seed in range(64)} == {0, 1}


def test_what_is_ruled_out_is_never_chosen() -> None:
    """-inf and NaN are never chosen while anything else is left, not even at the highest temperature."""
    scores = np.array([-np.inf, np.nan, 0.0, np.nan, -50.0, -np.inf], np.float32)
    for params in [SamplingParams(temperature=1e30), SamplingParams(temperature=1e30, top_k=4, top_p=0.99)]:
        assert {choose(scores, with_seed(params, seed)) for seed in range(64)} == {2, 4}


@pytest.mark.parametrize("truncation", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_hopeless_scores_give_a_token_of_the_vocabulary(truncation: dict[str, float]) -> None:
    """All -inf or all NaN gives id 0, +inf the first that has it: broken scores cost sense, never memory."""
    params = SamplingParams(temperature=1.0, **truncation)  # type: ignore[arg-type]
    for values, expected in [([-np.inf] * 3, 0), ([np.nan] * 3, 0), ([0.0, np.inf, np.inf], 1)]:
        assert choose(np.array(values, np.float32), params) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-6])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    """As the temperature nears 0 the largest score wins, also where 1 / temperature overflows."""
    scores = np.array([1.0, 3.0, 2.0, 3.0 - 2**-10], np.float32)
    for extra in [{}, {"top_k": 3}, {"top_p": 0.9}]:
        params = SamplingParams(temperature=temperature, **extra)  # type: ignore[arg-type]
        assert {choose(scores, with_seed(params, seed)) for seed in range(32)} == {1}


def test_the_nucleus_ends_within_its_bin_however_sums_round() -> None:
    """Where top_p lies between two roundings of one bin's mass, the nucleus ends with that bin: the tail stays out.

    Six weights near 1 share a bin; their sum in order of id reaches top_p, their sum in falling order falls short of it.
    """
    rng = np.random.default_rng(5)
    num_cases = 0
    for _ in range(300):
        z = np.concatenate([[0.0], -rng.random(5) * 0.06, -1.0 - rng.random(6) * 0.01])
        weight = np.empty(12)
        kernels.exp_into(z, weight)
        upper, lower = sum(weight[:6].tolist()), sum(weight[6:].tolist())
        top_p = upper / (upper + lower)
        limit = top_p * (upper + lower)
        if sum(sorted(weight[:6].tolist(), reverse=True)) < limit <= upper:
            num_cases += 1
            last_z, last_id = kernels._support(z, weight, 0, top_p)
            assert last_id < 6 and last_z == z[:6].min()
    assert num_cases > 5


# ---- calibration


@given(st.integers(-1, 40), st.integers(-1, 200), st.integers(1, 20))
def test_contexts_are_the_classes_their_edges_say(length: int, count: int, depth: int) -> None:
    """Two nodes share a row of the table on a level exactly if their classes are equal there, and every row is within it."""
    rows = [kernels.context_of(length, count, depth, level) for level in range(4)]
    firsts = [0, 1, 1 + 9, 1 + 9 + 72]
    length_class, count_class, depth_class = oracles.contexts(length, count, depth)[3]
    expected = [0, length_class, length_class * 8 + count_class, (length_class * 8 + count_class) * 4 + depth_class]
    assert rows == [first + offset for first, offset in zip(firsts, expected, strict=True)]
    assert max(rows) < kernels.NUM_CONTEXTS


def test_the_last_context_is_the_tables_last() -> None:
    """The longest, most frequent, deepest evidence has the last row: the table has none to spare."""
    assert kernels.context_of(10**6, 10**6, 10**6, 3) == kernels.NUM_CONTEXTS - 1


@given(st.integers(0, 2**32), st.lists(st.integers(0, 3), max_size=6))
def test_outcomes_are_those_of_the_paths(seed: int, emitted: list[int]) -> None:
    """A node is a hit, a miss or unknown as its path compares to what was emitted, and the credit is the longest hit."""
    rng = np.random.default_rng(seed)
    drafts = [random_draft(rng, 4, 12) for _ in range(3)]
    together = Drafts.of(drafts)
    out, reached = np.empty(len(together), np.int8), np.empty(3, np.int64)
    kernels.outcomes(together.tokens, together.parents, together.ends, np.array(emitted, np.int32), out, reached)
    expected = [oracles.outcomes(draft, emitted) for draft in drafts]
    assert out.tolist() == [value for values, _ in expected for value in values]
    assert reached.tolist() == [longest for _, longest in expected]


@given(st.integers(0, 2**32))
def test_counts_are_those_of_a_dict(seed: int) -> None:
    """After any run of observations every estimate equals that of counts kept in a dict for each source."""
    rng = np.random.default_rng(seed)
    strength, keep = 8.0, 0.9
    hits = np.zeros((2, kernels.NUM_CONTEXTS, kernels.NUM_KNOTS))
    trials = hits.copy()
    twins = [oracles.Counts(strength, keep), oracles.Counts(strength, keep)]
    for _ in range(4):
        drafts = [random_draft(rng, 6, 12) for _ in range(3)]
        rows = rng.integers(0, 2, 3)
        d = Drafts.of(drafts)
        odds, depths = kernels.calibrate(d.parents, d.probs, d.lengths, d.counts, d.ends, rows, hits, trials, strength)
        owner = np.repeat(rows, [len(draft) for draft in drafts]).tolist()
        assert depths.tolist() == [len(path) for draft in drafts for path in oracles.paths(draft)]
        nodes = list(zip(d.probs.tolist(), d.lengths.tolist(), d.counts.tolist(), depths.tolist(), strict=True))
        assert odds.tolist() == pytest.approx([twins[row].estimate(*node) for row, node in zip(owner, nodes, strict=True)])
        outcome = rng.integers(-1, 2, len(d)).astype(np.int8)
        kernels.observe(d.probs, d.lengths, d.counts, depths, d.ends, rows, outcome, hits, trials, keep)
        for row, node, value in zip(owner, nodes, outcome.tolist(), strict=True):
            twins[row].observe(*node, value)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_mixing_learns_down_the_gradient_of_log_loss(seed: int, emitted: list[int]) -> None:
    """One step on the weights is `rate` against the log-loss's slope in each of them, measured by moving it a little."""
    rng = np.random.default_rng(seed)
    drafts = [random_draft(rng, 4, 3) for _ in range(2)]
    columns = ("tokens", "parents", "probs", "lengths", "counts")
    first = [Draft(*(getattr(draft, column)[draft.parents < 0] for column in columns)) for draft in drafts]
    together = Drafts.of(first)
    odds = np.array([kernels.log_odds(prob) for prob in together.probs])
    rows, said = np.array([0, 1]), np.array(emitted[:1], np.int32)
    mixture = Mixture.equal(2)

    def loss() -> float:
        proposed = oracles.mixed_alone(first, mixture)
        return -sum(np.log(prob if token == emitted[0] else 1 - prob) for token, prob in proposed.items())

    before = [array.copy() for array in (mixture.slopes, mixture.doubts, mixture.bias)]
    slope = []
    for array in (mixture.slopes, mixture.doubts, mixture.bias):
        found = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + 1e-5
            above = loss()
            array[index] = value - 1e-5
            found[index] = (above - loss()) / 2e-5
            array[index] = value
        slope.append(found)
    rate = 1e-6
    kernels.learn(
        together.tokens,
        together.parents,
        odds,
        together.ends,
        rows,
        mixture.slopes,
        mixture.doubts,
        mixture.bias,
        said,
        rate,
    )
    for array, was, down in zip((mixture.slopes, mixture.doubts, mixture.bias), before, slope, strict=True):
        assert (was - array) / rate == pytest.approx(down, rel=1e-3, abs=1e-3)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_what_is_judged_are_the_candidates_whose_parent_was_emitted(seed: int, emitted: list[int]) -> None:
    """Promises, outcomes, number and log-loss are those of a list of such candidates."""
    tree = merged([random_draft(np.random.default_rng(seed), 4, 12)], 20)
    table = np.zeros((3, kernels.NUM_KNOTS))
    loss = kernels.judge(tree.tokens, tree.parents, tree.probs, np.array(emitted, np.int32), table)
    expected = oracles.judged(tree, emitted)
    assert table.sum(axis=1).tolist() == pytest.approx(
        [sum(prob for prob, _ in expected), sum(outcome for _, outcome in expected), len(expected)]
    )
    assert loss == pytest.approx(-sum(np.log(max(p if hit else 1 - p, 1e-4)) for p, hit in expected), rel=1e-4)


# ---- compilation


@given(st.integers(0, 2**32))
def test_tallies_are_those_of_masks(seed: int) -> None:
    """Proposed, accepted and unique nodes by source, candidates verified, what they promised; stray nodes are passed over."""
    rng = np.random.default_rng(seed)
    size, num_sources = int(rng.integers(1, 9)), int(rng.integers(1, 5))
    sources = rng.integers(0, 1 << num_sources, size)
    sources[0] = 0
    roles = np.sort(rng.integers(0, 2, size)).astype(np.uint8)
    roles[0] = 0
    probs = rng.random(size).astype(np.float32)
    verified = np.sort(rng.permutation(size)[: rng.integers(1, size + 1)]).astype(np.int32)
    path = verified[(verified > 0) & (roles[verified] == 0)]
    counts = np.zeros((3, num_sources), np.int64)
    strays = np.array([-1, size], np.int32)
    num, expected = kernels.tally(sources, roles, probs, np.concatenate([verified, strays]), path, *counts)
    assert num == len(path) and expected == pytest.approx(float(probs[path].sum(dtype=np.float64)))
    for s in range(num_sources):
        bit = 1 << s
        assert counts[0, s] == sum(bool(mask & bit) for mask in sources[verified].tolist())
        assert counts[1, s] == sum(bool(mask & bit) for mask in sources[path].tolist())
        assert counts[2, s] == sum(mask == bit for mask in sources[path].tolist())


def test_warmup_leaves_nothing_to_compile() -> None:
    """After warmup() a call with the types the engine uses compiles no further signature."""
    kernels.warmup()
    compiled = [f for f in vars(kernels).values() if hasattr(f, "signatures")]
    before = {f.__name__: len(f.signatures) for f in compiled}
    draft = Draft.of([1, 2], [-1, 0], [0.5, 0.5])
    draft.validate(4)
    choose(np.zeros(8, np.float32), SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    session = Session(np.array([1], np.int32), ["prompt"], Calibration())
    tree = session.tree([draft], CostCurve.flat())
    session.commit(StepResult(np.array([1], np.int32), np.array([1, 3], np.int32), "", np.arange(len(tree), dtype=np.int32)))
    assert {f.__name__: len(f.signatures) for f in compiled} == before
