"""What work costs on a device: every constant that a plan weighs, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PLAN_MARGIN = 1.05  # by so much must a plan that shares be faster


@dataclass(frozen=True)
class CostModel:
    """What a device pays for work items, in microseconds: the documented basis of `share_prefix="auto"`.

    An item of t tokens and r rows (query tokens × query heads) costs

        item_us + max(t · kv_bytes / kv_bytes_per_us,  4 · t · r · head_dim / flops_per_us)

    and each row of an extra state `row_state_us` to merge. Sharing a node of n sequences saves the time of n small
    reads and pays for one large item and n sequences' extra states; it is done when the estimate says that it is at
    least `margin` times cheaper. Then the plans are compared as wholes: `launch_us`, the sequences' own tokens at
    `own_bytes_per_us` and what the nodes take, against the same with the nodes shared; it has to be PLAN_MARGIN times
    cheaper. Where a node has `wide_rows` rows a KV head or more, which a GPU puts through tiles, own tokens take
    `own_share` longer beside it, and all takes at least `floor_us`. Leaving all unshared is always possible, so "auto"
    is never planned slower than unshared.
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
        """Is a node of `tokens` tokens worth sharing among `sequences`, each with `rows_each` rows?

        kv_bytes: bytes of one token's K and V over all KV heads.
        """
        return self.saving_us(sequences, tokens, rows_each, head_dim, kv_bytes) > 0

    def saving_us(self, sequences: int, tokens: int, rows_each: int, head_dim: int, kv_bytes: float) -> float:
        """What sharing it saves, less the margin."""
        alone = self.alone_us(sequences, tokens, rows_each, head_dim, kv_bytes)
        together = self.item_us + self._stream_us(tokens, sequences * rows_each, head_dim, kv_bytes)
        together += sequences * rows_each * self.row_state_us
        return alone - together * self.margin

    def alone_us(self, sequences: int, tokens: int, rows_each: int, head_dim: int, kv_bytes: float) -> float:
        """What it takes when each sequence reads it for itself."""
        return sequences * self._stream_us(tokens, rows_each, head_dim, kv_bytes)

    def pays(self, alone_us: float, saved_us: float, own_bytes: float, rows: int) -> bool:
        """Is a plan faster whose nodes take `alone_us` unshared, of which sharing saves `saved_us`?

        rows: that the widest node has a KV head.
        """
        own, wide = own_bytes / self.own_bytes_per_us, rows >= self.wide_rows
        together = self.launch_us + own * (1 + wide * self.own_share) + alone_us - saved_us
        return max(wide * self.floor_us, together * PLAN_MARGIN) < self.launch_us + own + alone_us

    def _stream_us(self, tokens: int, rows: int, head_dim: int, kv_bytes: float) -> float:
        return max(tokens * kv_bytes / self.kv_bytes_per_us, 4 * tokens * rows * head_dim / self.flops_per_us)


# Two cores of a 2023 server, float32, measured with `tilewise bench prefix`: torch's flash kernel streams K and V at
# about 12 GB/s over few rows and does 120 GFLOP/s over many; an item costs some 100 µs of Python and dispatch.
CPU_COST = CostModel(item_us=100.0, kv_bytes_per_us=12e3, flops_per_us=120e3, row_state_us=0.3)

# An H200, measured: sequences that read the same pages one by one get about 7 TB/s of them, most from L2; shared nodes
# run at about 400 TFLOP/s; a row's state goes out and comes back through L2. Sequences' own tokens stream at 3.6 TB/s
# where a step is short, 15% slower beside tiles, and with tiles nothing is done before 24 µs. An item costs a warp some
# 3000 cycles, of which 528 run at a time. Kept with the grid of `tilewise bench serve` in view.
GPU_COST = CostModel(
    item_us=0.15,
    kv_bytes_per_us=7e6,
    flops_per_us=400e6,
    row_state_us=0.0004,
    launch_us=8.0,
    floor_us=24.0,
    own_bytes_per_us=3.6e6,
    own_share=0.15,
    wide_rows=32,  # worklist.py: Splitting.tile_rows, from which a node goes through tiles
)
