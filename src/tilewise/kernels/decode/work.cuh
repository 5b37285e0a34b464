// What the decode kernels are asked to do: a list of items. An item is a few query rows over a range of tokens in one
// sequence's pages. tilewise.gpu.abi.DecodeArgs is the mirror of DecodeArgs in Python; plan/worklist.py makes the
// items.
//
// Sequences are numbered in the plan's order, in which all sequences below a node of the prefix tree are neighbours. A
// sequence has rows_each = tokens · group query rows per KV head: row = token · group + head within the group. Rows are
// numbered on from one sequence to the next, so that the rows below a node are a range.
#pragma once
#include "common/args.cuh"
#include "common/scores.cuh"

enum ItemKind {
    kOwn = 1,     // rows of one sequence over tokens of its own; without it, rows over a node of the prefix tree
    kAllSee = 2,  // every row sees all tokens of the node, unless a window or a block of positions hides some
    kGoesOn = 4,  // tile items only: the block's next item has the same rows, which see all of its tokens
};
// The work of one warp: query rows [row, row + rows), counted from the first row of `sequence`, over the tokens
// [start, stop) that the pages of row `table` hold; an own range's are those of `sequence`.
//
// fold: a warp computes its range in pieces of `fold` chunks, counted from the range's first chunk, and folds the state
// of each piece into the state of those before it, as merging does. So a sequence's result has the same bits whether
// one warp computed the whole range or several computed a piece each. An item repeats what its warp would otherwise
// have to look up, load after load, before it could request a first byte.
struct alignas(16) DecodeItem {
    int sequence, row, rows;           // rows = 0: nothing to do
    int caller_head;                   // the caller's number of `sequence` · 2^12 + KV head
    int table;                         // the row of the page tables in which these tokens' pages stand
    int start, stop;                   // an own range stops where its sequence ends now, if that is before `stop`
    int state_fold;                    // state · 2^16 + fold; fold = 0: the range is one piece
    int page;                          // of the first chunk's first token; −1 if a page of that chunk may still change
    int tail_from;                     // of `table`: see PageTable
    int first_state, states_before, grows_from, piece;  // StateSplit of `sequence`; of tile items: first_page(0 … 3)
    int kind;                          // bits of ItemKind
    int second_page;                   // chunks of 32 tokens: the page of the sixteen after the first sixteen
    TILE_DEVICE bool is(int of) const { return kind & of; }
    TILE_DEVICE int kv_head() const { return caller_head & 0xfff; }
    TILE_DEVICE int caller() const { return caller_head >> 12; }
    TILE_DEVICE int state() const { return state_fold >> 16; }
    TILE_DEVICE int fold() const { return state_fold & 0xffff; }
    // Tile items: the page of copy `box` of the first tile; −1 if it may still change
    TILE_DEVICE int first_page(int box) const {
        return box == 0 ? first_state : box == 1 ? states_before : box == 2 ? grows_from : piece;
    }
};

// An item's words in the order of its fields, for a warp that holds one word per lane
enum ItemWord {
    kSequenceWord, kRowWord, kRowsWord, kCallerHeadWord,
    kTableWord, kStartWord, kStopWord, kStateFoldWord,
    kPageWord, kTailFromWord, kFirstStateWord, kStatesBeforeWord,
    kGrowsFromWord, kPieceWord, kKindWord, kSecondPageWord,
    kItemWords,
};
static_assert(sizeof(DecodeItem) == 4 * kItemWords, "one word per field");

// Where the states of a sequence stand, and how they split its tokens. The last range of a sequence grows while it is
// decoded, and is split into pieces of equal length; what comes before that range keeps its states.
struct alignas(16) StateSplit {
    int first;       // number of the sequence's first state
    int before;      // states of the ranges that do not grow
    int grows_from;  // the token at which the growing range begins
    int piece;       // tokens per piece of the growing range
};
// A row's partial softmax without its O: the reference that weights are taken against, base 2, and their sum
struct alignas(8) MaxSum {
    float max, sum;
};

// A component of the cache: (pages, page_size, KV heads, …); strides in elements, those of K and V in bytes
struct Paged {
    const void* base;
    int64_t page, token, head, group;
};
struct DecodeArgs {
    const void* q;                 // (sequences, tokens, query heads, D), in the caller's order
    void* o;                       // like q
    float* lse;                    // (sequences, query heads, tokens), natural log; null if not wanted
    const uint32_t* tree;          // (sequences, tokens), in the caller's order: bit j tells whether the row sees query
                                   // token j; null for causal
    const DecodeItem* items;       // (blocks, slots)
    const DecodeItem* tile_items;  // (tile_rounds, blocks): items of up to 128 rows
    const int* order;              // (sequences,): the caller's number of each sequence
    const int* lengths;            // (sequences,); kSelected: (sequences, selections), as select.cu makes it
    const int* tails;              // (sequences, tail_pages): a sequence's pages from an item's tail_from on
    const int* pages;              // (sequences, table_pages): the pages before those; kSelected: like lengths, and all
    const StateSplit* states;      // (sequences,)
    float* state_o;                // scratch: (states, KV heads, rows_each, D), O before it is divided by the sum
    float* state_ml;               // scratch: (states, KV heads, rows_each, 2), a MaxSum each
    uint32_t* barrier_counter;     // of the grid barrier
    Paged k, v, k_scale, v_scale, k_zero, v_zero;
    Strides q_strides, o_strides;
    Scores scores;                 // right is 0: decode is causal; slopes are not served
    int slots, tile_rounds, sequences;
    int merge_rows;                // rows per merge job (merge.cuh); 0: no sequence has several states
    int kv_heads, tokens;          // tokens: query tokens per sequence
    int table_pages, tail_pages;
    Divisor group, rows_each, merge_jobs;  // query heads per KV head; rows per sequence and KV head; jobs per sequence
    // kSelected:
    int selections;                // per sequence: one for each KV head, or one for all of them
    const uint32_t* own;           // like lengths: bit t tells whether the key of query token t is selected
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

// How many keys before its own a row at `position` sees at most. Rule::kChunked: none before its block of positions
TILE_DEVICE int left_of(const DecodeArgs& args, int position) {
    if constexpr (Rule::kChunked) {
        const int within = position % args.scores.chunk;
        return within < args.scores.left ? within : args.scores.left;
    }
    return args.scores.left;
}
// Does every row see all keys before its own?
TILE_DEVICE bool sees_back_to_first(const DecodeArgs& args) {
    return !Rule::kChunked && args.scores.sees_back_to_first();
}

// The tokens of an item's range that exist and that some row may see. An own range ends where its sequence ends now and
// begins with the first token that a row sees. A node does not grow, and what its rows see differs: it is taken whole.
TILE_DEVICE Span span_of(const DecodeArgs& args, bool own, int start, int stop, int length) {
    if (!own) return {start, stop};
    // The first query token sees the farthest back.
    const int position = position_of(0, args.tokens, length);
    const int begin = keys_at(position, left_of(args, position), args.scores.right, {start, stop}).first;
    const int end = stop < length ? stop : length;
    return {begin, end > begin ? end : begin};
}
TILE_DEVICE Span span_of(const DecodeArgs& args, const DecodeItem& item, int length) {
    return span_of(args, item.is(kOwn), item.start, item.stop, length);
}

// Where a sequence's length and pages stand in their tables. kSelected: sequences read only some of their pages. Those
// that a KV head reads are then a sequence of their own: its tokens are numbered within them, in items too, and what an
// item repeats of the pages is not looked at.
TILE_DEVICE int table_row(const DecodeArgs& args, int sequence, int kv_head) {
    return kSelected ? sequence * args.selections + (kv_head < args.selections ? kv_head : 0) : sequence;
}
TILE_DEVICE int length_of(const DecodeArgs& args, int sequence, int kv_head) {
    return Global<const int>{args.lengths}[table_row(args, sequence, kv_head)];
}

// A query row of an item. row: its number within its sequence and KV head; head: the query head
struct DecodeRow {
    int sequence, row, token, head;
};
TILE_DEVICE DecodeRow row_of(const DecodeArgs& args, const DecodeItem& item, int n) {
    const int flat = item.row + n, ahead = args.rows_each.quotient(flat);
    const int row = flat - ahead * int(args.rows_each.divisor), token = args.group.quotient(row);
    const int head = item.kv_head() * int(args.group.divisor) + row - token * int(args.group.divisor);
    return {item.sequence + ahead, row, token, head};
}
// The caller's number of a row's sequence
TILE_DEVICE int64_t caller_of(const DecodeArgs& args, const DecodeItem& item, const DecodeRow& row) {
    return row.sequence == item.sequence ? item.caller() : int(Global<const int>{args.order}[row.sequence]);
}
// The keys of the span that a row at `position` sees. right = 0 as a constant saves an addition per row.
TILE_DEVICE Visible seen_to(const DecodeArgs& args, int position, Span span) {
    return keys_at(position, left_of(args, position), 0, span).visible();
}
TILE_DEVICE Visible seen_by(const DecodeArgs& args, const DecodeRow& row, int length, Span span) {
    if constexpr (kSelected) {  // the row does not see the selected keys of the query tokens after it, which come last
        const int at = table_row(args, row.sequence, args.group.quotient(row.head));
        const uint32_t after = Global<const uint32_t>{args.own}[at] >> (row.token + 1);
        return seen_to(args, length - 1 - ptx::count_bits(after), span);
    }
    // Under a mask of query tokens every row stands at the last one, and the mask hides keys token by token.
    return seen_to(args, args.tree ? length - 1 : position_of(row.token, args.tokens, length), span);
}

// A sequence's pages. Pages that came since the list was made stand in an array of their own, so that a decode step has
// few bytes to copy to the device; lists of selected pages are made anew each time.
struct PageTable {
    const int *pages, *tail;  // both are indexed by the page's number within the sequence
    int tail_from;
    TILE_DEVICE int page(int n) const { return Global<const int>{kSelected || n < tail_from ? pages : tail}[n]; }
};
TILE_DEVICE PageTable page_table(const DecodeArgs& args, int sequence, int kv_head, int tail_from) {
    const int* pages = args.pages + int64_t(table_row(args, sequence, kv_head)) * args.table_pages;
    return {pages, args.tails + int64_t(sequence) * args.tail_pages - tail_from, tail_from};
}

// The states that a sequence has at its length now: pieces that begin beyond it are neither computed nor counted. There
// is always at least one state; one alone is the result, and it is empty if there is no key.
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
    const StateSplit split = Global<const StateSplit>{args.states}[sequence];  // a copy, so that it is one load
    return {split, Global<const int>{args.lengths}[sequence]};
}
// The number of a row of one of these states in state_o and state_ml
TILE_DEVICE int64_t state_row(const DecodeArgs& args, const States& states, int kv_head, int state, int row) {
    return (int64_t(states.first + state) * args.kv_heads + kv_head) * args.rows_each.divisor + row;
}
