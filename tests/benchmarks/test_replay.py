"""The replay bench on streams of a few tokens: peers' rules, the oracle, what is judged, and that two runs say the same."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.tree import LOOKAHEAD, CandidateTree, Draft, LookaheadRows

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 1000


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("replay")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("replay_peers")


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def turns_of(replay: ModuleType) -> list[Any]:
    """Three requests of made-up words: the second says again what the first said, the third quotes its own prompt."""
    rng = np.random.default_rng(5)
    first, second, third = (rng.integers(0, VOCAB, 40).astype(np.int32) for _ in range(3))
    return [
        replay.Turn(first, second),
        replay.Turn(third, np.concatenate([second, ids(7)])),
        replay.Turn(third, np.concatenate([third[:30], ids(7)])),
    ]


def test_reach_counts_what_agrees_from_the_root_on(peers: ModuleType, replay: ModuleType) -> None:
    """Chains and trees, by the peers' rule and by ours; a node below a wrong one does not count, nor one over the budget."""
    assert peers.chain_reach([1, 2, 9], [1, 2, 3]) == 2
    assert peers.chain_reach([], [1]) == peers.chain_reach([1], []) == 0
    tokens, parents = [1, 4, 2, 3, 2], [-1, -1, 1, 2, 0]
    assert peers.tree_reach(tokens, parents, [1, 2, 3]) == 2
    assert peers.tree_reach(tokens, parents, [4, 2, 3]) == 3
    assert peers.tree_reach(tokens, parents, [2]) == 0
    draft = Draft.of(tokens, parents, [0.4] * 5)
    assert replay.reach(draft, ids(1, 2, 3), 5) == 2
    assert replay.reach(draft, ids(1, 2, 3), 4) == 1
    assert replay.reach(Draft.empty(), ids(1), 4) == 0


def test_a_peer_is_asked_below_the_last_token_and_told_what_was_said(peers: ModuleType) -> None:
    """A drafter that knows one token ahead: two tokens a step, the last step one; every token is told once, in order."""
    told: list[int] = []
    ends: list[int] = []

    def begin(number: int, prompt: Any) -> Any:
        def reach(text: Any, ahead: Any) -> int:
            assert text.tolist() == [*prompt.tolist(), *told[-(len(text) - len(prompt)) :]][: len(text)]
            return min(1, len(ahead))

        return reach, lambda tokens: told.extend(tokens.tolist()), lambda: ends.append(number)

    assert peers.tokens_per_step([(ids(1, 2), ids(3, 4, 5, 6, 7))], begin) == round(5 / 3, 4)
    assert told == [3, 4, 5, 6, 7] and ends == [0]


def test_ids_are_renumbered_in_the_order_they_come_up(peers: ModuleType) -> None:
    """REST and ADED drop ids above 65,535; a document's end gets an id of its own."""
    corpus, prompt = peers.renumbered(ids(70_000, 5, -1, 5), ids(5, 70_000, 9))
    assert corpus.tolist() == [0, 1, 2, 1] and prompt.tolist() == [1, 0, 3]


def streams_of(replay: ModuleType, folder: Path, name: str = "some", num: int = 3) -> Any:
    tokenizer = SimpleNamespace(fingerprint="f", vocab_size=VOCAB)
    return replay.Streams.write(name, turns_of(replay)[:num], tokenizer, None, folder)


def test_streams_come_back_as_they_were_written(replay: ModuleType, tmp_path: Path) -> None:
    """Every turn with its prompt and answer; the hash tells one set from another."""
    streams = streams_of(replay, tmp_path)
    for turn, before in zip(streams.turns(), turns_of(replay), strict=True):
        assert np.array_equal(turn.prompt, before.prompt) and np.array_equal(turn.answer, before.answer)
    assert streams.stores() == {}
    assert streams.digest() == streams_of(replay, tmp_path, "same").digest() != streams_of(replay, tmp_path, "less", 2).digest()


def test_what_was_asked_before_is_read_and_only_what_is_missing_asked(
    replay: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers' answers are kept by streams, budget and versions; others are asked anew."""
    asked: list[str] = []

    def ask(command: list[str]) -> str:
        if command[-1] == "versions":
            return command[0]
        asked.append(command[-1])
        return json.dumps({"some": float(command[-1])})

    monkeypatch.setattr(replay, "_ask", ask)
    streams, fewer = streams_of(replay, tmp_path), streams_of(replay, tmp_path, "fewer", 2)
    assert replay.ask_peers("python", streams, 4, tmp_path) == {"some": 4.0}
    assert replay.ask_peers("python", streams, 4, tmp_path) == {"some": 4.0}
    assert replay.ask_peers("python", streams, 8, tmp_path) == {"some": 8.0}
    assert replay.ask_peers("python", fewer, 4, tmp_path) == {"some": 4.0}
    assert replay.ask_peers("another", fewer, 4, tmp_path) == {"some": 4.0}
    assert asked == ["4", "8", "4", "4"]


def test_processes_work_out_what_one_does(replay: ModuleType, tmp_path: Path) -> None:
    """Two sets at two budgets in processes of their own: the rows of `figures`, in the order asked for, with the leads."""
    sets = [streams_of(replay, tmp_path, "less", 1), streams_of(replay, tmp_path)]
    found = replay.every(sets, [4, 8], [], tmp_path, 2)
    assert list(found) == ["less", "some"] and list(found["some"]) == [4, 8]
    row = replay.figures(turns_of(replay), {}, 8, VOCAB)
    assert found["some"][8] == row | {"leads": {"sources": round(row["all"] / max(row["sources"].values()), 4)}}


def test_leads_are_over_the_best_of_each_kind(replay: ModuleType) -> None:
    """Tuned rows count among all peers only; where there is no peer, nothing is said of one."""
    row = {"all": 3.0, "sources": {"a": 1.0, "b": 2.0}, "peers": {"suffix": 1.5, "suffix_best": 2.5}}
    assert replay.leads(row) == {"sources": 1.5, "peers": 2.0, "tuned": 1.2}
    assert replay.leads(row | {"peers": {}}) == {"sources": 1.5}


def test_the_peers_script_names_its_versions(replay: ModuleType) -> None:
    """One line a peer, of those not installed as well."""
    lines = replay._ask([sys.executable, str(ROOT / "benchmarks" / "replay_peers.py"), "versions"]).splitlines()
    assert [line.split()[0] for line in lines] == ["transformers", "arctic-inference", "draftretriever"]


@pytest.mark.parametrize("budget", [4, 16])
def test_replays_agree_with_one_another_and_sources_earn_where_they_must(replay: ModuleType, budget: int) -> None:
    """Two runs give the same figures; what was said before is history's, what was quoted the prompt's.

    The oracle, which takes one source's draft a step, is ahead of each alone, but not always of a tree that holds several.
    """
    turns = turns_of(replay)
    row = replay.figures(turns, {}, budget, VOCAB)
    assert row == replay.figures(turns, {}, budget, VOCAB)
    assert row["num_tokens"] == 40 + 41 + 31
    assert row["sources"].keys() == {"prompt", "history", "resume"}
    best = max(row["sources"].values())
    assert row["all"] > best > 1.2 and row["oracle"] >= best
    assert min(row["unique"][name] for name in ("prompt", "history")) > 0
    assert 0 <= row["calibration_error"] < 0.2


def test_five_sources_are_heard_out_when_time_is_measured(replay: ModuleType) -> None:
    """With made-up feedback the target's leftovers draft, too, and every step has its two times; the text is the same."""
    turns = turns_of(replay)
    found = replay.replay(turns, {}, ["prompt", "history", "recycle", "lookahead"], 16, VOCAB, made_up=True)
    assert found.num_tokens == 112 and found.num_steps == len(found.drafting) == len(found.learning)
    assert min(found.drafting) > 0 and found.unique.keys() == {"prompt", "history", "recycle", "lookahead"}
    assert replay.percentiles(found.drafting)["p50"] <= replay.percentiles(found.drafting)["p99"]


def test_hearsay_says_first_what_was_said(replay: ModuleType) -> None:
    """Along the accepted path the first likely token is the one said, lookahead rows are counted, all ids are in range."""
    tree = CandidateTree(
        ids(5, 6, 7, 8), ids(-1, 0, 0, 2), np.ones(4, np.float32), np.zeros(4, np.int64), np.zeros(4, np.uint8), 3
    )
    tree = tree.with_lookahead(LookaheadRows(ids(9, 9), ids(-1, 0)))
    heard = replay.hearsay(tree, ids(7, 8, 4), VOCAB)
    assert heard.top_ids.shape == (6, 8) and heard.top_ids.dtype == np.int32
    assert heard.top_ids[[0, 2, 3], 0].tolist() == [7, 8, 4]
    assert heard.num_lookahead == int((tree.roles == LOOKAHEAD).sum()) == 2
    assert heard.top_ids.min() >= 0 and heard.top_ids.max() < VOCAB


def test_what_is_judged_is_promised_given_the_parent(replay: ModuleType) -> None:
    """Nodes whose parent was said: the merged probability given it, the sources' mean without calibration, the outcome."""
    found = replay.Replay()
    tree = CandidateTree(
        ids(0, 1, 2, 3, 4),
        ids(-1, 0, 0, 1, 2),
        np.array([1, 0.5, 0.4, 0.25, 0.2], np.float32),
        np.zeros(5, np.int64),
        np.zeros(5, np.uint8),
        0,
    )
    first, second = Draft.of([1, 3], [-1, 0], [0.6, 0.4]), Draft.of([2, 4, 1], [-1, 0, -1], [0.3, 0.5, 0.2])
    replay.judge(tree, [first, None, second], ids(1, 9), found)
    expected = [[0.5, 0.4, 1.0], [0.4, 0.15, 0.0], [0.5, 0.4, 0.0]]
    assert np.allclose(found.judged[0], expected)
    assert found.promised == pytest.approx(1.35)


def test_errors_and_losses_are_those_of_the_definition(replay: ModuleType) -> None:
    """By hand: fifteen bins of one, and the mean of negative logarithms."""
    probs, outcomes = np.array([0.9, 0.5, 0.2]), np.array([1.0, 0.0, 0.0])
    assert replay.calibration_error(probs, outcomes) == pytest.approx((0.1 + 0.5 + 0.2) / 3)
    assert replay.log_loss(probs, outcomes) == pytest.approx(-(np.log(0.9) + np.log(0.5) + np.log(0.8)) / 3)
    assert replay.calibration_error(np.zeros(0), np.zeros(0)) == replay.log_loss(np.zeros(0), np.zeros(0)) == 0.0


def test_samples_keep_records_about_one_thing_together(replay: ModuleType) -> None:
    """Chosen by hash of what they are about, in the file's order; the same ones every time."""
    records = [{"id": f"{i}", "prompt": f"question {i // 2}"} for i in range(40)]
    chosen = replay.sample(records, 6)
    assert chosen == replay.sample(records, 6) and len(chosen) == 6
    assert [int(record["id"]) for record in chosen] == sorted(int(record["id"]) for record in chosen)
    assert len({record["prompt"] for record in chosen}) == 3
