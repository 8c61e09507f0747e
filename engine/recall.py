"""What `draftloom history` shows of a memory, and forgets of it. Texts only where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from engine.drafters.history import answers
from engine.errors import ConfigError
from engine.memory import DAY, Memory
from engine.models import tokenizer_folder
from engine.text import Tokenizer


@dataclass(frozen=True)
class Recall:
    """What is remembered of one tenant's requests to one model.

    1. `num_answers` of `num_tokens` in all, given between `oldest` and `newest` (seconds since 1970; None if there are none).
    2. `num_bytes` on disk, calibration and the like among them, last written at `saved`.
    3. `texts` has the answers, the least recently touched first, if they were asked for.
    """

    model: str
    tenant: str
    num_answers: int
    num_tokens: int
    num_bytes: int
    oldest: float | None
    newest: float | None
    saved: float
    texts: tuple[str, ...] | None = None


def recall(memory: Memory, model: str | None, tenant: str | None, *, with_text: bool = False) -> list[Recall]:
    """What there is, of one model or tenant or of all. Raises ConfigError if texts are wanted that cannot be read."""
    found = []
    for (of_model, of_tenant), group in groupby(memory.entries(), key=lambda entry: (entry.model, entry.tenant)):
        if not _is(of_model, model) or tenant not in (None, of_tenant):
            continue
        entries = list(group)
        saved = memory.load(of_model, of_tenant, "history") if any(entry.name == "history" for entry in entries) else None
        said = answers(saved) if saved else []
        born = saved["born"].tolist() if saved else []
        found.append(
            Recall(
                model=of_model,
                tenant=of_tenant,
                num_answers=len(said),
                num_tokens=sum(map(len, said)),
                num_bytes=sum(entry.num_bytes for entry in entries),
                oldest=min(born, default=None),
                newest=max(born, default=None),
                saved=max(entry.saved for entry in entries),
                texts=tuple(map(_tokenizer(of_model).decode, said)) if with_text else None,
            )
        )
    return found


def forget(memory: Memory, model: str | None, tenant: str | None) -> int:
    """Forget one model's or tenant's, or all; returns of how many (model, tenant) there was something. Raises OSError."""
    known = {(entry.model, entry.tenant) for entry in memory.entries()}
    chosen = [who for who in memory.known() if _is(who[0], model) and tenant in (None, who[1])]
    for who in chosen:
        memory.clear(*who)
    return len(known.intersection(chosen))


def recall_table(found: list[Recall], now: float) -> Table:
    """As a table; `now` is the time from which ages are counted."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("model", "tenant", "answers", "tokens", "size", "oldest", "newest", "saved"):
        table.add_column(header, justify="left" if header in ("model", "tenant") else "right", overflow="fold")
    for each in found:
        counts = (f"{each.num_answers:,}", f"{each.num_tokens:,}", f"{each.num_bytes / 1e3:,.0f} kB")
        ages = (_age(when, now) for when in (each.oldest, each.newest, each.saved))
        table.add_row(each.model, each.tenant, *counts, *ages)
    return table


def _is(key: str, model: str | None) -> bool:
    """Whether a memory's key is of the model asked for: its name, or all of the key (name@tokenizer)."""
    return model in (None, key, key.rpartition("@")[0])


def _tokenizer(key: str) -> Tokenizer:
    """The tokenizer that what is kept under a key is in."""
    model, _, fingerprint = key.rpartition("@")
    tokenizer = Tokenizer.load(tokenizer_folder(model))
    if not tokenizer.fingerprint.startswith(fingerprint):
        raise ConfigError(f"the model has another tokenizer than when this was remembered: {model}; only `history clear` helps")
    return tokenizer


def _age(when: float | None, now: float) -> str:
    if when is None:
        return "-"
    for unit, seconds in (("d", DAY), ("h", 3600.0), ("min", 60.0)):
        if now - when >= seconds:
            return f"{(now - when) / seconds:.0f} {unit}"
    return f"{max(now - when, 0):.0f} s"
