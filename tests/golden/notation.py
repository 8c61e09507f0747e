"""Drafts and trees as one line of text.

1/.8 2/.5 | 4/.1            a chain 1, 2 and beside it 4; `/` gives the probability given the parent, 1 if left out
1 (2 | 3 5)                 below 1: 2, and beside it 3 with 5 below
1 ~4                        4 is a lookahead row
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.tree import CandidateTree, Draft


def parse_draft(text: str) -> Draft:
    """The draft a line describes, nodes in the order written."""
    tokens, parents, probs, _ = _parse(text)
    return Draft.of(tokens, parents, probs)


def parse_tree(text: str, root: int, position: int) -> CandidateTree:
    """The tree a line describes, below `root`, candidates before lookahead rows; every path probability is 1."""
    tokens, parents, _, roles = _parse(text)
    order = sorted(range(len(tokens)), key=lambda i: roles[i])
    place = {-1: 0} | {old: new + 1 for new, old in enumerate(order)}
    n = len(tokens) + 1
    return CandidateTree(
        np.array([root, *(tokens[i] for i in order)], np.int32),
        np.array([-1, *(place[parents[i]] for i in order)], np.int32),
        np.ones(n, np.float32),
        np.zeros(n, np.int64),
        np.array([0, *(roles[i] for i in order)], np.uint8),
        position,
    )


def draw(tree: CandidateTree, labels: Sequence[str]) -> str:
    """A tree as a picture: token, path probability, the labels of its sources; children in the order they were taken."""
    lines = [str(tree.tokens[0])]

    def below(node: int, margin: str) -> None:
        children = np.flatnonzero(tree.parents == node).tolist()
        for child in children:
            last = child == children[-1]
            names = " ".join(label for s, label in enumerate(labels) if int(tree.sources[child]) >> s & 1)
            prob = f"{tree.probs[child]:.3g}".removeprefix("0") or "0"
            lines.append(f"{margin}{'└─' if last else '├─'} {tree.tokens[child]}  {prob}  {names}")
            below(child, margin + ("   " if last else "│  "))

    below(0, "")
    return "\n".join(lines)


def _parse(text: str) -> tuple[list[int], list[int], list[float], list[int]]:
    tokens, parents, probs, roles = list[int](), list[int](), list[float](), list[int]()
    words = text.replace("(", " ( ").replace(")", " ) ").replace("|", " | ").split()
    opened = [-1]
    at = -1
    for word in words:
        if word == "(":
            opened.append(at)
        elif word == "|":
            at = opened[-1]
        elif word == ")":
            at = opened.pop()
        else:
            token, _, prob = word.removeprefix("~").partition("/")
            tokens.append(int(token))
            parents.append(at)
            probs.append(float(prob or 1))
            roles.append(int(word.startswith("~")))
            at = len(tokens) - 1
    return tokens, parents, probs, roles
