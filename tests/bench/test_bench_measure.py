"""The measuring loop: order, counts, what is checked, derived numbers, and the card's events."""

from __future__ import annotations

import time
import types
from itertools import pairwise

import pytest
import torch
from bench_cases import CPU, Event

from tilewise import arch
from tilewise.bench import ceilings, measure
from tilewise.bench.measure import FAILED, OK, WRONG, Ceiling, Check, Kernel, Problem, time_calls


def kernel(name, run, *, ours=False, same_answer=True):
    return Kernel(name, run, ours, flops=2_000_000, bytes=1_000_000, same_answer=same_answer)


def problem(*kernels):
    """A problem whose right answer is all ones."""

    def check(answer):
        error = (answer - 1).abs().max().item()
        return Check(error == 0, error, 0.25, "" if error == 0 else "not ones", allowed=0.5)

    return Problem("ones", CPU, torch.float32, list(kernels), check, (2, 3), 10, Ceiling(1e9, 1e8))


def ones(out):
    return torch.ones(2, 3) if out is None else out.fill_(1.0)


def test_calls_take_turns():
    order = []
    timings = time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, device=CPU, loops=3)
    assert "".join(order) == "ab" + "ab" * 3  # a warm-up each, then by turns
    assert timings["a"].loops == timings["b"].loops == 3


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
    assert (ours.baseline, ours.allowed) == (0.25, 0.5)
    assert other.error is other.allowed is None  # it answers something else, so there is nothing to check


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
    # CPU seconds of the one thread: other programs take time away, and from the two measurements unevenly.
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=time.thread_time))
    ceilings.of.cache_clear()
    first = ceilings.of(CPU, torch.float32)
    assert ceilings.of(CPU, torch.float32) is first
    a = torch.randn(512, 512)
    one = time_calls({"a": lambda: a @ a}, device=CPU, loops=20)["a"]
    assert first.flops > 0.2 * 2 * 512**3 / one.fastest
    assert 1e9 < first.bandwidth < 1e13


def test_ceiling_of_float8_is_that_of_bfloat16_where_torch_does_not_multiply_it(monkeypatch):
    def refuses(*tensors, **options):
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    ceilings._matmul.cache_clear()
    found = ceilings._matmul(CPU, torch.float8_e4m3fn, 64)
    assert found == ceilings._matmul(CPU, torch.bfloat16, 64) > 0
    ceilings._matmul.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(arch.chosen is not None, reason="speed is asked of a card as it is: leave out TILEWISE_CARD")
def test_cuda_loop_times_the_device_not_the_launch():
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    timings = time_calls({"one": lambda: a @ a, "four": lambda: [a @ a for _ in range(4)]}, device=device, loops=20)
    assert 3 < timings["four"].median / timings["one"].median < 5
    assert 2 * 4096**3 / timings["one"].median < 2e15
