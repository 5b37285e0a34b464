// How chunks and tiles of K and V lie in shared memory, and where everything else stands there.
//
// K and V have kHeadDim and kValueDim channels. A chunk is one box of tokens, or two boxes of sixteen where a page may
// end between them. A box lies in panels of kPanelBytes of each of its rows: the largest power of two that divides a
// row and has a swizzle.
#pragma once
#include "decode/work.cuh"
#include "tile/hopper.cuh"
#include "tile/mma.cuh"
#include "tile/quant.cuh"

constexpr bool kScaled = kFormat != Format::bits16 && kFormat != Format::bits32, kZeros = kFormat == Format::int4;
constexpr bool kOneDim = kHeadDim == kValueDim;
constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
// Groups of channels that have a scale and a zero point of their own, in a row of K and in one of V
constexpr int groups_of(int channels) { return kZeros ? (channels + kGroupSize - 1) / kGroupSize : 1; }
constexpr int kKeyGroups = groups_of(kHeadDim), kValueGroups = groups_of(kValueDim);
// Tokens per chunk. Sixteen tokens of int4 are so few bytes that waiting, requesting and bookkeeping would be half of
// the work; with more than two groups of channels there are no registers for 32.
constexpr int kChunk = kZeros && kWidest <= 128 && groups_of(kWidest) <= 2 ? 32 : 16, kTiles = kChunk / 16;
constexpr int kBox = kPageSize % kChunk == 0 ? kChunk : 16, kBoxes = kChunk / kBox;
constexpr bool kWholeBoxes = kPageSize % kBox == 0;  // a box lies in one page
static_assert(!kTma || kWholeBoxes, "a tensor map brings what lies in one page");
// kInStep: the warps of a block stream the same tokens of neighbouring heads, and one copy brings a chunk for all of
// them. The last warp to be done with a stage requests its next chunk. A row of int4 is only 64 bytes: warps that drift
// apart would request such short pieces from places all over the memory.
static_assert(!kInStep || (kTma && kTileStages == 0), "boxes of several heads");
constexpr int kHeads = kInStep ? kWarps : 1;  // heads per box

// Rows of kDim channels in a chunk. kLines: the rows of this many heads are one line of 128 bytes and are copied as
// one, because L2 serves a limited number of requests however short they are.
template <int kDim, int kLines> struct ChunkRows {
    static constexpr int kBytes = kDim * bits_of_format(kFormat) / 8, kUnits = kBytes / 16;  // of a row
    static_assert(kLines == 1 || (kInStep && kLines * kBytes == 128 && kWarps % kLines == 0), "whole lines");
    static constexpr int kPanelBytes =
        kLines > 1 || kBytes % 128 == 0 ? 128 : kBytes % 64 == 0 ? 64 : kBytes % 32 == 0 ? 32 : 16;
    static constexpr int kPanelUnits = kPanelBytes / 16;
    static constexpr int kBoxBytes = kBox * kBytes, kBoxStep = kHeads * kBoxBytes;  // of one head; from box to box
    static constexpr int kChunkBytes = kChunk * kBytes;
    // In a ring K's chunks and V's take turns. Where they differ, each begins at a multiple of 1024 bytes, as the
    // largest swizzle wants; otherwise it does so as far as its own swizzle wants it.
    static constexpr int kPlaceBytes = kOneDim ? kChunkBytes : (kChunkBytes + 1023) / 1024 * 1024;
    // Without TMA: rows per copy of a warp, 16 bytes per lane
    static constexpr int kCopyRows = 32 / kPanelUnits < kBox ? 32 / kPanelUnits : kBox;

    // From the chunks of all heads to that of a warp's head, or of the line that it stands in
    static TILE_DEVICE int head_at(int rank) { return kInStep ? rank / kLines * kLines * kBoxBytes : 0; }
    // The offset within a chunk of the c-th 16 bytes of row `row`; rank: of the warp, whose head stands in the line
    static TILE_DEVICE uint32_t place_of(int row, int c, int rank) {
        c += rank % kLines * kUnits;
        const int turn = kPanelBytes == 128  ? row & 7
                         : kPanelBytes == 64 ? row >> 1 & 3
                         : kPanelBytes == 32 ? row >> 2 & 1
                                             : 0;
        const int panel = c / kPanelUnits * (kBox * kPanelBytes);
        return row / kBox * kBoxStep + panel + row % kBox * kPanelBytes + ((c % kPanelUnits) ^ turn) * 16;
    }
    // From the place of (row r, c) with c = 0 or 1 to that of (row 16t + r, c + 2p)
    static TILE_DEVICE uint32_t place_further(uint32_t first, int p, int t) {
        const int panel = 2 * p / kPanelUnits, in_panel = 2 * p % kPanelUnits;
        const int row = 16 * t / kBox * kBoxStep + 16 * t % kBox * kPanelBytes;
        return (first ^ (in_panel * 16)) + panel * (kBox * kPanelBytes) + row;
    }
};
using KeyRows = ChunkRows<kHeadDim, kLineHeads>;
using ValueRows = ChunkRows<kValueDim, kValueLineHeads>;
constexpr int kStageBytes = KeyRows::kPlaceBytes + ValueRows::kPlaceBytes;

// Scales of a chunk, in parts: those of K, those of V, then the zero points of both
constexpr int kScaleSize = kZeros ? 2 : 4;  // bytes of one scale
constexpr int kKeyScales = kKeyGroups * kScaleSize, kValueScales = kValueGroups * kScaleSize;  // of a token's
constexpr int kPairScales = kKeyScales + kValueScales;
template <bool kHalf> struct BitsOf { using Type = uint32_t; };
template <> struct BitsOf<true> { using Type = uint16_t; };
using ScaleBits = BitsOf<kZeros>::Type;
constexpr int kScaleParts = !kScaled ? 0 : kZeros ? 4 : 2;
constexpr int kScaleBytes = kScaleParts / 2 * kChunk * kPairScales;
constexpr bool kOneScaling = kKeyScales == kValueScales;
TILE_DEVICE constexpr int scales_of(int part) { return kOneScaling || part % 2 == 0 ? kKeyScales : kValueScales; }
// Of the parts before it
TILE_DEVICE constexpr int scales_before(int part) {
    return kOneScaling ? part * kKeyScales : part / 2 * kPairScales + part % 2 * kKeyScales;
}
// A run is the scales of sixteen tokens of one part. It is copied 16 bytes per lane, which takes scales_of(part) lanes.
constexpr int kRunLanes = 32 / kTiles;  // lanes that share a run's sixteen tokens
constexpr int kRunPieces = kScaleParts / 2 * kPairScales;
constexpr int kScaleRounds = kScaleRuns ? (kRunPieces + kRunLanes - 1) / kRunLanes : 0;
struct ScaleRun {
    const uint8_t* from;  // a lane's 16 bytes in page 0
    uint32_t page_bytes;
};
constexpr bool kCopies = !kTma || (kScaled && kScaleRuns);  // something comes by cp.async

// Shared memory, in this order: the ring of tiles if there is one (tile_load.cuh), what of Q tiles read there, and the
// ring of codes that become tiles (tile_widen.cuh); the rings of the warps, on 1024 bytes as the swizzle wants; their
// scales; barriers and counters; what the threads of tiles look up rarely; what the tokens of quantised tiles are
// multiplied with, the scales of the codes that become tiles, and the sums of their rows; and per warp the saved state
// of a range that it folds piece by piece: O, then the MaxSum, lane by lane.
//
// Tiles by mma.sync (tile_mma.cuh) are computed while no warp of the block streams, in the same memory: Q, the ring of
// K and V, what is looked up of the rows, and where the tokens of the ring's tiles come from. The counter lies after
// both.
constexpr bool kTilesByMma = kTileStages > 0 && !kTma;
constexpr int kMmaTile = 32, kTileWarps = 4;
constexpr int kMmaQBytes = kTileRows * kHeadDim * 2, kMmaStageBytes = kMmaTile * (kHeadDim + kValueDim) * 2;
constexpr int kAtMmaRows = kMmaQBytes + kTileStages * kMmaStageBytes, kAtMmaSources = kAtMmaRows + 20 * kTileRows;
constexpr int kMmaBytes = kTilesByMma ? kAtMmaSources + kTileStages * 2 * kMmaTile * 8 : 0;
constexpr bool kTilesByWgmma = kTileStages > 0 && kTma;
// Tiles by wgmma: warpgroups of 64 rows that compute them, tokens of a tile, and how many of Q's sixteens of channels
// come from shared memory, the last ones, because registers hold only the others. O takes most of them: above 128
// channels that of 64 rows fills one warpgroup's. Two warpgroups hold Q of up to 192 channels beside tiles of 32
// tokens. (Of 96 and 128 channels the streaming warps, which have 128 registers, would else spill.)
constexpr int kTileGroups = kValueDim > 128 ? 1 : 2;
constexpr int kTileTokens = kWidest > 128 || (kHeadDim == 96 && kValueDim == 128) ? 32 : 64;
constexpr int kTileSharedQ = kScaled          ? (kZeros && kHeadDim > 64 ? 8 : 4)
                             : kTileGroups > 1 ? (kHeadDim > 192 ? kHeadDim / 16 - 8 : 0)
                             : kHeadDim > 128  ? kHeadDim / 16
                                               : 0;
constexpr int kTileQPanels = (kTileSharedQ + 3) / 4;  // of 64 rows and 64 channels, per warpgroup
constexpr int kTileQBytes = kTilesByWgmma ? kTileGroups * kTileQPanels * 64 * 128 : 0;
constexpr int kTileKeyPanels = (kHeadDim + kPanel - 1) / kPanel, kTileValuePanels = (kValueDim + kPanel - 1) / kPanel;
constexpr int kTilePairBytes = kTileTokens * (kTileKeyPanels + kTileValuePanels) * kPanelRowBytes;  // of K and V
constexpr int kAtTileQ = kTilesByMma ? 0 : kTileStages * kTilePairBytes;
constexpr int kAtRaw = kAtTileQ + kTileQBytes;
constexpr int kAtRings = kAtRaw + kRawStages * 2 * kTileTokens * KeyRows::kBytes;
static_assert(kAtRings % 1024 == 0 && (kRawStages > 0) == (kTilesByWgmma && kScaled), "codes become tiles");
constexpr int kAtScales = (kAtRings + kWarps * kStages * kStageBytes + 1023) / 1024 * 1024;
constexpr int kStreamers = kWarps + kJoiners;  // joiners are the last of them
constexpr int kAtStreamBarriers = kAtScales + kStreamers * kStages * kScaleBytes;
constexpr int kAtTileBarriers = kAtStreamBarriers + kStreamers * kStages * 8;
// Counters. Beside tiles: one, of the items that have been taken. In step: one per stage, of the warps that are done.
constexpr int kFoldBytes = kRows * kValueDim * 4 + kRows / 8 * 2 * 32 * 8;
constexpr int kAtRawBarriers = kAtTileBarriers + (kTilesByMma ? 0 : kTileStages * (kRawStages > 0 ? 32 : 16));
constexpr int kAfterRings = kAtRawBarriers + kRawStages * 16 + 4 * kStages;
constexpr int kAtTileSeen = (kAfterRings + 15) / 16 * 16;  // per thread of warpgroups: what its rows see,
constexpr int kAtTilePlace = kAtTileSeen + (kTilesByWgmma ? 256 * 16 : 0);  // and where their results go
constexpr int kAtTileRows = kAtTilePlace + (kTilesByWgmma ? 256 * 8 : 0);  // int4: per group and row, Σ q
constexpr int kAtTileFactors = kAtTileRows + (kRawStages > 0 && kZeros ? kKeyGroups * 128 * 4 : 0);
// Per tile of the ring, as tile_factors.cuh has it: a factor for each token of K and of V, and a limit; of int4 also
// what zero points add, and a scale, for each group of channels
constexpr int kTileFactorBytes = kRawStages > 0 ? kTileTokens * (8 + (kZeros ? 16 * kKeyGroups : 0)) + 16 : 0;
// Scales beside a tile of codes (tile_scales.cuh): for each token and group four bytes of K and as many of V
constexpr int kRawScaleBytes = 2 * kTileTokens * 4 * kKeyGroups;
constexpr int kAtRawScales = kAtTileFactors + kTileStages * kTileFactorBytes;
constexpr int kAtTileSums = kAtRawScales + kRawStages * kRawScaleBytes;  // per thread: Σ P of its two rows
constexpr int kAtFold = kAtTileSums + (kRawStages > 0 ? 256 * 8 : 0);
constexpr int kStreamEnd = kAtFold + kWarps * kFoldBytes;
constexpr int kAtCounters = !kTilesByMma ? kAfterRings - 4 * kStages : kStreamEnd > kMmaBytes ? kStreamEnd : kMmaBytes;
// Where a float32 Q would take too many registers, each warp has it there (stream32.cuh): rows that begin in different
// banks.
constexpr int kQueryRow = kHeadDim + 4;
constexpr int kQueryBytes = kFormat == Format::bits32 && kRows * kWidest > 1024 ? kRows * kQueryRow * 4 : 0;
TILE_DEVICE uint32_t queries_of_warp(int rank) { return kAtFold + kWarps * kFoldBytes + rank * kQueryBytes; }
// A joiner has its ring and its saved state where the tiles were.
constexpr int kJoinerBytes = (kStages * kStageBytes + kFoldBytes + 1023) / 1024 * 1024;
static_assert(kJoiners * kJoinerBytes <= kAtRings, "no room where the tiles were");
TILE_DEVICE uint32_t ring_of(int rank) {
    return rank < kWarps ? kAtRings + rank * kStages * kStageBytes : (rank - kWarps) * kJoinerBytes;
}
TILE_DEVICE uint32_t fold_of_warp(int rank) {
    return rank < kWarps ? kAtFold + rank * kFoldBytes : (rank - kWarps) * kJoinerBytes + kStages * kStageBytes;
}
