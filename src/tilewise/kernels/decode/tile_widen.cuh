// Quantised tiles on their way to the warpgroups: TMA brings codes as they are stored into a ring of their own, three
// warps widen them to halves in the tiles that wgmma reads, and leave beside each tile what its tokens are multiplied
// with (tile_factors.cuh).
//
// Why so, for 64 sequences that share 8192 tokens and have 256 of their own (int8, 8 KV heads, D 128, 132
// multiprocessors): the node is 17 MB and the own tokens 35 MB, 12 µs together. A multiprocessor has 15.5 steps of 64
// tokens and 128 rows. Of its cycles, a step takes 983 of the tensor cores; 512 for exponentials; 1000 of shared memory
// (codes in and out, halves in, and twice out to two warpgroups), 250 more for the streams beside. To widen 16384 codes
// takes about 24 instructions for each sixteen, and the three warps that do it have a scheduler each: 260 issue slots
// of it per step. They are bound by latency, not by slots: a chain from load to store takes 60 cycles and more, beside
// warps that multiply. So each has four or eight of them on its way, to places that are found by one exclusive or.
//
// With the codes as a product's A operand, widened in registers and multiplied by Qᵀ, codes would be read once, but P
// would have to go through shared memory: as many bytes, and a meeting of the warpgroups in each step. Widened by the
// warpgroups themselves, each would do it for itself. Four more warps for it would leave 96 registers to the streams.
#pragma once
#include "decode/tile_scales.cuh"
#include "tile/ptx_halves.cuh"

using TileRing = Ring<kTileStages>;
TILE_DEVICE TileRing tile_ring() { return TileRing(ptx::shared_address(uint32_t(kAtTileBarriers))); }
// Quantised keys and values have a ring each, so that two stages are enough: keys are widened for the next tile while
// the values of the last one are still multiplied. The factors of both come and go with the keys.
TILE_DEVICE TileRing value_ring() {
    return TileRing(ptx::shared_address(uint32_t(kAtTileBarriers + (kScaled ? TileRing::kBytes : 0))));
}
using RawRing = Ring<kRawStages>;
TILE_DEVICE RawRing raw_ring() { return RawRing(ptx::shared_address(uint32_t(kAtRawBarriers))); }
constexpr int kRawTileBytes = kTileTokens * kRowBytes;  // of K, and as many of V
TILE_DEVICE uint32_t raw_codes(uint32_t stage, int is_v) { return kAtRaw + (2 * stage + is_v) * kRawTileBytes; }

constexpr int kWideners = 96;  // threads
constexpr int kWidenBarrier = 5;

// Eight codes of int4 as halves. Keys stand in the order 0 4 1 5 2 6 3 7, which Q's follow. scales: the token's, twice
//
// A code in the low bits of a half is 1024 + code; four bits further up it is 1024 + 16 code, and the multiplication
// that brings it down takes no more than the subtraction it comes with.
constexpr uint32_t kThousands = 0x64006400u;
template <bool kValues> TILE_DEVICE Vector16 widen_codes(uint32_t from, uint32_t scales, uint32_t thousands) {
    constexpr uint32_t kLow = kValues ? kThousands : 0x64086408u;  // 1024; 1032
    constexpr uint32_t kHigh = kValues ? 0xd400d400u : 0xd480d480u, kSixteenth = 0x2c002c00u;  // −64; −72
    Vector16 to;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t pairs = from >> 4 * i;
        const uint32_t low = (pairs & 0x000f000fu) | thousands, high = (pairs & 0x00f000f0u) | thousands;
        to.word[i] = ptx::multiply_halves(ptx::subtract_halves(low, kLow), scales);
        to.word[i + 1] = ptx::multiply_halves(ptx::mad_halves(high, kSixteenth, kHigh), scales);
    }
    if constexpr (kValues) {
        const uint32_t a = to.word[0], b = to.word[1], c = to.word[2], d = to.word[3];
        to = {{ptx::permute_bytes(a, b, 0x5410), ptx::permute_bytes(c, d, 0x5410), ptx::permute_bytes(a, b, 0x7632),
               ptx::permute_bytes(c, d, 0x7632)}};
    }
    return to;
}
// Of fp8 and int8, whose scales are left to S and P
template <bool> TILE_DEVICE Vector16 widen_codes(const Vector8& from, uint32_t, uint32_t) {
    uint32_t x = from.word[0], y = from.word[1];
    if constexpr (kFormat == Format::fp8) {
        return {{quant::from_fp8<false>(x), quant::from_fp8<true>(x), quant::from_fp8<false>(y),
                 quant::from_fp8<true>(y)}};
    } else {
        x ^= 0x80808080u;
        y ^= 0x80808080u;
        return {{quant::from_int8<0x4140>(x), quant::from_int8<0x4342>(x), quant::from_int8<0x4140>(y),
                 quant::from_int8<0x4342>(y)}};
    }
}

// Which eights of channels a lane widens: of eight tokens kWidenLoads, 32 eights apart. So the loads of a warp are of
// neighbouring bytes, and neither they nor the stores meet in a bank.
constexpr int kTokenEights = kHeadDim / 8, kWidenLoads = kHeadDim / 32, kWidenBlocks = kTileTokens / 8;
TILE_DEVICE int widen_token(int lane, int j) {
    if constexpr (32 % kTokenEights == 0) return lane / kTokenEights + j * (32 / kTokenEights);
    else return (lane + 32 * j) / kTokenEights;
}
TILE_DEVICE int widen_eight(int lane, int j) {
    if constexpr (32 % kTokenEights == 0) return lane % kTokenEights;
    else return (lane + 32 * j) % kTokenEights;
}
// Eights of tokens at once, for which registers have room. The streaming warps need those that would hold two of int4.
constexpr int kAtOnce = kHeadDim == 96 || (kZeros && kHeadDim > 64) ? 1 : 2;
template <bool kWords> struct CodesOf { using Type = Vector8; };
template <> struct CodesOf<true> { using Type = uint32_t; };
using EightCodes = CodesOf<kZeros>::Type;

// Where a lane's eights stand in a tile, of the first eight tokens. Where a load is of whole rows, the token of each
// next one differs in the same bits of the swizzle, so that one place is enough.
template <class Place> struct LaneEights {
    static constexpr bool kWhole = 32 % kTokenEights == 0;
    uint32_t at[kWhole ? 1 : kWidenLoads];
    TILE_DEVICE LaneEights(int lane, Place place) {
#pragma unroll
        for (int j = 0; j < (kWhole ? 1 : kWidenLoads); j++) at[j] = place(widen_token(lane, j), widen_eight(lane, j));
    }
    TILE_DEVICE uint32_t operator[](int j) const {
        constexpr int kTokens = kWhole ? 32 / kTokenEights : 0;
        if constexpr (kWhole) return (at[0] ^ j * kTokens * 16) + j * kTokens * kPanelRowBytes;
        else return at[j];
    }
};

// Widens K or V of a tile from raw codes to where wgmma reads them: each warp takes every third eight of its tokens.
// The loads of kAtOnce of them come before their first store, since no load passes a store, and before their first
// conversion: a warp is alone with the latency of each step, so that it needs many eights of channels on the way.
// Values outside the span become zeros: memory there may hold anything, and 0 · NaN is NaN. place(token, eight): where
// eight channels of a token stand
template <bool kValues, class Place>
TILE_DEVICE void widen_tile(int from, uint32_t raw_stage, const TileFactors& factors, int first_token, Span span,
                            uint32_t thousands, Place place) {
    constexpr int kApart = kWideners / 32, kMost = (kWidenBlocks + kApart - 1) / kApart;
    const int lane = ptx::just_in_time(threadIdx.x) & 31;  // places are found anew: kept, they would take registers
    const uint32_t codes_at =
        raw_codes(raw_stage, kValues) + from * 8 * kRowBytes + lane * uint32_t(sizeof(EightCodes));
    // int4 (whose rows a load has whole): the scale of a lane's first token, and how many words the next one is from it
    constexpr int kScaleStep = 4 * kGroups, kEach = 32 / kTokenEights * kGroups;
    const uint32_t scales_at = factors.scales_at(kValues * kTileTokens + from * 8 + widen_token(lane, 0)) +
                               widen_eight(lane, 0) * 8 / kGroupSize * 4;
    const LaneEights<Place> to(lane, place);
    const uint32_t step = place(8, 0) - place(0, 0);
#pragma unroll
    for (int first = 0; first < kMost; first += kAtOnce) {
        EightCodes codes[kAtOnce][kWidenLoads];
        uint32_t scales[kAtOnce][kWidenLoads] = {};
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) {
            const int block = (first + n) * kApart;  // from here on
            if (first + n >= kMost || from + block >= kWidenBlocks) break;
#pragma unroll
            for (int j = 0; j < kWidenLoads; j++) {
                codes[n][j] = Shared<EightCodes>(codes_at + block * 8 * kRowBytes)[32 * j];
                if constexpr (kZeros) scales[n][j] = Shared<uint32_t>(scales_at + 8 * block * kScaleStep)[j * kEach];
            }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; n++) {
            const int block = (first + n) * kApart;
            if (first + n >= kMost || from + block >= kWidenBlocks) break;
#pragma unroll
            for (int j = 0; j < kWidenLoads; j++)
                Shared<Vector16>(to[j] + (from + block) * step)[0] =
                    widen_codes<kValues>(codes[n][j], scales[n][j], thousands);
        }
    }
    if (kValues && (first_token < span.begin || first_token + kTileTokens > span.end)) {
#pragma unroll 1
        for (int n = from * kWidenLoads * 32 + lane; n < kTileTokens * kTokenEights;) {
            const int token = n / kTokenEights;
            if (first_token + token < span.begin || first_token + token >= span.end)
                Shared<Vector16>(place(token, n % kTokenEights))[0] = Vector16{};
            n += 32;
            if (n / 32 % kWidenLoads == 0) n += (kWideners / 32 - 1) * kWidenLoads * 32;
        }
    }
    ptx::fence_async_proxy();
    ptx::sync_warp();
}

// Three warps. place(stage, is_v, token, eight): where eight channels of a token stand in a tile
template <class Item, class Place> TILE_DEVICE void widen_tiles(const DecodeArgs& args, Item item_of, Place place) {
    const TileRing keys = tile_ring(), values = value_ring();
    const RawRing raw = raw_ring();
    Turn<kTileStages> to;
    Turn<kRawStages> from;
    const int rank = ptx::uniform(threadIdx.x / 32 % 4 - 1);
    // Not a constant to the compiler, which would split an instruction that both masks and merges into two
    const uint32_t thousands = kThousands + uint32_t(args.tile_rounds >> 31);
    for (int round = 0; round < args.tile_rounds; round++) {
        const DecodeItem item = item_of(args, round);
        const Span span{item.start, item.stop};
        if (item.rows == 0) break;  // no item follows an empty one
        if (span.end <= span.begin) continue;
        for (int tile = span.begin / kTileTokens; tile * kTileTokens < span.end; tile++, to.next(), from.next()) {
            const TileFactors factors(to.stage);
            const int first = tile * kTileTokens;
            raw.wait(from);
            keys.wait_free(to);
            if (rank < 2) put_factors(factors, from.stage, rank, first, span);
            if constexpr (kZeros) ptx::barrier_sync(kWidenBarrier, kWideners);
            // Two of three warps have three blocks of the keys, and of the values: the one without factors both times
            widen_tile<false>((rank + 1) % 3, from.stage, factors, first, span, thousands,
                              [&](int token, int eight) { return place(to.stage, false, token, eight); });
            if (ptx::elect_one()) ptx::mbarrier_arrive(keys.full_at(to));
            values.wait_free(to);
            widen_tile<true>(2 - rank, from.stage, factors, first, span, thousands,
                             [&](int token, int eight) { return place(to.stage, true, token, eight); });
            if (ptx::elect_one()) ptx::mbarrier_arrive(values.full_at(to));
            raw.release(from);
        }
    }
}
