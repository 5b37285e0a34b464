// flash_naive: one thread per query row, K and V tiles in shared memory, everything scalar, O in global memory.
//
// The algorithm and nothing else. It reads K and V with one thread per row, so a warp's 32 loads lie a whole row apart
// (32 sectors per request), and it reads and writes O in global memory for every key tile.
// Constants: Element, kHeadDim, kTile (rows and keys of a tile, threads of a block).
#include "learn/kernels/args.cuh"

extern "C" __global__ void __launch_bounds__(kTile) flash_naive(const AttentionArgs args) {
    Shared<float> sQ(0), sK(kTile * kHeadDim * 4), sV(2 * kTile * kHeadDim * 4), sS(3 * kTile * kHeadDim * 4);
    const int thread = threadIdx.x, row = blockIdx.x * kTile + thread;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const bool valid = row < args.seqlen_q;

    for (int d = 0; d < kHeadDim; d++)
        sQ[thread * kHeadDim + d] = valid ? to_float(head.gQ[row * args.q_strides.row + d]) : 0.0f;
    if (valid)
        for (int d = 0; d < kHeadDim; d++) head.gO[row * args.o_strides.row + d] = from_float<Element>(0.0f);

    const int seen = keys_seen(args, row);
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int key0 = 0; key0 < args.seqlen_k; key0 += kTile) {
        if (key0 + thread < args.seqlen_k)
            for (int d = 0; d < kHeadDim; d++) {
                sK[thread * kHeadDim + d] = to_float(head.gK[(key0 + thread) * args.k_strides.row + d]);
                sV[thread * kHeadDim + d] = to_float(head.gV[(key0 + thread) * args.v_strides.row + d]);
            }
        ptx::sync_threads();

        const int keys = seen - key0 < kTile ? seen - key0 : kTile;
        if (valid && keys > 0) {
            // S = Q Kᵀ · scale
            float tile_max = row_max;
            for (int j = 0; j < keys; j++) {
                float s = 0.0f;
                for (int d = 0; d < kHeadDim; d++) s = ptx::mad(sQ[thread * kHeadDim + d], sK[j * kHeadDim + d], s);
                s *= args.scale_log2;
                sS[thread * kTile + j] = s;
                tile_max = fmaxf(tile_max, s);
            }
            // P = exp(S − m), l = Σ P, O = (O · l_old + P V) / l
            const float correction = row_sum * ptx::exp2(row_max - tile_max);
            float sum = 0.0f;
            for (int j = 0; j < keys; j++) {
                const float p = ptx::exp2(sS[thread * kTile + j] - tile_max);
                sS[thread * kTile + j] = p;
                sum += p;
            }
            const float total = correction + sum;
            for (int d = 0; d < kHeadDim; d++) {
                float pv = 0.0f;
                for (int j = 0; j < keys; j++) pv = ptx::mad(sS[thread * kTile + j], sV[j * kHeadDim + d], pv);
                const int64_t at = row * args.o_strides.row + d;
                head.gO[at] = from_float<Element>((to_float(head.gO[at]) * correction + pv) / total);
            }
            row_max = tile_max;
            row_sum = total;
        }
        ptx::sync_threads();
    }
    if (valid) head.gLse[row] = (row_max + ptx::log2(row_sum)) * kLn2;
}
