"""flash_mla_sparse_fwd, and flash_mla_with_kvcache over listed rows, on a card: by the oracle, without waiting for it,
and in CUDA graphs."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from flash_mla_cases import BF16, DEEPSEEK, Sparse
from oracle import randn

from tilewise import reference
from tilewise.compat import flash_mla
from tilewise.gpu import mla_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize(("s_q", "s_kv", "topk"), [(1, 4000, 2048), (300, 65, 129), (70, 5000, 2048), (2, 1, 64)])
def test_rows_that_tokens_name(heads, s_q, s_kv, topk):
    problem = Sparse.of(s_q, s_kv, topk, heads, DEEPSEEK, scale=192**-0.5)
    problem.check("cuda", kernel=True, step=max(1, s_q // 9))
    problem.counts = torch.randint(-1, topk + 9, (s_q,), generator=torch.Generator().manual_seed(1))
    problem.sink = randn(heads, seed=3)
    problem.check("cuda", kernel=True, step=max(1, s_q // 9))


def test_thousands_of_tokens():
    Sparse.of(4096, 9000, 2048, 64, DEEPSEEK, torch.float16).check("cuda", kernel=True, step=511)


def test_tokens_have_the_same_bits_in_any_large_number():
    problem = Sparse.of(400, 3000, 2048, 128, DEEPSEEK)
    together = problem.run("cuda")
    problem.q, problem.indices = problem.q[70:271], problem.indices[70:271]
    for some, all_of_them in zip(problem.run("cuda"), together, strict=True):
        assert torch.equal(some, all_of_them[70:271])


def calls(tokens, seed=0):
    """A call of either kind on tensors that stay, and what they are made of anew by `draw`."""
    q, kv = (torch.zeros(*shape, dtype=BF16, device="cuda") for shape in ((tokens, 64, 576), (3000, 1, 576)))
    indices = torch.zeros(tokens, 1, 1000, dtype=torch.int32, device="cuda")
    counts = torch.zeros(tokens, dtype=torch.int32, device="cuda")

    def draw(seed):
        rng = torch.Generator().manual_seed(seed)
        q.copy_(randn(*q.shape, dtype=BF16, seed=seed))
        kv.copy_(randn(*kv.shape, dtype=BF16, seed=seed + 1))
        indices.copy_(torch.randint(-2, 3100, tuple(indices.shape), generator=rng))
        counts.copy_(torch.randint(-1, 1100, (tokens,), generator=rng))

    def prefill(q=q, kv=kv, indices=indices, counts=counts):
        out, _, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, 512, None, counts)
        return out, lse

    def decode(q=q, kv=kv, indices=indices, counts=counts):
        named = indices.masked_fill(indices >= len(kv), -1).clamp(min=-1)
        meta, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            q[:, None], kv.view(-1, 8, 1, 576), None, None, 512, meta, softmax_scale=0.1, indices=named,
            topk_length=counts,
        )  # fmt: skip

    draw(seed)
    tensors = {"q": q, "kv": kv, "indices": indices, "counts": counts}
    return tensors, draw, (prefill, decode)


def assert_like_the_cpu(found, call, tensors):
    given = {name: x.cpu() for name, x in tensors.items()}
    wide = {name: x.float() if x.dtype == BF16 else x for name, x in given.items()}
    for mine, right, base in zip(found, call(**wide), call(**given), strict=True):
        verdict = reference.judge(mine.cpu(), right.double(), base)
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize("tokens", [3, 200])
def test_nobody_waits(tokens):
    """Not even for the list of a number of tokens that is new, once the kernel is compiled."""
    _, _, both = calls(tokens + 1)
    for call in both:
        call()
    tensors, _, both = calls(tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [call() for call in both]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for results, call in zip(found, both, strict=True):
        assert_like_the_cpu(results, call, tensors)


@pytest.mark.parametrize("tokens", [3, 200])
def test_graphs_replay_over_other_lists(tokens, monkeypatch):
    monkeypatch.setattr(mla_rows, "KEPT", 2)
    monkeypatch.setattr(mla_rows._local, "kept", OrderedDict(), raising=False)
    tensors, draw, both = calls(tokens)
    graphs = []
    for call in both:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call()
        graphs.append((graph, found, call))
    for more in range(4):  # which push the lists of the graphs out of what is kept
        for call in calls(tokens + 1 + more)[2]:
            call()
    draw(7)
    for graph, found, call in graphs:
        graph.replay()
        assert_like_the_cpu(found, call, tensors)


def test_the_first_call_of_a_size_is_not_captured():
    _, _, (prefill, _) = calls(13)
    with pytest.raises(RuntimeError, match="make one before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        prefill()
