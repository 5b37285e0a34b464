"""Decode over rows that are keys and values at once (MLA), kernels/mla: arguments and launches.

`run` attends a plan's queries over one layer's rows, on a card or, over CPU tensors, in the emulator. A row of
head_dim channels is stored once for its one KV head: all of it is the key, its first value_dim channels are the value.
The plan and its work list are those of decode (decode.py); the items are those of one body, for what sequences share
and for what is theirs. Hopper cards walk the list by mla_decode (mla_kernels.py), others by mla_decode_mma
(mla_mma.py), which takes no map of the rows for TMA; all else is the same.

Unshared, a sequence's result is the same to the bit whatever else is decoded with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise import checks, compiler, emulator, tuned
from tilewise.arch import card_of, hopper, multiprocessors
from tilewise.compiler.spec import KernelSpec
from tilewise.formats import KVFormat
from tilewise.gpu import mla_mma
from tilewise.gpu.abi import DecodeArgs, Divisor, MlaArgs, Paged, ScoreArgs, Strides, decode_score_rule
from tilewise.gpu.decode import AnyList, FindBatch, Longs, Workspace, kept, list_of
from tilewise.gpu.decode_shapes import AnyPlan
from tilewise.gpu.mla_kernels import (
    DTYPES,
    KEYS,
    LONGEST,
    MAPS,
    MAX_DIM,
    MAX_ROWS,
    MAX_TOKENS,
    NARROW,
    ROWS,
    WEIGHTS,
    WIDE,
    MlaTiling,
    choose_tiling,
    class_of,
    fits,
    mla_spec,
    row_map,
)
from tilewise.gpu.mla_mma import MmaTiling
from tilewise.gpu.planner import PlannedList
from tilewise.plan.flat import SEQUENCES
from tilewise.plan.items import Word
from tilewise.plan.standing import StandingPlan
from tilewise.plan.tiles import DecodePlan
from tilewise.plan.worklist import FAR, PageLists, Shape, Splitting, WorkList, equal_lists
from tilewise.scores import Scores

Parts = Sequence[torch.Tensor]
MAX_LISTS = 1 << 19  # query tokens that choose positions: decode/work.cuh, what an item's caller_head has room for


class Asked(NamedTuple):
    """What a bound kernel depends on besides the plan."""

    listed: int  # the id of the work list
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    tiling: MlaTiling | MmaTiling
    gather: bool
    stored: str  # the format of rows of codes, else empty
    chosen: int  # positions per query token that choose theirs, 0 for all
    rule: tuple[str, str]
    pages: int
    page_size: int
    strides: tuple[tuple[int, ...], ...]  # of each part of the rows


class MlaDecode:
    """The kernel, work list and scratch for one list and kind of tensors; called once per layer.

    tokens, heads: query tokens of each of the list's sequences, and query heads. parts: of a layer's rows, for their
    shapes and strides. cached: the list of the cache's sequences, where `listed` is of query tokens that choose theirs.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        parts: Parts,
        listed: AnyList,
        asked: Asked,
        cached: AnyList | None = None,
    ) -> None:
        self.listed, self.asked, self.device = listed, asked, asked.device
        self.spec = _spec(asked)
        self.maps = MAPS if isinstance(asked.tiling, MlaTiling) else 0  # that the kernel takes, be they of nothing
        boxes = self.maps and not (asked.gather or asked.chosen)
        self.map_specs = [row_map(x) for x in parts] if boxes else []
        self.rows_each = tokens * heads
        self.fixed = listed.tensors(self.device)
        a = self.args = DecodeArgs()
        for name in ("items", "order", "states", "pages"):
            setattr(a, name, self.fixed[name].data_ptr())
        self.lengths = self.fixed["live"].data_ptr()
        a.tails = self.lengths + 4 * listed.sequences
        a.slots, a.sequences = listed.items.shape[1], listed.sequences
        a.kv_heads, a.tokens = 1, tokens
        a.table_pages, a.tail_pages = listed.pages.shape[1], listed.tail_pages
        a.merge_rows = int(listed.total_states > 0)  # per job
        a.group, a.rows_each = Divisor.by(heads), Divisor.by(self.rows_each)
        a.merge_jobs = Divisor.by(self.rows_each)
        self.more = MlaArgs()
        self.cached = cached
        self.tables = {} if cached is None else self._point_at(cached)
        self.grid = (listed.blocks, 1, 1)
        self.folds = self._folds()
        self.workspaces: dict[int | None, Workspace] = {}
        self.graph_barrier = self._barrier()
        if self.device.type == "cuda":
            self.kernel = compiler.load(self.spec, self.device)
            self.launch_args = compiler.Args(*[compiler.TensorMap.blank()] * self.maps, a, self.more)

    def _point_at(self, cached: AnyList) -> dict[str, torch.Tensor]:
        """The tables of the cache's sequences, which the kernel looks up chosen positions in."""
        more, found = self.more, {f"cached_{name}": x for name, x in cached.tensors(self.device).items()}
        # The pages of a standing plan stand in no tails.
        tail_from = np.full(cached.sequences, FAR, np.int32) if isinstance(cached, PlannedList) else cached.tail_from
        found["tail_from"] = torch.from_numpy(tail_from).to(self.device)
        found["places"] = torch.empty(cached.sequences, dtype=torch.int32, device=self.device)
        found["numbers"] = torch.arange(cached.sequences, dtype=torch.int32, device=self.device)
        more.tail_from, more.places = found["tail_from"].data_ptr(), found["places"].data_ptr()
        more.lengths, more.pages = found["cached_live"].data_ptr(), found["cached_pages"].data_ptr()
        more.tails = more.lengths + 4 * cached.sequences
        more.table_pages, more.tail_pages = cached.pages.shape[1], cached.tail_pages
        more.queries, more.chosen = Divisor.by(self.listed.sequences // cached.sequences), self.asked.chosen
        self._place(found)
        return found

    @staticmethod
    def _place(tables: dict[str, torch.Tensor]) -> None:
        """Where each of the caller's sequences stands in the tables."""
        tables["places"].scatter_(0, tables["cached_order"].long(), tables["numbers"])

    def _barrier(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def _workspace(self, stream: int | None) -> Workspace:
        """The scratch of a stream, whose launches follow each other; None: of graphs, which own what they allocate.
        `lists` holds what blocks keep of the pieces that they have folded."""
        if stream is None:
            self.workspaces.pop(None, None)  # of the layer before, whose memory this one takes
        found = self.workspaces.get(stream)
        if found is None:
            barrier = self.graph_barrier if stream is None else self._barrier()
            found = self.workspaces[stream] = self._scratch(barrier)
        return found

    def _scratch(self, barrier: torch.Tensor) -> Workspace:
        rows, value_dim = self.listed.total_states * self.rows_each, self.asked.value_dim
        folds = self.grid[0] * self.asked.tiling.rows * (2 * value_dim + 2) if self.folds else 0
        o, ml, lists = (
            torch.empty(n, dtype=torch.float32, device=self.device) for n in (rows * value_dim, rows * 2, folds)
        )
        return Workspace(o, ml, lists, barrier)

    def _folds(self) -> bool:
        """Does a block take a range whole that it computes in pieces? In a standing plan's list one may."""
        listed = self.listed
        return isinstance(listed, PlannedList) or bool((listed.items[..., Word.STATE_FOLD] & 0xFFFF).any())

    def __call__(
        self,
        q: torch.Tensor,
        parts: Parts,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        scores: Scores,
        indices: torch.Tensor | None,
        counts: torch.Tensor | None = None,
        **emulated: Any,
    ) -> None:
        """Fills o, and lse if there is one. indices: contiguous int32. counts: (query tokens,) int32, contiguous, how
        many of its positions each token reads, if not all. emulated: options of emulator.launch."""
        a = self.args
        a.lengths = self.lengths if counts is None else counts.data_ptr()
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        a.q, a.o, a.lse = q.data_ptr(), o.data_ptr(), None if lse is None else lse.data_ptr()
        a.scores = ScoreArgs.of(scores)
        a.scores.sinks = None if sinks is None else sinks.data_ptr()
        a.q_strides, a.o_strides = Strides.of(q), Strides.of(o)
        rows = parts[0]
        a.k = Paged.of(rows, rows.element_size())
        if self.asked.stored:
            a.k_scale = Paged.of(parts[1], parts[1].element_size())
        if len(parts) > 2:
            a.v = Paged.of(parts[2], parts[2].element_size())
        cuda = self.device.type == "cuda"
        stream = compiler.raw_stream(self.kernel.ordinal) if cuda else 0
        capturing = cuda and torch.cuda.is_current_stream_capturing()
        for listed in (self.listed, self.cached):
            if isinstance(listed, PlannedList):
                listed.make(stream, capturing)
        if isinstance(self.cached, PlannedList):
            self._place(self.tables)
        space = self._workspace(None if capturing else stream)
        a.state_o, a.state_ml, a.barrier_counter = (x.data_ptr() for x in (space.o, space.ml, space.barrier))
        self.more.folds = space.lists.data_ptr()
        self.more.indices = None if indices is None else indices.data_ptr()
        if cuda:
            for n, spec in enumerate(self.map_specs):
                self.launch_args.point(n, compiler.encode(spec, parts[n].data_ptr()))
            self.kernel.launch(self.grid, self.launch_args, stream=stream, cooperative=bool(a.merge_rows))
            return
        tensors = {
            "q": q,
            "o": o,
            "lse": lse,
            "sinks": sinks,
            "indices": indices,
            "counts": counts,
            **self.fixed,
            **self.tables,
            **{f"rows{n}": x for n, x in enumerate(parts)},
        }
        tensors |= {"state_o": space.o, "state_ml": space.ml, "folds": space.lists, "barrier": space.barrier}
        known = {name: x for name, x in tensors.items() if x is not None}
        maps: list[Any] = [emulator.tensor_map(s, x.data_ptr()) for s, x in zip(self.map_specs, parts, strict=False)]
        maps += [emulator.TensorMap()] * (self.maps - len(maps))
        resident = self.grid[0] if a.merge_rows else 1
        emulator.launch(self.spec, self.grid, [*maps, a, self.more], known, resident=resident, **emulated)


def _spec(asked: Asked) -> KernelSpec:
    """The kernel of the card whose tiling it is."""
    sizes = asked.dtype, asked.head_dim, asked.value_dim, asked.page_size
    kind: dict[str, Any] = {"chosen": asked.chosen > 0, "stored": asked.stored, "rule": asked.rule}
    if isinstance(asked.tiling, MmaTiling):
        return mla_mma.mma_spec(*sizes, asked.tiling, **kind)
    return mla_spec(*sizes, asked.tiling, gather=asked.gather, **kind)


def _one_by_one(page_size: int) -> bool:
    """Do rows of such pages come one by one? A copy by TMA brings sixteen or more, which must lie in one page."""
    return page_size % 16 != 0


def _way(page_size: int, chosen: bool) -> str:
    """How rows come, of tuned.MLA_WAYS."""
    return "chosen" if chosen else "gather" if _one_by_one(page_size) else "boxes"


def spec_of(
    dtype: torch.dtype,
    form: KVFormat,
    value_dim: int,
    rows: int,
    page_size: int,
    device: torch.device,
    rule: tuple[str, str],
    *,
    chosen: bool = False,
) -> KernelSpec:
    """The kernel that `run` takes for queries of `dtype` and items of so many query rows."""
    tiling = tiling_of(form, value_dim, rows, device, way=_way(page_size, chosen))
    gather, stored = _one_by_one(page_size), "" if form.plain else form.name
    return _spec(
        Asked(0, device, dtype, form.head_dim, value_dim, tiling, gather, stored, int(chosen), rule, 0, page_size, ())
    )


def check_served(q: torch.Tensor, form: KVFormat, parts: Parts, value_dim: int) -> None:
    """NotImplementedError for what the kernel does not serve. q: (…, heads, head_dim)."""
    instead = 'backend="cpu"' if q.device.type == "cpu" else ".cpu() tensors"
    codes = form.name in ("fp8", "int8") and q.dtype == torch.bfloat16
    if q.dtype not in DTYPES or not (codes or form.dtype == q.dtype):
        raise NotImplementedError(
            f"GPU decode over shared rows takes bfloat16 queries over bf16, fp8 and int8 caches, and float16 ones over "
            f"fp16 caches, got {q.dtype} over {form.name}; convert q, or use {instead}"
        )
    if codes and (form.head_dim, form.latent, value_dim) not in ((576, 512, 512), (512, 512, 512)):
        raise NotImplementedError(
            f"GPU decode over shared rows of codes takes 512 channels of them, all of them values, and 0 or 64 more, "
            f"got {form.latent} of {form.head_dim}, and value_dim {value_dim}; use {instead}"
        )
    if form.head_dim % 64 or form.head_dim > MAX_DIM or value_dim % 128 or not 0 < value_dim <= form.head_dim:
        raise NotImplementedError(
            f"GPU decode over shared rows takes a head_dim up to {MAX_DIM} that is a multiple of 64, and a value_dim "
            f"up to head_dim that is a multiple of 128, got {form.head_dim} and {value_dim}; use {instead}"
        )
    if q.shape[-2] > MAX_ROWS:
        raise NotImplementedError(
            f"GPU decode over shared rows takes up to {MAX_ROWS} query heads, got {q.shape[-2]}; use {instead}"
        )
    for x in parts:
        if x.data_ptr() % 16 or x.stride(3) != 1 or any(s * x.element_size() % 16 for s in x.stride()[:2]):
            raise NotImplementedError(
                f"GPU decode takes pages whose rows begin at multiples of 16 bytes, got strides {x.stride()} of "
                f"{x.dtype} at {x.data_ptr():#x}; use {instead}"
            )


def _check_plan(q: torch.Tensor, plan: AnyPlan, chosen: bool) -> None:
    """The same of the plan's sizes. chosen: each query token is a sequence by itself."""
    tokens = 1 if chosen and isinstance(plan, DecodePlan) else plan.tokens_per_seq
    if plan.heads_kv != 1 or tokens > MAX_TOKENS or plan.heads_q * tokens > MAX_ROWS:
        instead = 'backend="cpu"' if q.device.type == "cpu" else ".cpu() tensors"
        raise NotImplementedError(
            f"GPU decode over shared rows takes one KV head, up to {MAX_TOKENS} tokens a sequence and up to {MAX_ROWS} "
            f"query heads of all of them, got {plan.heads_kv}, {plan.tokens_per_seq} and {plan.heads_q} of each; "
            f"use {instead}"
        )
    if chosen and len(q) * plan.tokens_per_seq >= MAX_LISTS:
        raise NotImplementedError(
            f"GPU decode takes indices of fewer than {MAX_LISTS} query tokens at once, got "
            f"{len(q) * plan.tokens_per_seq}; decode some at a time"
        )


def most_rows(plan: AnyPlan) -> int:
    """Query rows of the widest range of the plan: of a sequence, or of all sequences of a node that is shared, or may
    be after the plan was renewed."""
    each = plan.tokens_per_seq * plan.heads_q
    if isinstance(plan, StandingPlan):
        return each * (1 if plan.share is False else plan.rows)
    return each * int(plan.arrays.nodes[:, SEQUENCES].max(initial=1))


def _shape(tiling: MlaTiling | MmaTiling, device: torch.device) -> tuple[Shape, Splitting]:
    """The shape of a kernel's list on `device`, and how ranges are cut for it."""
    blocks, splitting = multiprocessors(device), WIDE if tiling.rows == ROWS[-1] else NARROW
    return Shape(
        tiling.rows, 1, blocks, tiles=False, longest=LONGEST, chunk=KEYS, weights=WEIGHTS[tiling.rows]
    ), splitting


def tiling_of(form: KVFormat, value_dim: int, rows: int, device: torch.device, *, way: str) -> MlaTiling | MmaTiling:
    """The kernel's shape for items of so many rows over a cache of this format: on Hopper what was measured, else as it
    is chosen without a table. way: how rows come, one of tuned.MLA_WAYS; to other cards all of them come one by one."""
    card, codes, boxes = card_of(device), not form.plain, way == "boxes"
    if not hopper(card):
        return mla_mma.choose_tiling(form.head_dim, value_dim, rows, card, codes=codes)
    tiling, table = choose_tiling(form.head_dim, value_dim, rows, card, codes=codes, boxes=boxes), tuned.of(device)
    if table is None:
        return tiling
    key = tuned.mla_key(form.name, form.head_dim, value_dim, class_of(rows), way)
    return table.prefer("mla", key, tiling, lambda t: fits(form.head_dim, value_dim, t, card, boxes=boxes))


def run(
    plan: AnyPlan,
    q: torch.Tensor,
    form: KVFormat,
    parts: Parts,
    page_lists: PageLists | FindBatch,
    lengths: Sequence[int] | Longs,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    scores: Scores,
    *,
    value_dim: int,
    indices: torch.Tensor | None = None,
    splitting: Splitting | None = None,
    room: int = 0,
    **emulated: Any,
) -> AnyList:
    """Attention of a plan's queries over one layer's shared rows; returns the plan's list, for its `grow` or `renew`.

    q: (num_seqs, tokens_per_seq, Hq, head_dim), o: (num_seqs, tokens_per_seq, Hq, value_dim), in the order of
    plan.seqs; lse: (num_seqs, Hq, tokens_per_seq) float32, contiguous, or None; of a standing plan num_seqs is its
    `rows`, and page_lists finds the batch. parts: the components of the layer's
    rows, (num_pages, page_size, 1, *trailing). page_lists, lengths: of the plan's sequences, in the order of plan.seqs,
    looked at when the list is made. scores: its window and chunk are those that the plan was made with. indices: int32
    (num_seqs, tokens_per_seq, k): the positions that each query token reads, in any order and each once; one that is
    not a position of its sequence, such as −1, is none, and there is no other mask. The plan then says only whose
    tokens they are. room: tokens that each sequence may grow by under WorkList.grow before a new plan is needed.
    splitting: how ranges are cut, if not as the width of the plan asks. emulated: options of emulator.launch.
    """
    check_served(q, form, parts, value_dim)
    _check_plan(q, plan, indices is not None)
    rows, page_size, codes = parts[0], parts[0].shape[1], not form.plain
    gather, way = _one_by_one(page_size), _way(page_size, indices is not None)
    tiling = tiling_of(form, value_dim, most_rows(plan), q.device, way=way)
    shape, as_wide = _shape(tiling, q.device)
    splitting = splitting or as_wide
    if indices is not None and isinstance(plan, DecodePlan):
        shape = shape._replace(rows=FAR)  # of this list the tables alone are looked at: one item per range will do
    listed = list_of(plan, page_lists, lengths, page_size, shape, q.device, splitting=splitting, room=room)
    if not q.numel():
        return listed
    asked = Asked(
        id(listed), q.device, q.dtype, form.head_dim, value_dim, tiling, gather, form.name if codes else "", 0,
        decode_score_rule(scores), len(rows), page_size, tuple(x.stride() for x in parts),
    )  # fmt: skip
    if indices is not None:
        _run_chosen(plan, listed, asked, form, q, parts, o, lse, scores, indices, **emulated)
        return listed
    bound = kept(plan).bound.get(asked)
    if not isinstance(bound, MlaDecode):
        bound = kept(plan).bound[asked] = MlaDecode(plan.tokens_per_seq, plan.heads_q, parts, listed, asked)
    launch(bound, q, parts, o, lse, scores, None, **emulated)
    return listed


def launch(
    bound: MlaDecode,
    q: torch.Tensor,
    parts: Parts,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    scores: Scores,
    indices: torch.Tensor | None,
    counts: torch.Tensor | None = None,
    **emulated: Any,
) -> None:
    """The call with rows of q and o where the kernel can read and write them."""
    if not _aligned(q):
        q = q.clone(memory_format=torch.contiguous_format)
    to = o if _aligned(o) else torch.empty_like(o, memory_format=torch.contiguous_format)
    bound(q, parts, to, lse, scores, indices, counts, **emulated)
    if to is not o:
        o.copy_(to)


def chosen_list(
    each: int, count: int, heads: int, tiling: MlaTiling | MmaTiling, device: torch.device, *, folds: bool = True
) -> WorkList:
    """The list of `each` query tokens that choose `count` positions each. folds: as equal_lists says."""
    shape, splitting = _shape(tiling, device)
    return equal_lists(each, count, heads, shape, splitting=splitting, folds=folds)


def _run_chosen(
    plan: AnyPlan,
    cached: AnyList,
    asked: Asked,
    form: KVFormat,
    q: torch.Tensor,
    parts: Parts,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    scores: Scores,
    indices: torch.Tensor,
    **emulated: Any,
) -> None:
    """`run` over chosen positions: every query token is a sequence of as many tokens as it chooses."""
    sequences, tokens, heads = q.shape[:3]
    checks.tensor("indices", indices, shape=(sequences, tokens, None), dtypes=(torch.int32,), device=q.device)
    if not plan.reach.whole:
        raise NotImplementedError("indices with a window or a chunk are not served; leave out what these hide")
    count, device = indices.shape[2], q.device
    tiling = tiling_of(form, asked.value_dim, heads, device, way="chosen")
    asked = asked._replace(tiling=tiling, chosen=count)
    bound = kept(plan).bound.get(asked)
    if not isinstance(bound, MlaDecode):
        listed = chosen_list(sequences * tokens, count, heads, tiling, device)
        bound = kept(plan).bound[asked] = MlaDecode(1, heads, parts, listed, asked, cached)
    to = torch.empty(sequences * tokens, 1, heads, asked.value_dim, dtype=o.dtype, device=device)
    sums = None if lse is None else torch.empty(sequences * tokens, heads, 1, device=device)
    launch(bound, q.flatten(0, 1)[:, None], parts, to, sums, scores, indices.contiguous(), **emulated)
    o.copy_(to.view(o.shape))
    if lse is not None and sums is not None:
        lse.copy_(sums.view(sequences, tokens, heads).transpose(1, 2))


def _aligned(x: torch.Tensor) -> bool:
    """Do rows begin at multiples of 16 bytes? The kernel reads so many at a time."""
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in strides)
