// The body for up to 32 query rows by mma.sync, which multiplies sixteen rows where wgmma takes 64. All eight warps
// compute every block of keys, as warps.cuh has it: S by the fragments of Q, which stay in registers, and O += P V over
// columns of their own. What each warp does, block after block:
//
//   P of n, to shared memory | S of n + 1 | O += P V of n, as soon as all warps have left their P
//
// so that nobody waits for the slowest warp before it has products of its own to do.
//
// kRaw: codes are never widened in shared memory. ldmatrix brings them as they are. As keys they become halves, which
// hold all of them, against a Q of halves that is scaled by a power of two per row; the scales of a key's groups of
// channels join their sums. As values they become bfloat16, and the scales join the weights: a tile of P per group.
#pragma once
#include "mla/load.cuh"
#include "mla/warps.cuh"
#include "tile/powers.cuh"
#include "tile/ptx_halves.cuh"

struct Narrow : Warps {
    using Panel = SharedTile<Element, kKeys, kPanel, Layout::swizzled>;
    using QueryPanel = SharedTile<Element, kRows, kPanel, Layout::swizzled>;
    static constexpr int kSteps = kQueryDim / 16, kCodedSteps = kRaw ? kValueDim / 16 : 0;
    // Steps of Q in registers: all of them beside O of sixteen rows, else as many as there is room for
    static constexpr int kHeld = kRaw ? kCodedSteps : kRows == 16 || kSteps < 16 ? kSteps : kWidens ? 8 : 16;
    uint32_t rQ[kHeld][4];
    float back[2];  // kRaw: what sums over codes of this lane's rows are multiplied with
    Places now;     // of block `number`

    using Warps::Warps;

    // ---- an item ----------------------------------------------------------------------------------------------------
    TILE_DEVICE bool begin(int slot) {
        if (!Walk::begin(slot)) return false;
        const Span span = table.span();
        if (span.end <= span.begin) return true;
        if constexpr (kRaw) make_halves();
#pragma unroll
        for (int step = 0; step < kHeld; step++) load_query(rQ[step], step);
        return true;
    }
    TILE_DEVICE void load_query(uint32_t (&a)[4], int step) const {
        warp::load_a(a, QueryPanel(kAtQ + step / 4 * QueryPanel::kBytes), row0(), step % 4);
    }
    // The channels of codes in Q become halves, in the order in which ldmatrix gives a lane codes: of sixteen channels
    // it has 4t … 4t + 3, where the products want 2t, 2t + 1, 8 + 2t, 8 + 2t + 1. Half a warp has a row.
    TILE_DEVICE void make_halves() {
        constexpr int kEach = kRaw ? kCodedSteps / 16 : 1;  // times sixteen channels of a lane
        const int lane = ptx::just_in_time(warp::lane()), row = 2 * warp_rank + lane / 16;
        const auto chunk = [&](int n, int half) -> decltype(auto) {
            const int step = lane % 16 + 16 * n;
            return QueryPanel(kAtQ + step / 4 * QueryPanel::kBytes).chunk(row, step % 4 * 2 + half);
        };
        Vector16 x[kEach][2];
        float top = 0.0f;
#pragma unroll
        for (int n = 0; n < 8 * kEach; n++) {
            if (n % 4 == 0) x[n / 8][n / 4 % 2] = chunk(n / 8, n / 4 % 2);
            const uint32_t two = x[n / 8][n / 4 % 2].word[n % 4];
            top = fmaxf(top, fmaxf(fabsf(unpack<Element>(two, 0)), fabsf(unpack<Element>(two, 1))));
        }
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2) top = fmaxf(top, ptx::shuffle_xor(top, lanes));
        const float to_half = power_above(top, 14);
#pragma unroll
        for (int n = 0; n < 2 * kEach; n++) {
            Vector16 made;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t two = x[n / 2][i / 2].word[i % 2 * 2 + n % 2];
                made.word[i] = pack<half>(unpack<Element>(two, 0) * to_half, unpack<Element>(two, 1) * to_half);
            }
            chunk(n / 2, n % 2) = made;
        }
        if (lane % 16 == 0) sReference()[row] = inverse_power(to_half);
        all_sync();  // Q is halves
#pragma unroll
        for (int h = 0; h < 2; h++) back[h] = sReference()[Warps::row(h)];
    }

    // ---- products ---------------------------------------------------------------------------------------------------
    // S = Q Kᵀ over a block, place by place of the ring as they come: operands of the next are asked for before those
    // of this one are multiplied. A product waits for the one before it that adds to the same sums, so these are
    // several.
    static constexpr int kChains = kMyKeys == 8 ? 4 : 2, kPairs = kRaw ? kCodedPairs : 0;
    using Keys = uint32_t[kMyKeys / 4][4];  // of 128 bytes of this warp's keys
    TILE_DEVICE void load_keys(Keys& b, const Places& of, int place) const {
        of.wait(place);
        const Panel sK(of.at(place));
#pragma unroll
        for (int n = 0; n < kMyKeys / 4; n++)
            if constexpr (kMyKeys == 8)
                ptx::ldmatrix(b[n],
                              Panel::along(sK.address(key_group() * 8 + warp::lane() % 8, warp::lane() / 8), 4 * n));
            else warp::load_bt(b[n], sK, key_group(), n);
    }
    TILE_DEVICE void compute_scores(Scores& acc_s, const Places& of, uint32_t block) const {
        float acc[kChains][kMyKeys / 2];
        Keys b[2];
        warp::zero(acc_s);
        load_keys(b[0], of, 0);
        if constexpr (kRaw && !kGather) ptx::mbarrier_wait(scaled_barrier(block), block / kScaleBlocks & 1);
#pragma unroll
        for (int place = 0; place < kBlockPlaces; place++) {
            if (place + 1 < kBlockPlaces) load_keys(b[(place + 1) % 2], of, place + 1);
            if (place <= kPairs)
#pragma unroll
                for (int n = 0; n < kChains; n++) warp::zero(acc[n]);
            if (place < kPairs) {
                multiply_codes(acc, b[place % 2], 8 * place);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float scale = scale_of(block, i, place);
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        acc_s[2 * h + i] = ptx::mad(sum_of(acc, 2 * h + i), scale, acc_s[2 * h + i]);
                }
                if (place == kPairs - 1)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc_s[i] *= back[i / 2];
            } else {
                multiply_keys(acc, b[place % 2], 8 * kPairs + 4 * (place - kPairs));
            }
        }
        if constexpr (kBlockPlaces > kPairs)
#pragma unroll
            for (int i = 0; i < kMyKeys / 2; i++) acc_s[i] += sum_of(acc, i);
        release_others(of);
    }
    TILE_DEVICE static float sum_of(const float (&acc)[kChains][kMyKeys / 2], int i) {
        if constexpr (kChains == 4) return (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
        else return acc[0][i] + acc[1][i];
    }
    // Q of sixteen channels: from registers, or as it lies in shared memory
    TILE_DEVICE void query(uint32_t (&a)[4], int step) const {
        if (step >= kHeld) return load_query(a, step);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = rQ[step < kHeld ? step : 0][i];
    }
    // 64 channels, which begin with a step of Q
    TILE_DEVICE void multiply_keys(float (&acc)[kChains][kMyKeys / 2], const Keys& b, int first) const {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t a[4];
            query(a, first + n);
            if constexpr (kMyKeys == 8)
                ptx::mma_16x8x16<Element>(warp::four(acc[n]), a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            else warp::mma_pair<Element>(acc[n % kChains], 0, a, b[n]);
        }
    }
    // 128 channels of codes
    TILE_DEVICE void multiply_codes(float (&acc)[kChains][kMyKeys / 2], const Keys& b, int first) const {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint32_t a[4], two[2];
            query(a, first + n);
            code_halves(two, b[n / 4][n % 4]);
            ptx::mma_16x8x16<half>(warp::four(acc[n % kChains]), a, two[0], two[1]);
        }
    }
    static TILE_DEVICE void code_halves(uint32_t (&b)[2], uint32_t codes) {
        if constexpr (kFormat == Format::fp8) {
            b[0] = quant::from_fp8<false>(codes);
            b[1] = quant::from_fp8<true>(codes);
        } else {
            b[0] = quant::from_int8<0x4140>(codes ^ 0x80808080u);
            b[1] = quant::from_int8<0x4342>(codes ^ 0x80808080u);
        }
    }
    // Codes 0 and 2 of four, or kOdd: 1 and 3, as bfloat16 values, exactly, but for NaN, which becomes 480
    template <bool kOdd> static TILE_DEVICE uint32_t code_values(uint32_t x) {
        if constexpr (kFormat == Format::fp8) {
            // As in quant::from_fp8: in the fields of a bfloat16 the number comes times 2^−120.
            const uint32_t bits =
                kOdd ? (x >> 4 & 0x07f007f0u) | (x & 0x80008000u) : (x << 4 & 0x07f007f0u) | (x << 8 & 0x80008000u);
            return ptx::multiply_bf16(bits, 0x7b807b80u);
        } else {
            // Seven bits l in the mantissa of 128 + l; −128 is subtracted, or for the sign bit −256.
            const uint32_t at = kOdd ? x >> 8 : x;
            return ptx::add_bf16((at & 0x007f007fu) | 0x43004300u, (at & 0x00800080u) | 0xc300c300u);
        }
    }
    // The scale of this lane's key 2t + i in a pair of panels
    TILE_DEVICE float scale_of(uint32_t block, int i, int pair) const {
        return Shared<float>(scales_at(block, key_group() * kMyKeys + warp::fragment_column() + i))[pair];
    }
    // O += P V. Operands are asked for kFurther products ahead. Who has multiplied with a panel lets go of it.
    TILE_DEVICE void multiply() {
        constexpr int kEach = kMyColumns / (kRaw ? 32 : 16), kAll = kKeys / 16 * kEach, kFurther = kRaw ? 2 : 3;
        const uint32_t sixteen = warp_rank * (kMyColumns / 16);  // the first of this warp's columns
        const Weights sP(weights_at(kRaw ? sixteen / 8 : 0));
        uint32_t b[kFurther + 1][4], rP[2][kRowGroups][4];
        const auto load = [&](int at) {
            const uint32_t n = kRaw ? sixteen / 2 + at % kEach : sixteen + at % kEach;
            warp::load_b(b[at % (kFurther + 1)], Panel(now.at(n / 4)), n % 4, at / kEach);
        };
        const auto load_weights = [&](int step) {
#pragma unroll
            for (int m = 0; m < kRowGroups; m++) warp::load_a(rP[step % 2][m], sP, 16 * m, step);
        };
        load_weights(0);
#pragma unroll
        for (int at = 0; at < kFurther; at++) load(at);
#pragma unroll
        for (int at = 0; at < kAll; at++) {
            const int step = at / kEach, n = at % kEach;
            if (n == 0 && step + 1 < kKeys / 16) load_weights(step + 1);
            if (at + kFurther < kAll) load(at + kFurther);
            const uint32_t(&of)[4] = b[at % (kFurther + 1)];
            if constexpr (kRaw)
#pragma unroll
                for (int i = 0; i < 2; i++) {  // sixteen columns: those of even number, and the others
                    float* to = &acc_o[0][16 * n + 8 * i];
                    ptx::mma_16x8x16<Element>(warp::four(to), rP[step % 2][0], code_values<false>(of[2 * i]),
                                              code_values<false>(of[2 * i + 1]));
                    ptx::mma_16x8x16<Element>(warp::four(to + 4), rP[step % 2][0], code_values<true>(of[2 * i]),
                                              code_values<true>(of[2 * i + 1]));
                }
            else
#pragma unroll
                for (int m = 0; m < kRowGroups; m++) warp::mma_pair<Element>(acc_o[m], n, rP[step % 2][m], of);
        }
        ptx::sync_warp();  // V has been read
        if (ptx::elect_one())
#pragma unroll
            for (int place = 0; place < kBlockPlaces; place++)
                if (multiplies(place)) now.let_go(place);
    }
    // Does this warp need what is in a place for O?
    TILE_DEVICE bool multiplies(int place) const {
        constexpr int kColumns = kRaw ? 2 * kPanel : kPanel;
        const uint32_t first = warp_rank * kMyColumns, last = first + kMyColumns - 1;
        return uint32_t(place) >= first / kColumns && uint32_t(place) <= last / kColumns;
    }
    TILE_DEVICE void release_others(const Places& of) const {
        ptx::sync_warp();  // K has been read
        if (!ptx::elect_one()) return;
#pragma unroll
        for (int place = 0; place < kBlockPlaces; place++)
            if (!multiplies(place)) of.let_go(place);
    }

    // ---- weights ----------------------------------------------------------------------------------------------------
    // Where P of block `number` lies; of codes, that of a group of channels
    TILE_DEVICE int weights_at(int group) const {
        return kAtWeights + (number & 1) * kWeightBytes + group * Weights::kBytes;
    }
    // Per warp: does a row need another reference in block `number`?
    TILE_DEVICE Shared<uint8_t> sOver() const { return Shared<uint8_t>(kAtMoved + 8 * (number & 1)); }
    TILE_DEVICE void put(int h, int n, const float (&p)[2]) const {
        if constexpr (kRaw) {
            Vector16 scales[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                scales[i] = Shared<Vector16>(scales_at(number, key_group() * kMyKeys + warp::fragment_column() + i))[0];
#pragma unroll
            for (int group = 0; group < kCodedPairs; group++) {
                float x[2];
#pragma unroll
                for (int i = 0; i < 2; i++)  // where there is no key, the scale may be anything
                    x[i] = p[i] == 0.0f ? 0.0f : p[i] * as_float(scales[i].word[group]);
                put_pair(Weights(weights_at(group)), h, n, x[0], x[1]);
            }
        } else {
            put_pair(Weights(weights_at(0)), h, n, p[0], p[1]);
        }
    }
    // Zeroes the values of this warp's columns that belong to tokens outside the span: memory there may hold anything,
    // and 0 · NaN is NaN. Codes are finite, whatever they are. All warps have made their scores of the block.
    TILE_DEVICE void clear_outside(int first_token, Span span) const {
        if (first_token >= span.begin && first_token + kKeys <= span.end) return;
        constexpr int kChunks = kMyColumns / 8;
#pragma unroll 1
        for (int n = warp::lane(); n < kKeys * kChunks; n += 32) {
            const int row = n / kChunks, token = first_token + row, chunk = warp_rank * kChunks + n % kChunks;
            if (token < span.begin || token >= span.end)
                Panel(now.at(chunk / 8)).chunk(row, chunk % 8) = Vector16{};
        }
        ptx::fence_async_proxy();  // copies will follow there
        ptx::sync_warp();
    }

    // ---- a piece ----------------------------------------------------------------------------------------------------
    // O, m and l of the blocks
    TILE_DEVICE void add_blocks(int begin, int end, Span span) {
        begin_piece();
        if (begin == end) return;
        Scores acc_s;
        compute_scores(acc_s, now, number);
        finish_scores(acc_s, number, begin * kKeys);
#pragma unroll 1
        for (int n = begin; n < end; n++) {
            const auto weights = [&](int h, int i, const float (&p)[2]) { put(h, i, p); };
            float sum[2];
            exponentiate(acc_s, sum, weights);
            const bool mine = ptx::any(over(acc_s, sum));
            ptx::sync_warp();  // P is there
            if (warp::lane() == 0) {
                sOver()[warp_rank] = mine;
                ptx::mbarrier_arrive(ready_barrier(number));
            }
            Places after = now;
            after.next();
            Scores next;
            if (n + 1 < end) {
                compute_scores(next, after, number + 1);
                finish_scores(next, number + 1, (n + 1) * kKeys);
            }
            ptx::mbarrier_wait(ready_barrier(number), number >> 1 & 1);
            const Vector8 found = Shared<Vector8>(kAtMoved + 8 * (number & 1))[0];
            if (ptx::any((found.word[0] | found.word[1]) != 0)) move_references(acc_s, sum, weights);
            state.sum[0] += sum[0];
            state.sum[1] += sum[1];
            if constexpr (!kGather && !kRaw) clear_outside(n * kKeys, span);
            multiply();
            now = after;
            number++;
#pragma unroll
            for (int i = 0; i < kMyKeys / 2; i++) acc_s[i] = next[i];
        }
    }
    TILE_DEVICE void run() { walk_items(*this); }
};
