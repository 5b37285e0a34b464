// How rows of the cache come into the ring: by TMA, a box per panel and page, or row by row where a box does not lie in
// one page.
#pragma once
#include "mla/layout.cuh"
#include "mla/rows.cuh"
#include "tile/ptx_copies.cuh"

constexpr int kBox = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // tokens per copy
constexpr int kBoxes = kKeys / kBox;
static_assert(kGather || kPageSize % 16 == 0, "a box lies in one page");

// Four warps. Each thread copies 16 bytes of every sixteenth row of a panel, and the copies tell the panel's barrier by
// themselves when they are there: a warp that waited for them, or fenced, would wait for those of later panels too. So
// the fence is the readers' (Places::wait_rows). Where the rows of the next block lie is looked up meanwhile, by loads
// that wait for each other. What is no row of the span becomes zeros.
TILE_DEVICE void load_rows(const DecodeArgs& args, const MlaArgs& mla) {
    constexpr int kStep = 128 / 8, kEach = kKeys / kStep;
    const int thread = threadIdx.x - kComputing, first = thread / 8, c = thread % 8;
    Places now;
    uint32_t number = 0;  // of the block in the life of the thread block
    for (int slot = 0; slot < args.slots; slot++) {
        const DecodeItem item = mla_item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        RowPlace places[kEach];
        const auto look = [&](int block) {
#pragma unroll
            for (int n = 0; n < kEach; n++)
                places[n] = RowPlace(args, mla, item, span, block * kKeys + n * kStep + first);
        };
        look(blocks.begin);
        for (int block = blocks.begin; block < blocks.end; block++, number++, now.next()) {
            const uint8_t* from[kEach];
#pragma unroll
            for (int n = 0; n < kEach; n++) {
                if (kChosen && c == 0) sThere(number)[n * kStep + first] = places[n].page >= 0;
                from[n] = places[n].page < 0 ? nullptr : places[n].in(args.k) + 16 * c;
            }
            look(block + 1);  // beyond the span's end there is nothing to be found
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
                // Where nothing is copied, a place is handed on by who has waited for it.
                if (panel < kPanels) ptx::copy_async_arrive(now.full(panel));
                else ptx::mbarrier_arrive(now.full(panel));
                if (kChosen) ptx::mbarrier_arrive(now.full(panel));  // for what was stored
            }
        }
    }
    ptx::copy_async_wait<0>();
}

// The boxes of a block of keys, of kBox tokens each, all of which lie in one page. Those without a token of the span
// are not requested: their page number may be anything.
struct Boxes {
    Span span;
    int block, row;  // of keys; the first query row of the item
    int page = 0;    // of box number `lane`
    TILE_DEVICE int token(int b) const { return block * kKeys + b * kBox; }
    TILE_DEVICE bool wanted(int b) const {
        return b < kBoxes && token(b) < span.end && token(b) + kBox > span.begin;
    }
    TILE_DEVICE int slot(int b) const { return token(b) % kPageSize; }
    TILE_DEVICE bool fetched(int b) const { return row == 0 && wanted(b); }
};

// A warp walks over all blocks of all items: load(boxes of a block, boxes of the block kAhead blocks later)
template <int kAhead, class F> TILE_DEVICE void each_block(const DecodeArgs& args, const F& load) {
    const int lane = warp::lane();
    for (int slot = 0; slot < args.slots; slot++) {
        const DecodeItem item = mla_item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        const PageTable table = page_table(args, item.table, item.kv_head(), item.tail_from);
        const auto look_up = [&](int block) {
            Boxes found{span, block, item.row};
            if (found.wanted(lane)) found.page = table.page(found.token(lane) / kPageSize);
            return found;
        };
        Boxes boxes[kAhead + 2];  // a block more, whose pages are on their way
#pragma unroll
        for (int n = 0; n < kAhead + 1; n++) boxes[n] = look_up(blocks.begin + n);
        for (int block = blocks.begin; block < blocks.end; block++) {
            boxes[kAhead + 1] = look_up(block + kAhead + 1);
            load(boxes[0], boxes[kAhead]);
#pragma unroll
            for (int n = 0; n < kAhead + 1; n++) boxes[n] = boxes[n + 1];
        }
    }
}

// A warp asks for some panels of every block, each as soon as its place is free. One lane asks for everything: for
// lanes that take turns, the warp would have to meet twice per panel, which takes longer than the panel.
//
// kFetches: several items read the same rows, and the tensor cores are what is waited for. Then the first one of them
// brings the panels of so many blocks ahead to L2, which answers sooner than the memory: a place in the ring is empty
// for as long as that. And there are two such warps: one takes about 225 cycles for a panel, and the warpgroups let go
// of two at a time. Where each row is read once, the memory is what is waited for, and both would cost time.
template <int kFrom, int kTo> TILE_DEVICE void load_boxes(const DecodeArgs& args, const TensorMap& mRows) {
    Places now;
    ptx::prefetch_tensor_map(&mRows);
    each_block<kFrom == 0 ? kFetches : 0>(args, [&](const Boxes& here, const Boxes& ahead) {
        if constexpr (kFrom == 0 && kFetches > 0) {
            const int lane = warp::lane(), b = lane % kBoxes, page = ptx::shuffle(ahead.page, b);
#pragma unroll
            for (int panel = lane / kBoxes; panel < kPanels; panel += 32 / kBoxes)  // a lane for each box
                if (ahead.fetched(b))
                    ptx::prefetch_box(&mRows, panel * kPanel, ahead.slot(b), 0, page);
        }
        int pages[kBoxes], bytes = 0;
#pragma unroll
        for (int b = 0; b < kBoxes; b++) {
            pages[b] = ptx::shuffle(here.page, b);
            bytes += here.wanted(b) * kBox * kPanelRowBytes;
        }
        if (ptx::elect_one())
#pragma unroll 1
            for (int panel = kFrom; panel < kTo; panel++) {
                now.wait_free(panel);
                ptx::mbarrier_arrive_expect(now.full(panel), panel < kPanels ? bytes : 0);
                if (panel < kPanels)
#pragma unroll
                    for (int b = 0; b < kBoxes; b++)
                        if (here.wanted(b))
                            ptx::tma_load(ptx::shared_address(now.at(panel) + b * kBox * kPanelRowBytes), &mRows,
                                          now.full(panel), panel * kPanel, here.slot(b), 0, pages[b]);
            }
        ptx::sync_warp();
        now.next();
    });
}
