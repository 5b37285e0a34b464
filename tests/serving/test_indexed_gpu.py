"""Engines over models with indexers on a card: kernels choose and read what was chosen, and nobody waits for it."""

from __future__ import annotations

import pytest
import torch
from indexed_cases import model_of
from latent_cases import EVERY_EXPERT, served_late
from tiny_models import pages_are_back, tokens

from tilewise import api
from tilewise.bench.generate import share_of_equal
from tilewise.serving import Engine
from tilewise.serving.indexed import IndexedStep

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:.*torch computes its scores:RuntimeWarning")]
LONG = tokens(200, seed=9)
PROMPTS = [LONG, tokens(20, seed=3), LONG + tokens(65, seed=10), [5], tokens(300, seed=4)]
ROWS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "max_position_embeddings": 1024}


@pytest.mark.parametrize("kv_format", [None, "fp8"])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_what_the_cpu_answers(name, kv_format, monkeypatch):
    """Rounding may choose other keys in 16 bits, so tokens are those of the same engine on a CPU up to a few."""
    model = model_of(name, torch.bfloat16, **ROWS, **EVERY_EXPERT, index_topk=64)
    found, choose_keys, devices = [], api.choose_keys, set()

    def noted(q, *args, **options):
        devices.add(q.device.type)
        return choose_keys(q, *args, **options)

    monkeypatch.setattr(api, "choose_keys", noted)
    for _ in range(2):
        served = Engine(model, num_pages=200, max_sequences=8, token_budget=150, kv_format=kv_format)
        assert served.cache.shared_kv
        found.append(served_late(served, PROMPTS, 6))
        assert not served.stats().graph_captures
        assert pages_are_back(served)
        model = model.cuda()
    assert devices == {"cuda"}
    assert share_of_equal([x[:3] for x in found[0]], [x[:3] for x in found[1]]) > 0.7


def test_nobody_waits(monkeypatch):
    """Once everything is compiled, a step's lists go from the indexer to attention without the host."""

    def strictly(method):
        def called(*args, **options):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return called

    model = model_of("deepseek_v32", torch.bfloat16, **ROWS, **EVERY_EXPERT, index_topk=64).cuda()
    served_late(Engine(model, num_pages=200, token_budget=150), PROMPTS, 6)
    for name in ("__init__", "choose", "attend"):
        monkeypatch.setattr(IndexedStep, name, strictly(getattr(IndexedStep, name)))
    served_late(Engine(model, num_pages=200, token_budget=150), PROMPTS, 6)


def test_graphs_of_decodes():
    """Replayed, with sequences that come and go: the tokens of the same engine call by call."""
    model = model_of("deepseek_v32", torch.bfloat16, **ROWS, **EVERY_EXPERT, index_topk=64).cuda()
    found = []
    for graphs in (None, True):
        served = Engine(model, num_pages=200, max_sequences=8, token_budget=150, cuda_graphs=graphs)
        found.append(served_late(served, PROMPTS, 6))
        assert bool(served.stats().graph_captures) is bool(graphs)
        assert pages_are_back(served)
    assert share_of_equal(*found) > 0.9
