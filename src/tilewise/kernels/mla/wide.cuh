// The body for 64 query rows: S = Q Kᵀ has 64 query rows by 64 keys, O += P V 64 query rows by this warpgroup's
// channels. A row's scores lie in four lanes of one warp, so no warp asks another for a maximum or a sum.
//
// A warpgroup multiplies the weights that it has computed with its half of the values from registers, and leaves them
// in shared memory for the other warpgroup, which reads them to registers and does the same with its half. So nobody
// waits for a fence: wgmma does not read what was stored. All products are waited for before
// anything else is issued that could change what they add to: products in flight around a branch are serialised by
// ptxas.
//
// Of S a thread has value [4n + 2h + i]: query row 16 w + g + 8h, key 8n + 2t + i of the block, with w the warp of its
// warpgroup, g = lane / 4 and t = lane % 4; of O the same with channels in place of keys. So warp w has the same rows
// of O as warp w of the other warpgroup, and hears of references from that warp alone.
#pragma once
#include "mla/groups.cuh"

struct Wide : Grouped {
    // Panels of values side by side in one product, which are neighbours in the ring
    static constexpr int kSide = kMine % kTogether == 0 ? kTogether : 1;
    static constexpr int kGroups = kMine / kSide, kColumns = kSide * kPanel;
    static constexpr int kSteps = kKeys / 16;
    using Scores = float[kKeys / 2];  // no member, which would take registers from block to block
    float acc_o[kGroups][kColumns / 2];
    warp::RowState state;  // of this thread's rows: references in base 2, and its share of l
    uint32_t rP[kSteps][4];

    using Grouped::Grouped;
    static TILE_DEVICE int row(int h) { return 16 * warp_rank() + lane() / 4 + 8 * h; }
    // The flag of a block's weights that tells a warp whether its rows' references have moved
    static TILE_DEVICE Shared<uint8_t> sMovedRows(uint32_t number) {
        return Shared<uint8_t>(kAtMoved + 4 * (number & 1) + warp_rank());
    }

    // ---- products ---------------------------------------------------------------------------------------------------
    // S = Q Kᵀ over some panels of a block, as they come
    template <int kFrom, int kTo> TILE_DEVICE void add_scores(Scores& acc_s, const Places& of) {
        if constexpr (kFrom < kTo) {
            const uint64_t q = k_major(ptx::shared_address(kAtQ));
#pragma unroll
            for (int panel = kFrom; panel < kTo; panel++) {
                of.wait_rows(panel);
                ptx::wgmma_fence();
                const uint64_t k = k_major(ptx::shared_address(of.at(panel)));
#pragma unroll
                for (int step = 0; step < 4; step++)
                    ptx::Wgmma<Element, kKeys>::template ss<false, false>(
                        acc_s, further(q, panel * kRows * kPanelRowBytes + 32 * step), further(k, 32 * step),
                        panel > 0 || step > 0);
            }
            ptx::wgmma_commit();
            if constexpr (kBlockPlaces > kPanels && kTo == kPanels) of.wait(kWeights);
            ptx::wgmma_wait<0>();
            ptx::settle(acc_s);
        }
    }
    // O += P V over this warpgroup's channels, a group of products per kSide panels. What is there is not waited for,
    // so laps do not matter.
    TILE_DEVICE void issue_values(const Places& of) {
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            ptx::wgmma_fence();
            const uint64_t v = mn_major<kKeys>(ptx::shared_address(of.at(group * kMine + g * kSide)));
#pragma unroll
            for (int step = 0; step < kSteps; step++)
                ptx::Wgmma<Element, kColumns>::template rs<true>(acc_o[g], rP[step], further(v, 2 * kEightBytes * step),
                                                                 true);
            ptx::wgmma_commit();
        }
    }
    // Waits for these products and lets go of their panels, one group after the other
    TILE_DEVICE void finish_values(const Places& of) {
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            if (g == kGroups - 1) ptx::wgmma_wait<0>();
            else if (g == kGroups - 2) ptx::wgmma_wait<1>();
            else if (g == kGroups - 3) ptx::wgmma_wait<2>();
            else ptx::wgmma_wait<3>();
            ptx::settle(acc_o[g]);
            ptx::sync_warp();
            if (ptx::elect_one())
#pragma unroll
                for (int m = 0; m < kSide; m++) of.let_go(group * kMine + g * kSide + m);
        }
    }
    static_assert(kGroups <= 4, "groups that are waited for one by one");
    TILE_DEVICE void let_go_of_weights(const Places& of) const {
        ptx::sync_warp();
        if (ptx::elect_one()) of.let_go(kWeights);
    }
    TILE_DEVICE void multiply_own(const Places& of, uint32_t) {
        issue_values(of);
        ptx::fence_async_proxy();  // a copy will follow where weights were stored
        let_go_of_weights(of);
        finish_values(of);
    }
    // The same for a block whose weights the other warpgroup computes, once they are there
    TILE_DEVICE void multiply_other(const Places& of, uint32_t number) {
        ptx::mbarrier_wait(ready_barrier(number), number >> 1 & 1);
#pragma unroll
        for (int step = 0; step < kSteps; step++)
            warp::load_a(rP[step], Weights(of.at(kWeights)), 16 * warp_rank(), step);
        if (ptx::any(sMovedRows(number)[0] != 0)) {
            const Shared<float> references = sReference();
            move_references(references[row(0)], references[row(1)]);
        }
        issue_values(of);
        let_go_of_weights(of);
        finish_values(of);
    }

    // ---- the softmax of a block -------------------------------------------------------------------------------------
    // No key seen yet: −inf − (−inf) would be NaN, any finite reference gives 2^−inf = 0.
    static TILE_DEVICE float finite(float reference) { return reference == -INFINITY ? 0.0f : reference; }
    TILE_DEVICE void move_references(float first, float second) {
        const float to[2] = {first, second};
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            factor[h] = ptx::exp2(state.max[h] - finite(to[h]));
            state.max[h] = to[h];
            // Rounded: fused with the sum that follows in one warpgroup and not in the other, it would have other bits.
            state.sum[h] = ptx::multiply(state.sum[h], factor[h]);
        }
#pragma unroll
        for (int g = 0; g < kGroups; g++) warp::scale_rows(acc_o[g], factor);
    }
    static TILE_DEVICE float largest(const Scores& acc_s, int h) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++) top = fmaxf(top, fmaxf(acc_s[4 * n + 2 * h], acc_s[4 * n + 2 * h + 1]));
        return warp::row_max(top);
    }
    // P of S, which stays as it is, and this thread's sums of it. True if a reference no longer serves one of its rows.
    TILE_DEVICE bool exponentiate(const Scores& acc_s, float (&sum)[2]) {
        const float reference[2] = {finite(state.max[0]), finite(state.max[1])};
        float part[2][2] = {};  // even and odd keys: two chains of additions per row
#pragma unroll
        for (int j = 0; j < kKeys / 4; j++) {
            const int h = j % 2;
            const float low = ptx::exp2(ptx::mad(acc_s[2 * j], scale_log2, -reference[h]));
            const float high = ptx::exp2(ptx::mad(acc_s[2 * j + 1], scale_log2, -reference[h]));
            part[h][0] += low;
            part[h][1] += high;
            rP[j / 4][j % 4] = pack<Element>(low, high);
        }
        bool over = false;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = part[h][0] + part[h][1];
            over |= !(sum[h] <= kWitness) || state.max[h] == -INFINITY;
        }
        return over;
    }
    // What is done to scores, and −inf for keys that a row does not see. True if rows may not see the whole block.
    TILE_DEVICE bool finish_scores(Scores& acc_s, uint32_t number, int first_token) {
        if constexpr (!Rule::kLinear) Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores));
        if constexpr (kChosen)
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++) {
                const uint16_t two = sThere<uint16_t>(number)[4 * n + lane() % 4];
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (!(two >> 8 * i & 1)) acc_s[4 * n + i] = acc_s[4 * n + 2 + i] = -INFINITY;
            }
        if (!ptx::any(first_token < whole_from || first_token + kKeys > whole_to)) return false;
#pragma unroll
        for (int h = 0; h < 2; h++) warp::mask_row(acc_s, h, first_token, table.seen()[row(h)]);
        return true;
    }
    // The weights P of a block, from its scores to registers and to shared memory. fresh: no row has a reference yet
    TILE_DEVICE void weigh(Scores& acc_s, const Places& of, uint32_t number, int first_token, Span span, bool fresh) {
        float sum[2];
        bool moves = finish_scores(acc_s, number, first_token);
        moves = ptx::any(moves || fresh) || ptx::any(exponentiate(acc_s, sum));
        if (moves) {
            float to[2];
#pragma unroll
            for (int h = 0; h < 2; h++) to[h] = fmaxf(state.max[h], largest(acc_s, h) * scale_log2);
            move_references(to[0], to[1]);
            exponentiate(acc_s, sum);
            if (lane() % 4 == 0)
#pragma unroll
                for (int h = 0; h < 2; h++) sReference()[row(h)] = to[h];
        }
        state.sum[0] += sum[0];
        state.sum[1] += sum[1];
        group_sync();  // no warp reads the panel any more that P takes the place of
        if (lane() == 0) sMovedRows(number)[0] = moves;
#pragma unroll
        for (int step = 0; step < kSteps; step++)
            warp::store_a(Weights(of.at(kWeights)), 16 * warp_rank(), step, rP[step], lane());
        const bool clears = !kGather && (first_token < span.begin || first_token + kKeys > span.end);
        if (ptx::any(clears)) {
            clear_outside(of, first_token, span);
            ptx::fence_async_proxy();
        }
        ptx::mbarrier_arrive(ready_barrier(number));
        // What other warps of this warpgroup have cleared is read by the product that comes next.
        if (ptx::any(clears)) ptx::mbarrier_wait(ready_barrier(number), number >> 1 & 1);
        if constexpr (kWeights > kValuePanels) {
            ptx::sync_warp();
            if (ptx::elect_one())
#pragma unroll
                for (int panel = kValuePanels; panel < kWeights; panel++) of.let_go(panel);
        }
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // O, m and l of the blocks
    TILE_DEVICE void add_blocks(int begin, int end, Span span) {
#pragma unroll
        for (int g = 0; g < kGroups; g++) warp::zero(acc_o[g]);
        state = {};
        seesaw(*this, begin, end, span);
    }
    // The sums of a piece
    TILE_DEVICE void join_sums(bool first) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = warp::row_sum(state.sum[h]);
            if (lane() % 4 == 0) sSums()[group * kRows + row(h)] = sum;
            if (lane() % 4 == 0 && group == 0) sReference()[row(h)] = state.max[h];
        }
        all_sync();
        const int r = threadIdx.x;
        if (r < kRows) {
            const Shared<float> sums = sSums();
            const float all = sums[r] + sums[kRows + r];
            join_piece(r, first, all, all == 0.0f ? kLowest : float(sReference()[r]));
        }
        all_sync();
    }
    // O is joined with what came before, and kept for what comes after; but not by warps whose rows the item has not
    TILE_DEVICE void fold_output(bool of_groups, bool loads, bool stores) {
        if (ptx::any(16 * warp_rank() >= table.words()[kRowsWord])) return;
        if (loads) {
            const Shared<float> factors = sFactors();
            Fold folds[2];
#pragma unroll
            for (int h = 0; h < 2; h++) folds[h] = {0.0f, factors[2 * row(h)], factors[2 * row(h) + 1]};
#pragma unroll
            for (int n = 0; n < kMine * 8; n++) {
                const Vector16 old = fold_place(of_groups, n)[0];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = acc_o[n * 4 / (kColumns / 2)][n * 4 % (kColumns / 2) + i];
                    x = folds[i / 2].join(as_float(old.word[i]), x);
                }
            }
        }
        if (stores)
#pragma unroll
            for (int n = 0; n < kMine * 8; n++) {
                const float* x = &acc_o[n * 4 / (kColumns / 2)][n * 4 % (kColumns / 2)];
                fold_place(of_groups, n)[0] = Vector16{{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}};
            }
    }
    // The result of the item's rows, or their states
    TILE_DEVICE void store(int slot) {
        const DecodeItem item = table.item();
        const Shared<float> factors = end_rows(item);
        float factor[2];
        bool results[2];
        Global<Element> gO[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t target = row(h) < item.rows ? Target(table.target()[row(h)]).at : -1;
            const int64_t at = target / 2 + group * kMine * kPanel;
            factor[h] = row(h) < item.rows ? float(factors[row(h)]) : 1.0f;
            results[h] = target >= 0 && target % 2 == 0;
            gO[h] = {static_cast<Element*>(args.o) + at};
            if (target < 0 || results[h]) continue;
            const Global<float> gState{args.state_o + at + 2 * (lane() % 4)};
#pragma unroll
            for (int n = 0; n < kMine * 8; n++) {
                const float* x = &acc_o[n * 4 / (kColumns / 2)][n * 4 % (kColumns / 2) + 2 * h];
                (gState + 8 * n).template as<Vector8>()[0] = Vector8{{as_bits(x[0]), as_bits(x[1])}};
            }
        }
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
            warp::scale_rows(acc_o[g], factor);
            warp::store_rows<kColumns>({gO[0] + g * kColumns, gO[1] + g * kColumns}, results, acc_o[g]);
        }
        leave_table(slot);
    }
    TILE_DEVICE void run() { walk_items(*this); }
};
