// What the planner is told and what it keeps in shared memory: arguments, nodes, ranges. tilewise.gpu.abi.PlanArgs is
// the mirror of PlanArgs in Python; gpu/planner.py fills it in.
#pragma once
#include "decode/plan_block.cuh"
#include "decode/work.cuh"

constexpr int kTileTokens = 64;                         // decode/tile.cuh: tokens of a step
constexpr int kNoEnd = kFar + 1;                        // plan/ranges.py: FAR
constexpr int kLimits = 5, kTries = kLimits + 1;        // candidates for the longest range that is taken whole
constexpr int kPieceBits = 14, kBinBits = 11, kAfterBits = 20;
constexpr int kMostKeys = 1 << (kPieceBits - 2);        // pieces that are sorted, at most
constexpr double kChainShare = 1.25;                      // plan/cost.py: CHAIN_SHARE
constexpr int kMostInGroups = 64;                       // plan/ranges.py: MOST_IN_GROUPS
constexpr int kUnit = 16;                               // costs are counted in so many parts of a chunk
constexpr int kStepWords = 4;                           // of a step's header: sequences, nodes, 0, 0

// Where things stand in shared memory, in bytes: gpu/planner.py lays them out
struct PlanRoom {
    uint32_t sums;                           // of warps: 34 · 32 words
    uint32_t place, length, caller, under;   // of each sequence: its row of the table, …, the last node above it or −1
    uint32_t split, ranges, nodes;           // StateSplits, PlanRanges, PlanNodes
    uint32_t loads, fresh, ranks;            // of bins: in their order, the next ones, their places in the order
    uint32_t skipped;                        // of bins in their order: loads that come before their next one
    uint32_t counts, work;                   // of bins, by number: units that they have, parts of chunks
    uint32_t keys, next;                     // of pieces, a power of two; of tile pieces: the one that goes on from it
};

// A step, as decode_plan_step puts it there, in ints: its header; four for each sequence in the plan's order (the
// caller's number, the row of the page table, the length, 0); five for each node, parents before children (PlanNode's
// first five).
struct PlanArgs {
    const int* step;
    const int* table;          // (rows, width): the pages of each sequence
    DecodeItem* items;         // (blocks, slots · items of a slot)
    DecodeItem* tile_items;    // (tile_rounds, blocks)
    int *order, *lengths;      // (rows,): DecodeArgs
    StateSplit* states;        // (rows,)
    int* used;                 // (bins,): slots of each that hold an item; then (blocks,): rounds that do
    int* placed;               // scratch: where each unit goes
    int* made;                 // PlanMade: what became of it
    int rows, width, tokens;
    int left;                  // of the window; kFar for none
    int together, warps, joiners;
    int slots, tile_rounds;    // per bin and block, at most
    int pass_bits, tile_bits;  // a stream item and a tile item have at most 2^… rows
    int tile_box;              // tokens per copy of a tile
    int wide_rows;             // a node with so many rows goes through tiles; more than there are: none does
    int in_turn;               // a block's warps do not stream while they compute tiles
    int chunk_bits;            // a chunk has 2^chunk_bits tokens
    int group_bits;            // states are folded in groups of 2^group_bits: Splitting.group
    int longest, shared_tokens;
    int item_cost, step_cost;  // of an item besides its chunks, of a step of a tile item: in parts of a chunk
    int max_ranges, max_pieces, max_tiles, max_states;
    int limits[kLimits], size_bits[kLimits];  // Splitting.pieces, whose sizes are powers of two
    int bins;
    Divisor page_size, heads, rows_each, blocks;
    Divisor groups, passes;    // units of a piece, of `together` heads each; passes over the rows of one sequence
    PlanRoom room;
    double item_chunks, state_chunks, sprint, fold_chunks;  // Weights
    int positions;             // Rule::kChunked: of a block that no row sees out of
};

enum PlanMade { kPieces, kStates, kSlots, kRounds, kNodes, kInTurn };  // kInTurn: 1 if units were dealt in turn

// A node and how it is cut
struct alignas(16) PlanNode {
    int first, sequences, start, stop;
    int above;                // the node around it, or −1
    int begin, piece, parts;  // pieces of `piece` tokens from `begin` on
    int passes, tiled;
    int state, after;         // its first state; how many states a sequence has up to its end
    int last;                 // tiled: tokens that a block has in a row at its end
    int unit, tile_unit;      // pieces of streaming warps and of tiles before its own
    int joins;                // of the node above, the piece that its first one goes on from, or −1
};
// A token range of one sequence. Every sequence has at least one, the last of which ends where it ends.
struct alignas(16) PlanRange {
    int sequence, start, stop, parts;  // parts: 0 if nodes cover all of the sequence
    int unit, state, whole, groups;    // pieces before its own, the first of its states; a piece is a group of pieces
};
enum { kAboveWord = 4, kUnitWord = 13, kTileUnitWord = 14 };   // of a PlanNode
enum { kRangeSequenceWord = 0, kRangeUnitWord = 4 };            // of a PlanRange
// How a range is cut
struct RangeCut {
    int size_bits, chunks, pieces, begin, cut_parts;
    TILE_DEVICE RangeCut(const PlanArgs& args, int start, int stop) {
        size_bits = args.size_bits[kLimits - 1];
#pragma unroll
        for (int i = kLimits - 1; i >= 0; i--)
            if (stop - start <= args.limits[i]) size_bits = args.size_bits[i];
        size_bits = larger(size_bits, args.chunk_bits);
        chunks = ceil_shift(stop - (start & ~15), 4);
        pieces = larger(1, ceil_shift(chunks, size_bits - 4));
        begin = start >> args.chunk_bits << args.chunk_bits;
        cut_parts = larger(1, ceil_shift(stop - begin, size_bits));
    }
    TILE_DEVICE bool whole(int limit) const { return chunks <= limit || pieces == 1; }
    // With more pieces than that, merging shares them out among accumulators.
    TILE_DEVICE bool may_be_grouped() const { return cut_parts <= kMostInGroups; }
};

// The costliest first, and of equal ones the first
constexpr int kMostCost = (1 << (32 - kPieceBits)) - 1;
TILE_DEVICE uint32_t key_of(int cost, int piece) {
    return uint32_t(kMostCost - smaller(cost, kMostCost)) << kPieceBits | uint32_t(piece);
}
TILE_DEVICE int cost_of(uint32_t key) { return kMostCost - int(key >> kPieceBits); }
TILE_DEVICE int piece_of(uint32_t key) { return int(key & ((1u << kPieceBits) - 1)); }
