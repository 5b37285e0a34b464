// forward_mma: attention by mma.sync, for cards without wgmma and for float32 on every card. One thread block per tile
// of query rows, heaviest tiles first; its tiles, lists, masks, softmax and arguments are those of forward.cu.
//
// Every warp has kWarpRows query rows, sixteen or thirty-two: with thirty-two each fragment of K and V serves two
// products. All threads load, by cp.async; there are no roles. Key blocks come from the last visible one down. A warp
// leaves out blocks of which its rows see nothing.
//
// With one place for K and one for V, V of a block travels while S = Q Kᵀ and the softmax run, and the next K while
// P V runs: K stays until the softmax is done, in case S has to be computed again. With two places each, the next K and
// V travel while this block's are used, and one barrier per block is enough; they are asked for between the products of
// Q Kᵀ, which leave the time for it.
//
// Constants, besides those that forward.cu has (of which it takes no parts):
// kWarpRows: query rows per warp. kStages: places for K, and for V: 1 or 2.
// Operand: what products are made of, Element or half in place of FP8. kVectors: rows begin at multiples of 16 bytes.
// kCudaCores: products on CUDA cores, of float32. kBlocksEach: thread blocks that a multiprocessor is to hold.
// kDropout: weights are dropped; heads are not packed then, and there are no lists.
#include "prefill/closing.cuh"
#include "prefill/mma_loads.cuh"
#include "tile/lazy.cuh"
#include "tile/mma_rows.cuh"

constexpr int kM = kWarpRows / 16, kSteps = kHeadDim / warp::kDepth<Operand>, kTaken = warp::kTogether<Operand>;
// Steps of Q Kᵀ that stand in the code: all of them, but for float32, whose splits would all be made at once
constexpr int kUnrolled = sizeof(Operand) == 4 ? 1 : kSteps;
// Wide float32 heads leave no registers for a second softmax; the exact one is the careful one, to the bit
constexpr bool kOneWay = kExact && sizeof(Operand) == 4 && kWidest > 128 && !kCudaCores;
constexpr bool kFp8Products = sizeof(Operand) == 1;
constexpr int kLift = lift_of<Operand>(), kWitness = witness_of<Operand>();
static_assert(kStages <= 2 && (kStages == 1 || !kWiden) && !(kDropout && (kListed || kPack > 1)));

// Sixteen of a warp's rows, and the block of keys at hand
struct Sixteen : Scoring<Sixteen> {
    const ForwardArgs& args;
    const Function& function;
    const int n, number;  // the block, and which of the warp's sixteens
    TILE_DEVICE Sixteen(const ForwardArgs& a, const Function& f, int block, int m)
        : args(a), function(f), n(block), number(m) {}
    TILE_DEVICE WorkTile tile() const { return work()[0]; }
    TILE_DEVICE int warp_row() const { return ptx::just_in_time(threadIdx.x) / 32 * kWarpRows + 16 * number; }
    TILE_DEVICE int key_of(int box) const {
        if constexpr (!kListed) return n * kTileKv + box * kBoxRows;
        const int unit = units_of(n)[box];
        if (kSlabs && unit >> (kUnitBits + warp_row() / kSlab) & 1) return kFar;
        return key_of_unit(unit);
    }
    TILE_DEVICE int there_of(int box) const { return kLengths ? int(there_of_block(n)[box]) : kBoxRows; }
    // P as the operand of P V. The sum of the weights, which are those before dropout, is taken already.
    TILE_DEVICE void weights(uint32_t (&rP)[kTileKv / warp::kDepth<Operand>][4], float (&p)[kTileKv / 2]) const {
        if constexpr (kDropout) {
            const WorkTile tile = this->tile();
            Draws(args.dropout, tile.sequence, tile.head).drop(p, tile.row + warp_row(), n * kTileKv);
        }
        warp::to_weights<Operand>(rP, p);
    }
};

struct Worker {
    const ForwardArgs& args;
    const Function& function;
    const float scale_log2;
    Span met, full;  // blocks in which this warp's rows see some key, and those that all of them see whole
    float acc_o[kM][kValueDim / 2], acc_s[kM][kTileKv / 2];
    uint32_t rP[kM][kTileKv / warp::kDepth<Operand>][4];
    uint32_t rQ[kQInRegisters ? kSteps : 1][kM][4];
    warp::RowState state[kM];

    static TILE_DEVICE int first_row() { return threadIdx.x / 32 * kWarpRows; }
    TILE_DEVICE Worker(const ForwardArgs& a, const Function& f, const WorkTile& tile)
        : args(a), function(f),
          scale_log2(Function::kScore ? kLog2e
                     : Rule::kChanges ? 1.0f
                                      : a.scores.scale_log2 * (kFp8 ? tile.descale_qk : 1.0f)) {
        const int row = tile.row + first_row();
        if (row >= tile.seqlen_q * kPack) {
            met = full = {0, 0};
        } else if constexpr (kListed) {
            met = {tile.begin, tile.end};
            full = {0, tile.whole / kBoxes};
        } else {
            met = blocks_of<kTileKv, kPack, kWarpRows>(args, tile, row);
            full = full_blocks<kTileKv, kPack, kWarpRows>(args, tile, row);
        }
#pragma unroll
        for (int m = 0; m < kM; m++) {
            warp::zero(acc_o[m]);
            if constexpr (Function::kScore) state[m].max[0] = state[m].max[1] = kNoReference;
        }
    }
    TILE_DEVICE void take_q() {
        if constexpr (kQInRegisters)
#pragma unroll
            for (int step = 0; step < kSteps; step++)
#pragma unroll
                for (int m = 0; m < kM; m++) warp::load_a(rQ[step][m], TileQ(0), first_row() + 16 * m, step);
    }
    TILE_DEVICE bool sees(int n) const { return n >= met.begin && n < met.end; }

    // S = Q Kᵀ; between(part): what is done after the first products of each of kParts parts
    static constexpr int kParts = kSteps < 4 ? kSteps : kSteps % 4 == 0 ? 4 : 3;
    static_assert(kSteps % kParts == 0);
    template <class Between> TILE_DEVICE void multiply_qk(const TileK& sK, Between between) {
#pragma unroll
        for (int m = 0; m < kM; m++) warp::zero(acc_s[m]);
        if constexpr (kCudaCores) return warp::ffma_qk(acc_s, TileQ(0), first_row(), sK);
#pragma unroll kUnrolled
        for (int step = 0; step < kSteps; step += kTaken) {
            uint32_t a[kTaken][kM][4];
#pragma unroll
            for (int i = 0; i < kTaken * kM; i++) take(a[i / kM][i % kM], step + i / kM, i % kM);
            warp::mma_qk_step(acc_s, a, sK, step / kTaken);
            if (step % (kSteps / kParts) == 0) between(step / (kSteps / kParts));
        }
    }
    // Q's fragment of one step and sixteen
    TILE_DEVICE void take(uint32_t (&a)[4], int step, int m) const {
        if constexpr (kQInRegisters)
#pragma unroll
            for (int r = 0; r < 4; r++) a[r] = rQ[step][m][r];
        else warp::load_a(a, TileQ(0), first_row() + 16 * m, step);
    }
    // S of one sixteen once more: both operands are still in shared memory
    TILE_DEVICE void again(int m, const TileK& sK, const Sixteen& rows) {
        const int lane = ptx::just_in_time(warp::lane());
        float (&s)[1][kTileKv / 2] = reinterpret_cast<float (&)[1][kTileKv / 2]>(acc_s[m]);
        warp::zero(s[0]);
        if constexpr (kCudaCores) warp::ffma_qk(s, TileQ(0), first_row() + 16 * m, sK);
#pragma unroll 1  // it runs rarely, and must not take registers from the steps that always run
        for (int step = 0; step < (kCudaCores ? 0 : kSteps); step += kTaken) {
            uint32_t a[kTaken][1][4];
#pragma unroll
            for (int i = 0; i < kTaken; i++)
                warp::load_a(a[i][0], TileQ(0), first_row() + 16 * m, step + i, lane);
            warp::mma_qk_step(s, a, sK, step / kTaken, lane);
        }
        rows.score<false, false>(acc_s[m]);
    }

    // O += P V
    TILE_DEVICE void multiply_pv(const TileV& sV) {
        if constexpr (kCudaCores) warp::ffma_pv(acc_o, rP, sV);
        else warp::mma_pv(acc_o, rP, sV);
    }

    // P = softmax(S) of block n: the careful way, for a warp's first block and those that some row does not see whole
    TILE_DEVICE void careful(int n) {
        const bool cut = n >= full.end || n < full.begin;
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const Sixteen rows(args, function, n, m);
            float correction[2];
            rows.score<true, false>(acc_s[m]);
            if (cut) {
                if constexpr (Function::kMask) {
                    uint32_t bits[2];
                    rows.see(bits);
                    rows.hide(acc_s[m], bits);
                } else {
                    rows.mask(acc_s[m]);
                }
            }
            warp::online_softmax<kLift>(acc_s[m], correction, state[m], scale_log2);
            warp::scale_rows(acc_o[m], correction);
            rows.weights(rP[m], acc_s[m]);
        }
    }
    // The short way: references move only when they no longer serve
    template <bool kInside> TILE_DEVICE void quick(int n, const TileK& sK) {
        float sum[kM][2];
        bool over = false;
#pragma unroll
        for (int m = 0; m < kM; m++) {
            const Sixteen rows(args, function, n, m);
            rows.score<false, kInside>(acc_s[m]);
            if constexpr (kExact) {
                float correction[2];
                if (warp::standing_softmax<kLift>(acc_s[m], correction, state[m], scale_log2))
                    warp::scale_rows(acc_o[m], correction);
            } else {
                warp::exponentiate(acc_s[m], sum[m], state[m], scale_log2);
                over = over || warp::overflows<kWitness>(sum[m]);
            }
            rows.weights(rP[m], acc_s[m]);
        }
        if constexpr (!kExact) {
            // One vote for all rows of the warp: it stands between the exponentials and P V.
            over = ptx::any(over);
#pragma unroll
            for (int m = 0; m < kM; m++) {
                if (over && (kM == 1 || ptx::any(warp::overflows<kWitness>(sum[m])))) start_over(n, m, sK);
                else warp::add_sums(state[m], sum[m]);
            }
        }
    }
    // References of these sixteen rows no longer serve, and P of them is rounded already: the standard step, from S on
    TILE_DEVICE void start_over(int n, int m, const TileK& sK) {
        float correction[2];
        const Sixteen rows(args, function, n, m);
        again(m, sK, rows);
        warp::online_softmax<kLift>(acc_s[m], correction, state[m], scale_log2);
        warp::scale_rows(acc_o[m], correction);
        rows.weights(rP[m], acc_s[m]);
    }
    template <class Between> TILE_DEVICE void weigh(int n, const TileK& sK, Between between) {
        multiply_qk(sK, between);
        if (kOneWay || n == met.end - 1 || n >= full.end || n < full.begin) careful(n);
        else if (Function::kScore && Function::kByRow && Sixteen(args, function, n, 0).all_inside()) quick<true>(n, sK);
        else quick<false>(n, sK);
    }

    // Writes O / l and the LSE
    TILE_DEVICE void finish() {
        const WorkTile tile = work()[0];
#pragma unroll
        for (int m = 0; m < kM; m++) {
            if constexpr (kFp8Products || kCudaCores) warp::in_order(acc_o[m]);
            Closing closing = close_rows<true>(Sixteen(args, function, 0, m), tile, state[m], acc_o[m]);
            if constexpr (kDropout)
#pragma unroll
                for (int h = 0; h < 2; h++) closing.inverse[h] *= args.dropout.factor;
            warp::scale_rows(acc_o[m], closing.inverse);
            const int columns = TileValues(tile).count();
            if constexpr (!kVectors || sizeof(Out) == 4) store_elements<Out>(closing, acc_o[m], columns);
            else warp::store_rows<kValueColumns>(closing.rows, closing.exists, acc_o[m], columns);
        }
    }
};

template <int kParts, class Each> TILE_DEVICE void each_part(Each each) {
#pragma unroll
    for (int part = 0; part < kParts; part++) each(part);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksEach)
    forward_mma(const __grid_constant__ ForwardArgs args, const __grid_constant__ Function function) {
    WorkTile tile = work_tile<kTileQ, kTileKv, kPack, kListed, kSlices>(args, blockIdx.x);
    if (tile.row < 0) return;
    if (kListed) find_listed<kBoxRows, kBoxes>(args.lists, tile);
    if (kFp8) {
        tile.descale_qk = descale_of(args.descale_q, tile) * descale_of(args.descale_k, tile);
        tile.descale_v = descale_of(args.descale_v, tile);
    }
    if (threadIdx.x == 0) {  // for later: registers are dear
        work()[0] = tile;
        find_sources(args, tile);
    }
    const int begin = tile.begin;
    int n = tile.end - 1;
    Loader loader{args};
    loader.tell_first(tile);
    load_q(args, tile);
    ptx::sync_threads();
    loader.load<0>(tile, n);
    if constexpr (kStages == 2) loader.load<1>(tile, n);
    ptx::copy_async_commit();
    Worker worker(args, function, tile);
    for (bool first = true;; first = false) {
        ptx::copy_async_wait<0>();
        loader.widen<0>(n);
        ptx::sync_threads();  // K of this block is there, and P V of the one before is done
        if (first) worker.take_q();
        const bool sees = worker.sees(n), more = n > begin;
        const TileK sK(place_of<0>(n));
        const TileV sV(place_of<1>(n));
        if constexpr (!kWoven) {
            if (kStages == 1 || more) loader.load<1>(work()[0], kStages == 1 ? n : n - 1);
            if (kStages == 2 && more) loader.load<0>(work()[0], n - 1);
            ptx::copy_async_commit();
        }
        loader.tell_next(work()[0], n);
        if constexpr (kWoven) {
            const Copies<0> k(args.k_strides, n - 1);
            const Copies<1> v(args.v_strides, n - 1);
            auto ask = [&](int part) {
                k.some<Worker::kParts>(n - 1, part, more);
                v.some<Worker::kParts>(n - 1, part, more);
            };
            if (sees) worker.weigh(n, sK, ask);
            else each_part<Worker::kParts>(ask);
            ptx::copy_async_commit();
        } else if (sees) {
            worker.weigh(n, sK, [](int) {});
        }
        if constexpr (kStages == 1) {
            ptx::copy_async_wait<0>();
            loader.widen<1>(n);
            ptx::sync_threads();  // V is there, and nobody needs K any more
            if (more) loader.load<0>(work()[0], n - 1);
            ptx::copy_async_commit();
        }
        if (sees) worker.multiply_pv(sV);
        if (!more) break;
        n--;
    }
    worker.finish();
}
