"""The Hopper forward at its edges, in the emulator: windows that end with a block, tables without a column too many,
lists without a tile too many, the order of tiles. Kernels are those that the other suites build too."""

from __future__ import annotations

import ctypes
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from forward_cases import BF16, MODES, NAN, check, check_varlen, normal, packed, paged, problem, starts_of, tile_of

from tilewise import attention, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import prefill
from tilewise.scores import Scores

KERNELS = Path(__file__).parents[1] / "kernels"


# ---- masks -----------------------------------------------------------------------------------------------------------
def test_the_last_row_of_a_group_decides_which_blocks_are_whole():
    """Windows whose left edge meets a block's first key in just one of 64 rows, or of 32."""
    q, k, v = problem(1, 128, 384, 1, 1, 64)
    _, block = tile_of(1, 128, 384, 1, 1, 64)
    for number, left in enumerate((190, 191, 192, 253, 254, 255, 256)):
        check(q, k, v, window=(left, None), mode=MODES[number % 4])
    for number, right in enumerate(block - rows + more for rows in (64, 32) for more in (-1, 0, 1)):
        check(q, k, v, window=(None, max(0, right)), mode=MODES[number % 4])


def test_the_last_row_of_packed_heads_decides_which_blocks_are_whole():
    """Rows are neighbouring heads of a token there: 64 of them are 16 tokens."""
    q, k, v = problem(1, 32, 384, 8, 2, 64)
    for number, left in enumerate((*range(126, 130), *range(222, 227))):
        check(q, k, v, window=(left, None), mode=MODES[number % 4])
    for number, right in enumerate((0, 1, 15, 16, 17)):
        check(q, k, v, window=(200, right), mode=MODES[number % 4])


def test_one_key_that_is_hidden_or_seen_at_each_edge_of_a_window():
    """A value that outweighs all others at the key just inside of the window, and at the one just outside."""
    keys, rows = 300, 70
    for side, window in product((0, 1), ((130, 20), (128, 0), (0, 128))):
        for just_outside in (0, 1):
            q, k, v = problem(1, rows, keys, 1, 1, 64)
            row = rows // 2
            position = row + keys - rows
            at = position - window[0] - just_outside if side == 0 else position + window[1] + just_outside
            if 0 <= at < keys:
                v[0, at] = 1000.0
            o, _ = check(q, k, v, window=window)
            assert (o[0, row].abs().max() > 1) != bool(just_outside) or not 0 <= at < keys


# ---- heads, batches, features ----------------------------------------------------------------------------------------
def test_everything_that_differs_by_head_and_sequence_goes_to_its_own():
    """Sinks, slopes and values that tell heads and sequences apart, with heads packed into tiles and apart."""
    for nq, hq, hkv in ((20, 8, 2), (20, 2, 2), (200, 4, 2)):
        q, k, v = problem(3, nq, 90, hq, hkv, 64)
        v = v + 4 * torch.arange(3 * hkv).view(3, 1, hkv, 1).to(BF16)
        sinks, slopes = torch.linspace(-4, 6, hq), torch.linspace(-0.5, 0.9, 3 * hq).view(3, hq)
        check(q, k, v, sinks=sinks, causal=True, mode=MODES[1])
        check(q, k, v, alibi_slopes=slopes, softcap=20.0, sinks=sinks, mode=MODES[2])
        check(q, k, v, alibi_slopes=slopes[0], softcap=20.0, causal=True, window=(40, None))


def test_alibi_counts_from_the_row_s_own_position():
    """Steep slopes over equal keys: each row's weights lie about its own token, whichever side has more."""
    for nq, nk, heads in ((20, 90, (8, 2)), (90, 20, (2, 2)), (64, 64, (2, 2))):
        q, k, v = problem(1, nq, nk, *heads, 64)
        k = torch.zeros_like(k)
        slopes = torch.linspace(0.5, 4, heads[0])
        check(q, k, v, alibi_slopes=slopes, softcap=20.0, mode=MODES[3])


# ---- pages -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_page_table_has_just_the_columns_that_are_needed(page_size):
    """Lengths that are multiples of a page, of a block, and one token more; the table ends with the last page."""
    for lengths in ([16, 32, 80], [64, 0, 192], [0, 64, 128], [15, 17, 129]):
        q, k, v, *starts = packed([5, 40, 9], lengths, 2, 2, 64)
        *pages, table = paged(k, v, starts[1], page_size)
        exact = table[:, : -(-max(lengths) // page_size)].contiguous()
        check_varlen(q, *pages, *starts, page_table=exact, causal=True)
        check_varlen(q, *pages, *starts, page_table=exact, window=(20, None), mode=MODES[1])


# ---- the list of tiles -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("starts", [[0, 1000] * 20, [0, 1000, 0, 900, 0, 1000, 100, 1000, 0, 500, 0, 1000]])
def test_a_list_ends_where_its_room_does(starts):
    """Starts that make no sense want more tiles than there is room for: what lies behind the list stays as it is."""
    wrong = torch.tensor(starts, dtype=torch.int32)
    right = starts_of([1000] + [0] * (len(starts) - 2))
    q, k, v = (normal(1000, 1, 64, seed=i) for i in range(3))
    bound = prefill.Forward(q, k, v, q, Scores((None, 0)), tma=True, sequences=len(starts) - 1)
    words = prefill.LIST_HEADER + prefill.TILE_WORDS * bound.list_tiles
    work = torch.full((words + 4096 + prefill.BUCKETS,), -77, dtype=torch.int32)
    args = bound.ragged_args
    args.starts_q, args.starts_k, args.list = wrong.data_ptr(), right.data_ptr(), work.data_ptr()
    args.buckets = work.data_ptr() + 4 * (work.numel() - prefill.BUCKETS)
    tensors = {"work": work, "starts_q": wrong, "starts_k": right}
    emulator.launch(bound.ragged_spec, (1, 1, 1), [bound.args, args], tensors)
    assert int(work[0]) == bound.list_tiles
    assert (work[words : -prefill.BUCKETS] == -77).all()


@pytest.mark.parametrize("heads", [(6, 6), (8, 2)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (40, 5)], ids=str)
def test_every_tile_has_a_number_and_the_heaviest_of_neighbouring_heads_come_first(heads, window):
    batch, nq, nk = 3, 700, 650
    q, k, v = problem(batch, nq, nk, *heads, 64)
    bound = prefill.Forward(q, k, v, q, Scores(window), tma=True)
    constants = {name: value for name, value in bound.spec.constants if name in ("kTileQ", "kTileKv", "kPack")}
    tile_q, tile_kv, pack = constants["kTileQ"], constants["kTileKv"], constants["kPack"]
    tile_heads = heads[0] // pack
    count = bound.args.tiles + 1
    found = torch.full((count, 6), -9, dtype=torch.int32)
    spec = KernelSpec("order", str(KERNELS / "work_order.cu"), "order", tuple(constants.items()), 32, 0)
    args = [bound.args, ctypes.c_void_p(found.data_ptr()), ctypes.c_int(count)]
    emulator.launch(spec, (1, 1, 1), args, {"tiles": found})
    *tiles, beyond = found.tolist()
    assert beyond[2] == -1
    rows = range(0, nq * pack, tile_q)
    assert sorted(tuple(t[:3]) for t in tiles) == sorted(product(range(batch), range(tile_heads), rows))
    assert all(t[5] == t[1] * pack // (heads[0] // heads[1]) for t in tiles)
    for _, _, row, begin, end, _ in tiles:
        first, last = row // pack, min((row + tile_q - 1) // pack, nq - 1)
        left, right = window
        low = 0 if left is None else max(0, first + nk - nq - left)
        high = nk - 1 if right is None else min(nk - 1, last + nk - nq + right)
        blocks = (low // tile_kv, high // tile_kv + 1) if high >= low else (0, 1)
        assert (begin, end) == blocks
    if window == (None, 0):
        together = bound.args.together.divisor
        size = together * len(rows)
        assert together > 1
        for n in range(0, len(tiles), size):
            weights = [t[4] - t[3] for t in tiles[n : n + size]]
            assert weights == sorted(weights, reverse=True)
            assert len({(t[0], t[1]) for t in tiles[n : n + size]}) == together
    else:
        assert len({(t[0], t[1]) for t in tiles[: len(rows)]}) == (1 if window[1] is None else len(rows))


# ---- outputs ---------------------------------------------------------------------------------------------------------
def test_a_sink_far_above_and_far_below_every_score():
    """Only the sink counts, or it does not at all; and rows that see no key have its LSE."""
    q, k, v = problem(1, 100, 70, 2, 2, 64)
    far = torch.tensor([500.0, -500.0])
    o, lse = check(q, k, v, sinks=far, causal=True)
    assert not o[0, :, 0].any()
    assert torch.equal(lse[0, :, :30], far[:, None].expand(2, 30))
    plain = attention(q, k, v, causal=True, backend="emulator")
    assert torch.equal(o[0, :, 1], plain[0, :, 1])
    o, lse = check(q, k, v, sinks=torch.tensor([-math.inf, 0.0]), causal=True)
    assert (lse[0, 0, :30] == -math.inf).all()
    assert not o[0, :30].any()


def test_the_first_and_the_last_row_of_a_packed_sequence_s_last_tile():
    """One row more or less than a tile, whose O goes row by row: the next one's rows, which came first, stay theirs."""
    tile_q, _ = tile_of(1, 60, 60, 2, 2, 64)
    for extra in (-1, 0, 1):
        q, k, v, *starts = packed([tile_q + extra, 1, 2 * tile_q + extra, 3], [50, 300, 70, 300], 2, 2, 64)
        for causal in (False, True):
            out = torch.full_like(q, NAN)
            check_varlen(q, k, v, *starts, out=out, causal=causal, mode=MODES[extra % 4])
