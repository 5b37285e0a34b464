"""The Hopper forward behind `attention_varlen`, in the emulator: packed sequences, pages, the list of their tiles."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from forward_cases import (
    BF16,
    FP16,
    GARBAGE,
    MODES,
    NAN,
    check_varlen,
    emulated,
    nan_in_new_memory,
    packed,
    paged,
    starts_of,
)
from oracle import randn

from tilewise import attention, attention_varlen, emulator, reference
from tilewise.gpu import prefill
from tilewise.scores import Scores

# Queries and keys of each sequence: empty ones at both ends and inside, ends in mid-tile, more queries than keys
RAGGED = {
    "one": ([70], [90]),
    "two": ([1, 1], [1, 1]),
    "empty": ([0, 5, 0, 130, 0, 40, 3], [9, 0, 0, 200, 7, 33, 0]),
    "uneven": ([129, 64, 1, 193, 17], [64, 129, 250, 1, 17]),
    "more": ([200, 90, 65], [10, 90, 300]),
    "all empty keys": ([3, 4], [0, 0]),
}


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", RAGGED)
def test_packed_sequences(name, index):
    for number, (causal, window) in enumerate(((False, None), (True, None), (False, (20, 5)), (True, (70, None)))):
        q, k, v, *starts = packed(*RAGGED[name], 2, 2, 64, index=index, seed=number)
        check_varlen(q, k, v, *starts, causal=causal, window=window, mode=MODES[number])


@pytest.mark.parametrize("head_dim", [128, 192, 256, 33])
def test_head_dims(head_dim):
    for number, name in enumerate(("empty", "uneven")):
        q, k, v, *starts = packed(*RAGGED[name], 2, 2, head_dim)
        check_varlen(q, k, v, *starts, causal=number == 0, mode=MODES[2 + number])
        check_varlen(q, k, v, *starts, window=(None, 30), mode=MODES[number])


def test_many_sequences():
    lengths = [(7 * i) % 5 for i in range(65)], [(11 * i) % 7 for i in range(65)]
    q, k, v, *starts = packed(*lengths, 2, 2, 64)
    check_varlen(q, k, v, *starts, mode=MODES[2])
    check_varlen(q, k, v, *starts, causal=True, mode=MODES[3])


def test_grouped_heads_features_and_layouts():
    lengths = [20, 0, 33, 7], [150, 40, 0, 60]
    slopes, sinks = torch.rand(4, 8), torch.linspace(-3, 4, 8)
    for number, layout in enumerate(("dense", "heads", "wide", "odd")):
        q, k, v, *starts = packed(*lengths, 8, 2, 64, layout=layout, seed=number)
        check_varlen(q, k, v, *starts, sinks=sinks, causal=True, mode=MODES[number])
        if number % 2 == 0:
            check_varlen(q, k, v, *starts, sinks=sinks, alibi_slopes=slopes, softcap=6.0, window=(40, 30))
            check_varlen(q, k, v, *starts, alibi_slopes=slopes[0], softcap=6.0, mode=MODES[number + 1])


def test_one_index_dtype_each():
    q, k, v, starts_q, starts_k = packed([5, 9], [20, 7], 2, 2, 64)
    check_varlen(q, k, v, starts_q.long(), starts_k)
    check_varlen(q, k, v, starts_q, starts_k.long())


def test_starts_that_are_not_dense():
    q, k, v, *starts = packed([5, 9, 30], [20, 7, 44], 2, 2, 64)
    spread = [torch.stack((x, torch.full_like(x, 3)), dim=1).flatten()[::2] for x in starts]
    assert spread[0].stride() == (2,)
    check_varlen(q, k, v, *spread)
    check_varlen(q, k, v, starts[0], spread[1], causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_of_nan_is_its_own_affair(causal):
    """Tiles reach into the next sequence's rows and keys; nothing of it may show.

    Every row sees a key: a hidden NaN may reach a row or not.
    """
    lengths = [70, 0, 129, 5, 64, 200], [75, 30, 129, 200, 65, 210]
    q, k, v, *starts = packed(*lengths, 2, 2, 64)
    for of in (0, 1):
        nans = [x.clone() for x in (q, k, v)]
        for x, begin in zip(nans, (starts[0], starts[1], starts[1]), strict=True):
            for b, (start, end) in enumerate(pairwise(begin.tolist())):
                if b % 2 == of:
                    x[start:end] = NAN
        check_varlen(*nans, *starts, causal=causal, mode=MODES[of])  # the oracle computes each sequence alone


def test_out_is_written_where_it_is_and_nowhere_else():
    """Rows past a sequence's end are the next one's; room between rows is nobody's."""
    for head_dim in (64, 33, 256):
        q, k, v, *starts = packed(*RAGGED["uneven"], 2, 2, head_dim)
        room = torch.full((q.shape[0] + 140, 3, head_dim + 8), 7.0, dtype=BF16)
        out = room[3 : q.shape[0] + 3, :2, :head_dim].fill_(NAN)
        got, _ = check_varlen(q, k, v, *starts, out=out, mode=MODES[1])
        assert got is out
        out.fill_(7.0)
        assert (room == 7.0).all()


def test_the_same_bits_as_alone_and_in_any_order_of_threads():
    q, k, v, *starts = packed(*RAGGED["uneven"], 2, 2, 64)
    for causal in (False, True):
        states = []
        for late, seed in (*MODES, (True, 3), (False, 4)):
            with emulated(late, seed), nan_in_new_memory():
                states.append(attention_varlen(q, k, v, *starts, causal=causal, return_lse=True, backend="emulator"))
        for o, lse in states[1:]:
            assert torch.equal(o, states[0][0])
            assert torch.equal(lse, states[0][1])
        for (q0, q1), (k0, k1) in zip(*(pairwise(x.tolist()) for x in starts), strict=True):
            alone = attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], causal=causal, backend="emulator")
            assert torch.equal(alone[0], states[0][0][q0:q1])


@pytest.mark.parametrize(("head_dim", "heads", "paging"), [(64, 2, 0), (128, 8, 16), (256, 2, 0)])
def test_the_same_bits_beside_any_others(head_dim, heads, paging):
    """Rows behind a sequence's end, which are the next one's, share a warp with its last rows. Where theirs grow from
    block to block, or are NaN, references move; those of this sequence's rows must not."""
    lengths = [21, 16, 90], [700, 30, 100]
    q, k, v, starts_q, starts_k = packed(*lengths, heads, 2, head_dim)
    # Scores creep up from block to block, which are visited from the last one down: a reference may move, or stay.
    k[:700] *= torch.linspace(3.0, 0.3, 700)[:, None, None].to(k.dtype)
    keys = paged(k, v, starts_k, paging) if paging else (k, v, None)
    outcomes = []
    for others in (0.0, 40.0, NAN):
        q[21:] = others
        with nan_in_new_memory():
            o, lse = attention_varlen(
                q, *keys[:2], starts_q, starts_k, page_table=keys[2], return_lse=True, backend="emulator"
            )
        outcomes.append((o[:21], lse[:, :21]))
    for o, lse in outcomes[1:]:
        assert torch.equal(o, outcomes[0][0])
        assert torch.equal(lse, outcomes[0][1])


def test_no_sequences_no_queries_no_keys():
    for lengths in (([], []), ([0, 0], [0, 0]), ([0], [5]), ([5], [0])):
        q, k, v, *starts = packed(*lengths, 2, 2, 64)
        with nan_in_new_memory():
            o, lse = attention_varlen(q, k, v, *starts, return_lse=True, backend="emulator")
        assert o.shape == q.shape
        assert not o.any()
        assert (lse == -math.inf).all()


# ---- pages -----------------------------------------------------------------------------------------------------------
PAGED = [40, 0, 129, 5, 33, 1], [150, 30, 129, 0, 256, 64]


@pytest.mark.parametrize("page_size", [1, 16, 17, 20, 64, 256])
def test_pages(page_size):
    """Pages in no order; NaN in rows and pages that no token has, anything in the table beyond a sequence's end."""
    q, k, v, *starts = packed(*PAGED, 2, 2, 64)
    for number, (causal, window) in enumerate(((False, None), (True, None), (True, (40, None)))):
        *pages, table = paged(k, v, starts[1], page_size, seed=number)
        check_varlen(q, *pages, *starts, page_table=table, causal=causal, window=window, mode=MODES[number])


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (256, 16), (192, 64), (33, 20)])
def test_pages_and_head_dims(head_dim, page_size):
    q, k, v, *starts = packed(*PAGED, 2, 2, head_dim, dtype=FP16 if head_dim == 128 else BF16)
    *pages, table = paged(k, v, starts[1], page_size)
    check_varlen(q, *pages, *starts, page_table=table, causal=True, mode=MODES[2])
    check_varlen(q, *pages, *starts, page_table=table, mode=MODES[3])


def test_pages_of_heads_first_and_a_table_of_any_rows():
    q, k, v, *starts = packed(*PAGED, 2, 2, 64)
    *pages, table = paged(k, v, starts[1], 16, heads_first=True)
    check_varlen(q, *pages, *starts, page_table=table, mode=MODES[1])
    wide = torch.full((table.shape[0] * 2, table.shape[1] + 5), -7, dtype=torch.int32)
    view = wide[::2, : table.shape[1]].copy_(table)
    check_varlen(q, *pages, *starts, page_table=view, causal=True)


def test_a_page_may_be_shared():
    """Two sequences with the same first pages, and one whose pages are all the same."""
    k, v = (randn(5, 16, 2, 64, dtype=BF16, seed=i) for i in (1, 2))
    table = torch.tensor([[4, 1, 0], [4, 1, 3], [2, 2, 2]], dtype=torch.int32)
    q = randn(50, 2, 64, dtype=BF16)
    check_varlen(q, k, v, starts_of([20, 20, 10]), starts_of([40, 48, 35]), page_table=table, causal=True)
    check_varlen(q[:3], k, v, starts_of([1, 1, 1]), starts_of([40, 48, 35]), page_table=table.expand(3, 3))


def test_chunked_prefill_equals_the_whole():
    q, k, v, *starts = packed([200, 90], [200, 90], 2, 2, 64)
    whole = attention_varlen(q, k, v, *starts, causal=True, backend="emulator")
    *pages, table = paged(k, v, starts[1], 16)
    chunk, seen = torch.cat((q[100:150], q[200:220])), starts_of([150, 20])
    part, _ = check_varlen(chunk, *pages, starts_of([50, 20]), seen, page_table=table, causal=True)
    torch.testing.assert_close(part, torch.cat((whole[100:150], whole[200:220])), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("page_size", [16, 20, 17])
def test_pages_with_groups_sinks_and_alibi(page_size):
    q, k, v, *starts = packed(*PAGED, 8, 2, 64)
    *pages, table = paged(k, v, starts[1], page_size)
    sinks, slopes = torch.linspace(-2, 2, 8), torch.rand(len(PAGED[0]), 8)
    check_varlen(q, *pages, *starts, page_table=table, sinks=sinks, causal=True)
    check_varlen(q, *pages, *starts, page_table=table, sinks=sinks, alibi_slopes=slopes, softcap=9.0, mode=MODES[2])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_pages_on_the_cpu(dtype):
    q, k, v, *starts = packed(*PAGED, 4, 2, 40, dtype=dtype)
    for page_size in (1, 16, 17):
        *pages, table = paged(k, v, starts[1], page_size)
        for causal in (False, True):
            got = attention_varlen(q, *pages, *starts, page_table=table, causal=causal, return_lse=True, backend="cpu")
            want = attention_varlen(q, k, v, *starts, causal=causal, return_lse=True, backend="cpu")
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])


Q, K, V, *STARTS = packed([5, 9], [20, 33], 2, 2, 64)
*PAGES, TABLE = paged(K, V, STARTS[1], 16)


@pytest.mark.parametrize("backend", ["cpu", "emulator"])
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"page_table": TABLE.long()}, ValueError, "page_table must be one of int32"),
        ({"page_table": TABLE.tolist()}, TypeError, "page_table"),
        ({"page_table": TABLE[:1]}, ValueError, "page_table must have shape"),
        ({"page_table": TABLE[0]}, ValueError, "page_table must have 2 dimensions"),
        ({"page_table": TABLE.to("meta")}, ValueError, "page_table must be on cpu"),
        (
            {"page_table": TABLE[:, :2]},
            ValueError,
            "must have 3 pages for the 33 tokens of sequence 1",
        ),
        ({"page_table": TABLE.T.contiguous().T}, ValueError, "page_table must have stride 1"),
        ({"page_table": torch.full_like(TABLE, 99)}, ValueError, "page_table must name pages from 0 to 7"),
        ({"page_table": torch.full_like(TABLE, -1)}, ValueError, "page_table must name pages from 0 to 7"),
        ({"page_table": None}, ValueError, "k must have 3 dimensions"),
        ({"k": K, "v": V}, ValueError, "k must have 4 dimensions"),
        ({"v": PAGES[1][:5]}, ValueError, "v must have shape"),
        ({"k": PAGES[0][:, :0], "v": PAGES[1][:, :0]}, ValueError, "page_size of k must be at least 1"),
        ({"cu_seqlens_k": torch.tensor([0, 40, 20])}, ValueError, "cu_seqlens_k must not decrease"),
        ({"cu_seqlens_k": torch.tensor([1, 20, 53])}, ValueError, "cu_seqlens_k must start with 0"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 13])}, ValueError, "cu_seqlens_q must end with q's total of 14"),
        ({"exact": 0}, TypeError, "exact"),
    ],
)
def test_wrong_pages_are_refused(changes, error, match, backend):
    given = {"q": Q, "k": PAGES[0], "v": PAGES[1], "cu_seqlens_q": STARTS[0], "cu_seqlens_k": STARTS[1]}
    out = torch.full_like(Q, NAN)
    with pytest.raises(error, match=match):
        attention_varlen(**{**given, "page_table": TABLE, "backend": backend, "out": out, **changes})
    assert out.isnan().all()


# ---- the list of tiles -----------------------------------------------------------------------------------------------
def weight_class(blocks: int) -> tuple[int, int]:
    """Key blocks to a quarter of an octave: what "heaviest first" is true to."""
    octave = blocks.bit_length() - 1
    return octave, (blocks << 2 >> octave) & 3


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 30)], ids=str)
def test_the_list_has_every_tile_once_heaviest_first(window, heads):
    lengths = [0, 700, 1, 128, 129, 64, 0, 40, 333, 20] * 2, [50, 900, 700, 1, 0, 64, 9, 400, 333, 5000] * 2
    q, k, v, *starts = packed(*lengths, *heads, 64)
    with emulated(seed=3) as launches:
        bound = prefill.Forward(q, k, v, q, Scores(window), tma=True, sequences=len(lengths[0]))
        work = torch.full((prefill.LIST_HEADER + prefill.TILE_WORDS * bound.list_tiles + prefill.BUCKETS,), -1).int()
        run_list(bound, work, *starts)
    assert launches[-1].spec.entry == "ragged"
    constants = dict(launches[-1].spec.constants)
    tile_q, tile_kv, pack = (constants[name] for name in ("kTileQ", "kTileKv", "kPack"))
    total = int(work[0])
    rows = work[prefill.LIST_HEADER :][: prefill.TILE_WORDS * total].view(total, -1).tolist()
    expected = [(s, row) for s, n in enumerate(lengths[0]) for row in range(0, n * pack, tile_q)]
    assert sorted((row[2], row[0]) for row in rows) == expected
    assert total <= bound.list_tiles
    classes = [weight_class(row[8] - row[7]) for row in rows]
    assert classes == sorted(classes, reverse=True)
    views = [reference.visible(nq, nk, window=window) for nq, nk in zip(*lengths, strict=True)]
    for row, _, s, q_start, k_start, seqlen_q, seqlen_k, begin, end, *_ in rows:
        assert (seqlen_q, seqlen_k) == (lengths[0][s], lengths[1][s])
        assert (q_start, k_start) == (int(starts[0][s]), int(starts[1][s]))
        tokens = slice(row // pack, (row + tile_q - 1) // pack + 1)
        seen = views[s][tokens].any(0).nonzero().flatten().tolist()
        blocks = (seen[0] // tile_kv, seen[-1] // tile_kv + 1) if seen else (0, 1)
        assert (begin, end) == blocks


def run_list(bound: prefill.Forward, work: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor) -> None:
    """The list kernel alone."""
    args = bound.ragged_args
    args.starts_q, args.starts_k, args.list = starts_q.data_ptr(), starts_k.data_ptr(), work.data_ptr()
    args.buckets = work.data_ptr() + 4 * (work.numel() - prefill.BUCKETS)
    tensors = {"work": work, "starts_q": starts_q, "starts_k": starts_k}
    emulator.launch(bound.ragged_spec, (1, 1, 1), [bound.args, args], tensors)


@pytest.mark.parametrize("name", GARBAGE)
def test_wrong_starts_touch_nothing_outside(name):
    starts = torch.tensor(GARBAGE[name], dtype=torch.int32)
    right = starts_of([1000] + [0] * (len(starts) - 2))
    q, k, v = (randn(1000, 1, 64, dtype=BF16, seed=i) for i in range(3))
    o, lse = torch.empty_like(q), torch.empty(1, 1000)
    for starts_q, starts_k in ((starts, right), (right, starts), (starts, starts)):
        bound = prefill.Forward(q, k, v, o, Scores(), tma=True, sequences=len(starts) - 1)
        bound(q, k, v, o, lse, None, None, (starts_q, starts_k))


@pytest.mark.parametrize("head_dim", [64, 33])
@pytest.mark.parametrize("name", GARBAGE)
def test_wrong_lengths_touch_nothing_outside_of_a_page_table(name, head_dim):
    starts = torch.tensor(GARBAGE[name][:4], dtype=torch.int32)
    q = randn(30, 1, head_dim, dtype=BF16)
    k, v = (randn(12, 16, 1, head_dim, dtype=BF16, seed=i) for i in (1, 2))
    table, o = torch.arange(12, dtype=torch.int32).view(3, 4), torch.empty_like(q)
    bound = prefill.Forward(q, k, v, o, Scores(), tma=head_dim == 64, sequences=3, paged=True)
    bound(q, k, v, o, None, None, None, (starts_of([10, 10, 10]), starts), table)
