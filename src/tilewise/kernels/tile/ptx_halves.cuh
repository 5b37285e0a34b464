// More of ptx.cuh: arithmetic on pairs of halves, and of bfloat16 values.
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
#if __CUDA_ARCH__ >= 900
// For pairs of bfloat16 values; subnormal ones are what they are
TILE_DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
TILE_DEVICE uint32_t add_bf16(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#endif

}  // namespace ptx
#endif
