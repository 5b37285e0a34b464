"""`tilewise ladder` and `tilewise kernels`, on shapes that take no time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from cli_cases import assert_one_line_and_hint

from tilewise import compiler
from tilewise.bench import ladder_commands, ladder_tables, peers, rungs, tables
from tilewise.gpu import (
    append,
    backward,
    choice,
    decode_kernels,
    decode_small,
    merge_rows,
    mla_kernels,
    mla_mma,
    planner,
    schedules,
    tilings,
    widen,
)
from tilewise.learn import ladder

NAIVE = next(rung for rung in ladder.RUNGS if rung.name == "flash_naive")
TINY = ["--emulate", "--seq", "17", "--heads", "1", "--hdim", "32"]


# ---- ladder, emulated -------------------------------------------------------------------------------------------


def test_a_rung_is_checked_and_counted(run):
    code, out, err = run("ladder", "--rung", "flash_naive", *TINY)
    assert code == 0
    assert err == ""
    assert "17 tokens, 1 heads, D 32, bfloat16" in out
    assert "sectors" in out
    (row,) = [line.split() for line in out.splitlines() if line.split()[:2] == ["flash_naive", "float32"]]
    assert row[2:4] == ["32", "ok"], "the nearest dtype that the rung serves, and the verdict"
    assert "flash_naive: the algorithm alone" in out


def test_json_and_plot(run, tmp_path):
    picture = tmp_path / "new" / "ladder.png"
    code, out, _ = run("ladder", "--rung", "flash_naive", *TINY, "--causal", "--json", "--plot", picture)
    assert code == 0
    (row,) = json.loads(out)
    assert row["rung"] == "flash_naive"
    assert row["status"] == "ok"
    assert row["causal"]
    assert row["error"] <= row["allowed"]
    assert row["tensor_flops"] == 0
    assert row["scalar_flops"] >= 4 * 32 * 17 * 9  # two products over the visible pairs
    assert row["sectors_per_request"] > 4
    assert 0 < row["sectors_used"] < 0.5
    assert row["bank_conflicts"] > 0
    assert row["exponentials"] > 0
    assert row["barriers"] > 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_plot_says_what_padding_does(run, tmp_path, monkeypatch):
    """17 tokens in tiles of 32: operations are counted for whole tiles, and the picture says what was asked for."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    code, out, _ = run("ladder", "--rung", "warp_wmma", *TINY, "--json", "--plot", tmp_path / "ladder.png")
    assert code == 0
    (row,) = json.loads(out)
    needed = 4 * 32 * 17 * 17
    assert row["tensor_flops"] == 4 * 32 * 32 * 32
    (figure,) = figures
    assert "computes whole tiles" in figure.get_supxlabel()
    (panel,) = [axes for axes in figure.axes if axes.get_title() == "MFLOP"]
    (line,) = panel.lines
    assert list(line.get_xdata()) == [needed / 1e6] * 2
    assert "what the problem needs" in [text.get_text() for text in panel.get_legend().get_texts()]


def test_plots_are_png_or_svg(run, tmp_path):
    picture = tmp_path / "ladder.svg"
    assert run("ladder", "--rung", "flash_naive", *TINY, "--plot", picture)[0] == 0
    assert picture.read_text().startswith("<?xml")
    code, out, err = run("ladder", "--rung", "flash_naive", *TINY, "--plot", tmp_path / "ladder.pdf")
    assert (code, out) == (2, ""), "refused before anything is counted"
    assert "path must end in .png or .svg" in err


def test_without_a_gpu_it_counts_and_says_so(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ladder, "RUNGS", (NAIVE,))
    code, out, _ = run("ladder", "--seq", 9)
    assert code == 0
    assert "no GPU here" in out
    assert "torch_tiled, numba: no CUDA C++" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rung", "flash_neat"], "no rung 'flash_neat'; the rungs are torch_tiled, numba, "),
        (["--rung", "numba", "--emulate"], "nothing to count"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--seq", "0"], "'--seq'"),
    ],
)
def test_what_makes_no_sense_is_one_line(run, words, said):
    code, out, err = run("ladder", *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert "hint: tilewise ladder --help" in err
    assert_one_line_and_hint(err)


def test_profile_says_plainly_what_it_lacks(run, monkeypatch):
    monkeypatch.setattr(ladder_commands.shutil, "which", lambda name: None)
    code, _, err = run("ladder", "--rung", "flash_naive", "--profile")
    assert code == 1
    assert "there is no ncu here" in err
    assert_one_line_and_hint(err)


def test_profile_runs_the_rung_alone_under_ncu(run, monkeypatch):
    commands = []
    monkeypatch.setattr(ladder_commands.shutil, "which", lambda name: f"/opt/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        ladder_commands.subprocess,
        "run",
        lambda command: commands.append(command) or type("Done", (), {"returncode": 0}),
    )
    assert run("ladder", "--rung", "flash_naive", "--profile", "--seq", 256, "--causal")[0] == 0
    (command,) = commands
    assert command[0] == "/opt/ncu"
    assert "regex:^flash_naive$" in command
    again = command[command.index("tilewise.cli") + 1 :]
    assert again[:3] == ["ladder", "--rung", "flash_naive"]
    assert {"--seq=256", "--causal", "--dtype=bfloat16"} <= set(again)


def test_a_wrong_rung_is_reported_and_fails(run, monkeypatch):
    def wrong(rung, q, k, v, **options):
        return q * 2, torch.zeros(q.shape[0], q.shape[2], q.shape[1]), None

    monkeypatch.setattr(ladder, "run", wrong)
    code, out, _ = run("ladder", "--rung", "flash_naive", *TINY)
    assert code == 1
    assert "flash_naive: WRONG, o: error" in out


def test_a_rung_that_raises_does_not_stop_the_others(run, monkeypatch):
    monkeypatch.setattr(ladder, "RUNGS", (replace(NAIVE, name="broken", source="none.cu"), NAIVE))
    code, out, _ = run("ladder", *TINY)
    assert code == 1
    assert "broken: failed, FileNotFoundError" in out
    assert " ok " in out


# ---- choosing ---------------------------------------------------------------------------------------------------


def test_each_rung_gets_the_nearest_it_serves():
    step = rungs.Step("a", "", ("float32", "float16"), (64, 128))
    shape = rungs.Shape(1, 8, 1, 96, "bfloat16", False)
    assert step.nearest(shape) == ("float16", 64)
    assert step.nearest(replace(shape, hdim=256, dtype="float32")) == ("float32", 128)
    assert rungs.Step("b", "", ("bfloat16",), ()).nearest(replace(shape, dtype="float32")) == ("bfloat16", 96)
    for step in rungs.steps():
        step.nearest(shape)


def test_int8_rows_are_what_int8_says():
    x = torch.randn(2, 3, 1, 32)
    x[0, 0] = 0
    rounded = rungs.int8_rows(x)
    largest = x.abs().amax(-1, keepdim=True)
    assert (rounded[0, 0] == 0).all()
    assert ((rounded - x).abs() <= largest / 253).all()
    assert (rounded.abs().amax(-1, keepdim=True) - largest).abs().max() < 1e-6


# ---- ladder, timed: the emulator stands in for a card -----------------------------------------------------------


def test_times_and_ratios(monkeypatch, tmp_path):
    """Every path of the timing but the launch itself: rungs beside torch, what is skipped, the table, the picture."""
    monkeypatch.setattr(ladder, "RUNGS", (NAIVE, replace(NAIVE, name="second"), replace(NAIVE, name="other_card")))

    def call(step, data):
        def run():
            o, lse, _ = ladder.run(NAIVE, data.q, data.k, data.v, causal=data.shape.causal)
            data.o.copy_(o)
            data.lse.copy_(lse)

        return run

    monkeypatch.setattr(rungs, "_missing", lambda step, device: "not here" if step.name == "other_card" else "")
    monkeypatch.setattr(rungs, "_call", call)
    shape = rungs.Shape(1, 20, 2, 32, "float32", True)
    rows = rungs.measure(rungs.choose([]), shape, torch.device("cpu"), loops=2)
    assert [row.name for row in rows] == [
        "torch_tiled", "numba", "flash_naive", "second", "other_card", peers.SDPA,
    ]  # fmt: skip
    first, *between, skipped, sdpa = rows
    assert first.over_previous is None
    for before, row in zip(rows, between, strict=False):
        assert row.status == "ok"
        if row.name == "flash_naive":  # the first of its line: a story is not compared with another's end
            assert row.over_previous is None
        else:
            assert row.over_previous == pytest.approx(before.timing.median / row.timing.median)
        assert row.tflops == pytest.approx(4 * 32 * 2 * 210 / row.timing.median / 1e12)
        assert row.over_sdpa > 0
    assert (skipped.status, skipped.reason, skipped.timing) == ("skipped", "not here", None)
    assert sdpa.peer
    console = tables.console()
    with console.capture() as text:
        console.print(ladder_tables.times_table(rows, shape, "a card"))
    assert "The ladder on a card: 20 tokens, 2 heads, D 32, float32, causal" in text.get()
    assert "× before" in text.get()
    ladder_tables.draw(rows, shape, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 1000
    assert ladder_commands._record(first, shape)["median_ms"] == first.timing.median * 1e3


@pytest.mark.gpu
def test_times_on_the_card(run):
    code, out, _ = run("ladder", "--batch", 1, "--seq", 512, "--heads", 2, "--hdim", 64, "--loops", 2, "--json")
    rows = {row["rung"]: row for row in json.loads(out)}
    assert code == 0, rows
    assert all(row["status"] == "skipped" or row["median_ms"] > 0 for row in rows.values())
    assert rows["flash_naive"]["over_sdpa"] > 0


# ---- kernels ----------------------------------------------------------------------------------------------------


def test_kernels_as_json(run):
    code, out, err = run("kernels", "--kernel", "flash_naive", "--arch", "sm_80", "--json")
    assert code == 0
    assert err == ""
    (row,) = json.loads(out)
    assert (row["name"], row["arch"], row["element"], row["hdim"]) == ("flash_naive", "sm_80", "float", 128)
    assert row["registers"] > 0
    assert row["spill_stores"] == row["spill_loads"] == row["stack_bytes"] == 0
    assert row["shared_bytes"] >= NAIVE.spec(torch.float32, 128).shared_bytes
    assert 0 < row["occupancy"] <= 1
    assert row["error"] is None


def test_kernels_as_a_table(run):
    code, out, _ = run("kernels", "--kernel", "flash_naive", "--arch", "sm_80", "--arch", "sm_90a")
    assert code == 0
    rows = [line for line in out.splitlines() if "sm_" in line]
    assert len(rows) == 2
    assert "0/0" in rows[0]
    assert "--all" in out


def test_kernels_are_readable_in_80_columns(run, monkeypatch):
    """The longest names and figures that there are: every line fits, and figures stand under their headings."""

    def rows(pairs, done):
        return [compiler.ResourceRow(str(s), a, False, 1024, 255, 1244, 1248, 1144, 227 << 10, 227 << 10, 16, 1.0,
                                     compile_seconds=12.3) for s, a in pairs]  # fmt: skip

    monkeypatch.setattr(compiler, "resource_rows", rows)
    code, out, _ = run("kernels", "--all")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) > 1000
    assert max(map(len, lines)) <= 80
    names = ["arch", "threads", "regs", "spill B", "stack B", "shared KB", "blocks/SM", "occupancy", "compile"]
    heading = next(line for line in lines if line.startswith("arch"))
    ends = [heading.index(name) + len(name) for name in names[1:]]
    for line in (line for line in lines if line.startswith("  sm_")):
        assert all(line[end - 1] != " " and line[end : end + 1] in (" ", "") for end in ends), line


def test_product_kernels_are_among_them_and_spill_nothing(run):
    code, out, _ = run("kernels", "--kernel", "forward", "--kernel", "ragged", "--arch", "sm_90a", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {row["name"] for row in rows} == {"forward", "ragged"}
    assert all(row["spill_stores"] == row["spill_loads"] == 0 and not row["serialised"] for row in rows)


def without_products(monkeypatch):
    """The kernels of the ladder alone."""
    products = (append, backward, choice, decode_kernels, decode_small, merge_rows, mla_kernels, mla_mma, planner)
    for product in (*products, schedules, tilings, widen):
        monkeypatch.setattr(product, "specs", lambda card="", every=False: [])


def test_hopper_rungs_are_compiled_for_hopper_alone(run, monkeypatch):
    def rows(pairs, done):
        return [compiler.ResourceRow(str(s), a, False, s.threads) for s, a in pairs]

    monkeypatch.setattr(compiler, "resource_rows", rows)
    monkeypatch.setattr(ladder, "RUNGS", (NAIVE, replace(NAIVE, name="by_tma", tile_kv=64)))
    without_products(monkeypatch)
    code, out, _ = run("kernels", "--all", "--json")
    assert code == 0
    heads, apart = len(NAIVE.head_dims), len(ladder.SPILLING.head_dims)
    names = ["flash_naive"] * 9 * heads + ["by_tma"] * heads + ["spilling"] * 9 * apart
    assert [row["name"] for row in json.loads(out)] == names
    assert [row["arch"] for row in json.loads(out)] == [
        *compiler.ARCHS * heads, *["sm_90a"] * heads, *compiler.ARCHS * apart
    ]  # fmt: skip
    code, _, err = run("kernels", "--kernel", "by_tma", "--arch", "sm_80")
    assert code == 2
    assert_one_line_and_hint(err)


def test_faults_are_told(run, monkeypatch):
    spilled = compiler.ResourceRow("flash_naive", "sm_80", False, 32, 255, 8, 8, 16, 200 << 10, 99 << 10, 0, 0.0,
                              serialised=("ptxas info: (C7510) serialized",))  # fmt: skip
    monkeypatch.setattr(compiler, "resource_rows", lambda pairs, done: [spilled])
    words = ["kernels", "--kernel", "flash_naive", "--arch", "sm_80"]
    code, out, _ = run(*words)
    assert code == 0, "a rung may"
    assert "spills, over the 99 KB of shared memory, wgmma serialised (1)" in out
    assert "C7510" in out
    monkeypatch.setattr(compiler, "resource_rows", lambda pairs, done: [replace(spilled, product=True)])
    assert run(*words)[0] == 1, "a product kernel may not"


def test_a_kernel_that_does_not_compile_is_told_in_one_line(run, monkeypatch, tmp_path):
    source = "ladder/broken.cu"
    (tmp_path / "ladder").mkdir()
    (tmp_path / source).write_text('extern "C" __global__ void flash_naive() { nonsense; }\n')
    rung = replace(NAIVE, source=str(tmp_path / source))
    monkeypatch.setattr(ladder, "RUNGS", (rung,))
    without_products(monkeypatch)
    code, out, _ = run("kernels", "--arch", "sm_80")
    assert code == 1
    assert "does not compile" in out
    assert "nonsense" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--kernel", "flash_neat"], "no kernel 'flash_neat'; the kernels are"), (["--arch", "sm_70"], "'sm_70' is not")],
)
def test_unknown_kernel_or_architecture(run, words, said):
    code, _, err = run("kernels", *words)
    assert code == 2
    assert said in err
    assert "hint: tilewise kernels --help" in err
    assert_one_line_and_hint(err)
