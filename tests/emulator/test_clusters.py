"""Clusters: bugs planted where the blocks of a cluster count on each other are reported, or give wrong numbers."""

from __future__ import annotations

import pytest
from decode_cases import MODES, decode, make_cache, queries
from test_fences import found, planted, with_source

from tilewise.gpu.decode_small import SmallShape
from tilewise.plan.worklist import FAR, Splitting

pytestmark = pytest.mark.usefixtures("own_card")

SHAPE = SmallShape(cluster=4, warps=4, round=4, depth=2, states=16, rows=4, tma=True)
PIECES = Splitting(pieces=((FAR, 96),))
# name: (file of decode/, old, new)
PLANTED = {
    "stores before the other blocks have begun": ("decode_small.cu", "    ptx::cluster_wait();", "    //"),
    "a block that does not wait for its slice": (
        "decode_small.cu", "    ptx::mbarrier_wait(loader.window + kAtLanded, 0);", "",
    ),
    "scores that are read too early": ("decode_small.cu", "        ptx::sync_threads();  // all scores", "        //"),
    "values that are read too early": ("small.cuh", "        loader.wait_values(turn);", ""),
    "too few bytes expected": ("decode_small.cu", "kHeadRows * 8));", "kHeadRows * 4));"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_caught(name, tmp_path):
    file, old, new = PLANTED[name]
    source = planted("decode/decode_small.cu", f"decode/{file}", old, new, tmp_path)
    cache, seqs = make_cache((150, 140), head_dim=64, kv_heads=1)
    q = queries(cache, seqs)
    want, _ = decode(cache, seqs, q, small=False, splitting=PIECES)

    def run(mode) -> None:
        got, _ = decode(cache, seqs, q, small=SHAPE, splitting=PIECES, mode=mode)
        assert got.equal(want), "wrong bits"

    with with_source("decode_small", source):
        assert found(run, MODES)
