"""One request's decoding as a pure state machine: drafts in, a tree out; the worker's answer in, committed tokens out.

    session = Session(prompt, labels, calibration)
    while not session.finished:
        tree = session.tree(drafts, curve)          drafts: one a source, in the order of `labels`; None where it was dropped
        step = session.commit(result)               result: what the worker said about `tree`

No I/O, no clock, no text: drive it by hand in a test or a REPL.

# Rules

    1  tree() proposes below the last committed token and changes nothing but what commit() needs to score the drafts
    2  commit() follows tree(); it appends exactly the emitted tokens and scores every source's own proposal
    3  emitted tokens = accepted nodes + one bonus token a step
    4  cut() may follow commit(): the caller found the end of the text inside the step, and what came after it never was
    5  once `finish` is set nothing more is proposed or committed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.calibration import Calibration, Credit, alone
from engine.tree import CandidateTree, CostCurve, Draft, Drafts, LookaheadRows, best_size, merge, with_room

if TYPE_CHECKING:
    from engine.target import StepResult


_SURPLUS, _FEWEST_WANTED = 4, 32
"""A source is asked for four times the nodes of the last tree, at least for 32, at most for twice what a tree may have.

Twice as many as a tree takes bring 0.5 to 2 % more tokens a step than as many; for many more there is only more work.
"""


@dataclass(frozen=True)
class Step:
    """What one step committed: `tokens` int32 [n] and for each the bits of the sources that drafted it (0: the bonus token)."""

    tokens: NDArray[np.int32]
    masks: tuple[int, ...]
    finish: str


@dataclass
class Tally:
    """Counts of one session. `proposed` and `accepted` are per source; `unique` counts accepted nodes that only one source had.

    `held` counts the emitted tokens that each source's own draft held in a row from the root, verified or not, and `alone`
    those of them that no other source's did: what a step would have lost without it.

    `expected` is the sum of the path probabilities of the verified candidates: what the estimates promised would be accepted.
    `judged`, float64 [3, kernels.NUM_KNOTS], sums what was promised for candidates whose parent was emitted, what came true,
    and their number, by probability; `log_loss` is their sum of negative log-likelihoods, in nats.
    """

    num_steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    expected: float = 0.0
    proposed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    unique: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    held: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    alone: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    judged: NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, kernels.NUM_KNOTS)))
    log_loss: float = 0.0

    @property
    def num_judged(self) -> int:
        """Candidates whose parent was emitted."""
        return int(self.judged[2].sum())

    @property
    def calibration_error(self) -> float:
        """How far, on average over the judged candidates, promised and observed rate of their class lie apart; 0: none."""
        return float(np.abs(self.judged[0] - self.judged[1]).sum() / max(self.judged[2].sum(), 1.0))


class Session:
    """The state of one request.

    `prompt` int32 [n], n >= 1. `labels` name the sources, each calibrated by itself; the part before a colon is its kind.
    `max_nodes` is the most candidates a tree may have; 0 is plain decoding.
    """

    def __init__(self, prompt: NDArray[np.int32], labels: Sequence[str], calibration: Calibration, max_nodes: int = 64) -> None:
        if not len(prompt):
            raise ValueError("a session needs at least one prompt token")
        self.labels = tuple(labels)
        self.finish = ""
        self.tally = Tally(
            proposed=np.zeros(len(labels), np.int64),
            accepted=np.zeros(len(labels), np.int64),
            unique=np.zeros(len(labels), np.int64),
            held=np.zeros(len(labels), np.int64),
            alone=np.zeros(len(labels), np.int64),
        )
        self.reached: tuple[int | None, ...] = (None,) * len(labels)
        """How many of the tokens emitted last each source's own draft held in a row; None for one that was not heard."""
        self._calibration = calibration
        self._rows = calibration.rows(self.labels)
        self._credit = Credit(len(labels))
        self._max_nodes = max_nodes
        self._num_sent = 0
        self._buffer = np.empty(max(2 * len(prompt), 256), np.int32)
        self._buffer[: len(prompt)] = prompt
        self._length = self._num_prompt = len(prompt)
        self._drafts = Drafts.of([])
        self._heard = np.zeros(len(labels), np.bool_)
        self._odds, self._depths = np.zeros(0), np.zeros(0, np.int32)
        self._step: Step | None = None
        self._tree: CandidateTree | None = None

    @property
    def finished(self) -> bool:
        """True once the sequence has ended."""
        return bool(self.finish)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n], prompt and answer so far: a view, not to be written to."""
        return self._buffer[: self._length]

    @property
    def trust(self) -> NDArray[np.float64]:
        """float64 [sources], positive, sum 1: what each has earned by its own drafts, see `Credit`."""
        return self._credit.weights

    @property
    def num_wanted(self) -> int:
        """How many nodes to ask a source for: more than the last tree took, so that the merge has something to choose from."""
        return min(max(_FEWEST_WANTED, _SURPLUS * self._num_sent), 2 * self._max_nodes)

    @property
    def num_emitted(self) -> int:
        """New tokens so far."""
        return self._length - self._num_prompt

    def tree(
        self,
        drafts: Sequence[Draft | None],
        curve: CostCurve,
        lookahead: Callable[[int, CostCurve], LookaheadRows] | None = None,
    ) -> CandidateTree:
        """Weave one valid draft per source (None: dropped for this step) into the tree that is worth its rows under `curve`.

        `lookahead(num_rows, curve)` says which rows to add to a tree of `num_rows`; a tree that has some is sent without room,
        since the worker leaves it whole.

        Raises RuntimeError when the session has finished or the last tree was not committed.
        """
        if self.finish or self._tree is not None:
            raise RuntimeError("the session has finished" if self.finish else "the last tree was not committed")
        if len(drafts) != len(self.labels):
            raise ValueError(f"a draft (or None) is needed for each of {len(self.labels)} sources: got {len(drafts)}")
        self._drafts = Drafts.of(drafts)
        self._heard = np.array([draft is not None for draft in drafts], np.bool_)
        self._odds, self._depths = self._calibration.log_odds(self._drafts, self._rows)
        root, position = int(self._buffer[self._length - 1]), self._length - 1
        tree = merge(self._drafts, self._odds, self._rows, self._calibration.mixture, root, position, self._max_nodes)
        size = best_size(tree.probs[1:], curve)
        extra = LookaheadRows.none() if lookahead is None or not self._max_nodes else lookahead(1 + size, curve)
        taken = tree.cut(1 + (size if len(extra) else with_room(size)))
        self._num_sent = len(taken) - 1
        self._tree = taken.with_lookahead(extra)
        return self._tree

    def commit(self, result: StepResult) -> Step:
        """Take in the worker's answer to the last tree."""
        tree = self._tree
        if tree is None:
            raise RuntimeError("commit without a tree")
        self._tree = None
        emitted = result.tokens
        self._append(emitted)
        masks = (*(int(tree.sources[node]) for node in result.path), 0)
        self._count(tree, result)
        reached = self._calibration.learn(self._drafts, self._rows, self._odds, self._depths, emitted)
        self._credit.reward(reached, self._heard)
        heard = self._heard.tolist()
        self.reached = tuple(count if awake else None for count, awake in zip(reached.tolist(), heard, strict=True))
        self._claim(1)
        self.finish = result.finish
        self._step = Step(emitted, masks, result.finish)
        return self._step

    def cut(self, keep: int, finish: str) -> Step:
        """The sequence ends inside the last step, after its first `keep` >= 1 tokens: take back the others and their counts."""
        step = self._step
        if step is None or not 1 <= keep <= len(step.tokens):
            raise RuntimeError("nothing to cut: keep at least one token of the step just committed")
        lost = step.masks[keep:]
        self._length -= len(lost)
        self._claim(-1)
        self.reached = tuple(None if count is None else min(count, keep) for count in self.reached)
        self._claim(1)
        accepted = [mask for mask in lost if mask]
        self.tally.num_accepted -= len(accepted)
        for s in range(len(self.labels)):
            self.tally.accepted[s] -= sum(mask >> s & 1 for mask in accepted)
            self.tally.unique[s] -= sum(mask == 1 << s for mask in accepted)
        self.finish, self._step = finish, None
        return Step(step.tokens[:keep], step.masks[:keep], finish)

    def _claim(self, sign: int) -> None:
        """Count what the sources held of the last step, or take it back."""
        for s, (count, own) in enumerate(zip(self.reached, alone(self.reached), strict=True)):
            if count:
                self.tally.held[s] += sign * count
                self.tally.alone[s] += sign * own

    def _append(self, emitted: NDArray[np.int32]) -> None:
        end = self._length + len(emitted)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(max(len(self._buffer), len(emitted)), np.int32)])
        self._buffer[self._length : end] = emitted
        self._length = end

    def _count(self, tree: CandidateTree, result: StepResult) -> None:
        tally = self.tally
        num_verified, expected = kernels.tally(
            tree.sources, tree.roles, tree.probs, result.verified, result.path, tally.proposed, tally.accepted, tally.unique
        )
        tally.num_steps += 1
        tally.num_verified += num_verified
        tally.num_accepted += len(result.path)
        tally.expected += expected
        tally.log_loss += kernels.judge(tree.tokens, tree.parents, tree.probs, result.tokens, tally.judged)
