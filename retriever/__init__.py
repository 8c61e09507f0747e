"""Here is how the text ends: what followed it before? Token ids in, what followed them out.

Useful for drafting. Knows no text, no trees of the engine, no models, and never writes except through `format`.

    datastore.py       a corpus on disk, memory-mapped: longest match, lookup, check
    pools.py           a text that grows: the request's own words
    continuations.py   the answer of both: a small tree with probabilities and evidence
    kernels.py         what they share, compiled: matching, sampling, and the one rule that makes drafts of occurrences
    format.py          the bytes of a corpus version: writer and reader side by side
    update.py          a version from another one: additions, deletions, joined segments
    ends.py            what the ends of a corpus' own text find in the rest of it, without kernels
    suffixes.py        packing tokens, sorting suffixes
    pages.py           which pages of a mapped file are in memory
    errors.py          what can go wrong

To read: `kernels.blend`, then `tests/retriever/oracles.py`, which says the same without hurry.
"""
