"""Dropout inside the kernels by mma.sync, in the emulator: the CPU's mask to the bit, and gradients of it."""

from __future__ import annotations

import pytest
import torch
from dropout_cases import GIVEN, assert_kept, dense, packed
from oracle import qkv, randn

from tilewise import arch, attention, compiler
from tilewise.gpu import backward, backward_mma, tilings
from tilewise.scores import Scores

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AT = {"backend": "emulator"}


@pytest.fixture
def sm_80():
    with arch.as_card("sm_80"):
        yield


@pytest.mark.usefixtures("sm_80")
def test_the_mask_is_the_cpus():
    """Of every weight: forward, dV and dP; sequences that begin anywhere, an empty one, and the last not the first."""
    assert_kept([21, 0, 67], [37, 5, 150], 2, 64, BF16, **AT)


@pytest.mark.usefixtures("sm_80")
def test_dense():
    """Grouped heads, sinks, rows that see nothing, and lengths on either side of a tile's."""
    dense(*qkv(2, 129, 65, 4, 2, 64, dtype=BF16), randn(4, seed=5), causal=True, **AT)
    dense(*qkv(1, 63, 127, 4, 2, 64, dtype=BF16), deterministic=True, window=(40, 3), **AT)
    # One key is dropped or comes twice, which bfloat16 holds: what o is rounded by stands against nothing else here.
    dense(*qkv(65, 1, 1, 2, 1, 64, dtype=BF16), dropout_p=0.5, **AT)


def test_bent_scores_of_packed_sequences():
    """Softcap and ALiBi: what is left for the second warp of a pair is no longer the weight alone."""
    options = {"softcap": 2.0, "alibi_slopes": randn(2, seed=3).abs(), "window": (60, 5)}
    with arch.as_card("sm_89"):
        packed([70, 0, 5], [60, 9, 0], 2, 1, 40, FP16, **options, **AT)


@pytest.mark.usefixtures("sm_80")
def test_large_scores():
    """Logits of ±1e4: a row has one weight, which is there, 1 / (1 − p) times, or not."""
    q, k, v = qkv(1, 64, 130, 2, 2, 64, dtype=BF16)
    got, want = (attention(q * 1e4, k, v, **GIVEN, backend=x) for x in ("emulator", "cpu"))
    assert 0.1 < (want == 0).all(-1).double().mean() < 0.5
    torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("sm_80")
def test_seeds_come_from_torchs_generator():
    q, k, v = qkv(1, 70, 130, 2, 2, 64, dtype=BF16)
    torch.manual_seed(3)
    first, second = (attention(q, k, v, dropout_p=0.5, **AT) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v, dropout_p=0.5, **AT), first)
    assert not torch.equal(first, second)


def test_hopper_drops_by_mma_sync():
    """Its own kernels do not; rows of a tile are of one head, as a lane's draws are."""
    dropping = Scores((None, 0), dropout=0.1)
    for dtype in (BF16, FP32):
        assert tilings.spec_for("sm_90a", dtype, 128, 1 << 20, dropping)[1].name == "forward_mma"
    assert not backward.backward_hopper.serves(BF16, 128, dropping)
    sizes = ("sm_80", BF16, 4, 8, 16, 2, 128)
    assert tilings.geometry(*sizes, Scores(), tma=True).pack == 8
    assert tilings.geometry(*sizes, dropping, tma=True).pack == 1
    for dropout in (False, True):
        with arch.as_card("sm_90a"):
            device = torch.device("cpu")
            names = tilings.kernel_of(device, BF16, dropout)[0], backward.kernel_of(device, BF16, 128, dropout=dropout)
        assert names == (("forward_mma", "backward_mma") if dropout else ("forward", "backward"))


SPILLING = [("sm_90a", BF16, 128), ("sm_80", BF16, 64), ("sm_100", FP32, 128), ("sm_89", BF16, 256)]


def test_kernels_are_listed():
    """`tilewise kernels --all` compiles what calls launch."""
    dropping = Scores((None, 0), dropout=0.3)
    assert tilings.spec_for("sm_80", FP16, 96, 1 << 20, dropping)[1] in tilings.specs("sm_80", every=True)
    tiling = backward_mma.choose("sm_80", FP16, 192, 0, False, True)
    kind = backward_mma.Kind(FP16, 192, dropping, False, in_turn=True)
    assert set(backward_mma.specs_of(kind, tiling)) <= set(backward.specs("sm_80", every=True))


@pytest.mark.parametrize(("card", "dtype", "head_dim"), SPILLING)
def test_nothing_spills(card, dtype, head_dim):
    """A sample; `tilewise kernels --all` has every kernel of every card."""
    asked = Scores((None, 0), softcap=30.0, alibi=True, dropout=0.1)
    kind = backward_mma.Kind(dtype, head_dim, asked, card not in ("sm_80", "sm_89"))
    tiling = backward_mma.choose(card, dtype, head_dim, 0, True, True)
    specs = [tilings.spec_for(card, dtype, head_dim, 1 << 20, asked)[1], backward_mma.specs_of(kind, tiling)[1]]
    for row in compiler.resource_table(specs, [card]):
        assert (row.error, row.spill_stores, row.spill_loads) == (None, 0, 0), row.kernel
