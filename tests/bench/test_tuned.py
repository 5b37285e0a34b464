"""Tables of what was measured: which ones are used, what an entry may change, and what doctor says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import arch, tuned
from tilewise.bench import tune_findings
from tilewise.bench.tune_findings import CardAt, entry_fault, findings
from tilewise.formats import KVFormat
from tilewise.gpu import decode, tilings
from tilewise.gpu.decode_kernels import choose_tiling as choose_decode
from tilewise.gpu.pattern import NO_PATTERN, Pattern
from tilewise.plan.cost import CPU_COST, GPU_COST, MMA_COST, Weights, streamed
from tilewise.scores import Scores
from tilewise.tuned import Section, Tuned

BF16, CPU = torch.bfloat16, torch.device("cpu")
CARD, TARGET = "NVIDIA H200", "sm_90a"
KEY = "bfloat16/128/causal/plain/long"
CAUSAL = Scores((None, 0))


def table(families: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A sound record of this version's kernels, with these changes."""
    given = families if families is not None else {"prefill": {"tilings": {KEY: {"tile_kv": 112}}}}
    made = {
        name: {"date": "2026-11-01T00:00:00+00:00", "source": tuned.source(name), **section}
        for name, section in given.items()
    }
    return {"format": 1, "card": CARD, "target": TARGET, "families": made, **fields}


def write(folder: Path, record: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / tuned.file_name(CARD, TARGET)
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's tables, none so far."""
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shipped"


# ---- files -------------------------------------------------------------------------------------------------------
def test_a_table_of_this_card_and_source_is_used(tmp_path: Path, shipped: Path) -> None:
    write(tmp_path, table())
    held = tuned.held(CARD, TARGET, tmp_path)
    assert held.sections["prefill"].tilings == {KEY: {"tile_kv": 112}}


@pytest.mark.parametrize(
    "record",
    [
        table(card="NVIDIA H100"),
        table(target="sm_80"),
        table({"prefill": {"source": "another", "tilings": {KEY: {"tile_kv": 112}}}}),
        table(format=2),
        "{",
        "[]",
        "null",
        json.dumps({"format": 1}),
        table({"prefill": {"tilings": {KEY: {"tile_kv": "112"}}}}),
        table({"prefill": {"tilings": {KEY: {"tile_kv": -16}}}}),
        table({"prefill": {"tilings": {KEY: {"tile_kv": 1.5}}}}),
        table({"prefill": {"tilings": [1]}}),
        table({"decode": {"constants": {"launch_us": 0.0}}}),
        table({"decode": {"constants": {"launch_us": float("nan")}}}),
        table({"decode": {"constants": {"launch_us": True}}}),
    ],
)
def test_any_other_file_is_as_good_as_none(
    tmp_path: Path, shipped: Path, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, record)
    assert tuned.held(CARD, TARGET, tmp_path).sections == {}
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    assert not any(line.state == "ok" for line in findings([CardAt("cuda:0", CARD, TARGET)]))
    assert path.exists(), "and nothing is done to it"


def test_doctor_says_why(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    here = [CardAt("cuda:0", CARD, TARGET)]
    for record, said in (
        (table(card="NVIDIA H100"), "prefill of {} is not used: it is of another card: NVIDIA H100 as sm_90a"),
        (table({"prefill": {"source": "x"}}), "prefill of {} is not used: it was measured with other kernels than"),
        (table(format=7), "{} is not used: it has format 7, this version reads 1"),
        ("{", "{} is not used: it is no JSON"),
        (
            table({"prefill": {"tilings": {KEY: {"t": 2.0}}}}),
            "{} is not used: a tiling has whole numbers and flags, got",
        ),
    ):
        path = write(tmp_path, record)
        lines = findings(here)
        assert any(line.text.startswith(said.format(path)) and line.state == "note" for line in lines), lines
    (tmp_path / "other-sm_80.json").write_text(json.dumps(table(card="other", target="sm_80")))
    assert any("it is of another card: other as sm_80" in line.text for line in findings(here))


def test_doctor_says_what_is_used(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    here = [CardAt("cuda:0", CARD, TARGET)]
    lines = findings(here)
    assert [line.state for line in lines] == ["note"] * 4
    assert lines[-1].text.startswith("mla: no table of NVIDIA H200")
    without = findings([CardAt("cuda:0", "A100", "sm_80")])
    assert not any("mla" in line.text for line in without), "no other card has such a kernel"
    assert lines[0].text == "prefill: no table of NVIDIA H200 as sm_90a; kernels are chosen without one"
    assert lines[0].remedy == "tilewise tune prefill"
    path = write(tmp_path, table())
    theirs = write(shipped, table({"prefill": {}, "decode": {"constants": {"launch_us": 5.0, "odd": 1.0}}}))
    lines = findings(here)
    assert [line.text for line in lines if line.state == "ok"] == [
        f"prefill by {path}: 1 tiling, measured on 2026-11-01, {lines[0].text.split()[-3]} days ago",
        f"decode by {theirs}: 2 constants, measured on 2026-11-01, {lines[0].text.split()[-3]} days ago",
    ]
    texts = [line.text for line in lines if line.state == "note"]
    assert f"prefill of {theirs} is not used: your own table comes first" in texts
    assert "decode odd is not used: no constant of this version" in texts
    assert any(text.startswith("sparse: no table") for text in texts)


def test_doctor_needs_no_card() -> None:
    assert [line.state for line in findings([])] == ["note"]


def test_a_section_may_be_carried_over_to_other_kernels(
    tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To those that it names, and to no others; the doctor says so."""
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    here = [CardAt("cuda:0", CARD, TARGET)]
    for digest, holds in ((tuned.source("prefill"), True), ("another", False)):
        write(tmp_path, table({"prefill": {"source": "old", "carried": {digest: "only comments changed"}}}))
        assert ("prefill" in tuned.held(CARD, TARGET, tmp_path).sections) is holds
        told = [line.text for line in findings(here) if line.state == "ok"]
        assert len(told) == holds
        assert all(text.endswith("with earlier kernels (only comments changed)") for text in told)
    write(tmp_path, table({"prefill": {"carried": {"x": 1}}}))
    assert not tuned.held(CARD, TARGET, tmp_path).sections


def test_each_family_is_looked_up_in_the_users_table_first(tmp_path: Path, shipped: Path) -> None:
    write(tmp_path, table({"prefill": {"tilings": {KEY: {"tile_kv": 96}}}, "sparse": {"source": "old"}}))
    write(shipped, table({"prefill": {}, "sparse": {"tilings": {"a": {}}}, "decode": {"constants": {"sprint": 2.0}}}))
    held = tuned.held(CARD, TARGET, tmp_path)
    assert held.sections["prefill"].tilings == {KEY: {"tile_kv": 96}}
    assert held.sections["sparse"].tilings == {"a": {}}
    assert held.weights == replace(Weights(), sprint=2.0)
    assert tuned.held(CARD, TARGET, None).sections.keys() == {"prefill", "sparse", "decode"}


def test_what_the_package_ships_is_sound() -> None:
    for path in tuned.SHIPPED.glob("*.json"):
        found = tuned.read(path)
        assert path.name == tuned.file_name(found.card, found.target)
        assert found.target in arch.ARCHS


def test_the_source_of_a_family_is_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.source("prefill") == tuned.source("sparse") != tuned.source("decode")
    tuned.source.cache_clear()
    before, headers = tuned.source("prefill"), tuned.headers

    def changed(unit: str, **options: Any) -> dict[str, str]:
        found = headers(unit, **options)
        assert {"prefill/forward.cu", "prefill/forward_mma.cu", "prefill/fold.cu", "tile/mma.cuh"} <= set(found)
        assert not any(name.startswith("decode/") for name in found)
        return {**found, "tile/mma.cuh": found["tile/mma.cuh"] + " "}

    monkeypatch.setattr(tuned, "headers", changed)
    tuned.source.cache_clear()
    assert tuned.source("prefill") != before
    tuned.source.cache_clear()


# ---- looking up --------------------------------------------------------------------------------------------------
def test_a_card_is_looked_up_once(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, table())
    reads, read = [], tuned.read
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    monkeypatch.setattr(tuned, "read", lambda path: (reads.append(path), read(path))[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    monkeypatch.setattr(arch, "card_of", lambda device: arch.chosen or TARGET)
    tuned._of_card.cache_clear()
    try:
        device = torch.device("cuda", 0)
        first = tuned.of(device)
        assert first is tuned.of(device) is tuned.of(torch.device("cuda", 0))
        assert first is not None
        assert first.sections.keys() == {"prefill"}
        assert len(reads) == 2  # the user's, and the package's
        assert tuned.cost(device) == GPU_COST
        pair = KVFormat("int8", 128).beside(KVFormat("int8", 64))  # which has no tiles on Hopper either
        assert tuned.cost(device, pair) == streamed(GPU_COST)
        with arch.as_card("sm_80"):  # behaves as another card: that has no table
            assert tuned.of(device) is None
            assert tuned.weights(device) is tuned.UNTUNED
            assert tuned.cost(device) == tuned.cost(device, KVFormat("fp16", 128)) == MMA_COST
            assert tuned.cost(device, KVFormat("int8", 128)) == streamed(MMA_COST)
        assert tuned.cost(device, KVFormat("int8", 128)) == GPU_COST
        assert tuned.of(device) is first
    finally:
        tuned._of_card.cache_clear()


def test_cpu_tensors_have_no_table() -> None:
    assert tuned.of(CPU) is None
    assert tuned.weights(CPU) == Weights()
    assert tuned.cost(CPU) is CPU_COST


def test_the_shipped_folder_need_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "none")
    assert tuned.held(CARD, TARGET, tmp_path / "nor this").sections == {}
    assert findings([CardAt("cuda:0", CARD, TARGET)])


@pytest.mark.parametrize(
    ("rows", "scores", "plain", "pattern", "key"),
    [
        (1024, Scores(), True, NO_PATTERN, ("prefill", "bfloat16/128/full/plain/short")),
        (1025, CAUSAL, True, NO_PATTERN, ("prefill", "bfloat16/128/causal/plain/middle")),
        (4097, replace(CAUSAL, exact=True), False, NO_PATTERN, ("prefill", "bfloat16/128/causal/exact+loaded/long")),
        (9, Scores((7, None), alibi=True), True, NO_PATTERN, ("prefill", "bfloat16/128/full/scored/short")),
        (9, Scores(), True, Pattern(64, 128), ("sparse", "bfloat16/128/64x128/plain")),
        (9, CAUSAL, False, Pattern(64, 64, mask=True, text="x"), ("sparse", "bfloat16/128/64x64+mask/loaded")),
        (9, Scores(), True, Pattern(score=True, text="x"), ("sparse", "bfloat16/128/score/plain")),
    ],
)
def test_keys(rows: float, scores: Scores, plain: bool, pattern: Pattern, key: tuple[str, str]) -> None:
    assert tuned.key_of(BF16, 128, rows, scores, plain=plain, pattern=pattern) == key


# ---- entries -----------------------------------------------------------------------------------------------------
def forward(entry: dict[str, Any], card: str = TARGET, key: str = KEY) -> tuple[Any, Any]:
    """The tiling of a long causal problem without a table, and where a table has this entry."""
    sized = (card, BF16, 1, 8192, 8, 8, 128, CAUSAL)
    made = Tuned({"prefill": Section("", "", {key: entry})})
    return (tilings.geometry(*sized, tma=True, table=given).tiling for given in (None, made))


def test_an_entry_changes_what_it_says() -> None:
    chosen, found = forward({"tile_kv": 112, "ping_pong": False})
    assert found == replace(chosen, tile_kv=112, ping_pong=False) != chosen
    chosen, found = forward({"stages": 2, "blocks_each": 1}, card="sm_80")
    assert found == replace(chosen, stages=2, blocks_each=1) != chosen


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"no_such_field": 3},
        {"tile_kv": 112, "no_such_field": 3},
        {"unit": 64},
        {"tile_kv": True},
        {"ping_pong": 1},
        {"stages_k": 9},  # more than the shared memory holds
        {"warp_rows": 32},  # of the other kernel
    ],
)
def test_an_entry_that_does_not_fit_changes_nothing(entry: dict[str, Any]) -> None:
    chosen, found = forward(entry)
    assert found == chosen
    assert entry == {} or entry_fault("prefill", KEY, entry, TARGET)


def test_blocks_must_fit_a_multiprocessor_together() -> None:
    chosen, found = forward({"blocks_each": 3}, card="sm_89")
    assert found == chosen


def test_another_key_is_another_problem() -> None:
    chosen, found = forward({"tile_kv": 112}, key="bfloat16/128/causal/plain/middle")
    assert found == chosen


def test_keys_of_lists_stay_within_units() -> None:
    pattern, sized = Pattern(64, 64), (TARGET, BF16, 1, 8192, 8, 8, 256, Scores())
    chosen = tilings.geometry(*sized, tma=True, pattern=pattern).tiling
    assert (chosen.unit, chosen.tile_kv) == (64, 64)
    for tile_kv, taken in ((96, False), (64, True)):
        entry = {"tile_kv": tile_kv, "ping_pong": not chosen.ping_pong}
        made = Tuned({"sparse": Section("", "", {"bfloat16/256/64x64/plain": entry})})
        found = tilings.geometry(*sized, tma=True, pattern=pattern, table=made).tiling
        assert (found != chosen) == taken


def test_of_decode_nothing_changes_but_the_depth_of_rings() -> None:
    fmt = KVFormat("bf16", 64)
    chosen = choose_decode(fmt, 4)
    key = tuned.decode_key(fmt, chosen)
    assert key == f"bf16/64/8 rows/4 warps/{chosen.blocks} blocks"
    for entry, taken in (
        ({"stages": 3}, True),
        ({"stages": 1}, False),
        ({"stages": 99}, False),
        ({"warps": 2}, False),
        ({"rows": 16}, False),
        ({"blocks": 1}, False),
        ({"stages": 3, "joiners": 1}, False),
    ):
        made = Tuned({"decode": Section("", "", {key: entry})})
        found = decode.as_measured(made, fmt, chosen, TARGET)
        assert found == (replace(chosen, **entry) if taken else chosen)
        assert (entry_fault("decode", key, entry, TARGET) == "") == taken


@pytest.mark.parametrize(
    "key",
    ["", "x", "bfloat16/100000/causal/plain/long", "nosuch/128/full/plain/long", "bfloat16/128/causal/plain/tall"],
)
def test_keys_of_other_versions_are_named(key: str) -> None:
    assert entry_fault("prefill", key, {"lazy": True}, TARGET) == "no problem of this version has this key"


def test_constants_are_those_of_the_table() -> None:
    made = Tuned({"decode": Section("", "", {}, {"launch_us": 5.0, "sprint": 2.0, "odd": 1.0})})
    assert made.cost_over(GPU_COST) == replace(GPU_COST, launch_us=5.0)
    assert made.cost_over(MMA_COST) == replace(MMA_COST, launch_us=5.0)
    assert made.weights == replace(Weights(), sprint=2.0)
    assert tune_findings._faults("decode", made.sections["decode"], TARGET) == [
        "decode odd is not used: no constant of this version"
    ]
