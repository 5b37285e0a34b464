// pika_scalar: one warp per query row, its lanes along the head dimension, no shared memory at all.
//
// The smallest whole attention: Q and O are a few registers per lane, a score is a product per lane and five shuffles,
// and the softmax is online over single keys. Every warp reads every key by itself, two bytes per lane, and each step
// waits for the one before through the shuffles and the running maximum: what it measures is latency.
// half, bf16. Constants: Element, kHeadDim (a multiple of 32), kWarps (rows of a block).
#include "learn/kernels/scalar.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps, 8) pika_scalar(const AttentionArgs args) {
    constexpr int kColumns = kHeadDim / 32;
    const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    if (row >= args.seqlen_q) return;

    float q[kColumns], acc_o[kColumns] = {}, row_max = -INFINITY, row_sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
        q[c] = to_float(head.gQ[row * args.q_strides.row + lane + c * 32]) * args.scale_log2;

    const int seen = keys_seen(args, row);
    for (int j = 0; j < seen; j++) {
        // s = q · k_j
        float s = 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; c++)
            s = ptx::mad(q[c], to_float(head.gK[j * args.k_strides.row + lane + c * 32]), s);
        s = warp::sum<32>(s);

        // m = max(m_old, s), O = O · exp(m_old − m) + exp(s − m) v_j, l likewise
        const float new_max = fmaxf(row_max, s), correction = ptx::exp2(row_max - new_max), p = ptx::exp2(s - new_max);
        row_max = new_max;
        row_sum = ptx::mad(row_sum, correction, p);
#pragma unroll
        for (int c = 0; c < kColumns; c++)
            acc_o[c] = ptx::mad(p, to_float(head.gV[j * args.v_strides.row + lane + c * 32]), acc_o[c] * correction);
    }

    const float inverse = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
        head.gO[row * args.o_strides.row + lane + c * 32] = from_float<Element>(acc_o[c] * inverse);
    if (lane == 0) head.gLse[row] = (row_max + ptx::log2(row_sum)) * kLn2;
}
