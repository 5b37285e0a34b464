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

constexpr int kWideners = 96;  // threads
constexpr int kWidenBarrier = 5;
// A token's scale, or int4's scale and zero point of group g, of a tile of codes: n of K's 64 tokens or of V's
TILE_DEVICE Shared<uint32_t> raw_scales(uint32_t stage, int is_v, int g) {
    return Shared<uint32_t>(kAtRawScales + stage * kRawScaleBytes + (is_v * kGroups + g) * kTileTokens * 4);
}

// How scales come to a tile of codes: by the warp that requests the codes, which asks for them a tile ahead and for
// their pages two. The warps that widen could not: a fence between their stores and wgmma waits for every load on the
// way. A lane has tokens `lane` and `lane` + 32.
struct TileScales {
    const DecodeArgs& args;
    const Span span;
    const PageTable& table;
    const int kv_head, lane;
    int page[2];
    uint32_t words[2][2][kGroups];  // of K and of V

    TILE_DEVICE TileScales(const DecodeArgs& a, const DecodeItem& item, const PageTable& pages)
        : args(a), span{item.start, item.stop}, table(pages), kv_head(item.kv_head()), lane(warp::lane()) {
        const int tile = span.begin / kTileTokens;
        constexpr int kBoxTokens = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            page[i] = item.first_page((lane + 32 * i) / kBoxTokens);
            if (page[i] < 0) page[i] = look_up(tile, i);
        }
        fetch(tile);
    }
    TILE_DEVICE bool inside(int token) const { return token >= span.begin && token < span.end; }
    // Of a token outside the span no page is looked at: its number may be anything.
    TILE_DEVICE int look_up(int tile, int i) const {
        const int token = tile * kTileTokens + lane + 32 * i;
        return inside(token) ? table.page(token / kPageSize) : 0;
    }
    TILE_DEVICE const ScaleBits* place(const Paged& of, int i, int token, int group) const {
        return static_cast<const ScaleBits*>(of.base) + page[i] * of.page + token % kPageSize * of.token +
               kv_head * of.head + group * of.group;
    }
    // Of this tile, and the pages of the next
    TILE_DEVICE void fetch(int tile) {
#pragma unroll
        for (int n = 0; n < 4 * kGroups; n++) {
            const int is_v = n / (2 * kGroups), i = n / kGroups % 2, g = n % kGroups;
            const int token = tile * kTileTokens + lane + 32 * i;
            uint32_t& to = words[is_v][i][g];
            to = 0;
            if (!inside(token)) continue;
            to = Global<const ScaleBits>{place(is_v ? args.v_scale : args.k_scale, i, token, g)}[0];
            if constexpr (kZeros)
                to |= uint32_t(Global<const ScaleBits>{place(is_v ? args.v_zero : args.k_zero, i, token, g)}[0]) << 16;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) page[i] = look_up(tile + 1, i);
    }
    // Leaves the tile's scales beside its codes
    TILE_DEVICE void put(uint32_t stage) const {
#pragma unroll
        for (int n = 0; n < 4 * kGroups; n++) {
            const int is_v = n / (2 * kGroups), i = n / kGroups % 2, g = n % kGroups;
            raw_scales(stage, is_v, g)[lane + 32 * i] = words[is_v][i][g];
        }
    }
};

// Makes the factors of a tile's keys, or of its values, from their scales. One warp.
TILE_DEVICE void put_factors(const TileFactors& to, uint32_t raw_stage, int is_v, int first_token, Span span) {
    const int lane = ptx::just_in_time(threadIdx.x) & 31;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int n = lane + 32 * i;
        float factor;
        if constexpr (kZeros) {
            float scale[kGroups], zero[kGroups], top = 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                const uint32_t word = raw_scales(raw_stage, is_v, g)[n];
                scale[g] = as_float(word << 16);
                zero[g] = as_float(word & 0xffff0000u);
                top = fmaxf(top, scale[g]);
            }
            const float normal = power_above(top, 0);
            factor = inverse_power(normal);
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                to.part((is_v ? kValueZeros : kKeyZeros) + g)[n] = is_v ? zero[g] : ptx::mad(scale[g], 8.0f, zero[g]);
                to.scale(is_v * kTileTokens + n)[g] = from_float<half>(scale[g] * normal);
            }
            if (first_token + n < span.begin || first_token + n >= span.end) factor = 0.0f;
        } else {
            factor = as_float(raw_scales(raw_stage, is_v, 0)[n]);
        }
        to.part(is_v ? kValueFactors : kKeyFactors)[n] = factor;
        if (factor < INFINITY) most = fmaxf(most, factor);
    }
    if (is_v) {
        most = as_float(ptx::reduce_max(as_bits(most)));
        if (lane == 0) to.limit() = most > kMostProduct / kMostWeight ? kMostProduct / most : kMostWeight;
    }
}

// Eight codes of int4 as halves. Keys stand in the order 0 4 1 5 2 6 3 7, which Q's follow.
// kThousands, in a register: then one instruction both masks and merges.
constexpr uint32_t kThousands = 0x64006400u;
template <bool kValues> TILE_DEVICE Vector16 widen_codes(uint32_t from, uint32_t scales, uint32_t thousands) {
    // 1024 + code, less 1024 or 1032
    const uint32_t shift = kValues ? kThousands : 0x64086408u;
    Vector16 to;
#pragma unroll
    for (int i = 0; i < 4; i++)
        to.word[i] =
            ptx::multiply_halves(ptx::subtract_halves((from >> 4 * i & 0x000f000fu) | thousands, shift), scales);
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
template <bool kWords> struct CodesOf { using Type = Vector8; };
template <> struct CodesOf<true> { using Type = uint32_t; };
using EightCodes = CodesOf<kZeros>::Type;

// Widens K or V of a tile from raw codes to where wgmma reads them: each warp takes every third eight of its tokens.
// All of a lane's loads come before its first store, since no load passes a store. Values outside the span become
// zeros: memory there may hold anything, and 0 · NaN is NaN. place(token, eight): where eight channels of a token stand
template <bool kValues, class Place>
TILE_DEVICE void widen_tile(int from, uint32_t raw_stage, const TileFactors& factors, int first_token, Span span,
                            Place place) {
    const int lane = ptx::just_in_time(threadIdx.x) & 31;  // places are found anew: kept, they would take registers
    const uint32_t codes_at = raw_codes(raw_stage, kValues) + lane * uint32_t(sizeof(EightCodes));
    uint32_t to[kWidenLoads], scales_at[kWidenLoads];
#pragma unroll
    for (int j = 0; j < kWidenLoads; j++) {
        to[j] = place(widen_token(lane, j), widen_eight(lane, j));
        scales_at[j] = factors.scales_at(kValues * kTileTokens + widen_token(lane, j)) +
                       widen_eight(lane, j) * 8 / kGroupSize * 2;
    }
    const uint32_t step = place(8, 0) - place(0, 0), thousands = ptx::just_in_time(int(kThousands));
#pragma unroll 1
    for (int block = from; block < kWidenBlocks; block += kWideners / 32) {
        EightCodes codes[kWidenLoads];
        uint32_t scales[kWidenLoads] = {};
#pragma unroll
        for (int j = 0; j < kWidenLoads; j++) {
            codes[j] = Shared<EightCodes>(codes_at + block * 8 * kRowBytes)[32 * j];
            if constexpr (kZeros) scales[j] = Shared<uint16_t>(scales_at[j] + block * 8 * 2 * kGroups)[0];
        }
#pragma unroll
        for (int j = 0; j < kWidenLoads; j++)
            Shared<Vector16>(to[j] + block * step)[0] = widen_codes<kValues>(codes[j], scales[j] * 0x10001u, thousands);
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
            widen_tile<false>((rank + 1) % 3, from.stage, factors, first, span,
                              [&](int token, int eight) { return place(to.stage, false, token, eight); });
            if (ptx::elect_one()) ptx::mbarrier_arrive(keys.full_at(to));
            values.wait_free(to);
            widen_tile<true>(2 - rank, from.stage, factors, first, span,
                             [&](int token, int eight) { return place(to.stage, true, token, eight); });
            if (ptx::elect_one()) ptx::mbarrier_arrive(values.full_at(to));
            raw.release(from);
        }
    }
}
