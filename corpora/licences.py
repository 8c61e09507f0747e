"""Under which licences a file says it is offered, as SPDX identifiers, as far as its first lines tell.

Read are `SPDX-License-Identifier:` lines (with AND and OR) and the notices of the GNU licences, which rarely come with one.
What a `LICENSE` file beside it or a package's metadata says is not looked at: exclude such folders by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_TAG = re.compile(r"SPDX-License-Identifier:[ \t]*([^\n]*)")
_GNU = re.compile(
    r"GNU\s+(?P<kind>Affero\s+|Lesser\s+|Library\s+)?General\s+Public\s+License(?P<rest>.{0,300})", re.IGNORECASE | re.DOTALL
)
_VERSION = re.compile(r"version\s+(\d(?:\.\d)?)", re.IGNORECASE)
_GNU_NAMES = {"": "GPL", "affero": "AGPL", "lesser": "LGPL", "library": "LGPL"}


def excluded(head: str, licences: Collection[str]) -> str:
    """What the first lines of a file say, if it is offered under `licences` (SPDX identifiers) alone; "" otherwise.

    "-only" and "-or-later" and the old spellings ("GPL-3.0", "GPL-3.0+") are told apart only where both sides do: "GPL-3.0"
    excludes all of its kind.
    """
    expression = stated(head)
    unwanted = {licence.casefold() for licence in licences}
    return expression if expression and not _offers_other(expression, unwanted) else ""


def stated(head: str) -> str:
    """The SPDX expression that the beginning of a file states, "" if it states none."""
    if match := _TAG.search(head):
        return re.sub(r"\s*(?:\*/|-->|#|--\]\]).*$", "", match.group(1)).strip()
    if "General" in head and (match := _GNU.search(head)):
        name = _GNU_NAMES[(match.group("kind") or "").strip().casefold()]
        version = _VERSION.search(match.group("rest"))
        later = re.search(r"any\s+later\s+version", match.group("rest"), re.IGNORECASE)
        number = version.group(1) if version else ""
        number += "" if not number or "." in number else ".0"
        return "-".join(part for part in (name, number, ("or-later" if later else "only") if number else "") if part)
    return ""


def _offers_other(expression: str, unwanted: Collection[str]) -> bool:
    """Whether one of the alternatives has no unwanted part. Parentheses are read as if AND bound tighter throughout."""
    alternatives = re.split(r"\s+OR\s+", expression.replace("(", " ").replace(")", " "), flags=re.IGNORECASE)
    return any(
        not any(_is_unwanted(part.strip(), unwanted) for part in re.split(r"\s+AND\s+", alternative, flags=re.IGNORECASE))
        for alternative in alternatives
    )


def _is_unwanted(licence: str, unwanted: Collection[str]) -> bool:
    name = re.split(r"\s+WITH\s+", licence, flags=re.IGNORECASE)[0].casefold()
    base = re.sub(r"(?:-only|-or-later|\+)$", "", name)
    return name in unwanted or base in unwanted
