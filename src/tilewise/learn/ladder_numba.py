"""numba: the ladder's second rung, the tiled loop as a CUDA kernel written in Python; float32, needs the extra `numba`.

What changed from the loop in PyTorch: a block of threads owns one tile of queries, keeps it and every K and V tile in
shared memory, and never writes a score to global memory. What such a kernel gets wrong most easily is done so here:
every row has scores of its own; every thread reaches every barrier, because all loops around one count the same for the
whole block; l is summed, beside O and by the same correction; the grid comes first in the launch's brackets.

Numba's simulator runs it without a card, if NUMBA_ENABLE_CUDASIM=1 is set before this module is imported.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

if not hasattr(np, "row_stack"):  # numba 0.68 asks for the name, which later versions of NumPy have dropped
    np.row_stack = np.vstack

from numba import config, cuda, float32

NAME = "numba"
DTYPES = (torch.float32,)
HEAD_DIMS = (32, 64, 96, 128)  # what the tiles of 48 KB of shared memory hold

TILE_Q = 8  # rows of a block: threadIdx.y
TILE_KV = 16  # keys of a tile, and threads of a row: threadIdx.x


@functools.cache
def kernel(head_dim: int) -> Any:
    """The kernel for one head dimension: numba takes the sizes of shared arrays as constants from here."""
    D, ROWS, KEYS = head_dim, TILE_Q, TILE_KV

    @cuda.jit  # type: ignore[untyped-decorator, unused-ignore]
    def attention(q: Any, k: Any, v: Any, o: Any, lse: Any, scale: Any, causal: Any) -> None:
        """q, o (B, Nq, Hq, D), k, v (B, Nk, Hkv, D), lse (B, Hq, Nq); block (KEYS, ROWS), one block per query tile."""
        q_i = cuda.shared.array((ROWS, D), float32)
        k_j = cuda.shared.array((KEYS, D), float32)
        v_j = cuda.shared.array((KEYS, D), float32)
        o_i = cuda.shared.array((ROWS, D), float32)
        s_ij = cuda.shared.array((ROWS, KEYS), float32)

        lane, row = cuda.threadIdx.x, cuda.threadIdx.y
        head, batch = cuda.blockIdx.y, cuda.blockIdx.z
        kv_head = head // (q.shape[2] // k.shape[2])
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        first = cuda.blockIdx.x * ROWS
        query = first + row

        for d in range(lane, D, KEYS):  # a row past the end is zeros, and is not written back
            q_i[row, d] = q[batch, query, head, d] if query < seqlen_q else float32(0.0)
            o_i[row, d] = float32(0.0)

        # Keys this row sees, bottom-right, and keys that the last row of the block sees: those the block goes through.
        seen, block_seen = seqlen_k, seqlen_k
        if causal:
            seen = min(seqlen_k, query + 1 + seqlen_k - seqlen_q)
            block_seen = min(seqlen_k, first + ROWS + seqlen_k - seqlen_q)

        m_i = float32(-math.inf)
        l_i = float32(0.0)
        for key0 in range(0, block_seen, KEYS):
            for j in range(row, KEYS, ROWS):
                for d in range(lane, D, KEYS):
                    inside = key0 + j < seqlen_k
                    k_j[j, d] = k[batch, key0 + j, kv_head, d] if inside else float32(0.0)
                    v_j[j, d] = v[batch, key0 + j, kv_head, d] if inside else float32(0.0)
            cuda.syncthreads()

            # S = Q Kᵀ · scale, one key per thread
            s = float32(0.0)
            for d in range(D):
                s += q_i[row, d] * k_j[lane, d]
            s = s * scale if key0 + lane < seen else float32(-math.inf)
            s_ij[row, lane] = s
            cuda.syncthreads()

            m_new = m_i
            for j in range(KEYS):
                m_new = max(m_new, s_ij[row, j])
            reference = m_new if m_new > -math.inf else float32(0.0)  # no key seen yet: exp(−inf − 0) = 0
            correction = math.exp(m_i - reference)
            m_i = m_new
            cuda.syncthreads()  # all of the row have read S before P takes its place

            s_ij[row, lane] = math.exp(s - reference)
            cuda.syncthreads()

            # l = l · correction + Σ P,  O = O · correction + P V; every thread of the row sums the same l
            l_i *= correction
            for j in range(KEYS):
                l_i += s_ij[row, j]
            for d in range(lane, D, KEYS):
                pv = float32(0.0)
                for j in range(KEYS):
                    pv += s_ij[row, j] * v_j[j, d]
                o_i[row, d] = o_i[row, d] * correction + pv
            cuda.syncthreads()  # before the next tile overwrites K, V and P

        if query < seqlen_q:
            for d in range(lane, D, KEYS):  # what this thread itself has summed
                o[batch, query, head, d] = o_i[row, d] / l_i if l_i > 0 else float32(0.0)
            if lane == 0:
                lse[batch, head, query] = m_i + math.log(l_i) if l_i > 0 else float32(-math.inf)

    return attention


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Callable[[], None]:
    """A call that launches the kernel over these tensors, on the stream that is current now."""
    batch, seqlen_q, heads, head_dim = q.shape
    if any(x.dtype not in DTYPES for x in (q, k, v)) or head_dim not in HEAD_DIMS:
        raise NotImplementedError(
            f"{NAME} is written for float32 and head_dim {', '.join(map(str, HEAD_DIMS))}, "
            f"got {str(q.dtype).removeprefix('torch.')} and {head_dim}"
        )
    simulated = bool(config.ENABLE_CUDASIM)
    if simulated == q.is_cuda:
        raise NotImplementedError(
            f"the {NAME} rung runs CPU tensors in numba's simulator alone, and CUDA tensors on a card alone: "
            + ("unset NUMBA_ENABLE_CUDASIM" if simulated else "set NUMBA_ENABLE_CUDASIM=1 before numba is imported")
        )
    stream = 0
    if q.is_cuda and (pointer := torch.cuda.current_stream(q.device).cuda_stream):
        stream = cuda.external_stream(pointer)
    with warnings.catch_warnings():  # numba warns of a small grid, which small problems cannot help
        warnings.simplefilter("ignore")
        launch = kernel(head_dim)[(-(-seqlen_q // TILE_Q), heads, batch), (TILE_KV, TILE_Q), stream]
    if simulated:  # it takes contiguous arrays only; o and lse are written in place
        arrays = [*(x.contiguous().numpy() for x in (q, k, v)), o.numpy(), lse.numpy()]
    else:  # made once: numba would ask each tensor again at each launch, which takes longer than launching
        arrays = [cuda.as_cuda_array(x.detach(), sync=False) for x in (q, k, v, o, lse)]
    factor = np.float32(head_dim**-0.5 if scale is None else scale)  # a Python float would make products doubles
    return lambda: launch(*arrays, factor, causal)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Nq, Hq, D), k and v (B, Nk, Hkv, D) -> o (B, Nq, Hq, D), lse (B, Hq, Nq): as every rung of the ladder."""
    o = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=q.device)
    if o.numel():
        prepare(q, k, v, o, lse, causal=causal, scale=scale)()
    return o, lse
