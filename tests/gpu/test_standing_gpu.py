"""Standing plans on a card: one captured decode serves steps in which sequences come, go, fork and grow."""

from __future__ import annotations

import pytest
import torch
from standing_cases import Churn

import tilewise as tw
from tilewise.gpu.decode import kept
from tilewise.kvcache.slots import room_for

pytestmark = pytest.mark.gpu
HEADS, GROUP, ROWS = 8, 4, 24


@pytest.mark.parametrize("chunk", [None, 200])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("kv_format", "heads", "kv_heads", "dim", "value_dim"),
    [("bf16", 32, 8, 128, None), *((name, 16, 1, 576, 512) for name in ("bf16", "fp8", "int8"))],
    ids=["plain", "latent", "latent-fp8", "latent-int8"],
)
def test_one_graph_serves_sequences_that_come_and_go(kv_format, heads, kv_heads, dim, value_dim, share, chunk):
    of = Churn(1, kv_format, torch.bfloat16, kv_heads, 16, dim=dim, value_dim=value_dim, pages=4000, device="cuda")
    options = {"num_heads": heads, "share_prefix": share, "chunk": chunk}
    plan = tw.plan_decode(of.cache, [], rows=ROWS, max_length=2000, **options)
    q = torch.randn(ROWS, 1, heads, dim, device="cuda").bfloat16()
    out = q.new_empty(ROWS, 1, heads, of.cache.value_dim)
    tw.decode(q, of.cache, 0, plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tw.decode(q, of.cache, 0, plan, out=out)
    for _ in range(40):
        of.step(ROWS)
        tw.renew_plan(plan, of.cache, of.seqs)
        q.normal_()
        graph.replay()
        count = len(of.seqs)
        assert not out[count:].any()
        alone = tw.plan_decode(of.cache, of.seqs, num_heads=heads, share_prefix=False, chunk=chunk)
        expected = tw.decode(q[:count], of.cache, 0, alone)
        if not share:
            assert torch.equal(out[:count], expected)
        torch.testing.assert_close(out[:count].float(), expected.float(), atol=2e-2, rtol=0)


def test_a_graph_makes_the_list_once_in_each_replay():
    """For all its layers, whether the plan was renewed once or twice since, or layers ran without the graph."""
    of = Churn(2, "bf16", torch.bfloat16, HEADS, 16, dim=128, pages=4000, device="cuda")
    plan = tw.plan_decode(of.cache, [], num_heads=HEADS * GROUP, rows=ROWS, max_length=2000, share_prefix=False)
    q = torch.randn(ROWS, 1, HEADS * GROUP, 128, device="cuda").bfloat16()
    out = torch.empty(2, *q.shape, device="cuda", dtype=q.dtype)
    tw.decode(q, of.cache, 0, plan)
    (listed,) = kept(plan).lists.values()
    launches = []
    launch, listed.launch = listed.launch, lambda stream: (launches.append(stream), launch(stream))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in out:
            tw.decode(q, of.cache, 0, plan, out=layer)
    assert len(launches) == 1
    for step in range(30):
        of.step(ROWS)
        for _ in range(1 + step % 3):
            tw.renew_plan(plan, of.cache, of.seqs)
        if step % 4 == 3:
            for layer in out:
                tw.decode(q, of.cache, 0, plan, out=layer)
        else:
            graph.replay()
        count = len(of.seqs)
        fresh = tw.plan_decode(of.cache, of.seqs, num_heads=HEADS * GROUP, share_prefix=False)
        expected = tw.decode(q[:count], of.cache, 0, fresh)
        for layer in out:
            assert torch.equal(layer[:count], expected)
    assert len(launches) == 1 + 7


def test_places_come_with_the_plan():
    of = Churn(4, "bf16", torch.bfloat16, HEADS, 16, dim=128, pages=4000, device="cuda")
    while len(of.seqs) < 8:
        of.step(ROWS)
    seqs = of.seqs[:8]
    slots = room_for(of.cache, ROWS, planned=True)
    plan = tw.plan_decode(of.cache, seqs, num_heads=HEADS * GROUP, rows=ROWS, max_length=2000)
    q = torch.randn(ROWS, 1, HEADS * GROUP, 128, device="cuda").bfloat16()
    tw.decode(q, of.cache, 0, plan)
    for _ in range(40):
        slots = of.cache.extend(seqs, 1, into=slots)
        tw.renew_plan(plan, of.cache, seqs)
        assert slots._places.late is None
        assert slots.all_index.tolist() == slots.host_index.tolist() + [-1] * (ROWS - 8)
        assert slots.all_positions.tolist() == slots.host_positions.tolist() + [0] * (ROWS - 8)
        of.cache.mark_written(slots)
