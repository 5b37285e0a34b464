"""Races in shared memory: the emulator finds accesses that nothing orders, whatever order its threads run in.

`TILEWISE_RACES=1 pytest tests/gpu` looks for them in every kernel and form that the tests run. Here each kernel is
looked at once, and bugs are planted that no number shows.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import backward_cases
import forward_cases
import lazy_cases
import mla_cases
import pytest
import torch
from test_fences import planted, with_source

from tilewise import BlockSchedule, emulator
from tilewise.compiler.spec import KernelSpec
from tilewise.emulator import EmulatorError

pytestmark = pytest.mark.usefixtures("own_card")

SOURCE = Path(__file__).parents[1] / "kernels" / "races.cu"
MODES = [(True, 0), (False, 0), (True, 1)]  # late, seed

# number in races.cu: what the report says of the two accesses, either of which may come second
CASES = {
    0: (r"a load by .* which .* stored|a store by .* which .* loaded",),
    1: (r"a load by .* which .* stored|a store by .* which .* loaded",),
    2: (r"a load by .* which .* stored|a store by .* which .* loaded",),
    3: (r"a store by .* which .* stored",),
    4: (r"a store by .* which .* stored",),
    5: (r"a store by .* which .* stored",),
    6: (r"warp [01] ", r"warp [23] "),
    7: (r"cp\.async of block",),
    8: (r"cp\.async of block",),
    9: (r"atomic", r"store"),
    11: (r"the copies that the mbarrier at shared offset 1024 counts", r"load"),
    12: (r"the copies that the mbarrier at shared offset 1024 counts", r"a load by .* warp 1 |warp 1 .* loaded"),
    13: (r"warp 0 .*load|load.* warp 0", r"warp 1 .*store|store.* warp 1"),
    14: (r"a store by .* which bulk adds of .* loaded",),
}


class Args(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p)]


def run(entry: str, right: bool, *, case: int = 0, threads: int = 128, blocks: int = 1, mode=MODES[0], races=True):
    x, y = torch.ones(256), torch.zeros(256)
    constants = (("kCase", case), ("kRight", right))
    spec = KernelSpec("races", str(SOURCE), entry, constants, threads=threads, shared_bytes=4096)
    args, late, seed = [Args(x.data_ptr(), y.data_ptr())], *mode
    known = {"x": x, "y": y}
    emulator.launch(spec, (blocks, 1, 1), args, known, late=late, seed=seed, cluster=blocks, races=races)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_nothing_orders_is_reported(case, mode):
    run("races", True, case=case, mode=mode)
    with pytest.raises(EmulatorError, match=r"race: .* and nothing orders the two") as caught:
        run("races", False, case=case, mode=mode)
    first_line = str(caught.value).splitlines()[0]
    for words in CASES[case]:
        assert re.search(words, first_line), first_line
    assert str(caught.value).count("races.cu:") == 2, "the lines of both"


def test_a_barrier_that_may_not_have_been_initialised():
    run("races", True, case=10)
    with pytest.raises(EmulatorError, match=r"race: the mbarrier at shared offset 1024 is used, which .* initialised"):
        run("races", False, case=10)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_between_the_blocks_of_a_cluster(mode):
    run("races_in_cluster", True, threads=32, blocks=2, mode=mode)
    with pytest.raises(EmulatorError, match=r"race: .* the copies that the mbarrier .* counts"):
        run("races_in_cluster", False, threads=32, blocks=2, mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_under_a_product(mode):
    run("races_of_wgmma", True, mode=mode)
    with pytest.raises(EmulatorError, match=r"race: .* the wgmma of the warp of "):
        run("races_of_wgmma", False, mode=mode)


def test_only_where_asked_for():
    run("races", False, case=0, races=None)
    with emulator.watching_races(), pytest.raises(EmulatorError, match="race"):
        run("races", False, case=0, races=None)
    run("races", False, case=0, races=None)


# ---- the product's kernels -------------------------------------------------------------------------------------------
def jumps() -> None:
    """Logits that rise so far that S is computed again, in blocks of keys whose places others take."""
    q, k, v, options = lazy_cases.known_scores("128", lazy_cases.jumps_at((520, 700), 900, 60))
    forward_cases.check(q, k, v, **options)


def listed() -> None:
    """Blocks of keys of which rows see a part."""
    q, k, v = (forward_cases.normal(1, n, 1, 64, seed=n) for n in (100, 1000, 1001))
    blocks = torch.tensor([[n % 3 > 0 for n in range(63)]])
    sizes = {"seqlen_q": 100, "seqlen_k": 1000, "block_q": 128, "block_k": 16}
    forward_cases.check(q, k, v[:, :1000], schedule=BlockSchedule.from_blocks(blocks, **sizes), window=(940, 0))


def wide() -> None:
    mla_cases.Problem((330, 1, 65), heads=64).check(splitting=mla_cases.LONG)


def codes() -> None:
    problem = mla_cases.Problem((330, 65), heads=8, sizes=mla_cases.DEEPSEEK, page_size=16, stored="fp8")
    problem.check(splitting=mla_cases.LONG)


def widened_codes() -> None:
    with mla_cases.widened():
        codes()


def gradients() -> None:
    document = torch.tensor([0] * 70 + [1] * 200 + [2] * 60, dtype=torch.int32)
    q, k, v = (forward_cases.normal(1, 330, *sizes, seed=n) for n, sizes in enumerate([(2, 192), (1, 192), (1, 128)]))
    backward_cases.dense(q, k, v, mask=lambda b, h, q, k: document[q] == document[k], causal=True)


# name: (source, its entry, file, old, new, problem)
PLANTED = {
    "K is given back while lanes compute S again": (
        "prefill/forward.cu", "forward", "prefill/forward.cu", "ptx::sync_warp();  // all lanes have read K", "// K",
        jumps,
    ),
    "K is given back while lanes read which keys it holds": (
        "prefill/forward.cu", "forward", "prefill/forward.cu", "if constexpr (kListed) ptx::sync_warp();", "", listed,
    ),
    "weights take the place of keys that other warps read": (
        "mla/mla_decode.cu", "mla_decode", "mla/wide.cuh", "group_sync();  // no warp reads", "// no warp reads", wide,
    ),
    "codes are widened over keys that products read": (
        "mla/mla_decode.cu", "mla_decode", "mla/widen.cuh", "                    now.wait_free(panel + 1);\n", "",
        widened_codes,
    ),
    "weights are told of before all lanes have left theirs": (
        "mla/mla_decode.cu", "mla_decode", "mla/raw.cuh", "ptx::sync_warp();  // P is there", "// P", codes,
    ),
    "values are given back while lanes read them": (
        "mla/mla_decode.cu", "mla_decode", "mla/raw.cuh", "ptx::sync_warp();  // V has been read", "// V", codes,
    ),
    "a row of Q is read before it has become halves": (
        "mla/mla_decode.cu", "mla_decode", "mla/raw.cuh", "all_sync();  // Q is halves", "// Q", codes,
    ),
    "dO is given back while lanes read their bits": (
        "backward/backward.cu", "backward", "backward/backward.cu", "if constexpr (kListed) ptx::sync_warp();", "",
        gradients,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_reported(name, tmp_path):
    source, entry, file, old, new, problem = PLANTED[name]
    with emulator.watching_races():
        problem()
        with with_source(entry, planted(source, file, old, new, tmp_path)), pytest.raises(EmulatorError) as caught:
            problem()
    assert re.search("race: .* and nothing orders the two", str(caught.value)), str(caught.value)
