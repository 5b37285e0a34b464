// Attention's two products by mma.sync for a warp with kM · 16 query rows: each fragment of K and V serves kM products.
//
// S, P and O are arrays of mma.cuh's accumulators, one per sixteen rows. A step of depth is 32 bytes of a row: 16
// values of 16 bits, 32 of FP8, 8 of float32.
//
// float32 goes through the tensor cores as TF32, which keeps 11 of 24 bits: each value is split into a sum of two such
// numbers, x = big + small, and x · y = big · big + big · small + small · big. What is left out, small · small, and
// what small loses by rounding are both about 2^−24 of x · y.
#pragma once
#include "tile/mma.cuh"

namespace warp {

template <class T> constexpr int kDepth = 32 / int(sizeof(T));  // of a step

struct Split {
    uint32_t big, small;
    TILE_DEVICE explicit Split(uint32_t bits) : big(ptx::to_tf32(as_float(bits))) {
        small = ptx::to_tf32(as_float(bits) - as_float(big));
    }
};
TILE_DEVICE void mma_split(float (&d)[4], const uint32_t (&big)[4], const uint32_t (&small)[4], Split b0, Split b1) {
    ptx::mma_16x8x8_tf32(d, small, b0.big, b1.big);
    ptx::mma_16x8x8_tf32(d, big, b0.small, b1.small);
    ptx::mma_16x8x8_tf32(d, big, b0.big, b1.big);
}
template <int kM> TILE_DEVICE void split(uint32_t (&big)[kM][4], uint32_t (&small)[kM][4]) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const Split parts(big[m][r]);
            big[m][r] = parts.big;
            small[m][r] = parts.small;
        }
}
TILE_DEVICE float (&four(float* acc))[4] { return reinterpret_cast<float (&)[4]>(*acc); }

// S += Q Kᵀ for step k of the depth; a: Q's fragments of it. It may come back split.
template <int kM, int kSize, class Tile>
TILE_DEVICE void mma_qk_step(float (&acc_s)[kM][kSize], uint32_t (&a)[kM][4], const Tile& sK, int k, int l = lane()) {
    static_assert(kSize * 2 == Tile::kRows, "S has a column for each of K's rows");
    using T = typename Tile::Element;
    uint32_t small[kM][4];
    if constexpr (sizeof(T) == 4) split(a, small);
#pragma unroll
    for (int n = 0; n < kSize / 8; n++) {
        uint32_t b[4];
        load_bt(b, sK, n, k, l);
        if constexpr (sizeof(T) == 4) {
            const Split s[4] = {Split(b[0]), Split(b[1]), Split(b[2]), Split(b[3])};
#pragma unroll
            for (int m = 0; m < kM; m++) {
                mma_split(four(&acc_s[m][8 * n]), a[m], small[m], s[0], s[1]);
                mma_split(four(&acc_s[m][8 * n + 4]), a[m], small[m], s[2], s[3]);
            }
        } else {
#pragma unroll
            for (int m = 0; m < kM; m++) mma_pair<T>(acc_s[m], n, a[m], b);
        }
    }
}

// O += P V. Of FP8, columns 4t … 4t + 3 of sixteen are a lane's (t = lane % 4): accumulators
// 8n + 2h + i hold columns 16n + 4t + 2i of O, and 8n + 4 + 2h + i the ones after them (`in_order`).
// 16 bits: sixteen keys per step; V is transposed by ldmatrix
template <class T, int kM, int kSteps, int kSizeO, class Tile>
TILE_DEVICE void mma_pv_halves(float (&acc_o)[kM][kSizeO], const uint32_t (&rP)[kM][kSteps][4], const Tile& sV) {
#pragma unroll
    for (int c = 0; c < kSteps; c++)
#pragma unroll
        for (int n = 0; n < kSizeO / 8; n++) {
            uint32_t b[4];
            load_b(b, sV, n, c);
#pragma unroll
            for (int m = 0; m < kM; m++) mma_pair<T>(acc_o[m], n, rP[m][c], b);
        }
}
// FP8: 32 keys per step. ldmatrix moves pairs of bytes: transposed, it gives a lane two neighbouring columns of two
// neighbouring keys. With the same of the keys eight further on, a lane has four bytes of a column: keys 2t, 2t + 1,
// 8 + 2t, 8 + 2t + 1, which is the order of keys in P (to_operand).
template <int kM, int kSteps, int kSizeO, class Tile>
TILE_DEVICE void mma_pv_bytes(float (&acc_o)[kM][kSizeO], const uint32_t (&rP)[kM][kSteps][4], const Tile& sV) {
    constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;
#pragma unroll
    for (int c = 0; c < kSteps; c++)
#pragma unroll
        for (int n = 0; n < kSizeO / 8; n++) {
            uint32_t r[4];
            ptx::ldmatrix_transposed(r, sV.address(32 * c + lane(), n));
            const uint32_t b[4] = {ptx::permute_bytes(r[0], r[1], kEven), ptx::permute_bytes(r[2], r[3], kEven),
                                   ptx::permute_bytes(r[0], r[1], kOdd), ptx::permute_bytes(r[2], r[3], kOdd)};
#pragma unroll
            for (int m = 0; m < kM; m++) mma_pair<typename Tile::Element>(acc_o[m], n, rP[m][c], b);
        }
}
// float32: eight keys per step. Row t of the step's depth is key 2t and row t + 4 is key 2t + 1, so that a lane's own
// accumulators are its fragment of P; the swizzle spreads the rows of V that are then read together over the banks.
template <int kM, int kSteps, int kSizeO, class Tile>
TILE_DEVICE void mma_pv_floats(float (&acc_o)[kM][kSizeO], const uint32_t (&rP)[kM][kSteps][4], const Tile& sV) {
    const int column = lane() / 4, row = fragment_column();
    const uint32_t even = sV.address(row, column / 4), odd = sV.address(row + 1, column / 4), inside = column % 4 * 4;
#pragma unroll
    for (int c = 0; c < kSteps; c++) {
        uint32_t a[kM][4], small[kM][4];
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int r = 0; r < 4; r++) a[m][r] = rP[m][c][r % 2 * 2 + r / 2];
        split(a, small);
#pragma unroll
        for (int n = 0; n < kSizeO / 4; n++) {
            const uint32_t further = 8 * c * Tile::kRowBytes + inside;
            const Split b0(ptx::load_shared(Tile::along(even, 2 * n) + further));
            const Split b1(ptx::load_shared(Tile::along(odd, 2 * n) + further));
#pragma unroll
            for (int m = 0; m < kM; m++) mma_split(four(&acc_o[m][4 * n]), a[m], small[m], b0, b1);
        }
    }
}
// ---- the same products on CUDA cores --------------------------------------------------------------------------------
// For float32 on cards whose tensor cores do three TF32 products in more time than that. Accumulators stay where mma has
// them: a lane computes its 2 · kM rows by its columns, and four neighbouring values come with each load.
template <class Tile> TILE_DEVICE void load_four(float (&x)[4], const Tile& tile, int row, int chunk) {
    const Vector16 words = tile.chunk(row, chunk);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = as_float(words.word[i]);
}
// S += Q Kᵀ; row0: the first of the kM sixteens of Q's rows
template <int kM, int kSize, class TileQ, class Tile>
TILE_DEVICE void ffma_qk(float (&acc_s)[kM][kSize], const TileQ& sQ, int row0, const Tile& sK) {
#pragma unroll 1
    for (int c = 0; c < Tile::kChunks; c++) {
        float q[kM][2][4];
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) load_four(q[m][h], sQ, row0 + 16 * m + fragment_row(h), c);
#pragma unroll
        for (int j = 0; j < kSize / 2; j++) {  // j = 2n + i
            float k[4];
            load_four(k, sK, j / 2 * 8 + fragment_column() + j % 2, c);
#pragma unroll
            for (int m = 0; m < kM; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& s = acc_s[m][j / 2 * 4 + 2 * h + j % 2];
#pragma unroll
                    for (int d = 0; d < 4; d++) s = ptx::mad(q[m][h][d], k[d], s);
                }
        }
    }
}
// O += P V, its columns as mma_pv_bytes leaves them (`in_order`); a quad's lanes tell each other their weights.
template <int kM, int kSteps, int kSizeO, class Tile>
TILE_DEVICE void ffma_pv(float (&acc_o)[kM][kSizeO], const uint32_t (&rP)[kM][kSteps][4], const Tile& sV) {
    const int t = lane() % 4, quad = lane() - t;
#pragma unroll
    for (int key = 0; key < 8 * kSteps; key++) {
        float p[kM][2];
#pragma unroll
        for (int m = 0; m < kM; m++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                p[m][h] = as_float(ptx::shuffle(rP[m][key / 8][2 * h + key % 2], quad + key % 8 / 2));
#pragma unroll
        for (int n = 0; n < kSizeO / 8; n++) {
            float v[4];
            load_four(v, sV, key, 4 * n + t);
#pragma unroll
            for (int m = 0; m < kM; m++)
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& o = acc_o[m][8 * n + i % 2 * 4 + 2 * h + i / 2];
                        o = ptx::mad(p[m][h], v[i], o);
                    }
        }
    }
}

// O of FP8 products, and of those on CUDA cores, as all other accumulators are: the lanes of a row exchange columns.
template <int kSize> TILE_DEVICE void in_order(float (&acc)[kSize]) {
    const int t = lane() % 4;
#pragma unroll
    for (int n = 0; n < kSize / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // Columns 4t … 4t + 3 are here; 2t, 2t + 1 and 8 + 2t, 8 + 2t + 1 are wanted, of lanes t / 2 and 2 + t / 2.
            float* even = &acc[8 * n + 2 * h];
            float* odd = even + 4;
            const float own[4] = {even[0], odd[0], even[1], odd[1]};
            float got[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                got[0][i] = ptx::shuffle(own[i], lane() - t + t / 2);
                got[1][i] = ptx::shuffle(own[i], lane() - t + 2 + t / 2);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                even[i] = t % 2 ? got[0][2 + i] : got[0][i];
                odd[i] = t % 2 ? got[1][2 + i] : got[1][i];
            }
        }
}
template <int kM, int kSteps, int kSizeO, class Tile>
TILE_DEVICE void mma_pv(float (&acc_o)[kM][kSizeO], const uint32_t (&rP)[kM][kSteps][4], const Tile& sV) {
    using T = typename Tile::Element;
    static_assert(kSteps * kDepth<T> == Tile::kRows && kSizeO * 2 == Tile::kColumns, "P V: rows × keys × columns");
    if constexpr (sizeof(T) == 1) mma_pv_bytes(acc_o, rP, sV);
    else if constexpr (sizeof(T) == 4) mma_pv_floats(acc_o, rP, sV);
    else mma_pv_halves<T>(acc_o, rP, sV);
}

// P as the operand of P V: rounded to T, or of float32 the accumulators as they are
template <class T, int kM, int kSize>
TILE_DEVICE void to_weights(uint32_t (&rP)[kM][kSize * 2 / kDepth<T>][4], const float (&acc_s)[kM][kSize]) {
#pragma unroll
    for (int m = 0; m < kM; m++) {
        if constexpr (sizeof(T) == 4)
#pragma unroll
            for (int i = 0; i < kSize; i++) rP[m][i / 4][i % 4] = as_bits(acc_s[m][i]);
        else to_operand<T>(rP[m], acc_s[m]);
    }
}

}  // namespace warp
