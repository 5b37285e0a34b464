"""tilewise.compat.flex_attention on the CPU and in the emulator, against torch's own in float64."""

from __future__ import annotations

import functools
import math

import flex_cases
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from flex_cases import MAKERS, assert_flex, by_lists, check, eager, inputs
from oracle import randn
from variant_cases import variants

import tilewise.compat.flex_attention as flex
from tilewise import BlockSchedule, attention
from tilewise.compat.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

NAMES = tuple(variants(1, 1, 1))
LENGTHS = [(256, 256), (300, 300), (100, 330), (257, 65)]


def causal(b, h, q, k):
    return q >= k


def odd(b, h, q, k):
    """Of every sequence and head another one; no block is full, and some rows see nothing."""
    return (q * 7 + k * 3 + b + 2 * h) % 5 != 0


# ---- what torch gives -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_variants(name, lengths, maker):
    variant = variants(4, *lengths, batch=2)[name]
    mask = None if variant.mask is None else MAKERS[maker](variant.mask, 2, 4, *lengths, device="cpu")
    check(*inputs(2, lengths), variant.score, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["documents", "relative bias table", "2-D neighbourhood"])
def test_half_precision(name, dtype):
    variant = variants(4, 300, 300)[name]
    mask = None if variant.mask is None else create_block_mask(variant.mask, None, None, 300, 300, device="cpu")
    assert check(*inputs(2, (300, 300), dtype=dtype), variant.score, mask).dtype == dtype


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("block", [128, (64, 128), (128, 64), 16, (48, 80), 256, (512, 32), (384, 272), 4096])
def test_block_sizes(block, maker):
    """Up to 128 as they are, larger ones in pieces, and one block for all of whatever size."""
    mask = MAKERS[maker](
        lambda b, h, q, k: (q >= k) & (q - k < 150), None, None, 700, 900, device="cpu", BLOCK_SIZE=block
    )
    check(*inputs(1, (700, 900), (2, 2)), None, mask)


@pytest.mark.parametrize(("length", "block"), [(1, 1), (1, 100), (50, 50), (190, 200), (130, 131)])
def test_one_block_may_have_any_size(length, block):
    for maker in MAKERS.values():
        mask = maker(lambda b, h, q, k: k % 3 != q % 3, None, None, length, 140, device="cpu", BLOCK_SIZE=(block, 16))
        check(*inputs(1, (length, 140)), None, mask)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("batch", "heads"), [(None, None), (3, None), (None, 4), (3, 4)])
def test_a_mask_for_one_or_for_each_sequence_and_head(batch, heads, maker):
    """A mask_mod is asked about the sequence and head that it is, even if the lists are of one for all."""
    mask = MAKERS[maker](odd, batch, heads, 200, 300, device="cpu")
    check(*inputs(3, (200, 300), (4, 2)), lambda s, b, h, q, k: s + b - h * 0.5, mask, enable_gqa=True)


@pytest.mark.parametrize("maker", MAKERS)
def test_lists_of_one_sequence_serve_all(maker):
    """Blocks that the first sequence and head leave out are left out for all, and full ones are not masked."""
    narrow = lambda b, h, q, k: (q - k).abs() <= 20 + 150 * (b + h)  # noqa: E731
    mask = MAKERS[maker](narrow, None, None, 640, 640, device="cpu", BLOCK_SIZE=64)
    q, k, v = inputs(2, (640, 640), (2, 2))
    got = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    assert_flex(got, q, k, v, None, by_lists(mask))
    with pytest.raises(AssertionError):
        assert_flex(got, q, k, v, None, mask)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_grouped_heads(heads):
    """h is the query head."""
    scale = torch.tensor([0.5, 1.0, 2.0, -1.0, 0.1, 3.0])
    mask = create_block_mask(lambda b, h, q, k: q - k < 30 * (h + 1), None, heads[0], 150, 260, device="cpu")
    given = inputs(2, (150, 260), heads)
    check(*given, lambda s, b, h, q, k: s * scale[h], mask, enable_gqa=True)
    if heads[0] != heads[1]:
        with pytest.raises(ValueError, match="enable_gqa=True"):
            flex_attention(*given, None, mask)


def test_keys_of_one_sequence_for_all():
    q, _, _ = inputs(3, (100, 200), (2, 2))
    _, k, v = inputs(1, (100, 200), (2, 2), seed=1)
    mask = create_block_mask(odd, 3, None, 100, 200, device="cpu")
    check(q, k, v, None, mask)
    for wrong in (None, create_block_mask(odd, 1, None, 100, 200, device="cpu")):
        with pytest.raises(ValueError, match="key must have query's batch size 3"):
            flex_attention(q, k, v, None, wrong)
    with pytest.raises(ValueError, match="key must have query's batch size 3"):
        flex_attention(q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1), None, mask)


@pytest.mark.parametrize("scale", [None, 0.3, -1.0])
def test_the_score_is_scaled_before_score_mod(scale):
    check(*inputs(1, (70, 90), size=3.0), lambda s, b, h, q, k: torch.tanh(s) * 4, scale=scale)


@pytest.mark.parametrize("value_dim", [16, 48])
def test_values_of_another_head_dim(value_dim):
    q, k, _ = inputs(2, (100, 130), (4, 2))
    v = randn(2, 2, 130, value_dim)
    got = check(q, k, v, None, create_block_mask(causal, None, None, 100, 130, device="cpu"), enable_gqa=True)
    assert got.shape == (2, 4, 100, value_dim)


def test_rows_that_see_nothing_are_zero_and_minus_infinity():
    q, k, v = inputs(2, (200, 200), (2, 2))
    mask = create_block_mask(lambda b, h, q, k: (q % 3 != 1) & (q < 128), None, None, 200, 200, device="cpu")
    o, lse = flex_attention(q, k, v, None, mask, return_lse=True)
    hidden = (torch.arange(200) % 3 == 1) | (torch.arange(200) >= 128)
    assert (o[:, :, hidden] == 0).all()
    assert (lse[:, :, hidden] == -math.inf).all()
    assert_flex((o, lse), q, k, v, None, mask)


def test_what_is_returned():
    q, k, v = inputs(1, (40, 50), (2, 2))
    o = flex_attention(q, k, v)
    o1, lse = flex_attention(q, k, v, return_lse=True)
    o2, aux = flex_attention(q, k, v, return_aux=torch_flex.AuxRequest(lse=True))
    o3, none = flex_attention(q, k, v, return_aux=AuxRequest())
    assert all(torch.equal(o, x) for x in (o1, o2, o3))
    assert torch.equal(lse, aux.lse)
    assert lse.shape == (1, 2, 40)
    assert lse.dtype == torch.float32
    assert aux.max_scores is None
    assert none == flex.AuxOutput(None, None)
    torch.testing.assert_close(lse, (q @ k.mT * 32**-0.5).logsumexp(-1))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded"])
def test_the_output_is_laid_out_as_the_query(layout, monkeypatch):
    """And what is given goes to the kernel without a copy where its last stride is 1."""
    q, k, v = inputs(2, (60, 60), (4, 4))
    if layout == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "strided":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    elif layout == "expanded":
        q, k, v = (x[:1].expand(2, -1, -1, -1) for x in (q, k, v))
    taken = []
    monkeypatch.setattr(
        flex, "attention", lambda *qkv, **o: taken.extend(x.data_ptr() for x in qkv) or attention(*qkv, **o)
    )
    got = check(q, k, v, None, create_block_mask(causal, None, None, 60, 60, device="cpu"))
    assert layout == "strided" or taken == [x.data_ptr() for x in (q, k, v)]
    assert layout in ("strided", "expanded") or got.stride() == q.stride()


def test_autocast():
    q, k, v = inputs(1, (60, 60), (2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        got = flex_attention(q, k, v.bfloat16())
    assert torch.equal(got, flex_attention(*(x.bfloat16() for x in (q, k, v))))


@pytest.mark.parametrize("call", ["create_block_mask", "flex_attention"])
def test_compiled(call):
    made = torch.compile(getattr(flex, call), backend="eager")
    create, attend = (made if call == name else getattr(flex, name) for name in ("create_block_mask", "flex_attention"))
    q, k, v = inputs(1, (200, 200), (2, 2))
    mask = create(causal, None, None, 200, 200, device="cpu")
    score_mod = lambda s, b, h, q, k: s + h  # noqa: E731
    assert_flex(attend(q, k, v, score_mod, mask, return_lse=True), q, k, v, score_mod, mask)


# ---- in the emulator ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["documents", "relative bias table"])
def test_variants_in_the_emulator(name, monkeypatch):
    monkeypatch.setattr(flex, "attention", functools.partial(attention, backend="emulator"))
    variant = variants(2, 200, 200)[name]
    mask = None
    if variant.mask is not None:
        mask = torch_flex.create_block_mask(variant.mask, None, None, 200, 200, device="cpu", BLOCK_SIZE=(64, 128))
    check(*inputs(1, (200, 200), (2, 1), 64, dtype=torch.bfloat16), variant.score, mask, enable_gqa=True)


def test_lists_in_the_emulator(monkeypatch):
    """Blocks of 256 in pieces, one full against its mask_mod, one that mask_mod allows and no list has."""
    monkeypatch.setattr(flex, "attention", functools.partial(attention, backend="emulator"))
    counts, indices = torch.tensor([[[1, 0]]]), torch.tensor([[[[1, 0], [0, 0]]]])
    full = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 0], [0, 0]]]])
    mask = BlockMask.from_kv_blocks(
        counts.int(), indices.int(), *(x.int() for x in full), BLOCK_SIZE=256, mask_mod=odd, seq_lengths=(300, 330)
    )
    q, k, v = inputs(1, (300, 330), (2, 2), 64, dtype=torch.bfloat16)
    got = flex_attention(q, k, v, None, mask, return_lse=True)
    assert_flex(got, q, k, v, None, by_lists(mask))


def test_small_blocks_in_the_emulator(monkeypatch):
    """A tile has full and partial blocks side by side, and mask_mod hides of full ones what is seen nevertheless."""
    monkeypatch.setattr(flex, "attention", functools.partial(attention, backend="emulator"))
    lists = random_lists(torch.Generator().manual_seed(1), (200, 130), (16, 32), 1, 2)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(16, 32), mask_mod=odd, seq_lengths=(200, 130))
    q, k, v = inputs(1, (200, 130), (2, 1), 64, dtype=torch.bfloat16)
    got = flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
    assert_flex(got, q, k, v, None, by_lists(mask), enable_gqa=True)


# ---- lists ----------------------------------------------------------------------------------------------------------
def random_lists(random, lengths, sizes, batch, heads):
    """Any blocks as partial and full, no block in both; the rows' lists unsorted."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, sizes, strict=True))
    kinds = torch.randint(0, 3, (batch, heads, rows, columns), generator=random)
    made = []
    for kind in (1, 2):
        places = torch.rand(kinds.shape, generator=random) + (kinds != kind) * 2.0
        made += [(kinds == kind).sum(-1).int(), places.argsort(-1).int()]
    return made


@pytest.mark.parametrize("seed", range(24))
def test_random_lists(seed):
    """Only listed blocks are seen, full ones whole, the others by mask_mod."""
    random = torch.Generator().manual_seed(seed)
    pick = lambda *options: options[int(torch.randint(len(options), (), generator=random))]  # noqa: E731
    lengths, sizes = (pick(64, 200, 300), pick(100, 256, 301)), (pick(16, 64, 128, 256), pick(32, 96, 128, 144))
    batch, heads = pick(1, 2), pick((2, 2), (4, 2), (3, 1))
    lists = random_lists(random, lengths, sizes, pick(1, batch), pick(1, heads[0]))
    mask = BlockMask.from_kv_blocks(
        *(lists if pick(True, True, False) else lists[:2]),
        BLOCK_SIZE=sizes,
        mask_mod=pick(odd, causal, None),
        seq_lengths=lengths,
        compute_q_blocks=False,
    )
    q, k, v = inputs(batch, lengths, heads, 16, seed=seed)
    score_mod = pick(None, lambda s, b, h, q, k: s - h * (q - k).abs() * 0.01)
    got = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    assert_flex(got, q, k, v, score_mod, by_lists(mask), enable_gqa=True)


def test_entries_that_are_out_of_range_or_twice_there():
    counts = torch.tensor([[[4, 3]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 1, -1, 7], [2, 0, 2, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=64, mask_mod=odd, seq_lengths=(100, 180), compute_q_blocks=False
    )
    q, k, v = inputs(1, (100, 180), (2, 2))
    assert_flex(flex_attention(q, k, v, None, mask, return_lse=True), q, k, v, None, by_lists(mask))


def test_a_slice_along_the_queries():
    """As one token at a time is decoded: the rest of the mask for the block of queries that this one is in."""
    whole = torch_flex.create_block_mask(causal, None, None, 512, 512, device="cpu")
    q, k, v = inputs(1, (512, 512), (2, 2))
    part = whole[:, :, 2]
    with pytest.raises(ValueError, match="block_mask must be for 1 queries and 512 keys"):
        flex_attention(q[:, :, 300:301], k, v, None, part)
    with pytest.raises(ValueError, match="must have 4 rows of blocks for 512 queries, got 1"):
        flex_attention(q, k, v, None, part)
    part.seq_lengths = (1, 512)
    with pytest.raises(TypeError, match="sliced BlockMask"):
        flex_attention(q[:, :, 300:301], k, v, None, part)
    part.mask_mod = lambda b, h, q, k: causal(b, h, q + 300, k)
    check(q[:, :, 300:301], k, v, None, part)


@pytest.mark.parametrize("maker", MAKERS)
def test_other_lengths_are_refused_and_cropped(maker):
    mask = MAKERS[maker](causal, None, None, 256, 384, device="cpu")
    for lengths in ((255, 384), (256, 383), (257, 384), (256, 385)):
        for call in (flex_attention, eager):
            with pytest.raises(ValueError, match="block_mask"):
                call(*inputs(1, lengths), None, mask)
    check(*inputs(1, (200, 300)), None, mask._adjust(200, 300))


def test_lists_are_read_once_and_again_when_they_change(monkeypatch):
    made = []
    from_blocks = BlockSchedule.from_blocks
    monkeypatch.setattr(BlockSchedule, "from_blocks", lambda *x, **y: made.append(x) or from_blocks(*x, **y))
    mask = torch_flex.create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    q, k, v = inputs(1, (256, 256), (2, 2))

    def called():
        before = len(made)
        got = flex_attention(q, k, v, None, mask, return_lse=True)
        assert_flex(got, q, k, v, None, by_lists(mask))
        return len(made) - before

    assert [called(), called()] == [1, 0]
    mask.full_kv_num_blocks[:, :, 3] = 1  # in place
    assert [called(), called()] == [1, 0]
    mask.kv_indices = mask.kv_indices.flip(-1)  # another tensor
    assert [called(), called()] == [1, 0]
    mask.mask_mod = odd
    assert [called(), called()] == [1, 0]
    mask.BLOCK_SIZE = (64, 32)
    assert [called(), called()] == [1, 0]


@pytest.mark.parametrize("options", [{}, {"BLOCK_SIZE": 256}, {"separate_full_blocks": False}], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_another_mask_mod_over_the_same_lists(maker, options):
    """What was known of the first one within a block does not count."""
    mask = MAKERS[maker](lambda b, h, q, k: (q >= k) & (k >= 128), None, None, 512, 512, device="cpu", **options)
    mask.mask_mod = odd
    q, k, v = inputs(1, (512, 512), (2, 2))
    assert_flex(flex_attention(q, k, v, None, mask, return_lse=True), q, k, v, None, by_lists(mask))


def test_in_inference_mode(monkeypatch):
    """What is made here is kept there too; of torch's lists nobody can tell whether they have changed."""
    made = []
    from_blocks = BlockSchedule.from_blocks
    with torch.inference_mode():
        ours, torchs = (
            maker(causal, None, None, 256, 256, device="cpu") for maker in (create_block_mask, MAKERS["torch"])
        )
        monkeypatch.setattr(BlockSchedule, "from_blocks", lambda *x, **y: made.append(x) or from_blocks(*x, **y))
        for mask, count in ((ours, 0), (torchs, 1)):
            check(*inputs(1, (256, 256), (2, 2)), None, mask)
            assert len(made) == count
        for mask in (ours, torchs):
            mask.kv_num_blocks[:, :, 1] = 0
            q, k, v = inputs(1, (256, 256), (2, 2))
            assert_flex(flex_attention(q, k, v, None, mask, return_lse=True), q, k, v, None, by_lists(mask))


def test_what_is_kept_goes_with_the_mask():
    from tilewise.compat import block_masks

    masks = [maker(causal, None, None, 64, 64, device="cpu") for maker in MAKERS.values()]
    for mask in masks:
        flex_attention(*inputs(1, (64, 64)), None, mask)
    assert all(mask in block_masks._kept for mask in masks)
    before = len(block_masks._kept)
    del mask, masks[:]
    assert len(block_masks._kept) == before - 2


# ---- what is refused ------------------------------------------------------------------------------------------------
def test_refusals():
    q, k, v = inputs(1, (64, 64), (2, 2))
    learned = torch.ones(64, requires_grad=True)
    not_served = {
        "FLASH": {"kernel_options": {"BACKEND": "FLASH"}},
        "OUTPUT_MAX": {"kernel_options": {"OUTPUT_MAX": True}},
        "max_scores": {"return_aux": AuxRequest(max_scores=True)},
        "captures a tensor that requires grad": {"score_mod": lambda s, b, h, q, k: s + learned[k]},
        "BLOCK_SIZE is served in multiples of 16": {
            "block_mask": torch_flex.create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=24)
        },
    }
    for match, options in not_served.items():
        with pytest.raises(NotImplementedError, match=match):
            flex_attention(q, k, v, **options)
    for x in ([q.double(), k.double(), v.double()], [q, k, v.half()], [y.to(torch.float8_e4m3fn) for y in (q, k, v)]):
        with pytest.raises(NotImplementedError, match="float32, float16 and bfloat16"):
            flex_attention(*x)
    with pytest.raises(NotImplementedError, match="3 dimensions"):
        flex_attention(q[0], k[0], v[0])
    with torch.no_grad():
        check(q, k, v, lambda s, b, h, q, k: s + learned[k])


def test_wrong_arguments():
    q, k, v = inputs(2, (64, 64), (4, 4))
    mask = torch_flex.create_block_mask(causal, None, None, 64, 64, device="cpu")
    cases = [
        (TypeError, "block_mask must be a BlockMask", {"block_mask": torch.ones(64, 64)}),
        (TypeError, "return_aux must be an AuxRequest", {"return_aux": True}),
        (ValueError, "both given", {"return_lse": True, "return_aux": AuxRequest(lse=True)}),
        (
            ValueError,
            "block_mask must be of 1 or 4 heads",
            {"block_mask": create_block_mask(causal, 1, 2, 64, 64, "cpu")},
        ),
        (
            ValueError,
            "block_mask must be of 1 or 2 seq",
            {"block_mask": create_block_mask(causal, 3, 1, 64, 64, "cpu")},
        ),
        (ValueError, "block_mask must be on cpu like query, got meta", {"block_mask": mask.to("meta")}),
        (TypeError, "score must take 5 arguments", {"score_mod": causal}),
        (TypeError, "write & ", {"score_mod": lambda s, b, h, q, k: s if q >= k and k > 3 else -s}),
    ]
    for error, match, options in cases:
        with pytest.raises(error, match=match):
            flex_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="key must have query's head_dim 32, got 16"):
        flex_attention(q, k[..., :16], v)
    with pytest.raises(ValueError, match="key must have query's 4 heads, got 2"):
        flex_attention(q, k[:, :2], v[:, :2])


def test_hints_are_accepted():
    given = inputs(1, (64, 64), (2, 2))
    options = {"BLOCK_M": 64, "fwd_num_warps": 4, "bwd_BLOCK_N1": 32, "PRESCALE_QK": True, "BACKEND": "AUTO"}
    assert torch.equal(flex_attention(*given, kernel_options=options), flex_attention(*given))


def test_names_are_torch_s():
    assert set(torch_flex.__all__) <= set(flex.__all__)
    assert flex_cases.BlockMask is torch_flex.BlockMask
