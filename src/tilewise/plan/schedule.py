"""Block-sparse patterns: which blocks of queries meet which blocks of keys.

A `BlockSchedule` is the tile list of a block-sparse problem with the dropped tiles left out. This file has the class;
schedule_grid.py has the geometry and the checks, schedule_patterns.py and schedule_select.py what makers compute on the
CPU, schedule_device.py who does it on a device, schedule_bits.py the form that kernels read, schedule_files.py files,
schedule_pictures.py pictures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilewise import checks
from tilewise.graphs import methods_outside
from tilewise.plan import schedule_bits, schedule_patterns, schedule_select
from tilewise.plan import schedule_device as device_side
from tilewise.plan import schedule_files as files
from tilewise.plan.pictures import picture_path
from tilewise.plan.schedule_files import AnyPath
from tilewise.plan.schedule_grid import (
    INT32_MAX,
    Grid,
    Int32s,
    as_array,
    check_alike,
    check_geometry,
    check_lists,
    check_tail,
    grid_of,
    leading,
)
from tilewise.plan.schedule_pictures import Picture
from tilewise.plan.schedule_store import CPU, StoredSchedule


@methods_outside
class BlockSchedule(StoredSchedule):
    """Which (block_q × block_k) blocks of a (seqlen_q × seqlen_k) score matrix are computed; the others are masked out.

    `heads=None` is one pattern for all heads, `heads=H` one for each of H heads, which are a call's query heads or its
    KV heads. `batch=None` is the same for all sequences, `batch=B` one for each. Block sizes are multiples of 16 from
    16 to 128; sequence lengths are free, the last block of a row or column may be ragged.

    On the CPU it is CSR with `rows = (batch or 1) * (heads or 1) * num_q_blocks`, row
    `(sequence * heads + head) * num_q_blocks + q_block`:
      indptr   int32 (rows + 1,): row r keeps `indices[indptr[r]:indptr[r + 1]]`
      indices  int32 (num_blocks,): key blocks, strictly ascending in each row, in [0, num_k_blocks)

    Any integer array or tensor is taken for these two; they are checked, copied and read-only. A row may be empty: its
    queries see no key. `causal` and `window` of the call that runs a schedule apply on top of it.

    On a CUDA device it is `bits`, and nothing is looked at when one is made there: no value is read by the host, and
    everything can be captured in a CUDA graph. What looks (row, to_mask, num_blocks, density, show, draw, save,
    indptr, indices, …) copies it to the CPU first, and waits. Schedules on a device are equal only to themselves.

      bits       int32 (batch or 1, heads or 1, num_q_blocks, words), words = ceil(num_k_blocks / 32): bit j % 32 of
                 word j // 32 says that key block j is kept; bits past num_k_blocks are 0
      whole      as bits, or None: a promise: kept blocks that a mask function given beside the schedule shows whole
      lengths_q  int32 (batch or 1, num_q_blocks), or None: valid rows of each block of queries; those past them see
                 nothing
      lengths_k  int32 (batch or 1, num_k_blocks), or None: valid rows of each block of keys; those past them are not
                 seen
    """

    # ---- makers: regular patterns, on the CPU ---------------------------------------------------------------------

    @classmethod
    def full(
        cls, seqlen_q: int, seqlen_k: int, *, block_q: int = 64, block_k: int = 64, heads: int | None = None
    ) -> BlockSchedule:
        """Every block: dense attention as a schedule."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k, heads)
        first = np.zeros(grid.rows, np.int64)
        return cls._of(grid, grid.from_ranges(first, first + grid.cols))

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
        return cls._of(grid, schedule_patterns.random(grid, sparsity, checks.integer("seed", seed, 0)))

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
        return cls._of(grid, grid.from_ranges(*grid.covering(first - limits[0], last + limits[1])))

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
        return cls._of(grid, schedule_patterns.strided(grid, stride, min(local, INT32_MAX) * grid.block_k))

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
        return cls._of(grid, schedule_patterns.covering_mask(grid, given))

    @classmethod
    def from_runs(
        cls, runs: torch.Tensor | npt.NDArray[Any], seqlen_q: int, seqlen_k: int, *, block_q: int, block_k: int
    ) -> BlockSchedule:
        """One run of key blocks for each block of queries: `runs` is integer (num_q_blocks, 2) of first key block and
        number of key blocks (0: the row is empty). Shared by all heads."""
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k)
        return cls._of(grid, schedule_patterns.from_runs(grid, runs))

    # ---- makers: any pattern, on the device of what it is made from -------------------------------------------------

    @classmethod
    def from_blocks(
        cls,
        blocks: torch.Tensor,
        *,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        whole: torch.Tensor | None = None,
        lengths_q: Any = None,
        lengths_k: Any = None,
    ) -> BlockSchedule:
        """The blocks where `blocks` is True: bool (num_q_blocks, num_k_blocks), (heads, …) or (batch, heads, …), where
        a leading 1 means shared.

        whole: like `blocks`; a promise that a mask function given beside the schedule shows these blocks whole.
        lengths_q, lengths_k: int32 or int64 (num_blocks,) or (batch, num_blocks), valid rows of each block."""
        alone = whole is None and lengths_q is None and lengths_k is None
        kind = _kind(blocks, seqlen_q, seqlen_k, block_q, block_k) if alone else None
        if kind in _checked:
            return cls._on_device(_checked[kind], device_side.kernels().pack(blocks, None)[0], None, None, None)
        batch, heads = leading("blocks", blocks, "num_q_blocks", "num_k_blocks")
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_k, heads, batch)
        check_tail("blocks", blocks, grid.q_blocks, grid.cols)
        if blocks.dtype not in (torch.bool, np.bool_):
            raise ValueError(f"blocks must be bool (True is kept), got {blocks.dtype}")
        if whole is not None:
            check_alike("whole", whole, "blocks", blocks)
        if _on_cuda({"blocks": blocks, "whole": whole}):
            bits, whole_bits = device_side.kernels().pack(blocks, whole)
            if kind is not None:
                _keep_checked(kind, grid)
            return cls._on_device(grid, bits, whole_bits, lengths_q, lengths_k)
        pattern = schedule_patterns.from_blocks(grid, as_array("blocks", blocks))
        inner = None if whole is None else schedule_patterns.from_blocks(grid, as_array("whole", whole & blocks))
        return cls._of(grid, pattern, inner, lengths_q, lengths_k)

    @classmethod
    def from_lists(
        cls,
        counts: torch.Tensor,
        indices: torch.Tensor,
        *,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        full_counts: torch.Tensor | None = None,
        full_indices: torch.Tensor | None = None,
        lengths_q: Any = None,
        lengths_k: Any = None,
    ) -> BlockSchedule:
        """For each block of queries, the first `counts` of its `indices`: int32 or int64 (num_q_blocks,) and
        (num_q_blocks, width), or both with (heads, …) or (batch, heads, …) in front, where a leading 1 means shared.

        full_counts, full_indices: the same for the blocks in which a mask function need not be evaluated, as torch's
        BlockMask has them; they are kept too, and become `whole`. lengths_q, lengths_k: as `from_blocks` has them.

        On the CPU a list must be strictly ascending, and no block may be in both. On a device entries out of range are
        left out, those repeated count once, in any order; `check()` tells of them."""
        batch, heads = leading("counts", counts, "num_q_blocks")
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_k, heads, batch)
        check_tail("counts", counts, grid.q_blocks)
        lists = {"counts": counts, "indices": indices, "full_counts": full_counts, "full_indices": full_indices}
        check_lists(lists)
        if _on_cuda(lists):
            made = device_side.kernels().scatter(counts, indices, full_counts, full_indices, grid.cols)
            bits, whole, faults = made
            return cls._on_device(grid, bits, whole, lengths_q, lengths_k, faults)
        pattern, inner = schedule_patterns.from_lists(grid, counts, indices), None
        if full_counts is not None:
            inner = schedule_patterns.from_lists(grid, full_counts, full_indices, "full_")
            pattern = schedule_patterns.union(grid, pattern, inner)
        return cls._of(grid, pattern, inner, lengths_q, lengths_k)

    @classmethod
    def from_scores(
        cls,
        scores: torch.Tensor,
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        causal: bool = False,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        lengths_q: Any = None,
        lengths_k: Any = None,
    ) -> BlockSchedule:
        """The blocks with the largest scores in each row: `scores` is float32, float16 or bfloat16 (num_q_blocks,
        num_k_blocks), (heads, …) or (batch, heads, …), where a leading 1 means shared. Exactly one of:

        top_k: the `top_k` largest, of equal ones the first.
        threshold: in (0, 1]: as few as possible, the largest first, whose sum reaches this share of the row's sum. For
        it scores must be ≥ 0, as a softmax of pooled scores is; the CPU refuses others, a device takes them for 0 and
        `check()` tells. Shares count in steps of 2^-24.

        NaN and −inf are never kept. causal: only the blocks that causal attention (bottom-right) sees are considered,
        and those on the diagonal are kept besides, whatever their score. lengths_q, lengths_k: as `from_blocks` has
        them. The same scores give the same schedule, on a device and on the CPU."""
        batch, heads = leading("scores", scores, "num_q_blocks", "num_k_blocks")
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_k, heads, batch)
        check_tail("scores", scores, grid.q_blocks, grid.cols)
        top_k, threshold = schedule_select.check_asked(scores, top_k, threshold)
        checks.flag("causal", causal)
        if _on_cuda({"scores": scores}):
            diagonal = (grid.seqlen_q, grid.seqlen_k, grid.block_q, grid.block_k) if causal else None
            bits, faults = device_side.kernels().select(scores, top_k, threshold, diagonal)
            return cls._on_device(grid, bits, None, lengths_q, lengths_k, faults)
        pattern = schedule_select.from_scores(grid, scores, top_k, threshold, causal)
        return cls._of(grid, pattern, None, lengths_q, lengths_k)

    @classmethod
    def from_bits(
        cls,
        bits: torch.Tensor,
        *,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        whole: torch.Tensor | None = None,
        lengths_q: Any = None,
        lengths_k: Any = None,
    ) -> BlockSchedule:
        """The form that kernels read and write: `bits` and `whole` as the class describes them, contiguous. On a device
        they are taken as they are, without a copy, and a bit past the last key block is ignored."""
        checks.tensor("bits", bits, shape=("batch", "heads", "num_q_blocks", "words"), dtypes=(torch.int32,))
        batch, heads = leading("bits", bits, "num_q_blocks", "words")
        grid = grid_of(seqlen_q, seqlen_k, block_q, block_k, heads, batch)
        check_tail("bits", bits, *grid.shape[2:])
        if whole is not None:
            check_alike("whole", whole, "bits", bits)
            whole = whole.contiguous()
        if _on_cuda({"bits": bits, "whole": whole}):
            return cls._on_device(grid, bits.contiguous(), whole, lengths_q, lengths_k)
        pattern = schedule_bits.pattern_of(bits, grid)
        if not torch.equal(schedule_bits.bits_of(pattern, grid), bits):
            raise ValueError(f"bits must be 0 past the last key block, num_k_blocks={grid.cols}")
        inner = None if whole is None else schedule_bits.pattern_of(whole & bits, grid)
        return cls._of(grid, pattern, inner, lengths_q, lengths_k)

    # ---- files and pictures ---------------------------------------------------------------------------------------

    def to_runs(self) -> Int32s:
        """The runs form, int32 (num_q_blocks, 2) of first key block and count; an empty row is (0, 0). Looks.
        ValueError when a row is not one run of neighbours, or the schedule is per head or sequence, or has more than a
        pattern."""
        if self.heads is not None:
            raise ValueError(f"the runs form is one pattern for all heads, this schedule has heads={self.heads}")
        for name in ("batch", "whole", "lengths_q", "lengths_k"):
            if getattr(self, name) is not None:
                raise ValueError(f"the runs form is a pattern alone, this schedule has {name}")
        indptr, indices = self._looked_at()
        counts = np.diff(indptr)
        runs = np.zeros((self.num_q_blocks, 2), np.int32)
        filled = counts > 0
        first, last = indices[indptr[:-1][filled]], indices[indptr[1:][filled] - 1]
        runs[filled, 0], runs[:, 1] = first, counts
        # Indices are strictly ascending, so a row is one run exactly if it spans as many blocks as it keeps.
        broken = last - first + 1 != counts[filled]
        if broken.any():
            row = int(np.flatnonzero(filled)[broken.argmax()])
            raise ValueError(f"the runs form needs one run of key blocks per row, row {row} has gaps: {self.row(row)}")
        return runs

    def save(self, path: AnyPath) -> None:
        """Writes the schedule to `path`, which is replaced only when the whole file is written. Looks.

        `.npz` holds everything. `.npy` is the runs form, int32 (num_q_blocks, 2): only for schedules that `to_runs()`
        takes. Lengths and block sizes stand in a comment of its header, which numpy passes over and `load` reads."""
        target = files.check_path(path, ".npz", ".npy")
        if target.suffix == ".npy":
            runs = self.to_runs()
            with files.replacing(target) as file:
                files.write_runs(file, runs, self._grid.scalars)
            return
        here = self.cpu()
        with files.replacing(target) as file:
            files.write_npz(file, self._grid.scalars, here._arrays())

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

        What is given here must agree with what the file says. A `.npy` of another's does not say its geometry: blocks
        are 16 × 16 and both lengths are `n_tiles * block_q` unless given here. A file that is damaged, hostile or
        something else raises ValueError naming it and what is wrong; a missing one FileNotFoundError."""
        source = files.check_path(path, ".npz", ".npy")
        given = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "block_q": block_q, "block_k": block_k}
        check_geometry(*(16 if value is None else value for value in given.values()))
        with files.reading(source) as (file, size):
            if source.suffix == ".npz":
                return cls(**files.read_npz(file, size, given))
            return cls.from_runs(**files.read_runs(file, size, given))

    def show(self, head: int = 0, width: int = 64, batch: int = 0) -> str:
        """The pattern of one head as text, at most `width` characters for the keys: a character is one block, or the
        share of several blocks that is kept (' ' none, '█' all). With a `whole` plane the others count half. Looks."""
        width = checks.integer("width", width, 1)
        return self._picture(head, batch).text(width)

    def draw(self, path: AnyPath, head: int = 0, batch: int = 0) -> None:
        """Writes a picture of one head's pattern to `path`, a PNG or an SVG by its ending, axes in tokens; with a
        `whole` plane, the blocks that are seen in part are lighter. Looks."""
        target = picture_path(path)
        self._picture(head, batch).draw(target)

    def _picture(self, head: int, batch: int) -> Picture:
        whole = None if self.whole is None else schedule_bits.pattern_of(self.whole.cpu() & self.cpu().bits, self._grid)
        return Picture(self._grid, self._looked_at(), whole, *self._place(head, batch))


_checked: dict[Any, Grid] = {}  # what from_blocks was given before, on a device


def _kind(x: Any, *sizes: Any) -> Any:
    """All that is checked of a tensor and these sizes; None if they are not plain."""
    if type(x) is not torch.Tensor or any(type(n) is not int for n in sizes):
        return None
    return x.shape, x.dtype, x.device, sizes


def _keep_checked(kind: Any, grid: Grid) -> None:
    if len(_checked) >= 256:
        _checked.clear()
    _checked[kind] = grid


def _on_cuda(given: dict[str, Any]) -> bool:
    """Are these, by name, on a CUDA device? Raises ValueError unless all, but for None, are where the first one is."""
    where = {name: x.device if isinstance(x, torch.Tensor) else CPU for name, x in given.items() if x is not None}
    first, device = next(iter(where.items()))
    for name, at in where.items():
        if at != device:
            raise ValueError(f"{name} must be on {device} like {first}, got {at}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{first} must be on the CPU or a CUDA device, got {device}")
    return device.type == "cuda"
