"""What a mask function leaves of a problem, found on the device: kernels/prefill/kinds.cu."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import KindsArgs
from tilewise.gpu.pattern import FOLD_THREADS, KIND_SHARED
from tilewise.plan.schedule import BlockSchedule

if TYPE_CHECKING:
    from tilewise.functions import Function


@lru_cache(maxsize=256)
def kinds_spec(text: str) -> KernelSpec:
    """text: the function in C++."""
    constants = (("Function", "UserFunction"),)
    return KernelSpec("kinds", "prefill/kinds.cu", "kinds", constants, FOLD_THREADS, KIND_SHARED, text=text)


def schedule_of(
    function: Function, batch: int, heads: int, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int,
    device: torch.device,
) -> BlockSchedule:  # fmt: skip
    """The blocks that the mask leaves, on `device`; on a CPU by the emulator. Nothing waits."""
    spec = kinds_spec(function.text((batch, heads, seqlen_q, seqlen_k)))
    batch, heads = batch if "b" in function.uses else 1, heads if "h" in function.uses else 1
    rows, columns = math.ceil(seqlen_q / block_q), math.ceil(seqlen_k / block_k)
    words = math.ceil(columns / 32)
    kept, whole = (torch.empty(batch, heads, rows, words, dtype=torch.int32, device=device) for _ in range(2))
    sizes = (heads, rows, words, seqlen_q, seqlen_k, block_q, block_k)
    args, values = KindsArgs(kept.data_ptr(), whole.data_ptr(), *sizes), function.arguments()
    grid = (rows, batch * heads, 1)
    if kept.numel():
        if device.type == "cuda":
            compiler.load(spec, device).launch(grid, compiler.Args(args, values))
        else:
            known = {"kept": kept, "whole": whole} | {f"captured {n}": x for n, x in enumerate(function.tensors)}
            emulator.launch(spec, grid, [args, values], known)
    blocks = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_bits(kept, whole=whole, **blocks)
