from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListCorporaRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCorporaResponse(_message.Message):
    __slots__ = ("corpora",)
    CORPORA_FIELD_NUMBER: _ClassVar[int]
    corpora: _containers.RepeatedCompositeFieldContainer[Corpus]
    def __init__(self, corpora: _Optional[_Iterable[_Union[Corpus, _Mapping]]] = ...) -> None: ...

class Corpus(_message.Message):
    __slots__ = ("name", "version", "num_documents", "num_tokens", "tokenizer_fingerprint", "usable", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    num_documents: int
    num_tokens: int
    tokenizer_fingerprint: str
    usable: bool
    problem: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., num_documents: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., usable: bool = ..., problem: _Optional[str] = ...) -> None: ...
