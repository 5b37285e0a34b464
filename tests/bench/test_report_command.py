"""`tilewise report` as people run it, on tiny problems: its rows, files, exit codes, Ctrl-C, and what it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
import types
from dataclasses import replace

import pytest
import torch
import typer
from cli_cases import assert_one_line_and_hint
from report_cases import Page, report

from tilewise import api, arch, cli
from tilewise.bench import commands, ladder_commands, measure, peers, rungs, serve, smi, tables, workloads
from tilewise.bench.report import gather, machine, model, page, plans
from tilewise.bench.report import rows as rows_module
from tilewise.bench.report.model import NOT_SERVED
from tilewise.bench.workloads import Point

CPU = torch.device("cpu")
DENSE = Point(seq=48, heads=2, kv_heads=2, hdim=16)
TINY = {
    "dense": (rows_module.LENGTH, DENSE),
    "longer": (rows_module.LENGTH, replace(DENSE, seq=64)),
    "prefix": (rows_module.SHARED, Point("prefix", batch=2, prefix=32, seq=16, heads=4, kv_heads=2, hdim=16)),
}


@pytest.fixture
def tiny(monkeypatch):
    """A report of three rows and no rungs."""

    def entries(device, quick):
        chosen = [rows_module._plain(*TINY[name][:1], name, TINY[name][1], 0.01) for name in TINY]
        return chosen[:2] if quick else chosen

    monkeypatch.setattr(rows_module, "entries", entries)
    monkeypatch.setattr(rungs, "count", lambda steps, shape, before: [])


def test_report_writes_a_page_and_its_json(run, tiny, tmp_path):
    code, out, _ = run("report", "--loops", "2", "-o", "mine.html")
    assert code == 0
    assert "3 rows, 5 of 5 kernels of Tilewise ran and are right: mine.html and mine.json" in out
    assert {path.name for path in tmp_path.iterdir()} == {"mine.html", "mine.json"}
    found = model.load(tmp_path / "mine.json")
    assert [row.name for row in found.rows] == list(TINY)
    assert not found.quick
    assert all(line.median_ms > 0 and line.loops == 2 and line.error is not None for _, line in found.lines)
    assert [line.kernel for line in found.rows[0].lines] == ["tilewise cpu", peers.SDPA]
    assert found.rows[0].ours.ratio_to.keys() == {peers.SDPA}
    assert found.machine["name"]
    assert found.versions["torch"] == torch.__version__
    assert set(found.peers) == {peers.SDPA, peers.CUDNN, "FlexAttention", *peers.CUDA_PEERS}
    assert len(found.pictures) == 3
    assert found.ceilings == [model.Ceiling("measured", "float32", 1e11, 1e10)]
    text = Page((tmp_path / "mine.html").read_text()).text
    assert all(name in text for name in TINY)
    assert "tilewise bench --seq 48 --heads 2 --hdim 16" in text


def test_quick_has_fewer_rows(run, tiny, tmp_path):
    assert run("report", "--quick", "--loops", "1")[0] == 0
    found = model.load(tmp_path / "report.json")
    assert found.quick
    assert [row.name for row in found.rows] == ["dense", "longer"]


def test_the_folder_of_the_report_is_made(run, tiny, tmp_path):
    code, _, err = run("report", "--loops", "1", "--only", "dense", "-o", "a/b/report.html")
    assert code == 0, err
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"report.html", "report.json"}


def test_only_some_rows(run, tiny, tmp_path):
    assert run("report", "--only", "LONG", "--loops", "1")[0] == 0
    found = model.load(tmp_path / "report.json")
    assert [row.name for row in found.rows] == ["longer"]
    assert found.ladder.rungs == []
    assert "Only the rows with 'LONG' in their names were asked for." in found.notes


def test_against_an_earlier_report(run, tiny, tmp_path):
    assert run("report", "--quick", "--loops", "1", "-o", "old.html")[0] == 0
    data = json.loads((tmp_path / "old.json").read_text())
    for row in data["rows"]:
        row["lines"][0] |= {"median_ms": 1e6, "p20_ms": 1e6, "p80_ms": 1e6}
    data["machine"]["name"] = "An older one"
    (tmp_path / "old.json").write_text(json.dumps(data))
    code, out, err = run("report", "--loops", "1", "--against", "old.json", "-o", "new.html")
    assert code == 0
    assert "2 better, 0 worse, 0 same, 3 new, 0 gone" in out
    assert "not the same as then: name: An older one before" in err
    text = Page((tmp_path / "new.html").read_text()).text
    assert "Against the earlier report" in text
    assert "name: An older one before" in text
    # Over itself: it is read before it is overwritten.
    code, out, _ = run("report", "--loops", "1", "--against", "new.json", "-o", "new.html", "--force")
    assert code == 0
    assert "0 new, 0 gone" in out


@pytest.mark.parametrize("where", ["measuring", "ladder"])
def test_ctrl_c_keeps_what_is_done(run, tiny, tmp_path, monkeypatch, where):
    def interrupted(*args):
        raise KeyboardInterrupt

    real = workloads.build
    if where == "ladder":
        monkeypatch.setattr(rungs, "count", interrupted)
    else:
        monkeypatch.setattr(rows_module, "build", lambda point: interrupted() if point.seq == 64 else real(point))
    code, _, err = run("report", "--loops", "1")
    assert code == 130
    found = model.load(tmp_path / "report.json")
    assert [row.name for row in found.rows] == (list(TINY) if where == "ladder" else ["dense"])
    left = (
        "1 of 4 parts were not measured: the ladder" if where == "ladder" else "3 of 4 parts were not measured: longer"
    )
    assert left in found.stopped
    assert left in " ".join(err.split())
    assert left in Page((tmp_path / "report.html").read_text()).text
    assert found.ladder.skipped == "stopped before it was reached"
    assert "Traceback" not in err


def test_a_wrong_kernel_is_in_the_report_and_fails(run, tiny, tmp_path, monkeypatch):
    real = api.attention
    monkeypatch.setattr(workloads.api, "attention", lambda *a, **o: real(*a, **o).mul_(1.01))
    code, _, err = run("report", "--loops", "1", "--only", "dense")
    assert code == 1
    assert "dense: tilewise cpu: WRONG, error" in err
    ours = model.load(tmp_path / "report.json").rows[0].ours
    assert (ours.status, ours.median_ms) == (measure.WRONG, None)
    assert "WRONG" in Page((tmp_path / "report.html").read_text()).text


def test_what_is_not_served_is_in_the_report_and_no_failure(run, tiny, tmp_path, monkeypatch):
    def refused(*args, **options):
        raise NotImplementedError("no kernel does this here; use another")

    monkeypatch.setattr(workloads.api, "attention", refused)
    code, out, _ = run("report", "--loops", "1", "--only", "dense")
    assert code == 0
    assert "1 not served here" in out
    ours = model.load(tmp_path / "report.json").rows[0].ours
    assert (ours.status, ours.reason) == (NOT_SERVED, "no kernel does this here; use another")
    assert "no kernel does this here; use another" in Page((tmp_path / "report.html").read_text()).text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--against", "missing.json"], 1, "missing.json"),
        (["--against", "text.json"], 1, "text.json is not a report"),
        (["--against", "other.json"], 1, "no JSON that `tilewise report` wrote"),
        (["-o", "text.json/report.html"], 1, "text.json"),
        (["-o", "folder.html"], 1, "folder.html"),
        (["-o", "there.html"], 1, "there.html exists: --force overwrites it"),
        (["-o", "half.html"], 1, "half.json exists"),
        (["-o", "report.json"], 2, "must end in .html"),
        (["--device", "tpu"], 2, "must be cpu or cuda, got 'tpu'"),
        (["--device", "cuda"], 2, "torch sees no GPU here"),
        (["--only", "nothing"], 2, "'nothing' is in none of: "),
        (["--loops", "0"], 2, "--loops"),
        (["--fast"], 2, "--fast"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(run, tmp_path, monkeypatch, words, code, said):
    (tmp_path / "text.json").write_text("what")
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "there.html").write_text("mine")
    (tmp_path / "half.json").write_text("mine")
    (tmp_path / "folder.html").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(gather, "gather", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    got, out, err = run("report", *words)
    assert got == code
    assert out == ""
    assert_one_line_and_hint(err)
    assert said in err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_busy_machine_is_told(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "busy_note", lambda: "others are running")
    run("report", "--loops", "1", "--only", "dense")
    assert "others are running" in Page((tmp_path / "report.html").read_text()).text


# ---- the rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_of_quick_are_among_all(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    all_rows, quick = (rows_module.entries(device, quick) for quick in (False, True))
    names = [entry.row.name for entry in all_rows]
    assert len(set(names)) == len(names)
    points = {entry.row.name: (entry.section, entry.row.point, entry.command) for entry in all_rows}
    assert all(points[e.row.name] == (e.section, e.row.point, e.command) for e in quick)
    assert 15 <= len(quick) < len(all_rows) / 2
    sections = list(dict.fromkeys(entry.section for entry in all_rows))
    assert sections == list(rows_module.ABOUT)
    assert set(sections) - {e.section for e in quick} <= {rows_module.FUNCTIONS}  # FlexAttention compiles for seconds
    assert {entry.row.point.device for entry in all_rows} == {device}
    for section, axis in ((rows_module.LENGTH, "seq"), (rows_module.BATCH, "batch"), (rows_module.DECODE, "batch")):
        assert len({getattr(e.row.point, axis) for e in quick if e.section == section}) >= 3  # a line of three points
    dtypes = {entry.row.point.dtype for entry in all_rows}
    assert dtypes == {"bfloat16", "float16", "float32", "float8"}


def test_commands_measure_the_same_points(monkeypatch):
    """A command of `bench` asks for the row's very point; one of a table or of the report names a single row."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []
    monkeypatch.setattr(commands, "show_point", lambda point, loops, json: asked.append(point))
    monkeypatch.setattr(commands, "show_bars", None)
    command = typer.main.get_command(cli.app)
    plain = others = 0
    for device in ("cpu", "cuda"):
        for entry in rows_module.entries(device, False):
            words = _words(entry.command)
            if "--only" not in words:
                plain += 1
                command.main(args=words, standalone_mode=False)
                assert asked[-1] == entry.row.point, entry.command
                continue
            others += 1
            name = words[words.index("--only") + 1]
            same = [row for row in entry.table.rows(device) if name.lower() in row.name.lower()]
            if words[0] == "report":
                same = [e.row for e in rows_module.entries(device, False) if name.lower() in e.row.name.lower()]
            assert [(row.name, row.point) for row in same] == [(entry.row.name, entry.row.point)], entry.command
            assert words[words.index("--device") + 1] == device
    assert plain > 60
    assert others > 20


def _words(command):
    first, *rest = shlex.split(command)
    assert first == "tilewise"
    return rest


def test_a_tree_is_measured_beside_its_peer():
    step = Point("decode", seq=8, heads=4, kv_heads=2, hdim=16, dtype="bfloat16", kv_format="bf16", page_size=8)
    entry = rows_module._tree(step, ((1, 16), (2, 8), (4, 8)))
    found = model.lines_of(entry.row.point, entry.measure(1))
    assert [line.status for line in found] == ["ok"] * len(found)
    assert peers.SDPA in [line.kernel for line in found]
    assert entry.row.name == "tree: 16, 2 × 8, 4 × 8"
    assert entry.table is serve


# ---- the machine ------------------------------------------------------------------------------------------------


def test_card_is_asked_by_nvidia_smi(monkeypatch):
    asked = []

    def answer(command, **options):
        asked.append(command)
        return types.SimpleNamespace(stdout="NVIDIA H200, 1755, 3201, 512.25, [N/A]\n")

    monkeypatch.setattr(smi.subprocess, "run", answer)
    monkeypatch.setattr(smi, "machine", lambda device: "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    card = torch.device("cuda", 1)
    assert machine.sample(card) == {"SM clock": 1755, "memory clock": 3201, "power": 512.25}
    assert "--id=GPU-7" in asked[0]
    monkeypatch.setattr(smi, "machine", lambda device: "another card")
    assert machine.sample(card) == {}

    def absent(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(smi.subprocess, "run", absent)
    assert machine.sample(card) == {}
    monkeypatch.setattr(smi.subprocess, "run", lambda *a, **o: (_ for _ in ()).throw(subprocess.TimeoutExpired("a", 1)))
    assert machine.sample(card) == {}


def test_a_card_in_words(monkeypatch):
    told = {"driver_version": "575.1", "clocks.max.sm": "1980", "power.limit": "700.00"}

    def answer(command, **options):
        names = next(word for word in command if word.startswith("--query-gpu=")).partition("=")[2].split(",")
        return types.SimpleNamespace(stdout=", ".join(told.get(name, "NVIDIA H200") for name in names))

    monkeypatch.setattr(smi.subprocess, "run", answer)
    for module in (machine, smi):
        monkeypatch.setattr(module, "machine", lambda device="cpu": "NVIDIA H200" if "cuda" in device else "A CPU")
    monkeypatch.setattr(arch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(arch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 141 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with arch.as_card("sm_80"):
        facts = machine.describe(torch.device("cuda", 0))
    assert "behaves as" not in machine.describe(torch.device("cuda", 0))
    assert (facts["name"], facts["compute capability"], facts["behaves as"]) == ("NVIDIA H200", "9.0", "sm_80")
    assert (facts["driver"], facts["top SM clock"], facts["power limit"]) == ("575.1", "1980 MHz", "700.00 W")
    assert (facts["memory"], facts["multiprocessors"], facts["host"]) == ("141 GiB", "132", "A CPU")
    known = machine.ceilings_of(torch.device("cuda", 0), ["bfloat16"])
    assert [(ceiling.name, ceiling.measured) for ceiling in known] == [("measured", True), ("H200's peaks", False)]


def test_peers_are_found_as_the_bench_finds_them(monkeypatch):
    found = {"FlashAttention-2": types.SimpleNamespace(__version__="2.8"), peers.FA3: types.SimpleNamespace()}
    monkeypatch.setattr(peers, "find", lambda name: found.get(name, "not installed"))
    on_card = machine.peer_versions(torch.device("cuda"))
    assert on_card["FlashAttention-2"] == "2.8"
    assert on_card[peers.FA3] == "version unknown"
    assert on_card[peers.FLASHINFER] == "not installed"
    assert machine.peer_versions(CPU)["FlashAttention-2"] == "2.8, not measured: it takes CUDA tensors"


# ---- plans and the ladder ---------------------------------------------------------------------------------------


def test_plans_cover_what_is_seen_and_nothing_else():
    causal, window, tree = plans.pictures(CPU, report().ceilings[0])
    n = causal.rows
    for picture, band in ((causal, n), (window, plans.WINDOW)):
        seen = torch.zeros(n, n, dtype=torch.bool)
        for key, row, keys, rows, share in picture.rectangles:
            assert 0 < share <= 1
            seen[int(row) : int(row + rows), int(key) : int(key + keys)] = True
        must = torch.ones(n, n, dtype=torch.bool).tril().triu(-band)
        assert seen[must].all()
        assert not seen[~torch.ones(n, n, dtype=torch.bool).tril(256)].any()  # no tile is far above the diagonal
    assert (tree.rows, tree.keys) == (6, 96 + 2 * 48 + 6 * 32)
    assert max(rectangle[3] for rectangle in tree.rectangles) == 6  # all rows meet the system prompt at once
    assert "this machine" in tree.text


def test_ladder_is_counted_without_a_card(monkeypatch):
    monkeypatch.setattr(ladder_commands, "EMULATED", {"batch": 1, "seq": 32, "heads": 1, "hdim": 64})
    found = gather.climb(CPU, True, None)
    assert found.counted
    assert [rung["rung"] for rung in found.rungs] == list(gather.QUICK_RUNGS)
    assert all(rung["status"] == "ok" and rung["global_bytes"] > 0 for rung in found.rungs)
    text = Page(gather_page(found)).text
    assert "Counted in the emulator" in text
    assert "hopper_ring bfloat16 64 ok" in text

    def none(*args):
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(rungs, "count", none)
    assert gather.climb(CPU, True, None).skipped == "no C++ compiler here"


def test_ladder_is_timed_on_a_card(monkeypatch):
    """The rows of a card, made by hand: the emulator's place is taken by its clock."""
    timing = measure.Timing(2e-3, 1.9e-3, 2.1e-3, 1.9e-3, 9)
    rows = [rungs.Row("mma", "an idea", "bfloat16", 128, error=1e-3, allowed=2e-3, timing=timing, tflops=123.0),
            rungs.Row(peers.FA2, "", "bfloat16", 128, timing=timing, tflops=150.0, peer=True)]  # fmt: skip
    monkeypatch.setattr(rungs, "measure", lambda steps, shape, device, loops, before: rows)
    found = gather.climb(torch.device("cuda"), False, None)
    assert (found.counted, found.command) == (False, "tilewise ladder")
    assert found.title == rungs.Shape(**ladder_commands.ON_CARD, dtype="bfloat16", causal=False).title
    text = Page(gather_page(found)).text
    assert "123 · 2 ms" in text
    assert "mma bfloat16 128 ok 1.0e-03 2.0e-03 2 1.9–2.1 123" in text


def gather_page(ladder):
    return page.render(report(ladder=ladder))
