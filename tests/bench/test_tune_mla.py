"""`tilewise tune mla`: the shapes beside the chosen one, in the emulator, and what a call is bound to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_tune import Machine

from tilewise import tuned
from tilewise.bench import tune, tune_mla
from tilewise.bench.tune_command import families_of
from tilewise.bench.tune_findings import entry_fault
from tilewise.bench.tune_mla import Case
from tilewise.bench.tune_prefill import Shape, parse
from tilewise.gpu import mla as kernel
from tilewise.gpu.decode import kept
from tilewise.gpu.mla_kernels import ROWS, MlaTiling, choose_tiling, fits

CPU, TARGET = torch.device("cpu"), "sm_90a"
SMALL = Case(Shape(2, 70, 40, 1, 192, vdim=128))
BOXES = "bf16/576x512/128 rows/boxes"


def bound(data: tune_mla._Data) -> MlaTiling:
    """The tiling of the plan's last kernel."""
    made = list(kept(data.plan).bound.values())[-1]
    assert isinstance(made, kernel.MlaDecode)
    return made.asked.tiling


# ---- what is measured --------------------------------------------------------------------------------------------
def test_the_defaults_are_a_key_each_and_candidates_fit() -> None:
    made = list(tune_mla.problems(tune_mla.defaults(torch.bfloat16), torch.bfloat16, CPU))
    keys = [problem.key for problem in made]
    assert len(set(keys)) == len(keys) == 10
    assert keys[0] == BOXES
    for problem in made:
        dims, boxes = (576, 512), problem.key.endswith("boxes")
        assert problem.others
        assert problem.tiling not in problem.others
        assert all(fits(*dims, other, boxes=boxes) for other in problem.others)
        wide = problem.tiling.rows == ROWS[-1]
        assert (max(other.together for other in problem.others) > 1) == wide
        few = problem.tiling.codes and not wide
        assert {other.raw for other in problem.others} == ({False, True} if few else {False})
        assert all(other.rows == problem.tiling.rows for other in problem.others)
        for other in problem.others:
            assert entry_fault("mla", problem.key, tune.entry_of("mla", other), TARGET) == ""
        kernels = {str(spec) for other in problem.others for spec in problem.specs(other)}
        assert len(kernels) == len(problem.others) * len(problem.specs(problem.tiling)), "no two are the same"
    assert {(o.ahead, o.together) for o in made[0].others} >= {(0, 1), (2, 2), (6, 1)}
    assert {o.fetches for o in made[1].others} == {0, 1}


def test_shapes_of_users_are_of_the_dtype_that_they_say() -> None:
    (made,) = tune_mla.problems(parse(["4,100,64,1,576:512"]), torch.float16, CPU)
    assert made.key == "fp16/576x512/64 rows/boxes"
    assert dict(made.specs(made.tiling)[0].constants)["Element"] == "half"
    assert {case.stored for case in tune_mla.defaults(torch.float16)} == {"fp16"}


def test_of_all_it_is_left_out_where_shapes_are_not_its_own() -> None:
    assert families_of("all", given=False, dtype="bfloat16") == tuned.FAMILIES
    assert "mla" not in families_of("all", given=True, dtype="bfloat16")
    assert "mla" not in families_of("all", given=False, dtype="float8")
    assert families_of("mla", given=True, dtype="float8") == ("mla",)


# ---- from timings to calls ---------------------------------------------------------------------------------------
def test_the_faster_shape_is_taken_and_looked_up() -> None:
    made = tune_mla.problem(SMALL, CPU)
    best = next(other for other in made.others if other.ahead == 0)
    made = replace(made, others=(best,))
    machine = Machine(lambda name, turn: 1e-3 if name == tune.CHOSEN else 0.5e-3)
    entry, records = tune.solve(made, machine, 1.0)
    assert [record["status"] for record in records] == ["ok", "ok"], "the other shape gives the same bits"
    assert entry == tune.entry_of("mla", best)
    assert "rows" not in entry
    data = made.bind.__self__  # type: ignore[attr-defined]
    assert bound(data) == best
    with pytest.raises(RuntimeError, match="the table leads to"):
        data.bind(tuned.Tuned({}), made.specs(replace(best, ahead=3, looks=False))[0])


def test_codes_that_are_widened_are_taken_where_they_are_right() -> None:
    """They give other bits, so that the oracle has to say."""
    made = tune_mla.problem(Case(Shape(2, 70, 8, 1, 576, vdim=512), "fp8"), CPU)
    widened = next(other for other in made.others if not other.raw)
    made = replace(made, others=(widened,))
    machine = Machine(lambda name, turn: 1e-3 if name == tune.CHOSEN else 0.5e-3)
    entry, (_, record) = tune.solve(made, machine, 1.0)
    assert record["status"] == "ok"
    assert entry == tune.entry_of("mla", widened)
    data = made.bind.__self__  # type: ignore[attr-defined]
    chosen = data.bind(tuned.Tuned({}), made.specs(made.tiling)[0])
    other = data.bind(tune.holding("mla", made.key, entry), made.specs(widened)[0])
    assert data.same(chosen, other)
    wrong = other() * 1.02
    data.other_bits.append(lambda: wrong)
    assert not data.same(chosen, data.other_bits[-1])


def test_another_result_is_told() -> None:
    data = tune_mla._Data(SMALL, torch.bfloat16, CPU, raw=False)
    ones = torch.ones(4, dtype=torch.bfloat16)
    assert data.same(lambda: ones, lambda: ones.clone())
    assert not data.same(lambda: ones, lambda: ones + 2**-7)
    assert not data.same(lambda: ones, lambda: ones * torch.nan)


# ---- what a table may say ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"rows": 32}, "MlaTiling takes no rows from a table"),
        ({"looks": 1}, "looks must be bool, got 1"),
        ({"places": 40}, "no kernel has this shape"),
        ({"ahead": 10}, "no kernel has this shape"),
        ({"fetches": 5}, "no kernel has this shape"),
        ({"ahead": 2}, ""),
    ],
)
def test_entries(entry: dict[str, Any], said: str) -> None:
    assert entry_fault("mla", BOXES, entry, TARGET) == said
    table = tune.holding("mla", BOXES, entry)
    chosen = choose_tiling(576, 512, 128)
    found = table.prefer("mla", BOXES, chosen, lambda tiling: fits(576, 512, tiling))
    assert (found != chosen) == (said == "")


@pytest.mark.parametrize("key", ["", "bf16/576x512/64 rows", "bf16/576/64 rows/boxes", "bf16/576x512/64 rows/carts"])
def test_keys_of_other_versions_are_named(key: str) -> None:
    assert entry_fault("mla", key, {"looks": True}, TARGET) == "no problem of this version has this key"
