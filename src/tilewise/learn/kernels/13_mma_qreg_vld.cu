// mma_qreg_vld: 16 bytes per thread to and from global memory.
//
// Loads of two bytes make requests of 64 bytes per warp, and take eight times the instructions of 16-byte loads:
// address, bound, load, store, all for one element. O leaves the same way: its fragments go through shared memory,
// where a row lies together, instead of 2-byte stores that touch eight rows at once. Rows must begin at multiples of 16
// bytes.
// Constants: Element, kHeadDim, kTileQ, kTileKv, kThreads (kTileQ / 16 warps).
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

template <int kRows> using Tile = SharedTile<Element, kRows, kHeadDim, Layout::swizzled>;

extern "C" __global__ void __launch_bounds__(kThreads) mma_qreg_vld(const AttentionArgs args) {
    const Tile<kTileQ> sQ(0), sO(0);  // before the first key tile, and after the last
    const Tile<kTileKv> sK(0), sV(sK.kBytes);
    const int row0 = blockIdx.x * kTileQ, warp_row = threadIdx.x / 32 * 16;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);

    block::Stream<kThreads, Tile<kTileQ>> q(head.gQ + row0 * args.q_strides.row, args.q_strides.row,
                                            args.seqlen_q - row0);
    block::Stream<kThreads, Tile<kTileKv>> k(head.gK, args.k_strides.row, args.seqlen_k);
    block::Stream<kThreads, Tile<kTileKv>> v(head.gV, args.v_strides.row, args.seqlen_k);
    q.next(sQ);
    ptx::sync_threads();
    uint32_t rQ[kHeadDim / 16][4];
    warp::load_a(rQ, sQ, warp_row);
    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    for (int tile = 0; tile < tiles.end; tile++) {
        ptx::sync_threads();  // all have read what lay here before
        k.next(sK);
        v.next(sV);
        ptx::sync_threads();

        // S = Q Kᵀ
        float acc_s[kTileKv / 2];
        warp::zero(acc_s);
        warp::mma_abt(acc_s, rQ, sK);
        if (tile >= tiles.full) warp::mask(acc_s, args, row0 + warp_row, tile * kTileKv);

        // P = exp(S − m), O = O · exp(m_old − m)
        float correction[2];
        warp::online_softmax(acc_s, correction, state, args.scale_log2);
        warp::scale_rows(acc_o, correction);
        uint32_t rP[kTileKv / 16][4];
        warp::to_operand<Element>(rP, acc_s);

        // O += P V
        warp::mma_ab(acc_o, rP, sV);
    }
    // O = O / l
    float lse[2];
    warp::normalise(acc_o, lse, state);
    const int first = row0 + warp_row;
    ptx::sync_threads();
    warp::store_vectors(head.gO + first * args.o_strides.row, args.o_strides.row, args.seqlen_q - first, acc_o, sO,
                        warp_row);
    warp::store_lse(head.gLse + first, args.seqlen_q - first, lse);
}
