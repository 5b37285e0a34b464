"""The table of functions: its rows and bars, its functions by the oracle, its CSV and JSON; tiny and on the CPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from bench_cases import CPU, timed
from cli_cases import rows_of

from tilewise import api, cli, reference, schedule_of
from tilewise.bench import flex, measure, prefill, variants
from tilewise.bench.measure import FAILED, OK, WRONG, Result
from tilewise.bench.workloads import FUNCTION, Point, complete

TINY = {"seq": 200, "heads": 2, "kv_heads": 2, "hdim": 16}


def test_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = variants.rows("cuda")
    assert len({row.point for row in rows}) == len(rows) == 8
    *functions, window, documents = rows
    for row in functions:
        p = row.point
        assert (p.seq, p.heads, p.kv_heads, p.hdim, p.dtype) == (16384, 16, 16, 128, "bfloat16")
    bars = {row.point.workload.removeprefix(FUNCTION): [goal.text for goal in row.goals] for row in functions}
    assert bars == {
        "causal": ["≥ 0.97×"],
        "window": ["≥ 0.9×"],
        "documents": ["≥ 0.9×"],
        "ALiBi": ["≥ 0.95×", "≥ 1.6×"],
        "softcap": ["≥ 0.97×", "≥ 1.6×"],
        "bias table": ["≥ 0.88×", "≥ 1.6×"],
    }
    assert functions[1].point.window == 1024
    for row in (window, documents):
        assert (row.point.seq, row.point.heads) == (32768, 8)
        assert [goal.text for goal in row.goals] == ["≤ 100 µs", "≥ 1"]
    assert variants.COUNT == 16


def test_on_a_cpu_there_are_no_bars():
    rows = variants.rows("cpu")
    assert [row.point.workload for row in rows] == [FUNCTION + name for name in (*variants.MAKERS, *PREPARED)]
    assert not any(row.goals for row in rows)
    assert all(row.point.dtype == "float32" and row.point.seq <= 4096 for row in rows)


PREPARED = (variants.WINDOW, variants.DOCUMENTS)


@pytest.mark.parametrize("name", variants.MAKERS)
def test_pairs_that_count_are_those_that_are_seen(name):
    point = Point(FUNCTION + name, seq=100, heads=2, kv_heads=2, window=13 if name == "window" else 0)
    variant = variants.MAKERS[name](point, CPU)
    index = torch.arange(100)
    seen = torch.ones(100, 100) if variant.mask is None else variant.mask(0, 0, index[:, None], index)
    assert variant.pairs == seen.sum()


@pytest.mark.parametrize("name", variants.MAKERS)
def test_built_in_answers_the_same(name):
    point = Point(FUNCTION + name, seq=100, heads=2, kv_heads=2, window=13 if name == "window" else 0)
    variant = variants.MAKERS[name](point, CPU)
    q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
    expected, _ = reference.attention(q, k, v, mask=variant.mask, score=variant.score)
    got = variant.built_in(q, k, v, None).view(q.shape).double()
    assert torch.allclose(got, expected, atol=1e-5) == variant.same_answer


def test_documents_are_of_random_lengths_and_fill_the_sequence():
    starts = variants.cuts(16384)
    assert (starts[0], starts[-1], len(starts)) == (0, 16384, 17)
    assert len(set(torch.tensor(starts).diff().tolist())) == 16
    assert variants.cuts(5) == [0, 1, 2, 3, 4, 5]
    assert variants.cuts(16384, 1) != starts
    assert variants.ids_of([0, 2, 3], CPU).tolist() == [0, 0, 1]


def outcome_of(*results):
    return variants.Outcome(prefill.Row("row", Point(device="cuda"), (), measure=variants._prepare), list(results))


def test_bars_on_the_built_in_and_on_flex():
    ours = timed("tilewise cuda", 9e-5, tflops=600.0, **{flex.FLEX: 1.7})
    built_in, peer = timed("tilewise cuda, built in", tflops=640.0), timed(flex.FLEX, ours=False, tflops=350.0)
    outcome = outcome_of(ours, built_in, peer)
    assert outcome.rates == [600, 640, 350, 600 / 640, 1.7]
    assert variants.microseconds(outcome) == pytest.approx(90)
    assert outcome_of(ours).rates == [600, None, None, None, 1.7]
    assert variants.without_compiling(outcome_of(Result("tilewise cuda, compiles", True, OK))) == 1
    assert variants.without_compiling(outcome_of(Result("tilewise cuda, compiles", True, FAILED))) == 0
    assert variants.without_compiling(outcome) is None
    times = [timed("tilewise cuda", 9e-5), timed("create_block_mask, eager", 0.129, ours=False), timed("slow", 2.5)]
    assert variants.notes([outcome_of(*times)])[1] == (
        "row, until it is done: tilewise cuda 90 µs, create_block_mask, eager 129 ms, slow 2.5 s"
    )


@pytest.fixture
def tiny_variants(monkeypatch):
    """The table in small, where torch's function is not compiled: that takes it seconds per row."""
    real = variants.rows

    def rows(device):
        return [
            replace(r, point=complete(replace(r.point, **TINY, window=20 if r.point.window else 0)))
            for r in real(device)
        ]

    monkeypatch.setattr(variants, "rows", rows)
    monkeypatch.setattr(flex, "how", lambda device: flex.EAGER)


def table(*words):
    return ["bench", "variants", "--loops", "1", *map(str, words)]


def test_table_shows_every_row(tiny_variants, capsys):
    assert cli.main(table()) == 0
    out, err = capsys.readouterr()
    for name in (*variants.MAKERS, *PREPARED):
        assert name in out
        assert name in err
    for column in variants.COLUMNS:
        assert column in out
    assert f"FlexAttention: torch {torch.__version__}, eager" in out
    assert "until it is done: tilewise cpu" in out
    assert "create_block_mask, eager" in out


def test_table_as_json(tiny_variants, capsys):
    assert cli.main(table("--only", "bias table", "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)
    kernels = {result["kernel"]: result for result in row["results"]}
    assert list(kernels) == ["tilewise cpu", "tilewise cpu, built in", flex.FLEX]
    assert all(result["status"] == "ok" and result["tflops"] > 0 for result in kernels.values())
    assert kernels["tilewise cpu, built in"]["error"] is None  # it is plain attention
    assert kernels[flex.FLEX]["error"] < 1e-5


def test_table_goes_into_a_csv(tiny_variants, capsys, tmp_path):
    path = tmp_path / "variants.csv"
    assert cli.main(table("--only", "documents", "--csv", path)) == 0
    rows = rows_of(path)
    assert {row["workload"] for row in rows} == {FUNCTION + "documents", FUNCTION + variants.DOCUMENTS}
    assert all(row["status"] == "ok" for row in rows)
    assert cli.main(table("--csv", path)) == 1  # it exists
    assert cli.main(table("--only", "documents", "--csv", path, "--resume")) == 0
    assert rows_of(path) == rows


@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_wrong_function_is_not_timed(tiny_variants, monkeypatch, capsys, name):
    real = api.attention

    def wrong(*args, mask=None, score=None, **options):
        o = real(*args, mask=mask, score=score, **options)
        return o if mask is None and score is None else o.mul_(1.01)

    monkeypatch.setattr(api, "attention", wrong)
    assert cli.main(table("--only", f"{name},", "--json")) == 1
    (row,) = json.loads(capsys.readouterr().out)
    found = {result["kernel"]: result["status"].partition(":")[0] for result in row["results"]}
    assert found == {"tilewise cpu": WRONG, "tilewise cpu, built in": OK, flex.FLEX: OK}


def test_peer_that_raises_does_not_end_the_run(tiny_variants, monkeypatch, capsys):
    def broken(*args, **options):
        raise RuntimeError("out of resources")

    for name in ("flex_attention", "create_block_mask"):
        monkeypatch.setattr(f"torch.nn.attention.flex_attention.{name}", broken)
    assert cli.main(table("--only", "window", "--json")) == 0
    window, prepared = ({r["kernel"]: r for r in row["results"]} for row in json.loads(capsys.readouterr().out))
    assert window[flex.FLEX]["status"] == "failed: RuntimeError: out of resources"
    assert window["tilewise cpu"]["median_ms"] > 0
    assert prepared["create_block_mask, eager"]["status"] == "failed: RuntimeError: out of resources"
    assert prepared["tilewise cpu"]["median_ms"] > 0


def test_compiling_for_another_value_is_told(tiny_variants, monkeypatch, capsys):
    built = itertools.count()
    monkeypatch.setattr(variants.cache, "built", lambda: next(built))
    assert cli.main(table("--only", variants.WINDOW, "--json")) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["results"][-1]["status"] == "failed: 1 kernels were compiled for masks of a known text"


def test_what_others_compile_meanwhile_is_theirs(tiny_variants, monkeypatch, capsys):
    """Another process fills the same cache at each look at it."""
    held = itertools.count()
    monkeypatch.setattr(variants.cache, "_survey", lambda folder, kind: [(0.0, 1, folder)] * next(held))
    assert cli.main(table("--only", variants.WINDOW, "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["results"][-1]["status"] == "ok"


def test_every_mask_that_is_prepared_is_another(tiny_variants, monkeypatch):
    widths = []
    monkeypatch.setattr(variants, "window_of", lambda width: widths.append(width) or (lambda b, h, q, k: q - k < width))
    (row,) = [row for row in variants.rows("cpu") if variants.WINDOW in row.name]
    variants._prepare(row, 3)
    assert len(widths) == len(set(widths)) > 3


def test_schedule_that_hides_what_is_seen_is_wrong():
    def mask(b, h, q, k):
        return (q >= k) & (q - k <= 50)

    schedule = schedule_of(mask, 1, 2, 300, 300, block_q=64, block_k=64)
    assert variants._sound("ours", schedule, mask).status == OK
    assert variants._sound("ours", schedule, lambda b, h, q, k: q >= k).status == WRONG  # more is seen
    assert (
        variants._sound("ours", schedule, lambda b, h, q, k: (q >= k) & (k != 70)).status == WRONG
    )  # less of a whole one


def test_waits_are_timed_until_the_device_is_done(clock, monkeypatch):
    monkeypatch.setattr(measure, "_synchronize", lambda device: clock(1.0))
    timings = measure.time_waits({"a": lambda: clock(2.0), "b": lambda: clock(5.0)}, device=CPU, loops=4)
    assert (timings["a"].median, timings["b"].median, timings["a"].loops) == (3.0, 6.0, 4)
    assert measure.time_waits({"a": lambda: clock(0.001)}, device=CPU, budget=10.0)["a"].loops == 9
