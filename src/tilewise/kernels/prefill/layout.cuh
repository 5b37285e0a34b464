// Where everything lies in the shared memory of the Hopper forward, and the pipes between its roles. forward.cu tells the constants.
#pragma once
#include "prefill/work.cuh"
#include "tile/hopper.cuh"
#include "tile/tiles.cuh"

constexpr bool kFp8 = sizeof(Element) == 1;  // then V is transposed on its way, by a warpgroup of its own
constexpr int kConsumers = kTileQ / 64, kGroups = kConsumers + (kFp8 ? 2 : 1), kThreads = 128 * kGroups, kTransposers = 4;
constexpr int kLoaders = kTma ? 32 : 64;  // threads: the first warp, or the first two
// Registers a thread, moved from the producers to the consumers. More than the launch came with and taking them never returns: the
// launch has 64 K for all threads, in eights for each.
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kTma ? 40 : 56, kTransposerRegisters = kFp8 ? 40 : 0;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : (kFp8 ? 216 : 232) - (kTma ? 0 : 8);
static_assert(kProducerRegisters + kTransposerRegisters + kConsumers * kConsumerRegisters <= kGroups * (65536 / kThreads / 8 * 8), "a deadlock");
constexpr int kPanelColumns = kPanelRowBytes / sizeof(Element), kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kQBytes = kPanels * kTileQ * kPanelRowBytes, kKvBytes = kPanels * kTileKv * kPanelRowBytes;
// V as consumers read it: as it came, or Vᵀ in panels of 128 keys
constexpr int kVPanels = (kTileKv + 127) / 128, kVBytes = kFp8 ? kVPanels * kHeadDim * kPanelRowBytes : kKvBytes;
constexpr int kOPanels = (kHeadDim + kPanel - 1) / kPanel;
// Rows that one copy brings of K or V: the tile's, or as many as neither crosses a page nor leaves the tile.
constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int kPage = kPageSize ? kPageSize : 1;
constexpr int kBoxRows = kPageSize ? common_divisor(kPageSize, kTileKv) : kTileKv, kBoxes = kTileKv / kBoxRows;
constexpr int kTurnBarrier = 1, kGroupBarrier = 5, kLoaderBarrier = 9;  // named barriers: of each consumer; of the loaders

// Where the next Q has a stage of its own, O goes out through shared memory: the stage of the Q it came from, or, twice as large as
// an FP8 Q, a place of its own. Another warp stores it from there.
constexpr bool kStaged = kStagesQ > 1;
constexpr int kStagesO = kFp8 ? 1 : kStagesQ, kStagesBefore = kFp8 ? kStagesRaw : 1, kStagesLoaded = kFp8 ? kStagesRaw : kStagesV;

// Shared memory, from the start: tiles of data on 1024 bytes, as the swizzle wants, then barriers, then descriptions of tiles: of
// those whose Q is here, stage by stage, and of the one planned.
constexpr int kAtK = kStagesQ * kQBytes, kAtV = kAtK + kStagesK * kKvBytes, kAtRaw = kAtV + kStagesV * kVBytes;
constexpr int kAtO = kAtRaw + (kFp8 ? kStagesRaw * kKvBytes : 0);
constexpr int kAtBarriers = kAtO + (kFp8 && kStaged ? kOPanels * kTileQ * kPanelRowBytes : 0);
constexpr int kBarrierBytes = 16 * (kStagesQ + kStagesK + kStagesV + kStagesBefore + kStagesO + 1);
constexpr int kAtScale = kAtBarriers + kBarrierBytes, kAtValid = kAtScale + 128, kAtTiles = (kAtValid + 16 + 63) / 64 * 64;

struct Pipes {
    Ring<kStagesQ> q;
    Ring<kStagesK> k;
    Ring<kStagesV> v;
    Ring<kStagesBefore> raw;  // V as it came, if it is to be transposed
    Ring<kStagesO> o;
    Ring<1> plans;
    Ring<kStagesLoaded> loaded;  // where V is loaded to: raw, or v
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
TILE_DEVICE Shared<int> valid_rows() { return Shared<int>(kAtValid); }  // of V that is to be transposed, stage by stage
TILE_DEVICE Shared<WorkTile> tile_of_stage() { return Shared<WorkTile>(kAtTiles); }
TILE_DEVICE Shared<WorkTile> planned() { return Shared<WorkTile>(kAtTiles + kStagesQ * uint32_t(sizeof(WorkTile))); }

template <int kRows> using Panel = SharedTile<Element, kRows, kPanelColumns, Layout::swizzled>;
using OPanel = SharedTile<Out, kTileQ, kPanel, Layout::swizzled>;
using TransposedPanel = SharedTile<Element, kHeadDim, kPanelColumns, Layout::swizzled>;
TILE_DEVICE Panel<kTileQ> q_panel(uint32_t stage, int panel) { return Panel<kTileQ>(stage * kQBytes + panel * kTileQ * kPanelRowBytes); }
TILE_DEVICE Panel<kTileKv> k_panel(uint32_t stage, int panel) {
    return Panel<kTileKv>(kAtK + stage * kKvBytes + panel * kTileKv * kPanelRowBytes);
}
TILE_DEVICE OPanel o_panel(uint32_t stage, int panel) {  // `stage` of the Q it came from
    return OPanel((kFp8 ? kAtO : stage * kQBytes) + panel * kTileQ * kPanelRowBytes);
}
