// What comes before and after the backward by mma.sync: a block takes a tile of query rows of a head.
//
// before: −LSE in base 2 and −delta, delta = rowsum(dO ∘ O) − dLSE, and zeros where dQ is added up.
// after: dQ, scaled and rounded, from its sum, which lies in the order of fragments.
// Constants: those of backward_mma.cu.
#include "backward/mma_layout.cuh"

// A tile of queries by its slot, or of packed sequences the one that has the slot; row is −1 if there is none
struct QueryTile {
    int sequence, q_start, seqlen_q, row, head;
    int64_t number;

    TILE_DEVICE explicit QueryTile(const BackwardArgs& args)
        : sequence(blockIdx.z), q_start(0), seqlen_q(args.seqlen_q), row(blockIdx.x * kTileQ), head(blockIdx.y),
          number((int64_t(blockIdx.z) * args.heads + head) * args.q_tiles + blockIdx.x) {}
};

extern "C" __global__ void __launch_bounds__(kThreads) before_mma(const __grid_constant__ BackwardArgs args) {
    const QueryTile tile(args);
    const Global<Vector16> sum{reinterpret_cast<Vector16*>(args.dq_sum + tile.number * (kTileQ * kHeadDim))};
#pragma unroll
    for (int i = 0; i < kTileQ * kHeadDim / 4; i += kThreads) sum[i + threadIdx.x] = Vector16{};
    const Global<float> stats{args.stats + tile.number * 2 * kTileQ};
    constexpr int kLanes = kHeadDim / 8 < 32 ? 16 : 32, kRows = kThreads / kLanes;  // lanes of a row, rows together
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int r = 0; r < kTileQ; r += kRows) {
        const int inside = r + threadIdx.x / kLanes, row = tile.row + inside;
        const bool is = row < tile.seqlen_q;
        float delta = 0.0f;
        if (is) {
            const auto at = [&](const void* base, const Strides& strides) {
                return Global<const Element>{row_at(args, static_cast<const Element*>(base), strides, tile.sequence, tile.q_start + row, tile.head)};
            };
            const Global<const Element> o = at(args.o, args.o_strides), d_o = at(args.d_o, args.do_strides);
            if constexpr (kVectors) {
#pragma unroll
                for (int chunk = lane; chunk < kColumns / 8; chunk += kLanes) {
                    const Vector16 x = o.as<const Vector16>()[chunk], y = d_o.as<const Vector16>()[chunk];
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        delta = ptx::mad(unpack<Element>(x.word[i / 2], i % 2), unpack<Element>(y.word[i / 2], i % 2), delta);
                }
            } else {
                for (int column = lane; column < kColumns; column += kLanes)
                    delta = ptx::mad(to_float(Element(o[column])), to_float(Element(d_o[column])), delta);
            }
        }
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) delta += ptx::shuffle_xor(delta, mask);
        if (lane == 0) {
            // Rows that do not exist, or see nothing, have no weights.
            float less = -INFINITY;
            if (is) {
                const int64_t lse_at = (args.starts_q ? 0 : tile.sequence * args.lse_strides.batch) + (tile.q_start + row) * args.lse_strides.row + tile.head * args.lse_strides.head;
                const float lse = Global<const float>{args.lse}[lse_at];
                if (lse != -INFINITY) less = -lse * kLog2e;
                if (args.d_lse) {
                    const int64_t at = (args.starts_q ? 0 : tile.sequence * args.d_lse_strides.batch) + (tile.q_start + row) * args.d_lse_strides.row + tile.head * args.d_lse_strides.head;
                    delta -= Global<const float>{args.d_lse}[at];
                }
            }
            stats[inside] = less;
            stats[kTileQ + inside] = less == -INFINITY ? 0.0f : -delta;
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) after_mma(const __grid_constant__ BackwardArgs args) {
    const QueryTile tile(args);
    const int warp = threadIdx.x / 32;
    const Global<const float> sum{args.dq_sum + tile.number * (kTileQ * kHeadDim)};
    float dq[kDqM][kDqSize];
#pragma unroll
    for (int m = 0; m < kDqM; m++)
#pragma unroll
        for (int n = 0; n < kDqSize / 4; n++) {
            const Global<const float> from = sum + dq_place(warp, m, n);
            if constexpr (kNewCard) {
                const Vector16 four = from.as<const Vector16>()[0];
#pragma unroll
                for (int i = 0; i < 4; i++) dq[m][4 * n + i] = as_float(four.word[i]) * args.scale;
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) dq[m][4 * n + i] = from[i * kDqApart] * args.scale;
            }
        }
#pragma unroll
    for (int m = 0; m < kDqM; m++) {
        Global<Element> rows[2];
        bool exists[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = tile.row + dq_row(warp) + 16 * m + warp::fragment_row(h);
            exists[h] = row < tile.seqlen_q;
            rows[h] = Global<Element>{row_at(args, static_cast<Element*>(args.dq), args.dq_strides, tile.sequence, tile.q_start + row, tile.head)} + dq_column(warp);
        }
        store_gradient(rows, exists, dq[m], kColumns - dq_column(warp));
    }
}
