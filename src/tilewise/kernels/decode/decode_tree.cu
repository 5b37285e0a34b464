// decode_tree: decode.cu with a second body beside the streaming warps, for nodes of the prefix tree that many rows
// share.
//
// A block has sixteen warps. The first eight are two warpgroups that compute tiles of 128 rows (tile.cuh); one warp
// loads their keys and values, and three more widen them if they are quantised (tile_widen.cuh); the last four stream
// what sequences have of their own at the same time, from a list of their own. When the tiles are done, kJoiners of the
// first eight warps help the streaming warps. A sequence's own tokens are split and computed as in decode.cu, to the
// bit. Where V has more than 128 channels there is one warpgroup for tiles, of 64 rows, and kWarps of the last four
// warps stream.
//
// Constants: as in decode.cu, and kTileStages: tiles in the ring; kTileWhole: one copy brings all panels of a head's
// rows, which needs heads that are contiguous; kJoiners; kRawStages: tiles of codes in the ring before it.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/tile.cuh"
static_assert(kBlocksPerSm == 1 && kWarps <= 4, "registers are dealt to warpgroups, the last of which streams");
static_assert(!kSelected, "what sequences select is theirs alone");
static_assert(kTma && kFormat != Format::bits32, "tiles come by TMA and are multiplied in 16 bits");

extern "C" __global__ void __launch_bounds__(kTileBlock, kBlocksPerSm)
    decode_tree(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV,
                const __grid_constant__ TensorMap mTileK, const __grid_constant__ TensorMap mTileV,
                const __grid_constant__ DecodeArgs args) {
    Loader::init(args, mK, mV);
    if (threadIdx.x == 96) {
        tile_ring().init(4 * kTileGroups, kScaled ? kWideners / 32 : 1);
        if constexpr (kScaled) {
            value_ring().init(4 * kTileGroups, kWideners / 32);
            raw_ring().init(kWideners / 32, 1 + TileScales::kArrivals);  // codes; scales
        }
        ptx::fence_mbarrier_init();
    } else if (threadIdx.x == 64) {
        if (args.tile_rounds) ptx::touch(args.tile_items + blockIdx.x);
        ptx::prefetch_tensor_map(&mTileK);
        ptx::prefetch_tensor_map(&mTileV);
    }
    ptx::sync_threads();
    const uint32_t role = ptx::uniform(threadIdx.x / 128);
    if (role < kTileGroups) {
        ptx::take_registers<kTileRegisters>();
        TileBody(args, role).run();
        ptx::barrier_sync(kJoinBarrier, kTileThreads);  // no warp reads the tiles any more: joiners use their memory
        const int rank = ptx::uniform(threadIdx.x / 32);
        // Only if there are more items than the streaming warps begin with
        const bool joins = rank < kJoiners && args.slots > kWarps && Loader::item(args, kWarps).rows > 0;
        if (ptx::any(joins)) stream<Stream>(args, mK, mV, kWarps + rank);
        if (args.merge_rows) merge_all<true>(args, {rank, 4 * kTileGroups + kWarps});
    } else if (role == kTileGroups) {
        ptx::give_registers<kLoadRegisters>();
        if (ptx::uniform(threadIdx.x / 32) == 4 * kTileGroups) load_tiles(args, mTileK, mTileV);
        else if constexpr (kScaled) widen_tiles(args, tile_item, tile_eight);
    } else {
        if constexpr (kStreamRegisters > kStartRegisters) ptx::take_registers<kStreamRegisters>();
        else ptx::give_registers<kStreamRegisters>();
        const auto rank = [] {  // computed where it is needed: uniform registers are scarce too
            return int(ptx::uniform(ptx::just_in_time(threadIdx.x) / 32)) & 3;
        };
        if (rank() >= kWarps) return;
        stream<Stream>(args, mK, mV, rank());
        if (args.merge_rows) merge_all(args, {4 * kTileGroups + rank(), 4 * kTileGroups + kWarps});
    }
}
