"""The peers that Tilewise is measured beside, and the bars set against them."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import torch
from bench_cases import CPU

from tilewise import api
from tilewise.bench import bars, measure, peers
from tilewise.bench.measure import OK, WRONG


def test_peers_on_the_cpu_are_absent_with_one_line():
    q = torch.randn(1, 8, 2, 16)
    runs, absent = peers.cuda_peers(q, q, q, causal=False)
    assert runs == {}
    assert all(name in absent for name in ("FlashAttention-2", "FlashAttention-3", "FlashInfer", "cpu"))
    assert "\n" not in absent


def test_peer_is_found_by_import_under_any_of_its_names(monkeypatch):
    assert peers.find("FlashAttention-3") == "not installed"
    module = types.ModuleType("fa3_fwd_interface")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    assert peers.find("FlashAttention-3") is module


def test_peer_that_does_not_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("import module_that_is_not_there\n")
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcuda.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "module_that_is_not_there" in peers.find("FlashAttention-2")
    assert "libcuda.so.1" in peers.find("FlashInfer")
    sys.modules.pop("flash_attn", None)
    sys.modules.pop("flashinfer", None)


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU, for the branches that only ask."""

    @property
    def device(self):
        return torch.device("cuda")


def test_importable_peers_are_called_and_others_named(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = lambda q, k, v, causal: (q + 1 if causal else q, None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    q = torch.randn(1, 8, 2, 16).as_subclass(OnCuda)
    runs, absent = peers.cuda_peers(q, q, q, causal=True)
    assert list(runs) == ["FlashAttention-2"]
    assert torch.equal(runs["FlashAttention-2"](None), q + 1)
    assert "FlashAttention-3 (not installed)" in absent
    assert "FlashInfer (not installed)" in absent


def test_window_and_lengths_are_asked_for_as_the_peers_have_them(monkeypatch):
    calls = []
    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func = lambda *args, **options: calls.append((args[3:], options)) or args[0]
    module.flash_attn_varlen_func = module.flash_attn_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    monkeypatch.setattr(peers, "starts_of", lambda lengths, device: list(lengths))
    q = torch.randn(1, 8, 2, 16).as_subclass(OnCuda)
    packed = torch.randn(7, 2, 16).as_subclass(OnCuda)
    peers.cuda_peers(q, q, q, causal=True, window=5)[0][peers.FA3](None)
    peers.cuda_peers(packed, packed, packed, causal=False, lengths=[3, 4])[0][peers.FA3](None)
    peers.cuda_peers(packed, packed, packed, causal=True, window=2, lengths=[3, 4])[0][peers.FA3](None)
    assert calls == [
        ((), {"causal": True, "window_size": (5, 0)}),
        (([3, 4], [3, 4], 4, 4), {"causal": False}),
        (([3, 4], [3, 4], 4, 4), {"causal": True, "window_size": (2, 0)}),
    ]


def test_starts_are_where_each_sequence_begins():
    starts = peers.starts_of([3, 1, 2], CPU)
    assert starts.tolist() == [0, 3, 4, 6]
    assert starts.dtype == torch.int32


def test_torch_carries_two_peers_on_a_card_and_chooses_itself_elsewhere(monkeypatch):
    chosen = []
    monkeypatch.setattr(peers, "sdpa_kernel", lambda backend: chosen.append(backend.name) or nullcontext())
    q = torch.randn(1, 8, 4, 16)
    assert peers.torch_backends(q, q, q, causal=True) == {}
    on_card, k = q.as_subclass(OnCuda), q[:, :, :2].as_subclass(OnCuda)
    runs = peers.torch_backends(on_card, k, k, causal=True)
    expected = peers.torch_sdpa(q, q[:, :, :2], q[:, :, :2], mask=None, causal=True)(None)
    assert list(runs) == [peers.CUDNN, peers.FA2]
    for run in runs.values():
        torch.testing.assert_close(run(None).as_subclass(torch.Tensor), expected)
    assert chosen == ["CUDNN_ATTENTION", "FLASH_ATTENTION"]


def test_padded_batch_has_zeros_behind_the_shorter_sequences():
    x = torch.arange(1.0, 7.0).view(6, 1, 1)
    assert peers.pad(x, [2, 1, 3]).flatten(1).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert peers.padded_sdpa(x, x, x, causal=True, lengths=[2, 1, 3])[0] == peers.SDPA_PADDED
    on_card = x.as_subclass(OnCuda)
    assert peers.padded_sdpa(on_card, on_card, on_card, causal=True, lengths=[2, 1, 3])[0] == peers.CUDNN_PADDED


def test_flashinfer_is_planned_once_and_run_packed(monkeypatch):
    """Its own layout is packed sequences with their starts; planning is not part of what is timed."""
    planned = []

    class Wrapper:
        def __init__(self, workspace, layout):
            assert layout == "NHD"

        def plan(self, starts_q, starts_k, *sizes, **options):
            planned.append((starts_q.tolist(), starts_k.tolist(), sizes, options))

        def run(self, q, k, v):
            assert (q.shape, k.shape) == ((2 * 3, 4, 16), (2 * 5, 2, 16))
            return q * 2

    monkeypatch.setattr(peers.torch, "empty", lambda *a, device, **o: torch.zeros(1))
    module = types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 16)
    run = peers._flashinfer(module, q, k, k, True, 0, None)
    for _ in range(3):
        assert torch.equal(run(None), q * 2)
    options = {"causal": True, "q_data_type": torch.float32}
    assert planned == [([0, 3, 6], [0, 5, 10], (4, 2, 16), options)]
    monkeypatch.setattr(Wrapper, "run", lambda self, q, k, v: q)
    packed = torch.randn(6, 4, 16)
    assert peers._flashinfer(module, packed, packed, packed, True, 7, [2, 4])(None).shape == packed.shape
    assert planned[1] == ([0, 2, 6], [0, 2, 6], (4, 4, 16), {**options, "window_left": 7})


def test_bars_are_the_ones_promised():
    dense, causal, prefix, sparse = bars.BARS
    assert (dense.at_least, causal.at_least, prefix.at_least, sparse.at_least) == (0.95, 0.95, 4.0, 5.0)
    assert not dense.point.causal
    assert causal.point.causal
    p = prefix.point
    assert (p.batch, p.prefix, p.seq, p.heads, p.kv_heads, p.hdim, p.dtype) == (16, 2048, 128, 32, 8, 128, "float32")
    assert (sparse.point.seq, sparse.point.sparsity, sparse.point.block) == (4096, 0.9, 64)
    assert (bars.PLAN_BAR.seqs, bars.PLAN_BAR.tokens, bars.PLAN_BAR.below) == (256, 65536, 0.020)
    assert all(bar.peer == peers.SDPA for bar in bars.BARS)


def test_bar_is_met_by_the_ratio_to_its_peer_alone():
    bar = bars.BARS[0]
    result = measure.Result("tilewise cpu", True, OK, ratio_to={peers.SDPA: 0.96, "faster peer": 0.5})
    assert bar.met_by(result) is True
    assert bar.met_by(replace(result, ratio_to={peers.SDPA: 0.94})) is False
    assert bar.met_by(replace(result, status=WRONG)) is False
    assert bar.met_by(replace(result, kernel=peers.SDPA)) is None


def test_planning_bar_plans_what_it_says(monkeypatch):
    plans = []
    real = api.plan_decode
    monkeypatch.setattr(bars.api, "plan_decode", lambda *a, **o: plans.append(real(*a, **o)))
    result = bars.run_plan_bar(loops=1)
    assert result.timing.loops == 1
    assert len(plans[0].seqs) == 256
    stored = bars.PLAN_BAR.prefix + sum(n - bars.PLAN_BAR.prefix for n in plans[0].lengths)
    assert stored == 65536
