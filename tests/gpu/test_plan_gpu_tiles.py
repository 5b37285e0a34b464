"""plan_attention shows the tiles of the GPU kernel: sizes, packing, order, blocks, as the kernel itself counts them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import arch, attention, emulator, plan_attention
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import prefill, tilings
from tilewise.gpu.abi import FP8
from tilewise.scores import Scores

pytestmark = pytest.mark.usefixtures("own_card")

ORDER = str(Path(__file__).parents[1] / "kernels" / "work_order.cu")
CASES = [  # batch, seqlen_q, seqlen_k, query heads, KV heads, head_dim, window, dtype
    (2, 300, 300, 4, 4, 64, (None, 0), torch.bfloat16),
    (1, 130, 700, 8, 2, 128, (None, 0), torch.bfloat16),  # more keys than rows
    (3, 500, 200, 2, 1, 128, (None, None), torch.float16),  # rows that see nothing but for no mask
    (2, 500, 200, 3, 3, 64, (None, 0), torch.bfloat16),  # rows without keys
    (1, 16, 1000, 8, 1, 128, (None, 0), torch.bfloat16),  # eight heads side by side
    (1, 900, 900, 2, 2, 64, (100, 20), torch.bfloat16),
    (2, 333, 400, 4, 2, 256, (77, 0), torch.bfloat16),
    (1, 700, 700, 4, 2, 128, (None, 0), FP8),
]


def tiles_of_the_kernel(q, k, window) -> np.ndarray:
    """(tiles, 6): sequence, head, row, begin, end, KV head, by work_tile itself, in the emulator."""
    o = torch.empty(q.shape, dtype=tilings.out_dtype(q.dtype))
    bound = prefill.Forward(q, k, k, o, Scores(window), tma=prefill.tma_can(q, k, o))
    constants = {n: v for n, v in bound.spec.constants if n in ("kTileQ", "kTileKv", "kPack")}
    spec = KernelSpec("order", ORDER, "order", tuple(constants.items()), 32, 0)
    found = torch.full((bound.args.tiles, 6), -1, dtype=torch.int32)
    args = [bound.args, ctypes.c_void_p(found.data_ptr()), ctypes.c_int(len(found))]
    emulator.launch(spec, (1, 1, 1), args, {"tiles": found})
    return found.numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_what_the_kernel_takes(case):
    batch, nq, nk, heads, heads_kv, head_dim, window, dtype = case
    q, k = (torch.zeros(batch, n, h, head_dim).to(dtype) for n, h in ((nq, heads), (nk, heads_kv)))
    plan = plan_attention(q, k, window=window, backend="emulator")
    launch = plan.launch
    assert launch is not None
    tokens = launch.tile_rows // launch.packed
    wanted = []
    for tile in plan.work:  # a list's item stands for several heads
        sequence, row = divmod(tile.row, nq)
        key = tile.key - sequence * nk
        wanted += [(sequence, row // tokens, key // launch.tile_keys, -(-(key + tile.keys) // launch.tile_keys))] * (
            tile.heads // launch.packed
        )
    got = [(t[0], t[2] // launch.tile_rows, t[3], t[4]) for t in tiles_of_the_kernel(q, k, window).tolist()]
    assert got == wanted
    assert launch.blocks == min(3, len(got))  # the emulator's card has three multiprocessors


def test_every_visible_pair_is_in_one_tile_and_the_numbers_are_the_problem_s():
    q, k = torch.zeros(2, 300, 8, 128).bfloat16(), torch.zeros(2, 400, 2, 128).bfloat16()
    for window in ((None, None), (None, 0), (50, 7)):
        gpu, cpu = (plan_attention(q, k, window=window, backend=b) for b in ("emulator", "cpu"))
        assert gpu.flops == cpu.flops
        assert gpu.summary.least_bytes == cpu.summary.least_bytes
        seen = np.zeros((8, 600, 800), int)
        for r in gpu.rectangles():
            seen[: r.heads, r.row : r.row + r.rows, r.key : r.key + r.keys] += 1
        assert seen.sum() * 128 * 4 >= gpu.flops


def test_what_is_shown():
    q, k = torch.zeros(1, 16, 8, 128).bfloat16(), torch.zeros(1, 1000, 1, 128).bfloat16()
    text = plan_attention(q, k, causal=True, backend="emulator").show()
    assert "forward, bf16, D 128: 128 rows × blocks of 128 keys, 8 heads side by side; 1 thread blocks" in text
    fp8 = plan_attention(q.to(FP8), k.to(FP8), causal=True, backend="emulator")
    assert fp8.summary.fp8
    assert fp8.bytes < plan_attention(q, k, causal=True, backend="emulator").bytes
    assert plan_attention(q.to(FP8), k.to(FP8), causal=True).launch is None  # on the CPU


def test_options_that_change_the_kernel_change_the_plan():
    q = torch.zeros(1, 3000, 2, 64).bfloat16()
    usual = plan_attention(q, q, causal=True, backend="emulator").launch
    capped = plan_attention(q, q, causal=True, softcap=20.0, backend="emulator").launch
    assert (usual.tile_rows, capped.tile_rows) == (192, 128)


def test_it_refuses_what_attention_refuses():
    for call in (plan_attention, lambda *xs, **options: attention(*xs, xs[1], **options)):
        with pytest.raises(NotImplementedError, match="head_dim up to 256"):
            call(*[torch.zeros(1, 8, 1, 320).to(FP8)] * 2, backend="emulator")


def test_the_launch_names_the_kernel_of_the_card_and_the_dtype():
    x = torch.zeros(1, 300, 2, 64)
    assert plan_attention(x, x, backend="emulator").launch.kernel == "forward_mma, float, D 64"
    assert plan_attention(x.half(), x.half(), backend="emulator").launch.kernel == "forward, half, D 64"
    with arch.as_card("sm_89"):
        launch = plan_attention(x.half(), x.half(), backend="emulator").launch
    assert (launch.kernel, launch.blocks) == ("forward_mma, half, D 64", 6)


def test_the_kernel_has_a_reason():
    x = torch.zeros(1, 300, 2, 64).bfloat16()
    text = plan_attention(x, x, backend="emulator").show()
    assert re.search(r"because +sm_90a has wgmma and TMA\n", text)
    with arch.as_card("sm_87"):
        text = plan_attention(x, x, backend="emulator").show()
    assert re.search(r"because +sm_87, which TILEWISE_CARD asks for, has no wgmma", text)
    assert "because" not in plan_attention(x, x).show()  # on the CPU there is no choice


@pytest.mark.parametrize("card", arch.ARCHS)
@pytest.mark.parametrize("dtype", tilings.DTYPES)
def test_the_reason_is_that_of_the_kernel_that_runs(card, dtype):
    x = torch.zeros(1, 64, 2, 64).to(dtype)
    with arch.as_card(card):
        name, why = tilings.kernel_of(x.device, dtype)
        bound = prefill.Forward(x, x, x, x.to(tilings.out_dtype(dtype)), Scores(), tma=True)
    assert bound.spec.name == name
    constants = dict(bound.spec.constants)
    assert ("widened to float16" in why) == (constants.get("Operand", constants["Element"]) != constants["Element"])
    assert ("mma.sync" in why) == (name == "forward_mma")
    assert ("on CUDA cores" in why) == constants.get("kCudaCores", False)
