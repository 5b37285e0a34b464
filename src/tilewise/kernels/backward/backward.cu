// backward: dK, dV and dQ of attention on Hopper. A block owns kTileKv keys of a KV head and walks over the query tiles
// that see them.
//
// Each of two consumer warpgroups owns 64 keys, whose dK and dV stay in its registers. Everything is transposed:
// Sᵀ = K Qᵀ and dPᵀ = V dOᵀ have keys as rows, so that Pᵀ and dSᵀ are, as they come, the A operands of dV += Pᵀ dO and
// dK += dSᵀ Q. Only dQ = dS K is over the keys of both: dSᵀ goes through shared memory, each warpgroup makes half of
// dQ's columns, and TMA adds those up in global memory, where a tile lies in the order in which fragments hold it. −LSE
// and −delta are what the accumulators of S and dP begin with; where scores are more than scaled, S begins with 0 and
// the LSE is subtracted from the logits.
//
// A step, with the products that are in flight under what is not one; dQ is that of the tile before, so that the
// warpgroups need not meet:
//   dP | P = exp S | dV | dS = P dP, to shared memory | dK, dQ, next S | dQ to shared memory
//
// With 192 columns of Q and K and 128 of V there are registers for one accumulator, and dQ leaves in two rounds:
//   P = exp S | dV, dP | dS, to shared memory | dQ, dK | dQ to shared memory | next S, dQ | dQ to shared memory
//
// Constants: Element; Rule: scores.cuh; kHeadDim: of Q and K, padded, kValueDim: of V and dO; kTileQ; kWide: wide.cuh;
// kStages: of Q; kDoStages; kDsStages; kDqColumns: of a round of dQ; kMasks: some queries do not see some keys, or the
// last tile of keys is cut; kListed: which ones, pairs.cu has found out; kPacked; kInTurn: tiles of keys add to dQ in
// their order; kPingPong: one warpgroup makes P and dS while the other has its dK, dQ and S; kKvInRegisters: K and V
// stay there; kScaleLate: see step; kMaskApart: wide.cuh.
#include "backward/producers.cuh"
#include "backward/scoring.cuh"
#include "backward/wide.cuh"

struct Consumer {
    const BackwardArgs& args;
    const Pipes pipes;
    const uint32_t group;  // of the consumers
    // threadIdx.x as a value of its own: ptxas reads the special register again in every step, and waits for it, to
    // save a register that there is
    const int thread = Rule::kLinear ? ptx::shuffle_xor(threadIdx.x, 0) : threadIdx.x;
    float factor, slope;  // factor: what S is multiplied with first
    Turn<kStages> turn;
    Turn<kDsStages> ds_turn, ds_read{kDsStages - 1, 1};  // ds_read: one behind
    Turn<1> dq_turn;
    int done = 0, total = 0;  // steps
    float dk[kHeadDim / 2], dv[kValueDim / 2], s[kTileQ / 2];
    float dp[kTileQ / 2];  // later dQ
    uint32_t rP[kTileQ / 16][4], rDs[kTileQ / 16][4];
    uint32_t rK[kHeadDim / 16][4], rV[kValueDim / 16][4];  // if they stay in registers
    static_assert(kWide || kDqRounds == (kSerial ? 2 : 1), "what holds dQ");

    TILE_DEVICE Consumer(const BackwardArgs& a, uint32_t g) : args(a), group(g), factor(Rule::first_factor(a.scores)) {}

    template <int kSteps> TILE_DEVICE void load_operand(uint32_t (&r)[kSteps][4], uint32_t at) const {
        using Panel = SharedTile<Element, kTileKv, kPanel, Layout::swizzled>;
#pragma unroll
        for (int step = 0; step < kSteps; step++)
            warp::load_a(r[step], Panel(at + step / 4 * kTileKv * kPanelRowBytes), threadIdx.x / 32 * 16 - 64,
                         step % 4);
    }
    // ---- products: issued, not waited for ---------------------------------------------------------------------------
    // acc (64 keys × kTileQ) += rows of K (0) or V (1) times those of Q or dO
    template <int kWhich> TILE_DEVICE void issue_scores(float (&acc)[kTileQ / 2], uint32_t stage) {
        ptx::wgmma_fence();
        constexpr uint32_t kAtKv = kWhich == 0 ? kAtK : kAtV, kAtRows = kWhich == 0 ? kAtQ : kAtDo;
        const uint64_t b = further(k_major(ptx::shared_address(kAtRows)), stage * (kWhich == 0 ? kQBytes : kDoBytes));
        const uint64_t a = k_major(ptx::shared_address(kAtKv + group * 64 * kPanelRowBytes));
#pragma unroll
        for (int step = 0; step < (kWhich == 0 ? kHeadDim : kValueDim) / 16; step++) {
            const uint64_t rows = further(b, step / 4 * kTileQ * kPanelRowBytes + step % 4 * 32);
            if constexpr (kKvInRegisters)
                ptx::Wgmma<Element, kTileQ>::template rs<false>(acc, kWhich == 1 ? rV[step] : rK[step], rows, true);
            else
                ptx::Wgmma<Element, kTileQ>::template ss<false, false>(
                    acc, further(a, step / 4 * kTileKv * kPanelRowBytes + step % 4 * 32), rows, true);
        }
        ptx::wgmma_commit();
    }
    // acc += A times the rows that lie there, as many columns of them
    template <int kSize>
    TILE_DEVICE void issue_sum(float (&acc)[kSize], const uint32_t (&a)[kTileQ / 16][4], uint32_t at, uint32_t stage) {
        ptx::wgmma_fence();
        const uint64_t b = further(mn_major<kTileQ>(ptx::shared_address(at)), stage * (kTileQ * 2 * kSize * 2));
        warpgroup::mma_pv<Element, kTileQ, 2 * kSize>(acc, a, b);
        ptx::wgmma_commit();
    }
    // A round of this warpgroup's columns of dQ = dS K, over all keys of the block
    template <int kRound, int kSize> TILE_DEVICE void issue_dq(float (&to)[kSize]) {
        constexpr int kColumns = Share::columns(kRound);
        ptx::wgmma_fence();
        const uint64_t a =
            further(mn_major<kTileKv>(ptx::shared_address(uint32_t(kAtDs))), ds_read.stage * kDsBytes);
        const uint32_t column = Share::first(group, kRound), panel = column / kPanel * kTileKv * kPanelRowBytes;
        const uint64_t b = mn_major<kTileKv>(ptx::shared_address(kAtK + panel + column % kPanel * 2));
        float (&acc)[kColumns / 2] = reinterpret_cast<float (&)[kColumns / 2]>(to);
#pragma unroll
        for (int step = 0; step < kTileKv / 16; step++)
            ptx::Wgmma<Element, kColumns>::template ss<true, true>(acc, further(a, step * 2 * kEightBytes),
                                                                   further(b, step * 2 * kEightBytes), step > 0);
        ptx::wgmma_commit();
    }

    // ---- what is not a product --------------------------------------------------------------------------------------
    TILE_DEVICE void differentiate() {
#pragma unroll
        for (int i = 0; i < kTileQ / 2; i++) s[i] *= dp[i];
        warp::to_operand<Element>(rDs, s);
    }
    // dS and dQ are put into shared memory where registers are to be free, and given to who reads them later: a fence
    // waits for the stores.
    TILE_DEVICE void put_ds(const uint32_t (&ds)[kTileQ / 16][4]) {
        const SharedTile<Element, kTileKv, kTileQ, Layout::swizzled> tile(kAtDs + ds_turn.stage * kDsBytes);
#pragma unroll
        for (int step = 0; step < kTileQ / 16; step++)
            warp::store_a(tile, thread / 32 * 16 - 64, step, ds[step], thread % 32);
    }
    TILE_DEVICE void give_ds() {
        ptx::fence_async_proxy();
        ptx::sync_warp();
        if (thread % 32 == 0) ptx::mbarrier_arrive(pipes.ds.full_at(ds_turn));
    }
    template <int kOf> TILE_DEVICE void release(const Ring<kOf>& ring, Turn<kOf> of) const {
        if (thread % 32 == 0) ptx::mbarrier_arrive(ring.empty + 8 * of.stage);
    }
    template <int kRound, int kSize> TILE_DEVICE void put_dq(const float (&dq)[kSize]) {
        pipes.dq(group).wait_free(dq_turn);
        const Shared<Four> to(kAtDq + group * kDqBytes);
#pragma unroll
        for (int n = 0; n < Share::columns(kRound) / 8; n++)
            to[n * 128 + thread % 128] = Four{dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
    }
    TILE_DEVICE void give_dq() {
        ptx::fence_async_proxy();
        ptx::sync_warp();
        if (thread % 32 == 0) ptx::mbarrier_arrive(pipes.dq(group).full_at(dq_turn));
        dq_turn.next();
    }

    // ---- the walk ---------------------------------------------------------------------------------------------------
    // One query tile, whose S is there and whose dP has begun to be filled; nothing is in flight before and after, as
    // ptxas wants it.
    template <bool kMasked> TILE_DEVICE void step(int g, int i) {
        const bool first = done == 0;
        Turn<kStages> next = turn;
        next.next();
        if constexpr (kPingPong) ptx::barrier_sync(kTurnBarrier + group, 256);
        issue_scores<1>(dp, of_do(turn).stage);
        // ptxas would put the exponentials among dP's products, which then come late. They follow from a load that
        // follows a branch.
        pipes.ds.wait_free(ds_turn);
        if constexpr (kScaleLate) factor = as_float(ptx::load_shared_here(ptx::shared_address(uint32_t(kAtScale))));
        constexpr bool kPlaced = Rule::kAlibi || (kMasked && !kListed);  // it matters which queries they are
        if constexpr (kListed && Rule::kAlibi) slope = slope_of(step_at(args, g, i, done).head);
        const Scoring scoring{args, factor, slope, int(group) * 64, turn.stage};
        scoring.template exponentiate<kMasked>(s, rP, kPlaced ? step_at(args, g, i, done).tile : 0);
        issue_sum(dv, rP, kAtDo, of_do(turn).stage);
        if (done > 1) give_dq();
        ptx::wgmma_wait<1>();  // dP
        differentiate();
        put_ds(rDs);
        if constexpr (kPingPong) ptx::barrier_arrive(kTurnBarrier + 1 - group, 256);
        issue_sum(dk, rDs, kAtQ, turn.stage);
        if (!first) pipes.ds.wait(ds_read);
        ptx::wgmma_wait<1>();  // dV: P's registers are free
        if (left() > 1) pipes.q.wait(next);
        Scoring::fill(s, next.stage, 0, thread % 4);
        issue_dq<0>(dp);  // the first time of a stage that nobody has written, and not looked at
        issue_scores<0>(s, next.stage);  // likewise the last time
        give_ds();
        ptx::wgmma_wait<1>();  // dK, dQ
        release(pipes.q, turn);
        release(pipes.d_o, of_do(turn));
        if (!first) {
            release(pipes.ds, ds_read);
            put_dq<0>(dp);
        }
        ds_read.next();
        if (left() > 1) pipes.d_o.wait(of_do(next));
        Scoring::fill(dp, next.stage, 1, thread % 4);
        ptx::wgmma_wait<0>();  // S
        done++;
        turn = next;
        ds_turn.next();
    }
    // The same with one accumulator, which is S, then dP, then dQ's first round: dP is issued when P is made, and the
    // next S when that round has left. The other warpgroup has products in flight meanwhile.
    TILE_DEVICE void serial_step(const Step& at) {
        const bool first = done == 0;
        Turn<kStages> next = turn;
        next.next();
        if constexpr (kPingPong) ptx::barrier_sync(kTurnBarrier + group, 256);
        if constexpr (kListed) pipes.d_o.wait(of_do(turn));  // and with it bits
        const Scoring scoring{args, factor, 0.0f, int(group) * 64, turn.stage};
        scoring.exponentiate(at.bits >= 0, s, rP, at.tile);
        if constexpr (!kListed) pipes.d_o.wait(of_do(turn));
        issue_sum(dv, rP, kAtDo, of_do(turn).stage);
        Scoring::fill(s, turn.stage, 1, thread % 4);
        issue_scores<1>(s, of_do(turn).stage);
        if (done > 1) give_dq();
        pipes.ds.wait_free(ds_turn);
        ptx::wgmma_wait<0>();  // dV, dP
        if constexpr (kListed) ptx::sync_warp();  // all lanes have read their bits
        release(pipes.d_o, of_do(turn));
        multiply(rP, rP, s);
        put_ds(rP);
        if constexpr (kPingPong) ptx::barrier_arrive(kTurnBarrier + 1 - group, 256);
        if (!first) pipes.ds.wait(ds_read);
        issue_dq<0>(s);
        issue_sum(dk, rP, kAtQ, turn.stage);
        give_ds();
        ptx::wgmma_wait<1>();  // dQ's first round
        if (!first) put_dq<0>(s);
        if (left() > 1) pipes.q.wait(next);
        Scoring::fill(s, next.stage, 0, thread % 4);
        if (!first) give_dq();
        issue_scores<0>(s, next.stage);
        ptx::wgmma_wait<1>();  // dK
        release(pipes.q, turn);
        float dq_last[kTileQ / 4];
        issue_dq<1>(dq_last);
        ptx::wgmma_wait<0>();  // S, dQ
        if (!first) {
            release(pipes.ds, ds_read);
            put_dq<1>(dq_last);
        }
        ds_read.next();
        done++;
        turn = next;
        ds_turn.next();
    }
    TILE_DEVICE void last_dq() {
        pipes.ds.wait(ds_read);
        float (&dq)[kTileQ / 2] = kSerial ? s : dp;
        issue_dq<0>(dq);
        if (done > 1) give_dq();
        ptx::wgmma_wait<0>();
        put_dq<0>(dq);
        give_dq();
        if constexpr (kDqRounds > 1) {
            issue_dq<1>(dq);
            ptx::wgmma_wait<0>();
            put_dq<1>(dq);
            give_dq();
        }
    }

    template <int kSize>
    TILE_DEVICE void store(const TensorMap& map, void* to, const Strides& strides, int columns, uint32_t at,
                           int panel_rows, const float (&acc)[kSize]) const {
        store_keys<2 * kSize>(args, map, to, strides, columns, at, panel_rows, acc, group, int(group) * 64, 0);
    }
    // Steps to come. One accumulator, lists, and curved scores in turn: there is no register to keep it in.
    TILE_DEVICE int left() const {
        return (kSerial || kListed || (kInTurn && !Rule::kLinear) ? Work(shared_work()[0]).steps : total) - done;
    }
    // Steps from the one at hand on, whose tiles are all seen in part, or none is
    TILE_DEVICE int run_of(bool in_part) const {
        const Step at = step_at(args, 0, 0, done);
        return left() > 0 && (at.bits >= 0) == in_part ? at.run : 0;
    }
    TILE_DEVICE float slope_of(int head) const {
        return args.scores.slope(Work(shared_work()[0]).tile.sequence, head);
    }
    TILE_DEVICE void run(const TensorMap& mDk, const TensorMap& mDv) {
        warp::zero(dk);
        warp::zero(dv);
        total = Work(shared_work()[0]).steps;
        if constexpr (kMasks && !kListed) share_seen(args, group, group * 64);
        if (kPingPong && group == 1) ptx::barrier_arrive(kTurnBarrier, 256);
        pipes.k.wait({});
        if constexpr (kKvInRegisters) load_operand(rK, kAtK);
        if (left() > 0) pipes.q.wait(turn);
        Scoring::fill(s, turn.stage, 0);
        issue_scores<0>(s, turn.stage);
        ptx::wgmma_wait<0>();
        pipes.v.wait({});
        if constexpr (kKvInRegisters) load_operand(rV, kAtV);
        if constexpr (!kSerial) {
            if (left() > 0) pipes.d_o.wait(of_do(turn));
            Scoring::fill(dp, turn.stage, 1);
        }
        if constexpr (kSerial) {
#pragma unroll 1
            for (int g = 0, i = 0; left() > 0; i++) {
                if (!kListed && i == Work(shared_work()[0]).tiles()) i = 0, g++;
                serial_step(step_at(args, g, i, done));
            }
        } else if constexpr (kListed) {
            while (left() > 0) {
                int run = run_of(true);
#pragma unroll 1
                for (; run > 0; run--) step<true>(0, 0);
                run = run_of(false);
#pragma unroll 1
                for (; run > 0; run--) step<false>(0, 0);
            }
        } else {
            const int tiles = Work(shared_work()[0]).tiles();
            for (int g = 0; g < args.group; g++) {
                if constexpr (Rule::kAlibi) slope = slope_of(Work(shared_work()[0]).head(args, g));
                int i = 0;
                if constexpr (kMasks)
#pragma unroll 1
                    for (const int masked = Work(shared_work()[0]).masked(); i < masked; i++) step<true>(g, i);
                if constexpr (!kAllMasked) {
                    const int whole = kMasks && kInTurn ? Work(shared_work()[0]).masked_and_whole() : tiles;
#pragma unroll 1
                    for (; i < whole; i++) step<false>(g, i);
                }
                if constexpr (kMasks && kInTurn && !kAllMasked)
#pragma unroll 1
                    for (; i < tiles; i++) step<true>(g, i);
            }
        }
        if (done > 0) last_dq();
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; i++) dk[i] *= args.scale;
        const uint32_t own = group * 64 * kPanelRowBytes;
        store(mDv, args.dv, args.dv_strides, args.value_dim, kAtV + own, kTileKv, dv);
        if constexpr (kDkByDq) {
            pipes.dq(group).wait_free(dq_turn);
            store(mDk, args.dk, args.dk_strides, args.head_dim, kAtDq + group * kDqBytes, 64, dk);
        } else {
            ptx::barrier_sync(kEndBarrier, 256);  // nobody reads K any more
            store(mDk, args.dk, args.dk_strides, args.head_dim, kAtK + own, kTileKv, dk);
        }
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    backward(const __grid_constant__ TensorMap mQ, const __grid_constant__ TensorMap mK,
             const __grid_constant__ TensorMap mV, const __grid_constant__ TensorMap mDo,
             const __grid_constant__ TensorMap mDk, const __grid_constant__ TensorMap mDv,
             const __grid_constant__ BackwardArgs args) {
    if (threadIdx.x < 32) share_work(args);
    if (threadIdx.x == 32) {
        Pipes().init();
        const Shared<float> scale(kAtScale);
        scale[0] = Rule::first_factor(args.scores);
    }
    ptx::sync_threads();
    const uint32_t role = ptx::uniform(threadIdx.x / 128);
    if (kPacked && Work(shared_work()[0]).tile.sequence < 0) {
        ptx::wait_for_prerequisites();
        return;
    }
    if (role == 0) {
        ptx::give_registers<kProducerRegisters>();
        const uint32_t warp = ptx::uniform(threadIdx.x / 32);
        const bool first = threadIdx.x % 32 == 0;
        if (warp == 0 && (kLoadingWarp || first)) Loader(args).run(mQ, mK, mV, mDo);
        else if (warp > 0 && warp <= kConsumers && (kAddingWarp || first)) add_dq(args, warp - 1);
        else if (kListed && warp > kConsumers && first) list_steps(args);
    } else {
        ptx::take_registers<kConsumerRegisters>();
        if constexpr (!kWide) Consumer(args, role - 1).run(mDk, mDv);
        else if (role == 1) Wide<0>(args).run(mDk, mDv);
        else Wide<1>(args).run(mDk, mDv);
    }
}
