"""The prior as a table people can read, and as what calibration begins with."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels
from engine.calibration import Calibration
from engine.prior import MOST_TRIALS, parse, prior, render
from engine.tree import Draft, Drafts


def taught() -> Calibration:
    """A calibration that saw `prompt` be right with half of what it claimed."""
    rng = np.random.default_rng(1)
    calibration = Calibration()
    rows = calibration.rows(["prompt"])
    for _ in range(300):
        drafts = Drafts.of([Draft.of([1], [-1], [0.8], [4], [3])])
        odds, depths = calibration.log_odds(drafts, rows)
        calibration.learn(drafts, rows, odds, depths, np.array([1 if rng.random() < 0.4 else 2], np.int32))
    return calibration


def test_the_shipped_prior_is_a_calibration() -> None:
    """It is accepted as one, and knows the sources whose drafts are found in texts."""
    Calibration(None, prior())
    assert set(prior()) == {"corpus/counts", "prompt/counts", "history/counts"}


def test_the_shipped_prior_stands_for_few_observations() -> None:
    """No cell outweighs what a tenant's own first requests say."""
    trials = [array[1] for name, array in prior().items() if name.endswith("/counts")]
    assert max(float(array.max()) for array in trials) <= MOST_TRIALS


def test_a_table_says_what_was_learned() -> None:
    """Written and read again, rates by match length are those learned, to the digits shown; all else is left out."""
    arrays = taught().arrays()
    again = parse(render(arrays))
    assert set(again) == {"prompt/counts"}
    seen = arrays["prompt/counts"][1, :10] > 1
    rate, found = (counts["prompt/counts"][0, :10][seen] / counts["prompt/counts"][1, :10][seen] for counts in (arrays, again))
    assert found == pytest.approx(rate, abs=0.02)
    assert again["prompt/counts"][1].max() <= MOST_TRIALS and not again["prompt/counts"][:, 10:].any()


def test_a_new_tenant_begins_with_the_prior() -> None:
    """A source that was seen to exaggerate is believed less from the first request on."""
    fresh = Calibration(None, parse(render(taught().arrays())))
    odds, _ = fresh.log_odds(Drafts.of([Draft.of([1], [-1], [0.8], [4], [3])]), fresh.rows(["prompt"]))
    assert kernels.chance(odds[0]) < 0.6


def test_a_line_that_is_none_is_named() -> None:
    """A word where a row's name should be, or a row of the wrong length, is an error that shows the line."""
    for line in ("prompt\tnowhere\t1\t2", "prompt\t3\t1/2\t1/2"):
        with pytest.raises(ValueError, match="no line of a prior"):
            parse(line)
