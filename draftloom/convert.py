"""Options to requests, responses to dataclasses: what the sync and the async client share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from draftloom.types import (
    Chunk,
    Completion,
    Corpus,
    ModelInfo,
    Options,
    Prompt,
    SourceStatistics,
    Statistics,
    StepTrace,
    TokenLogprob,
    TraceNode,
    Usage,
    WorkerStatus,
)
from draftloom.v1 import corpus_pb2, generation_pb2

RequestMessage = TypeVar("RequestMessage", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)
ResponseMessage = generation_pb2.GenerateResponse | generation_pb2.GenerateStreamResponse

_FINISH_REASONS = {generation_pb2.FINISH_REASON_STOP: "stop", generation_pb2.FINISH_REASON_LENGTH: "length"}

# Where in the request each option goes.
_FIELDS = {
    **dict.fromkeys(("request_id", "model", "max_tokens", "min_tokens", "logprobs"), ""),
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias"), "sampling"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "sampling"),
    **dict.fromkeys(("stop", "stop_token_ids", "include_stop", "ignore_eos"), "stopping"),
    **dict.fromkeys(("speculation", "max_nodes", "corpora", "require_corpus", "sources", "prediction", "trace"), "speculation"),
    **dict.fromkeys(("use_history", "learn"), "speculation"),
    "min_chunk_tokens": "stream",
}
_NAMES = {"include_stop": "include_stop_str_in_output", "speculation": "enabled"}


def request(kind: type[RequestMessage], prompt: Prompt, options: Options) -> RequestMessage:
    """The message for `prompt` and `options` (`timeout` is the call's, not the message's).

    Raises TypeError for an option nobody knows or a prompt that is none, ValueError for a number its field cannot hold.
    """
    message = kind()
    with _named("prompt", prompt):
        message.prompt.CopyFrom(_prompt(prompt))
    for name, value in options.items():
        if value is None or name == "timeout":
            continue
        if name not in _FIELDS:
            raise TypeError(f"no such option: {name}; there are {', '.join(sorted(_FIELDS))} and timeout")
        if name == "min_chunk_tokens" and kind is generation_pb2.GenerateRequest:
            raise TypeError("min_chunk_tokens is an option of streams only")
        group: Any = getattr(message, _FIELDS[name]) if _FIELDS[name] else message
        if name == "corpora" and not value:
            name, value = "no_corpora", True
        listed = name in ("stop", "corpora", "sources") and isinstance(value, str)
        with _named(name, value):
            group.MergeFrom(type(group)(**{_NAMES.get(name, name): [value] if listed else value}))
    return message


@contextmanager
def _named(name: str, value: object) -> Iterator[None]:
    """Protobuf's complaint about a value, with the option's name."""
    try:
        yield
    except (TypeError, ValueError, KeyError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name} cannot be {str(value)[:80]!r}: {error}") from None


def _prompt(prompt: Prompt) -> generation_pb2.Prompt:
    if isinstance(prompt, str):
        return generation_pb2.Prompt(text=prompt)
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        messages = [generation_pb2.ChatMessage(role=item["role"], content=item["content"]) for item in items]
        return generation_pb2.Prompt(chat=generation_pb2.Chat(messages=messages))
    return generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=items))


def chunk(message: ResponseMessage, names: Sequence[str]) -> Chunk:
    """`names` are the request's sources, which only the first message of a stream has."""
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        sources=_sources(message.source_masks, names),
        logprobs=_logprobs(message.logprobs),
        sizes=tuple(message.token_sizes),
        steps=_steps(message.steps, names),
    )


def completion(message: ResponseMessage) -> Completion:
    """From a GenerateResponse, or from all messages of a stream as one."""
    cause = message.finish.WhichOneof("cause")
    return Completion(
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH_REASONS.get(message.finish.reason, ""),
        usage=Usage(message.usage.prompt_tokens, message.usage.completion_tokens),
        seed=message.seed,
        statistics=_statistics(message.statistics),
        sources=_sources(message.source_masks, message.source_names),
        logprobs=_logprobs(message.logprobs),
        stop_string=message.finish.stop_string if cause == "stop_string" else None,
        stop_token_id=message.finish.stop_token_id if cause == "stop_token_id" else None,
        request_id=message.request_id,
        model=message.model,
        sizes=tuple(message.token_sizes),
        steps=_steps(message.steps, message.source_names),
    )


class Gathering:
    """All messages of a stream as one. Protobuf's merge appends lists and keeps what only one message has; text is joined."""

    def __init__(self) -> None:
        self._all = generation_pb2.GenerateStreamResponse()
        self._texts: list[str] = []

    def add(self, message: generation_pb2.GenerateStreamResponse) -> Chunk | None:
        """The message as a chunk; None if it has no text and no tokens, as the last one may."""
        self._all.MergeFrom(message)
        self._texts.append(message.text)
        return chunk(message, self._all.source_names) if message.text or message.token_ids else None

    def completion(self) -> Completion | None:
        """The whole answer; None while its last message is missing."""
        if not self._all.HasField("finish"):
            return None
        self._all.text = "".join(self._texts)
        return completion(self._all)


def model_info(message: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=message.model,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        strict=message.strict,
        max_nodes=message.max_nodes,
        sources=tuple(message.sources),
    )


def worker_status(message: generation_pb2.GetWorkerStatusResponse) -> WorkerStatus:
    return WorkerStatus(**{each.name: getattr(message.status, each.name) for each in fields(WorkerStatus)})


def corpora(message: corpus_pb2.ListCorporaResponse) -> list[Corpus]:
    return [
        Corpus(
            name=each.name,
            version=each.version,
            num_documents=each.num_documents,
            num_tokens=each.num_tokens,
            tokenizer_fingerprint=each.tokenizer_fingerprint,
            usable=each.usable,
            problem=each.problem,
        )
        for each in message.corpora
    ]


def _sources(masks: Iterable[int], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name for bit, name in enumerate(names) if mask >> bit & 1) for mask in masks)


def _steps(messages: Iterable[generation_pb2.StepTrace], names: Sequence[str]) -> tuple[StepTrace, ...]:
    return tuple(
        StepTrace(
            nodes=tuple(
                TraceNode(
                    token_id=node.token_id,
                    text=node.text,
                    parent=node.parent,
                    probability=node.probability,
                    sources=sources,
                    verified=node.verified,
                    accepted=node.accepted,
                )
                for node, sources in zip(each.nodes, _sources((n.source_mask for n in each.nodes), names), strict=True)
            ),
            texts=tuple(each.texts),
            num_lookahead=each.num_lookahead,
            draft_seconds=each.draft_seconds,
            step_seconds=each.step_seconds,
            pass_seconds=each.pass_seconds,
            costs=tuple((cost.num_rows, cost.seconds) for cost in each.costs),
        )
        for each in messages
    )


def _logprobs(messages: Iterable[generation_pb2.TokenLogprobs]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(each.logprob, tuple((a.token_id, a.logprob) for a in each.top)) for each in messages)


def _statistics(message: generation_pb2.SpeculationStats) -> Statistics:
    return Statistics(
        num_steps=message.num_steps,
        num_nodes=message.num_nodes,
        num_accepted=message.num_accepted,
        tokens_per_step=message.mean_tokens_per_step,
        draft_seconds=message.draft_seconds,
        step_seconds=message.step_seconds,
        prefill_seconds=message.prefill_seconds,
        sources=tuple(
            SourceStatistics(
                name=each.name,
                num_proposed=each.num_proposed,
                num_accepted=each.num_accepted,
                num_unique=each.num_unique,
                num_errors=each.num_errors,
                num_late=each.num_late,
                seconds=each.seconds,
                trust=each.trust,
                num_held=each.num_held,
                num_held_alone=each.num_held_alone,
            )
            for each in message.sources
        ),
        corpora={each.name: each.version for each in message.corpora},
        warnings=tuple(message.warnings),
        num_expected=message.num_expected,
        calibration_error=message.calibration_error,
        log_loss=message.log_loss,
        prefix_tokens_reused=message.prefix_tokens_reused,
    )
