"""The serving table: its rows and bars, its CSV, JSON and pictures; tiny and on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import BASE, TREE, timed
from cli_cases import rows_of

from tilewise import cli
from tilewise.bench import peers, prefill, serve, serve_plots
from tilewise.bench.measure import FAILED, WRONG, Result
from tilewise.bench.workloads import complete


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = {row.name: row for row in serve.rows("cuda")}
    assert len(rows) == 2 * (4 + 3 + 6 + 1) + 20 + 3 + 4 + 3 + 1
    points = [tree.point for row in rows.values() for tree in row.trees]
    assert len(set(points)) == len(points)  # a resumed CSV tells them apart
    assert len(points) == len(rows) - 1 + 75
    assert {(p.dtype, p.hdim, p.device) for p in points} == {("bfloat16", hdim, "cuda") for hdim in (128, 256)}
    bars = {name: [goal.text for goal in row.goals] for name, row in rows.items()}
    for size in (16, 64):
        for name in ("64 × 4096", "64 × 16384", "256 × 1024", "1 × 131072"):
            assert bars[f"{name}, page {size}"] == ["≥ 1×"]
        for name, bar in (("fp8", 1.85), ("int8", 1.85), ("int4", 3.1)):
            assert bars[f"{name}, 64 × 16384, page {size}"] == [f"≥ {bar}×"]
        for name, limit in (
            ("32 × (4096 + 128)", 23),
            ("64 × (8192 + 256)", 42),
            ("256 × (16384 + 128)", 135 if size == 16 else 120),
            ("64 × (1024 + 256)", 30),
            ("64 × (256 + 256)", 29),
            ("512 × (1024 + 64)", 58),
        ):
            assert bars[f"{name}, page {size}"] == [f"≤ {limit} µs"]
        assert rows[f"64 × (256 + 256), page {size}"].point.page_size == size
        assert bars[f"tree of three levels, page {size}"] == ["≥ 1.5×"]
    for batch in (1, 2, 4, 8):
        for seq in (512, 1024, 2048, 4096, 8192):
            smallest = ["≤ 10.5 µs"] if (batch, seq) == (1, 1024) else []
            assert bars[f"{batch} × {seq}, page 16"] == ["≥ 1×", *smallest]
    for name, bar in (("int8", 1.33), ("int4", 1.54)):
        assert bars[f"{name}, 64 × (8192 + 256)"] == [f"≥ {bar}×"]
        assert rows[f"{name}, 64 × (8192 + 256)"].point.kv_format == name
    assert bars["head_dim 256, 64 × (8192 + 256)"] == ["≤ 2.2×"]
    wide = rows["head_dim 256, 64 × (8192 + 256)"].point
    assert (wide.heads, wide.kv_heads, wide.hdim) == (16, 8, 256)
    (tree,) = rows["tree of three levels, page 16"].trees
    assert tree.levels == ((1, 4096), (8, 1024), (128, 256), (512, 64))
    assert (tree.point.batch, tree.tokens) == (512, tree.point.prefix + tree.point.seq)
    hydragen = [row.point for name, row in rows.items() if name.startswith("Hydragen")]
    assert [(p.batch, p.prefix, p.seq, p.heads, p.kv_heads) for p in hydragen] == [
        (512 << n, 1024 << n, 128, 8, 1) for n in range(4)
    ]
    chunks = [row.point for name, row in rows.items() if name.startswith("ChunkAttention")]
    assert [(p.prefix, p.seq, p.heads, p.kv_heads, p.page_size) for p in chunks] == [
        (n, 256, 32, 32, 64) for n in (1024, 2048, 4096)
    ]
    assert bars["auto over a grid"] == ["≥ 0.97×"]
    assert {(p.batch, p.prefix, p.seq) for p in rows["auto over a grid"].grid} == {
        (b, p, s) for b in (1, 2, 8, 64, 256) for p in (0, 64, 256, 1024, 8192) for s in (16, 256, 2048)
    }


def outcome_of(*results, point=BASE, **options):
    return serve.Outcome(serve.Row("row", replace(point, device="cuda"), ()), list(results), **options)


def test_bars_are_set_on_times_and_ratios():
    ours = timed("tilewise cuda", 9e-6, **{peers.CUDNN: 1.04})
    outcome = outcome_of(ours, timed("tilewise cuda, bf16", 18e-6), timed(peers.CUDNN, 9.4e-6, ours=False))
    assert serve.microseconds(outcome) == pytest.approx(9)
    assert serve.over_cudnn(outcome) == 1.04
    assert serve.over_bf16(outcome) == pytest.approx(2)
    assert serve.DECODE[64, 4096].met_by(outcome) is True
    assert serve.SMALLEST.met_by(outcome) is True
    assert serve.SMALLEST.value_text(outcome) == "9 µs"
    wide = outcome_of(ours, timed("tilewise cuda, head_dim 128", 4.5e-6))
    assert serve.times_narrow(wide) == pytest.approx(2)
    assert serve.times_narrow(outcome) is None
    assert serve.over_cudnn(outcome_of(timed("tilewise cuda", 1))) is None
    assert serve.DECODE[64, 4096].met_by(outcome_of(timed("tilewise cuda", 1))) is None  # cuDNN is not here
    assert serve.DECODE[64, 4096].met_by(outcome_of(Result("tilewise cuda", True, WRONG))) is False
    assert serve.over_bf16(outcome_of(ours, Result("tilewise cuda, bf16", True, FAILED))) is None


def test_tree_is_held_against_the_best_of_two_levels():
    levels = [timed(f"tilewise cuda, two levels, {n} nodes", s) for n, s in ((1, 5.0), (8, 3.0), (128, 4.0))]
    outcome = outcome_of(timed("tilewise cuda", 2.0), *levels)
    assert serve.over_two_levels(outcome) == 1.5
    # One that has no figure might have been the best.
    broken = outcome_of(timed("tilewise cuda", 2.0), *levels[:2], replace(levels[2], timing=None, status=WRONG))
    assert serve.over_two_levels(broken) is None


def test_grid_is_judged_by_its_worst_point():
    a, b, c = (replace(BASE, batch=n, device="cuda", backend="cuda") for n in (1, 2, 8))
    found = {
        a: [timed("tilewise cuda", 1.0)],  # nothing to share
        b: [timed("tilewise cuda", 1.0), timed("tilewise cuda, unshared", 0.95)],
        c: [timed("tilewise cuda", 1.0), timed("tilewise cuda, unshared", 3.0)],
    }
    outcome = outcome_of(*(r for results in found.values() for r in results), by_point=found)
    assert outcome.ratios == {a: 1.0, b: pytest.approx(0.95), c: 3.0}
    goal = prefill.Goal(serve.worst_auto, 0.97, what="of unshared")
    assert (goal.value_text(outcome), goal.met_by(outcome)) == ("0.95× of unshared", False)
    assert outcome.rates == [None] * 4
    line = serve.notes([outcome])[0]
    assert line == "row: 3 points, 2 of them shared; the worst is 2 × (0 + 40)"
    failed = {**found, c: [Result("tilewise", True, FAILED, "no memory")]}
    missed = outcome_of(*(r for results in failed.values() for r in results), by_point=failed)
    assert (goal.value_text(missed), goal.met_by(missed)) == ("", False)


def test_columns_are_microseconds():
    point = replace(BASE, workload="prefix", prefix=8)
    ours, cudnn = timed("tilewise cuda", 2e-6), timed(peers.CUDNN, 4e-6, ours=False)
    infer = [timed(peers.FLASHINFER, 9e-6, ours=False), timed(peers.FLASHINFER_CASCADE, 8e-6, ours=False)]
    assert outcome_of(ours, cudnn, *infer, point=point).rates == pytest.approx([2, 2, 4, 8])  # auto shares nothing
    unshared = timed("tilewise cuda, unshared", 3e-6)
    assert outcome_of(ours, unshared, cudnn, point=point).rates == [pytest.approx(x) for x in (2, 3, 4)] + [None]
    assert outcome_of(ours).rates == [pytest.approx(2), None, None, None]


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """The table in small on the CPU: torch's SDPA plays cuDNN; a row of each kind, a grid of four points."""

    def small(row):
        p = row.point
        sizes = {"batch": min(p.batch, 3), "seq": 13, "prefix": 32 if p.prefix else 0, "heads": 4, "page_size": 8}
        sizes |= {"kv_heads": 2, "hdim": 32}
        if row.levels:
            sizes |= {"batch": 12, "seq": 29}
        return replace(row, point=replace(p, **sizes), levels=TREE if row.levels else ())

    rows = [row for row in serve.rows("cpu") if row.point.page_size == 16]
    names = ("64 × 4096", "int4, 64 × 16384", "1 × 1024", "32 × (", "tree")
    chosen = [small(row) for name in names for row in rows if row.name.startswith(name)]
    grid = replace(rows[-1].point, heads=4, kv_heads=2, hdim=32, page_size=8)
    points = [complete(serve._prefix(grid, b, p, 5)) for b in (1, 3) for p in (0, 64)]
    chosen = [
        replace(row, point=replace(row.point, seq=13 + n) if not row.levels else row.point)
        for n, row in enumerate(chosen)
    ]
    chosen.append(replace(rows[-1], point=points[0], grid=tuple(points)))

    def chosen_rows(device):
        replace(BASE, device=device).validate()
        return chosen

    monkeypatch.setattr(serve, "rows", chosen_rows)
    monkeypatch.setattr(peers, "SDPA", peers.CUDNN)


def test_table_shows_every_row_with_its_bar(tiny, capsys):
    assert cli.main(["bench", "serve", "--device", "cpu", "--loops", "1"]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if "≥" in line or "≤" in line]
    assert len(lines) == 6
    for word in ("ours", "unshared", "cuDNN", "FlashInfer", "reached", "bar", "met", "µs, graph replay"):
        assert word in out
    assert "of bf16" in out
    assert "of two levels" in out
    assert "of unshared" in out
    assert "auto over a grid: 4 points" in out
    assert "FlashInfer: not installed" in out
    assert all(line.partition("  ")[0].strip() in err for line in lines)
    assert max(map(len, out.splitlines()[: len(lines) + 4])) <= 140  # one row has two bars


def test_json_tells_bars_and_every_measurement(tiny, capsys):
    assert cli.main(["bench", "serve", "--device", "cpu", "--loops", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["row"] for one in found][-1] == "auto over a grid"
    for one in found:
        for bar in one["bars"]:
            limit = float(bar["bar"].split()[1].rstrip("×"))
            assert bar["met"] is (bar["reached"] <= limit if "≤" in bar["bar"] else bar["reached"] >= limit)
        assert all(result["status"] == "ok" for result in one["results"])
    grid = found[-1]["results"]
    assert {(r["batch"], r["prefix"]) for r in grid} == {(1, 0), (1, 64), (3, 0), (3, 64)}
    assert {r["backend"] for r in grid} == {"cpu"}


def test_csv_is_resumed_row_by_row(tiny, capsys, monkeypatch, tmp_path):
    path = tmp_path / "s.csv"
    words = ["bench", "serve", "--device", "cpu", "--loops", "1", "--csv", str(path)]
    real, built = serve.build, []

    def build_until(tree, *args, **options):
        built.append(tree.point)
        if len(built) == 8:  # in the middle of the grid
            raise KeyboardInterrupt
        return real(tree, *args, **options)

    monkeypatch.setattr(serve, "build", build_until)
    assert cli.main(words) == 130
    assert "5 of 6 rows are measured" in capsys.readouterr().err
    first = path.read_text()
    assert len({row["kernel"] for row in rows_of(path)}) > 4
    assert not any(row["backend"] == "cpu" for row in rows_of(path))  # a grid is written as a whole
    assert cli.main([*words, "--resume"]) == 0
    assert len(built) == 8 + 4
    assert path.read_text().startswith(first)
    assert sum(row["backend"] == "cpu" for row in rows_of(path)) >= 4
    assert cli.main([*words, "--resume"]) == 0
    assert len(built) == 8 + 4  # nothing is left to do
    assert all(float(row["median_ms"]) > 0 and float(row["gbps"]) > 0 for row in rows_of(path))
    capsys.readouterr()
    assert cli.main([*words, "--force", "--plot"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"s.csv", "s_times.png", "s_auto.png"}
    assert capsys.readouterr().out.count("drew") == 2


def test_pictures_tell_what_auto_gains(tiny, tmp_path, capsys):
    assert serve_plots._gain({"tilewise": 2.0, "unshared": 3.0}) == (1.5, "1.50")
    assert serve_plots._gain({"tilewise": 2.0, "shared": 4.0}) == (1.0, "(0.50)")
    assert serve_plots._gain({"tilewise": 2.0}) == (1.0, "1.00")
    for name, style in (
        ("tilewise cuda", "tilewise"),
        ("tilewise cuda, unshared", "unshared"),
        ("tilewise cuda, shared", "shared"),
        ("tilewise cuda, two levels, 8 nodes", "two levels"),
        ("FlashInfer cascade", "cascade"),
    ):
        assert serve_plots._style(name) == style
    path = tmp_path / "s.csv"
    words = ["bench", "serve", "--device", "cpu", "--loops", "1", "--csv", str(path), "--plot", "--only", "grid"]
    assert cli.main(words) == 0
    assert "nothing to draw of times" in capsys.readouterr().out


def test_pictures_explain_their_marks(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    path = tmp_path / "serve.csv"
    path.write_bytes((Path(__file__).parents[2] / "docs" / "results" / "serve-h200.csv").read_bytes())
    serve_plots.draw(path)
    times, auto = figures
    told = [text.get_text() for text in times.legends[0].get_texts()]
    marks = {part.get_label() for part in times.axes[0].collections}
    assert set(told) == marks, "a line for each kind of mark"
    for words in ('share_prefix="auto"', "reads its whole prefix", "one level of the tree", "without pages", "bf16"):
        assert sum(words in line for line in told) == 1, words
    assert "sequences × (shared + own) tokens" in times.axes[0].get_xlabel()
    assert "left is faster" in times.axes[0].get_title()
    told = [text.get_text() for text in auto.legends[0].get_texts()]
    assert [words in line for words, line in zip(("as fast as", "(0.85)", "slower"), told, strict=True)] == [True] * 3


def test_what_fails_is_said_and_the_rest_is_measured(tiny, capsys, monkeypatch):
    real = serve.build

    def fails(tree, *args, **options):
        if tree.point.kv_format == "int4":
            raise torch.cuda.OutOfMemoryError("out of memory")
        return real(tree, *args, **options)

    monkeypatch.setattr(serve, "build", fails)
    assert cli.main(["bench", "serve", "--device", "cpu", "--loops", "1"]) == 1
    out, _ = capsys.readouterr()
    assert "int4, 64 × 16384, page 16: tilewise: failed, OutOfMemoryError: out of memory" in out
    (line,) = [line for line in out.splitlines() if "3.1×" in line]
    assert line.rstrip().endswith("no")


@pytest.mark.parametrize(
    "words",
    [["--only", "D 7"], ["--plot"], ["--resume"], ["--csv", "a.csv", "--resume", "--force"], ["--device", "cuda"]],
)
def test_what_makes_no_sense_is_refused(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "serve", *(words if "--device" in words else ["--device", "cpu", *words])]) == 2
    err = capsys.readouterr().err
    assert "tilewise bench serve --help" in err
    assert "--device" not in words or "torch sees no GPU here" in " ".join(err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
