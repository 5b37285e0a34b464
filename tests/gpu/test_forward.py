"""The Hopper forward behind `attention`, in the emulator: every length, mask, layout and feature against the oracle."""

from __future__ import annotations

import ctypes
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from forward_cases import (
    BF16,
    FP16,
    MODES,
    NAN,
    Chance,
    check,
    emulated,
    nan_in_new_memory,
    normal,
    problem,
    spec_of,
    tile_of,
)
from oracle import assert_attention

from tilewise import BlockSchedule, attention, attention_varlen, compiler, emulator
from tilewise.arch import EMULATED_BLOCKS
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import abi, calls, prefill, tilings
from tilewise.scores import Scores

LENGTHS = (1, 63, 65, 127, 129, 193)
WINDOWS = ((0, 0), (None, 3), (5, None), (70, 10), (3, 130), (1000, 1000))


# ---- lengths and masks -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim, causal):
    for number, (nq, nk) in enumerate(product(LENGTHS, LENGTHS)):
        q, k, v = problem(1, nq, nk, 2, 2, head_dim, seed=number)
        o, lse = check(q, k, v, causal=causal, mode=MODES[number % 4])
        blind = max(0, nq - nk) if causal else 0  # rows before the first key's
        assert not o[:, :blind].any()
        assert (lse[:, :, :blind] == -math.inf).all()
        assert lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window):
    for number, (nq, nk) in enumerate(product(LENGTHS, LENGTHS)):
        q, k, v = problem(1, nq, nk, 1, 1, 64, seed=number)
        check(q, k, v, window=window, causal=number % 3 == 0, mode=MODES[number % 4])


def test_a_window_of_several_blocks_on_both_sides():
    """Blocks that are cut on the left, whole, and cut on the right, in one tile."""
    for head_dim in (64, 128, 256):
        q, k, v = problem(1, 300, 700, 2, 2, head_dim)
        check(q, k, v, window=(290, 40), mode=MODES[2])
        check(q, k, v, window=(150, None), causal=True, mode=MODES[3])
        check(q[:, :200], k, v, window=(None, 130))


def test_causal_equals_a_window_to_the_right():
    q, k, v = problem(1, 130, 200, 1, 1, 64)
    causal = attention(q, k, v, causal=True, backend="emulator")
    assert torch.equal(causal, attention(q, k, v, window=(None, 0), backend="emulator"))
    assert torch.equal(causal, attention(q, k, v, causal=True, window=(None, 9), backend="emulator"))


# ---- the persistent loop ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, True), (192, False), (256, True)])
def test_many_tiles_for_few_blocks_in_any_order_of_threads(head_dim, causal):
    """Tiles follow each other in a block; the same bits whoever runs them, and however late the copies land."""
    q, k, v = problem(2, 200, 310, 3, 3, head_dim)
    first = check(q, k, v, causal=causal)
    with emulated() as launches:
        attention(q, k, v, causal=causal, backend="emulator")
    assert launches[-1].args[-2].tiles > 3 * EMULATED_BLOCKS
    for late, seed in product((True, False), range(4)):
        with emulated(late, seed), nan_in_new_memory():
            again = attention(q, k, v, causal=causal, return_lse=True, backend="emulator")
        assert torch.equal(again[0], first[0]), f"{late=} {seed=}"
        assert torch.equal(again[1], first[1]), f"{late=} {seed=}"


@pytest.mark.parametrize("blocks", [1, 2, 5, 40])
def test_any_number_of_blocks(blocks, monkeypatch):
    monkeypatch.setattr(prefill, "multiprocessors", lambda device: blocks)
    check(*problem(1, 200, 150, 3, 3, 64), causal=True, mode=MODES[2])


def test_long_queries_have_tiles_of_their_own():
    """Up to tilings.SHORT rows and beyond: other tilings, the same answers."""
    for causal in (False, True):
        check(*problem(1, tilings.SHORT + 70, 150, 1, 1, 64), causal=causal, mode=MODES[1])
    check(*problem(1, 210, tilings.SHORT + 70, 1, 1, 64), causal=True, mode=MODES[2])


@pytest.mark.parametrize("exact", [False, True])
def test_short_queries_on_the_tiles_of_long_ones(exact, monkeypatch):
    monkeypatch.setattr(tilings, "SHORT", 0)
    for head_dim in (64, 256):
        for number, (nq, nk) in enumerate(((1, 1), (191, 129), (193, 300), (385, 200))):
            q, k, v = problem(1, nq, nk, 2, 2, head_dim, seed=number)
            check(q, k, v, causal=number % 2 == 0, exact=exact, mode=MODES[number])


# ---- head dimensions and dtypes --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((64, FP16), (96, BF16), (128, FP16), (192, BF16), (256, BF16), (40, BF16), (72, FP16), (136, BF16)),
        *((33, BF16), (33, FP16), (1, BF16), (250, BF16)),
    ],
    ids=str,
)
def test_head_dims(head_dim, dtype):
    """Whole and padded ones, and those whose rows are not on 16 bytes; lengths around the tiles' own."""
    tile_q, tile_kv = tile_of(1, 1, 1, 1, 1, head_dim)
    sizes = product((tile_q - 1, tile_q + 1), (1, tile_kv - 1, tile_kv, tile_kv + 1, 2 * tile_kv + 17))
    for number, (nq, nk) in enumerate(sizes):
        q, k, v = problem(1, nq, nk, 2, 2, head_dim, dtype=dtype, seed=number)
        check(q, k, v, window=(None, 0) if number % 2 and head_dim > 64 else (90, None), mode=MODES[number % 4])


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_exact_and_lazy_agree(head_dim):
    q, k, v = problem(1, 200, 600, 2, 2, head_dim, size=3.0)
    with emulated() as launches:
        states = [attention(q, k, v, exact=x, return_lse=True, backend="emulator") for x in (True, False)]
    for state in states:
        assert_attention(state, q, k, v)
    standard, lazy = (dict(launch.spec.constants) for launch in launches)
    assert standard["kExact"]
    if lazy == standard:  # where the standard softmax is hidden, the lazy one is not used
        assert torch.equal(states[0][0], states[1][0])
    else:
        assert not lazy["kExact"]


# ---- layouts ---------------------------------------------------------------------------------------------------------
LAYOUTS = ("dense", "heads", "wide", "odd", "few")


@pytest.mark.parametrize("head_dim", [64, 33])
def test_strides(head_dim):
    """Each tensor in each layout; where there is room between the rows, NaN stands in it."""
    for number, layouts in enumerate([*product(LAYOUTS[:4], repeat=3), ("dense", "few", "few"), ("few",) * 3]):
        q, k, v = (
            normal(2, 70 if i == 0 else 90, 2, head_dim, seed=i, layout=layout) for i, layout in enumerate(layouts)
        )
        try:
            check(q, k, v, causal=number % 2 == 0, mode=MODES[number % 4])
        except AssertionError as error:
            raise AssertionError(f"{layouts}: {error}") from None


def test_packed_qkv():
    for head_dim in (64, 128, 256):
        qkv = normal(2, 140, 3 * 2, head_dim).view(2, 140, 3, 2, head_dim)
        check(*qkv.unbind(2), causal=True, mode=MODES[2])
        kv = normal(2, 140, 2 * 2, head_dim).view(2, 140, 2, 2, head_dim)
        check(normal(2, 40, 4, head_dim, seed=1), kv[:, :, 0], kv[:, :, 1], mode=MODES[3])


def test_sizes_of_one_have_any_stride():
    q, k, v = (torch.full((9, 7, 5, 64), NAN, dtype=BF16)[:1, :1, :1] for _ in range(3))
    for number, x in enumerate((q, k, v)):
        x.copy_(normal(1, 1, 1, 64, seed=number))
    check(q, k, v)
    check(*(x.as_strided((1, 1, 1, 64), (3, 5, 7, 1)) for x in problem(1, 1, 1, 1, 1, 64)))


@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_out_is_written_where_it_is_and_nowhere_else(layout):
    for head_dim, causal in ((64, False), (64, True), (33, True), (256, False)):
        q, k, v = problem(2, 130, 70, 2, 2, head_dim)
        out = normal(*q.shape, layout=layout).fill_(NAN)
        storage = out.untyped_storage()
        guard = torch.empty(0, dtype=BF16).set_(storage)  # all of it, with what lies between
        guard.fill_(7.0)
        out.fill_(NAN)
        got, _ = check(q, k, v, out=out, causal=causal, mode=MODES[1])
        assert got is out
        out.fill_(7.0)
        assert (guard == 7.0).all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_out_may_be_an_input(which):
    tensors = problem(1, 150, 150, 2, 2, 64)
    kept = [x.clone() for x in tensors]
    with nan_in_new_memory():
        got = attention(*tensors, causal=True, return_lse=True, out=tensors[which], backend="emulator")
    assert got[0] is tensors[which]
    assert_attention(got, *kept, causal=True)


def test_a_bound_call_takes_an_out_that_is_an_input_and_then_one_that_is_not():
    """A GpuCall is kept for calls whose tensors look the same, and an `out` that is an input looks like another."""
    qkv = normal(1, 40, 3 * 2, 64).view(1, 40, 3, 2, 64)
    q, k, v = qkv.clone().unbind(2)
    call = calls.GpuCall(Scores(scale=0.125), True)
    assert_attention(call(q, k, v, None, None, q), *qkv.unbind(2))
    q, k, v = qkv.unbind(2)
    out = torch.full_like(qkv, NAN)[:, :, 0]
    assert out.stride() == q.stride()
    assert_attention(call(q, k, v, None, None, out), q, k, v)


# ---- heads and batches -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads", [(8, 2), (16, 2), (3, 1), (10, 2), (7, 1), (1, 1), (5, 5)], ids=str)
def test_grouped_heads(heads):
    """Where it saves tiles, the heads of a group share a tile as neighbouring rows."""
    for number, (nq, nk) in enumerate(((20, 150), (1, 65), (33, 33), (130, 70), (200, 10))):
        q, k, v = problem(2, nq, nk, *heads, 64, seed=number)
        check(q, k, v, causal=number % 2 == 0, window=(40, 20) if number == 1 else None, mode=MODES[number % 4])


def test_groups_share_tiles_where_that_saves_some():
    def pack(nq, hq, hkv, head_dim=64):
        return dict(spec_of(*problem(1, nq, 70, hq, hkv, head_dim)).constants)["kPack"]

    assert pack(20, 8, 2) == 4
    assert pack(1, 16, 1) == 16
    assert pack(20, 2, 2) == 1
    assert pack(20, 7, 1) == 1  # seven do not divide a tile
    assert pack(384, 8, 2) == 1


@pytest.mark.parametrize("layout", ["heads", "wide"])
def test_shared_tiles_in_any_layout(layout):
    q, k, v = problem(2, 50, 90, 8, 2, 64, layout=layout)
    slopes, sinks = torch.linspace(0.1, 1, 16).view(2, 8), torch.linspace(-2, 3, 8)
    check(q, k, v, causal=True, sinks=sinks, mode=MODES[3])
    check(q, k, v, alibi_slopes=slopes, sinks=sinks, softcap=5.0)


def test_many_sequences():
    check(*problem(65, 3, 5, 2, 2, 64), causal=True, mode=MODES[2])
    check(*problem(300, 1, 2, 1, 1, 64))


def test_a_sequence_of_nan_is_its_own_affair():
    q, k, v = problem(3, 100, 90, 2, 2, 64)
    for x in (q, k, v):
        x[1] = NAN
    check(q, k, v, mode=MODES[1])
    q, k, v = problem(1, 100, 150, 2, 2, 64)
    q[0, 7], q[0, 50, 1] = NAN, NAN  # rows of NaN
    v[:, :, 1] = NAN  # a KV head of NaN
    check(q, k, v, causal=True, mode=MODES[2])


# ---- what is done to the scores --------------------------------------------------------------------------------------
@pytest.mark.parametrize("exact", [False, True])
def test_softcap(exact):
    for number, cap in enumerate((0.1, 1.0, 30.0, 1000.0)):
        q, k, v = problem(1, 140, 400, 2, 2, 64, size=5.0)
        check(q, k, v, softcap=cap, causal=number % 2 == 0, exact=exact, mode=MODES[number])


def test_a_softcap_far_above_every_score_changes_nothing():
    """c · tanh(s / c) as a difference of large numbers would lose s."""
    q, k, v = problem(1, 70, 130, 1, 1, 64)
    for cap in (1e4, 1e6, 1e8):
        assert_attention(attention(q, k, v, softcap=cap, return_lse=True, backend="emulator"), q, k, v, softcap=cap)


@pytest.mark.parametrize("values", [(0.0, 5.0), (-math.inf, 2.5), (1e4, -1e4), (80.0, 95.0), (-90.0, -110.0)], ids=str)
def test_sinks(values):
    for number, dtype in enumerate((torch.float32, BF16)):
        sinks = torch.tensor(values, dtype=dtype)
        q, k, v = problem(1, 200, 150, 2, 2, 64, seed=number)
        _, lse = check(q, k, v, sinks=sinks, causal=True, mode=MODES[number])  # 50 rows see a sink alone
        assert torch.allclose(lse[0, :, 0], sinks.float(), rtol=1e-6)
    check(*problem(1, 70, 90, 2, 2, 256), sinks=sinks)
    # Without a key there is only the sink.
    o, lse = attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True, backend="emulator")
    assert not o.any()
    assert torch.equal(lse, sinks.float()[None, :, None].expand_as(lse))


@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
def test_alibi(heads):
    hq = heads[0]
    kinds = (torch.rand(hq), torch.rand(2, hq), -torch.rand(2, hq).to(BF16), 30 * torch.rand(hq))
    for number, slopes in enumerate(kinds):
        for nq, nk in ((40, 150), (150, 40)):
            q, k, v = problem(2, nq, nk, *heads, 64, seed=number)
            check(q, k, v, alibi_slopes=slopes, causal=number % 2 == 0, mode=MODES[number])
    slopes = torch.rand(hq, 2).T  # not dense
    check(q, k, v, alibi_slopes=slopes, window=(30, None))


@pytest.mark.parametrize("scale", [0.0, -0.125, -2.0, 1e-6, 3.0])
def test_any_scale(scale):
    q, k, v = problem(1, 130, 300, 2, 2, 64)
    check(q, k, v, scale=scale, causal=True)
    check(q, k, v, scale=scale, mode=MODES[3])


def test_everything_at_once():
    sinks, slopes = torch.tensor([0.5, -1.0]), torch.rand(3, 2)
    for head_dim, layout in ((128, "heads"), (33, "dense"), (256, "wide")):
        q, k, v = problem(3, 150, 190, 2, 2, head_dim, layout=layout)
        out = normal(*q.shape, layout="heads")
        options = {
            "sinks": sinks,
            "alibi_slopes": slopes,
            "softcap": 8.0,
            "window": (100, 30),
            "scale": -0.2,
            "out": out,
        }
        check(q, k, v, mode=MODES[2], **options)


def test_very_large_and_very_small_values():
    q, k, v = problem(1, 100, 300, 1, 1, 64)
    check(q, k, (v.float() * 1e30).to(BF16))
    check(q, k, (v.float() * 1e-30).to(BF16))
    check((q.float() * 1e-30).to(BF16), k, v, exact=True)
    check((q.float() * 1e15).to(BF16), (k.float() * 1e-15).to(BF16), v)


@pytest.mark.parametrize("seeds", [range(i, i + 20) for i in range(0, 100, 20)], ids=str)
def test_random_problems(seeds):
    for seed in seeds:
        chance = Chance(seed)
        try:
            chance.check()
        except (AssertionError, emulator.EmulatorError) as error:
            raise AssertionError(f"{chance}: {error}") from None


# ---- nothing to do ---------------------------------------------------------------------------------------------------
def test_empty_problems():
    for batch, nq, nk in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)):
        q, k, v = problem(batch, nq, nk, 2, 1, 64)
        with nan_in_new_memory():
            o, lse = attention(q, k, v, return_lse=True, backend="emulator")
        assert o.shape == q.shape
        assert not o.any()
        assert lse.shape == (batch, 2, nq)
        assert (lse == -math.inf).all()


def test_the_lse_is_not_asked_for_in_vain():
    q, k, v = problem(1, 70, 90, 2, 2, 64)
    with emulated() as launches:
        o = attention(q, k, v, backend="emulator")
        both = attention(q, k, v, return_lse=True, backend="emulator")
    assert torch.equal(o, both[0])
    assert "lse" not in launches[0].tensors
    assert "lse" in launches[1].tensors


# ---- what is not served ----------------------------------------------------------------------------------------------
Q, K, V = problem(1, 9, 9, 2, 2, 64)
STARTS = torch.tensor([0, 4, 9])
SCHEDULE = BlockSchedule.random(9, 9, block_q=16, block_k=16, sparsity=0.0, seed=0)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"exact": 1}, TypeError, "exact must be True or False"),
        ({"exact": None}, TypeError, "exact"),
        ({"exact": "yes"}, TypeError, "exact"),
        ({"backend": "cuda"}, ValueError, "takes CUDA tensors, got q on cpu"),
        ({"backend": "emulator:no_such"}, (ValueError, NotImplementedError), "no_such"),
        ({"backend": "hopper"}, ValueError, "backend"),
    ],
    ids=str,
)
def test_what_is_not_served_is_said(options, error, match):
    options = {"backend": "emulator", **options}
    with pytest.raises(error, match=match):
        attention(Q, K, V, **options)
    with pytest.raises(error, match=match):
        attention_varlen(Q[0], K[0], V[0], STARTS, STARTS, **options)


@pytest.mark.parametrize("head_dim", [257, 264, 512])
def test_head_dims_that_are_too_large_say_so(head_dim):
    """For FP8; tests/gpu/test_forward_pairs.py has what the others take."""
    q, k, v = (x.to(abi.FP8) for x in problem(1, 9, 9, 1, 1, head_dim))
    with pytest.raises(NotImplementedError, match=f"head_dim up to 256 in float8_e4m3fn, got {head_dim}"):
        attention(q, k, v, backend="emulator")
    with pytest.raises(NotImplementedError, match=f"head_dim up to 256 in float8_e4m3fn, got {head_dim}"):
        attention_varlen(q[0], k[0], v[0], STARTS, STARTS, backend="emulator")


def test_rungs_by_name_have_dense_problems_alone():
    q, k, v = (x.float() for x in (Q, K, V))
    rung = "emulator:scalar2d_row_tile"
    assert_attention(attention(q, k, v, return_lse=True, backend=rung), q, k, v)
    given = {
        "window": (1, 1),
        "schedule": SCHEDULE,
        "mask": lambda b, h, q, k: q >= k,
        "score": lambda s, b, h, q, k: s,
    }
    for name, value in given.items():
        with pytest.raises(NotImplementedError, match=f"of the ladder has no {name}"):
            attention(q, k, v, **{name: value}, backend=rung)


def test_exact_is_taken_everywhere():
    q, k, v = (x.float() for x in (Q, K, V))
    assert torch.equal(attention(q, k, v, exact=True), attention(q, k, v))
    states = [attention_varlen(q[0], k[0], v[0], STARTS, STARTS, exact=x) for x in (True, False)]
    assert torch.equal(*states)


# ---- arguments and specialisations -----------------------------------------------------------------------------------
KERNELS = Path(__file__).parents[1] / "kernels"
RAGGED = (("Index", "int"), ("kTileQ", 128), ("kTileKv", 128), ("kPack", 1))


def test_division_by_multiplication():
    top = 2**31 - 1
    spec = KernelSpec("divide", str(KERNELS / "divide.cu"), "divide", RAGGED, 32, 0)
    divisors = [*range(1, 300), *(2**i + j for i in range(8, 31) for j in (-1, 0, 1)), 1000003, top - 1, top]
    for divisor in divisors:
        near = {m * divisor + j for m in (0, 1, 2, 3, 77, top // divisor) for j in (-1, 0, 1)}
        numbers = sorted(n for n in {*near, 0, 1, top - 1, top, *(top // i for i in range(1, 40))} if 0 <= n <= top)
        given = torch.tensor(numbers, dtype=torch.int32)
        got = torch.full((2 * len(numbers),), -1, dtype=torch.int32)
        args = [abi.Divisor.by(divisor), ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(got.data_ptr())]
        emulator.launch(spec, (1, 1, 1), [*args, ctypes.c_int(len(numbers))], {"numbers": given, "quotients": got})
        assert got.tolist() == 2 * [n // divisor for n in numbers], divisor


def specialisations(head_dim: int) -> set[KernelSpec]:
    """Of bfloat16: all that differs by length, mask, softmax, scores and loads."""
    found = set()
    for nq, causal, exact in product((64, 4 * tilings.SHORT), (False, True), (False, True)):
        for scored, paged, tma in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 0)):
            q = torch.empty(1, dtype=BF16).expand(1, nq, 2, head_dim)
            kv = torch.empty(1, dtype=BF16).expand(4, 16, 2, head_dim) if paged else q
            window = (None, 0 if causal else None)
            options = Scores(window, 1.0, 9.0 if scored else 0.0, bool(scored), exact)
            packed_q = q[0] if paged else q
            sequences = 1 if paged else None
            bound = prefill.Forward(
                packed_q, kv, kv, packed_q, options, tma=bool(tma), sequences=sequences, paged=bool(paged)
            )
            found.add(bound.spec)
    return found


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_specialisation_compiles_without_spills(head_dim):
    rows = compiler.resource_table(sorted(specialisations(head_dim), key=str), ["sm_90a"])
    failed = []
    for row in rows:
        if row.error is not None or row.spill_stores or row.spill_loads or row.serialised:
            failed.append(
                f"{row.kernel}: spills {row.spill_stores}/{row.spill_loads} bytes {row.error or row.serialised}"
            )
        assert row.shared_bytes <= row.shared_limit, row
    assert not failed, "\n".join(failed)


def test_the_list_kernels_compile_without_spills():
    specs = [tilings.ragged_spec(index, tilings.TILINGS[64], 1) for index in (torch.int32, torch.int64)]
    for row in compiler.resource_table(specs, ["sm_90a"]):
        assert row.error is None
        assert row.spill_stores == row.spill_loads == 0, row
