// The products of a block, for two warpgroups. They are transposed, so that few query rows do not leave the 64 rows of
// a product empty: Sᵀ = K Qᵀ has 64 keys by kRows query rows, and Oᵀ += Vᵀ Pᵀ has 64 channels by kRows query rows. K
// and Vᵀ are the same bytes: a panel read along its rows, and along its columns.
//
// Of Sᵀ a thread has value [4j + 2h + i]: key 16 w + g + 8h of the block, query row 8j + 2t + i, with w the warp of its
// warpgroup, g = lane / 4 and t = lane % 4; of Oᵀ the same with channels in place of keys.
#pragma once
#include "mla/groups.cuh"

constexpr int kChains = kRows <= 32 ? 2 : 1;  // sums of which scores are made

struct Products : Grouped {
    using Scores = float[kChains][kRows / 2];  // no member, which would take registers from block to block
    float acc_o[kMine][kRows / 2];

    using Grouped::Grouped;

    // Sᵀ = K Qᵀ over some panels of a block, as they come. A narrow product is shorter than the time until its sums can
    // be added to, so those of even and of odd steps are summed apart.
    template <int kFrom, int kTo> TILE_DEVICE void add_scores(Scores& acc, const Places& of) {
        if constexpr (kFrom < kTo) {
            const uint64_t q = k_major(ptx::shared_address(kAtQ));
#pragma unroll
            for (int panel = kFrom; panel < kTo; panel++) {
                of.wait_rows(panel);
                ptx::wgmma_fence();
                const uint64_t k = k_major(ptx::shared_address(of.at(panel)));
#pragma unroll
                for (int step = 0; step < 4; step++)
                    ptx::Wgmma<Element, kRows>::template ss<false, false>(
                        acc[step % kChains], further(k, 32 * step),
                        further(q, panel * kRows * kPanelRowBytes + 32 * step), panel > 0 || step >= kChains);
            }
            ptx::wgmma_commit();
            if constexpr (kBlockPlaces > kPanels && kTo == kPanels) of.wait(kWeights);
            ptx::wgmma_wait<0>();
#pragma unroll
            for (int n = 0; n < kChains; n++) ptx::settle(acc[n]);
        }
    }
    // Oᵀ += Vᵀ Pᵀ, for this warpgroup's channels: a group of products per panel. What is there is not waited for, so
    // laps do not matter.
    TILE_DEVICE void issue_values(const Places& of) {
        ptx::wgmma_fence();
        const uint64_t p = k_major(ptx::shared_address(of.at(kWeights)));
#pragma unroll
        for (int m = 0; m < kMine; m++) {
            const uint64_t v = mn_major<kKeys>(ptx::shared_address(of.at(group * kMine + m)));
#pragma unroll
            for (int step = 0; step < kKeys / 16; step++)
                ptx::Wgmma<Element, kRows>::template ss<true, false>(acc_o[m], further(v, 2 * kEightBytes * step),
                                                                     further(p, 32 * step), true);
            ptx::wgmma_commit();
        }
    }
    // Waits for the products of a block and lets go of its panels, one after the other, and of the weights
    TILE_DEVICE void finish_values(const Places& of) {
#pragma unroll
        for (int m = 0; m < kMine; m++) {
            if (m == 0) ptx::wgmma_wait<kMine - 1>();
            else if (m == 1) ptx::wgmma_wait<(kMine > 2 ? kMine - 2 : 0)>();
            else if (m == 2) ptx::wgmma_wait<(kMine > 3 ? kMine - 3 : 0)>();
            else ptx::wgmma_wait<0>();
            ptx::settle(acc_o[m]);
            ptx::sync_warp();
            if (ptx::elect_one()) {
                of.let_go(group * kMine + m);
                if (m == kMine - 1) of.let_go(kWeights);
            }
        }
    }
    // Lets go of the panels of a block that only scores are made of in this warpgroup
    TILE_DEVICE void release_others(const Places& of) const {
        ptx::sync_warp();
        if (!ptx::elect_one()) return;
#pragma unroll
        for (int panel = 0; panel < kWeights; panel++)
            if (panel >= kValuePanels || panel / kMine != int(group)) of.let_go(panel);
    }
};
