"""What a mask function leaves of a problem, found on the device: kernels/prefill/kinds.cu."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tilewise import compiler, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import captures
from tilewise.gpu.abi import KindsArgs
from tilewise.gpu.pattern import FOLD_THREADS, KIND_SHARED
from tilewise.plan.schedule import BlockSchedule
from tilewise.plan.schedule_grid import grid_of

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
    grid = grid_of(seqlen_q, seqlen_k, block_q, block_k, heads if heads > 1 else None, batch if batch > 1 else None)
    kept, whole = (torch.empty(grid.shape, dtype=torch.int32, device=device) for _ in range(2))
    sizes = (heads, *grid.shape[2:], seqlen_q, seqlen_k, block_q, block_k)
    args, values = KindsArgs(kept.data_ptr(), whole.data_ptr(), *sizes), function.arguments()
    blocks = (grid.q_blocks, batch * heads, 1)
    if device.type == "cuda":
        if kept.numel():
            _loaded(spec, device).launch(blocks, compiler.Args(args, values))
            if captures.capturing():
                captures.note((kept, whole, *function.tensors))
        return BlockSchedule._on_device(grid, kept, whole, None, None)
    if kept.numel():
        known = {"kept": kept, "whole": whole} | {f"captured {n}": x for n, x in enumerate(function.tensors)}
        emulator.launch(spec, blocks, [args, values], known)
    given = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
    return BlockSchedule.from_bits(kept, whole=whole, **given)


@lru_cache(maxsize=256)
def _loaded(spec: KernelSpec, device: torch.device) -> compiler.Kernel:
    """device: with its number."""
    return compiler.load(spec, device)
