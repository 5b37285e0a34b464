"""Which kernels there are: what `specs` lists is what calls bind, and those with lists and functions fit a card."""

from __future__ import annotations

import pytest
import torch

from tilewise import compiler, functions
from tilewise.compiler.spec import KernelSpec
from tilewise.gpu import pattern, prefill, schedules, tilings
from tilewise.gpu.abi import FP8
from tilewise.gpu.pattern import NO_PATTERN, Pattern
from tilewise.plan.schedule import BlockSchedule
from tilewise.scores import Scores

pytestmark = pytest.mark.usefixtures("own_card")

BF16, FP16 = torch.bfloat16, torch.float16
BLOCKS, SMALL = Pattern(128, 128), Pattern(64, 64)
LENGTHS = Pattern(64, 64, lengths=True)


def bound(dtype: torch.dtype, head_dim: int, pattern: Pattern, *, page_size: int = 0, causal: bool = False):
    """The forward of a long problem."""
    q = torch.empty(1, dtype=dtype).expand(1, 1 << 15, 4, head_dim)
    o = torch.empty(1, dtype=tilings.out_dtype(dtype)).expand(q.shape)
    scores = Scores((None, 0 if causal else None))
    if not page_size:
        return prefill.Forward(q, q, q, o, scores, tma=True, pattern=pattern)
    k = torch.empty(1, dtype=dtype).expand(99, page_size, 4, head_dim)
    paged = {"sequences": 1, "paged": True, "table_pages": 99}
    return prefill.Forward(q[0], k, k, o[0], scores, tma=True, pattern=pattern, **paged)


def masked() -> Pattern:
    document = torch.zeros(4096, dtype=torch.int32)
    function = functions.of(lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None)
    return Pattern.of(None, function, (1, 16, 4096, 4096))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_bind_what_is_listed(dtype, head_dim):
    """Dense calls, schedules, lengths, pages and functions, and what makes their lists."""
    listed = set(tilings.specs(every=True))
    assert bound(dtype, head_dim, NO_PATTERN).spec in listed
    for found in (BLOCKS, SMALL, LENGTHS, masked()):
        forward = bound(dtype, head_dim, found)
        assert {forward.spec, forward.lists.spec} <= listed
    forward = bound(dtype, head_dim, BLOCKS, page_size=16, causal=True)
    assert {forward.spec, forward.lists.spec} <= listed


def test_a_schedule_is_a_pattern():
    """`Pattern.of` tells the schedules that are listed from each other, whatever they keep."""
    for made in (BLOCKS, SMALL, LENGTHS):
        block = made.block_q
        sizes = {"seqlen_q": 4 * block, "seqlen_k": 4 * block, "block_q": block, "block_k": block}
        lengths = {"lengths_q": torch.full((4,), 3)} if made.lengths else {}
        schedule = BlockSchedule.from_blocks(torch.rand(4, 4) < 0.5, **sizes, **lengths)
        assert Pattern.of(schedule, None, (1, 4, 4 * block, 4 * block)) == made


def faults(specs: list[KernelSpec]) -> list[str]:
    """What ptxas says against them on Hopper."""
    found = []
    for row in compiler.resource_table(specs, ["sm_90a"]):
        if row.error is not None or row.spill_stores or row.spill_loads or row.serialised:
            found.append(f"{row.kernel}: {row.spill_stores}/{row.spill_loads} bytes, {row.error or row.serialised}")
        assert row.shared_bytes <= row.shared_limit, row
    return found


FITTING = {
    **{f"128 × 128, D {d}": (BF16, d, BLOCKS, 0) for d in (64, 128, 256)},
    **{f"64 × 64, D {d}": (BF16, d, SMALL, 0) for d in (64, 128)},
    **{f"documents, D {d}": (BF16, d, None, 0) for d in (64, 128, 256)},
    "lengths": (BF16, 128, LENGTHS, 0),
    "pages": (BF16, 128, BLOCKS, 16),
    "FP8": (FP8, 128, BLOCKS, 0),
    "FP8 documents": (FP8, 128, None, 0),
}


@pytest.mark.parametrize("name", FITTING)
def test_forwards_over_lists_do_not_spill(name):
    dtype, head_dim, given, page_size = FITTING[name]
    forward = bound(dtype, head_dim, masked() if given is None else given, page_size=page_size)
    assert not faults([forward.spec])


def test_the_kernels_that_make_lists_do_not_spill():
    specs = [spec for spec in tilings.specs(every=True) if spec.name in ("fold", "kinds", "ragged")]
    assert {spec.name for spec in specs} == {"fold", "kinds", "ragged"}
    assert not faults([spec for spec in specs if not spec.text])
    rows = compiler.resource_table([spec for spec in specs if spec.text], ["sm_90a"])
    assert all(row.error is None for row in rows)  # a user's function takes the registers it takes


def test_schedules_on_a_device_have_kernels():
    names = {spec.name for spec in schedules.specs()}
    assert names == {f"schedule_{name}" for name in ("pack", "scatter", "lists", "transpose", "select")}
    assert set(schedules.specs()) <= set(schedules.specs(every=True))
    assert pattern.fold_spec(BLOCKS, 128, 128, 1, False) in tilings.specs()
