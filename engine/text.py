"""Between text and token ids: tokenizers, their fingerprints, streaming detokenization, stop strings, chat templates.

`Tokenizer` reads a model's `tokenizer.json` through the `tokenizers` library and knows the exact bytes of every token, so that
text is always "the tokens' bytes, joined, read as UTF-8". `StreamDecoder` turns ids into text one at a time under the two rules
of streaming: no half character and no half stop string ever goes out.

Control tokens (`<|im_end|>`, `<s>`, ...) are not text, in neither direction: a text that merely looks like one is encoded as
the characters it is made of, and a control token decodes to nothing. `special=True` asks for the opposite.

Importing this module needs `tokenizers`; numpy is loaded by the first ids, jinja2 by the first chat template.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from engine.errors import InvalidRequest, ModelError, UnsupportedParameter

if TYPE_CHECKING:
    import jinja2
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ModelError", "Piece", "StreamDecoder", "Tokenizer"]

Message = Mapping[str, Any]
"""One chat message: at least `role` and `content`, both strings."""

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_CHAT_CHARS = 16 * 1024 * 1024
MAX_TEMPLATE_SECONDS = 2.0

# What every copy of one tokenizer must split alike: words, code, digits, indentation, scripts, an emoji, raw white space.
_PROBE = (
    'def probe(xs: list[int]) -> str:\n    """Return 12345 + 0.5."""\n\treturn f"{xs[0]!r}"  # it\'s\r\n\n\n'
    "Größe naïve 推測解碼 спекуляция 👩🏽‍🚀 \u00a0\u200b<tag/> https://example.org/?a=1&b=2 ______ ===== \n        x += 1\n"
)
_CONTROL_NAME = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # U+FF5C is the full-width bar of DeepSeek's names


class Tokenizer:
    """One model's tokenizer: text to ids and back, exactly. Immutable; safe to share between threads.

    Understood are byte-level BPE (GPT-2's byte alphabet: Llama 3, Qwen, SmolLM, ...) and SentencePiece-like tokenizers
    (`▁` for a space, `<0xNN>` for a byte: Llama 2, Mistral, Gemma, ...). Anything else is refused when it is loaded, since the
    bytes of a token would be a guess.
    """

    def __init__(
        self,
        definition: str,
        *,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`definition` is the text of a `tokenizer.json`; `template_tokens` (`bos_token`, `eos_token`, ...) are what the chat
        template calls them by; the one named `eos_token` ends a text as well as `eos_ids` do.

        Raises ModelError for a definition that cannot be parsed or is of a kind that is not understood.
        """
        self._definition = definition
        self._plain = _parse(definition)
        self._decoder_steps = _understood(self._plain)
        self._added = added = self._plain.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in added.items() if token.special or _CONTROL_NAME.fullmatch(token.content)
        )
        """Ids of control tokens: those marked special, and those named like one (`<|fim_prefix|>`) though not marked."""
        self._control_strings = sorted((added[i].content for i in self.special_ids if added[i].content), key=len, reverse=True)
        self._plain.add_special_tokens(
            [tokenizers.AddedToken(text, special=True, normalized=False) for text in self._control_strings]
        )
        self._plain.encode_special_tokens = True
        self._chat_template = chat_template
        self._template_tokens = dict(template_tokens or {})
        eos = self.token_id(self._template_tokens.get("eos_token", ""))
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *([] if eos is None else [eos])}))
        """Ids that end a text, rising; empty if the model's files name none."""
        self._num_prefix_spaces = max(map(_num_stripped, self._decoder_steps), default=0)

    @staticmethod
    def load(folder: Path | str) -> Tokenizer:
        """Read `tokenizer.json` in `folder` and, where they exist, `tokenizer_config.json`, `special_tokens_map.json`,
        `chat_template.jinja`, and `generation_config.json` or else `config.json` (for end-of-sequence ids).

        Raises ModelError, naming the file, for one that is missing or cannot be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            definition = path.read_bytes().decode()  # `read_text` takes twice as long for its ten megabytes
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"tokenizer cannot be read: {path}: {error}; give a folder that has a tokenizer.json") from None
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        names = {key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value)) is not None}
        template_path = folder / "chat_template.jinja"
        template = template_path.read_text(encoding="utf-8") if template_path.exists() else _template_of(config)
        try:
            return Tokenizer(definition, eos_ids=end_of_text_ids(folder), chat_template=template, template_tokens=names)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id of a token. A model's logits may be wider (padding); such ids have no text."""
        return len(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of every id, made when first asked for: who only encodes has no use for them."""
        named = self._plain.get_vocab(with_added_tokens=True)
        vocabulary = {
            token: i for token, i in named.items() if token != f"[PAD{i}]"
        }  # how GGUF files fill up to the logits' width
        return _token_table(self._decoder_steps, vocabulary, self._added)

    # text to ids

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int32]:
        """The ids of `text`, int32 [n]; nothing is put in front or behind. Empty text gives an empty array.

        Strings that look like control tokens are plain text unless `special`.
        """
        return _ids(self._encoder(special).encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> NDArray[np.int32]:
        """The ids of a text that begins a sequence: `encode`, after what the model expects in front of it (BOS, if any)."""
        import numpy as np

        return np.concatenate([self._lead_in, self.encode(text)])

    @cached_property
    def _lead_in(self) -> NDArray[np.int32]:
        """The control tokens that the tokenizer's own post-processing puts in front of a text."""
        import numpy as np

        ids = _ids(self._plain.encode("a", add_special_tokens=True))
        ordinary = np.flatnonzero(~np.isin(ids, list(self.special_ids)))
        return ids[: ordinary[0]] if len(ordinary) else ids[:0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[NDArray[np.int32]]:
        """`encode` for each text, on all cores."""
        return [_ids(e) for e in self._encoder(special).encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch_packed(self, texts: Sequence[str]) -> list[bytes]:
        """`encode_batch`, as the bytes of the arrays. Loads no numpy."""
        return [array("i", e.ids).tobytes() for e in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _encoder(self, special: bool) -> tokenizers.Tokenizer:
        return self._parsing_control if special else self._plain

    @cached_property
    def _parsing_control(self) -> tokenizers.Tokenizer:
        """A second copy, since whether control tokens are parsed is a state of the library's object."""
        return _parse(self._definition)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary (`<|im_end|>`), None if there is none."""
        return self._plain.token_to_id(token)

    # ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; a control token's are its name in UTF-8. Ids that are not in the vocabulary have none.

        Raises ValueError for a negative id.
        """
        if token_id < 0:
            raise ValueError(f"token id is negative: {token_id}")
        return self._bytes[token_id] if token_id < self.vocab_size else b""

    def text_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """What a token adds to a text: `token_bytes`, but nothing for a control token unless `special`."""
        return b"" if token_id in self.special_ids and not special else self.token_bytes(token_id)

    def decode(self, ids: Iterable[int] | NDArray[np.int32], *, special: bool = False, continuing: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8, a cut last character among them, become U+FFFD.

        SentencePiece-like tokenizers put a space in front of every text; it is taken off again, unless `continuing`: then `ids`
        go on a text, and the first token's space is a real one. Empty ids give an empty text.
        """
        data = b"".join(self.text_bytes(int(i), special=special) for i in ids)
        if not continuing:
            spaces = len(data) - len(data.lstrip(b" "))
            data = data[min(spaces, self._num_prefix_spaces) :]
        return data.decode("utf-8", errors="replace")

    @cached_property
    def checksum(self) -> str:
        """32 hex digits over the definition and the release of the library that reads it. Who agrees in it has one fingerprint.

        O(the definition's size), a few milliseconds.
        """
        library = f"tokenizers {tokenizers.__version__}\n".encode()
        return hashlib.blake2b(library + self._definition.encode(), digest_size=16).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over every token's bytes, the special ids, and the ids of a fixed probe text.

        Copies of one tokenizer agree however their files are written; a corpus and a model must share one. O(vocabulary).
        """
        digest = hashlib.blake2b(b"draftloom tokenizer 1\n", digest_size=16)
        for token in self._bytes:
            digest.update(len(token).to_bytes(4, "little") + token)
        for ids in (sorted(self.special_ids), self.encode(_PROBE).tolist()):
            digest.update(b"".join(i.to_bytes(4, "little") for i in ids))
        return digest.hexdigest()

    # chat

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt that the model's chat template makes of `messages`. To encode it safely, use `encode_chat`.

        The template runs in jinja2's immutable sandbox with bounds on its source, on what it adds, multiplies and joins, on its
        output, and on its time (looked at whenever it writes or counts). Raises UnsupportedParameter if the model has no
        template, InvalidRequest if it refuses the messages or breaks a bound.
        """
        if self._chat_template is None:
            raise UnsupportedParameter("this model has no chat template; send text instead of messages", "messages")
        if not messages:
            raise InvalidRequest("messages are empty; send at least one", "messages")
        return _render(self._chat_template, self._template_tokens, messages, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> NDArray[np.int32]:
        """The ids of `chat(messages)`, int32 [n]: the template's control tokens are parsed, those inside messages are not.

        So nobody can end a turn, or speak as the system, by writing `<|im_end|>`. Raises what `chat` raises.
        """
        import numpy as np

        if not self._control_strings:
            return self.encode(self.chat(messages, add_generation_prompt), special=True)
        mark = _unused_mark(messages)
        control = re.compile("|".join(map(re.escape, self._control_strings)))
        found: list[str] = []

        def hide(match: re.Match[str]) -> str:
            found.append(match.group())
            return f"{mark}{len(found) - 1}{mark}"

        text = self.chat([_map_strings(message, lambda s: control.sub(hide, s)) for message in messages], add_generation_prompt)
        parts = re.split(f"{mark}([0-9]+){mark}", text)
        encoded = [self.encode(found[int(p)]) if odd % 2 else self.encode(p, special=True) for odd, p in enumerate(parts)]
        return np.concatenate(encoded)


@dataclass(frozen=True)
class Piece:
    """What one token let out: `text` (may be empty), and whether a stop string is complete, and which."""

    text: str
    stopped: bool = False
    stop_string: str | None = None


class StreamDecoder:
    """Ids in, text out, as early as it is certain.

    1. The pieces and what `finish` returns, joined, are `tokenizer.decode(ids, continuing=True)`, or that up to a stop string.
    2. Bytes that a later token may complete to a character are held back; only bytes which nothing can complete become U+FFFD.
    3. Any end of the text that may begin a stop string is held back.
    4. The stop string that is complete first, character by character, wins (of several at one character, the longest), so that
       the text does not depend on how it is cut into tokens. Text ends right before it, or right after it if `include_stop`.
    5. The token that completes it is the last: pushing another, or after `finish`, raises RuntimeError.

    A token costs O(its text x number of stop strings + longest stop string).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        if "" in stop:
            raise ValueError("stop string is empty; leave it out")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._beginnings = frozenset(s[:n] for s in self._stop for n in range(1, len(s)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._done = False

    def push(self, token_id: int, *, may_stop: bool = True) -> Piece:
        """Take one token; returns the text that has become certain.

        Unless `may_stop` (a request may want a minimum of tokens first), a stop string that this token completes is plain text.
        """
        if self._done:
            raise RuntimeError("the text has ended: no token may follow a stop string or finish()")
        text = self._held + self._utf8.decode(self._tokenizer.text_bytes(token_id))
        num_seen = len(self._held)  # a stop string that ends here ended when it was not to count
        found = [
            (start + len(s), start, s)
            for s in self._stop
            if may_stop and (start := text.find(s, max(0, num_seen - len(s) + 1))) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held, self._done = "", True
            return Piece(text[: end if self._include_stop else start], True, stop)
        certain = len(text) - self._num_uncertain(text)
        self._held = text[certain:]
        return Piece(text[:certain])

    def finish(self) -> str:
        """What was held back, since nothing follows; an incomplete character becomes U+FFFD. Empty after a stop string."""
        if self._done:
            return ""
        self._done = True
        return self._held + self._utf8.decode(b"", final=True)

    def _num_uncertain(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(self._longest, len(text))
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)


# reading a tokenizer


def _parse(definition: str) -> tokenizers.Tokenizer:
    """The library's tokenizer, without truncation or padding. Raises ModelError."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer definition cannot be parsed: {error}; fetch the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids(encoding: tokenizers.Encoding) -> NDArray[np.int32]:
    import numpy as np

    return np.array(encoding.ids, np.int32)


def _understood(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of its decoder, if they say what the bytes of a token are. Raises ModelError."""
    steps = list(_decoder_parts(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" not in kinds and not any(map(_space_mark, steps)):
        raise ModelError(f"tokenizer is of a kind that is not supported: decoder {sorted(kinds) or 'absent'}; "
                         "use a model with a byte-level or SentencePiece-like tokenizer")  # fmt: skip
    return steps


def _token_table(
    steps: Sequence[Mapping[str, Any]],
    vocabulary: Mapping[str, int],
    added: Mapping[int, tokenizers.AddedToken],
) -> list[bytes]:
    """Every id's bytes, up to the highest of the vocabulary; none for a hole in it."""
    size = max(vocabulary.values(), default=-1) + 1
    if any(step["type"] == "ByteLevel" for step in steps):
        table = _byte_level_bytes(vocabulary, size)
    else:
        table = _sentencepiece_bytes(vocabulary, size, next(mark for step in steps if (mark := _space_mark(step))))
    for i, token in added.items():
        table[i] = token.content.encode("utf-8")
    return table


def _decoder_parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A decoder's steps, with nested sequences laid flat."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_parts(part)
    else:
        yield decoder


def _space_mark(part: Mapping[str, Any]) -> str:
    """The character that stands for a space, "" if this step knows none."""
    if part["type"] == "Metaspace":
        return str(part["replacement"])
    if part["type"] == "Replace" and part["content"] == " ":
        return str(part["pattern"].get("String", ""))
    return ""


def _num_stripped(part: Mapping[str, Any]) -> int:
    """How many leading spaces this step takes off a text."""
    if part["type"] == "Metaspace":
        return int(part.get("prepend_scheme", "always") != "never")
    return int(part["start"]) if part["type"] == "Strip" and part["content"] == " " else 0


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection between characters and bytes: printable Latin-1 is itself, the other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _byte_level_bytes(vocabulary: Mapping[str, int], size: int) -> list[bytes]:
    """Characters to bytes; a token with a character outside the alphabet stands for itself in UTF-8."""
    alphabet = _byte_alphabet()
    table = [b""] * size
    for token, i in vocabulary.items():
        try:
            table[i] = bytes([alphabet[c] for c in token])
        except KeyError:
            table[i] = token.encode("utf-8")
    return table


def _sentencepiece_bytes(vocabulary: Mapping[str, int], size: int, space: str) -> list[bytes]:
    """`<0xNN>` is a byte, the space mark a space, all else UTF-8."""
    table = [b""] * size
    for token, i in vocabulary.items():
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        table[i] = bytes.fromhex(byte.group(1)) if byte else token.replace(space, " ").encode("utf-8")
    return table


# reading the files beside it


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} if there is no such file. Raises ModelError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model file cannot be read: {path}: {error}; fetch the model again") from None
    return value if isinstance(value, dict) else {}


def _content(value: object) -> str | None:
    """A token's text: written as a string, or as an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_of(config: Mapping[str, Any]) -> str | None:
    """`chat_template` as a string, or the one named default in a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def end_of_text_ids(folder: Path) -> list[int]:
    """The end-of-sequence ids in a model's folder: `generation_config.json` says, else `config.json`; [] if neither does."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if found := [i for i in ids if isinstance(i, int) and i >= 0]:
            return found
    return []


# chat templates


def _unused_mark(messages: Sequence[Message]) -> str:
    """A private-use character that no message contains."""
    seen: set[str] = set()
    for message in messages:
        _map_strings(message, lambda s: seen.update(s) or s)  # type: ignore[func-returns-value]
    mark = next((chr(c) for c in range(0xE000, 0xF900) if chr(c) not in seen), None)
    if mark is None:
        raise InvalidRequest("messages use every private-use character of Unicode; leave some out", "messages")
    return mark


def _map_strings(value: Any, function: Any) -> Any:
    """A copy of nested lists and mappings with `function` applied to every string value (not to keys)."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, function) for item in value]
    return value


def _render(template: str, tokens: Mapping[str, str], messages: Sequence[Message], add_generation_prompt: bool) -> str:
    import jinja2

    if len(template) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(f"chat template is too long: {len(template)} characters, at most {MAX_TEMPLATE_CHARS}", "messages")
    deadline = time.monotonic() + MAX_TEMPLATE_SECONDS
    out, size = list[str](), 0
    try:
        compiled = _sandbox(deadline).from_string(template)
        for piece in compiled.generate(messages=list(messages), add_generation_prompt=add_generation_prompt, **tokens):
            out.append(piece)
            size += len(piece)
            if size > MAX_CHAT_CHARS:
                raise _TemplateLimit(f"writes more than {MAX_CHAT_CHARS} characters")
            _check_time(deadline)
    except (jinja2.TemplateError, _TemplateLimit, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(f"chat template refuses the messages: {error}; check roles and their order", "messages") from None
    return "".join(out)


class _TemplateLimit(Exception):
    """A template did more than a prompt can need."""


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _TemplateLimit(f"runs longer than {MAX_TEMPLATE_SECONDS:g} s")


def _result_size(operator: str, left: Any, right: Any) -> float:
    """How large `left operator right` can get: characters or items of sequences, the value of a product of numbers."""
    if operator == "**":
        return math.inf
    sequences = [isinstance(v, str | list | tuple) for v in (left, right)]
    if operator == "+":
        return len(left) + len(right) if all(sequences) else 0
    return math.prod(len(v) if isinstance(v, str | list | tuple) else abs(v) for v in (left, right) if not isinstance(v, dict))


def _sandbox(deadline: float) -> jinja2.Environment:
    """jinja2's immutable sandbox, in which sequences cannot outgrow a prompt and loops look at the clock."""
    import jinja2
    from jinja2.compiler import CodeGenerator
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

    def bounded(size: float) -> None:
        _check_time(deadline)
        if size > MAX_CHAT_CHARS:
            raise _TemplateLimit(f"builds a value larger than {MAX_CHAT_CHARS}")

    class Generator(CodeGenerator):
        def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:
            """`a ~ b`, which the sandbox itself cannot intercept."""
            self.write("environment.concatenate(")
            for item in node.nodes:
                self.visit(item, frame)
                self.write(", ")
            self.write(")")

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; for a prompt it means nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset(("+", "*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bounded(_result_size(operator, left, right))
            return super().call_binop(context, operator, left, right)

        def concatenate(self, *values: Any) -> str:
            texts = [str(v) for v in values]
            bounded(sum(map(len, texts)))
            return "".join(texts)

    def checked_range(*args: int) -> Iterator[int]:
        for i in safe_range(*args):
            _check_time(deadline)
            yield i

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    sandbox.globals.update(range=checked_range, raise_exception=refuse, strftime_now=time.strftime)
    sandbox.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return sandbox
