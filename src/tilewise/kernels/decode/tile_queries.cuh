// Q of quantised tiles on its way to the products: as halves, through shared memory, where most of it stays.
//
// A lane has 16 bytes of a row at a time, so that a load of the warp is of whole rows. Straight into operands, a lane
// would read four bytes of a row at a time (int4's order of channels: two), from eight rows at once: 64 and 128 loads
// of eight lines each, which took 8 µs before the first product of int4.
#pragma once
#include "decode/tile_factors.cuh"

struct TileQueries {
    static constexpr int kPieces = kHeadDim / 8, kLoads = kHeadDim / 16;  // of a row; of a lane, of sixteen rows
    const int lane;  // found anew: what depends on it would else be kept in registers from item to item
    Vector16 piece[kLoads];
    TILE_DEVICE int row(int i) const { return (32 * i + lane) / kPieces; }
    TILE_DEVICE int chunk(int i) const { return (32 * i + lane) % kPieces; }

    // from: where the lane's rows of a fragment lie, lane / 4 and eight further; 0 for rows of zeros
    TILE_DEVICE explicit TileQueries(const uint64_t (&from)[2]) : lane(ptx::just_in_time(threadIdx.x) & 31) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const uint64_t at = ptx::shuffle(from[i / (kLoads / 2)], row(i) % 8 * 4);
            piece[i] = Vector16{};
            if (at == 0) continue;
            const Global<const Vector8> gQ{reinterpret_cast<const Vector8*>(at) + 2 * chunk(i)};
            const Vector8 low = gQ[0], high = gQ[1];  // rows begin at multiples of eight bytes
            piece[i] = {{low.word[0], low.word[1], high.word[0], high.word[1]}};
        }
    }
    // The warp's largest value
    TILE_DEVICE float largest() const {
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * kLoads; i++) {
            const uint32_t pair = piece[i / 4].word[i % 4];
            top = fmaxf(top, fmaxf(fabsf(unpack<Element>(pair, 0)), fabsf(unpack<Element>(pair, 1))));
        }
        return as_float(ptx::reduce_max(as_bits(top)));
    }
    // Halves of the values times a power of two; int4: in the order of widened keys, and the sums of groups
    TILE_DEVICE void make_halves(float factor) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                uint32_t& pair = piece[i].word[n];
                const float x = unpack<Element>(pair, 0) * factor, y = unpack<Element>(pair, 1) * factor;
                pair = pack<Operand>(x, y);
                sum += x + y;
            }
            if constexpr (kZeros) {
                const auto [a, b, c, d] = piece[i].word;
                piece[i] = {{ptx::permute_bytes(a, c, 0x5410), ptx::permute_bytes(a, c, 0x7632),
                             ptx::permute_bytes(b, d, 0x5410), ptx::permute_bytes(b, d, 0x7632)}};
                constexpr int kLanes = (kGroupSize < kHeadDim ? kGroupSize : kHeadDim) / 8;
#pragma unroll
                for (int mask = 1; mask < kLanes; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
                if (chunk(i) % kLanes == 0) TileRowSums::put(row(i), chunk(i) / kLanes, sum);
            }
        }
    }
    // Stores chunks kFirst … kEnd − 1 of the rows. place(row, n): where the n-th chunk from kFirst on stands
    template <int kFirst, int kEnd, class Place> TILE_DEVICE void store(Place place) const {
#pragma unroll
        for (int i = 0; i < kLoads; i++)
            if (chunk(i) >= kFirst && chunk(i) < kEnd) Shared<Vector16>(place(row(i), chunk(i) - kFirst))[0] = piece[i];
    }
};
