// mla_decode_mma: mla_decode on cards without wgmma and TMA, by mma.sync and cp.async. The list, the states and the
// merge are the same.
//
// Constants: Element; kQueryDim, kValueDim: channels of a row, and how many of them are a value; kPageSize; kRows:
// query rows of an item at most; kSlice: keys that are computed at once; kWarps; kStages: slices in the ring; kChosen:
// each query token has chosen the rows that it reads; kStoredAs: a Format; Rule: what is done to scores; kLooksAhead,
// kSelected: false.
#include "mla/mma_body.cuh"

extern "C" __global__ void __launch_bounds__(kComputing, 1)
    mla_decode_mma(const __grid_constant__ DecodeArgs args, const __grid_constant__ MlaArgs mla) {
    MmaBody body(args, mla);
    walk_items(body);
    const Mergers all{int(ptx::uniform(threadIdx.x / 32)), kComputing / 32};
    if (args.merge_rows) merge_items(args, all);
}
