"""Gradients of tilewise.compat.flex_attention, against the oracle's in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from flex_cases import MAKERS, check_gradients, inputs
from variant_cases import variants

import tilewise.compat.flex_attention as flex
from tilewise import attention
from tilewise.compat.flex_attention import create_block_mask, flex_attention

NAMES = tuple(variants(1, 1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_variants(name):
    """Masks that Tilewise makes and masks that torch makes, in turn."""
    lengths, maker = (((130, 130), "tilewise"), ((100, 170), "torch"))[NAMES.index(name) % 2]
    variant = variants(4, *lengths, batch=2)[name]
    mask = None if variant.mask is None else MAKERS[maker](variant.mask, 2, 4, *lengths, device="cpu", BLOCK_SIZE=32)
    check_gradients(inputs(2, lengths, (4, 2)), variant.score, mask)


@pytest.mark.parametrize("lse", [False, True])
def test_half_precision_and_keys_for_all_sequences(lse):
    """The keys of one sequence get the gradients of all that read them."""
    mask = create_block_mask(lambda b, h, q, k: (q + b) % 3 >= k % 4, 3, None, 100, 140, device="cpu")
    q, _, _ = inputs(3, (100, 140), (2, 2), dtype=torch.bfloat16)
    _, k, v = inputs(1, (100, 140), (2, 2), dtype=torch.bfloat16)
    check_gradients([q, k, v], None, mask, lse=lse)


def test_lists_say_what_is_seen_in_the_backward_pass_too():
    """Blocks that no list names have no gradients, whatever mask_mod would say of them."""
    mask = create_block_mask(flex.noop_mask, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks):
        counts.clamp_(max=1)  # the first block of keys
    q, k, v = (x.requires_grad_() for x in inputs(1, (128, 128), (2, 2)))
    flex_attention(q, k, v, None, mask).sum().backward()
    assert not k.grad[:, :, 32:].any()
    assert not v.grad[:, :, 32:].any()
    assert v.grad[:, :, :32].all()


def test_values_and_layout_are_those_without_gradients():
    score = lambda s, b, h, q, k: s - 0.1 * (q - k)  # noqa: E731
    q, k, v = inputs(2, (33, 40), (4, 2))
    narrow = v[..., :20]
    for given in ((q, k, v), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), (q, k, narrow)):
        plain = flex_attention(*given, score, enable_gqa=True)
        leaf = given[0].detach().requires_grad_()
        recorded = flex_attention(leaf, *given[1:], score, enable_gqa=True)
        assert torch.equal(recorded, plain)
        assert recorded.stride() == plain.stride()
        recorded.sum().backward()
        assert leaf.grad.shape == leaf.shape


def test_a_mask_with_the_order_of_dq_asks_for_the_same_bits(monkeypatch):
    asked = []
    monkeypatch.setattr(flex, "attention", lambda *x, **y: asked.append(y["deterministic"]) or attention(*x, **y))
    for maker, options in ((create_block_mask, {}), (torch_flex.create_block_mask, {"compute_dq_write_order": True})):
        mask = maker(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", **options)
        flex_attention(*inputs(1, (64, 64), (2, 2)), None, mask)
    assert asked == [False, True]


def test_training_in_compiled_code():
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in inputs(1, (33, 40), (2, 2)))
    score = lambda s, b, h, q, k: torch.tanh(s)  # noqa: E731
    want = torch.autograd.grad(flex_attention(q, k, v, score).square().sum(), (q, k, v))
    fast = torch.compile(lambda *x: flex_attention(*x, score).square().sum(), backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(fast(q, k, v), (q, k, v)), want))
