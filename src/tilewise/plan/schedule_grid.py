"""The geometry of a block-sparse pattern, the checks of its arrays, and key-block ranges as CSR arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]

INT32_MAX = 2**31 - 1
SCALARS = ("seqlen_q", "seqlen_k", "block_q", "block_k", "heads", "batch")
Geometry: TypeAlias = "tuple[int, int, int, int, int | None, int | None]"  # the values of SCALARS


class Pattern(NamedTuple):
    """CSR arrays of any integer type: row r keeps the key blocks indices[indptr[r]:indptr[r + 1]]."""

    indptr: npt.NDArray[Any]  # (rows + 1,)
    indices: npt.NDArray[Any]  # (num_blocks,)


class Grid:
    """A checked geometry, which has no pattern yet: `rows` rows of `cols` key blocks, over all sequences and heads.

    Row (b · heads + h) · q_blocks + i is block i of the queries of head h in sequence b.
    """

    def __init__(
        self, seqlen_q: Any, seqlen_k: Any, block_q: Any, block_k: Any, heads: Any = None, batch: Any = None
    ) -> None:
        self.scalars = check_geometry(seqlen_q, seqlen_k, block_q, block_k, heads, batch)
        self.seqlen_q, self.seqlen_k, self.block_q, self.block_k, self.heads, self.batch = self.scalars
        self.q_blocks = -(-self.seqlen_q // self.block_q)
        self.rows = (self.batch or 1) * (self.heads or 1) * self.q_blocks
        self.cols = -(-self.seqlen_k // self.block_k)
        # What a schedule of this grid on a device has besides its tensors, if its blocks have no lengths
        self.alone: dict[str, Any] = dict(zip(SCALARS, self.scalars, strict=True))
        self.alone |= {"lengths_q": None, "lengths_k": None, "_grid": self, "_pattern": None}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, heads or 1, num_q_blocks, words): that of the bits."""
        return self.batch or 1, self.heads or 1, self.q_blocks, -(-self.cols // 32)

    def transposed(self) -> Grid:
        """Keys as rows: the same heads and sequences."""
        return Grid(self.seqlen_k, self.seqlen_q, self.block_k, self.block_q, self.heads, self.batch)

    def place(self, row: int) -> str:
        """Which row this is, for a message."""
        outer, q_block = divmod(row, self.q_blocks)
        sequence, head = divmod(outer, self.heads or 1)
        return f"query block {q_block} of head {head}" + ("" if self.batch is None else f" of sequence {sequence}")

    def diagonal(self) -> tuple[Int64s, Int64s]:
        """(num_q_blocks,) each: the key on the bottom-right diagonal of each block's first and last query. They are
        not clipped: in a ragged last block, the key of the last query is past the last key and adds nothing."""
        first = np.arange(self.q_blocks, dtype=np.int64) * self.block_q + self.seqlen_k - self.seqlen_q
        return first, first + self.block_q - 1

    def covering(self, first_key: Int64s, last_key: Int64s) -> tuple[Int64s, Int64s]:
        """The range [first, end) of key blocks that hold the keys first_key to last_key, clipped. No
        first_key may be past the last key; those on the diagonal are not."""
        first = np.maximum(first_key, 0) // self.block_k
        end = np.minimum(last_key, self.seqlen_k - 1) // self.block_k + 1
        return first, np.maximum(end, first)

    def from_ranges(self, first: Int64s, end: Int64s) -> Pattern:
        """Row r keeps key blocks [first[r], end[r])."""
        indptr = indptr_of(end - first)
        return Pattern(indptr, np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], end - first))


def grid_of(*scalars: Any) -> Grid:
    """The Grid of these arguments; the same one again where they are plain ints, as a model's calls have them."""
    plain = all(type(x) is int or x is None for x in scalars)
    return _kept_grid(*scalars) if plain else Grid(*scalars)


@lru_cache(maxsize=256)
def _kept_grid(*scalars: Any) -> Grid:
    return Grid(*scalars)


def check_geometry(
    seqlen_q: Any, seqlen_k: Any, block_q: Any, block_k: Any, heads: Any = None, batch: Any = None
) -> Geometry:
    """The same as ints. Raises TypeError or ValueError for one that no schedule takes."""
    lengths, blocks = [], []
    for name, value in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        lengths.append(checks.integer(name, value, 0, INT32_MAX))
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        blocks.append(checks.integer(name, value))
        if blocks[-1] % 16 or not 16 <= blocks[-1] <= 128:
            raise ValueError(f"{name} must be a multiple of 16 from 16 to 128, got {blocks[-1]}")
    heads = None if heads is None else checks.integer("heads", heads, 1)
    batch = None if batch is None else checks.integer("batch", batch, 1)
    if (batch or 1) * (heads or 1) * -(-lengths[0] // blocks[0]) >= INT32_MAX:
        many = " × ".join(f"{n}={x}" for n, x in (("batch", batch), ("heads", heads)) if x is not None)
        raise ValueError(f"{many} × seqlen_q={lengths[0]} is more rows of blocks than int32 can count")
    return lengths[0], lengths[1], blocks[0], blocks[1], heads, batch


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


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, (torch.Tensor, np.ndarray)):
        raise TypeError(f"{name} must be a torch.Tensor or a numpy array, got {type(x).__name__}")


def leading(name: str, x: Any, *tail: str) -> tuple[int | None, int | None]:
    """(batch, heads) of an array or a tensor (…, *tail) with up to two leading dimensions; None for a size of 1, which
    is shared, and for one that is not there."""
    _check_array(name, x)
    lead, end = tuple(x.shape[: max(0, x.ndim - len(tail))]), ", ".join(tail)
    if not len(tail) <= x.ndim <= len(tail) + 2 or 0 in lead:
        raise ValueError(
            f"{name} must have shape ({end}), (heads, {end}) or (batch, heads, {end}), got {tuple(x.shape)}"
        )
    batch, heads = (1,) * (2 - len(lead)) + lead
    return None if batch == 1 else batch, None if heads == 1 else heads


def check_tail(name: str, x: Any, *sizes: int) -> None:
    """Raises ValueError unless the last dimensions of x have these sizes, in blocks."""
    if tuple(x.shape[-len(sizes) :]) != sizes:
        wanted = ", ".join(map(str, sizes))
        raise ValueError(
            f"{name} must end in ({wanted}), as seqlen_q, seqlen_k, block_q and block_k say, got {tuple(x.shape)}"
        )


def check_alike(name: str, x: Any, like: str, y: Any) -> None:
    """Raises unless x has the shape and the dtype of y, whose name is `like`."""
    _check_array(name, x)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        wanted, got = (f"{tuple(z.shape)} and {z.dtype}" for z in (y, x))
        raise ValueError(f"{name} must be {wanted} like {like}, got {got}")


def check_lists(lists: dict[str, Any]) -> None:
    """Raises unless these are (…, rows) counts and (…, rows, width) indices, and the same of full ones or None."""
    counts = lists["counts"]
    if (lists["full_counts"] is None) != (lists["full_indices"] is None):
        raise ValueError("full_counts and full_indices must be given together")
    for name, x in lists.items():
        if x is None and name.startswith("full"):
            continue
        _check_array(name, x)
        if x.dtype not in (torch.int32, torch.int64, np.int32, np.int64):
            raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
        dims = counts.ndim + name.endswith("indices")
        if x.ndim != dims or x.shape[: counts.ndim] != counts.shape:
            wanted = ", ".join([*map(str, counts.shape), "width"][:dims])
            raise ValueError(f"{name} must have shape ({wanted}), as counts has, got {tuple(x.shape)}")


def as_lengths(
    name: str, x: Any, batch: int | None, seqlen: int, block: int, device: torch.device
) -> torch.Tensor | None:
    """Valid rows of each block: int32 (batch or 1, blocks) on `device`, where x has that shape or is (blocks,).

    On the CPU they are a copy, checked against the block's size and cut to what the ragged last block has; on a device
    nobody looks.
    """
    if x is None:
        return None
    given = torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x
    checks.tensor(name, given, dtypes=checks.INTEGERS)
    blocks = -(-seqlen // block)
    if tuple(given.shape) not in {(blocks,), (1, blocks), (batch or 1, blocks)}:
        shapes = " or ".join(dict.fromkeys((f"({blocks},)", f"(1, {blocks})", f"({batch or 1}, {blocks})")))
        raise ValueError(f"{name} must have shape {shapes}, got {tuple(given.shape)}")
    if given.device != device:
        raise ValueError(f"{name} must be on {device} like the pattern, got {given.device}")
    given = given if given.dim() == 2 else given[None]
    if device.type != "cpu":
        return (given.clamp(-1, block + 1) if given.dtype == torch.int64 else given).to(torch.int32).contiguous()
    if given.numel() and not 0 <= int(given.min()) <= int(given.max()) <= block:
        raise ValueError(f"{name} must be between 0 and the block size {block}, got {given.min()} to {given.max()}")
    whole = seqlen - torch.arange(blocks, dtype=torch.int32, device="cpu") * block
    return torch.minimum(given.to(torch.int32), whole)


def check_csr(indptr: Int32s, indices: Int32s, grid: Grid, name: str = "indices") -> None:
    """Raises ValueError unless the arrays are a pattern of the grid's rows and key blocks. name: of the indices."""
    rows, cols = grid.rows, grid.cols
    if len(indptr) != rows + 1:
        raise ValueError(
            f"indptr must have {rows + 1} entries, (batch or 1) * (heads or 1) * num_q_blocks + 1, got {len(indptr)}"
        )
    if indptr[0] != 0:
        raise ValueError(f"indptr must start at 0, got {indptr[0]}")
    falls = np.diff(indptr) < 0
    if falls.any():
        row = int(falls.argmax())
        raise ValueError(f"indptr must never fall, got {indptr[row + 1]} after {indptr[row]} at row {row}")
    if indptr[-1] != len(indices):
        raise ValueError(f"indptr must end at the number of indices, {len(indices)}, got {indptr[-1]}")
    if len(indices) and indices.max() >= cols:
        raise ValueError(f"{name} must be below num_k_blocks={cols}, got {indices.max()}")
    unsorted = np.diff(indices) <= 0
    starts = indptr[1:-1]
    # Indices may fall from the last of one row to the first of the next.
    unsorted[starts[(starts > 0) & (starts < len(indices))] - 1] = False
    if unsorted.any():
        at = int(unsorted.argmax())
        row = int(np.searchsorted(indptr, at, side="right")) - 1
        kind = "duplicate" if indices[at] == indices[at + 1] else "unsorted"
        raise ValueError(
            f"{name} must be strictly ascending in each row, got {kind} {indices[at]}, {indices[at + 1]} "
            f"in {grid.place(row)}"
        )
