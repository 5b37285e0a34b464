"""create_block_mask and create_mask of tilewise.compat.flex_attention against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from flex_cases import MAKERS, check, eager, inputs
from variant_cases import variants

from tilewise.compat.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
LISTS += [name.replace("kv", "q") for name in LISTS]


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k < 200 + 300 * h)


def documents(b, h, q, k):
    return (q + 100 * b) // 384 == (k + 100 * b) // 384


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("block", [128, (64, 128), 256, (128, 512), (1024, 16)])
@pytest.mark.parametrize(("mask_mod", "batch", "heads"), [
    (causal, None, None), (causal, 2, 3), (window, None, 2), (documents, 3, None), (noop_mask, 2, 2),
])  # fmt: skip
def test_lists_are_torch_s(mask_mod, batch, heads, block, separate):
    """Masks that arithmetic on ranges tells exactly, and lengths that blocks divide: every entry of every list."""
    ours, torchs = (
        make(mask_mod, batch, heads, 1024, 2048, device="cpu", BLOCK_SIZE=block, separate_full_blocks=separate)
        for make in (create_block_mask, torch_flex.create_block_mask)
    )
    assert isinstance(ours, BlockMask)
    assert (ours.shape, ours.BLOCK_SIZE, ours.mask_mod) == (torchs.shape, torchs.BLOCK_SIZE, mask_mod)
    for name in LISTS:
        x, y = getattr(ours, name), getattr(torchs, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert torch.equal(x, y), name
            assert x.dtype == torch.int32, name
            assert x.is_contiguous(), name
    assert ours.sparsity() == torchs.sparsity()
    assert str(ours) == str(torchs)


@pytest.mark.parametrize("block", [64, (128, 256)])
@pytest.mark.parametrize("name", tuple(n for n, v in variants(1, 1, 1).items() if v.mask is not None))
def test_no_block_is_missing_and_none_is_full_that_is_not(name, block):
    mask_mod = variants(2, 600, 700, batch=2)[name].mask
    ours, torchs = (
        make(mask_mod, 2, 2, 600, 700, device="cpu", BLOCK_SIZE=block)
        for make in (create_block_mask, torch_flex.create_block_mask)
    )
    kept, needed = ours.to_dense().bool(), torchs.to_dense().bool()
    assert (kept | ~needed).all()
    seen = torch_flex.create_mask(mask_mod, 2, 2, 600, 700, "cpu")
    rows, columns = (torch.arange(n) // size for n, size in zip((600, 700), ours.BLOCK_SIZE, strict=True))
    full = BlockMask.from_kv_blocks(ours.full_kv_num_blocks, ours.full_kv_indices).to_dense().bool()
    assert (seen | ~full[:, :, rows][..., columns]).all()
    assert not (full & BlockMask.from_kv_blocks(ours.kv_num_blocks, ours.kv_indices).to_dense().bool()).any()


def test_a_mask_of_queries_and_keys_is_never_formed():
    """Of 2^17 tokens that mask would have 2^34 entries."""
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 4096), None, None, 1 << 17, 1 << 17, "cpu", 4096)
    assert mask.kv_num_blocks.tolist() == [[[1] + [2] * 31]]
    assert mask.full_kv_num_blocks.sum() == 0


def test_torch_takes_what_is_made_here():
    mask = create_block_mask(window, 2, 2, 300, 400, device="cpu", _compile=True)
    q, k, v = inputs(2, (300, 400), (2, 2))
    torch.testing.assert_close(flex_attention(q, k, v, None, mask), eager(q, k, v, None, mask)[0])
    assert mask.to("cpu").kv_indices.shape == (2, 2, 3, 4)
    assert mask[1].shape == (1, 2, 300, 400)
    assert mask.numel() == 2 * 2 * 300 * 400
    assert mask.as_tuple()[:2] == (300, 400)


@pytest.mark.parametrize("maker", MAKERS)
def test_masks_of_masks(maker):
    prefix = torch.tensor([40, 90])
    mods = [causal, lambda b, h, q, k: k < prefix[b], lambda b, h, q, k: (q // 64) == (k // 64)]
    for mask_mod in (
        and_masks(*mods),
        or_masks(*mods),
        and_masks(mods[2], or_masks(*mods[:2])),
        and_masks(),
        or_masks(),
    ):
        check(*inputs(2, (200, 200), (2, 2)), None, MAKERS[maker](mask_mod, 2, None, 200, 200, device="cpu"))


def test_create_mask():
    bias = torch.linspace(-1, 1, 7)
    functions = [
        causal,
        window,
        documents,
        noop_mask,
        lambda s, b, h, q, k: torch.where((q + k) % (h + 2) == 0, s, -math.inf),
        lambda s, b, h, q, k: s + bias[k % 7] * b,
    ]
    for function in functions:
        for batch, heads in ((None, None), (2, 3)):
            ours, torchs = (
                make(function, batch, heads, 60, 70, "cpu") for make in (create_mask, torch_flex.create_mask)
            )
            assert torch.equal(ours, torchs)
            assert ours.is_contiguous()


def test_what_is_captured_may_change():
    """A mask_mod is looked at again at each call, as torch does; the lists stay what they were."""
    width = torch.tensor([30])
    mask = create_block_mask(lambda b, h, q, k: (q - k).abs() < width[b], None, None, 256, 256, device="cpu")
    given = inputs(1, (256, 256), (2, 2))
    before = check(*given, None, mask)
    width.fill_(10)
    assert not torch.equal(before, check(*given, None, mask))


def test_refusals():
    with pytest.raises(NotImplementedError, match="BLOCK_SIZE is served in multiples of 16, got 100"):
        create_block_mask(causal, None, None, 256, 256, "cpu", 100)
    with pytest.raises(NotImplementedError, match="compute_dq_write_order"):
        create_block_mask(causal, None, None, 256, 256, "cpu", compute_dq_write_order=True)
    with pytest.raises(ValueError, match="Q_LEN must be at least 1"):
        create_block_mask(causal, None, None, 0, 256, "cpu")
    with pytest.raises(ValueError, match="B must be at least 1"):
        create_block_mask(causal, 0, None, 256, 256, "cpu")
    with pytest.raises(TypeError, match="mask must take 4 arguments"):
        create_block_mask(lambda s, b, h, q, k: s, None, None, 256, 256, "cpu")
    with pytest.raises(TypeError, match="must return a bool"):
        create_block_mask(lambda b, h, q, k: q - k, None, None, 256, 256, "cpu")
