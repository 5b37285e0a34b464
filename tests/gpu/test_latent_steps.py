"""Standing steps over rows that are keys and values at once, in the emulator: decodes by the MLA kernel, chunks by the
forward, over memory that stays. test_standing_steps.py has what they share with those over K and V."""

from __future__ import annotations

import weakref

import pytest
import torch
from decode_tree_cases import grow, make_cache
from oracle import randn
from standing_step_cases import (
    BF16,
    LATENT,
    ROWS,
    asked,
    check,
    check_idle,
    judge,
    queries,
    room_for,
    small,
    standing,
    steps_of,
)
from step_cases import judge_step

from tilewise import attend, decode, emulator, plan_decode, plan_step, renew_plan, renew_step
from tilewise.gpu.decode import kept

pytestmark = pytest.mark.usefixtures("own_card")

DEEPSEEK = {"head_dim": 576, "value_dim": 512, "shared_kv": True}


def run(cache, step, prefill, decodes, q, **options):
    """(o, lse) of a standing step that is renewed for these first."""
    renew_step(step, cache, prefill, decodes)
    out = room_for(q, cache)
    o, lse = attend(q, cache, 0, step, return_lse=True, out=out, backend="emulator", **options)
    assert o is out
    return o, lse


def test_rows_are_those_of_a_plan_of_just_this_step():
    """To the bit, and right, while sequences join, leave, change sides, fork and grow over whole pages."""
    cache, seqs = small(**LATENT)
    step = standing(cache)
    for n, (prefill, decodes) in enumerate(steps_of(seqs)):
        if n == 2:
            cache.free(seqs[5])
            seqs[5] = cache.fork(seqs[4])
            grow(cache, seqs, [3, 20, 1, 16, 2, 1], seed=9)
            prefill, decodes = steps_of(seqs)[n]
        q = queries(cache, prefill, decodes, seed=n)
        got = run(cache, step, prefill, decodes, q)
        check(q, got, asked(cache, prefill, decodes, q, backend="emulator"))
        judge(cache, prefill, decodes, q, got)


def test_deepseeks_rows_and_every_option():
    """576 channels, of which the forward makes 512 columns in two slices; scores of up to ±1e4."""
    cache, seqs = small(**DEEPSEEK)
    prefill, decodes = steps_of(seqs)[0]
    step = standing(cache, window=(9, 0), num_heads=8)
    for options in ({"scale": 192**-0.5}, {"softcap": 3.0, "sinks": randn(8, seed=4), "scale": -0.05}, {"size": 1e3}):
        q = queries(cache, prefill, decodes, heads=8, size=options.pop("size", 1.0))
        got = run(cache, step, prefill, decodes, q, **options)
        judge(cache, prefill, decodes, q, got, window=(9, 0), **options)


def test_a_decode_has_the_same_bits_whatever_stands_beside_it():
    cache, (a, b, c, d, e, f) = small(**LATENT)
    step, row = standing(cache), randn(2, 192, dtype=BF16, seed=3)
    found = []
    for prefill, decodes in (([], [b]), ([], [c, b, a]), ([(a, 3), (e, 30)], [b, d]), ([(c, 33)], [f, e, d, a, b])):
        q = queries(cache, prefill, decodes, seed=len(found))
        at = decodes.index(b)
        q[at] = row
        o, lse = run(cache, step, prefill, decodes, q)
        found.append((o[at], lse[:, at]))
    alone = decode(row[None, None], cache, 0, plan_decode(cache, [b], num_heads=2), return_lse=True, backend="emulator")
    for o, lse in found:
        assert torch.equal(o, alone[0][0, 0])
        assert torch.equal(lse, alone[1][0, :, 0])


def test_lengths_at_the_edges_of_tiles_and_an_empty_sequence():
    cache = make_cache(page_size=16, pages=80, kv_heads=1, kv_format="bf16", **LATENT)
    seqs = cache.allocate(9)
    grow(cache, seqs, [1, 63, 65, 127, 129, 1, 63, 65, 0], seed=3)
    chunks, decodes = [(seqs[n], length) for n, length in enumerate((1, 63, 65, 2, 129))], seqs[5:]
    plan = plan_decode(cache, [], num_heads=2, rows=5, max_length=130, share_prefix=False)
    step = plan_step(cache, [], plan, num_heads=2, rows=270, max_chunks=6)
    q = queries(cache, chunks, decodes, rows=270, seed=2)
    got = run(cache, step, chunks, decodes, q)
    judge(cache, chunks, decodes, q, got)
    assert (got[0][3] == 0).all()  # of the sequence without a token
    assert (got[1][:, 3] == -torch.inf).all()


def test_decodes_share_a_prefix_that_chunks_have_too():
    """Their rows stand over its tokens together, in one standing plan for steps of two sizes."""
    cache, (a, b, c, d, e, f) = small(**LATENT)
    more = [cache.fork(a) for _ in range(3)]
    grow(cache, more, [1, 2, 3], seed=6)
    step = standing(cache, share=True)
    wide = plan_step(cache, [], step.decode, num_heads=2, rows=64, max_chunks=2)
    assert step.decode.share
    for n, (one, prefill, decodes) in enumerate(
        (
            (step, [(b, 18), (e, 9)], [a, *more, d, c]),
            (wide, [(b, 50)], [more[2], f, more[0], a]),
            (step, [], [*more, c]),
        )
    ):
        renew_plan(step.decode, cache, decodes)
        q = queries(cache, prefill, decodes, rows=one.rows, seed=n)
        judge(cache, prefill, decodes, q, run(cache, one, prefill, None, q))
        assert step.decode.now.shared_nodes


def test_which_kernels_run(monkeypatch):
    """The list of tiles once per step, and in each layer one launch for decodes and one for chunks."""
    names, real = [], emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda spec, *rest, **more: names.append(spec.name) or real(spec, *rest, **more)
    )
    cache, seqs = small(num_layers=2, **LATENT)
    step = standing(cache)
    for prefill, decodes in steps_of(seqs)[:2]:
        renew_step(step, cache, prefill, decodes)
        names.clear()
        for layer in range(2):
            attend(queries(cache, prefill, decodes), cache, layer, step, backend="emulator")
    assert names == ["decode_plan", "mla_decode", "forward", "mla_decode", "forward"]


def test_layers_of_a_graph_take_turns_at_one_scratch(monkeypatch):
    """States of latent rows are large: a layer's are given back before the next one's are asked for."""
    cache, seqs = small(**LATENT)
    plan = plan_decode(cache, seqs, num_heads=2, rows=6, max_length=100)
    decode(randn(6, 1, 2, 192, dtype=BF16), cache, 0, plan, backend="emulator")
    (bound,) = kept(plan).bound.values()
    states, real = weakref.ref(bound._workspace(None).o), torch.empty
    asked_for = []
    monkeypatch.setattr(torch, "empty", lambda *n, **of: (asked_for.append(states()), real(*n, **of))[1])
    bound._workspace(None)
    assert asked_for == [None] * 3
    stays = bound._workspace(0)
    assert bound._workspace(0) is stays  # of a stream


def test_out_may_be_the_memory_of_q():
    cache, seqs = small(**LATENT)
    prefill, decodes = steps_of(seqs)[0]
    step = standing(cache, prefill, decodes)
    q = queries(cache, prefill, decodes)
    expected = attend(q, cache, 0, step, backend="emulator")
    both = torch.full((ROWS, 2, 192), float("nan"), dtype=BF16)
    both.copy_(q)
    assert attend(both, cache, 0, step, out=both[..., :128], backend="emulator").data_ptr() == both.data_ptr()
    assert torch.equal(both[..., :128], expected)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_codes_are_decoded_by_standing_plans(name):
    """A step with chunks needs their pages widened, and says what does that."""
    cache, seqs = small(kv_format=name, **DEEPSEEK)
    step = standing(cache, decodes=3, num_heads=8)
    for decodes in (seqs[:2], seqs[3:], [seqs[2]]):
        renew_plan(step.decode, cache, decodes)
        q = queries(cache, [], decodes, rows=3, heads=8, seed=len(decodes))[:, None]
        o, lse = decode(q, cache, 0, step.decode, return_lse=True, backend="emulator")
        once = plan_decode(cache, decodes, num_heads=8, share_prefix=False)
        expected = decode(q[: len(decodes)], cache, 0, once, return_lse=True, backend="emulator")
        assert torch.equal(o[: len(decodes)], expected[0])
        assert torch.equal(lse[: len(decodes)], expected[1])
        check_idle(q[:, 0], (o[:, 0], lse[..., 0].T), len(decodes))
    with pytest.raises(NotImplementedError, match=f"pages of q's dtype, got torch.bfloat16 over {name}; leave rows"):
        attend(queries(cache, [], seqs[:1], heads=8), cache, 0, step, backend="emulator")


def test_refusals():
    apart, seqs = small(head_dim=64, value_dim=80)
    step = standing(apart, [(seqs[0], 3)], seqs[1:2])
    with pytest.raises(NotImplementedError, match=r"a head_dim of V .* got 80; write zeros"):
        attend(queries(apart, [(seqs[0], 3)], seqs[1:2]), apart, 0, step, backend="emulator")
    once = plan_step(apart, [(seqs[0], 3)], seqs[1:2], num_heads=2)  # whose decodes go with the chunks
    q = randn(4, 2, 64, dtype=BF16)
    o, lse = attend(q, apart, 0, once, return_lse=True, backend="emulator")
    judge_step(q, o, lse, apart, 0, once)
    plain, seqs = small(kv_format="fp32", **LATENT)
    step = standing(plain, [(seqs[0], 3)], seqs[1:2])
    with pytest.raises(NotImplementedError, match="takes bfloat16 queries over bf16"):
        attend(queries(plain, [(seqs[0], 3)], seqs[1:2], dtype=torch.float32), plain, 0, step, backend="emulator")
    with pytest.raises(ValueError, match=r"out .*128"):
        attend(randn(ROWS, 2, 192), plain, 0, step, out=randn(ROWS, 2, 192))
