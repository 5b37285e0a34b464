"""Standing steps on a card: one captured attend() serves steps in which chunks and decodes come and go."""

from __future__ import annotations

import pytest
import torch
from standing_cases import Churn

import tilewise as tw
from tilewise.gpu import beside

pytestmark = pytest.mark.gpu
DECODES, ROWS = 24, 200


@pytest.mark.parametrize("order", ["decodes first", "chunks first", "apart"])
@pytest.mark.parametrize("seen", [{}, {"window": (40, 0)}, {"chunk": 64}], ids=["all", "window", "chunk"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(32, 8, 128, None), (16, 1, 576, 512), (128, 1, 576, 512)],
    ids=["plain", "latent-16", "latent-128"],
)
def test_one_graph_serves_chunks_and_decodes_that_come_and_go(
    heads, kv_heads, dim, value_dim, seen, order, monkeypatch
):
    """To the bit of plans that are made for each step, two layers in a row; what is idle gives 0."""
    monkeypatch.setattr(beside, "ORDER", order)
    of = Churn(1, "bf16", torch.bfloat16, kv_heads, 16, dim=dim, value_dim=value_dim, pages=4000, device="cuda")
    options = {"num_heads": heads, "share_prefix": False, **seen}
    plan = tw.plan_decode(of.cache, [], rows=DECODES, max_length=4000, **options)
    step = tw.plan_step(of.cache, [], plan, rows=ROWS, max_chunks=6, **options)
    q = torch.randn(ROWS, heads, dim, device="cuda").bfloat16()
    sinks = torch.randn(heads, device="cuda")
    call = {"return_lse": True, "sinks": sinks}
    out = q.new_empty(ROWS, heads, of.cache.value_dim)
    tw.attend(q, of.cache, 0, step, out=out, **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tw.attend(q, of.cache, 0, step, out=torch.empty_like(out), **call)
        _, lse = tw.attend(q, of.cache, 0, step, out=out, **call)
    for _ in range(30):
        of.step(DECODES)
        named = [seq for seq in of.seqs if of.cache.length(seq)]
        chunks, left = [], ROWS - DECODES
        while named and len(chunks) < 6 and of.r.random() < 0.8:
            seq = named.pop(of.r.randrange(len(named)))
            chunks.append((seq, min(left, of.r.randrange(1, of.cache.length(seq) + 1))))
            left -= chunks[-1][1]
            if not left:
                break
        decodes = named
        tw.renew_step(step, of.cache, chunks, decodes)
        q.normal_()
        used = len(decodes) + sum(tokens for _, tokens in chunks)
        q[used:] = float("nan")
        graph.replay()
        same = tw.plan_step(of.cache, chunks, decodes, **options)
        rows = torch.cat([torch.arange(len(decodes), used), torch.arange(len(decodes))]).cuda()
        expected, logs = tw.attend(q[rows], of.cache, 0, same, **call)
        close = {"atol": 2e-2, "rtol": 0}
        torch.testing.assert_close(out[rows].float(), expected.float(), **close)
        torch.testing.assert_close(lse[:, rows], logs, **close)
        if same.prefill is None or not same.prefill.nodes:
            assert torch.equal(out[rows], expected)
        assert not out[used:].any()
        assert torch.equal(lse[:, used:], sinks[:, None].expand(-1, ROWS - used))
