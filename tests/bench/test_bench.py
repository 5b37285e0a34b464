"""The measuring loop, the workloads it measures, the peers, sweeps and their CSV and plots."""

from __future__ import annotations

import csv
import json
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tilewise import BlockSchedule, api, cli
from tilewise.bench import bars, ceilings, measure, peers, plots, prefill, sweep, workloads
from tilewise.bench.measure import FAILED, OK, WRONG, Ceiling, Check, Kernel, Problem, Result, time_calls
from tilewise.bench.records import COLUMNS, DIMENSIONS, machine, records
from tilewise.bench.workloads import Point, build, complete, infer

CPU = torch.device("cpu")
TINY = {
    "dense": Point(seq=48, heads=4, kv_heads=2, hdim=16),
    "causal": Point(batch=2, seq=40, heads=2, kv_heads=2, hdim=16, causal=True, dtype="bfloat16"),
    "window": complete(Point(batch=2, seq=70, heads=4, kv_heads=2, hdim=16, window=9)),
    "varlen": complete(Point("varlen", batch=4, lengths="3-60", heads=4, kv_heads=2, hdim=16)),
    "varlen causal": complete(Point("varlen", batch=3, lengths="5-40", heads=2, kv_heads=2, hdim=16, causal=True)),
    "varlen window": complete(Point("varlen", batch=3, lengths="5-40", heads=2, kv_heads=2, hdim=16, window=4)),
    "sparse": complete(Point("sparse", seq=96, heads=2, kv_heads=2, hdim=16, sparsity=0.5, block=16)),
    "sparse causal": complete(
        Point("sparse", seq=96, heads=2, kv_heads=1, hdim=16, sparsity=0.3, block=16, causal=True)
    ),
    "sparse window": complete(Point("sparse", seq=96, heads=2, kv_heads=2, hdim=16, sparsity=0.3, block=16, window=30)),
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


class Event:
    """A CUDA event on the fake clock; `log` has what happened in order."""

    log: list = []  # noqa: RUF012 - emptied by the fixture

    def record(self):
        self.at = measure.time.perf_counter()
        self.log.append("event")

    def synchronize(self):
        self.log.append(("waits for", self.at))

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def card(monkeypatch, clock):
    """A GPU as far as the loop knows one: what runs there takes the time that it passes on the clock."""
    Event.log.clear()
    monkeypatch.setattr(measure, "_event", Event)
    monkeypatch.setattr(measure, "_synchronize", lambda device: Event.log.append("synchronized"))
    monkeypatch.setattr(measure, "_flusher", lambda calls, device: lambda: (clock(0.25), Event.log.append("flush")))

    def call(name, seconds):
        return lambda: (clock(seconds), Event.log.append(name))

    return call


def test_flush_lasts_longer_than_the_slowest_call_takes_the_host(card, monkeypatch):
    monkeypatch.undo()  # the real flusher, on a card of our own making
    reads: list[int] = []

    class Buffer:
        def sum(self) -> None:
            reads.append(1)

    class Event:
        def record(self) -> None: ...
        def elapsed_time(self, other: object) -> float:
            return 4 * 0.05  # ms for four reads

    now = [0.0]
    monkeypatch.setattr(measure.torch, "zeros", lambda *a, **k: Buffer())
    monkeypatch.setattr(measure, "_event", Event)
    monkeypatch.setattr(measure, "_synchronize", lambda device: None)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def call(seconds: float):
        return lambda: now.__setitem__(0, now[0] + seconds)

    flush = measure._flusher([call(20e-6), call(300e-6)], torch.device("cpu"))
    reads.clear()
    flush()
    assert len(reads) * 50e-6 >= 2 * 300e-6


def test_card_is_hot_before_it_is_timed(card):
    calls = {"a": card("a", 0.1), "b": card("b", 0.2)}
    timings = time_calls(calls, device=torch.device("cuda"), loops=2, heat=3.0)
    before = Event.log[: Event.log.index("flush")]
    assert before.count("a") == before.count("b") == 1 + 10  # a warm-up, then 3 s of rounds
    assert timings["a"].median == pytest.approx(0.1)  # the flush is not in it
    assert timings["b"].median == pytest.approx(0.2)
    Event.log.clear()
    time_calls(calls, device=torch.device("cuda"), loops=2, heat=0.0)
    assert Event.log.index("flush") == 3  # the two warm-ups and their end


def test_every_timed_call_follows_a_flush_and_nobody_has_a_fixed_neighbour(card):
    calls = {name: card(name, 0.1) for name in "abc"}
    timings = time_calls(calls, device=torch.device("cuda"), loops=60, heat=0.0)
    assert {timing.loops for timing in timings.values()} == {60}
    timed = Event.log[Event.log.index("flush") :]
    order = [entry for entry in timed if entry in calls]
    assert all(sorted(order[i : i + 3]) == ["a", "b", "c"] for i in range(0, 180, 3))
    assert {a + b for a, b in pairwise(order)} >= {"ab", "ac", "ba", "bc", "ca", "cb"}
    for i, entry in enumerate(timed):
        if entry in calls:
            assert timed[i - 2 : i + 2] == ["flush", "event", entry, "event"]


def test_host_stays_a_round_ahead_so_that_the_card_does_not_rest(card):
    time_calls({"a": card("a", 0.75)}, device=torch.device("cuda"), loops=3, heat=0.0)
    timed = Event.log[Event.log.index("flush") :]
    one = ["flush", "event", "a", "event"]
    start = 0.75  # after the warm-up
    assert timed == [*one, *one, ("waits for", start + 1.0), *one, ("waits for", start + 2.0), "synchronized"]


def test_host_cost_is_of_one_call_and_without_the_first_batch(clock):
    waits = iter([1.0] * 10 + [0.01] * 10 + [0.03] * 10 + [0.02] * 10)
    cost = measure.host_cost(lambda: clock(next(waits)), CPU, batches=3, calls=10)
    assert cost.median == pytest.approx(0.02)
    assert cost.fastest == pytest.approx(0.01)
    assert cost.loops == 3


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
    assert any(r.kernel.startswith(peers.SDPA) for r in results)
    for r in results:
        # dense SDPA beside a sparse problem answers another one, and a padded one without a mask sees the padding
        assert r.error is not None or r.kernel in (peers.SDPA, peers.SDPA_PADDED)
        assert r.timing is not None
        assert r.ratio_to_best_peer > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "window", "varlen", "varlen causal", "varlen window"])
def test_kernels_on_a_card_are_judged_there(name):
    results = measure.measure(build(replace(TINY[name], device="cuda", dtype="bfloat16", hdim=64)), loops=1)
    ours = [r for r in results if r.ours]
    assert [r.kernel for r in ours] == ["tilewise cuda", "tilewise cuda, exact"]
    assert all(r.status == OK and r.error is not None for r in ours), results


def test_window_and_lengths_are_options_of_bench_and_lists_of_sweep(capsys, tmp_path):
    small = ["--heads", "2", "--hdim", "16", "--loops", "1"]
    assert cli.main(["bench", "--seq", "40", "--window", "8", *small, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["workload"], row["window"], row["causal"], row["status"]) == ("dense", 8, True, "ok")
    path = tmp_path / "a.csv"
    lists = ["--window", "0", "8", "--lengths", "4-20", "10-30", "--batch", "3"]
    assert cli.main(["sweep", *lists, *small, "--csv", str(path)]) == 0
    found = {(row["workload"], row["window"], row["lengths"], row["seq"]) for row in rows_of(path)}
    assert found == {("varlen", w, n, n.split("-")[1]) for w in ("0", "8") for n in ("4-20", "10-30")}


def test_data_is_random_and_never_zero():
    point = TINY["dense"]
    q = workloads._random(point, torch.Generator().manual_seed(0), 1, 64, 4, 16)
    assert (q == 0).sum() == 0
    assert 0.9 < q.std() < 1.1
    assert abs(q.mean()) < 0.1


@pytest.mark.parametrize("name", ["dense", "causal", "window", "varlen", "sparse", "prefix", "decode int8"])
def test_wrong_answer_of_the_library_is_found(name, monkeypatch):
    """One element of one row is off, in the call that the workload makes."""
    for call in ("attention", "attention_varlen", "decode", "shared_prefix_attention"):
        real = getattr(api, call)

        def slightly_wrong(*args, _real=real, **options):
            o = _real(*args, **options)
            o[-1, ..., -1, -1] += 0.25 if o.dtype == torch.bfloat16 else 0.001
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
    # Of 48 rows all but the first 9 see 10 keys.
    assert flops(complete(replace(dense, window=9))) == 4 * 16 * 4 * (sum(range(1, 10)) + 39 * 10)
    ragged = complete(Point("varlen", batch=2, lengths="10-20", heads=2, kv_heads=2, hdim=16))
    assert flops(ragged) == 4 * 16 * 2 * (10 * 10 + 20 * 20)
    assert flops(replace(ragged, causal=True)) == 4 * 16 * 2 * (10 * 11 // 2 + 20 * 21 // 2)
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
    ragged = build(TINY["varlen"])
    lengths = workloads.lengths_of(TINY["varlen"])
    packed, padded = (k.bytes for k in ragged.kernels)
    assert packed == 2 * sum(lengths) * (4 + 2) * 16 * 4
    assert padded == 2 * 4 * 60 * (4 + 2) * 16 * 4
    assert ragged.token_heads == sum(lengths) * 4
    quantised = {k.name: k.bytes for k in build(TINY["prefix int4"]).kernels}
    assert quantised["tilewise cpu"] < 0.5 * quantised["tilewise cpu, no cache"]


def test_large_problem_is_checked_in_an_even_spread_of_rows(monkeypatch):
    sizes = [(100, 100)] * 2
    monkeypatch.setitem(workloads.PAIRS_AT_ONCE, "cpu", 4 * 100 * 2)
    monkeypatch.setitem(workloads.ORACLE_PAIRS, "cpu", 4 * 100 * 2 * 5)
    blocks = list(workloads._row_blocks(sizes, 2, "cpu"))
    assert len(blocks) == 5
    assert blocks[0] == (0, 0, 4)
    assert blocks[-1] == (1, 96, 100)
    assert len(list(workloads._row_blocks(sizes, 2, "cuda"))) == 2  # a card has time and room for all of it
    monkeypatch.setitem(workloads.ORACLE_PAIRS, "cpu", 1 << 40)
    assert len(list(workloads._row_blocks(sizes, 2, "cpu"))) == 50
    ragged = list(workloads._row_blocks([(10, 10), (100, 100)], 2, "cpu"))
    assert [sum(stop - start for b, start, stop in ragged if b == n) for n in (0, 1)] == [10, 100]


@pytest.mark.parametrize("name", ["window", "varlen window", "causal", "decode int8"])
def test_blocks_of_rows_see_the_keys_that_the_whole_sees(name, monkeypatch):
    monkeypatch.setitem(workloads.PAIRS_AT_ONCE, "cpu", 500)
    results = measure.measure(build(TINY[name]), loops=1)
    assert all(r.status == OK for r in results), results


def test_lengths_are_spaced_geometrically_in_no_order():
    point = complete(Point("varlen", batch=16, lengths="100-16384"))
    lengths = workloads.lengths_of(point)
    assert point.seq == 16384
    ordered = sorted(lengths)
    assert (ordered[0], ordered[-1], len(set(ordered))) == (100, 16384, 16)
    assert all(b / a == pytest.approx(163.84 ** (1 / 15), rel=0.01) for a, b in pairwise(ordered))
    assert lengths != ordered
    assert lengths == workloads.lengths_of(point)
    assert workloads.lengths_of(replace(point, batch=1)) == [16384]
    assert "16 × 100-16384 tokens" in point.title


def test_standard_softmax_is_measured_beside_the_lazy_one_on_a_card():
    assert workloads.variants(Point()) == {"tilewise cpu": {"backend": "auto"}}
    assert workloads.variants(Point(device="cuda")) == {
        "tilewise cuda": {"backend": "auto"},
        "tilewise cuda, exact": {"backend": "auto", "exact": True},
    }


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
    assert infer(window=64).workload == "dense"
    assert infer(window=64).causal
    assert infer(lengths="100-200", batch=4).workload == "varlen"
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
        ({"kv_format": "fp32", "window": 8}, "window"),
        ({"window": -1}, "window"),
        ({"lengths": "many"}, "lengths"),
        ({"lengths": "200-100"}, "lengths"),
        ({"lengths": "0-100"}, "lengths"),
        ({"lengths": "1-2-3"}, "lengths"),
        ({"lengths": "100-200", "sparsity": 0.5}, "lengths"),
        ({"lengths": "100-200", "kv_format": "fp32"}, "lengths"),
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


def test_window_and_lengths_are_asked_for_as_the_peers_have_them(monkeypatch):
    calls = []
    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func = lambda *args, **options: calls.append((args[3:], options)) or args[0]
    module.flash_attn_varlen_func = module.flash_attn_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    monkeypatch.setattr(peers, "starts_of", lambda lengths, device: list(lengths))
    q = torch.randn(1, 8, 2, 16).as_subclass(OnCuda)
    packed = torch.randn(7, 2, 16).as_subclass(OnCuda)
    peers.cuda_peers(q, q, q, causal=True, window=5)[0][peers.FA3](None)
    peers.cuda_peers(packed, packed, packed, causal=False, lengths=[3, 4])[0][peers.FA3](None)
    peers.cuda_peers(packed, packed, packed, causal=True, window=2, lengths=[3, 4])[0][peers.FA3](None)
    assert calls == [
        ((), {"causal": True, "window_size": (5, 0)}),
        (([3, 4], [3, 4], 4, 4), {"causal": False}),
        (([3, 4], [3, 4], 4, 4), {"causal": True, "window_size": (2, 0)}),
    ]


def test_starts_are_where_each_sequence_begins():
    starts = peers.starts_of([3, 1, 2], CPU)
    assert starts.tolist() == [0, 3, 4, 6]
    assert starts.dtype == torch.int32


def test_torch_carries_two_peers_on_a_card_and_chooses_itself_elsewhere(monkeypatch):
    chosen = []
    monkeypatch.setattr(peers, "sdpa_kernel", lambda backend: chosen.append(backend.name) or nullcontext())
    q = torch.randn(1, 8, 4, 16)
    assert peers.torch_backends(q, q, q, causal=True) == {}
    on_card, k = q.as_subclass(OnCuda), q[:, :, :2].as_subclass(OnCuda)
    runs = peers.torch_backends(on_card, k, k, causal=True)
    expected = peers.torch_sdpa(q, q[:, :, :2], q[:, :, :2], mask=None, causal=True)(None)
    assert list(runs) == [peers.CUDNN, peers.FA2]
    for run in runs.values():
        torch.testing.assert_close(run(None).as_subclass(torch.Tensor), expected)
    assert chosen == ["CUDNN_ATTENTION", "FLASH_ATTENTION"]


def test_padded_batch_has_zeros_behind_the_shorter_sequences():
    x = torch.arange(1.0, 7.0).view(6, 1, 1)
    assert peers.pad(x, [2, 1, 3]).flatten(1).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert peers.padded_sdpa(x, x, x, causal=True, lengths=[2, 1, 3])[0] == peers.SDPA_PADDED
    on_card = x.as_subclass(OnCuda)
    assert peers.padded_sdpa(on_card, on_card, on_card, causal=True, lengths=[2, 1, 3])[0] == peers.CUDNN_PADDED


def test_flashinfer_is_planned_once_and_run_packed(monkeypatch):
    """Its own layout is packed sequences with their starts; planning is not part of what is timed."""
    planned = []

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts_q, starts_k, *sizes, **options):
            planned.append((starts_q.tolist(), starts_k.tolist(), sizes, options))

        def run(self, q, k, v):
            assert (q.shape, k.shape) == ((2 * 3, 4, 16), (2 * 5, 2, 16))
            return q * 2

    monkeypatch.setattr(peers.torch, "empty", lambda *a, device, **o: torch.zeros(1))
    module = types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 16)
    run = peers._flashinfer(module, q, k, k, True, 0, None)
    for _ in range(3):
        assert torch.equal(run(None), q * 2)
    options = {"causal": True, "q_data_type": torch.float32}
    assert planned == [([0, 3, 6], [0, 5, 10], (4, 2, 16), options)]
    monkeypatch.setattr(Wrapper, "run", lambda self, q, k, v: q)
    packed = torch.randn(6, 4, 16)
    assert peers._flashinfer(module, packed, packed, packed, True, 7, [2, 4])(None).shape == packed.shape
    assert planned[1] == ([0, 2, 6], [0, 2, 6], (4, 4, 16), {**options, "window_left": 7})


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


# ---- the prefill table ------------------------------------------------------------------------------------------


def test_prefill_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = {row.name: row for row in prefill.rows("cuda")}
    assert len(rows) == 1 + 24 + 3 + 2 + 1 + 2
    assert len({row.point for row in rows.values()}) == len(rows)  # a resumed CSV tells them apart
    dtypes = {name: row.point.dtype for name, row in rows.items()}
    assert all(dtype == ("float8" if name.startswith("FP8") else "bfloat16") for name, dtype in dtypes.items())
    assert all(row.point.device == "cuda" for row in rows.values())
    for hdim in (64, 128, 256):
        for n in (512, 2048, 8192, 16384):
            for causal in (False, True):
                row = rows[f"D {hdim}, N {n}, {'causal' if causal else 'full'}"]
                p = row.point
                assert (p.batch * p.seq, p.heads * p.hdim, p.kv_heads, p.causal) == (16384, 2048, p.heads, causal)
                assert row.goals[1].text == "≥ 0.97×"
    bars = {name: [goal.text for goal in row.goals] for name, row in rows.items()}
    assert {bars[f"D {d}, N 512, {m}"][0] for d in (64, 128, 256) for m in ("full", "causal")} == {"≥ 1.1×"}
    assert {bars[f"D 256, N {n}, {m}"][0] for n in (2048, 8192, 16384) for m in ("full", "causal")} == {"≥ 1×"}
    assert [bars[f"D 128, N {n}, full"][0] for n in (2048, 8192, 16384)] == ["≥ 1.03×", "≥ 1.1×", "≥ 1.1×"]
    assert [bars[f"D 128, N {n}, causal"][0] for n in (2048, 8192, 16384)] == ["≥ 1.03×", "≥ 1.05×", "≥ 1.05×"]
    assert [bars[f"D 64, N {n}, causal"][0] for n in (2048, 8192, 16384)] == ["≥ 1.03×", "≥ 1.07×", "≥ 1.07×"]
    grouped = [row for name, row in rows.items() if name.startswith("64/8")]
    assert [(row.point.seq, row.point.kv_heads, row.goals[0].text) for row in grouped] == [
        (n, 8, "≥ 1.04×") for n in (4096, 16384, 32768)
    ]
    assert bars["varlen 100-16384, causal"] == ["≥ 1.15×", "≥ 0.9×"]
    assert rows["varlen 100-16384, causal"].beside[1] == rows["D 128, N 16384, causal"].point
    assert rows["varlen 100-16384, full"].beside[1] == rows["D 128, N 16384, full"].point
    window = rows["window 1024, N 16384, causal"]
    assert (window.point.window, window.beside[1]) == (1024, rows["D 128, N 16384, causal"].point)
    assert window.goals[0].text == "≤ 1.3×"
    assert bars["FP8, D 128, N 16384, full"] == ["≥ 900 TFLOP/s"]
    assert next(iter(bars.values())) == ["≤ 15 µs", "≥ 1"]  # the host's, before anything captures a graph


def test_share_of_tiles_is_counted_by_formula():
    assert prefill.tile_share(16384, 1024) == (36 + 120 * 9) / (128 * 129 // 2)
    assert prefill.tile_share(1024, 1024) == 1
    n, window = 1000, 200
    seen = torch.ones(n, n).tril().triu(-window).bool()
    tiles = torch.nn.functional.max_pool2d(seen[None].float(), 128, ceil_mode=True).sum()
    assert prefill.tile_share(n, window) == tiles / (8 * 9 // 2)


def outcome_of(*results, goals=(), **options):
    return prefill.Outcome(prefill.Row("row", Point(device="cuda"), goals, **options), list(results))


def timed(kernel, seconds=1.0, *, tflops=None, ours=True, **ratios):
    return Result(kernel, ours, OK, timing=measure.Timing(seconds, 0, 0, 0, 1), tflops=tflops, ratio_to=ratios)


def test_bar_is_set_against_the_better_of_both_peers():
    goal, exact = prefill.Goal(prefill.over_best, 1.1), prefill.Goal(prefill.exact_over_best, 0.97, what="exact")
    ratios = {peers.CUDNN: 1.3, peers.FA3: 1.0996}
    both = [timed(name, ours=False) for name in prefill.PEERS]
    slow = timed("tilewise cuda, exact", **{peers.CUDNN: 1.2, peers.FA3: 0.98})
    outcome = outcome_of(timed("tilewise cuda", **ratios), slow, *both)
    assert (goal.value_text(outcome), goal.met_by(outcome)) == ("1.0996×", False)
    assert (exact.value_text(outcome), exact.met_by(outcome)) == ("0.98× exact", True)
    # One that is not here might have been the better one; one that fails was not.
    del ratios[peers.FA3]
    alone = outcome_of(timed("tilewise cuda", **ratios), both[0])
    assert (goal.value_text(alone), goal.met_by(alone)) == ("", None)
    failing = outcome_of(timed("tilewise cuda", **ratios), both[0], Result(peers.FA3, False, FAILED, "no"))
    assert goal.met_by(failing) is True


def test_bar_is_missed_by_a_kernel_that_is_wrong():
    both = [timed(name, ours=False) for name in prefill.PEERS]
    assert prefill.Goal(prefill.over_best, 1.1).met_by(outcome_of(Result("tilewise cuda", True, WRONG), *both)) is False


def test_bars_on_our_own_rates_and_times():
    ours = timed("tilewise cuda", 0.18, tflops=600.0, **{peers.CUDNN_PADDED: 5.0})
    dense, causal = timed("tilewise cuda, dense", 1.0, tflops=700.0), timed("tilewise cuda, causal", 1.0)
    ragged = outcome_of(ours, dense, beside=("dense", Point()))
    assert prefill.over_beside(ragged) == pytest.approx(6 / 7)
    assert prefill.over_padded(ragged) == 5.0
    goal = prefill.Goal(prefill.over_tiles, 1.3, what="of tiles", at_most=True)
    row = prefill.Row("row", Point(device="cuda", seq=16384, window=1024), (goal,), beside=("causal", Point()))
    windowed = prefill.Outcome(row, [ours, causal])
    assert prefill.over_tiles(windowed) == pytest.approx(0.18 / (1116 / 8256))
    assert goal.value_text(windowed) == "1.33× of tiles"
    assert goal.met_by(windowed) is False
    assert prefill.over_tiles(prefill.Outcome(row, [ours])) is None


@pytest.mark.parametrize(("replays", "status"), [(True, OK), (False, WRONG)])
def test_captured_call_must_compute_on_the_data_of_the_replay(monkeypatch, replays, status):
    calls = []

    class Graph:
        def replay(self):
            if replays:
                calls[0]()

    def attention(q, k, v, out):
        calls.append(lambda: out.copy_(q + k))
        calls[-1]()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(prefill.api, "attention", attention)
    (result,) = prefill._replay("tilewise cuda, graph", *(torch.randn(1, 4, 1, 4) for _ in range(3)))
    assert result.status == status
    assert prefill.graph_replays(outcome_of(result)) == float(status == OK)


@pytest.fixture
def tiny_prefill(monkeypatch):
    """The table in small on the CPU: torch's SDPA plays the peers, and attention knows `exact`."""
    real, real_rows = api.attention, prefill.rows

    def rows(device):
        chosen = []
        for row in real_rows("cpu"):
            sizes = {"seq": row.point.seq // 64 or 8, "heads": 2, "kv_heads": 1 if row.point.kv_heads == 8 else 2}
            sizes |= {"hdim": row.point.hdim // 8, "batch": min(row.point.batch, 3), "dtype": "float32"}
            sizes |= {"window": 16 if row.point.window else 0, "lengths": "2-20" if row.point.lengths else ""}
            small = complete(replace(row.point, **{**sizes, **({"seq": 20} if row.point.lengths else {})}))
            beside = row.beside and (row.beside[0], replace(small, workload="dense", lengths="", window=0, batch=1))
            chosen.append(replace(row, point=small, beside=beside))
        return [*chosen[:3], *(row for row in chosen[1:] if "D" not in row.name)]

    def variants(point):
        return {"tilewise cpu": {}, "tilewise cpu, exact": {"exact": True}}

    def attention(q, k, v, *, exact=False, **options):
        return real(q, k, v, **options)

    def sdpa(name):
        def runs(q, k, v, *, causal, **options):
            return {name: peers.torch_sdpa(q, k, v, mask=None, causal=causal)} if q.dim() == 4 else {}

        return runs

    monkeypatch.setattr(prefill, "rows", rows)
    monkeypatch.setattr(workloads, "variants", variants)
    monkeypatch.setattr(api, "attention", attention)
    ragged = api.attention_varlen
    monkeypatch.setattr(api, "attention_varlen", lambda *a, exact=False, **o: ragged(*a, **o))
    monkeypatch.setattr(peers, "SDPA_PADDED", peers.CUDNN_PADDED)
    monkeypatch.setattr(peers, "torch_backends", sdpa(peers.CUDNN))
    monkeypatch.setattr(peers, "cuda_peers", lambda *a, **o: (sdpa(peers.FA3)(*a, **o), ""))


def test_prefill_shows_every_row_with_its_bars(tiny_prefill, capsys):
    assert cli.main(["bench", "prefill", "--device", "cpu", "--loops", "1"]) == 0
    out, err = capsys.readouterr()
    table = out.partition("FlashAttention-3:")[0]
    lines = [line for line in table.splitlines() if "≥" in line or "≤" in line]
    assert len(lines) == 3 + 3 + 2 + 1
    host, dense, *_, window = lines
    assert "µs" in host
    assert "≤ 15 µs" in host
    for column in ("ours", "exact", "cuDNN", "FA3", "reached", "bar", "met"):
        assert column in table
    assert dense.count("×") == 4  # two ratios, two bars
    assert "of tiles" in window
    assert max(map(len, table.splitlines())) <= 132
    assert all(line.partition("  ")[0].strip() in err for line in lines)  # and each as it came
    assert "FlashAttention-3: not installed; bars" in out


def test_prefill_as_json_with_only_some_rows(tiny_prefill, capsys):
    assert cli.main(["bench", "prefill", "--device", "cpu", "--loops", "1", "--only", "VARLEN", "--json"]) == 0
    full, causal = json.loads(capsys.readouterr().out)
    assert (full["row"], causal["row"]) == ("varlen 100-16384, full", "varlen 100-16384, causal")
    assert [bar["bar"] for bar in full["bars"]] == ["≥ 1.15×", "≥ 0.9×"]
    assert all(bar["met"] is (bar["reached"] >= float(bar["bar"][2:-1])) for bar in causal["bars"])
    kernels = [result["kernel"] for result in causal["results"]]
    assert kernels == ["tilewise cpu", "tilewise cpu, exact", peers.CUDNN_PADDED, "tilewise cpu, dense"]
    assert all(result["status"] == "ok" and result["tflops"] > 0 for result in causal["results"])


def test_prefill_writes_a_csv_and_goes_on_with_it(tiny_prefill, capsys, monkeypatch, tmp_path):
    path = tmp_path / "p.csv"
    words = ["bench", "prefill", "--device", "cpu", "--loops", "1", "--csv", str(path)]
    measured = []
    real = prefill.build

    def build(point):
        measured.append(point)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(point)

    monkeypatch.setattr(prefill, "build", build)
    assert cli.main([*words, "--only", "full"]) == 130
    out, err = capsys.readouterr()
    assert "1 of 3 rows are measured" in err
    assert "--resume" in err
    assert "D 64, N 512, full" in out
    first = path.read_text()
    assert len(rows_of(path)) == 4
    assert cli.main([*words, "--resume"]) == 0
    assert path.read_text().startswith(first)
    assert len({tuple(row[name] for name in DIMENSIONS) for row in rows_of(path)}) == 9
    (host,) = [row for row in rows_of(path) if row["kernel"] == "tilewise cpu, host"]
    assert float(host["median_ms"]) > 0
    assert cli.main(words) == 1  # it exists


@pytest.mark.parametrize(
    "words",
    [["--only", "D 7"], ["--plot"], ["--resume"], ["--csv", "a.csv", "--resume", "--force"], ["--device", "cuda"]],
)
def test_prefill_that_makes_no_sense_is_refused(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "prefill", *(words if "--device" in words else ["--device", "cpu", *words])]) == 2
    assert "tilewise bench prefill --help" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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


def test_longer_sequences_in_smaller_batches_are_one_line(tmp_path):
    path = tmp_path / "s.csv"
    points = [replace(p, batch=128 // p.seq) for p in points_of(seq=[32, 64, 128], causal=[False, True])]
    run_sweep(path, [*points, *points_of(seq=[16, 48], heads=[4])])
    figure = plots._figure(sweep.read(path)[0], "seq", "throughput")
    titles = [axes.get_title() for axes in figure.axes]
    assert [title for title in titles if "batch 128/N" in title and "heads 2" in title] == titles[1:]
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [2, 3, 3]


def test_what_has_no_rate_is_not_drawn(tmp_path):
    path = tmp_path / "s.csv"
    with sweep.Sheet(path) as sheet:
        for point in points_of(seq=[32, 64]):
            sheet.append(records(point, [timed("host")]))
    assert plots.draw(path) == []


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
