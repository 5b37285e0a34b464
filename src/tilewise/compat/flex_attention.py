"""The calls of torch.nn.attention.flex_attention, served by Tilewise: same names, arguments, order, defaults, shapes.

    from tilewise.compat.flex_attention import create_block_mask, flex_attention

On CUDA tensors they run Tilewise's kernels (bfloat16 and float16, head_dim up to 256, Hopper), on CPU tensors its CPU
backend, float32 too. There is nothing to compile: `torch.compile(flex_attention)` works and breaks its graph here.
`BlockMask`, `AuxRequest`, `AuxOutput`, `and_masks`, `or_masks` and `noop_mask` are torch's own, so that a mask may come
from here or from torch, and go to either. What differs:

- score_mod and mask_mod are traced, not called for each pair, into expressions that no value of theirs recompiles;
  what they may do, `tilewise.attention` says of its functions. An index past a captured tensor's end means its last
  entry, one below 0 its first.
- `create_block_mask` forms no mask of queries × keys. Where arithmetic on ranges cannot tell, a block counts as partial,
  so a block may be listed of which nothing is seen; and a last block that is shorter than the others may be full.
- Lists may be in any order, and entries that are out of range or twice there count not, or once.
- There are no gradients, no max_scores, no FP8 and no float64 here: NotImplementedError says so.

Meaning: score_mod gets the scaled score and its result counts where the block mask shows the pair: in the blocks of the
full lists all pairs, in those of the other lists what mask_mod allows, elsewhere none. h is the query head, q and k
count from 0. A row with no visible key gives 0 and an LSE of −inf.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    noop_mask,
    or_masks,
)

from tilewise import checks, functions
from tilewise.api import attention, schedule_of
from tilewise.functions.function import version
from tilewise.plan.schedule import BlockSchedule

from .flash_options import rows

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

Function = Callable[..., Any]
Device = torch.device | str | int
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]
P = ParamSpec("P")
R = TypeVar("R")

BLOCK = 128  # torch's default, and the largest block of a schedule
HINTS = set(FlexKernelOptions.__annotations__) - {"BACKEND"}  # they change no result


def _outside_graphs(call: Callable[P, R]) -> Callable[P, R]:
    """The call, at which a graph being compiled is broken: no graph holds a function of the user's or a schedule."""
    uncompiled = torch.compiler.disable(call)

    @functools.wraps(call)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        made: R = uncompiled(*args, **kwargs)
        return made

    return plain


@_outside_graphs
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Result:
    """Attention with scores and a mask of the user's own.

    query: (B, Hq, Nq, D); key: (B, Hkv, Nk, D); value: (B, Hkv, Nk, Dv); with enable_gqa Hq may be a multiple of Hkv.
    The keys may be of one sequence for all, (1, Hkv, Nk, D), if block_mask is of B sequences.
    score_mod: (score, b, h, q, k) -> the score to take. block_mask: of torch or of `create_block_mask`, for 1 or B
    sequences, 1 or Hq heads, Nq queries and Nk keys, on query's device. What is made of it is kept as long as it lives.
    scale: `D ** -0.5` if None. kernel_options: hints for torch's kernels are accepted and change nothing.

    Returns out (B, Hq, Nq, Dv), laid out as query is; with return_lse also the LSE (B, Hq, Nq) float32, natural log;
    with return_aux (out, AuxOutput).
    """
    with_lse = _check_returned(return_lse, return_aux)
    _check_options(kernel_options)
    _check_shapes(query, key, value, enable_gqa, block_mask)
    schedule = mask_mod = None
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
        schedule, mask_mod = _schedule(block_mask), block_mask.mask_mod
        mask_mod = None if mask_mod is noop_mask else mask_mod
    _check_captured(mask_mod, score_mod)

    head_dim, value_dim = query.shape[-1], value.shape[-1]
    q, k, v = (_laid_out(x, max(head_dim, value_dim)) for x in (query, key, value))
    k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
    scale = head_dim**-0.5 if scale is None else scale
    o, lse = attention(
        q, k, v, scale=scale, schedule=schedule, mask=mask_mod, score=score_mod, return_lse=True, out=torch.empty_like(q)
    )
    o = o[..., :value_dim].transpose(1, 2)
    if return_aux is not None:
        return o, AuxOutput(lse=lse if with_lse else None)
    return (o, lse) if with_lse else o


@_outside_graphs
def create_block_mask(
    mask_mod: Function,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The blocks in which mask_mod (b, h, q, k) -> bool lets a query see a key, for b < B, h < H, q < Q_LEN, k < KV_LEN.

    B, H: 1 if None. device: of its lists, an accelerator if None and there is one. BLOCK_SIZE: of queries and of keys,
    multiples of 16. separate_full_blocks: list blocks apart in which every pair is seen. _compile: accepted, there is
    nothing to compile. dq_kv_order: of torch's backward, accepted and not needed.
    """
    if compute_dq_write_order:
        raise NotImplementedError(
            "compute_dq_write_order is for a backward pass, which Tilewise has not; use torch's create_block_mask"
        )
    sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else (int(BLOCK_SIZE[0]), int(BLOCK_SIZE[1]))
    lengths = checks.integer("Q_LEN", Q_LEN, 1), checks.integer("KV_LEN", KV_LEN, 1)
    batch, heads = (1 if n is None else checks.integer(name, n, 1) for name, n in (("B", B), ("H", H)))
    pieces = [_piece(size, length) for size, length in zip(sizes, lengths, strict=True)]
    schedule = schedule_of(
        mask_mod, batch, heads, *lengths, block_q=pieces[0], block_k=pieces[1], device=_device(device)
    )
    assert schedule.whole is not None
    kept, full = (_unpacked(bits, schedule.num_k_blocks) for bits in (schedule.bits, schedule.whole))
    kept, full = _merged(kept, sizes, pieces), ~_merged(~full, sizes, pieces)
    planes = [kept & ~full, full] if separate_full_blocks else [kept]
    lists = [x.expand(batch, heads, *x.shape[2:]) for blocks in planes for x in _ordered(blocks)]
    made = BlockMask.from_kv_blocks(
        *(x.contiguous() for x in lists), BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=lengths
    )
    _kept[made] = _Kept(_given(made), schedule)
    return made


@_outside_graphs
def create_mask(
    mod_fn: Function, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device | None = None
) -> torch.Tensor:
    """What a mask_mod (b, h, q, k), or a score_mod (score, b, h, q, k) by scores other than −inf, lets be seen.

    Returns (B or 1, H or 1, Q_LEN, KV_LEN) bool on `device`, an accelerator if None and there is one.
    """
    sizes = [1 if n is None else checks.integer(name, n, 0) for name, n in (("B", B), ("H", H))]
    sizes += [checks.integer(name, n, 0) for name, n in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))]
    where = _device(device)
    at = [torch.arange(n, device=where).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(sizes)]
    if _arguments(mod_fn) != 5:
        return functions.of(mod_fn, None).seen(*at).contiguous()
    scores = functions.of(None, mod_fn).scored(torch.zeros((), device=where), *at)
    return (scores != -torch.inf).expand(sizes).contiguous()


def _arguments(function: Function) -> int:
    """How many arguments it must be given."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is inspect.Parameter.empty for p in parameters)


def _device(device: Device | None) -> torch.device:
    if device is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(device)


# ---- what is asked --------------------------------------------------------------------------------------------------


def _check_returned(return_lse: bool, return_aux: AuxRequest | None) -> bool:
    """Is the LSE asked for?"""
    if return_aux is None:
        return checks.flag("return_lse", return_lse)
    if not isinstance(return_aux, AuxRequest):
        raise TypeError(f"return_aux must be an AuxRequest or None, got {type(return_aux).__name__}")
    if return_lse:
        raise ValueError("return_lse and return_aux are both given; return_aux=AuxRequest(lse=True) says it all")
    if return_aux.max_scores:
        raise NotImplementedError("return_aux with max_scores is not served: the largest scores are never kept")
    return return_aux.lse


def _check_options(options: FlexKernelOptions | None) -> None:
    for name, value in (options or {}).items():
        hint = name.removeprefix("fwd_").removeprefix("bwd_")
        if hint not in HINTS and (name, value) != ("BACKEND", "AUTO"):
            raise NotImplementedError(
                f"kernel_options has {name!r}: {value!r}, which is no hint for torch's kernels and asks for what "
                "Tilewise does not do; leave it out, or use torch's flex_attention"
            )


def _check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, block_mask: BlockMask | None
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.tensor(name, x, device=query.device)
        if x.is_nested or x.dim() != 4:
            raise NotImplementedError(f"{name} must be a dense (batch, heads, seqlen, head_dim), got {tuple(x.shape)}")
        if x.dtype != query.dtype or x.dtype not in checks.FLOATS:
            raise NotImplementedError(
                f"query, key and value are served in one of float32, float16 and bfloat16, got {name} in {x.dtype}"
            )
    heads, heads_kv = query.shape[1], key.shape[1]
    if heads != heads_kv and not checks.flag("enable_gqa", enable_gqa):
        raise ValueError(f"key must have query's {heads} heads, got {heads_kv}; enable_gqa=True takes grouped heads")
    masks = 1 if block_mask is None else block_mask.kv_num_blocks.shape[0]
    if len(key) != len(query) and (len(key) != 1 or masks != len(query)):
        raise ValueError(
            f"key must have query's batch size {len(query)}, or 1 with a block_mask of {len(query)} sequences, got "
            f"{len(key)} and a block_mask of {masks}"
        )


def _check_block_mask(block_mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> None:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask or None, got {type(block_mask).__name__}")
    *lead, seqlen_q, seqlen_k = block_mask.shape
    if (seqlen_q, seqlen_k) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"block_mask was made for {seqlen_q} queries and {seqlen_k} keys, got {query.shape[2]} and {key.shape[2]}; "
            "make one for these lengths"
        )
    # Fewer heads than query's would be KV heads for a schedule.
    for name, n, of in zip(("heads", "sequences"), reversed(lead), (query.shape[1], query.shape[0]), strict=False):
        if n not in (1, of):
            raise ValueError(f"block_mask must be of 1 or {of} {name}, as query is, got {n}")


def _check_captured(mask_mod: Function | None, score_mod: Function | None) -> None:
    if not torch.is_grad_enabled() or (mask_mod is None and score_mod is None):
        return
    if any(x.requires_grad for x in functions.of(mask_mod, score_mod).tensors):
        raise NotImplementedError(
            "score_mod or mask_mod captures a tensor that requires gradients, and Tilewise has no backward pass yet; "
            "call it under torch.no_grad(), or use torch's flex_attention for training"
        )


def _laid_out(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """x (B, H, N, D) as (B, N, H, head_dim) of autocast's dtype where it is on: a view where that is possible."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    if x.shape[-1] < head_dim:  # zeros change no score and no value
        x = F.pad(x, (0, head_dim - x.shape[-1]))
    return rows("x", x, x.shape).transpose(1, 2)


# ---- block masks as schedules ---------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What a schedule was made from."""

    lengths: tuple[int, int]
    sizes: tuple[int, int]
    lists: tuple[torch.Tensor | None, ...]  # counts, indices, full counts, full indices
    versions: tuple[Any, ...]

    def same(self, other: _Given) -> bool:
        lists = zip(self.lists, other.lists, strict=True)
        return self[:2] == other[:2] and self.versions == other.versions and all(x is y for x, y in lists)


class _Kept(NamedTuple):
    given: _Given
    schedule: BlockSchedule


_kept: WeakKeyDictionary[BlockMask, _Kept] = WeakKeyDictionary()


def _given(mask: BlockMask) -> _Given:
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    versions = tuple(None if x is None else version(x) for x in lists)
    return _Given(tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE), lists, versions)


def _schedule(mask: BlockMask) -> BlockSchedule:
    """The schedule of a block mask, kept with it; made anew in a graph being captured, which then follows the lists."""
    if mask.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return _made(mask)
    given, known = _given(mask), _kept.get(mask)
    if known is None or not known.given.same(given):
        known = _kept[mask] = _Kept(given, _made(mask))
    return known.schedule


def _made(mask: BlockMask) -> BlockSchedule:
    lengths, sizes = mask.seq_lengths, mask.BLOCK_SIZE
    pieces = [_piece(size, length) for size, length in zip(sizes, lengths, strict=True)]
    kept, full = _listed(mask.kv_num_blocks, mask.kv_indices, mask), None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, mask)
        kept = kept | full
    kept, whole = (None if x is None else _split(x, lengths, sizes, pieces) for x in (kept, full))
    assert kept is not None
    return BlockSchedule.from_blocks(
        kept, whole=whole, seqlen_q=lengths[0], seqlen_k=lengths[1], block_q=pieces[0], block_k=pieces[1]
    )


def _piece(size: int, length: int) -> int:
    """The largest block of a schedule of which blocks of `size` are made."""
    if checks.integer("BLOCK_SIZE", size, 1) >= length:  # one block, which ends with its sequence
        return BLOCK
    if size % 16:
        raise NotImplementedError(f"BLOCK_SIZE is served in multiples of 16, got {size}")
    return next(n for n in range(BLOCK, 0, -16) if size % n == 0)


def _listed(counts: torch.Tensor, indices: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    """The first `counts` (…, rows) of `indices` (…, rows, width) as bools (…, rows, columns); others are left out."""
    num_rows, columns = (-(-n // size) for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    if counts.shape[-1] < num_rows:
        raise ValueError(
            f"block_mask must list blocks for its {mask.seq_lengths[0]} queries in {num_rows} rows, got "
            f"{counts.shape[-1]}; a slice along the queries needs its own seq_lengths"
        )
    counts, indices = counts[..., :num_rows], indices[..., :num_rows, :]
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    listed &= (indices >= 0) & (indices < columns)
    blocks = torch.zeros((*counts.shape, columns + 1), dtype=torch.bool, device=indices.device)
    return blocks.scatter_(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _split(
    blocks: torch.Tensor, lengths: tuple[int, int], sizes: tuple[int, int], pieces: list[int]
) -> torch.Tensor:
    """Bools (…, rows, columns) of blocks of `sizes` as those of the pieces in them."""
    for dim, length, size, piece in zip((-2, -1), lengths, sizes, pieces, strict=True):
        if size != piece:
            blocks = blocks.index_select(dim, torch.arange(0, length, piece, device=blocks.device) // size)
    return blocks


def _merged(blocks: torch.Tensor, sizes: tuple[int, int], pieces: list[int]) -> torch.Tensor:
    """The reverse of `_split`: is one of a block's pieces True? (B, H, rows, columns)"""
    for dim, size, piece in zip((-2, -1), sizes, pieces, strict=True):
        parts = blocks.split(max(1, size // piece), dim)
        blocks = torch.stack([part.any(dim) for part in parts], dim) if size > piece else blocks
    return blocks


def _unpacked(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """A schedule's bits (…, words) as bools (…, columns)."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)[..., :columns]


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bools (…, rows, columns) as int32 lists: how many of a row are True, (…, rows), and these first, (…, columns)."""
    indices = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.int()
