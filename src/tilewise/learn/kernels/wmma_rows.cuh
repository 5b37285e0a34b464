// What the wmma kernels share: their tiles in shared memory, and the softmax of a row by a few neighbouring threads.
//
// A wmma fragment does not say which row an element is in, so S, P and O live in shared memory between the products.
// Rows are padded by 16 bytes: eight rows of a fragment then lie in different banks.
// Constants: Element (half, bf16), kHeadDim, kTileQ, kTileKv (multiples of 16). Rows must begin at multiples of 16
// bytes.
#pragma once
#include "learn/kernels/scalar.cuh"
#include "learn/kernels/wmma.cuh"

constexpr int kPitch = kHeadDim + 8, kPitchS = kTileKv + 4, kPitchP = kTileKv + 8, kPitchO = kHeadDim + 4;

// Element tiles sQ, sK, sV, sP, then float tiles sS, sO, one behind the other.
struct WmmaTiles {
    static constexpr int kK = kTileQ * kPitch * 2, kV = kK + kTileKv * kPitch * 2, kP = kV + kTileKv * kPitch * 2;
    static constexpr int kS = kP + kTileQ * kPitchP * 2, kO = kS + kTileQ * kPitchS * 4;
    Shared<Element> sQ{0}, sK{kK}, sV{kV}, sP{kP};
    Shared<float> sS{kS}, sO{kO};
};

// Loads rows first … first + kRows − 1 of a matrix, zero from row `end` on, one element per access (16 bytes at a time
// is a later rung's idea; a lone warp, whose latency no other warp hides, takes two). Several loads are in flight
// together: a load that is stored before the next begins would wait out the whole latency each time.
template <class Word, int kRows, int kThreads>
TILE_DEVICE void copy_rows_as(uint32_t tile, Global<const Element> gRows, int64_t stride, int first, int end) {
    constexpr int kSize = sizeof(Word) / sizeof(Element), kRowWords = kHeadDim / kSize, kWords = kRows * kRowWords;
    constexpr int kEach = kWords / kThreads, kBatch = kThreads == 32 ? 16 : 8;
    static_assert(kEach * kThreads == kWords && kEach % kBatch == 0, "every thread has the same number of words");
    const Shared<Word> sTile(tile);
    for (int begin = threadIdx.x; begin < kWords; begin += kBatch * kThreads) {
        Word x[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; b++) {
            const int i = begin + b * kThreads, row = i / kRowWords, word = i % kRowWords;
            x[b] = 0;
            if (first + row < end) x[b] = (gRows + (first + row) * stride).template as<const Word>()[word];
        }
#pragma unroll
        for (int b = 0; b < kBatch; b++) {
            const int i = begin + b * kThreads;
            sTile[i / kRowWords * (kPitch / kSize) + i % kRowWords] = x[b];
        }
    }
}
template <int kRows, int kThreads>
TILE_DEVICE void copy_rows(uint32_t tile, Global<const Element> gRows, int64_t stride, int first, int end) {
    if constexpr (kThreads == 32) copy_rows_as<uint32_t, kRows, kThreads>(tile, gRows, stride, first, end);
    else copy_rows_as<uint16_t, kRows, kThreads>(tile, gRows, stride, first, end);
}
// By cp.async, 16 bytes per access, into the open group
template <int kRows, int kThreads>
TILE_DEVICE void copy_rows_async(uint32_t tile, Global<const Element> gRows, int64_t stride, int first, int end) {
    const Shared<Vector16> sTile(tile);
    for (int i = threadIdx.x; i < kRows * (kHeadDim / 8); i += kThreads) {
        const int row = i / (kHeadDim / 8), part = i % (kHeadDim / 8), bytes = first + row < end ? 16 : 0;
        ptx::copy_async_16(sTile.address(row * (kPitch / 8) + part), gRows.address((first + row) * stride + part * 8),
                           bytes);
    }
}

// One row's running maximum and sum; each of the kParts threads that share the row has a copy.
struct RowState {
    float max = -INFINITY, sum = 0.0f;
};
// S row -> P row; O row corrected to the new maximum. Thread `part` takes every kParts-th element; the first `seen`
// keys count.
template <int kParts>
TILE_DEVICE void softmax_row(const WmmaTiles& t, RowState& state, int row, int part, int seen, float scale_log2) {
    float s[kTileKv / kParts], new_max = state.max, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kTileKv / kParts; c++) {
        s[c] = part + kParts * c < seen ? t.sS[row * kPitchS + part + kParts * c] * scale_log2 : -INFINITY;
        new_max = fmaxf(new_max, s[c]);
    }
    // m = max(m_old, max S), P = exp(S − m), l = l · exp(m_old − m) + Σ P, O likewise
    new_max = warp::max<kParts>(new_max);
    const float base = finite_max(new_max), correction = ptx::exp2(state.max - base);
#pragma unroll
    for (int c = 0; c < kTileKv / kParts; c++) {
        const float p = ptx::exp2(s[c] - base);
        t.sP[row * kPitchP + part + kParts * c] = from_float<Element>(p);
        sum += p;
    }
    state.max = new_max;
    state.sum = state.sum * correction + warp::sum<kParts>(sum);
    if (correction != 1.0f)  // the maximum has grown: rare after the first tiles
        for (int d = part; d < kHeadDim; d += kParts) t.sO[row * kPitchO + d] *= correction;
}

// O / l and the LSE of one row to global memory.
template <int kParts>
TILE_DEVICE void write_row(const WmmaTiles& t, const RowState& state, int i, int part, const AttentionArgs& args,
                           const Head<Element>& head, int row) {
    if (row >= args.seqlen_q) return;
    const float inverse = state.sum > 0.0f ? 1.0f / state.sum : 0.0f;
    for (int d = part * 8; d < kHeadDim; d += kParts * 8) {
        Vector16 out;
#pragma unroll
        for (int w = 0; w < 4; w++)
            out.word[w] =
                pack<Element>(t.sO[i * kPitchO + d + 2 * w] * inverse, t.sO[i * kPitchO + d + 2 * w + 1] * inverse);
        (head.gO + (row * args.o_strides.row + d)).template as<Vector16>()[0] = out;
    }
    if (part == 0) head.gLse[row] = (state.max + ptx::log2(state.sum)) * kLn2;
}

namespace warp {

// S tile (16 × 16 at row m, key n) = Q Kᵀ
TILE_DEVICE void score_tile(const WmmaTiles& t, int m, int n) {
    wmma::Accumulator<Element> acc_s;
    wmma::zero(acc_s);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
        wmma::A<Element> q;
        wmma::BTransposed<Element> k;
        wmma::load(q, t.sQ, m * kPitch + d, kPitch);
        wmma::load(k, t.sK, n * kPitch + d, kPitch);
        wmma::mma(acc_s, q, k);
    }
    wmma::store(t.sS, m * kPitchS + n, kPitchS, acc_s);
}
// O tile (16 × 16 at row m, column n) += P V
TILE_DEVICE void output_tile(const WmmaTiles& t, int m, int n) {
    wmma::Accumulator<Element> acc_o;
    wmma::load(acc_o, t.sO, m * kPitchO + n, kPitchO);
#pragma unroll
    for (int j = 0; j < kTileKv; j += 16) {
        wmma::A<Element> p;
        wmma::B<Element> v;
        wmma::load(p, t.sP, m * kPitchP + j, kPitchP);
        wmma::load(v, t.sV, j * kPitch + n, kPitch);
        wmma::mma(acc_o, p, v);
    }
    wmma::store(t.sO, m * kPitchO + n, kPitchO, acc_o);
}

}  // namespace warp
