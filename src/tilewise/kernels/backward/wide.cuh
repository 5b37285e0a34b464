// The consumers of the Hopper backward where dK and dV of 64 keys are more than the registers of a warpgroup: both
// warpgroups work on the same 64 keys, and each owns half of the columns' panels. Of three panels the first has two of
// dK and the second two of dV.
//
// The first makes S and P, the second dP and dS; both go through shared memory, as A operands of dV += Pᵀ dO and
// dK += dSᵀ Q, of which each makes its columns, and of dQ = dS K, which leaves in kDqRounds rounds.
//
// A step: P | dV, dS | dK, dQ, next S and dP | dQ to shared memory, round by round
//
// kMaskApart: tiles that are seen whole have no mask; otherwise it is computed for all, by one piece of code.
#pragma once
#include "backward/scoring.cuh"

template <int kGroup> struct Wide {
    // The panels of dK and dV that this group owns
    static constexpr int kDkHalf = (kHeadDim / kPanel + 1) / 2, kDvHalf = kValueDim / kPanel / 2;
    static constexpr int kDkFirst = kGroup * kDkHalf * kPanel, kDvFirst = kGroup * kDvHalf * kPanel;
    static constexpr int kDkColumns = kGroup ? kHeadDim - kDkFirst : kDkHalf * kPanel;
    static constexpr int kDvColumns = kGroup ? kValueDim - kDvFirst : kDvHalf * kPanel;
    const BackwardArgs& args;
    const Pipes pipes;
    float factor, slope = 0.0f;
    Turn<kStages> turn;
    Turn<1> p_turn, dq_turn;
    Turn<kDsStages> ds_turn;
    int done = 0;
    float dk[kWide ? kDkColumns / 2 : 1], dv[kWide ? kDvColumns / 2 : 1];  // narrow ones would have none
    float acc[kTileQ / 2];  // S or dP

    TILE_DEVICE explicit Wide(const BackwardArgs& a) : args(a), factor(Rule::first_factor(a.scores)) {}
    TILE_DEVICE int left() const { return Work(shared_work()[0]).steps - done; }
    static TILE_DEVICE int row0() { return threadIdx.x / 32 % 4 * 16; }
    using Square = SharedTile<Element, 64, kTileQ, Layout::swizzled>;  // P or dS: keys × queries

    // acc = keys of K or V times rows of Q or dO, on what it begins with
    TILE_DEVICE void issue_scores(uint32_t at_kv, uint32_t at_q) {
        ptx::wgmma_fence();
        const uint64_t a = k_major(ptx::shared_address(at_kv)), b = k_major(ptx::shared_address(at_q));
#pragma unroll
        for (int step = 0; step < (kGroup == 0 ? kHeadDim : kValueDim) / 16; step++)
            ptx::Wgmma<Element, kTileQ>::template ss<false, false>(
                acc, further(a, step / 4 * kTileKv * kPanelRowBytes + step % 4 * 32),
                further(b, step / 4 * kTileQ * kPanelRowBytes + step % 4 * 32), true);
        ptx::wgmma_commit();
    }
    // sum += a square times columns of Q or dO from `first` on
    template <int kSize>
    TILE_DEVICE void issue_sum(float (&sum)[kSize], uint32_t at_square, uint32_t at_rows, int first) {
        ptx::wgmma_fence();
        const uint64_t a = k_major(ptx::shared_address(at_square));
        const uint32_t own = first / kPanel * kTileQ * kPanelRowBytes;
        const uint64_t b = mn_major<kTileQ>(ptx::shared_address(at_rows + own));
#pragma unroll
        for (int step = 0; step < kTileQ / 16; step++)
            ptx::Wgmma<Element, 2 * kSize>::template ss<false, true>(sum, further(a, step * 32),
                                                                     further(b, step * 2 * kEightBytes), true);
        ptx::wgmma_commit();
    }
    // A round of this group's columns of dQ = dS K
    template <int kRound> TILE_DEVICE void issue_dq(float (&dq)[Share::columns(kRound) / 2]) {
        ptx::wgmma_fence();
        const uint64_t a = mn_major<kTileKv>(ptx::shared_address(uint32_t(kAtDs)));
        const uint32_t column = Share::first(kGroup, kRound);
        const uint32_t panel = column / kPanel * kTileKv * kPanelRowBytes;
        const uint64_t b = mn_major<kTileKv>(ptx::shared_address(kAtK + panel + column % kPanel * 2));
#pragma unroll
        for (int step = 0; step < kTileKv / 16; step++)
            ptx::Wgmma<Element, Share::columns(kRound)>::template ss<true, true>(
                dq, further(a, step * 2 * kEightBytes), further(b, step * 2 * kEightBytes), step > 0);
        ptx::wgmma_commit();
    }

    // ---- through shared memory --------------------------------------------------------------------------------------
    static TILE_DEVICE void put(uint32_t at, const uint32_t (&r)[kTileQ / 16][4]) {
#pragma unroll
        for (int step = 0; step < kTileQ / 16; step++) warp::store_a(Square(at), row0(), step, r[step]);
    }
    TILE_DEVICE void give(uint32_t barrier) const {
        ptx::fence_async_proxy();
        ptx::sync_warp();
        if (ptx::elect_one()) ptx::mbarrier_arrive(barrier);
    }
    // P, and what dP is to be multiplied with, of S; at: the step
    TILE_DEVICE void give_p(const Step& at) {
        uint32_t rP[kTileQ / 16][4];
        const Scoring scoring{args, factor, slope, 0, turn.stage};
        scoring.exponentiate(!(kListed || kMaskApart) || at.bits >= 0, acc, rP, at.tile);
        pipes.p.wait_free(p_turn);
        put(kAtP, rP);
        if constexpr (!Rule::kLinear) {
            warp::to_operand<Element>(rP, acc);
            put(kAtFactor, rP);
        }
        give(pipes.p.full);
    }
    TILE_DEVICE void give_ds() {
        uint32_t r[kTileQ / 16][4];
#pragma unroll
        for (int step = 0; step < kTileQ / 16; step++)
            warp::load_a(r[step], Square(Rule::kLinear ? kAtP : kAtFactor), row0(), step);
        multiply(r, r, acc);
        pipes.ds.wait_free(ds_turn);
        put(kAtDs, r);
        give(pipes.ds.full_at(ds_turn));
    }
    template <int kRound> TILE_DEVICE void give_dq(const float (&dq)[Share::columns(kRound) / 2]) {
        pipes.dq(kGroup).wait_free(dq_turn);
        const Shared<Four> to(kAtDq + kGroup * kDqBytes);
#pragma unroll
        for (int n = 0; n < Share::columns(kRound) / 8; n++)
            to[n * 128 + threadIdx.x % 128] = Four{dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
        give(pipes.dq(kGroup).full);
        dq_turn.next();
    }
    template <int kRound> TILE_DEVICE void later_dq() {
        if constexpr (kRound < kDqRounds) {
            float dq[Share::columns(kRound) / 2];
            issue_dq<kRound>(dq);
            ptx::wgmma_wait<0>();
            give_dq<kRound>(dq);
            later_dq<kRound + 1>();
        }
    }
    // S or dP of a tile is issued, in the last step of something that is there. waits: there is such a tile
    TILE_DEVICE void issue_own(Turn<kStages> of, bool waits) {
        if (kGroup == 0 && waits) pipes.q.wait(of);
        if (kGroup == 1 && waits) pipes.d_o.wait(of_do(of));
        Scoring::fill(acc, of.stage, kGroup);
        if constexpr (kGroup == 0) issue_scores(kAtK, kAtQ + of.stage * kQBytes);
        else issue_scores(kAtV, kAtDo + of_do(of).stage * kDoBytes);
    }
    // One query tile, whose S or dP is there. Those of the next are in flight while dQ leaves, if their rows have a
    // place of their own.
    static constexpr bool kAhead = kGroup == 0 || kDoStages == kStages;
    TILE_DEVICE void step(const Step& at) {
        const bool more = left() > 1;
        Turn<kStages> next = turn;
        next.next();
        if constexpr (kGroup == 0) {
            if constexpr (Rule::kAlibi) slope = args.scores.slope(Work(shared_work()[0]).tile.sequence, at.head);
            give_p(at);
        }
        pipes.p.wait(p_turn);
        if constexpr (kGroup == 1) give_ds();
        else pipes.d_o.wait(of_do(turn));
        issue_sum(dv, kAtP, kAtDo + of_do(turn).stage * kDoBytes, kDvFirst);
        pipes.ds.wait(ds_turn);
        if constexpr (kGroup == 1) pipes.q.wait(turn);
        issue_sum(dk, kAtDs, kAtQ + turn.stage * kQBytes, kDkFirst);
        float dq[Share::columns(0) / 2];
        issue_dq<0>(dq);
        if constexpr (kAhead) issue_own(next, more);
        ptx::wgmma_wait<kAhead ? 1 : 0>();
        pipes.p.release(p_turn);
        pipes.d_o.release(of_do(turn));
        pipes.q.release(turn);
        give_dq<0>(dq);
        later_dq<1>();
        pipes.ds.release(ds_turn);
        if constexpr (!kAhead) {
            issue_own(next, more);
            ptx::wgmma_wait<0>();
        }
        p_turn.next();
        ds_turn.next();
        turn = next;
        done++;
    }

    TILE_DEVICE void run(const TensorMap& mDk, const TensorMap& mDv) {
        warp::zero(dk);
        warp::zero(dv);
        if constexpr (kMasks && !kListed && kGroup == 0) share_seen(args, kGroup, 0);
        pipes.k.wait({});
        pipes.v.wait({});
        issue_own(turn, left() > 0);
        ptx::wgmma_wait<0>();
        if constexpr (kListed) {
#pragma unroll 1
            while (left() > 0) step(step_at(args, 0, 0, done));
        } else {
#pragma unroll 1
            for (int g = 0, i = 0; left() > 0; i++) {
                if (i == Work(shared_work()[0]).tiles()) i = 0, g++;
                step(step_at(args, g, i, 0));
            }
        }
#pragma unroll
        for (int i = 0; i < kDkColumns / 2; i++) dk[i] *= args.scale;
        ptx::barrier_sync(kEndBarrier, 256);  // nobody reads K and V any more
        constexpr int kPanelBytes = kTileKv * kPanelRowBytes;
        store_keys<kDvColumns>(args, mDv, args.dv, args.dv_strides, args.value_dim,
                               kAtV + kDvFirst / kPanel * kPanelBytes, kTileKv, dv, kGroup, 0, kDvFirst);
        store_keys<kDkColumns>(args, mDk, args.dk, args.dk_strides, args.head_dim,
                               kAtK + kDkFirst / kPanel * kPanelBytes, kTileKv, dk, kGroup, 0, kDkFirst);
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
    }
};
