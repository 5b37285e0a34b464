"""Flex attention's inputs, and torch's own flex_attention, eager and in float64, as the oracle."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.attention.flex_attention as torch_flex
from oracle import assert_gradients, assert_state, gradient_floors, gradients, qkv, randn

import tilewise.compat.flex_attention as flex
from tilewise import reference
from tilewise.compat.flex_attention import AuxRequest, BlockMask

MAKERS = {"torch": torch_flex.create_block_mask, "tilewise": flex.create_block_mask}


def inputs(batch, lengths, heads=(4, 4), head_dim=32, *, dtype=torch.float32, size=1.0, seed=0):
    """q (B, Hq, Nq, D), k and v (B, Hkv, Nk, D), contiguous."""
    given = qkv(batch, *lengths, *heads, head_dim, dtype=dtype, size=size, seed=seed)
    return [x.transpose(1, 2).contiguous() for x in given]


def eager(q, k, v, score_mod=None, block_mask=None, **options):
    """(o, lse) by torch, which looks at no list: its mask_mod alone is what counts."""
    with mock.patch.object(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        return torch_flex.flex_attention(q, k, v, score_mod, block_mask, **options, return_aux=AuxRequest(lse=True))


def assert_flex(got, q, k, v, score_mod=None, block_mask=None, **options):
    """(o, lse) or (o, AuxOutput) of a flex_attention call, by the tolerance rule."""
    o, lse = eager(*(x.double() for x in (q, k, v)), score_mod, block_mask, **options)
    exact = o, lse.lse
    if q.dtype == torch.float32:
        o, lse = eager(q, k, v, score_mod, block_mask, **options)
        honest = o, lse.lse
    else:  # torch's own computes in float32 whatever it is given
        rows = [x.expand(len(q), -1, -1, -1).transpose(1, 2) for x in (q, k, v)]
        mask_mod = None if block_mask is None else block_mask.mask_mod
        o, lse = reference.baseline(*rows, mask=mask_mod, score=score_mod, scale=options.get("scale"))
        honest = o.transpose(1, 2), lse
    o, lse = got
    assert_state((o, lse.lse if isinstance(lse, flex.AuxOutput) else lse), exact, honest)


def check(q, k, v, score_mod=None, block_mask=None, **options):
    """flex_attention against torch's; gives its output."""
    got = flex.flex_attention(q, k, v, score_mod, block_mask, return_aux=AuxRequest(lse=True), **options)
    assert_flex(got, q, k, v, score_mod, block_mask, **options)
    return got[0]


def check_gradients(tensors, score_mod=None, mask=None, lse=True, there=None, **options):
    """dq, dk and dv of flex_attention, from the output and, with lse, from the LSE, against the oracle's in float64.

    there: the functions and the mask on a card, where the call runs then; these ones are the oracle's.
    """
    device = "cpu" if there is None else "cuda"
    score_there, mask_there = there or (score_mod, mask)
    q, k, v = (x.transpose(1, 2) for x in tensors)
    mask_mod = None if mask is None else mask.mask_mod

    def ours(q, k, v):
        given = (x.transpose(1, 2).to(device) for x in (q, k, v))
        o, sums = flex.flex_attention(*given, score_there, mask_there, return_lse=True, enable_gqa=True, **options)
        return o.transpose(1, 2).cpu(), sums.cpu()

    def oracle(q, k, v, dtype=torch.float64):
        wide = (x.expand(len(q), -1, -1, -1) for x in (k, v))
        return reference.attention(q, *wide, mask=mask_mod, score=score_mod, dtype=dtype, **options)

    d_o, d_lse = randn(*q.shape, dtype=q.dtype, seed=7), randn(*tensors[0].shape[:3], seed=8) if lse else None
    got = gradients(ours, (q, k, v), d_o, d_lse)
    exact = gradients(oracle, (q, k, v), d_o, d_lse, dtype=torch.float64)
    honest = gradients(lambda *x: oracle(*x, dtype=q.dtype), (q, k, v), d_o, d_lse)
    assert [x.dtype for x in got] == [q.dtype] * 3
    sums = oracle(*(x.double() for x in (q, k, v)))[1]
    assert_gradients(got, exact, honest, gradient_floors(oracle, (q, k, v), d_o), sums)


def by_lists(mask: BlockMask) -> BlockMask:
    """The same with a mask_mod that says what the lists and the mask_mod say together, for `eager`."""
    block_q, block_k = mask.BLOCK_SIZE
    partial, full = (
        lists(mask, mask.kv_num_blocks, mask.kv_indices),
        lists(mask, mask.full_kv_num_blocks, mask.full_kv_indices),
    )

    def both(b, h, q, k):
        at = b % len(partial), h % partial.shape[1], q // block_q, k // block_k
        return full[at] | (partial[at] & mask.mask_mod(b, h, q, k))

    sizes = {"BLOCK_SIZE": mask.BLOCK_SIZE, "seq_lengths": mask.seq_lengths, "compute_q_blocks": False}
    return BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=both, **sizes)


def lists(mask: BlockMask, counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
    """The blocks of a list, entry by entry: bool (B, H, blocks of queries, blocks of keys)."""
    rows, columns = (-(-n // block) for n, block in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    shape = mask.kv_num_blocks.shape[:2]
    blocks = torch.zeros(*shape, rows, columns, dtype=torch.bool)
    if counts is None or indices is None:
        return blocks.to(mask.kv_indices.device)
    for b, h, row in torch.cartesian_prod(*(torch.arange(n) for n in (*shape, rows))).tolist():
        for column in indices[b, h, row, : counts[b, h, row]].tolist():
            if 0 <= column < columns:
                blocks[b, h, row, column] = True
    return blocks.to(indices.device)
