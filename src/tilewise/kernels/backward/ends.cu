// What comes before and after the Hopper backward: a block takes a tile of query rows of a head.
//
// before: what S and dP begin with, −LSE and −delta = dLSE − rowsum(dO ∘ O), and zeros for dQ's sum and for the turns.
// after: dQ from its sum, which lies in the order of fragments.
// Constants: Element, Index; kHeadDim, kColumns: of Q, padded and not; kValueDim, kValueColumns: of O; kTileQ, kPacked;
// kInitial: −LSE in the units of S, or in those of base-2 logits; kDqColumns, kInTurn: as the backward's.
#include "backward/query_tile.cuh"
#include "tile/mma.cuh"

using Share = DqShare<kHeadDim, kDqColumns>;
constexpr int kShares = 2, kDqFloats = kTileQ * Share::kColumns;
constexpr int kBeforeThreads = 256, kAfterThreads = 128 * kShares;

// Blocks per multiprocessor: without a number ptxas aims at eight of them, and spills.
extern "C" __global__ void __launch_bounds__(kBeforeThreads, kValueDim > 128 ? 2 : 4)
    before(const __grid_constant__ BackwardArgs args) {
    const QueryTile tile(args, false);
    // Lanes of a row, a power of 2, and rows together
    constexpr int kLanes = kValueDim > 128 ? 32 : kValueDim / 8, kRows = kBeforeThreads / kLanes;
    const int lane = threadIdx.x % kLanes, row0 = threadIdx.x / kLanes;
    const auto at = [&](const void* base, const Strides& strides) {
        return Global<const Element>{static_cast<const Element*>(base)} +
               (tile.batch * strides.batch + (tile.first + row0) * strides.row + tile.head * strides.head + lane * 8);
    };
    const Global<const Element> of_o = at(args.o, args.o_strides), of_do = at(args.d_o, args.do_strides);
    Vector16 o[kTileQ / kRows], d[kTileQ / kRows];
#pragma unroll
    for (int r = 0; r < kTileQ / kRows; r++) {
        o[r] = d[r] = Vector16{};
        if (r * kRows + row0 < tile.rows && lane * 8 < kValueColumns) {
            o[r] = (of_o + r * kRows * args.o_strides.row).template as<const Vector16>()[0];
            d[r] = (of_do + r * kRows * args.do_strides.row).template as<const Vector16>()[0];
        }
    }
    const Global<Vector16> sum{reinterpret_cast<Vector16*>(args.dq_sum + tile.number * (kTileQ * kHeadDim))};
#pragma unroll
    for (int i = 0; i < kTileQ * kHeadDim / 4; i += kBeforeThreads) sum[i + threadIdx.x] = Vector16{};
    if (kInTurn && threadIdx.x < kShares) Global<int>{args.turns}[tile.number * kShares + threadIdx.x] = 0;
    // −dLSE and −LSE of a row. Rows that do not exist, and those that see no key, have weights of 0.
    const Global<float> stats{args.stats + tile.number * 2 * kTileQ};
    float d_lse = 0.0f;
    if (threadIdx.x < kTileQ) {
        const int row = threadIdx.x;
        float less = -INFINITY;
        const auto place = [&](const Strides& strides) {
            return tile.batch * strides.batch + (tile.first + row) * strides.row + tile.head * strides.head;
        };
        if (row < tile.rows) {
            const float lse = Global<const float>{args.lse}[place(args.lse_strides)];
            less = lse == -INFINITY ? -INFINITY : -lse * (kInitial ? 1.0f / args.scale : kLog2e);
            if (args.d_lse && lse != -INFINITY) d_lse = Global<const float>{args.d_lse}[place(args.d_lse_strides)];
        }
        stats[row] = less;
    }
    const Shared<float> of_rows(0);  // dLSE
    if (args.d_lse) {
        if (threadIdx.x < kTileQ) of_rows[threadIdx.x] = d_lse;
        ptx::sync_threads();
    }
#pragma unroll
    for (int r = 0; r < kTileQ / kRows; r++) {
        float delta = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            delta = ptx::mad(unpack<Element>(o[r].word[i / 2], i % 2), unpack<Element>(d[r].word[i / 2], i % 2), delta);
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) delta += ptx::shuffle_xor(delta, mask);
        const int row = r * kRows + row0;
        if (lane == 0) stats[kTileQ + row] = (args.d_lse ? float(of_rows[row]) : 0.0f) - delta;
    }
}

// dQ's columns of a share, round by round; those from kColumns on are padding
template <int kRound = 0>
TILE_DEVICE void store_rounds(const Global<Element> (&rows)[2], const bool (&exists)[2],
                              const float (&acc)[Share::kColumns / 2], int share) {
    if constexpr (kRound < Share::kRounds) {
        constexpr int kOwn = Share::columns(kRound);
        const int first = Share::first(share, kRound);
        const Global<Element> at[2] = {rows[0] + first, rows[1] + first};
        warp::store_rows<kOwn>(at, exists, reinterpret_cast<const float (&)[kOwn / 2]>(acc[kRound * kDqColumns / 2]),
                               kColumns - first);
        store_rounds<kRound + 1>(rows, exists, acc, share);
    }
}

extern "C" __global__ void __launch_bounds__(kAfterThreads) after(const __grid_constant__ BackwardArgs args) {
    const QueryTile tile(args, true);
    ptx::wait_for_prerequisites();
    const int share = threadIdx.x / 128;
    const Global<const Vector16> sum{reinterpret_cast<const Vector16*>(
        args.dq_sum + tile.number * (kTileQ * kHeadDim) + share * kDqFloats)};
    Vector16 four[Share::kColumns / 8];
#pragma unroll
    for (int n = 0; n < Share::kColumns / 8; n++) four[n] = sum[n * 128 + threadIdx.x % 128];
    float acc[Share::kColumns / 2];
#pragma unroll
    for (int i = 0; i < Share::kColumns / 2; i++) acc[i] = as_float(four[i / 4].word[i % 4]) * args.scale;
    Global<Element> rows[2];
    bool exists[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = threadIdx.x / 32 % 4 * 16 + warp::fragment_row(h);
        exists[h] = row < tile.rows;
        rows[h] = Global<Element>{static_cast<Element*>(args.dq)} +
                  (tile.batch * args.dq_strides.batch + (tile.first + row) * args.dq_strides.row +
                   tile.head * args.dq_strides.head);
    }
    store_rounds(rows, exists, acc, share);
}
