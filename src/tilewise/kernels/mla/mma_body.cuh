// What the warps of a block compute by mma.sync: items, pieces of them, and their slices of keys.
//
// S = Q Kᵀ: warp w has the sixteen query rows of group w % kRowGroups by the keys of group w / kRowGroups. It leaves
// its weights P in shared memory, and then has all rows of O += P V by its own kMyColumns columns: the same rows of the
// cache, read as K by ldmatrix and as V by ldmatrix transposed.
//
// The softmax is lazy (tile/lazy.cuh): weights are taken against a reference that moves only if they grow too large.
// The barrier that tells that P is there also tells whether some row's reference has to move. Then the warps exchange
// their largest scores, and take the weights once more.
//
// Of S a lane has value [4n + 2h + i]: row g + 8h of its warp's rows, key 8n + 2t + i of its keys, with g = lane / 4
// and t = lane % 4; of O the same with columns in place of keys, per sixteen rows.
#pragma once
#include "mla/mma_load.cuh"
#include "mla/walk.cuh"
#include "tile/mma_rows.cuh"
#include "tile/softmax.cuh"

struct MmaBody : Walk {
    float acc_o[kRowGroups][kMyColumns / 2], acc_s[kMyKeys / 2];
    warp::RowState state;  // of this lane's rows of S: references in base 2, the same in all key groups; its share of l
    Copies copies;
    uint32_t number = 0;  // of the slice in the life of the thread block

    TILE_DEVICE MmaBody(const DecodeArgs& a, const MlaArgs& m) : Walk(a, m), copies(a, m) {}
    static TILE_DEVICE int warp_rank() { return ptx::uniform(threadIdx.x / 32); }
    static TILE_DEVICE int key_group() { return warp_rank() / kRowGroups; }
    static TILE_DEVICE int row(int h) { return warp_rank() % kRowGroups * 16 + warp::fragment_row(h); }  // of S
    static TILE_DEVICE int column() { return warp_rank() * kMyColumns + warp::fragment_column(); }       // of O

    // Copies of the first slices are on their way while Q is.
    TILE_DEVICE bool begin(int slot) {
        copies.begin(slot);
        return Walk::begin(slot);
    }

    // ---- products ---------------------------------------------------------------------------------------------------
    // S = Q Kᵀ. Sums of even and of odd steps of depth apart: a product waits for the one before it otherwise.
    TILE_DEVICE void compute_scores() {
        const Slice sK = slice_at(number);
        const int row0 = warp_rank() % kRowGroups * 16, lane = warp::lane();
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
                warp::load_a(a[i], sQ, row0, step % 4 + i);
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
                warp::load_b(b, sV, warp_rank() * (kMyColumns / 16) + n, step);
#pragma unroll
                for (int m = 0; m < kRowGroups; m++) warp::mma_pair<Element>(acc_o[m], n, rP[m], b);
            }
        }
    }

    // ---- the softmax of a slice -------------------------------------------------------------------------------------
    TILE_DEVICE void finish_scores(int first_token) {
        if constexpr (!Rule::kLinear) Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores));
        const int first = key_group() * kMyKeys;
        if constexpr (kChosen)
#pragma unroll
            for (int j = 0; j < kMyKeys / 4; j++)  // j = 2n + i
                if (!sThere(number)[first + j / 2 * 8 + warp::fragment_column() + j % 2])
                    acc_s[j / 2 * 4 + j % 2] = acc_s[j / 2 * 4 + 2 + j % 2] = -INFINITY;
        if (first_token >= whole_from && first_token + kSlice <= whole_to) return;
#pragma unroll
        for (int h = 0; h < 2; h++) warp::mask_row(acc_s, h, first_token + first, table.seen()[row(h)]);
    }
    // The largest of this lane's scores of a row
    TILE_DEVICE float largest(int h) const {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kMyKeys / 8; n++) top = fmaxf(top, fmaxf(acc_s[4 * n + 2 * h], acc_s[4 * n + 2 * h + 1]));
        return top;
    }
    // No key seen yet: −inf − (−inf) would be NaN, any finite reference gives 2^−inf = 0.
    static TILE_DEVICE float finite(float reference) { return reference == -INFINITY ? 0.0f : reference; }
    // P of S, which stays as it is, to shared memory, and this lane's sums of it
    TILE_DEVICE void exponentiate(float (&sum)[2]) const {
        const Weights sP(kAtWeights);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = 0.0f;
#pragma unroll
            for (int n = 0; n < kMyKeys / 8; n++) {
                float p[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    p[i] = ptx::exp2(ptx::mad(acc_s[4 * n + 2 * h + i], scale_log2, -finite(state.max[h])));
                    sum[h] += p[i];
                }
                sP.pair(row(h), key_group() * kMyKeys + 8 * n + warp::fragment_column()) = pack<Element>(p[0], p[1]);
            }
        }
    }
    // References move up to the largest scores of the slice, with what was added up against them.
    TILE_DEVICE void move_references() {
        const Shared<float> tops = sTops(), corrections = sCorrection();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = warp::row_max(largest(h));
            if (warp::lane() % 4 == 0) tops[key_group() * kRows + row(h)] = top;
        }
        all_sync();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = tops[row(h)];
#pragma unroll
            for (int g = 1; g < kKeyGroups; g++) top = fmaxf(top, tops[g * kRows + row(h)]);
            const float max = fmaxf(state.max[h], top * scale_log2), correction = ptx::exp2(state.max[h] - finite(max));
            state.max[h] = max;
            state.sum[h] *= correction;
            if (key_group() == 0 && warp::lane() % 4 == 0) corrections[row(h)] = correction;
        }
    }
    // From scores to weights that all warps can read, and an O to which they can be added
    TILE_DEVICE void weigh() {
        float sum[2];
        exponentiate(sum);
        bool over = false;  // Does the reference no longer serve one of this lane's rows?
#pragma unroll
        for (int h = 0; h < 2; h++)
            over |= !(sum[h] <= kWitness) || (state.max[h] == -INFINITY && largest(h) > -INFINITY);
        if (ptx::barrier_count(kAllBarrier, kComputing, over) > 0) {
            move_references();
            exponentiate(sum);
            all_sync();
            const Shared<float> corrections = sCorrection();
#pragma unroll
            for (int m = 0; m < kRowGroups; m++) {
                const float factor[2] = {corrections[16 * m + warp::fragment_row(0)],
                                         corrections[16 * m + warp::fragment_row(1)]};
                warp::scale_rows(acc_o[m], factor);
            }
        }
        state.sum[0] += sum[0];
        state.sum[1] += sum[1];
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // O, m and l of the blocks
    TILE_DEVICE void add_blocks(int begin, int end, Span span) {
#pragma unroll
        for (int m = 0; m < kRowGroups; m++) warp::zero(acc_o[m]);
        state = {};
        const int from = span.begin / kSlice * kSlice, stop = end * kKeys < span.end ? end * kKeys : span.end;
#pragma unroll 1
        for (int token = begin * kKeys > from ? begin * kKeys : from; token < stop; token += kSlice, number++) {
            copies.arrive(number);
            compute_scores();
            finish_scores(token);
            weigh();
            multiply();
        }
    }
    // The state of a piece is folded into that of the pieces before it, as merging does. last: nothing follows
    TILE_DEVICE void end_piece(bool first, bool last) {
        const Shared<float> sums = sSums(), references = sTops();  // nobody looks for largest scores any more
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = warp::row_sum(state.sum[h]);
            if (warp::lane() % 4 == 0) sums[key_group() * kRows + row(h)] = sum;
            if (warp::lane() % 4 == 0 && key_group() == 0) references[row(h)] = state.max[h];
        }
        all_sync();
        const int r = threadIdx.x;
        if (r < kRows) {
            float all = sums[r];
#pragma unroll
            for (int g = 1; g < kKeyGroups; g++) all += sums[g * kRows + r];
            join_row(r, first, all, all == 0.0f ? kLowest : float(references[r]));
        }
        all_sync();
#pragma unroll
        for (int n = 0; n < kFoldPlaces; n++) {
            float* x = &acc_o[n / (kMyColumns / 8)][n % (kMyColumns / 8) * 4];
            if (!first) {
                const Vector16 old = fold_place(n)[0];
                const Shared<float> factors = sFactors();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int its = 16 * (n / (kMyColumns / 8)) + warp::fragment_row(i / 2);
                    x[i] = Fold{0.0f, factors[2 * its], factors[2 * its + 1]}.join(as_float(old.word[i]), x[i]);
                }
            }
            if (n % 4 == 3) ptx::sync_warp();  // ptxas would ask for all old values at once, and spill
            if (!last) fold_place(n)[0] = Vector16{{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}};
        }
    }
    // The result of the item's rows, or their states
    TILE_DEVICE void store(int slot) const {
        const DecodeItem item = table.item();
        const Shared<float> factors = end_rows(item);
#pragma unroll
        for (int j = 0; j < 2 * kRowGroups; j++) {
            const int m = j / 2, h = j % 2, its = 16 * m + warp::fragment_row(h);
            const int64_t target = its < item.rows ? Target(table.target()[its]).at : -1;
            if (target < 0) continue;
            const float factor = factors[its];
            const Global<float> gState{args.state_o + target / 2 + column()};
            const Global<Element> gO{static_cast<Element*>(args.o) + target / 2 + column()};
#pragma unroll
            for (int n = 0; n < kMyColumns / 8; n++) {
                const float* x = &acc_o[m][4 * n + 2 * h];
                if (target % 2) (gState + 8 * n).template as<Vector8>()[0] = Vector8{{as_bits(x[0]), as_bits(x[1])}};
                else (gO + 8 * n).template as<uint32_t>()[0] = pack<Element>(x[0] * factor, x[1] * factor);
            }
        }
        leave_table(slot);
    }
};
