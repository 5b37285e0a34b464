// What the forward kernels do to the scores of the block at hand before the softmax, and which of its keys their rows
// see: by windows, lengths and lists, and by a user's functions. forward.cu says what the constants mean.
#pragma once
#include "prefill/blocks.cuh"
#include "tile/lazy.cuh"

// A row's reference before its first key where a function may give scores of −inf. It is finite and below any score:
// −inf less −inf would be NaN.
constexpr float kNoReference = -1.7014118e38f;
// log2 of the largest P, and the lane sum up to which the lazy softmax keeps its reference: tile/lazy.cuh. P: its type
// as an operand
template <class P> constexpr int lift_of() { return sizeof(P) > 1 ? 0 : kExact ? 8 : 3; }
template <class P> constexpr int witness_of() { return sizeof(P) > 1 ? 256 : 448; }

// Looking up all keys of a block at once would take a register each.
constexpr int kSeenAtOnce = !Function::kByKey ? kTileKv / 8 : kWidest > 128 ? 2 : 8;

// Self has args, function and tile(), the tile at hand; warp_row(), the first of the sixteen rows of the tile that the
// warp's fragments hold; key_of(box), the first key of box `box` of the block at hand, past every key if these rows do
// not see the box; and there_of(box), the keys of the box that are there, which are fewer than the box has rows only
// where its block has a length.
template <class Self> struct Scoring {
    using Fragment = float[kTileKv / 2];
    static constexpr bool kFine = sizeof(Element) == 4;  // scores are computed to float32's own precision
    TILE_DEVICE const Self& self() const { return static_cast<const Self&>(*this); }
    TILE_DEVICE int row_of(const WorkTile& tile, int h) const {
        return tile.row + self().warp_row() + warp::fragment_row(h);
    }
    static TILE_DEVICE int head_of(const WorkTile& tile, int row) { return tile.head * kPack + row % kPack; }
    // Runs of keys that follow each other
    static constexpr int kRun = kListed ? kBoxRows : kTileKv, kRuns = kTileKv / kRun;
    using Run = float[kRun / 2];
    static TILE_DEVICE Run& run_of(Fragment& s, int run) { return reinterpret_cast<Run&>(s[run * kRun / 2]); }

    // The last key that may be looked up; a sequence without keys looks up its first, and sees nothing
    static TILE_DEVICE int last_key(const WorkTile& tile) { return tile.seqlen_k > 0 ? tile.seqlen_k - 1 : 0; }

    // What a function is told of one of a lane's rows
    struct Row {
        int token, head;
        Visible seen;
        float position;
    };
    TILE_DEVICE Row row_at(const WorkTile& tile, int h) const {
        const int row = row_of(tile, h), last = tile.seqlen_q - 1, token = row / kPack < last ? row / kPack : last;
        return {token, head_of(tile, row), keys_of(self().args, tile, token).visible(), float(token)};
    }
    // Which keys of the block the lane's two rows see by the function and the window, a bit per column. It needs no
    // score, so it runs while the tensor cores compute Q Kᵀ.
    TILE_DEVICE void see(uint32_t (&bits)[2]) const {
        const WorkTile tile = self().tile();
        const int column = ptx::just_in_time(warp::fragment_column()), last = last_key(tile);
        const Row rows[2] = {row_at(tile, 0), row_at(tile, 1)};
        bits[0] = bits[1] = 0;
#pragma unroll kSeenAtOnce
        for (int eight = 0; eight < kTileKv / 8; eight++) {
            const int box = eight * 8 / kBoxRows, inside = eight * 8 % kBoxRows + column;  // inside: of the box
            const int first = self().key_of(box) + inside, there = self().there_of(box);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = first + i, k = Function::kByKey && key > last ? last : key;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const bool asked = self().function.mask(tile.sequence, rows[h].head, rows[h].token, k,
                                                            rows[h].position, float(k), rows[h].token, 0, k, 0);
                    const bool seen = rows[h].seen.has(key) & (!kLengths || inside + i < there);
                    if (seen & asked) bits[h] |= 1u << (2 * eight + i);
                }
            }
        }
    }
    // S = −inf where the bits say so
    static TILE_DEVICE void hide(Fragment& acc_s, const uint32_t (&bits)[2]) {
#pragma unroll
        for (int j = 0; j < kTileKv / 2; j++)
            if (!(bits[j / 2 % 2] >> (j / 4 * 2 + j % 2) & 1)) acc_s[j] = -INFINITY;
    }

    // Asks for what the score will look up, so that it comes while the tensor cores compute Q Kᵀ. A lane asks for one
    // row and eight columns of its own; together the lanes of a warp reach every line of a table that moves on with
    // q − k.
    TILE_DEVICE void touch() const {
        const WorkTile tile = self().tile();
        const int q = row_of(tile, 0), eight = warp::lane() * (kTileKv / 8) / 32;
        const int k = self().key_of(eight * 8 / kBoxRows) + eight * 8 % kBoxRows;
        self().function.touch(tile.sequence, head_of(tile, q), q / kPack, k, 0.0f, 0.0f, q / kPack, 0, k, 0);
    }

    // Turns S into base-2 logits, soft-capped, with ALiBi's bias; or into what the user's function makes of it.
    // kMasked: the block may hold keys past the last one, which must not be looked up. kInside: all rows of the tile
    // exist. kSide: where the function may take the keys of the block to lie.
    template <bool kMasked, bool kInside, int kSide = kAround> TILE_DEVICE void score(Fragment& s) const {
        if constexpr (Function::kScore) {
            const WorkTile tile = self().tile();
            const float scale = self().args.scores.scale_log2 * kLn2 * (kFp8 ? tile.descale_qk : 1.0f);
            const int column = ptx::just_in_time(warp::fragment_column()), last = last_key(tile);
            Row rows[2] = {row_at(tile, 0), row_at(tile, 1)};
            constexpr bool kApart = kInside && kPack == 1, kClamped = kMasked && Function::kByKey;
            if constexpr (kApart) rows[0].token = row_of(tile, 0);  // not clamped: the other row is eight further on
#pragma unroll
            for (int run = 0; run < kRuns; run++) {
                const int first = self().key_of(run) + column;
                Run& values = run_of(s, run);
#pragma unroll
                for (int j = 0; j < kRun / 2; j++) {
                    const int inside = j / 4 * 8 + j % 2, h = j / 2 % 2, key = first + inside;
                    const int dq = kApart ? 8 * h : 0, q0 = rows[kApart ? 0 : h].token;
                    const int dk = kClamped ? 0 : inside, k0 = !kClamped ? first : key > last ? last : key;
                    values[j] = self().function.template score<kSide>(
                        values[j], scale, tile.sequence, rows[h].head, q0 + dq, k0 + dk, rows[h].position,
                        float(first) + float(inside), q0, dq, k0, dk);
                }
            }
            return;
        }
        if constexpr (Rule::kChanges) {
            const float descale = kFp8 ? self().tile().descale_qk : 1.0f;
            Rule::apply<kFine>(s, self().args.scores, Rule::first_factor(self().args.scores) * descale);
        }
        if constexpr (Rule::kAlibi) {
            const WorkTile tile = self().tile();
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = row_of(tile, h), position = position_of(row / kPack, tile.seqlen_q, tile.seqlen_k);
                const float slope = self().args.scores.slope(tile.sequence, head_of(tile, row));
#pragma unroll
                for (int run = 0; run < kRuns; run++)
                    warp::add_alibi(run_of(s, run), h, self().key_of(run), position, slope);
            }
        }
    }

    // ---- blocks whose keys all lie on one side of the rows ----------------------------------------------------------
    // Are scores computed otherwise there? Is a row's score a line? Wider heads leave no registers for it.
    static constexpr bool kSided = kWidest <= 128 && (Function::kScore ? Function::kSided : Rule::kAlibi);
    template <int kSide>
    static constexpr bool kLine = kSide != kAround && (Function::kScore ? Function::kLine[kSide] : Rule::kAlibi);

    // What is the same for all blocks of a tile. first, last: among the keys, the positions of the warp's rows. lines:
    // of what score() gives, for the lazy softmax in base 2, by side and for each of a lane's two rows; they begin at
    // key `from`, the one next to the row
    struct Sides {
        int first, last;
        Line lines[3][2];
        float from[2];
    };
    TILE_DEVICE void find_sides(Sides& sides) const {
        const WorkTile tile = self().tile();
        const int row = tile.row + ptx::uniform(self().warp_row()), last = tile.seqlen_q - 1;
        const int first_token = row / kPack, last_token = (row + 15) / kPack;
        // A function counts rows from 0, ALiBi from where they stand among the keys.
        const int shift = Function::kScore ? 0 : tile.seqlen_k - tile.seqlen_q;
        sides.first = (first_token < last ? first_token : last) + shift;
        sides.last = (last_token < last ? last_token : last) + shift;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if constexpr (kLine<kBefore>) sides.lines[kBefore][h] = line_of<kBefore>(tile, h, sides.from[h]);
            if constexpr (kLine<kAfter>) sides.lines[kAfter][h] = line_of<kAfter>(tile, h, sides.from[h]);
        }
    }
    template <int kSide> TILE_DEVICE Line line_of(const WorkTile& tile, int h, float& from) const {
        const Scores& scores = self().args.scores;
        const float descale = kFp8 ? tile.descale_qk : 1.0f;
        if constexpr (Function::kScore) {
            const Row row = row_at(tile, h);
            const int last = last_key(tile), key = row.token < last ? row.token : last;
            from = float(key);
            const Line line = self().function.template line<kSide>(scores.scale_log2 * kLn2 * descale, tile.sequence,
                                                                   row.head, row.token, key, row.position, from,
                                                                   row.token, 0, key, 0);
            constexpr float kUnitOfLogits = kExact ? 1.0f : kLog2e;
            return {line.factor * kUnitOfLogits, line.step * kUnitOfLogits, line.base * kUnitOfLogits};
        } else {
            const int row = row_of(tile, h);
            const float slope = scores.slope(tile.sequence, head_of(tile, row));
            from = float(position_of(row / kPack, tile.seqlen_q, tile.seqlen_k));
            return {Rule::last_factor(scores, Rule::first_factor(scores) * descale),
                    kSide == kBefore ? slope : -slope, 0.0f};
        }
    }
    // Calls do_it with the side of the block at hand, which every row sees whole, as a constant
    template <class Do> TILE_DEVICE void at_side(const Sides& sides, Do do_it) const {
        int low = self().key_of(0), high = low;
#pragma unroll
        for (int run = 1; run < kRuns; run++) {
            const int key = self().key_of(run);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        if (high + kRun - 1 <= sides.first) do_it(SideConstant<kBefore>());
        else if (low > sides.last) do_it(SideConstant<kAfter>());
        else do_it(SideConstant<kAround>());
    }
    // Scores on their lines, less `less` of their row
    template <int kSide> TILE_DEVICE void follow(Fragment& s, const Sides& sides, const float (&less)[2]) const {
        if constexpr (!Function::kScore) {
            const float descale = kFp8 ? self().tile().descale_qk : 1.0f;
            Rule::apply_inner<kFine>(s, Rule::first_factor(self().args.scores) * descale);
        }
        const int column = ptx::just_in_time(warp::fragment_column());
#pragma unroll
        for (int run = 0; run < kRuns; run++) {
            const float key = float(self().key_of(run) + column + warp::kLineBegin<kSide, kRun / 2>);
            Line lines[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Line& line = sides.lines[kSide][h];
                lines[h] = {line.factor, line.step, ptx::mad(line.step, key - sides.from[h], line.base - less[h])};
            }
            warp::follow_lines<kSide>(run_of(s, run), lines);
        }
    }
    // score() of a block that every row sees whole, as it lies
    template <bool kInside> TILE_DEVICE void score_by_side(Fragment& s, const Sides& sides) const {
        const float none[2] = {0.0f, 0.0f};
        at_side(sides, [&](auto side) {
            if constexpr (kLine<side.kValue>) follow<side.kValue>(s, sides, none);
            else score<false, kInside, side.kValue>(s);
        });
    }
    // The same and P = 2^(score − m) in place of S, with this lane's sums. On a line that takes one multiply-add more
    // than plain scores do, the reference being part of the line.
    template <bool kInside>
    TILE_DEVICE void exponentiate_by_side(Fragment& s, float (&sum)[2], const Sides& sides, const warp::RowState& state,
                                          float scale_log2) const {
        at_side(sides, [&](auto side) {
            if constexpr (kLine<side.kValue>) {
                follow<side.kValue>(s, sides, state.max);
                warp::exponentiate(s, sum);
            } else {
                score<false, kInside, side.kValue>(s);
                warp::exponentiate(s, sum, state, scale_log2);
            }
        });
    }
    // S = −inf where a row does not see the key
    TILE_DEVICE void mask(Fragment& acc_s) const {
        const WorkTile tile = self().tile();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Visible seen = keys_of(self().args, tile, row_of(tile, h) / kPack).visible();
            if constexpr (kListed) mask_boxes(acc_s, h, seen);
            else warp::mask_row(acc_s, h, self().key_of(0), seen);
        }
    }
    TILE_DEVICE void mask_boxes(Fragment& acc_s, int h, const Visible& seen) const {
        constexpr int kEach = kBoxRows / 4;  // columns of a lane's row in a box
#pragma unroll
        for (int box = 0; box < kBoxes; box++) {
            const int inside = warp::fragment_column(), there = self().there_of(box);
            const int before = self().key_of(box) + inside - seen.first;
#pragma unroll
            for (int j = 0; j < kEach; j++) {
                const int column = j / 2 * 8 + j % 2;
                const bool hidden = uint32_t(before + column) >= uint32_t(seen.count);
                if (hidden || (kLengths && inside + column >= there))
                    acc_s[(box * kEach + j) / 2 * 4 + 2 * h + j % 2] = -INFINITY;
            }
        }
    }
    TILE_DEVICE bool all_inside() const {
        const WorkTile tile = self().tile();
        return tile.row + kTileQ <= tile.seqlen_q * kPack;
    }
};
