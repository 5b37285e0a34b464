// What printed functions of users (tilewise/functions/printing.py) call, and the function that is none.
//
// Integers wrap at 32 bits, // and % round down as Python does, floats behave as PyTorch's. Each function has
//   mask(b, h, q, k, …)             whether query q of head h in sequence b sees key k
//   score(s, scale, b, h, q, k, …)  the natural logit that becomes of s · scale
//   seen(b, h, q, k)                mask over intervals: low is 1 if all is seen, high is 0 if nothing is
// where … are fq, fk, q0, dq, k0 and dk: q and k as floats, and as sums q = q0 + dq, k = k0 + dk, in which dq and dk
// are best constants that the compiler knows. kByKey, kByRow: something is looked up by an index with k, with q.
#pragma once
#include "common/args.cuh"
#include "common/intervals.cuh"
#include "common/scores.cuh"

namespace function {

// An index inside a tensor's dimension
TILE_DEVICE int within(int i, int size) { return i < 0 ? 0 : i < size ? i : size - 1; }
template <class T> TILE_DEVICE const T* entry(const T* values, int64_t i) { return values + i; }
// A captured tensor's entry
template <class T> TILE_DEVICE int int_at(const T* values, int64_t i) { return int(T(Global<const T>{values}[i])); }
template <class T> TILE_DEVICE bool bool_at(const T* values, int64_t i) {
    return T(Global<const T>{values}[i]) != 0;
}
template <class T> TILE_DEVICE float float_at(const T* values, int64_t i) {
    return to_float(T(Global<const T>{values}[i]));
}
TILE_DEVICE float float_at(const double* values, int64_t i) {
    return float(double(Global<const double>{values}[i]));
}

// ---- integers -------------------------------------------------------------------------------------------------------
TILE_DEVICE int add(int a, int b) { return int(uint32_t(a) + uint32_t(b)); }
TILE_DEVICE int sub(int a, int b) { return int(uint32_t(a) - uint32_t(b)); }
TILE_DEVICE int mul(int a, int b) { return int(uint32_t(a) * uint32_t(b)); }
TILE_DEVICE int neg(int a) { return sub(0, a); }
TILE_DEVICE int abs(int a) { return a < 0 ? sub(0, a) : a; }
TILE_DEVICE int least(int a, int b) { return a < b ? a : b; }
TILE_DEVICE int greatest(int a, int b) { return a > b ? a : b; }
// By a number: for n < 0, n // d is ~(~n // d).
TILE_DEVICE int floordiv_positive(int n, const Divisor& d) { return d.quotient(n); }
TILE_DEVICE int floordiv(int n, const Divisor& d) { return d.quotient(n ^ n >> 31) ^ n >> 31; }
TILE_DEVICE int mod_positive(int n, const Divisor& d) { return n - d.quotient(n) * int(d.divisor); }
TILE_DEVICE int mod(int n, const Divisor& d) { return sub(n, mul(floordiv(n, d), int(d.divisor))); }
// By any integer: 0 by 0; the least integer by −1 wraps.
TILE_DEVICE int floordiv(int n, int d) {
    if (d == 0) return 0;
    return d == -1 ? sub(0, n) : n / d - (n % d != 0 && (n ^ d) < 0);
}
TILE_DEVICE int mod(int n, int d) { return sub(n, mul(floordiv(n, d), d)); }
TILE_DEVICE int shift_left(int a, int by) { return uint32_t(by) < 32 ? int(uint32_t(a) << by) : 0; }
TILE_DEVICE int shift_right(int a, int by) { return a >> (uint32_t(by) < 32 ? by : 31); }
TILE_DEVICE int power(int base, int exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? 1 - 2 * (exponent & 1) : 0;
    int result = 1;
    for (; exponent > 0; exponent >>= 1, base = mul(base, base))
        if (exponent & 1) result = mul(result, base);
    return result;
}

// ---- floats ---------------------------------------------------------------------------------------------------------
// NaN if one of them is
TILE_DEVICE float least(float a, float b) { return a < b || a != a ? a : b; }
TILE_DEVICE float greatest(float a, float b) { return a > b || a != a ? a : b; }
// The same where the limit is none
TILE_DEVICE float at_most(float a, float limit) { return limit < a ? limit : a; }
TILE_DEVICE float at_least(float a, float limit) { return limit > a ? limit : a; }
TILE_DEVICE float power(float base, float exponent) { return powf(base, exponent); }
TILE_DEVICE float mod(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest;
}
TILE_DEVICE float floordiv(float a, float b) {
    if (b == 0) return a / b;
    const float rest = fmodf(a, b);
    float quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1.0f;
    if (quotient == 0) return copysignf(0.0f, a / b);
    const float down = floorf(quotient);
    return quotient - down > 0.5f ? down + 1.0f : down;
}
// Towards 0; what is too large becomes the largest, NaN becomes 0.
TILE_DEVICE int to_int(float x) {
    if (x != x) return 0;
    return x >= 2147483648.0f ? 0x7fffffff : x <= -2147483648.0f ? -0x7fffffff - 1 : int(x);
}

}  // namespace function

struct NoFunction {
    int unused;
    static constexpr bool kMask = false, kScore = false, kByKey = false, kByRow = false, kTouches = false;
    static constexpr bool kSided = false, kLine[3] = {};
    TILE_DEVICE void touch(int, int, int, int, float, float, int, int, int, int) const {}
    TILE_DEVICE bool mask(int, int, int, int, float, float, int, int, int, int) const { return true; }
    TILE_DEVICE float score(float s, float scale, int, int, int, int, float, float, int, int, int, int) const {
        return s * scale;
    }
    TILE_DEVICE Interval seen(Interval, Interval, Interval, Interval) const { return {1.0, 1.0}; }
};
