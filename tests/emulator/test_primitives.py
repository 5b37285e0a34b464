"""Each primitive of tile/ptx.cuh in the emulator against its definition, and on a card against the emulator.

Bit for bit where hardware is exact (copies, swizzles, ldmatrix, integer mma); within rounding where it sums floats in
an order of its own. The emulator is only worth what the gpu half of this file shows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import Rotary, compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec

KERNELS = Path(__file__).parents[1] / "kernels"
PRIMITIVES = (
    *("ldmatrix", "ldmatrix_transposed", "mma_bf16", "mma_f16", "mma_tf32", "mma_s8", "shuffle", "vote"),
    *("copy_async", "exp2", "stmatrix", "dp4a", "convert", "mma_e4m3", "fp8", "stmatrix_transposed"),
)
# A card adds FP8 products up with some 14 bits.
INEXACT = {"mma_bf16": 1e-5, "mma_f16": 1e-5, "mma_tf32": 1e-5, "exp2": 3e-7, "mma_e4m3": 5e-3}


def inputs(name: str, seed: int = 0) -> torch.Tensor:
    """32 lanes × 16 words: eight words of operands in the primitive's own type, four floats, four of anything."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (32, 16), dtype=np.uint32)
    dtype = {"mma_bf16": torch.bfloat16, "mma_f16": torch.float16}.get(name)
    if dtype is not None:
        values = torch.from_numpy(rng.standard_normal((32, 16))).to(dtype)
        words[:, :8] = values.view(torch.int16).numpy().view(np.uint32)
    elif name == "mma_tf32":
        words[:, :8] = rng.standard_normal((32, 8)).astype(np.float32).view(np.uint32)
    elif name == "mma_e4m3":
        values = torch.from_numpy(rng.standard_normal((32, 32))).to(torch.float8_e4m3fn)
        words[:, :8] = values.view(torch.uint8).numpy().view(np.uint32)
    words[:, 8:12] = rng.standard_normal((32, 4)).astype(np.float32).view(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def spec_of(name: str) -> KernelSpec:
    constants = (("kPrimitive", PRIMITIVES.index(name)),)
    return KernelSpec(name, str(KERNELS / "primitives.cu"), "primitive", constants, 32, 4096)


def emulated(name: str, words: torch.Tensor, **options) -> np.ndarray:
    out = torch.full((32, 4), -1, dtype=torch.int32)
    args = [ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(out.data_ptr())]
    emulator.launch(spec_of(name), (1, 1, 1), args, {"in": words, "out": out}, **options)
    return out.numpy().view(np.uint32)


def matrix_values(words: np.ndarray) -> np.ndarray:
    """The 16-bit values at the scrambled rows that ldmatrix is pointed to: (4 matrices, 8 rows, 8 columns)."""
    rows = np.ascontiguousarray(words[:, :4]).view(np.uint16).reshape(32, 8)
    return rows[[lane * 5 % 32 for lane in range(32)]].reshape(4, 8, 8)


def test_ldmatrix_and_stmatrix():
    words = inputs("ldmatrix").numpy().view(np.uint32)
    matrices = matrix_values(words)
    for name, values in (("ldmatrix", matrices), ("ldmatrix_transposed", matrices.transpose(0, 2, 1))):
        got = emulated(name, inputs(name)).view(np.uint16).reshape(32, 4, 2)
        expected = np.stack(
            [[values[m, lane // 4, lane % 4 * 2 + h] for m in range(4) for h in range(2)] for lane in range(32)]
        )
        assert np.array_equal(got.reshape(32, 8), expected)
    for turned in ("", "_transposed"):
        stored = emulated(f"stmatrix{turned}", torch.from_numpy(words.view(np.int32)))
        again = torch.from_numpy(np.concatenate([stored, words[:, 4:]], 1).view(np.int32))
        loaded = emulated(f"ldmatrix{turned}", again)
        assert np.array_equal(loaded, words[:, :4])  # the one undoes the other


@pytest.mark.parametrize(("name", "dtype", "k"), [("mma_bf16", torch.bfloat16, 16), ("mma_f16", torch.float16, 16)])
def test_mma_16_bit(name, dtype, k):
    words = inputs(name).numpy().view(np.uint32)
    halves = torch.from_numpy(np.ascontiguousarray(words[:, :8]).view(np.int16)).view(dtype).double().numpy()
    a, b = np.zeros((16, k)), np.zeros((k, 8))
    for lane in range(32):
        for r in range(4):
            for h in range(2):
                a[lane // 4 + 8 * (r % 2), lane % 4 * 2 + h + 8 * (r // 2)] = halves[lane, 2 * r + h]
                if r < 2:
                    b[lane % 4 * 2 + h + 8 * r, lane // 4] = halves[lane, 8 + 2 * r + h]
    _check_d(name, words, a @ b)


def test_mma_tf32():
    words = inputs("mma_tf32").numpy().view(np.uint32)
    values = (words[:, :8] & ~np.uint32(0x1FFF)).view(np.float32).astype(float)
    a, b = np.zeros((16, 8)), np.zeros((8, 8))
    for lane in range(32):
        for r in range(4):
            a[lane // 4 + 8 * (r % 2), lane % 4 + 4 * (r // 2)] = values[lane, r]
            if r < 2:
                b[lane % 4 + 4 * r, lane // 4] = values[lane, 4 + r]
    _check_d("mma_tf32", words, a @ b)
    # A card cuts off what a float32 has no room for, where arithmetic would round: ±1 and 15/16 of a unit
    for one in (1.0, -1.0):
        words[:, :4] = np.float32(2.0**-12).view(np.uint32)
        words[:, 4:8] = np.float32(2.0**-15 * 1.875 * one).view(np.uint32)
        words[:, 8:12] = np.float32(one).view(np.uint32)
        assert (emulated("mma_tf32", torch.from_numpy(words.view(np.int32))).view(np.float32) == one).all()


def _check_d(name: str, words: np.ndarray, product: np.ndarray) -> None:
    got = emulated(name, torch.from_numpy(words.view(np.int32))).view(np.float32)
    start = np.ascontiguousarray(words[:, 8:12]).view(np.float32)
    for lane in range(32):
        for i in range(4):
            expected = start[lane, i] + product[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]
            assert got[lane, i] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_mma_s8_is_exact():
    words = inputs("mma_s8").numpy().view(np.uint32)
    values = np.ascontiguousarray(words[:, :8]).view(np.int8).reshape(32, 8, 4).astype(int)
    a, b = np.zeros((16, 32), int), np.zeros((32, 8), int)
    for lane in range(32):
        for r in range(4):
            a[lane // 4 + 8 * (r % 2), lane % 4 * 4 + 16 * (r // 2) :][:4] = values[lane, r]
            if r < 2:
                b[lane % 4 * 4 + 16 * r :, lane // 4][:4] = values[lane, 4 + r]
    got = emulated("mma_s8", inputs("mma_s8")).view(np.int32)
    for lane in range(32):
        for i in range(4):
            expected = int(words[lane, 8 + i] % 1000) + (a @ b)[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]
            assert got[lane, i] == expected


def test_mma_e4m3():
    words = inputs("mma_e4m3").numpy().view(np.uint32)
    codes = torch.from_numpy(np.ascontiguousarray(words[:, :8]).view(np.uint8)).view(torch.float8_e4m3fn)
    values = codes.float().numpy().reshape(32, 8, 4)
    a, b = np.zeros((16, 32), np.float32), np.zeros((32, 8), np.float32)
    for lane in range(32):
        for r in range(4):
            a[lane // 4 + 8 * (r % 2), lane % 4 * 4 + 16 * (r // 2) :][:4] = values[lane, r]
            if r < 2:
                b[lane % 4 * 4 + 16 * r :, lane // 4][:4] = values[lane, 4 + r]
    _check_d("mma_e4m3", words, a @ b)


def test_fp8_rounds_as_torch_does_and_saturates():
    words = inputs("fp8").numpy().view(np.uint32)
    floats = torch.from_numpy(np.ascontiguousarray(words[:, 8:12]).view(np.float32))
    got = emulated("fp8", inputs("fp8"))
    for column, factor in enumerate((1.0, 400.0, 0.01)):
        expected = (floats * factor).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(np.ascontiguousarray(got[:, column]).view(np.uint8).reshape(32, 4), expected)
    pair = np.ascontiguousarray(words[:, :2]).view(np.uint8).reshape(32, 8)
    which = np.stack([words[:, 2] >> (4 * i) & 7 for i in range(4)], 1)
    assert np.array_equal(
        np.ascontiguousarray(got[:, 3]).view(np.uint8).reshape(32, 4), np.take_along_axis(pair, which, 1)
    )


def test_lanes_and_votes():
    words = inputs("shuffle").numpy().view(np.uint32)
    lanes = np.arange(32)
    expected = [np.full(32, words[7, 0]), words[lanes ^ 5, 1], words[lanes ^ 16, 2], words[lanes // 3, 3]]
    assert np.array_equal(emulated("shuffle", inputs("shuffle")), np.stack(expected, 1))
    votes = sum(int(w & 1) << lane for lane, w in enumerate(words[:, 0]))
    got = emulated("vote", inputs("vote"))
    assert (got[:, 0] == votes).all()
    assert (got[:, 1:3] == [0, 1]).all()


@pytest.mark.parametrize("late", [False, True])
def test_copy_async_fills_the_rest_with_zero(late):
    words = inputs("copy_async").numpy().view(np.uint32)
    expected = words[:, :4].copy()
    for lane in range(32):
        expected[lane, lane % 5 :] = 0
    assert np.array_equal(emulated("copy_async", inputs("copy_async"), late=late), expected)


def test_scalars():
    words = inputs("dp4a").numpy().view(np.uint32)
    a, b = (
        np.ascontiguousarray(words[:, s]).view(np.int8).reshape(32, 4, 4).astype(int) for s in (slice(4), slice(4, 8))
    )
    assert np.array_equal(emulated("dp4a", inputs("dp4a")).view(np.int32), (a * b).sum(-1) + np.arange(32)[:, None])
    floats = np.ascontiguousarray(words[:, 8:12]).view(np.float32)
    assert np.allclose(emulated("exp2", inputs("exp2")).view(np.float32), np.exp2(floats * 40.0), rtol=1e-6)
    got = emulated("convert", inputs("convert"))
    for column, dtype in ((0, torch.bfloat16), (1, torch.float16)):
        pairs = torch.from_numpy(floats[:, :2].copy()).to(dtype).view(torch.int16).numpy()
        assert np.array_equal(np.ascontiguousarray(got[:, column]).view(np.int16).reshape(32, 2), pairs)
    assert (np.abs((got[:, 2]).view(np.float32) - floats[:, 0]) <= np.abs(floats[:, 0]) * 2.0**-11).all()


BOXES = [
    TensorMapSpec("bf16", (40, 24), (96,), (16, 8), 0),
    TensorMapSpec("bf16", (40, 24), (96,), (16, 8), 32),
    TensorMapSpec("bf16", (40, 24), (96,), (32, 16), 64),
    TensorMapSpec("bf16", (72, 24), (160,), (64, 16), 128),
    TensorMapSpec("bf16", (64, 20, 3), (384, 128), (64, 8, 1), 128),
    TensorMapSpec("fp32", (32, 9, 2, 2), (256, 128, 4096), (32, 4, 2, 1), 128),
]
PLACES = [(0, 0, 0, 0), (8, 3, 1, 1), (-8, -2, 0, 1), (56, 19, 2, 0)]


def box_case(spec: TensorMapSpec) -> tuple[KernelSpec, torch.Tensor]:
    span = max([spec.sizes[0] * spec.item_bytes, *(s * n for s, n in zip(spec.strides, spec.sizes[1:], strict=True))])
    memory = torch.from_numpy(np.random.default_rng(1).integers(0, 2**31, span // 4 + 256, dtype=np.int32))
    constants = (("kBoxBytes", spec.box_bytes), ("kRank", spec.rank), *WGMMA_DUMMY)
    source = str(KERNELS / "hopper_primitives.cu")
    return KernelSpec("tma_box", source, "tma_box", constants, 32, spec.box_bytes + 64), memory


WGMMA_DUMMY = (
    ("Element", "bf16"),
    ("kN", 8),
    ("kWords", 4),
    ("kFromRegisters", False),
    ("kAMnMajor", False),
    ("kBMnMajor", False),
    ("kAccumulate", False),
)


def emulated_box(spec: TensorMapSpec, place, late: bool) -> np.ndarray:
    kernel, memory = box_case(spec)
    out = torch.full((spec.box_bytes // 4,), -1, dtype=torch.int32)
    args = [emulator.tensor_map(spec, memory.data_ptr()), ctypes.c_void_p(out.data_ptr()), *map(ctypes.c_int, place)]
    emulator.launch(kernel, (1, 1, 1), args, {"memory": memory, "out": out}, late=late)
    return out.numpy()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spec", BOXES, ids=str)
def test_tma_boxes(spec, place, late):
    """Row by row from the definition: dense box, 16-byte chunks exchanged by the swizzle, zeros outside the tensor."""
    _, memory = box_case(spec)
    raw = memory.numpy().view(np.uint8)
    expected = np.zeros(spec.box_bytes, np.uint8)
    size = spec.item_bytes
    for n in range(spec.box_bytes // size):
        rest, at, inside = n, 0, True
        for d in range(spec.rank):
            i = place[d] + rest % spec.box[d]
            rest //= spec.box[d]
            inside &= 0 <= i < spec.sizes[d]
            at += i * (size if d == 0 else spec.strides[d - 1])
        address = n * size
        if spec.swizzle:
            address ^= address >> 3 & {32: 0x10, 64: 0x30, 128: 0x70}[spec.swizzle]
        if inside:
            expected[address : address + size] = raw[at : at + size]
    assert np.array_equal(emulated_box(spec, place, late), expected.view(np.int32))


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 62


def wgmma_case(n: int, swizzle: int, a_mn: bool, b_mn: bool, registers: bool, accumulate: bool, dtype: str):
    """A spec, shared memory full of values, and descriptors whose tiles lie where the swizzle wants them."""
    span = swizzle or 16
    b_at = 32768
    if swizzle:
        k_major, mn_major = (16, 8 * span), (8 * span * 4, 8 * span)  # (leading, stride)
    else:
        k_major, mn_major = (4096, 256), (8192, 128)
    strides = {False: k_major, True: mn_major}
    a_desc = descriptor(0, *strides[a_mn], swizzle)
    b_desc = descriptor(b_at, *strides[b_mn], swizzle)
    words = 24576  # 96 KiB
    constants = (
        ("Element", dtype),
        ("kN", n),
        ("kWords", words),
        ("kFromRegisters", registers),
        ("kAMnMajor", a_mn),
        ("kBMnMajor", b_mn),
        ("kAccumulate", accumulate),
        ("kBoxBytes", 16),
        ("kRank", 2),
    )
    source = str(KERNELS / "hopper_primitives.cu")
    kernel = KernelSpec("wgmma_once", source, "wgmma_once", constants, 128, words * 4)
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float16
    values = torch.randn(words * 2, generator=torch.Generator().manual_seed(n)).to(torch_dtype)
    return kernel, values.view(torch.int32), a_desc, b_desc


WGMMAS = [
    (n, swizzle, a_mn, b_mn, registers, accumulate, dtype)
    for n, registers, accumulate, dtype in [
        (8, False, False, "bf16"),
        (64, True, True, "bf16"),
        (128, False, True, "half"),
    ]
    for swizzle in (0, 32, 64, 128)
    for a_mn in (False, True)
    for b_mn in (False, True)
    if not (registers and a_mn)
] + [(n, 128, False, True, True, False, "bf16") for n in (16, 24, 96, 176, 256)]


def emulated_wgmma(case, late: bool) -> np.ndarray:
    kernel, memory, a_desc, b_desc = wgmma_case(*case)
    out = torch.full((128, case[0] // 2), float("nan"))
    args = [
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_uint64(a_desc),
        ctypes.c_uint64(b_desc),
    ]
    emulator.launch(kernel, (1, 1, 1), args, {"memory": memory, "out": out}, late=late)
    return out.numpy()


@pytest.mark.parametrize("case", WGMMAS, ids=str)
def test_wgmma_early_and_late_agree(case):
    early, late = (emulated_wgmma(case, late) for late in (False, True))
    assert np.array_equal(early, late)
    assert np.isfinite(early).all()


def test_wgmma_by_hand():
    """K-major and MN-major of the same matrix under a 128-byte swizzle, against numpy."""
    memory = wgmma_case(64, 128, False, False, False, False, "bf16")[1]
    values = memory.view(torch.bfloat16).float().numpy()

    def at(address: int) -> float:
        return values[(address ^ (address >> 3 & 0x70)) // 2]

    a = np.array([[at(m // 8 * 1024 + m % 8 * 128 + 2 * k) for k in range(16)] for m in range(64)])
    b = np.array([[at(32768 + n // 8 * 1024 + n % 8 * 128 + 2 * k) for k in range(16)] for n in range(64)])
    product = a @ b.T
    got = emulated_wgmma((64, 128, False, False, False, False, "bf16"), late=True)
    for thread in range(128):
        for i in range(32):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            column = i // 4 * 8 + thread % 4 * 2 + i % 2
            assert got[thread, i] == pytest.approx(product[row, column], rel=1e-4, abs=1e-4)


ROTARIES = [(dtype, pairs, paired) for dtype in ("float", "half") for pairs in (16, 40) for paired in (True, False)]


def rotary_case(dtype: str, pairs: int, interleaved: bool):
    """The kernel, 5 rows of 96 channels, cosines, sines, positions, and what the cache's own Rotary makes of them."""
    constants = (("Element", dtype), ("kHeadDim", 96), ("kPairs", pairs), ("kInterleaved", interleaved))
    kernel = KernelSpec("rotary", str(KERNELS / "rotary.cu"), "rotary", constants, 32, 0)
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(pairs))
    rows = rows.to({"float": torch.float32, "half": torch.float16}[dtype])
    angles = torch.arange(20)[:, None] * 10.0 ** -(torch.arange(pairs) / pairs)
    positions = torch.tensor([0, 7, 3, 19, 1], dtype=torch.int32)
    cosines, sines = angles.cos(), angles.sin()
    expected = Rotary(cosines, sines, interleaved=interleaved).apply(rows[:, None], positions.long())[:, 0]
    return kernel, [rows.clone(), cosines, sines, positions], expected


@pytest.mark.parametrize("case", ROTARIES, ids=str)
def test_rotary(case):
    kernel, tensors, expected = rotary_case(*case)
    args = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    emulator.launch(kernel, (5, 1, 1), args, dict(zip(("rows", "cos", "sin", "positions"), tensors, strict=True)))
    assert torch.allclose(tensors[0].float(), expected.float(), atol=1e-3 if case[0] == "half" else 1e-6)


ROUNDTRIP = TensorMapSpec("bf16", (64, 20, 3, 2), (384, 128, 8192), (64, 8, 1, 1), 128)


STORE_PLACES = [(0, 0, 0, 0), (0, 16, 2, 1), (0, 5, 1, 0)]


def roundtrip_case():
    constants = (("kBoxBytes", ROUNDTRIP.box_bytes), ("kRank", 4), *WGMMA_DUMMY)
    source = str(KERNELS / "hopper_primitives.cu")
    kernel = KernelSpec("tma_roundtrip", source, "tma_roundtrip", constants, 32, ROUNDTRIP.box_bytes + 64)
    return kernel, torch.randn(16384 // 2 * 2, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", STORE_PLACES)
def test_tma_store(place, late):
    kernel, source = roundtrip_case()
    target = torch.zeros_like(source)
    args = [*(emulator.tensor_map(ROUNDTRIP, x.data_ptr()) for x in (source, target)), *map(ctypes.c_int, place)]
    emulator.launch(kernel, (1, 1, 1), args, {"source": source, "target": target}, late=late)
    shape, strides = (2, 3, 20, 64), (4096, 64, 192, 1)
    there, here = (x.as_strided(shape, strides)[place[3], place[2]] for x in (source, target))
    rows = slice(max(0, place[1]), place[1] + 8)
    assert torch.equal(here[rows], there[rows])
    assert target.count_nonzero() == there[rows].count_nonzero()


def test_tma_store_refuses_negative_coordinates_as_a_card_does():
    """A load before the tensor's beginning gives zeros; a store there stops an H200 with an illegal instruction."""
    kernel, source = roundtrip_case()
    args = [*[emulator.tensor_map(ROUNDTRIP, source.data_ptr())] * 2, *map(ctypes.c_int, (0, -3, 1, 0))]
    with pytest.raises(emulator.EmulatorError, match="negative coordinate"):
        emulator.launch(kernel, (1, 1, 1), args, {"source": source})


# ---- the card --------------------------------------------------------------------------------------------------------


def on_card(kernel: KernelSpec, *values) -> None:
    compiler.load(kernel).launch((1, 1, 1), compiler.Args(*values))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive_agrees_with_the_card(name):
    for seed in range(3):
        words = inputs(name, seed)
        device_words, out = words.cuda(), torch.full((32, 4), -1, dtype=torch.int32, device="cuda")
        on_card(spec_of(name), device_words, out)
        card, model = out.cpu().numpy().view(np.uint32), emulated(name, words)
        if name in INEXACT:
            assert np.allclose(
                card.view(np.float32), model.view(np.float32), rtol=INEXACT[name], atol=INEXACT[name] * 4
            )
        else:
            assert np.array_equal(card, model)


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spec", BOXES, ids=str)
def test_tma_box_agrees_with_the_card(spec, place):
    kernel, memory = box_case(spec)
    device_memory = memory.cuda()
    out = torch.full((spec.box_bytes // 4,), -1, dtype=torch.int32, device="cuda")
    on_card(kernel, compiler.encode(spec, device_memory.data_ptr()), out, *place)
    assert np.array_equal(out.cpu().numpy(), emulated_box(spec, place, late=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", WGMMAS, ids=str)
def test_wgmma_agrees_with_the_card(case):
    kernel, memory, a_desc, b_desc = wgmma_case(*case)
    device_memory, out = memory.cuda(), torch.full((128, case[0] // 2), float("nan"), device="cuda")
    on_card(kernel, device_memory, out, ctypes.c_uint64(a_desc), ctypes.c_uint64(b_desc))
    assert np.allclose(out.cpu().numpy(), emulated_wgmma(case, late=True), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROTARIES, ids=str)
def test_rotary_agrees_with_the_card(case):
    kernel, tensors, expected = rotary_case(*case)
    on_device = [x.cuda() for x in tensors]
    compiler.load(kernel).launch((5, 1, 1), compiler.Args(*on_device))
    assert torch.allclose(on_device[0].cpu().float(), expected.float(), atol=1e-3 if case[0] == "half" else 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("place", STORE_PLACES)
def test_tma_store_agrees_with_the_card(place):
    kernel, source = roundtrip_case()
    here, there, target = torch.zeros_like(source), source.cuda(), torch.zeros_like(source).cuda()
    on_card(kernel, *(compiler.encode(ROUNDTRIP, x.data_ptr()) for x in (there, target)), *place)
    args = [*(emulator.tensor_map(ROUNDTRIP, x.data_ptr()) for x in (source, here)), *map(ctypes.c_int, place)]
    emulator.launch(kernel, (1, 1, 1), args, {"source": source, "target": here})
    assert torch.equal(target.cpu(), here)
