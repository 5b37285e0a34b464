"""The text: it holds no values, compiles for a card, lies as the arguments do, and never reads outside of a tensor."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from function_cases import SIZES, grid, probe_spec, probed, well_known

from tilewise import emulator, functions
from tilewise.compiler import nvrtc
from tilewise.compiler.spec import KernelSpec, headers
from tilewise.functions.layout import ELEMENTS, Divisor

INDICES = grid().unbind(1)


def text(mask=None, score=None, sizes=SIZES) -> str:
    return functions.of(mask, score).text(sizes)


def test_well_known_functions_compile_for_a_card(tmp_path, monkeypatch):
    """In one kernel, by NVRTC for Hopper: no spills, nothing to warn of."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    spec = probe_spec([functions.of(mask, score).text(SIZES) for mask, score in well_known().values()])
    report = nvrtc.compile(spec, "sm_90a").report
    assert report.spill_stores == report.spill_loads == 0
    assert not [w for w in report.warnings if "probe" in w or "functions.cuh" in w or "intervals.cuh" in w], (
        report.warnings
    )


def test_every_operation_compiles_for_a_card(tmp_path, monkeypatch):
    from test_operations import FLOATING, INTEGER, NEARLY, TRUTH, function_of

    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    numbers = [" + ".join(f"({source})" for source in sources) for sources in (INTEGER, FLOATING, NEARLY)]
    truth = " ^ ".join(f"({source})" for source in TRUTH)
    made = [function_of(f"{n} < 7") for n in numbers] + [function_of(truth)] + [function_of(n, True) for n in numbers]
    nvrtc.compile(probe_spec([f.text((1, 1, 22, 22)) for f in made]), "sm_90a")


def test_values_are_not_in_the_text():
    """Other numbers and other tensors of the same kind: the same text, and so no compilation."""

    def made(window: int, cap: float, ids: torch.Tensor):
        def mask(b, h, q, k):
            return (q - k < window) & (ids[q] == ids[k]) & (q // window <= k // 7)

        def score(s, b, h, q, k):
            return cap * torch.tanh(s / cap) + ids[h] * 0.3

        return functions.of(mask, score)

    one, other = made(12, 30.0, torch.arange(64)), made(345, 7.25, torch.arange(640)[64:320])
    assert one.text(SIZES) == other.text(SIZES) == other.text((7, 3, 50, 60))
    assert not re.search(r"\b(12|345|30|7\.25|0\.3)", one.text(SIZES))
    assert bytes(one.arguments()) != bytes(other.arguments())


def test_equal_numbers_are_parameters_of_their_own():
    """Whether two numbers happen to be equal must not change the text."""

    def made(x: int, y: int):
        return functions.of(lambda b, h, q, k: (q - x < k) | (q + y > k), None)

    assert made(5, 5).text(SIZES) == made(5, 6).text(SIZES)


def test_tiny_numbers_are_literal():
    assert "n0" not in text(None, lambda s, b, h, q, k: s * 2.0 + 0.5 * (q - 1) - 1)
    assert "INFINITY" in text(None, lambda s, b, h, q, k: torch.where(k <= q, s, float("-inf")))


def test_scores_cost_what_built_in_ones_do():
    """Small integers as floats, and what is the same for a tile multiplied once."""
    slopes, cap = torch.rand(3), 30.0
    alibi = text(None, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
    assert "fabsf((fq - fk))" in alibi
    assert "int v" not in alibi
    softcap = text(None, lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    assert re.search(r"v0 = scale \* r1 \* \(2.0f \* kLog2e\);\n.*v1 = v0 \* s;\n.*warp::tanh_from_log2\(v1\)", softcap)
    assert " / " not in softcap
    grown = text(None, lambda s, b, h, q, k: s + (q - k) * slopes[h] * 0.7 * slopes[b], (3, 3, 2**20, 2**20))
    assert re.search(r"v\d+ \* n0 \* v\d+;", grown)
    long = text(None, lambda s, b, h, q, k: s - slopes[h] * (q * k), (3, 3, 2**20, 2**20))
    assert "fq * fk" not in long  # past 2^24 floats are no integers


def test_comparisons_see_no_fused_products():
    plain = text(lambda b, h, q, k: q * 0.3 + 1.0 < k / 7)
    assert "ptx::multiply(fq, n0)" in plain
    assert "/ n1" in plain


def test_lookups_are_clamped_unless_they_stay_inside():
    table, nested = torch.arange(40), torch.arange(64)
    assert "within" not in text(lambda b, h, q, k: table[q] < 3)
    assert "within(k, t0_size0)" in text(lambda b, h, q, k: table[k] < 3)
    assert "within" in text(lambda b, h, q, k: table[q] < 3, sizes=(2, 3, 41, 56))
    assert text(lambda b, h, q, k: nested[table[q]] < 3).count("within") == 1  # whatever the inner one holds
    assert "within" not in text(lambda b, h, q, k: table[(q - k).clamp(0, 39)] < 3)
    assert "within" in text(lambda b, h, q, k: table[(k - q).clamp(0, 40)] < 3)


def test_lookups_past_the_ends():
    """Clamped in kernels and by torch alike; the emulator would tell a read outside."""
    table = torch.randn(3, 5, 7)
    masks = [
        lambda b, h, q, k: table[b - 1, q - k, k] > 0,
        lambda b, h, q, k: table[h + 1, q * 100000000, k - 30] > 0,
        lambda b, h, q, k: table[0][(table[b, h, k] * 9).int()][q] > 0,
        lambda b, h, q, k: table[-1, h, -2] > 0,
    ]
    made = [functions.of(mask, None) for mask in masks]
    found = probed(made, grid(), torch.zeros(len(grid())), torch.zeros(0, 4, 2))
    b, h, q, k = (x.long() for x in INDICES)
    product = (q * 100000000).int().long()  # wraps
    inner = (table[b, h, k.clamp(0, 6)] * 9).int().long()
    expected = [
        table[(b - 1).clamp(0, 2), (q - k).clamp(0, 4), k.clamp(0, 6)] > 0,
        table[(h + 1).clamp(0, 2), product.clamp(0, 4), (k - 30).clamp(0, 6)] > 0,
        table[0, inner.clamp(0, 4), q.clamp(0, 6)] > 0,
        table[2, h, 5] > 0,
    ]
    for n, function in enumerate(made):
        assert torch.equal(function.seen(*INDICES), expected[n])
        assert torch.equal(found.mask[n], expected[n])


def test_lookups_along_rows_and_keys():
    """Indices that move with q and k, which kernels give as sums of what a lane shares and a constant."""
    values = torch.randn(200)
    toeplitz = values.as_strided((56, 56), (1, 1))
    forms = [
        lambda s, b, h, q, k: s + values[q + k],
        lambda s, b, h, q, k: s + values[h + (k - q) + 99],
        lambda s, b, h, q, k: s + values[(q - k) + k + 60],
        lambda s, b, h, q, k: s + values[(q - q) + k + 40],
        lambda s, b, h, q, k: s + values[k + k] + values[3 - k + 60],
        lambda s, b, h, q, k: s + toeplitz[q, k] + toeplitz[k, k],
    ]
    made = [functions.of(None, form) for form in forms]
    assert all("dk" in f.text(SIZES) and "within" not in f.text(SIZES) for f in made)
    scores = torch.zeros(len(grid()))
    found = probed(made, grid(), scores, torch.zeros(0, 4, 2))
    for n, (function, form) in enumerate(zip(made, forms, strict=True)):
        expected = form(scores, *(x.long() for x in INDICES))
        assert torch.equal(function.scored(scores, *INDICES), expected), n
        assert torch.equal(found.score[n], expected), n


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_captured_dtypes_and_strides(dtype):
    """Dense, transposed, with gaps, expanded, of several dimensions, none."""
    draw = torch.Generator().manual_seed(1)
    base = torch.randint(-100 if dtype.is_signed else 0, 100, (56, 3, 80), generator=draw)
    base = (base > 0) if dtype == torch.bool else base.to(dtype)
    tables = [base, base.permute(1, 2, 0), base[::2, :, 3::5], base[:, :1].expand(56, 3, 80), base.flip(0)[..., 5:]]
    flat, single = base[:, 0, 0], base[4:5, 1, 2].expand(9)
    forms = [lambda s, b, h, q, k, t=t: s + t[k, h, q] for t in tables]
    forms += [lambda s, b, h, q, k: s + flat[k], lambda s, b, h, q, k: s + single[h] + base[3][h][k]]
    made = [functions.of(None, form) for form in forms]
    scores = torch.zeros(len(grid()))
    found = probed(made, grid(), scores, torch.zeros(0, 4, 2))
    _, h, q, k = (x.long() for x in INDICES)
    for n, t in enumerate(tables):
        expected = t[k.clamp(max=t.shape[0] - 1), h.clamp(max=t.shape[1] - 1), q.clamp(max=t.shape[2] - 1)].float()
        assert torch.equal(made[n].scored(scores, *INDICES), expected)
        assert torch.equal(found.score[n], expected)
    assert torch.equal(found.score[-2], flat[k].float())
    assert torch.equal(found.score[-1], single[h].float() + base[3][h, k].float())


def test_a_tensor_of_more_than_two_gigabytes():
    """Offsets then take 64 bits. Only the entries that are read are touched."""
    rows = torch.empty(2**31 // 64 + 40, 64, dtype=torch.uint8)
    first = 2**31 // 64
    rows[first:] = torch.randint(0, 255, (40, 64), dtype=torch.uint8)
    function = functions.of(lambda b, h, q, k: rows[q + first, k] < 99, None)
    assert "int64_t t0_stride0" in function.text(SIZES)
    found = probed([function], grid(), torch.zeros(len(grid())), torch.zeros(0, 4, 2))
    expected = rows[INDICES[2].long() + first, INDICES[3].long()] < 99
    assert torch.equal(function.seen(*INDICES), expected)
    assert torch.equal(found.mask[0], expected)


def test_arguments_lie_as_the_structure_does(tmp_path):
    """Sizes and every offset, with fields of all kinds."""
    wide, flags = torch.empty(2**31 + 64, dtype=torch.uint8), torch.ones(3, 4, dtype=torch.bool)
    tables = [torch.randn(4, 4, 4).to(dtype) for dtype in (torch.float16, torch.float64, torch.int16)]

    def mask(b, h, q, k):
        return flags[h, k] & (q // 7 < 5) & (tables[2][b, h, q] > k % 12) & (wide[q + 9] > 4)

    def score(s, b, h, q, k):
        return s / 3.0 + 7.5 * tables[0][b, h, k] + tables[1][b, h, k]

    function = functions.of(mask, score)
    arguments = function.arguments()
    names = [name for name, _ in arguments._fields_]
    assert {name[0] for name in names} == set("tndr")
    expressions = [f"offsetof(UserFunction, {name})" for name in names]
    expressions += [f"sizeof(UserFunction::{name})" for name in names] + ["sizeof(UserFunction)", "sizeof(Divisor)"]
    stores = "\n".join(f"    Global<int>{{out}}[{n}] = int({x});" for n, x in enumerate(expressions))
    (tmp_path / "facts.cu").write_text(
        f'#include <cstddef>\nextern "C" __global__ void facts(int* out) {{\n{stores}\n}}\n'
    )
    spec = KernelSpec("facts", str(tmp_path / "facts.cu"), "facts", (), 1, 0, text=function.text(SIZES))
    out = torch.full((len(expressions),), -1, dtype=torch.int32)
    emulator.launch(spec, (1, 1, 1), [ctypes.c_void_p(out.data_ptr())], {"out": out})
    fields = [getattr(type(arguments), name) for name in names]
    expected = (
        [f.offset for f in fields] + [f.size for f in fields] + [ctypes.sizeof(arguments), ctypes.sizeof(Divisor)]
    )
    assert out.tolist() == expected


def test_flags_and_no_function(tmp_path):
    """kMask, kScore, kByKey, kByRow and kTouches tell what there is; NoFunction is the same without anything."""
    table, offsets = torch.arange(64), torch.arange(200)
    cases = {
        "kMask kByRow": (lambda b, h, q, k: table[q] < k, None),
        "kMask kByKey": (lambda b, h, q, k: table[k] < q, None),
        "kScore kByKey kByRow": (None, lambda s, b, h, q, k: s + table[q - k]),
        "kScore kByKey kByRow kTouches": (None, lambda s, b, h, q, k: s + offsets[q - k + 100]),
        "kMask kScore": (lambda b, h, q, k: k <= q, lambda s, b, h, q, k: s),
    }
    for flags, given in cases.items():
        assert " ".join(re.findall(r"constexpr bool (\w+) = true;", text(*given))) == flags
    nothing = "const Function f{}; const Interval any{0.0, 9.0}, seen = f.seen(any, any, any, any);"
    values = "Function::kMask + Function::kScore + Function::kByKey + f.mask(0, 0, 0, 9, 0.0f, 9.0f, 0, 0, 9, 0) * 10"
    values += " + (seen.low == 1.0) * 100 + (f.score(3.0f, 2.0f, 0, 0, 0, 0, 0.0f, 0.0f, 0, 0, 0, 0) == 6.0f) * 1000"
    body = f"{nothing}\n    Global<int>{{out}}[0] = {values};"
    unit = f'#include "common/functions.cuh"\nextern "C" __global__ void none(int* out) {{\n    {body}\n}}\n'
    (tmp_path / "none.cu").write_text(unit)
    spec = KernelSpec("none", str(tmp_path / "none.cu"), "none", (("Function", "NoFunction"),), 1, 0)
    out = torch.zeros(1, dtype=torch.int32)
    emulator.launch(spec, (1, 1, 1), [ctypes.c_void_p(out.data_ptr())], {"out": out})
    assert out.item() == 1110


def test_a_text_is_part_of_its_kernel():
    """It stands before the constants, which may name its types, and its headers are known."""
    spec = KernelSpec(
        "none", "common/args.cuh", "none", (("Function", "UserFunction"),), 1, 0, text=text(lambda b, h, q, k: k <= q)
    )
    unit = spec.translation_unit()
    assert (
        unit.index("types.cuh")
        < unit.index("struct UserFunction")
        < unit.index("using Function")
        < unit.index("args.cuh")
    )
    assert {"common/functions.cuh", "common/intervals.cuh", "tile/softmax.cuh"} <= set(headers(unit))
