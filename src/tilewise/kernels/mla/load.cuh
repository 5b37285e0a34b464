// How rows of the cache come into the ring: by TMA, a box per panel and page, or row by row where a box does not lie in
// one page.
#pragma once
#include "mla/layout.cuh"
#include "mla/rows.cuh"

constexpr int kBox = kPageSize % 64 == 0 ? 64 : kPageSize % 32 == 0 ? 32 : 16;  // tokens per copy
constexpr int kBoxes = kKeys / kBox;
static_assert(kGather || kPageSize % 16 == 0, "a box lies in one page");

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
                const int row = n * kStep + first;
                const RowPlace place(args, mla, item, span, block * kKeys + row);
                if (kChosen && c == 0) sThere(number)[row] = place.page >= 0;
                from[n] = place.page < 0 ? nullptr : place.in(args.k) + 16 * c;
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
// page number may be anything. One lane asks for everything: for lanes that take turns, the warp would have to meet
// twice per panel, which takes longer than the panel.
TILE_DEVICE void load_boxes(const DecodeArgs& args, const TensorMap& mRows) {
    Places now;
    const int lane = warp::lane();
    ptx::prefetch_tensor_map(&mRows);
    for (int slot = 0; slot < args.slots; slot++) {
        const DecodeItem item = mla_item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        const PageTable table = page_table(args, item.table, item.kv_head(), item.tail_from);
        const auto wanted = [&](int block, int box) {
            const int token = block * kKeys + box * kBox;
            return box < kBoxes && token < span.end && token + kBox > span.begin;
        };
        const auto page_of = [&](int block) {
            const bool mine = block < blocks.end && wanted(block, lane);
            return mine ? table.page((block * kKeys + lane * kBox) / kPageSize) : 0;
        };
        int page = page_of(blocks.begin);
        for (int block = blocks.begin; block < blocks.end; block++, now.next()) {
            int pages[kBoxes], boxes = 0;
#pragma unroll
            for (int b = 0; b < kBoxes; b++) {
                pages[b] = ptx::shuffle(page, b);
                boxes += wanted(block, b);
            }
            page = page_of(block + 1);
            if (ptx::elect_one())
#pragma unroll 1
                for (int panel = 0; panel < kBlockPlaces; panel++) {
                    now.wait_free(panel);
                    const uint32_t full = now.full(panel);
                    ptx::mbarrier_arrive_expect(full, panel < kPanels ? boxes * kBox * kPanelRowBytes : 0);
                    if (panel < kPanels)
#pragma unroll
                        for (int b = 0; b < kBoxes; b++)
                            if (wanted(block, b))
                                ptx::tma_load(ptx::shared_address(now.at(panel) + b * kBox * kPanelRowBytes), &mRows,
                                              full, panel * kPanel, (block * kKeys + b * kBox) % kPageSize,
                                              item.kv_head(), pages[b]);
                }
            ptx::sync_warp();
        }
    }
}

// ---- codes that become 16-bit values --------------------------------------------------------------------------------
// kLoading threads. Each has 16 bytes of one or two rows of every raw panel, and widens those that it copied kSlots − 2
// raw panels ago: two raw panels at a time, which are 128 channels of codes under one scale, or one panel of the
// others.
// args.k: codes; args.k_scale; args.v: the 16-bit channels after those of codes.
TILE_DEVICE void load_codes(const DecodeArgs& args, const MlaArgs& mla) {
    constexpr int kStep = kLoading / 4, kEach = kKeys / kStep, kRawPairs = kRawPanels / 2, kPairSlots = kSlots / 2;
    const int thread = threadIdx.x - kComputing, first = thread / 4, c = thread % 4;
    const auto raw_at = [&](int slot, int half, int n) {
        return kAtRaw + (2 * slot + half) * kRawBytes + (n * kLoading + thread) * 16;
    };
    const auto scales_at = [](uint32_t number, int row) {
        return kAtScales + (number % kRawScales * kKeys + row) * kScaleRow;
    };
    Places to;
    uint32_t number = 0, number_widened = 0;  // blocks that were asked for, that were widened
    int slot = 0, slot_widened = 0, pair_widened = 0, ahead = 0;
    const auto put = [&](int panel, int row, int chunk, const Vector16& x) {
        Shared<Vector16>(to.at(panel) + row * kPanelRowBytes + (chunk ^ row % 8) * 16)[0] = x;
    };
    const auto widen = [&] {
        if (pair_widened == 0) ptx::barrier_sync(kLoadBarrier, kLoading);  // the scales of other threads are there
        const bool coded = 2 * pair_widened < kValuePanels;
        const int panel = coded ? 2 * pair_widened : kValuePanels + pair_widened - kValuePanels / 2;
        to.wait_free(panel);
        if (coded) to.wait_free(panel + 1);
#pragma unroll(kEach == 1 ? 2 : 1)
        for (int i = 0; i < 2 * kEach; i++) {
            const int n = i / 2, half = i % 2, row = n * kStep + first;
            const Vector16 x = Shared<Vector16>(raw_at(slot_widened, half, n))[0];
            if (coded) {
                Vector16 wide[2];
                widen_codes(wide, x, Shared<float>(scales_at(number_widened, row))[pair_widened]);
                put(panel + half, row, 2 * c, wide[0]);
                put(panel + half, row, 2 * c + 1, wide[1]);
            } else {
                put(panel, row, half * 4 + c, x);
            }
        }
        ptx::fence_async_proxy();
        ptx::mbarrier_arrive(to.full(panel));
        if (coded) ptx::mbarrier_arrive(to.full(panel + 1));
        slot_widened = slot_widened + 1 == kPairSlots ? 0 : slot_widened + 1;
        if (++pair_widened == kRawPairs) {
            if (kBlockPlaces > kPanels) {
                to.wait_free(kWeights);
                ptx::mbarrier_arrive(to.full(kWeights));
            }
            pair_widened = 0;
            number_widened++;
            to.next();
        }
        ahead--;
    };
    for (int at = 0; at < args.slots; at++) {
        const DecodeItem item = mla_item(args, at);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        for (int block = blocks.begin; block < blocks.end; block++, number++) {
            RowPlace places[kEach];
#pragma unroll
            for (int n = 0; n < kEach; n++)
                places[n] = RowPlace(args, mla, item, span, block * kKeys + n * kStep + first);
            if (c == 0)
#pragma unroll
                for (int n = 0; n < kEach; n++) {
                    const RowPlace& place = places[n];
                    const int row = n * kStep + first;
                    if (kChosen) sThere(number)[row] = place.page >= 0;
                    ptx::copy_async_16(ptx::shared_address(scales_at(number, row)),
                                       place.page < 0 ? args.k_scale.base : place.in(args.k_scale),
                                       place.page < 0 ? 0 : 16);
                }
#pragma unroll 1
            for (int pair = 0; pair < kRawPairs; pair++) {
#pragma unroll
                for (int n = 0; n < kEach; n++) {
                    const RowPlace& place = places[n];
                    // Of zero bytes nothing is read, but the address must be one.
                    const uint8_t* from = 2 * pair < kValuePanels
                                              ? place.in(args.k) + pair * kPanelRowBytes
                                              : place.in(args.v) + (pair - kValuePanels / 2) * kPanelRowBytes;
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        ptx::copy_async_16(ptx::shared_address(raw_at(slot, half, n)),
                                           place.page < 0 ? args.k.base : from + half * kPanel + 16 * c,
                                           place.page < 0 ? 0 : 16);
                }
                ptx::copy_async_commit();
                slot = slot + 1 == kPairSlots ? 0 : slot + 1;
                if (++ahead == kPairSlots) {
                    ptx::copy_async_wait<(kSlots > 0 ? kPairSlots - 1 : 0)>();
                    widen();
                }
            }
        }
    }
    ptx::copy_async_wait<0>();
    while (ahead > 0) widen();
}
