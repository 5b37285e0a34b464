// mma_swizzle: the same kernel over XOR-swizzled shared tiles.
//
// A matrix of ldmatrix is the same 16-byte chunk of eight rows. In plain tiles those eight chunks lie in the same four
// banks and take eight passes (head_dim 64, 128), or four (32, 96). With the chunk's number XORed with the row's they
// take one. No memory is spent on padding, and only the layout's name changes: a tile knows where its chunks are.
// Constants: Element, kHeadDim, kTileQ, kTileKv, kThreads (kTileQ / 16 warps).
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

template <int kRows> using Tile = SharedTile<Element, kRows, kHeadDim, Layout::swizzled>;

extern "C" __global__ void __launch_bounds__(kThreads) mma_swizzle(const AttentionArgs args) {
    const Tile<kTileQ> sQ(0);
    const Tile<kTileKv> sKV(sQ.kBytes);
    const int row0 = blockIdx.x * kTileQ, warp_row = threadIdx.x / 32 * 16;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);

    block::load<kThreads>(sQ, head.gQ + row0 * args.q_strides.row, args.q_strides.row, args.seqlen_q - row0);
    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    for (int tile = 0; tile < tiles.end; tile++) {
        const int key0 = tile * kTileKv;
        block::load<kThreads>(sKV, head.gK + key0 * args.k_strides.row, args.k_strides.row, args.seqlen_k - key0);
        ptx::sync_threads();

        // S = Q Kᵀ
        float acc_s[kTileKv / 2];
        warp::zero(acc_s);
        warp::mma_abt(acc_s, sQ, warp_row, sKV);
        ptx::sync_threads();
        block::load<kThreads>(sKV, head.gV + key0 * args.v_strides.row, args.v_strides.row, args.seqlen_k - key0);
        if (tile >= tiles.full) warp::mask(acc_s, args, row0 + warp_row, key0);

        // P = exp(S − m), O = O · exp(m_old − m)
        float correction[2];
        warp::online_softmax(acc_s, correction, state, args.scale_log2);
        warp::scale_rows(acc_o, correction);
        uint32_t rP[kTileKv / 16][4];
        warp::to_operand<Element>(rP, acc_s);
        ptx::sync_threads();

        // O += P V
        warp::mma_ab(acc_o, rP, sKV);
        ptx::sync_threads();
    }
    // O = O / l
    float lse[2];
    warp::normalise(acc_o, lse, state);
    const int first = row0 + warp_row;
    warp::store(head.gO + first * args.o_strides.row, args.o_strides.row, args.seqlen_q - first, acc_o);
    warp::store_lse(head.gLse + first, args.seqlen_q - first, lse);
}
