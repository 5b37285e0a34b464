"""The forward, kernels/prefill/forward.cu or forward_mma.cu: its arguments and its launch. tilings.py says which.

`Forward` is bound to a problem's shapes, strides and options; calling it on tensors of that kind launches the kernel on
their card, or runs it in the emulator over CPU tensors. Binding validates nothing: api/ has done that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tilewise import compiler, emulator, tuned
from tilewise.arch import card_of, multiprocessors
from tilewise.compiler.tensor_maps import TensorMapSpec
from tilewise.gpu.abi import (
    ELEMENTS,
    FAR,
    LIST_HEADER,
    MAP_NAMES,
    PANEL_BYTES,
    TILE_WORDS,
    Descale,
    Divisor,
    DropoutArgs,
    ForwardArgs,
    NoFunctionArgs,
    RaggedArgs,
    ScoreArgs,
    Strides,
)
from tilewise.gpu.mma_tilings import MmaTiling
from tilewise.gpu.pattern import NO_PATTERN, AnySchedule, Lists, Pattern
from tilewise.gpu.tilings import Geometry, geometry, kernel_of, out_dtype, ragged_spec, spec_of
from tilewise.plan.dense import plan_tiled
from tilewise.plan.tiles import Launch, Plan
from tilewise.scores import Scores

if TYPE_CHECKING:
    from tilewise.functions import Function

BUCKETS = 128  # by length, into which ragged.cu sorts tiles
MAPS_KEPT = 1024
Maps = list[tuple[TensorMapSpec, dict[int, Any]]]  # each with what was encoded for an address


def plan_of(q: torch.Tensor, k: torch.Tensor, scores: Scores, value_dim: int | None = None) -> Plan:
    """The tiles of a dense call on q (B, Nq, Hq, D) and k (B, Nk, Hkv, D), V being laid out as K, in their order.

    value_dim: the head dimension of V, if it is another.
    """
    (batch, seqlen_q, heads_q, head_dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    card, tma = card_of(q.device), tma_can(q, k)
    sized = (q.dtype, batch, seqlen_q, heads_q, heads_kv, head_dim, scores)
    g = geometry(card, *sized, tma=tma, table=tuned.of(q.device), value_dim=value_dim)
    tiles, each = g.q_tiles * batch * g.heads * g.slices, multiprocessors(q.device) * g.tiling.blocks_each
    blocks = tiles if isinstance(g.tiling, MmaTiling) else min(tiles, each)
    name, why = kernel_of(q.device, q.dtype)
    what = f"{name}, {ELEMENTS[q.dtype]}, D {head_dim}"
    if value_dim not in (None, head_dim):
        what += f" and {value_dim}"
    if g.slices > 1:
        what += f", in {g.slices} slices of V's columns"
    launch = Launch(what, g.tiling.tile_q, g.tiling.tile_kv, g.pack, blocks, why)
    sizes = (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim)
    bytes_each = {"io_bytes": q.element_size(), "out_bytes": out_dtype(q.dtype).itemsize}
    return plan_tiled(*sizes, launch, g.together, window=scores.window, value_dim=value_dim or 0, **bytes_each)


def tma_can(*tensors: torch.Tensor) -> bool:
    """Do the rows of these lie on 16 bytes, as TMA and 16-byte stores want them?"""
    return all(
        x.shape[-1] * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and all(s * x.element_size() % 16 == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
        for x in tensors
    )


class Forward:
    """The kernel, its launch and its arguments but for the addresses, for tensors like these.

    q: (B, Nq, Hq, D), k: (B, Nk, Hkv, D), v: (B, Nk, Hkv, Dv); or packed, with `sequences` of them: q (total_q, Hq, D),
    k and v (total_k, Hkv, D and Dv), or (pages, page size, Hkv, D and Dv) if `paged`. o: as q is, with Dv. tma: whether
    `tma_can` of them all.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        scores: Scores,
        *,
        tma: bool,
        sequences: int | None = None,
        index: torch.dtype = torch.int32,
        paged: bool = False,
        pattern: Pattern = NO_PATTERN,
        table_pages: int = 0,
    ) -> None:
        packed = sequences is not None
        self.packed, self.device, self.pattern = packed, q.device, pattern
        batch, seqlen_q, heads, head_dim = (1, *q.shape) if packed else q.shape
        seqlen_k, heads_kv = k.shape[-3:-1]
        sized = (q.dtype, batch, seqlen_q, heads, heads_kv, head_dim, scores)
        page_size = k.shape[1] if paged else 0
        value_dim = v.shape[-1]
        loads: dict[str, Any] = {"page_size": page_size, "tma": tma, "pattern": pattern, "value_dim": value_dim}
        keys = page_size * min(k.shape[0], (sequences or 1) * table_pages) if paged else seqlen_k
        g = geometry(card_of(q.device), *sized, sequences=sequences, seqlen_k=keys, table=tuned.of(q.device), **loads)
        tiling, pack = g.tiling, g.pack
        self.spec = spec_of(q.dtype, head_dim, tiling, scores, pack=pack, **loads)
        self.mapped = not isinstance(tiling, MmaTiling)  # the kernel takes tensor maps, blank ones without TMA
        self._maps: Maps = []
        if tma and self.mapped:
            rows = tiling.unit or (math.gcd(page_size, tiling.tile_kv) if paged else tiling.tile_kv)
            self._maps = _map_specs(q, k, v, o, g, rows)
        self.list_tiles = g.q_tiles + (sequences or 0)  # at most
        self.tiles = g.heads * (self.list_tiles if packed else g.q_tiles * batch) * g.slices
        # The Hopper forward is persistent; the other has a block per tile.
        each = multiprocessors(self.device) * tiling.blocks_each
        self.blocks = min(self.tiles, each) if self.mapped else self.tiles
        per_kv, beside = heads // heads_kv // pack, max(1, g.together * g.q_tiles)
        self.args = ForwardArgs(
            *(None,) * 8,
            *(_strides(x, packed and not (paged and x is not q)) for x in (q, k, v)),
            _strides(o, packed),
            *((0, q.shape[0]) if packed else (heads * seqlen_q, seqlen_q)),
            0,
            ScoreArgs.of(scores),
            *(Descale() for _ in range(3)),
            *(seqlen_q, seqlen_k),
            *(g.q_tiles * batch * g.heads, g.q_tiles),
            *(Divisor.by(n) for n in (g.heads, per_kv, g.together, beside)),
        )
        self.args.dropout = DropoutArgs.of(scores)
        self.lists: Lists | None = None
        if pattern.listed:
            self.lists = Lists(
                pattern, device=q.device, batch=batch, tile_heads=g.heads, pack=pack, tile_q=tiling.tile_q,
                unit=tiling.unit, rows_each=self.list_tiles if packed else g.q_tiles,
                keys=table_pages * page_size if paged else seqlen_k, packed=packed,
            )  # fmt: skip
            self.args.lists = self.lists.tile_lists
        if packed:
            self.ragged_spec = ragged_spec(index, tiling, pack)
            total_k = FAR if paged else seqlen_k
            self.ragged_args = RaggedArgs(*(None,) * 4, sequences, seqlen_q, total_k, total_k, self.list_tiles, 0)
        if self.device.type == "cuda":
            self._load()

    def _load(self) -> None:
        self._stream: int | None = None
        self.kernel = compiler.load(self.spec, self.device)
        self.grid = (self.blocks, 1, 1)
        self._take_values(None)
        if self.packed:
            self.ragged_kernel = compiler.load(self.ragged_spec, self.device)
            self.ragged_launch_args = compiler.Args(self.args, self.ragged_args)

    def _take_values(self, function: Function | None) -> None:
        """From now on launches give the kernel what this function captured."""
        self._values_of = None if function is None else function.key
        values = NoFunctionArgs() if function is None else function.arguments()
        self.launch_args = compiler.Args(*[compiler.TensorMap.blank()] * (4 * self.mapped), self.args, values)
        self._pointers = (0, 0, 0, 0)  # the tensor maps have to be named again

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        page_table: torch.Tensor | None = None,
        descales: tuple[torch.Tensor | None, ...] = (None, None, None),
        schedule: AnySchedule | None = None,
        function: Function | None = None,
        tiles: TileList | None = None,
        seed: torch.Tensor | None = None,
        **emulated: Any,
    ) -> None:
        """Fills o, and lse if there is one. sinks, slopes: float32; seed: of dropout. emulated: options of
        emulator.launch.

        descales: of q, k and v in FP8, (sequences, KV heads) float32 with the last stride 1. tiles: of just these
        starts and this page table, listed already.
        """
        a = self.args
        pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr())
        if lse is not None:
            a.lse = lse.data_ptr()
        if sinks is not None:
            a.scores.sinks = sinks.data_ptr()
        if slopes is not None:
            a.scores.slopes, a.scores.slopes_batch = slopes.data_ptr(), slopes.stride(0)
        if seed is not None:
            a.dropout.seed = seed.data_ptr()
        if page_table is not None:
            a.page_table, a.page_table_stride = page_table.data_ptr(), page_table.stride(0)
        for field, descale in zip((a.descale_q, a.descale_k, a.descale_v), descales, strict=True):
            if descale is not None:
                field.values, field.batch = descale.data_ptr(), descale.stride(0)
        work = None
        if tiles is not None:
            work = tiles.words
            a.list = work.data_ptr()
        elif starts is not None:
            work = self.room_for_tiles()
            a.list = work.data_ptr()
            self.name_tiles(self.ragged_args, work, starts, None if page_table is None else (page_table, k.shape[1]))
        if self.device.type == "cuda":
            self.launch(pointers, schedule, function, listed=tiles is not None)
            return
        a.q, a.k, a.v, a.o = pointers
        counter = torch.zeros(2, dtype=torch.int32)
        a.counter = counter.data_ptr()
        tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "sinks": sinks, "slopes": slopes, "work": work}
        tensors |= {"page_table": page_table, "counter": counter, "seed": seed}
        tensors |= {f"descale_{name}": x for name, x in zip("qkv", descales, strict=True)}
        if starts is not None:
            tensors |= {"starts_q": starts[0], "starts_k": starts[1]}
        known = {name: x for name, x in tensors.items() if x is not None}
        if starts is not None and tiles is None:
            emulator.launch(self.ragged_spec, (1, 1, 1), [a, self.ragged_args], known, **emulated)
        if self.lists is not None:
            known |= self.lists.emulate(a, schedule, function, known, **emulated)
        if function is not None:
            known |= {f"captured {n}": x for n, x in enumerate(function.tensors)}
        values = NoFunctionArgs() if function is None else function.arguments()
        maps = [emulator.tensor_map(spec, x) for (spec, _), x in zip(self._maps, pointers, strict=False)]
        maps = maps or [emulator.TensorMap()] * (4 * self.mapped)
        emulator.launch(self.spec, (self.blocks, 1, 1), [*maps, a, values], known, **emulated)

    def room_for_tiles(self) -> torch.Tensor:
        """A list of tiles, to be filled."""
        words = LIST_HEADER + TILE_WORDS * self.list_tiles + BUCKETS
        return torch.empty(words, dtype=torch.int32, device=self.device)

    def name_tiles(
        self,
        args: RaggedArgs,
        words: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor],
        paged: tuple[torch.Tensor, int] | None,
    ) -> None:
        """Tell ragged.cu where sequences start and where the list is. paged: the page table, and tokens of a page."""
        args.starts_q, args.starts_k, args.list = (x.data_ptr() for x in (*starts, words))
        args.buckets = words.data_ptr() + 4 * (words.numel() - BUCKETS)
        if paged is not None:
            args.longest_k = min(FAR, paged[0].shape[1] * paged[1])

    def launch(
        self,
        pointers: tuple[int, int, int, int],
        schedule: AnySchedule | None = None,
        function: Function | None = None,
        listed: bool = False,
    ) -> None:
        """Over q, k, v and o at these addresses, on the current stream. What has not changed is not set again.

        listed: whether the tiles of packed sequences are, already.
        """
        a = self.args
        if function is not None and function.key != self._values_of:
            self._take_values(function)
        if pointers != self._pointers:
            a.q, a.k, a.v, a.o = self._pointers = pointers
            for index, ((spec, made), pointer) in enumerate(zip(self._maps, pointers, strict=False)):
                if pointer not in made:
                    if len(made) >= MAPS_KEPT:
                        made.clear()
                    made[pointer] = compiler.encode(spec, pointer)
                self.launch_args.point(index, made[pointer])
        stream = compiler.raw_stream(self.kernel.ordinal)
        if _capturing() or stream != self._stream:
            # A graph may be replayed beside anything, so it counts its tiles apart, and not here.
            self._stream = None if _capturing() else stream
            self._counter = _counter(self.device, self.kernel.ordinal, self._stream)
            a.counter = self._counter.data_ptr()
        if self.packed and not listed:
            self.ragged_kernel.launch((1, 1, 1), self.ragged_launch_args, stream=stream)
        made_lists = None if self.lists is None else self.lists.make(a, schedule, function, stream)
        self.kernel.launch(self.grid, self.launch_args, stream=stream)
        del made_lists  # what else needs its memory on this stream runs after the kernel


class TileList:
    """The tiles of packed sequences, listed once for calls that have them alike, as all layers of a step do.

    The tensors that say where sequences start stay where they are; make() lists the tiles of what stands in them.
    """

    def __init__(
        self,
        forward: Forward,
        starts: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        page_size: int,
    ) -> None:
        # Arguments of its own: the forward's are filled anew by every call.
        self._args = ForwardArgs.from_buffer_copy(forward.args)
        self._ragged = RaggedArgs.from_buffer_copy(forward.ragged_args)
        self.words, self._starts, self._spec = forward.room_for_tiles(), starts, forward.ragged_spec
        forward.name_tiles(self._ragged, self.words, starts, (page_table, page_size))
        if forward.device.type == "cuda":
            self._kernel = forward.ragged_kernel
            self._launch_args = compiler.Args(self._args, self._ragged)

    def make(self) -> None:
        """On the current stream."""
        if self.words.is_cuda:
            stream = compiler.raw_stream(self._kernel.ordinal)
            self._kernel.launch((1, 1, 1), self._launch_args, stream=stream)
            return
        known = {"work": self.words, "starts_q": self._starts[0], "starts_k": self._starts[1]}
        emulator.launch(self._spec, (1, 1, 1), [self._args, self._ragged], known)


def _map_specs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, g: Geometry, box_rows: int) -> Maps:
    """The maps of q, k, v and o, each with those that were made of it.

    Of q and o: rows of (D, heads of a tile, N, the other heads, B), a box being the rows of a tile. Of k and v: (D, N,
    H, B or pages), in boxes of box_rows.
    """

    def outer(x: torch.Tensor) -> tuple[int, int]:
        """How many there are of the outermost dimension, and its stride."""
        return (1, 0) if x.dim() == 3 else (x.shape[0], x.stride(0))

    def of_rows(x: torch.Tensor) -> TensorMapSpec:
        count, stride = outer(x)
        sizes, strides = (g.pack, x.shape[-3], g.heads, count), (x.stride(-2), x.stride(-3), x.stride(-2) * g.pack)
        return _map_spec(x, (x.shape[-1], *sizes), (*strides, stride), (g.pack, g.tiling.tile_q // g.pack, 1, 1))

    def of_keys(x: torch.Tensor) -> TensorMapSpec:
        count, stride = outer(x)
        sizes = (x.shape[-1], *x.shape[-3:-1], count)
        return _map_spec(x, sizes, (x.stride(-3), x.stride(-2), stride), (box_rows, 1, 1))

    return [(found, {}) for found in (of_rows(q), of_keys(k), of_keys(v), of_rows(o))]


def _map_spec(x: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMapSpec:
    """The map of x by dimensions, innermost first; a box is a panel of these rows.

    The stride of a dimension of size 1 is not used, and may be odd.
    """
    size = x.element_size()
    used = tuple(s * size if n > 1 else 16 for n, s in zip(sizes[1:], strides, strict=True))
    return TensorMapSpec(MAP_NAMES[x.dtype], sizes, used, (PANEL_BYTES // size, *box), PANEL_BYTES)


def _strides(x: torch.Tensor, packed: bool) -> Strides:
    return Strides(0 if packed else x.stride(0), x.stride(-3), x.stride(-2))


_counters: dict[tuple[int, int], torch.Tensor] = {}
_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def _counter(device: torch.device, ordinal: int, stream: int | None) -> torch.Tensor:
    """The tile counter of a stream: zero between its launches, which follow each other. None: one for a graph alone."""
    if stream is None:
        return torch.zeros(2, dtype=torch.int32, device=device)  # zeroed within the graph
    found = _counters.get((ordinal, stream))
    if found is None:
        found = _counters[ordinal, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return found
