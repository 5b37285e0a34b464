// What the decode kernel is asked to do: a list of items, each some query rows over some tokens of one sequence's pages;
// tilewise.decoding.DecodeArgs is its mirror in Python.
//
// Sequences are counted in the plan's order, in which those under a node of the tree of shared pages are neighbours. The query rows
// of a sequence under one KV head are `rows_each` = tokens · group: row = token · group + head in the group. Rows of neighbouring
// sequences count on, so the rows of a node are a range.
#pragma once
#include "sm90/work.cuh"

// One warp's work: rows [row, row + rows) from the first row of `sequence` on, over the tokens [start, stop) of sequence `table`.
// fold: the range is computed piece by piece of so many chunks, from its first chunk on, and what comes of a piece is folded into what
// came before it, as merging folds states: so a sequence's result has the same bits whether a warp had it whole or many had a piece.
struct alignas(16) DecodeItem {
    int sequence, row, rows;           // rows = 0: nothing to do
    int caller_head;                   // the caller's number of `sequence` · 2^12 + KV head
    int table, start, stop;            // stop is cut to the sequence's length as it is now
    int state_fold;                    // state · 2^16 + fold; fold 0: in one piece
    TILE_DEVICE int kv_head() const { return caller_head & 0xfff; }
    TILE_DEVICE int caller() const { return caller_head >> 12; }
    TILE_DEVICE int state() const { return state_fold >> 16; }
    TILE_DEVICE int fold() const { return state_fold & 0xffff; }
};

// A component of the cache: (pages, page_size, KV heads, …) in elements of its own
struct Paged {
    const void* base;
    int64_t page, token, head, group;
};
struct DecodeArgs {
    const void* q;           // (sequences, tokens, query heads, D), in the caller's order
    void* o;                 // the same
    float* lse;              // (sequences, query heads, tokens), natural log; null if not wanted
    const float* sinks;      // (query heads,), null if none
    const uint32_t* tree;    // (sequences, tokens) in the caller's order: bit j, whether the row sees query token j; null: causal
    const DecodeItem* items;       // (rounds, blocks, warps of a block)
    const DecodeItem* tile_items;  // (tile_rounds, blocks): of many rows
    const int* order;        // (sequences,): the caller's number of each
    const int* lengths;      // (sequences,)
    const int* tails;        // (sequences, 1 + tail_pages): the first page that stands here, and those from it on
    const int* pages;        // (sequences, table_pages): the pages before that
    const int* states;       // (sequences, 4): the first of its states, how many there are before those of the range that grows,
                             // where that begins, and the tokens of a piece of it
    float* state_o;          // (states, KV heads, rows_each, D): not normalised
    float* state_ml;         // (… , 2): the reference, base 2, and the sum
    int* meeting;            // {blocks that have come, meetings so far}: where all blocks of the launch wait for each other
    Paged k, v, k_scale, v_scale, k_zero, v_zero;
    Strides q_strides, o_strides;
    int rounds, tile_rounds, sequences, merges;  // merges: whether a sequence may have more than one state
    int kv_heads, tokens, left;                  // left: keys seen before a row's own position, kFar for no limit
    int table_pages, tail_pages;
    float scale_log2, softcap_in, softcap_out;  // softcap: out · tanh(S · in), in base 2
    Divisor group, rows_each;
};

TILE_DEVICE DecodeItem load_item(const DecodeItem* items, int64_t n) {
    const Global<const Vector16> words{reinterpret_cast<const Vector16*>(items)};
    const Vector16 a = words[2 * n], b = words[2 * n + 1];
    return {int(a.word[0]), int(a.word[1]), int(a.word[2]), int(a.word[3]), int(b.word[0]), int(b.word[1]), int(b.word[2]), int(b.word[3])};
}

// The tokens [begin, end) that an item's rows may see of its range, as long as the sequence is now
struct Span {
    int begin, end;
};
TILE_DEVICE Span span_of(const DecodeArgs& args, const DecodeItem& item) {
    const int length = Global<const int>{args.lengths}[item.table];
    int begin = item.start;
    const int end = item.stop < length ? item.stop : length;
    if (item.row + item.rows <= int(args.rows_each.divisor)) {  // one sequence's, so its window is all that is looked at
        const int first = length - args.tokens - args.left;
        begin = first > begin ? first : begin;
    }
    return {begin, end > begin ? end : begin};
}

// A query row of an item
struct DecodeRow {
    int sequence, row, token, head;  // row: among the sequence's; head: of the query
};
TILE_DEVICE DecodeRow row_of(const DecodeArgs& args, const DecodeItem& item, int n) {
    const int flat = item.row + n, ahead = args.rows_each.quotient(flat), row = flat - ahead * int(args.rows_each.divisor);
    const int token = args.group.quotient(row);
    return {item.sequence + ahead, row, token, item.kv_head() * int(args.group.divisor) + row - token * int(args.group.divisor)};
}
// Keys of the span that a row sees: `count` from `first` on. Causal and window count from its position, the last token's being the last.
struct Seen {
    int first, count;
};
TILE_DEVICE Seen seen_by(const DecodeArgs& args, const DecodeRow& row, Span span) {
    const int length = Global<const int>{args.lengths}[row.sequence];
    const int position = args.tree ? length - 1 : length - args.tokens + row.token;  // a tree's mask is looked at token by token
    const int first = position - args.left > span.begin ? position - args.left : span.begin;
    const int last = position < span.end - 1 ? position : span.end - 1;
    return {first, last >= first ? last - first + 1 : 0};
}

// A sequence's pages. Those that came since the list was made stand apart, so that a step has few bytes to copy.
struct PageTable {
    const int *pages, *tail;
    int tail_from;
    TILE_DEVICE PageTable() : pages(nullptr), tail(nullptr), tail_from(0) {}
    TILE_DEVICE PageTable(const DecodeArgs& args, int sequence)
        : pages(args.pages + int64_t(sequence) * args.table_pages),
          tail(args.tails + int64_t(sequence) * (1 + args.tail_pages) + 1),
          tail_from(Global<const int>{tail}[-1]) {}
    TILE_DEVICE int operator[](int n) const { return Global<const int>{n < tail_from ? pages + n : tail + (n - tail_from)}[0]; }
};

// A sequence's states: its pieces beyond the length it has now are not counted, and not computed. One at least, which is then the
// result; and it is empty if there is no key.
struct States {
    int first, count;
};
TILE_DEVICE States states_of(const DecodeArgs& args, int sequence) {
    const Vector16 of = Global<const Vector16>{reinterpret_cast<const Vector16*>(args.states)}[sequence];
    const int ahead = Global<const int>{args.lengths}[sequence] - int(of.word[2]), piece = of.word[3];
    const int count = int(of.word[1]) + (ahead > 0 ? (ahead + piece - 1) / piece : 0);
    return {int(of.word[0]), count > 0 ? count : 1};
}
// Where a row of one of them stands
TILE_DEVICE int64_t state_row(const DecodeArgs& args, const States& states, int kv_head, int state, int row) {
    return (int64_t(states.first + state) * args.kv_heads + kv_head) * args.rows_each.divisor + row;
}
