"""What a call raises when the server refuses it, or cannot be reached.

    DraftloomError
    + InvalidRequest      the request is at fault; `violations` name the fields. Sending it again will not help
    + NotFound            no such model or corpus
    + FailedPrecondition  a required corpus cannot be used
    + Unavailable         nobody answers at this address, or the server is starting, draining or without its worker
    + Exhausted           the server is full; `retry_after` says when to try again
    + DeadlineExceeded    `timeout` ran out; the server has stopped working on it
    + Cancelled           the call was cancelled here
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request, by its name in the .proto (`sampling.top_p`), and what is wrong with it."""

    field: str
    description: str


class DraftloomError(Exception):
    """Base of all errors of this package.

    `code` is gRPC's name for the kind ("INVALID_ARGUMENT"), `reason` the server's stable word for it ("PROMPT_TOO_LONG"; "" if
    it did not answer), `violations` the fields at fault, `retry_after` the seconds to wait before a retry (None: no advice).
    """

    def __init__(
        self,
        message: str,
        code: str,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.violations = violations
        self.retry_after = retry_after


class InvalidRequest(DraftloomError):
    """The request cannot be served as written."""


class NotFound(DraftloomError):
    """A model or corpus that is not there."""


class FailedPrecondition(DraftloomError):
    """Something the request requires is not usable."""


class Unavailable(DraftloomError):
    """Nobody can serve this now."""


class Exhausted(DraftloomError):
    """The server has no room now."""


class DeadlineExceeded(DraftloomError):
    """The call took longer than its timeout."""


class Cancelled(DraftloomError):
    """The call was cancelled by this side."""


_KINDS: dict[str, type[DraftloomError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": FailedPrecondition,
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": Exhausted,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
}


def from_rpc_error(error: grpc.RpcError, address: str) -> DraftloomError:
    """The typed error for a failed call to `address`."""
    code = error.code().name
    reason, violations, retry_after = "", list[FieldViolation](), None
    for detail in _details(error):
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad):
            violations += [FieldViolation(each.field, each.description) for each in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
    message = error.details() or code
    if code == "UNAVAILABLE" and not reason:
        message = _unreachable(message, address)
    return _KINDS.get(code, DraftloomError)(message, code, reason, tuple(violations), retry_after)


_CAUSES = {
    "connection refused": "connection refused",
    "no such file": "there is no such socket",
    "parse port": "its port is not a number",
    "resol": "no such host",
    "no route": "no route to it",
    "unreachable": "its network cannot be reached",
    "handshake": "it does not encrypt as asked, or not at all",
    "time": "no reply in time",
}
"""What gRPC says, in lower case, where it cannot connect, and what that means."""


def _unreachable(message: str, address: str) -> str:
    """One plain sentence for gRPC's account of a connection that could not be made, or that broke."""
    if not re.search("connect to all addresses|resol", message):
        return f"the connection to {address} broke: {message}; try again"
    cause = next((meaning for word, meaning in _CAUSES.items() if word in message.lower()), message)
    return f"no server answers at {address}: {cause}; start one with `draftloom serve`, or name another address"


def _details(error: grpc.RpcError) -> list[rpc_status.any_pb2.Any]:
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict the code are no server's of ours
        return []
    return list(status.details) if status is not None else []
