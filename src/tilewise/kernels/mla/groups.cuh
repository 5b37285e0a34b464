// What the two warpgroups of a block on Hopper have in common, whatever the form of their products: barriers of their
// own, and the ring.
#pragma once
#include "mla/load.cuh"
#include "mla/walk.cuh"

struct Warpgroup {
    const uint32_t group;  // of the two

    static TILE_DEVICE int warp_rank() { return ptx::just_in_time(threadIdx.x) >> 5 & 3; }  // in the warpgroup
    // How many of the warpgroup's threads come with x
    TILE_DEVICE int group_count(bool x) const { return ptx::barrier_count(kGroupBarriers + group, 128, x); }
    TILE_DEVICE void group_sync() const { ptx::barrier_sync(kGroupBarriers + group, 128); }
};

struct Grouped : Warpgroup, Walk {
    uint32_t block = 0;  // the number, in the life of the thread block, of the block that comes next

    TILE_DEVICE Grouped(const DecodeArgs& a, const MlaArgs& m, uint32_t g) : Warpgroup{g}, Walk(a, m) {}
    // Zeroes the values of tokens outside the span: memory there may hold anything, and 0 · NaN is NaN.
    TILE_DEVICE void clear_outside(const Places& of, int first_token, Span span) const {
        if (first_token >= span.begin && first_token + kKeys <= span.end) return;
        for (int n = ptx::just_in_time(threadIdx.x) % 128; n < kKeys * 8 * kValuePanels; n += 128) {
            const int row = n / 8 % kKeys, token = first_token + row;
            if (token < span.begin || token >= span.end)
                Shared<Vector16>(of.at(n / 8 / kKeys) + row * kPanelRowBytes)[n % 8] = Vector16{};
        }
    }
};

// Adds the blocks of a piece to O, m and l, for both bodies. Blocks take turns, counted from the piece's first: a
// warpgroup computes the scores and the weights of every other block, and both multiply them with the values, each with
// one half of the channels. What a warpgroup does for a block of its own, number n:
//
//   S of n, the first kAhead panels | O += P V of n − 1 | S of n, the others | softmax | O += P V of n
//
// While one warpgroup is at its softmax, the tensor cores have the other's first panels of S; then both multiply at
// once, and panels are free again. The more panels come first, the less the tensor cores wait, and the longer the block
// before stays in the ring if those panels are late: docs/inside/mla.md has the arithmetic.
template <class Body> TILE_DEVICE void seesaw(Body& body, int begin, int end, Span span) {
    if (begin == end) return;
    const uint32_t group = body.group;
    uint32_t number = body.block + group;
#pragma unroll 1
    for (int n = begin + int(group); n < end; n += 2, number += 2) {
        const Places before = Places::of(number - 1), here = Places::of(number);
        typename Body::Scores acc_s;
        body.template add_scores<0, kAhead>(acc_s, here);
        if (ptx::any(n > begin)) body.multiply_other(before, number - 1);
        body.template add_scores<kAhead, kPanels>(acc_s, here);
        body.weigh(acc_s, here, number, n * kKeys, span, n == begin);
        body.multiply_own(here, number);
    }
    // Is the block after the last one of this warpgroup the other's last one? If not, it is the next piece's first.
    const bool more = ptx::any(((end - begin - 1) & 1) != int(group));
    if (more) body.multiply_other(Places::of(number - 1), number - 1);
    body.block += end - begin;
}
