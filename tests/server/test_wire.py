"""Protobuf and dataclasses say the same, in both directions."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftloom import convert
from draftloom.types import Options
from draftloom.v1 import generation_pb2, target_pb2
from engine.acceptance import LENGTH, STOP, Limits, SamplingParams
from engine.drafters import Feedback
from engine.errors import InvalidRequest, NotFound, UnsupportedParameter
from engine.requests import GenerationRequest, SpeculationOptions
from engine.server.wire import field_path, request_from_wire
from engine.target import Logprobs, SequenceRequest, StepResult, TargetInfo, TargetStatus
from engine.target import wire as target_wire
from engine.tree import CandidateTree, CostCurve
from tests.server.scripted import CONTROL, TOKENIZER

INFO = TargetInfo("m", "f", TOKENIZER.vocab_size, 4096, (256,), "int8", True, max_rows=17)

ids = st.integers(0, (1 << 31) - 1)
float32s = st.floats(0, 1, width=32)
seconds = st.floats(1e-6, 10)


def equal(left: Any, right: Any) -> bool:
    """Dataclasses are equal field by field; arrays in shape, dtype and value."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right) and left.shape == right.shape
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return bool(left == right)


def sent(message: Any) -> Any:
    """`message` as it arrives on the other side."""
    return type(message).FromString(message.SerializeToString())


@st.composite
def trees(draw: st.DrawFn) -> CandidateTree:
    """Arrays of a tree; whether it is a good one does not matter to the wire."""
    n = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any], dtype: Any) -> Any:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    return CandidateTree(
        tokens=column(ids, np.int32),
        parents=column(st.integers(-1, n), np.int32),
        probs=column(float32s, np.float32),
        sources=column(st.integers(0, (1 << 63) - 1), np.int64),
        roles=column(st.integers(0, 255), np.uint8),
        position=draw(ids),
    )


@st.composite
def curves(draw: st.DrawFn) -> CostCurve:
    rows = draw(st.lists(st.integers(2, 256), unique=True, max_size=6))
    times = draw(st.lists(seconds, min_size=len(rows) + 1, max_size=len(rows) + 1))
    return CostCurve(np.array([1, *sorted(rows)], np.int32), np.array(sorted(times), np.float64))


@st.composite
def feedbacks(draw: st.DrawFn, num_rows: int) -> Feedback:
    top_k = draw(st.integers(0, 4))
    if not top_k:
        return Feedback()
    nodes, parents, top_ids = (
        np.array(draw(st.lists(numbers, min_size=n, max_size=n)), np.int32)
        for numbers, n in ((ids, num_rows), (st.integers(-1, 9), num_rows), (ids, num_rows * top_k))
    )
    return Feedback(top_ids.reshape(num_rows, top_k), nodes, parents, draw(st.integers(0, num_rows)))


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    def array(n: int) -> Any:
        return np.array(draw(st.lists(ids, min_size=n, max_size=n)), np.int32)

    def real(n: int) -> Any:
        return np.array(draw(st.lists(st.floats(allow_nan=False), min_size=n, max_size=n)), np.float64)

    length, verified, k = (draw(st.integers(lo, 4)) for lo in (0, 1, -1))
    n = length + 1
    return StepResult(
        path=array(length),
        tokens=array(n),
        finish=draw(st.sampled_from(["", STOP, LENGTH])),
        verified=array(verified),
        feedback=draw(feedbacks(verified)),
        logprobs=None if k < 0 else Logprobs(real(n), array(n * k).reshape(n, k), real(n * k).reshape(n, k)),
        curve=draw(st.none() | curves()),
        seconds=draw(seconds),
    )


@given(trees())
def test_trees_survive_the_wire(tree: CandidateTree) -> None:
    """A tree arrives as it was, bit for bit."""
    assert equal(target_wire.tree_from_wire(sent(target_wire.tree_to_wire(tree))), tree)


@given(results())
def test_step_results_survive_the_wire(result: StepResult) -> None:
    """What a step gave arrives as it was, bit for bit."""
    assert equal(target_wire.step_from_wire(sent(target_wire.step_to_wire(result))), result)


@given(
    temperature=st.floats(0, 10),
    seed=st.integers(0, (1 << 64) - 1),
    bias=st.dictionaries(ids, st.floats(-100, 100), max_size=4),
    prompt=st.lists(ids, min_size=1, max_size=8),
    stop_ids=st.frozensets(ids, max_size=4),
    num_logprobs=st.integers(-1, 20),
)
def test_sequence_requests_survive_the_wire(
    temperature: float, seed: int, bias: dict[int, float], prompt: list[int], stop_ids: frozenset[int], num_logprobs: int
) -> None:
    """A request arrives as it was: float64 stays float64, or the same seed would give another text."""
    sampling = SamplingParams(temperature, 3, 0.7, 0.1, 1.3, -0.5, 1.7, tuple(sorted(bias.items())), seed)
    request = SequenceRequest(np.array(prompt, np.int32), sampling, Limits(9, 2, stop_ids), "someone", num_logprobs, 4, 5)
    assert equal(target_wire.open_from_wire(sent(target_wire.open_to_wire(request))), request)


def test_model_info_survives_the_wire() -> None:
    """What a worker says about its model arrives as it was."""
    assert target_wire.info_from_wire(sent(target_wire.info_to_wire(INFO))) == INFO


def test_a_status_survives_the_wire_and_adds_up() -> None:
    """How a worker stands arrives as it was; two of them are their sums, none is nobody."""
    one, other = TargetStatus(1, 2, 3, 4, 5, 2**40, 7, 8, 9), TargetStatus(num_blocks=10)
    assert target_wire.status_from_wire(sent(target_wire.status_to_wire(one))) == one
    assert TargetStatus.together([one, other]) == TargetStatus(2, 2, 3, 14, 5, 2**40, 7, 8, 9)
    assert TargetStatus.together([]) == TargetStatus(num_workers=0)


def test_arrays_are_little_endian_bytes() -> None:
    """What stands in target.proto: numbers of the type said there, the lowest byte first, whatever the order in memory."""
    tree = CandidateTree(*(np.array([1], dtype) for dtype in (">i4", np.int32, np.float32, np.int64, np.uint8)), 7)
    message = target_wire.tree_to_wire(tree)
    columns = (message.tokens, message.parents, message.probs, message.sources, message.roles)
    assert [column.hex() for column in columns] == ["01000000", "01000000", "0000803f", "0100000000000000", "01"]
    arrived = target_wire.tree_from_wire(message)
    assert all(getattr(arrived, name).flags.writeable for name in ("tokens", "parents", "probs", "sources", "roles"))


def test_bytes_that_are_no_numbers_are_refused() -> None:
    """A number that was cut in two is an error, not a shorter array."""
    with pytest.raises(ValueError, match="multiple of element size"):
        target_wire.tree_from_wire(target_pb2.StepRequest(tokens=b"\1\0\0", parents=b"\xff" * 4, probs=b"\0" * 4))


def test_ids_too_large_are_refused() -> None:
    """A token id beyond int32 is an error of its own, not a wrapped number."""
    with pytest.raises(InvalidRequest, match="too large"):
        target_wire.open_from_wire(target_pb2.OpenRequest(prompt=[1 << 31]))


def asked(prompt: Any, **options: Any) -> GenerationRequest:
    """What the engine is asked when a client says this."""
    message = convert.request(generation_pb2.GenerateStreamRequest, prompt, Options(**options))
    return request_from_wire(sent(message), "someone", INFO, TOKENIZER)


def test_a_prompt_alone_takes_the_defaults() -> None:
    """Nothing but the prompt is needed; seed and request id are made up, and differ from request to request."""
    one, other = asked("hi"), asked("hi")
    plain = GenerationRequest("someone", "hi", sampling=SamplingParams(seed=one.sampling.seed), request_id=one.request_id)
    assert one == plain
    assert one.sampling.seed != other.sampling.seed and one.request_id != other.request_id


def test_every_option_arrives() -> None:
    """Each option of the client reaches the engine under its own name."""
    request = asked(
        [1, 2],
        **dict(max_tokens=9, min_tokens=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1),
        **dict(presence_penalty=-0.5, frequency_penalty=0.25, logit_bias={3: 1.5, 1: -2.0}, seed=7, stop="\n"),
        **dict(stop_token_ids=[4], include_stop=True),
        **dict(ignore_eos=True, logprobs=3, min_chunk_tokens=4, speculation=False, max_nodes=0),
        **dict(corpora=["a", "b"], require_corpus=True, sources="prompt", prediction="guess", trace=True),
        **dict(model="m", request_id="r"),
        timeout=3.0,
    )
    assert np.array_equal(request.prompt, [1, 2])
    assert request.sampling == SamplingParams(0.7, 5, 0.9, 0.1, 1.1, -0.5, 0.25, ((1, -2.0), (3, 1.5)), 7)
    assert request.speculation == SpeculationOptions(False, 0, ("a", "b"), True, ("prompt",), "guess", trace=True)
    assert (request.max_tokens, request.min_tokens, request.num_logprobs, request.request_id) == (9, 2, 3, "r")
    assert (request.stop, request.stop_token_ids, request.include_stop, request.ignore_eos) == (("\n",), (4,), True, True)
    assert set(Options.__annotations__) == {*convert._FIELDS, "timeout"}


def test_zero_is_not_absent() -> None:
    """An option set to zero arrives as zero, where that differs from the default."""
    assert asked("x", seed=0).sampling.seed == 0
    assert asked("x", logprobs=0).num_logprobs == 0
    assert asked("x", max_nodes=0).speculation.max_nodes == 0


def test_no_corpora_is_not_the_default_ones() -> None:
    """An empty list of corpora arrives as none at all; nothing said leaves them to the server; both at once contradict."""
    assert asked("x", corpora=()).speculation.corpora == asked("x", corpora=[]).speculation.corpora == ()
    assert asked("x").speculation.corpora is None
    message = convert.request(generation_pb2.GenerateRequest, "x", Options(corpora="a"))
    message.speculation.no_corpora = True
    with pytest.raises(InvalidRequest, match="corpora are named: a") as caught:
        request_from_wire(message, "someone", INFO, TOKENIZER)
    assert caught.value.field == "speculation.no_corpora"


def test_control_tokens_inside_a_message_stay_text() -> None:
    """A chat is encoded with its template's control tokens, and a message cannot bring its own."""
    request = asked([{"role": "user", "content": f"a{CONTROL}"}])
    assert isinstance(request.prompt, np.ndarray)
    assert request.prompt.tolist().count(256) == 1 and request.prompt[-1] == 256


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("prompt", "", {}),
        ("prompt", [], {}),
        ("prompt.token_ids", [257], {}),
        ("prompt.token_ids", [1 << 31], {}),
        ("prompt.chat.messages", [{"role": "user", "content": "x" * (1 << 24)}], {}),
        ("sampling.top_p", "x", {"top_p": 0}),
        ("sampling.temperature", "x", {"temperature": float("nan")}),
        ("sampling.logit_bias", "x", {"logit_bias": {257: 1.0}}),
        ("stopping.stop[1]", "x", {"stop": ["a", ""]}),
        ("stopping.stop_token_ids[0]", "x", {"stop_token_ids": [257]}),
        ("max_tokens", "x", {"max_tokens": 0}),
        ("logprobs", "x", {"logprobs": 21}),
        ("request_id", "x", {"request_id": "r" * 129}),
        ("request_id", "x", {"request_id": "r\nrequest s: stop"}),
        ("speculation.max_nodes", "x", {"max_nodes": 1000}),
    ],
)
def test_errors_name_the_field_of_the_proto(field: str, prompt: Any, options: dict[str, Any]) -> None:
    """What is wrong is named by its path in the .proto."""
    with pytest.raises(InvalidRequest) as caught:
        asked(prompt, **options)
    assert caught.value.field == field


def test_unsupported_and_unknown_are_refused_by_name() -> None:
    """Several answers are refused, not ignored; so is another model."""
    message = generation_pb2.GenerateRequest(prompt=generation_pb2.Prompt(text="x"), n=2)
    with pytest.raises(UnsupportedParameter) as caught:
        request_from_wire(message, "someone", INFO, TOKENIZER)
    assert caught.value.field == "n"
    with pytest.raises(NotFound, match="no such model: other"):
        asked("x", model="other")


def test_every_renamed_field_exists_in_the_proto() -> None:
    """The table from the engine's names to the .proto's points at real fields."""
    names = [f.name for f in fields(SamplingParams)] + ["stop", "stop_token_ids", "include_stop", "ignore_eos", "messages"]
    for name in names:
        descriptor: Any = generation_pb2.GenerateRequest.DESCRIPTOR
        *path, last = field_path(name).split(".")
        for part in path:
            descriptor = descriptor.fields_by_name[part].message_type
        assert last in descriptor.fields_by_name


def test_unary_and_stream_messages_have_the_same_fields() -> None:
    """The stream's messages are the unary ones field for field, so that one conversion serves both."""

    def numbers(message: Any) -> dict[str, tuple[int, Any]]:
        return {f.name: (f.number, f.message_type) for f in message.DESCRIPTOR.fields}

    assert numbers(generation_pb2.GenerateResponse) == numbers(generation_pb2.GenerateStreamResponse)
    extra = numbers(generation_pb2.GenerateStreamRequest)
    assert numbers(generation_pb2.GenerateRequest) == {name: extra[name] for name in extra if name != "stream"}


def test_a_clients_mistake_is_named_before_it_is_sent() -> None:
    """Options nobody knows and values no field can hold raise at once, by name."""
    with pytest.raises(TypeError, match="no such option: temprature"):
        asked("x", temprature=1)
    with pytest.raises(ValueError, match="max_tokens cannot be '-1'"):
        asked("x", max_tokens=-1)
    with pytest.raises(TypeError, match="prompt cannot be"):
        asked(["a", "b"])
