"""The backward by mma.sync, kernels/backward/backward_mma.cu, in the emulator: as cards without wgmma run it, and
float32."""

from __future__ import annotations

import pytest
import torch
from backward_cases import MODES, between_others, dense, ends_of, judged, packed, spoil_second, tree
from oracle import qkv, randn

from tilewise import BlockSchedule, arch, arguments, functions, reference
from tilewise.compiler import nvrtc
from tilewise.gpu import backward, backward_mma
from tilewise.gpu.backward_mma import Kind
from tilewise.scores import Scores

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FULL = {"with_lse": True}
CAUSAL = {"causal": True, "with_lse": True}
BENT = {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.02]), "window": (60, 20)}
# card, dtype, head_dim, Nq, Nk, options; sm_80 has room for large tiles, sm_89 has not, sm_120 adds by vectors
DENSE = {
    "full": ("sm_80", BF16, 64, 130, 200, FULL),
    "causal": ("sm_80", BF16, 128, 100, 170, CAUSAL),
    "vectors": ("sm_120", FP16, 64, 100, 170, CAUSAL),
    "three pairs": ("sm_89", FP16, 160, 70, 100, {"scale": -0.1}),
    "wide float": ("sm_89", FP32, 200, 40, 40, BENT),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name):
    card, dtype, head_dim, seqlen_q, seqlen_k, options = DENSE[name]
    with arch.as_card(card):
        mode = MODES[list(DENSE).index(name) % 4]
        dense(*qkv(1, seqlen_q, seqlen_k, 2, 1, head_dim, dtype=dtype), mode=mode, **options)


@pytest.fixture
def sm_80():
    with arch.as_card("sm_80"):
        yield


@pytest.mark.usefixtures("sm_80")
def test_packed_sequences_stay_apart():
    """Some are empty, lengths of queries and keys differ, and what the second holds, NaN included, is nobody else's."""
    packed([0, 70, 5, 130], [9, 70, 0, 200], 2, 1, 64, causal=True, with_lse=True, index=torch.int64)
    packed([70, 40], [75, 60], 2, 1, 64, causal=True, spoil=spoil_second)


@pytest.mark.usefixtures("sm_80")
def test_tokens_of_no_sequence(monkeypatch):
    between_others(monkeypatch, 64, causal=True, alibi_slopes=randn(3, 2, seed=8).abs(), mode=MODES[2])


@pytest.mark.usefixtures("sm_80")
def test_trees():
    ends = ends_of((70, (40,), (150, (20,), (64,)), (30,)), (5, (6,), (130,)))
    got = tree(ends, 2, 1, 64, mode=MODES[2])
    again = tree(ends, 2, 1, 64, mode=MODES[1], deterministic=True)
    assert torch.equal(got.d_k, again.d_k)  # the order of dQ's sums is all that differs
    tree(ends, 2, 1, 64, left=90)


@pytest.mark.usefixtures("sm_80")
def test_in_turn():
    """The same bits, in whatever order blocks get on; many tiles of keys add to each tile of dQ."""
    q, k, v = qkv(1, 70, 600, 1, 1, 64, dtype=BF16)
    first, second = (dense(q, k, v, deterministic=True, window=(400, None), mode=mode) for mode in MODES[:3:2])
    assert all(torch.equal(*pair) for pair in zip(first[:3], second[:3], strict=True))
    q, k, v = qkv(1, 200, 270, 3, 3, 64, dtype=BF16)  # of three heads two begin together
    first, second = (dense(q, k, v, deterministic=True, causal=True, mode=mode) for mode in MODES[:3:2])
    assert torch.equal(first.d_q, second.d_q)


@pytest.mark.usefixtures("sm_80")
def test_strides_and_sinks():
    """Heads before rows in memory, and rows off 16 bytes."""
    q, k, v = qkv(2, 70, 90, 2, 2, 64, dtype=BF16)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.functional.pad(k, (1, 0))[..., 1:], v
    got = dense(*apart, randn(2, seed=5), causal=True)
    assert torch.equal(got.d_k, dense(q, k, v, randn(2, seed=5), causal=True).d_k)


@pytest.mark.usefixtures("sm_80")
def test_keys_that_do_not_exist_and_rows_that_see_none():
    """Logits of 0 beside an LSE of −200 are weights beyond float32; rows without keys have gradients of 0."""
    q, k, v = qkv(1, 70, 70, 1, 1, 64, dtype=BF16)
    dense((40 * q.abs()).to(BF16), -k.abs(), v, scale=0.125)
    got = dense(*qkv(1, 200, 70, 1, 1, 64, dtype=BF16), causal=True, with_lse=True)
    assert (got.d_q[:, :130] == 0).all()
    got = dense(*qkv(1, 30, 400, 1, 1, 64, dtype=BF16), window=(50, 0))
    assert all((x[:, :320] == 0).all() for x in got[1:3])


# ---- schedules and functions -----------------------------------------------------------------------------------------
TABLE = randn(300, seed=3)


def bent(s, b, h, q, k):
    return torch.where(q >= k, torch.tanh(s * 0.5) * 2 + TABLE[(q - k).abs()] * 0.3, s * 0.25)


def documents(b, h, q, k):
    return (q // 37 == k // 37) | (k < 5 * h)


def picked(card, *, mask=None, score=None, schedule=None, **rest):
    q, k, v = qkv(1, 130, 150, 2, 1, 64, dtype=BF16)
    options = {"mask": mask, "score": score, "schedule": schedule}
    oracle = lambda q, k, v, **more: reference.attention(q, k, v, **options, **more)  # noqa: E731
    function = functions.of(mask, score) if mask or score else None
    scores = arguments.check_scores(q, 1)
    with arch.as_card(card):
        return judged(oracle, (q, k, v), scores, function=function, schedule=schedule, **rest)


def test_functions():
    """A score that bends and looks up, a mask that leaves out whole tiles; on Hopper scores come here too."""
    picked("sm_90a", score=bent, mask=documents)


def test_schedules():
    """Blocks that are no multiple of a tile's rows, of each head, with a mask on top; dQ's sums in turn."""
    schedule = BlockSchedule.random(130, 150, sparsity=0.5, block_q=48, block_k=64, heads=2, seed=1)
    first, second = (picked("sm_80", schedule=schedule, mask=documents, deterministic=True, mode=m) for m in MODES[1:3])
    assert torch.equal(first.d_q, second.d_q)


# ---- which kernel, and its resources ---------------------------------------------------------------------------------
def test_cards_without_wgmma_get_it_and_hopper_for_float32():
    for card in arch.ARCHS:
        names = {spec.name for spec in backward.specs(card)}
        assert "backward_mma" in names
        assert ("backward" in names) == (card == "sm_90a")


def test_tiles_fit_every_card():
    """Each card's first choice fits its shared memory, and large cards get the large tiles, but where those spill."""
    for card in arch.ARCHS:
        for (size, width), tilings in backward_mma.TILINGS.items():
            dtype = {2: BF16, 4: FP32}[size]
            chosen = backward_mma.choose(card, dtype, width)
            room = arch.limits_of(card)
            fits = [t.shared_bytes(width, size) <= room.shared_block for t in tilings]
            together = [t.blocks_each * (t.shared_bytes(width, size) + 1024) <= room.shared_sm for t in tilings]
            good = [a and b for a, b in zip(fits, together, strict=True)]
            good[0] &= (size, width) not in backward_mma.TOO_WIDE.get(card, ())
            assert chosen == next(t for t, taken in zip(tilings, good, strict=True) if taken)
            assert (chosen == tilings[0]) == good[0]


@pytest.mark.parametrize(("card", "dtype"), [("sm_80", BF16), ("sm_100", FP32), ("sm_120", FP32)])
def test_no_spills(card, dtype):
    tiling, new = backward_mma.choose(card, dtype, 128), card != "sm_80"
    for in_turn in (False, True):
        spec = backward_mma.specs_of(Kind(dtype, 128, Scores(), new=new, in_turn=in_turn), tiling)[1]
        report = nvrtc.compile(spec, card).report
        assert not report.spills, report


def test_no_spills_of_the_list():
    """Its one block has 1024 threads, with 64 registers each at most."""
    tiling = backward_mma.choose("sm_120", BF16, 128)
    for in_turn in (False, True):
        report = nvrtc.compile(backward_mma.list_spec(torch.int32, tiling, in_turn), "sm_120").report
        assert not report.spills, report
