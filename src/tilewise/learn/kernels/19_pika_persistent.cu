// pika_persistent: a fixed number of blocks, as many as the card holds at once, that take work until there is none.
//
// The work is a list of (16-row tile, head, sequence) items, and the list is a formula: item n is for block n mod grid.
// A block keeps the item's 16 query rows in shared memory while K and V stream past by cp.async: the next K tile is on
// its way during softmax and P V, the next V tile during Q Kᵀ, each into the place that has just become free. Blocks
// are set up once, not once per tile; a head's tiles follow each other, the longest (causal) first, so that blocks that
// run together read the same keys from L2. Any grid works, one block included. half, bf16. Constants: Element,
// kHeadDim, kTileQ (16), kTileKv, kWarps.
#include "learn/kernels/wmma_rows.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps, 4) pika_persistent(const AttentionArgs args) {
    static_assert(kTileQ == 16, "a tile is 16 rows");
    constexpr int kThreads = 32 * kWarps, kParts = kThreads / kTileQ;
    const WmmaTiles t;
    const int warp = threadIdx.x / 32, i = threadIdx.x / kParts, part = threadIdx.x % kParts;
    const int tiles = (args.seqlen_q + kTileQ - 1) / kTileQ, items = tiles * args.heads_q * args.batch;
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x,
              blocks = gridDim.x * gridDim.y * gridDim.z;

    for (int item = block; item < items; item += blocks) {
        const int row0 = (tiles - 1 - item % tiles) * kTileQ;
        const Head<Element> head(args, item / tiles / args.heads_q, item / tiles % args.heads_q);
        const int seen = keys_seen(args, row0 + i);
        const int end = keys_seen(args, row0 + kTileQ < args.seqlen_q ? row0 + kTileQ - 1 : args.seqlen_q - 1);
        const auto load_k = [&](int key0) {  // past the end an empty group, so that groups can be counted
            if (key0 < end) copy_rows_async<kTileKv, kThreads>(t.kK, head.gK, args.k_strides.row, key0, args.seqlen_k);
            ptx::copy_async_commit();
        };
        const auto load_v = [&](int key0) {
            if (key0 < end) copy_rows_async<kTileKv, kThreads>(t.kV, head.gV, args.v_strides.row, key0, args.seqlen_k);
            ptx::copy_async_commit();
        };

        copy_rows_async<kTileQ, kThreads>(0, head.gQ, args.q_strides.row, row0, args.seqlen_q);
        load_k(0);
        load_v(0);
        for (int n = threadIdx.x; n < kTileQ * kPitchO; n += kThreads) t.sO[n] = 0.0f;
        RowState state;
        for (int key0 = 0; key0 < end; key0 += kTileKv) {
            ptx::copy_async_wait<1>();  // K is here, V may not be
            ptx::sync_threads();
            // S = Q Kᵀ
            for (int n = warp; n < kTileKv / 16; n += kWarps) ::warp::score_tile(t, 0, n * 16);
            ptx::sync_threads();
            load_k(key0 + kTileKv);
            // P = exp(S − m), O and l corrected
            softmax_row<kParts>(t, state, i, part, seen - key0, args.scale_log2);
            ptx::copy_async_wait<1>();  // V is here, the next K may not be
            ptx::sync_threads();
            // O += P V
            for (int n = warp; n < kHeadDim / 16; n += kWarps) ::warp::output_tile(t, 0, n * 16);
            ptx::sync_threads();
            load_v(key0 + kTileKv);
        }
        ptx::copy_async_wait<0>();
        ptx::sync_threads();
        write_row<kParts>(t, state, i, part, args, head, row0 + i);
        ptx::sync_threads();  // before the next item overwrites O
    }
}
