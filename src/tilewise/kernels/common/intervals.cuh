// Interval arithmetic: what a value of a user's function can be over a block of queries × keys.
//
// An interval may be wider than what the values do, never narrower: an int that may leave 32 bits can be any int, since
// it wraps, and a float that may be NaN is unbounded, (−∞, ∞), from which comes nothing but itself. The rules are those
// of tilewise/functions/intervals.py, one by one.
#pragma once
#include "tile/memory.cuh"

// In doubles, which hold every int and every float; a bool is 0 or 1.
struct Interval {
    double low, high;
};

namespace interval {

constexpr int kMostEntries = 256;  // of a tensor that are looked at one by one
constexpr double kSlack = 1.0 / (1 << 20);  // what exp and its like may be off by, of themselves and of 1
constexpr Interval kAnyInt = {-2147483648.0, 2147483647.0}, kAnyBool = {0.0, 1.0};

TILE_DEVICE double least(double a, double b) { return a < b ? a : b; }
TILE_DEVICE double greatest(double a, double b) { return a > b ? a : b; }
TILE_DEVICE bool is_nan(double x) { return x != x; }
TILE_DEVICE Interval only(double x) { return {x, x}; }
TILE_DEVICE Interval any_float() { return {-INFINITY, INFINITY}; }
TILE_DEVICE bool unbounded(Interval x) { return x.low == -INFINITY && x.high == INFINITY; }
TILE_DEVICE Interval truth(bool sure, bool possible) { return {sure ? 1.0 : 0.0, possible ? 1.0 : 0.0}; }
TILE_DEVICE Interval number(float x) { return is_nan(x) ? any_float() : only(x); }
TILE_DEVICE Interval number(int x) { return only(x); }

// A result of ints: what is left of one that may have wrapped. A result of floats: rounded to a float, which keeps
// order; unbounded if it may be NaN, or if an operand may have been.
template <class T> TILE_DEVICE Interval fit(Interval x, bool unknown);
template <> TILE_DEVICE Interval fit<int>(Interval x, bool) {
    return x.low >= kAnyInt.low && x.high <= kAnyInt.high ? x : kAnyInt;
}
template <> TILE_DEVICE Interval fit<float>(Interval x, bool unknown) {
    if (unknown || is_nan(x.low) || is_nan(x.high)) return any_float();
    return {double(float(x.low)), double(float(x.high))};
}
template <class T> TILE_DEVICE Interval fit(Interval x, Interval a) { return fit<T>(x, unbounded(a)); }
template <class T> TILE_DEVICE Interval fit(Interval x, Interval a, Interval b) {
    return fit<T>(x, unbounded(a) || unbounded(b));
}
// The least and the largest of four; NaN if one of them is
TILE_DEVICE Interval hull(double a, double b, double c, double d) {
    const double sum = a + b + c + d;  // NaN too if opposite infinities meet, which bound nothing
    if (is_nan(sum)) return only(sum);
    return {least(least(a, b), least(c, d)), greatest(greatest(a, b), greatest(c, d))};
}

// ---- ints and floats alike ------------------------------------------------------------------------------------------
template <class T> TILE_DEVICE Interval add(Interval a, Interval b) {
    return fit<T>({a.low + b.low, a.high + b.high}, a, b);
}
template <class T> TILE_DEVICE Interval sub(Interval a, Interval b) {
    return fit<T>({a.low - b.high, a.high - b.low}, a, b);
}
template <class T> TILE_DEVICE Interval mul(Interval a, Interval b) {
    return fit<T>(hull(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high), a, b);
}
TILE_DEVICE Interval magnitude(Interval a) {
    return {greatest(0.0, greatest(a.low, -a.high)), greatest(-a.low, a.high)};
}
template <class T> TILE_DEVICE Interval square(Interval a) {
    const Interval m = magnitude(a);
    return fit<T>({m.low * m.low, m.high * m.high}, a);
}
template <class T> TILE_DEVICE Interval min(Interval a, Interval b) {
    return fit<T>({least(a.low, b.low), least(a.high, b.high)}, a, b);
}
template <class T> TILE_DEVICE Interval max(Interval a, Interval b) {
    return fit<T>({greatest(a.low, b.low), greatest(a.high, b.high)}, a, b);
}
template <class T> TILE_DEVICE Interval neg(Interval a) { return fit<T>({-a.high, -a.low}, a); }
template <class T> TILE_DEVICE Interval abs(Interval a) { return fit<T>(magnitude(a), a); }

// ---- ints -----------------------------------------------------------------------------------------------------------
TILE_DEVICE bool sign_known(Interval a) { return a.low > 0 || a.high < 0; }
TILE_DEVICE double quotient(double a, double b) { return ::floor(a / b); }
TILE_DEVICE Interval floordiv(Interval a, Interval b) {
    if (!sign_known(b)) return kAnyInt;
    const double first = quotient(a.low, b.low), last = quotient(a.high, b.high);
    return fit<int>(hull(first, quotient(a.low, b.high), quotient(a.high, b.low), last), a);
}
TILE_DEVICE Interval mod(Interval a, Interval b) {
    if (!sign_known(b)) return kAnyInt;
    if (b.low == b.high) {
        const double times = quotient(a.low, b.low);
        if (times == quotient(a.high, b.low)) return {a.low - times * b.low, a.high - times * b.low};
    }
    if (b.high < 0) return {b.low + 1, 0.0};
    if (a.low < 0) return {0.0, b.high - 1};
    return a.high < b.low ? a : Interval{0.0, least(a.high, b.high - 1)};
}
// The largest number with as many bits as x ≥ 0
TILE_DEVICE double bits_below(double x) { return ::exp2(::ceil(::log2(x + 1))) - 1; }
TILE_DEVICE Interval bits_and(Interval a, Interval b) {
    if (a.low < 0 && b.low < 0) return kAnyInt;
    return {0.0, a.low < 0 ? b.high : b.low < 0 ? a.high : least(a.high, b.high)};
}
TILE_DEVICE Interval bits_or(Interval a, Interval b) {
    if (a.low < 0 || b.low < 0) return kAnyInt;
    return {greatest(a.low, b.low), bits_below(greatest(a.high, b.high))};
}
TILE_DEVICE Interval bits_xor(Interval a, Interval b) {
    return a.low < 0 || b.low < 0 ? kAnyInt : Interval{0.0, bits_below(greatest(a.high, b.high))};
}
TILE_DEVICE Interval bits_not(Interval a) { return {-a.high - 1, -a.low - 1}; }
TILE_DEVICE Interval shift_left(Interval a, Interval b) {
    if (b.low < 0 || b.high > 31) return kAnyInt;
    const double low = ::exp2(b.low), high = ::exp2(b.high);
    return fit<int>(hull(a.low * low, a.low * high, a.high * low, a.high * high), a);
}
TILE_DEVICE Interval shift_right(Interval a, Interval b) {
    if (b.low < 0 || b.high > 31) return kAnyInt;
    const double low = ::exp2(b.low), high = ::exp2(b.high);
    return hull(quotient(a.low, low), quotient(a.low, high), quotient(a.high, low), quotient(a.high, high));
}

// ---- floats ---------------------------------------------------------------------------------------------------------
TILE_DEVICE Interval div(Interval a, Interval b) {
    if (!sign_known(b)) return any_float();
    return fit<float>(hull(a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high), a, b);
}
TILE_DEVICE Interval sqrt(Interval a) { return fit<float>({::sqrt(a.low), ::sqrt(a.high)}, a); }
TILE_DEVICE Interval rsqrt(Interval a) {
    if (!(a.low > 0)) return any_float();
    return fit<float>({(1 - kSlack) / ::sqrt(a.high), (1 + kSlack) / ::sqrt(a.low)}, a);
}
TILE_DEVICE Interval floor(Interval a) { return fit<float>({::floor(a.low), ::floor(a.high)}, a); }
TILE_DEVICE Interval ceil(Interval a) { return fit<float>({::ceil(a.low), ::ceil(a.high)}, a); }
TILE_DEVICE Interval trunc(Interval a) { return fit<float>({::trunc(a.low), ::trunc(a.high)}, a); }
TILE_DEVICE Interval round(Interval a) { return fit<float>({::rint(a.low), ::rint(a.high)}, a); }
// Of a function that never falls, and that every backend rounds as it likes: its values at both ends
TILE_DEVICE Interval rising(double low, double high, Interval a) {
    return fit<float>({low - kSlack * (fabs(low) + 1), high + kSlack * (fabs(high) + 1)}, a);
}
TILE_DEVICE Interval exp(Interval a) { return rising(::exp(a.low), ::exp(a.high), a); }
TILE_DEVICE Interval exp2(Interval a) { return rising(::exp2(a.low), ::exp2(a.high), a); }
TILE_DEVICE Interval log(Interval a) { return rising(::log(a.low), ::log(a.high), a); }
TILE_DEVICE Interval log2(Interval a) { return rising(::log2(a.low), ::log2(a.high), a); }
TILE_DEVICE Interval tanh(Interval a) { return rising(::tanh(a.low), ::tanh(a.high), a); }
TILE_DEVICE Interval sigmoid(Interval a) { return rising(1 / (1 + ::exp(-a.low)), 1 / (1 + ::exp(-a.high)), a); }
TILE_DEVICE Interval wave(Interval a) {  // sin, cos: NaN of infinities
    return fit<float>({-1 - kSlack + 0.0 * a.low, 1 + kSlack + 0.0 * a.high}, a);
}

// ---- truth ----------------------------------------------------------------------------------------------------------
TILE_DEVICE Interval compared(Interval a, Interval b, bool sure, bool possible) {
    return unbounded(a) || unbounded(b) ? kAnyBool : truth(sure, possible);
}
TILE_DEVICE Interval lt(Interval a, Interval b) { return compared(a, b, a.high < b.low, a.low < b.high); }
TILE_DEVICE Interval le(Interval a, Interval b) { return compared(a, b, a.high <= b.low, a.low <= b.high); }
TILE_DEVICE Interval gt(Interval a, Interval b) { return lt(b, a); }
TILE_DEVICE Interval ge(Interval a, Interval b) { return le(b, a); }
TILE_DEVICE Interval opposite(Interval a) { return {1 - a.high, 1 - a.low}; }
TILE_DEVICE Interval eq(Interval a, Interval b) {
    return compared(a, b, a.low == a.high && b.low == b.high && a.low == b.low, a.low <= b.high && b.low <= a.high);
}
TILE_DEVICE Interval ne(Interval a, Interval b) { return opposite(eq(a, b)); }
TILE_DEVICE Interval both(Interval a, Interval b) { return {least(a.low, b.low), least(a.high, b.high)}; }
TILE_DEVICE Interval either(Interval a, Interval b) { return {greatest(a.low, b.low), greatest(a.high, b.high)}; }
TILE_DEVICE Interval exclusive(Interval a, Interval b) {
    return a.low == a.high && b.low == b.high ? only(a.low != b.low) : kAnyBool;
}
TILE_DEVICE Interval where(Interval condition, Interval a, Interval b) {
    if (condition.low > 0) return a;
    return condition.high == 0 ? b : Interval{least(a.low, b.low), greatest(a.high, b.high)};
}
TILE_DEVICE Interval to_bool(Interval a) { return opposite(eq(a, only(0.0))); }
TILE_DEVICE Interval to_int(Interval a) { return fit<int>({::trunc(a.low), ::trunc(a.high)}, a); }
TILE_DEVICE Interval to_float(Interval a) { return fit<float>(a, a); }

// ---- captured tensors -----------------------------------------------------------------------------------------------
struct Axis {
    Interval index;
    int size;
    int64_t stride;
};

TILE_DEVICE double value_of(float x) { return x; }
TILE_DEVICE double value_of(half x) { return ::to_float(x); }
TILE_DEVICE double value_of(bf16 x) { return ::to_float(x); }
TILE_DEVICE double value_of(double x) { return double(float(x)); }
TILE_DEVICE double value_of(uint8_t x) { return x; }
TILE_DEVICE double value_of(int8_t x) { return x; }
TILE_DEVICE double value_of(short x) { return x; }
TILE_DEVICE double value_of(int x) { return x; }
TILE_DEVICE double value_of(int64_t x) { return double(x); }

// What the entries of a tensor can be, whatever it holds
template <class T> TILE_DEVICE Interval any_entry() { return kAnyInt; }
template <> TILE_DEVICE Interval any_entry<float>() { return any_float(); }
template <> TILE_DEVICE Interval any_entry<half>() { return any_float(); }
template <> TILE_DEVICE Interval any_entry<bf16>() { return any_float(); }
template <> TILE_DEVICE Interval any_entry<double>() { return any_float(); }
template <> TILE_DEVICE Interval any_entry<uint8_t>() { return {0.0, 255.0}; }
template <> TILE_DEVICE Interval any_entry<int8_t>() { return {-128.0, 127.0}; }
template <> TILE_DEVICE Interval any_entry<short>() { return {-32768.0, 32767.0}; }

template <class T> TILE_DEVICE void join(T entry, Interval& found, bool& nan) {
    const double x = value_of(entry);
    nan = nan || is_nan(x);
    found = {least(found.low, x), greatest(found.high, x)};
}
// Neighbours go 16 bytes at a time: lanes that ask of different blocks read far apart, and pay per access.
template <class T> TILE_DEVICE void scan(const T* from, int count, int stride, Interval& found, bool& nan) {
    constexpr int kEach = 16 / sizeof(T);
    int i = 0;
    if (stride == 1 && reinterpret_cast<uint64_t>(from) % 16 == 0) {
#pragma unroll 4
        for (; i + kEach <= count; i += kEach) {
            const Vector16 entries = Global<const T>{from + i}.template as<const Vector16>()[0];
#pragma unroll
            for (int j = 0; j < kEach; j++) join(reinterpret_cast<const T*>(&entries)[j], found, nan);
        }
    }
    for (; i < count; i++) join(T(Global<const T>{from}[int64_t(i) * stride]), found, nan);
}

// The least and the largest of the entries that the indices reach: looked at one by one if they are few
template <class T, int kDims> TILE_DEVICE Interval reach(const T* values, const Axis (&axes)[kDims]) {
    int first[kDims], count[kDims];
    int64_t entries = 1;
#pragma unroll
    for (int d = 0; d < kDims; d++) {
        const double last = axes[d].size - 1;
        first[d] = int(least(greatest(axes[d].index.low, 0.0), last));
        count[d] = int(least(greatest(axes[d].index.high, 0.0), last)) - first[d] + 1;
        entries = entries > kMostEntries ? entries : entries * count[d];
    }
    if (entries > kMostEntries) return any_entry<T>();
    Interval found = {INFINITY, -INFINITY};
    bool nan = false;
    const int inner = count[kDims - 1], stride = axes[kDims - 1].stride;
    for (int outer = 0; outer < int(entries) / inner; outer++) {
        int64_t offset = int64_t(first[kDims - 1]) * stride;
        int rest = outer;
#pragma unroll
        for (int d = kDims - 2; d >= 0; d--) {
            offset += int64_t(first[d] + rest % count[d]) * axes[d].stride;
            rest /= count[d];
        }
        scan(values + offset, inner, stride, found, nan);
    }
    const bool wraps = any_entry<T>().low == kAnyInt.low && (found.low < kAnyInt.low || found.high > kAnyInt.high);
    return nan || wraps ? any_entry<T>() : found;
}
// A tensor of bools, kept as bytes
template <int kDims> TILE_DEVICE Interval reach_bool(const uint8_t* values, const Axis (&axes)[kDims]) {
    const Interval found = reach(values, axes);
    return truth(found.low > 0, found.high > 0);
}

}  // namespace interval
