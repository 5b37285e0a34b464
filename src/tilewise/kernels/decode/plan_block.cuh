// What the threads of one block of kPlanThreads do together: sums, minima, sorting. All of them are called by all
// threads.
#pragma once
#include "tile/memory.cuh"

// A function that is called, not copied to where it is used: the planner's instructions run once per launch, and what
// takes the time is fetching them.
#ifdef TILEWISE_EMULATOR
#define PLAN_CALLED inline
#else
#define PLAN_CALLED __device__ __noinline__
#endif

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

using Sums = unsigned long long;  // one sum, or two of 32 bits
// Sums of the threads before this one, and of all of them
struct Scanned {
    Sums before, all;
};
PLAN_CALLED Scanned scan(Sums x) {
    const Shared<Sums> of_warp(0u);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sums mine = x, warps = 0;
    ptx::sync_threads();  // what was there is no longer needed
#pragma unroll 1
    for (int round = 0; round < 2; round++) {
        Sums sum = round ? warps : mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const Sums other = ptx::shuffle(sum, (lane - d) & 31);
            if (lane >= d) sum += other;
        }
        if (round) {
            warps = sum;
            break;
        }
        mine = sum;
        if (lane == 31) of_warp[warp] = mine;
        ptx::sync_threads();
        warps = of_warp[lane];
    }
    const Sums before = ptx::shuffle(warps, (warp - 1) & 31);
    return {(warp ? before : 0) + mine - x, ptx::shuffle(warps, 31)};
}
// The least of all threads' numbers, and the largest; none is negative
PLAN_CALLED int least_of(int x) {
    const Shared<uint32_t> of_warp(0u);
    const uint32_t all = ptx::reduce_max(~uint32_t(x));
    ptx::sync_threads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = all;
    ptx::sync_threads();
    return int(~ptx::reduce_max(uint32_t(of_warp[threadIdx.x % 32])));
}
TILE_DEVICE int largest_of(int x) { return 0x7fffffff - least_of(0x7fffffff - x); }

// Sorts `count` keys at `at_keys`, a power of two from 32 to kPlanThreads · kEach, in ascending order. A thread has
// kEach neighbours; keys go from lane to lane through registers and from warp to warp through shared memory.
template <int kEach> PLAN_CALLED void sort_runs(uint32_t at_keys, int count) {
    using T = uint32_t;
    const Shared<T> keys(at_keys);
    const int at = int(threadIdx.x) * kEach;
    const bool there = at < count;
    T x[kEach];
    ptx::sync_threads();
#pragma unroll
    for (int j = 0; j < kEach; j++) x[j] = there ? T(keys[at + j]) : T(0);
#pragma unroll 1
    for (int run = 2; run <= count; run *= 2) {
        // The smaller key stays in front, or behind where the run descends.
        const auto keep = [&](T mine, T other, int place, int gap) {
            const bool front = !(place & gap), ascends = !(place & run);
            return (front == ascends) == (mine < other) ? mine : other;
        };
#pragma unroll 1
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
TILE_DEVICE void sort_by_runs(uint32_t at_keys, int count) {
    if (count <= kPlanThreads) sort_runs<1>(at_keys, count);
    else sort_runs<4>(at_keys, count);
}
// The last of `count` structures of `words` words, at `at`, whose first word is not above n; those words ascend
TILE_DEVICE int find_last(uint32_t at, int words, int count, int n) {
    int low = 0, high = count - 1;
#pragma unroll 1
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (int(Shared<int>(at)[middle * words]) <= n) low = middle;
        else high = middle - 1;
    }
    return low;
}
