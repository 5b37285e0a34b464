"""V of another head dimension than Q and K, and wide ones, in the emulator: which kernels there are, and answers."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from forward_cases import BF16, MODES
from pair_cases import FP32, PairChance, PairKind, check_pair, tensors

from tilewise import arch, attention, compiler, plan_attention
from tilewise.gpu import prefill, tilings
from tilewise.gpu.abi import FP8
from tilewise.gpu.calls import GpuCall, check_served, shared_prefix
from tilewise.gpu.pattern import Pattern
from tilewise.gpu.widths import MAX_HEAD_DIM, NARROW, WIDE, widths_of
from tilewise.scores import Scores

LENGTHS = (1, 63, 65, 127, 129)
CAUSAL = Scores((None, 0))


# ---- which kernel ----------------------------------------------------------------------------------------------------
def test_widths():
    """Padded to the next; V beyond 256 in slices of whole panels that hold all of its columns."""
    assert [widths_of(d).key for d in (1, 64, 65, 192, 256)] == ["64", "64", "96", "192", "256"]
    assert (widths_of(192, 128).key, widths_of(40, 33).key, widths_of(512).key) == ("192x128", "64", "512")
    for d, dv in product((1, 64, 97, 256, 257, 512, 513, 576), (1, 40, 256, 257, 384, 385, 512, 513, 576)):
        found = widths_of(d, dv)
        assert found.width in (*NARROW, *WIDE)
        assert found.width >= d
        assert found.value_width in NARROW
        assert found.slices * found.value_width >= dv > (found.slices - 1) * found.value_width
        assert found.slices == 1 or found.value_width % 64 == 0
        assert found.slices == 1 or dv > 256


@pytest.mark.parametrize("card", ["sm_80", "sm_86", "sm_90a", "sm_120"])
def test_every_pair_fits(card):
    """Within the shared memory of a thread block, with every kind of load."""
    loads = ({}, {"page_size": 16}, {"tma": False}, {"pattern": Pattern(64, 64, lengths=True)})
    for d, dv, dtype, load in product(
        (64, 128, 192, 256, 384, 512, 576), (64, 128, 256, 512, 576), (BF16, FP32), loads
    ):
        tiling, spec = tilings.spec_for(card, dtype, d, 4096, CAUSAL, value_dim=dv, **load)
        limits = arch.limits_of(card)
        assert spec.shared_bytes <= limits.shared_block, (d, dv, dtype, load)
        assert tiling.blocks_each * (spec.shared_bytes + 1024) <= limits.shared_sm, (d, dv, dtype, load)


@pytest.mark.parametrize(
    ("card", "dims", "load"),
    [
        ("sm_90a", (192, 128), {}),
        ("sm_90a", (512, 512), {"page_size": 64}),
    ],
    ids=str,
)
def test_nothing_spills(card, dims, load):
    _, spec = tilings.spec_for(card, BF16, dims[0], 1 << 20, CAUSAL, value_dim=dims[1], **load)
    (row,) = compiler.resource_table([spec], [card])
    assert (row.error, row.spill_stores, row.spill_loads, row.serialised) == (None, 0, 0, ())


def test_pairs_that_models_have_are_listed():
    listed = set(tilings.specs(every=True))
    for dims, load in product(tilings.EVERY_PAIR, ({}, {"page_size": 16})):
        assert tilings.spec_for("sm_90a", BF16, dims[0], 1 << 20, CAUSAL, value_dim=dims[1], **load)[1] in listed


def test_a_pair_is_made_as_128_is():
    """Q in registers, two of its stages, turns at the tensor cores, the lazy softmax."""
    pair, equal = (tilings.choose("sm_90a", BF16, d, 8192, CAUSAL, value_dim=128) for d in (192, 128))
    for field in ("tile_q", "stages_q", "ping_pong", "q_registers", "lazy"):
        assert getattr(pair, field) == getattr(equal, field), field


def test_equal_head_dims_are_no_pair():
    for d in (40, 64, 128, 192, 256, 512):
        assert tilings.spec_for("sm_90a", BF16, d, 4096, CAUSAL, value_dim=d) == tilings.spec_for(
            "sm_90a", BF16, d, 4096, CAUSAL
        )


def test_a_plan_says_what_is_made():
    q, k = torch.empty(1, 300, 2, 192, dtype=BF16), torch.empty(1, 300, 2, 192, dtype=BF16)
    plan = plan_attention(q, k, causal=True, value_dim=128, backend="emulator")
    assert "D 192 and 128" in plan.launch.kernel
    assert plan.flops == 2 * (192 + 128) * 2 * (300 * 301 // 2)
    q = torch.empty(1, 300, 2, 512, dtype=BF16)
    plan = prefill.plan_of(q, q, CAUSAL)
    assert "2 slices" in plan.launch.kernel
    assert plan.launch.blocks == min(3 * 2 * 2, prefill.multiprocessors(q.device))


def test_what_no_kernel_serves():
    q = torch.empty(1, 8, 1, MAX_HEAD_DIM + 1, dtype=BF16)
    with pytest.raises(NotImplementedError, match='head_dim up to 576 in bfloat16, got 577; use backend="cpu"'):
        check_served(q, "emulator")
    with pytest.raises(NotImplementedError, match="head_dim of v up to 576 in bfloat16, got 600"):
        check_served(q[..., :64], "emulator", torch.empty(1, 8, 1, 600))
    with pytest.raises(NotImplementedError, match=r"up to 256 in float8_e4m3fn, got 512; use .* or bfloat16"):
        check_served(q[..., :64].to(FP8), "emulator", torch.empty(1, 8, 1, 512))
    q = q[..., :64]
    with pytest.raises(NotImplementedError, match="head_dim of v up to 576"):
        GpuCall(Scores(), False)(q, q, torch.empty(1, 8, 1, 600, dtype=BF16), None, None, None)


# ---- answers ---------------------------------------------------------------------------------------------------------
def test_lengths():
    """The pair of DeepSeek's prefill, whole blocks and rests, rows that see nothing, in any order of threads."""
    for number, (nq, nk) in enumerate(product(LENGTHS, (65, 200))):
        q, k, v = tensors((1, nq), (1, nk), (2, 2), (192, 128), seed=number)
        (o, lse), _ = check_pair(q, k, v, causal=number % 2 == 0, mode=MODES[number % 4])
        blind = max(0, nq - nk) if number % 2 == 0 else 0
        assert not o[:, :blind].any()
        assert lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("dims", [(64, 128), (33, 300)], ids=str)
def test_pairs(dims):
    """V wider, rows off 16 bytes, slices under a narrow Q; NaN stands around the tensors."""
    for number, (nq, nk) in enumerate(((129, 65), (1, 200), (260, 300))):  # the last: several tiles per thread block
        heads = (4, 4) if number == 2 else (2, 2)
        q, k, v = tensors((2, nq), (2, nk), heads, dims, seed=number, layouts=("dense", "wide", "wide"))
        check_pair(q, k, v, window=(70, 3) if number == 1 else None, causal=number == 2, mode=MODES[number])


@pytest.mark.parametrize("dims", [(512, 512), (576, 320)], ids=str)
def test_wide(dims):
    """K in parts, V in slices, the last of them cut where V ends within it; one key's weight, and scores of ±1e4."""
    for number, (nq, nk, size) in enumerate(((129, 65, 1.0), (3, 200, 1.0), (65, 70, 400.0))):
        q, k, v = tensors((1, nq), (1, nk), (1, 1), dims, seed=number, size=size, layouts=("wide", "wide", "heads"))
        (_, lse), launches = check_pair(q, k, v, causal=number == 1, mode=MODES[number])
        assert number < 2 or lse.abs().max() > 1e3
    check_pair(q, k, k[..., : dims[1]], mode=MODES[3])  # one row for both, as latent attention has it
    constants = dict(launches[-1].spec.constants)
    assert constants["kParts"] == {512: 4, 576: 9}[constants["kHeadDim"]]


@pytest.mark.parametrize(
    "kind",
    [
        PairKind((192, 128), heads=(4, 1), page_size=16),
        PairKind((192, 128), softcap=20.0, alibi=True),
        PairKind((192, 128), blocks=64),
        PairKind((512, 512), heads=(4, 1), page_size=16),
    ],
    ids=str,
)
def test_features(kind):
    for seed in range(2):
        PairChance(seed, kind, longest=200).check()


@pytest.mark.parametrize(
    ("card", "dims", "dtype"),
    [("sm_80", (192, 128), BF16), ("sm_86", (512, 320), BF16), ("sm_86", (65, 300), FP32)],
    ids=str,
)
def test_cards_without_wgmma(card, dims, dtype):
    with arch.as_card(card):
        for seed in range(2):
            PairChance(seed, PairKind(dims, dtype), longest=150).check()


def test_levels_of_prefixes():
    """The states of levels are merged in O's shape, which is not Q's."""
    q, k, v = tensors((4, 5), (2, 70), (2, 2), (192, 128))
    _, own_k, own_v = tensors((4, 5), (4, 9), (2, 2), (192, 128), seed=1)
    o, _ = shared_prefix(q, [(k, v), (own_k, own_v)], [None, None], Scores(scale=192**-0.5))
    both = [torch.cat([x.repeat_interleave(2, 0), own], 1) for x, own in ((k, own_k), (v, own_v))]
    (whole, _), _ = check_pair(q, *both)
    torch.testing.assert_close(o, whole, atol=2e-2, rtol=2e-2)


def test_the_public_call():
    q, k, v = tensors((1, 70), (1, 90), (2, 2), (192, 128))
    (wanted, _), _ = check_pair(q, k, v, causal=True)
    assert torch.equal(attention(q, k, v, causal=True, backend="emulator"), wanted)


def test_fp8():
    q, k, v = (x.to(FP8) for x in tensors((1, 130), (1, 150), (2, 2), (192, 128)))
    o = GpuCall(Scores(scale=192**-0.5), False)(q, k, v, None, None, None)
    wide = [x.float() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", wide[0], wide[1]) * 192**-0.5
    exact = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), wide[2])
    assert o.shape == (1, 130, 2, 128)
    assert (o.float() - exact).abs().max() < 0.06
