// Tiles of 16-bit elements, of FP8 and of float32 in shared memory: where their chunks lie, and how a block fills them
// from global memory.
#pragma once
#include "tile/memory.cuh"

enum class Layout { plain, swizzled };

// kRows × kColumns, row-major, in chunks of 16 bytes: eight elements, 16 of FP8, or four of float32.
//
// ldmatrix reads one chunk of eight rows at once. In a plain tile those eight chunks lie a row apart, and rows are a
// multiple of 64 bytes: they share banks. In a swizzled tile the chunk's number is XORed with the row's, so that eight
// rows touch all 32 banks once. Rows of an odd multiple of 64 bytes (head_dim 32, 96) alternate between the halves of
// the banks already; pairs are enough.
template <class T, int kRows_, int kColumns_, Layout kLayout> struct SharedTile {
    static constexpr int kRows = kRows_, kColumns = kColumns_, kInChunk = 16 / sizeof(T), kChunks = kColumns / kInChunk;
    static constexpr int kRowBytes = kColumns * sizeof(T), kBytes = kRows * kRowBytes;
    static_assert(kRowBytes % 64 == 0, "rows are 64 bytes or a multiple");
    using Element = T;
    uint32_t offset;  // in the block's shared memory

    TILE_DEVICE explicit SharedTile(uint32_t bytes) : offset(bytes) {}
    static constexpr int kTurns = kLayout == Layout::plain ? 1 : kChunks % 8 ? 4 : 8;
    static TILE_DEVICE int place(int row, int chunk) {
        return row * kChunks + (chunk ^ ((kTurns == 4 ? row >> 1 : row) & (kTurns - 1)));
    }
    TILE_DEVICE uint32_t address(int row, int chunk) const {
        return ptx::shared_address(offset) + place(row, chunk) * 16;
    }
    // From the address of chunk 0 or 1 of a row to the chunk an even number `chunks` further on. XORs commute, so a
    // lane computes one address per tile and pays at most one XOR for another column, and nothing beyond kTurns chunks.
    static TILE_DEVICE uint32_t along(uint32_t address, int chunks) {
        return (address ^ (chunks & (kTurns - 1)) * 16) + (chunks & ~(kTurns - 1)) * 16;
    }
    // The value at (row, column); the two values from an even column on; the 16 bytes of a chunk
    TILE_DEVICE decltype(auto) element(int row, int column) const {
        return Shared<T>(offset)[place(row, column / kInChunk) * kInChunk + column % kInChunk];
    }
    TILE_DEVICE decltype(auto) pair(int row, int column) const {
        return Shared<uint32_t>(offset)[place(row, column / 8) * 4 + column % 8 / 2];
    }
    TILE_DEVICE decltype(auto) chunk(int row, int chunk) const { return Shared<Vector16>(offset)[place(row, chunk)]; }
};

namespace block {

// A tensor's rows, `stride` elements apart, one tile after another. Rows from `rows` on do not exist and become zero: a
// masked key has weight 0, and 0 · NaN would still be NaN. There are three ways to load a tile: element by element, 16
// bytes per thread, and 16 bytes per thread in the background. The last two need rows that begin at multiples of 16
// bytes.

// Element by element: a warp takes a row, and loads several rows before it stores the first, as far as registers allow.
constexpr int rows_together(int columns) { return columns <= 64 ? 4 : 512 / columns; }
template <class Tile>
TILE_DEVICE void load_row(const Tile& tile, Global<const typename Tile::Element> g, int64_t stride, int rows, int row) {
    using T = typename Tile::Element;
#pragma unroll
    for (int column = threadIdx.x % 32; column < Tile::kColumns; column += 32)
        tile.element(row, column) = row < rows ? T(g[row * stride + column]) : from_float<T>(0.0f);
}
template <int kThreads, class Tile>
TILE_DEVICE void load(const Tile& tile, Global<const typename Tile::Element> g, int64_t stride, int rows) {
    static_assert(Tile::kRows % (kThreads / 32) == 0, "the same number of rows for every warp");
#pragma unroll (rows_together(Tile::kColumns))
    for (int r = 0; r < Tile::kRows; r += kThreads / 32) load_row(tile, g, stride, rows, r + threadIdx.x / 32);
}
// Two tiles together: twice as many loads are in flight before the first is waited for.
template <int kThreads, class Tile>
TILE_DEVICE void load(const Tile& tile, Global<const typename Tile::Element> g, int64_t stride, const Tile& other,
                      Global<const typename Tile::Element> other_g, int64_t other_stride, int rows) {
    static_assert(Tile::kRows % (kThreads / 32) == 0, "the same number of rows for every warp");
#pragma unroll (rows_together(Tile::kColumns))
    for (int r = 0; r < Tile::kRows; r += kThreads / 32) {
        load_row(tile, g, stride, rows, r + threadIdx.x / 32);
        load_row(other, other_g, other_stride, rows, r + threadIdx.x / 32);
    }
}

// Each thread has its own row and chunk of the first kStep rows, and walks on from there: moving a pointer costs two
// additions per copy, where (first + row) · stride would cost a 64-bit product.
template <int kThreads, class Tile> struct Stream {
    using T = typename Tile::Element;
    static constexpr int kAcross = Tile::kChunks % 8 ? 4 : Tile::kChunks, kStep = kThreads / kAcross;
    static_assert(kThreads % kAcross == 0, "a step is whole rows");
    Global<const T> g;
    int64_t stride;
    int rows;  // that are left

    TILE_DEVICE Stream(Global<const T> first, int64_t stride_, int rows_)
        : g(first + (row() * stride_ + chunk() * 8)), stride(stride_), rows(rows_) {}
    static TILE_DEVICE int row() { return threadIdx.x / kAcross; }
    static TILE_DEVICE int chunk() { return threadIdx.x % kAcross; }

    TILE_DEVICE void next(const Tile& tile) {
        each([&](int r, int c) {
            const Global<const Vector16> from = (g + (r * stride + c * 8)).template as<const Vector16>();
            tile.chunk(row() + r, chunk() + c) = row() + r < rows ? Vector16(from[0]) : Vector16{};
        });
        skip();
    }
    TILE_DEVICE void next_async(const Tile& tile) {
        each([&](int r, int c) {
            ptx::copy_async_16(tile.address(row() + r, chunk() + c), g.address(r * stride + c * 8),
                               row() + r < rows ? 16 : 0);
        });
        skip();
    }
    template <class F> static TILE_DEVICE void each(F copy) {
#pragma unroll
        for (int r = 0; r < Tile::kRows; r += kStep)
#pragma unroll
            for (int c = 0; c < Tile::kChunks; c += kAcross)
                if (Tile::kRows % kStep == 0 || row() + r < Tile::kRows) copy(r, c);
    }
    TILE_DEVICE void skip() {
        g = g + Tile::kRows * stride;
        rows -= Tile::kRows;
    }
};

}  // namespace block
