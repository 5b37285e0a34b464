"""Pages of keys and values: sequences own page lists, pages have reference counts, shared pages are copied on write.

One page holds `page_size` tokens of every layer, so that one page list per sequence serves the whole model. A step is
`extend` (reserve room, once), then `write` for each layer. Storage starts uninitialised; the cache knows which tokens
each layer was given and refuses to read others. Pages may lie on a card; the bookkeeping is the host's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch

from tilewise import checks
from tilewise.formats import LATENT_FORMATS, KVFormat
from tilewise.kvcache import storage
from tilewise.kvcache.extending import ExtendPlan, commit_extend, plan_extend
from tilewise.kvcache.foreign import check_shared, take_pages
from tilewise.kvcache.index_keys import IndexKeys, index_keys_of
from tilewise.kvcache.pool import CacheStats, Ints, PagePool, Pages
from tilewise.kvcache.rotation import Rotary, checked_rotary
from tilewise.kvcache.sequences import Sequences, several
from tilewise.kvcache.slots import Places, Slots, check_slots, upload

_serials = itertools.count()


class OutOfPages(RuntimeError):
    """The cache has too few free pages for the request; nothing was changed."""


class PagedKVCache:
    """Keys and values of many sequences in `num_pages` pages of `page_size` tokens (1 to 256), for `num_layers` layers.

    kv_format: "fp32", "fp16", "bf16", "fp8", "int8" or "int4" (see tilewise.kvcache.formats); group_size: 32, 64 or 128
    channels that share an int4 scale. head_dim: 1 to 576. device: "cpu", or "cuda" for pages on a card. value_dim: V's
    head_dim where it is not K's.

    shared_kv: K and V are one row, stored once, as MLA's latent cache has it: K is all of it, V its first value_dim
    channels, num_kv_heads is 1. write() takes the one tensor, and rotary turns the channels after value_dim. fp8 and
    int8 quantise the first value_dim channels by scales of 128 each and leave the others in bfloat16: DeepSeek's row of
    656 bytes at head_dim=576, value_dim=512.

    index_dim: keep a key of so many channels per token for an indexer, in `index_layers` (all if None), in the same
    pages: `index_keys` writes and reads them.

    `serial` is a number that no other cache of this process has or had, so that a plan can tell which it was made for.

    On a card, extend(), write() and page copies go on the current stream and wait for nothing. Pages that free() gives
    back may be handed out again at once, and their next owner's write() goes on the stream that is current then. So
    whatever reads or writes pages belongs on one stream; work on another one must have been waited for, by
    `stream.wait_stream(other)`, before a sequence that it reads is freed or grown.

    A step can be captured in a CUDA graph and replayed for the next ones: extend(into=) puts each new step's places
    where the graph looks for them, and mark_written() says what the replay did. Write one step uncaptured first.

        slots = cache.extend(seqs, 1)
        with torch.cuda.graph(graph):  # k, v: tensors that every replay finds filled anew
            cache.write(0, slots, k, v)
        graph.replay()
        while not done:
            slots = cache.extend(seqs, 1, into=slots)  # also of fewer sequences: the places left over are skipped
            graph.replay()
            cache.mark_written(slots)
    """

    serial: int
    index_keys: IndexKeys | None = None

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
        value_dim: int | None = None,
        shared_kv: bool = False,
        index_dim: int | None = None,
        index_layers: Sequence[int] | None = None,
    ) -> None:
        self.device = storage.check_device(device)
        self.num_pages = checks.integer("num_pages", num_pages, 1, 2**31 - 1)
        self.page_size = checks.integer("page_size", page_size, 1, 256)
        self.num_kv_heads = checks.integer("num_kv_heads", num_kv_heads, 1)
        self.num_layers = checks.integer("num_layers", num_layers, 1)
        self.head_dim = checks.head_dim("head_dim", head_dim)
        values = self.head_dim if value_dim is None else value_dim
        self.shared_kv = checks.flag("shared_kv", shared_kv)
        if self.shared_kv:
            check_shared(self.num_kv_heads, self.head_dim, values, kv_format)
        self.value_dim = checks.head_dim("value_dim", values)
        latent = self.value_dim if self.shared_kv and kv_format in LATENT_FORMATS else 0
        self.format = KVFormat(kv_format, self.head_dim, group_size, latent)
        self.value_format = self.format if self.shared_kv else KVFormat(kv_format, self.value_dim, group_size)
        self._by_kernel = storage.uses_kernels(self.device)
        lead = (self.num_layers, self.num_pages, self.page_size, self.num_kv_heads)
        self._k = storage.allocate(self.format, lead, self.device, for_kernels=self._by_kernel)
        self._v: storage.Parts = []  # stays empty where K and V are one row
        if not self.shared_kv:
            self._v = storage.allocate(self.value_format, lead, self.device, for_kernels=self._by_kernel)
        self.index_keys = index_keys_of(self, index_dim, index_layers)
        self._start_empty()

    def _start_empty(self) -> None:
        self.serial = next(_serials)
        self._inference = any(x.is_inference() for x in (*self._k, *self._v))  # made under inference_mode()
        self.sequences = Sequences()
        self._managed: set[int] = set()  # those that a PrefixCache made: it alone may grow, fork and end them
        self._next_seq = 0
        self.pool = PagePool(self.num_pages)
        # What a token has to be given: a plane for each layer, and one for each layer's index keys.
        self.planes = self.num_layers + (0 if self.index_keys is None else len(self.index_keys.layers))
        self._written = storage.Written(self.num_pages, self.page_size, self.planes)
        self._foreign = False  # whether sequences of different lengths may have a page that is not full
        self.lazy_places = False  # whether slots are sent to a card only when somebody asks for them there
        self._extends = 0  # counts them
        self._late: Places | None = None  # of the last one, if they wait for renew_plan

    def __repr__(self) -> str:
        names = ["num_pages", "page_size", "num_kv_heads", "head_dim", "num_layers"]
        if self.shared_kv or self.value_dim != self.head_dim:
            names[4:4] = ["value_dim", "shared_kv"]
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        used, seqs = self.num_pages - self.pool.free_pages, len(self.sequences.rows)
        where = f"kv_format={self.format.name!r}, device={str(self.device)!r}"
        return f"PagedKVCache({sizes}, {where}, pages_in_use={used}, sequences={seqs})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_k": storage.kept(self.format, self._k),
            "_v": storage.kept(self.value_format, self._v),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._k, self._v = (
            storage.found(form, x) for form, x in ((self.format, self._k), (self.value_format, self._v))
        )
        self.serial = next(_serials)  # a copy goes its own way

    @classmethod
    def from_pages(
        cls,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor | None,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        *,
        value_dim: int | None = None,
        head_dim: int | None = None,
    ) -> PagedKVCache:
        """A one-layer cache over somebody else's pages, without a copy: sequences 0 to n - 1 as the table says.

        k_pages, v_pages: (num_pages, page_size, kv heads, D), float32, float16 or bfloat16, and V's D may be another.
        page_table: (n, max_pages) int32 or int64; lengths: (n,) in tokens. Table entries beyond a length are ignored,
        whatever they hold. Pages made under torch.inference_mode() are taken, and can be written, only under it. On a
        card the table and the lengths are read here, which waits for them.

        Of pages whose rows are both K and V (shared_kv) v_pages is None, and value_dim says how many channels of a row
        are V. They may be quantised rows then, as bytes: uint8 or float8_e4m3fn for fp8, int8 for int8, DeepSeek's
        being (num_pages, page_size, 1, 656) with value_dim=512. A row of bytes is padded to a multiple of four; where
        an odd number of rotary channels leaves two bytes over, head_dim says so.
        """
        cache = cls.__new__(cls)
        take_pages(cache, k_pages, v_pages, page_table, lengths, value_dim, head_dim)
        return cache

    # What a sequence is.

    @overload
    def allocate(self, count: None = None) -> int: ...
    @overload
    def allocate(self, count: int) -> list[int]: ...
    def allocate(self, count: int | None = None) -> int | list[int]:
        """A new, empty sequence, or a list of `count` of them. Their numbers are never used again."""
        number = 1 if count is None else checks.integer("count", count, 0)
        seqs = self._number(number)
        self.sequences.add_empty(seqs)
        return seqs[0] if count is None else seqs

    @overload
    def fork(self, seq: int, count: None = None) -> int: ...
    @overload
    def fork(self, seq: Sequence[int], count: int | None = None) -> list[int]: ...
    @overload
    def fork(self, seq: int, count: int) -> list[int]: ...
    def fork(self, seq: int | Sequence[int], count: int | None = None) -> int | list[int]:
        """A new sequence with the tokens of `seq`, sharing its pages; with `count`, a list of so many.

        seq may be a list, also one that names a sequence twice: a list then, of one child for each, or of `count` for
        each, those of one sequence side by side. Whichever grows first gets its own copy of a last page that is not
        full. Tokens of `seq` that are still to be written are shared too: write them before either grows.
        """
        named, rows = self.sequences.some(seq)
        each = 1 if count is None else checks.integer("count", count, 0)
        self._check_unmanaged(named, "fork")
        if named.count(named[0] if named else 0) == len(named) > 1:  # all of one: what they share is looked at once
            rows, each = rows[:1], each * len(named)
        children = self.copy_rows(rows, each)
        return children[0] if count is None and not several(seq) else children

    def free(self, seq: int | Sequence[int]) -> None:
        """Forget the sequence, or a list of them, all or none; pages are free again unless others share them.

        Slots that hold tokens of it cannot be written any more: free between the steps, not within one. On a card the
        pages may be handed out again at once: see the class about other streams that read them.
        """
        seqs, _ = self.sequences.some(seq)
        if len(seqs) != len(set(seqs)):
            raise ValueError("seq must name each sequence once, got one twice")
        self._check_unmanaged(seqs, "release")
        self.drop(seqs)

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens of every living sequence, reserved ones included (a copy)."""
        rows = self.sequences.rows
        found = self.sequences.lengths[np.fromiter(rows.values(), np.int64, len(rows))]
        return dict(zip(rows, found.tolist(), strict=True))

    def length(self, seq: int) -> int:
        """Tokens of one sequence, reserved ones included."""
        return int(self.sequences.lengths[self.sequences.row(seq)])

    def lengths_of(self, seqs: Sequence[int]) -> Ints:
        """The lengths of many sequences, int64, in their order (a copy)."""
        lengths: Ints = self.sequences.lengths[self.sequences.batch(seqs)[1]]
        return lengths

    def page_list(self, seq: int) -> Pages:
        """The pages of one sequence in order, int32, as they are now: a copy, read-only."""
        return self.sequences.pages(seq)

    def page_table(self, seqs: Sequence[int]) -> torch.Tensor:
        """(len(seqs), most pages of any of them) int32 on the cache's device, filled up with -1."""
        table = self.sequences.padded(self.sequences.named(seqs)[1], -1)
        return upload(table, self.device)

    # A step: reserve, then write each layer.

    def extend(self, seqs: Sequence[int], counts: int | Sequence[int], *, into: Slots | None = None) -> Slots:
        """Reserve room for `counts` new tokens (one number, or one for each) at the end of `seqs`.

        All sequences or none: raises OutOfPages with nothing changed if the free pages do not suffice. into: slots of
        an earlier step, every layer of them written, whose arrays on the card take up this step, which has at most as
        many tokens; for graphs, see the class.
        """
        plan = self.plan_extend(seqs, counts, into=into)
        if self._managed:
            self._check_unmanaged(plan.seqs, "extend")
        if plan.pages > self.pool.free_pages:
            raise OutOfPages(
                f"extending {len(plan.seqs)} sequences by {sum(plan.counts)} tokens takes {plan.pages} pages, "
                f"{self.pool.free_pages} of {self.num_pages} are free; free sequences or make the cache larger"
            )
        return self.commit_extend(plan, into=into)

    def plan_extend(self, seqs: Sequence[int], counts: int | Sequence[int], *, into: Slots | None = None) -> ExtendPlan:
        """Check an extend() and count its pages without changing anything; holds until the cache changes."""
        return plan_extend(self, seqs, counts, into)

    def commit_extend(self, plan: ExtendPlan, *, into: Slots | None = None) -> Slots:
        """Do what plan_extend() counted; the caller has made sure that `plan.pages` are free."""
        return commit_extend(self, plan, into)

    def write(
        self,
        layer: int,
        slots: Slots,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        rotary: Rotary | tuple[torch.Tensor, torch.Tensor] | None = None,
        q: torch.Tensor | None = None,
    ) -> None:
        """Fill the slots in one layer: k, v (total new tokens, kv heads, D), float32, float16 or bfloat16.

        With shared_kv k is the rows (total new tokens, 1, D), and there is no v. rotary: turn k by its tokens'
        positions first, with shared_kv its channels from value_dim on; a plain (cos, sin) is taken as half-split. q
        (total new tokens, query heads, D), of the dtype of k, is turned by it too, in the same channels, in place.
        Writing the same slots again overwrites, also for the sequences that share them. On a card all this is one
        launch, and the last strides must be 1; k, v and q may have as many rows as the slots have room for there
        (`slots.room`), of which those past len(slots) are idle.
        """
        layer = self._check_layer(layer)
        check_slots(slots, self, layer)
        self.check_writable()
        self._check_given(v)
        idle = len(slots) < slots.room and k.shape[:1] == (slots.room,)
        count = slots.room if idle else len(slots)
        dense = self._by_kernel
        for name, x, width in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            if x is not None or name == "k":
                shape = (count, self.num_kv_heads, width)
                checks.tensor(name, x, shape=shape, dtypes=checks.FLOATS, device=self.device, unit_last_stride=dense)
        if v is not None and k.dtype != v.dtype:
            raise ValueError(f"k and v must have the same dtype, got {k.dtype} and {v.dtype}")
        turn = checked_rotary(rotary, slots, self)
        if q is not None:
            if turn is None:
                raise ValueError("q is turned in place by rotary, which is None; give both or leave q out")
            shape = (count, "query_heads", self.head_dim)  # type: ignore[assignment]
            checks.tensor("q", q, shape=shape, dtypes=(k.dtype,), device=self.device, unit_last_stride=dense)
            storage.check_turned(q)

        first = self.value_dim if self.shared_kv else 0  # the first channel that turns
        k_parts, v_parts = self.parts(layer)
        if self._by_kernel:
            from tilewise.gpu import append  # it needs the compiler and the driver, which a cache on the CPU does not

            places = (slots.all_positions, slots.all_index) if idle else (slots.positions, slots.index)
            append.append(self.format, k, v, k_parts, v_parts, *places, turn, q, first=first)
        else:
            if turn is not None:
                k = turn.apply(k.detach(), slots.positions, first)
                if q is not None:
                    q.detach().copy_(turn.apply(q.detach(), slots.positions, first))
            storage.write(self.format, k_parts, slots.index, k)
            if v is not None and v_parts is not None:
                storage.write(self.value_format, v_parts, slots.index, v)
        self._written.mark(slots.host_index, layer)
        if layer not in slots._layers:
            slots.note_written([layer])

    def mark_written(self, slots: Slots) -> None:
        """Take note that every layer of the slots was written, with index keys, by a replay of a graph of write()."""
        check_slots(slots, self, 0)
        self._written.mark_all(slots.host_index)
        slots.note_written(range(self.planes))

    # Reading.

    def parts(self, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """The components of K and of V in one layer, as kernels read them: each (num_pages, page_size, heads, …).

        What each holds per token and head, format.components and value_format.components tell. The first, values or
        codes, has its tokens one after another. On a card the scales and zeros of one head of a page are contiguous:
        strides, not shapes, tell. With shared_kv they are the components of the rows, and None.
        """
        layer = self._check_layer(layer)
        return [x[layer] for x in self._k], None if self.shared_kv else [x[layer] for x in self._v]

    def rows(self, layer: int) -> torch.Tensor:
        """(num_pages, page_size, 1, bytes of a row) uint8: a quantised shared_kv layer as the bytes that it is, a view.

        See tilewise.formats for what is where in a row. from_pages() takes such pages.
        """
        if not self.format.latent:
            raise ValueError(f"rows() is of quantised shared_kv caches, got {self!r}; parts() gives the values")
        return storage.bytes_of(self.format, self._k)[self._check_layer(layer)]

    def gather(self, layer: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v (length, kv heads, D) of one sequence as copies: the dtype of a plain format, else float32."""
        k, v = self.load(layer, self.page_list(seq), 0, self.length(seq), self.format.decoded_dtype)
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
        if not self._written.has(layer, touched, rows):
            raise ValueError(
                f"tokens {start} to {stop} are not all written in layer {layer}: write() them before reading"
            )
        k, v = self._both(storage.read(self._storages, layer, touched, rows, dtype))
        return (k, v) if pages.ndim == 2 else (k[0], v[0])

    def load_tokens(
        self, layer: int, seq: int, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v (n, kv heads, D) in `dtype`, copies: tokens of one sequence at `positions` (n,) int64, on the CPU."""
        layer, size, places = self._check_layer(layer), self.page_size, positions.numpy()
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < self.length(seq):
            raise ValueError(f"positions must be between 0 and {self.length(seq) - 1}, got {positions.tolist()}")
        pages = self.page_list(seq)[places // size].astype(np.int64)
        if not self._written.are(layer, pages * size + places % size):
            raise ValueError(f"tokens of sequence {seq} are not all written in layer {layer}: write() them first")
        index = torch.from_numpy(pages * size + places % size)
        return self._both(storage.read_tokens(self._storages, layer, index, dtype))

    @property
    def _storages(self) -> list[tuple[KVFormat, storage.Parts]]:
        both = [(self.format, self._k), (self.value_format, self._v)]
        return both[:1] if self.shared_kv else both

    def _both(self, read: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return (read[0], read[0][..., : self.value_dim]) if self.shared_kv else (read[0], read[1])

    # Memory.

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes: keys and values, all heads and layers, scales and index keys included."""
        index = 0 if self.index_keys is None else self.index_keys.bytes_per_token
        return self.num_layers * self.num_kv_heads * self.kv_row_bytes + index

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one token's K and V in one KV head and layer; of a row that is both, once."""
        return sum(form.bytes_per_token_head for form, _ in self._storages)

    @property
    def nbytes(self) -> int:
        """Real bytes of all storage, used or not."""
        return self.num_pages * self.page_size * self.bytes_per_token

    def stats(self) -> CacheStats:
        """Pages, tokens and bytes in use. A page is shared if more than one sequence, or the prefix tree, holds it."""
        return self.pool.stats(self.page_size, self.bytes_per_token, sum(self.lengths.values()))

    # For whoever holds pages beside the sequences, as the prefix tree does; also plan_extend, commit_extend and `pool`.

    def adopt(self, pages: Pages, length: int, *, managed: bool = False) -> int:
        """A new sequence of `length` tokens in these pages, which takes over a hold on them that the caller has.

        The cache's own extend(), fork() and free() refuse a `managed` one: nobody works behind its owner's back.
        """
        (seq,) = self._number(1)
        self.sequences.add(seq, pages, length)
        if length % self.page_size:  # whoever has this page shares it now
            self.sequences.moved[:] = True
        if managed:
            self._managed.add(seq)
        return seq

    def copy_rows(self, rows: Ints, each: int = 1, *, managed: bool = False) -> list[int]:
        """`each` new sequences for each of these rows of `sequences`, with its tokens; a row may be named twice."""
        if len(rows) > 1 and each != 1:
            rows, each = np.repeat(rows, each), 1
        seqs = self._number(len(rows) * each)
        lead, rest = self.sequences.lists(rows)
        self.pool.retain_lists(lead, len(seqs), rest)
        self.sequences.copy(seqs, rows)
        if managed:
            self._managed.update(seqs)
        return seqs

    def drop(self, seqs: Sequence[int]) -> None:
        """free(), also for managed sequences."""
        rows = self.sequences.end(seqs)
        lead, rest = self.sequences.lists(rows)
        self.pool.release_lists(lead, len(rows), rest)
        self.sequences.clear(rows)
        if self._managed:
            self._managed.difference_update(seqs)

    def check_writable(self) -> None:
        """Raise ValueError where torch would not let pages be written, see from_pages()."""
        if self._inference:
            for _, parts in self._storages:
                storage.check_writable("the pages", parts[0])

    # Inside.

    def _check_unmanaged(self, seqs: Sequence[int], use: str) -> None:
        if self._managed and not self._managed.isdisjoint(seqs):
            seq = next(seq for seq in seqs if seq in self._managed)
            raise ValueError(f"sequence {seq} belongs to a PrefixCache: use its {use}()")

    def _number(self, count: int) -> list[int]:
        """Numbers for so many new sequences."""
        self._next_seq += count
        return list(range(self._next_seq - count, self._next_seq))

    def _check_given(self, v: torch.Tensor | None) -> None:
        if self.shared_kv and v is not None:
            raise ValueError("v must be left out with shared_kv: k is the rows, whose first value_dim channels are V")
        if not self.shared_kv and v is None:
            raise TypeError("v must be given: K and V of this cache are stored apart (shared_kv=False)")

    def _check_layer(self, layer: int) -> int:
        return checks.integer("layer", layer, 0, self.num_layers - 1)
