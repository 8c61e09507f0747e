"""A head start for `draftloom corpus update`: its tokenizer begins to load before the command line is imported.

An update of a few files waits for its tokenizer above all, and half of that time the command line would take to import itself
and to find out what it was asked for. So the words are looked at first, as far as it takes to guess which tokenizer that will
be. Nothing depends on the guess: what nobody takes ends with this process, and whatever is wrong the command says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def give_head_start(words: Sequence[str]) -> None:
    """Begin to load what the command line `words` will need. Only an update gains anything. Raises nothing, says nothing."""
    match words:
        case ["corpus", "update", *rest] if "--help" not in rest:
            with suppress(Exception):
                _begin_update(rest)


def _begin_update(words: Sequence[str]) -> None:
    from corpora import aside
    from corpora.catalog import Catalog, default_store
    from engine.models import DEFAULT_MODEL, at_hand

    name, store = "", default_store()
    rest = iter(words)
    for word in rest:
        option, _, value = word.partition("=")
        if option == "--store":
            store = Path(value or next(rest)).expanduser()
        elif not option.startswith("-"):
            name = word
    model = Catalog(store, read_only=True).get(name).active.model
    if (folder := at_hand(model or DEFAULT_MODEL)) is not None:
        aside.begin(folder)
