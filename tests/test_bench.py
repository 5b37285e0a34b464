"""The measuring loop, the workloads it measures, the peers, sweeps and their CSV and plots."""

from __future__ import annotations

import csv
import sys
import types
from dataclasses import replace

import pytest
import torch

from tilewise import BlockSchedule, api
from tilewise.bench import bars, ceilings, measure, peers, plots, sweep, workloads
from tilewise.bench.measure import FAILED, OK, WRONG, Ceiling, Check, Kernel, Problem, time_calls
from tilewise.bench.records import COLUMNS, DIMENSIONS, machine, records
from tilewise.bench.workloads import Point, build, complete, infer

CPU = torch.device("cpu")
TINY = {
    "dense": Point(seq=48, heads=4, kv_heads=2, hdim=16),
    "causal": Point(batch=2, seq=40, heads=2, kv_heads=2, hdim=16, causal=True, dtype="bfloat16"),
    "sparse": complete(Point("sparse", seq=96, heads=2, kv_heads=2, hdim=16, sparsity=0.5, block=16)),
    "sparse causal": complete(
        Point("sparse", seq=96, heads=2, kv_heads=1, hdim=16, sparsity=0.3, block=16, causal=True)
    ),
    "decode": complete(Point("decode", batch=3, seq=37, heads=4, kv_heads=2, hdim=16)),
    "decode int8": complete(Point("decode", batch=2, seq=33, heads=4, kv_heads=2, hdim=32, kv_format="int8", tokens=3)),
    "prefix": complete(Point("prefix", batch=4, seq=9, prefix=50, heads=4, kv_heads=2, hdim=16)),
    "prefix int4": complete(Point("prefix", batch=2, seq=9, prefix=20, heads=2, kv_heads=2, hdim=32, kv_format="int4")),
}


@pytest.fixture(autouse=True)
def fixed_ceiling(monkeypatch):
    """The real ceiling takes seconds, and one test below measures it. One thread: two wait for each other when busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(workloads.ceilings, "of", lambda device, dtype: Ceiling(flops=1e11, bandwidth=1e10))
    yield
    torch.set_num_threads(threads)


def kernel(name, run, *, ours=False, same_answer=True):
    return Kernel(name, run, ours, flops=2_000_000, bytes=1_000_000, same_answer=same_answer)


def problem(*kernels):
    """A problem whose right answer is all ones."""

    def check(answer):
        error = (answer - 1).abs().max().item()
        return Check(error == 0, error, 0.25, "" if error == 0 else "not ones")

    return Problem("ones", CPU, torch.float32, list(kernels), check, (2, 3), 10, Ceiling(1e9, 1e8))


def ones(out):
    return torch.ones(2, 3) if out is None else out.fill_(1.0)


# ---- the loop ---------------------------------------------------------------------------------------------------


def test_calls_take_turns():
    order = []
    timings = time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, device=CPU, loops=3)
    assert "".join(order) == "ab" + "ab" * 3  # a warm-up each, then by turns
    assert timings["a"].loops == timings["b"].loops == 3


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `pass_by` moves: tests of numbers must not depend on how busy the machine is."""
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return pass_by


def test_timing_is_median_percentiles_and_fastest(clock):
    waits = iter([99.0, 4.0, 1.0, 2.0, 3.0, 40.0])  # the first is the warm-up
    timing = time_calls({"a": lambda: clock(next(waits))}, device=CPU, loops=5)["a"]
    assert (timing.median, timing.fastest, timing.loops) == (3.0, 1.0, 5)
    assert timing.p20 == pytest.approx(1.8)
    assert timing.p80 == pytest.approx(11.2)


@pytest.mark.parametrize(("seconds", "loops"), [(0.01, 40), (1.0, 5), (1e-6, 200)])
def test_loops_follow_the_time_budget(clock, seconds, loops):
    assert time_calls({"a": lambda: clock(seconds), "b": lambda: None}, device=CPU, budget=0.4)["a"].loops == loops


def test_wrong_kernel_is_reported_and_never_timed():
    calls = []

    def wrong(out):
        calls.append(out)
        return torch.full((2, 3), 1.5)

    results = measure.measure(problem(kernel("good", ones, ours=True), kernel("bad", wrong, ours=True)), loops=2)
    assert [r.status for r in results] == [OK, WRONG]
    assert results[1].error == 0.5
    assert results[1].baseline == 0.25
    assert results[1].timing is None
    assert len(calls) == 1


def test_element_that_is_not_written_is_wrong():
    """Memory often holds the right answer of the call before: ours is checked in NaN."""

    def forgets(out):
        out = torch.ones(2, 3) if out is None else out
        out[0] = 1.0
        return out

    (result,) = measure.measure(problem(kernel("forgets", forgets, ours=True)), loops=1)
    assert result.status == WRONG


def test_kernel_that_raises_is_listed_with_its_reason():
    def broken(out):
        raise RuntimeError("no kernel\nfor this")

    results = measure.measure(problem(kernel("ours", ones, ours=True), kernel("peer", broken)), loops=1)
    assert [r.status for r in results] == [OK, FAILED]
    assert results[1].reason == "RuntimeError: no kernel for this"


def test_derived_numbers(clock):
    def taking(seconds):
        def run(out):
            clock(seconds)
            return ones(out)

        return run

    peer, slow_peer = kernel("peer", taking(0.020)), kernel("slow", taking(0.030), same_answer=False)
    ours, _, other = measure.measure(problem(kernel("ours", taking(0.010), ours=True), peer, slow_peer), loops=5)
    assert ours.tflops == pytest.approx(2e6 / 0.010 / 1e12)
    assert ours.gbps == pytest.approx(1e6 / 0.010 / 1e9)
    assert ours.us_per_token_head == pytest.approx(0.010 / 10 * 1e6)
    assert ours.pct_of_ceiling == pytest.approx(100 * max(2e6 / 1e9, 1e6 / 1e8) / 0.010)
    assert ours.ratio_to == pytest.approx({"peer": 2.0, "slow": 3.0})
    assert ours.ratio_to_best_peer == pytest.approx(2.0)
    assert other.error is None  # it answers something else, so there is nothing to check


def test_ceiling_is_measured_once(monkeypatch):
    monkeypatch.undo()
    ceilings.of.cache_clear()
    first = ceilings.of(CPU, torch.float32)
    assert ceilings.of(CPU, torch.float32) is first
    a = torch.randn(512, 512)
    one = time_calls({"a": lambda: a @ a}, device=CPU, loops=20)["a"]
    assert first.flops > 0.2 * 2 * 512**3 / one.fastest
    assert 1e9 < first.bandwidth < 1e13


@pytest.mark.gpu
def test_cuda_loop_times_the_device_not_the_launch():
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    timings = time_calls({"one": lambda: a @ a, "four": lambda: [a @ a for _ in range(4)]}, device=device, loops=20)
    assert 3 < timings["four"].median / timings["one"].median < 5
    assert 2 * 4096**3 / timings["one"].median < 2e15


# ---- workloads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_every_kernel_and_peer_of_a_workload_passes_the_oracle(name):
    results = measure.measure(build(TINY[name]), loops=1)
    assert all(r.status == OK for r in results), [r for r in results if r.status != OK]
    assert any(r.ours for r in results)
    assert any(r.kernel == peers.SDPA for r in results)
    for r in results:
        assert r.error is not None or r.kernel == peers.SDPA  # dense SDPA beside a sparse problem answers another one
        assert r.timing is not None
        assert r.ratio_to_best_peer > 0


def test_data_is_random_and_never_zero():
    point = TINY["dense"]
    q = workloads._random(point, torch.Generator().manual_seed(0), 1, 64, 4, 16)
    assert (q == 0).sum() == 0
    assert 0.9 < q.std() < 1.1
    assert abs(q.mean()) < 0.1


@pytest.mark.parametrize("name", ["dense", "causal", "sparse", "prefix", "decode int8"])
def test_wrong_answer_of_the_library_is_found(name, monkeypatch):
    """One element of one row is off, in the call that the workload makes."""
    for call in ("attention", "decode", "shared_prefix_attention"):
        real = getattr(api, call)

        def slightly_wrong(*args, _real=real, **options):
            o = _real(*args, **options)
            o[-1, -1, -1, -1] += 0.25 if o.dtype == torch.bfloat16 else 0.001
            return o

        monkeypatch.setattr(workloads.api, call, slightly_wrong)
    results = measure.measure(build(TINY[name]), loops=1)
    assert all(r.status == (WRONG if r.ours else OK) for r in results), results


def test_flops_count_visible_pairs_only():
    def flops(point):
        return {k.name: k.flops for k in build(point).kernels}["tilewise cpu"]

    dense = Point(seq=48, heads=4, kv_heads=2, hdim=16)
    assert flops(dense) == 4 * 16 * 4 * 48 * 48
    assert flops(replace(dense, causal=True)) == 4 * 16 * 4 * (48 * 49 // 2)
    sparse = complete(Point("sparse", seq=64, heads=2, kv_heads=2, hdim=16, sparsity=0.75, block=16))
    assert flops(sparse) == 4 * 16 * 2 * 64 * 16
    decode = complete(Point("decode", batch=3, seq=10, tokens=2, heads=2, kv_heads=2, hdim=16))
    assert flops(decode) == 4 * 16 * 2 * 3 * (9 + 10)


def test_bytes_are_what_each_layout_must_move():
    point = TINY["prefix"]
    kernels = {k.name: k.bytes for k in build(point).kernels}
    token, q_and_o = 2 * 2 * 16 * 4, 2 * 4 * 4 * 16 * 4
    assert kernels[peers.SDPA] == 4 * 59 * token + q_and_o
    assert kernels["tilewise cpu"] == (50 + 4 * 9) * token + q_and_o
    quantised = {k.name: k.bytes for k in build(TINY["prefix int4"]).kernels}
    assert quantised["tilewise cpu"] < 0.5 * quantised["tilewise cpu, no cache"]


def test_large_problem_is_checked_in_an_even_spread_of_rows(monkeypatch):
    monkeypatch.setattr(workloads, "PAIRS_AT_ONCE", 4 * 100 * 2)
    monkeypatch.setattr(workloads, "ORACLE_PAIRS", 4 * 100 * 2 * 5)
    blocks = list(workloads._row_blocks(2, 100, 100, 2))
    assert len(blocks) == 5
    assert blocks[0] == (0, 0, 4)
    assert blocks[-1] == (1, 96, 100)
    monkeypatch.setattr(workloads, "ORACLE_PAIRS", 1 << 40)
    assert len(list(workloads._row_blocks(2, 100, 100, 2))) == 50


def test_npy_schedule_is_read_at_the_points_block_size(tmp_path):
    path = tmp_path / "c.npy"
    expected = BlockSchedule.causal(128, 128, block_q=32, block_k=32)
    expected.save(path)
    point = complete(Point("sparse", seq=128, heads=2, kv_heads=2, hdim=16, sched=str(path), block=32))
    assert workloads._schedule(point) == expected
    assert all(r.status == OK for r in measure.measure(build(point), loops=1))


def test_options_say_which_workload():
    assert infer(seq=64).workload == "dense"
    assert infer(sparsity=0.5).workload == "sparse"
    assert infer(kv_format="int8").workload == "decode"
    assert infer(prefix=10).workload == "prefix"
    assert infer(prefix=10, dtype="bfloat16").kv_format == "bf16"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seq": 0}, "seq"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads"),
        ({"hdim": 513}, "hdim"),
        ({"dtype": "float64"}, "dtype"),
        ({"sparsity": 1.0}, "sparsity"),
        ({"kv_format": "fp4"}, "kv_format"),
        ({"prefix": 4, "sparsity": 0.5}, "sparsity"),
        ({"kv_format": "fp32", "tokens": 2000}, "tokens"),
        ({"kv_format": "fp32", "page_size": 300}, "page_size"),
    ],
)
def test_impossible_point_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        infer(**options)


# ---- peers and bars ---------------------------------------------------------------------------------------------


def test_peers_on_the_cpu_are_absent_with_one_line():
    q = torch.randn(1, 8, 2, 16)
    runs, absent = peers.cuda_peers(q, q, q, causal=False)
    assert runs == {}
    assert all(name in absent for name in ("FlashAttention-2", "FlashAttention-3", "FlashInfer", "cpu"))
    assert "\n" not in absent


def test_peer_is_found_by_import_under_any_of_its_names(monkeypatch):
    assert peers.find("FlashAttention-3") == "not installed"
    module = types.ModuleType("fa3_fwd_interface")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    assert peers.find("FlashAttention-3") is module


def test_peer_that_does_not_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("import module_that_is_not_there\n")
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcuda.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "module_that_is_not_there" in peers.find("FlashAttention-2")
    assert "libcuda.so.1" in peers.find("FlashInfer")
    sys.modules.pop("flash_attn", None)
    sys.modules.pop("flashinfer", None)


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for the branches that only ask."""

    @property
    def device(self):
        return torch.device("cuda")


def test_importable_peers_are_called_and_others_named(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = lambda q, k, v, causal: (q + 1 if causal else q, None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q = torch.randn(1, 8, 2, 16).as_subclass(OnCuda)
    runs, absent = peers.cuda_peers(q, q, q, causal=True)
    assert list(runs) == ["FlashAttention-2"]
    assert torch.equal(runs["FlashAttention-2"](None), q + 1)
    assert "FlashAttention-3 (not installed)" in absent
    assert "FlashInfer (not installed)" in absent


def test_flashinfer_is_planned_once_and_run_packed(monkeypatch):
    """Its own layout is packed sequences with their starts; planning is not part of what is timed."""
    planned = []

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts_q, starts_k, heads, kv_heads, head_dim, *, causal, q_data_type):
            planned.append((starts_q.tolist(), starts_k.tolist(), heads, kv_heads, head_dim, causal, q_data_type))

        def run(self, q, k, v):
            assert (q.shape, k.shape) == ((2 * 3, 4, 16), (2 * 5, 2, 16))
            return q * 2

    monkeypatch.setattr(peers.torch, "empty", lambda *a, device, **o: torch.zeros(1))
    monkeypatch.setattr(peers.torch, "arange", lambda n, device, **o: torch.tensor(range(n), **o))
    module = types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 16)
    run = peers._flashinfer(module, q, k, k, True)
    for _ in range(3):
        assert torch.equal(run(None), q * 2)
    assert planned == [([0, 3, 6], [0, 5, 10], 4, 2, 16, True, torch.float32)]


def test_bars_are_the_ones_promised():
    dense, causal, prefix, sparse = bars.BARS
    assert (dense.at_least, causal.at_least, prefix.at_least, sparse.at_least) == (0.95, 0.95, 4.0, 5.0)
    assert not dense.point.causal
    assert causal.point.causal
    p = prefix.point
    assert (p.batch, p.prefix, p.seq, p.heads, p.kv_heads, p.hdim, p.dtype) == (16, 2048, 128, 32, 8, 128, "float32")
    assert (sparse.point.seq, sparse.point.sparsity, sparse.point.block) == (4096, 0.9, 64)
    assert (bars.PLAN_BAR.seqs, bars.PLAN_BAR.tokens, bars.PLAN_BAR.below) == (256, 65536, 0.020)
    assert all(bar.peer == peers.SDPA for bar in bars.BARS)


def test_bar_is_met_by_the_ratio_to_its_peer_alone():
    bar = bars.BARS[0]
    result = measure.Result("tilewise cpu", True, OK, ratio_to={peers.SDPA: 0.96, "faster peer": 0.5})
    assert bar.met_by(result) is True
    assert bar.met_by(replace(result, ratio_to={peers.SDPA: 0.94})) is False
    assert bar.met_by(replace(result, status=WRONG)) is False
    assert bar.met_by(replace(result, kernel=peers.SDPA)) is None


def test_planning_bar_plans_what_it_says(monkeypatch):
    plans = []
    real = api.plan_decode
    monkeypatch.setattr(bars.api, "plan_decode", lambda *a, **o: plans.append(real(*a, **o)))
    result = bars.run_plan_bar(loops=1)
    assert result.timing.loops == 1
    assert len(plans[0].seqs) == 256
    stored = bars.PLAN_BAR.prefix + sum(n - bars.PLAN_BAR.prefix for n in plans[0].lengths)
    assert stored == 65536


# ---- sweeps -----------------------------------------------------------------------------------------------------


def points_of(**lists):
    return sweep.combinations(lists, Point(heads=2, kv_heads=2, hdim=16))[0]


def run_sweep(path, points, **options):
    with sweep.Sheet(path, **options) as sheet:
        return sweep.run(points, sheet, loops=1)


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_combinations_are_all_of_them_and_impossible_ones_are_told():
    points, left_out = sweep.combinations({"seq": [32, 64], "heads": [4, 6], "kv_heads": [2, 4]}, Point(hdim=16))
    assert [(p.seq, p.heads, p.kv_heads) for p in points] == [
        (seq, heads, kv) for seq in (32, 64) for heads, kv in ((4, 2), (4, 4), (6, 2))
    ]
    assert len(left_out) == 2
    assert "kv_heads must divide heads=6" in left_out[0]


def test_kv_heads_follow_heads_unless_given():
    assert {(p.heads, p.kv_heads) for p in points_of(heads=[2, 4])} == {(2, 2), (4, 4)}


def test_csv_has_a_row_for_each_kernel_with_everything(tmp_path):
    path = tmp_path / "new folder" / "a.csv"
    run_sweep(path, points_of(seq=[32], sparsity=[0.0, 0.5], block=[16]))
    rows = rows_of(path)
    assert list(rows[0]) == list(COLUMNS)
    assert set(DIMENSIONS) <= set(COLUMNS)
    dense, sparse = ([row for row in rows if row["workload"] == w] for w in ("dense", "sparse"))
    assert [row["kernel"] for row in dense] == ["tilewise cpu", peers.SDPA]
    assert [row["kernel"] for row in sparse] == ["tilewise cpu", peers.SDPA, peers.SDPA_MASK]
    for row in (dense[0], sparse[0]):
        assert row["status"] == "ok"
        assert row["torch"] == torch.__version__
        assert row["machine"]
        assert row["date"].startswith("20")
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        for name in ("tflops", "gbps", "us_per_token_head", "pct_of_ceiling", "ratio_to_best_peer"):
            assert float(row[name]) > 0
        assert float(row["error"]) < 1e-5
        assert float(row["error_baseline"]) < 1e-5


def test_rows_are_on_disk_as_soon_as_a_point_is_measured(tmp_path):
    path = tmp_path / "a.csv"
    seen = []
    with sweep.Sheet(path) as sheet:
        sweep.run(points_of(seq=[32, 48]), sheet, loops=1, after=lambda point, results: seen.append(len(rows_of(path))))
    assert seen == [2, 4]


def test_resume_skips_what_is_there(tmp_path):
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32]))
    before = path.read_text()
    started = []
    with sweep.Sheet(path, resume=True) as sheet:
        sweep.run(points_of(seq=[32, 48]), sheet, loops=1, before=started.append)
    assert [p.seq for p in started] == [48]
    assert path.read_text().startswith(before)
    assert [row["seq"] for row in rows_of(path)] == ["32", "32", "48", "48"]


@pytest.mark.parametrize("cut", [5, 60])
def test_torn_last_line_is_measured_again(tmp_path, cut):
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32, 48]))
    path.write_bytes(path.read_bytes()[:-cut])
    started = []
    with sweep.Sheet(path, resume=True) as sheet:
        sweep.run(points_of(seq=[32, 48]), sheet, loops=1, before=started.append)
    assert [p.seq for p in started] == [48]
    assert sorted(row["seq"] for row in rows_of(path)) == ["32", "32", "48", "48"]
    assert all(row["status"] == "ok" for row in rows_of(path))


def test_point_with_a_missing_row_is_measured_again(tmp_path):
    """Killed between the lines of one point: nothing looks torn."""
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32, 48]))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    run_sweep(path, points_of(seq=[32, 48]), resume=True)
    assert sorted(row["seq"] for row in rows_of(path)) == ["32", "32", "48", "48"]


def test_resume_on_an_empty_file_starts_over(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("date,tilew")
    run_sweep(path, points_of(seq=[32]), resume=True)
    assert len(rows_of(path)) == 2


def test_point_of_another_machine_is_not_this_ones(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32]))
    path.write_text(path.read_text().replace(machine("cpu"), "another machine"))
    with sweep.Sheet(path, resume=True) as sheet:
        assert not sheet.has(points_of(seq=[32])[0])


@pytest.mark.parametrize("column", ["tilewise", "torch", "threads"])
def test_point_of_another_version_is_measured_again_and_both_are_kept(tmp_path, column):
    path = tmp_path / "a.csv"
    (point,) = points_of(seq=[32])
    run_sweep(path, [point])
    rows = [{**row, column: "77"} for row in rows_of(path)]
    sweep._write_whole(path, rows)
    with sweep.Sheet(path, resume=True) as sheet:
        assert not sheet.has(point)
        assert sheet.foreign_rows == 2
    run_sweep(path, [point], resume=True)
    with sweep.Sheet(path, resume=True) as sheet:
        assert sheet.has(point)
        assert sheet.foreign_rows == 2
    assert rows_of(path)[:2] == rows
    assert len(rows_of(path)) == 4


def test_existing_csv_is_never_overwritten_unasked(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"--resume.*--force"):
        sweep.Sheet(path)
    assert path.read_text() == "mine"
    with sweep.Sheet(path, force=True):
        pass
    assert rows_of(path) == []


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3\n", ",".join(COLUMNS) + "\n1,2,3\n", "\0\xff\n"])
def test_csv_that_is_no_sweeps_is_refused(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"a\.csv"):
        sweep.Sheet(path, resume=True)
    assert path.read_text(encoding="latin-1") == text


def test_point_that_cannot_be_built_is_a_row_with_its_reason(tmp_path):
    path = tmp_path / "a.csv"
    bad = complete(Point("sparse", seq=32, heads=2, kv_heads=2, hdim=16, sched=str(tmp_path / "none.npz")))
    results = run_sweep(path, [bad, *points_of(seq=[32])])
    assert results[0].status == FAILED
    assert [row["status"][:6] for row in rows_of(path)] == ["failed", "ok", "ok"]


def test_records_of_a_wrong_kernel_hold_no_infinity():
    (row,) = records(TINY["dense"], [measure.Result("k", True, WRONG, "NaN in it", error=float("inf"), baseline=0.1)])
    assert row["error"] is None
    assert row["status"] == "WRONG: NaN in it"


# ---- plots ------------------------------------------------------------------------------------------------------


def test_plots_are_drawn_for_axes_with_more_than_one_value(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[32, 64], hdim=[16, 32]))
    drawn = plots.draw(path)
    assert [p.name for p in drawn] == [f"s_{m}_over_seq.png" for m in ("latency", "throughput", "speedup")]
    assert all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in drawn)


def test_a_panel_has_one_line_per_kernel_with_units(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[64], sparsity=[0.0, 0.5], block=[16], hdim=[16, 32]))
    rows = [row for row in sweep.read(path)[0] if row["status"] == "ok"]
    figure = plots._figure(rows, "sparsity", "latency")
    assert "Latency over sparsity" in figure.get_suptitle()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["D 16", "D 32"]
    for axes in panels:
        labels = [line.get_label() for line in axes.lines]
        assert labels == ["tilewise cpu", peers.SDPA, peers.SDPA_MASK]
        assert [len(line.get_xdata()) for line in axes.lines] == [2, 2, 1]
        assert axes.get_ylabel() == "median time (ms)"
        assert "sparsity" in axes.get_xlabel()
        assert axes.get_legend() is not None


def test_axis_that_no_panel_has_two_values_of_is_skipped_and_told(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, [*points_of(seq=[32], heads=[1]), *points_of(seq=[48], heads=[2], sparsity=[0, 0.5], block=[16])])
    skipped = []
    drawn = plots.draw(path, skipped.append)
    assert [p.name for p in drawn] == [f"s_{m}_over_sparsity.png" for m in ("latency", "throughput", "speedup")]
    assert len(skipped) == 1
    assert "seq" in skipped[0]


def test_versions_and_machines_have_panels_of_their_own(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[32, 64]))
    rows = rows_of(path)
    figure = plots._figure([*rows, *({**row, "torch": "2.0.0"} for row in rows)], "seq", "latency")
    assert [axes.get_title() for axes in figure.axes] == [f"torch {torch.__version__}", "torch 2.0.0"]
    assert all(len(line.get_xdata()) == 2 for axes in figure.axes for line in axes.lines)


def test_wrong_kernels_are_not_drawn(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[32, 64]))
    path.write_text(path.read_text().replace(",ok\n", ",WRONG: off\n"))
    assert plots.draw(path) == []
