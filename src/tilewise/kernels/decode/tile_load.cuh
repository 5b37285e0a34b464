// How tiles by wgmma lie in shared memory, and the warp that brings them there by TMA, page by page.
#pragma once
#include "decode/tile_widen.cuh"

constexpr int kTile = kTileTokens, kTileThreads = 128 * kTileGroups;
constexpr int kTilePanels = (kHeadDim + kPanel - 1) / kPanel;
constexpr int kTileBytes = kTile * kTilePanels * kPanelRowBytes;  // of K, and as many of V
constexpr int kListBox = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // tokens per DecodeItem::first_page
constexpr int kTileBox = kListBox < kTile ? kListBox : kTile;                         // tokens per copy
constexpr int kTileBoxes = kTile / kTileBox;
// kTileWhole: a copy brings all panels of its tokens, eight tokens after eight. That takes half as many copies, whose
// number is what small pages wait for. Otherwise a copy brings one panel, and panels lie one after another. Quantised
// codes come row after row, and are widened into eights.
constexpr bool kTileEights = kTileWhole || kScaled;
constexpr int kTileCopies = kTileEights ? 1 : kTilePanels;
constexpr int kTileCopyBytes = kTileBox * (kScaled ? kRowBytes : kPanelRowBytes * (kTileWhole ? kTilePanels : 1));
constexpr int kTileEight =
    kTileEights ? kTilePanels * kEightBytes : kEightBytes;  // bytes from eight tokens to the next,
constexpr int kTilePanelStep = kTileEights ? kEightBytes : kTile * kPanelRowBytes;  // and from panel to panel
static_assert(2 * kTileBoxes * kTileCopies <= 32, "a lane makes one copy per tile");
TILE_DEVICE uint32_t tile_keys(uint32_t stage) { return stage * 2 * kTileBytes; }
TILE_DEVICE uint32_t tile_values(uint32_t stage) { return tile_keys(stage) + kTileBytes; }
// Where the c-th 16 bytes of a token's row stand, for a tile at `at`
TILE_DEVICE uint32_t tile_place(uint32_t at, int token, int c) {
    return at + token / 8 * kTileEight + c / 8 * kTilePanelStep + token % 8 * kPanelRowBytes + (c % 8 ^ token % 8) * 16;
}
TILE_DEVICE uint32_t tile_eight(uint32_t stage, int is_v, int token, int eight) {
    return tile_place(is_v ? tile_values(stage) : tile_keys(stage), token, eight);
}
TILE_DEVICE DecodeItem tile_item(const DecodeArgs& args, int round) {
    return load_item(args.tile_items, int64_t(round) * gridDim.x + blockIdx.x);
}

// Codes of quantised tiles go to the warps that widen them.
template <bool kRaw> struct LoadRing {
    static constexpr int kStages = kTileStages;
    static TILE_DEVICE TileRing ring() { return tile_ring(); }
};
template <> struct LoadRing<true> {
    static constexpr int kStages = kRawStages;
    static TILE_DEVICE RawRing ring() { return raw_ring(); }
};
TILE_DEVICE void load_tiles(const DecodeArgs& args, const TensorMap& mK, const TensorMap& mV) {
    const auto ring = LoadRing<kScaled>::ring();
    Turn<LoadRing<kScaled>::kStages> turn;
    // The copy that this lane makes of each tile: boxes in order, and of a box K's panels before V's
    const int lane = warp::lane(), box = lane / (2 * kTileCopies), panel = lane % kTileCopies;
    const int is_v = lane / kTileCopies % 2;
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
        for (; tile * kTile < span.end && span.end > span.begin; tile++, turn.next()) {
            int boxes = 0;
#pragma unroll
            for (int b = 0; b < kTileBoxes; b++) boxes += wanted(tile, b);
            ring.wait_free(turn);
            ptx::sync_warp();  // or a lane still waiting on the barrier could find it two phases on
            const uint32_t full = ring.full_at(turn);
            if (lane == 0) ptx::mbarrier_arrive_expect(full, boxes * 2 * kTileCopies * kTileCopyBytes);
            ptx::sync_warp();
            if (wanted(tile, box)) {
                const uint32_t to = (kScaled ? raw_codes(turn.stage, is_v)
                                     : is_v  ? tile_values(turn.stage)
                                             : tile_keys(turn.stage)) +
                                    box * kTileCopyBytes;
                const int token = (tile * kTile + box * kTileBox) % kPageSize;
                if constexpr (kScaled)
                    ptx::tma_load(ptx::shared_address(to), is_v ? &mV : &mK, full, 0, token, item.kv_head(), page);
                else if constexpr (kTileWhole)
                    ptx::tma_load(ptx::shared_address(to), is_v ? &mV : &mK, full, 0, 0, kTilePanels * item.kv_head(),
                                  token / 8, page);
                else
                    ptx::tma_load(ptx::shared_address(to + panel * kTilePanelStep), is_v ? &mV : &mK, full,
                                  panel * kPanel, token, item.kv_head(), page);
            }
            if (wanted(tile + 1, box)) page = table.page(((tile + 1) * kTile + box * kTileBox) / kPageSize);
        }
    }
}
