"""The arithmetic of the benchmarks with a real model: what is chosen, what is compared, what the last line says."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.requests import Final, GenerationStats
from engine.target.fake import FakeTarget
from engine.text import Tokenizer
from tests.tiny_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def specbench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("specbench")


@pytest.fixture
def data(specbench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three questions of each category, as the evaluation data has them."""
    (tmp_path / "prompts").mkdir()
    with gzip.open(tmp_path / "prompts" / "spec_bench.jsonl.gz", "wt") as file:
        for i in range(3):
            for category in specbench.CATEGORIES:
                record = {"id": f"{category}-{i}", "category": category, "turns": [f"def {category}(first", "again"]}
                file.write(json.dumps(record) + "\n")
    monkeypatch.setenv("DRAFTLOOM_DATA", str(tmp_path))
    return tmp_path


def run_of(common: ModuleType, tokens: list[int], decode: float, num_steps: int, source: str = "target") -> Any:
    statistics = GenerationStats(num_steps=num_steps, num_nodes=3 * num_steps, draft_seconds=decode / 10)
    final = Final("length", 1, len(tokens), 0, statistics=statistics)
    return common.Run(tuple(tokens), decode, 0.1, decode + 1, final, Counter({source: len(tokens)}))


def test_ratios_are_of_prompts_and_differences_are_seen(specbench: ModuleType) -> None:
    """The speed-up is the median of the prompts' own, not that of all time; one token that differs is not identical."""
    common = importlib.import_module("_common")
    plain, ours = common.Mode("plain"), common.Mode("draftloom")
    for slow, fast, steps in ((1.0, 0.5, 2), (1.0, 0.25, 2), (9.0, 9.0, 4)):
        plain.runs.append(run_of(common, [1, 2, 3, 4], slow, 4))
        ours.runs.append(run_of(common, [1, 2, 3, 4], fast, steps, "prompt"))
    found = specbench.figures({"plain": plain, "draftloom": ours})
    assert (found["speedup"], found["identical"], found["num_prompts"]) == (2.0, True, 3)
    assert found["total_speedup"] == pytest.approx(11 / 9.75, abs=1e-3)
    assert found["tokens_per_step"] == 12 / 8 and found["nodes_per_step"] == 3.0
    assert ours.by_source() == "prompt 100%"
    plain.runs[0] = replace(plain.runs[0], sources=Counter({"history and prompt": 3, "target": 1}))
    assert plain.by_source() == "target 75%, history 25%, prompt 25%"
    ours.runs[1] = replace(ours.runs[1], tokens=(1, 2, 3, 5))
    assert not specbench.figures({"plain": plain, "draftloom": ours})["identical"]
    assert ours.num_identical(plain) == 2


def test_every_mode_is_first_as_often_as_the_others(specbench: ModuleType) -> None:
    """The order turns from prompt to prompt."""
    common = importlib.import_module("_common")
    orders = [common.turns(["a", "b", "c"], i) for i in range(6)]
    assert Counter(order[0] for order in orders) == {"a": 2, "b": 2, "c": 2}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_questions_are_chosen_alike_every_time(specbench: ModuleType, data: Path) -> None:
    """So many of each category, by the hash of their ids: fewer are the first of more."""
    two, three = specbench.questions(2), specbench.questions(3)
    assert Counter(question.category for question in two) == dict.fromkeys(specbench.CATEGORIES, 2)
    assert [question for question in three if question.seed <= 2] == two
    assert all(question.text.startswith("def ") for question in three)


def test_without_the_data_it_says_so(specbench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason, not a traceback."""
    monkeypatch.setenv("DRAFTLOOM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"nothing to run: .*nowhere.* is not there; set DRAFTLOOM_DATA"):
        specbench.questions(1)


def test_it_runs_from_questions_to_figures(specbench: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a target without weights: every category at every temperature, identical tokens, and the last line's keys."""
    tokenizer = Tokenizer(byte_level(), chat_template=TEMPLATE)

    def load(model: str, dtype: str, threads: int | None) -> tuple[Tokenizer, Any]:
        target: Any = FakeTarget(tokenizer.vocab_size, order=2, fingerprint=tokenizer.fingerprint)
        target.meter = SimpleNamespace(freeze=lambda curve: None)
        return tokenizer, target

    monkeypatch.setattr(specbench, "load_target", load)
    found = asyncio.run(specbench.measure("fake", "int8", None, 1, 24, [0.0, 1.0], "prompt,history", "4"))
    assert json.loads(json.dumps(found)) == found
    assert set(found) >= {"categories", "overall_speedup"} and tuple(found["categories"]) == specbench.CATEGORIES
    for by_temperature in found["categories"].values():
        assert set(by_temperature) == {"0", "1"}
        for numbers in by_temperature.values():
            assert numbers["identical"] is True and numbers["num_tokens"] == 24
            assert numbers["speedup"] > 0 and numbers["tokens_per_step"] >= 1
    assert max(each["0"]["tokens_per_step"] for each in found["categories"].values()) > 1
