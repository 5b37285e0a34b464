// The body for few rows: one warp, up to kRows query rows, sixteen tokens at a time as they come.
//
// K is the mma's A operand, so that the tokens fill its sixteen rows and the query rows its eight columns, or eights of them:
//     Sᵀ (16 × rows) = K Qᵀ,   P = 2^(S − m),   Oᵀ (D × rows) += Vᵀ Pᵀ
// A lane holds of S and P tokens g and g + 8, g = lane / 4, of rows 2t and 2t + 1, t = lane % 4; of O the same rows of channels
// `output_channel`. P is B of the second product, for which it is turned, 8 × 8 at a time.
//
// Quantised: codes are exact as halves, so the products run in halves. Scores are multiplied with the scale of their token's K, P with
// that of V; int4's zero points come in by sums: S += zero · Σ q, O += Σ P · zero. Two things need care, since halves have little range:
// - Q of bfloat16 is multiplied row by row with the power of two that brings its largest value to 2^14, and S with its inverse. What is
//   then below a half's smallest number is 2^−38 of the largest.
// - P · scale is multiplied with a power of two c, row by row, so that the largest so far of a row is about 1; the others are then as
//   exact, against the sum, as they have to be. c follows where the largest outgrows 2^8, and where the row's reference moves.
#pragma once
#include "sm90/decode_load.cuh"
#include "tile/softmax.cuh"

constexpr int kBlocks = kRows / 8, kSteps = kHeadDim / 16;  // eights of rows; of depth sixteen, and of output channels
constexpr int kPairSteps = steps_of_pair(kFormat), kPairs = (kRowChunks + 1) / 2;
template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool kNormalised = kScaled || !Same<Element, Operand>::value;
constexpr float kLowest = -3.402823466e38f;  // the reference of a row that has seen no key: any finite score is above it
constexpr float kSlack = 8.0f;               // how far, in base 2, scores may rise above the reference before it moves
constexpr float kLargest = 256.0f;           // the same for P · scale · c

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
    float factor[kBlocks][2];                 // of S: the softmax scale and what Q was multiplied with, base 2
    Seen seen[kBlocks][2];
    int whole_from, whole_to;                 // tokens that every row sees
    int tail_from[kBlocks][2];                // a tree's mask: the first query token of the row's sequence,
    uint32_t tree[kBlocks][2];                // and which of them the row sees
    float q_sum[kBlocks][2][kGroups];         // int4: Σ q over a group of channels
    float zero_sum[kBlocks][2][kGroups];      // int4: this lane's share of Σ P · zero
    float largest[kBlocks][2], up[kBlocks][2];  // quantised: the largest P · scale so far, and c

    TILE_DEVICE explicit Stream(const DecodeArgs& a) : args(a), lane(warp::lane()) {}

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
        for (int b = 0; b < kBlocks; b++) load_q(item, b);
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
                if constexpr (kScaled) {
                    largest[b][i] = 0.0f;
                    up[b][i] = 1.0f;
                }
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
    TILE_DEVICE float scale() const { return kSoftcap ? args.softcap_in : args.scale_log2; }
    static TILE_DEVICE float inverse_power(float x) { return as_float(0x7f000000u - as_bits(x)); }  // of a power of two, exactly
    // The power of two that brings x > 0 to between 2^(place − 1) and 2^place; 1 for 0, infinity and NaN
    static TILE_DEVICE float power_above(float x, int place) {
        const int exponent = int(as_bits(x) >> 23 & 255) - 126;  // x < 2^exponent
        const int power = place - exponent;
        if (!(x > 0.0f) || exponent > 128) return 1.0f;
        return as_float(uint32_t((power > 120 ? 120 : power < -120 ? -120 : power) + 127) << 23);
    }

    // ---- a chunk of tokens ------------------------------------------------------------------------------------------------------
    TILE_DEVICE void step(const Loader& loader, int stage, int first_token, Span span) {
        const bool whole = first_token >= whole_from && first_token + kChunk <= whole_to;
        float s[kBlocks][4];
        scores(s, loader, stage);
        if constexpr (kSoftcap)
#pragma unroll
            for (int j = 0; j < 4 * kBlocks; j++) s[j / 4][j % 4] = args.softcap_out * warp::tanh_from_log2(s[j / 4][j % 4]);
        if (!whole) {
            mask(s, first_token);
            if (first_token < span.begin || first_token + kChunk > span.end) loader.clear_outside(stage, first_token, span);
        }
        follow_maximum(s, loader, stage);
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[b][j] = ptx::exp2(s[b][j] - max[b][j % 2]);
                sum[b][j % 2] += s[b][j];
            }
        add_values(s, loader, stage);
    }

    // S = K Qᵀ in base 2
    TILE_DEVICE void scores(float (&s)[kBlocks][4], const Loader& loader, int stage) {
        constexpr int kChains = kZeros ? 1 : 2;  // of dependent products: sums are the same however many rows there are
        float acc[kChains][kBlocks][4] = {};
        float scale[kScaled ? kGroups : 1][2], zero[kZeros ? kGroups : 1][2];
        if constexpr (kScaled)
#pragma unroll
            for (int g = 0; g < kGroups; g++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    scale[g][h] = scale_at(loader, stage, 0, 8 * h, g);
                    if constexpr (kZeros) zero[g][h] = scale_at(loader, stage, 2, 8 * h, g);
                }
        if constexpr (kZeros)
#pragma unroll
            for (int j = 0; j < 4 * kBlocks; j++) s[j / 4][j % 4] = 0.0f;
#pragma unroll
        for (int p = 0; p < kPairs; p++) {
            const int chunk = 2 * p + lane / 16;
            uint32_t f[4];
            ptx::ldmatrix(f, ptx::shared_address(place_of(loader.keys(stage), lane % 16, chunk < kRowChunks ? chunk : kRowChunks - 1)));
#pragma unroll
            for (int i = 0; i < kPairSteps; i++) {
                const int n = p * kPairSteps + i;
                if (n >= kSteps) break;
                uint32_t a[4];
                quant::key_step<kFormat>(a, f, i);
#pragma unroll
                for (int b = 0; b < kBlocks; b++) ptx::mma_16x8x16<Operand>(acc[n % kChains][b], a, rQ[b][n][0], rQ[b][n][1]);
                if constexpr (kZeros) {
                    const int g = n / 2 * 32 / kGroupSize;
                    if (n % 2 == 1 && (n + 1 == kSteps || (n + 1) / 2 * 32 / kGroupSize != g)) {  // the group's last: its scale and zero
#pragma unroll
                        for (int j = 0; j < 4 * kBlocks; j++) {
                            const int b = j / 4, c = j % 4;
                            s[b][c] += acc[0][b][c] * scale[g][c / 2] + zero[g][c / 2] * q_sum[b][c % 2][g];
                            acc[0][b][c] = 0.0f;
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if constexpr (!kZeros) s[b][j] = acc[0][b][j];
                if constexpr (kChains == 2) s[b][j] += acc[1][b][j];
                if constexpr (kScaled && !kZeros) s[b][j] *= scale[0][j / 2];
                s[b][j] = ptx::multiply(s[b][j], factor[b][j % 2]);  // rounded here, whatever the compiler makes of what follows
            }
    }
    // Of token lane / 4 + `further` of the chunk
    TILE_DEVICE float scale_at(const Loader& loader, int stage, int part, int further, int group) const {
        const int n = (lane / 4 + further) * kGroups + group;
        const ScaleBits x = Shared<ScaleBits>(loader.scales(stage, part))[n];
        return as_float(kZeros ? uint32_t(x) << 16 : uint32_t(x));
    }
    TILE_DEVICE void mask(float (&s)[kBlocks][4], int first_token) const {
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int token = first_token + lane / 4 + 8 * (j / 2);
                if (uint32_t(token - seen[b][j % 2].first) >= uint32_t(seen[b][j % 2].count)) s[b][j] = -INFINITY;
                if constexpr (kTree) {
                    const int place = token - tail_from[b][j % 2];
                    if (place >= 0 && !(tree[b][j % 2] >> (place & 31) & 1)) s[b][j] = -INFINITY;
                }
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

    // A row's reference moves to its maximum where a score is more than kSlack above it: then P ≤ 2^kSlack. Rows move one by one, so
    // that a row's result does not depend on which others stand beside it.
    TILE_DEVICE void follow_maximum(const float (&s)[kBlocks][4], const Loader& loader, int stage) {
        bool above = false;
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) above |= fmaxf(s[b][i], s[b][2 + i]) > max[b][i] + kSlack;
        if (!ptx::any(above)) return;
        float most[2];
        if constexpr (kScaled) largest_scales(most, loader, stage);
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float here = row_max(fmaxf(s[b][i], s[b][2 + i]));
                const bool moves = here > max[b][i] + kSlack;
                const float top = moves ? here : max[b][i], less = ptx::exp2(max[b][i] - top);
                max[b][i] = top;
                sum[b][i] *= less;
                float by = less;
                if constexpr (kScaled) {
                    largest[b][i] *= less;
                    const float product = row_max(fmaxf(ptx::exp2(s[b][i] - top) * most[0], ptx::exp2(s[b][2 + i] - top) * most[1]));
                    if (moves) by *= follow_product(b, i, product);
                }
                scale_row(b, i, by);
                if constexpr (kZeros)
#pragma unroll
                    for (int g = 0; g < kGroups; g++) zero_sum[b][i][g] *= less;
            }
    }
    // c follows the largest P · scale of a row; what O is to be multiplied with
    TILE_DEVICE float follow_product(int b, int i, float product) {
        largest[b][i] = fmaxf(largest[b][i], product);
        const float c = power_above(largest[b][i], 0), by = c * inverse_power(up[b][i]);
        up[b][i] = c;
        return by;
    }
    // Of each of a lane's two tokens, over the groups of channels
    TILE_DEVICE void largest_scales(float (&most)[2], const Loader& loader, int stage) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[h] = 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; g++) most[h] = fmaxf(most[h], scale_at(loader, stage, 1, 8 * h, g));
        }
    }
    TILE_DEVICE void scale_row(int b, int i, float by) {
#pragma unroll
        for (int n = 0; n < kSteps; n++) {
            acc_o[b][n][i] *= by;
            acc_o[b][n][2 + i] *= by;
        }
    }
    // The same where a product outgrows its c between two moves of the reference
    TILE_DEVICE void watch_products(const float (&p)[kBlocks][4], const float (&most)[2]) {
        bool above = false;
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) above |= fmaxf(p[b][i] * most[0], p[b][2 + i] * most[1]) * up[b][i] > kLargest;
        if (!ptx::any(above)) return;
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float product = row_max(fmaxf(p[b][i] * most[0], p[b][2 + i] * most[1]));
                if (product * up[b][i] > kLargest) scale_row(b, i, follow_product(b, i, product));
            }
    }

    // Oᵀ += Vᵀ Pᵀ
    TILE_DEVICE void add_values(const float (&p)[kBlocks][4], const Loader& loader, int stage) {
        uint32_t turned[kBlocks][2];
        float scale[kScaled ? kGroups : 1][2];
        if constexpr (kScaled) {
            float most[2] = {0.0f, 0.0f};
#pragma unroll
            for (int g = 0; g < kGroups; g++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    scale[g][h] = scale_at(loader, stage, 1, 8 * h, g);
                    most[h] = fmaxf(most[h], scale[g][h]);
                }
            watch_products(p, most);
        }
        if constexpr (kZeros)
#pragma unroll
            for (int g = 0; g < kGroups; g++) {
                const float low = scale_at(loader, stage, 3, 0, g), high = scale_at(loader, stage, 3, 8, g);
#pragma unroll
                for (int b = 0; b < kBlocks; b++)
#pragma unroll
                    for (int i = 0; i < 2; i++) zero_sum[b][i][g] += p[b][i] * low + p[b][2 + i] * high;
            }
        int group = -1;
#pragma unroll
        for (int n = 0; n < kPairs; n++) {
            const int chunk = 2 * n + quant::value_chunk<kFormat>(lane);
            uint32_t f[4];
            ptx::ldmatrix_transposed(f, ptx::shared_address(place_of(loader.values(stage), quant::value_row<kFormat>(lane),
                                                                    chunk < kRowChunks ? chunk : kRowChunks - 1)));
#pragma unroll
            for (int i = 0; i < kPairSteps; i++) {
                const int tile = n * kPairSteps + i;
                if (tile >= kSteps) break;
                const int g = kZeros ? tile / 2 * 32 / kGroupSize : 0;
                if (g != group) {
                    group = g;
                    turn(turned, p, scale[kScaled ? g : 0]);
                }
                uint32_t a[4];
                quant::value_step<kFormat>(a, f, i);
#pragma unroll
                for (int b = 0; b < kBlocks; b++) ptx::mma_16x8x16<Operand>(acc_o[b][tile], a, turned[b][0], turned[b][1]);
            }
        }
    }
    // Pᵀ as a B operand, times the scale of each token's V
    TILE_DEVICE void turn(uint32_t (&turned)[kBlocks][2], const float (&p)[kBlocks][4], const float (&scale)[2]) const {
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = p[b][2 * h], y = p[b][2 * h + 1];
                if constexpr (kScaled) {
                    x *= scale[h] * up[b][0];
                    y *= scale[h] * up[b][1];
                }
                turned[b][h] = ptx::transpose_matrix(pack<Operand>(x, y));
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
                    const float down = inverse_power(up[b][i]);
                    float zero[kGroups];
                    if constexpr (kZeros)
#pragma unroll
                        for (int g = 0; g < kGroups; g++) zero[g] = row_sum(zero_sum[b][i][g]);
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
