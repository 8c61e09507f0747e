"""What a request may say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.acceptance import SamplingParams
from engine.errors import InvalidRequest
from engine.requests import Final, GenerationRequest, GenerationStats, SpeculationOptions, TokenLogprob
from engine.target import Logprobs

VOCAB = 100
GOOD = GenerationRequest("default", "text")


def speculation(**changes: object) -> dict[str, object]:
    return {"speculation": SpeculationOptions(**changes)}  # type: ignore[arg-type]


BAD = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": np.zeros(0, np.int32)}),
    ("prompt.token_ids", {"prompt": np.array([1, VOCAB], np.int32)}),
    ("prompt.token_ids", {"prompt": np.array([-1], np.int32)}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
    ("temperature", {"sampling": SamplingParams(temperature=-1.0)}),
    ("logit_bias", {"sampling": SamplingParams(logit_bias=((VOCAB, 1.0),))}),
    ("stop", {"stop": tuple(map(str, range(17)))}),
    ("stop[1]", {"stop": ("a", "")}),
    ("stop[0]", {"stop": ("\N{SNOWMAN}" * 86,)}),
    ("stop_token_ids", {"stop_token_ids": tuple(range(17))}),
    ("stop_token_ids[1]", {"stop_token_ids": (1, VOCAB)}),
    ("logprobs", {"num_logprobs": 21}),
    ("speculation.max_nodes", speculation(max_nodes=257)),
    ("speculation.corpora", speculation(corpora=("a", "a"))),
    ("speculation.sources", speculation(sources=tuple(map(str, range(17))))),
    ("speculation.require_corpus", speculation(corpora=(), require_corpus=True)),
]


@pytest.mark.parametrize(("field", "changes"), BAD, ids=[field for field, _ in BAD])
def test_a_bad_field_is_named(field: str, changes: dict[str, object]) -> None:
    """Every limit of a request is held, and the error names the field."""
    with pytest.raises(InvalidRequest) as caught:
        dataclasses.replace(GOOD, **changes).validate(VOCAB)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_edges_are_allowed() -> None:
    """The largest value of every bounded field passes."""
    dataclasses.replace(
        GOOD,
        prompt=np.array([0, VOCAB - 1], np.int32),
        max_tokens=1,
        min_tokens=1,
        stop=("x" * 256,) * 16,
        stop_token_ids=(VOCAB - 1,),
        num_logprobs=20,
        speculation=SpeculationOptions(max_nodes=256, corpora=("a", "b"), require_corpus=True),
    ).validate(VOCAB)


def test_limits_join_stop_ids_and_eos() -> None:
    """End-of-sequence ids stop a sequence unless the request ignores them; its own stop ids always do."""
    request = dataclasses.replace(GOOD, stop_token_ids=(5,), min_tokens=2)
    assert request.limits((7, 8)).stop_ids == {5, 7, 8}
    assert dataclasses.replace(request, ignore_eos=True).limits((7, 8)).stop_ids == {5}
    assert (request.limits(()).max_tokens, request.limits(()).min_tokens) == (128, 2)


def test_logprobs_become_one_entry_per_token() -> None:
    """Arrays of a step are split by token, alternatives in their order."""
    step = Logprobs(np.array([-1.0, -2.0]), np.array([[4, 5], [6, 7]], np.int32), np.array([[-1.0, -3.0], [-0.5, -2.0]]))
    assert TokenLogprob.of(step) == (TokenLogprob(-1.0, ((4, -1.0), (5, -3.0))), TokenLogprob(-2.0, ((6, -0.5), (7, -2.0))))


def test_a_final_event_is_checked() -> None:
    """Tokens per step count the answer's tokens; contradictory endings are refused."""
    assert Final("stop", 1, 9, 0, statistics=GenerationStats(num_steps=3)).tokens_per_step == 3.0
    assert Final("length", 1, 0, 0).tokens_per_step == 0.0
    with pytest.raises(ValueError, match="neither"):
        Final("", 1, 1, 0).validate()
    with pytest.raises(ValueError, match="by a string and by a token"):
        Final("stop", 1, 1, 0, stop_string="x", stop_token=1).validate()
