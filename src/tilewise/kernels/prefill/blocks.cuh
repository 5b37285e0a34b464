// Blocks of keys as both forward kernels see them: as boxes of neighbouring rows of K or V, which one page or one unit
// of a list holds. forward.cu says what the constants mean.
#pragma once
#include "prefill/work.cuh"

constexpr bool kFp8 = sizeof(Element) == 1;
constexpr bool kListed = kUnit > 0;  // blocks are units of keys from lists, side by side
// Rows of K or V per box: the whole block's; of paged K and V as many as cross neither a page nor the block's end; of
// listed ones a unit
constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int kPage = kPageSize ? kPageSize : 1;
constexpr int kBoxRows = kListed ? kUnit : kPageSize ? common_divisor(kPageSize, kTileKv) : kTileKv;
constexpr int kBoxes = kTileKv / kBoxRows;
static_assert(kTileKv % kBoxRows == 0 && kPage % kBoxRows * kPageSize == 0);
static_assert(!kListed || kTileKv <= 128, "a word of bits per row");
// The wider of the two head dimensions, by which registers go
constexpr int kWidest = kHeadDim > kValueDim ? kHeadDim : kValueDim;
// O of wide V does not fit the registers: a tile makes kValueDim of its columns, and others the rest.
constexpr int kSlices = (kValueColumns + kValueDim - 1) / kValueDim;
static_assert(kSlices == 1 || (!kFp8 && kValueDim % 64 == 0), "slices are whole panels, and an FP8 tile tells none");
// A tile's columns of V and O: the first of them, and how many there are
template <int kCount> struct Values {
    int first;
    TILE_DEVICE explicit Values(const WorkTile& tile) : first(tile.slice() * kValueDim) {}
    TILE_DEVICE int count() const { return kValueColumns - first < kValueDim ? kValueColumns - first : kValueDim; }
};
template <> struct Values<1> {
    static constexpr int first = 0;
    TILE_DEVICE explicit Values(const WorkTile&) {}
    static constexpr int count() { return kValueColumns; }
};
using TileValues = Values<kSlices>;
