"""What random problems with patterns consist of: mask and score functions, and blocks of schedules."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from forward_cases import NAN
from variant_cases import variants

from tilewise import BlockSchedule, functions
from tilewise.gpu import schedules as kernels
from tilewise.gpu.abi import FP8

BEYOND = (-1, -(2**31), 2**31 - 1, 10**6)  # entries of lists that are no blocks
MASKS = ("causal", "window", "prefix-LM", "documents", "dilated window", "tree of drafts", "2-D neighbourhood")
SCORES = ("ALiBi", "softcap", "relative bias table")
SMOOTH = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "rsqrt", "sin", "cos")


# ---- functions -------------------------------------------------------------------------------------------------------
def tables(source: str, batch: int, heads: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """What an expression of expressions.py names, for sequences up to `length`: other values for another seed."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "ids": lambda: torch.sort(torch.randint(0, 3 + length // 50, (length,), generator=draw)).values,
        "jumble": lambda: torch.randint(-40, 40, (length,), generator=draw, dtype=torch.int32),
        "bytes_": lambda: torch.randint(0, 255, (length,), generator=draw, dtype=torch.uint8),
        "flags": lambda: torch.rand(length, generator=draw) < 0.5,
        "pairs": lambda: torch.rand(length, length, generator=draw) < 0.7,
        "widths": lambda: torch.randint(1, 60, (heads,), generator=draw).to(torch.int16),
        "slopes": lambda: torch.rand(heads, generator=draw),
        "bias": lambda: torch.randn(heads, 127, generator=draw),
        "half": lambda: torch.randn(length, heads, generator=draw).half().t(),  # its first dimension is dense
        "wide": lambda: torch.randn(batch, length, generator=draw, dtype=torch.float64),
        "mixed": lambda: torch.randn(length, generator=draw).bfloat16(),
    }
    return {name: make() for name, make in made.items() if name in source}


@dataclass(frozen=True)
class Formula:
    """A mask or a score: one of the ten variants by its name, or a Python expression over `tables`."""

    source: str
    score: bool = False

    def function(self, batch: int, heads: int, nq: int, nk: int, reach: int, seed: int, device: Any) -> Callable:
        """For these sizes; reach: the length that tables are made for."""
        if self.source in MASKS + SCORES:
            made = variants(heads, nq, nk, batch=batch, device=device)[self.source]
            return made.score if self.score else made.mask
        scope = {name: x.to(device) for name, x in tables(self.source, batch, heads, reach, seed).items()}
        parameters = "s, b, h, q, k" if self.score else "b, h, q, k"
        code = compile(f"lambda {parameters}: {self.source}", "<random expression>", "eval")
        return eval(code, {"torch": torch, "math": math, **scope})


def bounded(source: str, hidden: str = "") -> Formula:
    """A score that stays within ±25: logits of millions would make the tolerance void. hidden: where it is −inf."""
    within = f"({source}).clamp(-25.0, 25.0)"
    return Formula(f"torch.where({hidden}, -math.inf, {within})" if hidden else within, score=True)


def steady(score: Formula, reach: int) -> bool:
    """Is the score the same for all who compute it in float32, each in their own order? Then float64 is its judge.

    Not so where large numbers cancel, where cos is taken of a large one, and where what is compared or rounded comes
    from exp or tanh, of which every library has its own last bit.
    """
    function = functions.of(None, score.function(3, 8, reach, reach, reach, 1, "cpu"))
    assert function.score is not None
    for node, smooth in functions.expression.in_context(function.score, True):
        if node.op in SMOOTH and not smooth:
            return False
    draw = torch.Generator().manual_seed(1)
    b, h, q, k = (torch.randint(0, n, (20000,), generator=draw) for n in (3, 8, reach, reach))
    s = 3 * torch.randn(20000, generator=draw)
    single, double = function.scored(s, b, h, q, k), function.scored(s.double(), b, h, q, k)
    seen = double != -math.inf
    if not torch.equal(seen, single != -math.inf) or not single[seen].isfinite().all():
        return False
    return bool(((single - double)[seen].abs() <= 2e-6 * (1 + double[seen].abs())).all())


def written(strategy: Any, seed: int) -> Any:
    """What a strategy of hypothesis gives for a seed."""
    import hypothesis

    given: list[Any] = []
    settings = hypothesis.settings(
        max_examples=4, database=None, derandomize=False, phases=(hypothesis.Phase.generate,), deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip

    @hypothesis.seed(seed)
    @settings
    @hypothesis.given(strategy)
    def take(made: Any) -> None:
        given.append(made)

    take()
    return given[-1]


def random_mask(seed: int) -> Formula:
    import expressions

    return Formula(written(expressions.masks(), seed).source)


def random_score(seed: int, reach: int, hidden: str = "") -> Formula:
    """The first that is steady, from this seed on."""
    import expressions

    while not steady(found := bounded(written(expressions.scores(), seed).source, hidden), reach):
        seed += 1000
    return found


# ---- blocks ----------------------------------------------------------------------------------------------------------
@dataclass
class Blocks:
    """The truth about a schedule, on the CPU: kept, whole (batch or 1, heads or 1, rows, columns) bools; lengths_q
    (batch or 1, rows), lengths_k (batch or 1, columns) ints. scores: what `from_scores` keeps these blocks by."""

    sizes: dict[str, int]
    kept: torch.Tensor
    whole: torch.Tensor | None = None
    lengths_q: torch.Tensor | None = None
    lengths_k: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    wanted: dict[str, Any] = field(default_factory=dict)

    def elements(self, plane: torch.Tensor) -> torch.Tensor:
        """(batch or 1, heads or 1, Nq, Nk): the pairs in a plane's blocks, within the lengths."""
        s = self.sizes
        seen = plane.repeat_interleave(s["block_q"], 2)[:, :, : s["seqlen_q"]]
        seen = seen.repeat_interleave(s["block_k"], 3)[..., : s["seqlen_k"]]
        return seen & self.valid("q")[:, None, :, None] & self.valid("k")[:, None, None, :]

    def promised(self, seen: torch.Tensor) -> torch.Tensor:
        """(batch or 1, heads or 1, rows, columns): the blocks of which `seen`, pairs, shows all."""
        (rows, columns), s = self.kept.shape[2:], self.sizes
        pad = (0, columns * s["block_k"] - s["seqlen_k"], 0, rows * s["block_q"] - s["seqlen_q"])
        seen = torch.nn.functional.pad(seen, pad, value=True)
        return seen.unflatten(3, (columns, s["block_k"])).unflatten(2, (rows, s["block_q"])).all(5).all(3)

    def valid(self, side: str) -> torch.Tensor:
        """(batch or 1, N): the rows within their block's length."""
        block, n = self.sizes[f"block_{side}"], self.sizes[f"seqlen_{side}"]
        lengths = self.lengths_q if side == "q" else self.lengths_k
        place = torch.arange(n, device="cpu")  # whatever device the oracle makes its tensors on
        if lengths is None:
            return torch.ones(1, n, dtype=torch.bool, device="cpu")
        return place % block < lengths[:, place // block]

    def schedule(self, maker: str, backend: str, rng: random.Random, device: Any) -> BlockSchedule:
        """By one of the makers; in the emulator by the kernels that do it on a device."""
        more = {name: x.to(device) for name in ("lengths_q", "lengths_k") if (x := getattr(self, name)) is not None}
        more |= self.sizes
        columns, hostile = self.kept.shape[3], backend != "cpu"
        if maker == "scores" and self.scores is not None:
            scores = self.scores.to(device)
            if backend != "emulator":
                return BlockSchedule.from_scores(scores, **self.wanted, **more)
            bits, _ = kernels.select(scores, self.wanted.get("top_k"), self.wanted.get("threshold"), None)
            return BlockSchedule.from_bits(bits, **more)
        if maker == "lists":
            dtype = rng.choice((torch.int32, torch.int64))
            partial = self.kept if self.whole is None else self.kept & ~self.whole
            lists = [*_lists(partial, rng, hostile), *(() if self.whole is None else _lists(self.whole, rng, hostile))]
            lists = [x.to(dtype).to(device) for x in lists] + [None] * (4 - len(lists))
            if backend != "emulator":
                return BlockSchedule.from_lists(*lists[:2], full_counts=lists[2], full_indices=lists[3], **more)
            bits, whole, _ = kernels.scatter(*lists, columns)
            return BlockSchedule.from_bits(bits, whole=whole, **more)
        kept, whole = self.kept.to(device), None if self.whole is None else self.whole.to(device)
        if backend != "emulator" or not self.kept.numel():
            return BlockSchedule.from_blocks(kept, whole=whole, **more)
        bits, whole = kernels.pack(kept, whole)
        return BlockSchedule.from_bits(bits, whole=whole, **more)


def _lists(kept: torch.Tensor, rng: random.Random, hostile: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """counts (batch or 1, heads or 1, rows) and indices (…, width): ascending, or as a device has to take them."""
    rows = [row.nonzero().flatten().tolist() for row in kept.flatten(0, 2)]
    for row in rows if hostile else ():
        row += [rng.choice(row) for _ in range(rng.randint(0, 3)) if row]
        row += [rng.choice((*BEYOND, kept.shape[3])) for _ in range(rng.randint(0, 3))]
        rng.shuffle(row)
    width = max((len(row) for row in rows), default=0) + rng.randint(0, 2)
    counts, indices = [], []
    for row in rows:
        told = len(row)
        if hostile and len(row) in (0, width):  # as far as the list goes, and no further
            told = rng.choice((told, 10**6 if row else -5))
        counts.append(told)
        indices.append(row + [rng.choice((0, *BEYOND)) for _ in range(width - len(row))])
    shape = kept.shape[:3]
    return torch.tensor(counts).reshape(shape), torch.tensor(indices, dtype=torch.int64).reshape(*shape, width)


def poisoned(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """A copy, NaN in these rows."""
    x = x.clone(memory_format=torch.preserve_format)
    if x.dtype == FP8:  # which torch does not fill
        x.view(torch.uint8)[where] = 0x7F
    else:
        x[where] = NAN
    return x
