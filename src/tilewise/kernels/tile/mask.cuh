// Which key tiles a tile of query rows meets, and the mask on those at the edge.
#pragma once
#include "tile/args.cuh"
#include "tile/mma.cuh"

// Tiles [0, full) are seen whole by every row, [full, end) need a mask, what follows nobody sees.
struct KeyTiles {
    int full, end;
};
template <int kTileKv> TILE_DEVICE KeyTiles key_tiles(const AttentionArgs& args, int row0, int tile_q) {
    const int last = row0 + tile_q < args.seqlen_q ? row0 + tile_q - 1 : args.seqlen_q - 1;
    const int least = keys_seen(args, row0), most = keys_seen(args, last);
    return {least > 0 ? least / kTileKv : 0, most > 0 ? (most + kTileKv - 1) / kTileKv : 0};
}

namespace warp {

// S = −inf from key `seen` of its row on; row0: of the warp's sixteen, key0: of the tile.
template <int kSize> TILE_DEVICE void mask(float (&acc_s)[kSize], const AttentionArgs& args, int row0, int key0) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int seen = keys_seen(args, row0 + fragment_row(h)) - key0 - fragment_column();
#pragma unroll
        for (int j = 0; j < kSize / 2; j++)  // j = 2n + i
            if (j / 2 * 8 + j % 2 >= seen) acc_s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
    }
}

}  // namespace warp
