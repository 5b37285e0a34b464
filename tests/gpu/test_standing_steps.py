"""Standing steps: chunks and decodes that come and go over memory that stays, by the CPU and in the emulator."""

from __future__ import annotations

import pytest
import torch
from decode_tree_cases import grow
from oracle import randn
from recorded import Recorded
from standing_step_cases import (
    BF16,
    LATENT,
    ROWS,
    asked,
    check,
    queries,
    room_for,
    small,
    standing,
    steps_of,
)

from tilewise import attend, plan_decode, plan_step, renew_plan, renew_step
from tilewise.api import standing_step
from tilewise.gpu import beside

pytestmark = pytest.mark.usefixtures("own_card")

APART = {"head_dim": 64, "value_dim": 96}


def kind(x):
    """The name of a test's parameter."""
    return ("latent" if "shared_kv" in x else "apart" if x else "plain") if isinstance(x, dict) else str(x)


@pytest.mark.parametrize(("window", "sizes"), [(None, {}), ((9, 0), {}), ((9, 0), LATENT), (None, APART)], ids=kind)
def test_on_the_cpu(window, sizes):
    cache, seqs = small(kv_format="fp32", **sizes)
    step = standing(cache, window=window)
    for sinks in (None, randn(2)):
        for n, (prefill, decode) in enumerate(steps_of(seqs)):
            assert renew_step(step, cache, prefill, decode) is step
            q = queries(cache, prefill, decode, dtype=torch.float32, seed=n)
            got = attend(q, cache, 0, step, return_lse=True, out=room_for(q, cache), sinks=sinks)
            check(q, got, asked(cache, prefill, decode, q, window=window, sinks=sinks), sinks)


@pytest.mark.parametrize("sizes", [{}, LATENT], ids=kind)
def test_layers_and_steps_share_a_list_of_tiles(sizes):
    """Tiles are listed once per step: not by each layer, and not once more for each step that was."""
    cache, seqs = small(num_layers=3, **sizes)
    step = standing(cache)
    for n, (prefill, decode) in enumerate(steps_of(seqs)[:3]):
        renew_step(step, cache, prefill, decode)
        for layer in range(3):
            attend(queries(cache, prefill, decode, seed=n), cache, layer, step, backend="emulator")
    assert len(standing_step._rooms[step.serial].tiles) == 1


@pytest.mark.parametrize(
    ("order", "sizes"),
    [("decodes first", {}), ("chunks first", {}), ("apart", {}), ("chunks first", LATENT), ("apart", LATENT)],
    ids=kind,
)
def test_a_recorded_call_serves_steps_that_come_and_go(order, sizes, monkeypatch):
    """Sequences join, leave and change sides, in other numbers and lengths: all is read from memory that stays."""

    class Beside:
        def __init__(self, device):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

        def join(self):
            pass

    monkeypatch.setattr(beside, "side_by_side", lambda device: order != "apart")
    monkeypatch.setattr(beside, "Beside", Beside)
    monkeypatch.setattr(beside, "ORDER", order)
    cache, seqs = small(**sizes)
    sinks = None if order == "apart" else randn(2)
    step = standing(cache)
    q = randn(ROWS, 2, cache.head_dim, dtype=BF16)
    out = room_for(q, cache)
    call = {"return_lse": True, "out": out, "backend": "emulator", "sinks": sinks}
    attend(q, cache, 0, step, **call)  # compiles, and makes what stays
    renew_step(step, cache, [], [])  # whatever a call does once per step is recorded
    recorded = Recorded(monkeypatch)
    with recorded:
        o, lse = attend(q, cache, 0, step, **call)
    for n, (prefill, decode) in enumerate(steps_of(seqs)[: None if order == "apart" else 2]):
        if n == 2:
            grow(cache, seqs, [3, 20, 1, 16, 2, 1], seed=9)
        renew_step(step, cache, prefill, decode)
        q.copy_(queries(cache, prefill, decode, seed=n))
        out.fill_(float("nan"))
        recorded.replay()
        check(q, (o, lse), asked(cache, prefill, decode, q, backend="emulator", sinks=sinks), sinks)


def test_one_plan_of_decodes_serves_steps_of_several_sizes():
    cache, seqs = small(kv_format="fp32")
    steps = [standing(cache)]
    steps.append(plan_step(cache, [], steps[0].decode, num_heads=2, rows=8, max_chunks=1))
    renew_plan(steps[0].decode, cache, seqs[:2])
    for step, prefill in zip(steps, ([(seqs[4], 30)], [(seqs[3], 6)]), strict=True):
        renew_step(step, cache, prefill)
        q = randn(step.rows, 2, 64)
        check(q, attend(q, cache, 0, step, return_lse=True), asked(cache, prefill, seqs[:2], q))
        assert "2 decodes, 1 chunks" in step.show()


def test_what_does_not_fit_is_refused_and_nothing_changes():
    cache, seqs = small(kv_format="fp32")
    step = standing(cache, [(seqs[0], 5)], seqs[1:3])
    for prefill, decode, words in (
        ([(seqs[4], 39)], None, "at most the plan's 40 rows together, got 41, 2 of which are decodes"),
        ([(seq, 1) for seq in (seqs[0], *seqs[3:])], None, "at most the plan's 3 chunks, got 4"),
        ([(seqs[1], 1)], None, "once, got sequence"),
        ([(seqs[0], 1), (seqs[0], 2)], None, "once, got sequence"),
        ([(seqs[0], 99)], None, "at most the 37 tokens"),
        ([], seqs * 2, "once"),
    ):
        with pytest.raises(ValueError, match=words):
            renew_step(step, cache, prefill, decode)
        assert step.chunks == ((seqs[0], 5),)
    grow(cache, [seqs[0]], [1], seed=4)
    with pytest.raises(ValueError, match="had 37 tokens and now has 38; call renew_step"):
        attend(randn(ROWS, 2, 64), cache, 0, step)
    grow(cache, [seqs[4]], [70], seed=5)
    with pytest.raises(ValueError, match="max_length of 100 tokens"):
        renew_step(step, cache, [(seqs[4], 1)])


def test_refusals():
    cache, seqs = small(kv_format="fp32")
    plan = plan_decode(cache, seqs[:1], num_heads=2, rows=6, max_length=100)
    with pytest.raises(TypeError, match="plan of plan_decode"):
        plan_step(cache, [], seqs[:2], num_heads=2, rows=8, max_chunks=1)
    with pytest.raises(ValueError, match=r"rows must be.*6"):
        plan_step(cache, [], plan, num_heads=2, rows=4, max_chunks=1)
    with pytest.raises(ValueError, match="max_chunks must be given with rows"):
        plan_step(cache, [], plan, num_heads=2, rows=8)
    with pytest.raises(TypeError, match="rows"):
        plan_step(cache, [], plan, num_heads=2, max_chunks=8)
    several = plan_decode(cache, seqs[:1], num_heads=2, rows=6, max_length=100, tokens_per_seq=2)
    with pytest.raises(NotImplementedError, match="one token per sequence"):
        plan_step(cache, [], several, num_heads=2, rows=8, max_chunks=1)
    with pytest.raises(TypeError, match=r"plan_step\(\.\.\., rows=, max_chunks=\)"):
        renew_step(plan_step(cache, [], seqs[:1], num_heads=2), cache, [])
    step = plan_step(cache, [], plan, num_heads=2, rows=8, max_chunks=1)
    with pytest.raises(NotImplementedError, match="pages of q's dtype"):
        attend(randn(8, 2, 64, dtype=BF16), cache, 0, step, backend="emulator")
    with pytest.raises(ValueError, match="q"):
        attend(randn(7, 2, 64), cache, 0, step)
