"""The table of MLA decode: its rows and bars; tiny and on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_cases import timed

from tilewise.bench import mla, mla_choice


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = mla.rows("cuda")
    bars = {row.name: [goal.text for goal in row.goals] for row in rows if row.goals}
    assert bars["128 heads, 64 × 8192"] == ["≥ 640 TFLOP/s"]
    assert bars["16 heads, 64 × 8192"] == ["≥ 4 TB/s"]
    assert bars["fp8, 16 heads, 64 × 8192"] == ["≥ 1.6×"]
    assert bars["16 heads, 1 × 4096"] == ["≤ 20 µs"]
    assert bars["16 heads, 64 × (8192 + 256)"] == bars["128 heads, 64 × (8192 + 256)"] == ["≥ 4×"]
    assert len({(row.point, row.chosen) for row in rows}) == len(rows)


def test_bars_are_rates(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = {row.name: row for row in mla.rows("cuda")}
    few, many = rows["16 heads, 64 × 8192"], rows["128 heads, 64 × 8192"]
    assert few.bytes == 64 * 8192 * 1152
    assert many.flops == 2 * 128 * 64 * 8192 * 1088
    assert few.floor_us == pytest.approx(few.bytes / 4.92e6)
    outcome = mla.Outcome(few, [timed("tilewise cuda", 151e-6)])
    assert few.goals[0].measure(outcome) == pytest.approx(4.0, rel=1e-3)
    shared = rows["16 heads, 64 × (8192 + 256)"]
    results = [timed("tilewise cuda", 20e-6), timed("tilewise cuda, unshared", 90e-6)]
    assert shared.goals[0].measure(mla.Outcome(shared, results)) == pytest.approx(4.5)


def test_a_tiny_table_is_measured_and_checked():
    whole = {row.name: row for row in mla.rows("cpu")}
    names = ("fp8, 16 heads, 64 × 8192", "16 heads, 64 × (8192 + 256)", "16 heads, 2048 chosen of 64 × 16384")
    small = [
        replace(row, point=replace(row.point, batch=2, heads=2, seq=70, prefix=row.point.prefix and 128),
                chosen=row.chosen and 40)
        for row in (whole[name] for name in names)
    ]  # fmt: skip
    outcomes = list(mla.run(small, loops=1))
    assert not any(outcome.broken for outcome in outcomes), [r.reason for o in outcomes for r in o.results]
    assert [len(outcome.results) for outcome in outcomes] == [2, 2, 1]
    assert all(rate is not None for rate in outcomes[1].rates[:2])


def test_choices_are_measured_beside_torch_and_checked(monkeypatch):
    whole = [row for row in mla.rows("cpu") if isinstance(row, mla_choice.ChoiceRow)]
    small = [
        replace(row, point=replace(row.point, seq=300, heads=4, hdim=32, tokens=min(row.point.tokens, 9)), chosen=20)
        for row in whole
    ]
    outcomes = list(mla.run(small, loops=1))
    assert [[result.kernel for result in outcome.results] for outcome in outcomes] == [["tilewise cpu", "torch"]] * 3
    assert not any(outcome.broken for outcome in outcomes), [r.reason for o in outcomes for r in o.results]
    assert all(r.status == "ok" for o in outcomes for r in o.results)
    assert small[2].flops == 2 * 9 * (300 - 4) * 4 * 32
    chosen = mla_choice.api.choose_keys
    for spoilt in ((lambda q, *rest: chosen(q.flip(0), *rest)), (lambda *rest: chosen(*rest)[:, 1:].contiguous())):
        monkeypatch.setattr(mla_choice.api, "choose_keys", spoilt)
        (outcome,) = mla.run(small[1:2], loops=1)
        assert outcome.broken
        monkeypatch.undo()
