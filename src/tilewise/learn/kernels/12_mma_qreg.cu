// mma_qreg: Q's fragments are read once and stay in registers.
//
// Q is the same for every key tile, yet its fragments were read again for each, one ldmatrix in nine. Once they are in
// registers the shared copy is not needed: that memory goes to K and V, which no longer take turns but are loaded
// together, so a tile takes two barriers instead of four. The memory saved pays for 128 rows per block: each key tile
// serves twice as many.
// Constants: Element, kHeadDim, kTileQ, kTileKv, kThreads (kTileQ / 16 warps).
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

template <int kRows> using Tile = SharedTile<Element, kRows, kHeadDim, Layout::swizzled>;

extern "C" __global__ void __launch_bounds__(kThreads) mma_qreg(const AttentionArgs args) {
    const Tile<kTileQ> sQ(0);  // until its fragments are read
    const Tile<kTileKv> sK(0), sV(sK.kBytes);
    const int row0 = blockIdx.x * kTileQ, warp_row = threadIdx.x / 32 * 16;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);

    block::load<kThreads>(sQ, head.gQ + row0 * args.q_strides.row, args.q_strides.row, args.seqlen_q - row0);
    ptx::sync_threads();
    uint32_t rQ[kHeadDim / 16][4];
    warp::load_a(rQ, sQ, warp_row);
    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    for (int tile = 0; tile < tiles.end; tile++) {
        const int key0 = tile * kTileKv;
        ptx::sync_threads();  // all have read what lay here before
        block::load<kThreads>(sK, head.gK + key0 * args.k_strides.row, args.k_strides.row, sV,
                              head.gV + key0 * args.v_strides.row, args.v_strides.row, args.seqlen_k - key0);
        ptx::sync_threads();

        // S = Q Kᵀ
        float acc_s[kTileKv / 2];
        warp::zero(acc_s);
        warp::mma_abt(acc_s, rQ, sK);
        if (tile >= tiles.full) warp::mask(acc_s, args, row0 + warp_row, key0);

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
    warp::store(head.gO + first * args.o_strides.row, args.o_strides.row, args.seqlen_q - first, acc_o);
    warp::store_lse(head.gLse + first, args.seqlen_q - first, lse);
}
