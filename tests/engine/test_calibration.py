"""Calibration is judged by its calibration error and log-loss, credit by who is trusted after what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import kernels
from engine.calibration import Calibration, Credit, alone
from engine.tree import Draft, Drafts, merge


def calibrated(calibration: Calibration, source: str, draft: Draft) -> list[float]:
    """What calibration makes of a draft's probabilities."""
    odds, _ = calibration.log_odds(Drafts.of([draft]), calibration.rows([source]))
    return [float(kernels.chance(each)) for each in odds]


def observe(calibration: Calibration, source: str, draft: Draft, emitted: list[int]) -> int:
    """Score a draft; its credit."""
    drafts, rows = Drafts.of([draft]), calibration.rows([source])
    odds, depths = calibration.log_odds(drafts, rows)
    return int(calibration.learn(drafts, rows, odds, depths, np.array(emitted, np.int32))[0])


def simulate(
    truth: Callable[[float], float], num_rounds: int, calibration: Calibration, seed: int
) -> list[tuple[float, float, int]]:
    """(raw, calibrated, outcome) of one-node drafts whose token is right with chance truth(raw), each observed after use."""
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(num_rounds):
        raw = float(rng.choice([0.15, 0.55, 0.95]))
        draft = Draft.of([1], [-1], [raw], [4], [3])
        (prob,) = calibrated(calibration, "corpus", draft)
        outcome = int(rng.random() < truth(raw))
        observe(calibration, "corpus", draft, [1 if outcome else 2])
        seen.append((raw, prob, outcome))
    return seen


def calibration_error(pairs: list[tuple[float, int]]) -> float:
    """Expected calibration error over tenths: how far, on average, the promised rate lies from the observed one."""
    error = 0.0
    for tenth in range(10):
        inside = [(prob, outcome) for prob, outcome in pairs if min(int(prob * 10), 9) == tenth]
        if inside:
            probs, hits = zip(*inside, strict=True)
            error += len(inside) / len(pairs) * abs(float(np.mean(probs)) - float(np.mean(hits)))
    return error


def log_loss(pairs: list[tuple[float, int]]) -> float:
    """Mean negative log-likelihood in nats."""
    return float(np.mean([-np.log(np.clip(prob if outcome else 1 - prob, 1e-6, 1)) for prob, outcome in pairs]))


@pytest.mark.parametrize(
    "truth", [lambda raw: raw / 2, lambda raw: min(1.0, raw + 0.3), lambda raw: 1 - raw], ids=["over", "under", "inverse"]
)
def test_a_miscalibrated_source_becomes_calibrated(truth: Callable[[float], float]) -> None:
    """However wrong a source's estimates are, after some hundred observations promised and observed rates agree."""
    seen = simulate(truth, 3000, Calibration(), 1)[600:]
    raw = [(prob, outcome) for prob, _, outcome in seen]
    calibrated = [(prob, outcome) for _, prob, outcome in seen]
    assert calibration_error(raw) > 0.15
    assert calibration_error(calibrated) < 0.04
    assert log_loss(calibrated) < log_loss(raw) - 0.04


def test_an_honest_source_keeps_its_estimates() -> None:
    """Calibration costs a source that was right all along next to nothing."""
    seen = simulate(lambda raw: raw, 3000, Calibration(), 2)
    assert (
        log_loss([(prob, outcome) for _, prob, outcome in seen])
        < log_loss([(prob, outcome) for prob, _, outcome in seen]) + 0.01
    )


def test_unlikely_nodes_stay_apart() -> None:
    """What a source says of nodes at .05 leaves nodes at .001 unlikely: thirty such siblings still promise little together."""
    rng = np.random.default_rng(5)
    calibration = Calibration()
    for _ in range(2000):
        raw = float(10 ** rng.uniform(-3, -1))
        observe(calibration, "corpus", Draft.of([1], [-1], [raw], [1], [3]), [1 if rng.random() < raw else 2])
    siblings = Draft.of(range(30), [-1] * 30, [0.001] * 30, [1] * 30, [3] * 30)
    assert sum(calibrated(calibration, "corpus", siblings)) < 0.15


def test_calibration_follows_a_source_that_changes() -> None:
    """Counts fade: a source that turns from always right to always wrong is believed less within the memory of its cell."""
    calibration = Calibration()
    simulate(lambda raw: 1.0, 2000, calibration, 3)
    draft = Draft.of([1], [-1], [0.95], [4], [3])
    assert calibrated(calibration, "corpus", draft)[0] > 0.95
    simulate(lambda raw: 0.0, 7000, calibration, 4)
    assert calibrated(calibration, "corpus", draft)[0] < 0.1


def test_an_unseen_source_keeps_its_estimates() -> None:
    """Without evidence the rate is the source's own estimate, as far as log-odds of 7 can say it."""
    draft = Draft.of([1, 2, 3], [-1, 0, -1], [0.5, 0.25, 0.01], [1, 9, 1], [1, 30, 1])
    assert calibrated(Calibration(), "corpus", draft) == pytest.approx([0.5, 0.25, 0.01], rel=1e-6)
    sure = Draft.of([1, 2], [-1, 0], [1.0, 0.0])
    assert calibrated(Calibration(), "corpus", sure) == pytest.approx([1.0, 0.0], abs=1e-3)


def test_what_is_seen_in_one_context_is_a_beginning_for_others() -> None:
    """A source wrong at one match length is believed less at others, and least where it was seen; other sources are not."""
    calibration = Calibration()
    wrong = Draft.of([1], [-1], [0.9], [4], [3])
    for _ in range(30):
        observe(calibration, "corpus", wrong, [2])
    there = calibrated(calibration, "corpus", wrong)[0]
    elsewhere = calibrated(calibration, "corpus", Draft.of([1], [-1], [0.9], [12], [30]))[0]
    assert there < elsewhere < 0.5
    assert calibrated(calibration, "prompt", wrong)[0] == pytest.approx(0.9)


def test_evidence_of_its_own_wins_over_the_coarser_one() -> None:
    """Long matches that are right and short ones that are wrong are told apart, though both have one estimate."""
    calibration = Calibration()
    short, long = Draft.of([1], [-1], [0.5], [1], [3]), Draft.of([1], [-1], [0.5], [12], [3])
    for _ in range(100):
        observe(calibration, "corpus", short, [2])
        observe(calibration, "corpus", long, [1])
    assert calibrated(calibration, "corpus", short)[0] < 0.15
    assert calibrated(calibration, "corpus", long)[0] > 0.85


def test_nodes_whose_fate_is_unknown_teach_nothing() -> None:
    """Below a wrong node, and beyond what was emitted, nothing is counted: one hit and two misses here, one node unknown."""
    calibration = Calibration()
    draft = Draft.of([1, 2, 3, 4], [-1, 0, 1, -1], [0.5, 0.5, 0.5, 0.5])
    assert observe(calibration, "corpus", draft, [1, 9]) == 1
    # node 1 hit; node 2 missed (9 was said); node 3 is below a miss; node 4 missed
    assert calibration.hits[0, 0].sum() == pytest.approx(0.999**2)
    assert calibration.trials[0, 0].sum() == pytest.approx(1 + 0.999 + 0.999**2)


def test_an_empty_draft_teaches_nothing() -> None:
    """Nothing proposed, nothing learned."""
    calibration = Calibration()
    assert observe(calibration, "corpus", Draft.empty(), [1]) == 0
    assert not calibration.trials.any()


def test_mixing_learns_whom_to_believe() -> None:
    """Of two sources that contradict one another, the one that is right comes to decide, though both claim the same."""
    calibration = Calibration()
    rows = calibration.rows(["right", "wrong"])
    drafts = Drafts.of([Draft.of([1], [-1], [0.6]), Draft.of([2], [-1], [0.6])])
    for _ in range(300):
        odds, depths = calibration.log_odds(drafts, rows)
        calibration.learn(drafts, rows, odds, depths, np.array([1], np.int32))
    odds, _ = calibration.log_odds(drafts, rows)
    tree = merge(drafts, odds, rows, calibration.mixture, 0, 0, 2)
    assert tree.tokens.tolist() == [0, 1, 2]
    assert tree.probs[1] > 0.9 and tree.probs[2] < 0.1


# ---- what is kept


def test_what_was_learned_survives_arrays() -> None:
    """A calibration made of another one's arrays says the same, and learns on without touching them."""
    calibration = Calibration()
    simulate(lambda raw: raw / 2, 200, calibration, 6)
    arrays = calibration.arrays()
    again = Calibration(arrays)
    draft = Draft.of([1], [-1], [0.55], [4], [3])
    before = calibrated(again, "corpus", draft)
    assert before == calibrated(calibration, "corpus", draft)
    assert set(arrays) == {"bias", "corpus/counts", "corpus/weights"}
    simulate(lambda raw: 0.0, 50, again, 7)
    assert calibrated(Calibration(arrays), "corpus", draft) == before
    assert set(Calibration(arrays).arrays()) == set(arrays), "what was not asked for is kept as it is"


def test_a_label_begins_as_its_kind_does_in_the_prior() -> None:
    """A corpus never seen takes the prior of `corpus`; what was saved of it comes first; the prior is not saved along."""
    teacher = Calibration()
    simulate(lambda raw: 0.0, 300, teacher, 8)
    prior = teacher.arrays()
    draft = Draft.of([1], [-1], [0.95], [4], [3])
    assert calibrated(Calibration(None, prior), "corpus:mycode", draft) == calibrated(teacher, "corpus", draft)
    saved = Calibration()
    saved.rows(["corpus:mycode"])
    fresh = Calibration(saved.arrays(), prior)
    assert calibrated(fresh, "corpus:mycode", draft)[0] == pytest.approx(0.95)
    assert set(fresh.arrays()) == {"bias", "corpus:mycode/counts", "corpus:mycode/weights"}


def test_arrays_that_are_no_calibration_are_refused() -> None:
    """A wrong name, shape, sign or number is named in the error."""
    good = Calibration()
    good.rows(["corpus"])
    for name, value in [
        ("corpus/other", np.zeros(3)),
        ("bias", np.zeros(2)),
        ("corpus/counts", np.zeros((2, 3))),
        ("corpus/counts", np.full((2, kernels.NUM_CONTEXTS, kernels.NUM_KNOTS), -1.0)),
        ("corpus/weights", np.full((2, kernels.NUM_SETS), np.nan)),
    ]:
        with pytest.raises(ValueError, match=name):
            Calibration(good.arrays() | {name: value})


def test_corpora_without_number_share_the_table_of_their_kind() -> None:
    """Beyond some labels the next corpora are counted together, so that a tenant's tables stay bounded."""
    calibration = Calibration()
    rows = calibration.rows([f"corpus:{i}" for i in range(100)]).tolist()
    assert len(set(rows)) < 40 and rows[-1] == rows[-2] == calibration.rows(["corpus"])[0]
    assert calibration.num_bytes < 40 * 100_000


# ---- credit


def reward(credit: Credit, reached: list[int | None]) -> None:
    """None: not heard."""
    counts = np.array([count or 0 for count in reached], np.int64)
    credit.reward(counts, np.array([count is not None for count in reached], np.bool_))


@pytest.mark.parametrize(
    ("reached", "expected"),
    [([], []), ([3], [3]), ([3, 1, None], [2, 0, 0]), ([2, 2, 1], [0, 0, 0]), ([None, 0], [0, 0]), ([1, None, 4], [0, 0, 3])],
)
def test_what_a_source_alone_held_is_what_it_has_beyond_the_next(reached: list[int | None], expected: list[int]) -> None:
    """Drafts are prefix-closed, so only the one that reached furthest can hold something alone."""
    assert alone(reached) == expected


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6), st.integers(0, 2**32))
def test_credit_is_its_twin(step: list[tuple[int, bool]], seed: int) -> None:
    """Fixed share over those heard, written with arrays."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(step)))
    reached, heard = (np.array(column) for column in zip(*step, strict=True))
    credit = Credit(len(step))
    credit.weights[:] = weights
    credit.reward(reached.astype(np.int64), heard.astype(np.bool_))
    if heard.any() and (most := reached[heard].max()) > 0:
        grown = weights[heard] * np.exp(0.5 * reached[heard] / most)
        grown *= weights[heard].sum() / grown.sum()
        weights[heard] = 0.98 * grown + 0.02 * weights[heard].sum() / heard.sum()
    assert np.allclose(credit.weights, weights)


def test_credit_starts_equal_and_stays_a_law() -> None:
    """Weights are equal at first, and positive with sum 1 after anything; no sources, no weights."""
    rng = np.random.default_rng(1)
    credit = Credit(4)
    assert credit.weights.tolist() == [0.25] * 4
    for _ in range(500):
        reward(credit, rng.integers(0, 9, 4).tolist())
        assert credit.weights.min() > 0 and credit.weights.sum() == pytest.approx(1, abs=1e-12)
    assert Credit(0).weights.tolist() == []
    reward(Credit(0), [])


def test_credit_goes_to_the_source_that_is_right() -> None:
    """A source that reaches further step after step is trusted most, and no other falls below its fixed share."""
    credit = Credit(3)
    for _ in range(100):
        reward(credit, [5, 1, 0])
    assert credit.weights.argmax() == 0 and credit.weights[0] > 0.9
    assert credit.weights.min() >= 0.02 / 3


def test_credit_comes_back_quickly() -> None:
    """The fixed share lets a source that was wrong for long overtake within a dozen steps of being right."""
    credit = Credit(2)
    for _ in range(200):
        reward(credit, [4, 0])
    for _ in range(16):
        reward(credit, [0, 4])
    assert credit.weights[1] > credit.weights[0]


def test_a_step_in_which_nobody_was_right_changes_nothing() -> None:
    """Without a hit there is nothing to tell the sources apart by."""
    credit = Credit(3)
    reward(credit, [3, 1, 0])
    before = credit.weights.tolist()
    reward(credit, [0, 0, 0])
    assert credit.weights.tolist() == before


def test_credit_sleeps_with_a_source_that_was_not_heard() -> None:
    """A late source keeps exactly its weight; the awake share theirs as they would without it; all asleep changes nothing."""
    credit, without = Credit(3), Credit(2)
    for _ in range(20):
        reward(credit, [4, 1, None])
        reward(without, [4, 1])
    assert credit.weights[2] == pytest.approx(1 / 3, abs=1e-12)
    assert credit.weights[:2] == pytest.approx(without.weights * 2 / 3, abs=1e-9)
    before = credit.weights.tolist()
    reward(credit, [None, None, None])
    reward(credit, [0, None, 0])
    assert credit.weights.tolist() == before
