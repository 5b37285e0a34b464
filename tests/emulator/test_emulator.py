"""The emulator finds what a card would not forgive: planted bugs in real kernels, each caught, each with its report.

A mutation is a line of a kernel changed. Some bugs stop the launch with a report (deadlock, out of bounds, a wrong use
of a barrier), others come out as NaN or a wrong number: in late or early mode, under one order of threads or another.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from oracle import qkv

from tilewise import emulator, reference
from tilewise.compiler.spec import locate
from tilewise.emulator import EmulatorError
from tilewise.learn import ladder

RUNGS = {rung.name: rung for rung in ladder.RUNGS}


def outcome(rung, *, seqlen_q=70, seqlen_k=600, causal=True, head_dim=64, heads=(2, 1)) -> str:
    """The word right, or what the emulator or the oracle finds, over both landing modes and several orders."""
    dtype = torch.bfloat16 if torch.bfloat16 in rung.dtypes else rung.dtypes[0]
    q, k, v = qkv(1, seqlen_q, seqlen_k, *heads, head_dim, dtype=dtype)
    exact, honest = reference.attention(q, k, v, causal=causal), reference.baseline(q, k, v, causal=causal)
    for late, seed in ((True, 0), (False, 0), (True, 7), (False, 3)):
        try:
            o, lse, _ = ladder.run(rung, q, k, v, causal=causal, late=late, seed=seed)
        except EmulatorError as error:
            return str(error)
        for name, got, want, base in (("o", o, exact[0], honest[0]), ("lse", lse, exact[1], honest[1])):
            verdict = reference.judge(got, want, base, lse=exact[1] if name == "o" else None)
            if not verdict.ok:
                return f"wrong {name}: {verdict.reason}"
    return "right"


def mutant(rung, file: str, old: str, new: str, tmp_path):
    """The rung with one place of one file changed, everything it includes beside it."""
    root = tmp_path / "kernels"
    source = locate(file).read_text()
    assert source.count(old) >= 1, f"{file} no longer has {old!r}: mend the mutation"
    changed = root / file
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(source.replace(old, new, 1))
    kernel = locate(f"learn/kernels/{rung.source}")
    if file == f"learn/kernels/{rung.source}":
        return replace(rung, source=str(changed))
    # A changed header: the kernel includes it by its absolute path instead.
    copy = root / "learn/kernels" / rung.source
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(kernel.read_text().replace(f'"{file}"', f'"{changed}"'))
    return replace(rung, source=str(copy))


RING, PLAIN, NAIVE = "learn/kernels/21_hopper_ring.cu", "learn/kernels/20_hopper.cu", "learn/kernels/04_flash_naive.cu"
HEADER = "tile/hopper.cuh"
ARRIVE = "        k_ring.release(turn);\n"
# name: (rung, file, old, new, words of which the report has one)
MUTATIONS = {
    "missing wait for a full stage": (
        "hopper_ring", RING, "k_ring.wait(turn);", "", ("wrong", "more arrivals"),
    ),
    "missing wait for wgmma": (
        "hopper", PLAIN, "ptx::wgmma_wait<0>();\n        if (j", "if (j", ("wrong",),
    ),
    "missing arrive": ("hopper_ring", RING, ARRIVE, "", ("deadlock",)),
    "missing wait for an empty stage": (
        "hopper_ring", HEADER, "ptx::mbarrier_wait(empty + 8 * turn.stage, turn.lap ^ 1);", "",
        ("wrong", "more arrivals"),
    ),
    "wrong parity": (
        "hopper_ring", HEADER, "mbarrier_wait(full_at(turn), turn.lap);", "mbarrier_wait(full_at(turn), turn.lap ^ 1);",
        ("wrong", "deadlock", "more arrivals"),
    ),
    "wrong swizzle": ("hopper", HEADER, "<< 32 | 1ull << 62", "<< 32 | 2ull << 62", ("wrong", "shared memory access")),
    "wrong descriptor stride": (
        "hopper", HEADER, "kRows * kPanelRowBytes, kEightBytes", "kRows * kPanelRowBytes, kEightBytes / 2",
        ("wrong",),
    ),
    "off-by-one tile": ("hopper", PLAIN, "j < tiles.end", "j < tiles.end - 1", ("wrong",)),
    "missing barrier": ("flash_naive", NAIVE, "        ptx::sync_threads();\n\n", "", ("wrong",)),
    "missing barrier before the next tile": (
        "hopper", PLAIN, "ptx::sync_threads();  // all", "// all", ("wrong", "more arrivals", "deadlock"),
    ),
    "read past the tensor": (
        "flash_naive", NAIVE, "if (key0 + thread < args.seqlen_k)", "if (true)", ("past the end of",),
    ),
    "write past the tensor": (
        "flash_naive", NAIVE, "if (valid) head.gLse", "head.gLse", ("past the end of lse", "wrong"),
    ),
    "uninitialised shared read": (
        "flash_naive", NAIVE, "sV[thread * kHeadDim + d] = to_float", "if (d) sV[thread * kHeadDim + d] = to_float",
        ("NaN",),
    ),
    "missing mask": ("hopper", PLAIN, "if (j >= tiles.full) warp::mask", "if (false) warp::mask", ("wrong",)),
    "wrong lane mapping": (
        "hopper", PLAIN, "threadIdx.x / 32 * 16;  // the first", "threadIdx.x / 16 * 16;  // the first",
        ("wrong", "past"),
    ),
    "too many bytes expected": (
        "hopper", PLAIN, "mbarrier_arrive_expect(k_full, kKvBytes)", "mbarrier_arrive_expect(k_full, kKvBytes + 16)",
        ("deadlock",),
    ),
    "barrier never initialised": (
        "hopper", PLAIN, "        ptx::mbarrier_init(v_full, 1);\n", "", ("never initialised",),
    ),
    "shared memory past the block's": (
        "hopper", PLAIN, "q_full = sV + kKvBytes", "q_full = sV + kKvBytes + 65536", ("shared memory access",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_caught(name, tmp_path):
    rung, file, old, new, words = MUTATIONS[name]
    found = outcome(mutant(RUNGS[rung], file, old, new, tmp_path))
    print(f"{name}: {found}")  # pytest -s shows what the reports look like
    assert any(word in found for word in words), found


@pytest.mark.parametrize("name", ["flash_naive", "hopper", "hopper_ring"])
def test_the_kernels_the_bugs_are_planted_in_are_right(name):
    assert outcome(RUNGS[name]) == "right"


def test_a_report_names_the_thread_and_the_line(tmp_path):
    broken = mutant(RUNGS["flash_naive"], NAIVE, "if (key0 + thread < args.seqlen_k)", "if (true)", tmp_path)
    found = outcome(broken, causal=False)
    assert "bytes past the end of" in found
    assert "thread (" in found
    line = (tmp_path / "kernels" / NAIVE).read_text().splitlines()
    at = int(found.rsplit("04_flash_naive.cu:", 1)[1].split()[0].rstrip(","))
    assert "gK[" in line[at - 1] or "gV[" in line[at - 1]


def test_a_deadlock_report_says_what_each_warp_waits_for(tmp_path):
    found = outcome(mutant(RUNGS["hopper_ring"], RING, ARRIVE, "", tmp_path))
    assert "deadlock: no thread can go on" in found
    assert "waiting on mbarrier at shared offset" in found
    assert "8 of 8 arrivals" in found


def test_a_kernel_that_does_not_compile_says_where(tmp_path):
    broken = mutant(RUNGS["flash_naive"], NAIVE, "float row_max", "no_such_thing row_max", tmp_path)
    with pytest.raises(EmulatorError, match=r"04_flash_naive.cu:\d+.*no_such_thing"):
        ladder.run(broken, *qkv(1, 4, 4, 1, 1, 32))


def test_the_order_of_threads_does_not_change_a_right_kernel():
    q, k, v = qkv(1, 70, 90, 2, 2, 64, dtype=torch.bfloat16)
    results = [
        ladder.run(RUNGS["hopper_ring"], q, k, v, seed=seed, late=late)[0] for seed in (0, 1, 2) for late in (0, 1)
    ]
    assert all(torch.equal(results[0], other) for other in results)


def test_counters_count():
    q, k, v = qkv(1, 32, 64, 1, 1, 32)
    counters = ladder.run(RUNGS["flash_naive"], q, k, v, count=True)[2]
    assert counters is not None
    assert counters.scalar_flops == 2 * 2 * 32 * 64 * 32  # two products, multiply and add
    assert counters.exponentials == 32 * (64 + 2)  # a key and a correction for each of two tiles
    assert counters.tensor_flops == 0
    assert counters.sectors_per_request > 16  # one thread a row: every lane its own sector
    assert counters.barriers == 32 * 2 * 2
    q, k, v = qkv(1, 64, 128, 1, 1, 64, dtype=torch.bfloat16)
    counters = ladder.run(RUNGS["hopper"], q, k, v, count=True)[2]
    assert counters is not None
    assert counters.tensor_flops == 2 * 2 * 64 * 128 * 64
    assert counters.async_bytes == (64 + 2 * 128) * 64 * 2
    assert counters.matrix_requests == 0


def test_nan_in_unused_memory_is_not_read():
    q, k, v = qkv(1, 33, 65, 2, 1, 64, dtype=torch.bfloat16)
    wide = torch.full((1, 80, 3, 64), math.nan, dtype=torch.bfloat16)
    wide[:, :65, 1:2] = k
    exact = reference.attention(q, k, v)
    o, _, _ = ladder.run(RUNGS["hopper"], q, wide[:, :65, 1:2], v)
    assert reference.judge(o, exact[0], reference.baseline(q, k, v)[0], lse=exact[1]).ok


def test_there_is_a_compiler():
    assert emulator.compiler()
