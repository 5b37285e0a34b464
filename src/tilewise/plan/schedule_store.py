"""What a BlockSchedule holds and can be asked: CSR arrays on the CPU, bits on a device, and what is read from them."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import numpy as np
import torch

from tilewise import checks
from tilewise.graphs import methods_outside
from tilewise.plan import schedule_bits, schedule_patterns
from tilewise.plan import schedule_device as device_side
from tilewise.plan.schedule_grid import SCALARS, Grid, Int32s, Pattern, as_int32, as_lengths, check_csr

CPU = torch.device("cpu")
Schedule = TypeVar("Schedule", bound="StoredSchedule")


@methods_outside
class StoredSchedule:
    """A BlockSchedule without its makers; schedule.py describes it."""

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int
    heads: int | None
    batch: int | None
    whole: torch.Tensor | None
    lengths_q: torch.Tensor | None
    lengths_k: torch.Tensor | None
    _grid: Grid
    _pattern: Pattern | None  # on the CPU
    _bits: torch.Tensor | None  # on a device; on the CPU once asked for
    _faults: torch.Tensor | None  # on a device: what was wrong with each row, as bits

    def __init__(
        self,
        *,
        seqlen_q: int,
        seqlen_k: int,
        block_q: int,
        block_k: int,
        heads: int | None = None,
        batch: int | None = None,
        indptr: Any,
        indices: Any,
        whole: torch.Tensor | None = None,
        lengths_q: Any = None,
        lengths_k: Any = None,
    ) -> None:
        grid = Grid(seqlen_q, seqlen_k, block_q, block_k, heads, batch)
        pattern = Pattern(as_int32("indptr", indptr), as_int32("indices", indices))
        check_csr(pattern.indptr, pattern.indices, grid)
        for array in pattern:
            array.setflags(write=False)
        self._set(grid, pattern, None, None, lengths_q, lengths_k)
        if whole is not None:
            checks.tensor("whole", whole, shape=grid.shape, dtypes=(torch.int32,), device=CPU)
            if (whole & ~self.bits).any():
                raise ValueError("whole must have no block that the schedule does not keep")
            vars(self)["whole"] = whole.clone()

    def _set(
        self,
        grid: Grid,
        pattern: Pattern | None,
        bits: torch.Tensor | None,
        whole: torch.Tensor | None,
        lengths_q: Any,
        lengths_k: Any,
        faults: torch.Tensor | None = None,
    ) -> None:
        device = CPU if bits is None else bits.device
        vars(self).update(
            zip(SCALARS, grid.scalars, strict=True),
            whole=whole,
            lengths_q=as_lengths("lengths_q", lengths_q, grid.batch, grid.seqlen_q, grid.block_q, device),
            lengths_k=as_lengths("lengths_k", lengths_k, grid.batch, grid.seqlen_k, grid.block_k, device),
            _grid=grid,
            _pattern=pattern,
            _bits=bits,
            _faults=faults,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a BlockSchedule does not change, got {name} = …; make another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a BlockSchedule does not change, got del {name}")

    # ---- where it is --------------------------------------------------------------------------------------------

    @classmethod
    def _of(
        cls: type[Schedule],
        grid: Grid,
        pattern: Pattern,
        whole: Pattern | None = None,
        lengths_q: Any = None,
        lengths_k: Any = None,
    ) -> Schedule:
        """On the CPU, from patterns."""
        geometry: dict[str, Any] = dict(zip(SCALARS, grid.scalars, strict=True))
        bits = None if whole is None else schedule_bits.bits_of(whole, grid)
        return cls(
            **geometry,
            indptr=pattern.indptr,
            indices=pattern.indices,
            whole=bits,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
        )

    @classmethod
    def _on_device(
        cls: type[Schedule],
        grid: Grid,
        bits: torch.Tensor,
        whole: torch.Tensor | None,
        lengths_q: Any,
        lengths_k: Any,
        faults: torch.Tensor | None = None,
    ) -> Schedule:
        """On the device of its bits, where nothing is looked at."""
        made = cls.__new__(cls)
        if lengths_q is None and lengths_k is None:
            vars(made).update(grid.alone, whole=whole, _bits=bits, _faults=faults)
        else:
            made._set(grid, None, bits, whole, lengths_q, lengths_k, faults)
        return made

    @property
    def device(self) -> torch.device:
        return CPU if self._bits is None else self._bits.device

    @property
    def bits(self) -> torch.Tensor:
        """The form that kernels read, int32 (batch or 1, heads or 1, num_q_blocks, words) on the schedule's device."""
        if self._bits is None:
            assert self._pattern is not None
            vars(self)["_bits"] = schedule_bits.bits_of(self._pattern, self._grid)
        assert self._bits is not None
        return self._bits

    @property
    def form(self) -> tuple[Any, ...]:
        """All that is known of it without a look at its values: what calls check, and kernels are made for."""
        q, k = self.lengths_q, self.lengths_k
        lengths = None if q is None else q.shape, None if k is None else k.shape
        return self._grid.scalars, self.whole is None, self.device, *lengths

    def cpu(self: Schedule) -> Schedule:
        """The same schedule on the CPU. From a device this waits for its values."""
        if self._pattern is not None:
            return self
        bits = self.bits.cpu()
        whole = None if self.whole is None else schedule_bits.pattern_of(self.whole.cpu() & bits, self._grid)
        lengths = [
            None if x is None else x.cpu().clamp(0, block)
            for x, block in ((self.lengths_q, self.block_q), (self.lengths_k, self.block_k))
        ]
        return self._of(self._grid, schedule_bits.pattern_of(bits, self._grid), whole, *lengths)

    def to(self: Schedule, device: torch.device | str | int) -> Schedule:
        """The same schedule on `device`; itself if it is there already."""
        where = torch.empty(0, device=device).device  # with its number
        if where == self.device:
            return self
        if where.type == "cpu":
            return self.cpu()
        if where.type != "cuda":
            raise ValueError(f"device must be the CPU or a CUDA device, got {where}")
        tensors = (self.bits, self.whole, self.lengths_q, self.lengths_k, self._faults)
        return self._on_device(self._grid, *(None if x is None else x.to(where) for x in tensors))  # type: ignore[arg-type]

    def cuda(self: Schedule) -> Schedule:
        """The same schedule on the current CUDA device."""
        return self.to("cuda")

    # ---- facts --------------------------------------------------------------------------------------------------

    @property
    def num_q_blocks(self) -> int:
        """Blocks along the queries, the ragged last one included."""
        return self._grid.q_blocks

    @property
    def num_k_blocks(self) -> int:
        """Blocks along the keys, the ragged last one included."""
        return self._grid.cols

    @property
    def indptr(self) -> Int32s:
        """int32 (rows + 1,), read-only: where each row begins in `indices`. Looks."""
        return self._looked_at().indptr

    @property
    def indices(self) -> Int32s:
        """int32 (num_blocks,), read-only: the key blocks of all rows. Looks."""
        return self._looked_at().indices

    @property
    def num_blocks(self) -> int:
        """Blocks kept, over all heads and sequences when the schedule is per head or sequence. Looks."""
        return len(self.indices)

    @property
    def density(self) -> float:
        """The fraction of all blocks that is kept; 0 when there are no blocks at all. Looks."""
        return self.num_blocks / max(1, self._grid.rows * self._grid.cols)

    @property
    def sparsity(self) -> float:
        """The fraction of all blocks that is dropped: `1 - density`. Looks."""
        return 1.0 - self.density

    def row(self, q_block: int, head: int = 0, batch: int = 0) -> Int32s:
        """The key blocks that block `q_block` of the queries meets, int32, ascending, a read-only view. A shared
        schedule gives the same row for every `head`, and for every sequence `batch`. Looks."""
        head, batch = self._place(head, batch)
        row = checks.integer("q_block", q_block, 0, self.num_q_blocks - 1)
        row += (batch * (self.heads or 1) + head) * self.num_q_blocks
        indptr, indices = self._looked_at()
        kept: Int32s = indices[indptr[row] : indptr[row + 1]]
        return kept

    @property
    def counts(self) -> torch.Tensor:
        """int32 (batch or 1, heads or 1, num_q_blocks) on the schedule's device: the blocks that each row keeps."""
        if self._pattern is None:
            return device_side.kernels().lists(self.bits, self.num_k_blocks, None)[0]
        return torch.from_numpy(np.diff(self._pattern.indptr).reshape(self._grid.shape[:3]))

    def lists(self, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(counts, indices) on the schedule's device, int32 (batch or 1, heads or 1, num_q_blocks) and (…, width): the
        key blocks that each row keeps, ascending, then zeros. width: num_k_blocks unless given; of a row that keeps
        more, the first `width` are listed and counted."""
        width = self.num_k_blocks if width is None else checks.integer("width", width, 0)
        if self._pattern is None:
            counts, indices = device_side.kernels().lists(self.bits, self.num_k_blocks, width)
            assert indices is not None
            return counts, indices
        all_counts = np.diff(self._pattern.indptr)
        counts_here = np.minimum(all_counts, width)
        place = np.arange(len(self._pattern.indices)) - np.repeat(self._pattern.indptr[:-1], all_counts)
        lists = np.zeros((self._grid.rows, width), np.int32)
        listed = place < width
        rows = np.repeat(np.arange(self._grid.rows), all_counts)
        lists[rows[listed], place[listed]] = self._pattern.indices[listed]
        shape = self._grid.shape[:3]
        return torch.from_numpy(counts_here.reshape(shape)), torch.from_numpy(lists.reshape(*shape, width))

    def check(
        self,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        num_heads: int | None = None,
        num_heads_kv: int | None = None,
        batch: int | None = None,
    ) -> None:
        """Raises ValueError when the schedule does not fit a problem of these lengths, query heads, KV heads and
        sequences; what is not given is not checked.

        Without arguments it looks: ValueError when lists or scores that the schedule was made from on a device, or
        lengths there, had values that the CPU refuses."""
        if (seqlen_q, seqlen_k, num_heads, num_heads_kv, batch) == (None,) * 5:
            self._check_values()
            return
        for name, mine, got in (("seqlen_q", self.seqlen_q, seqlen_q), ("seqlen_k", self.seqlen_k, seqlen_k)):
            if got is not None and mine != checks.integer(name, got):
                raise ValueError(f"schedule is for {name}={mine}, got {name}={got}; make one for this problem")
        given = {"num_heads": num_heads, "num_heads_kv": num_heads_kv}
        heads = {name: checks.integer(name, n) for name, n in given.items() if n is not None}
        if heads and self.heads not in (None, 1, *heads.values()):
            got_heads = " and ".join(f"{name}={n}" for name, n in heads.items())
            raise ValueError(f"schedule is for num_heads={self.heads}, got {got_heads}; make one for this problem")
        if batch is not None and self.batch not in (None, 1, checks.integer("batch", batch)):
            raise ValueError(f"schedule is for batch={self.batch}, got batch={batch}; make one for this problem")

    def _check_values(self) -> None:
        if self._pattern is not None:
            return
        if self._faults is not None:
            faults = self._faults.cpu().numpy().reshape(-1)
            if faults.any():
                row = int((faults != 0).argmax())
                kinds = [text for n, text in enumerate(device_side.FAULTS) if faults[row] >> n & 1]
                others = int((faults != 0).sum()) - 1
                more = f", and {others} more rows are faulty" if others else ""
                raise ValueError(f"schedule was made from {' and '.join(kinds)} in {self._grid.place(row)}{more}")
        for name, x, block in (
            ("lengths_q", self.lengths_q, self.block_q),
            ("lengths_k", self.lengths_k, self.block_k),
        ):
            if x is not None and x.numel() and not 0 <= int(x.min()) <= int(x.max()) <= block:
                raise ValueError(
                    f"{name} must be between 0 and the block size {block}, got {int(x.min())} to {int(x.max())}"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredSchedule):
            return NotImplemented
        if self is other or self._pattern is None or other._pattern is None:
            return self is other
        tensors = ((self.whole, other.whole), (self.lengths_q, other.lengths_q), (self.lengths_k, other.lengths_k))
        return (
            self._grid.scalars == other._grid.scalars
            and all(np.array_equal(x, y) for x, y in zip(self._pattern, other._pattern, strict=True))
            and all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in tensors)
        )

    def __hash__(self) -> int:
        if self._pattern is None:
            return object.__hash__(self)
        if "_hash" not in vars(self):
            lengths = (None if x is None else x.numpy().tobytes() for x in (self.lengths_q, self.lengths_k))
            vars(self)["_hash"] = hash((self._grid.scalars, *(x.tobytes() for x in self._pattern), *lengths))
        return int(vars(self)["_hash"])

    def _arrays(self) -> dict[str, Any]:
        """What it holds on the CPU, as arrays: indptr, indices, whole, lengths_q, lengths_k."""
        tensors = {"whole": self.whole, "lengths_q": self.lengths_q, "lengths_k": self.lengths_k}
        return self._looked_at()._asdict() | {n: None if x is None else x.numpy() for n, x in tensors.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pattern is None:
            tensors = (self.bits, self.whole, self.lengths_q, self.lengths_k, self._faults)
            return type(self)._on_device, (self._grid, *tensors)
        # Copies are made by the constructor, so that they are checked and read-only too.
        given: dict[str, Any] = dict(zip(SCALARS, self._grid.scalars, strict=True)) | self._pattern._asdict()
        given |= {"whole": self.whole, "lengths_q": self.lengths_q, "lengths_k": self.lengths_k}
        return functools.partial(type(self), **given), ()

    def __repr__(self) -> str:
        shared = "".join(f", {n}={x}" for n, x in (("batch", self.batch), ("heads", self.heads)) if x is not None)
        blocks = (
            f"BlockSchedule(seqlens {self.seqlen_q} × {self.seqlen_k}, blocks {self.block_q} × {self.block_k}{shared}"
        )
        if self._pattern is None:
            return f"{blocks}, on {self.device})"
        return f"{blocks}, {self.num_blocks} blocks kept, density {self.density:.3g})"

    def _looked_at(self) -> Pattern:
        """The CSR arrays, from a device if they are there."""
        pattern = self.cpu()._pattern
        assert pattern is not None
        return pattern

    def _place(self, head: int, batch: int) -> tuple[int, int]:
        """The head and the sequence whose pattern this is: 0 where it is shared."""
        head = checks.integer("head", head, 0, None if self.heads is None else self.heads - 1)
        batch = checks.integer("batch", batch, 0, None if self.batch is None else self.batch - 1)
        return 0 if self.heads is None else head, 0 if self.batch is None else batch

    # ---- other forms --------------------------------------------------------------------------------------------

    def transpose(self: Schedule) -> Schedule:
        """Keys as queries and queries as keys: for each block of keys the blocks of queries that meet it, on the same
        device."""
        grid = self._grid.transposed()
        if self._pattern is None:
            bits, whole = device_side.kernels().transpose(self.bits, self.whole, self.num_k_blocks)
            return self._on_device(grid, bits, whole, self.lengths_k, self.lengths_q)
        pattern, inner = schedule_patterns.transposed(self._grid, self._pattern), None
        if self.whole is not None:
            inner = schedule_patterns.transposed(self._grid, schedule_bits.pattern_of(self.whole, self._grid))
        return self._of(grid, pattern, inner, self.lengths_k, self.lengths_q)

    def to_mask(self) -> torch.Tensor:
        """The elementwise mask, bool (seqlen_q, seqlen_k), (heads, seqlen_q, seqlen_k) or, per sequence, (batch, heads
        or 1, seqlen_q, seqlen_k), on the CPU; True is visible. Looks."""
        here, grid = self.cpu(), self._grid
        assert here._pattern is not None
        blocks = schedule_bits.dense(here._pattern, grid.cols, slice(0, grid.rows)).reshape(*grid.shape[:3], grid.cols)
        mask = np.repeat(blocks, grid.block_k, axis=3)[..., : grid.seqlen_k]
        mask = np.repeat(mask, grid.block_q, axis=2)[:, :, : grid.seqlen_q]
        for axis, block, lengths in ((2, grid.block_q, here.lengths_q), (3, grid.block_k, here.lengths_k)):
            if lengths is not None:
                within = np.arange(block) < lengths.numpy()[..., None]  # (batch or 1, blocks, block)
                valid = within.reshape(len(within), -1)[:, : mask.shape[axis]]
                mask = mask & np.expand_dims(valid, (1, 5 - axis))
        if self.batch is None:
            mask = mask[0] if self.heads is not None else mask[0, 0]
        return torch.from_numpy(np.ascontiguousarray(mask))
