"""What looks like a key or a token in a text, and the text without the lines that hold it.

The rules are few and precise: shapes that are hardly ever anything else, each with its maker's mark. Placeholders (a value that
says EXAMPLE, or is made of few different characters) are no secrets. A line that holds one ends the document it stands in: what
follows becomes another, so that nothing is drafted across the gap. O(text) a rule; a rule's marks are looked for first, since
that is many times faster than its shape.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

MIN_DISTINCT_CHARS = 8
SECRET_NAMES = (
    ".env", ".env.*", "*.env", ".netrc", ".pgpass", ".pypirc", ".htpasswd", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519",
    "*.pem", "*.p8", "*.ppk",
)  # fmt: skip
"""Files that are secrets as a whole."""
EXAMPLE_NAMES = ("*.example", "*.sample", "*.template", "*.dist")
"""Files of such names that are none."""

_ANY_NAME = re.compile("|".join(map(fnmatch.translate, SECRET_NAMES)))
_EXAMPLE_NAME = re.compile("|".join(map(fnmatch.translate, EXAMPLE_NAMES)))


@dataclass(frozen=True)
class _Rule:
    """One kind of secret: what it is called, strings of which every one of its kind has one, and its shape.

    The shape's group, if it has one, is the secret itself; what surrounds it gives it away.
    """

    kind: str
    marks: tuple[str, ...]
    shape: re.Pattern[str]
    random: bool = True
    """Whether its characters look random, so that a placeholder can be told from it."""


# A key block counts with its body, not when code merely names its first line; in source code, its lines may be strings of their
# own. Without an end in sight, it ends with the last line of its alphabet.
_GAP = r"""(?:[\s"'+,;]|\\[nr])*+"""
_PRIVATE_KEY = (
    rf"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----{_GAP}(?:[\w-]+: [^\n]*+\n++)*+[A-Za-z0-9+/=]{{48,}}+"
    rf"(?:{_GAP}[A-Za-z0-9+/=]{{16,}}+)*+(?:{_GAP}[A-Za-z0-9+/=]*+{_GAP}-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)?"
)
_RULES = (
    _Rule("private key", ("PRIVATE KEY",), re.compile(_PRIVATE_KEY), random=False),
    _Rule("AWS access key", ("AKIA", "ASIA"), re.compile(r"\b(?:AKIA|ASIA)([A-Z2-7]{16})\b")),
    _Rule(
        "AWS secret key",
        ("aws_secret", "AWS_SECRET", "awsSecret"),
        re.compile(r"\b(?i:aws_?secret_?(?:access_?)?key)\b[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"),
    ),
    _Rule(
        "GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"\b(?:gh[pousr]_([A-Za-z0-9]{36,})|github_pat_(?:[A-Za-z0-9_]{60,}))\b"),
    ),
    _Rule("GitLab token", ("glpat-",), re.compile(r"\bglpat-([A-Za-z0-9_-]{20,})")),
    _Rule("Slack token", ("xox",), re.compile(r"\bxox[abeprs]-([0-9]{10,}-[A-Za-z0-9-]{20,})")),
    _Rule("Google API key", ("AIza",), re.compile(r"\bAIza([A-Za-z0-9_-]{35})(?![A-Za-z0-9_-])")),
    _Rule(
        "OpenAI or Anthropic key",
        ("sk-",),
        re.compile(r"\bsk-((?:proj|svcacct|admin|ant-[a-z0-9]+)-[A-Za-z0-9_-]{40,}|[A-Za-z0-9]{48})(?![A-Za-z0-9_-])"),
    ),
    _Rule("Stripe key", ("k_live_",), re.compile(r"\b[rs]k_live_([A-Za-z0-9]{24,})\b")),
    _Rule("Hugging Face token", ("hf_",), re.compile(r"\bhf_([A-Za-z0-9]{34,})\b")),
    _Rule("npm token", ("npm_",), re.compile(r"\bnpm_([A-Za-z0-9]{36})\b")),
    _Rule("PyPI token", ("pypi-AgE",), re.compile(r"\bpypi-AgE([A-Za-z0-9_-]{50,})")),
    _Rule("JSON web token", ("eyJ",), re.compile(r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.([\w-]{20,})")),
)
_MARKS = tuple(mark for rule in _RULES for mark in rule.marks)


@dataclass(frozen=True)
class Piece:
    """A part of a text between lines that were left out: whole lines, of which the first is line `line` (from 1)."""

    text: str
    line: int


def named_like_a_secret(name: str) -> bool:
    """Whether a file of this name (without folders) is a secret as a whole."""
    return _ANY_NAME.match(name) is not None and _EXAMPLE_NAME.match(name) is None


def without_secrets(text: str) -> tuple[list[Piece], list[str]]:
    """`text` without the lines that hold a secret, cut there, and what was found: "AWS access key in line 12", ....

    Without any, the only piece is `text` itself. Blank pieces are dropped, so there may be none.
    """
    marks = {mark for mark in _MARKS if mark in text}
    if not marks:
        return [Piece(text, 1)], []
    found = [
        (match.start(), match.end(), rule.kind)
        for rule in _RULES
        if not marks.isdisjoint(rule.marks)
        for match in rule.shape.finditer(text)
        if not (rule.random and _is_placeholder(next((group for group in match.groups() if group), match.group())))
    ]
    if not found:
        return [Piece(text, 1)], []
    pieces, kinds, begin, line = list[Piece](), list[str](), 0, 1
    for start, end, kind in sorted(found):
        kinds.append(f"{kind} in line {1 + text.count(chr(10), 0, start)}")
        if end <= begin:  # on a line that is left out already
            continue
        cut = text.rfind("\n", begin, start) + 1 or begin
        pieces.append(Piece(text[begin:cut], line))
        resume = text.find("\n", end - 1) + 1 or len(text)
        line += text.count("\n", begin, resume)
        begin = resume
    pieces.append(Piece(text[begin:], line))
    return [piece for piece in pieces if piece.text.strip()], kinds


def _is_placeholder(secret: str) -> bool:
    """Whether it is there to be replaced: `AKIAIOSFODNN7EXAMPLE`, `ghp_xxxxxxxx...`."""
    return "EXAMPLE" in secret.upper() or len(set(secret)) < MIN_DISTINCT_CHARS
