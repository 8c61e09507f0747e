"""Keep a corpus current while somebody edits: an update whenever its sources have changed and then been quiet for a moment.

The system tells of changes (inotify and its like, through watchfiles); what they mean, the update finds out by itself. So a
change that is missed costs nothing but time, and one that means nothing costs a look at the files' metadata.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from watchfiles import Change
from watchfiles import watch as watch_files

from corpora.catalog import DEFAULT_TENANT, Catalog
from corpora.errors import CorpusError, CorpusNotFound
from corpora.update import LoadTokenizer, UpdateReport, update
from corpora.walk import PACKAGE_FOLDERS

QUIET_SECONDS = 0.5
"""How long nothing may change before an update begins."""
MOST_SECONDS = 10.0
"""How long an update waits at most, however busy the tree is."""

OnUpdate = Callable[[UpdateReport | CorpusError], None]
"""Told what every update did, or why it failed; a failed one is tried again after the next change."""


def watch(
    name: str,
    catalog: Catalog,
    load_tokenizer: LoadTokenizer,
    on_update: OnUpdate,
    *,
    tenant: str = DEFAULT_TENANT,
    stop: threading.Event | None = None,
    quiet_seconds: float = QUIET_SECONDS,
) -> None:
    """Update corpus `name` at once, and again whenever its sources change, until `stop` is set (or for ever).

    The tokenizer is loaded once. Raises CorpusNotFound, also if the corpus is removed meanwhile; all other errors of an update
    are told to `on_update`. A KeyboardInterrupt goes through.
    """
    load = cache(load_tokenizer)
    sources = [Path(source) for source in catalog.get(name, tenant).active.sources]
    for _ in _rounds(sources, catalog.root, stop, quiet_seconds):
        try:
            on_update(update(name, catalog, load, tenant=tenant))
        except CorpusNotFound:
            raise
        except CorpusError as error:
            on_update(error)


def _rounds(sources: Sequence[Path], store: Path, stop: threading.Event | None, quiet_seconds: float) -> Iterator[None]:
    """Once at the start and then after every change. The system's watch begins first, so that nothing falls in between."""
    changes = watch_files(
        *(source for source in sources if source.exists()),
        watch_filter=_Relevant(sources, store),
        step=max(1, int(quiet_seconds * 1000)),
        debounce=int(MOST_SECONDS * 1000),
        rust_timeout=200,
        yield_on_timeout=True,
        stop_event=stop,
        raise_interrupt=True,
        ignore_permission_denied=True,
    )
    first = True
    for found in changes:
        if first or found:
            first = False
            yield


class _Relevant:
    """Which changes may change a corpus: none in hidden folders or those of packages and caches, nor in the store itself."""

    def __init__(self, sources: Sequence[Path], store: Path) -> None:
        self._sources = [source.resolve() for source in sources]
        self._store = store.resolve()

    def __call__(self, change: Change, path: str) -> bool:
        changed = Path(path)
        if changed.is_relative_to(self._store):
            return False
        for source in self._sources:
            if changed.is_relative_to(source):
                folders = changed.relative_to(source).parts[:-1]
                return not any(part.startswith(".") or part in PACKAGE_FOLDERS or part == "__pycache__" for part in folders)
        return True
