"""Forward passes: what a step computes, their buffers, and on a card the graphs that replay them.

On a card a pass has one of a few sizes, with idle rows where fewer are needed, and buffers, places and plans that stay
where they are. Its first run goes call by call, which also compiles what is missing; from the second on, one graph of
the whole forward pass and the choice of the next tokens is replayed, whoever comes and goes. Between replays the host
only puts tokens, places and lengths where the graph looks for them. Next tokens stay on the card, where the next pass
finds them, so that the host can prepare it before it knows them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .. import checks
from ..kvcache import PrefixCache, Slots
from ..kvcache.slots import upload
from .indexed import IndexedRows, IndexedStep
from .requests import Tokens
from .rows import Flight
from .sampling import Kind, choose
from .steps import Decodes, DecodeStep, MixedStep, StandingRows

if TYPE_CHECKING:
    from .hf import ModelShape, ServedModel

LARGEST = 1024  # rows of a standing plan; steps that decode more go call by call
LONGEST = 2**24  # tokens of a sequence in one
MOST_TOKENS = 2048  # of a graph with prompts: in a larger pass the card is as slow as the host
LEAST_TOKENS = 16
QUARTERED = 128  # tokens from which on such graphs have sizes a quarter apart
SHRINK_AFTER = 16  # steps in which fewer rows would do before a smaller batch takes over: its plan is another one
_capturing = threading.Lock()  # one graph at a time, also where several engines have a thread each

Longs = npt.NDArray[np.int64]


class Replay(Protocol):
    """A captured forward pass."""

    def replay(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Work:
    """What a step computes: the next tokens of `seqs`, and those after the last tokens of some prompts.

    slots: of the newest tokens of `seqs`; None if there are none. sources: (len(seqs),) int64, where these stand among
    the tokens that were chosen last. prompts: chunks, each a sequence and the tokens (c,) that it is fed, whose places
    are `parts`, in their order. wanted: of each sample that begins, the number of the prompt that it follows.
    numbers: (5, choices) float64, what draws the next tokens of `seqs` and then of `wanted`: see sampling.py.
    """

    seqs: list[int] = field(default_factory=list)
    slots: Slots | None = None
    sources: Longs = field(default_factory=lambda: np.zeros(0, np.int64))
    prompts: list[tuple[int, Tokens]] = field(default_factory=list)
    parts: list[Slots] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    kind: Kind = Kind.GREEDY
    numbers: npt.NDArray[np.float64] | None = None

    @property
    def choices(self) -> int:
        return len(self.seqs) + len(self.wanted)

    @property
    def singles(self) -> int:
        """Prompts of which one token is left: to attention they are what decoded ones are."""
        return sum(len(fed) == 1 for _, fed in self.prompts)

    @property
    def tokens(self) -> int:
        return len(self.seqs) + sum(len(fed) for _, fed in self.prompts)

    def all_slots(self) -> list[Slots]:
        return self.parts if self.slots is None else [self.slots, *self.parts]


class Chosen:
    """Tokens that a pass has chosen, on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tokens.clone()

    def read(self) -> list[int]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._host.tolist()
        return found


class InFlight(NamedTuple):
    """A pass of which the host does not know what it chose. work: what it computes. untold: whether it was fed tokens
    that the host did not know then. started: when, of time.perf_counter(), the host began with it."""

    flight: Flight
    work: Work
    untold: bool
    chosen: Chosen
    started: float


def fed_tokens(sources: torch.Tensor, given: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(T,) tokens: the one that was chosen at `sources` (T,), or where that is -1 the given one, (T,)."""
    return torch.where(sources < 0, given, chosen[sources.clamp_min(0)])


class Pass:
    """The forward pass of `step.rows` rows: decodes first, then chunks of prompts, then idle ones.

    chosen: (most rows,) int64, where the tokens chosen last stand, of this and of other passes. pool: memory that other
    graphs use, too. captures: how many graphs were captured.
    """

    def __init__(self, model: ServedModel, step: StandingRows, chosen: torch.Tensor, pool: Any = None) -> None:
        self.step, self.chosen, self.choices, self.captures = step, chosen, min(step.rows, len(chosen)), 0
        self._model, self._pool = model, pool
        rows, choices = step.rows, self.choices
        self._given = torch.zeros(3 * rows + 6 * choices, dtype=torch.int64, device=chosen.device)
        self.sources, self.tokens, self.positions = self._given[: 3 * rows].view(3, rows).unbind()
        self.keep = self._given[3 * rows : 3 * rows + choices]
        self.numbers = self._given[3 * rows + choices :].view(torch.float64).view(5, choices)
        self._graphs: dict[Kind, Replay] = {}
        self._have_run: set[Kind] = set()  # call by call

    def run(self, work: Work) -> bool:
        """Fill `chosen`; whether a graph did it."""
        self._fill(work)
        return self._run(work.kind)

    def prepare(self, kind: Kind) -> None:
        """Compile and capture what such choices take, without a sequence."""
        self._fill(Work(kind=kind, numbers=np.zeros((5, 0))))
        while kind not in self._graphs:
            self._run(kind)

    def _fill(self, work: Work) -> None:
        """Put a step where the graph looks for it."""
        rows, count = self.step.rows, len(work.seqs)
        places = [] if work.slots is None else [(work.slots.host_positions, work.slots.host_index)]
        # Prompts with one token left stand with the decodes.
        order = sorted(range(len(work.prompts)), key=lambda n: len(work.prompts[n][1]) > 1)
        if order:
            cuts = np.cumsum([len(fed) for _, fed in work.prompts])[:-1]
            both = (np.concatenate([getattr(x, name) for x in work.parts]) for name in ("host_positions", "host_index"))
            split = [np.split(x, cuts) for x in both]
            places += [(split[0][n], split[1][n]) for n in order]
        nothing = np.zeros(0, np.int64)
        positions, index = (np.concatenate([nothing, *x]) for x in zip(*places, strict=True)) if places else (
            nothing,
            nothing,
        )  # fmt: skip
        prompts = [work.prompts[n] for n in order]
        singles = work.singles
        values = np.zeros(3 * rows + (1 if work.kind == Kind.GREEDY else 6) * self.choices, np.int64)
        sources, tokens, at = values[: 3 * rows].reshape(3, rows)
        sources[:] = -1
        sources[:count] = work.sources
        np.concatenate([nothing, *(fed for _, fed in prompts)], out=tokens[count : work.tokens])
        at[: work.tokens] = positions
        keep = values[3 * rows :][: self.choices]
        keep[:count] = np.arange(count)
        if work.wanted:
            last = np.zeros(len(order), np.int64)
            last[order] = count + np.cumsum([len(fed) for _, fed in prompts]) - 1
            keep[count : work.choices] = last[work.wanted]
        if work.kind != Kind.GREEDY:
            assert work.numbers is not None
            numbers = values[3 * rows + self.choices :].view(np.float64).reshape(5, self.choices)
            numbers[1] = 1.0  # a temperature, of rows that nobody looks at
            numbers[:, : work.choices] = work.numbers
        upload(values, self.chosen.device, into=self._given[: len(values)])
        seqs = [*work.seqs, *(seq for seq, _ in prompts[:singles])]
        self.step.renew(seqs, [(seq, len(fed)) for seq, fed in prompts[singles:]], positions, index)

    def _run(self, kind: Kind) -> bool:
        graph = self._graphs.get(kind)
        if graph is None and kind in self._have_run:
            again = self.step.binds_by_thread  # this time, too, it goes call by call
            if again:
                self.forward(kind)
            graph = self._graphs[kind] = self.capture(kind)
            self.captures += 1
            if again:
                return False
        if graph is None:
            self.forward(kind)
            self._have_run.add(kind)
            return False
        graph.replay()
        self.step.cache.mark_written(self.step.slots)
        return True

    def capture(self, kind: Kind) -> Replay:
        """The forward pass as a CUDA graph, which has not run yet."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on with theirs meanwhile.
            with _capturing, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.forward(kind)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            name = type(self._model.model).__name__
            raise RuntimeError(
                f"the forward pass of {name} cannot be captured in a CUDA graph; pass cuda_graphs=False"
            ) from error
        return graph

    def forward(self, kind: Kind) -> None:
        """All that a graph holds: it reads what stands in memory, and nothing of the host."""
        tokens = fed_tokens(self.sources, self.tokens, self.chosen)
        logits = self._model.forward(tokens, self.positions, self.step, self.keep)
        self.chosen[: self.choices].copy_(choose(kind, logits, self.numbers[0], self.numbers[1:]))


class Calls:
    """Forward passes of any number of rows, call by call. chosen: as of Pass."""

    def __init__(self, model: ServedModel, prefix: PrefixCache, chosen: torch.Tensor, backend: str) -> None:
        self._model, self._prefix, self._backend, self.chosen = model, prefix, backend, chosen
        self._decode = DecodeStep(prefix, num_heads=model.shape.heads, backend=backend)
        self._by_torch: set[type] = set()  # of IndexedStep

    def run(self, work: Work) -> None:
        """Fill `chosen`."""
        device, decode, kind = self.chosen.device, None, work.kind
        if work.slots is not None:
            decode = self._decode
            if self._model.shape.indexers is not None:
                decode.plans.clear()  # who reads lists asks for none
            decode.take(work.seqs, work.slots)
        step = self._step(work.parts, decode)
        count, cut = len(work.seqs), sum(step.counts)
        values = np.zeros((3, cut + count), np.int64)
        values[0, :cut], values[0, cut:] = -1, work.sources
        if cut:
            np.concatenate([fed for _, fed in work.prompts], out=values[1, :cut])
        values[2] = step.host_positions
        keep = np.concatenate([np.arange(cut, cut + count), step.last_rows[work.wanted]])
        given = upload(np.concatenate([values.ravel(), keep]), device)
        sources, tokens, positions = given[: values.size].view(3, -1).unbind()
        tokens = fed_tokens(sources, tokens, self.chosen)
        used: Any = decode if decode is not None and not work.parts and type(step) is MixedStep else step
        logits = self._model.forward(tokens, positions, used, given[values.size :])
        if work.parts:
            check_layers(step.layers, self._model.shape.layers)
        if not work.choices:
            return
        numbers = None
        if kind != Kind.GREEDY:
            assert work.numbers is not None
            numbers = upload(work.numbers.view(np.int64), device).view(torch.float64)
        drawn, params = (None, torch.empty(4, 0)) if numbers is None else (numbers[0], numbers[1:])
        self.chosen[: work.choices].copy_(choose(kind, logits, drawn, params))

    def _step(self, parts: Sequence[Slots], decode: DecodeStep | None) -> MixedStep:
        shape = self._model.shape
        if shape.indexers is None:
            return MixedStep(self._prefix, parts, decode, num_heads=shape.heads, backend=self._backend)
        return IndexedStep(
            self._prefix, parts, decode, num_heads=shape.heads, indexers=shape.indexers, by_torch=self._by_torch,
            backend=self._backend,
        )  # fmt: skip


def with_graphs(shape: ModelShape, cuda_graphs: bool | None) -> bool:
    """Whether passes are replayed from graphs: where that can be, if it is asked for, or None. With an indexer None
    means call by call, until its graphs were seen on a card."""
    wanted = shape.indexers is None if cuda_graphs is None else checks.flag("cuda_graphs", cuda_graphs)
    return wanted and shape.device.type == "cuda"


def check_layers(came: set[int], layers: int) -> None:
    """NotImplementedError if a layer called no attention."""
    missing = sorted(set(range(layers)) - came)
    if missing:
        raise NotImplementedError(
            f"layers {missing} of the model called no attention; models of attention layers alone are served; "
            "use model.generate"
        )


class Batches:
    """Passes of a few sizes, each made when it is needed first, and kept.

    max_rows: how many are decoded together. most_tokens: of a step in all. static: whether passes have sizes, for
    graphs; if not, all go call by call. away: seconds in passes that went call by call.
    """

    def __init__(
        self,
        model: ServedModel,
        prefix: PrefixCache,
        max_rows: int,
        most_tokens: int,
        *,
        static: bool,
        backend: str,
    ) -> None:
        self._model, self._prefix, self._backend = model, prefix, backend
        cache = prefix.cache
        with torch.inference_mode(False):
            self.chosen = torch.zeros(max_rows, dtype=torch.int64, device=cache.device)
        self.max_rows, self.away = min(max_rows, LARGEST), 0.0
        self.sizes = _sizes(self.max_rows) if static else []
        # Pages of another dtype than the model's are converted for prompts, step by step; and blocks of positions that
        # do not begin with a page are masked. How many keys an indexer scores for prompts changes.
        mixed = static and cache.format.dtype == model.shape.dtype and not model.shape.chunk % cache.page_size
        mixed = mixed and model.shape.indexers is None
        self.mixed_sizes = mixed_sizes(min(most_tokens, MOST_TOKENS)) if mixed else []
        self._passes: dict[tuple[int, bool], Pass] = {}
        self._decodes: dict[int, Decodes] = {}
        self._calls = Calls(model, prefix, self.chosen, backend)
        self._pool = torch.cuda.graph_pool_handle() if static and cache.device.type == "cuda" else None
        self._now, self._smaller = 0, 0  # the size for decodes, and steps in a row for which a smaller one would do

    @property
    def captures(self) -> int:
        return sum(one.captures for one in self._passes.values())

    def run(self, work: Work) -> Chosen:
        """Compute a step, on the current stream; what it chose."""
        chosen = self._find(work)
        started = time.perf_counter()
        if chosen is None:
            self._calls.run(work)
            self.away += time.perf_counter() - started
        elif not chosen.run(work):
            check_layers(chosen.step.layers, self._model.shape.layers)
            self.away += time.perf_counter() - started
        for slots in work.all_slots():
            if not slots.complete:
                self._prefix.cache.mark_written(slots)
        return Chosen(self.chosen[: work.choices])

    def prepare(self, kinds: Sequence[Kind]) -> None:
        """Capture the graphs of all sizes, largest first, whose memory the others then use, too."""
        passes = [
            *((size, True) for size in reversed(self.mixed_sizes)),
            *((size, False) for size in reversed(self.sizes)),
        ]
        for size, mixed in passes:
            for kind in kinds:
                self._pass(size, mixed=mixed).prepare(kind)

    def _find(self, work: Work) -> Pass | None:
        """The pass that a step fits into; None: it goes call by call."""
        singles = work.singles
        decodes = len(work.seqs) + singles
        if max(decodes, work.choices) > self.max_rows:
            return None
        if len(work.prompts) > singles:
            needed = max(work.tokens, work.choices)
            size = next((size for size in self.mixed_sizes if size >= needed), None)
            return None if size is None else self._pass(size, mixed=True)
        least = next((size for size in self.sizes if size >= max(decodes, work.choices)), None)
        if least is None:
            return None
        self._smaller = self._smaller + 1 if least < self._now else 0
        if not 0 < self._smaller < SHRINK_AFTER:
            self._now, self._smaller = least, 0
        return self._pass(self._now, mixed=False)

    def _pass(self, size: int, *, mixed: bool) -> Pass:
        found = self._passes.get((size, mixed))
        if found is None:
            rows = min(size, self.max_rows)
            chunks = min(max(1, size // 2), self.max_rows) if mixed else 0  # each of them has two tokens at least
            decodes, indexers = self._decodes_of(rows), self._model.shape.indexers
            step = (
                StandingRows(decodes, size, chunks, backend=self._backend)
                if indexers is None
                else IndexedRows(decodes, size, indexers=indexers, backend=self._backend)
            )
            found = self._passes[size, mixed] = Pass(self._model, step, self.chosen, self._pool)
        return found

    def _decodes_of(self, rows: int) -> Decodes:
        found = self._decodes.get(rows)
        if found is None:
            cache, shape = self._prefix.cache, self._model.shape
            longest = min(shape.positions, cache.num_pages * cache.page_size, LONGEST)
            found = self._decodes[rows] = Decodes(self._prefix, rows, num_heads=shape.heads, max_length=longest)
        return found


def _sizes(most: int) -> list[int]:
    """1, 2, 4, … and the most."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def mixed_sizes(most: int) -> list[int]:
    """Powers of two, from 128 on in quarters of them, and the most: there a row that is idle takes a card's time."""
    powers = [1 << n for n in range(LEAST_TOKENS.bit_length() - 1, most.bit_length())]
    sizes = [power * n // 4 for power in powers for n in (range(4, 8) if power >= QUARTERED else [4])]
    return [*(size for size in sizes if size < most), most]
