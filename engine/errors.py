"""Every error the engine raises on purpose, in one tree.

    EngineError
    + InvalidRequest            the caller's request cannot be served as written; `field` names the part
    |   + PromptTooLong         prompt and answer do not fit the model's context
    |   + UnsupportedParameter  a known field with a value (or a combination) this target cannot honour
    + NotFound                  a model or corpus that is not there (or not this tenant's)
    + CorpusUnusable            a corpus is there but cannot be drafted from (damaged, other tokenizer)
    + Unavailable               the worker is gone, draining or not ready yet; worth a retry
    |   + WorkerLost
    + Exhausted                 a bounded resource is full (queue, KV memory); worth a retry later
    + Cancelled                 the caller went away
    + ConfigError               a setting, a file or a port that start-up cannot work with
        + ModelError            weights or a tokenizer that cannot be loaded

A message says what is wrong, the value after a colon, then what to do about it.
`engine/server/errors.py` holds the one table from these classes to gRPC status codes.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised on purpose by `engine`; `reason` is a stable UPPER_SNAKE word for machines."""

    reason = "ENGINE_ERROR"


class InvalidRequest(EngineError):
    """The request cannot be served as written; `field` is the dotted name of the offending field."""

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """Prompt (and at least one new token) exceed the context of the model."""

    reason = "PROMPT_TOO_LONG"


class UnsupportedParameter(InvalidRequest):
    """A parameter this target cannot honour; refused by name, never ignored."""

    reason = "UNSUPPORTED_PARAMETER"


class NotFound(EngineError):
    """A named thing that does not exist, or belongs to someone else."""

    reason = "NOT_FOUND"


class CorpusUnusable(EngineError):
    """A corpus that exists but cannot be drafted from."""

    reason = "CORPUS_UNUSABLE"


class Unavailable(EngineError):
    """Nobody can serve this now; the same request may succeed later."""

    reason = "UNAVAILABLE"


class WorkerLost(Unavailable):
    """The target worker died or its connection broke."""

    reason = "WORKER_LOST"


class Exhausted(EngineError):
    """A bounded resource is full."""

    reason = "EXHAUSTED"


class Cancelled(EngineError):
    """The caller cancelled; nothing is wrong."""

    reason = "CANCELLED"


class ConfigError(EngineError):
    """A setting, file or port that start-up cannot work with."""

    reason = "CONFIG_ERROR"


class ModelError(ConfigError):
    """Weights or a tokenizer that cannot be found or loaded."""

    reason = "MODEL_ERROR"
