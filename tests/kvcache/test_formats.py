"""KV formats: what is stored, what comes back, and that no value is further off than the format states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.formats import FORMATS, GROUP_SIZES, KVFormat

QUANTISED = ("fp8", "int8", "int4")
HEAD_DIMS = (1, 7, 40, 96, 127, 128, 160)
FLOAT32_MAX = torch.finfo(torch.float32).max
HOSTILE = (0.0, -0.0, 1e4, -1e4, 1e-30, -1e-30, 1e30, -1e30, 1e-45, -1e-40, 65504.0, FLOAT32_MAX, -FLOAT32_MAX, 1.1)

formats = st.builds(KVFormat, st.sampled_from(FORMATS), st.sampled_from(HEAD_DIMS), st.sampled_from(GROUP_SIZES))


@st.composite
def rows(draw: st.DrawFn, head_dim: int) -> torch.Tensor:
    """(2 tokens, 3 heads, head_dim) float32: plain noise of any magnitude, constant rows, outliers, hostile mixes."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(2, 3, head_dim, generator=generator)
    kind = draw(st.sampled_from(["noise", "offset", "constant", "outlier", "mix"]))
    value = draw(st.sampled_from(HOSTILE) | st.floats(allow_nan=False, allow_infinity=False, width=32))
    if kind == "noise":
        return (x * value).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    if kind == "offset":
        return (x * 1e-3 + value).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    if kind == "constant":
        return torch.full_like(x, value)
    if kind == "outlier":
        x[1, 1, draw(st.integers(0, head_dim - 1))] = value
        return x
    choice = torch.randint(len(HOSTILE), x.shape, generator=generator)
    return torch.tensor(HOSTILE)[choice]


@settings(max_examples=1000, deadline=None)
@given(st.data(), formats, st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
def test_round_trip_stays_inside_the_stated_error(data: st.DataObject, form: KVFormat, dtype: torch.dtype) -> None:
    x = data.draw(rows(form.head_dim)).to(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    back = form.decode(form.encode(x))
    bound = form.error_bound(x)
    assert back.shape == x.shape == bound.shape
    assert back.dtype == form.decoded_dtype
    assert bound.dtype == torch.float64
    error = (back.double() - x.double()).abs()
    assert (error <= bound).all(), f"{form}: {(error - bound).max()} beyond the bound"
    if not form.plain:
        assert back.isfinite().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_stated_error_is_worth_stating(name: str, head_dim: int) -> None:
    """A bound that is huge would hold too. On noise it is near what really happens, and small beside the values."""
    x = torch.randn(500, 4, head_dim, generator=torch.Generator().manual_seed(0))
    form = KVFormat(name, head_dim, 32)
    error = (form.decode(form.encode(x)).double() - x.double()).abs()
    relative = {"fp32": 0.0, "fp16": 1e-3, "bf16": 8e-3, "fp8": 0.13, "int8": 0.02, "int4": 0.22}[name]
    assert (form.error_bound(x) <= relative * x.abs().amax(-1, keepdim=True).clamp(min=1)).all()
    if name != "fp32" and head_dim >= 40:
        assert (error / form.error_bound(x)).max() >= 0.9


def test_every_finite_bfloat16_survives_every_quantised_format() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    for head_dim in (1, 2):  # alone, and beside the value of the opposite sign
        both = torch.stack([x, -x], -1)[:, None, :head_dim]
        for name in QUANTISED:
            form = KVFormat(name, head_dim)
            error = (form.decode(form.encode(both)).double() - both.double()).abs()
            assert (error <= form.error_bound(both)).all(), name


def test_fp8_decodes_every_code_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()][None, None]
    form = KVFormat("fp8", codes.shape[-1])
    for scale in (1.0, 0.3, 2.0**-126, 1e35):
        scales = torch.tensor(scale).view(1, 1, 1)
        assert torch.equal(form.decode((codes, scales)), codes.float() * scales)


def test_fp8_rounds_to_the_nearest_code() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448, ascending
    x = torch.linspace(0, 448, 4001)[None, None]  # 448 is the largest, so the scale is 1
    form = KVFormat("fp8", 512)
    for part in (x[..., :511], x[..., 1500:2011], x[..., 3490:]):
        row = torch.cat([part, torch.full((1, 1, 512 - part.shape[-1]), 448.0)], -1)
        nearest = (row[0, 0, :, None] - codes).abs().amin(-1)
        assert torch.equal((form.decode(form.encode(row)) - row).abs()[0, 0], nearest)


CONSTANTS = (0.0, 1.0, -1.0, 0.5, -3.25, 1e4, 2.0**-100, 2.0**100)


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n in FORMATS for v in (CONSTANTS[:-2] if n == "fp16" else CONSTANTS)]
)
def test_constant_rows_that_can_be_exact_are(name: str, value: float) -> None:
    form = KVFormat(name, 96)
    x = torch.full((2, 3, 96), value).bfloat16().float()
    back = form.decode(form.encode(x))
    if name in ("fp8", "int8"):  # scale · 448 and scale · 127 are rounded once
        torch.testing.assert_close(back, x, rtol=2e-7, atol=0)
    else:
        assert torch.equal(back, x)


def test_int8_is_symmetric_and_uses_its_range() -> None:
    x = torch.randn(10, 2, 64, generator=torch.Generator().manual_seed(1))
    form = KVFormat("int8", 64)
    codes, scale = form.encode(x)
    assert codes.dtype == torch.int8
    assert torch.equal(codes.abs().amax(-1), torch.full((10, 2), 127, dtype=torch.int8))
    minus, same = form.encode(-x)
    assert torch.equal(minus, -codes)
    assert torch.equal(same, scale)


@pytest.mark.parametrize("head_dim", [1, 5, 40, 128, 200])
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_int4_layout(head_dim: int, group: int) -> None:
    """Two codes a byte, low nibble first; a scale and a zero for each group, the last one shorter."""
    x = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(2))
    form = KVFormat("int4", head_dim, group)
    packed, scale, zero = form.encode(x)
    groups = -(-head_dim // group)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 2, (head_dim + 1) // 2))
    assert (scale.dtype, scale.shape) == (zero.dtype, zero.shape) == (torch.bfloat16, (3, 2, groups))
    back = form.decode((packed, scale, zero))
    for c in range(head_dim):
        code = (packed[..., c // 2] >> (4 * (c % 2))) & 15
        want = code.float() * scale[..., c // group].float() + zero[..., c // group].float()
        assert torch.equal(back[..., c], want)
    for g in range(groups):
        part = x[..., g * group : (g + 1) * group]
        assert (zero[..., g].float() <= part.amin(-1)).all()
        top = zero[..., g].double() + 15 * scale[..., g].double()
        assert (top >= part.amax(-1).double() - 1e-6).all(), "the range must cover the group"


def test_int4_has_a_scale_for_each_group() -> None:
    """One loud group must not cost the quiet one its precision."""
    x = torch.randn(4, 2, 128, generator=torch.Generator().manual_seed(3))
    loud = x.clone()
    loud[..., 64:] *= 1e6
    form = KVFormat("int4", 128, 64)
    assert torch.equal(form.decode(form.encode(loud))[..., :64], form.decode(form.encode(x))[..., :64])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_non_finite_value_spoils_its_token_and_head_alone(name: str, bad: float) -> None:
    x = torch.randn(3, 2, 130, generator=torch.Generator().manual_seed(4))
    form = KVFormat(name, 130)
    clean = form.decode(form.encode(x))
    x[1, 0, 129] = bad
    back = form.decode(form.encode(x))
    assert back[1, 0].isnan().all()
    clean[1, 0] = back[1, 0] = 0
    assert torch.equal(back, clean)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_plain_formats_are_the_cast(name: str) -> None:
    form = KVFormat(name, 6)
    x = torch.tensor([[[1.1, -0.0, 1e30, float("nan"), float("inf"), -float("inf")]]])
    (stored,) = form.encode(x)
    assert stored.dtype == form.dtype
    torch.testing.assert_close(stored, x.to(stored.dtype), rtol=0, atol=0, equal_nan=True)
    assert form.decode((stored,)) is stored, "reading a plain format must not copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_decode_gives_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    form = KVFormat(name, 33)
    parts = form.encode(torch.randn(4, 2, 33))
    back = form.decode(parts, dtype)
    assert back.dtype == dtype
    assert torch.equal(back, form.decode(parts).to(dtype))


@pytest.mark.parametrize(
    ("name", "head_dim", "group", "size"),
    [
        ("fp32", 128, 64, 512),
        ("bf16", 128, 64, 256),
        ("fp8", 128, 64, 132),
        ("int8", 128, 64, 132),
        ("int4", 128, 32, 64 + 16),
        ("int4", 128, 64, 64 + 8),
        ("int4", 128, 128, 64 + 4),
        ("int4", 97, 64, 49 + 8),
    ],
)
def test_bytes_are_what_is_stored(name: str, head_dim: int, group: int, size: int) -> None:
    form = KVFormat(name, head_dim, group)
    parts = form.encode(torch.randn(1, 1, head_dim))
    assert sum(p.numel() * p.element_size() for p in parts) == form.bytes_per_token_head == size
    assert [(tuple(p.shape[2:]), p.dtype) for p in parts] == [(c.shape, c.dtype) for c in form.components]


@pytest.mark.parametrize("name", FORMATS)
def test_no_tokens_are_fine(name: str) -> None:
    form = KVFormat(name, 40)
    assert form.decode(form.encode(torch.empty(0, 2, 40))).shape == (0, 2, 40)


@pytest.mark.parametrize("strides", [(1, 1, 3), (7, 5, 3), (0, 0, 0)])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_int4_of_one_byte_a_head_takes_any_strides(tokens: int, strides: tuple[int, int, int]) -> None:
    """Where a row is one byte, torch lets its stride be anything, also for a tensor that says it is contiguous."""
    form = KVFormat("int4", 2)
    codes = torch.arange(64, dtype=torch.uint8).as_strided((tokens, 1, 1), strides)
    ones = torch.ones(tokens, 1, 1, dtype=torch.bfloat16)
    back = form.decode((codes, ones, ones * 0))
    assert torch.equal(back, torch.cat((codes & 15, codes >> 4), -1).float())


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("int3", 64), ValueError, "kv_format"),
        (("int4", 0), ValueError, "head_dim"),
        (("int4", 577), ValueError, "head_dim"),
        (("int4", 64.0), TypeError, "head_dim"),
        (("int4", 64, 48), ValueError, "group_size"),
        (("int4", 64, 64.0), TypeError, "group_size"),
    ],
)
def test_bad_formats(arguments: tuple[object, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        KVFormat(*arguments)  # type: ignore[arg-type]
