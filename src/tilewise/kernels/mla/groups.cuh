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
    Places now;          // of the block that comes next
    uint32_t block = 0;  // its number in the life of the thread block

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
