// What the threads of one block of kPlanThreads do together: sums, minima, sorting. All of them are called by all
// threads.
#pragma once
#include "tile/memory.cuh"

constexpr int kPlanThreads = 1024, kPlanWarps = kPlanThreads / 32;
constexpr uint32_t kScanBytes = 8 * kPlanWarps;  // at the beginning of shared memory

TILE_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
TILE_DEVICE int ceil_shift(int a, int bits) { return (a + (1 << bits) - 1) >> bits; }
TILE_DEVICE int larger(int a, int b) { return a > b ? a : b; }
TILE_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
TILE_DEVICE int power_of_two(int least, int count) {
    while (least < count) least *= 2;
    return least;
}

struct Sum {
    template <class T> static TILE_DEVICE T none() { return T(0); }
    template <class T> static TILE_DEVICE T of(T a, T b) { return a + b; }
};
struct Least {
    template <class T> static TILE_DEVICE T none() { return T(~0ull >> 1); }
    template <class T> static TILE_DEVICE T of(T a, T b) { return a < b ? a : b; }
};
// Over the threads before this one; total: over all of them. T has 64 bits.
template <class Join, class T> TILE_DEVICE T scan(T x, T& total) {
    static_assert(sizeof(T) == 8);
    const Shared<T> of_warp(0u);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto inside = [&](T v) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const T other = ptx::shuffle(v, (lane - d) & 31);
            if (lane >= d) v = Join::of(v, other);
        }
        return v;
    };
    const T mine = inside(x), up = ptx::shuffle(mine, (lane - 1) & 31);
    ptx::sync_threads();  // what was there is no longer needed
    if (lane == 31) of_warp[warp] = mine;
    ptx::sync_threads();
    const T warps = inside(T(of_warp[lane]));
    total = ptx::shuffle(warps, 31);
    const T before = ptx::shuffle(warps, (warp - 1) & 31);
    return Join::of(warp ? before : Join::template none<T>(), lane ? up : Join::template none<T>());
}
template <class Join, class T> TILE_DEVICE T reduce(T x) {
    T total;
    scan<Join>(x, total);
    return total;
}

// Sorts `count` keys, a power of two from 32 to kPlanThreads · kEach, in ascending order. A thread has kEach
// neighbours; keys go from lane to lane through registers and from warp to warp through shared memory.
template <int kEach, class T> TILE_DEVICE void sort_by_runs(Shared<T> keys, int count) {
    const int at = int(threadIdx.x) * kEach;
    const bool there = at < count;
    T x[kEach];
    ptx::sync_threads();
#pragma unroll
    for (int j = 0; j < kEach; j++) x[j] = there ? T(keys[at + j]) : T(0);
    for (int run = 2; run <= count; run *= 2) {
        // The smaller key stays in front, or behind where the run descends.
        const auto keep = [&](T mine, T other, int place, int gap) {
            const bool front = !(place & gap), ascends = !(place & run);
            return (front == ascends) == (mine < other) ? mine : other;
        };
        for (int gap = run / 2; gap >= kEach; gap /= 2) {
            if (gap >= 32 * kEach) {
                ptx::sync_threads();
#pragma unroll
                for (int j = 0; j < kEach; j++)
                    if (there) keys[at + j] = x[j];
                ptx::sync_threads();
#pragma unroll
                for (int j = 0; j < kEach; j++)
                    if (there) x[j] = keep(x[j], T(keys[(at + j) ^ gap]), at + j, gap);
            } else {
#pragma unroll
                for (int j = 0; j < kEach; j++) x[j] = keep(x[j], ptx::shuffle_xor(x[j], gap / kEach), at + j, gap);
            }
        }
#pragma unroll
        for (int gap = kEach / 2; gap; gap /= 2) {
            if (gap >= run) continue;
#pragma unroll
            for (int j = 0; j < kEach; j++) {
                if (j & gap) continue;
                const T a = x[j], b = x[j + gap];
                x[j] = keep(a, b, at + j, gap);
                x[j + gap] = keep(b, a, at + j + gap, gap);
            }
        }
    }
    ptx::sync_threads();
#pragma unroll
    for (int j = 0; j < kEach; j++)
        if (there) keys[at + j] = x[j];
    ptx::sync_threads();
}
template <class T> TILE_DEVICE void sort_keys(Shared<T> keys, int count) {
    if (count <= kPlanThreads) sort_by_runs<1>(keys, count);
    else if (count <= 2 * kPlanThreads) sort_by_runs<2>(keys, count);
    else sort_by_runs<4>(keys, count);
}

// Sorts up to kPlanThreads / 2 different keys, a power of two: each is compared with all of them. It needs a few
// barriers where sort_keys needs dozens. ranks: as many ints, scratch.
template <class T> TILE_DEVICE void sort_few(Shared<T> keys, Shared<int> ranks, int count) {
    const int of = int(threadIdx.x) % count, share = count * count / kPlanThreads;
    const int from = int(threadIdx.x) / count * share;
    if (int(threadIdx.x) < count) ranks[threadIdx.x] = 0;
    ptx::sync_threads();
    const T mine = keys[of];
    int before = 0;
    for (int i = from; i < from + share; i++) before += T(keys[i]) < mine;
    ptx::atomic_add_shared(ranks.address(of), before);
    ptx::sync_threads();
    const int to = ranks[of];
    if (int(threadIdx.x) < count) keys[to] = mine;
    ptx::sync_threads();
}
