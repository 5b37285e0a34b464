"""Decode on a GPU, kernels/decode/decode*.cu: which kernel serves a plan, its arguments, its launch.

`run` attends a plan's queries over one layer's pages, on a card or, over CPU tensors, in the emulator. The
work list (plan/worklist.py) is made once per plan, and all layers of a step share it. What changes when
sequences only grow lies apart in a few bytes, which WorkList.grow renews: a captured graph replays over them.

Unshared, a sequence's result is the same to the bit whatever else is decoded with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise import compiler, emulator, tuned
from tilewise.arch import card_of, hopper, multiprocessors
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.formats import KVFormat
from tilewise.gpu.abi import DecodeArgs, Divisor, Paged, ScoreArgs, Strides, decode_score_rule
from tilewise.gpu.decode_kernels import (
    BITS,
    DecodeTiling,
    Parts,
    choose_tiling,
    chunk_map,
    chunk_tokens,
    decode_spec,
    line_heads,
    row_bytes,
    scales_in_runs,
    tile_map,
    tile_tokens,
    tiles_can,
    tiles_whole,
    widest,
)
from tilewise.gpu.decode_shapes import (
    AnyPlan,
    as_measured,
    check_served,
    has_wide_nodes,
    shape_of,
    slice_of_values,
    value_slices,
)
from tilewise.gpu.decode_shapes import fills_one_block as fills_one_block
from tilewise.gpu.decode_small import SmallDecode, SmallShape, small_shape
from tilewise.gpu.plan_step import Batch
from tilewise.gpu.planner import PlannedList
from tilewise.gpu.select import Select
from tilewise.plan.standing import StandingPlan
from tilewise.plan.tiles import DecodePlan
from tilewise.plan.worklist import (
    CHUNK,
    PageLists,
    Shape,
    Splitting,
    WorkList,
    work_list,
)
from tilewise.scores import Scores

Longs = npt.NDArray[np.int64]
AnyList = WorkList | PlannedList
FindBatch = Callable[[], Batch]  # of a standing plan, as it is now


@dataclass
class Workspace:
    """Scratch of launches that follow each other: partial states, the lists of selected pages, and the counter of the
    grid barrier."""

    o: torch.Tensor
    ml: torch.Tensor
    lists: torch.Tensor
    barrier: torch.Tensor


class Decode:
    """The kernel, work list and scratch for one plan and kind of tensors; called once per layer."""

    def __init__(
        self,
        plan: AnyPlan,
        device: torch.device,
        codes: tuple[torch.Tensor, torch.Tensor],
        listed: AnyList,
        asked: Asked,
    ) -> None:
        fmt, tiling, tma = asked.fmt, asked.tiling, asked.tma
        self.fmt, self.listed, self.device = fmt, listed, device
        self.heads_kv = plan.heads_kv
        # Sequences that read the same pages find them in L2 if they do not ask at the same time. So with 16-bit pages
        # that several sequences have, warps are not kept in step: 64 × (8192 + 256) unshared takes 242 µs, not 288.
        apart = BITS[fmt.name] == 16 and isinstance(plan, DecodePlan) and plan.stored_tokens < sum(plan.lengths)
        in_step = tma and listed.in_step and not apart and asked.selections <= 1  # else heads read different pages
        sides, lines = (fmt, fmt.values), (1, 1)
        packed = all(x.stride(2) * x.element_size() == row_bytes(f) for x, f in zip(codes, sides, strict=True))
        if in_step and packed:
            lines = line_heads(fmt, tiling.warps), line_heads(fmt.values, tiling.warps)
        whole = tiles_whole(codes)
        self.spec = decode_spec(
            asked.dtype,
            fmt,
            asked.page_size,
            tiling,
            tma=tma,
            scale_runs=asked.scale_runs,
            rule=asked.rule,
            tree=asked.tree,
            tiles_whole=whole,
            in_step=in_step,
            line_heads=lines,
            selected=asked.selections > 0,
        )
        self.map_specs: list[TensorMapSpec | None] = [None, None]
        if tma:
            heads = tiling.warps if in_step else 1
            self.map_specs = [
                chunk_map(x, row_bytes(side), chunk_tokens(fmt), heads, line)
                for x, side, line in zip(codes, sides, lines, strict=True)
            ]
        if tiling.tile_stages and tma:
            self.map_specs += [tile_map(x, tile_tokens(fmt), whole) for x in codes]
        group = plan.heads_q // plan.heads_kv
        self.rows_each = plan.tokens_per_seq * group
        self.fixed = listed.tensors(self.device)
        a = self.args = DecodeArgs()
        for name in ("items", "tile_items", "order", "states", "pages"):
            setattr(a, name, self.fixed[name].data_ptr())
        a.lengths = self.fixed["live"].data_ptr()
        a.tails = a.lengths + 4 * listed.sequences
        a.slots, a.tile_rounds = listed.items.shape[1], len(listed.tile_items)
        a.sequences, a.merge_rows = listed.sequences, self._merge_rows(tiling)
        a.kv_heads, a.tokens = plan.heads_kv, plan.tokens_per_seq
        a.table_pages, a.tail_pages = listed.pages.shape[1], listed.tail_pages
        a.group, a.rows_each = Divisor.by(group), Divisor.by(self.rows_each)
        a.merge_jobs = Divisor.by(-(-plan.heads_kv * self.rows_each // max(1, a.merge_rows)))
        self.select = None
        if asked.selections and isinstance(listed, WorkList):
            self.select = Select(listed, a, self.device, asked.selections)
        self.grid = (listed.blocks, 1, 1)
        self.workspaces: dict[int | None, Workspace] = {}
        # Barrier counters that nobody has yet: one for graphs, one for the stream that is asked for first.
        self.counters = list(torch.zeros((2, 1), dtype=torch.int32, device=self.device).unbind())
        self.graph_barrier = self._barrier()
        if self.device.type == "cuda":
            self.kernel = compiler.load(self.spec, self.device)
            self.launch_args = compiler.Args(*[compiler.TensorMap.blank()] * len(self.map_specs), a)

    def _merge_rows(self, tiling: DecodeTiling) -> int:
        """Rows per merging job, 0 if no row has several states. One where there are few rows, whose states several
        warps then share; else two, or four where there would be more jobs than warps."""
        if not self.listed.total_states:
            return 0
        rows = self.listed.sequences * self.heads_kv * self.rows_each
        if rows <= self.listed.blocks and tiling.merging_warps >= 4:
            return 1
        return 2 if rows <= 2 * self.listed.blocks * tiling.merging_warps else 4

    def _barrier(self) -> torch.Tensor:
        return self.counters.pop() if self.counters else torch.zeros(1, dtype=torch.int32, device=self.device)

    def _workspace(self, stream: int | None) -> Workspace:
        """The scratch of a stream, whose launches follow each other; None: of graphs, which own what they allocate.

        A plan's graphs share one barrier counter, made before them: they must not be replayed at the same time.
        """
        found = self.workspaces.get(stream)
        if found is None or stream is None:
            rows = max(1, self.listed.total_states * self.heads_kv * self.rows_each)
            found = self.workspaces[stream] = Workspace(
                torch.empty(rows * self.fmt.values.head_dim, dtype=torch.float32, device=self.device),
                torch.empty(rows * 2, dtype=torch.float32, device=self.device),
                torch.empty(self.select.words if self.select else 0, dtype=torch.int32, device=self.device),
                self.graph_barrier if stream is None else self._barrier(),
            )
        return found

    def __call__(
        self,
        q: torch.Tensor,
        k_parts: Parts,
        v_parts: Parts,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        scores: Scores,
        tree: torch.Tensor | None,
        selected: torch.Tensor | None,
        **emulated: Any,
    ) -> None:
        """Fills o, and lse if there is one, both like q. emulated: options of emulator.launch.

        tree: (num_seqs, tokens_per_seq) int32, bit j of a row's word telling whether it sees query token j. selected:
        as in `run`.
        """
        a = self.args
        sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
        a.q, a.o, a.lse = q.data_ptr(), o.data_ptr(), None if lse is None else lse.data_ptr()
        a.tree = None if tree is None else tree.data_ptr()
        a.scores = ScoreArgs.of(scores)
        a.scores.sinks = None if sinks is None else sinks.data_ptr()
        a.q_strides, a.o_strides = Strides.of(q), Strides.of(o)
        size = k_parts[0].element_size()
        a.k, a.v = Paged.of(k_parts[0], size), Paged.of(v_parts[0], size)
        if len(k_parts) > 1:
            a.k_scale, a.v_scale = Paged.of(k_parts[1]), Paged.of(v_parts[1])
        if len(k_parts) > 2:
            a.k_zero, a.v_zero = Paged.of(k_parts[2]), Paged.of(v_parts[2])
        cuda = self.device.type == "cuda"
        stream = compiler.raw_stream(self.kernel.ordinal) if cuda else 0
        capturing = cuda and torch.cuda.is_current_stream_capturing()
        if isinstance(self.listed, PlannedList):
            self.listed.make(stream, capturing)
        space = self._workspace(None if capturing else stream)
        a.state_o, a.state_ml, a.barrier_counter = (x.data_ptr() for x in (space.o, space.ml, space.barrier))
        if self.select and selected is not None:
            self.select(selected, space.lists, stream, **emulated)
        pointers = (k_parts[0].data_ptr(), v_parts[0].data_ptr())
        if cuda:
            for n, spec in enumerate(self.map_specs):
                if spec is not None:
                    self.launch_args.point(n, compiler.encode(spec, pointers[n % 2]))
            self.kernel.launch(self.grid, self.launch_args, stream=stream, cooperative=bool(a.merge_rows))
            return
        tensors = {"q": q, "o": o, "lse": lse, "sinks": sinks, "tree": tree, **self.fixed}
        tensors |= {"state_o": space.o, "state_ml": space.ml, "lists": space.lists, "barrier": space.barrier}
        for name, parts in (("k", k_parts), ("v", v_parts)):
            tensors |= {f"{name}{n}": x for n, x in enumerate(parts)}
        known = {name: x for name, x in tensors.items() if x is not None}
        maps = [
            emulator.TensorMap() if spec is None else emulator.tensor_map(spec, pointers[n % 2])
            for n, spec in enumerate(self.map_specs)
        ]
        resident = self.grid[0] if a.merge_rows else 1
        emulator.launch(self.spec, self.grid, [*maps, a], known, resident=resident, **emulated)


class Asked(NamedTuple):
    """What a bound kernel depends on besides the plan: a call that differs in any of it gets a kernel of its own."""

    listed: int  # the id of the work list
    device: torch.device
    dtype: torch.dtype
    fmt: KVFormat
    tiling: DecodeTiling
    page_size: int
    tma: bool
    scale_runs: bool
    rule: tuple[str, str]
    tree: bool
    selections: int  # of pages, per sequence: one per KV head, one for all of them, or 0 if all pages are read
    pages: int
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    small: SmallShape | None  # of the kernel for few sequences, if that one serves


class Kept(NamedTuple):
    """What a plan has: its work lists, by device and shape, and the kernels that are bound to them."""

    lists: dict[Any, Any]  # WorkLists, of a standing plan PlannedLists
    bound: dict[Any, Any]  # by what a call asks for; mla.py keeps its own here too


# By a plan's serial number, for as long as the plan lives: a plan itself is a value, and keeps nothing of a device.
_kept: dict[int, Kept] = {}


def kept(plan: AnyPlan) -> Kept:
    """What was made for this plan so far."""
    found = _kept.get(plan.serial)
    if found is None:
        found = _kept.setdefault(plan.serial, Kept({}, {}))  # two threads may come at once
        weakref.finalize(plan, _kept.pop, plan.serial, None)
    return found


def bind(
    plan: AnyPlan,
    q: torch.Tensor,
    fmt: KVFormat,
    k_parts: Parts,
    v_parts: Parts,
    page_lists: PageLists | FindBatch,
    lengths: Sequence[int] | Longs,
    scores: Scores,
    *,
    tree: bool = False,
    selections: int = 0,
    splitting: Splitting | None = None,
    room: int = 0,
    tma: bool | None = None,
    tiles: bool | None = None,
    small: bool | SmallShape | None = None,
    processors: int | None = None,
) -> tuple[AnyList, Decode | SmallDecode | None]:
    """The plan's list, and the kernel that serves it, made once per plan and kind of call; None for no queries.

    Arguments as of `run`. tree: whether there is a mask of query tokens. selections: Asked.selections. processors: of
    the card that the kernel is for, if that is not the one of the tensors.
    """
    check_served(q, fmt, plan, (k_parts[0], v_parts[0]))
    processors = processors or multiprocessors(q.device)
    page_size, card = k_parts[0].shape[1], card_of(q.device)
    if tma is None:
        tma = page_size % CHUNK == 0 and hopper(card)
    many_rows = (tiles is None or tiles) and has_wide_nodes(plan, splitting)
    tiles = many_rows and tiles_can(q.dtype, fmt, tma, card, tree)
    rows = plan.tokens_per_seq * (plan.heads_q // plan.heads_kv)
    if (
        many_rows and not tiles and not hopper(card)
    ):  # without tiles, sixteen rows at a time: the node is read half as often
        rows = max(rows, 16)
    deep = tma and not tiles and widest(fmt) <= 128 and fills_one_block(plan, fmt, processors)
    tiling = choose_tiling(fmt, rows, tiles, tma, card, deep)
    if not tiles and (table := tuned.of(q.device)) is not None:
        tiling = as_measured(table, fmt, tiling, card)
    chunk = chunk_tokens(fmt)
    shape = shape_of(tiling, chunk, q.device, processors)
    listed = list_of(plan, page_lists, lengths, page_size, shape, q.device, splitting=splitting, room=room)
    if not q.numel():
        return listed, None
    runs = len(k_parts) > 1 and scales_in_runs(fmt, page_size, k_parts[1:])
    runs = runs and scales_in_runs(fmt.values, page_size, v_parts[1:])
    codes = (k_parts[0], v_parts[0])
    strides = (codes[0].stride(), codes[1].stride())
    few = None
    if isinstance(plan, DecodePlan) and isinstance(listed, WorkList):
        few = small_shape(plan, q, fmt, listed, card, processors, room, splitting, bool(tree or selections), small)
    asked = Asked(
        id(listed), q.device, q.dtype, fmt, tiling, page_size, tma, runs, decode_score_rule(scores),
        tree, selections, len(codes[0]), strides, few,
    )  # fmt: skip
    bound = kept(plan).bound.get(asked)
    if bound is None:
        if few is not None and isinstance(plan, DecodePlan) and isinstance(listed, WorkList):
            bound = SmallDecode(plan, codes, listed, asked, splitting, room)
        else:
            bound = Decode(plan, q.device, codes, listed, asked)
        kept(plan).bound[asked] = bound
    return listed, bound


def run(
    plan: AnyPlan,
    q: torch.Tensor,
    fmt: KVFormat,
    k_parts: Parts,
    v_parts: Parts,
    page_lists: PageLists | FindBatch,
    lengths: Sequence[int] | Longs,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    scores: Scores,
    *,
    tree: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    splitting: Splitting | None = None,
    room: int = 0,
    tma: bool | None = None,
    tiles: bool | None = None,
    small: bool | SmallShape | None = None,
    **emulated: Any,
) -> AnyList:
    """Attention of a plan's queries over one layer's pages; returns the plan's list, for its `grow` or `renew`.

    q: (num_seqs, tokens_per_seq, Hq, D) in the order of plan.seqs; o: the same of V's head_dim; lse: (num_seqs, Hq,
    tokens_per_seq) float32, contiguous, or None; of a standing plan num_seqs is its `rows`. fmt: of K, and of V beside
    it (KVFormat.values). k_parts, v_parts: its components of the layer, (num_pages, page_size, Hkv, *trailing).
    page_lists, lengths: of the plan's sequences, in the order of plan.seqs, looked at when the list is made; of a
    standing plan page_lists finds the batch. scores: its window and chunk are those of the plan. tree:
    (num_seqs, T, T) bool, which query tokens each row sees, the first being seen by all; causal if None. selected:
    int32 (num_seqs or 1, Hkv or 1, words), for a plan with pages_per_seq: bit j % 32 of word j // 32 tells whether the
    sequence and KV head read page j of the sequence's list; bits past its end may be anything. room: tokens that each
    sequence may grow by under WorkList.grow before a new plan is needed. tma, tiles: whether to load by TMA, and to put
    shared nodes through tiles; None for whatever the pages and the plan allow. small: whether the kernel for few
    sequences serves (a shape: that one); None for whatever is faster. emulated: options of emulator.launch.
    """
    slices = value_slices(fmt.values.head_dim)
    if len(slices) > 1:
        check_served(q, fmt, plan, (k_parts[0], v_parts[0]))
        for start, stop in slices:
            cut, values = slice_of_values(fmt, v_parts, start, stop)
            part, logs = o[..., start:stop], None if start else lse
            listed = run(
                plan, q, cut, k_parts, values, page_lists, lengths, part, logs, scores, tree=tree, selected=selected,
                splitting=splitting, room=room, tma=tma, tiles=tiles, small=small, **emulated,
            )  # fmt: skip
        return listed
    listed, bound = bind(
        plan, q, fmt, k_parts, v_parts, page_lists, lengths, scores,
        tree=tree is not None, selections=0 if selected is None else selected.shape[1], splitting=splitting, room=room,
        tma=tma, tiles=tiles, small=small,
    )  # fmt: skip
    if bound is None:
        return listed
    if not _aligned(q):
        q = q.clone(memory_format=torch.contiguous_format)
    to = o if _aligned(o) else torch.empty_like(o, memory_format=torch.contiguous_format)
    words = None if tree is None else _tree_words(tree)
    bound(q, k_parts, v_parts, to, lse, scores, words, selected, **emulated)
    if to is not o:
        o.copy_(to)
    return listed


def _tree_words(tree: torch.Tensor) -> torch.Tensor:
    """(num_seqs, T) int32: bit j of a row's word tells whether it sees query token j; all see the root, token 0."""
    places = torch.arange(tree.shape[-1], dtype=torch.int32, device=tree.device)
    return ((tree.to(torch.int32) << places).sum(-1, dtype=torch.int32) | 1).contiguous()


def grow(plan: DecodePlan, lengths: npt.NDArray[np.int64], page_lists: PageLists) -> None:
    """Take the sequences' new lengths, in the order of plan.seqs, into the plan and its lists, which stay as they are.

    Raises ValueError, with nothing changed, where a list has no room for them.
    """
    lists = list(kept(plan).lists.values())
    for listed in lists:
        listed.check_growth(lengths)
    for listed in lists:
        listed.grow(lengths, page_lists)
    object.__setattr__(plan, "lengths", tuple(lengths.tolist()))


def renew(plan: StandingPlan, batch: FindBatch) -> None:
    """Make a standing plan's lists those of the batch, which is looked for if there are any."""
    lists = kept(plan).lists
    if lists:
        found = batch()
        for listed in lists.values():
            listed.renew(found)


def list_of(
    plan: AnyPlan,
    page_lists: PageLists | FindBatch,
    lengths: Sequence[int] | Longs,
    page_size: int,
    shape: Shape,
    device: torch.device,
    *,
    splitting: Splitting | None = None,
    room: int = 0,
) -> AnyList:
    """The plan's list for `device`, made once per plan."""
    lists = kept(plan).lists
    key = (device, page_size, shape, splitting, room)
    found: AnyList | None = lists.get(key)
    if found is None:
        if isinstance(plan, StandingPlan):
            assert callable(page_lists)
            found = PlannedList(plan, shape, splitting or Splitting(), device)
            found.renew(page_lists())
        else:
            assert not callable(page_lists)
            found = work_list(plan, page_lists, list(lengths), page_size, shape, splitting=splitting, room=room)
        lists[key] = found
    return found


def _aligned(x: torch.Tensor) -> bool:
    """Do rows begin at multiples of four values? The kernel reads and writes up to so many at a time."""
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % (4 * x.element_size()) == 0 and all(s % 4 == 0 for s in strides)
