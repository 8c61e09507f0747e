"""The `lookahead` source: what the window's rows are, how it advances, what it costs, and that it finds what is to come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.acceptance import Limits, SamplingParams
from engine.calibration import Calibration
from engine.drafters import DraftRequest, Feedback
from engine.drafters.lookahead import SHAPES, LookaheadDrafter, LookaheadDrafting, NgramPool, Window, best_shape
from engine.drafters.panel import Panel
from engine.loop import Times, decode
from engine.session import Session, Tally
from engine.target import SequenceRequest
from engine.target.fake import FakeTarget
from engine.tree import CandidateTree, CostCurve, LookaheadRows

FREE = CostCurve(np.array([1, 64], np.int32), np.array([1.0, 1.0]))
DEAR = CostCurve(np.array([1, 2, 64], np.int32), np.array([1.0, 1.8, 60.0]))


def paths(rows: LookaheadRows) -> list[list[int]]:
    """The tokens from below the root to every row."""
    found: list[list[int]] = []
    for token, parent in zip(rows.tokens.tolist(), rows.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def heard(rows: LookaheadRows, said: Sequence[int], num_others: int = 1) -> Feedback:
    """The feedback of a pass over a root, other rows, and `rows`, after which the target said `said`."""
    tree = CandidateTree(
        np.zeros(num_others, np.int32),
        np.arange(-1, num_others - 1, dtype=np.int32),
        np.ones(num_others, np.float32),
        np.zeros(num_others, np.int64),
        np.zeros(num_others, np.uint8),
        0,
    ).with_lookahead(rows)
    top_ids = np.array([*[0] * num_others, *said], np.int32)[:, None]
    return Feedback(top_ids, tree.tokens, tree.parents, len(rows))


# ---- the window


def test_the_first_window_is_a_chain_of_guesses() -> None:
    """One level, below the root, out of the text."""
    rows = Window().rows(5, 3, [7, 8, 9])
    assert rows.parents.tolist() == [-1, 0, 1, 2, 3]
    assert set(rows.tokens.tolist()) <= {7, 8, 9}


def test_later_levels_hang_their_columns_below_it() -> None:
    """The row in column c of level l follows level 0 up to c, then its own column: the picture of the module."""
    window = Window()
    window.levels = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    rows = window.rows(3, 3, [0])
    rows.validate(64)
    assert paths(rows) == [
        [10], [10, 11], [10, 11, 12],
        [10, 20], [10, 11, 21], [10, 11, 12, 22],
        [10, 20, 30], [10, 11, 21, 31], [10, 11, 12, 22, 32],
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SHAPES))
def test_a_row_keeps_its_position(seed: int, shape: tuple[int, int]) -> None:
    """Over steps of any length each token stays where it is in the text: column + level + tokens out is constant."""
    rng = np.random.default_rng(seed)
    width, num_levels = shape
    window, out, fresh = Window(), 0, 1000
    positions: dict[int, int] = {}
    for _ in range(12):
        rows = window.rows(width, num_levels, [1])
        num = len(rows) // width
        assert len(rows) == num * width and num <= num_levels
        for i, token in enumerate(rows.tokens.tolist()):
            if token >= 1000:
                assert positions[token] == out + i // width + i % width
        said = list(range(fresh, fresh + len(rows)))
        fresh += len(rows)
        for i, token in enumerate(said):
            positions[token] = out + i // width + i % width + 1
        emitted = int(rng.integers(1, 5))
        ngrams = window.advance(emitted, heard(rows, said, num_others=int(rng.integers(1, 4))))
        last = said[-width:]
        assert [ngram[-1] for ngram in ngrams] == last
        assert [ngram[:-1] for ngram in ngrams] == [rows.tokens[column::width].tolist() for column in range(width)]
        out += emitted
    assert num == num_levels, "a window that pays grows to its levels"


def test_rows_that_the_worker_cut_off_are_no_level() -> None:
    """With the last rows gone, the level they were in counts as not heard."""
    window = Window()
    window.levels = [[10, 11, 12], [20, 21, 22]]
    feedback = heard(window.rows(3, 2, [0]), [1, 2, 3, 4, 5, 6])
    cut = Feedback(feedback.top_ids[:-1], feedback.nodes[:-1], feedback.parents[:-1], feedback.num_lookahead - 1)
    assert window.advance(1, cut) == [[10, 1], [11, 2], [12, 3]]


def test_without_rows_the_window_begins_anew() -> None:
    """What was guessed for positions long past is no guess."""
    window = Window()
    window.levels = [[10, 11, 12]]
    assert window.advance(1, Feedback()) == [] and window.levels == []


# ---- the pool


def test_the_pool_drafts_a_trie_of_what_it_saw() -> None:
    """N-grams of one key share their beginnings; children share the parent's probability with what was not seen."""
    pool = NgramPool()
    for ngram in ([1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 5, 6], [9, 9, 9]):
        pool.add(ngram)
    draft = pool.draft(1, 16)
    draft.validate(10)
    nodes = list(zip(draft.tokens.tolist(), draft.parents.tolist(), draft.counts.tolist(), strict=True))
    assert sorted(nodes) == sorted([(5, -1, 1), (6, 0, 1), (2, -1, 3), (4, 2, 2), (3, 2, 1)])
    assert draft.probs.tolist() == pytest.approx([1 / 6, 1 / 2, 3 / 6, 2 / 5, 1 / 5])
    assert len(pool.draft(1, 2)) == 2 and not len(pool.draft(7, 8)) and not len(pool.draft(1, 0))


def test_the_pool_forgets_what_was_not_seen_for_longest() -> None:
    """Of a key's n-grams and of the keys the latest stay; seeing one again makes it one of the latest."""
    pool = NgramPool(num_keys=2, num_tails=2)
    for ngram in ([1, 2], [1, 3], [1, 2], [1, 4]):
        pool.add(ngram)
    assert set(pool.draft(1, 8).tokens.tolist()) == {2, 4}
    for ngram in ([5, 5], [1, 2], [6, 6]):
        pool.add(ngram)
    assert len(pool) == 2 and not len(pool.draft(5, 8)) and len(pool.draft(1, 8))


def test_hits_are_tokens_in_a_row() -> None:
    """The best n-gram of the key counts."""
    pool = NgramPool()
    pool.add([1, 2, 3, 4])
    pool.add([1, 2, 9, 9])
    assert [pool.num_hits(1, said) for said in ([2, 3, 8], [2, 9, 9, 9], [3], [])] == [2, 3, 0, 0]
    assert pool.num_hits(7, [2]) == 0


# ---- the price


def test_the_window_is_as_large_as_pays() -> None:
    """All of it where rows are free, none where they are dear, something between in between; never more than a pass takes."""
    assert best_shape(1, FREE, 1.0, 0.3) == SHAPES[-1]
    assert best_shape(1, DEAR, 1.0, 0.3) is None
    middle = CostCurve(np.array([1, 16, 64], np.int32), np.array([1.0, 1.01, 3.0]))
    shape = best_shape(1, middle, 1.0, 0.5)
    assert shape is not None and shape[0] * shape[1] <= 16
    assert best_shape(1, CostCurve.flat(), 1.0, 0.3) is None, "nobody measured what a row costs"
    for num_rows in range(1, 65):
        shape = best_shape(num_rows, FREE, 1.0, 0.3)
        assert num_rows + (shape[0] * shape[1] if shape else 0) <= 64
    assert best_shape(1, CostCurve(np.array([1, 64], np.int32), np.array([1.0, 1.2])), 1.0, 0.0) is None


def test_rows_that_find_nothing_are_given_up_and_tried_again() -> None:
    """Where a row costs something, a window without hits goes; after a while without it, it gets another chance."""
    curve = CostCurve(np.array([1, 64], np.int32), np.array([1.0, 1.05]))
    drafting = LookaheadDrafting(np.array([1, 2, 3], np.int32))
    sizes = []
    for _ in range(400):
        rows = drafting.lookahead(1, curve)
        assert np.array_equal(rows.tokens, drafting.lookahead(1, curve).tokens), "asking changes nothing"
        sizes.append(len(rows))
        drafting.accept([5], heard(rows, [9] * len(rows)) if len(rows) else Feedback())
    assert sizes[0] > 0 and 0 in sizes
    assert any(sizes[sizes.index(0) :])


# ---- in the loop


def run(target: FakeTarget, curve: CostCurve, sampling: SamplingParams) -> tuple[list[int], Tally]:
    """64 tokens with lookahead alone; the worker's price is `curve`."""
    target.curve = curve
    request = SequenceRequest(np.array([3, 1, 4], np.int32), sampling, Limits(64), "t", feedback_top_k=1)

    async def go() -> tuple[list[int], Tally]:
        about = DraftRequest("t", "fake", request.prompt)
        with Panel([LookaheadDrafter()], about, target.info.vocab_size, deadline=60.0) as panel:
            session = Session(request.prompt, panel.labels, Calibration(), 8)
            async with target.open(request) as sequence:
                async for _ in decode(session, panel, sequence, Times()):
                    pass
            assert all(not record.errors for record in panel.records)
            return session.tokens[3:].tolist(), session.tally

    return asyncio.run(go())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_window_finds_tokens_to_come_and_changes_none(temperature: float) -> None:
    """On a model of one token's memory it takes fewer steps than tokens, and says what plain decoding says."""
    sampling = SamplingParams(temperature, seed=5)
    plain, plainly = run(FakeTarget(32, order=1, sharpness=6.0), DEAR, sampling)
    found, tally = run(FakeTarget(32, order=1, sharpness=6.0), FREE, sampling)
    assert found == plain
    assert plainly.num_verified == 0 and plainly.num_steps == 64
    assert tally.num_steps < 48 and tally.num_accepted == 64 - tally.num_steps


def test_lookahead_rows_are_not_counted_as_candidates() -> None:
    """The tally of verified nodes is of candidates."""
    _, tally = run(FakeTarget(32, order=1, sharpness=6.0), FREE, SamplingParams())
    assert tally.num_accepted <= tally.num_verified <= 8 * tally.num_steps
    assert tally.num_verified == tally.proposed.sum()


def test_unlawful_rows_are_refused() -> None:
    """Tokens outside the vocabulary and parents that do not precede are named."""
    good: NDArray[np.int32] = np.array([1, 2], np.int32)
    for rows, fault in [
        (LookaheadRows(good, np.array([-1, 1], np.int32)), "precede"),
        (LookaheadRows(np.array([1, 99], np.int32), np.array([-1, 0], np.int32)), "vocabulary"),
        (LookaheadRows(good, np.array([-1], np.int32)), "parents"),
    ]:
        with pytest.raises(ValueError, match=fault):
            rows.validate(64)
    LookaheadRows.none().validate(64)
