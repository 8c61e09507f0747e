"""draftloom.v1 <-> `engine.requests`: every client message is read, checked and written here.

A request is checked once, on its way in, and errors name the field as the .proto does (`sampling.top_p`, `stopping.stop[0]`).
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftloom.v1 import corpus_pb2, generation_pb2
from engine.errors import InvalidRequest, NotFound, UnsupportedParameter
from engine.requests import (
    MAX_TOKENS,
    Chunk,
    CorpusInfo,
    Final,
    GenerationRequest,
    GenerationStats,
    SpeculationOptions,
    StepTrace,
    TokenLogprob,
)
from engine.target import TargetInfo
from engine.target.wire import FINISHES, ids_array, sampling_from_wire
from engine.text import Tokenizer

GenerateMessage = generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest
ResponseMessage = TypeVar("ResponseMessage", generation_pb2.GenerateResponse, generation_pb2.GenerateStreamResponse)

MAX_REQUEST_ID = 128

_SAMPLING = [
    *("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
]
_PATHS = {name: f"sampling.{name}" for name in _SAMPLING}
_PATHS |= {name: f"stopping.{name}" for name in ("stop", "stop_token_ids", "ignore_eos")}
_PATHS |= {"include_stop": "stopping.include_stop_str_in_output", "messages": "prompt.chat.messages"}


def field_path(field: str) -> str:
    """An engine's name for a field as the .proto spells it: top_p -> sampling.top_p. Others stay as they are."""
    name = field.split("[")[0]
    return _PATHS[name] + field[len(name) :] if name in _PATHS else field


def check_model(asked: str, served: str) -> None:
    """Raise NotFound for a model that is not the one served; an empty name is any."""
    if asked and asked != served:
        raise NotFound(f"no such model: {asked}; this server has {served}, which is also what an empty name means")


def request_from_wire(message: GenerateMessage, tenant: str, info: TargetInfo, tokenizer: Tokenizer) -> GenerationRequest:
    """A valid request with every default filled in, the seed and the request id among them.

    Encodes a chat, so it may take as long as its text is long. Raises InvalidRequest (with the field's path), NotFound.
    """
    check_model(message.model, info.model)
    if message.HasField("n") and message.n != 1:
        raise UnsupportedParameter(f"only one answer to a prompt is supported: {message.n}; leave it out and ask again", "n")
    if len(message.request_id) > MAX_REQUEST_ID or not message.request_id.isprintable():
        raise InvalidRequest(f"at most {MAX_REQUEST_ID} printable characters: {message.request_id!r:.40}", "request_id")
    try:
        request = GenerationRequest(
            tenant=tenant,
            prompt=_prompt(message.prompt, tokenizer),
            max_tokens=message.max_tokens if message.HasField("max_tokens") else MAX_TOKENS,
            min_tokens=message.min_tokens,
            sampling=sampling_from_wire(message.sampling, seed=secrets.randbits(64)),
            stop=tuple(message.stopping.stop),
            stop_token_ids=tuple(message.stopping.stop_token_ids),
            include_stop=message.stopping.include_stop_str_in_output,
            ignore_eos=message.stopping.ignore_eos,
            num_logprobs=message.logprobs if message.HasField("logprobs") else -1,
            speculation=_speculation(message.speculation),
            request_id=message.request_id or uuid.uuid4().hex,
        )
        request.validate(info.vocab_size)
    except InvalidRequest as error:
        error.field = field_path(error.field)
        raise
    return request


def _prompt(message: generation_pb2.Prompt, tokenizer: Tokenizer) -> str | NDArray[np.int32]:
    match message.WhichOneof("kind"):
        case "text":
            return message.text
        case "token_ids":
            return ids_array(message.token_ids.ids, "prompt.token_ids")
        case "chat":
            return tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in message.chat.messages])
    return ""


def _speculation(message: generation_pb2.SpeculationOptions) -> SpeculationOptions:
    if message.no_corpora and message.corpora:
        raise InvalidRequest("is set, and corpora are named: " + ", ".join(message.corpora), "speculation.no_corpora")
    return SpeculationOptions(
        enabled=message.enabled if message.HasField("enabled") else True,
        max_nodes=message.max_nodes if message.HasField("max_nodes") else None,
        corpora=() if message.no_corpora else tuple(message.corpora) or None,
        require_corpus=message.require_corpus,
        sources=tuple(message.sources) or None,
        prediction=message.prediction,
        trace=message.trace,
        use_history=message.use_history if message.HasField("use_history") else None,
        learn=message.learn if message.HasField("learn") else None,
    )


def add_chunk(message: ResponseMessage, chunk: Chunk) -> None:
    """Append a chunk's text, ids, masks, logprobs, sizes and trace to `message`."""
    message.text += chunk.text
    message.token_ids.extend(chunk.tokens)
    message.source_masks.extend(chunk.masks)
    message.logprobs.extend(_logprobs(chunk.logprobs or ()))
    message.token_sizes.extend(chunk.sizes)
    if chunk.trace is not None:
        message.steps.append(_trace(chunk.trace))


def set_final(message: ResponseMessage, final: Final) -> None:
    """Write what the last message of an answer has."""
    message.finish.reason = FINISHES[final.finish]
    if final.stop_string is not None:
        message.finish.stop_string = final.stop_string
    if final.stop_token is not None:
        message.finish.stop_token_id = final.stop_token
    message.usage.prompt_tokens = final.prompt_tokens
    message.usage.completion_tokens = final.completion_tokens
    message.seed = final.seed
    message.statistics.CopyFrom(_statistics(final.statistics, final.tokens_per_step))


def _logprobs(logprobs: Iterable[TokenLogprob]) -> list[generation_pb2.TokenLogprobs]:
    return [
        generation_pb2.TokenLogprobs(
            logprob=each.chosen, top=[generation_pb2.Alternative(token_id=i, logprob=x) for i, x in each.top]
        )
        for each in logprobs
    ]


def _trace(trace: StepTrace) -> generation_pb2.StepTrace:
    return generation_pb2.StepTrace(
        nodes=[
            generation_pb2.TraceNode(
                token_id=node.token,
                text=node.text,
                parent=node.parent,
                probability=node.prob,
                source_mask=node.mask,
                verified=node.verified,
                accepted=node.accepted,
            )
            for node in trace.nodes
        ],
        texts=trace.texts,
        num_lookahead=trace.num_lookahead,
        draft_seconds=trace.draft_seconds,
        step_seconds=trace.step_seconds,
        pass_seconds=trace.pass_seconds,
        costs=[generation_pb2.PassCost(num_rows=rows, seconds=seconds) for rows, seconds in trace.costs],
    )


def _statistics(stats: GenerationStats, tokens_per_step: float) -> generation_pb2.SpeculationStats:
    return generation_pb2.SpeculationStats(
        num_steps=stats.num_steps,
        num_nodes=stats.num_nodes,
        num_accepted=stats.num_accepted,
        mean_tokens_per_step=tokens_per_step,
        draft_seconds=stats.draft_seconds,
        step_seconds=stats.step_seconds,
        prefill_seconds=stats.prefill_seconds,
        sources=[
            generation_pb2.SourceStats(
                name=each.name,
                num_proposed=each.proposed,
                num_accepted=each.accepted,
                num_unique=each.unique,
                num_errors=each.errors,
                num_late=each.late,
                seconds=each.seconds,
                trust=each.trust,
                num_held=each.held,
                num_held_alone=each.held_alone,
            )
            for each in stats.sources
        ],
        corpora=[generation_pb2.CorpusVersion(name=name, version=version) for name, version in stats.corpora],
        warnings=stats.warnings,
        num_expected=stats.num_expected,
        calibration_error=stats.calibration_error,
        log_loss=stats.log_loss,
        prefix_tokens_reused=stats.prefix_tokens_reused,
    )


def model_info_to_wire(info: TargetInfo, sources: tuple[str, ...]) -> generation_pb2.GetModelInfoResponse:
    return generation_pb2.GetModelInfoResponse(
        model=info.model,
        tokenizer_fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_ids,
        dtype=info.dtype,
        strict=info.strict,
        max_nodes=info.max_rows - 1,
        sources=sources,
    )


def corpora_to_wire(corpora: Iterable[CorpusInfo]) -> corpus_pb2.ListCorporaResponse:
    return corpus_pb2.ListCorporaResponse(
        corpora=[
            corpus_pb2.Corpus(
                name=each.name,
                version=each.version,
                num_documents=each.documents,
                num_tokens=each.tokens,
                tokenizer_fingerprint=each.fingerprint,
                usable=each.usable,
                problem=each.problem,
            )
            for each in corpora
        ]
    )
