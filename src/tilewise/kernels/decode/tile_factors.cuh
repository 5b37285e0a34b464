// Quantised tiles, from the side of the warpgroups that multiply them: codes are halves in shared memory, and what a
// token's codes are multiplied with stands beside the tile.
//
//     S = (Q Kᵀ) · factor of the token's K,   O += (P · factor of the token's V) V
//
// int8 and e4m3 are exact as halves, and the factor is the scale. int4 has a scale and a zero point for each group of
// channels: a half holds (code − 8) · scale of a key and code · scale of a value, both scales divided by the power of
// two that is the token's factor. The rest enters as sums in float32: S += Σ (zero + 8 · scale) · Σ q over the groups,
// and O += Σ P · zero. A key so enters exactly: three bits times eight are the eleven of a half. A value of more bits
// is rounded, like the weights.
//
// Weights: what enters the second product, P times the factor of V, must fit a half, and a row's largest should be near
// 1, or its smaller ones lose digits. So a row's reference is not its largest score: it is chosen for the largest
// product to be about 1. A tile that a row sees whole is taken as it comes (no maximum is looked for) as long as no
// lane's sum of P exceeds the tile's limit, which keeps products within 2^15 and sums within 2^100. If one does, S is
// computed again and the careful step follows.
#pragma once
#include "decode/stream.cuh"
#include "decode/warps.cuh"
#include "tile/softmax.cuh"

// Two head dimensions leave no registers for any of this: streaming warps take the nodes of such caches.
static_assert(!kTilesByWgmma || !kScaled || kOneDim, "quantised K and V of one head dimension");
constexpr int kGroups = kKeyGroups, kRowBytes = KeyRows::kBytes;  // and of V as well

constexpr float kMostProduct = 32768.0f, kMostWeight = 1.2676506002e30f;  // 2^15; 2^100
constexpr int kMostLift = 90;  // references stand at most 2^90 below the largest score: a lane's sum is then in range

// The parts of a tile's factors: of K's tokens, of V's, what zero points add to S (one part per group), and to O
enum TileFactorPart { kKeyFactors, kValueFactors, kKeyZeros, kValueZeros = kKeyZeros + kGroups };
struct TileFactors {
    uint32_t at;
    TILE_DEVICE explicit TileFactors(uint32_t stage) : at(kAtTileFactors + stage * kTileFactorBytes) {}
    TILE_DEVICE Shared<float> part(int n) const { return Shared<float>(at + 4 * kTileTokens * n); }
    // int4: the scales that go into the halves, divided by the token's factor, each twice; token: of K's 64 and then of
    // V's
    TILE_DEVICE uint32_t scales_at(int token) const {
        return at + 4 * (kTileTokens * (kValueZeros + kGroups) + kGroups * token);
    }
    TILE_DEVICE Shared<uint32_t> scale(int token) const { return Shared<uint32_t>(scales_at(token)); }
    // What a lane's sum of P may be
    TILE_DEVICE decltype(auto) limit() const { return Shared<float>(at + kTileFactorBytes - 16)[0]; }
};

// The factors of a lane's columns: two of each eight tokens, from an even one on. One address serves all of them,
// hidden from the compiler, which would otherwise add up each anew: an instruction more per load.
struct LaneFactors {
    uint32_t at;
    TILE_DEVICE LaneFactors(const TileFactors& of, int column) : at(of.at + 4 * column) {
        if constexpr (Rule::kLinear) at = ptx::just_in_time(int(at));  // rules of scores leave no register for it
    }
    // Of part n, and the columns of the eight-th eight tokens
    TILE_DEVICE void pair(float (&x)[2], int n, int eight) const {
        const int words = kTileTokens * n + 8 * eight;
        const Vector8 two = Rule::kLinear ? Shared<Vector8>(at)[words / 2] : Shared<Vector8>(at + 4 * words)[0];
        x[0] = as_float(two.word[0]);
        x[1] = as_float(two.word[1]);
    }
};

// int4: Σ q over a group of channels, of the 128 rows of an item. Registers are scarce, so they stay in shared memory.
struct TileRowSums {
    // A lane has rows h = 0 and 1 of those that begin at lane / 4 in its warp's sixteen.
    static TILE_DEVICE Shared<float> row(int group) {
        const int thread = ptx::just_in_time(threadIdx.x);
        return Shared<float>(uint32_t(kAtTileRows + 4 * (128 * group + thread / 32 * 16 + thread % 32 / 4)));
    }
    // Of row n of a warp's sixteen, by any of its lanes; read by all after a sync_warp
    static TILE_DEVICE void put(int n, int group, float x) {
        const int warp = ptx::just_in_time(threadIdx.x) / 32;
        Shared<float>(uint32_t(kAtTileRows + 4 * (128 * group + warp * 16 + n)))[0] = x;
    }
    static TILE_DEVICE void load(float (&x)[2], int group) {
        x[0] = row(group)[0];
        x[1] = row(group)[8];
    }
};

namespace quantised {

// S times the tokens' factors. column: the lane's first column of eight
template <int kSize>
TILE_DEVICE void scale_scores(float (&acc_s)[kSize], const TileFactors& tile, int column) {
    const LaneFactors factors(tile, column);
    float q_sum[kGroups][2];
    if constexpr (kZeros)
#pragma unroll
        for (int g = 0; g < kGroups; g++) TileRowSums::load(q_sum[g], g);
#pragma unroll
    for (int n = 0; n < kSize / 4; n++) {
        float k[2];
        factors.pair(k, kKeyFactors, n);
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[4 * n + i] = ptx::multiply(acc_s[4 * n + i], k[i % 2]);
        if constexpr (kZeros)
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                float zero[2];
                factors.pair(zero, kKeyZeros + g, n);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc_s[4 * n + i] = ptx::mad(zero[i % 2], q_sum[g][i / 2], acc_s[4 * n + i]);
            }
    }
}
// P times the tokens' factors; the zero points' share of O
template <int kSize>
TILE_DEVICE void weigh(float (&acc_s)[kSize], const TileFactors& tile, float (&zero_sum)[2][kGroups], int column) {
    const LaneFactors factors(tile, column);
#pragma unroll
    for (int n = 0; n < kSize / 4; n++) {
        if constexpr (kZeros)
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                float zero[2];
                factors.pair(zero, kValueZeros + g, n);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    zero_sum[i / 2][g] = ptx::mad(acc_s[4 * n + i], zero[i % 2], zero_sum[i / 2][g]);
            }
        float v[2];
        factors.pair(v, kValueFactors, n);
#pragma unroll
        for (int i = 0; i < 4; i++) acc_s[4 * n + i] = ptx::multiply(acc_s[4 * n + i], v[i % 2]);
    }
}
// P against the references as they stand, and whether they still serve
template <int kSize>
TILE_DEVICE bool quick_softmax(float (&acc_s)[kSize], float (&sum)[2], const warp::RowState& state,
                               const TileFactors& factors, float scale) {
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; i++) {
        const int h = i / 2 % 2;
        acc_s[i] = ptx::exp2(ptx::mad(acc_s[i], scale, -state.max[h]));
        sum[h] += acc_s[i];
    }
    return !ptx::any(!(fmaxf(sum[0], sum[1]) <= factors.limit()));
}
// The careful step: references rise to where the largest product is about 1. Hidden scores are −∞. sum: of P
template <int kSize>
TILE_DEVICE void careful_softmax(float (&acc_s)[kSize], float (&correction)[2], float (&sum)[2],
                                 warp::RowState& state, const TileFactors& tile, float scale, int column) {
    const LaneFactors factors(tile, column);
    float reference[2] = {-INFINITY, -INFINITY}, product[2] = {};
#pragma unroll
    for (int i = 0; i < kSize; i++) reference[i / 2 % 2] = fmaxf(reference[i / 2 % 2], acc_s[i]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        reference[h] = warp::row_max(reference[h]) * scale;
        if (reference[h] == -INFINITY) reference[h] = kLowest;  // the row sees no key of the tile
    }
#pragma unroll
    for (int n = 0; n < kSize / 4; n++) {
        float v[2];
        factors.pair(v, kValueFactors, n);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float p = ptx::exp2(ptx::mad(acc_s[4 * n + i], scale, -reference[i / 2]));
            product[i / 2] = fmaxf(product[i / 2], p * v[i % 2]);
        }
        ptx::sync_warp();  // loads stay where they stand: registers are scarce
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float to = reference[h] - log2_of_power(power_above(warp::row_max(product[h]), 0, kMostLift));
        const float max = fmaxf(state.max[h], to);
        correction[h] = ptx::exp2(state.max[h] - max);
        state.max[h] = max;
    }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; i++) {
        const int h = i / 2 % 2;
        acc_s[i] = ptx::exp2(ptx::mad(acc_s[i], scale, -state.max[h]));
        sum[h] += acc_s[i];
    }
}

}  // namespace quantised
