// schedule_select: of each row of block scores the largest, by number or until they reach a share of the row's sum.
//
// Scores become integers, keys, in the same order; the cut is found by search: how much stands at or above a candidate?
// What is counted or summed are integers, so the result does not depend on the search nor on the order of the sums.
#include "common/schedule.cuh"

// Element: of the scores; a float32 made from one has zeros as its kUnused low bits. kRowWarps: warps of a row. kWords:
// words of 32 columns that a warp of it holds in registers; 0: it reads them anew each time. kShare: sums of scores are
// searched for, not their number. Sum: what either is counted in.
constexpr int kRowsOfBlock = kRowWarps == 1 ? 8 : 1;
constexpr int kThreads = kRowWarps * kRowsOfBlock * 32;
constexpr int kShareBits = 24;  // a share counts in steps of 2^-24
constexpr int kWeightBits = 8;  // plan/schedule_select.py

struct SelectArgs {
    const void* scores;  // (rows, cols)
    uint32_t* bits;      // (rows, words)
    int* faults;         // (rows,), with kShare
    int rows, cols, words, q_blocks;
    uint32_t amount;  // to keep: a number of blocks, or a share
    int causal, seqlen_q, seqlen_k, block_q, block_k;
};

// Larger for a larger score; 0 for NaN and −inf, which are never kept
TILE_DEVICE uint32_t key_of(float x) {
    const uint32_t bits = as_bits(x + 0.0f);  // −0 becomes 0
    const uint32_t ordered = bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u);
    return ordered - 0x00800000u <= 0xff800000u - 0x00800000u ? ordered >> kUnused : 0;
}
constexpr uint32_t kZero = 0x80000000u >> kUnused;  // the key of 0

// The bits of the score of a key above that of 0; 0 for key 0
TILE_DEVICE uint32_t score_bits(uint32_t key) { return key << kUnused & 0x7fffffffu; }
TILE_DEVICE int exponent_of(uint32_t bits) { return bits >> 23 ? bits >> 23 : 1; }
// Its score in a unit by which the row's largest has 32 bits, rounded up. Infinity counts as 2^128.
TILE_DEVICE uint32_t weight_of(uint32_t key, int top_exponent) {
    const uint32_t bits = score_bits(key), mantissa = (bits & 0x7fffffu) | (bits >> 23 ? 0x800000u : 0u);
    const uint32_t shifted = mantissa << kWeightBits;
    const int down = top_exponent - exponent_of(bits);
    if (down >= 32) return mantissa != 0;
    return (shifted >> down) + ((shifted & ((1u << down) - 1)) != 0);
}

// The columns that a row may keep, and those that it keeps whatever their score
struct Reach {
    int first, end;  // of the diagonal; [0, end) are considered
};
TILE_DEVICE Reach reach_of(const SelectArgs& a, int row) {
    if (!a.causal) return {a.cols, a.cols};
    const int64_t diagonal = int64_t(row % a.q_blocks) * a.block_q + a.seqlen_k - a.seqlen_q;
    const int64_t past = diagonal + a.block_q;
    const int first = diagonal < 0 ? 0 : int(diagonal) / a.block_k;
    const int end = past <= 0 ? 0 : int((past < a.seqlen_k ? past : a.seqlen_k) - 1) / a.block_k + 1;
    return {first, end > first ? end : first};
}

// A warp's columns of one row: words [first_word, first_word + count)
struct Row {
    Global<const Element> gScores;  // from first_word on
    int end, count, lane;           // columns, words; both from first_word on
    bool negative;                  // one of this lane's columns
    int top_exponent;
    uint32_t key[kWords ? kWords : 1];
    uint32_t weight[kWords && kShare ? kWords : 1];

    TILE_DEVICE float score(int i) const {
        const int column = i * 32 + lane;
        return column < end ? to_float(Element(gScores[column])) : -INFINITY;
    }
    TILE_DEVICE uint32_t candidate(float x) {
        const uint32_t k = key_of(x);
        if constexpr (!kShare) return k;
        if (k && k < kZero) negative = true;
        return k > kZero ? k : 0;  // only what has a weight can be kept
    }
    TILE_DEVICE void hold() {
        if constexpr (kWords > 0) {
            float scores[kWords ? kWords : 1];
            if (end >= kWords * 32) {  // all loads at once, no lane asks
#pragma unroll
                for (int i = 0; i < kWords; i++) scores[i] = to_float(Element(gScores[i * 32 + lane]));
            } else {
#pragma unroll
                for (int i = 0; i < kWords; i++) scores[i] = score(i);
            }
#pragma unroll
            for (int i = 0; i < kWords; i++) key[i] = candidate(scores[i]);
        }
    }
    // From here on weights are those of a row whose largest key is `top`.
    TILE_DEVICE void weigh(uint32_t top) {
        top_exponent = exponent_of(score_bits(top));
        if constexpr (kWords > 0 && kShare) {
#pragma unroll
            for (int i = 0; i < kWords; i++) weight[i] = weight_of(key[i], top_exponent);
        }
    }
    // f(i, key) for each of the warp's words
    template <class F> TILE_DEVICE void each(F f) {
        if constexpr (kWords > 0) {
#pragma unroll
            for (int i = 0; i < kWords; i++) f(i, key[i]);
        } else {
            for (int i = 0; i < count; i++) f(i, candidate(score(i)));
        }
    }
    // How many of this lane's keys are at or above `low`, which is not 0, or what they weigh
    TILE_DEVICE Sum at_least(uint32_t low) {
        uint32_t count = 0;
        Sum sum = 0;
        each([&](int i, uint32_t k) {
            if (!kShare) ptx::count_carry(count, k, 0 - low);
            else sum += k < low ? 0 : kWords ? weight[i] : weight_of(k, top_exponent);
        });
        return kShare ? sum : Sum(count);
    }
};

// All warps of a row
struct Team {
    int warp, lane, turn;

    // What each of them brings, in shared memory. Turns have places of their own, so that one barrier is enough.
    template <class T> TILE_DEVICE Shared<T> meet(T x) {
        const Shared<T> sBrought(turn++ % 2 * kRowWarps * 8);
        if (lane == 0) sBrought[warp] = x;
        ptx::sync_threads();
        return sBrought;
    }

    TILE_DEVICE uint32_t sum_lanes(uint32_t x) const { return ptx::reduce_add(x); }
    // In two parts, each of whose sums fits 32 bits: a lane's weights of a whole row stay below 2^53.
    TILE_DEVICE uint64_t sum_lanes(uint64_t x) const {
        constexpr int kLow = 26;
        const uint32_t low = ptx::reduce_add(uint32_t(x) & ((1u << kLow) - 1));
        return (uint64_t(ptx::reduce_add(uint32_t(x >> kLow))) << kLow) + low;
    }
    template <class T> TILE_DEVICE T sum(T x) {
        x = sum_lanes(x);
        if (kRowWarps == 1) return x;
        const Shared<T> sBrought = meet(x);
        x = 0;
        for (int i = 0; i < kRowWarps; i++) x += T(sBrought[i]);
        return x;
    }
    TILE_DEVICE uint32_t max(uint32_t x) {
        x = ptx::reduce_max(x);
        if (kRowWarps == 1) return x;
        const Shared<uint32_t> sBrought = meet(x);
        for (int i = 0; i < kRowWarps; i++) x = sBrought[i] > x ? uint32_t(sBrought[i]) : x;
        return x;
    }
    // The sum over the warps before this one
    TILE_DEVICE uint32_t sum_before(uint32_t x) {
        if (kRowWarps == 1) return 0;
        const Shared<uint32_t> sBrought = meet(ptx::reduce_add(x));
        x = 0;
        for (int i = 0; i < warp; i++) x += uint32_t(sBrought[i]);
        return x;
    }
};

// Kept are the keys from `from` on, and the first `ties` of those just below.
struct Cut {
    uint32_t from, ties;
};

// The share of a row's sum that is to be reached
TILE_DEVICE uint64_t needed(uint64_t total, uint32_t share) {
    const uint64_t low = total & ((1u << kShareBits) - 1);
    const uint64_t part = (total >> kShareBits) * share + (low * share >> kShareBits);
    return part ? part : total != 0;
}

TILE_DEVICE Cut find_cut(Row& row, Team& team, uint32_t amount) {
    uint32_t greatest = 0, before_least = ~0u;  // 0 is no key, and 0 − 1 is no minimum
    row.each([&](int, uint32_t k) {
        greatest = k > greatest ? k : greatest;
        before_least = k - 1 < before_least ? k - 1 : before_least;
    });
    greatest = team.max(greatest);
    uint32_t low = ~team.max(~before_least) + 1, high = greatest + 1;
    row.weigh(greatest);
    // at_low ≥ need > at_high: what stands at or above these two keys
    Sum at_low = team.sum(row.at_least(1)), at_high = 0;
    const Sum need = kShare ? Sum(needed(at_low, amount)) : Sum(amount);
    if (at_low == 0 || need == 0) return {~0u, 0};

    for (int turn = 0; at_low > need && high - low > 1; turn++) {
        // Where a straight line puts the cut, and every other time the middle
        const float place = float(at_low - need) * ptx::reciprocal(float(at_low - at_high));
        const uint32_t gap = high - low, line = uint32_t(uint64_t(gap) * uint32_t(place * 0x1p24f) >> 24);
        uint32_t step = turn % 2 ? gap / 2 : line;
        step = step < 1 ? 1 : step > gap - 1 ? gap - 1 : step;
        const Sum at = team.sum(row.at_least(low + step));
        if (at >= need) low += step, at_low = at;
        else high = low + step, at_high = at;
    }
    if (at_low <= need) return {low, 0};
    const Sum each = kShare ? Sum(weight_of(low, row.top_exponent)) : Sum(1);
    return {high, uint32_t((need - at_high + each - 1) / each)};
}

extern "C" __global__ void __launch_bounds__(kThreads) schedule_select(const __grid_constant__ SelectArgs a) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int at = kRowWarps == 1 ? blockIdx.x * kRowsOfBlock + warp : blockIdx.x, part = kRowWarps == 1 ? 0 : warp;
    if (at >= a.rows) return;
    const Reach reach = reach_of(a, at);
    const int each = kWords ? kWords : (a.words + kRowWarps - 1) / kRowWarps;
    const int first_word = part * each, left = a.words - first_word;
    Row row{{static_cast<const Element*>(a.scores) + int64_t(at) * a.cols + first_word * 32},
            reach.end - first_word * 32,
            left < 0 ? 0 : left < each ? left : each,
            lane};
    Team team{part, lane, 0};
    row.hold();
    const Cut cut = find_cut(row, team, a.amount);

    // Of equal keys the first: how many are in the warps before this one?
    uint32_t ties = 0;
    if (cut.ties && kRowWarps > 1) {
        row.each([&](int, uint32_t k) { ties += k == cut.from - 1; });
        ties = team.sum_before(ties);
    }
    const Global<uint32_t> gBits{a.bits + int64_t(at) * a.words + first_word};
    uint32_t own = 0;  // of up to 32 words, the one that this lane writes
    const auto write = [&](int word) {
        const int column = (first_word + word) * 32;
        if (word < row.count) gBits[word] = own | bit_range(reach.first - column, reach.end - column);
    };
    const auto put = [&](int i, bool keep) {
        const uint32_t word = ptx::ballot(keep);
        own = lane == i % 32 ? word : own;
        if (kWords == 0 && i % 32 == 31) write(i - 31 + lane);
    };
    if (cut.ties)
        row.each([&](int i, uint32_t k) {
            const uint32_t tied = ptx::ballot(k == cut.from - 1);
            const bool early = ties + ptx::count_bits(tied & lanes_before(lane)) < cut.ties;
            ties += ptx::count_bits(tied);
            put(i, k >= cut.from || (k == cut.from - 1 && early));
        });
    else row.each([&](int i, uint32_t k) { put(i, k >= cut.from); });
    if (kWords || row.count % 32) write(kWords ? lane : row.count / 32 * 32 + lane);
    if constexpr (kShare) {
        const bool negative = team.max(row.negative);
        if (part == 0 && lane == 0) Global<int>{a.faults}[at] = negative ? kNegative : 0;
    }
}
