"""The serving table: its rows and bars, the trees it measures, its CSV and JSON; tiny and on the CPU."""

from __future__ import annotations

import csv
import json
import types
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tilewise import api, cli
from tilewise.bench import measure, peers, prefill, serve, serve_plots, trees
from tilewise.bench.measure import FAILED, OK, WRONG, Ceiling, Kernel, Problem, Result, time_replays
from tilewise.bench.trees import Pool, Tree, build
from tilewise.bench.workloads import Point, complete

CPU = torch.device("cpu")
BASE = complete(Point("decode", batch=4, seq=40, heads=4, kv_heads=2, hdim=32, dtype="bfloat16", page_size=8))
TREE = ((1, 32), (2, 16), (4, 8), (12, 5))


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(trees.ceilings, "of", lambda device, dtype: Ceiling(flops=1e11, bandwidth=1e10))
    yield
    torch.set_num_threads(threads)


def kernels_of(tree, **options):
    return {kernel.name: kernel for kernel in build(tree, Pool([tree], CPU), **options).kernels}


# ---- rows and bars ----------------------------------------------------------------------------------------------


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = {row.name: row for row in serve.rows("cuda")}
    assert len(rows) == 2 * (6 + 3 + 6 + 1) + 4 + 3 + 1
    points = [tree.point for row in rows.values() for tree in row.trees]
    assert len(set(points)) == len(points)  # a resumed CSV tells them apart
    assert len(points) == len(rows) - 1 + 75
    assert {(p.dtype, p.hdim, p.device) for p in points} == {("bfloat16", 128, "cuda")}
    bars = {name: [goal.text for goal in row.goals] for name, row in rows.items()}
    for size in (16, 64):
        for name in ("64 × 4096", "64 × 16384", "256 × 1024", "1 × 131072"):
            assert bars[f"{name}, page {size}"] == ["≥ 1×"]
        assert bars[f"8 × 8192, page {size}"] == ["≥ 1.05×"]
        assert bars[f"1 × 1024, page {size}"] == ["≤ 9.5 µs"]
        for name, bar in (("fp8", 1.85), ("int8", 1.85), ("int4", 3.1)):
            assert bars[f"{name}, 64 × 16384, page {size}"] == [f"≥ {bar}×"]
        for name, limit in (
            ("32 × (4096 + 128)", 23),
            ("64 × (8192 + 256)", 42),
            ("256 × (16384 + 128)", 135 if size == 16 else 120),
            ("64 × (1024 + 256)", 30),
            ("64 × (256 + 256)", 29),
            ("512 × (1024 + 64)", 58),
        ):
            assert bars[f"{name}, page {size}"] == [f"≤ {limit} µs"]
        assert rows[f"64 × (256 + 256), page {size}"].point.page_size == size
        assert bars[f"tree of three levels, page {size}"] == ["≥ 1.5×"]
    (tree,) = rows["tree of three levels, page 16"].trees
    assert tree.levels == ((1, 4096), (8, 1024), (128, 256), (512, 64))
    assert (tree.point.batch, tree.tokens) == (512, tree.point.prefix + tree.point.seq)
    hydragen = [row.point for name, row in rows.items() if name.startswith("Hydragen")]
    assert [(p.batch, p.prefix, p.seq, p.heads, p.kv_heads) for p in hydragen] == [
        (512 << n, 1024 << n, 128, 8, 1) for n in range(4)
    ]
    chunks = [row.point for name, row in rows.items() if name.startswith("ChunkAttention")]
    assert [(p.prefix, p.seq, p.heads, p.kv_heads, p.page_size) for p in chunks] == [
        (n, 256, 32, 32, 64) for n in (1024, 2048, 4096)
    ]
    assert bars["auto over a grid"] == ["≥ 0.97×"]
    assert {(p.batch, p.prefix, p.seq) for p in rows["auto over a grid"].grid} == {
        (b, p, s) for b in (1, 2, 8, 64, 256) for p in (0, 64, 256, 1024, 8192) for s in (16, 256, 2048)
    }


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


def timed(kernel, seconds, *, ours=True, **ratios):
    return Result(kernel, ours, OK, timing=measure.Timing(seconds, 0, 0, 0, 1), ratio_to=ratios)


def outcome_of(*results, point=BASE, **options):
    return serve.Outcome(serve.Row("row", replace(point, device="cuda"), ()), list(results), **options)


def test_bars_are_set_on_times_and_ratios():
    ours = timed("tilewise cuda", 9e-6, **{peers.CUDNN: 1.04})
    outcome = outcome_of(ours, timed("tilewise cuda, bf16", 18e-6), timed(peers.CUDNN, 9.4e-6, ours=False))
    assert serve.microseconds(outcome) == pytest.approx(9)
    assert serve.over_cudnn(outcome) == 1.04
    assert serve.over_bf16(outcome) == pytest.approx(2)
    assert serve.DECODE[8, 8192].met_by(outcome) is False
    assert serve.DECODE[64, 4096].met_by(outcome) is True
    assert serve.DECODE[1, 1024].value_text(outcome) == "9 µs"
    assert serve.over_cudnn(outcome_of(timed("tilewise cuda", 1))) is None
    assert serve.DECODE[64, 4096].met_by(outcome_of(timed("tilewise cuda", 1))) is None  # cuDNN is not here
    assert serve.DECODE[64, 4096].met_by(outcome_of(Result("tilewise cuda", True, WRONG))) is False
    assert serve.over_bf16(outcome_of(ours, Result("tilewise cuda, bf16", True, FAILED))) is None


def test_tree_is_held_against_the_best_of_two_levels():
    levels = [timed(f"tilewise cuda, two levels, {n} nodes", s) for n, s in ((1, 5.0), (8, 3.0), (128, 4.0))]
    outcome = outcome_of(timed("tilewise cuda", 2.0), *levels)
    assert serve.over_two_levels(outcome) == 1.5
    # One that has no figure might have been the best.
    broken = outcome_of(timed("tilewise cuda", 2.0), *levels[:2], replace(levels[2], timing=None, status=WRONG))
    assert serve.over_two_levels(broken) is None


def test_grid_is_judged_by_its_worst_point():
    a, b, c = (replace(BASE, batch=n, device="cuda", backend="cuda") for n in (1, 2, 8))
    found = {
        a: [timed("tilewise cuda", 1.0)],  # nothing to share
        b: [timed("tilewise cuda", 1.0), timed("tilewise cuda, unshared", 0.95)],
        c: [timed("tilewise cuda", 1.0), timed("tilewise cuda, unshared", 3.0)],
    }
    outcome = outcome_of(*(r for results in found.values() for r in results), by_point=found)
    assert outcome.ratios == {a: 1.0, b: pytest.approx(0.95), c: 3.0}
    goal = prefill.Goal(serve.worst_auto, 0.97, what="of unshared")
    assert (goal.value_text(outcome), goal.met_by(outcome)) == ("0.95× of unshared", False)
    assert outcome.rates == [None] * 4
    line = serve.notes([outcome])[0]
    assert line == "row: 3 points, 2 of them shared; the worst is 2 × (0 + 40)"
    failed = {**found, c: [Result("tilewise", True, FAILED, "no memory")]}
    missed = outcome_of(*(r for results in failed.values() for r in results), by_point=failed)
    assert (goal.value_text(missed), goal.met_by(missed)) == ("", False)


def test_columns_are_microseconds():
    point = replace(BASE, workload="prefix", prefix=8)
    ours, cudnn = timed("tilewise cuda", 2e-6), timed(peers.CUDNN, 4e-6, ours=False)
    infer = [timed(peers.FLASHINFER, 9e-6, ours=False), timed(peers.FLASHINFER_CASCADE, 8e-6, ours=False)]
    assert outcome_of(ours, cudnn, *infer, point=point).rates == pytest.approx([2, 2, 4, 8])  # auto shares nothing
    unshared = timed("tilewise cuda, unshared", 3e-6)
    assert outcome_of(ours, unshared, cudnn, point=point).rates == [pytest.approx(x) for x in (2, 3, 4)] + [None]
    assert outcome_of(ours).rates == [pytest.approx(2), None, None, None]


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
    assert not check(run(None) * 1.1).ok


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


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """The table in small on the CPU: torch's SDPA plays cuDNN; a row of each kind, a grid of four points."""

    def small(row):
        p = row.point
        sizes = {"batch": min(p.batch, 3), "seq": 13, "prefix": 32 if p.prefix else 0, "heads": 4, "page_size": 8}
        sizes |= {"kv_heads": 2, "hdim": 32}
        if row.levels:
            sizes |= {"batch": 12, "seq": 29}
        return replace(row, point=replace(p, **sizes), levels=TREE if row.levels else ())

    rows = [row for row in serve.rows("cpu") if row.point.page_size == 16]
    names = ("64 × 4096", "int4", "1 × 1024", "32 × (", "tree")
    chosen = [small(row) for name in names for row in rows if row.name.startswith(name)]
    grid = replace(rows[-1].point, heads=4, kv_heads=2, hdim=32, page_size=8)
    points = [complete(serve._prefix(grid, b, p, 5)) for b in (1, 3) for p in (0, 64)]
    chosen = [
        replace(row, point=replace(row.point, seq=13 + n) if not row.levels else row.point)
        for n, row in enumerate(chosen)
    ]
    chosen.append(replace(rows[-1], point=points[0], grid=tuple(points)))

    def rows_of(device):
        replace(BASE, device=device).validate()
        return chosen

    monkeypatch.setattr(serve, "rows", rows_of)
    monkeypatch.setattr(peers, "SDPA", peers.CUDNN)


def rows_in(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_table_shows_every_row_with_its_bar(tiny, capsys):
    assert cli.main(["bench", "serve", "--device", "cpu", "--loops", "1"]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "≥" in line or "≤" in line]
    assert len(lines) == 6
    for word in ("ours", "unshared", "cuDNN", "FlashInfer", "reached", "bar", "met", "µs, graph replay"):
        assert word in out
    assert "of bf16" in out
    assert "of two levels" in out
    assert "of unshared" in out
    assert "auto over a grid: 4 points" in out
    assert "FlashInfer: not installed" in out
    assert all(line.partition("  ")[0].strip() in err for line in lines)
    assert max(map(len, out.splitlines()[: len(lines) + 4])) <= 132


def test_json_tells_bars_and_every_measurement(tiny, capsys):
    assert cli.main(["bench", "serve", "--device", "cpu", "--loops", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["row"] for one in found][-1] == "auto over a grid"
    for one in found:
        (bar,) = one["bars"]
        limit = float(bar["bar"].split()[1].rstrip("×"))
        assert bar["met"] is (bar["reached"] <= limit if "≤" in bar["bar"] else bar["reached"] >= limit)
        assert all(result["status"] == "ok" for result in one["results"])
    grid = found[-1]["results"]
    assert {(r["batch"], r["prefix"]) for r in grid} == {(1, 0), (1, 64), (3, 0), (3, 64)}
    assert {r["backend"] for r in grid} == {"cpu"}


def test_csv_is_resumed_row_by_row(tiny, capsys, monkeypatch, tmp_path):
    path = tmp_path / "s.csv"
    words = ["bench", "serve", "--device", "cpu", "--loops", "1", "--csv", str(path)]
    real, built = serve.build, []

    def build_until(tree, *args, **options):
        built.append(tree.point)
        if len(built) == 8:  # in the middle of the grid
            raise KeyboardInterrupt
        return real(tree, *args, **options)

    monkeypatch.setattr(serve, "build", build_until)
    assert cli.main(words) == 130
    assert "5 of 6 rows are measured" in capsys.readouterr().err
    first = path.read_text()
    assert len({row["kernel"] for row in rows_in(path)}) > 4
    assert not any(row["backend"] == "cpu" for row in rows_in(path))  # a grid is written as a whole
    assert cli.main([*words, "--resume"]) == 0
    assert len(built) == 8 + 4
    assert path.read_text().startswith(first)
    assert sum(row["backend"] == "cpu" for row in rows_in(path)) >= 4
    assert cli.main([*words, "--resume"]) == 0
    assert len(built) == 8 + 4  # nothing is left to do
    assert all(float(row["median_ms"]) > 0 and float(row["gbps"]) > 0 for row in rows_in(path))
    capsys.readouterr()
    assert cli.main([*words, "--force", "--plot"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"s.csv", "s_times.png", "s_auto.png"}
    assert capsys.readouterr().out.count("drew") == 2


def test_pictures_tell_what_auto_gains(tiny, tmp_path, capsys):
    assert serve_plots._gain({"tilewise": 2.0, "unshared": 3.0}) == (1.5, "1.50")
    assert serve_plots._gain({"tilewise": 2.0, "shared": 4.0}) == (1.0, "(0.50)")
    assert serve_plots._gain({"tilewise": 2.0}) == (1.0, "1.00")
    for name, style in (
        ("tilewise cuda", "tilewise"),
        ("tilewise cuda, unshared", "unshared"),
        ("tilewise cuda, shared", "shared"),
        ("tilewise cuda, two levels, 8 nodes", "two levels"),
        ("FlashInfer cascade", "cascade"),
    ):
        assert serve_plots._style(name) == style
    path = tmp_path / "s.csv"
    words = ["bench", "serve", "--device", "cpu", "--loops", "1", "--csv", str(path), "--plot", "--only", "grid"]
    assert cli.main(words) == 0
    assert "nothing to draw of times" in capsys.readouterr().out


def test_what_fails_is_said_and_the_rest_is_measured(tiny, capsys, monkeypatch):
    real = serve.build

    def fails(tree, *args, **options):
        if tree.point.kv_format == "int4":
            raise torch.cuda.OutOfMemoryError("out of memory")
        return real(tree, *args, **options)

    monkeypatch.setattr(serve, "build", fails)
    assert cli.main(["bench", "serve", "--device", "cpu", "--loops", "1"]) == 1
    out, _ = capsys.readouterr()
    assert "int4, 64 × 16384, page 16: tilewise: failed, OutOfMemoryError: out of memory" in out
    (line,) = [line for line in out.splitlines() if "3.1×" in line]
    assert line.rstrip().endswith("no")


@pytest.mark.parametrize(
    "words",
    [["--only", "D 7"], ["--plot"], ["--resume"], ["--csv", "a.csv", "--resume", "--force"], ["--device", "cuda"]],
)
def test_what_makes_no_sense_is_refused(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "serve", *(words if "--device" in words else ["--device", "cpu", *words])]) == 2
    err = capsys.readouterr().err
    assert "tilewise bench serve --help" in err
    assert "--device" not in words or "torch sees no GPU here" in " ".join(err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
