"""The session as a state machine, by hand. session.txt shows whole runs to read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import kernels
from engine.acceptance import Limits, walk
from engine.calibration import Calibration
from engine.session import Session
from engine.target import StepResult
from engine.tree import CANDIDATE, LOOKAHEAD, CandidateTree, CostCurve, Draft, Drafts, LookaheadRows, with_room
from tests.speculation import chain, random_draft

VOCAB = 5
FREE = CostCurve.flat()


def session_of(labels: list[str], *, prompt: tuple[int, ...] = (1, 2), max_nodes: int = 16) -> Session:
    """A session with a calibration of its own."""
    return Session(np.array(prompt, np.int32), labels, Calibration(), max_nodes)


def answer(tree: CandidateTree, said: list[int], max_tokens: int = 1000, num_emitted: int = 0) -> StepResult:
    """The answer of a target that says `said`."""
    taken = walk(tree, lambda node, emitted: said[len(emitted)], Limits(max_tokens), num_emitted)
    return StepResult(taken.path, taken.tokens, taken.finish, np.arange(len(tree), dtype=np.int32))


@given(st.integers(0, 2**32))
def test_books_balance_over_any_run(seed: int) -> None:
    """Emitted = accepted + steps; tokens grow by what was emitted; the root is the last token; tallies add up."""
    rng = np.random.default_rng(seed)
    session = session_of(["prompt", "corpus:a", "corpus:b"])
    said: list[int] = []
    for _ in range(6):
        drafts = [None if rng.random() < 0.2 else random_draft(rng, VOCAB, 8) for _ in range(3)]
        tree = session.tree(drafts, FREE)
        tree.validate(VOCAB)
        assert (tree.tokens[0], tree.position) == (session.tokens[-1], len(session.tokens) - 1)
        step = session.commit(answer(tree, rng.integers(0, VOCAB, 20).tolist()))
        said += step.tokens.tolist()
        assert session.tokens.tolist() == [1, 2, *said]
        assert len(step.masks) == len(step.tokens) and step.masks[-1] == 0 and all(step.masks[:-1])
    tally = session.tally
    assert session.num_emitted == len(said) == tally.num_accepted + tally.num_steps
    assert tally.num_steps == 6
    assert np.all(tally.unique <= tally.accepted) and np.all(tally.accepted <= tally.proposed)
    assert tally.unique.sum() <= tally.num_accepted <= tally.accepted.sum()
    assert tally.num_accepted <= tally.num_verified <= tally.proposed.sum()
    assert np.all(tally.accepted <= tally.held) and np.all(tally.unique <= tally.alone) and np.all(tally.alone <= tally.held)
    assert 0 <= tally.expected <= tally.num_verified + 1e-5


def test_tree_is_a_proposal_only() -> None:
    """Until commit(), no token is added and no source is credited: the same drafts would give the same tree again."""
    session, twin = session_of(["a", "b"]), session_of(["a", "b"])
    drafts = [chain([1, 2]), chain([3])]
    tree = session.tree(drafts, FREE)
    assert session.tokens.tolist() == [1, 2] and session.tally.num_steps == 0
    assert tree.probs.tolist() == twin.tree(drafts, FREE).probs.tolist()


def test_calls_out_of_turn_are_refused() -> None:
    """Two trees in a row, a commit without a tree, a tree after the end, and a wrong number of drafts."""
    session = session_of(["a"])
    with pytest.raises(RuntimeError, match="commit without a tree"):
        session.commit(answer(CandidateTree.root_only(2, 1), [1]))
    with pytest.raises(ValueError, match="each of 1 sources: got 2"):
        session.tree([None, None], FREE)
    tree = session.tree([None], FREE)
    with pytest.raises(RuntimeError, match="not committed"):
        session.tree([None], FREE)
    session.commit(answer(tree, [1], max_tokens=1))
    assert session.finished and session.finish == "length"
    with pytest.raises(RuntimeError, match="finished"):
        session.tree([None], FREE)
    with pytest.raises(RuntimeError, match="commit without a tree"):
        session.commit(answer(tree, [1]))


def test_an_empty_prompt_is_refused() -> None:
    """There must be a token for the root."""
    with pytest.raises(ValueError, match="at least one prompt token"):
        session_of([], prompt=())


def test_a_session_without_sources_decodes_plainly() -> None:
    """No sources: every tree is the root alone."""
    session = session_of([])
    for token in [3, 4]:
        tree = session.tree([], FREE)
        assert len(tree) == 1
        session.commit(answer(tree, [token]))
    assert session.tokens.tolist() == [1, 2, 3, 4]


def test_the_tree_keeps_to_the_budget_and_to_the_price() -> None:
    """max_nodes bounds the candidates; of rows as dear as a pass, only the worker's room to know better is sent."""
    draft = chain([1, 2, 3, 4], 0.9)
    dear = CostCurve(np.array([1, 2], np.int32), np.array([1.0, 2.0]))
    assert len(session_of(["a"], max_nodes=2).tree([draft], FREE)) == 3
    assert len(session_of(["a"], max_nodes=0).tree([draft], FREE)) == 1
    assert len(session_of(["a"]).tree([draft], dear)) == 1 + with_room(0)


def test_lookahead_rows_stand_behind_what_pays() -> None:
    """They are asked for once the size of the tree is known, come after its candidates, and are no candidates in the tally."""
    session = session_of(["a"])
    curve = CostCurve(np.array([1, 4, 8], np.int32), np.array([1.0, 1.01, 9.0]))
    asked = []

    def lookahead(num_rows: int, price: CostCurve) -> LookaheadRows:
        asked.append((num_rows, price))
        return LookaheadRows(np.array([4, 4], np.int32), np.array([-1, 0], np.int32))

    tree = session.tree([chain([1, 2, 3, 4, 0, 1], 0.9)], curve, lookahead)
    tree.validate(VOCAB)
    assert asked == [(4, curve)]
    assert (len(tree), tree.roles.tolist()) == (6, [CANDIDATE] * 4 + [LOOKAHEAD] * 2)
    assert tree.parents[4:].tolist() == [0, 4] and not tree.probs[4:].any()
    session.commit(answer(tree, [1, 2, 0]))
    assert (session.tally.num_verified, session.tally.num_accepted) == (3, 2)
    without = session.tree([chain([1, 2, 3, 4, 0, 1], 0.9)], curve, lambda num_rows, price: LookaheadRows.none())
    assert len(without) > 4 and not without.roles.any(), "without rows there is room for a worker that knows better"


def test_plain_decoding_has_no_lookahead_rows() -> None:
    """With no nodes allowed none are asked for."""
    session = session_of([], max_nodes=0)
    assert len(session.tree([], FREE, lambda num_rows, price: LookaheadRows(np.zeros(1, np.int32), -np.ones(1, np.int32)))) == 1


def test_a_long_answer_outgrows_the_first_buffer() -> None:
    """Growth keeps every token, one at a time or hundreds in a step."""
    session = session_of(["a"], max_nodes=1000)
    said: list[int] = []
    for length in [1, 300, 1, 700]:
        run = [(i * 7 + length) % VOCAB for i in range(length)]
        tree = session.tree([chain(run[:-1], 1.0)], FREE)
        session.commit(answer(tree, run))
        said += run
    assert session.tokens.tolist() == [1, 2, *said]
    assert session.tokens.dtype == np.int32


def test_calibration_is_kept_for_every_source() -> None:
    """`corpus:a` and `corpus:b` are told apart: the one that was right is believed, the other is not."""
    calibration = Calibration()
    session = Session(np.array([1], np.int32), ["corpus:a", "corpus:b", "prompt"], calibration)
    for _ in range(50):
        session.commit(answer(session.tree([chain([1]), chain([2]), None], FREE), [1, 0]))
    right, wrong, unheard = calibration.rows(session.labels)
    drafts = Drafts.of([chain([1]), chain([1]), chain([1])])
    odds, _ = calibration.log_odds(drafts, np.array([right, wrong, unheard]))
    assert odds[1] < odds[2] < odds[0]
    assert odds[2] == pytest.approx(kernels.log_odds(np.float32(0.8)))


def test_proposals_are_scored_whether_verified_or_not() -> None:
    """A source whose nodes were all cut still learns from what was emitted: full information."""
    calibration = Calibration()
    session = Session(np.array([1], np.int32), ["corpus"], calibration, max_nodes=0)
    session.commit(answer(session.tree([chain([3, 4])], FREE), [3]))
    assert session.tally.num_verified == 0
    assert session.reached == (1,)
    assert calibration.trials[0, 0].sum() == pytest.approx(1)
    assert calibration.hits[0, 0].sum() == pytest.approx(1)


def test_a_dropped_source_keeps_its_trust_and_a_silent_one_does_not() -> None:
    """None is asleep: it weighs as much as before. An empty draft is an answer, and it was not right."""
    shares = []
    for absent in (None, Draft.empty()):
        session = session_of(["a", "b"])
        for _ in range(10):
            session.commit(answer(session.tree([chain([1], 0.5), absent], FREE), [1, 2]))
        shares.append(float(session.trust[1]))
    asleep, silent = shares
    assert silent < 0.1 and asleep == pytest.approx(0.5)


def test_masks_name_the_sources_of_accepted_tokens() -> None:
    """Bit s of a token's mask is source s of the session; the bonus token has none."""
    session = session_of(["a", "b", "c"])
    tree = session.tree([chain([1, 2]), chain([1]), Draft.empty()], FREE)
    step = session.commit(answer(tree, [1, 2, 3]))
    assert step.tokens.tolist() == [1, 2, 3]
    assert step.masks == (0b011, 0b001, 0)
    assert session.tally.accepted.tolist() == [2, 1, 0]
    assert session.tally.unique.tolist() == [1, 0, 0]
    assert session.tally.held.tolist() == [2, 1, 0] and session.tally.alone.tolist() == [1, 0, 0]


def test_a_worker_may_verify_fewer_nodes() -> None:
    """Only what the worker says it verified is counted as verified and proposed."""
    session = session_of(["a"])
    tree = session.tree([chain([1, 2, 3], 0.9)], FREE)
    cut = tree.cut(2)
    taken = answer(cut, [1, 4])
    session.commit(taken)
    assert (session.tally.num_verified, session.tally.num_accepted) == (1, 1)
    assert session.tally.proposed.tolist() == [1]
    assert session.tally.expected == pytest.approx(0.9)


def test_cut_takes_back_what_came_after_the_end_of_the_text() -> None:
    """Tokens, and what was accepted after the cut, are as if the sequence had ended there; what was verified stays counted."""
    session = session_of(["a", "b"])
    tree = session.tree([chain([1, 2, 3]), chain([1, 2])], FREE)
    session.commit(answer(tree, [1, 2, 3, 4]))
    step = session.cut(2, "stop")
    assert (step.tokens.tolist(), step.masks, step.finish) == ([1, 2], (0b11, 0b11), "stop")
    assert session.tokens.tolist() == [1, 2, 1, 2] and session.num_emitted == 2
    assert session.finished and session.finish == "stop"
    assert (session.tally.num_accepted, session.tally.num_verified) == (2, 3)
    assert session.tally.accepted.tolist() == [2, 2] and session.tally.unique.tolist() == [0, 0]
    assert session.tally.held.tolist() == [2, 2] and session.tally.alone.tolist() == [0, 0]


def test_what_was_held_counts_whether_it_was_verified_or_not() -> None:
    """A tree of one node: the token behind it stands in the longer draft all the same, and in no other."""
    session = session_of(["a", "b"], max_nodes=1)
    session.commit(answer(session.tree([chain([1, 2]), chain([1])], FREE), [1, 2]))
    assert session.tally.accepted.tolist() == [1, 1] and session.tally.unique.tolist() == [0, 0]
    assert session.tally.held.tolist() == [2, 1] and session.tally.alone.tolist() == [1, 0]


@pytest.mark.parametrize("keep", [0, 3])
def test_a_cut_outside_the_last_step_is_refused(keep: int) -> None:
    """At least one token and at most the step is kept, and there must be a step, once."""
    session = session_of(["a"])
    with pytest.raises(RuntimeError, match="nothing to cut"):
        session.cut(1, "stop")
    session.commit(answer(session.tree([chain([1])], FREE), [1, 2]))
    with pytest.raises(RuntimeError, match="nothing to cut"):
        session.cut(keep, "stop")
    session.cut(2, "stop")
    with pytest.raises(RuntimeError, match="nothing to cut"):
        session.cut(1, "stop")


def test_sources_are_asked_for_some_times_what_the_last_tree_took() -> None:
    """Never for more than twice what a tree may have, and not for so few that a tree could not grow."""
    many = Draft.of(range(40), [-1] * 40, [0.02] * 40)
    session = session_of(["a"], max_nodes=64)
    assert session.num_wanted == 32, "before the first tree"
    tree = session.tree([many], FREE)
    assert session.num_wanted == 128, "all 40 were taken"
    session.commit(answer(tree, [50]))
    session.tree([None], FREE)
    assert session.num_wanted == 32, "the last had none"
    assert session_of(["a"], max_nodes=4).num_wanted == 8
    assert session_of(["a"], max_nodes=0).num_wanted == 0
