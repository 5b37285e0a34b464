// The streaming body over float32 pages. As in stream.cuh, tokens fill the sixteen rows of a product and query rows its
// eight columns:
//     Sᵀ (16 × rows) = K Qᵀ,   P = 2^(S − m),   Oᵀ (D × rows) += Vᵀ Pᵀ
//
// Products are three of TF32 each, and their sums go by sixteen channels, or sixteen tokens (tile/tf32.cuh).
//
// The depth of a product is eight. K is read by ldmatrix, which gives a lane four bytes: one channel. In Vᵀ Pᵀ, where
// no instruction transposes 32-bit values, tokens 2t and 2t + 1 take the places t and t + 4 of the depth, and a lane
// reads four channels of each of these tokens in one load, of different banks than the lanes beside it.
#pragma once
#include "decode/rows.cuh"
#include "tile/tf32.cuh"

static_assert(kFormat == Format::bits32 && kTiles == 1, "float32 pages");
static_assert(KeyRows::kPanelBytes == 128 && ValueRows::kPanelBytes == 128, "panels of 32 channels");

using tf32::Part, tf32::Split, tf32::SplitStep;

struct Stream32 : Rows {
    // Row 8b + lane / 4, channels 4j + lane % 4 at [b][j]; where they would take too many registers, in shared memory
    uint32_t rQ[kQueryBytes ? 1 : kBlocks][kQueryBytes ? 1 : 4 * kSteps];
    const Shared<uint32_t> sQ;
    // Where this lane reads within a stage, the keys' with the address of shared memory; shuffled as in stream.cuh
    const uint32_t keys_at, values_at;

    TILE_DEVICE Stream32(const DecodeArgs& a, const Loader& loader)
        : Rows(a), sQ(queries_of_warp(loader.rank) + lane / 4 * kQueryRow * 4 + lane % 4 * 4),
          keys_at(ptx::shuffle(loader.window + KeyRows::place_of(lane % 16, lane / 16, loader.rank), lane)),
          values_at(ptx::shuffle(ValueRows::place_of(lane % 4 * 2, lane / 4, loader.rank), lane)) {}

    TILE_DEVICE void begin(const DecodeItem& item, int length, Span span) {
        begin_rows(item, length, span);
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            const int n = 8 * b + lane / 4;
            const Global<const Element> gQ = query_row(item, n);
            const bool exists = n < item.rows && scale() != 0.0f;  // 0 times Q is 0, and so are the scores
#pragma unroll
            for (int j = 0; j < 4 * kSteps; j++) {
                const uint32_t x = exists ? as_bits(to_float(Element(gQ[4 * j + lane % 4]))) : 0;
                if constexpr (kQueryBytes > 0) sQ[8 * b * kQueryRow + 4 * j] = x;
                else rQ[b][j] = x;
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (factor[b][i] == 0.0f) factor[b][i] = 1e-37f;  // hidden scores are −∞, and 0 · −∞ is NaN
        }
        begin_piece();
    }

    TILE_DEVICE void step(const Loader& loader, int stage, int first_token, Span span) {
        ScoreTiles s;
        scores(s, keys_at + loader.keys(stage));
        cap(s);
        if (!all_see(first_token)) {
            mask(s, first_token, span);
            if (first_token < span.begin || first_token + kChunk > span.end)
                loader.clear_outside(stage, first_token, span);
        }
        ScoreTiles p;
        float sums[kBlocks][2];
        weigh(p, sums, s);
        if (ptx::any(too_large(p))) {
            raise_references(p, s);
            weigh(p, sums, s);
        }
#pragma unroll
        for (int b = 0; b < kBlocks; b++) sum[b][0] = sums[b][0], sum[b][1] = sums[b][1];
        add_values(p, values_at + loader.values(stage));
    }

    // S = K Qᵀ, still to be soft-capped and multiplied by last_factor
    TILE_DEVICE void scores(ScoreTiles& s, uint32_t keys) const {
#pragma unroll
        for (int b = 0; b < kBlocks; b++) warp::zero(s[0][b]);
#pragma unroll
        for (int n = 0; n < kSteps; n++) {
            Part part[kBlocks];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t f[4];
                ptx::ldmatrix(f, KeyRows::place_further(keys, 2 * n + k, 0));
                const SplitStep a(f[0], f[1], f[2], f[3]);
#pragma unroll
                for (int b = 0; b < kBlocks; b++) {
                    const int j = 2 * (2 * n + k);
                    part[b].multiply(a, query(b, j), query(b, j + 1));
                }
            }
#pragma unroll
            for (int b = 0; b < kBlocks; b++) part[b].add_to(s[0][b]);
        }
    }
    // Every lane reads what it has written itself.
    TILE_DEVICE Split query(int b, int j) const {
        if constexpr (kQueryBytes > 0) return Split(sQ[8 * b * kQueryRow + 4 * j]);
        else return Split(rQ[b][j]);
    }

    // P against the references as they stand, and the row sums with it
    TILE_DEVICE void weigh(ScoreTiles& p, float (&sums)[kBlocks][2], const ScoreTiles& s) const {
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            sums[b][0] = sum[b][0], sums[b][1] = sum[b][1];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                p[0][b][j] = ptx::exp2(ptx::mad(s[0][b][j], last_factor(b, j % 2), -max[b][j % 2]));
                sums[b][j % 2] += p[0][b][j];
            }
        }
    }
    // Does some weight reach 2^kSlack? NaN counts.
    static TILE_DEVICE bool too_large(float p) { return !(p < 256.0f); }
    static TILE_DEVICE bool too_large(const ScoreTiles& p) {
        bool found = false;
#pragma unroll
        for (int j = 0; j < 4 * kBlocks; j++) found |= too_large(p[0][j / 4][j % 4]);
        return found;
    }
    // Moves the references that are too small up to their row's maximum, where P is then 1
    TILE_DEVICE void raise_references(const ScoreTiles& p, const ScoreTiles& s) {
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool found = too_large(p[0][b][i]) || too_large(p[0][b][2 + i]);
                const bool moves = ptx::ballot(found) & 0x11111111u << lane % 4;
                const float to = row_max(fmaxf(ptx::multiply(s[0][b][i], last_factor(b, i)),
                                               ptx::multiply(s[0][b][2 + i], last_factor(b, i))));
                move_reference(b, i, moves && to > max[b][i] ? to : max[b][i]);
            }
    }

    // Oᵀ += Vᵀ Pᵀ
    TILE_DEVICE void add_values(const ScoreTiles& p, uint32_t values) {
        Split weights[kBlocks][2][2];
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int k = 0; k < 2; k++) {  // tokens 8k …: the upper and the lower halves of the words are transposed
                const uint32_t x = as_bits(p[0][b][2 * k]), y = as_bits(p[0][b][2 * k + 1]);
                const uint32_t upper = ptx::transpose_matrix(ptx::permute_bytes(x, y, 0x7632)),
                               lower = ptx::transpose_matrix(ptx::permute_bytes(x, y, 0x5410));
                weights[b][k][0] = Split(ptx::permute_bytes(lower, upper, 0x5410));
                weights[b][k][1] = Split(ptx::permute_bytes(lower, upper, 0x7632));
            }
        constexpr int kRow = ValueRows::kPanelBytes;
#pragma unroll
        for (int panel = 0; panel < kValueDim / 32; panel++) {
            Part part[kBlocks][2];  // of two tiles of sixteen channels
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint32_t at = values + panel * (kBox * kRow) + 8 * k * kRow;
                const Vector16 even = Shared<Vector16>(at)[0], odd = Shared<Vector16>((at ^ 16) + kRow)[0];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const SplitStep a(even.word[2 * n], even.word[2 * n + 1], odd.word[2 * n], odd.word[2 * n + 1]);
#pragma unroll
                    for (int b = 0; b < kBlocks; b++) part[b][n].multiply(a, weights[b][k][0], weights[b][k][1]);
                }
            }
#pragma unroll
            for (int b = 0; b < kBlocks; b++)
#pragma unroll
                for (int n = 0; n < 2; n++) part[b][n].add_to(acc_o[b][2 * panel + n]);
        }
    }
};
