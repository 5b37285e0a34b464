"""What the tests of BlockSchedule share: any schedule, one written by hand, and the definitions element by element."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tilewise.plan.schedule import BlockSchedule

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.integers(0, 260)
blocks = st.sampled_from([16, 32, 48, 64, 80, 128])
heads_or_none = st.one_of(st.none(), st.integers(1, 3))


@st.composite
def schedules(draw: st.DrawFn, heads: st.SearchStrategy[int | None] = heads_or_none) -> BlockSchedule:
    """Any schedule: ragged or aligned, any rows empty, shared or per head."""
    seqlen_q, seqlen_k, block_q, block_k, n = draw(st.tuples(lengths, lengths, blocks, blocks, heads))
    rows, cols = (n or 1) * -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    kept = np.random.default_rng(draw(st.integers(0, 2**32))).random((rows, cols)) < draw(st.floats(0, 1))
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return BlockSchedule(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        block_q=block_q,
        block_k=block_k,
        heads=n,
        indptr=indptr,
        indices=np.nonzero(kept)[1].astype(np.int32),
    )


def covered(visible: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """The definition, block by block: (num_q_blocks, num_k_blocks), True where a block has a visible pair."""
    n_q, n_k = -(-visible.shape[0] // block_q), -(-visible.shape[1] // block_k)
    result = np.zeros((n_q, n_k), bool)
    for i in range(n_q):
        for j in range(n_k):
            result[i, j] = visible[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k].any()
    return result


def grid(schedule: BlockSchedule, head: int = 0) -> np.ndarray:
    """(num_q_blocks, num_k_blocks) of one head, read through `row`."""
    result = np.zeros((schedule.num_q_blocks, schedule.num_k_blocks), bool)
    for q_block in range(schedule.num_q_blocks):
        result[q_block, schedule.row(q_block, head)] = True
    return result


def distances(seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """key - diagonal key, bottom-right: 0 where query and key are the same token."""
    return np.arange(seqlen_k)[None, :] - (np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)


# 3 blocks of 16 queries (ragged), 4 blocks of 32 keys
GOOD: dict[str, Any] = {
    "seqlen_q": 40,
    "seqlen_k": 128,
    "block_q": 16,
    "block_k": 32,
    "heads": None,
    "indptr": np.array([0, 2, 2, 5], np.int32),
    "indices": np.array([1, 3, 0, 1, 2], np.int32),
}
