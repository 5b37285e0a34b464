// Which keys a query row sees. Prefill, decode and the ladder all ask here, row by row, block by block and mask by
// mask.
//
// Rows and keys are aligned at the bottom right: the last query token of a sequence stands at its last key. A window
// lets a row see `left` keys before its own position and `right` keys after it; causal attention is right = 0.
#pragma once
#include "tile/mma.cuh"

constexpr int kFar = 0x3fffffff;  // a side of a window without a limit; also more than the longest sequence

// Keys, or blocks of keys, [begin, end)
struct Span {
    int begin, end;
};

// The `count` keys from `first` on: what a mask needs to know of a row
struct Visible {
    int first, count;
    TILE_DEVICE bool has(int key) const { return uint32_t(key - first) < uint32_t(count); }
};

// The keys [first, last] that a row sees; none if last < first. By their last rather than their end: the Hopper forward
// then needs a register less.
struct Keys {
    int first, last;
    TILE_DEVICE Visible visible() const {
        const int count = last - first + 1;
        return {first, count > 0 ? count : 0};
    }
};

// The position of query token `token` among the keys. By reference, here and in keys_up_to: lengths that are a kernel's
// arguments are then loaded where they are used, which takes the fewest registers.
TILE_DEVICE int position_of(int token, const int& seqlen_q, const int& seqlen_k) { return token + seqlen_k - seqlen_q; }

// Of the keys of a span, those that a row at `position` sees
TILE_DEVICE Keys keys_at(int position, int left, int right, Span span) {
    const int first = position - left, last = position + right;
    return {first > span.begin ? first : span.begin, last < span.end - 1 ? last : span.end - 1};
}

// The same without a window, as the number of keys from the first on; may be 0 or less
TILE_DEVICE int keys_up_to(int position, const int& causal, const int& seqlen_k) {
    const int end = position + 1;
    return causal && end < seqlen_k ? end : seqlen_k;
}

// Blocks of kBlock keys, for the rows of a tile, of which only the first and the last are asked: what rows see moves on
// from row to row, never back.
// The blocks [begin, end) in which some row sees some key; [0, 0) if none does
template <int kBlock> TILE_DEVICE Span blocks_met(Keys first_row, Keys last_row) {
    const bool none = last_row.last < first_row.first;
    return {none ? 0 : first_row.first / kBlock, none ? 0 : last_row.last / kBlock + 1};
}
// The blocks [begin, end) that every row sees whole; none if end ≤ begin
template <int kBlock> TILE_DEVICE Span blocks_whole(Keys first_row, Keys last_row) {
    const int least = first_row.last + 1;
    return {(last_row.first + kBlock - 1) / kBlock, least > 0 ? least / kBlock : 0};
}

namespace warp {

// S = −inf in row h of a lane's fragment (mma.cuh) where the row does not see the key. key0: the key of the tile's
// first column; column: the lane's first.
template <int kSize>
TILE_DEVICE void mask_row(float (&acc_s)[kSize], int h, int key0, Visible seen, int column = fragment_column()) {
    const int before = key0 + column - seen.first;
#pragma unroll
    for (int j = 0; j < kSize / 2; j++)  // j = 2n + i
        if (uint32_t(before + j / 2 * 8 + j % 2) >= uint32_t(seen.count)) acc_s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
}
// The same where rows see every key before `end`: half of the values to compare with.
template <int kSize> TILE_DEVICE void mask_row_from(float (&acc_s)[kSize], int h, int key0, int end) {
    const int seen = end - key0 - fragment_column();
#pragma unroll
    for (int j = 0; j < kSize / 2; j++)  // j = 2n + i
        if (j / 2 * 8 + j % 2 >= seen) acc_s[j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
}

}  // namespace warp
