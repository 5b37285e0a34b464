// The rows of a streaming warp: what they see, what their scores are multiplied with, and which scores are hidden.
// stream.cuh and stream32.cuh compute the scores themselves.
//
// Of the scores of sixteen tokens and eight rows a lane holds tokens g and g + 8, g = lane / 4, of rows 2t and 2t + 1,
// t = lane % 4.
#pragma once
#include "decode/piece.cuh"

constexpr float kSlack = 8.0f;  // how far, in base 2, scores may rise above the reference before it moves

struct Rows : Piece {
    const DecodeArgs& args;
    float factor[kBlocks][2];   // of S: the softmax scale and the inverse of Q's power of two; never 0
    Visible seen[kBlocks][2];
    int whole_from, whole_to;   // tokens that every row sees
    int tail_from[kBlocks][2];  // kTree: the position of the first query token of the row's sequence,
    uint32_t tree[kBlocks][2];  // and the mask of those that the row sees

    TILE_DEVICE explicit Rows(const DecodeArgs& a)
        : args(a) {}

    // The item's row that accumulator i of a block belongs to
    TILE_DEVICE int row(int block, int i) const { return 8 * block + lane % 4 * 2 + i; }
    TILE_DEVICE float scale() const { return Rule::first_factor(args.scores); }
    TILE_DEVICE float last_factor(int b, int i) const { return Rule::last_factor(args.scores, factor[b][i]); }

    TILE_DEVICE void begin_rows(const DecodeItem& item, int length, Span span) {
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
                        tree[b][i] =
                            Global<const uint32_t>{args.tree}[caller_of(args, item, at) * args.tokens + at.token];
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
    }
    // A row of Q that this lane loads, row 8b + lane / 4; the first of the item's if it has no such row
    TILE_DEVICE Global<const Element> query_row(const DecodeItem& item, int n) const {
        const DecodeRow row = row_of(args, item, n < item.rows ? n : 0);
        return {static_cast<const Element*>(args.q) + caller_of(args, item, row) * args.q_strides.batch +
                row.token * args.q_strides.row + row.head * args.q_strides.head};
    }
    TILE_DEVICE bool all_see(int first_token) const {
        return first_token >= whole_from && first_token + kChunk <= whole_to;
    }

    using ScoreTiles = float[kTiles][kBlocks][4];
    // Soft-capped where that is asked for
    TILE_DEVICE void cap(ScoreTiles& s) const {
        if constexpr (!Rule::kLinear)
#pragma unroll
            for (int j = 0; j < 4 * kBlocks * kTiles; j++) {
                float& x = s[j / 4 / kBlocks][j / 4 % kBlocks][j % 4];
                x = soft_capped<sizeof(Element) == 4>(x, factor[j / 4 % kBlocks][j % 2]);
            }
    }
    // Under a mask of query tokens every row sees up to the last one, and the mask hides keys token by token.
    TILE_DEVICE Visible seen_in(int b, int i, Span span) const {
        if constexpr (kTree) return seen_to(args, tail_from[b][i] + args.tokens - 1, span);
        else return seen[b][i];
    }
    // What a row does not see becomes −∞ once it is multiplied by last_factor.
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
};
