// The end of a tile for the sixteen rows of a warp's fragment: what O is to be multiplied with, the sink, the LSE, and
// where the rows of O lie. Both forward kernels end so.
#pragma once
#include "prefill/scoring.cuh"

struct Closing {
    float inverse[2];      // what row h of O is multiplied with: 1 / l and the rest
    bool exists[2];        // is row h one of the sequence's?
    Global<Out> rows[2];   // where row h goes
};

// rows: as Scoring has it. done: the tile; of: its softmax state. Writes the LSE, and zeroes what rows past the length
// of their block have in acc_o. kAddresses: whether `rows` of the result is wanted
template <bool kAddresses, class Rows>
TILE_DEVICE Closing close_rows(const Rows& rows, const WorkTile& done, const warp::RowState& of,
                               float (&acc_o)[kValueDim / 2]) {
    const ForwardArgs& args = rows.args;
    Closing closing;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = rows.row_of(done, h), token = row / kPack, head = rows.head_of(done, row);
        const bool exists = closing.exists[h] = token < done.seqlen_q;
        float sum = warp::row_sum(of.sum[h]), weight = 1.0f;
        float max = fmaxf(of.max[h], kLowest);  // finite, even if the row saw no key: join_sink wants that
        if (kLengths && exists && !row_there(args.lists, done, token)) {
            sum = 0.0f;
            max = kLowest;
            for (int i = 0; i < kValueDim / 4; i++) acc_o[i / 2 * 4 + 2 * h + i % 2] = 0.0f;
        }
        if (args.scores.sinks && exists) weight = args.scores.join_sink(head, max, sum);
        closing.inverse[h] = sum == 0.0f ? 0.0f : weight * ptx::reciprocal(sum) * (kFp8 ? done.descale_v : 1.0f);
        if (args.lse && exists && warp::lane() % 4 == 0)
            Global<float>{args.lse}[done.sequence * args.lse_batch + head * args.lse_head + done.q_start + token] =
                sum == 0.0f ? -INFINITY : (max + ptx::log2(sum)) * kLn2;
        if constexpr (kAddresses)
            closing.rows[h] = Global<Out>{static_cast<Out*>(args.o)} + (done.sequence * args.o_strides.batch +
                              (done.q_start + token) * args.o_strides.row + head * args.o_strides.head +
                              TileValues(done).first);
    }
    return closing;
}
// O / l element by element, for rows that do not begin at multiples of 16 bytes; columns: as many as the tile has
template <class T, int kSize>
TILE_DEVICE void store_elements(const Closing& to, const float (&acc_o)[kSize], int columns) {
#pragma unroll
    for (int i = 0; i < kSize; i++) {
        const int column = i / 4 * 8 + warp::fragment_column() + i % 2;
        if (to.exists[i / 2 % 2] && column < columns) to.rows[i / 2 % 2][column] = from_float<T>(acc_o[i]);
    }
}
