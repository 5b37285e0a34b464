// schedule_transpose: bits of queries × keys become bits of keys × queries, a warp a square of 32 × 32.
#include "common/schedule.cuh"

constexpr int kThreads = 256;

struct TransposeArgs {
    const uint32_t *bits, *whole;          // (patterns, rows, words); whole or null
    uint32_t *turned_bits, *turned_whole;  // (patterns, cols, turned_words)
    int patterns, rows, cols, words, turned_words;
};

// The square of bits of which each lane has a row, transposed
TILE_DEVICE uint32_t transpose_square(uint32_t word, int lane) {
    uint32_t turned = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const uint32_t column = ptx::ballot(word >> i & 1);
        turned = lane == i ? column : turned;
    }
    return turned;
}

extern "C" __global__ void __launch_bounds__(kThreads) schedule_transpose(const __grid_constant__ TransposeArgs a) {
    const int lane = threadIdx.x % 32;
    const uint32_t square = blockIdx.x * uint32_t(kThreads / 32) + threadIdx.x / 32;
    const uint32_t turned_word = square % uint32_t(a.turned_words), rest = square / uint32_t(a.turned_words);
    const uint32_t word = rest % uint32_t(a.words), pattern = rest / uint32_t(a.words);
    if (pattern >= uint32_t(a.patterns)) return;
    const int row = turned_word * 32 + lane, col = word * 32 + lane;
    const int64_t from = (int64_t(pattern) * a.rows + row) * a.words + word;
    const int64_t to = (int64_t(pattern) * a.cols + col) * a.turned_words + turned_word;
    const uint32_t kept = transpose_square(row < a.rows ? uint32_t(Global<const uint32_t>{a.bits}[from]) : 0, lane);
    if (col < a.cols) Global<uint32_t>{a.turned_bits}[to] = kept;
    if (!a.whole) return;
    const uint32_t whole = transpose_square(row < a.rows ? uint32_t(Global<const uint32_t>{a.whole}[from]) : 0, lane);
    if (col < a.cols) Global<uint32_t>{a.turned_whole}[to] = whole;
}
