"""The append kernel in the emulator over rows that are keys and values at once, and K and V of different widths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from paged_cases import noise
from test_append import BF16, DTYPES, FP16, FP32, angles, assert_same, chance, here, pages_for

from tilewise.formats import KVFormat
from tilewise.gpu import append as kernels
from tilewise.kvcache import Rotary, storage

ROWS = [KVFormat("bf16", 576), KVFormat("fp16", 72), *(KVFormat(n, 576, latent=512) for n in ("fp8", "int8"))]


def check_rows(form: KVFormat, kv: torch.Tensor, first: int, rotary: Rotary | None = None, q: Any = None) -> None:
    """Every byte is what torch would write, and those of other tokens are what they were."""
    tokens, size = len(kv), 4
    pages, rng = tokens // size + 3, chance(tokens)
    index = torch.randperm(pages * size, generator=rng, device="cpu")[:tokens]
    index[1] = -1
    positions = torch.randint(0, 60, (tokens,), generator=rng, device="cpu")
    got, want = pages_for(form, pages, size, 1), pages_for(form, pages, size, 1)
    turned, turned_q = kv.cpu(), None if q is None else q.cpu().clone()
    if rotary is not None:
        on_host = Rotary(rotary.cos.cpu(), rotary.sin.cpu(), rotary.interleaved)
        turned = on_host.apply(turned, positions, first)
        if turned_q is not None:
            there = index >= 0
            turned_q[there] = on_host.apply(turned_q, positions, first)[there]
    kernels.append(form, kv, None, got, None, positions.to(here()), index.to(here()), rotary, q, first=first)
    storage.write(form, want, index[index >= 0].to(here()), turned[index >= 0].to(here()))
    for mine, its in zip(got, want, strict=True):
        assert_same(mine, its)
    if q is not None and turned_q is not None:
        assert_same(q, turned_q)


@pytest.mark.parametrize("form", ROWS, ids=lambda form: f"{form.name}-{form.head_dim}")
def test_rows(form: KVFormat) -> None:
    for dtype in DTYPES if form.head_dim == 576 else (BF16,):
        check_rows(form, noise(6, 1, form.head_dim, dtype=dtype), form.latent)


@pytest.mark.parametrize(
    ("head_dim", "latent"), [(9, 1), (40, 33), (130, 130), (200, 136), (256, 128), (264, 260), (520, 384)]
)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_rows_of_any_width(name: str, head_dim: int, latent: int) -> None:
    check_rows(KVFormat(name, head_dim, latent=latent), noise(5, 1, head_dim, dtype=FP32, seed=latent), latent)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ROWS, ids=lambda form: f"{form.name}-{form.head_dim}")
def test_the_last_channels_turn(form: KVFormat, interleaved: bool) -> None:
    first = form.head_dim * 8 // 9
    for pairs in (32, 20) if form.head_dim == 576 else (4, 3):
        rotary = Rotary(*angles(pairs), interleaved)
        q = noise(5, 3, form.head_dim, dtype=BF16, seed=1)
        check_rows(form, noise(5, 1, form.head_dim, dtype=BF16), first, rotary, q)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "first", "pairs"), [(41, 33, 4), (40, 4, 18), (75, 11, 32), (24, 24, 0), (30, 10, 8)]
)
def test_channels_that_turn_begin_anywhere(head_dim: int, first: int, pairs: int, interleaved: bool) -> None:
    q = noise(4, 2, head_dim, dtype=FP16, seed=1)
    form = KVFormat("fp16", head_dim)
    check_rows(form, noise(4, 1, head_dim, dtype=FP16), first, Rotary(*angles(pairs), interleaved), q)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_hostile_rows(name: str) -> None:
    form = KVFormat(name, 576, latent=512)
    largest = torch.finfo(FP32).max
    x = (
        noise(12, 1, 576)
        * torch.tensor([0.0, 1e-45, 1e-40, 1e-30, 1.0, 1e4, 1e30, 3e37, 1.0, 1.0, 1.0, 1.0])[:, None, None]
    )
    x[7, 0, :300] = largest
    x[7, 0, 300:] = -largest
    x[8, 0, 575], x[9, 0, 0], x[10, 0, 511] = math.nan, math.inf, -math.inf
    x[11, 0, ::3] = 448.0  # of scale 1 exactly
    check_rows(form, x.to(here()), 512)


def test_rows_that_lie_apart_and_off_their_vectors() -> None:
    wide = noise(5, 2, 600, dtype=BF16)
    for form in ROWS[2:]:
        for kv in (wide[:, :1, 3:579], wide[:, 1:, 8:584]):
            check_rows(form, kv, 512, Rotary(*angles(32)))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_k_and_v_of_different_widths(name: str) -> None:
    for widths in ((192, 128), (40, 72), (8, 300)):
        k, v = (noise(5, 2, d, dtype=BF16, seed=d) for d in widths)
        forms = [KVFormat(name, d) for d in widths]
        got = [pages_for(form, 4, 4, 2) for form in forms]
        want = [[x.clone(memory_format=torch.contiguous_format) for x in parts] for parts in got]
        index, positions = torch.tensor([3, 9, -1, 0, 15]), torch.arange(5)
        kernels.append(forms[0], k, v, *got, positions, index)
        for form, x, mine, its in zip(forms, (k, v), got, want, strict=True):
            storage.write(form, its, index[index >= 0], x[index >= 0])
            for one, other in zip(mine, its, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("form", ROWS, ids=lambda form: f"{form.name}-{form.head_dim}")
def test_pages_are_copied_whole(form: KVFormat) -> None:
    parts = storage.allocate(form, (2, 6, 4, 1), here(), for_kernels=True)
    for layer in range(2):
        storage.write(form, [x[layer] for x in parts], torch.arange(24), noise(24, 1, form.head_dim, seed=layer))
    before = [x.clone() for x in parts]
    kernels.copy_pages(parts, torch.tensor([[0, 3], [5, 1]]))
    for now, then in zip(parts, before, strict=True):
        want = then.clone()
        storage.as_bytes(want)[:, [5, 1]] = storage.as_bytes(then)[:, [0, 3]]
        assert_same(now, want)
