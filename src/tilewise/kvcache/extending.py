"""Growing sequences: which pages an extend() takes and copies, and where its tokens go, for all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tilewise.kvcache import storage
from tilewise.kvcache.pool import Ints, ranges
from tilewise.kvcache.runs import Run
from tilewise.kvcache.sequences import check_counts
from tilewise.kvcache.slots import Places, Slots, check_into

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ExtendPlan:
    """A checked extend() that has not happened yet."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    rows: Ints  # of the sequences
    more: Ints  # counts as an array, cut off at what no cache has room for
    growth: Ints  # new pages at the end of each sequence
    copies: Flags | None  # whether its last page has to be copied first; None: no page has
    pages: int  # free pages it takes
    single: bool  # whether every sequence gets one token
    starts: Ints  # lengths of the sequences
    last: Ints  # their last pages, -1 for none
    run: Run | None = None  # whose next step it is; `growth`, `starts` and `last` are not looked at then


def plan_extend(
    cache: PagedKVCache, seqs: Sequence[int], counts: int | Sequence[int], into: Slots | None
) -> ExtendPlan:
    """Check an extend() and count its pages without changing anything; holds until the cache changes."""
    named, rows = cache.sequences.batch(seqs)
    one = type(counts) is int and counts == 1
    if one and (run := _run_of(cache, named, rows)) is not None:
        _check_now(cache, into, len(named))
        return ExtendPlan(named, run.counts, rows, run.ones, run.ones, None, run.pages, True, rows, rows, run)
    counts, more = check_counts(counts, len(named))
    _check_now(cache, into, sum(counts))
    size, starts, last = cache.page_size, cache.sequences.lengths[rows], cache.sequences.last[rows]
    room = -starts % size  # in the last page: 0 to size - 1
    single = one or np.count_nonzero(more == 1) == len(more)
    if single:
        growth = (room == 0).astype(np.int64)
        pages = int(np.count_nonzero(growth))
    else:
        growth = (more - room + (size - 1)) // size
        pages = int(np.add.reduce(growth))
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
    return ExtendPlan(named, counts, rows, more, growth, copies, pages, single, starts, last)


def _check_now(cache: PagedKVCache, into: Slots | None, tokens: int) -> None:
    cache.check_writable()
    if into is not None:
        check_into(into, cache, tokens)
    if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("extend() within a graph capture: its places would be the same in every replay")


def _run_of(cache: PagedKVCache, seqs: tuple[int, ...], rows: Ints) -> Run | None:
    """The run whose next step this is, a new one if it is the second step in a row over these sequences."""
    sequences = cache.sequences
    run, stepped, changes = sequences.run, sequences.stepped, sequences.changes
    if run is not None and run.changes == changes and run.rows is rows:
        return run
    if stepped is None or stepped[0] is not rows or stepped[1] != changes or not len(rows):
        return None
    sequences.run = Run(cache, seqs, rows)
    return sequences.run


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
        places = Places(sum(plan.counts), cache.device)  # first: it may run out of memory
    if plan.run is not None:
        positions = plan.run.lengths
        plan.run.step(cache)
        return _slots(cache, plan, places, positions, plan.run.index)
    sequences.changes += 1
    starts, last = plan.starts, plan.last
    if plan.pages and plan.single and plan.copies is None:
        (at,) = plan.growth.nonzero()
        taken, asking = pool.take_single(last[at]), rows[at]
        sequences.add_pages(asking, sequences.counts[asking], taken)
        last[at] = taken
    elif plan.pages:
        _take_pages(cache, plan)
        last = sequences.last[rows]
    if plan.single:  # in its last page
        positions = starts
        offsets = starts % size
        index = last * size + offsets
        pool.fill[last] = offsets + 1
        sequences.stepped = rows, sequences.changes
    else:
        # Token t of the packed list is the i-th new one of its sequence s; positions = starts[s] + i.
        positions = ranges(starts, counts)
        number = positions // size
        pages = sequences.table[rows.repeat(counts), number].astype(np.int64)
        number *= -size
        number += positions  # the places in their pages
        fill = pool.fill
        fill[pages] = size
        ends = (starts + counts - 1) % size + 1
        if np.count_nonzero(counts) < len(counts):
            (grown,) = counts.nonzero()
            last, ends = last[grown], ends[grown]
        fill[last] = ends
        pages *= size
        index = pages + number

    cache._written.forget(index)
    sequences.lengths[rows] = starts + counts
    return _slots(cache, plan, places, positions, index)


def _slots(cache: PagedKVCache, plan: ExtendPlan, places: Places | None, positions: Ints, index: Ints) -> Slots:
    step, losses = 0, cache.pool.losses
    if places is not None:
        places.fill(positions, index)
        step = places.step
    return Slots(plan.seqs, plan.counts, positions, index, cache, places, step, losses, [losses])


def _take_pages(cache: PagedKVCache, plan: ExtendPlan) -> None:
    """The new pages of an extend(), copies of shared last pages among them."""
    sequences, rows, growth = cache.sequences, plan.rows, plan.growth
    wanted = growth if plan.copies is None else growth + plan.copies
    (asking,) = wanted.nonzero()
    rows, wanted = rows[asking], wanted[asking]
    taken = cache.pool.take(sequences.last[rows], wanted)
    if plan.copies is not None:
        copying, growth = plan.copies[asking], growth[asking]
        firsts = (np.cumsum(wanted) - wanted)[copying]
        _copy_last_pages(cache, rows[copying], taken[firsts].astype(np.int64))
        rows, wanted, taken = rows[growth > 0], growth[growth > 0], np.delete(taken, firsts)
    if len(taken):
        sequences.grow(rows, wanted, taken)


def _copy_last_pages(cache: PagedKVCache, rows: Ints, new: Ints) -> None:
    """Copy on write, for all layers at once: `new` become the last pages of the sequences."""
    old = cache.sequences.last[rows]
    storage.copy_pages((*cache._k, *cache._v), old, new, by_kernel=cache._by_kernel)
    cache._written.copy_pages(old, new)
    cache.pool.fill[new] = cache.sequences.lengths[rows] % cache.page_size
    cache.pool.leave(old)
    cache.sequences.replace_last(rows, new)
