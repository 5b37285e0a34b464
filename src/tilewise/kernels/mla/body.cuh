// What the two warpgroups of a block compute: items, pieces of them, and their blocks of keys.
//
// Blocks of keys take turns: a warpgroup computes the scores and the weights of every other block, and leaves the
// weights in shared memory. Both multiply them with the values, each with one half of the channels. Scores of a
// block before the products of the one before it would fill the tensor cores during the softmax, but a block would stay
// in the ring for longer: that was slower.
//
// The softmax is lazy (tile/lazy.cuh): weights are taken against a reference that moves only if they grow too large.
// Who computes a block's weights owns the references, and hands them on with the weights.
#pragma once
#include "mla/items.cuh"
#include "mla/products.cuh"

constexpr int kAtParts = 0, kRowAtOnce = 4;  // the ring is free when states are merged
constexpr bool kLongRuns = false;
#include "decode/states.cuh"

constexpr float kWitness = 256.0f;  // the sum of two weights up to which a reference stays

struct Body : Products {
    const DecodeArgs& args;
    const MlaArgs& mla;
    float scale_log2;
    Table table{0};            // of the item
    int whole_from, whole_to;  // every row sees the tokens between these
    float sum[kEights][2];  // this thread's share of l

    TILE_DEVICE Body(const DecodeArgs& a, const MlaArgs& m, uint32_t g) : Products(g), args(a), mla(m) {
        // A positive scale keeps the order of scores and goes into the exponential's multiply-add. Q takes a negative
        // scale's sign, and is 0 for a scale of 0.
        scale_log2 = !Rule::kLinear ? 1.0f : args.scores.scale_log2 == 0.0f ? 1.0f : fabsf(args.scores.scale_log2);
    }
    static TILE_DEVICE int column() { return (ptx::just_in_time(threadIdx.x) & 3) * 2; }    // the first row of eight
    static TILE_DEVICE int key(int h) { return 16 * warp_rank() + lane() / 4 + 8 * h; }     // or channel
    TILE_DEVICE void group_sync() const { ptx::barrier_sync(kGroupBarriers + group, 128); }
    static TILE_DEVICE void all_sync() { ptx::barrier_sync(kAllBarrier, kComputing); }

    // ---- an item ----------------------------------------------------------------------------------------------------
    // Waits for what is known of the item, and brings Q to shared memory. False if there is no item.
    TILE_DEVICE bool begin(int slot) {
        table = Table(slot);
        if constexpr (kLooksAhead) {
            ptx::barrier_sync(kFilledBarriers + slot % 2, kComputing + 32);
        } else {
            // One warp, or every warp the same: ptxas spills with the one here, with the other there.
            if (!kScaled || threadIdx.x < 32) table.fill(args, ptx::just_in_time(slot));
            all_sync();
        }
        const Shared<int> words = table.words();
        if (ptx::uniform(words[kAllRowsWord]) == 0) return false;
        whole_from = ptx::uniform(words[kWholeFromWord]);
        whole_to = ptx::uniform(words[kWholeToWord]);
        if (words[kEndWord] > words[kBeginWord]) load_queries(words[kRowsWord]);
        all_sync();
        return true;
    }
    // All copies are on their way before the first is waited for.
    TILE_DEVICE void load_queries(int rows) const {
        constexpr int kChunks = kPanels * 8;  // of 16 bytes in a row
        const auto at = [](int row, int c) {
            return kAtQ + (c / 8 * kRows + row) * kPanelRowBytes + (c % 8 ^ row % 8) * 16;
        };
        const int thread = ptx::just_in_time(threadIdx.x);
        const Shared<int64_t> queries = table.queries();
        for (int n = thread; n < kRows * kChunks; n += kComputing) {
            const int row = n / kChunks, c = n % kChunks;
            const int64_t from = int64_t(queries[row]) + 8 * c;
            ptx::copy_async_16(ptx::shared_address(at(row, c)), static_cast<const Element*>(args.q) + from,
                               row < rows ? 16 : 0);
        }
        ptx::copy_async_commit();
        ptx::copy_async_wait<0>();
        if (Rule::kLinear && args.scores.scale_log2 <= 0.0f) {
            const uint32_t sign = args.scores.scale_log2 < 0.0f ? 0x80008000u : 0u, kept = sign ? ~0u : 0u;
            for (int n = thread; n < kRows * kChunks; n += kComputing) {
                const Shared<Vector16> to(at(n / kChunks, n % kChunks));
                Vector16 x = to[0];
#pragma unroll
                for (int i = 0; i < 4; i++) x.word[i] = (x.word[i] & kept) ^ sign;
                to[0] = x;
            }
        }
        ptx::fence_async_proxy();
    }

    // ---- the softmax of a block -------------------------------------------------------------------------------------
    TILE_DEVICE void mask(int first_token) {
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
    // Zeroes the values of tokens outside the span: memory there may hold anything, and 0 · NaN is NaN.
    TILE_DEVICE void clear_outside(int first_token, Span span) const {
        if (first_token >= span.begin && first_token + kKeys <= span.end) return;
        for (int n = ptx::just_in_time(threadIdx.x) % 128; n < kKeys * 8 * kValuePanels; n += 128) {
            const int row = n / 8 % kKeys, token = first_token + row;
            if (token < span.begin || token >= span.end)
                Shared<Vector16>(now.at(n / 8 / kKeys) + row * kPanelRowBytes)[n % 8] = Vector16{};
        }
    }
    // References move up to the largest scores of the block, and what O and l are to be multiplied with is left beside
    // them.
    TILE_DEVICE void move_references() {
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
            sCorrection()[(block & 1) * kRows + row] = ptx::exp2(old - (max == -INFINITY ? 0.0f : max));
            references[row] = max;
        }
        group_sync();
    }
    // P in place of S. True if a reference no longer serves one of this thread's rows.
    TILE_DEVICE bool exponentiate() {
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
    TILE_DEVICE void compute_scores() {
        float acc[kChains][kRows / 2];
        issue_scores(acc);
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < kChains; n++) ptx::settle(acc[n]);
#pragma unroll
        for (int i = 0; i < kRows / 2; i++) acc_s[i] = kChains == 2 ? acc[0][i] + acc[kChains - 1][i] : acc[0][i];
        if constexpr (!Rule::kLinear) Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores));
        if constexpr (kChosen)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (!sThere(block)[key(h)])
#pragma unroll
                    for (int j = 0; j < kRows / 4; j++) acc_s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
    }
    // The weights P of a block, from its scores to shared memory. fresh: no row has a reference yet
    TILE_DEVICE void weigh(int first_token, Span span, bool fresh) {
        bool moves = ptx::any(fresh);
        if (ptx::any(first_token < whole_from || first_token + kKeys > whole_to)) {
            moves = true;
            mask(first_token);
        }
        if (!moves) {
            moves = ptx::any(group_count(exponentiate()) > 0);
            if (moves) compute_scores();  // for they have become weights of no use
        }
        if (moves) {
            move_references();
            exponentiate();
            scale_sums(block);
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
                ptx::shared_address(now.at(kWeights) + row * kPanelRowBytes + (chunk ^ row % 8) * 16), four);
        }
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++)
            sum[j / 2][j % 2] += acc_s[j / 2 * 4 + j % 2] + acc_s[j / 2 * 4 + 2 + j % 2];
        if constexpr (!kGather) clear_outside(first_token, span);
        if (threadIdx.x % 128 == 0) sMoved()[block & 1] = moves;
        ptx::fence_async_proxy();
        ptx::mbarrier_arrive(ready_barrier(block));
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // Adds the blocks to O, m and l
    TILE_DEVICE void add_blocks(int begin, int end, Span span) {
#pragma unroll
        for (int m = 0; m < kMine; m++) warp::zero(acc_o[m]);
#pragma unroll
        for (int j = 0; j < 2 * kEights; j++) sum[j / 2][j % 2] = 0.0f;
#pragma unroll 1
        for (int n = begin; n < end; n++, now.next(), block++) {
            const bool mine = ptx::any((block & 1) == group);
            if (mine) {
                compute_scores();
                weigh(n * kKeys, span, n == begin);
            }
            await_weights(now, block, mine);
            issue_values(now, n == begin);
            finish_values(now);
        }
    }
    // Until a block's weights are there, and O is what they can be added to. mine: this warpgroup has computed them
    TILE_DEVICE void await_weights(const Places& of, uint32_t number, bool mine) {
        ptx::mbarrier_wait(ready_barrier(number), number >> 1 & 1);
        release_others(of);
        if (ptx::any(sMoved()[number & 1] != 0)) {
            if (!mine) scale_sums(number);
            scale_output(kAtCorrection + (number & 1) * 4 * kRows);
        }
    }
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
    // Where this thread keeps four values of O while the next piece is computed: beside those of its neighbours
    TILE_DEVICE Global<Vector16> fold_place(int n) const {
        const int64_t at = (int64_t(blockIdx.x) * (kMine * kRows / 8) + n) * kComputing + threadIdx.x;
        return Global<float>{mla.folds + 4 * at}.template as<Vector16>();
    }
    // The state of a piece is folded into that of the pieces before it, as merging does. last: nothing follows
    TILE_DEVICE void end_piece(bool first, bool last) {
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
            const Shared<float> sums = sSums(), reference = sReference(), factors = sFactors(), folded = sFolded();
            float each[2];
#pragma unroll
            for (int g = 0; g < 2; g++) {
                each[g] = sums[4 * g * kRows + row];
#pragma unroll
                for (int w = 1; w < 4; w++) each[g] += sums[(4 * g + w) * kRows + row];
            }
            float all = each[0] + each[1], max = all == 0.0f ? kLowest : float(reference[row]);
            reference[row] = -INFINITY;
            if (!first) {
                const Fold fold = fold_of(folded[2 * row], max);
                factors[2 * row] = fold.before;
                factors[2 * row + 1] = fold.after;
                all = fold.join(folded[2 * row + 1], all);
                max = fold.max;
            }
            folded[2 * row] = max;
            folded[2 * row + 1] = all;
        }
        all_sync();
        if (!first) {
#pragma unroll
            for (int n = 0; n < kMine * kEights; n++) {
                const Vector16 old = fold_place(n)[0];
                const Shared<float> factors(kAtFactors + 8 * (8 * (n % kEights) + column()));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = acc_o[n / kEights][n % kEights * 4 + i];
                    const Fold fold{0.0f, factors[2 * (i % 2)], factors[2 * (i % 2) + 1]};
                    x = fold.join(as_float(old.word[i]), x);
                }
            }
        }
        if (!last)
#pragma unroll
            for (int n = 0; n < kMine * kEights; n++) {
                const float* x = &acc_o[n / kEights][n % kEights * 4];
                fold_place(n)[0] = Vector16{{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}};
            }
    }
    // The result of the item's rows, or their states
    TILE_DEVICE void store(int slot) const {
        const DecodeItem item = table.item();
        // Not where end_piece has its factors, which other threads may still read
        const Shared<float> factors = sSums(), folded = sFolded();
        const int n = threadIdx.x;
        if (n < item.rows) {
            const int64_t target = Target(table.target()[n]).at;
            const float max = folded[2 * n], all = folded[2 * n + 1];
            factors[n] = 1.0f;
            if (target >= 0 && target % 2) {
                put_ml(args, target / (2 * kValueDim), max, all);
            } else if (target >= 0) {
                const DecodeRow row = row_of(args, item, n);
                const RowEnd end = end_row(args, row.head, max, all);
                factors[n] = end.factor;
                store_lse(args, row, caller_of(args, item, row), end.lse);
            }
        }
        all_sync();
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
        // The rows of another item take the places of these.
        if constexpr (kLooksAhead) ptx::barrier_arrive(kFreeBarriers + slot % 2, kComputing + 32);
        else all_sync();
    }
    TILE_DEVICE void run() {
        for (int row = threadIdx.x; row < kRows; row += kComputing) sReference()[row] = -INFINITY;
        for (int slot = 0; slot < args.slots; slot++) {
            if (!begin(slot)) break;  // no item follows an empty one
            const Span span = table.span(), blocks = blocks_of(span);
            // Pieces are counted from the range's first block, even if a window hides it.
            int at = ptx::uniform(blocks.begin);
            const int end = ptx::uniform(blocks.end), fold = ptx::uniform(table.words()[kStateFoldWord] & 0xffff);
            int piece_end = fold > 0 ? at + fold - (at - table.words()[kStartWord] / kKeys) % fold : end;
            bool first = true;
#pragma unroll 1
            while (true) {
                const int stop = ptx::uniform(piece_end < end ? piece_end : end);
                add_blocks(at, stop, span);
                end_piece(first, stop == end);
                if (stop == end) break;
                first = false;
                at = stop;
                piece_end += fold;
            }
            store(slot);
        }
    }
};
