"""torch's BlockMask and our BlockSchedule, each made from the other.

A BlockMask lists, for each block of queries, the blocks of keys in which mask_mod decides and those that are seen
whole. Its blocks may be larger than a schedule's: they are then made of several pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from tilewise import checks
from tilewise.functions.function import version
from tilewise.plan.schedule import BlockSchedule

MaskMod = Callable[..., Any]  # (b, h, q, k) -> bool
BLOCK = 128  # the largest block of a schedule, and torch's default
LISTS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]


class Cut(NamedTuple):
    """How queries, or keys, are cut: so many rows, the block mask's block, the schedule's block."""

    length: int
    block: int
    piece: int

    @classmethod
    def of(cls, length: int, block: int) -> Cut:
        if checks.integer("BLOCK_SIZE", block, 1) >= length:  # one block, whatever its size
            return cls(length, block, BLOCK)
        if block % 16:
            raise NotImplementedError(f"BLOCK_SIZE is served in multiples of 16, got {block}")
        return cls(length, block, next(n for n in range(BLOCK, 0, -16) if block % n == 0))

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)


class Shown(NamedTuple):
    """What a block mask shows, as `tilewise.attention` takes it."""

    schedule: BlockSchedule
    mask: MaskMod | None


class Kept(NamedTuple):
    """What a block mask shows, and what of it that was made from: sizes, mask_mod, lists and their versions."""

    shown: Shown
    sizes: tuple[tuple[int, int], tuple[int, int]]
    objects: tuple[MaskMod | torch.Tensor | None, ...]
    versions: tuple[Any, ...]

    @classmethod
    def of(cls, shown: Shown, mask: BlockMask) -> Kept:
        lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        versions = tuple(None if x is None else version(x) for x in lists)
        return cls(shown, (mask.seq_lengths, mask.BLOCK_SIZE), (mask.mask_mod, *lists), versions)

    def holds(self, mask: BlockMask) -> bool:
        now = Kept.of(self.shown, mask)
        same = all(x is y for x, y in zip(self.objects, now.objects, strict=True))
        return same and (self.sizes, self.versions) == (now.sizes, now.versions)


_kept: WeakKeyDictionary[BlockMask, Kept] = WeakKeyDictionary()


# ---- what a block mask shows ----------------------------------------------------------------------------------------


def shown_by(mask: BlockMask) -> Shown:
    """A schedule of the blocks that are listed, on the mask's device, and the function to ask; no value is read.

    It is kept as long as the mask lives and is not changed; of lists that torch made in inference mode nobody can tell
    that, and it is made at each call. In a CUDA graph being captured it is made anew, so that replays follow the lists.
    """
    if mask.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return _made(mask)
    known = _kept.get(mask)
    if known is None or not known.holds(mask):
        known = _kept[mask] = Kept.of(_made(mask), mask)
    return known.shown


def _made(mask: BlockMask) -> Shown:
    q, k = (Cut.of(*sizes) for sizes in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    mask_mod = None if mask.mask_mod is noop_mask else mask.mask_mod
    kept, whole = _listed(mask.kv_num_blocks, mask.kv_indices, q, k), None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, q, k)
        mask_mod = None if mask_mod is None else _or_full(mask_mod, full, q.block, k.block)
        kept, whole = kept | full, _in_pieces(full, q, k)
    sizes = {"seqlen_q": q.length, "seqlen_k": k.length, "block_q": q.piece, "block_k": k.piece}
    return Shown(BlockSchedule.from_blocks(_in_pieces(kept, q, k), whole=whole, **sizes), mask_mod)


def _or_full(mask_mod: MaskMod, full: torch.Tensor, block_q: int, block_k: int) -> MaskMod:
    """mask_mod where it has a say. A schedule's `whole` blocks need not be asked about, but they may be, and then a
    full list counts more than mask_mod."""
    full = full[(None,) * (4 - full.dim())]

    def shown(b: Any, h: Any, q: Any, k: Any) -> Any:  # an index past the end means the last entry: one list is for all
        return full[b, h, q // block_q, k // block_k] | mask_mod(b, h, q, k)

    return shown


def _listed(counts: torch.Tensor, indices: torch.Tensor, q: Cut, k: Cut) -> torch.Tensor:
    """The blocks that are listed: bool (…, blocks of queries, blocks of keys).

    counts (…, blocks of queries), indices (…, blocks of queries, width): the first `counts` of a row are listed, in any
    order; those out of range are left out.
    """
    if counts.shape[-1] < q.blocks:
        raise ValueError(
            f"block_mask must have {q.blocks} rows of blocks for {q.length} queries, got {counts.shape[-1]}; a slice "
            "along the queries needs seq_lengths of its own"
        )
    counts, indices = counts[..., : q.blocks], indices[..., : q.blocks, :]
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    listed &= (indices >= 0) & (indices < k.blocks)
    places = torch.where(listed, indices, k.blocks).long()  # one place more, for all that is not listed
    kept = torch.zeros((*counts.shape, k.blocks + 1), dtype=torch.bool, device=indices.device)
    return kept.scatter_(-1, places, True)[..., : k.blocks]


def _in_pieces(blocks: torch.Tensor, q: Cut, k: Cut) -> torch.Tensor:
    """(…, blocks of queries, blocks of keys) -> (…, pieces of queries, pieces of keys), each as its block."""
    for dim, (length, block, piece) in ((-2, q), (-1, k)):
        if piece != block:
            blocks = blocks.index_select(dim, torch.arange(0, length, piece, device=blocks.device) // block)
    return blocks


# ---- a block mask of a schedule -------------------------------------------------------------------------------------


@torch.inference_mode(False)  # else nobody could tell whether the lists are changed
def block_mask_from(
    schedule: BlockSchedule, q: Cut, k: Cut, batch: int, heads: int, mask_mod: MaskMod, full: bool
) -> BlockMask:
    """A block mask over blocks of q.block × k.block for a schedule of pieces.

    full: list the blocks apart that are in the schedule's `whole` plane. As torch has them, the lists are contiguous,
    and those of a row go on with the blocks that are not in it. A schedule that says no more than the lists is kept.
    """
    kept = _unpacked(schedule.bits, schedule.num_k_blocks)
    whole = torch.zeros_like(kept) if schedule.whole is None else _unpacked(schedule.whole, schedule.num_k_blocks)
    kept, whole = _some(kept, q, k), ~_some(~whole, q, k)
    lists: dict[str, Any] = dict.fromkeys(LISTS)
    for prefix, blocks in (("", kept & ~whole), ("full_", whole)) if full else (("", kept),):
        for side, of in (("kv", blocks), ("q", blocks.mT)):
            for what, x in zip(("num_blocks", "indices"), _ordered(of), strict=True):
                lists[f"{prefix}{side}_{what}"] = x.expand(batch, heads, *x.shape[2:]).contiguous()
    mask = BlockMask(seq_lengths=(q.length, k.length), BLOCK_SIZE=(q.block, k.block), mask_mod=mask_mod, **lists)
    if full and (schedule.num_q_blocks, schedule.num_k_blocks) == (q.blocks, k.blocks):
        _kept[mask] = Kept.of(Shown(schedule, None if mask_mod is noop_mask else mask_mod), mask)
    return mask


def _unpacked(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """A schedule's bits (…, words) as bools (…, columns)."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> places) & 1).bool().flatten(-2)[..., :columns]


def _some(pieces: torch.Tensor, q: Cut, k: Cut) -> torch.Tensor:
    """(…, pieces of queries, pieces of keys) -> (…, blocks of queries, blocks of keys): is one of its pieces True?"""
    for dim, (_, block, piece) in ((-2, q), (-1, k)):
        if piece < block:
            pieces = torch.stack([part.any(dim) for part in pieces.split(-(-block // piece), dim)], dim)
    return pieces


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, columns) bools as lists, int32: how many of a row are True, (…), and their columns first, (…, columns)."""
    indices = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.int()
