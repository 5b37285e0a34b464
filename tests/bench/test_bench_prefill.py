"""The prefill table: its rows and bars, its CSV and JSON; tiny and on the CPU."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from bench_cases import timed
from cli_cases import rows_of

from tilewise import api, cli
from tilewise.bench import peers, prefill, workloads
from tilewise.bench.measure import FAILED, OK, WRONG, Result
from tilewise.bench.records import DIMENSIONS
from tilewise.bench.workloads import Point, complete


def test_prefill_rows_are_the_ones_promised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = {row.name: row for row in prefill.rows("cuda")}
    assert len(rows) == 1 + 24 + 3 + 6 + 2 + 1 + 2
    assert len({row.point for row in rows.values()}) == len(rows)  # a resumed CSV tells them apart
    dtypes = {name: row.point.dtype for name, row in rows.items()}
    assert all(dtype == ("float8" if name.startswith("FP8") else "bfloat16") for name, dtype in dtypes.items())
    assert all(row.point.device == "cuda" for row in rows.values())
    for hdim in (64, 128, 256):
        for n in (512, 2048, 8192, 16384):
            for causal in (False, True):
                row = rows[f"D {hdim}, N {n}, {'causal' if causal else 'full'}"]
                p = row.point
                assert (p.batch * p.seq, p.heads * p.hdim, p.kv_heads, p.causal) == (16384, 2048, p.heads, causal)
                assert row.goals[1].text == "≥ 0.97×"
    bars = {name: [goal.text for goal in row.goals] for name, row in rows.items()}
    assert {bars[f"D {d}, N 512, {m}"][0] for d in (64, 128, 256) for m in ("full", "causal")} == {"≥ 1.1×"}
    assert {bars[f"D 256, N {n}, {m}"][0] for n in (2048, 8192, 16384) for m in ("full", "causal")} == {"≥ 1×"}
    assert [bars[f"D 128, N {n}, full"][0] for n in (2048, 8192, 16384)] == ["≥ 1.03×", "≥ 1.1×", "≥ 1.1×"]
    assert [bars[f"D 128, N {n}, causal"][0] for n in (2048, 8192, 16384)] == ["≥ 1.03×", "≥ 1.05×", "≥ 1.05×"]
    assert [bars[f"D 64, N {n}, causal"][0] for n in (2048, 8192, 16384)] == ["≥ 1.03×", "≥ 1.07×", "≥ 1.07×"]
    grouped = [row for name, row in rows.items() if name.startswith("64/8")]
    assert [(row.point.seq, row.point.kv_heads, row.goals[0].text) for row in grouped] == [
        (n, 8, "≥ 1.04×") for n in (4096, 16384, 32768)
    ]
    assert {bars[f"D 192 and 128, N {n}, {m}"][0] for n in (2048, 8192) for m in ("full", "causal")} == {"≥ 1.05×"}
    assert {(rows[name].point.hdim, rows[name].point.vdim) for name in rows if "192 and" in name} == {(192, 128)}
    assert bars["D 512, N 8192, causal"] == ["≥ 450 TFLOP/s"]
    assert bars["varlen 100-16384, causal"] == ["≥ 1.15×", "≥ 0.9×"]
    assert rows["varlen 100-16384, causal"].beside[1] == rows["D 128, N 16384, causal"].point
    assert rows["varlen 100-16384, full"].beside[1] == rows["D 128, N 16384, full"].point
    window = rows["window 1024, N 16384, causal"]
    assert (window.point.window, window.beside[1]) == (1024, rows["D 128, N 16384, causal"].point)
    assert window.goals[0].text == "≤ 1.3×"
    assert bars["FP8, D 128, N 16384, full"] == ["≥ 900 TFLOP/s"]
    assert next(iter(bars.values())) == ["≤ 15 µs", "≥ 1"]  # the host's, before anything captures a graph


def test_share_of_tiles_is_counted_by_formula():
    assert prefill.tile_share(16384, 1024) == (36 + 120 * 9) / (128 * 129 // 2)
    assert prefill.tile_share(1024, 1024) == 1
    n, window = 1000, 200
    seen = torch.ones(n, n).tril().triu(-window).bool()
    tiles = torch.nn.functional.max_pool2d(seen[None].float(), 128, ceil_mode=True).sum()
    assert prefill.tile_share(n, window) == tiles / (8 * 9 // 2)


def outcome_of(*results, goals=(), **options):
    return prefill.Outcome(prefill.Row("row", Point(device="cuda"), goals, **options), list(results))


def test_bar_is_set_against_the_better_of_both_peers():
    goal, exact = prefill.Goal(prefill.over_best, 1.1), prefill.Goal(prefill.exact_over_best, 0.97, what="exact")
    ratios = {peers.CUDNN: 1.3, peers.FA3: 1.0996}
    both = [timed(name, ours=False) for name in prefill.PEERS]
    slow = timed("tilewise cuda, exact", **{peers.CUDNN: 1.2, peers.FA3: 0.98})
    outcome = outcome_of(timed("tilewise cuda", **ratios), slow, *both)
    assert (goal.value_text(outcome), goal.met_by(outcome)) == ("1.0996×", False)
    assert (exact.value_text(outcome), exact.met_by(outcome)) == ("0.98× exact", True)
    # One that is not here might have been the better one; one that fails was not.
    del ratios[peers.FA3]
    alone = outcome_of(timed("tilewise cuda", **ratios), both[0])
    assert (goal.value_text(alone), goal.met_by(alone)) == ("", None)
    failing = outcome_of(timed("tilewise cuda", **ratios), both[0], Result(peers.FA3, False, FAILED, "no"))
    assert goal.met_by(failing) is True


def test_bar_is_missed_by_a_kernel_that_is_wrong():
    both = [timed(name, ours=False) for name in prefill.PEERS]
    assert prefill.Goal(prefill.over_best, 1.1).met_by(outcome_of(Result("tilewise cuda", True, WRONG), *both)) is False


def test_bars_on_our_own_rates_and_times():
    ours = timed("tilewise cuda", 0.18, tflops=600.0, **{peers.CUDNN_PADDED: 5.0})
    dense, causal = timed("tilewise cuda, dense", 1.0, tflops=700.0), timed("tilewise cuda, causal", 1.0)
    ragged = outcome_of(ours, dense, beside=("dense", Point()))
    assert prefill.over_beside(ragged) == pytest.approx(6 / 7)
    assert prefill.over_padded(ragged) == 5.0
    goal = prefill.Goal(prefill.over_tiles, 1.3, what="of tiles", at_most=True)
    row = prefill.Row("row", Point(device="cuda", seq=16384, window=1024), (goal,), beside=("causal", Point()))
    windowed = prefill.Outcome(row, [ours, causal])
    assert prefill.over_tiles(windowed) == pytest.approx(0.18 / (1116 / 8256))
    assert goal.value_text(windowed) == "1.33× of tiles"
    assert goal.met_by(windowed) is False
    assert prefill.over_tiles(prefill.Outcome(row, [ours])) is None


@pytest.mark.parametrize(("replays", "status"), [(True, OK), (False, WRONG)])
def test_captured_call_must_compute_on_the_data_of_the_replay(monkeypatch, replays, status):
    calls = []

    class Graph:
        def replay(self):
            if replays:
                calls[0]()

    def attention(q, k, v, out):
        calls.append(lambda: out.copy_(q + k))
        calls[-1]()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(prefill.api, "attention", attention)
    (result,) = prefill._replay("tilewise cuda, graph", *(torch.randn(1, 4, 1, 4) for _ in range(3)))
    assert result.status == status
    assert prefill.graph_replays(outcome_of(result)) == float(status == OK)


@pytest.fixture
def tiny_prefill(monkeypatch):
    """The table in small on the CPU: torch's SDPA plays the peers, and attention knows `exact`."""
    real, real_rows = api.attention, prefill.rows

    def rows(device):
        chosen = []
        for row in real_rows("cpu"):
            sizes = {"seq": row.point.seq // 64 or 8, "heads": 2, "kv_heads": 1 if row.point.kv_heads == 8 else 2}
            sizes |= {"hdim": row.point.hdim // 8, "batch": min(row.point.batch, 3), "dtype": "float32"}
            sizes |= {"window": 16 if row.point.window else 0, "lengths": "2-20" if row.point.lengths else ""}
            small = complete(replace(row.point, **{**sizes, **({"seq": 20} if row.point.lengths else {})}))
            beside = row.beside and (row.beside[0], replace(small, workload="dense", lengths="", window=0, batch=1))
            chosen.append(replace(row, point=small, beside=beside))
        return [*chosen[:3], *(row for row in chosen[1:] if "D" not in row.name)]

    def variants(point):
        return {"tilewise cpu": {}, "tilewise cpu, exact": {"exact": True}}

    def attention(q, k, v, *, exact=False, **options):
        return real(q, k, v, **options)

    def sdpa(name):
        def runs(q, k, v, *, causal, **options):
            return {name: peers.torch_sdpa(q, k, v, mask=None, causal=causal)} if q.dim() == 4 else {}

        return runs

    monkeypatch.setattr(prefill, "rows", rows)
    monkeypatch.setattr(workloads, "variants", variants)
    monkeypatch.setattr(api, "attention", attention)
    ragged = api.attention_varlen
    monkeypatch.setattr(api, "attention_varlen", lambda *a, exact=False, **o: ragged(*a, **o))
    monkeypatch.setattr(peers, "SDPA_PADDED", peers.CUDNN_PADDED)
    monkeypatch.setattr(peers, "torch_backends", sdpa(peers.CUDNN))
    monkeypatch.setattr(peers, "cuda_peers", lambda *a, **o: (sdpa(peers.FA3)(*a, **o), ""))


def test_prefill_shows_every_row_with_its_bars(tiny_prefill, capsys):
    assert cli.main(["bench", "prefill", "--device", "cpu", "--loops", "1"]) == 0
    out, err = capsys.readouterr()
    table = out.partition("FlashAttention-3:")[0]
    lines = [line for line in table.splitlines() if "≥" in line or "≤" in line]
    assert len(lines) == 3 + 3 + 2 + 1
    host, dense, *_, window = lines
    assert "µs" in host
    assert "≤ 15 µs" in host
    for column in ("ours", "exact", "cuDNN", "FA3", "reached", "bar", "met"):
        assert column in table
    assert dense.count("×") == 4  # two ratios, two bars
    assert "of tiles" in window
    assert max(map(len, table.splitlines())) <= 132
    assert all(line.partition("  ")[0].strip() in err for line in lines)  # and each as it came
    assert "FlashAttention-3: not installed; bars" in out


def test_prefill_as_json_with_only_some_rows(tiny_prefill, capsys):
    assert cli.main(["bench", "prefill", "--device", "cpu", "--loops", "1", "--only", "VARLEN", "--json"]) == 0
    full, causal = json.loads(capsys.readouterr().out)
    assert (full["row"], causal["row"]) == ("varlen 100-16384, full", "varlen 100-16384, causal")
    assert [bar["bar"] for bar in full["bars"]] == ["≥ 1.15×", "≥ 0.9×"]
    assert all(bar["met"] is (bar["reached"] >= float(bar["bar"][2:-1])) for bar in causal["bars"])
    kernels = [result["kernel"] for result in causal["results"]]
    assert kernels == ["tilewise cpu", "tilewise cpu, exact", peers.CUDNN_PADDED, "tilewise cpu, dense"]
    assert all(result["status"] == "ok" and result["tflops"] > 0 for result in causal["results"])


def test_prefill_writes_a_csv_and_goes_on_with_it(tiny_prefill, capsys, monkeypatch, tmp_path):
    path = tmp_path / "p.csv"
    words = ["bench", "prefill", "--device", "cpu", "--loops", "1", "--csv", str(path)]
    measured = []
    real = prefill.build

    def build(point):
        measured.append(point)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(point)

    monkeypatch.setattr(prefill, "build", build)
    assert cli.main([*words, "--only", "full"]) == 130
    out, err = capsys.readouterr()
    assert "1 of 3 rows are measured" in err
    assert "--resume" in err
    assert "D 64, N 512, full" in out
    first = path.read_text()
    assert len(rows_of(path)) == 4
    assert cli.main([*words, "--resume"]) == 0
    assert path.read_text().startswith(first)
    assert len({tuple(row[name] for name in DIMENSIONS) for row in rows_of(path)}) == 9
    (host,) = [row for row in rows_of(path) if row["kernel"] == "tilewise cpu, host"]
    assert float(host["median_ms"]) > 0
    assert cli.main(words) == 1  # it exists


@pytest.mark.parametrize(
    "words",
    [["--only", "D 7"], ["--plot"], ["--resume"], ["--csv", "a.csv", "--resume", "--force"], ["--device", "cuda"]],
)
def test_prefill_that_makes_no_sense_is_refused(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "prefill", *(words if "--device" in words else ["--device", "cpu", *words])]) == 2
    assert "tilewise bench prefill --help" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
