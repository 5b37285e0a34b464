// The tile body, for nodes of the prefix tree that many rows share: two warpgroups with 64 rows each, over tiles of 64
// tokens that a producer warp brings by TMA. Tiles have 32 tokens for head dimensions above 128, and there is one
// warpgroup where V's is above it. The body runs beside the streaming warps of the same blocks: those wait for memory
// most of the time, this body for the tensor cores.
//
// A warpgroup holds Q in registers, as A operands, or in shared memory what they have no room for. S = Q Kᵀ of a tile
// runs together with O += P V of the tile before, and the softmax runs under the latter. The rows may belong to any
// sequences below the node; at the end of the node, and under a window, tiles are masked row by row.
#pragma once
#include "decode/tile_load.cuh"
#include "decode/tile_queries.cuh"
#include "tile/lazy.cuh"

// Registers per thread, in steps of eight: streaming warps have what tiles and loads leave of a block's 64 K.
constexpr bool kTileWide = kTileGroups == 1;  // head dimensions whose O fills the registers of one warpgroup
constexpr int kTileBlock = kTileThreads + 256, kStartRegisters = 65536 / kTileBlock / 8 * 8;
constexpr int kTileRegisters = kTileWide        ? 232
                               : !kScaled       ? 176
                               : kHeadDim <= 64 ? 152
                               : kZeros         ? 160
                                                : 168;
constexpr int kLoadRegisters = kScaled && !kZeros ? 40 : 32;
constexpr int kStreamRegisters =
    (kTileGroups + 2) * kStartRegisters - kTileGroups * kTileRegisters - kLoadRegisters;  // 128 … 240
constexpr int kWitness = 256;      // a lane's sum up to which the lazy softmax keeps its reference: tile/lazy.cuh
constexpr int kGroupBarriers = 2;  // the first of the warpgroups' named barriers
constexpr int kJoinBarrier = kGroupBarriers + kTileGroups;

constexpr int kRegisterQ = kHeadDim / 16 - kTileSharedQ;  // sixteens of channels that stay in registers
struct TileBody {
    const DecodeArgs& args;
    const uint32_t group;  // of the two warpgroups
    const TileRing ring, values;  // the same but for quantised tiles
    Turn<kTileStages> turn;
    float scale_log2, s_factor;  // s_factor: what S is to be multiplied with because of Q's power of two
    float acc_o[kValueDim / 2], acc_s[kTile / 2];
    uint32_t rQ[kRegisterQ > 0 ? kRegisterQ : 1][4], rP[kTile / 16][4];
    warp::RowState state;
    float zero_sum[2][kGroups];  // int4: this lane's share of Σ P · zero point
    int whole_from, whole_to;  // every row of the warp sees the tokens between these

    TILE_DEVICE TileBody(const DecodeArgs& a, uint32_t g)
        : args(a), group(g), ring(tile_ring()), values(value_ring()) {
        // A positive scale keeps the order of scores and goes into the exponential's multiply-add. Q takes a negative
        // scale's sign, and is 0 for a scale of 0.
        scale_log2 = Rule::kLinear ? linear_scale() : 1.0f;
    }
    TILE_DEVICE float linear_scale() const {
        return args.scores.scale_log2 == 0.0f ? 1.0f : fabsf(args.scores.scale_log2);
    }
    // What this thread's two rows see. It is needed rarely, where registers are scarce, and so stays in shared memory.
    struct alignas(16) RowsSeen {
        Visible row[2];
    };
    static TILE_DEVICE Shared<RowsSeen> sSeen() {
        return Shared<RowsSeen>(kAtTileSeen + 16 * ptx::just_in_time(threadIdx.x));
    }
    // Where the two rows go when they are done: the number of a row in state_o, or −1 for the output
    static TILE_DEVICE Shared<int> sPlace() { return Shared<int>(kAtTilePlace + 8 * ptx::just_in_time(threadIdx.x)); }
    // Quantised: the sums of the two rows, for which registers have no room either
    static TILE_DEVICE Shared<float> sSums() { return Shared<float>(kAtTileSums + 8 * ptx::just_in_time(threadIdx.x)); }
    static TILE_DEVICE int lane() { return ptx::just_in_time(threadIdx.x) & 31; }
    static TILE_DEVICE int warp_rank() { return ptx::just_in_time(threadIdx.x) >> 5 & 3; }  // in the warpgroup
    static TILE_DEVICE int column() { return (ptx::just_in_time(threadIdx.x) & 3) * 2; }    // the first of eight
    static TILE_DEVICE int row(int h) { return warp_rank() * 16 + lane() / 4 + 8 * h; }

    // This warpgroup's rows of an item, as an item of its own; rows = 0 if it has none
    TILE_DEVICE DecodeItem share_of(DecodeItem item) const {
        const int rows = item.rows - 64 * int(group);
        item.rows = rows < 0 ? 0 : rows < 64 ? rows : 64;
        item.row += 64 * int(group);
        const int ahead = args.rows_each.quotient(item.row);
        item.sequence += ahead;
        item.row -= ahead * int(args.rows_each.divisor);
        return item;
    }

    // Loads Q, finds what the rows see of the span, and clears the state
    TILE_DEVICE void begin(const DecodeItem& item, Span span) {
        int from = span.begin, to = span.end;
        RowsSeen seen;
        uint32_t all[kHeadDim / 16][4];  // Q
        uint64_t q_at[2];                // quantised: where it lies
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool exists = row(h) < item.rows;
            const DecodeRow at = row_of(args, item, exists ? row(h) : 0);
            // Looked up now, together with the rest: beside streaming warps each lookup takes microseconds.
            const States states = states_of(args, at.sequence);
            sPlace()[h] = states.count == 1 ? -1 : int(state_row(args, states, item.kv_head(), item.state(), at.row));
            seen.row[h] = {span.begin, span.end - span.begin};
            if (exists && !(item.is(kAllSee) && sees_back_to_first(args))) {
                const Visible keys = seen_by(args, at, Global<const int>{args.lengths}[at.sequence], span);
                seen.row[h] = keys;
                from = keys.first > from ? keys.first : from;
                to = keys.first + keys.count < to ? keys.first + keys.count : to;
            }
            const int64_t caller = Global<const int>{args.order}[at.sequence];
            const Element* q = static_cast<const Element*>(args.q) + caller * args.q_strides.batch +
                               at.token * args.q_strides.row + at.head * args.q_strides.head;
            const bool zero = !exists || (Rule::kLinear && args.scores.scale_log2 == 0.0f);
            if constexpr (kScaled) {
                q_at[h] = zero ? 0 : reinterpret_cast<uint64_t>(q);
                continue;
            }
            const Global<const uint32_t> gQ = Global<const Element>{q}.template as<const uint32_t>();
            const int column = lane() % 4;
            const uint32_t sign = Rule::kLinear && args.scores.scale_log2 < 0.0f ? 0x80008000u : 0u;
#pragma unroll
            for (int i = 0; i < kHeadDim / 8; i++)
                all[i / 2][i % 2 * 2 + h] = zero ? 0u : uint32_t(gQ[4 * i + column]) ^ sign;
        }
        if constexpr (kScaled) bring_q(q_at);
        else put_q(all);
        sSeen()[0] = seen;
        // Over all rows of the warp. The four lanes of a row agree, and each lane has two rows already.
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
            const int other_from = ptx::shuffle_xor(from, mask), other_to = ptx::shuffle_xor(to, mask);
            from = other_from > from ? other_from : from;
            to = other_to < to ? other_to : to;
        }
        whole_from = ptx::uniform(from);
        whole_to = ptx::uniform(to);
        warp::zero(acc_o);
        state = warp::RowState();
        if constexpr (kScaled) sSums()[0] = sSums()[1] = 0.0f;
    }
    // Where the c-th 16 bytes stand of a row of this warpgroup's Q, of those channels that are in shared memory
    TILE_DEVICE uint32_t query_place(int row, int c) const {
        const int panel = (kTileGroups > 1 ? int(group) : 0) * kTileQPanels + c / 8;
        return kAtTileQ + (panel * 64 + row) * kPanelRowBytes + (c % 8 ^ row % 8) * 16;
    }
    TILE_DEVICE void put_q(const uint32_t (&all)[kHeadDim / 16][4]) {
#pragma unroll
        for (int i = 0; i < 4 * kRegisterQ; i++) rQ[i / 4][i % 4] = all[i / 4][i % 4];
        if constexpr (kTileSharedQ > 0) {
            ptx::barrier_sync(kGroupBarriers + group, 128);  // nobody multiplies the last item's any more
#pragma unroll
            for (int i = 0; i < 4 * kTileSharedQ; i++) {
                const int c = i / 4 * 2 + i % 4 / 2, h = i % 2;
                Shared<uint32_t>(query_place(row(h), c))[lane() % 4] = all[kRegisterQ + i / 4][i % 4];
            }
            ptx::fence_async_proxy();
            ptx::barrier_sync(kGroupBarriers + group, 128);
        }
    }
    // Q as halves: a power of two brings the warp's largest value to about 2^14, and S is multiplied with its inverse.
    // A value that then falls below a half's smallest number is below 2^−38 of the largest: what is lost of any logit
    // is as small beside the warp's largest logits.
    TILE_DEVICE void bring_q(const uint64_t (&from)[2]) {
        TileQueries q(from);
        const float to_half = power_above(q.largest(), 14), back = inverse_power(to_half);
        s_factor = as_float(ptx::uniform(as_bits(back)));
        scale_log2 = Rule::kLinear ? as_float(ptx::uniform(as_bits(back * linear_scale()))) : 1.0f;
        const bool negative = Rule::kLinear && args.scores.scale_log2 < 0.0f;
        ptx::barrier_sync(kGroupBarriers + group, 128);  // nobody multiplies the last item's, or reads their sums
        q.make_halves(negative ? -to_half : to_half);
        const auto place = [&](int row, int c) { return query_place(16 * warp_rank() + row, c); };
        if constexpr (kRegisterQ > 0) {  // the channels for registers pass through the place of the others
            q.template store<0, 2 * kRegisterQ>(place);
            ptx::sync_warp();
#pragma unroll
            for (int i = 0; i < kRegisterQ; i++)
                ptx::ldmatrix(rQ[i], ptx::shared_address(place(lane() % 16, 2 * i + lane() / 16)));
            ptx::sync_warp();
        }
        q.template store<2 * kRegisterQ, kHeadDim / 8>(place);
        ptx::fence_async_proxy();
        ptx::barrier_sync(kGroupBarriers + group, 128);
        if constexpr (kZeros)
#pragma unroll
            for (int g = 0; g < kGroups; g++) zero_sum[0][g] = zero_sum[1][g] = 0.0f;
    }
    // The same rows go on over a span of the next node, all of which they see
    TILE_DEVICE void go_on(Span span) {
        const Visible all{span.begin, span.end - span.begin};
        sSeen()[0] = RowsSeen{{all, all}};
        whole_from = ptx::uniform(span.begin);
        whole_to = ptx::uniform(span.end);
    }

    TILE_DEVICE void issue_qk() {
        ring.wait(turn);
        ptx::wgmma_fence();
        const uint64_t k = further(k_major(ptx::shared_address(0u), KeyTile::kEight), tile_keys(turn.stage));
        // Made anew in each step: descriptors that are kept would be kept in ordinary registers, all of them.
        const uint64_t q = kTileSharedQ > 0 ? k_major(ptx::uniform(ptx::shared_address(query_place(0, 0)))) : 0;
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; step++) {
            const uint64_t of_k = further(k, step / 4 * kTilePanelStep + step % 4 * 32);
            const int n = step - kRegisterQ;  // of Q in shared memory
            if (n < 0)
                ptx::Wgmma<Operand, kTile>::template rs<false>(acc_s, rQ[n < 0 ? step : 0], of_k, step > 0);
            else
                ptx::Wgmma<Operand, kTile>::template ss<false, false>(
                    acc_s, further(q, n / 4 * 64 * kPanelRowBytes + n % 4 * 32), of_k, step > 0);
        }
        ptx::wgmma_commit();
    }
    TILE_DEVICE void issue_pv(Turn<kTileStages> of) {
        if constexpr (kScaled) values.wait(of);
        ptx::wgmma_fence();
        const uint64_t v = descriptor(ptx::shared_address(0u), kTilePanelStep, ValueTile::kEight);
        warpgroup::mma_pv<Operand, kTile, kValueDim, ValueTile::kEight>(acc_o, rP, further(v, tile_values(of.stage)));
        ptx::wgmma_commit();
    }
    // Zeroes the rows of V outside the span: memory there may hold anything, and 0 · NaN is NaN. Both warpgroups write
    // the same zeros, and each waits for its own only.
    TILE_DEVICE void clear_outside(uint32_t stage, int first_token, Span span) const {
        if (kScaled) return;  // widened as zeros
        if (first_token >= span.begin && first_token + kTile <= span.end) return;
        for (int n = threadIdx.x % 128; n < kTile * ValueTile::kUnits; n += 128) {
            const int row = n % kTile, token = first_token + row;
            if (token < span.begin || token >= span.end)
                Shared<Vector16>(ValueTile::place(tile_values(stage), row, n / kTile))[0] = Vector16{};
        }
        ptx::fence_async_proxy();
        ptx::barrier_sync(kGroupBarriers + group, 128);
    }

    // The item is read again where it is needed: kept, it would take registers from the products.
    TILE_DEVICE DecodeItem whole_item(int round) const { return tile_item(args, ptx::just_in_time(round)); }

    // S = −inf where a row does not see the token
    TILE_DEVICE void mask(int first_token) {
        const RowsSeen seen = sSeen()[0];
#pragma unroll
        for (int h = 0; h < 2; h++) warp::mask_row(acc_s, h, first_token, seen.row[h], column());
    }

    TILE_DEVICE void score() {
        if constexpr (kScaled) {
            quantised::scale_scores(acc_s, TileFactors(turn.stage), column());
            if constexpr (!Rule::kLinear) Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores) * s_factor);
        } else if constexpr (!Rule::kLinear) {
            Rule::apply(acc_s, args.scores, Rule::first_factor(args.scores));
        }
    }
    // S once more, by mma.sync and for this warp alone, from the keys that are still in shared memory. It runs rarely:
    // the barriers keep loads where they stand, so that they take no registers from the steps that always run.
    TILE_DEVICE void again() {
        warp::zero(acc_s);
#pragma unroll
        for (int n = 0; n < kHeadDim / 32 * (kTile / 8); n++) {
            const int pair = n / (kTile / 8), eight = n % (kTile / 8);  // two steps of depth; eight tokens
            uint32_t f[4];
            const int token = 8 * eight + lane() % 8, c = 4 * pair + lane() / 8;
            ptx::ldmatrix(f, ptx::shared_address(KeyTile::place(tile_keys(turn.stage), token, c)));
            float(&s)[4] = reinterpret_cast<float(&)[4]>(acc_s[4 * eight]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int step = 2 * pair + i;
                if (step < kRegisterQ) {
                    ptx::mma_16x8x16<Operand>(s, rQ[step < kRegisterQ ? step : 0], f[2 * i], f[2 * i + 1]);
                } else {
                    uint32_t a[4];
                    ptx::ldmatrix(a, ptx::shared_address(query_place(16 * warp_rank() + lane() % 16,
                                                                     2 * (step - kRegisterQ) + lane() / 16)));
                    ptx::mma_16x8x16<Operand>(s, a, f[2 * i], f[2 * i + 1]);
                }
            }
            if constexpr (kTileSharedQ > 0) ptx::sync_warp();
        }
        score();
    }
    // Decided by a vote: after a branch that lanes might take differently, descriptors would be in ordinary registers.
    TILE_DEVICE bool seen_whole(int first_token) const {
        return !ptx::any(first_token < whole_from || first_token + kTile > whole_to);
    }
    // P in place of S; correction: what O is to be multiplied with
    TILE_DEVICE void softmax(int first_token, float (&correction)[2]) {
        score();
        if (!seen_whole(first_token)) mask(first_token);
        if constexpr (kScaled) careful_softmax(correction);
        else warp::online_softmax(acc_s, correction, state, scale_log2);
    }
    // The same, and true if O is to be multiplied. Where every row of the warp sees the whole tile, the softmax is lazy
    // and looks for no maximum: tile/lazy.cuh.
    TILE_DEVICE bool next_softmax(int first_token, float (&correction)[2]) {
        if constexpr (kScaled) return next_quantised(first_token, correction);
        if (!seen_whole(first_token)) {
            softmax(first_token, correction);
            return true;
        }
        score();
        float sum[2];
        const bool moves = warp::lazy_softmax<kWitness>(acc_s, sum, state, scale_log2);
        if (moves) warp::raise<0>(acc_s, sum, correction, state, scale_log2, [&](float(&)[kTile / 2]) { again(); });
        else warp::add_sums(state, sum);
        return moves;
    }

    // ---- quantised tiles: tile_factors.cuh --------------------------------------------------------------------------
    TILE_DEVICE void careful_softmax(float (&correction)[2]) {
        float sum[2];
        quantised::careful_softmax(acc_s, correction, sum, state, TileFactors(turn.stage), scale_log2, column());
#pragma unroll
        for (int h = 0; h < 2; h++) sSums()[h] = sSums()[h] * correction[h] + sum[h];
        if constexpr (kZeros)
#pragma unroll
            for (int i = 0; i < 2 * kGroups; i++) zero_sum[i / kGroups][i % kGroups] *= correction[i / kGroups];
    }
    TILE_DEVICE bool next_quantised(int first_token, float (&correction)[2]) {
        score();
        if (seen_whole(first_token)) {
            float sum[2];
            if (quantised::quick_softmax(acc_s, sum, state, TileFactors(turn.stage), scale_log2)) {
#pragma unroll
                for (int h = 0; h < 2; h++) sSums()[h] += sum[h];
                return false;
            }
            again();
        } else {
            mask(first_token);
        }
        careful_softmax(correction);
        return true;
    }
    // P as it enters the second product. Then nobody needs the tile's keys any more.
    TILE_DEVICE void weigh() {
        if constexpr (kScaled) {
            quantised::weigh(acc_s, TileFactors(turn.stage), zero_sum, column());
            ptx::sync_warp();
            ring.release({uint32_t(ptx::just_in_time(turn.stage)), 0});
        }
    }

    // Adds the tokens of a span to O, m and l
    TILE_DEVICE void add_span(Span span, int round) {
        // Uniform: otherwise descriptors in the loop would be made in ordinary registers, and each product would wait
        // for its own.
        const int begin_tile = ptx::uniform(span.begin / kTile);
        const int end_tile = ptx::uniform(span.end > span.begin ? (span.end + kTile - 1) / kTile : begin_tile);
        if (begin_tile == end_tile) return;
        float correction[2];
        issue_qk();
        ptx::wgmma_wait<0>();
        softmax(begin_tile * kTile, correction);
        warp::scale_rows(acc_o, correction);  // O of the nodes above, if any
        weigh();
        warp::to_operand<Operand>(rP, acc_s);
        clear_outside(turn.stage, begin_tile * kTile, span);
#pragma unroll 1
        for (int tile = begin_tile + 1; tile < end_tile; tile++) {
            const Turn<kTileStages> before = turn;
            turn.next();
            turn.stage = ptx::uniform(turn.stage);  // after raise() the compiler cannot tell that it is
            issue_qk();
            issue_pv(before);
            ptx::wgmma_wait<1>();
            const bool moved = next_softmax(tile * kTile, correction);
            weigh();
            ptx::wgmma_wait<0>();
            values.release(before);
            if (moved) warp::scale_rows(acc_o, correction);
            warp::to_operand<Operand>(rP, acc_s);
        }
        const DecodeItem same = whole_item(round);
        clear_outside(turn.stage, (end_tile - 1) * kTile, {same.start, same.stop});
        issue_pv(turn);
        ptx::wgmma_wait<0>();
        values.release(turn);
        turn.next();
    }
    // Passes tiles of which only the other warpgroup has rows
    TILE_DEVICE void pass_by(Span span) {
        for (int at = span.begin / kTile * kTile; at < span.end && span.end > span.begin; at += kTile, turn.next()) {
            ring.wait(turn);
            if constexpr (kScaled) values.wait(turn);
            ptx::sync_warp();
            ring.release(turn);
            if constexpr (kScaled) values.release(turn);
        }
    }
    TILE_DEVICE void run() {
        for (int round = 0; round < args.tile_rounds; round++) {
            const DecodeItem item = share_of(tile_item(args, round));
            Span span{item.start, item.stop};
            if (ptx::uniform(item.rows) == 0) {
                if (span.end == 0) break;  // an empty slot, which no item follows
                pass_by(span);
                continue;
            }
            begin(item, span);
#pragma unroll 1
            while (true) {
                add_span(span, round);
                if (!whole_item(round).is(kGoesOn)) break;
                const DecodeItem next = whole_item(++round);
                span = {next.start, next.stop};
                go_on(span);
            }
            store(share_of(whole_item(round)));
        }
    }

    // References may stand far from the largest score: here the sum of a row comes to between 1 and 2.
    TILE_DEVICE void end_quantised(int h, float& max, float& sum) {
        const float down = power_above(sum, 1);
        if (sum != 0.0f) max -= log2_of_power(down);
        sum *= down;
        float zero[kGroups] = {};
        if constexpr (kZeros)
#pragma unroll
            for (int g = 0; g < kGroups; g++) zero[g] = warp::row_sum(zero_sum[h][g]) * down;
#pragma unroll
        for (int i = 0; i < kValueDim / 4; i++) {
            float& x = acc_o[4 * (i / 2) + 2 * h + i % 2];
            x = x * down + zero[kZeros ? i / 2 * 8 / kGroupSize : 0];
        }
    }
    TILE_DEVICE void store(const DecodeItem& item) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = state.sum[h];
            if constexpr (kScaled) sum = sSums()[h];
            sum = warp::row_sum(sum);
            float max = sum == 0.0f ? kLowest : state.max[h];
            if constexpr (kScaled) end_quantised(h, max, sum);
            if (row(h) >= item.rows) continue;
            const DecodeRow at = row_of(args, item, row(h));
            const int column = lane() % 4;
            const int64_t to = sPlace()[h];
            if (to < 0) {
                const RowEnd end = end_row(args, at.head, max, sum);
                const int64_t caller = Global<const int>{args.order}[at.sequence];
                const Global<uint32_t> gO = output_row(args, at, caller).template as<uint32_t>();
#pragma unroll
                for (int n = 0; n < kValueDim / 8; n++)
                    gO[4 * n + column] =
                        pack<Element>(acc_o[4 * n + 2 * h] * end.factor, acc_o[4 * n + 2 * h + 1] * end.factor);
                if (column == 0) store_lse(args, at, caller, end.lse);
            } else {
                const Global<Vector8> gO = Global<float>{args.state_o + to * kValueDim}.template as<Vector8>();
#pragma unroll
                for (int n = 0; n < kValueDim / 8; n++)
                    gO[4 * n + column] = Vector8{{as_bits(acc_o[4 * n + 2 * h]), as_bits(acc_o[4 * n + 2 * h + 1])}};
                if (column == 0) put_ml(args, to, max, sum);
            }
        }
    }
};
