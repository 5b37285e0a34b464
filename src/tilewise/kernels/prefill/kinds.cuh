// How much of a rectangle of query rows and keys a user's mask shows: nothing, some or all of it.
#pragma once
#include "prefill/work.cuh"

enum Kind { kNone = 0, kSome = 1, kAll = 2 };

// Rows and keys, all of them inclusive; of heads and sequences whatever share the answer
struct Rectangle {
    Interval sequence, head;
    int q0, q1, k0, k1;
};

// By interval arithmetic: kNone and kAll are certain, kSome may be any of the three. Each lane may ask of another
// rectangle.
TILE_DEVICE Kind kind_by_intervals(const Function& function, const Rectangle& of) {
    const Interval seen = function.seen(of.sequence, of.head, {double(of.q0), double(of.q1)},
                                        {double(of.k0), double(of.k1)});
    return seen.high <= 0.0 ? kNone : seen.low >= 1.0 ? kAll : kSome;
}

// The truth, which a warp finds together for one rectangle: by intervals over squares of kSide, then element by element
// in the squares that these cannot tell. It ends as soon as something was seen and something was not.
TILE_DEVICE Kind look_closer(const Function& function, const Rectangle& of) {
    constexpr int kSide = 16;
    const int across = (of.k1 - of.k0) / kSide + 1, squares = ((of.q1 - of.q0) / kSide + 1) * across;
    const int lane = threadIdx.x % 32;
    auto square = [&](int n) {
        Rectangle part = of;
        part.q0 += n / across * kSide;
        part.k0 += n % across * kSide;
        part.q1 = part.q0 + kSide - 1 < of.q1 ? part.q0 + kSide - 1 : of.q1;
        part.k1 = part.k0 + kSide - 1 < of.k1 ? part.k0 + kSide - 1 : of.k1;
        return part;
    };
    bool seen = false, hidden = false;
    for (int base = 0; base < squares; base += 32) {
        const bool there = base + lane < squares;
        const Kind kind = there ? kind_by_intervals(function, square(base + lane)) : kSome;
        seen = seen || ptx::any(there && kind == kAll);
        hidden = hidden || ptx::any(there && kind == kNone);
        uint32_t open = ptx::ballot(there && kind == kSome);
        for (int bit = 0; open && !(seen && hidden); bit++, open >>= 1) {
            if (!(open & 1)) continue;
            const Rectangle part = square(base + bit);
            const int rows = part.q1 - part.q0 + 1, keys = part.k1 - part.k0 + 1;
            bool some = false, some_not = false;
            for (int i = lane; i < rows * keys; i += 32) {
                const int q = part.q0 + i / keys, k = part.k0 + i % keys;
                for (int b = int(of.sequence.low); b <= int(of.sequence.high); b++)
                    for (int h = int(of.head.low); h <= int(of.head.high); h++)
                        if (function.mask(b, h, q, k, float(q), float(k), q, 0, k, 0)) some = true;
                        else some_not = true;
            }
            seen = seen || ptx::any(some);
            hidden = hidden || ptx::any(some_not);
        }
        if (seen && hidden) return kSome;
    }
    return seen ? kAll : kNone;
}

// Shared memory that kind_of takes: per thread where a rectangle begins and ends, which becomes its kind, and counts of
// warps.
constexpr int kKindThreads = 256, kKindBytes = 4 * (2 * kKindThreads + kKindThreads / 32);

// The kind of each thread's rectangle, known for certain. A block of kKindThreads threads asks together, of rectangles
// that differ in their keys alone, and its warps share those that need a closer look. there: has it a rectangle?
TILE_DEVICE Kind kind_of(const Function& function, const Rectangle& of, bool there, uint32_t shared) {
    constexpr int kWarps = kKindThreads / 32;
    const Shared<int> begins(shared), ends(shared + 4 * kKindThreads), counts(shared + 8 * kKindThreads);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Kind kind = there ? kind_by_intervals(function, of) : kNone;
    const bool is_open = there && kind == kSome;
    const uint32_t open = ptx::ballot(is_open);
    if (lane == 0) counts[warp] = ptx::count_bits(open);
    ptx::sync_threads();
    int place = ptx::count_bits(open & ((1u << lane) - 1)), total = 0;
    for (int w = 0; w < kWarps; w++) {
        const int count = counts[w];
        total += count;
        if (w < warp) place += count;
    }
    if (is_open) {
        begins[place] = of.k0;
        ends[place] = of.k1;
    }
    ptx::sync_threads();
    for (int n = warp; n < total; n += kWarps) {
        Rectangle asked = of;
        asked.k0 = begins[n];
        asked.k1 = ends[n];
        const Kind found = look_closer(function, asked);
        ptx::sync_warp();
        if (lane == 0) ends[n] = found;
    }
    ptx::sync_threads();
    const Kind found = is_open ? Kind(int(ends[place])) : kind;
    ptx::sync_threads();  // before the next one overwrites it
    return found;
}
