"""Engine errors as gRPC statuses, and back."""

from __future__ import annotations

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import engine.errors
from engine.errors import EngineError, InvalidRequest, UnsupportedParameter, WorkerLost
from engine.server.errors import CODES, from_rpc_error, internal_status, to_status

ALL = [kind for _, kind in inspect.getmembers(engine.errors, inspect.isclass) if issubclass(kind, EngineError)]


class Failed(grpc.RpcError):
    """A call that ended with `status`, as a client sees it."""

    def __init__(self, status: status_pb2.Status) -> None:
        sent = rpc_status.to_status(status)
        self.code = lambda: sent.code
        self.details = lambda: sent.details
        self.trailing_metadata = lambda: sent.trailing_metadata


def details(status: status_pb2.Status) -> dict[str, object]:
    """The details by the last part of their type."""
    found: dict[str, object] = {}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
        for any_ in status.details:
            message = kind()
            if any_.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


@pytest.mark.parametrize("kind", ALL)
def test_every_error_travels(kind: type[EngineError]) -> None:
    """Each class has its line in the table, and comes back as itself with its message and field."""
    assert kind in CODES
    error = kind("what is wrong: x; do this")
    if isinstance(error, InvalidRequest):
        error.field = "sampling.top_p"
    back = from_rpc_error(Failed(to_status(error)))
    assert type(back) is kind and str(back) == str(error)
    assert getattr(back, "field", "") == getattr(error, "field", "")


def test_reasons_are_distinct() -> None:
    """A reason names one class, or clients could not tell."""
    assert len({kind.reason for kind in CODES}) == len(CODES)


def test_a_subclass_takes_its_bases_code() -> None:
    """A class that the table does not know is not an internal error if its base is known."""

    class Odd(UnsupportedParameter):
        reason = "ODD"

    status = to_status(Odd("no", "grammar"))
    assert status.code == CODES[UnsupportedParameter]
    assert status.message == "grammar: no"


def test_details_say_what_machines_need() -> None:
    """Fields at fault are named, and what may succeed later says when; others do not."""
    bad = details(to_status(InvalidRequest("must be above 0: 0", "sampling.top_p")))
    assert set(bad) == {"ErrorInfo", "BadRequest"}
    busy = details(to_status(engine.errors.Exhausted("the queue is full: 64")))
    assert set(busy) == {"ErrorInfo", "RetryInfo"}
    assert set(details(to_status(engine.errors.NotFound("no such corpus: x")))) == {"ErrorInfo"}


@pytest.mark.parametrize("text", ["x" * 100_000, "\N{GRINNING FACE}" * 50_000, "\ud800" * 3000, "\ud800"])
def test_long_texts_are_cut(text: str) -> None:
    """Details stay below 4 KB whatever a message holds, half a surrogate pair too."""
    status = to_status(InvalidRequest(text, text))
    assert len(status.SerializeToString()) < 4096
    assert 3 * len(status.message.encode()) + 4 * len(status.SerializeToString()) / 3 < 8192


def test_an_unforeseen_error_tells_nothing() -> None:
    """An internal status holds a reference to the log, and comes back as a plain EngineError."""
    status = internal_status("abc123")
    assert "abc123" in status.message
    assert type(from_rpc_error(Failed(status))) is EngineError


def test_grpcs_own_failures_mean_a_lost_worker() -> None:
    """A broken connection carries no details of ours."""
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="Socket closed")
    assert type(from_rpc_error(Failed(status))) is WorkerLost
