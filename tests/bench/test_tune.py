"""`tilewise tune`: from tilings beside the chosen one to a table, and from the table to what a call is bound to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import assert_one_line_and_hint

from tilewise import arch, tuned
from tilewise.bench import smi, tune, tune_command, tune_decode, tune_mla, tune_prefill
from tilewise.bench.measure import Timing
from tilewise.bench.tune_prefill import Shape, parse
from tilewise.gpu import prefill
from tilewise.gpu.mma_tilings import MmaTiling
from tilewise.gpu.tilings import LONG_PAIR, Tiling
from tilewise.scores import Scores

BF16, CPU = torch.bfloat16, torch.device("cpu")
LONG = Shape(1, 8192, 2, 2, 128, causal=True)
PROBLEMS = tune_prefill.problems
KEY = "bfloat16/128/causal/plain/long"


class Machine:
    """A card whose kernels take what `seconds` says of their names, and which judges kernels by `bad`."""

    card, target = "A Card, 3 SM", "sm_90a"

    def __init__(
        self,
        seconds: Callable[[str, int], float] = lambda name, turn: 1e-3,
        bad: Callable[[Any], str] = lambda spec: "",
    ) -> None:
        self.seconds, self.bad = seconds, bad
        self.timed: list[list[str]] = []

    def faults(self, specs: Sequence[Any]) -> list[str]:
        return [self.bad(spec) for spec in specs]

    def times(self, calls: Mapping[str, Any], budget: float, *, replay: bool = False) -> dict[str, Timing]:
        self.timed.append(list(calls))
        medians = {name: self.seconds(name, len(self.timed)) for name in calls}
        return {name: Timing(s, 0.9 * s, 1.1 * s, 0.8 * s, 7) for name, s in medians.items()}

    def state(self) -> dict[str, Any]:
        return {"capability": "9.0", "driver": "1.2.3", "clocks": {}, "versions": {"tilewise": "0"}}


def problem(shape: Shape = LONG, dtype: torch.dtype = BF16) -> tune.Problem:
    """A problem over tensors without contents, whose results nobody compares."""
    (made,) = PROBLEMS([shape], dtype, CPU)

    def bind(table: tuned.Tuned, spec: Any) -> tune.Call:
        assert bound(shape, table, dtype) == spec
        return lambda: None

    return replace(made, bind=bind, same=lambda chosen, other: True)


def bound(shape: Shape, table: tuned.Tuned | None, dtype: torch.dtype = BF16) -> Any:
    """The kernel that a call of this shape is bound to where this is the table."""
    one = torch.empty(1, dtype=dtype)
    q, k = (one.expand(shape.batch, shape.seq, heads, shape.hdim) for heads in (shape.heads, shape.kv_heads))
    with tuned.trying(table):
        return prefill.Forward(q, k, k, q, Scores((None, 0 if shape.causal else None)), tma=True).spec


def constants(spec: Any) -> dict[str, Any]:
    return dict(spec.constants)


# ---- shapes ------------------------------------------------------------------------------------------------------
def test_shapes_are_read_one_by_one_or_together() -> None:
    assert parse(["1,2048,32,8,128"]) == [Shape(1, 2048, 32, 8, 128)]
    assert parse(["1,16,4,4,64;2,32,4,4,64,causal", "1,16,4,4,64"]) == [
        Shape(1, 16, 4, 4, 64),
        Shape(2, 32, 4, 4, 64, True),
    ]
    assert parse(["1,16,4,4,192:128,causal"]) == [Shape(1, 16, 4, 4, 192, True, vdim=128)]


@pytest.mark.parametrize(
    "text",
    [
        "1,2,3",
        "1,2,3,4,5,6",
        "a,2,3,4,5",
        "1,2,3,4,5,full",
        "1,,3,4,5",
        "1,2,3,4,5,paged,causal",
        "-1,2,3,4,5",
        "1,2,3,4,5:",
        "1,2,3,4,5:6:7",
    ],
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a shape must be B,N,Hq,Hkv,D"):
        parse([text])


def test_shapes_have_sizes_and_whole_groups() -> None:
    with pytest.raises(ValueError, match="N of '1,0,4,4,64' must be"):
        parse(["1,0,4,4,64"])
    with pytest.raises(ValueError, match="Hq must be a multiple of Hkv in '1,16,4,3,64'"):
        parse(["1,16,4,3,64"])


def test_pairs_of_head_dims_have_keys_and_tilings_of_their_own() -> None:
    pair, equal, wide = tune_prefill.problems(parse(["1,8192,2,2,192:128;1,8192,2,2,192;1,8192,2,2,512"]), BF16, CPU)
    assert [made.key.split("/")[1] for made in (pair, equal, wide)] == ["192x128", "192", "512"]
    assert LONG_PAIR in pair.others
    assert LONG_PAIR not in equal.others
    assert wide.others
    assert all(t.stages_k == t.parts == wide.tiling.parts == 4 and not t.lazy for t in wide.others)


def test_the_defaults_are_a_key_each() -> None:
    keys = [made.key for made in tune_prefill.problems(tune_prefill.defaults(), BF16, CPU)]
    assert len(set(keys)) == len(keys) == 27
    assert sum("/causal/loaded/" in key for key in keys) == 9
    sparse = [made.key for made in tune_prefill.sparse_problems([Shape(1, 512, 1, 1, 128)], BF16, CPU)]
    assert sparse == [f"bfloat16/128/{kind}/plain" for kind in ("128x128", "64x64", "mask")]


@pytest.mark.parametrize("text", ["2,48,2,1,64,causal,paged", "1,40,1,1,36"])
def test_pages_and_odd_rows_are_bound_as_calls_bind_them(text: str) -> None:
    """To a kernel that loads them so; the emulator gives the same result for another tiling."""
    (made,) = PROBLEMS(parse([text]), BF16, CPU)
    assert "/loaded/" in made.key
    made = replace(made, others=made.others[:1])
    entry, records = tune.solve(made, Machine(lambda name, turn: 1e-3 if name == tune.CHOSEN else 0.5e-3), 1.0)
    assert [record["status"] for record in records] == ["ok", "ok"]
    assert entry == tune.entry_of("prefill", made.others[0])


# ---- candidates --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("card", "kind"), [("sm_90a", Tiling), ("sm_80", MmaTiling), ("sm_89", MmaTiling)])
def test_candidates_fit_the_card_and_differ(card: str, kind: type) -> None:
    with arch.as_card(card):
        made = problem()
        assert type(made.tiling) is kind
        assert len(made.others) == len(set(made.others)) >= 8
        assert made.tiling not in made.others
        for other in made.others:
            assert made.specs(other)[0].shared_bytes <= arch.shared_block(card)
        changed = {name for other in made.others for name in tune.difference(made.tiling, other)}
    assert {"stages" if kind is MmaTiling else "stages_k", "q_registers", "lazy"} <= changed


def test_the_standard_softmax_is_not_made_lazy() -> None:
    kinds = tune_prefill.hopper_changes(problem().tiling, Scores(exact=True), BF16)
    assert not any("lazy" in change for kind in kinds for change in kind)


def test_one_warpgroup_takes_no_turns() -> None:
    _, small, _ = tune_prefill.sparse_problems([Shape(1, 512, 1, 1, 64)], BF16, CPU)
    assert small.tiling.tile_q == 64
    assert not any(other.ping_pong for other in small.others)


def test_lists_keep_their_units() -> None:
    for made in tune_prefill.sparse_problems([Shape(1, 512, 1, 1, 128)], BF16, CPU):
        assert made.tiling.unit
        assert all(t.unit == made.tiling.unit and t.tile_kv % t.unit == 0 for t in made.others)


# ---- solving -----------------------------------------------------------------------------------------------------
def test_the_fastest_is_taken_after_it_was_faster_twice() -> None:
    made = problem()
    best = tune.words(tune.difference(made.tiling, made.others[3]))
    machine = Machine(lambda name, turn: 0.9e-3 if name == best else 1e-3)
    entry, records = tune.solve(made, machine, 1.0)
    assert entry == tune.entry_of("prefill", made.others[3])
    assert set(entry) >= {"tile_q", "tile_kv", "stages_k", "lazy"}, "all of it: nothing is left to what is chosen"
    assert not {"unit", "operand"} & set(entry)
    assert machine.timed[1] == [best, tune.CHOSEN]
    assert len(records) == 1 + len(made.others)
    (taken,) = [record for record in records if record["taken"]]
    assert (taken["median_us"], taken["p20_us"], taken["p80_us"]) == (900.0, 810.0, 990.0)
    assert taken["tiling"] == tune.difference(made.tiling, made.others[3])
    assert {record["key"] for record in records} == {KEY}


@pytest.mark.parametrize("again", [1.0e-3, 0.995e-3])
def test_luck_does_not_count(again: float) -> None:
    """Faster in the first round only, or by less than a percent."""
    made = problem()
    lucky = tune.words(tune.difference(made.tiling, made.others[0]))

    def seconds(name: str, turn: int) -> float:
        return 1e-3 if name != lucky else 0.9e-3 if turn == 1 else again

    entry, records = tune.solve(made, Machine(seconds), 1.0)
    assert entry == {}
    assert [record["tiling"] for record in records if record["taken"]] == [{}]
    entry, _ = tune.solve(made, Machine(lambda name, turn: 0.995e-3 if name == lucky else 1e-3), 1.0)
    assert entry == {}


def test_what_spills_is_not_run() -> None:
    made = problem()
    machine = Machine(bad=lambda spec: "" if constants(spec)["kTileKv"] == 128 else "spills 8 bytes")
    _, records = tune.solve(made, machine, 1.0)
    spilling = [record for record in records if record["status"] == "spills 8 bytes"]
    assert spilling
    assert all("tile_kv" in record["tiling"] and "median_us" not in record for record in spilling)
    assert not any("tile_kv" in name for name in machine.timed[0])


def test_a_tiling_must_serve_grouped_heads_too() -> None:
    made = problem()
    best = tune.words(tune.difference(made.tiling, made.others[0]))
    packed = {spec for spec in made.specs(made.others[0]) if constants(spec)["kPack"] > 1}
    assert packed
    machine = Machine(
        lambda name, turn: 0.5e-3 if name == best else 1e-3, lambda spec: "spills" if spec in packed else ""
    )
    entry, records = tune.solve(made, machine, 1.0)
    assert entry == {}
    assert [r["status"] for r in records if r["tiling"] == tune.difference(made.tiling, made.others[0])] == [
        "spills in another kernel of this key"
    ]


def test_another_result_is_not_timed() -> None:
    made = replace(problem(), same=lambda chosen, other: False)
    machine = Machine()
    entry, records = tune.solve(made, machine, 1.0)
    assert entry == {}
    assert machine.timed == []
    assert {record["status"] for record in records[1:]} == {"another result"}


def test_results_are_compared_by_what_is_written() -> None:
    """A call that forgets elements leaves NaN, one that is off by more than rounding is another result."""
    data = tune_prefill._Data(Shape(1, 4, 1, 1, 64), BF16, CPU, Scores(), tune_prefill.NO_PATTERN, None, None)
    data.tensors = tuple(torch.empty(1, 4, 1, 64, dtype=BF16) for _ in range(4))
    o = data.tensors[-1]
    assert data.same(lambda: o.fill_(1.0), lambda: o.fill_(1.0 + 2**-7))
    assert not data.same(lambda: o.fill_(1.0), lambda: o.fill_(1.1))
    assert not data.same(lambda: o.fill_(1.0), lambda: o[:, :3].fill_(1.0))


# ---- from problems to calls --------------------------------------------------------------------------------------
def test_from_timings_to_the_kernel_of_a_call(tmp_path: Path) -> None:
    made = problem()
    best = made.others[5]
    name = tune.words(tune.difference(made.tiling, best))
    machine = Machine(lambda found, turn: 0.8e-3 if found == name else 1e-3)
    book, outcome = tune.Book(machine, tmp_path), tune.Outcome(1)
    tune.tune([made], machine, book, outcome, count=1, budget=10.0)
    assert (outcome.solved, outcome.taken, outcome.out_of_time) == (1, 1, False)
    held = tuned.held(machine.card, machine.target, tmp_path)
    assert bound(LONG, held) == made.specs(best)[0] != made.specs(made.tiling)[0]
    assert bound(LONG, None) == made.specs(made.tiling)[0]
    for other in (replace(LONG, causal=False), replace(LONG, seq=512), replace(LONG, hdim=64)):
        assert bound(other, held) == bound(other, None)
    assert bound(LONG, held, torch.float16) == bound(LONG, None, torch.float16)


def test_what_is_kept_when_time_runs_out(tmp_path: Path) -> None:
    machine = Machine()
    now = iter([0.0, 1.0, 11.0])
    problems = [problem(), problem(replace(LONG, seq=512))]
    book, outcome = tune.Book(machine, tmp_path), tune.Outcome(2)
    tune.tune(problems, machine, book, outcome, count=2, budget=10.0, clock=lambda: next(now))
    assert (outcome.solved, outcome.out_of_time) == (1, True)
    assert list(tuned.read(book.path).families["prefill"].tilings) == [KEY]
    lines = tune_command.summary(outcome, book.path, interrupted=False)
    assert lines[0].startswith("1 of 2 problems measured")
    assert "--budget" in lines[1]


# ---- the table ---------------------------------------------------------------------------------------------------
def test_a_table_says_where_its_figures_are_from(tmp_path: Path) -> None:
    machine = Machine()
    book = tune.Book(machine, tmp_path)
    book.add("prefill", tune.solve(problem(), machine, 1.0)[1], tilings={KEY: {}})
    assert book.path.name == "a-card-3-sm-sm_90a.json"
    record = json.loads(book.path.read_text())
    assert (record["format"], record["card"], record["target"]) == (1, machine.card, "sm_90a")
    section = record["families"]["prefill"]
    assert section["source"] == tuned.source("prefill")
    assert (section["driver"], section["capability"], section["versions"]) == ("1.2.3", "9.0", {"tilewise": "0"})
    assert {"median_us", "p20_us", "p80_us", "loops"} <= set(section["timings"][0])
    assert [path.name for path in tmp_path.iterdir()] == [book.path.name]


def test_what_was_measured_before_stays_but_for_the_same_keys(tmp_path: Path) -> None:
    machine = Machine()
    first = {"key": "a", "problem": "old"}, {"key": "b", "problem": "old"}
    tune.Book(machine, tmp_path).add("prefill", first, tilings={"a": {"lazy": True}, "b": {}})
    tune.Book(machine, tmp_path).add("decode", [], constants={"launch_us": 5.0})
    tune.Book(machine, tmp_path).add("prefill", [{"key": "b", "problem": "new"}], tilings={"b": {"tile_kv": 96}})
    table = tuned.read(tmp_path / tuned.file_name(machine.card, machine.target))
    assert table.families["prefill"].tilings == {"a": {"lazy": True}, "b": {"tile_kv": 96}}
    assert [t["problem"] for t in table.families["prefill"].record["timings"]] == ["old", "new"]
    assert table.families["decode"].constants == {"launch_us": 5.0}


def test_what_other_kernels_gave_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    tune.Book(machine, tmp_path).add("prefill", [], tilings={"a": {}})
    monkeypatch.setattr(tuned, "source", lambda family: "another")
    book = tune.Book(machine, tmp_path)
    assert book.record["families"] == {}
    book.add("prefill", [], tilings={"b": {}})
    assert list(tuned.read(book.path).families["prefill"].tilings) == ["b"]


def test_a_damaged_table_is_begun_anew(tmp_path: Path) -> None:
    machine = Machine()
    (tmp_path / tuned.file_name(machine.card, machine.target)).write_text("{")
    book = tune.Book(machine, tmp_path)
    book.add("sparse", [], tilings={"a": {}})
    assert list(tuned.read(book.path).families) == ["sparse"]


# ---- the command -------------------------------------------------------------------------------------------------
def test_there_is_nothing_to_tune_on_a_cpu(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run("tune")
    assert (code, out) == (1, "")
    assert_one_line_and_hint(err)
    assert "nothing to tune on a CPU" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("everything",), "'everything' is not one of prefill, decode, sparse, mla and all"),
        (("prefill", "--shapes", "1,2"), "a shape must be B,N,Hq,Hkv,D"),
        (("prefill", "--shapes", "1,16,1,1,600"), "D must be at most 576 for prefill, got 600"),
        (("prefill", "--shapes", "1,24,1,1,64,paged"), "N must be whole pages of 16 tokens with paged, got 24"),
        (("decode", "--shapes", "1,16,1,1,80"), "D must be one of 64, 96, 128, 192, 256 for decode, got 80"),
        (("mla", "--shapes", "1,16,8,1,576"), "D must be a multiple of 64 up to 576 and Dv one of 128 up to D for mla"),
        (("mla", "--shapes", "1,16,8,2,576:512"), "a shape of mla must be B,N,Hq,1,D:Dv, which is decoded from pages"),
        (("mla", "--dtype", "float32"), "--dtype must be bfloat16 or float16 for mla, got float32"),
        (("prefill", "--dtype", "int8"), "'int8' is not one of bfloat16"),
        (("--budget", "0"), "Invalid value for '--budget'"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = run("tune", *words)
    assert (code, out) == (2, "")
    assert_one_line_and_hint(err)
    assert said in err


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A card as far as the command knows one; the folder of its tables."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(arch, "card_of", lambda device: "sm_90a")
    monkeypatch.setattr(tune, "Card", lambda device: Machine())
    return tmp_path / "cache" / "tables"


def test_the_command_writes_the_table(run: Any, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_prefill, "problems", lambda shapes, dtype, device: map(problem, shapes))
    code, out, _ = run("tune", "prefill", "--shapes", "1,8192,2,2,128,causal;1,512,2,2,64", "--budget", "60")
    assert code == 0
    assert "2 of 2 problems measured" in out
    path = card / tuned.file_name(Machine.card, Machine.target)
    assert str(path) in out.replace("\n", "")
    assert set(tuned.read(path).families["prefill"].tilings) == {KEY, "bfloat16/64/full/plain/short"}


def test_an_interrupt_keeps_what_is_done(run: Any, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> Any:
        yield problem(shapes[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_prefill, "problems", problems)
    code, out, _ = run("tune", "prefill", "--shapes", "1,8192,2,2,128,causal;1,512,2,2,64")
    assert code == 130
    assert "1 of 2 problems measured" in out
    assert "interrupted: what is done is kept" in out
    path = card / tuned.file_name(Machine.card, Machine.target)
    assert list(tuned.read(path).families["prefill"].tilings) == [KEY]


def test_all_families_share_the_time(card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, shares = Machine(), []
    monkeypatch.setattr(tune_prefill, "problems", lambda shapes, dtype, device: map(problem, shapes))
    monkeypatch.setattr(tune_prefill, "sparse_problems", lambda shapes, dtype, device: [problem()] * 3 * len(shapes))
    monkeypatch.setattr(tune_decode, "problems", lambda shapes, device: map(problem, shapes))
    monkeypatch.setattr(tune_mla, "problems", lambda shapes, dtype, device: map(problem, shapes))
    monkeypatch.setattr(tune_decode, "Bench", lambda *given: None)
    monkeypatch.setattr(
        tune_decode,
        "measure_constants",
        lambda machine, bench, seconds: (shares.append(seconds), ({"launch_us": 5.0}, []))[1],
    )
    solve = tune.solve
    monkeypatch.setattr(tune, "solve", lambda p, m, seconds: (shares.append(seconds), solve(p, m, seconds))[1])
    begun: list[str] = []

    class Bar:
        total = begun.append
        next = begun.append

    book, outcome = tune.Book(machine, tmp_path), tune.Outcome(0)
    assert tune_command.FAMILIES == tuned.FAMILIES
    tune_command.run(tune_command.FAMILIES, [LONG], BF16, CPU, machine, book, outcome, 100.0, Bar())
    assert (outcome.asked, outcome.solved, outcome.out_of_time) == (7, 7, False)
    assert begun[0] == 7
    assert len(begun) == 1 + 7
    # Ten shares: one of prefill, four of decode's constants and one of its problem, three of sparse, of which the
    # later ones get what the earlier ones leave, here all of it, and one of mla.
    assert shares == pytest.approx([10, 40, 10, 10, 15, 30, 10], rel=0.1)
    assert tuned.read(book.path).families["decode"].constants == {"launch_us": 5.0}


def test_driver_and_clocks_are_asked_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "A Card, 580.1, 1980, 3201, [N/A], 3202, 700.00"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(smi, "machine", lambda device: "A Card")
    told = tune._told(torch.device("cuda", 1))
    assert told["driver"] == "580.1"
    clocks = {"clocks.sm": "1980", "clocks.mem": "3201", "clocks.max.mem": "3202", "power.limit": "700.00"}
    assert told["clocks"] == clocks  # the one that it does not know is left out
    assert "--id=5" in (tmp_path / "nvidia-smi.asked").read_text().split()
    script.write_text("#!/bin/sh\nexit 9\n")
    assert tune._told(torch.device("cuda", 0)) == {"driver": None, "clocks": {}}
