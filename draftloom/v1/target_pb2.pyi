from draftloom.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("model", "tokenizer_fingerprint", "vocab_size", "context_length", "eos_token_ids", "dtype", "strict", "max_rows", "protocol")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    strict: bool
    max_rows: int
    protocol: int
    def __init__(self, model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., strict: bool = ..., max_rows: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _generation_pb2.WorkerStatus
    def __init__(self, status: _Optional[_Union[_generation_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class PulseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PulseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("open", "step")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    open: OpenRequest
    step: StepRequest
    def __init__(self, open: _Optional[_Union[OpenRequest, _Mapping]] = ..., step: _Optional[_Union[StepRequest, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("opened", "step", "refused")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    opened: OpenResponse
    step: StepResponse
    refused: StepRefused
    def __init__(self, opened: _Optional[_Union[OpenResponse, _Mapping]] = ..., step: _Optional[_Union[StepResponse, _Mapping]] = ..., refused: _Optional[_Union[StepRefused, _Mapping]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("tenant", "prompt", "sampling", "max_tokens", "min_tokens", "stop_token_ids", "logprobs", "feedback_top_k", "feedback_prompt", "num_emitted")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_TOP_K_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    feedback_top_k: int
    feedback_prompt: int
    num_emitted: int
    def __init__(self, tenant: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., feedback_top_k: _Optional[int] = ..., feedback_prompt: _Optional[int] = ..., num_emitted: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("curve", "feedback", "num_reused")
    CURVE_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    NUM_REUSED_FIELD_NUMBER: _ClassVar[int]
    curve: CostCurve
    feedback: Feedback
    num_reused: int
    def __init__(self, curve: _Optional[_Union[CostCurve, _Mapping]] = ..., feedback: _Optional[_Union[Feedback, _Mapping]] = ..., num_reused: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("position", "tokens", "parents", "probs", "sources", "roles")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    position: int
    tokens: bytes
    parents: bytes
    probs: bytes
    sources: bytes
    roles: bytes
    def __init__(self, position: _Optional[int] = ..., tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., probs: _Optional[bytes] = ..., sources: _Optional[bytes] = ..., roles: _Optional[bytes] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("path", "tokens", "finish", "verified", "feedback", "logprobs", "curve", "seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: bytes
    tokens: bytes
    finish: _generation_pb2.FinishReason
    verified: bytes
    feedback: Feedback
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    curve: CostCurve
    seconds: float
    def __init__(self, path: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., finish: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., verified: _Optional[bytes] = ..., feedback: _Optional[_Union[Feedback, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., curve: _Optional[_Union[CostCurve, _Mapping]] = ..., seconds: _Optional[float] = ...) -> None: ...

class StepRefused(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class Feedback(_message.Message):
    __slots__ = ("nodes", "top_ids", "top_k", "parents", "num_lookahead")
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    nodes: bytes
    top_ids: bytes
    top_k: int
    parents: bytes
    num_lookahead: int
    def __init__(self, nodes: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_k: _Optional[int] = ..., parents: _Optional[bytes] = ..., num_lookahead: _Optional[int] = ...) -> None: ...

class CostCurve(_message.Message):
    __slots__ = ("rows", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ...) -> None: ...
