// decode_small: few sequences over their pages, each sequence and KV head by one cluster of thread blocks.
//
// With few sequences a launch lasts about as long as its chain of dependent steps: look a page up, wait for keys, for
// values, meet all other blocks, read their states, merge. Here a block is told by its number what it computes; its
// warps share a piece of the tokens, so that all bytes are requested at once and no warp walks through many chunks
// alone; and states go through the shared memory of the cluster's blocks, each of which merges a slice of the columns.
// There is no list of items, no grid barrier and no scratch memory.
//
// Pieces, the operations on each value and the order in which states are folded are those of decode.cu: results are the
// same to the bit.
//
// A warp computes the scores of its own chunks over all channels, and O over all tokens for its own channels. Between
// the two, scores are exchanged through shared memory.
//
// Constants: those of decode.cu, and
// kCluster: blocks per cluster. kRound: chunks that the warps of a block compute between two of their barriers.
// kDepth: rounds in the ring; 1 if no block has more than one round. kMostStates: states of a sequence at most.
// kHeadRows: query rows per sequence and KV head, rounded up to a power of two.
#include "tile/quant.cuh"
constexpr Format kFormat = static_cast<Format>(kStoredAs);
#include "decode/small.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    decode_small(const __grid_constant__ TensorMap mK, const __grid_constant__ TensorMap mV,
                 const __grid_constant__ DecodeArgs args, const __grid_constant__ SmallArgs small) {
    const int block = blockIdx.x, kv_head = blockIdx.y, sequence = blockIdx.z;  // block: of a cluster
    const int rank = ptx::uniform(threadIdx.x / 32);
    const SmallSequence& of = small.of[sequence];
    // What is looked up: the length, the pages and Q, none of which waits for another
    const int known = length_of(args, sequence, kv_head);
    SmallLoader loader(args, mK, mV, of, sequence, kv_head, rank, block);
    if (threadIdx.x == 0) init_barriers(loader.window);
    if (kTma && threadIdx.x == 32 * kWarps - 1) {
        ptx::prefetch_tensor_map(&mK);
        ptx::prefetch_tensor_map(&mV);
    }
    ptx::cluster_arrive();
    DecodeItem item{};
    item.sequence = item.table = sequence;
    item.rows = args.rows_each.divisor;
    item.caller_head = of.caller << 12 | kv_head;
    item.kind = kOwn;
    SmallStream body(args, loader.window, rank);
    body.load_q(item, 0);
    if constexpr (kTma) ptx::sync_threads();  // barriers are there
    const int length = ptx::just_in_time(known);  // not waited for before Q is asked for

    const Share share(of, block, length);
#pragma unroll
    for (int n = 0; n < kDepth; n++) loader.request(share, n, n);
    loader.further = loader.look_up(32);
    body.begin_rows(item, length, {0, length});
    body.avoid_zero();
    body.begin_piece();
    if (!kAlone && threadIdx.x == 0)
        ptx::mbarrier_arrive_expect(loader.window + kAtLanded, share.states * (kSlice * 4 + kHeadRows * 8));
    ptx::cluster_wait();  // all blocks have their barriers

    Turn<kDepth> turn;
#pragma unroll 1
    for (int n = 0; n < share.rounds; n++) {
        const Round round = share.round(n);
        const bool full = round.chunks == kRound;
        if (full) body.score_round<true>(loader, round, n, turn, length);
        else body.score_round<false>(loader, round, n, turn, length);
        ptx::sync_threads();  // all scores are there, and all warps are done with the round before
        if (kDepth > 1 && n > 0) loader.request(share, n - 1 + kDepth, turn.stage == 0 ? kDepth - 1 : turn.stage - 1);
        if (full) body.add_round<true>(loader, round, n, turn);
        else body.add_round<false>(loader, round, n, turn);
        turn.next();
        if (!round.ends) continue;
        body.finish_piece();
        body.send(round.state);
        body.begin_piece();
    }
    if (length == 0 && block == 0) body.send(0);  // the empty state
    if constexpr (kAlone) {
        ptx::sync_warp();
        if (warp::lane() == 0) ptx::mbarrier_arrive(loader.window + kAtLanded);
    }
    if (rank * 128 >= kSlice) return;             // no column to merge
    ptx::mbarrier_wait(loader.window + kAtLanded, 0);
    merge_slice(args, item, block, share.states);
}
