"""The append kernel in the emulator: every byte is what KVFormat.encode makes, and the cache over it is the cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import prefix_cases
import pytest
import torch
from paged_cases import check_pages, fill, noise, snapshot

from tilewise import compiler
from tilewise.gpu import append as kernels
from tilewise.kvcache import FORMATS, KVFormat, OutOfPages, PagedKVCache, Rotary, storage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
HEAD_DIMS = (1, 40, 64, 96, 128, 192, 256, 512)
POSITIONS = 60
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits as integers, those of every NaN alike: torch itself makes various ones, by the width of its vectors."""
    whole = x.contiguous()
    nan = whole.float().isnan() if x.dtype.is_floating_point else torch.tensor(False, device="cpu")
    return whole.view(BITS[x.element_size()]).masked_fill(nan, 1)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(bits(got.cpu()), bits(want.cpu()))


def here() -> torch.device:
    """The CPU, or a card where test_cache_gpu runs these tests."""
    return torch.get_default_device()


def pages_for(form: KVFormat, pages: int, size: int, heads: int) -> list[torch.Tensor]:
    """One layer of components as a card has them, every byte 0x5a."""
    parts = storage.allocate(form, (1, pages, size, heads), here(), for_kernels=True)
    for part in parts:
        torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).fill_(0x5A)
    return [part[0] for part in parts]


def chance(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def angles(pairs: int, dtype: torch.dtype = FP32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    turns = 6.3 * torch.rand(POSITIONS, pairs, generator=chance(seed), device="cpu")
    return turns.cos().to(here(), dtype), turns.sin().to(here(), dtype)


def check(
    form: KVFormat,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    page_size: int = 4,
    rotary: Rotary | None = None,
    q: torch.Tensor | None = None,
    absent: int = 0,
    seed: int = 0,
    **emulator: Any,
) -> None:
    """Run the kernel over random places; the pages hold what torch would write there, and elsewhere nothing changed."""
    tokens, heads, _ = k.shape
    pages, rng = tokens // page_size + 3, chance(seed)
    index = torch.randperm(pages * page_size, generator=rng, device="cpu")[:tokens]
    index[:absent] = -1
    positions = torch.randint(0, POSITIONS, (tokens,), generator=rng, device="cpu")
    got, want = ([pages_for(form, pages, page_size, heads) for _ in range(2)] for _ in range(2))
    turned_k, turned_q = k.cpu(), None if q is None else q.cpu().clone()
    if rotary is not None:
        on_host = Rotary(rotary.cos.cpu(), rotary.sin.cpu(), rotary.interleaved)
        turned_k = on_host.apply(turned_k, positions)
        if turned_q is not None:
            turned_q[absent:] = on_host.apply(turned_q, positions)[absent:]
    kernels.append(form, k, v, *got, positions.to(here()), index.to(here()), rotary, q, **emulator)
    for parts, its, x in zip(got, want, (turned_k, v.cpu()), strict=True):
        for mine, part, encoded in zip(parts, its, form.encode(x), strict=True):
            flat = storage.as_bytes(part.cpu()).reshape(pages * page_size, *part.shape[2:]).clone()
            flat[index[absent:]] = storage.as_bytes(encoded)[absent:]
            assert_same(mine, flat.view(part.dtype).view(part.shape))
    if q is not None and turned_q is not None:
        assert_same(q, turned_q)


# ---- every format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_head_dims(name: str, head_dim: int) -> None:
    for number, dtype in enumerate(DTYPES if head_dim in (40, 128) else (BF16,)):
        for page_size, group in ((1, 32), (16, 64), (64, 128)):
            form = KVFormat(name, head_dim, group)
            k, v = noise(2, 9, 3, head_dim, dtype=dtype, seed=number)
            check(form, k, v, page_size=page_size, seed=page_size)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_rotary(name: str, interleaved: bool) -> None:
    sizes = ((2, 2), (40, 40), (64, 64), (64, 0), (128, 128), (128, 64), (128, 20), (250, 250), (512, 512))
    for head_dim, rotated in sizes:
        form = KVFormat(name, head_dim, 32)
        k, v = noise(2, 5, 2, head_dim, dtype=BF16, seed=head_dim)
        check(form, k, v, rotary=Rotary(*angles(rotated // 2), interleaved))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", DTYPES)
def test_rotary_dtypes(dtype: torch.dtype, table: torch.dtype) -> None:
    k, v = noise(2, 5, 2, 64, dtype=dtype)
    for name in ("fp32", "int8"):
        check(KVFormat(name, 64), k, v, rotary=Rotary(*angles(32, table)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [40, 128, 512])
def test_q_turns_in_the_same_launch(head_dim: int, interleaved: bool) -> None:
    for heads_q, seed in ((1, 0), (7, 1), (16, 2)):
        k, v = noise(2, 6, 2, head_dim, dtype=BF16, seed=seed)
        q = noise(6, heads_q, head_dim, dtype=BF16, seed=9)
        for rotated in (head_dim, 16):
            rotary = Rotary(*angles(rotated // 2), interleaved)
            check(KVFormat("fp8", head_dim), k, v, rotary=rotary, q=q.clone(), seed=seed, late=False)
            check(KVFormat("bf16", head_dim), k, v, rotary=rotary, q=q.clone(), absent=2)


def test_tokens_that_are_not_there_are_skipped() -> None:
    """As in the graph of a larger batch. Their keys may be anything."""
    for name in FORMATS:
        k, v = noise(2, 9, 2, 64, dtype=BF16)
        k[:3], v[:3] = torch.nan, torch.inf
        check(KVFormat(name, 64), k, v, absent=3)
        check(KVFormat(name, 64), k, v, absent=9)


def test_compiles_without_spills() -> None:
    for spec in kernels.specs():
        for arch in ("sm_80", "sm_90a"):
            report = compiler.compile(spec, arch).report
            assert not report.spills, (str(spec), arch)
            blocks = 4 if dict(spec.constants).get("kChunks", 1) == 1 else 3  # of 256 threads, at least
            assert report.registers <= 65536 // (256 * blocks), (str(spec), arch)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def layouts(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    packed = noise(tokens, 3 * heads, head_dim, dtype=dtype)
    yield packed[:, heads : 2 * heads], packed[:, 2 * heads :]  # of a fused projection
    by_head = noise(2, heads, tokens, head_dim, dtype=dtype)
    yield by_head[0].transpose(0, 1), by_head[1].transpose(0, 1)
    wide = noise(2, tokens, heads, head_dim + 3, dtype=dtype)  # rows that lie on no 16 bytes
    yield wide[0, ..., :head_dim], wide[1, ..., 3:]
    one = noise(2, tokens, 1, head_dim, dtype=dtype)  # one head for all
    yield one[0].expand(tokens, heads, head_dim), one[1].expand(tokens, heads, head_dim)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", FORMATS)
def test_strides(name: str, dtype: torch.dtype) -> None:
    for head_dim in (64, 33):
        for k, v in layouts(6, 3, head_dim, dtype):
            check(KVFormat(name, head_dim, 32), k, v)
            check(KVFormat(name, head_dim, 32), k, v, rotary=Rotary(*angles(16)))


def test_table_strides() -> None:
    k, v = noise(2, 5, 2, 64, dtype=BF16)
    cos, sin = angles(32)
    both = torch.stack([cos, sin], -1)  # as the real view of complex numbers
    wide = torch.cat([cos, cos, sin, sin], 1)  # rows of another length
    odd = torch.cat([cos[:, :1], cos, sin], 1)
    for c, s in ((both[..., 0], both[..., 1]), (wide[:, :32], wide[:, 64:96]), (odd[:, 1:33], odd[:, 33:])):
        for interleaved in (False, True):
            check(KVFormat("fp16", 64), k, v, rotary=Rotary(c, s, interleaved))


def test_pages_of_others() -> None:
    """K and V of one tensor, the heads of both side by side; rows that are padded; pages of one token among others."""
    form = KVFormat("bf16", 40)
    both = torch.zeros(6, 4, 2, 2, 40, dtype=BF16)
    padded = torch.zeros(2, 6, 4, 2, 43, dtype=BF16)[..., :40]
    single = torch.zeros(2, 24, 3, 2, 40, dtype=BF16)[:, :, :1]
    k, v = noise(2, 7, 2, 40, dtype=BF16)
    index = torch.randperm(24)[:7]
    for k_pages, v_pages in (both.unbind(2), padded, single):
        kernels.append(form, k, v, [k_pages], [v_pages], torch.zeros(7).long(), index)
        assert torch.equal(k_pages.reshape(24, 2, 40)[index], k)
        assert torch.equal(v_pages.reshape(24, 2, 40)[index], v)


def test_order_of_threads_does_not_matter() -> None:
    k, v = noise(2, 20, 3, 128, dtype=BF16)
    for seed in (1, 2, 3):
        q = noise(20, 4, 128, dtype=BF16)
        check(KVFormat("int4", 128), k, v, rotary=Rotary(*angles(64)), q=q, absent=seed, late=seed % 2 == 0)


# ---- hostile values --------------------------------------------------------------------------------------------------

TOP = torch.finfo(FP32).max
TINY = 2.0**-149
HOSTILE = (
    [0.0] * 8,
    [-0.0, 0.0] * 4,
    [torch.nan] * 8,
    [1.0, torch.nan, 2.0, 3.0, -1.0, 0.0, 5.0, 7.0],
    [torch.inf, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    [-torch.inf, torch.inf, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    [TOP, -TOP, 1e38, -1e38, 1.0, 0.0, 3e38, -3e38],
    [TOP] * 8,
    [-TOP] * 8,
    [TINY, -TINY, 3 * TINY, 0.0, 7 * TINY, 2.0**-126, -(2.0**-127), 2.0**-130],
    [2.0**-126 * i for i in range(8)],
    [1e-30 * i * i for i in range(8)],
    [1.0, 1.0 + 2.0**-23, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    [1e30, 1e-30, 0.0, 1.0, -1e30, -1e-30, 1e10, 1e-10],
    [0.5, 1.5, 2.5, 3.5, -0.5, -1.5, 127.0, -126.5],  # ties: the int8 scale is 1
    [448.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 17.0, 19.0, 2.0**-6, 2.0**-6 - 2.0**-10],  # ties of e4m3, scale 1
    [-7.5, 7.5, 0.5, -0.5, 1.5, -1.5, 2.5, -6.5],
    [65504.0, 65519.0, 65520.0, 70000.0, -65536.0, 6e-8, 2.9e-8, 3.1e-8],  # the ends of float16
)


@pytest.mark.parametrize("head_dim", [8, 64, 512])
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_values(name: str, head_dim: int) -> None:
    rows = torch.tensor(HOSTILE, dtype=FP32)[:, None]  # (rows, 1, 8)
    mild = noise(len(rows), 1, head_dim - 8)
    for dtype in DTYPES:
        k = torch.cat([rows, mild], -1).to(dtype)
        v = torch.cat([mild * 0, rows.flip(-1)], -1).to(dtype)
        check(KVFormat(name, head_dim, 32), k, v)


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_values_turn(name: str) -> None:
    rows = torch.tensor(HOSTILE, dtype=FP32)[:, None]
    for interleaved in (False, True):
        for rotated in (8, 6):
            check(KVFormat(name, 8), rows, rows, rotary=Rotary(*angles(rotated // 2), interleaved))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_quotients_round_as_division_does(name: str) -> None:
    """Values beside the ties of random scales, where one last bit of the quotient would make another code."""
    rng, top = chance(1), {"fp8": 448.0, "int8": 127.0, "int4": 15.0}[name]
    exponents = torch.randint(-70, 70, (64, 1, 1), generator=rng, device="cpu")
    scales = torch.rand(64, 1, 1, generator=rng, device="cpu") * 2.0**exponents
    steps = torch.randint(0, 2 * int(top), (64, 2, 256), generator=rng, device="cpu") / 2
    x = torch.nextafter(scales * steps, torch.randn(64, 2, 256, generator=rng, device="cpu"))
    x[..., 0], x[..., 1] = scales[..., 0] * top, 0.0
    check(KVFormat(name, 256, 128), x.to(here()), (-x if name != "int4" else x + scales).to(here()))


# ---- copies of pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_copies_of_pages(name: str) -> None:
    for head_dim, size, heads in ((64, 16, 2), (33, 3, 1), (1, 1, 3), (40, 4, 5)):
        form = KVFormat(name, head_dim, 32)
        parts = storage.allocate(form, (3, 9, size, heads), here(), for_kernels=True)
        for part in parts:
            raw = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
            raw.copy_(torch.randint(0, 120, raw.shape, dtype=torch.uint8))
        want = copy.deepcopy(parts)
        old, new = np.array([3, 0, 3]), np.array([1, 8, 4])
        for stored in map(storage.as_bytes, want):
            stored[:, new] = stored[:, old]
        storage.copy_pages(parts, old, new, by_kernel=True)
        for mine, its in zip(parts, want, strict=True):
            assert_same(mine, its)


# ---- the cache over the kernels --------------------------------------------------------------------------------------


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on the CPU do as on a card: its layout, its kernels, its copies of where tokens go."""
    monkeypatch.setattr(storage, "uses_kernels", lambda device: True)


@pytest.mark.usefixtures("by_kernel")
def test_scales_of_a_head_are_contiguous_in_a_page() -> None:
    for name, trailing in (("int8", [(40,), (1,)]), ("int4", [(20,), (2,), (2,)])):
        cache = PagedKVCache(5, 16, 3, 40, num_layers=2, kv_format=name, group_size=32)
        for parts in cache.parts(1):
            assert [x.shape for x in parts] == [(5, 16, 3, *last) for last in trailing]
            assert parts[0].is_contiguous()
            assert all(x.transpose(1, 2).is_contiguous() for x in parts[1:])
        assert cache.nbytes == 5 * 16 * cache.bytes_per_token


@pytest.mark.parametrize("kernel", [False, True])
def test_q_and_its_refusals(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "uses_kernels", lambda device: kernel)
    cache = PagedKVCache(8, 4, 2, 16, kv_format="fp32")
    slots = cache.extend([cache.allocate()], 5)
    k, q = noise(5, 2, 16), noise(5, 6, 16, seed=1)
    rotary = Rotary(*angles(8))
    before = q.clone()
    for bad, says in ((q[:4], "^q must"), (q.half(), "^q must"), (q[..., :8], "^q must")):
        with pytest.raises(ValueError, match=says):
            cache.write(0, slots, k, k, rotary=rotary, q=bad)
    with pytest.raises(ValueError, match=r"^q is turned"):
        cache.write(0, slots, k, k, q=q)
    assert torch.equal(q, before)
    cache.write(0, slots, k, k, rotary=rotary, q=q)
    assert torch.equal(q, rotary.apply(before, slots.positions))
    # Tables of two dtypes.
    mixed = Rotary(rotary.cos, rotary.sin.half())
    cache.write(0, slots, k, k, rotary=mixed)
    assert torch.equal(cache.gather(0, 0)[0], mixed.apply(k, slots.positions))


@pytest.mark.usefixtures("by_kernel")
def test_keys_need_dense_channels() -> None:
    cache = PagedKVCache(8, 4, 2, 8)
    slots = cache.extend([cache.allocate()], 5)
    k = noise(5, 2, 16)
    with pytest.raises(ValueError, match=r"^v must .*contiguous"):
        cache.write(0, slots, k[..., :8], k[..., ::2])


# ---- steps that are replayed -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_kernel")
def test_a_step_goes_into_the_arrays_of_another() -> None:
    """What a graph would do: launch on the same arrays again, which extend(into=) has filled anew."""
    cache = PagedKVCache(32, 4, 2, 8, num_layers=2, kv_format="fp32")
    seqs = [cache.allocate() for _ in range(5)]
    fill(cache, cache.extend(seqs, [3, 4, 0, 9, 1]))
    slots = cache.extend(seqs, 1)
    fill(cache, slots)
    positions, index = slots._places.tensor  # type: ignore[union-attr]
    for step, living in enumerate((seqs, seqs[:3], [], seqs[1:])):
        old, slots = slots, cache.extend(living, 1, into=slots)
        assert slots.index.data_ptr() == index.data_ptr() or not living
        assert slots.positions.tolist() == [cache.length(s) - 1 for s in living]
        assert index[len(living) :].tolist() == [-1] * (5 - len(living))
        k, v = noise(2, 5, 2, 8, seed=step)
        for layer in range(2):
            kernels.append(cache.format, k + layer, v, *cache.parts(layer), positions, index)
        if living:
            with pytest.raises(ValueError, match="write"):
                cache.gather(0, living[0])
            with pytest.raises(ValueError, match="mark_written"):
                cache.extend(living, 1, into=slots)
        cache.mark_written(slots)
        for row, seq in enumerate(living):
            for layer in range(2):
                assert torch.equal(cache.gather(layer, seq)[0][-1], k[row] + layer)
                assert torch.equal(cache.gather(layer, seq)[1][-1], v[row])
        for call in (
            lambda old=old, k=k, v=v: cache.write(0, old, k, v),
            lambda old=old: cache.mark_written(old),
            lambda old=old: cache.extend(seqs, 1, into=old),
            lambda old=old: old.index,
        ):
            with pytest.raises(ValueError, match="later step"):
                call()
    check_pages(cache)


@pytest.mark.usefixtures("by_kernel")
def test_into_refuses_and_changes_nothing() -> None:
    cache = PagedKVCache(6, 4, 1, 8)
    a, b = cache.allocate(), cache.allocate()
    slots = cache.extend([a], 2)
    fill(cache, slots)
    other = PagedKVCache(6, 4, 1, 8)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="room for 2 tokens, got 3"):
        cache.extend([a, b], [1, 2], into=slots)
    with pytest.raises(TypeError, match=r"^into must"):
        cache.extend([a], 1, into=slots.index)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another cache"):
        other.extend([other.allocate()], 1, into=slots)
    for call in (lambda: cache.mark_written((a,)), lambda: cache.extend([a], 1, into=7)):
        with pytest.raises(TypeError):
            call()
    cache.extend([b], 20)
    full = snapshot(cache)
    with pytest.raises(OutOfPages):
        cache.extend([b], 2, into=slots)
    assert snapshot(cache) == full
    cache.free(b)
    assert snapshot(cache)["sequences"][a] == before["sequences"][a]
    assert len(cache.extend([a], 2, into=slots)) == 2


def test_into_on_the_host_is_taken_too() -> None:
    cache = PagedKVCache(6, 4, 1, 8)
    a = cache.allocate()
    slots = cache.extend([a], 1)
    cache.mark_written(slots)
    assert slots.complete
    assert cache.extend([a], 5, into=slots).positions.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kernel", [False, True])
def test_the_tree_hears_of_replayed_steps(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "uses_kernels", lambda device: kernel)
    prefix = prefix_cases.make(32, 4)
    a, _ = prefix_cases.add(prefix, range(7))
    slots = prefix.extend([a], [7])
    prefix_cases.write(prefix, slots)
    for token in range(8, 12):
        slots = prefix.extend([a], [token], into=slots)
        prefix_cases.write(prefix, slots, [0])  # stands for the replay; layer 1 is left out and said to be written
        probe, reused, _ = prefix.insert(list(range(30)))
        assert reused == token
        prefix.release(probe)
        prefix.cache.mark_written(slots)
    assert prefix.stats().cached_tokens == 12
    prefix_cases.check_tree(prefix)


def test_more_layers_than_a_word_has_bits() -> None:
    cache = PagedKVCache(4, 4, 1, 4, num_layers=130, kv_format="fp32")
    a = cache.allocate()
    slots = cache.extend([a], 3)
    k = noise(3, 1, 4)
    for layer in range(130):
        assert not slots.complete
        with pytest.raises(ValueError, match=f"layer {layer}: write"):
            cache.gather(layer, a)
        cache.write(layer, slots, k + layer, k)
        assert torch.equal(cache.gather(layer, a)[0], k + layer)
    assert slots.complete
    b = cache.fork(a)
    cache.extend([b], 1)  # a copy of the page: every layer of it is written
    assert torch.equal(cache.load(129, cache.page_list(b), 0, 3, torch.float32)[0], k + 129)
