// From S to P in the backward by mma.sync: what is done to scores, which queries see a key, and the exponentials.
#pragma once
#include "backward/mma_layout.cuh"
#include "backward/picks.cuh"

struct Scoring {
    const BackwardArgs& args;
    const Picks& picks;
    const Function& function;
    const Slope& slope_of;  // the score function's derivative by s · scale
    const KeyTile& tile;
    int query, head, key;  // the first of the tile's queries; the query head; the first of the warp's keys

    static constexpr bool kDerived = Function::kScore || !Rule::kLinear;
    static_assert(!(kDropout && Function::kScore), "a derivative has to be positive: signs tell what is dropped");

    // A user's score of s, natural, and its derivative. What does not exist looks up what the last one does.
    TILE_DEVICE void score(float& s, float& derivative, int q, int k) const {
        q = q < tile.seqlen_q ? q : tile.seqlen_q - 1;
        k = k < tile.seqlen_k ? k : tile.seqlen_k - 1;
        const float x = s;
        s = function.score(x, args.scale, tile.sequence, head, q, k, float(q), float(k), q, 0, k, 0);
        derivative = slope_of.score(x, args.scale, tile.sequence, head, q, k, float(q), float(k), q, 0, k, 0);
    }
    // Sᵀ of a warp's keys becomes Pᵀ, an A operand, and what dP is to be multiplied with goes into shared memory, from
    // row0 on: P, or P times the derivative of the score by S where that is not the scale alone; negative where the
    // weight is dropped.
    template <bool kMasked>
    TILE_DEVICE void weigh(const Fragments& s, Operand (&a)[kM], int stage, const TileDs& to, int row0) const {
        const Shared<Two> lse(kAtStats + 2 * stage * kStatBytes);
        const int column = warp::fragment_column();
        const float factor = Rule::first_factor(args.scores), cap = Rule::last_factor(args.scores, factor);
        float slope = 0.0f, distance[kM][2];
        Visible seen[kM][2];
        if constexpr (Rule::kAlibi) slope = args.scores.slope(tile.sequence, head);
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) {
            const int m = i / 2, h = i % 2, own = key + 16 * m + warp::fragment_row(h);
            if constexpr (kMasked) seen[m][h] = queries(own);
            if constexpr (Rule::kAlibi)
                distance[m][h] = float(query + column + tile.seqlen_k - tile.seqlen_q - own);
        }
        constexpr int kEights = kDepth / 8;  // of columns, per step of depth
        uint32_t drawn[kM][2][2];
#pragma unroll
        for (int k = 0; k < kTileQ / kDepth; k++) {
            Two less[kEights];
#pragma unroll
            for (int n = 0; n < kEights; n++) less[n] = lse[4 * (kEights * k + n) + column / 2];
#pragma unroll
            for (int m = 0; m < kM; m++) {
                Operand given;
                if constexpr (kDropout)
                    if (k * kDepth % 16 == 0)
                        Draws(args.dropout, tile.sequence, head)
                            .draw_transposed(drawn[m], query + k * kDepth, key + 16 * m);
#pragma unroll
                for (int r = 0; r < 2 * kEights; r++) {
                    const int i = 2 * kEights * k + r, h = r % 2, along = 8 * (kEights * k + r / 2);
                    float p[2], derived[2];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float x = s[m][2 * i + j], derivative = 1.0f;
                        const int q = query + column + along + j, own = key + 16 * m + warp::fragment_row(h);
                        if constexpr (Function::kScore) {
                            score(x, derivative, q, own);
                            x = ptx::mad(x, kLog2e, less[r / 2].of[j]);
                        } else if constexpr (!Rule::kLinear) {
                            const float t = soft_capped<kFloats>(x, factor);
                            derivative = ptx::mad(-t, t, 1.0f);
                            x = ptx::mad(t, cap, less[r / 2].of[j]);
                        } else {
                            x = ptx::mad(x, factor, less[r / 2].of[j]);
                        }
                        if constexpr (Rule::kAlibi)
                            x = ptx::mad(-slope, fabsf(distance[m][h] + float(along + j)), x);
                        if constexpr (kMasked) {
                            bool is = seen[m][h].has(q);
                            if constexpr (kPicked)
                                if (is && q < tile.seqlen_q) is = left(q, own);
                            if (!is) x = -INFINITY;
                        }
                        p[j] = ptx::exp2(x);
                        // What the derivative is where there is no weight is not looked at: it may be NaN.
                        if constexpr (kDerived) derived[j] = p[j] == 0.0f ? 0.0f : p[j] * derivative;
                        else derived[j] = p[j];
                        if constexpr (kDropout)
                            if (!args.dropout.keeps(drawn[m][j][along / 8 % 2], h)) {
                                p[j] = 0.0f;
                                derived[j] = -derived[j];
                            }
                    }
                    set_two(a[m], i, p[0], p[1]);
                    if constexpr (kDerived || kDropout) set_two(given, i, derived[0], derived[1]);
                }
                if constexpr (kDerived || kDropout) put(to, row0 + 16 * m, k, given[k]);
                else put(to, row0 + 16 * m, k, a[m][k]);
            }
        }
    }
    // Of a pair that window and ends show: do the others too?
    TILE_DEVICE bool left(int q, int k) const {
        if (args.positions) {
            const Global<const int> positions{args.positions};
            if (positions[tile.q_start + q] - positions[tile.k_start + k] > picks.left) return false;
        }
        return is_left(picks, function, tile.sequence, head, q, k);
    }
    // The queries that see a key
    TILE_DEVICE Visible queries(int own) const {
        int end = tile.seqlen_q;
        if (args.ends && own < tile.seqlen_k) {
            const int last = Global<const int>{args.ends}[tile.k_start + own] - tile.q_start;
            end = last < end ? last : end;
        }
        return queries_of(args.scores, own, tile.seqlen_q, tile.seqlen_k, end);
    }
};
