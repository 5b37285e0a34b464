// How slices of the cache come into shared memory by cp.async. All threads copy: eight of them have a row, 16 bytes of
// every 128 each. A thread widens the codes that it has copied itself.
#pragma once
#include "mla/mma_layout.cuh"

struct Copies {
    static constexpr int kStep = kComputing / 8, kEach = kSlice / kStep;  // rows that are copied at once; of a thread
    static_assert(kSlice % kStep == 0, "every thread has as many rows");
    const DecodeArgs& args;
    const MlaArgs& mla;
    DecodeItem item;
    Span span{0, 0};
    int token = 0;        // the first of the slice that is asked for next,
    uint32_t number = 0;  // and its number in the life of the thread block
    RowPlace places[kEach];  // of its rows: looked up before the slice before is waited for

    TILE_DEVICE Copies(const DecodeArgs& a, const MlaArgs& m) : args(a), mla(m) {}
    static TILE_DEVICE int row(int n) { return n * kStep + threadIdx.x / 8; }
    static TILE_DEVICE int chunk() { return threadIdx.x % 8; }
    static TILE_DEVICE uint32_t raw_at(uint32_t number, int row) {
        return kAtRaw + number % kStages * kRawBytes + row * kRawRow;
    }

    // Asks for the first slices of an item, if there is one
    TILE_DEVICE void begin(int slot) {
        item = mla_item(args, slot);
        if (item.rows == 0) return;
        span = mla_span(args, item);
        token = span.begin / kSlice * kSlice;
        look();
#pragma unroll 1
        for (int n = 0; n < kFlight; n++) ask();
    }
    // Asks for the next slice, if there is one: a group of copies either way, so that groups can be counted
    TILE_DEVICE void ask() {
        if (token < span.end) {
#pragma unroll
            for (int n = 0; n < kEach; n++) {
                const bool there = places[n].page >= 0;
                if (kChosen && chunk() == 0) sThere(number)[row(n)] = there;
                if constexpr (kScaled) copy_codes(places[n], row(n), there);
                else copy(slice_at(number).address(row(n), chunk()), args.k, places[n], there, kPanels);
            }
            token += kSlice;
            number++;
            look();
        }
        ptx::copy_async_commit();
    }
    // Until slice `of` has arrived and the one before it has been used by all. Then the next one is asked for.
    TILE_DEVICE void arrive(uint32_t of) {
        ptx::copy_async_wait<kFlight - 1>();
        ptx::barrier_sync(kAllBarrier, kComputing);
        if constexpr (kScaled) {
            widen(of);
            ptx::barrier_sync(kAllBarrier, kComputing);
        }
        ask();
    }

  private:
    TILE_DEVICE void look() {
#pragma unroll
        for (int n = 0; n < kEach; n++) places[n] = RowPlace(args, mla, item, span, token + row(n));
    }
    // This thread's 16 bytes of each of the row's spans of 128. What is no row of the span becomes zeros.
    TILE_DEVICE void copy(uint32_t to, const Paged& part, const RowPlace& place, bool there, int spans) const {
        // Of zero bytes nothing is read, but the address must be one.
        const auto* from = (there ? place.in(part) : static_cast<const uint8_t*>(part.base)) + 16 * chunk();
#pragma unroll
        for (int n = 0; n < spans; n++) ptx::copy_async_16(to + 128 * n, from + 128 * n, there ? 16 : 0);
    }
    // args.k: codes; args.k_scale; args.v: the 16-bit channels after those of codes
    TILE_DEVICE void copy_codes(const RowPlace& place, int row, bool there) const {
        const uint32_t to = ptx::shared_address(raw_at(number, row)) + 16 * chunk();
        copy(to, args.k, place, there, kValueDim / 128);
        copy(to + kAtRest, args.v, place, there, (kQueryDim - kValueDim) / kPanel);
        if (chunk() == 0)
            ptx::copy_async_16(to + kAtScales, there ? place.in(args.k_scale) : args.k_scale.base, there ? 16 : 0);
    }
    TILE_DEVICE void widen(uint32_t of) const {
        const Slice to = slice_at(of);
#pragma unroll
        for (int n = 0; n < kEach; n++) {
            const uint32_t from = raw_at(of, row(n));
            const Shared<Vector16> raw(from + 16 * chunk());
#pragma unroll 2
            for (int i = 0; i < kValueDim / 128; i++) {
                Vector16 wide[2];
                widen_codes(wide, raw[8 * i], Shared<float>(from + kAtScales)[i]);
                to.chunk(row(n), 16 * i + 2 * chunk()) = wide[0];
                to.chunk(row(n), 16 * i + 2 * chunk() + 1) = wide[1];
            }
            if constexpr (kQueryDim > kValueDim)
                to.chunk(row(n), kValueDim / 8 + chunk()) = Vector16(raw[kAtRest / 16]);
        }
    }
};
