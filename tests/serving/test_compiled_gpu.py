"""Engine(compile=True) on a card: the same tokens as far as bfloat16 can tell, from captured graphs."""

from __future__ import annotations

import pytest
import torch
from tiny_models import assert_likeliest, run, tiny_model, tokens

from tilewise.bench import engine as bench
from tilewise.serving import Engine

pytestmark = pytest.mark.gpu

SHARED = tokens(200, seed=1)
PROMPTS = [SHARED + tokens(n, seed=n) for n in (1, 5, 30)] + [[3], SHARED, tokens(63, 2), tokens(65, 3), SHARED]
NEW = 24


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_tokens(family):
    """Segments, with norms of q and k, and layer by layer; requests that come while others are under way."""
    model = tiny_model(family, dtype=torch.bfloat16, head_dim=64).cuda()
    served = Engine(model, num_pages=400, token_budget=100, compile=True)
    found = {}
    for prompt in PROMPTS:
        served.submit(prompt, max_new_tokens=NEW)
        for token in served.step():
            found.setdefault((token.request, token.sample), []).append(token.token)
    for key, more in run(served).items():
        found.setdefault(key, []).extend(more)
    assert served.stats().graph_captures > 0
    for n, prompt in enumerate(PROMPTS):
        assert len(found[n, 0]) == NEW
        assert_likeliest(model, prompt, found[n, 0])


def test_a_graph_has_few_kernels():
    """Of a layer: two norms, four products with what their parts need, an activation, the append and attention."""
    layers = 6
    model = tiny_model(dtype=torch.bfloat16, head_dim=64, num_hidden_layers=layers).cuda()
    counts = {}
    for compiled in (False, True):
        served = Engine(model, num_pages=400, compile=compiled)
        for n in range(8):
            served.submit(tokens(40, seed=n), max_new_tokens=30)
        for _ in range(10):
            served.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            served.step()
            torch.cuda.synchronize()
        counts[compiled] = sum(event.count for event in profile.key_averages() if event.self_device_time_total)
    assert counts[True] <= 14 * layers + 30
    assert counts[True] < 0.6 * counts[False]


def test_bench():
    problem = bench.case("cuda", "small", requests=8, loads=[0.5])
    found = bench.run(problem, peers=())
    assert [one.share for one in found.loads] == [None, 0.5]
    assert all(figure.value > 0 for figure in found.figures)
