// The online softmax over accumulators in fragment layout (mma.cuh): float[N / 2], two rows per lane, four lanes per
// row.
#pragma once
#include "tile/mma.cuh"

namespace warp {

// Over the four lanes that share a row
TILE_DEVICE float row_max(float x) {
    x = fmaxf(x, ptx::shuffle_xor(x, 1));
    return fmaxf(x, ptx::shuffle_xor(x, 2));
}
TILE_DEVICE float row_sum(float x) {
    x += ptx::shuffle_xor(x, 1);
    return x + ptx::shuffle_xor(x, 2);
}

// tanh y of z = 2 y log2 e: 1 − 2 / (1 + e^2y), which near 0 is a difference of ones and loses y; there its series.
// kFine: to float32's own precision, by a longer series over more of the way.
template <bool kFine = false> TILE_DEVICE float tanh_from_log2(float z) {
    if constexpr (kFine) {
        const float y = z * (0.5f * kLn2), square = y * y;
        const float outer = ptx::mad(square, 0.01645874f, -0.05268413f);
        const float inner = ptx::mad(square, ptx::mad(square, outer, 0.13320942f), -0.33332959f);
        const float series = ptx::mad(y, square * inner, y);
        return fabsf(y) < 0.55f ? series : 1.0f - 2.0f * ptx::reciprocal(1.0f + ptx::exp2(z));
    }
    const float y = z * (0.5f * kLn2), square = y * y;
    const float series = y * ptx::mad(square, ptx::mad(square, 2.0f / 15.0f, -1.0f / 3.0f), 1.0f);
    return fabsf(y) < 0.1f ? series : 1.0f - 2.0f * ptx::reciprocal(1.0f + ptx::exp2(z));
}

// What is known of a lane's two rows so far.
struct RowState {
    float max[2] = {-INFINITY, -INFINITY};  // m: the largest score times scale_log2, as rounded, less the lift
    float sum[2] = {0.0f, 0.0f};            // l: this lane's share of Σ P; the lanes are added up once, at the end
};

// m' = max(m, S · scale), P = 2^(S · scale − m') in place of S, l = l · c + Σ P with c = 2^(m − m'), which O is still
// to be multiplied with. The scale (positive) goes into the exponential's multiply-add. c is made from the same rounded
// m that P was: from unrounded products, a large m that stands still would give c = 1 ± ε and each tile would drift
// from the last. kLift: the largest P is 2^kLift, for formats of P that have more room above 1 than digits below.
template <int kLift = 0, int kSize>
TILE_DEVICE void online_softmax(float (&acc_s)[kSize], float (&correction)[2], RowState& state, float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float tile_max = -INFINITY;
#pragma unroll
        for (int n = 0; n < kSize / 4; n++)
            tile_max = fmaxf(tile_max, fmaxf(acc_s[4 * n + 2 * h], acc_s[4 * n + 2 * h + 1]));
        const float max = fmaxf(state.max[h], row_max(tile_max) * scale_log2 - kLift);
        // No key seen yet: −inf − (−inf) would be NaN, any finite reference gives 2^−inf = 0.
        const float reference = max == -INFINITY ? 0.0f : max;
        correction[h] = ptx::exp2(state.max[h] - reference);
        state.max[h] = max;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kSize / 4; n++)
#pragma unroll
            for (int i = 4 * n + 2 * h; i < 4 * n + 2 * h + 2; i++) {
                acc_s[i] = ptx::exp2(ptx::mad(acc_s[i], scale_log2, -reference));
                sum += acc_s[i];
            }
        state.sum[h] = state.sum[h] * correction[h] + sum;
    }
}

// O / l and LSE = m + log l, natural; a row that saw no key gives 0 and −inf.
template <int kSize> TILE_DEVICE void normalise(float (&acc_o)[kSize], float (&lse)[2], const RowState& state) {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float sum = row_sum(state.sum[h]);
        inverse[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
        lse[h] = sum == 0.0f ? -INFINITY : (state.max[h] + ptx::log2(sum)) * kLn2;
    }
    scale_rows(acc_o, inverse);
}
// g is the warp's first row; rows from `rows` on do not exist.
TILE_DEVICE void store_lse(Global<float> g, int rows, const float (&lse)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (lane() % 4 == 0 && fragment_row(h) < rows) g[fragment_row(h)] = lse[h];
}

}  // namespace warp
