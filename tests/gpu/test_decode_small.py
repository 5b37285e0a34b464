"""decode_small: few sequences by clusters. Its results are those of decode.cu to the bit, whatever its shape is.

A plan that is made for a CPU cuts long runs of neighbouring pages: sequences of about the same length, whose pages were
taken in turns, have none.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from unittest import mock

import pytest
import torch
from decode_cases import BF16, FP16, MODES, assert_decoded, check, decode, grow, make_cache, make_tree, queries

from tilewise import emulator, plan_decode
from tilewise.arch import LIMITS
from tilewise.compiler.spec import locate
from tilewise.formats import KVFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu.decode_kernels import HEAD_DIMS
from tilewise.gpu.decode_small import SmallDecode, SmallShape, blocks_per_sm, choose_shape, shared_bytes, small_spec
from tilewise.plan.worklist import FAR, Splitting

pytestmark = pytest.mark.usefixtures("own_card")

SHAPE = SmallShape(cluster=4, warps=4, round=4, depth=2, states=32, rows=4, tma=True)
COPYING = replace(SHAPE, tma=False)
PIECES = Splitting(pieces=((100, 64), (FAR, 96)))  # the last round of a piece of 96 tokens is half full
LENGTHS = (300, 0, 293, 64, 289, 1, 65)


def same_bits(a, b) -> bool:
    return all(
        torch.equal(x.view(torch.int16 if x.element_size() == 2 else torch.int32),
                    y.view(torch.int16 if y.element_size() == 2 else torch.int32))
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def both(cache, seqs, q, shape=SHAPE, **options) -> tuple:
    """(o, lse) by decode_small, which has to have the bits that decode has."""
    heads, tokens = q.shape[2], q.shape[1]
    plan = plan_decode(cache, seqs, num_heads=heads, tokens_per_seq=tokens, share_prefix=False)
    options = {"splitting": PIECES} | options
    got = decode(cache, seqs, q, plan=plan, small=shape, **options)
    assert all(isinstance(bound, SmallDecode) for bound in decoding.kept(plan).bound.values())
    assert same_bits(got, decode(cache, seqs, q, small=False, **options))
    return got


def with_peaks(cache, seqs, q) -> None:
    """Some keys of each sequence become multiples of a query: scores jump within a round, and references move."""
    group = q.shape[2] // cache.num_kv_heads
    for n, seq in enumerate(seqs):
        length = cache.length(seq)
        for at in {length // 7, length // 3, length // 2, length - 2} - {-2, -1}:
            page = int(cache.page_list(seq)[at // cache.page_size])
            peak = q[n, 0].unflatten(0, (cache.num_kv_heads, group))[:, at % group] * (1 + at % 5)
            cache._k[0][0][page, at % cache.page_size] = peak.to(cache._k[0].dtype)


@pytest.mark.parametrize("shape", [SHAPE, COPYING], ids=["tma", "copies"])
def test_bits_are_those_of_decode_in_every_order(shape):
    cache, seqs = make_cache(LENGTHS, head_dim=64)
    q = queries(cache, seqs)
    got = [both(cache, seqs, q, shape, mode=mode) for mode in MODES]
    assert_decoded(got[0], q, cache, seqs)


@pytest.mark.parametrize("shape", [SHAPE, COPYING], ids=["tma", "copies"])
def test_references_that_move_within_a_round(shape):
    cache, seqs = make_cache((300, 290, 40), head_dim=64)
    q = queries(cache, seqs, size=3.0)
    with_peaks(cache, seqs, q)
    assert_decoded(both(cache, seqs, q, shape), q, cache, seqs)


def test_more_states_than_one_run_of_merging():
    cache, seqs = make_cache((1100,), head_dim=64, kv_heads=1)
    both(cache, seqs, queries(cache, seqs), splitting=Splitting(pieces=((FAR, 48),)))  # 23 states: two accumulators


def test_a_sequence_has_the_same_bits_alone_and_beside_others():
    cache, seqs = make_cache((300, 293, 289), head_dim=64)
    q = queries(cache, seqs)
    together = both(cache, seqs, q)
    for n in range(len(seqs)):
        one = both(cache, seqs[n : n + 1], q[n : n + 1])
        assert same_bits(one, [x[n : n + 1] for x in together])


def test_options_and_other_sizes():
    # Two query tokens, eight rows; a sink; one block per cluster; all of a block's rounds in the ring
    cache, seqs = make_cache((100, 90), head_dim=128, page_size=32, kv_format="fp16")
    shape = SmallShape(cluster=1, warps=4, round=8, depth=2, states=16, rows=8, tma=True)
    check(cache, seqs, dtype=FP16, tokens=2, sinks=torch.linspace(-2, 3, 8), splitting=None, small=shape)
    q = queries(cache, seqs, tokens=2, dtype=FP16)
    both(cache, seqs, q, shape, sinks=torch.linspace(-2, 3, 8), softcap=0.0, splitting=None)
    # Three rows of four, an odd number of tiles for each warp, scores that are soft-capped
    cache, seqs = make_cache((150, 149), head_dim=96, kv_heads=1)
    shape = SmallShape(cluster=2, warps=4, round=4, depth=3, states=16, rows=4, tma=False)
    both(cache, seqs, queries(cache, seqs, group=3), shape, softcap=5.0, scale=-0.5)


def test_sequences_that_grow():
    cache, seqs = make_cache((250, 249), head_dim=64, spare=40)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    q, options = queries(cache, seqs), {"splitting": PIECES, "room": 200}
    decode(cache, seqs, q, plan=plan, small=SHAPE, **options)
    (listed,) = decoding.kept(plan).lists.values()
    for step in range(3):
        grow(cache, seqs, [64, 60], seed=step)
        listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])
        got = decode(cache, seqs, q, plan=plan, small=SHAPE, **options)
        assert same_bits(got, decode(cache, seqs, q, plan=plan, small=False, **options))
        assert_decoded(got, q, cache, seqs)


def served(cache, seqs, *, share=False, tokens=1, group=4, dtype=BF16, **options) -> bool:
    """Does decode_small take the call, if it is asked to?"""
    seen = {name: options.get(name) for name in ("window", "chunk")}
    plan = plan_decode(
        cache, seqs, num_heads=group * cache.num_kv_heads, tokens_per_seq=tokens, share_prefix=share, **seen
    )
    small = []
    with (
        mock.patch.object(SmallDecode, "__call__", lambda self, *a, **k: small.append(self)),
        mock.patch.object(decoding.Decode, "__call__"),
    ):
        decode(cache, seqs, queries(cache, seqs, group=group, tokens=tokens, dtype=dtype), plan=plan, **options)
    return bool(small)


@pytest.mark.parametrize(("pieces", "seed"), [(17, 0), (20, 0), (20, 2)])
def test_a_short_sequence_that_grows_beyond_a_run(pieces, seed):
    """Planned as one piece: decode takes it whole as long as merging folds its pieces in that order, too."""
    room = 64 * pieces - 50
    cache, seqs = make_cache((50,), kv_heads=2, spare=400)
    plan = plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    q, options = queries(cache, seqs, seed=seed), {"splitting": Splitting(pieces=((FAR, 64),)), "room": room}
    shape = replace(SHAPE, states=64)
    decode(cache, seqs, q, plan=plan, small=shape, **options)
    (listed,) = decoding.kept(plan).lists.values()
    grow(cache, seqs, [room], seed=3)
    listed.grow([cache.length(s) for s in seqs], [cache.page_list(s) for s in seqs])
    assert same_bits(*(decode(cache, seqs, q, plan=plan, small=small, **options) for small in (shape, False)))


def test_what_it_does_not_serve_goes_to_decode():
    cache, seqs = make_cache((70, 60), head_dim=64)
    assert served(cache, seqs, small=True)
    assert not served(cache, seqs)  # the emulator has to be asked
    assert not served(cache, seqs, small=True, window=(20, 0))
    assert not served(cache, seqs, small=True, chunk=20, splitting=Splitting(whole=True))
    assert not served(cache, seqs, small=True, tokens=3)  # twelve rows
    tree = torch.ones(2, 2, 2, dtype=torch.bool).tril()
    assert not served(cache, seqs, small=True, tokens=2, tree=tree)
    for options in ({"kv_format": "int8"}, {"page_size": 24}):
        assert not served(*make_cache((70, 60), head_dim=64, **options), small=True)
    assert not served(*make_cache((70, 60), head_dim=64, kv_format="fp16"), small=True)  # bfloat16 queries
    shared, many = make_tree((1, 4), (64, 20))
    assert not served(shared, many, small=True, share=True)
    assert served(shared, many, small=True, splitting=None)
    cut, seqs = make_cache((600, 40), head_dim=64)  # pages of the longer one are neighbours from some place on
    assert not served(cut, seqs, small=True)


def test_shared_memory_is_as_the_kernel_lays_it_out(tmp_path):
    fmt = KVFormat("bf16", 64)
    for shape in (SHAPE, replace(SHAPE, cluster=1, rows=8, depth=3, round=8, states=16)):
        spec = small_spec(BF16, fmt, 16, shape)
        head = locate(spec.source).read_text().split("extern")[0]
        source = tmp_path / "bytes.cu"
        source.write_text(head + 'extern "C" __global__ void bytes(int* out) { *out = kSmallBytes; }\n')
        out = torch.zeros(1, dtype=torch.int32)
        facts = replace(spec, source=str(source), entry="bytes", threads=1)
        emulator.launch(facts, (1, 1, 1), [ctypes.c_void_p(out.data_ptr())], {"out": out})
        assert out.item() == spec.shared_bytes == shared_bytes(fmt, shape)


def test_shapes_fit_a_card():
    limit = LIMITS["sm_90a"].shared_block
    for head_dim in HEAD_DIMS:
        fmt = KVFormat("bf16", head_dim)
        for rows in range(1, 9):
            for units in (1, 8, 16, 24, 64, 256):
                for states, chunks in ((1, 1), (1, 16), (8, 4), (16, 4), (16, 8), (11, 32), (40, 4)):
                    shape = choose_shape(fmt, rows, units, states, chunks, 132)
                    if shape is None and (states > 16 or units > 64):
                        continue
                    assert shape is not None, (fmt, rows, units, states)
                    rounds = -(-states // shape.cluster) * -(-chunks // shape.round)
                    blocks = blocks_per_sm(fmt, shape)
                    assert shared_bytes(fmt, shape) <= limit, shape
                    assert 1 <= blocks <= 4, shape
                    assert shape.cluster in (1, 2, 4, 8, 16), shape
                    assert shape.cluster == 1 or shape.cluster * units <= 132 * blocks, shape
                    assert shape.round % shape.warps == 0, shape
                    assert rounds <= 1 or shape.depth >= 2, shape
                    assert shape.states >= states, shape
                    assert shape.rows >= rows, shape
                    assert shape.rows * head_dim % (4 * shape.cluster) == 0, shape
