// A user's functions over scores, as kernels see them.
#pragma once
#include "common/args.cuh"
struct Interval {
    double low, high;
};
struct NoFunction {
    int unused;
    static constexpr bool kMask = false, kScore = false, kByKey = false;
    TILE_DEVICE bool mask(int, int, int, int, float, float) const { return true; }
    TILE_DEVICE float score(float s, float, int, int, int, int, float, float) const { return s; }
    TILE_DEVICE Interval seen(Interval, Interval, Interval, Interval) const { return {1.0, 1.0}; }
};
