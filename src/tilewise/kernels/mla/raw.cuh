// The body for up to sixteen query rows over codes, by mma.sync, which multiplies sixteen rows where wgmma takes 64.
// Codes are never widened in shared memory: ldmatrix brings them as they are, and they become halves, which hold all of
// them. All eight warps compute every block of keys, as warps.cuh has it: S by the fragments of Q, which stay in
// registers, and O += P V over columns of their own. What each warp does, block after block:
//
//   P of n, to shared memory | S of n + 1 | O += P V of n, as soon as all warps have left their P
//
// so that nobody waits for the slowest warp before it has products of its own to do.
//
// Halves need powers of two. Q is scaled by one per row, and the scales of a key's groups of channels join their sums.
// P is multiplied with a key's scale and a power of two per group, a tile of P for each, so that nothing overflows or
// vanishes; these units move as references do, if a block's scales are much larger than those before.
#pragma once
#include "mla/load.cuh"
#include "mla/warps.cuh"
#include "tile/powers.cuh"

struct Raw : Warps {
    using Panel = SharedTile<Element, kKeys, kPanel, Layout::swizzled>;
    using QueryPanel = SharedTile<Element, kRows, kPanel, Layout::swizzled>;
    static constexpr int kGroups = kRaw ? kCodedPairs : 1, kCodedSteps = kRaw ? kValueDim / 16 : 16;
    // Weights are at most 256. When units move, the largest scale becomes less than 2^kPlace in them; one of more than
    // kMost would take weights beyond 2^15, and units move again.
    static constexpr int kPlace = 4;
    static constexpr float kMost = 128.0f, kLargestUnit = 0x1p120f;
    uint32_t rQ[kCodedSteps][4];  // of channels that are codes; the others stay in shared memory
    float units[kGroups];         // what weights of a group of channels are multiplied with, besides the scale

    using Warps::Warps;

    // ---- an item ----------------------------------------------------------------------------------------------------
    TILE_DEVICE bool begin(int slot) {
        if (!Walk::begin(slot)) return false;
        const Span span = table.span();
        if (span.end <= span.begin) return true;
        make_halves();
#pragma unroll
        for (int step = 0; step < kCodedSteps; step++) load_query(rQ[step], step);
        return true;
    }
    TILE_DEVICE void load_query(uint32_t (&a)[4], int step) const {
        warp::load_a(a, QueryPanel(kAtQ + step / 4 * QueryPanel::kBytes), 0, step % 4);
    }
    // The channels of codes in Q become halves, in the order in which ldmatrix gives a lane codes: of sixteen channels
    // it has 4t … 4t + 3, where the products want 2t, 2t + 1, 8 + 2t, 8 + 2t + 1. Half a warp has a row.
    TILE_DEVICE void make_halves() {
        constexpr int kEach = kCodedSteps / 16;  // times sixteen channels of a lane
        const int lane = ptx::just_in_time(warp::lane()), its = 2 * warp_rank + lane / 16;
        const auto chunk = [&](int n, int half) -> decltype(auto) {
            const int step = lane % 16 + 16 * n;
            return QueryPanel(kAtQ + step / 4 * QueryPanel::kBytes).chunk(its, step % 4 * 2 + half);
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
        if (lane % 16 == 0) sReference()[its] = inverse_power(to_half);
        all_sync();  // Q is halves, and what sums over codes of its rows are multiplied with is there
    }

    // ---- products ---------------------------------------------------------------------------------------------------
    // S = Q Kᵀ over a block. A product waits for the one before it that adds to the same sums, so these are four: two
    // for each of two places of the ring, whose sums are multiplied with scales of their own.
    using Sums = float[2][4];
    using Keys = uint32_t[2][4];  // of 128 bytes of this warp's keys
    TILE_DEVICE void load_keys(Keys& b, const Places& of, int place) const {
        const uint32_t at = Panel(of.at(place)).address(key_group() * 8 + warp::lane() % 8, warp::lane() / 8);
#pragma unroll
        for (int n = 0; n < 2; n++) ptx::ldmatrix(b[n], Panel::along(at, 4 * n));
    }
    TILE_DEVICE void compute_scores(Scores& acc_s, uint32_t block) const {
        const Places of = Places::of(block);
        // All waits come first, or every one of them would divide the products into stretches that ptxas orders apart.
#pragma unroll
        for (int place = 0; place < kBlockPlaces; place++) of.wait(place);
        if constexpr (!kGather) wait_for_scales(block);
        float rest[4];  // the scores of channels that are no codes
        warp::zero(rest);
        if constexpr (kBlockPlaces > kGroups) add_rest(rest, of);
        warp::zero(acc_s);
#pragma unroll
        for (int place = 0; place < kGroups; place += 2) {
            Keys b[2];
            Sums acc[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                load_keys(b[j], of, place + j);
#pragma unroll
                for (int n = 0; n < 2; n++) warp::zero(acc[j][n]);
            }
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    uint32_t two[2];
                    key_halves(two, b[j][n / 4][n % 4]);
                    ptx::mma_16x8x16<half>(acc[j][n % 2], rQ[8 * (place + j) + n], two[0], two[1]);
                }
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc_s[i] = ptx::mad(acc[j][0][i] + acc[j][1][i], float(sScales(block, i % 2)[place + j]), acc_s[i]);
        }
        const int its = ptx::just_in_time(warp::lane()) / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float back = sReference()[its + 8 * h];
#pragma unroll
            for (int i = 0; i < 2; i++) acc_s[2 * h + i] = ptx::mad(acc_s[2 * h + i], back, rest[2 * h + i]);
        }
        release_others(of);
    }
    // 64 channels of 16-bit values
    TILE_DEVICE void add_rest(float (&rest)[4], const Places& of) const {
        Sums acc;
        Keys b;
        load_keys(b, of, kGroups);
#pragma unroll
        for (int n = 0; n < 2; n++) warp::zero(acc[n]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t a[4];
            load_query(a, kCodedSteps + n);
            ptx::mma_16x8x16<Element>(acc[n % 2], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) rest[i] = acc[0][i] + acc[1][i];
    }
    // Four codes of a key: 0 and 1, 2 and 3
    static TILE_DEVICE void key_halves(uint32_t (&b)[2], uint32_t codes) {
        if constexpr (kFormat == Format::fp8) {
            b[0] = quant::from_fp8<false>(codes);
            b[1] = quant::from_fp8<true>(codes);
        } else {
            const uint32_t x = codes ^ 0x80808080u;
            b[0] = quant::from_int8<0x4140>(x);
            b[1] = quant::from_int8<0x4342>(x);
        }
    }
    // Two codes of each of two keys, column after column: those of the first column, those of the second
    static TILE_DEVICE void value_halves(uint32_t (&b)[2], uint32_t codes) {
        if constexpr (kFormat == Format::fp8) {
            const uint32_t columns = ptx::permute_bytes(codes, codes, 0x3120);
            b[0] = quant::from_fp8<false>(columns);
            b[1] = quant::from_fp8<true>(columns);
        } else {
            const uint32_t x = codes ^ 0x80808080u;
            b[0] = quant::from_int8<0x4240>(x);
            b[1] = quant::from_int8<0x4341>(x);
        }
    }
    // The scales of this lane's key 2t + i
    template <class T = float> TILE_DEVICE Shared<T> sScales(uint32_t block, int i) const {
        return Shared<T>(scales_at(block, key_group() * kMyKeys + warp::fragment_column() + i));
    }
    // O += P V. Operands are asked for kFurther products ahead. Who has multiplied with a panel lets go of it.
    TILE_DEVICE void multiply() {
        const Places now = Places::of(number);
        constexpr int kEach = kRaw ? kMyColumns / 32 : 1, kAll = kKeys / 16 * kEach, kFurther = 2;
        const uint32_t first = warp_rank * kEach;  // times 32 columns
        const Weights sP(weights_at(my_group()));
        uint32_t b[kFurther + 1][4], rP[2][4];
        const auto load = [&](int at) {
            const uint32_t n = first + at % kEach;
            warp::load_b(b[at % (kFurther + 1)], Panel(now.at(n / 4)), n % 4, at / kEach);
        };
        warp::load_a(rP[0], sP, 0, 0);
#pragma unroll
        for (int at = 0; at < kFurther; at++) load(at);
#pragma unroll
        for (int at = 0; at < kAll; at++) {
            const int step = at / kEach, n = at % kEach;
            if (n == 0 && step + 1 < kKeys / 16) warp::load_a(rP[(step + 1) % 2], sP, 0, step + 1);
            if (at + kFurther < kAll) load(at + kFurther);
            const uint32_t(&of)[4] = b[at % (kFurther + 1)];
#pragma unroll
            for (int i = 0; i < 2; i++) {  // sixteen columns: those of even number, and the others
                float* to = &acc_o[0][16 * n + 8 * i];
                uint32_t low[2], high[2];  // keys 2t and 2t + 1, and eight further
                value_halves(low, of[2 * i]);
                value_halves(high, of[2 * i + 1]);
#pragma unroll
                for (int odd = 0; odd < 2; odd++)
                    ptx::mma_16x8x16<half>(warp::four(to + 4 * odd), rP[step % 2], low[odd], high[odd]);
            }
        }
        ptx::sync_warp();  // V has been read
        if (ptx::elect_one())
#pragma unroll
            for (int place = 0; place < kGroups; place++)
                if (place == my_group()) now.let_go(place);
    }
    // That of this warp's columns, and its place in a block
    TILE_DEVICE int my_group() const { return warp_rank * kMyColumns / kGroup; }
    TILE_DEVICE void release_others(const Places& of) const {
        ptx::sync_warp();  // K has been read
        if (!ptx::elect_one()) return;
#pragma unroll
        for (int place = 0; place < kBlockPlaces; place++)
            if (place != my_group()) of.let_go(place);
    }

    // ---- weights ----------------------------------------------------------------------------------------------------
    // Where P of block `number` lies for a group of channels
    TILE_DEVICE int weights_at(int group) const {
        return kAtWeights + (number & 1) * kWeightBytes + group * Weights::kBytes;
    }
    // Per warp: does a row need another reference in block `number`, or a group another unit?
    TILE_DEVICE Shared<uint8_t> sOver() const { return Shared<uint8_t>(kAtMoved + 8 * (number & 1)); }
    // The weights of this lane's keys for each group, from scores to shared memory. True if one may be too large
    TILE_DEVICE bool weigh(const Scores& acc_s, float (&sum)[2]) const {
        float factor[kGroups][2], top[2] = {};
        bool large = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const Vector16 scales = sScales<Vector16>(number, i)[0];
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                // Where there is no key, the scale may be anything; with an infinite one or NaN, S is NaN, too.
                factor[g][i] = fmaxf(fminf(as_float(scales.word[g]) * units[g], 0x1p100f), -0x1p100f);
                top[i] = fmaxf(top[i], fabsf(factor[g][i]));
            }
        }
        exponentiate(acc_s, sum, [&](int h, int, const float (&p)[2]) {
            const int lane = ptx::just_in_time(warp::lane());  // addresses take no register
            const int its = lane / 4 + 8 * h, key = key_group() * kMyKeys + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; i++) large |= p[i] != 0.0f && top[i] > kMost;
#pragma unroll
            for (int g = 0; g < kGroups; g++)
                Weights(weights_at(g)).pair(its, key) = pack<half>(p[0] * factor[g][0], p[1] * factor[g][1]);
        });
        return large;
    }
    // By all warps, which find the same: units move down to what the largest scales of a block's keys ask for, with
    // what was added up in them.
    TILE_DEVICE void move_units(int first_token, Span span) {
        const int lane = ptx::just_in_time(warp::lane());  // of a path that is rarely taken
        float top[kGroups] = {};
#pragma unroll 1
        for (int key = lane; key < kKeys; key += 32) {
            const int token = first_token + key;
            bool there = token >= span.begin && token < span.end;
            if constexpr (kChosen) there = there && sThere(number)[key];
            const Vector16 scales = Shared<Vector16>(scales_at(number, key))[0];
#pragma unroll
            for (int g = 0; g < kGroups; g++)
                if (there) top[g] = fmaxf(top[g], fabsf(as_float(scales.word[g])));
        }
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) top[g] = fmaxf(top[g], ptx::shuffle_xor(top[g], lanes));
            // Scales of 0 ask for no unit.
            const float unit = top[g] > 0.0f ? fminf(units[g], power_above(top[g], kPlace)) : units[g];
            if (g == my_group()) scale_output(unit * inverse_power(units[g]));
            units[g] = unit;
        }
    }
    TILE_DEVICE void scale_output(float factor) {
#pragma unroll
        for (int i = 0; i < kMyColumns / 2; i++) acc_o[0][i] *= factor;
    }
    // Zeroes the codes of this warp's columns that belong to tokens outside the span: memory there may hold anything,
    // and 0 · NaN is NaN. All warps have made their scores of the block.
    TILE_DEVICE void clear_outside(int first_token, Span span) const {
        const Places now = Places::of(number);
        if (first_token >= span.begin && first_token + kKeys <= span.end) return;
        constexpr int kChunks = kMyColumns / 16;
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
#pragma unroll
        for (int g = 0; g < kGroups; g++) units[g] = kLargestUnit;
        Scores acc_s;
        compute_scores(acc_s, number);
        finish_scores(acc_s, number, begin * kKeys);
#pragma unroll 1
        for (int n = begin; n < end; n++) {
            float sum[2];
            const bool large = weigh(acc_s, sum), mine = ptx::any(over(acc_s, sum) || large);
            ptx::sync_warp();  // P is there
            if (warp::lane() == 0) {
                sOver()[warp_rank] = mine;
                ptx::mbarrier_arrive(ready_barrier(number));
            }
            Scores next;
            if (n + 1 < end) {
                compute_scores(next, number + 1);
                finish_scores(next, number + 1, (n + 1) * kKeys);
            }
            ptx::mbarrier_wait(ready_barrier(number), number >> 1 & 1);
            const Vector8 found = Shared<Vector8>(kAtMoved + 8 * (number & 1))[0];
            if (ptx::any((found.word[0] | found.word[1]) != 0)) {
                move_units(n * kKeys, span);
                move_references(acc_s, [&] { weigh(acc_s, sum); });
            }
            state.sum[0] += sum[0];
            state.sum[1] += sum[1];
            if constexpr (!kGather) clear_outside(n * kKeys, span);
            multiply();
            number++;
#pragma unroll
            for (int i = 0; i < 4; i++) acc_s[i] = next[i];
        }
#pragma unroll
        for (int g = 0; g < kGroups; g++)
            if (g == my_group()) scale_output(inverse_power(units[g]));
    }
    TILE_DEVICE void run() { walk_items(*this); }
};
