// half, bf16 and tensor maps as plain C++, with the card's rounding.
#pragma once
#include "emulator/runtime.h"

#define TILE_DEVICE inline

inline uint32_t as_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float as_float(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

struct half {
    _Float16 value;
};
struct bf16 {
    uint16_t bits;
};
struct e4m3 {
    uint8_t bits;
};
inline float to_float(e4m3 x) { return emu::kE4m3.of_code[x.bits]; }
inline float to_float(float x) { return x; }
inline float to_float(half x) { return float(x.value); }
inline float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
template <class T> inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline half from_float<half>(float x) { return {_Float16(x)}; }
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t u = as_bits(x);
    if (x != x) return {0x7fff};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};  // to nearest, ties to even
}

template <class T> inline uint16_t bits_of(T x) {
    uint16_t b;
    std::memcpy(&b, &x, 2);
    return b;
}
template <class T> inline uint32_t pack(float low, float high) {
    return bits_of(from_float<T>(low)) | uint32_t(bits_of(from_float<T>(high))) << 16;
}
template <class T> inline float unpack(uint32_t pair, int index) {
    uint16_t b = uint16_t(pair >> (16 * index));
    T x;
    std::memcpy(&x, &b, 2);
    return to_float(x);
}

// The description the driver would encode, as launcher.py's TensorMap lays it out.
struct alignas(64) TensorMap {
    uint8_t* base;
    uint32_t element_bytes, rank, swizzle, pad;
    uint64_t size[5];
    uint64_t stride[4];  // bytes, of dimensions 1 …; dimension 0 is dense
    uint32_t box[5];
    uint32_t pad2;
};
static_assert(sizeof(TensorMap) == 128, "a tensor map is 128 bytes");
