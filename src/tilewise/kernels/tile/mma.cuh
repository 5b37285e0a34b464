// Register tiles of a warp for mma.sync: sixteen rows, in the fragments' layout.
//
// An accumulator of N columns is a plain float[N / 2]: value [4n + 2h + i] of a lane is row lane / 4 + 8h, column
// 8n + 2 (lane % 4) + i. A warp's quarter of a wgmma accumulator has the same layout, so softmax.cuh, keys.cuh and the
// conversions and stores below serve both. An A operand of K columns is uint32_t[K / 16][4], two 16-bit values per
// register.
#pragma once
#include "tile/tiles.cuh"

namespace warp {

TILE_DEVICE int lane() { return threadIdx.x % 32; }
// A lane's accumulators belong to two rows, h = 0 and 1; fragment_column is the first of its columns.
TILE_DEVICE int fragment_row(int h) { return lane() / 4 + 8 * h; }
TILE_DEVICE int fragment_column() { return lane() % 4 * 2; }

template <int kSize> TILE_DEVICE void zero(float (&acc)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; i++) acc[i] = 0.0f;
}

// ---- fragments from shared memory -----------------------------------------------------------------------------------
// The swizzle repeats after sixteen rows: they are added to the address as a constant offset of ldmatrix.
// A: rows row0 … row0 + 15, columns 16k … 16k + 15.
template <class Tile> TILE_DEVICE void load_a(uint32_t (&a)[4], const Tile& tile, int row0, int k, int l = lane()) {
    ptx::ldmatrix(a, Tile::along(tile.address(row0 + l % 16, l / 16), 2 * k));
}
template <int kSteps, class Tile> TILE_DEVICE void load_a(uint32_t (&a)[kSteps][4], const Tile& tile, int row0) {
#pragma unroll
    for (int k = 0; k < kSteps; k++) load_a(a[k], tile, row0, k);
}
// Stores such a fragment into a tile
template <class Tile>
TILE_DEVICE void store_a(const Tile& tile, int row0, int k, const uint32_t (&a)[4], int l = lane()) {
    ptx::stmatrix(Tile::along(tile.address(row0 + l % 16, l / 16), 2 * k), a);
}
// B of A Bᵀ (K in Q Kᵀ): the tile's rows are the product's columns, here two eights of them from 16n; b[0], b[1] serve
// the first eight and b[2], b[3] the second. mma wants B's columns dense, which is how a row of K lies: ldmatrix as it
// is.
template <class Tile> TILE_DEVICE void load_bt(uint32_t (&b)[4], const Tile& tile, int n, int k, int l = lane()) {
    ptx::ldmatrix(b, Tile::along(tile.address(l % 8 + l / 16 * 8, l / 8 % 2), 2 * k) + 16 * n * Tile::kRowBytes);
}
// B of A B (V in P V): the tile's rows are the depth, its columns the product's, so each 8 × 8 is transposed on the
// way.
template <class Tile> TILE_DEVICE void load_b(uint32_t (&b)[4], const Tile& tile, int n, int k) {
    ptx::ldmatrix_transposed(b, Tile::along(tile.address(lane() % 16, lane() / 16), 2 * n) + 16 * k * Tile::kRowBytes);
}

// ---- products -------------------------------------------------------------------------------------------------------
// acc, columns 16n … 16n + 15, += A b
template <class T, int kSize>
TILE_DEVICE void mma_pair(float (&acc)[kSize], int n, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    float (&first)[4] = reinterpret_cast<float (&)[4]>(acc[8 * n]),
          (&second)[4] = reinterpret_cast<float (&)[4]>(acc[8 * n + 4]);
    if constexpr (sizeof(T) == 1) {
        ptx::mma_16x8x32_e4m3(first, a, b[0], b[1]);
        ptx::mma_16x8x32_e4m3(second, a, b[2], b[3]);
    } else {
        ptx::mma_16x8x16<T>(first, a, b[0], b[1]);
        ptx::mma_16x8x16<T>(second, a, b[2], b[3]);
    }
}
// acc += A Bᵀ, for one step of depth: 32 bytes, which are 16 values, or 32 of FP8
template <int kSize, class Tile>
TILE_DEVICE void mma_abt_step(float (&acc)[kSize], const uint32_t (&a)[4], const Tile& tile, int k, int l = lane()) {
    static_assert(kSize * 2 == Tile::kRows, "the product has a column for each of B's rows");
#pragma unroll
    for (int n = 0; n < kSize / 8; n++) {
        uint32_t b[4];
        load_bt(b, tile, n, k, l);
        mma_pair<typename Tile::Element>(acc, n, a, b);
    }
}
// acc += A Bᵀ, A in registers
template <int kSize, int kSteps, class Tile>
TILE_DEVICE void mma_abt(float (&acc)[kSize], const uint32_t (&a)[kSteps][4], const Tile& tile) {
    static_assert(kSteps * 16 == Tile::kColumns, "A and B have the same depth");
#pragma unroll
    for (int k = 0; k < kSteps; k++) mma_abt_step(acc, a[k], tile, k);
}
// acc += A Bᵀ, A in shared memory, from row0 on
template <int kSize, class TileA, class TileB>
TILE_DEVICE void mma_abt(float (&acc)[kSize], const TileA& a, int row0, const TileB& b) {
    static_assert(TileA::kColumns == TileB::kColumns, "A and B have the same depth");
#pragma unroll
    for (int k = 0; k < TileA::kColumns / 16; k++) {
        uint32_t fragment[4];
        load_a(fragment, a, row0, k);
        mma_abt_step(acc, fragment, b, k);
    }
}
// acc += A B
template <int kSize, int kSteps, class Tile>
TILE_DEVICE void mma_ab(float (&acc)[kSize], const uint32_t (&a)[kSteps][4], const Tile& tile) {
    static_assert(kSteps * 16 == Tile::kRows && kSize * 2 == Tile::kColumns,
                  "A is 16 × rows, the product 16 × columns");
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
        for (int n = 0; n < kSize / 8; n++) {
            uint32_t b[4];
            load_b(b, tile, n, k);
            mma_pair<typename Tile::Element>(acc, n, a[k], b);
        }
}

// ---- conversions and stores -----------------------------------------------------------------------------------------
// An accumulator as the next product's A operand: two eights of columns make a step of depth 16, no value changes
// lanes. In FP8 a step is 32 deep, and a register of the operand holds four neighbouring columns, where an accumulator
// has two and two. So the step's columns are permuted: 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 become 4t … 4t + 3, and the same
// 16 further on. B's rows have to be permuted alike; the sum does not depend on the order.
template <class T, int kSize>
TILE_DEVICE void to_operand(uint32_t (&a)[kSize * sizeof(T) / 16][4], const float (&acc)[kSize]) {
#pragma unroll
    for (int k = 0; k < int(kSize * sizeof(T) / 16); k++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if constexpr (sizeof(T) == 1) {
                const int first = 16 * k + 8 * (r / 2) + 2 * (r % 2);  // of row r % 2
                a[k][r] = ptx::pack_e4m3(acc[first], acc[first + 1], acc[first + 4], acc[first + 5]);
            } else {
                a[k][r] = pack<T>(acc[8 * k + 2 * r], acc[8 * k + 2 * r + 1]);
            }
        }
}
// Row h of every lane times factor[h]
template <int kSize> TILE_DEVICE void scale_rows(float (&acc)[kSize], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kSize; i++) acc[i] *= factor[i / 2 % 2];
}
// To global memory, straight from the fragments, element by element; g is the warp's first row, rows from `rows` on do
// not exist.
template <class T, int kSize> TILE_DEVICE void store(Global<T> g, int64_t stride, int rows, const float (&acc)[kSize]) {
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (fragment_row(h) < rows)
#pragma unroll
            for (int j = 0; j < kSize / 2; j++)  // j = 2n + i
                g[fragment_row(h) * stride + j / 2 * 8 + fragment_column() + j % 2] =
                    from_float<T>(acc[j / 2 * 4 + 2 * h + j % 2]);
}
// The same in 16 bytes per lane, without shared memory: the four lanes of a row exchange words until each has eight
// neighbouring columns. Row h of a lane goes to g[h] if exists[h]; columns from `columns` on are padding.
template <int kColumns, class T, int kSize>
TILE_DEVICE void store_rows(const Global<T> (&g)[2], const bool (&exists)[2], const float (&acc)[kSize],
                            int columns = kColumns) {
    static_assert(kSize % 16 == 0 && kColumns % 8 == 0, "quads of lanes store 32 columns, a lane eight");
    const int place = lane() % 4;
    const bool odd = place & 1, high = place & 2;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < kSize / 16; n++) {  // word c: columns 32n + 8c + 2 place, and one more
            Vector16 w;
#pragma unroll
            for (int c = 0; c < 4; c++)
                w.word[c] = pack<T>(acc[16 * n + 4 * c + 2 * h], acc[16 * n + 4 * c + 2 * h + 1]);
            uint32_t x = ptx::shuffle_xor(odd ? w.word[0] : w.word[1], 1),
                     y = ptx::shuffle_xor(odd ? w.word[2] : w.word[3], 1);
            (odd ? w.word[0] : w.word[1]) = x;
            (odd ? w.word[2] : w.word[3]) = y;
            x = ptx::shuffle_xor(high ? w.word[0] : w.word[2], 2),
            y = ptx::shuffle_xor(high ? w.word[1] : w.word[3], 2);
            (high ? w.word[0] : w.word[2]) = x;
            (high ? w.word[1] : w.word[3]) = y;
            if (exists[h] && 32 * n + 8 * place < columns)
                (g[h] + (32 * n + 8 * place)).template as<Vector16>()[0] = w;
        }
}
// The same through a shared tile, of which the warp uses sixteen rows from row0 on, so that each lane writes 16 bytes.
template <class T, int kSize, class Tile>
TILE_DEVICE void store_vectors(Global<T> g, int64_t stride, int rows, const float (&acc)[kSize], const Tile& tile,
                               int row0) {
    static_assert(kSize * 2 == Tile::kColumns, "the tile has the accumulator's columns");
#pragma unroll
    for (int j = 0; j < kSize / 2; j++)  // j = 2n + h
        tile.pair(row0 + fragment_row(j % 2), j / 2 * 8 + fragment_column()) = pack<T>(acc[2 * j], acc[2 * j + 1]);
    ptx::sync_warp();
#pragma unroll
    for (int i = lane(); i < 16 * Tile::kChunks; i += 32) {
        const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
        if (row < rows)
            (g + (row * stride + chunk * 8)).template as<Vector16>()[0] = Vector16(tile.chunk(row0 + row, chunk));
    }
}

}  // namespace warp
