// warp_wmma: the products go to the tensor cores, by wmma, with one warp per block.
//
// A warp takes 32 rows, two wmma products of 16. Q Kᵀ and P V are now tensor-core work, and hardly any of the
// arithmetic is scalar. The softmax between them works on rows, one thread each, but a fragment does not say where its
// rows are: S, P and O go through shared memory. A lone warp shares K and V with no other, and has nothing to do while
// it waits.
// half, bf16. Constants: Element, kHeadDim, kTileQ (32), kTileKv.
#include "learn/kernels/wmma_rows.cuh"

extern "C" __global__ void __launch_bounds__(32) warp_wmma(const AttentionArgs args) {
    static_assert(kTileQ == 32, "one thread per row");
    const WmmaTiles t;
    const int i = threadIdx.x, row0 = blockIdx.x * kTileQ;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);

    copy_rows<kTileQ, 32>(0, head.gQ, args.q_strides.row, row0, args.seqlen_q);
    for (int n = threadIdx.x; n < kTileQ * kPitchO; n += 32) t.sO[n] = 0.0f;

    RowState state;
    const int seen = keys_seen(args, row0 + i);
    const int end = keys_seen(args, row0 + kTileQ < args.seqlen_q ? row0 + kTileQ - 1 : args.seqlen_q - 1);
    for (int key0 = 0; key0 < end; key0 += kTileKv) {
        copy_rows<kTileKv, 32>(t.kK, head.gK, args.k_strides.row, key0, args.seqlen_k);
        copy_rows<kTileKv, 32>(t.kV, head.gV, args.v_strides.row, key0, args.seqlen_k);
        ptx::sync_warp();
        // S = Q Kᵀ
        for (int m = 0; m < kTileQ; m += 16)
            for (int n = 0; n < kTileKv; n += 16) warp::score_tile(t, m, n);
        ptx::sync_warp();
        // P = exp(S − m), O and l corrected
        softmax_row<1>(t, state, i, 0, seen - key0, args.scale_log2);
        ptx::sync_warp();
        // O += P V
        for (int m = 0; m < kTileQ; m += 16)
            for (int n = 0; n < kHeadDim; n += 16) warp::output_tile(t, m, n);
        ptx::sync_warp();
    }
    ptx::sync_warp();
    write_row<1>(t, state, i, 0, args, head, row0 + i);
}
