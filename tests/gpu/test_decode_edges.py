"""Decode at its edges, in the emulator: lists that grow under windows, kernels kept on a plan, a counter that wraps,
rows that one key rules. Kernels are those that the other suites build too."""

from __future__ import annotations

import math

import pytest
import torch
from decode_cases import (
    BF16,
    FOLDED,
    FORMATS,
    FP16,
    MODES,
    SMALL,
    UNCUT,
    assert_decoded,
    check,
    check_growth,
    decode,
    grow,
    kept,
    make_cache,
    make_tree,
    queries,
    stored,
)

import tilewise
from tilewise import PagedKVCache, arch, plan_decode
from tilewise.gpu import decode as decoding
from tilewise.gpu import decode_kernels
from tilewise.plan.worklist import FAR, Splitting, WorkList


# ---- lists that grow -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("splitting", [SMALL, UNCUT, FOLDED], ids=["cut", "uncut", "folded"])
def test_the_window_moves_when_a_sequence_grows(splitting):
    """What was an item's first chunk is hidden after a step, or after several."""
    for window, tokens in (((40, 0), 1), ((15, 0), 3), ((100, 0), 1)):
        cache, seqs = make_cache((1, 16, 90, 0, 200), spare=40)
        check_growth(cache, seqs, (1, 20, 15), window=window, tokens=tokens, splitting=splitting)


def test_a_list_that_has_grown_under_a_window_has_the_same_bits_folded_and_cut():
    """Pieces are counted from where the range began, not from where the window has come to."""
    states = []
    for whole in (False, True):
        cache, seqs = make_cache((90, 64, 200), spare=40)
        splitting = Splitting(((FAR, 64),), whole=whole)
        states.append(check_growth(cache, seqs, (17, 20), window=(100, 0), tokens=2, splitting=splitting))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_the_window_of_quantised_pages_moves_when_a_sequence_grows():
    for kv_format, runs in (("int8", True), ("int4", False)):
        cache, seqs = make_cache((1, 16, 90, 200), kv_format=kv_format, spare=40)
        check_growth(cache, seqs, (1, 20), window=(40, 0), runs=runs, splitting=SMALL)


@pytest.mark.parametrize("tiles", [None, False])
def test_windows_over_a_shared_node_move_when_its_sequences_grow(tiles):
    """Rows of sequences of different lengths, over a node that some see less of with every step, and then nothing."""
    for window, group, tokens in (((100, 0), 8, 1), ((100, 0), 4, 3), ((40, 0), 8, 1)):
        cache, seqs = make_tree([1, 3], [120, 9])
        grow(cache, seqs[:1], 9, seed=5)
        options = {"share": True, "window": window, "group": group, "tokens": tokens, "tiles": tiles}
        check_growth(cache, seqs, (1, 20, 30), **options, splitting=SMALL)


def test_one_of_the_sequences_under_a_node_grows_alone():
    cache, seqs = make_tree([1, 3], [120, 9])
    for window in (None, (100, 0)):
        check_growth(cache, seqs, (1, 16), window=window, share=True, group=8, grown=seqs[1:2], splitting=SMALL)


def test_pieces_that_are_not_reached_yet_leave_nothing(monkeypatch):
    """One state of a row that is its result, beside pieces of the room; then two, then three. Four warps take items
    with tokens first and come to the empty ones when the results stand."""
    monkeypatch.setattr(decoding, "multiprocessors", lambda device: 1)
    cache, seqs = make_cache((40, 0, 64, 3, 17, 30), spare=60)
    check_growth(cache, seqs, (1, 30, 64), room=100, splitting=Splitting(((FAR, 64),), whole=False))


def test_growth_ends_where_the_room_does():
    """To the last token of the room and, with it, to the last page of the tail."""
    cache, seqs = make_cache((16, 17, 31), spare=40)
    check_growth(cache, seqs, (15, 1, 16), room=32, splitting=SMALL)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    decode(cache, seqs, queries(cache, seqs), plan=plan, room=5)
    (listed,) = kept(plan, WorkList)
    lengths = [cache.length(s) for s in seqs]
    with pytest.raises(ValueError, match="make a new plan"):
        listed.grow([lengths[0], lengths[1] + 6, lengths[2]])
    assert listed.lengths.tolist() == [lengths[n] for n in listed.order], "nothing has changed"


def test_sequences_of_whole_pieces_have_no_state_more():
    """Exactly one, two and three pieces, a token less and a token more; states of neighbours lie one after another."""
    cache, seqs = make_cache((64, 128, 192, 63, 65, 127, 129))
    for mode in MODES[:2]:
        check(cache, seqs, mode=mode, splitting=Splitting(((FAR, 64),), whole=False))


# ---- kernels that are kept on a plan ---------------------------------------------------------------------------------
def called_twice(cache, seqs, first, second):
    """A plan's result under `second` after `first`, and a new plan's."""
    states = []
    for calls in ((first, second), (second,)):
        plan = None
        for options in calls:
            options = dict(options)
            q = options.pop("q")
            plan = plan or plan_decode(cache, seqs, num_heads=q.shape[2], tokens_per_seq=q.shape[1], share_prefix=False)
            state = decode(cache, seqs, q, plan=plan, **options)
        states.append(state)
    return states


@arch.as_card("sm_90a")
def test_a_plan_called_with_something_else_has_another_kernel():
    """Softcap, tree, dtype, strides, pages, scales in runs: each is in the key under which a plan keeps its kernels."""
    cache, seqs = make_cache((100, 31), kv_format="int8")
    plain = queries(cache, seqs, tokens=3)
    more = [[torch.cat([x, x[:3]]) for x in parts] for parts in stored(cache)]
    heads_first = [
        [x.transpose(1, 2).contiguous().transpose(1, 2) if n == 0 else x for n, x in enumerate(parts)]
        for parts in stored(cache)
    ]
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1, 1)
    others = {
        "softcap": {"q": plain, "softcap": 2.0},
        "tree": {"q": plain, "tree": mask},
        "dtype": {"q": plain.to(FP16)},
        "strides": {"q": plain, "parts": heads_first},
        "pages": {"q": plain, "parts": more},
        "runs": {"q": plain, "runs": True},
        "copies": {"q": plain, "tma": False},
    }
    for name, other in others.items():
        for first, second in (({"q": plain}, other), (other, {"q": plain})):
            got, want = called_twice(cache, seqs, first, second)
            assert torch.equal(got[0], want[0]), name
            assert torch.equal(got[1], want[1]), name
    plan = plan_decode(cache, seqs, num_heads=8, tokens_per_seq=3, share_prefix=False)
    for options in ({"q": plain}, *others.values()):
        decode(cache, seqs, plan=plan, **options)
    assert len(kept(plan, decoding.Decode)) == len(others) + 1


def test_a_plan_called_with_another_room_or_splitting_has_another_list():
    cache, seqs = make_cache((100, 31))
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    for options in ({}, {"room": 9}, {"splitting": UNCUT}, {"splitting": FOLDED}, {}):
        assert_decoded(decode(cache, seqs, q, plan=plan, **options), q, cache, seqs)
    assert [int(x.capacity[0]) for x in kept(plan, WorkList)] == [100, 109, 100, 100]


def test_the_grid_barrier_s_counter_goes_round():
    """It starts again at a multiple of the blocks, so that a launch's blocks still count up to one."""
    cache, seqs = make_cache((300, 64), kv_heads=1)
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=4, share_prefix=False)
    first = decode(cache, seqs, q, plan=plan)
    (bound,) = kept(plan, decoding.Decode)
    (space,) = bound.workspaces.values()
    blocks = bound.grid[0]
    assert blocks == 3
    assert bound.args.merge_rows
    end = (1 << 30) // blocks * blocks
    space.barrier.fill_(end - blocks)
    for expected in (0, blocks):
        again = decode(cache, seqs, q, plan=plan, mode=MODES[2])
        assert space.barrier.tolist() == [expected]
        assert torch.equal(again[0], first[0])


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_queries_and_outputs_whose_rows_are_off_eight_bytes():
    """They go by way of others: a stride of 66 values, and a start that is off by one, each alone."""
    cache, seqs = make_cache((100, 31))
    q = queries(cache, seqs)
    plan = plan_decode(cache, seqs, num_heads=8)
    want = tilewise.decode(q, cache, 0, plan, backend="emulator")
    for room in (torch.zeros(2, 1, 8, 66, dtype=BF16)[..., :64], torch.zeros(1025, dtype=BF16)[1:].view(2, 1, 8, 64)):
        assert torch.equal(tilewise.decode(room.copy_(q), cache, 0, plan, backend="emulator"), want)
        out = room.fill_(math.nan)
        assert tilewise.decode(q, cache, 0, plan, out=out, backend="emulator") is out
        assert torch.equal(out, want)


def test_scales_off_sixteen_bytes_are_fetched_one_by_one():
    """Runs that begin between multiples of 16 bytes, pages whose runs do, tokens that do not follow each other."""
    cache, seqs = make_cache((100, 31), kv_format="int8")
    q = queries(cache, seqs)
    want = decode(cache, seqs, q)

    def moved(x, after, extra):
        pages, tokens, heads, one = x.shape
        room = torch.full((after + pages * (heads * tokens + extra),), math.nan)
        of = room[after:].view(pages, -1)[:, : heads * tokens].view(pages, heads, tokens, one).transpose(1, 2)
        return of.copy_(x)

    for after, extra in ((0, 0), (1, 0), (0, 1), (2, 2)):
        parts = [[codes, moved(scale, after, extra)] for codes, scale in stored(cache)]
        runs = decode_kernels.scales_in_runs(cache.format, 16, [scale for _, scale in parts])
        assert runs == ((after, extra) == (0, 0))
        got = decode(cache, seqs, q, parts=parts)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kv_format", ["fp8", "int4"])
def test_a_run_of_scales_by_copies_is_that_of_the_first_token_in_view(kv_format):
    """Windows that begin at every third token of a chunk: the tokens before have no page that is looked at."""
    for length in (200, 203, 206, 209, 212):
        cache, seqs = make_cache((length, 50), kv_format=kv_format, head_dim=128)
        check(cache, seqs, window=(40, 0), runs=True, tma=False)


# ---- weights ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_row_that_one_key_rules_is_its_value_to_the_bit(kv_format):
    """Every place of a chunk in turn: a weight of 1 times a value that the format holds exactly."""
    tokens, dtype = 48, FP16 if kv_format == "fp16" else BF16
    cache = PagedKVCache(10, 16, 2, 64, kv_format=kv_format)
    first = cache.allocate()
    k = torch.zeros(tokens, 2, 64)
    k[torch.arange(tokens), :, torch.arange(tokens)] = 120.0
    top = {"int8": 127, "int4": 15, "fp8": 7}.get(kv_format, 127)  # fp8: 448 = 7 · 64, so that scales are powers of two
    v = torch.randint(0, top + 1, (tokens, 2, 64), generator=torch.Generator().manual_seed(1)).float()
    v[..., 0::32], v[..., 1::32] = top, 0
    v *= (
        2.0 ** (torch.arange(tokens) % 5)[:, None, None]
    )  # neighbours, and the same place of two pages, have other scales
    cache.write(0, cache.extend([first], tokens), k, v)
    seqs = [first, *(cache.fork(first) for _ in range(tokens // 8 - 1))]
    q = torch.zeros(tokens // 8, 1, 2, 8, 64, dtype=dtype)  # head h of sequence n asks for token 8n + h
    for n in range(tokens):
        q[n // 8, 0, :, n % 8, n] = 120.0
    q = q.view(tokens // 8, 1, 16, 64)
    for splitting in (SMALL, UNCUT, Splitting(((FAR, 16),), whole=False)):
        o, lse = decode(cache, seqs, q, splitting=splitting)
        expected = v.view(tokens // 8, 8, 2, 64).transpose(1, 2)
        assert torch.equal(o.view(tokens // 8, 2, 8, 64).float(), expected)
        assert_decoded((o, lse), q, cache, seqs)


@pytest.mark.parametrize("kv_format", ["fp8", "int8", "int4"])
def test_a_sum_of_weights_that_outgrows_float32(kv_format):
    """Zeros under logits that rise, none of them far: no product tells that the sum has to come down."""
    cache = PagedKVCache(50, 16, 2, 64, kv_format=kv_format)
    seq = cache.allocate()
    logits = torch.cat([torch.zeros(16), torch.linspace(17, 21.5, 584)])
    k = torch.zeros(600, 2, 64)
    k[..., 0] = 8 * logits[:, None]
    cache.write(0, cache.extend([seq], 600), k, torch.zeros(600, 2, 64))
    q = torch.zeros(1, 1, 8, 64, dtype=BF16)
    q[..., 0] = 1.0
    for splitting in (UNCUT, SMALL):
        got = decode(cache, [seq], q, splitting=splitting)
        assert got[1].isfinite().all()
        assert_decoded(got, q, cache, [seq])


# ---- trees -----------------------------------------------------------------------------------------------------------
def test_the_first_query_token_is_seen_by_all_whatever_the_mask_says():
    cache, seqs = make_cache((70, 6, 33))
    mask = torch.eye(6, dtype=torch.bool).repeat(3, 1, 1)
    rooted = mask.clone()
    rooted[..., 0] = True
    q = queries(cache, seqs, group=1, tokens=6)
    mask[:, 0, 0] = False
    got = decode(cache, seqs, q, tree=mask)
    assert_decoded(got, q, cache, seqs, tree_mask=rooted)


def test_joining_warps_wait_until_nobody_looks_at_the_tiles():
    """Both warpgroups have tiles of different lengths of work; what joins is loaded where the tiles were."""
    cache, seqs = make_tree([1, 35], [707, 33])
    alone = [cache.allocate() for _ in range(8)]
    grow(cache, alone, [7 * n + 5 for n in range(8)], seed=3)
    for mode in MODES[:3]:
        check(cache, [*alone, *seqs], share=True, mode=mode, splitting=SMALL)


def test_rows_without_a_key_beside_rows_that_have_some():
    """A window that ends before a node, sequences without a token, sinks: zeros, and the sink alone."""
    cache, seqs = make_tree([1, 4], [90, 30])
    empty = cache.allocate()
    sinks = torch.linspace(-2, 3, 8)
    o, lse = check(cache, [empty, *seqs], window=(5, 0), share=True, sinks=sinks)
    assert not o[0].any()
    assert torch.allclose(lse[0, :, 0], sinks)
    o, lse = check(cache, [empty, *seqs], window=(5, 0), share=True)
    assert (lse[0] == -math.inf).all()
