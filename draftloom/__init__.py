"""Draftloom's client.

    import draftloom

    with draftloom.Client("127.0.0.1:50151") as client:
        print(client.generate("def fibonacci(n):", corpora="mycode").text)

        with client.stream("def fibonacci(n):", corpora="mycode") as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print(stream.completion.statistics.tokens_per_step)

`AsyncClient` is the same for asyncio. It needs grpcio, grpcio-status and protobuf, nothing of the engine; `draftloom.v1` holds
the generated stubs for those who want the messages themselves.
"""

from draftloom.client import DEFAULT_ADDRESS, AsyncClient, AsyncStream, Client, Stream
from draftloom.errors import (
    Cancelled,
    DeadlineExceeded,
    DraftloomError,
    Exhausted,
    FailedPrecondition,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Unavailable,
)
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

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "Corpus",
    "DeadlineExceeded",
    "DraftloomError",
    "Exhausted",
    "FailedPrecondition",
    "FieldViolation",
    "InvalidRequest",
    "ModelInfo",
    "NotFound",
    "Options",
    "Prompt",
    "SourceStatistics",
    "Statistics",
    "StepTrace",
    "Stream",
    "TokenLogprob",
    "TraceNode",
    "Unavailable",
    "Usage",
    "WorkerStatus",
]
