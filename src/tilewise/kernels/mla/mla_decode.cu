// mla_decode: decode over rows that are keys and values at once, on Hopper. One persistent launch walks the items of a
// decode plan: query rows over a range of a sequence's tokens, or over a node that many sequences share. What they
// leave is merged as in decode.cu.
//
// Constants: Element; kQueryDim, kValueDim: channels of a row, and how many of them are a value; kPageSize; kRows:
// query rows of an item at most; kRaw: codes stay codes in the ring; kLooksAhead: a warp looks up the next item;
// kPlaces: panels in the ring; kAhead: panels of a block that are scored before the block before is multiplied; of 64
// rows kTogether: panels of values per product; kFetches: blocks ahead that L2 is asked for; kGather: rows are copied
// one by one; kChosen: those that each query token has chosen; kStoredAs: a Format; Rule: what is done to scores;
// kSelected: false.
//
// mRows: 16-bit rows, or codes, with mScales and mRest; kGather: none of them is looked at.
#include "mla/body.cuh"
#include "mla/raw.cuh"
#include "mla/wide.cuh"
#include "mla/widen.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode(const __grid_constant__ TensorMap mRows, const __grid_constant__ TensorMap mScales,
               const __grid_constant__ TensorMap mRest, const __grid_constant__ DecodeArgs args,
               const __grid_constant__ MlaArgs mla) {
    if (threadIdx.x == 0) init_barriers();
    ptx::sync_threads();
    const uint32_t role = ptx::uniform(threadIdx.x / 128);
    if (role < 2) {
        ptx::take_registers<kComputeRegisters>();
        if constexpr (kRaw) Raw(args, mla).run();
        else if constexpr (kWide) Wide(args, mla, role).run();
        else Body(args, mla, role).run();
        const Mergers all{int(ptx::uniform(threadIdx.x / 32)), kComputing / 32};
        if (args.merge_rows) merge_items(args, all);
    } else {
        if constexpr (kWidens)
            if (role == 3) {
                ptx::give_registers<kWidenRegisters>();
                widen(args);
                return;
            }
        ptx::give_registers<kLoadRegisters>();
        const uint32_t loader = ptx::uniform(threadIdx.x / 32) - kComputing / 32;
        if constexpr (kScaled) {
            if constexpr (kGather) copy_codes(args, mla);
            else if (loader == 0) load_code_boxes(args, mRows, mScales, mRest);
            else if (kLooksAhead && loader == 2) look_ahead(args);
        } else if constexpr (kGather) {
            load_rows(args, mla);
        } else {
            constexpr bool kTwo = kFetches > 0;
            if (loader == 0) load_boxes<0, kTwo ? kMine : kBlockPlaces>(args, mRows);
            else if (kTwo && loader == 1) load_boxes<kMine, kBlockPlaces>(args, mRows);
            else if (kLooksAhead && loader == 2) look_ahead(args);
        }
    }
}
