"""Missing fences and missing sync_warp in the product's kernels: nothing but the order of accesses tells them.

Results may be right all the same, on a card too, until they are not. So a bug is planted where each fence stands, and
the emulator must report it, or, where lanes of a warp run apart, at least come to a wrong number in some order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import decode_cases
import forward_cases
import mla_cases
import pytest
import torch
from oracle import qkv

from tilewise import BlockSchedule, attention, emulator
from tilewise.compiler.spec import headers, locate
from tilewise.emulator import EmulatorError
from tilewise.learn import ladder

pytestmark = pytest.mark.usefixtures("own_card")

RUNGS = {rung.name: rung for rung in ladder.RUNGS}
FORWARD, PRODUCERS = "prefill/forward.cu", "prefill/producers.cuh"
FENCE = "ptx::fence_async_proxy();"


def planted(source: str, file: str, old: str, new: str, folder: Path) -> Path:
    """A copy of `source` with one place of `file` changed: a file that it includes, directly or not, or itself."""
    texts = {source: locate(source).read_text()}
    texts |= headers(texts[source])
    assert texts[file].count(old) == 1, f"{file} has {old!r} {texts[file].count(old)} times: mend the planted bug"
    texts[file] = texts[file].replace(old, new)
    changed = {file}
    while more := {
        path for path, text in texts.items() if path not in changed and any(f'"{c}"' in text for c in changed)
    }:
        changed |= more
    for path in changed:
        text = re.sub(r'"([^"\n]+)"', lambda m: f'"{folder / m[1]}"' if m[1] in changed else m[0], texts[path])
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder / source


@contextmanager
def with_source(entry: str, source: Path):
    """Kernels of this entry are made of another source."""
    run = emulator.launch

    def launch(spec, *args, **options):
        return run(replace(spec, source=str(source)) if spec.entry == entry else spec, *args, **options)

    with mock.patch.object(emulator, "launch", launch):
        yield


def found(check: Callable[[tuple[bool, int]], None], modes=forward_cases.MODES) -> str:
    """What the emulator reports or the oracle finds wrong, over both landing modes and several orders; or nothing."""
    for mode in modes:
        try:
            check(mode)
        except (EmulatorError, AssertionError) as error:
            return str(error)
    return ""


# ---- the forward -----------------------------------------------------------------------------------------------------
def forward(mode, *, head_dim=64, fp8=False, nk=70, lengths=False) -> None:
    """lengths: of the blocks of a schedule, no block of which is whole."""
    q, k, v = (
        forward_cases.normal(1, 130, 1, head_dim, seed=1),
        *(forward_cases.normal(1, nk, 1, head_dim, seed=s) for s in (2, 3)),
    )
    if not fp8:
        sizes = {"seqlen_q": 130, "seqlen_k": nk, "block_q": 64, "block_k": 64}
        short = {"lengths_k": torch.tensor([50, 3])} if lengths else {}
        schedule = BlockSchedule.from_blocks(torch.ones(3, 2, dtype=torch.bool), **sizes, **short) if lengths else None
        forward_cases.check(q, k, v, schedule=schedule, mode=mode)
        return
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    with forward_cases.emulated(*mode), forward_cases.nan_in_new_memory():
        o = attention(q, k, v, backend="emulator")
    assert o.isfinite().all(), "not a number"


# name: (file, old, new, problem, words of the report)
FORWARD_BUGS = {
    "zeros in V's tail are not fenced": (
        FORWARD, f"clear_rows(valid, kTileKv);\n        {FENCE}", "clear_rows(valid, kTileKv);", {},
        ("wgmma of 4 bytes", "without a fence_async_proxy"),
    ),
    "zeros past the lengths of blocks are not fenced": (
        FORWARD, f"}}\n        {FENCE}\n        ptx::barrier_sync", "}\n        ptx::barrier_sync", {"lengths": True},
        ("wgmma of 4 bytes", "without a fence_async_proxy"),
    ),
    "O is not fenced": (
        FORWARD, f"{FENCE}\n            ptx::sync_warp();", "ptx::sync_warp();", {},
        ("TMA store of 4 bytes", "without a fence_async_proxy"),
    ),
    "O arrives before all lanes have stored it": (
        FORWARD, f"{FENCE}\n            ptx::sync_warp();", FENCE, {}, ("TMA store of 4 bytes",),
    ),
    "copies in place of TMA are not fenced": (
        PRODUCERS, f"{FENCE}\n        sync();", "sync();", {"head_dim": 33},
        ("wgmma of 4 bytes", "without a fence_async_proxy"),
    ),
    "transposed V is not fenced": (
        PRODUCERS, f"{FENCE}\n        ptx::sync_warp();", "ptx::sync_warp();", {"fp8": True},
        ("wgmma of 4 bytes", "without a fence_async_proxy"),
    ),
    "transposed V arrives before all lanes have stored it": (
        PRODUCERS, f"{FENCE}\n        ptx::sync_warp();", FENCE, {"fp8": True}, ("wgmma of 4 bytes",),
    ),
    "S is not fenced": (
        FORWARD, "my_turn();\n        ptx::wgmma_fence();", "my_turn();", {}, ("without a wgmma_fence",),
    ),
    "P is not fenced": (
        FORWARD, "pipes.v.wait(v_turn);\n        ptx::wgmma_fence();", "pipes.v.wait(v_turn);", {},
        ("without a wgmma_fence",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD_BUGS)
def test_forward_without_a_fence(name, tmp_path):
    file, old, new, problem, words = FORWARD_BUGS[name]
    with with_source("forward", planted(FORWARD, file, old, new, tmp_path)):
        report = found(lambda mode: forward(mode, **problem))
    print(f"{name}: {report}")
    assert all(word in report for word in words), report
    assert re.search(r"\n  in block .*thread \(.*\n  at .*(forward\.cu|producers\.cuh):\d+", report), report


@pytest.mark.parametrize("problem", [{}, {"head_dim": 33}, {"fp8": True}, {"lengths": True}], ids=str)
def test_the_forward_itself_is_right(problem):
    assert found(lambda mode: forward(mode, **problem)) == ""


# ---- decode ----------------------------------------------------------------------------------------------------------
def shared_node(mode) -> None:
    """Rows over a node of 90 tokens, whose second tile has an end."""
    cache, seqs = decode_cases.make_tree([1, 7], [90, 19])
    decode_cases.check(cache, seqs, share=True, mode=mode)


def streams(mode, lengths=(150, 70, 33), **options) -> None:
    cache, seqs = decode_cases.make_cache(lengths, **options)
    decode_cases.check(cache, seqs, mode=mode)


def latent(mode, page_size=24, stored="") -> None:
    """Rows that are keys and values at once, which come one by one from pages of this size."""
    late, seed = mode
    problem = mla_cases.Problem((150, 70), sizes=mla_cases.DEEPSEEK, page_size=page_size, stored=stored)
    with mla_cases.widened():
        problem.check(late=late, seed=seed)


def windowed(mode):
    """Many short spans, so that copies take the places that zeros were written to."""
    late, seed = mode
    problem = mla_cases.Problem([170] * 40, heads=8, sizes=mla_cases.DEEPSEEK, page_size=16, stored="fp8")
    problem.check(window=30, late=late, seed=seed)


READERS = "if (kGather && (!kWidens || panel >= kValuePanels)) ptx::fence_async_proxy();"

# name: (source, its entry, file, old, new, problem, words of the report)
DECODE_BUGS = {
    "rows that are copied one by one are not fenced by their readers": (
        "mla/mla_decode.cu", "mla_decode", "mla/layout.cuh", READERS, "", latent,
        ("wgmma of 4 bytes", "which cp.async brought", "without a fence_async_proxy"),
    ),
    "channels beside codes are not fenced by their readers": (
        "mla/mla_decode.cu", "mla_decode", "mla/layout.cuh", READERS, "", lambda mode: latent(mode, stored="fp8"),
        ("wgmma of 4 bytes", "which cp.async brought", "without a fence_async_proxy"),
    ),
    "widened codes are not fenced": (
        "mla/mla_decode.cu", "mla_decode", "mla/widen.cuh", FENCE, "", lambda mode: latent(mode, 16, "fp8"),
        ("wgmma of 4 bytes", "without a fence_async_proxy"),
    ),
    "zeros around a span of latent rows are not fenced": (
        "mla/mla_decode.cu", "mla_decode", "mla/raw.cuh", FENCE, "", windowed,
        ("TMA load of 4 bytes", "without a fence_async_proxy"),
    ),
    "zeros around a tile's span are not fenced": (
        "decode/decode_tree.cu", "decode_tree", "decode/tile.cuh",
        f"}}\n        {FENCE}\n        ptx::barrier_sync(kGroupBarriers", "}\n        ptx::barrier_sync(kGroupBarriers",
        shared_node,
        ("wgmma of 4 bytes", "without a fence_async_proxy"),
    ),
    "zeros around a chunk's span are not fenced": (
        "decode/decode.cu", "decode", "decode/load.cuh", f"if constexpr (kTma) {FENCE}", "",
        lambda mode: streams(mode, [9] * 80),  # items enough that a chunk takes the place of an earlier one's zeros
        ("TMA load of 4 bytes", "without a fence_async_proxy"),
    ),
    "a chunk is asked for while lanes read the one before": (
        "decode/decode.cu", "decode", "decode/warps.cuh", "ptx::sync_warp();  // all lanes", "// all lanes", streams,
        ("TMA load over 16 bytes", "without a sync_warp"),
    ),
    "a chunk is copied over what lanes read": (
        "decode/decode.cu", "decode", "decode/warps.cuh", "ptx::sync_warp();  // all lanes", "// all lanes",
        lambda mode: streams(mode, page_size=3), ("cp.async over 16 bytes", "without a sync_warp"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODE_BUGS)
def test_decode_without_a_fence(name, tmp_path):
    source, entry, file, old, new, problem, words = DECODE_BUGS[name]
    assert found(problem, forward_cases.MODES[:1]) == ""
    with with_source(entry, planted(source, file, old, new, tmp_path)):
        report = found(problem)
    print(f"{name}: {report}")
    assert all(word in report for word in words), report
    assert re.search(r"\n  in block .*thread \(.*\n  at .*\.cuh:\d+", report), report


# ---- rungs of the ladder ---------------------------------------------------------------------------------------------
HOPPER = "learn/kernels/20_hopper.cu"
RUNG_BUGS = {
    "barriers are not fenced": ("        ptx::fence_mbarrier_init();\n", "without a fence_mbarrier_init"),
    "S is not fenced": (
        "        ptx::wgmma_fence();\n        warpgroup::mma_qk", "without a wgmma_fence",
    ),
    "P is not fenced": ("        ptx::wgmma_fence();\n        warpgroup::mma_pv", "without a wgmma_fence"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNG_BUGS)
def test_hopper_without_a_fence(name, tmp_path):
    old, words = RUNG_BUGS[name]
    rest = old.splitlines(keepends=True)[1:]
    rung = replace(RUNGS["hopper"], source=str(planted(HOPPER, HOPPER, old, "".join(rest), tmp_path)))
    with pytest.raises(EmulatorError, match=words):
        ladder.run(rung, *qkv(1, 70, 90, 1, 1, 64, dtype=torch.bfloat16))
