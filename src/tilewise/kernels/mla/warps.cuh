// What the bodies by mma.sync have in common, on any card: S and O in the fragments of warps, the softmax of some keys,
// and what becomes of a piece.
//
// Of S warp w has the sixteen query rows of group w % kRowGroups by the keys of group w / kRowGroups; of O all rows by
// its own kMyColumns columns. Of S a lane has value [4n + 2h + i]: row g + 8h of its warp's rows, key 8n + 2t + i of
// its keys, with g = lane / 4 and t = lane % 4; of O the same with columns in place of keys, per sixteen rows.
//
// The softmax is lazy (tile/lazy.cuh): weights are taken against a reference that moves only if they grow too large.
// Then the warps exchange their largest scores, and take the weights once more.
//
// Whoever includes this has included a layout of shared memory, which says how S is dealt to warps.
#pragma once
#include "mla/walk.cuh"
#include "tile/mma_rows.cuh"
#include "tile/softmax.cuh"

struct Warps : Walk {
    using Scores = float[kMyKeys / 2];
    float acc_o[kRowGroups][kMyColumns / 2];
    warp::RowState state;  // of this lane's rows of S: references in base 2, the same in all key groups; its share of l
    uint32_t number = 0;   // of the keys that are computed at once, in the life of the thread block
    const uint32_t warp_rank;

    TILE_DEVICE Warps(const DecodeArgs& a, const MlaArgs& m) : Walk(a, m), warp_rank(ptx::uniform(threadIdx.x / 32)) {}
    TILE_DEVICE int key_group() const { return warp_rank / kRowGroups; }
    TILE_DEVICE int row0() const { return warp_rank % kRowGroups * 16; }
    TILE_DEVICE int row(int h) const { return row0() + warp::fragment_row(h); }  // of S
    // Of O, the first. kRaw: columns come in fours, 4t … 4t + 3 of sixteen; those of even number are value
    // [8n + 2h + i] of a lane, the others [8n + 4 + 2h + i].
    TILE_DEVICE int column() const { return warp_rank * kMyColumns + (kRaw ? 2 : 1) * warp::fragment_column(); }

    // ---- the softmax of some keys -----------------------------------------------------------------------------------
    // What is done to scores, and −inf for keys that a row does not see. of: their number
    TILE_DEVICE void finish_scores(Scores& acc_s, uint32_t of, int first_token) const {
        if constexpr (!Rule::kLinear) Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores));
        const int first = key_group() * kMyKeys;
        if constexpr (kChosen)
#pragma unroll
            for (int j = 0; j < kMyKeys / 4; j++)  // j = 2n + i
                if (!sThere(of)[first + j / 2 * 8 + ptx::just_in_time(warp::lane()) % 4 * 2 + j % 2])
                    acc_s[j / 2 * 4 + j % 2] = acc_s[j / 2 * 4 + 2 + j % 2] = -INFINITY;
        if (first_token >= whole_from && first_token + kSlice <= whole_to) return;
#pragma unroll
        for (int h = 0; h < 2; h++) warp::mask_row(acc_s, h, first_token + first, table.seen()[row(h)]);
    }
    // The largest of this lane's scores of a row
    static TILE_DEVICE float largest(const Scores& acc_s, int h) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < kMyKeys / 8; n++) top = fmaxf(top, fmaxf(acc_s[4 * n + 2 * h], acc_s[4 * n + 2 * h + 1]));
        return top;
    }
    // No key seen yet: −inf − (−inf) would be NaN, any finite reference gives 2^−inf = 0.
    static TILE_DEVICE float finite(float reference) { return reference == -INFINITY ? 0.0f : reference; }
    // P of S, which stays as it is, and this lane's sums of it. put(h, n, p): two weights of row h, keys 8n + 2t + i
    template <class Put> TILE_DEVICE void exponentiate(const Scores& acc_s, float (&sum)[2], const Put& put) const {
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
                put(h, n, p);
            }
        }
    }
    // Two weights to where all warps read them
    TILE_DEVICE void put_pair(const Weights& sP, int h, int n, float first, float second) const {
        const int lane = warp::lane();
        const int its = row0() + lane / 4 + 8 * h, key = key_group() * kMyKeys + 8 * n + lane % 4 * 2;
        sP.pair(its, key) = pack<Element>(first, second);
    }
    // Does the reference no longer serve one of this lane's rows?
    TILE_DEVICE bool over(const Scores& acc_s, const float (&sum)[2]) const {
        bool found = false;
#pragma unroll
        for (int h = 0; h < 2; h++)
            found |= !(sum[h] <= kWitness) || (state.max[h] == -INFINITY && largest(acc_s, h) > -INFINITY);
        return found;
    }
    // By all warps: references move up to the largest scores, with what was added up against them, and the weights are
    // taken once more.
    // weigh(): the weights of acc_s
    template <class Weigh> TILE_DEVICE void move_references(const Scores& acc_s, const Weigh& weigh) {
        const Shared<float> tops = sTops(), corrections = sCorrection();
        const int lane = ptx::just_in_time(warp::lane()), its = row0() + lane / 4;  // of a path that is rarely taken
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = warp::row_max(largest(acc_s, h));
            if (lane % 4 == 0) tops[key_group() * kRows + its + 8 * h] = top;
        }
        all_sync();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = tops[its + 8 * h];
#pragma unroll
            for (int g = 1; g < kKeyGroups; g++) top = fmaxf(top, tops[g * kRows + its + 8 * h]);
            const float max = fmaxf(state.max[h], top * scale_log2), correction = ptx::exp2(state.max[h] - finite(max));
            state.max[h] = max;
            state.sum[h] = ptx::multiply(state.sum[h], correction);  // not fused with the sum that follows
            if (key_group() == 0 && lane % 4 == 0) corrections[its + 8 * h] = correction;
        }
        weigh();
        all_sync();
#pragma unroll
        for (int m = 0; m < kRowGroups; m++) {
            const float factor[2] = {corrections[16 * m + warp::fragment_row(0)],
                                     corrections[16 * m + warp::fragment_row(1)]};
            warp::scale_rows(acc_o[m], factor);
        }
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    TILE_DEVICE void begin_piece() {
#pragma unroll
        for (int m = 0; m < kRowGroups; m++) warp::zero(acc_o[m]);
        state = {};
    }
    // The sums of a piece
    TILE_DEVICE void join_sums(bool first) {
        const Shared<float> sums = sSums(), references = sTops();  // nobody looks for largest scores any more
        const int lane = ptx::just_in_time(warp::lane()), its = row0() + lane / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float sum = warp::row_sum(state.sum[h]);
            if (lane % 4 == 0) sums[key_group() * kRows + its + 8 * h] = sum;
            if (lane % 4 == 0 && key_group() == 0) references[its + 8 * h] = state.max[h];
        }
        all_sync();
        const int r = threadIdx.x;
        if (r < kRows) {
            float all = sums[r];
#pragma unroll
            for (int g = 1; g < kKeyGroups; g++) all += sums[g * kRows + r];
            join_piece(r, first, all, all == 0.0f ? kLowest : float(references[r]));
        }
        all_sync();
    }
    // O is joined with what came before, and kept for what comes after
    TILE_DEVICE void fold_output(bool of_groups, bool loads, bool stores) {
#pragma unroll
        for (int n = 0; n < kFoldPlaces; n++) {
            float* x = &acc_o[n / (kMyColumns / 8)][n % (kMyColumns / 8) * 4];
            if (loads) {
                const Vector16 old = fold_place(of_groups, n)[0];
                const Shared<float> factors = sFactors();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int its = 16 * (n / (kMyColumns / 8)) + warp::fragment_row(i / 2);
                    x[i] = Fold{0.0f, factors[2 * its], factors[2 * its + 1]}.join(as_float(old.word[i]), x[i]);
                }
            }
            if (n % 4 == 3) ptx::sync_warp();  // ptxas would ask for all old values at once, and spill
            if (stores)
                fold_place(of_groups, n)[0] = Vector16{{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}};
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
            const int64_t at = target / 2 + column();
            const Global<float> gState{args.state_o + at};
            const Global<Element> gO{static_cast<Element*>(args.o) + at};
#pragma unroll
            for (int n = 0; n < kMyColumns / 8; n += kRaw ? 2 : 1) {
                const float* x = &acc_o[m][4 * n + 2 * h];
                if constexpr (kRaw) {
                    const float four[4] = {x[0], x[4], x[1], x[5]};
                    if (target % 2) store_4(gState + 8 * n, four, 1.0f);
                    else store_4(gO + 8 * n, four, factor);
                } else {
                    if (target % 2)
                        (gState + 8 * n).template as<Vector8>()[0] = Vector8{{as_bits(x[0]), as_bits(x[1])}};
                    else (gO + 8 * n).template as<uint32_t>()[0] = pack<Element>(x[0] * factor, x[1] * factor);
                }
            }
        }
        leave_table(slot);
    }
};
