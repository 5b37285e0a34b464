"""Clusters: bugs planted where the blocks of a cluster count on each other are reported, or give wrong numbers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from decode_cases import MODES, decode, make_cache, queries
from mla_cases import LONG, Problem
from test_fences import found, planted, with_source

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.compiler.tensor_maps import TensorMapSpec
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
        "mla_decode.cu", "        ptx::cluster_arrive();\n        ptx::cluster_wait();\n    }\n    const",
        "    }\n    const",
    ),
    "a block that ends before the other has let go": (
        "mla_decode.cu", "            ptx::cluster_arrive();\n            ptx::cluster_wait();\n", "",
    ),
    "a panel over one that the other block still reads": (
        "layout.cuh", "kAtEmpty + 8 * n), 8 * kPeers);", "kAtEmpty + 8 * n), 8);",
    ),
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


# ---- boxes for both blocks of a cluster, arrivals at the other's barrier, barriers that are tested and that count ----
BOX_ROWS, COLUMNS = 8, 64
BOX = TensorMapSpec("bf16", (COLUMNS, 4 * BOX_ROWS, 1, 1), (2 * COLUMNS, 16, 16), (COLUMNS, BOX_ROWS, 1, 1), 0)


def boxes_case() -> tuple[KernelSpec, torch.Tensor, torch.Tensor]:
    """The kernel of two clusters, the tensor, and what the blocks should have (4, 2, 2 boxes' words)."""
    source = Path(__file__).parents[1] / "kernels" / "cluster_boxes.cu"
    constants = (("kBoxBytes", BOX.box_bytes), ("kBoxRows", BOX_ROWS))
    kernel = KernelSpec("cluster_boxes", str(source), "cluster_boxes", constants, 128, 2 * BOX.box_bytes + 64)
    words = torch.randint(-(2**31), 2**31, (4 * BOX_ROWS, COLUMNS // 2), dtype=torch.int64).int()
    return kernel, words, words.reshape(1, 2, -1).expand(4, 2, -1)


@pytest.mark.parametrize(("late", "seed"), MODES)
def test_boxes_come_to_both_blocks(late, seed):
    kernel, words, expected = boxes_case()
    out, counts = torch.zeros(expected.shape, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    args = [emulator.tensor_map(BOX, words.data_ptr()), *(ctypes.c_void_p(x.data_ptr()) for x in (out, counts))]
    tensors = {"words": words, "out": out, "counts": counts}
    emulator.launch(kernel, (4, 1, 1), args, tensors, cluster=2, late=late, seed=seed)
    assert torch.equal(out, expected)
    assert counts.tolist() == [43, 43, 43, 43]


@pytest.mark.gpu
def test_boxes_come_to_both_blocks_of_a_card():
    kernel, words, expected = boxes_case()
    there, out = words.cuda(), torch.zeros(expected.shape, dtype=torch.int32, device="cuda")
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    args = compiler.Args(compiler.encode(BOX, there.data_ptr()), out, counts)
    compiler.load(kernel).launch((4, 1, 1), args, cluster=(2, 1, 1))
    assert torch.equal(out.cpu(), expected)
    assert counts.tolist() == [43, 43, 43, 43]
