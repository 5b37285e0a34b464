"""Decode over pages whose V has another head_dim than K: every kernel, in the emulator and on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_cases import (
    BF16,
    FOLDED,
    FP16,
    MODES,
    SMALL,
    UNCUT,
    Kind,
    assert_decoded,
    chance,
    check,
    decode,
    grow,
    make_cache,
    make_tree,
    queries,
    stored,
)
from decode_page_cases import check as check_pages

import tilewise as tw
from tilewise import PagedKVCache, arch, compiler, tuned
from tilewise.formats import KVFormat, PairFormat
from tilewise.gpu import decode as decoding
from tilewise.gpu import decode_kernels
from tilewise.gpu.decode_kernels import choose_tiling, decode_spec, shared_bytes, stage_bytes
from tilewise.gpu.decode_small import SmallDecode, SmallShape
from tilewise.plan.worklist import FAR, Splitting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CARDS = ["sm_90a", "sm_80"]
LENGTHS = (1, 63, 0, 65, 129, 300)
PAIRS: tuple[Kind, ...] = (("bf16", (192, 128), 16), ("bf16", (64, 128), 16))
EVERY = Splitting(pieces=((150, 1024), (FAR, 64)), shared=64, tile_rows=1, whole=False)  # every node through tiles


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    """Where cases run; a GPU that is not Hopper runs those of its own kind alone."""
    if request.param == "cuda" and not arch.hopper(arch.card_of(torch.device("cuda"))):
        pytest.skip("cases for Hopper, which behaves as other cards too")
    return request.param


def pair(name: str, head_dim: int, value_dim: int, **options: Any) -> KVFormat:
    return KVFormat(name, head_dim, **options).beside(KVFormat(name, value_dim, **options))


def bound_of(plan: Any) -> Any:
    (bound,) = decoding.kept(plan).bound.values()
    return bound


# ---- problems of all kinds -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("card", CARDS)
def test_random_problems(device, card):
    with arch.as_card(card):
        for seed in range(4) if device == "cpu" else range(60):
            chance(31_000 + seed, PAIRS[seed % 2 :][:1], device=device)


# K in panels of 32 bytes and V in panels of 128, which begin at multiples of 1024 bytes; K with more groups than V, and
# V with more than K; rows of 16 bytes; a page that ends within a chunk
KINDS = [
    ("sm_90a", "int8", (96, 128), 16, 64),
    ("sm_80", "int8", (96, 128), 24, 64),
    ("sm_90a", "int4", (128, 64), 16, 64),
    ("sm_80", "int4", (64, 96), 24, 32),
    ("sm_90a", "fp8", (128, 192), 16, 64),
    ("sm_80", "fp32", (64, 96), 16, 64),
    ("sm_90a", "fp16", (96, 64), 48, 64),
]


@pytest.mark.parametrize(("card", "kv_format", "dims", "page_size", "group_size"), KINDS)
def test_formats(device, card, kv_format, dims, page_size, group_size):
    """One query token, and three under a window; pieces, whole ranges, folds; poison between the tokens."""
    dtype = {"fp16": FP16, "fp32": torch.float32}.get(kv_format, BF16)
    sizes = {"head_dim": dims[0], "value_dim": dims[1], "group_size": group_size, "page_size": page_size}
    cache, seqs = make_cache(LENGTHS, kv_format=kv_format, **sizes)
    with arch.as_card(card):
        runs = kv_format != "int8" and page_size == 16
        for n, options in enumerate(({"splitting": FOLDED}, {"tokens": 2, "window": (70, 0)})):
            check(cache, seqs, dtype=dtype, mode=MODES[n + len(kv_format) % 2], runs=runs, device=device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8", "int8", "int4", "fp32"])
@pytest.mark.parametrize("card", CARDS)
def test_every_pair_on_a_card(card, kv_format):
    """All pairs of head dimensions, unshared and shared; many heads, which go in step."""
    dtype = {"fp16": FP16, "fp32": torch.float32}.get(kv_format, BF16)
    with arch.as_card(card):
        for head_dim in decode_kernels.HEAD_DIMS:
            for value_dim in (*decode_kernels.HEAD_DIMS, 512):
                sizes = {"head_dim": head_dim, "value_dim": value_dim, "kv_format": kv_format, "kv_heads": 8}
                for cache, seqs in (make_cache(LENGTHS * 9, **sizes), make_tree([1, 5, 3], [300, 64, 33], **sizes)):
                    check(cache, seqs, dtype=dtype, share=True, device="cuda", runs=True)


# ---- shared nodes ----------------------------------------------------------------------------------------------------
# Two warpgroups with all of Q in registers; one, with Q in registers; two with parts of Q in shared memory; V in panels
# of which the last is half full
TILED = [("sm_90a", 192, 128), ("sm_90a", 64, 192), ("sm_90a", 256, 96), ("sm_80", 192, 128)]


@pytest.mark.parametrize(("card", "head_dim", "value_dim"), TILED)
def test_shared_nodes_go_through_tiles(device, card, head_dim, value_dim):
    """Two query tokens under a window; then logits of up to 1e4, whose references move from tile to tile."""
    cache, seqs = make_tree([1, 2, 3], [100, 33, 9], head_dim=head_dim, value_dim=value_dim, kv_heads=1)
    with arch.as_card(card):
        for n, (tokens, window, size) in enumerate(((2, (110, 0), 1.0), (1, None, 3e3))):
            plan = tw.plan_decode(cache, seqs, num_heads=4, tokens_per_seq=tokens, share_prefix=True, window=window)
            options = {"tokens": tokens, "window": window, "size": size, "mode": MODES[n], "device": device}
            check(cache, seqs, plan=plan, splitting=EVERY, **options)
            assert bound_of(plan).spec.entry == ("decode_tree" if card == "sm_90a" else "decode_tree_mma")


def test_tiles_of_heads_that_are_not_contiguous():
    """Panels come one by one, five of them for each of four boxes."""
    cache, seqs = make_tree([1, 3], [70, 9], head_dim=192, value_dim=128)
    parts = []
    for (x,) in stored(cache):
        room = torch.full((*x.shape[:2], 3, x.shape[3] + 32), torch.nan, dtype=x.dtype)
        room[:, :, :2, : x.shape[3]] = x
        parts.append([room[:, :, :2, : x.shape[3]]])
    check(cache, seqs, share=True, splitting=EVERY, parts=parts)


@pytest.mark.parametrize("card", CARDS)
def test_quantised_nodes_are_streamed(card):
    cache, seqs = make_tree([1, 6], [90, 20], head_dim=64, value_dim=128, kv_format="fp8")
    plan = tw.plan_decode(cache, seqs, num_heads=8, share_prefix=True)
    with arch.as_card(card):
        check(cache, seqs, plan=plan, splitting=EVERY)
    assert bound_of(plan).spec.entry == "decode"


# ---- bits, clusters, wide values -------------------------------------------------------------------------------------
def test_a_sequence_has_the_same_bits_whatever_stands_beside_it(device):
    cache, seqs = make_cache((300, 1, 64, 129), head_dim=192, value_dim=128)
    q = queries(cache, seqs)
    together = decode(cache, seqs, q, device=device)
    with arch.as_card("sm_80"):
        copied = decode(cache, seqs, q, splitting=SMALL, device=device)
    for n, seq in enumerate(seqs):
        alone = decode(cache, [seq], q[n : n + 1], splitting=SMALL, device=device)
        for got, beside, other in zip(alone, together, copied, strict=True):
            assert torch.equal(got[0], beside[n])
            assert torch.equal(got[0], other[n])


@pytest.mark.parametrize(("kv_format", "page_size", "lines"), [("int4", 48, (2, 4)), ("bf16", 16, (1, 1))])
@arch.as_card("sm_90a")
def test_neighbouring_heads_in_step(kv_format, page_size, lines):
    """One copy of K and one of V for the heads of a block, of which more stand in a line of V; the same bits alone."""
    cache, seqs = make_cache((150, 0, 64, 17), head_dim=128, value_dim=64, kv_heads=8, kv_format=kv_format,
                             page_size=page_size)  # fmt: skip
    plan = tw.plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    together = check(cache, seqs, group=1, plan=plan, runs=True)
    constants = dict(bound_of(plan).spec.constants)
    assert constants["kInStep"]
    assert (constants["kLineHeads"], constants["kValueLineHeads"]) == lines
    for got, beside in zip(
        decode(cache, seqs[:1], queries(cache, seqs, group=1)[:1], runs=True), together, strict=True
    ):
        assert torch.equal(got[0], beside[0])


@pytest.mark.usefixtures("own_card")
@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("tma", [True, False])
def test_few_sequences_by_clusters(device, cluster, tma):
    """The bits of decode.cu, by clusters and by blocks alone."""
    cache, seqs = make_cache((200, 0, 193), head_dim=192, value_dim=64)
    q = queries(cache, seqs)
    shape = SmallShape(cluster=cluster, warps=4, round=4, depth=2, states=16, rows=4, tma=tma)
    plan = tw.plan_decode(cache, seqs, num_heads=8, share_prefix=False)
    options = {"splitting": Splitting(pieces=((100, 64), (FAR, 96))), "device": device}
    got = decode(cache, seqs, q, plan=plan, small=shape, mode=MODES[cluster % 4], **options)
    assert isinstance(bound_of(plan), SmallDecode)
    assert_decoded(got, q, cache, seqs)
    for mine, wanted in zip(got, decode(cache, seqs, q, small=False, **options), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize(("kv_format", "value_dim"), [("bf16", 320), ("int4", 512)])
def test_values_above_256_come_in_two_launches(device, kv_format, value_dim):
    sizes = {"head_dim": 64, "value_dim": value_dim, "kv_format": kv_format, "group_size": 128}
    cache, seqs = make_cache((70, 0, 33), **sizes)
    check(cache, seqs, splitting=UNCUT, device=device, runs=kv_format == "int4")


# ---- by the public functions -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [True, False])
def test_a_standing_plan(device, share):
    cache, seqs = make_tree([1, 4], [70, 9], head_dim=64, value_dim=128, device=device)
    plan = tw.plan_decode(cache, seqs, num_heads=8, share_prefix=share, rows=6, max_length=128)
    backend = "emulator" if device == "cpu" else "auto"
    for step in range(2):
        q = torch.full((6, 1, 8, 64), torch.nan, dtype=BF16)
        q[: len(seqs)] = queries(cache, seqs, seed=step)
        o, lse = tw.decode(q.to(device), cache, 0, plan, return_lse=True, backend=backend)
        assert o.shape == (6, 1, 8, 128)
        assert_decoded((o, lse), q, cache, seqs)
        assert not o[len(seqs) :].any()
        cache.free(seqs.pop(1))
        grow(cache, seqs, [1, 20, 3][: len(seqs)], seed=5)
        tw.renew_plan(plan, cache, seqs)


def test_a_step_has_its_decodes_from_their_kernel(device, monkeypatch):
    """Prompts beside decodes, planned for once and standing; no decode goes through the forward."""
    cache, seqs = make_tree([1, 4], [40, 9], head_dim=64, value_dim=96, device=device)
    made = []
    run = decoding.run
    monkeypatch.setattr(decoding, "run", lambda *args, **options: made.append(args[2]) or run(*args, **options))
    backend = "emulator" if device == "cpu" else "auto"
    q = queries(cache, seqs[1:])[:, 0]
    chunk = queries(cache, seqs[:1], tokens=5, seed=3)
    once = tw.plan_step(cache, [(seqs[0], 5)], seqs[1:], num_heads=8)
    o = tw.attend(torch.cat([chunk[0], q]).to(device), cache, 0, once, backend=backend)
    standing = tw.plan_decode(cache, seqs[1:], num_heads=8, rows=4, max_length=64)
    step = tw.plan_step(cache, [(seqs[0], 5)], standing, num_heads=8, rows=12, max_chunks=2)
    rows = torch.cat([q, chunk[0], torch.zeros(4, 8, 64, dtype=BF16)])
    other = tw.attend(rows.to(device), cache, 0, step, backend=backend)
    assert made == [PairFormat("bf16", 64, value_dim=96)] * 2
    for decodes, prompt in ((o[5:], o[:5]), (other[:3], other[3:8])):
        assert_decoded((decodes[:, None], None), q[:, None], cache, seqs[1:])
        assert_decoded((prompt[None], None), chunk, cache, seqs[:1])
    assert not other[8:].any()


@pytest.mark.parametrize("card", CARDS)
def test_selected_pages_and_trees_of_query_tokens(card):
    cache, seqs = make_cache((300, 64, 1), head_dim=64, value_dim=128)
    with arch.as_card(card):
        check_pages(cache, seqs, heads=1, seed=3)
        mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().expand(2, 3, 3)
        check(cache, seqs[:2], tokens=3, tree=mask, splitting=SMALL)


def test_pages_of_others_and_strides():
    """Pages with room between their rows, q and out as parts of larger tensors."""
    torch.manual_seed(0)
    k = torch.randn(9, 16, 2, 96, dtype=BF16)[..., :64]
    v = torch.full((9, 16, 2, 160), torch.nan, dtype=BF16)[..., 32:]
    v[:] = torch.randn(9, 16, 2, 128, dtype=BF16)
    cache = PagedKVCache.from_pages(k, v, torch.tensor([[3, 1, 8, -1], [0, 3, 4, 7]]), torch.tensor([40, 63]))
    plan = tw.plan_decode(cache, [0, 1], num_heads=8)
    q, out = torch.randn(2, 1, 8, 96, dtype=BF16)[..., :64], torch.full((2, 1, 8, 200), torch.nan, dtype=BF16)
    tw.decode(q, cache, 0, plan, out=out[..., 4:132], backend="emulator")
    assert_decoded((out[..., 4:132], None), q, cache, [0, 1])
    assert out[..., :4].isnan().all()
    assert out[..., 132:].isnan().all()


@pytest.mark.parametrize(("head_dim", "value_dim", "says"), [
    (64, 80, r"a head_dim of V \(64, 96, 128, 192, 256\), or up to 512 .* got 80; write zeros .* use backend=\"cpu\""),
    (64, 544, "got 544"),
    (80, 64, r"takes head_dim \(64, 96, 128, 192, 256\), got 80"),
])  # fmt: skip
def test_what_is_refused(head_dim, value_dim, says):
    cache, seqs = make_cache((20,), head_dim=head_dim, value_dim=value_dim)
    plan = tw.plan_decode(cache, seqs, num_heads=8)
    with pytest.raises(NotImplementedError, match=says):
        tw.decode(queries(cache, seqs), cache, 0, plan, backend="emulator")


# ---- formats, shapes and what ptxas says -----------------------------------------------------------------------------
def test_a_format_of_two_head_dims():
    same = KVFormat("int4", 128, 32)
    assert same.values is same
    assert same.beside(KVFormat("int4", 128, 32)) is same
    assert same.dims == "128"
    both = pair("int4", 192, 128, group_size=32)
    assert both == PairFormat("int4", 192, 32, value_dim=128) != KVFormat("int4", 192, 32)
    assert both.values == same
    assert (both.dims, both.components) == ("192x128", KVFormat("int4", 192, 32).components)
    # A table names a pair of its own: what was measured of one head_dim does not stand for it.
    assert tuned.decode_key(both, choose_tiling(both, 4)).startswith("int4/192x128/8 rows")
    with pytest.raises(ValueError, match="value_dim must be at least 1"):
        PairFormat("bf16", 64)


def test_every_pair_fits_every_card():
    for card in arch.ARCHS:
        limits, tma = arch.LIMITS[card], arch.hopper(card)
        for name in decode_kernels.FORMATS:
            for head_dim in decode_kernels.HEAD_DIMS:
                for value_dim in decode_kernels.HEAD_DIMS:
                    fmt = pair(name, head_dim, value_dim)
                    for tiles in (False, True):
                        if tiles and not decode_kernels.tiles_can(BF16, fmt, tma, card):
                            continue
                        tiling = choose_tiling(fmt, 4, tiles, tma, card)
                        assert shared_bytes(fmt, tiling) <= limits.shared_block
                        assert tiling.stages >= 2
                        assert not tiles or tiling.raw_stages or tiling.tile_stages >= 2 + tma


def test_places_where_k_and_v_differ():
    """Each begins at a multiple of 1024 bytes, as the largest swizzle wants; of one head_dim they lie as they did."""
    assert stage_bytes(KVFormat("int8", 96)) == 2 * 16 * 96
    assert stage_bytes(pair("int8", 96, 128)) == 2048 + 2048
    assert stage_bytes(pair("bf16", 192, 128)) == 16 * 2 * (192 + 128)


@pytest.mark.parametrize("card", CARDS)
def test_no_spills(card):
    """192 and 128 channels; tilewise kernels --all compiles the others."""
    fmt, tma = pair("bf16", 192, 128), arch.hopper(card)
    report = compiler.compile(decode_spec(BF16, fmt, 16, choose_tiling(fmt, 4, True, tma, card), tma=tma), card).report
    assert not report.spills
    assert not report.serialised
    listed = decode_kernels.specs(card)
    assert sum(dict(spec.constants).get("kValueDim") == 128 for spec in listed if "kHeadDim=192" in str(spec)) == 2
