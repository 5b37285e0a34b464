// decode_tree_mma: decode_tree.cu for cards without wgmma and TMA. The warps of a block are streaming warps and tile
// warps in turn: they compute the block's tile items together (tile_mma.cuh), and stream what sequences have of their
// own from a common list, as in decode.cu to the bit. Both use the same shared memory.
//
// With two blocks per multiprocessor one half of the grid streams first, so that a multiprocessor has something to
// multiply while it waits for memory. Of a block's four tile warps the first kWarps stream.
//
// Constants: as in decode.cu, and kTileStages: tiles of K and V in the ring; kTileRows: rows of a tile item at most.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/tile_mma.cuh"
static_assert(!kSelected, "what sequences select is theirs alone");
static_assert(!kTma && kJoiners == 0, "tiles come by cp.async, and all warps of a block compute them");
static_assert(kFormat == Format::bits16, "they are multiplied as they are");

extern "C" __global__ void __launch_bounds__(kTileThreads, kBlocksPerSm)
    decode_tree_mma(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV,
                    const __grid_constant__ DecodeArgs args) {
    Loader::init(args, mK, mV);
    const int rank = ptx::uniform(threadIdx.x / 32);
    const int streams_at = kBlocksPerSm == 2 && blockIdx.x < gridDim.x / 2 ? 0 : 1;
#pragma unroll 1  // each body once in the code
    for (int turn = 0; turn < 2; turn++) {
        ptx::sync_threads();
        if (turn != streams_at) TileBody(args, rank).run();
        else if (rank < kWarps) stream<Stream>(args, mK, mV, rank);
    }
    if (args.merge_rows) merge_all(args, {rank, kTileWarps});
}
