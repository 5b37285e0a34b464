// Stored keys and values on their way into mma.sync, as its A operands: sixteen tokens, or sixteen channels, per step.
//
// In shared memory they are as in the cache. ldmatrix takes 16 bytes for eight 16-bit values, and gives a lane four
// bytes of them, which are 2, 4 or 8 channels; here these become 16-bit numbers. Which channels a lane holds does not
// matter to S = K Qᵀ as long as Q is read in the same order (query_channel), nor to Oᵀ = Vᵀ Pᵀ as long as O is written
// in that order (output_channel).
//
// Codes become halves, which represent all of them exactly: e4m3, int8, and the nibbles of int4 as the subnormal halves
// u · 2^−24 (a nibble in bits 0 … 3) or u · 2^−20 (in bits 4 … 7), which the tensor cores multiply exactly. The factors
// that remain, key_unit and output_unit, are left to the code that scales S and O anyway.
#pragma once
#include "tile/memory.cuh"

enum class Format { bits16, fp8, int8, int4, bits32 };
constexpr int bits_of_format(Format f) {
    return f == Format::bits32 ? 32 : f == Format::bits16 ? 16 : f == Format::int4 ? 4 : 8;
}
// Steps of a product that the two chunks of one ldmatrix feed
constexpr int steps_of_pair(Format f) { return 16 / bits_of_format(f); }

namespace quant {

constexpr float kKeyUnit4 = 16777216.0f;  // 2^24
template <Format kFormat> constexpr float key_unit() { return kFormat == Format::int4 ? kKeyUnit4 : 1.0f; }
// The unit of the channels in the upper or lower eight rows of an output tile
template <Format kFormat>
constexpr float output_unit(bool upper) {
    return kFormat != Format::int4 ? 1.0f : upper ? 1048576.0f : kKeyUnit4;
}

// Two e4m3 codes, in the low half of x or in the high one
template <bool kHigh> TILE_DEVICE uint32_t from_fp8(uint32_t x) {
#if defined(TILEWISE_EMULATOR) || __CUDA_ARCH__ >= 890
    return ptx::e4m3_to_halves<kHigh>(x);
#else
    // Moved into the fields of a half, the exponent and mantissa of e4m3 are the number times 2^−8, also if it is
    // subnormal. NaN becomes 480.
    const uint32_t wide = ptx::permute_bytes(x, 0, kHigh ? 0x3424 : 0x1404),
                   bits = (wide & 0x7f007f00u) >> 1 | (wide & 0x80008000u);
    const half2 h = __hmul2(*reinterpret_cast<const half2*>(&bits), __float2half2_rn(256.0f));
    return *reinterpret_cast<const uint32_t*>(&h);
#endif
}
// Bytes kWhich of x, to which 128 was added: they are put into the mantissas of the halves 1024 + byte, and 1152 is
// subtracted.
template <uint32_t kWhich> TILE_DEVICE uint32_t from_int8(uint32_t x) {
    return ptx::subtract_halves(ptx::permute_bytes(x, 0x64646464u, kWhich), 0x64806480u);
}
// Nibbles i and i + 4
template <int i>
TILE_DEVICE uint32_t from_int4(uint32_t x) {
    return (i < 2 ? x : x >> 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
}

// ---- keys: f[0], f[1] are chunk 2p of tokens 0 … 7 and 8 … 15, f[2], f[3] chunk 2p + 1; s: the step of the pair -----
template <Format kFormat> TILE_DEVICE void key_step(uint32_t (&a)[4], const uint32_t (&f)[4], int s) {
    if constexpr (kFormat == Format::bits16) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = f[i];
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {  // tokens 8h + lane / 4
            if constexpr (kFormat == Format::fp8) {
                a[h] = from_fp8<false>(f[2 * s + h]);
                a[2 + h] = from_fp8<true>(f[2 * s + h]);
            } else if constexpr (kFormat == Format::int8) {
                const uint32_t x = f[2 * s + h] ^ 0x80808080u;
                a[h] = from_int8<0x4140>(x);
                a[2 + h] = from_int8<0x4342>(x);
            } else {
                const uint32_t x = f[s / 2 * 2 + h];
                a[h] = s % 2 ? from_int4<2>(x) : from_int4<0>(x);
                a[2 + h] = s % 2 ? from_int4<3>(x) : from_int4<1>(x);
            }
        }
    }
}
// The channels that a lane's register r = 0 or 1 of Q holds in step s: query_channel and the one query_next after it;
// and query_factor, which they are multiplied with so that all of S comes out in units of 1 / key_unit.
template <Format kFormat> TILE_DEVICE int query_channel(int s, int r, int lane) {
    const int t = lane % 4;
    if constexpr (kFormat == Format::bits16) return 16 * s + 8 * r + 2 * t;
    else if constexpr (kFormat == Format::int4) return s / 2 * 32 + 8 * t + s % 2 * 2 + r;
    else return 16 * s + 4 * t + 2 * r;
}
template <Format kFormat> constexpr int query_next() { return kFormat == Format::int4 ? 4 : 1; }
template <Format kFormat>
constexpr float query_factor(int r) {
    return kFormat == Format::int4 && r == 1 ? 0.0625f : 1.0f;
}

// ---- values: step s is an output tile of sixteen channels; f: what value_row and value_chunk address ----------------
template <Format kFormat>
TILE_DEVICE int value_row(int lane) {
    return lane % 8 + (kFormat == Format::bits16 ? lane / 16 : lane / 8 % 2) * 8;
}
template <Format kFormat>
TILE_DEVICE int value_chunk(int lane) {
    return kFormat == Format::bits16 ? lane / 8 % 2 : lane / 16;
}
template <Format kFormat> TILE_DEVICE void value_step(uint32_t (&a)[4], const uint32_t (&f)[4], int s) {
    if constexpr (kFormat == Format::bits16) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = f[i];
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {  // tokens 8h …
            if constexpr (kFormat == Format::fp8) {
                const uint32_t x = ptx::permute_bytes(f[2 * s + h], 0, 0x3120);
                a[2 * h] = from_fp8<false>(x);
                a[2 * h + 1] = from_fp8<true>(x);
            } else if constexpr (kFormat == Format::int8) {
                const uint32_t x = f[2 * s + h] ^ 0x80808080u;
                a[2 * h] = from_int8<0x4240>(x);
                a[2 * h + 1] = from_int8<0x4341>(x);
            } else {
                const uint32_t x = f[s / 2 * 2 + h];
                a[2 * h] = s % 2 ? from_int4<2>(x) : from_int4<0>(x);
                a[2 * h + 1] = s % 2 ? from_int4<3>(x) : from_int4<1>(x);
            }
        }
    }
}
// The channel of row lane / 4 of output tile n, or if `upper` of row lane / 4 + 8
template <Format kFormat> TILE_DEVICE int output_channel(int n, bool upper, int lane) {
    const int g = lane / 4;
    if constexpr (kFormat == Format::bits16) return 16 * n + g + 8 * upper;
    else if constexpr (kFormat == Format::int4 || kFormat == Format::bits32)
        return n / 2 * 32 + 4 * g + n % 2 * 2 + upper;
    else return 16 * n + 2 * g + upper;
}

}  // namespace quant
