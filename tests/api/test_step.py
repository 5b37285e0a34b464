"""plan_step() and attend(): chunks of prompts beside decodes equal every sequence alone, whatever they share."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from decode_tree_cases import grow, make_cache, tree
from hypothesis import given
from hypothesis import strategies as st
from oracle import DTYPES, poison, randn
from step_cases import assert_step, judge_step, mixed

from tilewise import (
    CostModel,
    PagedKVCache,
    PrefixCache,
    attend,
    attention_varlen,
    decode,
    plan_decode,
    plan_step,
    renew_plan,
)

FREE = CostModel(item_us=0.0, kv_bytes_per_us=1.0, flops_per_us=1e12, row_state_us=0.0)  # sharing always pays
DEAR = CostModel(item_us=1e9, kv_bytes_per_us=1.0, flops_per_us=1.0, row_state_us=1.0)  # and never


@pytest.mark.parametrize("share", [False, True, "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_beside_decodes(dtype, share):
    cache, prefill, seqs = mixed(kv_format={4: "fp32", 2: "bf16"}[dtype.itemsize])
    plan, _, _ = assert_step(cache, prefill, seqs, dtype=dtype, share=share)
    assert plan.prefill_rows == 61
    assert plan.rows == 65
    assert len(plan.prefill.nodes) == (share is True)  # a dozen short tiles are not worth a merge


def test_decodes_are_those_of_decode_to_the_bit_and_unshared_chunks_do_not_ask_who_is_beside_them():
    cache, prefill, seqs = mixed()
    q = randn(65, 4, 16)
    o, lse = attend(q, cache, 0, plan_step(cache, prefill, seqs, num_heads=4), return_lse=True)
    alone = decode(q[61:, None], cache, 0, plan_decode(cache, seqs, num_heads=4), return_lse=True)
    assert torch.equal(o[61:], alone[0][:, 0])
    assert torch.equal(lse[:, 61:], alone[1][..., 0].T)
    row = 0
    for seq, tokens in prefill:
        rows = slice(row, row + tokens)
        plan = plan_step(cache, [(seq, tokens)], num_heads=4, share_prefix=False)
        one = attend(q[rows], cache, 0, plan, return_lse=True)
        assert torch.equal(one[0], o[rows])
        assert torch.equal(one[1], lse[:, rows])
        row += tokens


def test_a_decode_plan_made_before():
    cache, prefill, seqs = mixed()
    known = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=2)
    plan, _, _ = assert_step(cache, prefill, known)
    assert plan.decode is known
    assert plan.rows == 61 + 8


@pytest.mark.parametrize("sinks", [None, randn(4, seed=3)], ids=["plain", "sinks"])
def test_a_standing_plan(sinks):
    """Sequences come and go under it; its idle rows are the last ones, and are not read."""
    cache, prefill, seqs = mixed()
    standing = plan_decode(cache, seqs[:3], num_heads=4, rows=6, max_length=200)
    for now in (seqs[:3], seqs[1:], []):
        renew_plan(standing, cache, now)
        plan = plan_step(cache, prefill, standing, num_heads=4)
        assert plan.rows == 61 + 6
        assert plan.show().endswith(standing.show())
        q = randn(67, 4, 16)
        used = 61 + len(now)
        q[used:] = float("nan")
        o, lse = attend(q, cache, 0, plan, sinks=sinks, return_lse=True, out=poison(q))
        same = plan_step(cache, prefill, now, num_heads=4)
        judge_step(q[:used], o[:used], lse[:, :used], cache, 0, same, sinks=sinks)
        assert (o[used:] == 0).all()
        assert torch.equal(lse[:, used:], torch.full((4, 1), -torch.inf).expand(4, 6 - len(now)) if sinks is None
                           else sinks[:, None].expand(4, 6 - len(now)))  # fmt: skip


@pytest.mark.parametrize("sides", ["prefill", "decode", "neither"])
def test_either_side_may_be_empty(sides):
    cache, prefill, seqs = mixed()
    plan, o, _ = assert_step(cache, prefill if sides == "prefill" else [], seqs if sides == "decode" else [])
    assert (plan.prefill is None, plan.decode is None) == (sides != "prefill", sides != "decode")
    assert len(o) == {"prefill": 61, "decode": 4, "neither": 0}[sides]
    assert plan.show().startswith("step: ")


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kv_format", ["fp16", "fp8", "int8", "int4"])
def test_formats(kv_format, share):
    cache, prefill, seqs = mixed(kv_format=kv_format, num_layers=2, head_dim=64)
    assert_step(cache, prefill, seqs, layer=1, share=share, dtype=torch.bfloat16)
    assert_step(cache, prefill, seqs, layer=1, share=share, sinks=randn(4))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (5, None)}, {"window": (64, 0)}, {"window": (None, 3)}, {"softcap": 3.0}, {"scale": -0.3},
        {"sinks": randn(4, seed=9)},
        {"window": (20, 0), "softcap": 2.0, "sinks": randn(4, seed=9, dtype=torch.float16)},
    ],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_score_options(options, share):
    plan, _, _ = assert_step(*mixed(), share=share, **options)
    left = (options.get("window") or (None,))[0]
    assert bool(plan.prefill.nodes) == (share and left is None)


@pytest.mark.parametrize(("head_dim", "heads"), [(1, (1, 1)), (80, (6, 2)), (300, (4, 1)), (512, (2, 2))])
@pytest.mark.parametrize("page_size", [1, 7, 256])
def test_head_dims_and_pages(page_size, head_dim, heads):
    cache, prefill, seqs = mixed(head_dim=head_dim, kv_heads=heads[1], page_size=page_size)
    assert_step(cache, prefill, seqs, heads=heads[0], share=True)


def test_a_tree_of_shared_chunks():
    """A node under a node; a chunk whose own tokens are another's prefix ends what all of them share."""
    cache = make_cache()
    seqs = tree(cache, [1, 2, 2], [24, 12, 9])
    prefill = [(seqs[n], tokens) for n, tokens in ((3, 5), (0, 9), (2, 9), (1, 2))]
    plan, _, _ = assert_step(cache, prefill, [], share=True)
    assert [(n.end - n.first, n.start, n.stop, n.level) for n in plan.prefill.nodes] == [
        (4, 0, 24, 0), (2, 24, 36, 1), (2, 24, 36, 1),
    ]  # fmt: skip
    assert plan.prefill.summary.keys_read < sum(plan.prefill.lengths)
    assert plan.prefill.stored == 24 + 2 * 12 + 4 * 9
    whole, _, _ = assert_step(cache, [(seqs[0], 31), *prefill[2:]], [], share=True)
    assert [n.stop for n in whole.prefill.nodes if n.end - n.first == 3] == [12]  # of 15 tokens, whole pages


def test_the_cost_model_decides():
    cache, prefill, seqs = mixed()
    assert len(assert_step(cache, prefill, seqs, cost=FREE)[0].prefill.nodes) == 1
    assert not assert_step(cache, prefill, seqs, cost=DEAR)[0].prefill.nodes
    # A node above that does not pay leaves its tokens to the one below.
    pays_two = CostModel(item_us=0.0, kv_bytes_per_us=1.0, flops_per_us=1e12, row_state_us=60.0, margin=1.0)
    deep = make_cache()
    family = tree(deep, [1, 2, 3], [4, 60, 4])
    plan, _, _ = assert_step(deep, [(seq, 4) for seq in family], [], cost=pays_two)
    assert [(n.end - n.first, n.start, n.stop, n.level) for n in plan.prefill.nodes] == [(3, 0, 64, 0)] * 2


def test_prompts_of_a_prefix_cache():
    prefix = PrefixCache(make_cache())
    prompts = [[*range(30), 100 + n, *range(n)] for n in range(3)]
    seqs = []
    for n, prompt in enumerate(prompts):
        seq, _, slots = prefix.insert(prompt)
        prefix.cache.write(0, slots, randn(len(slots), 2, 16, seed=n), randn(len(slots), 2, 16, seed=n + 50))
        seqs.append(seq)
    plan, _, _ = assert_step(prefix, [(seqs[0], 3), (seqs[2], 2)], [seqs[1]], share=True)
    assert len(plan.prefill.nodes) == 1


def test_a_cache_over_pages_of_others():
    table = torch.tensor([[3, 1, -1], [3, 2, 0], [4, 5, 6]], dtype=torch.int32)
    cache = PagedKVCache.from_pages(randn(8, 4, 2, 16), randn(8, 4, 2, 16, seed=1), table, torch.tensor([7, 12, 9]))
    plan, _, _ = assert_step(cache, [(1, 8), (0, 3)], [2], share=True)
    assert [(n.start, n.stop) for n in plan.prefill.nodes] == [(0, 4)]


def test_out_may_be_q_itself_or_a_view():
    cache, prefill, seqs = mixed()
    plan = plan_step(cache, prefill, seqs, num_heads=4)
    q = randn(65, 4, 16)
    expected = attend(q, cache, 0, plan)
    wide = poison(torch.empty(65, 8, 16))
    view = wide[:, ::2]
    assert attend(q, cache, 0, plan, out=view) is view
    assert torch.equal(view, expected)
    assert wide[:, 1::2].isnan().all()
    assert attend(q, cache, 0, plan, out=q) is q
    assert torch.equal(q, expected)


def test_a_plan_is_a_value(tmp_path):
    cache, prefill, seqs = mixed()
    plan = plan_step(cache, prefill, seqs, num_heads=4, share_prefix=True)
    again = plan_step(cache, np.array(prefill), torch.tensor(seqs), num_heads=4, share_prefix=True)
    assert plan == again
    assert hash(plan) == hash(again)
    for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert copied == plan
        assert copied.serial != plan.serial
    q = randn(65, 4, 16)
    assert torch.equal(attend(q, cache, 0, plan), attend(q, cache, 0, copied))
    assert plan != plan_step(cache, prefill, seqs[:3], num_heads=4, share_prefix=True)
    plan.prefill.draw(tmp_path / "chunks.svg")
    assert (tmp_path / "chunks.svg").stat().st_size
    shown = plan.show("H100")
    assert "3 chunks of 61 tokens, 1 shared prefixes; 4 decodes" in shown
    assert "prefill plan" in shown
    assert "decode plan" in shown


def test_chunks_are_packed_attention_over_the_same_pages():
    cache, prefill, _ = mixed()
    seqs = [seq for seq, _ in prefill]
    plan, o, lse = assert_step(cache, prefill, [])
    (k,), (v,) = cache.parts(0)
    q = randn(plan.rows, 4, 16, seed=5)
    starts = [torch.tensor([0, *np.cumsum(n)]) for n in (plan.prefill.tokens, plan.prefill.lengths)]
    packed = attention_varlen(q, k, v, *starts, causal=True, page_table=cache.page_table(seqs), return_lse=True)
    assert torch.allclose(o, packed[0], atol=1e-6)
    assert torch.allclose(lse, packed[1], atol=1e-6)


@given(st.data())
def test_any_step_equals_each_sequence_alone(data):
    draw = data.draw
    cache = make_cache(page_size=draw(st.sampled_from([1, 2, 4, 8])))
    fanouts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    seqs = tree(cache, fanouts, [draw(st.integers(0, 20)) for _ in fanouts])
    grow(cache, seqs, [draw(st.integers(1, 9)) for _ in seqs], seed=9)
    kinds = [draw(st.sampled_from(["prefill", "decode", "neither"])) for _ in seqs]
    prefill = [
        (s, draw(st.integers(1, cache.length(s)))) for s, kind in zip(seqs, kinds, strict=True) if kind == "prefill"
    ]
    prefill = draw(st.permutations(prefill))
    decodes = [s for s, kind in zip(seqs, kinds, strict=True) if kind == "decode"]
    window = draw(st.sampled_from([None, (3, 0), (17, None)]))
    assert_step(cache, prefill, decodes, share=draw(st.sampled_from([True, False, "auto"])), window=window)
