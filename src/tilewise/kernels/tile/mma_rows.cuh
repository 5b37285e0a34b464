// Attention's two products by mma.sync for a warp with kM · 16 query rows: each fragment of K and V serves kM products.
//
// S, P and O are arrays of mma.cuh's accumulators, one per sixteen rows. A step of depth is 32 bytes of a row: 16
// values of 16 bits, 32 of FP8, 8 of float32.
//
// float32 goes through the tensor cores as TF32 (tf32.cuh), two steps at a time.
#pragma once
#include "tile/mma.cuh"
#include "tile/tf32.cuh"

namespace warp {

template <class T> constexpr int kDepth = 32 / int(sizeof(T));  // of a step

template <class T> constexpr int kTogether = sizeof(T) == 4 ? 2 : 1;  // steps

TILE_DEVICE float (&four(float* acc))[4] { return reinterpret_cast<float (&)[4]>(*acc); }

// S += Q Kᵀ for the steps of number k of the depth, as many as are taken together; a: Q's fragments of them
template <int kM, int kTaken, int kSize, class Tile>
TILE_DEVICE void mma_qk_step(float (&acc_s)[kM][kSize], const uint32_t (&a)[kTaken][kM][4], const Tile& sK, int k,
                             int l = lane()) {
    static_assert(kSize * 2 == Tile::kRows, "S has a column for each of K's rows");
    using T = typename Tile::Element;
    static_assert(kTaken == kTogether<T>);
    if constexpr (sizeof(T) == 4) {
        tf32::SplitStep q[2][kM];
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) {
            const uint32_t (&words)[4] = a[i / kM][i % kM];
            q[i / kM][i % kM] = tf32::SplitStep(words[0], words[1], words[2], words[3]);
        }
#pragma unroll
        for (int n = 0; n < kSize / 8; n++) {
            uint32_t b[2][4];
            load_bt(b[0], sK, n, 2 * k, l);
            load_bt(b[1], sK, n, 2 * k + 1, l);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const tf32::Split k0[2] = {tf32::Split(b[0][2 * half]), tf32::Split(b[0][2 * half + 1])};
                const tf32::Split k1[2] = {tf32::Split(b[1][2 * half]), tf32::Split(b[1][2 * half + 1])};
#pragma unroll
                for (int m = 0; m < kM; m++) {
                    tf32::Part part;
                    part.multiply(q[0][m], k0[0], k0[1]);
                    part.multiply(q[1][m], k1[0], k1[1]);
                    part.add_to(four(&acc_s[m][8 * n + 4 * half]));
                }
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < kSize / 8; n++) {
            uint32_t b[4];
            load_bt(b, sK, n, k, l);
#pragma unroll
            for (int m = 0; m < kM; m++) mma_pair<T>(acc_s[m], n, a[0][m], b);
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
    static_assert(kSteps % 2 == 0, "steps are taken two at a time");
#pragma unroll
    for (int c = 0; c < kSteps; c += 2) {
        tf32::SplitStep p[2][kM];
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) {
            const uint32_t (&words)[4] = rP[i % kM][c + i / kM];
            p[i / kM][i % kM] = tf32::SplitStep(words[0], words[2], words[1], words[3]);
        }
#pragma unroll
        for (int n = 0; n < kSizeO / 4; n++) {
            tf32::Split v[2][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t further = 8 * (c + i) * Tile::kRowBytes + inside;
                v[i][0] = tf32::Split(ptx::load_shared(Tile::along(even, 2 * n) + further));
                v[i][1] = tf32::Split(ptx::load_shared(Tile::along(odd, 2 * n) + further));
            }
#pragma unroll
            for (int m = 0; m < kM; m++) {
                tf32::Part part;
                part.multiply(p[0][m], v[0][0], v[0][1]);
                part.multiply(p[1][m], v[1][0], v[1][1]);
                part.add_to(four(&acc_o[m][4 * n]));
            }
            // Loads of later columns stay behind it, and take no registers before.
            if ((n + 1) % (4 * kM) == 0) ptx::sync_warp();
        }
    }
}
// ---- the same products on CUDA cores --------------------------------------------------------------------------------
// For float32 on cards whose tensor cores do three TF32 products in more time than that. Accumulators stay where mma
// has them: a lane computes its 2 · kM rows by its columns, and four neighbouring values come with each load.
template <class Tile> TILE_DEVICE void load_four(float* x, const Tile& tile, int row, int chunk) {
    const Vector16 words = tile.chunk(row, chunk);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = as_float(words.word[i]);
}
// S += Q Kᵀ; row0: the first of the kM sixteens of Q's rows. Eight channels are summed up before S is touched: one sum
// over all channels would round too often.
template <int kM, int kSize, class TileQ, class Tile>
TILE_DEVICE void ffma_qk(float (&acc_s)[kM][kSize], const TileQ& sQ, int row0, const Tile& sK) {
    static_assert(Tile::kChunks % 2 == 0, "chunks are taken two at a time");
#pragma unroll 1
    for (int c = 0; c < Tile::kChunks; c += 2) {
        float q[kM][2][8];
#pragma unroll
        for (int i = 0; i < kM * 4; i++) {
            const int m = i / 4, h = i / 2 % 2;
            load_four(&q[m][h][i % 2 * 4], sQ, row0 + 16 * m + fragment_row(h), c + i % 2);
        }
#pragma unroll
        for (int j = 0; j < kSize / 2; j++) {  // j = 2n + i
            float k[8];
#pragma unroll
            for (int i = 0; i < 2; i++) load_four(&k[4 * i], sK, j / 2 * 8 + fragment_column() + j % 2, c + i);
#pragma unroll
            for (int i = 0; i < kM * 2; i++) {
                const float (&row)[8] = q[i / 2][i % 2];
                float sum = row[0] * k[0];
#pragma unroll
                for (int d = 1; d < 8; d++) sum = ptx::mad(row[d], k[d], sum);
                acc_s[i / 2][j / 2 * 4 + 2 * (i % 2) + j % 2] += sum;
            }
        }
    }
}
// O += P V, its columns as mma_pv_bytes leaves them (`in_order`); a quad's lanes tell each other their weights. Eight
// keys are summed up before O is touched: one sum over all keys would round too often.
template <int kM, int kSteps, int kSizeO, class Tile>
TILE_DEVICE void ffma_pv(float (&acc_o)[kM][kSizeO], const uint32_t (&rP)[kM][kSteps][4], const Tile& sV) {
    const int t = lane() % 4, quad = lane() - t;
#pragma unroll
    for (int c = 0; c < kSteps; c++) {
        float p[8][kM][2];
#pragma unroll
        for (int i = 0; i < 8 * kM * 2; i++) {
            const int m = i / 2 % kM, h = i % 2, key = i / (2 * kM);
            p[key][m][h] = as_float(ptx::shuffle(rP[m][c][2 * h + key % 2], quad + key / 2));
        }
#pragma unroll
        for (int n = 0; n < kSizeO / 8; n++) {
            float sum[kM][2][4] = {};
#pragma unroll
            for (int key = 0; key < 8; key++) {
                float v[4];
                load_four(v, sV, 8 * c + key, 4 * n + t);
#pragma unroll
                for (int i = 0; i < kM * 2 * 4; i++) {
                    float& x = sum[i / 8][i / 4 % 2][i % 4];
                    x = ptx::mad(p[key][i / 8][i / 4 % 2], v[i % 4], x);
                }
            }
#pragma unroll
            for (int i = 0; i < kM * 2 * 4; i++)
                acc_o[i / 8][8 * n + i % 2 * 4 + 2 * (i / 4 % 2) + i % 4 / 2] += sum[i / 8][i / 4 % 2][i % 4];
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

// P of sixteen rows as the operand of P V: rounded to T, or of float32 the accumulators as they are
template <class T, int kSize>
TILE_DEVICE void to_weights(uint32_t (&rP)[kSize * 2 / kDepth<T>][4], const float (&acc_s)[kSize]) {
    if constexpr (sizeof(T) == 4)
#pragma unroll
        for (int i = 0; i < kSize; i++) rP[i / 4][i % 4] = as_bits(acc_s[i]);
    else to_operand<T>(rP, acc_s);
}

}  // namespace warp
