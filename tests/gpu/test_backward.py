"""The Hopper backward in the emulator: gradients by the tolerance rule, whatever is asked of the scores."""

from __future__ import annotations

import pytest
import torch
from backward_cases import MODES, between_others, dense, ends_of, judged, packed, spoil_second, starts_of, tree
from oracle import qkv, randn

from tilewise import BlockSchedule, arguments, functions, reference
from tilewise.gpu import backward, backward_hopper, backward_lists, backward_mma
from tilewise.gpu.backward import GradientCall
from tilewise.gpu.pattern import stacked
from tilewise.scores import Scores

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("own_card")

# dtype, head_dim, Nq, Nk, options
DENSE = {
    "full": (BF16, 64, 128, 256, {}),
    "cut": (BF16, 128, 70, 130, {}),
    "causal": (BF16, 128, 200, 330, {"causal": True}),
    "more queries": (FP16, 64, 330, 200, {"causal": True}),
    "window": (BF16, 64, 300, 260, {"window": (40, 20)}),
    "softcap": (BF16, 128, 100, 140, {"softcap": 2.0, "causal": True}),
    "ALiBi": (BF16, 64, 130, 200, {"alibi_slopes": torch.tensor([0.5, 0.02]), "causal": True}),
    "scale": (BF16, 40, 130, 70, {"scale": -0.2}),
    "wide": (BF16, 256, 130, 100, {"causal": True}),
    "softcap of wide heads": (FP16, 192, 70, 80, {"softcap": 2.0, "window": (30, 5)}),
    "odd": (BF16, 37, 65, 66, {"causal": True}),
    "softcap and ALiBi": (BF16, 128, 40, 70, {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.02])}),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name):
    """Two query heads of a KV head, and what came through the LSE too."""
    dtype, head_dim, seqlen_q, seqlen_k, options = DENSE[name]
    mode = MODES[list(DENSE).index(name) % 4]
    dense(*qkv(1, seqlen_q, seqlen_k, 2, 1, head_dim, dtype=dtype), with_lse=True, mode=mode, **options)


def test_strides_and_sinks():
    """Heads before rows in memory, rows off 16 bytes, and a gradient of one element that is seen everywhere."""
    q, k, v = qkv(2, 70, 90, 2, 2, 64, dtype=BF16)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.functional.pad(k, (1, 0))[..., 1:], v
    got = dense(*apart, randn(2, seed=5), causal=True)
    assert torch.equal(got.d_k, dense(q, k, v, randn(2, seed=5), causal=True).d_k)
    whole = torch.ones(1, dtype=BF16).expand(q.shape)
    call = GradientCall(q, k, v, q, torch.zeros(2, 2, 70), whole, Scores(scale=0.1))
    others = GradientCall(q, k, v, q, torch.zeros(2, 2, 70), whole.contiguous(), Scores(scale=0.1))
    assert all(torch.equal(*pair) for pair in zip(*(backward.gradients(x)[1:3] for x in (call, others)), strict=True))


def test_logits_far_below_0():
    """Keys that do not exist have logits of 0, which are weights beyond float32 beside an LSE of −200."""
    q, k, v = qkv(1, 70, 70, 1, 1, 64, dtype=BF16)
    q, k = (40 * q.abs()).to(BF16), -k.abs()
    dense(q, k, v, scale=0.125)


def test_rows_without_keys():
    """Their gradients are 0, and what came through their LSE, −inf, goes nowhere; so are those of keys nobody sees."""
    got = dense(*qkv(1, 200, 70, 1, 1, 64, dtype=BF16), causal=True, with_lse=True)
    assert (got.d_q[:, :130] == 0).all()
    got = dense(*qkv(1, 30, 400, 1, 1, 64, dtype=BF16), window=(50, 0))
    assert (got.d_k[:, :320] == 0).all()
    assert (got.d_v[:, :320] == 0).all()


RAGGED = [0, 70, 5, 130, 64], [9, 70, 0, 200, 129]


@pytest.mark.parametrize(("number", "index"), [(0, torch.int32), (1, torch.int64)])
def test_packed(number, index):
    options = {"causal": True} if number else {"window": (50, 20), "softcap": 3.0}
    packed(*RAGGED, 2, 1, (64, 128)[number], index=index, with_lse=True, mode=MODES[number], **options)


def test_neighbours_stay_apart():
    """What another sequence holds, NaN included, is nobody else's."""
    packed([70, 40], [75, 60], 2, 1, 64, causal=True, spoil=spoil_second)
    packed([70, 40], [75, 60], 2, 1, 64, causal=True, spoil=spoil_second, mode=MODES[3], deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 200])
def test_tokens_of_no_sequence(monkeypatch, head_dim):
    between_others(monkeypatch, head_dim, causal=True, alibi_slopes=randn(3, 2, seed=8).abs(), mode=MODES[2])


def test_trees():
    ends = ends_of((70, (40,), (150, (20,), (64,)), (30,)), (5, (6,), (130,)))
    tree(ends, 2, 1, 64, mode=MODES[2])
    first, second = (tree(ends, 2, 1, 64, mode=mode, deterministic=True) for mode in MODES[1:3])
    assert all(torch.equal(*pair) for pair in zip(first[:3], second[:3], strict=True))
    tree(ends, 2, 1, 64, left=90)


def blocks(seqlen_q, seqlen_k, block_q, block_k, *shape, seed=0, **more):
    """A schedule of about half of all blocks."""
    size = *shape, -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    kept = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_blocks(kept, **sizes, **more)


def test_masks():
    """Of documents, whose tiles are none, whole or in part; and one that knows the head and the sequence."""
    document = torch.tensor([0] * 70 + [1] * 200 + [2] * 60, dtype=torch.int32)
    tensors = qkv(2, 330, 330, 2, 1, 64, dtype=BF16)
    dense(*tensors, mask=lambda b, h, q, k: document[q] == document[k], causal=True, mode=MODES[3])
    tensors = qkv(2, 100, 140, 2, 1, 64, dtype=BF16)
    got = dense(*tensors, mask=lambda b, h, q, k: (q + k + h + b) % 3 != 0, deterministic=True, with_lse=True)
    again = dense(
        *tensors, mask=lambda b, h, q, k: (q + k + h + b) % 3 != 0, deterministic=True, with_lse=True, mode=MODES[2]
    )
    assert all(torch.equal(*pair) for pair in zip(got[:3], again[:3], strict=True))


@pytest.mark.parametrize(("block_q", "block_k", "shape"), [(64, 64, (2,)), (16, 48, (2, 1)), (128, 128, ())])
def test_schedules(block_q, block_k, shape):
    tensors = qkv(2, 200, 300, 2, 1, 64, dtype=BF16)
    dense(*tensors, schedule=blocks(200, 300, block_q, block_k, *shape))
    if block_q == 64:
        short = {"lengths_q": torch.tensor([10, 64, 64, 3]), "lengths_k": torch.tensor([64, 7, 30, 64, 44])}
        schedule = blocks(200, 300, 64, 64, seed=1, **short)
        dense(*tensors, schedule=schedule, mask=lambda b, h, q, k: (q + k + h + b) % 3 != 0)


def test_rounds(monkeypatch):
    """Bits of few key tiles at a time, where those of all would be too large, in turn or not."""
    tensors, mask = qkv(2, 100, 300, 2, 1, 64, dtype=BF16), lambda b, h, q, k: (q + k + h + b) % 3 != 0
    want = dense(*tensors, mask=mask, deterministic=True)
    monkeypatch.setattr(backward_lists, "BITS_BYTES", 2 * 2 * 2 * 2 * 1024)  # of two key tiles, by sequence and head
    made, steps = [], backward_hopper.steps
    monkeypatch.setattr(backward_hopper, "steps", lambda *given: made.append(steps(*given)) or made[-1])
    got = dense(*tensors, mask=mask, deterministic=True, mode=MODES[2])
    assert all(torch.equal(*pair) for pair in zip(got[:3], want[:3], strict=True))
    assert [step.spec.name for step in made[0]].count("backward") == 2
    test_schedules_of_packed_sequences()


def test_schedules_of_packed_sequences():
    """One has a schedule, the other a mask alone, in turn or not."""
    lengths, mask = ([70, 130], [200, 150]), lambda b, h, q, k: (q + 2 * k + b) % 5 != 0
    schedules = [blocks(70, 200, 32, 64, 2), None]
    starts = [starts_of(x) for x in lengths]
    tensors = [
        randn(sum(n), 2, 64, dtype=BF16, seed=seed) for seed, n in enumerate((lengths[0], lengths[1], lengths[1]))
    ]
    scores = arguments.check_scores(tensors[0], 2, causal=True)
    given = {
        "starts_q": starts[0],
        "starts_k": starts[1],
        "max_seqlens": (130, 200),
        "function": functions.of(mask, None),
    }

    def oracle(q, k, v, **more):
        return reference.attention_varlen(q, k, v, *starts, schedule=schedules, mask=mask, causal=True, **more)

    for in_turn in (False, True):
        judged(oracle, tensors, scores, **given, schedule=stacked(schedules, 130, 200), deterministic=in_turn)


def test_in_turn():
    """The same bits, in whatever order blocks get on; many tiles of keys add to each tile of dQ."""
    q, k, v = qkv(1, 70, 600, 1, 1, 64, dtype=BF16)
    first, second = (dense(q, k, v, deterministic=True, window=(400, None), mode=mode) for mode in MODES[:3:2])
    assert all(torch.equal(*pair) for pair in zip(first[:3], second[:3], strict=True))
    q, k, v = qkv(1, 200, 270, 3, 3, 256, dtype=BF16)  # of three heads two begin together
    first, second = (dense(q, k, v, deterministic=True, causal=True, mode=mode) for mode in MODES[:3:2])
    assert torch.equal(first.d_q, second.d_q)


def test_no_rows_or_keys():
    for sizes in ((1, 0, 5), (1, 5, 0), (0, 5, 5)):
        q, k, v = qkv(*sizes, 2, 1, 64, dtype=BF16)
        scores = arguments.check_scores(q, len(q), sinks=randn(2))
        call = GradientCall(q, k, v, q, torch.zeros(len(q), 2, q.shape[1]), q, scores)
        assert all((x == 0).all() for x in backward.gradients(call))


def test_each_kernel_is_known():
    """`tilewise kernels` lists what calls launch."""
    kinds = [backward_hopper.Kind(BF16, 128, Scores((None, 0)), masks=True)]
    listed = backward_hopper.specs()
    assert {spec for kind in kinds for spec in backward_hopper.specs_of(kind)} <= set(listed)
    every = backward_hopper.specs(every=True)
    assert set(listed) <= set(every)
    assert all(spec.product for spec in every)


def test_what_has_no_registers_goes_by_mma():
    """Softcap with ALiBi on wide heads: calls launch that kernel, and `tilewise kernels` lists it."""
    both = Scores(softcap=2.0, alibi=True)
    assert [backward_hopper.serves(BF16, n, both) for n in (64, 65, 128, 256)] == [True, False, False, False]
    assert all(backward_hopper.serves(BF16, 256, x) for x in (Scores(softcap=2.0), Scores(alibi=True)))
    names = [(spec.name, dict(spec.constants).get("Element")) for spec in backward_mma.specs("sm_90a", every=True)]
    assert ("backward_mma", "bf16") in names
    assert not any(spec.name == "backward_mma" for spec in backward_hopper.specs(every=True))
