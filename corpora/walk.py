"""Which files there are below a path, and which of them are candidates: decided by names and metadata alone.

# Rules, in the order in which they are asked

    1  Links are never followed: what they lead to inside the tree is found where it lies; what lies outside is not ours.
    2  Pipes, sockets and devices are never opened.
    3  `.git` is not looked at; other hidden folders are skipped as a whole; hidden files are like any others.
    4  `exclude` and `include` patterns of the caller (git's syntax, relative to the given folder).
    5  Ignore rules. Inside a git work tree git itself is asked what is tracked, or untracked and not ignored, in nested
       repositories and submodules each on its own; outside one (or without git) `.gitignore` files count, at each level,
       deepest first. `.ignore` files count in both cases.
    6  Folders of others' code (`node_modules`, `vendor`, `third_party`, virtual environments).

A folder that a rule leaves out is one decision; nothing below it is looked at. Naming a path is stronger than any ignore rule
about it: a named file is a candidate, a named folder is searched even where the repository around it ignores it.

Trees that are no folders (a revision, an archive) hold only what somebody put there: for them `NameRules` asks 3, 4 and 6 of
the names alone.

The order is that of the names' bytes, the same on every machine. O(files), one directory listing at a time; git is run once
for each repository.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from corpora.decisions import Decision, Reason
from corpora.errors import InvalidOptions, SourceNotFound
from corpora.git import run_git
from corpora.options import BuildOptions

IGNORE_FILES_IN_GIT = (".ignore",)
IGNORE_FILES_ELSEWHERE = (".ignore", ".gitignore")
PACKAGE_FOLDERS = frozenset(
    {"node_modules", "bower_components", "vendor", "third_party", "thirdparty", "site-packages", "Pods"}
)
SETTLED_NS = 2_000_000_000
"""How old a file's time of change must be to be trusted: a second change within one tick of the clock would not show."""

_Refusal = tuple[Reason, str]
"""Why, and the detail."""


def walk(root: Path, prefix: str, options: BuildOptions) -> Iterator[Decision]:
    """Every file below one real path (a folder or a file), with what was decided; `taken` means: look inside.

    Names begin with `prefix`. Raises InvalidOptions for a pattern git would not understand.
    """
    return _Walk(root, prefix, NameRules.of(options)).decisions()


@dataclass(frozen=True)
class NameRules:
    """The rules that names alone decide: hidden folders, the caller's patterns, folders of others' code."""

    include: GitIgnoreSpec | None
    exclude: GitIgnoreSpec | None

    @staticmethod
    def of(options: BuildOptions) -> NameRules:
        """Raises InvalidOptions for a pattern git would not understand."""
        return NameRules(_patterns("include", options.include), _patterns("exclude", options.exclude))

    def refuse(self, name: str) -> tuple[str, Reason] | None:
        """(what is left out, why) if this file ("/" between parts) or a folder above it is; a folder's name ends with "/"."""
        *folders, _ = name.split("/")
        path = ""
        for folder in folders:
            path += f"{folder}/"
            if folder.startswith("."):
                return path, Reason.HIDDEN
            if self.exclude and self.exclude.match_file(path):
                return path, Reason.EXCLUDED
            if folder in PACKAGE_FOLDERS:
                return path, Reason.VENDORED
        if self.exclude and self.exclude.match_file(name):
            return name, Reason.EXCLUDED
        if self.include and not self.include.match_file(name):
            return name, Reason.NOT_INCLUDED
        return None


def _patterns(option: str, lines: Sequence[str]) -> GitIgnoreSpec | None:
    """The caller's patterns, None if there are none."""
    try:
        return GitIgnoreSpec.from_lines(lines) if lines else None
    except ValueError as error:
        raise InvalidOptions(f"{option} pattern is not understood: {error}; write it as in a .gitignore file") from None


def real_path(path: Path) -> Path:
    """Where `path` leads. Raises SourceNotFound for one that is not there."""
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        fault = getattr(error, "strerror", None) or "it is a loop of links"
        raise SourceNotFound(f"path to index cannot be used: {path} ({fault}); check its spelling") from None


def printable(name: str) -> str:
    """A file name as valid UTF-8; bytes that are not UTF-8 become \\xNN."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class _Listing:
    """What git counts as part of a work tree, relative to `base` ("" or ending with "/"): files, and the folders above."""

    base: str
    files: frozenset[str]
    folders: frozenset[str]


@dataclass(frozen=True)
class _Rules:
    """The ignore rules in force in one folder: git's answer if there is one, and pattern files, outermost first."""

    listing: _Listing | None
    patterns: tuple[tuple[str, str, GitIgnoreSpec], ...] = ()
    """(folder, file name, patterns); folder as in `_Listing.base`."""

    def ignoring(self, name: str, is_folder: bool) -> str:
        """What ignores `name` (relative to the root), "" if nothing does."""
        for folder, file_name, patterns in reversed(self.patterns):
            relative = name[len(folder) :] + ("/" if is_folder else "")
            verdict = patterns.check_file(relative).include
            if verdict is not None:
                if verdict:
                    return f"{folder}{file_name}"
                break
        if self.listing is None:
            return ""
        relative = name[len(self.listing.base) :]
        listed = relative in self.listing.files or (is_folder and relative in self.listing.folders)
        return "" if listed else "git"


class _Walk:
    """One walk below one root."""

    def __init__(self, root: Path, prefix: str, rules: NameRules) -> None:
        self.root = root
        self.prefix = prefix
        self.include = rules.include
        self.exclude = rules.exclude

    def decisions(self) -> Iterator[Decision]:
        if not self.root.is_dir():
            yield self.named_file()
            return
        stack = [self.entries("", self.root, _Rules(None))]
        while stack:
            for name, path, rules in stack[-1]:
                decision = self.decide(name, path, rules)
                if decision is not None:
                    yield decision
                    continue
                stack.append(self.entries(f"{name}/", path, rules))
                break
            else:
                stack.pop()

    def entries(self, base: str, folder: Path, rules: _Rules) -> Iterator[tuple[str, Path, _Rules]]:
        """(name, path, rules) of everything directly in a folder, in order. An unlistable folder was found out by `decide`."""
        names = sorted(_listdir(folder), key=os.fsencode)
        rules = self.rules_in(base, folder, names, rules)
        for name in names:
            if name != ".git":
                yield base + name, folder / name, rules

    def rules_in(self, base: str, folder: Path, names: Sequence[str], outer: _Rules) -> _Rules:
        listing = _git_listing(folder, base) if not base or ".git" in names else outer.listing
        files = IGNORE_FILES_ELSEWHERE if listing is None else IGNORE_FILES_IN_GIT
        found = [(base, name, _read_patterns(folder / name)) for name in reversed(files) if name in names]
        return _Rules(listing, (*outer.patterns, *found))

    def named_file(self) -> Decision:
        """A file the caller named: no rule about names applies."""
        info = self.root.lstat()
        return self.decision(self.root.name, self.root, _fault_of(info), info)

    def decide(self, name: str, path: Path, rules: _Rules) -> Decision | None:
        """What becomes of one entry; None for a folder to look into."""
        try:
            info = path.lstat()
        except OSError as error:
            return self.decision(name, path, (Reason.UNREADABLE, error.strerror or ""))
        if stat.S_ISLNK(info.st_mode):
            return self.decision(name, path, self.link(path))
        if stat.S_ISDIR(info.st_mode):
            refusal = self.folder_refusal(name, path, rules)
            return self.decision(f"{name}/", path, refusal) if refusal else None
        return self.decision(name, path, _fault_of(info) or self.name_refusal(name, rules), info)

    def decision(self, name: str, path: Path, refusal: _Refusal | None, info: os.stat_result | None = None) -> Decision:
        reason, detail = refusal or (None, "")
        return Decision(
            path,
            self.prefix + printable(name),
            refusal is None,
            reason,
            printable(detail),
            info.st_size if info else 0,
            stamp=stamp_of(info) if info else "",
        )

    def folder_refusal(self, name: str, path: Path, rules: _Rules) -> _Refusal | None:
        if path.name.startswith("."):
            return Reason.HIDDEN, ""
        if self.exclude and self.exclude.match_file(f"{name}/"):
            return Reason.EXCLUDED, ""
        if ignoring := rules.ignoring(name, True):
            return Reason.IGNORED, ignoring
        if path.name in PACKAGE_FOLDERS or (path / "pyvenv.cfg").exists():
            return Reason.VENDORED, ""
        try:
            os.scandir(path).close()
        except OSError as error:
            return Reason.UNREADABLE, error.strerror or ""
        return None

    def name_refusal(self, name: str, rules: _Rules) -> _Refusal | None:
        if self.exclude and self.exclude.match_file(name):
            return Reason.EXCLUDED, ""
        if ignoring := rules.ignoring(name, False):
            return Reason.IGNORED, ignoring
        if self.include and not self.include.match_file(name):
            return Reason.NOT_INCLUDED, ""
        return None

    def link(self, path: Path) -> _Refusal:
        """Where a link leads; it is not followed in any case."""
        target = os.readlink(path)
        try:
            real = Path(os.path.realpath(path, strict=True))
        except FileNotFoundError:
            return Reason.SYMLINK_DANGLING, f"to {target}"
        except OSError:
            return Reason.SYMLINK_LOOP, f"to {target}"
        if not real.is_relative_to(self.root):
            return Reason.SYMLINK_OUTSIDE, f"to {target}"
        return (Reason.SYMLINK_LOOP if path.is_relative_to(real) else Reason.SYMLINK), f"to {target}"


def stamp_of(info: os.stat_result) -> str:
    """What changes whenever a file's content does: its size and times; "" while it may change again unnoticed."""
    times = (info.st_mtime_ns, info.st_ctime_ns)
    return f"{info.st_size}-{times[0]}-{times[1]}" if max(times) < time.time_ns() - SETTLED_NS else ""


def _fault_of(info: os.stat_result) -> _Refusal | None:
    return None if stat.S_ISREG(info.st_mode) else (Reason.SPECIAL_FILE, "")


def _listdir(folder: Path) -> list[str]:
    """Names in a folder; none if it vanished meanwhile."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_patterns(path: Path) -> GitIgnoreSpec:
    """An ignore file's patterns; lines that are not understood match nothing, as in git, and so does an unreadable file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError:
        return GitIgnoreSpec.from_lines(line for line in lines if _is_pattern(line))


def _is_pattern(line: str) -> bool:
    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def _git_listing(folder: Path, base: str) -> _Listing | None:
    """What git counts as part of the work tree at `folder`; None outside one, without git, or if `folder` itself is ignored."""
    output = run_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if output is None or (not output and run_git(folder, "check-ignore", "--quiet", ".") is not None):
        return None
    files = frozenset(os.fsdecode(name).rstrip("/") for name in output.split(b"\0") if name)
    folders = {parent for name in files for parent in _parents(name)}
    return _Listing(base, files, frozenset(folders))


def _parents(name: str) -> Iterator[str]:
    """The folders above a name: "a/b", "a" for "a/b/c"."""
    while (cut := name.rfind("/")) > 0:
        name = name[:cut]
        yield name
