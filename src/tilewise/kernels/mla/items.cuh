// What is looked up of an item before it is computed, load after load that wait for each other: its words, what its
// rows see, where their queries lie and where their results go. kLooksAhead: a warp that does not load does it while
// the item before is computed. Whoever includes this has included a layout of shared memory.
#pragma once
#include "mla/work.cuh"

// Words of a table after those of the item
enum TableWord { kAllRowsWord = kItemWords, kBeginWord, kEndWord, kWholeFromWord, kWholeToWord, kWordsUsed };
static_assert(kWordsUsed <= kTableWords, "room");

struct Table {
    uint32_t at;
    TILE_DEVICE explicit Table(int slot) : at(kAtTables + (kLooksAhead ? slot % 2 : 0) * kTableBytes) {}
    TILE_DEVICE Shared<int> words() const { return Shared<int>(at); }
    TILE_DEVICE Shared<Visible> seen() const { return Shared<Visible>(at + 4 * kTableWords); }
    TILE_DEVICE Shared<Target> target() const { return Shared<Target>(at + 4 * kTableWords + 8 * kRows); }
    TILE_DEVICE Shared<int64_t> queries() const {
        return Shared<int64_t>(!kLooksAhead ? kAtFactors : at + 4 * kTableWords + 16 * kRows);
    }
    // The item, with the rows that this block computes
    TILE_DEVICE DecodeItem item() const {
        const Shared<int> w = words();
        return {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15]};
    }
    TILE_DEVICE Span span() const { return {words()[kBeginWord], words()[kEndWord]}; }

    // By a warp. True if there is an item.
    TILE_DEVICE bool fill(const DecodeArgs& args, int slot) const {
        const int all_rows = mla_item(args, slot).rows, lane = ptx::just_in_time(warp::lane());
        if (lane == 0) words()[kAllRowsWord] = all_rows;
        if (all_rows == 0) return false;
        const DecodeItem item = mla_item(args, slot);
        const Span span = mla_span(args, item);
        int from = span.begin, to = span.end;
#pragma unroll 1
        for (int n = lane; n < kRows; n += 32) {
            Visible row_sees{span.begin, span.end - span.begin};
            int64_t goes = -1, query = 0;
            if (n < item.rows) {
                const DecodeRow row = row_of(args, item, n);
                const int64_t caller = caller_of(args, item, row);
                query = caller * args.q_strides.batch + row.token * args.q_strides.row + row.head * args.q_strides.head;
                const int length = Global<const int>{args.lengths}[row.sequence];
                const States states = states_of(args, row.sequence);
                if (!(item.is(kAllSee) && sees_back_to_first(args)))
                    row_sees = seen_by(args, row, length, span);
                // An item that its sequence does not reach has no state. If there is one state alone, it is the result.
                if (item.state() >= states.count) goes = -1;
                else if (states.count == 1)
                    goes = 2 * (caller * args.o_strides.batch + row.token * args.o_strides.row +
                                row.head * args.o_strides.head);
                else
                    goes = 2 * state_row(args, states, item.kv_head(), item.state(), row.row) * kValueDim + 1;
            }
            from = row_sees.first > from ? row_sees.first : from;
            to = row_sees.first + row_sees.count < to ? row_sees.first + row_sees.count : to;
            seen()[n] = row_sees;
            target()[n] = Target{goes};
            queries()[n] = query;
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) {
            const int other_from = ptx::shuffle_xor(from, mask), other_to = ptx::shuffle_xor(to, mask);
            from = other_from > from ? other_from : from;
            to = other_to < to ? other_to : to;
        }
        if (lane == 0) {
            const Shared<int> w = words();
            w[kSequenceWord] = item.sequence, w[kRowWord] = item.row, w[kRowsWord] = item.rows;
            w[kCallerHeadWord] = item.caller_head, w[kStartWord] = item.start, w[kStateFoldWord] = item.state_fold;
            w[kBeginWord] = span.begin, w[kEndWord] = span.end, w[kWholeFromWord] = from, w[kWholeToWord] = to;
        }
        return true;
    }
};

// One warp
TILE_DEVICE void look_ahead(const DecodeArgs& args) {
    for (int slot = 0; slot < args.slots; slot++) {
        if (slot >= 2) ptx::barrier_sync(kFreeBarriers + slot % 2, kComputing + 32);
        const bool more = Table(slot).fill(args, slot);
        ptx::barrier_arrive(kFilledBarriers + slot % 2, kComputing + 32);
        if (!more) break;  // no item follows an empty one
    }
}
