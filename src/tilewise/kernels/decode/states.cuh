// States of rows over different keys, in scratch memory, and how they become results: after a grid barrier all warps
// merge them, in the order of the states.
//
// A state is (O, m, l) with O = Σ 2^(s − m) v and l = Σ 2^(s − m), not divided. m is the reference of the softmax; it
// need not be the maximum. The empty state has m = kLowest, l = 0 and O = 0.
//
// Whoever includes this has said: kValueDim, the columns of a row of O; kAtParts, where kFolds rows have room in shared
// memory while states are merged; kRowAtOnce, states of a whole row that a warp loads together; kLongRuns, whether
// registers allow as many of more than kRun states as of few; and kStateGroup, how many states are folded before they
// are folded into what came before them, 1 for each by itself.
#pragma once
#include "decode/work.cuh"

// Two states over different keys as one, with the same bits wherever it is done. An empty state leaves the other as it
// is.
struct Fold {
    float max, before, after;  // the new reference, and the factors of the two states
    TILE_DEVICE float join(float x, float y) const { return ptx::mad(y, after, ptx::multiply(x, before)); }
};
TILE_DEVICE Fold fold_of(float max_before, float max_after) {
    const float max = fmaxf(max_before, max_after);
    return {max, ptx::exp2(max_before - max), ptx::exp2(max_after - max)};
}

constexpr int kStagedRow = kValueDim + 4;  // floats from row to row: neighbouring rows begin in different banks
struct alignas(8) Vector8 {
    uint32_t word[2];
};
constexpr int kMergeBarrier = 1;  // named barrier of the warps that merge

// The end of a row whose keys are all in: what its O is multiplied with, and its LSE in base 2. A sink adds to the
// denominator only.
struct RowEnd {
    float factor, lse;
};
TILE_DEVICE RowEnd end_row(const DecodeArgs& args, int head, float max, float sum) {
    const float weight = args.scores.sinks ? args.scores.join_sink(head, max, sum) : 1.0f;
    return {sum == 0.0f ? 0.0f : weight * ptx::reciprocal(sum), sum == 0.0f ? -INFINITY : max + ptx::log2(sum)};
}
TILE_DEVICE Global<Element> output_row(const DecodeArgs& args, const DecodeRow& row, int64_t sequence) {
    const int64_t batch = sequence * args.o_strides.batch;
    return {static_cast<Element*>(args.o) + batch + row.token * args.o_strides.row + row.head * args.o_strides.head};
}
TILE_DEVICE void store_lse(const DecodeArgs& args, const DecodeRow& row, int64_t sequence, float lse) {
    if (!args.lse) return;
    const int64_t heads = int64_t(args.kv_heads) * args.group.divisor;
    Global<float>{args.lse}[(sequence * heads + row.head) * args.tokens + row.token] = lse * kLn2;
}
template <class T> TILE_DEVICE void store_4(Global<T> g, const float (&x)[4], float factor) {
    if constexpr (sizeof(T) == 4) {
        g.template as<Vector16>()[0] = Vector16{
            {as_bits(x[0] * factor), as_bits(x[1] * factor), as_bits(x[2] * factor), as_bits(x[3] * factor)}};
    } else {
        const uint32_t low = pack<T>(x[0] * factor, x[1] * factor), high = pack<T>(x[2] * factor, x[3] * factor);
        g.template as<Vector8>()[0] = Vector8{{low, high}};
    }
}

// ---- rows, four columns per lane ------------------------------------------------------------------------------------
constexpr int kFours = (kValueDim + 127) / 128;
// Computed where it is used: hoisted out of the loop over chunks, it would take a register from the loop.
TILE_DEVICE int lane_here() { return ptx::just_in_time(warp::lane()); }
TILE_DEVICE bool has_columns(int f, int lane) { return 128 * f + 4 * lane < kValueDim; }

// A row's state, with as many of its columns as a lane holds: kColumns times four
template <int kColumns> struct RowState4 {
    float max, sum, x[kColumns][4];

    TILE_DEVICE void clear() {  // to the empty state
        max = kLowest;
        sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 4 * kColumns; c++) x[c / 4][c % 4] = 0.0f;
    }
    // Takes in the state over the keys that follow
    TILE_DEVICE void fold(const RowState4& after) {
        const Fold of = fold_of(max, after.max);
        max = of.max;
        sum = of.join(sum, after.sum);
#pragma unroll
        for (int c = 0; c < 4 * kColumns; c++) x[c / 4][c % 4] = of.join(x[c / 4][c % 4], after.x[c / 4][c % 4]);
    }
};

// Writes a row whose keys are all in to the output
TILE_DEVICE void put_output(const DecodeArgs& args, const DecodeRow& row, int64_t sequence, float max, float sum,
                            const float (&x)[kFours][4]) {
    const int lane = lane_here();
    const RowEnd end = end_row(args, row.head, max, sum);
    if (lane == 0) store_lse(args, row, sequence, end.lse);
    const Global<Element> gO = output_row(args, row, sequence);
#pragma unroll
    for (int f = 0; f < kFours; f++)
        if (has_columns(f, lane)) store_4(gO + (128 * f + 4 * lane), x[f], end.factor);
}
// Writes a row's state to scratch memory
TILE_DEVICE void put_ml(const DecodeArgs& args, int64_t at, float max, float sum) {
    Global<MaxSum>{reinterpret_cast<MaxSum*>(args.state_ml)}[at] = MaxSum{max, sum};
}
TILE_DEVICE void put_state(const DecodeArgs& args, int64_t at, float max, float sum, const float (&x)[kFours][4]) {
    const int lane = lane_here();
    if (lane == 0) put_ml(args, at, max, sum);
#pragma unroll
    for (int f = 0; f < kFours; f++)
        if (has_columns(f, lane))
            Global<float>{args.state_o + at * kValueDim + 128 * f + 4 * lane}.template as<Vector16>()[0] =
                Vector16{{as_bits(x[f][0]), as_bits(x[f][1]), as_bits(x[f][2]), as_bits(x[f][3])}};
}

// ---- merging states -------------------------------------------------------------------------------------------------
// A row whose states are to be merged; row: its number over all KV heads of its sequence, as the states hold them. The
// loads of what a merge needs are issued here, and the warp does not wait for them before it uses them.
struct Merge {
    int sequence, row;
    StateSplit states;
    int length, caller;
    // Row `ahead` of job n
    TILE_DEVICE Merge(const DecodeArgs& args, int n, int ahead = 0)
        : sequence(args.merge_jobs.quotient(n)), row(0), length(0), caller(0) {
        row = (n - sequence * int(args.merge_jobs.divisor)) * args.merge_rows + ahead;
        if (!there(args)) return;
        states = Global<const StateSplit>{args.states}[sequence];
        length = length_of(args, sequence, args.rows_each.quotient(row));
        caller = Global<const int>{args.order}[sequence];
    }
    TILE_DEVICE bool there(const DecodeArgs& args) const { return sequence < args.sequences; }
    TILE_DEVICE States of() const { return {states, length}; }
    TILE_DEVICE DecodeRow as_row(const DecodeArgs& args) const {
        const int kv_head = args.rows_each.quotient(row), its = row - kv_head * int(args.rows_each.divisor);
        const int token = args.group.quotient(its), group = int(args.group.divisor);
        return {sequence, its, token, kv_head * group + its - token * group};
    }
};

// A row in kLanes lanes of a warp: a lane has four columns, and the four that are 4 · kLanes further, and so on.
template <int kLanes> struct RowLanes {
    static constexpr int kOf = kLanes, kColumns = (kValueDim + 4 * kLanes - 1) / (4 * kLanes);
    using State = RowState4<kColumns>;

    static TILE_DEVICE int column(int f) { return 4 * (f * kLanes + lane_here() % kLanes); }
    static TILE_DEVICE bool has(int f) { return kValueDim % (4 * kLanes) == 0 || column(f) < kValueDim; }

    // Folds states [begin, end) of a row in order; the loads of kAtOnce states are issued before the first is used. A
    // warp that merges has its multiprocessor nearly to itself and waits for every instruction: there must be few.
    template <int kAtOnce>
    static TILE_DEVICE void fold_run(State& all, const DecodeArgs& args, const Merge& merge, int begin, int end) {
        const int64_t stride = int64_t(args.kv_heads) * args.rows_each.divisor;
        const int64_t row = (merge.of().first + begin) * stride + merge.row;
        const float *o = args.state_o + row * kValueDim + column(0), *ml = args.state_ml + 2 * row;
        State group;  // of kStateGroup states
        all.clear();
        if constexpr (kStateGroup > 1) group.clear();
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
                o += stride * kValueDim;
                ml += 2 * stride;
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; k++) {
                if (from + k >= end) break;
                if constexpr (kStateGroup == 1) {
                    all.fold(y[k]);
                } else {
                    const int next = kAtOnce % kStateGroup == 0 ? k + 1 : from - begin + k + 1;
                    group.fold(y[k]);
                    if (next % kStateGroup == 0) {
                        all.fold(group);
                        group.clear();
                    }
                }
            }
        }
        if constexpr (kStateGroup > 1) all.fold(group);
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

// The order in which states are folded, which decides the bits of the result. Up to kRun states are folded from first
// to last, like the pieces that one warp folds of a whole range; of these there are at most kRun and one group more
// (ranges.py), which is the one state of its run and folded last either way. More states are dealt in runs of kRun to
// kFolds accumulators in turn, and the accumulators are folded at the end, so that as many warps can share the work.
// With groups of four, four times four states make a run, and four runs a tree of up to 64: whoever leaves one state
// for four pieces, or for sixteen, has folded them as the merge would have.
constexpr int kRun = 16, kFolds = 4;
// Accumulator `which` of a row's `count` states. fold_run(run, begin, end) folds some of them in order.
template <class State, class FoldRun>
TILE_DEVICE void fold_accumulator(State& all, int count, int which, const FoldRun& fold_run) {
#pragma unroll 1
    for (int begin = which * kRun; begin < count; begin += kFolds * kRun) {
        State run;
        fold_run(run, begin, begin + kRun < count ? begin + kRun : count);
        if (begin == which * kRun) all = run;
        else all.fold(run);
    }
}
// All states of a row
template <class State, class FoldRun>
TILE_DEVICE void fold_accumulators(State& all, int count, const FoldRun& fold_run) {
    fold_accumulator(all, count, 0, fold_run);
#pragma unroll 1
    for (int which = 1; which < kFolds && which * kRun < count; which++) {
        State part;
        fold_accumulator(part, count, which, fold_run);
        all.fold(part);
    }
}

// ---- the grid barrier -----------------------------------------------------------------------------------------------
// The warps that take part in the barrier and merge afterwards: `warps` of each block, of which this warp is `rank`
struct Mergers {
    int rank, warps;
};
// All blocks of the launch wait for each other. The launch is cooperative, so all of them are resident. Each block
// counts up once per launch, and the counter is never reset: it wraps around at a multiple of their number.
TILE_DEVICE void grid_barrier(const DecodeArgs& args, Mergers of) {
    const int threads = 32 * of.warps;
    ptx::barrier_sync(kMergeBarrier, threads);
    if (of.rank == 0 && warp::lane() == 0) {
        const uint32_t all = gridDim.x, before = ptx::count_up(args.barrier_counter, (1u << 30) / all * all - 1);
        const uint32_t began = before - before % all;
        while (ptx::load_relaxed(args.barrier_counter) - began < all) ptx::spin();
        ptx::fence_device();
    }
    ptx::barrier_sync(kMergeBarrier, threads);
}

// Folds the accumulators of a row that the first kFolds warps of a block hold, of `per_warp` states or more each, into
// that of the first warp, by way of the rings, which are free by now.
using WholeRow = RowLanes<32>;
TILE_DEVICE void join_folds(WholeRow::State& all, int count, int per_warp, int rank) {
    const auto sPart = [](int of) { return Shared<float>(kAtParts + of * kStagedRow * 4); };
    const auto each = [](auto what) {
#pragma unroll
        for (int c = 0; c < 4 * WholeRow::kColumns; c++)
            if (WholeRow::has(c / 4)) what(WholeRow::column(c / 4) + c % 4, c / 4, c % 4);
    };
    if (rank * per_warp < count) {
        const Shared<float> to = sPart(rank);
        each([&](int column, int f, int c) { to[column] = all.x[f][c]; });
        if (lane_here() == 0) to[kValueDim] = all.max, to[kValueDim + 1] = all.sum;
    }
    ptx::barrier_sync(kMergeBarrier, 32 * kFolds);
#pragma unroll 1
    for (int of = 1; of < kFolds && of * per_warp < count; of++) {
        const Shared<float> from = sPart(of);
        WholeRow::State part;
        part.clear();
        each([&](int column, int f, int c) { part.x[f][c] = from[column]; });
        part.max = from[kValueDim], part.sum = from[kValueDim + 1];
        all.fold(part);
    }
    ptx::barrier_sync(kMergeBarrier, 32 * kFolds);
}
// No more rows than blocks: kFolds warps of a block share a row, one accumulator each. Groups of states are
// accumulators while these are no more than a run.
TILE_DEVICE void merge_together(const DecodeArgs& args, Mergers of) {
    const Merge merge(args, blockIdx.x);
    grid_barrier(args, of);
    if (of.rank >= kFolds || !merge.there(args)) return;
    const int count = merge.of().count;
    if (count == 1) return;
    WholeRow::State all;
    const auto fold_run = [&](WholeRow::State& run, int begin, int end) {
        WholeRow::fold_run<kRowAtOnce>(run, args, merge, begin, end);
    };
    const int each = kStateGroup > 1 && count <= kRun ? kStateGroup : kRun, from = of.rank * each;
    if (each < kRun) {
        if (from < count) fold_run(all, from, from + each < count ? from + each : count);
    } else {
        fold_accumulator(all, count, of.rank, fold_run);
    }
    if (count > each) join_folds(all, count, each, of.rank);
    if (of.rank == 0) WholeRow::put(args, merge, all);
}
// Many rows: every warp of the launch merges a few rows of a sequence at a time, each in some of its lanes, so that the
// arithmetic that a row needs besides its columns is done for all of them at once.
template <class Lanes, int kAtOnce> TILE_DEVICE void merge_apart(const DecodeArgs& args, Mergers of) {
    const int step = gridDim.x * of.warps, ahead = warp::lane() / Lanes::kOf;
    int n = of.rank * gridDim.x + blockIdx.x;
    Merge next(args, n, ahead);
    grid_barrier(args, of);
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
            constexpr int kFew = kLongRuns ? kAtOnce : 1;  // as registers allow
            fold_accumulators(all, count, [&](typename Lanes::State& run, int begin, int end) {
                Lanes::template fold_run<kFew>(run, args, now, begin, end);
            });
        }
        Lanes::put(args, now, all);
    }
}
// After all warps have left their states: the results of sequences that have several. kPairs, kQuads: states that are
// loaded at once of rows that a warp merges two or four at a time
template <int kPairs, int kQuads> TILE_DEVICE void merge_states(const DecodeArgs& args, Mergers of) {
    if (args.merge_rows == 1) merge_together(args, of);
    else if (args.merge_rows == 2) merge_apart<RowLanes<16>, kPairs>(args, of);
    else merge_apart<RowLanes<8>, kQuads>(args, of);
}
