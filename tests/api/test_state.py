"""States: merging is exact, in any grouping; the empty state is neutral and never becomes NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, assert_state, qkv, randn

from tilewise import merge, merge_states, reference
from tilewise.state import Accumulator, add_sinks


def states_of(pieces, dtype=torch.float32, seed=0):
    """The states of one query set over `pieces` disjoint key sets, and over all of them."""
    q, k, v = qkv(2, 5, sum(pieces), 3, 3, 8, seed=seed)
    parts = [
        reference.attention(q, a, b) for a, b in zip(k.split(list(pieces), 1), v.split(list(pieces), 1), strict=True)
    ]
    o, lse = (torch.stack([p[part] for p in parts]).float() for part in (0, 1))
    return o.to(dtype), lse, reference.attention(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pieces", [(7,), (1, 1), (3, 0, 4), (0, 0), (5, 1, 30, 2)])
def test_merged_states_are_the_state_of_all_keys(pieces, dtype):
    o, lse, whole = states_of(pieces, dtype)
    merged = merge_states(o, lse)
    assert merged[0].dtype == dtype
    assert merged[1].dtype == torch.float32
    honest = whole[0].to(dtype), whole[1].float()
    # the states themselves were rounded once before the merge
    assert_state(merged, whole, [h + (h - w).abs().max() for h, w in zip(honest, whole, strict=True)])
    assert_state(reference.merge_states(o, lse), whole, [h * (1 + 1e-2) for h in honest])


def test_two_empty_states_merge_to_the_empty_state():
    o, lse = torch.full((4, 2, 8), float("nan")), torch.full((2, 4), -math.inf)  # garbage in o does not count
    for merged_o, merged_lse in (merge(o, lse, o, lse), merge_states(o[None], lse[None])):
        assert (merged_o == 0).all()
        assert (merged_lse == -math.inf).all()


def test_the_empty_state_is_neutral():
    o, lse = randn(4, 2, 8), randn(2, 4, seed=1, size=100.0)
    nothing = torch.full_like(o, float("nan")), torch.full_like(lse, -math.inf)
    for merged in (merge(o, lse, *nothing), merge(*nothing, o, lse)):
        assert torch.equal(merged[0], o)
        assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("shift", [-1e4, 1e4, 80.0, -120.0])
def test_large_and_small_logs(shift):
    o, lse, whole = states_of((5, 9))
    merged = merge_states(o, lse + shift)
    assert torch.allclose(merged[0].double(), whole[0], atol=1e-3 if abs(shift) > 1e3 else 1e-5)
    assert torch.allclose(merged[1].double() - shift, whole[1], atol=2e-3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 99), st.data())
def test_any_grouping_gives_the_same(pieces, seed, data):
    o, lse, _ = states_of(pieces, seed=seed)
    at = data.draw(st.integers(0, len(pieces) - 1))
    whole = merge_states(o, lse)
    if at:
        whole_again = merge(*merge_states(o[:at], lse[:at]), *merge_states(o[at:], lse[at:]))
        assert torch.allclose(whole[0], whole_again[0], atol=1e-5)
        assert torch.allclose(whole[1], whole_again[1], atol=1e-5)
    order = data.draw(st.permutations(range(len(pieces))))
    permuted = merge_states(o[list(order)], lse[list(order)])
    assert torch.allclose(whole[0], permuted[0], atol=1e-5)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_leading_dimensions(lead):
    o, lse = randn(2, *lead, 5, 4, 8), randn(2, *lead, 4, 5, seed=1)
    merged = merge_states(o, lse)
    assert merged[0].shape == (*lead, 5, 4, 8)
    assert merged[1].shape == (*lead, 4, 5)
    exact = reference.merge_states(o, lse)
    assert torch.allclose(merged[0].double(), exact[0], atol=1e-6)


def test_float64_states_stay_float64():
    o, lse = randn(2, 5, 4, 8).double(), randn(2, 4, 5, seed=1).double()
    assert [x.dtype for x in merge_states(o, lse)] == [torch.float64, torch.float64]


@pytest.mark.parametrize("exclusive", [False, True])
def test_rows_that_nothing_came_to_are_zero(exclusive):
    states = Accumulator(
        (4, 2, 3), torch.float32, exclusive=exclusive, o=torch.full((4, 2, 3), 7.0) if exclusive else None
    )
    states.put(states.o[1:2], states.lse[1:2], torch.ones(1, 2, 3), torch.zeros(1, 2))
    o = states.finish()
    assert (o[1] == 1).all()
    assert (o[[0, 2, 3]] == 0).all()


def test_the_accumulator_merges_like_merge_states():
    o, lse, _ = states_of((4, 0, 9, 2))
    states = Accumulator((5, 3, 8), torch.float32, exclusive=False)
    for part_o, part_lse in zip(o[:, 0], lse[:, 0].transpose(-1, -2), strict=True):
        states.put(states.o, states.lse, part_o, part_lse)
    merged = merge_states(o[:, 0], lse[:, 0])
    assert torch.allclose(states.finish(), merged[0], atol=1e-6)
    assert torch.allclose(states.lse.T, merged[1], atol=1e-6)


def test_sinks_are_a_state_without_values():
    o, lse, _ = states_of((6,))
    sinks = torch.tensor([-1.0, 0.0, 2.0])
    state = merge(o[0], lse[0], torch.zeros_like(o[0]), sinks[None, :, None].expand_as(lse[0]).contiguous())
    joined = add_sinks(o[0], lse[0], sinks)
    assert torch.allclose(joined[0], state[0], atol=1e-6)
    assert torch.allclose(joined[1], state[1], atol=1e-6)
