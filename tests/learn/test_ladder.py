"""Every rung of the ladder passes one and the same suite: in the emulator without a GPU, and on a card."""

from __future__ import annotations

import re

import pytest
import torch
from oracle import assert_attention, poison, qkv

from tilewise import attention, compiler, reference
from tilewise.bench.rungs import int8_rows
from tilewise.compiler.spec import PACKAGE, locate
from tilewise.learn import ladder
from tilewise.learn.ladder import RUNGS, Rung

BY_NAME = {rung.name: rung for rung in RUNGS}
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a")
NAMES = [rung.name for rung in RUNGS]
# (seqlen_q, seqlen_k, causal): lengths around every tile size, rows that see nothing, ragged ends
SHAPES = [(1, 1, False), (63, 65, True), (65, 63, True), (129, 127, True), (33, 200, False), (70, 10, True)]


def assert_right(rung: Rung, q, k, v, *, device="cpu", **options) -> None:
    causal = options.get("causal", False)
    o, lse, _ = ladder.run(rung, q.to(device), k.to(device), v.to(device), **options)
    dtype = q.dtype
    if not rung.exact:  # exact attention over rows rounded to int8
        q, k, v = (int8_rows(x) for x in (q, k, v))
    exact, honest = (reference.attention(q, k, v, causal=causal, dtype=d) for d in (torch.float64, dtype))
    o, lse = o.cpu(), lse.cpu()
    for name, got, want, base in (("o", o, exact[0], honest[0]), ("lse", lse, exact[1], honest[1])):
        verdict = reference.judge(got, want, base, lse=exact[1] if name == "o" else None)
        assert verdict.ok, f"{name}: {verdict.reason}"


def dtype_of(rung: Rung) -> torch.dtype:
    return torch.bfloat16 if torch.bfloat16 in rung.dtypes else rung.dtypes[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_lengths(name, shape):
    rung, (nq, nk, causal) = BY_NAME[name], shape
    q, k, v = qkv(1, nq, nk, 2, 1, 64, dtype=dtype_of(rung), seed=nq)
    assert_right(rung, q, k, v, causal=causal, late=nq % 4 == 1, seed=nq)


@pytest.mark.parametrize("name", NAMES)
def test_head_dims_and_dtypes(name):
    rung = BY_NAME[name]
    for number, head_dim in enumerate(d for d in rung.head_dims if d <= 128):
        dtype = rung.dtypes[number % len(rung.dtypes)]
        q, k, v = qkv(1, 40, 50, 1, 1, head_dim, dtype=dtype)
        assert_right(rung, q, k, v, causal=True, late=False)


@pytest.mark.parametrize("name", NAMES)
def test_batch_heads_strides_and_order_of_threads(name):
    rung = BY_NAME[name]
    packed = torch.randn(2, 40, 3, 4, 64, generator=torch.Generator().manual_seed(3)).to(dtype_of(rung))
    q, k, v = packed[:, :, 0], packed[:, :, 1, :2], packed[:, :, 2, :2]
    for late, seed in ((True, 0), (False, 5)):
        assert_right(rung, q, k, v, late=late, seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_large_logits(name):
    rung = BY_NAME[name]
    q, k, v = qkv(1, 33, 140, 1, 1, 64, dtype=dtype_of(rung), size=60.0)
    assert_right(rung, q, k, v, causal=True)


@pytest.mark.parametrize("rung", RUNGS, ids=NAMES)
def test_what_a_rung_does_not_serve_is_said(rung):
    with pytest.raises(NotImplementedError, match=rung.name):
        rung.spec(torch.float64, 64)
    with pytest.raises(NotImplementedError, match="head_dim"):
        rung.spec(rung.dtypes[0], 65)


def counters(name: str, head_dim: int = 64):
    rung = BY_NAME[name]
    q, k, v = qkv(1, 128, 128, 1, 1, head_dim, dtype=dtype_of(rung))
    return ladder.run(rung, q, k, v, count=True)[2]


def test_the_counters_tell_the_story():
    """Coalescing from flash_naive to flash_2d; O in registers; tensor cores; ldmatrix without conflicts; TMA."""
    naive, two_d, rows = (counters(n) for n in ("flash_naive", "flash_2d", "scalar2d_row_tile"))
    assert naive.sectors_per_request > 16
    assert two_d.sectors_per_request < 6
    assert rows.global_bytes < two_d.global_bytes  # O is written once
    assert rows.tensor_flops == 0 < counters("warp_wmma").tensor_flops
    plain, swizzled = counters("mma"), counters("mma_swizzle")
    assert plain.matrix_conflicts > 0
    for name in ("mma_swizzle", "mma_qreg", "mma_qreg_vld", "mma_qreg_async"):
        assert counters(name).matrix_conflicts == 0
    assert swizzled.matrix_requests > counters("mma_qreg").matrix_requests  # Q is read once, not for every key tile
    assert counters("mma_qreg").global_requests > 4 * counters("mma_qreg_vld").global_requests  # 16 bytes a lane
    assert counters("mma_qreg_async").async_bytes > 0 == counters("mma_qreg_vld").async_bytes
    assert counters("hopper").matrix_requests == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_every_rung_compiles_without_spills(arch):
    rungs = [rung for rung in RUNGS if arch == "sm_90a" or not rung.hopper]
    specs = [rung.spec(dtype_of(rung), d) for rung in rungs for d in rung.head_dims]
    for row in compiler.resource_table(specs, [arch]):
        assert row.error is None, row.error
        assert row.spill_stores == row.spill_loads == 0, row
        assert not row.serialised, row
        assert row.shared_bytes <= row.shared_limit, row


def test_the_rung_apart_spills_where_it_says():
    for head_dim, spills in ((32, False), (64, False), (128, True)):
        report = compiler.compile(ladder.SPILLING.spec(torch.float32, head_dim), "sm_90a").report
        assert report.spills == spills
        assert (report.stack_bytes > 0) == spills
        assert_right(ladder.SPILLING, *qkv(1, 70, 33, 2, 1, head_dim), causal=True)


def test_inline_ptx_stands_in_one_place():
    sources = [*PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh")]
    assert len(sources) > 25
    with_asm = {p.name for p in sources if re.search(r"\basm\b", p.read_text())}
    assert with_asm == {
        "ptx.cuh",
        "ptx_copies.cuh",
        "ptx_counts.cuh",
        "ptx_halves.cuh",
        "ptx_hints.cuh",
        "ptx_wgmma.cuh",
    }


def test_the_emulator_mirrors_ptx_name_for_name():
    def names(*files):
        text = "".join(locate(file).read_text() for file in files)
        return set(re.findall(r"(?:TILE_DEVICE|EMU_INLINE|inline|>)\s+(?:static\s+)?[\w<>]+\s+(\w+)\(", text))

    more = ("copies", "halves", "hints", "wgmma")
    card = names("tile/ptx.cuh", *(f"tile/ptx_{name}.cuh" for name in more))
    assert len(card) > 30
    assert "copy_async_arrive" in card
    assert card - names("emulator/ptx.h") <= {"shared_base"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_runs_in_the_emulator(dtype):
    q, k, v = qkv(1, 40, 70, 2, 1, 64, dtype=dtype)
    sinks = torch.tensor([0.5, -1.0])
    got = attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend="emulator", scale=0.2)
    assert_attention(got, q, k, v, causal=True, sinks=sinks, scale=0.2)
    out = poison(q)
    assert attention(q, k, v, backend="emulator:scalar2d_row_tile", out=out) is out
    assert_attention((out, attention(q, k, v, return_lse=True)[1]), q, k, v)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"backend": "emulator:scalar2d_row_tile", "window": (3, 0)}, NotImplementedError, "window"),
        ({"backend": "emulator:scalar2d_row_tile", "softcap": 1.0}, NotImplementedError, "softcap"),
        ({"backend": "emulator:scalar2d_row_tile", "scale": -1.0}, NotImplementedError, "scale"),
        ({"backend": "emulator:no_such"}, ValueError, "no_such"),
        ({"backend": "emulator:hopper"}, NotImplementedError, "hopper is written for"),
    ],
)
def test_what_the_emulator_does_not_run_is_said(options, error, match):
    with pytest.raises(error, match=match):
        attention(*qkv(1, 4, 4, 1, 1, 40), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (300, 1000, True), (1000, 300, True)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_card(name, shape):
    rung, (nq, nk, causal) = BY_NAME[name], shape
    for dtype in rung.dtypes:
        for head_dim in rung.head_dims:
            q, k, v = qkv(2, nq, nk, 4, 2, head_dim, dtype=dtype, seed=nk)
            assert_right(rung, q, k, v, device="cuda", causal=causal)
