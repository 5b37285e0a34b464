// mla_decode_mma, on cards without wgmma: what lies where in a block's shared memory.
//
// The cache comes in slices of kSlice rows. A slice lies there as it is in the cache, row by row under a swizzle, and
// is read twice: as K along its rows, and as V along its columns. Slices of 16-bit values lie in a ring of kStages;
// those of codes come into a ring of raw slices, and are widened into one place.
#pragma once
#include "mla/rows.cuh"
#include "tile/tiles.cuh"

constexpr int kPanel = 64, kPanelRowBytes = 128;  // Q lies in panels of 64 channels, as Walk::load_queries brings them
constexpr int kPanels = kQueryDim / kPanel;
constexpr int kComputing = 32 * kWarps;  // threads: all of them compute and load
// Of S every warp has sixteen query rows by some keys, of O all rows by some columns.
constexpr int kRowGroups = kRows / 16, kKeyGroups = kWarps / kRowGroups;
constexpr int kMyKeys = kSlice / kKeyGroups, kMyColumns = kValueDim / kWarps;
constexpr bool kFillsAlone = true;  // one warp fills the table of an item
constexpr bool kRaw = false;        // codes are widened before they are multiplied
static_assert(kQueryDim % kPanel == 0 && kValueDim % kGroup == 0 && kValueDim <= kQueryDim, "whole panels");
static_assert(kKeys % kSlice == 0 && kWarps % kRowGroups == 0, "slices of a block, warps of a slice");
static_assert(kMyKeys == 8 || kMyKeys == 16, "one or two products side by side");
static_assert(kMyColumns % 16 == 0, "two products side by side");
static_assert(kStages >= 2 && !kLooksAhead, "a slice comes while another is computed");

using Slice = SharedTile<Element, kSlice, kQueryDim, Layout::swizzled>;
using QueryPanel = SharedTile<Element, kRows, kPanel, Layout::swizzled>;
using Weights = SharedTile<Element, kRows, kSlice < 32 ? 32 : kSlice, Layout::swizzled>;  // 64 bytes per row at least

constexpr int kSlices = kScaled ? 1 : kStages, kFlight = kScaled ? kStages : kStages - 1;  // on their way meanwhile
// A raw row: codes, 16-bit channels, scales
constexpr int kAtRest = kValueDim, kAtScales = kAtRest + 2 * (kQueryDim - kValueDim), kRawRow = kAtScales + kScaleRow;
constexpr int kAtRaw = kSlices * Slice::kBytes, kRawBytes = kScaled ? kSlice * kRawRow : 0;
constexpr int kAtQ = kAtRaw + kStages * kRawBytes;
constexpr int kAtWeights = kAtQ + kPanels * QueryPanel::kBytes;
constexpr int kAtTops = kAtWeights + Weights::kBytes;          // per key group and row: the largest score of a slice
constexpr int kAtSums = kAtTops + 4 * kKeyGroups * kRows;      // per key group and row: Σ P
constexpr int kAtCorrection = kAtSums + 4 * kKeyGroups * kRows;  // per row, where references moved
constexpr int kAtFactors = kAtCorrection + 4 * kRows;  // per row: what pieces before and this one are multiplied with
constexpr int kAtFolded = kAtFactors + 8 * kRows;      // per row: MaxSum of the pieces before
constexpr int kAtTables = kAtFolded + 8 * kRows;
constexpr int kThere = kStages + 1;                    // kChosen: slices for which it is kept, with bytes per key,
constexpr int kAtThere = kAtTables + kTableBytes;      // which of their keys there are
constexpr int kSharedBytes = kAtThere + kThere * kSlice;
static_assert(kAtQ % 128 == 0 && kAtWeights % 128 == 0 && kAtTables % 16 == 0, "aligned");
static_assert(!kScaled || kScaleRow == 16, "a row's scales are one copy");

TILE_DEVICE Shared<float> sTops() { return Shared<float>(kAtTops); }
TILE_DEVICE Shared<float> sCorrection() { return Shared<float>(kAtCorrection); }
TILE_DEVICE Shared<uint8_t> sThere(uint32_t number) { return Shared<uint8_t>(kAtThere + number % kThere * kSlice); }
// Where slice `number` in the life of the thread block lies
TILE_DEVICE Slice slice_at(uint32_t number) { return Slice(number % kSlices * Slice::kBytes); }
