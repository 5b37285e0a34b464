"""The widen kernel in the emulator: pages of any format as plain ones, every value what KVFormat.decode makes."""

from __future__ import annotations

import pytest
import torch
from oracle import randn
from test_append import assert_same

from tilewise.gpu.widen import widen
from tilewise.kvcache import KVFormat, storage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def stored(form: KVFormat, pages: int, size: int, heads: int, seed: int, for_kernels: bool) -> list[torch.Tensor]:
    """The components of random tokens, some of them broken or huge, as a cache has them."""
    x = randn(pages, size, heads, form.head_dim, seed=seed, size=2.0)
    x[1, 0, 0, 0], x[1, 1, 0, -1], x[2, 0, :, :3] = float("nan"), float("inf"), 3e38
    x[0, 0] = 0.0
    parts = storage.allocate(form, (1, pages, size, heads), torch.device("cpu"), for_kernels=for_kernels)
    for part, values in zip(parts, form.encode(x), strict=True):
        storage.as_bytes(part[0]).copy_(storage.as_bytes(values))
    return [part[0] for part in parts]


CASES = [("int8", BF16, 128), ("fp8", BF16, 64), ("int4", BF16, 128), ("fp32", BF16, 96), ("int4", FP32, 45),
         ("fp8", FP16, 7), ("bf16", FP16, 264)]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "head_dim"), CASES)
def test_every_value_is_what_decode_makes(name, dtype, head_dim):
    form = KVFormat(name, head_dim, 32)
    for for_kernels, size in ((True, 2), (False, 3)):
        parts = [stored(form, 5, size, 2, seed, for_kernels) for seed in (1, 2)]
        pages = torch.tensor([4, 1, 0, 2, 1], dtype=torch.int32)
        for got, of in zip(widen(form, *parts, pages, dtype), parts, strict=True):
            wanted = form.decode([storage.as_bytes(x)[pages.long()].view(x.dtype) for x in of], dtype)
            assert got.shape == (5, size, 2, head_dim)
            assert_same(got, wanted)


@pytest.mark.parametrize(("head_dim", "latent"), [(576, 512), (40, 33), (130, 130), (264, 260)])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_rows_that_are_keys_and_values(name, head_dim, latent):
    form = KVFormat(name, head_dim, latent=latent)
    parts = stored(form, 5, 3, 1, 1, True)
    pages = torch.tensor([4, 1, 0, 2, 1], dtype=torch.int32)
    for dtype in (BF16, FP32):
        k, v = widen(form, parts, None, pages, dtype, latent)
        wanted = form.decode([storage.as_bytes(x)[pages.long()].view(x.dtype) for x in parts], dtype)
        assert_same(k, wanted)
        assert_same(v, wanted[..., :latent])
        assert v.data_ptr() == k.data_ptr()


@pytest.mark.parametrize("name", ["int8", "fp32", "int4"])
@pytest.mark.parametrize("widths", [(192, 128), (24, 40), (8, 300)])
def test_k_and_v_of_different_widths(name, widths):
    forms = [KVFormat(name, d) for d in widths]
    parts = [stored(form, 5, 2, 2, form.head_dim, True) for form in forms]
    pages = torch.tensor([3, 0, 1], dtype=torch.int32)
    for got, form, of in zip(widen(forms[0], *parts, pages, BF16, widths[1]), forms, parts, strict=True):
        wanted = form.decode([storage.as_bytes(x)[pages.long()].view(x.dtype) for x in of], BF16)
        assert got.shape == (3, 2, 2, form.head_dim)
        assert_same(got, wanted)


def test_pages_anywhere_in_memory():
    """Neither aligned nor dense: eight channels are then read one by one."""
    form = KVFormat("fp16", 16)
    odd = [randn(4, 3, 2, 20, dtype=FP16, seed=seed)[..., 1:17] for seed in (3, 4)]
    pages = torch.tensor([3, 0], dtype=torch.int32)
    for got, of in zip(widen(form, odd[:1], odd[1:], pages, FP32), odd, strict=True):
        assert_same(got, of[[3, 0]].float())


def test_no_pages():
    form = KVFormat("int8", 16)
    parts = [stored(form, 5, 2, 2, seed, True) for seed in (1, 2)]
    k, v = widen(form, *parts, torch.zeros(0, dtype=torch.int32), BF16)
    assert k.shape == v.shape == (0, 2, 2, 16)
