"""Caches whose rows are keys and values at once, as MLA has them, and caches of K and V that differ in width."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import check_pages, noise, snapshot
from test_formats import rows

from tilewise.formats import KVFormat
from tilewise.kvcache import PagedKVCache, PrefixCache, Rotary

PLAIN, QUANTISED = ("fp32", "fp16", "bf16"), ("fp8", "int8")
SIZES = ((576, 512), (40, 33), (130, 130), (200, 192), (9, 1))  # head_dim, latent channels

latent_rows = st.builds(
    lambda name, sizes: KVFormat(name, sizes[0], latent=sizes[1]), st.sampled_from(QUANTISED), st.sampled_from(SIZES)
)


def latent(**options: Any) -> PagedKVCache:
    """A small cache of shared rows: 24 channels, of which 16 are V."""
    sizes = {"num_pages": 12, "page_size": 4, "num_kv_heads": 1, "head_dim": 24, "value_dim": 16, "shared_kv": True}
    return PagedKVCache(**(sizes | options))


def angles(pairs: int, positions: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    turns = 6.3 * torch.rand(positions, pairs, generator=torch.Generator().manual_seed(pairs))
    return turns.cos(), turns.sin()


# ---- the formats of a row --------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.data(), latent_rows, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_row_comes_back_inside_the_stated_error(data: st.DataObject, form: KVFormat, dtype: torch.dtype) -> None:
    x = data.draw(rows(form.head_dim)).to(dtype)
    x = torch.where(x.isfinite(), x, 1.0)
    parts = form.encode(x)
    back, bound = form.decode(parts), form.error_bound(x)
    assert back.shape == x.shape == bound.shape
    assert ((back.double() - x.double()).abs() <= bound).all()
    assert back[..., : form.latent].isfinite().all()
    again = form.decode(form.from_rows(form.to_rows(parts)))  # through the bytes of the row
    assert torch.equal(again.nan_to_num(0.5), back.nan_to_num(0.5))


@pytest.mark.parametrize("name", QUANTISED)
def test_the_stated_error_of_a_row_is_near_the_real_one(name: str) -> None:
    x = noise(300, 1, 576)
    form = KVFormat(name, 576, latent=512)
    error, bound = (form.decode(form.encode(x)).double() - x.double()).abs(), form.error_bound(x)
    assert (error[..., :512] / bound[..., :512]).max() >= 0.9
    assert bound[..., :512].max() <= {"fp8": 0.3, "int8": 0.02}[name]
    assert bound[..., 512:].max() <= 0.03  # bfloat16


def test_the_fp8_row_is_deepseeks() -> None:
    """512 e4m3 codes, four float32 scales that are powers of two, 64 bfloat16 values: 656 bytes in that order."""
    form = KVFormat("fp8", 576, latent=512)
    assert [c.nbytes for c in form.components] == [512, 16, 128]
    assert form.offsets == (0, 512, 528)
    assert form.bytes_per_token_head == 656
    x = noise(7, 1, 576) * torch.logspace(-6, 6, 7)[:, None, None]
    row = form.to_rows(form.encode(x))
    assert row.shape == (7, 1, 656)
    codes = row[..., :512].view(torch.float8_e4m3fn)
    scales, rotary = row[..., 512:528].view(torch.float32), row[..., 528:].view(torch.bfloat16)
    assert torch.equal(rotary, x[..., 512:].bfloat16())
    exponent = torch.log2(scales)
    assert torch.equal(exponent, exponent.round())
    tops = x[..., :512].unflatten(-1, (4, 128)).abs().amax(-1)
    assert (tops <= 448 * scales).all()
    assert (tops > 224 * scales).all()  # a smaller power of two would clip
    back = codes.float() * scales.repeat_interleave(128, -1)
    assert torch.equal(back, form.decode(form.encode(x))[..., :512])
    assert torch.equal(back, back.bfloat16().float())  # kernels that widen to bfloat16 round nothing


def test_a_scale_that_is_no_power_of_two_is_read_as_it_is() -> None:
    form = KVFormat("fp8", 576, latent=512)
    row = form.to_rows(form.encode(noise(2, 1, 576)))
    row[..., 512:528].view(torch.float32).fill_(0.3)
    got = form.decode(form.from_rows(row))
    assert torch.equal(got[..., :512], row[..., :512].view(torch.float8_e4m3fn).float() * torch.tensor(0.3))


@pytest.mark.parametrize("channel", [0, 200, 511, 512, 575])
@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_not_finite_makes_its_whole_row_nan_and_no_other(name: str, channel: int) -> None:
    form = KVFormat(name, 576, latent=512)
    for value in (math.inf, -math.inf, math.nan):
        x = noise(3, 1, 576)
        x[1, 0, channel] = value
        back = form.decode(form.encode(x))
        assert back[1].isnan().all()
        assert back[::2].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bf16", 576, 64, 512), "latent goes with fp8"),
        (("int4", 64, 64, 32), "latent"),
        (("fp8", 64, 64, 65), "latent"),
    ],
)
def test_bad_rows(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        KVFormat(*arguments)


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("written_by")
@pytest.mark.parametrize("name", [*PLAIN, *QUANTISED])
def test_a_row_is_written_once_and_read_as_key_and_value(name: str) -> None:
    cache = latent(kv_format=name, num_layers=2)
    a, b = cache.allocate(2)
    kv = noise(8, 1, 24)
    slots = cache.extend([a, b], [3, 5])
    for layer in range(2):
        cache.write(layer, slots, kv + layer)
    for layer in range(2):
        for seq, its in ((a, kv[:3] + layer), (b, kv[3:] + layer)):
            k, v = cache.gather(layer, seq)
            assert k.shape == (len(its), 1, 24)
            assert torch.equal(v, k[..., :16])
            assert torch.equal(k, cache.format.decode(cache.format.encode(its)))
            positions = torch.tensor([2, 0, 2])
            for got, want in zip(cache.load_tokens(layer, seq, positions, torch.float32), (k, v), strict=True):
                assert torch.equal(got, want[positions].float())


def test_memory_arithmetic() -> None:
    """DeepSeek-V3: 128 heads of 192 + 128 channels would be 81,920 bytes per token and layer."""
    size = {"num_pages": 2, "page_size": 64, "num_layers": 3}
    apart = PagedKVCache(**size, num_kv_heads=128, head_dim=192, value_dim=128)
    assert apart.bytes_per_token == 3 * 81920
    rows = {"num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "shared_kv": True}
    for name, each in (("bf16", 1152), ("fp16", 1152), ("fp32", 2304), ("fp8", 656), ("int8", 656)):
        cache = PagedKVCache(**size, **rows, kv_format=name)
        assert cache.kv_row_bytes == each
        assert cache.bytes_per_token == 3 * each
        assert cache.nbytes == 2 * 64 * 3 * each == cache._k[0].untyped_storage().nbytes()
        (seq,) = cache.allocate(1)
        cache.extend([seq], 65)
        assert cache.stats().bytes_used == 2 * 64 * 3 * each
    assert apart.nbytes == sum(x.numel() * x.element_size() for x in (*apart._k, *apart._v))
    shown = "head_dim=576, value_dim=512, shared_kv=True, num_layers=3, kv_format='int8'"
    assert shown in repr(cache)
    assert "value_dim" not in repr(PagedKVCache(4, 4, 1, 8))


@pytest.mark.usefixtures("written_by")
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_fork_copies_the_page_that_it_grows_into(name: str) -> None:
    cache = latent(kv_format=name)
    a = cache.allocate()
    cache.write(0, cache.extend([a], 6), noise(6, 1, 24))
    before = cache.gather(0, a)[0]
    b = cache.fork(a)
    cache.write(0, cache.extend([b], 1), noise(1, 1, 24, seed=1))
    assert cache.page_list(a)[0] == cache.page_list(b)[0]
    assert cache.page_list(a)[1] != cache.page_list(b)[1]
    assert torch.equal(cache.gather(0, b)[0][:6], before)
    assert torch.equal(cache.gather(0, a)[0], before)
    check_pages(cache)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_a_copy_goes_its_own_way(name: str) -> None:
    cache = latent(kv_format=name)
    seq = cache.allocate()
    cache.write(0, cache.extend([seq], 6), noise(6, 1, 24))
    for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        made.write(0, made.extend([seq], 1), noise(1, 1, 24, seed=1))
        assert torch.equal(made.gather(0, seq)[0][:6], cache.gather(0, seq)[0])
        assert cache.length(seq) == 6
        if name != "bf16":  # the bytes of the rows are what is written
            page, place = int(made.page_list(seq)[1]), 2
            assert torch.equal(
                made.rows(0)[page, place], made.format.to_rows(made.format.encode(noise(1, 1, 24, seed=1)))[0]
            )


def test_a_prefix_cache_over_rows_finds_what_it_has() -> None:
    prefix = PrefixCache(latent(kv_format="fp8"))
    a, reused, slots = prefix.insert([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert reused == 0
    prefix.cache.write(0, slots, noise(9, 1, 24))
    b, reused, slots = prefix.insert([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])
    assert reused == 8
    prefix.cache.write(0, slots, noise(2, 1, 24, seed=1))
    assert torch.equal(prefix.cache.gather(0, a)[0][:8], prefix.cache.gather(0, b)[0][:8])


@pytest.mark.usefixtures("written_by")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_rotary_turns_the_channels_after_the_values_alone(name: str, interleaved: bool) -> None:
    cache = latent(kv_format=name)
    kv, q = noise(5, 1, 24), noise(5, 3, 24, seed=1)
    given, turn = q.clone(), Rotary(*angles(4), interleaved)
    seq = cache.allocate()
    cache.write(0, cache.extend([seq], 2), kv[:2], rotary=turn, q=q[:2])
    cache.write(0, cache.extend([seq], 3), kv[2:], rotary=turn, q=q[2:])
    for x, got in ((given, q), (kv, cache.gather(0, seq)[0])):
        turned = turn.apply(x[..., 16:].contiguous(), torch.arange(5))  # the part by itself
        want = torch.cat([x[..., :16], turned], -1)
        if got is not q:
            want = cache.format.decode(cache.format.encode(want))
        assert torch.equal(got, want)


@pytest.mark.usefixtures("written_by")
@pytest.mark.parametrize("name", ["fp32", "fp16", "fp8", "int8", "int4"])
def test_k_and_v_of_different_widths(name: str) -> None:
    for head_dim, value_dim in ((24, 16), (16, 40), (1, 65)):
        cache = PagedKVCache(8, 4, 2, head_dim, value_dim=value_dim, kv_format=name)
        assert cache.kv_row_bytes == sum(KVFormat(name, d).bytes_per_token_head for d in (head_dim, value_dim))
        seq = cache.allocate()
        k, v = noise(7, 2, head_dim), noise(7, 2, value_dim, seed=1)
        cache.write(0, cache.extend([seq], 7), k, v)
        twin = cache.fork(seq)
        cache.write(0, cache.extend([twin], 1), k[:1], v[:1])
        for x, form, got in zip((k, v), (cache.format, cache.value_format), cache.gather(0, twin), strict=True):
            want = form.decode(form.encode(x))
            assert torch.equal(got, torch.cat([want, want[:1]]))
        picked = cache.load_tokens(0, twin, torch.tensor([7, 3]), torch.float32)
        for got, whole in zip(picked, cache.gather(0, twin), strict=True):
            assert torch.equal(got, whole[[7, 3]].float())


# ---- pages of others -------------------------------------------------------------------------------------------------


def test_pages_of_rows_are_taken_without_a_copy() -> None:
    pages = noise(5, 4, 1, 24)
    table, lengths = torch.tensor([[3, 1], [2, -7]]), torch.tensor([6, 3])
    cache = PagedKVCache.from_pages(pages, None, table, lengths, value_dim=16)
    k, v = cache.gather(0, 0)
    assert torch.equal(k, torch.cat([pages[3], pages[1, :2]]))
    assert torch.equal(v, k[..., :16])
    cache.write(0, cache.extend([1], 1), noise(1, 1, 24, seed=2))
    assert torch.equal(pages[2, 3], noise(1, 24, seed=2))
    assert (cache.head_dim, cache.value_dim, cache.shared_kv, cache.format.name) == (24, 16, True, "fp32")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int8])
def test_quantised_rows_of_others_are_read_and_written(dtype: torch.dtype) -> None:
    form = KVFormat("int8" if dtype == torch.int8 else "fp8", 576, latent=512)
    x = noise(3 * 8, 1, 576)
    bytes_ = form.to_rows(form.encode(x)).view(3, 8, 1, 656)
    pages = bytes_.view(dtype)
    cache = PagedKVCache.from_pages(pages, None, torch.tensor([[2, 0, 1]]), torch.tensor([20]), value_dim=512)
    assert cache.format == form
    want = form.decode(form.encode(x)).view(3, 8, 1, 576)
    assert torch.equal(cache.gather(0, 0)[0], torch.cat([want[2], want[0], want[1, :4]]))
    assert cache.rows(0).data_ptr() == pages.data_ptr()
    new = noise(1, 1, 576, seed=5)
    cache.write(0, cache.extend([0], 1), new)
    assert torch.equal(bytes_[1, 4], form.to_rows(form.encode(new))[0])


def test_own_rows_can_be_taken_by_another() -> None:
    cache = latent(kv_format="fp8", num_layers=2)
    seq = cache.allocate()
    slots = cache.extend([seq], 6)
    cache.write(0, slots, noise(6, 1, 24))
    cache.write(1, slots, noise(6, 1, 24, seed=1))
    table = cache.page_table([seq])
    other = PagedKVCache.from_pages(cache.rows(1), None, table, torch.tensor([6]), value_dim=16)
    assert torch.equal(other.gather(0, 0)[0], cache.gather(1, seq)[0])


def test_pages_of_two_widths() -> None:
    k, v = noise(3, 4, 2, 24), noise(3, 4, 2, 40, seed=1)
    cache = PagedKVCache.from_pages(k, v, torch.tensor([[1]]), torch.tensor([3]))
    assert (cache.head_dim, cache.value_dim, cache.shared_kv) == (24, 40, False)
    for got, pages in zip(cache.gather(0, 0), (k, v), strict=True):
        assert torch.equal(got, pages[1, :3])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"value_dim": 25}, ValueError, "value_dim must be at most head_dim 24: V is the first"),
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads must be 1 with shared_kv"),
        ({"shared_kv": 1}, TypeError, "shared_kv"),
        ({"value_dim": 0}, ValueError, "value_dim"),
        ({"value_dim": "16"}, TypeError, "value_dim"),
        ({"value_dim": 577}, ValueError, "value_dim must be at most head_dim 24"),
        ({"value_dim": 577, "shared_kv": False}, NotImplementedError, "value_dim"),
        ({"kv_format": "int4"}, NotImplementedError, '"int4" is not served with shared_kv: use "fp8"'),
        ({"kv_format": "int5"}, ValueError, "kv_format"),
    ],
)
def test_bad_caches(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        latent(**change)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(515, 512), (40, 33), (576, 575), (576, 1), (24, 24), (26, 24)])
@pytest.mark.parametrize("kv_format", ["fp8", "int8"])
def test_our_own_rows_are_taken_back(kv_format: str, head_dim: int, value_dim: int) -> None:
    """Also those that are padded, where head_dim says what is no rotary channel."""
    cache = PagedKVCache(4, 16, 1, head_dim, value_dim=value_dim, shared_kv=True, kv_format=kv_format)
    seq = cache.allocate()
    cache.write(0, cache.extend([seq], 20), noise(20, 1, head_dim))
    table, lengths = cache.page_table([seq]), torch.tensor([20])
    rows = cache.rows(0).view(torch.uint8 if kv_format == "fp8" else torch.int8)
    again = PagedKVCache.from_pages(rows, None, table, lengths, value_dim=value_dim, head_dim=head_dim)
    assert again.head_dim == head_dim
    assert all(torch.equal(x, y) for x, y in zip(again.gather(0, 0), cache.gather(0, seq), strict=True))


def test_head_dim_of_pages_that_tell_it() -> None:
    rows, table = torch.zeros(2, 4, 1, 656, dtype=torch.uint8), torch.tensor([[0]])
    for pages, options, says in (
        (noise(2, 4, 1, 24), {"value_dim": 16, "head_dim": 24}, "head_dim goes with value_dim and rows of bytes"),
        (rows, {"value_dim": 512, "head_dim": 574}, "and two more for each channel of the rotary part"),
        (rows, {"value_dim": 512, "head_dim": 511}, "head_dim must be at least 512"),
    ):
        with pytest.raises(ValueError, match=says):
            PagedKVCache.from_pages(pages, None, table, torch.tensor([3]), **options)


@pytest.mark.usefixtures("written_by")
def test_q_that_cannot_be_turned_in_place() -> None:
    cache, turn = latent(), Rotary(*angles(4))
    seq = cache.allocate()
    slots = cache.extend([seq], 2)
    for q, says in (
        (noise(2, 1, 24).expand(2, 3, 24), "q is turned in place, and several of its elements share memory"),
        (noise(2, 3, 24).requires_grad_(), "q is turned in place, and requires gradients"),
    ):
        before = snapshot(cache)
        with pytest.raises(ValueError, match=says):
            cache.write(0, slots, noise(2, 1, 24), rotary=turn, q=q)
        assert snapshot(cache) == before


@pytest.mark.usefixtures("written_by")
def test_bad_writes_change_nothing() -> None:
    cache, apart = latent(), PagedKVCache(4, 4, 1, 24, value_dim=16)
    kv, turn = noise(2, 1, 24), Rotary(*angles(5))
    seq, other = cache.allocate(), apart.allocate()
    cache.write(0, cache.extend([seq], 2), kv)
    slots, its = cache.extend([seq], 2), apart.extend([other], 2)
    bad: list[tuple[Any, type[Exception], str]] = [
        (lambda: cache.write(0, slots, kv, kv[..., :16]), ValueError, "v must be left out with shared_kv"),
        (lambda: cache.write(0, slots, kv[..., :16]), ValueError, "^k .*24"),
        (lambda: cache.write(0, slots, kv.expand(2, 2, 24)), ValueError, "^k "),
        (lambda: cache.write(0, slots, kv, rotary=turn), ValueError, "turns 10 channels .* 8"),
        (lambda: cache.write(0, slots, None), TypeError, "^k "),
        (lambda: apart.write(0, its, kv), TypeError, "v must be given"),
        (lambda: apart.write(0, its, kv, kv), ValueError, "^v .*16"),
        (lambda: cache.rows(0), ValueError, r"rows\(\) is of quantised"),
        (lambda: cache.load_tokens(0, seq, torch.tensor([4]), torch.float32), ValueError, "positions"),
        (lambda: cache.load_tokens(0, seq, torch.tensor([3]), torch.float32), ValueError, "not all written"),
    ]
    before = snapshot(cache), snapshot(apart)
    for call, error, says in bad:
        with pytest.raises(error, match=says):
            call()
        assert (snapshot(cache), snapshot(apart)) == before


@pytest.mark.parametrize(
    ("pages", "v_pages", "value_dim", "error", "says"),
    [
        (noise(2, 4, 1, 24), None, None, ValueError, "value_dim must be given with v_pages None"),
        (noise(2, 4, 1, 24), noise(2, 4, 1, 24), 16, ValueError, "value_dim goes with v_pages None"),
        (noise(2, 4, 1, 24), None, 25, ValueError, "value_dim must be at most head_dim 24"),
        (noise(2, 4, 2, 24), None, 16, ValueError, "num_kv_heads must be 1"),
        (noise(2, 4, 1, 24), noise(2, 3, 1, 24), None, ValueError, "v_pages"),
        (torch.zeros(2, 4, 1, 656, dtype=torch.uint8), noise(2, 4, 1, 24), None, ValueError, "k_pages"),
        (noise(2, 4, 1, 576), None, 577, ValueError, "value_dim must be at most head_dim 576"),
        (torch.zeros(2 * 4 * 656 + 2, dtype=torch.uint8)[2:].view(2, 4, 1, 656), None, 512, ValueError,
         r"k_pages must have rows that begin at multiples of 4 bytes .* got offset 2 .*; use k_pages.clone\(\)"),
        (torch.zeros(2, 4, 1, 655, dtype=torch.uint8), None, 512, ValueError, "rows of 528 bytes for value_dim 512"),
        (torch.zeros(2, 4, 1, 500, dtype=torch.uint8), None, 512, ValueError, "rows of 528 bytes for value_dim 512"),
        (torch.zeros(2, 4, 1, 4000, dtype=torch.int8), None, 512, NotImplementedError, "head_dim of k_pages is 2248"),
        (torch.zeros(2, 4, 1, 656, dtype=torch.float64), None, 512, ValueError, "k_pages"),
    ],
)  # fmt: skip
def test_bad_pages(pages: Any, v_pages: Any, value_dim: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.compile(says)):
        PagedKVCache.from_pages(pages, v_pages, torch.tensor([[0]]), torch.tensor([3]), value_dim=value_dim)
