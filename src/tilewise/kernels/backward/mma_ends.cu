// What comes before and after the backward by mma.sync: a block takes a tile of query rows of a head.
//
// before: −LSE in base 2 and −delta = dLSE − rowsum(dO ∘ O), and zeros for dQ's sum and for the turns.
// after: dQ, scaled and rounded, from its sum, which lies in the order of fragments.
// Constants: those of backward_mma.cu, and Index, of the starts of packed sequences.
#include "backward/mma_layout.cuh"
#include "backward/query_tile.cuh"

// Row `row` of a tile in a tensor
template <class T>
TILE_DEVICE Global<T> row_of(const QueryTile& tile, T* base, const Strides& strides, int row) {
    return Global<T>{base + (tile.batch * strides.batch + (tile.first + row) * strides.row + tile.head * strides.head)};
}

extern "C" __global__ void __launch_bounds__(kThreads) before_mma(const __grid_constant__ BackwardArgs args) {
    const QueryTile tile(args, false);
    const Global<Vector16> sum{reinterpret_cast<Vector16*>(args.dq_sum + tile.number * (kTileQ * kHeadDim))};
#pragma unroll 4
    for (int i = threadIdx.x; i < kTileQ * kHeadDim / 4; i += kThreads) sum[i] = Vector16{};
    if (kInTurn && threadIdx.x < kWarps) Global<int>{args.turns}[tile.number * kWarps + threadIdx.x] = 0;
    const Global<float> stats{args.stats + tile.number * (2 * kTileQ)};
    // Lanes of a row, rows together
    constexpr int kLanes = kHeadDim < 128 ? 8 : kHeadDim < 256 ? 16 : 32, kRows = kThreads / kLanes;
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int r = 0; r < kTileQ; r += kRows) {
        const int row = r + threadIdx.x / kLanes;
        const bool is = row < tile.rows && (kTileQ % kRows == 0 || row < kTileQ);
        float delta = 0.0f;
        if (is) {
            const auto at = [&](const void* base, const Strides& strides) {
                const auto of = row_of(tile, static_cast<const Element*>(base), strides, row);
                return of.template as<const Vector16>();
            };
            const Global<const Vector16> o = at(args.o, args.o_strides), d = at(args.d_o, args.do_strides);
#pragma unroll
            for (int chunk = lane; chunk < kColumns / kInChunk; chunk += kLanes) {
                const Vector16 x = o[chunk], y = d[chunk];
#pragma unroll
                for (int i = 0; i < kInChunk; i += 2) {
                    const int word = i * int(sizeof(Element)) / 4, other = (word + 1) % 4;  // other: of floats
                    const Two a = two_in(x.word[word], x.word[other]), b = two_in(y.word[word], y.word[other]);
                    delta = ptx::mad(a.of[1], b.of[1], ptx::mad(a.of[0], b.of[0], delta));
                }
            }
        }
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) delta += ptx::shuffle_xor(delta, mask);
        if (lane == 0 && (kTileQ % kRows == 0 || row < kTileQ)) {
            // Rows that do not exist, and those that see no key, have weights of 0.
            float less = -INFINITY;
            if (is) {
                const float lse = row_of(tile, args.lse, args.lse_strides, row)[0];
                if (lse != -INFINITY) {
                    less = -lse * kLog2e;
                    if (args.d_lse) delta -= row_of(tile, args.d_lse, args.d_lse_strides, row)[0];
                }
            }
            stats[row] = less;
            stats[kTileQ + row] = -delta;
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) after_mma(const __grid_constant__ BackwardArgs args) {
    const QueryTile tile(args, true);
    const Global<const float> sum{args.dq_sum + tile.number * (kTileQ * kHeadDim)};
#pragma unroll 1
    for (int part = threadIdx.x / 32 * kDqEach, end = part + kDqEach; part < end; part++) {
        float dq[kDqM][kDqSize];
#pragma unroll
        for (int m = 0; m < kDqM; m++)
#pragma unroll
            for (int n = 0; n < kDqSize / 4; n++) {
                const Global<const float> from = sum + dq_place(part, m, n);
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
                const int row = dq_row(part) + 16 * m + warp::fragment_row(h);
                exists[h] = row < tile.rows;
                rows[h] = row_of(tile, static_cast<Element*>(args.dq), args.dq_strides, row) + dq_column(part);
            }
            store_gradient(rows, exists, dq[m], kColumns - dq_column(part));
        }
    }
}
