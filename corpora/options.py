"""What a build is asked to take, and how to store it: one record, written into the manifest so that it can be done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from corpora.errors import InvalidOptions


@dataclass(frozen=True)
class BuildOptions:
    """What to take, and how to store it.

    1. `include` and `exclude` are patterns in git's syntax, relative to each path; no `include` means everything.
    2. `max_file_size` is in bytes, at least 1. Larger files (and records of a file of records) are skipped.
    3. `generated`: whether to take files that say they are generated.
    4. `segment_tokens`: most tokens in one segment, at least 1; bounds the memory of a build (about 30 bytes a token).
    5. `near_duplicates`: whether to leave out files of which nearly all stands in one that was taken before.
    6. `exclude_licences`: SPDX identifiers ("GPL-3.0-only"); files that are offered under nothing else are skipped.
    7. `field`: what holds the text, or the messages, in a record; "" takes the first usual name that is there.
    8. `roles`: of a conversation, only messages of these roles; none means all.
    9. `chat`: whether a conversation is one document, as the model's chat template writes it, instead of one a message.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_file_size: int = 1 << 20
    generated: bool = False
    segment_tokens: int = 64 << 20
    near_duplicates: bool = False
    exclude_licences: tuple[str, ...] = ()
    field: str = ""
    roles: tuple[str, ...] = ()
    chat: bool = False

    def validate(self) -> None:
        """Raise InvalidOptions for the first value out of range."""
        for name in ("max_file_size", "segment_tokens"):
            if getattr(self, name) < 1:
                raise InvalidOptions(f"{name} must be at least 1: {getattr(self, name)}")

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> BuildOptions:
        """The options in a manifest; what other members it has, and what an earlier release did not write, is passed over."""
        names = {field.name for field in fields(BuildOptions)} & values.keys()
        known: dict[str, Any] = {name: tuple(v) if isinstance(v := values[name], list) else v for name in names}
        return BuildOptions(**known)
