"""`tilewise sweep`, run as people run it: lists in every form, the CSV, plots, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from cli_cases import assert_one_line_and_hint, rows_of

from tilewise import api
from tilewise.bench import workloads

pytestmark = pytest.mark.usefixtures("quick")

SWEEP = ["sweep", "--heads", "2", "--hdim", "16", "--loops", "1"]


@pytest.mark.parametrize(
    "words",
    [
        ["--seq", "32", "48", "--sparsity", "0", "0.5"],
        ["--seq", "32,48", "--sparsity=0,0.5"],
        ["--seq", "32", "--seq", "48", "--sparsity", "0", "--sparsity", "0.5"],
        ["--sparsity", "0", "0.5", "--seq", "32,48"],
        ["--seq=32", "48", "--sparsity=0", "0.5"],
    ],
)
def test_sweep_takes_lists_in_every_form(run, words):
    code, out, _ = run(*SWEEP, *words, "--block", "16", "--csv", "s.csv")
    assert code == 0
    assert "4 points measured" in out
    found = {(row["seq"], row["sparsity"]) for row in rows_of("s.csv")}
    assert found == {("32", "0.0"), ("32", "0.5"), ("48", "0.0"), ("48", "0.5")}


def test_sweep_over_causal_and_formats(run):
    assert run(*SWEEP, "--seq", "32", "--causal", "no", "yes", "--csv", "a.csv")[0] == 0
    assert {row["causal"] for row in rows_of("a.csv")} == {"False", "True"}
    assert run(*SWEEP, "--seq", "32", "--causal", "--csv", "b.csv")[0] == 0
    assert {row["causal"] for row in rows_of("b.csv")} == {"True"}
    words = ["--seq", "32", "--kv-format", "fp32", "int8", "--prefix", "0", "16", "--csv", "c.csv"]
    assert run(*SWEEP, *words)[0] == 0
    assert {(row["workload"], row["kv_format"]) for row in rows_of("c.csv")} == {
        (workload, kind) for workload in ("decode", "prefix") for kind in ("fp32", "int8")
    }


def test_sweep_draws_plots_beside_the_csv(run, tmp_path):
    assert run(*SWEEP, "--seq", "32", "48", "--csv", "new/s.csv", "--plot")[0] == 0
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["s.csv", *(f"s_{m}_over_seq.png" for m in ("latency", "speedup", "throughput"))]
    assert "nothing to draw" in run(*SWEEP, "--seq", "32", "--csv", "one.csv", "--plot")[1]


def test_sweep_says_when_no_two_points_can_be_joined(run, tmp_path):
    """The lengths differ, but with the heads: no line would have two points."""
    one = ["sweep", "--hdim", "16", "--loops", "1", "--csv", "p.csv"]
    assert run(*one, "--seq", "64", "--heads", "1")[0] == 0
    code, out, err = run(*one, "--seq", "128", "--heads", "2", "--resume", "--plot")
    assert code == 0, err
    assert "nothing to draw over seq" in out
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


def test_sweep_measures_anew_what_another_version_measured(run):
    assert run(*SWEEP, "--seq", "32", "--csv", "s.csv")[0] == 0
    assert "of another" not in "".join(run(*SWEEP, "--seq", "32", "--csv", "s.csv", "--resume")[1:])
    Path("s.csv").write_text(Path("s.csv").read_text().replace(f",{torch.__version__},", ",2.0.0,"))
    code, out, err = run(*SWEEP, "--seq", "32", "--csv", "s.csv", "--resume")
    assert code == 0
    assert "1 points measured, 0 were there already" in out
    assert "2 rows in s.csv are of another version of tilewise or torch or another number of threads" in err
    assert [row["torch"] for row in rows_of("s.csv")] == ["2.0.0"] * 2 + [torch.__version__] * 2
    assert "0 points measured, 1 were there already" in run(*SWEEP, "--seq", "32", "--csv", "s.csv", "--resume")[1]


def test_sweep_never_overwrites_unasked(run):
    assert run(*SWEEP, "--seq", "32", "--csv", "s.csv")[0] == 0
    before = Path("s.csv").read_text()
    code, _, err = run(*SWEEP, "--seq", "48", "--csv", "s.csv")
    assert code == 1
    assert_one_line_and_hint(err)
    assert "--resume" in err
    assert Path("s.csv").read_text() == before
    assert run(*SWEEP, "--seq", "48", "--csv", "s.csv", "--resume")[0] == 0
    assert [row["seq"] for row in rows_of("s.csv")] == ["32", "32", "48", "48"]
    assert run(*SWEEP, "--seq", "48", "--csv", "s.csv", "--force")[0] == 0
    assert [row["seq"] for row in rows_of("s.csv")] == ["48", "48"]


def test_sweep_tells_what_it_leaves_out(run):
    code, out, err = run(*SWEEP, "--seq", "32", "--kv-heads", "1", "3", "--csv", "s.csv")
    assert code == 0
    assert "1 combinations left out" in err
    assert "kv_heads must divide" in err
    assert "1 points measured" in out


def test_sweep_with_a_wrong_kernel_fails_at_the_end(run, monkeypatch):
    real = api.attention
    monkeypatch.setattr(workloads.api, "attention", lambda *a, **o: real(*a, **o).add_(0.5))
    code, _, err = run(*SWEEP, "--seq", "32", "48", "--csv", "s.csv")
    assert code == 1
    assert "WRONG" in err
    assert [row["status"].partition(":")[0] for row in rows_of("s.csv")] == ["WRONG", "ok"] * 2


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(run):
    """A real process and a real SIGINT, sent when the first rows are on disk and many points are still to come."""
    lengths = [str(n) for n in range(200, 220)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["sweep", "--heads", "2", "--hdim", "32", "--loops", "2000", "--csv", "s.csv", "--seq", *lengths]
    process = subprocess.Popen(
        [sys.executable, "-m", "tilewise.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while process.poll() is None and not (Path("s.csv").exists() and len(rows_of("s.csv")) >= 2):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    kept = rows_of("s.csv")
    done = len(kept) // 2
    assert 1 <= done < len(lengths)
    (line,) = [line for line in err.splitlines() if "stopped" in line]
    assert f"{done} of {len(lengths)} points are in s.csv" in line

    again = line.partition("go on with: tilewise ")[2].replace("2000", "1").split()
    assert again[-1] == "--resume"
    code, out, err = run(*again)
    assert code == 0, err
    assert f"{len(lengths) - done} points measured, {done} were there already" in out
    rows = rows_of("s.csv")
    assert rows[: len(kept)] == kept
    assert [row["seq"] for row in rows] == [n for n in lengths for _ in range(2)]
