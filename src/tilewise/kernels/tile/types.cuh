// The element types and how they convert, on a card and in the emulator.
#pragma once
#ifdef TILEWISE_EMULATOR
#include "emulator/types.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using bf16 = __nv_bfloat16;
// FP8 with four bits of exponent: up to ±448, three bits of mantissa, no infinities. Made four at a time by
// ptx::pack_e4m3.
struct e4m3 {
    uint8_t bits;
};
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define TILE_DEVICE __device__ __forceinline__

TILE_DEVICE float to_float(float x) { return x; }
TILE_DEVICE float to_float(half x) { return __half2float(x); }
TILE_DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
template <class T> TILE_DEVICE T from_float(float x);
template <> TILE_DEVICE float from_float<float>(float x) { return x; }
template <> TILE_DEVICE half from_float<half>(float x) { return __float2half_rn(x); }
template <> TILE_DEVICE bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
// Two 16-bit values in a register, the first in the low half: how fragments hold them.
template <class T> TILE_DEVICE uint32_t pack(float low, float high);
template <> TILE_DEVICE uint32_t pack<half>(float low, float high) {
    half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&h);
}
template <> TILE_DEVICE uint32_t pack<bf16>(float low, float high) {
    __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&h);
}
TILE_DEVICE uint32_t as_bits(float x) { return __float_as_uint(x); }
TILE_DEVICE float as_float(uint32_t x) { return __uint_as_float(x); }
template <class T> TILE_DEVICE float unpack(uint32_t pair, int index);
template <> TILE_DEVICE float unpack<half>(uint32_t pair, int index) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> (16 * index))));
}
template <> TILE_DEVICE float unpack<bf16>(uint32_t pair, int index) {
    return __uint_as_float(index ? pair & 0xffff0000u : pair << 16);
}
struct alignas(64) TensorMap {
    char opaque[128];
};
#endif

// Scores are exponentiated in base 2.
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// What a kernel does to scores, as a constant of its specialisation: common/scores.cuh.
template <bool... kFlags> struct ScoreRule;
// The mask and score function of a specialisation that has none: common/functions.cuh.
struct NoFunction;
