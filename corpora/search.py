"""Looking inside a corpus: where a text occurs, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass

from corpora.catalog import DEFAULT_TENANT, Catalog
from corpora.update import LoadTokenizer, same_tokenizer


@dataclass(frozen=True)
class Place:
    """One occurrence: `offset` is in tokens from the document's beginning, `before` and `after` the text around it."""

    document: str
    offset: int
    before: str
    after: str


@dataclass(frozen=True)
class Following:
    """A token that follows, as text, and how often it does."""

    text: str
    count: int


@dataclass(frozen=True)
class Found:
    """What a corpus holds of a text.

    1. `tokens` are the ids that were looked for; `count` is how often they occur, exactly.
    2. `places` are some of the occurrences, evenly spread over all, in the order of the documents.
    3. `following` are the most frequent next tokens, of `num_following` different ones.
    """

    tokens: tuple[int, ...]
    count: int
    places: tuple[Place, ...]
    following: tuple[Following, ...]
    num_following: int


def search(
    name: str,
    text: str,
    catalog: Catalog,
    load_tokenizer: LoadTokenizer,
    *,
    limit: int = 10,
    tenant: str = DEFAULT_TENANT,
) -> Found:
    """Where the tokens of `text` occur in corpus `name` (at most `limit` places), and what follows (at most `limit` tokens).

    A text that does not occur, and an empty one, give counts of 0. Raises CorpusNotFound, OtherTokenizer, CatalogError,
    engine.errors.ModelError, retriever.errors.FormatError.
    """
    from retriever.places import places_in

    active = catalog.get(name, tenant).active
    tokenizer = same_tokenizer(load_tokenizer(active.model), active.fingerprint, active.model, name)
    ids = tokenizer.encode(text)
    found = places_in(catalog.version_path(name, active.id), ids)
    tokens, counts = found.next_tokens()
    return Found(
        tuple(ids.tolist()),
        found.count,
        tuple(
            Place(
                place.name,
                place.offset,
                tokenizer.decode(place.before, continuing=True),
                tokenizer.decode(place.after, continuing=True),
            )
            for place in found.spread(limit)
        ),
        tuple(
            Following(tokenizer.decode([token], continuing=True), count)
            for token, count in zip(tokens[:limit].tolist(), counts[:limit].tolist(), strict=True)
        ),
        len(tokens),
    )
