"""Random schedules and functions on a card against float64; graphs over what changes, streams, threads, bad lists."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from forward_cases import BF16, FP16, NAN, assert_close, oracle_on
from forward_cases import problem as tensors_of
from pattern_cases import FP8, Kind, Problem, sanitizer_problems
from pattern_parts import Blocks, Formula, random_mask, random_score

from tilewise import BlockSchedule, attention, reference, schedule_of

pytestmark = pytest.mark.gpu
CUDA = "cuda"
EACH = 13  # problems of a kind


def score(name: str) -> Formula:
    return Formula(name, score=True)


# What is compiled: about a forward each, and two where heads may be packed
SCHEDULES = (
    Kind(128, blocks=(128, 128)),
    Kind(128, FP16, heads=(4, 2), blocks=(128, 128), exact=True),
    Kind(128, blocks=(64, 64)),
    Kind(128, FP16, heads=(8, 1), blocks=(64, 64)),
    Kind(64, blocks=(128, 128), scale=0.2),
    Kind(64, heads=(6, 2), blocks=(64, 64)),
    Kind(128, blocks=(128, 64), lengths=True),
    Kind(128, blocks=(64, 128), lengths=True, exact=True),
    Kind(64, blocks=(16, 16)),
    Kind(128, FP16, blocks=(32, 48)),
    Kind(96, blocks=(112, 80), lengths=True),
    Kind(192, blocks=(128, 64)),
    Kind(256, blocks=(64, 128), scale=-0.1),
    Kind(256, FP16, blocks=(96, 96), lengths=True),
    Kind(40, heads=(3, 1), blocks=(64, 32)),
    Kind(20, FP16, blocks=(128, 16)),
    Kind(128, blocks=(64, 64), softcap=6.0, alibi=True),
    Kind(64, blocks=(64, 64), page_size=16),
    Kind(128, heads=(4, 1), blocks=(128, 128), page_size=64, lengths=True),
    Kind(64, blocks=(64, 64), tma=False),
)
FUNCTIONS = (
    Kind(64, mask=Formula("documents")),
    Kind(128, FP16, mask=Formula("2-D neighbourhood"), softcap=6.0),
    Kind(256, mask=Formula("causal")),
    Kind(128, heads=(6, 2), score=score("ALiBi")),
    Kind(64, score=score("relative bias table"), exact=True),
    Kind(192, FP16, score=score("softcap")),
    Kind(64, mask=Formula("window"), score=score("relative bias table"), page_size=16),
    Kind(128, blocks=(64, 64), mask=Formula("documents"), spares=True),
    Kind(64, blocks=(128, 128), mask=Formula("tree of drafts"), lengths=True),
    Kind(128, blocks=(32, 64), mask=Formula("dilated window"), score=score("ALiBi")),
    Kind(40, blocks=(64, 64), mask=Formula("window"), tma=False),
)
# head_dim, heads, blocks, and the seeds of a mask and of a score
EXPRESSIONS = (
    (64, (2, 2), None, 28, None),
    (128, (2, 2), None, 101, 3),
    (128, (2, 2), (64, 64), 48, None),
    (96, (3, 1), None, None, 39),
    (64, (2, 2), (128, 128), None, 21),
    (256, (2, 2), None, 107, 58),
    (128, (1, 1), (128, 64), 134, 45),
    (128, (2, 2), None, 111, None),
)
FP8_KINDS = (
    Kind(128, FP8, blocks=(128, 128)),
    Kind(64, FP8, heads=(4, 2), blocks=(64, 64), lengths=True),
    Kind(128, FP8, mask=Formula("window"), score=score("ALiBi")),
)


def check_kind(number: int, kind: Kind, longest: int) -> None:
    for n in range(EACH):
        seed = 1000 * number + n
        area = 30_000_000 if n % 4 == 0 else 4_000_000
        try:
            Problem(random.Random(seed), kind, longest=longest, area=area).check(CUDA)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, longest {longest}, area {area}: {error}") from None


@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_schedules(number):
    check_kind(number, SCHEDULES[number], 3000 if number % 2 else 1500)


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_functions(number):
    check_kind(100 + number, FUNCTIONS[number], 2500)


@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_expressions(number):
    head_dim, heads, blocks, mask, score = EXPRESSIONS[number]
    longest = 1000
    functions = {"mask": None if mask is None else random_mask(mask)}
    functions["score"] = None if score is None else random_score(score, longest, "k % 7 == 3" if score % 2 else "")
    kind = Kind(head_dim, FP16 if number % 3 == 1 else BF16, heads, blocks, **functions)
    check_kind(200 + number, kind, longest)


@pytest.mark.parametrize("number", range(len(FP8_KINDS)))
def test_fp8(number):
    check_kind(300 + number, FP8_KINDS[number], 1500)


def test_one_of_each_body():
    assert sanitizer_problems(CUDA) >= 12


# ---- graphs over what changes ----------------------------------------------------------------------------------------
NQ, NK, BLOCK, HEADS = 700, 1000, 64, 4
SIZES = {"seqlen_q": NQ, "seqlen_k": NK, "block_q": BLOCK, "block_k": BLOCK}
ROWS, COLUMNS = -(-NQ // BLOCK), -(-NK // BLOCK)


@cache
def given() -> tuple[torch.Tensor, ...]:
    return tensors_of(1, NQ, NK, HEADS, 2, 128, device=CUDA)


def kept_of(seed: int) -> torch.Tensor:
    return torch.rand(HEADS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) < 0.4


def ids_of(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.sort(torch.randint(0, 2 + seed % 5, (NK,), generator=draw).int()).values


def expected(kept: torch.Tensor | None, ids: torch.Tensor | None) -> torch.Tensor:
    """What is seen: bool (1, HEADS, NQ, NK)."""
    seen = torch.ones(1, HEADS, NQ, NK, dtype=torch.bool)
    if kept is not None:
        seen = seen & Blocks(SIZES, kept[None]).elements(kept[None])
    if ids is not None:
        ids = ids.cpu()
        seen = seen & (ids[:NQ, None] == ids[None, :])
    return seen.to(CUDA)


def judge(got: Any, seen: torch.Tensor) -> None:
    q, k, v = given()
    with oracle_on(q.device):
        exact, honest = (reference.attention(q, k, v, mask=seen, dtype=dtype) for dtype in (torch.float64, q.dtype))
        magnitude = reference.attention(q, k, v.abs(), mask=seen)[0]
        assert_close(got, exact, honest, magnitude, v)


def made(maker: str, kept: torch.Tensor) -> BlockSchedule:
    """Of bools on the card, by what the card computes from them."""
    if maker == "blocks":
        return BlockSchedule.from_blocks(kept, **SIZES)
    if maker == "scores":
        return BlockSchedule.from_scores(kept.float(), threshold=1.0, **SIZES)
    columns = torch.arange(COLUMNS, device=kept.device, dtype=torch.int32)
    entries = torch.where(kept, columns, COLUMNS + 1000)  # the others are out of range, and count for nothing
    return BlockSchedule.from_lists(torch.full_like(entries[..., 0], COLUMNS), entries.flip(-1).contiguous(), **SIZES)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    return graph, got


@pytest.mark.parametrize("maker", ["blocks", "lists", "scores"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_graph_follows_schedules_and_captured_tensors(maker, documents):
    kept, ids = kept_of(0).to(CUDA), ids_of(0).to(CUDA)
    mask = (lambda b, h, q, k: ids[q] == ids[k]) if documents else None
    run = lambda: attention(*given(), schedule=made(maker, kept), mask=mask, return_lse=True)  # noqa: E731
    graph, got = captured(run)
    for seed in range(1, 5):
        kept.copy_(kept_of(seed))
        ids.copy_(ids_of(seed))
        got[0].fill_(NAN)
        got[1].fill_(NAN)
        graph.replay()
        judge(got, expected(kept_of(seed), ids_of(seed) if documents else None))
        judge(run(), expected(kept_of(seed), ids_of(seed) if documents else None))  # and so does a call outside of it


def test_a_graph_follows_a_mask_and_its_schedule():
    """`schedule_of` and the mask over document ids, both made anew at every replay."""
    ids = ids_of(0).to(CUDA)

    def run() -> Any:
        mask = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
        blocks = schedule_of(mask, 1, HEADS, NQ, NK, block_q=128, block_k=64)
        return attention(*given(), schedule=blocks, mask=mask, return_lse=True), attention(
            *given(), mask=mask, return_lse=True
        )

    graph, got = captured(run)
    for seed in range(1, 5):
        ids.copy_(ids_of(seed))
        for o, lse in got:
            o.fill_(NAN)
            lse.fill_(NAN)
        graph.replay()
        for state in (*got, *run()):
            judge(state, expected(None, ids_of(seed)))


def test_what_is_written_in_place_is_seen_by_the_next_call():
    """Lists that were kept from before are of no use then: bits, lengths and captured tensors."""
    kept, ids = kept_of(0).to(CUDA), ids_of(0).to(CUDA)
    lengths = torch.full((COLUMNS,), BLOCK, dtype=torch.int32, device=CUDA)
    lengths[-1] = NK - (COLUMNS - 1) * BLOCK
    bits = BlockSchedule.from_blocks(kept, **SIZES).bits.clone()
    schedule = BlockSchedule.from_bits(bits, lengths_k=lengths, **SIZES)
    mask = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    for seed in range(4):
        bits.copy_(BlockSchedule.from_blocks(kept_of(seed).to(CUDA), **SIZES).bits)
        ids.copy_(ids_of(seed))
        for _ in range(2):
            got = attention(*given(), schedule=schedule, mask=mask, return_lse=True)
        judge(got, expected(kept_of(seed), ids_of(seed)))
        if schedule.lengths_k.data_ptr() == lengths.data_ptr():
            lengths[seed] = 0
            got = attention(*given(), schedule=schedule, mask=mask, return_lse=True)
            lengths[seed] = BLOCK
            without = kept_of(seed)
            without[..., seed] = False
            judge(got, expected(without, ids_of(seed)))


# ---- streams, threads, no waits --------------------------------------------------------------------------------------
def calls() -> list[Callable[[], Any]]:
    kept, ids, slopes = kept_of(9).to(CUDA), ids_of(9).to(CUDA), torch.rand(HEADS, device=CUDA)
    kept_schedule = made("blocks", kept)
    return [
        lambda: attention(*given(), schedule=made("blocks", kept), return_lse=True),
        lambda: attention(*given(), schedule=kept_schedule, causal=True, return_lse=True),
        lambda: attention(*given(), mask=lambda b, h, q, k: ids[q] == ids[k], return_lse=True),
        lambda: attention(*given(), score=lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), return_lse=True),
        lambda: attention(
            *given(), schedule=made("lists", kept), mask=lambda b, h, q, k: ids[q] >= ids[k], return_lse=True
        ),
    ]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_streams_at_once():
    """Calls that overlap have lists of their own; one on another stream is the same to the last bit."""
    every = calls()
    want = [[x.clone() for x in call()] for call in every]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(4)], []
    for n in range(80):
        with torch.cuda.stream(streams[n % 4]):
            got.append((n % len(every), every[n % len(every)]()))
    torch.cuda.synchronize()
    for n, state in got:
        assert_same(state, want[n])


def test_two_threads_at_once():
    every = calls()
    want = [[x.clone() for x in call()] for call in every]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(step: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(60):
                    which = step * n % len(every)
                    state = every[which]()
                    torch.cuda.current_stream().synchronize()
                    assert_same(state, want[which])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the card raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits():
    """From bools, lists and scores to the output, and `schedule_of`: also when tensors are new, with kernels loaded."""

    def everything() -> list[Any]:
        kept, ids = (x.clone() for x in there)
        got = [attention(*given(), schedule=made(maker, kept), return_lse=True) for maker in ("blocks", "lists")]
        got.append(attention(*given(), schedule=made("scores", kept), causal=True, return_lse=True))
        mask = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
        blocks = schedule_of(mask, 1, HEADS, NQ, NK)
        return [*got, attention(*given(), schedule=blocks, mask=mask, return_lse=True)]

    there = kept_of(3).to(CUDA), ids_of(3).to(CUDA)
    everything()
    with no_waiting():
        got = everything()
    for state in got[:2]:
        judge(state, expected(kept_of(3), None))
    judge(got[3], expected(None, ids_of(3)))


# ---- contents that nobody looked at ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", [False, True])
def test_garbage_touches_nothing_outside(dtype, lengths):
    """Lists, lengths, bits and ids of any content; around the output stand numbers that must stay."""
    q, k, v = given()
    room = torch.full((3 * NQ, HEADS, 128), 7.0, dtype=BF16, device=CUDA)
    out = room[NQ : 2 * NQ][None]
    draw = torch.Generator().manual_seed(1)
    limits = torch.iinfo(dtype)
    any_of = lambda *shape: torch.randint(limits.min, limits.max, shape, generator=draw, dtype=dtype).to(CUDA)  # noqa: E731
    near = lambda *shape: torch.randint(-3, COLUMNS + 3, shape, generator=draw).to(dtype).to(CUDA)  # noqa: E731
    options = {"lengths_q": any_of(ROWS), "lengths_k": any_of(COLUMNS)} if lengths else {}
    ids = any_of(NK)
    for counts, indices in (
        (any_of(HEADS, ROWS), any_of(HEADS, ROWS, 9)),
        (any_of(ROWS), near(ROWS, 30)),
        (near(HEADS, ROWS), near(HEADS, ROWS, 12)),
    ):
        schedule = BlockSchedule.from_lists(counts, indices, **SIZES, **options)
        attention(q, k, v, schedule=schedule, causal=True, return_lse=True, out=out)
        attention(q, k, v, schedule=schedule, mask=lambda b, h, q, k: ids[ids[q]] <= ids[k * ids[k]], out=out)
        schedule.counts, schedule.lists(5), schedule.transpose().lists()
    bits = torch.randint(-(2**31), 2**31, (1, HEADS, ROWS, 1), generator=draw).int().to(CUDA)
    attention(q, k, v, schedule=BlockSchedule.from_bits(bits, **SIZES, **options), out=out)
    torch.cuda.synchronize()
    assert (room[:NQ] == 7.0).all()
    assert (room[2 * NQ :] == 7.0).all()
    judge(attention(q, k, v, schedule=made("blocks", kept_of(1).to(CUDA)), return_lse=True), expected(kept_of(1), None))
