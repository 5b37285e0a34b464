"""chunk: decode plans and steps inside blocks of positions, against the float64 oracle; what they read and refuse."""

from __future__ import annotations

import pickle

import pytest
import torch
from decode_tree_cases import grow, make_cache, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_state, randn
from step_cases import assert_step, mixed

from tilewise import attend, decode, grow_plan, plan_decode, plan_step, reference, renew_plan
from tilewise.scores import Reach

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS = st.sampled_from([1, 2, 16, 17, 30, 64, 300])


def assert_chunked(cache, seqs, chunk, *, tokens=1, window=None, plan=None, **options):
    """The plan, whose result the oracle has judged."""
    seen = {"window": window, "chunk": chunk}
    plan = plan or plan_decode(cache, seqs, num_heads=4, tokens_per_seq=tokens, **seen, **options)
    q = randn(len(seqs), tokens, 4, 16, seed=len(seqs))
    exact, honest = (reference.decode(q, cache, 0, seqs, dtype=d, **seen) for d in (torch.float64, torch.float32))
    assert_state(decode(q, cache, 0, plan, return_lse=True), exact, honest)
    return plan


@given(CHUNKS, st.sampled_from([None, 0, 9, 40]), st.integers(-3, 200))
def test_the_first_key_that_a_row_sees(chunk, left, position):
    seen = reference.visible(1, position + 1, causal=True, window=(left, 0), chunk=chunk) if position >= 0 else None
    first = 0 if seen is None else int(seen[0].int().argmax())
    assert Reach(left, chunk).first(position) == first


@given(st.data(), CHUNKS, st.sampled_from([1, 2, 5, 20]), st.sampled_from([None, None, (9, 0)]))
@settings(max_examples=40)
def test_forests(data, chunk, tokens, window):
    """Sequences that share prefixes partly before the boundary and are ahead of each other, one of them empty."""
    cache = make_cache(page_size=data.draw(st.sampled_from([1, 4, 16])), pages=800)
    count = st.sampled_from([1, 15, 16, 31, 63, 65])
    seqs = [*tree(cache, [2, 2], [data.draw(count), data.draw(count)]), cache.allocate()]
    grow(cache, seqs[:3], [data.draw(st.integers(0, 20)) for _ in range(3)], seed=7)
    share = data.draw(st.sampled_from([True, False, "auto"]))
    assert_chunked(cache, seqs, chunk, tokens=tokens, window=window, share_prefix=share)


def test_a_batch_of_65():
    cache = make_cache(pages=2000)
    seqs = tree(cache, [65], [0])
    grow(cache, seqs, [n % 40 for n in range(65)])
    assert_chunked(cache, seqs, 16, tokens=3)


def test_only_the_block_is_read():
    """Of 129 tokens the last one alone, of four query tokens the block before it, too; a shared node from there on."""
    cache = make_cache()
    (seq,) = tree(cache, [1], [129])
    assert plan_decode(cache, [seq], num_heads=4, chunk=64).summary.keys_read == 1
    assert plan_decode(cache, [seq], num_heads=4, chunk=64, tokens_per_seq=4).summary.keys_read == 64 + 1
    assert plan_decode(cache, [seq], num_heads=4, chunk=129).summary.keys_read == 129
    seqs = [seq, cache.fork(seq)]
    grow(cache, seqs, [3, 5])
    plan = plan_decode(cache, seqs, num_heads=4, chunk=100, share_prefix=True)
    assert plan.arrays.nodes[:, 2:4].tolist() == [[100, 128]]
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan_decode(cache, seqs, num_heads=4, chunk=100, share_prefix=True) == plan
    assert plan_decode(cache, seqs, num_heads=4, chunk=101, share_prefix=True) != plan


def test_what_comes_before_the_block_may_be_anything():
    cache = make_cache()
    (seq,) = tree(cache, [1], [129])
    plan = plan_decode(cache, [seq], num_heads=4, chunk=32)
    q = randn(1, 1, 4, 16)
    clean = decode(q, cache, 0, plan)
    for x in (*cache._k, *cache._v):
        x[0, cache.page_list(seq)[:32].tolist()] = torch.nan
    assert torch.equal(decode(q, cache, 0, plan), clean)


@pytest.mark.parametrize("tokens", [1, 3])
def test_growth_across_a_boundary(tokens):
    cache = make_cache()
    seqs = tree(cache, [1, 3], [12, 3])
    plan = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=tokens, chunk=16, share_prefix=True)
    standing = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=tokens, chunk=16, rows=3, max_length=100)
    for step in range(20):
        assert_chunked(cache, seqs, 16, tokens=tokens, plan=plan)
        assert_chunked(cache, seqs, 16, tokens=tokens, plan=standing)
        grow(cache, seqs, [1] * 3, seed=step)
        plan, standing = grow_plan(plan, cache), renew_plan(standing, cache, seqs)
        assert (plan.chunk, standing.now.chunk) == (16, 16)


def test_a_standing_plan_chooses_nodes_anew_when_a_row_comes_to_the_next_block():
    """Until then it keeps those that it has; a sequence in the next block sees none of the node."""
    cache = make_cache()
    seqs = tree(cache, [1, 3], [12, 1])
    plan = plan_decode(cache, seqs, num_heads=4, chunk=16, share_prefix=True, rows=3, max_length=100)
    found = []
    for step in range(5):
        found.append(plan.arrange().nodes)
        grow(cache, seqs, [1] * 3, seed=step)
        renew_plan(plan, cache, seqs)
    assert found[0][:, 2:4].tolist() == [[0, 12]]
    assert all(nodes is found[0] for nodes in found[:4])
    assert len(found[4]) == 0


@pytest.mark.parametrize("backend", ["cpu", "emulator"])
@pytest.mark.parametrize(("chunk", "window"), [(32, None), (20, None), (16, (9, 0))])
def test_steps(chunk, window, backend):
    """Chunks of prompts that lie in several blocks, which begin with a page of 16 tokens or do not, beside decodes."""
    form = {"kv_format": "bf16", "head_dim": 64, "page_size": 16} if backend == "emulator" else {}
    cache, prefill, seqs = mixed(**form)
    dtype = torch.bfloat16 if form else torch.float32
    plan, _, _ = assert_step(
        cache, prefill, seqs, heads=2, chunk=chunk, window=window, share=True, dtype=dtype, backend=backend
    )
    assert (plan.chunk, plan.prefill.chunk, plan.decode.chunk) == (chunk,) * 3
    assert not plan.prefill.nodes


def test_refusals():
    cache, prefill, seqs = mixed()
    for chunk, kind in ((0, ValueError), (-3, ValueError), (True, TypeError), (2.0, TypeError)):
        for plan in (plan_decode, plan_step):
            with pytest.raises(kind, match="chunk must be"):
                plan(cache, seqs if plan is plan_decode else (), num_heads=4, chunk=chunk)
    with pytest.raises(ValueError, match="window None and chunk 8, got one with 4, None and None"):
        plan_step(cache, prefill, plan_decode(cache, seqs, num_heads=4), num_heads=4, chunk=8)
    with pytest.raises(NotImplementedError, match="without a window and a chunk"):
        plan_decode(cache, seqs, num_heads=4, chunk=8, pages_per_seq=2)
    plan = plan_decode(cache, seqs, num_heads=4, chunk=8, tokens_per_seq=2)
    q = randn(len(seqs), 2, 4, 16)
    with pytest.raises(ValueError, match="without a window and a chunk"):
        decode(q, cache, 0, plan, tree_mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="without a window and a chunk"):
        decode(q, cache, 0, plan, indices=torch.zeros(len(seqs), 2, 3, dtype=torch.int32))
    step = plan_step(cache, prefill, plan_decode(cache, seqs, num_heads=4, chunk=8), num_heads=4, chunk=8)
    assert attend(randn(step.rows, 4, 16), cache, 0, step).shape == (65, 4, 16)
