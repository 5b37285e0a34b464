"""torch's BlockMask and our BlockSchedule, each made from the other.

A BlockMask lists, for each block of queries, the blocks of keys in which mask_mod decides and those that are seen
whole. Its blocks may be larger than a schedule's: they are then made of several pieces.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import BlockMask

from tilewise import checks
from tilewise.functions.function import version
from tilewise.plan.schedule import BlockSchedule

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


class Kept(NamedTuple):
    """A schedule, and what it was made from: lengths and block sizes, lists, and their versions."""

    schedule: BlockSchedule
    sizes: tuple[tuple[int, int], tuple[int, int]]
    lists: tuple[torch.Tensor | None, ...]
    versions: tuple[Any, ...]

    @classmethod
    def of(cls, schedule: BlockSchedule, mask: BlockMask) -> Kept:
        lists = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        versions = tuple(None if x is None else version(x) for x in lists)
        return cls(schedule, (mask.seq_lengths, mask.BLOCK_SIZE), lists, versions)

    def holds(self, mask: BlockMask) -> bool:
        now = Kept.of(self.schedule, mask)
        same = all(x is y for x, y in zip(self.lists, now.lists, strict=True))
        return same and (self.sizes, self.versions) == (now.sizes, now.versions)


_kept: WeakKeyDictionary[BlockMask, Kept] = WeakKeyDictionary()


# ---- a schedule of a block mask -------------------------------------------------------------------------------------


def schedule_from(mask: BlockMask) -> BlockSchedule:
    """The blocks of both lists, those of the full lists as its `whole` plane; on the mask's device, no value is read.

    It is kept as long as the mask lives and is not changed; of lists that torch made in inference mode nobody can tell
    that, and it is made at each call. In a CUDA graph being captured it is made anew, so that replays follow the lists.
    """
    if mask.kv_indices.is_cuda and torch.cuda.is_current_stream_capturing():
        return _made(mask)
    known = _kept.get(mask)
    if known is None or not known.holds(mask):
        known = _kept[mask] = Kept.of(_made(mask), mask)
    return known.schedule


def _made(mask: BlockMask) -> BlockSchedule:
    q, k = (Cut.of(*sizes) for sizes in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    kept, whole = _listed(mask.kv_num_blocks, mask.kv_indices, q, k), None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, q, k)
        kept = kept | whole
    sizes = {"seqlen_q": q.length, "seqlen_k": k.length, "block_q": q.piece, "block_k": k.piece}
    return BlockSchedule.from_blocks(kept, whole=whole, **sizes)


def _listed(counts: torch.Tensor, indices: torch.Tensor, q: Cut, k: Cut) -> torch.Tensor:
    """The pieces of the blocks that are listed: bool (…, pieces of queries, pieces of keys).

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
    kept = kept.scatter_(-1, places, True)[..., : k.blocks]
    for dim, (length, block, piece) in ((-2, q), (-1, k)):
        if piece != block:
            kept = kept.index_select(dim, torch.arange(0, length, piece, device=kept.device) // block)
    return kept


# ---- a block mask of a schedule -------------------------------------------------------------------------------------


@torch.inference_mode(False)  # else nobody could tell whether the lists are changed
def block_mask_from(
    schedule: BlockSchedule, q: Cut, k: Cut, batch: int, heads: int, mask_mod: Any, full: bool
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
        _kept[mask] = Kept.of(schedule, mask)
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
