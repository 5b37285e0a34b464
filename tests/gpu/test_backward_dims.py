"""The Hopper backward with 192 columns, and with V of another head dimension, in the emulator."""

from __future__ import annotations

import math

import pytest
import torch
from backward_cases import MODES, between_others, dense, ends_of, packed, spoil_second, tree
from oracle import randn

from tilewise import compiler
from tilewise.gpu import backward_hopper
from tilewise.gpu.backward_hopper import Kind, tiling_of
from tilewise.scores import Scores

BF16, FP16 = torch.bfloat16, torch.float16
CURVED = Scores(softcap=2.0).rule
pytestmark = pytest.mark.usefixtures("own_card")


def qkv(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim=192, value_dim=128, *, dtype=FP16, size=1.0):
    q = randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype, size=size)
    k, v = (randn(batch, seqlen_k, heads_kv, d, dtype=dtype, seed=n) for n, d in ((1, head_dim), (2, value_dim)))
    return q, k, v


def test_lengths():
    """Around the tiles' edges; what came through the LSE too, and sinks."""
    for n, (seqlen_q, seqlen_k) in enumerate([(1, 1), (63, 65), (65, 63), (127, 129), (129, 257)]):
        dense(*qkv(1, seqlen_q, seqlen_k, 2, 1), causal=True, with_lse=n % 2 > 0, mode=MODES[n % 4])
    dense(*qkv(2, 70, 200, 2, 2), randn(2, seed=5), window=(90, 20), mode=MODES[2])


def test_many_short_sequences():
    dense(*qkv(65, 2, 3, 1, 1), causal=True, mode=MODES[1])


def test_rows_without_keys():
    got = dense(*qkv(1, 200, 70, 1, 1), causal=True, with_lse=True)
    assert (got.d_q[:, :130] == 0).all()
    got = dense(*qkv(1, 30, 400, 1, 1), window=(50, 0))
    assert (got.d_k[:, :320] == 0).all()
    assert (got.d_v[:, :320] == 0).all()


def test_large_logits():
    """Up to 10⁴ in size: a row's largest key has all the weight."""
    q, k, v = qkv(1, 70, 90, 1, 1, size=1e3)
    dense(q, k, v, causal=True, scale=1.0)


def test_strides():
    """Heads before rows in memory, and rows off 16 bytes."""
    q, k, v = qkv(2, 70, 90, 2, 2)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.functional.pad(k, (1, 0))[..., 1:]
    wide = torch.nn.functional.pad(v, (8, 8), value=math.nan)[..., 8:-8]
    got, want = dense(*apart, wide, causal=True), dense(q, k, v, causal=True)
    assert torch.equal(got.d_k, want.d_k)
    assert torch.equal(got.d_v, want.d_v)


def test_packed(monkeypatch):
    """In turn: the same bits whatever the order; what other sequences hold, NaN included, is nobody else's; tokens
    before the first start and behind the last one."""
    lengths = [0, 70, 5, 130, 64], [9, 70, 0, 200, 129]
    rest = {"value_dim": 128, "causal": True, "deterministic": True}
    first, second = (packed(*lengths, 2, 1, 192, mode=mode, **rest) for mode in MODES[1:3])
    assert all(torch.equal(*pair) for pair in zip(first[:3], second[:3], strict=True))
    packed([70, 40], [75, 60], 2, 1, 192, spoil=spoil_second, **rest)
    ends = ends_of((70, (40,), (150, (20,), (64,)), (30,)), (5, (6,)))
    tree(ends, 2, 1, 192, value_dim=128, mode=MODES[3], deterministic=True)
    between_others(monkeypatch, 192, value_dim=128, causal=True)


def test_masks():
    """Tiles of which none, all or some is seen, and a mask that knows the head."""
    document = torch.tensor([0] * 70 + [1] * 200 + [2] * 60, dtype=torch.int32)
    tensors = qkv(1, 330, 330, 2, 1, dtype=BF16)
    dense(*tensors, mask=lambda b, h, q, k: document[q] == document[k], causal=True, mode=MODES[3])
    dense(*qkv(2, 100, 140, 2, 1, dtype=BF16), mask=lambda b, h, q, k: (q + k + h) % 3 != 0, with_lse=True)


@pytest.mark.parametrize("value_dim", [170, 190])
def test_equal_and_odd_head_dims(value_dim):
    """Beyond 128 columns of V both warpgroups have the same keys, and of three panels one has two."""
    dense(*qkv(1, 130, 150, 2, 1, 170, value_dim, dtype=BF16), causal=True, with_lse=True, mode=MODES[value_dim % 4])


def test_changed_scores():
    """What is more than scaled has no registers beside 192 and 128 columns."""
    dense(*qkv(1, 70, 80, 2, 1), softcap=2.0, window=(30, 5), mode=MODES[3])
    assert tiling_of(192, 128, crowded=True) == tiling_of(192)
    assert tiling_of(192, 128, CURVED) == tiling_of(192, 128, Scores(alibi=True)) == tiling_of(192)


def test_which_tiling():
    """The narrowest that holds both; shared memory and registers are those of the kernel's own rules."""
    widths = {(64, 64): (33, 64), (128, 128): (65, 30), (192, 128): (129, 128), (192, 192): (40, 129)}
    for (width, value_width), dims in widths.items():
        found = tiling_of(*dims)
        assert (found.width, found.value_width) == (width, value_width)
    assert tiling_of(257) is None
    assert not backward_hopper.serves(BF16, 64, value_dim=300)
    assert tiling_of(192, 128).tile_kv == 128
    for scores in (Scores(), CURVED):
        for listed in (False, True):
            for tiling in backward_hopper.TILINGS:
                kind = Kind(BF16, tiling.width, scores, True, None, False, listed, tiling.value_width)
                main = backward_hopper.specs_of(kind)[1]
                assert main.shared_bytes <= backward_hopper.SHARED_LIMIT


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_registers(dtype):
    """192 with 128 columns has no register to spare: ptxas neither spills nor makes one product wait for another."""
    forms = (None, False), (torch.int32, False), (None, True)
    kinds = [Kind(dtype, 192, Scores(), True, index, False, listed, 128) for index, listed in forms]
    for row in compiler.resource_table([backward_hopper.specs_of(kind)[1] for kind in kinds], ["sm_90a"]):
        assert (row.spill_stores, row.spill_loads, row.serialised, row.error) == (0, 0, (), None), row.kernel
        assert row.shared_bytes <= row.shared_limit


def test_last_heads_side_by_side(monkeypatch):
    """Whatever the order in which blocks begin, each key tile is visited once."""
    tensors = qkv(3, 130, 270, 2, 2)
    made = []
    for blocks in (0, 1, 4):
        monkeypatch.setattr(backward_hopper, "LAST_BLOCKS", blocks)
        monkeypatch.setattr(backward_hopper, "multiprocessors", lambda device: 4)
        made.append(dense(*tensors, causal=True, mode=MODES[2]))
    assert all(torch.equal(x.d_k, made[0].d_k) for x in made)
