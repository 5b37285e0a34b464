"""Growing sequences: which pages an extend() takes and copies, and where its tokens go, for all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise.kvcache import storage
from tilewise.kvcache.pool import Ints, ranges
from tilewise.kvcache.runs import Run, have_own_pages
from tilewise.kvcache.sequences import NOWHERE, check_counts
from tilewise.kvcache.slots import Late, Places, Slots, check_into

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache

Flags = npt.NDArray[np.bool_]


class ExtendPlan(NamedTuple):
    """A checked extend() that has not happened yet."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    rows: Ints  # of the sequences
    more: Ints  # counts as an array, cut off at what no cache has room for
    growth: Ints  # new pages at the end of each sequence
    copies: Flags | None  # whether its last page has to be copied first; None: no page has
    pages: int  # free pages it takes
    single: bool  # whether every sequence gets one token
    ones: bool  # whether every sequence takes a page at most, and none of them a copy
    starts: Ints  # lengths of the sequences
    last: Ints  # their last pages, -1 for none
    run: Run | None = None  # whose next step it is; `growth`, `starts` and `last` are not looked at then


def plan_extend(
    cache: PagedKVCache, seqs: Sequence[int], counts: int | Sequence[int], into: Slots | None
) -> ExtendPlan:
    """Check an extend() and count its pages without changing anything; holds until the cache changes."""
    named, rows = cache.sequences.batch(seqs)
    one = type(counts) is int and counts == 1
    if one and (run := _run_of(cache, rows)) is not None:
        _check_now(cache, into, len(named))
        return ExtendPlan(named, run.counts, rows, run.ones, run.ones, None, run.pages, True, True, rows, rows, run)
    counts, more = check_counts(counts, len(named))
    _check_now(cache, into, sum(counts))
    size, starts, last = cache.page_size, cache.sequences.lengths[rows], cache.sequences.last[rows]
    room = -starts % size  # in the last page: 0 to size - 1
    single = one or counts.count(1) == len(counts)
    growth = (room == 0).astype(np.int64) if single else (more - room + (size - 1)) // size
    asking = int(np.count_nonzero(growth))
    pages = asking if single else int(np.add.reduce(growth))
    copies = None
    shared = cache.pool.refs[last] > 1
    if np.count_nonzero(shared):
        shared &= room > 0
    if np.count_nonzero(shared):
        copies = shared & (more > 0)
        (at,) = copies.nonzero()
        copies[at] = _copied(cache, last[at])
        (at,) = copies.nonzero()
        unwritten = ~cache._written.in_every_layer(last[at], size - room[at])
        if unwritten.any():
            raise ValueError(
                f"sequence {named[at[unwritten.argmax()]]} shares its last page, which must be copied before it grows, "
                "but tokens in it are reserved and not yet written; write them for every layer first"
            )
        pages += len(at)
        if not len(at):
            copies = None
    ones = pages == asking and copies is None
    return ExtendPlan(named, counts, rows, more, growth, copies, pages, single, ones, starts, last)


def _check_now(cache: PagedKVCache, into: Slots | None, tokens: int) -> None:
    cache.check_writable()
    if into is not None:
        check_into(into, cache, tokens)
    if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("extend() within a graph capture: its places would be the same in every replay")


def _run_of(cache: PagedKVCache, rows: Ints) -> Run | None:
    """The run whose next step this is, a new one if it is the second step in a row over this batch, or most of it."""
    sequences = cache.sequences
    run, stepped = sequences.run, sequences.stepped
    if run is not None and run.rows is rows and run.changes == sequences.changes:
        return run
    if (run is None and stepped is None) or (batch := sequences.last_batch(rows)) is None:
        return None
    if run is not None and (run.rows is rows or run.rows is batch.before):
        if run.follow(cache, batch, NOWHERE if run.rows is rows else batch.at):
            return run
    elif stepped is not None and len(rows) and (stepped is rows or stepped is batch.before):
        moved = sequences.moved[rows]
        if stepped is not rows:
            moved[batch.at] = False
            if not have_own_pages(cache, rows[batch.at]):
                return None
        if not np.count_nonzero(moved):
            sequences.moved[:] = False
            sequences.run, sequences.stepped = Run(cache, rows), None
            return sequences.run
    return None


def _copied(cache: PagedKVCache, last: Ints) -> Flags:
    """Which of these shared last pages are copied: when all other holders are done with it, the last one needs none."""
    order = last.argsort(kind="stable")
    pages = last[order]
    first = np.ones(len(pages), bool)
    first[1:] = pages[1:] != pages[:-1]
    (starts,) = first.nonzero()
    left = np.arange(len(pages)) - starts[first.cumsum() - 1]  # how many before it leave the page
    copies = np.empty(len(last), bool)
    copies[order] = cache.pool.refs[pages] - left > 1
    return copies


def commit_extend(cache: PagedKVCache, plan: ExtendPlan, into: Slots | None) -> Slots:
    """Do what plan_extend() counted; the caller has made sure that `plan.pages` are free."""
    sequences, pool, rows, size, counts = cache.sequences, cache.pool, plan.rows, cache.page_size, plan.more
    places = into._places if into is not None else None
    if cache._by_kernel and places is None:
        places = Places(sum(plan.counts), cache.device, lazy=cache.lazy_places)  # first: it may run out of memory
    if plan.run is not None:
        positions = plan.run.lengths
        plan.run.step(cache)
        return _slots(cache, plan, places, positions, plan.run.index)
    sequences.changes += 1
    sequences.moved[rows] = True
    starts, last = plan.starts, plan.last
    if plan.pages and plan.ones:
        (at,) = plan.growth.nonzero()
        taken, asking = pool.take_single(last[at]), rows[at]
        sequences.add_pages(asking, sequences.counts[asking], taken)
        cache._written.clear_pages(taken, pool.losses)
        last[at] = taken
    elif plan.pages:
        _take_pages(cache, plan)
        last = sequences.last[rows]
    if plan.single:  # in its last page
        positions = starts
        offsets = starts % size
        index = ends = last * size + offsets
        sequences.moved[rows], sequences.run, sequences.stepped = False, None, rows
    else:
        # Token t of the packed list is the i-th new one of its sequence s; positions = starts[s] + i.
        each = plan.counts[0] if plan.counts else 0
        last_tokens: Any
        if each and plan.counts.count(each) == len(rows):  # as many for each: a row of them
            positions, owners, last_tokens = starts[:, None] + np.arange(each), rows[:, None], (slice(None), -1)
        else:
            positions, owners = ranges(starts, counts), rows.repeat(counts)
            last_tokens = counts.cumsum()[counts > 0] - 1
        number = positions // size
        index = sequences.table[owners, number] - number
        index *= size
        index += positions
        last_of_page = (positions + 1) % size == 0
        last_of_page[last_tokens] = True
        ends = index[last_of_page]
        positions, index = positions.reshape(-1), index.reshape(-1)

    pool.reserve(ends, size)
    sequences.lengths[rows] = starts + counts
    return _slots(cache, plan, places, positions, index)


def _slots(cache: PagedKVCache, plan: ExtendPlan, places: Places | None, positions: Ints, index: Ints) -> Slots:
    step, losses = 0, cache.pool.losses
    cache._extends += 1
    if cache._foreign:  # or tokens after those of a sequence are unwritten as long as its last page is its own
        cache._written.forget(index)
    if cache._late is not None and cache._late is not places:
        cache._late.settle()
        cache._late = None
    if places is not None:
        if places.lazy:
            places.fill_late(Late(plan.seqs, positions, index, cache._extends))
            cache._late = places if places.planned and plan.single else None
        else:
            places.fill(positions, index)
        step = places.step
    return Slots.of(plan.seqs, plan.counts, positions, index, cache, places, step, losses)


def _take_pages(cache: PagedKVCache, plan: ExtendPlan) -> None:
    """The new pages of an extend(), copies of shared last pages among them."""
    sequences, rows, growth = cache.sequences, plan.rows, plan.growth
    wanted = growth if plan.copies is None else growth + plan.copies
    (asking,) = wanted.nonzero()
    rows, wanted = rows[asking], wanted[asking]
    taken = cache.pool.take(sequences.last[rows], wanted)
    cache._written.clear_pages(taken, cache.pool.losses)
    if plan.copies is not None:
        copying, growth = plan.copies[asking], growth[asking]
        firsts = (np.cumsum(wanted) - wanted)[copying]
        _copy_last_pages(cache, rows[copying], taken[firsts])
        rows, wanted, taken = rows[growth > 0], growth[growth > 0], np.delete(taken, firsts)
    if len(taken):
        sequences.grow(rows, wanted, taken)


def _copy_last_pages(cache: PagedKVCache, rows: Ints, new: Ints) -> None:
    """Copy on write, for all layers at once: `new` become the last pages of the sequences."""
    old, size = cache.sequences.last[rows], cache.page_size
    storage.copy_pages((*cache._k, *cache._v), old, new, by_kernel=cache._by_kernel)
    if cache.index_keys is not None:
        cache.index_keys.copy_pages(old, new)
    last_tokens = new * size + cache.sequences.lengths[rows] % size - 1
    cache._written.copy_pages(old, new)
    cache._written.clear_after(last_tokens)  # whoever has the old page may have written more there
    cache.pool.reserve(last_tokens, size)
    cache.pool.leave(old)
    cache.sequences.replace_last(rows, new)
