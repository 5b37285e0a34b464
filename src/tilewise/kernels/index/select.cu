// index_select: the keys that score best for a query token, in their order; of equal scores the first.
//
// A block has one token. Scores become integers in the same order, and the least that is taken is found by its digits
// from the highest down: how many keys have this digit, among those that agree in the digits before? Then the keys are
// read once more, and each that is taken has as its place how many were taken before it. So a list is sorted and the
// same in every run, and what reads it adds in the same order.
#include "decode/plan_block.cuh"
#include "index/args.cuh"
#include "tile/ptx_counts.cuh"

// Constants: kPlanThreads
constexpr int kDigits[] = {11, 11, 10}, kBins = 1 << 11;
constexpr int kAtBins = kScanBytes, kAtFound = kAtBins + 4 * kBins;

// Larger for a larger score; 0 for NaN
TILE_DEVICE uint32_t order_of(float x) {
    const uint32_t bits = as_bits(x + 0.0f);  // −0 becomes 0
    return x == x ? bits ^ (uint32_t(int(bits) >> 31) | 0x80000000u) : 0;
}

struct Row {
    Global<const Vector16> gScores;
    int count;  // of keys that the token sees

    // This thread's four of the keys from `from` on, and whether there are such
    TILE_DEVICE void load(uint32_t (&key)[4], bool (&there)[4], int from) const {
        const int first = from + 4 * int(threadIdx.x);
        Vector16 x{};
        if (first < count) x = gScores[first / 4];
#pragma unroll
        for (int i = 0; i < 4; i++) key[i] = order_of(as_float(x.word[i])), there[i] = first + i < count;
    }
};

// The least key that is taken, and how many of the keys equal to it
struct Cut {
    uint32_t key = 0;
    int equal;
};
// `done`: bits of the key that are known
template <int kBits> TILE_DEVICE void find_digit(Cut& cut, const Row& row, int done) {
    const Shared<int> sBins(kAtBins), sFound(kAtFound);
    constexpr int kCount = 1 << kBits, kEach = kCount / kPlanThreads;
    static_assert(kEach * kPlanThreads == kCount, "every thread has as many bins");
    for (int n = threadIdx.x; n < kCount; n += kPlanThreads) sBins[n] = 0;
    ptx::sync_threads();
#pragma unroll 4
    for (int from = 0; from < row.count; from += 4 * kPlanThreads) {
        uint32_t key[4];
        bool there[4];
        row.load(key, there, from);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool agrees = done == 0 || key[i] >> (32 - done) == cut.key;
            if (there[i] && agrees) ptx::count_shared(sBins.address(key[i] >> (32 - done - kBits) & (kCount - 1)));
        }
    }
    ptx::sync_threads();
    int mine[kEach];  // from the largest digit down
    Sums sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) sum += mine[i] = sBins[kCount - 1 - (kEach * int(threadIdx.x) + i)];
    int before = int(scan(sum).before);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        if (before < cut.equal && cut.equal <= before + mine[i]) {
            sFound[0] = kCount - 1 - (kEach * int(threadIdx.x) + i);
            sFound[1] = cut.equal - before;
        }
        before += mine[i];
    }
    ptx::sync_threads();
    cut.key = cut.key << kBits | uint32_t(int(sFound[0]));
    cut.equal = sFound[1];
}

// Grid: rows of args.rows
extern "C" __global__ void __launch_bounds__(kPlanThreads, 1)
    index_select(const __grid_constant__ IndexSelectArgs args) {
    const ChoosingRow its = Global<const ChoosingRow>{args.rows}[blockIdx.x];
    const Global<int> chosen{args.chosen + int64_t(its.row) * args.topk};
    const auto name = [&](int key) { return args.stored ? int(args.table.row(its.sequence, key)) : key; };
    const int count = its.place + 1;
    if (its.kept < 0 || count <= args.topk) {
        for (int n = threadIdx.x; n < args.topk; n += kPlanThreads) chosen[n] = n < count ? name(n) : -1;
        return;
    }
    const Row row{Global<const float>{args.scores + its.kept * args.width}.as<const Vector16>(), count};
    Cut cut;
    cut.equal = args.topk;
    find_digit<kDigits[0]>(cut, row, 0);
    find_digit<kDigits[1]>(cut, row, kDigits[0]);
    find_digit<kDigits[2]>(cut, row, kDigits[0] + kDigits[1]);
    int taken = 0, equal = 0;  // keys above the cut, and at it, among those before
#pragma unroll 1
    for (int from = 0; from < count; from += 4 * kPlanThreads) {
        uint32_t key[4];
        bool there[4];
        row.load(key, there, from);
        Sums mine = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) mine += there[i] ? Sums(key[i] > cut.key) | Sums(key[i] == cut.key) << 32 : 0;
        const Scanned sums = scan(mine);
        int above = taken + int(uint32_t(sums.before)), same = equal + int(sums.before >> 32);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool over = there[i] && key[i] > cut.key, at = there[i] && key[i] == cut.key;
            const int ties = same < cut.equal ? same : cut.equal;
            if (over || (at && same < cut.equal)) chosen[above + ties] = name(from + 4 * int(threadIdx.x) + i);
            above += over;
            same += at;
        }
        taken += int(uint32_t(sums.all));
        equal += int(sums.all >> 32);
    }
}
