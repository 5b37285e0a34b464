// Codes that become 16-bit values, by warps of their own (kApart). Some warps copy rows into raw pairs of panels and do
// nothing else; the others widen, each a raw pair end to end. Of a warp that does both, every fence of the async proxy
// seems to wait for all copies that it has asked for, also those of pairs to come, as long as the memory takes.
//
// A raw pair is 128 bytes of every key of a block: the codes under one scale, which become two panels, or the 16-bit
// channels of one. It lies in one of kPairSlots places. Their barriers tell that it has landed, and that it was taken.
#pragma once
#include "mla/load.cuh"
#include "tile/ptx_copies.cuh"

constexpr int kPairBytes = 2 * kRawBytes, kRawPairs = kRawPanels / 2, kCodedPairs = kValuePanels / 2;
constexpr int kPairSlots = kSlots > 0 ? kSlots / 2 : 1;
constexpr int kWideners = kApart ? (kLoading - kCopying) / 32 : 1;  // warps
// Barriers have parities, and tell a lap from the one before, not from the one before that. A pair lands after all
// pairs before it, and is asked for when all that are kPairSlots before it were widened. So a warp that waits for its
// next pair, or for the panels that it becomes, must not be further ahead than that of who is last.
static_assert(!kApart || kPairSlots >= kWideners, "the pair before in its slot has landed: this warp had a later one");
constexpr int kWeightPlaces = kBlockPlaces > kPanels ? (kPlaces + kBlockPlaces - 1) / kBlockPlaces : 0;  // of a lap
static_assert(!kApart || (kPlaces - kWeightPlaces) / 2 >= kPairSlots, "the panels before in their places are there");

struct RawPair {
    Turn<kPairSlots> turn;
    TILE_DEVICE uint32_t landed() const { return ptx::shared_address(kAtLanded + 8 * turn.stage); }
    TILE_DEVICE uint32_t taken() const { return ptx::shared_address(kAtTaken + 8 * turn.stage); }
    // 0: no pair comes any more
    TILE_DEVICE Shared<int> mark() const { return Shared<int>(kAtMarks + 4 * turn.stage); }
    // Where 16 bytes of a row lie, and in a panel of 16-bit values too
    static TILE_DEVICE int place(int row, int chunk) { return row * kPanelRowBytes + (chunk ^ row % 8) * 16; }
    TILE_DEVICE int at(int place) const { return kAtRaw + turn.stage * kPairBytes + place; }
};
TILE_DEVICE int scales_at(uint32_t number, int row) {
    return kAtScales + (number % kRawScales * kKeys + row) * kScaleRow;
}

// Two warps. A lane looks up where one row of a block lies, while the block before is copied, and copies 16 bytes of
// every fourth row of its warp.
TILE_DEVICE void copy_codes(const DecodeArgs& args, const MlaArgs& mla) {
    constexpr int kRowsEach = 32, kEach = kRowsEach / 4;  // rows of a warp, of a lane
    const int lane = warp::lane(), first = (threadIdx.x - kComputing) / 32 * kRowsEach;
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
        const auto look = [&](int block) {
            return RowPlace(args, mla, item, span, block * kKeys + first + lane);
        };
        RowPlace next = look(blocks.begin);
        for (int block = blocks.begin; block < blocks.end; block++, number++) {
            const RowPlace here = next;
            next = look(block + 1);  // beyond the span's end there is nothing to be found
            const bool there = here.page >= 0;
            if (kChosen) sThere(number)[first + lane] = there;
            // Of zero bytes nothing is read, but the address must be one.
            ptx::copy_async_16(ptx::shared_address(scales_at(number, first + lane)),
                               there ? here.in(args.k_scale) : args.k_scale.base, there ? 16 : 0);
            const uint32_t exist = ptx::ballot(there);
            const auto copy = [&](const Paged& part, int pairs) {
                auto mine = reinterpret_cast<uint64_t>(there ? here.in(part) : part.base);
#pragma unroll 1
                for (int pair = 0; pair < pairs; pair++, mine += kPanelRowBytes) {
                    ptx::mbarrier_wait(raw.taken(), raw.turn.lap ^ 1);
#pragma unroll 4
                    for (int n = 0; n < kEach; n++) {  // four rows further the fourth chunk from here is in its place
                        const int row = 4 * n + lane / 8, to = (place ^ n % 2 * 64) + 4 * n * kPanelRowBytes;
                        const auto* from = reinterpret_cast<const uint8_t*>(ptx::shuffle(mine, row)) + lane % 8 * 16;
                        ptx::copy_async_16(ptx::shared_address(raw.at(to)), from, exist >> row & 1 ? 16 : 0);
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
        ptx::mbarrier_wait(raw.taken(), raw.turn.lap ^ 1);
        if (threadIdx.x == kComputing) raw.mark()[0] = 0;
        tell();
    }
    ptx::copy_async_wait<0>();
}

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
#pragma unroll 1
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

TILE_DEVICE void load_codes_apart(const DecodeArgs& args, const MlaArgs& mla) {
    if (threadIdx.x < kComputing + kCopying) copy_codes(args, mla);
    else Widener().run();
}
