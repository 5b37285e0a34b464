"""Random problems with block schedules and mask and score functions: drawn, run and judged.

A problem is drawn from a `random.Random`: hypothesis gives one on a CPU, a plain seed does on a card. What it must give
is computed from the blocks it was drawn with, not from the schedule that the library made of them: makers, lists,
functions and kernels are judged at once.

    problem = drawn(17)        # or Problem(random.Random(17), Kind(128, blocks=(64, 64)))
    problem.check("cuda")      # print(problem) describes it

Run as a script, it goes through the few small problems of `sanitizer_problems`, on a card if there is one: under
compute-sanitizer, too.
"""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(tests), *(str(tests / room) for room in ("api", "gpu", "functions"))]

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
from pattern_parts import MASKS, SCORES, Blocks, Formula, poisoned, random_mask, random_score

from tilewise import BlockSchedule, attention, attention_varlen, functions, reference
from tilewise.gpu import kinds
from tilewise.gpu.abi import FP8

HEAD_DIMS = (8, 20, 40, 64, 64, 96, 128, 128, 128, 192, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (6, 2), (8, 1))
HOSTILE = (1, 63, 65, 127, 129)
LAYOUTS = ("dense", "heads", "wide")


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
        lengths=scheduled and rng.random() < 0.45,
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
        self.density = rng.choice((0.0, 0.1, 0.3, 0.3, 0.5, 0.5, 0.7, 0.8, 1.0))
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
        """Which rows of q, and of k and v, nothing comes from, (B, N) or, packed, (total,): those past their block's
        length, and those of a block that meets none."""
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
                met = met[: n[side]] & valid[b if len(valid) > 1 else 0]
                parts.append(~met[: n[side]])
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
        starts = [[0, *accumulate(n[i] for n in self.lengths)] for i in (0, 1, 1)]
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

    def check(self, device: Any = "cpu", backend: str | None = None, judge_on: Any = None) -> None:
        """judge_on: where the oracle computes, on `device` unless said."""
        backend = backend or ("cuda" if device == "cuda" else "emulator")
        judge_on = judge_on or device
        blocks, options, given = self.blocks(), self.options(device), self.tensors(device)
        clean = [x.to(judge_on) for x in given]
        if self.poison and blocks:
            rows, keys = self.unused(blocks, device)
            given = [poisoned(x, where) for x, where in zip(given, (rows, keys, keys), strict=True)]
        try:
            side = torch.cuda.Stream() if self.stream and backend == "cuda" else None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with emulated(*self.mode), nan_in_new_memory(), torch.cuda.stream(side) if side else nullcontext():
                got = self.call(backend, given, blocks, options)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            self.judge(got, clean, blocks, backend)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{self}") from error

    def judge(self, got, tensors: list[torch.Tensor], blocks: list[Blocks | None], backend: str) -> None:
        """(o, lse) of a backend for these q, k and v, by the oracle on their device."""
        q, k, v = tensors
        shape = (q.shape[1], q.shape[0]) if self.packed else (q.shape[0], q.shape[2], q.shape[1])
        assert got[0].shape == q.shape
        assert got[1].shape == shape
        options, got = self.options(q.device), [x.to(q.device) for x in got]
        with oracle_on(q.device):
            if self.kind.dtype == FP8:
                self._judge_fp8(got, tensors, blocks, options, backend)
                return
            exact, honest = (self.state(tensors, blocks, options, dtype) for dtype in (torch.float64, q.dtype))
            if backend == "cpu":
                assert_state(got, exact, honest)
                return
            magnitude = self.state([q, k, v.abs()], blocks, options, torch.float64)[0]
            assert_close(got, exact, honest, magnitude, v)

    def _judge_fp8(self, got, tensors, blocks, options, backend) -> None:
        """P is rounded to FP8, as dense calls have it: the output is off by what that costs."""
        exact = self.state([x.float() for x in tensors], blocks, options, torch.float64)
        seen = exact[1].isfinite()
        assert got[0].dtype == BF16
        assert torch.equal(got[1].isfinite(), seen)
        if seen.any():
            # A card adds up FP8 products with some 14 bits.
            assert (got[1] - exact[1])[seen].abs().max() < (2e-3 if backend == "cuda" else 1e-4)
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


# ---- one of each body ------------------------------------------------------------------------------------------------
def sanitizer_problems(device: str) -> int:
    """One small problem per kernel body, judged on the CPU; returns how many."""
    documents, table = Formula("documents"), Formula("relative bias table", score=True)
    bodies = {
        "lists of 128 rows": Kind(128, blocks=(128, 128)),
        "lists of 64 rows": Kind(128, FP16, heads=(2, 1), blocks=(64, 64)),
        "slabs": Kind(64, blocks=(16, 16), exact=True),
        "lengths of blocks": Kind(128, blocks=(64, 48), lengths=True),
        "lists over pages": Kind(64, blocks=(64, 64), page_size=16),
        "lists without TMA": Kind(40, blocks=(64, 64), tma=False),
        "FP8 lists": Kind(128, FP8, blocks=(128, 64), lengths=True),
        "mask": Kind(128, mask=documents),
        "score": Kind(128, score=Formula("ALiBi", score=True)),
        "score with a table": Kind(256, heads=(4, 2), score=table),
        "both beside a schedule": Kind(64, blocks=(64, 64), spares=True, mask=documents, score=table),
        "mask over pages": Kind(128, heads=(4, 1), mask=Formula("window"), page_size=16),
    }
    for number, (name, kind) in enumerate(bodies.items()):
        problem = Problem(random.Random(number), kind, longest=200, area=100_000)
        problem.lengths = [(130, 190), (65, 127)] if problem.packed and not problem.alike else [(130, 190)] * 2
        problem.density, problem.size = 0.5, 1.0
        print(name, flush=True)
        problem.check(device, judge_on="cpu")
    ids = torch.sort(torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(0))).values
    function = functions.of(lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q), None)
    there = functions.of((lambda x: lambda b, h, q, k: (x[q] == x[k]) & (k <= q))(ids.to(device)), None)
    found = kinds.schedule_of(there, 1, 2, 150, 200, 32, 48, torch.empty(0, device=device).device)
    truth = function.blocks(1, 1, 150, 200, 32, 48)
    sizes = {"seqlen_q": 150, "seqlen_k": 200, "block_q": 32, "block_k": 48}
    exact = BlockSchedule.from_blocks(truth > 0, whole=truth == 2, **sizes).to_mask()
    assert not (found.cpu().to_mask() & ~exact).any(), "blocks that the host's intervals hide"
    print("kinds of blocks", flush=True)
    turned = found.to(device).transpose()
    assert torch.equal(turned.counts.sum().cpu(), found.counts.sum().cpu())
    assert turned.cpu().transpose() == found.cpu()
    print("turned schedules", flush=True)
    return len(bodies) + 2


if __name__ == "__main__":
    print("ok", sanitizer_problems("cuda" if torch.cuda.is_available() else "cpu"))
