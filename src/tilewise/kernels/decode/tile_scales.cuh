// The scales of quantised tiles: how they come to shared memory beside a tile of codes, and what becomes of them.
//
// A tile of codes has as many parts of scales as the cache: of K, of V, and for int4 the zero points of both. A part is
// token after token, and of a token group after group, as in the cache.
#pragma once
#include "decode/tile_factors.cuh"
#include "tile/ptx_copies.cuh"

constexpr int kPartBytes = kTileTokens * kKeyScales;
static_assert(!kTilesByWgmma || !kScaled || kScaleParts * kPartBytes == kRawScaleBytes, "as layout.cuh has it");
TILE_DEVICE uint32_t raw_scales(uint32_t stage, int part) {
    return kAtRawScales + stage * kRawScaleBytes + part * kPartBytes;
}
constexpr int kPageTokens = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // per DecodeItem::first_page

// Brings scales, as a part of the warp that requests the codes, and arrives at the barrier that tells of both. The
// warps that widen could not: a fence between their stores and wgmma waits for every copy on the way.
//
// Runs come by cp.async, and the warp waits for nothing but their page, which it looked up a tile before. (Loaded into
// registers, which are few here, int4's sixteen scales of a lane's tokens came two at a time: eight trips to memory per
// tile, 4800 cycles.) A lane copies the same 16 bytes of each tile, of one part or, of int4's two groups, of two.
struct TileScales {
    static constexpr int kPieceTokens = 16 / kKeyScales, kPieces = kPartBytes / 16;  // of a part
    static constexpr int kRounds = kScaled ? kRawScaleBytes / 512 : 1, kArrivals = kScaleRuns ? 32 : 1;
    static_assert(!kScaled || (kTileTokens == 64 && 32 % kPieces == 0), "all pieces of a lane are of the same tokens");
    const DecodeArgs& args;
    const Span span;
    const PageTable& table;
    const int kv_head, lane;
    int page;  // of this lane's piece in the tile that is asked for next
    ScaleRun runs[kRounds];

    TILE_DEVICE TileScales(const DecodeArgs& a, const DecodeItem& item, const PageTable& pages)
        : args(a), span{item.start, item.stop}, table(pages), kv_head(item.kv_head()), lane(warp::lane()), page(0) {
        if constexpr (!kScaleRuns) return;
#pragma unroll
        for (int i = 0; i < kRounds; i++) {
            const Paged& of = part_of((lane + 32 * i) / kPieces);
            runs[i] = {static_cast<const uint8_t*>(of.base) + kv_head * of.head * kScaleSize,
                       uint32_t(of.page) * kScaleSize};
        }
        const int tile = span.begin / kTileTokens;
        page = item.first_page(piece_token() / kPageTokens);
        if (page < 0) page = look_up(tile);
    }
    TILE_DEVICE const Paged& part_of(int part) const {
        return part == 0 ? args.k_scale : part == 1 ? args.v_scale : part == 2 ? args.k_zero : args.v_zero;
    }
    TILE_DEVICE int piece_token() const { return lane % kPieces * kPieceTokens; }  // the first of a lane's piece
    TILE_DEVICE bool inside(int token, int tokens) const { return token + tokens > span.begin && token < span.end; }
    // Of tokens outside the span no page is looked at: its number may be anything.
    TILE_DEVICE int look_up(int tile) const {
        const int token = tile * kTileTokens + piece_token();
        return inside(token, kPieceTokens) ? table.page(token / kPageSize) : 0;
    }
    TILE_DEVICE void bring(uint32_t stage, int tile, uint32_t full) {
        if constexpr (kScaleRuns) {
            const int token = tile * kTileTokens + piece_token();
            const bool there = inside(token, kPieceTokens);
#pragma unroll
            for (int i = 0; i < kRounds; i++) {
                const uint8_t* from = runs[i].from + uint64_t(uint32_t(page)) * runs[i].page_bytes;
                ptx::copy_async_16(ptx::shared_address(raw_scales(stage, 0) + 16 * (lane + 32 * i)),
                                   from + token % kPageSize * kKeyScales, there ? 16 : 0);
            }
            ptx::copy_async_arrive(full);
            page = look_up(tile + 1);
        } else {
            fetch(stage, tile);
            ptx::sync_warp();
            if (lane == 0) ptx::mbarrier_arrive(full);
        }
    }
    // Scales that are not in runs, one by one
    TILE_DEVICE void fetch(uint32_t stage, int tile) const {
#pragma unroll 1
        for (int n = lane; n < kTileTokens * kGroups; n += 32) {
            const int token = tile * kTileTokens + n / kGroups, group = n % kGroups;
            const int64_t at = inside(token, 1) ? table.page(token / kPageSize) : 0;
#pragma unroll
            for (int part = 0; part < kScaleParts; part++) {
                const Paged& of = part_of(part);
                const ScaleBits* from = static_cast<const ScaleBits*>(of.base) + at * of.page +
                                        token % kPageSize * of.token + kv_head * of.head + group * of.group;
                Shared<ScaleBits>(raw_scales(stage, part))[n] =
                    inside(token, 1) ? Global<const ScaleBits>{from}[0] : ScaleBits(0);
            }
        }
    }
};

// Makes the factors of a tile's keys, or of its values, from their scales. One warp. Those of tokens outside the span,
// whose scales may be anything, are zero.
TILE_DEVICE void put_factors(const TileFactors& to, uint32_t raw_stage, int is_v, int first_token, Span span) {
    const int lane = ptx::just_in_time(threadIdx.x) & 31;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int n = lane + 32 * i;
        const bool inside = first_token + n >= span.begin && first_token + n < span.end;
        float factor;
        if constexpr (kZeros) {
            float scale[kGroups], zero[kGroups], top = 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                const auto read = [&](int part) {
                    const uint32_t bits = Shared<uint16_t>(raw_scales(raw_stage, part))[n * kGroups + g];
                    return inside ? as_float(bits << 16) : 0.0f;
                };
                scale[g] = read(is_v);
                zero[g] = read(2 + is_v);
                top = fmaxf(top, scale[g]);
            }
            const float normal = power_above(top, 0);
            factor = inside ? inverse_power(normal) : 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                to.part((is_v ? kValueZeros : kKeyZeros) + g)[n] = is_v ? zero[g] : ptx::mad(scale[g], 8.0f, zero[g]);
                const float x = scale[g] * normal;
                to.scale(is_v * kTileTokens + n)[g] = pack<half>(x, x);
            }
        } else {
            const float scale = Shared<float>(raw_scales(raw_stage, is_v))[n];
            factor = inside ? scale : 0.0f;
        }
        to.part(is_v ? kValueFactors : kKeyFactors)[n] = factor;
        if (factor < INFINITY) most = fmaxf(most, factor);
    }
    if (is_v) {
        // A power of two, since a division would take longer than all the rest
        most = as_float(ptx::reduce_max(as_bits(most)));
        if (lane == 0) to.limit() = most > 0.0f ? fminf(power_above(most, 15, 113), kMostWeight) : kMostWeight;
    }
}
