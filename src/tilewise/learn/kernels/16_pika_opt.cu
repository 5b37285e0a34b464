// pika_opt: pika_scalar with 16-byte loads and several keys at once.
//
// A lane loads 8 elements in one access, so a row takes kHeadDim / 8 lanes and a warp works on 32 / that many keys side
// by side, each group of lanes with a softmax state of its own. A group loads kUnroll keys before it uses the first;
// they share one maximum and one correction. Groups have seen different keys, so at the end their states merge: O and l
// are brought to the common maximum and added.
// half, bf16; 16-byte accesses want rows that begin at multiples of 16 bytes.
// Constants: Element, kHeadDim, kWarps (rows of a block), kUnroll.
#include "learn/kernels/scalar.cuh"

namespace {
struct Eight {
    float x[8];
};
TILE_DEVICE Eight load_eight(Global<const Element> g, int64_t at) {
    const Vector16 v = (g + at).template as<const Vector16>()[0];
    Eight e;
#pragma unroll
    for (int i = 0; i < 8; i++) e.x[i] = unpack<Element>(v.word[i / 2], i % 2);
    return e;
}
constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }
}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps) pika_opt(const AttentionArgs args) {
    constexpr int kLanes = power_of_two_from(kHeadDim / 8), kGroups = 32 / kLanes;
    const int group = threadIdx.x % 32 / kLanes, row = blockIdx.x * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % kLanes, d = lane < kHeadDim / 8 ? lane * 8 : 0;
    const bool idle =
        lane >= kHeadDim / 8;  // D 96: 12 lanes of 16 have columns; the rest read what lane 0 reads, times 0
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    if (row >= args.seqlen_q) return;

    Eight q = load_eight(head.gQ, row * args.q_strides.row + d), acc_o = {};
#pragma unroll
    for (int i = 0; i < 8; i++) q.x[i] *= idle ? 0.0f : args.scale_log2;

    const int seen = keys_seen(args, row);
    float row_max = -INFINITY, row_sum = 0.0f;
    for (int key0 = 0; key0 < seen; key0 += kGroups * kUnroll) {
        // s_u = q · k of key u of this group; keys past the end repeat the last one and weigh nothing
        Eight k[kUnroll], v[kUnroll];
        int64_t key[kUnroll];
        float s[kUnroll], new_max = row_max;
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            key[u] = key0 + u * kGroups + group < seen ? key0 + u * kGroups + group : seen - 1;
            k[u] = load_eight(head.gK, key[u] * args.k_strides.row + d);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) v[u] = load_eight(head.gV, key[u] * args.v_strides.row + d);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            s[u] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) s[u] = ptx::mad(q.x[i], k[u].x[i], s[u]);
            s[u] = warp::sum<kLanes>(s[u]);
            if (key0 + u * kGroups + group >= seen) s[u] = -INFINITY;
            new_max = fmaxf(new_max, s[u]);
        }

        // O = O · exp(m_old − m) + Σ_u exp(s_u − m) v_u, l likewise
        const float base = finite_max(new_max), correction = ptx::exp2(row_max - base);
        row_max = new_max;
        row_sum *= correction;
#pragma unroll
        for (int i = 0; i < 8; i++) acc_o.x[i] *= correction;
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            const float p = ptx::exp2(s[u] - base);
            row_sum += p;
#pragma unroll
            for (int i = 0; i < 8; i++) acc_o.x[i] = ptx::mad(p, v[u].x[i], acc_o.x[i]);
        }
    }

    // The groups' states, merged
    float total_max = row_max;
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) total_max = fmaxf(total_max, ptx::shuffle_xor(total_max, mask));
    const float weight = ptx::exp2(row_max - finite_max(total_max));
    row_sum *= weight;
#pragma unroll
    for (int mask = kLanes; mask < 32; mask *= 2) row_sum += ptx::shuffle_xor(row_sum, mask);
    const float inverse = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        acc_o.x[i] *= weight * inverse;
#pragma unroll
        for (int mask = kLanes; mask < 32; mask *= 2) acc_o.x[i] += ptx::shuffle_xor(acc_o.x[i], mask);
    }
    if (group == 0 && !idle) {
        Vector16 out;
#pragma unroll
        for (int i = 0; i < 4; i++) out.word[i] = pack<Element>(acc_o.x[2 * i], acc_o.x[2 * i + 1]);
        (head.gO + (row * args.o_strides.row + d)).template as<Vector16>()[0] = out;
    }
    if (threadIdx.x % 32 == 0) head.gLse[row] = (total_max + ptx::log2(row_sum)) * kLn2;
}
