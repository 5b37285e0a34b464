"""Sweeps: combinations, the CSV that survives a kill, and the plots drawn of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_cases import TINY, points_of, run_sweep, timed
from cli_cases import rows_of

from tilewise.bench import measure, peers, plots, sweep
from tilewise.bench.measure import FAILED, WRONG
from tilewise.bench.records import COLUMNS, DIMENSIONS, machine, records
from tilewise.bench.workloads import Point, complete


def test_combinations_are_all_of_them_and_impossible_ones_are_told():
    points, left_out = sweep.combinations({"seq": [32, 64], "heads": [4, 6], "kv_heads": [2, 4]}, Point(hdim=16))
    assert [(p.seq, p.heads, p.kv_heads) for p in points] == [
        (seq, heads, kv) for seq in (32, 64) for heads, kv in ((4, 2), (4, 4), (6, 2))
    ]
    assert len(left_out) == 2
    assert "kv_heads must divide heads=6" in left_out[0]


def test_kv_heads_follow_heads_unless_given():
    assert {(p.heads, p.kv_heads) for p in points_of(heads=[2, 4])} == {(2, 2), (4, 4)}


def test_csv_has_a_row_for_each_kernel_with_everything(tmp_path):
    path = tmp_path / "new folder" / "a.csv"
    run_sweep(path, points_of(seq=[32], sparsity=[0.0, 0.5], block=[16]))
    rows = rows_of(path)
    assert list(rows[0]) == list(COLUMNS)
    assert set(DIMENSIONS) <= set(COLUMNS)
    dense, sparse = ([row for row in rows if row["workload"] == w] for w in ("dense", "sparse"))
    assert [row["kernel"] for row in dense] == ["tilewise cpu", peers.SDPA]
    assert [row["kernel"] for row in sparse] == ["tilewise cpu", peers.SDPA, peers.SDPA_MASK]
    for row in (dense[0], sparse[0]):
        assert row["status"] == "ok"
        assert row["torch"] == torch.__version__
        assert row["machine"]
        assert row["date"].startswith("20")
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        for name in ("tflops", "gbps", "us_per_token_head", "pct_of_ceiling", "ratio_to_best_peer"):
            assert float(row[name]) > 0
        assert float(row["error"]) < 1e-5
        assert float(row["error_baseline"]) < 1e-5


def test_rows_are_on_disk_as_soon_as_a_point_is_measured(tmp_path):
    path = tmp_path / "a.csv"
    seen = []
    with sweep.Sheet(path) as sheet:
        sweep.run(points_of(seq=[32, 48]), sheet, loops=1, after=lambda point, results: seen.append(len(rows_of(path))))
    assert seen == [2, 4]


def test_resume_skips_what_is_there(tmp_path):
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32]))
    before = path.read_text()
    started = []
    with sweep.Sheet(path, resume=True) as sheet:
        sweep.run(points_of(seq=[32, 48]), sheet, loops=1, before=started.append)
    assert [p.seq for p in started] == [48]
    assert path.read_text().startswith(before)
    assert [row["seq"] for row in rows_of(path)] == ["32", "32", "48", "48"]


@pytest.mark.parametrize("cut", [5, 60])
def test_torn_last_line_is_measured_again(tmp_path, cut):
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32, 48]))
    path.write_bytes(path.read_bytes()[:-cut])
    started = []
    with sweep.Sheet(path, resume=True) as sheet:
        sweep.run(points_of(seq=[32, 48]), sheet, loops=1, before=started.append)
    assert [p.seq for p in started] == [48]
    assert sorted(row["seq"] for row in rows_of(path)) == ["32", "32", "48", "48"]
    assert all(row["status"] == "ok" for row in rows_of(path))


def test_point_with_a_missing_row_is_measured_again(tmp_path):
    """Killed between the lines of one point: nothing looks torn."""
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32, 48]))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    run_sweep(path, points_of(seq=[32, 48]), resume=True)
    assert sorted(row["seq"] for row in rows_of(path)) == ["32", "32", "48", "48"]


def test_resume_on_an_empty_file_starts_over(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("date,tilew")
    run_sweep(path, points_of(seq=[32]), resume=True)
    assert len(rows_of(path)) == 2


def test_point_of_another_machine_is_not_this_ones(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    run_sweep(path, points_of(seq=[32]))
    path.write_text(path.read_text().replace(machine("cpu"), "another machine"))
    with sweep.Sheet(path, resume=True) as sheet:
        assert not sheet.has(points_of(seq=[32])[0])


@pytest.mark.parametrize("column", ["tilewise", "torch", "threads"])
def test_point_of_another_version_is_measured_again_and_both_are_kept(tmp_path, column):
    path = tmp_path / "a.csv"
    (point,) = points_of(seq=[32])
    run_sweep(path, [point])
    rows = [{**row, column: "77"} for row in rows_of(path)]
    sweep._write_whole(path, rows)
    with sweep.Sheet(path, resume=True) as sheet:
        assert not sheet.has(point)
        assert sheet.foreign_rows == 2
    run_sweep(path, [point], resume=True)
    with sweep.Sheet(path, resume=True) as sheet:
        assert sheet.has(point)
        assert sheet.foreign_rows == 2
    assert rows_of(path)[:2] == rows
    assert len(rows_of(path)) == 4


def test_existing_csv_is_never_overwritten_unasked(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"--resume.*--force"):
        sweep.Sheet(path)
    assert path.read_text() == "mine"
    with sweep.Sheet(path, force=True):
        pass
    assert rows_of(path) == []


@pytest.mark.parametrize("text", ["a,b,c\n1,2,3\n", ",".join(COLUMNS) + "\n1,2,3\n", "\0\xff\n"])
def test_csv_that_is_no_sweeps_is_refused(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"a\.csv"):
        sweep.Sheet(path, resume=True)
    assert path.read_text(encoding="latin-1") == text


def test_point_that_cannot_be_built_is_a_row_with_its_reason(tmp_path):
    path = tmp_path / "a.csv"
    bad = complete(Point("sparse", seq=32, heads=2, kv_heads=2, hdim=16, sched=str(tmp_path / "none.npz")))
    results = run_sweep(path, [bad, *points_of(seq=[32])])
    assert results[0].status == FAILED
    assert [row["status"][:6] for row in rows_of(path)] == ["failed", "ok", "ok"]


def test_records_of_a_wrong_kernel_hold_no_infinity():
    (row,) = records(TINY["dense"], [measure.Result("k", True, WRONG, "NaN in it", error=float("inf"), baseline=0.1)])
    assert row["error"] is None
    assert row["status"] == "WRONG: NaN in it"


# ---- plots ------------------------------------------------------------------------------------------------------


def test_plots_are_drawn_for_axes_with_more_than_one_value(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[32, 64], hdim=[16, 32]))
    drawn = plots.draw(path)
    assert [p.name for p in drawn] == [f"s_{m}_over_seq.png" for m in ("latency", "throughput", "speedup")]
    assert all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in drawn)


def test_a_panel_has_one_line_per_kernel_with_units(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[64], sparsity=[0.0, 0.5], block=[16], hdim=[16, 32]))
    rows = [row for row in sweep.read(path)[0] if row["status"] == "ok"]
    figure = plots._figure(rows, "sparsity", "latency")
    assert "Latency over sparsity" in figure.get_suptitle()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["D 16", "D 32"]
    for axes in panels:
        labels = [line.get_label() for line in axes.lines]
        assert labels == ["tilewise cpu", peers.SDPA, peers.SDPA_MASK]
        assert [len(line.get_xdata()) for line in axes.lines] == [2, 2, 1]
        assert axes.get_ylabel() == "median time (ms)"
        assert "sparsity" in axes.get_xlabel()
        assert axes.get_legend() is not None


def test_longer_sequences_in_smaller_batches_are_one_line(tmp_path):
    path = tmp_path / "s.csv"
    points = [replace(p, batch=128 // p.seq) for p in points_of(seq=[32, 64, 128], causal=[False, True])]
    run_sweep(path, [*points, *points_of(seq=[16, 48], heads=[4])])
    figure = plots._figure(sweep.read(path)[0], "seq", "throughput")
    titles = [axes.get_title() for axes in figure.axes]
    assert [title for title in titles if "batch 128/N" in title and "heads 2" in title] == titles[1:]
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [2, 3, 3]


def test_what_has_no_rate_is_not_drawn(tmp_path):
    path = tmp_path / "s.csv"
    with sweep.Sheet(path) as sheet:
        for point in points_of(seq=[32, 64]):
            sheet.append(records(point, [timed("host")]))
    assert plots.draw(path) == []


def test_axis_that_no_panel_has_two_values_of_is_skipped_and_told(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, [*points_of(seq=[32], heads=[1]), *points_of(seq=[48], heads=[2], sparsity=[0, 0.5], block=[16])])
    skipped = []
    drawn = plots.draw(path, skipped.append)
    assert [p.name for p in drawn] == [f"s_{m}_over_sparsity.png" for m in ("latency", "throughput", "speedup")]
    assert len(skipped) == 1
    assert "seq" in skipped[0]


def test_versions_and_machines_have_panels_of_their_own(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[32, 64]))
    rows = rows_of(path)
    figure = plots._figure([*rows, *({**row, "torch": "2.0.0"} for row in rows)], "seq", "latency")
    assert [axes.get_title() for axes in figure.axes] == [f"torch {torch.__version__}", "torch 2.0.0"]
    assert all(len(line.get_xdata()) == 2 for axes in figure.axes for line in axes.lines)


def test_wrong_kernels_are_not_drawn(tmp_path):
    path = tmp_path / "s.csv"
    run_sweep(path, points_of(seq=[32, 64]))
    path.write_text(path.read_text().replace(",ok\n", ",WRONG: off\n"))
    assert plots.draw(path) == []
