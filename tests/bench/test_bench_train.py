"""The training table: its rows and bars, its problems in small on the CPU, and who judges gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from bench_cases import timed

from tilewise.bench import flex, peers, prefill, train, train_problems
from tilewise.bench.measure import OK, WRONG, measure
from tilewise.bench.workloads import Point, problem_of

TINY = Point(seq=96, heads=4, kv_heads=2, hdim=16, causal=True)


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = train.rows("cuda")
    assert len({row.point for row in rows}) == len(rows)  # a resumed CSV tells them apart
    bars = {row.name: [(goal.text, goal.what) for goal in row.goals] for row in rows}
    dense = [row for row in rows if row.measure.keywords["make"] is train_problems.dense]
    assert len(dense) == 8 + 8 + 6 + 1
    assert {row.point.batch * row.point.seq for row in dense} == {16384}
    assert {row.point.heads * row.point.hdim for row in dense[:-1]} == {2048}
    assert bars["D 64, N 512, causal"] == [("≥ 1.2×", "")]
    assert bars["D 128, N 16384, full"] == [("≥ 1.18×", "")]
    assert bars["deterministic, N 16384, causal"] == [("≥ 0.85×", "of not")]
    assert bars["dropout 0.1, D 128, N 16384, causal"] == [("≥ 1×", "FA2")]
    assert bars["window 1024, N 16384, causal"] == [("≥ 4×", "causal's speed")]
    assert bars["64 × 64 blocks, 10% kept, N 16384"] == [("≥ 6×", "dense's speed")]
    assert bars["as sm_80, D 64, N 8192, full"] == [("≥ 1.05×", "FA2")]
    assert bars["tree, 16 × 512 over 4096"] == [("≥ 5×", "unshared"), ("≥ 2.5×", "Flex")]
    assert bars["tree of three levels, 4 × 4 × 512"] == [("≥ 0.85×", "of dense's rate"), ("≥ 2.5×", "Flex")]
    on_cpu = {row.name: [goal.text for goal in row.goals] for row in train.rows("cpu")}
    assert on_cpu["float32, N 2048, causal"] == ["≥ 0.9×"]
    assert on_cpu["float32, tree, 16 × 128 over 1024"] == ["≥ 3×"]
    assert on_cpu["step of a small Llama, 8 × 24 over 256"] == ["≥ 2×"]


def test_bars_are_ratios_of_what_was_measured():
    ours = replace(
        timed("tilewise cuda", 0.5, tflops=500.0),
        ratio_to={peers.CUDNN: 1.3, train_problems.CUDNN_ROWS: 1.2, flex.FLEX: 3.0},
    )
    others = [
        timed(f"tilewise cuda, {label}", time, tflops=rate)
        for label, time, rate in (("beside", 3.0, 400), ("dense", 1.0, 625))
    ]
    cudnn = [timed(name, tflops=rate) for name, rate in ((peers.CUDNN, 380.0), (train_problems.CUDNN_ROWS, 410.0))]
    outcome = train.Outcome(prefill.Row("row", Point(device="cuda"), ()), [ours, *others, *cudnn])
    assert train.over_cudnn(outcome) == 1.2
    assert train.over_peer(outcome, flex.FLEX) == 3.0
    assert train.speed_over(outcome) == 6.0
    assert train.rate_over(outcome, "dense") == 0.8
    assert outcome.rates == [500, 400, 410, None, None, None]
    nothing = train.Outcome(outcome.row, [])
    for bar in (train.over_cudnn, train.speed_over, train.rate_over, partial(train.over_peer, peer=flex.FLEX)):
        assert bar(nothing) is None


PROBLEMS = {
    "dense": (train_problems.dense, TINY),
    "packed": (train_problems.ragged, replace(TINY, workload="varlen", lengths="5-60", batch=3)),
    "window": (partial(train_problems.beside_itself, ours={}, beside={"window": None}), replace(TINY, window=9)),
    "dropout": (partial(train_problems.with_dropout, p=0.3), TINY),
    "two head dims": (partial(train_problems.two_head_dims, value_dim=8), TINY),
    "blocks": (train_problems.in_blocks, replace(TINY, causal=False, sparsity=0.5, block=16)),
    "tree": (partial(train._over_tree, sizes=(40, 3, 10)), replace(TINY, dtype="bfloat16")),
    "deep tree": (partial(train._over_tree, sizes=(30, 2, 10, 3, 20)), TINY),
    "step": (train_problems.model_step, replace(TINY, batch=3, seq=5, prefix=11)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_in_small(name):
    make, point = PROBLEMS[name]
    made = make(point)
    results = measure(problem_of(point, made.kernels, made.check, made.shape), loops=1)
    assert [(r.kernel, r.status, r.reason) for r in results if r.status != OK] == []
    assert results[0].ours
    assert len(results) > 1


def test_flops_of_a_tree_are_those_of_its_pairs():
    made = train._over_tree(TINY, sizes=(40, 3, 10))
    tree = train_problems.answers(40, 3, 10)
    place = torch.arange(tree.num_tokens)
    pairs = int(((place <= place[:, None]) & (place[:, None] < tree.ends)).sum())
    assert made.kernels[0].flops == 7 * 2 * pairs * TINY.heads * TINY.hdim
    assert made.kernels[1].flops == 7 * 2 * 3 * (50 * 51 // 2) * TINY.heads * TINY.hdim


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_gradient_is_found(which):
    made = train_problems.dense(TINY)

    def wrong(_):
        found = [x.clone() for x in made.kernels[0].run(None)]
        found[which][..., -1, 3] += 0.01  # of the last head
        return found

    kernels = [replace(made.kernels[0], run=wrong)]
    (result,) = measure(problem_of(TINY, kernels, made.check, made.shape), loops=1)
    assert result.status == WRONG
    assert result.reason.startswith(("dq", "dk", "dv")[which])


def test_the_command_shows_rows_and_bars(run, monkeypatch):
    real = train.rows
    monkeypatch.setattr(
        train, "rows", lambda device: [replace(r, point=replace(r.point, seq=64)) for r in real(device)]
    )
    code, out, err = run("bench", "train", "--device", "cpu", "--only", "float32, N 2048", "--loops", "1")
    assert code == 0, err
    assert "float32, N 2048, causal" in out
    assert "≥ 0.9×" in out


def test_kernels_are_compiled_ahead_for_the_cards_of_the_rows(monkeypatch, own_card):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [replace(row, point=replace(row.point, device="cpu")) for row in train.rows("cuda")]
    chosen = [row for row in rows if row.name in ("D 64, N 512, causal", "as sm_80, D 64, N 8192, full")]
    names = [spec.name for spec in train.specs(chosen)]
    assert len(set(names) & {"forward", "forward_mma"}) == 2
    assert "backward" in names
    assert not any(dict(spec.constants).get("kDropout") for spec in train.specs(chosen))
    (dropping,) = (row for row in rows if row.name == "dropout 0.1, D 128, N 16384, causal")
    made = [(spec.name, dict(spec.constants).get("kDropout")) for spec in train.specs([dropping])]
    assert {("forward", None), ("forward_mma", True), ("backward_mma", True)} <= set(made)
    assert "forward_mma" not in [spec.name for spec in train.specs(chosen[:1])]
