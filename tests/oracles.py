"""Judges of losslessness: decoding token by token, exact enumeration of chance, the ratio rule and its six wrong ways.

# Enumeration

A decoding rule takes its chances from `Coins`. `enumerate_runs` runs the rule once for every way the coins may fall, with
the weight of each, so the law of what the rule emits is a sum, not an estimate: `joint_law`. Plain decoding's is the measure.

# The ratio rule

`ratio_step` is the classic sequential residual rule (Leviathan et al., arXiv 2211.17192; for several children SpecInfer,
arXiv 2305.09781; without replacement RSD, arXiv 2402.14160). The engine does not use it: sample and match needs no draft law.
It is here because its well-known wrong ways are what a test of losslessness must be able to see: each is a `fault`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.target import SequenceRequest
from engine.target.fake import FakeTarget
from engine.tree import CandidateTree
from tests.engine import oracles

Prefix = tuple[int, ...]
Law = tuple[float, ...]
"""The probability of every token."""
Model = Callable[[Prefix], Law]
T = TypeVar("T")


# ---- decoding one token at a time


@dataclass(frozen=True)
class Decoded:
    """What a request got: the new tokens, how it finished, and the log-probability of each token (empty if not asked for)."""

    tokens: list[int]
    finish: str
    logprobs: list[float]


def decode(target: FakeTarget, request: SequenceRequest) -> Decoded:
    """Plain decoding by the definition, without any of the engine's code but the model's logits."""
    limits, prompt = request.limits, request.prompt.tolist()
    room = target.info.context_length - len(prompt)
    answer: list[int] = []
    logprobs: list[float] = []
    finish = ""
    while not finish:
        logits = target.logits(np.array(prompt + answer, np.int32))
        masked = sorted(limits.stop_ids) if len(answer) < min(limits.min_tokens, room) else []
        scores = oracles.process(logits, prompt, answer, request.sampling, masked)
        token = oracles.choose(scores, request.sampling, len(prompt) + len(answer))
        answer.append(token)
        if request.num_logprobs >= 0:
            row = logits.astype(np.float64)
            logprobs.append(float(row[token] - row.max() - math.log(np.exp(row - row.max()).sum())))
        if token in limits.stop_ids and len(answer) > limits.min_tokens:
            finish = "stop"
        elif len(answer) >= min(limits.max_tokens, room):
            finish = "length"
    return Decoded(answer, finish, logprobs)


def descend(
    tree: CandidateTree, pick: Callable[[Prefix], int], emitted: Prefix = (), node: int = 0
) -> tuple[list[int], Prefix]:
    """The walk by recursion: (accepted nodes, emitted tokens) from `node` on, without limits."""
    token = pick(emitted)
    for child in range(1, len(tree)):
        if tree.parents[child] == node and tree.tokens[child] == token and tree.roles[child] == 0:
            path, out = descend(tree, pick, (*emitted, token), child)
            return [child, *path], out
    return [], (*emitted, token)


# ---- enumeration


class Coins:
    """A source of chance that follows a script and notes what else could have happened."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self._picked: list[int] = []
        self.weight = 1.0
        self.others: list[list[int]] = []

    def pick(self, law: Sequence[float]) -> int:
        """An index, drawn from `law`."""
        if len(self._picked) < len(self._script):
            index = self._script[len(self._picked)]
        else:
            index, *rest = (i for i, weight in enumerate(law) if weight > 0)
            self.others += [[*self._picked, other] for other in rest]
        self._picked.append(index)
        self.weight *= law[index]
        return index

    def flip(self, chance: float) -> bool:
        """True with this chance."""
        chance = min(max(chance, 0.0), 1.0)
        return self.pick((chance, 1.0 - chance)) == 0


def enumerate_runs(run: Callable[[Coins], T]) -> Iterator[tuple[float, T]]:
    """(weight, outcome) for every way the coins of `run` may fall; the weights sum to 1."""
    pending: list[list[int]] = [[]]
    while pending:
        coins = Coins(pending.pop())
        outcome = run(coins)
        pending += coins.others
        yield coins.weight, outcome


Step = Callable[[Prefix, Coins], Sequence[int]]
"""One step of a decoding rule: the tokens emitted after a prefix."""


def joint_law(step: Step, horizon: int, prefix: Prefix = ()) -> dict[Prefix, float]:
    """The law of the next `horizon` tokens after `prefix`, over as many steps as it takes.

    Steps draw their chances independently, so what follows a prefix does not depend on how it came about.
    """
    one_step: dict[Prefix, float] = {}
    for weight, emitted in enumerate_runs(lambda coins: tuple(step(prefix, coins))[:horizon]):
        one_step[emitted] = one_step.get(emitted, 0.0) + weight
    law: dict[Prefix, float] = {}
    for emitted, weight in one_step.items():
        rest = {(): 1.0} if len(emitted) == horizon else joint_law(step, horizon - len(emitted), prefix + emitted)
        for tail, share in rest.items():
            law[emitted + tail] = law.get(emitted + tail, 0.0) + weight * share
    return law


def plain_law(target: Model, horizon: int) -> dict[Prefix, float]:
    """The law of `horizon` tokens decoded one at a time: a product of conditionals."""
    size = len(target(()))
    return {
        text: math.prod(target(text[:i])[token] for i, token in enumerate(text))
        for text in itertools.product(range(size), repeat=horizon)
    }


def distance(one: dict[Prefix, float], other: dict[Prefix, float]) -> float:
    """Total variation distance of two laws."""
    return 0.5 * math.fsum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys())


def bias(step: Step, target: Model, horizon: int = 3) -> float:
    """How far a rule's law of the next tokens is from plain decoding's, in total variation."""
    return distance(joint_law(step, horizon), plain_law(target, horizon))


def check_lossless(step: Step, target: Model, horizon: int = 3) -> None:
    """Raise AssertionError unless the rule's law is plain decoding's to 1e-12."""
    found = bias(step, target, horizon)
    assert found <= 1e-12, f"the law of the next {horizon} tokens is off by {found}"


def random_model(seed: int, size: int, concentration: float = 0.5, zeros: int = 0) -> Model:
    """A model over `size` tokens with a Dirichlet law of its own after every prefix, `zeros` of its entries ruled out."""
    cache: dict[Prefix, Law] = {}

    def law(prefix: Prefix) -> Law:
        if prefix not in cache:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            weights = rng.dirichlet(np.full(size, concentration)) + 1e-3
            weights[rng.permutation(size)[:zeros]] = 0.0
            cache[prefix] = tuple((weights / weights.sum()).tolist())
        return cache[prefix]

    return law


def normalized(weights: Sequence[float]) -> Law:
    """Weights as a law; all zero gives all zero."""
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights) if total > 0 else tuple(weights)


DRAFT_LAWS: dict[str, Callable[[Law], Law]] = {
    "exact": lambda law: law,
    "opposite": lambda law: normalized([max(law) - weight + 1e-3 for weight in law]),
    "zeros": lambda law: normalized([0.0 if weight == max(law) else 1.0 for weight in law]),
    "one-hot": lambda law: tuple(float(i == law.index(min(law))) for i in range(len(law))),
    "uniform": lambda law: tuple(1.0 / len(law) for _ in law),
}
"""What an adversary might make of the target's law."""


# ---- the ratio rule


@dataclass(frozen=True)
class Plan:
    """What a drafter proposes below every node, decided before any value is drawn.

    1. `num_sampled` children are drawn from the draft law, with or without `replacement`.
    2. `num_fixed` children are its likeliest tokens.
    3. `sampled_first` says which are tested first; `depth` is how deep the tree goes.
    4. `renormalize`: a sampled child tried before is passed over, and the draft law is taken on the tokens not yet tried;
       otherwise it is tested like any other.
    """

    num_sampled: int = 0
    num_fixed: int = 0
    replacement: bool = True
    sampled_first: bool = True
    renormalize: bool = False
    depth: int = 2


FAULTS = {
    "argmax tested with the soft draft law": Plan(num_fixed=1),
    "sampled children pruned by score": Plan(num_sampled=2),
    "children without replacement, draft law not updated": Plan(num_sampled=2, replacement=False),
    "duplicates of fixed children dropped, draft law not renormalized": Plan(num_sampled=1, num_fixed=1, sampled_first=False),
    "duplicate samples dropped": Plan(num_sampled=2),
}
"""Five wrong ways to write the ratio rule, with a plan that brings each out. The sixth is `rows_step`."""


def ratio_node(coins: Coins, target_law: Law, draft_law: Law, plan: Plan, fault: str = "") -> tuple[int, bool]:
    """(the token emitted at one node, whether it is one of the children).

    A child of law q is accepted with chance min(1, g/q), g being what is left of the target's law; a rejection leaves (g - q)+.
    """
    size = len(target_law)
    likeliest = sorted(range(size), key=lambda v: (-draft_law[v], v))
    sampled: list[tuple[int, Law]] = []
    law = draft_law
    for _ in range(plan.num_sampled):
        if not any(law):
            break
        token = coins.pick(law)
        sampled.append((token, draft_law if fault == "children without replacement, draft law not updated" else law))
        if not plan.replacement:
            law = normalized([0.0 if v == token else weight for v, weight in enumerate(law)])
    if fault == "sampled children pruned by score":
        sampled = [max(sampled, key=lambda child: draft_law[child[0]])]
    fixed = [(token, tuple(float(v == token) for v in range(size))) for token in likeliest[: plan.num_fixed]]
    if fault == "argmax tested with the soft draft law":
        fixed = [(token, draft_law) for token, _ in fixed]

    left = target_law
    tried: list[int] = []
    for token, law in sampled + fixed if plan.sampled_first else fixed + sampled:
        if token in tried and fault in (
            "duplicates of fixed children dropped, draft law not renormalized",
            "duplicate samples dropped",
        ):
            continue
        if plan.renormalize:
            if token in tried:
                continue
            law = normalized([0.0 if v in tried else weight for v, weight in enumerate(law)])
        tried.append(token)
        if coins.flip(left[token] / law[token]):
            return token, True
        left = normalized([max(have - gone, 0.0) for have, gone in zip(left, law, strict=True)])
        if not any(left):  # a rejection whose chance is 0 but for rounding
            return token, True
    return coins.pick(left), False


def ratio_step(target: Model, draft: Callable[[Law], Law], plan: Plan, fault: str = "") -> Step:
    """A step of the ratio rule; children are drawn where the walk arrives, which is the same as having drawn the whole tree."""

    def step(prefix: Prefix, coins: Coins) -> list[int]:
        emitted: list[int] = []
        accepted = True
        while accepted and len(emitted) < plan.depth:
            law = target((*prefix, *emitted))
            token, accepted = ratio_node(coins, law, draft(law), plan, fault)
            emitted.append(token)
        if accepted:
            emitted.append(coins.pick(target((*prefix, *emitted))))
        return emitted

    return step


def rows_step(target: Model, rows: Callable[[Prefix], Sequence[Prefix]]) -> Step:
    """The sixth wrong way: every row of the tree draws the target's tokens for itself, and the row that agrees longest wins."""

    def step(prefix: Prefix, coins: Coins) -> Prefix:
        best: Prefix = ()
        for row in rows(prefix):
            said: Prefix = ()
            while said == row[: len(said)] and len(said) <= len(row):
                said = (*said, coins.pick(target(prefix + said)))
            if len(said) > len(best):
                best = said
        return best

    return step


# ---- random data


def shapes(max_nodes: int, max_depth: int, max_children: int, parents: tuple[int, ...] = (-1,)) -> Iterator[tuple[int, ...]]:
    """Every ordered tree of up to `max_nodes` candidates, as its parents in breadth-first order: node 0 is the root."""
    yield parents
    if len(parents) > max_nodes:
        return
    for parent in range(max(parents[-1], 0), len(parents)):
        depth, node = 1, parent
        while node > 0:
            depth, node = depth + 1, parents[node]
        if depth <= max_depth and parents.count(parent) < max_children:
            yield from shapes(max_nodes, max_depth, max_children, (*parents, parent))


def tree_of(parents: Sequence[int], tokens: Sequence[int], roles: Sequence[int] = (), position: int = 0) -> CandidateTree:
    """A tree by hand, every path with probability 1."""
    n = len(parents)
    return CandidateTree(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.ones(n, np.float32),
        np.zeros(n, np.int64),
        np.asarray(roles or [0] * n, np.uint8),
        position,
    )


def array(values: Sequence[int]) -> NDArray[np.int32]:
    """int32 [n]."""
    return np.asarray(values, np.int32)
