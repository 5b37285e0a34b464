// More of ptx.cuh: arithmetic on pairs of halves.
#pragma once
#include "tile/ptx.cuh"
#ifndef TILEWISE_EMULATOR

namespace ptx {

// a · b + c, rounded once
TILE_DEVICE uint32_t mad_halves(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

}  // namespace ptx
#endif
