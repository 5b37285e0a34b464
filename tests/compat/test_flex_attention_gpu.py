"""tilewise.compat.flex_attention on a card: torch's masks and ours, without waiting, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from flex_cases import MAKERS, assert_flex, by_lists, check_gradients, inputs
from variant_cases import variants

from tilewise.compat.flex_attention import BlockMask, create_block_mask, flex_attention

pytestmark = pytest.mark.gpu
CUDA = "cuda"


def on_card(lengths, heads=(4, 2), head_dim=128):
    return [x.to(CUDA) for x in inputs(2, lengths, heads, head_dim, dtype=torch.bfloat16)]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("lengths", [(512, 512), (300, 1100)])
@pytest.mark.parametrize("name", tuple(variants(1, 1, 1)))
def test_variants(name, lengths, maker):
    variant = variants(4, *lengths, batch=2, device=CUDA)[name]
    mask = None if variant.mask is None else MAKERS[maker](variant.mask, 2, 4, *lengths, device=CUDA)
    q, k, v = on_card(lengths)
    got = flex_attention(q, k, v, variant.score, mask, enable_gqa=True, return_lse=True)
    assert_flex(got, q, k, v, variant.score, mask, enable_gqa=True)


@pytest.mark.parametrize("lengths", [(512, 512), (300, 1100)])
@pytest.mark.parametrize("name", tuple(variants(1, 1, 1)))
def test_gradients(name, lengths):
    here, there = (variants(4, *lengths, batch=2, device=device)[name] for device in ("cpu", CUDA))
    masks = [
        None if x.mask is None else create_block_mask(x.mask, 2, 4, *lengths, device=device)
        for x, device in ((here, "cpu"), (there, CUDA))
    ]
    given = inputs(2, lengths, (4, 2), 64, dtype=torch.bfloat16)
    check_gradients(given, here.score, masks[0], there=(there.score, masks[1]))


def test_keys_of_one_sequence_for_all():
    q, k, v = on_card((200, 300))
    mask = torch_flex.create_block_mask(lambda b, h, q, k: q + 90 * b >= k, 2, None, 200, 300, device=CUDA)
    got = flex_attention(q, k[:1], v[:1], None, mask, enable_gqa=True, return_lse=True)
    assert_flex(got, q, k[:1], v[:1], None, mask, enable_gqa=True)


def listed(counts, full_counts, block=(256, 64)):
    """Blocks by lists on the card, which are not in order."""
    indices = torch.tensor([7, 2, 5, 0, 1, 3, 4, 6], dtype=torch.int32, device=CUDA).expand(1, 1, 2, 8).contiguous()
    counts, full_counts = (torch.tensor([[x]], dtype=torch.int32, device=CUDA) for x in (counts, full_counts))
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, indices.flip(-1).contiguous(), block, lambda b, h, q, k: q >= k, (512, 512)
    )


def test_without_waiting():
    """Nothing is read from lists that are new, nor from those that are known."""
    q, k, v = on_card((512, 512))
    flex_attention(q, k, v, None, listed([2, 1], [1, 3]), enable_gqa=True)  # everything is compiled
    mask = listed([3, 4], [2, 1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = [flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got in made:
        assert_flex(got, q, k, v, None, by_lists(mask), enable_gqa=True)


def test_a_graph_follows_its_lists():
    q, k, v = on_card((512, 512))
    mask = listed([3, 4], [2, 1])
    flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
    for counts in ([3, 4], [0, 2], [4, 0]):
        mask.kv_num_blocks.copy_(torch.tensor(counts))
        graph.replay()
        assert_flex(got, q, k, v, None, by_lists(mask), enable_gqa=True)
