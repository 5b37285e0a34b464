// pika_mma: the scalar dot products become tensor-core products.
//
// Tiles are the instruction's own size. A warp has the sixteen query rows of one mma, a key tile is sixteen tokens: one
// step of the instruction's depth in P V, two of its widths in Q Kᵀ. The tile is loaded once, 16 bytes per thread, for
// all warps of the block. So small a tile keeps S in eight registers, but there are two barriers for every sixteen
// keys.
// Constants: Element, kHeadDim, kTileQ (16 rows per warp), kTileKv (16 tokens), kThreads.
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

template <int kRows> using Tile = SharedTile<Element, kRows, kHeadDim, Layout::swizzled>;

extern "C" __global__ void __launch_bounds__(kThreads) pika_mma(const AttentionArgs args) {
    const Tile<kTileQ> sQ(0);
    const Tile<kTileKv> sK(sQ.kBytes), sV(sQ.kBytes + sK.kBytes);
    const int row0 = blockIdx.x * kTileQ, warp_row = threadIdx.x / 32 * 16, first = row0 + warp_row;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);
    block::Stream<kThreads, Tile<kTileQ>> q(head.gQ + row0 * args.q_strides.row, args.q_strides.row,
                                            args.seqlen_q - row0);
    block::Stream<kThreads, Tile<kTileKv>> k(head.gK, args.k_strides.row, args.seqlen_k);
    block::Stream<kThreads, Tile<kTileKv>> v(head.gV, args.v_strides.row, args.seqlen_k);

    q.next(sQ);
    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    for (int tile = 0; tile < tiles.end; tile++) {
        k.next(sK);
        v.next(sV);
        ptx::sync_threads();

        // S = Q Kᵀ
        float acc_s[kTileKv / 2];
        warp::zero(acc_s);
        warp::mma_abt(acc_s, sQ, warp_row, sK);
        if (tile >= tiles.full) warp::mask(acc_s, args, first, tile * kTileKv);

        // P = exp(S − m), O = O · exp(m_old − m) + P V
        float correction[2];
        warp::online_softmax(acc_s, correction, state, args.scale_log2);
        warp::scale_rows(acc_o, correction);
        uint32_t rP[kTileKv / 16][4];
        warp::to_operand<Element>(rP, acc_s);
        warp::mma_ab(acc_o, rP, sV);
        ptx::sync_threads();
    }
    // O = O / l
    float lse[2];
    warp::normalise(acc_o, lse, state);
    warp::store(head.gO + first * args.o_strides.row, args.o_strides.row, args.seqlen_q - first, acc_o);
    warp::store_lse(head.gLse + first, args.seqlen_q - first, lse);
}
