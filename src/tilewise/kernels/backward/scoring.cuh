// What the consumers of the Hopper backward make of S, and how dK and dV leave. backward.cu says what the constants
// mean.
#pragma once
#include "backward/layout.cuh"
#include "tile/mma.cuh"

struct alignas(8) Two {
    float x, y;
};
struct alignas(8) Words {
    uint32_t low, high;
};
struct alignas(16) Four {
    float x, y, z, w;
};

// P of S for the 64 keys of a warpgroup
struct Scoring {
    const BackwardArgs& args;
    float factor, slope;  // factor: what S is multiplied with first
    int key0;             // of those of the block, the warpgroup's first
    uint32_t stage;       // of Q

    // The pair of a column's and the next one's −LSE (0) or −delta (1); n: eights of columns
    static TILE_DEVICE Two stat(uint32_t stage, int which, int n, int place = warp::lane() % 4) {
        return Shared<Two>(kAtStats + (2 * stage + which) * kStatBytes)[4 * n + place];
    }
    // What S (0) or dP (1) of a stage begins with: every column's value, for both rows of a lane
    static TILE_DEVICE void fill(float (&acc)[kTileQ / 2], uint32_t stage, int which, int place = warp::lane() % 4) {
#pragma unroll
        for (int n = 0; n < kTileQ / 8; n++) {
            const Two two = which == 0 && Rule::kChanges ? Two{0.0f, 0.0f} : stat(stage, which, n, place);
            acc[4 * n] = acc[4 * n + 2] = two.x;
            acc[4 * n + 1] = acc[4 * n + 3] = two.y;
        }
    }

    // The key of row h among those of the block
    TILE_DEVICE int key_of(int h) const { return key0 + threadIdx.x / 32 % 4 * 16 + warp::fragment_row(h); }
    // What row h sees of the queries of a step: a span of them, or of the tile's, from the lane's first column on, bits
    struct Sight {
        Visible span;
        uint32_t bits[2];
    };
    TILE_DEVICE Sight look(int h) const {
        if constexpr (!kListed) return {shared_seen()[key_of(h)], {}};
        const Words of = Shared<Words>(kAtSeen + stage % kSightStages * kSightBytes)[key_of(h)];
        return {{}, {of.low >> warp::fragment_column(), of.high >> warp::fragment_column()}};
    }
    // Value i of its row, 2n + i counted, for the query of that column
    static TILE_DEVICE bool sees(const Sight& sight, int n, int i, int query) {
        return kListed ? sight.bits[n / 4] >> (n % 4 * 8 + i) & 1 : sight.span.has(query);
    }
    // −∞ for what is not seen, where S is scaled by a positive number and nothing else
    TILE_DEVICE void hide(float (&s)[kTileQ / 2], int tile) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Sight sight = look(h);
            if constexpr (!kListed) warp::mask_row(s, h, tile * kTileQ, sight.span);
            else
#pragma unroll
                for (int j = 0; j < kTileQ / 4; j++)
                    if (!sees(sight, j / 2, j % 2, 0)) s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
        }
    }
    // P of S, and what dP is to be multiplied with in place of S; tile: of the queries
    template <bool kMasked>
    TILE_DEVICE void exponentiate(float (&s)[kTileQ / 2], uint32_t (&rP)[kTileQ / 16][4], int tile) const {
        if constexpr (!Rule::kChanges) {
            if constexpr (kMasked && !kListed)
#pragma unroll
                for (int h = 0; h < 2; h++) warp::mask_row(s, h, tile * kTileQ, look(h).span);
#pragma unroll
            for (int i = 0; i < kTileQ / 2; i++) s[i] = ptx::exp2_here(s[i] * factor);
            if constexpr (kMasked && kListed)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const Sight sight = look(h);
#pragma unroll
                    for (int j = 0; j < kTileQ / 4; j++)
                        if (!sees(sight, j / 2, j % 2, 0)) s[j / 2 * 4 + 2 * h + j % 2] = 0.0f;
                }
            warp::to_operand<Element>(rP, s);
        } else {
            exponentiate_changed<kMasked>(s, rP, tile);
        }
    }
    // The same where it is known here whether a tile needs a mask
    TILE_DEVICE void exponentiate(bool masked, float (&s)[kTileQ / 2], uint32_t (&rP)[kTileQ / 16][4], int tile) const {
        if (!Rule::kChanges && kMasks && masked) hide(s, tile);
        if (Rule::kChanges && kMasks && masked) exponentiate<true>(s, rP, tile);
        else exponentiate<false>(s, rP, tile);
    }
    template <bool kMasked>
    TILE_DEVICE void exponentiate_changed(float (&s)[kTileQ / 2], uint32_t (&rP)[kTileQ / 16][4], int tile) const {
        const float out = Rule::last_factor(args.scores, factor);
        const int query0 = tile * kTileQ + warp::fragment_column();
        Rule::apply_inner(s, factor);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            Sight sight{};
            float distance = 0.0f;  // from the row's key to the first column's position
            if constexpr (kMasked) sight = look(h);
            if constexpr (Rule::kAlibi) {
                const KeyTile work = Work(shared_work()[0]).tile;
                distance = float(position_of(query0, work.seqlen_q, work.seqlen_k) - work.key - key_of(h));
            }
#pragma unroll
            for (int n = 0; n < kTileQ / 8; n++) {
                const Two less = stat(stage, 0, n);
                float p[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& x = s[4 * n + 2 * h + i];
                    float bias = i ? less.y : less.x;
                    if constexpr (Rule::kAlibi) bias = ptx::mad(-slope, fabsf(distance + float(8 * n + i)), bias);
                    p[i] = ptx::exp2_here(ptx::mad(x, out, bias));
                    if (kMasked && !sees(sight, n, i, query0 + 8 * n + i)) p[i] = 0.0f;
                    x = Rule::kLinear ? p[i] : p[i] * ptx::mad(-x, x, 1.0f);
                }
                rP[n / 2][n % 2 * 2 + h] = pack<Element>(p[0], p[1]);
            }
        }
    }
};

// r = a ∘ acc, of which a and r are rounded, as A operands
TILE_DEVICE void multiply(uint32_t (&r)[kTileQ / 16][4], const uint32_t (&a)[kTileQ / 16][4],
                          const float (&acc)[kTileQ / 2]) {
#pragma unroll
    for (int i = 0; i < kTileQ / 4; i++) {
        const float low = unpack<Element>(a[i / 4][i % 4], 0), high = unpack<Element>(a[i / 4][i % 4], 1);
        r[i / 4][i % 4] = pack<Element>(low * acc[2 * i], high * acc[2 * i + 1]);
    }
}

// dK or dV of 64 keys through shared memory, kColumns of them from column0 on, by warpgroup `group`. By TMA, but for a
// tile whose last rows are another sequence's. columns: that there are; first: the first of the keys among those of the
// block
template <int kColumns>
TILE_DEVICE void store_keys(const BackwardArgs& args, const TensorMap& map, void* to, const Strides& strides,
                            int columns, uint32_t at, int panel_rows, const float (&acc)[kColumns / 2], int group,
                            int first, int column0) {
    using Panel = SharedTile<Element, 64, kPanel, Layout::swizzled>;
    const int row0 = threadIdx.x / 32 % 4 * 16, panel_bytes = panel_rows * kPanelRowBytes;
#pragma unroll
    for (int step = 0; step < kColumns / 16; step++) {
        uint32_t a[1][4];
        warp::to_operand<Element>(a, reinterpret_cast<const float (&)[8]>(acc[8 * step]));
        warp::store_a(Panel(at + step / 4 * panel_bytes), row0, step % 4, a[0]);
    }
    const Work work = shared_work()[0];
    const int key = work.tile.key + first;
    if (kPacked && key + 64 > work.tile.seqlen_k) {
        ptx::sync_warp();
        const Global<Element> base = Global<Element>{static_cast<Element*>(to)} + work.kv_head * strides.head;
        for (int i = warp::lane(); i < 16 * (kColumns / 8); i += 32) {
            const int row = row0 + i / (kColumns / 8), chunk = i % (kColumns / 8);
            if (key + row < work.tile.seqlen_k && column0 + chunk * 8 < columns)
                (base + ((work.tile.k_start + key + row) * strides.row + column0 + chunk * 8))
                    .template as<Vector16>()[0] = Vector16(Panel(at + chunk / 8 * panel_bytes).chunk(row, chunk % 8));
        }
        return;
    }
    ptx::fence_async_proxy();
    ptx::barrier_sync(kStoreBarrier + group, 128);
    if (threadIdx.x % 128 == 0) {
        for (int panel = 0; panel < kColumns / kPanel; panel++)
            ptx::tma_store(&map, ptx::shared_address(at + panel * panel_bytes), column0 + panel * kPanel,
                           work.tile.k_start + key, work.kv_head, work.batch);
        ptx::bulk_commit();
    }
}

