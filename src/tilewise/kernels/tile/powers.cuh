// Exact arithmetic with powers of two.
#pragma once
#include "tile/types.cuh"

TILE_DEVICE float inverse_power(float x) { return as_float(0x7f000000u - as_bits(x)); }
TILE_DEVICE float log2_of_power(float x) { return float(int(as_bits(x) >> 23) - 127); }
// The power of two, between 2^−most and 2^most, that brings x > 0 to between 2^(place − 1) and 2^place; 1 for 0,
// infinity and NaN
TILE_DEVICE float power_above(float x, int place, int most = 120) {
    const int exponent = int(as_bits(x) >> 23 & 255) - 126;  // x < 2^exponent
    const int power = place - exponent;
    if (!(x > 0.0f) || exponent > 128) return 1.0f;
    return as_float(uint32_t((power > most ? most : power < -most ? -most : power) + 127) << 23);
}
