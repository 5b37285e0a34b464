"""The block-sparse table: its rows and bars, its CSV and JSON; tiny and on the CPU."""

from __future__ import annotations

import json
import types
from dataclasses import replace

import pytest
import torch
from bench_cases import timed
from cli_cases import rows_of

from tilewise import BlockSchedule, api, attention, cli
from tilewise.bench import flex, measure, peers, prefill, sparse
from tilewise.bench.measure import FAILED, OK, WRONG, Result
from tilewise.bench.workloads import Point, complete

TINY = {"seq": 96, "heads": 2, "kv_heads": 2, "hdim": 16, "dtype": "float32"}


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = sparse.rows("cuda")
    assert len({row.point for row in rows}) == len(rows) == 7  # a resumed CSV tells them apart
    points = {row.name: row.point for row in rows}
    assert all((p.heads, p.kv_heads, p.hdim, p.dtype) == (16, 16, 128, "bfloat16") for p in points.values())
    sizes = [(p.seq, p.block, p.sparsity) for p in points.values()]
    assert sizes == [
        *((16384, 128, sparsity) for sparsity in (0, 0.5, 0.9)),
        *((16384, 64, sparsity) for sparsity in (0.5, 0.9)),
        *((40960, 64, 0.9), (32768, 128, 0.9)),
    ]
    assert [[goal.text for goal in row.goals] for row in rows] == [
        ["≥ 0.97×", "≥ 0.97×"],
        *([f"≥ {rate}", "≥ 0.97×"] for rate in (700, 640, 640, 560)),
        *(["≥ 7×"], ["≤ 30 µs", "≤ 60 µs"]),
    ]


def outcome_of(*results, name="tilewise cuda"):
    return sparse.Outcome(prefill.Row("row", Point(device="cuda"), ()), list(results))


def test_bars_on_our_own_rates_and_times():
    ours, by_head = timed("tilewise cuda", 0.5, tflops=600.0), timed("tilewise cuda, by head", tflops=570.0)
    dense, kept = timed("tilewise cuda, dense", 4.0, tflops=800.0), timed("tilewise cuda, schedule kept", 0.4)
    device = replace(timed("tilewise cuda, device", 2e-5), reason="pack 20 µs")
    outcome = outcome_of(ours, by_head, dense, kept, timed("tilewise cuda, host", 5e-5), device)
    assert sparse.rate_over_dense(outcome) == 0.75
    assert sparse.speed_over_dense(outcome) == 8
    assert sparse.per_head_over_shared(outcome) == pytest.approx(0.95)
    assert sparse.host_microseconds(outcome) == pytest.approx(50)
    assert sparse.device_microseconds(outcome) == pytest.approx(20)
    assert outcome.rates == [600, 570, 800, None, None, None]
    lines = sparse.notes([outcome])
    assert "row: pack 20 µs" in lines
    assert "row: 8× the speed of dense, with a schedule kept 10×" in lines
    for bar in (sparse.rate_over_dense, sparse.speed_over_dense, sparse.device_microseconds):
        assert bar(outcome_of(by_head)) is None


def test_only_what_is_kept_counts():
    data = sparse.Data.of(Point("sparse", seq=100, heads=4, kv_heads=4, hdim=8, block=32))
    schedule = BlockSchedule.random(100, 100, block_q=32, block_k=32, sparsity=0.5, seed=1)
    by_head = BlockSchedule.random(100, 100, block_q=32, block_k=32, sparsity=0.5, seed=1, heads=4)
    assert data.flops(schedule) == 4 * 8 * 4 * schedule.to_mask().sum()
    assert data.flops(by_head) == 4 * 8 * by_head.to_mask().sum()


@pytest.fixture
def tiny_sparse(monkeypatch):
    """The table in small on the CPU, where torch's function is not compiled: that takes it seconds per row."""
    real = sparse.rows

    def rows(device):
        return [replace(r, point=complete(replace(r.point, **TINY, block=r.point.block // 4))) for r in real("cpu")]

    monkeypatch.setattr(sparse, "rows", rows)
    monkeypatch.setattr(flex, "how", lambda device: flex.EAGER)


def table(*words):
    return ["bench", "sparse", "--device", "cpu", "--loops", "1", *map(str, words)]


def test_table_shows_every_row_with_its_bars(tiny_sparse, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Point, "validate", lambda self: self)
    words = [word for word in table() if word not in ("--device", "cpu")]  # a GPU, where there is one
    monkeypatch.setattr("tilewise.bench.records.machine", lambda device: f"a {device}")
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "≥" in line or "≤" in line]
    assert "on a cuda" in out
    assert len(lines) == 7
    assert [line.count("≥ 0.97×") for line in lines] == [2, 1, 1, 1, 1, 0, 0]
    assert "with a schedule kept" in out
    assert "FlashInfer: not installed" in out
    assert "128 × 128, 50% kept: ours" in err  # and each as it came
    for column in sparse.COLUMNS:
        assert column in out


def test_table_as_json(tiny_sparse, capsys):
    assert cli.main(table("--only", "64 × 64, 10%", "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)
    kernels = {result["kernel"]: result for result in row["results"]}
    ours, flexes = ("", ", by head", ", dense"), (flex.FLEX, sparse.FLEX_PER_HEAD)
    assert list(kernels) == [*(f"tilewise cpu{kind}" for kind in ours), *flexes]
    assert all(result["status"] == "ok" and result["tflops"] > 0 for result in kernels.values())
    checked = [name for name, result in kernels.items() if result["error"] is not None]
    assert checked == [name for name in kernels if "dense" not in name]
    assert [bar["bar"] for bar in row["bars"]] == ["≥ 560", "≥ 0.97×"]


def test_table_goes_into_a_csv(tiny_sparse, capsys, tmp_path):
    path = tmp_path / "sparse.csv"
    assert cli.main(table("--only", "N ", "--csv", path)) == 0
    assert [row["kernel"] for row in rows_of(path)] == [
        *("tilewise cpu", "tilewise cpu, schedule kept", "tilewise cpu, dense"),
        *("tilewise cpu", "tilewise cpu, dense", "tilewise cpu, host"),
    ]
    assert cli.main(table("--only", "N ", "--csv", path)) == 1  # it exists
    before = path.read_text()
    assert cli.main(table("--only", "N ", "--csv", path, "--resume")) == 0
    assert path.read_text() == before


@pytest.mark.parametrize("kernel", ["tilewise cpu", "tilewise cpu, by head"])
def test_wrong_kernel_is_not_timed(tiny_sparse, monkeypatch, kernel, capsys):
    real, heads = attention, 2 if "head" in kernel else None

    def wrong(*args, schedule=None, **options):
        o = real(*args, schedule=schedule, **options)
        return o.mul_(1.01) if schedule is not None and schedule.heads == heads else o

    monkeypatch.setattr(api, "attention", wrong)
    assert cli.main(table("--only", "50% kept", "--json")) == 1
    for row in json.loads(capsys.readouterr().out):
        found = {
            result["kernel"]: (result["status"].partition(":")[0], result["median_ms"]) for result in row["results"]
        }
        assert found.pop(kernel) == (WRONG, None)
        assert all(status == OK and time > 0 for status, time in found.values())


def test_peer_that_raises_does_not_end_the_run(tiny_sparse, monkeypatch, capsys):
    def broken(schedule, device):
        raise RuntimeError("no valid triton configs")

    monkeypatch.setattr(flex, "block_mask", broken)
    assert cli.main(table("--only", "100%")) == 0
    out = capsys.readouterr().out
    assert "FlexAttention: failed, RuntimeError: no valid triton configs" in out


@pytest.mark.parametrize("heads", [None, 3])
def test_flex_computes_the_same_blocks(heads, monkeypatch):
    monkeypatch.setattr(flex, "how", lambda device: flex.EAGER)
    q, k, v = (torch.randn(1, n, 3, 16) for n in (200, 256, 256))
    schedule = BlockSchedule.random(200, 256, block_q=64, block_k=32, sparsity=0.4, seed=3, heads=heads)
    run = flex.attention(q, k, v, schedule=schedule)
    torch.testing.assert_close(run(None), attention(q, k, v, schedule=schedule), rtol=1e-4, atol=1e-5)


def test_flex_tiles_are_no_larger_than_blocks(monkeypatch):
    asked = []
    monkeypatch.setattr(flex, "compiled", lambda f: lambda q, k, v, **o: asked.append(o.get("kernel_options")) or q)
    q = torch.randn(1, 256, 2, 16)
    for block in (64, 128):
        schedule = BlockSchedule.full(256, 256, block_q=block, block_k=block)
        assert flex.attention(q, q, q, schedule=schedule)(None).shape == q.shape
    assert asked == [{"BLOCK_M": 64, "BLOCK_N": 64}, None]


@pytest.mark.parametrize(("compilers", "how"), [(["clang++"], flex.COMPILED), ([], flex.EAGER)])
def test_flex_is_compiled_where_there_is_a_compiler(monkeypatch, compilers, how):
    monkeypatch.setattr(flex.shutil, "which", lambda name: name in compilers or None)
    assert flex.how(torch.device("cpu")) == how
    assert flex.how(torch.device("cuda")) == flex.COMPILED


def test_flashinfer_is_planned_with_the_blocks_of_all_heads(monkeypatch):
    planned = []

    class Wrapper:
        def __init__(self, workspace):
            pass

        def plan(self, indptr, indices, *sizes, **options):
            planned.append((indptr.tolist(), indices.tolist(), sizes, options))

        def run(self, q, k, v):
            assert (q.shape, k.shape, v.shape) == ((96, 4, 16), (96, 2, 16), (96, 2, 16))
            return q * 2

    monkeypatch.setattr(peers.torch, "empty", lambda *a, device, **o: torch.zeros(1))
    q, k = torch.randn(1, 96, 4, 16), torch.randn(1, 96, 2, 16)
    schedule = BlockSchedule.banded(96, 96, block_q=48, block_k=32, left=16, right=0)
    run = peers.flashinfer_blocks(types.SimpleNamespace(BlockSparseAttentionWrapper=Wrapper), q, k, k, schedule)
    assert all(torch.equal(run(None), q * 2) for _ in range(2))
    rows = (schedule.indptr.tolist(), schedule.indices.tolist())
    assert planned == [(*rows, (96, 96, 48, 32, 4, 2, 16), {"q_data_type": torch.float32})]


def test_call_that_waits_is_told(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        assert modes[-1] == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    timing = timed("host").timing
    assert sparse._without_waiting("host", lambda: None, timing) == Result("host", True, OK, timing=timing)
    result = sparse._without_waiting("host", waits, timing)
    assert result.status == FAILED
    assert "synchronizing" in result.reason
    assert modes[-1] == "default"


def test_device_time_is_that_of_the_kernels_but_one(monkeypatch):
    def event(name, microseconds, device="CUDA"):
        kind = types.SimpleNamespace(name=device)
        elapsed = types.SimpleNamespace(elapsed_us=lambda: microseconds)
        return types.SimpleNamespace(name=name, device_type=kind, time_range=elapsed)

    events = [event("fold(Args)", 4), event("fold(Args)", 5), event("fold(Args)", 60), event("forward", 900)]
    events += [event("pack", 2)] * 6 + [event("cuLaunchKernel", 50, "CPU")]

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def events(self):
            return events

    calls = []
    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    result = measure.device_cost("device", lambda: calls.append(1), without="forward", calls=3)
    assert result.timing.median == pytest.approx(9e-6)  # a fold of 5 µs, and two packs of 2
    assert result.reason == "fold 5 µs + pack 4 µs"
    events.clear()
    assert measure.device_cost("device", lambda: None).status == FAILED


def test_options_of_a_problem_and_of_the_table_do_not_mix(capsys, monkeypatch):
    assert cli.main(["bench", "sparse", "--seq", "64", "--only", "64"]) == 2
    assert "leave out the problem's options" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.main(["bench", "sparse", "--seq", "128", "--heads", "2", "--hdim", "16", "--loops", "1"]) == 0
    assert "sparse: 128 tokens, 2 heads, D 16, float32, 90% sparse" in capsys.readouterr().out


def test_without_a_gpu_it_is_one_problem_as_ever(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("tilewise.bench.commands.show_point", lambda point, *rest: shown.append(point))
    assert cli.main(["bench", "sparse"]) == 0
    assert shown == [complete(Point("sparse", seq=4096, sparsity=0.9))]
