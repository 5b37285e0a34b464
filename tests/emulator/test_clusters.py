"""Clusters: bugs planted where the blocks of a cluster count on each other are reported, or give wrong numbers."""

from __future__ import annotations

import pytest
from decode_cases import MODES, decode, make_cache, queries
from mla_cases import LONG, Problem
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


# name: (file of mla/, old, new)
SENT = {
    "loads before the other block has begun": (
        "mla_decode.cu", "        ptx::cluster_arrive();\n        ptx::cluster_wait();\n    }\n    const", "    }\n    const",
    ),
    "a block that ends before the other has let go": (
        "mla_decode.cu", "            ptx::cluster_arrive();\n            ptx::cluster_wait();\n", "",
    ),
    "a panel over one that the other block still reads": ("layout.cuh", "kAtEmpty + 8 * n), 8 * kPeers);", "kAtEmpty + 8 * n), 8);"),
    "a barrier that is told twice what comes": ("load.cuh", "                    else now.wait_came(panel);\n", ""),
    "nobody hears that the other block let go": ("layout.cuh", "empty(panel), asks(panel))", "empty(panel), peer())"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_planted_bug_of_boxes_for_two_blocks_is_caught(name, tmp_path):
    file, old, new = SENT[name]
    source = planted("mla/mla_decode.cu", f"mla/{file}", old, new, tmp_path)
    problem = Problem((400,), heads=66)

    def run(mode) -> None:
        late, seed = mode
        problem.check(splitting=LONG, late=late, seed=seed)

    run(MODES[0])
    with with_source("mla_decode", source):
        assert found(run, MODES)
