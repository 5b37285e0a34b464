// From a warp's O, m and l to the result: rows whose keys were all in its range are written out. Of others the state is left in global
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
TILE_DEVICE Global<Element> output_row(const DecodeArgs& args, const DecodeRow& row, int64_t sequence) {
    return {static_cast<Element*>(args.o) + sequence * args.o_strides.batch + row.token * args.o_strides.row + row.head * args.o_strides.head};
}
TILE_DEVICE void store_lse(const DecodeArgs& args, const DecodeRow& row, int64_t sequence, float lse) {
    if (!args.lse) return;
    const int64_t heads = int64_t(args.kv_heads) * args.group.divisor;
    Global<float>{args.lse}[(sequence * heads + row.head) * args.tokens + row.token] = lse * kLn2;
}
TILE_DEVICE void store_4(Global<Element> g, const float (&x)[4], float factor) {
    g.template as<Vector8>()[0] = Vector8{{pack<Element>(x[0] * factor, x[1] * factor), pack<Element>(x[2] * factor, x[3] * factor)}};
}

// ---- rows, four columns a lane ------------------------------------------------------------------------------------------------------
constexpr int kFours = (kHeadDim + 127) / 128;
// Made where it is wanted: what is hoisted out of the loop over chunks takes registers from it.
TILE_DEVICE int lane_here() { return ptx::just_in_time(warp::lane()); }
TILE_DEVICE bool has_columns(int f, int lane) { return 128 * f + 4 * lane < kHeadDim; }

template <int kMany> struct Rows {
    float max[kMany], sum[kMany], x[kMany][kFours][4];

    TILE_DEVICE void clear(int r) {  // the empty state
        max[r] = kLowest;
        sum[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < 4 * kFours; c++) x[r][c / 4][c % 4] = 0.0f;
    }
    // What comes after this: one state of both
    TILE_DEVICE void fold(int r, float after_max, float after_sum, const float (&after)[kFours][4]) {
        const Fold of = fold_of(max[r], after_max);
        max[r] = of.max;
        sum[r] = of.join(sum[r], after_sum);
#pragma unroll
        for (int c = 0; c < 4 * kFours; c++) x[r][c / 4][c % 4] = of.join(x[r][c / 4][c % 4], after[c / 4][c % 4]);
    }
};

// A row that has all its keys, into the output; or the state that it is
TILE_DEVICE void put_output(const DecodeArgs& args, const DecodeRow& row, int64_t sequence, float max, float sum, const float (&x)[kFours][4]) {
    const int lane = lane_here();
    const RowEnd end = end_row(args, row.head, max, sum);
    if (lane == 0) store_lse(args, row, sequence, end.lse);
    const Global<Element> gO = output_row(args, row, sequence);
#pragma unroll
    for (int f = 0; f < kFours; f++)
        if (has_columns(f, lane)) store_4(gO + (128 * f + 4 * lane), x[f], end.factor);
}
TILE_DEVICE void put_ml(const DecodeArgs& args, int64_t at, float max, float sum) {
    Global<Vector8>{reinterpret_cast<Vector8*>(args.state_ml)}[at] = Vector8{{as_bits(max), as_bits(sum)}};
}
TILE_DEVICE void put_state(const DecodeArgs& args, int64_t at, float max, float sum, const float (&x)[kFours][4]) {
    const int lane = lane_here();
    if (lane == 0) put_ml(args, at, max, sum);
#pragma unroll
    for (int f = 0; f < kFours; f++)
        if (has_columns(f, lane))
            Global<float>{args.state_o + at * kHeadDim + 128 * f + 4 * lane}.template as<Vector16>()[0] =
                Vector16{{as_bits(x[f][0]), as_bits(x[f][1]), as_bits(x[f][2]), as_bits(x[f][3])}};
}

// A warp's state as its rows, by way of shared memory, where it kept its pieces
constexpr int kStagedRow = kHeadDim + 4;  // floats: rows do not begin in the same bank
struct Staged {
    uint32_t at;
    TILE_DEVICE explicit Staged(int rank) : at(fold_of_warp(rank)) {}
    TILE_DEVICE void take(const Stream& body) const {
        const Shared<float> to(at), ml(at + kRows * kStagedRow * 4);
        const int lane = lane_here();
        ptx::sync_warp();  // all lanes have what they kept there
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 8 * b + lane % 4 * 2 + i;
#pragma unroll
                for (int n = 0; n < 2 * kSteps; n++)
                    to[row * kStagedRow + quant::output_channel<kFormat>(n / 2, n % 2, lane)] = body.acc_o[b][n / 2][n % 2 * 2 + i];
                if (lane / 4 == 0) {
                    ml[2 * row] = body.max[b][i];
                    ml[2 * row + 1] = body.sum[b][i];
                }
            }
        ptx::sync_warp();
    }
    TILE_DEVICE void give(int row, float& max, float& sum, float (&x)[kFours][4]) const {
        const Shared<float> ml(at + kRows * kStagedRow * 4);
        const int lane = lane_here();
        max = ml[2 * row];
        sum = ml[2 * row + 1];
#pragma unroll
        for (int f = 0; f < kFours; f++) {
            if (!has_columns(f, lane)) continue;
            const Vector16 four = Shared<Vector16>(at + (row * kStagedRow + 128 * f + 4 * lane) * 4)[0];
#pragma unroll
            for (int c = 0; c < 4; c++) x[f][c] = as_float(four.word[c]);
        }
    }
};
static_assert(kRows * (kStagedRow + 2) * 4 <= kFoldBytes, "staged where pieces are kept");

// ---- merging states ---------------------------------------------------------------------------------------------------------------------
// Rows of a sequence that a warp merges: kMany from `first` on, counted through its KV heads, as states hold them. What has to be
// looked up for that is asked for here, and nobody waits for it before it is needed.
template <int kMany> struct Merge {
    int sequence, first, length;
    Vector16 states;
    int caller;
    TILE_DEVICE Merge(const DecodeArgs& args, int n) {
        const int passes = (args.kv_heads * int(args.rows_each.divisor) + kMany - 1) / kMany;
        sequence = n / passes;
        first = n % passes * kMany;
        if (!there(args)) return;
        states = Global<const Vector16>{reinterpret_cast<const Vector16*>(args.states)}[sequence];
        length = Global<const int>{args.lengths}[sequence];
        caller = Global<const int>{args.order}[sequence];
    }
    TILE_DEVICE bool there(const DecodeArgs& args) const { return sequence < args.sequences; }
    TILE_DEVICE States of() const { return {int(states.word[0]), int(states.word[1]), int(states.word[2]), int(states.word[3]), length}; }
    TILE_DEVICE int many(const DecodeArgs& args) const {
        const int left = args.kv_heads * int(args.rows_each.divisor) - first;
        return left < kMany ? left : kMany;
    }
    // Rows from the r-th on, as many as there are
    template <int kThese> TILE_DEVICE void put(const DecodeArgs& args, const Rows<kThese>& rows, int r0 = 0) const {
        const int each = args.rows_each.divisor, group = args.group.divisor;
#pragma unroll
        for (int r = 0; r < kThese; r++) {
            if (r0 + r >= many(args)) continue;
            const int at = first + r0 + r, kv_head = args.rows_each.quotient(at), row = at - kv_head * each, token = args.group.quotient(row);
            put_output(args, {sequence, row, token, kv_head * group + row - token * group}, caller, rows.max[r], rows.sum[r], rows.x[r]);
        }
    }
};

// Its rows from the r-th on over the states [begin, end), one after another; kAtOnce of them are asked for before the first is
// needed. Few instructions: a warp that merges has its multiprocessor nearly for itself, and waits for each of them.
template <int kAtOnce, int kMany, int kOf>
TILE_DEVICE void fold_run(Rows<kMany>& rows, const DecodeArgs& args, const Merge<kOf>& merge, int begin, int end, int r0 = 0) {
    const int lane = lane_here(), many = merge.many(args) - r0;
    const int64_t stride = int64_t(args.kv_heads) * args.rows_each.divisor, row = (merge.of().first + begin) * stride + merge.first + r0;
    const float *o = args.state_o + row * kHeadDim + 4 * lane, *ml = args.state_ml + 2 * row;
#pragma unroll
    for (int r = 0; r < kMany; r++) rows.clear(r);
#pragma unroll 1
    for (int from = begin; from < end; from += kAtOnce) {
        Rows<kMany> y[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; k++) {
            const bool there = from + k < end;
#pragma unroll
            for (int r = 0; r < kMany; r++) {
                y[k].clear(r);
                if (there && r < many) ptx::load_fresh(y[k].max[r], y[k].sum[r], ml + 2 * r);
#pragma unroll
                for (int f = 0; f < kFours; f++)
                    if (there && r < many && has_columns(f, lane)) ptx::load_fresh(y[k].x[r][f], o + r * kHeadDim + 128 * f);
            }
            o += stride * kHeadDim;
            ml += 2 * stride;
        }
#pragma unroll
        for (int n = 0; n < kAtOnce * kMany; n++) rows.fold(n % kMany, y[n / kMany].max[n % kMany], y[n / kMany].sum[n % kMany], y[n / kMany].x[n % kMany]);
    }
}

// Up to kRun states are folded from the first to the last: what a warp folds of a range on its own is never more, and has the same bits.
// More are dealt out in runs to four folds, and these are folded then, so that four warps can have a part each.
constexpr int kRun = 16, kFolds = 4;
constexpr int kStatesAtOnce = kTileStages > 0 || kHeadDim > 128 || kWarps * kBlocksPerSm > 8 ? 8 : 16;  // of a row, as registers allow
template <int kOf> TILE_DEVICE void fold_runs(Rows<1>& all, const DecodeArgs& args, const Merge<kOf>& merge, int r, int which) {
    const int count = merge.of().count;
#pragma unroll 1
    for (int begin = which * kRun; begin < count; begin += kFolds * kRun) {
        Rows<1> run;
        fold_run<kStatesAtOnce>(run, args, merge, begin, begin + kRun < count ? begin + kRun : count, r);
        if (begin == which * kRun) all = run;
        else all.fold(0, run.max[0], run.sum[0], run.x[0]);
    }
}

// ---- the end of an item -----------------------------------------------------------------------------------------------------------------
TILE_DEVICE void put_item(const DecodeArgs& args, const DecodeItem& item, const Staged& staged) {
    const States own = states_of(item, Global<const int>{args.lengths}[item.table]);
#pragma unroll 1
    for (int n = 0; n < item.rows; n++) {
        float max, sum, x[kFours][4];
        staged.give(n, max, sum, x);
        const DecodeRow row = row_of(args, item, n);
        const States states = item.is(kOwn) ? own : states_of(args, row.sequence);
        if (states.count == 1) put_output(args, row, caller_of(args, item, row), max, sum, x);
        else put_state(args, state_row(args, states, item.kv_head(), item.state(), row.row), max, sum, x);
    }
}

// ---- waiting for others. The launch is cooperative, so all blocks are on the card -------------------------------------------------------
// All blocks come to a counter in every launch, and it is never reset: it goes round, at a multiple of their number.
TILE_DEVICE void meet_all(const DecodeArgs& args, bool first, int threads) {
    ptx::barrier_sync(kMeetingBarrier, threads);
    if (first) {
        const uint32_t all = gridDim.x, before = ptx::count_up(args.meeting, (1u << 30) / all * all - 1), began = before - before % all;
        while (ptx::load_relaxed(args.meeting) - began < all) ptx::spin();
        ptx::fence_device();
    }
    ptx::barrier_sync(kMeetingBarrier, threads);
}

// The parts that the first warps of a block have of a row, into that of the first, by way of the rings, which are free by now
TILE_DEVICE void join_folds(Rows<1>& all, int count, int rank) {
    const int lane = lane_here();
    const auto sPart = [](int of) { return Shared<float>(kAtRings + of * kStagedRow * 4); };
    if (rank * kRun < count) {
        const Shared<float> to = sPart(rank);
#pragma unroll
        for (int c = 0; c < 4 * kFours; c++)
            if (has_columns(c / 4, lane)) to[c / 4 * 128 + 4 * lane + c % 4] = all.x[0][c / 4][c % 4];
        if (lane == 0) to[kHeadDim] = all.max[0], to[kHeadDim + 1] = all.sum[0];
    }
    ptx::barrier_sync(kMeetingBarrier, 32 * kFolds);
#pragma unroll 1
    for (int of = 1; of < kFolds && of * kRun < count; of++) {
        const Shared<float> from = sPart(of);
        float x[kFours][4] = {};
#pragma unroll
        for (int c = 0; c < 4 * kFours; c++)
            if (has_columns(c / 4, lane)) x[c / 4][c % 4] = from[c / 4 * 128 + 4 * lane + c % 4];
        all.fold(0, from[kHeadDim], from[kHeadDim + 1], x);
    }
    ptx::barrier_sync(kMeetingBarrier, 32 * kFolds);
}

// Who meets at the end of a launch: `warps` of each block, of which this is `rank`
struct Meeting {
    int rank, warps;
};

// Rows of which there are no more than blocks: four warps of a block share one.
TILE_DEVICE void merge_together(const DecodeArgs& args, Meeting of) {
    const Merge<1> merge(args, blockIdx.x);
    meet_all(args, of.rank == 0 && warp::lane() == 0, 32 * of.warps);
    if (of.rank >= kFolds || !merge.there(args)) return;
    const int count = merge.of().count;
    if (count == 1) return;
    Rows<1> all;
    fold_runs(all, args, merge, 0, of.rank);
    if (count > kRun) join_folds(all, count, of.rank);
    if (of.rank == 0) merge.put(args, all);
}
// By all warps of the launch, kMany rows at a time
template <int kMany, int kAtOnce> TILE_DEVICE void merge_rows(const DecodeArgs& args, Meeting of) {
    const int blocks = gridDim.x;
    int n = of.rank * blocks + blockIdx.x;
    Merge<kMany> next(args, n);
    meet_all(args, of.rank == 0 && warp::lane() == 0, 32 * of.warps);
#pragma unroll 1
    while (next.there(args)) {
        const Merge<kMany> now = next;
        n += blocks * of.warps;
        next = Merge<kMany>(args, n);
        const int count = now.of().count;
        if (count == 1) continue;
        if (count <= kRun) {
            Rows<kMany> all;
            fold_run<kAtOnce>(all, args, now, 0, count);
            now.put(args, all);
            continue;
        }
#pragma unroll 1
        for (int r = 0; r < now.many(args); r++) {
            Rows<1> all;
#pragma unroll 1
            for (int which = 0; which < kFolds && which * kRun < count; which++) {
                Rows<1> part;
                fold_runs(part, args, now, r, which);
                if (which == 0) all = part;
                else all.fold(0, part.max[0], part.sum[0], part.x[0]);
            }
            now.put(args, all, r);
        }
    }
}
// When all have put their states, sequences that have several get their results. merge_rows: of a warp at a time, 0 for a row of
// which four warps have a part each.
TILE_DEVICE void merge_all(const DecodeArgs& args, Meeting of) {
    if (args.merge_rows == 0) merge_together(args, of);
    else if (args.merge_rows == 1) merge_rows<1, kStatesAtOnce>(args, of);
    else if (args.merge_rows == 2) merge_rows<2, (kHeadDim > 128 ? 2 : 4)>(args, of);
    else merge_rows<4, (kHeadDim > 128 ? 1 : 3)>(args, of);
}
