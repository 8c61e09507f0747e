"""What happened to a file, and why: the one vocabulary that walking, filtering, reports and the command line share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Reason(StrEnum):
    """Why a file or folder was left out. Values go into reports and JSON.

    Two of them are also said of files that are taken: DUPLICATE (not stored again) and SECRET (without some of its lines).
    """

    IGNORED = "ignored"
    EXCLUDED = "excluded"
    NOT_INCLUDED = "not_included"
    HIDDEN = "hidden"
    VENDORED = "vendored"
    SYMLINK = "symlink"
    SYMLINK_OUTSIDE = "symlink_outside"
    SYMLINK_LOOP = "symlink_loop"
    SYMLINK_DANGLING = "symlink_dangling"
    SPECIAL_FILE = "special_file"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    EMPTY = "empty"
    BINARY = "binary"
    UNDECODABLE = "undecodable"
    MINIFIED = "minified"
    GENERATED = "generated"
    LOCK_FILE = "lock_file"
    SECRET = "secret"
    DUPLICATE = "duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    LICENCE = "licence"
    MALFORMED = "malformed"
    SUBMODULE = "submodule"
    UNSAFE_NAME = "unsafe_name"

    @property
    def meaning(self) -> str:
        """One line for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Reason.IGNORED: "by git or an ignore file",
    Reason.EXCLUDED: "by --exclude",
    Reason.NOT_INCLUDED: "not among --include",
    Reason.HIDDEN: "hidden folder",
    Reason.VENDORED: "others' code; name the folder to take it",
    Reason.SYMLINK: "link within the tree",
    Reason.SYMLINK_OUTSIDE: "link out of the tree",
    Reason.SYMLINK_LOOP: "link to itself",
    Reason.SYMLINK_DANGLING: "link to nothing",
    Reason.SPECIAL_FILE: "pipe, socket or device",
    Reason.UNREADABLE: "could not be read",
    Reason.TOO_LARGE: "larger than --max-file-size",
    Reason.EMPTY: "empty or blank",
    Reason.BINARY: "not text",
    Reason.UNDECODABLE: "unknown encoding",
    Reason.MINIFIED: "lines of over 10,000 characters",
    Reason.GENERATED: "take them with --generated",
    Reason.LOCK_FILE: "of a package manager",
    Reason.SECRET: "looks like a key or password",
    Reason.DUPLICATE: "stored once",
    Reason.NEAR_DUPLICATE: "nearly all stands in another",
    Reason.LICENCE: "by --exclude-licence",
    Reason.MALFORMED: "not what its name says",
    Reason.SUBMODULE: "another repository",
    Reason.UNSAFE_NAME: "name leads out of its archive",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about one file, or about a folder as a whole.

    1. `name` is the path within the corpus: below the folder that was given, "/" between parts, always valid UTF-8.
       A folder's name ends with "/"; it stands for all that is in it.
    2. `taken`: its text is indexed, if `num_documents` is 0 as another file's. `reason` is None exactly if all of it is stored.
    3. `num_bytes` is its size on disk, 0 for folders, links and special files.
    4. `detail` says more where there is more to say (which rule, which link target, what the system said).
    5. `stamp`, where it is not empty, is the same only as long as the content is, and costs no look inside.
    """

    path: Path
    name: str
    taken: bool
    reason: Reason | None = None
    detail: str = ""
    num_bytes: int = 0
    num_documents: int = 0
    stamp: str = ""
