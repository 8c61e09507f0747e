"""What a source looks like, and which ones there are.

A *source* yields drafts; a *drafter* is its code, one file in this folder and one line in `DRAFTERS`.
A drafter imports `Draft`, `Tenant`, the types below and, if it looks tokens up, `words.py`; nothing else of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.memory import Tenant
from engine.tree import Draft

if TYPE_CHECKING:
    from engine.text import Tokenizer
    from retriever.datastore import Datastore

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Feedback:
    """What a verified step tells the sources, besides the emitted tokens.

    1. `top_ids` is int32 [num_verified, k], the target's k likeliest next tokens at every verified node (row 0: the root),
       or [0, 0] when nobody asked for it.
    2. `nodes` is int32 [num_verified], the token of each of those nodes.
    """

    top_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    nodes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True)
class DraftRequest:
    """What a source may know about a request when it begins.

    `context` is the text to draft from as token ids (int32 [n]): usually the prompt; for fill-in-the-middle, the prefix.
    `corpora` maps names to open datastores, pinned for the life of the request.
    `prediction` is the caller's guess at the answer, as token ids; empty when there is none.
    `tokenizer` is the model's, for sources that must know what a token says; None where there is none.
    `memory` is what this tenant's requests to this model share and a source may keep. `use_history`: whether to draft from what
    the tenant's earlier answers said; `learn`: whether anything of this request may outlive it.
    """

    tenant: str
    model: str
    context: Tokens
    corpora: Mapping[str, Datastore] = field(default_factory=dict)
    prediction: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    tokenizer: Tokenizer | None = None
    memory: Tenant = field(default_factory=Tenant)
    use_history: bool = True
    learn: bool = True


class Drafting(Protocol):
    """One source at work on one request."""

    def propose(self, context: Tokens, budget: int) -> Draft:
        """At most `budget` nodes that may follow `context` (int32 [n], prompt and answer so far; its last token is the root).

        Pure as to committed state: calling it twice gives the same draft. Nothing to propose: `Draft.empty()`.
        """
        ...

    def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
        """Take in the tokens just emitted; the only place where state advances."""
        ...

    def close(self) -> None:
        """Release what the request held. Called exactly once."""
        ...


class Drafter(Protocol):
    """A source, shared by all requests of a server."""

    name: str
    """Its name in requests, statistics and settings."""
    blocking: bool
    """True if `propose` may wait (disk, network): it then runs on a thread of its own and may be skipped."""

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """The (label, drafting) pairs for one request; none when the source has nothing to work with.

        A label is the source's name, or `name:part` where it keeps several apart (`corpus:mycode`).
        """
        ...


DRAFTERS: Mapping[str, str] = {
    "corpus": "engine.drafters.corpus:CorpusDrafter",
    "prompt": "engine.drafters.prompt:PromptDrafter",
}
"""Name of every source -> where its drafter is; imported only when used."""
