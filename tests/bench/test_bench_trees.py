"""The trees that the serving table measures: their pages, plans and peers, and replays that alternate."""

from __future__ import annotations

import types
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from bench_cases import BASE, CPU, TREE

from tilewise import api
from tilewise.bench import measure, peers, serve, trees
from tilewise.bench.measure import FAILED, OK, WRONG, Ceiling, Kernel, Problem, time_replays
from tilewise.bench.trees import NARROW, Pool, Tree, build
from tilewise.bench.workloads import complete


def kernels_of(tree, **options):
    return {kernel.name: kernel for kernel in build(tree, Pool([tree], CPU), **options).kernels}


def test_pool_holds_the_largest_of_all_rows_within_its_limit(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = serve.rows("cuda")
    pool = Pool((tree for row in rows for tree in row.trees), CPU)
    whole = {row.name: np.prod(row.trees[0].whole) for row in rows}
    assert max(whole.values()) == whole["Hydragen 4096 × (8192 + 128)"]
    assert pool.elements == max(whole.values())  # so cuDNN is in every row
    assert 2 * 2 * pool.elements < 40e9
    monkeypatch.setattr(trees, "POOL_BYTES", 1000)
    tree = Tree.of(BASE)
    assert Pool([tree], CPU).elements == 4 * 40 * 2 * 32  # the pages are needed, whatever they take


# ---- what is measured -------------------------------------------------------------------------------------------


def test_pages_are_laid_out_in_no_order():
    root, groups, questions, own = trees.lay_out(TREE, 8)
    assert [x.shape for x in (root, groups, questions, own)] == [(1, 4), (2, 2), (4, 1), (12, 1)]
    pages = np.concatenate([x.reshape(-1) for x in (root, groups, questions, own)])
    assert sorted(pages.tolist()) == list(range(len(pages)))
    assert (np.diff(pages) != 1).sum() > len(pages) // 2


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "int8", "int4"])
def test_every_format_is_checked_and_right(kv_format):
    tree = Tree.of(complete(replace(BASE, kv_format=kv_format)))
    results = {r.kernel: r for r in measure.measure(build(tree, Pool([tree], CPU)), loops=1, timer=time_replays)}
    beside = peers.SDPA if kv_format == "bf16" else "tilewise cpu, bf16"
    assert list(results) == ["tilewise cpu", beside]
    assert {r.status for r in results.values()} == {OK}
    assert all(r.error > 0 and r.timing.median > 0 for r in results.values())


def test_wide_heads_stand_beside_narrow_ones_of_as_many_channels():
    tree = Tree.of(complete(replace(BASE, heads=2, kv_heads=1, hdim=256)))
    problem = build(tree, Pool([tree], CPU))
    wide, narrow, _ = problem.kernels
    assert (wide.name, narrow.name) == ("tilewise cpu", f"tilewise cpu, {NARROW}")
    assert narrow.flops == wide.flops
    assert narrow.run(None).shape == (tree.point.batch, 1, 4, 128)
    assert {r.status for r in measure.measure(problem, loops=1, timer=time_replays)} == {OK}


def test_written_pages_are_those_of_the_table():
    """The cache of a quantised format holds what the one over the pool's own pages does, as far as it can."""
    tree = Tree.of(complete(replace(BASE, workload="prefix", prefix=16, seq=11)))
    pool = Pool([tree], CPU)
    table = np.concatenate([x.repeat(4 // len(x), axis=0) for x in trees.lay_out(tree.levels, 8)], axis=1)
    plain, seqs = trees._cache(tree.point, pool, table, 27)
    rounded, others = trees._cache(replace(tree.point, kv_format="int8"), pool, table, 27)
    for seq, other in zip(seqs, others, strict=True):
        for a, b in zip(plain.gather(0, seq), rounded.gather(0, other), strict=True):
            assert (a.float() - b).abs().max() < 0.05
    assert rounded.stats().pages_shared == 2  # the writer is gone


def test_sharing_is_measured_both_ways_and_once_each():
    point = complete(replace(BASE, workload="prefix", prefix=16))
    kernels = kernels_of(Tree.of(point), with_peers=False)
    assert len(kernels) == 2  # auto is one of the others, whichever it is
    assert set(kernels) < {"tilewise cpu", "tilewise cpu, unshared", "tilewise cpu, shared"}
    assert list(kernels_of(Tree.of(replace(point, batch=1)), with_peers=False)) == ["tilewise cpu"]
    assert peers.SDPA in kernels_of(Tree.of(point))


def test_two_level_plans_share_one_level_each():
    point = complete(replace(BASE, workload="prefix", batch=12, prefix=32, seq=29))
    tree = Tree(point, TREE)
    pool = Pool([tree], CPU)
    table = np.concatenate([x.repeat(12 // len(x), axis=0) for x in trees.lay_out(TREE, 8)], axis=1)
    cache, seqs = trees._cache(point, pool, table, tree.tokens)
    plans = trees._plans(tree, cache, seqs)
    once, whole = sum(n * t for n, t in TREE), 12 * tree.tokens
    read = {name: plan.keys[0] for name, plan in plans.items() if name}
    assert read["two levels, 1 nodes"] == 32 + 12 * (16 + 8 + 5)
    assert read["two levels, 2 nodes"] == 2 * (32 + 16) + 12 * (8 + 5)
    assert read["two levels, 4 nodes"] == 4 * (32 + 16 + 8) + 12 * 5
    assert set(read.values()) >= {once, whole} - {plans[""].keys[0]}
    results = measure.measure(build(tree, pool), loops=1, timer=time_replays)
    assert {r.status for r in results} == {OK}
    assert sum("two levels" in r.kernel for r in results) == 3


def test_levels_of_half_pages_are_refused():
    tree = Tree.of(complete(replace(BASE, workload="prefix", prefix=12)))
    with pytest.raises(ValueError, match="whole pages of 8 tokens"):
        build(tree, Pool([tree], CPU))


def test_wrong_answer_is_found_by_the_sequences_that_are_checked(monkeypatch):
    tree = Tree.of(BASE)
    real = api.decode

    def decode(q, *args, out=None, **options):
        o = real(q, *args, **options)
        o[3] += 0.1
        return o

    monkeypatch.setattr(api, "decode", decode)
    ours, sdpa = measure.measure(build(tree, Pool([tree], CPU)), loops=1, timer=time_replays)
    assert (ours.status, sdpa.status) == (WRONG, OK)
    assert ours.timing is None


class Wrapper:
    """Looks like FlashInfer's two wrappers, and answers like Tilewise's own oracle."""

    def __init__(self, *args, use_tensor_cores=False):
        self.args = args

    def plan(self, *args, q_data_type, kv_data_type):
        assert q_data_type == kv_data_type == torch.bfloat16
        if isinstance(args[0], list):
            rows, starts, pages, last, *self.sizes = args
            assert len(rows) == len(starts) == self.args[0]
            count = int(rows[0][-1])
            self.lists = [[] for _ in range(count)]
            for r, s, p in zip(rows, starts, pages, strict=True):
                for node in range(len(r) - 1):
                    for seq in range(int(r[node]), int(r[node + 1])):
                        self.lists[seq] += p[int(s[node]) : int(s[node + 1])].tolist()
            self.last = last[-1]
        else:
            starts, pages, self.last, *self.sizes = args
            self.lists = [pages[a:b].tolist() for a, b in pairwise(starts.tolist())]

    def run(self, q, pages):
        heads, kv_heads, head_dim, page_size = self.sizes
        assert q.shape[1:] == (heads, head_dim)
        outs = []
        for row, pages_of, last in zip(q, self.lists, self.last.tolist(), strict=True):
            n = (len(pages_of) - 1) * page_size + last
            k, v = (x[pages_of].flatten(0, 1)[None, :n] for x in pages)
            assert k.shape[2] == kv_heads
            outs.append(trees.reference.attention(row[None, None], k, v)[0][0, 0].to(q.dtype))
        return torch.stack(outs)


def test_flashinfer_is_called_as_documented():
    point = complete(replace(BASE, workload="prefix", batch=12, prefix=32, seq=29))
    tree = Tree(point, TREE)
    pool = Pool([tree], CPU)
    nodes = trees.lay_out(TREE, 8)
    table = np.concatenate([x.repeat(12 // len(x), axis=0) for x in nodes], axis=1)
    cache, seqs = trees._cache(point, pool, table, tree.tokens)
    q = torch.randn(12, 1, 4, 32).bfloat16()
    check = trees.checker(q, lambda n: cache.gather(0, seqs[n]))
    pages = pool.take(int(table.max()) + 1, 8, 2, 32)
    module = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, MultiLevelCascadeAttentionWrapper=Wrapper
    )
    run = peers.flashinfer_decode(module, q, *pages, table, 5)
    cascade = peers.flashinfer_cascade(module, q, *pages, nodes, [8, 8, 8, 5])
    for answer in (run(None), run(None), cascade(None)):
        assert answer.shape == q.shape
        assert check(answer).ok
    right, wrong = check(run(None)), check(run(None) * 1.1)
    assert not wrong.ok
    assert max(right.error, 2 * right.baseline) <= right.allowed == wrong.allowed < wrong.error


# ---- replays ----------------------------------------------------------------------------------------------------


def test_replays_take_turns_and_a_call_that_no_graph_captures_is_left_out(monkeypatch):
    """With a CUDA that only pretends: graphs record calls, events tell a clock that each replay moves on."""
    clock, replayed = [0.0], []

    class Graph:
        def capture_begin(self):
            pass

        def capture_end(self):
            pass

        def replay(self):
            clock[0] += 1.0
            replayed.append(self)

    class Event:
        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

        def synchronize(self):
            pass

    def fails():
        raise RuntimeError("it waits for the device")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: types.SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: types.SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(measure, "_event", Event)
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **o: real(1, **o))
    calls = {"a": lambda: None, "b": lambda: None, "c": fails}
    with pytest.warns(UserWarning, match="c is not captured in a graph: it waits"):
        timings = time_replays(calls, device=torch.device("cuda"), loops=20)
    # Three rounds of warming up, then four turns of eight replays, the first two of which do not count.
    assert {name: (t.median, t.loops) for name, t in timings.items()} == {"a": (1.0, 24), "b": (1.0, 24)}
    assert len(replayed) == 2 * (3 + 4 * 8)
    turns = [replayed[n : n + 8] for n in range(6, len(replayed), 8)]
    assert all(len(set(turn)) == 1 for turn in turns)
    pairs = [(a[0], b[0]) for a, b in zip(turns[::2], turns[1::2], strict=True)]
    assert all(a is not b for a, b in pairs)
    assert len({(id(a), id(b)) for a, b in pairs}) == 2  # in either order

    kernels = [Kernel(n, lambda out, call=call: call(), False, 1, 1, same_answer=False) for n, call in calls.items()]
    state = {"first": True}

    def fails_in_the_graph():
        if not state.pop("first", False):
            fails()

    kernels[2] = replace(kernels[2], run=lambda out: fails_in_the_graph())
    problem = Problem("p", torch.device("cuda"), torch.float32, kernels, None, (1,), 1, Ceiling(1, 1))
    with pytest.warns(UserWarning, match="c is not captured"):
        *_, c = measure.measure(problem, loops=15, timer=time_replays)
    assert (c.status, c.reason) == (FAILED, "no CUDA graph can capture it")
