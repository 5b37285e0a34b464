// The body for up to 32 query rows: what the two warpgroups of a block compute, by transposed products. Who computes a
// block's weights leaves them in shared memory.
//
// The softmax is lazy (tile/lazy.cuh): weights are taken against a reference that moves only if they grow too large.
// Who computes a block's weights owns the references, and hands them on with the weights.
#pragma once
#include "mla/products.cuh"
#include "tile/ptx_hints.cuh"

struct Body : Products {
    float sum[kEights][2];  // this thread's share of l

    using Products::Products;
    static TILE_DEVICE int column() { return (ptx::just_in_time(threadIdx.x) & 3) * 2; }    // the first row of eight
    static TILE_DEVICE int key(int h) { return 16 * warp_rank() + lane() / 4 + 8 * h; }     // or channel

    // ---- the softmax of a block -------------------------------------------------------------------------------------
    TILE_DEVICE void mask(float (&acc_s)[kRows / 2], int first_token) {
#pragma unroll
        for (int j = 0; j < kEights; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const Visible seen = table.seen()[8 * j + column() + i];
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (!seen.has(first_token + key(h))) acc_s[4 * j + 2 * h + i] = -INFINITY;
            }
    }
    // References move up to the largest scores of the block, and what O and l are to be multiplied with is left beside
    // them.
    TILE_DEVICE void move_references(const float (&acc_s)[kRows / 2], uint32_t number) {
#pragma unroll
        for (int j = 0; j < kEights; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float top = fmaxf(acc_s[4 * j + i], acc_s[4 * j + 2 + i]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) top = fmaxf(top, ptx::shuffle_xor(top, lanes));
                if (lane() < 4) sTops()[warp_rank() * kRows + 8 * j + column() + i] = top;
            }
        group_sync();
        const int row = threadIdx.x % 128;
        if (row < kRows) {
            const Shared<float> tops = sTops(), references = sReference();
            float top = tops[row];
#pragma unroll
            for (int w = 1; w < 4; w++) top = fmaxf(top, tops[w * kRows + row]);
            const float old = references[row], max = fmaxf(old, top * scale_log2);
            // No key seen yet: −inf − (−inf) would be NaN, any finite reference gives 2^−inf = 0.
            sCorrection()[(number & 1) * kRows + row] = ptx::exp2(old - (max == -INFINITY ? 0.0f : max));
            references[row] = max;
        }
        group_sync();
    }
    // P in place of S. True if a reference no longer serves one of this thread's rows.
    TILE_DEVICE bool exponentiate(float (&acc_s)[kRows / 2]) {
        bool over = false;
        const Shared<Vector8> references(kAtReference + 4 * column());
        Vector8 two[kEights];  // asked for together: products of the other warpgroup keep shared memory busy
#pragma unroll
        for (int j = 0; j < kEights; j++) two[j] = references[4 * j];
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++) {
            const float reference = as_float(two[j / 2].word[j % 2]);
            const float finite = reference == -INFINITY ? 0.0f : reference;
            float &low = acc_s[j / 2 * 4 + j % 2], &high = acc_s[j / 2 * 4 + 2 + j % 2];
            low = ptx::exp2(ptx::mad(low, scale_log2, -finite));
            high = ptx::exp2(ptx::mad(high, scale_log2, -finite));
            over |= !(low + high <= kWitness) || reference == -INFINITY;
        }
        return over;
    }
    // Rounded: fused with the sum that follows in one warpgroup and not in the other, the bits would tell whose turn it
    // was.
    TILE_DEVICE void scale_sums(uint32_t number) {
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++)
            sum[j / 2][j % 2] = ptx::multiply(
                sum[j / 2][j % 2], sCorrection()[(number & 1) * kRows + 8 * (j / 2) + column() + j % 2]);
    }
    // What is done to the scores of a block, in acc[0]
    TILE_DEVICE void finish_scores(Scores& acc, uint32_t number) {
        float(&acc_s)[kRows / 2] = acc[0];
        if constexpr (kChains == 2)
#pragma unroll
            for (int i = 0; i < kRows / 2; i++) acc_s[i] += acc[kChains - 1][i];
        if constexpr (!Rule::kLinear) Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores));
        if constexpr (kChosen)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (!sThere(number)[key(h)])
#pragma unroll
                    for (int j = 0; j < kRows / 4; j++) acc_s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
    }
    // The weights P of a block, from its scores to shared memory. fresh: no row has a reference yet
    TILE_DEVICE void weigh(Scores& acc, const Places& of, uint32_t number, int first_token, Span span, bool fresh) {
        float(&acc_s)[kRows / 2] = acc[0];
        finish_scores(acc, number);
        bool moves = ptx::any(fresh);
        if (ptx::any(first_token < whole_from || first_token + kKeys > whole_to)) {
            moves = true;
            mask(acc_s, first_token);
        }
        if (!moves) {
            moves = ptx::any(group_count(exponentiate(acc_s)) > 0);
            if (moves) {  // for they have become weights of no use
                add_scores<0, kPanels>(acc, of);
                finish_scores(acc, number);
            }
        }
        if (moves) {
            move_references(acc_s, number);
            exponentiate(acc_s);
            scale_sums(number);
        }
        // Either way the warpgroup has met since: no warp reads the panel any more that P takes the place of.
        const int l = lane(), chunk = 2 * warp_rank() + l / 8 % 2;
#pragma unroll
        for (int j = 0; j < kEights; j += 2) {
            uint32_t four[4];
#pragma unroll
            for (int n = 0; n < 4; n++) four[n] = pack<Element>(acc_s[4 * j + 2 * n], acc_s[4 * j + 2 * n + 1]);
            const int row = 8 * j + 8 * (l / 16) + l % 8;
            ptx::stmatrix_transposed(
                ptx::shared_address(of.at(kWeights) + row * kPanelRowBytes + (chunk ^ row % 8) * 16), four);
        }
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++)
            sum[j / 2][j % 2] += acc_s[j / 2 * 4 + j % 2] + acc_s[j / 2 * 4 + 2 + j % 2];
        if constexpr (!kGather) clear_outside(of, first_token, span);
        if (threadIdx.x % 128 == 0) sMoved()[number & 1] = moves;
        ptx::fence_async_proxy();
        ptx::mbarrier_arrive(ready_barrier(number));
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // Adds the blocks to O, m and l
    TILE_DEVICE void add_blocks(int begin, int end, Span span) {
#pragma unroll
        for (int m = 0; m < kMine; m++) warp::zero(acc_o[m]);
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++) sum[j / 2][j % 2] = 0.0f;
        seesaw(*this, begin, end, span);
    }
    // Both multiply the weights of a block as soon as they are there, and O is what they can be added to. kOwn: this
    // warpgroup has computed them
    template <bool kOwn> TILE_DEVICE void multiply(const Places& of, uint32_t number) {
        ptx::mbarrier_wait(ready_barrier(number), number >> 1 & 1);
        release_others(of);
        if (ptx::any(sMoved()[number & 1] != 0)) {
            if (!kOwn) scale_sums(number);
            scale_output(kAtCorrection + (number & 1) * 4 * kRows);
        }
        issue_values(of);
        finish_values(of);
    }
    TILE_DEVICE void multiply_own(const Places& of, uint32_t number) { multiply<true>(of, number); }
    TILE_DEVICE void multiply_other(const Places& of, uint32_t number) { multiply<false>(of, number); }
    // Multiplies each row of O with a float of shared memory
    TILE_DEVICE void scale_output(uint32_t at) {
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++) {
            const float factor = Shared<float>(at)[8 * (j / 2) + column() + j % 2];
#pragma unroll
            for (int m = 0; m < kMine; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) acc_o[m][j / 2 * 4 + 2 * h + j % 2] *= factor;
        }
    }
    // The sums of a piece
    TILE_DEVICE void join_sums(bool first) {
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++) {
            float x = sum[j / 2][j % 2];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) x += ptx::shuffle_xor(x, lanes);
            if (lane() < 4) sSums()[(4 * group + warp_rank()) * kRows + 8 * (j / 2) + column() + j % 2] = x;
        }
        all_sync();
        const int row = threadIdx.x;
        if (row < kRows) {
            const Shared<float> sums = sSums(), reference = sReference();
            float each[2];
#pragma unroll
            for (int g = 0; g < 2; g++) {
                each[g] = sums[4 * g * kRows + row];
#pragma unroll
                for (int w = 1; w < 4; w++) each[g] += sums[(4 * g + w) * kRows + row];
            }
            const float all = each[0] + each[1], max = all == 0.0f ? kLowest : float(reference[row]);
            reference[row] = -INFINITY;
            join_piece(row, first, all, max);
        }
        all_sync();
    }
    // O is joined with what came before, and kept for what comes after: in L2, from which megabytes of rows per piece
    // would push it out. On an H200 16 heads take 157 µs so, 162 otherwise; beside 64 rows it makes no difference.
    TILE_DEVICE void fold_output(bool of_groups, bool loads, bool stores) {
        if (loads) {
#pragma unroll
            for (int n = 0; n < kMine * kEights; n++) {
                Vector16 old;
                ptx::load_kept(old.word, fold_place(of_groups, n).base);
                const Shared<float> factors(kAtFactors + 8 * (8 * (n % kEights) + column()));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = acc_o[n / kEights][n % kEights * 4 + i];
                    const Fold fold{0.0f, factors[2 * (i % 2)], factors[2 * (i % 2) + 1]};
                    x = fold.join(as_float(old.word[i]), x);
                }
            }
        }
        if (stores)
#pragma unroll
            for (int n = 0; n < kMine * kEights; n++) {
                const float* x = &acc_o[n / kEights][n % kEights * 4];
                const uint32_t bits[4] = {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])};
                ptx::store_kept(fold_place(of_groups, n).base, bits);
            }
    }
    // The result of the item's rows, or their states
    TILE_DEVICE void store(int slot) const {
        const DecodeItem item = table.item();
        const Shared<float> factors = end_rows(item);
        const int first = group * kMine * kPanel + key(0);
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++) {
            const int row = 8 * (j / 2) + column() + j % 2;
            if (row >= item.rows) continue;
            const int64_t target = Target(table.target()[row]).at;
            if (target < 0) continue;
            const float factor = factors[row];
            const Global<float> gState{args.state_o + target / 2 + first};
            const Global<Element> gO{static_cast<Element*>(args.o) + target / 2 + first};
#pragma unroll
            for (int m = 0; m < kMine; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float x = acc_o[m][j / 2 * 4 + 2 * h + j % 2];
                    if (target % 2) gState[m * kPanel + 8 * h] = x;
                    else gO[m * kPanel + 8 * h] = from_float<Element>(x * factor);
                }
        }
        leave_table(slot);
    }
    TILE_DEVICE void run() {
        for (int row = threadIdx.x; row < kRows; row += kComputing) sReference()[row] = -INFINITY;
        walk_items(*this);
    }
};
