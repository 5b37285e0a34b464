"""The rows that are decoded together: their buffers, and on a card the graphs that replay their step.

On a card a batch has one of a few sizes, with idle rows where fewer sequences run, and buffers, places and plans that
stay where they are. Its first step runs call by call, which also compiles what is missing; from the second on, one
graph of the whole forward pass and the choice of the next tokens is replayed, whoever comes and goes. Between replays
the host only puts tokens, places and lengths where the graph looks for them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..kvcache import PrefixCache
from ..kvcache.slots import upload
from .rows import Rows
from .sampling import Kind, choose
from .steps import DecodeStep

if TYPE_CHECKING:
    from .hf import ServedModel

LARGEST = 1024  # rows of a standing plan; more are decoded call by call
LONGEST = 2**24  # tokens of a sequence in one
SHRINK_AFTER = 16  # steps in which fewer rows would do before a smaller batch takes over: its plan is another one
_capturing = threading.Lock()  # one graph at a time, also where several engines have a thread each


class Replay(Protocol):
    """A captured forward pass."""

    def replay(self) -> None: ...


class DecodeBatch:
    """Decodes the next token of up to `size` rows; of any number, call by call, if that is None.

    max_length: the most tokens that a sequence can have. pool: memory that graphs of other sizes use, too.
    captures: how many graphs were captured. away: seconds in forward passes and waiting for tokens.
    """

    def __init__(
        self,
        model: ServedModel,
        prefix: PrefixCache,
        size: int | None,
        *,
        max_length: int,
        backend: str,
        pool: Any = None,
    ) -> None:
        self.step = DecodeStep(prefix, num_heads=model.shape.heads, rows=size, max_length=max_length, backend=backend)
        self.size, self.captures, self.away = size, 0, 0.0
        self._model, self._device, self._pool = model, prefix.cache.device, pool
        self._allocate(size or 0)
        self._graphs: dict[Kind, Replay] = {}
        self._have_run: set[Kind] = set()  # call by call

    def renew(self, rows: Rows) -> None:
        """Reserve a place for the latest token of each row. Raises OutOfPages with nothing changed."""
        self.step.renew(rows.seqs, rows.latest[: len(rows)])

    def run(self, rows: Rows) -> list[int]:
        """The next tokens; those before them, for which renew() has made room, enter the cache by this."""
        count, kind = len(rows), rows.kind
        if self.size is None and count != len(self._next):
            self._allocate(count)
        values = np.zeros((1 if kind == Kind.GREEDY else 6, len(self._next)), np.int64)
        values[0, :count] = rows.latest[:count]
        if kind != Kind.GREEDY:
            values[1, :count] = rows.uniforms().view(np.int64)
            values[2:, :count] = rows.params[:, :count].view(np.int64)
        upload(values, self._device, into=self._given[: len(values)])
        self._run(kind)
        started = time.perf_counter()
        chosen: list[int] = self._next.tolist()
        self.away += time.perf_counter() - started
        return chosen[:count]

    def prepare(self) -> None:
        """Compile and capture what a step of greedy rows takes, without one that runs."""
        self.step.renew([], [])
        while Kind.GREEDY not in self._graphs:
            self._run(Kind.GREEDY)

    def _allocate(self, rows: int) -> None:
        """Tokens, numbers to draw with and parameters (6, rows), and the next tokens (rows,)."""
        self._given = torch.zeros((6, rows), dtype=torch.int64, device=self._device)
        self._next = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._tokens, self._numbers = self._given[0], self._given[1:].view(torch.float64)

    def _run(self, kind: Kind) -> None:
        """Fill `_next`, from a graph if there is one or it is time for one."""
        graph = self._graphs.get(kind)
        if graph is None and self.size is not None and kind in self._have_run:
            graph = self._graphs[kind] = self.capture(kind)
            self.captures += 1
        if graph is None:
            started = time.perf_counter()
            self._forward(kind)
            self.away += time.perf_counter() - started
            self._have_run.add(kind)
        else:
            graph.replay()
            self.step.cache.mark_written(self.step.slots)

    def capture(self, kind: Kind) -> Replay:
        """The forward pass as a CUDA graph, which has not run yet."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on with theirs meanwhile.
            with _capturing, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._forward(kind)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self._model.model).__name__
            raise RuntimeError(
                f"the forward pass of {name} cannot be captured in a CUDA graph; pass cuda_graphs=False"
            ) from error
        return graph

    def _forward(self, kind: Kind) -> None:
        logits = self._model.forward(self._tokens, self.step.positions, self.step)
        self._next.copy_(choose(kind, logits, self._numbers[0], self._numbers[1:]))


class Batches:
    """Batches of a few sizes, each made when it is needed first, and kept; `current` is the one of this step.

    static: whether they have sizes, for graphs; if not, there is one, of any size.
    """

    def __init__(self, model: ServedModel, prefix: PrefixCache, max_rows: int, *, static: bool, backend: str) -> None:
        self._model, self._prefix, self._backend = model, prefix, backend
        self.sizes = _sizes(min(max_rows, LARGEST)) if static else []
        self._made: dict[int | None, DecodeBatch] = {}
        self._pool = torch.cuda.graph_pool_handle() if static and prefix.cache.device.type == "cuda" else None
        self._smaller = 0  # steps in a row for which a smaller batch would do
        self.current = self._batch(None) if not static else self._batch(self.sizes[0])

    @property
    def captures(self) -> int:
        return sum(batch.captures for batch in self._made.values())

    @property
    def away(self) -> float:
        return sum(batch.away for batch in self._made.values())

    def renew(self, rows: Rows) -> None:
        """Choose the batch of this step, and begin it. Raises OutOfPages with nothing changed."""
        least, now = next((size for size in self.sizes if size >= len(rows)), None), self.current.size
        self._smaller = self._smaller + 1 if least is not None and now is not None and least < now else 0
        if not 0 < self._smaller < SHRINK_AFTER:
            self.current, self._smaller = self._batch(least), 0
        self.current.renew(rows)

    def prepare(self) -> None:
        """Capture the graphs of all sizes, largest first, whose memory the others then use, too."""
        for size in reversed(self.sizes):
            self._batch(size).prepare()

    def _batch(self, size: int | None) -> DecodeBatch:
        batch = self._made.get(size)
        if batch is None:
            cache = self._prefix.cache
            longest = min(self._model.shape.positions, cache.num_pages * cache.page_size, LONGEST)
            batch = self._made[size] = DecodeBatch(
                self._model, self._prefix, size, max_length=longest, backend=self._backend, pool=self._pool
            )
        return batch


def _sizes(most: int) -> list[int]:
    """1, 2, 4, … and the most."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]
