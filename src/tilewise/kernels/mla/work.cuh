// Decode over rows that are keys and values at once (MLA): what its kernels are asked to do, on any card.
#pragma once
#include "decode/work.cuh"
#include "tile/quant.cuh"

constexpr Format kFormat = static_cast<Format>(kStoredAs);
constexpr bool kScaled = kFormat != Format::bits16;  // codes of the values, with scales; the other channels are 16-bit

constexpr int kGroup = 128, kScaleRow = kValueDim / kGroup * 4;  // channels per scale; bytes of a row's scales
constexpr int kKeys = 64;  // of a block: items begin and are folded at multiples of it

// A table is what is known of an item (items.cuh): its words and a few more, and per row the keys that it sees, where
// its result goes and where its query lies. Where there is one table, queries lie where factors do until Q is loaded.
constexpr int kTables = kLooksAhead ? 2 : 1, kTableWords = 24, kOfRow = kLooksAhead ? 24 : 16;
constexpr int kTableBytes = 4 * kTableWords + kOfRow * kRows;
// Named barriers: of all threads that compute, kMergeBarrier too; of these and the warp that looks ahead, two each: a
// table is filled, it is free
constexpr int kAllBarrier = 1, kFilledBarriers = 5, kFreeBarriers = 7;

// Where the result of a row goes
struct alignas(8) Target {
    int64_t at;  // −1: nowhere; else twice the offset in the output, or twice that in state_o and 1
};
// What DecodeArgs does not have
struct MlaArgs {
    // Scratch: (2, blocks, kValueDim · kRows), O of the pieces before in their group, and of the groups before, thread
    // by thread; then (blocks, kRows, 2), a MaxSum of the groups before
    float* folds;
    // kChosen: each query token has a list of its own of the positions that it reads. To DecodeArgs it is a sequence of
    // so many tokens; its caller's number is sequence · queries + token. What follows is of the cache's sequences.
    const int* indices;  // (sequences, queries, chosen): positions; what is none of the sequence's, as −1, is no key
    const int *lengths, *tails, *pages;  // as DecodeArgs has them
    const int* tail_from;                // (sequences,): the number of the first page in each tail
    const int* places;                   // (sequences,): the row of these tables for the caller's sequence
    Divisor queries;                     // query tokens per sequence
    int chosen, table_pages, tail_pages;
};

TILE_DEVICE DecodeItem mla_item(const DecodeArgs& args, int slot) {
    return load_item(args.items, int64_t(blockIdx.x) * args.slots + slot);
}
TILE_DEVICE Span mla_span(const DecodeArgs& args, const DecodeItem& item) {
    return span_of(args, item, length_of(args, item.sequence, item.kv_head()));
}
// The blocks that have a token of a span
TILE_DEVICE Span blocks_of(Span span) {
    const int begin = span.begin / kKeys;
    return {begin, span.end > span.begin ? (span.end + kKeys - 1) / kKeys : begin};
}
