// scalar2d_row_tile: a tile of rows stays with its warp: O and the row statistics in registers, several rows per
// thread.
//
// flash_2d reads and writes O in global memory for every key tile and fetches two values from shared memory for each
// product. Here 16 threads share kRows rows: a thread holds kRows × kKeys scores and kRows × kColumns values of O in
// registers, so that each value it fetches is used kRows or kKeys times, and O goes to global memory once, at the end.
// P passes through shared memory from the lanes that made it to those that need it, all of the same warp: no block
// barrier.
// float, half, bf16, all computed in float. Constants: Element, kHeadDim, kTileQ, kTileKv, kThreads (16 × row groups).
#include "learn/kernels/scalar.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2) scalar2d_row_tile(const AttentionArgs args) {
    constexpr int kRows = kTileQ / (kThreads / 16), kKeys = kTileKv / 16, kColumns = kHeadDim / 16;
    constexpr int kPitch = kHeadDim + 1,
                  kPitchP = kTileKv + 1;  // odd, so that lanes in different rows use different banks
    Shared<float> sQ(0), sK(kTileQ * kPitch * 4), sV((kTileQ + kTileKv) * kPitch * 4),
        sP((kTileQ + 2 * kTileKv) * kPitch * 4);
    const int lane = threadIdx.x % 16, i0 = threadIdx.x / 16 * kRows, row0 = blockIdx.x * kTileQ;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);

    load_tile<kTileQ, kPitch, kThreads>(sQ, head.gQ, args.q_strides.row, row0, args.seqlen_q);
    float acc_o[kRows][kColumns] = {}, row_max[kRows], row_sum[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; r++) row_max[r] = -INFINITY;

    const int end = keys_seen(args, row0 + kTileQ < args.seqlen_q ? row0 + kTileQ - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTileKv) {
        load_tile<kTileKv, kPitch, kThreads>(sK, head.gK, args.k_strides.row, key0, args.seqlen_k);
        load_tile<kTileKv, kPitch, kThreads>(sV, head.gV, args.v_strides.row, key0, args.seqlen_k);
        ptx::sync_threads();

        // S = Q Kᵀ
        float acc_s[kRows][kKeys] = {};
#pragma unroll 4
        for (int d = 0; d < kHeadDim; d++) {
            float k[kKeys];
#pragma unroll
            for (int c = 0; c < kKeys; c++) k[c] = sK[(lane + c * 16) * kPitch + d];
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const float q = sQ[(i0 + r) * kPitch + d];
#pragma unroll
                for (int c = 0; c < kKeys; c++) acc_s[r][c] = ptx::mad(q, k[c], acc_s[r][c]);
            }
        }

        // m = max(m_old, max S), P = exp(S − m), l = l · exp(m_old − m) + Σ P, O likewise
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const int seen = keys_seen(args, row0 + i0 + r) - key0;
            float tile_max = -INFINITY, sum = 0.0f;
#pragma unroll
            for (int c = 0; c < kKeys; c++) {
                acc_s[r][c] = lane + c * 16 < seen ? acc_s[r][c] * args.scale_log2 : -INFINITY;
                tile_max = fmaxf(tile_max, acc_s[r][c]);
            }
            const float new_max = fmaxf(row_max[r], warp::max<16>(tile_max)), base = finite_max(new_max);
            const float correction = ptx::exp2(row_max[r] - base);
#pragma unroll
            for (int c = 0; c < kKeys; c++) {
                const float p = ptx::exp2(acc_s[r][c] - base);
                sP[(i0 + r) * kPitchP + lane + c * 16] = p;
                sum += p;
            }
            row_max[r] = new_max;
            row_sum[r] = row_sum[r] * correction + sum;  // of this lane's keys; the lanes are added up at the end
#pragma unroll
            for (int c = 0; c < kColumns; c++) acc_o[r][c] *= correction;
        }
        ptx::sync_warp();

        // O += P V
#pragma unroll 4
        for (int j = 0; j < kTileKv; j++) {
            float v[kColumns];
#pragma unroll
            for (int c = 0; c < kColumns; c++) v[c] = sV[j * kPitch + lane + c * 16];
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const float p = sP[(i0 + r) * kPitchP + j];
#pragma unroll
                for (int c = 0; c < kColumns; c++) acc_o[r][c] = ptx::mad(p, v[c], acc_o[r][c]);
            }
        }
        ptx::sync_threads();
    }

#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const int row = row0 + i0 + r;
        const float total = warp::sum<16>(row_sum[r]), inverse = total > 0.0f ? 1.0f / total : 0.0f;
        if (row >= args.seqlen_q) continue;
#pragma unroll
        for (int c = 0; c < kColumns; c++)
            head.gO[row * args.o_strides.row + lane + c * 16] = from_float<Element>(acc_o[r][c] * inverse);
        if (lane == 0) head.gLse[row] = (row_max[r] + ptx::log2(total)) * kLn2;
    }
}
