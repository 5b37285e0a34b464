"""Head dimensions as the forward kernels run over them: padded, and of wide V in slices.

Q and K have one head dimension, V and O another or the same. Columns that are only padding are zeros in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# What products run over. O of a tile is in registers, of which one warpgroup has room for 256 columns of 64 rows.
NARROW, WIDE = (64, 96, 128, 192, 256), (384, 512, 576)
MAX_HEAD_DIM = WIDE[-1]


@dataclass(frozen=True)
class Widths:
    """width: of Q and K, padded; value_width: of V and O, padded, or that of one of the slices they are made in.

    Tiles with the same rows make the slices, each its own. Each computes all scores: what that costs, and why it costs
    least, stands in docs/lab-notes.md.
    """

    head_dim: int
    value_dim: int
    width: int
    value_width: int

    @property
    def slices(self) -> int:
        return -(-self.value_dim // self.value_width)

    @property
    def widest(self) -> int:
        """What registers and shared memory go by, where Q and K are not wide."""
        return max(self.width, self.value_width)

    @property
    def key(self) -> str:
        """How a table of what was measured names it: "128", or "192x128"."""
        values = self.slices * self.value_width
        return str(self.width) if values == self.width else f"{self.width}x{values}"


@lru_cache(maxsize=256)
def widths_of(head_dim: int, value_dim: int | None = None, multiple: int = 1) -> Widths:
    """value_dim: of V, by default as Q and K have it. multiple: of which padded dimensions have to be one."""
    values = head_dim if value_dim is None else value_dim
    width = _padded(head_dim, multiple)
    if values <= NARROW[-1]:
        return Widths(head_dim, values, width, _padded(values, multiple))
    # Two slices of 192 or 256, or three of 192.
    return Widths(head_dim, values, width, 256 if 2 * 192 < values <= 2 * 256 else 192)


def _padded(head_dim: int, multiple: int) -> int:
    return next(d for d in (*NARROW, *WIDE) if d >= head_dim and d % multiple == 0)
