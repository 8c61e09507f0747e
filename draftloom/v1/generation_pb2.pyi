from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "max_tokens", "min_tokens", "sampling", "stopping", "logprobs", "n", "speculation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: Prompt
    max_tokens: int
    min_tokens: int
    sampling: SamplingParams
    stopping: StoppingCriteria
    logprobs: int
    n: int
    speculation: SpeculationOptions
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingCriteria, _Mapping]] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt", "max_tokens", "min_tokens", "sampling", "stopping", "logprobs", "n", "speculation", "stream")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt: Prompt
    max_tokens: int
    min_tokens: int
    sampling: SamplingParams
    stopping: StoppingCriteria
    logprobs: int
    n: int
    speculation: SpeculationOptions
    stream: StreamOptions
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingCriteria, _Mapping]] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., stream: _Optional[_Union[StreamOptions, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class StoppingCriteria(_message.Message):
    __slots__ = ("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    def __init__(self, stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: bool = ..., ignore_eos: bool = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("enabled", "max_nodes", "corpora", "require_corpus", "sources", "prediction", "use_history", "learn", "no_corpora", "trace")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_CORPUS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    USE_HISTORY_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    NO_CORPORA_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    max_nodes: int
    corpora: _containers.RepeatedScalarFieldContainer[str]
    require_corpus: bool
    sources: _containers.RepeatedScalarFieldContainer[str]
    prediction: str
    use_history: bool
    learn: bool
    no_corpora: bool
    trace: bool
    def __init__(self, enabled: bool = ..., max_nodes: _Optional[int] = ..., corpora: _Optional[_Iterable[str]] = ..., require_corpus: bool = ..., sources: _Optional[_Iterable[str]] = ..., prediction: _Optional[str] = ..., use_history: bool = ..., learn: bool = ..., no_corpora: bool = ..., trace: bool = ...) -> None: ...

class StreamOptions(_message.Message):
    __slots__ = ("min_chunk_tokens",)
    MIN_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    min_chunk_tokens: int
    def __init__(self, min_chunk_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "source_masks", "source_names", "logprobs", "finish", "usage", "seed", "statistics", "token_sizes", "steps")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MASKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NAMES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SIZES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    source_masks: _containers.RepeatedScalarFieldContainer[int]
    source_names: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: FinishInfo
    usage: Usage
    seed: int
    statistics: SpeculationStats
    token_sizes: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepTrace]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., source_masks: _Optional[_Iterable[int]] = ..., source_names: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[FinishInfo, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., seed: _Optional[int] = ..., statistics: _Optional[_Union[SpeculationStats, _Mapping]] = ..., token_sizes: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[StepTrace, _Mapping]]] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "source_masks", "source_names", "logprobs", "finish", "usage", "seed", "statistics", "token_sizes", "steps")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MASKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NAMES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SIZES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    source_masks: _containers.RepeatedScalarFieldContainer[int]
    source_names: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: FinishInfo
    usage: Usage
    seed: int
    statistics: SpeculationStats
    token_sizes: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepTrace]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., source_masks: _Optional[_Iterable[int]] = ..., source_names: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[FinishInfo, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., seed: _Optional[int] = ..., statistics: _Optional[_Union[SpeculationStats, _Mapping]] = ..., token_sizes: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[StepTrace, _Mapping]]] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("nodes", "texts", "num_lookahead", "draft_seconds", "step_seconds", "pass_seconds", "costs")
    NODES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PASS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[TraceNode]
    texts: _containers.RepeatedScalarFieldContainer[bytes]
    num_lookahead: int
    draft_seconds: float
    step_seconds: float
    pass_seconds: float
    costs: _containers.RepeatedCompositeFieldContainer[PassCost]
    def __init__(self, nodes: _Optional[_Iterable[_Union[TraceNode, _Mapping]]] = ..., texts: _Optional[_Iterable[bytes]] = ..., num_lookahead: _Optional[int] = ..., draft_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., pass_seconds: _Optional[float] = ..., costs: _Optional[_Iterable[_Union[PassCost, _Mapping]]] = ...) -> None: ...

class TraceNode(_message.Message):
    __slots__ = ("token_id", "text", "parent", "probability", "source_mask", "verified", "accepted")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MASK_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: bytes
    parent: int
    probability: float
    source_mask: int
    verified: bool
    accepted: bool
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[bytes] = ..., parent: _Optional[int] = ..., probability: _Optional[float] = ..., source_mask: _Optional[int] = ..., verified: bool = ..., accepted: bool = ...) -> None: ...

class PassCost(_message.Message):
    __slots__ = ("num_rows", "seconds")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    seconds: float
    def __init__(self, num_rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class FinishInfo(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_steps", "num_nodes", "num_accepted", "mean_tokens_per_step", "draft_seconds", "step_seconds", "prefill_seconds", "sources", "corpora", "warnings", "num_expected", "calibration_error", "log_loss", "prefix_tokens_reused")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_ERROR_FIELD_NUMBER: _ClassVar[int]
    LOG_LOSS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_REUSED_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_nodes: int
    num_accepted: int
    mean_tokens_per_step: float
    draft_seconds: float
    step_seconds: float
    prefill_seconds: float
    sources: _containers.RepeatedCompositeFieldContainer[SourceStats]
    corpora: _containers.RepeatedCompositeFieldContainer[CorpusVersion]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    num_expected: float
    calibration_error: float
    log_loss: float
    prefix_tokens_reused: int
    def __init__(self, num_steps: _Optional[int] = ..., num_nodes: _Optional[int] = ..., num_accepted: _Optional[int] = ..., mean_tokens_per_step: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[SourceStats, _Mapping]]] = ..., corpora: _Optional[_Iterable[_Union[CorpusVersion, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., num_expected: _Optional[float] = ..., calibration_error: _Optional[float] = ..., log_loss: _Optional[float] = ..., prefix_tokens_reused: _Optional[int] = ...) -> None: ...

class SourceStats(_message.Message):
    __slots__ = ("name", "num_proposed", "num_accepted", "num_unique", "num_errors", "num_late", "seconds", "trust", "num_held", "num_held_alone")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNIQUE_FIELD_NUMBER: _ClassVar[int]
    NUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_ALONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_proposed: int
    num_accepted: int
    num_unique: int
    num_errors: int
    num_late: int
    seconds: float
    trust: float
    num_held: int
    num_held_alone: int
    def __init__(self, name: _Optional[str] = ..., num_proposed: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_unique: _Optional[int] = ..., num_errors: _Optional[int] = ..., num_late: _Optional[int] = ..., seconds: _Optional[float] = ..., trust: _Optional[float] = ..., num_held: _Optional[int] = ..., num_held_alone: _Optional[int] = ...) -> None: ...

class CorpusVersion(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "tokenizer_fingerprint", "vocab_size", "context_length", "eos_token_ids", "dtype", "strict", "max_nodes", "sources")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    strict: bool
    max_nodes: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., strict: bool = ..., max_nodes: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class GetWorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: WorkerStatus
    def __init__(self, status: _Optional[_Union[WorkerStatus, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("num_workers", "num_open", "num_waiting", "num_blocks", "num_blocks_used", "num_passes", "num_read", "num_reused", "num_preempted")
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_REUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    num_workers: int
    num_open: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_passes: int
    num_read: int
    num_reused: int
    num_preempted: int
    def __init__(self, num_workers: _Optional[int] = ..., num_open: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_used: _Optional[int] = ..., num_passes: _Optional[int] = ..., num_read: _Optional[int] = ..., num_reused: _Optional[int] = ..., num_preempted: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "parse_special")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    parse_special: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., parse_special: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
