"""Block schedules on a device, kernels/common/schedule_*.cu: arguments and launches. They give `BlockSchedule` what
plan/schedule_device.py asks for.

Each is one launch on the card of its tensors, or in the emulator over CPU tensors. None waits, and the host reads
nothing. They validate nothing: plan/schedule.py has done so.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.gpu import captures
from tilewise.gpu.abi import ELEMENTS
from tilewise.plan import schedule_device
from tilewise.plan.schedule_select import share_of

THREADS = 256  # of a block, but for rows of more than one warp
WARPS = THREADS // 32
MOST = 2**31 - 1  # words of bits, and squares of 32 × 32, that the kernels count
INDICES = {torch.int32: "int", torch.int64: "int64_t"}
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a float32 that has such a value
# Words of 32 columns that a warp of schedule_select.cu holds, at most, and the warps that share a longer row.
HELD, ROW_WARPS, LONG_ROW_WARPS = 32, 8, 16


class PackArgs(ctypes.Structure):
    """common/schedule_pack.cu: PackArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("blocks", "whole", "bits", "whole_bits")),
        *((n, ctypes.c_int) for n in ("rows", "cols", "words", "unit")),
    ]


class ScatterArgs(ctypes.Structure):
    """common/schedule_scatter.cu: ScatterArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("counts", "indices", "full_counts", "full_indices")),
        *((n, ctypes.c_void_p) for n in ("bits", "whole", "faults")),
        *((n, ctypes.c_int) for n in ("rows", "cols", "words", "width", "full_width")),
    ]


class ListArgs(ctypes.Structure):
    """common/schedule_lists.cu: ListArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("bits", "counts", "indices")),
        *((n, ctypes.c_int) for n in ("rows", "cols", "words", "width")),
    ]


class TransposeArgs(ctypes.Structure):
    """common/schedule_transpose.cu: TransposeArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("bits", "whole", "turned_bits", "turned_whole")),
        *((n, ctypes.c_int) for n in ("patterns", "rows", "cols", "words", "turned_words")),
    ]


class SelectArgs(ctypes.Structure):
    """common/schedule_select.cu: SelectArgs."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("scores", "bits", "faults")),
        *((n, ctypes.c_int) for n in ("rows", "cols", "words", "q_blocks")),
        ("amount", ctypes.c_uint32),
        *((n, ctypes.c_int) for n in ("causal", "seqlen_q", "seqlen_k", "block_q", "block_k")),
    ]


def _spec(name: str, *constants: tuple[str, Constant], threads: int = THREADS, shared: int = 0) -> KernelSpec:
    name = f"schedule_{name}"
    return KernelSpec(name, f"common/{name}.cu", name, constants, threads, shared, product=True)


@lru_cache(maxsize=8)
def scatter_spec(dtype: torch.dtype) -> KernelSpec:
    return _spec("scatter", ("Index", INDICES[dtype]))


@lru_cache(maxsize=256)
def select_spec(dtype: torch.dtype, words: int, share: bool) -> KernelSpec:
    """The kernel for rows of `words` words: one warp or eight hold them, longer rows are read again and again."""
    warps, held = LONG_ROW_WARPS, 0
    if words <= HELD * ROW_WARPS:
        warps = 1 if words <= HELD else ROW_WARPS
        held = math.ceil(words / (4 * warps)) * 4
    constants: dict[str, Constant] = {
        "Element": ELEMENTS[dtype],
        "kUnused": UNUSED_BITS[dtype],
        "kRowWarps": warps,
        "kWords": held,
        "kShare": share,
        "Sum": "uint64_t" if share else "uint32_t",
    }
    return _spec("select", *constants.items(), threads=max(THREADS, 32 * warps), shared=16 * warps if warps > 1 else 0)


def specs(*, every: bool = False) -> list[KernelSpec]:
    """The kernels as users get them: bfloat16 scores in rows of each kind, or `every` dtype and length of rows."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if every else (torch.bfloat16,)
    words = (*range(4, 33, 4), 64, 128, 256, 257) if every else (32, 256, 257)
    found = [select_spec(d, n, share) for d in dtypes for n in words for share in (False, True)]
    return [*found, *(scatter_spec(d) for d in INDICES), *map(_spec, ("pack", "lists", "transpose"))]


class _Bound:
    """A kernel and its arguments on one device. One thread at a time fills and launches them."""

    def __init__(self, spec: KernelSpec, device: torch.device, args: ctypes.Structure) -> None:
        self.spec, self.args, self.lock = spec, args, threading.Lock()
        self.kernel = None
        if device.type == "cuda":
            self.kernel = compiler.load(spec, device)
            self.launch_args = compiler.Args(args)

    def launch(self, blocks: int, tensors: Mapping[str, torch.Tensor | None], emulated: dict[str, Any]) -> None:
        """tensors: what the kernel may touch, by name."""
        if self.kernel is not None:
            self.kernel.launch((blocks, 1, 1), self.launch_args)
            if captures.capturing():
                captures.note(tensors.values())
            return
        known = {name: x for name, x in tensors.items() if x is not None}
        emulator.launch(self.spec, (blocks, 1, 1), [self.args], known, **emulated)


@lru_cache(maxsize=256)
def _bound(
    device: torch.device, args: type[ctypes.Structure], spec: Callable[..., KernelSpec], *constants: Any
) -> _Bound:
    return _Bound(spec(*constants), device, args())


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _sizes(x: torch.Tensor, tail: int) -> tuple[int, ...]:
    """x's sizes with (batch or 1, heads or 1) in front of the last `tail`."""
    return (1,) * (2 + tail - x.dim()) + tuple(x.shape)


def _empty(*sizes: int, like: torch.Tensor) -> torch.Tensor:
    """int32 (batch or 1, heads or 1, …)."""
    _check_countable(sizes)
    return torch.empty(sizes, dtype=torch.int32, device=like.device)


def _check_countable(sizes: tuple[int, ...]) -> None:
    """ValueError where the kernels could not count the words."""
    if math.prod(sizes) > MOST:
        raise ValueError(f"a schedule on a device has at most 2^31 − 1 words, got {sizes}; use larger blocks")


class _Packing:
    """What packing tensors of one shape takes, but for their addresses."""

    def __init__(self, device: torch.device, shape: torch.Size) -> None:
        batch, heads, q_blocks, cols = (1,) * (4 - len(shape)) + tuple(shape)
        words = -(-cols // 32)
        self.shape = (batch, heads, q_blocks, words)
        _check_countable(self.shape)
        self.grid = -(-math.prod(self.shape) // THREADS)
        self.bound = _Bound(_spec("pack"), device, PackArgs(rows=batch * heads * q_blocks, cols=cols, words=words))


_packing = lru_cache(maxsize=256)(_Packing)


def pack(
    blocks: torch.Tensor, whole: torch.Tensor | None = None, **emulated: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """bools (…, nq, nk) -> bits; of `whole`, those that are kept. emulated: options of emulator.launch."""
    packing = _packing(blocks.device, blocks.shape)
    bits = torch.empty(packing.shape, dtype=torch.int32, device=blocks.device)
    whole_bits = None if whole is None else torch.empty_like(bits)
    if not packing.grid:
        return bits, whole_bits
    blocks = blocks.contiguous()
    whole = None if whole is None else whole.contiguous()
    bound = packing.bound
    with bound.lock:
        a = bound.args
        at, whole_at = blocks.data_ptr(), _address(whole)
        a.blocks, a.whole, a.bits, a.whole_bits = at, whole_at, bits.data_ptr(), _address(whole_bits)
        aligned = a.cols | at | (whole_at or 0)
        a.unit = 16 if aligned % 16 == 0 else 4 if aligned % 4 == 0 else 1
        known = {"blocks": blocks, "whole": whole, "bits": bits, "whole_bits": whole_bits}
        bound.launch(packing.grid, known, emulated)
    return bits, whole_bits


def scatter(
    counts: torch.Tensor,
    indices: torch.Tensor,
    full_counts: torch.Tensor | None,
    full_indices: torch.Tensor | None,
    num_k_blocks: int,
    **emulated: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The first counts (…, nq) of indices (…, nq, width) -> bits, whole, faults; lists full_* are in both planes."""
    batch, heads, q_blocks, width = _sizes(indices, 2)
    words = -(-num_k_blocks // 32)
    bits = _empty(batch, heads, q_blocks, words, like=counts)
    whole = None if full_counts is None else torch.empty_like(bits)
    faults = _empty(batch, heads, q_blocks, like=counts)
    if not faults.numel():
        return bits, whole, faults
    given = (counts, indices, full_counts, full_indices)
    lists = [None if x is None else x.to(indices.dtype).contiguous() for x in given]
    bound = _bound(counts.device, ScatterArgs, scatter_spec, indices.dtype)
    with bound.lock:
        a = bound.args
        a.counts, a.indices, a.full_counts, a.full_indices = map(_address, lists)
        a.bits, a.whole, a.faults = bits.data_ptr(), _address(whole), faults.data_ptr()
        a.rows, a.cols, a.words = faults.numel(), num_k_blocks, words
        a.width, a.full_width = width, 0 if full_indices is None else full_indices.shape[-1]
        names = ("counts", "indices", "full_counts", "full_indices")
        known = dict(zip(names, lists, strict=True)) | {"bits": bits, "whole": whole, "faults": faults}
        bound.launch(-(-a.rows // WARPS), known, emulated)
    return bits, whole, faults


def select(
    scores: torch.Tensor,
    top_k: int | None,
    threshold: float | None,
    causal: tuple[int, int, int, int] | None,
    **emulated: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores (…, nq, nk) -> bits of the largest of each row, and with a threshold faults. causal: (seqlen_q, seqlen_k,
    block_q, block_k), or None."""
    batch, heads, q_blocks, cols = _sizes(scores, 2)
    words = -(-cols // 32)
    bits = _empty(batch, heads, q_blocks, words, like=scores)
    faults = None if threshold is None else _empty(batch, heads, q_blocks, like=scores)
    if not bits.numel():
        return bits, None
    scores = scores.detach().contiguous()
    bound = _bound(scores.device, SelectArgs, select_spec, scores.dtype, words, threshold is not None)
    with bound.lock:
        a = bound.args
        a.scores, a.bits, a.faults = scores.data_ptr(), bits.data_ptr(), _address(faults)
        a.rows, a.cols, a.words, a.q_blocks = batch * heads * q_blocks, cols, words, q_blocks
        a.amount = min(top_k or 0, cols) if threshold is None else share_of(threshold)
        a.causal = causal is not None
        if causal is not None:
            a.seqlen_q, a.seqlen_k, a.block_q, a.block_k = causal
        rows_of_block = WARPS if words <= HELD else 1
        known = {"scores": scores, "bits": bits, "faults": faults}
        bound.launch(-(-a.rows // rows_of_block), known, emulated)
    return bits, faults


def transpose(
    bits: torch.Tensor, whole: torch.Tensor | None, num_k_blocks: int, **emulated: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bits of queries × keys, and whole -> those of keys × queries."""
    batch, heads, q_blocks, words = bits.shape
    turned_words = -(-q_blocks // 32)
    turned = _empty(batch, heads, num_k_blocks, turned_words, like=bits)
    turned_whole = None if whole is None else torch.empty_like(turned)
    if not turned.numel():
        return turned, turned_whole
    bound = _bound(bits.device, TransposeArgs, _spec, "transpose")
    with bound.lock:
        a = bound.args
        a.bits, a.whole = bits.data_ptr(), _address(whole)
        a.turned_bits, a.turned_whole = turned.data_ptr(), _address(turned_whole)
        a.patterns, a.rows, a.cols, a.words, a.turned_words = batch * heads, q_blocks, num_k_blocks, words, turned_words
        known = {"bits": bits, "whole": whole, "turned_bits": turned, "turned_whole": turned_whole}
        bound.launch(-(-batch * heads * words * turned_words // WARPS), known, emulated)
    return turned, turned_whole


def lists(
    bits: torch.Tensor, num_k_blocks: int, width: int | None, **emulated: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bits -> counts (batch or 1, heads or 1, nq) and indices (…, width), ascending, then zeros; None without width."""
    batch, heads, q_blocks, words = bits.shape
    counts = _empty(batch, heads, q_blocks, like=bits)
    shape = (batch, heads, q_blocks, width or 0)
    indices = None if width is None else torch.empty(shape, dtype=torch.int32, device=bits.device)
    if not counts.numel():
        return counts, indices
    bound = _bound(bits.device, ListArgs, _spec, "lists")
    with bound.lock:
        a = bound.args
        a.bits, a.counts, a.indices = bits.data_ptr(), counts.data_ptr(), _address(indices)
        a.rows, a.cols, a.words, a.width = counts.numel(), num_k_blocks, words, MOST if width is None else width
        known = {"bits": bits, "counts": counts, "indices": indices}
        bound.launch(-(-a.rows // WARPS), known, emulated)
    return counts, indices


schedule_device.register(schedule_device.Kernels(pack, scatter, select, transpose, lists))
