"""Drafts, the merge against its twin, the price, and every invariant broken once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import kernels
from engine.tree import MAX_SOURCES, CandidateTree, CostCurve, Draft, Mixture, best_size
from tests.engine import oracles
from tests.oracles import tree_of
from tests.speculation import merged, random_draft, shuffled

VOCAB = 6
SEEDS = st.integers(0, 2**32)


def random_drafts(seed: int) -> tuple[list[Draft], Mixture, np.random.Generator]:
    """Some drafts over a small vocabulary, so that paths meet, and how to mix them."""
    rng = np.random.default_rng(seed)
    drafts = [random_draft(rng, VOCAB, 10) for _ in range(int(rng.integers(1, 5)))]
    shape = (len(drafts), kernels.NUM_SETS)
    return drafts, Mixture(rng.uniform(-0.2, 1.2, shape), rng.uniform(-0.2, 0.8, shape), rng.normal(size=shape[1])), rng


def nodes(tree: CandidateTree) -> list[tuple[oracles.Path, float, int]]:
    """A tree as the oracle writes it."""
    return list(zip(oracles.tree_paths(tree), tree.probs.tolist(), tree.sources.tolist(), strict=True))


def assert_same(found: list[tuple[oracles.Path, float, int]], expected: list[tuple[oracles.Path, float, int]]) -> None:
    """Node by node equal, but for the rounding of probabilities and the order of nodes that it makes alike."""
    assert [prob for _, prob, _ in found] == pytest.approx([prob for _, prob, _ in expected], rel=1e-5, abs=1e-12)
    probs = {path: (prob, bits) for path, prob, bits in expected}
    for path, prob, bits in found:
        if path in probs:
            assert (prob, bits) == (pytest.approx(probs[path][0], rel=1e-5, abs=1e-12), probs[path][1])


# ---- merge


@given(SEEDS, st.integers(0, 25))
def test_merge_is_its_twin(seed: int, budget: int) -> None:
    """Paths, their order, mixed probabilities and source bits are those of a dict of paths."""
    drafts, mixture, _ = random_drafts(seed)
    tree = merged(drafts, budget, mixture, 3, 11)
    assert_same(nodes(tree), oracles.merge(drafts, mixture, budget))
    mixed = oracles.mix(drafts, mixture)
    assert all((prob, bits) == (pytest.approx(mixed[path][0], rel=1e-5), mixed[path][1]) for path, prob, bits in nodes(tree))
    assert (tree.tokens[0], tree.position) == (3, 11)


@given(SEEDS, st.integers(0, 25))
def test_merged_trees_are_valid(seed: int, budget: int) -> None:
    """A merge is prefix-closed, its siblings differ, its path probabilities fall, and it keeps to the budget."""
    drafts, mixture, _ = random_drafts(seed)
    tree = merged(drafts, budget, mixture)
    tree.validate(VOCAB)
    assert oracles.tree_is_valid(tree, VOCAB)
    paths = oracles.tree_paths(tree)
    assert len(set(paths)) == len(paths) <= budget + 1
    assert all(path[:-1] in paths for path in paths[1:])


@given(SEEDS)
def test_siblings_promise_at_most_what_their_parent_does(seed: int) -> None:
    """The children of a node share no more than the node's own path probability, whatever the weights."""
    drafts, mixture, _ = random_drafts(seed)
    tree = merged(drafts, 100, mixture)
    for node in range(len(tree)):
        assert tree.probs[tree.parents == node].sum() <= tree.probs[node] * (1 + 1e-5)


@given(SEEDS, st.integers(0, 25))
def test_merge_does_not_depend_on_the_order_of_sources(seed: int, budget: int) -> None:
    """Sources permuted together with their weights give the same tree, its source bits permuted."""
    drafts, mixture, rng = random_drafts(seed)
    order = rng.permutation(len(drafts)).tolist()
    moved = Mixture(mixture.slopes[order], mixture.doubts[order], mixture.bias)
    found = nodes(merged([drafts[s] for s in order], budget, moved))
    back = [(path, prob, sum(1 << old for new, old in enumerate(order) if bits >> new & 1)) for path, prob, bits in found]
    assert_same(back, nodes(merged(drafts, budget, mixture)))


@given(SEEDS, st.integers(0, 25))
def test_merge_does_not_depend_on_the_order_of_a_drafts_nodes(seed: int, budget: int) -> None:
    """A draft's nodes may come in any order in which parents precede children."""
    drafts, mixture, rng = random_drafts(seed)
    mixed = [shuffled(draft, rng) for draft in drafts]
    assert_same(nodes(merged(mixed, budget, mixture)), nodes(merged(drafts, budget, mixture)))


@given(SEEDS, st.integers(0, 25))
def test_cutting_a_tree_is_merging_with_less_budget(seed: int, size: int) -> None:
    """The first m nodes of a tree are the best tree of m nodes."""
    drafts, mixture, _ = random_drafts(seed)
    whole = merged(drafts, 100, mixture)
    assert nodes(whole.cut(size)) == nodes(merged(drafts, size - 1, mixture))


def test_one_source_alone_keeps_its_own_probabilities() -> None:
    """A single draft comes back as it was."""
    draft = Draft.of([1, 2, 3], [-1, 0, -1], [0.5, 0.5, 0.25])
    found = nodes(merged([draft], 9))
    assert_same(found, [((), 1.0, 0), ((1,), 0.5, 1), ((1, 2), 0.25, 1), ((3,), 0.25, 1)])


def test_agreement_raises_and_silence_lowers() -> None:
    """What two sources propose is likelier than either says; what one leaves out, less likely the surer that one is."""
    sure, same, other = (Draft.of([token], [-1], [0.8]) for token in (1, 1, 2))
    alone = float(merged([sure], 9).probs[1])
    assert float(merged([sure, same], 9).probs[1]) > alone > float(merged([sure, other], 9).probs[1])
    doubtful = Draft.of([2], [-1], [0.1])
    assert float(merged([sure, doubtful], 9).probs[1]) > float(merged([sure, other], 9).probs[1])


def test_a_source_with_nothing_to_say_has_no_part() -> None:
    """An empty draft beside another changes nothing, nor does one that ends above a node change the node."""
    deep = Draft.of([1, 2], [-1, 0], [0.6, 0.7])
    assert nodes(merged([deep, Draft.empty()], 9)) == nodes(merged([deep], 9))
    tree = merged([deep, Draft.of([1], [-1], [0.6])], 9)
    assert float(tree.probs[2] / tree.probs[1]) == pytest.approx(0.7, rel=1e-5)


def test_merge_of_nothing_is_the_root() -> None:
    """No drafts, empty drafts or no budget give the root alone."""
    draft = Draft.of([1], [-1], [0.5])
    for drafts, budget in [([], 5), ([Draft.empty()], 5), ([Draft.empty(), Draft.empty()], 5), ([draft], 0), ([draft], -3)]:
        tree = merged(drafts, budget, root=4, position=9)
        assert (len(tree), tree.tokens[0], tree.position) == (1, 4, 9)
        tree.validate(VOCAB)


def test_merge_takes_as_many_sources_as_an_int64_has_bits_to_spare() -> None:
    """MAX_SOURCES drafts are merged, the last one's bit intact; one more is refused."""
    drafts = [Draft.of([s % VOCAB], [-1], [0.5]) for s in range(MAX_SOURCES)]
    tree = merged(drafts, 100)
    assert len(tree) == VOCAB + 1
    assert np.bitwise_or.reduce(tree.sources) == 2**MAX_SOURCES - 1
    with pytest.raises(ValueError, match="too many drafts"):
        merged([*drafts, drafts[0]], 100)


# ---- the price


@given(SEEDS, st.integers(1, 3))
def test_best_size_is_the_fastest_of_all_sizes(seed: int, num_trees: int) -> None:
    """No number of nodes promises more tokens per second than the one chosen, and no smaller number as many."""
    rng = np.random.default_rng(seed)
    probs = np.sort(rng.random(int(rng.integers(0, 20))).astype(np.float32))[::-1]
    rows = np.concatenate([[1], 1 + np.cumsum(rng.integers(1, 6, 3))]).astype(np.int32)
    curve = CostCurve(rows, np.cumsum(rng.random(4) + 0.05))
    curve.validate()
    rates = oracles.rates(probs.tolist(), curve, num_trees)
    best = best_size(probs, curve, num_trees)
    assert rates[best] == pytest.approx(max(rates), rel=1e-12)
    assert all(rate < max(rates) * (1 + 1e-12) for rate in rates[:best])


def test_best_size_on_curves_one_can_check_by_hand() -> None:
    """Free rows take every node but impossible ones; a row as dear as a pass takes none; cheap rows take what pays."""
    probs = np.array([0.9, 0.5, 0.1, 0.0], np.float32)
    assert best_size(probs, CostCurve.flat()) == 3
    assert best_size(probs, CostCurve(np.array([1, 2], np.int32), np.array([1.0, 2.0]))) == 0
    # (1 + .9) / 1.2 = 1.58, (1 + 1.4) / 1.4 = 1.71, (1 + 1.5) / 1.6 = 1.56
    assert best_size(probs, CostCurve(np.array([1, 2], np.int32), np.array([1.0, 1.2]))) == 2
    assert best_size(probs[:0], CostCurve.flat()) == 0


def test_best_size_is_the_marginal_rule_where_the_curve_is_convex() -> None:
    """A node pays exactly while its path probability exceeds t'(N) (B + sum A) / t(N), DESIGN 5's rule."""
    rng = np.random.default_rng(3)
    curve = CostCurve(np.array([1, 4, 8, 16], np.int32), np.array([1.0, 1.1, 1.5, 3.0]))
    for _ in range(50):
        probs = np.sort(rng.random(15).astype(np.float32))[::-1]
        size = 0
        while size < len(probs):
            now, after = oracles.seconds(curve, 1 + size), oracles.seconds(curve, 2 + size)
            if probs[size] <= (after - now) * (1 + float(probs[:size].astype(np.float64).sum())) / now:
                break
            size += 1
        assert best_size(probs, curve) == size


def test_cost_curve_is_linear_between_and_beyond_its_points() -> None:
    """Between points the curve is a line, beyond the last it goes on with the last slope, one point is flat."""
    curve = CostCurve(np.array([1, 4, 8], np.int32), np.array([2.0, 2.0, 4.0]))
    assert curve.at(np.array([1, 2, 4, 6, 8, 10])).tolist() == [2.0, 2.0, 2.0, 3.0, 4.0, 5.0]
    assert float(curve.at(6)) == 3.0
    assert CostCurve.flat(0.5).at(np.array([1, 100])).tolist() == [0.5, 0.5]


# ---- shapes


def test_depths_are_distances_from_the_root() -> None:
    """A node is one deeper than its parent."""
    assert tree_of([-1, 0, 0, 1, 3, 2], [0] * 6).depths().tolist() == [0, 1, 1, 2, 3, 2]
    assert CandidateTree.root_only(5, 0).depths().tolist() == [0]


def test_cut_keeps_at_least_the_root_and_at_most_the_tree() -> None:
    """Sizes below 1 leave the root; sizes beyond the tree leave it whole; lookahead rows go first."""
    tree = tree_of([-1, 0, 1, 0], [7, 1, 2, 3], roles=[0, 0, 0, 1], position=5)
    assert [len(tree.cut(size)) for size in [-1, 0, 1, 2, 3, 4, 9]] == [1, 1, 1, 2, 3, 4, 4]
    assert tree.cut(3).roles.tolist() == [0, 0, 0]
    assert tree.cut(2).position == 5


def test_root_only_is_a_valid_tree() -> None:
    """The smallest tree is valid."""
    CandidateTree.root_only(VOCAB - 1, 0).validate(VOCAB)


# ---- every invariant broken once


def bent(draft: Draft, **changes: list[float]) -> Draft:
    """A draft with some of its arrays replaced, dtypes kept."""
    return replace(draft, **{name: np.asarray(values, getattr(draft, name).dtype) for name, values in changes.items()})


GOOD_DRAFT = Draft.of([1, 2, 1], [-1, 0, 0], [0.5, 0.6, 0.4])


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (bent(GOOD_DRAFT, tokens=[1, 6, 1]), "token outside the vocabulary"),
        (bent(GOOD_DRAFT, tokens=[-1, 2, 1]), "token outside the vocabulary"),
        (bent(GOOD_DRAFT, parents=[-1, 1, 0]), "parent that does not precede"),
        (bent(GOOD_DRAFT, parents=[0, 0, 0]), "parent that does not precede"),
        (bent(GOOD_DRAFT, parents=[-2, 0, 0]), "parent that does not precede"),
        (bent(GOOD_DRAFT, probs=[1.5, 0.6, 0.4]), "probability outside"),
        (bent(GOOD_DRAFT, probs=[0.5, -0.1, 0.4]), "probability outside"),
        (bent(GOOD_DRAFT, probs=[float("nan"), 0.6, 0.4]), "probability outside"),
        (bent(GOOD_DRAFT, tokens=[1, 2, 2]), "two siblings with one token"),
        (bent(GOOD_DRAFT, probs=[0.5, 0.6, 0.5]), "sum to more than 1"),
        (bent(GOOD_DRAFT, parents=[-1, 0]), "3 tokens but 2 parents"),
        (bent(GOOD_DRAFT, probs=[0.5]), "3 tokens but 1 probs"),
        (bent(GOOD_DRAFT, lengths=[]), "3 tokens but 0 lengths"),
        (bent(GOOD_DRAFT, counts=[1, 2, 3, 4]), "3 tokens but 4 counts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_draft_that_breaks_an_invariant_is_refused(draft: Draft, message: str) -> None:
    """Every broken invariant of a draft is named; the draft it was made from is valid."""
    GOOD_DRAFT.validate(VOCAB)
    with pytest.raises(ValueError, match=message):
        draft.validate(VOCAB)


@given(SEEDS)
def test_draft_validation_is_its_twin(seed: int) -> None:
    """A draft with one array disturbed is refused exactly when the plain check refuses it."""
    rng = np.random.default_rng(seed)
    draft = random_draft(rng, VOCAB, 6)
    assert oracles.draft_is_valid(draft, VOCAB)
    draft.validate(VOCAB)
    if not len(draft):
        return
    name = str(rng.choice(["tokens", "parents", "probs"]))
    values = getattr(draft, name).copy()
    values[rng.integers(len(values))] = rng.choice([-2, -1, 0, 1, 5, 6])
    disturbed = replace(draft, **{name: values})
    if oracles.draft_is_valid(disturbed, VOCAB):
        disturbed.validate(VOCAB)
    else:
        with pytest.raises(ValueError, match="breaks an invariant"):
            disturbed.validate(VOCAB)


GOOD_TREE = CandidateTree(
    np.array([7, 1, 2, 1, 1], np.int32),
    np.array([-1, 0, 1, 1, 0], np.int32),
    np.array([1, 0.5, 0.3, 0.1, 0], np.float32),
    np.array([0, 1, 1, 1, 0], np.int64),
    np.array([0, 0, 0, 0, 1], np.uint8),
    3,
)


def with_entry(name: str, index: int, value: float) -> Callable[[], CandidateTree]:
    """GOOD_TREE with one entry changed."""

    def make() -> CandidateTree:
        values = getattr(GOOD_TREE, name).copy()
        values[index] = value
        return replace(GOOD_TREE, **{name: values})

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_entry("tokens", 0, 8), "token outside the vocabulary"),
        (with_entry("tokens", 3, -1), "token outside the vocabulary"),
        (with_entry("parents", 2, 2), "parent that does not precede"),
        (with_entry("parents", 2, -1), "parent that does not precede"),
        (with_entry("probs", 1, 1.5), "path probability outside"),
        (with_entry("probs", 2, 0.6), "path probability outside"),
        (with_entry("probs", 3, -0.1), "path probability outside"),
        (with_entry("probs", 2, float("nan")), "path probability outside"),
        (with_entry("tokens", 3, 2), "two candidate siblings"),
        (with_entry("roles", 4, 2), "neither candidate nor lookahead"),
        (with_entry("roles", 2, 1), "candidate after a lookahead row"),
        (with_entry("parents", 0, 0), "node 0 is no root"),
        (with_entry("roles", 0, 1), "node 0 is no root"),
        (with_entry("probs", 0, 0.5), "node 0 is no root"),
        (with_entry("probs", 3, 0.4), "not in falling order"),
        (lambda: replace(GOOD_TREE, position=-1), "negative position: -1"),
        (lambda: replace(GOOD_TREE, sources=np.zeros(2, np.int64)), "5 tokens but 2 sources"),
        (lambda: replace(GOOD_TREE, tokens=np.zeros(0, np.int32)), "no root"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tree_that_breaks_an_invariant_is_refused(make: Callable[[], CandidateTree], message: str) -> None:
    """Every broken invariant of a tree is named; the tree it was made from is valid."""
    GOOD_TREE.validate(8)
    with pytest.raises(ValueError, match=message):
        make().validate(8)


@given(SEEDS)
def test_tree_validation_is_its_twin(seed: int) -> None:
    """A tree with one entry disturbed is refused exactly when the plain check refuses it."""
    drafts, mixture, rng = random_drafts(seed)
    tree = merged(drafts, 8, mixture)
    name = str(rng.choice(["tokens", "parents", "probs", "roles"]))
    values = getattr(tree, name).copy()
    values[rng.integers(len(values))] = rng.choice([0, 1, 2, 5, 6])
    disturbed = replace(tree, **{name: values})
    if oracles.tree_is_valid(disturbed, VOCAB):
        disturbed.validate(VOCAB)
    else:
        with pytest.raises(ValueError, match="breaks an invariant"):
            disturbed.validate(VOCAB)


@pytest.mark.parametrize(
    ("rows", "seconds", "message"),
    [
        ([], [], "one time for each row count"),
        ([1, 2], [1.0], "one time for each row count"),
        ([2, 3], [1.0, 2.0], "from 1 row up"),
        ([1, 1], [1.0, 2.0], "must rise"),
        ([1, 2], [2.0, 1.0], "must rise"),
        ([1], [0.0], "positive, finite"),
        ([1, 2], [-1.0, 1.0], "positive, finite"),
        ([1, 2], [1.0, float("nan")], "positive, finite"),
        ([1, 2], [1.0, float("inf")], "positive, finite"),
    ],
)
def test_a_cost_curve_that_breaks_an_invariant_is_refused(rows: list[int], seconds: list[float], message: str) -> None:
    """Every broken invariant of a cost curve is named, times that are no numbers among them."""
    CostCurve.flat().validate()
    with pytest.raises(ValueError, match=message):
        CostCurve(np.array(rows, np.int32), np.array(seconds)).validate()
