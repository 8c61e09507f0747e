"""The walk against its recursive twin, the rules of ending, every parameter out of range once. walk.txt has cases to read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.acceptance import Limits, SamplingParams, walk
from engine.tree import CandidateTree
from tests.oracles import Prefix, descend, shapes, tree_of

UNLIMITED = Limits(max_tokens=10**6)
SEEDS = st.integers(0, 2**32)


def random_tree(rng: np.random.Generator, size: int = 3) -> CandidateTree:
    """A valid tree of up to 9 nodes over `size` tokens, the last few of them lookahead rows (whose tokens may repeat)."""
    parents, tokens, roles = [-1], [0], [0]
    for _ in range(int(rng.integers(0, 9))):
        parent, token = int(rng.integers(len(parents))), int(rng.integers(size))
        role = int(roles[-1] or rng.random() < 0.15)
        if roles[parent] > role or (not role and (parent, token) in zip(parents, tokens, strict=True)):
            continue
        parents.append(parent)
        tokens.append(token)
        roles.append(role)
    return tree_of(parents, tokens, roles)


def random_choices(seed: int, size: int = 3) -> Any:
    """A target of whims: a token for every path."""

    def pick(path: Prefix) -> int:
        return int(np.random.default_rng([seed, *path]).integers(size))

    return pick


@given(SEEDS)
def test_walk_is_its_recursive_twin(seed: int) -> None:
    """Accepted nodes and emitted tokens are those of a recursion over children, whatever the tree and the target's whims."""
    tree, pick = random_tree(np.random.default_rng(seed)), random_choices(seed)
    tree.validate(3)
    taken = walk(tree, lambda node, emitted: pick(tuple(emitted)), UNLIMITED, 0)
    path, emitted = descend(tree, pick)
    assert (taken.path.tolist(), taken.tokens.tolist(), taken.finish) == (path, list(emitted), "")
    assert taken.path.dtype == taken.tokens.dtype == np.int32


@given(SEEDS)
def test_walk_asks_once_for_every_node_on_its_path_in_order(seed: int) -> None:
    """The target is asked at the root, then at each accepted node, with what was emitted so far: nothing rolls back."""
    tree, pick = random_tree(np.random.default_rng(seed)), random_choices(seed)
    asked: list[tuple[int, list[int]]] = []

    def choose(node: int, emitted: list[int]) -> int:
        asked.append((node, list(emitted)))
        return int(pick(tuple(emitted)))

    taken = walk(tree, choose, UNLIMITED, 0)
    assert [node for node, _ in asked] == [0, *taken.path.tolist()]
    assert [emitted for _, emitted in asked] == [taken.tokens[:i].tolist() for i in range(len(taken.tokens))]


@given(SEEDS, st.integers(1, 6), st.integers(0, 6), st.sets(st.integers(0, 2)), st.integers(0, 5))
def test_limits_only_cut_the_walk(seed: int, max_tokens: int, min_tokens: int, stop_ids: set[int], num_emitted: int) -> None:
    """A limited walk is the beginning of the unlimited one, up to the first token that ends it, with that token's reason."""
    num_emitted %= max_tokens
    limits = Limits(max_tokens, min(min_tokens, max_tokens), frozenset(stop_ids))
    tree, pick = random_tree(np.random.default_rng(seed)), random_choices(seed)

    whole = walk(tree, lambda node, emitted: pick(tuple(emitted)), UNLIMITED, num_emitted)
    taken = walk(tree, lambda node, emitted: pick(tuple(emitted)), limits, num_emitted)
    expected, finish = list[int](), ""
    for token in whole.tokens.tolist():
        expected.append(token)
        count = num_emitted + len(expected)
        if token in stop_ids and count > limits.min_tokens:
            finish = "stop"
        elif count == max_tokens:
            finish = "length"
        if finish:
            break
    assert (taken.tokens.tolist(), taken.finish) == (expected, finish)
    assert taken.path.tolist() == whole.path[: len(expected) - 1].tolist()


def test_every_path_of_every_shape_is_found_whatever_the_order_of_siblings() -> None:
    """In all shapes of up to 5 candidates, with siblings numbered from the left or from the right, each node can be reached."""
    for parents in shapes(5, 3, 3):
        from_left = [9] + [parents[:i].count(parents[i]) for i in range(1, len(parents))]
        from_right = [9] + [parents[i + 1 :].count(parents[i]) for i in range(1, len(parents))]
        for goal in range(len(parents)):
            path = list[int]()
            node = goal
            while node > 0:
                path.insert(0, node)
                node = parents[node]
            for tokens in (from_left, from_right):
                said = [tokens[node] for node in path] + [8]
                taken = walk(tree_of(parents, tokens), lambda node, emitted, said=said: said[len(emitted)], UNLIMITED, 0)  # type: ignore[misc]
                assert (taken.path.tolist(), taken.tokens.tolist()) == (path, said)


# ---- parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("logit_bias", ((8, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, float("inf")),)),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, 1e39),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    """The message begins with the field's name and ends with its value."""
    with pytest.raises(ValueError, match=rf"^{name}: ") as caught:
        replace(SamplingParams(), **{name: value}).validate(8)
    assert str(caught.value).endswith(str(value))


def test_sampling_parameters_at_the_ends_of_their_ranges_are_taken() -> None:
    """Every bound that belongs to its range is accepted."""
    SamplingParams().validate(8)
    SamplingParams(5e-324, 10**6, 1.0, 0.0, 1e-3, -2.0, -2.0, ((0, -1e30), (7, 1e30)), 2**64 - 1).validate(8)
    SamplingParams(1e30, 0, 1e-9, 0.999, 1e3, 2.0, 2.0, (), 0).validate(8)


@pytest.mark.parametrize(
    ("limits", "name"), [(Limits(0), "max_tokens"), (Limits(3, -1), "min_tokens"), (Limits(3, 4), "min_tokens")]
)
def test_limits_out_of_range_are_refused_by_name(limits: Limits, name: str) -> None:
    """The message begins with the field's name."""
    Limits(1).validate()
    Limits(3, 3).validate()
    with pytest.raises(ValueError, match=rf"^{name}: "):
        limits.validate()
