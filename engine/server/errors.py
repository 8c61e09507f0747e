"""The one table from engine errors to gRPC status codes, and the way back.

Every status carries a google.rpc.ErrorInfo (the error's `reason`, domain "draftloom"); a request at fault also names its field
in a BadRequest, and what is worth a retry says when in a RetryInfo. Texts are cut so that the details stay below 4 KB: gRPC
drops a call whose trailers grow past its limit, and with it the true reason.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine.errors import (
    Cancelled,
    ConfigError,
    CorpusUnusable,
    EngineError,
    Exhausted,
    InvalidRequest,
    ModelError,
    NotFound,
    PromptTooLong,
    Unavailable,
    UnsupportedParameter,
    WorkerLost,
)

DOMAIN = "draftloom"
MAX_MESSAGE_BYTES = 800
MAX_FIELD_BYTES = 160
"""What travels of a message and of a field's name. A message travels up to three times, once percent-encoded."""
RETRY_SECONDS = 1


class MalformedRequest(InvalidRequest):
    """Bytes that are not the message they should be."""

    reason = "MALFORMED_REQUEST"


class SlowReader(Exhausted):
    """The client left its stream unread for too long."""

    reason = "SLOW_READER"


CODES: dict[type[EngineError], int] = {
    InvalidRequest: code_pb2.INVALID_ARGUMENT,
    PromptTooLong: code_pb2.INVALID_ARGUMENT,
    UnsupportedParameter: code_pb2.INVALID_ARGUMENT,
    MalformedRequest: code_pb2.INVALID_ARGUMENT,
    NotFound: code_pb2.NOT_FOUND,
    CorpusUnusable: code_pb2.FAILED_PRECONDITION,
    Unavailable: code_pb2.UNAVAILABLE,
    WorkerLost: code_pb2.UNAVAILABLE,
    Exhausted: code_pb2.RESOURCE_EXHAUSTED,
    SlowReader: code_pb2.RESOURCE_EXHAUSTED,
    Cancelled: code_pb2.CANCELLED,
    ConfigError: code_pb2.INTERNAL,
    ModelError: code_pb2.INTERNAL,
    EngineError: code_pb2.INTERNAL,
}
"""google.rpc codes, equal to gRPC's. A class that is not here takes the code of its nearest base."""

INTERNAL = "INTERNAL"
"""The reason of an error nobody foresaw."""

_BY_REASON = {error.reason: error for error in CODES} | {INTERNAL: EngineError}

_OF_GRPC: dict[grpc.StatusCode, type[EngineError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.INTERNAL: WorkerLost,
    grpc.StatusCode.UNKNOWN: WorkerLost,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exhausted,
}
"""What gRPC's own failures, which carry no reason of ours, mean."""


def to_status(error: EngineError, field: str = "") -> status_pb2.Status:
    """The status that tells a client of `error`; `field` overrides the error's own field name."""
    code = next(CODES[base] for base in type(error).__mro__ if base in CODES)
    message = _cut(str(error), MAX_MESSAGE_BYTES)
    field = _cut(field or getattr(error, "field", ""), MAX_FIELD_BYTES)
    status = status_pb2.Status(code=code, message=f"{field}: {message}" if field else message)
    _add(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if code == code_pb2.INVALID_ARGUMENT and field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if code in (code_pb2.UNAVAILABLE, code_pb2.RESOURCE_EXHAUSTED):
        delay = duration_pb2.Duration(seconds=RETRY_SECONDS)
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def internal_status(reference: str) -> status_pb2.Status:
    """What a client hears of an error nobody foresaw: where to look, and nothing of its text."""
    status = status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error (ref {reference}); the server's log has it")
    _add(status, error_details_pb2.ErrorInfo(reason=INTERNAL, domain=DOMAIN, metadata={"ref": reference}))
    return status


def from_rpc_error(error: grpc.RpcError) -> EngineError:
    """The engine error that `to_status` made into this status.

    A status of another origin is gRPC's own: WorkerLost where the connection broke, Cancelled, Exhausted, else EngineError.
    """
    code, message = error.code(), error.details() or ""
    reason, field = "", ""
    for detail in _details(error):
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    kind = _BY_REASON.get(reason)
    if kind is None:
        kind = _OF_GRPC.get(code, EngineError)
        cause = f"{code.name} {message}".rstrip()
        return kind(f"the connection broke: {cause}; try again" if kind is WorkerLost else f"the call failed: {cause}")
    if issubclass(kind, InvalidRequest):
        return kind(message.removeprefix(f"{field}: "), field)
    return kind(message)


def _add(status: status_pb2.Status, detail: Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    """The details of a failed call; none if they are missing or contradict its code."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return []
    return list(status.details) if status is not None else []


def _cut(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of UTF-8, which it is made to be."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "\N{HORIZONTAL ELLIPSIS}"
