"""Schedules on a card: the emulator's checks on larger shapes; no waits, graphs over changing contents, and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from schedule_kernel_cases import check_lists, check_pack, check_scatter, check_select, check_turned, geometry
from test_schedules import FLOATS, KINDS, bools, chance, hostile, scores_of

from tilewise import arch
from tilewise.plan.schedule import BlockSchedule

pytestmark = pytest.mark.gpu
CUDA = "cuda"
SHAPES = ((1, 1), (3, 5, 31), (2, 3, 40, 33), (1, 16, 64, 256), (7, 129, 1000), (2, 1, 5, 5000))


# ---- the emulator's checks, larger -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_and_lists(shape: tuple[int, ...]) -> None:
    for seed, density in enumerate((0.0, 0.1, 0.5, 1.0)):
        kept, whole = (bools(*shape, seed=seed + n, density=density).to(CUDA) for n in (0, 10))
        check_pack(kept, whole)
        check_turned(kept, whole)
        for width in (None, 7, shape[-1] + 3):
            check_lists(kept, width)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scatter(dtype: torch.dtype) -> None:
    for seed in range(30):
        cols, width = 1 + 37 * seed, seed * seed
        counts = hostile(seed, 2, 3, 11, cols=width + 1, dtype=dtype).to(CUDA)
        indices = hostile(seed + 1, 2, 3, 11, width, cols=cols, dtype=dtype).to(CUDA)
        full_counts = hostile(seed + 2, 2, 3, 11, cols=6, dtype=dtype).to(CUDA)
        full_indices = hostile(seed + 3, 2, 3, 11, 5, cols=cols, dtype=dtype).to(CUDA)
        check_scatter(counts, indices, cols)
        check_scatter(counts, indices, cols, full_counts, full_indices)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("nk", [1, 33, 100, 640, 1000, 1025, 5000, 8192, 8193, 65536])
def test_select(nk: int, dtype: torch.dtype) -> None:
    for seed, kind in enumerate(KINDS):
        rows = 2 if nk > 2000 else 9
        x = scores_of(kind, 2, rows, nk, seed=seed, dtype=dtype).to(CUDA)
        sizes = geometry(rows, nk, 64, 16, less=seed)
        for wanted in ({"top_k": 64}, {"top_k": 1}, {"threshold": 0.9}, {"threshold": 1.0}):
            check_select(x.abs() if "threshold" in wanted else x, wanted, sizes, causal=seed % 2 == 1)


# ---- through the class -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the card raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def made(kept: torch.Tensor, scores: torch.Tensor, lists: tuple[torch.Tensor, ...]) -> dict[str, BlockSchedule]:
    sizes = geometry(kept.shape[-2], kept.shape[-1], 64, 32, less=9)
    more = {"lengths_q": torch.full((kept.shape[-2],), 30, device=kept.device, dtype=torch.int32)}
    schedules = {
        "blocks": BlockSchedule.from_blocks(kept, whole=kept, **sizes, **more),
        "lists": BlockSchedule.from_lists(lists[0], lists[1], **sizes),
        "full lists": BlockSchedule.from_lists(*lists[:2], full_counts=lists[2], full_indices=lists[3], **sizes),
        "largest": BlockSchedule.from_scores(scores, top_k=5, causal=True, **sizes),
        "share": BlockSchedule.from_scores(scores, threshold=0.6, **sizes),
    }
    return schedules | {f"{name} turned": x.transpose() for name, x in schedules.items()}


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """bools, scores and sorted, disjoint lists of 12 × 70 blocks."""
    kept = bools(2, 3, 12, 70, seed=seed)
    whole = kept & bools(2, 3, 12, 70, seed=seed + 1)
    sizes = geometry(12, 70)
    parts = (BlockSchedule.from_blocks(x, **sizes).lists() for x in (kept & ~whole, whole))
    scores = torch.rand(2, 3, 12, 70, generator=chance(seed))
    return kept, scores, tuple(x for pair in parts for x in pair)


def to_cuda(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(to_cuda(x) if isinstance(x, tuple) else x.to(CUDA) for x in given)


def test_the_same_schedules_as_on_the_cpu(no_waiting: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    there = to_cuda(inputs(0))
    made(*there)  # loads the kernels
    torch.cuda.set_sync_debug_mode("error")
    schedules = made(*there)
    counts = {name: schedule.counts for name, schedule in schedules.items()}
    lists = {name: schedule.lists(9) for name, schedule in schedules.items()}
    text = {name: repr(schedule) for name, schedule in schedules.items()}
    _ = {schedule: hash(schedule) for schedule in schedules.values()}
    torch.cuda.set_sync_debug_mode("default")
    for name, expected in made(*inputs(0)).items():
        assert schedules[name].device.type == "cuda", name
        assert text[name].endswith("on cuda:0)")
        assert schedules[name].cpu() == expected, name
        assert torch.equal(counts[name].cpu(), expected.counts), name
        assert all(torch.equal(x.cpu(), y) for x, y in zip(lists[name], expected.lists(9), strict=True)), name
        assert expected.to(CUDA).cpu() == expected
        assert expected.cuda().device == torch.device("cuda", torch.cuda.current_device())
        assert schedules[name].to(CUDA) is schedules[name]
        assert schedules[name] != expected
        assert torch.equal(schedules[name].to_mask(), expected.to_mask())
        schedules[name].check()


def test_a_graph_makes_schedules_of_what_its_inputs_hold() -> None:
    static = to_cuda(inputs(0))
    made(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        schedules = made(*static)
        lists = {name: schedule.lists() for name, schedule in schedules.items()}
    for seed in (1, 2, 3):
        kept, scores, parts = inputs(seed)
        for to, x in zip((*static[:2], *static[2]), (kept, scores, *parts), strict=True):
            to.copy_(x)
        graph.replay()
        for name, expected in made(kept, scores, parts).items():
            assert schedules[name].cpu() == expected, name
            assert all(torch.equal(x.cpu(), y) for x, y in zip(lists[name], expected.lists(), strict=True)), name


def test_check_tells() -> None:
    sizes = geometry(3, 4)
    counts, indices = torch.tensor([1, 2, 1], device=CUDA), torch.tensor([[0, 0], [2, 1], [3, 0]], device=CUDA)
    schedule = BlockSchedule.from_lists(counts, indices, **sizes)
    assert schedule.row(1).tolist() == [1, 2]
    with pytest.raises(ValueError, match="key blocks that are not ascending in query block 1 of head 0"):
        schedule.check()
    lengths = torch.tensor([16, 99, -3], device=CUDA)
    schedule = BlockSchedule.from_lists(counts, indices.sort(-1).values, lengths_q=lengths, **sizes)
    with pytest.raises(ValueError, match="lengths_q must be between 0 and the block size 16"):
        schedule.check()
    negative = BlockSchedule.from_scores(-torch.ones(3, 4, device=CUDA), threshold=0.5, **sizes)
    with pytest.raises(ValueError, match="negative scores"):
        negative.check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths_q": torch.ones(3, dtype=torch.int32)}, "lengths_q must be on cuda:0 like the pattern, got cpu"),
        ({"whole": torch.ones(3, 4, dtype=torch.bool)}, "whole must be on cuda:0 like blocks, got cpu"),
    ],
)
def test_tensors_elsewhere_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockSchedule.from_blocks(torch.ones(3, 4, dtype=torch.bool, device=CUDA), **geometry(3, 4), **change)


# ---- speed -----------------------------------------------------------------------------------------------------------


def device_us(call: Callable[[], Any]) -> float:
    """µs of a call on the card: many of them in a graph, the best of several replays."""
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 20)
    return min(times)


def host_us(call: Callable[[], Any]) -> float:
    """µs of a call on the host, which runs ahead of the card."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        times.append((time.perf_counter() - start) * 1e6 / 50)
    torch.cuda.synchronize()
    return min(times)


@pytest.mark.skipif(arch.chosen is not None, reason="speed is asked of a card as it is: leave out TILEWISE_CARD")
def test_speed() -> None:
    """Bounds of about twice what is aimed at: 3 µs for blocks, 20 µs for the largest scores, 20 µs of the host."""
    kept = bools(16, 256, 256).to(CUDA)
    scores = torch.rand(16, 640, 640, generator=chance(0)).to(CUDA)
    coarse, fine = geometry(256, 256, 64, 64), geometry(640, 640, 64, 64)
    lists = BlockSchedule.from_blocks(kept, **coarse).lists()
    for name, call, most in (
        ("from_blocks, 16 × 256 × 256", lambda: BlockSchedule.from_blocks(kept, **coarse), 8.0),
        ("from_lists, the same, half kept", lambda: BlockSchedule.from_lists(*lists, **coarse), 20.0),
        ("from_scores, 16 × 640 × 640, top 64", lambda: BlockSchedule.from_scores(scores, top_k=64, **fine), 35.0),
        ("the same, 0.9 of the sum", lambda: BlockSchedule.from_scores(scores, threshold=0.9, **fine), 80.0),
        ("lists of 16 × 256 × 256", lambda: BlockSchedule.from_blocks(kept, **coarse).lists(), 30.0),
    ):
        on_card, on_host = device_us(call), host_us(call)
        print(f"{name}: {on_card:.1f} µs on the card, {on_host:.1f} µs on the host")
        assert on_card < most, name
        assert on_host < 80.0, name
