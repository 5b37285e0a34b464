// What the warps of a block compute on cards without wgmma: items, pieces of them, and their slices of keys, as
// warps.cuh has them. The same rows of the cache are read as K by ldmatrix, and as V by ldmatrix transposed.
//
// A barrier tells that all weights of a slice are there, and whether some row's reference has to move.
#pragma once
#include "mla/mma_load.cuh"
#include "mla/warps.cuh"

struct MmaBody : Warps {
    Scores acc_s;
    Copies copies;

    TILE_DEVICE MmaBody(const DecodeArgs& a, const MlaArgs& m) : Warps(a, m), copies(a, m) {}

    // Copies of the first slices are on their way while Q is.
    TILE_DEVICE bool begin(int slot) {
        copies.begin(slot);
        return Walk::begin(slot);
    }

    // ---- products ---------------------------------------------------------------------------------------------------
    // S = Q Kᵀ. Sums of even and of odd steps of depth apart: a product waits for the one before it otherwise.
    TILE_DEVICE void compute_scores() {
        const Slice sK = slice_at(number);
        const int lane = warp::lane();
        float acc[2][kMyKeys / 2];
        warp::zero(acc[0]);
        warp::zero(acc[1]);
        // Eight keys: 32 channels of them per ldmatrix
        const uint32_t eight = sK.address(key_group() * 8 + lane % 8, lane / 8);
#pragma unroll 6  // three panels: of all nine so many operands are asked for ahead that 64 rows spill on some cards
        for (int step = 0; step < kQueryDim / 16; step += 2) {
            uint32_t a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const QueryPanel sQ(kAtQ + step / 4 * QueryPanel::kBytes);
                warp::load_a(a[i], sQ, row0(), step % 4 + i);
                if constexpr (kMyKeys == 16) warp::load_bt(b[i], sK, key_group(), step + i);
            }
            if constexpr (kMyKeys == 8) {
                ptx::ldmatrix(b[0], Slice::along(eight, 2 * step));
                ptx::mma_16x8x16<Element>(warp::four(acc[0]), a[0], b[0][0], b[0][1]);
                ptx::mma_16x8x16<Element>(warp::four(acc[1]), a[1], b[0][2], b[0][3]);
            } else {
                warp::mma_pair<Element>(acc[0], 0, a[0], b[0]);
                warp::mma_pair<Element>(acc[1], 0, a[1], b[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < kMyKeys / 2; i++) acc_s[i] = acc[0][i] + acc[1][i];
    }
    // O += P V
    TILE_DEVICE void multiply() {
        const Slice sV = slice_at(number);
        const Weights sP(kAtWeights);
#pragma unroll
        for (int step = 0; step < kSlice / 16; step++) {
            uint32_t rP[kRowGroups][4];
#pragma unroll
            for (int m = 0; m < kRowGroups; m++) warp::load_a(rP[m], sP, 16 * m, step);
#pragma unroll
            for (int n = 0; n < kMyColumns / 16; n++) {
                uint32_t b[4];
                warp::load_b(b, sV, warp_rank * (kMyColumns / 16) + n, step);
#pragma unroll
                for (int m = 0; m < kRowGroups; m++) warp::mma_pair<Element>(acc_o[m], n, rP[m], b);
            }
        }
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // From scores to weights that all warps can read, and an O to which they can be added
    TILE_DEVICE void weigh() {
        const auto put = [&](int h, int n, const float (&p)[2]) { put_pair(Weights(kAtWeights), h, n, p[0], p[1]); };
        float sum[2];
        exponentiate(acc_s, sum, put);
        if (ptx::barrier_count(kAllBarrier, kComputing, over(acc_s, sum)) > 0)
            move_references(acc_s, [&] { exponentiate(acc_s, sum, put); });
        state.sum[0] += sum[0];
        state.sum[1] += sum[1];
    }
    // O, m and l of the blocks
    TILE_DEVICE void add_blocks(int begin, int end, Span span) {
        begin_piece();
        const int from = span.begin / kSlice * kSlice, stop = end * kKeys < span.end ? end * kKeys : span.end;
#pragma unroll 1
        for (int token = begin * kKeys > from ? begin * kKeys : from; token < stop; token += kSlice, number++) {
            copies.arrive(number);
            compute_scores();
            finish_scores(acc_s, number, token);
            weigh();
            multiply();
        }
    }
};
