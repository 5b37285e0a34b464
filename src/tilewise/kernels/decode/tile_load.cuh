// How tiles by wgmma lie in shared memory, and the warp that brings them there by TMA, page by page.
#pragma once
#include "decode/tile_widen.cuh"

constexpr int kTile = kTileTokens, kTileThreads = 128 * kTileGroups;
constexpr int kListBox = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // tokens per DecodeItem::first_page
constexpr int kTileBox = kListBox < kTile ? kListBox : kTile;                         // tokens per copy
constexpr int kTileBoxes = kTile / kTileBox;
// kTileWhole: a copy brings all panels of its tokens, eight tokens after eight. That takes half as many copies, whose
// number is what small pages wait for. Otherwise a copy brings one panel, and panels lie one after another. Quantised
// codes come row after row, and are widened into eights.
constexpr bool kTileEights = kTileWhole || kScaled;
constexpr int kTilePanelStep = kTileEights ? kEightBytes : kTile * kPanelRowBytes;  // bytes from panel to panel
// A tile of K, or of V, with so many panels of channels
template <int kPanels, int kCodeBytes> struct TileOf {
    static constexpr int kBytes = kTile * kPanels * kPanelRowBytes;
    static constexpr int kCopies = kTileEights ? 1 : kPanels;
    static constexpr int kCopyBytes = kTileBox * (kScaled ? kCodeBytes : kPanelRowBytes * (kTileWhole ? kPanels : 1));
    static constexpr int kEight = kTileEights ? kPanels * kEightBytes : kEightBytes;  // from eight tokens to the next
    static constexpr int kUnits = 8 * kPanels;                                        // of 16 bytes, of a token
    // Where the c-th 16 bytes of a token's row stand, for a tile at `at`
    static TILE_DEVICE uint32_t place(uint32_t at, int token, int c) {
        return at + token / 8 * kEight + c / 8 * kTilePanelStep + token % 8 * kPanelRowBytes +
               (c % 8 ^ token % 8) * 16;
    }
};
using KeyTile = TileOf<kTileKeyPanels, KeyRows::kBytes>;
using ValueTile = TileOf<kTileValuePanels, ValueRows::kBytes>;
constexpr int kTileCopies = KeyTile::kCopies + ValueTile::kCopies;  // of the tokens of a box
static_assert(kTileBoxes * kTileCopies <= 32, "a lane makes one copy per tile");
TILE_DEVICE uint32_t tile_keys(uint32_t stage) { return stage * kTilePairBytes; }
TILE_DEVICE uint32_t tile_values(uint32_t stage) { return tile_keys(stage) + KeyTile::kBytes; }
// Where eight channels of a quantised token stand, of K or of V, which lie alike
TILE_DEVICE uint32_t tile_eight(uint32_t stage, int is_v, int token, int eight) {
    return KeyTile::place(is_v ? tile_values(stage) : tile_keys(stage), token, eight);
}
TILE_DEVICE DecodeItem tile_item(const DecodeArgs& args, int round) {
    return load_item(args.tile_items, int64_t(round) * gridDim.x + blockIdx.x);
}

// Codes of quantised tiles go to the warps that widen them.
template <bool kRaw> struct LoadRing {
    // Not quantised: no scales
    struct Scales {
        TILE_DEVICE Scales(const DecodeArgs&, const DecodeItem&, const PageTable&) {}
        TILE_DEVICE void bring(uint32_t, int, uint32_t) const {}
    };
    static constexpr int kStages = kTileStages;
    static TILE_DEVICE TileRing ring() { return tile_ring(); }
};
template <> struct LoadRing<true> {
    using Scales = TileScales;
    static constexpr int kStages = kRawStages;
    static TILE_DEVICE RawRing ring() { return raw_ring(); }
};
TILE_DEVICE void load_tiles(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV) {
    const auto ring = LoadRing<kScaled>::ring();
    Turn<LoadRing<kScaled>::kStages> turn;
    // The copy that this lane makes of each tile: boxes in order, and of a box K's panels before V's
    const int lane = warp::lane(), box = lane / kTileCopies, copy = lane % kTileCopies;
    const int is_v = kOneDim ? lane / KeyTile::kCopies % 2 : copy >= KeyTile::kCopies;
    const int panel = kOneDim ? lane % KeyTile::kCopies : is_v ? copy - KeyTile::kCopies : copy;
    for (int round = 0; round < args.tile_rounds; round++) {
        const DecodeItem item = tile_item(args, round);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span{item.start, item.stop};
        const PageTable table = page_table(args, item.table, item.kv_head(), item.tail_from);
        // A box without a token of the span is not requested: its page number may be anything.
        const auto wanted = [&](int tile, int b) {
            const int token = tile * kTile + b * kTileBox;
            return b < kTileBoxes && token < span.end && token + kTileBox > span.begin;
        };
        int tile = span.begin / kTile, page = item.first_page((tile * kTile + box * kTileBox) % 64 / kListBox);
        if (page < 0 && span.end > span.begin && wanted(tile, box))
            page = table.page((tile * kTile + box * kTileBox) / kPageSize);
        LoadRing<kScaled>::Scales scales(args, item, table);
        for (; tile * kTile < span.end && span.end > span.begin; tile++, turn.next()) {
            int boxes = 0;
#pragma unroll
            for (int b = 0; b < kTileBoxes; b++) boxes += wanted(tile, b);
            ring.wait_free(turn);
            ptx::sync_warp();  // or a lane still waiting on the barrier could find it two phases on
            const uint32_t full = ring.full_at(turn);
            constexpr int kBoxBytes =
                KeyTile::kCopies * KeyTile::kCopyBytes + ValueTile::kCopies * ValueTile::kCopyBytes;
            if (lane == 0) ptx::mbarrier_arrive_expect(full, boxes * kBoxBytes);
            ptx::sync_warp();
            if (wanted(tile, box)) {
                const uint32_t to = (kScaled ? raw_codes(turn.stage, is_v)
                                     : is_v  ? tile_values(turn.stage)
                                             : tile_keys(turn.stage)) +
                                    box * (is_v ? ValueTile::kCopyBytes : KeyTile::kCopyBytes);
                const int token = (tile * kTile + box * kTileBox) % kPageSize;
                if constexpr (kScaled)
                    ptx::tma_load(ptx::shared_address(to), is_v ? &mV : &mK, full, 0, token, item.kv_head(), page);
                else if constexpr (kTileWhole)
                    ptx::tma_load(ptx::shared_address(to), is_v ? &mV : &mK, full, 0, 0,
                                  (is_v ? kTileValuePanels : kTileKeyPanels) * item.kv_head(), token / 8, page);
                else
                    ptx::tma_load(ptx::shared_address(to + panel * kTilePanelStep), is_v ? &mV : &mK, full,
                                  panel * kPanel, token, item.kv_head(), page);
            }
            scales.bring(turn.stage, tile, full);
            if (wanted(tile + 1, box)) page = table.page(((tile + 1) * kTile + box * kTileBox) / kPageSize);
        }
    }
}
