// flash_2d: flash_naive with its threads in two dimensions, so that a warp's global accesses lie side by side.
//
// flash_naive gives each thread a row, so the 32 loads of a warp lie a row apart: a 32-byte sector is fetched for each
// 4 bytes used. Here a warp takes rows and its lanes run along them: 32 lanes read 128 consecutive bytes, which are 4
// sectors. The rest gains too: lanes are keys in Q Kᵀ, so that a row's maximum and sum are shuffles, and columns in P
// V. O is still read, corrected and written in global memory for every key tile; the next rung stops that. K's rows lie
// kHeadDim + 1 elements apart, so that lanes that read the same column of 32 keys read 32 banks.
// float. Constants: Element, kHeadDim, kTile (rows and keys of a tile: 32, the lanes), kWarps.
#include "learn/kernels/scalar.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps) flash_2d(const AttentionArgs args) {
    static_assert(kTile == 32, "a lane is a key");
    constexpr int kRows = kTile / kWarps, kThreads = 32 * kWarps, kPitch = kHeadDim + 1,
                  kTileBytes = kTile * kPitch * 4;
    Shared<float> sQ(0), sK(kTileBytes), sV(2 * kTileBytes), sS(3 * kTileBytes);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * kRows, row0 = blockIdx.x * kTile;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const int rows =
        args.seqlen_q - row0 - warp_row < kRows ? args.seqlen_q - row0 - warp_row : kRows;  // may be negative

    load_tile<kTile, kPitch, kThreads>(sQ, head.gQ, args.q_strides.row, row0, args.seqlen_q);
    for (int r = 0; r < rows; r++)
        for (int d = lane; d < kHeadDim; d += 32)
            head.gO[(row0 + warp_row + r) * args.o_strides.row + d] = from_float<Element>(0.0f);

    float row_max[kRows], row_sum[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; r++) row_max[r] = -INFINITY;

    const int end = keys_seen(args, row0 + kTile < args.seqlen_q ? row0 + kTile - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTile) {
        load_tile<kTile, kPitch, kThreads>(sK, head.gK, args.k_strides.row, key0, args.seqlen_k);
        load_tile<kTile, kPitch, kThreads>(sV, head.gV, args.v_strides.row, key0, args.seqlen_k);
        ptx::sync_threads();

#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const int i = warp_row + r, row = row0 + i;
            if (r >= rows || key0 >= keys_seen(args, row)) continue;  // the same for the whole warp

            // S = Q Kᵀ · scale
            float s = 0.0f;
            for (int d = 0; d < kHeadDim; d++) s = ptx::mad(sQ[i * kPitch + d], sK[lane * kPitch + d], s);
            s = key0 + lane < keys_seen(args, row) ? s * args.scale_log2 : -INFINITY;

            // P = exp(S − m), l = Σ P, O = (O · l_old + P V) / l
            const float tile_max = fmaxf(row_max[r], warp::max<32>(s));
            const float p = ptx::exp2(s - tile_max);
            const float correction = row_sum[r] * ptx::exp2(row_max[r] - tile_max);
            const float total = correction + warp::sum<32>(p);
            sS[i * kTile + lane] = p;
            ptx::sync_warp();
            for (int d = lane; d < kHeadDim; d += 32) {
                float pv = 0.0f;
                for (int j = 0; j < kTile; j++) pv = ptx::mad(sS[i * kTile + j], sV[j * kPitch + d], pv);
                const int64_t at = row * args.o_strides.row + d;
                head.gO[at] = from_float<Element>((to_float(head.gO[at]) * correction + pv) / total);
            }
            row_max[r] = tile_max;
            row_sum[r] = total;
        }
        ptx::sync_threads();
    }
#pragma unroll
    for (int r = 0; r < kRows; r++)
        if (lane == 0 && r < rows) head.gLse[row0 + warp_row + r] = (row_max[r] + ptx::log2(row_sum[r])) * kLn2;
}
