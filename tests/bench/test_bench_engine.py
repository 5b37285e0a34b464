"""`tilewise bench engine`: requests by chance, servers under load, and what is printed, written and drawn."""

from __future__ import annotations

import csv
import json
import math
import sys
import threading
import time
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import cli
from tilewise.bench import engine as bench
from tilewise.bench import engine_servers as servers
from tilewise.bench import engine_tables, engine_traffic
from tilewise.bench.engine_traffic import Lengths, Mix, Request

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MIX = Mix(2, 20, Lengths(4, 0.5, 2, 9), Lengths(4, 0.5, 2, 8))
REQUESTS = [Request([1, 2], 3, 0.0), Request([3], 2, 0.0), Request([4, 5, 6], 2, 0.05)]


@pytest.fixture
def tiny(monkeypatch):
    """A model of one narrow layer, few requests and short steps."""
    monkeypatch.setitem(bench.CONFIGS, "small", TINY)
    monkeypatch.setattr(bench, "STEPS", 6)
    small = bench.case

    def case(*args, **options):
        found = small(*args, **options)
        return replace(found, mix=MIX, step=bench.Still(4, 32, 8), churn=bench.Still(8, 32, 8, 2))

    monkeypatch.setattr(bench, "case", case)
    return case


@pytest.fixture
def model(tiny):
    return bench.make_model(tiny("cpu"))


# ---- requests -------------------------------------------------------------------------------------------------------


def test_requests_are_those_of_their_seed():
    mix = Mix(3, 50, Lengths(20, 0.7, 5, 80), Lengths(12, 0.5, 4, 40))
    drawn = engine_traffic.draw(mix, 2000, 10.0, 1000, seed=7)
    assert drawn == engine_traffic.draw(mix, 2000, 10.0, 1000, seed=7)
    other = engine_traffic.draw(mix, 2000, 10.0, 1000, seed=8)
    systems = {tuple(one.prompt[:50]) for one in drawn}
    assert len(systems) == 3
    assert systems == {tuple(one.prompt[:50]) for one in other}
    assert [one.prompt[50:] for one in drawn] != [one.prompt[50:] for one in other]
    lengths = np.array([len(one.prompt) - 50 for one in drawn])
    assert (lengths.min(), lengths.max()) == (5, 80)
    assert np.median(lengths) == pytest.approx(20, abs=1)
    assert np.std(np.log(lengths[(lengths > 5) & (lengths < 80)])) == pytest.approx(0.65, abs=0.1)
    # Poisson: gaps with a mean of a tenth of a second, and as much standard deviation.
    gaps = np.diff([one.arrival for one in drawn])
    assert drawn[0].arrival == 0
    assert gaps.min() >= 0
    assert (gaps.mean(), gaps.std()) == pytest.approx((0.1, 0.1), rel=0.1)
    assert {one.arrival for one in engine_traffic.draw(mix, 9, math.inf, 1000, seed=7)} == {0.0}


def test_lengths_in_words():
    assert str(MIX).startswith("2 system prompts of 20 tokens; questions median 4, sigma 0.5, 2 to 9; answers")
    drawn = [Request([0] * (20 + n), n, 0.0) for n in range(1, 102)]
    assert "101 requests: questions p5 6, p50 51, p95 96, 5151 tokens in all" in engine_traffic.spread(drawn, MIX)


# ---- servers --------------------------------------------------------------------------------------------------------


class Slow:
    """A server that gives every request under way a token each 10 ms."""

    name, kv_bytes = "slow", None

    def __init__(self):
        self.left, self.came = {}, []

    def submit(self, number, request):
        self.left[number] = request.new_tokens
        self.came.append((time.perf_counter(), number))

    def poll(self, wait):
        time.sleep(0.01)
        found = list(self.left)
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return found

    def close(self):
        pass


def test_drive_submits_in_time_and_notes_when_tokens_come():
    server = Slow()
    drive = servers.drive(server, REQUESTS)
    assert [len(stamps) for stamps in drive.stamps] == [3, 2, 2]
    (first, _), (second, _), (third, _) = server.came
    assert third - first >= 0.05 > second - first
    for request, stamps in zip(REQUESTS, drive.stamps, strict=True):
        assert stamps[0] >= request.arrival + 0.01
        assert all(b - a >= 0.0099 for a, b in pairwise(stamps))
    assert drive.seconds >= max(stamps[-1] for stamps in drive.stamps)


def test_a_server_that_takes_too_long_is_cut_off():
    late = [*REQUESTS, Request([1], 1000, 0.0)]
    with pytest.raises(servers.TooSlow, match=r"^0 s over, 3 of 4 requests done, \d+ tokens/s$"):
        servers.drive(Slow(), late, limit=0.3)


def test_our_engine_as_a_server(tiny, model):
    server = servers.Ours(bench._serving_engine(model, tiny("cpu")))
    drive = servers.drive(server, REQUESTS)
    assert [len(stamps) for stamps in drive.stamps] == [3, 2, 2]
    assert server.kv_bytes > 0
    assert not server.engine.busy
    with pytest.raises(ValueError, match="was never submitted or is forgotten"):  # it keeps no results
        server.engine.result(0)
    server.close()
    assert server.engine.cache.pool.free_pages == server.engine.cache.num_pages


def test_transformers_as_a_server(model):
    server = servers.Transformers(model, MIX.longest, 4)
    drive = servers.drive(server, REQUESTS)
    server.close()
    assert [len(stamps) for stamps in drive.stamps] == [3, 2, 2]
    assert all(sorted(stamps) == stamps for stamps in drive.stamps)


def test_transformers_is_stopped_while_it_has_much_to_do(tiny, model, monkeypatch):
    """Not after it has answered everything; and where it does not stop, the process ends without it."""
    monkeypatch.setattr(servers, "STOP", 5.0)
    before = set(threading.enumerate())
    server = servers.Transformers(model, 60, 4)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    for number in range(4000):
        server.submit(number, Request([1, 2], 50, 0.0))
    while not server.poll(0.1):
        pass
    server.close()
    assert not thread.is_alive()


class FakeEngine:
    """vLLM's as far as it is called: one token of each request a step, all tokens so far told."""

    def __init__(self, args):
        self.args, self.given = args, {}

    @classmethod
    def from_engine_args(cls, args):
        return cls(args)

    def add_request(self, name, prompt, params):
        assert prompt["prompt_token_ids"]
        self.given[name] = [0, params["max_tokens"]]

    def step(self):
        outputs = []
        for name, counts in list(self.given.items()):
            counts[0] += 1
            told = types.SimpleNamespace(token_ids=[0] * counts[0])
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[told]))
            if counts[0] == counts[1]:
                del self.given[name]
        return outputs


def test_vllm_as_a_server(model, monkeypatch):
    fake = types.SimpleNamespace(SamplingParams=dict, EngineArgs=dict, LLMEngine=FakeEngine)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    assert servers.find_peer(servers.VLLM) is servers.Vllm
    server = servers.Vllm(model, MIX.longest, 4)
    config = json.loads((Path(server._engine.args["model"]) / "config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["hidden_size"]) == (["LlamaForCausalLM"], 16)
    assert [len(stamps) for stamps in servers.drive(server, REQUESTS).stamps] == [3, 2, 2]
    server.close()


def test_sglang_as_a_server(model, monkeypatch):
    class Fake:
        def __init__(self, **options):
            assert options["load_format"] == "dummy"

        async def async_generate(self, input_ids, sampling_params, stream):
            async def chunks():
                for n in range(sampling_params["max_new_tokens"]):
                    yield {"meta_info": {"completion_tokens": n + 1}}

            if input_ids == [9]:
                raise ValueError("no nines")
            return chunks()

        def shutdown(self):
            pass

    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=Fake))
    server = servers.Sglang(model, MIX.longest, 4)
    assert [len(stamps) for stamps in servers.drive(server, REQUESTS).stamps] == [3, 2, 2]
    with pytest.raises(RuntimeError, match="SGLang failed: no nines"):
        servers.drive(server, [Request([9], 2, 0.0)])
    server.close()


def test_peers_that_are_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert servers.find_peer(servers.VLLM) == "not installed"
    assert servers.find_peer(servers.TRANSFORMERS) is servers.Transformers


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_a_batch_that_comes_and_goes_stays_full(tiny, model, monkeypatch):
    """In each step some are cancelled and as many join, and all rows get a token in the end."""
    seen = []
    real = bench.Engine.step

    def step(self):
        found = real(self)
        seen.append(len(found))
        return found

    monkeypatch.setattr(bench.Engine, "step", step)
    figure = bench.churn(model, tiny("cpu"))
    assert 0 < figure.value < 2
    assert seen[-4:] == [8] * 4
    assert "tokens/s of" in figure.detail
    assert figure.met is None  # no bar on a CPU


def test_figures_know_their_bars():
    most = bench.Figure("a", 2.0, "ms", "", 2.0)
    assert most.met
    assert not replace(most, value=2.1).met
    assert replace(most, value=2.1, most=False).met
    assert replace(most, bar=None).met is None


def test_the_command(tiny, tmp_path, capsys):
    words = ["bench", "engine", "--device", "cpu", "--requests", "4", "--loads", "0.5,0.7"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith((tmp_path / "engine-small-cpu.txt").read_text())
    for part in ("decode step 4 × (32 + 8)", "2 leave and join in each step", "arrivals at 70% of capacity", str(MIX)):
        assert part in shown
    rows = list(csv.DictReader((tmp_path / "engine-small-cpu.csv").open()))
    loads = [row for row in rows if row["row"] == "load"]
    assert [(row["server"], row["load"]) for row in loads] == [
        (name, load) for name in ("tilewise.Engine", "transformers") for load in ("", "0.5", "0.7")
    ]
    ours = loads[:3]
    assert float(ours[1]["offered_per_s"]) == pytest.approx(0.5 * float(ours[0]["requests_per_s"]), rel=0.01)
    assert all(float(row["first_token_p50_ms"]) <= float(row["first_token_p99_ms"]) for row in loads)
    assert all(int(row["kv_bytes"]) > 0 and float(row["host_ms_per_step"]) > 0 for row in ours)
    assert (tmp_path / "engine-small-cpu.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "engine-small-cpu.svg").read_text()


def test_the_command_in_parts(tiny, capsys):
    assert cli.main(["bench", "engine", "--device", "cpu", "--only", "step", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["row"], row["unit"], row["bar"]) == ("decode step 4 × (32 + 8)", "ms", None)


def test_several_parts_in_their_order():
    assert bench.case("cpu", only="load,step").parts == ("step", "load")
    assert bench.case("cpu", only=" churn").parts == ("churn",)
    assert bench.case("cpu").parts == bench.PARTS


def test_a_peer_that_fails_is_a_note(tiny, model, monkeypatch):
    def broken(*_):
        raise OSError("no such thing\nat all")

    monkeypatch.setitem(servers.PEERS, "odd", ("sys", broken))
    problem = tiny("cpu", requests=2, loads=[0.5])
    found = bench.under_load(model, bench.Outcome(problem, [], [], {}, ""), lambda _: None, ["odd"])
    assert found.missing == {"odd": "OSError: no such thing"}
    assert [one.share for one in found.loads] == [None, 0.5]
    assert "odd: OSError: no such thing" in engine_tables.text(found)
    assert not list(engine_tables.engine_plots.draw(found, None))  # one load is no line


def test_a_peer_that_is_cut_off_is_a_note(tiny, model, monkeypatch):
    monkeypatch.setitem(servers.PEERS, "odd", ("sys", lambda *_: Slow()))
    problem = replace(tiny("cpu", requests=2, loads=[0.5]), peer_seconds=0.001)
    found = bench.under_load(model, bench.Outcome(problem, [], [], {}, ""), lambda _: None, ["odd"])
    assert found.missing["odd"].startswith("TooSlow: 0 s over, 0 of 2 requests done")


def test_refusals(capsys):
    for words, said in (
        (["--config", "9b"], "config must be one of small, 8b, got '9b'"),
        (["--loads", "0.5,3"], "loads must be above 0 and below 1.5, got 0.5, 3.0"),
        (["--loads", "much"], "could not convert string to float: 'much'"),
        (["--only", "prefill"], "only must be in one of step, churn, load, got 'prefill'"),
        (["--only", "step,prefill"], "only must be in one of step, churn, load, got 'prefill'"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
    ):
        assert cli.main(["bench", "engine", *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert torch.device(bench.case("cpu").device).type == "cpu"
