"""Every constant that a plan or a work list weighs: its unit, and how it was measured.

`CostModel` decides which nodes of a tree of shared pages are worth sharing (tree.py); its unit is the microsecond. The
work list (worklist.py and the files beside it) balances warps; its unit is the *chunk*, the time in which a streaming
warp reads and computes 16 tokens of one KV head while all other warps of the grid stream too. On an H200 with bfloat16
and head_dim 128 that is about 2500 cycles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

# ---- the work list, on an H200 with bfloat16, head_dim 128 and pages of 16 tokens -----------------------------------

# In chunks: what a warp spends on an item besides its tokens. Clocks inside the kernel: 1280 cycles before the first
# chunk of an item and 1410 after its last.
ITEM_CHUNKS = 1.0
# In chunks: what it costs to write a partial state to scratch and to read it again for merging. Measured; the lab
# notes do not say how.
STATE_CHUNKS = 0.5
# In chunks of a streaming warp: what one step of a tile item (64 tokens) takes. An estimate, not measured by itself.
STEP_CHUNKS = 1.0
# In chunks, for blocks of four warps that compute their tile items by mma.sync: the same. An estimate: a step of 64
# tokens and 128 rows is 4.2 MFLOP, 3.7 µs at 300 TFLOP/s over 264 blocks, or 6500 cycles.
MMA_STEP_CHUNKS = 2.5
# Ratio: how much faster than with an even share of the bandwidth one warp streams while the other warps are idle. 512
# warps with one sequence of 4096 tokens each are as fast as 1056 warps with pieces of such sequences.
SPRINT = 3.5
# In chunks: to fold the state of a piece into that of the pieces before it. Not measured by itself: states stay in
# registers and shared memory.
FOLD_CHUNKS = 0.0


@dataclass(frozen=True)
class Weights:
    """What a work list is balanced by, all in chunks but `sprint`, a ratio: the constants above, unless a table has
    others that were measured on the card (tuned.py). They decide who computes what and whether one warp takes a range
    whole, and never change a bit of the result."""

    item_chunks: float = ITEM_CHUNKS
    state_chunks: float = STATE_CHUNKS
    step_chunks: float = STEP_CHUNKS
    sprint: float = SPRINT
    fold_chunks: float = FOLD_CHUNKS


# Ratio: tile items of a parent node and of its child that have the same rows may form a chain, which saves one state
# but keeps both items in the same block. The longest chain, in tokens, as a multiple of an even share per block: an
# estimate, not measured by itself.
CHAIN_SHARE = 1.25
# In chunks: the candidates for the longest own range that one warp takes whole; Shape.longest is the last candidate.
WHOLE_LIMITS = (0, 64, 128, 256, 512)
# In chunks: Shape.longest. With rings of two chunks, a warp that takes 16384 tokens whole loses 5% against pieces; with
# deep rings it loses nothing. Longer ranges are always cut: they have more pieces than merging folds in one run, and
# the bits of the result would depend on whether a warp or the merge folded them.
WHOLE_CHUNKS = 512
DEEP_CHUNKS = 1024

# ---- plans ----------------------------------------------------------------------------------------------------------

# Query rows per KV head from which a shared node goes through tiles instead of streaming warps.
WIDE_ROWS = 32
# Ratio: a plan that shares nodes must be estimated to be faster than the plan without sharing by this factor.
PLAN_MARGIN = 1.05


@dataclass(frozen=True)
class CostModel:
    """What a device pays for work items, in microseconds: the documented basis of `share_prefix="auto"`.

    An item of t tokens and r rows (query tokens × query heads) costs

        item_us + max(t · kv_bytes / kv_bytes_per_us,  4 · t · r · head_dim / flops_per_us)

    and each row of an extra state costs `row_state_us` to merge.

    The decision has two steps. First, each node by itself: sharing a node of n sequences replaces n small reads by one
    large item and n sequences' extra states; the node is a candidate if that is estimated to be more than `margin`
    times cheaper. Second, the whole plan: `launch_us`, the sequences' own tokens at `own_bytes_per_us` and the time of
    the nodes, shared against unshared; sharing must be more than PLAN_MARGIN times cheaper. If the widest node has at
    least `wide_rows` rows per KV head (on a GPU such nodes go through tiles), the own tokens take `own_share` longer
    and the whole takes at least `floor_us`. The plan without sharing is always possible, so "auto" is never estimated
    to be slower than that.
    """

    item_us: float
    kv_bytes_per_us: float
    flops_per_us: float
    row_state_us: float
    margin: float = 1.1
    launch_us: float = 0.0
    floor_us: float = 0.0
    own_bytes_per_us: float = np.inf
    own_share: float = 0.0
    wide_rows: int = 0

    def shares(self, sequences: int, tokens: int, rows_each: int, head_dim: int, kv_bytes: float) -> bool:
        """Is a node of `tokens` tokens worth sharing among `sequences` sequences of `rows_each` rows each?

        kv_bytes: bytes of one token's K and V over all KV heads.
        """
        return self.saving_us(sequences, tokens, rows_each, head_dim, kv_bytes) > 0

    def saving_us(self, sequences: int, tokens: int, rows_each: int, head_dim: int, kv_bytes: float) -> float:
        """The time that sharing the node saves, with the time of the shared node multiplied by `margin`."""
        alone = self.alone_us(sequences, tokens, rows_each, head_dim, kv_bytes)
        together = self.item_us + self._stream_us(tokens, sequences * rows_each, head_dim, kv_bytes)
        together += sequences * rows_each * self.row_state_us
        return alone - together * self.margin

    def alone_us(self, sequences: int, tokens: int, rows_each: int, head_dim: int, kv_bytes: float) -> float:
        """The time that the node's tokens take if each sequence reads them for itself."""
        return sequences * self._stream_us(tokens, rows_each, head_dim, kv_bytes)

    def pays(self, alone_us: float, saved_us: float, own_bytes: float, rows: int) -> bool:
        """Is the plan that shares its candidate nodes faster than the plan without sharing?

        alone_us: the time of these nodes unshared; saved_us: what sharing saves of it; own_bytes: bytes of the tokens
        that each sequence reads for itself in either plan; rows: rows per KV head of the widest node.
        """
        own, wide = own_bytes / self.own_bytes_per_us, rows >= self.wide_rows
        together = self.launch_us + own * (1 + wide * self.own_share) + alone_us - saved_us
        return max(wide * self.floor_us, together * PLAN_MARGIN) < self.launch_us + own + alone_us

    def _stream_us(self, tokens: int, rows: int, head_dim: int, kv_bytes: float) -> float:
        return max(tokens * kv_bytes / self.kv_bytes_per_us, 4 * tokens * rows * head_dim / self.flops_per_us)


# Two cores of a 2023 server, float32, measured with `tilewise bench prefix`: torch's flash kernel streams K and V at
# about 12 GB/s over few rows and does 120 GFLOP/s over many; an item costs about 100 µs of Python and dispatch.
CPU_COST = CostModel(item_us=100.0, kv_bytes_per_us=12e3, flops_per_us=120e3, row_state_us=0.3)

# An H200, checked against the grid of `tilewise bench serve`. Sequences that read the same pages one by one read them
# at about 7 TB/s, most of it from L2. Shared nodes run at about 400 TFLOP/s. A row's state is written and read through
# L2. The sequences' own tokens stream at 3.6 TB/s in short steps and 15% slower beside tiles; with tiles no step ends
# before 24 µs. An item costs a warp about 3000 cycles, and 528 warps run at a time.
GPU_COST = CostModel(
    item_us=0.15,
    kv_bytes_per_us=7e6,
    flops_per_us=400e6,
    row_state_us=0.0004,
    launch_us=8.0,
    floor_us=24.0,
    own_bytes_per_us=3.6e6,
    own_share=0.15,
    wide_rows=WIDE_ROWS,
)

# Rows that are keys and values at once (MLA), whose kernel has one body for nodes and own tokens: the head_dim that it
# is asked about is the mean of a key's and a value's. On an H200 sequences that read the same pages one by one do so at
# 4.9 TB/s, and nodes of 1024 rows and more run at about 300 TFLOP/s (64 × (8192 + 256), 16 heads: 128 µs unshared and
# 78 shared; 128 heads: 318 and 520).
MLA_COST = CostModel(
    item_us=0.5,
    kv_bytes_per_us=4.9e6,
    flops_per_us=300e6,
    row_state_us=0.0015,
    launch_us=10.0,
    own_bytes_per_us=4.0e6,
)

# Cards without wgmma, where nodes go through tiles by mma.sync: an estimate, not measured. An A100 multiplies at 312
# TFLOP/s and reads 2 TB/s at most: two thirds of the one and 85% of the other are reckoned with. Sequences that read
# the same pages one by one are taken to be twice as fast as the memory, as they are on an H200 with these kernels. A
# block computes its tiles and streams in turn, so that the two times add up and own tokens are not slowed down.
MMA_COST = CostModel(
    item_us=0.15,
    kv_bytes_per_us=4e6,
    flops_per_us=200e6,
    row_state_us=0.0008,
    launch_us=10.0,
    floor_us=24.0,
    own_bytes_per_us=1.7e6,
    wide_rows=WIDE_ROWS,
)
# Nodes that streaming warps compute on such cards, sixteen rows at a time. On an H200 behaving as an A100, bfloat16,
# 64 × (8192 + 256) took 282 µs that way, which is 30 TFLOP/s, and 262 µs unshared: sharing pays where rows are few.
STREAM_FLOPS_PER_US = 30e6


def streamed(cost: CostModel) -> CostModel:
    """The model where streaming warps compute all nodes: of caches that a card without wgmma has no tiles for."""
    return replace(cost, flops_per_us=min(cost.flops_per_us, STREAM_FLOPS_PER_US), floor_us=0.0)
