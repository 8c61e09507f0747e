"""target.proto <-> the dataclasses of `engine.target`; one pair of functions for each message, the same names on both sides.

Arrays of a step travel as the bytes they are; whoever receives has copies of his own. Whether a tree or a request makes sense,
parallel arrays of one length among it, is the target's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftloom.v1 import generation_pb2, target_pb2
from engine.acceptance import LENGTH, STOP, Limits, SamplingParams
from engine.drafters import Feedback
from engine.errors import ConfigError, InvalidRequest
from engine.target import Logprobs, SequenceRequest, StepResult, TargetInfo, TargetStatus
from engine.tree import CandidateTree, CostCurve

PROTOCOL = 2
"""The version of target.proto; one more with every change that an older engine or worker would misread."""

FINISHES = {
    "": generation_pb2.FINISH_REASON_UNSPECIFIED,
    STOP: generation_pb2.FINISH_REASON_STOP,
    LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_FINISH_NAMES = {reason: name for name, reason in FINISHES.items()}

Number = TypeVar("Number", bound=np.generic)


def ids_array(ids: Iterable[int], field: str) -> NDArray[np.int32]:
    """int32 [n]. Raises InvalidRequest naming `field` for an id of 2^31 or more, which no vocabulary has."""
    wide = np.array(list(ids), np.int64)
    if len(wide) and wide.max() >= 1 << 31:
        raise InvalidRequest(f"has a number too large for a token id: {wide.max()}", field)
    return wide.astype(np.int32)


# Sampling, shared with the clients' API.


def sampling_to_wire(params: SamplingParams) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
    )


def sampling_from_wire(message: generation_pb2.SamplingParams, seed: int) -> SamplingParams:
    """What is absent takes its default, the seed `seed`. The bias is sorted by id: equal requests give equal parameters."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed if message.HasField("seed") else seed,
    )


# What a worker says about its model.


def info_to_wire(info: TargetInfo) -> target_pb2.GetInfoResponse:
    return target_pb2.GetInfoResponse(
        model=info.model,
        tokenizer_fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_ids,
        dtype=info.dtype,
        strict=info.strict,
        max_rows=info.max_rows,
        protocol=PROTOCOL,
    )


def info_from_wire(message: target_pb2.GetInfoResponse) -> TargetInfo:
    """Raises ConfigError for a worker of another protocol."""
    if message.protocol != PROTOCOL:
        raise ConfigError(
            f"the worker speaks another version of the protocol: {message.protocol}, and this engine {PROTOCOL}; "
            "install the same version of draftloom on both"
        )
    return TargetInfo(
        model=message.model,
        fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        eos_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        strict=message.strict,
        max_rows=message.max_rows,
    )


def status_to_wire(status: TargetStatus) -> generation_pb2.WorkerStatus:
    return generation_pb2.WorkerStatus(**asdict(status))


def status_from_wire(message: generation_pb2.WorkerStatus) -> TargetStatus:
    return TargetStatus(**{each.name: getattr(message, each.name) for each in fields(TargetStatus)})


# Opening a sequence.


def open_to_wire(request: SequenceRequest) -> target_pb2.OpenRequest:
    return target_pb2.OpenRequest(
        tenant=request.tenant,
        prompt=request.prompt.tolist(),
        sampling=sampling_to_wire(request.sampling),
        max_tokens=request.limits.max_tokens,
        min_tokens=request.limits.min_tokens,
        stop_token_ids=sorted(request.limits.stop_ids),
        logprobs=None if request.num_logprobs < 0 else request.num_logprobs,
        feedback_top_k=request.feedback_top_k,
        feedback_prompt=request.feedback_prompt,
        num_emitted=request.num_emitted,
    )


def open_from_wire(message: target_pb2.OpenRequest) -> SequenceRequest:
    """Raises InvalidRequest for ids that are none."""
    return SequenceRequest(
        prompt=ids_array(message.prompt, "prompt"),
        sampling=sampling_from_wire(message.sampling, seed=0),
        limits=Limits(message.max_tokens, message.min_tokens, frozenset(message.stop_token_ids)),
        tenant=message.tenant,
        num_logprobs=message.logprobs if message.HasField("logprobs") else -1,
        feedback_top_k=message.feedback_top_k,
        feedback_prompt=message.feedback_prompt,
        num_emitted=message.num_emitted,
    )


# Steps.


INT32, INT64, FLOAT32, UINT8 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4"), np.dtype("u1")


def array_to_wire(array: NDArray[Number], dtype: np.dtype[Number]) -> bytes:
    """The numbers, row after row."""
    return array.astype(dtype, copy=False).tobytes()


def array_from_wire(numbers: bytes, dtype: np.dtype[Number]) -> NDArray[Number]:
    """A writable array [n] in this machine's byte order. Raises ValueError for bytes that are no such numbers."""
    return np.frombuffer(numbers, dtype).astype(dtype.type)


def tree_to_wire(tree: CandidateTree) -> target_pb2.StepRequest:
    return target_pb2.StepRequest(
        position=tree.position,
        tokens=array_to_wire(tree.tokens, INT32),
        parents=array_to_wire(tree.parents, INT32),
        probs=array_to_wire(tree.probs, FLOAT32),
        sources=array_to_wire(tree.sources, INT64),
        roles=array_to_wire(tree.roles, UINT8),
    )


def tree_from_wire(message: target_pb2.StepRequest) -> CandidateTree:
    """Raises ValueError for bytes that are no numbers; the target validates the rest."""
    return CandidateTree(
        array_from_wire(message.tokens, INT32),
        array_from_wire(message.parents, INT32),
        array_from_wire(message.probs, FLOAT32),
        array_from_wire(message.sources, INT64),
        array_from_wire(message.roles, UINT8),
        message.position,
    )


def step_to_wire(result: StepResult) -> target_pb2.StepResponse:
    return target_pb2.StepResponse(
        path=array_to_wire(result.path, INT32),
        tokens=array_to_wire(result.tokens, INT32),
        finish=FINISHES[result.finish],
        verified=array_to_wire(result.verified, INT32),
        feedback=feedback_to_wire(result.feedback),
        logprobs=logprobs_to_wire(result.logprobs),
        curve=None if result.curve is None else curve_to_wire(result.curve),
        seconds=result.seconds,
    )


def step_from_wire(message: target_pb2.StepResponse) -> StepResult:
    """`logprobs` is None if the message has none; a step emits a token at least, so none were asked for."""
    return StepResult(
        path=array_from_wire(message.path, INT32),
        tokens=array_from_wire(message.tokens, INT32),
        finish=_FINISH_NAMES[message.finish],
        verified=array_from_wire(message.verified, INT32),
        feedback=feedback_from_wire(message.feedback),
        logprobs=logprobs_from_wire(message.logprobs),
        curve=curve_from_wire(message.curve) if message.HasField("curve") else None,
        seconds=message.seconds,
    )


def feedback_to_wire(feedback: Feedback) -> target_pb2.Feedback:
    return target_pb2.Feedback(
        nodes=array_to_wire(feedback.nodes, INT32),
        top_ids=array_to_wire(feedback.top_ids, INT32),
        top_k=feedback.top_ids.shape[1],
        parents=array_to_wire(feedback.parents, INT32),
        num_lookahead=feedback.num_lookahead,
    )


def feedback_from_wire(message: target_pb2.Feedback) -> Feedback:
    return Feedback(
        top_ids=array_from_wire(message.top_ids, INT32).reshape((-1, message.top_k) if message.top_k else (0, 0)),
        nodes=array_from_wire(message.nodes, INT32),
        parents=array_from_wire(message.parents, INT32),
        num_lookahead=message.num_lookahead,
    )


def logprobs_to_wire(logprobs: Logprobs | None) -> list[generation_pb2.TokenLogprobs]:
    if logprobs is None:
        return []
    return [
        generation_pb2.TokenLogprobs(
            logprob=chosen,
            top=[generation_pb2.Alternative(token_id=i, logprob=x) for i, x in zip(ids, top, strict=True)],
        )
        for chosen, ids, top in zip(logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
    ]


def logprobs_from_wire(messages: Sequence[generation_pb2.TokenLogprobs]) -> Logprobs | None:
    if not messages:
        return None
    shape = (len(messages), len(messages[0].top))
    return Logprobs(
        chosen=np.array([m.logprob for m in messages], np.float64),
        top_ids=np.array([a.token_id for m in messages for a in m.top], np.int32).reshape(shape),
        top=np.array([a.logprob for m in messages for a in m.top], np.float64).reshape(shape),
    )


def curve_to_wire(curve: CostCurve) -> target_pb2.CostCurve:
    return target_pb2.CostCurve(rows=curve.rows.tolist(), seconds=curve.seconds.tolist())


def curve_from_wire(message: target_pb2.CostCurve) -> CostCurve:
    return CostCurve(np.array(message.rows, np.int32), np.array(message.seconds, np.float64))
