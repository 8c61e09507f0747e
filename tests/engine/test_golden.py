"""The golden scenarios of the pure core: tests/golden/{merge,walk,session}.txt."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from engine.acceptance import Limits, walk
from engine.calibration import Calibration
from engine.session import Session
from engine.target import StepResult
from engine.target.batching import cut_together
from engine.tree import CandidateTree, CostCurve, best_size
from tests.golden import check
from tests.golden.notation import draw, parse_draft, parse_tree
from tests.speculation import merged

Pairs = Mapping[str, str]


def ints(text: str) -> list[int]:
    """Numbers apart by commas or blanks."""
    return [int(word) for word in text.replace(",", " ").split()]


def floats(text: str) -> list[float]:
    """Numbers apart by commas or blanks."""
    return [float(word) for word in text.replace(",", " ").split()]


def curve_of(arguments: Pairs) -> CostCurve:
    """`rows=1,2 seconds=1,2`; rows are free if left out."""
    if "rows" not in arguments:
        return CostCurve.flat()
    return CostCurve(np.array(ints(arguments["rows"]), np.int32), np.array(floats(arguments["seconds"])))


def limits_of(arguments: Pairs) -> Limits:
    """`max=`, `min=` and `stop=`."""
    stops = frozenset(ints(arguments.get("stop", "")))
    return Limits(int(arguments.get("max", 1000)), int(arguments.get("min", 0)), stops)


def merge_command(arguments: Pairs, inputs: Pairs) -> str:
    """Merge the drafts, and cut at the price if there is one."""
    drafts = [parse_draft(text) for text in inputs.values()]
    tree = merged(drafts, int(arguments["budget"]), root=int(arguments["root"]))
    if "rows" in arguments:
        tree = tree.cut(1 + best_size(tree.probs[1:], curve_of(arguments)))
    tree.validate(100)
    return draw(tree, list(inputs))


def say(tree: CandidateTree, said: list[int], limits: Limits, num_emitted: int) -> StepResult:
    """What a worker answers whose target says `said`, all of which must be asked for."""
    taken = walk(tree, lambda node, emitted: said[len(emitted)], limits, num_emitted)
    assert len(taken.tokens) == len(said), f"the target was asked for {len(taken.tokens)} tokens: {taken.tokens}"
    return StepResult(taken.path, taken.tokens, taken.finish, np.arange(len(tree), dtype=np.int32))


def walk_command(arguments: Pairs, inputs: Pairs) -> str:
    """Walk the tree."""
    tree = parse_tree(inputs["tree"], 7, 0)
    tree.validate(100)
    result = say(tree, ints(inputs["says"]), limits_of(arguments), int(arguments.get("emitted", 0)))
    accepted = " ".join(str(tree.tokens[node]) for node in result.path) or "nothing"
    emitted = " ".join(map(str, result.tokens))
    return f"accepts {accepted}, emits {emitted}" + (f", finish {result.finish}" if result.finish else "")


class SessionCommands:
    """The commands of session.txt, which share the session."""

    def __init__(self) -> None:
        self.session = Session(np.ones(1, np.int32), [], Calibration())
        self.arguments: Pairs = {}

    def start(self, arguments: Pairs, inputs: Pairs) -> str:
        """A session from scratch."""
        self.arguments = arguments
        prompt = np.array(ints(arguments["prompt"]), np.int32)
        labels = arguments["sources"].split(",")
        self.session = Session(prompt, labels, Calibration(), int(arguments.get("max_nodes", 64)))
        return f"position {len(prompt) - 1}, {len(labels)} sources"

    def step(self, arguments: Pairs, inputs: Pairs) -> str:
        """One step."""
        session, labels = self.session, self.session.labels
        drafts = [None if inputs[label] == "-" else parse_draft(inputs[label]) for label in labels]
        try:
            curve = curve_of(self.arguments)
            (tree,) = cut_together([session.tree(drafts, curve)], curve, 64)
        except RuntimeError as error:
            return f"refused: {error}"
        step = session.commit(say(tree, ints(inputs["says"]), limits_of(self.arguments), session.num_emitted))
        tokens = [
            f"{token} ({', '.join(label for s, label in enumerate(labels) if mask >> s & 1) or 'bonus'})"
            for token, mask in zip(step.tokens.tolist(), step.masks, strict=True)
        ]
        tally = session.tally
        lines = [
            draw(tree, labels),
            f"at {tree.position}: {', '.join(tokens)}" + (f"; finish {step.finish}" if step.finish else ""),
            f"steps {tally.num_steps}, verified {tally.num_verified}, "
            f"accepted {tally.num_accepted}, expected {tally.expected:.2f}",
        ]
        lines += [
            f"{label}: proposed {tally.proposed[s]}, accepted {tally.accepted[s]}, alone {tally.unique[s]}"
            for s, label in enumerate(labels)
        ]
        return "\n".join(lines)


@pytest.mark.parametrize("name", ["merge", "walk", "session"])
def test_scenarios_print_what_their_file_says(name: str, request: pytest.FixtureRequest) -> None:
    """Every scenario prints exactly what stands below its `----`."""
    commands = SessionCommands()
    check(
        name,
        {"merge": merge_command, "walk": walk_command, "session": commands.start, "step": commands.step},
        request.config.getoption("--rewrite"),
    )
