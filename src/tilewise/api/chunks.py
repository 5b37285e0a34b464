"""Chunks of prompts through the forward, on a GPU or in the emulator: a launch over pages, one more per level of
prefixes that they share, and the states merged."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.api.prefill import attention_varlen
from tilewise.gpu.widen import widen
from tilewise.kvcache import PagedKVCache
from tilewise.kvcache.slots import upload
from tilewise.plan.step import ChunkPlan
from tilewise.plan.tiles import Ints
from tilewise.scores import DecodeOptions, Window
from tilewise.state import merge_states

WIDTH = 64  # pages: tables are as wide as a multiple of it, so that steps of similar lengths are calls of one kind


class Launch(NamedTuple):
    """What a launch of the forward is told of its sequences. page_table: of the cache; widened: of widened pages."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    page_table: torch.Tensor
    widened: torch.Tensor


class Tables(NamedTuple):
    """A plan's tables on a device. own: of what each chunk reads for itself; levels: of the nodes that they share, from
    the root down; pages: all of them, each once; order: which of the given rows each of the plan's is, and back."""

    own: Launch
    levels: list[Launch]
    pages: torch.Tensor
    order: torch.Tensor | None
    back: torch.Tensor | None


def tables_of(plan: ChunkPlan, cache: PagedKVCache) -> Tables:
    """The plan's tables, made once per plan and cache, on the stream that is current then."""
    kept = _kept.get(id(plan))
    if kept is None:
        kept = _kept[id(plan)] = {}
        weakref.finalize(plan, _kept.pop, id(plan), None)
    found = kept.get(cache.serial)
    if found is None:
        found = kept[cache.serial] = _make_tables(plan, cache)
    return found


# By a plan's address, for as long as it lives: a plan itself is a value, and keeps nothing of a device.
_kept: dict[int, dict[int, Tables]] = {}


def _make_tables(plan: ChunkPlan, cache: PagedKVCache) -> Tables:
    size, device, order = cache.page_size, cache.device, plan.order.tolist()
    lists = [cache.page_list(seq) for seq in plan.seqs]
    pages = np.unique(np.concatenate([np.zeros(0, np.int32), *lists])).astype(np.int32)
    tokens = np.array(plan.tokens, np.int64)[order]
    ends = np.cumsum(tokens)

    def launch(rows: Sequence[int], keys: Sequence[int], of: Sequence[Ints]) -> Launch:
        width = -(-max(map(len, of), default=0) // WIDTH) * WIDTH
        table = np.zeros((len(of), width), np.int32)  # beyond a list's end anything will do that is a page
        for row, its in zip(table, of, strict=True):
            row[: len(its)] = its
        starts = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (rows, keys)]
        places = np.minimum(np.searchsorted(pages, table), len(pages) - 1).astype(np.int32)
        return Launch(*(upload(x, device) for x in (starts[0], starts[1], table, places)))

    own = launch(
        tokens.tolist(),
        [plan.lengths[n] - plan.own[n] for n in order],
        [lists[n][plan.own[n] // size :] for n in order],
    )
    levels = []
    for level in range(max((node.level for node in plan.nodes), default=-1) + 1):
        rows, keys, of = [], [], []
        at = 0
        for node in plan.nodes:
            if node.level != level:
                continue
            first = int(ends[node.first] - tokens[node.first])
            between = ((first - at, 0, lists[0][:0]),) if first > at else ()  # rows that share nothing at this level
            shared = lists[order[node.first]][node.start // size : node.stop // size]
            at = int(ends[node.end - 1])
            for count, length, pages_of in (*between, (at - first, node.stop - node.start, shared)):
                rows.append(count)
                keys.append(length)
                of.append(pages_of)
        if at < plan.rows:
            rows, keys, of = [*rows, plan.rows - at], [*keys, 0], [*of, lists[0][:0]]
        levels.append(launch(rows, keys, of))
    forth = back = None
    if not plan.in_order:
        by_row = plan.row_order().astype(np.int64)
        forth, back = upload(by_row, device), upload(np.argsort(by_row), device)
    return Tables(own, levels, upload(pages, device), forth, back)


def attend_chunks(
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    plan: ChunkPlan,
    options: DecodeOptions,
    out: torch.Tensor,
    return_lse: bool,
    backend: str,
) -> list[torch.Tensor]:
    """The chunks' rows q (rows, Hq, D): fills out, like q and no part of it; [the LSE (Hq, rows)] if asked for."""
    tables = tables_of(plan, cache)
    k_parts, v_parts = cache.parts(layer)
    wide = cache.format.dtype != q.dtype
    if wide:
        k, v = widen(cache.format, k_parts, v_parts, tables.pages, q.dtype)
    else:
        k, v = k_parts[0], v_parts[0]

    def forward(rows: torch.Tensor, launch: Launch, **more: Any) -> Any:
        table = launch.widened if wide else launch.page_table
        return attention_varlen(rows, k, v, launch.starts_q, launch.starts_k, page_table=table, backend=backend, **more)

    window: Window | None = plan.window
    if not tables.levels:
        got = forward(q, tables.own, causal=True, window=window, out=out, return_lse=return_lse, **options)
        return [got[1]] if return_lse else []
    assert tables.order is not None
    assert tables.back is not None
    rows = q.index_select(0, tables.order)
    # A sink is a key without a value: it is in one of the sets of keys, the chunks' own.
    states = [forward(rows, tables.own, causal=True, window=window, return_lse=True, **options)]
    open_options = {name: x for name, x in options.items() if name != "sinks"}
    states += [forward(rows, level, return_lse=True, **open_options) for level in tables.levels]
    o, lse = merge_states(*(torch.stack(x) for x in zip(*states, strict=True)))
    torch.index_select(o, 0, tables.back, out=out) if out.is_contiguous() else out.copy_(o.index_select(0, tables.back))
    return [lse.index_select(1, tables.back)] if return_lse else []
