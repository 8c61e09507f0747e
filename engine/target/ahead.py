"""Steps that nobody had asked for, kept until somebody does.

A sequence whose tree is late goes on by its root in the passes that run for others. What the target chooses depends on the
tokens before alone; so the tree is answered as if it had come in time: it is followed along the tokens that are there, and only
what lies below them, if it gets so far, needs a pass.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.acceptance import child_of
from engine.drafters import Feedback
from engine.target import Logprobs, StepResult
from engine.tree import CandidateTree


class Ahead:
    """A sequence's steps over its root alone that are not delivered, one token each, in order."""

    def __init__(self) -> None:
        self._steps = deque[StepResult]()

    def __len__(self) -> int:
        return len(self._steps)

    def put(self, step: StepResult) -> None:
        """One more step; it follows those that are there."""
        self._steps.append(step)

    def follow(self, tree: CandidateTree) -> Followed:
        """Deliver to `tree`, whose root precedes the first token here: steps as long as it has their tokens, and one more."""
        steps, path = list[StepResult](), [0]
        while self._steps:
            steps.append(self._steps.popleft())
            child = -1 if steps[-1].finish else child_of(tree, path[-1], int(steps[-1].tokens[0]))
            if child < 0:
                return Followed(tuple(steps), np.array(path, np.int32), None, np.zeros(0, np.int32))
            path.append(child)
        rest, nodes = below(tree, path[-1]) if steps else (tree, np.arange(len(tree), dtype=np.int32))
        return Followed(tuple(steps), np.array(path, np.int32), rest, nodes)


@dataclass(frozen=True)
class Followed:
    """How far a tree was answered by `steps` that were there.

    1. `path` int32 [m] are the nodes passed, the root first. Node path[i + 1] has the token of steps[i].
    2. `rest` is what is left to verify, node path[-1] its root, `nodes` its nodes in the tree; None where the last step left
       the tree or ended the sequence: all is known.
    """

    steps: tuple[StepResult, ...]
    path: NDArray[np.int32]
    rest: CandidateTree | None
    nodes: NDArray[np.int32]

    def answer(self, last: StepResult | None) -> StepResult:
        """The answer to the whole tree: `last` is that to `rest`, None where there is none.

        Its `seconds` are those of the last step alone: for the others nobody waited.
        """
        if not self.steps:
            assert last is not None, "a tree that was not followed is left whole"
            return last
        passed = self.path[: len(self.steps)]
        if last is None:
            return _joined(self.steps, passed, self.path[1:], replace(self.steps[-1], seconds=0.0))
        verified = np.concatenate([passed, self.nodes[last.verified]])
        path = np.concatenate([self.path[1:], self.nodes[last.path]])
        return _joined((*self.steps, last), verified, path, last)


def below(tree: CandidateTree, node: int) -> tuple[CandidateTree, NDArray[np.int32]]:
    """The tree with `node`, a candidate, as its root, taken as certain; and which nodes those are, int32, rising. O(nodes)."""
    inside = np.zeros(len(tree), np.bool_)
    inside[node] = True
    for i in range(node + 1, len(tree)):
        inside[i] = inside[tree.parents[i]]
    nodes = np.flatnonzero(inside).astype(np.int32)
    places = np.cumsum(inside, dtype=np.int32) - 1
    parents = places[tree.parents[nodes]]
    probs = np.minimum(tree.probs[nodes] / np.maximum(tree.probs[node], _LEAST), np.float32(1))
    sources = tree.sources[nodes]
    parents[0], probs[0], sources[0] = -1, 1, 0
    position = tree.position + int(tree.depths()[node])
    return CandidateTree(tree.tokens[nodes], parents, probs, sources, tree.roles[nodes], position), nodes


_LEAST = np.float32(1e-30)


def _joined(
    steps: tuple[StepResult, ...], verified: NDArray[np.int32], path: NDArray[np.int32], last: StepResult
) -> StepResult:
    """One result of several steps, each of which begins where the one before ended; the rest is the last one's."""
    return replace(
        last,
        path=path,
        tokens=np.concatenate([step.tokens for step in steps]),
        verified=verified,
        feedback=_joined_feedback([step.feedback for step in steps]),
        logprobs=_joined_logprobs([step.logprobs for step in steps if step.logprobs is not None]),
    )


def _joined_feedback(heard: list[Feedback]) -> Feedback:
    """The first row of each follows the row before it: all but the last are single rows."""
    if not len(heard[0].nodes):
        return Feedback()
    return Feedback(
        top_ids=np.concatenate([each.top_ids for each in heard]),
        nodes=np.concatenate([each.nodes for each in heard]),
        parents=np.concatenate([each.parents + np.int32(first) for first, each in enumerate(heard)]),
        num_lookahead=heard[-1].num_lookahead,
    )


def _joined_logprobs(told: list[Logprobs]) -> Logprobs | None:
    if not told:
        return None
    return Logprobs(
        chosen=np.concatenate([each.chosen for each in told]),
        top_ids=np.concatenate([each.top_ids for each in told]),
        top=np.concatenate([each.top for each in told]),
    )
