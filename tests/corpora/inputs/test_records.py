"""JSON lines and Parquet: a text or a conversation in each record."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpora.build import chat_encoder
from corpora.decisions import Reason
from corpora.errors import InvalidOptions
from corpora.inputs import open_sources
from corpora.options import BuildOptions
from corpora.survey import Found, Survey
from engine.text import Tokenizer
from tests import tiny_tokenizers

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level(), chat_template=tiny_tokenizers.TEMPLATE)
CHAT = [
    {"role": "user", "content": "Say <|im_end|> twice."},
    {"role": "assistant", "content": "The quick brown fox.\nTwice."},
]
TOKEN = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2


def write(path: Path, records: Sequence[Any]) -> Path:
    """A file of the kind that its name says."""
    if path.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), path)
        return path
    data = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def survey(path: Path, known: Mapping[str, Found] | None = None, **options: object) -> dict[str, Found]:
    chosen = BuildOptions(**options)  # type: ignore[arg-type]
    return {f.decision.name: f for f in Survey(open_sources([str(path)], chosen, chat_encoder(TOKENIZER)), chosen, known)}


def texts(path: Path, **options: object) -> dict[str, Any]:
    return {d.name: d.content for f in survey(path, **options).values() for d in f.documents}


def reasons(path: Path, **options: object) -> dict[str, Reason | None]:
    return {name: f.decision.reason for name, f in survey(path, **options).items()}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.parquet"])
def test_each_record_is_a_document(name: str, tmp_path: Path) -> None:
    """Called by its number; line ends become line feeds, copies are stored once."""
    path = write(tmp_path / name, [{"text": "one\r\ntwo", "id": 1}, {"text": "three", "id": 2}, {"text": "three", "id": 3}])
    assert texts(path) == {f"{name}#1": "one\ntwo", f"{name}#2": "three"}
    assert reasons(path)[f"{name}#3"] is Reason.DUPLICATE


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_each_message_is_a_document(name: str, tmp_path: Path) -> None:
    """In order, or only those of some roles; other names for messages and roles are understood."""
    path = write(tmp_path / name, [{"messages": CHAT}])
    assert texts(path) == {f"{name}#1:1": CHAT[0]["content"], f"{name}#1:2": CHAT[1]["content"]}
    assert texts(path, roles=("assistant",)) == {f"{name}#1:2": CHAT[1]["content"]}
    assert reasons(path, roles=("tool",)) == {f"{name}#1": Reason.EMPTY}
    other = write(tmp_path / f"o{name}", [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])
    assert texts(other, roles=("assistant",)) == {f"o{name}#1:2": "b"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_conversation_in_the_chat_template_is_one_document(name: str, tmp_path: Path) -> None:
    """Its ids are those of a prompt with the same messages: what only looks like a control token inside a message is text."""
    ids = texts(write(tmp_path / name, [{"messages": CHAT}]), chat=True)[f"{name}#1"]
    np.testing.assert_array_equal(ids, TOKENIZER.encode_chat(CHAT, add_generation_prompt=False))
    end = TOKENIZER.token_id("<|im_end|>")
    assert list(ids).count(end) == 2


def test_a_field_can_be_named(tmp_path: Path) -> None:
    """Then no other is looked at; a column that is not there is said of the file."""
    records = [{"text": "a", "answer": "b"}, {"text": "c"}]
    assert texts(write(tmp_path / "a.jsonl", records), field="answer") == {"a.jsonl#1": "b"}
    assert reasons(tmp_path / "a.jsonl", field="answer")["a.jsonl#2"] is Reason.MALFORMED
    write(tmp_path / "a.parquet", records)
    assert texts(tmp_path / "a.parquet", field="answer") == {"a.parquet#1": "b"}
    assert reasons(tmp_path / "a.parquet", field="nothing") == {"a.parquet": Reason.MALFORMED}


def test_a_secret_ends_a_conversation(tmp_path: Path) -> None:
    """As one document, it ends before the message that holds it; message by message, the line goes."""
    path = write(tmp_path / "a.jsonl", [{"messages": [*CHAT, {"role": "user", "content": f"my token:\n{TOKEN}\nis it safe?"}]}])
    (found,) = survey(path, chat=True).values()
    np.testing.assert_array_equal(found.documents[0].content, TOKENIZER.encode_chat(CHAT, add_generation_prompt=False))
    assert found.decision.reason is Reason.SECRET and found.decision.taken and "of message 3" in found.decision.detail
    parts = {name: text for name, text in texts(path).items() if name.startswith("a.jsonl#1:3")}
    assert parts == {"a.jsonl#1:3": "my token:\n", "a.jsonl#1:3.3": "is it safe?"}
    alone = write(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": TOKEN}]}, {"text": TOKEN}])
    assert set(reasons(alone).values()) == set(reasons(alone, chat=True).values()) == {Reason.SECRET}


def test_what_is_no_record_is_refused_one_by_one(tmp_path: Path) -> None:
    """With the reason; blank lines are nothing; the good ones are taken."""
    bad: list[Any] = ["not json", "[1]", "3", "[" * 100_000, {"other": 1}, {"messages": [1]}]
    path = write(tmp_path / "a.jsonl", ["", *bad, {"text": ""}, {"text": " \n"}, {"text": "ok"}])
    assert list(reasons(path).values()) == [Reason.MALFORMED] * 6 + [Reason.EMPTY] * 2 + [None]


def test_a_long_line_is_skipped_without_reading_it_whole(tmp_path: Path) -> None:
    """It is one decision, and the next line is found."""
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 5000}, {"text": "y"}])
    assert reasons(path, max_file_size=100) == {"a.jsonl#1": Reason.TOO_LARGE, "a.jsonl#2": None}


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    """What came before is kept."""
    path = write(tmp_path / "a.jsonl.gz", [{"text": f"{n} {n * n}"} for n in range(5000)])
    path.write_bytes(path.read_bytes()[:9000])
    found = reasons(path)
    assert found["a.jsonl.gz"] is Reason.UNREADABLE and found["a.jsonl.gz#1"] is None


def test_a_damaged_table_says_so(tmp_path: Path) -> None:
    """Instead of failing the build."""
    pytest.importorskip("pyarrow")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    assert reasons(tmp_path / "b.parquet") == {"b.parquet": Reason.UNREADABLE}


def test_below_a_folder_records_are_text(tmp_path: Path) -> None:
    """Only a file that is named is taken apart."""
    write(tmp_path / "a.jsonl", [{"text": "x"}])
    assert texts(tmp_path) == {"a.jsonl": '{"text": "x"}\n'}


def test_a_template_needs_a_model(tmp_path: Path) -> None:
    """Without its tokenizer, the wish is refused."""
    with pytest.raises(InvalidOptions, match="chat template needs a model"):
        open_sources([str(tmp_path)], BuildOptions(chat=True))


def test_what_a_template_refuses_is_skipped(tmp_path: Path) -> None:
    """A template may want roles to take turns."""
    strict = Tokenizer(tiny_tokenizers.byte_level(), chat_template="{{ raise_exception('roles must alternate') }}")
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    options = BuildOptions(chat=True)
    (found,) = Survey(open_sources([str(path)], options, chat_encoder(strict)), options)
    assert found.decision.reason is Reason.MALFORMED and "roles must alternate" in found.decision.detail


def test_a_grown_file_keeps_its_old_records(tmp_path: Path) -> None:
    """They are read, found the same, and not stored again."""
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    known = survey(path)
    write(path, [{"text": "one"}, {"text": "two"}, {"text": "three"}])
    again = survey(path, known)
    assert [f.unchanged for f in again.values()] == [True, True, False]
