// Which key tiles a tile of query rows meets, and the mask on those at the edge.
#pragma once
#include "learn/kernels/args.cuh"

// Every row sees the tiles [0, full) whole; the tiles [full, end) need a mask; no row sees what follows. Rows see from
// the first key on, which makes this shorter than keys.cuh's blocks_whole and blocks_met.
struct KeyTiles {
    int full, end;
};
template <int kTileKv> TILE_DEVICE KeyTiles key_tiles(const AttentionArgs& args, int row0, int tile_q) {
    const int last = row0 + tile_q < args.seqlen_q ? row0 + tile_q - 1 : args.seqlen_q - 1;
    const int least = keys_seen(args, row0), most = keys_seen(args, last);
    return {least > 0 ? least / kTileKv : 0, most > 0 ? (most + kTileKv - 1) / kTileKv : 0};
}

namespace warp {

// S = −inf where a row does not see the key; row0: the first of the warp's sixteen rows, key0: the tile's first key.
template <int kSize> TILE_DEVICE void mask(float (&acc_s)[kSize], const AttentionArgs& args, int row0, int key0) {
#pragma unroll
    for (int h = 0; h < 2; h++) mask_row_from(acc_s, h, key0, keys_seen(args, row0 + fragment_row(h)));
}

}  // namespace warp
