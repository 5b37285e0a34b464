// Quantised tiles on their way to the warpgroups: TMA brings codes as they are stored into a ring of their own, three
// warps widen them to halves in the tiles that wgmma reads, and leave beside each tile what its tokens are multiplied
// with (tile_factors.cuh).
//
// Why so, for 64 sequences that share 8192 tokens and have 256 of their own (int8, 8 KV heads, D 128, 132
// multiprocessors): the node is 17 MB and the own tokens 35 MB, 12 µs together. A multiprocessor has 15.5 steps of 64
// tokens and 128 rows. Of its cycles, a step takes 983 of the tensor cores; 512 for exponentials; 1000 of shared memory
// (codes in and out, halves in, and twice out to two warpgroups), 250 more for the streams beside. To widen 16384 codes
// takes about 27 instructions for each sixteen, 860 per step: 220 issue slots of each scheduler, which three warps that
// else stand idle have time for. With the codes as a product's A operand, widened in registers and multiplied by Qᵀ,
// codes would be read once, but P would have to go through shared memory: as many bytes, and a meeting of the
// warpgroups in each step. Widened by the warpgroups themselves, each would do it for itself.
#pragma once
#include "decode/tile_factors.cuh"

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

constexpr int kWideners = 96;                // threads
constexpr int kWidenUnits = kHeadDim / 16;   // sixteens of channels per token: what a thread widens at a time
constexpr int kScaleWords = kZeros ? kGroups : 1;
constexpr int kWidenBarrier = 5;

// The scales of a tile's keys, or of its values, which one warp has: of tokens `lane` and `lane` + 32. They are asked
// for two tiles ahead, and their pages three.
struct TileScales {
    const DecodeArgs& args;
    const Span span;
    const PageTable table;
    const int is_v, kv_head, lane;
    int page[2];
    uint32_t words[2][2][kScaleWords];  // of the tile at hand and of the next; a token's scale, or int4's scales, zeros

    TILE_DEVICE TileScales(const DecodeArgs& a, const DecodeItem& item, int v, Span s)
        : args(a), span(s),
          table(page_table(a, item.table, item.kv_head(), item.tail_from)), is_v(v), kv_head(item.kv_head()),
          lane(warp::lane()) {
        const int tile = span.begin / kTileTokens;
        constexpr int kBoxTokens = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            page[i] = item.first_page((lane + 32 * i) / kBoxTokens);
            if (page[i] < 0) page[i] = look_up(tile, i);
        }
        fetch(words[0], tile);
        look_up(tile + 1);
        fetch(words[1], tile + 1);
        look_up(tile + 2);
    }
    TILE_DEVICE bool inside(int token) const { return token >= span.begin && token < span.end; }
    // Of a token outside the span no page is looked at: its number may be anything.
    TILE_DEVICE int look_up(int tile, int i) const {
        const int token = tile * kTileTokens + lane + 32 * i;
        return inside(token) ? table.page(token / kPageSize) : 0;
    }
    TILE_DEVICE void look_up(int tile) {
#pragma unroll
        for (int i = 0; i < 2; i++) page[i] = look_up(tile, i);
    }
    TILE_DEVICE const ScaleBits* place(const Paged& of, int i, int token, int group) const {
        return static_cast<const ScaleBits*>(of.base) + page[i] * of.page + token % kPageSize * of.token +
               kv_head * of.head + group * of.group;
    }
    TILE_DEVICE void fetch(uint32_t (&to)[2][kScaleWords], int tile) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int g = 0; g < kScaleWords; g++) {
                const int token = tile * kTileTokens + lane + 32 * i;
                to[i][g] = 0;
                if (!inside(token)) continue;
                to[i][g] = Global<const ScaleBits>{place(is_v ? args.v_scale : args.k_scale, i, token, g)}[0];
                if constexpr (kZeros)
                    to[i][g] |=
                        uint32_t(Global<const ScaleBits>{place(is_v ? args.v_zero : args.k_zero, i, token, g)}[0])
                        << 16;
            }
    }
    // Leaves the tile's factors, and asks for those of the tile after the next
    TILE_DEVICE void put(const TileFactors& to, int tile) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int n = lane + 32 * i;
            float factor;
            if constexpr (kZeros) {
                float scale[kGroups], top = 0.0f;
#pragma unroll
                for (int g = 0; g < kGroups; g++) {
                    scale[g] = as_float(words[0][i][g] << 16);
                    top = fmaxf(top, scale[g]);
                }
                const float normal = power_above(top, 0);
                factor = inverse_power(normal);
#pragma unroll
                for (int g = 0; g < kGroups; g++) {
                    const float zero = as_float(words[0][i][g] & 0xffff0000u);
                    to.part((is_v ? kValueZeros : kKeyZeros) + g)[n] = is_v ? zero : ptx::mad(scale[g], 8.0f, zero);
                    to.scale(is_v * kTileTokens + n)[g] = from_float<half>(scale[g] * normal);
                }
                if (!inside(tile * kTileTokens + n)) factor = 0.0f;
            } else {
                factor = as_float(words[0][i][0]);
            }
            to.part(is_v ? kValueFactors : kKeyFactors)[n] = factor;
            if (factor < INFINITY) most = fmaxf(most, factor);
#pragma unroll
            for (int g = 0; g < kScaleWords; g++) words[0][i][g] = words[1][i][g];
        }
        if (is_v) {
            most = as_float(ptx::reduce_max(as_bits(most)));
            if (lane == 0) to.limit() = most > kMostProduct / kMostWeight ? kMostProduct / most : kMostWeight;
        }
        fetch(words[1], tile + 2);
        look_up(tile + 3);
    }
};

// Eight codes as halves. Keys of int4 stand in the order 0 4 1 5 2 6 3 7, which Q's follow.
template <bool kValues> TILE_DEVICE Vector16 widen_codes(uint32_t from, uint32_t scales) {
    Vector16 to;
    if constexpr (kZeros) {
        // 1024 + code, less 1024 or 1032
        const uint32_t shift = kValues ? 0x64006400u : 0x64086408u;
#pragma unroll
        for (int i = 0; i < 4; i++)
            to.word[i] = ptx::multiply_halves(
                ptx::subtract_halves((from >> 4 * i & 0x000f000fu) | 0x64006400u, shift), scales);
        if constexpr (kValues) {
            const uint32_t a = to.word[0], b = to.word[1], c = to.word[2], d = to.word[3];
            to = {{ptx::permute_bytes(a, b, 0x5410), ptx::permute_bytes(c, d, 0x5410), ptx::permute_bytes(a, b, 0x7632),
                   ptx::permute_bytes(c, d, 0x7632)}};
        }
    }
    return to;
}
TILE_DEVICE Vector16 widen_codes(const Vector8& from) {
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

// Widens K or V of a tile, sixteen channels of a token at a time: from raw codes to where wgmma reads them. Values
// outside the span become zeros: memory there may hold anything, and 0 · NaN is NaN. A thread's two eights of channels
// come in an order in which neither its loads nor its stores meet those of its neighbours in a bank.
template <bool kValues, class Place>
TILE_DEVICE void widen_tile(int thread, uint32_t raw_stage, const TileFactors& factors, int first_token, Span span,
                            Place place) {
    constexpr int kCodeBytes = kRowBytes / (kHeadDim / 8);  // of eight channels
#pragma unroll 2
    for (int n = thread; n < kTileTokens * kWidenUnits; n += kWideners) {
        const int token = n / kWidenUnits, unit = n % kWidenUnits;
        const bool gone = kValues && (first_token + token < span.begin || first_token + token >= span.end);
        const uint32_t row = raw_codes(raw_stage, kValues) + token * kRowBytes;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int eight = 2 * unit + (i ^ ((unit >> 2 ^ token >> (kZeros ? 1 : 0)) & 1));
            Vector16 to{};
            if (!gone) {
                if constexpr (kZeros) {
                    const uint32_t codes = Shared<uint32_t>(row + eight * kCodeBytes)[0];
                    const Shared<half> scales = factors.scale(kValues * kTileTokens + token);
                    const uint32_t scale = ptx::load_shared_16(scales.address(eight * 8 / kGroupSize));
                    to = widen_codes<kValues>(codes, scale * 0x10001u);
                } else {
                    const Vector8 codes = Shared<Vector8>(row + eight * kCodeBytes)[0];
                    to = widen_codes(codes);
                }
            }
            Shared<Vector16>(place(token, eight))[0] = to;
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
    const int thread = threadIdx.x % 128 - 32, rank = ptx::uniform(thread / 32);
    for (int round = 0; round < args.tile_rounds; round++) {
        const DecodeItem item = item_of(args, round);
        const Span span{item.start, item.stop};
        if (item.rows == 0) break;  // no item follows an empty one
        if (span.end <= span.begin) continue;
        TileScales scales(args, item, rank == 1, rank < 2 ? span : Span{0, 0});
        for (int tile = span.begin / kTileTokens; tile * kTileTokens < span.end; tile++, to.next(), from.next()) {
            const TileFactors factors(to.stage);
            const int first = tile * kTileTokens;
            keys.wait_free(to);
            if (rank < 2) scales.put(factors, tile);
            if constexpr (kZeros) ptx::barrier_sync(kWidenBarrier, kWideners);
            raw.wait(from);
            widen_tile<false>(thread, from.stage, factors, first, span,
                              [&](int token, int eight) { return place(to.stage, false, token, eight); });
            if (ptx::elect_one()) ptx::mbarrier_arrive(keys.full_at(to));
            values.wait_free(to);
            widen_tile<true>(thread, from.stage, factors, first, span,
                             [&](int token, int eight) { return place(to.stage, true, token, eight); });
            if (ptx::elect_one()) ptx::mbarrier_arrive(values.full_at(to));
            raw.release(from);
        }
    }
}
