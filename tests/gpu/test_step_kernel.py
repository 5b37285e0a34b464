"""attend() by the GPU kernels, in the emulator: chunks through the forward, decodes through theirs, every format."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from decode_tree_cases import grow, make_cache, tree
from oracle import poison, randn
from step_cases import assert_step, judge_step

from tilewise import attend, decode, emulator, plan_decode, plan_step, renew_plan
from tilewise.api import step
from tilewise.gpu import beside
from tilewise.plan.cost import GPU_COST
from tilewise.plan.step import ChunkNode, Chunks, TileJudge

pytestmark = pytest.mark.usefixtures("own_card")

BF16, FP32 = torch.bfloat16, torch.float32


def small(**options):
    """Two chunks and a decode under a prefix of 32 tokens, another chunk and decode beside it."""
    cache = make_cache(**{"page_size": 16, "pages": 40, "kv_heads": 1, "head_dim": 64, "kv_format": "bf16"} | options)
    root = cache.allocate()
    grow(cache, [root], [32], seed=1)
    seqs = [root, *(cache.fork(root) for _ in range(2)), cache.allocate(), cache.allocate()]
    grow(cache, seqs, [5, 18, 1, 7, 40], seed=2)
    return cache, [(seqs[0], 3), (seqs[4], 20), (seqs[1], 18)], [seqs[2], seqs[3]]


@pytest.fixture
def launched(monkeypatch):
    """The kernels that ran, in order."""
    names, real = [], emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda spec, *rest, **more: names.append(spec.name) or real(spec, *rest, **more)
    )
    return names


FORWARD = ["ragged", "forward"]


def test_chunks_beside_decodes(launched):
    cache, prefill, seqs = small()
    _, o, lse = assert_step(cache, prefill, seqs, heads=2, dtype=BF16, share=False, backend="emulator")
    assert launched == [*FORWARD, "decode"]
    q = randn(43, 2, 64, dtype=BF16, seed=5)
    alone = plan_decode(cache, seqs, num_heads=2, share_prefix=False)
    got = decode(q[41:, None], cache, 0, alone, return_lse=True, backend="emulator")
    assert torch.equal(got[0][:, 0], o[41:])
    assert torch.equal(got[1][..., 0].T, lse[:, 41:])


def test_shared_prefixes_are_launches_of_their_own(launched):
    plan, _, _ = assert_step(*small(), heads=2, dtype=BF16, share=True, backend="emulator", sinks=randn(2))
    assert [(node.start, node.stop) for node in plan.prefill.nodes] == [(0, 32)]
    assert launched == [*FORWARD, *FORWARD, "merge_rows", "decode"]


def test_two_levels(launched):
    """Rows that have a node on one level only, between others that have two."""
    cache = make_cache(page_size=16, pages=80, kv_heads=1, head_dim=64, kv_format="bf16")
    seqs = tree(cache, [1, 3, 2], [32, 16, 5])
    prefill = [(seqs[n], 2 + n % 2) for n in (5, 0, 3, 1, 4)]
    plan, _, _ = assert_step(cache, prefill, [], heads=2, dtype=BF16, share=True, backend="emulator")
    assert [(n.end - n.first, n.start, n.stop) for n in plan.prefill.nodes] == [(5, 0, 32), (2, 32, 48), (2, 32, 48)]
    assert launched == [*FORWARD, *FORWARD, "merge_rows"]


def test_pieces_of_long_prefixes(launched, monkeypatch):
    """What stands before a chunk, shared or not, is read in pieces, by as many tiles; a short one stays whole."""
    pieces = partial(step.plan_chunks, split=lambda rows, tokens: 16 if rows < 20 else 0)
    monkeypatch.setattr(step, "plan_chunks", lambda *given, split, judge, **options: pieces(*given, **options))
    cache, prefill, seqs = small()
    for share in (False, True):
        launched.clear()
        plan, _, _ = assert_step(
            cache, prefill, seqs, heads=2, dtype=BF16, share=share, backend="emulator", sinks=randn(2)
        )
        found = [(node.end - node.first, node.start, node.stop) for node in plan.prefill.nodes]
        assert found == ([(2, 0, 32)] if share else [(1, 0, 16), (1, 16, 32)] * 2)
        assert launched == [*FORWARD, *FORWARD, "merge_rows", "decode"]
        # The chunk of 20 tokens is left alone, and two that share have 21 rows together.
        assert plan.prefill.shared_nodes == share


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    ("kv_format", "dtype", "by"),
    [("int8", BF16, "decode"), ("int4", BF16, "decode"), ("fp32", BF16, "decode32"), ("int8", FP32, "forward")],
)
def test_formats(kv_format, dtype, by, share, launched):
    """Pages that the forward does not read are widened once for all of a step; what decode does not take goes with the
    chunks."""
    cache, prefill, seqs = small(kv_format=kv_format)
    assert_step(cache, prefill, seqs, heads=2, dtype=dtype, share=share, backend="emulator")
    forward = "forward_mma" if dtype == FP32 else "forward"
    nodes = ["ragged", forward, "merge_rows"] if share else []
    assert launched == ["widen", "ragged", forward, *nodes, *([by] if by != "forward" else [])]


def test_a_head_dim_that_decode_does_not_take(launched):
    cache, prefill, seqs = small(head_dim=80)
    assert_step(cache, prefill, seqs, heads=2, dtype=BF16, share=False, backend="emulator")
    assert launched == FORWARD
    assert_step(cache, [], seqs, heads=2, dtype=BF16, backend="emulator")
    assert launched == FORWARD * 2
    assert_step(cache, prefill, plan_decode(cache, seqs, num_heads=2, tokens_per_seq=3), heads=2, dtype=BF16,
                backend="emulator")  # fmt: skip
    assert launched == FORWARD * 3


def test_idle_rows_of_a_standing_plan_that_goes_with_the_chunks():
    cache, prefill, seqs = small(head_dim=80)
    standing = plan_decode(cache, seqs, num_heads=2, rows=4, max_length=100)
    plan, sinks = plan_step(cache, prefill, standing, num_heads=2), randn(2)
    q = randn(plan.rows, 2, 80, dtype=BF16)
    q[43:] = float("nan")
    for now in (seqs, seqs[:1]):
        renew_plan(standing, cache, now)
        o, lse = attend(q, cache, 0, plan, sinks=sinks, return_lse=True, out=poison(q), backend="emulator")
        used = 41 + len(now)
        judge_step(
            q[:used], o[:used], lse[:, :used], cache, 0, plan_step(cache, prefill, now, num_heads=2), sinks=sinks
        )
        assert (o[used:] == 0).all()
        assert torch.equal(lse[:, used:], sinks[:, None].expand(2, 45 - used))
    renew_plan(standing, cache, [])
    nothing = plan_step(cache, [], standing, num_heads=2)
    o, lse = attend(q[41:], cache, 0, nothing, return_lse=True, out=poison(q[41:]), backend="emulator")
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def test_options():
    options = {"window": (9, 0), "sinks": randn(2), "softcap": 2.0, "scale": 0.3}
    assert_step(*small(), heads=2, dtype=BF16, share=False, backend="emulator", **options)


@pytest.mark.parametrize("order", ["decodes first", "chunks first"])
def test_side_by_side(order, launched, monkeypatch):
    """Decodes go on the branch, chunks do not, and both are there when it is joined; the results are the same."""

    class Beside:
        def __init__(self, device):
            launched.append("fork")

        def __enter__(self):
            launched.append("<")

        def __exit__(self, *error):
            launched.append(">")

        def join(self):
            launched.append("join")

    cache, prefill, seqs = small()
    _, *expected = assert_step(cache, prefill, seqs, heads=2, dtype=BF16, share=False, backend="emulator")
    launched.clear()
    monkeypatch.setattr(beside, "side_by_side", lambda device: True)
    monkeypatch.setattr(beside, "Beside", Beside)
    monkeypatch.setattr(beside, "ORDER", order)
    _, *got = assert_step(cache, prefill, seqs, heads=2, dtype=BF16, share=False, backend="emulator")
    decodes = ["<", "decode", ">"]
    both = [*decodes, *FORWARD] if order == "decodes first" else [*FORWARD, *decodes]
    assert launched == ["fork", *both, "join"]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    launched.clear()
    assert_step(cache, prefill, [], heads=2, dtype=BF16, share=False, backend="emulator")
    assert_step(cache, [], seqs, heads=2, dtype=BF16, share=False, backend="emulator")
    assert launched == [*FORWARD, "decode"]  # with nothing beside it


def test_one_side_alone_and_neither(launched):
    cache, prefill, seqs = small()
    for chunks, decodes, names in ((prefill, [], FORWARD), ([], seqs, ["decode"]), ([], [], [])):
        launched.clear()
        assert_step(cache, chunks, decodes, heads=2, dtype=BF16, share=False, backend="emulator")
        assert launched == names


def test_out_may_be_q_and_layers_share_tables(launched):
    cache, prefill, seqs = small(num_layers=2, kv_format="int8")
    plan = plan_step(cache, prefill, seqs, num_heads=2, share_prefix=True)
    q = randn(plan.rows, 2, 64, dtype=BF16)
    expected = [attend(q, cache, layer, plan, backend="emulator") for layer in range(2)]
    assert not torch.equal(*expected)
    assert attend(q, cache, 1, plan, out=q, backend="emulator") is q
    assert torch.equal(q, expected[1])


def test_sharing_pays_for_many_short_chunks_with_long_prefixes():
    judge = TileJudge(GPU_COST, processors=132, heads_kv=8, group=4, head_dim=128)

    def nodes_of(chunks: int, tokens: int, prefix: int, own: int) -> list[ChunkNode]:
        one = [ChunkNode(0, chunks, 0, prefix, 0)]
        return judge(Chunks([tokens] * chunks, [prefix + own] * chunks), one)[0]

    assert nodes_of(64, 8, 8192, 16)  # 64 × 8 tiles of 32 used rows become 16 × 8 full ones
    assert not nodes_of(4, 512, 8192, 512)  # full tiles as they are
    assert not nodes_of(2, 8, 8192, 16)  # fewer tiles than multiprocessors, also in pieces
    assert not nodes_of(16, 32, 8192, 32)  # full tiles, one for each multiprocessor
    assert not nodes_of(64, 8, 64, 2048)  # hardly anything in common
    assert judge(Chunks([8] * 4, [512] * 4), []) == ([], False)
    # The second level has so little that one launch more does not pay.
    deep = [ChunkNode(0, 64, 0, 8192, 0), ChunkNode(0, 32, 8192, 8208, 1), ChunkNode(32, 64, 8192, 8208, 1)]
    assert judge(Chunks([8] * 64, [8224] * 64), deep) == (deep[:1], False)
    deep = [deep[0]._replace(stop=16), *(node._replace(start=16) for node in deep[1:])]
    assert judge(Chunks([8] * 64, [8224] * 64), deep)[0] == deep


def test_a_short_chunk_after_a_long_prefix_is_cut():
    judge = TileJudge(GPU_COST, processors=132, heads_kv=8, group=4, head_dim=128)
    assert judge.split(32, 8192) == 1024  # 8 tiles over 8192 tokens become 64 over 1024
    assert judge.split(32, 131072) == 131072 * 8 // 132
    assert judge.split(1, 3000) == judge.split(512, 8192) == judge.split(4096, 1 << 20) == 0  # short; enough tiles
    assert judge(Chunks([32], [8224]), []) == ([], True)
    assert judge(Chunks([32] * 64, [8224] * 64), []) == ([], False)  # these have tiles for all of the card
