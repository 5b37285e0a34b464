// Softmax steps for tiles that every row sees whole, in which O is left alone unless a row's reference has to move.
//
// The online softmax exponentiates against m, a row's maximum so far. Nothing in O / l needs m to be the maximum: any
// reference does, as long as no exponential overflows and not all of them vanish. So the reference may stand while the
// maximum creeps past.
#pragma once
#include "tile/softmax.cuh"

namespace warp {

// P = 2^(S · scale − m) in place of S, and this lane's sums of it.
template <int kSize>
TILE_DEVICE void exponentiate(float (&acc_s)[kSize], float (&sum)[2], const RowState& state, float scale_log2) {
    float part[2][2] = {};  // even and odd columns: two chains of additions per row
#pragma unroll
    for (int i = 0; i < kSize; i++) {
        acc_s[i] = ptx::exp2(ptx::mad(acc_s[i], scale_log2, -state.max[i / 2 % 2]));
        part[i / 2 % 2][i % 2] += acc_s[i];
    }
    sum[0] = part[0][0] + part[0][1];
    sum[1] = part[1][0] + part[1][1];
}

// The standard softmax, to the bit: but where no lane of the warp meets a larger value than its row had, no lane has to
// ask the others, and c = 1. True if O is to be multiplied with the correction.
template <int kLift, int kSize>
TILE_DEVICE bool standing_softmax(float (&acc_s)[kSize], float (&correction)[2], RowState& state, float scale_log2) {
    float top[2], sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float even = acc_s[2 * h], odd = acc_s[2 * h + 1];
#pragma unroll
        for (int n = 1; n < kSize / 4; n++) {
            even = fmaxf(even, acc_s[4 * n + 2 * h]);
            odd = fmaxf(odd, acc_s[4 * n + 2 * h + 1]);
        }
        top[h] = fmaxf(even, odd);
    }
    const bool grew = ptx::any(top[0] * scale_log2 - kLift > state.max[0] ||
                               top[1] * scale_log2 - kLift > state.max[1]);
    if (grew) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float max = fmaxf(state.max[h], row_max(top[h]) * scale_log2 - kLift);
            correction[h] = ptx::exp2(state.max[h] - max);
            state.max[h] = max;
            state.sum[h] *= correction[h];
        }
    }
    exponentiate(acc_s, sum, state, scale_log2);
    state.sum[0] += sum[0];
    state.sum[1] += sum[1];
    return grew;
}

// The lazy softmax: no maximum at all. The sum of the tile's exponentials, which l needs anyway, is the witness that
// the reference still serves; it takes the 64 comparisons and the shuffles off the path between the two products.
//
// Why it is right for scores up to 2^24 in base 2 (|q · k · scale · log2 e|, natural logits up to 1.1e7):
// - The reference is a float32 and S · scale is exact within the multiply-add, so the reference stands up to half a
//   unit in its last place away from the score that it was made from: half a power of two at 2^24. Nothing is lost by
//   that, for P, l and O are all relative to the reference as it is. Above 2^24 the distance doubles with every power
//   of two: 16-bit P overflows from about 2^28 on, and at 2^31 every p is 0 or infinity. That holds for the standard
//   softmax too, whose maximum is rounded in the same way. The bound is tested.
// - Every p is 2^x ≥ 0, so no p exceeds its lane's sum. If no sum of the warp exceeds kWitness = 2^8, each p ≤ 2^8: P
//   fits fp16, l grows by at most 2^8 per tile (2^32 after 2^24 tiles), and nothing is missing from O or l.
// - If one does, the row's largest p tells how far the score rose. Below kRecoverable all p of the row are finite and
//   exact to float32; the reference moves up by log2 p, and P, l and O are multiplied by 1 / p ≥ 2^−100, a normal
//   number. It is computed from the rounded references, so that old and new terms stay in proportion.
// - Above kRecoverable (a jump of more than 2^100, or infinity; also a row that has seen no key yet, whose reference
//   −inf makes every p infinite) the exponentials tell nothing: S is computed again from Q and K, and the standard step
//   follows.
// - The reference is always the score of some key, to rounding, so l > 1/2, and a p that underflows is below 2^−125 of
//   l. A correction that underflows belongs to a jump of more than 2^126, whose old terms are as far below the new.
// What it costs: the largest p of a row is up to 2^8 instead of 1. Rounded to 16 bits it is then off by up to half a
// last place, where 1 is exact; that shows only in rows that one key dominates, and the lower the witness the less such
// a row can be: what a p of 2^8 leaves to the other keys is already as much as that rounding. And |V| must leave room
// for 2^8 below float32's largest.
//
// P in FP8 (kLift = 3): the reference stands 2^3 below the first maximum, since e4m3 has few values below 1 (the
// smallest is 2^−9), and the witness is 448, its largest: then no p saturates. A row of equal scores has lane sums of
// at most 2^3 · keys of a tile / 4, which for up to 224 keys stays below. l > 2^2 there, and all else is as above.
constexpr float kRecoverable = 1.2676506002e30f;  // 2^100

// Does the reference no longer serve one of this lane's rows, of whose exponentials these are its sums?
template <int kWitness> TILE_DEVICE bool overflows(const float (&sum)[2]) {
    return !(fmaxf(sum[0], sum[1]) <= float(kWitness));
}
// P and its sums, and whether the reference no longer serves some row of the warp: then `raise` has to follow.
template <int kWitness, int kSize>
TILE_DEVICE bool lazy_softmax(float (&acc_s)[kSize], float (&sum)[2], const RowState& state, float scale_log2) {
    exponentiate(acc_s, sum, state, scale_log2);
    return ptx::any(overflows<kWitness>(sum));
}
TILE_DEVICE void add_sums(RowState& state, const float (&sum)[2]) {
    state.sum[0] += sum[0];
    state.sum[1] += sum[1];
}
// The reference moves up: P in place, l, and the correction that O is to be multiplied with. again(acc_s) makes S once
// more.
template <int kLift, int kSize, class Again>
TILE_DEVICE void raise(float (&acc_s)[kSize], float (&sum)[2], float (&correction)[2], RowState& state,
                       float scale_log2, Again again) {
    float top[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kSize; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], acc_s[i]);
    top[0] = row_max(top[0]);
    top[1] = row_max(top[1]);
    if (ptx::any(!(fmaxf(top[0], top[1]) < kRecoverable))) {
        again(acc_s);
        return online_softmax<kLift>(acc_s, correction, state, scale_log2);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float max = top[h] > float(1 << kLift) ? state.max[h] + (ptx::log2(top[h]) - kLift) : state.max[h];
        correction[h] = ptx::exp2(state.max[h] - max);
        state.max[h] = max;
        state.sum[h] = (state.sum[h] + sum[h]) * correction[h];
    }
    scale_rows(acc_s, correction);
}

}  // namespace warp
