// The state that a streaming warp holds of its rows over one piece of their range, and how states of pieces are folded.
// states.cuh says what a state is.
#pragma once
#include "decode/load.cuh"

constexpr int kAtParts = kAtRings;  // the rings are free when states are merged
constexpr int kRowAtOnce =
    kTileStages > 0 || kValueDim > 128 || kWarps * kBlocksPerSm > 8 ? 8 : 16;  // as registers allow
constexpr bool kLongRuns = kTilesByMma;
constexpr int kStateGroup = 1;
#include "decode/states.cuh"
#include "tile/powers.cuh"

constexpr int kBlocks = kRows / 8;         // blocks of eight query rows
constexpr int kSteps = kHeadDim / 16;      // steps of depth sixteen
constexpr int kOutTiles = kValueDim / 16;  // tiles of sixteen output channels

// In the transposed fragments of stream.cuh a lane has two rows of each block of eight, i = 0 and 1, and the eight
// lanes with the same lane % 4 share them.
struct Piece {
    const int lane;
    float acc_o[kBlocks][kOutTiles][4];
    float max[kBlocks][2], sum[kBlocks][2];  // m, and this lane's share of l
    float zero_sum[kBlocks][2][kValueGroups];     // int4: this lane's share of Σ P · zero point

    TILE_DEVICE Piece() : lane(warp::lane()) {}

    // Over the eight lanes that share a row
    static TILE_DEVICE float row_max(float x) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, ptx::shuffle_xor(x, lanes));
        return x;
    }
    static TILE_DEVICE float row_sum(float x) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) x += ptx::shuffle_xor(x, lanes);
        return x;
    }

    // The empty state
    TILE_DEVICE void begin_piece() {
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                max[b][i] = kLowest;
                sum[b][i] = 0.0f;
                if constexpr (kZeros)
#pragma unroll
                    for (int g = 0; g < kValueGroups; g++) zero_sum[b][i][g] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kOutTiles; n++) warp::zero(acc_o[b][n]);
        }
    }

    // Multiplies the state of row (b, i) by 2^(m − to) and makes `to` its reference
    TILE_DEVICE void move_reference(int b, int i, float to) {
        const float by = ptx::exp2(max[b][i] - to);
        max[b][i] = to;
        sum[b][i] *= by;
#pragma unroll
        for (int n = 0; n < kOutTiles; n++) {
            acc_o[b][n][i] *= by;
            acc_o[b][n][2 + i] *= by;
        }
        if constexpr (kZeros)
#pragma unroll
            for (int g = 0; g < kValueGroups; g++) zero_sum[b][i][g] *= by;
    }

    // The end of a piece: l is summed over the lanes, and O comes out in its own units, not yet divided
    TILE_DEVICE void finish_piece() {
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sum[b][i] = row_sum(sum[b][i]);
                if constexpr (kScaled) {
                    // While streaming, the reference stood where P · scale was about 1. States that are merged expect P
                    // itself to be about 1: the sum is brought to between 1 and 2.
                    const float down = power_above(sum[b][i], 1);
                    sum[b][i] *= down;
                    max[b][i] -= log2_of_power(down);
                    float zero[kValueGroups];
                    if constexpr (kZeros)
#pragma unroll
                        for (int g = 0; g < kValueGroups; g++) zero[g] = row_sum(zero_sum[b][i][g]) * down;
#pragma unroll
                    for (int n = 0; n < kOutTiles; n++)
#pragma unroll
                        for (int upper = 0; upper < 2; upper++) {
                            float& x = acc_o[b][n][2 * upper + i];
                            x *= down * quant::output_unit<kFormat>(upper);
                            if constexpr (kZeros) x += zero[n / 2 * 32 / kGroupSize];
                        }
                }
            }
    }

    // Folds this finished piece into the state of the pieces before it, which `save` left in shared memory.
    TILE_DEVICE void fold(int rank) {
        const Shared<float> before(fold_of_warp(rank)), ml(fold_of_warp(rank) + kRows * kValueDim * 4);
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = (2 * b + i) * 32 + lane;
                const Fold of = fold_of(float(ml[2 * at]), max[b][i]);
                max[b][i] = of.max;
                sum[b][i] = of.join(ml[2 * at + 1], sum[b][i]);
#pragma unroll
                for (int n = 0; n < 2 * kOutTiles; n++) {
                    float& x = acc_o[b][n / 2][n % 2 * 2 + i];
                    x = of.join(before[(2 * kOutTiles * (2 * b + i) + n) * 32 + lane], x);
                }
            }
    }
    TILE_DEVICE void save(int rank) const {
        const Shared<float> to(fold_of_warp(rank)), ml(fold_of_warp(rank) + kRows * kValueDim * 4);
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = (2 * b + i) * 32 + lane;
                ml[2 * at] = max[b][i];
                ml[2 * at + 1] = sum[b][i];
#pragma unroll
                for (int n = 0; n < 2 * kOutTiles; n++)
                    to[(2 * kOutTiles * (2 * b + i) + n) * 32 + lane] = acc_o[b][n / 2][n % 2 * 2 + i];
            }
    }
};
