// block_wmma: kWarps warps share a tile of K and V.
//
// A block takes kTileQ = 16 · kWarps rows, so each key fetched from global memory serves kWarps times as many rows as
// in warp_wmma. The 16 × 16 tiles of S, and then those of O, are dealt to the warps in turn whatever rows they lie in,
// so every step waits for all warps: four block barriers per key tile.
// half, bf16. Constants: Element, kHeadDim, kTileQ, kTileKv, kWarps.
#include "learn/kernels/wmma_rows.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) block_wmma(const AttentionArgs args) {
    static_assert(kTileQ == 16 * kWarps, "two threads per row");
    constexpr int kThreads = 32 * kWarps;
    const WmmaTiles t;
    const int warp = threadIdx.x / 32, i = threadIdx.x / 2, part = threadIdx.x % 2, row0 = blockIdx.x * kTileQ;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);

    copy_rows<kTileQ, kThreads>(0, head.gQ, args.q_strides.row, row0, args.seqlen_q);
    for (int n = threadIdx.x; n < kTileQ * kPitchO; n += kThreads) t.sO[n] = 0.0f;

    RowState state;
    const int seen = keys_seen(args, row0 + i);
    const int end = keys_seen(args, row0 + kTileQ < args.seqlen_q ? row0 + kTileQ - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTileKv) {
        copy_rows<kTileKv, kThreads>(t.kK, head.gK, args.k_strides.row, key0, args.seqlen_k);
        copy_rows<kTileKv, kThreads>(t.kV, head.gV, args.v_strides.row, key0, args.seqlen_k);
        ptx::sync_threads();
        // S = Q Kᵀ
        for (int n = warp; n < kWarps * (kTileKv / 16); n += kWarps)
            ::warp::score_tile(t, n / (kTileKv / 16) * 16, n % (kTileKv / 16) * 16);
        ptx::sync_threads();
        // P = exp(S − m), O and l corrected
        softmax_row<2>(t, state, i, part, seen - key0, args.scale_log2);
        ptx::sync_threads();
        // O += P V
        for (int n = warp; n < kWarps * (kHeadDim / 16); n += kWarps)
            ::warp::output_tile(t, n / (kHeadDim / 16) * 16, n % (kHeadDim / 16) * 16);
        ptx::sync_threads();
    }
    ptx::sync_threads();
    write_row<2>(t, state, i, part, args, head, row0 + i);
}
