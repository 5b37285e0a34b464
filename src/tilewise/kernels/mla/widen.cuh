// Codes that become 16-bit values. Some warps bring rows into raw pairs of panels and do nothing else; the others
// widen, each a raw pair end to end. A warp that did both would wait, at every fence of the async proxy, for all copies
// that it has asked for, also those of pairs to come, as long as the memory takes.
//
// A raw pair is 128 bytes of every key of a block: the codes under one scale, which become two panels, or the 16-bit
// channels of one. It lies in one of kPairSlots places. Their barriers tell that it has landed, and that it was taken.
#pragma once
#include "mla/load.cuh"

constexpr int kPairBytes = 2 * kRawBytes, kRawPairs = kRawPanels / 2, kCodedPairs = kValuePanels / 2;
constexpr int kPairSlots = kSlots > 0 ? kSlots / 2 : 1;
constexpr int kWideners = kScaled ? (kLoading - kCopying) / 32 : 1;  // warps
// Barriers have parities, and tell a lap from the one before, not from the one before that. So who waits for a pair
// must know that the one before in its slot has landed. Pairs that are copied one by one land in their order, those
// that come by TMA do not: there the pair before is one that the same warp has widened. And who waits for the panels
// that a pair becomes must know that those before in their places were there: a pair is asked for when all that are
// kPairSlots before it were widened.
constexpr bool kLandBefore = kGather ? kPairSlots >= kWideners : kPairSlots % kWideners == 0;
static_assert(!kScaled || kLandBefore, "the pair before in its slot has landed");
constexpr int kWeightPlaces = kBlockPlaces > kPanels ? (kPlaces + kBlockPlaces - 1) / kBlockPlaces : 0;  // of a lap
static_assert(!kScaled || (kPlaces - kWeightPlaces) / 2 >= kPairSlots, "the panels before in their places are there");

struct RawPair {
    Turn<kPairSlots> turn;
    TILE_DEVICE uint32_t landed() const { return ptx::shared_address(kAtLanded + 8 * turn.stage); }
    TILE_DEVICE uint32_t taken() const { return ptx::shared_address(kAtTaken + 8 * turn.stage); }
    TILE_DEVICE void wait_free() const { ptx::mbarrier_wait(taken(), turn.lap ^ 1); }
    // 0: no pair comes any more
    TILE_DEVICE Shared<int> mark() const { return Shared<int>(kAtMarks + 4 * turn.stage); }
    // Where 16 bytes of a row lie, and in a panel of 16-bit values too, as TMA leaves them
    static TILE_DEVICE int place(int row, int chunk) { return row * kPanelRowBytes + (chunk ^ row % 8) * 16; }
    TILE_DEVICE int at(int place) const { return kAtRaw + turn.stage * kPairBytes + place; }
};
TILE_DEVICE int scales_at(uint32_t number, int row) {
    return kAtScales + (number % kRawScales * kKeys + row) * kScaleRow;
}
// By TMA a block's scales may land after its pairs. Those of one by one are copied before them, and told of with them.
TILE_DEVICE uint32_t scaled_barrier(uint32_t number) {
    return ptx::shared_address(kAtScaled + 8 * (number % kRawScales));
}

// ---- who brings codes -----------------------------------------------------------------------------------------------
// One warp: the scales of a block by TMA, and its raw pairs. Scales of four blocks ago are not read any more: a pair is
// asked for when all that are kPairSlots before it were taken.
TILE_DEVICE void load_code_boxes(const DecodeArgs& args, const TensorMap& mCodes, const TensorMap& mScales,
                                 const TensorMap& mRest) {
    RawPair raw;
    uint32_t number = 0;  // of the block in the life of the thread block
    each_block<kFetches>(args, [&](const Boxes& here, const Boxes& ahead) {
        if constexpr (kFetches > 0) {
            const int lane = warp::lane(), pair = lane / kBoxes, b = lane % kBoxes;
            const int page = ptx::shuffle(ahead.page, b);
            static_assert(kRawPairs * kBoxes <= 32, "a lane for each box");
            if (ahead.row == 0 && pair < kRawPairs && ahead.wanted(b)) {
                if (pair < kCodedPairs) ptx::prefetch_box(&mCodes, pair * kPanelRowBytes, ahead.slot(b), 0, page);
                else ptx::prefetch_box(&mRest, (pair - kCodedPairs) * kPanel, ahead.slot(b), 0, page);
            }
        }
        int pages[kBoxes], tokens = 0;
#pragma unroll
        for (int b = 0; b < kBoxes; b++) {
            pages[b] = ptx::shuffle(here.page, b);
            tokens += here.wanted(b) * kBox;
        }
        if (ptx::elect_one()) {
            RawPair next = raw;
#pragma unroll 1
            for (int pair = 0; pair < kRawPairs; pair++, next.turn.next()) {
                next.wait_free();
                if (pair == 0) {
                    ptx::mbarrier_arrive_expect(scaled_barrier(number), tokens * kScaleRow);
#pragma unroll
                    for (int b = 0; b < kBoxes; b++)
                        if (here.wanted(b))
                            ptx::tma_load(ptx::shared_address(scales_at(number, b * kBox)), &mScales,
                                          scaled_barrier(number), 0, here.slot(b), 0, pages[b]);
                }
                ptx::mbarrier_arrive_expect(next.landed(), tokens * kPanelRowBytes);
#pragma unroll
                for (int b = 0; b < kBoxes; b++) {
                    if (!here.wanted(b)) continue;
                    const uint32_t to = ptx::shared_address(next.at(b * kBox * kPanelRowBytes));
                    if (pair < kCodedPairs)
                        ptx::tma_load(to, &mCodes, next.landed(), pair * kPanelRowBytes, here.slot(b), 0, pages[b]);
                    else
                        ptx::tma_load(to, &mRest, next.landed(), (pair - kCodedPairs) * kPanel, here.slot(b), 0,
                                      pages[b]);
                }
            }
        }
        ptx::sync_warp();
        for (int pair = 0; pair < kRawPairs; pair++) raw.turn.next();
        number++;
    });
    if (ptx::elect_one())
#pragma unroll 1
        for (int n = 0; n < kWideners; n++, raw.turn.next()) {
            raw.wait_free();
            raw.mark()[0] = 0;
            ptx::mbarrier_arrive(raw.landed());
        }
}

// Some warps, where rows come one by one. A lane looks up where one row of a block lies, while the block before is
// copied, and copies 16 bytes of every fourth row of its warp.
TILE_DEVICE void copy_codes(const DecodeArgs& args, const MlaArgs& mla) {
    constexpr int kRowsEach = kCopying > 0 ? kKeys * 32 / kCopying : 32, kEach = kRowsEach / 4;  // of a warp, of a lane
    const int lane = warp::lane(), first = (threadIdx.x - kComputing) / 32 * kRowsEach, mine = first + lane % kRowsEach;
    const int place = RawPair::place(first + lane / 8, lane % 8);
    RawPair raw;
    uint32_t number = 0;  // of the block in the life of the thread block
    const auto tell = [&] {
        ptx::copy_async_arrive(raw.landed());
        ptx::mbarrier_arrive(raw.landed());  // for what was stored
        raw.turn.next();
    };
    for (int at = 0; at < args.slots; at++) {
        const DecodeItem item = mla_item(args, at);
        if (item.rows == 0) break;  // no item follows an empty one
        const Span span = mla_span(args, item), blocks = blocks_of(span);
        const auto look = [&](int block) { return RowPlace(args, mla, item, span, block * kKeys + mine); };
        RowPlace next = look(blocks.begin);
        for (int block = blocks.begin; block < blocks.end; block++, number++) {
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
            const auto copy = [&](const Paged& part, int pairs) {
                auto of_mine = reinterpret_cast<uint64_t>(there ? here.in(part) : part.base);
#pragma unroll 1
                for (int pair = 0; pair < pairs; pair++, of_mine += kPanelRowBytes) {
                    raw.wait_free();
#pragma unroll 1
                    for (int from = 0; from < kEach; from += 4) {
                        const uint8_t* rows[4];  // asked for together: a shuffle takes as long as all four
#pragma unroll
                        for (int n = 0; n < 4; n++)
                            rows[n] = reinterpret_cast<const uint8_t*>(
                                          ptx::shuffle(of_mine, 4 * (from + n) + lane / 8)) + lane % 8 * 16;
#pragma unroll
                        for (int n = 0; n < 4; n++) {
                            // Four rows further the fourth chunk from here is in its place.
                            const int row = 4 * (from + n), to = (place ^ n % 2 * 64) + row * kPanelRowBytes;
                            ptx::copy_async_16(ptx::shared_address(raw.at(to)), rows[n],
                                               exist >> (row + lane / 8) & 1 ? 16 : 0);
                        }
                    }
                    tell();
                }
            };
            copy(args.k, kCodedPairs);
            copy(args.v, kRawPairs - kCodedPairs);
        }
    }
#pragma unroll 1
    for (int n = 0; n < kWideners; n++) {
        raw.wait_free();
        if (threadIdx.x == kComputing) raw.mark()[0] = 0;
        tell();
    }
    ptx::copy_async_wait<0>();
}

// ---- who widens them ------------------------------------------------------------------------------------------------
// The other warps: of all raw pairs, each has every kWideners-th.
struct Widener {
    RawPair raw;
    Places to;  // of the pair's block
    int pair = 0;
    uint32_t number = 0;  // of the block in the life of the thread block

    TILE_DEVICE void skip(int pairs) {
        for (int n = 0; n < pairs; n++) {
            raw.turn.next();
            if (++pair == kRawPairs) {
                pair = 0;
                number++;
                to.next();
            }
        }
    }
    // Eight rows of a lane's column at a time, so that neither loads nor stores meet in a bank. kCoded: into two panels
    template <bool kCoded> TILE_DEVICE void widen(int lane, int panel) const {
        const int row = lane % 8, from = RawPair::place(row, lane / 8), low = RawPair::place(row, lane / 8 * 2);
#pragma unroll(kCoded ? 2 : 4)
        for (int eight = 0; eight < kKeys / 8; eight++) {
            const int rows = eight * kEightBytes;
            Vector16 x[2];
#pragma unroll
            for (int half = 0; half < 2; half++) x[half] = Shared<Vector16>(raw.at(rows + (from ^ half * 64)))[0];
            const float scale = kCoded ? float(Shared<float>(scales_at(number, eight * 8 + row))[pair]) : 1.0f;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if constexpr (kCoded) {
                    Vector16 wide[2];
                    widen_codes(wide, x[half], scale);
                    Shared<Vector16>(to.at(panel + half) + rows + low)[0] = wide[0];
                    Shared<Vector16>(to.at(panel + half) + rows + (low ^ 16))[0] = wide[1];
                } else {
                    Shared<Vector16>(to.at(panel) + rows + (from ^ half * 64))[0] = x[half];
                }
            }
        }
    }
    TILE_DEVICE void run() {
        const int lane = warp::lane();
        skip((threadIdx.x - kComputing - kCopying) / 32);
        while (true) {
            ptx::mbarrier_wait(raw.landed(), raw.turn.lap);
            if (ptx::any(raw.mark()[0] == 0)) break;
            if (!kGather) ptx::mbarrier_wait(scaled_barrier(number), number / kRawScales & 1);
            const bool coded = pair < kCodedPairs, weights = kBlockPlaces > kPanels && pair == kRawPairs - 1;
            const int panel = coded ? 2 * pair : kValuePanels + pair - kCodedPairs;
            to.wait_free(panel);
            if (coded) to.wait_free(panel + 1);
            if (weights) to.wait_free(kWeights);
            if (coded) widen<true>(lane, panel);
            else widen<false>(lane, panel);
            ptx::fence_async_proxy();
            ptx::sync_warp();
            if (ptx::elect_one()) {
                ptx::mbarrier_arrive(to.full(panel));
                if (coded) ptx::mbarrier_arrive(to.full(panel + 1));
                if (weights) ptx::mbarrier_arrive(to.full(kWeights));
                ptx::mbarrier_arrive(raw.taken());
            }
            skip(kWideners);
        }
    }
};
