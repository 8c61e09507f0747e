"""Calibration is judged by its calibration error and log-loss, credit by who is trusted after what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.calibration import Calibration, Credit
from engine.tree import Draft


def simulate(
    truth: Callable[[float], float], num_rounds: int, calibration: Calibration, seed: int
) -> list[tuple[float, float, int]]:
    """(raw, calibrated, outcome) of one-node drafts whose token is right with chance truth(raw), each observed after use."""
    rng = np.random.default_rng(seed)
    seen = []
    for _ in range(num_rounds):
        raw = float(rng.choice([0.15, 0.55, 0.95]))
        draft = Draft.of([1], [-1], [raw], [4], [3])
        calibrated = float(calibration.apply("corpus", draft).probs[0])
        outcome = int(rng.random() < truth(raw))
        calibration.observe("corpus", draft, np.array([1 if outcome else 2], np.int32))
        seen.append((raw, calibrated, outcome))
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
    for _ in range(3000):
        raw = float(10 ** rng.uniform(-3, -1))
        outcome = 1 if rng.random() < raw else 2
        calibration.observe("corpus", Draft.of([1], [-1], [raw], [1], [3]), np.array([outcome], np.int32))
    siblings = Draft.of(range(30), [-1] * 30, [0.001] * 30, [1] * 30, [3] * 30)
    assert calibration.apply("corpus", siblings).probs.sum() < 0.15


def test_calibration_follows_a_source_that_changes() -> None:
    """Counts fade: a source that turns from always right to always wrong is believed less within the memory of its bucket."""
    calibration = Calibration()
    simulate(lambda raw: 1.0, 3000, calibration, 3)
    draft = Draft.of([1], [-1], [0.95], [4], [3])
    assert calibration.apply("corpus", draft).probs[0] > 0.95
    simulate(lambda raw: 0.0, 9000, calibration, 4)
    assert calibration.apply("corpus", draft).probs[0] < 0.1


def test_an_unseen_bucket_leaves_estimates_as_they_are() -> None:
    """Without evidence the posterior mean is the source's own estimate, and nothing is copied for an unknown source."""
    calibration = Calibration()
    draft = Draft.of([1, 2], [-1, 0], [0.5, 0.25], [1, 9], [1, 30])
    assert calibration.apply("corpus", draft) is draft
    calibration.observe("corpus", Draft.of([1], [-1], [0.9], [3], [3]), np.array([1], np.int32))
    assert calibration.apply("corpus", draft).probs.tolist() == [0.5, 0.25]


def test_sources_and_buckets_are_kept_apart() -> None:
    """What one source does in one bucket says nothing about another source or another kind of evidence."""
    calibration = Calibration()
    wrong = Draft.of([1], [-1], [0.9], [4], [3])
    for _ in range(100):
        calibration.observe("corpus", wrong, np.array([2], np.int32))
    assert calibration.apply("corpus", wrong).probs[0] < 0.1
    assert calibration.apply("prompt", wrong).probs[0] == np.float32(0.9)
    for other in [
        Draft.of([1], [-1], [0.9], [12], [3]),
        Draft.of([1], [-1], [0.9], [4], [30]),
        Draft.of([1], [-1], [0.5], [4], [3]),
    ]:
        assert calibration.apply("corpus", other).probs[0] == other.probs[0]


def test_nodes_whose_fate_is_unknown_teach_nothing() -> None:
    """Below a wrong node, and beyond what was emitted, nothing is counted: one hit and one miss here, two nodes unknown."""
    calibration = Calibration()
    draft = Draft.of([1, 2, 3, 4], [-1, 0, 1, -1], [0.5, 0.5, 0.5, 0.5])
    reached = calibration.observe("corpus", draft, np.array([1, 9], np.int32))
    hits, trials = calibration.tables["corpus"]
    assert reached == 1
    # node 1 hit; node 2 missed (9 was said); node 3 is below a miss; node 4 missed
    assert hits.sum() == pytest.approx(0.999**2)
    assert trials.sum() == pytest.approx(1 + 0.999 + 0.999**2)


def test_an_empty_draft_is_neither_counted_nor_copied() -> None:
    """Nothing proposed, nothing learned."""
    calibration = Calibration()
    assert calibration.observe("corpus", Draft.empty(), np.array([1], np.int32)) == 0
    assert not calibration.tables
    assert calibration.apply("corpus", Draft.empty()) is Draft.empty()


def test_apply_keeps_everything_but_the_probabilities() -> None:
    """Tokens, parents and evidence pass through, and the raw draft is left alone."""
    calibration = Calibration()
    draft = Draft.of([1, 2], [-1, 0], [0.5, 0.5], [4, 4], [3, 3])
    calibration.observe("corpus", draft, np.array([9], np.int32))
    applied = calibration.apply("corpus", draft)
    assert draft.probs.tolist() == [0.5, 0.5] and applied.probs[0] < 0.5
    assert all(getattr(applied, name) is getattr(draft, name) for name in ("tokens", "parents", "lengths", "counts"))


# ---- credit


def test_credit_starts_equal_and_stays_a_law() -> None:
    """Weights are equal at first, and positive with sum 1 after anything; no sources, no weights."""
    rng = np.random.default_rng(1)
    credit = Credit(4)
    assert credit.weights.tolist() == [0.25] * 4
    for _ in range(500):
        credit.reward(rng.integers(0, 9, 4).tolist())
        assert credit.weights.min() > 0 and credit.weights.sum() == pytest.approx(1, abs=1e-12)
    assert Credit(0).weights.tolist() == []
    Credit(0).reward([])


def test_credit_goes_to_the_source_that_is_right() -> None:
    """A source that reaches further step after step is trusted most, and no other falls below its fixed share."""
    credit = Credit(3)
    for _ in range(100):
        credit.reward([5, 1, 0])
    assert credit.weights.argmax() == 0 and credit.weights[0] > 0.9
    assert credit.weights.min() >= 0.02 / 3


def test_credit_comes_back_quickly() -> None:
    """The fixed share lets a source that was wrong for long overtake within a dozen steps of being right."""
    credit = Credit(2)
    for _ in range(200):
        credit.reward([4, 0])
    for _ in range(16):
        credit.reward([0, 4])
    assert credit.weights[1] > credit.weights[0]


def test_a_step_in_which_nobody_was_right_changes_nothing() -> None:
    """Without a hit there is nothing to tell the sources apart by."""
    credit = Credit(3)
    credit.reward([3, 1, 0])
    before = credit.weights.tolist()
    credit.reward([0, 0, 0])
    assert credit.weights.tolist() == before


def test_credit_sleeps_with_a_source_that_was_not_heard() -> None:
    """A late source keeps exactly its weight; the awake share theirs as they would without it; all asleep changes nothing."""
    credit, without = Credit(3), Credit(2)
    for _ in range(20):
        credit.reward([4, 1, None])
        without.reward([4, 1])
    assert credit.weights[2] == pytest.approx(1 / 3, abs=1e-12)
    assert credit.weights[:2] == pytest.approx(without.weights * 2 / 3, abs=1e-9)
    before = credit.weights.tolist()
    credit.reward([None, None, None])
    credit.reward([0, None, 0])
    assert credit.weights.tolist() == before
