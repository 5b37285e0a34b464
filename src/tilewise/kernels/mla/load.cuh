// How rows of the cache come into the ring: by TMA, a box per panel and page, or row by row where a box does not lie in
// one page.
#pragma once
#include "mla/layout.cuh"

constexpr int kBox = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // tokens per copy
constexpr int kBoxes = kKeys / kBox;
static_assert(kGather || kPageSize % 16 == 0, "a box lies in one page");

// One warp. A panel is requested as soon as its place is free. A box without a token of the span is not requested: its
// page number may be anything.
TILE_DEVICE void load_boxes(const DecodeArgs& args, const TensorMap& mRows) {
    Places now;
    const int box = warp::lane();
    for (int slot = 0; slot < args.slots; slot++) {
        const DecodeItem item = mla_item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        const PageTable table = page_table(args, item.table, item.kv_head(), item.tail_from);
        const auto wanted = [&](int block, int b) {
            const int token = block * kKeys + b * kBox;
            return b < kBoxes && token < span.end && token + kBox > span.begin;
        };
        const auto page_of = [&](int block) {
            return block < blocks.end && wanted(block, box) ? table.page((block * kKeys + box * kBox) / kPageSize) : 0;
        };
        int page = page_of(blocks.begin);
        for (int block = blocks.begin; block < blocks.end; block++, now.next()) {
            const int here = page, token = (block * kKeys + box * kBox) % kPageSize;
            const bool mine = wanted(block, box);
            page = page_of(block + 1);
            int boxes = 0;
#pragma unroll
            for (int b = 0; b < kBoxes; b++) boxes += wanted(block, b);
#pragma unroll 1
            for (int panel = 0; panel < kBlockPlaces; panel++) {
                now.wait_free(panel);
                ptx::sync_warp();  // or a lane still waiting on the barrier could find it two phases on
                const uint32_t full = now.full(panel);
                if (box == 0)
                    ptx::mbarrier_arrive_expect(full, panel < kPanels ? boxes * kBox * kPanelRowBytes : 0);
                ptx::sync_warp();
                if (mine && panel < kPanels)
                    ptx::tma_load(ptx::shared_address(now.at(panel) + box * kBox * kPanelRowBytes), &mRows, full,
                                  panel * kPanel, token, item.kv_head(), here);
            }
        }
    }
}
