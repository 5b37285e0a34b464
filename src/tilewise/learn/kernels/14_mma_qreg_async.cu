// mma_qreg_async: the next K and V tiles travel while this one is computed.
//
// Until here a block loaded, waited, computed, waited: memory was idle half of the time and the tensor cores the other
// half. cp.async writes to shared memory without passing through registers, and no thread waits for it before the
// tile's own turn: there are two stages, and the copy into one is in flight while the other is computed on. One barrier
// per tile does both jobs: after it all threads see what each has waited for, and all are done with the stage that is
// filled next. 128 query rows (eight warps) meet each tile, which halves the traffic from L2. Rows must begin at
// multiples of 16 bytes.
// Constants: Element, kHeadDim, kTileQ, kTileKv, kThreads (kTileQ / 16 warps).
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

template <int kRows> using Tile = SharedTile<Element, kRows, kHeadDim, Layout::swizzled>;
constexpr int kTileBytes = Tile<kTileKv>::kBytes;

extern "C" __global__ void __launch_bounds__(kThreads, kHeadDim <= 64 ? 2 : 1)
    mma_qreg_async(const AttentionArgs args) {
    const Tile<kTileQ> sQ(2 * kTileBytes), sO(0);  // in the second stage before it is needed, over the first at the end
    const int row0 = blockIdx.x * kTileQ, warp_row = threadIdx.x / 32 * 16, first = row0 + warp_row;
    const Head<Element> head(args, blockIdx.z, blockIdx.y);
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);
    const auto stage = [](int tile) { return uint32_t(tile % 2 * 2 * kTileBytes); };
    block::Stream<kThreads, Tile<kTileQ>> q(head.gQ + row0 * args.q_strides.row, args.q_strides.row,
                                            args.seqlen_q - row0);
    block::Stream<kThreads, Tile<kTileKv>> k(head.gK, args.k_strides.row, args.seqlen_k);
    block::Stream<kThreads, Tile<kTileKv>> v(head.gV, args.v_strides.row, args.seqlen_k);
    const auto load = [&](int tile) {
        if (tile < tiles.end) {
            k.next_async(Tile<kTileKv>(stage(tile)));
            v.next_async(Tile<kTileKv>(stage(tile) + kTileBytes));
        }
        ptx::copy_async_commit();
    };

    q.next_async(sQ);
    ptx::copy_async_commit();
    load(0);
    ptx::copy_async_wait<1>();  // Q is here, the first tile may still be on its way
    ptx::sync_threads();
    uint32_t rQ[kHeadDim / 16][4];
    warp::load_a(rQ, sQ, warp_row);

    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    for (int tile = 0; tile < tiles.end; tile++) {
        ptx::copy_async_wait<0>();
        ptx::sync_threads();
        load(tile + 1);

        // S = Q Kᵀ
        const Tile<kTileKv> sK(stage(tile)), sV(stage(tile) + kTileBytes);
        float acc_s[kTileKv / 2];
        warp::zero(acc_s);
        warp::mma_abt(acc_s, rQ, sK);
        if (tile >= tiles.full) warp::mask(acc_s, args, first, tile * kTileKv);

        // P = exp(S − m), O = O · exp(m_old − m)
        float correction[2];
        warp::online_softmax(acc_s, correction, state, args.scale_log2);
        warp::scale_rows(acc_o, correction);
        uint32_t rP[kTileKv / 16][4];
        warp::to_operand<Element>(rP, acc_s);

        // O += P V
        warp::mma_ab(acc_o, rP, sV);
    }
    ptx::copy_async_wait<0>();
    ptx::sync_threads();

    // O = O / l
    float lse[2];
    warp::normalise(acc_o, lse, state);
    warp::store_vectors(head.gO + first * args.o_strides.row, args.o_strides.row, args.seqlen_q - first, acc_o, sO,
                        warp_row);
    warp::store_lse(head.gLse + first, args.seqlen_q - first, lse);
}
