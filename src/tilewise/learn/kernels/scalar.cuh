// What the scalar kernels share: reductions over lanes, and loads of tiles of rows into shared memory as float.
#pragma once
#include "learn/kernels/args.cuh"

namespace warp {

// Over groups of kLanes neighbouring lanes. Every lane of the warp takes part and gets its group's result.
template <int kLanes> TILE_DEVICE float max(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) x = fmaxf(x, ptx::shuffle_xor(x, mask));
    return x;
}
template <int kLanes, class T> TILE_DEVICE T sum(T x) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
    return x;
}

}  // namespace warp

// The maximum to subtract: a row that has seen no key yet has −inf, and −inf − −inf would be NaN where 0 is meant.
TILE_DEVICE float finite_max(float row_max) { return row_max == -INFINITY ? 0.0f : row_max; }

// Loads rows first … first + kRows − 1 of a matrix, zero from row `end` on. Consecutive threads read consecutive
// elements, and a thread has four loads in flight: a load that is stored before the next begins would wait out the
// latency each time.
template <int kRows, int kPitch, int kThreads, class T>
TILE_DEVICE void load_tile(Shared<float> sTile, Global<const T> gRows, int64_t stride, int first, int end) {
    static_assert(kRows * kHeadDim % (4 * kThreads) == 0, "every thread has the same number of elements");
    for (int begin = threadIdx.x; begin < kRows * kHeadDim; begin += 4 * kThreads) {
        float x[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const int i = begin + b * kThreads, row = i / kHeadDim, d = i % kHeadDim;
            x[b] = first + row < end ? to_float(gRows[(first + row) * stride + d]) : 0.0f;
        }
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const int i = begin + b * kThreads;
            sTile[i / kHeadDim * kPitch + i % kHeadDim] = x[b];
        }
    }
}
