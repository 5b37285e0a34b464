// merge_rows: the states of some rows over other keys joined with the states that the rows have, in place. A row's
// other states lie anywhere among `states`, as a table says.
//
// kLanes lanes merge one head of one row; each has kChunks chunks of 8 channels.
#include "common/chunk.cuh"

constexpr int kThreads = 256;

struct MergeRowsArgs {
    void* o;             // (rows, heads, D): the channels are dense
    float* lse;          // (heads, rows)
    const void* states;  // (number, heads, D), dense
    const float* logs;   // (heads, number), dense
    const int* rows;     // (count,): those of o that are merged
    const int* table;    // (count, most): the states that join each; negative: none
    int64_t o_row, o_head, lse_head, number;
    int count, most, heads, head_dim;
    uint32_t vectors;  // 1: eight channels of o are loaded and stored at once; 2: those of states are
};

extern "C" __global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ MergeRowsArgs a) {
    const int lane = threadIdx.x % kLanes;
    const int64_t asked = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
    const bool inside = asked < int64_t(a.count) * a.heads;
    const int64_t job = inside ? asked : 0, which = job / a.heads;
    const int head = int(job - which * a.heads);
    const int64_t row = Global<const int>{a.rows}[which];
    const Global<const int> gTable{a.table + which * a.most};
    const Global<const float> gLogs{a.logs + head * a.number};
    const Global<float> gLse{a.lse + head * a.lse_head + row};

    const float own = gLse[0];
    float top = own;
    for (int n = 0; n < a.most; n++) {
        const int state = gTable[n];
        if (state >= 0) top = fmaxf(top, gLogs[state]);
    }
    const float shift = top == -INFINITY ? 0.0f : top;  // where no state has a key
    const float own_weight = ptx::exp2((own - shift) * kLog2e);
    float total = own_weight;
    const Global<Element> gOut{static_cast<Element*>(a.o) + row * a.o_row + head * a.o_head};
    float sum[kChunks][kChannels];
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int channel = (c * kLanes + lane) * kChannels;
        Chunk<Element> x;
        x.load(Global<const Element>{gOut.base} + channel, a.head_dim - channel, a.vectors & 1);
#pragma unroll
        for (int i = 0; i < kChannels; i++) sum[c][i] = own_weight > 0.0f ? x.get(i) * own_weight : 0.0f;
    }
    for (int n = 0; n < a.most; n++) {
        const int state = gTable[n];
        if (state < 0) continue;
        const float weight = ptx::exp2((gLogs[state] - shift) * kLog2e);
        if (weight == 0.0f) continue;  // whatever stands in o where there is no key
        total += weight;
        const Global<const Element> gState{static_cast<const Element*>(a.states) +
                                           (state * int64_t(a.heads) + head) * a.head_dim};
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            const int channel = (c * kLanes + lane) * kChannels;
            Chunk<Element> x;
            x.load(gState + channel, a.head_dim - channel, (a.vectors & 2) != 0);
#pragma unroll
            for (int i = 0; i < kChannels; i++) sum[c][i] = ptx::mad(x.get(i), weight, sum[c][i]);
        }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
        const int channel = (c * kLanes + lane) * kChannels;
        if (!inside || channel >= a.head_dim) continue;
#pragma unroll
        for (int i = 0; i < kChannels; i++) sum[c][i] *= inverse;
        Chunk<Element> x;
        x.set(sum[c]);
        x.store(gOut + channel, a.head_dim - channel, a.vectors & 1);
    }
    ptx::sync_warp();  // every lane has read the row's LSE
    if (inside && lane == 0) gLse[0] = total == 0.0f ? -INFINITY : shift + ptx::log2(total) * kLn2;
}
