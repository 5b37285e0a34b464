"""`tilewise bench`, run as people run it: tables, JSON, bars and exit codes."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from cli_cases import assert_one_line_and_hint
from rich import console

from tilewise import BlockSchedule, api, cli
from tilewise.bench import bars, commands, peers, tables, workloads

pytestmark = pytest.mark.usefixtures("quick")
POINT = ["--heads", "2", "--hdim", "16", "--loops", "1"]


def test_bench_point_prints_every_column(run):
    code, out, _ = run("bench", "--seq", "48", "--causal", *POINT)
    assert code == 0
    assert "dense: 48 tokens, 2 heads, D 16, float32, causal" in out
    columns = ("error", "median ms", "p20–p80", "TFLOP/s", "GB/s", "µs/tok·head", "of ceiling", "vs best")
    assert all(column in out for column in columns)
    assert "tilewise cpu" in out
    assert peers.SDPA in out
    (footnote,) = [line for line in out.splitlines() if line.startswith("peers:")]
    assert all(name in footnote for name in peers.CUDA_PEERS)


@pytest.mark.parametrize(
    ("words", "workload", "kernels"),
    [
        (["--seq", "32"], "dense", 2),
        (["--seq", "64", "--sparsity", "0.5", "--block", "16"], "sparse", 3),
        (["--seq", "32", "--kv-format", "int8"], "decode", 2),
        (["--seq", "16", "--prefix", "32", "--batch", "2"], "prefix", 4),
        (["--seq", "32", "--backend", "cpu", "--dtype", "bfloat16"], "dense", 2),
    ],
)
def test_bench_json_of_every_workload(run, words, workload, kernels):
    code, out, _ = run("bench", *words, *POINT, "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["workload"] for row in rows] == [workload] * kernels
    assert all(row["status"] == "ok" and row["median_ms"] > 0 and row["loops"] == 1 for row in rows)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["prefix", "--batch", "2", "--prefix", "32", "--seq", "8", "--heads", "4", "--kv-heads", "2"],
            (2, 32, 8, 4, 2),
        ),
        (["decode", "--batch", "2", "--seq", "20", "--heads", "4", "--kv-heads", "2"], (2, 0, 20, 4, 2)),
        (["sparse", "--seq", "128", "--sparsity", "0.5", "--heads", "2"], (1, 0, 128, 2, 2)),
    ],
)
def test_bench_subcommands(run, words, expected):
    code, out, _ = run("bench", *words, "--hdim", "16", "--loops", "1", "--json")
    assert code == 0
    row = json.loads(out)[0]
    assert row["workload"] == words[0]
    assert tuple(row[name] for name in ("batch", "prefix", "seq", "heads", "kv_heads")) == expected


def test_bench_subcommands_have_good_defaults(monkeypatch):
    points = []
    monkeypatch.setattr(commands, "show_point", lambda point, loops, json: points.append(point))
    for name in ("prefix", "decode", "sparse"):
        assert cli.main(["bench", name]) == 0
    assert points[0] == bars.BARS[2].point
    assert (points[1].batch, points[1].seq, points[1].kv_format) == (16, 2048, "fp32")
    assert (points[2].seq, points[2].sparsity, points[2].block) == (4096, 0.9, 64)


@pytest.mark.parametrize("name", ["my.npz", "my.npy"])
def test_bench_with_a_schedule_file(run, name):
    BlockSchedule.causal(64, 64, block_q=16, block_k=16).save(name)
    code, out, _ = run("bench", "--sched", name, *POINT, "--json")
    assert code == 0
    row = json.loads(out)[0]
    assert (row["workload"], row["seq"], row["block"], row["sched"]) == ("sparse", 64, 16, name)
    code, _, err = run("bench", "--sched", name, "--seq", "80", *POINT)
    assert code == 2
    assert_one_line_and_hint(err)


@pytest.mark.parametrize("words", [[], ["--block", "64"], ["--seq", "512"]])
def test_bench_with_a_npy_of_other_blocks(run, words):
    BlockSchedule.causal(512, 512, block_q=64, block_k=64).save("c.npy")
    code, out, err = run("bench", "--sched", "c.npy", *words, *POINT, "--json")
    assert code == 0, err
    row = json.loads(out)[0]
    assert (row["seq"], row["block"], row["status"]) == (512, 64, "ok")
    for wrong in (["--block", "16"], ["--seq", "500"]):
        code, _, err = run("bench", "--sched", "c.npy", *wrong, *POINT)
        assert code == 2
        assert_one_line_and_hint(err)


@pytest.mark.parametrize("words", [[], ["--seq", "512"], ["--seq", "500"]])
def test_bench_with_a_foreign_npy_of_other_blocks(run, words):
    """It does not say its blocks, so the command line does."""
    np.save("c.npy", BlockSchedule.causal(512, 512, block_q=64, block_k=64).to_runs())
    code, out, err = run("bench", "--sched", "c.npy", "--block", "64", *words, *POINT, "--json")
    assert code == 0, err
    row = json.loads(out)[0]
    assert (row["seq"], row["block"], row["status"]) == (int(words[1]) if words else 512, 64, "ok")
    assert row["us_per_token_head"] > 0


def test_wrong_kernel_is_shown_wrong_and_fails(run, monkeypatch):
    real = api.attention

    def wrong(*args, **options):
        return real(*args, **options).mul_(1.01)

    monkeypatch.setattr(workloads.api, "attention", wrong)
    code, out, _ = run("bench", "--seq", "32", *POINT)
    assert code == 1
    line = next(line for line in out.splitlines() if "tilewise cpu" in line)
    assert "WRONG" in line
    assert "×" not in line  # and it is not timed
    assert re.search(r"tilewise cpu: WRONG, error .* is over", out)


def test_wrong_is_red(capsys):
    result = tables.Result("k", True, tables.WRONG, "off")
    cell = tables._check(result, wide=True)
    assert cell.plain == "WRONG"
    assert "red" in cell.style


def test_backend_that_does_not_run_is_listed_with_its_reason(run, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(workloads.api, "attention", fails)
    code, out, _ = run("bench", "--seq", "32", "--backend", "emulator", *POINT)
    assert code == 1
    assert "tilewise emulator: failed, RuntimeError: no C++ compiler" in " ".join(out.split())


@pytest.mark.parametrize(("load", "warned"), [(0.1, False), (8.0, True)])
def test_busy_machine_is_told(run, monkeypatch, load, warned):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    _, out, _ = run("bench", "--seq", "32", *POINT)
    assert ("other programs were running" in out) == warned


@pytest.fixture
def tiny_bars(monkeypatch):
    def tiny(bar):
        sizes = {"seq": 64, "heads": 4, "hdim": 16, "block": 16, "kv_heads": 2 if bar.point.prefix else 4}
        sizes |= {"prefix": 32, "batch": 2} if bar.point.prefix else {}
        return replace(bar, point=replace(bar.point, **sizes), budget=0.01)

    monkeypatch.setattr(bars, "BARS", tuple(tiny(bar) for bar in bars.BARS))
    monkeypatch.setattr(bars, "PLAN_BAR", bars.PlanBar(seqs=4, prefix=64, tokens=256))


def test_bench_without_options_shows_the_bars(run, tiny_bars):
    code, out, _ = run("bench", "--loops", "2")
    assert code == 0
    for text in ("dense", "causal", "shared prefix", "90% sparse", "planning", "vs SDPA", "bar", "met"):
        assert text in out
    assert re.findall(r"[≥<] \S+(?: ms)?", out) == ["≥ 0.95×", "≥ 0.95×", "≥ 4×", "≥ 4×", "≥ 5×", "< 20 ms"]
    assert len(re.findall(r" (?:yes|no) *$", out, re.MULTILINE)) == 6
    assert re.search(r"\d+ threads, torch .*; ceiling 0\.100 TFLOP/s, 10\.0 GB/s, measured", out)
    assert max(map(len, out.partition("peers:")[0].splitlines())) <= tables.FULL_WIDTH


def test_bars_as_json(run, tiny_bars):
    code, out, _ = run("bench", "--json", "--loops", "2")
    rows = json.loads(out)
    assert code == 0
    with_bar = [row for row in rows if row["bar"]]
    assert [row["bar"] for row in with_bar] == ["≥ 0.95×", "≥ 0.95×", "≥ 4×", "≥ 4×", "≥ 5×", "< 20 ms"]
    assert all(isinstance(row["met"], bool) for row in with_bar)
    assert [row["kernel"] for row in rows if row["met"] is None and "SDPA" not in row["kernel"]] == [
        "tilewise cpu, unshared"
    ]


def test_wrong_kernel_fails_the_bars_too(run, tiny_bars, monkeypatch):
    real = api.decode
    monkeypatch.setattr(workloads.api, "decode", lambda *a, **o: real(*a, **o).add_(0.5))
    code, out, _ = run("bench", "--loops", "1")
    assert code == 1
    assert "WRONG" in out


def test_bars_fit_a_narrow_terminal(tiny_bars, capsys, monkeypatch):
    real = console.Console
    monkeypatch.setattr(console, "Console", lambda **options: real(**{**options, "width": 80}))
    assert cli.main(["bench", "--loops", "1"]) == 0
    table = capsys.readouterr().out.partition("peers:")[0].splitlines()[:-1]
    assert any("≥ 0.95×" in line for line in table)
    assert max(map(len, table)) <= 80


def test_ctrl_c_elsewhere_is_quiet(run, monkeypatch):
    def interrupted(point):
        raise KeyboardInterrupt

    monkeypatch.setattr(workloads, "build", interrupted)
    code, _, err = run("bench", "--seq", "32")
    assert code == 130
    assert "Traceback" not in err
