// spilling: a rung apart. One thread per row, with the row's Q and O in registers: the fastest memory, while it lasts.
//
// At head_dim 32 that is 64 values and all is well. At 128 it is 256, and a thread has at most 255 registers: the
// compiler puts the rest into local memory, which is global memory by another name. `tilewise kernels --kernel spilling
// --all` shows it: spill stores and loads, and a stack. The cure is to share a row among threads (scalar2d_row_tile) or
// a warp (mma).
// Constants: Element (float), kHeadDim, kTileQ (threads), kTileKv.
#include "learn/kernels/args.cuh"

extern "C" __global__ void __launch_bounds__(kTileQ) spilling(const AttentionArgs args) {
    Shared<float> sK(0), sV(kTileKv * kHeadDim * 4);
    const int row = blockIdx.x * kTileQ + threadIdx.x;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const bool valid = row < args.seqlen_q;
    float rQ[kHeadDim], acc_o[kHeadDim];
#pragma unroll
    for (int d = 0; d < kHeadDim; d++) {
        rQ[d] = valid ? to_float(head.gQ[row * args.q_strides.row + d]) : 0.0f;
        acc_o[d] = 0.0f;
    }
    const int seen = keys_seen(args, row);
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int key0 = 0; key0 < args.seqlen_k; key0 += kTileKv) {
        for (int i = threadIdx.x; i < kTileKv * kHeadDim; i += kTileQ) {
            const int key = key0 + i / kHeadDim, d = i % kHeadDim;
            sK[i] = key < args.seqlen_k ? to_float(head.gK[key * args.k_strides.row + d]) : 0.0f;
            sV[i] = key < args.seqlen_k ? to_float(head.gV[key * args.v_strides.row + d]) : 0.0f;
        }
        ptx::sync_threads();
        const int keys = !valid ? 0 : seen - key0 < kTileKv ? seen - key0 : kTileKv;
        for (int j = 0; j < keys; j++) {
            // s = q · k, and the state takes one key at a time
            float s = 0.0f;
#pragma unroll
            for (int d = 0; d < kHeadDim; d++) s = ptx::mad(rQ[d], sK[j * kHeadDim + d], s);
            s *= args.scale_log2;
            const float new_max = fmaxf(row_max, s), correction = ptx::exp2(row_max - new_max),
                        p = ptx::exp2(s - new_max);
            row_sum = row_sum * correction + p;
            row_max = new_max;
#pragma unroll
            for (int d = 0; d < kHeadDim; d++) acc_o[d] = ptx::mad(p, sV[j * kHeadDim + d], acc_o[d] * correction);
        }
        ptx::sync_threads();
    }
    if (!valid) return;
#pragma unroll
    for (int d = 0; d < kHeadDim; d++)
        head.gO[row * args.o_strides.row + d] = from_float<Element>(row_sum > 0.0f ? acc_o[d] / row_sum : 0.0f);
    head.gLse[row] = (row_max + ptx::log2(row_sum)) * kLn2;
}
