"""The key of compiled graphs that torch keeps on disk: it tells operators of another schema apart."""

from __future__ import annotations

import torch
import torch.compiler.config as config

import tilewise
from tilewise.integrations import graph_cache


def test_every_operator_counts():
    registered = {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("tilewise::")}
    assert registered == set(graph_cache.OPERATORS)


def test_torch_keeps_the_tag_and_the_users_beside_it():
    assert graph_cache.tag() in config.cache_key_tag
    with config.patch(cache_key_tag="mine"):
        graph_cache.mark()
        graph_cache.mark()
        assert config.cache_key_tag == f"mine {graph_cache.tag()}"


def test_a_kept_graph_is_found_only_under_the_same_schemas(monkeypatch, tmp_path):
    """Compiled three times in a fresh cache: kept, found again, and with another schema compiled anew."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def f(q):
        return tilewise.attention(q, q, q)

    found = []
    for names in (graph_cache.OPERATORS, graph_cache.OPERATORS, graph_cache.OPERATORS[1:]):
        monkeypatch.setattr(graph_cache, "OPERATORS", names)  # as if one of them had another schema
        torch._dynamo.reset()
        counters.clear()
        with config.patch(cache_key_tag=""):
            graph_cache.mark()
            torch.compile(f)(torch.randn(1, 8, 1, 16))
        found.append({name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")})
    assert [one["fxgraph_cache_hit"] > 0 for one in found] == [False, True, False], found
    assert [one["fxgraph_cache_miss"] > 0 for one in found] == [True, False, True], found
