"""Files of records, one JSON object a line (`.jsonl`, `.ndjson`, plain or gzipped): each holds a text or a conversation.

Only files that are named are read so; below a folder, they are text like any other. A record is an entry of its own, called by
its line: `chats.jsonl#17`. Of a conversation, each message becomes a document (`chats.jsonl#17:3` is the third), or all of it
becomes one, as the model's chat template writes it. A conversation ends before a message that holds a secret.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from corpora.decisions import Decision, Reason
from corpora.filter import Part, Refusal, Text, divide, whole_characters
from corpora.inputs import EncodeChat, Entry, fault_of, file_named, refused
from corpora.options import BuildOptions
from corpora.secrets import without_secrets
from corpora.walk import printable, stamp_of

ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
FIELDS = ("text", "content", "messages", "conversations")
"""Usual names of what holds the text or the messages, in the order in which they are looked for."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""Other names of roles."""


def open_source(spec: str, prefix: str, options: BuildOptions, encode_chat: EncodeChat | None) -> RecordsSource | None:
    """The source, None if `spec` is no file of such a name."""
    path = file_named(spec, ENDINGS)
    if path is None:
        return None
    return RecordsSource(str(path), path, prefix.rstrip("/") or printable(path.name), options, encode_chat)


@dataclass(frozen=True)
class RecordsSource:
    """The lines of a file that are not blank; entries are called `name`#line."""

    spec: str
    path: Path
    name: str
    options: BuildOptions
    encode_chat: EncodeChat | None
    streamed = True
    resolved = ""

    def entries(self) -> Iterator[Entry]:
        """In the file's order. A line longer than `max_file_size` is one decision, and never in memory as a whole."""
        try:
            with open(self.path, "rb") as raw:
                stamp = stamp_of(os.fstat(raw.fileno()))
                file = gzip.GzipFile(fileobj=raw) if self.path.name.lower().endswith(".gz") else raw
                for number, line, size in _lines(file, self.options.max_file_size):
                    decision = Decision(self.path / str(number), f"{self.name}#{number}", True, num_bytes=size, stamp=stamp)
                    yield Entry(decision, partial(self._read, line))
        except (OSError, EOFError, zlib.error) as error:
            yield refused(self.path, self.name, Reason.UNREADABLE, fault_of(error))

    def _read(self, line: bytes | None) -> Text | Refusal:
        if line is None:
            return Refusal(Reason.TOO_LARGE)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Refusal(Reason.MALFORMED, f"not JSON: {error}")
        if not isinstance(record, Mapping):
            return Refusal(Reason.MALFORMED, "not an object")
        return read_record(record, len(line), self.options, self.encode_chat)


def read_record(
    record: Mapping[str, Any], num_bytes: int, options: BuildOptions, encode_chat: EncodeChat | None
) -> Text | Refusal:
    """The text, or the conversation, in a record."""
    field = options.field or next((field for field in FIELDS if record.get(field) is not None), "")
    value = record.get(field)
    if isinstance(value, str):
        return divide(_clean(value), num_bytes)
    if not isinstance(value, Sequence):
        return Refusal(Reason.MALFORMED, f"no text or messages in {options.field or ', '.join(FIELDS)}")
    messages = [message for each in value if (message := _message(each))]
    if len(messages) < len(value):
        return Refusal(Reason.MALFORMED, f"{field} holds what is no message")
    wanted = {n: m for n, m in enumerate(messages, 1) if not options.roles or m["role"] in options.roles}
    return _conversation(wanted, num_bytes, encode_chat) if options.chat else _each_message(wanted, num_bytes)


def _each_message(messages: Mapping[int, Mapping[str, str]], num_bytes: int) -> Text | Refusal:
    """Messages by their number, each as a part of its own."""
    parts, secrets = list[Part](), list[str]()
    for number, message in messages.items():
        text = divide(message["content"], 0)
        if isinstance(text, Text):
            secrets.extend(f"{secret} of message {number}" for secret in text.secrets)
            parts.extend(Part(part.content, f"{number}.{part.place}".rstrip(".")) for part in text.parts)
        elif text.reason is Reason.SECRET:
            secrets.append(f"{text.detail} of message {number}")
    if not parts:
        return Refusal(Reason.SECRET, ", ".join(secrets)) if secrets else Refusal(Reason.EMPTY)
    return Text(tuple(parts), num_bytes, tuple(secrets))


def _conversation(messages: Mapping[int, Mapping[str, str]], num_bytes: int, encode_chat: EncodeChat | None) -> Text | Refusal:
    """All of it in the chat template, up to a message that holds a secret."""
    assert encode_chat is not None, "opening sources refuses options.chat without it"
    said, secrets = list[Mapping[str, str]](), list[str]()
    for number, message in messages.items():
        secrets = [f"{secret} of message {number}" for secret in without_secrets(message["content"])[1]]
        if secrets:
            break
        said.append(message)
    if not any(message["content"].strip() for message in said):
        return Refusal(Reason.SECRET, ", ".join(secrets)) if secrets else Refusal(Reason.EMPTY)
    try:
        return Text((Part(encode_chat(said)),), num_bytes, tuple(secrets))
    except ValueError as error:
        return Refusal(Reason.MALFORMED, str(error))


def _message(value: Any) -> dict[str, str] | None:
    """{role, content} of a message as OpenAI's or ShareGPT's files write it, content "" if there is no text; else None."""
    if not isinstance(value, Mapping):
        return None
    role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    if not isinstance(role, str) or not isinstance(content, str | None):
        return None
    return {"role": ROLES.get(role, role), "content": _clean(content or "")}


def _clean(text: str) -> str:
    return whole_characters(text.replace("\r\n", "\n").replace("\r", "\n"))


def _lines(file: BinaryIO | gzip.GzipFile, max_bytes: int) -> Iterator[tuple[int, bytes | None, int]]:
    """(number, line, its bytes) of every line that is not blank; None for a line of more than `max_bytes`, which is skipped."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        size, whole = len(line), True
        while not line.endswith(b"\n") and (rest := file.readline(max_bytes + 1)):
            line, size, whole = rest, size + len(rest), False
        if not whole or line.strip():
            yield number, line if whole else None, size
