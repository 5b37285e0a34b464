"""Standing steps: chunks and decodes that come and go over memory that stays, so that one captured call serves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tilewise import arguments, checks, traced
from tilewise.api.chunks import plain_pages
from tilewise.api.decoding import decode
from tilewise.api.options import StepOptions
from tilewise.api.standing import renew_plan
from tilewise.gpu import beside, calls
from tilewise.gpu.prefill import Forward, TileList
from tilewise.kvcache import PagedKVCache, PrefixCache
from tilewise.kvcache.slots import upload
from tilewise.plan import StepPlan
from tilewise.plan.standing import StandingPlan
from tilewise.plan.standing_step import StandingStep
from tilewise.plan.step import parts_of
from tilewise.plan.tiles import Ints
from tilewise.scores import DecodeOptions, Scores, Window

MOST_ROWS = 2**20


class Room:
    """What a standing step's forward is told of its chunks, in memory that never moves, and one copy fills.

    starts_q, starts_k: (most_parts + 1,) int32, of the chunks' parts, as attention_varlen takes them, but that the
    first one starts where the decodes end; parts that are not there are empty. table: (most_parts, table_pages) int32.
    decoding: (decode rows, 1, 1) bool, whether a row is a decode's; chunked: (rows,) bool, whether it is a chunk's.
    tiles: the chunks' tiles by the kernels that walk them, listed once per step for all layers.
    """

    def __init__(self, step: StandingStep, device: torch.device) -> None:
        parts, width, rows = step.most_parts, step.table_pages, step.decode.rows
        each = -(-(parts + 1) // 4) * 4  # all arrays begin at a multiple of 16 bytes
        flags = -(-rows // 16) * 4
        more = -(-step.rows // 16) * 4
        self._starts_k, self._decoding, self._chunked = each, 2 * each, 2 * each + flags
        self._table = self._chunked + more
        with torch.inference_mode(False):  # so that a step may be renewed under either mode
            self._words = torch.zeros(self._table + parts * width, dtype=torch.int32, device=device)
        self.starts_q, self.starts_k = (self._words[at : at + parts + 1] for at in (0, each))
        self.decoding = self._words[self._decoding : self._chunked].view(torch.bool)[:rows].view(rows, 1, 1)
        self.chunked = self._words[self._chunked : self._table].view(torch.bool)[: step.rows]
        self.table = self._words[self._table :].view(parts, width)
        self.tiles: dict[Forward, TileList] = {}

    def renew(self, step: StandingStep, lists: Sequence[Ints]) -> None:
        """Take the step as it is now. lists: the pages of each chunk's sequence."""
        given, size = zip(lists, step.chunks, step.lengths, strict=True), step.page_size
        parts = [(its, part) for its, (_, rows), stop in given for part in parts_of(rows, 0, stop, step.chunk)]
        count, width = len(parts), self.table.shape[1]
        values = np.zeros(self._table + count * width, np.int32)
        counts = [step.first_row, *(part.rows for _, part in parts)]
        starts_q = values[: len(self.starts_q)]
        starts_q[: count + 1] = np.cumsum(counts)
        starts_q[count + 1 :] = starts_q[count]
        starts_k = values[self._starts_k :][: len(self.starts_k)]
        starts_k[1 : count + 1] = np.cumsum([part.stop - part.start for _, part in parts])
        starts_k[count + 1 :] = starts_k[count]
        values[self._decoding : self._chunked].view(np.bool_)[: step.first_row] = True
        values[self._chunked : self._table].view(np.bool_)[step.first_row : starts_q[count]] = True
        for row, (its, part) in zip(values[self._table :].reshape(count, width), parts, strict=True):
            read = its[part.start // size : -(-part.stop // size)]
            row[: len(read)] = read
        upload(values, self._words.device, into=self._words[: len(values)])
        for tiles in self.tiles.values():
            tiles.make()


def make(
    pages: PagedKVCache,
    chunks: list[tuple[int, int]],
    plan_once: Callable[[PagedKVCache, list[tuple[int, int]]], StepPlan],
    *,
    rows: Any,
    max_chunks: Any,
    plan: Any,
    heads_q: int,
    window: Window | None,
    chunk: int,
    share: bool | None,
) -> StandingStep:
    """plan_step(..., rows=, max_chunks=). plan: of the decodes. plan_once: makes the plan of chunks as they are."""
    if not isinstance(plan, StandingPlan):
        raise TypeError(
            "decode must be a plan of plan_decode(..., rows=, max_length=) with rows, got "
            f"{type(plan).__name__}; such a plan may be one of no sequences"
        )
    if plan.tokens_per_seq != 1:
        raise NotImplementedError(
            f"decode with rows takes plans of one token per sequence, got {plan.tokens_per_seq}; leave rows out"
        )
    rows = checks.integer("rows", rows, plan.rows, MOST_ROWS)
    if max_chunks is None:
        raise ValueError("max_chunks must be given with rows: the most chunks that a step will have")
    max_chunks = checks.integer("max_chunks", max_chunks, 1, rows)
    of = weakref.ref(pages)

    def plan_now(now: list[tuple[int, int]]) -> StepPlan:
        cache = of()
        if cache is None:
            raise ValueError("plan outlived its cache; keep the cache while the plan is used")
        return plan_once(cache, now)

    seen = (window, chunk)
    step = StandingStep(rows, max_chunks, plan, heads_q, pages.page_size, *seen, share, pages.serial, plan_now)
    hold(step, pages, chunks)
    return traced.remember(step, pages)


def hold(
    step: StandingStep, pages: PagedKVCache, chunks: Sequence[tuple[int, int]], decode: Sequence[int] | None = None
) -> None:
    """Be the step of these checked chunks, whose sequences are as they are now. Raises with nothing changed.

    decode: as renew_step() takes it.
    """
    seqs = [seq for seq, _ in chunks]
    decodes = list(step.decode.seqs if decode is None else decode)
    if len(chunks) > step.max_chunks:
        raise ValueError(f"prefill must be at most the plan's {step.max_chunks} chunks, got {len(chunks)}")
    total = len(decodes) + sum(tokens for _, tokens in chunks)
    if total > step.rows:
        raise ValueError(
            f"prefill and the decodes must have at most the plan's {step.rows} rows together, got {total}, "
            f"{len(decodes)} of which are decodes"
        )
    named = set(decodes)
    if len(set(seqs)) < len(seqs) or not named.isdisjoint(seqs):
        twice = next(seq for seq in seqs if seqs.count(seq) > 1 or seq in named)
        raise ValueError(f"prefill and decode must name each sequence once, got sequence {twice} twice")
    lengths, most = tuple(pages.lengths_of(tuple(seqs)).tolist()), step.decode.max_length
    for seq, length in zip(seqs, lengths, strict=True):
        if length > most:
            raise ValueError(
                f"prefill must be of sequences of at most the plan's max_length of {most} tokens, but sequence {seq} "
                f"has {length}"
            )
    if decode is not None:
        renew_plan(step.decode, pages, decode)
    step.hold(tuple(chunks), lengths)
    room = _rooms.get(step.serial)
    if room is not None:
        room.renew(step, [pages.page_list(seq) for seq in seqs])


# By a step's number, for as long as it lives: its arrays on its cache's device, made by the first call of a kernel.
_rooms: dict[int, Room] = {}


def _room_of(step: StandingStep, pages: PagedKVCache) -> Room:
    room = _rooms.get(step.serial)
    if room is None:
        room = Room(step, pages.device)
        room.renew(step, [pages.page_list(seq) for seq, _ in step.chunks])
        weakref.finalize(step, _rooms.pop, step.serial, None)
        _rooms[step.serial] = room
    return room


def check_current(step: StandingStep, pages: PagedKVCache) -> None:
    """ValueError if a sequence has changed since the step was renewed."""
    if step.chunks:
        seqs = tuple(seq for seq, _ in step.chunks)
        changed = np.flatnonzero(pages.lengths_of(seqs) != step.lengths)
        if len(changed):
            at = changed[0]
            raise ValueError(
                f"plan is out of date: sequence {seqs[at]} had {step.lengths[at]} tokens and now has "
                f"{pages.length(seqs[at])}; call renew_step after extending"
            )


def attend_by_kernels(
    q: torch.Tensor,
    cache: PagedKVCache | PrefixCache,
    layer: int,
    step: StandingStep,
    scores: Scores,
    options: DecodeOptions,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    backend: str,
) -> None:
    """The rows q (rows, Hq, D) by kernels: fills o (rows, Hq, Dv), no part of q, and lse (Hq, rows) if there is one.

    Decodes and chunks run side by side. Rows that either kernel leaves to the other, or that are idle, it may write
    where the other writes, so decodes write apart, and their rows are put in their places when both are done.
    """
    pages = arguments.check_cache(cache)
    if pages.format.dtype != q.dtype:
        raise NotImplementedError(
            f"standing steps read pages of q's dtype, got {q.dtype} over {pages.format.name}; leave rows out of "
            "plan_step, which converts pages for each step"
        )
    if step.chunk % pages.page_size:
        raise NotImplementedError(
            f"standing steps take a chunk that is a multiple of the page size, {pages.page_size}, got {step.chunk}; "
            "leave rows out of plan_step, or use pages of another size"
        )
    room, rows, logs = _room_of(step, pages), step.decode.rows, lse is not None
    o.zero_()  # what no row is written to
    if lse is not None:
        lse.fill_(-torch.inf) if scores.sinks is None else lse.copy_(scores.sinks[:, None].expand_as(lse))
    apart = q.new_empty((rows, 1, q.shape[1], pages.value_dim))
    more: StepOptions = {**options, "out": apart, "backend": backend}
    got: Any = None
    if beside.side_by_side(q.device):
        branch = beside.Beside(q.device)
        if beside.ORDER == "chunks first":
            _forward(q, pages, layer, step, scores, room, o, lse, backend)
        with branch:
            got = decode(q[:rows, None], cache, layer, step.decode, return_lse=logs, **more)
        if beside.ORDER == "decodes first":
            _forward(q, pages, layer, step, scores, room, o, lse, backend)
        branch.join()
    else:
        got = decode(q[:rows, None], cache, layer, step.decode, return_lse=logs, **more)
        _forward(q, pages, layer, step, scores, room, o, lse, backend)
    torch.where(room.decoding, apart[:, 0], o[:rows], out=o[:rows])
    if lse is not None:
        lse[:, :rows] = torch.where(room.decoding.flatten(), got[1][..., 0].T, lse[:, :rows])


def _forward(
    q: torch.Tensor,
    pages: PagedKVCache,
    layer: int,
    step: StandingStep,
    scores: Scores,
    room: Room,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    backend: str,
) -> None:
    """The chunks' rows. Not by attention_varlen, whose first sequence starts at row 0."""
    k, v = plain_pages(pages, layer)
    sinks = scores.sinks
    # One call for all layers, in the emulator as on a card: each call that is bound lists its tiles once per step.
    others = (sinks, None, o, None, None, None, room.starts_q, room.starts_k, room.table)
    key, call = calls.known_call(q, k, v, others, (True, False, lse is not None, True, "standing", scores.rule))
    if call is None:
        call = calls.bind(q, backend, scores.rule, lse is not None, key, v)
    starts = (room.starts_q, room.starts_k)
    got = call(q, k, v, sinks, None, o, starts=starts, page_table=room.table, listed=room.tiles)
    if lse is not None:
        torch.where(room.chunked, got[1], lse, out=lse)
