// From a warp's O, m and l to the result: rows whose keys were all in its range are written out; of others the state is left in global
// memory, and when all blocks have left theirs, all warps merge.
//
// A state is (O, m, l) with O = Σ 2^(s − m) v and l = Σ 2^(s − m), not divided: merging scales to a common m and adds, in the order of
// the states. An empty one has m = kLowest, l = 0 and O = 0.
#pragma once
#include "sm90/decode_stream.cuh"

struct alignas(8) Vector8 {
    uint32_t word[2];
};
constexpr int kMeetingBarrier = 1;

// What a row's O is to be multiplied with, and its LSE in base 2, when all of its keys are in. A sink joins the denominator only.
struct RowEnd {
    float factor, lse;
};
TILE_DEVICE RowEnd end_row(const DecodeArgs& args, int head, float max, float sum) {
    float weight = 1.0f;
    if (args.sinks) {
        const float sink = Global<const float>{args.sinks}[head] * kLog2e, top = fmaxf(max, sink);
        weight = ptx::exp2(max - top);
        sum = sum * weight + ptx::exp2(sink - top);
        max = top;
    }
    return {sum == 0.0f ? 0.0f : weight * ptx::reciprocal(sum), sum == 0.0f ? -INFINITY : max + ptx::log2(sum)};
}
TILE_DEVICE Global<Element> output_row(const DecodeArgs& args, const DecodeRow& row) {
    const int64_t sequence = Global<const int>{args.order}[row.sequence];
    return {static_cast<Element*>(args.o) + sequence * args.o_strides.batch + row.token * args.o_strides.row + row.head * args.o_strides.head};
}
TILE_DEVICE void store_lse(const DecodeArgs& args, const DecodeRow& row, float lse) {
    if (!args.lse) return;
    const int64_t sequence = Global<const int>{args.order}[row.sequence], heads = int64_t(args.kv_heads) * args.group.divisor;
    Global<float>{args.lse}[(sequence * heads + row.head) * args.tokens + row.token] = lse * kLn2;
}
TILE_DEVICE void store_4(Global<Element> g, const float (&x)[4], float factor) {
    g.template as<Vector8>()[0] = Vector8{{pack<Element>(x[0] * factor, x[1] * factor), pack<Element>(x[2] * factor, x[3] * factor)}};
}

// ---- a warp's state, straight from its registers -----------------------------------------------------------------------------------
TILE_DEVICE void store_fragments(const DecodeArgs& args, const DecodeItem& item, const Stream& body) {
    const int lane = warp::lane();
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (body.row(b, i) >= item.rows) continue;
            const DecodeRow row = row_of(args, item, body.row(b, i));
            const float max = body.max[b][i], sum = body.sum[b][i];
            const States states = states_of(args, row.sequence);
            if (states.count == 1) {
                const RowEnd end = end_row(args, row.head, max, sum);
                const Global<Element> gO = output_row(args, row);
#pragma unroll
                for (int n = 0; n < 2 * kSteps; n++)
                    gO[quant::output_channel<kFormat>(n / 2, n % 2, lane)] = from_float<Element>(body.acc_o[b][n / 2][n % 2 * 2 + i] * end.factor);
                if (lane / 4 == 0) store_lse(args, row, end.lse);
            } else {
                const int64_t at = state_row(args, states, item.kv_head(), item.state(), row.row);
                const Global<float> gO{args.state_o + at * kHeadDim}, gMl{args.state_ml + 2 * at};
#pragma unroll
                for (int n = 0; n < 2 * kSteps; n++)
                    gO[quant::output_channel<kFormat>(n / 2, n % 2, lane)] = body.acc_o[b][n / 2][n % 2 * 2 + i];
                if (lane / 4 == 0) {
                    gMl[0] = max;
                    gMl[1] = sum;
                }
            }
        }
}

// ---- merging states ---------------------------------------------------------------------------------------------------------------------
// Rows first … first + kMany − 1 of a sequence by one warp: its states one after another, as a warp folds pieces. Columns are dealt out
// four a lane; kAtOnce states of all rows are asked for before the first is needed.
template <int kMany, int kAtOnce> TILE_DEVICE void merge_rows(const DecodeArgs& args, const States& states, int sequence, int kv_head, int first) {
    constexpr int kFours = (kHeadDim + 127) / 128;
    const int lane = warp::lane(), each = args.rows_each.divisor, many = each - first < kMany ? each - first : kMany;
    const int64_t base = state_row(args, states, kv_head, 0, first), stride = int64_t(args.kv_heads) * each;
    float max[kMany], sum[kMany], x[kMany][kFours][4];
#pragma unroll 1
    for (int begin = 0; begin < states.count; begin += kAtOnce) {
        float y[kAtOnce][kMany][kFours][4], m[kAtOnce][kMany], l[kAtOnce][kMany];
#pragma unroll
        for (int n = 0; n < kAtOnce * kMany; n++) {
            const int k = n / kMany, r = n % kMany;
            const int64_t at = base + (begin + k) * stride + r;
            const bool there = begin + k < states.count && r < many;
            m[k][r] = kLowest;
            l[k][r] = 0.0f;
            if (there) {
                m[k][r] = ptx::load_fresh(args.state_ml + 2 * at);
                l[k][r] = ptx::load_fresh(args.state_ml + 2 * at + 1);
            }
#pragma unroll
            for (int f = 0; f < kFours; f++) {
                float (&to)[4] = y[k][r][f];
                if (there && 128 * f + 4 * lane < kHeadDim) ptx::load_fresh(to, args.state_o + at * kHeadDim + 128 * f + 4 * lane);
                else to[0] = to[1] = to[2] = to[3] = 0.0f;
            }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce * kMany; n++) {
            const int k = n / kMany, r = n % kMany;
            Fold of{m[k][r], 0.0f, 1.0f};
            if (begin + k > 0) of = fold_of(max[r], m[k][r]);
            max[r] = of.max;
            sum[r] = begin + k > 0 ? of.join(sum[r], l[k][r]) : l[k][r];
#pragma unroll
            for (int c = 0; c < 4 * kFours; c++) {
                float& to = x[r][c / 4][c % 4];
                to = begin + k > 0 ? of.join(to, y[k][r][c / 4][c % 4]) : y[k][r][c / 4][c % 4];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kMany; r++) {
        if (r >= many) continue;
        const int token = args.group.quotient(first + r);
        const DecodeRow row{sequence, first + r, token, kv_head * int(args.group.divisor) + first + r - token * int(args.group.divisor)};
        const RowEnd end = end_row(args, row.head, max[r], sum[r]);
        if (lane == 0) store_lse(args, row, end.lse);
        const Global<Element> gO = output_row(args, row);
#pragma unroll
        for (int f = 0; f < kFours; f++)
            if (128 * f + 4 * lane < kHeadDim) store_4(gO + (128 * f + 4 * lane), x[r][f], end.factor);
    }
}

// All blocks of the launch have come here: whoever comes last lets the others go. The launch is cooperative, so all are on the card.
TILE_DEVICE void meet_all(const DecodeArgs& args, bool first, int threads) {
    ptx::fence_device();
    ptx::barrier_sync(kMeetingBarrier, threads);
    if (first) {
        const int meeting = ptx::load_acquire(args.meeting + 1);
        if (ptx::atomic_add(args.meeting, 1) == int(gridDim.x) - 1) {
            Global<int>{args.meeting}[0] = 0;  // for the next launch
            ptx::fence_device();
            ptx::store_release(args.meeting + 1, meeting + 1);
        } else {
            while (ptx::load_acquire(args.meeting + 1) == meeting) ptx::spin();
        }
    }
    ptx::barrier_sync(kMeetingBarrier, threads);
    ptx::fence_device();
}
constexpr int kStatesAtOnce = kTileStages > 0 || kHeadDim > 128 ? 8 : 16;  // as registers allow
// Sequences that have several states, by all warps of the launch: `rank` of `warps` of this block
TILE_DEVICE void merge_all(const DecodeArgs& args, int rank, int warps) {
    const int each = args.rows_each.divisor, jobs = args.sequences * args.kv_heads, all = gridDim.x * warps, number = rank * gridDim.x + blockIdx.x;
    const bool by_row = jobs * each <= 2 * all;  // few: a warp takes a row, so that all have something to do
    const int rows = by_row ? 1 : 4, passes = (each + rows - 1) / rows;
    for (int n = number; n < jobs * passes; n += all) {
        const int job = n / passes, sequence = job / args.kv_heads;
        const States states = states_of(args, sequence);
        if (states.count == 1) continue;
        if (by_row) merge_rows<1, kStatesAtOnce>(args, states, sequence, job % args.kv_heads, n % passes);
        else merge_rows<4, 2>(args, states, sequence, job % args.kv_heads, n % passes * 4);
    }
}
