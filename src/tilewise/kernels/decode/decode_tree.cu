// decode_tree: decode.cu with a second body beside the streaming warps, for nodes of the tree that many rows share.
//
// Of sixteen warps the first eight are two warpgroups that take tiles of 128 rows (decode_tile.cuh), one brings their keys and values,
// and the last four stream what sequences have of their own, from a list of theirs, at the same time; kJoiners of the eight join them
// when their tiles are done. What a sequence has of its own is cut and computed as in decode.cu, to the bit. Constants: as there;
// kTileStages: of the ring of tiles; kTileWhole: a copy brings whole rows of a head, since heads follow each other.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/tile.cuh"
static_assert(kBlocksPerSm == 1 && kWarps == 4 && kTma && kFormat == Format::bits16, "registers are dealt to four warpgroups, tiles come by TMA");

extern "C" __global__ void __launch_bounds__(512, kBlocksPerSm)
    decode_tree(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV, const __grid_constant__ TensorMap mTileK,
                const __grid_constant__ TensorMap mTileV, const __grid_constant__ DecodeArgs args) {
    Loader::init(args, mK, mV);
    if (threadIdx.x == 128) {
        tile_ring().init(4 * kTileGroups);
        ptx::fence_mbarrier_init();
    } else if (threadIdx.x == 256) {
        if (args.tile_rounds) ptx::touch(args.tile_items + blockIdx.x);
        ptx::prefetch_tensor_map(&mTileK);
        ptx::prefetch_tensor_map(&mTileV);
    }
    ptx::sync_threads();
    const uint32_t role = ptx::uniform(threadIdx.x / 128);
    if (role < kTileGroups) {
        ptx::take_registers<kTileRegisters>();
        TileBody(args, role).run();
        ptx::barrier_sync(kJoinBarrier, kTileThreads);  // nobody looks at the tiles any more
        const int rank = ptx::uniform(threadIdx.x / 32);
        const bool joins = rank < kJoiners && args.slots > kWarps && Loader::item(args, kWarps).rows > 0;  // more than the others begin with
        if (ptx::any(joins)) stream(args, mK, mV, kWarps + rank);
        if (args.merge_rows) merge_all<true>(args, {rank, 4 * kTileGroups + kWarps});
    } else if (role == kTileGroups) {
        ptx::give_registers<kLoadRegisters>();
        if (ptx::uniform(threadIdx.x / 32) == 4 * kTileGroups) load_tiles(args, mTileK, mTileV);
    } else {
        ptx::give_registers<kStreamRegisters>();
        const int rank = ptx::uniform(threadIdx.x / 32) - 4 * (kTileGroups + 1);
        stream(args, mK, mV, rank);
        if (args.merge_rows) merge_all(args, {4 * kTileGroups + rank, 4 * kTileGroups + kWarps});
    }
}
