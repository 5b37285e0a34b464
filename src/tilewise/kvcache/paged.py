"""Pages of keys and values: sequences own page lists, pages have reference counts, shared pages are copied on write.

One page holds `page_size` tokens of every layer, so that one page list per sequence serves the whole model. A step is
`extend` (reserve room, once), then `write` for each layer. Storage starts uninitialised; the cache knows which tokens
each layer was given and refuses to read others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks
from tilewise.kvcache.formats import PLAIN, KVFormat
from tilewise.kvcache.pool import GrowingArray, PagePool, Pages, page_step
from tilewise.kvcache.rotary import Rotary

Ints = npt.NDArray[np.int64]

_serials = itertools.count()


class OutOfPages(RuntimeError):
    """The cache has too few free pages for the request; nothing was changed."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Room reserved by extend() for new tokens, packed in the order of `seqs`; len() is their number.

    `counts` new tokens for each of `seqs`; positions (total,) int64, each token's place in its sequence; index (total,)
    int64, where it is stored: page · page_size + offset.
    """

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    positions: torch.Tensor
    index: torch.Tensor
    _cache: PagedKVCache = field(repr=False)
    _pages: Pages = field(repr=False)
    _generations: Ints = field(repr=False)  # of _pages when they were reserved: other numbers mean stale slots
    _layers: set[int] = field(repr=False, default_factory=set)  # the layers written
    _when_complete: list[Callable[[], None]] = field(repr=False, default_factory=list)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def complete(self) -> bool:
        """Whether every layer has been written."""
        return len(self) == 0 or len(self._layers) == self._cache.num_layers


@dataclass(frozen=True)
class CacheStats:
    """What PagedKVCache.stats() counts. `tokens_logical` counts a token once a sequence, `tokens_stored` once."""

    pages_total: int
    pages_used: int
    pages_shared: int
    tokens_stored: int
    tokens_logical: int
    bytes_total: int
    bytes_used: int
    page_size: int

    @property
    def pages_free(self) -> int:
        return self.pages_total - self.pages_used

    @property
    def utilisation(self) -> float:
        """Stored tokens over the room in the used pages; 1.0 for an empty cache, which wastes nothing."""
        return self.tokens_stored / (self.pages_used * self.page_size) if self.pages_used else 1.0

    def __str__(self) -> str:
        return (
            f"{self.pages_used} of {self.pages_total} pages of {self.page_size} tokens used, "
            f"{self.pages_shared} shared; "
            f"{self.tokens_stored} tokens stored serve {self.tokens_logical} tokens of sequences; "
            f"{self.bytes_used / 2**20:.1f} of {self.bytes_total / 2**20:.1f} MiB, utilisation {self.utilisation:.0%}"
        )


class _Sequence:
    __slots__ = ("last_page", "length", "pages")

    def __init__(self, pages: Pages, length: int) -> None:
        self.pages = GrowingArray(pages)
        self.length = length
        self.last_page = int(pages[-1]) if len(pages) else -1


@dataclass(frozen=True)
class ExtendPlan:
    """A checked extend() that has not happened yet."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    growth: list[int]  # new pages at the end of each sequence
    copies: list[bool]  # whether its last page has to be copied first

    @property
    def pages(self) -> int:
        """Free pages it takes."""
        return sum(self.growth) + sum(self.copies)


class PagedKVCache:
    """Keys and values of many sequences in `num_pages` pages of `page_size` tokens (1 to 256), for `num_layers` layers.

    kv_format: "fp32", "fp16", "bf16", "fp8", "int8" or "int4" (see tilewise.kvcache.formats); group_size: 32, 64 or 128
    channels that share an int4 scale. head_dim: 1 to 512.

    `serial` is a number that no other cache of this process has or had, so that a plan can tell which it was made for.
    """

    serial: int

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        kv_format: str = "bf16",
        group_size: int = 64,
        device: str | torch.device = "cpu",
    ) -> None:
        self.device = _check_device(device)
        self.num_pages = checks.integer("num_pages", num_pages, 1, 2**31 - 1)
        self.page_size = checks.integer("page_size", page_size, 1, 256)
        self.num_kv_heads = checks.integer("num_kv_heads", num_kv_heads, 1)
        self.num_layers = checks.integer("num_layers", num_layers, 1)
        self.head_dim = checks.integer("head_dim", head_dim, 1, 512)
        self.format = KVFormat(kv_format, self.head_dim, group_size)
        # Per component (num_layers, num_pages, page_size, num_kv_heads, *trailing): a run of consecutive pages of one
        # layer is a plain view (tokens, heads, D), which attention reads without a copy.
        lead = (self.num_layers, self.num_pages, self.page_size, self.num_kv_heads)
        with torch.inference_mode(False):  # or only code under inference_mode could write to it
            self._k, self._v = (
                [torch.empty((*lead, *c.shape), dtype=c.dtype, device=self.device) for c in self.format.components]
                for _ in range(2)
            )
        self._start_empty()

    def _start_empty(self) -> None:
        self.serial = next(_serials)
        self._sequences: dict[int, _Sequence] = {}
        self._managed: set[int] = set()  # those that a PrefixCache made: it alone may grow, fork and end them
        self._next_seq = 0
        self.pool = PagePool(self.num_pages)
        # Which tokens of the pages each layer was given. Means something only for tokens that a sequence has.
        self._written = np.zeros((self.num_layers, self.num_pages, self.page_size), np.bool_)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.serial = next(_serials)  # a copy goes its own way

    @classmethod
    def from_pages(
        cls, k_pages: torch.Tensor, v_pages: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor
    ) -> PagedKVCache:
        """A one-layer cache over somebody else's pages, without a copy: sequences 0 to n - 1 as the table says.

        k_pages, v_pages: (num_pages, page_size, kv heads, D), float32, float16 or bfloat16. page_table: (n, max_pages)
        int32 or int64; lengths: (n,) in tokens. Table entries beyond a length are ignored, whatever they hold. Pages
        made under torch.inference_mode() are taken, and can be written, only under it.
        """
        shape = ("num_pages", "page_size", "kv_heads", "head_dim")
        checks.tensor("k_pages", k_pages, shape=shape, dtypes=checks.FLOATS, unit_last_stride=True)
        _check_device(k_pages.device)
        checks.tensor(
            "v_pages",
            v_pages,
            shape=tuple(k_pages.shape),
            dtypes=(k_pages.dtype,),
            device=k_pages.device,
            unit_last_stride=True,
        )
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            _check_writable(name, pages)
            try:
                pages.view(-1, *pages.shape[2:])
            except RuntimeError:
                raise ValueError(
                    f"{name} must have its tokens one after another in memory, got strides {pages.stride()} for shape "
                    f"{tuple(pages.shape)}; use {name}.contiguous()"
                ) from None
        checks.tensor("page_table", page_table, shape=("n", "max_pages"), dtypes=checks.INTEGERS, device=k_pages.device)
        checks.tensor("lengths", lengths, shape=(len(page_table),), dtypes=checks.INTEGERS, device=k_pages.device)

        cache = cls.__new__(cls)
        cache.device = k_pages.device
        cache.num_pages = checks.integer("num_pages of k_pages", k_pages.shape[0], 1)
        cache.page_size = checks.integer("page_size of k_pages", k_pages.shape[1], 1, 256)
        cache.num_kv_heads = checks.integer("kv heads of k_pages", k_pages.shape[2], 1)
        cache.head_dim = checks.integer("head_dim of k_pages", k_pages.shape[3], 1, 512)
        cache.num_layers = 1
        cache.format = KVFormat({dtype: name for name, dtype in PLAIN.items()}[k_pages.dtype], cache.head_dim)
        cache._k, cache._v = [k_pages.detach().unsqueeze(0)], [v_pages.detach().unsqueeze(0)]
        cache._start_empty()
        for seq, (row, length) in enumerate(zip(page_table.numpy(), lengths.tolist(), strict=True)):
            room = len(row) * cache.page_size
            if not 0 <= length <= room:
                raise ValueError(
                    f"lengths[{seq}] must be between 0 and {room}, what page_table has room for, got {length}"
                )
            used = row[: -(-length // cache.page_size)]
            if len(used) and (used.min() < 0 or used.max() >= cache.num_pages):
                raise ValueError(
                    f"page_table[{seq}] must name pages 0 to {cache.num_pages - 1} in its first {len(used)} entries, "
                    f"got {used.min()} to {used.max()}"
                )
            if len(np.unique(used)) != len(used):
                raise ValueError(f"page_table[{seq}] names a page twice; one page cannot hold two places of a sequence")
            pages = used.astype(np.int32)
            cache.pool.retain(pages)
            cache.adopt(pages, length)
            fill = np.full(len(pages), cache.page_size, np.int32)
            fill[-1:] -= len(pages) * cache.page_size - length
            cache.pool.fill[pages] = np.maximum(cache.pool.fill[pages], fill)
        cache._written[0] = np.arange(cache.page_size) < cache.pool.fill[:, None]
        return cache

    # What a sequence is.

    def allocate(self) -> int:
        """A new, empty sequence. Its number is never used again."""
        return self.adopt(np.empty(0, np.int32), 0)

    def fork(self, seq: int) -> int:
        """A new sequence with the tokens of `seq`, sharing its pages.

        Whichever grows first gets its own copy of a last page that is not full. Tokens of `seq` that are still to be
        written are shared too: write them before either grows.
        """
        source = self._sequence(seq)
        self._check_unmanaged(seq, "fork")
        pages = source.pages.view()
        self.pool.retain(pages)
        return self.adopt(pages, source.length)

    def free(self, seq: int) -> None:
        """Forget the sequence; its pages are free again unless others share them.

        Slots that hold tokens of it cannot be written any more: free between the steps, not within one.
        """
        self._sequence(seq)
        self._check_unmanaged(seq, "release")
        self.drop(int(seq))

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every living sequence, reserved ones included (a copy)."""
        return {seq: sequence.length for seq, sequence in self._sequences.items()}

    def length(self, seq: int) -> int:
        """Tokens of one sequence, reserved ones included."""
        return self._sequence(seq).length

    def page_list(self, seq: int) -> Pages:
        """The pages of one sequence in order, int32, read-only and without a copy; good until the sequence grows."""
        return self._sequence(seq).pages.view()

    def page_table(self, seqs: Sequence[int]) -> torch.Tensor:
        """(len(seqs), most pages of any of them) int32, filled up with -1."""
        lists = [self._sequence(seq, "seqs").pages.view() for seq in check_seqs(seqs)]
        table = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int32)
        for row, pages in zip(table, lists, strict=True):
            row[: len(pages)] = pages
        return torch.from_numpy(table)

    # A step: reserve, then write each layer.

    def extend(self, seqs: Sequence[int], counts: int | Sequence[int]) -> Slots:
        """Reserve room for `counts` new tokens (one number, or one for each) at the end of `seqs`.

        All sequences or none: raises OutOfPages with nothing changed if the free pages do not suffice.
        """
        plan = self.plan_extend(seqs, counts)
        for seq in plan.seqs:
            self._check_unmanaged(seq, "extend")
        if plan.pages > self.pool.free_pages:
            raise OutOfPages(
                f"extending {len(plan.seqs)} sequences by {sum(plan.counts)} tokens takes {plan.pages} pages, "
                f"{self.pool.free_pages} of {self.num_pages} are free; free sequences or make the cache larger"
            )
        return self.commit_extend(plan)

    def plan_extend(self, seqs: Sequence[int], counts: int | Sequence[int]) -> ExtendPlan:
        """Check an extend() and count its pages without changing anything; holds until the cache changes."""
        seqs = check_seqs(seqs)
        counts = _check_counts(counts, len(seqs))
        sequences = [self._sequence(seq, "seqs") for seq in seqs]
        if len(set(seqs)) != len(seqs):
            raise ValueError("seqs must name each sequence once, got one twice; add up its counts")
        self.check_writable()
        size = self.page_size
        growth: list[int] = []
        copies: list[bool] = []
        leaving: dict[int, int] = {}  # sequences of this very call that copy the page: the last holder needs no copy
        shared = self.pool.refs[np.array([sequence.last_page for sequence in sequences], np.int64)] > 1
        for sequence, count, is_shared in zip(sequences, counts, shared, strict=True):
            growth.append(-(-(sequence.length + count) // size) - sequence.pages.size)
            page = sequence.last_page
            copy = bool(is_shared) and count > 0 and sequence.length % size > 0
            if copy:
                copy = self.pool.refs[page] - leaving.get(page, 0) > 1
            if copy:
                leaving[page] = leaving.get(page, 0) + 1
                if not self._written[:, page, : sequence.length % size].all():
                    raise ValueError(
                        f"sequence {seqs[len(copies)]} shares its last page, which must be copied before it grows, but "
                        "tokens in it are reserved and not yet written; write them for every layer first"
                    )
            copies.append(copy)
        return ExtendPlan(tuple(seqs), tuple(counts), growth, copies)

    def commit_extend(self, plan: ExtendPlan) -> Slots:
        """Do what plan_extend() counted; the caller has made sure that `plan.pages` are free."""
        sequences = [self._sequences[seq] for seq in plan.seqs]
        if plan.pages:
            wanted = [n + copy for n, copy in zip(plan.growth, plan.copies, strict=True)]
            taken = self.pool.take([sequence.last_page for sequence in sequences], wanted)
            self._copy_last_pages(sequences, plan.copies, taken)
            for sequence, copy, pages in zip(sequences, plan.copies, taken, strict=True):
                if len(pages) > copy:
                    sequence.pages.append(pages[int(copy) :])
                    sequence.last_page = int(pages[-1])

        size, counts = self.page_size, np.array(plan.counts, np.int64)
        starts = np.array([sequence.length for sequence in sequences], np.int64)
        first_pages, stop_pages = starts // size, -(-(starts + counts) // size)
        # Token t of the packed list is the i-th new one of its sequence s; positions = starts[s] + i.
        ends = np.cumsum(counts)
        positions = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
        touched = [
            sequence.pages.view()[a:b]
            for sequence, a, b, n in zip(sequences, first_pages, stop_pages, plan.counts, strict=True)
            if n
        ]
        pages = np.concatenate(touched) if touched else np.empty(0, np.int32)
        pages_each = np.where(counts > 0, stop_pages - first_pages, 0)
        before = np.cumsum(pages_each) - pages_each - first_pages
        index = pages[positions // size + np.repeat(before, counts)].astype(np.int64) * size + positions % size

        self._written.reshape(self.num_layers, -1)[:, index] = False
        self.pool.fill[pages] = size
        for sequence, count in zip(sequences, plan.counts, strict=True):
            sequence.length += count
            if count:
                self.pool.fill[sequence.last_page] = (sequence.length - 1) % size + 1
        return Slots(
            plan.seqs,
            plan.counts,
            torch.from_numpy(positions),
            torch.from_numpy(index),
            self,
            pages,
            self.pool.generation[pages],
        )

    def write(
        self,
        layer: int,
        slots: Slots,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rotary: Rotary | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Fill the slots in one layer: k, v (total new tokens, kv heads, D), float32, float16 or bfloat16.

        rotary: turn k by its tokens' positions first; a plain (cos, sin) is taken as half-split. Writing the same slots
        again overwrites, also for the sequences that share them.
        """
        layer = self._check_layer(layer)
        if not isinstance(slots, Slots):
            raise TypeError(f"slots must be a Slots from extend(), got {type(slots).__name__}")
        self._check_not_stale(slots, layer)
        self.check_writable()
        shape = (len(slots), self.num_kv_heads, self.head_dim)
        for name, x in (("k", k), ("v", v)):
            if isinstance(x, torch.Tensor) and x.is_cuda:
                raise NotImplementedError(f"{name} is on {x.device}: the cache runs on the CPU, use {name}.cpu()")
            checks.tensor(name, x, shape=shape, dtypes=checks.FLOATS, device=self.device)
        if k.dtype != v.dtype:
            raise ValueError(f"k and v must have the same dtype, got {k.dtype} and {v.dtype}")
        if rotary is not None:
            if isinstance(rotary, tuple) and len(rotary) == 2:
                rotary = Rotary(*rotary)
            if not isinstance(rotary, Rotary):
                raise TypeError(f"rotary must be a Rotary, a (cos, sin) tuple or None, got {type(rotary).__name__}")
            k = rotary.apply(k.detach(), slots.positions)

        for storage, x in ((self._k, k), (self._v, v)):
            for stored, part in zip(storage, self.format.encode(x.detach()), strict=True):
                _as_bytes(stored[layer]).flatten(0, 1).index_copy_(0, slots.index, _as_bytes(part))
        self._written[layer].reshape(-1)[slots.index.numpy()] = True
        if not slots.complete:
            slots._layers.add(layer)
            if slots.complete:
                for tell in slots._when_complete:
                    tell()
                slots._when_complete.clear()

    # Reading.

    def gather(self, layer: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v (length, kv heads, D) of one sequence as copies: the dtype of a plain format, else float32."""
        sequence = self._sequence(seq)
        k, v = self.load(layer, sequence.pages.view(), 0, sequence.length, self.format.decoded_dtype)
        return (k.clone(), v.clone()) if self.format.plain else (k, v)

    def load(
        self, layer: int, pages: Pages, start: int, stop: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v (stop - start, kv heads, D) in `dtype`: tokens [start, stop) of the list that `pages` (int32) spells.

        pages (n, c) are n lists, and k, v (n, stop - start, kv heads, D). A view of the storage, not to be changed,
        where the pages touched are consecutive, the lists regularly spaced and the storage of just this dtype;
        otherwise a copy of the pages touched.
        """
        layer = self._check_layer(layer)
        size = self.page_size
        room = pages.shape[-1] * size
        if not 0 <= start <= stop <= room:
            raise ValueError(f"start and stop must satisfy 0 <= start <= stop <= {room}, got {start}, {stop}")
        table = pages if pages.ndim == 2 else pages[None]
        touched = table[:, start // size : -(-stop // size)]
        if touched.size and (int(touched.min()) < 0 or int(touched.max()) >= self.num_pages):
            raise ValueError(
                f"pages must be between 0 and {self.num_pages - 1}, got {touched.min()} to {touched.max()}"
            )
        rows = slice(start % size, start % size + stop - start)
        step = page_step(touched)
        first, count = int(touched[0, 0]) if touched.size else 0, touched.shape[1]
        lists = touched[:1] if step == 0 else touched  # the same pages over and over need one look
        written = self._written[layer, first : first + count][None] if len(lists) == 1 and step is not None else None
        if written is None:
            written = self._written[layer, lists]
        if not written.reshape(len(lists), count * size)[:, rows].all():
            raise ValueError(
                f"tokens {start} to {stop} are not all written in layer {layer}: write() them before reading"
            )
        shape = (*pages.shape[:-1], stop - start)
        index = torch.from_numpy(touched.astype(np.int64).reshape(-1)) if step is None else None

        def part(stored: torch.Tensor) -> torch.Tensor:
            if index is not None:
                gathered = stored.index_select(0, index).view(len(touched), count * size, *stored.shape[2:])
                return gathered[:, rows] if pages.ndim == 2 else gathered[0, rows]
            tokens = stored.flatten(0, 1)[first * size + rows.start :]
            strides = (*[(step or 0) * size * tokens.stride(0)] * (pages.ndim - 1), *tokens.stride())
            return tokens.as_strided((*shape, *tokens.shape[1:]), strides)

        k, v = (
            self.format.decode([part(stored[layer]) for stored in storage], dtype) for storage in (self._k, self._v)
        )
        return k, v

    # Memory.

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes: keys and values, all heads and layers, scales included."""
        return 2 * self.num_layers * self.num_kv_heads * self.format.bytes_per_token_head

    @property
    def nbytes(self) -> int:
        """Real bytes of all storage, used or not."""
        return sum(t.numel() * t.element_size() for t in (*self._k, *self._v))

    def stats(self) -> CacheStats:
        """Pages, tokens and bytes in use. A page is shared if more than one sequence, or the prefix tree, holds it."""
        used = self.num_pages - self.pool.free_pages
        return CacheStats(
            pages_total=self.num_pages,
            pages_used=used,
            pages_shared=int((self.pool.refs > 1).sum()),
            tokens_stored=int(self.pool.fill.sum()),
            tokens_logical=sum(sequence.length for sequence in self._sequences.values()),
            bytes_total=self.nbytes,
            bytes_used=used * self.page_size * self.bytes_per_token,
            page_size=self.page_size,
        )

    # For whoever holds pages beside the sequences, as the prefix tree does; also plan_extend, commit_extend and `pool`.

    def adopt(self, pages: Pages, length: int, *, managed: bool = False) -> int:
        """A new sequence of `length` tokens in these pages, which takes over a hold on them that the caller has.

        The cache's own extend(), fork() and free() refuse a `managed` one: nobody works behind its owner's back.
        """
        seq = self._next_seq
        self._next_seq += 1
        self._sequences[seq] = _Sequence(pages, length)
        if managed:
            self._managed.add(seq)
        return seq

    def drop(self, seq: int) -> None:
        """free(), also for a managed sequence."""
        self.pool.release(self._sequences.pop(seq).pages.view())
        self._managed.discard(seq)

    def check_writable(self) -> None:
        """Raise ValueError where torch would not let pages be written, see from_pages()."""
        for stored in (*self._k, *self._v):
            _check_writable("the pages", stored)

    # Inside.

    def _sequence(self, seq: int, name: str = "seq") -> _Sequence:
        sequence = self._sequences.get(seq if type(seq) is int else checks.integer(name, seq))
        if sequence is None:
            raise ValueError(f"{name} must be alive, but sequence {seq} was freed or never allocated")
        return sequence

    def _check_unmanaged(self, seq: int, use: str) -> None:
        if int(seq) in self._managed:
            raise ValueError(f"sequence {seq} belongs to a PrefixCache: use its {use}()")

    def _check_layer(self, layer: int) -> int:
        return checks.integer("layer", layer, 0, self.num_layers - 1)

    def _check_not_stale(self, slots: Slots, layer: int) -> None:
        if slots._cache is not self:
            raise ValueError("slots belong to another cache; write them to the cache whose extend() made them")
        void = [seq for seq in slots.seqs if seq not in self._sequences]
        # Forks may live on and wait for what a freed sequence reserved, so slots die with their pages, not with their
        # sequence. To write again is another thing: the tokens must still belong to their sequences, in the same place.
        if (self.pool.generation[slots._pages] != slots._generations).any() or (
            layer in slots._layers and (void or self._moved(slots))
        ):
            why = (
                f"sequence {void[0]} was freed"
                if void
                else "their sequence has copied its page since they were written"
            )
            raise ValueError(f"slots are stale: {why}; extend() again")

    def _moved(self, slots: Slots) -> bool:
        """Whether a page of the slots, whose sequences are alive, was replaced by copy-on-write."""
        token = page = 0
        for seq, count in zip(slots.seqs, slots.counts, strict=True):
            start = int(slots.positions[token]) if count else 0
            first, stop = start // self.page_size, -(-(start + count) // self.page_size)
            now = self._sequences[seq].pages.view()[first:stop]
            if not np.array_equal(now, slots._pages[page : page + len(now)]):
                return True
            token, page = token + count, page + len(now)
        return False

    def _copy_last_pages(self, sequences: list[_Sequence], copies: list[bool], taken: list[Pages]) -> None:
        """Copy on write, for all layers at once: the first page taken becomes the last page of the sequence."""
        if not any(copies):
            return
        copying = [(s, pages) for s, copy, pages in zip(sequences, copies, taken, strict=True) if copy]
        old = np.array([s.last_page for s, _ in copying], np.int64)
        new = np.array([pages[0] for _, pages in copying], np.int64)
        for stored in (*self._k, *self._v):
            stored = _as_bytes(stored)
            stored.index_copy_(1, torch.from_numpy(new), stored.index_select(1, torch.from_numpy(old)))
        self._written[:, new] = self._written[:, old]
        self.pool.fill[new] = [s.length % self.page_size for s, _ in copying]
        for (sequence, _), page in zip(copying, new, strict=True):
            self.pool.refs[sequence.last_page] -= 1  # others hold it still
            sequence.pages.replace_last(int(page))
            sequence.last_page = int(page)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """One-byte dtypes as uint8: torch copies float8 by index only so."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _check_device(device: Any) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a str or torch.device, got {type(device).__name__}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be 'cpu', got {device!r}, which is no device") from None
    if found.type != "cpu":
        raise NotImplementedError(f"device {found} is not served yet: the paged cache runs on device='cpu'")
    return found


def _check_writable(name: str, pages: torch.Tensor) -> None:
    if pages.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} must be tensors that can be written here, got some made under torch.inference_mode(), which can "
            "be written only under it; make them outside of it, or clone() them here"
        )


def check_seqs(seqs: Any) -> list[int]:
    """`seqs`, a list, tensor or array of sequence numbers, as a list of ints."""
    if isinstance(seqs, (torch.Tensor, np.ndarray)):
        seqs = seqs.tolist()
    if isinstance(seqs, str) or not isinstance(seqs, Sequence):
        raise TypeError(f"seqs must be a list of sequence numbers, got {type(seqs).__name__}")
    return [seq if type(seq) is int else checks.integer("seqs", seq) for seq in seqs]


def _check_counts(counts: Any, expected: int) -> list[int]:
    if isinstance(counts, (torch.Tensor, np.ndarray)):
        counts = counts.tolist()
    if isinstance(counts, str) or not isinstance(counts, Sequence):
        return [checks.integer("counts", counts, 0)] * expected
    if len(counts) != expected:
        raise ValueError(f"counts must be one int or one for each of the {expected} seqs, got {len(counts)}")
    return [checks.integer("counts", count, 0) for count in counts]
