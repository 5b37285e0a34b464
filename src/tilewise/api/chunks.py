"""Chunks of prompts through the forward, on a GPU or in the emulator: a launch over pages; where there are nodes, which
chunks share or which are pieces of their prefixes, one more for all of these, and one that merges the states."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tilewise.api.prefill import attention_varlen
from tilewise.gpu.merge_rows import merge_rows
from tilewise.gpu.widen import widen
from tilewise.kvcache import PagedKVCache
from tilewise.kvcache.slots import upload
from tilewise.plan.step import ChunkPlan, parts_of
from tilewise.plan.tiles import Ints
from tilewise.scores import DecodeOptions

WIDTH = 64  # pages: tables are as wide as a multiple of it, so that steps of similar lengths are calls of one kind


class Launch(NamedTuple):
    """What a launch of the forward is told of its sequences."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    page_table: torch.Tensor


class Nodes(NamedTuple):
    """The nodes of a plan, each of them a sequence of a launch. asked: (n,), which of the given rows stands at each of
    its rows; rows, table: which rows these make states of, and which of the n join each, as merge_rows takes them."""

    launch: Launch
    asked: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor


class Tables(NamedTuple):
    """A plan's tables on a device. own: of what each chunk, or part of it, reads that is in no node. widened: the pages
    of all chunks, each once, whose widened copies the tables name by their places in it; None where they name the
    cache's pages."""

    own: Launch
    nodes: Nodes | None
    widened: torch.Tensor | None


def tables_of(plan: ChunkPlan, cache: PagedKVCache, wide: bool) -> Tables:
    """The plan's tables, made once per plan and cache, on the stream that is current then. wide: of widened pages."""
    kept = _kept.get(id(plan))
    if kept is None:
        kept = _kept[id(plan)] = {}
        weakref.finalize(plan, _kept.pop, id(plan), None)
    found = kept.get((cache.serial, wide))
    if found is None:
        found = kept[cache.serial, wide] = _make_tables(plan, cache, wide)
    return found


# By a plan's address, for as long as it lives: a plan itself is a value, and keeps nothing of a device.
_kept: dict[int, dict[tuple[int, bool], Tables]] = {}


def _make_tables(plan: ChunkPlan, cache: PagedKVCache, wide: bool) -> Tables:
    size = cache.page_size
    lists: list[Ints] = [cache.page_list(seq) for seq in plan.seqs]
    arrays: list[Ints] = []
    if wide:
        pages = np.unique(np.concatenate(lists))
        lists = [np.searchsorted(pages, its).astype(np.int32) for its in lists]
    given = zip(lists, plan.tokens, plan.own, plan.lengths, strict=True)
    chunk = 0 if plan.chunk % size else plan.chunk
    parts = [(its, part) for its, rows, at, end in given for part in parts_of(rows, at, end, chunk)]
    arrays += _launch(
        [part.rows for _, part in parts],
        [part.stop - part.start for _, part in parts],
        [its[part.start // size : -(-part.stop // size)] for its, part in parts],
    )
    if plan.nodes:
        rows_of = [plan.row_order(node.first, node.end) for node in plan.nodes]
        asked = np.concatenate(rows_of)
        arrays += _launch(
            [len(rows) for rows in rows_of],
            [node.stop - node.start for node in plan.nodes],
            [lists[plan.order[node.first]][node.start // size : node.stop // size] for node in plan.nodes],
        )
        # A row's states in the order of the nodes, which is that of their tokens: merged in the same order each time.
        rows, counts = np.unique(asked, return_counts=True)
        table = np.full((len(rows), counts.max()), -1, np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.argsort(asked, kind="stable")
        arrays += [asked, rows, table]
    if wide:
        arrays.append(pages)
    made = _uploaded(arrays, cache.device)
    nodes = Nodes(Launch(*made[3:6]), *made[6:9]) if plan.nodes else None
    return Tables(Launch(*made[:3]), nodes, made[-1] if wide else None)


def _launch(rows: Sequence[int], keys: Sequence[int], lists: Sequence[Ints]) -> list[Ints]:
    """A Launch of so many rows and keys in these pages, as arrays."""
    width = -(-max(map(len, lists)) // WIDTH) * WIDTH
    table = np.zeros((len(lists), width), np.int32)  # beyond a list's end anything will do
    for row, its in zip(table, lists, strict=True):
        row[: len(its)] = its
    return [*(np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (rows, keys)), table]


def _uploaded(arrays: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """int32 arrays on a device, by one copy; each begins at a multiple of 16 bytes."""
    places = np.cumsum([0, *(-(-x.size // 4) * 4 for x in arrays)]).tolist()
    together = np.zeros(places[-1], np.int32)
    for at, x in zip(places, arrays, strict=False):
        together[at : at + x.size] = x.reshape(-1)
    there = upload(together, device)
    return [there[at : at + x.size].view(x.shape) for at, x in zip(places, arrays, strict=False)]


def plain_pages(cache: PagedKVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a plain format where they lie, (pages, page size, KV heads, D and Dv); of rows that are both, V is the
    first channels of K."""
    k_parts, v_parts = cache.parts(layer)
    return k_parts[0], k_parts[0][..., : cache.value_dim] if v_parts is None else v_parts[0]


def attend_chunks(
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    plan: ChunkPlan,
    options: DecodeOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    backend: str,
) -> None:
    """The chunks' rows q (rows, Hq, D): fills out, no part of q, and lse (Hq, rows) if there is one."""
    tables = tables_of(plan, cache, cache.format.dtype != q.dtype)
    if tables.widened is None:
        k, v = plain_pages(cache, layer)
    else:
        k, v = widen(cache.format, *cache.parts(layer), tables.widened, q.dtype, cache.value_dim)

    def forward(rows: torch.Tensor, launch: Launch, **more: Any) -> Any:
        return attention_varlen(rows, k, v, *launch[:2], page_table=launch.page_table, backend=backend, **more)

    nodes = tables.nodes
    logs = lse is not None or nodes is not None
    # Blocks of positions that begin with a page are in the tables, as parts of the chunks; others are left to a mask.
    chunk = plan.chunk if plan.chunk % cache.page_size else None
    got = forward(q, tables.own, causal=True, window=plan.window, chunk=chunk, out=out, return_lse=logs, **options)
    if nodes is not None:
        # A sink is a key without a value: it is in one of the sets of keys, the chunks' own.
        rest = {name: x for name, x in options.items() if name != "sinks"}
        states, their_logs = forward(q.index_select(0, nodes.asked), nodes.launch, return_lse=True, **rest)
        merge_rows(out, got[1], states, their_logs, nodes.rows, nodes.table)
    if lse is not None:
        lse.copy_(got[1])
