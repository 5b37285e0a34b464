"""tilewise.distributed: whatever is split over ranks equals one process, and no rank waits for ever for another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_cases import PROBLEMS, by_ranks, cache_of, decode_case, sequence_case
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_attention, qkv, randn

from tilewise import attention, plan_decode, reference
from tilewise import distributed as tw
from tilewise.distributed.pieces import fused
from tilewise.distributed.shards import chunks_of

LAYOUTS, METHODS = ("zigzag", "contiguous"), ("ring", "all_gather")
CASES = Path(__file__).with_name("distributed_cases.py")


@pytest.fixture
def alone(tmp_path):
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def results_of(folder, seconds):
    """What each of four ranks wrote, by part, None where one wrote nothing; all have ended by themselves in time."""
    log = folder / "log"
    shared = str(CASES.parents[1])  # where the oracle is
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([shared, os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("w") as to:
        words = [sys.executable, str(CASES), str(folder)]
        ranks = subprocess.Popen(words, stdout=to, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        ranks.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    found = {part: [folder / f"{part}-{rank}.json" for rank in range(4)] for part in ("equal", "failures")}
    return {
        part: [json.loads(path.read_text()) if path.exists() else None for path in paths]
        for part, paths in found.items()
    }, log.read_text()[-8000:]


def wrong(results):
    return "\n".join(
        f"rank {r}, {name}: {why}" for r, one in enumerate(results) for name, why in (one or {}).items() if why
    )


# Several processes: one start of them for all, which costs more than the cases.


def test_ranks_equal_one_process_and_do_not_wait_for_ever(tmp_path):
    """Context, heads and decode over 4, 3 and 2 ranks; calls that differ by rank; then ranks that are late or die."""
    results, log = results_of(tmp_path, 200)
    assert all(results["equal"]), log
    assert len(results["equal"][1]) > 250, "some cases did not run"
    assert not wrong(results["equal"]), wrong(results["equal"])

    # Rank 2 came to nothing and then died; the others said so within the timeout, and ended.
    assert results["failures"][2] is None, "rank 2 was to die"
    assert all(results["failures"][:2]), log
    assert [len(one) for one in results["failures"][:2]] == [7, 7], "some cases did not run"
    assert not wrong(results["failures"]), wrong(results["failures"])


# Who holds what.


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("seqlen", [0, 1, 2, 5, 63, 64, 65])
def test_layouts_hold_every_position_once(seqlen, world):
    for layout in LAYOUTS:
        shards = [chunks_of(layout, seqlen, rank, world) for rank in range(world)]
        held = [position for shard in shards for chunk in shard for position in range(*chunk)]
        assert sorted(held) == list(range(seqlen))
        assert all(len(shard) == (2 if layout == "zigzag" else 1) for shard in shards)
    contiguous = torch.arange(seqlen).tensor_split(world)
    assert [x.tolist() for x in contiguous] == [
        list(range(*chunks_of("contiguous", seqlen, r, world)[0])) for r in range(world)
    ]
    x = torch.arange(2 * seqlen).view(seqlen, 2)
    shards = [tw.zigzag_split(x, rank=rank, world=world, dim=-2) for rank in range(world)]
    assert torch.equal(tw.zigzag_merge(shards, dim=0), x)


def test_zigzag_gives_an_early_and_a_late_chunk():
    x = torch.arange(10)[None]  # chunks of 4 ranks' half: 3, 3, 2, 2
    assert tw.zigzag_split(x, rank=0, world=2).tolist() == [[0, 1, 2, 8, 9]]
    assert tw.zigzag_split(x, rank=1, world=2).tolist() == [[3, 4, 5, 6, 7]]


# Who computes what.

windows = st.one_of(st.none(), st.tuples(*[st.one_of(st.none(), st.integers(0, 30))] * 2))


@given(
    seqlen=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    world=st.integers(1, 5),
    layout=st.sampled_from(LAYOUTS),
    method=st.sampled_from(METHODS),
    causal=st.booleans(),
    window=windows,
)
def test_pieces_are_the_visible_pairs_once(seqlen, world, layout, method, causal, window):
    """Pieces of all ranks together: every visible pair once, nothing hidden, and what travels is what is needed."""
    options = {"method": method, "layout": layout, "causal": causal, "window": window}
    plans = [tw.plan_context(seqlen, rank=rank, world=world, **options) for rank in range(world)]
    places = lambda n, r: np.concatenate([np.arange(*c) for c in chunks_of(layout, n, r, world)])  # noqa: E731
    seen = np.zeros(seqlen, int)
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            keys = np.arange(seqlen[1]) if step.source is None else places(seqlen[1], step.source)
            assert step.keys == len(keys)
            for piece in step.pieces:
                assert piece.pairs > 0
                assert all(w is None or w >= 0 for w in piece.window)
                visible = reference.visible(piece.rows, piece.keys, window=piece.window).numpy()
                assert visible.any(0).all(), "keys that nobody sees"
                assert visible.any(1).all(), "rows that see nothing"
                rows = places(seqlen[0], rank)[piece.row : piece.row + piece.rows]
                seen[np.ix_(rows, keys[piece.key : piece.key + piece.keys])] += visible
        assert plan.exclusive or method == "ring"
    assert (seen == reference.visible(*seqlen, causal=causal, window=window).numpy()).all()
    if method == "ring":
        for rank, plan in enumerate(plans):
            after = plans[(rank + 1) % world]
            assert [s.sends for s in plan.steps] == [s.receives for s in after.steps], "sent and not received"
            for step, coming in zip(plan.steps, plan.steps[1:], strict=False):
                assert step.receives or not coming.pieces, "computed on and not received"
        for n in range(1, world):  # the last rank that a block comes to needs it
            for rank, plan in enumerate(plans):
                arrived = plan.steps[n - 1].receives
                assert not arrived or plan.steps[n].sends or plan.steps[n].pieces, f"sent to rank {rank} for nothing"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_zigzag_balances_causal_work(world):
    """Pairs by rank: even with zig-zag, the last rank having almost twice the mean without."""
    seqlen = 4096

    def worst(layout, **options):
        pairs = [tw.plan_context(seqlen, rank=r, world=world, layout=layout, **options).pairs for r in range(world)]
        return max(pairs) / (sum(pairs) / world), sum(pairs)

    for method in METHODS:
        even, total = worst("zigzag", causal=True, method=method)
        assert total == seqlen * (seqlen + 1) // 2
        assert even < 1.001
        uneven, total = worst("contiguous", causal=True, method=method)
        assert total == seqlen * (seqlen + 1) // 2
        assert uneven > 2 - 1.1 / world
        assert worst("contiguous", method=method)[0] == 1
        assert worst("contiguous", window=(100, 100), method=method)[0] < 1.1


def test_a_step_is_one_call():
    """Chunks that adjoin are joined: with zig-zag and a causal mask two calls for the own keys, then one a step."""
    for rank in range(4):
        plan = tw.plan_context(4096, rank=rank, world=4, causal=True)
        assert [len(step.pieces) for step in plan.steps] == [2, 1, 1, 1]
        assert [len(s.pieces) for s in tw.plan_context(4096, rank=rank, world=4).steps] == [1] * 4
        gathered = tw.plan_context(4096, rank=rank, world=4, causal=True, method="all_gather")
        assert [len(step.pieces) for step in gathered.steps] == [2]
        assert gathered.keys_sent == 3 * 1024


def test_fusing_moves_no_window():
    """Keys in full view join from the left unless a left limit would then hide some; rows join in full view only."""
    left, right = tw.Piece(0, 4, 0, 4), tw.Piece(0, 4, 4, 4, (None, 0))
    assert fused([right, left]) == (tw.Piece(0, 4, 0, 8, (None, 0)),)
    for apart in ([left, right._replace(window=(2, None))], [right._replace(key=0), left._replace(key=4)]):
        assert fused(apart) == tuple(apart)
    below = tw.Piece(4, 3, 0, 4)
    assert fused([below, left]) == (tw.Piece(0, 7, 0, 4),)
    for apart in (
        [left, below._replace(window=(None, 0))],
        [left, below._replace(row=5)],
        [left, below._replace(key=9)],
    ):
        assert fused(apart) == tuple(apart)


def test_blocks_go_no_further_than_they_are_seen():
    plan = lambda rank, **o: tw.plan_context(4096, rank=rank, world=4, layout="contiguous", **o)  # noqa: E731
    assert [plan(r, causal=True).keys_sent for r in range(4)] == [1024, 2048, 3072, 0]
    assert [plan(r, causal=True, window=(100, 0)).keys_sent for r in range(4)] == [1024, 1024, 1024, 0]
    assert [plan(r, window=(0, 0)).keys_sent for r in range(4)] == [0] * 4
    assert [len(plan(3, causal=True).pieces), len(plan(0, causal=True).pieces)] == [4, 1]


# One process: what ranks compute, and a group of one.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_by_kernels(layout):
    """The Hopper forward's source computes the pieces too: windows shifted and cut by the chunks."""
    q, k, v = qkv(1, 33, 45, 2, 1, 64, dtype=torch.bfloat16)
    options = {"window": (20, 3), "softcap": 0.0}
    got = by_ranks(q, k, v, 2, layout=layout, scale=64**-0.5, backend="emulator", **options)
    assert_attention(got, q, k, v, **options)


@pytest.mark.parametrize("world", [2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_with_large_scores(dtype, world):
    """States of very different size meet: merging is exact whatever the logits are."""
    q, k, v = qkv(1, 300, 300, 2, 1, 32, dtype=dtype, size=20.0)
    for layout in LAYOUTS:
        got = by_ranks(q, k, v, world, layout=layout, scale=32**-0.5, causal=True)
        assert_attention(got, q, k, v, causal=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["causal bf16", "rows without keys, sinks", "softcap and sinks", "no keys"])
def test_a_group_of_one(name, layout):
    for method in METHODS:
        sequence_case(tw.context_attention, PROBLEMS[name], None, layout, method=method)
    sequence_case(tw.head_attention, PROBLEMS[name], None, layout, with_seqlen=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_in_a_group_of_one(tokens):
    decode_case(None, "in order", "bf16", torch.bfloat16, tokens, sinks=True)


@pytest.mark.usefixtures("alone")
def test_one_piece_is_the_plain_call():
    """Nothing to merge: the same bits as `attention`."""
    q, k, v = qkv(2, 40, 40, 4, 2, 32, dtype=torch.bfloat16)
    for call in (tw.context_attention, tw.head_attention):
        got = call(q, k, v, layout="contiguous", causal=True, return_lse=True)
        assert all(
            torch.equal(a, b) for a, b in zip(got, attention(q, k, v, causal=True, return_lse=True), strict=True)
        )


# What is refused.


def test_without_a_group():
    q, k, v = qkv(1, 4, 4, 2, 1, 16)
    for call in (tw.context_attention, tw.head_attention, tw.zigzag_gather, tw.zigzag_split):
        with pytest.raises(tw.TilewiseDistributedError, match="init_process_group"):
            call(*((q, k, v) if call in (tw.context_attention, tw.head_attention) else (q,)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "star"}, ValueError, "method must be one of 'ring', 'all_gather', got 'star'"),
        ({"layout": "striped"}, ValueError, "layout must be one of 'zigzag', 'contiguous'"),
        ({"group": "all"}, TypeError, "group must be a torch.distributed.ProcessGroup or None, got str"),
        ({"timeout": 0}, ValueError, "timeout must be more than 0"),
        ({"timeout": -1}, ValueError, "timeout must be finite and at least 0"),
        ({"timeout": "1 s"}, TypeError, "timeout must be a float, got str"),
        ({"seqlen": 5}, ValueError, "q must hold 5 of the 5 positions on rank 0 of 1 in layout 'zigzag', got 4"),
        ({"seqlen": (4, 4, 4)}, ValueError, "seqlen must be an int, or"),
        ({"seqlen": 4.0}, TypeError, "seqlen must be an int"),
        ({"window": (-1, 0)}, ValueError, "window must be at least 0"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must have shape \(2,\)"),
    ],
)
def test_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        tw.context_attention(*qkv(1, 4, 4, 2, 1, 16), **options)


@pytest.mark.usefixtures("alone")
def test_decode_split_refuses():
    cache, seqs = cache_of([5, 9], [list(range(5)), list(range(9))], 2, 32, "fp32")
    q = randn(2, 2, 4, 32)
    plan = plan_decode(cache, seqs, num_heads=4, tokens_per_seq=2)
    with pytest.raises(ValueError, match="tails must say which sequences' last tokens lie on this rank"):
        tw.decode_split(q, cache, 0, plan)
    with pytest.raises(ValueError, match="tails must have one entry for each of the plan's 2 sequences, got 1"):
        tw.decode_split(q, cache, 0, plan, tails=[True])
    with pytest.raises(TypeError, match="tails must be a list of bools"):
        tw.decode_split(q, cache, 0, plan, tails=True)
    with pytest.raises(ValueError, match="layer must be at least 0 and at most 1"):
        tw.decode_split(q, cache, 2, plan, tails=[True, True])
    for seen in ({"window": (3, 0)}, {"chunk": 3}):
        near = plan_decode(cache, seqs, num_heads=4, **seen)
        with pytest.raises(NotImplementedError, match="a window or a chunk over a cache that is split"):
            tw.decode_split(q[:, :1], cache, 0, near)


def test_helpers_refuse():
    x = torch.zeros(1, 9, 2)
    with pytest.raises(ValueError, match="rank and world go together"):
        tw.zigzag_split(x, rank=1)
    with pytest.raises(ValueError, match="rank must be at least 0 and at most 1, got 2"):
        tw.zigzag_split(x, rank=2, world=2)
    with pytest.raises(ValueError, match="dim must be at least -3 and at most 2, got 3"):
        tw.zigzag_split(x, rank=0, world=2, dim=3)
    with pytest.raises(TypeError, match="shards must be a list"):
        tw.zigzag_merge(x)
    with pytest.raises(ValueError, match=r"shards must hold 5 of the 9 positions on rank 0 of 2 .* got 4"):
        tw.zigzag_merge([x[:, :4], x[:, 4:]])
    with pytest.raises(ValueError, match=r"shards\[1\] must have shape \(1, seqlen, 2\)"):
        tw.zigzag_merge([x[:, :5], x[:, 5:, :1]])
    with pytest.raises(ValueError, match="rank must be at least 0 and at most 3"):
        tw.plan_context(9, rank=4, world=4)
