"""A GPU as older cards: 500 random problems by the kernels of four of them; graphs, streams, outputs.

The other suites run as one card with TILEWISE_CARD; here cards take turns in one process. All kernels are compiled
first, on all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import mla_cases
import pytest
import test_append
import torch
from card_cases import CARDS, FP32, check_bodies, decoded, dense, imitable, kernels_of, patterned
from decode_cases import assert_decoded
from forward_cases import BF16, FP16, NAN, check, check_varlen, normal, packed, paged, problem, starts_of
from paged_cases import noise

import tilewise
from tilewise import BlockSchedule, PagedKVCache, arch, attention, attention_varlen, plan_decode, reference
from tilewise.bench import cards as table
from tilewise.bench import peers
from tilewise.bench.measure import OK
from tilewise.bench.warm import compile_all
from tilewise.bench.workloads import complete
from tilewise.kvcache import KVFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(arch.chosen is not None, reason="it imitates cards itself: leave out TILEWISE_CARD"),
]
CUDA = "cuda"
# Of each card: prefill, with patterns or FP8, decode, append. 125 of four cards each.
PREFILL, PATTERNS, DECODE, APPEND = 70, 32, 18, 5
LATENT = 40  # more, over rows that are keys and values at once


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """One after the other, at the first calls, the kernels would take minutes."""
    target = arch.arch_of_device(torch.device(CUDA))
    warmed = compile_all(
        (spec, target) for card in imitable(CUDA) for spec in kernels_of(card, (PREFILL, PATTERNS, DECODE))
    )
    assert warmed.failed == ()


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in imitable(CUDA):
        pytest.skip("this device cannot behave as that card")
    with arch.as_card(request.param):
        yield request.param


# ---- chance ----------------------------------------------------------------------------------------------------------
def test_random_problems(card: str) -> None:
    """A failure names its number: dense(card, number).check("cuda") in card_cases repeats it."""
    side = torch.cuda.Stream()
    for number in range(PREFILL):
        chance = dense(card, number)
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side) if chance.stream else nullcontext():
                chance.check(CUDA)
        except Exception as error:
            raise AssertionError(f"dense({card!r}, {number}), {chance}: {error}") from error
        torch.cuda.current_stream().wait_stream(side)


def test_random_patterns(card: str) -> None:
    """Schedules, masks, scores, and FP8 by its own rule."""
    for number in range(PATTERNS):
        try:
            patterned(card, number).check(CUDA)
        except AssertionError as error:
            raise AssertionError(f"patterned({card!r}, {number}): {error}") from error


def test_random_forests(card: str) -> None:
    for number in range(DECODE):
        try:
            decoded(card, number, CUDA)
        except AssertionError as error:
            raise AssertionError(f"decoded({card!r}, {number}): {error}") from error


def test_random_latent_rows(card: str) -> None:
    for number in range(LATENT):
        seed, sizes = 1000 * (60 + CARDS.index(card)) + number, (mla_cases.DEEPSEEK, mla_cases.SIZES)[number % 3 == 0]
        try:
            mla_cases.chance(seed, sizes, device=CUDA)
        except AssertionError as error:
            raise AssertionError(f"chance({seed}, {sizes}) as {card}: {error}") from error


def test_random_tokens_are_written(card: str) -> None:
    with torch.device(CUDA):
        for number, name in enumerate(("bf16", "fp8", "int8", "int4", "fp32")):
            k, v = noise(2, 40, 3, 128, dtype=(BF16, FP16, FP32)[number % 3], seed=number + CARDS.index(card))
            test_append.check(KVFormat(name, 128, 32), k, v, page_size=16, seed=number)


def test_one_of_each_body() -> None:
    assert check_bodies(CUDA) >= 16


# ---- outputs, graphs, streams ----------------------------------------------------------------------------------------
def bits(state: Any) -> list[torch.Tensor]:
    return [x.clone() for x in state]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_out_is_written_and_nothing_else(card: str, dtype: torch.dtype) -> None:
    for layout in ("dense", "wide", "odd"):
        q, k, v = problem(2, 200, 300, 2, 2, 64, dtype=dtype, device=CUDA)
        out = normal(*q.shape, dtype=dtype, layout=layout, device=CUDA)
        guard = torch.empty(0, dtype=dtype, device=CUDA).set_(out.untyped_storage()).fill_(7.0)
        got, _ = check(q, k, v, causal=True, out=out.fill_(NAN))
        assert got is out
        out.fill_(7.0)
        assert (guard == 7.0).all()
    want = bits(check(q, k, v, causal=True))
    assert_same((attention(q, k, v, causal=True, out=q),), want[:1])  # an input, too


LENGTHS = [300, 0, 129, 64, 5], [400, 40, 300, 65, 200]


def calls() -> dict[str, tuple[list[torch.Tensor], Callable[[], Any]]]:
    """By name: floats whose values may change, and a call that takes them; it returns (o, lse)."""
    q, k, v = problem(2, 400, 500, 4, 2, 128, device=CUDA)
    single = list(problem(1, 300, 300, 2, 2, 64, dtype=FP32, device=CUDA))
    pq, pk, pv, *starts = packed(*LENGTHS, 4, 2, 128, device=CUDA)
    *pages, table = paged(pk, pv, starts[1], 16)
    pages = [x.nan_to_num() for x in pages]
    blocks = (torch.rand(4, 7, 8, generator=torch.Generator().manual_seed(0)) < 0.5).to(CUDA)
    sizes = {"seqlen_q": 400, "seqlen_k": 500, "block_q": 64, "block_k": 64}
    ids = (torch.arange(500, device=CUDA) // 130).int()

    def patterned() -> Any:
        schedule = BlockSchedule.from_blocks(blocks, **sizes)
        return attention(q, k, v, schedule=schedule, mask=lambda b, h, q, k: ids[q] >= ids[k], return_lse=True)

    return {
        "dense": ([q, k, v], lambda: attention(q, k, v, causal=True, return_lse=True)),
        "float32": (single, lambda: attention(*single, causal=True, return_lse=True)),
        "packed": ([pq, pk, pv], lambda: attention_varlen(pq, pk, pv, *starts, causal=True, return_lse=True)),
        "paged": (
            [pq, *pages],
            lambda: attention_varlen(pq, *pages, *starts, page_table=table, causal=True, return_lse=True),
        ),
        "patterned": ([q, k, v], patterned),
    }


@pytest.mark.parametrize("name", ["dense", "float32", "packed", "paged", "patterned"])
def test_a_graph_is_replayed_on_new_inputs(card: str, name: str) -> None:
    given, run = calls()[name]
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        for x in given:
            x.normal_()
        want = bits(run())
        for x in got:
            x.fill_(NAN)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, want)


def test_a_captured_call_stays_what_it_was_made_as() -> None:
    """A graph that was captured as one card is replayed beside calls as another; both are right."""
    q, k, v = problem(1, 300, 400, 2, 2, 128, device=CUDA)
    states = {}
    for name in ("sm_80", "sm_89", None):
        with arch.as_card(name):
            check(q, k, v, causal=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = attention(q, k, v, causal=True, return_lse=True)
            states[name] = graph, got, bits(attention(q, k, v, causal=True, return_lse=True))
    for graph, got, want in states.values():
        for x in got:
            x.fill_(NAN)
        graph.replay()
        assert_same(got, want)


def test_a_graph_takes_new_lengths(card: str) -> None:
    q, k, v, *starts = packed([200, 300, 12], [400, 300, 60], 2, 2, 128, device=CUDA)
    run = lambda: attention_varlen(q, k, v, *starts, causal=True, return_lse=True)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for lengths in (([1, 500, 11], [2, 600, 158]), ([512, 0, 0], [0, 600, 160])):
        for x, n in zip(starts, lengths, strict=True):
            x.copy_(starts_of(n))
        got[0].fill_(NAN)
        graph.replay()
        assert_same(got, check_varlen(q, k, v, *starts, causal=True))


def test_calls_on_several_streams_at_once(card: str) -> None:
    by_name = {name: run for name, (_, run) in calls().items()}
    want = {name: bits(run()) for name, run in by_name.items()}
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(4)], []
    for number in range(40):
        name = list(by_name)[number % len(by_name)]
        with torch.cuda.stream(streams[number % 4]):
            got.append((name, by_name[name]()))
    torch.cuda.synchronize()
    for name, state in got:
        assert_same(state, want[name])


# ---- decode ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [False, True])
def test_a_decode_step_is_replayed_over_growing_sequences(card: str, share: bool) -> None:
    """What append writes on the card is what the captured step reads."""
    cache = PagedKVCache(200, 16, 2, 128, device=CUDA)
    rand = lambda n: torch.randn(n, 2, 128, device=CUDA).bfloat16()  # noqa: E731
    first = cache.allocate()
    cache.write(0, cache.extend([first], 96), rand(96), rand(96))
    seqs = [first, *(cache.fork(first) for _ in range(5))]
    cache.write(0, cache.extend(seqs, 1), rand(6), rand(6))
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=share, room=10)
    q, out = (torch.randn(6, 1, 8, 128, device=CUDA).bfloat16() for _ in range(2))
    tilewise.decode(q, cache, 0, plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilewise.decode(q, cache, 0, plan, out=out)
    for _ in range(5):
        cache.write(0, cache.extend(seqs, 1), rand(6), rand(6))
        plan = tilewise.grow_plan(plan, cache)
        q.normal_()
        graph.replay()
        assert_decoded((out, None), q, cache, seqs)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_shared_prefixes(card: str, dtype: torch.dtype) -> None:
    q, k, v = problem(4, 3, 40, 4, 2, 128, dtype=dtype, device=CUDA)
    prefix = normal(1, 300, 2, 128, dtype=dtype, seed=8, device=CUDA), normal(1, 300, 2, 128, dtype=dtype, device=CUDA)
    got = tilewise.shared_prefix_attention(q, [prefix], k, v, causal=True)
    whole = [torch.cat([p.expand(4, -1, -1, -1), x], 1).cpu() for p, x in zip(prefix, (k, v), strict=True)]
    exact, honest = (f(q.cpu(), *whole, causal=True) for f in (reference.attention, reference.baseline))
    verdict = reference.judge(got.cpu(), exact[0], honest[0], lse=exact[1])
    assert verdict.ok, verdict.reason


# ---- the table -------------------------------------------------------------------------------------------------------
TABLE = {
    "D 256, N 2048, causal": ["as sm_80", "as sm_89", peers.FA2],
    "fp16, D 128, N 2048, full": ["as sm_80", "as sm_89", peers.FA2],
    "float32, D 64, N 2048, causal": ["", "as sm_80", table.EFFICIENT, table.MATH],
    "ragged, D 128, N 2048, causal": ["as sm_80", "as sm_80, paged", "as sm_80, dense"],
    "decode 64 × 4096": ["as sm_80", peers.CUDNN],
    "shared 64 × (8192 + 256)": ["as sm_80", "as sm_80, unshared"],
}
PEERS = ("torch", peers.CUDNN)


@pytest.mark.parametrize("name", TABLE)
def test_every_kind_of_row_is_measured(name: str) -> None:
    """With fewer tokens; everything in it is right, peers too."""
    row = next(row for row in table.rows(CUDA) if row.name == name)
    point = row.point
    if row.measure is not table._decode:
        fewer = {"seq": 256, "lengths": "256-256" if point.lengths else ""}
        row = replace(row, point=complete(replace(point, **fewer)))
    assert row.measure is not None
    found = {result.kernel: result for result in row.measure(row, 2)}
    ours = [f"tilewise cuda, {more}".removesuffix(", ") for more in TABLE[name] if not more.startswith(PEERS)]
    assert set(found) >= {*ours, *(kernel for kernel in TABLE[name] if kernel.startswith(PEERS))}
    for kernel, result in found.items():
        assert result.status == OK, f"{kernel}: {result.reason}"
        assert result.timing is not None
