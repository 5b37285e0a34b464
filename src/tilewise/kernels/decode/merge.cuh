// From a warp's O, m and l to the result: rows whose keys were all in its range are written out. Of others the state is left in global
// memory, and when all blocks have left theirs, all warps merge.
//
// A state is (O, m, l) with O = Σ 2^(s − m) v and l = Σ 2^(s − m), not divided: merging scales to a common m and adds, in the order of
// the states. An empty one has m = kLowest, l = 0 and O = 0.
#pragma once
#include "decode/stream.cuh"

struct alignas(8) Vector8 {
    uint32_t word[2];
};
constexpr int kMeetingBarrier = 1;

// What a row's O is to be multiplied with, and its LSE in base 2, when all of its keys are in. A sink joins the denominator only.
struct RowEnd {
    float factor, lse;
};
TILE_DEVICE RowEnd end_row(const DecodeArgs& args, int head, float max, float sum) {
    const float weight = args.scores.sinks ? args.scores.join_sink(head, max, sum) : 1.0f;
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

// A row's state, or kColumns · 4 columns of it
template <int kColumns> struct RowState4 {
    float max, sum, x[kColumns][4];

    TILE_DEVICE void clear() {  // the empty state
        max = kLowest;
        sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 4 * kColumns; c++) x[c / 4][c % 4] = 0.0f;
    }
    // What comes after this: one state of both
    TILE_DEVICE void fold(const RowState4& after) {
        const Fold of = fold_of(max, after.max);
        max = of.max;
        sum = of.join(sum, after.sum);
#pragma unroll
        for (int c = 0; c < 4 * kColumns; c++) x[c / 4][c % 4] = of.join(x[c / 4][c % 4], after.x[c / 4][c % 4]);
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
    Global<MaxSum>{reinterpret_cast<MaxSum*>(args.state_ml)}[at] = MaxSum{max, sum};
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
// A row whose states are to be merged, counted through its sequence's KV heads as states hold them. What has to be looked up for that is
// asked for here, and nobody waits for it before it is needed.
struct Merge {
    int sequence, row;
    StateSplit states;
    int length, caller;
    // The `ahead`-th row of the n-th job
    TILE_DEVICE Merge(const DecodeArgs& args, int n, int ahead = 0) : sequence(args.merge_jobs.quotient(n)), row(0), length(0), caller(0) {
        row = (n - sequence * int(args.merge_jobs.divisor)) * args.merge_rows + ahead;
        if (!there(args)) return;
        states = Global<const StateSplit>{args.states}[sequence];
        length = Global<const int>{args.lengths}[sequence];
        caller = Global<const int>{args.order}[sequence];
    }
    TILE_DEVICE bool there(const DecodeArgs& args) const { return sequence < args.sequences; }
    TILE_DEVICE States of() const { return {states, length}; }
    TILE_DEVICE DecodeRow as_row(const DecodeArgs& args) const {
        const int kv_head = args.rows_each.quotient(row), its = row - kv_head * int(args.rows_each.divisor), token = args.group.quotient(its);
        return {sequence, its, token, kv_head * int(args.group.divisor) + its - token * int(args.group.divisor)};
    }
};

// How a warp has rows: kLanes of its lanes each, four columns of a lane and the next four kLanes lanes further
template <int kLanes> struct RowLanes {
    static constexpr int kOf = kLanes, kColumns = (kHeadDim + 4 * kLanes - 1) / (4 * kLanes);
    using State = RowState4<kColumns>;

    static TILE_DEVICE int column(int f) { return 4 * (f * kLanes + lane_here() % kLanes); }
    static TILE_DEVICE bool has(int f) { return kHeadDim % (4 * kLanes) == 0 || column(f) < kHeadDim; }

    // States [begin, end) of a row, one after another; kAtOnce of them are asked for before the first is needed. Few instructions: a
    // warp that merges has its multiprocessor nearly for itself, and waits for each of them.
    template <int kAtOnce> static TILE_DEVICE void fold_run(State& all, const DecodeArgs& args, const Merge& merge, int begin, int end) {
        const int64_t stride = int64_t(args.kv_heads) * args.rows_each.divisor, row = (merge.of().first + begin) * stride + merge.row;
        const float *o = args.state_o + row * kHeadDim + column(0), *ml = args.state_ml + 2 * row;
        all.clear();
#pragma unroll 1
        for (int from = begin; from < end; from += kAtOnce) {
            State y[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                if (from + k >= end) break;
                ptx::load_fresh(y[k].max, y[k].sum, ml);
#pragma unroll
                for (int f = 0; f < kColumns; f++) {
#pragma unroll
                    for (int c = 0; c < 4; c++) y[k].x[f][c] = 0.0f;
                    if (has(f)) ptx::load_fresh(y[k].x[f], o + 4 * kLanes * f);
                }
                o += stride * kHeadDim;
                ml += 2 * stride;
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                if (from + k >= end) break;
                all.fold(y[k]);
            }
        }
    }
    static TILE_DEVICE void put(const DecodeArgs& args, const Merge& merge, const State& of) {
        const DecodeRow row = merge.as_row(args);
        const RowEnd end = end_row(args, row.head, of.max, of.sum);
        if (lane_here() % kLanes == 0) store_lse(args, row, merge.caller, end.lse);
        const Global<Element> gO = output_row(args, row, merge.caller) + column(0);
#pragma unroll
        for (int f = 0; f < kColumns; f++)
            if (has(f)) store_4(gO + 4 * kLanes * f, of.x[f], end.factor);
    }
};

// Up to kRun states are folded from the first to the last: what a warp folds of a range on its own is never more, and has the same bits.
// More are dealt out in runs to four folds, and these are folded then, so that four warps can have a part each.
constexpr int kRun = 16, kFolds = 4;
template <class Lanes, int kAtOnce>
TILE_DEVICE void fold_runs(typename Lanes::State& all, const DecodeArgs& args, const Merge& merge, int count, int which) {
#pragma unroll 1
    for (int begin = which * kRun; begin < count; begin += kFolds * kRun) {
        typename Lanes::State run;
        Lanes::template fold_run<kAtOnce>(run, args, merge, begin, begin + kRun < count ? begin + kRun : count);
        if (begin == which * kRun) all = run;
        else all.fold(run);
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

// A piece that its sequence does not reach yet leaves nothing.
TILE_DEVICE void put_empty(const DecodeArgs& args, const DecodeItem& item) {
    const States own = states_of(item, Global<const int>{args.lengths}[item.table]);
    if (item.state() >= own.count) return;
    const float x[kFours][4] = {};
#pragma unroll 1
    for (int n = 0; n < item.rows; n++) {
        const DecodeRow row = row_of(args, item, n);
        if (own.count == 1) put_output(args, row, caller_of(args, item, row), kLowest, 0.0f, x);
        else put_state(args, state_row(args, own, item.kv_head(), item.state(), row.row), kLowest, 0.0f, x);
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

// Who meets at the end of a launch: `warps` of each block, of which this is `rank`
struct Meeting {
    int rank, warps;
};
TILE_DEVICE void meet_all(const DecodeArgs& args, Meeting of) { meet_all(args, of.rank == 0 && warp::lane() == 0, 32 * of.warps); }

// The parts that the first warps of a block have of a row, into that of the first, by way of the rings, which are free by now
using WholeRow = RowLanes<32>;
TILE_DEVICE void join_folds(WholeRow::State& all, int count, int rank) {
    const auto sPart = [](int of) { return Shared<float>(kAtRings + of * kStagedRow * 4); };
    const auto each = [](auto what) {
#pragma unroll
        for (int c = 0; c < 4 * WholeRow::kColumns; c++)
            if (WholeRow::has(c / 4)) what(WholeRow::column(c / 4) + c % 4, c / 4, c % 4);
    };
    if (rank * kRun < count) {
        const Shared<float> to = sPart(rank);
        each([&](int column, int f, int c) { to[column] = all.x[f][c]; });
        if (lane_here() == 0) to[kHeadDim] = all.max, to[kHeadDim + 1] = all.sum;
    }
    ptx::barrier_sync(kMeetingBarrier, 32 * kFolds);
#pragma unroll 1
    for (int of = 1; of < kFolds && of * kRun < count; of++) {
        const Shared<float> from = sPart(of);
        WholeRow::State part;
        part.clear();
        each([&](int column, int f, int c) { part.x[f][c] = from[column]; });
        part.max = from[kHeadDim], part.sum = from[kHeadDim + 1];
        all.fold(part);
    }
    ptx::barrier_sync(kMeetingBarrier, 32 * kFolds);
}
// Rows of which there are no more than blocks: four warps of a block share one.
TILE_DEVICE void merge_together(const DecodeArgs& args, Meeting of) {
    const Merge merge(args, blockIdx.x);
    meet_all(args, of);
    if (of.rank >= kFolds || !merge.there(args)) return;
    const int count = merge.of().count;
    if (count == 1) return;
    constexpr int kAtOnce = kTileStages > 0 || kHeadDim > 128 || kWarps * kBlocksPerSm > 8 ? 8 : 16;  // as registers allow
    WholeRow::State all;
    fold_runs<WholeRow, kAtOnce>(all, args, merge, count, of.rank);
    if (count > kRun) join_folds(all, count, of.rank);
    if (of.rank == 0) WholeRow::put(args, merge, all);
}
// By all warps of the launch, some rows of a sequence at a time: each has some of a warp's lanes, so that what a row needs beside its
// columns is done for all of them at once.
template <class Lanes, int kAtOnce> TILE_DEVICE void merge_apart(const DecodeArgs& args, Meeting of) {
    const int step = gridDim.x * of.warps, ahead = warp::lane() / Lanes::kOf;
    int n = of.rank * gridDim.x + blockIdx.x;
    Merge next(args, n, ahead);
    meet_all(args, of);
#pragma unroll 1
    while (next.there(args)) {
        const Merge now = next;
        n += step;
        next = Merge(args, n, ahead);
        const int count = now.of().count;
        if (count == 1 || now.row >= args.kv_heads * int(args.rows_each.divisor)) continue;
        typename Lanes::State all;
        if (count <= kRun) {
            Lanes::template fold_run<kAtOnce>(all, args, now, 0, count);
        } else {
            fold_runs<Lanes, 1>(all, args, now, count, 0);
#pragma unroll 1
            for (int which = 1; which < kFolds && which * kRun < count; which++) {
                typename Lanes::State part;
                fold_runs<Lanes, 1>(part, args, now, count, which);
                all.fold(part);
            }
        }
        Lanes::put(args, now, all);
    }
}
// When all have put their states, sequences that have several get their results. kRoomy: with more registers than 128
template <bool kRoomy = false> TILE_DEVICE void merge_all(const DecodeArgs& args, Meeting of) {
    constexpr int kAtOnce = kHeadDim > 192 ? 1 : kHeadDim > 96 ? 2 + kRoomy : kHeadDim > 64 ? (kScaled ? 2 : 3) : 6;
    if (args.merge_rows == 1) merge_together(args, of);
    else if (args.merge_rows == 2) merge_apart<RowLanes<16>, 2 * kAtOnce>(args, of);
    else merge_apart<RowLanes<8>, (kZeros ? 1 : kAtOnce)>(args, of);
}
