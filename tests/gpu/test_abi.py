"""The ctypes structures that kernels are given lie as the C++ structures they mirror: sizes and every offset."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tilewise import emulator
from tilewise.compiler.spec import Constant, KernelSpec
from tilewise.gpu import (
    abi,
    append,
    backward_abi,
    backward_hopper,
    backward_lists,
    backward_mma,
    backward_picks,
    choice,
    decode_kernels,
    merge_rows,
    mla_kernels,
    mla_mma,
    pattern,
    plan_step,
    planner,
    prefill,
    schedules,
    widen,
)
from tilewise.learn import ladder
from tilewise.plan import cost, items, ranges, schedule_select
from tilewise.plan.choice import ChoicePlan
from tilewise.scores import Scores

RAGGED = (("Index", "int"), ("kTileQ", 128), ("kTileKv", 128), ("kPack", 1))
FOLD = pattern.fold_spec(pattern.Pattern(64, 64), 128, 64, 1, False).constants
KINDS = (("Function", "NoFunction"),)
DECODE = (("kSelected", False), abi.DECODE_RULES[0])
BACKWARD_KIND = backward_hopper.Kind(torch.bfloat16, 192, Scores(), False, value_dim=128)
BACKWARD_TILING = BACKWARD_KIND.tiling
BEFORE, BACKWARD, _ = (spec.constants for spec in backward_hopper.specs_of(BACKWARD_KIND))
MMA = backward_mma.specs("sm_89")[1]
MLA_MMA = mla_mma.specs("sm_89")[-1]
LIST = backward_hopper.list_spec(torch.int32, False).constants
PAIRS = backward_lists.pairs_spec("", 64, 128, False)
APPEND, WIDEN, MERGE_ROWS = (room.specs()[0].constants for room in (append, widen, merge_rows))
SELECT, SCATTER = (spec.constants for spec in (schedules.specs()[0], schedules.scatter_spec(torch.int32)))
INDEX_SCORES, INDEX_SELECT = choice.scores_spec(torch.bfloat16, 17, 40), choice.SELECT_SPEC
CHOICE = ChoicePlan((0,), np.array([3]), np.array([30]), np.zeros((1, 2), np.int32), 16, 8, 0)
(TILES,) = CHOICE.tiles(64, 1000)
# The structures' source, the constants that it needs, and its structures: C++ name -> mirror
SOURCES: dict[str, tuple[tuple[tuple[str, Constant], ...], dict[str, type[ctypes.Structure]]]] = {
    "common/args.cuh": ((), {"Strides": abi.Strides, "Divisor": abi.Divisor}),
    "common/scores.cuh": ((), {"Scores": abi.ScoreArgs}),
    "common/dropout.cuh": ((), {"Dropout": abi.DropoutArgs}),
    "prefill/ragged.cu": (
        RAGGED,
        {
            "Descale": abi.Descale,
            "TileLists": abi.TileListArgs,
            "ForwardArgs": abi.ForwardArgs,
            "RaggedArgs": abi.RaggedArgs,
        },
    ),
    "prefill/fold.cu": (FOLD, {"FoldArgs": abi.FoldArgs}),
    "prefill/kinds.cu": (KINDS, {"KindsArgs": abi.KindsArgs}),
    "common/functions.cuh": ((), {"NoFunction": abi.NoFunctionArgs}),
    "decode/work.cuh": (DECODE, {"Paged": abi.Paged, "DecodeArgs": abi.DecodeArgs}),
    "mla/work.cuh": (mla_kernels.specs()[0].constants, {"MlaArgs": abi.MlaArgs}),
    "decode/select.cu": ((), {"SelectArgs": abi.SelectArgs}),
    "decode/small_args.cuh": ((), {"SmallSequence": abi.SmallSequence, "SmallArgs": abi.SmallArgs}),
    "decode/plan_work.cuh": (planner.specs()[0].constants, {"PlanArgs": abi.PlanArgs, "PlanRoom": abi.PlanRoom}),
    "decode/plan_step.cu": ((), {"StageArgs": abi.StageArgs}),
    "common/append.cu": (
        APPEND,
        {"AppendSource": abi.Source, "AppendStore": abi.Store, "AppendArgs": abi.AppendArgs},
    ),
    "common/widen.cu": (WIDEN, {"WidenStore": widen.WidenStore, "WidenArgs": widen.WidenArgs}),
    "common/merge_rows.cu": (MERGE_ROWS, {"MergeRowsArgs": merge_rows.MergeRowsArgs}),
    "common/copy_pages.cu": ((), {"CopyPart": abi.CopyPart, "CopyArgs": abi.CopyArgs}),
    "common/schedule_pack.cu": ((), {"PackArgs": schedules.PackArgs}),
    "common/schedule_scatter.cu": (SCATTER, {"ScatterArgs": schedules.ScatterArgs}),
    "common/schedule_lists.cu": ((), {"ListArgs": schedules.ListArgs}),
    "common/schedule_transpose.cu": ((), {"TransposeArgs": schedules.TransposeArgs}),
    "common/schedule_select.cu": (SELECT, {"SelectArgs": schedules.SelectArgs}),
    "backward/arguments.cuh": (
        (),
        {
            "BackwardArgs": backward_abi.BackwardArgs,
            "KeyTile": backward_abi.KeyTileArgs,
            "QueryLists": backward_abi.QueryListArgs,
        },
    ),
    "backward/picks.cuh": (KINDS, {"Picks": backward_picks.PickArgs}),
    "backward/list.cu": (LIST, {"KeyListArgs": backward_abi.KeyListArgs}),
    "backward/pairs.cu": (PAIRS.constants, {"PairArgs": backward_abi.PairArgs}),
    "index/args.cuh": (
        (),
        {
            "IndexTable": choice.IndexTable,
            "IndexScoresArgs": choice.IndexScoresArgs,
            "IndexSelectArgs": choice.IndexSelectArgs,
        },
    ),
    "learn/kernels/args.cuh": ((), {"AttentionArgs": ladder.AttentionArgs}),
}
# Constants that Python repeats: source -> C++ expression -> value
CONSTANTS = {
    "prefill/ragged.cu": {
        "kTileWords": abi.TILE_WORDS,
        "kListHeader": abi.LIST_HEADER,
        "kBuckets": prefill.BUCKETS,
        "kFar": abi.FAR,
        "kSlab": pattern.SLAB,
        "kNoUnit": pattern.MAX_UNITS,
    },
    "prefill/fold.cu": {"kThreads": pattern.FOLD_THREADS, "kAtKinds + kKindBytes": pattern.FOLD_SHARED},
    "prefill/kinds.cu": {"kThreads": pattern.FOLD_THREADS, "kKindBytes": pattern.KIND_SHARED},
    "decode/select.cu": {"kThreads": decode_kernels.SELECT_SPEC.threads},
    "decode/small_args.cuh": {"kMostSmall": abi.MOST_SMALL},
    **{
        f"common/schedule_{name}.cu": {"kThreads": schedules.THREADS}
        for name in ("pack", "scatter", "lists", "transpose")
    },
    "tile/hopper.cuh": {"kPanel": abi.PANEL, "kPanelRowBytes": abi.PANEL_BYTES},
    "common/copy_pages.cu": {"kMaxParts": abi.MAX_PARTS},
    "backward/arguments.cuh": {
        "kKeyTileWords": backward_abi.KEY_TILE_WORDS,
        "kKeyListHeader": backward_abi.KEY_LIST_HEADER,
    },
    "backward/list.cu": {"kThreads": backward_hopper.LIST_THREADS, "kBuckets": backward_hopper.BUCKETS},
    "backward/pairs.cu": {"kThreads": PAIRS.threads, "kPairBytes": PAIRS.shared_bytes},
    "backward/layout.cuh": {
        "kSharedBytes": BACKWARD_TILING.shared_bytes(),
        "kTileKv": BACKWARD_TILING.tile_kv,
        "kConsumers": backward_hopper.CONSUMERS,
    },
    "backward/mma_layout.cuh": {"kSharedBytes": MMA.shared_bytes, "kThreads": MMA.threads},
    "mla/mma_layout.cuh": {"kSharedBytes": MLA_MMA.shared_bytes, "kComputing": MLA_MMA.threads},
    "backward/ends.cu": {
        "kBeforeThreads": backward_hopper.BEFORE_THREADS,
        "kAfterThreads": backward_hopper.AFTER_THREADS,
        "kShares": backward_hopper.CONSUMERS,
    },
    **{
        f"common/{name}.cu": {"kThreads": append.THREADS, "kChannels": append.CHANNELS}
        for name in ("append", "widen", "merge_rows")
    },
    "common/schedule_select.cu": {
        "kThreads": schedules.specs()[0].threads,
        "kShareBits": schedule_select.SHARE_BITS,
        "kWeightBits": schedule_select.WEIGHT_BITS,
    },
    "index/args.cuh": {"sizeof(ScoreTile)": 4 * TILES.tiles.shape[1], "sizeof(ChoosingRow)": 4 * TILES.rows.shape[1]},
    "index/scores.cu": {
        "kKeys": choice.KEYS,
        "kThreads": INDEX_SCORES.threads,
        "stage_at(kStages)": INDEX_SCORES.shared_bytes,
        "kScanBytes": choice.SCAN_BYTES,
    },
    "index/select.cu": {"kAtFound + 8": choice.SELECT_SPEC.shared_bytes},
    "decode/plan_step.cu": {"kStageThreads": plan_step.THREADS, "kStepWords": plan_step.STEP_WORDS},
    "decode/plan_work.cuh": {
        "kScanBytes": planner.SCAN_BYTES,
        "kMostKeys": planner.MOST_KEYS,
        "1 << kBinBits": planner.MOST_BINS,
        "kUnit": planner.UNIT,
        "kStepWords": plan_step.STEP_WORDS,
        "kLimits": abi.PLAN_LIMITS,
        "kNoEnd": ranges.FAR,
        "kTileTokens": ranges.TILE_TOKENS,
        "4 * kChainShare": int(4 * cost.CHAIN_SHARE),
        "sizeof(PlanNode)": planner.NODE_BYTES,
        "sizeof(PlanRange)": planner.RANGE_BYTES,
        "int(offsetof(PlanNode, unit)) - 4 * kUnitWord": 0,
        "int(offsetof(PlanNode, tile_unit)) - 4 * kTileUnitWord": 0,
        "int(offsetof(PlanRange, unit)) - 4 * kRangeUnitWord": 0,
        "kPieces + 10 * kStates + 100 * kSlots + 1000 * kRounds + 10000 * kNodes + 100000 * kInTurn": 543210,
    },
    "decode/work.cuh": {
        "kItemWords": items.ITEM_WORDS,
        **{
            f"int(offsetof(DecodeItem, {field})) - 4 * k{field.title().replace('_', '')}Word": 0
            for field in (
                *("sequence", "row", "rows", "caller_head", "table", "start", "stop", "state_fold"),
                *("page", "tail_from", "first_state", "states_before", "grows_from", "piece", "kind", "second_page"),
            )
        },
    },
}


def evaluated(tmp_path, source: str, constants: tuple[tuple[str, Constant], ...], expressions: list[str]) -> list[int]:
    """Integer expressions over what `source` declares, as the emulator's compiler has them."""
    unit = tmp_path / "facts.cu"
    stores = "\n".join(f"    Global<int>{{out}}[{n}] = int({x});" for n, x in enumerate(expressions))
    head = f'#include <cstddef>\n#include "tile/memory.cuh"\n#include "{source}"\n'
    unit.write_text(f'{head}extern "C" __global__ void facts(int* out) {{\n{stores}\n}}\n')
    out = torch.full((len(expressions),), -1, dtype=torch.int32)
    spec = KernelSpec("facts", str(unit), "facts", constants, 1, 0)
    emulator.launch(spec, (1, 1, 1), [ctypes.c_void_p(out.data_ptr())], {"out": out})
    return out.tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_structures_lie_as_the_kernels_have_them(source, tmp_path):
    constants, structures = SOURCES[source]
    wanted: dict[str, int] = {}
    for name, mirror in structures.items():
        wanted[f"sizeof({name})"] = ctypes.sizeof(mirror)
        for field, _ in mirror._fields_:
            place = getattr(mirror, field)
            wanted[f"offsetof({name}, {field})"] = place.offset
            wanted[f"sizeof({name}::{field})"] = place.size
    assert dict(zip(wanted, evaluated(tmp_path, source, constants, list(wanted)), strict=True)) == wanted


def test_every_structure_is_compared():
    mirrors = {mirror for _, structures in SOURCES.values() for mirror in structures.values()}
    everything = (
        *vars(abi).values(),
        *vars(backward_abi).values(),
        *vars(backward_picks).values(),
        *vars(schedules).values(),
        *vars(widen).values(),
        *vars(merge_rows).values(),
        *vars(choice).values(),
    )
    declared = {x for x in everything if isinstance(x, type) and issubclass(x, ctypes.Structure)}
    assert declared <= mirrors


@pytest.mark.parametrize("source", CONSTANTS)
def test_constants_are_the_kernels(source, tmp_path):
    wanted = CONSTANTS[source]
    apart = {
        "backward/layout.cuh": BACKWARD,
        "backward/ends.cu": BEFORE,
        "backward/mma_layout.cuh": MMA.constants,
        "mla/mma_layout.cuh": MLA_MMA.constants,
        "index/scores.cu": INDEX_SCORES.constants,
        "index/select.cu": INDEX_SELECT.constants,
    }
    constants = SOURCES[source][0] if source in SOURCES else apart.get(source, ())
    assert dict(zip(wanted, evaluated(tmp_path, source, constants, list(wanted)), strict=True)) == wanted


def test_scores_in_base_2():
    scores = abi.ScoreArgs.of(Scores((None, 0), 0.25, 30.0))
    assert (scores.left, scores.right) == (abi.FAR, 0)
    assert scores.scale_log2 == pytest.approx(0.25 * abi.LOG2E, rel=1e-6)
    # softcap · tanh(s · scale / softcap) in base 2; the kernels' tanh takes 2 log2 e times its argument
    assert scores.softcap_in == pytest.approx(2 * abi.LOG2E * 0.25 / 30, rel=1e-6)
    assert scores.softcap_out == pytest.approx(30 * abi.LOG2E, rel=1e-6)
    plain = abi.ScoreArgs.of(Scores((5, abi.FAR + 1), 1.0, 0.0))
    assert (plain.left, plain.right, plain.softcap_in, plain.softcap_out) == (5, abi.FAR, 0.0, 0.0)
    assert plain.sinks is None
    assert plain.slopes is None
