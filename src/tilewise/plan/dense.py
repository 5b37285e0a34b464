"""Dense, packed and shared-prefix problems, and block schedules, as lists of tiles.

A regular problem is a formula, not an array: `cut` gives one sequence's tiles, and a batch of equal sequences repeats
them with a step. Only a schedule's blocks are listed one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tilewise.plan.blocks import Kinds, Stretch, cut_schedule
from tilewise.plan.tiles import (
    OPEN,
    Band,
    Launch,
    Plan,
    Tiles,
    Window,
    Work,
    band_of,
    blocks_of,
    window_band,
)

if TYPE_CHECKING:
    from tilewise.plan.schedule import BlockSchedule

# Rows of a window's tile: as many as the window is wide wastes at most half of the scores, fewer than 64 starve the
# matrix units, more than 256 gain nothing.
WINDOW_TILE_MIN, WINDOW_TILE_MAX = 64, 256


def cut(seqlen_q: int, seqlen_k: int, band: Band, chunk: int = 0) -> list[Tiles]:
    """One sequence as regular tiles, none of which is fully hidden.

    No band: one rectangle. Only `high` (causal): the rectangle left of the diagonal and the triangle on it, which the
    executor masks; rows that see everything or nothing are cut off first. `low` too (a window): row tiles over just
    the keys they can see, the equal ones in the middle as one item. chunk: positions of a block, to whose keys the rows
    in it are confined; 0 for no such blocks.
    """
    if seqlen_q == 0 or seqlen_k == 0:
        return []
    if chunk:
        return _cut_chunks(seqlen_q, seqlen_k, band, chunk)
    if band == OPEN:
        return [Tiles(0, seqlen_q, 0, seqlen_k)]
    if band.low is None:
        assert band.high is not None
        first = max(0, -band.high)  # rows before it see nothing
        if first >= seqlen_q:
            return []
        last = max(first, min(seqlen_q, seqlen_k - band.high))  # rows from it on see everything
        tiles = []
        if last > first:
            left, size = first + band.high, last - first
            if left:
                tiles.append(Tiles(first, size, 0, left))
            tiles.append(Tiles(first, size, left, size, Band(None, 0)))
        if seqlen_q > last:
            tiles.append(Tiles(last, seqlen_q - last, 0, seqlen_k))
        return tiles
    return _cut_window(seqlen_q, seqlen_k, band)


def _cut_window(seqlen_q: int, seqlen_k: int, band: Band) -> list[Tiles]:
    assert band.low is not None
    high = seqlen_k if band.high is None else band.high
    tile = WINDOW_TILE_MIN
    while tile < WINDOW_TILE_MAX and tile < high - band.low + 1:
        tile *= 2
    tiles: list[Tiles] = []
    for row in range(0, seqlen_q, tile):
        rows = min(tile, seqlen_q - row)
        first, end = max(0, row + band.low), min(seqlen_k, row + rows + high)
        if first >= end:
            continue
        local = Band(band.low + row - first, None if band.high is None else band.high + row - first)
        this = Tiles(row, rows, first, end - first, local)
        previous = tiles[-1] if tiles else None
        if previous and (previous.rows, previous.keys, previous.band) == (this.rows, this.keys, this.band):
            key_step = this.key - previous.key - (previous.count - 1) * tile
            if key_step == tile:  # the same tile one step down the diagonal
                tiles[-1] = replace(previous, count=previous.count + 1, row_step=tile, key_step=tile)
                continue
        tiles.append(this)
    return tiles


def _cut_chunks(seqlen_q: int, seqlen_k: int, band: Band, chunk: int) -> list[Tiles]:
    """Each block's rows over its keys, as a sequence of their own under the band."""
    tiles: list[Tiles] = []
    for row, end, key, stop in blocks_of(seqlen_q, seqlen_k, chunk):
        local = band.shifted(row - key).opened(end - row, stop - key)
        tiles += [replace(t, row=t.row + row, key=t.key + key) for t in cut(end - row, stop - key, local)]
    return together(tiles)


def together(tiles: Iterable[Tiles]) -> list[Tiles]:
    """Equal ones that follow each other down the diagonal, with no row between them, as one."""
    found: list[Tiles] = []
    for tile in tiles:
        before, step = found[-1] if found else None, tile.rows
        if (
            before is not None
            and (tile.rows, tile.keys, tile.band) == (before.rows, before.keys, before.band)
            and (tile.count, before.row_step or step) == (1, step)
            and tile.row == before.row + before.count * step
            and tile.key == before.key + before.count * step
        ):
            found[-1] = replace(before, count=before.count + 1, row_step=step, key_step=step)
        else:
            found.append(tile)
    return found


def _exclusive(tiles: Sequence[Tiles]) -> bool:
    """Is no row of one sequence's tiles in two of them? (`count` copies never overlap.)"""
    spans = sorted((t.row, t.row + (t.count - 1) * t.row_step + t.rows) for t in tiles)
    return all(a[1] <= b[0] for a, b in pairwise(spans))


def plan_sizes(
    heads_q: int, heads_kv: int, head_dim: int, value_dim: int, exclusive: bool, io_bytes: int
) -> dict[str, Any]:
    """What plans over tensors have in common, by the names of `Plan`; value_dim: 0 for head_dim."""
    value_dim = value_dim or head_dim
    return {
        "heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim, "value_dim": value_dim, "exclusive": exclusive,
        "kv_row_bytes": (head_dim + value_dim) * io_bytes, "io_bytes": io_bytes,
    }  # fmt: skip


def plan_dense(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    value_dim: int = 0,
    *,
    causal: bool = False,
    window: Window | None = None,
    chunk: int = 0,
    schedule: BlockSchedule | Kinds | None = None,
    io_bytes: int = 2,
) -> Plan:
    """`batch` equal sequences: one sequence's tiles, repeated by formula. chunk: as `cut` has it, without a
    schedule."""
    sizes = (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, value_dim or head_dim)
    if isinstance(schedule, Kinds):
        return _plan_dense(*sizes, causal, window, chunk, schedule, io_bytes)
    # One on a device is equal to itself alone.
    return _kept_plan(*sizes, causal, window, chunk, None if schedule is None else schedule.cpu(), io_bytes)


def _plan_dense(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    value_dim: int,
    causal: bool,
    window: Window | None,
    chunk: int,
    schedule: BlockSchedule | Kinds | None,
    io_bytes: int,
) -> Plan:
    if schedule is not None:
        band = band_of(seqlen_q, seqlen_k, causal, window)
        blocks, exclusive = cut_schedule(schedule, band, Stretch(0, 0, seqlen_q, seqlen_k, batch), heads_q)
        sizes = plan_sizes(heads_q, heads_kv, head_dim, value_dim, exclusive, io_bytes)
        return Plan("sparse", tuple(blocks), batch * seqlen_q, (batch * seqlen_k,), **sizes)
    tiles = cut(seqlen_q, seqlen_k, band_of(seqlen_q, seqlen_k, causal, window), chunk)
    work = [same for t in tiles for same in repeat(t, batch, seqlen_q, seqlen_k)]
    sizes = plan_sizes(heads_q, heads_kv, head_dim, value_dim, _exclusive(tiles), io_bytes)
    return Plan("dense", tuple(work), batch * seqlen_q, (batch * seqlen_k,), **sizes)


_kept_plan = lru_cache(maxsize=256)(_plan_dense)  # every layer of a model asks for the same plan


def plan_tiled(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    launch: Launch,
    together: int,
    *,
    window: Window,
    io_bytes: int,
    out_bytes: int,
    value_dim: int = 0,
) -> Plan:
    """A dense problem as a GPU kernel takes it: query tiles in the order in which thread blocks take them.

    together: heads of all sequences (in units of launch.packed query heads) whose tiles are taken side by side, those
    of the last rows first, which see most keys of a causal problem. A tile visits whole blocks of launch.tile_keys
    keys, at least one.
    """
    tokens, block = launch.tile_rows // launch.packed, launch.tile_keys
    band = window_band(window).shifted(seqlen_k - seqlen_q)
    heads = heads_q // launch.packed  # that a sequence has tiles of
    work: list[Tiles] = []
    for first_head in range(0, batch * heads if seqlen_k else 0, together):
        owners = Counter(head // heads for head in range(first_head, first_head + together))  # heads by sequence
        for row in reversed(range(0, seqlen_q, tokens)):
            rows = min(tokens, seqlen_q - row)
            low = 0 if band.low is None else max(0, row + band.low)
            high = seqlen_k if band.high is None else min(seqlen_k, row + rows + band.high)
            key = low // block * block if low < high else 0
            keys = min(-(-high // block) * block if low < high else block, seqlen_k) - key
            local = band.shifted(row - key).opened(rows, keys)
            work += [
                Tiles(b * seqlen_q + row, rows, b * seqlen_k + key, keys, local, heads=count * launch.packed)
                for b, count in owners.items()
            ]
    sizes = plan_sizes(heads_q, heads_kv, head_dim, value_dim, True, io_bytes)
    whole = batch * seqlen_q, (batch * seqlen_k,)
    return Plan("dense", tuple(work), *whole, **sizes, out_bytes=out_bytes, launch=launch)


def repeat(tile: Tiles, batch: int, row_step: int, key_step: int) -> list[Tiles]:
    """The same work for each of `batch` sequences; one item unless the tile is itself a repeated one."""
    if tile.count == 1:
        return [replace(tile, count=batch, row_step=row_step, key_step=key_step)] if batch else []
    return [replace(tile, row=tile.row + b * row_step, key=tile.key + b * key_step) for b in range(batch)]


def plan_varlen(
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    value_dim: int = 0,
    *,
    causal: bool = False,
    window: Window | None = None,
    chunk: int = 0,
    schedules: Sequence[BlockSchedule | Kinds | None] | None = None,
    io_bytes: int = 2,
) -> Plan:
    """Packed sequences: sequence b has rows starts_q[b]:starts_q[b+1] and keys starts_k[b]:starts_k[b+1].

    A schedule that has a batch serves sequence b with its entry b. chunk: as `cut` has it, of sequences without one.
    """
    work: list[Work] = []
    exclusive = True
    for b in range(len(starts_q) - 1):
        row, key = starts_q[b], starts_k[b]
        nq, nk = starts_q[b + 1] - row, starts_k[b + 1] - key
        band = band_of(nq, nk, causal, window)
        schedule = schedules[b] if schedules is not None else None
        if schedule is not None:
            schedule = schedule if isinstance(schedule, Kinds) else schedule.cpu()
            blocks, alone = cut_schedule(schedule, band, Stretch(row, key, nq, nk), heads_q, entry=b)
            exclusive = exclusive and alone
            work += blocks
            continue
        tiles = cut(nq, nk, band, chunk)
        exclusive = exclusive and _exclusive(tiles)
        work += [replace(t, row=t.row + row, key=t.key + key) for t in tiles]
    sizes = plan_sizes(heads_q, heads_kv, head_dim, value_dim, exclusive, io_bytes)
    return Plan("varlen", tuple(work), starts_q[-1], (starts_k[-1],), **sizes)


def plan_shared_prefix(
    batch: int,
    seqlen_q: int,
    levels: Sequence[tuple[int, int, Sequence[int] | None]],
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    value_dim: int = 0,
    *,
    causal: bool,
    io_bytes: int = 2,
) -> Plan:
    """Levels of (batch, padded length, valid lengths or None), the last of them the sequences' own keys.

    The rows of all sequences under a level's member stand together, so each member's keys are read once. Prefixes are
    in full view; the causal band lies over the last level only.
    """
    work: list[Work] = []
    for source, (members, padded, lengths) in enumerate(levels):
        rows = batch // members * seqlen_q
        own = source == len(levels) - 1
        if lengths is None:
            band = band_of(seqlen_q, padded, causal, None) if own else OPEN
            for t in cut(rows, padded, band):
                work += repeat(replace(t, source=source), members, rows, padded)
            continue
        for m, length in enumerate(lengths):
            band = band_of(seqlen_q, length, causal, None) if own else OPEN
            work += [
                replace(t, row=t.row + m * rows, key=t.key + m * padded, source=source) for t in cut(rows, length, band)
            ]
    keys = tuple(members * padded for members, padded, _ in levels)
    sizes = plan_sizes(heads_q, heads_kv, head_dim, value_dim, False, io_bytes)
    return Plan("shared prefix", tuple(work), batch * seqlen_q, keys, **sizes)
