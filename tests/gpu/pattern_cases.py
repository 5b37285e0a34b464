"""Random problems with block schedules and mask and score functions: drawn, run and judged.

A problem is drawn from a `random.Random`: hypothesis gives one on a CPU, a plain seed does on a card. What it must give
is computed from the blocks it was drawn with, not from the schedule that the library made of them: makers, lists,
functions and kernels are judged at once.

    problem = drawn(17)        # or Problem(random.Random(17), Kind(128, blocks=(64, 64)))
    problem.check("cuda")      # print(problem) describes it
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from forward_cases import (
    BF16,
    FP16,
    MODES,
    NAN,
    assert_close,
    emulated,
    nan_in_new_memory,
    normal,
    oracle_on,
    paged,
    starts_of,
)
from oracle import assert_state
from variant_cases import variants

from tilewise import BlockSchedule, attention, attention_varlen, functions, reference
from tilewise.gpu import schedules as kernels
from tilewise.gpu.abi import FP8

HEAD_DIMS = (8, 20, 40, 64, 64, 96, 128, 128, 128, 192, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (6, 2), (8, 1))
HOSTILE = (1, 63, 65, 127, 129)
BEYOND = (-1, -(2**31), 2**31 - 1, 10**6)  # entries of lists that are no blocks
LAYOUTS = ("dense", "heads", "wide")
MASKS = ("causal", "window", "prefix-LM", "documents", "dilated window", "tree of drafts", "2-D neighbourhood")
SCORES = ("ALiBi", "softcap", "relative bias table")
SMOOTH = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "rsqrt", "sin", "cos")


# ---- functions -------------------------------------------------------------------------------------------------------
def tables(batch: int, heads: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """What expressions.py writes of, for sequences up to `length`: other values for another seed, not other code."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.sort(torch.randint(0, 3 + length // 50, (length,), generator=draw)).values,
        "jumble": torch.randint(-40, 40, (length,), generator=draw, dtype=torch.int32),
        "bytes_": torch.randint(0, 255, (length,), generator=draw, dtype=torch.uint8),
        "flags": torch.rand(length, generator=draw) < 0.5,
        "pairs": torch.rand(length, length, generator=draw) < 0.7,
        "widths": torch.randint(1, 60, (heads,), generator=draw).to(torch.int16),
        "slopes": torch.rand(heads, generator=draw),
        "bias": torch.randn(heads, 127, generator=draw),
        "half": torch.randn(length, heads, generator=draw).half().t(),  # (heads, length), its first dimension dense
        "wide": torch.randn(batch, length, generator=draw, dtype=torch.float64),
        "mixed": torch.randn(length, generator=draw).bfloat16(),
    }


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
        scope = {name: x.to(device) for name, x in tables(batch, heads, reach, seed).items()}
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
        place = torch.arange(n)
        if lengths is None:
            return torch.ones(1, n, dtype=torch.bool)
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


# ---- problems --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """What costs compilations: as few kinds as will do, each with many problems.

    blocks: (block_q, block_k) of a schedule. lengths: its blocks have lengths. spares: it has a plane of whole blocks.
    """

    head_dim: int = 64
    dtype: torch.dtype = BF16
    heads: tuple[int, int] = (2, 2)
    blocks: tuple[int, int] | None = None
    lengths: bool = False
    spares: bool = False
    mask: Formula | None = None
    score: Formula | None = None
    exact: bool = False
    softcap: float = 0.0
    alibi: bool = False
    scale: float | None = None
    page_size: int = 0
    tma: bool = True


def random_kind(rng: random.Random, mask: Formula | None, score: Formula | None, fp8: bool = False) -> Kind:
    """Of a schedule, if one is drawn or there is no function, and these functions."""
    scheduled = (mask is None and score is None) or rng.random() < 0.5
    size = lambda: rng.choice((64, 128, 16 * rng.randint(1, 8)))  # noqa: E731
    plain = score is None
    dtype = FP8 if fp8 else rng.choice((BF16, FP16))
    return Kind(
        head_dim=rng.choice((64, 128, 256) if fp8 else HEAD_DIMS),
        dtype=dtype,
        heads=rng.choice(HEADS),
        blocks=(size(), size()) if scheduled else None,
        lengths=scheduled and rng.random() < 0.3,
        spares=scheduled and mask is not None and rng.random() < 0.4,
        mask=mask,
        score=score,
        exact=rng.random() < 0.25,
        softcap=rng.choice((0.0, 0.0, 0.0, 6.0)) if plain else 0.0,
        alibi=plain and rng.random() < 0.15,
        scale=rng.choice((None, None, None, 0.2, -0.1)),
        page_size=rng.choice((0, 0, 0, 0, 16, 48, 64)),
        tma=fp8 or rng.random() < 0.85,
    )


class Problem:
    """One random problem of some kind: lengths, blocks, layouts and options. The same for the same Random.

    longest: of a sequence; area: pairs of a query row and a key over all heads and sequences, about at most.
    """

    def __init__(self, rng: random.Random, kind: Kind, *, longest: int = 300, area: int = 300_000) -> None:
        self.kind, self.reach = kind, longest
        length = lambda: rng.choice((rng.choice(HOSTILE), rng.randint(1, 70), *[rng.randint(1, longest)] * 2))  # noqa: E731
        window = lambda: rng.choice((None, 0, rng.randint(1, 40), rng.randint(1, longest)))  # noqa: E731
        self.packed = kind.page_size > 0 or rng.random() < 0.35
        self.lengths = [(length(), length()) for _ in range(rng.choice((1, 1, 2, 3)))]
        if not self.packed:
            self.lengths = self.lengths[:1] * len(self.lengths)
        while kind.heads[0] * sum(nq * nk for nq, nk in self.lengths) > area:
            self.lengths = [(nq - nq // 4, nk - nk // 4) for nq, nk in self.lengths]
        self.alike = self.packed and rng.random() < 0.3  # sequences of one length, which share a schedule
        if self.alike:
            self.lengths = self.lengths[:1] * len(self.lengths)
        elif self.packed:
            self.lengths += [(rng.choice((0, 5)), rng.choice((0, 9))) for _ in range(rng.randint(0, 2))]
            rng.shuffle(self.lengths)
        self.causal, self.window = rng.random() < 0.3, (window(), window()) if rng.random() < 0.25 else None
        self.sinks, self.slopes_dim = rng.random() < 0.25, rng.choice((1, 2))
        self.layouts = [rng.choice(LAYOUTS) for _ in range(3)]
        if not kind.tma:
            self.layouts[rng.randint(0, 2)] = "odd"
        self.out = rng.choice((None, "dense", "heads", "wide"))
        self.index = rng.choice((torch.int32, torch.int64))
        self.size = rng.choice((1.0, 1.0, 20.0)) if kind.score is None and kind.dtype != FP8 else 1.0
        self.mode, self.stream = rng.choice(MODES), rng.random() < 0.2
        self.by_batch, self.heads = rng.random() < 0.3, rng.choice((1, *kind.heads))
        self.density = rng.choice((0.0, 0.1, 0.3, 0.5, 0.8, 1.0))
        self.maker, self.top = rng.choice(("blocks", "lists", "scores")), rng.randint(1, 6)
        self.poison = kind.blocks is not None and rng.random() < 0.5
        self.seed = rng.randrange(1 << 20)

    def __str__(self) -> str:
        return f"Problem: {vars(self)}"

    __repr__ = __str__

    # ---- what it consists of ----------------------------------------------------------------------------------------

    def blocks(self) -> list[Blocks | None]:
        """Of all sequences together if they share a schedule, else of each, None for one that has none."""
        if self.kind.blocks is None:
            return []
        draw = torch.Generator().manual_seed(self.seed)
        if not self.packed or self.alike:
            return [self._blocks(*self.lengths[0], len(self.lengths) if self.by_batch else 1, draw)]
        rng = random.Random(self.seed)
        some = [rng.random() < 0.8 for _ in self.lengths]
        some[0] = some[0] or not any(some)
        return [self._blocks(*n, 1, draw, b) if some[b] else None for b, n in enumerate(self.lengths)]

    def _blocks(self, nq: int, nk: int, batch: int, draw: torch.Generator, b: int | None = None) -> Blocks:
        """b: the sequence whose blocks these are, unless of all."""
        assert self.kind.blocks is not None
        block_q, block_k = self.kind.blocks
        rows, columns = -(-nq // block_q), -(-nk // block_k)
        shape = (batch, self.heads, rows, columns)
        chance = lambda *shape: torch.rand(*shape, generator=draw)  # noqa: E731
        kept = chance(*shape) < self.density
        special = chance(*shape[:3], 1)
        kept = (kept & (special > 0.1)) | (special > 0.92)  # rows of no block and of all
        made = Blocks({"seqlen_q": nq, "seqlen_k": nk, "block_q": block_q, "block_k": block_k}, kept)
        if self.maker == "scores" and not self.kind.spares and kept.numel():
            if self.seed % 2:  # the largest few
                made.scores, made.wanted = chance(*shape).argsort(-1).float(), {"top_k": self.top}
                made.kept = made.scores >= columns - self.top
            else:  # all that have a share
                made.scores, made.wanted = kept.float(), {"threshold": 1.0}
        if self.kind.spares:
            made.whole = made.kept & (chance(*shape) < 0.6) & made.promised(self._allowed(nq, nk, batch, b))
        if self.kind.lengths:
            for side, n, block, count in (("q", nq, block_q, rows), ("k", nk, block_k, columns)):
                lengths = torch.randint(0, 2 * block, (batch, count), generator=draw).clamp(max=block)
                if count:
                    lengths[:, -1] = lengths[:, -1].clamp(max=n - (n - 1) // block * block)
                setattr(made, f"lengths_{side}", lengths)
        return made

    def _allowed(self, nq: int, nk: int, batch: int, b: int | None) -> torch.Tensor:
        """What the mask lets be seen by all that share a pattern: bool (batch, heads of the schedule, nq, nk)."""
        function = functions.of(self.options("cpu")["mask"], None)
        sequences = torch.arange(len(self.lengths)) if b is None else torch.tensor([b])
        h, rows, keys = torch.arange(self.kind.heads[0]), torch.arange(nq), torch.arange(nk)
        seen = function.seen(sequences[:, None, None, None], h[:, None, None], rows[:, None], keys)
        if batch == 1:
            seen = seen.all(0, keepdim=True)
        return seen.unflatten(1, (self.heads, -1)).all(2)

    def options(self, device: Any) -> dict[str, Any]:
        """What call and oracle are given alike."""
        kind, draw = self.kind, torch.Generator().manual_seed(self.seed)
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "scale": kind.scale}
        options["softcap"] = kind.softcap
        if self.sinks:
            options["sinks"] = (3 * torch.randn(kind.heads[0], generator=draw)).to(device)
        if kind.alibi:
            shape = (kind.heads[0],) if self.slopes_dim == 1 else (len(self.lengths), kind.heads[0])
            options["alibi_slopes"] = torch.rand(shape, generator=draw).to(device)
        nq, nk = (max(n) for n in zip(*self.lengths, strict=True))
        for name in ("mask", "score"):
            if (formula := getattr(kind, name)) is not None:
                sizes = (len(self.lengths), kind.heads[0], nq, nk)
                options[name] = formula.function(*sizes, self.reach, self.seed, device)
        return options

    def tensors(self, device: Any) -> list[torch.Tensor]:
        """q, k and v, packed or not."""
        nq, nk = ([n[i] for n in self.lengths] for i in (0, 1))
        lead = [(sum(n),) if self.packed else (len(n), n[0]) for n in (nq, nk, nk)]
        fp8 = self.kind.dtype == FP8
        made = []
        for i, layout in enumerate(self.layouts):
            shape = (*lead[i], self.kind.heads[1 if i else 0], self.kind.head_dim)
            size, dtype = 1.0 if i else self.size, BF16 if fp8 else self.kind.dtype
            layout = "dense" if fp8 else layout
            x = normal(*shape, dtype=dtype, seed=self.seed + i, size=size, device=device, layout=layout)
            made.append(x.to(self.kind.dtype))
        return made

    def unused(self, blocks: list[Blocks | None], device: Any) -> list[torch.Tensor]:
        """Which rows of q, and of k and v, nothing comes from: past their block's length, or of a block that meets none.
        (B, N) or, packed, (total,)."""
        found = []
        for side in (0, 1):
            parts = []
            for b, n in enumerate(self.lengths):
                one = None if not blocks else blocks[0] if len(blocks) == 1 else blocks[b]
                if one is None:
                    parts.append(torch.zeros(n[side], dtype=torch.bool))
                    continue
                block, valid = one.sizes["block_k" if side else "block_q"], one.valid("k" if side else "q")
                met = one.kept[b if len(one.kept) > 1 else 0].any(0).any(1 - side).repeat_interleave(block)
                parts.append(~(met[: n[side]] & valid[b if len(valid) > 1 else 0]))
            found.append((torch.cat(parts) if self.packed else torch.stack(parts)).to(device))
        return found

    # ---- what it must give ------------------------------------------------------------------------------------------

    def state(self, tensors: list[torch.Tensor], blocks: list[Blocks | None], options: dict[str, Any], dtype: Any):
        """(o, lse) of the oracle in `dtype`, each sequence by itself, in the call's shapes."""
        states = []
        for b, (q, k, v, seen) in enumerate(self.sequences(tensors, blocks, options)):
            given = {name: x for name, x in options.items() if name != "mask"}
            if (slopes := options.get("alibi_slopes")) is not None and slopes.dim() == 2:
                given["alibi_slopes"] = slopes[b]
            states.append(reference.attention(q, k, v, mask=seen, first=b, dtype=dtype, **given))
        if self.packed:
            return torch.cat([o[0] for o, _ in states]), torch.cat([lse[0] for _, lse in states], 1)
        return torch.cat([o for o, _ in states]), torch.cat([lse for _, lse in states])

    def sequences(self, tensors, blocks, options):
        """q, k, v (1, N, H, D) of each sequence, and what its queries see of the keys (1, 1 or Hq, Nq, Nk)."""
        device, heads = tensors[0].device, self.kind.heads[0]
        starts = [[0, *torch.tensor([n[i] for n in self.lengths]).cumsum(0).tolist()] for i in (0, 1, 1)]
        function = functions.of(options["mask"], None) if "mask" in options else None
        for b, (nq, nk) in enumerate(self.lengths):
            if self.packed:
                q, k, v = (x[None, at[b] : at[b + 1]] for x, at in zip(tensors, starts, strict=True))
            else:
                q, k, v = (x[b : b + 1] for x in tensors)
            seen = torch.ones(1, 1, nq, nk, dtype=torch.bool, device=device)
            if function is not None:
                h = torch.arange(heads, device=device)[:, None, None]
                rows, keys = torch.arange(nq, device=device)[:, None], torch.arange(nk, device=device)
                seen = function.seen(torch.tensor([[[[b]]]], device=device), h, rows, keys)
            one = None if not blocks else blocks[0] if len(blocks) == 1 else blocks[b]
            if one is not None:
                seen = seen & self._of_sequence(one.elements(one.kept), b).to(device)
            yield q, k, v, seen

    def _of_sequence(self, elements: torch.Tensor, b: int) -> torch.Tensor:
        """(1, 1 or Hq, Nq, Nk)."""
        own = elements[b : b + 1] if len(elements) > 1 else elements
        return own.repeat_interleave(self.kind.heads[0] // own.shape[1], 1) if own.shape[1] > 1 else own

    # ---- running and judging it -------------------------------------------------------------------------------------

    def call(self, backend: str, tensors: list[torch.Tensor], blocks: list[Blocks | None], options: dict[str, Any]):
        """(o, lse) of the library."""
        device, rng = tensors[0].device, random.Random(self.seed)
        given: dict[str, Any] = {**options, "exact": self.kind.exact, "return_lse": True, "backend": backend}
        if blocks:
            made = [None if x is None else x.schedule(self.maker, backend, rng, device) for x in blocks]
            given["schedule"] = made[0] if len(made) == 1 and (self.alike or not self.packed) else made
        guard = None
        if self.out is not None and self.kind.dtype != FP8:
            given["out"] = out = normal(*tensors[0].shape, dtype=self.kind.dtype, device=device, layout=self.out)
            guard = torch.empty(0, dtype=out.dtype, device=device).set_(out.untyped_storage()).fill_(7.0)
            out.fill_(NAN)
        q, k, v = tensors
        if self.packed:
            nq, nk = ([n[i] for n in self.lengths] for i in (0, 1))
            starts = [starts_of(n, self.index).to(device) for n in (nq, nk)]
            if self.kind.page_size:
                k, v, given["page_table"] = paged(k, v, starts[1], self.kind.page_size, seed=self.seed)
            got = attention_varlen(q, k, v, *starts, **given)
        else:
            got = attention(q, k, v, **given)
        if guard is not None:  # nothing but the output was written
            assert got[0] is out
            o = out.clone()
            out.fill_(7.0)
            assert (guard == 7.0).all(), "memory around the output was written"
            got = (o, got[1])
        return got

    def check(self, device: Any = "cpu", backend: str | None = None) -> None:
        backend = backend or ("cuda" if device == "cuda" else "emulator")
        blocks, options, clean = self.blocks(), self.options(device), self.tensors(device)
        given = clean
        if self.poison and blocks:
            rows, keys = self.unused(blocks, device)
            given = [x.clone(memory_format=torch.preserve_format) for x in clean]
            for x, where in zip(given, (rows, keys, keys), strict=True):
                x[where] = NAN
        try:
            side = torch.cuda.Stream() if self.stream and backend == "cuda" else None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with emulated(*self.mode), nan_in_new_memory(), torch.cuda.stream(side) if side else nullcontext():
                got = self.call(backend, given, blocks, options)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            self.judge(backend, got, clean, blocks, options)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{self}") from error

    def judge(
        self, backend: str, got, tensors: list[torch.Tensor], blocks: list[Blocks | None], options: dict[str, Any]
    ) -> None:
        q, k, v = tensors
        shape = (q.shape[1], q.shape[0]) if self.packed else (q.shape[0], q.shape[2], q.shape[1])
        assert got[0].shape == q.shape
        assert got[1].shape == shape
        with oracle_on(q.device):
            if self.kind.dtype == FP8:
                self._judge_fp8(got, tensors, blocks, options)
                return
            exact, honest = (self.state(tensors, blocks, options, dtype) for dtype in (torch.float64, q.dtype))
            if backend == "cpu":
                assert_state(got, exact, honest)
                return
            magnitude = self.state([q, k, v.abs()], blocks, options, torch.float64)[0]
            assert_close(got, exact, honest, magnitude, v)

    def _judge_fp8(self, got, tensors, blocks, options) -> None:
        """P is rounded to FP8, as dense calls have it: the output is off by what that costs."""
        exact = self.state([x.float() for x in tensors], blocks, options, torch.float64)
        seen = exact[1].isfinite()
        assert got[0].dtype == BF16
        assert torch.equal(got[1].isfinite(), seen)
        if seen.any():
            # A card adds up FP8 products with some 14 bits.
            assert (got[1] - exact[1])[seen].abs().max() < (2e-3 if got[0].is_cuda else 1e-4)
        assert (got[0].double() - exact[0]).abs().max() < 0.07 * tensors[2].float().abs().max()


def drawn(seed: int, **sizes: Any) -> Problem:
    """Of any kind, with functions in two of three."""
    rng, mask, score = random.Random(seed), None, None
    asked = rng.choice(("none", "mask", "mask", "score", "score", "both"))
    if asked in ("mask", "both"):
        mask = Formula(rng.choice(MASKS)) if rng.random() < 0.4 else random_mask(seed)
    if asked in ("score", "both"):
        score = Formula(rng.choice(SCORES), score=True)
        if rng.random() < 0.7:
            score = random_score(seed, sizes.get("longest", 300), rng.choice(("", "", "k % 7 == 3")))
    return Problem(rng, random_kind(rng, mask, score), **sizes)
