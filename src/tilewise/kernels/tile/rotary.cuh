// Rotary position embedding of one row: pairs of channels are rotated by the angle of the row's position, in float32.
#pragma once
#include "tile/memory.cuh"

// Rotates (a, b) by the angle of this cosine and sine
TILE_DEVICE void rotate(float& a, float& b, float cosine, float sine) {
    const float x = a;
    a = ptx::mad(x, cosine, -b * sine);
    b = ptx::mad(x, sine, b * cosine);
}

namespace warp {

// Rotates the first kPairs pairs of a row with the 32 lanes of a warp: neighbours (2i, 2i + 1) if interleaved,
// otherwise (i, i + kPairs). gCos and gSin hold kPairs values for the row's position; channels from 2 kPairs on stay as
// they are.
template <bool kInterleaved, int kPairs, class T>
TILE_DEVICE void rotate_row(Global<T> gRow, Global<const float> gCos, Global<const float> gSin) {
    for (int i = threadIdx.x % 32; i < kPairs; i += 32) {
        const int first = kInterleaved ? 2 * i : i, second = kInterleaved ? 2 * i + 1 : i + kPairs;
        float a = to_float(gRow[first]), b = to_float(gRow[second]);
        rotate(a, b, gCos[i], gSin[i]);
        gRow[first] = from_float<T>(a);
        gRow[second] = from_float<T>(b);
    }
}

}  // namespace warp
