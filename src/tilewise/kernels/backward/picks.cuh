// Which tiles of queries and keys a block schedule and a mask function leave, and which elements of those. The backward
// by mma.sync asks when it walks over the tiles: nothing is listed before.
#pragma once
#include "backward/arguments.cuh"

// A schedule's bits as common/schedule.cuh says; tilewise.gpu.backward_abi has the mirror.
struct Picks {
    const uint32_t *kept, *whole;  // blocks that are kept, and those in which the mask function is not asked; null for
                                   // all, and for none
    const int* lengths_k;          // (sequences or 1, blocks): valid keys of each block; null: all
    int64_t kept_batch;            // words from one sequence's bits to the next, 0 if they share them
    int64_t lengths_k_batch;
    int kept_head, kept_row, q_blocks, k_blocks;
    int left;                      // where tokens have positions: how far back the window reaches among them
    Divisor heads_each;            // query heads per head of the schedule
    Divisor block_q, block_k;

    TILE_DEVICE const uint32_t* plane_of(const uint32_t* plane, int sequence, int head) const {
        return plane + (sequence * kept_batch + int64_t(heads_each.quotient(head)) * kept_head);
    }
    // Is block (row, column) in a plane?
    TILE_DEVICE bool has(const uint32_t* plane, int row, int column) const {
        if (row >= q_blocks || column >= k_blocks) return false;
        return Global<const uint32_t>{plane}[int64_t(row) * kept_row + column / 32] >> column % 32 & 1;
    }
    TILE_DEVICE int length_of(int sequence, int column) const {
        return Global<const int>{lengths_k}[sequence * lengths_k_batch + column];
    }
};

enum Kind { kNone = 0, kSome = 1, kAll = 2 };

// How much is left of queries [q0, q1] × keys [k0, k1] of a sequence's head, windows and ends apart. kNone and kAll are
// certain. Each lane may ask of others.
TILE_DEVICE Kind kind_of(const Picks& picks, const Function& function, int sequence, int head, int q0, int q1, int k0,
                         int k1) {
    bool some = true, all = true, asked = true;
    if (picks.kept) {
        const uint32_t* kept = picks.plane_of(picks.kept, sequence, head);
        const uint32_t* whole = picks.whole ? picks.plane_of(picks.whole, sequence, head) : nullptr;
        some = asked = false;
        for (int row = picks.block_q.quotient(q0); row <= picks.block_q.quotient(q1); row++)
            for (int column = picks.block_k.quotient(k0); column <= picks.block_k.quotient(k1); column++) {
                const bool is = picks.has(kept, row, column);
                some = some || is;
                all = all && is;
                if (is && picks.lengths_k)
                    all = all && picks.length_of(sequence, column) >= int(picks.block_k.divisor);
                asked = asked || (is && !(whole && picks.has(whole, row, column)));
            }
    }
    if (Function::kMask && some && asked) {
        const Interval seen = function.seen({double(sequence), double(sequence)}, {double(head), double(head)},
                                            {double(q0), double(q1)}, {double(k0), double(k1)});
        some = seen.high > 0.0;
        all = all && seen.low >= 1.0;
    }
    return !some ? kNone : all ? kAll : kSome;
}
// Is a query's key left? Both exist.
TILE_DEVICE bool is_left(const Picks& picks, const Function& function, int sequence, int head, int q, int k) {
    if (picks.kept) {
        const int row = picks.block_q.quotient(q), column = picks.block_k.quotient(k);
        if (!picks.has(picks.plane_of(picks.kept, sequence, head), row, column)) return false;
        const int inside = k - column * int(picks.block_k.divisor);
        if (picks.lengths_k && inside >= picks.length_of(sequence, column)) return false;
    }
    if constexpr (Function::kMask) return function.mask(sequence, head, q, k, float(q), float(k), q, 0, k, 0);
    return true;
}
