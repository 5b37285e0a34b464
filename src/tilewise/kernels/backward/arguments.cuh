// What the backward kernels are asked to do, and which queries see a tile of keys: those by wgmma and those by mma.sync
// ask here alike. tilewise.gpu.backward_abi has the mirrors of the structures in Python.
//
// A block of the main kernel keeps a tile of keys of one KV head and walks over the query tiles that see them, for each
// query head of the group. Key tiles of dense problems follow from their number, those of packed sequences from a list
// that list.cu made on the device. dQ is summed in float32 over key tiles; a kernel before makes what the main one
// reads per query row, and one after rounds dQ.
#pragma once
#include "common/args.cuh"
#include "common/dropout.cuh"
#include "common/functions.cuh"
#include "common/scores.cuh"

// Which query tiles each tile of keys meets, where a schedule or a mask function says so: pairs.cu makes it. A row is
// the list of one key tile of those query heads, and sequences, that share it. Where all bits would be too large, key
// tiles come in rounds, one after another, whose rows have the same place.
struct QueryLists {
    const int* counts;       // (rows, 2): query tiles of which not all is seen, and all of them; null without lists
    const int* tiles;        // (rows, width): those of which not all is seen from the front, the others from the back
    const uint32_t* bits;    // (rows, width, keys of a tile, 2): of the former, per key a bit per query that sees it
    const uint32_t* visits;  // (lists, q_tiles, words): per query tile a bit for each key tile that meets it; or null
    int width, words;
    int rows_each, lists_batch;  // rows per list; lists from one sequence to the next, 0 if they share them
    int first;                   // key tile of the round, among all
    Divisor heads_each;          // query heads per list
    TILE_DEVICE int list_of(int sequence, int head) const { return sequence * lists_batch + heads_each.quotient(head); }
    TILE_DEVICE int64_t row_of(int sequence, int head, int in_round) const {
        return int64_t(list_of(sequence, head)) * rows_each + in_round;
    }
};

// Batch strides of packed tensors are 0. delta = rowsum(dO ∘ O) − dLSE.
struct BackwardArgs {
    const void *q, *k, *v, *o, *d_o;
    const float *lse, *d_lse;  // natural; d_lse is null where nothing came through it
    float* stats;  // (batch, heads, q_tiles, 2, rows of a tile): −LSE, in the units a kernel likes, and −delta
    float* dq_sum;  // (batch, heads, q_tiles, rows of a tile · padded head_dim), ordered as a kernel likes
    int* turns;  // (batch, heads, q_tiles, shares of dQ): key tiles that have added to it; null if in any order
    void *dq, *dk, *dv;
    const void *starts_q, *starts_k;  // packed: (sequences + 1,) Index; null if dense
    const int* list;  // packed: kKeyListHeader ints, the first the number of tiles, then KeyTiles; or null
    const int* ends;  // (total_k,): the first query token that does not see a key any more; null if none
    const int* positions;  // (total_q,): of tokens that are queries and keys, whose window looks there; or null
    Strides q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, dk_strides, dv_strides;
    Strides lse_strides, d_lse_strides;
    Scores scores;
    float scale;  // natural: what dS is multiplied with in the end
    int seqlen_q, seqlen_k;  // packed: of all sequences together
    int sequences, heads, kv_heads, group;  // group: query heads per KV head
    int head_dim, value_dim;  // of Q and K, and of V and O
    int q_tiles;  // per head; packed: of all sequences, see first_slot
    int kv_tiles;  // per KV head, of the round where there are rounds; packed: as many as the list has room for
    int together;  // dense: heads whose key tiles begin side by side; not in turn, the last ones alone
    QueryLists lists;
    Dropout dropout;  // for backward_mma
};

// A tile of keys, and the query tiles [begin, end) in which some query sees some of them. Keys and tiles count within
// the sequence.
struct alignas(64) KeyTile {
    int sequence, key, q_start, k_start, seqlen_q, seqlen_k;
    int slot;  // of the sequence's first query tile among the q_tiles
    int begin, end;
    int whole_begin, whole_end;  // of those, the ones whose queries all see all keys of a full tile
    int reserved[5];
};
constexpr int kKeyTileWords = sizeof(KeyTile) / 4;
constexpr int kKeyListHeader = 16;  // ints before a list's tiles, of which the first is their number

// Tiles of packed sequences have slots of their own: those of a sequence from here on, none has another's. start: of
// the sequence among the tokens. Tokens before the first start are sequence −1, and those behind the last one sequence
// `sequences`: nobody sees them, and their gradients are 0. In all there are first_slot(total, sequences + 1) slots.
template <int kTile> TILE_DEVICE int first_slot(int start, int sequence) { return start / kTile + sequence + 1; }

// The queries [first, first + count) of a sequence that see key `key` of it. end: args.ends of it, or seqlen_q
TILE_DEVICE Visible queries_of(const Scores& scores, int key, int seqlen_q, int seqlen_k, int end) {
    const int own = key - (seqlen_k - seqlen_q);  // the query at the key's position
    const int first = own - scores.right, last = own + scores.left;
    const int begin = first > 0 ? first : 0, stop = last < end - 1 ? last + 1 : end;
    return {begin, key < seqlen_k && stop > begin ? stop - begin : 0};
}

// Each of the Hopper backward's two consumers makes a share of dQ's columns, in rounds of kMost, of which the last may
// have fewer. Rounds of both lie side by side, so that none is in two panels of K. In memory a share's rounds come one
// after another, and of a tile eight columns, thread, four registers, as a consumer holds them.
template <int kWidth, int kMost> struct DqShare {
    static constexpr int kColumns = kWidth / 2, kRounds = (kColumns + kMost - 1) / kMost;
    static TILE_DEVICE constexpr int columns(int round) {
        return round < kRounds - 1 ? kMost : kColumns - (kRounds - 1) * kMost;
    }
    static TILE_DEVICE constexpr int first(int share, int round) { return 2 * kMost * round + share * columns(round); }
};

// ---- in turn --------------------------------------------------------------------------------------------------------
// Where sums have to be the same in every run, key tiles that see a query tile add to its dQ from the last one down.
// Blocks begin in that order, too, so that none ever waits for one that has not begun. Under a causal mask a key tile's
// first query tile lies behind that of the key tile before it: blocks that begin together are at different query tiles,
// the later ones ahead, and do not wait. Without one, blocks get apart as they begin one after another: those of
// `together` heads take turns to begin, so that the next of a head finds the sums that it needs.

// The KV head, of those of all sequences, and the key tile of block `number` of a dense problem
struct Place {
    int head, tile;
};
template <bool kInTurn> TILE_DEVICE Place place_of(const BackwardArgs& args, int number, int heads) {
    if constexpr (!kInTurn) {  // tiles of a head one after another, the first, which most queries see, first
        const int alone = heads - args.together, rest = number - alone * args.kv_tiles;
        if (rest >= 0) return {alone + rest % args.together, rest / args.together};
        const int head = number / args.kv_tiles;
        return {head, number - head * args.kv_tiles};
    }
    const int each = args.together * args.kv_tiles, share = number / each, rest = number - share * each;
    const int first = share * args.together, left = heads - first, side = left < args.together ? left : args.together;
    const int row = rest / side;
    return {first + rest - row * side, args.kv_tiles - 1 - row};
}
// Without lists and ends: the last key tile that sees query tile `tile_q`
template <int kTileQ, int kTileKv>
TILE_DEVICE int last_key_tile(const Scores& scores, const KeyTile& tile, int tile_q) {
    const int beyond = tile_q * kTileQ + kTileQ, last = (beyond < tile.seqlen_q ? beyond : tile.seqlen_q) - 1;
    const int key = position_of(last, tile.seqlen_q, tile.seqlen_k) + scores.right;
    return (key < tile.seqlen_k ? key : tile.seqlen_k - 1) / kTileKv;
}
// The place of a key tile of a packed sequence in a list of those that add in turn
template <int kTileKv> TILE_DEVICE int listed_at(const BackwardArgs& args, int start, int sequence, int tile) {
    return args.kv_tiles - 1 - (first_slot<kTileKv>(start, sequence) + tile);
}

// Which query tiles see the tile of kTileKv keys from tile.key on. Without ends, both sides of what a key sees move on
// from key to key, so that the first and the last say everything. least, most: of ends over the tile's keys, or
// seqlen_q
template <int kTileQ, int kTileKv>
TILE_DEVICE void find_queries(const Scores& scores, KeyTile& tile, int least, int most) {
    const int beyond = tile.key + kTileKv, last = (beyond < tile.seqlen_k ? beyond : tile.seqlen_k) - 1;
    const int shift = tile.seqlen_k - tile.seqlen_q;
    const int first_query = tile.key - shift - scores.right, end_query = last - shift + scores.left + 1;
    const int begin = first_query > 0 ? first_query : 0, end = end_query < most ? end_query : most;
    tile.begin = begin / kTileQ;
    tile.end = end > begin ? (end + kTileQ - 1) / kTileQ : tile.begin;
    // Whole: from the first query that sees the last key, up to the last one that sees the first key. Rows behind the
    // sequence's last are no reason for a mask: their weights are 0 anyway.
    const int seen_from = last - shift - scores.right, seen_to = tile.key - shift + scores.left + 1;
    const int from = seen_from > 0 ? (seen_from + kTileQ - 1) / kTileQ : 0;
    const int limit = seen_to < least ? seen_to : least;
    const int to = limit >= tile.seqlen_q ? tile.end : limit > 0 ? limit / kTileQ : 0;
    const bool full = beyond <= tile.seqlen_k && to > from;
    tile.whole_begin = full && from > tile.begin ? from : tile.begin;
    tile.whole_end = full ? (to < tile.end ? to : tile.end) : tile.begin;
}
