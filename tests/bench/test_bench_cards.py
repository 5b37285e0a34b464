"""The table of cards: its rows and bars, whose kernels it times, its CSV and JSON; tiny and on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from bench_cases import timed
from cli_cases import rows_of

from tilewise import api, arch, cli
from tilewise.bench import cards, peers, prefill
from tilewise.bench.measure import FAILED, OK, WRONG, Result
from tilewise.bench.workloads import Point, complete

FLOAT32 = [f"float32, D {d}, N {n}, {m}" for d in (64, 128) for n in (2048, 8192) for m in ("full", "causal")]


@pytest.fixture(autouse=True)
def as_it_is():
    """Whatever TILEWISE_CARD says."""
    with arch.as_card(None):
        yield


@pytest.fixture
def promised(monkeypatch):
    """The rows for a card by name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = cards.rows("cuda")
    assert len({row.point for row in rows}) == len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def bars(rows, kind=""):
    """{(D, mask): bars at each N} of sm_80 and of sm_89."""
    found = []
    for number, card in enumerate(("sm_80", "sm_89")):
        of_card = {}
        for hdim in (64, 128, 256):
            for mask in ("full", "causal"):
                names = [f"{kind}D {hdim}, N {n}, {mask}" for n in (512, 2048, 8192)]
                goals = [rows[name].goals[number] for name in names if name in rows]
                assert all((goal.what, goal.text) == (card, f"≥ {goal.limit:g}×") for goal in goals)
                if goals:
                    of_card[hdim, mask] = [goal.limit for goal in goals]
        found.append(of_card)
    return found


def test_bars_are_the_ones_promised(promised):
    as_80, as_89 = bars(promised)
    assert as_80 == {
        (64, "full"): [1.10, 1.15, 1.15],
        (64, "causal"): [1.25, 1.20, 1.22],
        (128, "full"): [1.08, 1.12, 1.15],
        (128, "causal"): [1.25, 1.22, 1.27],
        (256, "full"): [1.00, 1.00, 1.02],
        (256, "causal"): [1.05, 1.12, 1.15],
    }
    assert as_89 == {
        (64, "full"): [1.10, 1.15, 1.15],
        (64, "causal"): [1.25, 1.20, 1.22],
        (128, "full"): [1.03] * 3,
        (128, "causal"): [1.12] * 3,
        (256, "full"): [0.95] * 3,
        (256, "causal"): [1.05] * 3,
    }
    halves = bars(promised, "fp16, ")
    assert [{key: x for key, x in of.items() if key[0] == 128} for of in (as_80, as_89)] == halves


def test_rows_are_the_ones_promised(promised):
    dense = [row for row in promised.values() if row.measure is cards._dense]
    assert len(dense) == 18 + 6 + 8
    assert len(promised) == len(dense) + 2 + 2
    for row in dense:
        p = row.point
        assert (p.batch * p.seq, p.heads * p.hdim, p.kv_heads) == (16384, 2048, p.heads)
        assert p.causal == row.name.endswith("causal")
        kind = "float32" if row.name.startswith("float32") else "float16" if "fp16" in row.name else "bfloat16"
        assert p.dtype == kind
    for name in FLOAT32:
        assert [(goal.text, goal.what) for goal in promised[name].goals] == [("≥ 1.5×", "itself"), ("≥ 1.5×", "sm_80")]
    for n in (2048, 8192):
        row = promised[f"ragged, D 128, N {n}, causal"]
        assert (row.point.workload, row.point.batch, row.point.lengths) == ("varlen", 16384 // n, f"{n}-{n}")
        assert [(goal.text, goal.what) for goal in row.goals] == [("≥ 0.93×", "packed"), ("≥ 0.93×", "paged")]
    assert cards.PAGE == 16
    decode, shared = promised["decode 64 × 4096"], promised["shared 64 × (8192 + 256)"]
    assert [(goal.text, goal.what) for goal in decode.goals] == [("≥ 0.95×", "cuDNN")]
    assert [(goal.text, goal.what) for goal in shared.goals] == [("≥ 4×", "unshared")]
    assert (shared.point.workload, shared.point.prefix, shared.point.seq) == ("prefix", 8192, 256)
    lengths = [row.point.seq for row in promised.values() if row.measure is not cards._decode]
    assert lengths == sorted(lengths)  # short ones first


def test_whose_kernels_a_row_times(promised):
    asked = {name: cards._cards(row) for name, row in promised.items()}
    assert asked["D 256, N 512, full"] == asked["fp16, D 128, N 8192, causal"] == ("sm_80", "sm_89")
    assert {asked[name] for name in FLOAT32} == {(None, "sm_80")}
    assert asked["ragged, D 128, N 2048, causal"] == asked["decode 64 × 4096"] == ("sm_80",)
    assert list(cards._peers(promised["D 64, N 512, full"].point)) == [peers.FA2]
    assert list(cards._peers(promised[FLOAT32[0]].point)) == [cards.EFFICIENT, cards.MATH]


def test_kernels_are_known_before_they_are_measured(promised, monkeypatch):
    """Found without a card, each as the card has it."""
    monkeypatch.setattr(arch, "card_of", lambda device: arch.chosen or "sm_90a")
    chosen = ("D 128, N 512, causal", "ragged, D 128, N 2048, causal", FLOAT32[0], "decode 64 × 4096")
    specs = cards.specs([promised[name] for name in chosen])
    assert len(set(specs)) == len(specs)
    forwards = [dict(spec.constants) for spec in specs if spec.name == "forward_mma"]
    halves = [c for c in forwards if c["kHeadDim"] == 128]
    # As sm_80 and sm_89, and over pages; of float32 as the card itself and as sm_80, unless the tiling is the same.
    assert sorted((c["kPageSize"], c["kTileKv"]) for c in halves) == [(0, 32), (0, 64), (16, halves[-1]["kTileKv"])]
    assert {c["Element"] for c in forwards if c["kHeadDim"] == 64} == {"float"}
    names = {spec.name for spec in specs}
    assert {"forward_mma", "ragged"} <= names
    assert "forward" not in names  # Hopper's
    decoding = [dict(spec.constants) for spec in specs if "kTma" in dict(spec.constants)]
    assert decoding
    assert not any(constants["kTma"] for constants in decoding)


def outcome_of(*results, measure=cards._dense):
    return cards.Outcome(prefill.Row("row", Point(device="cuda"), (), measure=measure), list(results))


def test_what_bars_are_set_on():
    ours = timed("tilewise cuda, as sm_80", tflops=400.0, **{cards.EFFICIENT: 2.0, cards.MATH: 1.6})
    other = timed("tilewise cuda, as sm_89", tflops=380.0, **{peers.FA2: 1.1})
    theirs = [timed(cards.EFFICIENT, ours=False, tflops=200.0), timed(cards.MATH, ours=False, tflops=250.0)]
    outcome = outcome_of(ours, other, *theirs)
    assert cards.over_torch(outcome, "sm_80") == 1.6  # the faster of both
    assert cards.over_torch(outcome, "sm_89") == 1.1
    assert cards.over_torch(outcome) is None
    assert outcome.rates == [400, 380, None, 250]
    goal = prefill.Goal(cards.over_torch, 1.5)
    assert goal.met_by(outcome_of(timed("tilewise cuda"))) is None  # no peer ran
    assert goal.met_by(outcome_of(Result("tilewise cuda", True, FAILED, "no"))) is False

    packed, paged = (
        timed("tilewise cuda, as sm_80", tflops=380.0),
        timed("tilewise cuda, as sm_80, paged", tflops=360.0),
    )
    outcome = outcome_of(packed, paged, timed("tilewise cuda, as sm_80, dense", tflops=400.0), measure=cards._ragged)
    assert cards.over_dense(outcome, "sm_80") == 0.95
    assert cards.over_dense(outcome, "sm_80", cards.PAGED) == 0.9
    assert cards.over_dense(outcome_of(packed), "sm_80") is None

    step, alone = timed("tilewise cuda, as sm_80", 5e-5), timed("tilewise cuda, as sm_80, unshared", 3e-4)
    outcome = outcome_of(step, alone, measure=cards._decode)
    assert cards.over_unshared(outcome, "sm_80") == pytest.approx(6)
    assert cards.over_unshared(outcome_of(step), "sm_80") == 1
    assert cards.over_unshared(outcome_of(), "sm_80") is None
    assert outcome.rates == [None] * 4
    assert cards.notes([outcome])[0] == "row: tilewise cuda, as sm_80 50 µs, tilewise cuda, as sm_80, unshared 300 µs"


# ---- run, tiny -------------------------------------------------------------------------------------------------------


def small(row):
    point = row.point
    sizes = {"batch": 2, "seq": 32, "heads": 2, "kv_heads": min(2, point.kv_heads), "hdim": 16}
    if point.workload in ("decode", "prefix"):
        sizes |= {"batch": 3, "hdim": 64, "kv_heads": 1, "prefix": 32 if point.prefix else 0}
    return replace(row, point=complete(replace(point, **sizes, lengths="32-32" if point.lengths else "")))


@pytest.fixture
def tiny(monkeypatch):
    """The table in small: rows of D 64 are left out."""
    real = cards.rows
    monkeypatch.setattr(cards, "rows", lambda device: [small(row) for row in real(device) if "D 64" not in row.name])


def table(*words):
    return ["bench", "cards", "--loops", "1", "--device", "cpu", *map(str, words)]


def test_on_a_cpu_there_are_smaller_rows_and_no_bars():
    rows = cards.rows("cpu")
    assert not any(row.goals for row in rows)
    assert all(row.point.batch * row.point.seq <= 1 << 15 for row in rows)
    assert all(f"N {row.point.seq}" in row.name for row in rows if row.measure is not cards._decode)
    assert len({row.point for row in rows}) == len(rows) == 36
    assert {cards._cards(row) for row in rows} == {(None,)}


def test_table_shows_every_row(tiny, capsys):
    names = [row.name for row in cards.rows("cpu")]
    assert cli.main(table()) == 0
    out, err = capsys.readouterr()
    for name in names:
        assert name in out
        assert name in err
    for column in cards.COLUMNS:
        assert column in out
    assert "these are the CPU's kernels" in out
    assert "tilewise cpu, shared" in out


def test_table_as_json_and_csv(tiny, capsys, tmp_path):
    path = tmp_path / "cards.csv"
    assert cli.main(table("--only", "ragged, D 128, N 128,", "--json", "--csv", path)) == 0
    (row,) = json.loads(capsys.readouterr().out)
    kernels = {result["kernel"]: result for result in row["results"]}
    assert list(kernels) == ["tilewise cpu", "tilewise cpu, paged", "tilewise cpu, dense"]
    assert all(result["status"] == OK and result["tflops"] > 0 for result in kernels.values())
    assert all(result["error"] is not None for result in kernels.values())
    rows = rows_of(path)
    assert [line["kernel"] for line in rows] == list(kernels)
    assert cli.main(table("--csv", path)) == 1  # it exists
    assert cli.main(table("--only", "N 128,", "--csv", path, "--resume")) == 0
    assert rows_of(path)[:3] == rows


@pytest.mark.parametrize("card", ["sm_80", "sm_89"])
def test_each_kernel_runs_as_its_card_and_peers_as_none(monkeypatch, card):
    """A card is imitated while a kernel of its name runs, and at no other time."""
    seen, real, real_peer = [], api.attention, torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(cards, "_cards", lambda row: (None, card))
    monkeypatch.setattr(api, "attention", lambda *a, **o: (seen.append(arch.chosen), real(*a, **o))[1])

    def peer(*args, **options):
        assert args[0].is_contiguous()  # in its own layout
        seen.append("peer")
        assert arch.chosen is None
        return real_peer(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", peer)
    row = next(small(row) for row in cards.rows("cpu") if "float32" in row.name)
    results = cards._dense(row, 2)
    assert [result.kernel for result in results] == ["tilewise cpu", f"tilewise cpu, as {card}", peers.SDPA]
    assert seen == [None, card, "peer"] + [None, card, "peer"] * 3  # checked, called once, timed twice
    assert all(result.status == OK for result in results)


def test_wrong_kernel_is_not_timed(monkeypatch):
    """Wrong as one card alone."""
    real = api.attention
    monkeypatch.setattr(cards, "_cards", lambda row: (None, "sm_80"))
    monkeypatch.setattr(api, "attention", lambda *a, **o: real(*a, **o).mul_(1.01 if arch.chosen else 1.0))
    row = next(small(row) for row in cards.rows("cpu") if "float32" in row.name)
    right, wrong, _ = cards._dense(row, 1)
    assert (right.status, wrong.status, wrong.timing) == (OK, WRONG, None)
    row = next(small(row) for row in cards.rows("cpu") if "ragged" in row.name)
    statuses = {result.kernel: result.status for result in cards._ragged(row, 1)}
    assert [name for name, status in statuses.items() if status == WRONG] == ["tilewise cpu, as sm_80, dense"]


def test_decode_plans_and_runs_as_the_card(monkeypatch):
    seen, real, plan = [], api.decode, api.plan_decode
    monkeypatch.setattr(cards, "_cards", lambda row: ("sm_80",))
    monkeypatch.setattr(api, "decode", lambda *a, **o: (seen.append(arch.chosen), real(*a, **o))[1])
    monkeypatch.setattr(api, "plan_decode", lambda *a, **o: (seen.append(arch.chosen), plan(*a, **o))[1])
    found = {}
    for row in (small(row) for row in cards.rows("cpu") if row.measure is cards._decode):
        found[row.point.workload] = [result.kernel for result in cards._decode(row, 1) if result.status == OK]
    assert found["decode"] == ["tilewise cpu, as sm_80", peers.SDPA]
    assert found["prefix"][0] == "tilewise cpu, as sm_80"
    assert set(found["prefix"]) <= {f"tilewise cpu, as sm_80{more}" for more in ("", ", unshared", ", shared")}
    assert set(seen) == {"sm_80"}


def test_without_a_card_cuda_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "cards", "--device", "cuda"]) == 2
    assert "torch sees no GPU here" in " ".join(capsys.readouterr().err.split())
