// What the forward kernels are asked to do, and how their tiles are numbered; tilewise.gpu.abi.ForwardArgs is the
// mirror of ForwardArgs in Python.
#pragma once
#include "common/args.cuh"
#include "common/dropout.cuh"
#include "common/functions.cuh"
#include "common/scores.cuh"

// What stored FP8 values are to be multiplied with: (sequences, KV heads) float32; null for 1
struct Descale {
    const float* values;
    int64_t batch;  // elements from one sequence to the next
};

struct TileCounter {
    int handed_out;   // tiles, besides the first of each block
    int blocks_done;  // blocks that found no more tiles
};

// Which keys each tile visits, where that is a list that fold.cu made. A unit is as many neighbouring keys as one copy
// brings; a row is the list of one tile.
struct TileLists {
    const int* counts;  // (rows, 2): the units that every query row of the tile sees whole, and all units
    const int* units;   // (rows, width): the whole ones from the front, the others from the back
    const int* order;   // (lists, rows_each): the tiles of a list, by length, the longest first; null if packed
    const int *lengths_q, *lengths_k;        // (sequences or 1, blocks): valid rows of each block; null: all
    int lengths_q_batch, lengths_k_batch;    // elements from one sequence to the next
    int width, rows_each;                    // rows_each: per list, tiles of a sequence's head or of packed sequences
    int lists_batch;                         // lists from one sequence to the next; 0 if they share them
    Divisor heads_each, block_q, block_k;    // heads_each: of a tile's heads, per list
};
// An entry of a list: the unit's number, and above it a bit per slab that does not see it
constexpr int kUnitBits = 20, kUnitMask = (1 << kUnitBits) - 1;
constexpr int kNoUnit = kUnitMask;
constexpr int kSlab = 16;  // query rows of a tile that a unit is hidden from together: those of one warp

struct ForwardArgs {
    const void *q, *k, *v;  // for loads without TMA
    void* o;
    float* lse;              // natural log; null if not wanted
    const int* page_table;   // (sequences, …); null if K and V are not paged
    const int* list;         // packed sequences: the tiles that ragged.cu listed; null: tiles follow from their number
    TileCounter* counter;    // zero between launches
    Strides q_strides, k_strides, v_strides, o_strides;  // o: batch stride 0 where rows are packed
    int64_t lse_batch, lse_head, page_table_stride;
    Scores scores;
    Descale descale_q, descale_k, descale_v;
    int seqlen_q, seqlen_k;
    int tiles, q_tiles;      // tiles in all (not known here if they are listed), and tiles per sequence and head
    Divisor tile_heads;  // tiles side by side in a sequence: query heads, or KV heads where a tile holds a whole group
    Divisor tile_heads_per_kv;
    Divisor together;  // heads, over all sequences, whose tiles run together, the heaviest tiles of all of them first
    Divisor tiles_together;  // tiles of that many heads
    TileLists lists;
    Dropout dropout;  // for forward_mma
};

// A tile of query rows of one sequence, and the key blocks [begin, end) that it visits: at least one, which is fully
// masked if no row sees a key. Rows are counted within the sequence; where grouped heads are packed, row = token ·
// kPack + head.
struct alignas(64) WorkTile {
    int row, head, sequence, q_start, k_start, seqlen_q, seqlen_k, begin, end, kv_head;
    float descale_qk, descale_v;  // of FP8. Of other types descale_v has the bits of slice(), an integer
    int list, whole, units;  // of a listed tile: its row, units that are seen whole, all units
    int valid;               // rows of its first block, as blocks are visited, that hold keys
    TILE_DEVICE int slice() const { return int(as_bits(descale_v)); }  // which of V's columns (blocks.cuh: kSlices)
};
constexpr int kTileWords = sizeof(WorkTile) / 4;
constexpr int kListHeader = 16;  // ints before the tiles of a list, which begin with a ListHead
struct alignas(16) ListHead {
    Divisor tiles;  // by the number of tiles; divisor 0 if there is none
};

// The keys that a query token of the tile's sequence sees
TILE_DEVICE Keys keys_of(const ForwardArgs& args, const WorkTile& tile, int token) {
    return args.scores.keys_at(position_of(token, tile.seqlen_q, tile.seqlen_k), {0, tile.seqlen_k});
}

// The blocks [begin, end) in which kRows rows of a tile, from first_row on, see some key
template <int kTileKv, int kPack, int kRows>
TILE_DEVICE Span blocks_of(const ForwardArgs& args, const WorkTile& tile, int first_row) {
    const int beyond = (first_row + kRows - 1) / kPack,
              last_token = beyond < tile.seqlen_q ? beyond : tile.seqlen_q - 1;
    return blocks_met<kTileKv>(keys_of(args, tile, first_row / kPack), keys_of(args, tile, last_token));
}
template <int kTileQ, int kTileKv, int kPack> TILE_DEVICE void find_blocks(const ForwardArgs& args, WorkTile& tile) {
    const Span met = blocks_of<kTileKv, kPack, kTileQ>(args, tile, tile.row);
    tile.begin = met.begin;
    tile.end = met.end > 0 ? met.end : 1;
}

// The blocks [begin, end) that kRows rows of a tile, from first_row on, all see whole
template <int kTileKv, int kPack, int kRows = 64>
TILE_DEVICE Span full_blocks(const ForwardArgs& args, const WorkTile& tile, int first_row) {
    const Keys first = keys_of(args, tile, first_row / kPack);
    const Keys last = keys_of(args, tile, (first_row + kRows - 1) / kPack);
    return blocks_whole<kTileKv>(first, last);
}

TILE_DEVICE float descale_of(const Descale& of, const WorkTile& tile) {
    return of.values ? float(Global<const float>{of.values}[tile.sequence * of.batch + tile.kv_head]) : 1.0f;
}

// Tile `number`; row is −1 if there is none. kListed: its list's row is found, and which blocks it visits is left open.
// kSlices: as many tiles that follow each other have the same rows and other columns of V.
template <int kTileQ, int kTileKv, int kPack, bool kListed = false, int kSlices = 1>
TILE_DEVICE WorkTile work_tile(const ForwardArgs& args, int number) {
    WorkTile tile{-1};
    const int slice = number % kSlices;
    number /= kSlices;
    if (args.list) {
        const ListHead list = Global<const ListHead>{reinterpret_cast<const ListHead*>(args.list)}[0];
        const Divisor tiles = list.tiles;
        if (tiles.divisor == 0) return tile;
        // Heads run in groups, as below: a group takes the list's tiles in order, each tile for all its heads.
        const int of_group = args.together.quotient(number), group = tiles.quotient(of_group);
        const int entry = of_group - group * int(tiles.divisor);
        const int head = number + (group - of_group) * int(args.together.divisor);
        if (head >= int(args.tile_heads.divisor)) return tile;
        tile = Global<const WorkTile>{reinterpret_cast<const WorkTile*>(args.list + kListHeader)}[entry];
        tile.head = head;
        if (kListed) tile.list = args.lists.heads_each.quotient(head) * args.lists.rows_each + entry;
    } else if (number < args.tiles) {
        // Heads run in groups. Within a group the heaviest tiles come first: the last rows of a causal problem see most
        // keys.
        const int group = args.tiles_together.quotient(number);
        const int inside = number - group * int(args.tiles_together.divisor), tile_row = args.together.quotient(inside);
        const int head = group * int(args.together.divisor) + inside - tile_row * int(args.together.divisor);
        tile.sequence = args.tile_heads.quotient(head);
        tile.head = head - tile.sequence * int(args.tile_heads.divisor);
        tile.seqlen_q = args.seqlen_q;
        tile.seqlen_k = args.seqlen_k;
        if constexpr (kListed) {
            const int list = tile.sequence * args.lists.lists_batch + args.lists.heads_each.quotient(tile.head);
            const int at = Global<const int>{args.lists.order}[list * args.lists.rows_each + tile_row];
            tile.row = at * kTileQ;
            tile.list = list * args.lists.rows_each + at;
        } else {
            tile.row = (args.q_tiles - 1 - tile_row) * kTileQ;
            find_blocks<kTileQ, kTileKv, kPack>(args, tile);
        }
    }
    tile.kv_head = args.tile_heads_per_kv.quotient(tile.head);
    if constexpr (kSlices > 1) tile.descale_v = as_float(uint32_t(slice));
    return tile;
}

// Is a query token within the length of its block of rows?
TILE_DEVICE bool row_there(const TileLists& lists, const WorkTile& tile, int token) {
    if (!lists.lengths_q) return true;
    const int block = lists.block_q.quotient(token);
    const int64_t at = int64_t(tile.sequence) * lists.lengths_q_batch + block;
    return token - block * int(lists.block_q.divisor) < Global<const int>{lists.lengths_q}[at];
}

// Entry `entry` of a tile's list
TILE_DEVICE int unit_at(const TileLists& lists, int row, int whole, int units, int entry) {
    if (entry >= units) return kNoUnit;
    const int at = entry < whole ? entry : lists.width - 1 - (entry - whole);
    return Global<const int>{lists.units}[int64_t(row) * lists.width + at];
}

// What a listed tile visits, in blocks of kBoxes units. Blocks are visited from the last down, so the first one holds
// the list's last units; there it may end early, and the keys of its last unit, the furthest on, may too.
template <int kUnit, int kBoxes> TILE_DEVICE void find_listed(const TileLists& lists, WorkTile& tile) {
    const Global<const int> counts{lists.counts};
    tile.whole = counts[2 * tile.list];
    tile.units = counts[2 * tile.list + 1];
    tile.begin = 0;
    tile.end = tile.units > 0 ? (tile.units + kBoxes - 1) / kBoxes : 1;
    const int last = unit_at(lists, tile.list, tile.whole, tile.units, tile.units - 1) & kUnitMask;
    const int left = tile.seqlen_k - last * kUnit;
    tile.valid = tile.units > 0 ? (tile.units - 1) % kBoxes * kUnit + (left < kUnit ? left : kUnit) : 0;
}
