"""The forward by mma.sync, kernels/prefill/forward_mma.cu, in the emulator: as cards without wgmma run it, and float32.

TILEWISE_CARD=sm_80 runs all suites of the forward so, here and on a card; here stands what is its own, and a little of
everything.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forward_cases import (
    BF16,
    FP16,
    MODES,
    NAN,
    Chance,
    Kind,
    check,
    check_varlen,
    emulated,
    normal,
    packed,
    paged,
    problem,
    spec_of,
)

from tilewise import BlockSchedule, arch, attention, attention_varlen, compiler, emulator, shared_prefix_attention
from tilewise.compiler.spec import KERNELS_ROOT
from tilewise.gpu import mma_tilings, tilings
from tilewise.gpu.abi import FP8
from tilewise.gpu.pattern import Pattern
from tilewise.scores import Scores

FP32 = torch.float32
CARDS = ("sm_80", "sm_86", "sm_89")


@pytest.fixture(params=CARDS)
def card(request):
    with arch.as_card(request.param):
        yield request.param


@pytest.fixture
def sm_80():
    with arch.as_card("sm_80"):
        yield


# ---- which kernel ----------------------------------------------------------------------------------------------------
def test_cards_without_wgmma_get_it_and_hopper_for_float32(card):
    for dtype in (BF16, FP16, FP32):
        assert spec_of(*problem(1, 20, 20, 1, 1, 64, dtype=dtype)).name == "forward_mma"
    with arch.as_card("sm_90a"):
        assert spec_of(*problem(1, 20, 20, 1, 1, 64)).name == "forward"
        assert spec_of(*problem(1, 20, 20, 1, 1, 64, dtype=FP32)).name == "forward_mma"


@pytest.mark.parametrize("name", arch.ARCHS)
def test_tilings_fit_the_card(name):
    """Every dtype, head dimension and feature has a tiling within the card's shared memory, blocks_each times."""
    limits = arch.LIMITS[name]
    patterns = [
        Pattern(),
        Pattern(128, 128),
        Pattern(64, 64, lengths=True),
        Pattern(16, 16),
        Pattern(mask=True, text="x"),
    ]
    for dtype in (BF16, FP8, FP32):
        for head_dim in (1, 40, 64, 96, 128, 192, 256):
            for pattern in patterns:
                for page_size in (0, 1, 16, 128):
                    if pattern.listed and page_size % 16:
                        continue
                    given = {"pattern": pattern, "page_size": page_size}
                    tiling = mma_tilings.choose(name, dtype, head_dim, Scores(), **given)
                    spec = mma_tilings.forward_mma_spec(dtype, head_dim, tiling, Scores(), **given)
                    assert spec.shared_bytes <= limits.shared_block
                    assert tiling.blocks_each * (spec.shared_bytes + 1024) <= limits.shared_sm
                    assert tiling.blocks_each >= 1


def test_two_blocks_share_a_multiprocessor_where_they_can():
    each = {d: mma_tilings.choose("sm_80", BF16, d, Scores()).blocks_each for d in (64, 96, 128, 192, 256)}
    assert each == {64: 2, 96: 2, 128: 2, 192: 2, 256: 1}
    assert mma_tilings.choose("sm_86", BF16, 128, Scores()).tile_kv == 32  # 64 keys would leave room for one block
    assert mma_tilings.choose("sm_86", BF16, 128, Scores()).blocks_each == 2


def test_fp8_is_multiplied_where_the_card_does():
    operand = {name: mma_tilings.operand_of(name, FP8) for name in arch.ARCHS}
    assert {name for name, dtype in operand.items() if dtype == FP8} == {"sm_89", "sm_120", "sm_121"}
    assert all(dtype in (FP8, FP16) for dtype in operand.values())


SPILLING = [
    ("sm_80", BF16, 128, {}),
    ("sm_80", BF16, 128, {"page_size": 16}),
    ("sm_86", BF16, 128, {}),
    ("sm_89", FP8, 128, {}),
    ("sm_120", FP32, 64, {}),
    ("sm_89", FP32, 192, {}),
    ("sm_90a", FP32, 128, {}),
    ("sm_100", BF16, 256, {}),
]


@pytest.mark.parametrize(("name", "dtype", "head_dim", "loads"), SPILLING)
def test_nothing_spills(name, dtype, head_dim, loads):
    """A sample; `tilewise kernels --all` has every kernel of every card."""
    _, spec = tilings.spec_for(name, dtype, head_dim, 1 << 20, Scores((None, 0)), **loads)
    assert spec.name == "forward_mma"
    (row,) = compiler.resource_table([spec], [name])
    assert (row.error, row.spill_stores, row.spill_loads) == (None, 0, 0)
    assert row.shared_bytes <= row.shared_limit


# ---- answers ---------------------------------------------------------------------------------------------------------
KINDS = (
    Kind(64),
    Kind(128, heads=(4, 2)),
    Kind(128, FP16, page_size=16),
    Kind(64, FP32),
    Kind(33, softcap=20.0, alibi=True),
)


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(card, seed):
    Chance(1000 + seed, KINDS).check()


@pytest.mark.parametrize("head_dim", [1, 7, 40, 96, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_head_dims(sm_80, head_dim, dtype):
    check(*problem(1, 65, 129, 2, 1, head_dim, dtype=dtype), causal=True, mode=MODES[head_dim % 4])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 127), (63, 65), (127, 129), (129, 63)])
def test_lengths_at_the_edges_of_tiles(sm_80, nq, nk, dtype):
    for causal in (False, True):
        check(*problem(1, nq, nk, 1, 1, 128, dtype=dtype), causal=causal, mode=MODES[causal])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_very_large_and_very_small_scores(sm_80, dtype):
    """Logits of ±1e4, and jumps that make exponentials overflow: S is then computed again."""
    q, k, v = problem(1, 70, 400, 1, 1, 64, dtype=dtype)
    check(q * 1e3, k * 1e1, v)
    for position in (0, 100, 399):
        jump = k.clone()
        jump[:, position] *= 300.0
        check(q, jump, v, mode=MODES[position % 4])
        check(q, jump, v, exact=True)


@pytest.mark.parametrize("page_size", [1, 5, 16, 24, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 33])
def test_pages(sm_80, page_size, head_dim):
    q, k, v, *starts = packed([70, 0, 3, 129], [130, 40, 0, 300], 2, 1, head_dim)
    k_pages, v_pages, table = paged(k, v, starts[1], page_size)
    check_varlen(q, k_pages, v_pages, *starts, page_table=table, causal=True, mode=MODES[page_size % 4])


def test_rows_off_16_bytes_and_room_between_them(sm_80):
    for layout in ("odd", "wide", "heads", "few"):
        q, k, v = (normal(2, n, 2, 64, seed=i, layout=layout) for i, n in enumerate((70, 100, 100)))
        check(q, k, v, causal=True)


def test_nan_past_the_last_key_reaches_nothing(card):
    for dtype in (BF16, FP32):
        q, k, v = problem(1, 70, 200, 1, 1, 128, dtype=dtype)
        k[:, 150:] = v[:, 150:] = NAN
        check(q, k[:, :150], v[:, :150])


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_fp8(card, head_dim):
    """Products of FP8 where the card has them, else of halves: within what FP8's own rounding allows."""
    q, k, v = (x.to(FP8) for x in problem(1, 70, 200, 2, 1, head_dim))
    descales = {f"{name}_descale": torch.tensor([s]) for name, s in (("q", 0.5), ("k", 1.5), ("v", 2.0))}
    got = attention(q, k, v, causal=True, backend="emulator", **descales).float()
    exact = attention(*(x.float() * s for x, s in ((q, 0.5), (k, 1.5), (v, 2.0))), causal=True, backend="cpu")
    # P in FP8 is off by up to 2^-4 of each weight; halves by 2^-11, and the output is rounded to bfloat16.
    allowed = 0.1 if mma_tilings.operand_of(card, FP8) == FP8 else 0.02
    assert (got - exact).abs().max() <= allowed * exact.abs().max()


def test_schedules_masks_and_scores(card):
    q, k, v = problem(1, 200, 300, 2, 1, 128)
    blocks = torch.rand(4, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    sizes = {"seqlen_q": 200, "seqlen_k": 300, "block_q": 64, "block_k": 64}
    schedule = BlockSchedule.from_blocks(blocks, **sizes)
    documents = torch.arange(300) // 90
    check(q, k, v, schedule=schedule)
    check(q, k, v, schedule=schedule, mask=lambda b, h, q, k: documents[q] == documents[k])
    check(q, k, v, mask=lambda b, h, q, k: (q >= k) & (q - k < 50), score=lambda s, b, h, q, k: s - (q - k).abs() * 0.1)


def test_float32_on_cuda_cores_where_they_are_faster():
    """Cards whose tensor cores do three TF32 products in more time."""
    chosen = {name: mma_tilings.choose(name, FP32, 128, Scores()).cuda_cores for name in arch.ARCHS}
    assert {name for name, is_so in chosen.items() if is_so} == {"sm_86", "sm_89", "sm_120", "sm_121"}
    with arch.as_card("sm_89"):
        for head_dim, options in ((64, {"causal": True}), (96, {"window": (30, 5)}), (128, {"exact": True})):
            q, k, v = problem(1, 70, 150, 2, 1, head_dim, dtype=FP32)
            check(q, k, v, **options)
            k[:, 40] *= 300.0  # S is computed again
            check(q, k, v, **options)


@pytest.mark.parametrize("name", ["sm_80", "sm_89"])
def test_float32_adds_up_many_keys(name):
    """Tensor cores cut sums off: where V has a mean, sums over all keys in their accumulators would shrink."""
    with arch.as_card(name):
        q, k, v = problem(1, 16, 1500, 1, 1, 64, dtype=FP32)
        check(q, k, v + 1.0)
        check(q, k, v + 1.0, exact=True, mode=MODES[1])


@pytest.mark.parametrize("name", ["sm_80", "sm_89"])
def test_float32_under_a_softcap(name):
    """Scores of a tenth and more of the cap, where 1 − 2 / (1 + e^2y) has lost digits."""
    with arch.as_card(name):
        check(*problem(1, 40, 90, 2, 2, 64, dtype=FP32), softcap=3.0)
        check(*problem(1, 40, 90, 2, 2, 64, dtype=FP32, size=4.0), softcap=20.0)


def test_float32_with_everything():
    """Hopper's own: no other kernel there takes float32."""
    q, k, v = problem(2, 130, 200, 4, 2, 64, dtype=FP32)
    more = {"sinks": torch.randn(4), "alibi_slopes": torch.rand(4), "softcap": 15.0, "window": (60, 10)}
    check(q, k, v, **more)
    blocks = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(5)) < 0.6
    sizes = {"seqlen_q": 130, "seqlen_k": 200, "block_q": 64, "block_k": 64}
    check(q, k, v, schedule=BlockSchedule.from_blocks(blocks, **sizes), causal=True)


def test_shared_prefix(card):
    q, k, v = problem(4, 3, 40, 2, 1, 64)
    prefix = normal(1, 70, 1, 64, seed=8), normal(1, 70, 1, 64, seed=9)
    got = shared_prefix_attention(q, [prefix], k, v, causal=False, backend="emulator")
    whole = [torch.cat([p.expand(4, -1, -1, -1), x], 1) for p, x in zip(prefix, (k, v), strict=True)]
    expected = attention(q.float(), *(x.float() for x in whole), backend="cpu")
    assert (got.float() - expected).abs().max() < 0.02


# ---- what keeps it right ---------------------------------------------------------------------------------------------
SOURCE = KERNELS_ROOT / "prefill/forward_mma.cu"
BARRIERS = [m.start() for m in re.finditer(r"ptx::sync_threads\(\);|ptx::copy_async_wait<\d>\(\);", SOURCE.read_text())]


@pytest.mark.parametrize("number", range(len(BARRIERS)))
def test_every_wait_is_needed(sm_80, number, tmp_path: Path):
    """Without one of them some problem goes wrong, in some order of threads."""
    text, at = SOURCE.read_text(), BARRIERS[number]
    broken = tmp_path / "forward_mma.cu"
    broken.write_text(text[:at] + text[text.index(";", at) + 1 :])
    run = emulator.launch

    def wrong(late: bool, seed: int) -> bool:
        def launch(spec, grid, args, tensors, **options):
            if spec.entry == "forward_mma":
                spec = replace(spec, source=str(broken))
            return run(spec, grid, args, tensors, late=late, seed=seed, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emulator, "launch", launch)
            try:
                got = attention_of()
            except emulator.EmulatorError:
                return True
        return not (got.float() - expected).abs().max() < 0.05

    q, k, v, *starts = packed([140], [200], 1, 1, 128)
    k_pages, v_pages, table = paged(k, v, starts[1], 16)

    def attention_of():
        return attention_varlen(q, k_pages, v_pages, *starts, page_table=table, backend="emulator")

    expected = attention(*(x[None].float() for x in (q, k, v)), backend="cpu")[0]
    assert any(wrong(*mode) for mode in (*MODES, (True, 2), (False, 3)))


def test_warps_without_visible_keys_do_no_products(sm_80):
    """Causal, one tile: of the second key block only the warps whose rows reach it compute anything."""
    shape = (1, 128, 128, 1, 1, 128)
    counts = []
    for causal in (False, True):
        with emulated(count=True) as launches:
            attention(*problem(*shape), causal=causal, backend="emulator")
        counts.append(launches[-1].counters.tensor_flops)
    assert counts[0] == 4 * 128 * 128 * 128
    assert counts[1] == counts[0] * 3 // 4
