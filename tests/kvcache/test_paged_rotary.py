"""Rotary embedding in the paged cache's write()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_cases import noise

from tilewise.kvcache import PagedKVCache, Rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rot_dim", [0, 2, 8, 16])
def test_rotary_turns_channel_pairs_by_their_position(rot_dim: int, interleaved: bool) -> None:
    angles = torch.arange(50)[:, None] * 0.9 ** torch.arange(rot_dim // 2)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved)
    cache = PagedKVCache(20, 4, 3, 16, kv_format="fp32")
    a, b = cache.allocate(), cache.allocate()
    cache.extend([b], 17)
    slots = cache.extend([a, b], [6, 5])
    k, v = noise(11, 3, 16), noise(11, 3, 16, seed=1)
    cache.write(0, slots, k, v, rotary=rotary)
    want = k.double().clone()
    for token, position in enumerate(slots.positions.tolist()):
        for i in range(rot_dim // 2):
            p, q = (2 * i, 2 * i + 1) if interleaved else (i, i + rot_dim // 2)
            turned = torch.view_as_complex(torch.stack([k[token, :, p], k[token, :, q]], -1).double().contiguous())
            turned = turned * torch.polar(torch.tensor(1.0).double(), angles[position, i].double())
            want[token, :, p], want[token, :, q] = turned.real, turned.imag
    pages = cache.page_list(a), cache.page_list(b)
    got = [cache.load(0, pages[0], 0, 6, torch.float32), cache.load(0, pages[1], 17, 22, torch.float32)]
    torch.testing.assert_close(torch.cat([g[0] for g in got]).double(), want, rtol=0, atol=1e-5)
    assert torch.equal(torch.cat([g[1] for g in got]), v), "values do not turn"
    if not interleaved:
        cache.write(0, slots, k, v, rotary=(angles.cos(), angles.sin()))
        assert torch.equal(cache.load(0, pages[0], 0, 6, torch.float32)[0], got[0][0])


def test_rotary_computes_in_float32() -> None:
    angles = torch.arange(100)[:, None] * torch.ones(1, 4)
    rotary = Rotary(angles.cos(), angles.sin())
    x = noise(100, 2, 8, dtype=torch.bfloat16)
    turned = rotary.apply(x, torch.arange(100))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotary.apply(x.float(), torch.arange(100)).bfloat16())


@pytest.mark.usefixtures("written_by")
def test_rotary_refuses_what_its_tables_do_not_cover() -> None:
    cache = PagedKVCache(4, 4, 1, 8, kv_format="fp32")
    s = cache.allocate()
    slots = cache.extend([s], 5)
    k = noise(5, 1, 8)
    bad: list[tuple[Any, type[Exception], str]] = [
        ((torch.ones(4, 4), torch.ones(4, 4)), ValueError, "positions 0 to 3, got 0 to 4"),
        ((torch.ones(9, 5), torch.ones(9, 5)), ValueError, "10 channels"),
        ((torch.ones(9, 4), torch.ones(9, 3)), ValueError, "sin"),
        ((torch.ones(9, 4), torch.ones(9, 4).long()), ValueError, "sin"),
        ((torch.ones(9), torch.ones(9)), ValueError, "cos"),
        (torch.ones(9, 4), TypeError, "rotary"),
        ("llama", TypeError, "rotary"),
    ]
    for rotary, error, says in bad:
        with pytest.raises(error, match=says):
            cache.write(0, slots, k, k, rotary=rotary)
    with pytest.raises(TypeError, match="interleaved"):
        Rotary(torch.ones(9, 4), torch.ones(9, 4), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write"):
        cache.gather(0, s)  # nothing was written
