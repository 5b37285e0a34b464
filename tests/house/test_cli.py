"""The command line, run as people run it: its front door, errors of one line and a hint, files it makes and checks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import assert_one_line_and_hint

import tilewise
from tilewise import BlockSchedule, api, cli
from tilewise.bench import commands, workloads
from tilewise.learn import testdata

pytestmark = pytest.mark.usefixtures("quick")


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
    monkeypatch.setattr(commands, "show_point", lambda *a: None)
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


# ---- schedules, test data ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("block", [16, 64])
def test_a_npy_is_shown_with_the_blocks_it_was_made_with(run, block):
    made = BlockSchedule.causal(250, 250, block_q=block, block_k=block)
    for name in ("a.npz", "a.npy"):
        assert run("schedule", "make", "causal", "--seq", "250", "--block", block, "-o", name)[0] == 0
        assert run("schedule", "show", name)[:2] == (0, made.show() + "\n")
        assert f"{made!r}" in run("schedule", "check", name, "--seq", "250")[1]
        code, _, err = run("schedule", "show", name, "--block", "32")
        assert code == 1
        assert f"it is for block_q={block}, asked for block_q=32" in err


def test_every_command_makes_the_folder_of_what_it_writes(run):
    """As sweep does."""
    for words in (
        ["schedule", "make", "causal", "--seq", "64", "-o", "a/b/c.npz"],
        ["schedule", "make", "causal", "--seq", "64", "-o", "a/d/c.npy"],
        ["schedule", "show", "a/b/c.npz", "--png", "a/e/c.png"],
        ["testdata", "make", "randn", "--seq", "16", "--hdim", "8", "-o", "a/f/c.npz"],
        ["sweep", "--seq", "16", "--heads", "1", "--hdim", "8", "--loops", "1", "--csv", "a/g/c.csv"],
        ["cache", "export", "a/h/c.tar.gz"],
    ):
        code, _, err = run(*words)
        assert code == 0, err
        assert next(Path(words[-1]).parent.glob("c.*")).stat().st_size


def test_no_folder_is_made_for_what_is_not_written(run, tmp_path):
    for words in (
        ["schedule", "make", "causal", "--seq", "64", "-o", "a/b.txt"],
        ["schedule", "make", "random", "--seq", "512", "--sparsity", "0.5", "-o", "a/b.npy"],
        ["testdata", "make", "randn", "--form", "flat", "--heads", "2", "-o", "a/b.txt"],
        ["sweep", "--seq", "16", "--csv", "a/b.txt"],
    ):
        code, _, err = run(*words)
        assert code in (1, 2)
        assert_one_line_and_hint(err)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(run):
    Path("a").write_text("a file")
    for words in (
        ["schedule", "make", "causal", "--seq", "64", "-o", "a/b/c.npz"],
        ["testdata", "make", "randn", "--seq", "16", "-o", "a/b/c.npz"],
        ["sweep", "--seq", "16", "--csv", "a/b/c.csv"],
        ["cache", "export", "a/b/c.tar.gz"],
    ):
        code, _, err = run(*words)
        assert code == 1
        assert_one_line_and_hint(err)
        assert "a" in err.partition("hint")[0]


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
