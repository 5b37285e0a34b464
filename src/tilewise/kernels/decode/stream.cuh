// The body for few rows: one warp, up to kRows query rows, a chunk of tokens at a time as they come, in tiles of sixteen.
//
// K is the mma's A operand, so that the tokens fill its sixteen rows and the query rows its eight columns, or eights of them:
//     Sᵀ (16 × rows) = K Qᵀ,   P = 2^(S − m),   Oᵀ (D × rows) += Vᵀ Pᵀ
// A lane holds of S and P tokens g and g + 8, g = lane / 4, of rows 2t and 2t + 1, t = lane % 4; of O the same rows of channels
// `output_channel`. P is B of the second product, for which it is turned, 8 × 8 at a time.
//
// P is 2^(S − reference), and what goes into the second product, P times the scale of the token's V, must not outgrow a half: where it
// comes to 2^8 in some lane, the row's reference moves, so that the largest is about 1 again. The others are then as exact, against
// the sum, as they have to be. Rows move one by one, so that a row's result does not depend on which others stand beside it.
//
// Quantised: codes are exact as halves, so the products run in halves. Scores are multiplied with the scale of their token's K, P with
// that of V; int4's zero points come in by sums: S += zero · Σ q, O += Σ P · zero. Q of bfloat16 is multiplied row by row with the
// power of two that brings its largest value to 2^14, and S with its inverse: what is then below a half's smallest number is 2^−38 of
// the largest.
#pragma once
#include "decode/load.cuh"
#include "tile/softmax.cuh"

constexpr int kBlocks = kRows / 8, kSteps = kHeadDim / 16;  // eights of rows; of depth sixteen, and of output channels
constexpr int kPairSteps = steps_of_pair(kFormat), kPairs = (kRowChunks + 1) / 2;
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool kNormalised = kScaled || !Same<Element, Operand>::value;
constexpr float kSlack = 8.0f;               // how far, in base 2, scores may rise above the reference before it moves
constexpr uint32_t kTooLarge = Same<Operand, bf16>::value ? 0x4380 : 0x5c00;  // 2^kSlack, as an Operand
constexpr float kMostSum = 1.329228e36f;  // 2^120: where P grows without its products, because scales are tiny, the reference moves too

// Two states over different keys as one, the same bits wherever it is done. An empty one leaves the other as it is.
struct Fold {
    float max, before, after;  // what the two are multiplied with
    TILE_DEVICE float join(float x, float y) const { return ptx::mad(y, after, ptx::multiply(x, before)); }
};
TILE_DEVICE Fold fold_of(float max_before, float max_after) {
    const float max = fmaxf(max_before, max_after);
    return {max, ptx::exp2(max_before - max), ptx::exp2(max_after - max)};
}

struct Stream {
    const DecodeArgs& args;
    const int lane;
    uint32_t rQ[kBlocks][kSteps][2];
    float acc_o[kBlocks][kSteps][4];
    float max[kBlocks][2], sum[kBlocks][2];   // the softmax's reference, and this lane's share of Σ P
    float factor[kBlocks][2];                 // of S: the softmax scale and what Q was multiplied with, base 2; never 0
    Visible seen[kBlocks][2];
    int whole_from, whole_to;                 // tokens that every row sees
    int tail_from[kBlocks][2];                // a tree's mask: the first query token of the row's sequence,
    uint32_t tree[kBlocks][2];                // and which of them the row sees
    float q_sum[kBlocks][2][kGroups];         // int4: Σ q over a group of channels
    float zero_sum[kBlocks][2][kGroups];      // int4: this lane's share of Σ P · zero
    // Where this lane reads, but for the stage. The first two by way of a shuffle: else they would be worked out for every chunk.
    const uint32_t keys_at, values_at, scales_at;

    TILE_DEVICE Stream(const DecodeArgs& a, const Loader& loader)
        : args(a), lane(warp::lane()), keys_at(ptx::shuffle(loader.window + place_of(lane % 16, lane / 16, loader.rank), lane)),
          values_at(kFormat == Format::bits16 ? ptx::shuffle(loader.window + place_of(value_row(), value_chunk(), loader.rank), lane) : keys_at),
          scales_at(kScaled ? loader.window + lane / 4 * kTokenScales : 0) {}
    TILE_DEVICE int value_row() const { return quant::value_row<kFormat>(lane); }
    TILE_DEVICE int value_chunk() const { return quant::value_chunk<kFormat>(lane); }

    TILE_DEVICE int row(int block, int i) const { return 8 * block + lane % 4 * 2 + i; }  // of accumulators

    // ---- the beginning ------------------------------------------------------------------------------------------------------
    TILE_DEVICE void begin(const DecodeItem& item, int length, Span span) {
        int from = span.begin, to = span.end;
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                factor[b][i] = scale();
                seen[b][i] = {span.begin, span.end - span.begin};
                if (row(b, i) < item.rows) {
                    const DecodeRow at = row_of(args, item, row(b, i));
                    const int its = item.is(kOwn) ? length : int(Global<const int>{args.lengths}[at.sequence]);
                    seen[b][i] = seen_by(args, at, its, span);
                    const int last = seen[b][i].first + seen[b][i].count;
                    from = seen[b][i].first > from ? seen[b][i].first : from;
                    to = last < to ? last : to;
                    if constexpr (kTree) {
                        tree[b][i] = Global<const uint32_t>{args.tree}[caller_of(args, item, at) * args.tokens + at.token];
                        tail_from[b][i] = its - args.tokens;
                        to = tail_from[b][i] < to ? tail_from[b][i] : to;
                    }
                } else if constexpr (kTree) {
                    tree[b][i] = ~0u;
                    tail_from[b][i] = span.end;
                }
            }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            const int other_from = ptx::shuffle_xor(from, mask), other_to = ptx::shuffle_xor(to, mask);
            from = other_from > from ? other_from : from;
            to = other_to < to ? other_to : to;
        }
        whole_from = from;
        whole_to = to;
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            load_q(item, b);
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (factor[b][i] == 0.0f) factor[b][i] = 1e-37f;  // 0 · −∞ would not be hidden
        }
        begin_piece();
    }
    // The state of no key
    TILE_DEVICE void begin_piece() {
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                max[b][i] = kLowest;
                sum[b][i] = 0.0f;
                if constexpr (kZeros)
#pragma unroll
                    for (int g = 0; g < kGroups; g++) zero_sum[b][i][g] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kSteps; n++) warp::zero(acc_o[b][n]);
        }
    }

    // Q as B operands: row 8b + lane / 4, zeros if there is none
    TILE_DEVICE void load_q(const DecodeItem& item, int b) {
        const int n = 8 * b + lane / 4;
        const bool exists = n < item.rows;
        const DecodeRow row = row_of(args, item, exists ? n : 0);
        const Global<const Element> gQ{static_cast<const Element*>(args.q) + caller_of(args, item, row) * args.q_strides.batch +
                                       row.token * args.q_strides.row + row.head * args.q_strides.head};
        uint32_t raw[kSteps][2];
#pragma unroll
        for (int s = 0; s < kSteps; s++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int channel = quant::query_channel<kFormat>(s, r, lane);
                raw[s][r] = 0;
                if (exists) {
                    if constexpr (quant::query_next<kFormat>() == 1) raw[s][r] = (gQ + channel).template as<const uint32_t>()[0];
                    else raw[s][r] = bits(gQ, channel) | bits(gQ, channel + quant::query_next<kFormat>()) << 16;
                }
            }
        if constexpr (!kNormalised) {
#pragma unroll
            for (int s = 0; s < kSteps; s++) rQ[b][s][0] = raw[s][0], rQ[b][s][1] = raw[s][1];
        } else {
            float top = 0.0f;
#pragma unroll
            for (int s = 0; s < 2 * kSteps; s++)
                top = fmaxf(top, fmaxf(fabsf(unpack<Element>(raw[s / 2][s % 2], 0)), fabsf(unpack<Element>(raw[s / 2][s % 2], 1))));
            top = warp::row_max(top);
            const float to_half = power_above(top, 14), back = scale() * inverse_power(to_half);
#pragma unroll
            for (int i = 0; i < 2; i++) factor[b][i] = quant::key_unit<kFormat>() * ptx::shuffle(back, (lane % 4 * 2 + i) * 4);
            float group_sum[kGroups] = {};
#pragma unroll
            for (int s = 0; s < kSteps; s++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float x = unpack<Element>(raw[s][r], 0) * to_half, y = unpack<Element>(raw[s][r], 1) * to_half;
                    const float f = quant::query_factor<kFormat>(r);
                    rQ[b][s][r] = pack<Operand>(x * f, y * f);
                    if constexpr (kZeros) group_sum[s / 2 * 32 / kGroupSize] += x + y;
                }
            if constexpr (kZeros)
#pragma unroll
                for (int g = 0; g < kGroups; g++) {
                    group_sum[g] = warp::row_sum(group_sum[g]) * (1.0f / quant::kKeyUnit4);  // S is in that unit until the end
#pragma unroll
                    for (int i = 0; i < 2; i++) q_sum[b][i][g] = ptx::shuffle(group_sum[g], (lane % 4 * 2 + i) * 4);
                }
        }
    }
    static TILE_DEVICE uint32_t bits(Global<const Element> g, int channel) {
        return g.template as<const uint16_t>()[channel];
    }
    TILE_DEVICE float scale() const { return Rule::first_factor(args.scores); }
    static TILE_DEVICE float inverse_power(float x) { return as_float(0x7f000000u - as_bits(x)); }  // of a power of two, exactly
    // The power of two, 2^±most at most, that brings x > 0 to between 2^(place − 1) and 2^place; 1 for 0, infinity and NaN
    static TILE_DEVICE float power_above(float x, int place, int most = 120) {
        const int exponent = int(as_bits(x) >> 23 & 255) - 126;  // x < 2^exponent
        const int power = place - exponent;
        if (!(x > 0.0f) || exponent > 128) return 1.0f;
        return as_float(uint32_t((power > most ? most : power < -most ? -most : power) + 127) << 23);
    }
    static TILE_DEVICE float log2_of_power(float x) { return float(int(as_bits(x) >> 23) - 127); }

    // ---- a chunk of tokens ------------------------------------------------------------------------------------------------------
    using ScoreTiles = float[kTiles][kBlocks][4];
    struct Weights {
        ScoreTiles p;
        uint32_t packed[kTiles][kGroups][kBlocks][2];  // P times the scale of V, rows 2t and 2t + 1 of token g, then of g + 8
        float sum[kBlocks][2];                         // Σ P with these
    };

    TILE_DEVICE void step(const Loader& loader, int stage, int first_token, Span span) {
        const bool whole = first_token >= whole_from && first_token + kChunk <= whole_to;
        const uint32_t scales = scales_at + loader.scales(stage);
        ScoreTiles s;
        scores(s, keys_at + loader.keys(stage), scales);
        if constexpr (!Rule::kLinear)
#pragma unroll
            for (int j = 0; j < 4 * kBlocks * kTiles; j++) {
                float& x = s[j / 4 / kBlocks][j / 4 % kBlocks][j % 4];
                x = soft_capped(x, factor[j / 4 % kBlocks][j % 2]);
            }
        if (!whole) {
            mask(s, first_token, span);
            if (first_token < span.begin || first_token + kChunk > span.end) loader.clear_outside(stage, first_token, span);
        }
        Weights w = weigh(s, scales);
        if (ptx::any(too_large(w))) {
            follow(w, s, scales);
            w = weigh(s, scales);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; b++) sum[b][0] = w.sum[b][0], sum[b][1] = w.sum[b][1];
        add_values(w, values_at + loader.values(stage), scales);
    }

    // S = K Qᵀ, to be multiplied with `last_factor` after the rule's first step, if it has two
    TILE_DEVICE void scores(ScoreTiles& s, uint32_t keys, uint32_t scales) const {
        constexpr int kChains = kZeros ? 1 : 2;  // of dependent products: sums are the same however many rows there are
        float acc[kTiles][kChains][kBlocks][4] = {};
        float scale[kTiles][2][kGroups], zero[kTiles][2][kGroups];
        if constexpr (kScaled)
#pragma unroll
            for (int h = 0; h < 2 * kTiles; h++) {
                load_scales(scale[h / 2][h % 2], scales, 0, 8 * h);
                if constexpr (kZeros) load_scales(zero[h / 2][h % 2], scales, 2, 8 * h);
            }
#pragma unroll
        for (int p = 0; p < kPairs; p++)
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                uint32_t f[4];
                ptx::ldmatrix(f, pair_at(keys, p, t));
#pragma unroll
                for (int i = 0; i < kPairSteps; i++) {
                    const int n = p * kPairSteps + i;
                    if (n >= kSteps) break;
                    uint32_t a[4];
                    quant::key_step<kFormat>(a, f, i);
#pragma unroll
                    for (int b = 0; b < kBlocks; b++) ptx::mma_16x8x16<Operand>(acc[t][n % kChains][b], a, rQ[b][n][0], rQ[b][n][1]);
                    if constexpr (kZeros) {
                        const int g = n / 2 * 32 / kGroupSize;
                        if (n % 2 == 1 && (n + 1 == kSteps || (n + 1) / 2 * 32 / kGroupSize != g)) {  // the group's last: its scale and zero
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
    // The pair p of 16 bytes of a row of tile t; where rows have an odd number of them the last stands twice.
    TILE_DEVICE uint32_t pair_at(uint32_t first, int p, int t) const {
        const uint32_t at = place_further(first, p, t);
        return 2 * p + 1 < kRowChunks ? at : at - lane / 16 * (kBox * kPanelBytes);
    }
    // Of token lane / 4 + `row` of the chunk, for all groups of channels; at: those of token lane / 4
    static TILE_DEVICE void load_scales(float (&x)[kGroups], uint32_t at, int part, int row) {
        at += part * kScalePart + row * kTokenScales;
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
    // A tree's mask is looked at token by token, so that all its rows see as much as the last; rows that do not exist may see anything.
    TILE_DEVICE Visible seen_in(int b, int i, Span span) const {
        if constexpr (kTree) return seen_to(args, tail_from[b][i] + args.tokens - 1, span);
        else return seen[b][i];
    }
    TILE_DEVICE float last_factor(int b, int i) const { return Rule::last_factor(args.scores, factor[b][i]); }
    // What a row does not see becomes −∞ when it is multiplied.
    TILE_DEVICE void mask(ScoreTiles& s, int first_token, Span span) const {
#pragma unroll
        for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int j = 0; j < 4 * kBlocks; j++) {
                const int b = j / 4, i = j % 2, token = first_token + 16 * t + lane / 4 + 8 * (j % 4 / 2);
                bool hidden = !seen_in(b, i, span).has(token);
                if constexpr (kTree) {
                    const int place = token - tail_from[b][i];
                    hidden |= place >= 0 && !(tree[b][i] >> (place & 31) & 1);
                }
                if (hidden) s[t][b][j % 4] = last_factor(b, i) < 0.0f ? INFINITY : -INFINITY;
            }
    }

    // Over the eight lanes that share a row
    static TILE_DEVICE float row_max(float x) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, ptx::shuffle_xor(x, lanes));
        return x;
    }
    static TILE_DEVICE float row_sum(float x) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) x += ptx::shuffle_xor(x, lanes);
        return x;
    }

    // P by the references as they are, and what follows from it. Before a row has seen a key, and after a jump, that may be infinite.
    TILE_DEVICE Weights weigh(const ScoreTiles& s, uint32_t scales) const {
        Weights w;
#pragma unroll
        for (int b = 0; b < kBlocks; b++) w.sum[b][0] = sum[b][0], w.sum[b][1] = sum[b][1];
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
            float scale[2][kGroups];
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
                    for (int g = 0; g < kGroups; g++)
                        w.packed[t][g][b][h] = kScaled ? pack<Operand>(x * scale[h][g], y * scale[h][g]) : pack<Operand>(x, y);
                }
        }
        return w;
    }
    // Numbers that are not negative are in the order of their bits; not a number is larger than all.
    static TILE_DEVICE bool too_large(const Weights& w) {
        constexpr int kEach = kGroups * kBlocks * 2;
        uint32_t top = w.packed[0][0][0][0];
        bool found = false;
#pragma unroll
        for (int j = 1; j < kTiles * kEach; j++) top = ptx::max_pairs(top, w.packed[j / kEach][j / 2 / kBlocks % kGroups][j / 2 % kBlocks][j % 2]);
        if constexpr (kScaled)
#pragma unroll
            for (int j = 0; j < 2 * kBlocks; j++) found |= w.sum[j / 2][j % 2] > kMostSum;
        return found || (top + 0x10001u * (0x8000u - kTooLarge)) & 0x80008000u;
    }
    // A row's reference moves where it is too small: to the row's maximum, so that P = 1 there; quantised, so that the largest P · scale
    // is about 1.
    TILE_DEVICE void follow(const Weights& w, const ScoreTiles& s, uint32_t scales) {
        bool moves[kBlocks][2];
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; j++) {
            const int b = j / 2, i = j % 2;
            bool found = kScaled && w.sum[b][i] > kMostSum;
#pragma unroll
            for (int n = 0; n < kTiles * kGroups * 2; n++)
                found |= (w.packed[n / 2 / kGroups][n / 2 % kGroups][b][n % 2] >> 16 * i & 0xffff) >= kTooLarge;
            moves[b][i] = ptx::ballot(found) & 0x11111111u << lane % 4;
        }
        float most[kTiles][2];  // the scale of V, over the groups of channels
        if constexpr (kScaled)
#pragma unroll
            for (int h = 0; h < 2 * kTiles; h++) {
                float scale[kGroups];
                load_scales(scale, scales, 1, 8 * h);
                most[h / 2][h % 2] = scale[0];
#pragma unroll
                for (int g = 1; g < kGroups; g++) most[h / 2][h % 2] = fmaxf(most[h / 2][h % 2], scale[g]);
            }
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float top = -INFINITY, product = 0.0f;
#pragma unroll
                for (int h = 0; h < 2 * kTiles; h++) top = fmaxf(top, ptx::multiply(s[h / 2][b][h % 2 * 2 + i], last_factor(b, i)));
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
                to = moves[b][i] && to > max[b][i] ? to : max[b][i];
                const float by = ptx::exp2(max[b][i] - to);
                max[b][i] = to;
                sum[b][i] *= by;
#pragma unroll
                for (int n = 0; n < kSteps; n++) {
                    acc_o[b][n][i] *= by;
                    acc_o[b][n][2 + i] *= by;
                }
                if constexpr (kZeros)
#pragma unroll
                    for (int g = 0; g < kGroups; g++) zero_sum[b][i][g] *= by;
            }
    }

    // Oᵀ += Vᵀ Pᵀ
    TILE_DEVICE void add_values(Weights& w, uint32_t values, uint32_t scales) {
#pragma unroll
        for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int j = 0; j < kGroups * kBlocks * 2; j++) {
                uint32_t& x = w.packed[t][j / 2 / kBlocks][j / 2 % kBlocks][j % 2];
                x = ptx::transpose_matrix(x);  // a B operand
            }
        if constexpr (kZeros)
#pragma unroll
            for (int h = 0; h < 2 * kTiles; h++) {
                float zero[kGroups];
                load_scales(zero, scales, 3, 8 * h);
#pragma unroll
                for (int j = 0; j < 2 * kBlocks; j++)
#pragma unroll
                    for (int g = 0; g < kGroups; g++)
                        zero_sum[j / 2][j % 2][g] = ptx::mad(w.p[h / 2][j / 2][h % 2 * 2 + j % 2], zero[g], zero_sum[j / 2][j % 2][g]);
            }
#pragma unroll
        for (int n = 0; n < kPairs; n++)
#pragma unroll
            for (int t = 0; t < kTiles; t++) {
                uint32_t f[4];
                ptx::ldmatrix_transposed(f, pair_at(values, n, t));
#pragma unroll
                for (int i = 0; i < kPairSteps; i++) {
                    const int tile = n * kPairSteps + i, g = kZeros ? tile / 2 * 32 / kGroupSize : 0;
                    if (tile >= kSteps) break;
                    uint32_t a[4];
                    quant::value_step<kFormat>(a, f, i);
#pragma unroll
                    for (int b = 0; b < kBlocks; b++) ptx::mma_16x8x16<Operand>(acc_o[b][tile], a, w.packed[t][g][b][0], w.packed[t][g][b][1]);
                }
            }
    }

    // ---- the end of a piece: sums over the lanes, O in its own units, not yet divided ------------------------------------------------
    TILE_DEVICE void finish_piece() {
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sum[b][i] = row_sum(sum[b][i]);
                if constexpr (kScaled) {
                    // The reference stood where products were about 1, not P: as others expect it, the sum is between 1 and 2.
                    const float down = power_above(sum[b][i], 1);
                    sum[b][i] *= down;
                    max[b][i] -= log2_of_power(down);
                    float zero[kGroups];
                    if constexpr (kZeros)
#pragma unroll
                        for (int g = 0; g < kGroups; g++) zero[g] = row_sum(zero_sum[b][i][g]) * down;
#pragma unroll
                    for (int n = 0; n < kSteps; n++)
#pragma unroll
                        for (int upper = 0; upper < 2; upper++) {
                            float& x = acc_o[b][n][2 * upper + i];
                            x *= down * quant::output_unit<kFormat>(upper);
                            if constexpr (kZeros) x += zero[n / 2 * 32 / kGroupSize];
                        }
                }
            }
    }

    // ---- pieces of one range -----------------------------------------------------------------------------------------------------------
    // A finished piece after those before it, which are kept in shared memory: this becomes the state of all of them.
    TILE_DEVICE void fold(int rank) {
        const Shared<float> before(fold_of_warp(rank)), ml(fold_of_warp(rank) + kRows * kHeadDim * 4);
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = (2 * b + i) * 32 + lane;
                const Fold of = fold_of(float(ml[2 * at]), max[b][i]);
                max[b][i] = of.max;
                sum[b][i] = of.join(ml[2 * at + 1], sum[b][i]);
#pragma unroll
                for (int n = 0; n < 2 * kSteps; n++) {
                    float& x = acc_o[b][n / 2][n % 2 * 2 + i];
                    x = of.join(before[(2 * kSteps * (2 * b + i) + n) * 32 + lane], x);
                }
            }
    }
    TILE_DEVICE void keep(int rank) const {
        const Shared<float> to(fold_of_warp(rank)), ml(fold_of_warp(rank) + kRows * kHeadDim * 4);
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = (2 * b + i) * 32 + lane;
                ml[2 * at] = max[b][i];
                ml[2 * at + 1] = sum[b][i];
#pragma unroll
                for (int n = 0; n < 2 * kSteps; n++) to[(2 * kSteps * (2 * b + i) + n) * 32 + lane] = acc_o[b][n / 2][n % 2 * 2 + i];
            }
    }
};
