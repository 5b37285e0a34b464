// decode: query rows of many sequences over their pages of keys and values, in one launch that stays on the card until the list is done.
//
// The list says which rows meet which tokens (decode_work.cuh); plain decode, a sequence cut into pieces, a shared prompt and a whole
// tree of them are lists. An item is a warp's: it streams its tokens through a ring of its own (decode_load.cuh,
// decode_stream.cuh), and nobody waits for anybody until all is read; then states that are not the whole are merged (decode_merge.cuh).
//
// Constants: Element: of q and o; Operand: of the products, bf16 or half; kStoredAs: the cache's Format; kHeadDim; kGroupSize: channels that share an int4
// scale; kPageSize; kRows: query rows of an item, at most; kWarps, kStages; kBlocksPerSm; kTma; kScaleRuns: the scales of a page's
// tokens lie one after another; Rule: what is done to scores; kTree: query tokens see each other by a mask; kInStep: warps
// of a block have neighbouring heads, and one copy is for all of them; kLineHeads: heads
// whose rows make up 128 bytes; kTileStages, kJoiners: 0 here.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/warps.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    decode(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV, const __grid_constant__ DecodeArgs args) {
    Loader::init(args, mK, mV);
    ptx::sync_threads();
    const int rank = ptx::uniform(threadIdx.x / 32);
    stream(args, mK, mV, rank);
    if (args.merge_rows) merge_all(args, {rank, kWarps});
}
