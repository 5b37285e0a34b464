// decode: query rows of many sequences over their pages of keys and values, in one persistent launch.
//
// A list of items says which rows meet which tokens (work.cuh). Plain decode, a sequence split into pieces, a shared
// prompt and a whole tree of shared prefixes differ only in their lists. Each warp streams the tokens of its items
// through a ring of its own (load.cuh, stream.cuh) and waits for no other warp until all tokens are read. Then states
// that cover only a part of their row's keys are merged (merge.cuh).
//
// Constants:
// Element: of q and o. Operand: of the products, bf16 or half. kStoredAs: the cache's Format.
// kHeadDim: channels of q and K. kValueDim: channels of V and o.
// kGroupSize: channels per int4 scale. kPageSize: tokens per page. kRows: query rows per item, at most.
// kWarps: streaming warps per block. kStages: chunks in a warp's ring. kBlocksPerSm.
// kTma: chunks come by TMA; without it, by cp.async. kScaleRuns: the scales of a page's tokens are contiguous.
// Rule: what is done to scores. kTree: query tokens see each other by a mask. kInStep: the warps of a block work on
// neighbouring heads, and one copy brings a chunk for all of them. kLineHeads, kValueLineHeads: heads whose rows of K,
// and of V, make up 128 bytes.
// kSelected: sequences read the pages that select.cu has listed.
// kTileStages, kJoiners: 0 here; decode_tree.cu and decode_tree_mma.cu have them.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/stream.cuh"
#include "decode/warps.cuh"
static_assert(!kSelected || !kTree, "a mask of query tokens counts on the key of each of them");

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    decode(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV,
           const __grid_constant__ DecodeArgs args) {
    Loader::init(args, mK, mV);
    ptx::sync_threads();
    const int rank = ptx::uniform(threadIdx.x / 32);
    stream<Stream>(args, mK, mV, rank);
    if (args.merge_rows) merge_all(args, {rank, kWarps});
}
