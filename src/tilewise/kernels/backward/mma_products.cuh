// The products of the backward by mma.sync: of 16-bit values, and of float32 as three of TF32 (tile/tf32.cuh).
#pragma once
#include "backward/mma_layout.cuh"

// A of Aᵀ B: sixteen of the tile's columns, from 16m on, are the product's rows, and sixteen rows, from 16k on, its
// depth.
TILE_DEVICE void load_transposed(uint32_t (&a)[4], const TileDs& tile, int k, int m) {
    const int l = warp::lane();
    const uint32_t first = tile.address(l % 8 + l / 16 * 8, l / 8 % 2);
    ptx::ldmatrix_transposed(a, TileDs::along(first, 2 * m) + 16 * k * TileDs::kRowBytes);
}
// The same of floats, over eight rows: row t of the depth is the tile's row 2t and row t + 4 its row 2t + 1, as in
// warp::mma_pv_floats, so that what is read together lies in different banks.
TILE_DEVICE tf32::SplitStep load_transposed_floats(const TileDs& tile, int k, int m) {
    const int row = 8 * k + warp::fragment_column(), column = 16 * m + warp::lane() / 4;
    const auto at = [&](int r, int c) { return as_bits(to_float(Element(tile.element(row + r, column + c)))); };
    return {at(0, 0), at(0, 8), at(1, 0), at(1, 8)};
}

// A part of dQ = dS K
TILE_DEVICE void multiply_dq(float (&dq)[kDqM][kDqSize], const TileDs& ds, int part) {
    const TileKv sK(kAtK);
    const int row = dq_row(part) / 16, column = dq_column(part);
#pragma unroll
    for (int m = 0; m < kDqM; m++) warp::zero(dq[m]);
    if constexpr (kFloats) {
        const int t = warp::fragment_column(), g = warp::lane() / 4;
#pragma unroll 1
        for (int k = 0; k < kTileKv / 8; k += 2) {  // sixteen keys are summed up before dQ is touched
            tf32::SplitStep a[2][kDqM];
#pragma unroll
            for (int i = 0; i < 2 * kDqM; i++)
                a[i / kDqM][i % kDqM] = load_transposed_floats(ds, k + i / kDqM, row + i % kDqM);
#pragma unroll
            for (int n = 0; n < kDqColumns / 8; n++) {
                tf32::Split b[2][2];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const Element x = sK.element(8 * (k + i / 2) + t + i % 2, column + 8 * n + g);
                    b[i / 2][i % 2] = tf32::Split(as_bits(to_float(x)));
                }
#pragma unroll
                for (int m = 0; m < kDqM; m++) {
                    tf32::Part sixteen;
                    sixteen.multiply(a[0][m], b[0][0], b[0][1]);
                    sixteen.multiply(a[1][m], b[1][0], b[1][1]);
                    sixteen.add_to(warp::four(&dq[m][4 * n]));
                }
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < kTileKv / 16; k++) {
            uint32_t a[kDqM][4];
#pragma unroll
            for (int m = 0; m < kDqM; m++) load_transposed(a[m], ds, k, row + m);
#pragma unroll
            for (int n = 0; n < kDqColumns / 16; n++) {
                uint32_t b[4];
                warp::load_b(b, sK, column / 16 + n, k);
#pragma unroll
                for (int m = 0; m < kDqM; m++) warp::mma_pair<Element>(dq[m], n, a[m], b);
            }
        }
    }
}

// A warp's rows of K (V), from row0 on, if they stay in registers
struct Own {
    static constexpr int kSteps = kHeadDim / kDepth;
    uint32_t rows[kOwnInRegisters ? kSteps : 1][kM][4];
    TILE_DEVICE void take(const TileKv& tile, int row0) {
        if constexpr (kOwnInRegisters)
#pragma unroll
            for (int i = 0; i < kSteps * kM; i++)
                warp::load_a(rows[i / kM][i % kM], tile, row0 + 16 * (i % kM), i / kM);
    }
    // acc += these rows times those of Q (dO)
    TILE_DEVICE void multiply(Fragments& acc, const TileKv& tile, int row0, const TileQ& with) const {
        constexpr int kUnrolled = kFloats ? 1 : kSteps;  // the splits of floats would all be made at once
#pragma unroll kUnrolled
        for (int step = 0; step < kSteps; step += kTaken) {
            uint32_t a[kTaken][kM][4];
#pragma unroll
            for (int i = 0; i < kTaken * kM; i++) {
                const int m = i % kM, k = step + i / kM;
                if constexpr (kOwnInRegisters)
#pragma unroll
                    for (int r = 0; r < 4; r++) a[i / kM][m][r] = rows[k][m][r];
                else warp::load_a(a[i / kM][m], tile, row0 + 16 * m, k);
            }
            warp::mma_qk_step(acc, a, with, step / kTaken);
        }
    }
};
