"""Schedules on a device against their definitions, row by row in Python: the checks that run in the emulator and on a
card."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import torch

from tilewise.gpu import schedules as kernels
from tilewise.plan.schedule import BlockSchedule

OUT_OF_RANGE, REPEATED, NOT_ASCENDING, BAD_COUNT, NEGATIVE = (1 << n for n in range(5))
SHARE_STEP = Fraction(1, 2**24)


def lead4(x: torch.Tensor, tail: int = 2) -> torch.Tensor:
    """With (batch or 1, heads or 1) in front of the last `tail` dimensions."""
    return x.reshape((1,) * (2 + tail - x.dim()) + tuple(x.shape))


def as_bits(kept: torch.Tensor) -> torch.Tensor:
    """The definition: int32 (batch or 1, heads or 1, nq, words) on the CPU."""
    kept = lead4(kept.cpu())
    words = torch.zeros(*kept.shape[:3], -(-kept.shape[3] // 32), dtype=torch.int64)
    for j in range(kept.shape[3]):
        words[..., j // 32] |= kept[..., j].long() << j % 32
    return words.to(torch.int32)


def assert_bits(got: torch.Tensor | None, kept: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == torch.int32
    assert got.is_contiguous()
    assert torch.equal(got.cpu(), as_bits(kept))


def geometry(nq: int, nk: int, block_q: int = 16, block_k: int = 16, less: int = 0) -> dict[str, int]:
    """Lengths of nq × nk blocks, the last of which lack `less` rows."""
    lengths = {"seqlen_q": max(0, nq * block_q - less), "seqlen_k": max(0, nk * block_k - less)}
    return lengths | {"block_q": block_q, "block_k": block_k}


def check_pack(kept: torch.Tensor, whole: torch.Tensor | None = None, **emulated: Any) -> None:
    bits, whole_bits = kernels.pack(kept, whole, **emulated)
    assert_bits(bits, kept)
    if whole is None:
        assert whole_bits is None
    else:
        assert_bits(whole_bits, whole & kept)


def row_of_list(count: int, indices: list[int], cols: int) -> tuple[list[int], int]:
    """The entries of a list that count, and what is wrong with it but for what it repeats."""
    faults = BAD_COUNT * (not 0 <= count <= len(indices))
    entries = indices[: max(0, min(count, len(indices)))]
    faults |= OUT_OF_RANGE * any(not 0 <= j < cols for j in entries)
    faults |= NOT_ASCENDING * any(a > b for a, b in itertools.pairwise(entries))
    return [j for j in entries if 0 <= j < cols], faults


def check_scatter(
    counts: torch.Tensor,
    indices: torch.Tensor,
    cols: int,
    full_counts: torch.Tensor | None = None,
    full_indices: torch.Tensor | None = None,
    **emulated: Any,
) -> None:
    bits, whole, faults = kernels.scatter(counts, indices, full_counts, full_indices, cols, **emulated)
    shape = (*lead4(counts, 1).shape, cols)
    rows = math.prod(shape[:3])
    kept, inner = (torch.zeros(rows, cols, dtype=torch.bool) for _ in range(2))
    expected = torch.zeros(rows, dtype=torch.int32)
    pairs = [(counts, indices, False)]
    if full_counts is not None and full_indices is not None:
        pairs.append((full_counts, full_indices, True))
    for row in range(rows):
        total = 0
        for count, index, is_whole in pairs:
            entries, wrong = row_of_list(
                int(count.reshape(-1)[row]), index.reshape(rows, index.shape[-1])[row].tolist(), cols
            )
            expected[row] |= wrong
            kept[row, entries] = True
            total += len(entries)
            if is_whole:
                inner[row, entries] = True
        expected[row] |= REPEATED * (total > int(kept[row].sum()))
    assert_bits(bits, kept.view(shape))
    if full_counts is not None:
        assert_bits(whole, inner.view(shape))
    assert faults.shape == shape[:3]
    assert faults.cpu().view(-1).tolist() == expected.tolist()


def check_turned(kept: torch.Tensor, whole: torch.Tensor, **emulated: Any) -> None:
    cols = kept.shape[-1]
    bits, whole_bits = kernels.pack(kept, whole, **emulated)
    for inner in (None, whole_bits):
        turned, turned_whole = kernels.transpose(bits, inner, cols, **emulated)
        assert_bits(turned, kept.transpose(-1, -2))
        assert (turned_whole is None) == (inner is None)
    assert_bits(turned_whole, (whole & kept).transpose(-1, -2))


def check_lists(kept: torch.Tensor, width: int | None, **emulated: Any) -> None:
    bits, _ = kernels.pack(kept, **emulated)
    counts, indices = kernels.lists(bits, kept.shape[-1], width, **emulated)
    whole = lead4(kept.cpu())
    rows = [row.nonzero()[:, 0].tolist()[:width] for row in whole.flatten(0, 2)]
    assert counts.dtype == torch.int32
    assert counts.shape == whole.shape[:3]
    assert counts.cpu().view(-1).tolist() == [len(row) for row in rows]
    if width is None:
        assert indices is None
        return
    assert indices is not None
    assert indices.shape == (*whole.shape[:3], width)
    assert indices.cpu().flatten(0, 2).tolist() == [row + [0] * (width - len(row)) for row in rows]


# ---- the largest scores ---------------------------------------------------------------------------------------------


def considered(row: int, sizes: dict[str, int]) -> tuple[range, range]:
    """The key blocks that causal attention lets a block of queries see, and those of them on the diagonal, by the
    definition: query i sees key j when j ≤ i + seqlen_k − seqlen_q."""
    first, end = row * sizes["block_q"], min((row + 1) * sizes["block_q"], sizes["seqlen_q"])
    shift = sizes["seqlen_k"] - sizes["seqlen_q"]
    diagonal = [j // sizes["block_k"] for j in range(first + shift, end + shift) if j >= 0]
    if not diagonal:
        return range(0), range(0)
    return range(max(diagonal) + 1), range(min(diagonal), max(diagonal) + 1)


def order_of(values: list[float], columns: range) -> list[int]:
    """Largest first, of equal ones the first; NaN and −inf are never kept."""
    return sorted((j for j in columns if values[j] > -math.inf), key=lambda j: (-values[j], j))


def check_row(values: list[float], kept: set[int], asked: dict[str, Any], columns: range, extra: range) -> None:
    order = order_of(values, columns)
    if "top_k" in asked:
        assert kept == {*order[: asked["top_k"]], *extra}
        return
    # Infinity counts as 2^128. Weights are rounded up by at most 2^-32 of the largest, and shares down.
    exact = [Fraction(2) ** 128 if values[j] == math.inf else Fraction(max(0.0, values[j])) for j in order]
    sums = [Fraction(0), *itertools.accumulate(exact)]
    share, slack = Fraction(asked["threshold"]), SHARE_STEP + Fraction(len(order), 2**31)
    positive = sum(x > 0 for x in exact)
    least, most = (
        next((n for n in range(positive) if sums[n] >= (share + by) * sums[-1]), positive) for by in (-slack, slack)
    )
    least = positive if share == 1 else max(least, min(positive, 1))
    assert any(kept == {*order[:n], *extra} for n in range(least, most + 1))


def check_select(
    scores: torch.Tensor, asked: dict[str, Any], sizes: dict[str, int], causal: bool = False, **emulated: Any
) -> None:
    """The kernel gives what the definition asks for, and the CPU's path the same bits."""
    where = (sizes["seqlen_q"], sizes["seqlen_k"], sizes["block_q"], sizes["block_k"]) if causal else None
    bits, faults = kernels.select(scores, asked.get("top_k"), asked.get("threshold"), where, **emulated)
    values = lead4(scores.cpu().float())
    nq, nk = values.shape[2:]
    negative = torch.zeros(values.shape[:3], dtype=torch.bool)
    got = bits.cpu().view(-1, bits.shape[-1]).tolist() if bits.numel() else []
    for row, (words, x) in enumerate(zip(got, values.reshape(-1, nk).tolist() if nk else [], strict=True)):
        columns, extra = considered(row % nq, sizes) if causal else (range(nk), range(0))
        kept = {w * 32 + b for w, word in enumerate(words) for b in range(32) if word >> b & 1}
        check_row(x, kept, asked, columns, extra)
        negative.view(-1)[row] = any(-math.inf < x[j] < 0 for j in columns)
    if faults is not None:
        assert torch.equal(faults.cpu() != 0, negative)
    if not (negative.any() and "threshold" in asked):
        same = BlockSchedule.from_scores(scores.cpu(), causal=causal, **asked, **sizes)
        assert torch.equal(same.bits, bits.cpu())
