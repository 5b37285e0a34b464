"""Dropout on the CPU: its generator, its mask's mean and independence, and the same mask in the backward pass."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from oracle import assert_gradients, assert_state, gradient_floors, gradients, qkv, randn
from torch.utils.checkpoint import checkpoint

from tilewise import BlockSchedule, attention, attention_varlen, reference
from tilewise.cpu.dropout import WORD, Dropout, philox

SEED = torch.tensor(0x1234_5678_9ABC_DEF)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 3), "softcap": 2.0},
    "ALiBi": {"alibi_slopes": torch.tensor([0.1, 0.3, 0.02, 0.5]), "causal": True},
    "mask": {"mask": lambda b, h, q, k: (q + k + h) % 3 != 0},
    "schedule": {"schedule": BlockSchedule.random(90, 130, block_q=16, block_k=16, sparsity=0.5, seed=0)},
    "sinks": {"sinks": randn(4, seed=9)},
}


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [  # the known answers that its authors publish of seven rounds
        ((0, 0, 0, 0), 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((WORD,) * 4, -1, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_the_generator_is_philox(counter, seed, words):
    found = philox(tuple(torch.tensor(x) for x in counter), seed)
    assert " ".join(f"{int(x):08x}" for x in found) == words


def kept_of(seed, p, batch, heads, rows, keys):
    count = torch.arange
    indices = count(batch)[:, None, None, None], count(heads)[:, None, None], count(rows)[:, None], count(keys)
    return Dropout(p, seed).kept(*indices)


def test_each_weight_has_bits_of_its_own():
    """All of a group's 128 bits are used, each once: what a tile finds is what the whole has there."""
    kept = kept_of(7, 0.5, 2, 3, 37, 53)
    words = philox(tuple(torch.tensor(x) for x in (1 * 4 + 3, 1 * 8 + 2, 2, 1)), 7)
    for key, (row, n) in itertools.product((22, 23, 30, 31), ((18, 0), (26, 1))):
        bits = int(words[2 * (key % 2) + n]) >> (16 if key >= 24 else 0) & 0xFFFF
        assert bool(kept[1, 2, row, key]) == (bits >= 0x8000)
    indices = torch.tensor([1])[:, None, None, None], torch.tensor([2])[:, None, None]
    part = Dropout(0.5, torch.tensor(7)).kept(*indices, torch.arange(5, 30)[None, None, :, None], torch.arange(9, 50))
    assert torch.equal(part[0, 0], kept[1, 2, 5:30, 9:50])


def test_almost_everything_is_dropped():
    """A p that rounds to 1 drops as much as 16 bits can say, not nothing."""
    assert kept_of(7, 1 - 1e-9, 1, 1, 64, 64).sum() <= 2


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_kept_as_asked_for_and_independently(p):
    """The mean of all, of every head, row and key; neighbours in each direction, and other seeds, tell nothing."""
    kept = kept_of(7, p, 2, 4, 128, 256).double()
    spread = (p * (1 - p)) ** 0.5
    for axes in ((0, 1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        means = kept.mean(axes)
        count = kept.numel() / max(1, means.numel())
        assert ((means - (1 - p)).abs() < 5.5 * spread / count**0.5).all()
    centred = (kept - (1 - p)) / spread
    others = [centred.roll(step, axis) for axis in range(4) for step in (1, 2, 8) if kept.shape[axis] > step]
    others += [(kept_of(seed, p, 2, 4, 128, 256).double() - (1 - p)) / spread for seed in (8, 7 + (1 << 32))]
    for other in others:
        assert (centred * other).mean().abs() < 5.5 / kept.numel() ** 0.5


@pytest.mark.parametrize("name", OPTIONS)
def test_state_and_gradients(name):
    """By the tolerance rule, as without dropout; the tiles of both passes find the mask that the oracle makes whole."""
    tensors = qkv(2, 90, 130, 4, 2, 16)
    options = {"dropout_p": 0.3, "dropout_seed": SEED, **OPTIONS[name]}
    ours, oracle = partial(attention, return_lse=True, **options), partial(reference.attention, **options)
    exact, honest = oracle(*tensors), oracle(*tensors, dtype=torch.float32)
    assert_state(ours(*tensors), exact, honest)
    d_o, d_lse = randn(*tensors[0].shape, seed=7), randn(2, 4, 90, seed=8)
    got = gradients(ours, tensors, d_o, d_lse)
    found = [gradients(partial(oracle, dtype=d), tensors, d_o, d_lse, dtype=d) for d in (torch.float64, torch.float32)]
    assert_gradients(got, *found, gradient_floors(oracle, tensors, d_o), exact[1])


def test_packed_sequences_have_the_mask_of_their_place_in_the_batch():
    q, k, v = (x[0] for x in qkv(1, 60, 80, 4, 2, 16))
    starts = torch.tensor([0, 25, 25, 60]), torch.tensor([0, 30, 44, 80])
    options = {"dropout_p": 0.3, "dropout_seed": SEED, "causal": True}
    ours = lambda q, k, v: attention_varlen(q, k, v, *starts, return_lse=True, **options)  # noqa: E731
    oracle = lambda q, k, v, **more: reference.attention_varlen(q, k, v, *starts, **options, **more)  # noqa: E731
    assert_state(ours(q, k, v), oracle(q, k, v), oracle(q, k, v, dtype=torch.float32))
    got, exact, honest = (
        gradients(call, (q, k, v), randn(60, 4, 16, seed=4), dtype=dtype)
        for call, dtype in (
            (ours, None),
            (oracle, torch.float64),
            (partial(oracle, dtype=torch.float32), torch.float32),
        )
    )
    assert_gradients(got, exact, honest, [1e-6] * 3, oracle(q, k, v)[1])


def test_seeds_come_from_torchs_generator():
    q, k, v = (x.requires_grad_() for x in qkv(1, 30, 40, 2, 1, 8))
    torch.manual_seed(3)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    again = checkpoint(partial(attention, dropout_p=0.5), q, k, v, use_reentrant=False)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, *(torch.autograd.grad(o.sum(), (q, k, v)) for o in (first, again))))
    before = torch.get_rng_state()
    attention(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled():
    """The seed is drawn in the graph, each time anew, and the backward gets it."""
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in qkv(1, 30, 40, 2, 1, 8))
    fast = torch.compile(lambda *x: attention(*x, dropout_p=0.4), backend="aot_eager", fullgraph=True)
    assert not torch.equal(fast(q, k, v), fast(q, k, v))
    fixed = partial(attention, dropout_p=0.4, dropout_seed=SEED)
    fast = torch.compile(fixed, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v)) for call in (fast, fixed))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be below 1, got 1.0"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be finite and at least 0.0"),
        ({"dropout_p": "no"}, TypeError, "dropout_p must be a float"),
        ({"dropout_p": 0.1, "dropout_seed": 3}, TypeError, "dropout_seed must be a torch.Tensor"),
        ({"dropout_p": 0.1, "dropout_seed": torch.zeros(())}, ValueError, "dropout_seed must be one of int64"),
    ],
)
def test_refusals(options, error, words):
    with pytest.raises(error, match=words):
        attention(*qkv(1, 3, 4, 2, 2, 8), **options)
