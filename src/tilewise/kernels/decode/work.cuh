// What the decode kernel is asked to do: a list of items, each some query rows over some tokens of one sequence's pages;
// tilewise.decoding.DecodeArgs is its mirror in Python.
//
// Sequences are counted in the plan's order, in which those under a node of the tree of shared pages are neighbours. The query rows
// of a sequence under one KV head are `rows_each` = tokens · group: row = token · group + head in the group. Rows of neighbouring
// sequences count on, so the rows of a node are a range.
#pragma once
#include "common/args.cuh"
#include "common/scores.cuh"

enum ItemKind {
    kOwn = 1,     // rows of one sequence over tokens of its own; else a node of the tree
    kAllSee = 2,  // but for a window, every row sees all tokens of the node
    kGoesOn = 4,  // of tiles: the block's next item goes on with the same rows, which see all of it
};
// One warp's work: rows [row, row + rows) from the first row of `sequence` on, over the tokens [start, stop) of sequence `table`.
// fold: the range is computed piece by piece of so many chunks, from its first chunk on, and what comes of a piece is folded into what
// came before it, as merging folds states: so a sequence's result has the same bits whether a warp had it whole or many had a piece.
// What a warp would have to look up, one thing after another, before it can ask for a first byte stands in the item too.
struct alignas(16) DecodeItem {
    int sequence, row, rows;           // rows = 0: nothing to do
    int caller_head;                   // the caller's number of `sequence` · 2^12 + KV head
    int table, start, stop;            // stop of an own range is cut to the sequence's length as it is now
    int state_fold;                    // state · 2^16 + fold; fold 0: in one piece
    int page;                          // of the first chunk's first token, if no page of that chunk changes any more, else −1
    int tail_from;                     // of `table`: see PageTable
    int first_state, states_before, grows_from, piece;  // of `sequence`: args.states; of an item of tiles: first_page
    int kind;                          // bits of ItemKind
    int second_page;                   // of the sixteen tokens after the first: chunks of 32
    TILE_DEVICE bool is(int of) const { return kind & of; }
    TILE_DEVICE int kv_head() const { return caller_head & 0xfff; }
    TILE_DEVICE int caller() const { return caller_head >> 12; }
    TILE_DEVICE int state() const { return state_fold >> 16; }
    TILE_DEVICE int fold() const { return state_fold & 0xffff; }
    // Of a copy for the first tile, if it does not change any more, else −1
    TILE_DEVICE int first_page(int box) const { return box == 0 ? first_state : box == 1 ? states_before : box == 2 ? grows_from : piece; }
};

// An item's words in the order of its fields, for a warp that holds one word per lane
enum ItemWord {
    kSequenceWord, kRowWord, kRowsWord, kCallerHeadWord, kTableWord, kStartWord, kStopWord, kStateFoldWord, kPageWord, kTailFromWord,
    kFirstStateWord, kStatesBeforeWord, kGrowsFromWord, kPieceWord, kKindWord, kSecondPageWord, kItemWords,
};
static_assert(sizeof(DecodeItem) == 4 * kItemWords, "a word per field");

// Where the states of a sequence stand and how they split its tokens
struct alignas(16) StateSplit {
    int first;       // the first of its states
    int before;      // how many states come before those of the range that grows
    int grows_from;  // the token at which that range begins
    int piece;       // tokens of each of its pieces
};
// A row's state but for O: the largest score so far, base 2, and the sum of the weights against it
struct alignas(8) MaxSum {
    float max, sum;
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
    const uint32_t* tree;    // (sequences, tokens) in the caller's order: bit j, whether the row sees query token j; null: causal
    const DecodeItem* items;       // (blocks, slots)
    const DecodeItem* tile_items;  // (tile_rounds, blocks): of many rows
    const int* order;        // (sequences,): the caller's number of each
    const int* lengths;      // (sequences,)
    const int* tails;        // (sequences, tail_pages): the pages from an item's tail_from on
    const int* pages;        // (sequences, table_pages): the pages before that
    const StateSplit* states;  // (sequences,)
    float* state_o;          // (states, KV heads, rows_each, D): not normalised
    float* state_ml;         // (states, KV heads, rows_each, 2): MaxSum
    uint32_t* meeting;       // a counter: where all blocks of the launch wait for each other
    Paged k, v, k_scale, v_scale, k_zero, v_zero;
    Strides q_strides, o_strides;
    Scores scores;           // scores.right is 0: decode is causal; no slopes
    int slots, tile_rounds, sequences;
    int merge_rows;                              // of a job of merging: 0: no sequence has several states; decode_merge.cuh
    int kv_heads, tokens;
    int table_pages, tail_pages;
    Divisor group, rows_each, merge_jobs;        // merge_jobs: of a sequence
};

// Field by field: copied as a whole, an item takes more instructions.
TILE_DEVICE DecodeItem load_item(const DecodeItem* items, int64_t n) {
    const Global<const Vector16> vectors{reinterpret_cast<const Vector16*>(items)};
    const Vector16 a = vectors[4 * n], b = vectors[4 * n + 1], c = vectors[4 * n + 2], d = vectors[4 * n + 3];
    return {int(a.word[0]), int(a.word[1]), int(a.word[2]), int(a.word[3]),   // sequence … caller_head
            int(b.word[0]), int(b.word[1]), int(b.word[2]), int(b.word[3]),   // table … state_fold
            int(c.word[0]), int(c.word[1]), int(c.word[2]), int(c.word[3]),   // page … states_before
            int(d.word[0]), int(d.word[1]), int(d.word[2]), int(d.word[3])};  // grows_from … second_page
}

// The tokens [begin, end) of an item's range that exist and that a row may see. An own range is as long as its sequence is now, and
// the sequence's window is all of it that is looked at; nodes do not grow, and their rows have windows of their own.
TILE_DEVICE Span span_of(const DecodeArgs& args, bool own, int start, int stop, int length) {
    if (!own) return {start, stop};
    // What the first of its tokens sees begins first.
    const int begin = args.scores.keys_at(position_of(0, args.tokens, length), {start, stop}).first;
    const int end = stop < length ? stop : length;
    return {begin, end > begin ? end : begin};
}
TILE_DEVICE Span span_of(const DecodeArgs& args, const DecodeItem& item, int length) {
    return span_of(args, item.is(kOwn), item.start, item.stop, length);
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
// The caller's number of a row's sequence
TILE_DEVICE int64_t caller_of(const DecodeArgs& args, const DecodeItem& item, const DecodeRow& row) {
    return row.sequence == item.sequence ? item.caller() : int(Global<const int>{args.order}[row.sequence]);
}
// The keys of the span that a row at `position` sees. Decode is causal; said here, it saves an addition per row.
TILE_DEVICE Visible seen_to(const DecodeArgs& args, int position, Span span) {
    return keys_at(position, args.scores.left, 0, span).visible();
}
TILE_DEVICE Visible seen_by(const DecodeArgs& args, const DecodeRow& row, int length, Span span) {
    // Under a mask of query tokens every row stands at the last one, and the mask hides keys token by token.
    return seen_to(args, args.tree ? length - 1 : position_of(row.token, args.tokens, length), span);
}

// A sequence's pages. Those that came since the list was made stand apart, so that a step has few bytes to copy.
struct PageTable {
    const int *pages, *tail;  // both as if they began with the first page
    int tail_from;
    TILE_DEVICE int page(int n) const { return Global<const int>{n < tail_from ? pages : tail}[n]; }
};
TILE_DEVICE PageTable page_table(const DecodeArgs& args, int sequence, int tail_from) {
    return {args.pages + int64_t(sequence) * args.table_pages, args.tails + int64_t(sequence) * args.tail_pages - tail_from, tail_from};
}

// A sequence's states: its pieces beyond the length it has now are not counted, and not computed. One at least, which is then the
// result; and it is empty if there is no key.
struct States {
    int first, count;
    TILE_DEVICE States(const StateSplit& split, int length) : first(split.first) {
        const int ahead = length - split.grows_from;
        count = split.before + (ahead > 0 ? (ahead + split.piece - 1) / split.piece : 0);
        count = count > 0 ? count : 1;
    }
};
TILE_DEVICE States states_of(const DecodeItem& item, int length) {
    return {{item.first_state, item.states_before, item.grows_from, item.piece}, length};
}
TILE_DEVICE States states_of(const DecodeArgs& args, int sequence) {
    const StateSplit split = Global<const StateSplit>{args.states}[sequence];  // as one load
    return {split, Global<const int>{args.lengths}[sequence]};
}
// Where a row of one of them stands
TILE_DEVICE int64_t state_row(const DecodeArgs& args, const States& states, int kv_head, int state, int row) {
    return (int64_t(states.first + state) * args.kv_heads + kv_head) * args.rows_each.divisor + row;
}
