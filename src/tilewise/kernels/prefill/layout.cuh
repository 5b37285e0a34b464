// Where everything lies in the shared memory of the Hopper forward, and the pipes between its roles. forward.cu says
// what the constants mean.
#pragma once
#include "prefill/blocks.cuh"
#include "tile/hopper.cuh"
#include "tile/tiles.cuh"

// Where inputs are FP8, a warpgroup of its own transposes V after it was loaded.
constexpr int kConsumers = kTileQ / 64, kGroups = kConsumers + (kFp8 ? 2 : 1);  // warpgroups
constexpr int kThreads = 128 * kGroups, kTransposers = 4;                       // kTransposers: warps
constexpr int kLoaders = kTma ? 32 : 64;  // threads: the first warp, or the first two
// Of blocks with one consumer a multiprocessor holds two, whose products and softmaxes overlap.
constexpr int kBlocksEach = kConsumers == 1 ? 2 : 1;
// Registers per thread, in steps of eight, moved from the producers to the consumers. The blocks of a multiprocessor
// share 64 K; taking more than others gave back would wait for ever.
// Does the loader have more to keep?
constexpr bool kManyLoads = !kTma || kLengths || (kListed && (kWidest > 192 || (kFp8 && kPageSize > 0)));
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kManyLoads ? 56 : 40;
constexpr int kTransposerRegisters = !kFp8 ? 0 : kLengths ? 56 : 40;
constexpr int kConsumerRegisters =
    kConsumers == 3 ? 160
                    : (kFp8 || kConsumers == 1 ? 216 : 232) -
                          (!kManyLoads ? 0 : kConsumers == 1 || (kFp8 && kLengths) ? 16 : 8);
constexpr int kAllRegisters = kProducerRegisters + kTransposerRegisters + kConsumers * kConsumerRegisters;
static_assert(kAllRegisters <= kGroups * (65536 / kBlocksEach / kThreads / 8 * 8), "a deadlock");
constexpr int kPanelColumns = kPanelRowBytes / sizeof(Element);
// Panels of Q and K, of one of the parts in which K comes, and of V as it is loaded
constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns, kPartPanels = kPanels / kParts;
constexpr int kValuePanels = (kValueDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kQBytes = kPanels * kTileQ * kPanelRowBytes, kKBytes = kPartPanels * kTileKv * kPanelRowBytes;
constexpr int kRawBytes = kValuePanels * kTileKv * kPanelRowBytes;
// V as consumers read it: as it was loaded, or in FP8 Vᵀ in panels of 128 keys
constexpr int kVPanels = (kTileKv + 127) / 128, kVBytes = kFp8 ? kVPanels * kValueDim * kPanelRowBytes : kRawBytes;
constexpr int kOPanels = (kValueDim + kPanel - 1) / kPanel, kOBytes = kOPanels * kTileQ * kPanelRowBytes;
static_assert(!kListed || kBoxes <= 32, "a lane per box");
static_assert(kPanels % kParts == 0);
static_assert(kParts == 1 || (kExact && !kQInRegisters && kStagesQ == 1 && kStagesK == kParts), "see issue_parts");
// Named barriers: two per consumer warpgroup, from these numbers on, and one of the loaders
constexpr int kTurnBarrier = 1, kGroupBarrier = 5, kLoaderBarrier = 9;

// Where the next Q has a stage of its own, O goes out through shared memory and another warp stores it from there. It
// lies in the stage of the Q it came from; of FP8, where O is twice as large as Q, in a place of its own.
constexpr bool kStaged = kStagesQ > 1;
constexpr int kQStage = kStaged && !kFp8 && kOBytes > kQBytes ? kOBytes : kQBytes;  // bytes of a stage of Q
static_assert(!kStaged || kFp8 || kOBytes <= kQStage, "O lies where its Q was");
constexpr int kStagesO = kFp8 ? 1 : kStagesQ, kStagesBefore = kFp8 ? kStagesRaw : 1;
constexpr int kStagesLoaded = kFp8 ? kStagesRaw : kStagesV;

// Shared memory, in this order: data on 1024 bytes, as the swizzle wants; barriers; the scale; the number of valid rows
// of V per stage; and WorkTiles, one per stage of Q and one that is planned.
constexpr int kAtK = kStagesQ * kQStage, kAtV = kAtK + kStagesK * kKBytes, kAtRaw = kAtV + kStagesV * kVBytes;
constexpr int kAtO = kAtRaw + (kFp8 ? kStagesRaw * kRawBytes : 0);
constexpr int kAtBarriers = kAtO + (kFp8 && kStaged ? kOBytes : 0);
constexpr int kBarrierBytes = 16 * (kStagesQ + kStagesK + kStagesV + kStagesBefore + kStagesO + 1);
constexpr int kAtScale = kAtBarriers + kBarrierBytes, kAtValid = kAtScale + 128;
// Listed blocks: their units, and where blocks have lengths how many keys of each unit are there, per stage of K, and
// the same per stage of V before it is transposed
constexpr int kAtUnits = kAtValid + 16, kAtThere = kAtUnits + (kListed ? 4 * kStagesK * kBoxes : 0);
constexpr int kAtThereRaw = kAtThere + (kLengths ? 4 * kStagesK * kBoxes : 0);
constexpr int kListBytes = kAtThereRaw - kAtUnits + (kLengths && kFp8 ? 4 * kStagesRaw * kBoxes : 0);
constexpr int kAtTiles = (kAtUnits + kListBytes + 63) / 64 * 64;

struct Pipes {
    Ring<kStagesQ> q;
    Ring<kStagesK> k;
    Ring<kStagesV> v;
    Ring<kStagesBefore> raw;  // V before it is transposed
    Ring<kStagesO> o;
    Ring<1> plans;
    Ring<kStagesLoaded> loaded;  // where V is loaded to: raw or v
    TILE_DEVICE Pipes()
        : q(ptx::shared_address(uint32_t(kAtBarriers))),
          k(q.full + q.kBytes),
          v(k.full + k.kBytes),
          raw(v.full + v.kBytes),
          o(raw.full + raw.kBytes),
          plans(o.full + o.kBytes),
          loaded(kFp8 ? raw.full : v.full) {}
    TILE_DEVICE void init() const {
        q.init(kStaged ? 1 : 4 * kConsumers);
        k.init(4 * kConsumers);
        v.init(4 * kConsumers, kFp8 ? kTransposers : 1);
        raw.init(kTransposers);
        o.init(1, 4 * kConsumers);
        plans.init(kLoaders / 32);
        ptx::fence_mbarrier_init();
    }
};
TILE_DEVICE Shared<float> shared_scale() { return Shared<float>(kAtScale); }
TILE_DEVICE Shared<int> valid_rows() { return Shared<int>(kAtValid); }  // of V before it is transposed, per stage
TILE_DEVICE Shared<int> units_of_stage() { return Shared<int>(kAtUnits); }
TILE_DEVICE Shared<int> there_of_stage() { return Shared<int>(kAtThere); }
TILE_DEVICE Shared<int> there_of_raw() { return Shared<int>(kAtThereRaw); }
TILE_DEVICE Shared<WorkTile> tile_of_stage() { return Shared<WorkTile>(kAtTiles); }
TILE_DEVICE Shared<WorkTile> planned() {
    return Shared<WorkTile>(kAtTiles + kStagesQ * uint32_t(sizeof(WorkTile)));
}

template <int kRows> using Panel = SharedTile<Element, kRows, kPanelColumns, Layout::swizzled>;
using OPanel = SharedTile<Out, kTileQ, kPanel, Layout::swizzled>;
using TransposedPanel = SharedTile<Element, kValueDim, kPanelColumns, Layout::swizzled>;
TILE_DEVICE Panel<kTileQ> q_panel(uint32_t stage, int panel) {
    return Panel<kTileQ>(stage * kQStage + panel * kTileQ * kPanelRowBytes);
}
TILE_DEVICE Panel<kTileKv> k_panel(uint32_t stage, int panel) {
    return Panel<kTileKv>(kAtK + stage * kKBytes + panel * kTileKv * kPanelRowBytes);
}
TILE_DEVICE OPanel o_panel(uint32_t stage, int panel) {  // stage: of the Q that O came from
    return OPanel((kFp8 ? kAtO : stage * kQStage) + panel * kTileQ * kPanelRowBytes);
}
