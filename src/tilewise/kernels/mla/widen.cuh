// Codes that become 16-bit values. Four warps bring rows, four others widen them.
//
// A pair of panels of codes is 128 bytes of every key of a block, under one scale per key, as many bytes as one panel
// of 16-bit values. It comes to the place of the first of its two panels in the ring. A warp that widens reads all
// codes of its rows to registers, and writes the rows of both panels, of which one has the codes' place. So codes need
// no room of their own, and as many are on their way as places are free. The channels that are 16 bits wide come to
// their panel as they are.
//
// Barriers of their own tell that pairs have landed. Who asked for them knew both panels' places to be free.
#pragma once
#include "mla/load.cuh"

using Landing = Turn<kWidens ? kLandings : 1>;  // of the next pair
TILE_DEVICE uint32_t landed(const Landing& at) { return ptx::shared_address(kAtLanded + 8 * at.stage); }
// Where 16 bytes of a row lie in a panel, or in a pair of panels of codes, as TMA leaves them
TILE_DEVICE int place_of(int row, int chunk) { return row * kPanelRowBytes + (chunk ^ row % 8) * 16; }

// ---- who brings codes -----------------------------------------------------------------------------------------------
// One warp: the scales of a block by TMA, its codes, and its other channels
TILE_DEVICE void load_code_boxes(const DecodeArgs& args, const TensorMap& mCodes, const TensorMap& mScales,
                                 const TensorMap& mRest) {
    Places now;
    Landing landing;
    uint32_t number = 0;  // of the block in the life of the thread block
    each_block<kFetches>(args, [&](const Boxes& here, const Boxes& ahead) {
        if constexpr (kFetches > 0) {
            constexpr int kColumns = kCodedPairs + kPanels - kValuePanels;
            static_assert(kColumns * kBoxes <= 32, "a lane for each box");
            const int lane = warp::lane(), column = lane / kBoxes, b = lane % kBoxes;
            const int page = ptx::shuffle(ahead.page, b);
            if (column < kColumns && ahead.fetched(b)) {
                if (column < kCodedPairs)
                    ptx::prefetch_box(&mCodes, column * kPanelRowBytes, ahead.slot(b), 0, page);
                else ptx::prefetch_box(&mRest, (column - kCodedPairs) * kPanel, ahead.slot(b), 0, page);
            }
        }
        int pages[kBoxes], tokens = 0;
#pragma unroll
        for (int b = 0; b < kBoxes; b++) {
            pages[b] = ptx::shuffle(here.page, b);
            tokens += here.wanted(b) * kBox;
        }
        const auto bring = [&](const TensorMap& map, uint32_t to, int row_bytes, uint32_t barrier, int column) {
            ptx::mbarrier_arrive_expect(barrier, tokens * row_bytes);
#pragma unroll
            for (int b = 0; b < kBoxes; b++)
                if (here.wanted(b))
                    ptx::tma_load(ptx::shared_address(to + b * kBox * row_bytes), &map, barrier, column, here.slot(b),
                                  0, pages[b]);
        };
        if (ptx::elect_one()) {
            Landing next = landing;
            // Those of kScaleBlocks ago are not read any more: all of that block was widened, or used, or its places
            // were not free.
            bring(mScales, scales_at(number, 0), kScaleRow, scaled_barrier(number), 0);
#pragma unroll 1
            for (int panel = 0; panel < kBlockPlaces; panel += kWidens && panel < kValuePanels ? 2 : 1) {
                const int rest = panel - (kRaw ? kCodedPairs : kValuePanels);  // among those that are no codes
                now.wait_free(panel);
                if (kRaw && rest < 0) {
                    bring(mCodes, now.at(panel), kPanelRowBytes, now.full(panel), panel * kPanelRowBytes);
                } else if (rest < 0) {
                    now.wait_free(panel + 1);
                    bring(mCodes, now.at(panel), kPanelRowBytes, landed(next), panel * kPanel);
                    next.next();
                } else {
#pragma unroll
                    for (int n = 1; n < kTellers; n++) ptx::mbarrier_arrive(now.full(panel));
                    if (rest < kPanels - kValuePanels)
                        bring(mRest, now.at(panel), kPanelRowBytes, now.full(panel), rest * kPanel);
                    else ptx::mbarrier_arrive(now.full(panel));
                }
            }
        }
        ptx::sync_warp();
        for (int pair = 0; kWidens && pair < kCodedPairs; pair++) landing.next();
        now.next();
        number++;
    });
}

// Four warps, where rows come one by one. A lane looks up where one row of a block lies, while the block before is
// copied, and copies 16 bytes of every fourth row of its warp.
TILE_DEVICE void copy_codes(const DecodeArgs& args, const MlaArgs& mla) {
    constexpr int kRowsEach = kKeys / 4, kEach = kRowsEach / 4;  // of a warp, of a lane
    constexpr int kCodes = kRaw ? kCodedPairs : kValuePanels;  // places of codes, or of what they become
    const int lane = warp::lane(), first = (threadIdx.x - kComputing) / 32 * kRowsEach, mine = first + lane % kRowsEach;
    const int place = place_of(first + lane / 8, lane % 8);
    Places now;
    Landing landing;
    uint32_t number = 0;  // of the block in the life of the thread block
    for (int at = 0; at < args.slots; at++) {
        const DecodeItem item = mla_item(args, at);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        const auto look = [&](int block) { return RowPlace(args, mla, item, span, block * kKeys + mine); };
        RowPlace next = look(blocks.begin);
        for (int block = blocks.begin; block < blocks.end; block++, number++, now.next()) {
            const RowPlace here = next;
            next = look(block + 1);  // beyond the span's end there is nothing to be found
            const bool there = here.page >= 0;
            if (lane < kRowsEach) {
                if (kChosen) sThere(number)[mine] = there;
                // Of zero bytes nothing is read, but the address must be one.
                ptx::copy_async_16(ptx::shared_address(scales_at(number, mine)),
                                   there ? here.in(args.k_scale) : args.k_scale.base, there ? 16 : 0);
            }
            const uint32_t exist = ptx::ballot(there);
            const auto copy = [&](uint64_t of_mine, int panel) {
                const uint8_t* rows[kEach];  // asked for together: a shuffle takes as long as all of them
#pragma unroll
                for (int n = 0; n < kEach; n++)
                    rows[n] = reinterpret_cast<const uint8_t*>(ptx::shuffle(of_mine, 4 * n + lane / 8)) + lane % 8 * 16;
#pragma unroll
                for (int n = 0; n < kEach; n++)  // four rows further the fourth chunk from here is in its place
                    ptx::copy_async_16(
                        ptx::shared_address(now.at(panel) + (place ^ n % 2 * 64) + 4 * n * kPanelRowBytes), rows[n],
                        exist >> (4 * n + lane / 8) & 1 ? 16 : 0);
            };
            auto of_mine = reinterpret_cast<uint64_t>(there ? here.in(args.k) : args.k.base);
            const auto tell = [&](uint32_t barrier, bool more) {
                ptx::copy_async_arrive(barrier);
                if (more) ptx::mbarrier_arrive(barrier);  // for what was stored
            };
#pragma unroll 1
            for (int panel = 0; panel < kCodes; panel += kWidens ? 2 : 1, of_mine += kPanelRowBytes) {
                now.wait_free(panel);
                if (kWidens) now.wait_free(panel + 1);
                copy(of_mine, panel);
                tell(kWidens ? landed(landing) : now.full(panel), true);
                if (kWidens) landing.next();
            }
            of_mine = reinterpret_cast<uint64_t>(there ? here.in(args.v) : args.v.base);
#pragma unroll 1
            for (int panel = kCodes; panel < kBlockPlaces; panel++, of_mine += kPanelRowBytes) {
                now.wait_free(panel);
                if (panel < kBlockPlaces - kPlacesOfWeights) {
                    copy(of_mine, panel);
                    tell(now.full(panel), kRaw);
                } else {
                    ptx::mbarrier_arrive(now.full(panel));
                }
            }
        }
    }
    ptx::copy_async_wait<0>();
}

// ---- who widens them ------------------------------------------------------------------------------------------------
// Four warps, of which each widens sixteen rows for itself. Eight rows of a lane's column at a time, so that neither
// loads nor stores meet in a bank.
TILE_DEVICE void widen(const DecodeArgs& args) {
    const int lane = warp::lane(), first = (threadIdx.x - kComputing - kBringing) / 32 * 16, row = lane % 8;
    const int from = place_of(first + row, lane / 8), low = place_of(first + row, lane / 8 * 2);
    Places now;
    Landing landing;
    uint32_t number = 0;  // of the block in the life of the thread block
    for (int slot = 0; slot < args.slots; slot++) {
        const DecodeItem item = mla_item(args, slot);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span blocks = blocks_of(mla_span(args, item));
#pragma unroll 1
        for (int block = blocks.begin; block < blocks.end; block++, number++, now.next()) {
            if (!kGather) wait_for_scales(number);
#pragma unroll 1
            for (int panel = 0; panel < kValuePanels; panel += 2, landing.next()) {
                ptx::mbarrier_wait(landed(landing), landing.lap);
                Vector16 x[2][2];  // of two times eight rows, two chunks
                float scale[2];
#pragma unroll
                for (int eight = 0; eight < 2; eight++) {
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        x[eight][half] =
                            Shared<Vector16>(now.at(panel) + eight * kEightBytes + (from ^ half * 64))[0];
                    scale[eight] = Shared<float>(scales_at(number, first + 8 * eight + row))[panel / 2];
                }
                ptx::sync_warp();  // all codes are read of the rows whose place these take
#pragma unroll
                for (int eight = 0; eight < 2; eight++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        Vector16 wide[2];
                        widen_codes(wide, x[eight][half], scale[eight]);
                        const int to = now.at(panel + half) + eight * kEightBytes;
                        Shared<Vector16>(to + low)[0] = wide[0];
                        Shared<Vector16>(to + (low ^ 16))[0] = wide[1];
                    }
                ptx::fence_async_proxy();
                ptx::sync_warp();
                if (kGather || ptx::elect_one()) {
                    ptx::mbarrier_arrive(now.full(panel));
                    ptx::mbarrier_arrive(now.full(panel + 1));
                }
            }
        }
    }
}
