// From a warp's O, m and l to the result: warps of a block that shared a range meet in shared memory; rows whose keys were all in it
// are written out; of others the state is left in global memory, and who brings the last state of a sequence and KV head merges all.
//
// A state is (O, m, l) with O = Σ 2^(s − m) v and l = Σ 2^(s − m), not divided: merging scales to a common m and adds, in the order of
// the states, so that the result does not depend on who came last. An empty one has m = kLowest, l = 0 and O = 0.
#pragma once
#include "sm90/decode_stream.cuh"

struct alignas(8) Vector8 {
    uint32_t word[2];
};
constexpr int kMeetingPitch = kHeadDim + 4;  // floats: eights of rows of a fragment then touch different banks
// Where warps meet: O of each, then m and l of each row, then which sequences are complete
constexpr int kAtMeetingMl = kAtMeeting + kWarps * kRows * kMeetingPitch * 4, kAtLast = kAtMeetingMl + kWarps * kRows * 8;
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

// ---- a warp alone: straight from its registers -------------------------------------------------------------------------------------
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
                const int64_t at = state_row(args, states, item.kv_head, item.state(), row.row);
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

// ---- the block's warps together ----------------------------------------------------------------------------------------------------
TILE_DEVICE void meet(const DecodeArgs& args, const DecodeItem& item, const Stream& body, int rank) {
    const int lane = warp::lane();
    const Shared<float> sO(kAtMeeting), sMl(kAtMeetingMl);
    ptx::barrier_sync(kMeetingBarrier, 32 * kWarps);  // everybody is done with the last meeting
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = rank * kRows + body.row(b, i);
#pragma unroll
            for (int n = 0; n < 2 * kSteps; n++)
                sO[at * kMeetingPitch + quant::output_channel<kFormat>(n / 2, n % 2, lane)] = body.acc_o[b][n / 2][n % 2 * 2 + i];
            if (lane / 4 == 0) {
                sMl[2 * at] = body.max[b][i];
                sMl[2 * at + 1] = body.sum[b][i];
            }
        }
    ptx::barrier_sync(kMeetingBarrier, 32 * kWarps);
    for (int n = rank * 32 + lane; n < item.rows * (kHeadDim / 4); n += 32 * kWarps) {
        const int r = n / (kHeadDim / 4), column = n % (kHeadDim / 4) * 4;
        float max = kLowest, sum = 0.0f, x[4] = {};
#pragma unroll
        for (int w = 0; w < kWarps; w++) max = fmaxf(max, sMl[2 * (w * kRows + r)]);
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            const int at = w * kRows + r;
            const float weight = ptx::exp2(sMl[2 * at] - max);
            sum += weight * sMl[2 * at + 1];
            const Vector16 y = Shared<Vector16>(kAtMeeting)[(at * kMeetingPitch + column) / 4];
#pragma unroll
            for (int c = 0; c < 4; c++) x[c] += weight * as_float(y.word[c]);
        }
        const DecodeRow row = row_of(args, item, r);
        const States states = states_of(args, row.sequence);
        if (states.count == 1) {
            const RowEnd end = end_row(args, row.head, max, sum);
            store_4(output_row(args, row) + column, x, end.factor);
            if (column == 0) store_lse(args, row, end.lse);
        } else {
            const int64_t at = state_row(args, states, item.kv_head, item.state(), row.row);
            Global<Vector16>{reinterpret_cast<Vector16*>(args.state_o)}[(at * kHeadDim + column) / 4] =
                Vector16{{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}};
            if (column == 0) {
                const Global<float> gMl{args.state_ml + 2 * at};
                gMl[0] = max;
                gMl[1] = sum;
            }
        }
    }
}

// ---- merging states in global memory --------------------------------------------------------------------------------------------------
// Rows first … first + kMany − 1 of a sequence by one warp, over all of its states. Lane l weighs row l % kMany of state l / kMany;
// columns are dealt out four a lane. What is asked for at once, kAtOnce states of all rows, does not wait for the weights.
template <int kMany, int kAtOnce> TILE_DEVICE void merge_rows(const DecodeArgs& args, const States& states, int sequence, int kv_head, int first) {
    constexpr int kFours = (kHeadDim + 127) / 128, kWeighed = 32 / kMany;
    static_assert(kWeighed % kAtOnce == 0, "weights are there for all that is asked for");
    const int lane = warp::lane(), each = args.rows_each.divisor, many = each - first < kMany ? each - first : kMany;
    const int64_t base = state_row(args, states, kv_head, 0, first), stride = int64_t(args.kv_heads) * each;
    float max = kLowest, sum = 0.0f;  // of row lane % kMany
    float x[kMany][kFours][4] = {};
    for (int begin = 0; begin < states.count; begin += kWeighed) {
        float m = kLowest, l = 0.0f;
        if (begin + lane / kMany < states.count && lane % kMany < many) {
            const float* ml = args.state_ml + 2 * (base + (begin + lane / kMany) * stride + lane % kMany);
            m = ptx::load_fresh(ml);
            l = ptx::load_fresh(ml + 1);
        }
        float weight = 0.0f, less = 0.0f;
#pragma unroll 1
        for (int k = begin; k < begin + kWeighed && k < states.count; k += kAtOnce) {
            float y[kAtOnce][kMany][kFours][4];
#pragma unroll
            for (int n = 0; n < kAtOnce * kMany * kFours; n++) {
                const int state = k + n / (kMany * kFours), r = n / kFours % kMany, column = n % kFours * 128 + 4 * lane;
                float (&to)[4] = y[n / (kMany * kFours)][r][n % kFours];
                if (state < states.count && r < many && column < kHeadDim) ptx::load_fresh(to, args.state_o + (base + state * stride + r) * kHeadDim + column);
                else to[0] = to[1] = to[2] = to[3] = 0.0f;
            }
            if (k == begin) {  // the weights of all kWeighed, against their maximum and what came before
                float top = m;
#pragma unroll
                for (int lanes = kMany; lanes < 32; lanes *= 2) top = fmaxf(top, ptx::shuffle_xor(top, lanes));
                top = fmaxf(top, max);
                less = ptx::exp2(max - top);
                weight = ptx::exp2(m - top);
                max = top;
                float share = weight * l;
#pragma unroll
                for (int lanes = kMany; lanes < 32; lanes *= 2) share += ptx::shuffle_xor(share, lanes);
                sum = sum * less + share;
#pragma unroll
                for (int r = 0; r < kMany; r++) {
                    const float by = ptx::shuffle(less, r);
#pragma unroll
                    for (int f = 0; f < kFours; f++)
#pragma unroll
                        for (int c = 0; c < 4; c++) x[r][f][c] *= by;
                }
            }
#pragma unroll
            for (int n = 0; n < kAtOnce * kMany; n++) {
                const float by = ptx::shuffle(weight, (k - begin) * kMany + n);
#pragma unroll
                for (int f = 0; f < kFours; f++)
#pragma unroll
                    for (int c = 0; c < 4; c++) x[n % kMany][f][c] += by * y[n / kMany][n % kMany][f][c];
            }
        }
    }
    // Lane r of the first kMany knows the end of row r.
    const int token = args.group.quotient(first + lane % kMany), row = first + lane % kMany;
    const DecodeRow own{sequence, row, token, kv_head * int(args.group.divisor) + row - token * int(args.group.divisor)};
    RowEnd end{0.0f, 0.0f};
    if (lane % kMany < many) end = end_row(args, own.head, max, sum);
    if (lane < many) store_lse(args, own, end.lse);
#pragma unroll
    for (int r = 0; r < kMany; r++) {
        const float factor = ptx::shuffle(end.factor, r);
        if (r >= many) continue;
        const int t = args.group.quotient(first + r);
        const Global<Element> gO =
            output_row(args, DecodeRow{sequence, first + r, t, kv_head * int(args.group.divisor) + first + r - t * int(args.group.divisor)});
#pragma unroll
        for (int f = 0; f < kFours; f++)
            if (128 * f + 4 * lane < kHeadDim) store_4(gO + (128 * f + 4 * lane), x[r][f], factor);
    }
}
// All rows of a sequence by `warps` warps, of which this is number `rank`: where there are enough, each takes one row and many states
// at a time, else four rows.
TILE_DEVICE void merge_sequence(const DecodeArgs& args, int sequence, int kv_head, int rank, int warps) {
    const States states = states_of(args, sequence);
    const int each = args.rows_each.divisor;
    if (each <= warps || states.count > 8) {
        for (int r = rank; r < each; r += warps) merge_rows<1, 8>(args, states, sequence, kv_head, r);
    } else {
        for (int r = 4 * rank; r < each; r += 4 * warps) merge_rows<4, 2>(args, states, sequence, kv_head, r);
    }
}

// How many sequences an item has rows of, and how many rows of the n-th
TILE_DEVICE int sequences_of(const DecodeArgs& args, const DecodeItem& item) { return args.rows_each.quotient(item.row + item.rows - 1) + 1; }
TILE_DEVICE int rows_in(const DecodeArgs& args, const DecodeItem& item, int n) {
    const int each = args.rows_each.divisor, begin = n * each > item.row ? n * each : item.row;
    const int last = item.row + item.rows, end = (n + 1) * each < last ? (n + 1) * each : last;
    return end - begin;
}
// The rows of the item's n-th sequence have arrived; true for whoever completes it. The counter is then as it was before the launch.
TILE_DEVICE bool arrive(const DecodeArgs& args, const DecodeItem& item, int n) {
    const int sequence = item.sequence + n, rows = rows_in(args, item, n), count = states_of(args, sequence).count;
    int* ticket = args.tickets + int64_t(sequence) * args.kv_heads + item.kv_head;
    if (rows <= 0 || count == 1) return false;
    if (ptx::atomic_add(ticket, rows) + rows != count * int(args.rows_each.divisor)) return false;
    Global<int>{ticket}[0] = 0;
    return true;
}
// Is the item one of a piece that its sequence does not reach yet? Its row counts then, too, are left out. (Nodes do not grow.)
TILE_DEVICE bool beyond(const DecodeArgs& args, const DecodeItem& item) { return item.state() >= states_of(args, item.sequence).count; }

// A warp has left its item's states: it merges what is complete.
TILE_DEVICE void hand_in_alone(const DecodeArgs& args, const DecodeItem& item) {
    const int lane = warp::lane(), sequences = sequences_of(args, item);
    ptx::fence_device();
    ptx::sync_warp();  // all lanes' states are out
    const bool last = lane < sequences && arrive(args, item, lane);
    const uint32_t complete = ptx::ballot(last);
    if (complete == 0) return;
    ptx::fence_device();
    for (int n = 0; n < sequences; n++)
        if (complete >> n & 1) merge_sequence(args, item.sequence + n, item.kv_head, 0, 1);
}
// The same of a block that met: its warps share the rows.
TILE_DEVICE void hand_in_together(const DecodeArgs& args, const DecodeItem& item, int rank) {
    const int sequences = sequences_of(args, item), thread = rank * 32 + warp::lane();
    if (sequences == 1 && states_of(args, item.sequence).count == 1) return;
    const Shared<int> complete(kAtLast);
    ptx::fence_device();
    ptx::barrier_sync(kMeetingBarrier, 32 * kWarps);
    if (thread < sequences) complete[thread] = arrive(args, item, thread);
    ptx::barrier_sync(kMeetingBarrier, 32 * kWarps);
    ptx::fence_device();
    for (int n = 0; n < sequences; n++)
        if (int(complete[n])) merge_sequence(args, item.sequence + n, item.kv_head, rank, kWarps);
}
