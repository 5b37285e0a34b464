"""What stands beside flash_attn: unpadding, padding, and rotary embedding."""

from __future__ import annotations

import pytest
import torch
from flash_attn_cases import COS, SIN, Q, leaves, lengths, tables, turned
from oracle import DTYPES, randn

from tilewise import reference
from tilewise.compat.bert_padding import index_first_axis, pad_input, unpad_input
from tilewise.compat.rotary import apply_rotary_emb


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(mask_dtype):
    x = randn(3, 5, 2, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]]).to(mask_dtype)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert torch.equal(packed, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 10, 12, 14]
    assert cu_seqlens.tolist() == [0, 3, 3, 6]
    assert cu_seqlens.dtype == torch.int32
    assert longest == 3
    assert used.tolist() == [3, 0, 3]
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), packed)
    padded = pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * mask.bool()[..., None, None])
    (leaf,) = leaves(x)
    pad_input(unpad_input(leaf, mask)[0], indices, 3, 5).sum().backward()
    assert torch.equal(leaf.grad, mask.bool()[..., None, None].expand_as(x).float())


def test_unpad_with_places_that_do_not_count():
    x = randn(2, 3, 1)
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 3, 4]
    assert cu_seqlens.tolist() == [0, 2, 4]
    assert longest == 2
    assert used.tolist() == [1, 2]
    assert torch.equal(packed, x.flatten(0, 1)[indices])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: unpad_input(torch.zeros(4), torch.ones(4)), ValueError, "hidden_states must be"),
        (lambda: unpad_input(torch.zeros(2, 4), torch.ones(2, 3)), ValueError, "attention_mask must have shape"),
        (lambda: unpad_input(torch.zeros(2, 4), torch.ones(2, 4)), ValueError, "attention_mask must be one of bool"),
        (lambda: pad_input(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), 2, 2), ValueError, "indices"),
        (lambda: index_first_axis(torch.zeros(3, 4), [1]), TypeError, "indices"),
        (lambda: apply_rotary_emb(Q[0], COS, SIN), ValueError, "x must have 4 dimensions"),
        (lambda: apply_rotary_emb(Q, COS, SIN[:3]), ValueError, "sin must have shape"),
        (lambda: apply_rotary_emb(Q, *tables(40, 18)), ValueError, "at most head_dim 16 channels"),
        (lambda: apply_rotary_emb(Q, COS, SIN, seqlen_offsets=33), ValueError, "a row for each position, 33 to 40"),
        (lambda: apply_rotary_emb(Q, COS, SIN, seqlen_offsets=lengths(1)), ValueError, "seqlen_offsets must have"),
        (lambda: apply_rotary_emb(Q, COS, SIN, interleaved=1), TypeError, "interleaved"),
    ],
)
def test_refusals_beside(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, [0, 9]])
def test_apply_rotary_emb(offsets, interleaved, dtype):
    x, (cos, sin) = randn(2, 7, 3, 40, dtype=dtype), tables(16, 24, dtype)
    starts = offsets if isinstance(offsets, list) else [offsets] * 2
    given = lengths(*offsets) if isinstance(offsets, list) else offsets
    positions = [start + torch.arange(7) for start in starts]
    exact = torch.stack([turned(x[b], positions[b], cos, sin, interleaved) for b in (0, 1)])
    got = apply_rotary_emb(x, cos, sin, interleaved=interleaved, seqlen_offsets=given)
    assert got.dtype == dtype
    assert reference.judge(got, exact, exact.to(dtype)).ok
    packed = apply_rotary_emb(
        x.flatten(0, 1), cos, sin, interleaved, False, given, cu_seqlens=lengths(0, 7, 14), max_seqlen=7
    )
    assert torch.equal(packed, got.flatten(0, 1))
    mine = x.clone()
    assert apply_rotary_emb(mine, cos, sin, interleaved, inplace=True, seqlen_offsets=given) is mine
    assert torch.equal(mine, got)


def test_rotary_of_ragged_sequences_and_its_gradient():
    x, (cos, sin) = randn(9, 2, 16), tables(8, 16)
    got = apply_rotary_emb(x, cos, sin, cu_seqlens=lengths(0, 4, 4, 9), max_seqlen=5)
    positions = torch.cat((torch.arange(4), torch.arange(5)))
    exact = turned(x, positions, cos, sin, False)
    assert reference.judge(got, exact, exact.float()).ok
    (leaf,) = leaves(x)
    apply_rotary_emb(leaf, cos, sin, cu_seqlens=lengths(0, 4, 4, 9), max_seqlen=5).backward(got)
    torch.testing.assert_close(leaf.grad, x)  # turning back is turning's gradient
