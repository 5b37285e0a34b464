"""The forward on a card, whichever that is or behaves as: the emulator's cases on large shapes; streams, graphs."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from forward_cases import (
    BF16,
    FP16,
    GARBAGE,
    MORE_KINDS,
    NAN,
    Chance,
    check,
    check_varlen,
    normal,
    packed,
    paged,
    problem,
    starts_of,
)
from lazy_cases import KINDS, in_heads, jumps_at, known_scores, shapes

from tilewise import BlockSchedule, attention, attention_varlen
from tilewise.gpu.calls import calls as kept_calls

pytestmark = pytest.mark.gpu
CUDA = "cuda"
BLOCKS = (32, 48, 64, 80, 112, 128)  # keys of a block, in one tiling or another


def bits(state) -> list[torch.Tensor]:
    o, lse = state
    return [o.clone(), lse.clone()]


def assert_same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


# ---- the emulator's cases, larger ------------------------------------------------------------------------------------
SHAPES = ((1, 1), (63, 65), (129, 127), (193, 1000), (1000, 193), (1, 4096), (1025, 2047), (4096, 4096))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_lengths(head_dim):
    for number, ((nq, nk), causal) in enumerate(product(SHAPES, (False, True))):
        dtype = FP16 if number % 3 == 2 and head_dim in (64, 128) else BF16
        q, k, v = problem(2, nq, nk, 2, 2, head_dim, dtype=dtype, seed=number, device=CUDA)
        check(q, k, v, causal=causal, exact=number % 4 == 3)


@pytest.mark.parametrize("window", [(0, 0), (None, 3), (5, None), (300, 200), (1000, 0), (9999, 9999)], ids=str)
def test_windows(window):
    for head_dim, (nq, nk) in product((64, 128, 256), ((300, 1500), (1500, 300), (2048, 2048))):
        check(*problem(1, nq, nk, 2, 2, head_dim, device=CUDA), window=window)


@pytest.mark.parametrize("head_dim", [1, 8, 33, 40, 72, 136, 250])
def test_padded_head_dims(head_dim):
    for causal in (False, True):
        check(*problem(2, 333, 555, 2, 2, head_dim, device=CUDA), causal=causal)


@pytest.mark.parametrize("layout", ["heads", "wide", "odd", "few"])
def test_strides_with_nan_around(layout):
    for head_dim in (64, 128, 256, 33):
        q, k, v = problem(3, 500, 700, 2, 2, head_dim, layout=layout, device=CUDA)
        check(q, k, v, causal=True)
        if layout != "few":
            out = normal(*q.shape, layout=layout, device=CUDA)
            guard = torch.empty(0, dtype=BF16, device=CUDA).set_(out.untyped_storage()).fill_(7.0)
            got, _ = check(q, k, v, out=out.fill_(NAN))
            assert got is out
            out.fill_(7.0)
            assert (guard == 7.0).all()


def test_packed_qkv_and_out_that_is_an_input():
    qkv = normal(2, 600, 6, 128, device=CUDA).view(2, 600, 3, 2, 128)
    want = check(*qkv.unbind(2), causal=True)
    for which in range(3):
        given = qkv.clone()
        out = given[:, :, which]
        got = attention(*given.unbind(2), causal=True, return_lse=True, out=out)
        assert got[0] is out
        assert_same(got, want)
        # The same strides, but no input: a call that was kept for the one must not serve the other.
        other = torch.full_like(qkv, NAN)
        got = attention(*qkv.unbind(2), causal=True, return_lse=True, out=other[:, :, which])
        assert_same(got, want)
        assert other[:, :, which - 1].isnan().all()


@pytest.mark.parametrize("page_size", [0, 16])
def test_packed_calls_like_an_earlier_one_are_made_again(page_size):
    """With other starts, other pages and another output; by one kept call."""
    lengths = ((70, 1, 200), (200, 70, 1))
    made = []
    for seed, nq in enumerate(lengths):
        q, k, v, *starts = packed(nq, nq, 4, 2, 64, seed=seed, device=CUDA)
        options = {}
        if page_size:
            k, v, options["page_table"] = paged(k, v, starts[1], page_size, seed=seed)
        check_varlen(q, k, v, *starts, causal=True, **options)
        made.append(len(kept_calls()))
    assert made[0] == made[1]


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 1), (3, 1), (10, 2), (7, 1), (1, 1)], ids=str)
def test_grouped_heads(heads):
    for nq, nk in ((1, 3000), (20, 700), (130, 130), (1100, 300)):
        check(*problem(2, nq, nk, *heads, 128, device=CUDA), causal=True)


@pytest.mark.parametrize("head_dim", [33, 64, 128, 256])
def test_float32(head_dim):
    """The one dtype that all cards run by mma.sync or on CUDA cores."""
    for nq, nk in ((1, 1), (63, 65), (193, 1000), (1025, 2047)):
        for number, options in enumerate(({}, {"causal": True}, {"window": (100, 20), "softcap": 9.0})):
            q, k, v = problem(1, nq, nk, 4, 2, head_dim, dtype=torch.float32, seed=number, device=CUDA)
            check(q, k, v, exact=number == 1, **options)
    q, k, v, *starts = packed(*VARLEN, 4, 2, head_dim, dtype=torch.float32, device=CUDA)
    check_varlen(q, k, v, *starts, causal=True)
    *pages, table = paged(k, v, starts[1], 16)
    check_varlen(q, *pages, *starts, page_table=table, causal=True)


def test_many_sequences():
    check(*problem(65, 70, 90, 2, 2, 64, device=CUDA))
    check(*problem(3000, 1, 5, 2, 2, 64, device=CUDA), causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_done_to_the_scores(head_dim):
    q, k, v = problem(2, 700, 900, 2, 2, head_dim, size=4.0, device=CUDA)
    sinks, slopes = torch.tensor([-1.0, 6.0], device=CUDA), torch.rand(2, 2, device=CUDA)
    check(q, k, v, softcap=20.0, causal=True)
    check(q, k, v, sinks=sinks)
    check(q, k, v, sinks=torch.tensor([-torch.inf, 1e4], device=CUDA), causal=True)
    check(q, k, v, alibi_slopes=slopes, causal=True)
    check(q, k, v, alibi_slopes=slopes[0].to(BF16), softcap=9.0, sinks=sinks, window=(300, 100), scale=-0.05)
    check(q, k, v, scale=0.0)


VARLEN = [700, 0, 1, 129, 2000, 64, 5], [900, 40, 300, 0, 2000, 65, 1000]


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 33])
def test_packed_sequences(head_dim):
    for number, index in enumerate((torch.int32, torch.int64)):
        q, k, v, *starts = packed(*VARLEN, 4, 2, head_dim, index=index, device=CUDA)
        check_varlen(q, k, v, *starts, causal=number == 0)
        check_varlen(q, k, v, *(x.cpu() for x in starts), window=(200, 100))


def test_a_sequence_of_nan_is_its_own_affair():
    q, k, v, *starts = packed(*VARLEN, 2, 2, 128, device=CUDA)
    for of, causal in product((0, 1), (False, True)):
        nans = [x.clone() for x in (q, k, v)]
        for x, begin in zip(nans, (starts[0], starts[1], starts[1]), strict=True):
            for b in range(of, len(VARLEN[0]), 2):
                x[begin[b] : begin[b + 1]] = NAN
        check_varlen(*nans, *starts, causal=causal)


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (128, 1), (64, 17), (256, 64), (192, 256), (33, 20)])
def test_pages(head_dim, page_size):
    q, k, v, *starts = packed(*VARLEN, 8, 2, head_dim, device=CUDA)
    *pages, table = paged(k, v, starts[1], page_size, heads_first=page_size == 64)
    check_varlen(q, *pages, *starts, page_table=table, causal=True)
    check_varlen(q, *pages, *starts, page_table=table)


def test_65_sequences():
    lengths = [(37 * i) % 200 for i in range(65)], [(53 * i) % 300 for i in range(65)]
    q, k, v, *starts = packed(*lengths, 2, 2, 128, device=CUDA)
    check_varlen(q, k, v, *starts, causal=True)


@pytest.mark.parametrize("head_dim", [64, 33])
def test_offsets_beyond_32_bits(head_dim):
    """Rows 2^23 elements apart: the last lies 5 GB from the first."""
    rows, apart = 320, 2**23
    store, other = (torch.empty(rows, apart, dtype=BF16, device=CUDA) for _ in range(2))
    wide = 2 * head_dim

    def view(base, at):
        return base[:, at : at + wide].view(1, rows, 2, head_dim)

    q, k, v = (view(store, 512 * i).copy_(normal(1, rows, 2, head_dim, seed=i, device=CUDA)) for i in range(3))
    check(q, k, v, causal=True, out=view(other, 64).fill_(NAN))


# ---- hostile scores --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_jumps(kind):
    for block in BLOCKS:
        keys = 6 * block + 5
        positions = (0, 1, block - 1, block, 2 * block + 7, 4 * block, keys - 1)
        for factor in (1.0, -1.0):
            q, k, v, options = known_scores(kind, jumps_at(positions, keys, 60), factor=factor)
            check(q.to(CUDA), k.to(CUDA), v.to(CUDA), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_jump_at_every_position(kind):
    for jump in (6.25, 69.0, 69.5, 88.5, 110.0):
        q, k, v, options = known_scores(kind, jumps_at(range(300), 300, 60, (jump,)))
        check(q.to(CUDA), k.to(CUDA), v.to(CUDA), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_rising_falling_sawtooth_random_and_stairs(kind):
    for block in BLOCKS:
        keys = 8 * block + 3
        patterns = in_heads(shapes(keys, block))
        for factor, offset in ((1.0, 0.0), (-1.0, 64.0), (2.0, -128.0), (1.0, 9984.0), (1.0, -9984.0)):
            q, k, v, options = known_scores(kind, patterns, factor=factor, offset=offset)
            check(q.to(CUDA), k.to(CUDA), v.to(CUDA), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits_over_long_rows(kind):
    head_dim, dtype, options = KINDS[kind]
    for size in (10.0, 60.0, 1000.0):
        check(*problem(1, 1500, 3000, 2, 2, head_dim, dtype=dtype, size=size, device=CUDA), **options)


# ---- chance ----------------------------------------------------------------------------------------------------------
def test_random_problems():
    """A failure names its seed: TILEWISE_SEED=… repeats the run, Chance(…, MORE_KINDS, 700) the problem alone."""
    seed = int(os.environ.get("TILEWISE_SEED", random.SystemRandom().randrange(10**6)))
    print(f"TILEWISE_SEED={seed}")
    side = torch.cuda.Stream()
    for number in range(500):
        chance = Chance(1000 * seed + number, MORE_KINDS, 700)
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side) if chance.stream else nullcontext():
                chance.check(CUDA)
        except Exception as error:
            raise AssertionError(f"TILEWISE_SEED={seed}: {chance}: {error}") from error
        torch.cuda.current_stream().wait_stream(side)


# ---- streams, graphs, threads ----------------------------------------------------------------------------------------
def calls():
    """(name, call) of dense, packed and paged problems; a call takes nothing and returns (o, lse)."""
    q, k, v = problem(2, 1000, 1300, 4, 2, 128, device=CUDA)
    yield "dense", lambda: attention(q, k, v, causal=True, return_lse=True)
    long = problem(1, 2000, 2000, 3, 3, 64, device=CUDA)
    yield "64", lambda: attention(*long, return_lse=True)
    wide = problem(1, 900, 900, 3, 3, 256, device=CUDA)
    yield "256", lambda: attention(*wide, causal=True, return_lse=True)
    pq, pk, pv, *starts = packed(*VARLEN, 4, 2, 128, device=CUDA)
    yield "packed", lambda: attention_varlen(pq, pk, pv, *starts, causal=True, return_lse=True)
    *pages, table = paged(pk, pv, starts[1], 16)
    yield "paged", lambda: attention_varlen(pq, *pages, *starts, page_table=table, causal=True, return_lse=True)


CALLS = ("dense", "64", "256", "packed", "paged")


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_a_hundred_times_beside_other_work(name):
    call = dict(calls())[name]
    want = bits(call())
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    noise = [torch.randn(n, n, device=CUDA, dtype=BF16) for n in (1024, 3000)]
    different = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(100):
        for stream, x in zip(streams, noise, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    torch.mm(x, x)
        for a, b in zip(call(), want, strict=True):
            different += (a.nan_to_num() != b.nan_to_num()).sum()
    torch.cuda.synchronize()
    assert different.item() == 0


@pytest.mark.parametrize("name", CALLS)
def test_it_goes_on_the_current_stream_and_does_not_wait(name):
    call = dict(calls())[name]
    want = bits(call())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # what a stream needs once
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(600_000_000)  # 0.3 s and more
        got = call()
    issued = time.perf_counter() - start
    assert not stream.query()
    assert torch.cuda.current_stream().query()
    stream.synchronize()
    assert time.perf_counter() - start > issued + 0.1
    assert_same(got, want)


def test_calls_on_several_streams_at_once():
    """Each stream has its own tile counter: launches that overlap must not take each other's tiles."""
    by_name = dict(calls())
    want = {name: bits(call()) for name, call in by_name.items()}
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(4)], []
    for number in range(80):
        name = CALLS[number % len(CALLS)]
        with torch.cuda.stream(streams[number % 4]):
            got.append((name, by_name[name]()))
    torch.cuda.synchronize()
    for name, state in got:
        assert_same(state, want[name])


@pytest.mark.parametrize("name", ["dense", "256"])
def test_a_graph_is_replayed_on_new_inputs(name):
    head_dim = 128 if name == "dense" else 256
    q, k, v = problem(2, 500, 700, 4, 4, head_dim, device=CUDA)
    run = lambda: attention(q, k, v, causal=True, return_lse=True)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    side = torch.cuda.Stream()
    for seed in range(4):
        for x, new in zip((q, k, v), problem(2, 500, 700, 4, 4, head_dim, seed=seed + 5, device=CUDA), strict=True):
            x.copy_(new)
        want = bits(run())
        got[0].fill_(NAN)
        got[1].fill_(NAN)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):  # beside the replay, from the ordinary counter
            beside = [run() for _ in range(3)]
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, want)
        for state in beside:
            assert_same(state, want)


def test_a_graph_of_packed_sequences_takes_new_lengths():
    """The lengths are read on the card, so that a captured call follows them."""
    q, k, v, *starts = packed([200, 300, 12], [400, 300, 60], 2, 2, 128, device=CUDA)
    *pages, _ = paged(k, v, starts[1], 16)
    table = torch.arange(3 * 40, device=CUDA, dtype=torch.int32).remainder(pages[0].shape[0] - 3).view(3, 40)
    pages = [x.nan_to_num() for x in pages]
    plain = lambda: attention_varlen(q, k, v, *starts, causal=True, return_lse=True)  # noqa: E731
    in_pages = lambda: attention_varlen(  # noqa: E731
        q, *pages, *starts, page_table=table, causal=True, return_lse=True
    )
    for run in (plain, in_pages):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        for lengths in (
            ([1, 500, 11], [2, 600, 158]),
            ([512, 0, 0], [0, 600, 160]),
            ([100, 99, 313], [300, 160, 300]),
        ):
            for x, n in zip(starts, lengths, strict=True):
                x.copy_(starts_of(n))
            got[0].fill_(NAN)
            graph.replay()
            assert_same(got, run())
            if run is plain:
                assert_same(got, check_varlen(q, k, v, *starts, causal=True))


def test_two_threads_at_once():
    by_name = dict(calls())
    want = {name: bits(call()) for name, call in by_name.items()}
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(own_stream: bool, order: list[str]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext():
                for name in order * 10:
                    state = by_name[name]()
                    torch.cuda.current_stream().synchronize()
                    assert_same(state, want[name])
        except BaseException as error:
            failures.append(error)

    orders = [list(CALLS), list(reversed(CALLS))]
    for own_stream in (True, False):
        threads = [threading.Thread(target=work, args=(own_stream, order)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


# ---- what nobody looked at -------------------------------------------------------------------------------------------
STARTS = {**GARBAGE, "to and fro": [0, 1000] * 200, "no sequence": [7]}


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", STARTS)
def test_wrong_starts_touch_nothing_outside(name, index):
    starts = torch.tensor(STARTS[name], dtype=index, device=CUDA)
    room = torch.full((3000, 2, 128), 7.0, dtype=BF16, device=CUDA)
    q, k, v = (normal(1000, 2, 128, seed=i, device=CUDA) for i in range(3))
    right = starts_of([1000] + [0] * (len(starts) - 2) if len(starts) > 1 else [], index).to(CUDA)
    for pair in ((starts, right), (right, starts), (starts, starts)):
        attention_varlen(q, k, v, *pair, causal=True, return_lse=True, out=room[1000:2000])
    torch.cuda.synchronize()
    assert (room[:1000] == 7.0).all()
    assert (room[2000:] == 7.0).all()
    check(*problem(1, 300, 300, 2, 2, 128, device=CUDA))  # the card is still well


@pytest.mark.parametrize("name", GARBAGE)
def test_wrong_lengths_touch_nothing_outside_of_a_page_table(name):
    starts = torch.tensor(GARBAGE[name][:4], dtype=torch.int32, device=CUDA)
    q = normal(30, 2, 128, device=CUDA)
    k, v = (normal(12, 16, 2, 128, seed=i, device=CUDA) for i in (1, 2))
    table = torch.arange(12, dtype=torch.int32, device=CUDA).view(3, 4)
    attention_varlen(q, k, v, starts_of([10, 10, 10]).to(CUDA), starts, page_table=table, causal=True)
    torch.cuda.synchronize()
    check(*problem(1, 300, 300, 2, 2, 128, device=CUDA))


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_what_is_not_served_is_said():
    q, k, v = problem(1, 64, 64, 2, 2, 64, device=CUDA)
    starts = torch.tensor([0, 64], dtype=torch.int32)
    short, table = torch.tensor([0, 60], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    schedule = BlockSchedule.random(64, 64, block_q=16, block_k=16, sparsity=0.5, seed=0)
    for error, match, call in (
        (ValueError, "takes CPU tensors", lambda: attention(q, k, v, backend="cpu")),
        (ValueError, "takes CPU tensors", lambda: attention(q, k, v, backend="emulator")),
        (ValueError, "k must be on cuda", lambda: attention(q, k.cpu(), v)),
        (ValueError, "sinks must be on cuda", lambda: attention(q, k, v, sinks=torch.zeros(2))),
        (ValueError, "alibi_slopes must be on cuda", lambda: attention(q, k, v, alibi_slopes=torch.zeros(2))),
        (ValueError, "out must be on cuda", lambda: attention(q, k, v, out=torch.zeros_like(q, device="cpu"))),
        (NotImplementedError, "q is float64", lambda: attention(q.double(), k.double(), v.double())),
        (NotImplementedError, "head_dim", lambda: attention(*problem(1, 9, 9, 1, 1, 600, device=CUDA))),
        (ValueError, "schedule must be on cuda", lambda: attention(q, k, v, schedule=schedule)),
        (
            ValueError,
            "page_table must be on cuda",
            lambda: attention_varlen(q[0], k, v, starts, starts, page_table=table),
        ),
        (ValueError, "cu_seqlens_q must end", lambda: attention_varlen(q[0], k[0], v[0], short, starts)),
    ):
        with pytest.raises(error, match=match):
            call()


def test_a_wrong_argument_is_refused_though_one_that_equals_it_was_taken():
    """1 == True: a call that was kept must not let in what the checks would not."""
    q, k, v = problem(1, 64, 64, 2, 2, 64, device=CUDA)
    for good, bad in (
        ({"causal": True}, {"causal": 1}),
        ({"exact": True}, {"exact": 1}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"deterministic": True}, {"deterministic": 1}),
    ):
        attention(q, k, v, **good)
        with pytest.raises(TypeError):
            attention(q, k, v, **bad)


def test_a_kept_call_asks_again_about_gradients():
    q, k, v = problem(1, 64, 64, 2, 2, 64, device=CUDA)
    want = attention(q, k, v)
    needs = q.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(attention(needs, k, v), want)
    o = attention(needs, k, v)
    assert o.requires_grad
    assert torch.equal(o, want)
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), want)


def test_a_kept_call_serves_other_addresses_and_values():
    for seed in range(20):
        q, k, v = problem(1, 100 + seed % 3, 200, 2, 2, 128, seed=seed, device=CUDA)
        sinks = torch.randn(2, device=CUDA)
        check(q, k, v, sinks=sinks, causal=True)
        check(q, k, v, causal=True)
