"""Block-sparse patterns: which blocks of queries meet which blocks of keys.

A `BlockSchedule` is the tile list of a block-sparse problem with the dropped tiles left out. It is made and checked
here (with schedule_grid.py), saved and loaded (schedule_files.py), and shown as text or as a picture; dense.py and the
kernels run it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks
from tilewise.plan import schedule_files as files
from tilewise.plan.schedule_files import AnyPath
from tilewise.plan.schedule_grid import (
    INT32_MAX,
    SCALARS,
    Grid,
    Int32s,
    Pattern,
    as_array,
    as_int32,
    check_csr,
    check_geometry,
    indptr_of,
)

SHADES = " ░▒▓█"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockSchedule:
    """Which (block_q × block_k) blocks of a (seqlen_q × seqlen_k) score matrix are computed; the others are masked out.

    `heads=None` is one pattern for all heads, `heads=H` one pattern for each of H query heads. Block sizes are
    multiples of 16 from 16 to 128; sequence lengths are free, the last block of a row or column may be ragged.

    CSR with `rows = (heads or 1) * num_q_blocks`, row `head * num_q_blocks + q_block`:
      indptr   int32 (rows + 1,): row r keeps `indices[indptr[r]:indptr[r + 1]]`
      indices  int32 (num_blocks,): key blocks, strictly ascending in each row, in [0, num_k_blocks)

    Any integer array or tensor is taken for these two; they are checked, copied and read-only. A row may be empty: its
    queries see no key. `causal` and `window` of the call that runs a schedule apply on top of it.
    """

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int
    heads: int | None = None
    indptr: Int32s
    indices: Int32s

    def __post_init__(self) -> None:
        values = check_geometry(self.seqlen_q, self.seqlen_k, self.block_q, self.block_k, self.heads)
        for name, value in zip(SCALARS, values, strict=True):
            object.__setattr__(self, name, value)
        rows = (self.heads or 1) * self.num_q_blocks
        indptr, indices = as_int32("indptr", self.indptr), as_int32("indices", self.indices)
        check_csr(indptr, indices, rows, self.num_k_blocks, self.num_q_blocks)
        for name, array in (("indptr", indptr), ("indices", indices)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    # ---- makers -------------------------------------------------------------------------------------------------

    @classmethod
    def full(
        cls, seqlen_q: int, seqlen_k: int, *, block_q: int = 64, block_k: int = 64, heads: int | None = None
    ) -> BlockSchedule:
        """Every block: dense attention as a schedule."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k, heads)
        first = np.zeros(grid.rows, np.int64)
        return _schedule(grid, grid.from_ranges(first, first + grid.cols))

    @classmethod
    def random(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        *,
        block_q: int = 64,
        block_k: int = 64,
        sparsity: float,
        seed: int,
        heads: int | None = None,
    ) -> BlockSchedule:
        """Each row of blocks keeps the same number of blocks, chosen at random: `(1 - sparsity) * num_k_blocks`,
        rounded to the nearest, at least one. `sparsity` is in [0, 1). The same `seed` gives the same schedule."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k, heads)
        if checks.number("sparsity", sparsity, 0.0) >= 1.0:
            raise ValueError(f"sparsity must be at least 0 and below 1 (a row keeps a block), got {sparsity}")
        generator = np.random.default_rng(checks.integer("seed", seed, 0))
        keep = min(grid.cols, max(1, math.floor((1.0 - sparsity) * grid.cols + 0.5)))
        indptr = indptr_of(np.full(grid.rows, keep, np.int64))
        indices = np.empty((grid.rows, keep), np.int32)
        # A few rows at a time: the random numbers then need little memory, however many heads there are.
        step = max(1, 2**20 // max(1, grid.cols))
        for start in range(0, grid.rows if keep else 0, step):
            part = indices[start : start + step]
            order = generator.random((len(part), grid.cols))
            part[:] = np.argpartition(order, keep - 1, axis=1)[:, :keep]
            part.sort(axis=1)
        return _schedule(grid, Pattern(indptr, indices.reshape(-1)))

    @classmethod
    def banded(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        *,
        block_q: int = 64,
        block_k: int = 64,
        left: int | None,
        right: int | None,
    ) -> BlockSchedule:
        """Every block with at least one visible pair of the window `(left, right)`, in tokens, aligned bottom-right:
        query i sees keys `i + seqlen_k - seqlen_q - left` to `i + seqlen_k - seqlen_q + right`. None is no limit.

        Whole blocks are kept; for the exact band give `window=(left, right)` to the call as well."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k)
        # A limit above both lengths together hides nothing. Clipped to that, the sums below stay within int64.
        limits = []
        for name, limit in (("left", left), ("right", right)):
            tokens = 2 * INT32_MAX if limit is None else checks.integer(name, limit, 0)
            limits.append(min(tokens, 2 * INT32_MAX))
        first, last = grid.diagonal()
        return _schedule(grid, grid.from_ranges(*grid.covering(first - limits[0], last + limits[1])))

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int, *, block_q: int = 64, block_k: int = 64) -> BlockSchedule:
        """Every block with at least one pair that causal attention sees, aligned bottom-right (the last query sees the
        last key). Whole blocks are kept; for the exact triangle give `causal=True` to the call as well."""
        return cls.banded(seqlen_q, seqlen_k, block_q=block_q, block_k=block_k, left=None, right=0)

    @classmethod
    def strided(
        cls, seqlen_q: int, seqlen_k: int, *, block_q: int = 64, block_k: int = 64, stride: int, local: int = 1
    ) -> BlockSchedule:
        """The Sparse Transformer's pattern in blocks: the blocks on the (bottom-right) diagonal with `local` blocks on
        each side, and every `stride`-th block column (columns stride - 1, 2 * stride - 1, …), which all rows see."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k)
        stride, local = checks.integer("stride", stride, 1), checks.integer("local", local, 0)
        reach = min(local, INT32_MAX) * grid.block_k
        first, last = grid.diagonal()
        near = grid.from_ranges(*grid.covering(first - reach, last + reach))
        columns = np.arange(grid.cols, dtype=np.int64)[stride - 1 :: stride]
        rows = np.arange(grid.rows, dtype=np.int64)
        # Each block gets one number, row · cols + column: the union of two patterns is a sorted set of these numbers.
        near_keys = np.repeat(rows, np.diff(near.indptr)) * grid.cols + near.indices
        keys = np.union1d(near_keys, (rows[:, None] * grid.cols + columns).reshape(-1))
        width = max(1, grid.cols)
        return _schedule(grid, Pattern(indptr_of(np.bincount(keys // width, minlength=grid.rows)), keys % width))

    @classmethod
    def from_mask(cls, mask: torch.Tensor | npt.NDArray[Any], *, block_q: int = 64, block_k: int = 64) -> BlockSchedule:
        """The smallest schedule that covers an elementwise mask, bool (Nq, Nk) or (heads, Nq, Nk), True is visible.

        A block is kept **whole** if any of its elements is True, so `to_mask()` shows at least what `mask` shows, and
        exactly that when the mask is made of whole blocks."""
        given = as_array("mask", mask)
        if given.dtype != np.bool_:
            raise ValueError(f"mask must be bool (True is visible), got {given.dtype}")
        if given.ndim not in (2, 3):
            raise ValueError(f"mask must have shape (Nq, Nk) or (heads, Nq, Nk), got {given.shape}")
        heads = given.shape[0] if given.ndim == 3 else None
        if heads == 0:
            raise ValueError(f"mask must have at least one head, got shape {given.shape}")
        grid = Grid(given.shape[-2], given.shape[-1], block_q, block_k, heads)
        if grid.rows == 0 or grid.cols == 0:
            return _schedule(grid, Pattern(indptr_of(np.zeros(grid.rows, np.int64)), np.empty(0, np.int32)))
        # Rows first: this pass reads contiguous memory, and the second pass has only 1/block_q of the work.
        kept = np.logical_or.reduceat(given, np.arange(0, grid.seqlen_q, grid.block_q), axis=-2)
        kept = np.logical_or.reduceat(kept, np.arange(0, grid.seqlen_k, grid.block_k), axis=-1)
        kept = kept.reshape(grid.rows, grid.cols)
        return _schedule(grid, Pattern(indptr_of(kept.sum(axis=1, dtype=np.int64)), np.nonzero(kept)[1]))

    @classmethod
    def from_runs(
        cls, runs: torch.Tensor | npt.NDArray[Any], seqlen_q: int, seqlen_k: int, *, block_q: int, block_k: int
    ) -> BlockSchedule:
        """One run of key blocks for each block of queries: `runs` is integer (num_q_blocks, 2) of first key block and
        number of key blocks (0: the row is empty). Shared by all heads."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k)
        pairs = as_array("runs", runs)
        if pairs.shape != (grid.rows, 2):
            raise ValueError(
                f"runs must have shape ({grid.rows}, 2), a start and a count for each of the {grid.rows} blocks of "
                f"{grid.block_q} queries in seqlen_q={grid.seqlen_q}, got {pairs.shape}"
            )
        pairs = as_int32("runs", pairs, rank=2).astype(np.int64)
        past = pairs.sum(axis=1) > grid.cols
        if past.any():
            row = int(past.argmax())
            start, count = pairs[row].tolist()
            raise ValueError(
                f"runs[{row}] must stay within the {grid.cols} key blocks, got start {start} and count {count}"
            )
        return _schedule(grid, grid.from_ranges(pairs[:, 0], pairs[:, 0] + pairs[:, 1]))

    # ---- facts --------------------------------------------------------------------------------------------------

    @property
    def num_q_blocks(self) -> int:
        """Blocks along the queries, the ragged last one included."""
        return -(-self.seqlen_q // self.block_q)

    @property
    def num_k_blocks(self) -> int:
        """Blocks along the keys, the ragged last one included."""
        return -(-self.seqlen_k // self.block_k)

    @property
    def num_blocks(self) -> int:
        """Blocks kept, over all heads when the schedule is per head."""
        return len(self.indices)

    @property
    def density(self) -> float:
        """The fraction of all blocks that is kept; 0 when there are no blocks at all."""
        return self.num_blocks / max(1, (self.heads or 1) * self.num_q_blocks * self.num_k_blocks)

    @property
    def sparsity(self) -> float:
        """The fraction of all blocks that is dropped: `1 - density`."""
        return 1.0 - self.density

    def row(self, q_block: int, head: int = 0) -> Int32s:
        """The key blocks that block `q_block` of the queries meets, int32, ascending, a read-only view. A shared
        schedule gives the same row for every `head`."""
        row = checks.integer("q_block", q_block, 0, self.num_q_blocks - 1) + self._head(head) * self.num_q_blocks
        return self.indices[self.indptr[row] : self.indptr[row + 1]]

    def check(self, seqlen_q: int, seqlen_k: int, num_heads: int) -> None:
        """Raises ValueError when the schedule does not fit a problem of these lengths and this many query heads."""
        for name, mine, got in (
            ("seqlen_q", self.seqlen_q, checks.integer("seqlen_q", seqlen_q)),
            ("seqlen_k", self.seqlen_k, checks.integer("seqlen_k", seqlen_k)),
            ("num_heads", self.heads, checks.integer("num_heads", num_heads)),
        ):
            if mine is not None and mine != got:
                raise ValueError(f"schedule is for {name}={mine}, got {name}={got}; make one for this problem")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockSchedule):
            return NotImplemented
        return (
            self._scalars == other._scalars
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
        )

    def __hash__(self) -> int:
        return hash((self._scalars, self.indptr.tobytes(), self.indices.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies are made by the constructor, so that they are checked and read-only too.
        return functools.partial(BlockSchedule, **vars(self)), ()

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads={self.heads}"
        return (
            f"BlockSchedule(seqlens {self.seqlen_q} × {self.seqlen_k}, blocks {self.block_q} × {self.block_k}{heads}, "
            f"{self.num_blocks} blocks kept, density {self.density:.3g})"
        )

    @property
    def _scalars(self) -> tuple[int, int, int, int, int | None]:
        return self.seqlen_q, self.seqlen_k, self.block_q, self.block_k, self.heads

    def _head(self, head: int) -> int:
        head = checks.integer("head", head, 0, None if self.heads is None else self.heads - 1)
        return 0 if self.heads is None else head

    # ---- other forms --------------------------------------------------------------------------------------------

    def to_mask(self) -> torch.Tensor:
        """The elementwise mask, bool (seqlen_q, seqlen_k) or (heads, seqlen_q, seqlen_k); True is visible."""
        rows = (self.heads or 1) * self.num_q_blocks
        kept = np.zeros((rows, self.num_k_blocks), np.bool_)
        kept[np.repeat(np.arange(rows), np.diff(self.indptr)), self.indices] = True
        blocks = kept.reshape(self.heads or 1, self.num_q_blocks, self.num_k_blocks)
        mask = np.repeat(blocks, self.block_k, axis=2)[:, :, : self.seqlen_k]
        mask = np.repeat(mask, self.block_q, axis=1)[:, : self.seqlen_q]
        return torch.from_numpy(np.ascontiguousarray(mask if self.heads is not None else mask[0]))

    def to_runs(self) -> Int32s:
        """The runs form, int32 (num_q_blocks, 2) of first key block and count; an empty row is (0, 0). ValueError when
        a row is not one run of neighbours, or the schedule is per head."""
        if self.heads is not None:
            raise ValueError(f"the runs form is one pattern for all heads, this schedule has heads={self.heads}")
        counts = np.diff(self.indptr)
        runs = np.zeros((self.num_q_blocks, 2), np.int32)
        filled = counts > 0
        first, last = self.indices[self.indptr[:-1][filled]], self.indices[self.indptr[1:][filled] - 1]
        runs[filled, 0], runs[:, 1] = first, counts
        # Indices are strictly ascending, so a row is one run exactly if it spans as many blocks as it keeps.
        broken = last - first + 1 != counts[filled]
        if broken.any():
            row = int(np.flatnonzero(filled)[broken.argmax()])
            raise ValueError(f"the runs form needs one run of key blocks per row, row {row} has gaps: {self.row(row)}")
        return runs

    def save(self, path: AnyPath) -> None:
        """Writes the schedule to `path`, which is replaced only when the whole file is written.

        `.npz` holds everything. `.npy` is the runs form, int32 (num_q_blocks, 2): only for schedules that `to_runs()`
        takes. It does not hold lengths and block sizes: they have to be given to `load`."""
        target = files.check_path(path, ".npz", ".npy")
        if target.suffix == ".npy":
            runs = self.to_runs()
            with files.replacing(target) as file:
                np.save(file, runs, allow_pickle=False)
            return
        with files.replacing(target) as file:
            files.write_npz(file, self._scalars, self.indptr, self.indices)

    @classmethod
    def load(
        cls,
        path: AnyPath,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        block_q: int | None = None,
        block_k: int | None = None,
    ) -> BlockSchedule:
        """Reads what `save` wrote, or a foreign `.npy` of runs; nothing is ever unpickled.

        A `.npy` does not say its geometry: blocks are 16 × 16 and both lengths are `n_tiles * block_q` unless given
        here. A `.npz` does, and then what is given here must agree. A file that is damaged, hostile or something else
        raises ValueError naming it and what is wrong; a missing one FileNotFoundError."""
        source = files.check_path(path, ".npz", ".npy")
        given = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
        check_geometry(*(16 if value is None else value for value in given.values()))
        with files.reading(source) as (file, size):
            if source.suffix == ".npz":
                return BlockSchedule(**files.read_npz(file, size, given))
            return cls.from_runs(**files.read_runs(file, size, given))

    # ---- pictures -----------------------------------------------------------------------------------------------

    def show(self, head: int = 0, width: int = 64) -> str:
        """The pattern of one head as text, at most `width` characters for the keys: a character is one block, or the
        share of several blocks that is kept (' ' none, '█' all)."""
        head = self._head(head)
        columns = min(checks.integer("width", width, 1), self.num_k_blocks)
        # A character is about twice as tall as it is wide, so a picture that has to shrink shrinks to half the lines.
        fits = columns == self.num_k_blocks and self.num_q_blocks <= width
        lines = self.num_q_blocks if fits else min(self.num_q_blocks, max(1, width // 2))
        text = [self._facts(head)]
        if not lines or not columns:
            return "\n".join([*text, "(no blocks)"])
        share = self._cells(head, lines, columns)
        # ' ' means that nothing is kept and '█' that everything is; the three shades between them are thirds.
        shades = np.where(share >= 1, 4, np.ceil(share * 3)).astype(int)
        first_query = -(-np.arange(lines) * self.num_q_blocks // lines) * self.block_q
        margin = max(len("queries"), len(str(self.seqlen_q)))
        per = "1 block" if fits else f"{self.num_q_blocks / lines:.3g} × {self.num_k_blocks / columns:.3g} blocks"
        text.append(f"{'':{margin}}  keys 0 to {self.seqlen_k - 1} →   (a character is {per})")
        text.append(f"{'queries':>{margin}} ┌{'─' * columns}┐")
        for line, codes in enumerate(shades):
            label = first_query[line] if line % 8 == 0 else ""
            text.append(f"{label:>{margin}} │{''.join(SHADES[code] for code in codes)}│")
        text.append(f"{self.seqlen_q - 1:>{margin}} └{'─' * columns}┘")
        return "\n".join(text)

    def draw(self, path: AnyPath, head: int = 0) -> None:
        """Writes a PNG of one head's pattern to `path`, axes in tokens."""
        from matplotlib.figure import Figure  # slow to import, and only this call needs it

        head, target = self._head(head), files.check_path(path, ".png")
        figure = Figure(figsize=(7.5, 7.0), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(self._facts(head).replace("; ", "\n"), fontsize=10)
        axes.set_xlabel("key (token)")
        axes.set_ylabel("query (token)")
        lines, columns = min(self.num_q_blocks, 1024), min(self.num_k_blocks, 1024)
        if lines and columns:
            shrunk = (lines, columns) != (self.num_q_blocks, self.num_k_blocks)
            image = axes.imshow(
                self._cells(head, lines, columns),
                cmap="Blues",
                vmin=0.0,
                vmax=1.0,
                interpolation="nearest",
                extent=(0, self.num_k_blocks * self.block_k, self.num_q_blocks * self.block_q, 0),
                aspect="equal" if 0.25 <= self.seqlen_q / self.seqlen_k <= 4 else "auto",
            )
            axes.set_xlim(0, self.seqlen_k)
            axes.set_ylim(self.seqlen_q, 0)
            if shrunk:
                figure.colorbar(image, ax=axes, shrink=0.7, label="share of blocks kept")
            if max(lines, columns) <= 64:
                axes.vlines(np.arange(1, columns) * self.block_k, 0, self.seqlen_q, colors="0.8", linewidth=0.5)
                axes.hlines(np.arange(1, lines) * self.block_q, 0, self.seqlen_k, colors="0.8", linewidth=0.5)
        else:
            axes.text(0.5, 0.5, "no blocks", ha="center", va="center", transform=axes.transAxes)
        with files.replacing(target) as file:
            figure.savefig(file, format="png")

    def _facts(self, head: int) -> str:
        kept = int(self.indptr[(head + 1) * self.num_q_blocks] - self.indptr[head * self.num_q_blocks])
        total = self.num_q_blocks * self.num_k_blocks
        whose = "all heads" if self.heads is None else f"head {head} of {self.heads}"
        return (
            f"{self.seqlen_q} queries × {self.seqlen_k} keys in blocks of {self.block_q} × {self.block_k}; "
            f"{whose}: {kept} of {total} blocks kept ({kept / max(1, total):.1%})"
        )

    def _cells(self, head: int, lines: int, columns: int) -> npt.NDArray[np.float64]:
        """(lines, columns): the share of the blocks in each cell of a coarser grid that one head keeps."""
        pointers = self.indptr[head * self.num_q_blocks : (head + 1) * self.num_q_blocks + 1]
        line_of = np.arange(self.num_q_blocks) * lines // self.num_q_blocks
        column_of = np.arange(self.num_k_blocks) * columns // self.num_k_blocks
        cell = np.repeat(line_of * columns, np.diff(pointers))
        cell += column_of[self.indices[pointers[0] : pointers[-1]]]
        kept = np.bincount(cell, minlength=lines * columns).reshape(lines, columns)
        share: npt.NDArray[np.float64] = kept / np.outer(np.bincount(line_of), np.bincount(column_of))
        return share


def _schedule(grid: Grid, pattern: Pattern) -> BlockSchedule:
    geometry: dict[str, Any] = dict(zip(SCALARS, grid.scalars, strict=True))
    return BlockSchedule(**geometry, indptr=pattern.indptr, indices=pattern.indices)
