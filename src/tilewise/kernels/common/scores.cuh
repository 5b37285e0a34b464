// What is done to scores on their way from S = Q Kᵀ to the softmax's state: scale, softcap, ALiBi, window and sink.
//
// Prefill and decode carry these options as one value, and only the functions here apply them: an option that is added
// here reaches every kernel. Scores are in base 2, so that the softmax exponentiates by exp2.
// tilewise.gpu.abi.ScoreArgs is the mirror of Scores in Python; it makes the base-2 factors.
#pragma once
#include "tile/keys.cuh"
#include "tile/softmax.cuh"

// The largest score of a row that has seen no key, where it must be finite: any finite score is above it.
constexpr float kLowest = -3.402823466e38f;

struct Scores {
    const float* sinks;    // (query heads,) natural; null for none
    const float* slopes;   // ALiBi: (sequences or 1, query heads) natural; null for none
    int64_t slopes_batch;  // elements from one sequence's slopes to the next
    int left, right;       // the window: keys seen before and after a row's own position, kFar for no limit
    float scale_log2;
    float softcap_in, softcap_out;  // the softcap: softcap_out · tanh(S · softcap_in), softcap_in for tanh_from_log2
    int chunk;             // decode, where Rule::kChunked: positions of a block that no row sees out of

    // Of the keys of a span, those that a row at `position` sees
    TILE_DEVICE Keys keys_at(int position, Span span) const { return ::keys_at(position, left, right, span); }
    // Does every row see all keys before its own?
    TILE_DEVICE bool sees_back_to_first() const { return left >= kFar; }

    // What ALiBi subtracts per key of distance
    TILE_DEVICE float slope(int64_t sequence, int head) const {
        return kLog2e * Global<const float>{slopes}[sequence * slopes_batch + head];
    }

    // A head's sink joins a row's softmax as the score of a key without a value: max and sum change, and what the row's
    // O is to be multiplied with is returned. max must be finite, kLowest for a row without keys.
    TILE_DEVICE float join_sink(int head, float& max, float& sum) const {
        const float sink = Global<const float>{sinks}[head] * kLog2e, top = fmaxf(max, sink);
        const float weight = ptx::exp2(max - top);
        sum = sum * weight + ptx::exp2(sink - top);
        max = top;
        return weight;
    }
};

// tanh of a score times the softcap's inner factor; the outer factor is left to the caller.
// kFine: of float32 inputs
template <bool kFine = false> TILE_DEVICE float soft_capped(float s, float in) {
    return warp::tanh_from_log2<kFine>(ptx::multiply(s, in));
}

// What is done to scores, known at compile time. kAnyScale: the scale may be 0 or negative, so that S has to be
// multiplied by it before a maximum is taken.
template <bool kSoftcap, bool kAlibiBias, bool kAnyScale> struct ScoreRule<kSoftcap, kAlibiBias, kAnyScale> {
    static constexpr bool kAlibi = kAlibiBias;
    static constexpr bool kChunked = false;
    static constexpr bool kLinear = !kSoftcap;  // S is multiplied, and nothing else happens before the bias
    // Is S made a base-2 logit before the softmax? Else the scale goes into the exponential's multiply-add.
    static constexpr bool kChanges = kSoftcap || kAlibiBias || kAnyScale;

    // What S is multiplied by first: the scale, or the softcap's inner factor, which contains it
    static TILE_DEVICE float first_factor(const Scores& scores) {
        return kSoftcap ? scores.softcap_in : scores.scale_log2;
    }
    // What it is multiplied by in the end: the softcap's outer factor, or else what was left to be multiplied
    static TILE_DEVICE float last_factor(const Scores& scores, float factor) {
        return kSoftcap ? scores.softcap_out : factor;
    }
    // A fragment of S into base-2 logits. in: first_factor and whatever else S has to be multiplied with
    template <bool kFine = false, int kSize>
    static TILE_DEVICE void apply(float (&acc_s)[kSize], const Scores& scores, float in) {
#pragma unroll
        for (int i = 0; i < kSize; i++)
            acc_s[i] = kSoftcap ? scores.softcap_out * soft_capped<kFine>(acc_s[i], in) : acc_s[i] * in;
    }
    // Of that, what is not a factor: last_factor is left to the caller
    template <bool kFine = false, int kSize>
    static TILE_DEVICE void apply_inner(float (&acc_s)[kSize], float in) {
        if constexpr (kSoftcap)
#pragma unroll
            for (int i = 0; i < kSize; i++) acc_s[i] = soft_capped<kFine>(acc_s[i], in);
    }
};

// With one more flag, in decode alone: rows keep to blocks of positions.
template <bool kSoftcap, bool kAlibiBias, bool kAnyScale>
struct ScoreRule<kSoftcap, kAlibiBias, kAnyScale, true> : ScoreRule<kSoftcap, kAlibiBias, kAnyScale> {
    static constexpr bool kChunked = true;
};

// What becomes of the scores of a row over neighbouring keys, where that is a line: s · factor + (base + step · d), d
// keys on from the one that base is for.
struct Line {
    float factor, step, base;
};
// Where the keys of a block lie, seen from the rows: some on either side, none after a row's own position, all after it
enum Side : int { kAround, kBefore, kAfter };
template <int kSide> struct SideConstant {
    static constexpr int kValue = kSide;
};

namespace warp {

// Row h of a lane's fragment, less ALiBi's slope per key between the row's position and the key. key0: the key of the
// tile's first column
template <int kSize> TILE_DEVICE void add_alibi(float (&acc_s)[kSize], int h, int key0, int position, float slope) {
    const float distance = float(position - key0 - fragment_column());
#pragma unroll
    for (int j = 0; j < kSize / 2; j++) {  // j = 2n + i
        float& x = acc_s[j / 2 * 4 + 2 * h + j % 2];
        x = ptx::mad(-slope, fabsf(distance - float(j / 2 * 8 + j % 2)), x);
    }
}

// The column of a fragment that its rows' lines begin at: the one next to the rows' own positions. From there step · d
// has the sign of base where both are of a distance, so that they cannot cancel, however large the slope is.
template <int kSide, int kSize> constexpr int kLineBegin = kSide == kBefore ? kSize / 4 * 8 - 7 : 0;
// How far on from there value i of a fragment is
template <int kSide, int kSize> TILE_DEVICE float along_line(int i) {
    return float(i / 4 * 8 + i % 2 - kLineBegin<kSide, kSize>);
}
// The two rows of a lane's fragment, each on its line
template <int kSide, int kSize> TILE_DEVICE void follow_lines(float (&acc_s)[kSize], const Line (&lines)[2]) {
#pragma unroll
    for (int i = 0; i < kSize; i++) {
        const Line& line = lines[i / 2 % 2];
        acc_s[i] = ptx::mad(acc_s[i], line.factor, ptx::mad(line.step, along_line<kSide, kSize>(i), line.base));
    }
}
// P = 2^S in place of S, and this lane's sums of it
template <int kSize> TILE_DEVICE void exponentiate(float (&acc_s)[kSize], float (&sum)[2]) {
    float part[2][2] = {};  // even and odd columns
#pragma unroll
    for (int i = 0; i < kSize; i++) {
        acc_s[i] = ptx::exp2(acc_s[i]);
        part[i / 2 % 2][i % 2] += acc_s[i];
    }
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
}

}  // namespace warp
