"""Standing plans on a card: one captured decode serves steps in which sequences come, go, fork and grow."""

from __future__ import annotations

import pytest
import torch
from standing_cases import Churn

import tilewise as tw

pytestmark = pytest.mark.gpu
HEADS, GROUP, ROWS = 8, 4, 24


@pytest.mark.parametrize("share", [False, True])
def test_one_graph_serves_sequences_that_come_and_go(share):
    of = Churn(1, "bf16", torch.bfloat16, HEADS, 16, dim=128, pages=4000, device="cuda")
    options = {"num_heads": HEADS * GROUP, "share_prefix": share}
    plan = tw.plan_decode(of.cache, [], rows=ROWS, max_length=2000, **options)
    q = torch.randn(ROWS, 1, HEADS * GROUP, 128, device="cuda").bfloat16()
    out = torch.empty_like(q)
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
        alone = tw.plan_decode(of.cache, of.seqs, num_heads=HEADS * GROUP, share_prefix=False)
        expected = tw.decode(q[:count], of.cache, 0, alone)
        if not share:
            assert torch.equal(out[:count], expected)
        torch.testing.assert_close(out[:count].float(), expected.float(), atol=2e-2, rtol=0)
