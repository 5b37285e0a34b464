"""The ladder's rungs checked and timed side by side on a card, or checked and counted in the emulator.

Each rung runs in the dtype and head dimension asked for, or the nearest it is written for. An answer is judged first,
every element of o and lse against float64, and a rung that is wrong is not timed.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tilewise import arch, compiler, emulator, reference
from tilewise.learn import ladder

from ..plan import band_of, visible_pairs
from . import peers
from .measure import FAILED, OK, WRONG, Timing, _synchronize, host_cost, time_calls
from .workloads import DTYPES as ALL_DTYPES
from .workloads import FLOAT8

DTYPES = {name: dtype for name, dtype in ALL_DTYPES.items() if name != FLOAT8}  # no rung takes FP8

NEAREST = {
    "float32": ("float32", "bfloat16", "float16"),
    "float16": ("float16", "bfloat16", "float32"),
    "bfloat16": ("bfloat16", "float16", "float32"),
}
TILED, NUMBA = "torch_tiled", "numba"
SKIPPED = "skipped"
# Rungs that round rows to int8 by design: they are judged as exact attention over the rounded rows.
INT8_ROWS = tuple(rung.name for rung in ladder.RUNGS if not rung.exact)
PAIRS_AT_ONCE = 1 << 26  # of the oracle's scores
SLOW = 0.05  # seconds; slower rungs are alternated among themselves, so that the fast ones get more rounds


@dataclass(frozen=True)
class Shape:
    """What all rungs are asked to compute."""

    batch: int
    seq: int
    heads: int
    hdim: int
    dtype: str
    causal: bool

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def title(self) -> str:
        batch = f"{self.batch} × " if self.batch > 1 else ""
        causal = ", causal" if self.causal else ""
        return f"{batch}{self.seq} tokens, {self.heads} heads, D {self.hdim}, {self.dtype}{causal}"

    def flops(self, hdim: int) -> int:
        """Of the two products, over the pairs that are visible."""
        pairs = visible_pairs(self.seq, self.seq, band_of(self.seq, self.seq, self.causal, None))
        return 4 * hdim * self.heads * self.batch * pairs


@dataclass(frozen=True)
class Step:
    """A rung as a command sees it: a kernel of the ladder, or one of the two before them that are not CUDA C++."""

    name: str
    idea: str
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]  # empty: any
    line: str = "lecture"
    rung: ladder.Rung | None = None

    def nearest(self, shape: Shape) -> tuple[str, int]:
        """The dtype and head dimension that this rung serves and that lie nearest to those asked for."""
        dtype = next(name for name in NEAREST[shape.dtype] if name in self.dtypes)
        return dtype, min(self.head_dims or (shape.hdim,), key=lambda d: (abs(d - shape.hdim), d))


def steps() -> list[Step]:
    """The whole ladder, lowest rung first."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return [
        Step(TILED, "the tiled loop in PyTorch: many small kernels, all tiles through global memory", ("float32",), ()),
        Step(NUMBA, "one kernel, written in Python: tiles in shared memory, a group of threads a row", ("float32",),
             (32, 64, 96, 128)),
        *(_step(r, names) for r in ladder.RUNGS),
    ]  # fmt: skip


def _step(rung: ladder.Rung, names: Mapping[torch.dtype, str]) -> Step:
    return Step(rung.name, rung.idea, tuple(names[d] for d in rung.dtypes), rung.head_dims, rung.line, rung)


def apart() -> Step:
    """The kernel that spills on purpose: no step of the ladder, but one to look at in `tilewise kernels`."""
    return _step(ladder.SPILLING, {dtype: name for name, dtype in DTYPES.items()})


def choose(names: Sequence[str]) -> list[Step]:
    """The steps of these names, all of them if none is named; ValueError on a name that is no rung."""
    found = steps()
    known = [step.name for step in found]
    for name in names:
        if name not in known:
            raise ValueError(f"there is no rung {name!r}; the rungs are {', '.join(known)}")
    return [step for step in found if not names or step.name in names]


@dataclass(frozen=True)
class Row:
    """What was found out about one rung, or about torch. The ratios are times as fast."""

    name: str
    idea: str
    dtype: str
    hdim: int
    status: str = OK
    reason: str = ""
    error: float | None = None
    allowed: float | None = None
    timing: Timing | None = None
    tflops: float | None = None
    over_previous: float | None = None
    over_sdpa: float | None = None
    over_fa2: float | None = None
    counters: emulator.Counters | None = None
    peer: bool = False
    line: str = ""


class Data:
    """q, k and v (B, N, H, D) of one dtype and head dimension, room for o and lse, and the oracle that judges them."""

    def __init__(self, shape: Shape, dtype: str, hdim: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.batch, shape.seq, shape.heads, hdim)
        self.shape, self.dtype, self.hdim = shape, dtype, hdim
        self.q, self.k, self.v = (
            torch.randn(size, generator=generator, device=device).to(DTYPES[dtype]) for _ in range(3)
        )
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(shape.batch, shape.heads, shape.seq, device=device)

    def judge(self, o: torch.Tensor, lse: torch.Tensor, *, int8_rows: bool = False) -> reference.Verdict:
        """The worse of the two verdicts on o and lse."""
        exact, exact_lse, honest, honest_lse = self._of_int8_rows if int8_rows else self._answer
        verdicts = (
            reference.judge(o, exact, honest, lse=exact_lse),
            reference.judge(lse, exact_lse, honest_lse, lse=exact_lse),
        )
        for verdict, what in zip(verdicts, ("o", "lse"), strict=True):
            if not verdict.ok:
                return replace(verdict, reason=f"{what}: {verdict.reason}")
        return verdicts[0]

    @cached_property
    def _answer(self) -> tuple[torch.Tensor, ...]:
        return self._oracle(self.q, self.k, self.v)

    @cached_property
    def _of_int8_rows(self) -> tuple[torch.Tensor, ...]:
        return self._oracle(*(int8_rows(x) for x in (self.q, self.k, self.v)))

    def _oracle(self, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The exact o and lse, and PyTorch's own in the data's dtype; computed on its device, some rows at a time."""
        shape, causal = self.shape, self.shape.causal
        step = max(1, PAIRS_AT_ONCE // shape.seq)
        answers = tuple(
            torch.empty(x.shape, dtype=torch.float64, device=x.device) for x in (self.o, self.lse, self.o, self.lse)
        )
        with torch.device(self.q.device):
            for b in range(shape.batch):
                for h in range(shape.heads):
                    for start in range(0, shape.seq, step):
                        stop = min(shape.seq, start + step)
                        end = stop if causal else shape.seq  # rows and the keys they see, bottom-right again
                        parts = [
                            x[b : b + 1, rows, h : h + 1]
                            for x, rows in zip(qkv, (slice(start, stop), slice(end), slice(end)), strict=True)
                        ]
                        exact = reference.attention(*parts, causal=causal)
                        honest = reference.baseline(*(x.to(self.q.dtype) for x in parts), causal=causal)
                        for whole, part in zip(answers, (*exact, *honest), strict=True):
                            if whole.dim() == 4:
                                whole[b, start:stop, h] = part[0, :, 0].double()
                            else:
                                whole[b, h, start:stop] = part[0, 0].double()
        return answers


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows as int8 with a scale each says them, in float32: rounded to multiples of max|row| / 127."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    # A true division, as the kernel's: torch turns 127.0 / x into 127 · (1 / x), which breaks ties another way.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return torch.round(x * inverse) * (largest / 127.0)


class _Store:
    """Data by dtype and head dimension, made once."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self._device = shape, device
        self._made: dict[tuple[str, int], Data] = {}

    def of(self, dtype: str, hdim: int) -> Data:
        if (dtype, hdim) not in self._made:
            self._made[dtype, hdim] = Data(self.shape, dtype, hdim, self._device)
        return self._made[dtype, hdim]


def _attempt(row: Row, run: Callable[[], tuple[reference.Verdict, emulator.Counters | None]]) -> Row:
    try:
        verdict, counters = run()
    except Exception as error:  # the rung's result, whatever it is; the others are still run
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(row, status=FAILED, reason=text)
    return replace(
        row,
        status=OK if verdict.ok else WRONG,
        reason=verdict.reason,
        error=verdict.error,
        allowed=verdict.allowed,
        counters=counters,
    )


# ---- in the emulator --------------------------------------------------------------------------------------------


def count(chosen: Sequence[Step], shape: Shape, before: Callable[[str], None] = lambda name: None) -> list[Row]:
    """Each rung's counters in the emulator."""
    emulator.compiler()  # one message for all, if there is none
    store = _Store(shape, torch.device("cpu"))
    rows = []
    for step in chosen:
        before(step.name)
        dtype, hdim = step.nearest(shape)
        rows.append(_attempt(Row(step.name, step.idea, dtype, hdim), lambda s=step: _count(s, store)))  # type: ignore[misc]
    return rows


def _count(step: Step, store: _Store) -> tuple[reference.Verdict, emulator.Counters | None]:
    assert step.rung is not None
    data = store.of(*step.nearest(store.shape))
    o, lse, counters = ladder.run(step.rung, data.q, data.k, data.v, causal=data.shape.causal, count=True)
    return data.judge(o, lse, int8_rows=step.name in INT8_ROWS), counters


# ---- on a card --------------------------------------------------------------------------------------------------


def measure(
    chosen: Sequence[Step],
    shape: Shape,
    device: torch.device,
    loops: int | None = None,
    before: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """Each rung's time, beside torch's on the same data in the same run; torch's own rows come last."""
    store = _Store(shape, device)
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], object]] = {}
    for step in chosen:
        before(step.name)
        dtype, hdim = step.nearest(shape)
        row = Row(step.name, step.idea, dtype, hdim, line=step.line)
        if missing := _missing(step, device):
            rows[step.name] = replace(row, status=SKIPPED, reason=missing)
            continue
        rows[step.name] = _attempt(row, lambda s=step: _check(s, store, calls))  # type: ignore[misc]
    passed = [rows[name] for name in calls if rows[name].status == OK]
    before("the clock")
    timings, torch_rows = _time(passed, calls, store, device, loops)
    found = list(rows.values())
    lines = {step.name: step.line for step in chosen}
    previous: dict[str, float] = {}  # the rate of the last rung on each line of the ladder
    for i, row in enumerate(found):
        if row.name not in timings:
            continue
        timing, ratios = timings[row.name]
        rate = shape.flops(row.hdim) / timing.median / 1e12
        # Rates, not times: the rung before may have had another head dimension.
        line = lines[row.name]
        over = rate / previous[line] if line in previous else None
        sdpa, fa2 = ratios.get(peers.SDPA), ratios.get(peers.FA2)
        found[i] = replace(row, timing=timing, tflops=rate, over_previous=over, over_sdpa=sdpa, over_fa2=fa2)
        previous[line] = rate
    return found + torch_rows


def launch_cost(device: torch.device) -> float:
    """Microseconds of host time of one planned launch."""
    rung = next(rung for rung in ladder.RUNGS if torch.bfloat16 in rung.dtypes and 64 in rung.head_dims)
    q, k, v, o = (torch.randn(1, 16, 1, 64, device=device).bfloat16() for _ in range(4))
    prepared = ladder.prepare(rung, q, k, v, o, torch.empty(1, 1, 16, device=device))
    kernel, args = compiler.load(rung.spec(q.dtype, 64), device), compiler.Args(*prepared.args)
    return host_cost(lambda: kernel.launch(prepared.grid, args), device, calls=200).median * 1e6


def _missing(step: Step, device: torch.device) -> str:
    """What this rung lacks here."""
    if step.name == NUMBA and not (importlib.util.find_spec("numba") and importlib.util.find_spec("numba_cuda")):
        return "numba-cuda is not installed: pip install 'tilewise[numba]'"
    if step.rung is not None and step.rung.hopper and not arch.hopper(card := arch.card_of(device)):
        return f"needs wgmma and TMA, compute capability 9.0; this card is {card}"
    return ""


def _check(
    step: Step, store: _Store, calls: dict[str, Callable[[], object]]
) -> tuple[reference.Verdict, emulator.Counters | None]:
    data = store.of(*step.nearest(store.shape))
    call = _call(step, data)
    for written in (data.o, data.lse):
        written.fill_(math.nan)
    call()
    _synchronize(data.q.device)
    calls[step.name] = call
    return data.judge(data.o, data.lse, int8_rows=step.name in INT8_ROWS), None


def _call(step: Step, data: Data) -> Callable[[], object]:
    """A launch over the data with everything made ready, as a planned call has it."""
    q, k, v, o, lse, causal = data.q, data.k, data.v, data.o, data.lse, data.shape.causal
    if step.name == TILED:

        def tiled() -> None:
            with torch.device(q.device):  # for the tensors that the loop makes
                found, found_lse = reference.tiled_attention(q, k, v, causal=causal, tile_q=64, tile_kv=64)
            o.copy_(found)
            lse.copy_(found_lse)

        return tiled
    if step.rung is None:
        from tilewise.learn import ladder_numba

        return ladder_numba.prepare(q, k, v, o, lse, causal=causal)
    launch = ladder.prepare(step.rung, q, k, v, o, lse, causal=causal)
    kernel = compiler.load(step.rung.spec(q.dtype, data.hdim), q.device)
    args = compiler.Args(*launch.args)
    return lambda: kernel.launch(launch.grid, args)


def _torch_calls(data: Data) -> dict[str, Callable[[], object]]:
    """torch's SDPA as it chooses itself, and its FlashAttention-2, which takes 16-bit inputs."""
    sdpa = peers.torch_sdpa(data.q, data.k, data.v, mask=None, causal=data.shape.causal)
    calls: dict[str, Callable[[], object]] = {peers.SDPA: lambda: sdpa(None)}
    if data.dtype != "float32":
        # The operator itself: choosing the backend by torch's context manager would be timed as well.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        q, k, v = (x.transpose(1, 2) for x in (data.q, data.k, data.v))
        calls[peers.FA2] = lambda: flash(q, k, v, 0.0, data.shape.causal)
    return calls


def _time(
    passed: Sequence[Row],
    calls: dict[str, Callable[[], object]],
    store: _Store,
    device: torch.device,
    loops: int | None,
) -> tuple[dict[str, tuple[Timing, dict[str, float]]], list[Row]]:
    """Each rung's timing and times over torch by peer, alternated with torch on the same data; torch's own rows."""
    slow = {row.name for row in passed if _seconds(calls[row.name], device) > SLOW}
    timings: dict[str, tuple[Timing, dict[str, float]]] = {}
    torch_rows: dict[tuple[str, str, int], Row] = {}
    for group, turns in (
        ([row for row in passed if row.name in slow], loops or 3),
        ([row for row in passed if row.name not in slow], loops),
    ):
        if not group:
            continue
        peer_of = {
            (name, *key): call
            for key in dict.fromkeys((row.dtype, row.hdim) for row in group)
            for name, call in _working(_torch_calls(store.of(*key)).items())
        }
        taken = time_calls(
            {**{row.name: calls[row.name] for row in group}, **{_label(key): call for key, call in peer_of.items()}},
            device=device,
            loops=turns,
        )
        for key in peer_of:
            timing, (name, dtype, hdim) = taken[_label(key)], key
            rate = store.shape.flops(hdim) / timing.median / 1e12
            torch_rows[key] = Row(name, "", dtype, hdim, timing=timing, tflops=rate, peer=True)
        for row in group:
            timing = taken[row.name]
            ratios = {
                name: taken[_label((name, dtype, hdim))].median / timing.median
                for name, dtype, hdim in peer_of
                if (dtype, hdim) == (row.dtype, row.hdim)
            }
            timings[row.name] = timing, ratios
    return timings, list(torch_rows.values())


def _label(key: tuple[str, str, int]) -> str:
    return "{}, {}, D {}".format(*key)


def _working(
    calls: Iterable[tuple[str, Callable[[], object]]],
) -> list[tuple[str, Callable[[], object]]]:
    """Those that this card and this build of torch can run."""
    found = []
    for name, call in calls:
        try:
            call()
        except RuntimeError:
            continue
        found.append((name, call))
    return found


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start
