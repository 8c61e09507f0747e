"""What a source looks like, and which ones there are.

A *source* yields drafts; a *drafter* is its code, one file in this folder and one line in `DRAFTERS`.
A drafter imports `Draft`, `Tenant`, the types below and, if it looks tokens up, `words.py`; nothing else of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.memory import Tenant
from engine.tree import CostCurve, Draft, LookaheadRows

if TYPE_CHECKING:
    from engine.text import Tokenizer
    from retriever.datastore import Datastore

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Feedback:
    """What the target's rows tell the sources, besides the emitted tokens: those of a verified tree, or of a prompt's end.

    1. `top_ids` is int32 [n, k], the target's k likeliest next tokens at every row (row 0 of a tree: the root), likeliest
       first, or [0, 0] when nobody asked for it.
    2. `nodes` is int32 [n], the token of each row, and `parents` int32 [n] the row before it in the text, -1 where that is no
       row of this feedback. Rows of a prompt are a chain.
    3. The last `num_lookahead` rows of a tree are lookahead rows: what they follow is a guess that nobody drafted.
    """

    top_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    nodes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    parents: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num_lookahead: int = 0


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
        """Take in the tokens just emitted; the only place where state advances.

        Before the first step it may be called with no tokens and with what the target said along the prompt.
        """
        ...

    def close(self) -> None:
        """Release what the request held. Called exactly once."""
        ...


@runtime_checkable
class Lookahead(Protocol):
    """A drafting that also wants rows of its own in the pass."""

    def lookahead(self, num_rows: int, curve: CostCurve) -> LookaheadRows:
        """Rows to add to a tree of `num_rows`, given what a pass costs; what the target says after them is the end of the
        feedback. Pure as to committed state."""
        ...


class Drafter(Protocol):
    """A source, shared by all requests of a server."""

    name: str
    """Its name in requests, statistics and settings."""
    blocking: bool
    """True if `propose` may wait (disk, network): it then runs on a thread of its own and may be skipped."""
    top_k: int
    """How many of the target's likeliest next tokens it wants to hear for every verified node; 0 if it learns from none."""

    def begin(self, request: DraftRequest) -> Sequence[tuple[str, Drafting]]:
        """The (label, drafting) pairs for one request; none when the source has nothing to work with.

        A label is the source's name, or `name:part` where it keeps several apart (`corpus:mycode`).
        """
        ...


DRAFTERS: Mapping[str, str] = {
    "corpus": "engine.drafters.corpus:CorpusDrafter",
    "prompt": "engine.drafters.prompt:PromptDrafter",
    "history": "engine.drafters.history:HistoryDrafter",
    "resume": "engine.drafters.resume:ResumeDrafter",
    "recycle": "engine.drafters.recycle:RecycleDrafter",
    "lookahead": "engine.drafters.lookahead:LookaheadDrafter",
}
"""Name of every source -> where its drafter is; imported only when used."""
