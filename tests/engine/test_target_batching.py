"""Who is packed with whom, how far trees are cut together, and what the cost curve learns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import Exhausted
from engine.target import batching
from engine.target.batching import LATER, Admission, Batcher, CostMeter, Later, Work, cut_together
from engine.tree import CandidateTree, CostCurve, Draft, best_size, with_room
from tests.engine import oracles_target as oracles
from tests.speculation import merged, random_draft

CURVES = [
    CostCurve.flat(),
    CostCurve(np.array([1, 2, 4, 8], np.int32), np.array([1.0, 1.1, 1.4, 2.6])),
    CostCurve(np.array([1, 64], np.int32), np.array([0.1, 6.4])),
    CostCurve(np.array([1, 4, 5, 12], np.int32), np.array([1.0, 1.0, 1.9, 1.9])),
]
"""Rows that are free, convex, dear, and a step with a plateau behind it, where a local search would stop too early."""


def trees_of(seed: int, num_trees: int, most: int) -> list[CandidateTree]:
    """Trees merged from random drafts."""
    rng = np.random.default_rng(seed)
    return [merged([random_draft(rng, 6, most)], most, position=3) for _ in range(num_trees)]


# ---- cutting


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(CURVES), st.integers(1, 16), st.sampled_from([0, 7]))
def test_trees_are_cut_to_the_joint_optimum(seed: int, num: int, curve: CostCurve, max_rows: int, other: int) -> None:
    """No other choice of sizes has more expected tokens per second; every root stays; rows stay within bounds."""
    trees = trees_of(seed, num, 6)
    cut = cut_together(trees, curve, max_rows, other)
    sizes = [len(tree) for tree in cut]
    assert min(sizes) >= 1 and sum(sizes) + other <= max(max_rows, num + other)
    for tree, whole in zip(cut, trees, strict=True):
        assert np.array_equal(tree.tokens, whole.tokens[: len(tree)]) and tree.position == whole.position
    gain = sum(float(tree.probs.sum(dtype=np.float64)) for tree in cut)
    found = gain / float(curve.at(sum(sizes) + other))
    assert found == pytest.approx(oracles.best_cut(trees, curve, max_rows, other), rel=1e-6)


def test_the_bound_on_rows_takes_the_least_likely_nodes() -> None:
    """Of a joint budget, what is left are the likeliest nodes of all trees together."""
    trees = trees_of(3, 3, 8)
    for max_rows in range(3, 20):
        kept = np.concatenate([tree.probs[1:] for tree in cut_together(trees, CostCurve.flat(), max_rows)])
        everything = np.sort(np.concatenate([tree.probs[1:] for tree in trees]))[::-1]
        assert np.array_equal(np.sort(kept)[::-1], everything[: max_rows - 3])


def test_no_trees_and_too_many_trees() -> None:
    """Nothing is cut to nothing; more trees than rows are stepped by their roots."""
    assert cut_together([], CURVES[1], 8) == []
    assert [len(tree) for tree in cut_together(trees_of(1, 5, 6), CostCurve.flat(), 3)] == [1] * 5


def test_lookahead_rows_are_not_cut_by_the_price_of_candidates() -> None:
    """A real bug: rows that promise no token were taken for worthless candidates. The tree beside it is cut as ever."""
    tree = merged([Draft.of([1, 2], [-1, 0], [0.1, 0.9])], 8, position=3)
    rows = CandidateTree(
        np.append(tree.tokens, [5, 6]).astype(np.int32),
        np.append(tree.parents, [0, 3]).astype(np.int32),
        np.append(tree.probs, [0.0, 0.0]).astype(np.float32),
        np.append(tree.sources, [0, 0]),
        np.append(tree.roles, [1, 1]).astype(np.uint8),
        3,
    )
    rows.validate(8)
    dear = CostCurve(np.array([1, 2], np.int32), np.array([1.0, 2.0]))
    assert [len(cut) for cut in cut_together([rows, tree], dear, 64)] == [5, 1]


# ---- the cost curve


def test_the_curve_is_flat_until_measured_and_may_be_frozen() -> None:
    """Nothing known: rows are free. Frozen: passes change nothing. Thawed: what was measured before."""
    meter = CostMeter()
    assert meter.curve().seconds.tolist() == [1.0]
    meter.observe(1, 5.0)
    assert meter.curve().seconds.tolist() == [1.0], "a size that was never measured is not learned from one pass"
    meter.calibrate(lambda rows: None)
    measured = meter.curve()
    measured.validate()
    assert measured.rows.tolist() == list(CostMeter.ROWS)
    meter.freeze(CURVES[1])
    meter.observe(1, 100.0)
    assert meter.curve() is CURVES[1]
    meter.freeze(None)
    assert np.array_equal(meter.curve().seconds, measured.seconds)


def test_calibration_keeps_the_best_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is run several times; an interruption of one run does not count; a dip is smoothed: the curve never falls."""
    clock, runs = [0.0], list[int]()

    def run(rows: int) -> None:
        runs.append(rows)
        hiccup = 50.0 if runs.count(rows) == 2 else 0.0
        clock[0] += 10.0 + (-1.0 if rows == 2 else 0.1 * rows) + hiccup

    monkeypatch.setattr(batching.time, "perf_counter", lambda: clock[0])
    meter = CostMeter()
    meter.calibrate(run)
    curve = meter.curve()
    curve.validate()
    assert curve.rows.tolist() == list(CostMeter.ROWS) and all(runs.count(rows) >= 3 for rows in CostMeter.ROWS)
    assert curve.seconds[2:] == pytest.approx([10.0 + 0.1 * rows for rows in CostMeter.ROWS[2:]])
    assert curve.seconds[0] == pytest.approx(curve.seconds[1])


def measured(monkeypatch: pytest.MonkeyPatch) -> CostMeter:
    """A meter for which `rows` rows take 1 + rows / 100 seconds."""
    clock = [0.0]
    monkeypatch.setattr(batching.time, "perf_counter", lambda: clock[0])
    meter = CostMeter()
    meter.calibrate(lambda rows: clock.__setitem__(0, clock[0] + 1.0 + rows / 100))
    return meter


def test_a_single_odd_pass_moves_the_curve_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long or short one pass takes, its point moves by an eighth at most, and points of other sizes not at all."""
    for odd in (1e9, 0.0):
        meter = measured(monkeypatch)
        before = meter.curve().seconds.copy()
        meter.observe(64, odd)
        after = meter.curve().seconds
        assert after[-1] != before[-1] and 7 / 8 <= after[-1] / before[-1] <= 9 / 8
        assert np.array_equal(after[:-1], np.minimum(before[:-1], after[-1]))
        meter.observe(300, odd)
        assert np.array_equal(meter.curve().seconds, after), "a pass beyond the largest measured size teaches nothing"
        meter.curve().validate()


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_steady_news_is_believed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Passes that keep taking another time than expected bring the curve there, upwards and downwards."""
    meter = measured(monkeypatch)
    for _ in range(300):
        meter.observe(64, seconds)
    assert meter.curve().at(64) == pytest.approx(seconds, rel=0.02)
    meter.curve().validate()


def test_a_pass_between_two_sizes_moves_both_by_their_nearness(monkeypatch: pytest.MonkeyPatch) -> None:
    """54 rows lie between 48 and 64: both get dearer, the nearer one by more, all others stay."""
    meter = measured(monkeypatch)
    before = meter.curve().seconds.copy()
    meter.observe(54, 2.0)
    moved = meter.curve().seconds / before
    assert moved[-2] > moved[-1] > 1.0 and np.array_equal(moved[:-2], np.ones(len(moved) - 2))


def with_context(monkeypatch: pytest.MonkeyPatch) -> CostMeter:
    """A meter of a machine on which a pass takes 1 + rows / 100, and for 1,000 positions .2 a sequence and .1 a row."""
    clock, positions = [0.0], [50]
    monkeypatch.setattr(batching.time, "perf_counter", lambda: clock[0])

    def run(rows: int) -> None:
        clock[0] += 1.0 + rows / 100 + positions[0] / 1000 * (0.2 + 0.1 * rows)

    meter = CostMeter()
    meter.calibrate(run)
    positions[0] = 2050
    meter.calibrate_context(run, 50, 2050)
    return meter


def test_the_curve_knows_what_context_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the context and the number of sequences, rows cost what they do, though only two contexts were timed."""
    meter = with_context(monkeypatch)
    rows = np.array(CostMeter.ROWS)
    for context, num in ((0, 1), (50, 1), (500, 3), (8000, 1), (8000, 8)):
        expected = 1.0 + rows / 100 + context / 1000 * (0.2 * num + 0.1 * rows)
        assert meter.curve(context, num).seconds == pytest.approx(expected)


def test_what_goes_by_between_passes_is_paid_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises the whole curve, whatever the rows, so that trees grow; what passes take is learned as before."""
    meter, tree = measured(monkeypatch), trees_of(5, 1, 12)[0]
    before, size = meter.curve(), best_size(tree.probs[1:], meter.share(0.0, 40, 40))
    for _ in range(200):
        meter.observe_between(3.0)
        meter.observe(8, 1.08)
    assert meter.curve().seconds == pytest.approx(before.seconds + 3.0, rel=1e-3)
    assert best_size(tree.probs[1:], meter.share(0.0, 40, 40)) > size


def test_what_context_costs_is_learned_from_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context that costs twice what was measured is believed; what a pass without any costs hardly changes."""
    meter = with_context(monkeypatch)
    for _ in range(400):
        meter.observe(8, 1.08 + 8 * (0.4 + 0.2 * 8), 8000.0)
        meter.observe(8, 1.08)
    assert meter.curve(8000).at(8) == pytest.approx(1.08 + 8 * (0.4 + 0.2 * 8), rel=0.05)
    assert meter.curve().at(8) == pytest.approx(1.08, rel=0.05)


def test_beside_others_a_tree_pays_its_part_and_all_that_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it pays the pass; beside others a part of what its root leaves, so that trees shrink as there are more of them."""
    meter = measured(monkeypatch)
    assert np.array_equal(meter.share(0.0, 1, 0).seconds, meter.curve().seconds)
    tree, sizes = trees_of(5, 1, 12)[0], list[int]()
    for num in (1, 4, 16, 64):
        share = meter.share(0.0, num, num - 1)
        share.validate()
        assert share.at(1) == pytest.approx((1 + num / 100) / num)
        assert share.at(9) - share.at(1) == pytest.approx(0.08)
        drafting = meter.share(0.0, num, 2 * (num - 1))
        assert drafting.at(1) == share.at(1), "what others' candidates take is no part of what a token takes without drafts"
        sizes.append(best_size(tree.probs[1:], share))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    meter.freeze(CURVES[1])
    assert meter.share(900.0, 5, 7) is CURVES[1]


def test_now_and_then_a_pass_explores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass in sixteen takes more nodes than pay, where there are more and they fit; with a frozen curve none does."""
    meter = measured(monkeypatch)
    turns = []
    for _ in range(64):
        turns.append(meter.explores())
        meter.observe(4, 1.04)
    assert sum(turns) == 4 and not any(a and b for a, b in pairwise(turns))
    meter.freeze(CURVES[1])
    for _ in range(64):
        assert not meter.explores()
        meter.observe(4, 1.04)

    dear = CURVES[2]
    for seed in range(20):
        trees = trees_of(seed, 2, 8)
        total = sum(map(len, trees))
        usual = sum(map(len, cut_together(trees, dear, 64)))
        more = cut_together(trees, dear, 64, explore=True)
        assert sum(map(len, more)) == min(total, 2 + with_room(usual - 2))
        assert sum(map(len, cut_together(trees, dear, 3, explore=True))) <= 3


# ---- packing

Log = list[list[str]]
Answers = list[str | Exception | Later]


def root(position: int = 3) -> CandidateTree:
    return CandidateTree.root_only(1, position)


Body = Callable[[Batcher[str, str], Log], Awaitable[None]]


def play(body: Body, answer: Callable[[str], str | Exception | Later] = str.upper) -> Log:
    """Run `body` with a batcher whose passes are noted: per pass, who was in it (wishes to read as name+)."""
    log: Log = []

    def run(works: list[Work[str, str]]) -> Answers:
        log.append([work.owner + ("+" if work.tree is None else "") for work in works])
        return [answer(work.owner) for work in works]

    async def main() -> None:
        await asyncio.wait_for(body(Batcher(run), log), 20)

    asyncio.run(main())
    return log


def test_wishes_that_come_together_share_a_pass() -> None:
    """Trees submitted in one turn of the loop are one pass, and each owner gets its own answer."""

    async def body(batcher: Batcher[str, str], log: Log) -> None:
        assert await asyncio.gather(*(batcher.submit(name, root()) for name in "abc")) == ["A", "B", "C"]
        assert await batcher.submit("d", root()) == "D"

    assert play(body) == [["a", "b", "c"], ["d"]]


def test_others_that_may_come_soon_are_waited_for() -> None:
    """While there is patience a pass waits, and takes along who comes meanwhile; when it is at an end the pass begins."""
    log: Log = []
    seconds = [10.0]

    def run(works: list[Work[str, str]]) -> Answers:
        log.append([work.owner for work in works])
        return [work.owner for work in works]

    async def main() -> None:
        batcher: Batcher[str, str] = Batcher(run, lambda works: seconds[0] if len(works) < 2 else 0.0)
        first = asyncio.create_task(batcher.submit("a", root()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not log
        assert await batcher.submit("b", root()) == "b" and await first == "a"
        seconds[0] = 0.001
        assert await batcher.submit("c", root()) == "c"

    asyncio.run(asyncio.wait_for(main(), 20))
    assert log == [["a", "b"], ["c"]]


def test_wishes_that_wait_keep_their_place() -> None:
    """LATER: a wish comes again in the next pass, before those that came after it; where all must wait, a call wakes them."""
    log: Log = []
    open_to: list[str] = []

    def run(works: list[Work[str, str]]) -> Answers:
        log.append([work.owner for work in works])
        return [work.owner if work.owner in open_to else LATER for work in works]

    async def main() -> None:
        batcher: Batcher[str, str] = Batcher(run)
        first = asyncio.create_task(batcher.submit("a"))
        while not log:
            await asyncio.sleep(0)
        second = asyncio.create_task(batcher.submit("b", root()))
        while log[-1] != ["a", "b"]:
            await asyncio.sleep(0)
        open_to.append("b")
        batcher.wake()
        assert await second == "b" and not first.done()
        open_to.append("a")
        batcher.wake()
        assert await first == "a"

    asyncio.run(asyncio.wait_for(main(), 20))
    assert ["b", "a"] not in log and log[-1] == ["a"]


def test_admission_is_bounded_and_in_turn() -> None:
    """So many are in, so many wait, one more is told at once; places go to who waited longest; who goes away takes none."""

    async def main() -> None:
        door = Admission(2, 3)
        order: list[str] = []

        async def visit(name: str) -> None:
            await door.enter()
            order.append(name)

        await visit("a")
        await visit("b")
        tasks = {name: asyncio.create_task(visit(name)) for name in "cde"}
        await asyncio.sleep(0)
        assert (door.num_admitted, door.num_waiting) == (2, 3)
        with pytest.raises(Exhausted, match="2 sequences are open and 3 wait; retry later"):
            await door.enter()
        tasks["c"].cancel()
        await asyncio.sleep(0)
        assert door.num_waiting == 2
        door.leave()
        tasks["d"].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == ["a", "b", "e"], "d went away just when it was its turn, and handed it on"
        assert (door.num_admitted, door.num_waiting) == (2, 0)
        door.leave()
        door.leave()
        assert door.num_admitted == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_caller_that_goes_away_withdraws_its_wish() -> None:
    """A wish cancelled while it waits is in no pass, and its neighbours get theirs; a pass of nobody is not run."""

    async def body(batcher: Batcher[str, str], log: Log) -> None:
        gone = asyncio.create_task(batcher.submit("gone", root()))
        stays = asyncio.create_task(batcher.submit("stays", root()))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == "STAYS" and gone.cancelled()
        alone = asyncio.create_task(batcher.submit("alone"))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert await batcher.submit("next", root()) == "NEXT"

    assert play(body) == [["stays"], ["next"]]


def test_an_error_goes_to_its_owner() -> None:
    """An answer that is an exception is raised where it belongs, and only there."""

    def answer(owner: str) -> str | Exception:
        return ValueError(owner) if owner == "b" else owner

    async def body(batcher: Batcher[str, str], log: Log) -> None:
        names: Sequence[str] = "abc"
        found = await asyncio.gather(*(batcher.submit(name, root()) for name in names), return_exceptions=True)
        assert found[0] == "a" and found[2] == "c" and isinstance(found[1], ValueError)

    play(body, answer)


def test_a_pass_that_fails_is_everybodys_error_and_the_next_one_runs() -> None:
    """If the pass itself breaks, all in it are told, and the batcher goes on."""
    broken = [True]

    async def body(batcher: Batcher[str, str], log: Log) -> None:
        found = await asyncio.gather(*(batcher.submit(name, root()) for name in "ab"), return_exceptions=True)
        assert [type(error) for error in found] == [RuntimeError, RuntimeError]
        broken[0] = False
        assert await batcher.submit("c", root()) == "c"

    def answer(owner: str) -> str:
        if broken[0]:
            raise RuntimeError("the pass broke")
        return owner

    play(body, answer)
