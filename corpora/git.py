"""Asking git: read-only commands, under which nothing runs that a repository configures.

No monitor of the file system, no filter, no remote helper: what a partial clone lacks is missing, not fetched.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIT_SECONDS = 60.0

COMMAND = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def environment() -> dict[str, str]:
    """That of this process without what would steer git, and with every transport forbidden."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {**inherited, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


def run_git(folder: Path, *command: str) -> bytes | None:
    """The output of a git command, None if it fails, takes longer than GIT_SECONDS, or there is no git."""
    try:
        done = subprocess.run(
            [*COMMAND, *command],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
