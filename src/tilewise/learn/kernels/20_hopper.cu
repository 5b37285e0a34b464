// hopper: TMA brings the tiles, wgmma multiplies them straight from shared memory.
//
// One thread requests a whole tile and an mbarrier tells when it is there: no address arithmetic, no registers on the
// way, and rows outside the tensor arrive as zeros. wgmma takes K and V from shared memory under the hardware's own
// 128-byte swizzle, four warps at a time, and P from registers, where the softmax left it: ldmatrix is gone. Nothing
// overlaps yet.
// Constants: Element, kHeadDim, kTileQ = 64, kTileKv.
#include "tile/hopper.cuh"
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

extern "C" __global__ void __launch_bounds__(128)
    hopper(const __grid_constant__ TensorMap mQ, const __grid_constant__ TensorMap mK,
           const __grid_constant__ TensorMap mV, const AttentionArgs args) {
    constexpr int kQBytes = tile_bytes<kTileQ, kHeadDim>(), kKvBytes = tile_bytes<kTileKv, kHeadDim>();
    const uint32_t sQ = ptx::shared_address(0u), sK = sQ + kQBytes, sV = sK + kKvBytes;
    const uint32_t q_full = sV + kKvBytes, k_full = q_full + 8, v_full = q_full + 16;

    const int row0 = blockIdx.x * kTileQ, head = blockIdx.y, batch = blockIdx.z,
              kv_head = head / (args.heads_q / args.heads_kv);
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);
    const bool loader = threadIdx.x == 0;
    if (loader) {
        ptx::mbarrier_init(q_full, 1);
        ptx::mbarrier_init(k_full, 1);
        ptx::mbarrier_init(v_full, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect(q_full, kQBytes);
        load_tile<kTileQ, kHeadDim>(sQ, &mQ, q_full, row0, head, batch);
    }
    ptx::sync_threads();

    const int warp_row = row0 + threadIdx.x / 32 * 16;  // the first of the warp's sixteen rows
    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    ptx::mbarrier_wait(q_full, 0);
    for (int j = 0; j < tiles.end; j++) {
        if (loader) {
            ptx::mbarrier_arrive_expect(k_full, kKvBytes);
            load_tile<kTileKv, kHeadDim>(sK, &mK, k_full, j * kTileKv, kv_head, batch);
            ptx::mbarrier_arrive_expect(v_full, kKvBytes);
            load_tile<kTileKv, kHeadDim>(sV, &mV, v_full, j * kTileKv, kv_head, batch);
        }
        ptx::mbarrier_wait(k_full, j % 2);
        // S = Q Kᵀ
        float acc_s[kTileKv / 2];
        ptx::wgmma_fence();
        warpgroup::mma_qk<Element, kTileKv, kHeadDim, kTileQ>(acc_s, k_major(sQ), k_major(sK));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        if (j >= tiles.full) warp::mask(acc_s, args, warp_row, j * kTileKv);
        // P = softmax so far; O = O · c + P V
        float correction[2];
        warp::online_softmax(acc_s, correction, state, args.scale_log2);
        warp::scale_rows(acc_o, correction);
        uint32_t rP[kTileKv / 16][4];
        warp::to_operand<Element>(rP, acc_s);
        ptx::mbarrier_wait(v_full, j % 2);
        ptx::wgmma_fence();
        warpgroup::mma_pv<Element, kTileKv, kHeadDim>(acc_o, rP, mn_major<kTileKv>(sV));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::sync_threads();  // all warps are done with K and V: the next tiles may come
    }
    const Head<Element> out(args, batch, head);
    float lse[2];
    warp::normalise(acc_o, lse, state);
    warp::store(out.gO + warp_row * args.o_strides.row, args.o_strides.row, args.seqlen_q - warp_row, acc_o);
    warp::store_lse(out.gLse + warp_row, args.seqlen_q - warp_row, lse);
}
