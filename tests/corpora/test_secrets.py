"""What counts as a secret, and what is left of a text without it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpora.secrets import Piece, named_like_a_secret, without_secrets

RNG = random.Random(0)
ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
DASHES = "-" * 5


def some(n: int, alphabet: str = ALNUM) -> str:
    return "".join(RNG.choice(alphabet) for _ in range(n))


BODY = [some(64) for _ in range(3)]
KEY = "\n".join([f"{DASHES}BEGIN RSA PRIVATE KEY{DASHES}", *BODY, some(20) + "==", f"{DASHES}END RSA PRIVATE KEY{DASHES}"])
TOKENS = {
    "AWS access key": "AKIA" + some(16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"),
    "AWS secret key": f'aws_secret_access_key = "{some(40)}"',
    "GitHub token": "ghp_" + some(36),
    "GitLab token": "glpat-" + some(20),
    "Slack token": f"xoxb-{some(12, '0123456789')}-{some(24)}",
    "Google API key": "AIza" + some(35),
    "OpenAI or Anthropic key": "sk-" + some(48),
    "Stripe key": "sk_live_" + some(24),
    "Hugging Face token": "hf_" + some(34),
    "npm token": "npm_" + some(36),
    "PyPI token": "pypi-AgE" + some(60),
    "JSON web token": f"eyJ{some(20)}.eyJ{some(30)}.{some(43)}",
}


@pytest.mark.parametrize(("kind", "secret"), TOKENS.items(), ids=list(TOKENS))
def test_tokens_are_known_by_their_makers_mark(kind: str, secret: str) -> None:
    """The line goes, whatever else stands in it; what is around it stays."""
    pieces, found = without_secrets(f"before = 1\nsome({secret!r})  # words\nafter = 2\n")
    assert pieces == [Piece("before = 1\n", 1), Piece("after = 2\n", 3)]
    assert found == [f"{kind} in line 2"]


@pytest.mark.parametrize(
    "block",
    [
        KEY,
        KEY.replace("KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES\n\n", 1),
        KEY.replace("\n", "\\n"),
        "\n".join(f'    "{line}\\n"' for line in KEY.splitlines()),
        KEY.rpartition("\n")[0],
        KEY.replace(" PRIVATE KEY", " PGP PRIVATE KEY BLOCK").replace("RSA ", ""),
    ],
    ids=["plain", "encrypted", "escaped", "strings", "without an end", "PGP"],
)
def test_a_private_key_goes_with_its_body(block: str) -> None:
    """All its lines, in whatever way source code holds them."""
    pieces, found = without_secrets(f"before\nKEY = [\n{block}\n]\nafter\n")
    assert found == ["private key in line 3"]
    left = "".join(piece.text for piece in pieces)
    assert left.startswith("before\nKEY = [\n") and left.endswith("]\nafter\n")
    assert not any(line[:16] in left for line in BODY)


@pytest.mark.parametrize(
    "text",
    [
        f'if text.startswith("{DASHES}BEGIN RSA PRIVATE KEY{DASHES}"):\n    raise ValueError("AKIA... is a key")\n',
        "AWS_ACCESS_KEY_ID = AKIAIOSFODNN7EXAMPLE\n",
        f"export GITHUB_TOKEN=ghp_{'x' * 36}\n",
        "task-" + "a" * 48 + "\n",
        "HF_HOME = hf_hub_download_and_something_longer_than_a_token\n",
    ],
)
def test_what_merely_names_a_secret_is_text(text: str) -> None:
    """Prefixes, placeholders, and names that begin like a token."""
    assert without_secrets(text) == ([Piece(text, 1)], [])


def test_several_secrets_make_several_pieces() -> None:
    """Each piece knows its line; neighbouring lines and two on one line leave no empty ones."""
    a, b = TOKENS["AWS access key"], TOKENS["GitHub token"]
    pieces, found = without_secrets(f"one\n{a} {b}\n{b}\n\nfive\n{a}\n")
    assert pieces == [Piece("one\n", 1), Piece("\nfive\n", 4)]
    assert [each.rpartition(" ")[2] for each in found] == ["2", "2", "3", "6"]


def test_no_text_makes_the_search_slow() -> None:
    """What almost is a key block, over and over, is looked at in one go; a backtracking search would not end."""
    begin = f"{DASHES}BEGIN PRIVATE KEY{DASHES}"
    for filler in ("\n", "\\n", "a:  ", "a: \n", "A" * 47 + " ", "A" * 48 + "\n"):
        text = (begin + filler * 150 + "\n") * 50
        without_secrets(text)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["x = 1", "", "  y", TOKENS["npm token"], TOKENS["Stripe key"]]), max_size=8), st.booleans())
def test_what_is_left_is_what_a_line_filter_leaves(lines: list[str], ends: bool) -> None:
    """Joined, the pieces are the lines without a secret, but for blank stretches; each begins where it says."""
    text = "\n".join(lines) + ("\n" if ends else "")
    secrets = (TOKENS["npm token"], TOKENS["Stripe key"])
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(secrets)]
    pieces, found = without_secrets(text)
    assert "".join(p.text for p in pieces).split() == "".join(kept).split()
    assert len(found) == sum(line in secrets for line in lines)
    for piece in pieces:
        assert "\n".join(text.split("\n")[piece.line - 1 :]).startswith(piece.text)


@pytest.mark.parametrize("name", [".env", ".env.production", "id_rsa", "server.pem", "prod.env"])
def test_some_files_are_secrets_as_a_whole(name: str) -> None:
    """By their name; examples of them are not."""
    assert named_like_a_secret(name) and not named_like_a_secret(f"{name}.example")
    assert not named_like_a_secret(f"read_{name[1:]}.py")
