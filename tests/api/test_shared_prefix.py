"""shared_prefix_attention(): levels of prefixes equal every sequence over its own copy of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, assert_state, poison, randn

from tilewise import attention, merge, reference, shared_prefix_attention


def problem(batch, seqlen_q, seqlen_k, levels, heads=(4, 2), head_dim=16, dtype=torch.float32, seed=0):
    """levels: (batch, length) pairs."""
    q = randn(batch, seqlen_q, heads[0], head_dim, dtype=dtype, seed=seed)
    shapes = [*levels, (batch, seqlen_k)]
    pairs = [
        tuple(randn(b, n, heads[1], head_dim, dtype=dtype, seed=seed + 2 * m + part + 1) for part in range(2))
        for m, (b, n) in enumerate(shapes)
    ]
    return q, pairs[:-1], *pairs[-1]


def assert_prefix(q, levels, k, v, **options):
    got = shared_prefix_attention(q, levels, k, v, return_lse=True, out=poison(q), **options)
    exact = reference.shared_prefix_attention(q, levels, k, v, **options)
    assert_state(got, exact, reference.shared_prefix_attention(q, levels, k, v, dtype=q.dtype, **options))
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q", [1, 5, 40])
@pytest.mark.parametrize("levels", [[], [(1, 50)], [(2, 50)], [(1, 65), (3, 20)], [(1, 9), (2, 30), (6, 4)]])
def test_levels(levels, seqlen_q, dtype):
    assert_prefix(*problem(6, seqlen_q, 40, levels, dtype=dtype))


def test_no_own_keys_and_no_prefix_keys():
    assert_prefix(*problem(4, 1, 0, [(1, 20)]))
    assert_prefix(*problem(4, 2, 7, [(2, 0)]))


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_different_lengths_within_a_level(seqlen_q):
    q, levels, k, v = problem(6, seqlen_q, 12, [(1, 40), (3, 30)])
    levels = [levels[0], (*levels[1], [30, 0, 17])]
    lengths = torch.tensor([12, 4, 5, 11, 9, 4])
    got = assert_prefix(q, levels, k, v, lengths=lengths)
    # What lies beyond a length is never read.
    for x in (k, v):
        for b, n in enumerate(lengths.tolist()):
            x[b, n:] = float("nan")
    for x in levels[1][:2]:
        for m, n in enumerate(levels[1][2]):
            x[m, n:] = float("nan")
    again = shared_prefix_attention(q, levels, k, v, lengths=lengths, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_by_kernels(head_dim, device):
    """A launch of the forward a level, rows of several sequences over one prefix; in the emulator, or on a card."""
    options = {"dtype": torch.bfloat16, "head_dim": head_dim}
    where = "cuda" if device == "cuda" else "emulator"

    def run(q, levels, k, v, **more):
        on = lambda xs: tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in xs)  # noqa: E731
        moved = [on(level) for level in levels]
        got = shared_prefix_attention(*on((q,)), moved, *on((k, v)), return_lse=True, backend=where, **more)
        exact = reference.shared_prefix_attention(q, levels, k, v, **more)
        honest = reference.shared_prefix_attention(q, levels, k, v, dtype=q.dtype, **more)
        assert_state(tuple(x.cpu() for x in got), exact, honest)

    run(*problem(6, 3, 40, [(1, 65), (3, 20)], **options))
    run(*problem(6, 1, 9, [(2, 130)], **options), causal=False, softcap=5.0)
    run(*problem(4, 2, 0, [(1, 20)], **options))
    q, levels, k, v = problem(6, 4, 12, [(1, 40), (3, 30)], **options)
    for x in levels[1]:
        x[1], x[2, 17:] = float("nan"), float("nan")
    run(q, [levels[0], (*levels[1], [30, 0, 17])], k, v, lengths=[12, 4, 5, 11, 9, 4])


def test_options():
    q, levels, k, v = problem(4, 6, 9, [(2, 33)])
    assert_prefix(q, levels, k, v, causal=False, scale=0.2)
    assert_prefix(q, levels, k, v, softcap=3.0, sinks=randn(4, seed=8))


@pytest.mark.parametrize("head_dim", [40, 96])
def test_prefix_and_suffix_merge_by_natural_log(head_dim):
    """Prefix over all queries at once, suffix alone, merged: a base-2 or a scaled LSE would show here."""
    q, [(pk, pv)], k, v = problem(3, 1, 9, [(1, 33)], head_dim=head_dim)
    prefix = attention(q.reshape(1, 3, 4, head_dim), pk, pv, return_lse=True)
    suffix = attention(q, k, v, return_lse=True)
    o, lse = merge(prefix[0].view_as(q), prefix[1].view(4, 3).T[:, :, None].contiguous(), *suffix)
    got = assert_prefix(q, [(pk, pv)], k, v)
    assert torch.allclose(o, got[0], atol=1e-6)
    assert torch.allclose(lse, got[1], atol=1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), max_size=3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(0, 99),
)
def test_any_levels(fanouts, last, seqlen_q, seqlen_k, seed):
    batch, levels = 1, []
    for fanout, length in fanouts:
        batch *= fanout
        levels.append((batch, length))
    assert_prefix(*problem(batch * last, seqlen_q, seqlen_k, levels, heads=(2, 1), head_dim=8, seed=seed))
