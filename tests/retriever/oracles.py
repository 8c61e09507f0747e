"""The obvious twin of every clever function of the retriever: slow, short, and easy to believe."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from retriever.continuations import Continuations

Document = Sequence[int]

LADDER = (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""The lengths a datastore tries below the longest match."""


def suffix_order(tokens: Sequence[int]) -> list[int]:
    """Positions sorted by the text that starts there."""
    return sorted(range(len(tokens)), key=lambda i: list(tokens[i:]))


def common_suffix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens at the end the two have in common."""
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def places(documents: Sequence[Document], key: Sequence[int]) -> list[tuple[int, int]]:
    """(document, position after the occurrence) of every occurrence of `key`."""
    n = len(key)
    return [
        (d, i + n) for d, text in enumerate(documents) for i in range(len(text) - n + 1) if list(text[i : i + n]) == list(key)
    ]


def longest_match(documents: Sequence[Document], context: Sequence[int], max_length: int) -> tuple[int, int]:
    """(length, count) of the longest end of the context that occurs; (0, 0) if none does."""
    for length in range(min(len(context), max_length), 0, -1):
        count = len(places(documents, context[len(context) - length :]))
        if count:
            return length, count
    return 0, 0


@dataclass(frozen=True)
class Row:
    """One occurrence: what followed, how many tokens matched, how many occurrences it stands for."""

    continuation: tuple[int, ...]
    length: int
    weight: float = 1.0


def datastore_rows(
    documents: Sequence[Document], context: Sequence[int], max_length: int, classes: int, depth: int
) -> list[Row]:
    """The occurrences `Datastore.lookup` blends when it samples nothing."""
    longest, _ = longest_match(documents, context, max_length)
    taken: dict[tuple[int, int], Row] = {}
    previous = 0
    for length in [longest, *(rung for rung in LADDER if rung < longest)]:
        found = places(documents, context[len(context) - length :]) if length else []
        if not found or len(found) < 2 * previous or classes == 0:
            continue
        fresh = {
            (d, i): Row(tuple(documents[d][i : i + depth]), length)
            for d, i in found
            if (d, i) not in taken and i < len(documents[d])
        }
        if fresh:
            taken |= fresh
            previous = len(found)
            classes -= 1
    return list(taken.values())


def pool_rows(documents: Sequence[Document], context: Sequence[int], max_length: int, depth: int, recent: int = 0) -> list[Row]:
    """The occurrences `TextPool.lookup` blends when it has probes enough. The last document is the one that grows."""
    rows = []
    for d, text in enumerate(documents):
        for i in range(1, len(text)):
            length = min(common_suffix(text[:i], context), max_length)
            at_end = d == len(documents) - 1 and min(common_suffix(text, context), max_length) >= length
            row = list(text[i : i + depth])
            while at_end and len(row) < depth:
                row.append(row[len(row) - (len(text) - i)])
            if length:
                rows.append(Row(tuple(row), length))
    places = [(d, i) for d, text in enumerate(documents) for i in range(len(text) + 1)][:-1]
    for d, i in places[max(len(places) - recent, 0) :] if context else []:
        text = documents[d]
        if i < len(text) and (i == 0 or text[i - 1] != context[-1]):
            rows.append(Row(tuple(text[i : i + depth]), 0))
    return rows


def child_probs(rows: Sequence[Row], path: tuple[int, ...]) -> dict[int, float]:
    """PPM-C, straight from its definition, rows counted as what was seen: the probability of every token after `path`, given
    that the path was taken."""
    depth = len(path)
    alive = [row for row in rows if row.continuation[:depth] == path and len(row.continuation) > depth]
    probs = {row.continuation[depth]: 0.0 for row in alive}
    for length in sorted({row.length for row in alive}):
        weights: dict[int, float] = {}
        for row in alive:
            if row.length >= length:
                token = row.continuation[depth]
                weights[token] = weights.get(token, 0.0) + row.weight
        escape = len(weights) / (sum(row.length >= length for row in alive) + len(weights))
        total = sum(weights.values())
        probs = {token: (1 - escape) * weights.get(token, 0.0) / total + escape * below for token, below in probs.items()}
    return probs


def evidence(rows: Sequence[Row], path: tuple[int, ...]) -> tuple[int, int]:
    """(match length, count) reported for the children of `path`."""
    alive = [row for row in rows if row.continuation[: len(path)] == path and len(row.continuation) > len(path)]
    longest = max(row.length for row in alive)
    return min(longest + len(path), 64), round(sum(row.weight for row in alive if row.length == longest))


def blend(rows: Sequence[Row], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """(path probability, path) of the `budget` likeliest paths, best first, ties by the smaller last token."""
    open_paths = [(prob, (token,)) for token, prob in child_probs(rows, ()).items()]
    taken = []
    while open_paths and len(taken) < budget:
        best = min(open_paths, key=lambda item: (-item[0], item[1][-1]))
        open_paths.remove(best)
        taken.append(best)
        open_paths += [(best[0] * prob, (*best[1], token)) for token, prob in child_probs(rows, best[1]).items()]
    return taken


def blend_to_the_bit(rows: Sequence[Row], budget: int) -> list[tuple[int, int, float, int, int]]:
    """(token, parent, prob, length, count) of every node: `blend` with sums and products in the kernel's order, so that they
    are rounded alike, and with its ties."""
    nodes: list[tuple[int, int, float, int, int]] = []
    queue: list[tuple[int, int, float, list[int], int, tuple[int, int, float, int, int]]] = []
    num_queued = 0

    def open_node(node: int, depth: int, path: float, alive: list[int]) -> None:
        nonlocal num_queued
        going = sorted((rows[i].continuation[depth], i) for i in alive if len(rows[i].continuation) > depth)
        tokens = sorted({token for token, _ in going})
        lengths = sorted({rows[i].length for _, i in going})
        probs = dict.fromkeys(tokens, 0.5 if len(going) == 1 else 0.0)
        weights = {length: dict.fromkeys(tokens, 0.0) for length in lengths}
        for token, i in going:
            weights[rows[i].length][token] += rows[i].weight
        longest, count = lengths[-1] if lengths else 0, 0.0
        for token in tokens:
            count += weights[longest][token]
        for shorter, longer in reversed(list(pairwise(lengths))):
            for token in tokens:
                weights[shorter][token] += weights[longer][token]
        for length in lengths if len(going) > 1 else ():
            num_rows = sum(rows[i].length >= length for _, i in going)
            distinct = sum(weight > 0 for weight in weights[length].values())
            total = 0.0
            for token in tokens:
                total += weights[length][token]
            escape = distinct / (num_rows + distinct)
            share = (1 - escape) / total
            for token in tokens:
                probs[token] = weights[length][token] * share + escape * probs[token]
        for token in tokens:
            below = path * probs[token]
            (bits,) = struct.unpack("q", struct.pack("d", below))
            rank = bits >> 20 << 20 | 0xFFFFF - (token & 0xFFFFF)
            evidence = min(longest + depth, 64), min(round(count), 2**31 - 1)
            shown = token, node, float(np.float32(probs[token])), *evidence
            queue.append((-rank, num_queued, below, [i for t, i in going if t == token], depth + 1, shown))
            num_queued += 1

    open_node(-1, 0, 1.0, list(range(len(rows))))
    while queue and len(nodes) < budget:
        best = min(queue)
        queue.remove(best)
        _, _, path, alive, depth, shown = best
        nodes.append(shown)
        open_node(len(nodes) - 1, depth, path, alive)
    return nodes


def paths_of(found: Continuations) -> list[tuple[int, ...]]:
    """The token path to every node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens.tolist(), found.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def assert_blended(found: Continuations, rows: Sequence[Row], budget: int) -> None:
    """`found` is the blend of `rows`: valid, every node as defined, and no better choice of nodes.

    Paths whose probabilities differ by rounding only may be taken in either order, so the two are not compared node by node.
    """
    found.validate()
    expected = blend(rows, budget)
    assert len(found) == len(expected)
    for path, node_prob, path_prob, length, count, best in zip(
        paths_of(found),
        found.probs.tolist(),
        found.path_probs().tolist(),
        found.lengths.tolist(),
        found.counts.tolist(),
        expected,
        strict=True,
    ):
        assert abs(node_prob - child_probs(rows, path[:-1])[path[-1]]) < 1e-5
        assert (length, count) == evidence(rows, path[:-1])
        assert abs(path_prob - best[0]) < 1e-5
