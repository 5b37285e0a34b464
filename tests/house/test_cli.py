"""The command line, run as people run it: what it prints, its exit codes, and that an error is one line and a hint."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import BlockSchedule, api, cli, doctor
from tilewise.bench import bars, commands, peers, tables, workloads
from tilewise.bench.measure import Ceiling
from tilewise.learn import testdata

POINT = ["--heads", "2", "--hdim", "16", "--loops", "1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """In a folder of its own, on one thread (two wait for each other on a busy machine), with a ceiling ready."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.delenv("TILEWISE_DEBUG", raising=False)
    monkeypatch.setattr(workloads.ceilings, "of", lambda device, dtype: Ceiling(flops=1e11, bandwidth=1e10))
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def run(*words):
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


def assert_one_line_and_hint(err):
    lines = err.strip().splitlines()
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert "Traceback" not in err


# ---- the front door ---------------------------------------------------------------------------------------------


def test_no_arguments_says_what_it_can_do_in_one_screen(run):
    code, out, err = run()
    assert code == 0
    assert err == ""
    assert len(out.splitlines()) < 40
    assert max(map(len, out.splitlines())) <= 110
    for command in ("bench", "sweep", "schedule", "testdata", "doctor", "prefix", "decode", "sparse"):
        assert command in out
    assert len(re.findall(r"^  tilewise .*--", out, re.MULTILINE)) >= 2  # examples


def test_examples_on_the_front_door_parse(run, monkeypatch):
    """They are what people copy first."""
    monkeypatch.setattr(commands, "_show_point", lambda *a: None)
    (bench, sweep, schedule) = [
        line.strip() for line in cli.OVERVIEW.partition("Try:")[2].splitlines() if "--" in line
    ][:3]
    assert run(*bench.split()[1:])[0] == 0
    assert commands.spread_lists(sweep.split()[1:]).count("--sparsity") == 3
    make, bench_it = schedule.split(" && ")
    assert run(*make.split()[1:])[0] == 0
    assert run(*bench_it.split()[1:])[0] == 0


def test_version(run):
    assert run("--version")[:2] == (0, f"tilewise {tilewise.__version__}\n")


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "prefix"], ["sweep"], ["schedule", "make"], ["testdata"]])
def test_help(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Usage: tilewise" in out


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"],
        ["bench", "--sek", "64"],
        ["bench", "--seq"],
        ["bench", "--seq", "many"],
        ["bench", "--seq", "-4"],
        ["bench", "--heads", "6", "--kv-heads", "4"],
        ["bench", "--dtype", "float99"],
        ["bench", "--loops", "0"],
        ["bench", "--prefix", "8", "--sparsity", "0.5"],
        ["bench", "--kv-format", "int3"],
        ["bench", "--seq", "64", "prefix"],
        ["bench", "--sched", "a.npz", "--sparsity", "0.5"],
        ["sweep", "--seq", "64", "none"],
        ["sweep", "--seq"],
        ["sweep", "--causal", "perhaps"],
        ["sweep", "--heads", "3", "--kv-heads", "2"],
        ["sweep", "--resume", "--force"],
        ["schedule"],
        ["schedule", "make", "wavy", "--seq", "64", "-o", "a.npz"],
        ["schedule", "make", "random", "--seq", "64"],
        ["schedule", "make", "random", "--seq", "64", "--block", "15", "-o", "a.npz"],
        ["schedule", "make", "banded", "--seq", "64", "-o", "a.npz"],
        ["testdata", "make", "zeros"],
        ["testdata", "make", "randn", "--form", "xml"],
        ["testdata", "make", "randn", "--form", "flat", "--heads", "2"],
        ["testdata", "check"],
        ["doctor", "--fix"],
    ],
)
def test_wrong_command_line_is_one_line_and_exit_code_2(run, words, tmp_path):
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert_one_line_and_hint(err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--sched", "missing.npz"],
        ["schedule", "show", "missing.npz"],
        ["schedule", "check", "broken.npz"],
        ["testdata", "check", "missing.npz"],
        ["testdata", "check", "broken.npz"],
        ["testdata", "check", "broken.txt"],
        ["testdata", "make", "randn", "-o", "missing/folder/a.npz"],
        ["sweep", "--seq", "32", "--csv", "broken.txt"],
    ],
)
def test_work_that_fails_is_one_line_and_exit_code_1(run, words, tmp_path):
    for name in ("broken.npz", "broken.txt"):
        (tmp_path / name).write_text("what")
    code, _, err = run(*words)
    assert code == 1
    assert_one_line_and_hint(err)
    assert words[-1].split("/")[-1].partition(".")[0] in err or "missing" in err


@pytest.mark.parametrize(
    "error", [NotImplementedError, tilewise.OutOfPages, MemoryError, TypeError, KeyError, ImportError]
)
def test_errors_of_the_library_are_one_line(run, monkeypatch, error):
    def fails(*args, **options):
        raise error("first line\nsecond line")

    monkeypatch.setattr(workloads, "build", fails)
    code, _, err = run("bench", "--seq", "32")
    assert code == 1
    assert_one_line_and_hint(err)
    assert "first line" in err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("TILEWISE_DEBUG", "1")
    monkeypatch.setattr(workloads, "build", lambda point: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["bench", "--seq", "32"])


def test_help_does_not_wait_for_plots_and_peers():
    """Slow imports belong to the commands that need them."""
    code = (
        "import sys, tilewise.cli; print([m for m in ('matplotlib', 'tilewise.bench.workloads') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


# ---- bench ------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(commands, "_show_point", lambda point, loops, json: points.append(point))
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


@pytest.mark.parametrize("words", [[], ["--seq", "512"], ["--seq", "500"]])
def test_bench_with_a_npy_of_other_blocks(run, words):
    BlockSchedule.causal(512, 512, block_q=64, block_k=64).save("c.npy")
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


def test_backend_that_is_not_there_is_listed_with_its_reason(run):
    code, out, _ = run("bench", "--seq", "32", "--backend", "cuda", *POINT)
    assert code == 1
    assert "failed" in out
    assert "ValueError" in out
    assert "takes CUDA tensors" in " ".join(out.split())


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
    real = tables.Console
    monkeypatch.setattr(tables, "Console", lambda **options: real(**{**options, "width": 80}))
    assert cli.main(["bench", "--loops", "1"]) == 0
    table = capsys.readouterr().out.partition("peers:")[0].splitlines()[:-1]
    assert any("≥ 0.95×" in line for line in table)
    assert max(map(len, table)) <= 80


# ---- sweep ------------------------------------------------------------------------------------------------------

SWEEP = ["sweep", "--heads", "2", "--hdim", "16", "--loops", "1"]


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


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


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(tmp_path):
    """A real process and a real SIGINT, sent when the first rows are on disk and many points are still to come."""
    lengths = [str(n) for n in range(200, 260)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    tilewise_command = [sys.executable, "-m", "tilewise.cli"]
    words = ["sweep", "--heads", "2", "--hdim", "32", "--loops", "2000", "--csv", "s.csv", "--seq", *lengths]
    process = subprocess.Popen(
        [*tilewise_command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up and process.poll() is None:
        if Path("s.csv").exists() and len(rows_of("s.csv")) >= 2:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    kept = rows_of("s.csv")
    done = len(kept) // 2
    assert 1 <= done < len(lengths)
    (line,) = [line for line in err.splitlines() if "stopped" in line]
    assert f"{done} of {len(lengths)} points are in s.csv" in line

    again = line.partition("go on with: tilewise ")[2].replace("2000", "1").split()
    assert again[-1] == "--resume"
    resumed = subprocess.run([*tilewise_command, *again], capture_output=True, text=True, env=env)
    assert resumed.returncode == 0, resumed.stderr
    assert f"{len(lengths) - done} points measured, {done} were there already" in resumed.stdout
    rows = rows_of("s.csv")
    assert rows[: len(kept)] == kept
    assert [row["seq"] for row in rows] == [n for n in lengths for _ in range(2)]


def test_ctrl_c_elsewhere_is_quiet(run, monkeypatch):
    def interrupted(point):
        raise KeyboardInterrupt

    monkeypatch.setattr(workloads, "build", interrupted)
    code, _, err = run("bench", "--seq", "32")
    assert code == 130
    assert "Traceback" not in err


# ---- schedules, test data, doctor -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["random", "--sparsity", "0.5", "--seed", "3"], BlockSchedule.random(128, 128, sparsity=0.5, seed=3)),
        (["random", "--heads", "2"], BlockSchedule.random(128, 128, sparsity=0.9, seed=0, heads=2)),
        (["banded", "--left", "20", "--right", "0"], BlockSchedule.banded(128, 128, left=20, right=0)),
        (["causal", "--block", "16"], BlockSchedule.causal(128, 128, block_q=16, block_k=16)),
        (["causal", "--seq-k", "256", "--block-k", "32"], BlockSchedule.causal(128, 256, block_q=64, block_k=32)),
        (
            ["strided", "--stride", "2", "--block", "16"],
            BlockSchedule.strided(128, 128, block_q=16, block_k=16, stride=2),
        ),
        (["full"], BlockSchedule.full(128, 128)),
    ],
)
def test_schedule_make_show_check(run, words, expected):
    code, out, _ = run("schedule", "make", *words, "--seq", "128", "-o", "a.npz")
    assert code == 0
    assert repr(expected) in out
    assert BlockSchedule.load("a.npz") == expected
    assert run("schedule", "show", "a.npz")[:2] == (0, expected.show() + "\n")
    code, out, _ = run("schedule", "check", "a.npz")
    assert code == 0
    assert "sound" in out


def test_schedule_show_draws(run):
    run("schedule", "make", "causal", "--seq", "128", "-o", "a.npy", "--block", "16")
    assert run("schedule", "show", "a.npy", "--png", "a.png")[0] == 0
    assert Path("a.png").read_bytes()[:4] == b"\x89PNG"


def test_schedule_check_finds_what_does_not_fit(run):
    run("schedule", "make", "random", "--seq", "128", "--heads", "2", "-o", "a.npz")
    assert run("schedule", "check", "a.npz", "--seq", "128", "--heads", "2")[0] == 0
    for words in (["--seq", "129"], ["--heads", "3"]):
        code, _, err = run("schedule", "check", "a.npz", *words)
        assert code == 1
        assert_one_line_and_hint(err)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--form", "flat", "--causal"], "randn_64_16_causal_True.txt"),
        (["--form", "flat"], "randn_64_16_causal_False.txt"),
        (["--form", "chunks", "--batch", "4", "--heads", "2", "--chunk", "16"], "randn_s4_h2_c4.txt"),
        (["--batch", "3", "--prefix", "20", "--causal"], "randn_b3_n64_h1_d16_p20_causal_True.npz"),
        (["--heads", "4", "--kv-heads", "2", "--dtype", "bfloat16"], "randn_b1_n64_h4_d16_causal_False.npz"),
    ],
)
def test_testdata_make_and_check(run, words, name):
    code, out, _ = run("testdata", "make", "randn", "--seq", "64", "--hdim", "16", *words)
    assert (code, out) == (0, f"{name}\n")
    code, out, _ = run("testdata", "check", name)
    assert code == 0
    assert all(line.startswith("ok ") for line in out.splitlines())
    assert re.search(r"max error \S+, relative \S+, allowed \S+ in \w+", out)
    assert len(out.splitlines()) == (5 if "chunks" in words else 1)  # the whole, and each of the four chunks


def test_testdata_make_takes_only_a_flat_name_that_is_true(run, tmp_path):
    words = ["testdata", "make", "randn", "--form", "flat", "--seq", "16", "--hdim", "4"]
    code, _, err = run(*words, "-o", "randn_16_4_causal_True.txt")
    assert code == 2
    assert_one_line_and_hint(err)
    assert "randn_16_4_causal_False.txt" in err
    assert list(tmp_path.iterdir()) == []
    assert run(*words, "--causal", "-o", "randn_16_4_causal_True.txt")[0] == 0
    assert run("testdata", "check", "randn_16_4_causal_True.txt")[0] == 0


def test_testdata_check_fails_on_one_wrong_number(run):
    run("testdata", "make", "randn", "--seq", "32", "--hdim", "8", "--form", "flat")
    path = Path("randn_32_8_causal_False.txt")
    words = path.read_text().split()
    words[-1] = str(float(words[-1]) + 0.01)
    path.write_text(" ".join(words))
    code, out, _ = run("testdata", "check", path)
    assert code == 1
    assert out.startswith("WRONG")
    assert "the file's own output is not what its inputs give" in out


def test_testdata_check_fails_on_a_wrong_kernel(run, monkeypatch):
    run("testdata", "make", "randn", "--seq", "32", "-o", "a.npz")
    real = api.attention
    monkeypatch.setattr(testdata.api, "attention", lambda *a, **o: (real(*a, **o)[0] + 1, real(*a, **o)[1]))
    code, out, _ = run("testdata", "check", "a.npz")
    assert code == 1
    assert "Tilewise differs from the oracle" in out


def test_doctor_says_what_runs_and_what_is_missing(run, monkeypatch):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for text in ("installed", "devices", "what runs", "peers", torch.__version__, "cpu float32", *peers.CUDA_PEERS):
        assert text in out
    monkeypatch.setattr(doctor, "package_version", lambda name: "" if name == "matplotlib" else "1.0")
    code, out, _ = run("doctor")
    assert code == 0
    assert "pip install matplotlib" in out


def test_doctor_asks_the_library_what_it_serves(monkeypatch):
    def refuses(q, k, v):
        if q.dtype == torch.float16:
            raise NotImplementedError("no float16 here")
        return q

    monkeypatch.setattr(doctor.api, "attention", refuses)
    states = {f.name: (f.state, f.text) for f in doctor.examine() if f.section == "what runs"}
    assert states["cpu float16"] == (doctor.MISSING, "no float16 here")
    assert states["cpu float32"][0] == doctor.GOOD
