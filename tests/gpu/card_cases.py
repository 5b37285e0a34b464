"""Problems for the kernels of cards without wgmma, run as those cards: one per kernel body, and random ones.

    TILEWISE_CACHE=… compute-sanitizer --tool memcheck python tests/gpu/card_cases.py
    TILEWISE_CACHE=… compute-sanitizer --tool racecheck python tests/gpu/card_cases.py

Run as a script, it goes through `BODIES` and `STEPS`, small, on a card if there is one, and else in the emulator; words
on the command line choose those that have one of them in their name.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(tests), *(str(tests / room) for room in ("api", "gpu", "functions"))]

import decode_cases
import forward_cases
import mla_cases
import torch
from forward_cases import BF16, FP16, MORE_KINDS, Chance
from forward_cases import Kind as Dense
from pattern_cases import Kind, Problem
from pattern_parts import Blocks, Formula

from tilewise import arch, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu.abi import FP8

FP32 = torch.float32
CARDS = ("sm_80", "sm_86", "sm_89", "sm_120")
DOCUMENTS, WINDOW = Formula("documents"), Formula("window")
ALIBI, TABLE = Formula("ALiBi", score=True), Formula("relative bias table", score=True)

# ---- one of each body ------------------------------------------------------------------------------------------------
# The card whose tiling it is, and the problem: dtypes, how rows arrive, what is done to scores, which blocks are seen
BODIES: dict[str, tuple[str, Kind]] = {
    "Q in registers, two places": ("sm_80", Kind(64)),
    "32 rows a warp": ("sm_80", Kind(128, FP16, heads=(4, 2))),
    "32 keys within 99 KB": ("sm_89", Kind(128)),
    "one block each": ("sm_80", Kind(256)),
    "16 rows a warp within 99 KB": ("sm_120", Kind(192, FP16)),
    "standard softmax": ("sm_80", Kind(64, exact=True)),
    "softcap and slopes": ("sm_80", Kind(128, softcap=6.0, alibi=True)),
    "rows off 16 bytes": ("sm_80", Kind(33, tma=False)),
    "pages": ("sm_80", Kind(128, heads=(4, 1), page_size=16)),
    "pages of any size": ("sm_86", Kind(64, FP16, page_size=5)),
    "lists": ("sm_80", Kind(128, blocks=(128, 128))),
    "lists of slabs": ("sm_80", Kind(64, blocks=(16, 16), exact=True)),
    "lists with lengths": ("sm_89", Kind(128, blocks=(64, 48), lengths=True)),
    "lists over pages": ("sm_80", Kind(64, blocks=(64, 64), page_size=16)),
    "mask": ("sm_80", Kind(128, mask=DOCUMENTS)),
    "score": ("sm_86", Kind(256, heads=(4, 2), score=TABLE)),
    "both beside lists": ("sm_80", Kind(64, blocks=(64, 64), spares=True, mask=DOCUMENTS, score=TABLE)),
    "FP8 multiplied": ("sm_89", Kind(128, FP8)),
    "FP8 multiplied, lists": ("sm_120", Kind(64, FP8, blocks=(64, 64), lengths=True)),
    "FP8 widened": ("sm_80", Kind(128, FP8)),
    "FP8 widened from pages": ("sm_86", Kind(64, FP8, heads=(2, 1), page_size=16)),
    "float32": ("sm_80", Kind(64, FP32)),
    "float32 within 99 KB, pages": ("sm_89", Kind(128, FP32, heads=(4, 1), page_size=16)),
    "float32 off 16 bytes": ("sm_80", Kind(33, FP32, tma=False)),
    "float32, lists with lengths": ("sm_80", Kind(64, FP32, blocks=(64, 64), lengths=True)),
}
# Decode steps over a shared node and what is each sequence's own: the card, and the cache's format
STEPS = {
    "decode over bf16": ("sm_80", "bf16"),
    "decode over fp8": ("sm_89", "fp8"),
    "decode over int8": ("sm_120", "int8"),
    "decode over int4": ("sm_86", "int4"),
    "decode over fp32": ("sm_80", "fp32"),
}
# Decode steps over rows that are keys and values at once, of 576 and 512 channels: the card, the format of codes, heads
LATENT = {
    "latent rows": ("sm_80", "", 16),
    "latent rows, 32 heads": ("sm_80", "", 32),
    "latent rows, 64 heads": ("sm_80", "", 64),
    "latent rows within 99 KB": ("sm_89", "", 16),
    "latent rows within 99 KB, 64 heads": ("sm_86", "", 64),
    "latent rows of fp8": ("sm_120", "fp8", 16),
    "latent rows of int8, 64 heads": ("sm_89", "int8", 64),
}
EVERY = (*BODIES, *STEPS, *LATENT)


def body(name: str) -> tuple[str, Problem]:
    """The card and the small problem of a body."""
    card, kind = BODIES[name]
    problem = Problem(random.Random(list(BODIES).index(name)), kind, longest=200, area=100_000)
    problem.lengths = [(130, 190), (65, 127)] if problem.packed and not problem.alike else [(130, 190)] * 2
    problem.density, problem.size = 0.5, 1.0
    return card, problem


def imitable(device: str) -> list[str]:
    """The cards that a device can behave as; the emulator all of them."""
    if device == "cpu":
        return list(CARDS)
    own = arch.arch_of_device(torch.device(device))
    return [card for card in CARDS if not arch.cannot_imitate(own, card)]


def check_bodies(device: str, names: Sequence[str] = EVERY) -> int:
    """Each judged on the CPU; returns how many."""
    every, there = BODIES | STEPS | LATENT, imitable(device)
    cards = {name: card for name, (card, *_) in every.items()}
    chosen = [name for name in names if cards[name] in there]
    for name in chosen:
        print(f"{name}, as {cards[name]}", flush=True)
        with arch.as_card(cards[name]):
            if name in BODIES:
                body(name)[1].check(device, judge_on="cpu")
            elif name in STEPS:
                check_step(STEPS[name][1], device)
            else:
                check_latent(*LATENT[name][1:], device)
    return len(chosen)


def check_step(kv_format: str, device: str) -> None:
    """Few rows of their own and sixteen at a time of a node that eight sequences share."""
    cache, seqs = decode_cases.make_tree([1, 8], [90, 20], kv_format=kv_format)
    dtype = FP32 if kv_format == "fp32" else BF16
    decode_cases.check(cache, seqs, share=True, dtype=dtype, runs=kv_format.startswith("int"), device=device)
    decode_cases.check(cache, seqs[:3], share=False, dtype=dtype, group=2, window=(70, 0), device=device)


def check_latent(stored: str, heads: int, device: str) -> None:
    """Several pieces, which blocks compute each or one after the other; and rows that query tokens choose."""
    problem = mla_cases.Problem((330, 65), heads=heads, sizes=mla_cases.DEEPSEEK, page_size=64, stored=stored)
    for splitting in (mla_cases.CUT, mla_cases.FOLDED):
        problem.check(splitting=splitting, device=device)
    problem.check_chosen(70, device=device)


# ---- random problems -------------------------------------------------------------------------------------------------
# What costs compilations: cards with 99 KB have most kernels in common.
DENSE = (
    *MORE_KINDS,
    Dense(64, FP32),
    Dense(128, FP32, heads=(4, 2)),
    Dense(128, FP32, page_size=16),
    Dense(256, FP32, exact=True),
    Dense(33, FP32, softcap=20.0, alibi=True),
)
PATTERNED = (
    Kind(128, blocks=(128, 128)),
    Kind(128, FP16, heads=(8, 1), blocks=(64, 64)),
    Kind(64, blocks=(16, 16), tma=False),
    Kind(256, FP16, blocks=(96, 96), lengths=True),
    Kind(64, heads=(4, 2), blocks=(64, 64), page_size=16),
    Kind(64, FP32, blocks=(64, 64), lengths=True),
    Kind(128, mask=DOCUMENTS),
    Kind(128, heads=(6, 2), score=ALIBI),
    Kind(64, mask=WINDOW, score=TABLE, page_size=16),
    Kind(128, FP32, mask=DOCUMENTS, score=ALIBI),
    Kind(192, BF16, blocks=(128, 64), mask=Formula("causal"), spares=True),
    Kind(128, FP8),
    Kind(64, FP8, heads=(4, 1), page_size=16),
    Kind(256, FP8, exact=True),
    Kind(128, FP8, blocks=(128, 64), lengths=True),
    Kind(64, FP8, mask=WINDOW),
)
DECODED = (
    *(("bf16", 128, 16), ("bf16", 64, 3), ("fp16", 128, 64), ("fp8", 128, 16), ("int8", 64, 16), ("int4", 128, 16)),
    ("fp32", 64, 16),
)


def dense(card: str, number: int) -> Chance:
    return Chance(100_000 * (1 + CARDS.index(card)) + number, DENSE, 700)


def patterned(card: str, number: int) -> Problem:
    """Of each kind in turn."""
    rng = random.Random(1000 * (1 + CARDS.index(card)) + number)
    return Problem(rng, PATTERNED[number % len(PATTERNED)], longest=900, area=4_000_000)


def decoded(card: str, number: int, device: str) -> None:
    """A random forest, decoded and judged."""
    decode_cases.chance(1000 * (7 + CARDS.index(card)) + number, DECODED, device=device)


# ---- compiling ahead -------------------------------------------------------------------------------------------------
@contextmanager
def recording() -> Iterator[list[KernelSpec]]:
    """Calls on CPU tensors run nothing and are not judged; yields the kernels they would run."""
    found: list[KernelSpec] = []
    made = Blocks.schedule

    def launch(spec: KernelSpec, *_: Any, **__: Any) -> None:
        found.append(spec)

    def schedule(self: Blocks, maker: str, backend: str, rng: random.Random, device: Any) -> Any:
        with suppress(Exception):  # its kernels are noted; of what they did not write no schedule can be made
            made(self, maker, "emulator", rng, device)
        return made(self, "blocks", "cpu", rng, device)

    nothing = lambda *_, **__: None  # noqa: E731
    with (
        mock.patch.object(emulator, "launch", launch),
        mock.patch.object(Blocks, "schedule", schedule),
        mock.patch.object(Problem, "judge", nothing),
        mock.patch.object(forward_cases, "reference"),
        mock.patch.object(forward_cases, "assert_close", nothing),
        mock.patch.object(decode_cases, "assert_decoded", nothing),
    ):
        yield found


def kernels_of(card: str, counts: tuple[int, int, int]) -> Iterable[KernelSpec]:
    """Those of so many dense, patterned and decoded problems of a card, and of its bodies."""
    problems = [*(dense(card, n) for n in range(counts[0])), *(patterned(card, n) for n in range(counts[1]))]
    checks = [
        *(problem.check for problem in problems),
        *(partial(decoded, card, n, "cpu") for n in range(counts[2])),
        *(body(name)[1].check for name, (of, _) in BODIES.items() if of == card),
        *(partial(check_step, kv_format, "cpu") for of, kv_format in STEPS.values() if of == card),
        *(partial(check_latent, *kind, "cpu") for of, *kind in LATENT.values() if of == card),
    ]
    with recording() as found, arch.as_card(card):
        for check in checks:
            with suppress(AssertionError):  # about contents, which nothing has written
                check()
    return dict.fromkeys(found)


if __name__ == "__main__":
    words = sys.argv[1:]
    names = [name for name in EVERY if not words or any(word in name for word in words)]
    print("ok", check_bodies("cuda" if torch.cuda.is_available() else "cpu", names))
