"""How the command `draftloom` starts and ends, where `engine.cli` has what it does in between.

What takes longest begins in a process of its own before the command line is imported (`corpora.early`), and the interpreter
does not look for garbage in all that is left when it ends anyway, which would take a twentieth of a second.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """The command line, from its first word to the end of the process."""
    from corpora.early import give_head_start

    give_head_start(sys.argv[1:])
    try:
        from engine import cli

        cli.main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
