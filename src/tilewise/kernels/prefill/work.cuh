// What the Hopper forward is asked to do, and how its tiles are numbered; tilewise.gpu.abi.ForwardArgs is the mirror of
// ForwardArgs in Python.
#pragma once
#include "common/args.cuh"
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
};

// A tile of query rows of one sequence, and the key blocks [begin, end) that it visits: at least one, which is fully
// masked if no row sees a key. Rows are counted within the sequence; where grouped heads are packed, row = token ·
// kPack + head.
struct alignas(64) WorkTile {
    int row, head, sequence, q_start, k_start, seqlen_q, seqlen_k, begin, end, kv_head;
    float descale_qk, descale_v;
    int unused[4];
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

template <int kTileQ, int kTileKv, int kPack> TILE_DEVICE void find_blocks(const ForwardArgs& args, WorkTile& tile) {
    const int beyond = (tile.row + kTileQ - 1) / kPack,
              last_token = beyond < tile.seqlen_q ? beyond : tile.seqlen_q - 1;
    const Span met = blocks_met<kTileKv>(keys_of(args, tile, tile.row / kPack), keys_of(args, tile, last_token));
    tile.begin = met.begin;
    tile.end = met.end > 0 ? met.end : 1;
}

// The blocks [begin, end) that 64 rows of a tile, from first_row on, all see whole
template <int kTileKv, int kPack>
TILE_DEVICE Span full_blocks(const ForwardArgs& args, const WorkTile& tile, int first_row) {
    const Keys first = keys_of(args, tile, first_row / kPack), last = keys_of(args, tile, (first_row + 63) / kPack);
    return blocks_whole<kTileKv>(first, last);
}

// Tile `number`; row is −1 if there is none.
template <int kTileQ, int kTileKv, int kPack> TILE_DEVICE WorkTile work_tile(const ForwardArgs& args, int number) {
    WorkTile tile{-1};
    if (args.list) {
        const ListHead list = Global<const ListHead>{reinterpret_cast<const ListHead*>(args.list)}[0];
        const Divisor tiles = list.tiles;
        if (tiles.divisor == 0) return tile;
        const int head = tiles.quotient(number), entry = number - head * int(tiles.divisor);
        if (head >= int(args.tile_heads.divisor)) return tile;
        tile = Global<const WorkTile>{reinterpret_cast<const WorkTile*>(args.list + kListHeader)}[entry];
        tile.head = head;
    } else if (number < args.tiles) {
        // Heads run in groups. Within a group the heaviest tiles come first: the last rows of a causal problem see most
        // keys.
        const int group = args.tiles_together.quotient(number);
        const int inside = number - group * int(args.tiles_together.divisor), tile_row = args.together.quotient(inside);
        const int head = group * int(args.together.divisor) + inside - tile_row * int(args.together.divisor);
        tile.sequence = args.tile_heads.quotient(head);
        tile.head = head - tile.sequence * int(args.tile_heads.divisor);
        tile.row = (args.q_tiles - 1 - tile_row) * kTileQ;
        tile.seqlen_q = args.seqlen_q;
        tile.seqlen_k = args.seqlen_k;
        find_blocks<kTileQ, kTileKv, kPack>(args, tile);
    }
    tile.kv_head = args.tile_heads_per_kv.quotient(tile.head);
    return tile;
}
