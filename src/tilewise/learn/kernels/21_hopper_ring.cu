// hopper_ring: a producer warp keeps a ring of K and V tiles full while two consumer warpgroups compute.
//
// Waiting for a tile and computing on one are now the work of different threads. The producer runs ahead by kStages
// tiles; a full and an empty mbarrier per stage tell who may touch it. The producer gives its registers to the
// consumers, which need them for O, S and P. While one warpgroup is in its softmax, the other has the tensor cores.
// Constants: Element, kHeadDim, kTileQ = 128, kTileKv, kStages.
#include "tile/hopper.cuh"
#include "learn/kernels/mask.cuh"
#include "tile/softmax.cuh"

extern "C" __global__ void __launch_bounds__(384, 1)
    hopper_ring(const __grid_constant__ TensorMap mQ, const __grid_constant__ TensorMap mK,
                const __grid_constant__ TensorMap mV, const AttentionArgs args) {
    constexpr int kQBytes = tile_bytes<kTileQ, kHeadDim>(), kKvBytes = tile_bytes<kTileKv, kHeadDim>(),
                  kConsumerWarps = 8;
    const uint32_t sQ = ptx::shared_address(0u), sK = sQ + kQBytes, sV = sK + kStages * kKvBytes;
    const uint32_t q_full = sV + kStages * kKvBytes;
    const Ring<kStages> k_ring(q_full + 8), v_ring(q_full + 8 + k_ring.kBytes);

    // The heaviest tiles of a causal problem first: the last rows see most keys.
    const int row0 = (gridDim.x - 1 - blockIdx.x) * kTileQ, head = blockIdx.y, batch = blockIdx.z;
    const KeyTiles tiles = key_tiles<kTileKv>(args, row0, kTileQ);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(q_full, 1);
        k_ring.init(kConsumerWarps);
        v_ring.init(kConsumerWarps);
        ptx::fence_mbarrier_init();
    }
    ptx::sync_threads();

    const int group = ptx::uniform(threadIdx.x / 128);
    if (group == 0) {
        ptx::give_registers<24>();
        if (threadIdx.x == 0) {
            const int kv_head = head / (args.heads_q / args.heads_kv);
            ptx::mbarrier_arrive_expect(q_full, kQBytes);
            load_tile<kTileQ, kHeadDim>(sQ, &mQ, q_full, row0, head, batch);
            Turn<kStages> turn;
            for (int j = 0; j < tiles.end; j++, turn.next()) {
                const uint32_t at = turn.stage * kKvBytes;
                const uint32_t k_full = k_ring.acquire(turn, kKvBytes);
                load_tile<kTileKv, kHeadDim>(sK + at, &mK, k_full, j * kTileKv, kv_head, batch);
                const uint32_t v_full = v_ring.acquire(turn, kKvBytes);
                load_tile<kTileKv, kHeadDim>(sV + at, &mV, v_full, j * kTileKv, kv_head, batch);
            }
        }
        return;
    }
    ptx::take_registers<240>();
    const uint32_t rows_at = ptx::uniform((group - 1) * 64);  // this warpgroup's rows of the tile
    const int warp_row = row0 + int(rows_at) + threadIdx.x / 32 % 4 * 16;
    float acc_o[kHeadDim / 2];
    warp::zero(acc_o);
    warp::RowState state;
    ptx::mbarrier_wait(q_full, 0);
    Turn<kStages> turn;
    for (int j = 0; j < tiles.end; j++, turn.next()) {
        const uint32_t at = turn.stage * kKvBytes;
        // S = Q Kᵀ
        float acc_s[kTileKv / 2];
        k_ring.wait(turn);
        ptx::wgmma_fence();
        warpgroup::mma_qk<Element, kTileKv, kHeadDim, kTileQ>(acc_s, k_major(sQ + rows_at * kPanelRowBytes),
                                                              k_major(sK + at));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        k_ring.release(turn);
        if (j >= tiles.full) warp::mask(acc_s, args, warp_row, j * kTileKv);
        // P = softmax so far; O = O · c + P V
        float correction[2];
        warp::online_softmax(acc_s, correction, state, args.scale_log2);
        warp::scale_rows(acc_o, correction);
        uint32_t rP[kTileKv / 16][4];
        warp::to_operand<Element>(rP, acc_s);
        v_ring.wait(turn);
        ptx::wgmma_fence();
        warpgroup::mma_pv<Element, kTileKv, kHeadDim>(acc_o, rP, mn_major<kTileKv>(sV + at));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        v_ring.release(turn);
    }
    const Head<Element> out(args, batch, head);
    float lse[2];
    warp::normalise(acc_o, lse, state);
    warp::store(out.gO + warp_row * args.o_strides.row, args.o_strides.row, args.seqlen_q - warp_row, acc_o);
    warp::store_lse(out.gLse + warp_row, args.seqlen_q - warp_row, lse);
}
