"""The workloads that are measured: their data, oracle, flops and bytes, and which options make which."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bench_cases import TINY
from cli_cases import rows_of

from tilewise import BlockSchedule, api, cli
from tilewise.bench import judge, measure, peers, workloads
from tilewise.bench.measure import OK, WRONG
from tilewise.bench.workloads import Point, build, complete, infer


@pytest.mark.parametrize("name", TINY)
def test_every_kernel_and_peer_of_a_workload_passes_the_oracle(name):
    results = measure.measure(build(TINY[name]), loops=1)
    assert all(r.status == OK for r in results), [r for r in results if r.status != OK]
    assert any(r.ours for r in results)
    assert any(r.kernel.startswith(peers.SDPA) for r in results)
    for r in results:
        # dense SDPA beside a sparse problem answers another one, and a padded one without a mask sees the padding
        assert r.error is not None or r.kernel in (peers.SDPA, peers.SDPA_PADDED)
        assert r.timing is not None
        assert r.ratio_to_best_peer > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "window", "varlen", "varlen causal", "varlen window"])
def test_kernels_on_a_card_are_judged_there(name):
    results = measure.measure(build(replace(TINY[name], device="cuda", dtype="bfloat16", hdim=64)), loops=1)
    ours = [r for r in results if r.ours]
    assert [r.kernel for r in ours] == ["tilewise cuda", "tilewise cuda, exact"]
    assert all(r.status == OK and r.error is not None for r in ours), results


def test_window_and_lengths_are_options_of_bench_and_lists_of_sweep(capsys, tmp_path):
    small = ["--heads", "2", "--hdim", "16", "--loops", "1"]
    assert cli.main(["bench", "--seq", "40", "--window", "8", *small, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["workload"], row["window"], row["causal"], row["status"]) == ("dense", 8, True, "ok")
    path = tmp_path / "a.csv"
    lists = ["--window", "0", "8", "--lengths", "4-20", "10-30", "--batch", "3"]
    assert cli.main(["sweep", *lists, *small, "--csv", str(path)]) == 0
    found = {(row["workload"], row["window"], row["lengths"], row["seq"]) for row in rows_of(path)}
    assert found == {("varlen", w, n, n.split("-")[1]) for w in ("0", "8") for n in ("4-20", "10-30")}


def test_data_is_random_and_never_zero():
    point = TINY["dense"]
    q = workloads.random_like(point, torch.Generator().manual_seed(0), 1, 64, 4, 16)
    assert (q == 0).sum() == 0
    assert 0.9 < q.std() < 1.1
    assert abs(q.mean()) < 0.1


@pytest.mark.parametrize("name", ["dense", "causal", "window", "varlen", "sparse", "prefix", "decode int8"])
def test_wrong_answer_of_the_library_is_found(name, monkeypatch):
    """One element of one row is off, in the call that the workload makes."""
    for call in ("attention", "attention_varlen", "decode", "shared_prefix_attention"):
        real = getattr(api, call)

        def slightly_wrong(*args, _real=real, **options):
            o = _real(*args, **options)
            o[-1, ..., -1, -1] += 0.25 if o.dtype == torch.bfloat16 else 0.001
            return o

        monkeypatch.setattr(workloads.api, call, slightly_wrong)
    results = measure.measure(build(TINY[name]), loops=1)
    assert all(r.status == (WRONG if r.ours else OK) for r in results), results


def test_flops_count_visible_pairs_only():
    def flops(point):
        return {k.name: k.flops for k in build(point).kernels}["tilewise cpu"]

    dense = Point(seq=48, heads=4, kv_heads=2, hdim=16)
    assert flops(dense) == 4 * 16 * 4 * 48 * 48
    assert flops(replace(dense, causal=True)) == 4 * 16 * 4 * (48 * 49 // 2)
    assert flops(complete(replace(dense, workload="values: 8"))) == 2 * (16 + 8) * 4 * 48 * 48
    # Of 48 rows all but the first 9 see 10 keys.
    assert flops(complete(replace(dense, window=9))) == 4 * 16 * 4 * (sum(range(1, 10)) + 39 * 10)
    ragged = complete(Point("varlen", batch=2, lengths="10-20", heads=2, kv_heads=2, hdim=16))
    assert flops(ragged) == 4 * 16 * 2 * (10 * 10 + 20 * 20)
    assert flops(replace(ragged, causal=True)) == 4 * 16 * 2 * (10 * 11 // 2 + 20 * 21 // 2)
    sparse = complete(Point("sparse", seq=64, heads=2, kv_heads=2, hdim=16, sparsity=0.75, block=16))
    assert flops(sparse) == 4 * 16 * 2 * 64 * 16
    decode = complete(Point("decode", batch=3, seq=10, tokens=2, heads=2, kv_heads=2, hdim=16))
    assert flops(decode) == 4 * 16 * 2 * 3 * (9 + 10)


def test_bytes_are_what_each_layout_must_move():
    point = TINY["prefix"]
    kernels = {k.name: k.bytes for k in build(point).kernels}
    token, q_and_o = 2 * 2 * 16 * 4, 2 * 4 * 4 * 16 * 4
    assert kernels[peers.SDPA] == 4 * 59 * token + q_and_o
    assert kernels["tilewise cpu"] == (50 + 4 * 9) * token + q_and_o
    ragged = build(TINY["varlen"])
    lengths = workloads.lengths_of(TINY["varlen"])
    packed, padded = (k.bytes for k in ragged.kernels)
    assert packed == 2 * sum(lengths) * (4 + 2) * 16 * 4
    assert padded == 2 * 4 * 60 * (4 + 2) * 16 * 4
    assert ragged.token_heads == sum(lengths) * 4
    quantised = {k.name: k.bytes for k in build(TINY["prefix int4"]).kernels}
    assert quantised["tilewise cpu"] < 0.5 * quantised["tilewise cpu, no cache"]


def test_large_problem_is_checked_in_an_even_spread_of_rows(monkeypatch):
    sizes = [(100, 100)] * 2
    monkeypatch.setitem(judge.PAIRS_AT_ONCE, "cpu", 4 * 100 * 2)
    monkeypatch.setitem(judge.ORACLE_PAIRS, "cpu", 4 * 100 * 2 * 5)
    blocks = list(judge.row_blocks(sizes, 2, "cpu"))
    assert len(blocks) == 5
    assert blocks[0] == (0, 0, 4)
    assert blocks[-1] == (1, 96, 100)
    assert len(list(judge.row_blocks(sizes, 2, "cuda"))) == 2  # a card has time and room for all of it
    monkeypatch.setitem(judge.ORACLE_PAIRS, "cpu", 1 << 40)
    assert len(list(judge.row_blocks(sizes, 2, "cpu"))) == 50
    ragged = list(judge.row_blocks([(10, 10), (100, 100)], 2, "cpu"))
    assert [sum(stop - start for b, start, stop in ragged if b == n) for n in (0, 1)] == [10, 100]


@pytest.mark.parametrize("name", ["window", "varlen window", "causal", "decode int8"])
def test_blocks_of_rows_see_the_keys_that_the_whole_sees(name, monkeypatch):
    monkeypatch.setitem(judge.PAIRS_AT_ONCE, "cpu", 500)
    results = measure.measure(build(TINY[name]), loops=1)
    assert all(r.status == OK for r in results), results
    assert all(r.error is None or max(r.error, 2 * r.baseline) <= r.allowed for r in results)


def test_lengths_are_spaced_geometrically_in_no_order():
    point = complete(Point("varlen", batch=16, lengths="100-16384"))
    lengths = workloads.lengths_of(point)
    assert point.seq == 16384
    ordered = sorted(lengths)
    assert (ordered[0], ordered[-1], len(set(ordered))) == (100, 16384, 16)
    assert all(b / a == pytest.approx(163.84 ** (1 / 15), rel=0.01) for a, b in pairwise(ordered))
    assert lengths != ordered
    assert lengths == workloads.lengths_of(point)
    assert workloads.lengths_of(replace(point, batch=1)) == [16384]
    assert "16 × 100-16384 tokens" in point.title


def test_standard_softmax_is_measured_beside_the_lazy_one_on_a_card():
    assert workloads.variants(Point()) == {"tilewise cpu": {"backend": "auto"}}
    assert workloads.variants(Point(device="cuda")) == {
        "tilewise cuda": {"backend": "auto"},
        "tilewise cuda, exact": {"backend": "auto", "exact": True},
    }


def test_npy_schedule_is_read_at_the_points_block_size(tmp_path):
    path = tmp_path / "c.npy"
    expected = BlockSchedule.causal(128, 128, block_q=32, block_k=32)
    expected.save(path)
    point = complete(Point("sparse", seq=128, heads=2, kv_heads=2, hdim=16, sched=str(path), block=32))
    assert workloads._schedule(point) == expected
    assert all(r.status == OK for r in measure.measure(build(point), loops=1))


def test_options_say_which_workload():
    assert infer(seq=64).workload == "dense"
    assert infer(sparsity=0.5).workload == "sparse"
    assert infer(window=64).workload == "dense"
    assert infer(window=64).causal
    assert infer(lengths="100-200", batch=4).workload == "varlen"
    assert infer(kv_format="int8").workload == "decode"
    assert infer(prefix=10).workload == "prefix"
    assert infer(prefix=10, dtype="bfloat16").kv_format == "bf16"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seq": 0}, "seq"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads"),
        ({"hdim": 577}, "hdim"),
        ({"dtype": "float64"}, "dtype"),
        ({"sparsity": 1.0}, "sparsity"),
        ({"kv_format": "fp4"}, "kv_format"),
        ({"prefix": 4, "sparsity": 0.5}, "sparsity"),
        ({"kv_format": "fp32", "tokens": 2000}, "tokens"),
        ({"kv_format": "fp32", "page_size": 300}, "page_size"),
        ({"kv_format": "fp32", "window": 8}, "window"),
        ({"window": -1}, "window"),
        ({"lengths": "many"}, "lengths"),
        ({"lengths": "200-100"}, "lengths"),
        ({"lengths": "0-100"}, "lengths"),
        ({"lengths": "1-2-3"}, "lengths"),
        ({"lengths": "100-200", "sparsity": 0.5}, "lengths"),
        ({"lengths": "100-200", "kv_format": "fp32"}, "lengths"),
    ],
)
def test_impossible_point_is_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        infer(**options)
