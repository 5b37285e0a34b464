"""A DecodePlan as the arrays that kernels/decode/decode.cu and decode_tree*.cu walk.

Three files make them: ranges.py finds the plan's token ranges and cuts them, items.py turns the pieces into items,
deal.py deals the items out to blocks and warps. `work_list` here puts them together; a `WorkList` is the result, which
stays on the device while its sequences grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tilewise.plan.cost import DEEP_CHUNKS, WHOLE_CHUNKS
from tilewise.plan.deal import are_in_step, deal_beside_tiles, deal_chains, deal_streams, stream_chunks
from tilewise.plan.items import (
    ITEM_WORDS,
    STATE_WORDS,
    Ints,
    Sequences,
    Word,
    cut_plan,
    first_tile_pages,
    items_of_heads,
)
from tilewise.plan.ranges import (
    CHUNK,
    FAR,
    TILE_ROWS,
    TILE_TOKENS,
    Cutter,
    Longs,
    Own,
    Shape,
    Splitting,
    find_own,
    uses_tiles,
)
from tilewise.plan.tiles import DecodePlan

__all__ = [
    "CHUNK",
    "DEEP_CHUNKS",
    "FAR",
    "TILE_ROWS",
    "TILE_TOKENS",
    "WHOLE_CHUNKS",
    "PageLists",
    "Shape",
    "Splitting",
    "WorkList",
    "equal_lists",
    "uses_tiles",
    "work_list",
]


class PageLists(Protocol):
    """The pages of each sequence, in the caller's order. If there is an attribute `copies`, a number that changes
    whenever a sequence may have got another page in place of one that it had, lists are read less often; if there is a
    method `block`, as PageBlocks has it, many are read at once."""

    def __getitem__(self, n: int, /) -> Ints: ...


class PageBlocks(Protocol):
    """Page lists of which many can be read at once."""

    def block(self, numbers: Longs, first: Longs, width: int, /) -> Ints:
        """(n, width): the pages of the sequences `numbers` (n,) from number `first`, () or (n,), on, with zeros after
        the lists."""
        ...


@dataclass
class WorkList:
    """A plan as arrays; decode/work.cuh says what they hold. n sequences stand in the plan's order.

    items (blocks, slots, 16), tile_items (rounds, blocks, 16); order (n,): the caller's number of each sequence; states
    (n, 4); pages (n, table_pages); live: the lengths (n,), then the tails (n, tail_pages), all that grow() changes;
    tail_from (n,): the number of the first page in each tail; capacity (n,): the lengths up to which the list serves;
    total_states: states in scratch; copies: PageLists.copies when the tails were last read; in_step: the warps of a
    block have the same tokens of neighbouring heads in every round; selected_pages: for a plan over selected pages, how
    many of them a sequence reads at most, otherwise 0.
    """

    items: Ints
    tile_items: Ints
    order: Ints
    states: Ints
    pages: Ints
    live: Ints
    tail_from: Ints
    tail_pages: int
    page_size: int
    capacity: Longs
    total_states: int
    in_step: bool
    copies: int | None = None
    selected_pages: int = 0
    _on_device: dict[torch.device, dict[str, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        return len(self.order)

    @property
    def blocks(self) -> int:
        return int(self.items.shape[0])

    @property
    def lengths(self) -> Ints:
        """(n,): a view of `live`."""
        return self.live[: self.sequences]

    @property
    def tails(self) -> Ints:
        """(n, tail_pages): a view of `live`, the pages of each sequence from number tail_from on."""
        return self.live[self.sequences :].reshape(self.sequences, self.tail_pages)

    def grow(self, lengths: npt.ArrayLike, page_lists: PageLists | None = None) -> None:
        """Takes the sequences' new lengths and last pages, in the caller's order; the items stay as they are.

        page_lists: needed if a sequence got or copied pages since the last call; only lists that may have changed are
        read. A list on a CUDA device is updated by one copy on the current stream, which the host does not wait for.
        Raises ValueError, with nothing changed, for a length that the list has no room for or that is smaller than
        before.
        """
        now = self.check_growth(lengths)
        if page_lists is not None:
            tails, size = self.tails, self.page_size
            copies = getattr(page_lists, "copies", None)
            # A sequence that shared its last page got a copy of it when it grew: its tail begins with another page.
            same = copies is not None and copies == self.copies
            changed = -(-now // size) > -(-self.lengths // size) if same else now > self.lengths
            self.copies = copies
            (numbers,) = changed.nonzero()
            if len(numbers):
                tails[numbers] = _block(page_lists, self.order[numbers], self.tail_from[numbers], self.tail_pages)
        self.lengths[:] = now
        for device, tensors in self._on_device.items():
            if device.type == "cuda":
                # New pinned memory in each call: torch does not hand it out again before the copy is done.
                staged = torch.empty(len(self.live), dtype=torch.int32, pin_memory=True)
                staged.numpy()[:] = self.live
                tensors["live"].copy_(staged, non_blocking=True)

    def check_growth(self, lengths: npt.ArrayLike) -> Longs:
        """The lengths in the plan's order. Raises ValueError for one that the list does not serve."""
        now = np.asarray(lengths, np.int64)[self.order]
        if (now > self.capacity).any() or (now < self.lengths).any():
            raise ValueError(
                f"lengths must be from {self.lengths.tolist()[:8]} to {self.capacity.tolist()[:8]} (in the plan's "
                f"order), got {now.tolist()[:8]}; make a new plan"
            )
        return now

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The arrays on a device. On a CPU the tensors share the memory of the arrays."""
        found = self._on_device.get(device)
        if found is None:
            names = ["items", "tile_items", "order", "states", "pages", "live"]
            if self.selected_pages:
                names.append("tail_from")
            found = {name: torch.from_numpy(getattr(self, name)) for name in names}
            if device.type == "cuda":
                found = _uploaded(found, device)
            self._on_device[device] = found
        return found


def _uploaded(arrays: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """int32 arrays on a device, by one copy that nobody waits for; each begins at a multiple of 128 bytes."""
    spans, end = [], 0
    for x in arrays.values():
        spans.append((end, end + x.numel()))
        end += -(-x.numel() // 32) * 32
    staged = torch.empty(end, dtype=torch.int32, pin_memory=device.type == "cuda")
    values = staged.numpy()
    for (first, stop), x in zip(spans, arrays.values(), strict=True):
        values[first:stop] = x.numpy().reshape(-1)
    sent = staged.to(device, non_blocking=True)
    return {
        name: sent[first:stop].view(x.shape) for (first, stop), (name, x) in zip(spans, arrays.items(), strict=True)
    }


def work_list(
    plan: DecodePlan,
    page_lists: PageLists,
    lengths: Sequence[int],
    page_size: int,
    shape: Shape,
    *,
    splitting: Splitting | None = None,
    room: int = 0,
) -> WorkList:
    """The work list of a plan for a kernel of this shape.

    page_lists, lengths: in the order of plan.seqs. room: tokens that each sequence may grow by under WorkList.grow.
    """
    heads = plan.heads_kv
    rows_each = plan.tokens_per_seq * (plan.heads_q // heads)
    order = np.ascontiguousarray(plan.order, np.int32)
    length = np.asarray(lengths, np.int64)[order]
    most = plan.pages_per_seq * page_size
    read = np.minimum(length, most) if most else length  # tokens that each sequence reads now, at most
    own = find_own(plan, read, room)
    if most:
        own = own._replace(stop=np.minimum(own.stop, most))
    cutter = Cutter(rows_each, heads, shape, splitting or Splitting())
    # When sequences grow, rows that do not see back to the first key come to see different parts of one node: its
    # tiles need their own states.
    cut = cut_plan(plan.arrays.nodes, own, cutter, read, chaining=plan.reach.whole)
    states = cut.states.table()
    tables = _page_tables(page_lists, order, length, page_size, room)

    of_sequence = Sequences(order, states, tables.pages, tables.tail_from, page_size, shape.chunk)
    items = items_of_heads(cut.streamed, heads, rows_each, of_sequence)
    tiles = items_of_heads(cut.tiled, heads, rows_each, of_sequence)
    if len(tiles):
        pages = first_tile_pages(tiles[::heads], of_sequence)
        tiles.reshape(-1, heads, ITEM_WORDS)[:, :, STATE_WORDS] = pages[:, None]

    chunks = stream_chunks(items[::heads], read).repeat(heads)
    blocks = max(1, min(shape.blocks, max(len(items), len(tiles))))
    tile_items = deal_chains(tiles, cut.chains, blocks)
    if shape.tiles:
        dealt = deal_beside_tiles(items, chunks, heads, shape, tile_items)
    else:
        dealt = deal_streams(items, chunks, heads, blocks, shape.warps, shape.weights.item_chunks)
    return WorkList(
        items=dealt,
        tile_items=tile_items,
        order=order,
        states=states,
        pages=tables.pages,
        live=tables.live,
        tail_from=tables.tail_from,
        tail_pages=tables.tail_pages,
        page_size=page_size,
        capacity=length + room,
        total_states=cut.total_states,
        in_step=not shape.tiles and are_in_step(len(items), heads, blocks, shape.warps),
        copies=getattr(page_lists, "copies", None),
        selected_pages=min(plan.pages_per_seq, 1 + int((length + room).max(initial=0)) // page_size),
    )


def equal_lists(
    count: int, tokens: int, heads: int, shape: Shape, *, splitting: Splitting, folds: bool = True
) -> WorkList:
    """The work list of `count` query tokens, each with `heads` query rows over `tokens` keys of its own, which no page
    table names. It follows from these numbers alone.

    To the list every query token is a sequence, in the caller's order; a kernel may find that one has fewer keys.
    folds: keys that one block takes whole are computed in the pieces that several blocks would take, with the same
    bits; else at once.
    """
    numbers, whole = np.arange(count), np.full(count, tokens)
    own = Own(numbers, np.zeros_like(whole), whole, whole)
    cutter = Cutter(heads, 1, shape, splitting)
    at_once = not folds and bool(cutter.cut_own(own).whole.all())
    if at_once:
        cutter = cutter._replace(splitting=Splitting(pieces=((FAR, -(-tokens // shape.chunk) * shape.chunk),)))
    cut = cut_plan(np.zeros((0, 5), np.int64), own, cutter, whole, chaining=False)
    order, none = numbers.astype(np.int32), np.zeros(count, np.int32)
    pages, states = none[:, None], cut.states.table()
    items = items_of_heads(cut.streamed, 1, heads, Sequences(order, states, pages, none, FAR, shape.chunk))
    if at_once:
        items[:, Word.STATE_FOLD] = 0
    blocks = max(1, min(shape.blocks, len(items)))
    chunks = stream_chunks(items, whole)
    return WorkList(
        items=deal_streams(items, chunks, 1, blocks, shape.warps, shape.weights.item_chunks),
        tile_items=np.zeros((0, blocks, len(Word)), np.int32),
        order=order,
        states=states,
        pages=pages,
        live=whole.astype(np.int32),
        tail_from=none,
        tail_pages=0,
        page_size=FAR,
        capacity=whole,
        total_states=cut.total_states,
        in_step=False,
    )


class _PageTables(NamedTuple):
    """The page tables of a list: WorkList says what they hold."""

    pages: Ints
    live: Ints
    tail_from: Ints
    tail_pages: int


def _page_tables(page_lists: PageLists, order: Ints, length: Longs, page_size: int, room: int) -> _PageTables:
    """Splits each sequence's pages into those that stay and its tail: its last page, which may be replaced by a copy
    when it is written to, and the pages that are yet to come."""
    count = len(order)
    tail_from = np.maximum(0, -(-length // page_size) - 1).astype(np.int32)
    tail_pages = 2 + -(-room // page_size)
    live = np.zeros(count * (1 + tail_pages), np.int32)
    live[:count] = length
    live[count:] = _block(page_lists, order, tail_from, tail_pages).ravel()
    pages = _block(page_lists, order, 0, max(1, int(tail_from.max(initial=0))))
    first = int(tail_from.min(initial=FAR))  # of the pages that some sequence has in its tail
    numbers = np.arange(first, pages.shape[1], dtype=np.int32)
    np.copyto(pages[:, first:], 0, where=numbers >= tail_from[:, None])
    return _PageTables(pages, live, tail_from, tail_pages)


def _block(page_lists: PageLists, numbers: Ints, first: Ints | int, width: int) -> Ints:
    """PageBlocks.block of any page lists."""
    at, starts = numbers.astype(np.int64), np.asarray(first, np.int64)
    block: Any = getattr(page_lists, "block", None)  # isinstance() of a protocol takes ten times as long
    if block is not None:
        return block(at, starts, width)  # type: ignore[no-any-return]
    found = np.zeros((len(numbers), width), np.int32)
    for row, n, start in zip(found, at.tolist(), np.broadcast_to(starts, len(at)).tolist(), strict=True):
        pages = page_lists[n][start : start + width]
        row[: len(pages)] = pages
    return found
