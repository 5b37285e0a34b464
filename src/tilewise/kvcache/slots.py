"""Slots: where the new tokens of a step go, on the host and, for a cache on a card, in two arrays there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tilewise.kvcache.pool import Ints, ranges

if TYPE_CHECKING:
    from tilewise.kvcache.paged import PagedKVCache

STAGED_BYTES = 1 << 18  # of the host's memory, taken at a time for copies of places to a card


class Late(NamedTuple):
    """A step that is not in its arrays on the card yet: a token for each of `seqs`, (n,) each. extends: the cache's
    then."""

    seqs: tuple[int, ...]
    positions: Ints
    stored: Ints  # Slots.host_index
    extends: int


class Places:
    """(2, capacity) int64 on a card: the positions and the index of a step's tokens; index -1 where there is none.

    lazy: what a step puts there waits in `late` until somebody asks for it. planned: that may be renew_plan(), which
    sends steps of a token each with what the plan takes.
    """

    __slots__ = ("_staged", "_tensor", "capacity", "device", "late", "lazy", "planned", "rows", "step")

    def __init__(self, capacity: int, device: torch.device, *, lazy: bool = False, planned: bool = False) -> None:
        self.capacity, self.device = capacity, device
        self._tensor: torch.Tensor | None = None
        self.rows: tuple[torch.Tensor, ...] = ()  # views, kept because making one costs as much as a launch
        self.step = 0  # counts the steps that were in them
        self.lazy, self.planned = lazy or planned, planned
        self.late: Late | None = None
        self._staged: list[tuple[torch.Tensor, Ints]] = []  # of the host, for copies to come
        if not lazy:
            self.tensor  # noqa: B018  (it may run out of memory, and nothing has changed yet)

    @property
    def tensor(self) -> torch.Tensor:
        """The arrays themselves, whatever is late."""
        if self._tensor is None:
            with torch.inference_mode(False):  # or a later step outside of it could not refresh them
                self._tensor = torch.empty((2, self.capacity), dtype=torch.int64, device=self.device)
        return self._tensor

    def fill(self, positions: Ints, index: Ints) -> None:
        self.step += 1
        self._send(positions, index)

    def fill_late(self, late: Late) -> None:
        """fill(), by settle() or by who sends it otherwise."""
        self.step += 1
        self.late = late

    def settle(self) -> None:
        """Send what is late."""
        late, self.late = self.late, None
        if late is None:
            return
        if self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self.late = late
            raise RuntimeError("places of a planned step are asked for within a graph capture: renew_plan comes first")
        self._send(late.positions, late.stored)

    def _send(self, positions: Ints, index: Ints) -> None:
        if not self.tensor.numel():
            return
        count, room = len(index), self.tensor.shape[1]
        if not self._staged:
            # New pinned memory for each copy: torch does not hand it out again before the copies from it are done. Many
            # pieces of it at a time, because one takes as long as the copy itself.
            pieces = max(1, STAGED_BYTES // (16 * room))
            block = torch.empty((pieces, 2, room), dtype=torch.int64, device="cpu", pin_memory=self.tensor.is_cuda)
            self._staged = list(zip(block.unbind(), block.numpy(), strict=True))
        host, values = self._staged.pop()
        values[0, :count], values[1, :count] = positions, index
        if count < room:
            values[0, count:], values[1, count:] = 0, -1
        self.tensor.copy_(host, non_blocking=True)


def upload(values: npt.NDArray[Any], device: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """An array as a tensor of `device`: one copy on the current stream that nobody waits for, from pinned memory.

    Torch's host allocator gives the pinned block out again only when the copies from it are over, so there is no
    staging buffer to guard here.
    """
    if device.type == "cuda":
        host = torch.empty(values.shape, dtype=_DTYPES[values.dtype.name], device="cpu", pin_memory=True)
        host.numpy()[...] = values
    else:
        host = torch.from_numpy(values)
    if into is None:
        return host.to(device, non_blocking=True)
    return into.copy_(host, non_blocking=True)


_DTYPES = {"int64": torch.int64, "int32": torch.int32}


@dataclass(frozen=True, eq=False)
class Slots:
    """Room reserved by extend() for new tokens, packed in the order of `seqs`; len() is their number.

    `counts` new tokens for each of `seqs`; host_positions (total,) int64, each token's place in its sequence;
    host_index (total,) int64, where it is stored: page · page_size + offset.
    """

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    host_positions: Ints
    host_index: Ints
    _cache: PagedKVCache = field(repr=False)
    _places: Places | None = field(repr=False)  # None: the host reads the cache
    _step: int = field(repr=False)  # of _places
    _born: int = field(repr=False)  # pool.losses when they were reserved: pages freed since mean stale slots
    _losses: list[int] = field(repr=False)  # pool.losses when last known good: to be written again, and at all
    _layers: set[int] = field(repr=False, default_factory=set)  # the layers written, by their planes
    _when_complete: list[Callable[[], None]] = field(repr=False, default_factory=list)

    @classmethod
    def of(
        cls,
        seqs: tuple[int, ...],
        counts: tuple[int, ...],
        positions: Ints,
        index: Ints,
        cache: PagedKVCache,
        places: Places | None,
        step: int,
        losses: int,
    ) -> Slots:
        """Slots as extend() makes them, in a fifth of the time that a call of a frozen class takes."""
        made = cls.__new__(cls)
        fields = {
            "seqs": seqs, "counts": counts, "host_positions": positions, "host_index": index, "_cache": cache,
            "_places": places, "_step": step, "_born": losses, "_losses": [losses, losses], "_layers": set(),
            "_when_complete": [],
        }  # fmt: skip
        object.__setattr__(made, "__dict__", fields)
        return made

    def __len__(self) -> int:
        return len(self.host_index)

    @property
    def positions(self) -> torch.Tensor:
        """host_positions as a tensor on the cache's device."""
        return torch.from_numpy(self.host_positions) if self._places is None else self._on_card(0)

    @property
    def index(self) -> torch.Tensor:
        """host_index as a tensor on the cache's device."""
        return torch.from_numpy(self.host_index) if self._places is None else self._on_card(1)

    @property
    def room(self) -> int:
        """Tokens that the arrays on the card have places for, those past len() to be skipped; 0 without a card."""
        return 0 if self._places is None else self._places.capacity

    @property
    def all_positions(self) -> torch.Tensor:
        """(room,) on the card: `positions`, then 0 for places that are skipped."""
        return self._on_card(0, whole=True)

    @property
    def all_index(self) -> torch.Tensor:
        """(room,) on the card: `index`, then -1 for places that are skipped."""
        return self._on_card(1, whole=True)

    @property
    def complete(self) -> bool:
        """Whether every layer has been written, index keys too."""
        return len(self._layers) == self._cache.planes or len(self.host_index) == 0

    @cached_property
    def reach(self) -> int:
        """The largest position, -1 if there is none."""
        return int(self.host_positions.max(initial=-1))

    @cached_property
    def _pages(self) -> Ints:
        """The pages of the tokens, in their order, each once: no other sequence has one of them."""
        pages = self.host_index // self._cache.page_size
        new = np.ones(len(pages), bool)
        np.not_equal(pages[1:], pages[:-1], out=new[1:])
        return pages[new]

    def _on_card(self, which: int, whole: bool = False) -> torch.Tensor:
        self._check_own_places()
        assert self._places is not None
        if self._places.late is not None:
            self._places.settle()
        self._places.rows = self._places.rows or self._places.tensor.unbind()
        row = self._places.rows[which]
        return row if whole or len(row) == len(self) else row[: len(self)]

    def _check_own_places(self) -> None:
        if self._places is not None and self._places.step != self._step:
            raise ValueError("slots are stale: extend(..., into=slots) gave their arrays to a later step")

    def note_written(self, layers: Iterable[int]) -> None:
        """Take note of layers that were written; whoever waits for the last of them is told."""
        self._layers.update(layers)
        if self._when_complete and self.complete:
            for tell in self._when_complete:
                tell()
            self._when_complete.clear()

    def _moved(self) -> bool:
        """Whether a page of the slots, whose sequences are alive, was replaced by copy-on-write."""
        size, sequences = self._cache.page_size, self._cache.sequences
        rows = sequences.named(self.seqs)[1]
        counts = np.array(self.counts, np.int64)
        filled = counts > 0
        rows, counts = rows[filled], counts[filled]
        starts = self.host_positions[np.cumsum(counts) - counts]
        first, stop = starts // size, -(-(starts + counts) // size)
        now = sequences.table[np.repeat(rows, stop - first), ranges(first, stop - first)]
        return not np.array_equal(now, self._pages)


def room_for(cache: PagedKVCache, tokens: int, *, lazy: bool = False, planned: bool = False) -> Slots:
    """Slots of no token, whose arrays on a card have room for steps of so many: for extend(into=), before any step.

    lazy: the arrays are filled when somebody asks for them, for who mostly has the places elsewhere. planned: by
    renew_plan() of a standing plan of the same sequences, with what that sends anyway, and otherwise when somebody asks
    for them: it has to come before a graph that reads them is replayed.
    """
    nothing: Ints = np.zeros(0, np.int64)
    places = None
    if cache._by_kernel:
        places = Places(tokens, cache.device, lazy=lazy, planned=planned)
        if not lazy:
            places.fill(nothing, nothing)
    step = places.step if places is not None else 0
    losses = cache.pool.losses
    return Slots.of((), (), nothing, nothing, cache, places, step, losses)


def late_places(cache: PagedKVCache, seqs: tuple[int, ...]) -> torch.Tensor | None:
    """The arrays that wait for a plan of these sequences; others that wait are filled here. The caller fills them."""
    places, cache._late = cache._late, None
    if places is None or places.late is None:
        return None
    late = places.late
    if late.extends != cache._extends or not (late.seqs is seqs or late.seqs == seqs):
        places.settle()
        return None
    places.late = None
    return places.tensor


def gather(into: Slots, seqs: Sequence[int], counts: Sequence[int], positions: Ints, index: Ints) -> Slots:
    """Slots of several extend()s, made since any sequence was freed, as one: in the arrays of `into`, for one write().

    mark_written() has to be called for each of those as well.
    """
    cache, places = into._cache, into._places
    check_into(into, cache, len(index))
    if places is not None and places.planned and len(seqs) == len(index):
        places.fill_late(Late(tuple(seqs), positions, index, cache._extends))
        cache._late = places
    elif places is not None:
        places.fill(positions, index)
    step, losses = 0 if places is None else places.step, cache.pool.losses
    return Slots(tuple(seqs), tuple(counts), positions, index, cache, places, step, losses, [losses, losses])


def check_slots(slots: Any, cache: PagedKVCache, layer: int) -> None:
    """Raise unless these are slots of the cache that may still be written in the layer."""
    if not isinstance(slots, Slots):
        raise TypeError(f"slots must be a Slots from extend(), got {type(slots).__name__}")
    if slots._cache is not cache:
        raise ValueError("slots belong to another cache; write them to the cache whose extend() made them")
    slots._check_own_places()
    pool = cache.pool
    again = layer in slots._layers
    if slots._losses[not again] == pool.losses:
        return
    # Forks may live on and wait for what a freed sequence reserved, so slots die with their pages, not with their
    # sequence. To write again is another thing: the tokens must still belong to their sequences, in the same place.
    gone = bool((pool.freed[slots._pages] > slots._born).any())
    if not gone:
        slots._losses[1] = pool.losses
        if not again:
            return
    void = [seq for seq in slots.seqs if seq not in cache.sequences.rows]
    if gone or void or slots._moved():
        why = f"sequence {void[0]} was freed" if void else "their sequence has copied its page since they were written"
        raise ValueError(f"slots are stale: {why}; extend() again")
    slots._losses[0] = pool.losses


def check_into(into: Any, cache: PagedKVCache, tokens: int) -> None:
    """Raise unless the arrays of these slots of the cache can take up a step of so many tokens."""
    if not isinstance(into, Slots):
        raise TypeError(f"into must be a Slots from extend(), got {type(into).__name__}")
    if into._cache is not cache:
        raise ValueError("into belongs to another cache")
    if not into.complete:
        raise ValueError("into must be written in every layer first; mark_written() says that a graph has done so")
    into._check_own_places()
    if into._places is not None and tokens > into._places.capacity:
        room = into._places.capacity
        raise ValueError(f"into has room for {room} tokens, got {tokens}; extend() without it, and capture again")
