// The streaming body, for few rows: one warp takes up to kRows query rows through its tokens, a chunk at a time as
// chunks arrive, in tiles of sixteen tokens.
//
// K is the mma's A operand, so that tokens fill the sixteen rows of a product and query rows its eight columns:
//     Sᵀ (16 × rows) = K Qᵀ,   P = 2^(S − m),   Oᵀ (D × rows) += Vᵀ Pᵀ
// Of S and P a lane holds tokens g and g + 8, g = lane / 4, of rows 2t and 2t + 1, t = lane % 4; of O it holds the same
// rows and the channels that quant::output_channel names. P becomes the B operand of the second product, for which it
// is transposed in 8 × 8 matrices.
//
// P is 2^(S − m) for a reference m. What enters the second product, P times the scale of the token's V, must not
// outgrow a half. Where it reaches 2^8 in some lane, the row's reference moves up, so that the row's largest is about 1
// again; the others are then as exact as the sum needs them. Each row moves by itself, so that a row's result does not
// depend on the rows beside it.
//
// Quantised caches: codes are exact as halves, so both products run in halves. S is multiplied by the scale of the
// token's K, and P by the scale of its V. The zero points of int4 enter as sums: S += zero · Σ q, O += Σ P · zero. Each
// row of a bfloat16 Q is multiplied by the power of two that brings its largest value to 2^14, and its S by the
// inverse: a value that then falls below a half's smallest number is below 2^−38 of the largest.
#pragma once
#include "decode/rows.cuh"

constexpr int kPairSteps = steps_of_pair(kFormat);
constexpr int kKeyPairs = (KeyRows::kUnits + 1) / 2, kValuePairs = (ValueRows::kUnits + 1) / 2;
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool kNormalised = kScaled || !Same<Element, Operand>::value;  // Q is scaled row by row
constexpr uint32_t kTooLarge = Same<Operand, bf16>::value ? 0x4380 : 0x5c00;  // 2^kSlack, as an Operand
// 2^120. Where scales are tiny, P may grow while its products with them stay small: then the reference moves too.
constexpr float kMostSum = 1.329228e36f;

struct Stream : Rows {
    uint32_t rQ[kBlocks][kSteps][2];
    float q_sum[kBlocks][2][kKeyGroups];  // int4: Σ q over a group of channels
    // Where this lane reads within a stage. The first two pass through a shuffle, or the compiler would compute them
    // again for every chunk.
    const uint32_t keys_at, values_at, scales_at;

    TILE_DEVICE Stream(const DecodeArgs& a, const Loader& loader) : Stream(a, loader.window, loader.rank) {}
    // window: the address of shared memory
    TILE_DEVICE Stream(const DecodeArgs& a, uint32_t window, int rank)
        : Rows(a), keys_at(ptx::shuffle(window + KeyRows::place_of(lane % 16, lane / 16, rank), lane)),
          values_at(kFormat == Format::bits16 || !kOneDim
                        ? ptx::shuffle(window + ValueRows::place_of(value_row(), value_chunk(), rank), lane)
                        : keys_at),
          scales_at(kScaled ? window + lane / 4 * kKeyScales : 0) {}
    TILE_DEVICE int value_row() const { return quant::value_row<kFormat>(lane); }
    TILE_DEVICE int value_chunk() const { return quant::value_chunk<kFormat>(lane); }

    // ---- the beginning ----------------------------------------------------------------------------------------------
    TILE_DEVICE void begin(const DecodeItem& item, int length, Span span) {
        begin_rows(item, length, span);
#pragma unroll
        for (int b = 0; b < kBlocks; b++) load_q(item, b);
        avoid_zero();
        begin_piece();
    }
    // Hidden scores are −∞, and 0 · −∞ is NaN.
    TILE_DEVICE void avoid_zero() {
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; j++)
            if (factor[j / 2][j % 2] == 0.0f) factor[j / 2][j % 2] = 1e-37f;
    }
    // Q as B operands: this lane loads row 8b + lane / 4, or zeros if the item has no such row
    TILE_DEVICE void load_q(const DecodeItem& item, int b) {
        const int n = 8 * b + lane / 4;
        const bool exists = n < item.rows;
        const Global<const Element> gQ = query_row(item, n);
        uint32_t raw[kSteps][2];
#pragma unroll
        for (int s = 0; s < kSteps; s++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int channel = quant::query_channel<kFormat>(s, r, lane);
                raw[s][r] = 0;
                if (exists) {
                    if constexpr (quant::query_next<kFormat>() == 1)
                        raw[s][r] = (gQ + channel).template as<const uint32_t>()[0];
                    else
                        raw[s][r] = bits(gQ, channel) | bits(gQ, channel + quant::query_next<kFormat>()) << 16;
                }
            }
        if constexpr (!kNormalised) {
#pragma unroll
            for (int s = 0; s < kSteps; s++) rQ[b][s][0] = raw[s][0], rQ[b][s][1] = raw[s][1];
        } else {
            float top = 0.0f;
#pragma unroll
            for (int s = 0; s < 2 * kSteps; s++) {
                const uint32_t pair = raw[s / 2][s % 2];
                top = fmaxf(top, fmaxf(fabsf(unpack<Element>(pair, 0)), fabsf(unpack<Element>(pair, 1))));
            }
            top = warp::row_max(top);
            const float to_half = power_above(top, 14), back = scale() * inverse_power(to_half);
#pragma unroll
            for (int i = 0; i < 2; i++)
                factor[b][i] = quant::key_unit<kFormat>() * ptx::shuffle(back, (lane % 4 * 2 + i) * 4);
            float group_sum[kKeyGroups] = {};
#pragma unroll
            for (int s = 0; s < kSteps; s++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float x = unpack<Element>(raw[s][r], 0) * to_half,
                                y = unpack<Element>(raw[s][r], 1) * to_half;
                    const float f = quant::query_factor<kFormat>(r);
                    rQ[b][s][r] = pack<Operand>(x * f, y * f);
                    if constexpr (kZeros) group_sum[s / 2 * 32 / kGroupSize] += x + y;
                }
            if constexpr (kZeros)
#pragma unroll
                for (int g = 0; g < kKeyGroups; g++) {
                    group_sum[g] = warp::row_sum(group_sum[g]) * (1.0f / quant::kKeyUnit4);  // S is in this unit
#pragma unroll
                    for (int i = 0; i < 2; i++) q_sum[b][i][g] = ptx::shuffle(group_sum[g], (lane % 4 * 2 + i) * 4);
                }
        }
    }
    static TILE_DEVICE uint32_t bits(Global<const Element> g, int channel) {
        return g.template as<const uint16_t>()[channel];
    }
    // ---- a chunk of tokens ------------------------------------------------------------------------------------------
    struct Weights {
        ScoreTiles p;
        // P times the scale of V: rows 2t and 2t + 1 of token g in one word, of token g + 8 in the next
        uint32_t packed[kTiles][kValueGroups][kBlocks][2];
        float sum[kBlocks][2];  // the row sums with these added
    };

    TILE_DEVICE void step(const Loader& loader, int stage, int first_token, Span span) {
        const bool whole = all_see(first_token);
        const uint32_t scales = scales_at + loader.scales(stage);
        ScoreTiles s;
        scores(s, keys_at + loader.keys(stage), scales);
        cap(s);
        if (!whole) {
            mask(s, first_token, span);
            if (first_token < span.begin || first_token + kChunk > span.end)
                loader.clear_outside(stage, first_token, span);
        }
        Weights w = weigh(s, scales);
        if (ptx::any(too_large(w))) {
            raise_references(w, s, scales);
            w = weigh(s, scales);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; b++) sum[b][0] = w.sum[b][0], sum[b][1] = w.sum[b][1];
        add_values(w, values_at + loader.values(stage), scales);
    }

    // S = K Qᵀ, still to be soft-capped and multiplied by last_factor
    TILE_DEVICE void scores(ScoreTiles& s, uint32_t keys, uint32_t scales) const {
        // Chains of dependent products. Their number does not depend on kRows, so that a row's sums do not either.
        constexpr int kChains = kZeros ? 1 : 2;
        float acc[kTiles][kChains][kBlocks][4] = {};
        float scale[kTiles][2][kKeyGroups], zero[kTiles][2][kKeyGroups];
        if constexpr (kScaled)
#pragma unroll
            for (int h = 0; h < 2 * kTiles; h++) {
                load_scales(scale[h / 2][h % 2], scales, 0, 8 * h);
                if constexpr (kZeros) load_scales(zero[h / 2][h % 2], scales, 2, 8 * h);
            }
#pragma unroll
        for (int p = 0; p < kKeyPairs; p++)
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                uint32_t f[4];
                ptx::ldmatrix(f, pair_at<KeyRows>(keys, p, t));
#pragma unroll
                for (int i = 0; i < kPairSteps; i++) {
                    const int n = p * kPairSteps + i;
                    if (n >= kSteps) break;
                    uint32_t a[4];
                    quant::key_step<kFormat>(a, f, i);
#pragma unroll
                    for (int b = 0; b < kBlocks; b++)
                        ptx::mma_16x8x16<Operand>(acc[t][n % kChains][b], a, rQ[b][n][0], rQ[b][n][1]);
                    if constexpr (kZeros) {
                        const int g = n / 2 * 32 / kGroupSize;
                        // After the last step of a group its scale and zero point are applied.
                        if (n % 2 == 1 && (n + 1 == kSteps || (n + 1) / 2 * 32 / kGroupSize != g)) {
#pragma unroll
                            for (int j = 0; j < 4 * kBlocks; j++) {
                                float &sum = s[t][j / 4][j % 4], &part = acc[t][0][j / 4][j % 4];
                                const float shift = zero[t][j % 4 / 2][g], sum_q = q_sum[j / 4][j % 2][g];
                                sum = g == 0 ? ptx::multiply(shift, sum_q) : ptx::mad(shift, sum_q, sum);
                                sum = ptx::mad(part, scale[t][j % 4 / 2][g], sum);
                                part = 0.0f;
                            }
                        }
                    }
                }
            }
        if constexpr (!kZeros)
#pragma unroll
            for (int t = 0; t < kTiles; t++)
#pragma unroll
                for (int j = 0; j < 4 * kBlocks; j++) {
                    const int b = j / 4, c = j % 4;
                    s[t][b][c] = acc[t][0][b][c] + acc[t][kChains - 1][b][c];
                    if constexpr (kScaled) s[t][b][c] = ptx::multiply(s[t][b][c], scale[t][c / 2][0]);
                }
    }
    // Pair p of a row's 16-byte units in tile t. Where a row has an odd number of units, the last one is read twice.
    template <class Of> TILE_DEVICE uint32_t pair_at(uint32_t first, int p, int t) const {
        const uint32_t at = Of::place_further(first, p, t);
        return 2 * p + 1 < Of::kUnits ? at : at - lane / 16 * (kBox * Of::kPanelBytes);
    }
    // The scales of token lane / 4 + `row` of the chunk, for all groups of channels; at: where those of K's lane / 4
    // stand
    template <int kGroups> static TILE_DEVICE void load_scales(float (&x)[kGroups], uint32_t at, int part, int row) {
        if constexpr (!kOneScaling) at += part % 2 * (warp::lane() / 4 * (kValueScales - kKeyScales));
        at += kChunk * scales_before(part) + row * scales_of(part);
        if constexpr (!kZeros) {
            x[0] = as_float(ptx::load_shared(at));
        } else if constexpr (kGroups % 2 == 0) {
#pragma unroll
            for (int g = 0; g < kGroups; g += 2) {
                const uint32_t two = ptx::load_shared(at + 2 * g);
                x[g] = as_float(two << 16);
                x[g + 1] = as_float(two & 0xffff0000u);
            }
        } else {
#pragma unroll
            for (int g = 0; g < kGroups; g++) x[g] = as_float(ptx::load_shared_16(at + 2 * g) << 16);
        }
    }
    // P against the references as they stand, and what follows from it. It may be infinite before a row has seen a key,
    // and after scores have jumped.
    TILE_DEVICE Weights weigh(const ScoreTiles& s, uint32_t scales) const {
        Weights w;
#pragma unroll
        for (int b = 0; b < kBlocks; b++) w.sum[b][0] = sum[b][0], w.sum[b][1] = sum[b][1];
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            float scale[2][kValueGroups];
            if constexpr (kScaled)
#pragma unroll
                for (int h = 0; h < 2; h++) load_scales(scale[h], scales, 1, 16 * t + 8 * h);
#pragma unroll
            for (int b = 0; b < kBlocks; b++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float& p = w.p[t][b][2 * h + i];
                        p = ptx::exp2(ptx::mad(s[t][b][2 * h + i], last_factor(b, i), -max[b][i]));
                        w.sum[b][i] += p;
                    }
                    const float x = w.p[t][b][2 * h], y = w.p[t][b][2 * h + 1];
#pragma unroll
                    for (int g = 0; g < kValueGroups; g++)
                        w.packed[t][g][b][h] =
                            kScaled ? pack<Operand>(x * scale[h][g], y * scale[h][g]) : pack<Operand>(x, y);
                }
        }
        return w;
    }
    // Does some value reach 2^kSlack? Non-negative floats are in the order of their bits, and NaN is above all.
    static TILE_DEVICE bool too_large(const Weights& w) {
        constexpr int kEach = kValueGroups * kBlocks * 2;
        uint32_t top = w.packed[0][0][0][0];
        bool found = false;
#pragma unroll
        for (int j = 1; j < kTiles * kEach; j++)
            top = ptx::max_pairs(top, w.packed[j / kEach][j / 2 / kBlocks % kValueGroups][j / 2 % kBlocks][j % 2]);
        if constexpr (kScaled)
#pragma unroll
            for (int j = 0; j < 2 * kBlocks; j++) found |= w.sum[j / 2][j % 2] > kMostSum;
        return found || (top + 0x10001u * (0x8000u - kTooLarge)) & 0x80008000u;
    }
    // Moves the references that are too small up to their row's maximum, where P is then 1; of quantised caches, to
    // where the largest P · scale is about 1.
    TILE_DEVICE void raise_references(const Weights& w, const ScoreTiles& s, uint32_t scales) {
        bool moves[kBlocks][2];
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; j++) {
            const int b = j / 2, i = j % 2;
            bool found = kScaled && w.sum[b][i] > kMostSum;
#pragma unroll
            for (int n = 0; n < kTiles * kValueGroups * 2; n++) {
                const uint32_t pair = w.packed[n / 2 / kValueGroups][n / 2 % kValueGroups][b][n % 2];
                found |= (pair >> 16 * i & 0xffff) >= kTooLarge;
            }
            moves[b][i] = ptx::ballot(found) & 0x11111111u << lane % 4;
        }
        float most[kTiles][2];  // the largest scale of V over the groups of channels, per token
        if constexpr (kScaled)
#pragma unroll
            for (int h = 0; h < 2 * kTiles; h++) {
                float scale[kValueGroups];
                load_scales(scale, scales, 1, 8 * h);
                most[h / 2][h % 2] = scale[0];
#pragma unroll
                for (int g = 1; g < kValueGroups; g++) most[h / 2][h % 2] = fmaxf(most[h / 2][h % 2], scale[g]);
            }
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float top = -INFINITY, product = 0.0f;
#pragma unroll
                for (int h = 0; h < 2 * kTiles; h++)
                    top = fmaxf(top, ptx::multiply(s[h / 2][b][h % 2 * 2 + i], last_factor(b, i)));
                top = row_max(top);
                float to = top;
                if constexpr (kScaled) {
#pragma unroll
                    for (int h = 0; h < 2 * kTiles; h++) {
                        const float p = ptx::exp2(ptx::mad(s[h / 2][b][h % 2 * 2 + i], last_factor(b, i), -top));
                        product = fmaxf(product, p * most[h / 2][h % 2]);
                    }
                    to -= log2_of_power(power_above(row_max(product), 0, 96));
                }
                move_reference(b, i, moves[b][i] && to > max[b][i] ? to : max[b][i]);
            }
    }

    // Oᵀ += Vᵀ Pᵀ
    TILE_DEVICE void add_values(Weights& w, uint32_t values, uint32_t scales) {
#pragma unroll
        for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int j = 0; j < kValueGroups * kBlocks * 2; j++) {
                uint32_t& x = w.packed[t][j / 2 / kBlocks][j / 2 % kBlocks][j % 2];
                x = ptx::transpose_matrix(x);  // into a B operand
            }
        if constexpr (kZeros)
#pragma unroll
            for (int h = 0; h < 2 * kTiles; h++) {
                float zero[kValueGroups];
                load_scales(zero, scales, 3, 8 * h);
#pragma unroll
                for (int j = 0; j < 2 * kBlocks; j++)
#pragma unroll
                    for (int g = 0; g < kValueGroups; g++)
                        zero_sum[j / 2][j % 2][g] =
                            ptx::mad(w.p[h / 2][j / 2][h % 2 * 2 + j % 2], zero[g], zero_sum[j / 2][j % 2][g]);
            }
#pragma unroll
        for (int n = 0; n < kValuePairs; n++)
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                uint32_t f[4];
                ptx::ldmatrix_transposed(f, pair_at<ValueRows>(values, n, t));
#pragma unroll
                for (int i = 0; i < kPairSteps; i++) {
                    const int tile = n * kPairSteps + i, g = kZeros ? tile / 2 * 32 / kGroupSize : 0;
                    if (tile >= kOutTiles) break;
                    uint32_t a[4];
                    quant::value_step<kFormat>(a, f, i);
#pragma unroll
                    for (int b = 0; b < kBlocks; b++)
                        ptx::mma_16x8x16<Operand>(acc_o[b][tile], a, w.packed[t][g][b][0], w.packed[t][g][b][1]);
                }
            }
    }
};
