"""Tuning and compiling ahead on a card: what is measured there is looked up there, and gives right answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_attention, qkv
from tune_cases import tables

import tilewise
from tilewise import tuned
from tilewise.bench import tune_decode, tune_mla, tune_prefill
from tilewise.bench.tune import Card
from tilewise.bench.tune_decode import Bench, Model, Step
from tilewise.compiler import cache as store
from tilewise.compiler import nvrtc
from tilewise.gpu import calls, prefill
from tilewise.scores import Scores

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache without tables, and a process that has bound and looked up nothing."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_memory", {})

    def forget() -> None:
        tuned._of_card.cache_clear()
        calls.calls().clear()

    forget()
    yield forget
    forget()


def test_what_was_measured_is_looked_up_and_right(run: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = tune_prefill.candidates
    monkeypatch.setattr(tune_prefill, "candidates", lambda *given: candidates(*given)[:5])
    code, out, _ = run("tune", "prefill", "--shapes", "1,2048,4,4,128,causal", "--budget", "20")
    assert code == 0
    assert "1 of 1 problems measured" in out
    folder = tuned.folder()
    assert folder is not None
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    section = record["families"]["prefill"]
    timed = [t for t in section["timings"] if t["status"] == "ok"]
    assert len(timed) >= 2
    assert all(0 < t["p20_us"] <= t["median_us"] <= t["p80_us"] for t in timed)
    # Whatever was fastest: the entry of another one that was timed, in a new process.
    other = next(t["tiling"] for t in timed if t["tiling"])
    section["tilings"] = {section["timings"][0]["key"]: other}
    path.write_text(json.dumps(record))
    fresh()
    q, k, v = (x.cuda() for x in qkv(1, 2048, 2048, 4, 4, 128, dtype=torch.bfloat16))
    bound = prefill.Forward(q, k, v, torch.empty_like(q), Scores((None, 0)), tma=True).spec
    with tuned.trying(tuned.Tuned({})):
        chosen = prefill.Forward(q, k, v, torch.empty_like(q), Scores((None, 0)), tma=True).spec
    assert bound != chosen
    o, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    assert_attention((o.cpu(), lse.cpu()), q.cpu(), k.cpu(), v.cpu(), causal=True)


def test_shapes_of_mla_decode_are_measured(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = tune_mla.candidates
    monkeypatch.setattr(tune_mla, "candidates", lambda *given, **options: candidates(*given, **options)[4:8])
    code, out, _ = run("tune", "mla", "--shapes", "8,2048,128,1,576:512", "--budget", "20")
    assert code == 0
    assert "1 of 1 problems measured" in out
    folder = tuned.folder()
    assert folder is not None
    (path,) = folder.iterdir()
    timings = tuned.read(path).families["mla"].record["timings"]
    assert [timing["status"] for timing in timings] == ["ok"] * 5, "no shape changes a bit"


def test_steps_are_timed_and_make_constants() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, Model(), (*tune_decode.STEPS, *tune_decode.GRID))
    found, records = tune_decode.measure_constants(Card(device), bench, 10.0)
    assert len(records) == len({*tune_decode.STEPS, *tune_decode.GRID}) + 1
    assert all(record["median_us"] > 0 for record in records[:-1])
    # Constants of the cost model are kept if "auto" chooses no worse with them.
    assert ({"own_bytes_per_us", "launch_us"} <= set(found)) == records[-1]["taken"]
    assert records[-1]["with_table_us"] <= records[-1]["without_table_us"] or not records[-1]["taken"]


@pytest.mark.parametrize(
    "step",
    [Step(3, 700), Step(64, 300), Step(40, 100, 640), Step(40, 100, 640, share=True), Step(2, 40, 512, share=True)],
    ids=str,
)
def test_no_table_changes_a_bit(step: Step) -> None:
    bench = Bench(torch.device("cuda", 0), Model(), [step])
    with tuned.trying(tuned.Tuned({})):
        expected = bench.call(step)[0]()
    assert isinstance(expected, torch.Tensor)
    expected = expected.clone()
    for table in tables(4, head_dim=128):
        with tuned.trying(table):
            assert torch.equal(expected, bench.call(step)[0]())  # type: ignore[arg-type]


def test_after_warm_first_calls_compile_nothing(run: Any) -> None:
    code, _, _ = run("warm", "--shapes", "1,700,8,2,128,causal")
    assert code == 0
    nvrtc._memory.clear()
    built = store.built()
    q, k, v = (x.cuda() for x in qkv(1, 700, 700, 8, 2, 128, dtype=torch.bfloat16))
    tilewise.attention(q, k, v, causal=True)
    starts = torch.tensor([0, 700], dtype=torch.int32, device="cuda")
    tilewise.attention_varlen(q[0], k[0], v[0], starts, starts, causal=True)
    pages = tilewise.PagedKVCache(64, 16, 2, 128, kv_format="bf16", device="cuda")
    seqs = [pages.allocate() for _ in range(4)]
    slots = pages.extend(seqs, 70)
    pages.write(0, slots, k[0, :280], v[0, :280])
    plan = tilewise.plan_decode(pages, seqs, num_heads=8)
    tilewise.decode(q[0, :4, None], pages, 0, plan)
    torch.cuda.synchronize()
    assert store.built() == built
