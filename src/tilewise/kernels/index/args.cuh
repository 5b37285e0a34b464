// An indexer's choice: what its two kernels are given. gpu/choice.py has the mirrors.
//
// Rows are query tokens, as in plan/choice.py. A row sees the keys of its sequence up to its own place.
#pragma once
#include "common/args.cuh"

// Where keys lie
struct IndexTable {
    const int* pages;  // (sequences, most)
    int most;
    Divisor page_size;
    // page · page_size + offset of a sequence's key
    TILE_DEVICE int64_t row(int sequence, int key) const {
        const int page = page_size.quotient(key), offset = key - page * int(page_size.divisor);
        return int64_t(Global<const int>{pages}[int64_t(sequence) * most + page]) * page_size.divisor + offset;
    }
};
// Rows [row, row + rows) of a sequence, the first of them at `place`; their scores are kept from row `kept` on. Without
// rows it is none.
struct ScoreTile {
    int sequence, row, rows, place, kept;
};
struct IndexScoresArgs {
    const void* q;         // (rows, heads, dim)
    const float* weights;  // (rows, kHeads)
    const void* keys;      // (pages · page size, dim)
    const ScoreTile* tiles;
    float* scores;  // (kept, width)
    int64_t width;
    IndexTable table;
    int heads, dim, count;  // count: of tiles
};
struct alignas(16) ChoosingRow {
    int row, sequence, place, kept;  // place: −1 if it sees nothing; kept: −1 if it takes all that it sees
};
struct IndexSelectArgs {
    const float* scores;  // (kept, width)
    const ChoosingRow* rows;
    int* chosen;  // (rows, topk)
    int64_t width;
    IndexTable table;
    int topk, stored;  // stored: what is chosen is named by where it lies, not by its position
};
