// wmma_row_block: each warp owns 16 rows from the first product to the last.
//
// In block_wmma the scores of one warp go into the softmax of another, so all warps wait for each other between the
// steps. Here the rows of S, P and O of a warp are made and used by that warp alone. Only the K and V tiles are shared,
// which takes two block barriers per key tile instead of four, and a warp may be in its softmax while another keeps the
// tensor cores busy. A warp whose rows see none of a tile's keys skips it.
// half, bf16. Constants: Element, kHeadDim, kTileQ, kTileKv, kWarps.
#include "learn/kernels/wmma_rows.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) wmma_row_block(const AttentionArgs args) {
    static_assert(kTileQ == 16 * kWarps, "a warp is 16 rows");
    constexpr int kThreads = 32 * kWarps;
    const WmmaTiles t;
    const int m = threadIdx.x / 32 * 16, i = threadIdx.x / 2, part = threadIdx.x % 2, row0 = blockIdx.x * kTileQ;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);

    copy_rows<kTileQ, kThreads>(0, head.gQ, args.q_strides.row, row0, args.seqlen_q);
    for (int n = threadIdx.x; n < kTileQ * kPitchO; n += kThreads) t.sO[n] = 0.0f;

    RowState state;
    const int seen = keys_seen(args, row0 + i), warp_end = keys_seen(args, row0 + m + 15);
    const int end = keys_seen(args, row0 + kTileQ < args.seqlen_q ? row0 + kTileQ - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTileKv) {
        copy_rows<kTileKv, kThreads>(t.kK, head.gK, args.k_strides.row, key0, args.seqlen_k);
        copy_rows<kTileKv, kThreads>(t.kV, head.gV, args.v_strides.row, key0, args.seqlen_k);
        ptx::sync_threads();
        if (key0 < warp_end) {
            // S = Q Kᵀ
            for (int n = 0; n < kTileKv; n += 16) warp::score_tile(t, m, n);
            ptx::sync_warp();
            // P = exp(S − m), O and l corrected
            softmax_row<2>(t, state, i, part, seen - key0, args.scale_log2);
            ptx::sync_warp();
            // O += P V
            for (int n = 0; n < kHeadDim; n += 16) warp::output_tile(t, m, n);
        }
        ptx::sync_threads();
    }
    ptx::sync_threads();
    write_row<2>(t, state, i, part, args, head, row0 + i);
}
