"""What a file's first lines say about its licence."""

from __future__ import annotations

import pytest

from corpora.licences import excluded, stated

GPL = """/* This program is free software; you can redistribute it and/or modify it under the terms of
 * the GNU General Public License as published by the Free Software Foundation; either
 * version 2 of the License, or (at your option) any later version. */"""
LGPL = "# under the GNU Lesser General Public License, version 2.1, as published by the Free Software Foundation."


@pytest.mark.parametrize(
    ("head", "expression"),
    [
        ("// SPDX-License-Identifier: MIT\n", "MIT"),
        ("/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */\n", "GPL-2.0-only WITH Linux-syscall-note"),
        ("<!-- SPDX-License-Identifier: Apache-2.0 OR MIT -->\n", "Apache-2.0 OR MIT"),
        (GPL, "GPL-2.0-or-later"),
        (LGPL, "LGPL-2.1-only"),
        ("# GNU Affero General Public License v3\n", "AGPL"),
        ("# General Relativity\n", ""),
        ("", ""),
    ],
)
def test_what_a_head_states(head: str, expression: str) -> None:
    """A tag wins; the notices of the GNU licences are read."""
    assert stated(head) == expression


@pytest.mark.parametrize(
    ("expression", "unwanted", "is_excluded"),
    [
        ("GPL-3.0-only", ["GPL-3.0-only"], True),
        ("gpl-3.0-ONLY", ["GPL-3.0-only"], True),
        ("GPL-3.0-or-later", ["GPL-3.0-only"], False),
        ("GPL-3.0-or-later", ["GPL-3.0"], True),
        ("GPL-3.0+", ["GPL-3.0"], True),
        ("MIT OR GPL-3.0-only", ["GPL-3.0-only"], False),
        ("MIT AND GPL-3.0-only", ["GPL-3.0-only"], True),
        ("MIT OR GPL-3.0-only", ["GPL-3.0-only", "MIT"], True),
        ("(MIT OR Apache-2.0)", ["MIT"], False),
        ("GPL-2.0-only WITH Classpath-exception-2.0", ["GPL-2.0-only"], True),
        ("MIT", [], False),
    ],
)
def test_a_file_is_excluded_if_it_is_offered_under_nothing_else(
    expression: str, unwanted: list[str], is_excluded: bool
) -> None:
    """OR is a choice, AND is not; "-only" and "-or-later" differ where both sides say so."""
    head = f"# SPDX-License-Identifier: {expression}\n"
    assert excluded(head, unwanted) == (expression if is_excluded else "")


def test_a_file_that_says_nothing_is_not_excluded() -> None:
    """Nothing is guessed."""
    assert excluded("x = 1\n", ["MIT"]) == ""
