// mla_decode, on Hopper: what lies where in a block's shared memory.
//
// A row of the cache has kQueryDim channels. All of them are a key, the first kValueDim of them are a value, and there
// is one KV head. The cache comes in blocks of 64 rows, a block in panels of 64 rows × 64 channels, and panels lie in a
// ring of kPlaces places. A panel comes, is read twice, as K and as Vᵀ, and goes by itself.
#pragma once
#include "mla/work.cuh"
#include "tile/hopper.cuh"
#include "tile/tiles.cuh"

constexpr int kPanels = kQueryDim / kPanel, kValuePanels = kValueDim / kPanel;
// kRaw (raw.cuh): codes stay codes in the ring, 128 channels of them in a place.
constexpr bool kWidens = kScaled && !kRaw;
static_assert(!kRaw || (kScaled && kRows == 16), "sixteen rows over codes");
constexpr int kCodedPairs = kValuePanels / 2;
// By wgmma the weights P of a block take the place of its last panel, which holds no values: nobody reads it once S is
// there. Where every panel holds values, a block has one place more.
constexpr int kPlacesOfWeights = kRaw || kPanels > kValuePanels ? 0 : 1;
constexpr int kBlockPlaces = kRaw ? kCodedPairs + kPanels - kValuePanels : kPanels + kPlacesOfWeights;
constexpr int kWeights = kBlockPlaces - 1;
constexpr int kPanelBytes = kKeys * kPanelRowBytes;
constexpr int kMine = kValuePanels / 2;  // panels of values, 64 channels of O each, that a warpgroup multiplies
constexpr int kEights = kRows / 8;
constexpr bool kWide = kRows == 64;  // the query rows are those of products (wide.cuh), not their columns (body.cuh)
static_assert(kQueryDim % kPanel == 0 && kValueDim % (2 * kPanel) == 0 && kValueDim <= kQueryDim, "whole panels");
static_assert(kRows % 16 == 0 && kRows <= 64, "O of 64 rows fills the registers of two warpgroups");
static_assert(kPlaces >= kBlockPlaces, "the panels that a block waits for have a place");
static_assert(!kWide || kPlaces % kBlockPlaces == 0, "places of weights stay places of weights");
static_assert(!kLooksAhead || !kGather, "a warp that does not load looks ahead");
// kRaw: a warp has all rows of S by some keys, and all rows of O by some columns.
constexpr int kRowGroups = kRows / 16, kKeyGroups = 8 / kRowGroups, kSlice = kKeys;
constexpr int kMyKeys = kSlice / kKeyGroups, kMyColumns = kValueDim / 8;
// Panels that are there while the block before them is: of those that are told of two at a time, not all
constexpr int kBeside = kPlaces - kBlockPlaces;
// All scores of a block wait for the place of its weights, too, where these have one of their own.
constexpr int kAheadPlaces = kAhead + (kAhead == kPanels && kBlockPlaces > kPanels);
static_assert(kAheadPlaces <= (kScaled ? kBeside / 2 * 2 : kBeside) && kAhead <= kPanels, "scores that wait for ever");
// kRaw: a block is scored while the one before it still has its values, which do not lie at its end.
static_assert(!kRaw || (kAhead == 0 && kPlaces >= 2 * kBlockPlaces), "a deadlock");
// Threads: two warpgroups that compute, and one that brings rows; where these are codes that are widened in the ring,
// one more that does it
constexpr int kComputing = 256, kBringing = 128, kThreads = kComputing + (kWidens ? 2 : 1) * kBringing;
// Registers per thread, moved from the warps that load to those that compute: what a block is launched with is all
// that it ever has, and taking more than others gave back would wait for ever.
constexpr int kLooking = kLooksAhead && Rule::kChunked && !kRaw ? 48 : 40;  // who looks up a block of positions, too
constexpr int kLoadRegisters = kGather || kLooksAhead ? kLooking : kScaled ? 32 : 24;
constexpr int kWidenRegisters = !kWidens ? 0 : kRows < 64 ? 72 : kGather ? 40 : 48;
constexpr int kAllRegisters = kThreads / 128 * (65536 / kThreads / 8 * 8);
constexpr int kComputeRegisters = (kAllRegisters - kLoadRegisters - kWidenRegisters) / 16 * 8;
static_assert(kLoadRegisters + kWidenRegisters + 2 * kComputeRegisters <= kAllRegisters, "a deadlock");
constexpr int kGroupBarriers = 2;  // named barriers, of each warpgroup

constexpr int kAtQ = kPlaces * kPanelBytes;  // panels of kRows rows
constexpr int kScaleBlocks = kRaw ? 8 : kScaled ? 4 : 0;  // blocks for which scales of codes are kept
constexpr int kScaleTurns = kScaled ? kScaleBlocks : 1;
constexpr int kAtScales = kAtQ + kPanels * kRows * kPanelRowBytes;
constexpr int kAtFull = kAtScales + kScaleBlocks * kKeys * kScaleRow, kAtEmpty = kAtFull + 8 * kPlaces;
constexpr int kAtReady = kAtEmpty + 8 * kPlaces;       // two barriers: the weights of a block are there
// Per block of two: have the rows' references moved? kWide: and per warp. kRaw: must they, and per warp
constexpr int kAtMoved = kAtReady + 16;
constexpr int kAtReference = kAtMoved + 16;            // per row, base 2; −inf before its first key
constexpr int kAtCorrection = kAtReference + 4 * kRows;  // per block of two and row, where references moved
constexpr int kAtTops = kAtCorrection + 8 * kRows;     // per warp of a warpgroup and row: the largest score of a block
constexpr int kTops = kRaw ? kKeyGroups : 4;           // kRaw: per group of keys
constexpr int kAtSums = kAtTops + 4 * kTops * kRows;   // per computing warp and row: Σ P
constexpr int kAtFactors = kAtSums + 32 * kRows;       // per row: what pieces before and this piece are multiplied with
constexpr int kAtFolded = kAtFactors + 8 * kRows;      // per row: MaxSum of the pieces before
constexpr bool kFillsAlone = kScaled;                  // does one warp fill a table that no warp fills ahead?
constexpr int kAtTables = kAtFolded + 8 * kRows;       // what is known of an item
constexpr int kThere = 8;                              // kChosen: blocks for which it is kept, with bytes per key,
constexpr int kAtThere = kAtTables + kTables * kTableBytes;  // which of their keys there are
// kScaled: barriers that tell that a pair of panels of codes has landed, if it is widened, and the scales of a block
constexpr int kLandings = kWidens ? 16 : 0;
constexpr int kAtLanded = kAtThere + kThere * kKeys, kAtScaled = kAtLanded + 8 * kLandings;
// kRaw: weights have places of their own, for two blocks, and are multiplied with the scales of each group.
using Weights = SharedTile<Element, kRows, kKeys, Layout::swizzled>;
constexpr int kAtWeights = (kAtScaled + 8 * kScaleBlocks + 1023) / 1024 * 1024;
constexpr int kWeightBytes = kCodedPairs * Weights::kBytes;
constexpr int kSharedBytes = kRaw ? kAtWeights + 2 * kWeightBytes : kAtScaled + 8 * kScaleBlocks;
static_assert(!kScaled || (kValuePanels % 2 == 0 && kGroup == 2 * kPanel && kScaleRow == 16), "pairs, and one copy");
static_assert(!kWidens || 2 * kLandings > kPlaces, "a pair that is asked for when the one before has been widened");
static_assert(!kScaled || kScaleBlocks > kPlaces / kBlockPlaces + 1, "scales of blocks on their way stay");
static_assert(kThere >= kPlaces / kBlockPlaces + 2, "those of a block that is not weighed yet stay");
static_assert(kAtQ % 1024 == 0 && kAtScales % 1024 == 0 && kAtReference % 16 == 0 && kAtLanded % 8 == 0, "aligned");
// Arrivals that tell that a panel is there: of the copies of every thread, and for what was stored or copied before; of
// warps, or threads, that widen
constexpr int kTellers = kWidens   ? (kGather ? kBringing : kBringing / 32)
                         : kGather ? (1 + (kChosen || kRaw)) * kBringing
                                   : 1;

TILE_DEVICE Shared<int> sMoved() { return Shared<int>(kAtMoved); }
TILE_DEVICE Shared<float> sReference() { return Shared<float>(kAtReference); }
TILE_DEVICE Shared<float> sCorrection() { return Shared<float>(kAtCorrection); }
TILE_DEVICE Shared<float> sTops() { return Shared<float>(kAtTops); }

// kChosen: a byte per key of a block, 1 if there is such a key; T: several of them
template <class T = uint8_t> TILE_DEVICE Shared<T> sThere(uint32_t block) {
    return Shared<T>(kAtThere + block % kThere * kKeys);
}

TILE_DEVICE int scales_at(uint32_t number, int row) {
    return kAtScales + (number % kScaleTurns * kKeys + row) * kScaleRow;
}
// By TMA a block's scales may land after its codes. Those of one by one are copied before them, and told of with them.
TILE_DEVICE uint32_t scaled_barrier(uint32_t number) {
    return ptx::shared_address(kAtScaled + 8 * (number % kScaleTurns));
}
TILE_DEVICE void wait_for_scales(uint32_t number) {
    ptx::mbarrier_wait(scaled_barrier(number), number / kScaleTurns & 1);
}

// Where the panels of a block lie. Both sides walk the ring in step: block after block, panel after panel.
constexpr bool kWholeBlocks = kPlaces % kBlockPlaces == 0;  // none goes around the end of the ring
struct Places {
    uint32_t first = 0, lap = 0;
    // Those of block `number` in the life of the thread block. Of a number that is the same in all lanes they are, too.
    static TILE_DEVICE Places of(uint32_t number) {
        constexpr uint32_t kWhole = kPlaces / kBlockPlaces;
        if (kWholeBlocks) return {number % kWhole * kBlockPlaces, number / kWhole & 1};
        return {number * kBlockPlaces % kPlaces, number * kBlockPlaces / kPlaces & 1};
    }
    TILE_DEVICE uint32_t place(int panel) const {
        const uint32_t n = first + panel;
        return kWholeBlocks || n < kPlaces ? n : n - kPlaces;
    }
    TILE_DEVICE uint32_t lap_of(int panel) const { return lap ^ (!kWholeBlocks && first + panel >= kPlaces); }
    TILE_DEVICE void next() {
        first += kBlockPlaces;
        if (first >= kPlaces) {
            first -= kPlaces;
            lap ^= 1;
        }
    }
    TILE_DEVICE uint32_t full(int panel) const { return ptx::shared_address(kAtFull + 8 * place(panel)); }
    TILE_DEVICE uint32_t empty(int panel) const { return ptx::shared_address(kAtEmpty + 8 * place(panel)); }
    TILE_DEVICE uint32_t at(int panel) const { return place(panel) * kPanelBytes; }
    TILE_DEVICE void wait(int panel) const { ptx::mbarrier_wait(full(panel), lap_of(panel)); }
    // For products. Rows that were copied one by one came by ordinary means, and nobody fenced them yet.
    TILE_DEVICE void wait_rows(int panel) const {
        wait(panel);
        if (kGather && (!kWidens || panel >= kValuePanels)) ptx::fence_async_proxy();
    }
    // A fresh barrier's previous phase counts as completed: the first lap does not wait.
    TILE_DEVICE void wait_free(int panel) const { ptx::mbarrier_wait(empty(panel), lap_of(panel) ^ 1); }
    // One computing warp lets go of the panel.
    TILE_DEVICE void let_go(int panel) const { ptx::mbarrier_arrive(empty(panel)); }
};
TILE_DEVICE uint32_t ready_barrier(uint32_t block) { return ptx::shared_address(kAtReady + 8 * (block & 1)); }

TILE_DEVICE void init_barriers() {
    // Every computing warp lets go of every panel, of those that it does not multiply as soon as scores are made.
    // kWide: those of the warpgroup that is the last to read it do, and all of the place of weights.
    for (int n = 0; n < kPlaces; n++) {
        ptx::mbarrier_init(ptx::shared_address(kAtFull + 8 * n), kTellers);
        ptx::mbarrier_init(ptx::shared_address(kAtEmpty + 8 * n), kWide && n % kBlockPlaces != kWeights ? 4 : 8);
    }
    for (int n = 0; n < 2; n++) ptx::mbarrier_init(ready_barrier(n), kRaw ? kComputing / 32 : 128);
    for (int n = 0; n < kLandings; n++)
        ptx::mbarrier_init(ptx::shared_address(kAtLanded + 8 * n), kGather ? 2 * kBringing : 1);
    for (int n = 0; n < kScaleBlocks; n++) ptx::mbarrier_init(ptx::shared_address(kAtScaled + 8 * n), 1);
    ptx::fence_mbarrier_init();
}
