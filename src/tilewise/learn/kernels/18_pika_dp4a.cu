// pika_dp4a: 8-bit keys and values: four products of Q Kᵀ in one instruction.
//
// Rows of Q, K and V become int8 on their way into shared memory, each with a scale of its own, max|x| / 127, so
// nothing clips; a tile takes a quarter of a float tile's space, and dp4a multiplies four bytes at a time. The scales
// of q_i and k_j multiply the integer score, that of v_j goes into p_ij. P V stays in float: V's scales lie inside its
// sum over the keys, so bytes there would mean rounding P as well. What it computes is exact attention over the rounded
// rows, and rounding moves an element by at most max|row| / 254. So
//     |Δs_ij| ≤ ε = scale / 254 · (‖q_i‖₁ max|k_j| + ‖k_j‖₁ max|q_i| + D max|q_i| max|k_j| / 254)
//     |Δo_i| ≤ (exp(2 max_j ε) − 1 + 1 / 254) · max|v|,   |Δlse_i| ≤ max_j ε.
// half, bf16. Constants: Element, kHeadDim (at most 128), kTile (rows and keys of a tile: 32, the lanes), kWarps.
#include "learn/kernels/scalar.cuh"

namespace {
constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }
constexpr int kWords = kHeadDim / 4,
              kPitch = kWords + 1;  // of 4 bytes; odd, so that lanes in different rows use different banks
struct alignas(8) Vector8 {
    uint32_t word[2];
};

// Quantises rows first … first + kTile − 1, which are zero from row `end` on: four columns per lane, a group of lanes
// per row
TILE_DEVICE void quantise_rows(Shared<int> sTile, Shared<float> sScale, Global<const Element> gRows, int64_t stride,
                               int first, int end) {
    constexpr int kLanes = power_of_two_from(kWords), kGroups = 32 * kWarps / kLanes;
    const int lane = threadIdx.x % kLanes;
    for (int row = threadIdx.x / kLanes; row < kTile; row += kGroups) {
        Vector8 v = {};
        if (lane < kWords && first + row < end)
            v = (gRows + ((first + row) * stride + lane * 4)).template as<const Vector8>()[0];
        float x[4], largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = unpack<Element>(v.word[i / 2], i % 2);
            largest = fmaxf(largest, fabsf(x[i]));
        }
        largest = warp::max<kLanes>(largest);
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        uint32_t bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) bytes |= (uint32_t(int(rintf(x[i] * inverse))) & 255u) << (8 * i);
        if (lane < kWords) sTile[row * kPitch + lane] = int(bytes);
        if (lane == 0) sScale[row] = largest / 127.0f;
    }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) pika_dp4a(const AttentionArgs args) {
    static_assert(kTile == 32, "a lane is a key");
    constexpr int kRows = kTile / kWarps, kColumns = kHeadDim / 32, kTileBytes = kTile * kPitch * 4;
    Shared<int> sQ(0), sK(kTileBytes), sV(2 * kTileBytes);
    Shared<int8_t> sVBytes(2 * kTileBytes);
    Shared<float> sScaleQ(3 * kTileBytes), sScaleK(3 * kTileBytes + kTile * 4), sScaleV(3 * kTileBytes + 2 * kTile * 4);
    Shared<float> sP(3 * kTileBytes + 3 * kTile * 4);
    const int lane = threadIdx.x % 32, i0 = threadIdx.x / 32 * kRows, row0 = blockIdx.x * kTile;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);

    quantise_rows(sQ, sScaleQ, head.gQ, args.q_strides.row, row0, args.seqlen_q);
    float acc_o[kRows][kColumns] = {}, row_max[kRows], row_sum[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; r++) row_max[r] = -INFINITY;

    const int end = keys_seen(args, row0 + kTile < args.seqlen_q ? row0 + kTile - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTile) {
        quantise_rows(sK, sScaleK, head.gK, args.k_strides.row, key0, args.seqlen_k);
        quantise_rows(sV, sScaleV, head.gV, args.v_strides.row, key0, args.seqlen_k);
        ptx::sync_threads();

        // S = Q Kᵀ in integers
        int acc_s[kRows] = {};
#pragma unroll 4
        for (int w = 0; w < kWords; w++) {
            const int k = sK[lane * kPitch + w];
#pragma unroll
            for (int r = 0; r < kRows; r++) acc_s[r] = ptx::dp4a(sQ[(i0 + r) * kPitch + w], k, acc_s[r]);
        }
        // P = exp(S − m), O and l corrected; p_j leaves with v_j's scale
        const float scale_k = sScaleK[lane] * args.scale_log2, scale_v = sScaleV[lane];
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const bool seen = key0 + lane < keys_seen(args, row0 + i0 + r);
            const float s = seen ? float(acc_s[r]) * (sScaleQ[i0 + r] * scale_k) : -INFINITY;
            const float new_max = fmaxf(row_max[r], warp::max<32>(s)), base = finite_max(new_max);
            const float correction = ptx::exp2(row_max[r] - base), p = ptx::exp2(s - base);
            row_max[r] = new_max;
            row_sum[r] = row_sum[r] * correction + warp::sum<32>(p);
#pragma unroll
            for (int c = 0; c < kColumns; c++) acc_o[r][c] *= correction;
            sP[(i0 + r) * kTile + lane] = p * scale_v;
        }
        ptx::sync_warp();
        // O += P V
#pragma unroll 4
        for (int j = 0; j < kTile; j++)
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
                const float v = float(sVBytes[j * kPitch * 4 + lane + c * 32]);
#pragma unroll
                for (int r = 0; r < kRows; r++) acc_o[r][c] = ptx::mad(sP[(i0 + r) * kTile + j], v, acc_o[r][c]);
            }
        ptx::sync_threads();
    }

#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const int row = row0 + i0 + r;
        if (row >= args.seqlen_q) continue;
        const float inverse = row_sum[r] > 0.0f ? 1.0f / row_sum[r] : 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; c++)
            head.gO[row * args.o_strides.row + lane + c * 32] = from_float<Element>(acc_o[r][c] * inverse);
        if (lane == 0) head.gLse[row] = (row_max[r] + ptx::log2(row_sum[r])) * kLn2;
    }
}
