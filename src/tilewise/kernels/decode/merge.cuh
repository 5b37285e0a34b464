// From a streaming warp's O, m and l to the result. Rows whose keys were all in the warp's range are written out. Of
// other rows the warp leaves a state in scratch memory, and all warps merge those states in the end: states.cuh.
#pragma once
#include "decode/piece.cuh"

// A warp's state, turned from fragments into rows by way of shared memory, where the warp saved its pieces
struct Staged {
    uint32_t at;
    TILE_DEVICE explicit Staged(int rank) : at(fold_of_warp(rank)) {}
    TILE_DEVICE void take(const Piece& body) const {
        const Shared<float> to(at), ml(at + kRows * kStagedRow * 4);
        const int lane = lane_here();
        ptx::sync_warp();  // all lanes have read what they saved there
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 8 * b + lane % 4 * 2 + i;
#pragma unroll
                for (int n = 0; n < 2 * kOutTiles; n++) {
                    const int channel = quant::output_channel<kFormat>(n / 2, n % 2, lane);
                    to[row * kStagedRow + channel] = body.acc_o[b][n / 2][n % 2 * 2 + i];
                }
                if (lane / 4 == 0) {
                    ml[2 * row] = body.max[b][i];
                    ml[2 * row + 1] = body.sum[b][i];
                }
            }
        ptx::sync_warp();
    }
    TILE_DEVICE void give(int row, float& max, float& sum, float (&x)[kFours][4]) const {
        const Shared<float> ml(at + kRows * kStagedRow * 4);
        const int lane = lane_here();
        max = ml[2 * row];
        sum = ml[2 * row + 1];
#pragma unroll
        for (int f = 0; f < kFours; f++) {
            if (!has_columns(f, lane)) continue;
            const Vector16 four = Shared<Vector16>(at + (row * kStagedRow + 128 * f + 4 * lane) * 4)[0];
#pragma unroll
            for (int c = 0; c < 4; c++) x[f][c] = as_float(four.word[c]);
        }
    }
};
static_assert(kRows * (kStagedRow + 2) * 4 <= kFoldBytes, "staged where pieces are saved");

// ---- the end of an item ---------------------------------------------------------------------------------------------
TILE_DEVICE void put_item(const DecodeArgs& args, const DecodeItem& item, const Staged& staged) {
    const States own = states_of(item, length_of(args, item.sequence, item.kv_head()));
#pragma unroll 1
    for (int n = 0; n < item.rows; n++) {
        float max, sum, x[kFours][4];
        staged.give(n, max, sum, x);
        const DecodeRow row = row_of(args, item, n);
        const States states = item.is(kOwn) ? own : states_of(args, row.sequence);
        if (states.count == 1) put_output(args, row, caller_of(args, item, row), max, sum, x);
        else put_state(args, state_row(args, states, item.kv_head(), item.state(), row.row), max, sum, x);
    }
}

// Empty states for an own range without tokens. A piece that its sequence does not reach yet has no state at all.
TILE_DEVICE void put_empty(const DecodeArgs& args, const DecodeItem& item) {
    const States own = states_of(item, length_of(args, item.sequence, item.kv_head()));
    if (item.state() >= own.count) return;
    const float x[kFours][4] = {};
#pragma unroll 1
    for (int n = 0; n < item.rows; n++) {
        const DecodeRow row = row_of(args, item, n);
        if (own.count == 1) put_output(args, row, caller_of(args, item, row), kLowest, 0.0f, x);
        else put_state(args, state_row(args, own, item.kv_head(), item.state(), row.row), kLowest, 0.0f, x);
    }
}

// merge_states of streaming warps. kRoomy: warps with more than 128 registers per thread
template <bool kRoomy = false> TILE_DEVICE void merge_all(const DecodeArgs& args, Mergers of) {
    constexpr int kAtOnce = kValueDim > 192 ? 1 : kValueDim > 96 ? 2 + kRoomy : kValueDim > 64 ? (kScaled ? 2 : 3) : 6;
    merge_states<2 * kAtOnce, (kZeros || (kScaled && kSelected) ? 1 : kAtOnce)>(args, of);
}
