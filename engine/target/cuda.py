"""Passes on a CUDA device: packed rows, a mask instead of kernels, one graph for each number of rows.

Keys and values stay on the device in pages of `BLOCK` positions, under the same block tables as on the CPU. All that a pass
needs to know of its sequences goes there in one pinned transfer (`Layout`); what a row may see is a function of these numbers
(`Layout.sees`), which FlexAttention compiles into its kernel, and which `gathered_attention` writes out as a mask for the pages
in use. The token of every row is chosen on the device (`choose_all`), so that ids come back, once a pass, and logits only of
sequences whose choices need more than their own row.

Nothing here is CUDA's alone but graphs, pinned memory and the compiled kernel: on `cpu` the same code runs without; that is
how it is tested. Sums depend on the number of rows, so nothing is strict here: texts with and without drafts are equal except
at near-ties.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import PreTrainedModel

from engine.errors import Exhausted, WorkerLost
from engine.target import attention, noise
from engine.target.attention import Part, Scores
from engine.target.cache import BlockPool, KVTable, blocks_in
from engine.target.kernels import BLOCK
from engine.target.model import Model
from engine.target.passes import asked_rows
from engine.target.sampling import Ask, Choices, Said

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that a graph is made for; a pass is filled up to the next. Beyond, multiples of the last, without a graph."""

_OWNERS = 96
"""Sequences that every pass has room for, in bits; a kernel is one of fixed shapes, and more make another."""

_MOST_WARM = 256
"""Rows of the largest pass that is run before it is needed: one that reads prompts."""

_QUERY_BLOCK = 128
"""Rows that FlexAttention looks up pages for together."""


class DeviceStorage(BlockPool):
    """Keys and values of all layers on a device: [1, kv heads, slots, head dim] each, page b being slots b * BLOCK and on.

    One position costs 2 x layers x kv heads x head dim numbers of `dtype`. One page beyond those of tables takes what
    rows that only fill up a pass write. What is to be moved waits for `settle`, so that a pass moves the rows of all its
    sequences at once. Raises Exhausted where `memory` bytes hold no page, or the device has less.
    """

    def __init__(
        self, num_layers: int, kv_heads: int, head_dim: int, memory: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(blocks_in(memory, 2 * num_layers * kv_heads * head_dim * BLOCK * dtype.itemsize))
        shape = (1, kv_heads, (self.num_blocks + 1) * BLOCK, head_dim)
        self.head_dim = head_dim
        try:  # zeros: what a mask hides still meets a weight of 0, and 0 x NaN is none
            self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        except torch.OutOfMemoryError as error:
            raise Exhausted(f"the device has no {memory} bytes left for keys and values: lower kv_memory") from error
        self._moves: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def compact(self, blocks: NDArray[np.int32], length: int, rows: NDArray[np.int32]) -> None:
        """See `BlockPool`."""
        before, after = _slots(blocks, length + rows), _slots(blocks, length + np.arange(len(rows)))
        self._moves.append((before[before != after], after[before != after]))

    def make_up(self, blocks: NDArray[np.int32]) -> None:
        """See `BlockPool`."""
        slots = torch.from_numpy(_slots(blocks, np.arange(len(blocks) * BLOCK))).to(self.keys[0].device)
        for numbers in (*self.keys, *self.values):
            numbers[:, :, slots] = 0.01

    def settle(self) -> None:
        """Do what was to be moved. All is read before anything is written: tables have blocks of their own beyond what they
        committed, and each commits once a pass."""
        if self._moves:
            before, after = (np.concatenate(slots) for slots in zip(*self._moves, strict=True))
            self._moves.clear()
            self.move(before, after)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy slots to slots, int64 [n] each, in all layers; all are read before any is written."""
        both = torch.from_numpy(np.stack([sources, targets])).to(self.keys[0].device, non_blocking=True)
        for numbers in (*self.keys, *self.values):
            numbers[:, :, both[1]] = numbers[:, :, both[0]]


def _slots(blocks: NDArray[np.int32], entries: NDArray[Any]) -> NDArray[np.int64]:
    """Where positions of a sequence lie, int64."""
    slots: NDArray[np.int64] = blocks[entries // BLOCK].astype(np.int64) * BLOCK + entries % BLOCK
    return slots


class Layout:
    """What a pass of up to `rows` rows must know, as views into one array on the device and one (pinned) beside it.

    By row: `tokens`, `positions`, `slots` (where its key goes), `owner` (which sequence), `length` (its prefix), `first` (its
    sequence's first row) and `above` [rows, words], a bit for each row of the pass that it descends from or is. By page in use:
    `pages`, `logical`, which page of its sequences it is, and `holders` [columns, words], a bit for each sequence that it
    belongs to; a page that several share is the same one of each. A column is a page in use, or with `physical` a page of the
    storage. `page_count` is how many are in use.

    Rows that only fill up are a sequence of their own without a prefix, all in the spare page.
    """

    def __init__(self, rows: int, owners: int, pages: int, spare: int, device: torch.device, physical: bool) -> None:
        self.rows, self.spare, self.physical = rows, spare, physical
        columns = spare + 1 if physical else pages
        shapes = {
            "tokens": (rows,), "positions": (rows,), "slots": (rows,), "owner": (rows,), "length": (rows,), "first": (rows,),
            "above": (rows, -(-rows // 32)), "pages": (pages,), "page_count": (1,), "logical": (columns,),
            "holders": (columns, -(-owners // 32)),
        }  # fmt: skip
        size = sum(int(np.prod(shape)) for shape in shapes.values())
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self.host: dict[str, NDArray[np.int32]] = {}
        self.on_device: dict[str, torch.Tensor] = {}
        at = 0
        for name, shape in shapes.items():
            end = at + int(np.prod(shape))
            self.host[name] = self._host[at:end].view(shape).numpy()
            self.on_device[name] = self._device[at:end].view(shape)
            at = end

    def fill(self, tokens: NDArray[np.int32], parts: Sequence[Part]) -> None:
        """Describe a pass over `parts`, whose tables have room for their rows, and send it off. O(rows x depth + pages)."""
        if self._sent is not None:
            self._sent.synchronize()  # what was sent last lies in the same memory
        host, row = self.host, 0
        pages = pages_of(parts, self.spare)
        for name in ("above", "holders"):
            host[name].fill(0)
        for which, part in enumerate(parts):
            count, length = len(part.parents), part.table.length
            mine = slice(row, row + count)
            depths = np.zeros(count, np.int32)
            for i, parent in enumerate(part.parents.tolist()):
                if parent >= 0:
                    depths[i] = depths[parent] + 1
                    host["above"][row + i] = host["above"][row + parent]
                _set_bit(host["above"][row + i], row + i)
            host["positions"][mine] = length + depths
            host["slots"][mine] = _slots(part.table.blocks, length + np.arange(count))
            host["owner"][mine], host["length"][mine], host["first"][mine] = which, length, row
            self._hold(which, _pages(part), pages)
            row += count
        host["tokens"][:row], host["tokens"][row:] = tokens, 0
        fill = slice(row, self.rows)
        host["positions"][fill], host["slots"][fill] = 0, self.spare * BLOCK + np.arange(self.rows - row) % BLOCK
        host["owner"][fill], host["length"][fill], host["first"][fill] = len(parts), 0, row
        for i in range(row, self.rows):
            _set_bit(host["above"][i], i)
        self._hold(len(parts), np.array([self.spare]), pages)
        host["pages"][: len(pages)], host["pages"][len(pages) :] = pages, self.spare
        host["page_count"][0] = len(pages)
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _hold(self, which: int, pages: NDArray[Any], everything: NDArray[Any]) -> None:
        """These are the first pages of a sequence, among all that are in use (rising)."""
        columns = pages if self.physical else np.searchsorted(everything, pages)
        self.host["logical"][columns] = np.arange(len(pages))
        self.host["holders"].view(np.uint32)[columns, which // 32] |= np.uint32(1 << (which % 32))

    def sees(self, row: torch.Tensor, place: torch.Tensor, window: int) -> torch.Tensor:
        """bool, in the shape that `row` and `place` broadcast to: whether a row attends to a place, column * BLOCK + entry.

        It does to positions of its own sequence's prefix and to its own path, of these to the last `window` where that is > 0.
        """
        at = self.on_device
        column, owner = place // BLOCK, at["owner"][row]
        held = ((at["holders"][column, owner // 32] >> (owner % 32)) & 1) == 1
        slot = at["logical"][column] * BLOCK + place % BLOCK
        behind = slot - at["length"][row]
        other = at["first"][row] + behind
        inside = (behind >= 0) & (other < self.rows)
        other = torch.where(inside, other, 0)
        on_path = inside & (((at["above"][row, other // 32] >> (other % 32)) & 1) == 1)
        seen = held & ((behind < 0) | on_path)
        if window > 0:
            position = torch.where(behind < 0, slot, at["positions"][other])
            seen = seen & (position > at["positions"][row] - window)
        return seen


def pages_of(parts: Sequence[Part], spare: int) -> NDArray[np.int64]:
    """The pages that a pass reads or writes, the spare one among them, int64 [n], rising."""
    return np.unique(np.concatenate([*map(_pages, parts), [spare]]).astype(np.int64))


def _pages(part: Part) -> NDArray[np.int32]:
    """The pages that a part's rows read or write."""
    return part.table.blocks[: -(-(part.table.length + len(part.parents)) // BLOCK)]


def _set_bit(words: NDArray[np.int32], bit: int) -> None:
    words.view(np.uint32)[bit // 32] |= np.uint32(1 << (bit % 32))


class DevicePass:
    """The attention of one pass, on tensors. See `attention.Mixes`."""

    def __init__(self, storage: DeviceStorage, layout: Layout) -> None:
        self._storage, self._layout = storage, layout
        self._masks: dict[int, Any] = {}

    def mix(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
        """[1, rows, heads, value width]."""
        dim, width = self._storage.head_dim, value.shape[-1]
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        slots = self._layout.on_device["slots"].long()
        keys[:, :, slots] = _widened(key, dim).to(keys.dtype)
        values[:, :, slots] = _widened(value, dim).to(values.dtype)
        query = _widened(query, dim).to(keys.dtype)
        flexible, window = self._layout.physical, scores.window
        if window not in self._masks:
            self._masks[window] = block_mask(self._layout, window) if flexible else dense_mask(self._layout, window)
        mask = self._masks[window]
        if flexible:
            mixed = flexible_attention(query, keys, values, mask, scores)
        else:
            mixed = gathered_attention(query, keys, values, self._layout, mask, scores)
        return mixed[..., :width].transpose(1, 2)


def _widened(x: torch.Tensor, dim: int) -> torch.Tensor:
    return functional.pad(x, (0, dim - x.shape[-1]))


def dense_mask(layout: Layout, window: int) -> torch.Tensor:
    """bool [rows, pages x BLOCK]: what each row sees of the pages in use; nothing of columns beyond, which nobody holds."""
    device = layout.on_device["pages"].device
    columns = len(layout.on_device["pages"])
    row = torch.arange(layout.rows, device=device)[:, None]
    place = torch.arange(columns * BLOCK, device=device)[None]
    return layout.sees(row, place, window)


def gathered_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, mask: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention under a written mask, over a copy of the pages in use: [1, heads, rows, dim]. Runs anywhere."""
    pages = layout.on_device["pages"].long()
    near_keys, near_values = (x.unflatten(2, (-1, BLOCK))[:, :, pages].flatten(2, 3) for x in (keys, values))
    if scores.softcap == 0 and scores.sinks is None:
        return functional.scaled_dot_product_attention(
            query, near_keys, near_values, attn_mask=mask[None, None], scale=scores.scale, enable_gqa=True
        )
    group = query.shape[1] // keys.shape[1]
    raw = torch.matmul(query, near_keys.repeat_interleave(group, 1).transpose(2, 3)).float() * scores.scale
    if scores.softcap > 0:
        raw = scores.softcap * torch.tanh(raw / scores.softcap)
    raw = raw.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(raw.device, torch.float32).view(1, -1, 1, 1).expand(1, -1, raw.shape[2], 1)
        raw = torch.cat([raw, sinks], -1)
    weights = raw.softmax(-1)[..., : mask.shape[1]].to(query.dtype)
    return torch.matmul(weights, near_values.repeat_interleave(group, 1))


def block_mask(layout: Layout, window: int) -> BlockMask:
    """What FlexAttention wants to know: the pages in use, for every block of rows, and the mask within them."""
    pages = layout.on_device["pages"]
    num_blocks = -(-layout.rows // _QUERY_BLOCK)

    def mask(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return layout.sees(row, place, window)

    return BlockMask.from_kv_blocks(
        layout.on_device["page_count"].view(1, 1, 1).expand(1, 1, num_blocks).contiguous(),
        pages.view(1, 1, 1, -1).expand(1, 1, num_blocks, -1).contiguous(),
        BLOCK_SIZE=(_QUERY_BLOCK, BLOCK),
        mask_mod=mask,
        seq_lengths=(layout.rows, (layout.spare + 1) * BLOCK),
        compute_q_blocks=False,
    )


def kernel_options(query: torch.Tensor, keys: torch.Tensor) -> dict[str, Any]:
    """What FlexAttention's compiler cannot be left to choose, since it would not fit blocks of _QUERY_BLOCK rows and a page.

    Its kernel for few rows takes all of them, for each head of a group, as one block; where these are more than a block of
    rows, the other kernel must do. And that one likes 128 keys at a time for narrow heads of 2 bytes a number.
    """
    rows, dim = query.shape[2:]
    options: dict[str, Any] = {}
    if rows * (query.shape[1] // keys.shape[1]) > _QUERY_BLOCK:
        options["FORCE_USE_FLEX_ATTENTION"] = True
    if query.dtype.itemsize == 2 and dim <= 128:
        options["BLOCK_N"] = BLOCK
    return options


_compiled: Callable[..., Any] | None = None


def flexible_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask, scores: Scores
) -> torch.Tensor:
    """Attention by FlexAttention, straight from the pages: [1, heads, rows, dim]. On the CPU its own uncompiled twin runs."""
    global _compiled
    if query.device.type == "cuda" and _compiled is None:
        # a kernel for each number of rows, window and cap: more than the compiler's own limit, beyond which it gives up
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)
        torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 4096)
        _compiled = torch.compile(flex_attention, dynamic=False)
    run: Any = _compiled if query.device.type == "cuda" and _compiled is not None else flex_attention
    bend: Callable[..., torch.Tensor] | None = None
    if (cap := scores.softcap) > 0:

        def bend(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return cap * torch.tanh(score / cap)

    more: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if scores.sinks is not None else {}
    if options := kernel_options(query, keys):
        more["kernel_options"] = options
    found = run(query, keys, values, score_mod=bend, block_mask=mask, scale=scores.scale, enable_gqa=True, **more)
    if scores.sinks is None:
        return torch.as_tensor(found)
    out, aux = found
    sinks = scores.sinks.to(out.device, torch.float32).view(1, -1, 1)
    return torch.as_tensor(out * torch.sigmoid(aux.lse - sinks)[..., None].to(out.dtype))


# ---- a pass


class Runner:
    """Runs passes of a network over a `DeviceStorage`.

    The network has the attention implementation `attention.KEY` and lies on the device. `flexible` chooses FlexAttention over
    the gathered pages. Graphs are made on CUDA, for passes of up to ROWS[-1] rows, as they are first needed.
    """

    def __init__(self, network: PreTrainedModel, storage: DeviceStorage, flexible: bool) -> None:
        self._network, self._storage, self._flexible = network, storage, flexible
        self._device = storage.keys[0].device
        self._graphs = self._device.type == "cuda"
        self._kept: dict[tuple[int, int, int], _Bucket] = {}

    @torch.inference_mode()
    def run(self, tokens: NDArray[np.int32], parts: Sequence[Part], wanted: NDArray[np.int32]) -> torch.Tensor:
        """Logits on the device, [m, vocab], of the rows `wanted` (int32 [m]).

        `tokens` int32 [n] in the order of the parts, for whose rows their tables have room. Nothing is waited for.
        """
        self._storage.settle()
        rows, pages = bucket(len(tokens)), self._storage.num_blocks + 1
        if not self._flexible:  # a compiled kernel is one of fixed shapes
            pages = min(_power(len(pages_of(parts, self._storage.num_blocks))), pages)
        key = (rows, max(_OWNERS, len(parts) + 1), pages)
        if (kept := self._kept.get(key)) is None:
            kept = _Bucket(Layout(*key, self._storage.num_blocks, self._device, self._flexible))
            if rows <= ROWS[-1]:
                self._kept[key] = kept
        kept.layout.fill(tokens, parts)
        some = torch.from_numpy(wanted.astype(np.int64)).to(self._device)
        if rows > ROWS[-1] or not self._graphs:
            return self._forward(kept.layout, some)
        if kept.graph is None:
            try:
                self._capture(kept)
            except RuntimeError as error:  # experts that are chosen on the host, for one
                logger.warning("no CUDA graphs, since this network cannot be recorded: %s", error)
                self._graphs = False
                return self._forward(kept.layout, some)
        assert kept.graph is not None and kept.logits is not None
        kept.graph.replay()
        return kept.logits[some]

    def _forward(self, layout: Layout, keep: torch.Tensor | int) -> torch.Tensor:
        at = layout.on_device
        with attention.running(DevicePass(self._storage, layout)):
            output = self._network(
                input_ids=at["tokens"].long()[None],
                position_ids=at["positions"].long()[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _capture(self, kept: _Bucket) -> None:
        """Record a graph of the pass; kernels are compiled and memory is found by two runs before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(kept.layout, 0)
        torch.cuda.current_stream().wait_stream(stream)
        kept.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(kept.graph):
            kept.logits = self._forward(kept.layout, 0)


@dataclass
class _Bucket:
    """Buffers for passes of one size, and the graph over them."""

    layout: Layout
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None


def bucket(num_rows: int) -> int:
    """How many rows a pass of `num_rows` is filled up to."""
    return next((rows for rows in ROWS if rows >= num_rows), -(-num_rows // ROWS[-1]) * ROWS[-1])


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


# ---- choosing


@torch.inference_mode()
def choose_all(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """int64 [n], on the device: what sample and match says after every row of logits [n, vocab] (`engine.kernels.choose`).

    Where no row is sampled this is one argmax; else the noise of sampled rows is computed, in float64 as everywhere, and scores
    are sorted for those with a top_k or top_p.
    """
    scores = torch.where(logits.isnan(), -torch.inf, logits.float())
    ids = scores.argmax(1)
    sampled = np.flatnonzero(choices.temperature > 0)
    if not len(sampled):
        return ids

    def there(array: NDArray[Any], rows: NDArray[np.int64] = sampled) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array[rows])).to(logits.device, non_blocking=True)[:, None]

    rows = there(np.arange(len(ids)))[:, 0]
    some = scores[rows]
    highest = some.amax(1, keepdim=True)
    z = (some.double() - highest.double()) * there(np.minimum(1 / np.maximum(choices.temperature, 1e-300), 1e300))
    with np.errstate(divide="ignore"):
        left = z >= there(np.log(choices.min_p))
    ordered = np.flatnonzero((choices.top_k[sampled] > 0) | (choices.top_p[sampled] < 1))
    if len(ordered):
        which = torch.from_numpy(ordered).to(logits.device, non_blocking=True)
        some_k, some_p = there(choices.top_k, sampled[ordered]), there(choices.top_p, sampled[ordered])
        left[which] &= _support(some[which], z[which], some_k, some_p)
    tokens = torch.arange(some.shape[1], device=logits.device)
    race = z + noise.gumbel(there(choices.seed.view(np.int64)), there(choices.position), tokens)
    best = torch.where(left, race, -torch.inf).argmax(1)
    ids[rows] = torch.where(highest[:, 0].isfinite(), best, ids[rows])
    return ids


def _support(scores: torch.Tensor, z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """bool [n, vocab]: what top_k (0: all) and then top_p leave, by falling score, among equals by rising id.

    `scores` float32 and `z` float64, which rise with them, [n, vocab]; `top_k` and `top_p` [n, 1].
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    inside = (rank < top_k) | (top_k == 0)
    weight = torch.where(inside, z.gather(1, order).exp(), 0)
    covered = weight.cumsum(1)
    inside &= (covered - weight < top_p * covered[:, -1:]) | (top_p == 1)
    return torch.zeros_like(inside).scatter(1, order, inside)


def likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [n, k], on the device: the ids of the k largest of every row [n, vocab], best first, ties in any order, NaN last.

    k is cut to the vocabulary.
    """
    scores = torch.where(logits.isnan(), -torch.inf, logits)
    return scores.topk(min(k, logits.shape[1]), 1).indices.int()


def fetch(*tensors: torch.Tensor) -> list[NDArray[Any]]:
    """All of them on the host, through pinned memory, with one wait."""
    here = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if tensors[0].device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return [tensor.numpy() for tensor in here]


class DevicePasses:
    """Passes on the device where a model's weights lie. See `passes.Passes`.

    The rule is applied there to all rows. Logits leave the device for sequences that ask for them, all theirs, together with
    the ids of the others. `flexible` chooses FlexAttention or the gathered pages; None is FlexAttention on CUDA, if it runs.
    """

    def __init__(self, model: Model, memory: int, flexible: bool | None = None) -> None:
        weight = next(model.network.parameters())
        self.storage = DeviceStorage(model.num_layers, model.kv_heads, model.head_dim, memory, weight.device, weight.dtype)
        self._network = model.network
        self._may_gather = flexible is None
        self._runner = Runner(self._network, self.storage, weight.is_cuda if flexible is None else flexible)

    def warm_up(self) -> None:
        """Run a pass of every usual size, as far as there are pages, so that kernels are compiled and graphs recorded."""
        try:
            self._run_all_sizes()
        except Exception as error:  # of a compiler, for one
            if not self._may_gather:
                raise
            logger.warning("FlexAttention does not run here, so pages are gathered: %s", error)
            self._runner = Runner(self._network, self.storage, False)
            self._run_all_sizes()

    def run(self, tokens: NDArray[np.int32], parts: Sequence[Part], asks: Sequence[Ask]) -> list[Said]:
        """See `passes.Passes`. Raises WorkerLost where the device has failed: this process cannot use it any more."""
        try:
            return self._run(tokens, parts, asks)
        except torch.AcceleratorError as error:
            raise WorkerLost(f"the device has failed: {error}") from error

    @torch.inference_mode()
    def _run(self, tokens: NDArray[np.int32], parts: Sequence[Part], asks: Sequence[Ask]) -> list[Said]:
        choices = Choices.together([ask.choices or Choices.likeliest(ask.num_rows) for ask in asks])
        wants_logits = np.repeat([ask.choices is None for ask in asks], [ask.num_rows for ask in asks])
        logits = self._runner.run(tokens, parts, asked_rows(parts, asks))
        some = logits[torch.from_numpy(np.flatnonzero(wants_logits)).to(logits.device)]
        ids = likeliest(logits, max(ask.top_k for ask in asks))
        chosen, top_ids, here = fetch(choose_all(logits, choices), ids, some.float())
        answers, row, first = list[Said](), 0, 0
        for ask in asks:
            mine = slice(row, row + ask.num_rows)
            row += ask.num_rows
            if ask.choices is None:
                answers.append(Said(here[first : first + ask.num_rows]))
                first += ask.num_rows
            else:
                answers.append(Said(chosen=chosen[mine], top_ids=top_ids[mine, : ask.top_k]))
        return answers

    def _run_all_sizes(self) -> None:
        table = KVTable(self.storage)
        try:
            for rows in (*ROWS, *range(2 * ROWS[-1], _MOST_WARM + 1, ROWS[-1])):
                if rows <= table.room:
                    table.reserve(rows)
                    chain = np.arange(-1, rows - 1, dtype=np.int32)
                    self.run(np.zeros(rows, np.int32), [Part(table, chain)], [Ask(1, 1, partial(Choices.likeliest, 1))])
        finally:
            table.close()
