"""The geometry of a block-sparse pattern, the checks of its arrays, and key-block ranges as CSR arrays."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]

INT32_MAX = 2**31 - 1
SCALARS = ("seqlen_q", "seqlen_k", "block_q", "block_k", "heads")


class Pattern(NamedTuple):
    """CSR arrays of any integer type: row r keeps the key blocks indices[indptr[r]:indptr[r + 1]]."""

    indptr: npt.NDArray[Any]  # (rows + 1,)
    indices: npt.NDArray[Any]  # (num_blocks,)


class Grid:
    """A checked geometry, which has no pattern yet: `rows` rows of `cols` key blocks each, over all heads."""

    def __init__(self, seqlen_q: Any, seqlen_k: Any, block_q: Any, block_k: Any, heads: Any = None) -> None:
        self.scalars = check_geometry(seqlen_q, seqlen_k, block_q, block_k, heads)
        self.seqlen_q, self.seqlen_k, self.block_q, self.block_k, self.heads = self.scalars
        self.rows = (self.heads or 1) * -(-self.seqlen_q // self.block_q)
        self.cols = -(-self.seqlen_k // self.block_k)

    def diagonal(self) -> tuple[Int64s, Int64s]:
        """(rows,) each: the key on the bottom-right diagonal of each block's first and last query. They are not
        clipped: in a ragged last block, the key of the last query is past the last key and adds nothing."""
        first = np.arange(self.rows, dtype=np.int64) * self.block_q + self.seqlen_k - self.seqlen_q
        return first, first + self.block_q - 1

    def covering(self, first_key: Int64s, last_key: Int64s) -> tuple[Int64s, Int64s]:
        """(rows,) each: the range [first, end) of key blocks that hold the keys first_key to last_key, clipped. No
        first_key may be past the last key; those on the diagonal are not."""
        first = np.maximum(first_key, 0) // self.block_k
        end = np.minimum(last_key, self.seqlen_k - 1) // self.block_k + 1
        return first, np.maximum(end, first)

    def from_ranges(self, first: Int64s, end: Int64s) -> Pattern:
        """Row r keeps key blocks [first[r], end[r])."""
        indptr = indptr_of(end - first)
        return Pattern(indptr, np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], end - first))


def check_geometry(
    seqlen_q: Any, seqlen_k: Any, block_q: Any, block_k: Any, heads: Any = None
) -> tuple[int, int, int, int, int | None]:
    """The same five as ints. Raises TypeError or ValueError for one that no schedule takes."""
    lengths, blocks = [], []
    for name, value in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        lengths.append(checks.integer(name, value, 0, INT32_MAX))
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        blocks.append(checks.integer(name, value))
        if blocks[-1] % 16 or not 16 <= blocks[-1] <= 128:
            raise ValueError(f"{name} must be a multiple of 16 from 16 to 128, got {blocks[-1]}")
    if heads is not None:
        heads = checks.integer("heads", heads, 1)
        if heads * -(-lengths[0] // blocks[0]) >= INT32_MAX:
            raise ValueError(f"heads={heads} × seqlen_q={lengths[0]} is more rows of blocks than int32 can count")
    return lengths[0], lengths[1], blocks[0], blocks[1], heads


def as_array(name: str, x: Any) -> npt.NDArray[Any]:
    """An array or a tensor as an array, without a copy where that is possible."""
    if isinstance(x, torch.Tensor):
        # numpy has no bfloat16, and no caller takes a floating-point dtype.
        if x.is_floating_point() or x.is_complex():
            raise ValueError(f"{name} must not be {x.dtype}; it takes " + ("bool" if name == "mask" else "integers"))
        return x.detach().cpu().numpy()
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a numpy array or a torch.Tensor, got {type(x).__name__}")
    return x


def as_int32(name: str, x: Any, rank: int = 1) -> Int32s:
    """A copy of `x` as int32; every value must be in [0, 2**31)."""
    array = as_array(name, x)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be int32 (or another integer dtype), got {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimension{'s' * (rank > 1)}, got shape {array.shape}")
    if array.size and (int(array.min()) < 0 or int(array.max()) > INT32_MAX):
        raise ValueError(f"{name} must be between 0 and {INT32_MAX}, got {array.min()} to {array.max()}")
    return np.array(array, dtype=np.int32, order="C")


def indptr_of(counts: npt.NDArray[np.integer[Any]]) -> Int64s:
    """(rows + 1,) from the number of blocks in each row. Raises ValueError for more blocks than int32 can count, before
    an array of that size is made."""
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    if indptr[-1] > INT32_MAX:
        raise ValueError(
            f"block_q and block_k are too small: {indptr[-1]} blocks would be kept, int32 counts {INT32_MAX}"
        )
    return indptr


def check_csr(indptr: Int32s, indices: Int32s, rows: int, cols: int, rows_per_head: int) -> None:
    """Raises ValueError unless the arrays are a pattern of `rows` rows and `cols` key blocks."""
    if len(indptr) != rows + 1:
        raise ValueError(f"indptr must have {rows + 1} entries, (heads or 1) * num_q_blocks + 1, got {len(indptr)}")
    if indptr[0] != 0:
        raise ValueError(f"indptr must start at 0, got {indptr[0]}")
    falls = np.diff(indptr) < 0
    if falls.any():
        row = int(falls.argmax())
        raise ValueError(f"indptr must never fall, got {indptr[row + 1]} after {indptr[row]} at row {row}")
    if indptr[-1] != len(indices):
        raise ValueError(f"indptr must end at the number of indices, {len(indices)}, got {indptr[-1]}")
    if len(indices) and indices.max() >= cols:
        raise ValueError(f"indices must be below num_k_blocks={cols}, got {indices.max()}")
    unsorted = np.diff(indices) <= 0
    starts = indptr[1:-1]
    # Indices may fall from the last of one row to the first of the next.
    unsorted[starts[(starts > 0) & (starts < len(indices))] - 1] = False
    if unsorted.any():
        at = int(unsorted.argmax())
        head, q_block = divmod(int(np.searchsorted(indptr, at, side="right")) - 1, rows_per_head)
        kind = "duplicate" if indices[at] == indices[at + 1] else "unsorted"
        raise ValueError(
            f"indices must be strictly ascending in each row, got {kind} {indices[at]}, {indices[at + 1]} "
            f"in query block {q_block} of head {head}"
        )
