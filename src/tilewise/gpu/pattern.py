"""What a block schedule and a user's functions mean for the forward kernels: their lists of keys, and who makes them.

A `Pattern` is the part of both that a kernel is compiled and bound for, without any value. `Lists` has the sizes of the
lists that kernels/prefill/fold.cu makes on the device, and launches it. Lists are kept as long as the schedule and the
function that they were made from are alive and unchanged; a CUDA graph always makes its own, because what is captured
may change between replays, and so does every call with what a graph has to do with (captures.py).
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.functions.function import version
from tilewise.gpu import captures
from tilewise.gpu.abi import Divisor, FoldArgs, ForwardArgs, NoFunctionArgs, TileListArgs, score_rule
from tilewise.scores import Scores

if TYPE_CHECKING:
    from tilewise.functions import Function
    from tilewise.plan.schedule import BlockSchedule

FOLD_THREADS = 256  # kinds.cuh: kKindThreads
KIND_SHARED = 4 * (2 * FOLD_THREADS + FOLD_THREADS // 32)  # kinds.cuh: kKindBytes
FOLD_SHARED = 4 * (FOLD_THREADS + 1 + FOLD_THREADS // 16) + KIND_SHARED  # fold.cu: kAtKinds
MAX_TILES = 1 << 16  # fold.cu: per list, where tiles are ordered
SLAB = 16  # prefill/work.cuh: kSlab
MAX_UNITS = (1 << 20) - 1  # prefill/work.cuh: kNoUnit
LISTS_KEPT = 16


AnySchedule = Union["BlockSchedule", "Stacked"]


@dataclass(frozen=True)
class Pattern:
    """block_q, block_k: of the schedule, 0 without one; batch, heads: how many patterns it has. lengths: its blocks
    have lengths. text: the functions in C++, "" for none. mask, score: which of them there are. uses: what the mask
    depends on, letters of "bhqk"."""

    block_q: int = 0
    block_k: int = 0
    batch: int = 1
    heads: int = 1
    lengths: bool = False
    text: str = ""
    mask: bool = False
    score: bool = False
    uses: str = ""

    @classmethod
    def of(cls, schedule: AnySchedule | None, function: Function | None, sizes: tuple[int, int, int, int]) -> Pattern:
        """sizes: (sequences, query heads, longest query, longest key)."""
        fields: dict[str, Any] = {}
        if schedule is not None:
            lengths = [x for x in (schedule.lengths_q, schedule.lengths_k) if x is not None]
            batch, heads = max(len(x) for x in (schedule.bits, *lengths)), schedule.bits.shape[1]
            fields |= {"block_q": schedule.block_q, "block_k": schedule.block_k, "batch": batch, "heads": heads}
            fields["lengths"] = bool(lengths)
        if function is not None:
            fields |= {"text": function.text(sizes), "mask": function.masks}
            fields |= {"score": function.scores, "uses": "".join(sorted(function.uses))}
        return cls(**fields)

    @property
    def listed(self) -> bool:
        """Do tiles visit what a list says? A score function alone changes nothing of that."""
        return self.block_q > 0 or self.mask


NO_PATTERN = Pattern()


def block_keys(most: int, block_k: int, page_size: int, step: int) -> tuple[int, int]:
    """(keys of a block of the kernel, keys of a unit) for blocks of at most `most` keys in steps of `step`.

    A unit lies within a block of the schedule and within a page, and units fill the kernel's block.
    """
    if not block_k:
        return most, math.gcd(most, page_size) if page_size else most
    unit = math.gcd(block_k, page_size) if page_size else block_k
    fitting = [n for n in range(step, most + 1, step) if math.gcd(unit, n) >= SLAB]
    # The largest units first, up to the point where a copy brings enough; then the largest blocks.
    best = max(fitting, key=lambda n: (min(64, math.gcd(unit, n)), n))
    return best, math.gcd(unit, best)


def problem_constants(
    scores: Scores, pattern: Pattern, *, tile_q: int, unit: int, lazy: bool, pack: int, page_size: int
) -> tuple[tuple[str, Constant], ...]:
    """What both forward kernels are told of a problem; tile_q, unit, lazy: of the tiling."""
    return (
        ("kPack", pack),
        ("kPageSize", page_size),
        ("kExact", scores.exact or not lazy),
        score_rule(Scores() if pattern.score else scores),
        ("kUnit", unit),
        ("kSlabs", pattern.block_q * pack % tile_q > 0),
        ("kLengths", pattern.lengths),
        ("Function", "UserFunction" if pattern.text else "NoFunction"),
    )


def fold_spec(pattern: Pattern, tile_q: int, unit: int, pack: int, packed: bool) -> KernelSpec:
    """The kernel that makes the lists."""
    text = pattern.text if pattern.mask else ""
    function = ("Function", "UserFunction" if text else "NoFunction")
    constants = (("kTileQ", tile_q), ("kUnit", unit), ("kPack", pack), ("kPacked", packed), function)
    product = not text  # what a user's function takes of registers is the user's
    return KernelSpec(
        "fold", "prefill/fold.cu", "fold", constants, FOLD_THREADS, FOLD_SHARED, product=product, text=text
    )


class Stacked(NamedTuple):
    """Schedules of packed sequences as one, of which each sequence reads its own bits."""

    block_q: int
    block_k: int
    num_k_blocks: int
    bits: torch.Tensor
    whole: torch.Tensor | None
    lengths_q: torch.Tensor | None
    lengths_k: torch.Tensor | None


def stacked(schedules: Sequence[BlockSchedule | None], rows: int, keys: int) -> Stacked | None:
    """One schedule, or None for all keys, per sequence. Their blocks have one size.

    rows, keys: of a sequence, at most. They count where a sequence has no schedule, which may be the longest.
    """
    given = [s for s in schedules if s is not None]
    if not given:
        return None
    sizes = {(s.block_q, s.block_k) for s in given}
    if len(sizes) > 1:
        raise NotImplementedError(f"GPU kernels take schedules of one block size per call, got {sorted(sizes)}")
    ((block_q, block_k),) = sizes
    heads = max(s.bits.shape[1] for s in given)
    q_blocks, k_blocks = max(s.num_q_blocks for s in given), max(s.num_k_blocks for s in given)
    if len(given) < len(schedules):
        q_blocks, k_blocks = math.ceil(rows / block_q), math.ceil(keys / block_k)
    words = math.ceil(k_blocks / 32)

    def planes(of: Callable[[BlockSchedule], torch.Tensor | None], missing: int) -> torch.Tensor | None:
        """missing: the words of a sequence that has no such plane."""
        if all(of(s) is None for s in given):
            return None
        bits = given[0].bits.new_full((len(schedules), heads, q_blocks, words), missing)
        for b, s in enumerate(schedules):
            plane = None if s is None else of(s)
            if plane is not None:
                bits[b] = 0
                own = plane[0].repeat_interleave(heads // plane.shape[1], 0)  # KV heads beside query heads
                bits[b, :, : plane.shape[2], : plane.shape[3]] = own
        return bits

    def lengths(of: Callable[[BlockSchedule], torch.Tensor | None], size: int, blocks: int) -> torch.Tensor | None:
        if all(of(s) is None for s in given):
            return None
        found = torch.full((len(schedules), blocks), size, dtype=torch.int32, device=given[0].bits.device)
        for b, s in enumerate(schedules):
            own = None if s is None else of(s)
            if own is not None:
                found[b, : own.shape[1]] = own[0]
        return found

    bits = planes(lambda s: s.bits, -1)  # without a schedule every block is kept
    assert bits is not None
    whole = planes(lambda s: s.whole, 0)  # and none is known to be whole: a mask decides
    lengths_q, lengths_k = (
        lengths(lambda s: s.lengths_q, block_q, q_blocks),
        lengths(lambda s: s.lengths_k, block_k, k_blocks),
    )
    return Stacked(block_q, block_k, k_blocks, bits, whole, lengths_q, lengths_k)


class Lists:
    """The lists of one bound forward: `make` points its arguments at lists for a schedule and a function."""

    def __init__(
        self,
        pattern: Pattern,
        *,
        device: torch.device,
        batch: int,
        tile_heads: int,
        pack: int,
        tile_q: int,
        unit: int,
        rows_each: int,
        keys: int,
        packed: bool,
    ) -> None:
        by_head = "h" in pattern.uses
        self.heads = tile_heads if by_head else min(pattern.heads, tile_heads)
        self.sequences = 1 if packed else batch if "b" in pattern.uses else pattern.batch
        self.lists = self.sequences * self.heads
        self.rows_each, self.width, self.packed = rows_each, max(1, math.ceil(keys / unit)), packed
        if self.width > MAX_UNITS:
            raise NotImplementedError(
                f"a schedule or mask function over {keys} keys in units of {unit} is too long: "
                f"at most {MAX_UNITS * unit} keys; use larger blocks"
            )
        if rows_each > MAX_TILES and not packed:
            raise NotImplementedError(
                f"a schedule or mask function takes up to {MAX_TILES * tile_q // pack} query rows"
            )
        self.pattern, self.device = pattern, device
        self.spec = fold_spec(pattern, tile_q, unit, pack, packed)
        self.grid = (rows_each if pattern.mask else math.ceil(rows_each / (FOLD_THREADS // 32)), self.lists, 1)
        block_q, block_k = max(1, pattern.block_q), max(1, pattern.block_k)
        self.tile_lists = TileListArgs(
            width=self.width,
            rows_each=rows_each,
            lists_batch=self.heads if self.sequences > 1 else 0,
            heads_each=Divisor.by(tile_heads // self.heads),
            block_q=Divisor.by(block_q),
            block_k=Divisor.by(block_k),
        )
        self.args = FoldArgs(list_heads=self.heads, lists_each=Divisor.by(max(1, self.heads // pattern.heads)))
        self._kept: OrderedDict[Any, tuple[Callable[[], Any], torch.Tensor]] = OrderedDict()
        self._launch_args: compiler.Args | None = None
        self._form: Any = None  # of the schedule that the arguments describe
        self._finished: dict[int, torch.Tensor] = {}  # by stream, zero between launches
        if device.type == "cuda":
            self.kernel = compiler.load(self.spec, device)

    def make(
        self,
        forward: ForwardArgs,
        schedule: AnySchedule | None,
        function: Function | None,
        stream: int,
    ) -> torch.Tensor:
        """Lists on the card, made on `stream` or kept from before; the forward's arguments point at them.

        The caller holds the tensor that is returned until the forward is launched.
        """
        capturing = captures.capturing()
        read = self._point(forward, schedule)
        looked_up = () if function is None else function.tensors
        if capturing:
            captures.note((*read, *looked_up))
        keeps = not (self.packed or capturing or captures.noted((*read, *looked_up)))
        key = (id(schedule), *map(version, read), None if function is None else function.key, stream)
        if keeps:
            found = self._kept.get(key)
            if found is not None and found[0]() is schedule:  # and not another one at its address
                self._place(forward, found[1])
                return found[1]
        work = torch.empty(self._words, dtype=torch.int32, device=self.device)
        self._place(forward, work)
        finished = None if capturing else self._finished.get(stream)
        if finished is None:
            finished = torch.zeros(self.lists, dtype=torch.int32, device=self.device)
            if not capturing:
                self._finished[stream] = finished
        self.args.finished = finished.data_ptr()
        if self._launch_args is None or self.pattern.mask:
            self._launch_args = compiler.Args(forward, self.args, self._values(function))
        self.kernel.launch(self.grid, self._launch_args, stream=stream)
        if keeps:
            self._kept[key] = (_reference(schedule, partial(_forget, self._kept, key)), work)
            while len(self._kept) > LISTS_KEPT:
                self._kept.popitem(last=False)
        return work

    def emulate(
        self,
        forward: ForwardArgs,
        schedule: AnySchedule | None,
        function: Function | None,
        tensors: dict[str, torch.Tensor],
        **emulated: Any,
    ) -> dict[str, torch.Tensor]:
        """The same in the emulator: what the forward then reads, by name."""
        read = {f"schedule {n}": x for n, x in enumerate(self._point(forward, schedule))}
        work = torch.empty(self._words, dtype=torch.int32).fill_(-1)
        finished = torch.zeros(self.lists, dtype=torch.int32)
        self._place(forward, work)
        self.args.finished = finished.data_ptr()
        if function is not None:
            read |= {f"captured {n}": x for n, x in enumerate(function.tensors)}
        known = {**tensors, **read, "lists": work, "finished": finished}
        emulator.launch(self.spec, self.grid, [forward, self.args, self._values(function)], known, **emulated)
        return {**read, "lists": work}

    def _values(self, function: Function | None) -> ctypes.Structure:
        """What the kernel is told of the functions: of a mask, which alone decides what tiles visit."""
        return function.arguments() if function is not None and self.pattern.mask else NoFunctionArgs()

    @property
    def _words(self) -> int:
        return self.lists * self.rows_each * (3 + self.width)

    def _place(self, forward: ForwardArgs, work: torch.Tensor) -> None:
        """Points both kernels' arguments at the lists in `work`."""
        a, lists, at, rows = self.args, forward.lists, work.data_ptr(), self.lists * self.rows_each
        a.counts = lists.counts = at
        a.order = at + 4 * 2 * rows
        lists.order = None if self.packed else at + 4 * 2 * rows
        a.units = lists.units = at + 4 * 3 * rows

    def _point(self, forward: ForwardArgs, schedule: AnySchedule | None) -> list[torch.Tensor]:
        """Points both kernels' arguments at the schedule; returns what they read."""
        if schedule is None:
            return []
        a, lists = self.args, forward.lists
        bits, whole = schedule.bits, schedule.whole
        a.kept, a.whole = bits.data_ptr(), None if whole is None else whole.data_ptr()
        form = bits.shape, bits.stride(), schedule.num_k_blocks
        if form != self._form:
            a.kept_batch = bits.stride(0) if bits.shape[0] > 1 else 0
            a.kept_head = bits.stride(1) if bits.shape[1] > 1 else 0
            a.kept_row, a.q_blocks, a.k_blocks = bits.stride(2), bits.shape[2], schedule.num_k_blocks
            self._form = form
        read = [bits] if whole is None else [bits, whole]
        if not self.pattern.lengths:
            return read
        for name, lengths in (("q", schedule.lengths_q), ("k", schedule.lengths_k)):
            setattr(lists, f"lengths_{name}", None if lengths is None else lengths.data_ptr())
            if lengths is not None:
                setattr(lists, f"lengths_{name}_batch", lengths.stride(0) if lengths.shape[0] > 1 else 0)
                read.append(lengths)
        return read


def _forget(kept: OrderedDict[Any, Any], key: Any, _: Any) -> None:
    kept.pop(key, None)


def _reference(x: Any, forget: Callable[[Any], object]) -> Callable[[], Any]:
    """forget: called when x is gone, so that the lists of a batch's schedule take no memory beyond the batch."""
    return (lambda: None) if x is None else weakref.ref(x, forget)
