// float32 products on tensor cores, as three of TF32, which keeps 11 of 24 bits.
//
// A float32 is split in two TF32 numbers, x = high + low, and
//     x y = low(x) high(y) + high(x) low(y) + high(x) high(y),
// which leaves out less than 2^−22 of |x y|. Tensor cores cut sums off where float32 arithmetic rounds them, so that a
// sum of many products would shrink: products over a depth of sixteen begin with zero, and are added to their sum by
// float32 arithmetic. An infinity may come out as NaN.
#pragma once
#include "tile/ptx.cuh"

namespace tf32 {

// Both parts are rounded. The tensor cores do not look at the lowest thirteen bits of a TF32 number, so that half a
// unit is all that low has to be given beforehand.
struct Split {
    uint32_t high, low;
    TILE_DEVICE Split() {}
    TILE_DEVICE explicit Split(uint32_t x)
        : high((x + 0x1000u) & ~0x1fffu), low(as_bits(as_float(x) - as_float(high)) + 0x1000u) {}
};
// A step of depth eight: an A operand
struct SplitStep {
    uint32_t high[4], low[4];
    TILE_DEVICE SplitStep() {}
    TILE_DEVICE SplitStep(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        const Split of[4] = {Split(a), Split(b), Split(c), Split(d)};
#pragma unroll
        for (int i = 0; i < 4; i++) high[i] = of[i].high, low[i] = of[i].low;
    }
};
// The product over sixteen of the depth
struct Part {
    float x[4];
    TILE_DEVICE Part() : x{} {}
    TILE_DEVICE void multiply(const SplitStep& a, const Split& b0, const Split& b1) {
        ptx::mma_16x8x8_tf32(x, a.low, b0.high, b1.high);
        ptx::mma_16x8x8_tf32(x, a.high, b0.low, b1.low);
        ptx::mma_16x8x8_tf32(x, a.high, b0.high, b1.high);
    }
    TILE_DEVICE void add_to(float (&sum)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += x[i];
    }
};

}  // namespace tf32
