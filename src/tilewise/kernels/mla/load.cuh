// How rows of the cache come into the ring: by TMA, a box per panel and page, or row by row where a box does not lie in
// one page.
#pragma once
#include "mla/layout.cuh"

constexpr int kBox = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // tokens per copy
constexpr int kBoxes = kKeys / kBox;
static_assert(kGather || kPageSize % 16 == 0, "a box lies in one page");

// The positions that a query token has chosen. caller: its number
struct Chosen {
    const int* list;
    int length;  // of the sequence
    PageTable table;
    TILE_DEVICE Chosen(const MlaArgs& mla, int caller) {
        const int place = Global<const int>{mla.places}[mla.queries.quotient(caller)];
        const int from = Global<const int>{mla.tail_from}[place];
        list = mla.indices + int64_t(caller) * mla.chosen;
        length = Global<const int>{mla.lengths}[place];
        table = {mla.pages + int64_t(place) * mla.table_pages,
                 mla.tails + int64_t(place) * mla.tail_pages - from, from};
    }
    // The n-th of them, −1 for none
    TILE_DEVICE int at(int n) const {
        const int position = Global<const int>{list}[n];
        return position < length ? position : -1;
    }
};

// Four warps. Each thread copies 16 bytes of every sixteenth row of a panel, and tells that they are there when kLag
// more panels have been asked for. What is no row of the span becomes zeros.
TILE_DEVICE void load_rows(const DecodeArgs& args, const MlaArgs& mla) {
    constexpr int kStep = 128 / 8, kEach = kKeys / kStep;
    const int thread = threadIdx.x - kComputing, first = thread / 8, c = thread % 8;
    Places now, arrived;
    uint32_t number = 0;  // of the block in the life of the thread block
    int ahead = 0, panel_arrived = 0;  // panels asked for that have not arrived; the next one to arrive
    const auto arrive = [&] {
        ptx::fence_async_proxy();
        ptx::mbarrier_arrive(arrived.full(panel_arrived));
        if (++panel_arrived == kBlockPlaces) {
            panel_arrived = 0;
            arrived.next();
        }
        ahead--;
    };
    for (int slot = 0; slot < args.slots; slot++) {
        const DecodeItem item = mla_item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        for (int block = blocks.begin; block < blocks.end; block++, number++, now.next()) {
            const uint8_t* from[kEach];
#pragma unroll
            for (int n = 0; n < kEach; n++) {
                const int token = block * kKeys + n * kStep + first;
                from[n] = nullptr;
                if (token < span.begin || token >= span.end) continue;
                int position = token, page = 0;
                if constexpr (kChosen) {
                    const Chosen chosen(mla, item.caller());
                    position = chosen.at(token);
                    if (c == 0) sThere(number)[n * kStep + first] = position >= 0;
                    if (position < 0) continue;
                    page = chosen.table.page(position / kPageSize);
                } else {
                    page = page_table(args, item.table, item.kv_head(), item.tail_from).page(position / kPageSize);
                }
                from[n] = static_cast<const uint8_t*>(args.k.base) + page * args.k.page +
                          position % kPageSize * args.k.token + 16 * c;
            }
#pragma unroll 1
            for (int panel = 0; panel < kBlockPlaces; panel++) {
                now.wait_free(panel);
                if (panel < kPanels)
#pragma unroll
                    for (int n = 0; n < kEach; n++) {
                        const int row = n * kStep + first;
                        // Of zero bytes nothing is read, but the address must be one.
                        const void* at = from[n] ? from[n] + panel * kPanelRowBytes : args.k.base;
                        ptx::copy_async_16(
                            ptx::shared_address(now.at(panel) + row * kPanelRowBytes + (c ^ row % 8) * 16), at,
                            from[n] ? 16 : 0);
                    }
                ptx::copy_async_commit();
                if (++ahead > kLag) {
                    ptx::copy_async_wait<kLag>();
                    arrive();
                }
            }
        }
    }
    ptx::copy_async_wait<0>();
    while (ahead > 0) arrive();
}

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
