"""The table of what a step costs the host: its rows and bars; tiny and on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_cases import timed

from tilewise import cli
from tilewise.bench import churn


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = churn.rows("cuda")
    bars = {(row.point.batch, row.leaving, row.tree): [goal.text for goal in row.goals] for row in rows}
    assert bars == {
        (256, 0, False): ["≤ 60 µs", "≤ 30 µs", "≤ 2000 µs"],
        (256, 16, False): ["≤ 300 µs", "≤ 30 µs", "≤ 2000 µs"],
        (256, 16, True): ["≤ 400 µs", "≤ 30 µs", "≤ 2000 µs"],
        (1024, 64, False): ["≤ 1000 µs", "≤ 80 µs"],
    }
    assert len({row.point for row in rows}) == len(rows)  # a resumed CSV tells them apart
    assert {(row.point.prefix, row.point.page_size) for row in rows} == {(8192, 16)}


def test_bars_are_set_on_parts_of_a_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    row = churn.rows("cuda")[0]
    times = {churn.STEP: 50e-6, churn.CACHE: 30e-6, churn.PLANNER: 31e-6}
    outcome = churn.Outcome(row, [timed(f"tilewise cuda, {part}", seconds) for part, seconds in times.items()])
    assert outcome.rates == [pytest.approx(50), pytest.approx(30), None, pytest.approx(31)]
    assert [goal.met_by(outcome) for goal in row.goals] == [True, False, None]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(churn, "SHARED", 64)
    monkeypatch.setattr(churn, "TREE", ((2, 32), (2, 16)))
    small = [replace(row, point=replace(row.point, batch=8, seq=40 + n), leaving=min(row.leaving, 3))
             for n, row in enumerate(churn.rows("cpu")[:3])]  # fmt: skip
    monkeypatch.setattr(churn, "rows", lambda device: small)


def test_sequences_come_and_go(tiny):
    crowd = churn.Crowd(churn.rows("cpu")[2])
    assert len(crowd.roots) == 4
    for _ in range(6):
        before = set(crowd.seqs)
        crowd.prepare()
        crowd.change()
        assert len(crowd.seqs) == 8
        assert len(before - set(crowd.seqs)) == 3
        assert len(crowd.cache.lengths) == 8 + 3 + 1 + 2 + 4  # those that run and those that are to come; the tree
        assert {crowd.cache.page_list(seq)[0] for seq in crowd.seqs} == {crowd.cache.page_list(crowd.roots[0])[0]}


def test_command_shows_rows_and_bars(tiny, capsys):
    assert cli.main(["bench", "churn", "--device", "cpu", "--loops", "2"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("≤ 2000 µs") == 3
    for word in ("step", "of it cache", "first plan", "planner", "16 leave and join", "plans anew", "µs, medians"):
        assert word in out
    lines = [line for line in out.splitlines() if "slowest step" in line]
    assert [line.split(": ")[1].split()[::2][:5] for line in lines[1:]] == [list(churn.PARTS)] * 2
    assert "tokens" in lines[0]
    assert "free" not in lines[0]  # nobody leaves
