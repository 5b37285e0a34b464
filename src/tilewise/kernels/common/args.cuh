// What the arguments of prefill and decode have in common; tilewise.gpu.abi has their mirrors in Python.
#pragma once
#include "tile/memory.cuh"

// In elements; the head dimension is dense.
struct Strides {
    int64_t batch, row, head;
};

// n / divisor for 0 ≤ n < 2^31 by a multiplication: a division would take the producer as long as a tile takes to
// arrive.
struct Divisor {
    uint32_t divisor, multiplier, shift;  // made by Divisor.by in Python, or by divisor_of
    TILE_DEVICE int quotient(int n) const {
        return divisor == 1 ? n : int(ptx::multiply_high(n, multiplier) >> shift);
    }
};
TILE_DEVICE Divisor divisor_of(uint32_t divisor) {
    uint32_t log = 0;
    while (1ull << log < divisor) log++;
    return {divisor, divisor == 1 ? 0u : uint32_t(((1ull << (31 + log)) + divisor - 1) / divisor), log - 1};
}
