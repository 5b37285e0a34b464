"""The cache, the tree and the append kernel on a card: the properties of the CPU's tests, then streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import test_append
import test_append_rows
import test_paged
import test_paged_places
import test_paged_refusals
import test_paged_rotary
import test_prefix
import test_prefix_eviction
import test_prefix_refusals
import torch
from hypothesis import settings
from paged_cases import best_of, check_pages, fill, noise, python_loop
from paged_machine import PagedCacheMachine
from prefix_machine import PrefixCacheMachine

from tilewise.kvcache import FORMATS, PagedKVCache, PrefixCache, Rotary, Slots

pytestmark = pytest.mark.gpu

# The CPU's tests, which this file runs again on a card.
MODULES = (
    *(test_paged, test_paged_places, test_paged_refusals, test_paged_rotary),
    *(test_prefix, test_prefix_eviction, test_prefix_refusals),
    *(test_append, test_append_rows),
)
# These are about the host.
NOT_HERE = {
    "test_compiles_without_spills",
    "test_into_on_the_host_is_taken_too",
    "test_q_and_its_refusals",
    "test_the_tree_hears_of_replayed_steps",
}


def borrowed(module: ModuleType) -> dict[str, Any]:
    """Its test functions under names of this module's own: each makes its tensors on the default device."""
    short = module.__name__.removeprefix("test_")
    return {
        f"test_{short}_{name.removeprefix('test_')}": test
        for name, test in vars(module).items()
        if name.startswith("test_") and callable(test) and name not in NOT_HERE
    }


for module in MODULES:
    globals().update(borrowed(module))
by_kernel = test_append.by_kernel  # a fixture of theirs; here every cache is


class TestPagedCacheMachine(PagedCacheMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


class TestPrefixCacheMachine(PrefixCacheMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.fixture
def written_by() -> str:
    """In place of the CPU's fixture: here there is one way."""
    return "kernels"


@pytest.fixture(autouse=True)
def on_the_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches and tensors whose device is not said are on the card."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setitem(PagedKVCache.__init__.__kwdefaults__, "device", "cuda")
    with torch.device("cuda"):
        yield


def angles(positions: int, pairs: int) -> Rotary:
    turns = torch.arange(positions)[:, None] * 0.9 ** torch.arange(pairs)
    return Rotary(turns.cos(), turns.sin())


# ---- large steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_prompt_is_the_same_as_on_the_cpu(name: str) -> None:
    k, v = noise(2, 5000, 8, 128, dtype=torch.bfloat16)
    rotary = angles(5000, 64)
    caches = [PagedKVCache(400, 16, 8, 128, num_layers=2, kv_format=name, device=device) for device in ("cuda", "cpu")]
    got = []
    for cache in caches:
        seqs = [cache.allocate(), cache.allocate()]
        slots = cache.extend(seqs, [4000, 1000])
        turn = Rotary(rotary.cos.to(cache.device), rotary.sin.to(cache.device))
        cache.write(1, slots, k.to(cache.device), v.to(cache.device), rotary=turn)
        got.append([x.cpu() for seq in seqs for x in cache.gather(1, seq)])
    for mine, its in zip(*got, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_many_copies_in_one_step(page_size: int) -> None:
    cache = PagedKVCache(2000, page_size, 2, 64, num_layers=3, kv_format="int4")
    a = cache.allocate()
    fill(cache, cache.extend([a], 3 * page_size - page_size // 2))
    before = [cache.gather(layer, a) for layer in range(3)]
    forks = [cache.fork(a) for _ in range(100)]
    fill(cache, cache.extend(forks, 1), seed=1)
    for seq in forks[::7]:
        for layer in range(3):
            for mine, its in zip(cache.gather(layer, seq), before[layer], strict=True):
                assert torch.equal(mine[: len(its)], its)
    check_pages(cache)


# ---- nothing waits ---------------------------------------------------------------------------------------------------


def test_no_step_waits_for_the_device() -> None:
    cache = PagedKVCache(200, 4, 2, 16, num_layers=2, kv_format="int8")
    rotary = angles(100, 8)
    k, q = noise(3, 2, 16), noise(3, 4, 16)

    def steps() -> None:
        a, b = cache.allocate(), cache.allocate()
        slots = cache.extend([a, b], [2, 1])
        for layer in range(2):
            cache.write(layer, slots, k, k, rotary=rotary, q=q)
        c = cache.fork(a)
        slots = cache.extend([c, a, b], 1)  # copies a page
        for layer in range(2):
            cache.write(layer, slots, k, k, rotary=(rotary.cos, rotary.sin))
        slots = cache.extend([a, b], 1, into=slots)
        cache.mark_written(slots)
        cache.page_table([a, b, c])
        cache.gather(0, c)
        for seq in (a, b, c):
            cache.free(seq)

    steps()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_decode_step_costs_the_host_little() -> None:
    cache = PagedKVCache(8192, 16, 1, 8, num_layers=2)
    seqs = [cache.allocate() for _ in range(256)]
    slots = cache.extend(seqs, [100 + i % 16 for i in range(256)])
    fill(cache, slots)
    step, loop = best_of(50, lambda: cache.extend(seqs, 1), python_loop(256))
    assert step < 12 * loop, "a loop over the sequences, or a wait for the card"
    torch.cuda.synchronize()


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_pages_freed_while_another_stream_reads() -> None:
    """The documented rule: who reads on another stream is waited for before its sequence is freed."""
    cache = PagedKVCache(1, 256, 8, 128, kv_format="bf16")
    reader = torch.cuda.Stream()
    for step in range(20):
        seq = cache.allocate()
        k, v = noise(2, 256, 8, 128, dtype=torch.bfloat16, seed=step)
        cache.write(0, cache.extend([seq], 256), k, v)
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            torch.cuda._sleep(2_000_000)  # about a millisecond: the next step's write would overtake it
            read = cache.gather(0, seq)
        torch.cuda.current_stream().wait_stream(reader)
        cache.free(seq)  # there is one page, and the next step has it
        for mine, its in zip(read, (k, v), strict=True):
            mine.record_stream(torch.cuda.current_stream())
            assert torch.equal(mine, its)


def test_a_step_on_another_stream() -> None:
    cache = PagedKVCache(64, 4, 2, 16, num_layers=2, kv_format="fp8")
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        seq = cache.allocate()
        torch.cuda._sleep(1_000_000)
        written = fill(cache, cache.extend([seq], 50))
        got = cache.gather(1, seq)
    torch.cuda.current_stream().wait_stream(other)
    form = cache.format
    assert torch.equal(got[0], form.decode(form.encode(written[1][0])))


# ---- graphs ----------------------------------------------------------------------------------------------------------

LAYERS = 3


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_captured_step_is_replayed(name: str) -> None:
    """Against a cache that writes the same without a graph, while sequences grow over pages, and some leave."""
    caches = [PagedKVCache(256, 4, 2, 32, num_layers=LAYERS, kv_format=name) for _ in range(2)]
    rotary = angles(200, 16)
    batch = 6
    k, v = (torch.zeros(LAYERS, batch, 2, 32, dtype=torch.bfloat16) for _ in range(2))

    def write(cache: PagedKVCache, slots: Slots) -> None:
        for layer in range(LAYERS):
            n = len(slots)
            cache.write(layer, slots, k[layer, :n], v[layer, :n], rotary=rotary)

    for cache in caches:
        seqs = [cache.allocate() for _ in range(batch)]
        fill(cache, cache.extend(seqs, [3, 4, 5, 0, 11, 7]))
        write(cache, cache.extend(seqs, 1))  # compiles
    mine, plain = caches
    graph = torch.cuda.CUDAGraph()
    slots = mine.extend(seqs, 1)
    with torch.cuda.graph(graph):
        write(mine, slots)
        with pytest.raises(RuntimeError, match="capture"):
            mine.extend(seqs, 1)
    graph.replay()
    write(plain, plain.extend(seqs, 1))
    for step in range(12):
        living = seqs[: batch - step // 3]
        k.copy_(noise(LAYERS, batch, 2, 32, seed=2 * step))
        v.copy_(noise(LAYERS, batch, 2, 32, seed=2 * step + 1))
        slots = mine.extend(living, 1, into=slots)
        graph.replay()
        mine.mark_written(slots)
        write(plain, plain.extend(living, 1))
    for seq in seqs:
        for layer in range(LAYERS):
            for a, b in zip(mine.gather(layer, seq), plain.gather(layer, seq), strict=True):
                assert torch.equal(a, b)
    check_pages(mine)


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_rows_that_are_keys_and_values(name: str) -> None:
    """DeepSeek's rows, written, turned, forked and copied on the card, are the CPU's to the bit."""
    sizes: dict[str, Any] = {"head_dim": 576, "value_dim": 512, "shared_kv": True, "num_layers": 2, "kv_format": name}
    caches = [PagedKVCache(24, 16, 1, device=device, **sizes) for device in ("cuda", "cpu")]
    queries = []
    for cache in caches:
        turns = angles(200, 32)
        rotary = Rotary(turns.cos.to(cache.device), turns.sin.to(cache.device))
        root = cache.allocate()
        for step, seqs in enumerate(([root], [root, *cache.fork(root, 2)])):
            slots = cache.extend(seqs, [37] if step == 0 else [1, 5, 20])
            for layer in range(2):
                kv = noise(len(slots), 1, 576, seed=10 * step + layer, dtype=torch.bfloat16).to(cache.device)
                q = noise(len(slots), 3, 576, seed=99, dtype=torch.bfloat16).to(cache.device)
                cache.write(layer, slots, kv, rotary=rotary, q=q)
                queries.append(q.cpu())
    half = len(queries) // 2
    for mine, plain in zip(queries[:half], queries[half:], strict=True):
        assert torch.equal(mine, plain)
    for seq in caches[0].lengths:
        for layer in range(2):
            for mine, plain in zip(*(cache.gather(layer, seq) for cache in caches), strict=True):
                assert torch.equal(mine.cpu(), plain)


def test_steps_into_the_same_arrays_do_not_overtake_each_other() -> None:
    """Many steps under way at once: each copy of places comes after the write that reads the ones before it."""
    cache = PagedKVCache(600, 1, 1, 8, kv_format="fp32")
    seqs = [cache.allocate() for _ in range(4)]
    k = noise(4, 1, 8)
    slots = cache.extend(seqs, 1)
    cache.write(0, slots, k, k)
    graph = torch.cuda.CUDAGraph()
    slots = cache.extend(seqs, 1, into=slots)
    with torch.cuda.graph(graph):
        cache.write(0, slots, k, k)
    graph.replay()
    torch.cuda._sleep(20_000_000)
    for step in range(100):
        slots = cache.extend(seqs, 1, into=slots)
        k.fill_(step)
        graph.replay()
        cache.mark_written(slots)
    for seq in seqs:
        assert cache.gather(0, seq)[0][2:, 0, 0].tolist() == list(range(100))


def test_the_tree_over_a_captured_step() -> None:
    prefix = PrefixCache(PagedKVCache(64, 4, 1, 2, num_layers=1, kv_format="fp32"))
    seq, _, slots = prefix.insert(range(6))
    prefix.cache.write(0, slots, noise(6, 1, 2), noise(6, 1, 2))
    k = noise(1, 1, 2)
    slots = prefix.extend([seq], [6])
    prefix.cache.write(0, slots, k, k)
    graph = torch.cuda.CUDAGraph()
    slots = prefix.extend([seq], [7], into=slots)
    with torch.cuda.graph(graph):
        prefix.cache.write(0, slots, k, k)
    graph.replay()
    for token in range(8, 20):
        slots = prefix.extend([seq], [token], into=slots)
        k.fill_(token)
        graph.replay()
        prefix.cache.mark_written(slots)
    assert prefix.stats().cached_tokens == 20
    assert prefix.cache.gather(0, seq)[0][8:, 0, 0].tolist() == list(range(8, 20))
    assert prefix.insert([*range(20), 1])[1] == 20
